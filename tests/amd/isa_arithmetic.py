"""What the tables' functions compute, over NumPy arrays (one number a lane) or integers of scalar rows.

Sources: the pseudo code of chapter "Instructions" of the CDNA3 Instruction Set Architecture Reference Guide (AMD).  v_exp,
v_log, v_rcp, v_rsq, v_sqrt, v_sin and v_cos are approximations there (1 unit in the last place); here the nearest number stands
for them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

F16, F32, F64 = np.float16, np.float32, np.float64
I16, I32, I64 = np.int16, np.int32, np.int64
U8, U16, U32, U64 = np.uint8, np.uint16, np.uint32, np.uint64
M32, M64 = (1 << 32) - 1, (1 << 64) - 1
where, minimum, maximum = np.where, np.minimum, np.maximum
floor, ceil, trunc, rint, exp2, log2, sqrt = np.floor, np.ceil, np.trunc, np.rint, np.exp2, np.log2, np.sqrt
Array = Any
LANES = np.arange(64)

# Short functions of the tables, over arrays (lowest and s64: over integers).
SMALL: dict[str, Callable[..., Any]] = {
    "s64": lambda value: value - (value >> 63 << 64),
    "lowest": lambda value: (value & -value).bit_length() - 1,
    "u24": lambda a: (a & 0xFFFFFF).astype(U64),
    "i24": lambda a: (a << 8).view(I32).astype(I64) >> I64(8),
    "bits": lambda n: (U32(1) << n) - U32(1),
    "leading": lambda a: where(a == 0, -1, 32 - np.frexp(a.astype(F64))[1]),  # zeros in front of the first one
    "bit_count": lambda a: np.bitwise_count(a).astype(U32),
    "below": lambda first: ((1 << (LANES - first).clip(0, 32)) - 1).astype(U32),  # of each lane, those before it
    "carry": lambda total: (total.astype(U32), total >> U64(32) != 0),
    "carry64": lambda product, c: (product + c, product + c < product),
    "pack": lambda low, high: low.view(U16).astype(U32) | high.view(U16).astype(U32) << 16,
    "two": lambda low, high: (low.view(U32).astype(U64) | high.view(U32).astype(U64) << U64(32)).view(F64),
    "median": lambda a, b, c: (fmax(fmin(a, b), fmin(fmax(a, b), c)) if a.dtype.kind == "f" else
                               maximum(minimum(a, b), minimum(maximum(a, b), c))),
    "ldexp": lambda a, b: np.ldexp(a.astype(F64), b.astype(I32).clip(-4000, 4000)).astype(a.dtype),
    "fract": lambda a: minimum(a - floor(a), np.nextafter(a.dtype.type(1), a.dtype.type(0))),
    "exponent": lambda a: where(np.isfinite(a), np.frexp(a)[1], 0),
    "mantissa": lambda a: where(np.isfinite(a), np.frexp(a)[0], a),
    "reciprocal": lambda a: 1.0 / a,
    "rsqrt": lambda a: 1.0 / np.sqrt(a),
    "sin": lambda turns: np.sin(2 * np.pi * turns),
    "cos": lambda turns: np.cos(2 * np.pi * turns),
    "turns": lambda function, a: function(a.astype(F64) - floor(a.astype(F64))).astype(a.dtype),
    "ashr_pack": lambda a, b, c, low, high: ((a >> (c & 31).astype(I32)).clip(low, high) & 255 |
                                             ((b >> (c & 31).astype(I32)).clip(low, high) & 255) << 8).astype(U16),
    "add_bf16": lambda a, b: to_bf16(from_bf16(a) + from_bf16(b)),
    "dot2_f16": lambda a, b, c: dot2(a, b, c, lambda halves: halves.view(F16)),
    "dot2_bf16": lambda a, b, c: dot2(a, b, c, from_bf16),
    "insert_byte": lambda value, n, word: word & ~(U32(255) << 8 * (n & 3)) | value.astype(U32) << 8 * (n & 3),
    "differences": lambda a, b, width: np.abs(parts(a, width, False) - parts(b, width, False)).sum(axis=0).astype(U32),
}

# ---- integers of scalar rows ---------------------------------------------------------------------------------------------


def s(value: int) -> int:
    value &= M32
    return value - (value >> 31 << 32)


def field(value: int, low: int, width: int) -> int:
    return value >> low & ((1 << width) - 1)


def signed_field(value: int, low: int, width: int) -> int:
    found = field(value, low, width)
    return found - (found >> (width - 1) << width) if width else 0


def sign_run(value: int, width: int) -> int:
    """Place, from the top, of the first bit that differs from the sign; -1 if none does."""
    flipped = value ^ ((1 << width) - 1) if value >> (width - 1) else value
    return width - flipped.bit_length() if flipped else -1


def bit_field(a: Array, low: Array, width: Array) -> Array:
    left = (32 - width.astype(I64)).clip(0, 63)
    return where(width == 0, 0, (a.astype(I64) >> low.astype(I64)) << (32 + left) >> (32 + left))


def reverse(a: Array) -> Array:
    for n, mask in ((1, 0x55555555), (2, 0x33333333), (4, 0x0F0F0F0F), (8, 0x00FF00FF), (16, 0x0000FFFF)):
        a = (a >> n & mask) | (a & mask) << n
    return a


def parts(a: Array, width: int, signed: bool) -> Array:
    """The fields of words, lowest first, along a new first axis."""
    low = np.stack([a >> n & ((1 << width) - 1) for n in range(0, 32, width)]).astype(I64)
    return low - (low >> (width - 1) << width) if signed else low


def dot_int(a: Array, b: Array, c: Array, width: int, signed: bool) -> Array:
    return (parts(a, width, signed) * parts(b, width, signed)).sum(axis=0) + c.astype(I64)


def permute_bytes(a: Array, b: Array, select: Array) -> Array:
    a, b, select = np.broadcast_arrays(a, b, select)
    both = b.astype(U64) | a.astype(U64) << U64(32)
    result = np.zeros(both.shape, U64)
    for n in range(4):
        code = (select >> 8 * n & 255).astype(U64)
        signs = (both >> ((code & U64(3)) * U64(16) + U64(15)) & U64(1)) * U64(255)
        byte = where(code < 8, both >> (code & U64(7)) * U64(8) & U64(255), where(code < 12, signs, where(code == 12, 0, 255)))
        result |= byte.astype(U64) << U64(8 * n)
    return result.astype(U32)


def bitop3(a: Array, b: Array, c: Array, table: int) -> Array:
    result = a & b & c & 0
    for n in range(8):
        if table >> n & 1:
            result = result | (a if n & 4 else ~a) & (b if n & 2 else ~b) & (c if n & 1 else ~c)
    return result


def swap_rows(d: Array, a: Array, size: int) -> tuple[Array, Array]:
    """Exchange the odd groups of `size` lanes of the destination with the even groups of the source."""
    odd = LANES // size % 2 == 1
    return where(odd, a[LANES ^ size], d), where(odd, a, d[LANES ^ size])


def fma(a: Array, b: Array, c: Array) -> Array:
    """a * b + c rounded once: the sum in double precision, rounded to odd, then rounded to the type."""
    return fma64(a, b, c) if a.dtype == F64 else fused_odd(a, b, c).astype(a.dtype)


def fused_odd(a: Array, b: Array, c: Array) -> Array:
    """a * b + c of narrow floats as a double rounded to odd: rounding that to the type is one rounding."""
    p, q = a.astype(F64) * b, c.astype(F64)
    total = p + q
    back = total - p
    error = (p - (total - back)) + (q - back)
    fix = (error != 0) & np.isfinite(total) & (total.view(I64) & 1 == 0)
    if fix.any():
        away = where((error > 0) == (total > 0), 1, -1)
        total = where(fix, total.view(I64) + away, total.view(I64)).view(F64)
    return total


def _product(a: Array, b: Array) -> tuple[Array, Array]:
    """a * b as a sum of two doubles (Dekker)."""
    p = a * b
    high = [v * 134217729.0 - (v * 134217729.0 - v) for v in (a, b)]
    low = [a - high[0], b - high[1]]
    return p, ((high[0] * high[1] - p) + high[0] * low[1] + low[0] * high[1]) + low[0] * low[1]


def _sum(a: Array, b: Array) -> tuple[Array, Array]:
    total = a + b
    back = total - a
    return total, (a - (total - back)) + (b - back)


def fma64(a: Array, b: Array, c: Array) -> Array:
    """By error-free transformations and one addition rounded to odd (Boldo and Melquiond); exact but for extreme exponents."""
    high, low = _product(a, b)
    t, rest = _sum(c, low)
    v, w = _sum(high, t)
    z, error = _sum(rest, w)
    fix = (error != 0) & (z.view(I64) & 1 == 0)
    z = where(fix, z.view(I64) + where((error > 0) == (z > 0), 1, -1), z.view(I64)).view(F64)
    result = v + z
    return where(np.isfinite(result), result, a * b + c)


def fmax(a: Array, b: Array) -> Array:
    return where((a == 0) & (b == 0), a + b, np.fmax(a, b))


def fmin(a: Array, b: Array) -> Array:
    return where((a == 0) & (b == 0), -((-a) + (-b)), np.fmin(a, b))


def flush(a: Array) -> Array:
    """Subnormal numbers become zeros of their sign."""
    return where(np.abs(a) < np.finfo(a.dtype).tiny, np.copysign(a.dtype.type(0), a), a)


def near(function: Callable[[Array], Array], a: Array) -> Array:
    """The nearest number of the type; those of 32 bits read and give no subnormals."""
    if a.dtype == F32:
        return flush(function(flush(a).astype(F64)).astype(F32))
    return function(a.astype(F64)).astype(a.dtype)


def to_int(a: Array, of: type) -> Array:
    """Toward zero, to the nearest number the integer type has; NaN is 0."""
    limits = np.iinfo(of)
    return np.nan_to_num(trunc(a.astype(F64)), nan=0.0).clip(limits.min, limits.max).astype(I64).astype(of)


def toward_zero(a: Array) -> Array:
    nearest = a.astype(F16)
    beyond = np.abs(nearest.astype(F64)) > np.abs(a.astype(F64))
    return where(beyond & np.isfinite(a), (nearest.view(U16) - U16(1)).view(F16), nearest)


def to_bf16(a: Array) -> Array:
    word = a.view(U32)
    rounded = (word + 0x7FFF + (word >> 16 & 1)) >> 16
    return where(np.isnan(a), word >> 16 | 0x40, rounded).astype(U16)


def from_bf16(a: Array) -> Array:
    return (a.astype(U32) << 16).view(F32)


def dot2(a: Array, b: Array, c: Array, convert: Callable[[Array], Array]) -> Array:
    """Two products and the addend, rounded once (the guide leaves the rounding open)."""
    x, y = ([convert((v >> n & 0xFFFF).astype(U16)).astype(F64) for n in (0, 16)] for v in (a, b))
    return (x[0] * y[0] + x[1] * y[1] + c.astype(F64)).astype(F32)


def in_class(a: Array, wanted: Array) -> Array:
    """v_cmp_class: bits for signalling and quiet NaN, -inf, -normal, -subnormal, -0, +0, +subnormal, +normal, +inf."""
    negative, size = np.signbit(a), np.abs(a)
    quiet_bit = {F16: 1 << 9, F32: 1 << 22, F64: 1 << 51}[a.dtype.type]
    quiet = a.view({2: U16, 4: U32, 8: U64}[a.dtype.itemsize]) & quiet_bit != 0
    kind = where(np.isinf(a), 0, where(size >= np.finfo(a.dtype).tiny, 1, where(size > 0, 2, 3)))
    place = where(np.isnan(a), where(quiet, 1, 0), where(negative, 2 + kind, 9 - kind))
    return wanted >> place.astype(U32) & 1 != 0


def div_scale(a: Array, b: Array, c: Array) -> tuple[Array, Array]:
    """Pseudo code of V_DIV_SCALE: scale the operand a (b, the denominator, or c, the numerator) of a quotient c / b."""
    a, b, c = np.broadcast_arrays(a, b, c)
    up, far, tiny = (64, 96, 23) if a.dtype == F32 else (128, 768, 53)
    bias = 126 if a.dtype == F32 else 1022
    eb, ec = (np.frexp(v)[1] + bias for v in (b, c))
    small = np.finfo(a.dtype).tiny
    subnormal = [(np.abs(v) < small) & (v != 0) for v in (b, 1.0 / b, c / b)]
    zero, wide = (b == 0) | (c == 0), ec - eb >= far
    rules = [(zero, None, False), (wide, a == b, True), (subnormal[0], None, False),
             (subnormal[1] & subnormal[2], a == b, True), (subnormal[1], None, False),
             (subnormal[2], a == c, True), (ec <= tiny, None, False)]
    result, flags, done = a.copy(), np.zeros(a.shape, bool), np.zeros(a.shape, bool)
    for number, (when, only, flag) in enumerate(rules):
        now = when & ~done
        scaled = np.full_like(a, np.nan) if number == 0 else np.ldexp(a, -up if number == 4 else up)
        result = where(now if only is None else now & only, scaled, result)
        flags |= now & flag
        done |= when
    return result, flags


def div_fmas(a: Array, b: Array, c: Array, scaled: Array) -> Array:
    """a * b + c, and where the lane's mask is set the scale of v_div_scale taken back: up for a quotient c >= 2, else down."""
    total = fma64(a, b, c) if a.dtype == F64 else fused_odd(a, b, c)
    up = 128.0 if a.dtype == F64 else 64.0
    return where(scaled, total * np.exp2(where(np.abs(c) >= 2, up, -up)), total).astype(a.dtype)


