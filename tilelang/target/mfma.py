"""Table of AMD's matrix instructions (MFMA) over a wave of 64 lanes: chips, operand layouts, builtin, passes and meaning.

With lane l, element e of the lane (low bits first) and p = K*M/64 elements of an operand in a lane (M = N, one block):

    A (M x K)  row l%M, column p*(l/M) + e          B (K x N)  row p*(l/M) + e, column l%M
    C (M x N)  16 x 16: row 4*(l/16) + e, column l%16       32 x 32: row 8*(e/4) + 4*(l/32) + e%4, column l%32
               float64: row 4*e + l/16, column l%16

Source: AMD matrix instruction calculator (CDNA2, CDNA3).  That gfx950's longer shapes continue the rule of A and B is what
public kernels for it rely on; an order of K that both operands share changes nothing but the order of additions.

Order of additions (MMA-Sim, arXiv 2511.10909, a model measured bit by bit on CDNA2 and CDNA3):

    float32, float64           a chain of fused multiply-adds over k, from C on
    16 bits, gfx90a            groups of 4 of k: (p0 + p1) + (p2 + p3) in float32, then C + group; subnormal operands and
                               results are flushed to zero at each step
    16 bits, gfx942            groups of 8 of k: each a*b aligned to the largest exponent of the group and cut to 24
                               fractional bits; their sum (31 fractional bits) and C (24) aligned to the larger exponent,
                               both rounded down, added, and rounded once to nearest
    8 bits, gfx942             the same with groups of 16, even and odd k added separately first
    xf32, gfx942               the same with groups of 4, operands cut to 10 fractional bits

CDNA4 is not measured: gfx950 is assumed to sum as gfx942 does, and the scaled instructions (f8f6f4, here with scales of 1) as
those of 8 bits.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from tilelang.ir import dtype
from tilelang.layout import Fragment

from .mma_row import MmaRow, multiply_add, register as r, thread as t, truncate_tf32
from .rounding import fused_odd, rounded

WAVE = 64
# Exponent of the least normal number.  A zero has the exponent -126 in the model of sums.
_LEAST = {"float16": -14, "bfloat16": -126, "tfloat32": -126, "float32": -126, "float8_e4m3": -6, "float8_e5m2": -14,
          "float8_e4m3fnuz": -7, "float8_e5m2fnuz": -15, "float6_e2m3fn": 0, "float6_e3m2fn": -2, "float4_e2m1fn": 0}


def _chain(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """Fused multiply-adds over k, in the type of c."""
    for k in range(a.shape[-1]):
        x, y = a[..., :, k, None], b[..., None, k, :]
        c = (rounded("fmaf", "rn", x, y, c) if c.dtype == np.float64 else fused_odd(x, y, c)).astype(c.dtype)
    return c


def _pairs(least: float, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """Pairwise sums of 4 of k in float32, subnormals flushed."""
    def flushed(x: np.ndarray, least: float = 2.0**-126) -> np.ndarray:
        return np.where(np.abs(x) < least, x * np.float32(0), x).astype(np.float32)

    a, b = (flushed(x.astype(np.float32), least) for x in (a, b))
    c = flushed(c)
    for k in range(0, a.shape[-1], 4):
        p = [flushed(a[..., :, i, None] * b[..., None, i, :]) for i in range(k, k + 4)]
        c = flushed(c + flushed(flushed(p[0] + p[1]) + flushed(p[2] + p[3])))
    return c


def _exponent(x: np.ndarray, least: int) -> np.ndarray:
    return np.where(x == 0, -126, np.maximum(np.frexp(x)[1] - 1, least))


def _cut_sum(p: np.ndarray, exponents: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(sum over the last axis in units of 2**(exponent - 24), exponent): aligned to the largest exponent, cut toward zero."""
    top = exponents.max(-1)
    return np.trunc(np.ldexp(p, 24 - top[..., None])).sum(-1), top


