"""Algebra of reductions: what may leave a sum, and how a partial result follows when another reduction of the same loop moves.

One rule makes every streaming reduction.  Let R = sum over k: f(k, J) where J is a reduction over the same k.  Where the part
of f that depends on J

  * is a factor b(J) that does not depend on k, it leaves the sum:    R = b(J) * sum f'(k)
  * stands in an exponent, f = exp(a(k) + b(J)) * g(k), a partial sum for the old J becomes one for the new J by the factor
        exp(b(new) - b(old))
so that one pass computes both.  Otherwise R takes another pass over k.  Nothing here knows what the sums are used for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from math import inf, isclose, isinf, isnan, nan

from tilelang import ir

from .expr import Axis, Scalar, Tensor, bounds, const, linear, plus, reached, read, rewrite, times, walk
from .graph import Size

LOG2E = 1.4426950408889634
LARGE = 500.0  # constants in exponents from which a rounding error of their size would be felt
GREATEST = 3.4028235e38  # of float32
EXPONENTIALS = ("exp", "exp2")
NEUTRAL = {"sum": 0.0, "prod": 1.0, "max": -inf, "min": inf}
NARROW = ("float16", "bfloat16")
WIDE = ("float32", "float64")


def is_float(dtype: str) -> bool:
    """Whether a type is one of floating point numbers."""
    return dtype.startswith(("float", "bfloat"))


def value(e: Scalar) -> float | None:
    """The number of a floating constant."""
    return float(e.value) if e.op == "const" and is_float(e.dtype) and isinstance(e.value, (int, float)) else None


def neutral(kind: str, dtype: str) -> Scalar:
    """What a reduction, a scan or an index of extremes starts from; for infinities of integers the greatest or least."""
    x = NEUTRAL[kind.removeprefix("scan ").removeprefix("arg")]
    if is_float(dtype) or abs(x) != inf:
        return const(x if is_float(dtype) else int(x), dtype)
    least, greatest = ir.int_range(ir.dtype(dtype))
    return const(greatest if x > 0 else least, dtype)


# ---- normal form ------------------------------------------------------------------------------------------------------


def normal(e: Scalar) -> Scalar:
    """The expression with constants folded: factors stand to the right, outside of selections, divisors are factors.

    Values of 16 bits between reads and conversions are kept in float32, and have that type here.
    """
    done: dict[Scalar, Scalar] = {}

    def visit(x: Scalar) -> Scalar:
        if x not in done:
            args = tuple(visit(a) for a in x.args)
            dtype = "float32" if x.dtype in NARROW and x.op not in ("read", "cast") else x.dtype
            same = dtype == x.dtype and all(a is b for a, b in zip(args, x.args))
            done[x] = _fold(x if same else Scalar(x.op, args, dtype, x.value))
        return done[x]

    out = visit(e)
    visit = None  # type: ignore[assignment]  # it names itself, and would keep `done` until the garbage collector runs
    return out


def _fold(e: Scalar) -> Scalar:
    rule = _RULES.get(e.op)
    return rule(e) or e if rule and is_float(e.dtype) else e


def _constant_factor(e: Scalar) -> Scalar | None:
    a, b = e.args
    if (x := value(a)) is not None:
        if (y := value(b)) is not None:
            return const(x * y, e.dtype)
        return _fold(Scalar("mul", (b, a), e.dtype))
    if (y := value(b)) is None:
        return None
    inner, x = scaled(a)
    if inner is a or beyond(x * y):  # 0 times an infinite factor would be NaN
        return None if x * y != 1 else inner
    return inner if x * y == 1 else Scalar("mul", (inner, const(x * y, e.dtype)), e.dtype)


def _quotient(e: Scalar) -> Scalar | None:
    x, y = map(value, e.args)
    if x is not None and y == 0:  # Python would raise an error where the text is run
        return const(nan if x == 0 or isnan(x) else x * inf * (-1 if str(y).startswith("-") else 1), e.dtype)
    return None if not y or isinf(y) else _fold(Scalar("mul", (e.args[0], const(1 / y, e.dtype)), e.dtype))


def _selection(e: Scalar) -> Scalar | None:
    """where(c, x * k, number) = where(c, x, number / k) * k: so that factors reach the reduction.  Numbers stand last."""
    c, a, b = e.args
    inner, k = scaled(a)
    swapped = a.op == "const" != b.op
    test = condition(c, not swapped)
    if test is not None and test != c:
        return _fold(Scalar("where", (test, b, a) if swapped else (test, a, b), e.dtype))
    other = value(b)
    if k <= 0 or k == 1 or other is None or beyond(other / k):
        return None
    return Scalar("mul", (Scalar("where", (c, inner, const(other / k, b.dtype)), e.dtype), const(k, e.dtype)), e.dtype)


_FALSE = {"lt": "ge", "le": "gt", "gt": "le", "ge": "lt", "eq": "ne", "ne": "eq", "and": "or", "or": "and"}


def condition(c: Scalar, holds: bool = True) -> Scalar | None:
    """A condition, or what is true where it does not hold, of comparisons of integers; None where it has others."""
    if c.op == "not":
        return condition(c.args[0], not holds)
    if c.op in ("and", "or"):
        a, b = (condition(x, holds) for x in c.args)
        if a is None or b is None:
            return c if holds else None
        op = c.op if holds else _FALSE[c.op]
        order = next((x for x in (a, b) if x.op in ("lt", "gt")), a)
        if op == "or" and {a.op, b.op} == {order.op, "eq"} and _difference(a) in (_difference(b), _difference(b, -1)):
            return Scalar("le" if order.op == "lt" else "ge", order.args, "bool")
        return Scalar(op, (a, b), "bool")
    if c.op not in _FALSE or c.args[0].dtype != "int32":
        return c if holds else None
    op, (x, y) = c.op if holds else _FALSE[c.op], c.args
    if op in ("lt", "le") and x.op == "abs":
        inner, other = x.args[0], "gt" if op == "lt" else "ge"
        return Scalar("and", (Scalar(op, (inner, y), "bool"), Scalar(other, (inner, times(y, -1)), "bool")), "bool")
    return Scalar(op, c.args, "bool")


def _difference(c: Scalar, sign: int = 1) -> tuple[dict[Scalar, Size], Size]:
    return linear(times(plus(c.args[0], times(c.args[1], -1)), sign))


def _sum(e: Scalar) -> Scalar | None:
    a, b = e.args
    if value(a) == 0 and e.op == "add":
        return b
    return a if value(b) == 0 else None


def _widened(e: Scalar) -> Scalar | None:
    """A conversion of a 16-bit value, which is kept in float32 anyway, or of a distance of indices."""
    a = e.args[0]
    if e.dtype == "float32" and a.dtype == "int32":
        return _of_indices(a)
    if e.dtype != "float32" or not is_float(a.dtype) or a.dtype == "float64":
        return None
    return const(a.value, e.dtype) if a.op == "const" else a


def _of_indices(e: Scalar) -> Scalar | None:
    """Magnitudes and bounds of indices as those of their conversions, of which a GPU has instructions."""
    def converted(x: Scalar) -> Scalar:
        known = x.op == "const" and isinstance(x.value, int)
        return const(float(x.value), "float32") if known else _of_indices(x) or Scalar("cast", (x,), "float32")

    if e.op == "abs" and bounds(e.args[0]) is not None or e.op in ("min", "max") and any(x.op == "abs" for x in e.args):
        return Scalar(e.op, tuple(map(converted, e.args)), "float32")
    return None


_RULES: dict[str, Callable[[Scalar], Scalar | None]] = {
    "mul": _constant_factor, "div": _quotient, "where": _selection, "add": _sum, "sub": _sum, "cast": _widened}


def beyond(x: float) -> bool:
    """Whether a finite number is infinite in float32."""
    return GREATEST < abs(x) < inf


def scaled(e: Scalar) -> tuple[Scalar, float]:
    """(x, k): e = x * k with a constant k."""
    if e.op == "mul" and (k := value(e.args[1])) is not None:
        return e.args[0], k
    return e, 1.0


def pulled(e: Scalar) -> tuple[Scalar, float]:
    """(x, k) as of `scaled`; also of sums, bounds and selections of a sum of the kernel times k, which then are one operation.

    a * k + b = (a + b / k) * k rounds otherwise, which is felt in neither a sum of many terms nor an exponent.
    """
    if e.op == "where" and (other := value(e.args[2])) is not None:
        inner, k = pulled(e.args[1])
        fits = k > 0 and not beyond(other / k)
        return (Scalar("where", (e.args[0], inner, const(other / k, e.dtype)), e.dtype), k) if fits else (e, 1.0)
    if e.op in ("min", "max") and (other := value(e.args[1])) is not None:
        inner, k = pulled(e.args[0])
        fits = k > 0 and _is_sum(inner) and not beyond(other / k)
        return (Scalar(e.op, (inner, const(other / k, e.dtype)), e.dtype), k) if fits else (e, 1.0)
    if e.op == "mul" and value(e.args[1]) is None:
        inner, k = pulled(e.args[0])
        return (Scalar("mul", (inner, e.args[1]), e.dtype), k) if k != 1 and _is_sum(inner) else (e, 1.0)
    if e.op in ("add", "sub"):
        pieces = _summands(e)
        k = next((k for s, t in pieces for x, k in (scaled(t),) if s == 1 and k > 0 and k != 1 and _is_sum(x)), 1.0)
        fits = k != 1 and not any(beyond(v / k) for y in walk(e) if (v := value(y)) is not None)
        return (signed_sum([(s, _times(t, 1 / k)) for s, t in pieces], e.dtype), k) if fits else (e, 1.0)
    return scaled(e)


def _summands(e: Scalar) -> list[tuple[int, Scalar]]:
    """What a sum adds and subtracts one after another, with signs."""
    return [*_summands(e.args[0]), (1 if e.op == "add" else -1, e.args[1])] if e.op in ("add", "sub") else [(1, e)]


def _is_sum(e: Scalar) -> bool:
    return any(r.value.kind == "sum" for r in e.reads)


def base_two(e: Scalar) -> Scalar:
    """exp(a - b) as exp2(a * log2(e) - b * log2(e)), with the factor folded into those of a and b.

    One instruction then multiplies and subtracts, and leaves a rounding error of the size of a.  Where that may
    be large, because the expression has large constants, the difference is formed first.
    """
    def change(x: Scalar) -> Scalar | None:
        if x.op != "exp" or x.dtype == "float64" or x.args[0].op not in ("add", "sub", "mul"):
            return None
        inner = base_two(x.args[0])
        large = any(LARGE <= abs(v) < inf for y in walk(inner) if (v := value(y)) is not None)
        return Scalar("exp2", (_times(common_factor(inner), LOG2E) if large else _times_log2e(inner),), x.dtype)

    return rewrite(e, change)


def _times(e: Scalar, k: float) -> Scalar:
    return _fold(Scalar("mul", (e, const(k, e.dtype)), e.dtype))


def _times_log2e(e: Scalar) -> Scalar:
    if e.op == "sub":
        inner, k = pulled(e.args[0])
        if any(r.value.body == inner for r in e.args[1].reads):  # it lies in a tile
            return Scalar("sub", (_times(inner, k * LOG2E), _times(e.args[1], LOG2E)), e.dtype)
    if e.op in ("add", "sub"):
        return Scalar(e.op, tuple(map(_times_log2e, e.args)), e.dtype)
    return _times(e, LOG2E)


def common_factor(e: Scalar) -> Scalar:
    """a * k - b * k as (a - b) * k: without rounding where a and b are equal."""
    if e.op not in ("add", "sub"):
        return e
    (a, x), (b, y) = map(scaled, e.args)
    return _times(Scalar(e.op, (a, b), e.dtype), x) if x == y != 1 else e


# ---- factors and terms ------------------------------------------------------------------------------------------------


def factors(e: Scalar) -> list[tuple[Scalar, bool]]:
    """What is multiplied, with True for a divisor."""
    if e.op == "mul":
        return factors(e.args[0]) + factors(e.args[1])
    if e.op == "div" and is_float(e.dtype):
        return factors(e.args[0]) + [(f, not below) for f, below in factors(e.args[1])]
    if e.op == "neg" and is_float(e.dtype):
        return [*factors(e.args[0]), (const(-1.0, e.dtype), False)]
    return [(e, False)]


def multiplied(pieces: list[tuple[Scalar, bool]], dtype: str) -> Scalar:
    """Factors as one expression; constants last."""
    above = sorted((f for f, below in pieces if not below), key=lambda f: f.op == "const")
    out = above[0] if above else const(1.0 if is_float(dtype) else 1, dtype)
    for f in above[1:]:
        out = Scalar("mul", (out, f), dtype)
    for f, below in pieces:
        out = Scalar("div", (out, f), dtype) if below else out
    return out


def terms(e: Scalar, sign: int = 1) -> list[tuple[int, Scalar]]:
    """Terms of a sum with their signs; a constant factor is distributed."""
    if e.op in ("add", "sub"):
        return terms(e.args[0], sign) + terms(e.args[1], sign if e.op == "add" else -sign)
    inner, k = scaled(e)
    if k != 1 and inner.op in ("add", "sub"):
        return [(s, Scalar("mul", (t, const(k, e.dtype)), e.dtype)) for s, t in terms(inner, sign)]
    return [(sign, e)]


def signed_sum(pieces: list[tuple[int, Scalar]], dtype: str) -> Scalar:
    """The sum of terms with signs."""
    out: Scalar | None = None
    for sign, t in sorted(pieces, key=lambda p: -p[0]):
        t = t if out is not None or sign > 0 else Scalar("neg", (t,), dtype)
        out = t if out is None else Scalar("add" if sign > 0 else "sub", (out, t), dtype)
    return const(0.0, dtype) if out is None else out


# ---- what leaves a reduction ------------------------------------------------------------------------------------------


def hoist(kind: str, body: Scalar, over: frozenset[Axis]) -> tuple[list[tuple[Scalar, bool]], Scalar]:
    """(factors that leave the reduction, what is left): sums lose every factor without `over`, max and min positive numbers."""
    if kind in ("max", "min"):
        inner, k = pulled(body)
        return ([(const(k, body.dtype), False)], inner) if k > 0 and k != 1 else ([], body)
    if kind != "sum" or not is_float(body.dtype):
        return [], body
    outside: list[tuple[Scalar, bool]] = []
    inside: list[tuple[Scalar, bool]] = []
    for f, below in factors(body):
        if f.axes.isdisjoint(over):
            outside.append((f, below))
        elif f.op == "cast" and not below and is_float(f.args[0].dtype):
            out, left = _hoist_rounded(f, over)
            outside += out
            inside.append((left, False))
        else:
            inside.append((f, below))
    return (outside, multiplied(inside, body.dtype)) if inside else ([], body)


def independent(body: Scalar, over: Sequence[Axis]) -> list[tuple[Scalar, tuple[Axis, ...]]]:
    """Sums, each with its axes, that multiplied are the sum of a body: of factors that share no summed axis."""
    groups: list[tuple[list[tuple[Scalar, bool]], set[Axis]]] = []
    for f in factors(body):
        mine = set(over) & set(f[0].axes)
        near = [g for g in groups if g[1] & mine]
        groups = [g for g in groups if g not in near]
        groups.append(([*(x for g in near for x in g[0]), f], mine.union(*(g[1] for g in near))))
    if any(not axes for _, axes in groups) or set().union(*(axes for _, axes in groups)) != set(over):
        return [(body, tuple(over))]
    return [(multiplied(fs, body.dtype), tuple(a for a in over if a in axes)) for fs, axes in groups]


def _hoist_rounded(f: Scalar, over: frozenset[Axis]) -> tuple[list[tuple[Scalar, bool]], Scalar]:
    """Factors leave a rounded operand where what is left stays in the range of its type."""
    outside, left = hoist("sum", f.args[0], over)
    if not outside or not (f.dtype in (*WIDE, "bfloat16") or is_bounded(left)):
        return [], f
    return outside, left if left.dtype == f.dtype and left.op == "read" else Scalar("cast", (left,), f.dtype)


def is_bounded(e: Scalar) -> bool:
    """Whether the magnitude is at most about 1, or that of a 16-bit value that is read."""
    if e.op == "read":
        return e.dtype in ("float16", "bfloat16", "bool") and e.value.kind == "input"
    if e.op in ("sigmoid", "tanh", "sin", "cos", "erf") or e.dtype == "bool":
        return True
    if e.op == "const":
        return abs(float(e.value)) <= 1
    if e.op in EXPONENTIALS:
        return _at_most_zero(e.args[0])
    if e.op in ("mul", "cast", "neg", "abs"):
        return all(map(is_bounded, e.args))
    return e.op == "where" and all(map(is_bounded, e.args[1:]))


def _at_most_zero(e: Scalar) -> bool:
    """x - max of x over an axis."""
    if e.op != "sub":
        return False
    for r in e.args[1].reads:
        t = r.value
        if t.kind == "max" and t.body is not None:
            found = rewrite(e.args[1], lambda x, r=r, t=t: t.body if x == r else None)  # type: ignore[misc]
            if _alike(_coefficients(normal(found)), _coefficients(normal(e.args[0]))):
                return True
    return False


def _coefficients(e: Scalar) -> dict[Scalar, float]:
    """Terms of a sum without their constant factors -> those factors."""
    out: dict[Scalar, float] = {}
    for sign, t in terms(e):
        inner, k = scaled(normal(t))
        out[inner] = out.get(inner, 0.0) + sign * k
    return out


def _alike(a: dict[Scalar, float], b: dict[Scalar, float]) -> bool:
    return a.keys() == b.keys() and all(isclose(x, b[e], rel_tol=1e-9) for e, x in a.items())


# ---- the streaming rule -----------------------------------------------------------------------------------------------


def rescaling(t: Tensor, moving: frozenset[Tensor], old: Mapping[Tensor, Tensor]) -> Scalar | None:
    """The factor from partial results for the old values of `moving` to ones for the new values; None: there is none.

    t: a reduction whose body reads some of `moving`, other reductions of the same loop.  old: the tensors that stand for their
    values before the present step.
    """
    assert t.body is not None
    over, exponents = frozenset(t.over), []
    if t.kind != "sum":
        return None
    for f, below in factors(t.body):
        if not depends(f, moving):
            continue
        f = f.args[0] if f.op == "cast" else f
        more = [x for x in factors(f) if depends(x[0], moving)]
        for g, divides in more:
            if g.op not in EXPONENTIALS or below:
                return None
            pieces = [(s if not divides else -s, x) for s, x in terms(g.args[0]) if depends(x, moving)]
            if any(not x.axes.isdisjoint(over) or _indirect(x, moving) for _, x in pieces):
                return None
            exponents.append((g.op, pieces, g.dtype))
    before = {r: read(old[r.value], r.args) for r in t.body.reads if r.value in moving}
    out: Scalar | None = None
    for op, pieces, dtype in exponents:
        gone = [(-s, rewrite(x, before.get)) for s, x in pieces]
        one = Scalar(op, (common_factor(signed_sum(gone + pieces, dtype)),), dtype)
        out = one if out is None else Scalar("mul", (out, one), dtype)
    return out


def _indirect(e: Scalar, moving: frozenset[Tensor]) -> bool:
    """Whether other tensors that are read depend on the moving ones: their old values are not kept."""
    return any(r.value not in moving and depends(r, moving) for r in e.reads)


def depends(e: Scalar, found: frozenset[Tensor]) -> bool:
    """Whether an expression reads one of the tensors, through other tensors of the kernel too."""
    def below(t: Tensor) -> list[Tensor]:
        plain = t in found or t.kind in ("input", "before") or t.body is None
        return [] if plain else [r.value for r in t.body.reads]  # type: ignore[union-attr]

    read_there: dict[Tensor, None] = reached([r.value for r in e.reads] if found else [], below)
    return not found.isdisjoint(read_there)


# ---- masks ------------------------------------------------------------------------------------------------------------


UNBOUNDED = ("log", "log2", "log1p", "sqrt", "rsqrt", "tan", "pow", "mod", "floordiv")  # of finite numbers: NaN, or infinite


def _finite(e: Scalar, along: Set[Axis]) -> bool:
    """Whether an expression is finite at all indices along some axes, also where a tensor has no element and reads as 0."""
    if (k := known(e, along)) is not None or e.op == "const":
        return k is None or not isinf(k)
    risky = e.op in UNBOUNDED or e.op == "div" and not e.args[1].axes.isdisjoint(along)
    return not (risky and e.axes & along) and all(_finite(a, along) for a in e.args if is_float(a.dtype))


def known(e: Scalar, along: Set[Axis]) -> float | None:
    """The number that an expression is whatever its unknown, finite pieces are; None where there is none."""
    if e.op == "const":
        return value(e)
    if e.op == "read":
        return None
    pieces = [known(a, along) if is_float(a.dtype) else None for a in e.args]
    if e.op == "cast" and is_float(e.args[0].dtype):
        return pieces[0]
    if e.op in EXPONENTIALS:
        return 0.0 if pieces[0] == -inf else None
    if e.op == "mul":
        if 0.0 in pieces:
            return 0.0 if all(_finite(a, along) for a in e.args) else None
        inner, k = scaled(e)
        return -inf if k > 0 and inner is not e and known(inner, along) == -inf else None
    if e.op in ("add", "sub") and -inf in pieces:
        first = pieces[0] == -inf
        return -inf if (first or e.op == "add") and _finite(e.args[first], along) else None
    if e.op == "div":
        return 0.0 if pieces[0] == 0.0 and e.args[1].axes.isdisjoint(along) else None
    if e.op == "where" and pieces[1] == pieces[2]:
        return pieces[1]
    return None


def conditions(e: Scalar) -> set[Scalar]:
    """Conditions of the selections in an expression, and the pieces of conjunctions."""
    return {*reached([x.args[0] for x in walk(e) if x.op == "where"], lambda c: c.args if c.op == "and" else ())}


def without(e: Scalar, condition: Scalar) -> Scalar:
    """The expression where `condition` is false."""
    def holds_not(c: Scalar) -> bool:
        return c == condition or c.op == "and" and any(map(holds_not, c.args))

    return rewrite(e, lambda x: without(x.args[2], condition) if x.op == "where" and holds_not(x.args[0]) else None)


def vanishes(kind: str, body: Scalar, condition: Scalar) -> bool:
    """Whether elements for which the condition is false leave a reduction as it is."""
    return kind in NEUTRAL and known(without(body, condition), condition.axes) == NEUTRAL[kind]

