"""The warning about registers that do not suffice: which tile takes them."""

from __future__ import annotations

import os
from math import prod
from typing import Any

from tilelang.errors import register_warning, warn
from tilelang.ir import FRAGMENT, Alloc, Const, Func, Launch, walk

register_warning("spills", "a kernel keeps values in local memory because its registers do not suffice")
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
THRESHOLD = 64  # bytes a thread: below, a few values outside of the main loop


def warn_of_spills(func: Func, spills: int) -> None:
    """Warn of a kernel of this program that spills so many bytes a thread, and name its largest fragment."""
    if spills < THRESHOLD:
        return
    found = [(_registers(a.buffer, launch), a.buffer, launch) for launch in walk(func.body) if isinstance(launch, Launch)
             for a in walk(launch.body) if isinstance(a, Alloc) and a.buffer.scope_name == FRAGMENT]
    text = f"`{func.name}` spills {spills} bytes a thread"
    hint = "take smaller tiles or more threads"
    if found:
        count, buffer, launch = max(found, key=lambda f: f[0])
        if buffer.span is not None and buffer.span.file.startswith(_PACKAGE):
            return  # a kernel of the library: its user can do nothing about it
        threads = prod(launch.threads)
        shape = " x ".join(str(d) for d in buffer.shape)
        text += f": the fragment `{buffer.name}` ({shape} {buffer.dtype}) takes {count} registers of each of {threads} threads"
        hint = f"take threads={2 * threads}, or a smaller tile" if threads <= 512 else "take a smaller tile"
        warn("spills", text, hint, span=buffer.span)
        return
    warn("spills", text, hint)


def _registers(buffer: Any, launch: Launch) -> int:
    """Registers of a thread that a fragment takes, where its sizes are numbers."""
    sizes = [d.value if isinstance(d, Const) else d for d in buffer.shape]
    if not all(isinstance(d, int) for d in sizes):
        return 0
    return prod(sizes) * buffer.dtype.bits // (32 * prod(launch.threads))
