"""State space models and delta rules on one GPU, beside times of Triton kernels that were measured before.

    python benchmarks/linear_attention.py [--only chunk_scan,kda] [--out FILE.json]
    python benchmarks/linear_attention.py --compile     # without a GPU: registers, spills, floors, predictions

Each result is compared with float64 first (whole sequences of the last batch entry).  Then come windows after idling, of
CUDA graphs, and the median counts; host: microseconds of the host for a call without a graph.  beside: microseconds of
mamba_ssm's chunk_scan and chunk_state and of flash-linear-attention's kernels in Triton on an H200; these sources are not
installed.  client's: attention in plain programs, as flash-linear-attention has it in this language.  floor: the bytes of all
operands and results over 4.0 TB/s.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

import torch  # noqa: E402

from suite.client_attention import ClientAttention  # noqa: E402
from tilelang.library import chunk_scan, chunk_state, gated_delta, kda, linear_attention, mamba2, retention  # noqa: E402

MEMORY = 4.0e12
Tensors = list[torch.Tensor]


@dataclass(frozen=True)
class Case:
    """make: (draw, its arguments) -> the tensors.  call: of them.  want: the same in float64, of one batch entry, or None.
    beside: microseconds of a peer.  need: the ratio to it that the library promises.  backward: gradients are computed too."""

    make: Callable[[Callable[..., torch.Tensor]], Tensors]
    call: Callable[..., Any]
    want: Callable[..., torch.Tensor] | None = None
    beside: float | None = None
    need: float = 0.0
    backward: bool = False


def ssm(draw: Callable[..., torch.Tensor], b: int, s: int, heads: int = 64, p: int = 64, n: int = 128, length: int = 256,
        groups: int = 1) -> Tensors:
    """x, B, C, dt, a, cb, the states before the chunks and D: heads of p, states of n."""
    chunks, dt = s // length, draw(b, heads, s // length, length, uniform=True) * 0.2 + 0.05
    a = -(draw(heads, uniform=True) * 0.5 + 0.1)
    half = [draw(b, s, heads, p), draw(b, s, groups, n), draw(b, s, groups, n)]
    return [*(x.half() for x in half), dt, (dt * a[None, :, None, None]).cumsum(-1),
            draw(b, chunks, groups, length, length).half(), draw(b, chunks, heads, p, n).half(), draw(heads)]


def states_of(x: torch.Tensor, b: torch.Tensor, c: Any, dt: torch.Tensor, a: torch.Tensor, *others: Any) -> torch.Tensor:
    weight, (heads, n, length) = torch.exp(a[..., -1:] - a) * dt, a.shape
    b = b.repeat_interleave(heads // b.shape[1], 1).reshape(n, length, heads, -1)
    return torch.einsum("clhn,hcl,clhp->chpn", b, weight, x.reshape(n, length, heads, -1))


def outputs_of(x: torch.Tensor, b: Any, c: torch.Tensor, dt: torch.Tensor, a: torch.Tensor, cb: torch.Tensor,
               before: torch.Tensor, d: torch.Tensor) -> torch.Tensor:
    heads, chunks, length = a.shape
    found, later = [], torch.ones(length, length, device=x.device, dtype=torch.bool).triu(1)
    c, cb = (y.repeat_interleave(heads // y.shape[1], 1) for y in (c, cb))
    for k in range(chunks):
        part, steps = slice(k * length, k * length + length), a[:, k]
        pairs = torch.exp((steps[:, :, None] - steps[:, None, :]).masked_fill(later, -torch.inf)) * dt[:, k, None, :] * cb[k]
        found.append(torch.einsum("hls,shp->lhp", pairs, x[part]) + x[part] * d[:, None]
                     + torch.einsum("lhn,hpn,hl->lhp", c[part], before[k], torch.exp(steps)))
    return torch.cat(found)


def delta(draw: Callable[..., torch.Tensor], b: int, s: int, h: int, channels: bool, dim: int = 128,
          dim_v: int | None = None) -> Tensors:
    """q, k, v, log alpha and beta."""
    q, k = (torch.nn.functional.normalize(draw(b, s, h, dim), dim=-1).bfloat16() for _ in (0, 1))
    decay = -draw(*((b, s, h, dim) if channels else (b, s, h)), uniform=True) * 0.1
    return [q, k, draw(b, s, h, dim_v or dim).bfloat16(), decay, draw(b, s, h, uniform=True)]


def recurrence(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor) -> torch.Tensor:
    """The outputs of a delta rule, a step at a time."""
    state, outs = q.new_zeros(*q.shape[1:], v.shape[-1]), []
    alpha = decay.exp().reshape(*q.shape[:2], -1, 1)
    for t in range(len(q)):
        state = alpha[t] * state
        u = beta[t, :, None] * (v[t] - torch.einsum("hk,hkv->hv", k[t], state))
        state = state + k[t, :, :, None] * u[:, None]
        outs.append(torch.einsum("hk,hkv->hv", q[t], state) * q.shape[-1]**-0.5)
    return torch.stack(outs)


def mamba(draw: Callable[..., torch.Tensor], b: int, s: int) -> Tensors:
    """x, dt, A, B, C, D: the sizes of ssm."""
    x, bc = draw(b, s, 64, 64).bfloat16(), [draw(b, s, 1, 128).bfloat16() for _ in (0, 1)]
    return [x, draw(b, s, 64, uniform=True) * 0.2 + 0.05, -(draw(64, uniform=True) * 0.5 + 0.1), *bc, draw(64)]


def decaying(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor) -> torch.Tensor:
    """The outputs of linear attention, a step at a time."""
    state, outs, alpha = q.new_zeros(*q.shape[1:], v.shape[-1]), [], decay.exp()[..., None, None]
    for t in range(len(q)):
        state = alpha[t] * state + k[t, :, :, None] * v[t, :, None]
        outs.append(torch.einsum("hk,hkv->hv", q[t], state))
    return torch.stack(outs)


def state_space(x: torch.Tensor, dt: torch.Tensor, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor,
                d: torch.Tensor) -> torch.Tensor:
    """The outputs of mamba2 with one group."""
    return decaying(*(z.expand(-1, x.shape[1], -1) for z in (c, b)), x * dt[..., None], a * dt) + x * d[:, None]


def retained(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, log_gamma: torch.Tensor) -> torch.Tensor:
    """The outputs of retention."""
    return decaying(q, k, v, log_gamma.expand(q.shape[:2])) * q.shape[-1]**-0.5


def first(call: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *given: call(*given)[0]


CASES: dict[str, Case] = {}
for name, rule, us in (("gated_delta", gated_delta, 1180), ("kda", kda, 1530)):
    made = lambda draw, k=name: delta(draw, 1, 8192, 32, k == "kda")  # noqa: E731
    CASES[f"{name} 1x8192x32"] = Case(made, first(rule), recurrence, us, 2.0)
    CASES[f"{name} 1x8192x32 with gradients"] = Case(made, first(rule), recurrence, backward=True)
    made = lambda draw, k=name: delta(draw, 2, 2048, 16, k == "kda")  # noqa: E731
    CASES[f"{name} 2x2048x16"] = Case(made, first(rule), recurrence)
    CASES[f"{name} 2x2048x16 with gradients"] = Case(made, first(rule), recurrence, 2620 if rule is kda else None, 1.5, True)
for backward in (False, True):
    CASES["linear_attention 1x8192x32" + " with gradients" * backward] = Case(
        lambda draw: delta(draw, 1, 8192, 32, False)[:4], linear_attention, decaying, backward=backward)
for batch, seq in ((1, 8192), (8, 2048)):
    made = lambda draw, b=batch, s=seq: mamba(draw, b, s)  # noqa: E731
    CASES[f"mamba2 {batch}x{seq}"] = Case(made, first(mamba2), state_space)
    CASES[f"mamba2 {batch}x{seq} with gradients"] = Case(made, first(mamba2), state_space, backward=True)
for backward in (False, True):
    made = lambda draw: [*(draw(1, 4096, 8, 256).bfloat16() for _ in range(3)), -draw(8, uniform=True) * 0.1 - 0.01]  # noqa: E731
    CASES["retention 1x4096x8" + " with gradients" * backward] = Case(made, first(retention), retained, backward=backward)
for batch, seq, scan, state in [(1, 1024, 31, 12), (1, 2048, 53, 21), (1, 8192, 179, 62), (64, 1024, 1428, 447),
                                (64, 2048, 2845, 935), (64, 8192, 11402, 3732)]:
    made = lambda draw, b=batch, s=seq: ssm(draw, b, s)  # noqa: E731
    CASES[f"chunk_scan {batch}x{seq}"] = Case(
        made, lambda x, b, c, dt, a, cb, before, d: chunk_scan(cb, x, dt, a, c, before, d), outputs_of, scan, 1.5)
    CASES[f"chunk_state {batch}x{seq}"] = Case(
        made, lambda x, b, c, dt, a, *others: chunk_state(x, b, dt, a), states_of, state, 1.5)


FURTHER: dict[str, Case] = {}
for name, rule in (("gated_delta", gated_delta), ("kda", kda)):
    for b, s, h, dim, dim_v in (
            (2, 4096, 32, 64, 64), (2, 4096, 32, 96, 96), (1, 4096, 16, 128, 256), (1, 4096, 16, 256, 256),
            (8, 256, 32, 128, 128), (64, 64, 32, 128, 128), (1, 2048, 128, 128, 128), (16, 1024, 64, 64, 64),
            (1, 16384, 4, 128, 128)):
        made = lambda draw, k=name, z=(b, s, h), d=(dim, dim_v): delta(draw, *z, k == "kda", *d)  # noqa: E731
        FURTHER[f"{name} {b}x{s}x{h} of {dim}, {dim_v}"] = Case(made, first(rule), recurrence)
        if s == 1024 or dim == 256:
            FURTHER[f"{name} {b}x{s}x{h} of {dim}, {dim_v} with gradients"] = Case(made, first(rule), recurrence, backward=True)
for sizes in ((4, 4096, 64, 64, 64), (4, 4096, 32, 128, 128), (4, 4096, 64, 64, 256), (4, 4096, 64, 64, 128, 128),
              (4, 4096, 64, 64, 128, 64), (4, 4096, 64, 64, 128, 256, 8), (4, 4096, 48, 80, 96), (2, 4096, 24, 64, 128),
              (8, 256, 64, 64, 128)):
    made = lambda draw, z=sizes: ssm(draw, *z)  # noqa: E731
    FURTHER[f"chunk_scan {sizes}"] = Case(
        made, lambda x, b, c, dt, a, cb, before, d: chunk_scan(cb, x, dt, a, c, before, d), outputs_of)
    FURTHER[f"chunk_state {sizes}"] = Case(made, lambda x, b, c, dt, a, *others: chunk_state(x, b, dt, a), states_of)


def attended(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *log_gates: torch.Tensor) -> torch.Tensor:
    """Causal attention of one batch entry; scores get the sum of logarithms of gates from the key to the query."""
    s = torch.einsum("ihd,jhd->hij", q, k) * q.shape[-1]**-0.5
    for g in log_gates:
        along = g.cumsum(0).t()
        s = s + along[:, :, None] - along[:, None, :]
    later = torch.ones(*s.shape[1:], device=q.device, dtype=torch.bool).triu(1)
    return torch.einsum("hij,jhd->ihd", s.masked_fill(later, -torch.inf).softmax(-1), v)


def client(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *log_gates: torch.Tensor) -> torch.Tensor:
    return ClientAttention.apply(q, k, v, log_gates[0] if log_gates else None)  # type: ignore[no-any-return]


for name, dim, gates, us in (("attention", 128, 0, 1500), ("attention d64", 64, 0, 1060), ("gated attention", 128, 1, 1680)):
    made = lambda draw, d=dim, n=gates: [*(draw(2, 2048, 16, d).bfloat16() for _ in range(3)),  # noqa: E731
                                         *(-draw(2, 2048, 16, uniform=True) * 0.1 for _ in range(n))]
    CASES[f"client's {name} with gradients"] = Case(made, client, attended, us, 1.05, True)


def drawn(device: str) -> Callable[..., torch.Tensor]:
    g = torch.Generator(device=device).manual_seed(0)
    return lambda *shape, uniform=False: (torch.rand if uniform else torch.randn)(*shape, device=device, generator=g)


def run_of(c: Case, given: Tensors) -> Callable[[], Any]:
    if not c.backward:
        return lambda: c.call(*given)
    for x in given:
        x.requires_grad_()
    grad = torch.ones_like(c.call(*given))
    return lambda: torch.autograd.grad(c.call(*given), given, grad)


def error(c: Case, given: Tensors) -> float | None:
    """Of the last batch entry, against float64, relative in norm; of gradients, the largest."""
    if c.want is None:
        return None
    entry = [x.detach()[-1:] if x.ndim > 1 else x.detach() for x in given]
    exact = [x[0].double() if x.ndim > 1 else x.double() for x in entry]
    if not c.backward:
        pairs = [(c.call(*entry)[0], c.want(*exact))]
    else:  # a shorter sequence: the graph of the recurrence keeps its states
        entry = [(x[:, :512] if x.ndim > 1 else x).contiguous().requires_grad_() for x in entry]
        exact = [(y[:512] if x.ndim > 1 else y).requires_grad_() for x, y in zip(entry, exact)]
        out, want = c.call(*entry), c.want(*exact)
        grad = torch.randn_like(out)
        found = torch.autograd.grad(out, entry, grad), torch.autograd.grad(want, exact, grad[0].double())
        pairs = [(got[0] if got.ndim > 1 else got, wanted) for got, wanted in zip(*found)]
    return max(float((got.double() - wanted).norm() / wanted.norm()) for got, wanted in pairs)


def measure(names: list[str], rounds: int, ms: float, checked: bool, out: str) -> list[dict[str, Any]]:
    from suite.measuring import CudaMeter

    meter, rows = CudaMeter(0.02), []
    for name in names:
        c = CASES[name]
        given = c.make(drawn("cuda"))
        try:
            c.call(*given)
        except Exception as e:  # a case that fails does not end the run
            print(name, f"{type(e).__name__}: {str(e).splitlines()[0][:150]}", flush=True)
            continue
        row: dict[str, Any] = {"name": name, "error": error(c, given) if checked else None, "beside": c.beside, "need": c.need}
        if not rounds:
            print(name, row["error"], flush=True)
            continue
        ready = meter.prepare(run_of(c, given), math.inf)
        times = [meter.window(ready, ms).ms * 1e3 for _ in range(rounds)]
        row.update(floor=floor(c, given), us=median(times), spread=[min(times), max(times)], timing=ready.how,
                   host_us=ready.host_us)
        rows.append(row)
        print(line(row), flush=True)
        if out:
            Path(out).write_text(json.dumps(rows, indent=1))
        del given, ready
        torch.cuda.empty_cache()
    return rows


def line(row: dict[str, Any]) -> str:
    ratio = f" of {row['beside']:.0f}: {row['beside'] / row['us']:.2f}" if row["beside"] else ""
    wrong = f", error {row['error']:.1e}" if row["error"] is not None else ""
    spread = f"{row['spread'][0]:.1f} to {row['spread'][1]:.1f}"
    ratio += f", {row['floor'] / row['us']:.2f} of the floor"
    return f"{row['name']:40s} {row['us']:9.1f} us, {spread}, {row['timing'][:6]}, host {row['host_us']:.0f}{ratio}{wrong}"


def report(names: list[str]) -> None:
    """Kernels compiled for sm_90a."""
    from suite.compiled import kernels

    for name in names:
        c = CASES[name]
        with torch.device("meta"):
            given = c.make(lambda *shape, uniform=False: torch.empty(*shape))
        given = [torch.empty_like(x, device="cpu") for x in given]  # pages that nobody writes
        print(f"{name}: operands {sum(x.nbytes for x in given) / 1e6:.0f} MB, at least {floor(c, given):.1f} us")
        for k in kernels(run_of(c, given)):
            least = max((k.get("limits") or {}).get("seconds", {}).values(), default=0) * 1e6
            text = f", at least {least:.1f} us" if least else ""
            print(f"    {k['name']:40s} {k['registers']:4d} registers, {k['spills']} spills, "
                  f"{k['occupancy']['blocks']} blocks of {k['threads']}{text}", flush=True)


def floor(c: Case, given: Tensors) -> float:
    used = given
    if c.want is states_of:
        used = [x for k, x in enumerate(given) if k in (0, 1, 3, 4, 6)]  # the states are its result
    elif c.want is outputs_of:
        used = [given[0], *(x for k, x in enumerate(given) if k != 1)]  # the results are like x
    else:
        used = [*given, given[0] if c.want is None else given[2]]
    return sum(x.nbytes for x in used) * (1 + 2 * c.backward) / MEMORY * 1e6


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--only", default="", help="cases that contain one of these")
    options.add_argument("--further", action="store_true", help="other shapes than those that have peers")
    options.add_argument("--rounds", type=int, default=5, help="windows of each; 0: only the errors")
    options.add_argument("--unchecked", action="store_true", help="only times")
    options.add_argument("--ms", type=float, default=5.0, help="of a window")
    options.add_argument("--compile", action="store_true")
    options.add_argument("--out", default="", help="write the rows as JSON")
    o = options.parse_args()
    if o.further:
        CASES.clear()
        CASES.update(FURTHER)
    names = [n for n in CASES if not o.only or any(w in n for w in o.only.split(","))]
    if o.compile:
        report(names)
        return 0
    print(torch.cuda.get_device_name(), flush=True)
    rows = measure(names, o.rounds, o.ms, not o.unchecked, o.out)
    for kind in ("chunk_scan", "chunk_state", "chunk_"):
        if ratios := [r["beside"] / r["us"] for r in rows if r["name"].startswith(kind)]:
            print(f"{kind:12s} geometric mean {geometric_mean(ratios):.2f}, least {min(ratios):.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
