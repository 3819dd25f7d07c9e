"""Expert parallelism: tokens travel to the ranks that have their experts, and what the experts make of them is fetched back.

A pair is a token and one of its experts.  One kernel numbers the pairs of each expert and tells all ranks how many there are;
one stores the tokens in the rows that follow from these counts; one fetches rows back and sums them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import tilelang
import tilelang.language as T
from tilelang.library import grouped_matmul

from .collectives import HELD, MOST_BLOCKS, THREADS, VECTOR, _pad, _send
from .host import create_tensor, current, is_symmetric, same_program

WARPS = 4  # of a block that numbers pairs, one for each expert
TOGETHER = 8  # groups of 32 pairs that a warp loads at once
FETCHED = 8  # rows that a block has on their way


@dataclass(frozen=True)
class Routes:
    """Where the pairs of a token and an expert went, on the device.

    there: (tokens, k, 2) int32, rank and row of each pair.  sizes: received rows of each of this rank's experts, int32.
    """

    there: Any
    sizes: Any


@T.macro
def _hits(experts, e, at, hits):
    """Which of 32 pairs from `at` on go to expert e, as bits."""
    p = at + T.get_lane_idx()
    hits[0] = T.ballot(T.And(p < experts.shape[0], T.cast(experts[T.min(p, experts.shape[0] - 1)], "int32") == e))


@T.macro
def _number(index, at, hits, seen):
    """Number these pairs, after those that have been seen."""
    lane = T.get_lane_idx()
    if hits[0] >> T.cast(lane, "uint64") & 1 > 0:
        before = hits[0] & (T.cast(1, "uint64") << T.cast(lane, "uint64")) - 1
        index[at + lane] = seen[0] + T.cast(T.popcount(before), "int32")
    seen[0] += T.cast(T.popcount(hits[0]), "int32")


def number_program(pairs: int, kind: str, count: int, ranks: int) -> Any:
    """index[p] = how many pairs before p have its expert; table[r, e], on all ranks: how many pairs of rank r have expert e."""

    together = min(TOGETHER, -(-pairs // 32))

    @T.prim_func
    def number(experts: T.Tensor((pairs,), kind), index: T.Tensor((pairs,), "int32"),
               table: T.SymmTensor((ranks, count), "int32")):
        with T.Kernel(T.ceildiv(count, WARPS), threads=32 * WARPS) as b:
            hits = [T.alloc_local((1,), "uint64") for _ in range(together)]
            seen, e = T.alloc_local((1,), "int32"), b * WARPS + T.get_thread_binding() // 32
            seen[0] = 0
            for k in T.serial(T.ceildiv(pairs, 32 * together)):
                _ = [_hits(experts, e, (k * together + n) * 32, x) for n, x in enumerate(hits)]
                _ = [_number(index, (k * together + n) * 32, x, seen) for n, x in enumerate(hits)]
            if T.And(T.get_lane_idx() < ranks, e < count):
                T.st(table[T.get_rank() % ranks, e], seen[0], scope="sys", dst_pe=T.get_lane_idx())

    return number


@T.macro
def _first_rows(table, own, total, first):
    """first[e] = the row, on its rank, of this rank's first pair of expert e: experts in order, ranks in order for each."""
    ranks, count = table.shape
    me = T.get_rank() % ranks
    for e in T.Parallel(count):
        total[e] = sum([table[s, e] for s in range(ranks)])
    for e in T.Parallel(count):
        row = T.alloc_var("int32", init=0)
        row = sum([T.if_then_else(s < me, table[s, e], 0) for s in range(ranks)])
        for j in T.unroll(own):
            row += T.if_then_else(j < e % own, total[e // own * own + j], 0)
        first[e] = row


@T.macro
def _fetch_pair(x, experts, index, first, own, p, row, place):
    """Load the token of pair p, and find where it goes."""
    pairs = experts.shape[0]
    known = T.min(p, pairs - 1)
    e = T.cast(experts[known], "int32")
    place[0] = T.if_then_else(p < pairs, e // own, -1)
    place[1] = first[e] + index[known]
    T.copy(x[known // (pairs // x.shape[0]), :], row)


@T.macro
def _send_pair(there, p, row, place, y):
    _send(row, place, y)
    if T.And(place[0] >= 0, T.get_thread_binding() == 0):
        there[p, 0] = place[0]
        there[p, 1] = place[1]


def send_pairs_program(shape: tuple[int, int, int], room: int, dtype: str, kind: str, count: int, ranks: int, blocks: int,
                       threads: int = THREADS) -> Any:
    """Row there[p, 1] of y on rank there[p, 0] = the token of pair p; sizes: rows of each of this rank's experts.

    shape: tokens, experts of a token, width.
    """
    (tokens, k, width), own = shape, count // ranks
    most = min(HELD, -(-tokens * k // blocks))

    @T.prim_func
    def send(x: T.Tensor((tokens, width), dtype), experts: T.Tensor((tokens * k,), kind),
             index: T.Tensor((tokens * k,), "int32"), there: T.Tensor((tokens * k, 2), "int32"),
             sizes: T.Tensor((own,), "int32"), y: T.SymmTensor((room, width), dtype),
             table: T.SymmTensor((ranks, count), "int32"), pad: T.SymmTensor((MOST_BLOCKS, 2 * ranks), "int64")):
        with T.Kernel(blocks, threads=threads) as b:
            held = [(T.alloc_fragment((width,), dtype), T.alloc_local((2,), "int32")) for _ in range(most)]
            total, first = T.alloc_shared((count,), "int32"), T.alloc_shared((count,), "int32")
            T.barrier_all(pad[b, 0:2 * ranks])
            _first_rows(table, own, total, first)
            T.sync_threads()
            for n in T.serial(T.ceildiv(tokens * k - b, blocks * most)):
                p = (n * most) * blocks + b
                _ = [_fetch_pair(x, experts, index, first, own, p + i * blocks, *one) for i, one in enumerate(held)]
                _ = [_send_pair(there, p + i * blocks, *one, y) for i, one in enumerate(held)]
            if b == 0:
                for e in T.Parallel(own):
                    sizes[e] = total[T.get_rank() % ranks * own + e]
            T.barrier_all(pad[b, 0:2 * ranks])

    return send


@T.macro
def _fetch_back(y, there, weights, t, j, row, factor):
    T.copy(T.remote(y, there[t, j, 0])[there[t, j, 1], :], row)
    factor[0] = T.cast(weights[t, j], "float32")


@T.macro
def _add_rows(y, there, weights, t, first, rows, total):
    """Load rows of experts first, first + 1, ... of token t, and add them."""
    _ = [_fetch_back(y, there, weights, t, first + j, *one) for j, one in enumerate(rows)]
    for c in T.Parallel(total.shape[0]):
        total[c] += sum([factor[0] * T.cast(row[c], "float32") for row, factor in rows])


def sum_pairs_program(shape: tuple[int, int, int], room: int, dtype: str, kind: str, ranks: int, blocks: int,
                      threads: int = THREADS) -> Any:
    """out[t] = the sum over j of weights[t, j] times row there[t, j, 1] of y on rank there[t, j, 0].

    shape: tokens, experts of a token, width.
    """
    tokens, k, width = shape

    @T.prim_func
    def fetch(y: T.SymmTensor((room, width), dtype), there: T.Tensor((tokens, k, 2), "int32"),
              weights: T.Tensor((tokens, k), kind), out: T.Tensor((tokens, width), dtype),
              pad: T.SymmTensor((MOST_BLOCKS, 2 * ranks), "int64")):
        with T.Kernel(blocks, threads=threads) as b:
            rows = [(T.alloc_fragment((width,), dtype), T.alloc_local((1,), "float32")) for _ in range(min(k, FETCHED))]
            total = T.alloc_fragment((width,), "float32")
            T.barrier_all(pad[b, 0:2 * ranks])
            for n in T.serial(T.ceildiv(tokens - b, blocks)):
                t = n * blocks + b
                T.clear(total)
                _ = [_add_rows(y, there, weights, t, n, rows[:k - n], total) for n in range(0, k, FETCHED)]
                T.copy(total, out[t, :])
            T.barrier_all(pad[b, 0:2 * ranks])

    return fetch


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _threads(width: int, item: int) -> int:
    """Of a block whose threads each move a vector of a row, if it is short enough."""
    return max(128, min(THREADS, width * item // VECTOR // 32 * 32))


@cache
def _box(rows: int, width: int, dtype: Any, what: str) -> Any:
    return create_tensor((rows, width), dtype, what)


@cache
def _kernels(shape: tuple[int, int, int], room: int, dtype: Any, kind: Any, count: int) -> tuple[Any, ...]:
    """(The kernel that numbers pairs, the one that sends them, the table of counts.)"""
    import torch

    (tokens, k, width), ranks = shape, current().ranks
    blocks, threads = min(MOST_BLOCKS, tokens * k), _threads(width, dtype.itemsize)
    programs = (number_program(tokens * k, _name(kind), count, ranks),
                send_pairs_program(shape, room, _name(dtype), _name(kind), count, ranks, blocks, threads))
    kernels = [tilelang.compile(p, target="cuda") for p in programs]
    for kernel in kernels:
        same_program(kernel, f"{shape} pairs of {count} experts, {_name(dtype)}, room for {room}")
    return *kernels, create_tensor((ranks, count), torch.int32, f"how many pairs each rank has for {count} experts")


@cache
def _fetcher(shape: tuple[int, int, int], room: int, dtype: Any, kind: Any) -> Any:
    ranks = current().ranks
    kernel = tilelang.compile(sum_pairs_program(shape, room, _name(dtype), _name(kind), ranks, min(MOST_BLOCKS, shape[0]),
                                                _threads(shape[2], dtype.itemsize)), target="cuda")
    same_program(kernel, f"{shape} pairs, {_name(dtype)}, room for {room}")
    return lambda *tensors: kernel(*tensors, _pad())


def dispatch(x: Any, experts: Any, count: int, room: int) -> tuple[Any, Routes]:
    """(The tokens that this rank's experts get, expert by expert, in `room` rows; their routes.)

    x: contiguous, (tokens, width).  experts: contiguous (tokens, k) integers, the experts of each token, of `count` in all;
    rank r has the r-th count / ranks of them.  room: the same on every rank, at least as many rows as any rank receives.
    Tokens and k are the same on every rank.  The result is overwritten by the next dispatch of these shapes.  Raises
    symmetric-memory, ranks-disagree.

    Example:
        rows, way = dist.dispatch(x, experts, 64, room=2 * x.shape[0])
        y = dist.combine(grouped_matmul(rows, w, way.sizes), way, weights)
    """
    import torch

    (tokens, width), k, flat = x.shape, experts.shape[1], experts.reshape(-1)
    number, send, table = _kernels((tokens, k, width), room, x.dtype, experts.dtype, count)
    box = _box(room, width, x.dtype, "what dispatch receives")
    index, there, sizes = (torch.empty(shape, dtype=torch.int32, device=x.device) for shape in (
        (tokens * k,), (tokens * k, 2), (count // current().ranks,)))
    number(flat, index, table)
    send(x, flat, index, there, sizes, box, table, _pad())
    return box, Routes(there.view(tokens, k, 2), sizes)


def combine(y: Any, way: Routes, weights: Any) -> Any:
    """(tokens, width): the sum of what the experts made of each token, times its weights.

    y: (room, width), of the rows of dispatch, in their order; one that is not symmetric is copied.  weights: contiguous,
    (tokens, k).  Summed in float32.  Raises what dispatch raises.

    Example:
        y = dist.combine(y, way, weights)
    """
    import torch

    (tokens, k), (room, width) = weights.shape, y.shape
    if not y.is_contiguous() or not is_symmetric(y):
        y = _box(room, width, y.dtype, "what combine fetches").copy_(y)
    out = torch.empty(tokens, width, dtype=y.dtype, device=y.device)
    _fetcher((tokens, k, width), room, y.dtype, weights.dtype)(y, way.there, weights, out)
    return out


def moe(x: Any, experts: Any, weights: Any, gate_up: Any, down: Any, room: int) -> Any:
    """A layer of experts over all ranks: for each token, the weighted sum of down(silu(gate) * up) of its experts.

    x: (tokens, width).  experts, weights: (tokens, k).  gate_up: (experts of this rank, width, 2 * hidden), columns of gate,
    then of up.  down: (experts of this rank, hidden, width).  room: as for dispatch.  Raises what dispatch and grouped_matmul
    raise.

    Example:
        y = dist.moe(x, experts, weights, gate_up, down, room=2 * x.shape[0])
    """
    import torch

    rows, way = dispatch(x, experts, gate_up.shape[0] * current().ranks, room)
    gate, up = grouped_matmul(rows, gate_up, way.sizes).chunk(2, -1)
    y = _box(room, down.shape[2], x.dtype, "what combine fetches")
    with torch.no_grad():  # which the rest does not record either
        grouped_matmul(torch.nn.functional.silu(gate) * up, down, way.sizes, out=y)
    return combine(y, way, weights)
