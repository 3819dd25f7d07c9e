"""Operands whose K is not contiguous, which wgmma takes of 16-bit types only, are transposed on the way to it.

    gemm(a, b, c)                       ->    copy(b, f)                                   # b, f: (K, N)
    # a: (M, K), b: (K, N), 8 bits            gemm(f, a, c, True, True), c transposed      # Cᵀ = Bᵀ @ Aᵀ

The A operand of wgmma may be in registers, and the loads of a fragment (ops/ldmatrix.py) transpose at no cost: they take the
bytes from shared memory that wgmma would read otherwise.  So a transposed A goes to a fragment, and a transposed B becomes A in
the GEMM of the transposed matrices.  Where B is still transposed, its tile is transposed in shared memory first (T.transpose),
once for all iterations of a loop that does not fill it.
"""

from __future__ import annotations

from typing import Any

from tilelang.ir import (Alloc, Bind, Buffer, Expr, For, If, Launch, Region, Stmt, Var, While, children, contains, free_vars,
                         region_of, replace, rewrite, seq, stmts_of, walk, with_options, FRAGMENT, GLOBAL, SHARED)
from tilelang.ops import Copy, Gemm, Transpose
from tilelang.ops.gemm.select import GemmPlan
from tilelang.ops.gemm.wgmma import GROUP, choose_wgmma
from tilelang.target.machine import MOST_REGISTERS, REGISTERS
from tilelang.target.wgmma import WGMMA_ROWS

from ..analysis.divergence import Divergence
from ..analysis.effects import effects
from ..analysis.pipeline_loops import is_pipelined, loop_items, wanted_stages
from ..framework.pass_ import TILE, PassContext, pass_
from ..analysis.copied_tiles import tf32_tiles
from .hopper_features import hopper

_VERSIONS = 2  # of a tile that threads fill while a GEMM reads the one before


@pass_(needs=TILE, of=Launch, when=lambda cx: hopper(cx).wgmma)
def transposed_operands(n: Launch, cx: PassContext) -> Launch | None:
    """Transposes operands of GEMMs that wgmma computes then, and did not before.

    Applies to all GEMMs into an accumulator or to none: they need one layout of it.  GEMMs of some of the threads, tiles whose
    layout is given, and loops whose statements are numbered by the user, stay as they are.
    """
    gemms = [op for op in walk(n.body, Gemm)]
    if not any(has_transposed(op) for op in gemms) or n.num_threads % GROUP or _by_thread(n):
        return None
    loops = [s for s in walk(n.body, For) if is_pipelined(s)]
    if not all(isinstance(wanted_stages(s), int) for s in loops):
        return None
    given = {b.data for b, _ in n.plan.layouts}
    rounded = frozenset(v for s in loops for v in tf32_tiles(n, s, loop_items(stmts_of(s.body)).items))
    new: dict[int, list[Any]] = {}
    for accumulator in {op.c.buffer.data for op in gemms}:
        into = [op for op in gemms if op.c.buffer.data is accumulator]
        if any(has_transposed(op) for op in into) and given.isdisjoint(
                r.buffer.data for op in into for r in (op.a, op.b, op.c)):
            forms = ([with_k_contiguous(op, x) for op in into] for x in (False, True))
            for form in sorted(forms, key=lambda f: sum(b.size for x in f for b in _tiles(x) if b.scope_name in SHARED)):
                how = {_plan(x, n.num_threads, rounded) for x in form}
                if len(how) == 1 and None not in how and _fits(n, loops, form, cx):
                    new.update((id(op), x) for op, x in zip(into, form))
                    break
    if not new:
        return None
    said = (f"`{s.src.buffer.name}` is transposed in {'registers' if isinstance(s, Copy) else 'shared memory'}: "
            "wgmma needs K contiguous"
            for form in new.values() for s in form[:-1])
    return with_options(replace(n, body=_rewritten(n.body, new)), report=(*n.plan.report, *dict.fromkeys(said)))


def _by_thread(n: Launch) -> bool:
    """Whether a GEMM is under a condition, or in a loop, that differs between threads."""
    d = Divergence(n)
    return any(d.divergent(e) for s in walk(n.body, If, For, While) if contains(s, Gemm) for e in children(s)
               if isinstance(e, Expr))


