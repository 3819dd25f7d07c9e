"""Float32 tiles of tf32 numbers: what is one, and that GEMMs of them by wgmma and mma.sync do not round."""

import numpy as np
import pytest

import tilelang
import tilelang.language as T
from tilelang.ir import Buffer, walk
from tilelang.target import Target
from tilelang.transform.framework.pass_ import PassContext
from tilelang.transform.legalize.cut_tiles import cut_tiles


def program(low_cut, depth=128, threads=128):
    """x @ w.T in three products of halves."""
    @T.prim_func
    def main(X: T.Tensor((64, depth), "float32"), W: T.Tensor((64, depth), "float32"), C: T.Tensor((64, 64), "float32")):
        with T.Kernel(1, threads=threads):
            xs, ws = T.alloc_shared((64, 32), "float32"), T.alloc_shared((64, 32), "float32")
            xh, xl = T.alloc_fragment((64, 32), "float32"), T.alloc_fragment((64, 32), "float32")
            wh, wl = T.alloc_shared((64, 32), "float32"), T.alloc_shared((64, 32), "float32")
            acc, part = T.alloc_fragment((64, 64), "float32"), T.alloc_fragment((64, 64), "float32")
            T.clear(acc)
            for k in T.Pipelined(depth // 32, num_stages=2):
                T.copy(X[0:64, k * 32:k * 32 + 32], xs)
                T.copy(W[0:64, k * 32:k * 32 + 32], ws)
                for i, j in T.Parallel(64, 32):
                    cut = T.reinterpret((T.reinterpret(xs[i, j], "int32") + 4096) & -8192, "float32")
                    xh[i, j] = cut
                    xl[i, j] = T.reinterpret(T.reinterpret(xs[i, j] - cut, "int32") & -8192, "float32")
                for i, j in T.Parallel(64, 32):
                    cut = T.reinterpret((T.reinterpret(ws[i, j], "int32") + 4096) & -8192, "float32")
                    wh[i, j] = cut
                    if low_cut:
                        wl[i, j] = T.reinterpret(T.reinterpret(ws[i, j] - cut, "int32") & -8192, "float32")
                    else:
                        wl[i, j] = ws[i, j] - cut
                T.gemm(xl, wh, part, transpose_B=True, clear_accum=True)
                T.gemm(xh, wl, part, transpose_B=True)
                T.gemm(xh, wh, part, transpose_B=True)
                for i, j in T.Parallel(64, 64):
                    acc[i, j] += part[i, j]
            T.copy(acc, C)

    return main


@pytest.mark.parametrize("low_cut", [True, False])
def test_tiles_of_tf32_numbers_are_found(low_cut):
    func = cut_tiles(program(low_cut).func, PassContext(Target("sm_90a"), {}))
    found = {b.name for b in walk(func.body, Buffer) if b.facts.tf32}
    assert found == ({"xh", "xl", "wh", "wl"} if low_cut else {"xh", "xl", "wh"})


@pytest.mark.parametrize("arch, instruction", [("sm_90a", "wgmma"), ("sm_80", "mma.")])
def test_gemms_of_halves_keep_float32(arch, instruction):
    kernel = tilelang.compile(program(True), [2], target=f"cuda -arch={arch}", execution_backend="simulator")
    x, w = (np.random.default_rng(k).standard_normal((64, 128)).astype(np.float32) for k in range(2))
    wanted = x.astype(np.float64) @ w.T.astype(np.float64)
    assert np.abs(kernel(x, w) - wanted).max() < 2.0**-19 * np.abs(wanted).max()
    assert instruction in str(kernel.report()) and "to_tf32" not in kernel.get_kernel_source()
