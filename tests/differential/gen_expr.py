"""Scalar expressions at a point of a loop: loads at odd indices, arithmetic across types, conditions."""

from __future__ import annotations

from gen_functions import rounded
from gen_state import Buf, Node, Scope, State, node
from gen_values import EXACT, INTS, Value, cast, envelope, integer, is_float, is_unsigned, literal, promote

RN = ", 'rn'"  # the rounding that T.ieee_fsqrt wants named


class Point:
    """Where expressions are evaluated: loop variables with their extents, and what may be read there.

    written: buffers this loop writes, which it may read only where it writes them: root -> (buffer, index texts).
    pre: statements that bind intermediate values before the statement being written.
    """

    def __init__(self, state: State, scope: Scope, vars: list[tuple[str, int]], reads: list[Buf]) -> None:
        self.state, self.scope, self.vars, self.reads = state, scope, vars, reads
        self.written: dict[int, tuple[Buf, list[str]]] = {}
        self.pre: list[Node] = []
        self.features: set[str] = set()

    # -- indices

    def index(self, n: int, b: Buf | None = None) -> str:
        """Text of an index in [0, n), mostly of the loop's variables."""
        st = self.state
        if n == 1:
            return "0"
        if not self.vars or st.chance(0.12):
            return st.uniform_index(self.scope, n)
        v, e = st.pick(self.vars)
        w, f = st.pick(self.vars)
        forms = ["mod"]
        if e <= n:
            forms += ["plain"] * 8 + ["shift", "reverse", "ring", "ring"]
            if b is not None and b.scope != "global" and st.chance(0.3):
                forms += ["negative"]
        if (e + 1) // 2 <= n:
            forms.append("half")
        forms.append("mix")
        form = st.pick(forms)
        c = st.between(1, max(1, n - 1))
        self.features.add(f"index:{form}")
        match form:
            case "plain": return v
            case "shift": return f"({v} + {st.between(0, n - e)})"
            case "reverse": return f"({n - 1} - {v})"
            case "ring": return f"(({v} + {c}) % {n})"
            case "half": return f"({v} // 2)"
            case "negative": return f"({v} - {n})"
            case "mix": return f"(({v} * {st.between(1, 5)} + {w} + {c}) % {n})"
        return f"({v} % {n})"

    def outside(self, b: Buf, d: int) -> str:
        """An index of a global input that may lie outside: reads the safe value there."""
        v, _ = self.state.pick(self.vars)
        c = self.state.between(0, 4)
        base = self.state.pick([u.text for u in self.scope.uniform if u.low >= 0] or ["0"])
        self.features.add("index:outside")
        return self.state.pick([f"{v} - {c}", f"{v} + {c}", f"{base} * {self.state.between(1, 16)} + {v}",
                                f"{b.shape[d] + 1} - {v}"])

    def load(self, b: Buf) -> Value:
        """An element of b, as a value that signed arithmetic may use."""
        st = self.state
        at = self.written.get(id(b.root))
        if at is not None:
            b, idx = at
        else:
            idx = [self.index(n, b) for n in b.tile]
            if b.scope == "global" and not b.base and self.vars and st.chance(0.15):
                d = st.between(0, len(idx) - 1)
                idx[d] = self.outside(b, d)
        v = b.load(idx)
        if at is None and b.scope == "shared" and self.vars and st.chance(0.06):
            d = st.between(0, len(idx) - 1)
            name, e = st.pick(self.vars)
            if e <= b.shape[d] and st.chance(0.8):
                c = st.between(1, 3)
                shifted = [*idx[:d], f"{name} - {c}", *idx[d + 1:]]
                v = Value(f"T.if_then_else({name} >= {c}, {b.at(shifted)}, 0)", promote(b.dtype, "int32"), min(0, b.low),
                          max(0, b.high))
                self.features.add("index:guarded")
        self.features.add(f"load:{b.scope}")
        if is_unsigned(v.dtype):
            v = cast(v, "int32" if v.high < 2**31 else "int64")
        elif v.dtype.startswith("float8") and st.chance(0.8):
            v = cast(v, st.pick(["float32", "float16"]))
        return v

    # -- values

    def bind(self, v: Value) -> Value:
        """The value under a name of its own when its text is long."""
        if len(v.text) < 24:
            return v
        name = self.state.fresh("t")
        self.pre.append(node(f"{name} = {v.text}"))
        return Value(name, v.dtype, v.low, v.high)

    def fit(self, v: Value, low: int, high: int) -> Value:
        """v, taken into [low, high] where its range is wider: a remainder, or a clamp."""
        st = self.state
        if low <= v.low and v.high <= high:
            return v
        if v.bound <= EXACT[v.dtype] // 4 and v.bound < 2**29 and st.chance(0.2):
            self.features.add("expr:clamp")
            text = f"T.clamp({v.text}, {low}, {high})" if st.chance(0.5) else f"T.max(T.min({v.text}, {high}), {low})"
            return Value(text, promote(v.dtype, "int32"), min(max(low, v.low), high), max(min(high, v.high), low))
        if v.dtype in INTS:
            span = high - low + 1
            dt = promote(v.dtype, "int32")
            rest = Value(f"({v.text} % {span})", dt, 0, span - 1)
            return rest if low == 0 else Value(f"({rest.text} - {-low})", dt, low, high)
        m = 1
        while m * 2 <= high + 1:
            m *= 2
        if m == 1:  # 0 or 1
            v = self.bind(v)
            return Value(f"({v.text} - T.floor({v.text} * 0.5) * 2.0)", promote(v.dtype, "float32"), 0, 1)
        v = self.bind(v)
        dt = promote(v.dtype, "float32")
        k = 0 if low == 0 else m // 2
        text = f"({v.text} - T.floor({v.text} * {1 / m!r}) * {m}.0)"
        return Value(text if k == 0 else f"({text} - {k}.0)", dt, -k, m - 1 - k)

    def leaf(self) -> Value:
        st = self.state
        roll = st.rng.random()
        if self.reads and roll < 0.68:
            return self.load(st.pick(self.reads))
        if self.vars and roll < 0.8:
            v, e = st.pick(self.vars)
            return integer(v, 0, e - 1)
        scalars = self.scope.uniform + self.scope.vars
        if scalars and roll < 0.9:
            return st.pick(scalars)
        return literal(st.between(-4, 5), st.chance(0.4))

    def value(self, depth: int) -> Value:
        """A random expression, exact at every step."""
        st = self.state
        if depth <= 0 or st.chance(0.15):
            return self.leaf()
        for _ in range(6):
            v = self._combine(depth)
            if v is not None and v.dtype is not None and v.exact() and v.bound < 2**30:
                return v
        return self.leaf()

    def _combine(self, depth: int) -> Value | None:
        st = self.state
        op = st.pick(["+", "+", "-", "*", "max", "min", "abs", "neg", "choose", "choose", "floordiv", "mod", "bits", "shift",
                      "floor", "cast", "select", "trunc", "round", "invert", "square", "named", "functions", "functions",
                      "counts"])
        a = self.value(depth - 1)
        self.features.add(f"expr:{op}")
        if op in "+-*" or op in ("max", "min", "choose", "select"):
            b = self.value(depth - 1)
            if op == "*":
                a, b = self.fit(a, -31, 31), self.fit(b, -15, 15)
            dt = promote(a.dtype, b.dtype)
            if dt is None:
                return None
            limit = EXACT[dt] // (1 if op in ("max", "min", "choose", "select") else 2)
            if op != "*":
                a = a if a.bound <= limit else self.fit(a, -(limit // 4), limit // 4)
                b = b if b.bound <= limit else self.fit(b, -(limit // 4), limit // 4)
                dt = promote(a.dtype, b.dtype)
            return self._binary(op, a, b, dt)
        if op == "abs":
            return Value(f"T.abs({a.text})", a.dtype, 0, a.bound)
        if op == "neg":
            return None if is_unsigned(a.dtype) else Value(f"(-{a.text})", a.dtype, -a.high, -a.low)
        if op == "cast":
            good = [d for d in ("float16", "float32", "int32", "int64", "bfloat16", "int8", "int16", "float64")
                    if a.bound <= EXACT[d] // 2]
            return cast(a, st.pick(good), "[" in a.text and st.chance(0.3)) if good else None
        if op in ("floor", "trunc", "round"):
            if not is_float(a.dtype) or a.dtype.startswith("float8"):
                return None
            if op == "round":
                return Value(f"T.round({a.text})", a.dtype, a.low, a.high)
            fn = "T.floor" if op == "floor" else st.pick(["T.trunc", "T.ceil"])
            return Value(f"{fn}({a.text} * 0.25)", promote(a.dtype, "float32"), a.low // 4 - 1, a.high // 4 + 1)
        if op == "functions":
            return self._function(a, depth)
        if a.dtype not in ("int32", "int64", "int16", "int8"):
            return None
        c = st.between(2, 9)
        match op:
            case "counts":
                return self._counted(a)
            case "invert":
                return Value(f"(~{a.text})", a.dtype, -a.high - 1, -a.low - 1)
            case "square":
                a = self.fit(a, -31, 31)
                return Value(f"T.pow({a.text}, 2)", a.dtype, 0, a.bound ** 2)
            case "named":
                fn = st.pick(["T.floordiv", "T.floormod", "T.bitwise_and", "T.shift_right", "T.shift_left", "T.bitwise_xor",
                              "T.align_up"])
                dt = promote(a.dtype, "int32")
                if fn == "T.shift_left":
                    return Value(f"T.shift_left({a.text}, {c % 3 + 1})", dt, a.low << c % 3 + 1, a.high << c % 3 + 1)
                if fn == "T.bitwise_xor":
                    k = envelope(a, literal(c))
                    return Value(f"T.bitwise_xor({a.text}, {c})", dt, -k, k - 1)
                if fn == "T.align_up":
                    return Value(f"T.align_up({a.text}, {c})", dt, -(-a.low // c) * c, -(-a.high // c) * c)
                if fn == "T.floordiv":
                    return Value(f"T.floordiv({a.text}, {c})", dt, a.low // c, a.high // c)
                if fn == "T.shift_right":
                    return Value(f"T.shift_right({a.text}, 2)", dt, a.low >> 2, a.high >> 2)
                high = c - 1 if fn == "T.floormod" else c
                return Value(f"{fn}({a.text}, {c})", dt, 0, high)
            case "floordiv":
                if st.chance(0.2):
                    return Value(f"T.truncdiv({a.text}, {c})", promote(a.dtype, "int32"), -(-a.low // c),
                                 max(0, a.high // c)) if a.low < 0 else None
                return Value(f"({a.text} // {c})", promote(a.dtype, "int32"), a.low // c, a.high // c)
            case "mod":
                if st.chance(0.2):
                    return Value(f"T.truncmod({a.text}, {c})", promote(a.dtype, "int32"), -(c - 1), c - 1)
                return Value(f"({a.text} % {c})", promote(a.dtype, "int32"), 0, c - 1)
            case "shift":
                k = st.between(1, 3)
                if st.chance(0.5):
                    return Value(f"({a.text} >> {k})", promote(a.dtype, "int32"), a.low >> k, a.high >> k)
                return Value(f"({a.text} << {k})", promote(a.dtype, "int32"), a.low << k, a.high << k)
            case "bits":
                b = self.value(depth - 1)
                if b.dtype not in ("int32", "int64", "int16", "int8"):
                    return Value(f"({a.text} & {c})", promote(a.dtype, "int32"), 0, c)
                k = envelope(a, b)
                return Value(f"({a.text} {st.pick('&|^')} {b.text})", promote(a.dtype, b.dtype), -k, k - 1)
        return None

    def _counted(self, a: Value) -> Value | None:
        """How many bits of an int32 are set, or where the first of them stands."""
        if a.dtype != "int32":
            return None
        fn = self.state.pick(["popcount", "clz", "__ffs"])
        self.features.add(f"counts:{fn}")
        return Value(f"T.{fn}({a.text})", "int32", 0, 32)

    def _function(self, a: Value, depth: int) -> Value | None:
        """A function of floats whose results are whole numbers again, whichever way it rounds."""
        st = self.state
        if st.chance(0.5):
            return rounded(st.rng, a, self.fit, self.features.add)
        if a.dtype not in ("float32", "float64"):
            if a.bound > EXACT["float32"] // 4:
                return None
            a = cast(a, "float32")
        mode = st.pick(["", ", 'rn'", ", 'rz'", ", 'ru'", ", 'rd'"])
        form = st.pick(["add", "sub", "mul", "fdiv", "fmaf", "fsqrt", "fmod", "nearbyint", "isfinite", "reinterpret"])
        self.features.add(f"function:{form}")
        c = st.between(2, 9)
        match form:
            case "add" | "sub" | "mul" | "fmaf":
                a, b = self.fit(a, -31, 31), cast(self.fit(self.value(depth - 1), -15, 15), a.dtype)
                if form == "fmaf":
                    third = Value(f"({a.text} * {c}.0 + {b.text})", a.dtype, a.low * c + b.low, a.high * c + b.high)
                    return Value(f"T.ieee_fmaf({a.text}, T.{a.dtype}({c}), {b.text}{mode})", a.dtype, third.low, third.high)
                found = self._binary({"add": "+", "sub": "-", "mul": "*"}[form], a, b, a.dtype)
                return Value(f"T.ieee_{form}({a.text}, {b.text}{mode})", a.dtype, found.low, found.high) if found else None
            case "fdiv":
                a = self.fit(a, -31, 31)
                return Value(f"T.ieee_fdiv({a.text} * T.{a.dtype}({c}), T.{a.dtype}({c}){mode})", a.dtype, a.low, a.high)
            case "fsqrt":
                a = self.bind(self.fit(a, -31, 31))
                return Value(f"T.ieee_fsqrt({a.text} * {a.text}{mode or RN})", a.dtype, 0, a.bound)
            case "fmod": return Value(f"T.fmod({a.text}, T.{a.dtype}({c}))", a.dtype, max(a.low, 1 - c) if a.low < 0 else 0,
                                      min(a.high, c - 1) if a.high > 0 else 0)
            case "nearbyint":
                return Value(f"T.nearbyint({a.text} * T.{a.dtype}(0.5))", a.dtype, a.low // 2, -(-a.high // 2))
            case "isfinite":
                a = self.bind(a)
                return Value(f"T.if_then_else(T.isfinite({a.text}), {a.text}, T.{a.dtype}(0))", a.dtype, min(0, a.low),
                             max(0, a.high))
        bits = "int32" if a.dtype == "float32" else "int64"
        return Value(f"T.reinterpret(T.reinterpret({a.text}, '{bits}'), '{a.dtype}')", a.dtype, a.low, a.high)

    def _binary(self, op: str, a: Value, b: Value, dt: str) -> Value | None:
        match op:
            case "+": return Value(f"({a.text} + {b.text})", dt, a.low + b.low, a.high + b.high)
            case "-": return Value(f"({a.text} - {b.text})", dt, a.low - b.high, a.high - b.low)
            case "*":
                ends = [x * y for x in (a.low, a.high) for y in (b.low, b.high)]
                return Value(f"({a.text} * {b.text})", dt, min(ends), max(ends))
            case "max": return Value(f"T.max({a.text}, {b.text})", dt, max(a.low, b.low), max(a.high, b.high))
            case "min": return Value(f"T.min({a.text}, {b.text})", dt, min(a.low, b.low), min(a.high, b.high))
        low, high = min(a.low, b.low), max(a.high, b.high)
        if op == "select":
            if a.dtype != b.dtype:
                return None
            return Value(f"T.Select({self.condition()}, {a.text}, {b.text})", dt, low, high)
        if self.state.chance(0.4):
            return Value(f"({a.text} if {self.condition()} else {b.text})", dt, low, high)
        return Value(f"T.if_then_else({self.condition()}, {a.text}, {b.text})", dt, low, high)

    def condition(self, depth: int = 1) -> str:
        """A condition on elements, loop variables and scalars."""
        st = self.state
        if depth and st.chance(0.25):
            op = st.pick(["and", "or", "not"])
            self.features.add(f"cond:{op}")
            if op == "not":
                return f"(not {self.condition(depth - 1)})"
            return f"({self.condition(depth - 1)} {op} {self.condition(depth - 1)})"
        a = self.leaf()
        if a.low == a.high:  # a number: Python would decide at once, and the value have the type of one side
            a = Value(f"T.{a.dtype}({a.text})", a.dtype, a.low, a.high)
        if st.chance(0.15) and a.dtype == "int32":
            return f"({a.text} % 2 == {st.between(0, 1)})"
        if st.chance(0.15):
            self.features.add("cond:chain")
            return f"({a.low // 2} <= {a.text} < {a.high // 2 + 1})"
        op = st.pick(["<", "<=", ">", ">=", "==", "!="])
        b = literal(st.between(a.low // 2, a.high // 2 + 1)) if st.chance(0.6) or a.dtype != "int32" else self.leaf()
        dt = promote(a.dtype, b.dtype)
        if dt is None or max(a.bound, b.bound) > EXACT[dt]:
            b = literal(0)
        return f"({a.text} {op} {b.text})"

    def store(self, b: Buf, depth: int) -> str:
        """Text of a value that b may hold."""
        v = self.fit(self.value(depth), b.low, b.high)
        if self.state.chance(0.2) and v.dtype != b.dtype:
            v = cast(v, b.dtype)
        return v.text
