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
    for name in ("mfma_store", "MatrixCoreIntrinEmitter", "rdna_wmma", "ds_read_tr8_b64"):
        with pytest.raises(NotImplementedError, match=f"{name} is not available: T.gemm and T.copy choose"):
            getattr(T, name)(1)


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
