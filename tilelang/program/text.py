"""Scalar expressions as text of the tile language."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import inf, isinf, isnan

from .expr import FREE, Scalar, const, is_integer, number, times
from .graph import Dim
from .rescale import is_float

INFIX = {"add": ("+", 6), "sub": ("-", 6), "mul": ("*", 7), "div": ("/", 7), "floordiv": ("//", 7), "mod": ("%", 7),
         "eq": ("==", 2), "ne": ("!=", 2), "lt": ("<", 2), "le": ("<=", 2), "gt": (">", 2), "ge": (">=", 2),
         "or": ("or", 0), "and": ("and", 1)}
BITS = {"and": ("&", 5), "or": ("|", 3), "xor": ("^", 4), "shl": ("<<", 5), "shr": (">>", 5)}
CALLS = {"max": "T.max({}, {})", "min": "T.min({}, {})", "pow": "T.pow({}, {})", "atan2": "T.atan2({}, {})",
         "where": "T.if_then_else({}, {}, {})", "round": "T.nearbyint({})",
         "bits": 'T.reinterpret({}, "int32")', "expm1": "(T.exp({0}) + 1) * T.tanh(0.5 * ({0}))",
         "tf32": 'T.reinterpret(T.reinterpret({}, "int32") + 4096 & -8192, "float32")'}
TIGHT = 9


def wide(dtype: str) -> str:
    """The type in which elements are computed."""
    return "float32" if is_float(dtype) and dtype != "float64" else dtype


def unused(name: str, used: set[str]) -> str:
    """The name, with a greater number at its end where it is used already; from now on it is used."""
    while name in used:
        stem = name.rstrip("0123456789")
        name = f"{stem}{int(name[len(stem):] or 1) + 1}"
    used.add(name)
    return name


class Printer:
    """Prints expressions.  leaf: the text of an axis, a read or an expression that lies in a tile; None for others."""

    def __init__(self, leaf: Callable[[Scalar], str | None]) -> None:
        self.leaf = leaf

    def text(self, e: Scalar, above: int = -1) -> str:
        found = self.leaf(e)
        if found is not None:
            level = TIGHT if e.op != "axis" else 6 if "+" in found else 7 if "*" in found else TIGHT
            return f"({found})" if level < above else found
        out, level = self._text(e)
        return f"({out})" if level < above else out

    def _text(self, e: Scalar) -> tuple[str, int]:
        if e.op == "const":
            return self._number(e)
        if e.op == "cast":
            return self._cast(e)
        if e.op == "neg":
            return f"-{self.text(e.args[0], 8)}", 8
        if e.op == "not":
            return (f"T.Not({self.text(e.args[0])})" if e.dtype == "bool" else f"~{self.text(e.args[0], 8)}"), 8
        if e.op == "sign":
            return self._sign(e)
        if e.op == "xor" and e.dtype == "bool":
            return self._infix(e, "!=", 2)
        if e.op in BITS and (e.dtype != "bool" or all(a.reads for a in e.args)):  # without conditions for the second
            return self._infix(e, *BITS[e.op])
        if e.op in ("floordiv", "mod") and is_float(e.dtype):
            return self._floored(e)
        if e.op in INFIX:
            return self._infix(e, *INFIX[e.op])
        form = CALLS.get(e.op, f"T.{e.op}({{}})")
        return form.format(*map(self.text, e.args)), 7 if e.op == "expm1" else TIGHT

    def _infix(self, e: Scalar, sign: str, level: int) -> tuple[str, int]:
        a, b = e.args
        if sign == "+" and is_integer(e.dtype) and (positive := _negated(b)) is not None:
            return f"{self.text(a, 6)} - {self.text(positive, 7)}", 6
        if is_integer(e.dtype) and e.op == "mul":  # factors of a sum are narrower than its accumulator
            a, b = (x if x.dtype == e.dtype else Scalar("cast", (x,), e.dtype) for x in e.args)
        tight = level + 1 if sign not in ("+", "*", "and", "or") or is_integer(e.dtype) and b.op != "add" else level
        right = self.text(b, tight if sign in ("+", "and", "or") else level + 1)
        return f"{self.text(a, level if level > 2 else level + 1)} {sign} {right}", level

    def _floored(self, e: Scalar) -> tuple[str, int]:
        """As in Python, from the exact remainder: a / b may be rounded to the next integer."""
        a, b, above, below = (self.text(x, level) for level in (0, 8) for x in e.args)
        rest = f"T.fmod({a}, {b})"
        differs = f"({rest} < 0) != ({below} < 0) and {rest} != 0"
        if e.op == "mod":
            return f"{rest} + T.if_then_else({differs}, {b}, 0.0)", 6
        whole = f"T.nearbyint(({above} - {rest}) / {below}) - T.if_then_else({differs}, 1.0, 0.0)"
        return f"T.if_then_else({below} == 0, {above} / {below}, {whole})", TIGHT

    def _sign(self, e: Scalar) -> tuple[str, int]:
        a = self.text(e.args[0], 3)
        one, zero = ("1.0", "0.0") if is_float(e.dtype) else ("1", "0")
        rest = a if is_float(e.dtype) else zero  # NaN stays
        return f"T.if_then_else({a} > 0, {one}, T.if_then_else({a} < 0, -{one}, {rest}))", TIGHT

    def _cast(self, e: Scalar) -> tuple[str, int]:
        a = e.args[0]
        inner = self.text(a)
        if a.op == "read" and a.dtype == e.dtype and is_float(e.dtype):
            return self.text(a, 0), 0
        if is_float(e.dtype):
            if a.op == "where" and _is_exact(a, e.dtype):
                return inner, TIGHT
            if wide(e.dtype) == e.dtype:
                kept = is_float(a.dtype) and wide(a.dtype) == e.dtype
                return (inner, 0 if " " in inner else TIGHT) if kept else (f'T.cast({inner}, "{e.dtype}")', TIGHT)
            return f'T.cast(T.cast({inner}, "{e.dtype}"), "float32")', TIGHT
        if e.dtype == "bool":
            return f"{self.text(a, 3)} != 0", 2
        return f'T.cast({inner}, "{e.dtype}")', TIGHT

    def _number(self, e: Scalar) -> tuple[str, int]:
        v = e.value
        if e.dtype == "bool":
            return f"T.bool({bool(v)})", TIGHT
        if is_float(e.dtype):
            kind = wide(e.dtype)
            if isinstance(v, Dim):
                return f'T.cast({v}, "{kind}")', TIGHT
            v = float(v)
            if isnan(v):
                return f'T.{kind}(float("nan"))', TIGHT
            if isinf(v):
                return f'{"-" if v < 0 else ""}T.infinity("{kind}")', 8 if v < 0 else TIGHT
            return (f"T.float64({v!r})" if kind == "float64" else repr(v)), 8 if v < 0 else TIGHT
        plain = str(v)
        if e.dtype != "int32":
            return f"T.{e.dtype}({plain})", TIGHT
        return plain, 6 if " " in plain else 7 if "*" in plain else 8 if plain.startswith("-") else TIGHT


def in_steps(printer: Printer, e: Scalar, unused: Callable[[str], str]) -> tuple[list[str], str]:
    """(statements that name what a condition and what it chooses both compute, the text of an expression with these names).

    Device compilers branch around a second computation that they do not recognise.  unused: makes a name.
    """
    leaf, names = printer.leaf, dict[Scalar, str]()
    printer = Printer(lambda x: names.get(x) or leaf(x))

    def computed(x: Scalar) -> Iterator[Scalar]:
        if leaf(x) is None:
            if is_float(x.dtype) and x.op not in FREE:
                yield x
            for a in x.args:
                yield from computed(a)

    def statements(x: Scalar) -> Iterator[str]:
        if leaf(x) is not None:
            return
        for a in x.args[:1] if x.op in ("where", "and", "or") else x.args:  # what is computed in any case
            yield from statements(a)
        chosen = {y for a in x.args[1:] for y in computed(a)} if x.op == "where" else ()
        for y in computed(x.args[0]) if chosen else ():
            if y in chosen and y not in names:
                text = printer.text(y)
                names[y] = unused("value")
                yield f"{names[y]} = {text}"

    return list(statements(e)), printer.text(e)


def _is_exact(e: Scalar, dtype: str) -> bool:
    """Whether a value of a 16-bit type, which is kept in float32, is one of that type without being rounded."""
    if e.op == "where":
        return all(_is_exact(a, dtype) for a in e.args[1:])
    return e.op == "const" and float(e.value) in (0.0, inf, -inf) or e.op in ("read", "cast") and e.dtype == dtype


def _negated(e: Scalar) -> Scalar | None:
    """x of -x, where e is a negative number or a multiple by one."""
    if (n := number(e)) is not None:
        return const(-n) if isinstance(n, int) and n < 0 else None
    if e.op == "mul" and isinstance(n := number(e.args[1]), int) and n < 0:
        return times(e.args[0], -n)
    return None

