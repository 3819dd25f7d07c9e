"""Programs in the language: the whole way down to the device simulator, races refused, against the tile meaning."""

import numpy as np
from everywhere import WITH_HOPPER, everywhere

import tilelang.language as T
from tilelang.ir import Alloc, numpy_dtype, walk
from tilelang.simulator.device.run import run_device
from tilelang.simulator.reference.run import run_tile
from tilelang.target import Target
from tilelang.transform.pipeline import lower

f16, f32 = "float16", "float32"


def values(shape, dt, seed):
    rng = np.random.default_rng(seed)
    npd = numpy_dtype(dt)
    if dt == "bool":
        return rng.integers(0, 2, shape).astype(bool)
    if npd.kind in "iu":
        return rng.integers(0 if npd.kind == "u" else -9, 9, shape).astype(npd)
    return rng.standard_normal(shape).astype(npd)


def check(p, sizes=None, tol=1e-5, **fixed):
    f = p.func
    args = {}
    for k, (_, b) in enumerate(f.buffers):
        shape = tuple(d if isinstance(d, int) else sizes[d.name] for d in b.shape)
        args[b.name] = fixed.get(b.name, values(shape, b.dtype, k))
    for q in f.params:
        if not q.dtype.is_handle:
            args[q.name] = sizes[q.name]
    want = run_tile(f, args)
    low = lower(f, Target({"kind": "cuda", "arch": "sm_80"}))
    rep = run_device(low, args)
    for n, w in want.items():
        got = rep.outputs[n].astype(np.float64)
        np.testing.assert_allclose(got, w.astype(np.float64), rtol=tol, atol=tol, err_msg=n)
    return low


def test_continue_if_else():
    @T.prim_func
    def main(A: T.Tensor((50, 40), f32), C: T.Tensor((50, 40), f32)):
        with T.Kernel(2, 2, threads=64) as (bx, by):
            for i, j in T.Parallel(32, 32):
                if i + j < 5:
                    continue
                if A[by * 32 + i, bx * 32 + j] > 0:
                    C[by * 32 + i, bx * 32 + j] = A[by * 32 + i, bx * 32 + j]
                else:
                    C[by * 32 + i, bx * 32 + j] = -1.0

    check(main)


def test_local_per_thread():
    @T.prim_func
    def main(A: T.Tensor((128, 8), f32), C: T.Tensor((128,), f32)):
        with T.Kernel(1, threads=128):
            tx = T.get_thread_binding()
            x = T.alloc_local((8,), f32)
            s = T.alloc_var(f32, init=0.0)
            T.copy(A[tx, :], x)
            for k in T.serial(8):
                s = s + x[k]
            C[tx] = s

    check(main)


def test_vectorized():
    @T.prim_func
    def main(A: T.Tensor((128, 8), f16), C: T.Tensor((128, 8), f16)):
        with T.Kernel(1, threads=128):
            tx = T.get_thread_binding()
            for v in T.vectorized(8):
                C[tx, v] = A[tx, v] * 2

    check(main)


def test_3d_fragment_and_reduce():
    @T.prim_func
    def main(A: T.Tensor((4, 8, 32), f32), C: T.Tensor((4, 32), f32), D: T.Tensor((4, 8), f32),
             E: T.Tensor((8, 32), f32)):
        with T.Kernel(1, threads=64):
            x = T.alloc_fragment((4, 8, 32), f32)
            c = T.alloc_fragment((4, 32), f32)
            d = T.alloc_fragment((4, 8), f32)
            e = T.alloc_fragment((8, 32), f32)
            T.copy(A, x)
            T.reduce_sum(x, c, dim=1)
            T.reduce_max(x, d, dim=2)
            T.reduce_min(x, e, dim=0)
            T.copy(c, C)
            T.copy(d, D)
            T.copy(e, E)

    check(main)


def test_views():
    @T.prim_func
    def main(A: T.Tensor((32, 32), f32), C: T.Tensor((1024,), f32), D: T.Tensor((16, 64), f32)):
        with T.Kernel(1, threads=64):
            s = T.alloc_shared((32, 32), f32)
            T.copy(A, s)
            v = T.reshape(s, (1024,))
            for i in T.Parallel(1024):
                C[i] = v[i]
            f = T.alloc_fragment((32, 32), f32)
            T.copy(A, f)
            g = T.reshape(f, (16, 64))
            for i, j in T.Parallel(16, 64):
                D[i, j] = g[i, j] + 1.0

    check(main)


