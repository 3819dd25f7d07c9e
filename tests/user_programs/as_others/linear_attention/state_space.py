"""State space models."""

import numpy as np

import tilelang
import tilelang.language as T

from ..catalogue import Bound, Program, drawn, uniform, wide
from .common import F16, F32


@tilelang.jit(out_idx=[4])
def ssd_chunk_state(batch, seq, chunk, groups, heads, headdim, dstate, block_m=32, block_n=32, block_k=32):
    n_chunks = T.ceildiv(seq, chunk)
    p = 1.44269504

    @T.prim_func
    def main(
        B: T.Tensor((batch, seq, groups, dstate), F16),
        x: T.Tensor((batch, seq, heads, headdim), F16),
        dt: T.Tensor((batch, heads, n_chunks, chunk), F16),
        dA_cumsum: T.Tensor((batch, heads, n_chunks, chunk), F16),
        Output: T.Tensor((batch, n_chunks, heads, headdim, dstate), F16),
    ):
        with T.Kernel(heads, T.ceildiv(headdim, block_m) * T.ceildiv(dstate, block_n), batch * n_chunks, threads=128) as (
            bz,
            bx,
            by,
        ):
            x_s = T.alloc_shared((block_k, block_m), F16)
            x_l = T.alloc_fragment((block_k, block_m), F16)
            xt = T.alloc_fragment((block_m, block_k), F16)
            B_s = T.alloc_shared((block_k, block_n), F16)
            dt_s = T.alloc_shared((block_k), F16)
            dA_s = T.alloc_shared((block_k), F16)
            acc = T.alloc_fragment((block_m, block_n), F32)
            scale = T.alloc_fragment((block_k), F32)
            dA_last = T.alloc_fragment((1), F32)
            dA_l = T.alloc_fragment((block_k), F32)
            dt_l = T.alloc_fragment((block_k), F32)
            batch_idx = by % batch
            chunk_idx = by // batch
            m_idx = bx // T.ceildiv(dstate, block_n)
            n_idx = bx % T.ceildiv(dstate, block_n)
            T.annotate_layout({x_s: tilelang.layout.make_swizzled_layout(x_s)})
            dA_last[0] = dA_cumsum[batch_idx, bz, chunk_idx, chunk - 1]
            T.clear(acc)
            for k in T.Pipelined(T.ceildiv(chunk, block_k), num_stages=2):
                T.copy(
                    x[
                        batch_idx,
                        chunk_idx * chunk + k * block_k : chunk_idx * chunk + (k + 1) * block_k,
                        bz,
                        m_idx * block_m : (m_idx + 1) * block_m,
                    ],
                    x_s,
                )
                T.copy(dA_cumsum[batch_idx, bz, chunk_idx, k * block_k : (k + 1) * block_k], dA_s)
                T.copy(dt[batch_idx, bz, chunk_idx, k * block_k : (k + 1) * block_k], dt_s)
                T.copy(dA_s, dA_l)
                T.copy(dt_s, dt_l)
                for i in T.Parallel(block_k):
                    scale[i] = T.exp2(dA_last[0] * p - dA_l[i] * p) * dt_l[i]
                T.copy(x_s, x_l)
                for i, j in T.Parallel(block_m, block_k):
                    xt[i, j] = x_l[j, i] * scale[j]
                T.copy(
                    B[
                        batch_idx,
                        chunk_idx * chunk + k * block_k : chunk_idx * chunk + (k + 1) * block_k,
                        bz // (heads // groups),
                        n_idx * block_n : (n_idx + 1) * block_n,
                    ],
                    B_s,
                )
                T.gemm(xt, B_s, acc)
            T.copy(
                acc,
                Output[
                    batch_idx, chunk_idx, bz, m_idx * block_m : (m_idx + 1) * block_m, n_idx * block_n : (n_idx + 1) * block_n
                ],
            )

    return main


