"""Run the iterations of a loop over tiles as blocks of their own."""

from __future__ import annotations

from itertools import permutations
from math import prod
from typing import Any

from tilelang.arith import Analyzer, simplify_stmt
from tilelang.ir import (GLOBAL, Alloc, Binary, Bind, Break, Const, Continue, For, If, Launch, Parallel, Stmt, Var, While,
                         const, contains, convert, fresh, is_const, replace, seq, stmts_of, substitute, used_vars, walk,
                         with_options)
from tilelang.ops import Gemm

from ..analysis.guards import with_ranges
from ..analysis.disjoint import Disjoint, Place
from ..analysis.effects import effects, tile_of
from ..analysis.liveness import Uses
from ..analysis.statements import bound_by, without_names
from ..framework.pass_ import TILE, PassContext, pass_
from .block_shape import rereads, tells
from .hopper_features import may_resize

_MOST = 65535  # blocks along all dimensions of a grid but the first
Axes = dict[Var, int]  # the numbers of a block, each with how many there are


@pass_(needs=TILE, of=Launch, when=may_resize)
def blocks_of_tiles(n: Launch, cx: PassContext) -> Launch | None:
    """Replace a loop over independent tiles around pipelined GEMMs by a grid of that many blocks.

        with T.Kernel(132) as block:                     with T.Kernel(32, 32) as (x, y):
            for wave in T.serial(8):                         ...  # tile // 32 is y, tile % 32 is x
                tile = wave * 132 + block           ->
                if tile < 1024: ...  # tile // 32, tile % 32

    Blocks of a grid are known to be independent and to be neighbours: they get another size, persistence with an order that
    L2 likes, and an epilogue under the next tile, which a loop that the program wrote does not.  Applies to targets with
    wgmma where the launch has at least a block for each SM, no iteration reads what another wrote, and the loop's variable
    follows a block's number.  Off with tl.resize_blocks=False.
    Keeps: every element's value, bit by bit.
    """
    return _of_launch(n, cx.target.limits.sm_count)


def _of_launch(n: Launch, sms: int) -> Launch | None:
    grid = [int(e.value) if isinstance(e, Const) else 0 for e in n.grid]
    stmts = stmts_of(n.body)
    loops = [s for s in stmts if isinstance(s, For)]
    if len(loops) != 1 or not all(isinstance(s, (Alloc, For)) for s in stmts) or not sms or prod(grid) < sms:
        return None
    loop = loops[0]
    if not _independent(n, loop) or (count := _iterations(loop, n.block_vars, grid)) is None:
        return None
    axes, total = dict(zip(n.block_vars, grid)), count[1]
    body = _followed(seq(*without_names(loop.body)), axes, loop.var, *count)
    if body is None:
        return None
    body = _split(_guarded(body, axes, total), axes)
    if _quotients(body, axes) or len(axes) > 3 or max([*axes.values()][1:], default=0) > _MOST or not _disjoint(body, axes):
        return None
    order = tuple(axes)
    why = f"each iteration of `{loop.var.name}` is a block: the grid has {' x '.join(map(str, axes.values()))} blocks"
    out = replace(n, grid=tuple(const(axes[v], v.dtype) for v in order), block_vars=order,
                  body=seq(*(s for s in stmts if s is not loop), body))
    return with_options(out, report=(*n.plan.report, why))


def _independent(n: Launch, loop: For) -> bool:
    """Whether no iteration reads what another left, and the program cannot tell which block runs one."""
    if loop.kind != "serial" or not is_const(loop.start, 0) or contains(loop.body, Break, Continue, While):
        return False
    if tells(n) or rereads(n):
        return False
    uses = Uses(n.body)
    return any(s.kind == "pipelined" and contains(s, Gemm) for s in walk(loop.body, For)) and not any(
        uses.carried(s.buffer.data, loop) for s in stmts_of(n.body) if isinstance(s, Alloc))


