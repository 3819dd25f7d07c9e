"""`linear_cross_entropy`: the last GEMM and cross-entropy in one, without the logits in memory.

Forward: each tile of the GEMM leaves the maximum and the sum of exponentials of its rows; a second launch combines them.
Backward goes over chunks of columns of the vocabulary: a GEMM forms the chunk's logits again, and its epilogue their gradient,
of which two GEMMs make the gradients of x (added up in float32) and of the chunk's weights.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any, NamedTuple

import tilelang.language as T
from tilelang.errors import error

from ..arrays import accumulator, empty, type_name
from ..attention.inputs import running_on
from ..autograd import Function, Results, Step, direct
from ..gemm.fused import epilogue_form
from ..gemm.fused_kernels import FusedForm, fused_gemm
from ..gemm.grouped import matrix_gradient
from ..gemm.kernels import Form, main_loop
from ..gemm.plan import ROWS, shared_rows
from ..gemm.problem import matmul_problem
from ..place import Place, target_text
from .rows import RowTile, as_rows, check_alike
from .softmax import EntropyForm, check_options, known_or_nan, loss_of, reduce_rows

CHUNK = 16384  # columns of the vocabulary whose gradients are in memory at once
WHOLE = 256  # chunks begin at multiples of so many columns
_TILES, _ROWS = 64, 32  # partial results that a block of the second launch combines at once
_READ = 16, WHOLE  # a tile of logits that are read: 4 loads of 16 bytes a thread


def linear_cross_entropy(x: Any, weight: Any, labels: Any, *, ignore_index: int = -100, label_smoothing: float = 0.0,
                         z_loss: float = 0.0, reduction: str = "mean", recompute: bool | None = None, target: Any = None
                         ) -> Any:
    """cross_entropy(x @ weight^T, labels), whose logits are in memory for gradients only, and only where they are not large.

    x: (..., k), float16, bfloat16, float32 (GEMMs in tf32 on a GPU) or float64.  weight: (n, k), of x's type.  labels: (...),
    int32 or int64.  The rest is as for cross_entropy; logits are rounded to x's type only where they are kept.

    Gradients of x and weight, of their type.  Saved for them: x, weight, labels, 4 bytes a row (8 for float64), and with
    recompute=False the logits, of x's type.  Backward is two GEMMs by chunks of columns, whose gradients, of x's type, are in
    memory beside a float32 copy of the gradient of x: up to 32768 columns.  With recompute=True it is three, by chunks of up to
    16384: the first one forms the chunk's logits again.  recompute=None keeps logits that take no more memory than x, weight
    and their gradients together: m n <= 2 (m + n) k, for m rows.  The same inputs and kernels give the same bits.

    Kernels take any number of rows.  The first call has tiles for the next power of two, all others share those for 4096; sums
    over a tile's columns differ in their last bits where the tiles do.

    Raises training-argument, matmul-shape, matmul-type.

    >>> import numpy as np
    >>> x, weight = np.zeros((2, 8), np.float32), np.ones((4, 8), np.float32)
    >>> round(float(linear_cross_entropy(x, weight, np.array([1, 3]))), 4)
    1.3863
    """
    check_options("linear_cross_entropy", reduction, label_smoothing)
    keep = not direct((x, weight)) and (_keeps(x, weight) if recompute is None else not recompute)
    return LINEAR_CROSS_ENTROPY(x, weight, labels, int(ignore_index), float(label_smoothing), float(z_loss), reduction, keep,
                                target_text(target))


def _keeps(x: Any, weight: Any) -> bool:
    """Whether the logits take no more memory than x, the weights and their gradients."""
    if len(weight.shape) != 2:  # _results rejects it
        return False
    m, (n, k) = prod(x.shape[:-1]), weight.shape
    return bool(m * n <= 2 * (m + n) * k)


class LogitsForm(NamedTuple):
    """What the kernels are compiled for.  gemm: of x and the weights.  entropy: the loss of a row of logits.  kept: logits
    stay in memory."""

    gemm: Form
    entropy: EntropyForm
    kept: bool = False

    def logits(self, m: Any) -> Any:
        """The parameter with the logits of m rows."""
        return T.Tensor((m, self.entropy.n) if self.kept else (1, 1), self.entropy.kind)


@T.macro
def row_statistics(f, m, Cf, at, labels, W):
    """The maximum of a tile's rows, the sum of exp(x - maximum), the sum for smoothing, and the logit of the label."""
    p, t, e, (bx, by) = f.gemm, f.gemm.tile, f.entropy.rows, at
    most, total, place = (T.alloc_fragment((t.bm,), kind) for kind in (e.acc, e.acc, "int32"))
    for i in T.Parallel(t.bm):  # of the label in the tile
        at = T.cast(labels[T.min(by * t.bm + i, m - 1)], "int64") - bx * t.bn
        place[i] = T.cast(T.if_then_else(by * t.bm + i < m, T.min(T.max(at, -1), t.bn), -1), "int32")
    for i, j in T.Parallel(t.bm, t.bn):
        if place[i] == j:
            W[3, 0, by * t.bm + i] = Cf[i, j]
    if f.entropy.smoothing != 0:
        T.reduce_sum(Cf, total, dim=1)  # zeros after the last column
        T.copy(total, W[2, bx, by * t.bm])
    if p.n % t.bn != 0:
        for i, j in T.Parallel(t.bm, t.bn):
            Cf[i, j] = T.if_then_else(bx * t.bn + j < p.n, Cf[i, j], -T.infinity(e.acc))
    T.reduce_max(Cf, most, dim=1)
    for i in T.Parallel(t.bm):
        most[i] = T.if_then_else(most[i] == -T.infinity(e.acc), T.cast(0, e.acc), most[i])
    for i, j in T.Parallel(t.bm, t.bn):
        Cf[i, j] = e.exp(Cf[i, j] - most[i])
    T.reduce_sum(Cf, total, dim=1)
    T.copy(most, W[0, bx, by * t.bm])
    T.copy(total, W[1, bx, by * t.bm])


