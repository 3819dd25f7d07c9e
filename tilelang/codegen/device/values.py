"""Operators, conversions and vectors in CUDA text.

Vectors are those of the prelude: operators on them are functions of `tl::`, applied lane by lane. Types of 8 bits are computed
in float32, as are 16-bit floats where CUDA has no operator for them.
"""

from __future__ import annotations

from collections.abc import Callable

from tilelang.ir import (Binary, Broadcast, Call, Cast, Const, Expr, Load, Ramp, Select, Shuffle, Unary, binary, const, dtype,
                         is_const, walk, COMPARISONS, GLOBAL, SHARED)
from tilelang.target import INTRINSICS
from tilelang.target.division import reciprocal
from tilelang.target.intrinsics import PURE, READS

from .page import Expressions
from .text import ADD, ATOM, BAND, BOR, BXOR, COND, EQ, LAND, LOR, MUL, POSTFIX, PREFIX, REL, SHIFT, Text
from .types import HALVES, is_small_float, lane_args, literal, type_name

# ---- operators -------------------------------------------------------------------------------------------------------

_BINARY = {"add": ("+", ADD), "sub": ("-", ADD), "mul": ("*", MUL), "div": ("/", MUL), "truncdiv": ("/", MUL),
           "truncmod": ("%", MUL), "shl": ("<<", SHIFT), "shr": (">>", SHIFT), "bitand": ("&", BAND),
           "bitxor": ("^", BXOR), "bitor": ("|", BOR), "lt": ("<", REL), "le": ("<=", REL), "gt": (">", REL),
           "ge": (">=", REL), "eq": ("==", EQ), "ne": ("!=", EQ), "and": ("&&", LAND), "or": ("||", LOR)}
_PLAIN = ATOM, POSTFIX, PREFIX, MUL, ADD  # precedence levels that are clear without parentheses under << & ^ |


def _low_word(e: Expr) -> Expr | None:
    """The 32-bit value that an expression of 64 bits has been widened from; None for others."""
    if isinstance(e, Const):
        return const(e.value, "uint32") if 0 <= e.value < 2**32 else None
    return e.value if isinstance(e, Cast) and e.value.dtype == "uint32" else None


