"""Batch-invariant kernels for CUDA, written in Triton. Imported when the first of them is needed for a CUDA tensor."""
