"""Computes the wgmma descriptors of the next iteration while the last wgmma of this one runs.

    for k:                                            var a = descriptor(A, start), b = descriptor(B, start)
        wgmma(c, descriptor(A, k), descriptor(B, k))  for k:
        ...                                               wgmma(c, a, b)
        wgmma_commit                            ->        ...
        wgmma_wait; accumulate c                          wgmma_commit
    ... tx ...                                            a = opaque_copy(descriptor(A, k + 1)); ...
                                                          wgmma_wait; accumulate c
                                                      tx_1 = opaque_copy(tx)
                                                      ... tx_1 ...

A warp group computes nothing between the last FFMA of an iteration and its next wgmma, so every cycle there counts
(chained_accumulators.py).  The descriptors of a stage are a dependent chain of some 20 cycles; during the last wgmma they
cost nothing.  `opaque_copy` hides from NVRTC that they follow from k, or it would compute them where they are used.  NVRTC
also tends to hoist into the loop code that follows it and depends only on the thread index (addresses of the epilogue,
20 instructions among the FFMA), so the thread index after the loop is an opaque copy too.  The attr `tight` of a loop
requests this pass.
"""

from __future__ import annotations

from typing import Any

from tilelang.ir import (Alloc, Bind, Buffer, Call, Evaluate, Expr, For, Func, Launch, Parallel, Seq, Stmt, Store, Var, call,
                         const, dtype, free_vars, fresh, load, replace, rewrite, rewrite_launches, seq, stmts_of, substitute,
                         walk, with_options, with_inner, VARIABLE)

from ..framework.pass_ import DEVICE, PassContext, pass_

MAX_DESCRIPTORS = 4  # most descriptors carried from one iteration to the next
_ZERO = (const(0),)


@pass_(needs=DEVICE)
def pipeline_descriptors(func: Func, cx: PassContext) -> Func:
    """Carry the descriptors of loops with the attr `tight` from one iteration to the next.

    Keeps: the operands of every wgmma.  A loop whose descriptors do not have this shape keeps them where they are.
    """
    return rewrite_launches(func, _pipelined)


def _pipelined(launch: Launch) -> Launch | None:
    if not any(x.plan.tight for x in walk(launch.body, For)):
        return None
    used = free_vars(launch.body)
    threads = tuple(v for v in launch.thread_vars if v in used)

    def visit(x: Any) -> Any:
        if isinstance(x, Seq):
            return seq(*_sequence([visit(s) for s in x.stmts], threads), span=x.span)
        return seq(*_loop(x)) if isinstance(x, For) and x.plan.tight else with_inner(x, visit)

    return with_inner(launch, visit)  # type: ignore[no-any-return]


def _sequence(stmts: list[Stmt], threads: tuple[Var, ...]) -> list[Stmt]:
    """Statements with opaque copies of the thread indices after each loop that was pipelined."""
    out: list[Stmt] = []
    names: dict[Var, Var] = dict(zip(threads, threads))
    for s in stmts:
        out.append(substitute(s, {v: now for v, now in names.items() if v is not now}))
        if any(isinstance(x, For) and x.plan.tight for x in stmts_of(s)):
            for v in threads:
                copied = fresh(v.name, v.dtype)
                out.append(Bind(copied, call("opaque_copy", (names[v],), v.dtype)))
                names[v] = copied
    return out


def _loop(s: For) -> list[Stmt]:
    """The loop with its descriptors in variables, after the statements that initialise these."""
    first, loop = descriptors_ahead(s)
    return [*(Alloc(b, value, span=s.span) for b, value in first), loop]


def descriptors_ahead(s: For) -> tuple[list[tuple[Buffer, Expr]], For]:
    """([(variable, descriptor of the first iteration)], the loop on these variables); ([], s) where there is none to carry."""
    body = list(stmts_of(s.body))
    last = max((n for n, x in enumerate(body)
                if isinstance(x, Evaluate) and x.call.op == "wgmma_commit"), default=None)
    inside = {x.var for x in walk(s.body, Bind, For)} | {v for x in walk(s.body, Parallel) for v in x.vars}
    found: dict[Call, Buffer] = {}
    for n, x in enumerate(body):
        for e in walk(x, Call):
            if e.op == "wgmma":
                if last is None or n > last:
                    return [], s  # the wgmma would use a descriptor of the next iteration
                for d in e.args[1:3]:
                    if _is_descriptor(d) and s.var in free_vars(d) and not free_vars(d) & inside:
                        found.setdefault(_base(d), Buffer("descriptor", (1,), dtype("uint64"), VARIABLE))
    if last is None or not found or len(found) > MAX_DESCRIPTORS:
        return [], s

    def carried(e: Any) -> Any:
        if not _is_descriptor(e) or _base(e) not in found:
            return None
        v, units = load(found[_base(e)], _ZERO), e.options.offset >> 4
        return v + const(units, "uint64") if units else v

    after = [Store(b, _ZERO, call("opaque_copy", (substitute(d, {s.var: s.var + 1}),), b.dtype)) for d, b in found.items()]
    new = [rewrite(x, carried) for x in body]
    loop = replace(s, body=seq(*new[:last + 1], *after, *new[last + 1:], span=s.body.span))
    return [(b, substitute(d, {s.var: s.start})) for d, b in found.items()], loop


def _is_descriptor(e: Any) -> bool:
    return isinstance(e, Call) and e.op == "wgmma_descriptor"


def _base(d: Any) -> Call:
    """A descriptor without the constant bytes added to it."""
    return with_options(d, offset=None)  # type: ignore[no-any-return]


__all__ = ["MAX_DESCRIPTORS", "descriptors_ahead", "pipeline_descriptors"]
