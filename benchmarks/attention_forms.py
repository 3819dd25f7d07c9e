"""What attention has beside a softmax, forward and backward through autograd, beside plain attention, on one GPU.

    python benchmarks/attention_forms.py [--only sinks,dropout] [--seq 4096] [--dim 128] [--rounds 5] [--out FILE.json]

The result and the gradients of the last head are compared with float64 first, beside the same formulas of torch in the type of
the inputs.  Then all take turns, and the median over the rounds counts.  of plain: the rate beside plain attention, or causal
attention where queries see the keys up to their own, by the scores that the mask shows and their GEMMs.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a checkout works without being installed

import tilelang.language as T
from tilelang.library import create_block_mask, flash_attention, flex_attention, mla_prefill
from tilelang.library.attention_engine import AttentionEngine, Relu, Sigmoid, Softmax

BATCH, HEADS, WINDOW, DROP, SEED, ROPE = 4, 16, 1024, 26 / 256, 7, 64


@dataclass(frozen=True)
class Form:
    """call: of (q, k, v, tensors); with extra columns k comes as two tensors, those columns of one head. weights: of the
    scaled scores (heads, queries, keys) of the last batch, and the tensors, in torch; None: a softmax. causal: queries see keys
    up to their own. extra: columns of q and k beyond those of v. seen: the fraction of scores that are shown, of the number of
    tokens."""

    call: Callable[..., Any]
    weights: Callable[..., Any] | None = None
    causal: bool = False
    kv_heads: int = HEADS
    extra: int = 0
    seen: Callable[[int], float] = lambda n: 1.0


def softmax(change: Callable[..., Any]) -> Callable[..., Any]:
    return lambda s, t: torch.softmax(change(s, t), -1)


def distance(s: Any) -> Any:
    i, j = (torch.arange(n, device=s.device) for n in s.shape[-2:])
    return j[None, :] - i[:, None]


def sinking(s: Any, t: dict[str, Any]) -> Any:
    sink = t["sinks"][-s.shape[0]:, None, None].to(s.dtype).expand(-1, s.shape[1], 1)
    return torch.softmax(torch.cat([s, sink], -1), -1)[..., :-1]


def dropping(s: Any, t: dict[str, Any]) -> Any:
    """Dropout keeps the weights that it keeps of equal ones: of scores 0, for values that show one key in each column."""
    n, dim = s.shape[-1], 64
    zero = torch.zeros(BATCH, n, HEADS, dim, device=s.device, dtype=torch.float16)
    kept = []
    for first in range(0, n, dim):
        one = torch.zeros_like(zero)
        one[:, torch.arange(first, min(first + dim, n)), :, torch.arange(min(dim, n - first))] = float(n) / 16
        kept.append(flash_attention(zero, zero, one, dropout=DROP, seed=t["seed"])[-1, :, -1, :n - first] > 0)
    return torch.softmax(s, -1) * torch.cat(kept, -1) / (1 - DROP)


def within(s: Any, t: dict[str, Any]) -> Any:
    return torch.softmax(s.masked_fill((distance(s) > 0) | (distance(s) <= -WINDOW), -torch.inf), -1)


def after(s: Any, t: dict[str, Any]) -> Any:
    return torch.softmax(s.masked_fill(distance(s) > 0, -torch.inf), -1)


def packed(q: Any, k: Any, v: Any, t: dict[str, Any]) -> Any:
    flat = [x.reshape(-1, *x.shape[2:]) for x in (q, k, v)]
    return flash_attention(*flat, causal=True, cu_seqlens_q=t["cu"]).view(*q.shape[:-1], v.shape[-1])


def prefill(q: Any, k: Any, rope: Any, v: Any, t: dict[str, Any]) -> Any:
    return mla_prefill(q, k, rope, v, causal=True)


def scores(change: Callable[..., Any], *names: str) -> Callable[..., Any]:
    return lambda q, k, v, t: flex_attention(q, k, v, score_mod=change, tensors=tuple(t[n] for n in names))


def engine(description: Any, **keys: Any) -> Callable[..., Any]:
    attention = AttentionEngine(description)
    return lambda q, k, v, t: attention(q, k, v, **{n: t[x] for n, x in keys.items()})


def shown(n: int) -> float:
    """Of a causal mask, by halves, as its rate is usually counted."""
    return 0.5


def capped(cap: float) -> Form:
    return Form(scores(lambda s, b, h, i, j: cap * T.tanh(s / cap)), softmax(lambda s, t: cap * torch.tanh(s / cap)))


FORMS = {
    "plain": Form(lambda q, k, v, t: flash_attention(q, k, v)),
    "causal": Form(lambda q, k, v, t: flash_attention(q, k, v, causal=True), after, True, seen=shown),
    "GQA": Form(lambda q, k, v, t: flash_attention(q, k, v), kv_heads=HEADS // 8),
    "GQA causal": Form(lambda q, k, v, t: flash_attention(q, k, v, causal=True), after, True, HEADS // 8, seen=shown),
    "window": Form(lambda q, k, v, t: flash_attention(q, k, v, window=(WINDOW - 1, 0)), within, True,
                   seen=lambda n: (WINDOW - WINDOW**2 / (2 * n)) / n),
    "packed causal": Form(packed, after, True, seen=shown),
    "sinks": Form(lambda q, k, v, t: flash_attention(q, k, v, sinks=t["sinks"]), sinking),
    "dropout": Form(lambda q, k, v, t: flash_attention(q, k, v, dropout=DROP, seed=t["seed"]), dropping),
    "softcap": capped(30.0),
    "softcap 50": capped(50.0),
    "ALiBi": Form(scores(lambda s, b, h, i, j, slopes: s + slopes[h] * T.cast(j - i, "float32"), "slopes"),
                  softmax(lambda s, t: s + t["slopes"][-s.shape[0]:, None, None].to(s.dtype) * distance(s))),
    "engine softmax": Form(engine(Softmax())),
    "engine sigmoid": Form(engine(Sigmoid(-8.0)), lambda s, t: torch.sigmoid(s - 8.0)),
    "engine relu causal": Form(engine(Relu(factor=1 / 64), block_mask="shown"),
                               lambda s, t: torch.relu(s).masked_fill(distance(s) > 0, 0.0) / 64, True, seen=shown),
    "MLA prefill causal": Form(prefill, after, True, extra=ROPE, seen=shown),
}


def errors(form: Form, tensors: list[Any], t: dict[str, Any], found: list[Any]) -> float:
    """The largest of the errors (root of mean squares) of the result and the gradients of the last head, or of the last group
    of heads, beside those of torch's formulas in the type of the inputs."""
    *inputs, do = tensors
    group = HEADS // form.kv_heads
    own = [x[-1, :, -n:].transpose(0, 1) for x, n in zip((*inputs, do), (group, 1, 1, group))]
    got = [x[-1, :, -n:].transpose(0, 1) for x, n in zip(found, (group, group, 1, 1))]
    results = []
    for dtype in (torch.float64, do.dtype):
        q, k, v = (x.to(dtype).requires_grad_() for x in own[:3])
        s = (q @ k.transpose(1, 2)) * q.shape[-1]**-0.5
        o = (torch.softmax(s, -1) if form.weights is None else form.weights(s, t)).to(dtype) @ v
        results.append([x.detach().double() for x in (o, *torch.autograd.grad(o, (q, k, v), own[3].to(dtype)))])
    counted = [n for n in range(4) if n != 2 or not form.extra]  # the rotary keys are those of all heads
    off = [[float((xs[n].double() - results[0][n]).square().mean().sqrt()) for n in counted] for xs in (got, results[1])]
    return max(a / b for a, b in zip(*off))


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--only", default="", help="forms whose names start with one of these")
    for name, default in (("seq", 4096), ("dim", 128), ("rounds", 5)):
        options.add_argument(f"--{name}", type=int, default=default)
    options.add_argument("--dtype", default="float16")
    options.add_argument("--out", default="", help="write the rows as JSON")
    o = options.parse_args()
    from suite.measuring import CudaMeter

    torch.manual_seed(0)
    t = {"sinks": torch.randn(HEADS, device="cuda"), "seed": torch.tensor([SEED], device="cuda"),
         "slopes": 2.0**(-8 * (torch.arange(HEADS, device="cuda") + 1.0) / HEADS),
         "cu": torch.arange(BATCH + 1, device="cuda", dtype=torch.int32) * o.seq,
         "shown": create_block_mask(lambda b, h, i, j: i >= j, o.seq, o.seq, device="cuda")}
    names = [n for n in FORMS if not o.only or n in ("plain", "causal") or n.startswith(tuple(o.only.split(",")))]
    meter, rows, ready, wrong = CudaMeter(0.03), {}, {}, 0
    for name in names:
        form = FORMS[name]
        q, k, v, do = (torch.randn(BATCH, o.seq, h, o.dim + extra, device="cuda", dtype=getattr(torch, o.dtype))
                       for h, extra in ((HEADS, form.extra), (form.kv_heads, form.extra), (form.kv_heads, 0), (HEADS, 0)))
        if form.extra:
            k[..., o.dim:] = k[:, :, :1, o.dim:]
        parts = (k[..., :o.dim].contiguous(), k[:, :, 0, o.dim:].contiguous()) if form.extra else (k,)
        leaves = [x.requires_grad_() for x in (q, *parts, v)]
        y = form.call(*leaves, t)
        grads = torch.autograd.grad(y, leaves, do, retain_graph=True)
        off = errors(form, [q.detach(), k.detach(), v.detach(), do], t, [y.detach(), *grads[:2], grads[-1]])
        again = torch.autograd.grad(y, leaves, do, retain_graph=True)
        same = all(torch.equal(a, b) for a, b in zip(grads, again))
        wrong += not off <= 1.5 or not same
        work = form.seen(o.seq) * (2 + form.extra / o.dim) / 2  # products with q, k count their columns
        rows[name] = {"beside_torch": off, "same": same, "work": work}
        quiet = [x.detach() for x in leaves]
        ready[name] = [meter.prepare(lambda f=form, x=quiet: f.call(*x, t)),
                       meter.prepare(lambda y=y, x=leaves, g=do: torch.autograd.grad(y, x, g, retain_graph=True))]
        del grads, again
    times: dict[str, list[list[float]]] = {n: [[], []] for n in ready}
    for _ in range(o.rounds):
        for n, both in ready.items():
            for way, fn in enumerate(both):
                times[n][way].append(meter.window(fn, 10.0).ms)
    for n, row in rows.items():
        beside = "causal" if FORMS[n].causal else "plain"
        text = ""
        for way, direction in enumerate(("forward", "backward")):
            ms, plain = median(times[n][way]), median(times[beside][way])
            row[direction] = {"ms": ms, "of_plain": row["work"] / rows[beside]["work"] * plain / ms}
            text += f"{direction} {ms:7.3f} ms, of plain {row[direction]['of_plain']:.3f}  "
        print(f"{n:20} {text}error beside torch's {row['beside_torch']:.2f}"
              + ("" if row["beside_torch"] <= 1.5 and row["same"] else "  WRONG"), flush=True)
    if o.out:
        record = {"what": "forms of attention", "batch": BATCH, "heads": HEADS, "seq": o.seq, "dim": o.dim, "dtype": o.dtype,
                  "device": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": rows}
        Path(o.out).write_text(json.dumps(record, indent=1) + "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    import torch
    raise SystemExit(main())
