"""`rms_norm` and `layer_norm` with gradients.

The kernels of RMS norm and layer norm.

Forward, with r = 1 / sqrt(mean(d^2) + eps) and d = x - mean(x), or d = x for RMS norm: y = d r w + b.  Backward, with h = d r
and g = dy w:
    dx = r (g - mean(g) - h mean(g h)),  without mean(g) for RMS norm;   dw = sum over rows of dy h,   db = sum over rows of dy.
Sums over rows have two stages: each block adds its rows in registers, and a second launch adds what the blocks have, in order.
"""

from __future__ import annotations

from functools import lru_cache, partial
from math import prod
from typing import Any, NamedTuple

import tilelang.language as T

from ..arrays import accumulator, contiguous, empty, type_name
from ..attention.inputs import running_on
from ..autograd import Function, Results, Step
from ..place import Place, target_text
from .rows import VECTOR, RowTile, as_rows, check_alike


def rms_norm(x: Any, weight: Any = None, *, eps: float = 1e-6, target: Any = None) -> Any:
    """x / sqrt(mean(x^2) + eps) * weight, over the last dimension; of x's shape and type.

    x: (..., n), float16, bfloat16, float32 or float64.  weight: (n,), of x's type or float32, ones by default.  Means and
    gradients are formed in float32 (float64 for float64).
    target: as for tilelang.compile, instead of the device that x is on; "tile" and "simulator" as for attention.

    Gradients of x and weight, of the types of these.  Saved for them: x, weight, and 4 bytes a row (8 for float64).  The same
    inputs give the same bits.  One kernel takes any number of rows; torch.compile takes the call whole.

    Raises training-argument.

    >>> import numpy as np
    >>> rms_norm(np.array([[3, 4]], np.float32), eps=0.0).round(3).tolist()
    [[0.849, 1.131]]
    """
    return RMS_NORM(x, weight, None, float(eps), target_text(target))


def layer_norm(x: Any, weight: Any = None, bias: Any = None, *, eps: float = 1e-5, target: Any = None) -> Any:
    """(x - mean(x)) / sqrt(mean((x - mean(x))^2) + eps) * weight + bias, over the last dimension; of x's shape and type.

    x: (..., n), float16, bfloat16, float32 or float64.  weight, bias: (n,), of x's type or float32; ones and zeros by default.
    The variance does not cancel: it is formed from x - mean.  The rest is as for rms_norm.

    Gradients of x, weight and bias, of the types of these.  Saved for them: x, weight, and 8 bytes a row (16 for float64).

    Raises training-argument.

    >>> import numpy as np
    >>> layer_norm(np.array([[1, 3]], np.float32), eps=0.0).tolist()
    [[-1.0, 1.0]]
    """
    return LAYER_NORM(x, weight, bias, float(eps), target_text(target))


def _form(x: Any, weight: Any, bias: Any, centred: bool) -> NormForm:
    """The form of a forward call."""
    n, kind = int(x.shape[-1]), type_name(x)
    kinds = ["" if v is None else type_name(v) for v in (weight, bias)]
    return NormForm(n, kind, accumulator(kind), *kinds, centred, RowTile.of(n))


