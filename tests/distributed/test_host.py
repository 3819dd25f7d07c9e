"""What kernels are told of the ranks, and what the host says of a kernel that has stopped."""

import ctypes
import struct
from types import SimpleNamespace

import pytest

from tilelang.distributed import host
from tilelang.errors import TileLangError
from tilelang.runtime import world

WORLD = world.World(1, 3, 1 << 40, 1 << 30, (-4096, 0, 4096), 10**9, 1 << 20)


class Driver:
    """A driver that keeps what is copied to the constant of a module."""

    def __init__(self):
        self.copied = b""

    def call(self, name, *args):
        if name == "cuMemHostAlloc":
            self.words = ctypes.create_string_buffer(b"\1" * 48, 48)
            args[0]._obj.value = ctypes.addressof(self.words)
        elif name == "cuModuleGetGlobal_v2":
            args[0]._obj.value, args[1]._obj.value = 4096, len(WORLD.packed())
            assert args[3] == b"tl_world"
        else:
            assert name == "cuMemcpyHtoD_v2" and args[0].value == 4096
            self.copied = ctypes.string_at(args[1], args[2].value)


@pytest.fixture
def alone(monkeypatch):
    monkeypatch.setattr(world, "_worlds", {})
    monkeypatch.setattr(world, "report", [])
    monkeypatch.setattr(host, "_current", [])


def test_the_constant_has_the_fields_of_the_device_struct():
    text = WORLD.packed()
    assert len(text) == 2 * 4 + 4 * 8 + world.MOST_RANKS * 8
    assert struct.unpack_from("<iiQQQQqqq", text) == (1, 3, 10**9, 1 << 40, 1 << 30, 1 << 20, -4096, 0, 4096)


def test_only_modules_that_ask_are_told_who_they_are(alone):
    driver = Driver()
    world.fill(driver, None, b"a kernel of one device", 0)
    assert driver.copied == b""
    world.enter(WORLD, 0)
    world.enter(WORLD, 0)  # the same one again
    world.fill(driver, SimpleNamespace(handle=None), b"...\0tl_world\0...", 0)
    assert driver.copied == WORLD.packed()


def test_a_process_alone_is_a_rank_of_one(alone, monkeypatch):
    """Kernels whose blocks wait for each other could not run on one device without init_dist."""
    driver = Driver()
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    world.fill(driver, SimpleNamespace(handle=None), b"tl_world", 0)
    assert struct.unpack_from("<iiQQQQq", driver.copied) == (
        0, 1, 30 * 10**9, 0, 2**64 - 1, ctypes.addressof(driver.words), 0)
    assert host.stopped() is None
    world.report[0][:] = [3, 12, 4096, 4, 3, 7]
    assert "rank 0: block 7 waited in line 12 for the signal at address 0x1000, which is 3" in str(host.stopped())
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(TileLangError, match="none of them"):
        world.fill(driver, SimpleNamespace(handle=None), b"tl_world", 0)


def test_a_process_is_one_rank_only(alone):
    world.enter(WORLD, 0)
    with pytest.raises(TileLangError, match="is a rank already"):
        world.enter(world.World(0, 3, 1 << 40, 1 << 30, (0, 4096, 8192), 10**9, 1 << 20), 0)


def test_without_ranks_there_is_no_symmetric_memory(alone):
    with pytest.raises(TileLangError) as e:
        host.rank()
    assert e.value.kind == "no-world"


@pytest.mark.parametrize("report, text", [
    ([-1, 171, 16, 1, 0, 127], "rank 0: block 127 stopped in line 171, before it had said why"),
    ([3, 12, 8, 4, 3, 7], "rank 0: block 7 waited in line 12 for the signal at byte 8 of x, which is 3"),
    ([2, 9, 0, 2, 5, 0], "rank 0: line 9 names rank 5 of 2"), ([1, 0, 0, 0, 0, 0], "is not symmetric")])
def test_a_kernel_that_stopped_says_why(alone, report, text):
    host._current.append(host._Rank(0, 2, None, None, None, report, names={0: "x", 512: "y"}))
    assert text in str(host.stopped())


def test_a_kernel_that_did_not_stop_says_nothing(alone):
    host._current.append(host._Rank(0, 2, None, None, None, [0] * 6))
    assert host.stopped() is None
