"""C operators on scalars."""

from __future__ import annotations

from tilelang.ir import COMPARISONS, Binary, Const, Expr, Unary, binary, const, dtype

from tilelang.target.division import reciprocal

from .expressions import Expressions
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
        if e.op in ("add", "sub", "mul", "shl") and e.dtype.is_signed and e.dtype.bits >= 32 and e.dtype.lanes == 1 \
                and self.x.facts.from_data(e):
            return self._wrapping(e, symbol, e.a, e.b)
        if level in (SHIFT, BAND, BXOR, BOR, LAND):
            a, b = (self._clear(x, level) for x in (e.a, e.b))
        else:
            a, b = self.x.at(e.a, level), self.x.at(e.b, level + 1)
        if symbol in ("/", "%") and e.dtype.is_int:
            b = self._divisor(e.b, b)
        text = f"{a} {symbol} {b}"
        if e.dtype.is_int and e.op not in COMPARISONS:
            return self.narrow(text, e.dtype, level)
        return text, level

    def _divisor(self, e: Expr, text: str) -> str:
        """The divisor, made safe: narrow quotients are packed into words as if they could not overflow, and one by 0 would
        change its neighbours."""
        narrow = e.dtype.lanes == 1 and e.dtype.bits < 32
        return f"tl::nonzero({self.x.top(e)})" if narrow and not (isinstance(e, Const) and e.value) else text

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


__all__ = ["ScalarOperators"]
