"""Functions with gradients, and GEMMs with epilogues, beside torch's: forward, and forward with backward, on one GPU.

    python benchmarks/training.py [--only rms_norm,swiglu] [--out FILE.json]
    python benchmarks/training.py --floors     # without a GPU: bytes, FLOPs, floors, kernels, registers and spills

Results and gradients are compared with float64 first: ours may be 1.5 times as far off as torch's.  Then all take turns in
bursts, replayed from graphs, and the median over the rounds counts.  host: what the host takes to queue a call.
compiled: torch's function by torch.compile.  floor: the larger of the bytes
that must travel over 4.0 TB/s and the FLOPs over 800 TFLOP/s.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402

import tilelang.language as T  # noqa: E402
from tilelang.library import (  # noqa: E402
    cross_entropy, fused_matmul, grouped_matmul, layer_norm, linear_cross_entropy, rms_norm, softmax, swiglu)

MEMORY, PEAK = 4.0e12, 800e12


@dataclass(frozen=True)
class Case:
    """shapes: of the tensors.  ours, theirs: of them and of `more`, tensors without a gradient.  moved, flops: forward, and
    backward alone; of forward only where there is no gradient."""

    shapes: tuple[tuple[int, ...], ...]
    ours: Callable[..., Any]
    theirs: Callable[..., Any]
    moved: tuple[float, ...]
    flops: tuple[float, ...] = (0.0, 0.0)
    dtype: torch.dtype = torch.bfloat16
    more: tuple[torch.Tensor, ...] = ()

    def floor(self, backward: bool) -> float:
        """Microseconds of forward, or of forward and backward."""
        each = [max(b / MEMORY, f / PEAK) for b, f in zip(self.moved, self.flops)]
        return sum(each[:1 + backward]) * 1e6


def of_rows(m: int, n: int, dtype: torch.dtype = torch.bfloat16) -> dict[str, Case]:
    x = m * n * (4 if dtype == torch.float32 else 2)
    name, short = f"{m}x{n}", "f32" if dtype == torch.float32 else "bf16"
    return {
        f"rms_norm {name} {short}": Case(((m, n), (n,)), rms_norm, lambda x, w: F.rms_norm(x, (n,), w, 1e-6),
                                         (2 * x, 3 * x), dtype=dtype),
        f"layer_norm {name} {short}": Case(((m, n), (n,), (n,)), layer_norm, lambda x, w, b: F.layer_norm(x, (n,), w, b),
                                           (2 * x, 3 * x), dtype=dtype),
        f"softmax {name} {short}": Case(((m, n),), softmax, lambda x: x.softmax(-1), (2 * x, 3 * x), dtype=dtype),
        f"swiglu {name} {short}": Case(((m, 2 * n),), swiglu, lambda x: F.silu(x[:, :n]) * x[:, n:], (3 * x, 5 * x),
                                       dtype=dtype)}


def at_least_float(x: torch.Tensor) -> torch.Tensor:
    """x in float32, or as it is in float64."""
    return x if x.dtype == torch.float64 else x.float()


def of_losses(m: int, k: int, n: int) -> dict[str, Case]:
    t = torch.randint(0, n, (m,), generator=torch.Generator().manual_seed(1))
    t[::17] = -100
    gemm, wide = 2.0 * m * k * n, 2.0 * m * n
    return {
        f"cross_entropy {m}x{n}": Case(((m, n),), cross_entropy, lambda x, t: F.cross_entropy(at_least_float(x), t),
                                       (wide, 2 * wide), more=(t,)),
        f"linear_cross_entropy {m}x{k}x{n}": Case(
            ((m, k), (n, k)), linear_cross_entropy, lambda x, w, t: F.cross_entropy(at_least_float(x @ w.t()), t),
            (2.0 * ((m + n) * k + m * n), 4.0 * ((m + n) * k + m * n)), (gemm, 2 * gemm), more=(t,)),
        f"linear_cross_entropy {m}x{k}x{n} recomputed": Case(
            ((m, k), (n, k)), partial(linear_cross_entropy, recompute=True),
            lambda x, w, t: F.cross_entropy(at_least_float(x @ w.t()), t),
            (2.0 * (m + n) * k, 4.0 * (m + n) * k), (gemm, 3 * gemm), more=(t,))}


def of_groups(rows: int, k: int, n: int, groups: int) -> dict[str, Case]:
    each = torch.rand(groups, generator=torch.Generator().manual_seed(groups)) + 0.5
    ends = (each.cumsum(0) / each.sum() * rows).round().int()
    sizes = torch.diff(ends, prepend=torch.zeros(1, dtype=torch.int32)).int()
    a, b, c = 2.0 * rows * k, 2.0 * groups * k * n, 2.0 * rows * n

    def theirs(x: torch.Tensor, w: torch.Tensor, sizes: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        if x.dtype == torch.float64:
            return torch.cat([y @ z for y, z in zip(x.split(sizes.tolist()), w)])
        return torch._grouped_mm(x, w, offs=ends)

    flops = 2.0 * rows * k * n
    return {f"grouped_matmul {rows}x{k}x{n} g{groups}": Case(
        ((rows, k), (groups, k, n)), lambda x, w, sizes, ends: grouped_matmul(x, w, sizes), theirs,
        (a + b + c, 2 * (a + b + c)), (flops, 2 * flops), more=(sizes, ends))}


def of_epilogues(m: int, n: int, k: int) -> dict[str, Case]:
    size, flops, name = 2.0 * (m * k + k * n + m * n), 2.0 * m * n * k, f"{m}x{n}x{k}"
    shapes, scaled = ((m, k), (k, n), (m,)), (lambda x, i, j, s: x * s[i])
    return {
        f"fused scale {name}": Case(shapes, lambda a, b, s: fused_matmul(a, b, scaled, tensors=(s,)),
                                    lambda a, b, s: (a @ b) * s[:, None], (size,), (flops,)),
        f"fused amax {name}": Case(shapes[:2], lambda a, b: fused_matmul(a, b, reduce=[("all", "absmax")])[0],
                                   lambda a, b: stacked(a @ b), (size,), (flops,)),
        f"fused swiglu {name}": Case(((m, k), (k, n), (k, n)), lambda a, b, c: fused_matmul(a, b, gated, second=c),
                                     lambda a, b, c: F.silu(a @ b) * (a @ c), (size + 2.0 * k * n,), (2 * flops,)),
        f"exact float32 {name}": Case(shapes[:2], lambda a, b: fused_matmul(a, b, exact=True), torch.matmul, (2 * size,),
                                      (6 * flops,), torch.float32)}  # three GEMMs at half of the rate


def gated(x: Any, y: Any, i: Any, j: Any) -> Any:
    return x / (1 + T.exp(-x)) * y


def stacked(c: torch.Tensor) -> torch.Tensor:
    """c, behind its largest magnitude, which torch computes in a pass of its own."""
    c.abs().amax()
    return c


CASES: dict[str, Case] = {**of_rows(8192, 4096), **of_rows(16384, 1024), **of_rows(4096, 8192), **of_rows(4096, 16384),
                          **of_rows(131072, 128), **of_rows(8192, 4096, torch.float32), **of_losses(8192, 4096, 32000),
                          **of_losses(4096, 4096, 128256), **of_groups(16384, 2048, 7168, 8), **of_groups(8192, 7168, 2048, 64),
                          **of_epilogues(4096, 4096, 4096), **of_epilogues(8192, 1024, 4096), **of_epilogues(4096, 14336, 4096)}


def both(call: Callable[..., Any], given: list[torch.Tensor], more: list[torch.Tensor], grad: torch.Tensor
         ) -> Callable[[], Any]:
    """Forward and backward."""
    return lambda: torch.autograd.grad(call(*given, *more), given, grad)


def measure(name: str, c: Case, rounds: int, eager: bool) -> dict[str, Any]:
    """Errors and times of everybody, forward and with backward."""
    from suite.measuring import CudaMeter

    g = torch.Generator(device="cuda").manual_seed(0)
    given = [torch.randn(s, device="cuda", generator=g).to(c.dtype) / (s[-1]**0.5 if len(s) > 1 and k else 1)
             for k, s in enumerate(c.shapes)]
    backward, more = len(c.moved) > 1, [x.cuda() for x in c.more]
    for x in given:
        x.requires_grad_(backward)
    exact = [x.detach().double().requires_grad_(backward) for x in given]
    out = c.theirs(*exact, *more)
    grad = torch.randn(out.shape, device="cuda", generator=g).to(c.dtype)
    wanted = [out.detach(), *(torch.autograd.grad(out, exact, grad.double()) if backward else ())]
    del out, exact
    row: dict[str, Any] = {"name": name, "floors": [c.floor(False), c.floor(True)]}
    calls = {"ours": c.ours, "torch": c.theirs, **({} if eager else {"compiled": torch.compile(c.theirs)})}
    meter, ready = CudaMeter(0.03), {}
    for who, call in calls.items():
        try:
            y = call(*given, *more)
            found = [y.detach(), *(torch.autograd.grad(y, given, grad.to(y.dtype)) if backward else ())]
            errors = [float((a.double() - b).norm() / b.norm()) for a, b in zip(found, wanted)]
            runs = [lambda call=call: call(*given, *more), both(call, given, more, grad.to(y.dtype))]
            ready[who] = [meter.prepare(run, math.inf) for run in runs[:1 + backward]]
            row[who] = {"errors": errors, "host_us": [p.host_us for p in ready[who]], "how": [p.how for p in ready[who]]}
        except Exception as e:
            row[who] = {"error": f"{type(e).__name__}: {str(e).splitlines()[0][:160]}"}
    times: dict[str, list[list[float]]] = {who: [[] for _ in runs] for who, runs in ready.items()}
    for r in range(rounds):
        order = [*ready][r % len(ready):] + [*ready][:r % len(ready)]
        for who in order:
            for k in range(len(ready[who])):
                times[who][k].append(meter.window(ready[who][k], 8.0).ms * 1e3)
    for who, t in times.items():
        row[who]["us"] = [median(x) for x in t]
    return row


def line(row: dict[str, Any]) -> str:
    """Microseconds, forward and with backward, over the floors, and those of torch over ours."""
    text = f"{row['name']:42s} floors {row['floors'][0]:8.1f} {row['floors'][1]:8.1f} us"
    for who in ("ours", "torch", "compiled"):
        found = row.get(who, {"error": "left out"})
        if "us" not in found:
            text += f" | {who}: {found['error'][:60]}"
            continue
        text += f" | {who} " + " ".join(f"{t:8.1f}" for t in found["us"])
        text += " host " + " ".join(f"{t:.0f}" for t in found["host_us"])
        text += " (no graph)" * any(not how.startswith("graph") for how in found["how"])
        if who != "ours" and "us" in row["ours"]:
            text += " ratio " + " ".join(f"{t / u:.2f}" for t, u in zip(found["us"], row["ours"]["us"]))
    if "errors" in row["ours"] and "errors" in row["torch"]:
        worst = max(a / max(b, 1e-12) for a, b in zip(row["ours"]["errors"], row["torch"]["errors"]))
        text += f" | error of torch's {worst:.2f}" + " TOO LARGE" * (worst > 1.5)
    return text


def kernels(c: Case) -> list[str]:
    """Each kernel of forward and backward, compiled for sm_90a and not run: registers, spills, blocks of an SM."""
    from suite.compiled import kernels as compiled

    given = [torch.empty(s, dtype=c.dtype, requires_grad=len(c.moved) > 1) for s in c.shapes]

    def call() -> None:
        y = c.ours(*given, *c.more)
        if y.requires_grad:
            torch.autograd.grad(y, given, torch.empty_like(y))

    return [f"    {k['name']:44s} {k['registers']:4d} registers, {k['spills']} spills, "
            f"{k['occupancy']['blocks']} blocks of {k['threads']}" for k in compiled(call)]


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--only", default="", help="cases that contain one of these")
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--floors", action="store_true")
    options.add_argument("--eager", action="store_true", help="leave torch.compile out")
    options.add_argument("--out", default="", help="write the rows as JSON")
    o = options.parse_args()
    chosen = {n: c for n, c in CASES.items() if not o.only or any(w in n for w in o.only.split(","))}
    if o.floors:
        for name, c in chosen.items():
            bytes_, flops = (" + ".join(f"{x / 10**u:.1f}" for x in v) for v, u in ((c.moved, 6), (c.flops, 9)))
            print(f"{name:42s} {bytes_} MB, {flops} GFLOP: at least {c.floor(False):.1f} us, {c.floor(True):.1f} with backward")
            print("\n".join(kernels(c)), flush=True)
        return 0
    print(torch.cuda.get_device_name(), flush=True)
    rows = []
    for name, c in chosen.items():
        rows.append(measure(name, c, o.rounds, o.eager))
        print(line(rows[-1]), flush=True)
        if o.out:
            Path(o.out).write_text(json.dumps(rows, indent=1))
        torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
