"""Norms of the stream and of queries and keys: kind, weight, eps, size, arithmetic, place."""