def _iterations(loop: For, block: tuple[Var, ...], grid: list[int]) -> tuple[int, int | None] | None:
    """(iterations, tiles): as many tiles as blocks and iterations if None; None where the number is not known.

    A block of few tiles may have an iteration less: of a grid of `g` blocks, block `b` has ceil((tiles - b) / g).
    """
    if isinstance(loop.extent, Const):
        return (int(loop.extent.value), None) if loop.extent.value > 0 else None
    if len(grid) > 1 or used_vars(loop.extent) != {block[0]}:
        return None
    short = Analyzer().simplify
    known: list[int] = []
    for b in range(grid[0]):
        count = short(substitute(loop.extent, {block[0]: const(b, block[0].dtype)}))
        if not isinstance(count, Const) or not int(count.value) <= (known or [count.value])[0] <= int(count.value) + 1:
            return None
        known.append(int(count.value))
    tiles = sum(known)
    return (known[0], tiles) if tiles and known == [-(-(tiles - b) // grid[0]) for b in range(grid[0])] else None


def _quotients(body: Stmt, axes: Axes) -> list[Binary]:
    """The divisions of blocks' numbers."""
    return [x for x in walk(body, Binary) if x.op in ("floordiv", "floormod") and used_vars(x) & set(axes)]


def _disjoint(body: Stmt, axes: Axes) -> bool:
    """Whether each block writes elements of its own: the last of two writes counts, and blocks come in any order."""
    known, values = with_ranges(Analyzer(), body), dict[Var, Any]()
    for s in walk(body, Bind):
        values[s.var] = substitute(s.value, values)
    proof = Disjoint(Analyzer(), axes, {v: known.interval(v) for s in walk(body, For, Parallel) for v in bound_by(s)})
    places: dict[Var, list[Place]] = {}
    for e in effects(body):
        if e.writes and e.buffer.scope_name == GLOBAL:
            if (tile := tile_of(e)) is None:
                return False
            mins = (substitute(convert(i), values) for i in tile[0])
            places.setdefault(e.storage, []).append(proof.element(e.buffer, mins, tile[1]))
    return all(proof.proves(x, y) for found in places.values() for k, x in enumerate(found) for y in found[:k + 1])


def _with(body: Stmt, values: dict[Var, Any], axes: Axes) -> Stmt:
    return simplify_stmt(substitute(body, values), {v: (0, n - 1) for v, n in axes.items()})


def _joined(body: Stmt, axes: Axes, u: Var, v: Var) -> tuple[Stmt, Axes] | None:
    """(body, axes) with one number for v * (count of u) + u, if the body uses the two in this way alone."""
    t = fresh(u.name, u.dtype)
    place = next(a for a in axes if a is u or a is v)
    new = {t if a is place else a: axes[u] * axes[v] if a is place else n for a, n in axes.items()
           if a is place or not (a is u or a is v)}
    out = _with(body, {u: t % axes[u], v: t // axes[u]}, new)
    return (out, new) if len(_quotients(out, new)) <= len(_quotients(body, axes)) else None


def _followed(body: Stmt, axes: Axes, var: Var, count: int, tiles: int | None) -> Stmt | None:
    """The body where a block's number counts iterations too; changes axes.  None where the variable does not follow it.

    Where blocks have unequal numbers of iterations (tiles), one iteration of all blocks comes after the one before.
    """
    every = {**axes, var: count}
    orders = [(block, var) for block in axes] + [(var, block) for block in axes if not tiles]
    for fast, slow in orders:
        if (got := _joined(body, every, fast, slow)) is not None:
            return _having(axes, *got)
    return None


def _having(axes: Axes, body: Stmt, new: Axes) -> Stmt:
    """The body, for which the axes become others."""
    axes.clear()
    axes.update(new)
    return body


def _guarded(body: Stmt, axes: Axes, tiles: int | None) -> Stmt:
    """The body without the condition that a tile exists; changes axes, which then count the tiles alone."""
    if len(axes) == 1:
        (t, n), = axes.items()
        match body:
            case If(cond=Binary(op="lt", a=a, b=Const(value=most)), orelse=None) if a is t:
                tiles = min(int(most), n)
        axes[t] = tiles or n
    return _with(body, {}, axes)


def _split(body: Stmt, axes: Axes) -> Stmt:
    """The body with numbers in place of quotients and remainders of one; changes axes."""
    while True:
        steps = sorted({(int(q.b.value), id(q.a)) for q in _quotients(body, axes)
                        if isinstance(q.b, Const) and isinstance(q.a, Var) and q.a in axes})
        found = next(((v, k) for k, of in steps for v in axes if id(v) == of and 1 < k and axes[v] % k == 0), None)
        if found is None:
            break
        v, k = found
        x, y = fresh(v.name, v.dtype), fresh(v.name, v.dtype)
        new: Axes = {}
        for a, n in axes.items():
            new.update({x: k, y: n // k} if a is v else {a: n})
        body = _having(axes, _with(body, {v: y * k + x}, new), new)
    for u, v in permutations(axes, 2):
        if u in axes and v in axes and (got := _joined(body, axes, u, v)) is not None:
            body = _having(axes, *got)
    return body
