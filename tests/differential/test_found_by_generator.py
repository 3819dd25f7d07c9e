"""Programs the generator found executions to disagree on, or to refuse: the smallest form of each, named by what was wrong."""

import numpy as np
from backends import HERE, _execute, agree, between_rows, laid_out

import tilelang.language as T
from tilelang.codegen.cuda.printer import print_kernel
from tilelang.runtime import nvrtc
from tilelang.target import Target
from tilelang.transform.pipeline import lower

I32 = np.int32


def test_a_variable_set_in_a_loop_some_leave_is_one_value_of_a_block_of_half_a_warp():
    @T.prim_func
    def f(O: T.Tensor((2, 16), "int32"), P: T.Tensor((2,), "int32")):
        with T.Kernel(1, threads=16):
            tx = T.get_thread_binding()
            v = T.alloc_var("int32", init=6)
            w = T.alloc_var("int32")
            for b in T.serial(2):
                w = 0
                while w < 2:
                    v = v * 3 + w
                    if b == 0:
                        break
                    w = w + 1
                for i in T.Parallel(1):
                    P[b + i] = v
                O[b, tx] = v

    o = np.repeat([[18], [163]], 16, 1).astype(I32)
    agree(f, [np.zeros((2, 16), I32), np.zeros(2, I32)], {0: o, 1: o[:, 0]})


def test_a_value_made_of_a_value_read_in_a_pipelined_loop_comes_behind_it():
    n = 4

    @T.prim_func
    def f(A: T.Tensor((n, 32), "int32"), O: T.Tensor((n, 32), "int32")):
        with T.Kernel(1, threads=32):
            tx = T.get_thread_binding()
            S = T.alloc_shared((32,), "int32")
            L = T.alloc_local((2,), "int32")
            L[0] = 0
            for k in T.Pipelined(n, num_stages=2):
                T.copy(A[k, 0:32], S)
                L[1] = S[tx]
                old = L[0]
                scaled = old * 2
                more = scaled + L[1]
                L[0] = more
                O[k, tx] = T.shfl_xor(more, 1)

    a = np.arange(n * 32, dtype=I32).reshape(n, 32)
    sums = np.zeros(32, I32)
    o = np.zeros_like(a)
    for k in range(n):
        sums = sums * 2 + a[k]
        o[k] = sums[np.arange(32) ^ 1]
    agree(f, [a, np.zeros_like(a)], {1: o}, on=("tile", "sm_80", "sm_90a"))


def test_a_column_chosen_at_run_time_goes_from_registers_to_shared_memory():
    @T.prim_func
    def f(A: T.Tensor((48, 16), "int32"), P: T.Tensor((1,), "int32"), O: T.Tensor((8,), "float32")):
        with T.Kernel(1, threads=128):
            F = T.alloc_fragment((48, 16), "int32")
            S = T.alloc_shared((8,), "float32")
            v = T.alloc_var("int32")
            v = P[0]
            T.copy(A, F)
            T.clear(S)
            T.copy(F[0:8, v + 3], S)
            T.copy(S, O)

    a = np.arange(48 * 16, dtype=I32).reshape(48, 16)
    agree(f, [a, np.array([4], I32), np.zeros(8, np.float32)], {2: a[:8, 7].astype(np.float32)})


def test_branches_on_a_number_read_exclude_each_other():
    @T.prim_func
    def f(A: T.Tensor((64,), "int32"), O: T.Tensor((64,), "int32")):
        with T.Kernel(1, threads=64):
            tx = T.get_thread_binding()
            S = T.alloc_shared((64,), "int32")
            L = T.alloc_local((1,), "int32")
            L[0] = 0
            T.copy(A, S)
            if A[0] > 5:
                L[0] = S[63 - tx]
            else:
                for i in T.Parallel(64):
                    S[i] = i
            O[tx] = S[tx] + L[0]

    a = np.arange(64, dtype=I32) * 7 + 6
    agree(f, [a, np.zeros(64, I32)], {1: a + a[::-1]}, on=("tile", "sm_80", "sm_90a"))


