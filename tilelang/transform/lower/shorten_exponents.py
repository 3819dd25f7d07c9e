"""Give tanh a shorter form where only an absolute error counts: in arguments of exponentials.

    for i, j in T.Parallel(128, 128):                            for i, j in T.Parallel(128, 128):
        S[i, j] = 30.0 * T.tanh(S[i, j] * c / 30.0)       ->         S[i, j] = scaled_tanh(S[i, j], c / 30.0, 30.0)
    T.reduce_max(S, top, dim=1, clear=False)                     T.reduce_max(S, top, dim=1, clear=False)
    for i, j in T.Parallel(128, 128):                            for i, j in T.Parallel(128, 128):
        S[i, j] = T.exp2((S[i, j] - top[i]) * log2e)                 S[i, j] = T.exp2((S[i, j] - top[i]) * log2e)

An error d of x changes exp(x) by a factor exp(d), however small x is.  So tanh needs no relative precision there.  For every
place of the program, the pass finds a demand on each fragment and local value: by how much later exponents may grow with an
error of it (its weight), backwards from the exponentials.  It passes through sums, extrema, selections, copies, reductions by
max and min, and multiplications by constants; sums of two values cost a quarter more, so that a value that adds up over the
iterations of a loop gets no bound.  A sum with a logarithm counts as an exponent.  Any other use demands all digits.

tanh takes the form if its weight is at most MOST_WEIGHT, and the program rounds an exponential that it goes into to 16 or 8
bits (not behind a subtraction, which may cancel).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from tilelang.ir import (FRAGMENT, LOCAL, VARIABLE, AddressOf, Alloc, Bind, Binary, Break, Call, Cast, Const, Continue, Expr,
                         For, Func, If, Launch, Load, Parallel, Region, Select, Seq, Stmt, Store, TileOp, Unary, Var, const,
                         dtype, rebuild, replace, walk)
from tilelang.ops.copy import Copy
from tilelang.ops.reduce import Reduce
from tilelang.target.rounded_functions import ALLOWED, MOST_WEIGHT, SCALED_TANH, without_factors

from ..analysis.liveness import filled
from ..framework.pass_ import TILE, PassConfigKey, PassContext, pass_

F32 = dtype("float32")
EXPONENTS = {"exp": 1.0, "exp2": math.log(2.0), "exp10": math.log(10.0), "sigmoid": 1.0}  # natural exponent per unit
LOGARITHMS = {"log", "log2", "log10"}
SUM = 1.25  # cost of a sum, which makes weights of values that add up in loops grow beyond any bound
PRIVATE = (FRAGMENT, LOCAL, VARIABLE)


class Demand(NamedTuple):
    """What uses of a value need.  weight: by how much an exponent grows with it; infinite where all digits count.  rounded:
    whether a result that depends on it is rounded to 16 or 8 bits."""

    weight: float = 0.0
    rounded: bool = False

    def times(self, factor: float) -> Demand:
        weight = self.weight * factor if self.weight else 0.0
        return Demand(weight if weight <= 2.0**20 else math.inf, self.rounded)


ALL = Demand(math.inf)


@pass_(needs=TILE)
def shorten_exponents(func: Func, cx: PassContext) -> Func:
    """Replace tanh by its form with an absolute bound where its uses allow.

    Keeps exponents within MOST_WEIGHT times that bound.  Off with tl.shorten_rounded=False and with fast math.
    """
    if not cx.option(PassConfigKey.TL_SHORTEN_ROUNDED) or cx.option(PassConfigKey.TL_ENABLE_FAST_MATH):
        return func
    calls = {x.op for x in walk(func.body, Call)}
    if "tanh" not in calls or not calls & EXPONENTS.keys() or any(True for _ in walk(func.body, Break, Continue)):
        return func
    return replace(func, body=_Demands().before(func.body))


class _Demands:
    """A walk from the end of a program to its start.  of: demands of the buffers (by storage) and variables that are used
    behind the place of the walk.  filled: storages that the loop at hand stores as a whole."""

    def __init__(self) -> None:
        self.of: dict[Var, Demand] = {}
        self.filled: set[Var] = set()

    def join(self, key: Var, d: Demand) -> None:
        old = self.of.get(key, Demand())
        self.of[key] = Demand(max(old.weight, d.weight), old.rounded or d.rounded)

    def before(self, s: Any) -> Any:
        """The statement in its new form; the demands become those in front of it."""
        match s:
            case Seq():
                last_first = [self.before(x) for x in reversed(s.stmts)]
                return replace(s, stmts=tuple(reversed(last_first)))
            case Store():
                return self.store(s)
            case Bind():
                return replace(s, value=self.value(s.value, self.of.pop(s.var, Demand())))
            case If():
                after = dict(self.of)
                then = self.before(s.then)
                self.of, kept = after, self.of
                orelse = self.before(s.orelse) if s.orelse is not None else None
                for key, d in kept.items():
                    self.join(key, d)
                self.value(s.cond, ALL)
                return replace(s, then=then, orelse=orelse)
            case For():
                return replace(s, body=self.repeated(s.body))
            case Parallel():
                outer, self.filled = self.filled, filled(s)
                body = self.before(s.body)
                self.filled = outer
                return replace(s, body=body)
            case Launch():
                return replace(s, body=self.before(s.body))
            case Alloc():
                self.of.pop(s.buffer.data, None)
                return s
            case TileOp():
                self.tile_op(s)
                return s
        for x in walk(s, Load, AddressOf, Region):
            self.join(x.buffer.data, ALL)
        return s

    def repeated(self, body: Stmt) -> Stmt:
        """The body of a loop: what its next iteration uses is used behind it."""
        while True:
            start = dict(self.of)
            out = self.before(body)
            for key, d in start.items():
                self.join(key, d)
            if self.of == start:
                return out  # type: ignore[no-any-return]

    def store(self, s: Store) -> Stmt:
        for i in s.indices:
            self.value(i, ALL)
        b = s.buffer
        private = b.scope_name in PRIVATE and b.dtype == F32
        rounds = b.dtype.base in ALLOWED
        d = self.of.get(b.data, Demand()) if private else Demand(math.inf, rounds)
        if b.data in self.filled:
            self.of.pop(b.data, None)
        return replace(s, value=self.value(s.value, d))

    def tile_op(self, s: TileOp) -> None:
        accesses = s.accesses()  # type: ignore[attr-defined]
        out = Demand()
        for a in accesses:
            data = a.region.buffer.data
            if a.writes:
                private = a.region.buffer.scope_name in PRIVATE and a.region.dtype == F32
                out = self.of.get(data, Demand()) if private else Demand(math.inf, a.region.dtype.base in ALLOWED)
                if a.mode == "write" and tuple(a.region.extents) == tuple(a.region.buffer.shape):
                    self.of.pop(data, None)
        passes = isinstance(s, Copy) or isinstance(s, Reduce) and s.kind in ("max", "min")
        for a in accesses:
            if a.reads and not (passes and a.writes):
                same = passes and a.region.dtype == F32 and out.weight < math.inf
                self.join(a.region.buffer.data, out if same else Demand(math.inf, out.rounded))
        for x in walk(s, Load):
            self.join(x.buffer.data, ALL)

    def value(self, e: Any, d: Demand) -> Any:
        """An expression whose result has a demand, in its new form; its operands get their demands."""
        match e:
            case Load():
                self.join(e.buffer.data, d)
                return rebuild(e, lambda i: self.value(i, ALL) if isinstance(i, Expr) else i)
            case AddressOf() | Region():
                self.join(e.buffer.data, ALL)
                return e
            case Var():
                self.join(e, d)
                return e
            case Cast():
                all_digits = Demand(math.inf, d.rounded or e.dtype.base in ALLOWED)
                return replace(e, value=self.value(e.value, d if e.dtype == e.value.dtype else all_digits))
            case (Call() | Binary()) if e.dtype == F32 and (tanh := self.scaled_tanh(e, d)) is not None:
                return tanh
            case Binary() if e.dtype == F32 and e.op in ("add", "sub", "mul", "div", "min", "max"):
                return self.binary(e, d)
            case Unary() if e.op == "neg":
                return replace(e, a=self.value(e.a, d))
            case Select():
                return replace(e, cond=self.value(e.cond, ALL), a=self.value(e.a, d), b=self.value(e.b, d))
            case Binary() if (found := _threshold(e)) is not None:
                return replace(e, **{found: self.value(getattr(e, found), Demand(1.0, d.rounded))})
            case Call() if e.op in EXPONENTS and e.dtype == F32:
                bounded = d.weight if e.op == "sigmoid" else math.inf  # an absolute error of exp grows with its result
                down = Demand(EXPONENTS[e.op] if d.weight == math.inf else (d.weight and bounded), d.rounded)
            case Call() if e.op == "tanh" and e.dtype == F32:  # its slope is at most one
                down = d
            case Expr():
                down = Demand(math.inf, d.rounded)
            case _:
                return e
        return rebuild(e, lambda x: tuple(self.value(y, down) for y in x) if isinstance(x, tuple) else self.value(x, down))

    def binary(self, e: Binary, d: Demand) -> Expr:
        left, right = _constant(e.a), _constant(e.b)
        if e.op == "mul" and right is None and left is not None:
            return replace(e, b=self.value(e.b, d.times(abs(left))))  # type: ignore[no-any-return]
        if e.op in ("mul", "div") and right:
            return replace(e, a=self.value(e.a, d.times(abs(right) if e.op == "mul" else 1 / abs(right))))
        sides = []
        for x, other in ((e.a, e.b), (e.b, e.a)):
            if e.op in ("min", "max"):
                down = d
            elif e.op in ("add", "sub"):
                down = Demand(1.0, d.rounded) if d.weight == math.inf and _logarithm(other) else d
                down = down if isinstance(other, Const) else down.times(SUM)
                if down.weight == math.inf and (e.op == "sub" or (_constant(other) or 0.0) < 0):
                    down = ALL  # what is left of a difference of exponentials may have lost digits
            else:
                down = Demand(math.inf, d.rounded)
            sides.append(self.value(x, down))
        return replace(e, a=sides[0], b=sides[1])

    def scaled_tanh(self, e: Expr, d: Demand) -> Expr | None:
        """c * tanh(x * k) in its form, if e is that and the demand allows it."""
        by: float | None = 1.0
        call = e
        if isinstance(e, Binary) and e.op == "mul":
            by, call = (_constant(e.a), e.b) if _constant(e.a) is not None else (_constant(e.b), e.a)
        if by is None or not isinstance(call, Call) or call.op != "tanh" or not d.rounded or \
                not 0 < d.weight * abs(by) <= MOST_WEIGHT:
            return None
        x, k = without_factors(call.args[0])
        x = self.value(x, d.times(abs(by) * abs(k)))
        return Call(SCALED_TANH, (x, const(k, F32), const(by, F32)), F32, span=call.span)


def _constant(e: Expr) -> float | None:
    return float(e.value) if isinstance(e, Const) and math.isfinite(e.value) else None


def _logarithm(e: Expr) -> bool:
    """Whether a value is a logarithm, or a multiple of one."""
    if isinstance(e, Binary) and e.op == "mul":
        return any(_constant(c) is not None and _logarithm(x) for c, x in ((e.a, e.b), (e.b, e.a)))
    return isinstance(e, Call) and e.op in LOGARITHMS


def _threshold(e: Binary) -> str | None:
    """The side of a comparison that is a difference, or a multiple of one, if the other side is a constant from 1 on: float32
    differences have no relative precision either."""
    if e.op not in ("lt", "le", "gt", "ge") or e.a.dtype != F32:
        return None
    for side, x, c in (("a", e.a, e.b), ("b", e.b, e.a)):
        if isinstance(x, Binary) and x.op == "mul" and (_constant(x.a) is not None or _constant(x.b) is not None):
            x = x.a if _constant(x.b) is not None else x.b
        limit = _constant(c)
        if limit is not None and abs(limit) >= 1 and isinstance(x, Binary) and x.op == "sub":
            return side
    return None
