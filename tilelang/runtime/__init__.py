"""The host side of kernels: compilation with NVRTC, CUDA driver, CPU engine, host programs, disk cache."""