def _aligned(group: int, halves: bool, types: tuple[str, str], a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """Sums of each a*b aligned, group by group (module docstring).  halves: even and odd k are added separately."""
    a, b = (truncate_tf32(x) if n == "tfloat32" else x for x, n in zip((a, b), types))
    a, b = a.astype(np.float64), b.astype(np.float64)
    ea, eb = (_exponent(x, _LEAST[n]) for x, n in zip((a, b), types))
    for k in range(0, a.shape[-1], group):
        at = slice(k, k + group)
        p = a[..., :, None, at] * np.swapaxes(b[..., at, :], -1, -2)[..., None, :, :]
        e = ea[..., :, None, at] + np.swapaxes(eb[..., at, :], -1, -2)[..., None, :, :]
        ec = _exponent(c.astype(np.float64), -126)
        if halves:
            (s, x), (s1, x1) = (_cut_sum(p[..., i::2], e[..., i::2]) for i in (0, 1))
            top = np.maximum(x, x1)
            s, e_sum = np.floor(np.ldexp(s, x - top)) + np.floor(np.ldexp(s1, x1 - top)), top
        else:
            s, e_sum = _cut_sum(p, e)
        top = np.maximum(e_sum, ec)
        low = np.floor(np.ldexp(c.astype(np.float64), 24 - top))
        low = np.where(ec < top - 25, 0.0, low) if halves else low
        exact = np.ldexp(np.floor(np.ldexp(s, 7 + e_sum - top)), top - 31) + np.ldexp(low, top - 24)
        p = np.where(np.abs(p) >= 2.0**128, np.copysign(np.inf, p), p)
        plain = p.sum(-1) + c
        c = np.where(np.isfinite(plain), exact, plain).astype(np.float32)
    return c


def _fragments(m: int, k: int, c: str) -> tuple[Fragment, Fragment, Fragment]:
    """Operands and accumulator of an m x m x k instruction of one block (module docstring)."""
    run = k * m // WAVE
    along = (t(WAVE // m, m), r(run, 1))
    rows = (r(4, 1), t(4, 16)) if c == "float64" else (t(4, 16), r(4, 1)) if m == 16 else (r(4, 4), t(2, 32), r(4, 1))
    return (Fragment((m, k), ((t(m, 1),), along), threads=WAVE), Fragment((k, m), (along, (t(m, 1),)), threads=WAVE),
            Fragment((m, m), (rows, (t(m, 1),)), threads=WAVE))


_NAMES = {"float16": "f16", "bfloat16": "bf16", "tfloat32": "xf32", "float32": "f32", "float64": "f64", "int8": "i8",
          "int32": "i32", "float8_e4m3": "e4m3", "float8_e5m2": "e5m2", "float8_e4m3fnuz": "e4m3fnuz",
          "float8_e5m2fnuz": "e5m2fnuz", "float6_e2m3fn": "e2m3", "float6_e3m2fn": "e3m2", "float4_e2m1fn": "e2m1"}
MFMA_ROWS: dict[str, MmaRow] = {}


def _arithmetic(a: str, b: str, chip: str) -> Callable[..., np.ndarray]:
    if a in ("float32", "float64"):
        return _chain
    if a == "int8":
        return partial(multiply_add, dtype(a), dtype("int32"))
    if chip == "gfx90a":
        return partial(_pairs, 2.0**_LEAST[a])
    wide = dtype(a).bits <= 8
    return partial(_aligned, 16 if wide else 4 if a == "tfloat32" else 8, wide, (a, b))


def _add(builtin: str, m: int, k: int, a: str, c: str, b: str = "", **chips: int) -> None:
    """A row for the chips that share its meaning; on gfx90a a row of 16-bit operands has one of its own."""
    b = b or a
    own = {"gfx90a"} & set(chips) if dtype(a).bits == 16 else set()
    for group in (set(chips) - own, own):
        if group:
            name = f"mfma.{m}x{m}x{k}.{_NAMES[a]}.{_NAMES[b]}.{_NAMES[c]}" + ".gfx90a" * (group == own)
            MFMA_ROWS[name] = MmaRow(
                name, (m, m, k), dtype(a), dtype(b), dtype(c), *_fragments(m, k, c), f"__builtin_amdgcn_mfma_{builtin}",
                chips=tuple((x, n) for x, n in chips.items() if x in group), multiply=_arithmetic(a, b, min(group)))


# In order of preference: those of 16 x 16 first, because more tiles are made of them, and the longest K first.
_add("f32_16x16x32_f16", 16, 32, "float16", "float32", gfx950=4)
_add("f32_16x16x16f16", 16, 16, "float16", "float32", gfx90a=8, gfx942=4, gfx950=4)
_add("f32_32x32x16_f16", 32, 16, "float16", "float32", gfx950=8)
_add("f32_32x32x8f16", 32, 8, "float16", "float32", gfx90a=16, gfx942=8, gfx950=8)
_add("f32_16x16x32_bf16", 16, 32, "bfloat16", "float32", gfx950=4)
_add("f32_16x16x16bf16_1k", 16, 16, "bfloat16", "float32", gfx90a=8, gfx942=4, gfx950=4)
_add("f32_32x32x16_bf16", 32, 16, "bfloat16", "float32", gfx950=8)
_add("f32_32x32x8bf16_1k", 32, 8, "bfloat16", "float32", gfx90a=16, gfx942=8, gfx950=8)
_add("f32_16x16x4f32", 16, 4, "float32", "float32", gfx90a=8, gfx942=8, gfx950=8)
_add("f32_32x32x2f32", 32, 2, "float32", "float32", gfx90a=16, gfx942=16, gfx950=16)
_add("f32_16x16x8_xf32", 16, 8, "tfloat32", "float32", gfx942=4)
_add("f32_32x32x4_xf32", 32, 4, "tfloat32", "float32", gfx942=8)
_add("f64_16x16x4f64", 16, 4, "float64", "float64", gfx90a=8, gfx942=8, gfx950=16)
_add("i32_16x16x64_i8", 16, 64, "int8", "int32", gfx950=4)
_add("i32_16x16x32_i8", 16, 32, "int8", "int32", gfx942=4, gfx950=4)
_add("i32_16x16x16i8", 16, 16, "int8", "int32", gfx90a=8)
_add("i32_32x32x32_i8", 32, 32, "int8", "int32", gfx950=8)
_add("i32_32x32x16_i8", 32, 16, "int8", "int32", gfx942=8, gfx950=8)
_add("i32_32x32x8i8", 32, 8, "int8", "int32", gfx90a=16)
# The instructions of 8-bit floats have one name on both chips and read fnuz on gfx942, OCP formats on gfx950.
_EIGHTS = {"float8_e4m3": "fp8", "float8_e5m2": "bf8"}
_SCALED = "scale_f32_16x16x128_f8f6f4", "scale_f32_32x32x64_f8f6f4"
for _a in _EIGHTS:
    for _b in _EIGHTS:
        _mix = f"{_EIGHTS[_a]}_{_EIGHTS[_b]}"
        _add(_SCALED[0], 16, 128, _a, "float32", _b, gfx950=8)
        _add(f"f32_16x16x32_{_mix}", 16, 32, _a, "float32", _b, gfx950=4)
        _add(_SCALED[1], 32, 64, _a, "float32", _b, gfx950=16)
        _add(f"f32_32x32x16_{_mix}", 32, 16, _a, "float32", _b, gfx950=8)
        _add(f"f32_16x16x32_{_mix}", 16, 32, f"{_a}fnuz", "float32", f"{_b}fnuz", gfx942=4)
        _add(f"f32_32x32x16_{_mix}", 32, 16, f"{_a}fnuz", "float32", f"{_b}fnuz", gfx942=8)
for _a in ("float6_e2m3fn", "float6_e3m2fn", "float4_e2m1fn"):
    _add(_SCALED[0], 16, 128, _a, "float32", gfx950=4)
    _add(_SCALED[1], 32, 64, _a, "float32", gfx950=8)
