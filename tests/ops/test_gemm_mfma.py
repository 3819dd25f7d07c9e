"""T.gemm on waves of 64 lanes: MFMA of every type and chip, LDS without bank conflicts, accumulators as operands."""

import numpy as np
import pytest

import tilelang.language as T
from tilelang.ir import Alloc, Cast, Load, numpy_dtype, walk
from tilelang.simulator import run_device
from tilelang.target import Target
from tilelang.transform.pipeline import lower

CHIPS = "gfx90a", "gfx942", "gfx950"


def hip(chip):
    return Target({"kind": "hip", "mcpu": chip})


def gemm(m, n, k, dt, acc="float32", ta=False, tb=True, threads=128, b_dtype=None, **options):
    b_dtype = b_dtype or dt

    @T.prim_func
    def f(A: T.Tensor((k, m) if ta else (m, k), dt), B: T.Tensor((n, k) if tb else (k, n), b_dtype), C: T.Tensor((m, n), acc)):
        with T.Kernel(1, threads=threads):
            a = T.alloc_shared((k, m) if ta else (m, k), dt)
            b = T.alloc_shared((n, k) if tb else (k, n), b_dtype)
            c = T.alloc_fragment((m, n), acc)
            T.copy(A, a)
            T.copy(B, b)
            T.clear(c)
            T.gemm(a, b, c, transpose_A=ta, transpose_B=tb, **options)
            T.copy(c, C)

    return f.func


def run(func, chip, ta=False, tb=True):
    """(report, result, A @ B) for small whole numbers."""
    rng = np.random.default_rng(0)
    a, b, c = (rng.integers(-3, 4, x.shape).astype(numpy_dtype(x.dtype)) for _, x in func.buffers)
    report = run_device(lower(func, hip(chip)), [a, b, c])
    wide = [x.astype(np.float64) for x in (a.T if ta else a, b.T if tb else b)]
    return report, report.outputs["C"].astype(np.float64), wide[0] @ wide[1]


def instructions(report):
    return {k.split()[1] for k in report.instructions if k.startswith("mma")}


TYPES = [(c, d, "float32") for c in CHIPS for d in ("float16", "bfloat16", "float32", "tfloat32")] + [
    (c, "int8", "int32") for c in CHIPS] + [(c, "float64", "float64") for c in CHIPS] + [
    ("gfx942", "float8_e4m3fnuz", "float32"), ("gfx942", "float8_e5m2fnuz", "float32"), ("gfx950", "float8_e4m3fn", "float32"),
    ("gfx950", "float8_e5m2", "float32"), ("gfx942", "float16", "float16")]


@pytest.mark.parametrize("chip, dt, acc", TYPES)
def test_every_type_is_multiplied_by_mfma(chip, dt, acc):
    report, got, want = run(gemm(32, 32, 128, dt, acc), chip)
    np.testing.assert_array_equal(got, want)
    assert all(x.startswith("mfma.") for x in instructions(report)) and instructions(report)
    assert report.conflicts == 0


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("ta, tb", [(False, False), (True, True), (True, False)])
def test_operands_of_either_order(chip, ta, tb):
    report, got, want = run(gemm(64, 48, 64, "float16", ta=ta, tb=tb), chip, ta, tb)
    np.testing.assert_array_equal(got, want)
    assert instructions(report)


@pytest.mark.parametrize("m, n, k, threads", [
    (24, 40, 20, 128), (16, 16, 8, 64), (80, 16, 48, 256), (33, 65, 100, 128), (128, 64, 32, 192)])
def test_tiles_of_any_size(m, n, k, threads):
    report, got, want = run(gemm(m, n, k, "float16", threads=threads), "gfx942")
    np.testing.assert_array_equal(got, want)
    assert instructions(report)


@pytest.mark.parametrize("chip, dt, k, loads", [
    ("gfx942", "float16", 64, 8), ("gfx950", "float16", 64, 8), ("gfx942", "int8", 64, 4), ("gfx942", "float32", 64, 16)])
def test_lanes_load_16_bytes_of_k_for_several_instructions(chip, dt, k, loads):
    """A wave loads its 32 + 32 rows of K in runs of 16 bytes a lane, without bank conflicts, whatever K of the instruction."""
    report, got, want = run(gemm(32, 32, k, dt, "int32" if dt == "int8" else "float32", threads=64), chip)
    np.testing.assert_array_equal(got, want)
    assert report.instructions["ld.shared"] == loads and report.conflicts == 0


@pytest.mark.parametrize("k_pack", [1, 2])
def test_k_pack_changes_no_result(k_pack):
    np.testing.assert_array_equal(*run(gemm(32, 32, 64, "bfloat16", k_pack=k_pack), "gfx942")[1:])


def test_another_name_of_a_type_is_no_conversion():
    """float8_e4m3fn is what the instruction calls float8_e4m3: operands are loaded as they are."""
    low = lower(gemm(32, 32, 128, "float8_e4m3fn"), hip("gfx950"))
    assert [*walk(low.kernels[0].launch.body, Load)] and not [*walk(low.kernels[0].launch.body, Cast)]


