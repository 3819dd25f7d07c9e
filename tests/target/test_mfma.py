"""Each MFMA row's fragments against the formulas of AMD's calculator, and its sums against a scalar model of the hardware."""

import math
from fractions import Fraction

import numpy as np
import pytest

from tilelang.ir import numpy_dtype
from tilelang.target import Target
from tilelang.target.mfma import MFMA_ROWS
from tilelang.target.mma import mma_rows, row as row_of

ROWS = list(MFMA_ROWS.values())
CHIPS = {arch: Target({"kind": "hip", "mcpu": arch}) for arch in ("gfx90a", "gfx942", "gfx950")}


def operand_place(row, lane, e):
    """(row of A or column of B, k) of an element of a lane."""
    m, _, k = row.shape
    return lane % m, k * m // 64 * (lane // m) + e


def accumulator_place(row, lane, e):
    if row.c_dtype == "float64":
        return 4 * e + lane // 16, lane % 16
    if row.shape[0] == 32:
        return 8 * (e // 4) + 4 * (lane // 32) + e % 4, lane % 32
    return 4 * (lane // 16) + e, lane % 16


@pytest.mark.parametrize("row", ROWS, ids=[r.name for r in ROWS])
def test_every_element_is_where_the_calculator_has_it(row):
    for fragment, place in ((row.a, operand_place), (row.b, lambda *x: operand_place(*x)[::-1]), (row.c, accumulator_place)):
        owners, registers = fragment.owners()[0], fragment.register_table()
        assert fragment.threads == 64 and owners.size == 64 * fragment.registers
        for lane in range(64):
            for e in range(fragment.registers):
                at = place(row, lane, e)
                assert (owners[at], registers[at]) == (lane, e)


def test_rows_are_offered_by_chip():
    def names(chip, a, b=None, c="float32"):
        return [r.name for r in mma_rows(CHIPS[chip], a, b or a, c)]

    assert names("gfx950", "float16")[:2] == ["mfma.16x16x32.f16.f16.f32", "mfma.16x16x16.f16.f16.f32"]
    assert names("gfx942", "bfloat16") == ["mfma.16x16x16.bf16.bf16.f32", "mfma.32x32x8.bf16.bf16.f32"]
    assert names("gfx90a", "float16")[0] == "mfma.16x16x16.f16.f16.f32.gfx90a"
    assert names("gfx942", "float32")[0] == "mfma.16x16x4.f32.f32.f32"
    assert names("gfx942", "tfloat32")[0] == "mfma.16x16x8.xf32.xf32.f32"
    assert names("gfx950", "tfloat32")[0] == "mfma.16x16x4.f32.f32.f32"  # xf32 is gone there
    assert names("gfx90a", "int8", c="int32")[0] == "mfma.16x16x16.i8.i8.i32"
    assert names("gfx950", "float64", c="float64") == ["mfma.16x16x4.f64.f64.f64"]
    assert not names("gfx942", "float16", c="float16") and not names("gfx942", "uint8", c="int32")
    assert all(r.on(CHIPS[chip]) == (chip in dict(r.chips)) for chip in CHIPS for r in ROWS)
    assert all(row_of(r.name) is r for r in ROWS)


def test_e4m3_is_never_taken_for_fnuz():
    for name in ("float8_e4m3", "float8_e4m3fn", "float8_e5m2"):
        assert mma_rows(CHIPS["gfx942"], name, name, "float32") == ()
        assert mma_rows(CHIPS["gfx950"], name, name, "float32")
    for name in ("float8_e4m3fnuz", "float8_e5m2fnuz"):
        assert mma_rows(CHIPS["gfx942"], name, name, "float32")
        assert mma_rows(CHIPS["gfx950"], name, name, "float32") == ()
    ones = np.full((16, 32), 0x40, np.uint8)  # 2.0 in e4m3, 1.0 in e4m3fnuz
    for name, want in (("e4m3", 128.0), ("e4m3fnuz", 32.0)):
        row = row_of(f"mfma.16x16x32.{name}.{name}.f32")
        a = ones.view(numpy_dtype(row.a_dtype))
        assert (row.reference(a, a.T, np.zeros((16, 16), np.float32)) == want).all()


@pytest.mark.parametrize("row", ROWS, ids=[r.name for r in ROWS])
def test_small_integers_multiply_exactly(row):
    rng = np.random.default_rng(1)
    m, n, k = row.shape

    def matrix(shape, dt):
        return rng.integers(-1, 2, shape).astype(numpy_dtype(dt))

    a, b, c = matrix((2, m, k), row.a_dtype), matrix((2, k, n), row.b_dtype), matrix((2, m, n), row.c_dtype)
    got = row.reference(a, b, c)
    assert got.dtype == numpy_dtype(row.c_dtype)
    np.testing.assert_array_equal(got.astype(np.float64), a.astype(np.float64) @ b.astype(np.float64) + c.astype(np.float64))


# ---- a scalar model of the sums -------------------------------------------------------------------------------------

LEAST = {"float16": -14, "bfloat16": -126, "tfloat32": -126, "float32": -126, "float8_e4m3": -6, "float8_e5m2": -14,
         "float8_e4m3fnuz": -7, "float8_e5m2fnuz": -15, "float6_e2m3fn": 0, "float6_e3m2fn": -2, "float4_e2m1fn": 0}


def exponent(x, least):
    return -126 if x == 0 else max(math.frexp(x)[1] - 1, least)


def aligned(terms, bits, cut):
    """(sum in fractions, exponent) of (value, exponent) terms cut to `bits` fractional bits of the largest exponent."""
    top = max(e for _, e in terms)
    unit = Fraction(2) ** (top - bits)
    return sum(cut(Fraction(v) / unit) for v, _ in terms) * unit, top


def fused(row, a, b, c):
    """One element on gfx942: a, b vectors over k."""
    eight = row.a_dtype.bits <= 8
    group = 16 if eight else 4 if row.a_dtype == "tfloat32" else min(8, len(a))
    if row.a_dtype == "tfloat32":
        a, b = ((np.float32(x).view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32) for x in (a, b))
    for k in range(0, len(a), group):
        terms = [(Fraction(float(x)) * Fraction(float(y)), exponent(float(x), LEAST[row.a_dtype]) +
                  exponent(float(y), LEAST[row.b_dtype])) for x, y in zip(a[k:k + group], b[k:k + group])]
        if eight:
            total, top = aligned([aligned(terms[i::2], 24, math.trunc) for i in (0, 1)], 24, math.floor)
        else:
            total, top = aligned(terms, 24, math.trunc)
        ec = exponent(float(c), -126)
        high = max(top, ec)
        low = math.floor(Fraction(float(c)) * Fraction(2) ** (24 - high)) * Fraction(2) ** (high - 24)
        low = Fraction(0) if eight and ec < high - 25 else low
        exact = math.floor(total * Fraction(2) ** (31 - high)) * Fraction(2) ** (high - 31) + low
        with np.errstate(over="ignore"):
            c = np.float32(float(exact))  # at most 40 bits: exact in float64
    return c


def pairs(row, a, b, c):
    """One element on gfx90a."""
    def flush(x, least=2.0**-126):
        return np.float32(0) if abs(x) < least else np.float32(x)

    least = 2.0 ** LEAST[row.a_dtype]
    a, b, c = [flush(x, least) for x in a.astype(np.float32)], [flush(x, least) for x in b.astype(np.float32)], flush(c)
    for k in range(0, len(a), 4):
        with np.errstate(over="ignore"):
            p = [flush(a[i] * b[i]) for i in range(k, k + 4)]
        c = flush(c + flush(flush(p[0] + p[1]) + flush(p[2] + p[3])))
    return c


def chain(row, a, b, c):
    for x, y in zip(a, b):
        exact = Fraction(float(x)) * Fraction(float(y)) + Fraction(float(c))
        near = row_type(row)(float(exact))
        c = min((np.nextafter(near, row_type(row)(-np.inf)), near, np.nextafter(near, row_type(row)(np.inf))),
                key=lambda v: (abs(Fraction(float(v)) - exact), int(np.asarray(v).view(f"u{v.itemsize}")) & 1))
    return c


def row_type(row):
    return numpy_dtype(row.c_dtype).type


def spread(rng, shape, dt, widest):
    """Numbers of many exponents, zeros and subnormals among them."""
    x = rng.standard_normal(shape) * np.exp2(rng.integers(-widest, widest + 1, shape))
    return np.where(rng.random(shape) < 0.1, 0.0, x).astype(numpy_dtype(dt))


FLOATS = [r for r in ROWS if r.c_dtype != "int32"]


@pytest.mark.parametrize("row", FLOATS, ids=[r.name for r in FLOATS])
def test_sums_have_the_order_and_the_cuts_of_the_hardware(row):
    model = chain if row.a_dtype in ("float32", "float64") else pairs if "gfx90a" in row.name else fused
    rng = np.random.default_rng(3)
    m, n, k = row.shape
    low = abs(LEAST.get(row.a_dtype, -40))
    for widest in (1, min(low // 2, 60), low // 2 + 4):
        a, b = (spread(rng, s, dt, min(widest, 70)) for s, dt in (((m, k), row.a_dtype), ((k, n), row.b_dtype)))
        a, b = (np.where(np.isfinite(x.astype(np.float64)), x, x.dtype.type(1)) for x in (a, b))
        c = spread(rng, (m, n), row.c_dtype, widest)
        got = row.reference(a, b, c)
        for i, j in rng.integers(0, m, (12, 2)):
            want = model(row, a[i], b[:, j], c[i, j])
            assert got[i, j] == want, (widest, i, j, got[i, j], want)


def test_gfx90a_flushes_subnormals_and_gfx942_keeps_them():
    a, b, c = np.zeros((16, 16), np.float16), np.eye(16, dtype=np.float16), np.zeros((16, 16), np.float32)
    a[0, 0] = 2.0**-20
    assert row_of("mfma.16x16x16.f16.f16.f32").reference(a, b, c)[0, 0] == 2.0**-20
    assert row_of("mfma.16x16x16.f16.f16.f32.gfx90a").reference(a, b, c)[0, 0] == 0
    c[:] = 2.0**-130
    assert row_of("mfma.16x16x16.bf16.bf16.f32.gfx90a").reference(a * 0, b, c)[0, 0] == 0
    zeros = np.zeros((16, 4), np.float32)
    assert row_of("mfma.16x16x4.f32.f32.f32").reference(zeros, zeros.T, c)[0, 0] == c[0, 0]


def test_sums_of_gfx942_are_cut_towards_minus_infinity():
    row = row_of("mfma.16x16x16.f16.f16.f32")
    a, b = np.zeros((16, 16), np.float16), np.zeros((16, 16), np.float16)
    a[0, 0], b[0, 0] = 1.0, 1.0
    c = np.full((16, 16), 2.0**-30, np.float32)
    assert row.reference(a, b, c)[0, 0] == 1.0
    assert row.reference(a, b, -c)[0, 0] == 1.0 - 2.0**-24  # exact, rounded once: 1.0
    assert row.reference(-a, b, c)[0, 0] == -1.0  # not minus that


def test_infinities_and_nan_come_through():
    for name in ("mfma.16x16x16.f16.f16.f32", "mfma.16x16x16.f16.f16.f32.gfx90a", "mfma.16x16x16.bf16.bf16.f32"):
        row = row_of(name)
        a, b = (np.ones((16, 16)).astype(numpy_dtype(row.a_dtype)) for _ in range(2))
        a[0, 3], a[1, 0] = np.inf, np.nan
        got = row.reference(a, b, np.zeros((16, 16), np.float32))
        assert np.isinf(got[0]).all() and np.isnan(got[1]).all() and (got[2] == 16).all()
