"""Parallel loops that access fragments at an offset: which elements they access, and the same loop run by their owners."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial, reduce
from typing import Any

import numpy as np

from tilelang.arith import Analyzer, Linear
from tilelang.arith.linear import emit
from tilelang.ir import (AddressOf, Binary, Bind, Buffer, Call, Const, Expr, For, If, Load, Node, Seq, Stmt, Store, Var, binary,
                         const, free_vars, fresh, is_const, logical, replace, rewrite, substitute, walk, FRAGMENT, GLOBAL)
from tilelang.ir.numbers import may_wrap
from tilelang.ops.distribute import index_values

from .distributed_loop import accesses, in_order
from .effects import effects

_DIVIDES = ("floordiv", "floormod", "truncdiv", "truncmod")


class Offsets:
    """How the indices of a parallel loop's accesses differ between its iterations.

    own: the variables of the loop.  changed: the memory that it writes.  read: loads that it makes whatever it finds.
    """

    def __init__(self, lw: Any, vars: tuple[Var, ...], extents: tuple[Any, ...], body: Stmt) -> None:
        self.lw, self.vars, self.extents, self.body = lw, vars, extents, body
        self.own = {*vars, *(x.var for x in walk(body, Bind, For))}
        self.changed = {e.storage for e in effects(body) if e.writes}
        points = np.indices(extents, sparse=True) if all(isinstance(n, int) for n in extents) else ()
        self.read = set(_read_anyway(body, dict(zip(vars, points)), np.asarray(True))) if points else set()

    def of(self, index: Expr, analyzer: Analyzer) -> tuple[Linear, Expr | None]:
        """(the terms of an index that differ between iterations, the rest).

        None for a rest that may change within the loop or differ between threads, or that only some iterations may compute, and
        where the sum may wrap.
        """
        form = analyzer.linear(index)
        moving = Linear({t: c for t, c in form.terms.items() if free_vars(t) & self.own}, 0)
        rest = emit(form.plus(moving, -1), index.dtype)
        whole = not may_wrap(index.dtype) or analyzer.exact(form, index.dtype)
        return moving, rest if whole and self._fixed(rest) and self.lw.same_for_all(rest) else None

    def _fixed(self, e: Expr) -> bool:
        for x in walk(e, Load, Call, Binary):
            if isinstance(x, Call) or isinstance(x, Binary) and x.op in _DIVIDES and not isinstance(x.b, Const):
                return False
            if isinstance(x, Load) and (x.buffer.data in self.changed or x.buffer.scope_name == FRAGMENT or not (
                    x in self.read or x.buffer.scope_name == GLOBAL and self.lw.access.guarded)):
                return False
        return True

    def window(self, buffer: Buffer) -> list[tuple[Expr, int]]:
        """(first, number) of the elements that the loop accesses in each dimension of a fragment; all where unknown."""
        known = self.lw.known
        found = [(x.indices, known.over(*map(tuple, zip(*inner))) if inner else known.analyzer)
                 for x, inner in accesses(self.body) if x.buffer is buffer]
        out: list[tuple[Expr, int]] = [(const(0), int(n)) for n in buffer.shape]
        for d, (_, size) in enumerate(out):
            parts = [(*self.of(at[d], a), a) for at, a in found]
            rest, ends = parts[0][1], [n for moving, _, a in parts for n in a.bounds_of(moving)]
            if rest is not None and None not in ends and all(r is not None and r.same(rest) for _, r, _ in parts):
                n = max(ends) - min(ends) + 1
                out[d] = (rest + min(ends), n) if n < size else out[d]
        return out


def _read_anyway(s: Stmt, points: dict[Var, np.ndarray], reached: np.ndarray) -> Iterator[Load]:
    """The loads that some iteration makes, whatever memory and the variables from outside the loop hold."""
    if isinstance(s, Seq):
        for x in s.stmts:
            yield from _read_anyway(x, points, reached)
    elif isinstance(s, If) and (holds := index_values(s.cond, points)) is not None:
        if np.any(reached & holds):
            yield from _read_anyway(s.then, points, reached & holds)
    else:
        order: list[tuple[Node, bool]] = []
        in_order(s, False, order)
        yield from (x for x, conditional in order if not conditional and isinstance(x, Load))


class OverFragment:
    """A loop that accesses fragments at an offset as one over all their elements, so that the owner of each runs it.

    for i in T.Parallel(16): h[i] = F[i + c]     ->     for k in T.Parallel(64): if k >= c and k < c + 16: h[k - c] = F[k]

    found: (variable of the loop or None, offset, variable of the new loop) of the fragments' dimensions.
    """

    def __init__(self, offsets: Offsets) -> None:
        self.offsets, self.body, self.sizes = offsets, offsets.body, dict(zip(offsets.vars, offsets.extents))
        self.analyzer = offsets.lw.known.over(offsets.vars, offsets.extents)
        self.found: list[tuple[Var | None, Expr, Var]] = []
        self.at: dict[tuple[Buffer, tuple[Expr, ...]], tuple[Expr, ...]] = {}

    def loop(self) -> tuple[tuple[Var, ...], tuple[Any, ...], Stmt] | None:
        """(variables, extents, body); None for other loops, and where the offsets of two accesses differ."""
        for x in [x for x in walk(self.body, Load, Store, AddressOf) if x.buffer.scope_name == FRAGMENT]:
            at = None if isinstance(x, AddressOf) else self._indices(x)
            if at is None:
                return None
            self.at[x.buffer, x.indices] = at
        vars, moved, by = self.offsets.vars, [f for f in self.found if f[0] is not f[2]], {v: k for v, _, k in self.found}
        if not moved or sum(f[0] is None for f in moved) > 1 or any(self.sizes[v] != 1 and v not in by for v in vars) or \
                not self._has_all(moved):
            return None
        body = rewrite(self.body, lambda x: replace(x, indices=got) if (got := self.at.get((x.buffer, x.indices))) else None,
                       Load, Store)
        conds = [binary("eq", k, offset) for v, offset, k in moved if v is None]
        conds += [binary(op, k, at) for v, offset, k in moved if v is not None for op, at in (
            ("ge", offset), ("lt", offset + self.sizes[v]))]
        body = substitute(body, {v: k - offset for v, offset, k in moved if v is not None})
        loop = (*(k for v, _, k in self.found if v is None), *(by.get(v, v) for v in vars))
        return loop, tuple(self.sizes[v] for v in loop), If(reduce(partial(logical, "and"), conds), body, span=body.span)

    def _indices(self, x: Load | Store) -> tuple[Expr, ...] | None:
        """The indices of an access in the new loop."""
        new: list[Expr] = []
        for i, n in zip(x.indices, map(int, x.buffer.shape)):
            moving, offset = self.offsets.of(i, self.analyzer)
            v: Any = next(iter(moving.terms), None)
            if offset is None or v is not None and (v not in self.sizes or len(moving.terms) > 1 or moving.terms[v] != 1):
                return None
            same = next((f for f in self.found if f[0] is v and (
                v is not None or f[1].same(offset) and self.sizes[f[2]] == n)), None)
            if same is None and n > 1:
                plain = v is not None and is_const(offset, 0) and self.sizes[v] == n
                self.found.append(same := (v, offset, v if plain else fresh("k", i.dtype)))
                self.sizes[same[2]] = n
            if same and (not same[1].same(offset) or self.sizes[same[2]] != n or same[2] in new):
                return None
            new.append(same[2] if same else i)
        return tuple(new)

    def _has_all(self, moved: list[tuple[Var | None, Expr, Var]]) -> bool:
        """Whether the new loop has all iterations that do something: those outside of the fragments have no access to make.

        That holds for an access that is inside the fragment in all iterations, or that each iteration makes that does anything.
        """
        s: Stmt = self.body
        while isinstance(s, If) and s.orelse is None and not any(x.buffer.scope_name == FRAGMENT for x in walk(s.cond, Load)):
            s = s.then
        order: list[tuple[Node, bool]] = []
        in_order(s, False, order)
        made: set[Any] = set()
        for x, conditional in order:
            if not conditional and isinstance(x, (Load, Store)):
                made.update(self.at.get((x.buffer, x.indices), ()))
        for v, offset, k in moved:
            low, high = self.analyzer.interval(offset if v is None else v + offset)
            if k not in made and (low is None or low < 0 or high is None or high >= self.sizes[k]):
                return False
        return True
