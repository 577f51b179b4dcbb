"""Triton Inference Server: a model on its Python backend, and repositories for that and for its TensorRT backend."""
