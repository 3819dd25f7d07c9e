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

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

import tilelang.language as T
from tilelang.errors import error
from tilelang.ir import Binary, Call, Const, Expr, Select, Unary, Var, const, dtype, free_vars, rewrite, substitute, walk
from tilelang.target.rounded_functions import ALLOWED

from .derivative import derivative
from .form import LOG2E

NEUTRAL = {"max": -float("inf"), "sum": 0.0}
_EXPONENTIALS = {"exp": LOG2E, "exp2": 1.0, "exp10": 3.321928094887362}


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
    def softmax(self) -> bool:
        """Whether this is the softmax of the scores, written in any order of operands."""
        tops = [n for n, e in enumerate(self.next) for r in self.reductions if r.kind == "max" and r.of is self.score
                and _equal(e, T.max(self.states[n], r.result))]
        if len(self.states) != 2 or len(self.reductions) != 2 or len(tops) != 1:
            return False
        top, total = (self.states[n] for n in (tops[0], 1 - tops[0]))
        reached, sums = self.next[tops[0]], [r for r in self.reductions if r.kind == "sum" and r.of.same(self.weight)]
        scale = T.exp(top - reached)
        return len(sums) == 1 and self.first[1 - tops[0]] == 0.0 and self.first[tops[0]] <= -1e30 and all(map(_equal, (
            self.weight, self.rescale, self.next[1 - tops[0]], self.factor),
            (T.exp(self.score - reached), scale, total * scale + sums[0].result,
             T.if_then_else(total == 0.0, 0.0, 1.0 / total))))

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


def _equal(a: Any, b: Any) -> bool:
    """Whether expressions are the same up to the order of operands."""
    if not isinstance(a, Expr) or not isinstance(b, Expr) or type(a) is not type(b):
        return False
    if a.same(b):
        return True
    if isinstance(a, Binary) and isinstance(b, Binary):
        straight, crossed = (all(map(_equal, (a.a, a.b), x)) for x in ((b.a, b.b), (b.b, b.a)))
        return a.op == b.op and (straight or crossed and a.op in ("add", "mul", "max"))
    if isinstance(a, Call) and isinstance(b, Call):
        return a.op == b.op and len(a.args) == len(b.args) and all(map(_equal, a.args, b.args))
    return False


def _times_both(a: Any, b: Any) -> Any:
    zero = any(not isinstance(x, Expr) and x == 0.0 for x in (a, b))
    return 0.0 if zero else b if not isinstance(a, Expr) and a == 1.0 else a * b


def traced(update: Callable[..., Any], finish: Callable[..., Any], state: dict[str, float], constant: Any = ()) -> Traced:
    """A description, traced. Raises attention-option."""
    score, reduce = Var("score", dtype("float32")), Reduce()
    now = {name: Var(name, dtype("float32")) for name in state}
    found = update(score, dict(now), reduce)
    if not isinstance(found, tuple) or len(found) != 3 or not isinstance(found[1], dict):
        raise error("attention-option", "update returns no weight, states and factor", found=f"{found!r:.60}",
                    expected="(weight, states as a dict, factor)", hint="return weight, state, 1.0")
    weight, new, rescale = found
    if set(new) != set(state) or not set(constant) <= set(state):
        raise error("attention-option", f"update returns the states ‹{sorted(new)}›", expected=str(sorted(state)),
                    hint="return a value for each state of the description")
    sums = [r.result for r in reduce.found if r.kind == "sum"]
    if any(v is s for e in (weight, rescale) if isinstance(e, Expr) for v in walk(e, Var) for s in sums):
        raise error("attention-option", "a weight depends on ‹a sum› over the keys of a tile, which later tiles change",
                    expected="weights of the score, the state before and maxima", hint="divide by sums in `finish`")
    return Traced(score, tuple(state), tuple(now.values()), tuple(float(x) for x in state.values()),
                  tuple(_float(new[n]) for n in state), tuple(reduce.found), _float(weight),
                  rescale if isinstance(rescale, Expr) else float(rescale), _float(finish(dict(now))), frozenset(constant))


