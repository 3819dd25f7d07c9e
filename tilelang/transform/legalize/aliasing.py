"""Tensor parameters that may be the same memory: what a launch writes by one name and then reads by another.

Tensors are taken to lie apart, which lets reads pass writes: pipelines load ahead, `__restrict__` tells the device compiler.
A call may pass one tensor twice all the same.  Where a launch reads a tensor behind a write of another, the host
therefore looks whether the two overlap (`read_after_write` names the pairs), and a kernel of which every tensor may
overlap every other (tirx.noalias = False) answers such calls: one that runs in the order of the program.
"""

from __future__ import annotations

from collections.abc import Iterator

from tilelang.ir import (Buffer, For, Func, Launch, Stmt, Var, While, inner, replace, rewrite_launches, rewrite_stmts, walk,
                         with_options)

from ..framework.config import PassConfigKey
from ..analysis.effects import Effect, own_effects
from ..framework.pass_ import TILE, PassContext, pass_
from ..analysis.pipeline_loops import is_pipelined


def read_after_write(func: Func) -> tuple[tuple[str, str], ...]:
    """(written, read) names of tensor and pointer parameters that some launch reads behind a write of the other, less those
    that the program lets overlap itself (T.annotate_restrict_buffers)."""
    free = set(func.facts.may_alias)
    names = {b.data: b.name for _, b in func.buffers} | {p: p.name for p in func.params if func.buffer_of(p) is None}
    out: dict[tuple[str, str], None] = {}
    for x in walk(func.body):
        if isinstance(x, Launch):
            for w, r in _pairs(func, x):
                if not {w.name, r.name} <= free:
                    out[names[w.data], names[r.data]] = None
    return tuple(out)


def made_of_pointers(func: Func) -> dict[str, tuple[Buffer, ...]]:
    """What the program makes of each pointer parameter, by the parameter's name."""
    pointers = {p: p.name for p in func.params if p.dtype.is_handle and func.buffer_of(p) is None}
    out: dict[str, dict[Buffer, None]] = {}
    for x in walk(func.body) if pointers else ():
        if isinstance(x, Buffer) and x.data in pointers:
            out.setdefault(pointers[x.data], {})[x] = None
    return {name: tuple(found) for name, found in out.items()}


def parameter_names(func: Func) -> tuple[str, ...]:
    """Names of the tensor parameters, and of what is made of pointer parameters."""
    return (*(b.name for _, b in func.buffers), *(b.name for made in made_of_pointers(func).values() for b in made))


def overlapping(func: Func, noalias: bool) -> bool:
    """Whether a launch must run in the order of the program, since tensors it writes and then reads may overlap."""
    free = set(func.facts.may_alias) if noalias else set(parameter_names(func))
    return bool(free) and any(_free_pairs(func, x, free) for x in walk(func.body, Launch))


@pass_(needs=TILE)
def keep_order(func: Func, cx: PassContext) -> Func:
    """Loops of launches whose tensors may overlap are not pipelined; launch attr `overlapping`: the tensors that conflict
    with each other (place_sync)."""
    noalias = bool(cx.option(PassConfigKey.TIR_NOALIAS))
    free = set(func.facts.may_alias) if noalias else set(parameter_names(func))

    def serial(launch: Launch) -> Launch:
        found = _free_pairs(func, launch, free)
        if not found:
            return launch
        them = tuple({b: None for pair in found for b in pair})
        return with_options(replace(launch, body=_serial(launch.body)), overlapping=them)

    return rewrite_launches(func, serial) if free else func


def _serial(body: Stmt) -> Stmt:
    def loop(s: Stmt) -> Stmt | None:
        if not isinstance(s, For) or not is_pipelined(s):
            return None
        return For(s.var, s.start, s.extent, "serial", _serial(s.body), span=s.span)

    return rewrite_stmts(body, loop)


def _free_pairs(func: Func, launch: Launch, free: set[str]) -> list[tuple[Buffer, Buffer]]:
    return [p for p in _pairs(func, launch) if {p[0].name, p[1].name} <= free]


def _pairs(func: Func, launch: Launch) -> list[tuple[Buffer, Buffer]]:
    """(written, read) tensor parameters and tensors made of pointers, the read behind the write in the order of the
    program."""
    params = {b.data: b for _, b in func.buffers}
    pointers = {p for p in func.params if p.dtype.is_handle and func.buffer_of(p) is None}
    out: dict[tuple[Var, Var], None] = {}
    written: dict[Var, None] = {}
    for e in _in_order(launch.body):
        if e.storage in pointers:
            params.setdefault(e.storage, e.buffer)
        if e.storage not in params:
            continue
        if e.mode in ("read", "readwrite"):
            out.update({(w, e.storage): None for w in written if w is not e.storage})
        if e.writes:
            written[e.storage] = None
    return [(params[w], params[r]) for w, r in out]


def _in_order(s: Stmt) -> Iterator[Effect]:
    """Effects in order; the body of a serial loop twice, since its beginning follows its end, as a condition does that is
    asked for again.  Iterations of T.Parallel do not follow each other."""
    for _ in range(2 if isinstance(s, While) else 1):
        yield from own_effects(s)
        for _ in range(2 if isinstance(s, For) else 1):
            for x in inner(s):
                yield from _in_order(x)


__all__ = ["keep_order", "made_of_pointers", "overlapping", "parameter_names", "read_after_write"]
