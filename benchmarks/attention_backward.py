"""The gradients of flash_attention beside torch's, on one GPU; without one, what is predicted.

    python benchmarks/attention_backward.py [--only d128] [--more] [--brief] [--dtype bfloat16] [--rounds 5] [--out FILE.json]
    python benchmarks/attention_backward.py --compile [--only d128]      # no GPU: registers, spills, predicted microseconds

Rows of a shape: ours with dQ by blocks of its own ("deterministic") and by atomics ("atomics"), cuDNN's and torch's flash
backward; then forward and backward through autograd ("ours, both", "cudnn, both", "flash, both"), and forward alone.  --more:
further shapes; --brief: without atomics and flash.  Gradients of one kv head are compared with float64 first; then all take
turns while the device has calls queued, and the median over the rounds counts.  TFLOP/s: of five GEMMs (seven with the forward
pass, two of it alone) of the scores that the mask shows.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a checkout works without being installed

import numpy as np

from tilelang.library import flash_attention, flash_attention_backward


@dataclass(frozen=True)
class Shape:
    """batch, query heads, kv heads, queries, head dimension, mask, keys (None: as many as queries)."""

    batch: int
    heads: int
    kv_heads: int
    seq: int
    dim: int
    causal: bool
    seq_k: int | None = None

    keys = property(lambda self: self.seq_k or self.seq)

    def flops(self, gemms: int = 5) -> float:
        """Of `gemms` products of the scores that the mask shows."""
        return 2.0 * gemms * self.batch * self.heads * self.seq * self.keys * self.dim / (2 if self.causal else 1)


SHAPES = {f"{name}{', causal' if causal else ''}": Shape(*sizes, causal) for name, sizes in {
    "d128 4k": (4, 16, 16, 4096, 128), "d128 8k": (2, 16, 16, 8192, 128), "d128 16k": (1, 16, 16, 16384, 128),
    "d64 4k": (4, 16, 16, 4096, 64), "d128 GQA 4k": (4, 16, 2, 4096, 128), "d256 4k": (4, 8, 8, 4096, 256)}.items()
    for causal in (False, True)}
MORE = {f"{name}{', causal' if causal else ''}": Shape(*sizes, causal) for name, sizes in {
    "d96 4k": (4, 16, 16, 4096, 96), "d128 1000": (8, 16, 16, 1000, 128), "d128 3000": (4, 16, 16, 3000, 128),
    "d128 2047": (4, 16, 16, 2047, 128), "d128 32k": (1, 8, 8, 32768, 128), "d128 MQA": (4, 16, 1, 4096, 128),
    "d128 64:8": (2, 64, 8, 4096, 128), "d128 32:8 8k": (1, 32, 8, 8192, 128), "d64 64:8": (1, 64, 8, 4096, 64),
    "d64 2k": (8, 16, 16, 2048, 64), "d80 4k": (4, 16, 16, 4096, 80), "d32 4k": (4, 16, 16, 4096, 32)}.items()
    for causal in (False, True)}
MORE["d128 1k of 4k"] = Shape(4, 16, 16, 1024, 128, False, 4096)
MORE["d128 4k of 1k"] = Shape(4, 16, 16, 4096, 128, False, 1024)
MHZ = 1700.0  # the clock of predictions
AHEAD = 2_000_000  # cycles, about 1 ms: training queues its calls too
PEAK = 800e12  # FLOP/s that dense GEMMs reach at the clock that they run at


def compiled(shape: Shape, dtype: str, deterministic: bool) -> list[dict[str, Any]]:
    """What the compiler says of each kernel of a shape for sm_90a."""
    from tilelang.jit.report import predicted
    from tilelang.library.attention import backward as of
    from tilelang.library.attention.problem import attention_problem
    from tilelang.library.attention.tile_cost import machine_of
    from tilelang.target import Target

    q, k = (np.broadcast_to(np.zeros((), np.float16), (shape.batch, *n, shape.dim))
            for n in ((shape.seq, shape.heads), (shape.keys, shape.kv_heads)))
    at = of.Place(Target({"kind": "cuda", "arch": "sm_90a"}))
    tensors = {n: np.lib.stride_tricks.as_strided(x, x.shape, [2 * s for s in of.compact(x.shape)])
               for n, x in {"q": q, "k": k, "v": k, "out": q, "grad_out": q}.items()}
    p = attention_problem({**tensors, **dict.fromkeys(("out", "cu_seqlens_q", "cu_seqlens_k"))}, True, causal=shape.causal,
                          window=None, layout="bshd", scale=None, with_lse=False)
    form, _ = of.backward_form(p, machine_of(at.target), tensors, at, deterministic, of.PLAIN)
    kernel = of.fast_kernel(at, of._program, form, at.target.limits.sm_count)
    return [{**{n: x.get(n) for n in ("name", "registers", "spills", "serialised")},
             "us": (predicted(at.target, x, MHZ) or {"us": 0.0})["us"]} for x in kernel.report_data["kernels"]]


def show_compiled(shapes: dict[str, Shape], dtype: str) -> int:
    bad = 0
    for name, shape in shapes.items():
        for deterministic in (True, False):
            found = compiled(shape, dtype, deterministic)
            bad += sum(bool(x["spills"] or x["serialised"]) for x in found)
            us = [x["us"] for x in found]
            floor = shape.flops() / PEAK * 1e6
            print(f"{name:22} {'deterministic' if deterministic else 'atomics':14} registers "
                  f"{[x['registers'] for x in found]}, spills {[x['spills'] for x in found]}, predicted at {MHZ:.0f} MHz "
                  f"{' + '.join(f'{u:.0f}' for u in us)} = {sum(us):.0f} us, five GEMMs at 800 TFLOP/s {floor:.0f} us",
                  flush=True)
    return bad


def exact(q: Any, k: Any, v: Any, do: Any, causal: bool) -> Any:
    """(dQ of the query heads of the last kv head of the first batch, dK, dV) in float64: blocks of queries compute dQ on their
    own."""
    group = q.shape[2] // k.shape[2]
    x = [t[0, :, -group:].double().transpose(0, 1) for t in (q, do)]
    kv = [t[0, :, -1:].double().transpose(0, 1).requires_grad_() for t in (k, v)]
    s = x[0].requires_grad_() @ kv[0].transpose(1, 2) * q.shape[-1]**-0.5
    if causal:
        s = s.masked_fill(torch.ones_like(s[0], dtype=torch.bool).triu(1), -torch.inf)
    return torch.autograd.grad(torch.softmax(s, -1) @ kv[1], (x[0], *kv), x[1])


def peer(backend: str, q: Any, k: Any, v: Any, shape: Shape) -> Any:
    """torch's attention by one backend, of tensors (batch, heads, tokens, dim)."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(getattr(SDPBackend, backend)):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=shape.causal,
                                                                enable_gqa=shape.heads != shape.kv_heads)


