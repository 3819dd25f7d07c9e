import ctypes
from unittest import mock

from tilelang.runtime import cuda_driver


class OutOfMemory:
    """A driver on which every allocation fails as on a full device."""

    def cuInit(self, flags):
        return 0

    def cuMemAlloc_v2(self, address, size):
        return 2

    def cuGetErrorName(self, code, text):
        ctypes.cast(text, ctypes.POINTER(ctypes.c_char_p))[0] = b"CUDA_ERROR_OUT_OF_MEMORY"

    def cuGetErrorString(self, code, text):
        ctypes.cast(text, ctypes.POINTER(ctypes.c_char_p))[0] = b"out of memory"


with mock.patch.object(cuda_driver, "load_libcuda", OutOfMemory):
    cuda_driver.Driver().call("cuMemAlloc_v2", ctypes.c_uint64(), ctypes.c_size_t(2**40))
