"""Recurrences over chunks: linear attention with a carried state, retention, gated forms, Mamba-2's chunk kernels."""

import math
from typing import Any

import tilelang.language as T

from .corpus import Plain, Sizes, Spec, Tensors, enter

FULL, SMALL = dict(batch=8, heads=32, seq=8192, dim=128), dict(batch=1, heads=2, seq=256, dim=64)


def linear(kind: str = "", chunk: int = 64, columns: int = 64, threads: int = 128, stages: int = 2) -> Any:
    """O = (mask of Q K^T) V + Q state; state = decay state + K^T V.  kind: "", "retention" (a decay for each head), "gated" (a
    decay for each step and head, logarithms summed within the chunk)."""
    def program(batch: int, heads: int, seq: int, dim: int) -> Any:
        shape = (batch, seq, heads, dim)

        @T.prim_func
        def recur(Q: T.Tensor(shape, "float16"), K: T.Tensor(shape, "float16"), V: T.Tensor(shape, "float16"),
                  G: T.Tensor((batch, heads, seq), "float32"), O: T.Tensor(shape, "float16")):
            with T.Kernel(T.ceildiv(dim, columns), heads, batch, threads=threads) as (bx, h, b):
                q, k = T.alloc_shared((chunk, dim), "float16"), T.alloc_shared((chunk, dim), "float16")
                v = T.alloc_shared((chunk, columns), "float16")
                g = T.alloc_shared((chunk,), "float32")
                held = T.alloc_shared((dim, columns), "float16")
                kd = T.alloc_shared((chunk, dim), "float16")
                state = T.alloc_fragment((dim, columns), "float32")
                s, p = T.alloc_fragment((chunk, chunk), "float32"), T.alloc_fragment((chunk, chunk), "float16")
                o = T.alloc_fragment((chunk, columns), "float32")
                T.clear(state)
                for c in T.Pipelined(T.ceildiv(seq, chunk), num_stages=stages):
                    T.copy(Q[b, c * chunk:(c + 1) * chunk, h, :], q)
                    T.copy(K[b, c * chunk:(c + 1) * chunk, h, :], k)
                    T.copy(V[b, c * chunk:(c + 1) * chunk, h, bx * columns:(bx + 1) * columns], v)
                    if kind != "":
                        T.copy(G[b, h, c * chunk:(c + 1) * chunk], g)
                    T.copy(state, held)
                    T.gemm(q, held, o, clear_accum=True)
                    if kind != "":
                        for i, j in T.Parallel(chunk, columns):
                            o[i, j] *= T.exp2(g[i])
                    T.gemm(q, k, s, transpose_B=True, clear_accum=True)
                    if kind != "":
                        for i, j in T.Parallel(chunk, chunk):
                            p[i, j] = T.if_then_else(j <= i, s[i, j] * T.exp2(g[i] - g[j]), 0.0)
                    else:
                        for i, j in T.Parallel(chunk, chunk):
                            p[i, j] = T.if_then_else(j <= i, s[i, j], 0.0)
                    T.gemm(p, v, o)
                    T.copy(o, O[b, c * chunk:(c + 1) * chunk, h, bx * columns:(bx + 1) * columns])
                    if kind != "":
                        for i, j in T.Parallel(chunk, dim):
                            kd[i, j] = k[i, j] * T.exp2(g[chunk - 1] - g[i])
                        for i, j in T.Parallel(dim, columns):
                            state[i, j] *= T.exp2(g[chunk - 1])
                        T.gemm(kd, v, state, transpose_A=True)
                    else:
                        T.gemm(k, v, state, transpose_A=True)

        return recur

    return program


def _decays(kind: str, chunk: int) -> Any:
    """log2 of the decay from the beginning of its chunk to each step."""
    def fill(torch: Any, s: Sizes, g: Any, device: str) -> Any:
        shape = (s["batch"], s["heads"], s["seq"])
        if kind == "retention":
            by = torch.log2(1 - 2.0**(-5 - torch.arange(s["heads"], device=device) * 7.0 / s["heads"]))
            steps = by[None, :, None].expand(shape)
        else:
            steps = -torch.rand(shape, device=device, generator=g) * 0.1
        return steps.reshape(*shape[:2], -1, chunk).cumsum(3).reshape(shape).float().contiguous()

    return fill


