"""Rewrite rules as data: a pattern of nested tuples, its replacement, and the condition under which the rule holds.

A pattern is `(op, operand, …)`, a `Wild` (matches anything; the same Wild twice must match equal expressions), a
`Wild(const=True)` (matches literals only), or a Python value (matches a literal of that value).  `op` is the name of a
Binary or Unary operation, or "select".  A replacement is a pattern too, or a function of the matched expressions by the
name of their Wild.  Integer sums, products, quotients and remainders are simplified as linear forms (linear.py), because a
rule cannot express "collect the terms".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from tilelang.ir import BOOL, FALSE, TRUE, Binary, Call, Const, Expr, Load, Select, Unary, contains
from tilelang.ir.record import record


@record
class Wild:
    """A named placeholder in a pattern.  const: matches literals only."""

    name: str
    const: bool = False


@record
class Rule:
    """Rewrites pattern to replacement if when(matched) holds."""

    pattern: tuple[Any, ...]
    replacement: Any
    when: Callable[[dict[str, Expr]], bool] | None = None


class RuleSet:
    """Rules indexed by the operation at the root of their pattern.  `+` concatenates sets; earlier rules are tried first."""

    def __init__(self, all_rules: Iterable[Rule]) -> None:
        self.rules = tuple(all_rules)
        self.by_op: dict[str, list[Rule]] = {}
        for r in self.rules:
            self.by_op.setdefault(r.pattern[0], []).append(r)

    def __add__(self, other: RuleSet) -> RuleSet:
        return RuleSet((*self.rules, *other.rules))

    def apply(self, e: Expr) -> Expr | None:
        """The replacement of e by the first rule that matches at its root, or None."""
        op = root_op(e)
        for r in self.by_op.get(op, ()):
            got: dict[str, Expr] = {}
            if _match(r.pattern, e, got) and (r.when is None or r.when(got)):
                return _build(r.replacement, got, e)
        return None


def rules(*rows: tuple[Any, ...]) -> RuleSet:
    """A rule set from rows (pattern, replacement) or (pattern, replacement, when)."""
    return RuleSet(Rule(*r) for r in rows)


def root_op(e: Expr) -> str:
    """The name a pattern uses for this node ("" when no pattern can match it)."""
    if isinstance(e, (Binary, Unary)):
        return e.op
    return "select" if isinstance(e, Select) else ""


def _operands(e: Expr) -> tuple[Expr, ...]:
    if isinstance(e, Binary):
        return e.a, e.b
    if isinstance(e, Unary):
        return (e.a,)
    return e.cond, e.a, e.b  # type: ignore[attr-defined]


def _match(p: Any, e: Expr, got: dict[str, Expr]) -> bool:
    if isinstance(p, Wild):
        if p.const and not isinstance(e, Const):
            return False
        old = got.setdefault(p.name, e)
        return old is e or old.same(e)
    if isinstance(p, tuple):
        if root_op(e) != p[0]:
            return False
        ops = _operands(e)
        return len(ops) == len(p) - 1 and all(_match(q, o, got) for q, o in zip(p[1:], ops))
    return isinstance(e, Const) and type(e.value) is type(p) and e.value == p


def _build(r: Any, got: dict[str, Expr], like: Expr) -> Expr:
    if isinstance(r, Wild):
        return got[r.name]
    if callable(r):
        return r(got)
    if isinstance(r, tuple):
        ops = [_build(o, got, like) for o in r[1:]]
        if len(ops) == 1:
            return Unary(r[0], ops[0], ops[0].dtype, span=like.span)
        if r[0] == "select":
            return Select(ops[0], ops[1], ops[2], ops[1].dtype, like.lazy, span=like.span)  # type: ignore[attr-defined]
        logical = like.dtype.is_bool
        return Binary(r[0], ops[0], ops[1], BOOL if logical else ops[0].dtype, span=like.span)
    if isinstance(r, bool):
        return TRUE if r else FALSE
    return Const(r, like.dtype)


x, y, z = Wild("x"), Wild("y"), Wild("z")


def _pure(name: str) -> Callable[[dict[str, Expr]], bool]:
    return lambda got: is_pure(got[name])


def is_pure(e: Expr) -> bool:
    """Whether e may be evaluated twice or not at all without an observable difference: it contains no loads and no calls."""
    return not contains(e, Call, Load)


# `and` and `or` short-circuit from left to right: their *left* operand may be dropped only if it contains no calls or loads.
LOGIC_RULES = rules(
    (("and", True, x), x),
    (("and", x, True), x),
    (("and", False, x), False),
    (("and", x, False), False, _pure("x")),
    (("and", x, x), x),
    (("or", False, x), x),
    (("or", x, False), x),
    (("or", True, x), True),
    (("or", x, True), True, _pure("x")),
    (("or", x, x), x),
    (("and", ("and", x, y), y), ("and", x, y)),
    (("and", ("and", x, y), x), ("and", x, y)),
    (("not", ("not", x)), x),
    (("not", True), False),
    (("not", False), True),
)


def _is_int(got: dict[str, Expr]) -> bool:
    return not got["x"].dtype.is_float


def _not_compare(op: str) -> Any:
    return lambda got: Binary(op, got["x"], got["y"], BOOL)


# `not` may invert an ordered comparison of integers only: for floats the two sides differ on NaN.
COMPARE_RULES = rules(
    (("not", ("lt", x, y)), _not_compare("ge"), _is_int),
    (("not", ("le", x, y)), _not_compare("gt"), _is_int),
    (("not", ("gt", x, y)), _not_compare("le"), _is_int),
    (("not", ("ge", x, y)), _not_compare("lt"), _is_int),
    (("not", ("eq", x, y)), _not_compare("ne")),
    (("not", ("ne", x, y)), _not_compare("eq")),
)

SELECT_RULES = rules(
    (("select", True, x, y), x),
    (("select", False, x, y), y),
    (("select", z, x, x), x, _pure("z")),
    (("select", ("not", z), x, y), ("select", z, y, x)),
)

BIT_RULES = rules(
    (("bitand", x, x), x),
    (("bitor", x, x), x),
    (("bitxor", x, x), 0, lambda got: got["x"].dtype.is_int),
    (("bitand", x, 0), 0),
    (("bitor", x, 0), x),
    (("bitxor", x, 0), x),
    (("bitxor", ("bitxor", x, y), y), x),
    (("bitnot", ("bitnot", x)), x),
    (("min", x, x), x),
    (("max", x, x), x),
)

ALL_RULES = LOGIC_RULES + COMPARE_RULES + SELECT_RULES + BIT_RULES
