"""Whole-tensor programs beside torch.compile: those of tests/program/whole_programs.py and their torch forms.

    python benchmarks/programs.py --slice 0/3           # a third of them (about two minutes on an H200)
    python benchmarks/programs.py --only attention      # kinds, or parts of names
    python benchmarks/programs.py --mode max-autotune-no-cudagraphs --only mlp,cross_entropy  # graphs are made here
    python benchmarks/programs.py --device cpu          # float32 programs beside inductor's C++
    python benchmarks/programs.py --changed             # changed programs beside what they were made of
    python benchmarks/programs.py --list

Each program is checked at its small sizes against NumPy, and at the size that is timed against its torch form in float64.
Then CUDA graphs of both take turns (on the CPU: calls), each row as it comes; a time is the median of the rounds, the spread
(most - least) / median.  Loops over a sequence have torch's eager form as their peer: torch.compile unrolls them for minutes.
Plain and causal attention stand beside library.flash_attention too.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE), str(HERE.parent / "tests" / "program")]

LOOPS = ("linear_attention", "recurrent")
LIBRARY = {"attention_plain": False, "attention_causal": True}  # rows beside library.flash_attention -> causal
CPU_ELEMENTS = 1 << 22  # of the largest array, on the CPU


def chosen(o: argparse.Namespace) -> list[Any]:
    """The cases that the words of o.only name (kinds, or parts of names; none: all), of o.slice; on the CPU without halves."""
    from changed_programs import CHANGED
    from whole_programs import CASES

    words = [w.strip() for w in o.only.split(",") if w.strip()]
    cases = [c for c in CASES if not words or any(w == c.kind or w in c.name for w in words)]
    if o.device == "cpu" and not o.changed:
        cases = [c for c in cases if not any(s[1] in ("float16", "bfloat16") for s in c.large.values())]
    if o.changed:
        cases = [c for c in cases if any(c is base for base, _ in CHANGED.values())]
    k, n = map(int, o.slice.split("/"))
    return cases[k::n]


def tensor_of(a: Any, device: str) -> torch.Tensor:
    """The torch tensor of a NumPy array."""
    if str(a.dtype) == "bfloat16":
        return torch.from_numpy(a.view("int16")).view(torch.bfloat16).to(device)
    return torch.as_tensor(a).to(device)


def arrays_of(case: Any, spec: dict[str, tuple], device: str) -> list[torch.Tensor]:
    """Large arguments, drawn on the device with the distributions of the case's small ones."""
    made = torch.Generator(device).manual_seed(7)
    kinds = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32, "int8": torch.int8,
             "uint8": torch.uint8, "int32": torch.int32, "bool": torch.bool}
    out = []
    for shape, dt, *high in spec.values():
        if dt == "bool":
            out.append(torch.rand(shape, device=device, generator=made) < 0.7)
        elif kinds[dt].is_floating_point:
            draw = torch.rand if high == ["unit"] else torch.randn
            factor = high[0] if high and high != ["unit"] else 1.0
            out.append((draw(shape, device=device, generator=made) * factor).to(kinds[dt]))
        else:
            low, end = (-128, 128) if dt == "int8" else (0, (high or [256 if dt == "uint8" else 1000])[0])
            out.append(torch.randint(low, end, shape, device=device, generator=made, dtype=torch.int32).to(kinds[dt]))
    return out


def as_tuple(x: Any) -> tuple[Any, ...]:
    """Results as a tuple."""
    return tuple(x) if isinstance(x, (tuple, list)) else (x,)


def check_small(case: Any, device: str) -> None:
    """The program at small sizes against NumPy in float64.  Raises AssertionError."""
    import ml_dtypes

    for spec in (case.small, *case.also):
        args = case.arguments(spec)
        got = as_tuple(case.program(*(tensor_of(a, device) for a in args.values())))
        case.check(tuple(g.float().cpu().numpy().astype(ml_dtypes.bfloat16) if g.dtype == torch.bfloat16 else g.cpu().numpy()
                         for g in got), args, 4)


def error_of(case: Any, got: Any, peer: Callable[..., Any], args: list[torch.Tensor]) -> float:
    """The greatest error at the timed size: 1 is the bound, or 1.5 times torch's own error where that is larger.

    The bound is rounds * eps * the greatest value, times the root of the length of a sum.  Integers must be torch's.
    """
    wide = [a.double() if a.is_floating_point() else a for a in args]
    worst = 0.0
    for g, n, w in zip(as_tuple(got), as_tuple(peer(*args)), as_tuple(peer(*wide)), strict=True):
        if not g.is_floating_point():
            worst = max(worst, 0.0 if bool((g == n).all()) else math.inf)
            continue
        finite = torch.isfinite(w.to(g.dtype))  # what overflows in the type of the result
        size = w[finite].abs().max().item() + 1e-30
        eps = max(torch.finfo(x.dtype).eps / 2 for x in (g, *(a for a in args if a.is_floating_point())))
        error, theirs = (torch.where(finite, x.double() - w, 0).abs().max().item() / size for x in (g, n))
        longest = max(a.shape[-1] for a in args if a.dim())
        worst = max(worst, error / max(case.rounds * eps * max(1.0, math.sqrt(longest / 64)), 1.5 * theirs))
    return worst