def _tensors(kind: str, chunk: int) -> Any:
    def tensors(batch: int, heads: int, seq: int, dim: int) -> dict[str, Spec]:
        shape = (batch, seq, heads, dim)
        return {"Q": Spec(shape, scale=dim**-0.5), "K": Spec(shape), "V": Spec(shape),
                "G": Spec((batch, heads, seq), "float32", _decays(kind, chunk) if kind else "zeros", not kind),
                "O": Spec(shape, out=True)}

    return tensors


def _reference(kind: str, chunk: int) -> Any:
    """Of the first and the last batch and head: a chunk after another in float64."""
    def compute(t: Tensors, s: Sizes) -> list[tuple[str, Any, Any]]:
        import torch

        want = torch.zeros_like(t["O"], dtype=torch.float64)
        bound = torch.full_like(want, math.inf)
        mask = torch.ones((chunk, chunk), dtype=torch.bool, device=want.device).tril()
        for b, h in {(0, 0), (s["batch"] - 1, s["heads"] - 1)}:
            q, k, v = (t[n][b, :, h].double() for n in "QKV")
            g = t["G"][b, h].double()
            state = torch.zeros((s["dim"], s["dim"]), dtype=torch.float64, device=want.device)
            rough = state.clone()
            for c in range(0, s["seq"], chunk):
                x = slice(c, c + chunk)
                qc, kc, vc = q[x], k[x], v[x]
                up = torch.exp2(g[x]) if kind else torch.ones_like(g[x])
                d = torch.exp2(g[x][:, None] - g[x][None, :]).masked_fill(~mask, 0.0) if kind else mask.double()
                p = (qc @ kc.T) * d
                want[b, x, h] = up[:, None] * (qc @ state) + p @ vc
                size = up[:, None] * (qc.abs() @ rough) + ((qc.abs() @ kc.abs().T) * d) @ vc.abs()
                bound[b, x, h] = (3 * 2.0**-11 + s["seq"] * 2.0**-24) * size + 2.0**-10 * want[b, x, h].abs() + 1e-4
                end = torch.exp2(g[c + chunk - 1]) if kind else 1.0
                kd = kc * (torch.exp2(g[c + chunk - 1] - g[x])[:, None] if kind else 1.0)
                state, rough = end * state + kd.T @ vc, end * rough + kd.abs().T @ vc.abs()
        return [("O", want, bound)]

    return compute


def _flops(chunk: int) -> Any:
    return lambda batch, heads, seq, dim: 2.0 * batch * heads * seq * (2 * dim * dim + 2 * chunk * dim)


for _name, _kind, _chunk, _columns, _threads in (
        ("linear attention, chunks of 64", "", 64, 64, 128), ("linear attention, chunks of 64, 128 columns", "", 64, 128, 128),
        ("linear attention, 256 threads", "", 64, 128, 256), ("linear attention, chunks of 128", "", 128, 128, 256),
        ("retention", "retention", 64, 64, 128), ("retention, 128 columns", "retention", 64, 128, 128),
        ("gated linear attention", "gated", 64, 64, 128), ("gated linear attention, 256 threads", "gated", 64, 128, 256)):
    enter(Plain(_name, "recurrent", linear(_kind, _chunk, _columns, _threads), _tensors(_kind, _chunk), _reference(_kind,
                                                                                                                   _chunk),
                FULL, SMALL, _flops(_chunk)))


# ---- Mamba-2 ----------------------------------------------------------------------------------------------------------

SSM, SSM_SMALL = dict(batch=8, heads=64, seq=4096, dim=64, state=128), dict(batch=1, heads=2, seq=256, dim=64, state=64)