def test_view_dtype():
    @T.prim_func
    def main(A: T.Tensor((32, 32), f32), C: T.Tensor((32, 32), "int32")):
        with T.Kernel(1, threads=64):
            s = T.alloc_shared((32, 32), f32)
            T.copy(A, s)
            v = T.view(s, dtype="int32")
            T.copy(v, C)

    check(main)


def test_regions_4d():
    @T.prim_func
    def main(A: T.Tensor((2, 20, 3, 24), f16), C: T.Tensor((2, 20, 3, 24), f16)):
        with T.Kernel(2, 3, 2, threads=96) as (bx, h, b):
            s = T.alloc_shared((16, 24), f16)
            T.copy(A[b, bx * 16:(bx + 1) * 16, h, :], s)
            T.copy(s, C[b, bx * 16:(bx + 1) * 16, h, :])

    check(main)


def test_dynamic_region():
    n = T.dynamic("n")

    @T.prim_func
    def main(A: T.Tensor((n, 32), f32), C: T.Tensor((n, 32), f32)):
        with T.Kernel(1, threads=64):
            T.copy(A[0:n, 0:32], C[0:n, 0:32])

    for k in (1, 7, 70):
        check(main, {"n": k})


def test_fill_slices_safe_value():
    @T.prim_func
    def main(A: T.Tensor((10, 20), f32), C: T.Tensor((16, 32), f32)):
        with T.Kernel(1, threads=64):
            s = T.alloc_shared((16, 32), f32)
            T.annotate_safe_value({A: -5.0})
            T.copy(A[0, 0], s)
            T.fill(s[2:4, 5:9], 7.0)
            T.copy(s, C)

    check(main)


def test_bool_where():
    @T.prim_func
    def main(M: T.Tensor((64,), "bool"), A: T.Tensor((64,), f32), C: T.Tensor((64,), f32)):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(64):
                C[i] = T.if_then_else(M[i], A[i], 0.0)

    check(main)


def test_serial_outside_parallel_part_of_fragment():
    @T.prim_func
    def main(A: T.Tensor((16, 64), f32), C: T.Tensor((16, 64), f32)):
        with T.Kernel(1, threads=64):
            f = T.alloc_fragment((16, 64), f32)
            T.clear(f)
            for k in T.serial(4):
                for i, j in T.Parallel(16, 16):
                    f[i, k * 16 + j] = A[i, k * 16 + j] * 2.0
            T.copy(f, C)

    check(main)


def test_threads_2d_and_atomic_prev():
    @T.prim_func
    def main(A: T.Tensor((64,), "int32"), C: T.Tensor((4,), "int32")):
        with T.Kernel(2, threads=(8, 4)) as bx:
            for i in T.Parallel(32):
                T.atomic_add(C[A[bx * 32 + i] % 4], 1)

    check(main, A=np.arange(64).astype(np.int32))


def test_cumsum_fragment():
    @T.prim_func
    def main(A: T.Tensor((8, 100), f32), C: T.Tensor((8, 100), f32)):
        with T.Kernel(1, threads=64):
            f = T.alloc_fragment((8, 100), f32)
            T.copy(A, f)
            T.cumsum(f, dim=1, reverse=True)
            T.copy(f, C)

    check(main, tol=1e-4)


def test_while_and_if_uniform():
    @T.prim_func
    def main(A: T.Tensor((4, 64), f32), C: T.Tensor((64,), f32)):
        with T.Kernel(1, threads=64):
            s = T.alloc_shared((64,), f32)
            f = T.alloc_fragment((64,), f32)
            k = T.alloc_var("int32", init=0)
            T.clear(f)
            while k < 4:
                if k % 2 == 0:
                    T.copy(A[k, :], s)
                    for i in T.Parallel(64):
                        f[i] += s[63 - i]
                k = k + 1
            T.copy(f, C)

    check(main)