class Rule:
    """What the backward pass computes of a score, by a description.

    A gradient is slope (factor E + costs) where states change with a score as its weight does, else slope factor E + more.
    facts: what a block reads of a row, expressions of its states and of `delta`; the first ones, in number `first`, are needed
    for weights. second: whether there is `more`. vanishes: whether a score of -inf gives zeros by itself. element: the type of
    q, k and v. changes: whether a function changes scores.
    """

    def __init__(self, t: Traced, element: str, changes: bool) -> None:
        self.trace, self.element, self.changes, self.delta = t, element, changes, Var("delta", dtype("float32"))
        found = t.changes()
        self.weight, self.slope, self.by = t.at_end(t.weight), _float(t.slope), [_float(by) for _, _, by in found]
        self.second = not all(by.same(self.slope) for by in self.by)
        used = {v for e in (self.weight, self.slope, *self.by) for v in free_vars(e)}
        self.states = [s for s in t.states if s in used]
        constant, costs = not free_vars(t.factor), [log * self.delta for _, log, _ in found]
        self.facts: list[Any] = [*self.states, *[t.factor] * (not constant), *costs]
        self.first = len(self.facts) - (0 if self.second else len(costs))
        self._factor = None if constant else len(self.states)
        self.vanishes = not changes and all(at_hidden(e, t.score) == (0.0, 0.0) for e in (self.weight, self.slope, *self.by))
        self._costs = range(len(self.facts) - len(costs), len(self.facts))

    def values(self, score: Any, fact: Callable[[int], Any], slope: Any) -> tuple[Any, Any, Any]:
        """(weight, what `change` takes, `more` or None) of a changed score. fact: of the row. slope: the derivative of the
        changed score; None: 1."""
        place, known = {self.trace.score: score, **{s: fact(n) for n, s in enumerate(self.states)}}, list[tuple[Call, Any]]()
        weight, own, *by = (quick(substitute(e, place), self.element, known) for e in (self.weight, self.slope, *self.by))
        factor = self.trace.factor if self._factor is None else fact(self._factor)
        more = sum((fact(n) * e for n, e in zip(self._costs, by)), start=const(0.0, "float32")) if self.second else None
        own = own * factor if self.second or not self._costs else own
        if slope is not None:
            own, more = own * slope, None if more is None else more * slope
        found = weight * factor, own, more
        if not self.changes:
            return found
        hidden = score == const(-float("inf"), "float32")
        return tuple(e if e is None else T.if_then_else(hidden, 0.0, e) for e in found)  # type: ignore[return-value]

    def change(self, own: Any, gradient: Any, more: Any, fact: Callable[[int], Any]) -> Any:
        """The gradient of a score. own, more: from `values`. gradient: of its weight."""
        if more is not None:
            return own * gradient + more
        if not self._costs:
            return own * gradient
        scaled = gradient * (self.trace.factor if self._factor is None else fact(self._factor))
        return own * sum((fact(n) for n in self._costs), start=scaled)


class Lagging:
    """A description as the forward kernel computes it: maxima that are references follow the scores from some distance.

    lags: of states that are such maxima, by number: the number of the reduction. reached: variables for the states behind a
    tile; of `lags`, expressions name them. Other names: as in Traced.
    """

    def __init__(self, t: Traced) -> None:
        self.score, self.states, self.factor = t.score, t.states, t.factor
        self.reached = tuple(Var(f"{v.name}_reached", v.dtype) for v in t.states)
        self.lags: dict[int, int] = {}
        parts: list[Any] = [t.weight, t.rescale, *t.next, *(r.of for r in t.reductions)]
        for n, (state, e) in enumerate(zip(t.states, t.next)):
            for k, r in enumerate(t.reductions):
                if r.kind == "max" and _equal(e, T.max(state, r.result)):
                    left = [_put(x, e, self.reached[n]) for x in parts]
                    if not any(r.result in free_vars(x) for x in left if isinstance(x, Expr)):
                        parts, self.lags[n] = left, k
        of = parts[2 + len(t.next):]
        self.weight, self.rescale, self.next = parts[0], parts[1], parts[2:2 + len(t.next)]
        self.reductions = tuple(Reduction(r.kind, e, r.result) for r, e in zip(t.reductions, of))
        self._of_weights = [r.kind == "sum" and r.of.same(t.weight) and not any(r.result in free_vars(e) for e in of)
                            for r in t.reductions]

    def in_order(self) -> tuple[list[int], list[int]]:
        """The numbers of the reductions before the weights are known, and of those that are sums of them."""
        both: tuple[list[int], list[int]] = [], []
        for n, late in enumerate(self._of_weights):
            both[late].append(n)
        return both

    @property
    def scratch(self) -> bool:
        """Whether a reduction is of neither the scores nor the weights."""
        return any(self.reductions[n].kind != "max" or self.reductions[n].of is not self.score for n in self.in_order()[0])


