"""Collectives on symmetric tensors, as plain tile programs: all-reduce, all-gather, reduce-scatter.

Block b of every rank works on the same elements, so one barrier of these blocks before (what the ranks had written) and one
after (what they may write again) order everything; a small all-reduce takes one signal of each rank instead.  Sums are formed
in the order of the ranks, so that every rank gets the same bits; those of 16-bit floats in float32.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import tilelang
import tilelang.language as T

from .host import create_tensor, current, same_program, symmetric_view

THREADS = 512
VECTOR = 16  # bytes of an access
MOST_BLOCKS = 128  # no more than SMs, so that all run at once
HELD = 4  # rows that send_rows has on their way
ONE_SHOT = THREADS * MOST_BLOCKS * VECTOR  # bytes up to which every rank reads everything: one vector by each thread
EXTRA = 340 << 10  # bytes to another rank that take as long as a barrier of the ranks (four H200s, decision 204)


def sum_type(dtype: str) -> str:
    """The type in which elements are added."""
    return "float32" if dtype in ("float16", "bfloat16") else dtype


def all_reduce_one_shot(n: int, dtype: str, ranks: int, blocks: int, tile: int, threads: int = THREADS) -> Any:
    """x[i] = the sum over all ranks: each stores its elements on all of them, and adds what has come.

    There are two boxes, for calls of even and odd number.  A rank stores into a box again when all others have signalled the
    call between, and so have read it: one signal of each rank is all that a call takes.
    """

    @T.prim_func
    def all_reduce(x: T.Tensor((n,), dtype), box: T.SymmTensor((2, ranks, n), dtype),
                   sent: T.SymmTensor((MOST_BLOCKS, ranks), "int64"), calls: T.Tensor((MOST_BLOCKS,), "int64")):
        with T.Kernel(blocks, threads=threads) as b:
            terms = [T.alloc_fragment((tile,), dtype) for _ in range(ranks)]
            own, total = T.alloc_fragment((tile,), dtype), T.alloc_fragment((tile,), dtype)
            tx, me, call = T.get_thread_binding(), T.get_rank() % ranks, calls[b]
            odd = T.cast(call % 2, "int32")
            T.copy(x[b * tile:b * tile + tile], own)
            _ = [T.copy(own, T.remote(box, r)[odd, me, b * tile:b * tile + tile]) for r in range(ranks)]
            T.sync_threads()
            if tx < ranks:
                T.st(sent[b, me], call + 1, scope="sys", sem="release", dst_pe=tx)
                T.wait_ge(sent[b, tx], call + 1)
            T.sync_threads()
            _ = [T.copy(box[odd, r, b * tile:b * tile + tile], term) for r, term in enumerate(terms)]
            for i in T.Parallel(tile):
                total[i] = sum([T.cast(term[i], sum_type(dtype)) for term in terms])
            T.copy(total, x[b * tile:b * tile + tile])
            if tx == 0:
                calls[b] = call + 1

    return all_reduce


def all_reduce_two_shot(n: int, dtype: str, ranks: int, blocks: int, tile: int, threads: int = THREADS) -> Any:
    """As all_reduce_one_shot; each rank sums every ranks-th tile and stores it on all of them."""

    @T.prim_func
    def all_reduce(x: T.SymmTensor((n,), dtype), pad: T.SymmTensor((MOST_BLOCKS, 2 * ranks), "int64")):
        with T.Kernel(blocks, threads=threads) as b:
            terms = [T.alloc_fragment((tile,), dtype) for _ in range(ranks)]
            total = T.alloc_fragment((tile,), dtype)
            T.barrier_all(pad[b, 0:2 * ranks])
            me = T.get_rank() % ranks  # a range that the compiler knows
            for k in T.serial(T.ceildiv(n, blocks * ranks * tile)):
                _ = [T.copy(T.remote(x, r)[((k * blocks + b) * ranks + me) * tile:
                                           ((k * blocks + b) * ranks + me + 1) * tile], term) for r, term in enumerate(terms)]
                for i in T.Parallel(tile):
                    total[i] = sum([T.cast(term[i], sum_type(dtype)) for term in terms])
                _ = [T.copy(total, T.remote(x, r)[((k * blocks + b) * ranks + me) * tile:
                                                  ((k * blocks + b) * ranks + me + 1) * tile]) for r in range(ranks)]
            T.barrier_all(pad[b, 0:2 * ranks])

    return all_reduce


def all_gather_program(n: int, dtype: str, ranks: int, blocks: int, tile: int, threads: int = THREADS) -> Any:
    """y[r, i] = x[i] of rank r: each rank stores its own on all of them."""

    @T.prim_func
    def gather(x: T.Tensor((n,), dtype), y: T.SymmTensor((ranks, n), dtype),
               pad: T.SymmTensor((MOST_BLOCKS, 2 * ranks), "int64")):
        with T.Kernel(blocks, threads=threads) as b:
            own = T.alloc_fragment((tile,), dtype)
            T.barrier_all(pad[b, 0:2 * ranks])
            me = T.get_rank() % ranks  # a range that the compiler knows
            for k in T.serial(T.ceildiv(n, blocks * tile)):
                T.copy(x[(k * blocks + b) * tile:(k * blocks + b + 1) * tile], own)
                _ = [T.copy(own, T.remote(y, r)[me, (k * blocks + b) * tile:(k * blocks + b + 1) * tile])
                     for r in range(ranks)]
            T.barrier_all(pad[b, 0:2 * ranks])

    return gather


def reduce_scatter_program(n: int, dtype: str, ranks: int, blocks: int, tile: int, threads: int = THREADS) -> Any:
    """y[i] = the sum over all ranks r of their x[this rank, i]."""

    @T.prim_func
    def scatter(x: T.SymmTensor((ranks, n), dtype), y: T.Tensor((n,), dtype),
                pad: T.SymmTensor((MOST_BLOCKS, 2 * ranks), "int64")):
        with T.Kernel(blocks, threads=threads) as b:
            terms = [T.alloc_fragment((tile,), dtype) for _ in range(ranks)]
            total = T.alloc_fragment((tile,), dtype)
            T.barrier_all(pad[b, 0:2 * ranks])
            me = T.get_rank() % ranks  # a range that the compiler knows
            for k in T.serial(T.ceildiv(n, blocks * tile)):
                _ = [T.copy(T.remote(x, r)[me, (k * blocks + b) * tile:(k * blocks + b + 1) * tile], term)
                     for r, term in enumerate(terms)]
                for i in T.Parallel(tile):
                    total[i] = sum([T.cast(term[i], sum_type(dtype)) for term in terms])
                T.copy(total, y[(k * blocks + b) * tile:(k * blocks + b + 1) * tile])
            T.barrier_all(pad[b, 0:2 * ranks])

    return scatter


def all_to_all_program(n: int, dtype: str, ranks: int, blocks: int, tile: int, threads: int = THREADS) -> Any:
    """y[s, i] of rank r = x[r, i] of rank s: each rank stores a part on each of them."""

    @T.prim_func
    def exchange(x: T.Tensor((ranks, n), dtype), y: T.SymmTensor((ranks, n), dtype),
                 pad: T.SymmTensor((MOST_BLOCKS, 2 * ranks), "int64")):
        with T.Kernel(blocks, threads=threads) as b:
            parts = [T.alloc_fragment((tile,), dtype) for _ in range(ranks)]
            T.barrier_all(pad[b, 0:2 * ranks])
            me = T.get_rank() % ranks  # a range that the compiler knows
            for k in T.serial(T.ceildiv(n, blocks * tile)):
                _ = [T.copy(x[r, (k * blocks + b) * tile:(k * blocks + b + 1) * tile], part) for r, part in enumerate(parts)]
                _ = [T.copy(part, T.remote(y, r)[me, (k * blocks + b) * tile:(k * blocks + b + 1) * tile])
                     for r, part in enumerate(parts)]
            T.barrier_all(pad[b, 0:2 * ranks])

    return exchange


@T.macro
def _fetch(x, at, i, rows, row, place):
    """Load row i, and where it goes."""
    known = T.min(i, rows - 1)
    place[0] = T.if_then_else(i < rows, at[known, 0], -1)
    place[1] = at[known, 1]
    T.copy(x[known, :], row)


@T.macro
def _send(row, place, y):
    if place[0] >= 0:
        T.copy(row, T.remote(y, place[0])[place[1], :])


def send_rows_program(rows: int, room: int, width: int, dtype: str, ranks: int, blocks: int, threads: int = THREADS) -> Any:
    """Row at[i, 1] of y on rank at[i, 0] = x[i], for every i; a negative rank: that row goes nowhere.

    A block loads HELD rows before it stores the first of them.
    """

    @T.prim_func
    def send(x: T.Tensor((rows, width), dtype), at: T.Tensor((rows, 2), "int32"), y: T.SymmTensor((room, width), dtype),
             pad: T.SymmTensor((MOST_BLOCKS, 2 * ranks), "int64")):
        with T.Kernel(blocks, threads=threads) as b:
            held = [(T.alloc_fragment((width,), dtype), T.alloc_local((2,), "int32")) for _ in range(HELD)]
            T.barrier_all(pad[b, 0:2 * ranks])
            for k in T.serial(T.ceildiv(rows - b, blocks * HELD)):
                _ = [_fetch(x, at, (k * HELD + n) * blocks + b, rows, *one) for n, one in enumerate(held)]
                _ = [_send(*one, y) for one in held]
            T.barrier_all(pad[b, 0:2 * ranks])

    return send


@T.macro
def _bound(table, b, r, ends, first):
    """Behind which row those for rank r end, and what is added to their numbers there: rows of lower ranks come first."""
    me, before = T.get_rank() % table.shape[1], ends[r - 1] if r else 0
    ends[r] = before + T.cast(table[b, me, r], "int32")
    first[r] = sum([T.if_then_else(s < me, T.cast(table[b, s, r], "int32"), 0) for s in range(table.shape[1])]) - before


@T.macro
def _fetch_counted(x, bounds, i, rows, row, place):
    """Load row i, and find where it goes: to the first rank whose end lies behind it."""
    ends, first = bounds
    place[0] = -1
    for r in T.unroll(ends.shape[0]):
        if T.And(place[0] < 0, i < ends[r]):
            place[0] = r
            place[1] = i + first[r]
    T.copy(x[T.min(i, rows - 1), :], row)


def send_counted_program(rows: int, room: int, width: int, dtype: str, ranks: int, blocks: int, threads: int = THREADS) -> Any:
    """y = the rows that all ranks have for this one, those of rank 0 first; all = how many went from rank to rank.

    x: rows for rank 0 first, counts[r] for rank r.  Blocks of one number tell each other the counts in `table` when they meet.
    Blocks take rows from all of x at once, so that some go to each rank all the time.
    """
    each = -(-rows // ranks)

    @T.prim_func
    def send(x: T.Tensor((rows, width), dtype), counts: T.Tensor((ranks,), "int64"), y: T.SymmTensor((room, width), dtype),
             all_: T.Tensor((ranks, ranks), "int64"), table: T.SymmTensor((MOST_BLOCKS, ranks, ranks), "int64"),
             pad: T.SymmTensor((MOST_BLOCKS, 2 * ranks), "int64")):
        with T.Kernel(blocks, threads=threads) as b:
            held = [(T.alloc_fragment((width,), dtype), T.alloc_local((2,), "int32")) for _ in range(HELD)]
            ends, first = T.alloc_local((ranks,), "int32"), T.alloc_local((ranks,), "int32")
            me = T.get_rank() % ranks  # a range that the compiler knows
            for r, c in T.Parallel(ranks, ranks):
                T.remote(table, r)[b, me, c] = counts[c]
            T.barrier_all(pad[b, 0:2 * ranks])
            _ = [_bound(table, b, r, ends, first) for r in range(ranks)]
            for k in T.serial(T.ceildiv(each * ranks - b, blocks * HELD)):
                at = [(k * HELD + n) * blocks + b for n in range(HELD)]
                spread = [T.if_then_else(i < each * ranks, i % ranks * each + i // ranks, rows) for i in at]
                _ = [_fetch_counted(x, (ends, first), i, rows, *one) for i, one in zip(spread, held)]
                _ = [_send(*one, y) for one in held]
            if b == 0:
                for s, r in T.Parallel(ranks, ranks):
                    all_[s, r] = table[b, s, r]
            T.barrier_all(pad[b, 0:2 * ranks])

    return send


def in_one_step(nbytes: int, ranks: int) -> bool:
    """Whether every rank reads everything: one barrier less, but (ranks - 1) * (1 - 2 / ranks) times the bytes more."""
    return nbytes <= ONE_SHOT and nbytes * (ranks - 1) * (ranks - 2) <= EXTRA * ranks


def plan(n: int, item: int, held: int) -> tuple[int, int]:
    """(blocks, elements of a tile) for n elements of `item` bytes of which a thread holds up to `held` vectors at once."""
    vectors = -(-n * item // VECTOR)
    times = next(t for t in (1, 2, 4, 8) if t >= held or vectors <= t * THREADS * MOST_BLOCKS)
    tile = times * THREADS * VECTOR // item
    return max(1, min(MOST_BLOCKS, -(-n // tile))), tile


@cache
def _pad() -> Any:
    import torch

    return create_tensor((MOST_BLOCKS, 2 * current().ranks), torch.int64, "the counts of the collectives' barriers")


@cache
def _kernel(make: Any, n: int, dtype: Any, split: int) -> Any:
    """The kernel of a collective of n elements, which the ranks have compared, as a function of its tensors.  split: how many
    ranks divide the work."""
    import torch

    ranks, name = current().ranks, str(dtype).removeprefix("torch.")
    blocks, tile = plan(-(-n // split), dtype.itemsize, 4)
    more = (_pad(),) if make is not all_reduce_one_shot else (
        create_tensor((2, ranks, n), dtype, f"the boxes of an all-reduce of {n}"),
        create_tensor((MOST_BLOCKS, ranks), torch.int64, f"the signals of an all-reduce of {n}"),
        torch.zeros(MOST_BLOCKS, dtype=torch.int64, device=current().heap.device))
    kernel = tilelang.compile(make(n, name, ranks, blocks, tile), target="cuda")
    same_program(kernel, f"{n} elements of {name}")
    return lambda *tensors: kernel(*tensors, *more)


def all_reduce(x: Any) -> Any:
    """x = the sum of x over all ranks, in place and on the current stream; returns x.

    x: a contiguous symmetric tensor (create_tensor) of numbers.  Sums of 16-bit floats are formed in float32 and rounded
    once.  Raises not-symmetric, ranks-disagree.

    Example:
        x = dist.create_tensor((n,), torch.bfloat16)
        dist.all_reduce(x)
    """
    flat = symmetric_view(x, "the argument of all_reduce")
    once = in_one_step(flat.numel() * flat.element_size(), current().ranks)
    make, split = (all_reduce_one_shot, 1) if once else (all_reduce_two_shot, current().ranks)
    _kernel(make, flat.numel(), x.dtype, split)(flat)
    return x


def all_gather(x: Any, out: Any) -> Any:
    """out[r] = x of rank r, for every rank, on the current stream; returns out.

    x: a contiguous tensor.  out: a symmetric tensor of shape (ranks, *x.shape).  Raises not-symmetric, ranks-disagree.

    Example:
        dist.all_gather(x, dist.create_tensor((dist.num_ranks(), *x.shape), x.dtype))
    """
    flat = symmetric_view(out, "the result of all_gather").view(current().ranks, -1)
    _kernel(all_gather_program, x.numel(), x.dtype, 1)(x.contiguous().view(-1), flat)
    return out


def reduce_scatter(x: Any, out: Any) -> Any:
    """out = the sum over all ranks of their x[this rank], on the current stream; returns out.

    x: a symmetric tensor of shape (ranks, *out.shape).  out: a contiguous tensor.  Raises not-symmetric, ranks-disagree.

    Example:
        dist.reduce_scatter(x, torch.empty(x.shape[1:], dtype=x.dtype, device=x.device))
    """
    flat = symmetric_view(x, "the argument of reduce_scatter").view(current().ranks, -1)
    _kernel(reduce_scatter_program, out.numel(), x.dtype, 1)(flat, out.view(-1))
    return out


def all_to_all(x: Any, out: Any) -> Any:
    """out[s] = the x[this rank] of rank s, for every rank s, on the current stream; returns out.

    x: a contiguous tensor of shape (ranks, ...).  out: a symmetric tensor of the same shape.  Raises not-symmetric,
    ranks-disagree.

    Example:
        dist.all_to_all(x, dist.create_tensor(x.shape, x.dtype))
    """
    ranks = current().ranks
    flat = symmetric_view(out, "the result of all_to_all").view(ranks, -1)
    _kernel(all_to_all_program, flat.shape[1], x.dtype, 1)(x.contiguous().view(ranks, -1), flat)
    return out


@cache
def _sender(rows: int, room: int, width: int, dtype: Any) -> Any:
    ranks, name = current().ranks, str(dtype).removeprefix("torch.")
    kernel = tilelang.compile(send_rows_program(rows, room, width, name, ranks, min(MOST_BLOCKS, rows)), target="cuda")
    same_program(kernel, f"{rows} rows of {width} {name}, room for {room}")
    return lambda *tensors: kernel(*tensors, _pad())


@cache
def _counted_sender(rows: int, room: int, width: int, dtype: Any) -> Any:
    import torch

    ranks, name = current().ranks, str(dtype).removeprefix("torch.")
    program = send_counted_program(rows, room, width, name, ranks, min(MOST_BLOCKS, rows))
    kernel, table = tilelang.compile(program, target="cuda"), create_tensor(
        (MOST_BLOCKS, ranks, ranks), torch.int64, "the counts that blocks of all_to_all_rows tell each other")
    same_program(kernel, f"{rows} rows of {width} {name}, room for {room}")
    return lambda *tensors: kernel(*tensors, table, _pad())


def send_rows(x: Any, at: Any, out: Any) -> Any:
    """Row at[i, 1] of out on rank at[i, 0] = x[i], for every row i of every rank, on the current stream; returns out.

    x: contiguous, (rows, width).  at: (rows, 2) int32 on the device; a row with a negative rank goes nowhere, and no two rows
    go to one place.  out: a symmetric tensor (room, width) of x's type; its other rows keep their values.  rows and room are
    the same on every rank.  Raises not-symmetric, ranks-disagree.

    Example:
        dist.send_rows(x, torch.stack([(dist.rank() + 1 + 0 * i) % dist.num_ranks(), i], 1), out)   # i = torch.arange(rows)
    """
    symmetric_view(out, "the result of send_rows")
    _sender(x.shape[0], out.shape[0], x.shape[1], x.dtype)(x, at, out)
    return out


def all_to_all_rows(x: Any, counts: Any, out: Any) -> Any:
    """Ragged all-to-all: out = the rows that all ranks have for this one, those of rank 0 first; returns all counts.

    x: contiguous, (rows, width), rows for rank 0 first.  counts: (ranks,) int64 on the device, how many go to each rank.  out:
    a symmetric tensor (room, width), with room for all that come.  The result: (ranks, ranks) counts, from rank by to rank.
    rows and room are the same on every rank.  Raises not-symmetric, ranks-disagree.

    Example:
        counts = dist.all_to_all_rows(x, counts, out)
        mine = counts[:, dist.rank()].sum()
    """
    symmetric_view(out, "the result of all_to_all_rows")
    every = counts.new_empty(current().ranks, current().ranks)
    _counted_sender(x.shape[0], out.shape[0], x.shape[1], x.dtype)(x, counts, out, every)
    return every