def test_one_column_of_a_fragment_goes_to_a_fragment():
    @T.prim_func
    def f(A: T.Tensor((9, 2), "float16"), O: T.Tensor((8,), "float64")):
        with T.Kernel(1, threads=64):
            F = T.alloc_fragment((9, 2), "float16")
            G = T.alloc_fragment((8,), "float64")
            T.copy(A, F)
            T.copy(F[0:8, 1], G)
            T.copy(G, O)

    a = np.arange(18).reshape(9, 2).astype(np.float16)
    agree(f, [a, np.zeros(8)], {1: a[:8, 1].astype(np.float64)})


def test_views_of_a_fragment_whose_first_use_has_a_layout_they_cannot_follow():
    @T.prim_func
    def f(A: T.Tensor((4, 7, 6), "int32"), O: T.Tensor((14, 2), "int32"), P: T.Tensor((3, 4), "int32")):
        with T.Kernel(1, threads=64):
            F = T.alloc_fragment((4, 7, 6), "int32")
            R = T.alloc_fragment((4, 7), "int32")
            G = T.alloc_fragment((12,), "int32")
            T.copy(A, F)
            T.reduce_sum(F, R, dim=2)
            V = T.reshape(R, (14, 2))
            T.copy(V, O)
            for i in T.Parallel(12):
                G[i] = V[i, 1] * 2
            T.copy(T.reshape(G, (3, 4)), P)

    a = np.arange(4 * 7 * 6, dtype=I32).reshape(4, 7, 6)
    r = a.sum(2, dtype=I32).reshape(14, 2)
    agree(f, [a, np.zeros((14, 2), I32), np.zeros((3, 4), I32)], {1: r, 2: (r[:12, 1] * 2).reshape(3, 4)})


def test_reductions_scans_and_transposes_in_a_branch_of_a_pipelined_loop():
    n = 5

    @T.prim_func
    def f(A: T.Tensor((n, 8, 16), "int32"), P: T.Tensor((n,), "int32"), O: T.Tensor((n, 16), "int32"),
          C: T.Tensor((n, 8, 16), "int32"), R: T.Tensor((n, 16, 8), "int32")):
        with T.Kernel(1, threads=64):
            sums = T.alloc_fragment((16,), "int32")
            running = T.alloc_shared((8, 16), "int32")
            turned = T.alloc_shared((16, 8), "int32")
            T.clear(sums)
            T.clear(running)
            T.clear(turned)
            for k in T.Pipelined(n, num_stages=3):
                S = T.alloc_shared((8, 16), "int32")
                T.copy(A[k, 0:8, 0:16], S)
                if P[k] > 0:
                    T.reduce_sum(S, sums, dim=0)
                    T.cumsum(S, running, dim=0)
                    T.transpose(S, turned)
                T.copy(sums, O[k, 0:16])
                T.copy(running, C[k, 0:8, 0:16])
                T.copy(turned, R[k, 0:16, 0:8])

    a = np.arange(n * 128, dtype=I32).reshape(n, 8, 16)
    p = np.array([0, 1, 0, 1, 1], I32)
    last = [a[:0], a[1], a[1], a[3], a[4]]
    o = np.stack([np.zeros(16, I32), *(x.sum(0, dtype=I32) for x in last[1:])])
    c = np.stack([np.zeros((8, 16), I32), *(np.cumsum(x, 0, dtype=I32) for x in last[1:])])
    agree(f, [a, p, np.zeros_like(o), np.zeros_like(c), np.zeros((n, 16, 8), I32)],
          {2: o, 3: c, 4: np.stack([np.zeros((16, 8), I32), *(x.T for x in last[1:])])})


def test_the_other_part_of_a_branch_is_decided_before_the_first_one_writes():
    @T.prim_func
    def f(A: T.Tensor((16,), "int32"), O: T.Tensor((16,), "int32")):
        with T.Kernel(1, threads=64):
            tx = T.get_thread_binding()
            S = T.alloc_shared((16,), "int32")
            T.copy(A, S)
            if tx < 16:
                if S[15 - tx] >= 8:
                    S[tx] = 0
                else:
                    S[tx] = S[tx] + 100
            T.copy(S, O)

    a = np.arange(16, dtype=I32)
    agree(f, [a, np.zeros(16, I32)], {1: np.where(a[::-1] >= 8, 0, a + 100)})