def calls(shape: Shape, dtype: Any, brief: bool) -> tuple[dict[str, tuple[Any, int]], float]:
    """(name -> (call, GEMMs), largest error of the gradients beside that of the peers): all rows of a shape."""
    q, do = (torch.randn(shape.batch, shape.seq, shape.heads, shape.dim, device="cuda", dtype=dtype) for _ in range(2))
    k, v = (torch.randn(shape.batch, shape.keys, shape.kv_heads, shape.dim, device="cuda", dtype=dtype) for _ in range(2))
    out, lse = flash_attention(q, k, v, causal=shape.causal, return_lse=True)
    made: dict[str, tuple[Any, int]] = {}
    made["ours, forward"] = (lambda: flash_attention(q, k, v, causal=shape.causal), 2)
    for name, fixed in (("deterministic", True), ("atomics", False))[:1 if brief else 2]:
        made[name] = (lambda fixed=fixed: flash_attention_backward(q, k, v, out, lse, do, causal=shape.causal,
                                                                   deterministic=fixed), 5)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    turned = [x.transpose(1, 2).detach().requires_grad_() for x in (q, k, v)]
    gradient = do.transpose(1, 2)
    made["ours, both"] = (lambda: torch.autograd.grad(flash_attention(*leaves, causal=shape.causal), leaves, do), 7)
    wants, errors = exact(q, k, v, do, shape.causal), {}
    for name, backend in (("cudnn", "CUDNN_ATTENTION"), ("flash", "FLASH_ATTENTION"))[:1 if brief else 2]:
        try:
            y = peer(backend, *turned, shape)
        except RuntimeError as e:  # the backend does not take the shape
            print(f"{name}: {str(e)[:80]}", flush=True)
            continue
        made[name] = (lambda y=y: torch.autograd.grad(y, turned, gradient, retain_graph=True), 5)
        still = [x.detach() for x in turned]
        made[f"{name}, forward"] = (lambda b=backend, x=still: peer(b, *x, shape), 2)
        made[f"{name}, both"] = (lambda b=backend: torch.autograd.grad(peer(b, *turned, shape), turned, gradient), 7)
        errors[name] = errors_of(made[name][0](), wants)
    found = [made[n][0]() for n in ("deterministic", "atomics") if n in made]
    own = [max(x) for x in zip(*(errors_of([g.transpose(1, 2) for g in y], wants) for y in found))]
    return made, max((o / t for o, t in zip(own, min(errors.values(), default=own))), default=1.0)


