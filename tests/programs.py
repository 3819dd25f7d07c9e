"""The programs every execution must agree on: factories with shapes, inputs and an independent reference.

Each Case: program() builds the PrimFunc, inputs(rng) the arrays, reference(*inputs) the expected outputs in float64
(or exact integers), bound(*inputs) the allowed error, derived from dtype and accumulation length.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np

import tilelang.language as T

NP = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32, "int8": np.int8, "int32": np.int32,
      "float64": np.float64}
EPS = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24, "tf32": 2.0**-11, "int32": 0.0, "int8": 0.0}


@dataclass(frozen=True)
class Case:
    """One program at one size."""

    name: str
    program: Callable[[], Any]
    inputs: Callable[[np.random.Generator], list[np.ndarray]]
    reference: Callable[..., list[np.ndarray]]
    out_idx: list[int]
    bound: Callable[..., float]
    big: bool = False
    options: dict[str, Any] = field(default_factory=dict)


def normal(rng, shape, dtype):
    if dtype in ("int8", "int32"):
        return rng.integers(-8, 8, shape).astype(NP[dtype])
    return rng.standard_normal(shape).astype(np.float32).astype(NP[dtype])


def wide(x):
    return np.asarray(x).astype(np.float64)


def vector_add(n=1000, block=256, threads=128, dtype="float32", dynamic=False):
    m = T.dynamic("n") if dynamic else n

    @T.prim_func
    def add(A: T.Tensor((m,), dtype), B: T.Tensor((m,), dtype), C: T.Tensor((m,), dtype)):
        with T.Kernel(T.ceildiv(m, block), threads=threads) as bx:
            for i in T.Parallel(block):
                C[bx * block + i] = A[bx * block + i] + B[bx * block + i]

    return add


def elementwise2d(m=70, n=52, bm=32, bn=32, dtype="float16", threads=128):
    @T.prim_func
    def axpy(X: T.Tensor((m, n), dtype), Y: T.Tensor((m, n), dtype), Z: T.Tensor((m, n), dtype)):
        with T.Kernel(T.ceildiv(n, bn), T.ceildiv(m, bm), threads=threads) as (bx, by):
            for i, j in T.Parallel(bm, bn):
                Z[by * bm + i, bx * bn + j] = X[by * bm + i, bx * bn + j] * T.cast(2, dtype) + T.max(
                    Y[by * bm + i, bx * bn + j], T.cast(0, dtype))

    return axpy


def transpose(m=70, n=52, b=32, dtype="float32", threads=128):
    @T.prim_func
    def flip(A: T.Tensor((m, n), dtype), B: T.Tensor((n, m), dtype)):
        with T.Kernel(T.ceildiv(n, b), T.ceildiv(m, b), threads=threads) as (bx, by):
            S = T.alloc_shared((b, b), dtype)
            T.copy(A[by * b, bx * b], S)
            for i, j in T.Parallel(b, b):
                B[bx * b + i, by * b + j] = S[j, i]

    return flip


def copy_through_shared(m=70, n=52, bm=32, bn=32, dtype="float16", threads=128):
    @T.prim_func
    def move(A: T.Tensor((m, n), dtype), B: T.Tensor((m, n), dtype)):
        with T.Kernel(T.ceildiv(n, bn), T.ceildiv(m, bm), threads=threads) as (bx, by):
            S = T.alloc_shared((bm, bn), dtype)
            F = T.alloc_fragment((bm, bn), dtype)
            T.copy(A[by * bm, bx * bn], S)
            T.copy(S, F)
            T.copy(F, B[by * bm, bx * bn])

    return move


def row_reduce(m=37, n=100, rows=4, kind="sum", dtype="float32", threads=128):
    reduce = {"sum": T.reduce_sum, "max": T.reduce_max, "min": T.reduce_min}[kind]

    @T.prim_func
    def rows_(X: T.Tensor((m, n), dtype), Y: T.Tensor((m,), "float32")):
        with T.Kernel(T.ceildiv(m, rows), threads=threads) as bx:
            x = T.alloc_fragment((rows, n), "float32")
            s = T.alloc_fragment((rows,), "float32")
            T.copy(X[bx * rows, 0], x)
            reduce(x, s, dim=1)
            T.copy(s, Y[bx * rows])

    return rows_


def softmax(m=37, n=100, rows=4, dtype="float16", threads=128):
    @T.prim_func
    def soft(X: T.Tensor((m, n), dtype), Y: T.Tensor((m, n), dtype)):
        with T.Kernel(T.ceildiv(m, rows), threads=threads) as bx:
            x = T.alloc_fragment((rows, n), "float32")
            mx = T.alloc_fragment((rows,), "float32")
            s = T.alloc_fragment((rows,), "float32")
            T.copy(X[bx * rows, 0], x)
            T.reduce_max(x, mx, dim=1)
            for i, j in T.Parallel(rows, n):
                x[i, j] = T.exp(x[i, j] - mx[i])
            T.reduce_sum(x, s, dim=1)
            for i, j in T.Parallel(rows, n):
                x[i, j] = x[i, j] / s[i]
            T.copy(x, Y[bx * rows, 0])

    return soft


def gemm(m=100, n=72, k=88, bm=64, bn=64, bk=32, ta=False, tb=False, stages=2, dtype="float16", acc="float32",
         out="float16", threads=128, epilogue="none", swizzle=False, policy=None, dynamic=False):
    m_ = T.dynamic("m") if dynamic else m
    a_shape, a_tile = ((k, m_), (bk, bm)) if ta else ((m_, k), (bm, bk))
    b_shape, b_tile = ((n, k), (bn, bk)) if tb else ((k, n), (bk, bn))
    policy = T.GemmWarpPolicy.Square if policy is None else policy

    @T.prim_func
    def main(A: T.Tensor(a_shape, dtype), B: T.Tensor(b_shape, dtype), bias: T.Tensor((n,), acc),
             C: T.Tensor((m_, n), out)):
        with T.Kernel(T.ceildiv(n, bn), T.ceildiv(m_, bm), threads=threads) as (bx, by):
            As = T.alloc_shared(a_tile, dtype)
            Bs = T.alloc_shared(b_tile, dtype)
            Cf = T.alloc_fragment((bm, bn), acc)
            if swizzle:
                T.use_swizzle(2)
            T.clear(Cf)
            for ko in T.Pipelined(T.ceildiv(k, bk), num_stages=stages):
                if ta:
                    T.copy(A[ko * bk, by * bm], As)
                else:
                    T.copy(A[by * bm, ko * bk], As)
                if tb:
                    T.copy(B[bx * bn, ko * bk], Bs)
                else:
                    T.copy(B[ko * bk, bx * bn], Bs)
                T.gemm(As, Bs, Cf, transpose_A=ta, transpose_B=tb, policy=policy)
            if epilogue == "relu":
                for i, j in T.Parallel(bm, bn):
                    Cf[i, j] = T.max(Cf[i, j], 0)
            if epilogue == "bias":
                for i, j in T.Parallel(bm, bn):
                    Cf[i, j] = T.max(Cf[i, j] + bias[bx * bn + j], 0)
            T.copy(Cf, C[by * bm, bx * bn])

    return main


@T.macro
def absorb(S, P, acc, top, before, rescale, total, row, scale):
    """The softmax of one more tile of scores S (rows, keys): raises `top`, rescales the sums, leaves the weights in P."""
    T.copy(top, before)
    T.reduce_max(S, top, dim=1, clear=False)
    for i in T.Parallel(S.shape[0]):
        rescale[i] = T.exp2((before[i] - top[i]) * scale)
    for i, j in T.Parallel(S.shape[0], S.shape[1]):
        S[i, j] = T.exp2((S[i, j] - top[i]) * scale)
    T.reduce_sum(S, row, dim=1)
    for i in T.Parallel(S.shape[0]):
        total[i] = total[i] * rescale[i] + row[i]
    for i, j in T.Parallel(acc.shape[0], acc.shape[1]):
        acc[i, j] *= rescale[i]
    T.copy(S, P)


def attention(batch=1, heads=2, seq=100, dim=32, causal=False, bm=64, bn=64, stages=2, dtype="float16", threads=128):
    scale, shape = dim**-0.5 * 1.44269504, (batch, seq, heads, dim)

    @T.prim_func
    def attend(Q: T.Tensor(shape, dtype), K: T.Tensor(shape, dtype), V: T.Tensor(shape, dtype),
               O: T.Tensor(shape, dtype)):
        with T.Kernel(T.ceildiv(seq, bm), heads, batch, threads=threads) as (bx, h, b):
            Qs = T.alloc_shared((bm, dim), dtype)
            Ks = T.alloc_shared((bn, dim), dtype)
            Vs = T.alloc_shared((bn, dim), dtype)
            P = T.alloc_fragment((bm, bn), "float32")
            Ph = T.alloc_fragment((bm, bn), dtype)
            Of = T.alloc_fragment((bm, dim), "float32")
            mx, m0, r, total, row = [T.alloc_fragment((bm,), "float32") for _ in (0, 1, 2, 3, 4)]
            T.copy(Q[b, bx * bm:(bx + 1) * bm, h, :], Qs)
            T.clear(Of)
            T.clear(total)
            T.fill(mx, -T.infinity("float32"))
            for k in T.Pipelined(T.ceildiv((bx + 1) * bm, bn) if causal else T.ceildiv(seq, bn), num_stages=stages):
                T.copy(K[b, k * bn:(k + 1) * bn, h, :], Ks)
                for i, j in T.Parallel(bm, bn):
                    ok = (k * bn + j < seq) and ((not causal) or bx * bm + i >= k * bn + j)
                    P[i, j] = T.if_then_else(ok, 0, -T.infinity("float32"))
                T.gemm(Qs, Ks, P, transpose_B=True)
                T.copy(V[b, k * bn:(k + 1) * bn, h, :], Vs)
                absorb(P, Ph, Of, mx, m0, r, total, row, scale)
                T.gemm(Ph, Vs, Of)
            for i, j in T.Parallel(bm, dim):
                Of[i, j] /= total[i]
            T.copy(Of, O[b, bx * bm:(bx + 1) * bm, h, :])

    return attend


# ---- references and cases -----------------------------------------------------------------------------------------


def product_bound(a, b, dtype_in, acc, out, extra=0.0):
    """Allowed error of a @ b (operands in float64), k products summed in acc, one rounding to out.

    Each addition rounds by at most EPS[acc] of a partial sum, bounded by |a| @ |b|; the roundings are independent, so
    they grow with sqrt(k) (factor 4: four standard deviations).  float32 operands are rounded to tf32 first.
    """
    k = a.shape[1]
    magnitude = float((np.abs(a) @ np.abs(b)).max(initial=0.0)) + extra
    rounding = 4 * EPS[acc] * k**0.5 * magnitude + EPS[out] * (float(np.abs(a @ b).max(initial=0.0)) + extra)
    if dtype_in == "float32":
        rounding += 4 * 2 * EPS["tf32"] * float((a**2 @ b**2).max(initial=0.0)) ** 0.5
    return rounding


def gemm_case(name, **o):
    d = dict(m=100, n=72, k=88, ta=False, tb=False, dtype="float16", acc="float32", out="float16", epilogue="none")
    d.update({k: v for k, v in o.items() if k in d})
    m, n, k, ta, tb, dt, acc, out, ep = (d[x] for x in ("m", "n", "k", "ta", "tb", "dtype", "acc", "out", "epilogue"))

    def inputs(rng):
        return [normal(rng, (k, m) if ta else (m, k), dt), normal(rng, (n, k) if tb else (k, n), dt),
                normal(rng, (n,), acc)]

    def reference(a, b, bias):
        a, b = wide(a).T if ta else wide(a), wide(b).T if tb else wide(b)
        c = a @ b
        if ep == "relu":
            c = np.maximum(c, 0)
        if ep == "bias":
            c = np.maximum(c + wide(bias), 0)
        return [c]

    def bound(a, b, bias):
        if out == "int32":
            return 0.0
        return product_bound(wide(a).T if ta else wide(a), wide(b).T if tb else wide(b), dt, acc, out,
                             float(np.abs(wide(bias)).max()) if ep == "bias" else 0.0)

    return Case(f"gemm_{name}", lambda: gemm(**o), inputs, reference, [3], bound)


def attention_case(name, **o):
    d = dict(batch=1, heads=2, seq=100, dim=32, causal=False, dtype="float16")
    d.update({k: v for k, v in o.items() if k in d})
    shape = (d["batch"], d["seq"], d["heads"], d["dim"])

    def reference(q, k, v):
        q, k, v = (wide(x).transpose(0, 2, 1, 3) for x in (q, k, v))
        s = q @ k.transpose(0, 1, 3, 2) * d["dim"]**-0.5
        if d["causal"]:
            s = np.where(np.tril(np.ones((d["seq"], d["seq"]), bool)), s, -np.inf)
        p = np.exp(s - s.max(-1, keepdims=True))
        return [(p / p.sum(-1, keepdims=True) @ v).transpose(0, 2, 1, 3)]

    # P is rounded to the input type before the second product; the sum of rows is not.
    return Case(f"attention_{name}", lambda: attention(**o), lambda rng: [normal(rng, shape, d["dtype"]) for _ in range(3)],
                reference, [3], lambda q, k, v: 6 * EPS[d["dtype"]] * float(np.abs(wide(v)).max()))


def cases() -> list[Case]:
    out: list[Case] = []
    for n, dt, dyn in ((1000, "float32", False), (256, "float16", False), (777, "bfloat16", False), (515, "int32", False),
                       (1000, "float32", True), (1, "float32", True)):
        out.append(Case(f"add_{n}_{dt}{'_dyn' if dyn else ''}",
                        lambda n=n, dt=dt, dyn=dyn: vector_add(n, dtype=dt, dynamic=dyn),
                        lambda rng, n=n, dt=dt: [normal(rng, (n,), dt), normal(rng, (n,), dt)],
                        lambda a, b: [wide(a) + wide(b)], [2],
                        lambda a, b, dt=dt: EPS[dt] * float(np.abs(wide(a) + wide(b)).max())))
    for m, n, dt in ((70, 52, "float16"), (64, 64, "float32"), (33, 7, "bfloat16")):
        out.append(Case(f"axpy_{m}x{n}_{dt}", lambda m=m, n=n, dt=dt: elementwise2d(m, n, dtype=dt),
                        lambda rng, m=m, n=n, dt=dt: [normal(rng, (m, n), dt), normal(rng, (m, n), dt)],
                        lambda x, y: [wide(x) * 2 + np.maximum(wide(y), 0)], [2],
                        lambda x, y, dt=dt: 3 * EPS[dt] * float((2 * np.abs(wide(x)) + np.abs(wide(y))).max())))
        out.append(Case(f"transpose_{m}x{n}_{dt}", lambda m=m, n=n, dt=dt: transpose(m, n, dtype=dt),
                        lambda rng, m=m, n=n, dt=dt: [normal(rng, (m, n), dt)], lambda a: [wide(a).T], [1], lambda a: 0.0))
        out.append(Case(f"copy_{m}x{n}_{dt}", lambda m=m, n=n, dt=dt: copy_through_shared(m, n, dtype=dt),
                        lambda rng, m=m, n=n, dt=dt: [normal(rng, (m, n), dt)], lambda a: [wide(a)], [1], lambda a: 0.0))
    for kind, fn in (("sum", np.sum), ("max", np.max), ("min", np.min)):
        out.append(Case(f"reduce_{kind}", lambda kind=kind: row_reduce(kind=kind),
                        lambda rng: [normal(rng, (37, 100), "float32")],
                        lambda x, fn=fn: [fn(wide(x), axis=1)], [1],
                        lambda x: 4 * EPS["float32"] * float(np.abs(wide(x)).sum(1).max())))
    for m, n, dt in ((37, 100, "float16"), (8, 1000, "float32")):
        out.append(Case(f"softmax_{m}x{n}_{dt}", lambda m=m, n=n, dt=dt: softmax(m, n, dtype=dt),
                        lambda rng, m=m, n=n, dt=dt: [normal(rng, (m, n), dt)],
                        lambda x: [np.exp(wide(x) - wide(x).max(1, keepdims=True)) /
                                   np.exp(wide(x) - wide(x).max(1, keepdims=True)).sum(1, keepdims=True)], [1],
                        lambda x, dt=dt: 2 * EPS[dt] + 64 * EPS["float32"]))
    for ta in (False, True):
        for tb in (False, True):
            out.append(gemm_case(f"{'T' if ta else 'N'}{'T' if tb else 'N'}", ta=ta, tb=tb))
    for s in (0, 1, 3, 4):
        out.append(gemm_case(f"stages{s}", stages=s))
    out += [gemm_case("bf16", dtype="bfloat16", out="bfloat16"), gemm_case("f32", dtype="float32", out="float32"),
            gemm_case("f32_TT", dtype="float32", out="float32", ta=True, tb=True),
            gemm_case("s8", dtype="int8", acc="int32", out="int32", bk=64, tb=True),
            gemm_case("s8_NN", dtype="int8", acc="int32", out="int32", bk=64),
            gemm_case("relu", epilogue="relu"), gemm_case("bias", epilogue="bias"),
            gemm_case("swizzle", swizzle=True, m=200, n=200),
            gemm_case("odd", m=67, n=45, k=51), gemm_case("dyn", dynamic=True),
            gemm_case("aligned", m=128, n=128, k=128, bm=128, bn=128),
            gemm_case("fullrow", policy=T.GemmWarpPolicy.FullRow), gemm_case("fullcol", policy=T.GemmWarpPolicy.FullCol),
            gemm_case("one_iteration", k=16), gemm_case("f16acc", acc="float16", k=32),
            gemm_case("256threads", threads=256, m=128, n=128, bm=128, bn=128)]
    out += [attention_case("plain"), attention_case("causal", causal=True), attention_case("d64", dim=64, seq=128, heads=1),
            attention_case("bf16", dtype="bfloat16"), attention_case("tiles128", bm=128, bn=64, seq=130, heads=1, causal=True)]
    return out


def run_case(case: Case, target: Any, backend: str | None = None, seed: int = 0) -> tuple[float, float]:
    """Compile and run a case; (largest error, bound).  NaN counts as infinite error."""
    import tilelang

    rng = np.random.default_rng(seed)
    inputs = case.inputs(rng)
    kernel = tilelang.compile(case.program(), out_idx=case.out_idx, target=target, execution_backend=backend)
    args: list[Any] = inputs
    if target == "cuda":
        import torch

        args = [_to_torch(x, torch).cuda() for x in inputs]
    got = kernel(*args)
    got = got if isinstance(got, list) else [got]
    got = [_to_numpy(g) for g in got]
    want = case.reference(*inputs)
    error = 0.0
    for g, w in zip(got, want):
        assert g.shape == w.shape, (g.shape, w.shape)
        d = np.abs(wide(g) - w)
        error = max(error, float(np.where(np.isnan(d), np.inf, d).max(initial=0.0)))
    return error, case.bound(*inputs)


def _to_torch(x, torch):
    if x.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(np.ascontiguousarray(x))


def _to_numpy(x):
    if hasattr(x, "cpu"):
        x = x.detach().cpu()
        if str(x.dtype) == "torch.bfloat16":
            return x.float().numpy()
        return x.numpy()
    return np.asarray(x)
