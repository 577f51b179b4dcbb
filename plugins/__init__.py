"""CUDA kernels, their NVRTC build, and the C++ TensorRT plugins around them."""