def graph_of(fn: Callable[[], Any], calls: int) -> Callable[[], None]:
    """A CUDA graph of some calls."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            fn()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            fn()
    return graph.replay


def timed(fns: list[Callable[[], Any]], device: str, rounds: int) -> list[tuple[float, float]]:
    """(median microseconds, spread) of each function, in alternation."""
    if device == "cpu":
        return _on_cpu(fns, rounds)
    once = []
    for f in fns:
        f()
        torch.cuda.synchronize()
        start = time.perf_counter()
        f()
        torch.cuda.synchronize()
        once.append(time.perf_counter() - start)
    calls = [max(1, min(50, int(4e-3 / t))) for t in once]
    runs = [graph_of(f, n) for f, n in zip(fns, calls)]
    found: list[list[float]] = [[] for _ in fns]
    for _ in range(rounds):
        for times, run, n in zip(found, runs, calls):
            time.sleep(0.01)
            run()
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            run()
            end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end) / n * 1e3)
    return [(statistics.median(t), (max(t) - min(t)) / statistics.median(t)) for t in found]


def _on_cpu(fns: list[Callable[[], Any]], rounds: int) -> list[tuple[float, float]]:
    found: list[list[float]] = [[] for _ in fns]
    for _ in range(rounds + 1):
        for times, f in zip(found, fns):
            start, n = time.perf_counter(), 0
            while n == 0 or time.perf_counter() - start < 0.05:
                f()
                n += 1
            times.append((time.perf_counter() - start) / n * 1e6)
    return [(statistics.median(t[1:]), (max(t[1:]) - min(t[1:])) / statistics.median(t[1:])) for t in found]


def smaller(spec: dict[str, tuple]) -> dict[str, tuple]:
    """Sizes for a CPU: those that several arrays share are halved together until the largest array is small enough, and
    with them the numbers that index such an axis."""
    while max(math.prod(s[0]) for s in spec.values()) > CPU_ELEMENTS:
        largest = max(n for s in spec.values() for n in s[0])
        spec = {k: (tuple(n // 2 if n == largest else n for n in s[0]), s[1], *(n // 2 if n == largest else n for n in s[2:]))
                for k, s in spec.items()}
    return spec


def row_of(case: Any, o: argparse.Namespace) -> dict[str, Any]:
    """Checks and times one program."""
    from suite.torch_programs import PROGRAMS

    row: dict[str, Any] = {"name": case.name, "kind": case.kind}
    check_small(case, o.device)
    args = arrays_of(case, smaller(case.large) if o.device == "cpu" else case.large, o.device)
    peer = PROGRAMS[case.name]
    start = time.perf_counter()
    got = case.program(*args)
    row["compile_s"] = time.perf_counter() - start
    row["error"] = error_of(case, got, peer, args)
    del got
    fn = peer if case.name in LOOPS else torch.compile(peer, mode=None if o.mode == "default" else o.mode)
    row["peer"] = "eager" if case.name in LOOPS else o.mode
    start = time.perf_counter()
    fn(*args)
    row["peer_compile_s"] = time.perf_counter() - start
    ours, other, *more = timed([lambda: case.program(*args), lambda: fn(*args), *of_library(case, args, o)], o.device, o.rounds)
    row |= {"us": ours[0], "spread": ours[1], "peer_us": other[0], "peer_spread": other[1], "ratio": other[0] / ours[0]}
    if more:
        row |= {"library_us": more[0][0], "library_spread": more[0][1], "library_ratio": more[0][0] / ours[0]}
    return row


def of_library(case: Any, args: list[torch.Tensor], o: argparse.Namespace) -> list[Callable[[], Any]]:
    """The library's own attention, where a row stands beside it."""
    if o.device == "cpu" or case.name not in LIBRARY:
        return []
    from tilelang.library import flash_attention

    return [lambda: flash_attention(*args, causal=LIBRARY[case.name], layout="bhsd")]


def beside_library(row: dict[str, Any]) -> str:
    """What a printed row says of the library's attention."""
    return f", library {row['library_us']:.1f}, {row['library_ratio']:.3f}" if "library_us" in row else ""


def prepare(case: Any, o: argparse.Namespace) -> str:
    """In a worker: the first calls of both, which leave what they compile in the disk caches.  What went wrong, or ""."""
    from changed_programs import CHANGED
    from suite.torch_programs import PROGRAMS

    changed = [program for base, program in CHANGED.values() if o.changed and base is case]
    try:
        args = arrays_of(case, smaller(case.large) if o.device == "cpu" else case.large, o.device)
        for program in (case.program, *changed):
            for spec in (case.small, *case.also):
                program(*(tensor_of(a, o.device) for a in case.arguments(spec).values()))
            program(*args)
        for library in of_library(case, args, o):
            library()
        if case.name not in LOOPS and not o.changed:
            torch.compile(PROGRAMS[case.name], mode=None if o.mode == "default" else o.mode)(*args)
    except Exception as e:
        return f"{case.name}: {type(e).__name__}: {str(e).splitlines()[0][:160] if str(e) else ''}"
    finally:
        if o.device == "cuda":
            torch.cuda.empty_cache()
    return ""


