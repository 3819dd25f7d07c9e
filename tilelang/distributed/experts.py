"""Expert parallelism: tokens travel to the ranks that have their experts, and what the experts make of them travels back."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from tilelang.library import grouped_matmul

from .collectives import _table, all_gather, send_rows
from .host import create_tensor, current


@dataclass(frozen=True)
class Routes:
    """Where the pairs of a token and an expert go and come back to, all on the device.

    order: the pairs, sorted by expert.  there: (rank, row) of each sorted pair.  back: (rank, sorted pair) of each received
    row.  sizes: received rows of each of this rank's experts, int32.
    """

    order: Any
    there: Any
    back: Any
    sizes: Any


def routes(experts: Any, table: Any, rank: int, room: int) -> Routes:
    """The routes of a rank's pairs.

    experts: (pairs,) the expert of each.  table: (ranks, all experts), how many pairs of a rank an expert gets.  room: rows for
    what is received; on each rank, rows of one expert follow each other, those of rank 0 first.
    """
    import torch

    ranks, count = table.shape
    own = count // ranks
    order = torch.argsort(experts, stable=True)
    sent = table.cumsum(1) - table  # first sorted pair of a rank for an expert
    by_expert = table.T.reshape(ranks, own * ranks)  # of the rank that has the experts: pairs by expert and source
    place = (by_expert.cumsum(1) - by_expert).view(count, ranks)  # first row of an expert for a source
    e = experts[order].long()
    there = torch.stack([e // own, place[e, rank] + torch.arange(len(e), device=e.device) - sent[rank, e]], 1)
    mine = by_expert[rank]
    ends, row = mine.cumsum(0), torch.arange(room, device=e.device)
    which = torch.searchsorted(ends, row, right=True)
    known = which.clamp(max=own * ranks - 1)
    source, expert = known % ranks, rank * own + known // ranks
    back = torch.stack([torch.where(row < ends[-1], source, -1), sent[source, expert] + row - (ends - mine)[known]], 1)
    return Routes(order, there.int(), back.int(), mine.view(own, ranks).sum(1).int())


@cache
def _box(rows: int, width: int, dtype: Any, what: str) -> Any:
    return create_tensor((rows, width), dtype, what)


def dispatch(x: Any, experts: Any, count: int, room: int) -> tuple[Any, Routes]:
    """(The tokens that this rank's experts get, expert by expert, in `room` rows; their routes.)

    x: (tokens, width).  experts: (tokens, k) integers, the experts of each token, of `count` in all; rank r has the r-th
    count / ranks of them.  room: the same on every rank, at least as many rows as any rank receives.  Tokens and k are the same
    on every rank.  The result is overwritten by the next dispatch of these shapes.  Raises symmetric-memory, ranks-disagree.

    Example:
        rows, way = dist.dispatch(x, experts, 64, room=2 * x.shape[0])
        y = dist.combine(grouped_matmul(rows, w, way.sizes), way, weights)
    """
    import torch

    me, flat = current(), experts.reshape(-1)
    counts = torch.zeros(count, dtype=torch.int64, device=flat.device)  # bincount would read the largest on the host
    table = all_gather(counts.scatter_add_(0, flat.long(), torch.ones_like(flat, dtype=torch.int64)), _table(count)).clone()
    way = routes(flat, table, me.rank, room)
    box = _box(room, x.shape[1], x.dtype, "what dispatch receives")
    send_rows(x[way.order // experts.shape[1]], way.there, box)
    return box, way


def combine(y: Any, way: Routes, weights: Any) -> Any:
    """(tokens, width): the sum of what the experts made of each token, times its weights.

    y: (room, width), of the rows of dispatch, in their order.  weights: (tokens, k).  Summed in float32.  Raises what dispatch
    raises.

    Example:
        y = dist.combine(y, way, weights)
    """
    import torch

    tokens, k = weights.shape
    box = _box(tokens * k, y.shape[1], y.dtype, "what combine receives")
    send_rows(y.contiguous(), way.back, box)
    pairs = torch.empty_like(box)
    pairs[way.order] = box
    return torch.einsum("tkw,tk->tw", pairs.view(tokens, k, -1).float(), weights.float()).to(y.dtype)


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
    return combine(grouped_matmul(torch.nn.functional.silu(gate) * up, down, way.sizes), way, weights)
