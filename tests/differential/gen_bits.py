"""Programs on numbers of the whole range of their types: arithmetic that wraps, NaN, infinities, conversions of every kind."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gen_state import Node, Profile, State, node
from gen_values import BITS, INTS, is_float, is_unsigned, promote

BITWISE = Profile("bits", (8, 16, 32), (32, 64, 128, 100), (), (1, 1))
WHOLE, REAL = tuple(INTS), ("float16", "bfloat16", "float32", "float64")
ALL = (*WHOLE, *REAL, "float8_e4m3fn", "float8_e5m2")
MIXERS = (2654435761, 2246822519, 3266489917, 668265263, 374761393, 1, 255, 65535, 4294967295)


def is_bits(seed: int) -> bool:
    """Whether the program of a seed is one of these."""
    return seed % 12 == 10


@dataclass(frozen=True)
class Number:
    """An expression.  product: a multiplication that an addition could be fused with.  loaded: nothing was done to it yet."""

    text: str
    dtype: str
    product: bool = False
    loaded: bool = False


class Writer:
    """Draws expressions over elements that tensors and tiles hold at a point."""

    def __init__(self, st: State, leaves: list[Number], features: set[str]) -> None:
        self.st, self.leaves, self.features = st, leaves, features

    def leaf(self, want: str | None = None) -> Number:
        good = [x for x in self.leaves if want is None or x.dtype == want]
        if good and self.st.chance(0.8):
            return self.st.pick(good)
        dt = want or self.st.pick(("int32", "uint32", "int64", "uint8"))
        if is_float(dt):
            return Number(f"T.{dt}({self.st.pick((0.5, -1.0, 3.0, 1e4 if dt != 'float8_e4m3fn' else 2.0))})", dt)
        least, most = _range(dt)
        c = self.st.pick((0, 1, 2, 7, most, least, most // 3, self.st.pick(MIXERS) % (most + 1)))
        return Number(f"T.{dt}({c})", dt)

    def value(self, depth: int) -> Number:
        """Any expression."""
        if depth <= 0 or self.st.chance(0.1):
            return self.leaf()
        for _ in range(8):
            v = self._combined(depth)
            if v is not None:
                return v
        return self.leaf()

    def _combined(self, depth: int) -> Number | None:
        st = self.st
        op = st.pick(("+", "-", "*", "+", "*", "&", "|", "^", "<<", ">>", "//", "%", "~", "neg", "abs", "min", "max", "select",
                      "cast", "cast", "count", "pow", "reinterpret", "round", "round", "fmod", "/", "trunc", "bool", "sign",
                      "nearest"))
        a = self.value(depth - 1)
        got = self._of_one(op, a) if op in ("~", "neg", "abs", "cast", "count", "pow", "reinterpret", "round", "bool", "sign",
                                       "nearest") else \
            self._of_two(op, a, self.value(depth - 1))
        if got is not None:
            self.features.add(f"bits:{op if op != '//' else 'floordiv'}")
        return got

    def _of_one(self, op: str, a: Number) -> Number | None:
        st, real, bits = self.st, is_float(a.dtype), BITS[a.dtype]
        if a.dtype.startswith("float8") and op != "cast":
            return None
        match op:
            case "~":
                return None if real else Number(f"(~{a.text})", a.dtype)
            case "neg":
                return None if is_unsigned(a.dtype) else Number(f"(-{a.text})", a.dtype, a.product)
            case "abs":
                return None if is_unsigned(a.dtype) else Number(f"T.abs({a.text})", a.dtype, a.product)
            case "cast":
                return Number(f"T.cast({a.text}, '{(to := st.pick(ALL))}')", to, a.product and to == a.dtype)
            case "count":
                return None if real else Number(f"T.{st.pick(['popcount', 'clz'])}({a.text})", a.dtype)
            case "pow":
                return None if real or bits < 32 else Number(f"T.pow({a.text}, {st.between(0, 3)})", a.dtype)
            case "reinterpret":
                same = [d for d in WHOLE if BITS[d] == bits] + [d for d in REAL if BITS[d] == bits and not real]
                if real and not a.loaded:
                    return None  # which NaN it is, or which zero, is open
                to = st.pick(same)
                return Number(f"T.reinterpret({a.text}, '{to}')", to) if to != a.dtype else None
            case "sign":
                return self._own_sign(a)
            case "nearest":
                return Number(f"T.nearbyint({a.text})", a.dtype) if a.dtype in ("float32", "float64") else None
            case "round":
                return Number(f"T.{st.pick(['floor', 'ceil', 'trunc', 'round'])}({a.text})", a.dtype) if real else None
        return Number(f"T.cast({self.condition(a)}, 'int32')", "int32")

    def _own_sign(self, a: Number) -> Number | None:
        """A size as programs write it without T.abs: the least number of a type stays what it is."""
        if is_float(a.dtype) or is_unsigned(a.dtype) or BITS[a.dtype] < 32:
            return None
        x, s = a.text, f"({a.text} >> {BITS[a.dtype] - 1})"
        turned = self.st.pick([f"(-{x})", f"(0 - {x})", f"({x} * -1)", f"(~{x} + 1)"])
        return Number(self.st.pick([f"T.if_then_else({x} < 0, {turned}, {x})", f"T.Select({x} > -1, {x}, {turned})",
                                    f"T.max({x}, {turned})", f"(({x} ^ {s}) - {s})", f"(({x} + {s}) ^ {s})",
                                    f"T.if_then_else({x} - 7 < 0, 7 - {x}, {x} - 7)"]), a.dtype)

    def condition(self, a: Number) -> str:
        """A comparison of a with something, or a question about it."""
        st = self.st
        if is_float(a.dtype) and not a.dtype.startswith("float8") and st.chance(0.4):
            return f"T.{st.pick(['isnan', 'isinf', 'isfinite'])}({a.text})"
        b = self.leaf()
        if promote(a.dtype, b.dtype) is None or "float8" in a.dtype + b.dtype:
            b = self.leaf("int32")
        if a.dtype.startswith("float8"):
            a = Number(f"T.cast({a.text}, 'float32')", "float32")
        return f"({a.text} {st.pick(['<', '<=', '>', '>=', '==', '!='])} {b.text})"

    def _of_two(self, op: str, a: Number, b: Number) -> Number | None:
        st = self.st
        dt = promote(a.dtype, b.dtype)
        if dt is None or dt.startswith("float8") or "float8" in a.dtype + b.dtype:
            return None
        real = is_float(dt)
        match op:
            case "+" | "-":
                return None if a.product or b.product else Number(f"({a.text} {op} {b.text})", dt)
            case "*":
                return Number(f"({a.text} * {b.text})", dt, real)
            case "&" | "|" | "^":
                return None if real else Number(f"({a.text} {op} {b.text})", dt)
            case "<<" | ">>":
                if real or is_float(a.dtype):
                    return None
                by = promote(a.dtype, "int32") or dt
                return Number(f"({a.text} {op} {st.between(0, BITS[by] - 1)})", by)
            case "//" | "%" | "trunc":
                if real:
                    return None
                fn = {"//": "({0} // {1})", "%": "({0} % {1})",
                      "trunc": st.pick(["T.truncdiv({0}, {1})", "T.truncmod({0}, {1})"])}
                if not is_float(b.dtype) and not is_unsigned(b.dtype) and BITS[b.dtype] >= 32 and st.chance(0.3):
                    safe = f"T.if_then_else({b.text} == 0, T.{b.dtype}(-1), {b.text})"
                    return Number(fn[op].format(a.text, safe), dt)
                if is_unsigned(b.dtype) and st.chance(0.5):
                    return Number(fn[op].format(a.text, f"({b.text} | T.{b.dtype}(1))"), dt)
                c = st.pick((2, 3, 7, 16, 100, 127, -3, -16, -1) if not is_unsigned(a.dtype) else (2, 3, 7, 16, 100))
                by = promote(a.dtype, "int32") or dt
                return Number(fn[op].format(a.text, f"({c})"), by)
            case "/":
                return Number(f"({a.text} / {b.text})", dt, True) if real and b.loaded else None
            case "fmod":
                return Number(f"T.fmod({a.text}, {b.text})", dt) if real and dt in ("float32", "float64") and \
                    a.dtype == b.dtype else None
            case "min" | "max":
                return Number(f"T.{op}({a.text}, {b.text})", dt, a.product or b.product)
        text = f"T.if_then_else({self.condition(self.leaf())}, {a.text}, {b.text})"
        return Number(text, dt, a.product or b.product)


def _range(dt: str) -> tuple[int, int]:
    n = BITS[dt]
    return (0, 2**n - 1) if is_unsigned(dt) else (-(2**(n - 1)), 2**(n - 1) - 1)


def bits_program(seed: int) -> dict[str, Any]:
    """The program of a seed."""
    st = State(seed, BITWISE)
    threads, rows, cols, blocks = st.pick(BITWISE.threads), st.pick([1, 4, 7, 16]), st.pick([8, 16, 24, 33]), st.between(1, 2)
    st.threads = threads
    tensors, body, after, leaves = [], [], [], []
    for _ in range(st.between(2, 4)):
        dt = st.pick(st.pick([ALL, WHOLE, REAL]))
        name = st.fresh("A")
        tensors.append(_tensor(name, (blocks, rows, cols), dt, full=True))
        if st.chance(0.4):
            leaves.append(Number(f"{name}[b, i, j]", dt, loaded=True))
            leaves.append(Number(f"{name}[b, i, {cols - 1} - j]", dt, loaded=True))
            continue
        scope, to = st.pick(["shared", "fragment"]), st.pick([dt, dt, st.pick(ALL)])
        tile = st.fresh("S")
        body.append(node(f"{tile} = T.alloc_{scope}(({rows}, {cols}), '{to}')"))
        after.append(node(f"T.copy({name}[b, 0:{rows}, 0:{cols}], {tile})", None, None,
                          f"bits:copy:{'same' if to == dt else 'converted'}"))
        leaves.append(Number(f"{tile}[i, j]", to, loaded=to == dt))
    for _ in range(st.between(1, 2) if st.chance(0.4) else 0):  # numbers of the call
        dt, name = st.pick(["int32", "int32", "int64"]), st.fresh("n")
        least, most = _range(dt)
        v = st.pick([least, least + 5, most, most - 3, most // 2 + 7, -1, st.between(least, most)])
        tensors.append({"name": name, "shape": [], "dtype": dt, "low": v, "high": v, "scalar": True})
        leaves += [Number(name, dt)] * 2
        after.append(node("pass", None, None, "bits:scalar"))
    for _ in range(st.between(2, 4)):
        form = st.pick([_elements, _elements, _staged, _reduced, _reduced, _scanned, _atomics])
        more, new = form(st, leaves, rows, cols)
        for n in more:
            (body if "T.alloc" in n["t"] else after).append(n)
        for shape, dt, kind in new:
            tensors.append(_tensor(kind, (blocks, *shape), dt, full=kind[0] == "O", zero=kind[0] == "Z"))
    kernel = {"grid": [str(blocks)], "blocks": ["b"], "threads": threads, "body": body + after}
    return {"seed": seed, "profile": "bits", "dims": {}, "symbols": {}, "steps": {}, "tensors": tensors, "configs": {},
            "kernels": [kernel]}


def _tensor(name: str, shape: tuple[int, ...], dt: str, full: bool, zero: bool = False) -> dict[str, Any]:
    t = {"name": name, "shape": [str(n) for n in shape], "dtype": dt, "low": 0, "high": 0 if zero else 1}
    return {**t, "full": True} if full and not zero else t


New = list[tuple[tuple[int, ...], str, str]]


def _elements(st: State, leaves: list[Number], rows: int, cols: int) -> tuple[list[Node], New]:
    """An expression of each point of a tile, into a tensor of any type."""
    found: set[str] = set()
    v = Writer(st, [*leaves, Number("i", "int32"), Number("j", "int32")], found).value(st.between(1, 4))
    dt, o = st.pick([v.dtype, v.dtype, st.pick(ALL)]), st.fresh("O")
    lines = [node(f"x = {v.text}"), node(f"{o}[b, i, j] = x")] if st.chance(0.5) else [node(f"{o}[b, i, j] = {v.text}")]
    return [node(f"for i, j in T.Parallel({rows}, {cols}):", lines, None, *sorted(found))], [((rows, cols), dt, o)]


def _staged(st: State, leaves: list[Number], rows: int, cols: int) -> tuple[list[Node], New]:
    """A tile of values, which later statements read as well."""
    found: set[str] = set()
    v = Writer(st, leaves, found).value(st.between(1, 3))
    dt, name = st.pick([v.dtype, st.pick(ALL)]), st.fresh("S")
    out = [node(f"{name} = T.alloc_{st.pick(['shared', 'fragment'])}(({rows}, {cols}), '{dt}')"),
           node(f"for i, j in T.Parallel({rows}, {cols}):", [node(f"{name}[i, j] = {v.text}")], None, *sorted(found))]
    o = st.fresh("O")
    to = st.pick([dt, st.pick(ALL)])
    out.append(node(f"T.copy({name}, {o}[b, 0:{rows}, 0:{cols}])", None, None, "bits:staged"))
    leaves.append(Number(f"{name}[i, j]", dt))
    return out, [((rows, cols), to, o)]


def _tile_of(st: State, leaves: list[Number], rows: int, cols: int, dts: tuple[str, ...]) -> tuple[list[Node], str, str]:
    found: set[str] = set()
    v = Writer(st, leaves, found).value(2)
    dt, name = st.pick(dts), st.fresh("S")
    made = [node(f"{name} = T.alloc_{st.pick(['shared', 'fragment'])}(({rows}, {cols}), '{dt}')"),
            node(f"for i, j in T.Parallel({rows}, {cols}):", [node(f"{name}[i, j] = {v.text}")], None, *sorted(found))]
    return made, name, dt


def _reduced(st: State, leaves: list[Number], rows: int, cols: int) -> tuple[list[Node], New]:
    """A reduction that wraps, or of numbers that may be NaN or infinite."""
    kind = st.pick(["sum", "sum", "max", "min", "max", "min", "bitxor", "bitor", "bitand", "absmax"])
    dts = {"sum": ("int32", "uint32", "int64", "uint64"), "absmax": ("int32", "float32", "float16", "int64")}.get(
        kind, WHOLE if kind.startswith("bit") else (*WHOLE, *REAL))
    out, name, dt = _tile_of(st, leaves, rows, cols, dts)
    more = ""
    if kind in ("max", "min", "absmax") and dt in ("float16", "bfloat16") and st.chance(0.5):
        more = ", nan_propagate=True"
    r, o = st.fresh("R"), st.fresh("O")
    dim = st.between(0, 1)
    n = (cols, rows)[dim]
    out += [node(f"{r} = T.alloc_{st.pick(['shared', 'fragment'])}(({n},), '{dt}')"),
            node(f"T.reduce_{kind}({name}, {r}, dim={dim}{more})", None, None, f"bits:reduce-{kind}"),
            node(f"T.copy({r}, {o}[b, 0:{n}])")]
    return out, [((n,), dt, o)]


def _scanned(st: State, leaves: list[Number], rows: int, cols: int) -> tuple[list[Node], New]:
    """A scan that wraps."""
    out, name, dt = _tile_of(st, leaves, rows, cols, ("int32", "uint32", "int64", "uint64"))
    kind, o = st.pick(["cumsum", "cummax"]), st.fresh("O")
    out += [node(f"T.{kind}({name}, dim={st.between(0, 1)}{st.pick(['', ', reverse=True'])})", None, None, f"bits:{kind}"),
            node(f"T.copy({name}, {o}[b, 0:{rows}, 0:{cols}])")]
    return out, [((rows, cols), dt, o)]


def _atomics(st: State, leaves: list[Number], rows: int, cols: int) -> tuple[list[Node], New]:
    """Atomics on whole numbers of the types that have them, wrapping."""
    op, found = st.pick(["add", "max", "min"]), set()
    dt, z = st.pick(["int32", "uint32", "int64", "uint64"]), st.fresh("Z")
    v = Writer(st, leaves, found).value(2)
    change = node(f"T.atomic_{op}({z}[b, j], T.cast({v.text}, '{dt}'))", None, None, f"bits:atomic-{op}")
    return [node(f"for i, j in T.Parallel({rows}, {cols}):", [change], None, *sorted(found))], [((cols,), dt, z)]


__all__ = ["bits_program", "is_bits"]
