"""`softmax` and `cross_entropy` with gradients.

The kernels of softmax and cross-entropy over rows.

With s = log(sum(exp(x))), p = exp(x - s) and label t:
    softmax:        y = p;   dx = y (dy - sum(dy y))
    cross-entropy:  l = s - (1 - e) x_t - e mean(x) + z s^2;   dx = (p (1 + 2 z s) - (1 - e) [j = t] - e / n) dl
A row of several chunks is read once for the maximum and the sum, which are rescaled where the maximum grows, and once more.
Chunks that no row ends in have no conditions for elements.

Long rows that begin inside of a vector of 16 bytes (50,257 columns) are read and stored in the vectors of the whole tensor: the
first chunk begins at the vector with the row's first element.  Sums and maxima take elements in any order, and all else is done
element by element.
"""

from __future__ import annotations

from math import gcd, prod
from typing import Any, NamedTuple

import tilelang.language as T

from tilelang.errors import error

from ..arrays import accumulator, empty, type_name
from ..attention.form import LOG2E
from ..attention.inputs import running_on
from ..autograd import Function, Results, Step
from ..place import Place, target_text
from .rows import MOST_THREADS, VECTOR, RowTile, as_rows, check_alike


_MOST = 2**31 - 2**16  # elements of a tensor whose indices are counted in 32 bits; the last chunk of a row ends after it
SHIFTED = 8192  # columns up to which rows that begin inside of a vector are read element by element
_LN2 = 0.6931471805599453
_STAGES, _BESIDE = 4, 4096  # rows in shared memory; bytes of it for reductions
_COPIED = 49152  # bytes of a row from which copies ahead gain: 8192x16385 201 us without, 243 with them
_LONG = 32768  # columns from which gradients of odd rows have one block of 1024 threads: 4096x50257 423 us, 490 with 256
_REDUCED = 4096  # rows that the block of the reduction reads at once


