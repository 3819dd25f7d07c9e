import ctypes
from types import SimpleNamespace
from unittest import mock

from tilelang.runtime import hip_driver


def text(said):
    return ctypes.CFUNCTYPE(ctypes.c_char_p, ctypes.c_int)(lambda code: said)


# A driver whose device has another architecture than the code object.
driver = SimpleNamespace(hipInit=lambda flags: 0, hipModuleLoadData=lambda module, image: 209,
                         hipGetErrorName=text(b"hipErrorNoBinaryForGpu"), hipGetErrorString=text(b"no kernel image is available"))
with mock.patch.object(hip_driver, "load_rocm", lambda: driver):
    hip_driver.HipDriver().load(b"")
