"""Copies, regions, fragments, views and parallel loops of tiles (language.md 5, 8 to 10, 19)."""

import numpy as np
import pytest
from user_harness import NP, RUNS, agree, drawn, mark, refused

import tilelang.language as T


RNG = np.random.default_rng(11)
data = drawn(RNG)
I32, F32, F16 = np.int32, np.float32, np.float16


@pytest.mark.spec("L10:copy")
@pytest.mark.parametrize("src, dst", [("float16", "float32"), ("float32", "bfloat16"), ("float32", "float8_e4m3fn"),
                                      ("float8_e5m2", "float16"), ("int8", "float32"), ("float32", "int8"),
                                      ("bool", "float32"), ("uint8", "int32"), ("int64", "int32"), ("float64", "float16"),
                                      ("int32", "bool"), ("float8_e4m3fn", "float8_e4m3fn"), ("int16", "float64")])
def test_copy_chain_converts(src, dst):
    m, n = 13, 21

    @T.prim_func
    def f(A: T.Tensor((m, n), src), O: T.Tensor((m, n), dst)):
        with T.Kernel(T.ceildiv(n, 8), T.ceildiv(m, 8), threads=48) as (bx, by):
            S = T.alloc_shared((8, 8), src)
            R = T.alloc_fragment((8, 8), src)
            Q = T.alloc_fragment((8, 8), dst)
            Z = T.alloc_shared((8, 8), dst)
            T.copy(A[by * 8, bx * 8], S)
            T.copy(S, R)
            T.copy(R, Q)
            T.copy(Q, Z)
            T.copy(Z, O[by * 8, bx * 8])

    a = data((m, n), src) * (3 if src.startswith("float3") else 1)
    a = a.astype(NP[src])
    w = a.astype(F32).astype(NP[dst]) if src == "float64" and dst == "float16" else a.astype(NP[dst])
    if src.startswith("float") and dst.startswith("int"):
        w = np.trunc(a.astype(F32)).astype(NP[dst])
    agree(f, [a, mark((m, n), NP[dst])], {1: w}, tol=1e-3 if src == "float64" else 0)


@pytest.mark.spec("L6:alloc_fragment", "M:odd-threads", "M:odd-tile-width")
@pytest.mark.parametrize("threads", [1, 3, 32, 33, 100, 256])
@pytest.mark.parametrize("shape", [(7, 5), (16, 24), (1, 37), (33, 1)])
def test_odd_tiles_and_threads(threads, shape):
    bm, bn = shape
    m, n = 2 * bm + 1, 2 * bn - 1

    @T.prim_func
    def f(A: T.Tensor((m, n), "float32"), O: T.Tensor((m, n), "float32"), R: T.Tensor((m,), "float32")):
        with T.Kernel(T.ceildiv(m, bm), threads=threads) as b:
            F = T.alloc_fragment((bm, n), "float32")
            s = T.alloc_fragment((bm,), "float32")
            T.copy(A[b * bm, 0], F)
            T.reduce_max(F, s, dim=1)
            for i, j in T.Parallel(bm, n):
                F[i, j] = F[i, j] - s[i]
            T.copy(F, O[b * bm, 0])
            T.copy(s, R[b * bm])

    a = data((m, n))
    mx = a.max(1)
    agree(f, [a, mark((m, n), F32), mark(m, F32)], {1: a - mx[:, None], 2: mx})


