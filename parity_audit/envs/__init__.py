"""Isolated Python environments for backends, built with uv from recipes (data) and named by a hash of their content."""
