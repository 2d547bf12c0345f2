"""Compute distances, the noise floor and divergences from captures, in float64, reading tensors in chunks."""