def test_an_element_updated_and_read_in_one_iteration_that_several_threads_own():
    @T.prim_func
    def f(A: T.Tensor((16, 24), "int32"), B: T.Tensor((16,), "int32"), O: T.Tensor((16, 24), "int32"),
          P: T.Tensor((16,), "int32")):
        with T.Kernel(1, threads=64):
            F = T.alloc_fragment((16, 24), "int32")
            G = T.alloc_fragment((16,), "int32")
            R = T.alloc_fragment((16,), "int32")
            T.copy(A, F)
            T.copy(B, G)
            T.reduce_sum(F, R, dim=1)
            for i in T.Parallel(2):
                F[i + 2, 9] = F[i + 2, 9] + R[0]
                G[i] = F[i + 2, 9]
            T.copy(F, O)
            T.copy(G, R)
            T.copy(R, P)

    a, b = np.arange(16 * 24, dtype=I32).reshape(16, 24), np.arange(16, dtype=I32)
    o, p = a.copy(), b.copy()
    o[2:4, 9] += a[0].sum()
    p[:2] = o[2:4, 9]
    agree(f, [a, b, np.zeros_like(a), np.zeros_like(b)], {2: o, 3: p})


def test_tiles_stored_by_tma_after_atomic_updates_by_threads_of_other_warps():
    @T.prim_func
    def f(O: T.Tensor((48, 32), "int32")):
        with T.Kernel(1, threads=256):
            S = T.alloc_shared((48, 32), "int32")
            T.clear(S)
            T.atomic_add(S[21:39, 16:20], 3)
            T.copy(S, O)

    o = np.zeros((48, 32), I32)
    o[21:39, 16:20] = 3
    agree(f, [np.zeros_like(o)], {0: o})


def test_what_the_whole_block_voted_is_one_value():
    @T.prim_func
    def f(A: T.Tensor((64,), "int32"), O: T.Tensor((3, 64), "int32")):
        with T.Kernel(1, threads=48):
            tx = T.get_thread_binding()
            v = T.alloc_var("int32")
            w = T.alloc_var("int32", init=0)
            v = T.syncthreads_count(tx < 17) - 15
            while w < v:
                T.copy(A, O[w, 0:64])
                w = w + 1
            w = T.syncthreads_and(A[tx] >= 0) * 10 + T.syncthreads_or(tx == 47)
            for i in T.Parallel(64):
                O[2, i] = w

    a = np.arange(64, dtype=I32)
    agree(f, [a, np.zeros((3, 64), I32)], {1: np.stack([a, a, np.full(64, 11, I32)])})


def test_a_vote_of_a_block_whose_warps_the_simulator_runs_on_their_own():
    @T.prim_func
    def f(A: T.Tensor((64, 64), "float16"), B: T.Tensor((64, 64), "float16"), O: T.Tensor((64, 64), "float32"),
          P: T.Tensor((3, 128), "int32")):
        with T.Kernel(1, threads=128):
            tx = T.get_thread_binding()
            S, R = T.alloc_shared((64, 64), "float16"), T.alloc_shared((64, 64), "float16")
            F = T.alloc_fragment((64, 64), "float32")
            T.copy(A, S)
            T.copy(B, R)
            T.gemm(S, R, F, clear_accum=True)
            for k in T.serial(3):
                P[k, tx] = T.syncthreads_count(tx % (k + 2) == 0)
            T.copy(F, O)

    a, b = (np.random.default_rng(k).integers(-3, 4, (64, 64)).astype(np.float16) for k in (0, 1))
    p = np.repeat([[64], [43], [32]], 128, 1).astype(I32)
    agree(f, [a, b, np.zeros((64, 64), np.float32), np.zeros((3, 128), I32)],
          {2: a.astype(np.float32) @ b.astype(np.float32), 3: p})


def test_bytes_of_int4_and_strides_are_what_the_call_says():
    s = T.dynamic("s")

    @T.prim_func
    def f(A: T.StridedTensor((6, 8), (s, 2), "float16"), P: T.Tensor((6, 8), "int4"),
          O: T.StridedTensor((6, 8), (11, 1), "float16")):
        with T.Kernel(1, threads=32):
            S = T.alloc_shared((6, 8), "int4")
            F = T.alloc_fragment((6, 8), "float16")
            T.copy(P, S)
            T.copy(A, F)
            for i, j in T.Parallel(6, 8):
                F[i, j] += T.cast(S[i, 7 - j], "float16")
            T.copy(F, O)

    rng = np.random.default_rng(1)
    a = laid_out(rng.integers(-9, 9, (6, 8)).astype(np.float16), (19, 2))
    p = rng.integers(-8, 8, (6, 8))
    packed = (p[:, 0::2] & 15 | (p[:, 1::2] & 15) << 4).astype(np.uint8).view(np.int8)
    want = a + p[:, ::-1].astype(np.float16)
    tensors = [(b.name, b.shape, str(b.dtype)) for b in (x for _, x in f.func.buffers)]
    tensors[1] = (tensors[1][0], (6, 8), "int4")
    args = [a, packed, laid_out(np.zeros((6, 8), np.float16), (11, 1))]
    for name in HERE:
        got = _execute(name, f.func, f, args, tensors, {}, [False])
        assert np.array_equal(got[2], want) and not between_rows(got[2]), name


