"""How far two correct results of one call may differ when they were computed in different orders.

Each result lies within the error bound of its function's docstring, so two of them differ by at most twice that bound. The sum
of the magnitudes of products, sum |a||b|, is bounded by the lengths of the row and the column: |a| |b|.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import cache
from math import ceil
from typing import Any, NamedTuple

import numpy as np

from .arrays import is_numpy, type_name

U = 2.0**-24
# Element type -> (relative and absolute rounding error, largest finite number).
ROUNDING = {"float16": (2.0**-11, 2.0**-25, 65504.0), "bfloat16": (2.0**-8, 2.0**-134, 3.3895314e38),
            "float32": (U, 2.0**-150, 3.4028235e38), "float64": (2.0**-53, 0.0, 1.7976931348623157e308),
            "float8_e4m3fn": (2.0**-4, 2.0**-10, 448.0), "float8_e5m2": (2.0**-3, 2.0**-17, 57344.0)}
_SLOPE = 1.13  # largest slope of relu, both forms of gelu, and silu
_FEW = 16 * U  # relative error that an epilogue adds to its terms
_PIECE = 1 << 23  # elements that are compared at a time


def wide(x: Any) -> Any:
    """The tensor converted to float64."""
    if is_numpy(x):
        return x.astype(np.float64)
    return (x.float() if x.itemsize == 1 else x).double()


def _chunks(x: Any, axis: int) -> Iterator[slice]:
    """Slices that divide a dimension into chunks of about _PIECE elements of the tensor."""
    n = x.shape[axis]
    step = max(1, _PIECE * n // max(1, int(np.prod([int(d) for d in x.shape]))))
    for at in range(0, n, step):
        yield slice(at, at + step)


def _joined(chunks: list[Any]) -> Any:
    return np.concatenate(chunks, -1) if is_numpy(chunks[0]) else sys.modules["torch"].cat(chunks, -1)


def lengths(x: Any, along: int, scales: Callable[[slice], Any] | None = None) -> Any:
    """The Euclidean lengths, in float64, of the rows (along=-1) or columns (along=-2) of a matrix or a batch of matrices.

    scales: a function from a slice of rows or columns to the factors of their elements, in the same shape.
    """
    across = -3 - along
    out = []
    for chunk in _chunks(x, across):
        w = wide(x[..., chunk, :] if across == -2 else x[..., chunk])
        w = w if scales is None else w * scales(chunk)
        out.append((w * w).sum(along) ** 0.5)
    return _joined(out)


@np.errstate(all="ignore")
def within(x: Any, y: Any, bound: Callable[[slice], Any]) -> bool:
    """Whether two tensors differ by no more than `bound` plus the rounding of both to their type.

    bound: a function from a slice of the next to last dimension to the largest difference. Where it is not finite, any values
    are accepted. Where it is finite, both values are NaN or neither is, and values too large for the type count as its largest
    number. Integers must be equal.
    """
    if type_name(x) not in ROUNDING:
        return bool((x == y).all())
    relative, absolute, most = ROUNDING[type_name(x)]
    for chunk in _chunks(x, -2):
        v, w = wide(x[..., chunk, :]), wide(y[..., chunk, :])
        limit = bound(chunk)
        none = (v != v) & (w != w) | (limit != limit) | (abs(limit) == float("inf"))
        v, w = v.clip(-most, most), w.clip(-most, most)
        near = abs(v - w) <= limit + relative * abs(v) + relative * abs(w) + 2 * absolute
        if not bool((near | none).all()):
            return False
    return True


class Accumulation(NamedTuple):
    """How a GEMM accumulates: the number of terms, the kind of operands, whether in two levels, whether with block scaling."""

    k: int
    kind: str
    two_level: bool = False
    blocks: bool = False


def gemms_agree(how: Accumulation, a: Any, b: Any, along: tuple[int, int], bias: Any = None,
                scales: tuple[Any, Any] = (None, None)) -> Callable[[Any, Any], bool]:
    """A function f(x, y) that tells whether two results of a GEMM (library/gemm/matmul.py) may both be correct.

    along: the dimensions of a and b that hold k. scales: one factor for each operand, or with how.blocks one for each 128
    elements of a row of op(a) and one for each 128 x 128 block of op(b). If b has groups in front, the largest group counts.
    """
    k, kind, two_level, blocks = how
    u = 2.0**-53 if type_name(a) == "float64" else U
    low = {"tf32": 2.0**-10, "fp8": 2.0**-11 if two_level else max(2.0**-11, k / 32 * 2.0**-13)}.get(kind, 0.0)
    sums = 0.0 if kind == "int8" else k * u + low

    def of_rows(chunk: slice) -> Any:
        s = _repeated(wide(scales[0][chunk]), k)
        return s if along[0] == -1 else s.T

    def of_columns(chunk: slice) -> Any:
        first, last = chunk.start // 128, ceil(min(chunk.stop, b.shape[-3 - along[1]]) / 128)
        s = _repeated(_repeated(wide(scales[1][first:last]), k).T, 128 * (last - first)).T
        s = s[chunk.start - 128 * first:][:min(chunk.stop, b.shape[-3 - along[1]]) - chunk.start]
        return s if along[1] == -1 else s.T

    @cache
    def sums_of_magnitudes() -> tuple[Any, Any, Any]:
        """The lengths of rows and of columns, whose products bound the sums, and the magnitude of the bias."""
        rows = lengths(a, along[0], of_rows if blocks else None)
        columns = lengths(b, along[1], of_columns if blocks else None)
        if columns.ndim > rows.ndim:  # b has groups
            columns = columns.max(0) if is_numpy(columns) else columns.amax(0)
        if scales[0] is not None and not blocks:
            rows = rows * abs(wide(scales[0]).reshape(-1)[0] * wide(scales[1]).reshape(-1)[0])
        return rows, columns, 0.0 if bias is None else abs(wide(bias))

    def agree(x: Any, y: Any) -> bool:
        rows, columns, added = sums_of_magnitudes()

        def bound(chunk: slice) -> Any:
            total = rows[..., chunk, None] * columns[..., None, :]
            return 2 * _SLOPE * (sums * total + _FEW * (total + added))

        return within(x, y, bound)

    return agree


def _repeated(x: Any, count: int) -> Any:
    """The matrix with each column repeated 128 times, cut to `count` columns."""
    return (np.repeat(x, 128, -1) if is_numpy(x) else x.repeat_interleave(128, -1))[:, :count]


def attention_agrees(q: Any, k: Any, v: Any, scale: float, seq_k: int) -> Callable[[tuple[Any, ...], tuple[Any, ...]], bool]:
    """A function f(x, y) that tells whether two results of attention, (output, logarithms or None), may both be correct."""
    half, tf32 = type_name(q) == "float16", type_name(q) == "float32"  # only GPUs are tuned, which multiply float32 in tf32
    eps = 2.0**-9 if tf32 else ROUNDING[type_name(q)][0]

    def largest(x: Any) -> float:
        """The largest finite magnitude. Elements that no query reads may hold anything."""
        x = abs(x)[abs(x) < float("inf")]
        return float(x.max()) if x.shape[0] else 0.0

    def longest(x: Any) -> float:
        return largest(lengths(x.reshape(-1, x.shape[-1]), -1))

    @cache
    def limits() -> tuple[float, float]:
        """(largest difference of results, largest difference of logarithms)."""
        scores = 2 * (q.shape[-1] * U + (2.0**-9 if tf32 else 0.0)) * scale * longest(q) * longest(k)
        weights = 2 * eps + scores + 2.0**-18 + (2.0**-25 * seq_k if half else 0.0)
        flat = v.reshape(-1, v.shape[-1])
        values = max(largest(wide(flat[chunk])) for chunk in _chunks(flat, 0))
        return 2 * values * weights, 2 * (weights + 8 * U)

    @np.errstate(all="ignore")
    def agree(x: tuple[Any, ...], y: tuple[Any, ...]) -> bool:
        limit, of_logs = limits()
        good = within(x[0], y[0], lambda chunk: limit)
        if not good or x[1] is None:
            return good
        logs = [t.reshape(-1, t.shape[-1]) for t in (x[1], y[1])]
        same = logs[0] == logs[1]
        near = abs(wide(logs[0]) - wide(logs[1])) <= of_logs + 4 * U * abs(wide(logs[0]))
        return bool((same | near).all())

    return agree
