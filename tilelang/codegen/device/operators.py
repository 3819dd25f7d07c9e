"""C operators on scalars."""

from __future__ import annotations

from collections.abc import Callable

from tilelang.ir import COMPARISONS, Binary, Broadcast, Const, Expr, Unary, binary, const, dtype

from tilelang.target.division import reciprocal

from .page import Expressions
from .text import ADD, ATOM, BAND, BOR, BXOR, EQ, LAND, LOR, MUL, POSTFIX, PREFIX, REL, SHIFT, Text
from .types import literal, type_name

_BINARY = {"add": ("+", ADD), "sub": ("-", ADD), "mul": ("*", MUL), "div": ("/", MUL), "truncdiv": ("/", MUL),
           "truncmod": ("%", MUL), "shl": ("<<", SHIFT), "shr": (">>", SHIFT), "bitand": ("&", BAND),
           "bitxor": ("^", BXOR), "bitor": ("|", BOR), "lt": ("<", REL), "le": ("<=", REL), "gt": (">", REL),
           "ge": (">=", REL), "eq": ("==", EQ), "ne": ("!=", EQ), "and": ("&&", LAND), "or": ("||", LOR)}
_PLAIN = ATOM, POSTFIX, PREFIX, MUL, ADD  # precedence levels that are clear without parentheses under << & ^ |


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