def test_gather_from_fragment():
    @T.prim_func
    def main(A: T.Tensor((64,), f32), P: T.Tensor((64,), "int32"), C: T.Tensor((64,), f32)):
        with T.Kernel(1, threads=64):
            f = T.alloc_fragment((64,), f32)
            T.copy(A, f)
            for i in T.Parallel(64):
                C[i] = f[P[i]]

    check(main, P=np.random.default_rng(0).permutation(64).astype(np.int32))


def test_row_vector_broadcasts():
    @T.prim_func
    def main(A: T.Tensor((32, 64), f32), R: T.Tensor((64,), f32), C: T.Tensor((32, 64), f32)):
        with T.Kernel(1, threads=128):
            f = T.alloc_fragment((32, 64), f32)
            r = T.alloc_fragment((64,), f32)
            m = T.alloc_fragment((32,), f32)
            T.copy(A, f)
            T.copy(R, r)
            T.reduce_max(f, m, dim=1)
            for i, j in T.Parallel(32, 64):
                f[i, j] = f[i, j] * r[j] + m[i]
            T.copy(f, C)

    check(main)


def test_histogram_shared_atomics():
    @T.prim_func
    def main(A: T.Tensor((256,), "int32"), C: T.Tensor((8,), "int32")):
        with T.Kernel(1, threads=64):
            s = T.alloc_shared((8,), "int32")
            T.clear(s)
            for i in T.Parallel(256):
                T.atomic_add(s[A[i] % 8], 1)
            T.copy(s, C)

    check(main, A=np.arange(256).astype(np.int32))


def test_gemm_epilogue_through_shared():
    @T.prim_func
    def main(A: T.Tensor((128, 64), f16), B: T.Tensor((64, 128), f16), C: T.Tensor((128, 128), f16)):
        with T.Kernel(1, threads=128):
            As = T.alloc_shared((128, 64), f16)
            Bs = T.alloc_shared((64, 128), f16)
            Cs = T.alloc_shared((128, 128), f16)
            c = T.alloc_fragment((128, 128), f32)
            T.copy(A, As)
            T.copy(B, Bs)
            T.clear(c)
            T.gemm(As, Bs, c)
            T.copy(c, Cs)
            T.copy(Cs, C)

    check(main, tol=5e-2)


def test_gemm_a_copied_to_fragment():
    @T.prim_func
    def main(A: T.Tensor((64, 64), f16), B: T.Tensor((64, 64), f16), C: T.Tensor((64, 64), f32)):
        with T.Kernel(1, threads=128):
            As = T.alloc_shared((64, 64), f16)
            Bs = T.alloc_shared((64, 64), f16)
            Af = T.alloc_fragment((64, 64), f16)
            c = T.alloc_fragment((64, 64), f32)
            T.copy(A, As)
            T.copy(B, Bs)
            T.copy(As, Af)
            T.clear(c)
            T.gemm(Af, Bs, c)
            T.copy(c, C)

    check(main, tol=1e-3)


def test_double_gemm_both_fragments():
    @T.prim_func
    def main(A: T.Tensor((64, 64), f16), B: T.Tensor((64, 64), f16), C: T.Tensor((64, 64), f32)):
        with T.Kernel(1, threads=128):
            As = T.alloc_shared((64, 64), f16)
            Bf = T.alloc_fragment((64, 64), f16)
            c = T.alloc_fragment((64, 64), f32)
            T.copy(A, As)
            T.copy(B, Bf)
            T.clear(c)
            T.gemm(As, Bf, c)
            T.copy(c, C)

    check(main, tol=1e-3)


def test_1_thread():
    @T.prim_func
    def main(A: T.Tensor((10,), f32), C: T.Tensor((1,), f32)):
        with T.Kernel(1, threads=1):
            f = T.alloc_fragment((10,), f32)
            s = T.alloc_fragment((1,), f32)
            T.copy(A, f)
            T.reduce_sum(f, s, dim=0)
            T.copy(s, C)

    check(main)


