"""Operators on register values, with the integer and float semantics of ir/__init__.py."""

from __future__ import annotations

from tilelang.ir import dtype
from tilelang.ir.dtype import SCALE, float_min
from tilelang.target.llvm_values import Value, operand_text

from .text import Fn, is_literal
from .types import intrinsic, literal, rounded, value_type

_INT = {"add": "add", "sub": "sub", "mul": "mul", "bitand": "and", "bitor": "or", "bitxor": "xor", "shl": "shl"}
_FLOAT = {"add": "fadd", "sub": "fsub", "mul": "fmul", "div": "fdiv"}
_ORDER = {"lt": "lt", "le": "le", "gt": "gt", "ge": "ge"}


def binary(f: Fn, op: str, a: str, b: str, dt: dtype, flags: str = "") -> str:
    """The text of a op b, both of dtype dt; comparisons give i1. flags: fast-math flags of a float operation."""
    ty = value_type(dt)
    if op in _ORDER or op in ("eq", "ne"):
        return compare(f, op, a, b, dt)
    if dt.is_float:
        if op in ("min", "max"):
            best = float_extremum(f, op, a, b, ty)
            return rounded(f, dt, best) if dt.is_float8 else best  # infinities saturate like other results
        # Narrow types are rounded after every operation. A contraction on a processor that computes in them would not be.
        fused = "contract " if dt.bits >= 32 else ""
        return rounded(f, dt, f.let(f"{_FLOAT[op]} {flags}{fused}{ty} {a}, {b}"))
    if op in _INT:
        return f.let(f"{_INT[op]} {ty} {a}, {b}")
    if op == "shr":
        return f.let(f"{'lshr' if dt.is_unsigned else 'ashr'} {ty} {a}, {b}")
    if op in ("min", "max"):
        return intrinsic(f, f"llvm.{'u' if dt.is_unsigned or dt.is_bool else 's'}{op}", ty, a, b)
    return _divide(f, op, f.of(ty, a), f.of(ty, b), dt)


def any_shift(f: Fn, op: str, a: str, b: str, dt: dtype) -> str:
    """a << b or a >> b whose amount may be outside 0 .. bits - 1, which LLVM leaves undefined.

    It counts as unsigned, and all bits but a sign go where it is too large.
    """
    ty, x = value_type(dt), f.of(value_type(dt), b)
    moved = f.of(ty, binary(f, op, a, intrinsic(f, "llvm.umin", ty, b, dt.bits - 1), dt))
    return moved if op == "shr" and dt.is_signed else x.test("ule", dt.bits - 1).select(moved, 0)


def _divide(f: Fn, op: str, a: Value, b: Value, dt: dtype) -> Value:
    """Quotients and remainders.

    Division by zero is undefined in the language but must not stop the process, as x86's instruction would, so the divisor 0
    becomes 1. The least value divided by -1 wraps to itself; x86 would stop there too.
    """
    divisor, negative = b, None
    if not is_literal(b) or b in ("0", "-1"):
        bad = b.test("eq", 0)
        if dt.is_signed:
            negative = b.test("eq", -1)
            bad = bad | negative
        divisor = bad.select(1, b)
    if dt.is_unsigned or dt.is_bool:
        return a.op("udiv" if op.endswith("div") else "urem", divisor)

    def quotient() -> Value:
        q = a.op("sdiv", divisor)
        return q if negative is None else negative.select(0 - a, q)

    if op == "truncdiv":
        return quotient()
    rem = a.op("srem", divisor)
    if op == "truncmod":
        return rem
    # Floor: the truncated result, adjusted by one where the remainder's sign differs from the divisor's.
    off = rem.test("ne", 0) & (rem ^ divisor).test("slt", 0)
    return rem + off.select(divisor, 0) if op == "floormod" else quotient() - off.to("zext", a.ty)


def float_extremum(f: Fn, op: str, a: str, b: str, ty: str) -> str:
    """min or max that gives the other operand when one is NaN.

    Comparison and selects, not llvm.maxnum: LLVM 22 (at -O3) turns a maxnum accumulation into a masked vector reduction
    that loses the last elements (tests/codegen_cpu: maximum over rows of a 5 x 37 tile).  x86 has one instruction for
    the first select.
    """
    x, y = f.of(ty, a), f.of(ty, b)
    best = x.test("ogt" if op == "max" else "olt", y).select(x, y)
    return y.is_nan().select(x, best)


def compare(f: Fn, op: str, a: str, b: str, dt: dtype) -> str:
    """a op b as i1; comparisons with NaN are false, except `ne`."""
    unsigned = dt.is_unsigned or dt.is_bool
    sign = ("u" if op == "ne" else "o") if dt.is_float else "" if op in ("eq", "ne") else "u" if unsigned else "s"
    return f.of(value_type(dt), a).test(sign + op, b)


def negate(f: Fn, a: str, dt: dtype) -> str:
    """The negative of a; integers wrap."""
    x = f.of(value_type(dt), a)
    return rounded(f, dt, -x) if dt.is_float8 else -x if dt.is_float else 0 - x  # infinities of float8 saturate


def invert(f: Fn, a: str, dt: dtype) -> str:
    """`not` of bools, bitwise complement of integers."""
    return f.of(value_type(dt), a) ^ (True if dt.is_bool else -1)


def absolute(f: Fn, a: str, dt: dtype) -> str:
    """The absolute value of a; the least integer wraps to itself."""
    ty = value_type(dt)
    if dt.is_float:
        return intrinsic(f, "llvm.fabs", ty, a)
    return a if dt.is_unsigned or dt.is_bool else intrinsic(f, "llvm.abs", ty, a, arg_tail="i1 false")


def combine(f: Fn, kind: str, a: str, b: str, dt: dtype, reassociate: bool = False) -> str:
    """One step of a reduction or scan of `kind` (sum, max, absmax, bitand, …). For abs kinds, b must be an absolute value
    already."""
    if kind in ("sum", "abssum"):
        if dt.is_bool:
            return f.let(f"or {value_type(dt)} {a}, {b}")
        return binary(f, "add", a, b, dt, "reassoc " if reassociate else "")
    if kind == "prod":
        return binary(f, "mul", a, b, dt, "reassoc " if reassociate else "")
    if kind in ("max", "absmax", "min"):
        return binary(f, "min" if kind == "min" else "max", a, b, dt)
    return binary(f, kind, a, b, dt)


def identity(kind: str, dt: dtype) -> str:
    """The neutral operand of a reduction kind."""
    from_range = {"max": 0, "min": 1}
    if kind in from_range:
        if dt.is_float:
            value = float("inf") if kind == "min" else float_min(dt.base) if dt.base == SCALE else float("-inf")
            return operand_text(value, value_type(dt))
        if dt.is_bool:
            return literal(kind == "min", dt)
        low = 0 if dt.is_unsigned else -(1 << (dt.bits - 1))
        high = (1 << (dt.bits if dt.is_unsigned else dt.bits - 1)) - 1
        return literal(low if kind == "max" else high, dt)
    if kind == "bitand":
        return literal(True, dt) if dt.is_bool else operand_text(-1, value_type(dt))
    return literal(int(kind == "prod"), dt)