def test_a_fragment_and_its_view_that_a_loop_asks_for_differently():
    """G tells where the loop runs; F and W, the same registers, would each follow it in a way of their own."""
    @T.prim_func
    def f(A: T.Tensor((4, 8), "int32"), O: T.Tensor((4, 8, 32), "int32")):
        with T.Kernel(1, threads=128):
            F = T.alloc_fragment((4, 8), "int32")
            G = T.alloc_fragment((4, 8, 32), "int32")
            T.copy(A, F)
            W = T.reshape(F, (32,))
            for i, j, k in T.Parallel(4, 8, 32):
                G[i, j, k] = F[i, j] * 100 + W[k]
            T.copy(G, O)

    a = np.arange(32, dtype=I32).reshape(4, 8)
    agree(f, [a, np.zeros((4, 8, 32), I32)], {1: a[:, :, None] * 100 + a.reshape(32)})


def test_one_iteration_under_a_condition_of_what_it_reads_is_the_work_of_one_thread():
    """The verifier gave the branch, behind a barrier for what its condition reads, to every thread."""
    @T.prim_func
    def f(A: T.Tensor((6, 4, 8), "float32"), O: T.Tensor((6, 4, 8), "float32")):
        with T.Kernel(1, threads=64) as bx:
            S = T.alloc_shared((4, 8), "float32")
            for b, c in T.Persistent([3, 2], 1, bx):
                T.copy(A[b * 2 + c, 0:4, 0:8], S)
                for i in T.Parallel(1):
                    if not (-16 <= S[c, i] < 16):
                        S[c, i] = S[c + 1, i] * 2
                    else:
                        S[c, i] = S[c, i] + 1
                T.copy(S, O[b * 2 + c, 0:4, 0:8])

    a = np.random.default_rng(5).integers(-40, 40, (6, 4, 8)).astype(np.float32)
    o = a.copy()
    for k in range(6):
        x = a[k, k % 2, 0]
        o[k, k % 2, 0] = x + 1 if -16 <= x < 16 else a[k, k % 2 + 1, 0] * 2
    agree(f, [a, np.zeros_like(a)], {1: o})


def test_indices_of_64_bits_into_tiles():
    """Layouts put the indices of a tile together as they stand: one of 64 bits beside others of 32 was no program."""
    @T.prim_func
    def f(A: T.Tensor((8, 16), "int32"), O: T.Tensor((8, 16), "int32"), P: T.Tensor((8, 16), "int32")):
        with T.Kernel(2, threads=32) as b:
            S = T.alloc_shared((8, 16), "int32")
            F = T.alloc_fragment((8, 16), "int32")
            T.copy(A, S)
            T.copy(A, F)
            for i, j in T.Persistent([T.int64(2), 2], 2, b):
                for x, y in T.Parallel(4, 8):
                    O[i * 4 + x, j * 8 + y] = S[(i * 4 + x + T.int64(3)) % 8, (j * 8 + y) % (1 << 40)]
                    P[i * 4 + x, j * 8 + y] = F[(x * 3 + 1) % 8, (T.int64(3) + y + 4) % 16]

    a = np.arange(128, dtype=I32).reshape(8, 16)
    x, y = np.meshgrid(range(4), range(8), indexing="ij")
    p = np.tile(a[(x * 3 + 1) % 8, (y + 7) % 16], (2, 2))
    agree(f, [a, np.zeros_like(a), np.zeros_like(a)], {1: np.roll(a, -3, 0), 2: p})


