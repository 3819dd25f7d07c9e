"""T.ws around tile operations and parallel loops: warp groups with work of their own, on every target."""

import numpy as np
import pytest
from everywhere import WITH_HOPPER, cuda_text, everywhere, run

import tilelang.language as T
from tilelang.errors import TileLangError

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


@pytest.mark.spec("T.ws", "T.thread_return", "T.shfl_xor", "L8:ws")
def test_threads_of_a_role_return_and_shuffle():
    @T.prim_func
    def f(A: T.Tensor((256,), "int32"), O: T.Tensor((256,), "int32")):
        with T.Kernel(1, threads=256):
            i = T.get_thread_binding()
            S = T.alloc_shared((128,), "int32")
            with T.ws(0):
                for k in T.Parallel(128):
                    S[k] = A[k]
                T.sync_threads(1, 128)
                if S[i] > 60:
                    T.thread_return()
                O[i] = S[i]
            with T.ws(1):
                O[i] = T.shfl_xor(A[i], 1)
            O[i] = O[i] + 1000

    want = np.where(LINE >= 128, (LINE ^ 1) + 1000, np.where(LINE > 60, 0, LINE + 1000))
    assert np.array_equal(everywhere(f, LINE)[1], want)


@pytest.mark.spec("T.ws", "L8:ws")
@pytest.mark.parametrize("where", ["value", "condition"])
def test_work_of_the_block_does_not_rest_on_a_variable_of_a_role(where):
    @T.prim_func
    def f(A: T.Tensor((256,), "int32"), O: T.Tensor((256,), "int32")):
        with T.Kernel(1, threads=256):
            n = T.alloc_var("int32", init=0)
            with T.ws(0):
                n = 5
                for i in T.Parallel(128):
                    O[i] = A[i]
            if where == "value":
                for i in T.Parallel(256):
                    O[i] = A[i] + n
            else:
                if n > 3:
                    for i in T.Parallel(256):
                        O[i] = A[i]

    for on in WITH_HOPPER:
        with pytest.raises(TileLangError) as e:
            run(f, LINE, on=on)
        kind = "parallel-thread" if where == "value" else "collective-divergent"
        assert e.value.kind == kind and "test_warp_role_tiles.py" in str(e.value), on


def copied_by_threads(predicate):
    @T.prim_func
    def f(A: T.Tensor((64,), "int32"), O: T.Tensor((64,), "int32")):
        with T.Kernel(1, threads=32):
            i = T.get_thread_binding()
            S = T.alloc_shared((64,), "int32")
            if i < 16:
                if predicate:
                    T.ptx_cp_async(T.access_ptr(S[i * 4], "w", 4), T.access_ptr(A[i * 4], "r", 4), 4, A[i] % 2 == 0)
                else:
                    T.ptx_cp_async(T.access_ptr(S[i * 4], "w", 4), T.access_ptr(A[i * 4], "r", 4), 4)
            T.ptx_commit_group()
            T.ptx_wait_group(0)
            T.sync_threads()
            O[i] = S[63 - i]
            O[i + 32] = S[31 - i]

    return f


@pytest.mark.spec("T.ptx_cp_async", "T.ptx_commit_group", "T.ptx_wait_group", "T.access_ptr", "L16:cp-async")
@pytest.mark.parametrize("predicate", [False, True])
def test_threads_copy_asynchronously(predicate):
    a = LINE[:64] + 1
    taken = np.repeat(a[:16] % 2 == 0, 4) if predicate else True
    want = np.where(taken, a, 0)[::-1]
    assert np.array_equal(everywhere(copied_by_threads(predicate), a, on=("simulator", "cpu"))[1], want)


@pytest.mark.spec("T.cp_async_barrier_noinc", "T.alloc_barrier", "L16:mbarriers")
def test_copies_of_threads_arrive_at_a_barrier():
    @T.prim_func
    def f(A: T.Tensor((64,), "int32"), O: T.Tensor((64,), "int32")):
        with T.Kernel(1, threads=128):
            i = T.get_thread_binding()
            S = T.alloc_shared((64,), "int32")
            bar = T.alloc_barrier([128])
            if i < 16:
                T.ptx_cp_async(T.access_ptr(S[i * 4], "w", 4), T.access_ptr(A[i * 4], "r", 4), 4)
            T.cp_async_barrier_noinc(bar[0])
            T.mbarrier_wait_parity(bar, 0)
            if i < 64:
                O[i] = S[63 - i]

    a = LINE[:64]
    assert np.array_equal(everywhere(f, a, on=("sm_90a", "cpu"))[1], a[::-1])


