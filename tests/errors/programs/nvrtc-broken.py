from unittest import mock

from tilelang.runtime import nvrtc

found = [nvrtc.NvrtcCandidate("/opt/cuda/lib64/libnvrtc.so.13", (), 13)]
with mock.patch.object(nvrtc, "find_nvrtc", lambda: found), \
        mock.patch.object(nvrtc, "load_nvrtc", lambda c: "does not load: not an ELF file"):
    nvrtc.choose_nvrtc.__wrapped__(80, None)
