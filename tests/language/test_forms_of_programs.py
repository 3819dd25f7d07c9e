"""Forms of calls that programs use beside the specification's own: each runs as it is meant, or says what to write."""

import numpy as np
import pytest
from everywhere import WITH_HOPPER, everywhere, run

import tilelang.language as T
from tilelang.errors import TileLangWarning

f16, f32 = "float16", "float32"


def gemm_program(wg_wait):
    @T.prim_func
    def main(A: T.Tensor((128, 64), f16), B: T.Tensor((128, 64), f16), C: T.Tensor((128, 128), f32)):
        with T.Kernel(1, threads=128):
            a, b = T.alloc_shared((128, 32), f16), T.alloc_shared((128, 32), f16)
            c = T.alloc_fragment((128, 128), f32)
            T.clear(c)
            for k in T.Pipelined(2, num_stages=2):
                T.copy(A[:, k * 32:k * 32 + 32], a)
                T.copy(B[:, k * 32:k * 32 + 32], b)
                T.gemm(a, b, c, transpose_B=True, wg_wait=wg_wait)
                T.wait_wgmma(0)
            T.copy(c, C)

    return main


def test_wg_wait_of_a_gemm_is_taken_and_the_gemm_waits():
    rng = np.random.default_rng(1)
    a, b = (rng.integers(-4, 5, (128, 64)).astype(np.float16) for _ in range(2))
    with pytest.warns(TileLangWarning, match="gemm-waits: wg_wait=-1 has no effect.*T.wgmma_gemm") as seen:
        program = gemm_program(-1)
    assert len(seen) == 1 and seen[0].filename == __file__
    for on in ("tile", "sm_90a"):
        np.testing.assert_array_equal(run(program, a, b, on=on)[2], a.astype(f32) @ b.astype(f32).T)


def test_wg_wait_of_zero_is_what_a_gemm_does(recwarn):
    gemm_program(0)
    assert not recwarn.list


@pytest.mark.parametrize("number", (True, -2, "0", None))
def test_a_wg_wait_that_is_no_number_of_groups_is_refused(number):
    with pytest.raises(ValueError, match="wg_wait is -1 or a number of groups"):
        gemm_program(number)


def test_clamp_takes_its_bounds_by_name():
    @T.prim_func
    def main(X: T.Tensor((64,), f32), Y: T.Tensor((64,), f32)):
        with T.Kernel(1, threads=64):
            for i in T.Parallel(64):
                Y[i] = T.clamp(X[i], min_val=-1.0, max_val=T.float32(2.0))

    x = np.linspace(-4, 4, 64, dtype=f32)
    np.testing.assert_array_equal(everywhere(main, x)[1], np.clip(x, -1, 2))


def test_arrivals_and_waits_take_the_mbarrier_by_name():
    @T.prim_func
    def main(X: T.Tensor((128,), f32), Y: T.Tensor((128,), f32)):
        with T.Kernel(1, threads=128):
            S = T.alloc_shared((128,), f32)
            bar = T.alloc_barrier(128)
            tx = T.get_thread_binding()
            S[tx] = X[tx] * 2
            T.mbarrier_arrive(mbarrier=bar)
            T.mbarrier_wait_parity(mbarrier=bar, parity=0)
            Y[tx] = S[127 - tx]

    x = np.arange(128, dtype=f32)
    for on in ("tile", "sm_90a", "cpu"):
        np.testing.assert_array_equal(run(main, x, on=on)[1], 2 * x[::-1])


def test_a_launch_without_extents_is_one_block():
    @T.prim_func
    def main(X: T.Tensor((64,), "int32"), Y: T.Tensor((64,), "int32")):
        with T.Kernel(threads=64) as bx:
            assert T.get_block_extents() == [1] and T.get_thread_extent() == 64
            Y[T.get_thread_binding()] = X[T.get_thread_binding()] + bx + 1

    x = np.arange(64, dtype=np.int32)
    np.testing.assert_array_equal(everywhere(main, x)[1], x + 1)

@T.macro
def scale_and_inverse(m):
    return m * 2.0, 1.0 / m


def test_a_scalar_of_a_loop_body_may_have_the_name_of_a_tensor_parameter():
    @T.prim_func
    def main(x_sf: T.Tensor((2, 64), f32), m: T.Tensor((64,), f32), out: T.Tensor((4, 2, 64), f32)):
        with T.Kernel(2, threads=64) as pid:
            frag = T.alloc_fragment((64,), f32)
            for k in T.serial(4):
                for i in T.Parallel(64):
                    frag[i] = x_sf[pid, i]
                for i in T.Parallel(64):
                    x_sf, inv = scale_and_inverse(m[i] + k)
                    out[k, pid, i] = x_sf + inv + frag[i]

    rng = np.random.default_rng(2)
    x, m = rng.integers(-9, 9, (2, 64)).astype(f32), 2.0 ** rng.integers(0, 2, 64).astype(f32)
    want = np.stack([(m + np.float32(k)) * 2 + 1 / (m + np.float32(k)) + x for k in range(4)])
    np.testing.assert_allclose(everywhere(main, x, m)[2], want, rtol=1e-6)


