"""What an element of a tensor is: scalar expressions over axes, and the tensors that a kernel has to compute.

    Axis    an index variable with an extent
    Scalar  const | axis | read(tensor, index expressions) | an operation of the operator graph on scalars
    Tensor  an input (no body), a map (body over its axes), or a reduction of body over the axes `over`

Maps disappear when they are read: expand.py substitutes indices, so that what is left are inputs, reductions and outputs.
Index expressions are kept in a linear normal form, which is how a tile of a tensor is recognised.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, KeysView, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from operator import is_
from typing import Any, TypeVar

from tilelang.ir import Span

from .graph import Dim, Size

Element = TypeVar("Element")
FREE = ("axis", "const", "read", "cast")  # what costs no operation of its own
HEAVY = ("exp", "exp2", "log", "log2", "log1p", "expm1", "sqrt", "rsqrt", "sin", "cos", "tan", "tanh", "erf", "sigmoid", "pow",
         "div", "atan2")  # what costs several


@dataclass(frozen=True, eq=False)
class Axis:
    """An index variable that counts 0 .. extent - 1.  Compared by identity."""

    name: str
    extent: Size

    def __repr__(self) -> str:
        return f"{self.name}<{self.extent}>"


@dataclass(frozen=True, eq=False)
class Tensor:
    """A tensor by its elements.  Compared by identity.

    axes: of the result.  body: the element, or None for an input; of a reduction what is combined over the axes `over`.
    kind: "map", "input", "sum", "max", "min", "prod", "any", "all", or an operation that is not a reduction of elements
    ("argmax", "argmin", "scan sum", "order", "loop", ...), which `attrs` describes.
    """

    name: str
    axes: tuple[Axis, ...]
    dtype: str
    kind: str = "map"
    body: Scalar | None = None
    over: tuple[Axis, ...] = ()
    attrs: Mapping[str, Any] = field(default_factory=dict)
    span: Span | None = None

    @property
    def shape(self) -> tuple[Size, ...]:
        return tuple(a.extent for a in self.axes)

    def __repr__(self) -> str:
        over = f" over {', '.join(map(str, self.over))}" if self.over else ""
        return f"{self.name}[{', '.join(map(str, self.axes))}] = {self.kind}{over}: {self.body}"


def _joined(sets: Iterable[KeysView[Element]]) -> KeysView[Element]:
    """The elements of all sets, each once, in their order: what is written of one expression is the same in each process."""
    some = [s for s in sets if s]
    return some[0] if len(some) == 1 else dict.fromkeys([x for s in some for x in s]).keys()


@dataclass(frozen=True, eq=False)
class Scalar:
    """An expression of one element.  Equal by structure; the hash is computed once.

    value: the number of a const, the Axis of an axis, the Tensor of a read.
    """

    op: str
    args: tuple[Scalar, ...] = ()
    dtype: str = "int32"
    value: Any = None
    _hash: int = field(init=False, default=0, repr=False)

    def __post_init__(self) -> None:
        number = (self.value, type(self.value)) if self.op == "const" else self.value
        object.__setattr__(self, "_hash", hash((self.op, self.dtype, number, tuple(a._hash for a in self.args))))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Scalar) or self._hash != other._hash:
            return False
        return (self.op, self.dtype, repr(self.value) if self.op == "const" else self.value, self.args) == (
            other.op, other.dtype, repr(other.value) if other.op == "const" else other.value, other.args)

    @cached_property
    def axes(self) -> KeysView[Axis]:
        """The axes that the expression depends on."""
        return {self.value: None}.keys() if self.op == "axis" else _joined(a.axes for a in self.args)

    @property
    def reads(self) -> KeysView[Scalar]:
        """The reads of tensors in it, those inside of indices too."""
        return dict.fromkeys((*self._inner_reads, self)).keys() if self.op == "read" else self._inner_reads

    @cached_property
    def _inner_reads(self) -> KeysView[Scalar]:
        return _joined(a.reads for a in self.args)

    def __repr__(self) -> str:
        if self.op == "const":
            return str(self.value)
        if self.op == "axis":
            return str(self.value.name)
        if self.op == "read":
            return f"{self.value.name}[{', '.join(map(repr, self.args))}]"
        return f"{self.op if self.op != 'cast' else self.dtype}({', '.join(map(repr, self.args))})"


def const(value: Any, dtype: str = "int32") -> Scalar:
    """A constant."""
    return Scalar("const", (), dtype, value)


def axis(a: Axis) -> Scalar:
    """The index along an axis."""
    return Scalar("axis", (), "int32", a)


def read(t: Tensor, indices: tuple[Scalar, ...] | None = None) -> Scalar:
    """An element of a tensor; without indices at its own axes."""
    return Scalar("read", tuple(map(axis, t.axes)) if indices is None else indices, t.dtype, t)


def call(op: str, *args: Scalar, dtype: str | None = None) -> Scalar:
    """An operation; sums and multiples of integers in normal form."""
    kind = dtype or args[0].dtype
    if op in ("add", "sub", "mul") and is_integer(kind) and all(is_index(a) for a in args):
        a, b = args
        if op != "mul":
            return plus(a, b if op == "add" else times(b, -1))
        if (n := number(b)) is not None or (n := number(a)) is not None:
            return times(a if number(b) is not None else b, n)
    return Scalar(op, args, kind)


def is_integer(dtype: str) -> bool:
    """Whether a type is one of integers."""
    return dtype.startswith(("int", "uint"))


def is_index(e: Scalar) -> bool:
    """Whether an expression has the type of indices."""
    return e.dtype == "int32"


def number(e: Scalar) -> Size | None:
    """The value of an integer constant."""
    return e.value if e.op == "const" and not isinstance(e.value, (float, bool)) else None


def walk(e: Scalar) -> Iterator[Scalar]:
    """Each distinct sub-expression once, operands first."""
    seen: set[Scalar] = set()
    waiting = [(e, False)]
    while waiting:
        x, operands_done = waiting.pop()
        if operands_done:
            yield x
        elif x not in seen:
            seen.add(x)
            waiting += [(x, True), *[(a, False) for a in reversed(x.args)]]


def rewrite(e: Scalar, change: Callable[[Scalar], Scalar | None], done: dict[Scalar, Scalar] | None = None) -> Scalar:
    """The expression with change(x) in place of every x for which it is not None; operands are rewritten otherwise."""
    done = {} if done is None else done
    if e in done:
        return done[e]
    new = change(e)
    if new is None:
        args = tuple([rewrite(a, change, done) for a in e.args])
        new = e if all(map(is_, args, e.args)) else remade(e, args)
    done[e] = new
    return new


def remade(e: Scalar, args: tuple[Scalar, ...]) -> Scalar:
    """The same operation on other operands."""
    n = number(args[1]) if e.op in ("floordiv", "mod") and is_index(e) and not args[0].reads else None
    if isinstance(n, int) and n > 0:
        return split(args[0], n)[e.op == "mod"]
    return call(e.op, *args, dtype=e.dtype) if e.op in ("add", "sub", "mul") else Scalar(e.op, args, e.dtype, e.value)


def at(e: Scalar, places: Mapping[Axis, Scalar]) -> Scalar:
    """The expression with index expressions in place of axes."""
    if not places or e.axes.isdisjoint(places):
        return e
    return rewrite(e, lambda x: places.get(x.value) if x.op == "axis" else x if x.axes.isdisjoint(places) else None)


def conjuncts(e: Scalar) -> list[Scalar]:
    """The conditions that hold together where one holds."""
    return [x for a in e.args for x in conjuncts(a)] if e.op == "and" else [e]


def reached(roots: Iterable[Element], below: Callable[[Element], Iterable[Element]]) -> dict[Element, None]:
    """The roots, and all that stands below them, each once."""
    out = dict.fromkeys(roots)
    waiting = list(out)
    while waiting:
        new = [x for x in below(waiting.pop()) if x not in out]
        out |= dict.fromkeys(new)
        waiting += new
    return out


# ---- index arithmetic -------------------------------------------------------------------------------------------------


def linear(e: Scalar) -> tuple[dict[Scalar, Size], Size]:
    """(atoms with their factors, constant): e = sum of atom * factor + constant."""
    if (n := number(e)) is not None:
        return {}, n
    if e.op == "add" and is_index(e):
        (a, x), (b, y) = linear(e.args[0]), linear(e.args[1])
        out = dict(a)
        for atom, factor in b.items():
            total = out.get(atom, 0) + factor
            if isinstance(total, int) and total == 0:
                del out[atom]
            else:
                out[atom] = total
        return _together(out, x + y)
    if e.op == "mul" and is_index(e) and (n := number(e.args[1])) is not None:
        terms, c = linear(e.args[0])
        return {atom: f * n for atom, f in terms.items()}, c * n
    return {e: 1}, 0


def _together(terms: dict[Scalar, Size], c: Size) -> tuple[dict[Scalar, Size], Size]:
    """The linear form with e in place of e // n * n + e % n."""
    for low, f in terms.items():
        whole = Scalar("floordiv", low.args) if low.op == "mod" else low
        if low.op == "mod" and terms.get(whole) == f * low.args[1].value:
            rest = {a: g for a, g in terms.items() if a not in (low, whole)}
            return linear(plus(times(low.args[0], f), summed(rest, c)))
    return terms, c


