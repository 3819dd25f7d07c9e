"""Random whole-tensor programs while they are drawn: values, and the operations on elements and along axes.

Shapes are known as texts of named extents.  gen_whole.py has the other operations.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

EXTENTS = (2, 3, 4, 5, 7, 8, 9, 13, 16, 17, 24, 31, 32, 33, 40, 47, 64, 65, 70)
LARGE = (100, 129, 200, 257)
FLOATS = ("float16", "bfloat16", "float32")
MOST_ELEMENTS, MOST_WORK = 6000, 150_000
Program = dict[str, Any]


@dataclass(frozen=True)
class Value:
    """A tensor.  size: how great its elements may be, roughly.  lines: the text that it is used by."""

    text: str
    shape: tuple[str, ...]
    dtype: str
    size: float = 4.0

    @property
    def floating(self) -> bool:
        return self.dtype in FLOATS


class Drawn:
    """A program that is being drawn."""

    def __init__(self, seed: int) -> None:
        r = self.rng = random.Random(seed)
        self.main = r.choice(("float32", "float32", "float32", "float16", "bfloat16"))
        self.dims: dict[str, int] = {}
        edge = r.random()
        for name in "ABCD":
            self.dims[name] = r.choice(LARGE) if r.random() < 0.06 else r.choice(EXTENTS)
            if edge < 0.15 and r.random() < 0.4:
                self.dims[name] = 1
        if edge > 0.97:
            self.dims[r.choice("ABCD")] = 0
        self.dynamic = [n for n in self.dims if r.random() < 0.5] if r.random() < 0.3 else []
        self.special = r.random() < 0.06
        self.inputs: list[dict[str, Any]] = []
        self.lines: list[dict[str, Any]] = []
        self.values: list[Value] = []
        self.features: set[str] = {f"main:{self.main}"}

    # ---- what values are made of
    def extent(self, s: str) -> int:
        return int(eval(s, {}, dict(self.dims)))

    def count(self, shape: tuple[str, ...]) -> int:
        out = 1
        for s in shape:
            out *= self.extent(s)
        return out

    def fits(self, shape: tuple[str, ...]) -> bool:
        return self.count(shape) <= MOST_ELEMENTS and len(shape) <= 5

    def dim(self) -> str:
        return self.rng.choice([*self.dims])

    def input(self, shape: tuple[str, ...], dtype: str | None = None, kind: str = "normal", high: str = "") -> Value:
        """A parameter.  kind: normal, unit, whole (small integers), index (below `high`), full (bytes), bool."""
        dtype = dtype or (self.main if self.rng.random() < 0.8 else self.rng.choice(FLOATS))
        name = f"x{len(self.inputs)}"
        kind = "special" if self.special and kind == "normal" and dtype in FLOATS and self.rng.random() < 0.4 else kind
        self.inputs.append({"name": name, "shape": list(shape), "dtype": dtype, "kind": kind, "high": high})
        v = Value(name, shape, dtype, {"unit": 1.0, "whole": 5.0, "full": 200.0}.get(kind, 4.0))
        if kind not in ("index", "full"):
            self.values.append(v)
        return v

    def shape(self, low: int = 1, high: int = 4) -> tuple[str, ...]:
        for _ in range(20):
            shape = tuple(self.dim() for _ in range(self.rng.choice([n for n in (1, 2, 2, 2, 3, 3, 4) if low <= n <= high])))
            if len(set(shape)) == len(shape) and self.fits(shape):
                return shape
        return (self.dim(),) * 1 if low <= 1 else ("A", "B")

    def pick(self, test: Callable[[Value], bool] = lambda v: True, low: int = 0) -> Value:
        """A value, of the last ones by preference; an input where none fits."""
        found = [v for v in self.values if test(v) and len(v.shape) >= low]
        if found and self.rng.random() < 0.85:
            return self.rng.choice(found[-4:]) if self.rng.random() < 0.6 else self.rng.choice(found)
        v = self.input(self.shape(max(1, low)))
        return v if test(v) else self.input(self.shape(max(1, low)), "float32")

    def float(self, low: int = 0) -> Value:
        return self.pick(lambda v: v.floating, low)

    def add(self, feature: str, text: str, shape: tuple[str, ...], dtype: str, size: float = 4.0) -> Value:
        """A statement with one value."""
        return self.many(feature, text, [(shape, dtype, size)])[0]

    def many(self, feature: str, text: str, made: list[tuple[tuple[str, ...], str, float]]) -> list[Value]:
        start = sum(len(line["names"]) for line in self.lines)
        out = [Value(f"t{start + k}", shape, dtype, size) for k, (shape, dtype, size) in enumerate(made)]
        self.lines.append(
            {
                "names": [v.text for v in out],
                "text": text,
                "shapes": [list(v.shape) for v in out],
                "dtypes": [v.dtype for v in out],
            }
        )
        self.values += out
        self.features.add(feature)
        return out

    def small(self, v: Value, most: float) -> str:
        """The value, within a range."""
        if v.size <= most:
            return v.text
        return self.rng.choice((f"T.tanh({v.text})", f"({v.text} * {most / v.size:.3g})", f"T.clamp({v.text}, -1.5, 1.5)"))

    def beside(self, a: Value, test: Callable[[Value], bool]) -> Value | None:
        """A value that broadcasts with a: one that is at hand, or an input of the last extents."""
        found = [v for v in self.values if test(v) and self.joined(a.shape, v.shape) is not None]
        if found and self.rng.random() < 0.7:
            return self.rng.choice(found)
        n = self.rng.randrange(len(a.shape) + 1)
        shape = tuple(s if self.rng.random() < 0.8 else "1" for s in a.shape[len(a.shape) - n :])
        v = self.input(shape)
        return v if test(v) else None

    @staticmethod
    def joined(a: tuple[str, ...], b: tuple[str, ...]) -> tuple[str, ...] | None:
        """The shape of two that broadcast."""
        n = max(len(a), len(b))
        out = []
        for s, t in zip(("1",) * (n - len(a)) + a, ("1",) * (n - len(b)) + b):
            if s != t and "1" not in (s, t):
                return None
            out.append(s if t == "1" else t)
        return tuple(out)

    def nonempty(self, *sizes: str) -> bool:
        return all(self.extent(s) > 0 for s in sizes)

    def axis(self, v: Value) -> int:
        return self.rng.choice((len(v.shape) - 1, len(v.shape) - 1, self.rng.randrange(len(v.shape))))


def widest(*types: str) -> str:
    """The type of a result of two tensors."""
    floats = [t for t in types if t in FLOATS]
    if floats:
        return floats[0] if len(set(floats)) == 1 else "float32"
    ints = [t for t in types if t != "bool"]
    return max(ints, key=lambda t: int(t.lstrip("uint"))) if ints else "bool"


# ---- operations: each draws one or more statements, or none where nothing fits -----------------------------------------


def binary(d: Drawn) -> None:
    a = d.float()
    b = a if d.rng.random() < 0.15 else d.beside(a, lambda v: v.floating)
    if d.rng.random() < 0.25:
        c = d.rng.choice(("2", "-3", "0.5", "1", "-1.25"))
        op = d.rng.choice("+-*/")
        d.add(
            "binary:number",
            d.rng.choice((f"{a.text} {op} {c}", f"{c} - {a.text}", f"{c} * {a.text}")),
            a.shape,
            a.dtype,
            a.size * 3 + 3,
        )
        return
    if b is None:
        return
    shape = d.joined(a.shape, b.shape)
    op = d.rng.choice(("+", "-", "*", "*", "/", "max", "min"))
    if not d.fits(shape) or op == "*" and a.size * b.size > 1e4:
        return
    text = {
        "max": f"T.maximum({a.text}, {b.text})",
        "min": f"T.minimum({a.text}, {b.text})",
        "/": f"{a.text} / (T.abs({b.text}) + 0.5)",
    }.get(op, f"{a.text} {op} {b.text}")
    size = {"*": a.size * b.size, "/": 2 * a.size}.get(op, a.size + b.size)
    d.add(f"binary:{op}", text, shape, widest(a.dtype, b.dtype), size)


def tree(d: Drawn) -> None:
    """Several operations in one expression, with operands that stand in it more than once."""
    a = d.float()
    found = [v for v in d.values if v.floating and v.shape == a.shape and v.size < 100] or [a]
    xs = [d.rng.choice(found).text for _ in range(2)] + [d.small(a, 8)]

    def expression(depth: int) -> str:
        if depth == 0 or d.rng.random() < 0.15:
            return d.rng.choice(xs)
        x, y = expression(depth - 1), expression(depth - 1)
        return d.rng.choice(
            (
                f"({x} + {y})",
                f"({x} - {y})",
                f"({x} * {y})",
                f"T.where({x} > {y}, {x}, {y} * 0.5)",
                f"T.tanh({x})",
                f"T.maximum({x}, {y})",
                f"({x} * 0.25 + {x})",
                f"-{x}",
                f"T.sigmoid({x}) * {x}",
                f"T.min({x}, 2.0)",
            )
        )

    text = expression(d.rng.choice((2, 3)))
    types = {v.dtype for v in found if v.text in text} | {a.dtype}
    d.add("tree", f"T.tanh({text} * 0.125)", a.shape, widest(*types), 1.0)


def unary(d: Drawn) -> None:
    v = d.float()
    t, s = v.text, v.size
    name, text, size = d.rng.choice(
        (
            ("exp", f"T.exp({d.small(v, 4)})", 60.0),
            ("log", f"T.log(T.abs({t}) + 0.5)", 4.0),
            ("sqrt", f"T.sqrt(T.abs({t}))", s),
            ("rsqrt", f"T.rsqrt({t} * {t} + 0.25)" if s < 100 else f"T.rsqrt(T.abs({t}) + 0.25)", 2.0),
            ("tanh", f"T.tanh({t})", 1.0),
            ("sigmoid", f"T.sigmoid({t})", 1.0),
            ("erf", f"T.erf({t})", 1.0),
            ("sin", f"T.sin({d.small(v, 16)})", 1.0),
            ("cos", f"{d.small(v, 16)}.cos()", 1.0),
            ("silu", f"T.silu({t})", s),
            ("gelu", f"T.gelu({t})", s),
            ("gelu-tanh", f"T.gelu({t}, approximate='tanh')" if s < 100 else f"T.gelu({t})", s),
            ("relu", f"T.relu({t})", s),
            ("softplus", f"T.softplus({t})", s + 1),
            ("abs", f"T.abs({t})", s),
            ("neg", f"-{t}", s),
            ("floor", f"T.floor({t})", s),
            ("ceil", f"{t}.ceil()", s),
            ("round", f"T.round({t} * 4)", s * 4),
            ("trunc", f"T.trunc({t})", s),
            ("sign", f"T.sign({t})", 1.0),
            ("log1p", f"T.log1p(T.abs({t}))", 4.0),
            ("expm1", f"T.expm1({d.small(v, 2)})", 8.0),
            ("exp2", f"T.exp2({d.small(v, 4)})", 16.0),
            ("clamp", f"T.clamp({t}, -0.75, 1.5)", 1.5),
            ("square", f"T.square({d.small(v, 50)})", min(s, 50.0) ** 2),
        )
    )
    d.add(f"unary:{name}", text, v.shape, v.dtype, size)


def power(d: Drawn) -> None:
    v = d.float()
    base = d.small(v, 4)
    name, text, size = d.rng.choice(
        (
            ("2", f"{base} ** 2", 16.0),
            ("3", f"{base} ** 3", 64.0),
            ("4", f"{base} ** 4", 256.0),
            ("0.5", f"T.abs({base}) ** 0.5", 2.0),
            ("-0.5", f"({base} * {base} + 1) ** -0.5", 1.0),
            ("-1", f"(T.abs({base}) + 0.5) ** -1", 2.0),
            ("1.5", f"(T.abs({base}) + 0.5) ** 1.5", 10.0),
            ("tensor", f"(T.abs({base}) + 0.5) ** T.tanh({base})", 10.0),
        )
    )
    d.add(f"power:{name}", text, v.shape, v.dtype, size)


def compare(d: Drawn) -> None:
    a = d.float()
    b = d.beside(a, lambda v: v.floating)
    if b is None or not d.fits(d.joined(a.shape, b.shape)):
        return
    other = d.rng.choice((b.text, "0", "0.5"))
    shape = d.joined(a.shape, b.shape) if other == b.text else a.shape
    op = d.rng.choice(("<", "<=", ">", ">=", "!=", "=="))
    d.add("compare", f"{a.text} {op} {other}", shape, "bool", 1)


def choose(d: Drawn) -> None:
    c = d.pick(lambda v: v.dtype == "bool")
    if c.dtype != "bool":
        return
    a = d.beside(c, lambda v: v.floating)
    if a is None or not d.fits(shape := d.joined(c.shape, a.shape)):
        return
    condition = d.rng.choice(
        (c.text, f"~{c.text}", f"{c.text} & ({a.text} < 1)", f"{c.text} | ({a.text} > 1)", f"{c.text} ^ ({a.text} > 0)")
    )
    other = d.rng.choice(("0", "1.5", f"-{a.text}", f"{a.text} * 0.5"))
    d.add("where", f"T.where({condition}, {a.text}, {other})", shape, a.dtype, a.size)


def mask(d: Drawn) -> None:
    v = d.float(2)
    rows, columns = v.shape[-2:]
    i, j = f"T.iota({rows})[:, None]", f"T.iota({columns})"
    test = d.rng.choice(
        (f"{j} <= {i}", f"({j} <= {i}) & ({j} > {i} - 4)", f"({i} + {j}) % 3 != 0", f"{j} * 2 < {columns}", f"{i} >= {j} + 1")
    )
    kind = d.rng.random()
    if kind < 0.4:
        d.add("mask:zero", f"T.where({test}, {v.text}, 0)", v.shape, v.dtype, v.size)
    elif kind < 0.6:
        fn = d.rng.choice(("tril", "triu"))
        d.add(f"mask:{fn}", f"T.{fn}({v.text}, {d.rng.randrange(-2, 3)})", v.shape, v.dtype, v.size)
    elif d.nonempty(columns):
        low = d.rng.choice(('-float("inf")', "-1e30" if v.dtype != "float16" else "-6e4"))
        test = test.replace(f"{i} >= {j} + 1", f"{i} >= {j}")
        d.add("mask:softmax", f"T.softmax(T.where({test}, {v.text}, {low}))", v.shape, v.dtype, 1.0)


def reduce(d: Drawn) -> None:
    v = d.pick(low=1)
    kinds = {"bool": ("any", "all"), "int32": ("sum", "max", "min")}.get(
        v.dtype, ("sum", "sum", "max", "min", "mean", "var", "std", "norm", "prod")
    )
    kind = d.rng.choice(kinds)
    if v.size > 1e4 and kind in ("var", "std", "norm") or kind == "prod" and d.count(v.shape) > 300:
        kind = "max"
    axes = tuple(sorted(d.rng.sample(range(len(v.shape)), d.rng.choice((1, 1, 1, min(2, len(v.shape)))))))
    if d.rng.random() < 0.1 and kind != "prod":
        axes = tuple(range(len(v.shape)))
    keep = d.rng.random() < 0.5
    base = f"({v.text} * 0.25 + 1)" if kind == "prod" and v.size < 8 else f"T.tanh({v.text})" if kind == "prod" else v.text
    said = (
        "None"
        if len(axes) == len(v.shape) and d.rng.random() < 0.5
        else str(axes[0] - (len(v.shape) if d.rng.random() < 0.5 else 0))
        if len(axes) == 1
        else str(axes)
    )
    shape = tuple("1" if k in axes else s for k, s in enumerate(v.shape) if keep or k not in axes)
    n = d.count(tuple(v.shape[k] for k in axes))
    size = {"sum": v.size * n, "norm": v.size * n, "var": v.size**2}.get(kind, v.size)
    dt = "bool" if v.dtype == "bool" else v.dtype
    d.add(f"reduce:{kind}", f"{base}.{kind}({said}{', keepdims=True' if keep else ''})", shape, dt, size)


def count(d: Drawn) -> None:
    v = d.float(1)
    axis = d.axis(v)
    test = d.rng.choice((f"{v.text} > 0", f"T.abs({v.text}) < 1"))
    d.add("count", f"({test}).sum({axis})", tuple(s for k, s in enumerate(v.shape) if k != axis), "int32", 100)


def softmax(d: Drawn) -> None:
    v = d.float(1)
    axis = d.axis(v)
    if not d.nonempty(v.shape[axis]):
        return
    shape, t = v.shape, d.small(v, 40)
    kind = d.rng.choice(
        ("softmax", "log_softmax", "logsumexp", "by hand", "one more", "sum of exponentials", "weighted mean", "entropy")
    )
    at = str(axis)
    gone = tuple(s for k, s in enumerate(shape) if k != axis)
    if kind in ("softmax", "log_softmax"):
        d.add(
            f"softmax:{kind}",
            f"T.{kind}({t}{d.rng.choice(('', ' * 0.5'))}, axis={at})",
            shape,
            v.dtype,
            1.0 if kind == "softmax" else 50.0,
        )
    elif kind == "logsumexp":
        d.add("softmax:logsumexp", f"T.logsumexp({t}, axis={at})", gone, v.dtype, v.size + 5)
    else:
        m = d.add(
            "softmax:max",
            f"{t}.max({at}, keepdims=True)",
            tuple("1" if k == axis else s for k, s in enumerate(shape)),
            v.dtype,
            v.size,
        )
        e = d.add("softmax:exp", f"T.exp({t} - {m.text})", shape, v.dtype, 1.0)
        total = f"{e.text}.sum({at}, keepdims=True)"
        if kind == "by hand":
            d.add("softmax:by hand", f"{e.text} / {total}", shape, v.dtype, 1.0)
        elif kind == "one more":
            d.add("softmax:one more", f"{e.text} / ({total} + T.exp(-{m.text}))", shape, v.dtype, 1.0)
        elif kind == "sum of exponentials":
            d.add("softmax:sum", f"({e.text} * {e.text}).sum({at}) / ({e.text}.sum({at}) + 1)", gone, v.dtype, 2.0)
        elif kind == "weighted mean":
            d.add("softmax:mean", f"({e.text} * {t}).sum({at}) / {e.text}.sum({at})", gone, v.dtype, v.size)
        else:
            p = d.add("softmax:by hand", f"{e.text} / {total}", shape, v.dtype, 1.0)
            d.add("softmax:entropy", f"-({p.text} * T.log({p.text} + 1e-3)).sum({at})", gone, v.dtype, 8.0)


def normed(d: Drawn) -> None:
    v = d.float(1)
    if v.size > 1e3:
        return
    kind = d.rng.choice(("rms_norm", "layer_norm", "by hand"))
    w = d.input(v.shape[-1:]).text if d.rng.random() < 0.7 else "None"
    if kind == "by hand":
        d.add("norm:by hand", f"({v.text} - {v.text}.mean(-1, True)) / ({v.text}.std(-1, True) + 0.1)", v.shape, v.dtype, 5.0)
    else:
        eps = d.rng.choice(("1e-5", "0.1"))
        d.add(f"norm:{kind}", f"T.{kind}({v.text}, {w}, eps={eps})", v.shape, v.dtype, 10.0)
