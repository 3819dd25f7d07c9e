"""The operator graph of a whole-tensor program: what tracing makes, what `reference` computes, what is lowered to tiles.

Nodes are values over whole tensors.  A node has one result, but for `loop` and `tile`, whose results are read by `item`.
Every operand already has the type in which the node computes: conversions are `cast` nodes of their own.

    input        ()             name: str, index: int
    constant     ()             value: bool | int | float | Dim  shape ()
    iota         ()             axis: int                        int32: the index along the axis
    UNARY        (x)            x's shape
    BINARY, COMPARE  (a, b)     shapes broadcast as in NumPy: aligned at the last axis, an extent of 1 repeats
    where        (c, a, b)      c is bool; shapes broadcast
    cast         (x)            explicit conversion to the node's dtype: rounds, also where a 16-bit value is kept wider
    broadcast    (x)            to the node's shape, by the same rule
    reduce       (x)            kind: sum max min prod any all; axes: sorted tuple; keepdims: bool; accum: dtype
                                kind argmax, argmin: int32, the least index of the extreme value along one axis
    einsum       (a, b, ...)    spec: "bhqd,bhkd->bhqk"; accum: dtype    no letter stands twice in one operand
    reshape      (x)            row-major order of elements
    transpose    (x)            perm: axis k of the result is axis perm[k] of x
    slice        (x)            starts, steps: per axis, int | Dim: element i is x[start + i * step]; a step may be negative
    concat       (a, b, ...)    axis
    pad          (x)            before, after: per axis, int; value
    gather       (x, i)         axis: shape x[:axis] + i + x[axis + 1:], element x[.., i[..], ..]
    take_along   (x, i)         axis: i has x's rank; element x with its index along the axis replaced by i[...]
    scan         (x)            kind: sum max min prod; axis; reverse: bool; accum: dtype
    order        (x)            axis; k; largest: bool                        int32: where the k best stand, best first, equal
                                values by index, NaN last; k may be the whole extent
    loop         (init.., xs.., captured..)   body: Graph; carried, scanned: counts; length.  The body's inputs are
                                the states, one element of each xs along axis 0, the captured tensors; its outputs are the new
                                states, then one element of each result.  Items: the last states, then the results along axis 0
    tile         (x, ...)       kernel: PrimFunc; results: tuple of (shape, dtype)   parameters: operands, then results
    item         (n)            index: which result of a loop or tile

Types: a value of a 16-bit float type is rounded where it is an input, an output, an operand of einsum, gather and sorts, or
an explicit cast; between them it may be kept in float32, in which its element-wise operations are computed.
max and min, element-wise and over axes, give the other operand where one is NaN.  Reductions of no element give the identity.
"""

from __future__ import annotations

import hashlib
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np

from tilelang.errors import TileLangError, error, register
from tilelang.ir import Binary, Const, Span, Var, dtype

register("program-argument", TypeError, "a program is called with an argument that its parameter does not take",
         "pass an array of the declared shape and type")
register("program-sizes", ValueError, "the sizes of a call do not fit the program",
         "the same T.dynamic symbol stands for the same number")
register("program-size", TypeError, "Python asks for the number of a size that is known at the call only",
         "declare the size as a number in T.Tensor, or use tensor operations: T.loop for loops, T.where for choices",
         expected="a size that is a number while the program is traced")

UNARY = ("neg", "abs", "sign", "exp", "exp2", "log", "log2", "log1p", "expm1", "sqrt", "rsqrt", "sin", "cos", "tan", "tanh",
         "erf", "sigmoid", "floor", "ceil", "trunc", "round", "isnan", "isinf", "isfinite", "not")  # not: bool, or bits
BINARY = ("add", "sub", "mul", "div", "floordiv", "mod", "pow", "max", "min", "atan2", "and", "or", "xor", "shl", "shr")
COMPARE = ("eq", "ne", "lt", "le", "gt", "ge")


