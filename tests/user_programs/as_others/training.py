"""In the manner of training code and of small libraries: backward passes, losses, transforms, block sparsity, host loops."""

import functools
import math
from dataclasses import dataclass

import numpy as np

import tilelang
import tilelang.language as T

from .catalogue import EXACT, Bound, Program, drawn, integers, uniform, wide, zeros

F16, BF16, F32, I32, E4 = "float16", "bfloat16", "float32", "int32", "float8_e4m3fn"


def hadamard_reference(a):
    (a,) = wide(a)
    n, h = a.shape[1], 1
    while h < n:
        x = a.reshape(len(a), -1, 2, h)
        a = np.stack([x[:, :, 0] + x[:, :, 1], x[:, :, 0] - x[:, :, 1]], 2).reshape(len(a), n)
        h *= 2
    return a


@tilelang.jit(out_idx=[1])
def hadamard_in_shared(n, bits=8):
    """Butterflies over shared memory with a distance that changes at run time."""
    size = 1 << bits

    @T.prim_func
    def main(A: T.Tensor((n, size), F32), B: T.Tensor((n, size), F32)):
        with T.Kernel(n, threads=size // 2) as r:
            s = T.alloc_shared((size,), F32)
            T.copy(A[r, 0], s)
            for st in T.serial(bits):
                h = 1 << st
                for i in T.Parallel(size // 2):
                    lo = i // h * 2 * h + i % h
                    a = s[lo]
                    b = s[lo + h]
                    s[lo] = a + b
                    s[lo + h] = a - b
            T.copy(s, B[r, 0])

    return main


@tilelang.jit(out_idx=[1])
def hadamard_in_a_warp(n):
    """Eight values a lane: three stages in registers, five by shuffles."""

    @T.prim_func
    def main(A: T.Tensor((n, 256), F32), B: T.Tensor((n, 256), F32)):
        with T.Kernel(n, threads=32) as r:
            lane = T.get_lane_idx()
            x = T.alloc_local((8,), F32)
            for v in T.vectorized(8):
                x[v] = A[r, lane * 8 + v]
            for st in T.unroll(3):
                for i in T.unroll(4):
                    lo = i // (1 << st) * (2 << st) + i % (1 << st)
                    a = x[lo]
                    b = x[lo + (1 << st)]
                    x[lo] = a + b
                    x[lo + (1 << st)] = a - b
            for st in T.unroll(5):
                for i in T.unroll(8):
                    o = T.shfl_xor(x[i], 1 << st)
                    x[i] = T.if_then_else((lane >> st) & 1, o - x[i], x[i] + o)
            for v in T.vectorized(8):
                B[r, lane * 8 + v] = x[v]

    return main


@tilelang.jit
def cross_entropy(logits, labels):
    """Loss and gradient at once; ignored labels give zeros by another branch of the block."""
    rows = T.dynamic("rows")
    V = T.const("V")
    logits: T.Tensor((rows, V), F16)
    labels: T.Tensor((rows,), "int64")
    loss = T.empty((rows,), F32)
    grad = T.empty((rows, V), F16)
    with T.Kernel(rows, threads=64) as r:
        x = T.alloc_fragment((V,), F32)
        m = T.alloc_fragment((1,), F32)
        s = T.alloc_fragment((1,), F32)
        y = labels[r]
        if y == -100:
            loss[r] = 0.0
            for j in T.Parallel(V):
                grad[r, j] = 0
        else:
            T.copy(logits[r, 0], x)
            T.reduce_max(x, m)
            for j in T.Parallel(V):
                x[j] = T.exp(x[j] - m[0])
            T.reduce_sum(x, s)
            loss[r] = T.log(s[0]) + m[0] - T.cast(logits[r, y], F32)
            for j in T.Parallel(V):
                grad[r, j] = x[j] / s[0] - T.if_then_else(j == y, 1.0, 0.0)
    return loss, grad


def cross_entropy_reference(logits, labels):
    (x,) = wide(logits)
    p = np.exp(x)
    p /= p.sum(1, keepdims=True)
    live = labels >= 0
    loss = np.where(live, -np.log(p[np.arange(len(x)), np.maximum(labels, 0)]), 0)
    return loss, np.where(live[:, None], p - (np.arange(x.shape[1]) == labels[:, None]), 0)


@tilelang.jit(out_idx=[2, 3, 4])
def layer_norm_backward(M, N, rows=16, eps=1e-5):
    """Row gradients, and column sums in two launches with a buffer of partial sums that is also returned."""
    blocks = M // rows

    @T.prim_func
    def main(
        X: T.Tensor((M, N), F32),
        dY: T.Tensor((M, N), F32),
        part: T.Tensor((blocks, N), F32),
        dG: T.Tensor((N,), F32),
        dX: T.Tensor((M, N), F32),
    ):
        with T.Kernel(blocks, threads=128) as b:
            x = T.alloc_fragment((rows, N), F32)
            d = T.alloc_fragment((rows, N), F32)
            t = T.alloc_fragment((rows, N), F32)
            mean = T.alloc_fragment((rows,), F32)
            rstd = T.alloc_fragment((rows,), F32)
            c1 = T.alloc_fragment((rows,), F32)
            c2 = T.alloc_fragment((rows,), F32)
            dg = T.alloc_fragment((N,), F32)
            T.copy(X[b * rows, 0], x)
            T.copy(dY[b * rows, 0], d)
            T.reduce_sum(x, mean, dim=1)
            for i, j in T.Parallel(rows, N):
                x[i, j] -= mean[i] / N
                t[i, j] = x[i, j] * x[i, j]
            T.reduce_sum(t, rstd, dim=1)
            for i in T.Parallel(rows):
                rstd[i] = T.rsqrt(rstd[i] / N + eps)
            for i, j in T.Parallel(rows, N):
                x[i, j] *= rstd[i]
                t[i, j] = x[i, j] * d[i, j]
            T.reduce_sum(t, c1, dim=1)
            T.reduce_sum(t, dg, dim=0)
            T.reduce_sum(d, c2, dim=1)
            T.copy(dg, part[b, 0])
            for i, j in T.Parallel(rows, N):
                dX[b * rows + i, j] = (d[i, j] - c2[i] / N - x[i, j] * c1[i] / N) * rstd[i]
        with T.Kernel(T.ceildiv(N, 64), threads=64) as b:
            j = b * 64 + T.get_thread_binding()
            total = T.alloc_var(F32, init=0.0)
            if j < N:
                for k in T.serial(blocks):
                    total += part[k, j]
                dG[j] = total

    return main


def layer_norm_backward_reference(x, d):
    x, d = wide(x, d)
    r = 1 / np.sqrt(x.var(1, keepdims=True) + 1e-5)
    h = (x - x.mean(1, keepdims=True)) * r
    dx = (d - d.mean(1, keepdims=True) - h * (h * d).mean(1, keepdims=True)) * r
    return (h * d).reshape(-1, 16, x.shape[1]).sum(1), (h * d).sum(0), dx


@tilelang.jit
def embedding_backward(ids, grad, table):
    """Rows of gradients added by pairs of halves to rows that tokens share."""
    n = T.dynamic("n")
    V, D = T.const("V D")
    ids: T.Tensor((n,), I32)
    grad: T.Tensor((n, D), F16)
    table: T.Tensor((V, D), F16)
    with T.Kernel(n, threads=32) as t:
        for j in T.Parallel(D // 2):
            T.atomic_addx2(table[ids[t], 2 * j], grad[t, 2 * j])


def embedding_backward_reference(ids, grad, table):
    grad, table = wide(grad, table)
    np.add.at(table, ids, grad)
    return table


@tilelang.jit(out_idx=[4])
def indirect_tiles(blocks, M=64, N=64, K=256, BK=32):
    """Products over tiles that a table names; how many is known at run time and may be none."""

    @T.prim_func
    def main(
        A: T.Tensor((M, K), F16),
        B: T.Tensor((K, N), F16),
        I: T.Tensor((blocks, K // BK), I32),
        count: T.Tensor((blocks,), I32),
        C: T.Tensor((blocks, M, N), F32),
    ):
        with T.Kernel(blocks, threads=128) as b:
            a = T.alloc_shared((M, BK), F16)
            w = T.alloc_shared((BK, N), F16)
            c = T.alloc_fragment((M, N), F32)
            idx = T.alloc_shared((K // BK,), I32)
            T.copy(I[b, 0], idx)
            T.clear(c)
            for k in T.Pipelined(count[b], num_stages=2):
                T.copy(A[0, idx[k] * BK], a)
                T.copy(B[idx[k] * BK, 0], w)
                T.gemm(a, w, c)
            T.copy(c, C[b, 0, 0])

    return main


def indirect_tiles_reference(a, b, index, count):
    a, b = wide(a, b)
    out = np.zeros((len(count), 64, 64))
    for q, n in enumerate(count):
        for i in index[q, :n]:
            out[q] += a[:, i * 32 : i * 32 + 32] @ b[i * 32 : i * 32 + 32]
    return out


@tilelang.jit(out_idx=[3])
def masked_tiles(blocks, M=64, N=64, K=256, BK=32):
    """A mask of blocks in a thread's own array decides which steps of a pipelined loop do anything."""

    @T.prim_func
    def main(
        A: T.Tensor((M, K), BF16),
        B: T.Tensor((K, N), BF16),
        mask: T.Tensor((blocks, K // BK), "bool"),
        C: T.Tensor((blocks, M, N), F32),
    ):
        with T.Kernel(blocks, threads=128) as b:
            a = T.alloc_shared((M, BK), BF16)
            w = T.alloc_shared((BK, N), BF16)
            c = T.alloc_fragment((M, N), F32)
            local = T.alloc_local((K // BK,), "bool")
            T.clear(c)
            for v in T.serial(K // BK):
                local[v] = mask[b, v]
            for k in T.Pipelined(K // BK, num_stages=2):
                if local[k]:
                    T.copy(A[0, k * BK], a)
                    T.copy(B[k * BK, 0], w)
                    T.gemm(a, w, c)
            T.copy(c, C[b, 0, 0])

    return main


def masked_tiles_reference(a, b, mask):
    a, b = wide(a, b)
    return np.stack([(a * np.repeat(m, 32)) @ b for m in mask])


@tilelang.jit(out_idx=[3])
def packed_scales(M, N, K, BK=64):
    """fp8 product whose scales are exponents, four to a word."""

    @T.prim_func
    def main(A: T.Tensor((M, K), E4), B: T.Tensor((N, K), E4), S: T.Tensor((M,), I32), C: T.Tensor((M, N), BF16)):
        with T.Kernel(T.ceildiv(N, 64), T.ceildiv(M, 64), threads=128) as (bx, by):
            a = T.alloc_shared((64, BK), E4)
            b = T.alloc_shared((64, BK), E4)
            c = T.alloc_fragment((64, 64), F32)
            t = T.alloc_fragment((64, 64), F32)
            scale = T.alloc_fragment((64,), F32)
            T.clear(c)
            for k in T.Pipelined(K // BK, num_stages=3):
                T.copy(A[by * 64, k * BK], a)
                T.copy(B[bx * 64, k * BK], b)
                for i in T.Parallel(64):
                    scale[i] = T.reinterpret(F32, ((S[by * 64 + i] >> (k * 8)) & 0xFF) << 23)
                T.gemm(a, b, t, transpose_B=True, clear_accum=True)
                for i, j in T.Parallel(64, 64):
                    c[i, j] += t[i, j] * scale[i]
            T.copy(c, C[by * 64, bx * 64])

    return main


def packed_scales_reference(a, b, s):
    a, b = wide(a, b)
    exponents = (s.view(np.uint32)[:, None] >> np.arange(0, 32, 8, dtype=np.uint32)) & 255
    return (a * np.repeat(2.0 ** (exponents.astype(float) - 127), 64, 1)) @ b.T


@tilelang.jit
def fused_mlp(X, W1, W2, block: int = 32):
    """Two products with an activation between them, both weights streamed by one staged loop."""
    M, D, H = T.const("M D H")
    X: T.Tensor((M, D), BF16)
    W1: T.Tensor((D, H), BF16)
    W2: T.Tensor((H, D), BF16)
    Y = T.empty((M, D), BF16)
    with T.Kernel(T.ceildiv(M, 64), threads=128) as by:
        x = T.alloc_shared((64, D), BF16)
        w1 = T.alloc_shared((D, block), BF16)
        w2 = T.alloc_shared((block, D), BF16)
        h = T.alloc_fragment((64, block), F32)
        hb = T.alloc_fragment((64, block), BF16)
        y = T.alloc_fragment((64, D), F32)
        T.copy(X[by * 64, 0], x)
        T.clear(y)
        for k in T.Pipelined(H // block, num_stages=2):
            T.copy(W1[0, k * block], w1)
            T.copy(W2[k * block, 0], w2)
            T.gemm(x, w1, h, clear_accum=True)
            for i, j in T.Parallel(64, block):
                h[i, j] = h[i, j] * T.sigmoid(1.702 * h[i, j])
            T.copy(h, hb)
            T.gemm(hb, w2, y)
        T.copy(y, Y[by * 64, 0])
    return Y


def fused_mlp_reference(x, w1, w2):
    x, w1, w2 = wide(x, w1, w2)
    h = x @ w1
    return h / (1 + np.exp(-1.702 * h)) @ w2


@dataclass(frozen=True)
class Config:
    """What a library passes to its factories."""

    rows: int = 32
    cols: int = 32
    dt: str = F16
    acc: str = F32

    @property
    def tile(self):
        return self.rows, self.cols


@functools.cache
def inverse_root(n):
    return 1.0 / math.sqrt(n)


def gelu(x):
    return 0.5 * x * (1 + T.tanh(0.79788456 * (x + 0.044715 * x * x * x)))


@tilelang.jit(out_idx=-1)
def closures(shape, config, act=None, *, residual=False, **extra):
    """A macro of the factory that closes over a configuration, buffers in a dictionary, starred shapes and indices."""
    *lead, M, N = shape

    @T.macro
    def finish(buf, out, *where, scale=1.0, **more):
        for i, j in T.Parallel(*config.tile):
            v = buf[i, j] * scale
            buf[i, j] = (act(v) if act is not None else v) + (more["shift"] if "shift" in more else 0.0)
        T.copy(buf, out[where])

    @T.prim_func
    def kernel(
        X: T.Tensor([*lead, M, N], config.dt), R: T.Tensor((*lead, M, N), dtype=config.dt), Y: T.Tensor(shape, config.dt)
    ):
        """The body has a docstring too."""
        with T.Kernel(*[T.ceildiv(e, b) for e, b in zip((N, M), config.tile[::-1])], lead[0], threads=64) as (bx, by, b):
            tiles = {name: T.alloc_fragment(config.tile, config.acc) for name in ("x", "r")}
            x, r = tiles["x"], tiles["r"]
            T.copy(X[b, by * config.rows, bx * config.cols], x)
            if residual:
                T.copy(R[b, by * config.rows, bx * config.cols], r)
                for i, j in T.Parallel(*config.tile):
                    x[i, j] += r[i, j]
            finish(x, Y, b, by * config.rows, bx * config.cols, scale=inverse_root(N), **extra)

    return kernel


def closures_reference(x, r):
    x, r = wide(x, r)
    v = (x + r) / np.sqrt(48)
    return 0.5 * v * (1 + np.tanh(0.79788456 * (v + 0.044715 * v**3))) + 1.5


def host_loops():
    """Launches in a loop of the host, and one under a condition of a symbol; the step count is checked before."""
    m = T.dynamic("m")

    @T.prim_func
    def main(A: T.Tensor((m, 64), F32), B: T.Tensor((m, 64), F32), steps: T.int32):
        assert steps >= 0, "steps must not be negative"
        for _ in T.serial(steps):
            with T.Kernel(m, threads=64) as r:
                for j in T.Parallel(64):
                    B[r, j] = B[r, j] * 0.5 + A[r, j]
        if m > 4:
            with T.Kernel(m, threads=64) as r:
                for j in T.Parallel(64):
                    B[r, j] = -B[r, j]

    return main


def host_loops_reference(a, b, steps):
    a, b = wide(a, b)
    for _ in range(steps):
        b = b * 0.5 + a
    return -b if len(a) > 4 else b


@tilelang.jit
def last_block_adds(A, done, out):
    """Blocks leave partial sums; the one that finds itself last by a counter adds them."""
    N = T.const("N")
    A: T.Tensor((N,), F32)
    done: T.Tensor((1,), I32)
    out: T.Tensor((1,), F32)
    part = T.empty((T.ceildiv(N, 128),), F32)
    with T.Kernel(T.ceildiv(N, 128), threads=128) as bx:
        tx = T.get_thread_binding()
        f = T.alloc_fragment((128,), F32)
        s = T.alloc_fragment((1,), F32)
        last = T.alloc_shared((1,), "bool")
        T.copy(A[bx * 128], f)
        T.reduce_sum(f, s)
        if tx == 0:
            part[bx] = s[0]
            last[0] = T.atomic_add(done[0], 1, memory_order="acq_rel", return_prev=True) == T.ceildiv(N, 128) - 1
        T.sync_threads()
        if last[0]:
            if tx == 0:
                total = T.alloc_var(F32, init=0.0)
                for b in T.serial(T.ceildiv(N, 128)):
                    total += part[b]
                out[0] = total
    return part


def last_block_adds_reference(a, done, out):
    (a,) = wide(a)
    parts = np.add.reduceat(a, np.arange(0, len(a), 128))
    return parts, np.array([len(parts)]), np.array([a.sum()])


@tilelang.jit
def grid_stride(A, B, alpha: T.float32, blocks: int = 3):
    n = T.dynamic("n")
    A: T.Tensor((n,), F32)
    B: T.Tensor((n,), F32)
    with T.Kernel(blocks, threads=128) as bx:
        i = T.alloc_var(I32, init=bx * 128 + T.get_thread_binding())
        while i < n:
            B[i] = B[i] + alpha * A[i]
            i = i + T.get_block_extent() * T.get_thread_extent()


def packed_exponents(g):
    e = g.integers(124, 130, (50, 4)).astype(np.uint32)
    return (e << np.arange(0, 32, 8, dtype=np.uint32)).sum(1).astype(np.uint32).view(np.int32)


def tables(g):
    return np.stack([g.permutation(8) for _ in range(4)]).astype(np.int32)


PROGRAMS = [
    Program(
        "hadamard_in_shared", hadamard_in_shared, dict(n=3), drawn(uniform((3, 256))), hadamard_reference, Bound(F32, 8, 256.0)
    ),
    Program(
        "hadamard_in_a_warp", hadamard_in_a_warp, dict(n=3), drawn(uniform((3, 256))), hadamard_reference, Bound(F32, 8, 256.0)
    ),
    Program(
        "cross_entropy",
        cross_entropy,
        dict(V=200),
        drawn(uniform((6, 200), F16), np.array([0, 199, -100, 7, 50, -100], np.int64)),
        cross_entropy_reference,
        (Bound(F32, 200, 8.0), Bound(F16, 200, 1.0)),
    ),
    Program(
        "layer_norm_backward",
        layer_norm_backward,
        dict(M=48, N=96),
        drawn(uniform((48, 96)), uniform((48, 96))),
        layer_norm_backward_reference,
        Bound(F32, 200, 48.0),
    ),
    Program(
        "embedding_backward",
        embedding_backward,
        dict(V=10, D=64),
        drawn(integers((50,), 0, 10), lambda g: g.integers(-2, 3, (50, 64)).astype(np.float16), zeros((10, 64), F16)),
        embedding_backward_reference,
        EXACT,
        changed=(2,),
    ),
    Program(
        "indirect_tiles",
        indirect_tiles,
        dict(blocks=4),
        drawn(uniform((64, 256), F16), uniform((256, 64), F16), tables, np.array([8, 0, 1, 3], np.int32)),
        indirect_tiles_reference,
        Bound(F32, 256, 256.0),
    ),
    Program(
        "masked_tiles",
        masked_tiles,
        dict(blocks=3),
        drawn(uniform((64, 256), BF16), uniform((256, 64), BF16), lambda g: g.uniform(size=(3, 8)) < 0.5),
        masked_tiles_reference,
        Bound(F32, 256, 256.0),
    ),
    Program(
        "packed_scales",
        packed_scales,
        dict(M=50, N=56, K=256),
        drawn(uniform((50, 256), E4), uniform((56, 256), E4), packed_exponents),
        packed_scales_reference,
        Bound(BF16, 256, 4 * 256.0),
    ),
    Program(
        "fused_mlp",
        fused_mlp,
        dict(M=70, D=64, H=128),
        drawn(uniform((70, 64), BF16), uniform((64, 128), BF16), uniform((128, 64), BF16)),
        fused_mlp_reference,
        Bound(BF16, via=((BF16, 100.0),)),
    ),
    Program(
        "closures",
        closures,
        dict(shape=(2, 40, 48), config=Config(), act=gelu, residual=True, shift=1.5),
        drawn(uniform((2, 40, 48), F16), uniform((2, 40, 48), F16)),
        closures_reference,
        Bound(F16, 8, 2.0),
    ),
    Program(
        "host_loops",
        host_loops,
        {},
        drawn(uniform((5, 64)), uniform((5, 64)), 3),
        host_loops_reference,
        Bound(F32, 6, 4.0),
        changed=(1,),
    ),
    Program(
        "host_loops_none",
        host_loops,
        {},
        drawn(uniform((3, 64)), uniform((3, 64)), 0),
        host_loops_reference,
        EXACT,
        changed=(1,),
    ),
    Program(
        "last_block_adds",
        last_block_adds,
        dict(N=600),
        drawn(uniform((600,)), zeros((1,), I32), zeros((1,))),
        last_block_adds_reference,
        (Bound(F32, 128, 128.0), EXACT, Bound(F32, 600, 600.0)),
        changed=(1, 2),
    ),
    Program(
        "grid_stride",
        grid_stride,
        {},
        drawn(uniform((1000,)), uniform((1000,)), 0.5),
        lambda a, b, alpha: wide(b)[0] + alpha * wide(a)[0],
        Bound(F32, 2, 2.0),
        changed=(1,),
    ),
]