def test_the_least_number_of_a_type_is_its_own_absolute_value():
    """A device compared, converted and divided as if none were negative; of a constant it was an error."""
    n = 32

    @T.prim_func
    def f(A: T.Tensor((n,), "int16"), B: T.Tensor((n,), "int64"), O: T.Tensor((4, n), "int64"), P: T.Tensor((n,), "float32")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(n):
                O[0, i] = T.cast(T.abs(A[i]) == A[i], "int32")
                O[1, i] = ((2 * i) | T.abs(B[i])) % (-3)
                O[2, i] = T.abs(T.int32(-2147483648)) + T.abs(T.int64(-9223372036854775808))
                O[3, i] = T.cast(T.if_then_else(A[i] < 0, -A[i], A[i]) == A[i], "int32") - T.abs(T.int8(-128))
                P[i] = T.abs(A[i])

    a = np.where(np.arange(n) % 2, -2**15, np.arange(n)).astype(np.int16)
    b = np.where(np.arange(n) % 2, -2**63, np.arange(n)).astype(np.int64)
    o = np.empty((4, n), np.int64)
    o[0], o[1], o[2], o[3] = 1, ((2 * np.arange(n)) | np.abs(b)) % -3, -2**31 - 2**63 + 2**64, 129
    agree(f, [a, b, np.zeros((4, n), np.int64), np.zeros(n, np.float32)], {2: o, 3: a.astype(np.float32)})
    assert_no_sign_is_lost(f)


def test_the_least_number_of_a_type_is_its_own_negative():
    """A device shifted, widened and divided it as if it were positive: of int8 -128 to uint16 gave 128."""
    n = 32

    @T.prim_func
    def f(A: T.Tensor((n,), "int8"), B: T.Tensor((n,), "int16"), C: T.Tensor((n,), "int32"), O: T.Tensor((7, n), "int32")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(n):
                O[0, i] = T.cast(-A[i], "uint16")
                O[1, i] = T.truncmod(T.abs(C[i]), 3 << 28)
                O[2, i] = (-B[i]) >> 3
                O[3, i] = B[i] * T.int16(-1) // 7
                O[4, i] = T.truncdiv(T.int16(0) - B[i], T.int16(7))
                O[5, i] = T.abs(A[i]) % 7
                O[6, i] = T.cast(T.cast(T.uint16(0) - T.cast(B[i], "uint16"), "int16"), "int32")

    i = np.arange(n)
    a, b, c = (np.where(i % 2, -2**(bits - 1), i * i - 40).astype(f"int{bits}") for bits in (8, 16, 32))
    o = np.empty((7, n), np.int32)
    o[0], o[1] = (-a).astype(np.uint16), np.fmod(np.abs(c), 3 << 28)
    o[2], o[3], o[4] = -b >> 3, -b // 7, np.trunc(-b / 7)
    o[5], o[6] = np.abs(a) % 7, -b
    agree(f, [a, b, c, np.zeros((7, n), np.int32)], {3: o})
    assert_no_sign_is_lost(f)


def assert_no_sign_is_lost(f):
    """None of the instructions whose result ptxas 13.0 takes to be positive."""
    text = print_kernel(lower(f.func, Target({"kind": "cuda", "arch": "sm_90a"})).kernels[0])
    if nvrtc.available():
        ptx = nvrtc.compile_ptx(text, "sm_90a")
        assert not [word for word in ("abs.s16", "abs.s32", "abs.s64", "neg.s16") if word in ptx]


def test_whole_numbers_of_a_loop_wrap_as_those_of_memory_do():
    """A device added in 64 bits what the type cannot hold: C leaves the overflow of signed numbers undefined."""
    n = 64

    @T.prim_func
    def f(A: T.Tensor((n,), "int64"), O: T.Tensor((2, n), "int64")):
        with T.Kernel(1, threads=64):
            for i in T.Parallel(n):
                O[0, i] = (T.int32(2147483647) + i) + T.int64(0) * A[i]
                O[1, i] = i * 1103515245 + 12345

    i = np.arange(n, dtype=np.int32)
    with np.errstate(over="ignore"):
        o = np.stack([np.int32(2147483647) + i, i * np.int32(1103515245) + np.int32(12345)]).astype(np.int64)
    agree(f, [np.zeros(n, np.int64), np.zeros((2, n), np.int64)], {1: o})
    text = print_kernel(lower(f.func, Target({"kind": "cuda", "arch": "sm_90a"})).kernels[0])
    assert "(unsigned)2147483647" in text and "(unsigned)1103515245" in text
