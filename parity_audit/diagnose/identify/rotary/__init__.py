"""Rotary embeddings: which components turn together, by which angles, from which formula, at which positions."""
