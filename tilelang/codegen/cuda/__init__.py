"""CUDA C++ for kernels in phase DEVICE.  `print_kernel(kernel)` is the whole interface."""

from .printer import CudaPrinter, DeviceKernel, print_kernel

__all__ = ["CudaPrinter", "DeviceKernel", "print_kernel"]
