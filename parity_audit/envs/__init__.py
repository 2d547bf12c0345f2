"""Isolated environments: recipes as data, built with uv, named by the hash of what they are."""
