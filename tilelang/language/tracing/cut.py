"""Large expressions, which helper functions of Python build, become variables in front of the statement that uses them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from tilelang.ir import (FALSE, TRUE, AddressOf, Alloc, Binary, Bind, Break, Broadcast, Buffer, Call, Const, Expr, If, Load,
                         Node, Ramp, Select, Stmt, Store, StringConst, Var, While, children, const, contains, extent, fresh,
                         is_large, load, rebuild, replace, seq, unary, LOGICAL, VARIABLE)
from tilelang.ir.visitor import mapped
from tilelang.target.intrinsics import INTRINSICS, READS, WARP, is_pure

_LEAVES = (Var, Const, StringConst, AddressOf, Ramp, Broadcast)  # what no variable is made for
_DIVISIONS = ("floordiv", "floormod", "truncdiv", "truncmod")
SHARED_NODES = 4  # of an operand that is worth a variable where it is used twice


def in_variables(stmt: Stmt) -> Stmt:
    """The statement, with the operands of large expressions in variables before it: those used twice, and every so many levels.

        Y[i] = (x ^ x << 13) ^ (x ^ x << 13) >> 17   ->   t = x ^ x << 13;  Y[i] = t ^ t >> 17

    Keeps: what is read when, and that an operand which may not be needed is evaluated only where it does no harm.
    """
    roots = [n for n in children(stmt) if not isinstance(n, (Stmt, Buffer)) and is_large(n)]
    if not roots:
        return stmt
    if isinstance(stmt, While):  # its condition is evaluated again before each iteration
        leave = in_variables(If(unary("not", stmt.cond), Break(span=stmt.span), span=stmt.span))
        return replace(stmt, cond=TRUE, body=seq(leave, stmt.body))
    cut = _Cut(stmt, roots)
    new: dict[int, Any] = {}
    before = cut.region(roots, new)
    at = {id(n): new[id(n)] for n in roots}
    return seq(*before, rebuild(stmt, lambda v: _replaced(v, at)))


class _Cut:
    """Cuts the expressions of one statement, operand by operand in the order of evaluation."""

    def __init__(self, stmt: Stmt, roots: list[Node]) -> None:
        self.span, self.harmless = stmt.span, dict[int, Any]()  # by identity; the values are kept, so that no other gets theirs
        own = {id(n) for n in roots}
        self.writes = any(isinstance(n, Call) and _may_write(n) for n in _below(roots, children) if id(n) not in own)

    def region(self, roots: list[Node], new: dict[int, Any]) -> list[Stmt]:
        """Statements for what is evaluated with the roots.  new: what nodes (by id) have become, extended by this region's."""
        out: list[Any] = []
        order = [n for n in _below(roots, children) if id(n) not in new]
        always, uses = {id(n) for n in _below(roots, _eager)}, dict[int, int]()
        for n in order:
            for c in children(n):
                uses[id(c)] = uses.get(id(c), 0) + 1
        settled = dict(new)
        for k, n in enumerate(order, len(new)):
            now: Any = n if isinstance(n, Buffer) else rebuild(n, lambda v: _replaced(v, new))
            certain = id(n) in always
            if certain and isinstance(n, Expr) and n.dtype.lanes == 1 and _lazy(n) and \
                    is_large(now) and extent(now)[0] > 2 * k:  # what may not be computed early repeats its operands
                now = self.branch(n, new[id(_condition(n))], settled, out)
            if self.does_no_harm(now):
                self.harmless[id(now)] = now
            shared = uses.get(id(n), 0) > 1 and extent(now)[0] >= SHARED_NODES
            if (shared or is_large(now, 2)) and self.may_precede(now, certain):
                out.append(Bind(fresh("t", now.dtype), now, span=self.span))
                now = out[-1].var
                self.harmless[id(now)] = now
                certain = True
            new[id(n)] = now
            if certain:
                settled[id(n)] = now
        return out

    def branch(self, n: Any, cond: Expr, settled: dict[int, Any], out: list[Any]) -> Expr:
        """A choice between large operands as an if statement that stores the one that is needed."""
        result = Buffer("t", (1,), n.dtype, VARIABLE, span=self.span)
        short = isinstance(n, Binary)
        arms = (n.b if n.op == "and" else TRUE, n.b if n.op == "or" else FALSE) if short else (n.a, n.b)
        bodies: list[Stmt] = []
        for arm in arms:
            own = dict(settled)
            before = self.region([arm], own)
            bodies.append(seq(*before, Store(result, (const(0),), own[id(arm)], span=self.span)))
        out += [Alloc(result, None, span=self.span), If(cond, bodies[0], bodies[1], span=self.span)]
        return load(result, (const(0),))

    def may_precede(self, now: Any, certain: bool) -> bool:
        """Whether a variable may be made for a value: nothing that the statement does comes before it, and it does no harm."""
        if not isinstance(now, Expr) or isinstance(now, _LEAVES) or now.dtype.is_handle:
            return False
        return not (self.writes and contains(now, Load, Call)) and (certain or id(now) in self.harmless)

    def does_no_harm(self, now: Any) -> bool:
        """Whether a value may be computed where it is not needed."""
        if isinstance(now, Load) or isinstance(now, Call) and not is_pure(now.op) or isinstance(now, Binary) and \
                now.op in _DIVISIONS and not isinstance(now.b, Const):
            return False
        return all(id(c) in self.harmless for c in children(now))


def _replaced(v: Any, new: dict[int, Any]) -> Any:
    return mapped(lambda x: _replaced(x, new), v) if type(v) is tuple else new.get(id(v), v)


def _lazy(n: Expr) -> bool:
    return isinstance(n, Select) and n.lazy or isinstance(n, Binary) and n.op in LOGICAL


def _condition(n: Any) -> Expr:
    return n.cond if isinstance(n, Select) else n.a


def _eager(n: Node) -> Iterable[Node]:
    """The operands of a node that are evaluated whenever it is."""
    return (_condition(n),) if isinstance(n, Expr) and _lazy(n) else children(n)


def _may_write(e: Call) -> bool:
    return not is_pure(e.op) and (e.op not in INTRINSICS or INTRINSICS[e.op].effect not in (READS, WARP))


def _below(roots: list[Node], operands: Callable[[Node], Iterable[Node]]) -> Iterator[Node]:
    """The nodes at and below the roots, each once, after its operands; by a stack, for expressions of thousands of levels."""
    stack, seen = [(n, False) for n in reversed(roots)], set[int]()
    while stack:
        n, done = stack.pop()
        if done:
            yield n
        elif id(n) not in seen:
            seen.add(id(n))
            stack.append((n, True))
            stack += [(c, False) for c in reversed(list(operands(n)))]
