"""T.gemm says when and why it does not use the fastest instruction: it was silent, or named an mma.sync that was not there."""

import warnings

import numpy as np
import pytest

import tilelang
import tilelang.language as T
from tilelang.errors import TileLangWarning

S75, S80, S90 = ({"kind": "cuda", "arch": x} for x in ("sm_75", "sm_80", "sm_90a"))


def gemm(m=64, n=64, k=64, threads=128, dtype="float16", transposed=False, step=0, out="float32"):
    """One T.gemm; step: columns of K that each iteration of a loop multiplies."""
    b_shape = (n, k) if transposed else (k, n)

    @T.prim_func
    def main(A: T.Tensor((m, k), dtype), B: T.Tensor(b_shape, dtype), C: T.Tensor((m, n), out)):
        with T.Kernel(1, threads=threads):
            a, b, c = T.alloc_shared((m, k), dtype), T.alloc_shared(b_shape, dtype), T.alloc_fragment((m, n), out)
            T.copy(A, a)
            T.copy(B, b)
            T.clear(c)
            if step and transposed:
                for j in T.serial(k // step):
                    T.gemm(a[:, j * step:(j + 1) * step], b[:, j * step:(j + 1) * step], c, transpose_B=True)
            elif step:
                for j in T.serial(k // step):
                    T.gemm(a[:, j * step:(j + 1) * step], b[j * step:(j + 1) * step, :], c)
            else:
                T.gemm(a, b, c, transpose_B=transposed)
            T.copy(c, C)
    return main


def compiled(program, target):
    """(kernel, texts of the warnings of slow GEMMs)."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        kernel = tilelang.compile(program, target=target, execution_backend="simulator")
    return kernel, [str(w.message) for w in found if isinstance(w.message, TileLangWarning) and "slow-gemm" in str(w.message)]


MMA, FMA = "mma.sync", "multiply-adds of single threads"
SLOW = {
    "threads that are no warps": (S80, {"threads": 100}, FMA, "100 threads are no whole warps; take a multiple of 32"),
    "the same beside wgmma": (S90, {"threads": 100}, FMA, "100 threads are no whole warps; take a multiple of 32"),
    "float8 without instructions": (S80, {"dtype": "float8_e4m3fn"}, FMA, "or compile for sm_89"),
    "one of two formats of float8": ("gfx950", {"dtype": "float8_e4m3fnuz"}, FMA, "float16, or compile for gfx942"),
    "bytes that no chip multiplies": ("gfx950", {"dtype": "uint8", "out": "int32"}, FMA, "and uint8; cast both to float16"),
    "bfloat16 without instructions": (S75, {"dtype": "bfloat16"}, FMA, "sm_75 has no matrix instruction"),
    "two warp groups": (S90, {"n": 8, "threads": 256}, MMA, "2 warp group(s) do not divide 64 x 8 x 64"),
    "odd N": (S90, {"n": 100}, MMA, "rows of `b` are no whole swizzle atoms; give it rows of a multiple of 32 bytes"),
    "odd K": (S90, {"k": 40}, MMA, "and K of 16"),
    "few rows": (S90, {"m": 16}, MMA, "take 64 rows for each warp group"),
    "K not contiguous": (S90, {"dtype": "float8_e4m3fn", "m": 32, "n": 32}, MMA, "need K contiguous; take A as (M, K)"),
    "float32": (S90, {"dtype": "float32"}, MMA, "in a T.Pipelined loop of two stages or more"),
    "sub-tiles inside a pattern": (S90, {"step": 8, "k": 16}, MMA, "start it at multiples of 8 rows and 32 bytes"),
}


@pytest.mark.parametrize("name", SLOW)
def test_a_slow_gemm_warns_and_the_report_names_its_instruction(name):
    target, options, by, reason = SLOW[name]
    kernel, found = compiled(gemm(**options), target)
    assert len(found) == 1 and reason in found[0] and f"is computed by {by}" in found[0]
    report = kernel.report()
    assert f"by {by}: " in report and ("mma.m16n8" in report) == (by == MMA)


@pytest.mark.parametrize("target, options", [
    (S80, {}), (S90, {}), (S80, {"dtype": "bfloat16"}), (S90, {"dtype": "float8_e4m3fn", "transposed": True}),
    (S80, {"threads": 96}), (S75, {"dtype": "float32"})], ids=str)
def test_a_gemm_at_the_rate_of_the_target_does_not_warn(target, options):
    assert compiled(gemm(**options), target)[1] == []


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("step", [16, 64])
def test_an_aligned_sub_tile_at_a_loop_variable_has_wgmma(step, transposed, as_planned):
    """It was computed by mma.sync: the place of the sub-tile had to be a constant."""
    program = gemm(k=128, step=step, transposed=transposed)
    kernel, found = compiled(program, S90)
    assert found == [] and "wgmma.m64n64k16" in kernel.report()
    rng = np.random.default_rng(0)
    A, B = (rng.integers(-3, 4, n).astype(np.float16) for n in ((64, 128), (64, 128) if transposed else (128, 64)))
    got = np.zeros((64, 64), np.float32)
    kernel(A, B, got)
    np.testing.assert_array_equal(got, A.astype(np.float32) @ (B.T if transposed else B).astype(np.float32))


def test_a_gemm_of_the_package_is_reported_alone():
    from tilelang.transform.layout.strict_layouts import _PACKAGE

    assert tilelang.__file__.startswith(_PACKAGE) and not __file__.startswith(_PACKAGE)


INSTRUCTIONS = {"sm_75": ("float16", "int8"), "sm_80": ("float16", "int8", "bfloat16", "float32"),
                "sm_90a": ("float16", "int8", "bfloat16", "float32", "float8_e4m3fn")}  # types with matrix instructions


@pytest.mark.parametrize("seed", range(3))
def test_a_drawn_gemm_warns_if_its_instruction_is_not_the_best(seed):
    rng = np.random.default_rng(seed)
    for _ in range(6):
        arch = str(rng.choice([*INSTRUCTIONS]))
        dtype = str(rng.choice(["float16", "bfloat16", "float32", "float8_e4m3fn"]))
        options = {"dtype": dtype, "threads": int(rng.choice([32, 100, 128, 256, 384])), "m": int(rng.choice([16, 64, 128])),
                   "n": int(rng.choice([8, 24, 64])), "k": int(rng.choice([16, 40, 64])), "transposed": bool(rng.integers(2))}
        kernel, found = compiled(gemm(**options), {"kind": "cuda", "arch": arch})
        report = kernel.report()
        rate = 2 * ("wgmma.m" in report) or int("mma.m" in report)
        best = 0 if dtype not in INSTRUCTIONS[arch] else 2 if arch == "sm_90a" else 1
        needed = rate < best or not best and dtype != "float32"  # without instructions the type is slow; float32 is as it is
        assert len(found) == needed and rate <= max(best, 1), (arch, options, found)
