"""Batch-invariant kernels for CUDA, written in Triton. Imported when a CUDA tensor asks for the first of them."""
