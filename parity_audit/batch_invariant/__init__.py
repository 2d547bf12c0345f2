"""Batch-invariant kernels: the bits of a row depend neither on the other rows of its batch nor on how a text was cut."""
