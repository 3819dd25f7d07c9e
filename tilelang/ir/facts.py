"""Facts of buffers and functions: what holds for them in all places, one record each."""

from __future__ import annotations

from typing import Any

from .options import Options, options
from .phases import TILE


@options
class BufferFacts(Options):
    """align: bytes that its address is a multiple of, 0 where nothing is known.  arrive: for each mbarrier of the buffer how
    many arrivals complete a phase, None where the program initialises them.  cluster: other CTAs arrive on it.  ordered:
    accesses need no block barriers.  zeroed: a workspace that starts with zeros.  descriptor: what a variable describes.
    """

    align: int = 0
    arrive: tuple[int, ...] | None = None
    cluster: bool = False
    ordered: bool = False
    zeroed: bool = False
    descriptor: str | None = None


@options
class FuncFacts(Options):
    """phase: TILE, THREADS_BOUND, SYNCED or DEVICE.  out_idx: parameters that the call returns.  pass_configs: options of
    passes by key, compile_flags: of the device compiler, both of this function.  may_alias: names of parameters that may share
    memory.
    """

    phase: str = TILE
    out_idx: tuple[int, ...] | int | None = None
    pass_configs: tuple[tuple[str, Any], ...] = ()
    compile_flags: tuple[str, ...] | str = ()
    may_alias: tuple[str, ...] = ()