def div_fixup(q: Array, b: Array, c: Array) -> Array:
    """Pseudo code of V_DIV_FIXUP: the quotient q of c / b, or the special value that IEEE division gives."""
    q, b, c = np.broadcast_arrays(q, b, c)
    special = np.isnan(b) | np.isnan(c) | (b == 0) | (c == 0) | np.isinf(b) | np.isinf(c)
    negative = np.signbit(b) ^ np.signbit(c)
    return where(special, c / b, where(negative, -np.abs(q), np.abs(q)))


def fp8_values(chip: str, kind: str) -> Array:
    """The 256 numbers of a format: FNUZ on gfx942 (bias 8 and 16, 0x80 is the only NaN), OCP on gfx950 (bias 7 and 15)."""
    fraction = 3 if kind == "fp8" else 2
    bias = {("942", "fp8"): 8, ("942", "bf8"): 16, ("950", "fp8"): 7, ("950", "bf8"): 15}[chip, kind]
    codes = np.arange(128)
    e, m = codes >> fraction, (codes & ((1 << fraction) - 1)) / (1 << fraction)
    positive = where(e == 0, np.ldexp(m, 1 - bias), np.ldexp(1 + m, e - bias)).astype(F32)
    values = np.concatenate([positive, -positive])
    if chip == "942":
        values[128] = np.nan
    elif kind == "fp8":
        values[[127, 255]] = np.nan
    else:
        values[[124, 252]] = (np.inf, -np.inf)
        values[[125, 126, 127, 253, 254, 255]] = np.nan
    return values


