"""`topk_indices`: the k largest of the scores of each row, in the order of their indices.

A score is a 32-bit key of the same order. The keys of a row, or of a chunk of a long one, are in registers, and the k-th
largest is found bit after bit: a bit is set if k keys or more are at least as large. Keys above it are taken, and of those
equal to it the first, each at the place that a running count gives it. So the result has one order, whatever the order in
which threads run.
"""

from __future__ import annotations

from typing import Any

import tilelang.language as T
from tilelang.errors import error

from ..arrays import aligned, contiguous, empty, filled, type_name, zeros
from ..place import Place
from .inputs import check_like, running_on

SIZE = 1 << 14  # keys of a block: 64 in each of 256 threads
FEW = 4  # keys of a thread that are searched bit by bit, where its others are known to be taken or left
BINS = 2048  # of a histogram
DIGITS = (21, 11), (10, 11), (0, 10)  # (first bit, bits) of what each histogram counts
FEW_ROWS = 4  # for each launch of chunks: up to so many rows, blocks of few scores that read them five times take less time


def topk_indices(scores: Any, k: int, ends: Any = None, *, target: Any = None) -> Any:
    """The indices of the k largest of the first ends[i] scores of each row, rising: (rows, k) int32; -1 behind the last one.

    scores: (rows, n) float32; a NaN counts as larger than all numbers by its sign. Of equal scores the first are taken. ends:
    (rows,) int32; None: n. Results are the same bits for the same inputs. Each score is read once where k <= 8192 and rows are
    many.
    Raises attention-argument, attention-shape, attention-option, attention-gradient.

    >>> topk_indices(np.array([[3, 1, 2, 3], [0, 5, 6, 7]], np.float32), 2, np.array([4, 1], np.int32)).tolist()
    [[0, 3], [0, -1]]
    """
    if scores.ndim != 2 or type_name(scores) != "float32":
        found = f"{type_name(scores)} {tuple(scores.shape)}"
        raise error("attention-argument", f"topk_indices: scores are ‹{found}›", expected="float32 (rows, n)",
                    hint="scores.float(), with a dimension of rows")
    if k < 1:
        raise error("attention-option", f"topk_indices of ‹{k}› elements", expected="a positive number",
                    hint="k is a number of Python")
    rows, n = (int(x) for x in scores.shape)
    ends = filled(scores, (rows,), n, "int32") if ends is None else ends
    check_like("attention-shape", "topk_indices", scores, {"ends": (ends, (rows,), "int32")}, hint="convert the arguments")
    if not n:
        return filled(scores, (rows, k), -1, "int32")
    out = empty(scores, (rows, k), "int32")
    if rows:
        at = running_on(scores, target)
        _select(at, contiguous(scores), contiguous(ends), k, out)
    return out


