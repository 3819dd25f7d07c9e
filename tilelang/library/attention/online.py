"""Normalisations of attention's rows from one description: what a kernel of the forward pass computes, and the derivatives.

A description is traced once, with a variable for the score of one key and one for each value of a row's state.  Behind the
last key a weight is w = weight(score, state) factor(state); rows have the same state for all keys then, and maxima are those
of all keys, so that `reduce.max` adds nothing: -inf takes its place.  With p the weight without the factor, delta the sum of
out * grad over a row, and e the gradient of a weight,
    d loss / d score = e factor p' + sum over states of (d log factor / d state) delta (d state / d score).
A state changes with a score by what `reduce.sum` adds to it.  Maxima are references against overflow: the result must not
depend on them, so that they have no derivative.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import tilelang.language as T
from tilelang.errors import error
from tilelang.ir import Expr, Var, const, dtype, substitute, walk

from .derivative import derivative

NEUTRAL = {"max": -float("inf"), "sum": 0.0}


@dataclass(frozen=True)
class Reduction:
    """A reduction over the visible keys of a tile. kind: "max" or "sum". of: its operand; result: the variable for it."""

    kind: str
    of: Any
    result: Var


class Reduce:
    """What `update` of a description calls for reductions over the keys of a tile."""

    def __init__(self) -> None:
        self.found: list[Reduction] = []

    def max(self, of: Any) -> Var:
        """The largest value of an expression of the score over the visible keys."""
        return self._reduced("max", of)

    def sum(self, of: Any) -> Var:
        """The sum of an expression of the score over the visible keys."""
        return self._reduced("sum", of)

    def _reduced(self, kind: str, of: Any) -> Var:
        self.found.append(Reduction(kind, _float(of), Var(f"{kind}_{len(self.found)}", dtype("float32"))))
        return self.found[-1].result


def _float(x: Any) -> Any:
    return x if isinstance(x, Expr) else const(float(x), "float32")


@dataclass(frozen=True)
class Traced:
    """A traced description, of variables and expressions in float32.

    score: the variable of a score. names, states, first, next: of the row state: names, variables, values in front of the first
    key, and values behind a tile. weight: of a key. rescale: of what was added up before; 1.0 where nothing changes. factor: of
    the sum behind the last key. constant: names of states that have no derivative.
    """

    score: Var
    names: tuple[str, ...]
    states: tuple[Var, ...]
    first: tuple[float, ...]
    next: tuple[Any, ...]
    reductions: tuple[Reduction, ...]
    weight: Any
    rescale: Any
    factor: Any
    constant: frozenset[str]

    def at_end(self, e: Any) -> Any:
        """An expression of a tile behind the last key."""
        return substitute(e, {r.result: const(NEUTRAL["max"], "float32") for r in self.reductions if r.kind == "max"})

    @property
    def slope(self) -> Any:
        """The derivative of a weight, without the factor, by its score."""
        return derivative(self.at_end(self.weight), self.score, self.states)

    def changes(self) -> list[tuple[int, Any, Any]]:
        """(number of a state, derivative of the factor's logarithm by it, its own by a score) where neither is 0."""
        found = []
        for n, (name, state) in enumerate(zip(self.names, self.states)):
            of_factor = 0.0 if name in self.constant else derivative(self.factor, state, self.states)
            parts = [_times_both(derivative(self.next[n], r.result, self._others(r)),
                              derivative(self.at_end(r.of), self.score, self.states))
                     for r in self.reductions if r.kind == "sum"]
            parts = [p for p in parts if isinstance(p, Expr) or p != 0.0]
            if parts and (isinstance(of_factor, Expr) or of_factor != 0.0):
                log = T.if_then_else(self.factor == 0.0, 0.0, of_factor / self.factor)
                found.append((n, log, self.at_end(sum(parts[1:], parts[0]))))
        return found

    def _others(self, but: Reduction) -> tuple[Var, ...]:
        return (*self.states, *(r.result for r in self.reductions if r is not but))


def _times_both(a: Any, b: Any) -> Any:
    zero = any(not isinstance(x, Expr) and x == 0.0 for x in (a, b))
    return 0.0 if zero else b if not isinstance(a, Expr) and a == 1.0 else a * b


def traced(update: Callable[..., Any], finish: Callable[..., Any], state: dict[str, float], constant: Any = ()) -> Traced:
    """A description, traced. Raises attention-option."""
    score, reduce = Var("score", dtype("float32")), Reduce()
    now = {name: Var(name, dtype("float32")) for name in state}
    weight, new, rescale = update(score, dict(now), reduce)
    if set(new) != set(state) or not set(constant) <= set(state):
        raise error("attention-option", f"update returns the states {sorted(new)}", expected=str(sorted(state)),
                    found=str(sorted(new)), hint="return a value for each state of the description")
    sums = [r.result for r in reduce.found if r.kind == "sum"]
    if any(v is s for e in (weight, rescale) if isinstance(e, Expr) for v in walk(e, Var) for s in sums):
        raise error("attention-option", "a weight depends on a sum over the keys of a tile, which later tiles change",
                    expected="weights of the score, the state before and maxima", found="a sum",
                    hint="divide by sums in `finish`")
    return Traced(score, tuple(state), tuple(now.values()), tuple(float(x) for x in state.values()),
                  tuple(_float(new[n]) for n in state), tuple(reduce.found), _float(weight),
                  rescale if isinstance(rescale, Expr) else float(rescale), _float(finish(dict(now))), frozenset(constant))
