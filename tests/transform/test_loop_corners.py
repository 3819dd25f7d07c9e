"""Loops whose result hangs on one detail of a pass: pipelines, liveness, vectors."""

import numpy as np
import pytest
from everywhere import WITH_HOPPER, everywhere

import tilelang
import tilelang.language as T

pytestmark = pytest.mark.usefixtures("as_planned")
N = np.arange(64)


def ints(*shape):
    return (np.arange(int(np.prod(shape))) * 7 % 101 + 1).astype(np.int32).reshape(shape)


@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("start, end", [(1, 6), (3, 4), (2, 2)])
def test_a_pipeline_that_starts_elsewhere_loads_its_own_turns(stages, start, end):
    @T.prim_func
    def main(A: T.Tensor((6, 64), "int32"), B: T.Tensor((64,), "int32")):
        with T.Kernel(1, threads=64):
            S = T.alloc_shared((64,), "int32")
            F = T.alloc_fragment((64,), "int32")
            T.clear(F)
            for k in T.Pipelined(start, end, num_stages=stages):
                T.copy(A[k, 0:64], S)
                for i in T.Parallel(64):
                    F[i] = F[i] * 3 + S[63 - i]
            T.copy(F, B)

    a, want = ints(6, 64), np.zeros(64, np.int32)
    for k in range(start, end):
        want = want * 3 + a[k, ::-1]
    np.testing.assert_array_equal(everywhere(main, a, on=WITH_HOPPER)[1], want)


