"""Where a barrier hangs on one detail of an access: run on the simulators, which find races."""

import numpy as np
import pytest
from everywhere import WITH_HOPPER, everywhere

import tilelang.language as T

pytestmark = pytest.mark.usefixtures("as_planned")
N = np.arange(64)
ON = ("tile", "simulator")


def ints(*shape):
    return (np.arange(int(np.prod(shape))) * 7 % 101 + 1).astype(np.int32).reshape(shape)


def test_a_quotient_by_turns_has_the_longer_period():
    @T.prim_func
    def main(A: T.Tensor((30, 64), "int32"), B: T.Tensor((30, 64), "int32")):
        with T.Kernel(1, threads=64):
            S = T.alloc_shared((2, 64), "int32")
            tx = T.get_thread_binding()
            S[1, tx] = 5
            T.sync_threads()
            for k in T.serial(30):
                B[k, tx] = S[1, 63 - tx]
                S[k // 2 % 2, tx] = A[k, tx]

    a, s, want = ints(30, 64), np.full((2, 64), 5), np.zeros((30, 64), np.int32)
    for k in range(30):
        want[k] = s[1, ::-1]
        s[k // 2 % 2] = a[k]
    np.testing.assert_array_equal(everywhere(main, a, on=ON)[1], want)


def test_a_vector_is_written_to_its_last_element():
    @T.prim_func
    def main(A: T.Tensor((256,), "int32"), B: T.Tensor((64,), "int32")):
        with T.Kernel(1, threads=64):
            S = T.alloc_shared((256,), "int32")
            tx = T.get_thread_binding()
            for v in T.vectorized(4):
                S[tx * 4 + v] = A[tx * 4 + v]
            B[tx] = S[(63 - tx) * 4 + 1]

    a = ints(256)
    np.testing.assert_array_equal(everywhere(main, a, on=WITH_HOPPER)[1], a[(63 - N) * 4 + 1])


def test_an_asynchronous_copy_writes_to_its_last_element():
    @T.prim_func
    def main(A: T.Tensor((6, 256), "int32"), B: T.Tensor((6, 64), "int32")):
        with T.Kernel(1, threads=64):
            S = T.alloc_shared((256,), "int32")
            tx = T.get_thread_binding()
            for k in T.Pipelined(6, num_stages=2):
                T.copy(A[k, 0:256], S)
                B[k, tx] = S[(63 - tx) * 4 + 1]

    a = ints(6, 256)
    np.testing.assert_array_equal(everywhere(main, a, on=WITH_HOPPER)[1], a[:, (63 - N) * 4 + 1])


def test_the_other_branch_has_the_other_threads():
    @T.prim_func
    def main(A: T.Tensor((64,), "int32"), B: T.Tensor((64,), "int32")):
        with T.Kernel(1, threads=64):
            S = T.alloc_shared((64,), "int32")
            tx = T.get_thread_binding()
            if tx < 32:
                B[tx + 32] = 9
            else:
                S[tx] = A[tx]
            if tx < 32:
                B[tx] = S[tx + 32]

    a = ints(64)
    np.testing.assert_array_equal(everywhere(main, a, on=WITH_HOPPER)[1], np.append(a[32:], N[:32] * 0 + 9))


def test_what_was_decided_counts_for_both_branches_with_barriers():
    """The first branch changes what the condition reads."""
    @T.prim_func
    def main(A: T.Tensor((64,), "int32"), B: T.Tensor((64,), "int32")):
        with T.Kernel(1, threads=64):
            S = T.alloc_shared((64,), "int32")
            c = T.alloc_local((1,), "int32")
            tx = T.get_thread_binding()
            c[0] = tx % 2
            S[tx] = A[tx]
            if tx < 48:
                if c[0] == 1:
                    c[0] = 0
                    B[tx] = S[63 - tx] + 1
                    S[tx] = 1000
                else:
                    B[tx] = 7
            else:
                B[tx] = c[0]

    a = ints(64)
    want = np.where(N < 48, np.where(N % 2, a[::-1] + 1, 7), N % 2)
    np.testing.assert_array_equal(everywhere(main, a, on=("simulator", "sm_90a"))[1], want)


@pytest.mark.parametrize("first", [0, 1])
def test_parts_of_one_role_around_another_role_are_ordered(first):
    @T.prim_func
    def main(A: T.Tensor((128,), "int32"), B: T.Tensor((256,), "int32")):
        with T.Kernel(1, threads=256):
            S = T.alloc_shared((128,), "int32")
            P = T.alloc_shared((128,), "int32")
            tx = T.get_thread_binding()
            with T.ws(first):
                S[tx % 128] = A[tx % 128]
            with T.ws(1 - first):
                P[tx % 128] = A[tx % 128] + 1
                B[tx % 128] = P[127 - tx % 128]
            with T.ws(first):
                B[128 + tx % 128] = S[127 - tx % 128]

    a = ints(128)
    np.testing.assert_array_equal(everywhere(main, a, on=("tile", "sm_90a"))[1], [*(a + 1)[::-1], *a[::-1]])


def test_roles_have_barriers_of_their_own_beside_those_of_the_program():
    @T.prim_func
    def main(A: T.Tensor((128,), "int32"), B: T.Tensor((256,), "int32")):
        with T.Kernel(1, threads=256):
            S = T.alloc_shared((2, 128), "int32")
            tx = T.get_thread_binding()
            with T.ws(0):
                for k in T.serial(3):
                    S[0, tx % 128] = A[tx % 128] + k
                    B[tx % 128] = S[0, 127 - tx % 128]
                T.sync_threads(1, 128)
            with T.ws(1):
                S[1, tx % 128] = A[tx % 128] + 7
                B[128 + tx % 128] = S[1, 127 - tx % 128]

    a = ints(128)
    np.testing.assert_array_equal(everywhere(main, a, on=("tile", "sm_90a"))[1], [*(a + 2)[::-1], *(a + 7)[::-1]])


def test_an_element_is_one_however_its_place_is_written():
    @T.prim_func
    def main(A: T.Tensor((64,), "int32")):
        with T.Kernel(2, threads=64) as bx:
            A[bx + 1 + 1] = A[2 + bx] + 1

    with pytest.raises(Exception, match="each of the 64 threads"):
        everywhere(main, ints(64), on=("simulator",))


def test_what_changes_a_tile_behind_its_store_waits_for_the_store():
    @T.prim_func
    def main(A: T.Tensor((4, 32, 64), "int32"), B: T.Tensor((4, 32, 64), "int32"), C: T.Tensor((32, 64), "int32")):
        with T.Kernel(1, threads=128):
            S = T.alloc_shared((32, 64), "int32")
            F = T.alloc_fragment((32, 64), "int32")
            T.clear(F)
            for k in T.serial(4):
                for i, j in T.Parallel(32, 64):
                    S[i, j] = A[k, i, j] + 1
                T.copy(S, B[k, 0:32, 0:64])
                for i, j in T.Parallel(32, 64):
                    S[i, j] = S[i, j] * 2
                for i, j in T.Parallel(32, 64):
                    F[i, j] += S[i, j]
            T.copy(F, C)

    a = ints(4, 32, 64)
    got = everywhere(main, a, on=WITH_HOPPER)
    np.testing.assert_array_equal(got[1], a + 1)
    np.testing.assert_array_equal(got[2], ((a + 1) * 2).sum(0))


@pytest.mark.parametrize("loop", ["while", "for"])
def test_what_was_pending_at_a_break_is_pending_behind_the_loop(loop):
    @T.prim_func
    def main(A: T.Tensor((64,), "int32"), B: T.Tensor((64,), "int32")):
        with T.Kernel(1, threads=64):
            S = T.alloc_shared((64,), "int32")
            c = T.alloc_var("int32", init=0)
            tx = T.get_thread_binding()
            if loop == "while":
                while c < 5:
                    S[tx] = A[tx] + c
                    if c == 2:
                        break
                    T.sync_threads()
                    c = c + 1
            else:
                for k in T.serial(5):
                    S[tx] = A[tx] + k
                    if k == 2:
                        break
                    T.sync_threads()
            B[tx] = S[63 - tx]

    a = ints(64)
    np.testing.assert_array_equal(everywhere(main, a, on=ON)[1], a[::-1] + 2)


@pytest.mark.parametrize("loop", ["while", "for"])
def test_what_was_pending_at_a_continue_is_pending_in_the_next_turn(loop):
    @T.prim_func
    def main(A: T.Tensor((4, 64), "int32"), B: T.Tensor((4, 64), "int32")):
        with T.Kernel(1, threads=64):
            S = T.alloc_shared((64,), "int32")
            c = T.alloc_var("int32", init=-1)
            tx = T.get_thread_binding()
            S[tx] = 3
            T.sync_threads()
            if loop == "while":
                while c < 3:
                    c = c + 1
                    B[c, tx] = S[63 - tx]
                    T.sync_threads()
                    S[tx] = A[c, tx]
                    if c % 2 == 0:
                        continue
                    T.sync_threads()
            else:
                for k in T.serial(4):
                    B[k, tx] = S[63 - tx]
                    T.sync_threads()
                    S[tx] = A[k, tx]
                    if k % 2 == 0:
                        continue
                    T.sync_threads()

    a = ints(4, 64)
    np.testing.assert_array_equal(everywhere(main, a, on=ON)[1], [N * 0 + 3, *a[:3, ::-1]])


def test_the_last_turn_of_a_loop_may_be_the_one_that_meets_what_came_before():
    @T.prim_func
    def main(A: T.Tensor((64,), "int32"), B: T.Tensor((3, 64), "int32")):
        with T.Kernel(1, threads=64):
            S = T.alloc_shared((2, 64), "int32")
            P = T.alloc_shared((2, 64), "int32")
            tx = T.get_thread_binding()
            S[0, tx] = 4
            T.sync_threads()
            S[1, tx] = A[tx]
            for k in T.serial(3):
                B[k, tx] = S[k // 2, 63 - tx]
                P[k % 2, tx] = A[tx]

    a = ints(64)
    np.testing.assert_array_equal(everywhere(main, a, on=ON)[1], [N * 0 + 4, N * 0 + 4, a[::-1]])


def test_a_block_index_counts_by_its_factor():
    @T.prim_func
    def main(A: T.Tensor((2, 64), "int32"), B: T.Tensor((2, 64), "int32")):
        with T.Kernel(2, threads=64) as bx:
            S = T.alloc_shared((128,), "int32")
            tx = T.get_thread_binding()
            S[tx] = 1
            S[tx + 64] = 2
            T.sync_threads()
            S[bx * 64 + tx] = A[bx, tx]
            B[bx, tx] = S[bx * 32 + tx]

    a = ints(2, 64)
    np.testing.assert_array_equal(everywhere(main, a, on=ON)[1], [a[0], [*[1] * 32, *a[1, :32]]])


def test_turns_of_a_loop_without_slots_meet():
    @T.prim_func
    def main(A: T.Tensor((6, 64), "int32"), B: T.Tensor((6, 64), "int32")):
        with T.Kernel(1, threads=64):
            S = T.alloc_shared((6, 64), "int32")
            tx = T.get_thread_binding()
            S[0, tx] = A[0, tx]
            T.sync_threads()
            for k in T.serial(1, 6):
                B[k, tx] = S[k - 1, 63 - tx]
                S[k, tx] = A[k, tx]

    a = ints(6, 64)
    np.testing.assert_array_equal(everywhere(main, a, on=ON)[1][1:], a[:5, ::-1])


@pytest.mark.parametrize("loop", ["while", "for"])
def test_what_threads_count_before_they_leave_a_loop_differs(loop):
    @T.prim_func
    def main(A: T.Tensor((64,), "int32"), B: T.Tensor((64,), "int32")):
        with T.Kernel(1, threads=64):
            S = T.alloc_shared((64,), "int32")
            c = T.alloc_local((1,), "int32")
            tx = T.get_thread_binding()
            S[tx] = 3
            T.sync_threads()
            c[0] = 0
            if loop == "for":
                for k in T.serial(64):
                    if k == tx:
                        break
                    c[0] = c[0] + 1
            else:
                n = T.alloc_var("int32", init=0)
                while n < 64:
                    if n == tx:
                        break
                    n = n + 1
                    c[0] = c[0] + 1
            if c[0] >= 32:
                S[tx] = A[tx]
                B[tx] = S[(tx + 1) % 64]

    a = ints(64)
    np.testing.assert_array_equal(everywhere(main, a, on=("simulator", "sm_90a"))[1], [*[0] * 32, *a[33:], 3])


def test_a_thread_that_a_vote_elects_may_change_an_element():
    @T.prim_func
    def main(A: T.Tensor((64,), "int32")):
        with T.Kernel(1, threads=64):
            if T.shuffle_elect(64):
                A[5] = A[5] + 1

    a = ints(64)
    np.testing.assert_array_equal(everywhere(main, a, on=("simulator", "sm_90a"))[0] - a, N == 5)


def test_what_a_branch_reads_in_front_of_its_barrier_only_its_threads_read():
    @T.prim_func
    def main(A: T.Tensor((64,), "int32"), B: T.Tensor((64,), "int32")):
        with T.Kernel(1, threads=64):
            S = T.alloc_shared((64,), "int32")
            tx = T.get_thread_binding()
            S[tx] = A[tx]
            T.sync_threads()
            if tx < 32:
                v = S[tx * 2]
                S[tx * 2] = v + 1
                B[tx] = v + S[62 - tx * 2]

    a = ints(64)
    np.testing.assert_array_equal(everywhere(main, a, on=("simulator", "sm_90a"))[1][:32], a[::2] + a[62::-2] + 1)


def test_a_role_sees_what_the_block_stored_in_a_tensor():
    @T.prim_func
    def main(A: T.Tensor((256,), "int32"), G: T.Tensor((256,), "int32"), B: T.Tensor((128,), "int32")):
        with T.Kernel(1, threads=256):
            tx = T.get_thread_binding()
            G[tx] = A[tx] + 1
            with T.ws(0):
                B[tx] = G[255 - tx]

    a = ints(256)
    np.testing.assert_array_equal(everywhere(main, a, on=WITH_HOPPER)[2], a[:127:-1] + 1)


def test_a_barrier_of_the_program_tells_products_of_what_threads_stored():
    @T.prim_func
    def main(A: T.Tensor((64, 64), "float16"), B: T.Tensor((64, 64), "float16"), C: T.Tensor((64, 64), "float32")):
        with T.Kernel(1, threads=128):
            a = T.alloc_shared((64, 64), "float16")
            b = T.alloc_shared((64, 64), "float16")
            c = T.alloc_fragment((64, 64), "float32")
            T.clear(c)
            for i, j in T.Parallel(64, 64):
                a[i, j] = A[i, j] * T.float16(2)
                b[i, j] = B[i, j] + T.float16(1)
            T.sync_threads()
            T.gemm(a, b, c)
            T.copy(c, C)

    rng = np.random.default_rng(0)
    a, b = (rng.integers(-3, 4, (64, 64)).astype(np.float16) for _ in range(2))
    got = everywhere(main, a, b, on=("tile", "sm_90a"))[2]
    np.testing.assert_array_equal(got, (a * 2).astype(np.float32) @ (b + 1).astype(np.float32))


@pytest.mark.parametrize("n", [0, 1])
def test_a_barrier_in_a_branch_that_is_not_taken_orders_nothing(n):
    @T.prim_func
    def main(A: T.Tensor((64,), "int32"), B: T.Tensor((64,), "int32"), n: T.int32):
        with T.Kernel(1, threads=64):
            S = T.alloc_shared((64,), "int32")
            tx = T.get_thread_binding()
            S[tx] = A[tx]
            if n > 0:
                T.sync_threads()
            B[tx] = S[63 - tx]

    a = ints(64)
    np.testing.assert_array_equal(everywhere(main, a, a * 0, n, on=WITH_HOPPER)[1], a[::-1])
