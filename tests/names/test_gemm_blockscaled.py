"""T.gemm_blockscaled: steps of K with scales of their own, the same on every backend, and never without scales."""

import numpy as np
import pytest
from everywhere import SM80, SM90A, WITH_HOPPER, run

import tilelang
import tilelang.language as T
from tilelang.ir import numpy_dtype

F8, E8 = "float8_e4m3fn", "float8_e8m0fnu"


def program(M=64, N=64, K=128, BK=64, dt=F8, sdt="float32", ga=32, gb=32, ta=False, tb=True, clear=True, whole=True, stages=2):
    """C = (A * SFA) @ (B * SFB).T over tiles of BK; whole: the tile of scales has those of all of K, else those of the step."""
    packed = {"uint32": 4}.get(sdt, 1)
    sa, sb = (M, -(-K // ga // packed)), (N, -(-K // gb // packed))
    own = lambda rows, g: (rows, max(1, BK // g))  # noqa: E731 - the scales of one tile

    @T.prim_func
    def main(A: T.Tensor((K, M) if ta else (M, K), dt), B: T.Tensor((N, K) if tb else (K, N), dt), SA: T.Tensor(sa, sdt),
             SB: T.Tensor(sb, sdt), C: T.Tensor((M, N), "float32")):
        with T.Kernel(1, threads=128):
            a = T.alloc_shared((BK, M) if ta else (M, BK), dt)
            b = T.alloc_shared((N, BK) if tb else (BK, N), dt)
            s = T.alloc_shared(sa if whole else own(M, ga), sdt)
            t = T.alloc_shared(sb if whole else own(N, gb), sdt)
            c = T.alloc_fragment((M, N), "float32")
            if whole:
                T.copy(SA, s)
                T.copy(SB, t)
            if not clear:
                T.fill(c, 1.0)
            for k in T.Pipelined(K // BK, num_stages=stages):
                if not whole:
                    T.copy(SA[0, k * BK // ga], s)
                    T.copy(SB[0, k * BK // gb], t)
                if ta:
                    T.copy(A[k * BK, 0], a)
                else:
                    T.copy(A[0, k * BK], a)
                if tb:
                    T.copy(B[0, k * BK], b)
                else:
                    T.copy(B[k * BK, 0], b)
                T.gemm_blockscaled(a, b, c, s, t, ta, tb, clear_accum=k == 0 if clear else False, k_start=k * BK,
                                   sf_a_granularity_k=ga, sf_b_granularity_k=gb)
            T.copy(c, C)

    return main


def operands(M=64, N=64, K=128, dt=F8, sdt="float32", ga=32, gb=32, ta=False, tb=True, clear=True, **_):
    """(arguments, result): small integers and powers of two, so that every sum is exact."""
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-4, 5, (n, K)) for n in (M, N))
    ea, eb = (rng.integers(-3, 4, (n, -(-K // g))) for n, g in ((M, ga), (N, gb)))
    scaled = [x * np.repeat(2.0 ** e, g, 1)[:, :K] for x, e, g in ((a, ea, ga), (b, eb, gb))]
    given = [np.ascontiguousarray(x.astype(numpy_dtype(tilelang.DataType(dt)))) for x in (a.T if ta else a, b if tb else b.T)]
    for e in (ea, eb):
        codes = np.ascontiguousarray((e + 127).astype(np.uint8))
        given.append(codes if sdt == "uint8" else codes.view(np.uint32) if sdt == "uint32" else
                     (2.0 ** e).astype(numpy_dtype(tilelang.DataType(sdt))))
    return given, scaled[0] @ scaled[1].T + (not clear)


CASES = {
    "float8": {}, "exponents": {"sdt": "uint8"}, "words": {"sdt": "uint32"}, "e8m0": {"sdt": E8}, "added": {"clear": False},
    "transposed": {"dt": "float16", "ta": True, "tb": False}, "int8": {"dt": "int8"}, "wide": {"ga": 128, "gb": 128},
    "unequal": {"ga": 16, "gb": 128, "dt": "bfloat16"}, "of-the-tile": {"whole": False}, "in-turn": {"ga": 64, "whole": False},
    "ragged": {"M": 48, "N": 24, "K": 96, "BK": 32, "dt": "float16", "ga": 32, "gb": 96}}


@pytest.mark.spec("S:gemm_blockscaled")
@pytest.mark.parametrize("on", WITH_HOPPER)
@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_products_are_scaled_by_rows_and_blocks(case, on):
    given, want = operands(**case)
    np.testing.assert_array_equal(run(program(**case), *given, on=on)[4], want)


@pytest.mark.parametrize("target,word", [(SM80, "mma."), (SM90A, "wgmma.")])
def test_the_steps_are_multiplied_by_tensor_cores(target, word):
    kernel = tilelang.compile(program(dt="float16", ga=64, gb=64, stages=2), target=target)
    assert word in str(kernel.report())


def broken(build):
    """A program with one call of T.gemm_blockscaled."""
    @T.prim_func
    def main(A: T.Tensor((64, 64), "float16"), n: T.int32):
        with T.Kernel(1, threads=128):
            a, b = T.alloc_shared((64, 64), "float16"), T.alloc_shared((64, 64), "float16")
            c, h = T.alloc_fragment((64, 64), "float32"), T.alloc_fragment((64, 64), "int32")
            s, w = T.alloc_shared((64, 2), "float32"), T.alloc_shared((32, 2), "float32")
            i = T.alloc_shared((64, 2), "int16")
            build(a, b, c, s, w, i, h, n)

    return main


GOOD = {"k_start": 0, "sf_a_granularity_k": 32, "sf_b_granularity_k": 32}


@pytest.mark.parametrize("build,words", [
    (lambda a, b, c, s, w, i, h, n: T.gemm_blockscaled(a, b, c, w, s, **GOOD), r"SFA has extents \(32, 2\), A `a` has 64 rows"),
    (lambda a, b, c, s, w, i, h, n: T.gemm_blockscaled(a, b, c, s, i, **GOOD), "SFB has elements of int16"),
    (lambda a, b, c, s, w, i, h, n: T.gemm_blockscaled(a, b, c, s, s, **{**GOOD, "sf_a_granularity_k": 0}),
     "sf_a_granularity_k is a number of elements, found 0"),
    (lambda a, b, c, s, w, i, h, n: T.gemm_blockscaled(a, b, c, s, s, **{**GOOD, "k_start": n}), "not provably a multiple"),
    (lambda a, b, c, s, w, i, h, n: T.gemm_blockscaled(a, b, c, s, s, **{**GOOD, "k_start": 16}), "k_start = 16 is not"),
    (lambda a, b, c, s, w, i, h, n: T.gemm_blockscaled(a, b, h, s, s, **GOOD), "adds floats to C, found int32"),
    (lambda a, b, c, s, w, i, h, n: T.gemm_blockscaled(a, b, c, s, s, use_2cta=True, **GOOD), "Blackwell"),
    (lambda a, b, c, s, w, i, h, n: T.gemm_blockscaled(a, b, c, s, s, clear_accum=1, **GOOD), "clear_accum must be a bool"),
    (lambda a, b, c, s, w, i, h, n: T.gemm_blockscaled(a, b, c, s, s), "k_start"),
])
def test_scales_that_do_not_go_with_the_operands(build, words):
    with pytest.raises((TypeError, ValueError, NotImplementedError), match=words):
        broken(build)


def test_a_start_that_a_loop_steps_to_is_a_multiple():
    def build(a, b, c, s, w, i, h, n):
        T.gemm_blockscaled(a, b, c, s, s, **{**GOOD, "k_start": n * 64})
        at = n * 2
        T.gemm_blockscaled(a, b, c, s, s, **{**GOOD, "k_start": at * 16 + 32})

    broken(build)

    @T.prim_func
    def main(C: T.Tensor((64, 64), "float32")):
        with T.Kernel(1, threads=128):
            a, s = T.alloc_shared((64, 64), "float16"), T.alloc_shared((64, 4), "float32")
            c = T.alloc_fragment((64, 64), "float32")
            T.fill(a, 1.0)
            T.clear(c)
            for i, j in T.Parallel(64, 4):
                s[i, j] = T.cast(j, "float32")
            for k in range(0, 256, 64):
                T.gemm_blockscaled(a, a, c, s, s, transpose_B=True, k_start=k, sf_a_granularity_k=64, sf_b_granularity_k=64)
            T.copy(c, C)

    for on in WITH_HOPPER:
        assert (run(main, on=on)[0] == 64 * (0 + 1 + 4 + 9)).all(), on