def test_a_tile_that_is_seen_in_another_shape_has_no_versions():
    @T.prim_func
    def main(A: T.Tensor((6, 64), "int32"), B: T.Tensor((6, 64), "int32")):
        with T.Kernel(1, threads=64):
            S = T.alloc_shared((64,), "int32")
            V = T.view(S, (8, 8))
            for k in T.Pipelined(6, num_stages=3):
                T.copy(A[k, 0:64], S)
                for i in T.Parallel(64):
                    B[k, i] = V[i % 8, i // 8]

    a = ints(6, 64)
    np.testing.assert_array_equal(everywhere(main, a, on=WITH_HOPPER)[1], a.reshape(6, 8, 8).transpose(0, 2, 1).reshape(6, 64))


def test_a_tile_that_is_read_behind_a_break_has_no_versions():
    @T.prim_func
    def main(A: T.Tensor((12, 64), "int32"), B: T.Tensor((64,), "int32"), C: T.Tensor((64,), "int32")):
        with T.Kernel(1, threads=64):
            S = T.alloc_shared((64,), "int32")
            F = T.alloc_fragment((64,), "int32")
            T.clear(F)
            for o in T.serial(3):
                for k in T.Pipelined(4, num_stages=2):
                    T.copy(A[o * 4 + k, 0:64], S)
                    for i in T.Parallel(64):
                        F[i] += S[63 - i]
                if o == 1:
                    break
                T.clear(S)
            T.copy(F, C)
            for i in T.Parallel(64):
                B[i] = S[i]

    a = ints(12, 64)
    got = everywhere(main, a, on=WITH_HOPPER)
    np.testing.assert_array_equal(got[1], a[7])
    np.testing.assert_array_equal(got[2], a[:8, ::-1].sum(0))


def test_a_tile_that_is_read_in_the_next_turn_around_has_no_versions():
    @T.prim_func
    def main(A: T.Tensor((12, 64), "int32"), C: T.Tensor((64,), "int32")):
        with T.Kernel(1, threads=64):
            S = T.alloc_shared((64,), "int32")
            F = T.alloc_fragment((64,), "int32")
            T.clear(F)
            T.clear(S)
            for o in T.serial(3):
                for i in T.Parallel(64):
                    F[i] += S[63 - i] * 10
                for k in T.Pipelined(4, num_stages=2):
                    T.copy(A[o * 4 + k, 0:64], S)
                    for i in T.Parallel(64):
                        F[i] += S[i]
            T.copy(F, C)

    a = ints(12, 64)
    want = a.sum(0) + 10 * (a[3] + a[7])[::-1]
    np.testing.assert_array_equal(everywhere(main, a, on=WITH_HOPPER)[1], want)


def test_atomics_go_to_the_version_of_their_turn():
    @T.prim_func
    def main(A: T.Tensor((6, 64), "int32"), B: T.Tensor((6, 64), "int32")):
        with T.Kernel(1, threads=64):
            S = T.alloc_shared((64,), "int32")
            for k in T.Pipelined(6, num_stages=3):
                T.copy(A[k, 0:64], S)
                for i in T.Parallel(64):
                    T.atomic_add(S[i // 2], 5)
                for i in T.Parallel(64):
                    B[k, i] = S[63 - i]

    a = ints(6, 64)
    np.testing.assert_array_equal(everywhere(main, a, on=WITH_HOPPER)[1], (a + 10 * (N < 32))[:, ::-1])


def test_a_store_under_a_condition_leaves_the_other_elements():
    @T.prim_func
    def main(A: T.Tensor((512,), "int32"), B: T.Tensor((512,), "int32")):
        with T.Kernel(1, threads=64):
            for i in T.Parallel(512):
                if A[i] > 50:
                    B[i] = A[i] * 2

    a, b = ints(512), np.full(512, 7, np.int32)
    np.testing.assert_array_equal(everywhere(main, a, b, on=WITH_HOPPER)[1], np.where(a > 50, a * 2, 7))


@pytest.mark.parametrize("n", [1, 2, 101, 255, 256])
def test_a_vector_ends_with_its_row(n):
    length = T.dynamic("length")

    @T.prim_func
    def main(A: T.Tensor((length,), "int32"), B: T.Tensor((length,), "int32")):
        with T.Kernel(1, threads=64):
            for i in T.Parallel(256):
                B[i] = A[i] + 1

    a = ints(n)
    np.testing.assert_array_equal(everywhere(main, a, np.zeros_like(a), on=WITH_HOPPER)[1], a + 1)


def test_what_an_iteration_stored_it_reads():
    @T.prim_func
    def main(A: T.Tensor((512,), "int32"), G: T.Tensor((512,), "int32"), B: T.Tensor((512,), "int32")):
        with T.Kernel(1, threads=64):
            for i in T.Parallel(512):
                G[i] = A[i] * 2
                v = G[i] + 1
                B[i] = v * v

    a = ints(512)
    got = everywhere(main, a, on=WITH_HOPPER)
    np.testing.assert_array_equal(got[1], a * 2)
    np.testing.assert_array_equal(got[2], (a * 2 + 1) ** 2)


def test_an_unrolled_loop_that_starts_at_one_carries_into_the_quotient():
    @T.prim_func
    def main(A: T.Tensor((65,), "int32"), B: T.Tensor((256,), "int32")):
        with T.Kernel(1, threads=64):
            tx = T.get_thread_binding()
            for v in T.unroll(1, 5):
                B[tx * 4 + v - 1] = A[(tx * 4 + v) // 4]

    a = ints(65)
    np.testing.assert_array_equal(everywhere(main, a, on=WITH_HOPPER)[1], a[(np.arange(256) + 1) // 4])


def test_int4_shifted_to_the_left_wraps():
    @T.prim_func
    def main(A: T.Tensor((64,), "int4"), B: T.Tensor((64,), "int32")):
        with T.Kernel(1, threads=32):
            F = T.alloc_fragment((64,), "int4")
            T.copy(A, F)
            for i in T.Parallel(64):
                B[i] = T.cast(F[i] << T.cast(1, "int4"), "int32")

    packed = (np.arange(32) * 37 % 256).astype(np.uint8)
    v = np.stack([packed & 15, packed >> 4], 1).ravel().astype(np.int64)
    want = ((v * 2 + 8) & 15) - 8
    np.testing.assert_array_equal(everywhere(main, packed, np.zeros(64, np.int32), on=WITH_HOPPER)[1], want)


def test_a_tile_of_two_products_is_given_back_behind_the_second():
    @T.prim_func
    def main(A: T.Tensor((64, 256), "float16"), B: T.Tensor((256, 64), "float16"), D: T.Tensor((256, 64), "float16"),
             X: T.Tensor((64, 64), "float32"), Y: T.Tensor((64, 64), "float32")):
        with T.Kernel(1, threads=128):
            a = T.alloc_shared((64, 64), "float16")
            b = T.alloc_shared((64, 64), "float16")
            d = T.alloc_shared((64, 64), "float16")
            x = T.alloc_fragment((64, 64), "float32")
            y = T.alloc_fragment((64, 64), "float32")
            T.clear(x)
            T.clear(y)
            for k in T.Pipelined(4, num_stages=2):
                T.copy(B[k * 64, 0], b)
                T.copy(A[0, k * 64], a)
                T.copy(D[k * 64, 0], d)
                T.gemm(a, b, x)
                T.gemm(a, d, y)
            T.copy(x, X)
            T.copy(y, Y)

    rng = np.random.default_rng(0)
    a, b, d = (rng.integers(-3, 4, s).astype(np.float16) for s in ((64, 256), (256, 64), (256, 64)))
    got = everywhere(main, a, b, d, on=("tile", "sm_90a"))
    np.testing.assert_array_equal(got[3], a.astype(np.float32) @ b.astype(np.float32))
    np.testing.assert_array_equal(got[4], a.astype(np.float32) @ d.astype(np.float32))


def test_a_layout_whose_rows_start_at_odd_places_has_no_vectors():
    @T.prim_func
    def main(A: T.Tensor((16, 64), "int32"), B: T.Tensor((16, 64), "int32")):
        with T.Kernel(1, threads=64):
            S = T.alloc_shared((16, 64), "int32")
            T.annotate_layout({S: T.Layout((16, 64), lambda i, j: i * 65 + j)})
            T.copy(A, S)
            T.copy(S, B)

    a = ints(16, 64)
    np.testing.assert_array_equal(everywhere(main, a, on=WITH_HOPPER)[1], a)


def test_all_iterations_may_store_nan_in_one_element():
    @T.prim_func
    def main(B: T.Tensor((1,), "float32")):
        with T.Kernel(1, threads=64):
            for _ in T.Parallel(64):
                B[0] = T.float32(float("nan"))

    assert np.isnan(everywhere(main, np.zeros(1, np.float32), on=WITH_HOPPER)[0]).all()


def test_tiles_that_overlap_in_one_row_are_stored_in_order():
    @T.prim_func
    def main(A: T.Tensor((32, 64), "int32"), B: T.Tensor((63, 64), "int32")):
        with T.Kernel(1, threads=128):
            S = T.alloc_shared((32, 64), "int32")
            P = T.alloc_shared((32, 64), "int32")
            for i, j in T.Parallel(32, 64):
                S[i, j] = A[i, j]
                P[i, j] = A[i, j] + 1000
            T.copy(S, B[0:32, 0:64])
            T.copy(P, B[31:63, 0:64])

    a = ints(32, 64)
    np.testing.assert_array_equal(everywhere(main, a, on=WITH_HOPPER)[1], np.concatenate([a[:31], a + 1000]))
    report = tilelang.compile(main, target={"kind": "cuda", "arch": "sm_90a"}, execution_backend="simulator").report()
    assert "two copies may write the same elements of `B`" in report


@pytest.mark.parametrize("n", [0, 1, 3])
def test_two_products_of_no_turns_leave_what_they_add_to(n):
    steps = T.dynamic("steps")

    @T.prim_func
    def main(Q: T.Tensor((64, 64), "float16"), K: T.Tensor((steps, 64, 64), "float16"), V: T.Tensor((steps, 64, 64), "float16"),
             O: T.Tensor((64, 64), "float32"), count: T.int32):
        with T.Kernel(1, threads=128):
            q = T.alloc_shared((64, 64), "float16")
            k = T.alloc_shared((64, 64), "float16")
            v = T.alloc_shared((64, 64), "float16")
            s = T.alloc_fragment((64, 64), "float32")
            p = T.alloc_fragment((64, 64), "float16")
            o = T.alloc_fragment((64, 64), "float32")
            T.fill(o, 2)
            T.copy(Q, q)
            for t in T.Pipelined(count, num_stages=2):
                T.copy(K[t, 0:64, 0:64], k)
                T.clear(s)
                T.gemm(q, k, s, transpose_B=True)
                for i, j in T.Parallel(64, 64):
                    p[i, j] = T.cast(s[i, j] * 0.5, "float16")
                T.copy(V[t, 0:64, 0:64], v)
                T.gemm(p, v, o)
            T.copy(o, O)

    rng = np.random.default_rng(0)
    q, k, v = (rng.integers(-1, 2, s).astype(np.float16) for s in ((64, 64), (4, 64, 64), (4, 64, 64)))
    want = np.full((64, 64), 2, np.float32)
    for t in range(n):
        want += (q.astype(np.float32) @ k[t].T.astype(np.float32) * 0.5) @ v[t].astype(np.float32)
    got = everywhere(main, q, k, v, np.zeros((64, 64), np.float32), n, on=("tile", "sm_90a"))
    np.testing.assert_array_equal(got[3], want)


def test_a_tile_that_is_reduced_in_shared_memory_has_no_versions():
    @T.prim_func
    def main(A: T.Tensor((5, 16, 64), "int32"), B: T.Tensor((16,), "int32")):
        with T.Kernel(1, threads=64):
            S = T.alloc_shared((16, 64), "int32")
            R = T.alloc_fragment((16,), "int32")
            F = T.alloc_fragment((16,), "int32")
            T.clear(F)
            for k in T.Pipelined(5, num_stages=3):
                T.copy(A[k, 0:16, 0:64], S)
                T.reduce_sum(S, R, dim=1)
                for i in T.Parallel(16):
                    F[i] = F[i] * 3 + R[i]
            T.copy(F, B)

    a, want = ints(5, 16, 64), np.zeros(16, np.int32)
    for k in range(5):
        want = want * 3 + a[k].sum(1)
    np.testing.assert_array_equal(everywhere(main, a, on=WITH_HOPPER)[1], want)


def test_the_second_of_two_loads_of_one_tile_stays():
    @T.prim_func
    def main(A: T.Tensor((2, 32, 64), "int32"), B: T.Tensor((32, 64), "int32")):
        with T.Kernel(1, threads=128):
            S = T.alloc_shared((32, 64), "int32")
            T.copy(A[1, 0:32, 0:64], S)
            T.copy(A[0, 0:32, 0:64], S)
            for i, j in T.Parallel(32, 64):
                B[i, j] = S[i, j] + 1

    a = ints(2, 32, 64)
    np.testing.assert_array_equal(everywhere(main, a, on=WITH_HOPPER)[1], a[0] + 1)
