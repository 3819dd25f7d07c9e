"""Plain attention with a function of the score beside attention without one, on one GPU.

    python benchmarks/attention_scores.py [--seq 4096] [--dim 128] [--fast] [--only softcap,sigmoid] [--out FILE.json]

Each program has tiles of 128 queries and 128 keys, 2 stages and 256 threads.  none: softmax.  softcap: softmax of
30 tanh(score / 30).  alibi: softmax of score + slope * distance.  sigmoid: weights sigmoid(score - log n) without a sum.
tanh: weights tanh(score).  Results of two heads are compared with float64 first; then all programs take turns in bursts, and
the median over the rounds counts.  ratio: the rate beside "none".
--fast: with tl.enable_fast_math.  Needs torch with CUDA; --compile only compiles, and needs no GPU.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a checkout works without being installed

import tilelang
import tilelang.language as T

LOG2E = math.log2(math.e)
CAP = 30.0
Score = Callable[..., Any]
SOFTMAX: dict[str, Score] = {
    "none": lambda s, bias: s, "softcap": lambda s, bias: CAP * T.tanh(s / CAP), "alibi": lambda s, bias: s + bias,
    "softcap (s * (1/30))": lambda s, bias: CAP * T.tanh(s * (1 / CAP)),
}
WEIGHTS: dict[str, Score] = {
    "sigmoid": lambda s, n: T.sigmoid(s - math.log(n)),
    "sigmoid 1/(1+exp(-s))": lambda s, n: 1.0 / (1.0 + T.exp(math.log(n) - s)), "tanh": lambda s, n: T.tanh(s),
}


def program(kind: str, heads: int, seq: int, dim: int, dtype: str, bm: int = 128, bn: int = 128, stages: int = 2) -> Any:
    """O (heads, seq, dim) of Q, K, V and the slopes of the heads."""
    scale, shape, softmax = dim**-0.5, (heads, seq, dim), kind in SOFTMAX

    @T.prim_func
    def attend(Q: T.Tensor(shape, dtype), K: T.Tensor(shape, dtype), V: T.Tensor(shape, dtype),
               slopes: T.Tensor((heads,), "float32"), O: T.Tensor(shape, dtype)):
        with T.Kernel(T.ceildiv(seq, bm), heads, threads=256) as (bx, h):
            Qs = T.alloc_shared((bm, dim), dtype)
            Ks = T.alloc_shared((bn, dim), dtype)
            Vs = T.alloc_shared((bn, dim), dtype)
            S = T.alloc_fragment((bm, bn), "float32")
            P = T.alloc_fragment((bm, bn), dtype)
            acc = T.alloc_fragment((bm, dim), "float32")
            top, before, rescale, total, row = [T.alloc_fragment((bm,), "float32") for _ in range(5)]
            T.copy(Q[h, bx * bm:(bx + 1) * bm, :], Qs)
            T.clear(acc)
            T.clear(total)
            T.fill(top, -1e30)
            for k in T.Pipelined(T.ceildiv(seq, bn), num_stages=stages):
                T.copy(K[h, k * bn:(k + 1) * bn, :], Ks)
                T.gemm(Qs, Ks, S, transpose_B=True, clear_accum=True)
                if softmax:
                    if kind != "none":
                        for i, j in T.Parallel(bm, bn):
                            distance = T.cast(k * bn + j - bx * bm - i, "float32")
                            S[i, j] = SOFTMAX[kind](S[i, j] * scale, slopes[h] * distance)
                    T.copy(top, before)
                    T.reduce_max(S, top, dim=1, clear=False)
                    by = LOG2E * (scale if kind == "none" else 1.0)
                    for i in T.Parallel(bm):
                        rescale[i] = T.exp2(before[i] * by - top[i] * by)
                    for i, j in T.Parallel(bm, bn):
                        S[i, j] = T.exp2(S[i, j] * by - top[i] * by)
                    T.reduce_sum(S, row, dim=1)
                    for i in T.Parallel(bm):
                        total[i] = total[i] * rescale[i] + row[i]
                    for i, j in T.Parallel(bm, dim):
                        acc[i, j] *= rescale[i]
                else:
                    for i, j in T.Parallel(bm, bn):
                        S[i, j] = WEIGHTS[kind](S[i, j] * scale, seq)
                T.copy(V[h, k * bn:(k + 1) * bn, :], Vs)
                T.copy(S, P)
                T.gemm(P, Vs, acc)
            if softmax:
                for i, j in T.Parallel(bm, dim):
                    acc[i, j] = acc[i, j] / total[i]
            T.copy(acc, O[h, bx * bm:(bx + 1) * bm, :])

    return attend


def reference(kind: str, q: Any, k: Any, v: Any, slopes: Any) -> tuple[Any, Any]:
    """(float64 result, the result of absolute values, which scales the error) of the heads given."""
    import torch

    s = q.double() @ k.double().transpose(-1, -2) * q.shape[-1]**-0.5
    at = torch.arange(q.shape[1], device=q.device, dtype=torch.float64)
    if kind.startswith("softcap"):
        s = CAP * torch.tanh(s / CAP)
    elif kind == "alibi":
        s = s + slopes.double()[:, None, None] * (at[None, :] - at[:, None])
    if kind in SOFTMAX:
        p = torch.softmax(s, -1)
    else:
        p = torch.tanh(s) if kind == "tanh" else torch.sigmoid(s - math.log(q.shape[1]))
    return p @ v.double(), p.abs() @ v.double().abs()


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("heads", 64), ("seq", 4096), ("dim", 128), ("rounds", 7)):
        options.add_argument(f"--{name}", type=int, default=default)
    options.add_argument("--dtype", default="float16")
    options.add_argument("--ms", type=float, default=30.0, help="of a window")
    options.add_argument("--only", default="", help="programs beside none whose names start with one of these")
    options.add_argument("--fast", action="store_true", help="with tl.enable_fast_math")
    options.add_argument("--compile", action="store_true", help="only compile")
    options.add_argument("--out", default="", help="write the rows as JSON")
    o = options.parse_args()
    config = {"tl.enable_fast_math": True} if o.fast else {}
    kinds = [k for k in (*SOFTMAX, *WEIGHTS) if k == "none" or not o.only or k.startswith(tuple(o.only.split(",")))]
    target: Any = {"kind": "cuda", "arch": "sm_90a"} if o.compile else "auto"
    kernels = {k: tilelang.compile(program(k, o.heads, o.seq, o.dim, o.dtype), target=target, pass_configs=config)
               for k in kinds}
    if o.compile:
        for kind, kernel in kernels.items():
            print(f"{kind:24} {kernel.resource_usage}")
        return 0
    import torch
    from suite.measuring import CudaMeter

    torch.manual_seed(0)
    kind_of = getattr(torch, o.dtype)
    q, k, v = (torch.randn(o.heads, o.seq, o.dim, device="cuda", dtype=kind_of) for _ in range(3))
    slopes = 2.0**(-8 * (torch.arange(o.heads, device="cuda") + 1.0) / o.heads)
    meter, rows, ready, wrong = CudaMeter(0.03), {}, {}, 0
    for kind, kernel in kernels.items():
        out = torch.empty_like(q)
        kernel(q, k, v, slopes, out)
        heads = [0, o.heads - 1]
        want, size = reference(kind, q[heads], k[heads], v[heads], slopes[heads])
        unit = 2.0**-8 if o.dtype == "bfloat16" else 2.0**-11
        of_bound = float(((out[heads].double() - want).abs() / (2.0 * unit * size + 2.0**-24)).max())
        rows[kind] = {"of_bound": of_bound}
        wrong += of_bound > 1.0
        ready[kind] = meter.prepare(lambda kernel=kernel, out=out: kernel(q, k, v, slopes, out))
    times: dict[str, list[float]] = {kind: [] for kind in kernels}
    for _ in range(o.rounds):
        for kind in kernels:
            times[kind].append(meter.window(ready[kind], o.ms).ms)
    flops = 4 * o.heads * o.seq**2 * o.dim
    for kind, row in rows.items():
        ms = median(times[kind])
        row.update(ms=ms, tflops=flops / ms * 1e-9, ratio=median(times["none"]) / ms)
        print(f"{kind:24} {ms:8.3f} ms {row['tflops']:6.0f} TFLOP/s  ratio {row['ratio']:.3f}  of bound {row['of_bound']:.2f}"
              + ("" if row["of_bound"] <= 1 else "  WRONG"))
    if o.out:
        record = {"what": "attention with a function of the score", "heads": o.heads, "seq": o.seq, "dim": o.dim,
                  "dtype": o.dtype, "fast_math": o.fast, "device": torch.cuda.get_device_name(), "rows": rows}
        Path(o.out).write_text(json.dumps(record, indent=1) + "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
