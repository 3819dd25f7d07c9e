"""Names of tilelang.rocm.language: MFMA by hand computes what NumPy does, and the rest refuses by name."""

import numpy as np
import pytest

import tilelang
import tilelang.rocm.language as T
from tilelang.target import Target

H4, F4 = "float16x4", "float32x4"


def by_hand(chip="gfx942", prefix="f32_16x16x16f16"):
    @T.prim_func
    def main(A: T.Tensor((16, 32), "float16"), B: T.Tensor((32, 16), "float16"), C: T.Tensor((16, 16), "float32")):
        with T.Kernel(1, threads=64):
            lane = T.get_thread_binding()
            a, b, c = T.alloc_local((8,), "float16"), T.alloc_local((8,), "float16"), T.alloc_local((4,), "float32")
            for e in T.serial(4):
                c[e] = 0.0
            for e in T.serial(8):
                a[e] = A[lane % 16, e // 4 * 16 + lane // 16 * 4 + e % 4]
                b[e] = B[e // 4 * 16 + lane // 16 * 4 + e % 4, lane % 16]
            for step in T.serial(2):
                T.mfma(F4, prefix, "row", "row", H4, H4, F4, a.data, step, b.data, step, c.data, 0)
            for e in T.serial(4):
                row, column = T.mfma_store_index_map(lane, e)
                C[row, column] = c[e]

    return main


@pytest.mark.parametrize("chip", ["gfx90a", "gfx942", "gfx950"])
def test_mfma_by_hand(chip):
    with Target(chip):
        kernel = tilelang.compile(by_hand(), execution_backend="simulator")
        a, b = (np.random.default_rng(0).standard_normal(s).astype(np.float16) for s in ((16, 32), (32, 16)))
        c = np.zeros((16, 16), np.float32)
        kernel(a, b, c)
        np.testing.assert_allclose(c, a.astype(np.float32) @ b.astype(np.float32), rtol=1e-4, atol=1e-4)
        assert "__builtin_amdgcn_mfma_f32_16x16x16f16" in tilelang.lower(by_hand()).kernel_source


def test_an_instruction_that_the_chip_has_not_is_refused():
    with Target("gfx942"), pytest.raises(ValueError, match="gfx942 has no instruction mfma_f32_16x16x32_f16"):
        by_hand(prefix="f32_16x16x32_f16")


def test_maps_and_other_names():
    for shape, registers, place in ((16, 4, T.mfma_store_index_map), (32, 16, T.mfma_store_index_map_32x32)):
        assert {place(lane, r) for lane in range(64) for r in range(registers)} == {
            (i, j) for i in range(shape) for j in range(shape)}
    assert T.get_mma_micro_size("float16") == (16, 16, 16) and T.tvm_mfma is T.mfma


# Names of this dialect beside the common ones, and what becomes of each: it works, or says that it does not.
WORKS = """mfma tvm_mfma mfma_store tvm_mfma_store mfma_store_index_map mfma_store_index_map_32x32 make_mfma_swizzle_layout
    get_mma_micro_size MatrixCoreIntrinEmitter""".split()
REFUSED = """ds_read_tr8_b64 ds_read_tr16_b64 MatrixCorePreshuffleIntrinEmitter rdna_wmma rdna_wmma_store tvm_rdna_wmma
    tvm_rdna_wmma_store WMMAIntrinEmitter""".split()


@pytest.mark.spec("S:amd-names", "S:dialects")
def test_every_name_of_the_dialect_works_or_says_that_it_does_not():
    from tilelang.language import common

    assert {*WORKS, *REFUSED} == {*T.__all__} - {*common.__all__} | {"get_mma_micro_size"}
    assert T.gemm is common.gemm and T.Kernel is common.Kernel
    for name in WORKS:
        assert "not available" not in getattr(T, name).__doc__.lower()
    for name in REFUSED:
        with pytest.raises(NotImplementedError, match=f"{name} is not available: T.gemm and T.copy choose"):
            getattr(T, name)(1)


@pytest.mark.spec("S:amd-names")
@pytest.mark.parametrize("m, prefix, depth", [(16, "f32_16x16x16f16", 16), (32, "f32_32x32x8f16", 8)])
def test_an_accumulator_is_stored_by_one_call(m, prefix, depth):
    """tvm_mfma_store was refused."""
    run, acc = m * depth // 64, f"float32x{m * m // 64}"

    @T.prim_func
    def main(A: T.Tensor((m, depth), "float16"), B: T.Tensor((depth, m), "float16"), C: T.Tensor((2, m, m + 8), "float16")):
        with T.Kernel(1, threads=64):
            lane = T.get_thread_binding()
            a, b, c = (T.alloc_local((n,), t) for n, t in ((run, "float16"), (run, "float16"), (m * m // 64, "float32")))
            T.clear(c)
            for e in T.serial(run):
                a[e] = A[lane % m, lane // m * run + e]
                b[e] = B[lane // m * run + e, lane % m]
            T.mfma(acc, prefix, "row", "row", H4, H4, acc, a.data, 0, b.data, 0, c.data, 0)
            T.tvm_mfma_store("float16", m, m, T.access_ptr(C[1, 0, 8], "w"), c.data, 0, m + 8)

    a, b = (np.random.default_rng(0).standard_normal(s).astype(np.float16) for s in ((m, depth), (depth, m)))
    c = np.zeros((2, m, m + 8), np.float16)
    tilelang.compile(main, target="gfx942", execution_backend="simulator")(a, b, c)
    np.testing.assert_allclose(c[1, :, 8:], a.astype(np.float32) @ b.astype(np.float32), rtol=1e-3, atol=1e-3)
    assert not c[0].any() and not c[1, :, :8].any()


@pytest.mark.spec("S:amd-names")
@pytest.mark.parametrize("chip, of, out, k_pack, transposed", [
    ("gfx90a", "float16", "float32", 1, (False, True)), ("gfx942", "bfloat16", "float32", 2, (True, False)),
    ("gfx942", "float8_e4m3fnuz", "float32", 2, (False, True)), ("gfx950", "int8", "int32", 1, (False, False)),
    ("gfx90a", "float64", "float64", 2, (True, True)), ("gfx950", "float32", "float32", 2, (False, True))])
def test_the_emitter_multiplies_a_block_tile(chip, of, out, k_pack, transposed):
    """MatrixCoreIntrinEmitter was refused."""
    import ml_dtypes

    with Target(chip):
        e = T.MatrixCoreIntrinEmitter(of, of, out, *transposed, 2, 1, 32, 32, 0, k_pack=k_pack)
        step = e.micro_size_k * k_pack
        e = T.MatrixCoreIntrinEmitter(of, of, out, *transposed, 2, 1, 32, 32, 2 * step, k_pack=k_pack)
        shapes = [s[::-1] if t else s for s, t in zip(((64, 2 * step), (2 * step, 32)), transposed)]

        @T.prim_func
        def main(A: T.Tensor(shapes[0], of), B: T.Tensor(shapes[1], of), C: T.Tensor((64, 32), out)):
            with T.Kernel(1, threads=e.threads):
                a_s, b_s = T.alloc_shared(shapes[0], of), T.alloc_shared(shapes[1], of)
                a, b = T.alloc_local((e.warp_rows * e.local_size_a * k_pack,), of), T.alloc_local(
                    (e.warp_cols * e.local_size_b * k_pack,), of)
                c = T.alloc_local((e.warp_rows * e.warp_cols * e.local_size_out,), out)
                T.clear(c)
                T.copy(A, a_s)
                T.copy(B, b_s)
                for ki in T.serial(2):
                    e.ldmatrix_a(a, a_s, ki)
                    e.ldmatrix_b(b, b_s, ki)
                    e.mfma(a, b, c)
                e.stmatrix(c, C, 0, 0)

        kernel = tilelang.compile(main, execution_backend="simulator")
    numpy = getattr(ml_dtypes, of) if hasattr(ml_dtypes, of) else of
    a, b = (np.random.default_rng(1).integers(-4, 5, s).astype(numpy) for s in shapes)
    c = np.zeros((64, 32), out)
    kernel(a, b, c)
    wide = [(x.T if t else x).astype(np.float64) for x, t in zip((a, b), transposed)]
    np.testing.assert_array_equal(c, wide[0] @ wide[1])
    assert e.get_store_index_map(True)(*e.get_store_index_map()(37, 2)) == (37, 2)
    assert e.make_mfma_store_layout(T.FragmentBuffer((64, 32), out)).threads == 128
    with pytest.raises(NotImplementedError, match="permuted beforehand"):
        T.MatrixCoreIntrinEmitter(of, of, out, b_preshuffle=True)
    with pytest.raises(ValueError, match="no tensor-core instruction multiplies float16 by int8"):
        T.MatrixCoreIntrinEmitter("float16", "int8", "float32")


@pytest.mark.spec("S:amd-gemm")
@pytest.mark.parametrize("k_pack", [1, 2])
@pytest.mark.parametrize("target", ["gfx942", "sm_80", "cpu"])
def test_k_pack_is_accepted_by_every_target(target, k_pack):
    @T.prim_func
    def main(A: T.Tensor((64, 64), "float16"), B: T.Tensor((64, 64), "float16"), C: T.Tensor((64, 64), "float32")):
        with T.Kernel(1, threads=128):
            a, b = T.alloc_shared((64, 64), "float16"), T.alloc_shared((64, 64), "float16")
            c = T.alloc_fragment((64, 64), "float32")
            T.clear(c)
            T.copy(A, a)
            T.copy(B, b)
            T.gemm(a, b, c, k_pack=k_pack)
            T.copy(c, C)

    assert tilelang.lower(main, target=target).kernel_source


@pytest.mark.spec("S:amd-tools")
def test_tuning_without_the_gpu_says_so(monkeypatch):
    from tilelang.runtime import hip_driver

    pytest.importorskip("ziglang")

    @tilelang.autotune(configs=[{"rows": 32}, {"rows": 64}])
    @tilelang.jit(target="gfx942", out_idx=[1])
    def scaled(n, rows=32):
        @T.prim_func
        def main(A: T.Tensor((n,), "float32"), B: T.Tensor((n,), "float32")):
            with T.Kernel(T.ceildiv(n, rows), threads=64) as bx:
                for i in T.Parallel(rows):
                    B[bx * rows + i] = A[bx * rows + i] * 2.0

        return main

    monkeypatch.setattr(hip_driver, "load_rocm", lambda: None)
    hip_driver._driver.cache_clear()
    with pytest.raises(RuntimeError, match="hip-missing.*no HIP driver"):
        scaled(256)