def chunk_state(batch: int, heads: int, seq: int, dim: int, state: int, chunk: int = 256, bk: int = 64) -> Any:
    """S[c] = sum over the steps of a chunk of B exp(A_last - A) dt X."""
    @T.prim_func
    def states(B: T.Tensor((batch, seq, state), "float16"), X: T.Tensor((batch, seq, heads, dim), "float16"),
               A: T.Tensor((batch, heads, seq), "float32"), W: T.Tensor((batch, heads, seq), "float32"),
               S: T.Tensor((batch, seq // chunk, heads, dim, state), "float16")):
        with T.Kernel(seq // chunk, heads, batch, threads=128) as (c, h, b):
            x, y = T.alloc_shared((bk, dim), "float16"), T.alloc_shared((bk, state), "float16")
            a, w = T.alloc_shared((bk,), "float32"), T.alloc_shared((bk,), "float32")
            f = T.alloc_fragment((dim, bk), "float16")
            s = T.alloc_fragment((dim, state), "float32")
            T.clear(s)
            last = A[b, h, c * chunk + chunk - 1]
            for k in T.Pipelined(chunk // bk, num_stages=3):
                at = c * chunk + k * bk
                T.copy(X[b, at:at + bk, h, :], x)
                T.copy(B[b, at:at + bk, :], y)
                T.copy(A[b, h, at:at + bk], a)
                T.copy(W[b, h, at:at + bk], w)
                for i, j in T.Parallel(dim, bk):
                    f[i, j] = x[j, i] * (T.exp2(last - a[j]) * w[j])
                T.gemm(f, y, s)
            T.copy(s, S[b, c, h, :, :])

    return states


def _state_reference(t: Tensors, s: Sizes) -> list[tuple[str, Any, Any]]:
    import torch

    chunk, n = 256, s["seq"] // 256
    want, size = torch.zeros_like(t["S"], dtype=torch.float64), torch.zeros_like(t["S"], dtype=torch.float64)
    for b in range(s["batch"]):
        a = t["A"][b].double().reshape(-1, n, chunk)
        w = torch.exp2(a[:, :, -1:] - a) * t["W"][b].double().reshape(-1, n, chunk)
        x = t["X"][b].double().reshape(n, chunk, s["heads"], s["dim"])
        y = t["B"][b].double().reshape(n, chunk, s["state"])
        want[b] = torch.einsum("hcl,clhd,cls->chds", w, x, y)
        size[b] = torch.einsum("hcl,clhd,cls->chds", w, x.abs(), y.abs())
    return [("S", want, (2 * 2.0**-11 + 256 * 2.0**-24) * size + 2.0**-10 * want.abs() + 1e-4)]


def chunk_scan(batch: int, heads: int, seq: int, dim: int, state: int, chunk: int = 256, bm: int = 64, bk: int = 64) -> Any:
    """O = (C B^T decayed and masked) X + C state of the chunk before."""
    @T.prim_func
    def scan(P: T.Tensor((batch, seq // chunk, chunk, chunk), "float16"), X: T.Tensor((batch, seq, heads, dim), "float16"),
             A: T.Tensor((batch, heads, seq), "float32"), W: T.Tensor((batch, heads, seq), "float32"),
             C: T.Tensor((batch, seq, state), "float16"), S: T.Tensor((batch, seq // chunk, heads, dim, state), "float16"),
             O: T.Tensor((batch, seq, heads, dim), "float16")):
        with T.Kernel(chunk // bm, seq // chunk, batch * heads, threads=128) as (bx, c, bh):
            b, h = bh // heads, bh % heads
            q, z = T.alloc_shared((bm, state), "float16"), T.alloc_shared((dim, state), "float16")
            p, x = T.alloc_shared((bm, bk), "float16"), T.alloc_shared((bk, dim), "float16")
            a, w = T.alloc_shared((bk,), "float32"), T.alloc_shared((bk,), "float32")
            own = T.alloc_fragment((bm,), "float32")
            f = T.alloc_fragment((bm, bk), "float16")
            o = T.alloc_fragment((bm, dim), "float32")
            m0 = c * chunk + bx * bm
            T.copy(A[b, h, m0:m0 + bm], own)
            T.copy(C[b, m0:m0 + bm, :], q)
            T.copy(S[b, c, h, :, :], z)
            T.gemm(q, z, o, transpose_B=True, clear_accum=True)
            for i, j in T.Parallel(bm, dim):
                o[i, j] *= T.exp2(own[i])
            for k in T.Pipelined(T.ceildiv((bx + 1) * bm, bk), num_stages=2):
                at = c * chunk + k * bk
                T.copy(P[b, c, bx * bm:(bx + 1) * bm, k * bk:(k + 1) * bk], p)
                T.copy(X[b, at:at + bk, h, :], x)
                T.copy(A[b, h, at:at + bk], a)
                T.copy(W[b, h, at:at + bk], w)
                for i, j in T.Parallel(bm, bk):
                    f[i, j] = T.if_then_else(bx * bm + i >= k * bk + j, p[i, j] * (T.exp2(own[i] - a[j]) * w[j]), 0.0)
                T.gemm(f, x, o)
            T.copy(o, O[b, m0:m0 + bm, h, :])

    return scan


def _scan_reference(t: Tensors, s: Sizes) -> list[tuple[str, Any, Any]]:
    import torch

    chunk, n = 256, s["seq"] // 256
    mask = torch.ones((chunk, chunk), dtype=torch.bool, device=t["O"].device).tril()
    want, size = torch.zeros_like(t["O"], dtype=torch.float64), torch.zeros_like(t["O"], dtype=torch.float64)
    for b in range(s["batch"]):
        for h in range(s["heads"]):
            a, w = (t[x][b, h].double().reshape(n, chunk) for x in "AW")
            x = t["X"][b, :, h].double().reshape(n, chunk, -1)
            c, z = t["C"][b].double().reshape(n, chunk, -1), t["S"][b, :, h].double()
            by = torch.exp2(a[:, :, None] - a[:, None, :]).masked_fill(~mask, 0.0) * w[:, None, :]
            p = t["P"][b].double() * by
            up = torch.exp2(a)[:, :, None]
            want[b, :, h] = (p @ x + up * (c @ z.transpose(1, 2))).reshape(s["seq"], -1)
            size[b, :, h] = (p.abs() @ x.abs() + up * (c.abs() @ z.abs().transpose(1, 2))).reshape(s["seq"], -1)
    return [("O", want, (2 * 2.0**-11 + 400 * 2.0**-24) * size + 2.0**-10 * want.abs() + 1e-4)]


def _ssm_decays(torch: Any, s: Sizes, g: Any, device: str) -> Any:
    shape = (s["batch"], s["heads"], s["seq"])
    return (-torch.rand(shape, device=device, generator=g) * 0.1).reshape(*shape[:2], -1, 256).cumsum(3).reshape(shape)


enter(Plain("chunk_state", "recurrent", chunk_state,
            lambda batch, heads, seq, dim, state: {
                "B": Spec((batch, seq, state)), "X": Spec((batch, seq, heads, dim)),
                "A": Spec((batch, heads, seq), "float32", _ssm_decays), "W": Spec((batch, heads, seq), "float32", "uniform"),
                "S": Spec((batch, seq // 256, heads, dim, state), out=True)},
            _state_reference, SSM, SSM_SMALL, lambda batch, heads, seq, dim, state: 2.0 * batch * heads * seq * dim * state),
      Plain("chunk_scan", "recurrent", chunk_scan,
            lambda batch, heads, seq, dim, state: {
                "P": Spec((batch, seq // 256, 256, 256), scale=0.1), "X": Spec((batch, seq, heads, dim)),
                "A": Spec((batch, heads, seq), "float32", _ssm_decays), "W": Spec((batch, heads, seq), "float32", "uniform"),
                "C": Spec((batch, seq, state)), "S": Spec((batch, seq // 256, heads, dim, state), scale=0.1),
                "O": Spec((batch, seq, heads, dim), out=True)},
            _scan_reference, SSM, SSM_SMALL,
            lambda batch, heads, seq, dim, state: 2.0 * batch * heads * seq * dim * (state + 160),
            binding="2.7 GB of tiles from L2 for 0.7 GB of tensors: 0.33 ms"))