def test_e4m3_of_the_other_format_is_not_multiplied_by_mfma():
    with pytest.warns(UserWarning, match="gfx942 has no matrix instruction for float8_e4m3fn"):
        report, got, want = run(gemm(32, 32, 64, "float8_e4m3fn"), "gfx942")
    np.testing.assert_array_equal(got, want)
    assert not instructions(report)


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("dt", ["float16", "float32"])
def test_an_accumulator_is_an_operand_without_an_exchange(chip, dt):
    """D = (A @ B^T) @ V: the scores go from registers to registers, as in attention."""
    @T.prim_func
    def f(A: T.Tensor((64, 32), dt), B: T.Tensor((64, 32), dt), V: T.Tensor((64, 32), dt), D: T.Tensor((64, 32), "float32")):
        with T.Kernel(1, threads=128):
            a, b, v = T.alloc_shared((64, 32), dt), T.alloc_shared((64, 32), dt), T.alloc_shared((64, 32), dt)
            s, p = T.alloc_fragment((64, 64), "float32"), T.alloc_fragment((64, 64), dt)
            d = T.alloc_fragment((64, 32), "float32")
            T.copy(A, a)
            T.copy(B, b)
            T.copy(V, v)
            T.clear(s)
            T.gemm(a, b, s, transpose_B=True, policy=T.GemmWarpPolicy.FullRow)
            T.copy(s, p)
            T.clear(d)
            T.gemm(p, v, d, policy=T.GemmWarpPolicy.FullRow)
            T.copy(d, D)

    low = lower(f.func, hip(chip))
    shared = {x.buffer.name for x in walk(low.host) if isinstance(x, Alloc) and x.buffer.scope().startswith("shared")}
    assert shared == {"a", "b", "v"}
    rng = np.random.default_rng(0)
    a, b, v = (rng.integers(-2, 3, (64, 32)).astype(numpy_dtype(dt)) for _ in range(3))
    report = run_device(low, [a, b, v, np.zeros((64, 32), np.float32)])
    assert not any(k.startswith("shfl") for k in report.instructions)
    x, y, z = (t.astype(np.float64) for t in (a, b, v))
    np.testing.assert_array_equal(report.outputs["D"], (x @ y.T) @ z)


@pytest.mark.parametrize("threads", [16, 32])
def test_a_block_of_half_a_wave_gets_a_whole_one(threads):
    report, got, want = run(gemm(32, 16, 32, "float16", threads=threads), "gfx942")
    np.testing.assert_array_equal(got, want)
    assert instructions(report)


def test_a_block_of_half_a_wave_whose_threads_count_keeps_its_threads():
    @T.prim_func
    def f(A: T.Tensor((32, 32), "float16"), C: T.Tensor((32, 32), "float16"), N: T.Tensor((1,), "int32")):
        with T.Kernel(1, threads=32):
            a, c = T.alloc_shared((32, 32), "float16"), T.alloc_fragment((32, 32), "float16")
            T.copy(A, a)
            T.clear(c)
            T.gemm(a, a, c)
            T.copy(c, C)
            T.atomic_add(N[0], 1)

    with pytest.warns(UserWarning, match="slow-gemm.*32 threads are no whole warps; take a multiple of 64"):
        low = lower(f.func, hip("gfx942"))
    a = np.ones((32, 32), np.float16)
    out = run_device(low, [a, np.zeros((32, 32), np.float16), np.zeros(1, np.int32)]).outputs
    assert out["N"][0] == 32 and (out["C"] == 32).all()


@pytest.mark.parametrize("chip, dt", [(c, d) for c in CHIPS for d in ("float16", "float32", "int8")])
def test_an_operand_with_k_outermost_is_loaded_four_columns_at_once(chip, dt):
    acc = "int32" if dt == "int8" else "float32"
    report, got, want = run(gemm(32, 64, 64, dt, acc, tb=False, threads=64), chip, tb=False)
    np.testing.assert_array_equal(got, want)
    width = numpy_dtype(dt).itemsize
    transposed = (chip, dt) == ("gfx950", "float16")  # then lanes load 8 bytes of either operand
    assert report.instructions["ld.shared"] == 64 * 64 // (64 * 4) + 32 * 64 * width // (64 * (8 if transposed else 16))
    assert report.instructions.get("lanes_transposed", 0) == transposed * 16
    assert report.conflicts == 0 or dt == "int8"  # rows of 64 bytes, 16 of them apart, lie in the same 16 banks


def test_gemms_of_either_order_add_to_one_accumulator():
    @T.prim_func
    def f(A: T.Tensor((64, 64), "float16"), C: T.Tensor((64, 64), "float32")):
        with T.Kernel(1, threads=64):
            a, c = T.alloc_shared((64, 64), "float16"), T.alloc_fragment((64, 64), "float32")
            T.copy(A, a)
            T.clear(c)
            T.gemm(a, a, c)
            T.gemm(a, a, c, transpose_B=True)
            T.copy(c, C)

    a = np.random.default_rng(0).integers(-3, 4, (64, 64)).astype(np.float16)
    got = run_device(lower(f.func, hip("gfx942")), [a, np.zeros((64, 64), np.float32)]).outputs["C"]
    wide = a.astype(np.float64)
    np.testing.assert_array_equal(got, wide @ wide + wide @ wide.T)
