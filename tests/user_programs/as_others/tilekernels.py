"""In the manner of a library of training kernels: casts, SwiGLU, expert dispatch, hyper-connections."""

import numpy as np

import tilelang
import tilelang.language as T
from tilelang.utils.target import determine_target
from tvm import DataType

from .catalogue import EXACT, Bound, Program, drawn, dtype, integers, uniform, wide
from .deepseek import pack4, unpack4

BF16, F32, I32, I64, FP8, FP4 = T.bfloat16, T.float32, T.int32, T.int64, T.float8_e4m3fn, T.float4_e2m1fn
FLAGS = ["-O3", "-Wno-deprecated-declarations", "--expt-relaxed-constexpr", "--expt-extended-lambda"]
NO_SPECIALISATION = {tilelang.PassConfigKey.TL_DISABLE_WARP_SPECIALIZED: True}
LIMIT = {"float8_e4m3fn": 448.0, "float4_e2m1fn": 6.0}


@T.macro
def scale_of(amax, limit, least=1e-4):
    clamped = T.max(amax, least)
    return clamped / limit, limit / clamped


@tilelang.jit(pass_configs=NO_SPECIALISATION, compile_flags=FLAGS)
def swiglu_and_cast(hidden, group=128, out_dtype=FP8):
    """y = swish(a) * b, cast to fp8 with a scale for each token and group of channels; rows past the count stay."""
    tokens = T.dynamic("tokens")
    limit = LIMIT[str(out_dtype)]

    @T.prim_func
    def main(
        X: T.Tensor[(tokens, 2 * hidden), BF16],
        Y: T.Tensor[(tokens, hidden), out_dtype],
        SF: T.Tensor[(tokens, hidden // group), F32],
        count: T.Tensor[(1,), I32],
    ):
        with T.Kernel(tokens, hidden // group, threads=64) as (pid, pg):
            if pid < count[0]:
                a = T.alloc_fragment((group,), F32)
                b = T.alloc_fragment((group,), F32)
                amax = T.alloc_fragment((1,), F32)
                T.copy(X[pid, pg * group], a)
                T.copy(X[pid, hidden + pg * group], b)
                for i in T.Parallel(group):
                    a[i] = a[i] / (1.0 + T.exp(-a[i])) * b[i]
                T.reduce_absmax(a, amax, dim=0)
                sf, inv = scale_of(amax[0], limit)
                for i in T.Parallel(group):
                    Y[pid, pg * group + i] = a[i] * inv
                if T.get_thread_binding() == 0:
                    SF[pid, pg] = sf

    return main


def swiglu_and_cast_reference(x, y, sf, count):
    x, y, sf = wide(x, y, sf)
    n, hidden = count[0], y.shape[1]
    a, b = x[:n, :hidden], x[:n, hidden:]
    v = (a / (1 + np.exp(-a)) * b).reshape(n, -1, 128)
    sf[:n] = np.maximum(np.abs(v).max(2), 1e-4) / 448
    y[:n] = (v / sf[:n, :, None]).reshape(n, hidden)
    return y, sf


@T.macro
def dequant_pair(x, x_sf):
    return x * x_sf, 1.0 / x_sf


@tilelang.jit(pass_configs=NO_SPECIALISATION)
def swiglu_backward(hidden, block=64):
    """Gradients of swish(a) * b * w for activations kept in fp8 with scales; also recomputes the forward value."""
    tokens = T.symbolic("tokens")

    @T.prim_func
    def main(
        x: T.Tensor[(tokens, 2 * hidden), FP8],
        x_sf: T.Tensor[(tokens, 2 * hidden // block), F32],
        dy: T.Tensor[(tokens, hidden), BF16],
        w: T.Tensor[(tokens,), F32],
        dx: T.Tensor[(tokens, 2 * hidden), BF16],
        y: T.Tensor[(tokens, hidden), BF16],
        dw: T.Tensor[(tokens,), F32],
    ):
        with T.Kernel(tokens, threads=64) as pid:
            acc = T.alloc_fragment((block,), F32)
            total = T.alloc_fragment((1,), F32)
            a = T.alloc_fragment((block,), F32)
            b = T.alloc_fragment((block,), F32)
            T.clear(acc)
            for k in T.serial(hidden // block):
                for i in T.Parallel(block):
                    a[i] = T.cast(x[pid, k * block + i], F32)
                    b[i] = T.cast(x[pid, hidden + k * block + i], F32)
                for i in T.Parallel(block):
                    va, inv = dequant_pair(a[i], x_sf[pid, k])
                    vb, inv = dequant_pair(b[i], x_sf[pid, hidden // block + k])
                    g = T.cast(dy[pid, k * block + i], F32)
                    sig = T.sigmoid(va)
                    act = va * sig * vb
                    acc[i] += g * act
                    y[pid, k * block + i] = act * w[pid]
                    dx[pid, k * block + i] = g * w[pid] * vb * (sig + va * sig * (1.0 - sig))
                    dx[pid, hidden + k * block + i] = g * w[pid] * va * sig
            T.reduce_sum(acc, total)
            for i in T.Parallel(1):
                dw[pid + i] = total[i]

    return main


def swiglu_backward_reference(x, x_sf, dy, w, dx, y, dw):
    x, x_sf, dy, w = wide(x, x_sf, dy, w)
    hidden = dy.shape[1]
    x = x * np.repeat(x_sf, 64, 1)
    a, b = x[:, :hidden], x[:, hidden:]
    s = 1 / (1 + np.exp(-a))
    g = dy * w[:, None]
    return np.concatenate([g * b * (s + a * s * (1 - s)), g * a * s], 1), a * s * b * w[:, None], (dy * a * s * b).sum(1)


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


@tilelang.jit(pass_configs=NO_SPECIALISATION)
def expand_to_fused(hidden, topk, block=64):
    """Copy each token's row to the places its experts gave it; -1 is no place."""
    tokens, places = T.dynamic("tokens, places")

    @T.prim_func
    def main(
        x: T.Tensor[(tokens, hidden), BF16],
        pos: T.Tensor[(tokens, topk), I32],
        out: T.Tensor[(places, hidden), BF16],
    ):
        with T.Kernel(tokens, threads=64) as pid:
            pos_local = T.alloc_local((topk,), I32)
            row = T.alloc_fragment((block,), BF16)
            T.copy(pos[pid, 0], pos_local)
            for b in T.serial(T.ceildiv(hidden, block)):
                T.copy(x[pid, b * block], row)
                for k in T.unroll(topk):
                    if pos_local[k] >= 0:
                        for i in T.Parallel(block):
                            out[pos_local[k], b * block + i] = row[i]

    return main


def expand_to_fused_reference(x, pos, out):
    (out,) = wide(out)
    for t, k in np.ndindex(pos.shape):
        if pos[t, k] >= 0:
            out[pos[t, k]] = x[t].astype(np.float64)
    return out


def places(tokens, topk, total):
    def draw(g):
        table = g.permutation(total)[: tokens * topk].reshape(tokens, topk).astype(np.int32)
        table[g.uniform(size=table.shape) < 0.25] = -1
        return table

    return draw


@tilelang.jit
def reduce_fused(x, pos, weight, sf, with_sf: bool = True):
    """y[t] = sum over k of weight[t, k] * sf[pos] * x[pos[t, k]], negative places left out."""
    tokens, rows = T.dynamic("tokens, rows")
    H, K = T.const("H, K")
    x: T.Tensor[(rows, H), BF16]
    pos: T.Tensor[(tokens, K), I32]
    weight: T.Tensor[(tokens, K), F32]
    sf: T.Tensor[(rows,), F32]
    y = T.empty((tokens, H), F32)
    with T.Kernel(tokens, threads=128) as t:
        acc = T.alloc_fragment((H,), F32)
        p = T.alloc_fragment((K,), I32)
        T.copy(pos[t, 0], p)
        T.clear(acc)
        for k in T.serial(K):
            if p[k] >= 0:
                s = weight[t, k] * sf[p[k]] if with_sf else weight[t, k]
                for j in T.Parallel(H):
                    acc[j] += x[p[k], j] * s
        T.copy(acc, y[t, 0])
    return y


def reduce_fused_reference(x, pos, weight, sf):
    x, weight, sf = wide(x, weight, sf)
    return (np.where(pos >= 0, weight * sf[pos], 0)[:, :, None] * x[pos]).sum(1)


@tilelang.jit(out_idx=[1, 2])
def fused_mapping(n, experts, threads=128):
    """Each choice's place among the choices of its expert, counted by the warp's matching lanes, in order."""
    assert n % threads == 0

    @T.prim_func
    def main(choice: T.Tensor[(n,), I32], place: T.Tensor[(n,), I32], count: T.Tensor[(experts,), I32]):
        with T.Kernel(1, threads=threads):
            tx = T.get_thread_binding()
            lane = T.get_lane_idx()
            warp = T.get_warp_idx()
            per_warp = T.alloc_shared((threads // 32, experts), I32)
            so_far = T.alloc_shared((experts,), I32)
            T.clear(so_far)
            for s in T.serial(n // threads):
                T.clear(per_warp)
                e = choice[s * threads + tx]
                peers = T.call_extern("uint32", "__match_any_sync", T.uint32(0xFFFFFFFF), e)
                before = T.popcount(peers & ((T.uint32(1) << T.cast(lane, "uint32")) - T.uint32(1)))
                if before == 0:
                    per_warp[warp, e] = T.cast(T.popcount(peers), "int32")
                T.sync_threads()
                start = T.alloc_var("int32", init=0)
                start = so_far[e]
                for w in T.serial(threads // 32):
                    if w < warp:
                        start += per_warp[w, e]
                place[s * threads + tx] = start + T.cast(before, "int32")
                T.sync_threads()
                if tx < experts:
                    for w in T.serial(threads // 32):
                        so_far[tx] += per_warp[w, tx]
                T.sync_threads()
            if tx < experts:
                count[tx] = so_far[tx]

    return main


def fused_mapping_reference(choice):
    seen, place = np.zeros(16, int), []
    for e in choice:
        place.append(seen[e])
        seen[e] += 1
    return np.array(place), seen


@tilelang.jit(compile_flags="-O3")
def widen_e2m1(block=64):
    """e2m1 rows at a distance, with two scales a row multiplied, to fp8 with no loss: a scale's ratio is a power of two."""
    m, n = T.dynamic("m, n")

    @T.prim_func
    def main(
        x: T.StridedTensor[(m, n), (n, 1), FP4],
        sf: T.StridedTensor[(m, T.ceildiv(n, block)), (T.ceildiv(n, block), 1), F32],
        out: T.Tensor[(m, n), FP8],
    ):
        with T.Kernel(T.ceildiv(m, 8), T.ceildiv(n, block), threads=64) as (pm, pn):
            tile = T.alloc_fragment((8, block), F32)
            for i, j in T.Parallel(8, block):
                tile[i, j] = T.cast(x[pm * 8 + i, pn * block + j], F32)
            for i, j in T.Parallel(8, block):
                if pm * 8 + i < m:
                    tile[i, j] *= sf[pm * 8 + i, pn]
            T.copy(tile, out[pm * 8, pn * block])

    return main


def widen_e2m1_reference(x, sf, out):
    return unpack4(x) * np.repeat(wide(sf)[0], 64, 1)


@tilelang.jit
def token_cast_from_e2m1(n, block=32):
    """Requantise e2m1 with scales of 32 values to fp8 with one scale a token."""
    m = T.dynamic("m")

    @T.prim_func
    def main(
        x: T.Tensor[(m, n), FP4], x_sf: T.Tensor[(m, n // block), F32], y: T.Tensor[(m, n), FP8], y_sf: T.Tensor[(m, 1), F32]
    ):
        with T.Kernel(m, threads=32) as pid:
            v = T.alloc_fragment((n,), F32)
            amax = T.alloc_fragment((1,), F32)
            for j in T.Parallel(n):
                v[j] = T.cast(x[pid, j], F32) * x_sf[pid, j // block]
            T.reduce_absmax(v, amax)
            sf, inv = scale_of(amax[0], 448.0)
            for j in T.Parallel(n):
                y[pid, j] = v[j] * inv
            y_sf[pid, 0] = sf

    return main


def token_cast_from_e2m1_reference(x, x_sf, y, y_sf):
    v = unpack4(x) * np.repeat(wide(x_sf)[0], 32, 1)
    sf = np.maximum(np.abs(v).max(1, keepdims=True), 1e-4) / 448
    return v / sf, sf


@tilelang.jit
def block_cast_to_e2m1(rows=32, cols=32):
    """bf16 to e2m1 with one scale for each block: elements are stored one by one."""
    m, n = T.dynamic("m, n")

    @T.prim_func
    def main(
        x: T.Tensor[(m, n), BF16], out: T.Tensor[(m, n), FP4], sf: T.Tensor[(T.ceildiv(m, rows), T.ceildiv(n, cols)), F32]
    ):
        with T.Kernel(T.ceildiv(n, cols), T.ceildiv(m, rows), threads=128) as (bx, by):
            t = T.alloc_fragment((rows, cols), F32)
            part = T.alloc_fragment((rows,), F32)
            amax = T.alloc_fragment((1,), F32)
            T.copy(x[by * rows, bx * cols], t)
            T.reduce_absmax(t, part, dim=1)
            T.reduce_max(part, amax, dim=0)
            scale, inv = scale_of(amax[0], 6.0)
            for i, j in T.Parallel(rows, cols):
                out[by * rows + i, bx * cols + j] = t[i, j] * inv
            if T.get_thread_binding() == 0:
                sf[by, bx] = scale

    return main


def block_cast_to_e2m1_reference(x, out, sf):
    m, n = x.shape
    padded = np.zeros((-(-m // 32) * 32, n), np.float32)
    padded[:m] = x
    t = padded.reshape(-1, 32, n // 32, 32)
    amax = np.maximum(np.abs(t).max((1, 3)), np.float32(1e-4)).astype(np.float32)
    inv = (np.float32(6) / amax).astype(np.float32)
    q = (t * inv[:, None, :, None]).reshape(padded.shape)[:m]
    return unpack4(pack4(q)), amax.astype(np.float64) / 6


@tilelang.jit(pass_configs=NO_SPECIALISATION)
def channel_cast_and_transpose(rows=128, cols=64):
    """fp8 of the transpose, with a scale for each column of 128 rows."""
    m, n = T.dynamic("m, n")

    @T.prim_func
    def main(x: T.Tensor[(m, n), BF16], out: T.Tensor[(n, m), FP8], sf: T.Tensor[(m // rows, n), F32]):
        with T.Kernel(m // rows, T.ceildiv(n, cols), threads=256) as (pm, pn):
            tile = T.alloc_shared((rows, cols), BF16)
            turned = T.alloc_shared((cols, rows), FP8)
            f = T.alloc_fragment((rows, cols), F32)
            amax = T.alloc_fragment((cols,), F32)
            T.annotate_padding({turned: 16}) if hasattr(T, "annotate_padding") else None
            T.copy(x[pm * rows, pn * cols], tile)
            T.copy(tile, f)
            T.reduce_absmax(f, amax, dim=0)
            for j in T.Parallel(cols):
                amax[j] = T.max(amax[j], 1e-4) / 448.0
                if pn * cols + j < n:
                    sf[pm, pn * cols + j] = amax[j]
            for i, j in T.Parallel(rows, cols):
                turned[j, i] = f[i, j] / amax[j]
            T.copy(turned, out[pn * cols, pm * rows])

    return main


def channel_cast_and_transpose_reference(x, out, sf):
    (x,) = wide(x)
    scale = np.maximum(np.abs(x.reshape(-1, 128, x.shape[1])).max(1), 1e-4) / 448
    return (x / np.repeat(scale, 128, 0)).T, scale


@tilelang.jit(out_idx=[1])
def batched_transpose(b, dt="bfloat16", block=32):
    m, n = T.dynamic("m, n")
    lanes = 128 // DataType(dt).bits

    @T.prim_func
    def main(x: T.StridedTensor[(b, m, n), (m * n, n, 1), dt], y: T.Tensor[(b, n, m), dt]):
        with T.Kernel(T.ceildiv(n, block), T.ceildiv(m, block), b, threads=block * block // lanes) as (bx, by, bz):
            s = T.alloc_shared((block, block + lanes), dt)
            for i, j in T.Parallel(block, block):
                s[i, j] = x[bz, by * block + i, bx * block + j]
            for i, j in T.Parallel(block, block):
                if bx * block + i < n and by * block + j < m:
                    y[bz, bx * block + i, by * block + j] = s[j, i]

    return main


@tilelang.jit(out_idx=[1, 2])
def topk_gate(experts, topk):
    """Top-k of each token in order of score, ties by the smaller index: one warp a token, all in registers."""
    tokens = T.dynamic("tokens")
    width = T.ceildiv(experts, 32) * 32

    @T.prim_func
    def main(
        score: T.Tensor[(tokens, experts), F32], index: T.Tensor[(tokens, topk), I64], value: T.Tensor[(tokens, topk), F32]
    ):
        with T.Kernel(tokens, threads=32) as pid:
            s = T.alloc_fragment((width,), F32)
            best = T.alloc_fragment((1,), F32)
            at = T.alloc_fragment((width,), I32)
            first = T.alloc_fragment((1,), I32)
            for i in T.Parallel(width):
                s[i] = T.if_then_else(i < experts, score[pid, i], -T.infinity(F32))
            for k in T.serial(topk):
                T.reduce_max(s, best)
                for i in T.Parallel(width):
                    at[i] = T.if_then_else(s[i] == best[0], i, 2147483647)
                T.reduce_min(at, first)
                for i in T.Parallel(width):
                    if i == first[0]:
                        s[i] = -T.infinity(F32)
                if T.get_thread_binding() == 0:
                    index[pid, k] = T.cast(first[0], "int64")
                    value[pid, k] = best[0]

    return main


def topk_gate_reference(topk):
    def reference(score):
        order = np.argsort(-score, axis=1, kind="stable")[:, :topk]
        return order, np.take_along_axis(score, order, 1)

    return reference


@tilelang.jit(out_idx=[-1])
def ngram_hash(n, sizes, multipliers):
    """Table indices of 2-grams and 3-grams, with 64-bit products that wrap, then a modulus."""
    tokens = T.dynamic("tokens")
    heads = len(sizes)

    @T.prim_func
    def main(ids: T.Tensor[(tokens,), I64], out: T.Tensor[(tokens, n - 1, heads), I64]):
        with T.Kernel(T.ceildiv(tokens, 64), threads=64) as pid:
            t = pid * 64 + T.get_thread_binding()
            mixed = T.alloc_var(I64, init=0)
            if t < tokens:
                mixed = ids[t] * T.int64(multipliers[0])
                for g in T.unroll(1, n):
                    previous = T.alloc_var(I64, init=0)
                    if t - g >= 0:
                        previous = ids[t - g]
                    mixed = mixed ^ (previous * T.if_then_else(g == 1, T.int64(multipliers[1]), T.int64(multipliers[2])))
                    for h in T.unroll(heads):
                        size = T.if_then_else(h == 0, T.int64(sizes[0]), T.int64(sizes[1]))
                        out[t, g - 1, h] = mixed % size

    return main


def ngram_hash_reference(ids, sizes=(1009, 4093), multipliers=(0x9E3779B97F4A7C1, 0x2545F4914F6CDD1D, 0x1234567890ABCDF)):
    out = np.zeros((len(ids), 2, 2), np.int64)
    wrap = lambda v: (v + 2**63) % 2**64 - 2**63  # noqa: E731
    for t, token in enumerate(ids):
        mixed = wrap(int(token) * multipliers[0])
        for g in (1, 2):
            mixed ^= wrap((int(ids[t - g]) if t >= g else 0) * multipliers[g])
            out[t, g - 1] = [mixed % s for s in sizes]
    return out


@tilelang.jit
def cast_e5m6(X, threads: int = 32):
    """bf16 to 12 bits (1-5-6), rounded towards zero by CUDA's own conversion, two values in three bytes."""
    m = T.dynamic("m")
    N = T.const("N")
    X: T.Tensor((m, N), F32)
    Y = T.empty((m, N // 2 * 3), "uint8")
    with T.Kernel(m, threads=threads) as pid:
        pair = T.alloc_local((2,), "uint16")
        tx = T.get_thread_binding()
        for k in T.serial(T.ceildiv(N // 2, threads)):
            p = k * threads + tx
            if p < N // 2:
                for i in T.unroll(2):
                    half = T.call_extern("float16", "__float2half_rz", X[pid, 2 * p + i])
                    pair[i] = T.reinterpret("uint16", half) >> T.uint16(4)
                Y[pid, 3 * p] = T.cast(pair[0] & T.uint16(255), "uint8")
                Y[pid, 3 * p + 1] = T.cast((pair[0] >> T.uint16(8)) | ((pair[1] & T.uint16(15)) << T.uint16(4)), "uint8")
                Y[pid, 3 * p + 2] = T.cast(pair[1] >> T.uint16(4), "uint8")
    return Y


def cast_e5m6_reference(x):
    half = x.astype(np.float16)
    over = np.abs(half.astype(np.float64)) > np.abs(x.astype(np.float64))
    codes = (half.view(np.uint16) - over.astype(np.uint16)) >> 4
    a, b = codes[:, 0::2], codes[:, 1::2]
    return np.stack([a & 255, (a >> 8) | ((b & 15) << 4), b >> 4], -1).reshape(len(x), -1)


@tilelang.jit
def group_count(groups, threads=128):
    """How many of the indices belong to each group: shared counters, then one atomic a group and block."""
    n = T.dynamic("n")
    assert determine_target("auto") is not None

    @T.prim_func
    def main(idx: T.Tensor[(n,), I64], out: T.Tensor[(groups,), I32]):
        with T.Kernel(T.ceildiv(n, 4 * threads), threads=threads) as pid:
            local = T.alloc_shared((groups,), I32)
            T.clear(local)
            for k in T.serial(4):
                i = (pid * 4 + k) * threads + T.get_thread_binding()
                if i < n:
                    g = T.cast(idx[i], I32)
                    if g >= 0:
                        T.atomic_add(local[g], 1)
            for g in T.Parallel(groups):
                if local[g] > 0:
                    T.atomic_add(out[g], local[g])

    return main


def group_count_reference(idx, out):
    return out + np.bincount(idx[idx >= 0], minlength=len(out))


@tilelang.jit
def unique_groups_inplace(topk, group_size, n_groups):
    """Replace expert indices by group indices, each group once a token, the rest -1 (a block-uniform early return)."""
    tokens = T.dynamic("tokens")

    @T.prim_func
    def main(idx: T.Tensor[(tokens, topk), I64], limit: T.int32):
        with T.Kernel(T.ceildiv(tokens, 32), threads=32) as pid:
            t = pid * 32 + T.get_thread_binding()
            if t >= tokens or t >= limit:
                T.thread_return()
            seen = T.alloc_local((n_groups,), "bool")
            for g in T.unroll(n_groups):
                seen[g] = False
            for k in T.serial(topk):
                e = idx[t, k]
                if e >= 0:
                    g = T.cast(e // group_size, I32)
                    if seen[g]:
                        idx[t, k] = -1
                    else:
                        idx[t, k] = T.cast(g, I64)
                        seen[g] = True

    return main


def unique_groups_inplace_reference(idx, limit):
    out = idx.copy()
    for t in range(min(limit, len(idx))):
        seen = set()
        for k, e in enumerate(idx[t]):
            if e >= 0:
                out[t, k] = -1 if e // 4 in seen else e // 4
                seen.add(e // 4)
    return out


def zeros(shape, name=F32):
    return np.zeros(shape, dtype(str(name)))


HASH = dict(n=3, sizes=(1009, 4093), multipliers=(0x9E3779B97F4A7C1, 0x2545F4914F6CDD1D, 0x1234567890ABCDF))
ROUNDED = Bound("float8_e4m3fn", via=(("float8_e4m3fn", 0.002),))
PROGRAMS = [
    Program(
        "swiglu_and_cast",
        swiglu_and_cast,
        dict(hidden=256),
        drawn(uniform((9, 512), BF16, -3, 3), zeros((9, 256), FP8), zeros((9, 2)), np.array([7], np.int32)),
        swiglu_and_cast_reference,
        (ROUNDED, Bound(ulps=16)),
        changed=(1, 2),
    ),
    Program(
        "swiglu_backward",
        swiglu_backward,
        dict(hidden=128),
        drawn(
            uniform((5, 256), FP8, -4, 4),
            uniform((5, 4), F32, 0.5, 1),
            uniform((5, 128), BF16),
            uniform((5,)),
            zeros((5, 256), BF16),
            zeros((5, 128), BF16),
            zeros((5,)),
        ),
        swiglu_backward_reference,
        (Bound(BF16, 8, 16.0), Bound(BF16, 8, 16.0), Bound(F32, 128, 16.0 * 32)),
        changed=(4, 5, 6),
    ),
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
    Program(
        "expand_to_fused",
        expand_to_fused,
        dict(hidden=160, topk=3),
        drawn(uniform((7, 160), BF16), places(7, 3, 30), zeros((30, 160), BF16)),
        expand_to_fused_reference,
        EXACT,
        changed=(2,),
    ),
    Program(
        "reduce_fused",
        reduce_fused,
        dict(H=192, K=3),
        drawn(uniform((30, 192), BF16), places(7, 3, 30), uniform((7, 3)), uniform((30,))),
        reduce_fused_reference,
        Bound(F32, 8, 3.0),
    ),
    Program(
        "fused_mapping",
        fused_mapping,
        dict(n=256, experts=16),
        drawn(integers((256,), 0, 16)),
        fused_mapping_reference,
        EXACT,
    ),
    Program(
        "widen_e2m1",
        widen_e2m1,
        {},
        drawn(
            integers((20, 64), -128, 128, "int8"),
            lambda g: 2.0 ** g.integers(-3, 3, (20, 2)).astype(np.float32),
            zeros((20, 128), FP8),
        ),
        widen_e2m1_reference,
        EXACT,
        changed=(2,),
    ),
    Program(
        "token_cast_from_e2m1",
        token_cast_from_e2m1,
        dict(n=128),
        drawn(integers((9, 64), -128, 128, "int8"), uniform((9, 4), F32, 0.1, 1), zeros((9, 128), FP8), zeros((9, 1))),
        token_cast_from_e2m1_reference,
        (ROUNDED, Bound(ulps=4)),
        changed=(2, 3),
    ),
    Program(
        "block_cast_to_e2m1",
        block_cast_to_e2m1,
        {},
        drawn(uniform((40, 64), BF16), np.zeros((40, 32), np.int8), zeros((2, 2))),
        block_cast_to_e2m1_reference,
        (EXACT, Bound(ulps=4)),
        changed=(1, 2),
        arrange=lambda results: [unpack4(results[0]), results[1]],
    ),
    Program(
        "channel_cast_and_transpose",
        channel_cast_and_transpose,
        {},
        drawn(uniform((256, 72), BF16), zeros((72, 256), FP8), zeros((2, 72))),
        channel_cast_and_transpose_reference,
        (ROUNDED, Bound(ulps=4)),
        changed=(1, 2),
    ),
    Program(
        "batched_transpose",
        batched_transpose,
        dict(b=2),
        drawn(uniform((2, 50, 72), BF16)),
        lambda x: np.swapaxes(x, 1, 2).astype(np.float64),
        EXACT,
    ),
    Program(
        "topk_gate",
        topk_gate,
        dict(experts=50, topk=4),
        drawn(lambda g: g.integers(0, 20, (6, 50)).astype(np.float32)),
        topk_gate_reference(4),
        EXACT,
    ),
    Program("ngram_hash", ngram_hash, HASH, drawn(integers((100,), 0, 2**31, "int64")), ngram_hash_reference, EXACT),
    Program(
        "cast_e5m6",
        cast_e5m6,
        dict(N=72),
        drawn(uniform((5, 72), F32, -4, 4)),
        cast_e5m6_reference,
        EXACT,
    ),
    Program(
        "group_count",
        group_count,
        dict(groups=20),
        drawn(integers((700,), -1, 20, "int64"), zeros((20,), I32)),
        group_count_reference,
        EXACT,
        changed=(1,),
    ),
    Program(
        "unique_groups_inplace",
        unique_groups_inplace,
        dict(topk=5, group_size=4, n_groups=4),
        drawn(integers((50, 5), -1, 16, "int64"), 45),
        unique_groups_inplace_reference,
        EXACT,
        changed=(0,),
    ),
]