class ScalarOperators:
    """The text of operators that C has, on types that it computes with."""

    def __init__(self, x: Expressions) -> None:
        self.x = x

    def divided(self, x: str, c: Expr) -> str | None:
        """The text of a float32 quotient by a constant that needs no division; None for other divisors."""
        if not isinstance(c, Const) or c.dtype != "float32" or self.x.fast_math or (parts := reciprocal(abs(c.value))) is None:
            return None
        numbers = ", ".join(literal(const(v, "float32"))[0] for v in (abs(c.value), *parts))
        return f"tl::divided_by({f'-({x})' if c.value < 0 else x}, {numbers})"

    def unary(self, e: Unary) -> Text:
        if e.op == "neg" and e.dtype.is_int and e.dtype.bits >= 32 and self.x.facts.from_data(e):
            return self._wrapping(binary("sub", const(0, e.dtype), e.a), "-", const(0, e.dtype), e.a)
        text = {"neg": "-", "not": "!", "bitnot": "~"}[e.op] + self.x.at(e.a, POSTFIX)
        return self.narrow(text, e.dtype) if e.dtype.is_int else (text, PREFIX)

    def binary(self, e: Binary) -> Text:
        symbol, level = _BINARY[e.op]
        if e.op == "div" and (text := self.divided(self.x.top(e.a), e.b)):
            return text, POSTFIX
        if e.op in ("shl", "shr") and not self.x.facts.analyzer.shifts_within(e):
            name = f"tl::shift_{'left' if e.op == 'shl' else 'right'}<{type_name(e.dtype.scalar)}>"
            return self._lanewise(e, lambda a, b: f"{name}({a}, {b})")
        if symbol in ("/", "%") and e.dtype.is_int and (quotient := self.any_quotient(e)):
            return quotient
        if e.op == "mul" and e.dtype == "uint64" and (halves := [_low_word(x) for x in (e.a, e.b)]) and None not in halves:
            return f"tl::wide_product({', '.join(self.x.top(x) for x in halves if x is not None)})", POSTFIX
        if e.op == "mul" and e.dtype.base == "uint16" and not self._multiplies_as_int(e):
            return self._lanewise(e, lambda a, b: f"(unsigned){a} * {b}", MUL, PREFIX, PREFIX)
        if e.op in ("add", "sub", "mul", "shl") and e.dtype.is_signed and e.dtype.bits >= 32 and e.dtype.lanes == 1 \
                and self.x.facts.from_data(e):
            return self._wrapping(e, symbol, e.a, e.b)
        if level in (SHIFT, BAND, BXOR, BOR, LAND):
            a, b = (self._clear(x, level) for x in (e.a, e.b))
        else:
            a, b = self.x.at(e.a, level), self.x.at(e.b, level + 1)
        text = f"{a} {symbol} {b}"
        if e.dtype.is_int and e.op not in COMPARISONS:
            return self.narrow(text, e.dtype, level)
        return text, level

    def _multiplies_as_int(self, e: Binary) -> bool:
        """Whether the multiplication of 16-bit integers fits in int, which C computes it in."""
        highs = [self.x.facts.analyzer.interval(x)[1] or 0 for x in (e.a, e.b)]
        return highs[0] * highs[1] < 2**31 and e.dtype.lanes == 1

    def any_quotient(self, e: Binary) -> Text | None:
        """A quotient or remainder of data that C may leave undefined: by 0, or of the least number by -1. None for others.

        A divisor of 0 counts as 1. Compilers pack narrow quotients into words, where one by 0 would change its neighbours.
        """
        dt, facts, name, mod = e.dtype, self.x.facts, type_name(e.dtype.scalar), e.op.endswith("mod")
        low, high = facts.analyzer.interval(e.b.value if isinstance(e.b, Broadcast) else e.b)
        wide, floor = dt.is_signed and dt.bits >= 32, dt.is_signed and e.op.startswith("floor")
        if low is not None and low > 0 or high is not None and high < (-1 if wide else 0) or (
                None in (low, high) and not facts.from_data(e.b) if dt.bits >= 32 else floor):
            return None  # sizes divide unguarded, and tl::floordiv guards narrow divisors itself
        if wide and not mod:
            return self._lanewise(e, lambda a, b: f"tl::any_{'floordiv' if floor else 'truncdiv'}<{name}>({a}, {b})")
        if floor:
            return self._lanewise(e, lambda a, b: f"tl::floormod<{name}>({a}, tl::any_divisor<{name}>({b}))")
        return self._lanewise(e, lambda a, b: f"{a} {'%' if mod else '/'} tl::{'any_divisor' if wide else 'nonzero'}({b})", MUL,
                              MUL)

    def _lanewise(self, e: Binary, text: Callable[[str, str], str], level: int = POSTFIX, a: int = 0, b: int = 0) -> Text:
        """The text of two operands, of scalars or in every lane of vectors.

        level, a, b: precedence of the text, and the one that it needs of its operands.
        """
        if e.dtype.lanes == 1:
            out = text(self.x.at(e.a, a), self.x.at(e.b, b))
            return (out, level) if level == POSTFIX else self.narrow(out, e.dtype, level)
        name = type_name(e.dtype.scalar)
        return (f"tl::map([]({name} a, {name} b) {{ return ({name})({text('a', 'b')}); }}, {self.x.top(e.a)}, "
                f"{self.x.top(e.b)})"), POSTFIX

    def _clear(self, e: Expr, level: int) -> str:
        """An operand of a shift or bit operator, in parentheses unless it is simple, for the reader."""
        text, own = self.x.expr(e)
        if level == LAND:
            return text if own >= BOR or own == LAND else f"({text})"
        return text if own in (ATOM, POSTFIX, PREFIX) else f"({text})"

    def narrow(self, text: str, dt: dtype, level: int = PREFIX) -> Text:
        """Convert back to a narrow type, so that the result wraps: C computes 8- and 16-bit integers as int."""
        if dt.bits >= 32 or dt.lanes > 1:
            return text, level
        return f"({type_name(dt)})({text})", PREFIX

    def _wrapping(self, e: Expr, symbol: str, a: Expr, b: Expr) -> Text:
        """Signed arithmetic on data, printed as unsigned: it wraps in the language, while C leaves overflow undefined."""
        u = type_name(dtype(f"uint{e.dtype.bits}"))
        right = self.x.at(b, PREFIX) if symbol == "<<" else f"({u}){self.x.at(b, PREFIX)}"
        return f"({type_name(e.dtype)})(({u}){self.x.at(a, PREFIX)} {symbol} {right})", PREFIX


