"""flex_attention beside flash_attention and torch's compiled flex_attention, on one GPU.

    python benchmarks/flex_attention.py [--seq 4096] [--dim 128] [--peer] [--out FILE.json]

Results of one head are compared with float64 first; then all take turns in bursts, and the median over the rounds counts.
TFLOP/s: of the scores that the mask shows.  of plain: the rate beside flash_attention without a mask.  --peer: also torch's.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a checkout works without being installed

import tilelang.language as T
from tilelang.library import create_block_mask, flash_attention, flex_attention

CAP, WINDOW, DOCUMENTS = 30.0, 1024, 5
# name: (function of scores here, the same for torch, function of the mask, which tensors they read)
FORMS: dict[str, tuple[Any, Any, Any, tuple[str, ...]]] = {
    "plain": (None, None, None, ()),
    "softcap": (lambda s, b, h, i, j: CAP * T.tanh(s / CAP), lambda s, b, h, i, j: CAP * torch.tanh(s / CAP), None, ()),
    "alibi": (lambda s, b, h, i, j, slopes: s + slopes[h] * T.cast(j - i, "float32"),
              lambda s, b, h, i, j, slopes: s + slopes[h] * (j - i), None, ("slopes",)),
    "causal": (None, None, lambda b, h, i, j: i >= j, ()),
    "window": (None, None, lambda b, h, i, j: (i >= j) & (i - j < WINDOW), ()),
    "documents": (None, None, lambda b, h, i, j, doc: (doc[i] == doc[j]) & (i >= j), ("doc",)),
    "softcap causal": (lambda s, b, h, i, j: CAP * T.tanh(s / CAP), lambda s, b, h, i, j: CAP * torch.tanh(s / CAP),
                       lambda b, h, i, j: i >= j, ()),
}


def exact(q: Any, k: Any, v: Any, change: Any, mask: Any, read: tuple[Any, ...]) -> Any:
    """The result of the first head of the first batch in float64."""
    s = q[0, :, 0].double() @ k[0, :, 0].double().T * q.shape[-1]**-0.5
    i, j = (torch.arange(n, device=q.device) for n in s.shape)
    if change is not None:
        s = change(s, 0, 0, i[:, None], j[None, :], *read)
    if mask is not None:
        s = s.masked_fill(~mask(0, 0, i[:, None], j[None, :], *read), -torch.inf)
    return torch.softmax(s, -1) @ v[0, :, 0].double()


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("batch", 4), ("heads", 16), ("seq", 4096), ("dim", 128), ("rounds", 5)):
        options.add_argument(f"--{name}", type=int, default=default)
    options.add_argument("--dtype", default="float16")
    options.add_argument("--only", default="", help="forms whose names start with one of these")
    options.add_argument("--peer", action="store_true", help="also torch's flex_attention, compiled")
    options.add_argument("--out", default="", help="write the rows as JSON")
    o = options.parse_args()
    from suite.measuring import CudaMeter

    torch.manual_seed(0)
    q, k, v = (torch.randn(o.batch, o.seq, o.heads, o.dim, device="cuda", dtype=getattr(torch, o.dtype)) for _ in range(3))
    tensors = {"slopes": 2.0**(-8 * (torch.arange(o.heads, device="cuda") + 1.0) / o.heads),
               "doc": (torch.arange(o.seq, device="cuda") * DOCUMENTS // o.seq).int()}
    ready: dict[str, Any] = {}
    rows: dict[str, dict[str, float]] = {}
    meter, wrong = CudaMeter(0.03), 0

    def entry(name: str, fn: Any, form: str, out: Any) -> None:
        nonlocal wrong
        _, change, mask, read = FORMS[form]
        want = exact(q, k, v, change, mask, tuple(tensors[n] for n in read))
        unit = 2.0**-8 if o.dtype == "bfloat16" else 2.0**-11
        off = float((out[0, :, 0].double() - want).abs().max() / (2 * unit * v.abs().max()))
        seen = 1.0 if mask is None else float(mask(0, 0, torch.arange(o.seq, device="cuda")[:, None], torch.arange(
            o.seq, device="cuda")[None, :], *(tensors[n] for n in read)).double().mean())
        rows[name] = {"of_bound": off, "seen": seen}
        wrong += not off <= 1.0
        ready[name] = meter.prepare(fn)

    entry("flash_attention", lambda: flash_attention(q, k, v), "plain", flash_attention(q, k, v))
    causal = flash_attention(q, k, v, causal=True)
    entry("flash_attention causal", lambda: flash_attention(q, k, v, causal=True), "causal", causal)
    for form, (change, peer, mask, names) in FORMS.items():
        if o.only and not form.startswith(tuple(o.only.split(","))):
            continue
        read = tuple(tensors[n] for n in names)
        blocks = None if mask is None else create_block_mask(mask, o.seq, o.seq, device=q.device, tensors=read)
        keys = {"score_mod": change, "block_mask": blocks, "tensors": read}
        entry(form, lambda keys=keys: flex_attention(q, k, v, **keys), form, flex_attention(q, k, v, **keys))
        if o.peer:
            from torch.nn.attention import flex_attention as peers
            heads = [x.transpose(1, 2) for x in (q, k, v)]
            shown = None if mask is None else peers.create_block_mask(
                lambda b, h, i, j, mask=mask, read=read: mask(b, h, i, j, *read), None, None, o.seq, o.seq, device="cuda")
            fn = None if peer is None else lambda s, b, h, i, j, peer=peer, read=read: peer(s, b, h, i, j, *read)
            compiled = torch.compile(peers.flex_attention)
            entry(f"torch {form}", lambda c=compiled, x=heads, f=fn, s=shown: c(*x, score_mod=f, block_mask=s), form,
                  compiled(*heads, score_mod=fn, block_mask=shown).transpose(1, 2))
    times: dict[str, list[float]] = {name: [] for name in ready}
    for _ in range(o.rounds):
        for name, fn in ready.items():
            times[name].append(meter.window(fn, 15.0).ms)
    plain = median(times["flash_attention"])
    for name, row in rows.items():
        ms = median(times[name])
        flops = row["seen"] * 4 * o.batch * o.heads * o.seq**2 * o.dim
        row.update(ms=ms, tflops=flops / ms * 1e-9, of_plain=row["seen"] * plain / ms)
        print(f"{name:24} {ms:8.3f} ms {row['tflops']:6.0f} TFLOP/s  of plain {row['of_plain']:.3f}  of bound "
              f"{row['of_bound']:.2f}" + ("" if row["of_bound"] <= 1 else "  WRONG"), flush=True)
    if o.out:
        record = {"what": "flex_attention", "batch": o.batch, "heads": o.heads, "seq": o.seq, "dim": o.dim, "dtype": o.dtype,
                  "device": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": rows}
        Path(o.out).write_text(json.dumps(record, indent=1) + "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    import torch
    raise SystemExit(main())