@dataclass(frozen=True)
class Dim:
    """A size that is known at the call: an integer polynomial of named sizes, and of quotients of them.

    terms: (names in order, coefficient), sorted, no coefficient 0.  A quotient is a name that prints as "((n + 1) // 2)".
    Sizes are equal where their polynomials are; text and hash follow from the terms.
    """

    terms: tuple[tuple[tuple[str, ...], int], ...]

    @staticmethod
    def named(name: str) -> Dim:
        return Dim((((name,), 1),))

    def __add__(self, other: Size) -> Size:
        return _sized([*self.terms, *_terms(other)])

    def __mul__(self, other: Size) -> Size:
        return _sized((tuple(sorted(a + b)), x * y) for a, x in self.terms for b, y in _terms(other))

    def __sub__(self, other: Size) -> Size:
        return self + other * -1

    def __rsub__(self, other: Size) -> Size:
        return self * -1 + other

    __radd__, __rmul__ = __add__, __mul__

    def __neg__(self) -> Size:
        return self * -1

    def __floordiv__(self, other: Size) -> Size:
        quotient = self._exact(other)
        return Dim.named(f"(({self}) // ({other}))") if quotient is None else quotient

    def __rfloordiv__(self, other: int) -> Size:
        return Dim((((), other),)) // self

    def _exact(self, other: Size) -> Size | None:
        """The quotient where the divisor divides each term; None where it does not."""
        (names, by), *more = _terms(other)
        out = []
        for term, n in self.terms:
            left = Counter(term)
            left.subtract(names)
            if more or n % by or min(left.values(), default=0) < 0:
                return None
            out.append((tuple(sorted(left.elements())), n // by))
        return _sized(out)

    def __mod__(self, other: Size) -> Size:
        return self - (self // other) * other

    def at(self, sizes: Mapping[str, int]) -> int:
        """The number, given all named sizes."""
        return int(eval(compile(str(self), "<size>", "eval"), {"__builtins__": {}}, dict(sizes)))

    @property
    def names(self) -> tuple[str, ...]:
        """The named sizes, in order; those inside quotients too."""
        return tuple(sorted(set(compile(str(self), "<size>", "eval").co_names)))

    def _unknown(self, what: str) -> TileLangError:
        return error("program-size", f"{what} needs a number, found ‹the size {self}›, which is known at the call")

    def __index__(self) -> int:
        raise self._unknown("this")

    def __bool__(self) -> bool:
        raise self._unknown("a condition")

    def __lt__(self, other: Size) -> bool:
        raise self._unknown("a comparison")

    __gt__ = __le__ = __ge__ = __lt__

    def __str__(self) -> str:
        terms = sorted(self.terms, key=lambda t: t[1] < 0)
        text = ["*".join([*([str(n)] if n != 1 or not names else []), *names]) for names, n in terms]
        return " + ".join(text).replace("+ -1*", "- ").replace("+ -", "- ")

    __repr__ = __str__


Size: TypeAlias = "int | Dim"
_OPERATIONS = {"add": operator.add, "sub": operator.sub, "mul": operator.mul, "floordiv": operator.floordiv}


def _terms(x: Size) -> tuple[tuple[tuple[str, ...], int], ...]:
    return x.terms if isinstance(x, Dim) else (((), x),)


def _sized(terms: Iterable[tuple[tuple[str, ...], int]]) -> Size:
    """The sum of terms; a number where no name is left."""
    out: Counter[tuple[str, ...]] = Counter()
    for names, n in terms:
        out[names] += n
    left = {k: n for k, n in out.items() if n}
    if not left.keys() - {()}:
        return left.get((), 0)
    return Dim(tuple(sorted(left.items(), key=lambda t: (-len(t[0]), t[0]))))


def size_of(d: Any, names: Mapping[Var, Size]) -> Size:
    """A dimension of an annotation as a size.  names: what its symbols are called.  Raises program-sizes for what is none."""
    if isinstance(d, (int, Const)):
        return int(d.value) if isinstance(d, Const) else d
    if isinstance(d, Var):
        return names[d] if d in names else Dim.named(d.name)
    if isinstance(d, Binary) and d.op in _OPERATIONS:
        return _OPERATIONS[d.op](size_of(d.a, names), size_of(d.b, names))  # type: ignore[no-any-return]
    raise error("program-sizes", f"the size ‹{d}› of a parameter is no sum, multiple or quotient of symbols",
                expected="+, -, * and // of T.dynamic symbols and numbers")


def text_of(shape: Iterable[Size]) -> str:
    """A shape as a user writes it."""
    sizes = [str(s) for s in shape]
    return f"({', '.join(sizes)}{',' if len(sizes) == 1 else ''})"


def size_at(size: Size, sizes: Mapping[str, int]) -> int:
    """A size as a number."""
    return size.at(sizes) if isinstance(size, Dim) else size


def count_elements(sizes: Iterable[Size]) -> Size:
    """The number of elements of a shape."""
    out: Size = 1
    for s in sizes:
        out = out * s
    return out


_EMPTY: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, eq=False)
class Node:
    """One operation on whole tensors and its result.  Compared by identity: equal operations are one node after `shared`.

    attrs: what the table above lists for the op, immutable values.  shape: sizes.  span: the user's line.
    """

    op: str
    inputs: tuple[Node, ...]
    attrs: Mapping[str, Any] = field(default_factory=lambda: _EMPTY)
    shape: tuple[Size, ...] = ()
    dtype: dtype = dtype("float32")
    span: Span | None = None

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def on(self, inputs: tuple[Node, ...]) -> Node:
        """The same operation on other operands."""
        return self if inputs == self.inputs else replace(self, inputs=inputs)

    def __repr__(self) -> str:
        attrs = ", ".join(f"{k}={v}" for k, v in self.attrs.items() if not isinstance(v, Graph))
        return f"{self.op}({attrs}): {self.dtype}[{', '.join(map(str, self.shape))}]"


def input_node(name: str, index: int, shape: Sequence[Size], dt: dtype, span: Span | None = None) -> Node:
    """The node of a parameter."""
    return Node("input", (), MappingProxyType({"name": name, "index": index}), tuple(shape), dt, span)


@dataclass(frozen=True, eq=False)
class Graph:
    """A program: inputs in the order of its parameters, outputs in the order of its results.

    single: whether the program returns one tensor, not a tuple.  guards: sizes that a call checks not to be negative.
    """

    inputs: tuple[Node, ...]
    outputs: tuple[Node, ...]
    name: str = "program"
    single: bool = True
    guards: tuple[Dim, ...] = ()

    @cached_property
    def nodes(self) -> tuple[Node, ...]:
        """All nodes that the outputs need and all inputs, operands first."""
        out: dict[int, Node] = {id(n): n for n in self.inputs}
        for root in self.outputs:
            waiting = [(root, False)]
            while waiting:
                n, ready = waiting.pop()
                if id(n) in out:
                    continue
                if ready:
                    out[id(n)] = n
                else:
                    waiting.append((n, True))
                    waiting += [(x, False) for x in reversed(n.inputs)]
        return tuple(out.values())

    @cached_property
    def dims(self) -> tuple[str, ...]:
        """The named sizes, in the order of the inputs that have them."""
        return tuple(dict.fromkeys(name for n in self.inputs for s in n.shape if isinstance(s, Dim) for name in s.names))

    def bound(self, shapes: Sequence[Sequence[int]]) -> dict[str, int]:
        """The named sizes of a call.  Raises program-argument for shapes that do not fit, program-sizes for sizes."""
        sizes: dict[str, int] = {}

        def wrong(kind: str, n: Node, shape: Sequence[int]) -> TileLangError:
            said = "".join(f", {k} = {v}" for k, v in sizes.items()) if kind == "program-sizes" else ""
            return error(kind, f"`{self.name}` takes `{n.attrs['name']}` of the shape {text_of(n.shape)}",
                         expected=text_of(n.shape) + said, found=text_of(shape))

        for n, shape in zip(self.inputs, shapes):
            if len(shape) != n.ndim:
                raise wrong("program-argument", n, shape)
            for s, size in zip(n.shape, shape):
                names = [names for names, _ in _terms(s) if names]
                if len(names) == 1 and len(names[0]) == 1 and "(" not in names[0][0]:  # n, 2 * n, n + 3
                    by = dict(_terms(s))
                    sizes.setdefault(names[0][0], (size - by.get((), 0)) // by[names[0]])
        for d in self.dims:
            if d not in sizes:
                raise error("program-sizes", f"no argument of `{self.name}` gives the size {d}", found="no such dimension",
                            expected=f"a dimension {d}, or {d} times a number", hint=f"give a parameter a dimension {d}")
        for n, shape in zip(self.inputs, shapes):
            if tuple(size_at(s, sizes) for s in n.shape) != tuple(shape):
                raise wrong("program-sizes" if sizes else "program-argument", n, shape)
        for g in self.guards:
            if g.at(sizes) < 0:
                said = ", ".join(f"{k} = {v}" for k, v in sizes.items())
                raise error("program-sizes", f"`{self.name}` needs {g} not to be negative", expected=f"{g} >= 0",
                            found=f"{g.at(sizes)} for {said}", hint="pass larger tensors")
        return sizes

    def at(self, sizes: Mapping[str, int]) -> Graph:
        """The program with its named sizes, or some of them, as numbers."""
        def fix(value: Any) -> Any:
            if isinstance(value, Dim):
                return value.at(sizes) if sizes.keys() >= set(value.names) else value
            if isinstance(value, Graph):
                return value.at(sizes)
            return tuple(map(fix, value)) if isinstance(value, tuple) else value

        return self.map(lambda n, inputs: replace(
            n, inputs=inputs, attrs={k: fix(v) for k, v in n.attrs.items()}, shape=fix(n.shape)))

    def map(self, change: Callable[[Node, tuple[Node, ...]], Node]) -> Graph:
        """The program with change(node, its new operands) in place of each node."""
        new: dict[Node, Node] = {}
        for n in self.nodes:
            new[n] = change(n, tuple(new.get(x, x) for x in n.inputs))
        return replace(self, inputs=tuple(new[n] for n in self.inputs), outputs=tuple(new[n] for n in self.outputs))

    def shared(self) -> Graph:
        """The program with equal operations as one node."""
        made: dict[Any, Node] = {}

        def one(n: Node, inputs: tuple[Node, ...]) -> Node:
            attrs = tuple((k, v.text() if isinstance(v, Graph) else v, type(v)) for k, v in n.attrs.items())
            key = (n.op, tuple(map(id, inputs)), repr(attrs), n.shape, n.dtype)
            return made.setdefault(key, n.on(inputs))

        return self.map(one)

    def text(self) -> str:
        """The nodes, one a line, as people and caches read them."""
        names = {n: n.attrs["name"] if n.op == "input" else f"t{k}" for k, n in enumerate(self.nodes)}
        lines = [f"program {self.name}({', '.join(names[n] for n in self.inputs)})"]
        for n in self.nodes:
            attrs = [f"{k}={v.script() if k == 'kernel' else v}" for k, v in n.attrs.items() if k not in ("name", "body")]
            sizes = ", ".join(map(str, n.shape))
            lines.append(f"  {names[n]}: {n.dtype}[{sizes}] = {n.op}({', '.join([names[x] for x in n.inputs] + attrs)})")
            if "body" in n.attrs:
                lines += ["    " + line for line in n.attrs["body"].text().splitlines()]
        return "\n".join([*lines, f"  return {', '.join(names[n] for n in self.outputs)}"])

    def digest(self) -> str:
        """A key of the program: equal texts compute equal results."""
        return hashlib.sha256(self.text().encode()).hexdigest()


def arrays_among(xs: Iterable[Any]) -> list[Any]:
    """The arrays among the arguments of a call, without the numbers, to which scalars of NumPy belong."""
    return [x for x in xs if hasattr(x, "shape") and not isinstance(x, np.generic)]
