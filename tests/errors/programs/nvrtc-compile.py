from unittest import mock

from tilelang.runtime import nvrtc


class Refusing:
    """An NVRTC that refuses every source: the text must not depend on the installed version."""

    includes = ()

    def compile(self, source, options):
        return 6, 'kernel.cu(2): error: identifier "scale" is undefined', b""


with mock.patch.object(nvrtc, "choose_nvrtc", lambda arch, driver: Refusing()):
    nvrtc.compile_cubin('extern "C" __global__ void k(float* a) {\n  a[0] = scale(a[0]);\n}', "sm_80")
