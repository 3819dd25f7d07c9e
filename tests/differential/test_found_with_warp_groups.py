"""Programs with warp groups of their own that the generator found executions to disagree on: the smallest form of each."""

import numpy as np
import pytest
from backends import agree

import tilelang
import tilelang.language as T
from tilelang.errors import TileLangError
from tilelang.target import Target
from tilelang.transform.pipeline import lower

I32 = np.int32


@pytest.mark.parametrize("word", ["break", "continue"])
@pytest.mark.parametrize("marks", [(0, 0, 1, 0), (-1, 1, -1, 0)])
def test_a_loop_with_warp_groups_in_it_is_left_and_turned_early(word, marks):
    """Barriers were placed for the statements between the groups as if no loop stood around them: an internal error."""
    @T.prim_func
    def f(A: T.Tensor((4, 8, 16), "int32"), P: T.Tensor((4,), "int32"), O: T.Tensor((4, 8, 16), "int32"),
          Q: T.Tensor((8, 16), "int32")):
        with T.Kernel(1, threads=256):
            S = T.alloc_shared((8, 16), "int32")
            R = T.alloc_shared((8, 16), "int32")
            T.clear(S)
            T.clear(R)
            for k in T.serial(4):
                for i, j in T.Parallel(8, 16):
                    R[i, j] = S[7 - i, 15 - j] + k
                if P[k] > 0:
                    if word == "break":
                        break
                    else:
                        continue
                with T.ws(0):
                    T.copy(A[k, 0:8, 0:16], S)
                with T.ws(1):
                    for i, j in T.Parallel(8, 16):
                        O[k, i, j] = R[i, 15 - j]
                for i, j in T.Parallel(8, 16):
                    S[i, j] = S[i, j] + R[7 - i, j]
                if P[k] < 0:
                    continue
                for i, j in T.Parallel(8, 16):
                    R[i, j] = S[7 - i, j]
            T.copy(S, Q)

    a, o = np.arange(512, dtype=I32).reshape(4, 8, 16), np.zeros((4, 8, 16), I32)
    s, r = np.zeros((8, 16), I32), np.zeros((8, 16), I32)
    for k in range(4):
        r = s[::-1, ::-1] + I32(k)
        if marks[k] > 0:
            if word == "break":
                break
            continue
        o[k], s = r[:, ::-1], a[k] + r[::-1]
        if marks[k] >= 0:
            r = s[::-1]
    agree(f, [a, np.array(marks, I32), np.zeros_like(o), np.zeros((8, 16), I32)], {2: o, 3: s})


def test_one_warp_group_after_itself_sees_what_its_other_threads_stored():
    @T.prim_func
    def f(A: T.Tensor((8, 16), "int32"), O: T.Tensor((2, 8, 16), "int32")):
        with T.Kernel(1, threads=256):
            S = T.alloc_shared((8, 16), "int32")
            with T.ws(0):
                T.copy(A, S)
            with T.ws(1):
                T.copy(A, O[1, 0:8, 0:16])
            with T.ws(0):
                for i, j in T.Parallel(8, 16):
                    O[0, i, j] = S[7 - i, 15 - j]

    a = np.arange(128, dtype=I32).reshape(8, 16)
    agree(f, [a, np.zeros((2, 8, 16), I32)], {1: np.stack([a[::-1, ::-1], a])})


def test_a_loop_with_variables_of_its_iterations_runs_once_beside_warp_groups():
    """The tile meaning ran it in every role: the later one wrote again what the earlier had changed since."""
    @T.prim_func
    def f(A: T.Tensor((64,), "int32"), O: T.Tensor((64,), "int32"), P: T.Tensor((64,), "int32")):
        with T.Kernel(1, threads=256):
            S = T.alloc_shared((64,), "int32")
            v = T.alloc_var("int32")
            for i in T.Parallel(64):
                v = A[i] * 2
                S[i] = v + 1
                T.atomic_add(P[63 - i], v)
            with T.ws(0):
                for i in T.Parallel(64):
                    S[i] = S[i] + 100
            T.copy(S, O)

    a = np.arange(64, dtype=I32)
    agree(f, [a, np.zeros(64, I32), np.zeros(64, I32)], {1: a * 2 + 101, 2: a[::-1] * 2})


