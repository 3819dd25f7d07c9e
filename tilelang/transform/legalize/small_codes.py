"""Values of types narrower than a byte: the type that holds one, and its 4-bit code."""

from __future__ import annotations

from tilelang.ir import Const, Expr, Shuffle, binary, call, cast, const, dtype, select

# The type that holds one value outside packed memory; it represents every value of the narrow type.
WIDE = {"int4": "int8", "uint4": "uint8", "float4_e2m1fn": "float16"}
_FP4_STEPS = ((">", 0.25, 0.5), (">=", 0.75, 0.5), (">", 1.25, 0.5), (">=", 1.75, 0.5), (">", 2.5, 1.0), (">=", 3.5, 1.0),
              (">", 5.0, 2.0))  # each step of the rounding to nearest even, and how much it adds


def is_pair(dt: dtype) -> bool:
    """Whether an element is a byte of two fp4 values."""
    return dt.base == "float4_e2m1fn" and dt.lanes == 2


def lanes_of(value: Expr) -> tuple[Expr, ...]:
    """The values of a vector."""
    return tuple(Shuffle((value,), (k,), value.dtype.scalar) for k in range(value.dtype.lanes))


def wide(dt: dtype) -> dtype:
    """The type that holds a narrow one's values."""
    return dtype(WIDE[dt.base]).with_lanes(dt.lanes)


def value_of(nibble: Expr, narrow: dtype) -> Expr:
    """The value of a 4-bit code (uint8, 0..15)."""
    if narrow == "uint4":
        return nibble
    if narrow == "int4":
        return binary("shr", binary("shl", cast(nibble, "int8"), const(4, "int8")), const(4, "int8"))
    # e2m1 as the top bits of a float16 whose exponent is 14 too small: subnormals come out right.
    code = cast(nibble, "uint16")
    low = binary("shl", binary("bitand", code, const(7, "uint16")), const(9, "uint16"))
    sign = binary("shl", binary("bitand", code, const(8, "uint16")), const(12, "uint16"))
    bits = binary("bitor", low, sign)
    return binary("mul", call("reinterpret", (bits,), dtype("float16")), const(16384.0, "float16"))


def code_of(value: Expr, narrow: dtype) -> Expr:
    """The 4-bit code (uint8, 0..15) of a value of the narrow type, held in its wide type."""
    if narrow.is_int:
        return binary("bitand", cast(value, "uint8"), const(15, "uint8"))
    bits = call("reinterpret", (binary("mul", value, const(1 / 16384.0, "float16")),), dtype("uint16"))
    low = binary("bitand", binary("shr", bits, const(9, "uint16")), const(7, "uint16"))
    sign = binary("bitand", binary("shr", bits, const(12, "uint16")), const(8, "uint16"))
    return cast(binary("bitor", low, sign), "uint8")


def fitted(value: Expr, narrow: dtype) -> Expr:
    """A value converted to the range of the narrow type: wrapped (integers; floats truncate first), or rounded to nearest even
    and saturated (fp4; NaN becomes zero)."""
    out = wide(narrow)
    if narrow.lanes > 1:
        whole = value if value.dtype.lanes > 1 else None
        each = lanes_of(whole) if whole is not None else (value,) * narrow.lanes
        return Shuffle(tuple(fitted(v, narrow.scalar) for v in each), tuple(range(narrow.lanes)), out)
    if isinstance(value, Const) and narrow.base != "float4_e2m1fn":
        value = const(int(value.value), "int64")
    if narrow.base == "int4":
        four = const(4, "int8")
        return binary("shr", binary("shl", cast(value, out), four), four)
    if narrow.base == "uint4":
        return binary("bitand", cast(value, out), const(15, out))
    x = cast(value, "float32")
    size = call("fabs", (x,), dtype("float32"))
    total: Expr = const(0.0, "float32")
    for test, limit, step in _FP4_STEPS:
        op = "gt" if test == ">" else "ge"
        total = binary("add", total, select(binary(op, size, const(limit, "float32")), const(step, "float32"),
                                            const(0.0, "float32")))
    signed = call("copysign", (total, x), dtype("float32"))
    return cast(signed, out)
