"""Arithmetic on index expressions: simplification, intervals, proofs, affine forms.

    simplify(e, env)       an equal, shorter expression         interval(e, env)     inclusive bounds
    simplify_stmt(s, env)  the same for whole statements        can_prove(c, env)    True only when certain
    divisible(e, n)        always a multiple of n?

env maps variables to inclusive (low, high); None means that this end is unknown.  A pass that makes many queries should keep
one `Analyzer`, which memoises its results by node identity.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import gcd
from typing import Any

from tilelang.ir import Binary, Cast, Expr, Select, Stmt, Var, const

from .analyzer import Analyzer, Env, is_large
from .flat_index import flat_index, lane_of, vector_base
from .value_scalars import LaunchFacts, launch_analyzer, value_scalars
from .linear import Bounds, Linear
from .rules import ALL_RULES, Rule, RuleSet, Wild, rules
from .simplify import bound_to, extent_bounds, simplify_stmt


def simplify(node: Any, env: Env | None = None) -> Any:
    """Simplify an expression or a statement; ints are returned as they are."""
    if isinstance(node, Expr):
        return Analyzer(env).simplify(node)
    if isinstance(node, Stmt):
        return simplify_stmt(node, env)
    return node


def interval(e: Any, env: Env | None = None) -> Bounds:
    """Inclusive bounds of an integer expression under env, None where unknown."""
    return Analyzer(env).interval(e if isinstance(e, Expr) else const(e))


def can_prove(cond: Any, env: Env | None = None) -> bool:
    """Whether the condition holds for all values in env.  False means "not proven"."""
    return Analyzer(env).can_prove(cond)


def divisible(e: Any, n: int, facts: Mapping[Expr, int] | None = None, analyzer: Analyzer | None = None) -> bool:
    """Whether e is proven to be a multiple of n.  facts: known divisors of variables or other atoms."""
    return n in (0, 1) or known_divisor(e, facts, analyzer) % n == 0


def known_divisor(e: Any, facts: Mapping[Expr, int] | None = None, analyzer: Analyzer | None = None) -> int:
    """The largest integer known to divide e; 0 when e is 0, which every integer divides.

    A divisor that is not a power of two is correct only if e does not overflow its type.
    """
    if not isinstance(e, Expr):
        return abs(int(e))
    facts, a = facts or {}, analyzer or Analyzer()
    if e in facts:
        return facts[e]
    if not e.dtype.is_int or e.dtype.lanes != 1:
        return 1
    form = a.linear(e)
    out = abs(form.const)
    for atom, c in form.terms.items():
        out = gcd(out, abs(c) * _atom_divisor(atom, facts, a))
    return out


def _atom_divisor(x: Expr, facts: Mapping[Expr, int], a: Analyzer) -> int:
    if x in facts:
        return facts[x]
    if isinstance(x, Binary):
        if x.op == "mul":
            return known_divisor(x.a, facts, a) * known_divisor(x.b, facts, a)
        if x.op in ("floormod", "truncmod", "min", "max", "bitor", "bitxor"):
            return _low_bits(x.op, gcd(known_divisor(x.a, facts, a), known_divisor(x.b, facts, a)))
        if x.op == "floordiv":
            d, c = known_divisor(x.a, facts, a), a.linear(x.b)
            return d // c.const if c.is_const and c.const > 0 and d % c.const == 0 else 1
    if isinstance(x, Select):
        return gcd(known_divisor(x.a, facts, a), known_divisor(x.b, facts, a))
    if isinstance(x, Cast) and x.value.dtype.is_int and x.value.dtype.lanes == 1:
        d = known_divisor(x.value, facts, a)
        return d if x.dtype.bits >= x.value.dtype.bits else _low_bits("bitor", d)
    return 1


def _low_bits(op: str, d: int) -> int:
    """The divisor that remains after a bit operation or a narrowing cast: these keep only the power-of-two factor of d."""
    return d & -d if op in ("bitor", "bitxor") else d


__all__ = ["ALL_RULES", "Analyzer", "Bounds", "Env", "LaunchFacts", "Linear", "Rule", "RuleSet", "Var", "Wild", "bound_to",
           "can_prove", "divisible", "extent_bounds", "flat_index", "interval", "is_large", "known_divisor", "lane_of",
           "launch_analyzer", "rules", "simplify", "simplify_stmt", "value_scalars", "vector_base"]