def _select(at: Place, x: Any, ends: Any, k: int, out: Any) -> None:
    """Write the indices of the k largest of each row to `out`."""
    rows, n = (int(d) for d in x.shape)
    if n > SIZE and (2 * k > SIZE or rows <= FEW_ROWS * _launches(n, k)):
        piece, threads = (4096, 512) if at.target.is_gpu else (256, 32)
        counts = empty(x, (2, rows, -(-n // piece)), "int32")
        at.kernel(histogram_kernel, k, piece, threads)(
            x, ends, zeros(x, (3, rows, BINS), "int32"), empty(x, (3, rows, 2), "int32"), counts, out)
        return
    where = empty(x, (1, 1), "int32")  # not read in the first launch
    mapped = False
    while n > SIZE:  # the k largest of each chunk hold those of the row, in the same order
        chunks = -(-n // SIZE)
        values, indices, counts = (empty(x, s, e) for s, e in (
            ((rows, chunks * k), "float32"), ((rows, chunks * k), "int32"), ((rows,), "int32")))
        at.kernel(chunk_kernel, k, _width(x), mapped)(x, ends, where, values, indices, counts)
        x, ends, where, n, mapped = values, counts, indices, chunks * k, True
    size = max(1024, 1 << (n - 1).bit_length())
    at.kernel(row_kernel, k, size, _width(x), mapped)(x, ends, where, out)


def _launches(n: int, k: int) -> int:
    """Launches that leave the k largest of n scores, by chunks of which each leaves k. k: at most half a chunk."""
    return 1 if n <= SIZE else 1 + _launches(-(-n // SIZE) * k, k)


def _width(x: Any) -> int:
    """Scores that a thread loads at once."""
    return 4 if x.shape[1] % 4 == 0 and aligned(x) else 1


def _ordered(x: Any) -> Any:
    """The bits of a float32 as a number of the same order; the two zeros are one number."""
    bits = T.reinterpret(T.if_then_else(x == 0.0, 0.0, x), "int32")
    return T.reinterpret(bits ^ (bits >> 31 | T.int32(-1 << 31)), "uint32")


@T.macro
def _keys_of(X, r, first, end, width, keys):
    """keys[t, i]: that of score first + t * keys.shape[1] + i of row r; 0, which no number has, from `end` on.

    width: scores of a load; it divides the length of a row, `first` and keys.shape[1]. Where it is 1, neighbouring threads load
    neighbouring scores, and exchange them: a thread's own are far from those of the next."""
    (threads, per), loads = keys.shape, X.shape[1] // width
    raw, each = T.alloc_fragment(keys.shape, "float32"), per // width
    if width > 1:
        for t, i in T.Parallel(*keys.shape):
            raw[t, i] = X[r, T.min(first // width + t * each + i // width, loads - 1) * width + i % width]
    else:
        row = T.alloc_shared((threads, per + 1), "float32")  # one more: threads read different banks
        for j in T.Parallel(threads * per):
            row[j // per, j % per] = X[r, T.min(first + j, loads - 1)]
        for t, i in T.Parallel(*keys.shape):
            raw[t, i] = row[t, i]
    for t, i in T.Parallel(*keys.shape):
        keys[t, i] = _ordered(raw[t, i])
    for t, i in T.Parallel(*keys.shape):  # by itself: a select, not a branch around what precedes
        keys[t, i] = T.if_then_else(t * keys.shape[1] + i < end, keys[t, i], T.uint32(0))


@T.macro
def _least(keys, some):
    """The key that is the `some`-th largest, or another that as many are not less than.

    The bits of all keys are looked at until few agree with those that are found. Their keys are then moved together."""
    threads, per = keys.shape
    few = min(threads * per, FEW * threads)
    mine, count = T.alloc_fragment((threads,), "int32"), T.alloc_fragment((1,), "int32")
    least, bit = T.alloc_var("uint32", init=0), T.alloc_var("uint32", init=1 << 31)
    low, high = T.alloc_var("int32", init=threads * per), T.alloc_var("int32", init=0)  # keys from `least`, and above all open
    while T.And(bit != T.uint32(0), low - high > few):
        T.clear(mine)
        for i in T.unroll(per):
            for t in T.Parallel(threads):
                mine[t] += T.if_then_else(keys[t, i] >= least | bit, 1, 0)
        T.reduce_sum(mine, count, dim=0)
        if count[0] >= some:
            least = least | bit
            low = count[0]
        else:
            high = count[0]
        bit = T.if_then_else(count[0] == some, T.uint32(0), bit >> T.uint32(1))
    if bit != T.uint32(0):
        open_ = bit | bit - T.uint32(1)
        packed, part = T.alloc_shared((few,), "uint32"), T.alloc_fragment((threads, few // threads), "uint32")
        T.clear(packed)
        T.clear(mine)
        for i in T.unroll(per):
            for t in T.Parallel(threads):
                mine[t] += T.if_then_else(T.And(keys[t, i] >= least, keys[t, i] - least <= open_), 1, 0)
        before = T.alloc_fragment((threads,), "int32")
        T.copy(mine, before)
        T.cumsum(before, dim=0)
        for t in T.Parallel(threads):  # one loop: nothing orders its stores
            for i in T.unroll(per):
                if T.And(keys[t, i] >= least, keys[t, i] - least <= open_):
                    before[t] -= 1
                    packed[before[t]] = keys[t, i]
        for t, i in T.Parallel(threads, few // threads):
            part[t, i] = packed[t * (few // threads) + i]
        while bit != T.uint32(0):
            T.clear(mine)
            for i in T.unroll(few // threads):
                for t in T.Parallel(threads):
                    mine[t] += T.if_then_else(part[t, i] >= least | bit, 1, 0)
            T.reduce_sum(mine, count, dim=0)
            if count[0] + high >= some:
                least = least | bit
            bit = T.if_then_else(count[0] + high == some, T.uint32(0), bit >> T.uint32(1))
    return least


@T.macro
def _chosen(keys, some, chosen):
    """chosen[:some]: the numbers of the `some` largest keys, rising."""
    threads, per = keys.shape
    mine, before = T.alloc_fragment((threads,), "int32"), T.alloc_fragment((threads,), "int32")
    count = T.alloc_fragment((1,), "int32")
    least = _least(keys, some)
    T.clear(mine)
    for i in T.unroll(per):
        for t in T.Parallel(threads):  # keys above and equal ones, counted in one number
            mine[t] += T.if_then_else(keys[t, i] > least, 1, T.if_then_else(keys[t, i] == least, 65536, 0))
    T.reduce_sum(mine, count, dim=0)
    equal = some - count[0] % 65536
    T.copy(mine, before)
    T.cumsum(before, dim=0)
    for t in T.Parallel(threads):  # places of the next key: among those above, and of equal ones, as far as they are taken
        mine[t] = before[t] - mine[t]
    for t in T.Parallel(threads):
        for i in T.unroll(per):
            taken = T.Or(keys[t, i] > least, T.And(keys[t, i] == least, mine[t] >> 16 < equal))
            place = mine[t] % 65536 + T.min(mine[t] >> 16, equal)
            if taken:
                chosen[place] = t * per + i
            mine[t] += T.if_then_else(keys[t, i] > least, 1, T.if_then_else(keys[t, i] == least, 65536, 0))


def _shape(size: int) -> tuple[int, int]:
    """(threads, keys of each) of a block."""
    threads = max(128, size // 64)
    return threads, size // threads


def row_kernel(k: int, size: int, width: int, mapped: bool) -> Any:
    """The kernel (X, Ends, Where, Out) for rows of at most `size` scores, a multiple of `width`.

    mapped: Where holds the indices of the scores.
    """
    rows, loads, origins, columns = T.dynamic("rows, loads, origins, columns")
    n, (threads, per), most = loads * width, _shape(size), min(k, size)

    @T.prim_func
    def topk_row(X: T.Tensor((rows, n), "float32"), Ends: T.Tensor((rows,), "int32"),
                 Where: T.Tensor((origins, columns), "int32"), Out: T.Tensor((rows, k), "int32")):
        with T.Kernel(rows, threads=threads) as r:
            T.annotate_min_blocks_per_sm(2)
            T.assume(loads >= 1)
            keys, chosen = T.alloc_fragment((threads, per), "uint32"), T.alloc_shared((max(32, most),), "int32")
            end = T.max(T.min(Ends[r], n), 0)
            some = T.min(end, k)
            _keys_of(X, r, 0, end, width, keys)
            _chosen(keys, some, chosen)
            for i in T.Parallel(k):
                at = T.if_then_else(i < some, chosen[T.min(i, most - 1)], 0)
                Out[r, i] = T.if_then_else(i < some, Where[r, at] if mapped else at, -1)

    return topk_row


def chunk_kernel(k: int, width: int, mapped: bool) -> Any:
    """The kernel (X, Ends, Where, Values, Indices, Counts): the k largest of each chunk of `SIZE` scores with their indices.

    Counts: how many of a row's places are used; these are the first.
    """
    rows, loads, m, origins, columns = T.dynamic("rows, loads, m, origins, columns")
    n, (threads, per) = loads * width, _shape(SIZE)

    @T.prim_func
    def topk_chunk(X: T.Tensor((rows, n), "float32"), Ends: T.Tensor((rows,), "int32"),
                   Where: T.Tensor((origins, columns), "int32"), Values: T.Tensor((rows, m), "float32"),
                   Indices: T.Tensor((rows, m), "int32"), Counts: T.Tensor((rows,), "int32")):
        with T.Kernel(T.ceildiv(n, SIZE), rows, threads=threads) as (c, r):
            T.annotate_min_blocks_per_sm(2)
            T.assume(loads >= 1)
            keys, chosen = T.alloc_fragment((threads, per), "uint32"), T.alloc_shared((max(32, k),), "int32")
            last = T.max(T.min(Ends[r], n), 0)
            end = T.max(T.min(last - c * SIZE, SIZE), 0)
            if c == 0:
                Counts[r] = last // SIZE * k + T.min(last % SIZE, k)
            _keys_of(X, r, c * SIZE, end, width, keys)
            _chosen(keys, T.min(end, k), chosen)
            for i in T.Parallel(k):
                if i < T.min(end, k):
                    at = c * SIZE + chosen[i]
                    Values[r, c * k + i] = X[r, at]
                    Indices[r, c * k + i] = Where[r, at] if mapped else at

    return topk_chunk


@T.macro
def _tally(X, r, first, end, hist, Hist, level, least, shape):
    """Count the keys of a piece of row r that agree with the bits found, by their next bits, in Hist[level, r, :].

    hist: (BINS,), shared. shape: (keys of a piece, threads)."""
    shift, bits = DIGITS[level]
    T.clear(hist)
    for j in T.Parallel(shape[0]):
        if first + j < end:
            key = _ordered(X[r, first + j])
            if shift + bits == 32:
                T.atomic_add(hist[T.cast(key >> T.uint32(shift), "int32")], 1)
            else:
                if key >> T.uint32(shift + bits) == least >> T.uint32(shift + bits):
                    T.atomic_add(hist[T.cast(key >> T.uint32(shift) & T.uint32(2**bits - 1), "int32")], 1)
    for b in T.Parallel(BINS):
        if hist[b] > 0:
            T.atomic_add(Hist[level, r, b], hist[b])


@T.macro
def _narrowed(Hist, Found, r, g, want, hist, level):
    """(the bits found with those of Hist[level, r, :], the rank among the keys that agree with them of the key sought).

    Found[level, r]: both, for the next launch. want: the rank among all keys."""
    last, digit = T.alloc_fragment((BINS,), "int32"), T.alloc_fragment((1,), "int32")
    T.copy(Hist[level, r, :], hist)
    T.cumsum(hist, reverse=True)
    before = T.uint32(0) if level == 0 else T.reinterpret(Found[level - 1, r, 0], "uint32")
    place = want if level == 0 else Found[level - 1, r, 1]
    for b in T.Parallel(BINS):
        last[b] = T.if_then_else(hist[b] >= place, b, 0)
    T.reduce_max(last, digit, dim=0)
    least = before | T.cast(digit[0], "uint32") << T.uint32(DIGITS[level][0])
    rank = place - T.if_then_else(digit[0] < BINS - 1, hist[T.min(digit[0] + 1, BINS - 1)], 0)
    if T.And(g == 0, T.get_thread_binding() == 0):
        Found[level, r, 0] = T.reinterpret(least, "int32")
        Found[level, r, 1] = rank
    return least, rank


@T.macro
def _classes(X, r, first, end, least, flags, shape):
    """flags[j]: 1 for a key above `least`, 65536 for one equal to it, 0 for others and from `end` on."""
    for j in T.Parallel(shape[0]):
        key = _ordered(X[r, T.min(first + j, X.shape[1] - 1)])
        taken = T.if_then_else(key > least, 1, T.if_then_else(key == least, 65536, 0))
        flags[j] = T.if_then_else(first + j < end, taken, 0)


def histogram_kernel(k: int, piece: int, threads: int) -> Any:
    """The kernel (X, Ends, Hist, Found, Counts, Out) for any k, in which a block has `piece` scores and reads them five times.

    It finds the k-th largest key by three histograms of 11, 11 and 10 bits, each of the keys that agree with the bits found.
    Hist (3, rows, BINS): zeros. Found (3, rows, 2), Counts (2, rows, pieces): workspace. int32.
    """
    rows, n, pieces = T.dynamic("rows, n, pieces")
    shape = piece, threads

    @T.macro
    def again(X, Ends, Hist, Found, r, g, level):
        hist, end = T.alloc_shared((BINS,), "int32"), T.max(T.min(Ends[r], n), 0)
        least, _ = _narrowed(Hist, Found, r, g, T.min(end, k), hist, level - 1)
        _tally(X, r, g * piece, end, hist, Hist, level, least, shape)

    @T.prim_func
    def topk_long(X: T.Tensor((rows, n), "float32"), Ends: T.Tensor((rows,), "int32"), Hist: T.Tensor((3, rows, BINS), "int32"),
                  Found: T.Tensor((3, rows, 2), "int32"), Counts: T.Tensor((2, rows, pieces), "int32"),
                  Out: T.Tensor((rows, k), "int32")):
        with T.Kernel(pieces, rows, threads=threads) as (g, r):
            hist = T.alloc_shared((BINS,), "int32")
            _tally(X, r, g * piece, T.max(T.min(Ends[r], n), 0), hist, Hist, 0, T.uint32(0), shape)
        with T.Kernel(pieces, rows, threads=threads) as (g, r):
            again(X, Ends, Hist, Found, r, g, 1)
        with T.Kernel(pieces, rows, threads=threads) as (g, r):
            again(X, Ends, Hist, Found, r, g, 2)
        with T.Kernel(pieces, rows, threads=threads) as (g, r):
            hist, flags = T.alloc_shared((BINS,), "int32"), T.alloc_fragment((piece,), "int32")
            count = T.alloc_fragment((1,), "int32")
            end = T.max(T.min(Ends[r], n), 0)
            least, _ = _narrowed(Hist, Found, r, g, T.min(end, k), hist, 2)
            _classes(X, r, g * piece, end, least, flags, shape)
            T.reduce_sum(flags, count, dim=0)
            for j in T.Parallel(1):
                Counts[0, r, g], Counts[1, r, g] = count[j] % 65536, count[j] >> 16
        with T.Kernel(pieces, rows, threads=threads) as (g, r):
            flags = T.alloc_shared((piece,), "int32")
            above, ties = T.alloc_fragment((1,), "int32"), T.alloc_fragment((1,), "int32")
            mine, level = [T.alloc_fragment((threads,), "int32") for _ in (0, 1)]
            end = T.max(T.min(Ends[r], n), 0)
            least, want = T.reinterpret(Found[2, r, 0], "uint32"), Found[2, r, 1]
            T.clear(mine)
            T.clear(level)
            for c in T.serial(T.ceildiv(g, threads)):
                for t in T.Parallel(threads):
                    if c * threads + t < g:
                        mine[t] += Counts[0, r, c * threads + t]
                        level[t] += Counts[1, r, c * threads + t]
            T.reduce_sum(mine, above, dim=0)
            T.reduce_sum(level, ties, dim=0)
            _classes(X, r, g * piece, end, least, flags, shape)
            T.cumsum(flags)
            for j in T.Parallel(piece):
                before = T.if_then_else(j > 0, flags[T.max(j, 1) - 1], 0)
                kind, equal = flags[j] - before, ties[0] + (before >> 16)
                if T.Or(kind == 1, T.And(kind == 65536, equal < want)):
                    Out[r, above[0] + before % 65536 + T.min(equal, want)] = g * piece + j
            if g == 0:
                for i in T.Parallel(k):
                    if i >= T.min(end, k):
                        Out[r, i] = -1

    return topk_long
