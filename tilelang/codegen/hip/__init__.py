"""HIP C++ for kernels in phase DEVICE. `print_kernel(kernel)` is the public function."""

from .printer import print_kernel

__all__ = ["print_kernel"]