def test_a_copy_of_some_threads_in_a_loop_beside_warp_groups():
    """The tile meaning waited at the copy for warp groups of which no thread comes to it."""
    @T.prim_func
    def f(A: T.Tensor((2, 64), "int32"), O: T.Tensor((256, 4), "int32")):
        with T.Kernel(1, threads=256):
            tx = T.get_thread_binding()
            S = T.alloc_shared((64,), "int32")
            L = T.alloc_local((4,), "int32")
            T.clear(L)
            for k in T.serial(2):
                T.copy(A[k, 0:64], S)
                if tx < 100:
                    T.copy(S[k * 8:k * 8 + 4], L)
                for r in T.serial(tx // 128):
                    T.copy(S[12 + r:16 + r], L)
            with T.ws(0):
                T.clear(S[0:8])
            T.copy(L, O[tx, 0:4])

    a = np.arange(128, dtype=I32).reshape(2, 64)
    o = np.zeros((256, 4), I32)
    o[:100], o[128:] = a[1, 8:12], a[1, 12:16]
    agree(f, [a, np.zeros_like(o)], {1: o})


def test_many_parts_of_a_warp_that_write_by_themselves_leave_the_hopper_path_alone():
    """The synchronisation of a pipelined product was taken to be beyond checking, and its fast schedule given up."""
    @T.prim_func
    def f(A: T.Tensor((64, 64), "float16"), B: T.Tensor((64, 32), "float16"), C: T.Tensor((64, 32), "float32"),
          O: T.Tensor((128,), "int32")):
        with T.Kernel(1, threads=128):
            As, Bs = T.alloc_shared((64, 32), "float16"), T.alloc_shared((32, 32), "float16")
            S, F = T.alloc_shared((128,), "int32"), T.alloc_fragment((64, 32), "float32")
            tx = T.get_thread_binding()
            T.clear(F)
            S[tx] = 0
            for k in T.Pipelined(2, num_stages=2):
                T.copy(A[0, k * 32], As)
                T.copy(B[k * 32, 0], Bs)
                T.gemm(As, Bs, F)
            for r in T.serial(24):
                if tx % (r + 2) == 0:
                    S[tx] = S[tx] + r
            O[tx] = S[127 - tx]
            T.copy(F, C)

    launch = lower(f.func, Target({"kind": "cuda", "arch": "sm_90a"})).kernels[0].launch
    assert launch.plan.sync_report.startswith("ordered: model of"), launch.plan.report
    rng = np.random.default_rng(1)
    a, b = (rng.integers(-3, 4, n).astype(np.float16) for n in ((64, 64), (64, 32)))
    o = np.array([sum(r for r in range(24) if t % (r + 2) == 0) for t in range(128)], I32)
    zero = np.zeros((64, 32), np.float32)
    agree(f, [a, b, zero, np.zeros(128, I32)], {2: a.astype(np.float32) @ b.astype(np.float32), 3: o[::-1]})


def test_threads_of_two_roles_see_what_others_of_their_branch_stored():
    """Tile meaning and CPU ran the branch role by role: the read took what stood there before the other role's stores."""
    @T.prim_func
    def f(O: T.Tensor((256,), "int32"), P: T.Tensor((64,), "int32")):
        with T.Kernel(1, threads=256):
            tx = T.get_thread_binding()
            S, R = T.alloc_shared((64,), "int32"), T.alloc_shared((64,), "int32")
            x = T.alloc_var("int32", init=0)
            for i in T.Parallel(64):
                S[i] = -1
                R[i] = i
            if tx >= 96 and tx < 160:
                y = R[tx - 96] * 3
                S[tx - 96] = y
                x = S[159 - tx] + y
            O[tx] = x
            with T.ws(0):
                T.copy(S, P)

    o, i = np.zeros(256, np.int32), np.arange(64, dtype=np.int32)
    o[96:160] = 3 * 63
    agree(f, [np.zeros(256, np.int32), np.zeros(64, np.int32)], {0: o, 1: 3 * i})


def test_threads_of_two_roles_exchange_on_the_other_way_of_a_branch():
    @T.prim_func
    def f(O: T.Tensor((256,), "int32"), P: T.Tensor((128,), "int32")):
        with T.Kernel(1, threads=256):
            tx = T.get_thread_binding()
            S = T.alloc_shared((128,), "int32")
            x = T.alloc_var("int32", init=0)
            for i in T.Parallel(128):
                S[i] = i
            if tx < 64:
                x = 7
            else:
                x = 1
                if tx >= 192:
                    x = x + tx
                else:
                    y = S[191 - tx]
                    S[tx - 64] = y + 1
                    x = x + S[191 - tx] + y
            O[tx] = x
            with T.ws(0):
                T.copy(S, P)

    t = np.arange(256)
    o = np.where(t < 64, 7, np.where(t >= 192, 1 + t, 1 + (t - 64 + 1) + (191 - t))).astype(I32)
    agree(f, [np.zeros(256, I32), np.zeros(128, I32)], {0: o, 1: (128 - np.arange(128)).astype(I32)})


@pytest.mark.parametrize("rounds", [0, 1, 3])
@pytest.mark.parametrize("first, last", [(0, 256), (96, 160)])
def test_threads_of_two_roles_exchange_in_a_loop(first, last, rounds):
    """Tile meaning ran the whole loop role by role, and in a branch the CPU did too."""
    n = last - first

    @T.prim_func
    def f(O: T.Tensor((256,), "int32"), P: T.Tensor((n,), "int32")):
        with T.Kernel(1, threads=256):
            tx = T.get_thread_binding()
            S = T.alloc_shared((n,), "int32")
            x = T.alloc_var("int32", init=0)
            for i in T.Parallel(n):
                S[i] = -1
            if first > 0:
                if tx >= first and tx < last:
                    for r in T.serial(rounds):
                        y = x + tx
                        S[tx - first] = y * (r + 1)
                        x = x + S[last - 1 - tx]
            else:
                for r in T.serial(rounds):
                    y = x + tx
                    S[tx - first] = y * (r + 1)
                    x = x + S[last - 1 - tx]
            O[tx] = x
            with T.ws(0):
                T.copy(S, P)

    t, x, s = np.arange(first, last), np.zeros(n, np.int64), np.full(n, -1)
    for r in range(rounds):
        s = (x + t) * (r + 1)
        x = x + s[::-1]
    o = np.zeros(256, I32)
    o[first:last] = x
    agree(f, [np.zeros(256, I32), np.zeros(n, I32)], {0: o, 1: s.astype(I32)})


def test_a_loop_whose_end_each_thread_knows_keeps_its_branch():
    """Threads that go different numbers of rounds do not wait for each other."""
    @T.prim_func
    def f(O: T.Tensor((256,), "int32"), P: T.Tensor((256,), "int32")):
        with T.Kernel(1, threads=256):
            tx = T.get_thread_binding()
            S = T.alloc_shared((256,), "int32")
            for i in T.Parallel(256):
                S[i] = 0
            for r in T.serial(tx // 64):
                S[tx] = S[tx] + r + 1
            O[tx] = S[tx]
            with T.ws(0):
                T.copy(S, P)

    n = np.arange(256) // 64
    want = (n * (n + 1) // 2).astype(I32)
    agree(f, [np.zeros(256, I32), np.zeros(256, I32)], {0: want, 1: want})


@pytest.mark.parametrize("rounds", [1, 3])
def test_threads_of_two_roles_exchange_through_a_tensor(rounds):
    """The CPU ran statements on tensors role by role, though barriers stand between them on a device."""
    @T.prim_func
    def f(Q: T.Tensor((256,), "int32"), O: T.Tensor((256,), "int32"), P: T.Tensor((256,), "int32")):
        with T.Kernel(1, threads=256):
            tx = T.get_thread_binding()
            S = T.alloc_shared((256,), "int32")
            for i in T.Parallel(256):
                S[i] = i
            for r in T.serial(rounds):
                Q[(tx + r * 128) % 256] = r * 256 + tx
            O[tx] = Q[255 - tx]
            with T.ws(0):
                T.copy(S, P)

    t = np.arange(256)
    q = np.zeros(256, I32)
    for r in range(rounds):
        q[(t + r * 128) % 256] = r * 256 + t
    agree(f, [np.zeros(256, I32), np.zeros(256, I32), np.zeros(256, I32)], {0: q, 1: q[::-1], 2: t.astype(I32)})


@pytest.mark.parametrize("on", ["tile", "cpu", "sm_90a"])
def test_roles_that_exchange_in_a_while_loop_of_some_threads_are_refused(on):
    """Tile meaning ran the loop role by role and gave a wrong value; CPU and GPUs refused it."""
    @T.prim_func
    def f(O: T.Tensor((384,), "int32"), P: T.Tensor((64,), "int32")):
        with T.Kernel(1, threads=384):
            tx = T.get_thread_binding()
            S = T.alloc_shared((64,), "int32")
            x = T.alloc_var("int32", init=0)
            r = T.alloc_var("int32", init=0)
            for i in T.Parallel(64):
                S[i] = -1
            if tx >= 96 and tx < 160:
                while r < 3:
                    S[tx - 96] = tx * (r + 1)
                    x = x + S[159 - tx]
                    r = r + 1
            O[tx] = x
            with T.ws(0):
                T.copy(S, P)

    kinds = {"tile": "sim-unsupported", "cpu": "cpu-unsupported", "sm_90a": "sync-divergent"}
    with pytest.raises(TileLangError) as told:
        if on == "sm_90a":
            lower(f.func, Target({"kind": "cuda", "arch": "sm_90a"}))
        else:
            kernel = tilelang.compile(f, target="cpu", **({"execution_backend": "tile"} if on == "tile" else {}))
            kernel(np.zeros(384, I32), np.zeros(64, I32))
    assert told.value.kind == kinds[on]
