"""Hyper-connections, forwards and backwards."""

import numpy as np

import tilelang
import tilelang.language as T

from ..catalogue import Bound, Program, drawn, uniform, wide, zeros
from .common import BF16, F32, NO_SPECIALISATION


@tilelang.jit(pass_configs=NO_SPECIALISATION)
def mhc_pre_fuse(hc, hidden, iters=4, eps=1e-6, n_splits=2):
    """Mixes of a hyper-connection from partial sums, and the layer's input: two warp roles share one block."""
    n = T.dynamic("n")
    mix = hc * (2 + hc)

    @T.prim_func
    def main(
        partial: T.Tensor[(n_splits, n, mix), F32],
        sqrsum: T.Tensor[(n_splits, n), F32],
        scale: T.Tensor[(3,), F32],
        base: T.Tensor[(mix,), F32],
        residual: T.Tensor[(n, hc, hidden), BF16],
        post: T.Tensor[(n, hc), F32],
        comb: T.Tensor[(n, hc * hc), F32],
        layer_in: T.Tensor[(n, hidden), BF16],
    ):
        with T.Kernel(n, threads=96) as pid:
            mixes = T.alloc_shared(mix, F32)
            rms = T.alloc_fragment(1, F32)
            summed = T.alloc_fragment(mix, F32)
            T.clear(summed)
            rms[0] = 0
            for s in T.serial(n_splits):
                rms[0] += sqrsum[s, pid]
                for j in T.Parallel(mix):
                    summed[j] += partial[s, pid, j]
            rms[0] = T.rsqrt(rms[0] / (hc * hidden) + eps)
            for j in T.Parallel(mix):
                summed[j] *= rms[0]
            T.copy(summed, mixes)
            if T.get_thread_binding() < 32:
                cm = T.alloc_fragment((hc, hc), F32)
                for j in T.Parallel(hc):
                    post[pid, j] = T.sigmoid(mixes[j + hc] * scale[1] + base[j + hc]) * 2
                for j, k in T.Parallel(hc, hc):
                    cm[j, k] = mixes[2 * hc + j * hc + k] * scale[2] + base[2 * hc + j * hc + k]
                row = T.alloc_fragment(hc, F32)
                col = T.alloc_fragment(hc, F32)
                T.reduce_max(cm, row, dim=1)
                for j, k in T.Parallel(hc, hc):
                    cm[j, k] = T.exp(cm[j, k] - row[j])
                for _ in T.serial(iters):
                    T.reduce_sum(cm, row, dim=1)
                    for j, k in T.Parallel(hc, hc):
                        cm[j, k] = cm[j, k] / (row[j] + eps)
                    T.reduce_sum(cm, col, dim=0)
                    for j, k in T.Parallel(hc, hc):
                        cm[j, k] = cm[j, k] / (col[k] + eps)
                for j, k in T.Parallel(hc, hc):
                    comb[pid, j * hc + k] = cm[j, k]
            else:
                pre = T.alloc_shared(hc, F32)
                for j in T.Parallel(hc):
                    pre[j] = T.sigmoid(mixes[j] * scale[0] + base[j]) + eps
                for k in T.serial(hidden // 64):
                    xs = T.alloc_shared((hc, 64), BF16)
                    o = T.alloc_fragment(64, F32)
                    T.copy(residual[pid, 0:hc, k * 64 : (k + 1) * 64], xs)
                    T.clear(o)
                    for h in T.serial(hc):
                        for j in T.Parallel(64):
                            o[j] += pre[h] * xs[h, j]
                    T.copy(o, layer_in[pid, k * 64])

    return main


def mhc_pre_fuse_reference(partial, sqrsum, scale, base, residual, post, comb, layer_in, hc=4, iters=4, eps=1e-6):
    partial, sqrsum, scale, base, residual = wide(partial, sqrsum, scale, base, residual)
    rms = 1 / np.sqrt(sqrsum.sum(0) / (hc * residual.shape[2]) + eps)
    z = partial.sum(0) * rms[:, None] * np.repeat(scale, [hc, hc, hc * hc]) + base
    c = z[:, 2 * hc :].reshape(-1, hc, hc)
    c = np.exp(c - c.max(2, keepdims=True))
    for _ in range(iters):
        c = c / (c.sum(2, keepdims=True) + eps)
        c = c / (c.sum(1, keepdims=True) + eps)
    pre = 1 / (1 + np.exp(-z[:, :hc])) + eps
    return 2 / (1 + np.exp(-z[:, hc : 2 * hc])), c.reshape(-1, hc * hc), np.einsum("nh,nhd->nd", pre, residual)


@tilelang.jit
def mhc_post(comb, residual, post, x, hc: int = 4, block: int = 128):
    n = T.dynamic("n")
    H = T.const("H")
    comb: T.Tensor((n, hc, hc), F32)
    residual: T.Tensor((n, hc, H), BF16)
    post: T.Tensor((n, hc), F32)
    x: T.Tensor((n, H), BF16)
    out = T.empty((n, hc, H), BF16)
    with T.Kernel(n, threads=128) as pid:
        c_local = T.alloc_fragment((hc, hc), F32)
        p_local = T.alloc_fragment((hc,), F32)
        T.copy(comb[pid, 0, 0], c_local)
        T.copy(post[pid, 0], p_local)
        for k in T.Pipelined(T.ceildiv(H, block), num_stages=2):
            r_shared = T.alloc_shared((hc, block), BF16)
            x_shared = T.alloc_shared(block, BF16)
            o_local = T.alloc_fragment((hc, block), F32)
            T.copy(residual[pid, 0, k * block], r_shared)
            T.copy(x[pid, k * block], x_shared)
            for o, j in T.Parallel(hc, block):
                o_local[o, j] = p_local[o] * x_shared[j]
                for i in T.serial(hc):
                    o_local[o, j] += c_local[i, o] * r_shared[i, j]
            T.copy(o_local, out[pid, 0, k * block])
    return out


def mhc_post_reference(comb, residual, post, x):
    comb, residual, post, x = wide(comb, residual, post, x)
    return post[:, :, None] * x[:, None] + np.einsum("nio,nij->noj", comb, residual)


@tilelang.jit(pass_configs=NO_SPECIALISATION)
def sinkhorn_backward(hc, iters, tokens_per_block=4, eps=1e-6):
    """Reverse of alternating row and column normalisation, with the intermediate matrices recomputed in shared memory."""
    n = T.dynamic("n")
    B = tokens_per_block

    @T.prim_func
    def main(x: T.Tensor[(n, hc, hc), F32], grad: T.Tensor[(n, hc, hc), F32], dx: T.Tensor[(n, hc, hc), F32]):
        with T.Kernel(T.ceildiv(n, B), threads=32) as pid:
            kept = T.alloc_shared((2 * iters, B, hc, hc), F32)
            sums = T.alloc_shared((2 * iters, B, hc), F32)
            m = T.alloc_fragment((B, hc, hc), F32)
            g = T.alloc_fragment((B, hc, hc), F32)
            prod = T.alloc_fragment((B, hc, hc), F32)
            row = T.alloc_fragment((B, hc), F32)
            col = T.alloc_fragment((B, hc), F32)
            T.copy(x[pid * B, 0, 0], m)
            for b, i, j in T.Parallel(B, hc, hc):
                m[b, i, j] = T.exp(m[b, i, j])
            for s in T.serial(iters):
                T.copy(m, kept[2 * s, :, :, :])
                T.reduce_sum(m, row, dim=2)
                for b, i, j in T.Parallel(B, hc, hc):
                    m[b, i, j] /= row[b, i] + eps
                T.copy(row, sums[2 * s, :, :])
                T.copy(m, kept[2 * s + 1, :, :, :])
                T.reduce_sum(m, col, dim=1)
                for b, i, j in T.Parallel(B, hc, hc):
                    m[b, i, j] /= col[b, j] + eps
                T.copy(col, sums[2 * s + 1, :, :])
            T.copy(grad[pid * B, 0, 0], g)
            for t in T.serial(iters):
                s = iters - 1 - t
                for b, i, j in T.Parallel(B, hc, hc):
                    prod[b, i, j] = g[b, i, j] * kept[2 * s + 1, b, i, j]
                T.reduce_sum(prod, col, dim=1)
                for b, i, j in T.Parallel(B, hc, hc):
                    d = sums[2 * s + 1, b, j] + eps
                    g[b, i, j] = g[b, i, j] / d - col[b, j] / (d * d)
                for b, i, j in T.Parallel(B, hc, hc):
                    prod[b, i, j] = g[b, i, j] * kept[2 * s, b, i, j]
                T.reduce_sum(prod, row, dim=2)
                for b, i, j in T.Parallel(B, hc, hc):
                    d = sums[2 * s, b, i] + eps
                    g[b, i, j] = g[b, i, j] / d - row[b, i] / (d * d)
            for b, i, j in T.Parallel(B, hc, hc):
                if pid * B + b < n:
                    dx[pid * B + b, i, j] = g[b, i, j] * kept[0, b, i, j]

    return main


def sinkhorn_backward_reference(iters, eps=1e-6):
    def reference(x, grad, dx):
        x, g = wide(x, grad)
        m, kept = np.exp(x), []
        for _ in range(iters):
            for axis in (2, 1):
                s = m.sum(axis, keepdims=True)
                kept.append((m, s, axis))
                m = m / (s + eps)
        for m, s, axis in reversed(kept):
            g = g / (s + eps) - (g * m).sum(axis, keepdims=True) / (s + eps) ** 2
        return g * np.exp(x)

    return reference


@tilelang.jit
def head_mix_backward(hc, block=32):
    """d(scale) and d(base) of sigmoid(x * scale + base): reducers that every thread may read, then atomics."""
    n = T.dynamic("n")

    @T.prim_func
    def main(
        X: T.Tensor[(n, hc), F32],
        dY: T.Tensor[(n, hc), F32],
        scale: T.Tensor[(1,), F32],
        base: T.Tensor[(hc,), F32],
        dX: T.Tensor[(n, hc), F32],
        dscale: T.Tensor[(1,), F32],
        dbase: T.Tensor[(hc,), F32],
    ):
        with T.Kernel(T.ceildiv(n, block), threads=64) as pid:
            scale_r = T.alloc_reducer(1, F32, replication="all")
            base_r = T.alloc_reducer(hc, F32, replication="all")
            x = T.alloc_fragment((block, hc), F32)
            T.fill(scale_r, 0)
            T.fill(base_r, 0)
            for i, j in T.Parallel(block, hc):
                if pid * block + i < n:
                    x[i, j] = X[pid * block + i, j]
                    s = T.sigmoid(x[i, j] * scale[0] + base[j])
                    d = dY[pid * block + i, j] * s * (1.0 - s)
                    dX[pid * block + i, j] = d * scale[0]
                    scale_r[0] += d * x[i, j]
                    base_r[j] += d
            T.finalize_reducer(scale_r)
            T.finalize_reducer(base_r)
            if T.get_thread_binding() == 0:
                T.atomic_add(dscale[0], scale_r[0])
            for j in T.Parallel(hc):
                T.atomic_add(dbase[j], base_r[j])

    return main


def head_mix_backward_reference(x, dy, scale, base, *_):
    x, dy, scale, base = wide(x, dy, scale, base)
    s = 1 / (1 + np.exp(-(x * scale + base)))
    d = dy * s * (1 - s)
    return d * scale, np.array([(d * x).sum()]), d.sum(0)


PROGRAMS = [
    Program(
        "mhc_pre_fuse",
        mhc_pre_fuse,
        dict(hc=4, hidden=128),
        drawn(
            uniform((2, 5, 24)),
            uniform((2, 5), F32, 100, 300),
            uniform((3,)),
            uniform((24,)),
            uniform((5, 4, 128), BF16),
            zeros((5, 4)),
            zeros((5, 16)),
            zeros((5, 128), BF16),
        ),
        mhc_pre_fuse_reference,
        (Bound(F32, 64, 1.0), Bound(F32, 96, 1.0), Bound(BF16, 8, 4.0)),
        changed=(5, 6, 7),
    ),
    Program(
        "mhc_post",
        mhc_post,
        dict(H=200),
        drawn(uniform((4, 4, 4)), uniform((4, 4, 200), BF16), uniform((4, 4)), uniform((4, 200), BF16)),
        mhc_post_reference,
        Bound(BF16, 5, 5.0),
    ),
    Program(
        "sinkhorn_backward",
        sinkhorn_backward,
        dict(hc=4, iters=3),
        drawn(uniform((6, 4, 4)), uniform((6, 4, 4)), zeros((6, 4, 4))),
        sinkhorn_backward_reference(3),
        Bound(F32, 256, 4.0),
        changed=(2,),
    ),
    Program(
        "head_mix_backward",
        head_mix_backward,
        dict(hc=4),
        drawn(uniform((75, 4)), uniform((75, 4)), uniform((1,)), uniform((4,)), zeros((75, 4)), zeros((1,)), zeros((4,))),
        head_mix_backward_reference,
        (Bound(F32, 8, 1.0), Bound(F32, 300, 75.0), Bound(F32, 80, 20.0)),
        changed=(4, 5, 6),
    ),
]