def _prepared(job: tuple[int, argparse.Namespace]) -> str:
    warnings.simplefilter("ignore")
    return prepare(chosen(job[1])[job[0]], job[1])


def prepare_all(o: argparse.Namespace, count: int) -> None:
    """Compile all programs in processes of their own, so that what is timed later finds them on disk."""
    start = time.perf_counter()
    with ProcessPoolExecutor(o.workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        for problem in filter(None, pool.map(_prepared, [(k, o) for k in range(count)])):
            print("prepare", problem, flush=True)
    print(f"compiled in {time.perf_counter() - start:.1f} s by {o.workers} processes", flush=True)


def changed_rows(o: argparse.Namespace) -> None:
    """Times the programs of tests/program/changed_programs.py beside those that they were made of, by turns."""
    from changed_programs import CHANGED, agree

    rates = []
    rows = []
    for name, (case, program) in CHANGED.items():
        if case not in chosen(o):
            continue
        try:
            agree(program, [tensor_of(a, o.device) for a in case.arguments().values()], case)
            args = arrays_of(case, smaller(case.large) if o.device == "cpu" else case.large, o.device)
            (before, other), (after, spread) = timed([partial(f, *args) for f in (case.program, program)],
                                                       o.device, o.rounds)
            rates.append(before / after)
            rows.append({"name": name, "us": round(after, 4), "spread": round(spread, 4), "from": case.name,
                         "from_us": round(before, 4), "from_spread": round(other, 4), "rate": round(rates[-1], 4)})
            print(f"{name:40} {after:10.1f} us ({spread:.3f}), {case.name} {before:10.1f} ({other:.3f}), rate {rates[-1]:.3f}",
                  flush=True)
        except Exception as e:  # one program must not end the others
            print(f"{name:40} FAILED {type(e).__name__}: {str(e).splitlines()[0][:160] if str(e) else ''}", flush=True)
        if o.device == "cuda":
            torch.cuda.empty_cache()
        write(rows, o)
    print(f"{len(rates)} changed programs: {sum(r >= 0.9 for r in rates)} at 0.9 of the rate or more, least {min(rates):.3f}")


def write(rows: list[dict[str, Any]], o: argparse.Namespace) -> None:
    """The rows so far and what they were measured on, as JSON where --out names a file."""
    if o.out:
        device = torch.cuda.get_device_name() if o.device == "cuda" else "cpu"
        about = {"date": date.today().isoformat(), "torch": torch.__version__, "command": sys.argv[1:], "device": device}
        Path(o.out).write_text(json.dumps({"about": about, "rows": rows}, indent=1))


def summary(rows: list[dict[str, Any]]) -> str:
    """The geometric mean, the least ratio, and what failed."""
    ratios = [r["ratio"] for r in rows if "ratio" in r]
    bad = [r["name"] for r in rows if "ratio" not in r or r["error"] > 1]
    mean = math.exp(statistics.fmean(map(math.log, ratios))) if ratios else math.nan
    return f"{len(ratios)} rows: geometric mean {mean:.3f}, least {min(ratios, default=math.nan):.3f}; failed or wrong: {bad}"


def main() -> None:
    """Run the command line."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--only", default="", help="kinds, or parts of names")
    p.add_argument("--slice", default="0/1", help="the k-th of n slices of the programs")
    p.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    p.add_argument("--mode", default="default", help="of torch.compile")
    p.add_argument("--rounds", type=int, default=7)
    p.add_argument("--workers", type=int, default=0, help="processes that compile everything first")
    p.add_argument("--list", action="store_true")
    p.add_argument("--changed", action="store_true", help="changed programs beside what they were made of")
    p.add_argument("--out", default="", help="write the rows as JSON")
    o = p.parse_args()
    warnings.simplefilter("ignore")
    rows: list[dict[str, Any]] = []
    cases = chosen(o)
    if o.workers and not o.list:
        prepare_all(o, len(cases))
    if o.changed:
        return changed_rows(o)
    for case in cases:
        if o.list:
            print(case.kind, case.name)
            continue
        try:
            row = row_of(case, o)
            print(f"{row['kind']:12} {row['name']:24} {row['us']:10.1f} us, {row['peer']} {row['peer_us']:10.1f}, ratio "
                  f"{row['ratio']:.3f}, error {row['error']:.2f}{' WRONG' if row['error'] > 1 else ''}"
                  f"{beside_library(row)}", flush=True)
        except Exception as e:  # one program must not end the others
            row = {"name": case.name, "kind": case.kind, "failed": f"{type(e).__name__}: {e}"}
            print(f"{case.kind:12} {case.name:24} FAILED {row['failed'].splitlines()[0][:120]}", flush=True)
        rows.append(row)
        if o.device == "cuda":
            torch.cuda.empty_cache()
        write(rows, o)
    if not o.list:
        print(summary(rows))


if __name__ == "__main__":
    main()
