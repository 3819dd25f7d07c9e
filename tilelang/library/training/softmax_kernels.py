"""The kernels of softmax and cross-entropy over rows.

With s = log(sum(exp(x))), p = exp(x - s) and label t:
    softmax:        y = p;   dx = y (dy - sum(dy y))
    cross-entropy:  l = s - (1 - e) x_t - e mean(x) + z s^2;   dx = (p (1 + 2 z s) - (1 - e) [j = t] - e / n) dl
A row of several chunks is read once for the maximum and the sum, which are rescaled where the maximum grows, and once more.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import tilelang.language as T

from ..attention.form import LOG2E
from .rows import RowTile

_LN2 = 0.6931471805599453
_REDUCED = 4096  # rows that the block of the reduction reads at once


class SoftmaxForm(NamedTuple):
    """What a kernel is compiled for.  n: columns.  kind: type of x.  acc: in which rows are reduced."""

    n: int
    kind: str
    acc: str
    tile: RowTile

    def number(self, value: float) -> Any:
        """A constant; numbers of Python count as float32."""
        return getattr(T, self.acc)(value)

    def exp(self, x: Any) -> Any:
        """e to the power of x; in float32 by exp2, which is one instruction of a GPU."""
        return T.exp(x) if self.acc == "float64" else T.exp2(x * LOG2E)

    def log(self, x: Any) -> Any:
        return T.log(x) if self.acc == "float64" else T.log2(x) * _LN2


class EntropyForm(NamedTuple):
    """What a kernel of cross-entropy is compiled for: as SoftmaxForm.  labels: their type.  reduction: "none", "sum", "mean".
    ignored: the label of rows without a loss.  smoothing, z_loss: e and z."""

    n: int
    kind: str
    acc: str
    tile: RowTile
    labels: str
    reduction: str
    ignored: int
    smoothing: float
    z_loss: float

    @property
    def rows(self) -> SoftmaxForm:
        return SoftmaxForm(self.n, self.kind, self.acc, self.tile)


@T.macro
def load(f, X, top, c, x):
    """Chunk c of the rows from `top` on; -inf after the last column."""
    T.copy(X[top, c * f.tile.width], x)
    if f.n % f.tile.width:
        for i, j in T.Parallel(f.tile.rows, f.tile.width):
            x[i, j] = f.inside(c, j, x[i, j], -T.infinity(f.acc))


@T.macro
def exponentials(f, X, top, x, most, total, mean=None):
    """The maximum of each row (0 where all are -inf) and the sum of exp(x - maximum); x has the exponentials of the last chunk.

    mean: gets the mean of each row, if it is given.
    """
    t = f.tile
    before, known = T.alloc_fragment((t.rows,), f.acc), T.alloc_fragment((t.rows,), f.acc)
    T.fill(known, -T.infinity(f.acc))
    T.clear(total)
    if mean is not None:
        T.clear(mean)
    for c in T.serial(t.chunks):
        T.copy(X[top, c * t.width], x)
        if mean is not None:
            T.reduce_sum(x, mean, dim=1, clear=False)
        if f.n % t.width:
            for i, j in T.Parallel(t.rows, t.width):
                x[i, j] = T.if_then_else(c * t.width + j < f.n, x[i, j], -T.infinity(f.acc))
        for i in T.Parallel(t.rows):
            before[i] = known[i]
        T.reduce_max(x, known, dim=1, clear=False)
        for i in T.Parallel(t.rows):
            most[i] = T.if_then_else(known[i] == -T.infinity(f.acc), T.cast(0, f.acc), known[i])
            total[i] = total[i] * f.exp(before[i] - most[i])
        for i, j in T.Parallel(t.rows, t.width):
            x[i, j] = f.exp(x[i, j] - most[i])
        T.reduce_sum(x, total, dim=1, clear=False)
    if mean is not None:
        for i in T.Parallel(t.rows):
            mean[i] = mean[i] / T.cast(f.n, f.acc)


def softmax_forward(f: SoftmaxForm) -> Any:
    """The kernel (X, Y)."""
    t, n, m = f.tile, f.n, T.dynamic("m")

    @T.prim_func
    def softmax(X: T.Tensor((m, n), f.kind), Y: T.Tensor((m, n), f.kind)):
        with T.Kernel(T.ceildiv(m, t.rows), threads=t.threads) as bx:
            x = T.alloc_fragment((t.rows, t.width), f.acc)
            most, total = T.alloc_fragment((t.rows,), f.acc), T.alloc_fragment((t.rows,), f.acc)
            exponentials(f, X, bx * t.rows, x, most, total)
            for i in T.Parallel(t.rows):
                total[i] = T.cast(1, f.acc) / total[i]
            for c in T.serial(t.chunks):
                if t.chunks > 1:
                    T.copy(X[bx * t.rows, c * t.width], x)
                    for i, j in T.Parallel(t.rows, t.width):
                        x[i, j] = f.exp(x[i, j] - most[i])
                for i, j in T.Parallel(t.rows, t.width):
                    x[i, j] = x[i, j] * total[i]
                T.copy(x, Y[bx * t.rows, c * t.width])

    return softmax


def softmax_backward(f: SoftmaxForm) -> Any:
    """The kernel (Y, dY, dX)."""
    t, n, m = f.tile, f.n, T.dynamic("m")

    @T.prim_func
    def softmax_gradient(Y: T.Tensor((m, n), f.kind), dY: T.Tensor((m, n), f.kind), dX: T.Tensor((m, n), f.kind)):
        with T.Kernel(T.ceildiv(m, t.rows), threads=t.threads) as bx:
            y, g = (T.alloc_fragment((t.rows, t.width), f.acc) for _ in range(2))
            both, total = T.alloc_fragment((t.rows, t.width), f.acc), T.alloc_fragment((t.rows,), f.acc)
            T.clear(total)
            for c in T.serial(t.chunks):
                T.copy(Y[bx * t.rows, c * t.width], y)
                T.copy(dY[bx * t.rows, c * t.width], g)
                for i, j in T.Parallel(t.rows, t.width):
                    both[i, j] = y[i, j] * g[i, j]
                T.reduce_sum(both, total, dim=1, clear=False)
            for c in T.serial(t.chunks):
                if t.chunks > 1:
                    T.copy(Y[bx * t.rows, c * t.width], y)
                    T.copy(dY[bx * t.rows, c * t.width], g)
                for i, j in T.Parallel(t.rows, t.width):
                    g[i, j] = y[i, j] * (g[i, j] - total[i])
                T.copy(g, dX[bx * t.rows, c * t.width])

    return softmax_gradient


@T.macro
def reduce_rows(f, m, labels, each, total, count):
    """The sum of the rows' losses, or their mean over those that are not ignored, in one block; and the number of these."""
    with T.Kernel(1, threads=512) as _:
        losses, ones = T.alloc_fragment((_REDUCED,), f.acc), T.alloc_fragment((_REDUCED,), f.acc)
        loss, one = T.alloc_fragment((1,), f.acc), T.alloc_fragment((1,), f.acc)
        T.clear(losses)
        T.clear(ones)
        for k in T.serial(T.ceildiv(m, _REDUCED)):
            for i in T.Parallel(_REDUCED):
                row = k * _REDUCED + i
                if row < m:
                    losses[i] += each[row]
                    ones[i] += T.cast(labels[row] != f.ignored, f.acc)
        T.reduce_sum(losses, loss, dim=0)
        T.reduce_sum(ones, one, dim=0)
        for i in T.Parallel(1):
            total[i] = loss[i] / one[i] if f.reduction == "mean" else loss[i]
            count[i] = one[i]


