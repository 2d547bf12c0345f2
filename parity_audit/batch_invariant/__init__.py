"""Batch-invariant kernels: the bits of a row depend neither on the batch's other rows nor on how a text was cut."""
