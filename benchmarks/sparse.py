"""Sparse attention and decoding on one GPU beside their bars: sparse_mla, index_scores, topk_indices, flash_decode, mla_decode.

    python benchmarks/sparse.py [--only "sparse mla,top-k"] [--rounds 5] [--out FILE.json]

Results are compared with float64 first (a few queries of each).  Then ours and its peer, where torch has one, take turns in
windows of 8 ms; calls below 2 ms are replayed from CUDA graphs.  Bars: TFLOP/s of the products, as FlashMLA counts them (its
figures on an H800: 640 sparse prefill, 410 sparse decode); bytes of a cache over the bandwidth of a copy; torch's time, or the
time that FlashMLA reports; gathered bytes over those with 64 heads.  Two floors stand in each row of a cache: its bytes at the
bandwidth of a copy, and its products at the rate that 16-bit tensor cores sustain.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

import torch  # noqa: E402

from tilelang.library import flash_decode, index_scores, mla_decode, mla_plan, sparse_mla, topk_indices  # noqa: E402

FP8 = torch.float8_e4m3fn
SUSTAINED = 825e12  # FLOP/s of 16-bit wgmma on an H200 at its power limit
FLASH_MLA = {1024: 97.0, 4096: 287.0, 8192: 556.0}  # us it reports for 128 sequences of so many keys, 128 heads


@dataclass(frozen=True)
class Case:
    """make: the tensors, on a device.  ours, theirs: calls of them.  check: (tensors, result) -> the largest error, as a share
    of what is allowed.  flops, moved: of a call.  bar: (unit, value): "TFLOP/s", "of a copy", "of torch", "of FlashMLA" or "of
    64 heads".  reported: us of a peer that is not at hand."""

    make: Callable[[str], dict[str, Any]]
    ours: Callable[..., Any]
    check: Callable[[dict[str, Any], Any], float]
    bar: tuple[str, float]
    flops: float = 0.0
    moved: float = 0.0
    theirs: Callable[..., Any] | None = None
    reported: float = 0.0
    options: dict[str, Any] = field(default_factory=dict)


