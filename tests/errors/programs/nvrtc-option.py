from unittest import mock

from tilelang.runtime import nvrtc


class Refusing:
    """An NVRTC that knows no option: the text must not depend on the installed version."""

    includes = ()

    def compile(self, source, options):
        return 5, "nvrtc: error: unrecognized option --vectorise-all found", b""


with mock.patch.object(nvrtc, "choose_nvrtc", lambda arch, driver: Refusing()):
    nvrtc.compile_cubin('extern "C" __global__ void k(float* a) {}', "sm_80", ["--vectorise-all"])