def known_or_nan(f: EntropyForm, label: Any, value: Any) -> Any:
    """A value, or NaN where the label is not one of the columns."""
    return T.if_then_else(T.And(label >= 0, label < f.n), value, T.cast(float("nan"), f.acc))


def loss_of(f: EntropyForm, s: Any, at_label: Any, mean: Any) -> Any:
    """The loss of a row from s, its element at the label and the mean of its elements."""
    return s - at_label + f.rows.number(f.smoothing) * (at_label - mean) + f.rows.number(f.z_loss) * s * s


def entropy_forward(f: EntropyForm) -> Any:
    """The kernel (X, labels, each, logs, loss, count): each row's loss and s, and their sum or
    mean, and the number of rows that are not ignored."""
    t, n, rows, m = f.tile, f.n, f.rows, T.dynamic("m")

    @T.prim_func
    def cross_entropy(X: T.Tensor((m, n), f.kind), labels: T.Tensor((m,), f.labels), each: T.Tensor((m,), f.acc),
                      logs: T.Tensor((m,), f.acc), loss: T.Tensor((1,), f.acc), count: T.Tensor((1,), f.acc)):
        with T.Kernel(T.ceildiv(m, t.rows), threads=t.threads) as bx:
            x = T.alloc_fragment((t.rows, t.width), f.acc)
            most, total, mean = (T.alloc_fragment((t.rows,), f.acc) for _ in range(3))
            T.clear(mean)
            exponentials(rows, X, bx * t.rows, x, most, total, mean if f.smoothing != 0 else None)
            for i in T.Parallel(t.rows):
                row = bx * t.rows + i
                if row < m:
                    s = most[i] + rows.log(total[i])
                    label = T.cast(labels[row], "int64")
                    at_label = T.cast(X[row, T.max(T.min(label, n - 1), 0)], f.acc)
                    each[row] = T.if_then_else(label == f.ignored, T.cast(0, f.acc), known_or_nan(
                        f, label, loss_of(f, s, at_label, mean[i])))
                    logs[row] = s
        if f.reduction != "none":
            reduce_rows(f, m, labels, each, loss, count)

    return cross_entropy


