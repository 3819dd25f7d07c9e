"""Corners where executions are most likely to disagree: types, scopes, lifetimes, loops (language.md 3-14, 19)."""

import ml_dtypes
import numpy as np
import pytest
from user_harness import BF, F8, agree, mark, refused

import tilelang.language as T

RNG = np.random.default_rng(3)
I32, F32, F16 = np.int32, np.float32, np.float16


def ints(*shape, low=-9, high=9, dtype=I32):
    return RNG.integers(low, high, shape).astype(dtype)


@pytest.mark.spec("T.min")
def test_integer_wrap_and_unsigned_arithmetic():
    n = 8

    @T.prim_func
    def f(A: T.Tensor((n,), "int8"), U: T.Tensor((n,), "uint32"), L: T.Tensor((n,), "int64"), O8: T.Tensor((3, n), "int8"),
          OU: T.Tensor((5, n), "uint32"), OL: T.Tensor((3, n), "int64")):
        with T.Kernel(1, threads=8):
            for i in T.Parallel(n):
                O8[0, i] = A[i] * A[i]
                O8[1, i] = A[i] + A[i]
                O8[2, i] = -A[i]
                OU[0, i] = U[i] * U[i]
                OU[1, i] = U[i] / T.uint32(7)
                OU[2, i] = U[i] >> T.uint32(3)
                OU[3, i] = U[i] % T.uint32(10)
                OU[4, i] = T.max(U[i], T.uint32(5)) - T.min(U[i], T.uint32(5))
                OL[0, i] = L[i] * L[i]
                OL[1, i] = L[i] // 3
                OL[2, i] = (L[i] << T.int64(5)) % T.int64(1000)

    a = np.array([-128, 127, 100, -100, 1, 0, -1, 64], np.int8)
    u = np.array([0, 1, 2**31, 2**32 - 1, 5, 77, 123456789, 4000000000], np.uint32)
    x = np.array([0, 1, -1, 2**40, -(2**40) + 1, 2**62, -7, 10**15], np.int64)
    with np.errstate(all="ignore"):
        want = {3: np.stack([a * a, a + a, -a]),
                4: np.stack([u * u, u // 7, u >> 3, u % 10, np.maximum(u, 5) - np.minimum(u, 5)]).astype(np.uint32),
                5: np.stack([x * x, x // 3, (x << 5) % 1000])}
    agree(f, [a, u, x, mark((3, n), np.int8), mark((5, n), np.uint32), mark((3, n), np.int64)], want)


@pytest.mark.spec("T.max")
@pytest.mark.spec("L3.2:float8")
def test_half_bfloat_and_float8_round_at_every_step():
    n = 64

    @T.prim_func
    def f(H: T.Tensor((n,), "float16"), B: T.Tensor((n,), "bfloat16"), E: T.Tensor((n,), "float8_e4m3fn"),
          OH: T.Tensor((3, n), "float16"), OB: T.Tensor((2, n), "bfloat16"), OE: T.Tensor((2, n), "float8_e4m3fn")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(n):
                OH[0, i] = H[i] * H[i] + H[i]
                OH[1, i] = T.max(H[i], T.float16(0.5)) / (H[i] + T.float16(9))
                OH[2, i] = T.cast(B[i], "float16") + H[i]
                OB[0, i] = B[i] * B[i]
                OB[1, i] = T.cast(H[i], "bfloat16") + B[i]
                OE[0, i] = T.cast(T.cast(E[i], "float32") * 2.0, "float8_e4m3fn")
                OE[1, i] = T.cast(H[i], "float8_e4m3fn")

    h = RNG.standard_normal(n).astype(F16)
    b, e = RNG.standard_normal(n).astype(BF), RNG.standard_normal(n).astype(F8)
    prod = (h * h).astype(F16)
    oh = np.stack([prod + h, np.maximum(h, F16(0.5)) / (h + F16(9)), b.astype(F16) + h])
    ob = np.stack([b * b, h.astype(BF) + b])
    oe = np.stack([(e.astype(F32) * 2).astype(F8), h.astype(F8)])
    # a multiply and an add may be contracted: one rounding of half allowed there
    agree(f, [h, b, e, mark((3, n), F16), mark((2, n), BF), mark((2, n), F8)], {3: oh, 4: ob, 5: oe}, tol=2.0**-10)


@pytest.mark.spec("T.clamp")
@pytest.mark.spec("L14:unary")
def test_math_functions_and_special_values():
    fns = ["exp", "exp2", "log", "log2", "sqrt", "rsqrt", "sin", "cos", "tanh", "erf", "sigmoid", "floor", "ceil", "trunc",
           "abs", "round"]
    n, numbered = 32, list(enumerate(fns))

    @T.prim_func
    def f(A: T.Tensor((n,), "float32"), O: T.Tensor((len(fns) + 4, n), "float32")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(n):
                [T.buffer_store(O, getattr(T, fn)(A[i]), [k, i]) for k, fn in numbered]
                O[16, i] = T.cast(T.isnan(A[i]), "float32") + 2 * T.cast(T.isinf(A[i]), "float32")
                O[17, i] = T.max(A[i], 0.25)
                O[18, i] = T.clamp(A[i], -1.0, 1.0)
                O[19, i] = T.pow(A[i], 3)

    from math import erf
    a = RNG.standard_normal(n).astype(F32) * 2
    a[:6] = [0, 0.5, 2.5, -2.5, np.inf, -np.inf]
    with np.errstate(all="ignore"):
        w = [np.exp(a), np.exp2(a), np.log(a), np.log2(a), np.sqrt(a), 1 / np.sqrt(a), np.sin(a), np.cos(a), np.tanh(a),
             np.array([erf(x) for x in a]), 1 / (1 + np.exp(-a)), np.floor(a), np.ceil(a), np.trunc(a), np.abs(a), np.round(a),
             np.isnan(a) + 2.0 * np.isinf(a), np.maximum(a, 0.25), np.clip(a, -1, 1), a * a * a]
    agree(f, [a, mark((len(fns) + 4, n), F32)], {1: np.array(w, F32)}, tol=2e-6)


@pytest.mark.spec("T.alloc_local")
@pytest.mark.spec("L8:vectorized")
@pytest.mark.parametrize("width", [1, 2, 3, 5, 8, 16])
@pytest.mark.parametrize("offset", [0, 1, 4])
def test_vectorized_loops_of_any_width_and_alignment(width, offset):
    @T.prim_func
    def f(A: T.Tensor((64,), "float16"), O: T.Tensor((64,), "float16")):
        with T.Kernel(2, threads=1) as b:
            L = T.alloc_local((16,), "float16")
            for v in T.vectorized(width):
                L[v] = A[b * 24 + offset + v] * 2
            for v in T.vectorized(width):
                O[b * 24 + 2 * offset + v] = L[v] + A[b * 24 + v]

    a = RNG.standard_normal(64).astype(F16)
    o = mark(64, F16)
    for b in range(2):
        for v in range(width):
            o[b * 24 + 2 * offset + v] = a[b * 24 + offset + v] * 2 + a[b * 24 + v]
    agree(f, [a, mark(64, F16)], {1: o})


@pytest.mark.spec("T.grid")
@pytest.mark.spec("L8:unroll", "L8:grid")
def test_unroll_grid_steps_and_nested_parallel():
    @T.prim_func
    def f(O: T.Tensor((4, 6), "int32"), P: T.Tensor((4, 6), "int32"), Q: T.Tensor((12,), "int32")):
        with T.Kernel(1, threads=32):
            s = T.alloc_var("int32")
            for i in T.unroll(0, 12, 3):
                Q[i] = i
            for i in T.unroll(10, 0, -4):
                Q[i - 1] = -i
            for i in T.serial(1, 12, 5):
                Q[i + 1] = 100 + i
            for i, j in T.grid(4, 6):
                s = s + i * j
                O[i, j] = s
            for i in T.Parallel(4):
                for j in T.Parallel(6):
                    P[i, j] = i * 10 + j

    q = mark(12, I32)
    for i in range(0, 12, 3):
        q[i] = i
    for i in range(10, 0, -4):
        q[i - 1] = -i
    for i in range(1, 12, 5):
        if i + 1 < 12:
            q[i + 1] = 100 + i
    i, j = np.meshgrid(range(4), range(6), indexing="ij")
    agree(f, [mark((4, 6), I32), mark((4, 6), I32), mark(12, I32)], {0: np.cumsum(i * j).reshape(4, 6), 1: i * 10 + j, 2: q})


@pytest.mark.spec("L6:alloc_shared")
def test_lifetimes_of_shared_buffers_overlap_correctly():
    n = 64

    @T.prim_func
    def f(A: T.Tensor((3, n), "int32"), O: T.Tensor((3, n), "int32")):
        with T.Kernel(1, threads=32):
            K = T.alloc_shared((n,), "int32")
            T.copy(A[0, 0:n], K)
            for r in T.serial(3):
                S = T.alloc_shared((n,), "int32")
                T.copy(A[r, 0:n], S)
                for i in T.Parallel(n):
                    O[r, i] = S[n - 1 - i] + K[i]
                Z = T.alloc_shared((n,), "int32")
                for i in T.Parallel(n):
                    Z[i] = O[r, i] * 2
                for i in T.Parallel(n):
                    K[i] = K[i] + Z[(i + 5) % n]
            T.copy(K, O[0, 0:n])

    a = ints(3, n)
    k, o = a[0].copy(), mark((3, n), I32)
    for r in range(3):
        o[r] = a[r, ::-1] + k
        k = k + np.roll(o[r] * 2, -5)
    o[0] = k
    agree(f, [a, mark((3, n), I32)], {1: o})


@pytest.mark.spec("L8:python-control")
def test_block_uniform_branches_with_barriers_and_fragments():
    n = 32

    @T.prim_func
    def f(A: T.Tensor((4, n), "int32"), flag: T.Tensor((4,), "int32"), O: T.Tensor((4, n), "int32")):
        with T.Kernel(4, threads=64) as b:
            S = T.alloc_shared((n,), "int32")
            F = T.alloc_fragment((n,), "int32")
            s = T.alloc_fragment((1,), "int32")
            T.copy(A[b, 0:n], S)
            T.copy(S, F)
            T.reduce_sum(F, s, dim=0)
            if flag[b] == 0:
                for i in T.Parallel(n):
                    S[i] = F[n - 1 - i]
                for i in T.Parallel(n):
                    F[i] = S[(i + 1) % n]
            elif flag[b] == 1:
                T.fill(F, 3)
            else:
                for i in T.Parallel(n):
                    if F[i] > 0:
                        F[i] = F[i] * s[0]
            T.copy(F, O[b, 0:n])

    a, flag = ints(4, n), np.array([0, 1, 2, 0], I32)
    w = np.stack([np.roll(x[::-1], -1) if k == 0 else np.full(n, 3) if k == 1 else np.where(x > 0, x * x.sum(), x)
                  for x, k in zip(a, flag)])
    agree(f, [a, flag, mark((4, n), I32)], {2: w})


@pytest.mark.spec("T.clear", "T.fill")
@pytest.mark.spec("L10:copy", "L12.1:fill")
def test_fragment_regions_of_fill_copy_and_clear():
    @T.prim_func
    def f(A: T.Tensor((8, 16), "int32"), O: T.Tensor((8, 16), "int32"), P: T.Tensor((3, 5), "int32")):
        with T.Kernel(1, threads=32):
            F = T.alloc_fragment((8, 16), "int32")
            T.copy(A, F)
            T.fill(F[2:4, 0:16], 7)
            T.clear(F[5:6, 3:9])
            T.copy(A[0:2, 0:16], F[6:8, 0:16])
            T.copy(F, O)
            T.copy(F[1:4, 2:7], P)

    a = ints(8, 16)
    w = a.copy()
    w[2:4] = 7
    w[5, 3:9] = 0
    w[6:8] = a[0:2]
    agree(f, [a, mark((8, 16), I32), mark((3, 5), I32)], {1: w, 2: w[1:4, 2:7]})


def test_fragment_broadcast_three_dimensions_and_transposed_loop():
    p, q, r = 3, 8, 10

    @T.prim_func
    def f(A: T.Tensor((p, q), "int32"), B: T.Tensor((r,), "int32"), O: T.Tensor((p, q, r), "int32"),
          X: T.Tensor((q, p), "int32")):
        with T.Kernel(1, threads=64):
            F = T.alloc_fragment((p, q), "int32")
            G = T.alloc_fragment((r,), "int32")
            C = T.alloc_fragment((p, q, r), "int32")
            D = T.alloc_fragment((q, p), "int32")
            T.copy(A, F)
            T.copy(B, G)
            for k, j, i in T.Parallel(r, q, p):
                C[i, j, k] = F[i, j] * G[k] + i
            for i, j, k in T.Parallel(p, q, r):
                C[i, j, k] = C[i, j, k] - G[r - 1 - k]
            for i, j in T.Parallel(p, q):
                D[j, i] = F[i, j] + 1
            T.copy(C, O)
            T.copy(D, X)

    a, b = ints(p, q), ints(r)
    w = a[:, :, None] * b + np.arange(p)[:, None, None] - b[::-1]
    agree(f, [a, b, mark((p, q, r), I32), mark((q, p), I32)], {2: w, 3: a.T + 1})


@pytest.mark.spec("T.unroll")
@pytest.mark.spec("L6:alloc_local")
def test_local_arrays_of_threads_and_lazy_guards():
    @T.prim_func
    def f(A: T.Tensor((32,), "int32"), idx: T.Tensor((32,), "int32"), O: T.Tensor((2, 32), "int32")):
        with T.Kernel(1, threads=32):
            tx = T.get_thread_binding()
            S = T.alloc_shared((8,), "int32")
            L = T.alloc_local((4,), "int32")
            if tx < 8:
                S[tx] = A[tx]
            for k in T.unroll(4):
                L[k] = A[(tx * 4 + k) % 32]
            O[0, tx] = L[idx[tx] % 4]
            O[1, tx] = T.if_then_else(idx[tx] < 8, S[idx[tx]], -1)

    a, idx = ints(32), ints(32, low=0, high=100)
    o = np.stack([a[(np.arange(32) * 4 + idx % 4) % 32], np.where(idx < 8, a[np.minimum(idx, 7)], -1)])
    agree(f, [a, idx, mark((2, 32), I32)], {2: o})


def test_gather_scatter_and_indirect_rows():
    n, w = 10, 12

    @T.prim_func
    def f(A: T.Tensor((20, w), "float16"), idx: T.Tensor((n,), "int32"), O: T.Tensor((n, w), "float16"),
          P: T.Tensor((20, w), "float16")):
        with T.Kernel(1, threads=64):
            S = T.alloc_shared((n, w), "float16")
            J = T.alloc_shared((n,), "int32")
            T.copy(idx, J)
            for i, j in T.Parallel(n, w):
                S[i, j] = A[J[i], j]
            T.copy(S, O)
            for i in T.serial(n):
                T.copy(S[i, 0:w], P[J[i], 0:w])

    a, idx = RNG.standard_normal((20, w)).astype(F16), np.array([3, -1, 19, 20, 5, 100, 0, -20, 7, 8], I32)
    ok = (idx >= 0) & (idx < 20)
    o = np.where(ok[:, None], a[np.clip(idx, 0, 19)], 0).astype(F16)
    p = mark((20, w), F16)
    p[idx[ok]] = a[idx[ok]]
    agree(f, [a, idx, mark((n, w), F16), mark((20, w), F16)], {2: o, 3: p})


def test_bool_tensors_everywhere():
    n = 40

    @T.prim_func
    def f(A: T.Tensor((n,), "bool"), B: T.Tensor((n,), "int32"), O: T.Tensor((n,), "bool"), C: T.Tensor((2,), "int32")):
        with T.Kernel(1, threads=32):
            S = T.alloc_shared((n,), "bool")
            F = T.alloc_fragment((n,), "int32")
            c = T.alloc_fragment((1,), "int32")
            for i in T.Parallel(n):
                S[i] = A[i] and B[i] > 0
                F[i] = T.cast(A[i], "int32")
            T.reduce_sum(F, c, dim=0)
            T.copy(c, C[0:1])
            for i in T.Parallel(n):
                O[i] = not S[n - 1 - i] or B[i] == 3
                if ~A[i]:
                    T.atomic_add(C[1], 1)

    a, b = RNG.random(n) < 0.5, ints(n)
    s = a & (b > 0)
    agree(f, [a, b, np.zeros(n, bool), np.zeros(2, I32)], {2: ~s[::-1] | (b == 3), 3: [a.sum(), (~a).sum()]})


def test_macro_that_allocates_inside_a_loop():
    n = 16

    @T.macro
    def smooth(src, dst, k):
        S = T.alloc_shared((n,), "int32")
        T.copy(src, S)
        for i in T.Parallel(n):
            dst[i] = S[i] + S[(i + k) % n]

    @T.prim_func
    def f(A: T.Tensor((n,), "int32"), O: T.Tensor((n,), "int32")):
        with T.Kernel(1, threads=32):
            X = T.alloc_fragment((n,), "int32")
            T.copy(A, X)
            for k in T.serial(1, 4):
                smooth(X, X, k)
            smooth(X, O, 2)

    a = ints(n)
    w = a.copy()
    for k in (1, 2, 3, 2):
        w = w + np.roll(w, -k)
    agree(f, [a, mark(n, I32)], {1: w})


def test_votes_stand_in_any_operand_of_a_condition():
    """Refused as the second operand of and/or, and in the arms of a selection."""
    X = np.array([[0, 1, 1], [0, 0, 0], [1, 1, 1]], np.int32)

    @T.prim_func
    def main(X: T.Tensor((3, 3), "int32"), O: T.Tensor((3, 2), "int32")):
        with T.Kernel(3, threads=32) as b:
            S = T.alloc_shared((3,), "bool")
            for i in T.Parallel(3):
                S[i] = X[b, i] != 0
            if T.any_of(S) and not T.all_of(S):
                O[b, 0] = 7
            O[b, 1] = T.all_of(S) if b > 0 and (b == 1 or T.any_of(S)) else T.any_of(S)

    agree(main, [X, mark((3, 2), np.int32)], {1: np.array([[7, 1], [77, 0], [77, 1]])})


@pytest.mark.spec("L12.5:any-all")
@pytest.mark.timeout(20)
def test_any_of_is_stored_into_a_variable():
    """Collatz lengths of a block: `more` was bound to another variable, so that the loop never ended."""
    n = 24

    @T.prim_func
    def f(A: T.Tensor((n,), "int32"), O: T.Tensor((n,), "int32")):
        with T.Kernel(1, threads=32):
            S = T.alloc_shared((n,), "int32")
            C = T.alloc_fragment((n,), "int32")
            T.copy(A, S)
            T.clear(C)
            more = T.alloc_var("bool", init=True)
            while more:
                for i in T.Parallel(n):
                    if S[i] > 1:
                        C[i] = C[i] + 1
                        S[i] = S[i] // 2 if S[i] % 2 == 0 else 3 * S[i] + 1
                    else:
                        S[i] = 0
                more = T.any_of(S)
            T.copy(C, O)

    def collatz(x):
        c = 0
        while x > 1:
            x, c = (x // 2 if x % 2 == 0 else 3 * x + 1), c + 1
        return c

    a = ints(n, low=1, high=40)
    agree(f, [a, mark(n, I32)], {1: [collatz(x) for x in a]})


@pytest.mark.spec("T.sync_threads")
@pytest.mark.spec("L6:alloc_global")
def test_workspace_in_global_memory():
    n = 16

    @T.prim_func
    def f(A: T.Tensor((n,), "int32"), O: T.Tensor((n,), "int32")):
        with T.Kernel(1, threads=32):
            W = T.alloc_global((n,), "int32")
            for i in T.Parallel(n):
                W[i] = A[i] * 3
            T.sync_threads()
            for i in T.Parallel(n):
                O[i] = W[n - 1 - i]

    a = ints(n)
    agree(f, [a, mark(n, I32)], {1: a[::-1] * 3})


def test_parallel_over_run_time_extent_with_shared():
    @T.prim_func
    def f(n: T.int32, A: T.Tensor((50,), "int32"), O: T.Tensor((50,), "int32")):
        with T.Kernel(1, threads=32):
            S = T.alloc_shared((50,), "int32")
            for i in T.Parallel(n):
                S[i] = A[i] + 1
            for i in T.Parallel(n):
                O[i] = S[n - 1 - i]

    a = ints(50)
    for n in (0, 1, 33, 50):
        o = mark(50, I32)
        o[:n] = a[:n][::-1] + 1
        agree(f, [n, a, mark(50, I32)], {2: o})


@pytest.mark.spec("T.reduce_absmax")
def test_same_fragment_reduced_along_both_dimensions_then_normalised():
    m, n = 24, 36

    @T.prim_func
    def f(A: T.Tensor((m, n), "float32"), O: T.Tensor((m, n), "float32")):
        with T.Kernel(1, threads=96):
            F = T.alloc_fragment((m, n), "float32")
            r = T.alloc_fragment((m,), "float32")
            c = T.alloc_fragment((n,), "float32")
            T.copy(A, F)
            T.reduce_absmax(F, r, dim=1)
            T.reduce_absmax(F, c, dim=0)
            for i, j in T.Parallel(m, n):
                F[i, j] = F[i, j] / T.max(r[i], c[j])
            T.reduce_sum(F, c, dim=0, clear=False)
            for i, j in T.Parallel(m, n):
                O[i, j] = F[i, j] + c[j]

    a = RNG.standard_normal((m, n)).astype(F32)
    r, c = np.abs(a).max(1), np.abs(a).max(0)
    w = a / np.maximum(r[:, None], c)
    agree(f, [a, mark((m, n), F32)], {1: w + (c + w.sum(0))}, tol=1e-5)


@pytest.mark.spec("L2.3:python")
def test_several_fragments_in_a_list_and_dictionary():
    n = 20

    @T.prim_func
    def f(A: T.Tensor((3, n), "int32"), O: T.Tensor((n,), "int32")):
        with T.Kernel(1, threads=32):
            parts = [T.alloc_fragment((n,), "int32") for _ in (0, 1, 2)]
            total = {"x": T.alloc_fragment((n,), "int32")}
            T.clear(total["x"])
            for _k in T.unroll(1):
                T.copy(A[0, 0:n], parts[0])
                T.copy(A[1, 0:n], parts[1])
                T.copy(A[2, 0:n], parts[2])
            for i in T.Parallel(n):
                total["x"][i] += parts[0][i] * parts[1][i] - parts[2][i]
            T.copy(total["x"], O)

    a = ints(3, n)
    agree(f, [a, mark(n, I32)], {1: a[0] * a[1] - a[2]})


@pytest.mark.parametrize("what", ["local by parallel", "tile op in parallel", "list loop", "shape", "slice step",
                                  "symbol", "bool of expression", "assign to buffer"])
def test_named_refusals(what):
    def build():
        k = T.dynamic("k")

        @T.prim_func
        def f(A: T.Tensor((16, 8), "int32")):
            with T.Kernel(1, threads=32):
                S = T.alloc_shared((16, 8), "int32")
                F = T.alloc_fragment((16,), "int32")
                L = T.alloc_local((16,), "int32")
                T.clear(S)
                T.clear(F)
                if what == "local by parallel":
                    for i in T.Parallel(16):
                        L[i] = i
                if what == "tile op in parallel":
                    for _i in T.Parallel(16):
                        T.copy(S, A)
                if what == "list loop":
                    for i in [1, 2]:
                        A[i, 0] = 1
                if what == "shape":
                    T.copy(A[0:16, 0:4], S)
                    T.copy(S[0:8, 0], F[0:16])
                    T.copy(S, F)
                if what == "slice step":
                    T.copy(A[0:16:2, 0:8], S[0:8, 0:8])
                if what == "symbol":
                    A[0, 0] = k
                if what == "bool of expression":
                    A[0, 0] = max(A[0, 1], A[1, 0])
                if what == "assign to buffer":
                    S += 1
        return f

    refused(build, None)


def test_fragment_read_by_a_serial_index_of_every_thread():
    """Each thread reads all of a distributed fragment, and an element whose index only memory knows."""
    n = 20

    def build():
        @T.prim_func
        def f(A: T.Tensor((n,), "int32"), idx: T.Tensor((4,), "int32"), O: T.Tensor((64,), "int32"),
              P: T.Tensor((4,), "int32")):
            with T.Kernel(1, threads=64):
                tx = T.get_thread_binding()
                F = T.alloc_fragment((n,), "int32")
                s = T.alloc_var("int32")
                T.copy(A, F)
                for i in T.serial(n):
                    s = s * 3 + F[i]
                O[tx] = s + tx
                for k in T.serial(4):
                    P[k] = F[idx[k]] * 2
        return f

    a, idx = ints(n), np.array([3, 19, 0, 7], I32)
    s = I32(0)
    with np.errstate(over="ignore"):
        for x in a:
            s = s * I32(3) + x
    agree(build(), [a, idx, mark(64, I32), mark(4, I32)], {2: s + np.arange(64), 3: a[idx] * 2})


@pytest.mark.spec("L2.3:store-var")
def test_variable_assigned_from_a_variable_is_a_store():
    @T.macro
    def largest(A, n):
        best = T.alloc_var("int32", init=-100)
        for i in T.serial(n):
            best = T.max(best, A[i])
        return best

    @T.prim_func
    def f(A: T.Tensor((6,), "int32"), O: T.Tensor((6,), "int32")):
        with T.Kernel(1, threads=1):
            a = T.alloc_var("int32", init=1)
            b = T.alloc_var("int32", init=5)
            c = T.alloc_var("int32", init=0)
            for _i in T.serial(3):
                a = b
                b = b + 1
                c = largest(A, _i + 1)
            y = b
            b = 50
            O[0] = a
            O[1] = y
            O[2] = c
            a, b = b, a
            O[3] = a
            O[4] = b
            if a > 3:
                c = a
            O[5] = c

    x = np.array([4, 9, -3, 20, 1, 2], I32)
    agree(f, [x, mark(6, I32)], {1: [7, 8, 9, 50, 7, 50]})


@pytest.mark.spec("L2.3:while")
def test_statement_in_the_condition_of_while_says_what_to_do():
    def build():
        @T.prim_func
        def f(A: T.Tensor((16,), "int32")):
            with T.Kernel(1, threads=32):
                while T.any_of(A):
                    A[0] = 0
        return f

    refused(build, "end of (its|the) body")


@pytest.mark.spec("L3.2:float8")
@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2"])
def test_float8_saturates_in_copies_stores_and_arithmetic(name):
    n = 12

    @T.prim_func
    def f(X: T.Tensor((n,), "float32"), E: T.Tensor((n,), name), O: T.Tensor((5, n), name)):
        with T.Kernel(1, threads=32):
            x = T.alloc_fragment((n,), "float32")
            T.copy(X, x)
            T.copy(x, O[0, :])
            for i in T.Parallel(n):
                O[1, i] = X[i]
                O[2, i] = E[i] + E[i]
                O[3, i] = E[i] * E[i]
                O[4, i] = T.cast(X[i] * 4.0, "bfloat16")

    small = np.dtype(getattr(ml_dtypes, name))
    limit = float(ml_dtypes.finfo(small).max)
    x = np.array([1e6, -1e6, 448, 464, 465, 57344, 61439, 61440, np.inf, -np.inf, np.nan, 1e-9], np.float32)

    def sat(v):
        return np.clip(v, -limit, limit).astype(small)

    with np.errstate(all="ignore"):
        e = sat(x)
        w = e.astype(np.float32)
        want = np.stack([sat(x), sat(x), sat(w + w), sat(w * w), sat((x * 4).astype(BF).astype(F32))])
    agree(f, [x, e, mark((5, n), small)], {2: want})