class SoftmaxForm(NamedTuple):
    """What a kernel is compiled for.  n: columns.  kind: type of x.  acc: in which rows are reduced.  shifted: rows are read in
    the vectors of the whole tensor, one by one.  ahead: rows in shared memory, where one
    block of an SM goes over rows and copies bring the next ones while it computes."""

    n: int
    kind: str
    acc: str
    tile: RowTile
    shifted: bool = False
    ahead: int = 0

    @staticmethod
    def of(x: Any, at: Place, each: int = 32, most: int = 1024) -> SoftmaxForm:
        """The form for a tensor.  each, most: as for RowTile.of."""
        n, kind = int(x.shape[-1]), type_name(x)
        shifted = at.target.is_gpu and n > SHIFTED and n * x.itemsize % 16 != 0 and prod(x.shape) < _MOST
        if shifted:  # most of whose elements are in whole chunks
            most = min(most, 256 if n > 1024 * each else 128)
        tile = RowTile.of(n + VECTOR - 1 if shifted else n, each, most)
        return SoftmaxForm(n, kind, accumulator(kind), tile._replace(rows=1) if shifted else tile, shifted)

    def copied(self, at: Place, item: int) -> SoftmaxForm:
        """The form of long rows with copies ahead, where shared memory holds two.  item: bytes of an element.

        A row is read from memory once so, and loads are on their way while threads compute."""
        stages = min(_STAGES, (at.chip.shared - _BESIDE) // (self.span * item))
        if self.tile.chunks == 1 or at.chip.kind == "cpu" or self.span * item < _COPIED:
            return self
        if stages < 2:  # rows that are read twice: 4096x50257 359 us by these chunks, 377 to 425 by others
            few = self.shifted and item == 2 or item > 4
            return self._replace(tile=RowTile(1, 4096, -(-self.span // 4096), 512)) if few else self
        width = min(self.tile.width, MOST_THREADS * VECTOR)
        return self._replace(tile=RowTile(1, width, -(-self.span // width), max(128, width // VECTOR)), ahead=stages)

    @property
    def lanes(self) -> tuple[int, int, int]:
        """Of a chunk of a long row: vectors of a thread, threads, elements of a vector."""
        each = gcd(VECTOR, self.tile.width)
        threads = min(self.tile.threads, self.tile.width // each)
        return self.tile.width // (threads * each), threads, each

    @property
    def layout(self) -> Any:
        """Of a chunk of a long row."""
        return T.Fragment(self.lanes, forward_fn=lambda r, t, v: (t, r * self.lanes[2] + v))

    @property
    def span(self) -> int:
        """Elements of the vectors that a row may lie in."""
        return -(-(self.n + (VECTOR - 1) * self.shifted) // VECTOR) * VECTOR

    @property
    def whole(self) -> tuple[int, int]:
        """The chunks in which no row begins or ends: from the first of these two on, and before the second."""
        return int(self.shifted), max(int(self.shifted), self.n // self.tile.width)

    @property
    def cut(self) -> int:
        """The number of other chunks."""
        first, last = self.whole
        return self.tile.chunks - (last - first)

    def nth_cut(self, e: Any) -> Any:
        """The e-th of the other chunks."""
        first, last = self.whole
        return T.if_then_else(e < first, e, last - first + e) if first else last + e

    def flat(self, t: Any) -> Any:
        """The parameter with the t whole vectors of a tensor; of one vector where rows are not shifted."""
        return T.Tensor((1, t * VECTOR if self.shifted else VECTOR), self.kind)

    def vectors(self, x: Any) -> Any:
        """The whole vectors of a tensor with so many columns, as `flat` takes them."""
        return x.reshape(-1)[:prod(x.shape) // VECTOR * VECTOR].reshape(1, -1) if self.shifted else None

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
    shifted: bool
    labels: str
    reduction: str
    ignored: int
    smoothing: float
    z_loss: float

    @property
    def rows(self) -> SoftmaxForm:
        return SoftmaxForm(self.n, self.kind, self.acc, self.tile, self.shifted)


def column(f: SoftmaxForm, top: Any, c: Any, j: Any) -> Any:
    """The column of element j of chunk c."""
    return c * f.tile.width + j - (top * f.n % VECTOR if f.shifted else 0)


@T.macro
def load(f, X, Flat, top, c, x, cut, outside=0):
    """Chunk c of the rows from `top` on.  cut: rows begin or end in it; x has `outside` beside them."""
    t = f.tile
    if f.shifted:
        T.copy(Flat[0, top * f.n // VECTOR * VECTOR + c * t.width], x)
        if cut:
            for i, j in T.Parallel(t.rows, t.width):
                at = column(f, top, c, j)
                x[i, j] = T.if_then_else((at >= 0) & (at < f.n), T.if_then_else(
                    top * f.n // VECTOR * VECTOR + c * t.width + j < Flat.shape[1], x[i, j], T.cast(X[top, at], x.dtype)),
                    T.cast(outside, x.dtype))
    else:
        T.copy(X[top, c * t.width], x)
        if cut and outside != 0:
            for i, j in T.Parallel(t.rows, t.width):
                x[i, j] = T.if_then_else(c * t.width + j < f.n, x[i, j], T.cast(outside, x.dtype))


@T.macro
def store(f, x, Y, Flat, top, c, cut):
    """Store chunk c of the rows from `top` on, as `load` reads it."""
    t = f.tile
    if f.shifted and cut:
        for i, j in T.Parallel(t.rows, t.width):
            at = column(f, top, c, j)
            if (at >= 0) & (at < f.n):
                Y[top, at] = x[i, j]
    elif f.shifted:
        T.copy(x, Flat[0, top * f.n // VECTOR * VECTOR + c * t.width])
    else:
        T.copy(x, Y[top, c * t.width])


@T.macro
def load_long(f, X, Flat, top, c, x, cut, outside=0, row=None):
    """As `load`, for a chunk of one long row: a thread has whole vectors, next to those of the next thread.  row: the copy of
    the row's vectors in shared memory, if there is one."""
    vectors, threads, each = f.lanes
    for r, t, v in T.Parallel(*f.lanes, loop_layout=f.layout):
        first = c * f.tile.width + (r * threads + t) * each
        if row is not None:
            x[r, t, v] = row[0, (T.min(first, f.span - each) if cut else first) + v]
        elif f.shifted:
            x[r, t, v] = Flat[0, top * f.n // VECTOR * VECTOR + first + v]
        else:
            x[r, t, v] = X[top, first + v]
    if cut:
        for r, t, v in T.Parallel(*f.lanes, loop_layout=f.layout):
            at = column(f, top, c, (r * threads + t) * each + v)
            x[r, t, v] = T.if_then_else((at >= 0) & (at < f.n), x[r, t, v], T.cast(outside, x.dtype))
        if f.shifted:
            if top * f.n // VECTOR * VECTOR + f.span > Flat.shape[1]:  # the row has elements behind the last whole vector
                for r, t, v in T.Parallel(*f.lanes, loop_layout=f.layout):
                    at = column(f, top, c, (r * threads + t) * each + v)
                    if (at < f.n) & (top * f.n + at >= Flat.shape[1]):
                        x[r, t, v] = T.cast(X[top, at], x.dtype)


@T.macro
def store_long(f, x, Y, Flat, top, c, cut):
    """Store a chunk of one long row: vectors in which a row begins or ends element by element."""
    vectors, threads, each = f.lanes
    for r, t, v in T.Parallel(*f.lanes, loop_layout=f.layout):
        first = (r * threads + t) * each
        at = column(f, top, c, first)
        if f.shifted and cut:
            if (at >= 0) & (at + each <= f.n):
                Flat[0, top * f.n // VECTOR * VECTOR + c * f.tile.width + first + v] = x[r, t, v]
        elif f.shifted:
            Flat[0, top * f.n // VECTOR * VECTOR + c * f.tile.width + first + v] = x[r, t, v]
        else:
            if c * f.tile.width + first + v < f.n:
                Y[top, c * f.tile.width + first + v] = x[r, t, v]
    if f.shifted and cut:
        for r, t, v in T.Parallel(*f.lanes, loop_layout=f.layout):
            at = column(f, top, c, (r * threads + t) * each)
            if ((at < 0) & (at > -each)) | ((at < f.n) & (at + each > f.n)):
                if (at + v >= 0) & (at + v < f.n):
                    Y[top, at + v] = x[r, t, v]


@T.macro
def add_chunk(f, X, Flat, top, c, cut, known, total, mean, row):
    """A chunk of `long_exponentials`."""
    vectors, threads, each = f.lanes
    x, y, least = T.alloc_fragment(f.lanes, f.acc), T.alloc_fragment(f.lanes, f.acc), -T.infinity(f.acc)
    of_vectors, most, before = (T.alloc_fragment(s, f.acc) for s in ((vectors, threads), (threads,), (threads,)))
    load_long(f, X, Flat, top, c, x, cut, least if mean is None else 0, row)
    if mean is not None:
        T.reduce_sum(x, of_vectors, dim=2)
        T.reduce_sum(of_vectors, mean, dim=0, clear=False)
        if cut:
            for r, t, v in T.Parallel(*f.lanes, loop_layout=f.layout):
                at = column(f, top, c, (r * threads + t) * each + v)
                x[r, t, v] = T.if_then_else((at >= 0) & (at < f.n), x[r, t, v], least)
    for t in T.Parallel(threads):
        before[t] = known[t]
    T.reduce_max(x, of_vectors, dim=2)
    T.reduce_max(of_vectors, known, dim=0, clear=False)
    for t in T.Parallel(threads):
        most[t] = T.if_then_else(known[t] == least, T.cast(0, f.acc), known[t])
        total[t] = total[t] * f.exp(before[t] - most[t])
    for r, t, v in T.Parallel(*f.lanes, loop_layout=f.layout):
        y[r, t, v] = f.exp(x[r, t, v] - most[t])
    T.reduce_sum(y, of_vectors, dim=2)
    T.reduce_sum(of_vectors, total, dim=0, clear=False)


@T.macro
def long_exponentials(f, X, Flat, top, most, total, mean=None, row=None):
    """As `exponentials`, for a row of several chunks.  Each thread has the maximum and the sum of its elements until the end,
    so that none waits for others while it loads.  row: the copy of its vectors in shared memory, if there is one."""
    threads = f.lanes[1]
    known, each, means = (T.alloc_fragment((threads,), f.acc) for _ in range(3))
    T.fill(known, -T.infinity(f.acc))
    T.clear(each)
    T.clear(means)
    for c in T.serial(*f.whole):
        add_chunk(f, X, Flat, top, c, False, known, each, means if mean is not None else None, row)
    for e in T.serial(f.cut):
        add_chunk(f, X, Flat, top, f.nth_cut(e), True, known, each, means if mean is not None else None, row)
    T.reduce_max(known, most, dim=0)
    for i in T.Parallel(1):
        most[i] = T.if_then_else(most[i] == -T.infinity(f.acc), T.cast(0, f.acc), most[i])
    for t in T.Parallel(threads):
        each[t] = each[t] * f.exp(known[t] - most[0])
    T.reduce_sum(each, total, dim=0)
    if mean is not None:
        T.reduce_sum(means, mean, dim=0)


@T.macro
def exponentials(f, X, top, x, most, total, mean=None):
    """The maximum of each row (0 where all are -inf) and the sum of exp(x - maximum); x has the exponentials.

    mean: gets the sum of each row, if it is given.
    """
    t = f.tile
    T.copy(X[top, 0], x)
    if mean is not None:
        T.reduce_sum(x, mean, dim=1)
    if f.n % t.width != 0:
        for i, j in T.Parallel(t.rows, t.width):
            x[i, j] = T.if_then_else(j < f.n, x[i, j], -T.infinity(f.acc))
    T.reduce_max(x, most, dim=1)
    for i in T.Parallel(t.rows):
        most[i] = T.if_then_else(most[i] == -T.infinity(f.acc), T.cast(0, f.acc), most[i])
    for i, j in T.Parallel(t.rows, t.width):
        x[i, j] = f.exp(x[i, j] - most[i])
    T.reduce_sum(x, total, dim=1)


@T.macro
def scale_chunk(f, X, Y, flats, top, c, cut, most, total, row):
    """Compute a chunk of a long row's exponentials again, and store it times `total`."""
    vectors, threads, each = f.lanes
    x, y = T.alloc_fragment(f.lanes, f.acc), T.alloc_fragment(f.lanes, f.acc)
    load_long(f, X, flats[0], top, c, x, cut, 0, row)
    for r, t, v in T.Parallel(*f.lanes, loop_layout=f.layout):
        y[r, t, v] = f.exp(x[r, t, v] - most[0]) * total[0]
    store_long(f, y, Y, flats[1], top, c, cut)


@T.macro
def long_softmax(f, X, Y, flats, top, most, total, row=None):
    """The softmax of a row of several chunks."""
    long_exponentials(f, X, flats[0], top, most, total, None, row)
    for i in T.Parallel(1):
        total[i] = T.cast(1, f.acc) / total[i]
    for c in T.serial(*f.whole):
        scale_chunk(f, X, Y, flats, top, c, False, most, total, row)
    for e in T.serial(f.cut):
        scale_chunk(f, X, Y, flats, top, f.nth_cut(e), True, most, total, row)


def softmax_forward(f: SoftmaxForm) -> Any:
    """The kernel (X, Y, FlatX, FlatY)."""
    t, n, m, v = f.tile, f.n, *T.dynamic("m, v")

    @T.prim_func
    def softmax(X: T.Tensor((m, n), f.kind), Y: T.Tensor((m, n), f.kind), FlatX: f.flat(v), FlatY: f.flat(v)):
        with T.Kernel(T.ceildiv(m, t.rows), threads=t.threads) as bx:
            most, total = T.alloc_fragment((t.rows,), f.acc), T.alloc_fragment((t.rows,), f.acc)
            if t.chunks == 1:
                x = T.alloc_fragment((t.rows, t.width), f.acc)
                exponentials(f, X, bx * t.rows, x, most, total)
                for i in T.Parallel(t.rows):
                    total[i] = T.cast(1, f.acc) / total[i]
                for i, j in T.Parallel(t.rows, t.width):
                    x[i, j] = x[i, j] * total[i]
                T.copy(x, Y[bx * t.rows, 0])
            else:
                long_softmax(f, X, Y, (FlatX, FlatY), bx, most, total)

    return softmax


def softmax_ahead(f: SoftmaxForm) -> Any:
    """The kernel (X, Y, FlatX, FlatY, blocks) for long rows of which an SM's shared memory holds several."""
    n, m, v = f.n, *T.dynamic("m, v")

    @T.prim_func
    def softmax(X: T.Tensor((m, n), f.kind), Y: T.Tensor((m, n), f.kind), FlatX: f.flat(v), FlatY: f.flat(v),
                blocks: T.int32):
        with T.Kernel(blocks, threads=f.tile.threads) as bx:
            row = T.alloc_shared((1, f.span), f.kind)
            most, total = T.alloc_fragment((1,), f.acc), T.alloc_fragment((1,), f.acc)
            for k in T.Pipelined(T.ceildiv(m - bx, blocks), num_stages=f.ahead):
                top = k * blocks + bx
                if f.shifted:
                    T.copy(FlatX[0, top * n // VECTOR * VECTOR], row)
                else:
                    T.copy(X[top, 0], row)
                long_softmax(f, X, Y, (FlatX, FlatY), top, most, total, row)

    return softmax


@T.macro
def add_chunk_of_gradient(f, Y, dY, flats, top, c, cut, total):
    """Add y dy of a chunk of a long row to what each thread has of their sum."""
    y, g, both = (T.alloc_fragment(f.lanes, kind) for kind in (f.kind, f.kind, f.acc))
    of_vectors = T.alloc_fragment(f.lanes[:2], f.acc)
    load_long(f, Y, flats[0], top, c, y, cut)
    load_long(f, dY, flats[1], top, c, g, cut)
    for r, t, v in T.Parallel(*f.lanes, loop_layout=f.layout):
        both[r, t, v] = T.cast(y[r, t, v], f.acc) * T.cast(g[r, t, v], f.acc)
    T.reduce_sum(both, of_vectors, dim=2)
    T.reduce_sum(of_vectors, total, dim=0, clear=False)


@T.macro
def gradient_chunk(f, Y, dY, dX, flats, top, c, cut, total):
    """Store the gradient of a chunk of a long row."""
    y, g, both = (T.alloc_fragment(f.lanes, kind) for kind in (f.kind, f.kind, f.acc))
    load_long(f, Y, flats[0], top, c, y, cut)
    load_long(f, dY, flats[1], top, c, g, cut)
    for r, t, v in T.Parallel(*f.lanes, loop_layout=f.layout):
        both[r, t, v] = T.cast(y[r, t, v], f.acc) * (T.cast(g[r, t, v], f.acc) - total[0])
    store_long(f, both, dX, flats[2], top, c, cut)


@T.macro
def long_gradient(f, Y, dY, dX, flats, top):
    """The gradient of a row of several chunks."""
    each, total = T.alloc_fragment(f.lanes[1:2], f.acc), T.alloc_fragment((1,), f.acc)
    T.clear(each)
    for c in T.serial(*f.whole):
        add_chunk_of_gradient(f, Y, dY, flats, top, c, False, each)
    for e in T.serial(f.cut):
        add_chunk_of_gradient(f, Y, dY, flats, top, f.nth_cut(e), True, each)
    T.reduce_sum(each, total, dim=0)
    for c in T.serial(*f.whole):
        gradient_chunk(f, Y, dY, dX, flats, top, c, False, total)
    for e in T.serial(f.cut):
        gradient_chunk(f, Y, dY, dX, flats, top, f.nth_cut(e), True, total)


def softmax_backward(f: SoftmaxForm) -> Any:
    """The kernel (Y, dY, dX, FlatY, FlatdY, FlatdX).  Where a thread has many elements, they are in registers as in memory."""
    t, n, m, v = f.tile, f.n, *T.dynamic("m, v")
    kept = f.kind if t.rows * t.width > 16 * t.threads else f.acc

    @T.prim_func
    def softmax_gradient(Y: T.Tensor((m, n), f.kind), dY: T.Tensor((m, n), f.kind), dX: T.Tensor((m, n), f.kind),
                         FlatY: f.flat(v), FlatdY: f.flat(v), FlatdX: f.flat(v)):
        with T.Kernel(T.ceildiv(m, t.rows), threads=t.threads) as bx:
            if t.chunks > 1:
                long_gradient(f, Y, dY, dX, (FlatY, FlatdY, FlatdX), bx)
            else:
                y, g = (T.alloc_fragment((t.rows, t.width), kept) for _ in range(2))
                both, total = T.alloc_fragment((t.rows, t.width), f.acc), T.alloc_fragment((t.rows,), f.acc)
                T.copy(Y[bx * t.rows, 0], y)
                T.copy(dY[bx * t.rows, 0], g)
                for i, j in T.Parallel(t.rows, t.width):
                    both[i, j] = T.cast(y[i, j], f.acc) * T.cast(g[i, j], f.acc)
                T.reduce_sum(both, total, dim=1)
                for i, j in T.Parallel(t.rows, t.width):
                    both[i, j] = T.cast(y[i, j], f.acc) * (T.cast(g[i, j], f.acc) - total[i])
                T.copy(both, dX[bx * t.rows, 0])

    return softmax_gradient


@T.macro
def reduce_rows(f, m, labels, each, total, count):
    """The sum of the rows' losses, or their mean over those that are not ignored, in one block; and the number of these."""
    with T.Kernel(1, threads=512) as _:
        losses, ones = T.alloc_fragment((_REDUCED,), f.acc), T.alloc_fragment((_REDUCED,), f.acc)
        loss, one = T.alloc_fragment((1,), f.acc), T.alloc_fragment((1,), f.acc)
        T.clear(losses)
        T.clear(ones)
        T.pdl_sync()
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
    loss = s - at_label
    if f.smoothing != 0:  # 0 times an infinite element would be NaN
        loss += f.rows.number(f.smoothing) * (at_label - mean)
    return loss + f.rows.number(f.z_loss) * s * s if f.z_loss != 0 else loss


def entropy_forward(f: EntropyForm) -> Any:
    """The kernel (X, labels, each, logs, loss, count, Flat): each row's loss and s, and their sum or
    mean, and the number of rows that are not ignored."""
    t, n, rows, m, v = f.tile, f.n, f.rows, *T.dynamic("m, v")

    @T.prim_func
    def cross_entropy(X: T.Tensor((m, n), f.kind), labels: T.Tensor((m,), f.labels), each: T.Tensor((m,), f.acc),
                      logs: T.Tensor((m,), f.acc), loss: T.Tensor((1,), f.acc), count: T.Tensor((1,), f.acc),
                      Flat: rows.flat(v)):
        with T.Kernel(T.ceildiv(m, t.rows), threads=t.threads) as bx:
            most, total, mean = (T.alloc_fragment((t.rows,), f.acc) for _ in range(3))
            T.clear(mean)
            if t.chunks == 1:
                x = T.alloc_fragment((t.rows, t.width), f.acc)
                exponentials(rows, X, bx * t.rows, x, most, total, mean if f.smoothing != 0 else None)
            else:
                long_exponentials(rows, X, Flat, bx, most, total, mean if f.smoothing != 0 else None)
            if f.smoothing != 0:
                for i in T.Parallel(t.rows):
                    mean[i] = mean[i] / T.cast(n, f.acc)
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
    """The kernel (X, labels, logs, count, grad, dX, Flat, FlatdX)."""
    t, n, rows, m, v = f.tile, f.n, f.rows, *T.dynamic("m, v")

    @T.prim_func
    def cross_entropy_gradient(X: T.Tensor((m, n), f.kind), labels: T.Tensor((m,), f.labels), logs: T.Tensor((m,), f.acc),
                               count: T.Tensor((1,), f.acc), grad: T.Tensor((m if f.reduction == "none" else 1,), f.acc),
                               dX: T.Tensor((m, n), f.kind), Flat: rows.flat(v), FlatdX: rows.flat(v)):
        with T.Kernel(T.ceildiv(m, t.rows) * t.chunks, threads=t.threads) as block:
            bx, c = block // t.chunks, block % t.chunks  # in the order of memory
            x, place = T.alloc_fragment((t.rows, t.width), f.acc), T.alloc_fragment((t.rows,), "int32")
            s, factor = T.alloc_fragment((t.rows,), f.acc), T.alloc_fragment((t.rows,), f.acc)
            for i in T.Parallel(t.rows):
                row = T.min(bx * t.rows + i, m - 1)
                label, given = T.cast(labels[row], "int64"), grad[row if f.reduction == "none" else 0]
                s[i] = logs[row]
                place[i] = T.cast(T.max(T.min(label, n), -1) - column(rows, bx * t.rows, c, 0), "int32")
                factor[i] = T.if_then_else(label == f.ignored, T.cast(0, f.acc), known_or_nan(
                    f, label, given / count[0] if f.reduction == "mean" else given))
            if rows.shifted:
                if (c >= rows.whole[0]) & (c < rows.whole[1]):
                    load(rows, X, Flat, bx, c, x, False)
                else:
                    load(rows, X, Flat, bx, c, x, True)
            else:
                load(rows, X, Flat, bx * t.rows, c, x, False)
            for i, j in T.Parallel(t.rows, t.width):
                x[i, j] = rows.exp(x[i, j] - s[i])
            if f.z_loss != 0:
                for i, j in T.Parallel(t.rows, t.width):
                    x[i, j] = x[i, j] * (1 + rows.number(2 * f.z_loss) * s[i])
            for i, j in T.Parallel(t.rows, t.width):
                hit = T.if_then_else(place[i] == j, rows.number(1 - f.smoothing), T.cast(0, f.acc))
                x[i, j] = T.if_then_else(factor[i] == 0, T.cast(0, f.acc), (
                    x[i, j] - hit - rows.number(f.smoothing / n)) * factor[i])
            if rows.shifted:
                if (c >= rows.whole[0]) & (c < rows.whole[1]):
                    store(rows, x, dX, FlatdX, bx, c, False)
                else:
                    store(rows, x, dX, FlatdX, bx, c, True)
            else:
                store(rows, x, dX, FlatdX, bx * t.rows, c, False)

    return cross_entropy_gradient


# ---- functions --------------------------------------------------------------------------------------------------------


REDUCTIONS = ("none", "sum", "mean")


def softmax(x: Any, *, target: Any = None) -> Any:
    """exp(x) / sum(exp(x)) over the last dimension; of x's shape and type.

    x: (..., n), float16, bfloat16, float32 or float64; rows are reduced in float32 (float64 for float64).  A row of which all
    elements are -inf gives NaN.  target: as for rms_norm.

    Gradient of x, of its type.  Saved for it: the result.  The same inputs give the same bits.

    Raises training-argument.

    >>> import numpy as np
    >>> softmax(np.zeros((1, 4), np.float32)).tolist()
    [[0.25, 0.25, 0.25, 0.25]]
    """
    return SOFTMAX(x, target_text(target))


def cross_entropy(logits: Any, labels: Any, *, ignore_index: int = -100, label_smoothing: float = 0.0, z_loss: float = 0.0,
                  reduction: str = "mean", target: Any = None) -> Any:
    """The cross-entropy of rows of logits: for each row x with label t, with s = log(sum(exp(x))),

        s - (1 - label_smoothing) x_t - label_smoothing mean(x) + z_loss s^2

    logits: (..., n), float16, bfloat16, float32 or float64.  labels: (...), int32 or int64.  Rows with the label ignore_index
    have neither loss nor gradient; the loss of any other label outside 0 … n - 1 is NaN.
    reduction: "mean" over the rows that are not ignored (NaN where all are), "sum": (); or "none": one loss a row, (...).
    Losses are float32 (float64 for logits of float64).  target: as for rms_norm.

    Gradient of logits, of their type.  Saved for it: logits, labels, and 4 bytes a row (8 for float64): probabilities are
    formed again.  The same inputs give the same bits; nothing waits for the device.

    Raises training-argument.

    >>> import numpy as np
    >>> float(cross_entropy(np.zeros((2, 1), np.float32), np.array([0, -100])))
    0.0
    """
    check_options("cross_entropy", reduction, label_smoothing)
    return CROSS_ENTROPY(logits, labels, int(ignore_index), float(label_smoothing), float(z_loss), reduction,
                         target_text(target))


def check_options(name: str, reduction: str, smoothing: float) -> None:
    """Raises training-argument for a reduction that there is not, and for smoothing by no fraction."""
    if not 0.0 <= smoothing <= 1.0:
        raise error("training-argument", f"label_smoothing of {name} is {smoothing}", expected="a number of 0 to 1",
                    found=str(smoothing))
    if reduction not in REDUCTIONS:
        raise error("training-argument", f"{name} has no reduction ‹{reduction!r}›", expected=f"one of {', '.join(REDUCTIONS)}")


def _softmax_results(x: Any, *others: Any) -> Results:
    check_alike("softmax", x, {})
    return ((tuple(x.shape), type_name(x)),)


def _softmax(x: Any, target: str | None, y: Any) -> None:
    if 0 not in x.shape:
        at = running_on(x, target)
        f = SoftmaxForm.of(x, at).copied(at, x.itemsize)
        given = as_rows(x, f.n), y.reshape(-1, f.n)
        if f.ahead:
            at.kernel(softmax_ahead, f)(*given, *map(f.vectors, given), min(at.chip.sms, given[0].shape[0]))
        else:
            at.kernel(softmax_forward, f)(*given, *map(f.vectors, given))


def _softmax_gradient(y: Any, target: str | None, dy: Any, dx: Any) -> None:
    if 0 not in y.shape:
        n, at = y.shape[-1], running_on(y, target)
        f = SoftmaxForm.of(y, at, min(64 // y.itemsize, 32 if 8192 < n <= 16384 else 16))  # in registers as in memory
        if f.shifted and y.itemsize == 2 and n > _LONG:
            f = f._replace(tile=RowTile(1, 8192, -(-f.span // 8192), 1024))
        given = as_rows(y, n), as_rows(dy, n), dx.reshape(-1, n)
        at.kernel(softmax_backward, f)(*given, *map(f.vectors, given))


SOFTMAX = Function("softmax", Step("Tensor x, str? target", _softmax_results, _softmax),
                   Step("Tensor y, str? target, Tensor dy", _softmax_results, _softmax_gradient),
                   lambda needs, given, made: (made[0], given[1]), (0,))


def _entropy_form(x: Any, labels: Any, at: Place, ignored: int, smoothing: float, z_loss: float, reduction: str
                  ) -> EntropyForm:
    return EntropyForm(*SoftmaxForm.of(x, at, 16, 256)[:5], type_name(labels), reduction, ignored, smoothing, z_loss)


def _entropy_results(x: Any, labels: Any, *options: Any) -> Results:
    check_alike("cross_entropy", x, {"labels": (labels, tuple(x.shape[:-1]), ("int32", "int64"))})
    acc, rows = accumulator(type_name(x)), tuple(x.shape[:-1])
    return (rows if options[3] == "none" else (), acc), ((prod(rows),), acc), ((1,), acc)


def _entropy_run(x: Any, labels: Any, *others: Any) -> None:
    """others: the options, among them the reduction and the target; the results."""
    *options, target, loss, logs, count = others
    n, rows, whole = int(x.shape[-1]), prod(x.shape[:-1]), options[-1] != "none"
    if rows == 0 or n == 0:
        loss[...] = float("nan") if options[-1] == "mean" else 0.0
        return
    at, x = running_on(x, target), as_rows(x, n)
    f = _entropy_form(x, labels, at, *options)
    each = empty(x, (rows,), f.acc) if whole else loss.reshape(rows)
    at.kernel(entropy_forward, f)(x, as_rows(labels, 1).reshape(rows), each, logs, loss.reshape(1) if whole else None,
                                  count if whole else None, f.rows.vectors(x))


def _entropy_gradient_results(x: Any, *others: Any) -> Results:
    return ((tuple(x.shape), type_name(x)),)


def _entropy_gradient(x: Any, labels: Any, logs: Any, count: Any, *others: Any) -> None:
    *options, target, grad, dx = others
    if 0 not in x.shape:
        n, at = x.shape[-1], running_on(x, target)
        x, dx, f = as_rows(x, n), dx.reshape(-1, n), _entropy_form(x, labels, at, *options)
        at.kernel(entropy_backward, f)(
            x, as_rows(labels, 1).reshape(-1), logs, count if f.reduction == "mean" else None, as_rows(grad, 1).reshape(-1), dx,
            f.rows.vectors(x), f.rows.vectors(dx))


CROSS_ENTROPY = Function(
    "cross_entropy",
    Step("Tensor logits, Tensor labels, int ignored, float smoothing, float z_loss, str reduction, str? target",
         _entropy_results, _entropy_run, 3),
    Step("Tensor logits, Tensor labels, Tensor logs, Tensor count, int ignored, float smoothing, float z_loss, "
         "str reduction, str? target, Tensor grad", _entropy_gradient_results, _entropy_gradient),
    lambda needs, given, made: (*given[:2], *made[1:], *given[2:]), (0,))
