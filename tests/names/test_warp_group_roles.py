"""T.ws around tile operations and parallel loops: warp groups with work of their own, on every target."""

import numpy as np
import pytest
from everywhere import WITH_HOPPER, cuda_text, everywhere

import tilelang.language as T

LINE = np.arange(256, dtype=np.int32)


@pytest.mark.spec("T.ws", "L8:ws")
def test_parallel_loops_and_copies_of_each_warp_group():
    @T.prim_func
    def f(A: T.Tensor((256,), "int32"), O: T.Tensor((2, 256), "int32")):
        with T.Kernel(1, threads=256):
            S = T.alloc_shared((256,), "int32")
            with T.ws(0):
                for i in T.Parallel(128):
                    O[0, i] = A[i] + 1
                T.copy(A[0:128], S[0:128])
            with T.ws(1):
                for i in T.Parallel(128):
                    O[0, 128 + i] = A[128 + i] * 2
                T.copy(A[128:256], S[128:256])
            T.sync_threads()
            for i in T.Parallel(256):
                O[1, i] = S[255 - i]

    o = everywhere(f, LINE, on=WITH_HOPPER)[1]
    assert np.array_equal(o[0], np.where(LINE < 128, LINE + 1, LINE * 2)) and np.array_equal(o[1], LINE[::-1])
    assert "bar.sync" in (text := cuda_text(f)) or "__syncthreads" in text


@pytest.mark.spec("T.ws", "T.gemm", "T.reduce_sum", "L8:ws")
def test_products_and_reductions_of_one_warp_group():
    @T.prim_func
    def f(A: T.Tensor((64, 32), "float16"), B: T.Tensor((32, 64), "float16"), O: T.Tensor((64, 64), "float32"),
          R: T.Tensor((64,), "float32")):
        with T.Kernel(1, threads=256):
            As, Bs = T.alloc_shared((64, 32), "float16"), T.alloc_shared((32, 64), "float16")
            F, S = T.alloc_fragment((64, 64), "float32"), T.alloc_fragment((64,), "float32")
            T.copy(A, As)
            T.copy(B, Bs)
            with T.ws(1):
                T.clear(F)
                T.gemm(As, Bs, F)
                T.reduce_sum(F, S, dim=1)
                T.copy(F, O)
                T.copy(S, R)

    a = (np.arange(2048) % 5).reshape(64, 32).astype(np.float16)
    b = (np.arange(2048) % 3).reshape(32, 64).astype(np.float16)
    _, _, o, r = everywhere(f, a, b, on=WITH_HOPPER)
    want = a.astype(np.float32) @ b.astype(np.float32)
    assert np.array_equal(o, want) and np.array_equal(r, want.sum(1))
    assert "mma" in cuda_text(f)


def handed_over():
    @T.prim_func
    def f(A: T.Tensor((4, 128), "int32"), O: T.Tensor((4, 128), "int32")):
        with T.Kernel(1, threads=256):
            S = T.alloc_shared((128,), "int32")
            with T.ws(1):
                for k in range(4):
                    T.sync_threads(4, 256)
                    T.copy(A[k, :], S)
                    T.named_barrier_arrive(3, 256)
            with T.ws(0):
                for k in range(4):
                    T.named_barrier_arrive(4, 256)
                    T.sync_threads(3, 256)
                    for i in T.Parallel(128):
                        O[k, i] = S[127 - i]

    return f


@pytest.mark.spec("T.ws", "L8:ws")
def test_roles_between_work_of_the_whole_block():
    """Work of all before, between and after the roles, in a loop; a variable of each role and one of all."""

    @T.prim_func
    def f(A: T.Tensor((3, 256), "int32"), O: T.Tensor((3, 256), "int32"), Q: T.Tensor((256,), "int32")):
        with T.Kernel(1, threads=256):
            S, R = T.alloc_shared((256,), "int32"), T.alloc_shared((256,), "int32")
            i = T.get_thread_binding()
            n, turn = T.alloc_var("int32", init=0), T.alloc_var("int32", init=0)
            while turn < 3:
                T.copy(A[turn, :], S)
                with T.ws(0):
                    for j in T.Parallel(128):
                        R[j] = S[255 - j] + turn
                    n = n + 2
                with T.ws(1):
                    for j in T.Parallel(128):
                        R[128 + j] = S[127 - j] * 2
                    n = n + i
                T.sync_threads()
                O[turn, i] = R[255 - i] + n
                T.sync_threads()
                turn = turn + 1
            Q[i] = n

    a = np.arange(768, dtype=np.int32).reshape(3, 256)
    _, o, q = everywhere(f, a, on=WITH_HOPPER)
    n = np.where(LINE < 128, 2, LINE)
    for turn in range(3):
        r = np.concatenate([a[turn, :127:-1] + turn, a[turn, 127::-1] * 2])
        assert np.array_equal(o[turn], r[::-1] + n * (turn + 1))
    assert np.array_equal(q, 3 * n)


@pytest.mark.spec("T.ws", "T.named_barrier_arrive", "T.sync_threads", "L8:ws", "L15:named_barrier_arrive")
def test_named_barriers_hand_a_tile_from_one_warp_group_to_another():
    a = np.arange(512, dtype=np.int32).reshape(4, 128)
    assert np.array_equal(everywhere(handed_over(), a, on=WITH_HOPPER)[1], a[:, ::-1])
    cuda_text(handed_over())