@T.macro
def combine_statistics(f, m, across, labels, W, each, logs):
    """The loss of each row and s, from its tiles' statistics."""
    e, shape = f.entropy, (_TILES, _ROWS)
    with T.Kernel(T.ceildiv(m, _ROWS), threads=256) as by:
        x, y = T.alloc_fragment(shape, e.acc), T.alloc_fragment(shape, e.acc)
        most, total, mean = (T.alloc_fragment((_ROWS,), e.acc) for _ in range(3))
        T.fill(most, -T.infinity(e.acc))
        T.clear(total)
        T.clear(mean)
        for s in T.serial(T.ceildiv(across, _TILES)):
            T.copy(W[0, s * _TILES, by * _ROWS], x)
            for i, j in T.Parallel(*shape):
                x[i, j] = T.if_then_else(s * _TILES + i < across, x[i, j], -T.infinity(e.acc))
            T.reduce_max(x, most, dim=0, clear=False)
        for s in T.serial(T.ceildiv(across, _TILES)):
            T.copy(W[0, s * _TILES, by * _ROWS], x)
            T.copy(W[1, s * _TILES, by * _ROWS], y)
            for i, j in T.Parallel(*shape):
                x[i, j] = T.if_then_else(s * _TILES + i < across, y[i, j] * e.rows.exp(x[i, j] - most[j]), T.cast(0, e.acc))
            T.reduce_sum(x, total, dim=0, clear=False)
            if e.smoothing != 0:
                T.copy(W[2, s * _TILES, by * _ROWS], y)
                T.reduce_sum(y, mean, dim=0, clear=False)
        for j in T.Parallel(_ROWS):
            row = by * _ROWS + j
            if row < m:
                s = most[j] + e.rows.log(total[j])
                label = T.cast(labels[row], "int64")
                at_label = W[3, 0, row]
                each[row] = T.if_then_else(label == e.ignored, T.cast(0, e.acc), known_or_nan(
                    e, label, loss_of(e, s, at_label, mean[j] / T.cast(e.n, e.acc))))
                logs[row] = s


