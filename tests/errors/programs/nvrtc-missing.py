from unittest import mock

from tilelang.runtime import nvrtc

with mock.patch.object(nvrtc, "find_nvrtc", lambda: []):
    nvrtc.choose_nvrtc.__wrapped__(80, None)
