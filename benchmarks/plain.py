"""Plain programs beside the best form known of the same work, on one GPU.

    python benchmarks/plain.py                             # all: checked, then timed in turns with what they are compared with
    python benchmarks/plain.py --only attention,gathers    # kinds, or parts of names
    python benchmarks/plain.py --compile --out FILE.json   # no GPU: registers, spills, serialised wgmma and schedules
    python benchmarks/plain.py --compile --of RECORD.json  # no GPU: what is predicted now, beside the times of a record
    python benchmarks/plain.py --list

The programs are those of suite/plain: kernels without warp roles, layouts or instructions.  Each result is compared with
float64 first.  A program that is compared with a call of torch, of the library or of FlashAttention-3 (where it is installed)
takes turns with it; one that is compared with another plain program, or with a copy, has the rate of that program, or of a
copy of 2 GiB, in the same run.
ratio: its rate by that rate.  The table ends with the geometric mean of each kind and the rows below 0.75.
The clock of a row is the mean of an SM's cycles while its windows run.  At that clock the kernel's schedule predicts a time
(predicted_us, and least_us that no schedule falls below); the table ends with the errors of each kind.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

HOPPER = {"kind": "cuda", "arch": "sm_90a"}
CONFIG = "PLAIN_PASS_CONFIGS"  # of --config, for the workers that compile


def chosen(text: str) -> list[str]:
    """Names of programs of the given kinds, or whose names contain a given part; with what they are compared with."""
    from suite.plain import CORPUS

    words = [w.strip() for w in text.split(",") if w.strip()]
    found = [n for n, p in CORPUS.items() if not words or any(w == p.kind or w in n for w in words)]
    beside = [CORPUS[n].best[1] for n in found if CORPUS[n].best[0] == "program"]
    return [n for n in CORPUS if n in {*found, *beside}]


def kernel_of(name: str, target: Any) -> Any:
    import tilelang
    from suite.plain import CORPUS

    p = CORPUS[name]
    config = {**p.config, **json.loads(os.environ.get(CONFIG, "{}"))}
    return tilelang.compile(p.program(**p.full), target=target, pass_configs=config or None)


def said_by(e: Exception) -> str:
    """An error in a record: its kind and the beginning of its text, without the folder of this checkout."""
    return f"{type(e).__name__}: {str(e).replace(f'{HERE.parent}{os.sep}', '')[:300]}"


def described(name: str, mhz: float | None = None) -> dict[str, Any]:
    """Of a program compiled for sm_90a: what its kernel uses and how it is scheduled, and its time at this clock.  Runs in a
    worker."""
    import logging
    import warnings

    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    begin = time.perf_counter()
    try:
        kernel = kernel_of(name, HOPPER)
        facts = kernel.report_data["kernels"]
    except Exception as e:
        return {"error": said_by(e)}
    return {"seconds": round(time.perf_counter() - begin, 2), **(forecast(kernel, mhz) if mhz else {}), "kernels": [
        {k: f[k] for k in ("registers", "spills", "serialised", "shared_bytes", "schedule", "overlap", "declined")} | {
            "mma": sorted(f["instructions"].get("MMAs", {})), "loads": sorted(f["instructions"].get("loads",
                                                                                                    {}))} for f in facts]}


def compile_all(names: list[str], workers: int, clocks: dict[str, float]) -> dict[str, dict[str, Any]]:
    with ProcessPoolExecutor(max(1, workers), mp_context=multiprocessing.get_context("spawn")) as pool:
        return dict(zip(names, pool.map(described, names, map(clocks.get, names))))


def checked(p: Any, kernel: Any, tensors: Any) -> float:
    """The largest error of a call over its bound."""
    import torch

    want = p.reference(tensors, p.full)
    kernel(*(tensors[n] for n in p.tensors(**p.full)))
    torch.cuda.synchronize()
    return max(float(((tensors[n].double() - w).abs() / b).nan_to_num(nan=math.inf).max()) for n, w, b in want)


def measured(name: str, o: argparse.Namespace) -> dict[str, Any]:
    """Error, times of the program and of the call it is compared with."""
    import torch
    from suite.measuring import CudaMeter, Cycles
    from suite.plain import CORPUS

    p, meter = CORPUS[name], CudaMeter(o.idle, Cycles())
    kernel = kernel_of(name, "auto")
    tensors = p.make(p.full, "cuda")
    row: dict[str, Any] = {"name": name, "kind": p.kind, "of_bound": checked(p, kernel, tensors)}
    torch.cuda.empty_cache()
    arguments = [tensors[n] for n in p.tensors(**p.full)]
    ready = {"ours": meter.prepare(lambda: kernel(*arguments))}
    if callable(p.best[-1]):
        row["best"] = p.best[0]
        ready["best"] = meter.prepare(lambda: p.best[1](torch, tensors))
    times: dict[str, list[float]] = {k: [] for k in ready}
    clocks: list[float] = []
    for k in range(o.rounds):
        for who in list(ready)[::1 if k % 2 else -1]:
            window = meter.window(ready[who], o.ms)
            times[who].append(window.ms)
            clocks += [window.clock_mhz] if who == "ours" and window.clock_mhz else []
    row.update(ms=median(times["ours"]), spread=max(times["ours"]) / min(times["ours"]) - 1)
    if clocks:
        row.update(mhz=median(clocks), **forecast(kernel, median(clocks)))
    row.update(tflops=p.flops(**p.full) / row["ms"] * 1e-9, gbps=p.bytes(p.full) / row["ms"] * 1e-6)
    if "best" in times:
        row.update(best_ms=median(times["best"]), ratio=median(times["best"]) / row["ms"])
    return row


def forecast(kernel: Any, mhz: float) -> dict[str, float]:
    """Microseconds of a call at this clock by the schedules of its kernels; {} where only the call decides their length."""
    from tilelang.jit.report import predicted

    each = [predicted(kernel.target, facts, mhz) for facts in kernel.report_data["kernels"]]
    return {} if None in each else {"predicted_us": sum(x["us"] for x in each if x),
                                    "least_us": sum(x["least"] for x in each if x)}


def copy_rate(o: argparse.Namespace) -> float:
    """GB/s read and written by a copy on the device."""
    import torch
    from suite.measuring import CudaMeter

    a, meter = torch.randn(1 << 28, device="cuda"), CudaMeter(o.idle)
    b = torch.empty_like(a)
    ready = meter.prepare(lambda: b.copy_(a))
    return 2 * a.nbytes / median(meter.window(ready, o.ms).ms for _ in range(5)) * 1e-6


def compared(rows: dict[str, dict[str, Any]], copy: float) -> None:
    """Enter the ratio of the programs that are compared with another program or with a copy."""
    from suite.plain import CORPUS

    for name, row in rows.items():
        best = CORPUS[name].best
        if best[0] == "copy":
            row.update(best="copy", ratio=row.get("gbps", 0.0) / copy)
        elif best[0] == "program" and "ms" in row and "ms" in rows.get(best[1], {}):
            row.update(best=best[1], ratio=row["tflops"] / rows[best[1]]["tflops"])


def mean(values: list[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values)) if values else math.nan


def summary(rows: dict[str, dict[str, Any]]) -> list[str]:
    good = {n: r for n, r in rows.items() if r.get("ratio") and r["of_bound"] <= 1}
    kinds = dict.fromkeys(r["kind"] for r in good.values())
    out = [f"{kind:18} {mean([r['ratio'] for r in good.values() if r['kind'] == kind]):.3f}" for kind in kinds]
    out.append(f"{'all':18} {mean([r['ratio'] for r in good.values()]):.3f} ({len(good)} of {len(rows)} rows)")
    for kind in kinds:
        off = [r["predicted_us"] / r["ms"] * 1e-3 - 1 for r in good.values() if r["kind"] == kind and "predicted_us" in r]
        if off:
            out.append(f"{kind:18} predicted within 10 %: {sum(abs(e) <= 0.1 for e in off)} of {len(off)}, median error "
                       f"{100 * median(map(abs, off)):.1f} %")
    out += [f"faster than its bound: {n}" for n, r in good.items() if r.get("least_us", 0.0) > r["ms"] * 1e3]
    return out + [f"below 0.75: {n} {r['ratio']:.2f}" for n, r in sorted(good.items(), key=lambda x: x[1]["ratio"])
                  if r["ratio"] < 0.75]


def line(r: dict[str, Any]) -> str:
    if "error" in r:
        return f"{r['name']:52} FAILED {r['error']}"
    wrong = "" if r["of_bound"] <= 1 else "  WRONG"
    return (f"{r['name']:52} {r['ms']:9.4f} ms {r['tflops']:6.0f} TFLOP/s {r['gbps']:6.0f} GB/s +-{100 * r['spread']:.1f} %"
            f"  ratio {r.get('ratio', math.nan):.3f} of {r.get('best', '?')}{foreseen(r)}{wrong}")


def foreseen(r: dict[str, Any]) -> str:
    """The clock, the predicted time at it and its error."""
    if "predicted_us" not in r:
        return f"  at {r['mhz']:.0f} MHz" if "mhz" in r else ""
    off = r["predicted_us"] / r["ms"] * 1e-3 - 1
    return f"  at {r['mhz']:.0f} MHz predicted {r['predicted_us']:.1f} us ({100 * off:+.0f} %), least {r['least_us']:.1f}"


def main() -> int:
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument("--only", default="", help="kinds, or parts of names")
    a.add_argument("--rounds", type=int, default=3)
    a.add_argument("--ms", type=float, default=8.0, help="of a window")
    a.add_argument("--idle", type=float, default=0.02)
    a.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 1))
    a.add_argument("--budget-seconds", type=float, default=550.0)
    a.add_argument("--compile", action="store_true", help="only compile, for sm_90a: needs no GPU")
    a.add_argument("--of", default="", help="a record: predict at its clocks")
    a.add_argument("--config", default="", help='pass configs of all programs, as JSON: {"tl.disable_warp_specialized": true}')
    a.add_argument("--list", action="store_true")
    a.add_argument("--out", default="", help="write the rows as JSON")
    o = a.parse_args()
    os.environ[CONFIG] = o.config or "{}"
    names, begin = chosen(o.only), time.time()
    if o.list:
        print("\n".join(names))
        return 0
    rows: dict[str, dict[str, Any]] = {r["name"]: r for r in json.loads(Path(o.of).read_text())["rows"]} if o.of else {}
    facts = compile_all(names, o.workers, {n: r["mhz"] for n, r in rows.items() if "mhz" in r})
    print(f"{len(names)} programs compiled after {time.time() - begin:.0f} s", flush=True)
    if o.compile:
        for n, f in facts.items():
            shown = f.get("error") or [(k["registers"], k["spills"], k["serialised"], k["overlap"]) for k in f["kernels"]]
            print(f"{n:52} {shown}")
        if o.out:
            Path(o.out).write_text(json.dumps(facts, indent=1) + "\n")
        rows = {n: {**r, **facts[n]} for n, r in rows.items() if n in facts and "ms" in r}
        print("\n".join([*map(line, rows.values()), *summary(rows)] if rows else []))
        return 0
    import torch

    copy = copy_rate(o)
    record: dict[str, Any] = {"what": "plain programs", "device": torch.cuda.get_device_name(), "torch": torch.__version__,
                              "date": time.strftime("%Y-%m-%d"), "copy_gbps": copy,
                              "config": json.loads(o.config or "{}")}
    rows = {}
    for n in names:
        if time.time() - begin > o.budget_seconds:
            print("no time for", n, flush=True)
            continue
        try:
            rows[n] = measured(n, o)
        except Exception as e:
            rows[n] = {"name": n, "kind": "", "of_bound": math.inf, "error": said_by(e)}
        torch.cuda.empty_cache()
        compared(rows, copy)
        print(line(rows[n]), flush=True)
        if o.out:
            Path(o.out).write_text(json.dumps({**record, "rows": list(rows.values()), "compiled": facts}, indent=1) + "\n")
    compared(rows, copy)
    print("\n".join([f"a copy: {copy:.0f} GB/s", *summary(rows), f"{time.time() - begin:.0f} s"]))
    return 1 if any(r["of_bound"] > 1 for r in rows.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