def test_reduce_1d_block():
    @T.prim_func
    def main(A: T.Tensor((1000,), f32), C: T.Tensor((1,), f32)):
        with T.Kernel(1, threads=256):
            f = T.alloc_fragment((1000,), f32)
            s = T.alloc_fragment((1,), f32)
            T.copy(A, f)
            T.reduce_sum(f, s, dim=0)
            T.copy(s, C)

    check(main, tol=1e-4)


def test_fragment_scalar_use_everywhere():
    @T.prim_func
    def main(A: T.Tensor((512,), f32), C: T.Tensor((512,), f32)):
        with T.Kernel(1, threads=128):
            f = T.alloc_fragment((512,), f32)
            s = T.alloc_fragment((1,), f32)
            T.copy(A, f)
            T.reduce_max(f, s, dim=0)
            for i in T.Parallel(512):
                f[i] = T.exp(f[i] - s[0])
            T.copy(f, C)

    check(main)


def test_parallel_inner_serial_dot():
    @T.prim_func
    def main(A: T.Tensor((32, 20), f32), B: T.Tensor((20, 24), f32), C: T.Tensor((32, 24), f32)):
        with T.Kernel(1, threads=64):
            As = T.alloc_shared((32, 20), f32)
            Bs = T.alloc_shared((20, 24), f32)
            c = T.alloc_fragment((32, 24), f32)
            T.copy(A, As)
            T.copy(B, Bs)
            T.clear(c)
            for i, j in T.Parallel(32, 24):
                for k in T.serial(20):
                    c[i, j] += As[i, k] * Bs[k, j]
            T.copy(c, C)

    check(main)


def test_stencil():
    @T.prim_func
    def main(A: T.Tensor((100,), f32), C: T.Tensor((100,), f32)):
        with T.Kernel(2, threads=64) as bx:
            for i in T.Parallel(64):
                C[bx * 64 + i] = A[bx * 64 + i - 1] + A[bx * 64 + i] + A[bx * 64 + i + 1]

    check(main)


def test_shift_in_shared():
    @T.prim_func
    def main(A: T.Tensor((64,), f32), C: T.Tensor((64,), f32)):
        with T.Kernel(1, threads=64):
            s = T.alloc_shared((66,), f32)
            T.clear(s)
            for i in T.Parallel(64):
                s[i + 1] = A[i]
            for i in T.Parallel(64):
                C[i] = s[i] + s[i + 2]

    check(main)


def test_reductions_over_warps_take_turns_in_two_exchanges():
    @T.prim_func
    def main(A: T.Tensor((64, 32), f32), C: T.Tensor((32,), f32), D: T.Tensor((32,), f32)):
        with T.Kernel(1, threads=128):
            f = T.alloc_fragment((64, 32), f32)
            c = T.alloc_fragment((32,), f32)
            d = T.alloc_fragment((32,), f32)
            T.clear(d)
            for k in T.serial(3):
                T.copy(A, f)
                T.reduce_max(f, c, dim=0)
                for i, j in T.Parallel(64, 32):
                    f[i, j] = f[i, j] - c[j] + T.cast(k, f32)
                T.reduce_sum(f, d, dim=0, clear=False)
            T.copy(c, C)
            T.copy(d, D)

    low = check(main, tol=1e-3)
    buffers = [x.buffer for x in walk(low.kernels[0].launch) if isinstance(x, Alloc)]
    storage = {b.data for b in buffers if b.name == "exchange"}
    assert len(storage) == 2


def test_the_only_element_of_a_fragment_is_read_at_a_serial_variable():
    """Its register was a Python int instead of a constant, and place_sync failed on it."""
    @T.prim_func
    def f(x: T.Tensor((1, 1024), "float32")):
        with T.Kernel(1, threads=128):
            mean = T.alloc_fragment((1,), "float32")
            p = T.alloc_fragment((1, 1024), "float32")
            sq = T.alloc_fragment((1, 1024), "float32")
            T.fill(mean, 2.0)
            T.copy(x, p)
            for i in T.serial(1):
                for j in T.Parallel(1024):
                    sq[i, j] = p[i, j] - mean[i]
            T.copy(sq, x)

    x = np.arange(1024, dtype=np.float32)[None]
    np.testing.assert_array_equal(everywhere(f, x, on=WITH_HOPPER)[0], x - 2)