def _rewritten(body: Stmt, new: dict[int, list[Any]]) -> Any:
    allocs: dict[Var, list[Alloc]] = {}
    for *_, op in new.values():
        allocs.setdefault(op.c.buffer.data, [])
    for form in new.values():
        allocs[form[-1].c.buffer.data] += [Alloc(b, span=form[-1].span) for b in _tiles(form)]
    made = {id(s) for form in new.values() for s in form if isinstance(s, Transpose)}

    def change(s: Any) -> Any:
        if isinstance(s, Alloc):
            return seq(s, *allocs[s.buffer.data]) if s.buffer.data in allocs else None
        if isinstance(s, Gemm):
            return seq(*new[id(s)]) if id(s) in new else None
        own = {x.buffer if isinstance(x, Alloc) else x.var for x in walk(s, Alloc, Bind, For)}
        written = {e.storage for e in effects(s.body) if e.writes}
        first = [x for x in stmts_of(s.body) if isinstance(x, Transpose) and id(x) in made and x.src.buffer.data not in written
                 and own.isdisjoint({x.dst.buffer, *free_vars(x.src)})]
        return seq(*first, replace(s, body=seq(*(x for x in stmts_of(s.body) if x not in first)))) if first else None

    return rewrite(body, change, Alloc, Gemm, For)


def has_transposed(op: Gemm) -> bool:
    """Whether an operand in shared memory has another order than wgmma takes."""
    return (op.a.dtype.bits != 16 and op.sparsity == 1 and op.plan.wait is None and op.b.buffer.scope_name in SHARED
            and (not op.transpose_b or op.transpose_a and op.a.buffer.scope_name in SHARED))


def with_k_contiguous(op: Gemm, exchanged: bool) -> list[Any]:
    """[statements that transpose operands, the GEMM that reads them].  exchanged: of the transposed matrices."""
    if exchanged:
        op = op.transposed()
    out: list[Any] = []
    if op.transpose_a and op.a.buffer.scope_name in SHARED:
        tile = _tile(op.a, FRAGMENT, 1)
        out, op = [Copy(op.a, tile, span=op.span)], replace(op, a=tile)
    if not op.transpose_b and op.b.dtype.bits == 8:
        tile = _tile(op.b, op.b.buffer.scope_name, -1)
        out, op = [*out, Transpose(op.b, tile, span=op.span)], replace(op, b=tile, transpose_b=True)
    return [*out, op]


def _tile(r: Region, scope: str, order: int) -> Region:
    shape = tuple(int(x) for x in r.extents[-2:])[::order]
    return region_of(Buffer(f"{r.buffer.name}_t", shape, r.dtype, scope), r.span)


def _tiles(form: list[Any]) -> list[Buffer]:
    return [s.dst.buffer for s in form[:-1]]


def _plan(form: list[Any], threads: int, rounded: frozenset[Var]) -> Any:
    """The instruction, warps and order of the accumulator of a GEMM in this form; None where wgmma does not compute it."""
    op = form[-1]
    plan = choose_wgmma(op, threads, rounded)
    if not isinstance(plan, GemmPlan):
        return None
    held = op.a.buffer.scope_name == FRAGMENT
    bits = op.m * op.n * op.c.dtype.bits + held * plan.warps[1] * op.m * op.k * op.a.dtype.bits
    if bits // 32 // threads > MOST_REGISTERS - REGISTERS.plain_loop:
        return None
    return WGMMA_ROWS[plan.instruction].shape[:2], plan.warps, op.plan.exchanged, op.transpose_a and held


def _fits(n: Launch, loops: list[For], form: list[list[Any]], cx: PassContext) -> bool:
    """Whether the tiles transposed in shared memory fit there, beside all stages of those that loops load."""
    stages = {x.dst.buffer.data: max(1, int(s.plan.num_stages)) for s in loops for x in walk(s.body, Copy)
              if x.src.buffer.scope_name == GLOBAL}
    held = [(x.buffer, stages.get(x.buffer.data, 1)) for x in walk(n.body, Alloc)] + [
        (b, _VERSIONS if loops else 1) for x in form for b in _tiles(x)]
    limit = getattr(cx.target, "max_shared_bytes", 0)
    return all(len(x) == 1 or isinstance(x[-2], Copy) for x in form) or sum(
        b.bits // 8 * v for b, v in held if b.scope_name in SHARED and b.is_static) <= limit
