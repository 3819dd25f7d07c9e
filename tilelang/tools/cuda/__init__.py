"""Tools for CUDA kernels."""
