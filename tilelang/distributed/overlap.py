"""GEMMs whose operands or results are spread over the ranks: copy engines move one block of rows under the GEMM of another.

The ranks meet by a kernel of one block on a stream of its own, before the copies (the others' operands are there) and after
them (they may be overwritten).
"""

from __future__ import annotations

from functools import cache
from typing import Any

import tilelang
import tilelang.language as T
from tilelang.library import matmul

from .collectives import sum_type
from .host import create_tensor, current, on_rank, same_program, symmetric_view

THREADS = 256


def meeting(ranks: int) -> Any:
    """All ranks wait for each other."""

    @T.prim_func
    def meet(pad: T.SymmTensor((1, 2 * ranks), "int64")):
        with T.Kernel(1, threads=32):
            T.barrier_all(pad[0, 0:2 * ranks])

    return meet


def row_sum(n: int, dtype: str, ranks: int, threads: int = THREADS) -> Any:
    """y[i] = the sum over r of x[r, i]."""
    tile = threads * 128 // T.dtype(dtype).bits

    @T.prim_func
    def add(x: T.Tensor((ranks, n), dtype), y: T.Tensor((n,), dtype)):
        with T.Kernel(T.ceildiv(n, tile), threads=threads) as b:
            terms = [T.alloc_fragment((tile,), dtype) for _ in range(ranks)]
            total = T.alloc_fragment((tile,), dtype)
            _ = [T.copy(x[r, b * tile:(b + 1) * tile], term) for r, term in enumerate(terms)]
            for i in T.Parallel(tile):
                total[i] = sum([T.cast(term[i], sum_type(dtype)) for term in terms])
            T.copy(total, y[b * tile:(b + 1) * tile])

    return add


@cache
def _stream() -> Any:
    import torch

    return torch.cuda.Stream()


@cache
def _meeting() -> Any:
    """The kernel at which the ranks meet, and its counts."""
    import torch

    pad = create_tensor((1, 2 * current().ranks), torch.int64, "the counts of the meetings around GEMMs")
    kernel = tilelang.compile(meeting(current().ranks), target="cuda")
    same_program(kernel, "one row")
    return lambda: kernel(pad)


@cache
def _space(shape: tuple[int, ...], dtype: Any, symmetric: bool) -> Any:
    """Memory that calls of these shapes use."""
    import torch

    return create_tensor(shape, dtype) if symmetric else torch.empty(shape, dtype=dtype, device=current().heap.device)


@cache
def _sum(n: int, dtype: str) -> Any:
    return tilelang.compile(row_sum(n, dtype, current().ranks), target="cuda")


def all_gather_matmul(a: Any, b: Any, out: Any) -> Any:
    """out = the rows a of all ranks, one rank after another, times b; on the current stream; returns out.

    a: a contiguous symmetric tensor of shape (m, k).  b: (k, n).  out: contiguous, (ranks * m, n), of a's type.  The GEMM
    of this rank's rows runs while the rows of the next one arrive.  Raises not-symmetric, ranks-disagree, and what matmul
    raises.

    Example:
        out = torch.empty(dist.num_ranks() * m, n, dtype=a.dtype, device=a.device)
        dist.all_gather_matmul(a, b, out)
    """
    import torch

    me, main, side, meet = current(), torch.cuda.current_stream(), _stream(), _meeting()
    symmetric_view(a, "the first operand of all_gather_matmul")
    rows, arrived = _space((me.ranks, *a.shape), a.dtype, False), []
    side.wait_stream(main)
    with torch.cuda.stream(side):
        meet()
        for k in range(1, me.ranks):
            peer = (me.rank + k) % me.ranks
            rows[peer].copy_(on_rank(a, peer))
            arrived.append((peer, side.record_event()))
        meet()
    results = out.view(me.ranks, a.shape[0], -1)
    matmul(a, b, out=results[me.rank])
    for peer, event in arrived:
        main.wait_event(event)
        matmul(rows[peer], b, out=results[peer])
    main.wait_stream(side)
    return out


def matmul_reduce_scatter(a: Any, b: Any, out: Any) -> Any:
    """out = this rank's block of rows of the sum over all ranks of their a @ b; on the current stream; returns out.

    a: (ranks * m, k).  b: (k, n).  out: contiguous, (m, n), of a's type.  The rows of other ranks are computed first, and
    travel while the next ones are computed.  Each sum is rounded to a's type; they are added in float32 in the order of the
    ranks.  Raises ranks-disagree, and what matmul raises.

    Example:
        out = torch.empty(a.shape[0] // dist.num_ranks(), n, dtype=a.dtype, device=a.device)
        dist.matmul_reduce_scatter(a, b, out)
    """
    import torch

    me, main, side, meet = current(), torch.cuda.current_stream(), _stream(), _meeting()
    blocks = a.view(me.ranks, -1, a.shape[1])
    shape = (me.ranks, blocks.shape[1], b.shape[1])
    inbox, sums = _space(shape, a.dtype, True), _space(shape, a.dtype, False)
    side.wait_stream(main)
    with torch.cuda.stream(side):
        meet()
    for k in range(1, me.ranks):
        peer = (me.rank + k) % me.ranks
        matmul(blocks[peer], b, out=sums[peer])
        side.wait_event(main.record_event())
        with torch.cuda.stream(side):
            on_rank(inbox, peer)[me.rank].copy_(sums[peer])
    with torch.cuda.stream(side):
        meet()
    matmul(blocks[me.rank], b, out=sums[me.rank])
    inbox[me.rank].copy_(sums[me.rank])
    main.wait_stream(side)
    _sum(out.numel(), str(out.dtype).removeprefix("torch."))(inbox.view(me.ranks, -1), out.view(-1))
    return out