def summed(terms: Mapping[Scalar, Size], constant: Size = 0) -> Scalar:
    """The expression of a linear form."""
    out: Scalar | None = None
    for atom, factor in terms.items():
        one = atom if isinstance(factor, int) and factor == 1 else Scalar("mul", (atom, const(factor)))
        out = one if out is None else Scalar("add", (out, one))
    if out is None:
        return const(constant)
    return out if isinstance(constant, int) and constant == 0 else Scalar("add", (out, const(constant)))


def plus(a: Scalar, b: Scalar | Size) -> Scalar:
    """a + b in normal form."""
    return summed(*linear(Scalar("add", (a, b if isinstance(b, Scalar) else const(b)))))


def times(a: Scalar, n: Size) -> Scalar:
    """a * n in normal form."""
    return const(0) if isinstance(n, int) and n == 0 else summed(*linear(Scalar("mul", (a, const(n)))))


def bounds(e: Scalar) -> tuple[int, int] | None:
    """The least and greatest value, where they are known numbers."""
    if (n := number(e)) is not None:
        return None if isinstance(n, Dim) else (n, n)
    if e.op == "axis":
        return None if isinstance(e.value.extent, Dim) else (0, max(0, e.value.extent - 1))
    if e.op == "mod" and isinstance(number(e.args[1]), int):
        return 0, e.args[1].value - 1
    if e.op == "floordiv" and isinstance(number(e.args[1]), int) and (b := bounds(e.args[0])):
        return b[0] // e.args[1].value, b[1] // e.args[1].value
    if e.op in ("add", "mul"):
        terms, c = linear(e)
        low, high = c, c
        for atom, f in terms.items():
            b = bounds(atom) if atom is not e else None
            if b is None or isinstance(f, Dim) or isinstance(low, Dim) or isinstance(high, Dim):
                return None
            low, high = low + min(b[0] * f, b[1] * f), high + max(b[0] * f, b[1] * f)
        return None if isinstance(low, Dim) or isinstance(high, Dim) else (low, high)
    return None