def at_hidden(e: Any, score: Var) -> tuple[float, float]:
    """Bounds of an expression for the score -inf, whatever finite values the other variables have."""
    if isinstance(e, Var):
        return (-math.inf, -math.inf) if e is score else (-_LARGE, _LARGE)
    if isinstance(e, Const):
        return float(e.value), float(e.value)
    if isinstance(e, Select):
        way, a, b = (at_hidden(x, score) for x in (e.cond, e.a, e.b))
        return a if way == (1.0, 1.0) else b if way == (0.0, 0.0) else (min(a[0], b[0]), max(a[1], b[1]))
    if isinstance(e, Unary) and e.op == "neg":
        low, high = at_hidden(e.a, score)
        return -high, -low
    if isinstance(e, Call) and e.op in _GROWING:
        return tuple(_GROWING[e.op](x) for x in at_hidden(e.args[0], score))  # type: ignore[return-value]
    if isinstance(e, Binary) and e.op in _OPERATIONS:
        a, b = at_hidden(e.a, score), at_hidden(e.b, score)
        with np.errstate(all="ignore"):
            ends = [float(_OPERATIONS[e.op](np.float64(x), np.float64(y))) for x in a for y in b]
        return (-math.inf, math.inf) if any(map(math.isnan, ends)) else (min(ends), max(ends))
    return -math.inf, math.inf


_LARGE = 1e30
_OPERATIONS: dict[str, Callable[[Any, Any], Any]] = {  # an end of the result is at ends of the operands
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "min": min, "max": max, "lt": operator.lt, "le": operator.le,
    "gt": operator.gt, "ge": operator.ge}
_GROWING: dict[str, Callable[[float], float]] = {
    "exp": np.exp, "exp2": np.exp2, "sigmoid": lambda x: 1.0 / (1.0 + np.exp(-x)), "tanh": np.tanh}


def _put(x: Any, e: Expr, by: Var) -> Any:
    """x with a variable in place of an expression."""
    return rewrite(x, lambda y: by if y.same(e) else None, Binary) if isinstance(x, Expr) else x


def quick(e: Any, element: str, known: list[tuple[Call, Any]] | None = None) -> Any:
    """An expression whose value is rounded to `element`: of 16 bits, exponentials and sigmoids take the fewest instructions.
    known: values of functions that expressions share, which is added to."""
    def short(x: Call) -> Any:
        shared = next((value for y, value in known or () if y.same(x)), None)
        if shared is not None or not x.args:
            return shared
        inner, value = quick(x.args[0], element, known), None
        if x.op in _EXPONENTIALS:
            value = T.fast_exp2(_times(inner, _EXPONENTIALS[x.op]))
        elif x.op == "sigmoid":
            value = T.fast_rcp(1.0 + T.fast_exp2(_times(inner, -LOG2E)))
        if known is not None and value is not None:
            known.append((x, value := T.bind(value)))
        return value

    return rewrite(e, short, Call) if element in ALLOWED else e


def _times(e: Any, c: float) -> Any:
    """e * c, where factors and terms that are constants take c."""
    if isinstance(e, Const):
        return const(float(e.value) * c, e.dtype)
    if isinstance(e, Unary) and e.op == "neg":
        return _times(e.a, -c)
    if isinstance(e, Binary) and e.op in ("add", "sub"):
        a, b = _times(e.a, c), _times(e.b, c)
        return a + b if e.op == "add" else a - b
    if isinstance(e, Binary) and e.op == "mul" and isinstance(e.b, Const):
        return _times(e.a, float(e.b.value) * c)
    return e * const(c, "float32")
