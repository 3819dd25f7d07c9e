"""Tensor parameters that may alias: find launches that write memory through one name and then read it through another.

Tensors are assumed to be disjoint. Reads may then move before writes: pipelines load ahead, and `__restrict__` tells the
device compiler the same. A call may still pass one tensor twice. Where a launch reads one tensor after a write of another,
the host therefore checks whether the two overlap (`read_after_write` names the pairs). A call with overlapping tensors runs
a second kernel, compiled for tensors that may all alias (tirx.noalias = False), which keeps the order of the program.
"""

from __future__ import annotations

from collections.abc import Iterator

from tilelang.ir import (Buffer, For, Func, Launch, Stmt, Var, While, inner, replace, rewrite, rewrite_launches, walk,
                         with_options)

from ..analysis.effects import Effect, own_effects
from ..framework.pass_ import TILE, PassConfigKey, PassContext, pass_
from ..analysis.pipeline_loops import is_pipelined


def read_after_write(func: Func) -> tuple[tuple[str, str], ...]:
    """(written, read) names of tensor and pointer parameters: some launch writes the first and then reads the second. Pairs
    that the program itself lets overlap (T.annotate_restrict_buffers) are left out."""
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
    """The buffers that the program makes from each pointer parameter, by the parameter's name."""
    pointers = {p: p.name for p in func.params if p.dtype.is_handle and func.buffer_of(p) is None}
    out: dict[str, dict[Buffer, None]] = {}
    for x in walk(func.body) if pointers else ():
        if isinstance(x, Buffer) and x.data in pointers:
            out.setdefault(pointers[x.data], {})[x] = None
    return {name: tuple(found) for name, found in out.items()}


def parameter_names(func: Func) -> tuple[str, ...]:
    """Names of the tensor parameters and of the buffers made from pointer parameters."""
    return (*(b.name for _, b in func.buffers), *(b.name for made in made_of_pointers(func).values() for b in made))


def overlapping(func: Func, noalias: bool) -> bool:
    """Whether a launch must keep the order of the program because tensors that it writes and then reads may overlap."""
    return any(_free_pairs(func, x, noalias) for x in walk(func.body, Launch))


@pass_(needs=TILE)
def keep_order(func: Func, cx: PassContext) -> Func:
    """Do not pipeline the loops of launches whose tensors may overlap. The launch attr `overlapping` lists the tensors that
    conflict with each other (for place_sync)."""
    def serial(launch: Launch) -> Launch | None:
        found = _free_pairs(func, launch, bool(cx.option(PassConfigKey.TIR_NOALIAS)))
        them = tuple({b: None for pair in found for b in pair})
        return with_options(replace(launch, body=rewrite(launch.body, _serial, For)), overlapping=them) if found else None

    return rewrite_launches(func, serial)  # type: ignore[no-any-return]


def _serial(s: For) -> Stmt | None:
    return For(s.var, s.start, s.extent, "serial", s.body, span=s.span) if is_pipelined(s) else None


def _free_pairs(func: Func, launch: Launch, noalias: bool) -> list[tuple[Buffer, Buffer]]:
    """The pairs of tensors that may overlap.  noalias: only where the program says so."""
    free = set(func.facts.may_alias if noalias else parameter_names(func))
    return [p for p in _pairs(func, launch) if {p[0].name, p[1].name} <= free] if free else []


def _pairs(func: Func, launch: Launch) -> list[tuple[Buffer, Buffer]]:
    """(written, read) pairs of tensor parameters and tensors made from pointers: a read of the second follows a write of the
    first in program order."""
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
    """Effects in program order. The body of a serial loop is listed twice, because its beginning follows its end, and so is a
    condition that is evaluated again. Iterations of T.Parallel do not follow each other."""
    for _ in range(2 if isinstance(s, While) else 1):
        yield from own_effects(s)
        for _ in range(2 if isinstance(s, For) else 1):
            for x in inner(s):
                yield from _in_order(x)