@pytest.mark.parametrize("nested", (False, True))
def test_buffers_that_change_places_in_a_loop_are_refused(nested):
    with pytest.raises(RuntimeError, match="`a` is re-bound in the loop"):

        @T.prim_func
        def main(X: T.Tensor((64,), f32), Y: T.Tensor((64,), f32)):
            with T.Kernel(1, threads=64):
                a, b = T.alloc_fragment((64,), f32), T.alloc_fragment((64,), f32)
                for _ in T.serial(4):
                    T.copy(a, Y)
                    if nested:
                        for _ in T.serial(2):
                            a = b
                    else:
                        a, b = b, a


def test_the_tensor_behind_such_a_scalar_is_not_read_after_the_loop():
    with pytest.raises(RuntimeError, match="scope.: Immutable variable `x`"):

        @T.prim_func
        def main(x: T.Tensor((64,), f32), Y: T.Tensor((64,), f32)):
            with T.Kernel(1, threads=64):
                for i in T.Parallel(64):
                    x = x[i] + 1.0
                    Y[i] = x
                T.copy(x, Y)


def test_a_return_under_a_condition_of_the_block_ends_the_block():
    @T.prim_func
    def main(n: T.int32, X: T.Tensor((8, 64), f32), Y: T.Tensor((8, 64), f32)):
        with T.Kernel(8, threads=64) as b:
            if b >= n:
                if n > 6:
                    Y[b, T.get_thread_binding()] = 5.0
                return
            s = T.alloc_shared((64,), f32)
            T.copy(X[b, :], s)
            for i in T.Parallel(64):
                Y[b, i] = s[63 - i] + 1.0

    x = np.arange(512, dtype=f32).reshape(8, 64)
    for n, rest in ((3, 0), (7, 5), (9, 0)):
        want = np.where(np.arange(8)[:, None] < n, x[:, ::-1] + 1, np.float32(rest))
        np.testing.assert_array_equal(everywhere(main, n, x, on=WITH_HOPPER)[1], want)


def test_a_return_in_a_loop_of_some_threads_ends_those():
    @T.prim_func
    def main(X: T.Tensor((64,), "int32"), Y: T.Tensor((64,), "int32")):
        with T.Kernel(1, threads=64):
            t = T.get_thread_binding()
            for k in T.serial(4):
                if X[t] == k:
                    Y[t] = k + 10
                    return
            Y[t] = 1

    x = (np.arange(64) % 7).astype(np.int32)
    np.testing.assert_array_equal(everywhere(main, x)[1], np.where(x < 4, x + 10, 1))


def test_a_return_of_a_macro_or_on_the_host_under_a_condition_is_refused():
    @T.macro
    def leave(x):
        if x > 3:
            return

    with pytest.raises(NotImplementedError, match="return-in-control-flow"):

        @T.prim_func
        def inside(X: T.Tensor((64,), "int32")):
            with T.Kernel(1, threads=64):
                leave(X[0])

    with pytest.raises(NotImplementedError, match="return-in-control-flow"):

        @T.prim_func
        def outside(n: T.int32, X: T.Tensor((64,), "int32")):
            if n > 3:
                return
            with T.Kernel(1, threads=64):
                X[0] = 1


def test_an_index_of_the_launch_is_named_by_a_thread_binding_that_is_a_value():
    @T.prim_func
    def main(X: T.Tensor((2, 256), f32), Y: T.Tensor((2, 256), f32)):
        with T.Kernel(2, threads=(64, 2)) as bx:
            tx = T.thread_binding(0, 64, thread="threadIdx.x")
            for k in T.serial(2):
                ty, b = T.thread_binding(0, 2, thread="threadIdx.y"), T.thread_binding(2, thread="blockIdx.x")
                if X[bx, k * 128 + ty * 64 + tx] < 0:
                    continue
                Y[b, k * 128 + ty * 64 + tx] = X[bx, k * 128 + ty * 64 + tx] + 1.0

    x = np.random.default_rng(3).integers(-3, 4, (2, 256)).astype(f32)
    np.testing.assert_array_equal(everywhere(main, x)[1], np.where(x < 0, 0, x + 1))


def test_a_thread_binding_of_another_extent_than_the_launch_is_refused():
    with pytest.raises(ValueError, match="launch-dim.: threadIdx.x runs over 64 in this launch, not over 128"):

        @T.prim_func
        def main(X: T.Tensor((64,), f32)):
            with T.Kernel(1, threads=64):
                tx = T.thread_binding(0, 128, thread="threadIdx.x")
                X[tx] = 1.0


