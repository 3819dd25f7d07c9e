"""Operators on register values, with the integer and float semantics of ir/__init__.py."""

from __future__ import annotations

from tilelang.ir import dtype
from tilelang.ir.dtype import SCALE, float_min

from .text import Fn, is_literal
from .types import float_literal, intrinsic, literal, rounded, splat, value_type

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
    return _divide(f, op, a, b, ty, dt)


def any_shift(f: Fn, op: str, a: str, b: str, dt: dtype) -> str:
    """a << b or a >> b whose amount may be outside 0 .. bits - 1, which LLVM leaves undefined.

    It counts as unsigned, and all bits but a sign go where it is too large.
    """
    ty, most = value_type(dt), splat(str(dt.bits - 1), value_type(dt))
    by = intrinsic(f, "llvm.umin", ty, b, most)
    moved = binary(f, op, a, by, dt)
    if op == "shr" and dt.is_signed:
        return moved
    inside = f.let(f"icmp ule {ty} {b}, {most}")
    return f.let(f"select {value_type(dtype('bool').with_lanes(dt.lanes))} {inside}, {ty} {moved}, {ty} {splat('0', ty)}")


def _divide(f: Fn, op: str, a: str, b: str, ty: str, dt: dtype) -> str:
    """Quotients and remainders.

    Division by zero is undefined in the language but must not stop the process, as x86's instruction would, so the divisor 0
    becomes 1. The least value divided by -1 wraps to itself; x86 would stop there too.
    """
    mask = value_type(dtype("bool").with_lanes(dt.lanes))
    one, zero, minus = splat("1", ty), splat("0", ty), splat("-1", ty)
    constant = is_literal(b) and b not in ("0", "-1")
    divisor, negative = b, ""
    if not constant:
        bad = f.let(f"icmp eq {ty} {b}, {zero}")
        if dt.is_signed:
            negative = f.let(f"icmp eq {ty} {b}, {minus}")
            bad = f.let(f"or {mask} {bad}, {negative}")
        divisor = f.let(f"select {mask} {bad}, {ty} {one}, {ty} {b}")
    if dt.is_unsigned or dt.is_bool:
        return f.let(f"{'udiv' if op.endswith('div') else 'urem'} {ty} {a}, {divisor}")

    def quotient() -> str:
        q = f.let(f"sdiv {ty} {a}, {divisor}")
        if not negative:
            return q
        return f.let(f"select {mask} {negative}, {ty} {f.let(f'sub {ty} {zero}, {a}')}, {ty} {q}")

    if op == "truncdiv":
        return quotient()
    rem = f.let(f"srem {ty} {a}, {divisor}")
    if op == "truncmod":
        return rem
    # Floor: the truncated result, adjusted by one where the remainder's sign differs from the divisor's.
    some = f.let(f"icmp ne {ty} {rem}, {zero}")
    signs = f.let(f"icmp slt {ty} {f.let(f'xor {ty} {rem}, {divisor}')}, {zero}")
    off = f.let(f"and {mask} {some}, {signs}")
    if op == "floormod":
        return f.let(f"add {ty} {rem}, {f.let(f'select {mask} {off}, {ty} {divisor}, {ty} {zero}')}")
    return f.let(f"sub {ty} {quotient()}, {f.let(f'zext {mask} {off} to {ty}')}")


def float_extremum(f: Fn, op: str, a: str, b: str, ty: str) -> str:
    """min or max that gives the other operand when one is NaN.

    Comparison and selects, not llvm.maxnum: LLVM 22 (at -O3) turns a maxnum accumulation into a masked vector reduction
    that loses the last elements (tests/codegen_cpu: maximum over rows of a 5 x 37 tile).  x86 has one instruction for
    the first select.
    """
    mask = ty.replace("float", "i1").replace("double", "i1")
    better = f.let(f"fcmp {'ogt' if op == 'max' else 'olt'} {ty} {a}, {b}")
    best = f.let(f"select {mask} {better}, {ty} {a}, {ty} {b}")
    nan = f.let(f"fcmp uno {ty} {b}, {b}")
    return f.let(f"select {mask} {nan}, {ty} {a}, {ty} {best}")


def compare(f: Fn, op: str, a: str, b: str, dt: dtype) -> str:
    """a op b as i1; comparisons with NaN are false, except `ne`."""
    ty = value_type(dt)
    if dt.is_float:
        return f.let(f"fcmp {'une' if op == 'ne' else 'o' + op} {ty} {a}, {b}")
    if op in ("eq", "ne"):
        return f.let(f"icmp {op} {ty} {a}, {b}")
    return f.let(f"icmp {'u' if dt.is_unsigned or dt.is_bool else 's'}{op} {ty} {a}, {b}")


def negate(f: Fn, a: str, dt: dtype) -> str:
    """The negative of a; integers wrap."""
    ty = value_type(dt)
    if dt.is_float8:  # infinities saturate like other results
        return rounded(f, dt, f.let(f"fneg {ty} {a}"))
    return f.let(f"fneg {ty} {a}") if dt.is_float else f.let(f"sub {ty} {splat('0', ty)}, {a}")


def invert(f: Fn, a: str, dt: dtype) -> str:
    """`not` of bools, bitwise complement of integers."""
    ty = value_type(dt)
    return f.let(f"xor {ty} {a}, {splat('true' if dt.is_bool else '-1', ty)}")


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
            return splat(float_literal(value, dt.bits == 64), value_type(dt))
        if dt.is_bool:
            return literal(kind == "min", dt)
        low = 0 if dt.is_unsigned else -(1 << (dt.bits - 1))
        high = (1 << (dt.bits if dt.is_unsigned else dt.bits - 1)) - 1
        return literal(low if kind == "max" else high, dt)
    if kind == "bitand":
        return literal(True, dt) if dt.is_bool else splat("-1", value_type(dt))
    return literal(int(kind == "prod"), dt)
