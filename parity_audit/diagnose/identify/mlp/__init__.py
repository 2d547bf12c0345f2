"""Activations, experts and their routers."""
