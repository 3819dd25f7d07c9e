"""What to do where the registers of a kernel do not suffice: which tile takes them, and which tile or block would fit."""

from __future__ import annotations

import os
from math import prod
from typing import Any

from tilelang.errors import TileLangError, error, register_warning, warn
from tilelang.ir import FRAGMENT, Alloc, Const, Func, Launch, walk

register_warning("spills", "a kernel keeps values in local memory because its registers do not suffice")
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
THRESHOLD = 64  # bytes a thread: below, a few values outside of the main loop
_FILE, _THREAD = 65536, 255  # registers of a block, at most of a thread (CUDA C++ Programming Guide, "Compute capabilities")
_OTHERS = 64  # registers of a thread for addresses and operands: GEMMs of 128 x 128 and 128 x 256 take 40 to 80


def warn_of_spills(func: Func, spills: int) -> None:
    """Warn of a kernel of this program that spills so many bytes a thread, and name its largest fragment."""
    if spills < THRESHOLD:
        return
    told, hint, span = _largest(func)
    if span is not None and span.file.startswith(_PACKAGE):
        return  # a kernel of the library: its user can do nothing about it
    warn("spills", f"`{func.name}` spills {spills} bytes a thread{told}", hint, span=span)


def of_program(func: Func, e: TileLangError) -> TileLangError:
    """An error of the assembler about registers, at the program's largest fragment and with the tile that fits."""
    told, hint, span = _largest(func)
    return error(e.kind, e.message + told, expected=e.expected, found=e.found, span=span, hint=hint)


def _largest(func: Func) -> tuple[str, str, Any]:
    """What the largest fragment of a program takes, what to do, and the fragment's span; "" and None without fragments."""
    found = [(_registers(a.buffer, launch), a.buffer, launch) for launch in walk(func.body) if isinstance(launch, Launch)
             for a in walk(launch.body) if isinstance(a, Alloc) and a.buffer.scope_name == FRAGMENT]
    if not found:
        return "", "keep fewer values at a time: smaller T.alloc_local arrays, T.serial in place of T.unroll", None
    count, buffer, launch = max(found, key=lambda f: f[0])
    threads, others = prod(launch.threads), sum(n for n, _, of in found if of is launch) - count
    text = (f": the fragment `{buffer.name}` ({_by(buffer.shape)} {buffer.dtype}) takes {count} registers of each of "
            f"{threads} threads")
    return text, _advice(list(_sizes(buffer) or ()), count, others, threads), buffer.span


def _advice(sizes: list[int], count: int, others: int, threads: int) -> str:
    """The number of threads, or the tile, with which a fragment of these sizes leaves registers for everything else."""
    if _fits(count + others, threads) or not sizes:
        return "keep fewer values at a time: smaller T.alloc_local arrays, T.serial in place of T.unroll, or smaller tiles"
    if _fits((count + others) // 2, 2 * threads):
        return f"take threads={2 * threads}, or a smaller tile"
    start = prod(sizes)
    while not _fits((count + others) * prod(sizes) // start, threads):
        most = max(range(len(sizes)), key=lambda d: sizes[d] if sizes[d] % 2 == 0 else 0)
        if sizes[most] % 2 or sizes[most] <= 16:  # the rows of an mma instruction
            return "take smaller tiles"
        sizes[most] //= 2
    return f"take a tile of {_by(sizes)}: it takes {count * prod(sizes) // start} registers of each of {threads} threads"


def _fits(registers: int, threads: int) -> bool:
    return threads <= 1024 and registers + _OTHERS <= min(_THREAD, _FILE // threads)


def _by(sizes: Any) -> str:
    return " x ".join(str(d) for d in sizes)


def _sizes(buffer: Any) -> tuple[int, ...] | None:
    """The sizes of a buffer, where they are numbers."""
    sizes = tuple(d.value if isinstance(d, Const) else d for d in buffer.shape)
    return sizes if all(isinstance(d, int) for d in sizes) else None


def _registers(buffer: Any, launch: Launch) -> int:
    """Registers of a thread that a fragment takes, where its sizes are numbers."""
    return prod(_sizes(buffer) or (0,)) * buffer.dtype.bits // (32 * prod(launch.threads))
