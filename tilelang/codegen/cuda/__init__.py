"""CUDA C++ for kernels in phase DEVICE. `print_kernel(kernel)` is the public function."""

from .printer import DeviceKernel, print_kernel

__all__ = ["DeviceKernel", "print_kernel"]
