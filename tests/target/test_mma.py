"""Each mma row's fragments against the figures of the PTX ISA (written out again here), and its NumPy reference."""

import numpy as np
import pytest

from tilelang.ir import numpy_dtype
from tilelang.ir.numbers import round_tf32
from tilelang.target import Target
from tilelang.target.mma import MMA_ROWS, mma_rows
from tilelang.target.mma_row import truncate_tf32

ROWS = list(MMA_ROWS.values())


def ptx_a(row, lane, i):
    """(row, column) of A's element i of a lane, from the text under each figure of the PTX ISA."""
    m, _, k = row.shape
    group, tid, bits = lane // 4, lane % 4, row.a_dtype.bits
    if m == 8:  # m8n8k4.f64: one element; m8n8k16.s8: four in a register
        return group, (tid if bits == 64 else tid * 4 + i)
    if bits == 16 and k == 8:
        return (group if i < 2 else group + 8), tid * 2 + (i & 1)
    if bits == 16:
        return (group if (0 <= i < 2 or 4 <= i < 6) else group + 8), tid * 2 + (i & 1) + (8 if i >= 4 else 0)
    if bits == 8 and k == 16:
        return (group if i < 4 else group + 8), tid * 4 + (i & 3)
    if bits == 8:
        return (group if (0 <= i < 4 or 8 <= i < 12) else group + 8), tid * 4 + (i & 3) + (16 if i >= 8 else 0)
    if k == 4:
        return (group if i == 0 else group + 8), tid
    return (group if i in (0, 2) else group + 8), (tid if i < 2 else tid + 4)


def ptx_b(row, lane, i):
    """(row, column) of B's element i of a lane."""
    m, _, k = row.shape
    group, tid, bits = lane // 4, lane % 4, row.b_dtype.bits
    if m == 8:
        return (tid if bits == 64 else tid * 4 + i), group
    if bits == 16:
        return tid * 2 + (i & 1) + (8 if i >= 2 else 0), group
    if bits == 8:
        return tid * 4 + (i & 3) + (16 if i >= 4 else 0), group
    return (tid if i == 0 else tid + 4), group


def ptx_c(row, lane, i):
    m = row.shape[0]
    group, tid = lane // 4, lane % 4
    return (group if i < 2 or m == 8 else group + 8), tid * 2 + (i & 1)


def gather(fragment, matrix):
    """registers[lane][i] of a matrix laid out by a Fragment."""
    owners, registers = fragment.owners()[0], fragment.register_table()
    out = np.zeros((32, fragment.registers), matrix.dtype)
    out[owners.ravel(), registers.ravel()] = matrix.ravel()
    return out


def emulate(row, a, b, c):
    """The instruction on registers, element places taken from the figures."""
    m, n, k = row.shape
    A, B, C = np.zeros((m, k), np.float64), np.zeros((k, n), np.float64), np.zeros((m, n), np.float64)
    for lane in range(32):
        for i in range(a.shape[1]):
            A[ptx_a(row, lane, i)] = a[lane, i]
        for i in range(b.shape[1]):
            B[ptx_b(row, lane, i)] = b[lane, i]
        for i in range(c.shape[1]):
            C[ptx_c(row, lane, i)] = c[lane, i]
    D = A @ B + C
    return np.array([[D[ptx_c(row, lane, i)] for i in range(c.shape[1])] for lane in range(32)])


@pytest.mark.parametrize("row", ROWS, ids=[r.name for r in ROWS])
def test_fragments_and_meaning_agree_with_the_figures(row):
    rng = np.random.default_rng(1)
    m, n, k = row.shape

    def matrix(shape, dt):
        low = 0 if dt.is_unsigned else -4
        return rng.integers(low, 5, shape).astype(numpy_dtype(dt))

    a, b, c = matrix((m, k), row.a_dtype), matrix((k, n), row.b_dtype), matrix((m, n), row.c_dtype)
    got = emulate(row, *(gather(f, x).astype(np.float64) for f, x in ((row.a, a), (row.b, b), (row.c, c))))
    want = row.reference(a, b, c)
    assert want.dtype == numpy_dtype(row.c_dtype)
    plain = a.astype(np.float64) @ b.astype(np.float64) + c.astype(np.float64)
    np.testing.assert_array_equal(want.astype(np.float64), plain)
    np.testing.assert_array_equal(gather(row.c, want).astype(np.float64), got)


@pytest.mark.parametrize("row", ROWS, ids=[r.name for r in ROWS])
def test_registers_match_the_operand_lists_of_the_instruction(row):
    m, n, k = row.shape
    lanes_bits = 32 * row.register_bits
    assert row.registers == (m * k * row.a_dtype.bits // lanes_bits, k * n * row.b_dtype.bits // lanes_bits,
                             m * n * row.c_dtype.bits // lanes_bits)


def test_rows_are_offered_by_type_and_architecture():
    assert [r.shape for r in mma_rows(Target("sm_80"), "float16", "float16", "float32")] == [(16, 8, 16), (16, 8, 8)]
    assert [r.shape for r in mma_rows(Target("sm_75"), "float16", "float16", "float32")] == [(16, 8, 8)]
    assert mma_rows(Target("sm_80"), "float32", "float32", "float32")[0].name == "mma.m16n8k8.tf32.tf32.f32"
    assert mma_rows(Target("sm_90"), "float8_e4m3fn", "float8_e5m2", "float32")[0].name == "mma.m16n8k32.e4m3.e5m2.f32"
    assert mma_rows(Target("sm_80"), "float8_e4m3", "float8_e4m3", "float32") == ()
    for types in (("int8", "int8", "float32"), ("bfloat16",) * 3):
        assert mma_rows(Target("sm_80"), *types) == ()


def test_batches_of_matrices_are_accepted():
    row = MMA_ROWS["mma.m16n8k32.s8.s8.s32"]
    a = np.full((3, 16, 32), -128, np.int8)
    b = np.full((3, 32, 8), -128, np.int8)
    assert (row.reference(a, b, np.ones((3, 16, 8), np.int32)) == 32 * 16384 + 1).all()


def test_tf32_operands_are_cut_and_to_tf32_rounds():
    x = np.array([1.0 + 2.0**-11, 1.0 + 2.0**-12, -(1.0 + 2.0**-11), np.inf], np.float32)
    np.testing.assert_array_equal(truncate_tf32(x), np.array([1, 1, -1, np.inf], np.float32))
    up = np.float32(1.0 + 2.0**-10)
    np.testing.assert_array_equal(round_tf32(x), np.array([up, 1, -up, np.inf], np.float32))
    row = MMA_ROWS["mma.m16n8k8.tf32.tf32.f32"]
    a = np.full((16, 8), 1.0 + 2.0**-11, np.float32)
    assert (row.reference(a, np.ones((8, 8), np.float32), np.zeros((16, 8), np.float32)) == 8.0).all()