def normal(device: str, *shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.Tensor:
    g = torch.Generator(device).manual_seed(seed)
    return torch.randn(shape, device=device, generator=g, dtype=torch.float32 if dtype == FP8 else dtype).to(dtype)


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of queries against keys in float64: (result, a bound for its error)."""
    q, k, v = q.double(), k.double(), v.double()
    p = (q @ k.mT * q.shape[-1]**-0.5).softmax(-1)
    return p @ v, 2.0**-7 * (p @ v.abs()) + 2.0**-9


def worst(got: torch.Tensor, want: tuple[torch.Tensor, torch.Tensor]) -> float:
    return float(((got.double() - want[0]).abs() / want[1]).max())


# ---- latent attention -----------------------------------------------------------------------------------------------------


def sparse(queries: int, heads: int, top: int, rows: int, bar: tuple[str, float]) -> Case:
    def make(device: str) -> dict[str, Any]:
        g = torch.Generator(device).manual_seed(1)
        keys = torch.rand(queries, rows, device=device, generator=g) if queries * rows <= 1 << 28 else None
        named = torch.randint(0, rows, (queries, top), device=device, generator=g, dtype=torch.int32) if keys is None else \
            keys.topk(top, sorted=False).indices.int()
        return {"q": normal(device, queries, heads, 576), "kv": normal(device, rows, 576, seed=2), "indices": named}

    def check(t: dict[str, Any], got: torch.Tensor) -> float:
        some = torch.arange(0, queries, max(1, queries // 7))
        return max(worst(got[i], attention(t["q"][i], t["kv"][t["indices"][i].long()], t["kv"][t["indices"][i].long(), :512]))
                   for i in some.tolist())

    return Case(make, sparse_mla, check, bar, 2.0 * queries * heads * top * 1088, 1152.0 * queries * top)


def paged(device: str, lengths: list[int], page: int) -> torch.Tensor:
    """A block table of pages in any order."""
    each = [-(-n // page) for n in lengths]
    pages = torch.randperm(sum(each), generator=torch.Generator().manual_seed(3)).int()
    table = torch.zeros(len(each), max(each), dtype=torch.int32)
    for row, mine in zip(table, pages.split(each)):
        row[:len(mine)] = mine
    return table.to(device)


def latent(batch: int, tokens: int, keys: int, heads: int, bar: tuple[str, float], dtype: torch.dtype = torch.bfloat16,
           page: int = 64, longest: int = 0) -> Case:
    """longest: keys of sequence 0, where they are not those of the others."""
    scales, lengths = {"kv_scale": 0.5} if dtype == FP8 else {}, [longest or keys, *[keys] * (batch - 1)]

    def make(device: str) -> dict[str, Any]:
        given, table = torch.tensor(lengths, dtype=torch.int32, device=device), paged(device, lengths, page)
        return {"q": normal(device, batch, tokens, heads, 576), "lengths": given,
                "kv_cache": normal(device, sum(-(-n // page) for n in lengths), page, 576, dtype=dtype, seed=2),
                "block_table": table, "plan": mla_plan(given, heads * tokens, known=lengths)}

    def check(t: dict[str, Any], got: torch.Tensor) -> float:
        out = 0.0
        for b in {0, batch // 2}:
            n = lengths[b]
            kv = t["kv_cache"][t["block_table"][b].long()].flatten(0, 1)[:n].double() * scales.get("kv_scale", 1.0)
            out = max(out, *(worst(got[b, i], attention(t["q"][b, i], kv[:n - tokens + 1 + i], kv[:n - tokens + 1 + i, :512]))
                             for i in range(tokens)))
        return out

    moved = 576.0 * sum(lengths) * (1 if dtype == FP8 else 2)
    return Case(make, mla_decode, check, bar, 2.0 * tokens * heads * sum(lengths) * 1088, moved, options=scales,
                reported=FLASH_MLA.get(keys, 0.0) if (batch, tokens, heads, dtype) == (128, 1, 128, torch.bfloat16) else 0.0)


# ---- grouped queries ------------------------------------------------------------------------------------------------------


def grouped(batch: int, tokens: int, group: int, keys: int, dtype: torch.dtype, kv_heads: int = 8, dim: int = 128,
            page: int = 64, longest: int = 0) -> Case:
    """longest: as for latent."""
    scales, lengths = {"k_scale": 0.5, "v_scale": 2.0} if dtype == FP8 else {}, [longest or keys, *[keys] * (batch - 1)]

    def make(device: str) -> dict[str, Any]:
        pages = sum(-(-n // page) for n in lengths)
        k, v = (normal(device, pages, page, kv_heads, dim, dtype=dtype, seed=s) for s in (1, 2))
        return {"q": normal(device, batch, tokens, kv_heads * group, dim), "k_cache": k, "v_cache": v,
                "lengths": torch.tensor(lengths, dtype=torch.int32, device=device), "block_table": paged(device, lengths, page)}

    def check(t: dict[str, Any], got: torch.Tensor) -> float:
        out = 0.0
        for b in {0, batch // 2}:
            at, h, n = t["block_table"][b].long(), kv_heads - 1, lengths[b]
            k, v = (t[name][at][:, :, h].reshape(-1, dim)[:n].double() * scales.get(s, 1.0)
                    for name, s in (("k_cache", "k_scale"), ("v_cache", "v_scale")))
            heads = slice(h * group, (h + 1) * group)
            out = max(out, *(worst(got[b, i, heads], attention(t["q"][b, i, heads], k[:n - tokens + 1 + i],
                                                               v[:n - tokens + 1 + i])) for i in range(tokens)))
        return out

    moved = 2.0 * sum(lengths) * kv_heads * dim * (1 if dtype == FP8 else 2)
    return Case(make, flash_decode, check, ("of a copy", 0.93), 4.0 * tokens * kv_heads * group * sum(lengths) * dim, moved,
                options=scales)


# ---- indices --------------------------------------------------------------------------------------------------------------


def largest(rows: int, n: int, k: int) -> Case:
    def check(t: dict[str, Any], got: torch.Tensor) -> float:
        want = t["scores"].topk(k, sorted=False).indices.sort().values.int()
        same = t["scores"].gather(1, got.long()).sort().values == t["scores"].gather(1, want.long()).sort().values
        return float(not (bool(same.all()) and bool((got[:, 1:] > got[:, :-1]).all())))

    return Case(lambda device: {"scores": normal(device, rows, n, dtype=torch.float32), "k": k}, topk_indices, check,
                ("of torch", 2.0), moved=4.0 * rows * (n + k), theirs=lambda scores, k: scores.topk(k, sorted=False))


def indexer(queries: int, keys: int, heads: int, dim: int = 128) -> Case:
    def make(device: str) -> dict[str, Any]:
        return {"q": normal(device, queries, heads, dim, dtype=FP8), "k": normal(device, keys, dim, dtype=FP8, seed=2),
                "weights": normal(device, queries, heads, dtype=torch.float32, seed=3)}

    def check(t: dict[str, Any], got: torch.Tensor) -> float:
        out = 0.0
        for i in range(0, queries, max(1, queries // 7)):
            q, k, w = t["q"][i].double(), t["k"].double(), t["weights"][i].double()
            want = w @ (q @ k.T).relu()
            out = max(out, worst(got[i], (want, 2.0**-12 * (w.abs() @ (q.abs() @ k.abs().T)))))
        return out

    return Case(make, index_scores, check, ("TFLOP/s", 1000.0), 2.0 * queries * keys * heads * dim)


GATHERED = "sparse mla 4096 x 64 heads"
PREFILL, DECODE = ("TFLOP/s", 560.0), ("TFLOP/s", 380.0)
CASES: dict[str, Case] = {
    **{f"sparse mla prefill 4096 x 128 heads of {rows}": sparse(4096, 128, 2048, rows, PREFILL) for rows in (8192, 65536)},
    **{f"sparse mla decode {n} x 128 heads": sparse(n, 128, 2048, 65536, DECODE) for n in (128, 256)},
    **{f"sparse mla 4096 x {h} heads": sparse(4096, h, 2048, 65536, ("of 64 heads", 0.8)) for h in (64, 32, 16, 8)},
    "index scores 4096 x 16384 x 64 heads": indexer(4096, 16384, 64),
    "index scores 2048 x 32768 x 32 heads": indexer(2048, 32768, 32),
    **{f"mla decode 128 x 1 tokens; {n} keys": latent(128, 1, n, 128, ("of FlashMLA", 1.08)) for n in FLASH_MLA},
    **{f"mla decode 128 x {t} tokens; {n} keys": latent(128, t, n, 128, ("TFLOP/s", 580.0)) for n in (4096, 8192)
       for t in (2, 4, 8)},
    **{f"mla decode 128 x {t} tokens; 8192 keys; {h} heads; fp8": latent(128, t, 8192, h, ("of a copy", 0.85), FP8)
       for t, h in ((1, 16), (1, 64), (1, 128), (2, 128))},
    **{f"decode {b} x {t} tokens; {g} heads a group; {n} keys; {name}": grouped(b, t, g, n, dtype)
       for name, dtype, b in (("bf16", torch.bfloat16, 32), ("fp8", FP8, 64))
       for n, g, t in ((8192, 8, 1), (8192, 8, 2), (8192, 8, 4), (8192, 8, 8), (8192, 4, 1), (8192, 4, 4), (8192, 1, 1),
                       (8192, 8, 16))},
    **{f"top-k {k} of {rows} x {n}": largest(rows, n, k) for rows, n, k in (
        (4096, 16384, 2048), (4096, 16383, 2048), (128, 131072, 2048), (1, 131072, 2048), (4096, 4096, 64), (4096, 8192, 2048),
        (16, 65536, 512), (64, 32768, 64), (2048, 32768, 2048))}}


KINDS = ("bf16", torch.bfloat16), ("fp8", FP8)
FURTHER: dict[str, Case] = {
    **{f"decode {b} x {t} tokens; {g} heads a group; {n} keys; {name}": grouped(b, t, g, n, dtype)
       for name, dtype in KINDS for g, t, b, n in (
           (4, 8, 64, 8192), (7, 1, 64, 8192), (7, 4, 64, 8192), (16, 1, 64, 8192), (16, 2, 64, 8192), (16, 4, 64, 8192),
           (8, 1, 1, 131072), (8, 4, 1, 131072), (8, 8, 1, 131072), (8, 1, 8, 4096), (8, 1, 256, 1024), (8, 8, 256, 1024))},
    **{f"decode 64 x {t} tokens; 8 heads a group; {n} keys; dim {d}; {name}": grouped(64, t, 8, n, dtype, dim=d)
       for name, dtype in KINDS for d, n in ((64, 8192), (96, 8192), (256, 4096)) for t in (1, 4, 8)},
    **{f"decode 64 x {t} tokens; 8 heads a group; 8192 keys; pages of {p}; {name}": grouped(64, t, 8, 8192, dtype, page=p)
       for name, dtype in KINDS for p, t in ((16, 1), (16, 8), (256, 1), (256, 8))},
    **{f"decode 32 x {t} tokens; 8 heads a group; 2048 keys, one of 131072; {name}":
       grouped(32, t, 8, 2048, dtype, longest=131072) for name, dtype in KINDS for t in (1, 8)},
    **{f"mla decode {b} x {t} tokens; {n} keys, first {m or n}; {h} heads; pages of {p}; {name}":
       latent(b, t, n, h, ("of the floor", 0.8), dtype, p, m)
       for name, dtype in KINDS for b, t, n, h, p, m in (
           (128, 1, 4096, 16, 64, 0), (128, 1, 4096, 64, 64, 0), (128, 1, 4096, 128, 256, 0), (1, 1, 131072, 128, 64, 0),
           (1, 1, 131072, 16, 64, 0), (32, 1, 2048, 128, 64, 131072), (32, 1, 2048, 16, 64, 131072),
           (128, 2, 4096, 20, 64, 0))},
    **{f"sparse mla {q} x {h} heads of {rows}, {top} each": sparse(q, h, top, rows, ("of the floor", 0.8))
       for q, h, top, rows in (
           (4096, 128, 512, 65536), (4096, 128, 1024, 65536), (4096, 128, 64, 65536), (8, 128, 2048, 131072),
           (1, 128, 2048, 131072), (64, 16, 2048, 65536), (1, 16, 2048, 65536), (4096, 40, 2048, 65536))},
    **{f"index scores {q} x {n} x {h} heads of {d}": indexer(q, n, h, d) for q, n, h, d in (
        (2048, 16384, 24, 128), (2048, 16384, 48, 128), (2048, 16384, 5, 128), (2048, 16384, 33, 128), (2048, 16384, 96, 128),
        (4096, 16384, 64, 64), (1024, 16384, 64, 256), (128, 131072, 64, 128), (1, 131072, 64, 128))},
    **{f"top-k {k} of {rows} x {n}": largest(rows, n, k) for n in (4096, 8192, 16384, 65536, 131072)
       for rows in (1, 8, 64, 512, 8192) for k in (64, 256, 512, 1024, 2048, 4096)
       if k < n and rows * n <= 1 << 28 and (rows, n, k) not in ((1, 131072, 2048),)}}


def copy_bandwidth(meter: Any) -> float:
    """Bytes read and written by a second of a large copy."""
    x = torch.ones(1 << 30, dtype=torch.bfloat16, device="cuda")
    y = torch.empty_like(x)
    ready = meter.prepare(lambda: y.copy_(x))
    return 2e3 * x.numel() * x.element_size() / median(meter.window(ready, 8.0).ms for _ in range(5))


def measure(c: Case, meter: Any, rounds: int, ms: float, checked: bool) -> dict[str, Any]:
    """Errors and times of ours and its peer."""
    given = c.make("cuda")
    error = c.check(given, c.ours(**given, **c.options)) if checked else 0.0
    row: dict[str, Any] = {"error": error, "bar": c.bar, "us": 0.0}
    if not rounds:
        return row
    calls = {"us": lambda: c.ours(**given, **c.options), **({"torch us": lambda: c.theirs(**given)} if c.theirs else {})}
    ready = {who: meter.prepare(call, 2.0) for who, call in calls.items()}
    times: dict[str, list[float]] = {who: [] for who in ready}
    for r in range(rounds):
        for who in sorted(ready, reverse=bool(r % 2)):
            times[who].append(meter.window(ready[who], ms).ms * 1e3)
    for who, t in times.items():
        row[who], row[f"spread {who}"] = median(t), (max(t) - min(t)) / median(t)
    return row


def summed_up(name: str, row: dict[str, Any], c: Case, copy: float, gathered: float | None) -> str:
    """Adds rates and the ratio to the bar; the text of a row.  gathered: GB/s with 64 heads."""
    us, (unit, bar) = row["us"], c.bar
    row["TFLOP/s"], row["GB/s"] = c.flops / us / 1e6, c.moved / us / 1e3
    row["of a copy"], row["of torch"] = row["GB/s"] * 1e9 / copy, row.get("torch us", 0.0) / us
    row["of FlashMLA"], row["of 64 heads"] = c.reported / us, row["GB/s"] / (gathered or row["GB/s"] or 1.0)
    floors = row["us of bytes"], row["us of products"] = c.moved / copy * 1e6, c.flops / SUSTAINED * 1e6
    row["of the floor"] = max(floors) / us
    text = f"{name:56s} {us:9.1f} us {row['TFLOP/s']:7.1f} TFLOP/s {row['GB/s']:7.1f} GB/s {row['of a copy']:5.2f} of a copy"
    if c.ours in (flash_decode, mla_decode):
        text += " floors {:.0f}, {:.0f} us: {:.2f}".format(*floors, row["of the floor"])
    text += f", torch {row['torch us']:.1f} us, {row['of torch']:.2f}" if c.theirs else ""
    text += f"; bar {bar:g} {unit}: {row[unit] / bar:.2f}" if bar else ""
    return text + f"; spread {row['spread us']:.3f}; error {row['error']:.2f} of the bound" + " WRONG" * (row["error"] > 1)


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--only", default="", help="cases that contain one of these")
    options.add_argument("--further", action="store_true", help="other shapes than those that have bars")
    options.add_argument("--rounds", type=int, default=5, help="windows of each; 0: only the errors")
    options.add_argument("--unchecked", action="store_true", help="only times")
    options.add_argument("--ms", type=float, default=8.0, help="of a window")
    options.add_argument("--out", default="", help="write the rows as JSON")
    o = options.parse_args()
    from suite.measuring import CudaMeter

    meter = CudaMeter(0.03)
    copy = copy_bandwidth(meter) if o.rounds else 0.0
    rows: list[dict[str, Any]] = []
    print(torch.cuda.get_device_name(), f"copy {copy / 1e12:.2f} TB/s", flush=True)
    for name, c in (FURTHER if o.further else CASES).items():
        if o.only and not any(w in name for w in o.only.split(",")):
            continue
        try:
            row = measure(c, meter, o.rounds, o.ms, not o.unchecked)
        except Exception as e:  # a case that fails does not end the run
            rows.append({"name": name, "failed": f"{type(e).__name__}: {str(e).splitlines()[0][:200]}"})
            print(name, rows[-1]["failed"], flush=True)
            continue
        if not o.rounds:
            print(f"{name:56s} error {row['error']:.2f} of the bound" + " WRONG" * (row["error"] > 1), flush=True)
            continue
        gathered = next((r["GB/s"] for r in rows if r["name"] == GATHERED and "us" in r), None)
        print(summed_up(name, row, c, copy, gathered), flush=True)
        rows.append({"name": name, **row})
        if o.out:
            Path(o.out).write_text(json.dumps({"device": torch.cuda.get_device_name(), "torch": torch.__version__,
                                               "copy TB/s": copy / 1e12, "rows": rows}, indent=1))
        torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