def _below(e: Scalar, n: Size) -> bool:
    """Whether 0 <= e < n is certain."""
    if e.op == "axis" and e.value.extent == n or number(e) == 0:
        return True
    b = bounds(e)
    return b is not None and isinstance(n, int) and b[0] >= 0 and b[1] < n


def split(e: Scalar, n: Size) -> tuple[Scalar, Scalar]:
    """(e // n, e % n) for e >= 0, n > 0."""
    if isinstance(n, int) and n == 1:
        return e, const(0)
    terms, c = linear(e)
    whole: dict[Scalar, Size] = {}
    rest: dict[Scalar, Size] = {}
    for atom, f in terms.items():
        q: Size = 0 if isinstance(n, Dim) and not isinstance(f, Dim) else f // n  # type: ignore[operator]
        if not isinstance(n, Dim) and not isinstance(f, Dim) and f % n or q * n != f:
            rest[atom] = f
        else:
            whole[atom] = q
    over, left = (c // n, c % n) if isinstance(c, int) and isinstance(n, int) else (0, c)
    remainder = summed(rest, left)
    if _below(remainder, n):
        return summed(whole, over), remainder
    inner = number(remainder.args[1]) if remainder.op in ("mod", "floordiv") else None
    if isinstance(inner, int) and isinstance(n, int):
        if remainder.op == "mod" and inner % n == 0:
            return plus(summed(whole, over), Scalar("floordiv", (remainder, const(n)))), split(remainder.args[0], n)[1]
        if remainder.op == "floordiv":
            return plus(summed(whole, over), split(remainder.args[0], inner * n)[0]), Scalar("mod", (remainder, const(n)))
    quotient = Scalar("floordiv", (remainder, const(n)))
    return plus(summed(whole, over), quotient), Scalar("mod", (remainder, const(n)))
