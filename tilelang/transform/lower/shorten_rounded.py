"""Give functions whose float32 results are only rounded to 16 or 8 bits the forms with fewest instructions.

    for i, j in T.Parallel(128, 128):                for i, j in T.Parallel(128, 128):
        S[i, j] = T.sigmoid(S[i, j])          ->         S[i, j] = sigmoid_for_half(S[i, j])
    T.copy(S, P)            # float16                T.copy(S, P)

A value is only rounded if it is converted to the narrow type where it is computed, or stored to a fragment that is read by such
conversions and copies alone until it is written again.  From the rounding, the search goes down through operations that keep
relative errors: multiplication, division, negation, selections, extrema, and sums of terms that are not negative.  A division
is replaced itself if its operands have no one right value: such a function is among them, or a fragment that a GEMM or a sum
fills in an order of its own (the last division of attention).  Other quotients stay correctly rounded.  Right below the
rounding, results that the narrow type rounds to zero may be zero; further down, a form for all float32 results is taken,
because a multiplication may make a small result large.

A fragment that is summed over (T.reduce_sum) keeps its float32 functions but for exp2 and exp, whose results below 2^-126 may
then count as zero: CUDA's exp2f spends three of its four instructions on them.  exp(x - top) becomes exp2 of a multiple, two
instructions for seven: the rounding of the difference is an error of the exponent already, that of the multiple as large.

The forms are rows of target/rounded_functions.py, each with its error in units of float32.  Their sum for one value is at most
a hundredth of a unit of the narrow type, so that results stay within target.accuracy.NARROW.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import partial
from typing import Any

from tilelang.ir import (AddressOf, Binary, Break, Buffer, Call, Cast, Const, Continue, Expr, For, Func, If, Launch, Load,
                         Parallel, Region, Select, Seq, Stmt, Store, TileOp, Unary, controls, dtype, free_vars, rebuild,
                         replace, rewrite, walk, with_inner, FRAGMENT)
from tilelang.ops import Copy, Gemm, Reduce
from tilelang.target.rounded_functions import ALLOWED, FORMS, NOT_NEGATIVE

from ..analysis.effects import effects, fills_whole
from ..framework.pass_ import TILE, PassConfigKey, PassContext, pass_

F32 = dtype("float32")
Storages = frozenset[Any]
Paths = tuple[tuple[Stmt, ...], ...]  # the statements that may follow, on each path
Rows = tuple[Buffer, int] | None  # a fragment, and a dimension along which its greatest element is 1


@pass_(needs=TILE)
def shorten_rounded(func: Func, cx: PassContext) -> Func:
    """Replace functions by shorter ones where every use of the result rounds it to 16 or 8 bits.

    Keeps each rounded value within the bound of the narrow type.  Off with tl.shorten_rounded=False, and with fast math, whose
    functions are shorter still.
    """
    if not cx.option(PassConfigKey.TL_SHORTEN_ROUNDED) or cx.option(PassConfigKey.TL_ENABLE_FAST_MATH):
        return func
    if not any(x.op in FORMS for x in walk(func.body, Call, Binary)):
        return func
    summed = frozenset(r.buffer.data for r in _accumulated(func.body))
    out = rewrite(func, partial(_at_once, summed=summed), Cast, Call, Store)
    if any(True for _ in walk(out.body, Break, Continue)):
        return out
    return replace(out, body=_stored(out.body, ((),), summed))


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
            # computed from functions with an error, or from sums in an unspecified order
            if isinstance(x, Binary) and any(y.op in FORMS if isinstance(y, Call) else y.buffer.data in summed
                                             for y in walk(x, Call, Load)):
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


def _not_negative(e: Expr) -> bool:
    if isinstance(e, Const):
        return bool(e.value >= 0)
    if isinstance(e, Binary) and e.op in ("add", "mul"):
        return _not_negative(e.a) and _not_negative(e.b)
    return isinstance(e, Call) and e.op in NOT_NEGATIVE


def _stored(s: Any, after: Paths, summed: Storages, before: tuple[Stmt, ...] = ()) -> Any:
    """A statement whose stores to fragments are shortened where what follows only rounds them.  after: what follows it.
    before: statements of its sequence in front of it."""
    if isinstance(s, Seq):
        return rebuild(s, lambda stmts: tuple(
            _stored(x, tuple((*stmts[k + 1:], *path) for path in after), summed, stmts[:k]) for k, x in enumerate(stmts))
            if isinstance(stmts, tuple) else stmts)
    if isinstance(s, For):
        return with_inner(s, lambda body: _stored(body, (*after, *((body, *path) for path in after)), summed))
    if isinstance(s, If):
        return with_inner(s, lambda branch: _stored(branch, after, summed))
    if isinstance(s, Parallel):
        stores = [x for x in walk(s.body, Store) if x.buffer.scope_name == FRAGMENT and x.buffer.dtype == F32]
        for x in stores:
            if sum(y.buffer.data is x.buffer.data for y in stores) == 1 and (
                    to := _rounded_to(x, s, after, _below_one(x, before) if fills_whole(s) else None)) is not None:
                value = _shortened(x.value, to, summed)
                s = s if value is x.value else rewrite(s, partial(_with_value, of=x, value=value), Store)
        return s
    if isinstance(s, Launch):
        return with_inner(s, lambda x: _stored(x, ((),), summed))
    return s


def _with_value(s: Store, of: Store, value: Expr) -> Store | None:
    return replace(s, value=value) if s is of else None


def _below_one(x: Store, before: tuple[Stmt, ...]) -> Rows:
    """The fragment that is stored, if its elements are exp(y - the maximum of all y along a dimension)."""
    match x.value:
        case Call(op="exp", args=(Binary(op="sub", a=Load() as y, b=Load() as top),)) if y.buffer.data is x.buffer.data:
            last = next((s for s in reversed(before) if any(e.storage in (y.buffer.data, top.buffer.data)
                                                            for e in effects(s))), None)
            if isinstance(last, Reduce) and last.kind == "max" and last.clear and last.src.buffer is y.buffer and \
                    last.dst.buffer is top.buffer and top.indices == y.indices[:last.dim] + y.indices[last.dim + 1:]:
                return x.buffer, last.dim
    return None


def _divides_by(s: Stmt, by: set[Any]) -> bool:
    """Whether a loop divides each element of a fragment by the sum of the elements, and does nothing else."""
    match s:
        case Parallel(body=Store(value=Binary(op="div", a=Load() as y, b=Load() as total)) as x):
            return y.buffer is x.buffer and y.indices == x.indices and total.buffer.data in by
    return False


def _clears(s: Stmt, data: Any) -> bool:
    """Whether a loop only replaces elements of a fragment by a constant, under a condition that does not read it."""
    match s:
        case Parallel(body=Store(value=Select(a=Load() as y, b=Const())) as x):
            return x.buffer.data is data is y.buffer.data and y.indices == x.indices and not any(
                z.buffer.data is data for z in walk(x.value.cond, Load))  # type: ignore[attr-defined]
    return False


def _rounded_to(x: Store, s: Parallel, after: Paths, rows: Rows) -> dtype | None:
    """The narrow type to which all that follows a loop rounds the elements that it stores; float32 where they are summed over
    as well; None where something reads more.  rows: may be divided by their sums, which are 1 at least."""
    data, types = x.buffer.data, set[str]()
    own = {id(y) for y in walk(x.value, Load)}
    if any(y.buffer.data is data and id(y) not in own for y in walk(s.body, Load)) or not _only(x.value, x):
        return None
    for path in after:
        if _follow(path, data, types, rows, set()) is None:
            return None
    if "float32" in types:
        return F32
    if not types or "bfloat16" in types and len(types) > 1:
        return None
    return dtype(min(types, key=lambda t: ALLOWED[t]))


def _only(value: Expr, x: Store) -> bool:
    """Whether a stored value reads its own fragment only at the element that is stored."""
    return all(y.buffer.data is not x.buffer.data or y.indices == x.indices for y in walk(value, Load))


def _follow(path: tuple[Stmt, ...], data: Any, types: set[str], rows: Rows, by: set[Any]) -> bool | None:
    """Adds the types to which statements round elements of a fragment before it is written as a whole, float32 for a sum over
    them.  Whether the elements may be read behind the statements as well; None for other reads.
    by: fragments that hold the sum of the elements along that dimension, until a statement writes to them."""
    for s in path:
        if _divides_by(s, by) and s.body.buffer.data is data or _clears(s, data):  # type: ignore[attr-defined]
            continue
        if not isinstance(s, Seq):
            by -= {e.storage for e in effects(s) if e.writes}
        if isinstance(s, (Seq, If, For)):  # a loop may run not at all; its next iteration reads what the first one does
            ways = [s.stmts] if isinstance(s, Seq) else [(), (s.body,)] if isinstance(s, For) else [
                () if x is None else (x,) for x in (s.then, s.orelse)]
            whole = None if isinstance(s, For) and any(e.writes and e.storage is data for e in effects(s)) else rows
            left = [_follow(way, data, types, whole, by if isinstance(s, Seq) else {*by}) for way in ways]
            if None in left or not all(_only_rounded(e, data, types) for e in controls(s)):
                return None
            if not any(left):
                return False
        elif isinstance(s, TileOp):
            touched = [a for a in s.accesses()  # type: ignore[attr-defined]
                       if a.region.buffer.data is data]
            if isinstance(s, Reduce) and s.kind == "sum" and s.dst.dtype == F32 and s.dst.buffer.data is not data:
                types |= {"float32"} if any(a.reads for a in touched) else set()
                by |= {s.dst.buffer.data} if s.clear and s.src.is_full and (s.src.buffer, s.dim) == rows else set()
            elif any(a.reads for a in touched):
                if not isinstance(s, Copy) or s.dst.dtype.base not in ALLOWED:
                    return None
                types.add(s.dst.dtype.base)
            if any(a.mode == "write" and tuple(a.region.extents) == tuple(a.region.buffer.shape) for a in touched):
                return False
        elif not _only_rounded(s, data, types):
            return None
        if any(e.writes and e.storage is data for e in effects(s)):
            rows = None  # a sum may lack the greatest element
    return True


def _only_rounded(s: Any, data: Any, types: set[str]) -> bool:
    """Whether a statement or an expression only rounds elements of a fragment; adds to which types."""
    rounded = {id(y.value): y.dtype.base for y in walk(s, Cast) if y.dtype.base in ALLOWED}
    loads = [y for y in walk(s, Load) if y.buffer.data is data]
    types |= {rounded[id(y)] for y in loads if id(y) in rounded}
    return all(id(y) in rounded for y in loads) and not any(y.buffer.data is data for y in walk(s, AddressOf, Region))
