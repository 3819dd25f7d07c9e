"""What to say of shared buffers that exceed what a block of the target has."""

from __future__ import annotations

from collections.abc import Sequence


def taken(sizes: Sequence[tuple[str, int]], total: int) -> str:
    """The note of an error: the bytes of the program's buffers, and what the compiler's own take of the total."""
    own, parts = total - sum(n for _, n in sizes), [f"{name} {n}" for name, n in sizes]
    if own:
        parts.append(f"{own} for staging and barriers that the compiler adds")
    return f"bytes: {', '.join(parts)}"


def tiles_that_fit(sizes: Sequence[tuple[str, int]], excess: int) -> str:
    """The hint for buffers that take `excess` bytes too many: of which size the largest fit, less by a power of two.

    sizes: names and bytes.  Those of the same size are made smaller together; where that does not suffice, all from 1 KiB on.
    For a single one also the most that it may take.
    """
    for least in (max((n for _, n in sizes), default=0), 1024):
        some = [(name, n) for name, n in sizes if n >= least]
        parts = next((p for p in (2, 4, 8, 16) if sum(n - n // p for _, n in some) >= excess), 0)
        if some and parts:
            fit = ", ".join(f"{name} of {n // parts} bytes" for name, n in some)
            most = f", at most {(some[0][1] - excess) // 128 * 128}" if len(some) == 1 else ""
            return f"use smaller tiles or fewer pipeline stages: the kernel fits with {fit}{most}"
    return "use smaller tiles or fewer pipeline stages"
