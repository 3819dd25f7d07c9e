"""Records of facts about buffers and functions, which hold wherever the buffer or function is used."""

from __future__ import annotations

from typing import Any

from .options import Options, options
from .phases import TILE


@options
class BufferFacts(Options):
    """Facts about a buffer.

    align: the address is a multiple of so many bytes, 0 if unknown.  arrive: for each mbarrier of the buffer the number of
    arrivals that complete a phase, None where the program initialises the mbarriers.  cluster: other CTAs arrive on them.
    ordered: accesses need no block barriers.  scratch: holds no value between operations.  zeroed: a workspace that is
    initialised with zeros.  descriptor: the kind of hardware descriptor that a variable holds.  box_width: bytes of a row of
    the swizzled boxes of a shared tile whose layout or T.tma_copy asks for other ones than the widest, 0 where it has none.
    symmetric: every rank of the program has a tensor of this shape, and the others reach it.  remote: it is another rank's.
    numbers: a warp hands numbers below this one to the others through the buffer.  im2col: the buffer is the im2col matrix
    of the image in its memory (target/im2col.py): no element of it has an address.  tf32: a float32 tile of tf32 numbers.
    """

    align: int = 0
    arrive: tuple[int, ...] | None = None
    cluster: bool = False
    ordered: bool = False
    scratch: bool = False
    zeroed: bool = False
    descriptor: str | None = None
    box_width: int | None = None
    symmetric: bool = False
    remote: bool = False
    numbers: int | None = None
    im2col: tuple[tuple[int, ...], ...] | None = None
    tf32: bool = False


@options
class FuncFacts(Options):
    """Facts about a function.

    phase: TILE, THREADS_BOUND, SYNCED or DEVICE.  out_idx: parameters that the call returns.  pass_configs: options of passes
    by key.  compile_flags: flags of the device compiler.  may_alias: names of parameters that may share memory.  chip: the chip
    with waves of 64 lanes that the program is compiled for, "" for warps of 32 lanes.
    """

    phase: str = TILE
    out_idx: tuple[int, ...] | int | None = None
    pass_configs: tuple[tuple[str, Any], ...] = ()
    compile_flags: tuple[str, ...] | str = ()
    may_alias: tuple[str, ...] = ()
    chip: str = ""
