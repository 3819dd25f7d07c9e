"""Loops whose turns are short of time: what the first product of a turn needs is computed in the turn before.

    for (k…) {                                      unsigned long long a = descriptor(A, first), b = descriptor(B, first);
      wgmma(c, descriptor(A, k), descriptor(B, k))      for (k…) {
      …                                        ->         wgmma(c, a, b)
      wgmma(c, …)                                         …
      wait; sums                                          wgmma(c, …)
    }                                                     computed_here(a, descriptor(A, k + 1)); …
    …tx…                                                  wait; sums
                                                        }
                                                        int tx_1 = afresh(tx);  …tx_1…

Between the last sums of a turn and its next product nothing is under way for a warp group, and each cycle there counts
(transform/schedule/chained_accumulators.py).  The descriptors of a stage are a chain of some 20 cycles; under the last
product they cost nothing.
computed_here hides from the compiler that they follow from k, or it would compute them where they are used.  The other way
round it likes to compute in the loop what follows it and hangs on the thread's number alone (addresses of the epilogue, 20
instructions among the sums): behind the loop that number is another variable.  The program itself, and what is proven of
it, stay as they are; attr `tight` of the loop asks for this form.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tilelang.ir import (Bind, Call, Evaluate, Expr, For, Parallel, Stmt, Var, call, const, dtype, free_vars, fresh, replace,
                         rewrite, seq, stmts_of, substitute, walk, with_options)

MOST_DESCRIPTORS = 4  # that are kept from turn to turn


class TightLoops:
    """Part of CudaPrinter."""

    def tight_loop(self: Any, s: For) -> None:
        """The loop, and the thread's number for what follows it."""
        first, loop = descriptors_ahead(s)
        for v, value in first:
            self.emit(f"unsigned long long {self.namer(v, v.name)} = {self.top(value)};")
        self.plain_for(loop)
        for v in self.launch.thread_vars:
            if v in self.namer.names:
                was, own = self.namer(v, v.name), self.namer(("behind", id(s), v), v.name)
                self.emit(f"int {own} = tl::afresh({was});")
                self.namer.names[v] = own

    def sequence(self: Any, stmts: Sequence[Stmt]) -> None:
        """Statements one after another; what a loop among them renamed has its name for the rest of them."""
        names = {v: self.namer.names[v] for v in self.launch.thread_vars if v in self.namer.names}
        super().sequence(stmts)  # type: ignore[misc]
        self.namer.names.update(names)

    def _call_computed_here(self: Any, e: Call) -> tuple[str, int]:
        return f"tl::computed_here({', '.join(map(self.top, e.args))})", 100


def descriptors_ahead(s: For) -> tuple[list[tuple[Var, Expr]], For]:
    """([(variable, descriptor of the first turn)], the loop on these variables); ([], s) where it has no such descriptors."""
    body = list(stmts_of(s.body))
    last = max((n for n, x in enumerate(body) if _commits(x)), default=None)
    inside = {x.var for x in walk(s.body, Bind, For)} | {
        v for x in walk(s.body, Parallel) for v in x.vars}
    found: dict[Call, Var] = {}
    for n, x in enumerate(body):
        for e in walk(x):
            if isinstance(e, Call) and e.op == "wgmma":
                if last is None or n > last:
                    return [], s  # it would use what the next turn needs
                for d in e.args[1:3]:
                    if _is_descriptor(d) and s.var in free_vars(d) and not free_vars(d) & inside:
                        found.setdefault(_base(d), fresh("descriptor", dtype("uint64")))
    if last is None or not found or len(found) > MOST_DESCRIPTORS:
        return [], s

    def moved(e: Any) -> Any:
        if not _is_descriptor(e) or _base(e) not in found:
            return None
        v, units = found[_base(e)], e.options.offset >> 4
        return v + const(units, "uint64") if units else v

    after = [Evaluate(call("computed_here", (v, substitute(d, {s.var: s.var + 1})), "void")) for d, v in found.items()]
    new = [rewrite(x, moved) for x in body]
    loop = replace(s, body=seq(*new[:last + 1], *after, *new[last + 1:], span=s.body.span))
    return [(v, substitute(d, {s.var: s.start})) for d, v in found.items()], loop


def _commits(s: Stmt) -> bool:
    return isinstance(s, Evaluate) and s.call.op == "wgmma_commit"


def _is_descriptor(e: Any) -> bool:
    return isinstance(e, Call) and e.op == "wgmma_descriptor"


def _base(d: Any) -> Call:
    """A descriptor without the constant bytes added to it."""
    out: Call = with_options(d, offset=0)
    return out


__all__ = ["MOST_DESCRIPTORS", "TightLoops", "descriptors_ahead"]
