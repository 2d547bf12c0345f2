"""The cells of a matrix on many machines: one task each on a Ray cluster, cards and captures in one store that all can reach."""
