"""Benchmarks: what a step of the kernels takes on a CUDA device, beside the bytes that it must move."""
