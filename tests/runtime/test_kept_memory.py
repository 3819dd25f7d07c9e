"""Memory of workspaces that a device's pool keeps when the host waits for a stream."""

import ctypes

import pytest

from tilelang.runtime import workspaces


class Pool:
    """A driver whose pool keeps so many bytes."""

    def __init__(self, kept):
        self.kept, self.set = kept, []

    def call(self, name, *args):
        if name == "cuMemPoolGetAttribute":
            ctypes.cast(args[2], ctypes.POINTER(ctypes.c_uint64))[0] = self.kept
        elif name == "cuMemPoolSetAttribute":
            self.set.append((args[1], ctypes.cast(args[2], ctypes.POINTER(ctypes.c_uint64))[0]))


@pytest.mark.parametrize("kept", [0, 1 << 20, workspaces.KEPT, (1 << 64) - 1])
def test_each_wait_of_the_host_gave_the_memory_of_workspaces_back(kept):
    pool = Pool(kept)
    workspaces.keep_memory(pool)
    assert pool.set == ([(4, workspaces.KEPT)] if kept < workspaces.KEPT else [])