def test_a_launch_of_thread_bindings_that_are_values():
    @T.prim_func
    def main(X: T.Tensor((4, 64), f32), Y: T.Tensor((4, 64), f32)):
        bx = T.thread_binding(0, 4, thread="blockIdx.x")
        tx = T.thread_binding(0, 64, thread="threadIdx.x")
        Y[bx, tx] = X[bx, tx] + 1.0

    x = np.arange(256, dtype=f32).reshape(4, 64)
    np.testing.assert_array_equal(everywhere(main, x)[1], x + 1)


def test_stores_in_an_async_scope_are_done_after_the_wait():
    @T.prim_func
    def main(X: T.Tensor((4, 256), f16), rows: T.Tensor((8,), "int32"), Y: T.Tensor((8, 256), f16)):
        with T.Kernel(1, threads=64):
            s = T.alloc_shared((2, 256), f16)
            tx = T.get_thread_binding()
            for k in T.serial(8):
                with T.attr("default", "async_scope", 1):
                    for v in T.vectorized(4):
                        s[k % 2, tx * 4 + v] = X[rows[k], tx * 4 + v]
                T.ptx_commit_group()
                T.ptx_wait_group(0)
                T.sync_threads()
                Y[k, tx] = s[k % 2, 255 - tx]
                for i in T.Parallel(192):
                    Y[k, 64 + i] = s[k % 2, 191 - i]

    rng = np.random.default_rng(4)
    x, rows = rng.integers(-9, 9, (4, 256)).astype(f16), rng.integers(0, 4, 8).astype(np.int32)
    np.testing.assert_array_equal(everywhere(main, x, rows, on=WITH_HOPPER)[2], x[rows, ::-1])


def test_an_arrival_for_copies_behind_an_async_scope_of_stores_shows_them_to_wgmma():
    @T.prim_func
    def main(X: T.Tensor((64, 64), f16), rows: T.Tensor((4, 64), "int32"), B: T.Tensor((64, 64), f16),
             O: T.Tensor((4, 64, 64), f32)):
        with T.Kernel(1, threads=256):
            s, y = T.alloc_shared((64, 64), f16), T.alloc_shared((64, 64), f16)
            full, empty = T.alloc_barrier(128), T.alloc_barrier(128)
            c = T.alloc_fragment((64, 64), f32)
            tx = T.get_thread_binding()
            T.copy(B, y)
            if tx < 128:
                for k in T.serial(4):
                    T.barrier_wait(full[0], k % 2)
                    T.gemm(s, y, c, clear_accum=True)
                    T.barrier_arrive(empty[0])
                    T.copy(c, O[k, :, :])
            else:
                for k in T.serial(4):
                    T.barrier_wait(empty[0], (k + 1) % 2)
                    with T.attr("default", "async_scope", 1):
                        for u in T.serial(4):
                            row = u * 16 + (tx - 128) // 8
                            for v in T.vectorized(8):
                                s[row, (tx % 8) * 8 + v] = X[rows[k, row], (tx % 8) * 8 + v]
                    T.cp_async_barrier_noinc(full[0])

    rng = np.random.default_rng(5)
    x, b = (rng.integers(-3, 4, (64, 64)).astype(f16) for _ in range(2))
    rows = rng.integers(0, 64, (4, 64)).astype(np.int32)
    for on in ("tile", "sm_90a", "cpu"):
        np.testing.assert_array_equal(run(main, x, rows, b, on=on)[3], x[rows].astype(f32) @ b.astype(f32))


def test_an_update_by_all_threads_and_blocks_says_how_to_do_it_once_and_that_is_right():
    def program(once):
        @T.prim_func
        def main(X: T.Tensor((4,), f32), Y: T.Tensor((1,), f32)):
            with T.Kernel(4, threads=64) as b:
                if not once:
                    Y[0] = Y[0] + X[b]
                elif T.get_thread_binding() == 0:
                    T.atomic_add(Y[0], X[b])

        return main

    with pytest.raises(ValueError, match="block-overwrite") as e:
        run(program(False), np.ones(4, f32), on="simulator")
    assert e.value.hint.endswith("T.atomic_add, of a scalar in one thread: `if T.get_thread_binding() == 0:`")
    assert everywhere(program(True), np.arange(4, dtype=f32))[1][0] == 6


def test_a_copy_of_one_shared_element_is_warned_of_and_copies_it():
    with pytest.warns(TileLangWarning, match="element-copy"):

        @T.prim_func
        def main(X: T.Tensor((64,), f32), Y: T.Tensor((64,), f32)):
            with T.Kernel(1, threads=64):
                s = T.alloc_shared((64,), f32)
                T.copy(X, s)
                T.copy(s[3], s[4])
                T.copy(s, Y)

    x = np.arange(64, dtype=f32)
    np.testing.assert_array_equal(everywhere(main, x)[1], np.where(x == 4, 3, x))