def logits_forward(f: LogitsForm) -> Any:
    """The kernel (X, Weight, labels, Work, each, logs, loss, count, Logits).

    Work: (4, columns of tiles, m) workspace: statistics of the rows of each tile, and in [3, 0] the logits of the labels.
    """
    p, e, t, m = f.gemm, f.entropy, f.gemm.tile, T.dynamic("m")
    across = -(-p.n // t.bn)

    @T.prim_func
    def linear_cross_entropy(X: p.a(m), Weight: p.b, labels: T.Tensor((m,), e.labels), Work: T.Tensor((4, across, m), e.acc),
                             each: T.Tensor((m,), e.acc), logs: T.Tensor((m,), e.acc), loss: T.Tensor((1,), e.acc),
                             count: T.Tensor((1,), e.acc), Logits: f.logits(m)):
        with T.Kernel(*p.tiles(m), threads=t.threads) as (bx, by):
            Cf = main_loop(p, X, Weight, (bx, by, 0), 0, p.steps)
            if f.kept:
                T.copy(Cf, Logits[by * t.bm, bx * t.bn])
                if e.kind != e.acc:  # s is that of the logits which backward reads: exp(x - s) would be off by roundings of x
                    for i, j in T.Parallel(t.bm, t.bn):
                        Cf[i, j] = T.cast(T.cast(Cf[i, j], e.kind), e.acc)
            row_statistics(f, m, Cf, (bx, by), labels, Work)
        combine_statistics(f, m, across, labels, Work, each, logs)
        if e.reduction != "none":
            reduce_rows(e, m, labels, each, loss, count)

    return linear_cross_entropy


def logits_gradient(f: LogitsForm) -> Any:
    """The kernel (X, Weight, labels, start, logs, count, grad, G, Logits): the gradients of a chunk's logits.

    f: with the GEMM of the chunk, and the entropy of the whole vocabulary.  start: the chunk's first column over WHOLE.  Logits
    that were kept are read, others computed from X and Weight.
    """
    p, e, t, m, shape = f.gemm, f.entropy, f.gemm.tile, T.dynamic("m"), (f.gemm.tile.bm, f.gemm.tile.bn)

    @T.prim_func
    def linear_cross_entropy_gradient(
            X: p.a(m), Weight: p.b, labels: T.Tensor((m,), e.labels), start: T.int32, logs: T.Tensor((m,), e.acc),
            count: T.Tensor((1,), e.acc), grad: T.Tensor((m if e.reduction == "none" else 1,), e.acc), G: p.c(m),
            Logits: f.logits(m)):
        with T.Kernel(*p.tiles(m), threads=t.threads) as (bx, by):
            if f.kept:
                Cf = T.alloc_fragment(shape, e.acc)
                T.copy(Logits[by * t.bm, start * WHOLE + bx * t.bn], Cf)
            else:
                Cf = main_loop(p, X, Weight, (bx, by, 0), 0, p.steps)
            s, factor, place = (T.alloc_fragment((t.bm,), kind) for kind in (e.acc, e.acc, "int32"))
            for i in T.Parallel(t.bm):
                row = T.min(by * t.bm + i, m - 1)
                label, given = T.cast(labels[row], "int64"), grad[row if e.reduction == "none" else 0]
                s[i] = logs[row]
                place[i] = T.cast(label - start * WHOLE - bx * t.bn, "int32")
                factor[i] = T.if_then_else(label == e.ignored, T.cast(0, e.acc), known_or_nan(
                    e, label, given / count[0] if e.reduction == "mean" else given))
            for i, j in T.Parallel(*shape):
                Cf[i, j] = e.rows.exp(Cf[i, j] - s[i])
            if e.z_loss != 0:
                for i, j in T.Parallel(*shape):
                    Cf[i, j] = Cf[i, j] * (1 + e.rows.number(2 * e.z_loss) * s[i])
            for i, j in T.Parallel(*shape):
                Cf[i, j] = Cf[i, j] - T.if_then_else(place[i] == j, e.rows.number(1 - e.smoothing), T.cast(0, e.acc))
            for i, j in T.Parallel(*shape):  # nothing for a row without a gradient, whatever its logits are
                Cf[i, j] = T.if_then_else(factor[i] == 0, T.cast(0, e.acc), (
                    Cf[i, j] - e.rows.number(e.smoothing / e.n)) * factor[i])
            T.copy(Cf, G[by * t.bm, bx * t.bn])

    return linear_cross_entropy_gradient


def _added(x: Any, i: Any, j: Any, before: Any) -> Any:
    return x + before[i, j]


def _gemm(x: Any, weight: Any, at: Place, transposed: bool, kind: str) -> Form:
    """The form of x @ weight, or of x @ weight^T, for any number of rows."""
    none = dict.fromkeys(("bias", "scale_a", "scale_b", "out"))
    p = matmul_problem({"a": x, "b": weight, **none}, at.target, transpose_a=False, transpose_b=transposed, activation=None,
                       out_dtype=kind, fast_accum=True)
    rows = shared_rows(at, p.m, "linear_cross_entropy", transposed, p.n, p.k, p.types)
    return replace(epilogue_form(replace(p, m=rows, open_rows=True), at.chip), m=ROWS)  # with one tile, one kernel


def _entropy(weight: Any, labels: Any, ignored: int, smoothing: float, z_loss: float, reduction: str) -> EntropyForm:
    n, kind = int(weight.shape[0]), type_name(weight)
    row = n, kind, accumulator(kind), RowTile.of(n), False
    return EntropyForm(*row, type_name(labels), reduction, ignored, smoothing, z_loss)


def _results(x: Any, weight: Any, labels: Any, *options: Any) -> Results:
    kind, rows = type_name(x), tuple(x.shape[:-1])
    if weight.ndim != 2 or weight.shape[0] == 0 or x.shape[-1] == 0:
        found = str(tuple(weight.shape))
        raise error("training-argument", f"weight of linear_cross_entropy is ‹{found}›", expected="(n, k), not empty")
    check_alike("linear_cross_entropy", x, {"labels": (labels, rows, ("int32", "int64")),
                                            "weight": (weight, (weight.shape[0], x.shape[-1]), (kind,))})
    acc = accumulator(kind)
    return ((rows if options[3] == "none" else (), acc), ((prod(rows),), acc), ((1,), acc),
            ((prod(rows), weight.shape[0]) if options[4] else (0, 0), kind))


def _run(x: Any, weight: Any, labels: Any, *others: Any) -> None:
    """others: the options, among them the reduction and the target; the results."""
    *options, keep, target, loss, logs, count, logits = others
    rows, whole = prod(x.shape[:-1]), options[-1] != "none"
    if rows == 0:
        loss[...] = float("nan") if options[-1] == "mean" else 0.0
        return
    at, x, weight = running_on(x, target), as_rows(x, x.shape[-1]), as_rows(weight, weight.shape[1])
    f = LogitsForm(_gemm(x, weight, at, True, accumulator(type_name(x))), _entropy(weight, labels, *options), keep)
    each = empty(x, (rows,), f.entropy.acc) if whole else loss.reshape(rows)
    work = empty(x, (4, -(-f.entropy.n // f.gemm.tile.bn), rows), f.entropy.acc)
    at.kernel(logits_forward, f)(x, weight, as_rows(labels, 1).reshape(rows), work, each, logs,
                                 loss.reshape(1) if whole else None, count if whole else None, logits if keep else None)


def _gradient_results(x: Any, weight: Any, *others: Any) -> Results:
    return tuple((tuple(v.shape), type_name(v)) for v in (x, weight))


def _gradient(x: Any, weight: Any, labels: Any, logs: Any, count: Any, logits: Any, *others: Any) -> None:
    """others: the options, among them the reduction and the target; the gradient of the loss; the results."""
    *options, keep, target, grad, dx, dw = others
    (n, k), rows, kind = weight.shape, prod(x.shape[:-1]), type_name(x)
    if rows == 0:
        dw[...] = 0
        return
    at, x, weight = running_on(x, target), as_rows(x, k), as_rows(weight, k)
    f, labels, dx = _entropy(weight, labels, *options), as_rows(labels, 1).reshape(rows), dx.reshape(rows, k)
    known = logs, count if f.reduction == "mean" else None, as_rows(grad, 1).reshape(-1)
    chunks = -(-n // (2 * CHUNK if keep else CHUNK))
    width, before = -(-n // chunks // WHOLE) * WHOLE, None
    for first in range(0, n, width):
        part = weight[first:min(first + width, n)]
        columns, last = part.shape[0], first + width >= n
        g, after = empty(x, (rows, columns), kind), dx if last else empty(x, (rows, k), f.acc)
        gemm = _gemm(x, part, at, True, kind)
        if keep:
            gemm = replace(gemm, tile=replace(gemm.tile, bm=_READ[0], bn=_READ[1], threads=128))
        at.kernel(logits_gradient, LogitsForm(gemm, f, keep))(x, part, labels, first // WHOLE, *known, g,
                                                              logits if keep else None)
        added = FusedForm(_gemm(g, part, at, False, type_name(after)), _added if first else None, (),
                          (((None, k), f.acc),) if first else (), True, (_added,))  # type: ignore[arg-type]  # of ours
        at.kernel(fused_gemm, added)(g, part, None, before, None, None, None, after)
        matrix_gradient(g, x, None, at, dw[first:first + columns].reshape(1, columns, k))
        before = after


LINEAR_CROSS_ENTROPY = Function(
    "linear_cross_entropy",
    Step("Tensor x, Tensor weight, Tensor labels, int ignored, float smoothing, float z_loss, str reduction, bool keep, "
         "str? target", _results, _run, 4),
    Step("Tensor x, Tensor weight, Tensor labels, Tensor logs, Tensor count, Tensor logits, int ignored, float smoothing, "
         "float z_loss, str reduction, bool keep, str? target, Tensor grad", _gradient_results, _gradient, 2),
    lambda needs, given, made: (*given[:3], *made[1:], *given[3:]), (0, 1))