_VECTOR_OPS = {"add": "vec_arithmetic", "sub": "vec_arithmetic", "mul": "vec_arithmetic", "lt": "vec_compare",
               "le": "vec_compare", "gt": "vec_compare", "ge": "vec_compare", "eq": "vec_compare", "ne": "vec_compare",
               "and": "vec_compare", "or": "vec_compare"}
_SHORT = ("exp", "exp2", "fast_exp2", "rsqrt", "fabs", "fma", "sigmoid")  # a few instructions each


class Values:
    """Registers the text of operators, conversions, selections and vectors."""

    def __init__(self, x: Expressions) -> None:
        self.x, self.scalars = x, ScalarOperators(x)
        self._differences: set[tuple[Expr, Expr]] = set()  # operands of the subtractions printed so far
        x.forms.update({Cast: self._convert, Binary: self._binary, Unary: self._unary, Select: self._select,
                        Ramp: self._vector, Broadcast: self._vector, Shuffle: self._vector})

    def _convert(self, e: Cast) -> Text:
        source, to = e.value.dtype, e.dtype
        if to.lanes > 1:
            return self._convert_vector(e)
        name = type_name(to, e.span)
        if source.scalar == to.scalar or {source.base, to.base} == {"float32", "tfloat32"}:
            return self.x.expr(e.value)
        if to.is_int and source.is_float:
            wide = f"(float){self.x.at(e.value, PREFIX)}" if is_small_float(source) else self.x.top(e.value)
            return f"tl::to_int<{name}>({wide})", POSTFIX
        if is_small_float(source) and to != "float32":
            return converted(to, f"(float){self.x.at(e.value, PREFIX)}")
        if is_small_float(to):
            inner = self.x.at(e.value, PREFIX)
            if source.is_bool or (source.is_int and source.bits < 32):
                return f"{name}((float){inner})", POSTFIX
            return f"{name}({self.x.top(e.value)})", POSTFIX
        if to.is_bool:
            return f"{self.x.at(e.value, EQ + 1)} != {self.x.top(const(0, source))}", EQ
        return f"({name}){self.x.at(e.value, PREFIX)}", PREFIX

    def _convert_vector(self, e: Cast) -> Text:
        source, to = e.value.dtype, e.dtype
        value = self.x.top(e.value)
        if source.base in ("float32", "tfloat32") and to.base in HALVES and to.lanes % 2 == 0:
            return f"tl::cast_{'half' if to.base == 'float16' else 'bfloat16'}({value})", POSTFIX
        if source.base == "bfloat16" and to.base == "float32" and to.lanes % 2 == 0:
            return f"tl::float_of_bfloat16({value})", POSTFIX
        name = type_name(to.scalar, e.span)
        if is_small_float(source) and to.base != "float32":
            value = f"tl::cast<float>({value})"
        elif is_small_float(to) and (source.is_bool or (source.is_int and source.bits < 32)):
            value = f"tl::cast<float>({value})"
        return f"tl::{'cast_int' if to.is_int and source.is_float else 'cast'}<{name}>({value})", POSTFIX

    def _binary(self, e: Binary) -> Text:
        if e.a.dtype.lanes > 1 and (signed := self._signed(e)):
            return signed
        if e.a.dtype.lanes > 1 and e.op not in ("min", "max", "floordiv", "floormod"):
            return self._vector_binary(e)
        if e.a.dtype.lanes == 1 and (e.a.dtype.is_float8 or (e.a.dtype.base in HALVES and e.op == "div")):
            wide = Binary(e.op, _as_float(e.a), _as_float(e.b), dtype("float32") if e.dtype.is_float else e.dtype)
            text, level = self._plain(wide)
            return (f"{type_name(e.dtype)}({text})", POSTFIX) if e.dtype.is_float else (text, level)
        return self._signed(e) or self._plain(e)

    def _plain(self, e: Binary) -> Text:
        """The expression without the calls that hide signs."""
        if e.op in ("min", "max"):
            return self._minmax(e)
        return self._floor(e) if e.op in ("floordiv", "floormod") else self.scalars.binary(e)

    def _signed(self, e: Binary | Unary) -> Text | None:
        """The text that hides from LLVM how a sign is computed; None where no sign can be lost.

        LLVM makes abs.s32 of `x < 0 ? -x : x`, of `if (x < 0) x = -x` through variables, of `(x ^ x >> 31) - (x >> 31)` and of
        `a - b < 0 ? b - a : a - b`. ptxas 13.0 assumes that the result is positive, which is false for the least number. An
        empty asm behind one operand of each prevents the rewriting, and costs nothing where it stands alone.
        """
        dt = e.dtype
        if not (dt.is_int and dt.bits in (8, 16, 32, 64)):
            return None
        x = _negated_value(e)
        if x is not None:
            facts = self.x.facts
            return self._hidden("negated", x) if dt.bits < 32 or facts.from_data(x) and not facts.above_least(x) else None
        if dt.bits < 32 or not isinstance(e, Binary) or e.op not in ("shr", "sub") or not self.x.facts.from_data(e.a):
            return None
        if e.op == "shr":
            return self._hidden("sign_bits", e.a) if dt.is_signed and _is_number(e.b, dt.bits - 1) else None
        if dt.lanes > 1 or (e.b, e.a) not in self._differences:
            self._differences.add((e.a, e.b))
            return None
        return self._hidden("negated", Binary("sub", e.b, e.a, dt))

    def _hidden(self, function: str, x: Expr) -> Text:
        if x.dtype.lanes > 1:
            return f"tl::map([](auto x) {{ return tl::{function}(x); }}, {self.x.top(x)})", POSTFIX
        return f"tl::{function}({self.x.top(x)})", POSTFIX

    def _vector_binary(self, e: Binary) -> Text:
        dt = e.a.dtype
        if dt.is_float8 or (dt.base in HALVES and e.op == "div"):
            wide = dtype("float32").with_lanes(dt.lanes)
            inner = Binary(e.op, Cast(e.a, wide), Cast(e.b, wide), wide if e.dtype.is_float else e.dtype)
            return self.x.expr(Cast(inner, e.dtype) if e.dtype.is_float else inner)
        if e.op == "div" and isinstance(e.b, Broadcast) and (text := self.scalars.divided("x", e.b.value)):
            return f"tl::map([](auto x) {{ return {text}; }}, {self.x.top(e.a)})", POSTFIX
        section = _VECTOR_OPS.get(e.op, "vec_bits")
        self.x.page.sections.add(section)
        if section == "vec_arithmetic" and dt.base in HALVES and dt.lanes % 2 == 0:
            self.x.page.sections.add("vec_half" if dt.base == "float16" else "vec_bfloat16")
        return self._plain(e)

    def _unary(self, e: Unary) -> Text:
        if text := self._signed(e):
            return text
        if e.dtype.lanes > 1:
            symbol = {"neg": "-", "not": "!", "bitnot": "~"}[e.op]
            result = converted(e.dtype.scalar, symbol + _operand(e.dtype.scalar, "x"))[0]
            return f"tl::map([](auto x) {{ return {result}; }}, {self.x.top(e.a)})", POSTFIX
        if e.dtype.is_float8:
            return f"{type_name(e.dtype)}(-(float){self.x.at(e.a, PREFIX)})", POSTFIX
        return self.scalars.unary(e)

    def _minmax(self, e: Binary) -> Text:
        dt, f = e.dtype.scalar, e.op
        if dt.base in ("float32", "tfloat32", "float64"):
            name = f"f{f}" + ("" if dt == "float64" else "f")
        elif dt.base in HALVES:
            name = f"__h{f}"
        elif dt.is_float8:
            name = f"f{f}f"
        else:
            name = f
        if e.dtype.lanes > 1:
            result = converted(dt, f"{name}({_operand(dt, 'a')}, {_operand(dt, 'b')})")[0]
            return f"tl::map([](auto a, auto b) {{ return {result}; }}, {self.x.top(e.a)}, {self.x.top(e.b)})", POSTFIX
        if dt.is_float8:
            return converted(dt, f"{name}((float){self.x.at(e.a, PREFIX)}, (float){self.x.at(e.b, PREFIX)})")
        if dt.is_bool:
            return self.x.expr(Binary("and" if f == "min" else "or", e.a, e.b, dt))
        return self.scalars.narrow(f"{name}({self.x.top(e.a)}, {self.x.top(e.b)})", dt, POSTFIX) if dt.is_int else \
            (f"{name}({self.x.top(e.a)}, {self.x.top(e.b)})", POSTFIX)

    def _floor(self, e: Binary) -> Text:
        """Floor division and remainder: shift and mask for powers of two (correct for any sign), C's operators where the
        operands are not negative, otherwise a function."""
        quotient = e.op == "floordiv"
        if e.dtype.lanes == 1 and isinstance(e.b, Const) and e.b.value > 0 and e.b.value & (e.b.value - 1) == 0:
            shift = e.b.value.bit_length() - 1
            other = const(shift if quotient else e.b.value - 1, e.dtype)
            return self.x.expr(Binary("shr" if quotient else "bitand", e.a, other, e.dtype))
        if e.dtype.lanes == 1 and (e.dtype.is_unsigned or (self.x.facts.not_negative(e.a) and self.x.facts.not_negative(e.b))):
            return self.x.expr(Binary("truncdiv" if quotient else "truncmod", e.a, e.b, e.dtype))
        return self._floor_call(e)

    def _floor_call(self, e: Binary) -> Text:
        if text := self.scalars.any_quotient(e):
            return text
        ctype = type_name(e.dtype.scalar)
        if e.dtype.lanes > 1:
            return (f"tl::map([](auto a, auto b) {{ return tl::{e.op}<{ctype}>(a, b); }}, {self.x.top(e.a)}, "
                    f"{self.x.top(e.b)})"), POSTFIX
        return f"tl::{e.op}<{ctype}>({self.x.top(e.a)}, {self.x.top(e.b)})", POSTFIX

    def _vector(self, e: Expr) -> Text:
        if isinstance(e, Broadcast):
            return f"tl::splat<{lane_args(e.dtype)}>({self.x.top(e.value)})", POSTFIX
        if isinstance(e, Ramp):
            return f"tl::ramp<{lane_args(e.dtype)}>({self.x.top(e.base)}, {self.x.top(e.stride)})", POSTFIX
        if isinstance(e, Shuffle):
            lanes = [(v, k) for v in e.vectors for k in range(v.dtype.lanes)]
            picked = [self._lane(*lanes[i]) for i in e.indices]
            return (picked[0], POSTFIX) if e.dtype.lanes == 1 else \
                (f"{type_name(e.dtype)}{{{{{', '.join(picked)}}}}}", POSTFIX)
        return (f"tl::map([](bool c, auto a, auto b) {{ return c ? a : b; }}, {self.x.top(e.cond)}, "  # type: ignore[attr-defined]
                f"{self.x.top(e.a)}, {self.x.top(e.b)})"), POSTFIX  # type: ignore[attr-defined]

    def _lane(self, v: Expr, k: int) -> str:
        return f"{self.x.at(v, POSTFIX)}.v[{k}]" if v.dtype.lanes > 1 else self.x.top(v)

    def _select(self, e: Select) -> Text:
        if e.cond.dtype.lanes > 1:
            return self._vector(e)
        if not e.lazy and (_acts(e.a) or _acts(e.b)) or e.lazy and self._branches(e):
            return self._select_both(e)
        cond = self.x.condition(e, self.x.at(e.cond, LOR))
        if e.dtype.lanes > 1 and e.dtype.bits == 8 and e.lazy and _is_number(e.b, 0) and isinstance(e.a, Load):
            loaded = self.x.top(e.a)
            if loaded.startswith("tl::load<"):  # whole words: the compiler would choose byte by byte, and join them again
                return loaded.replace("tl::load<", "tl::load_if<", 1).replace("(", f"({cond}, ", 1), POSTFIX
        return f"{cond} ? {self.x.at(e.a, LOR)} : {self.x.at(e.b, COND)}", COND

    def _branches(self, e: Select) -> bool:
        """Whether the device compiler would jump around an operand that can always be evaluated: a function or a load from
        shared memory costs less than the branch, which also keeps the elements of a loop from running side by side."""
        parts = [*walk(e.a), *walk(e.b)]
        loads = [x for x in parts if isinstance(x, Load)]
        calls = [x for x in parts if isinstance(x, Call)]
        shared = any(x.buffer.scope_name in SHARED for x in loads)
        if not e.dtype.is_float or e.dtype.lanes > 1 or not calls and not shared:
            return False
        return len(calls) <= 2 and all(x.op in _SHORT for x in calls) and all(map(self._inside, loads)) and not any(
            isinstance(x, Binary) and x.op.endswith(("div", "mod")) and not isinstance(x.b, Const) for x in parts)

    def _inside(self, x: Load) -> bool:
        """Whether a load is of a shared or private buffer and certainly inside it."""
        if x.buffer.scope_name == GLOBAL or len(x.indices) != 1 or x.dtype.lanes > 1 or not x.buffer.is_static:
            return False
        return self.x.facts.inside(x.indices[0], x.buffer.size)

    def _select_both(self, e: Select) -> Text:
        t, (cond, a, b) = type_name(e.dtype), map(self.x.top, (e.cond, e.a, e.b))
        return f"tl::select_both<{t}>{{{cond}, ({t})({a}), ({t})({b})}}.pick()", POSTFIX