def errors_of(gradients: Any, wants: Any) -> list[float]:
    """Root mean square errors of dQ, dK and dV, (batch, heads, tokens, dim), beside `exact`."""
    return [float((x[0, -w.shape[0]:].double() - w).square().mean().sqrt()) for x, w in zip(gradients, wants)]


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--only", default="", help="shapes whose names start with one of these")
    options.add_argument("--more", action="store_true", help="further shapes in place of the listed ones")
    options.add_argument("--brief", action="store_true", help="without atomics and torch's flash backward")
    options.add_argument("--dtype", default="float16")
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--compile", action="store_true", help="no GPU: registers, spills, predicted times")
    options.add_argument("--out", default="", help="write the rows as JSON")
    o = options.parse_args()
    shapes = MORE if o.more else SHAPES
    names = [n for n in shapes if not o.only or n.startswith(tuple(o.only.split(",")))]
    if o.compile:
        return 1 if show_compiled({n: shapes[n] for n in names}, o.dtype) else 0
    from suite.measuring import CudaMeter

    meter, rows, wrong = CudaMeter(0.03), {}, 0
    for name in names:
        made, error = calls(shapes[name], getattr(torch, o.dtype), o.brief)
        wrong += error > 1.5
        ready = {n: meter.prepare(fn) for n, (fn, _) in made.items()}
        times: dict[str, list[float]] = {n: [] for n in ready}
        for _ in range(o.rounds):
            for n, fn in ready.items():
                times[n].append(meter.window(fn, 15.0, AHEAD).ms)
        for n, (_, gemms) in made.items():
            ms = median(times[n])
            rows[f"{name}: {n}"] = {"ms": ms, "tflops": shapes[name].flops(gemms) / ms * 1e-9}
            print(f"{name:22} {n:16} {ms:8.3f} ms {rows[f'{name}: {n}']['tflops']:6.0f} TFLOP/s", flush=True)
        print(f"{name:22} error of dQ, dK and dV beside torch's: {error:.2f}" + ("  WRONG" if error > 1.5 else ""), flush=True)
    if o.out:
        record = {"what": "attention backward", "dtype": o.dtype, "device": torch.cuda.get_device_name(),
                  "torch": torch.__version__, "rows": rows}
        Path(o.out).write_text(json.dumps(record, indent=1) + "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    import torch
    raise SystemExit(main())