def float8(chip: str) -> dict[str, Any]:
    """from_fp8 and to_fp8 of a chip (none on gfx90a)."""
    if chip == "90a":
        return {}
    tables = {kind: fp8_values(chip, kind) for kind in ("fp8", "bf8")}

    def from_fp8(a: Array, kind: str) -> Array:
        return tables[kind][a]

    def to_fp8(a: Array, kind: str) -> Array:
        """To nearest, ties to even; what is too large becomes infinity or NaN (FP16_OVFL is not set)."""
        finite = tables[kind][:128][np.isfinite(tables[kind][:128])].astype(F64)
        size = np.abs(a.astype(F64))
        up = np.searchsorted(finite, size).clip(0, len(finite) - 1)
        down = (up - 1).clip(0)
        middle = (finite[up] + finite[down]) / 2
        code = where((size > middle) | ((size == middle) & (up % 2 == 0)), up, down)
        most = finite[-1] + (finite[-1] - finite[-2]) / 2
        nan = 128 if chip == "942" else 127
        too_large = (size > most) | ((size == most) & (len(finite) % 2 == 0))
        code = where(too_large, 124 if (chip, kind) == ("950", "bf8") else nan, code)
        code = where(np.isnan(a), nan, code)
        sign = np.signbit(a) & ~((chip == "942") & ((code == 0) | (code == 128)))
        return (code | where(sign, 128, 0)).astype(U16)

    return {"from_fp8": from_fp8, "to_fp8": to_fp8}
