"""In the manner of the exercises by which people learn the language: short, eager, one idea each."""

import numpy as np

import tilelang
import tilelang.language as T

from .catalogue import EXACT, Bound, Program, drawn, integers, uniform, wide


@tilelang.jit
def one_block(A):
    """A launch without extents is one block; a single element is copied, and one is counted up."""
    N = T.const("N")
    A: T.Tensor((N,), "float16")
    B = T.empty((N,), "float16")
    counter = T.empty((1,), "int32")
    with T.Kernel(threads=128):
        c = T.alloc_fragment((1,), "int32")
        c[0] = 0
        for k in T.serial(T.ceildiv(N, 128)):
            for i in T.Parallel(128):
                if k * 128 + i < N:
                    B[k * 128 + i] = A[k * 128 + i]
            c[0] += 1
        T.copy(c, counter)
    return B, counter


@tilelang.jit
def one_thread_a_block(A, B):
    """A launch without threads: 128 of them, of which one does the work."""
    N, M = T.const("N M")
    A: T.Tensor((N,), "float32")
    B: T.Tensor((M,), "float32")
    C = T.empty((N, M), "float32")
    with T.Kernel(N) as n:
        for m in T.Parallel(M):
            C[n, m] = A[n] + B[m]
    return C


@tilelang.jit
def outer_sum(A, B, bn: int = 32, bm: int = 32):
    N, M = T.const("N, M")
    dt = "float32"
    A: T.Tensor((N,), dt)
    B: T.Tensor((M,), dt)
    C = T.empty((N, M), dt)
    with T.Kernel(N // bn, M // bm, threads=64) as (bx, by):
        a = T.alloc_fragment((bn,), dt)
        b = T.alloc_fragment((bm,), dt)
        c = T.alloc_fragment((bn, bm), dt)
        T.copy(A[bx * bn : (bx + 1) * bn], a)
        T.copy(B[by * bm : (by + 1) * bm], b)
        for i, j in T.Parallel(bn, bm):
            c[i, j] = T.max(a[i] * b[j], 0)
        T.copy(c, C[bx * bn, by * bm])
    return C


@tilelang.jit
def mul_relu_backward(A, B, dC, bn: int = 64, bm: int = 16):
    N, M = T.const("N M")
    A: T.Tensor((N, M), "float16")
    B: T.Tensor((N,), "float16")
    dC: T.Tensor((N, M), "float16")
    dA = T.empty((N, M), "float16")
    with T.Kernel(T.ceildiv(N, bn), T.ceildiv(M, bm), threads=128) as (n, m):
        a = T.alloc_fragment((bn, bm), "float16")
        b = T.alloc_fragment((bn,), "float16")
        d = T.alloc_fragment((bn, bm), "float16")
        T.copy(A[n * bn, m * bm], a)
        T.copy(B[n * bn], b)
        T.copy(dC[n * bn, m * bm], d)
        for i, j in T.Parallel(bn, bm):
            d[i, j] = T.if_then_else(a[i, j] * b[i] > 0, d[i, j] * b[i], 0)
        T.copy(d, dA[n * bn, m * bm])
    return dA


def mul_relu_backward_reference(a, b, dc):
    a, b, dc = wide(a, b, dc)
    return np.where(a * b[:, None] > 0, dc * b[:, None], 0)


@tilelang.jit
def long_sum(A, bn: int = 4, bm: int = 128):
    N, M = T.const("N M")
    A: T.Tensor((N, M), "float16")
    B = T.empty((N,), "float32")
    with T.Kernel(T.ceildiv(N, bn), threads=128) as n:
        a = T.alloc_fragment((bn, bm), "float32")
        b = T.alloc_fragment((bn,), "float32")
        part = T.alloc_fragment((bn,), "float32")
        T.clear(b)
        for m in T.Serial(T.ceildiv(M, bm)):
            T.copy(A[n * bn, m * bm], a)
            T.reduce_sum(a, part, dim=1)
            for i in T.Parallel(bn):
                b[i] += part[i]
        T.copy(b, B[n * bn])
    return B


@tilelang.jit
def online_softmax(A, bn: int = 2, bm: int = 64):
    N, M = T.const("N M")
    A: T.Tensor((N, M), "float32")
    B = T.empty((N, M), "float32")
    with T.Kernel(T.ceildiv(N, bn), threads=64) as n:
        a = T.alloc_shared((bn, bm), "float32")
        f = T.alloc_fragment((bn, bm), "float32")
        m, m_old, s, part = (T.alloc_fragment((bn,), "float32") for _ in (0, 1, 2, 3))
        T.annotate_safe_value({A: -T.infinity("float32")})
        T.fill(m, -T.infinity("float32"))
        T.clear(s)
        for k in T.Pipelined(T.ceildiv(M, bm), num_stages=2):
            T.copy(A[n * bn, k * bm], a)
            T.copy(a, f)
            T.copy(m, m_old)
            T.reduce_max(f, m, dim=1, clear=False)
            for i, j in T.Parallel(bn, bm):
                f[i, j] = T.exp(f[i, j] - m[i])
            T.reduce_sum(f, part, dim=1)
            for i in T.Parallel(bn):
                s[i] = s[i] * T.exp(m_old[i] - m[i]) + part[i]
        for k in T.serial(T.ceildiv(M, bm)):
            T.copy(A[n * bn, k * bm], f)
            for i, j in T.Parallel(bn, bm):
                f[i, j] = T.exp(f[i, j] - m[i]) / s[i]
            T.copy(f, B[n * bn, k * bm])
    return B


def softmax_reference(x):
    (x,) = wide(x)
    e = np.exp(x - x.max(1, keepdims=True))
    return e / e.sum(1, keepdims=True)


@tilelang.jit
def scalar_attention(Q, K, V, bq: int = 16, bk: int = 32):
    """Attention whose heads have one channel: vectors instead of matrices."""
    B, S = T.const("B S")
    Q: T.Tensor((B, S), "float32")
    K: T.Tensor((B, S), "float32")
    V: T.Tensor((B, S), "float32")
    O = T.empty((B, S), "float32")
    with T.Kernel(B, T.ceildiv(S, bq), threads=64) as (b, q):
        qf = T.alloc_fragment((bq,), "float32")
        s = T.alloc_fragment((bq, bk), "float32")
        m, m_old, l, row, o = (T.alloc_fragment((bq,), "float32") for _ in (0, 1, 2, 3, 4))
        T.copy(Q[b, q * bq], qf)
        T.fill(m, T.min_value("float32"))
        T.clear(l)
        T.clear(o)
        for k in T.serial(T.ceildiv(S, bk)):
            for i, j in T.Parallel(bq, bk):
                s[i, j] = T.if_then_else(k * bk + j < S, qf[i] * K[b, k * bk + j], -T.infinity("float32"))
            T.copy(m, m_old)
            T.reduce_max(s, m, dim=1, clear=False)
            for i, j in T.Parallel(bq, bk):
                s[i, j] = T.exp(s[i, j] - m[i])
            T.reduce_sum(s, row, dim=1)
            for i in T.Parallel(bq):
                l[i] = l[i] * T.exp(m_old[i] - m[i]) + row[i]
                o[i] *= T.exp(m_old[i] - m[i])
            for i, j in T.Parallel(bq, bk):
                s[i, j] *= T.if_then_else(k * bk + j < S, V[b, k * bk + j], 0.0)
            T.reduce_sum(s, row, dim=1)
            for i in T.Parallel(bq):
                o[i] += row[i]
        for i in T.Parallel(bq):
            o[i] /= l[i]
        T.copy(o, O[b, q * bq])
    return O


def scalar_attention_reference(q, k, v):
    q, k, v = wide(q, k, v)
    e = np.exp(q[:, :, None] * k[:, None])
    return (e * v[:, None]).sum(2) / e.sum(2)


@tilelang.jit
def conv1d(X, W, bl: int = 32):
    N, L, F, KL = T.const("N L F KL")
    X: T.Tensor((N, L), "float16")
    W: T.Tensor((KL, F), "float16")
    O = T.empty((N, L, F), "float16")
    with T.Kernel(N, T.ceildiv(L, bl), threads=128) as (n, l):
        x = T.alloc_shared((bl, KL), "float16")
        w = T.alloc_shared((KL, F), "float16")
        o = T.alloc_fragment((bl, F), "float32")
        T.copy(W, w)
        for i, k in T.Parallel(bl, KL):
            x[i, k] = T.if_then_else(l * bl + i + k < L, X[n, l * bl + i + k], T.float16(0))
        T.gemm(x, w, o, clear_accum=True)
        T.copy(o, O[n, l * bl, 0])
    return O


def conv1d_reference(x, w):
    x, w = wide(x, w)
    padded = np.pad(x, ((0, 0), (0, len(w))))
    return np.stack([padded[:, i : i + len(w)] @ w for i in range(x.shape[1])], 1)


@tilelang.jit
def int4_matmul(A, B, scales, zeros_, bm: int = 64, bn: int = 64, bk: int = 64, group: int = 32):
    """The other operand is packed by twos along N: its only extent is N // 2, and N comes by keyword or from the scales."""
    M, N, K = T.const("M N K")
    A: T.Tensor((M, K), "float16")
    B: T.Tensor((K, N // 2), "uint8")
    scales: T.Tensor((K // group, N // 2, 2), "float16")
    zeros_: T.Tensor((K // group, N // 2, 2), "float16")
    C = T.empty((M, N), "float16")
    with T.Kernel(T.ceildiv(N, bn), T.ceildiv(M, bm), threads=128) as (bx, by):
        a = T.alloc_shared((bm, bk), "float16")
        packed = T.alloc_shared((bk, bn // 2), "uint8")
        b = T.alloc_shared((bk, bn), "float16")
        c = T.alloc_fragment((bm, bn), "float32")
        T.clear(c)
        for k in T.Pipelined(T.ceildiv(K, bk), num_stages=2):
            T.copy(A[by * bm, k * bk], a)
            T.copy(B[k * bk, bx * bn // 2], packed)
            for i, j in T.Parallel(bk, bn):
                nibble = (packed[i, j // 2] >> T.cast(4 * (j % 2), "uint8")) & T.uint8(0xF)
                g = (k * bk + i) // group
                z = zeros_[g, (bx * bn + j) // 2, j % 2]
                b[i, j] = (T.cast(nibble, "float16") - z) * scales[g, (bx * bn + j) // 2, j % 2]
            T.gemm(a, b, c)
        T.copy(c, C[by * bm, bx * bn])
    return C


def int4_matmul_reference(a, b, scales, zeros_):
    a, scales, zeros_ = wide(a, scales, zeros_)
    q = np.stack([b & 15, b >> 4], -1).reshape(len(b), -1).astype(float)
    full = lambda t: np.repeat(t.reshape(len(t), -1), 32, 0)  # noqa: E731
    return a @ ((q - full(zeros_)) * full(scales))


@tilelang.jit
def unpack_only(A, B):
    """A const that stands only halved in the inputs, and whole in the output."""
    N = T.const("N")
    A: T.Tensor((64,), "float16")
    B: T.Tensor((N // 2,), "uint8")
    C = T.empty((N,), "float16")
    with T.Kernel(1, threads=128):
        for i in T.Parallel(N):
            C[i] = T.cast((B[i // 2] >> T.cast(i % 2 * 4, "uint8")) & T.uint8(15), "float16") * A[i % 64]
    return C


def unpack_only_reference(a, b):
    return np.stack([b & 15, b >> 4], -1).reshape(-1) * wide(a)[0][np.arange(2 * len(b)) % 64]


@tilelang.jit
def histogram(X, bins: int = 32, threads: int = 64):
    """Each thread counts into a column of its own, then the columns are added."""
    N = T.const("N")
    X: T.Tensor((N,), "uint8")
    H = T.empty((bins,), "int32")
    with T.Kernel(1, threads=threads):
        t = T.get_thread_binding()
        own = T.alloc_shared((bins, threads), "int32")
        total = T.alloc_fragment((bins,), "int32")
        tile = T.alloc_fragment((bins, threads), "int32")
        T.clear(own)
        for k in range(T.ceildiv(N, threads)):
            if k * threads + t < N:
                own[X[k * threads + t], t] += 1
        T.copy(own, tile)
        T.reduce_sum(tile, total, dim=1)
        T.copy(total, H)
    return H


@tilelang.jit
def scan_two_launches(X, block: int = 128):
    """Sums of blocks in one launch, offsets in the second, the results in the third: launches of one function run in order."""
    N = T.const("N")
    X: T.Tensor((N,), "int32")
    S = T.empty((T.ceildiv(N, block),), "int32")
    Y = T.empty((N,), "int32")
    with T.Kernel(T.ceildiv(N, block), threads=128) as b:
        s = T.alloc_shared((block,), "int32")
        T.copy(X[b * block], s)
        T.cumsum(s)
        T.copy(s, Y[b * block])
        for i in T.Parallel(1):
            S[b + i] = s[block - 1 + i]
    with T.Kernel(1, threads=32):
        total = T.alloc_var("int32", init=0)
        if T.get_thread_binding() == 0:
            for b in range(T.ceildiv(N, block)):
                mine = T.alloc_var("int32", init=S[b])
                S[b] = total
                total += mine
    with T.Kernel(T.ceildiv(N, block), threads=128) as b:
        for i in T.Parallel(block):
            if b * block + i < N:
                Y[b * block + i] += S[b]
    return Y, S


def scan_two_launches_reference(x):
    totals = np.add.reduceat(x, np.arange(0, len(x), 128))
    return np.cumsum(x), np.cumsum(totals) - totals


@tilelang.jit
def life(X, steps: int = 2):
    """Game of life on a torus in shared memory; two buffers change places by a trace-time loop."""
    H, W = T.const("H W")
    X: T.Tensor((H, W), "int8")
    Y = T.empty((H, W), "int8")
    with T.Kernel(1, threads=128):
        a = T.alloc_shared((H, W), "int8")
        b = T.alloc_shared((H, W), "int8")
        n = T.alloc_fragment((H, W), "int32")
        T.copy(X, a)
        for _ in T.serial(steps):
            for i, j in T.Parallel(H, W):
                n[i, j] = 0
                for d in T.unroll(9):
                    if d != 4:
                        n[i, j] += a[(i + d // 3 + H - 1) % H, (j + d % 3 + W - 1) % W]
            for i, j in T.Parallel(H, W):
                b[i, j] = T.Select(n[i, j] == 3 or (n[i, j] == 2 and a[i, j] == 1), T.int8(1), T.int8(0))
            T.copy(b, a)
        T.copy(a, Y)
    return Y


def life_reference(x):
    for _ in range(2):
        n = sum(np.roll(x, (i, j), (0, 1)) for i in (-1, 0, 1) for j in (-1, 0, 1)) - x
        x = ((n == 3) | ((n == 2) & (x == 1))).astype(np.int8)
    return x


PROGRAMS = [
    Program("one_block", one_block, dict(N=300), drawn(uniform((300,), "float16")), lambda a: (a, np.array([3])), EXACT),
    Program(
        "one_thread_a_block",
        one_thread_a_block,
        dict(N=5, M=70),
        drawn(uniform((5,)), uniform((70,))),
        lambda a, b: wide(a)[0][:, None] + wide(b)[0],
    ),
    Program(
        "outer_sum",
        outer_sum,
        dict(N=64, M=96),
        drawn(uniform((64,)), uniform((96,))),
        lambda a, b: np.maximum(np.outer(*wide(a, b)), 0),
    ),
    Program(
        "mul_relu_backward",
        mul_relu_backward,
        dict(N=100, M=40),
        drawn(uniform((100, 40), "float16"), uniform((100,), "float16"), uniform((100, 40), "float16")),
        mul_relu_backward_reference,
        Bound("float16"),
    ),
    Program(
        "long_sum",
        long_sum,
        dict(N=6, M=700),
        drawn(uniform((6, 700), "float16")),
        lambda a: wide(a)[0].sum(1),
        Bound("float32", 700, 350.0),
    ),
    Program(
        "online_softmax",
        online_softmax,
        dict(N=5, M=150),
        drawn(uniform((5, 150), low=-4, high=4)),
        softmax_reference,
        Bound("float32", 150, 1.0),
    ),
    Program(
        "scalar_attention",
        scalar_attention,
        dict(B=2, S=70),
        drawn(uniform((2, 70)), uniform((2, 70)), uniform((2, 70))),
        scalar_attention_reference,
        Bound("float32", 100, 1.0),
    ),
    Program(
        "conv1d",
        conv1d,
        dict(N=3, L=50, F=32, KL=16),
        drawn(uniform((3, 50), "float16"), uniform((16, 32), "float16")),
        conv1d_reference,
        Bound("float16", 16, 16.0),
    ),
    Program(
        "int4_matmul",
        int4_matmul,
        dict(M=70, N=72, K=128),
        drawn(
            uniform((70, 128), "float16"),
            integers((128, 36), 0, 256, "uint8"),
            uniform((4, 36, 2), "float16", 0.1, 0.2),
            lambda g: g.integers(0, 16, (4, 36, 2)).astype(np.float16),
        ),
        int4_matmul_reference,
        Bound("float16", 128, 400.0, via=(("float16", 32.0),)),
    ),
    Program(
        "unpack_only",
        unpack_only,
        dict(N=256),
        drawn(uniform((64,), "float16"), integers((128,), 0, 256, "uint8")),
        unpack_only_reference,
        Bound("float16"),
    ),
    Program(
        "histogram",
        histogram,
        dict(N=500),
        drawn(integers((500,), 0, 32, "uint8")),
        lambda x: np.bincount(x, minlength=32),
        EXACT,
    ),
    Program(
        "scan_two_launches",
        scan_two_launches,
        dict(N=700),
        drawn(integers((700,), -50, 50)),
        scan_two_launches_reference,
        EXACT,
    ),
    Program("life", life, dict(H=12, W=20), drawn(integers((12, 20), 0, 2, "int8")), life_reference, EXACT),
]
