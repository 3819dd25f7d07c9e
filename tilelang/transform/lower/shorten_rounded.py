"""Give functions the forms with fewest instructions that the uses of their results allow.

    for i, j in T.Parallel(128, 128):                for i, j in T.Parallel(128, 128):
        S[i, j] = T.sigmoid(S[i, j])          ->         S[i, j] = sigmoid_for_half(S[i, j])
    T.copy(S, P)            # float16                T.copy(S, P)

A walk from the end of the program to its start finds what the uses of each fragment and local value demand of it.

Functions whose float32 results are only rounded to 16 or 8 bits: a value is only rounded if it is converted to the narrow type
where it is computed, or stored to a fragment that is read by such conversions and copies alone until it is written again.  From
the rounding, the search goes down through operations that keep relative errors: multiplication, division, negation, selections,
extrema, and sums of terms that are not negative.  A division is replaced itself if its operands have no one right value: such a
function is among them, or a fragment that a GEMM or a sum fills in an order of its own (the last division of attention).  Other
quotients stay correctly rounded.  Right below the rounding, results that the narrow type rounds to zero may be zero; further
down, a form for all float32 results is taken, because a multiplication may make a small result large.

A fragment that is summed over (T.reduce_sum) keeps its float32 functions but for exp2 and exp, whose results below 2^-126 may
then count as zero: CUDA's exp2f spends three of its four instructions on them.  exp(x - top) becomes exp2 of a multiple, two
instructions for seven: the rounding of the difference is an error of the exponent already, that of the multiple as large.

The forms are rows of target/rounded_functions.py, each with its error in units of float32.  Their sum for one value is at most
a hundredth of a unit of the narrow type, so that results stay within target.accuracy.NARROW.

tanh where only an absolute error counts, in arguments of exponentials:

    S[i, j] = 30.0 * T.tanh(S[i, j] * c / 30.0)       ->         S[i, j] = scaled_tanh(S[i, j], c / 30.0, 30.0)
    T.reduce_max(S, top, dim=1, clear=False)                     T.reduce_max(S, top, dim=1, clear=False)
    S[i, j] = T.exp2((S[i, j] - top[i]) * log2e)                 S[i, j] = T.exp2((S[i, j] - top[i]) * log2e)

An error d of x changes exp(x) by a factor exp(d), however small x is.  So tanh needs no relative precision there.  The demand
on a value says by how much later exponents may grow with an error of it (its weight).  It passes through sums, extrema,
selections, copies, reductions by max and min, and multiplications by constants; sums of two values cost a quarter more, so that
a value that adds up over the iterations of a loop gets no bound.  A sum with a logarithm counts as an exponent.  Any other use
demands all digits.  tanh takes the form if its weight is at most MOST_WEIGHT, and the program rounds an exponential that it
goes into to 16 or 8 bits (not behind a subtraction, which may cancel).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import partial
from typing import Any, NamedTuple

from tilelang.ir import (AddressOf, Alloc, Bind, Binary, Break, Call, Cast, Const, Continue, Evaluate, Expr, For, Func, If,
                         Launch, Load, Parallel, Region, Select, Seq, Stmt, Store, TileOp, Unary, Var, const, dtype, free_vars,
                         rebuild, replace, rewrite, walk, FRAGMENT, LOCAL, VARIABLE)
from tilelang.ops import Gemm
from tilelang.ops.copy import Copy
from tilelang.ops.reduce import Reduce
from tilelang.target.rounded_functions import ALLOWED, FORMS, MOST_WEIGHT, NOT_NEGATIVE, SCALED_TANH

from ..analysis.effects import effects, fills_whole
from ..framework.config import PassConfigKey
from ..framework.pass_ import TILE, PassContext, pass_

F32 = dtype("float32")
EXPONENTS = {"exp": 1.0, "exp2": math.log(2.0), "exp10": math.log(10.0), "sigmoid": 1.0}  # natural exponent per unit
LOGARITHMS = {"log", "log2", "log10"}
SUM = 1.25  # cost of a sum, which makes weights of values that add up in loops grow beyond any bound
PRIVATE = (FRAGMENT, LOCAL, VARIABLE)
Storages = frozenset[Any]
Use = tuple[Any, str]  # a condition, and the type to which elements are rounded under it: see Demand
ALL_DIGITS: frozenset[Use] = frozenset(((None, ""),))


class Demand(NamedTuple):
    """What uses of a value need.

    weight: by how much an exponent grows with it; infinite where all digits count.  rounded: whether a result that depends on
    it is rounded to 16 or 8 bits.  uses: the types to which its readers round it; float32: they add it; "": they need all
    digits.  A use of elements that are divided has a condition, and needs all digits otherwise: ("by", total), that this is
    their sum; ("rows", fragment, dim), that the greatest of those that are summed up along the dimension is 1.
    """

    weight: float = 0.0
    rounded: bool = False
    uses: frozenset[Use] = ALL_DIGITS

    def times(self, factor: float) -> Demand:
        weight = self.weight * factor if self.weight else 0.0
        return Demand(weight if weight <= 2.0**20 else math.inf, self.rounded)


ALL, NOTHING = Demand(math.inf), Demand(uses=frozenset())


@pass_(needs=TILE)
def shorten_rounded(func: Func, cx: PassContext) -> Func:
    """Replace functions by shorter ones where every use of the result rounds it to 16 or 8 bits, or is an exponent.

    Keeps each rounded value within the bound of the narrow type, and exponents within MOST_WEIGHT times the absolute bound of
    tanh.  Off with tl.shorten_rounded=False, and with fast math, whose functions are shorter still.
    """
    if not cx.option(PassConfigKey.TL_SHORTEN_ROUNDED) or cx.option(PassConfigKey.TL_ENABLE_FAST_MATH):
        return func
    if not any(x.op in FORMS for x in walk(func.body, Call, Binary)):
        return func
    summed = frozenset(r.buffer.data for r in _accumulated(func.body))
    if not any(True for _ in walk(func.body, Break, Continue)):
        func = replace(func, body=_Demands(summed).before(func.body))
    return rewrite(func, partial(_at_once, summed=summed), Cast, Call, Store)  # type: ignore[no-any-return]


class _Demands:
    """A walk from the end of a program to its start.

    of: demands of the buffers (by storage) and variables that are used behind the place of the walk.  filled: storages that
    the loop at hand stores as a whole.  front: the statements of the sequence in front of the place.  summed: storages to which
    tile operations add in an unspecified order.
    """

    def __init__(self, summed: Storages) -> None:
        self.of: dict[Var, Demand] = {}
        self.filled: list[Var] = []
        self.front: tuple[Stmt, ...] = ()
        self.summed = summed

    def join(self, key: Var, d: Demand) -> None:
        old = self.of.get(key, NOTHING)
        self.of[key] = Demand(max(old.weight, d.weight), old.rounded or d.rounded, old.uses | d.uses)

    def before(self, s: Any) -> Any:
        """The statement in its new form; the demands become those in front of it."""
        match s:
            case Seq():
                last_first = []
                for k in reversed(range(len(s.stmts))):
                    self.front = s.stmts[:k]
                    last_first.append(self.before(s.stmts[k]))
                return replace(s, stmts=tuple(reversed(last_first)))
            case Store():
                return self.store(s)
            case Bind():
                return replace(s, value=self.value(s.value, self.of.pop(s.var, NOTHING)._replace(uses=ALL_DIGITS)))
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
                out = replace(s, body=self.repeated(s.body))
                self.value((s.start, s.extent), ALL)
                return out
            case Parallel():
                return self.parallel(s)
            case Launch():
                return replace(s, body=self.before(s.body))
            case Alloc():
                self.of.pop(s.buffer.data, None)
                self.value(s.init, ALL)
                return s
            case TileOp():
                self.tile_op(s)
                return s
            case Evaluate():
                self.value(s.call, ALL)
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

    def parallel(self, s: Parallel) -> Stmt:
        behind = {x.buffer.data: self.of.get(x.buffer.data, NOTHING).uses for x in walk(s.body, Store)}
        front, total = self.front, _divides_by(s)
        self.settle({*behind})
        outer, self.filled = self.filled, _filled(s)
        out: Any = replace(s, body=self.before(s.body))
        self.filled = outer
        self.value(s.extents, ALL)
        if total is not None:  # the quotients of a row are used as its elements are
            data = s.body.buffer.data  # type: ignore[attr-defined]
            self.of[data] = self.of[data]._replace(uses=frozenset(
                (None, "") if cond is not None else (("by", total), to) for cond, to in behind[data]))
        stores = [x for x in walk(out.body, Store) if x.buffer.scope_name == FRAGMENT and x.buffer.dtype == F32]
        for x in stores:
            rows = _below_one(x, front) if fills_whole(s) else None
            to = _rounded_to({t if cond in (None, rows) else "" for cond, t in behind[x.buffer.data]})
            if to is not None and _alone(x, out):
                value = _shortened(x.value, to, self.summed)
                out = out if value is x.value else rewrite(out, partial(_with_value, of=x, value=value), Store)
        return out  # type: ignore[no-any-return]

    def settle(self, written: set[Var], op: Any = None) -> None:
        """Conditions of uses in front of a statement that writes to these storages.  op: the statement, if it is a sum."""
        for key, d in self.of.items():
            if any(cond is not None for cond, _ in d.uses):
                self.of[key] = d._replace(uses=frozenset(self.settled(key, *use, written, op) for use in d.uses))

    def settled(self, key: Var, cond: Any, to: str, written: set[Var], op: Any) -> Use:
        if cond is not None and cond[0] == "by" and cond[1] in written:
            whole = op is not None and op.clear and op.src.is_full and op.src.buffer.data is key
            return (("rows", op.src.buffer, op.dim), to) if whole else (None, "")
        return (None, "") if cond is not None and cond[0] == "rows" and key in written else (cond, to)

    def store(self, s: Store) -> Stmt:
        for i in s.indices:
            self.value(i, ALL)
        b = s.buffer
        private = b.scope_name in PRIVATE and b.dtype == F32
        rounds = b.dtype.base in ALLOWED
        d = self.of.get(b.data, NOTHING)._replace(uses=ALL_DIGITS) if private else Demand(math.inf, rounds)
        if b.data in self.filled:
            self.of.pop(b.data, None)
        return replace(s, value=self.value(s.value, d))

    def tile_op(self, s: TileOp) -> None:
        accesses = s.accesses()  # type: ignore[attr-defined]
        adds = isinstance(s, Reduce) and s.kind == "sum" and s.dst.dtype == F32 and s.dst.buffer.data is not s.src.buffer.data
        self.settle({a.region.buffer.data for a in accesses if a.writes}, s if adds else None)
        out = NOTHING
        for a in accesses:
            data = a.region.buffer.data
            if a.writes:
                private = a.region.buffer.scope_name in PRIVATE and a.region.dtype == F32
                out = self.of.get(data, NOTHING) if private else Demand(math.inf, a.region.dtype.base in ALLOWED)
                if a.mode == "write" and tuple(a.region.extents) == tuple(a.region.buffer.shape):
                    self.of.pop(data, None)
        passes = isinstance(s, Copy) or isinstance(s, Reduce) and s.kind in ("max", "min")
        narrow = isinstance(s, Copy) and s.dst.dtype.base in ALLOWED
        for a in accesses:
            if a.reads:
                same = passes and a.region.dtype == F32 and out.weight < math.inf
                d = NOTHING if passes and a.writes else out if same else Demand(math.inf, out.rounded)
                to = s.dst.dtype.base if narrow else "float32" if adds and not a.writes else ""  # type: ignore[attr-defined]
                self.join(a.region.buffer.data, d._replace(uses=frozenset(((None, to),))))
        for x in walk(s, Load):
            self.join(x.buffer.data, ALL)

    def value(self, e: Any, d: Demand) -> Any:
        """An expression whose result has a demand, in its new form; its operands get their demands."""
        match e:
            case Load():
                self.join(e.buffer.data, d)
                return rebuild(e, lambda i: self.value(i, ALL) if isinstance(i, Expr) else i)
            case AddressOf() | Region():
                for x in walk(e, Load, AddressOf, Region):
                    self.join(x.buffer.data, ALL)
                return e
            case tuple():
                return tuple(self.value(x, d) for x in e)
            case Var():
                self.join(e, d)
                return e
            case Cast():
                narrow = e.dtype.base in ALLOWED
                all_digits = Demand(math.inf, d.rounded or narrow)
                if narrow and isinstance(e.value, Load):
                    all_digits = all_digits._replace(uses=frozenset(((None, e.dtype.base),)))
                return replace(e, value=self.value(e.value, d if e.dtype == e.value.dtype else all_digits))
            case Call() if e.dtype == F32 and (tanh := self.scaled_tanh(e, d)) is not None:
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
        return rebuild(e, lambda x: self.value(x, down))

    def binary(self, e: Binary, d: Demand) -> Expr:
        factor = _constant(e.b) if e.op in ("mul", "div") else None
        if e.op == "mul" and factor is None and (factor := _constant(e.a)) is not None:
            if (tanh := self.scaled_tanh(e, d)) is not None:
                return tanh
            return replace(e, b=self.value(e.b, d.times(abs(factor))))  # type: ignore[no-any-return]
        if factor is not None and factor != 0:
            if e.op == "mul" and (tanh := self.scaled_tanh(e, d)) is not None:
                return tanh
            return replace(e, a=self.value(e.a, d.times(abs(factor) if e.op == "mul" else 1 / abs(factor))))
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
        by, call = 1.0, e
        if isinstance(e, Binary) and e.op == "mul":
            by, call = (_constant(e.a), e.b) if _constant(e.a) is not None else (_constant(e.b), e.a)  # type: ignore[assignment]
        if not isinstance(call, Call) or call.op != "tanh" or not d.rounded or not 0 < d.weight * abs(by) <= MOST_WEIGHT:
            return None
        x: Any = call.args[0]
        k = 1.0
        while isinstance(x, Binary) and x.op in ("mul", "div"):
            left, right = _constant(x.a), _constant(x.b)
            if right is not None and right != 0:
                x, k = x.a, k * right if x.op == "mul" else k / right
            elif left is not None and x.op == "mul":
                x, k = x.b, k * left
            else:
                break
        if not 2.0**-60 < abs(k) < 2.0**60:
            x, k = call.args[0], 1.0
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


def _filled(s: Parallel) -> list[Var]:
    """The storages that a loop stores as a whole, each by one statement that every iteration executes."""
    out = []
    for x in s.body.stmts if isinstance(s.body, Seq) else (s.body,):
        if isinstance(x, Store) and len(x.indices) == len(s.vars) and {*x.indices} == {*s.vars}:
            at: dict[Any, Expr] = dict(zip(s.vars, s.extents))
            if all(isinstance(n, Const) and n.value == m for n, m in zip((at[i] for i in x.indices), x.buffer.shape)):
                out.append(x.buffer.data)
    return out


def _accumulated(s: Stmt) -> Iterable[Region]:
    """Fragments to which tile operations add in an unspecified order."""
    for x in walk(s, Gemm, Reduce):
        to = x.c if isinstance(x, Gemm) else x.dst
        if to.buffer.scope_name == FRAGMENT and (isinstance(x, Gemm) or x.kind == "sum"):
            yield to


def _at_once(e: Any, summed: Storages) -> Any:
    """A conversion, or a function of a narrow type, with shorter functions below the rounding; None for other nodes."""
    if isinstance(e, Call) and "half" in FORMS.get(e.op, ()) and e.dtype.base in ALLOWED and e.dtype.lanes == 1:
        if all(a.dtype == e.dtype for a in e.args):
            return Cast(_shortened(Call(e.op, tuple(Cast(a, F32) for a in e.args), F32, span=e.span), e.dtype, summed), e.dtype)
    elif isinstance(e, Cast) and e.dtype.base in ALLOWED and e.value.dtype == F32:
        value = _shortened(e.value, e.dtype, summed)
        return None if value is e.value else replace(e, value=value)
    elif isinstance(e, Store) and e.buffer.dtype.base in ALLOWED and e.value.dtype == F32:
        value = _shortened(e.value, e.buffer.dtype, summed)
        return None if value is e.value else replace(e, value=value)
    return None


def _shortened(e: Expr, to: dtype, summed: Storages) -> Expr:
    """A float32 value that is rounded to a type next, with shorter functions as far as their errors add up to less than
    allowed.  to: float32 where it is a term of a sum too."""
    left = float(ALLOWED.get(to.base, 4))

    def visit(x: Any, direct: bool) -> Any:
        nonlocal left
        if not isinstance(x, Expr) or x.dtype != F32:
            return x
        use = "term" if to == F32 else "half" if direct and to.base != "bfloat16" else "wide"
        if isinstance(x, Binary) and x.op == "div" and use != "term" and {*free_vars(x.b)} < {*free_vars(x.a)}:
            use = "row"
        if use != "term" and (beside := _beside_constant(x)) is not None and FORMS[beside.op]["sum"].units <= left:
            short = FORMS[beside.op]["sum"]
            left -= short.units
            return rewrite(x, lambda c: Call(short.name, c.args, F32, span=c.span) if c is beside else None, Call)
        form = FORMS.get(getattr(x, "op", ""), {}).get(use)
        if use == "term" and isinstance(x, Call) and x.op == "exp" and getattr(x.args[0], "op", "") not in ("add", "sub"):
            form = None  # nothing has rounded the exponent
        if form is not None and form.units <= left:
            if isinstance(x, Call):
                left -= form.units
                return Call(form.name, x.args, F32, span=x.span)
            if isinstance(x, Binary) and _inexact(x, summed):
                left -= form.units
                return Call(form.name, (visit(x.a, False), visit(x.b, False)), F32, span=x.span)
        if isinstance(x, Select):
            a, b = visit(x.a, direct), visit(x.b, direct)
            return x if a is x.a and b is x.b else replace(x, a=a, b=b)
        if to == F32:
            return x
        keeps = isinstance(x, Unary) and x.op == "neg" or isinstance(x, Binary) and (
            x.op in ("mul", "div", "min", "max") or x.op == "add" and _not_negative(x.a) and _not_negative(x.b))
        return rebuild(x, lambda v: visit(v, direct and x.op in ("neg", "min", "max"))) if keeps else x  # type: ignore[attr-defined]

    return visit(e, True)  # type: ignore[no-any-return]


def _beside_constant(e: Expr) -> Call | None:
    """The function in c + f, c - f or c + k * f, with |c| >= |k| for its greatest value 1, if it has a form for such sums."""
    if not isinstance(e, Binary) or e.op not in ("add", "sub"):
        return None
    for c, f in ((e.a, e.b), (e.b, e.a)):
        k = 1.0
        if isinstance(f, Binary) and f.op == "mul":
            f, factor = (f.b, f.a) if isinstance(f.a, Const) else (f.a, f.b)
            k = abs(float(factor.value)) if isinstance(factor, Const) else math.inf
        if isinstance(c, Const) and isinstance(f, Call) and "sum" in FORMS.get(f.op, ()) and abs(float(c.value)) >= k:
            return f
    return None


def _inexact(e: Expr, summed: Storages) -> bool:
    """Whether a value is computed from functions with an error, or from sums in an unspecified order."""
    return any(y.op in FORMS for y in walk(e, Call)) or any(y.buffer.data in summed for y in walk(e, Load))


def _not_negative(e: Expr) -> bool:
    if isinstance(e, Const):
        return bool(e.value >= 0)
    if isinstance(e, Binary) and e.op in ("add", "mul"):
        return _not_negative(e.a) and _not_negative(e.b)
    return isinstance(e, Call) and e.op in NOT_NEGATIVE


def _with_value(s: Store, of: Store, value: Expr) -> Store | None:
    return replace(s, value=value) if s is of else None


def _below_one(x: Store, before: tuple[Stmt, ...]) -> Any:
    """("rows", the fragment, dim) if the elements that are stored are exp(y - the maximum of all y along the dimension)."""
    match x.value:
        case Call(op="exp", args=(Binary(op="sub", a=Load() as y, b=Load() as top),)) if y.buffer.data is x.buffer.data:
            last = next((s for s in reversed(before) if any(e.storage in (y.buffer.data, top.buffer.data)
                                                            for e in effects(s))), None)
            if isinstance(last, Reduce) and last.kind == "max" and last.clear and last.src.buffer is y.buffer and \
                    last.dst.buffer is top.buffer and top.indices == y.indices[:last.dim] + y.indices[last.dim + 1:]:
                return "rows", x.buffer, last.dim
    return None


def _divides_by(s: Parallel) -> Var | None:
    """The divisor of a loop that divides each element of a fragment by an element of another one, and does nothing else."""
    match s.body:
        case Store(value=Binary(op="div", a=Load() as y, b=Load() as total)) as x if y.buffer is x.buffer and (
                y.indices == x.indices):
            return total.buffer.data
    return None


def _rounded_to(types: set[str]) -> dtype | None:
    """The narrow type to which all uses round a value; float32 where it is summed over as well; None for other uses."""
    if "" in types or not types:
        return None
    if "float32" in types:
        return F32
    return None if "bfloat16" in types and len(types) > 1 else dtype(min(types, key=lambda t: ALLOWED[t]))


def _alone(x: Store, s: Parallel) -> bool:
    """Whether nothing else in a loop accesses the stored fragment, but for the element in the stored value."""
    own = {id(y) for y in walk(x.value, Load)}
    return sum(y.buffer.data is x.buffer.data for y in walk(s.body, Store)) == 1 and all(
        y.buffer.data is not x.buffer.data or id(y) in own and y.indices == x.indices for y in walk(s.body, Load))