@pytest.mark.spec("T.atomic_add", "L13:tile")
def test_a_tile_past_the_edge_is_added_as_far_as_it_goes():
    @T.prim_func
    def f(A: T.Tensor((50,), "float32"), O: T.Tensor((60,), "float32")):
        with T.Kernel(2, threads=64) as b:
            T.atomic_add(O[b * 32:b * 32 + 32], A[b * 32:b * 32 + 32])

    a = LINE[:50].astype(np.float32)
    assert np.array_equal(everywhere(f, a)[1], np.pad(a, (0, 10)))


@pytest.mark.spec("T.make_tensor", "T.ptr", "L5:ptr")
def test_a_tensor_made_of_a_pointer():
    @T.prim_func
    def f(p: T.ptr, O: T.Tensor((64,), "int32")):
        with T.Kernel(1, threads=64):
            A = T.make_tensor(p, (64,), "int32")
            for k in T.Parallel(64):
                O[k] = A[63 - k] + 1

    assert np.array_equal(everywhere(f, LINE[:64])[-1], LINE[:64][::-1] + 1)


def chain_by_thread_number(form):
    """Two consumers and a producer, told apart as the program pleases."""
    @T.prim_func
    def f(A: T.Tensor((3, 64, 32), "float16"), B: T.Tensor((3, 64, 32), "float16"), O: T.Tensor((2, 64, 64), "float32")):
        with T.Kernel(1, threads=384):
            tx = T.get_thread_binding()
            S = T.alloc_shared((64, 32), "float16")
            R = T.alloc_shared((64, 32), "float16")
            C0 = T.alloc_fragment((64, 64), "float32")
            C1 = T.alloc_fragment((64, 64), "float32")
            full, empty = T.alloc_barrier(128), T.alloc_barrier(256)
            w = tx // 128 if form == "quotient" else T.get_warp_group_idx()
            first = tx < 128 if form == "thread" else w == 0
            second = tx >= 128 and tx < 256 if form == "thread" else w == 1
            if first:
                T.clear(C0)
                for k in range(3):
                    T.barrier_wait(full, k % 2)
                    T.gemm(S, R, C0, transpose_B=True)
                    T.barrier_arrive(empty)
                T.copy(C0, O[0, :, :])
            elif second:
                T.clear(C1)
                for k in range(3):
                    T.barrier_wait(full, k % 2)
                    T.gemm(R, S, C1, transpose_B=True)
                    T.barrier_arrive(empty)
                T.copy(C1, O[1, :, :])
            else:
                for k in range(3):
                    T.barrier_wait(empty, (k + 1) % 2)
                    for v in T.vectorized(8):
                        S[(tx - 256) // 2, (tx - 256) % 2 * 8 + v] = A[k, (tx - 256) // 2, (tx - 256) % 2 * 8 + v]
                    T.copy(A[k, :, 16:32], S[:, 16:32])
                    T.copy(B[k, :, :], R)
                    T.fence_proxy_async()
                    T.barrier_arrive(full)

    return f


@pytest.mark.spec("T.ws", "L8:ws")
@pytest.mark.parametrize("form", ["thread", "quotient", "index"])
def test_branches_by_thread_number_that_whole_warp_groups_take_are_roles(form):
    """branches_to_warp_roles: what T.ws says, in the words of CUDA."""
    f = chain_by_thread_number(form)
    rng = np.random.default_rng(3)
    a, b = (rng.integers(-3, 4, (3, 64, 32)).astype(np.float16) for _ in "ab")
    o = everywhere(f, a, b, on=("tile", "cpu", "sm_90a") if form == "thread" else ("tile", "cpu"))[2]
    whole = np.einsum("kic,kjc->ij", a.astype(np.float32), b.astype(np.float32))
    assert np.array_equal(o, [whole, whole.T])


@pytest.mark.spec("T.ws", "L8:ws")
def test_a_chain_of_branches_gives_each_warp_group_its_tiles():
    @T.prim_func
    def f(A: T.Tensor((512,), "int32"), O: T.Tensor((512,), "int32")):
        with T.Kernel(1, threads=512):
            t = T.get_thread_binding()
            S = T.alloc_shared((512,), "int32")
            if not (128 <= t and t < 256):
                if t < 128:
                    T.copy(A[0:128], S[384:512])
                else:
                    for i in T.Parallel(256):
                        S[128 + i] = A[256 + i] * 3
            else:
                T.copy(A[128:256], S[0:128])
            T.copy(S, O)

    x = np.arange(512, dtype=np.int32)
    want = np.concatenate([x[128:256], 3 * x[256:512], x[0:128]])
    assert np.array_equal(everywhere(f, x, on=WITH_HOPPER)[1], want)
