"""The ranks that run a program together, as the kernels of this process see them (codegen/cuda/prelude_ranks.cuh, World)."""

from __future__ import annotations

import ctypes
import os
import struct
from typing import Any

from tilelang.errors import error, register
from tilelang.ir.record import record

register("no-world", RuntimeError, "a kernel of several ranks in a process that is none of them",
         "call tilelang.distributed.init_dist() first, in every process", expected="ranks that have been set up")

MOST_RANKS = 64
SYMBOL = "tl_world"  # of the constant in a cubin


@record
class World:
    """This rank.  heap, nbytes: addresses of what all ranks reach.  shifts: by rank, bytes from an address here to the same
    thing there.  limit: of a wait, in nanoseconds.  report: address of 6 words of host memory for why a kernel stopped."""

    rank: int
    ranks: int
    heap: int
    nbytes: int
    shifts: tuple[int, ...]
    limit: int
    report: int

    def packed(self) -> bytes:
        """The bytes of the constant."""
        rest = (0,) * (MOST_RANKS - len(self.shifts))
        return struct.pack(f"<iiQQQQ{MOST_RANKS}q", self.rank, self.ranks, self.limit, self.heap, self.nbytes, self.report,
                           *self.shifts, *rest)


_worlds: dict[int, World] = {}  # by number of the device


def enter(world: World, device: int) -> None:
    """Set the world of a device of this process.  Raises no-world if it has another one, which its kernels may have kept."""
    if _worlds.get(device, world) != world:
        raise error("no-world", "this process is a rank already", expected="one set of ranks for a process", found="a second",
                    hint="call tilelang.distributed.init_dist() once, with a heap that is large enough")
    _worlds[device] = world


report: list[Any] = []  # of a process alone: the words that a stopped kernel writes, once a kernel has asked


def _alone(driver: Any) -> World:
    """A process that is one rank of one: all its memory is symmetric, and a wait ends after half a minute.  Raises no-world
    where torchrun has started several."""
    if _worlds or int(os.environ.get("WORLD_SIZE") or 1) > 1:
        raise error("no-world", "the kernel runs on several ranks, and this process is ‹none› of them")
    if not report:
        at = ctypes.c_void_p()
        driver.call("cuMemHostAlloc", ctypes.byref(at), ctypes.c_size_t(48), ctypes.c_uint(3))  # portable, mapped
        report.append((ctypes.c_int64 * 6).from_address(at.value or 0))
        ctypes.memset(report[0], 0, 48)
    return World(0, 1, 0, 2**64 - 1, (0,), 30 * 10**9, ctypes.addressof(report[0]))


def fill(driver: Any, module: Any, cubin: bytes, device: int) -> None:
    """Tell a module that has just been loaded on a device who this rank is, if its kernels ask.  Raises no-world."""
    if SYMBOL.encode() not in cubin:
        return
    at, size, text = ctypes.c_uint64(), ctypes.c_size_t(), (_worlds.get(device) or _alone(driver)).packed()
    driver.call("cuModuleGetGlobal_v2", ctypes.byref(at), ctypes.byref(size), module.handle, SYMBOL.encode())
    assert size.value == len(text), "the constant has another size than World.packed"
    driver.call("cuMemcpyHtoD_v2", at, text, ctypes.c_size_t(len(text)))
