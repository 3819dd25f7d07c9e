from types import SimpleNamespace
from unittest import mock

from tilelang.runtime import nvshmem


class Linker:
    """An nvJitLink whose nvJitLinkComplete fails."""

    def __getattr__(self, name):
        return lambda *args: 6 * ("Complete" in name)


with mock.patch.multiple(nvshmem, linker_beside=lambda path: "libnvJitLink.so.13", open_library=lambda path: Linker(),
                         _functions=lambda *args: b"", folder=lambda: "nvshmem"):
    nvshmem.linked(b"", "", SimpleNamespace(path="libnvrtc.so.13", version=(13, 0)), "sm_90a", ())