def entropy_backward(f: EntropyForm) -> Any:
    """The kernel (X, labels, logs, count, grad, dX)."""
    t, n, rows, m = f.tile, f.n, f.rows, T.dynamic("m")

    @T.prim_func
    def cross_entropy_gradient(X: T.Tensor((m, n), f.kind), labels: T.Tensor((m,), f.labels), logs: T.Tensor((m,), f.acc),
                               count: T.Tensor((1,), f.acc), grad: T.Tensor((m if f.reduction == "none" else 1,), f.acc),
                               dX: T.Tensor((m, n), f.kind)):
        with T.Kernel(T.ceildiv(m, t.rows), t.chunks, threads=t.threads) as (bx, c):
            x, label = T.alloc_fragment((t.rows, t.width), f.acc), T.alloc_fragment((t.rows,), "int64")
            s, factor = T.alloc_fragment((t.rows,), f.acc), T.alloc_fragment((t.rows,), f.acc)
            T.copy(X[bx * t.rows, c * t.width], x)
            T.copy(logs[bx * t.rows], s)
            for i in T.Parallel(t.rows):
                row = T.min(bx * t.rows + i, m - 1)
                label[i] = T.cast(labels[row], "int64")
                given = grad[row if f.reduction == "none" else 0]
                factor[i] = known_or_nan(f, label[i], given / count[0] if f.reduction == "mean" else given)
            for i, j in T.Parallel(t.rows, t.width):
                p = rows.exp(x[i, j] - s[i]) * (1 + rows.number(2 * f.z_loss) * s[i])
                hit = T.if_then_else(c * t.width + j == label[i], rows.number(1 - f.smoothing), T.cast(0, f.acc))
                found = (p - hit - rows.number(f.smoothing / n)) * factor[i]
                x[i, j] = T.if_then_else(label[i] == f.ignored, T.cast(0, f.acc), found)
            T.copy(x, dX[bx * t.rows, c * t.width])

    return cross_entropy_gradient
