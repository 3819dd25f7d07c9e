"""Layout inference rules that several tile ops use: deriving one fragment's layout from another's."""

from __future__ import annotations

from typing import Any

from tilelang.ir import Buffer, Region, FRAGMENT
from tilelang.layout import Fragment
from tilelang.layout.mode import REGISTER, Mode


def carried(lay: Fragment, shape: tuple[int, ...]) -> Fragment | None:
    """The layout `lay` for a tile of `shape`, which may differ from its shape in unit dimensions only; else None."""
    if tuple(lay.shape) == tuple(shape):
        return lay
    kept = [d for d, n in enumerate(lay.shape) if n != 1]
    if [lay.shape[d] for d in kept] != [n for n in shape if n != 1]:
        return None
    modes = iter([lay.modes[d] for d in kept])
    return Fragment(shape, [next(modes) if n != 1 else () for n in shape], replicate=lay.copies, threads=lay.threads)


def spread(lay: Fragment, dim: int, shape: tuple[int, ...], vector: int) -> Fragment | None:
    """The layout of a tile of `shape` whose reduction along dim has the layout `lay`, without values that change threads.

    The threads that hold copies of a row's result hold its elements, up to two vectors in turn: 4 threads of a row that read 16
    bytes then use all banks of two swizzled rows.  None where the elements do not divide among the threads.
    """
    rows = carried(lay, tuple(n for d, n in enumerate(shape) if d != dim))
    if rows is None or shape[dim] % rows.replicas:
        return None
    each = shape[dim] // rows.replicas
    run = 2 * vector
    while each % run:
        run //= 2
    modes = [tuple(Mode(m.size, m.to, m.stride * (each if m.to == REGISTER else 1)) for m in digits) for digits in rows.modes]
    own = (Mode(each // run, REGISTER, run), *rows.copies, Mode(run, REGISTER, 1))
    return Fragment(shape, (*modes[:dim], own, *modes[dim:]), threads=rows.threads)


def same_layout(a: Region, b: Region, known: Any) -> dict[Buffer, Any]:
    """For two whole fragments accessed element by element: gives the one without a layout the layout of the other."""
    if a.buffer.scope_name != FRAGMENT or b.buffer.scope_name != FRAGMENT or not (a.is_full and b.is_full):
        return {}
    la, lb = known.get(a.buffer), known.get(b.buffer)
    if (la is None) == (lb is None):
        return {}
    have, want = (la, b.buffer) if lb is None else (lb, a.buffer)
    lay = carried(have, want.shape)
    return {} if lay is None else {want: lay}