def converted(dt: dtype, text: str) -> Text:
    """The text converted to a scalar type. Types of two words have no function form in C++."""
    name = type_name(dt)
    return (f"({name})({text})", PREFIX) if " " in name else (f"{name}({text})", POSTFIX)


def _acts(e: Expr) -> bool:
    """Whether evaluating e has an effect: exchange between lanes, writes, synchronisation."""
    rows = (INTRINSICS.get(x.op) for x in walk(e, Call))
    return any(row is None or row.effect not in (PURE, READS) for row in rows)


def _is_number(e: Expr, *values: int) -> bool:
    """Whether e is one of these numbers, in every lane."""
    return any(is_const(e.value if isinstance(e, Broadcast) else e, v) for v in values)


def _negated_value(e: Binary | Unary) -> Expr | None:
    """x where e is -x, 0 - x, x * -1, x // -1 or ~x + 1."""
    if isinstance(e, Unary):
        return e.a if e.op == "neg" else None
    if e.op in ("floordiv", "truncdiv"):
        return e.a if e.dtype.is_signed and _is_number(e.b, -1) else None
    minus_one = (-1, (1 << e.dtype.bits) - 1)
    for a, b in ((e.a, e.b), (e.b, e.a)):
        if e.op == "mul" and _is_number(a, *minus_one) or e.op == "sub" and a is e.a and _is_number(a, 0):
            return b
        if e.op == "add" and _is_number(a, 1) and isinstance(b, Unary) and b.op == "bitnot":
            return b.a
    return None


def _operand(dt: dtype, name: str) -> str:
    return f"(float){name}" if dt.is_float8 else name


def _as_float(e: Expr) -> Expr:
    return Cast(e, dtype("float32"))