def ssd_chunk_state_reference(B, x, dt, dA):
    B, x, dt, dA = wide(B, x, dt, dA)
    b, h, n, c = dt.shape
    B = np.repeat(B, h // B.shape[2], 2).reshape(b, n, c, h, -1)
    x = x.reshape(b, n, c, h, -1)
    scale = np.exp(dA[..., -1:] - dA) * dt
    return np.einsum("bnchs,bhnc,bnchp->bnhps", B, scale, x)


@tilelang.jit(out_idx=[6])
def ssd_chunk_scan(batch, seq, chunk, groups, heads, headdim, dstate, block_m=32, block_n=32, block_k=32):
    n_chunks = T.ceildiv(seq, chunk)
    p = 1.44269504

    @T.prim_func
    def main(
        cb: T.Tensor((batch, n_chunks, groups, chunk, chunk), F16),
        x: T.Tensor((batch, seq, heads, headdim), F16),
        dt: T.Tensor((batch, heads, n_chunks, chunk), F16),
        dA: T.Tensor((batch, heads, n_chunks, chunk), F16),
        C: T.Tensor((batch, seq, groups, dstate), F16),
        states: T.Tensor((batch, n_chunks, heads, headdim, dstate), F16),
        Output: T.Tensor((batch, seq, heads, headdim), F16),
    ):
        with T.Kernel(heads, T.ceildiv(chunk, block_m) * T.ceildiv(headdim, block_n), batch * n_chunks, threads=128) as (
            bz,
            bx,
            by,
        ):
            acc = T.alloc_fragment((block_m, block_n), F32)
            cb_s = T.alloc_shared((block_m, block_k), F16)
            cb_l = T.alloc_fragment((block_m, block_k), F16)
            dA_k = T.alloc_shared((block_k), F16)
            dA_k_l = T.alloc_fragment((block_k), F32)
            dA_m = T.alloc_fragment((block_m), F32)
            dt_s = T.alloc_shared((block_k), F16)
            dt_l = T.alloc_fragment((block_k), F32)
            x_s = T.alloc_shared((block_k, block_n), F16)
            C_s = T.alloc_shared((block_m, dstate), F16)
            st_s = T.alloc_shared((block_n, dstate), F16)
            b_i, c_i = by % batch, by // batch
            m_i = bx // T.ceildiv(headdim, block_n)
            n_i = bx % T.ceildiv(headdim, block_n)
            base = c_i * chunk
            T.copy(dA[b_i, bz, c_i, m_i * block_m : (m_i + 1) * block_m], dA_m)
            T.copy(C[b_i, base + m_i * block_m : base + (m_i + 1) * block_m, bz // (heads // groups), 0:dstate], C_s)
            T.copy(states[b_i, c_i, bz, n_i * block_n : (n_i + 1) * block_n, 0:dstate], st_s)
            T.gemm(C_s, st_s, acc, transpose_B=True, clear_accum=True)
            for i, j in T.Parallel(block_m, block_n):
                acc[i, j] *= T.exp2(dA_m[i] * p)
            for k in T.Pipelined(T.ceildiv((m_i + 1) * block_m, block_k), num_stages=2):
                T.copy(
                    cb[b_i, c_i, bz // (heads // groups), m_i * block_m : (m_i + 1) * block_m, k * block_k : (k + 1) * block_k],
                    cb_s,
                )
                T.copy(cb_s, cb_l)
                T.copy(dA[b_i, bz, c_i, k * block_k : (k + 1) * block_k], dA_k)
                T.copy(dA_k, dA_k_l)
                for i, j in T.Parallel(block_m, block_k):
                    cb_l[i, j] = cb_l[i, j] * T.exp2(dA_m[i] * p - dA_k_l[j] * p)
                T.copy(dt[b_i, bz, c_i, k * block_k : (k + 1) * block_k], dt_s)
                T.copy(dt_s, dt_l)
                for i, j in T.Parallel(block_m, block_k):
                    cb_l[i, j] *= dt_l[j]
                for i, j in T.Parallel(block_m, block_k):
                    cb_l[i, j] = T.if_then_else(m_i * block_m + i >= k * block_k + j, cb_l[i, j], 0)
                T.copy(x[b_i, base + k * block_k : base + (k + 1) * block_k, bz, n_i * block_n : (n_i + 1) * block_n], x_s)
                T.gemm(cb_l, x_s, acc)
            T.copy(acc, Output[b_i, base + m_i * block_m : base + (m_i + 1) * block_m, bz, n_i * block_n : (n_i + 1) * block_n])

    return main


def ssd_chunk_scan_reference(cb, x, dt, dA, C, states):
    cb, x, dt, dA, C, states = wide(cb, x, dt, dA, C, states)
    b, h, n, c = dt.shape
    per = h // C.shape[2]
    C = np.repeat(C, per, 2).reshape(b, n, c, h, -1)
    scores = np.repeat(cb, per, 2) * np.tril(np.exp(np.minimum(dA[..., :, None] - dA[..., None, :], 0))).transpose(
        0, 2, 1, 3, 4
    )
    scores = scores * dt.transpose(0, 2, 1, 3)[..., None, :]
    out = np.einsum("bnhij,bnjhp->bnihp", scores, x.reshape(b, n, c, h, -1))
    out += np.einsum("bnchs,bnhps,bhnc->bnchp", C, states, np.exp(dA))
    return out.reshape(x.shape)


@tilelang.jit
def state_passing(states, decay, initial, threads: int = 64):
    """h[c] = exp(decay[c]) * h[c - 1] + states[c], carried through the chunks; the last one goes to the caller."""
    B, C, H, D = T.const("B C H D")
    states: T.Tensor((B, C, H, D), F32)
    decay: T.Tensor((B, H, C), F32)
    initial: T.Tensor((B, H, D), F32)
    out = T.empty((B, C, H, D), F32)
    final = T.empty((B, H, D), F32)
    with T.Kernel(T.ceildiv(D, threads), H, B, threads=threads) as (bx, h, b):
        carry = T.alloc_fragment((threads,), F32)
        T.copy(initial[b, h, bx * threads], carry)
        for c in T.serial(C):
            T.copy(carry, out[b, c, h, bx * threads : (bx + 1) * threads])
            scale = T.exp(decay[b, h, c])
            for i in T.Parallel(threads):
                if bx * threads + i < D:
                    carry[i] = carry[i] * scale + states[b, c, h, bx * threads + i]
        T.copy(carry, final[b, h, bx * threads])
    return out, final


def state_passing_reference(states, decay, initial):
    states, decay, carry = wide(states, decay, initial)
    out = np.zeros(states.shape)
    for c in range(states.shape[1]):
        out[:, c] = carry
        carry = carry * np.exp(decay[:, :, c])[..., None] + states[:, c]
    return out, carry


@tilelang.jit(out_idx=[-1])
def chunk_cumsum(batch, seq, heads, chunk, reverse=False):
    """Sums of gates inside of each chunk, for all heads of a token block at once."""

    @T.prim_func
    def main(g: T.Tensor((batch, seq, heads), F32), out: T.Tensor((batch, seq, heads), F32)):
        with T.Kernel(T.ceildiv(seq, chunk), batch, threads=64) as (c, b):
            s = T.alloc_shared((chunk, heads), F32)
            T.copy(g[b, c * chunk, 0], s)
            T.cumsum(s, dim=0, reverse=reverse)
            T.copy(s, out[b, c * chunk, 0])

    return main


def chunk_cumsum_reference(chunk):
    def reference(g):
        (g,) = wide(g)
        out = np.zeros(g.shape)
        for s in range(0, g.shape[1], chunk):
            out[:, s : s + chunk] = np.cumsum(g[:, s : s + chunk], 1)
        return out

    return reference


def decays(shape):
    return lambda g: np.cumsum(-g.uniform(0, 0.1, shape), 3).astype(np.float16)


PROGRAMS = [
    Program(
        "ssd_chunk_state",
        ssd_chunk_state,
        dict(batch=2, seq=128, chunk=64, groups=1, heads=2, headdim=32, dstate=48),
        drawn(
            uniform((2, 128, 1, 48), F16),
            uniform((2, 128, 2, 32), F16),
            uniform((2, 2, 2, 64), F16, 0, 1),
            decays((2, 2, 2, 64)),
        ),
        ssd_chunk_state_reference,
        Bound(F16, via=((F16, 16.0),)),
    ),
    Program(
        "ssd_chunk_scan",
        ssd_chunk_scan,
        dict(batch=1, seq=128, chunk=64, groups=1, heads=2, headdim=48, dstate=32),
        drawn(
            uniform((1, 2, 1, 64, 64), F16),
            uniform((1, 128, 2, 48), F16),
            uniform((1, 2, 2, 64), F16, 0, 1),
            decays((1, 2, 2, 64)),
            uniform((1, 128, 1, 32), F16),
            uniform((1, 2, 2, 48, 32), F16),
        ),
        ssd_chunk_scan_reference,
        Bound(F16, via=((F16, 16.0),)),
    ),
    Program(
        "state_passing",
        state_passing,
        dict(B=2, C=5, H=2, D=100),
        drawn(uniform((2, 5, 2, 100)), uniform((2, 2, 5), low=-1, high=0), uniform((2, 2, 100))),
        state_passing_reference,
        Bound(F32, 20, 5.0),
    ),
    Program(
        "chunk_cumsum",
        chunk_cumsum,
        dict(batch=2, seq=100, heads=6, chunk=32),
        drawn(uniform((2, 100, 6))),
        chunk_cumsum_reference(32),
        Bound(F32, 32, 32.0),
    ),
]