@lru_cache(1024)
def _backward_form(at: Place, f: NormForm, item: int, summed: bool) -> NormForm:
    """The form of backward for that of forward: with copies of rows ahead of their use, where rows of 16-bit elements begin at
    multiples of 16 bytes and two tiles fit an SM's shared memory.  item: bytes of an element.  (Wider elements have enough
    bytes on their way to registers: 4096x4096 of float32 takes 51.9 us so, and 55.6 with copies.)"""
    if (tile := RowTile.staged(f.n)) and at.chip.kind != "cpu" and item == 2 and f.n % VECTOR == 0:
        room = min(at.chip.shared, at.chip.shared_sm // _per_sm(f, tile)) - _BESIDE
        stages = min(_STAGES, room // (2 * tile.rows * tile.width * item))
        if stages > 1:
            return f._replace(tile=tile, summed=summed, stages=stages)
    return f._replace(tile=RowTile.of(f.n, 16), summed=summed)  # the sums take registers too


def _per_sm(f: NormForm, tile: RowTile) -> int:
    """Blocks of an SM that go over rows.  (RMS norm of 6,144 columns takes 70.8 us with two, 74.2 with one; layer norm has no
    registers for a second: 87.4, 76.1.)"""
    return max(1 + (not f.centred and tile.threads <= _TWICE), _BUSY // tile.threads)


def _vector(v: Any) -> Any:
    return None if v is None else contiguous(v)


def _checked(name: str, x: Any, weight: Any, bias: Any) -> None:
    n = tuple(x.shape[-1:])
    kinds = (type_name(x), "float32")
    check_alike(name, x, {"weight": (weight, n, kinds), "bias": (bias, n, kinds)})


def _forward_results(centred: bool, x: Any, weight: Any, bias: Any, eps: float, target: str | None) -> Results:
    _checked("layer_norm" if centred else "rms_norm", x, weight, bias)
    acc, rows = accumulator(type_name(x)), prod(x.shape[:-1])
    return (tuple(x.shape), type_name(x)), ((1 + centred, rows), acc)


def _forward(centred: bool, x: Any, weight: Any, bias: Any, eps: float, target: str | None, y: Any, stats: Any) -> None:
    if 0 not in x.shape:
        n, at = x.shape[-1], running_on(x, target)
        kernel = at.kernel(norm_forward, _form(x, weight, bias, centred), enable_pdl=at.target.has_wgmma or None)
        kernel(as_rows(x, n), *map(_vector, (weight, bias)), eps, y.reshape(-1, n), stats)


def _backward_results(centred: bool, x: Any, weight: Any, bias: Any, *others: Any) -> Results:
    n, wanted, summed = x.shape[-1], (tuple(x.shape), type_name(x)), others[1]
    of_vectors = (((n,) if summed and v is not None else (0,), type_name(x if v is None else v)) for v in (weight, bias))
    return wanted, *of_vectors


def _backward(centred: bool, x: Any, weight: Any, bias: Any, stats: Any, summed: bool, target: str | None, dy: Any,
              *made: Any) -> None:
    dx, dw, db = made
    if 0 in x.shape:
        for v in (dw, db):
            v[...] = 0
        return
    at = running_on(x, target)
    f = _backward_form(at, _form(x, weight, bias, centred), x.itemsize, summed)
    n, rows = f.n, stats.shape[1]
    blocks = _blocks(at, f, rows)
    partials = empty(x, (2, blocks, n), f.acc)
    means = empty(x, (rows, 2), f.acc) if f.tile.chunks > 1 else None
    kernel = at.kernel(norm_backward, f, enable_pdl=at.target.has_wgmma or None)
    kernel(as_rows(x, n), _vector(weight), stats, as_rows(dy, n), partials, means, dx.reshape(rows, n),
           dw if summed and f.weight else None, db if summed and f.bias else None)


def _blocks(at: Place, f: NormForm, rows: int) -> int:
    """The number of blocks that go over the rows: those that run at once."""
    return max(1, min(-(-rows // f.tile.rows), at.chip.sms * _per_sm(f, f.tile)))


def _norm(name: str, centred: bool) -> Function:
    forward = Step("Tensor x, Tensor? weight, Tensor? bias, float eps, str? target", partial(_forward_results, centred),
                   partial(_forward, centred), 2)
    backward = Step("Tensor x, Tensor? weight, Tensor? bias, Tensor stats, bool summed, str? target, Tensor dy",
                    partial(_backward_results, centred), partial(_backward, centred), 3)
    return Function(name, forward, backward,
                    lambda needs, given, made: (*given[:3], made[1], any(needs[1:3]), given[4]), (0, 1, 2))


RMS_NORM, LAYER_NORM = _norm("rms_norm", False), _norm("layer_norm", True)


# ---- kernels ----------------------------------------------------------------------------------------------------------

_ADDED, _FEW = ((256, 16), (128, 32)), 4096  # tiles of the second stage; columns up to which more blocks are worth more loads
_STAGES, _BESIDE = 3, 4096  # tiles of x and dy on their way; bytes of shared memory for sums
_BUSY, _TWICE = 640, 384  # threads of an SM that go over rows; of a block of which an SM has two anyway


class NormForm(NamedTuple):
    """What a kernel is compiled for.

    n: columns.  kind: type of x.  acc: in which rows are reduced.  weight, bias: their types, "" for none.  centred: for
    layer norm.  summed: backward computes the gradients of weight and bias.
    """

    n: int
    kind: str
    acc: str
    weight: str
    bias: str
    centred: bool
    tile: RowTile
    summed: bool = False
    stages: int = 0

    def vector(self, kind: str) -> Any:
        """A parameter with one element for each column; of one element where the form does not use it."""
        return T.Tensor((self.n if kind else 1,), kind or self.acc)

    @property
    def weights(self) -> str:
        """The type of the weights in registers."""
        return self.weight or self.acc

    def stats(self, m: Any) -> Any:
        """The parameter with r of each of m rows, and for layer norm its mean."""
        return T.Tensor((1 + self.centred, m), self.acc)

    def inside(self, c: Any, j: Any, value: Any) -> Any:
        """A value of column j of chunk c, zero after the last column."""
        return value if self.n % self.tile.width == 0 else T.if_then_else(c * self.tile.width + j < self.n, value, 0)


@T.macro
def moments(f, x, c, mean, square):
    """The mean of each row of chunk c of x (0 for RMS norm) and the sum of the squares of x - mean."""
    t = f.tile
    d = T.alloc_fragment((t.rows, t.width), f.acc)
    T.clear(mean)
    if f.centred:
        T.reduce_sum(x, mean, dim=1)
        for i in T.Parallel(t.rows):
            mean[i] = mean[i] / T.cast(T.min(f.n - c * t.width, t.width), f.acc)
    for i, j in T.Parallel(t.rows, t.width):
        d[i, j] = f.inside(c, j, (x[i, j] - mean[i]) * (x[i, j] - mean[i]))
    T.reduce_sum(d, square, dim=1)


def norm_forward(f: NormForm) -> Any:
    """The kernel (X, W, B, eps, Y, Stats).  Stats: r of each row, and for layer norm its mean."""
    t, n = f.tile, f.n
    m = T.dynamic("m")

    @T.prim_func
    def norm(X: T.Tensor((m, n), f.kind), W: f.vector(f.weight), B: f.vector(f.bias), eps: getattr(T, f.acc),
             Y: T.Tensor((m, n), f.kind), Stats: f.stats(m)):
        with T.Kernel(T.ceildiv(m, t.rows), threads=t.threads) as bx:
            x = T.alloc_fragment((t.rows, t.width), f.acc)
            mean, square = T.alloc_fragment((t.rows,), f.acc), T.alloc_fragment((t.rows,), f.acc)
            T.copy(X[bx * t.rows, 0], x)
            moments(f, x, 0, mean, square)
            if t.chunks > 1:
                next_mean, next_square = T.alloc_fragment((t.rows,), f.acc), T.alloc_fragment((t.rows,), f.acc)
                for c in T.serial(1, t.chunks):
                    T.copy(X[bx * t.rows, c * t.width], x)
                    moments(f, x, c, next_mean, next_square)
                    for i in T.Parallel(t.rows):
                        here = T.cast(T.min(n - c * t.width, t.width), f.acc)
                        before = T.cast(c * t.width, f.acc)
                        step = next_mean[i] - mean[i]
                        square[i] += next_square[i] + step * step * (before * here / (before + here))
                        mean[i] += step * (here / (before + here))
            for i in T.Parallel(t.rows):
                square[i] = T.rsqrt(square[i] / T.cast(n, f.acc) + eps)
            for c in T.serial(t.chunks):
                if t.chunks > 1:
                    T.copy(X[bx * t.rows, c * t.width], x)
                for i, j in T.Parallel(t.rows, t.width):
                    x[i, j] = (x[i, j] - mean[i]) * square[i]
                if f.weight != "":
                    for i, j in T.Parallel(t.rows, t.width):
                        x[i, j] = x[i, j] * W[c * t.width + j]
                if f.bias != "":
                    for i, j in T.Parallel(t.rows, t.width):
                        x[i, j] = x[i, j] + B[c * t.width + j]
                T.copy(x, Y[bx * t.rows, c * t.width])
            T.copy(square, Stats[0, bx * t.rows])
            if f.centred:
                T.copy(mean, Stats[1, bx * t.rows])

    return norm


@T.macro
def facts(f, Stats, top, r, mean):
    """r of the rows from `top` on, and their mean."""
    T.copy(Stats[0, top], r)
    if f.centred:
        T.copy(Stats[1, top], mean)


@T.macro
def normalised(f, h, r, mean):
    """h of a chunk of rows, in place of x.  It is finite after the last column, where dy is 0."""
    t = f.tile
    if f.centred:
        for i, j in T.Parallel(t.rows, t.width):
            h[i, j] = (h[i, j] - mean[i]) * r[i]
    else:
        for i, j in T.Parallel(t.rows, t.width):
            h[i, j] = h[i, j] * r[i]


@T.macro
def weighted(f, w, g):
    """g times the weights w, in place."""
    if f.weight != "":
        for i, j in T.Parallel(f.tile.rows, f.tile.width):
            g[i, j] = g[i, j] * w[j]


@T.macro
def means(f, h, g, mean_g, mean_gh, clear):
    """The sums over columns of g (layer norm) and of g h, which are added to those of earlier chunks unless `clear`."""
    t = f.tile
    both = T.alloc_fragment((t.rows, t.width), f.acc)
    for i, j in T.Parallel(t.rows, t.width):
        both[i, j] = g[i, j] * h[i, j]
    T.reduce_sum(both, mean_gh, dim=1, clear=clear)
    if f.centred:
        T.reduce_sum(g, mean_g, dim=1, clear=clear)


@T.macro
def means_of_chunks(f, m, X, W, Stats, dY, Means):
    """The first stage for rows of several chunks: Means."""
    t, rows = f.tile, (f.tile.rows, f.tile.width)
    with T.Kernel(T.ceildiv(m, t.rows), threads=t.threads) as bx:
        h, g = T.alloc_fragment(rows, f.acc), T.alloc_fragment(rows, f.acc)
        w = T.alloc_fragment((t.width,), f.weights)
        mean_g, mean_gh = T.alloc_fragment((t.rows,), f.acc), T.alloc_fragment((t.rows,), f.acc)
        r, mean = T.alloc_fragment((t.rows,), f.acc), T.alloc_fragment((t.rows,), f.acc)
        T.clear(mean_g)
        T.clear(mean_gh)
        facts(f, Stats, bx * t.rows, r, mean)
        for c in T.serial(t.chunks):
            T.copy(X[bx * t.rows, c * t.width], h)
            T.copy(dY[bx * t.rows, c * t.width], g)
            normalised(f, h, r, mean)
            if f.weight != "":
                T.copy(W[c * t.width], w)
            weighted(f, w, g)
            means(f, h, g, mean_g, mean_gh, False)
        for i in T.Parallel(t.rows):
            Means[bx * t.rows + i, 0] = mean_g[i]
            Means[bx * t.rows + i, 1] = mean_gh[i]


@T.macro
def keep(total, column, Partials, which, block, p, at, gradient):
    """Store what one of p blocks has for the columns from `at` on in a matrix of Partials; the only one has their gradient."""
    T.reduce_sum(total, column, dim=0)
    if T.And(block == 0, p == 1):
        T.copy(column, gradient[at])
    else:
        T.copy(column, Partials[which, block, at])


@T.macro
def add_up(f, p, partials, dW, dB):
    """The second stage: one or both of the matrices of `partials`, reduced over their p rows, unless that is one."""
    of_weight, of_bias, (tall, narrow) = f.weight != "", f.bias != "", _ADDED[f.n > _FEW]
    with T.Kernel(T.if_then_else(p > 1, T.ceildiv(f.n, narrow), 0), of_weight + of_bias, threads=256) as (bx, by):
        which = by if of_weight else 1
        tile = T.alloc_fragment((tall, narrow), f.acc)
        total, column = T.alloc_fragment((tall, narrow), f.acc), T.alloc_fragment((narrow,), f.acc)
        T.clear(total)
        T.pdl_sync()
        for k in T.serial(T.ceildiv(p, tall)):
            T.copy(partials[which, k * tall, bx * narrow], tile)
            for i, j in T.Parallel(tall, narrow):
                total[i, j] += tile[i, j]
        T.reduce_sum(total, column, dim=0)
        if of_weight and of_bias:
            if by == 0:
                T.copy(column, dW[bx * narrow])
            else:
                T.copy(column, dB[bx * narrow])
        else:
            T.copy(column, (dW if of_weight else dB)[bx * narrow])


def norm_backward(f: NormForm) -> Any:
    """The kernel (X, W, Stats, dY, Partials, Means, dX, dW, dB).

    Partials: (2, blocks, n) workspace, the sums of each block's rows for dW and dB.  Means: (m, 2) workspace
    where a row has several chunks: the sums of g and of g h.  Copies of x and dy run ahead where a block has room for them:
    few warps have rows of that length in registers, and all of them wait for the means of a row.
    """
    t, n = f.tile, f.n
    m, p = T.dynamic("m, p")
    rows, long = (t.rows, t.width), t.chunks > 1
    of_weight, of_bias = bool(f.summed and f.weight), bool(f.summed and f.bias)
    again = f.stages > 0 and t.threads > 640  # which have no registers for h and g while they wait for the means

    @T.prim_func
    def norm_gradient(X: T.Tensor((m, n), f.kind), W: f.vector(f.weight), Stats: f.stats(m), dY: T.Tensor((m, n), f.kind),
                      Partials: T.Tensor((2, p, n), f.acc), Means: T.Tensor((m, 2) if long else (1, 1), f.acc),
                      dX: T.Tensor((m, n), f.kind), dW: f.vector(f.weight if of_weight else ""),
                      dB: f.vector(f.bias if of_bias else "")):
        if long:
            means_of_chunks(f, m, X, W, Stats, dY, Means)
        with T.Kernel(p, t.chunks, threads=t.threads) as (bx, c):
            h, g = T.alloc_fragment(rows, f.acc), T.alloc_fragment(rows, f.acc)
            w = T.alloc_fragment((t.width,), f.weights)
            mean_g, mean_gh, r, mean, next_r, next_mean = (T.alloc_fragment((t.rows,), f.acc) for _ in range(6))
            dw, db = T.alloc_fragment(rows, f.acc), T.alloc_fragment(rows, f.acc)
            column = T.alloc_fragment((t.width,), f.acc)
            if f.stages:
                T.annotate_min_blocks_per_sm(_per_sm(f, t))
                x, dy = T.alloc_shared(rows, f.kind), T.alloc_shared(rows, f.kind)
            T.clear(dw)
            T.clear(db)
            T.clear(mean_g)
            if f.weight != "":
                T.copy(W[c * t.width], w)
            facts(f, Stats, bx * t.rows, next_r, next_mean)
            for k in T.Pipelined(T.ceildiv(m - bx * t.rows, p * t.rows), num_stages=f.stages):
                top = (k * p + bx) * t.rows
                T.copy(next_r, r)
                if f.centred:
                    T.copy(next_mean, mean)
                facts(f, Stats, top + p * t.rows, next_r, next_mean)
                to = (x, dy) if f.stages else (h, g)
                T.copy(X[top, c * t.width], to[0])
                T.copy(dY[top, c * t.width], to[1])
                if f.stages:
                    T.copy(x, h)
                    T.copy(dy, g)
                normalised(f, h, r, mean)
                if again:
                    weighted(f, w, g)
                    means(f, h, g, mean_g, mean_gh, True)
                    T.copy(x, h)
                    T.copy(dy, g)
                    normalised(f, h, r, mean)
                for i, j in T.Parallel(t.rows, t.width):
                    if of_weight:
                        dw[i, j] += g[i, j] * h[i, j]
                    if of_bias:
                        db[i, j] += g[i, j]
                weighted(f, w, g)
                if long:
                    for i in T.Parallel(t.rows):
                        mean_g[i] = Means[top + i, 0]
                        mean_gh[i] = Means[top + i, 1]
                elif not again:
                    means(f, h, g, mean_g, mean_gh, True)
                for i in T.Parallel(t.rows):
                    mean_g[i] = mean_g[i] / T.cast(n, f.acc)
                    mean_gh[i] = mean_gh[i] / T.cast(n, f.acc)
                for i, j in T.Parallel(t.rows, t.width):
                    h[i, j] = r[i] * (g[i, j] - (mean_g[i] + h[i, j] * mean_gh[i]))
                T.copy(h, dX[top, c * t.width])
            if of_weight:
                keep(dw, column, Partials, 0, bx, p, c * t.width, dW)
            if of_bias:
                keep(db, column, Partials, 1, bx, p, c * t.width, dB)
        if of_weight or of_bias:
            add_up(f, p, Partials, dW, dB)

    return norm_gradient
