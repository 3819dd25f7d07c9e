"""Rows of wgmma: register formulas written out again, sizes and orders, and the NumPy reference through registers."""

import numpy as np
import pytest

from tilelang.errors import InternalError
from tilelang.ir import numpy_dtype
from tilelang.target.wgmma import WGMMA_ROWS, wgmma_row, wgmma_sizes


def accumulator_place(t, i):
    """(row, column) of 32-bit accumulator i of thread t, from the figure of m64nNk16."""
    w, g, q = t // 32, t % 32 // 4, t % 4
    return 16 * w + g + 8 * ((i >> 1) & 1), 8 * (i >> 2) + 2 * q + (i & 1)


def operand_place(t, j, b, size):
    """(row, column) of byte b of register j of thread t's part of A."""
    w, g, q = t // 32, t % 32 // 4, t % 4
    return 16 * w + g + 8 * (j & 1), (4 * q + 16 * (j >> 1) + b) // size


def gather(fragment, matrix):
    out = np.zeros((128, fragment.registers), matrix.dtype)
    out[fragment.owners()[0].ravel(), fragment.register_table().ravel()] = matrix.ravel()
    return out


@pytest.mark.parametrize("n", [8, 24, 64, 128, 256])
def test_accumulator_registers(n):
    row = wgmma_row(n, "float16", "float16", "float32")
    index = np.arange(64 * n).reshape(64, n)
    got = gather(row.c, index)
    assert got.shape == (128, n // 2) and row.c_registers == n // 2
    for t in range(128):
        for i in range(n // 2):
            r, c = accumulator_place(t, i)
            assert got[t, i] == index[r, c]
    half = wgmma_row(n, "float16", "float16", "float16")
    assert half.c == row.c and half.c_registers == n // 4


@pytest.mark.parametrize("a, size", [("float16", 2), ("float32", 4), ("int8", 1), ("float8_e4m3fn", 1)])
def test_registers_of_a(a, size):
    acc = "int32" if a == "int8" else "float32"
    row = wgmma_row(64, a, a, acc)
    k = row.shape[2]
    assert k * size == 32
    index = np.arange(64 * k).reshape(64, k)
    got = gather(row.a, index)
    for t in range(128):
        for j in range(4):
            for e in range(4 // size):
                r, c = operand_place(t, j, e * size, size)
                assert got[t, j * (4 // size) + e] == index[r, c]


def test_a_float32_accumulator_packs_into_operand_registers():
    """Register j of k-step s of A (16 bit) is columns 8s + 2j, + 1 of the accumulator's registers."""
    c, a = wgmma_row(64, "float16", "float16", "float32").c, wgmma_row(64, "float16", "float16", "float32").a
    index = np.arange(64 * 64).reshape(64, 64)
    held = gather(c, index)
    for s in range(4):
        step = gather(a, index[:, 16 * s:16 * s + 16])
        assert np.array_equal(step, held[:, 8 * s:8 * s + 8])


def test_rows_and_sizes():
    assert len(WGMMA_ROWS) == (12 + 11) * 32 + 2 * 4 * 18  # sparse ones have all types but tf32
    for name, row in WGMMA_ROWS.items():
        sparse = ".sp" if row.sparse else ""
        assert row.name == name and row.ptx == f"wgmma.mma_async{sparse}.sync.aligned." + name[6 + len(sparse):]
        assert row.shape[0] == 64 and row.shape[2] * row.a_dtype.bits == (512 if sparse else 256)
    assert wgmma_sizes("float16", "float16", "float32") == tuple(range(8, 257, 8))
    assert 40 not in wgmma_sizes("int8", "uint8", "int32") and 24 in wgmma_sizes("int8", "uint8", "int32")
    for types in (("float16", "bfloat16", "float32"), ("bfloat16", "bfloat16", "float16"), ("float64",) * 3,
                  ("float32", "float32", "float16"), ("int8", "int8", "float32")):
        assert wgmma_sizes(*types) == () and wgmma_row(64, *types) is None
    assert wgmma_row(20, "float16", "float16", "float32") is None
    with pytest.raises(KeyError):
        WGMMA_ROWS["wgmma.m64n64k8.f32.f16.f16"]
    assert "wgmma.m64n64k16.f32.bf16.bf16" in WGMMA_ROWS


def test_orders_of_operands():
    half, byte = wgmma_row(64, "float16", "float16", "float32"), wgmma_row(64, "int8", "int8", "int32")
    assert half.function(False, "mn", "k") == "wgmma_m64n64k16_f32_f16_f16_ss_mk"
    assert half.function(True, "k", "mn") == "wgmma_m64n64k16_f32_f16_f16_rs_m"
    assert byte.function(False, "k", "k") == "wgmma_m64n64k32_s32_s8_s8_ss_kk"
    with pytest.raises(InternalError):
        byte.function(False, "k", "mn")


@pytest.mark.parametrize("name", ["wgmma.m64n16k16.f32.f16.f16", "wgmma.m64n8k16.f16.f16.f16",
                                  "wgmma.m64n24k8.f32.tf32.tf32", "wgmma.m64n16k32.s32.s8.u8",
                                  "wgmma.m64n8k32.f32.e4m3.e5m2", "wgmma.m64n8k16.f32.bf16.bf16"])
def test_meaning(name):
    row = WGMMA_ROWS[name]
    rng = np.random.default_rng(1)
    m, n, k = row.shape
    a, b, c = (rng.integers(0, 5, s).astype(numpy_dtype(d))
               for s, d in (((m, k), row.a_dtype), ((k, n), row.b_dtype), ((m, n), row.c_dtype)))
    want = a.astype(np.float64) @ b.astype(np.float64)
    assert np.array_equal(row.reference(a, b, c).astype(np.float64), want + c.astype(np.float64))
    assert np.array_equal(row.reference(a, b, c, False).astype(np.float64), want)
    if row.a_dtype == "tfloat32":
        fine = np.full((m, k), 1 + 2.0**-12, np.float32)
        assert np.array_equal(row.reference(fine, b, c, False), row.reference(np.ones((m, k), np.float32), b, c, False))


def test_the_old_accumulator_is_ignored_whatever_it_holds():
    row = wgmma_row(8, "float16", "float16", "float32")
    a, b = np.ones((64, 16), np.float16), np.ones((16, 8), np.float16)
    assert (row.reference(a, b, np.full((64, 8), np.nan, np.float32), False) == 16).all()