@pytest.mark.spec("M:shifted-fragment")
@pytest.mark.parametrize("read", ["shift", "transposed", "reversed", "row", "div"])
def test_fragment_read_elsewhere(read):
    n = 16

    def build():
        @T.prim_func
        def f(A: T.Tensor((n, n), "int32"), O: T.Tensor((n, n), "int32")):
            with T.Kernel(1, threads=32):
                F = T.alloc_fragment((n, n), "int32")
                G = T.alloc_fragment((n, n), "int32")
                T.copy(A, F)
                for i, j in T.Parallel(n, n):
                    if read == "shift":
                        G[i, j] = F[i, (j + 3) % n] * 2
                    elif read == "transposed":
                        G[i, j] = F[j, i] * 2
                    elif read == "reversed":
                        G[i, j] = F[n - 1 - i, n - 1 - j] * 2
                    elif read == "row":
                        G[i, j] = F[i, 0] * 2
                    else:
                        G[i, j] = F[i // 2, j // 4] * 2
                T.copy(G, O)
        return f

    a = data((n, n), "int32")
    i, j = np.meshgrid(range(n), range(n), indexing="ij")
    w = {"shift": a[i, (j + 3) % n], "transposed": a.T, "reversed": a[::-1, ::-1], "row": a[i, 0 * j],
         "div": a[i // 2, j // 4]}[read] * 2
    agree(build(), [a, mark((n, n), I32)], {1: w})


@pytest.mark.spec("M:loops-of-extents")
def test_loops_of_different_extents_over_one_fragment():
    n = 48

    @T.prim_func
    def f(A: T.Tensor((n,), "int32"), O: T.Tensor((n,), "int32")):
        with T.Kernel(1, threads=32):
            F = T.alloc_fragment((n,), "int32")
            T.copy(A, F)
            for i in T.Parallel(16):
                F[i] = F[i] + 100
            for i in T.Parallel(20):
                F[i + 28] = F[i + 28] - 100
            for i in T.Parallel(n // 2):
                F[2 * i] = F[2 * i] * 2
            for i, j in T.Parallel(6, 8):
                F[i * 8 + j] = F[i * 8 + j] + i
            T.copy(F, O)

    a = data(n, "int32")
    w = a.copy()
    w[:16] += 100
    w[28:] -= 100
    w[::2] *= 2
    w += np.arange(n) // 8
    agree(f, [a, mark(n, I32)], {1: w})


@pytest.mark.spec("T.reshape")
@pytest.mark.spec("L19:views")
def test_views_and_reshapes():
    @T.prim_func
    def f(A: T.Tensor((8, 12), "float32"), O: T.Tensor((12, 8), "float32"), P: T.Tensor((96,), "int32"),
          Q: T.Tensor((4, 24), "float32")):
        with T.Kernel(1, threads=24):
            S = T.alloc_shared((8, 12), "float32")
            F = T.alloc_fragment((8, 12), "float32")
            V = T.reshape(S, (12, 8))
            W = T.view(S, (96,), "int32")
            T.copy(A, S)
            T.copy(V, O)
            T.copy(W, P)
            T.copy(A, F)
            G = T.reshape(F, (4, 24))
            for i, j in T.Parallel(4, 24):
                G[i, j] = G[i, j] + 1
            T.copy(G, Q)

    a = data((8, 12))
    agree(f, [a, mark((12, 8), F32), mark(96, I32), mark((4, 24), F32)],
          {1: a.reshape(12, 8), 2: a.reshape(-1).view(I32), 3: a.reshape(4, 24) + 1})


@pytest.mark.parametrize("m", [0, 1, 7])
def test_views_of_a_tensor_whose_length_is_known_at_run_time(m):
    """They were refused although the sizes are equal: only the text of the sizes was compared."""
    k, n = T.dynamic("k, n")

    @T.prim_func
    def f(A: T.Tensor((k * 16,), "int32"), B: T.Tensor((n, k), "float32"), O: T.Tensor((k, 16), "int32"),
          P: T.Tensor((k * n,), "int32")):
        with T.Kernel(1, threads=32):
            V = T.view(A, (k, 16))
            W = T.view(B, (k * n * 2,), "int16")
            for i, j in T.Parallel(k, 16):
                O[i, j] = V[i, 15 - j]
            for i in T.Parallel(k * n):
                P[i] = W[2 * i]

    a, b = np.arange(16 * m, dtype=I32), data((3, m))
    agree(f, [a, b, mark((m, 16), I32), mark(3 * m, I32)],
          {2: a.reshape(m, 16)[:, ::-1], 3: b.reshape(-1).view(np.int16)[::2].astype(I32)})


def test_a_view_of_another_length_at_run_time_is_refused():
    k = T.dynamic("k")
    with pytest.raises(AssertionError, match="reshape/view shape check failed"):
        @T.prim_func
        def f(A: T.Tensor((k * 16,), "int32")):
            with T.Kernel(1, threads=32):
                V = T.view(A, (k + 1, 16))
                V[0, 0] = 1


@pytest.mark.spec("T.reinterpret", "T.view")
@pytest.mark.spec("L19:views", "L4.3:casts")
def test_view_of_bytes_and_reinterpret():
    @T.prim_func
    def f(A: T.Tensor((16, 4), "uint8"), O: T.Tensor((16,), "int32"), P: T.Tensor((16,), "int32")):
        with T.Kernel(1, threads=16):
            W = T.view(A, (16,), "int32")
            S = T.alloc_shared((16, 4), "uint8")
            T.copy(A, S)
            for i in T.Parallel(16):
                O[i] = W[i]
                P[i] = T.reinterpret(T.reinterpret(W[i], "float32"), "int32")

    a = data((16, 4), "uint8", 0, 100)
    w = a.reshape(-1).view(I32)
    agree(f, [a, mark(16, I32), mark(16, I32)], {1: w, 2: w})


@pytest.mark.spec("L9:operands")
def test_regions_of_nine():
    """Element bases, slices with unit dimensions, omitted bounds, regions of both sides."""
    @T.prim_func
    def f(A: T.Tensor((3, 20, 20), "int32"), O: T.Tensor((4, 20, 20), "int32")):
        with T.Kernel(1, threads=40):
            S = T.alloc_shared((2, 10, 12), "int32")
            F = T.alloc_fragment((10, 12), "int32")
            T.copy(A[1, 3, 5], S[0, :, :])
            T.copy(A[2, 15:25, 14:26], S[1, :, :])
            T.copy(S[0, :, :], O[0, 4:14, 2:14])
            T.copy(S[1, :, :], O[1, 0:10, :12])
            T.copy(S[1, :, :], F)
            T.copy(F, O[2, 12, 12])
            T.copy(A[0, 7, 0:20], O[3, 0, 0:20])
            T.copy(A[0, 0:20, 4], O[3, 1, 0:20])
            T.fill(O[3, 19:20, 5:9], 5)
            T.fill(O[3, 18, 18], 6)

    a = data((3, 20, 20), "int32")
    o = mark((4, 20, 20), I32)
    big = np.zeros((30, 30), I32)
    big[:20, :20] = a[2]
    s0, s1 = a[1, 3:13, 5:17], big[15:25, 14:26]
    o[0, 4:14, 2:14] = s0
    o[1, :10, :12] = s1
    o[2, 12:20, 12:20] = s1[:8, :8]
    o[3, 0] = a[0, 7]
    o[3, 1] = a[0, :, 4]
    o[3, 19, 5:9] = 5
    o[3, 18, 18] = 6
    agree(f, [a, mark((4, 20, 20), I32)], {1: o})


@pytest.mark.spec("L9:pairing")
def test_copy_of_run_time_extent_moves_the_base_space():
    @T.prim_func
    def f(n: T.int32, A: T.Tensor((40, 16), "int32"), O: T.Tensor((40, 16), "int32"), P: T.Tensor((40, 16), "int32")):
        with T.Kernel(1, threads=32):
            S = T.alloc_shared((32, 16), "int32")
            T.copy(A[0:n, 0:16], S)
            T.copy(S, P[0:32, 0:16])
            T.copy(A[8:8 + n, 0:16], O[0:n, 0:16])

    a = data((40, 16), "int32")
    for n in (5, 0, 32):
        o, p = mark((40, 16), I32), mark((40, 16), I32)
        o[:n] = a[8:8 + n]
        p[:32] = a[:32]
        agree(f, [n, a, mark((40, 16), I32), mark((40, 16), I32)], {2: o, 3: p})


@pytest.mark.spec("T.vectorized")
@pytest.mark.spec("L2.3:bind-slice", "L5:slice-value")
def test_vector_slices_as_values():
    @T.prim_func
    def f(A: T.Tensor((4, 16), "float32"), O: T.Tensor((4, 16), "float32")):
        with T.Kernel(4, threads=1) as b:
            O[b, 4:8] = A[b, 0:4] * 2 + A[b, 15]
            O[b, 0:4] = A[b, 4:8]
            for v in T.vectorized(8):
                O[b, 8 + v] = A[b, 8 + v] + 1

    a = data((4, 16))
    o = mark((4, 16), F32)
    o[:, 4:8] = a[:, 0:4] * 2 + a[:, 15:]
    o[:, 0:4] = a[:, 4:8]
    o[:, 8:] = a[:, 8:] + 1
    agree(f, [a, mark((4, 16), F32)], {1: o}, tol=1e-6)


@pytest.mark.spec("T.transpose")
@pytest.mark.spec("L10:transpose")
def test_transpose_op_and_broadcast_in_parallel():
    m, n = 12, 20

    @T.prim_func
    def f(A: T.Tensor((m, n), "float16"), v: T.Tensor((n,), "float16"), O: T.Tensor((n, m), "float16")):
        with T.Kernel(1, threads=64):
            S = T.alloc_shared((m, n), "float16")
            Z = T.alloc_shared((n, m), "float16")
            r = T.alloc_fragment((n,), "float16")
            T.copy(A, S)
            T.copy(v, r)
            T.transpose(S, Z)
            F = T.alloc_fragment((n, m), "float16")
            T.copy(Z, F)
            for i, j in T.Parallel(n, m):
                F[i, j] = F[i, j] * r[i]
            T.copy(F, O)

    a, v = data((m, n), "float16"), data(n, "float16")
    agree(f, [a, v, mark((n, m), F16)], {2: (a * v).T})


@pytest.mark.spec("T.transpose", "T.grid")
def test_transpose_of_one_version_of_a_tile():
    """Leading extents of 1 belong to neither matrix, as in T.copy and T.gemm."""
    @T.prim_func
    def f(A: T.Tensor((2, 8, 12), "float16"), O: T.Tensor((2, 12, 8), "float16"), P: T.Tensor((8, 12), "float16")):
        with T.Kernel(1, threads=64):
            S, R = T.alloc_shared((2, 8, 12), "float16"), T.alloc_shared((1, 8, 12), "float16")
            Z = T.alloc_shared((12, 8), "float16")
            T.copy(A, S)
            for k in T.grid(2):
                T.transpose(S[k, :, :], Z)
                T.copy(Z, O[k, :, :])
            T.transpose(Z, R)
            T.copy(R[0, :, :], P)

    a = data((2, 8, 12), "float16")
    agree(f, [a, mark((2, 12, 8), F16), mark((8, 12), F16)], {1: a.swapaxes(1, 2), 2: a[1]})


@pytest.mark.spec("L2.3:negative-index")
def test_negative_slice_bounds_mean_those_of_python():
    @T.prim_func
    def f(A: T.Tensor((16, 8), "int32"), O: T.Tensor((4, 8), "int32"), P: T.Tensor((16, 8), "int32")):
        with T.Kernel(1, threads=32):
            T.copy(A[-4:, :], O)
            T.copy(A[-6:-2, -3:], P[-4:, 1:4])

    a = data((16, 8), "int32")
    p = mark((16, 8), I32)
    p[-4:, 1:4] = a[-6:-2, -3:]
    agree(f, [a, mark((4, 8), I32), mark((16, 8), I32)], {1: a[-4:], 2: p})


def test_a_copy_onto_a_part_of_its_source_is_refused():
    def program(at):
        @T.prim_func
        def f(A: T.Tensor((64,), "float32"), n: T.int32):
            with T.Kernel(1, threads=32):
                s = T.alloc_shared((64,), "float32")
                T.copy(A, s)
                for k in T.serial(n):
                    T.copy(s[k : k + 16], s[k + at : k + at + 16])
                T.copy(s, A)

        return f

    for at in (1, 15, -8):
        refused(lambda at=at: program(at), "source and destination overlap in `s`")
    a = np.arange(64, dtype=F32)
    moved = a.copy()
    for k in range(2):
        moved[k + 16:k + 32] = moved[k:k + 16].copy()
    agree(program(16), [a, 2], {0: moved})


@pytest.mark.parametrize("bounds", [(2, 5), (5, 2), (3, 3)])
def test_tiles_whose_end_lies_before_their_start_are_empty(bounds):
    """The reference interpreter failed; a GPU took two negative extents for the tile of their product."""
    @T.prim_func
    def f(X: T.Tensor((8, 8), "int32"), P: T.Tensor((2,), "int32"), Y: T.Tensor((8, 8), "int32"),
          Z: T.Tensor((8, 8), "int32")):
        with T.Kernel(1, threads=32):
            s = T.alloc_shared((8, 8), "int32")
            T.clear(s)
            T.copy(X[P[0]:P[1], P[0]:P[1]], s[0:P[1] - P[0], 0:P[1] - P[0]])
            T.copy(s[0:P[1] - P[0], 0:P[1] - P[0]], Y[P[0]:P[1], P[0]:P[1]])
            T.atomic_add(Y[P[0]:P[1], P[0]:P[1]], X[P[0]:P[1], P[0]:P[1]])
            T.fill(Z[P[0]:P[1], P[0]:P[1]], 3)
            for i, j, k in T.Parallel(P[1] - P[0], 2, P[1] - P[0]):
                Z[i + j, k] = 5

    x, y = data((8, 8), "int32"), mark((8, 8), np.int32)
    low, high = bounds
    n = max(high - low, 0)
    want, filled = y.copy(), y.copy()
    want[low:high, low:high] = 2 * x[low:high, low:high]
    filled[low:high, low:high] = 3
    filled[:n + (n > 0), :n] = 5
    agree(f, [x, np.array(bounds, np.int32), y, y], {2: want, 3: filled}, on=tuple(RUNS))
