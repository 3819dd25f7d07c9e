"""Starts the steps of a GEMM when their columns of an operand in registers are there, not behind the loops that compute it.

    for r: S[4 r : 4 r + 4] = exp2(…)             for r in the first half: S[…] = exp2(…)
    for r: A[4 r : 4 r + 4] = float16(S[…])       for r in the first half: A[…] = float16(S[…])
    sums of S; C *= …; wait                       C *= …; wait
    pin(C); pin(A); fence                         pin(C); pin(A[0:8]); fence
    wgmma(C, A[0:8], …)                  ->       wgmma(C, A[0:8], …)
    wgmma(C, A[8:16], …); commit                  for r in the second half: S[…] = exp2(…)
                                                  for r in the second half: A[…] = float16(S[…])
                                                  pin(A[8:16]); fence
                                                  wgmma(C, A[8:16], …); commit
                                                  sums of S

So the tensor cores are busy with the first columns while threads compute the others, conversions fill the issue slots that
functions leave, and the last step is complete sooner.  What stands between comes in front of the first step, or behind the
GEMM where it reads what the loops compute.  Values lie in arrays or in named registers.  Where the loops only convert values,
they stay whole: the rounding of float32 to tf32 is so short that the fences made GEMMs 1 to 3 % slower.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from tilelang.ir import (AddressOf, Alloc, Binary, Bind, Break, Buffer, Call, Const, Continue, Evaluate, For, Func, If, Launch,
                         Load, Ramp, Stmt, Store, Var, While, const, contains, fresh, replace, rewrite_launches, rewrite_stmts,
                         seq, stmts_of, substitute, walk, LOCAL)
from tilelang.ir.record import record
from tilelang.target.register_forms import constant

from ..analysis.effects import effects
from ..analysis.statements import do, renamed
from ..framework.pass_ import DEVICE, PassContext, pass_
from ..schedule.consumer_schedule import LEAST_GROUPS
from ..schedule.rings import GROUP


@pass_(needs=DEVICE)
def operand_pieces(func: Func, cx: PassContext) -> Func:
    """Divide loops that compute an operand in registers between the steps of the GEMM behind them."""
    return replace(func, body=rewrite_launches(func.body, _divided))  # type: ignore[no-any-return]


def _divided(launch: Launch) -> Launch:
    many = (launch.plan.compute_threads or launch.num_threads) >= LEAST_GROUPS * GROUP

    def visit(x: Stmt) -> Stmt | None:
        if not isinstance(x, (For, While)) or not any(c.op == "wgmma" for c in walk(x.body, Call)):
            return None
        inner = rewrite_stmts(x.body, visit)
        body, n, changed = list(stmts_of(inner)), 0, False
        while n < len(body):
            found = _pieces(body, n, many) if _op(body[n]) == "wgmma_fence" else None
            if found is not None:
                body[found[0]:found[1]], n, changed = found[2], found[0] + len(found[2]) - 1, True
            n += 1
        return replace(x, body=seq(*body) if changed else inner) if changed or inner is not x.body else None

    return rewrite_stmts(launch, visit)  # type: ignore[no-any-return]


@record
class _Loop:
    """A loop that computes elements of an operand, or of what these are computed from, and its variable that chooses them.

    written: storage -> element -> the last iteration that writes it.  read: storage -> (iteration, element) that it reads.
    """

    stmt: Any
    var: Var
    size: int
    written: dict[Var, dict[int, int]]
    read: dict[Var, set[tuple[int, int]]]


def _pieces(body: list[Stmt], fence: int, many: bool) -> tuple[int, int, list[Stmt]] | None:
    """(begin, end, what replaces the statements from begin to end) for the GEMM behind a fence and what computes its operand;
    None where these have another shape."""
    end = fence + 1
    while end < len(body) and _op(body[end]) == "wgmma":
        end += 1
    steps: list[Any] = [s.call for s in body[fence + 1:end]]  # type: ignore[attr-defined]
    if len(steps) < 2 or any(not isinstance(c.args[1], AddressOf) or c.args[1].buffer.scope_name != LOCAL for c in steps):
        return None
    a: Buffer = steps[0].args[1].buffer
    firsts = [c.args[1].indices[0].value for c in steps if c.args[1].buffer is a and isinstance(c.args[1].indices[0], Const)]
    if len(firsts) < len(steps) or firsts != sorted(firsts):
        return None
    loops, others = _loops(body, fence, a, {a.data, *(c.args[0].buffer.data for c in steps)}, many)
    columns = dict(zip(dict.fromkeys(firsts), [*list(dict.fromkeys(firsts))[1:], a.size]))
    bounds = _bounds([x for _, x in loops], a, [range(k, columns[k]) for k in firsts])
    committed = end + (end < len(body) and _op(body[end]) == "wgmma_commit")
    front, near, after = others
    if bounds is None or after and committed == end:
        return None
    pins: list[Any] = [s for s in near if _op(s) == "wgmma_pin"]
    kept = [s for s in near if not any(s is p for p in pins)] + [s for s in pins if s.call.args[0].buffer.data is not a.data]
    out, begun = [*front], [0] * len(loops)
    for bound, group in itertools.groupby(zip(bounds, firsts, steps), key=lambda x: x[0]):
        calls = list(group)
        start, stop = calls[0][1], columns[calls[-1][1]]
        out += [_restricted(x, n, m) for (_, x), n, m in zip(loops, begun, bound) if n < m]
        pin = [do("wgmma_pin", AddressOf(a, (const(start),)), count=stop - start)] if pins else []
        out += [*kept, *pin, do("wgmma_fence"), *(Evaluate(c) for _, _, c in calls)]
        begun, kept = bound, []
    return loops[0][0], committed, [*out, *body[end:committed], *after]


def _loops(body: list[Stmt], fence: int, a: Buffer, gemm: set[Var],
           many: bool) -> tuple[list[tuple[int, _Loop]], tuple[list[Stmt], list[Stmt], list[Stmt]]]:
    """(the loops that compute an operand, with their places, and where what stands between them and the fence comes); no loops
    where they only convert values, or are not of a form that can be divided.  gemm: the registers that the GEMM uses.  many:
    whether there are warp groups enough; else only the last loop, over arrays."""
    wanted, loops, others, later = {a.data}, list[tuple[int, _Loop]](), list[tuple[int, Stmt]](), set[Var]()
    placed: tuple[list[Stmt], list[Stmt], list[Stmt]] = ([], [], [])
    for n in range(fence - 1, -1, -1):
        s = body[n]
        made = {e.storage for e in effects(s) if e.writes}
        if not _passes(s):
            break
        if made.isdisjoint(wanted) or _op(s) == "wgmma_pin":
            others.insert(0, (n, s))
            continue
        loop = _loop(s, a.size) if many or isinstance(s, For) and not loops and not s.plan.registers else None
        own = _temporaries(s)
        if loop is None or not made <= {*loop.written} & wanted | own or any(
                e.storage in gemm - {a.data} for e in effects(s)) or any(
                e.storage in later - own for e in effects(s)):  # a piece of it would come after what a later loop writes
            break
        later |= made
        found = _placed([(n, loop), *loops], others, gemm)
        if found is None:
            break
        wanted |= loop.read.keys()
        loops, placed = [(n, loop), *loops], found
    computes = any(x.dtype.is_float for _, loop in loops for store in walk(loop.stmt, Store) for x in walk(store.value, Binary))
    return (loops, placed) if computes else ([], placed)


def _passes(s: Stmt) -> bool:
    """Whether statements may be moved across this one, as far as its accesses allow it."""
    plain = isinstance(s, (For, If, Store, Bind, Alloc)) and not contains(s, Evaluate, Break, Continue)
    return plain or _op(s) == "mbarrier_wait" or _op(s) == "wgmma_pin" and not s.call.options.move  # type: ignore[attr-defined]


def _loop(s: Stmt, size: int) -> _Loop | None:
    """A loop as one that can be divided; None for other statements.  size: of the arrays whose elements correspond."""
    loops: list[Any] = [s, *walk(s.body, For)] if isinstance(s, For) else []
    if not loops or any(x.kind != "unroll" or not isinstance(x.extent, Const) or not isinstance(x.start, Const)
                        or x.start.value for x in loops) or contains(s, AddressOf):
        return None
    nest = sorted(_nested(s), key=lambda x: -x.extent.value)
    own_values = _temporaries(s)
    stores = [x for x in walk(s, Store) if x.buffer.data not in own_values]
    loads = [x for x in walk(s, Load) if x.buffer.size == size and x.buffer.scope_name == LOCAL]
    own = {x.buffer.data: x.indices[0] for x in stores}
    if any(x.buffer.scope_name != LOCAL for x in stores) or any(
            x.buffer.data in own and not bool(x.indices[0] == own[x.buffer.data]) for x in walk(s, Load, Store)):
        return None  # iterations may depend on each other
    variables, ranges = [x.var for x in loops], [range(x.extent.value) for x in loops]
    points = [dict(zip(variables, values)) for values in itertools.product(*ranges)]
    for loop in nest:
        written, read, known = dict[Var, dict[int, int]](), dict[Var, set[tuple[int, int]]](), True
        for x in (*stores, *loads):
            for at in points:
                places, n = _places(x.indices[0], at), at[loop.var]
                known = known and places is not None
                for k in places or ():
                    if isinstance(x, Store):
                        of = written.setdefault(x.buffer.data, {})
                        of[k] = max(n, of.get(k, 0))
                    else:
                        read.setdefault(x.buffer.data, set()).add((n, k))
        if known and loop.extent.value > 1 and all(len({*of.values()}) > 1 for of in written.values()):
            return _Loop(s, loop.var, loop.extent.value, written, read)
    return None


def _temporaries(s: Stmt) -> set[Var]:
    """Vectors that every iteration of a loop writes as a whole before it reads them."""
    out, seen = set[Var](), set[Var]()
    for x in () if contains(s, If) else walk(s, Load, Store):  # the value of a store comes after it
        if isinstance(x, Store) and x.buffer.data not in seen and isinstance(x.indices[0], Ramp) and (
                x.indices[0].lanes == x.buffer.size and x.buffer.scope_name == LOCAL) and not any(
                y.buffer is x.buffer for y in walk(x.value, Load)):
            out.add(x.buffer.data)
        seen.add(x.buffer.data)
    return out


def _nested(s: Any) -> Iterator[Any]:
    """A loop, and those that are all that it contains."""
    while isinstance(s, For):
        yield s
        inner = stmts_of(s.body)
        s = inner[0] if len(inner) == 1 else s.body


def _places(index: Any, at: dict[Var, int]) -> list[int] | None:
    """The elements of an array that an access touches; None where that is not known."""
    if not isinstance(index, Ramp):
        k = constant(index, at)
        return None if k is None else [k]
    base, stride = constant(index.base, at), constant(index.stride, {})
    return None if base is None or stride is None else [base + i * stride for i in range(index.lanes)]


def _bounds(loops: list[_Loop], a: Buffer, steps: list[range]) -> list[list[int]] | None:
    """For each step of a GEMM, how many iterations of each loop come in front of it; None where all do of the first one."""
    out: list[list[int]] = []
    for columns in steps:
        wanted = {(a.data, k) for k in columns}
        row = [0] * len(loops)
        for n, x in reversed([*enumerate(loops)]):
            row[n] = max([out[-1][n] if out else 0, *(x.written[v][k] + 1 for v, k in wanted if k in x.written.get(v, ()))])
            wanted |= {(v, k) for v, found in x.read.items() for m, k in found if m < row[n]}
        out.append(row)
    out[-1] = [x.size for x in loops]
    return out if out[0] != out[-1] else None


def _placed(loops: list[tuple[int, _Loop]], others: list[tuple[int, Stmt]],
            gemm: set[Var]) -> tuple[list[Stmt], list[Stmt], list[Stmt]] | None:
    """The statements behind the first loop that come in front of it, in front of the first step, and behind the last step; None
    where there is no such order."""
    front, near, after = list[Stmt](), list[Stmt](), list[Stmt]()
    for n, s in others:
        later = [x.stmt for m, x in loops if m > n]
        if _op(s) != "wgmma_pin" and _meet(s, [*(x.stmt for m, x in loops if m < n), *after]):
            local = all(e.buffer.scope_name == LOCAL and e.storage not in gemm for e in effects(s))
            if not local or _meet(s, later):
                return None
            after.append(s)
        elif _op(s) != "wgmma_pin" and (_meet(s, later) or _op(s) == "mbarrier_wait" and any(
                e.buffer.scope_name != LOCAL for x in later for e in effects(x))):  # the tile that they read
            front, near = [*front, *near, s], []
        else:
            near.append(s)
    return front, near, after


def _meet(s: Stmt, some: list[Stmt]) -> bool:
    """Whether the order of a statement and others matters."""
    mine, names = [*effects(s)], {*walk(s, Var)}
    theirs = [e for other in some for e in effects(other)]
    defined = {b.var if isinstance(b, Bind) else b.buffer.data for other in some for b in walk(other, Bind, Alloc)}
    return any(x.storage is y.storage and (x.writes or y.writes) for x in mine for y in theirs) or not defined.isdisjoint(
        names | {e.storage for e in mine}) or any(b.buffer.data is e.storage for b in walk(s, Alloc) for e in theirs)


def _op(s: Stmt) -> str:
    return s.call.op if isinstance(s, Evaluate) and isinstance(s.call, Call) else ""


def _restricted(loop: _Loop, begin: int, end: int) -> Stmt:
    """Iterations of a loop, with names of their own."""
    def visit(x: Any) -> Stmt | None:
        if not isinstance(x, For) or x.var is not loop.var:
            return None
        v = fresh(x.var.name, x.var.dtype)
        body = substitute(x.body, {x.var: v + const(begin, v.dtype) if begin else v})
        return replace(x, var=v, extent=const(end - begin, x.extent.dtype), body=body)  # type: ignore[no-any-return]

    return renamed(rewrite_stmts(loop.stmt, visit))
