"""Layout inference rules that several tile ops use: deriving one fragment's layout from another's.

NumPy functions that the reference semantics of several tile ops use.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tilelang.errors import error, register
from tilelang.ir import FRAGMENT, Buffer, Region, dtype, numpy_dtype
from tilelang.ir.numbers import binary_function, to_dtype
from tilelang.layout import Fragment, Mode, REGISTER

register("tile-extents", ValueError, "the operands of a tile operation have different extents when it runs",
         expected="tiles of the same extents")


def fit(tile: np.ndarray, shape: tuple[int, ...], span: Any) -> np.ndarray:
    """The tile with unit dimensions inserted or removed to get `shape`.  Raises tile-extents when other dimensions differ."""
    if [n for n in tile.shape if n != 1] != [n for n in shape if n != 1]:
        raise error("tile-extents", f"a tile of extents {tile.shape} meets one of {shape}", found=f"{tile.shape} and {shape}",
                    span=span, hint="the extents that are not 1 must agree in order")
    return tile.reshape(shape)


def combine(op: str, dt: dtype, x: np.ndarray, axis: int, initial: Any) -> np.ndarray:
    """x reduced along axis (which is removed) by a Binary op of dt, starting from `initial`, as a balanced tree.

    Each operation rounds once.  A tree keeps sums of narrow floats accurate: a running sum stops growing.
    """
    fn = binary_function(op, dt)
    x = np.moveaxis(x, axis, 0)
    while len(x) > 1:
        half = len(x) // 2
        pairs = fn(x[:half], x[half:2 * half])
        x = pairs if len(x) % 2 == 0 else np.concatenate([pairs, x[2 * half:]])
    start = to_dtype(np.asarray(initial, None if dt.is_float else numpy_dtype(dt)), dt)
    return fn(x[0], start) if len(x) else np.broadcast_to(start, x.shape[1:]).copy()


def widest_mma(a: np.ndarray, b: np.ndarray, acc: dtype) -> np.ndarray:
    """a @ b (last two dimensions) for an accumulator of dtype acc, before it is added to the accumulator.

    Floats: exact multiplications accumulated in float32 (float64 for a float64 accumulator).  Integers: exact, then wrapped.
    """
    if acc.is_int:
        # float64 (and so BLAS) is exact for 8-bit operands; wider integer operands are multiplied as integers.
        if a.dtype.itemsize <= 2 and b.dtype.itemsize <= 2:
            return np.matmul(a.astype(np.float64), b.astype(np.float64)).astype(np.int64)
        return np.matmul(a.astype(np.int64), b.astype(np.int64))
    wide = np.float64 if acc.bits == 64 else np.float32
    return np.matmul(a.astype(wide), b.astype(wide))


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
