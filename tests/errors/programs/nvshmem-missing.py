from unittest import mock

from tilelang.runtime import nvshmem

with mock.patch.object(nvshmem.importlib.util, "find_spec", lambda name: None):
    nvshmem.folder.__wrapped__()
