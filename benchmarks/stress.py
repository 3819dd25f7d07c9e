"""Do library kernels give the same bits every time?  Many launches with changing inputs, three streams, memcheck.

    python benchmarks/stress.py [--launches 10000] [--only nt,fp8*] [--no-sanitizer] [--out stress-out]

Of each kernel: a few sets of inputs are computed once and compared with a float64 reference; then every launch takes a set,
half of the time copied into the same memory as before, and its result must have the bits of the first.  The same from
three streams at once, and once more under compute-sanitizer (memcheck, where it is installed).  A case that hangs or loses
the device costs itself only.  Results: a table and OUT/stress.json.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a checkout works without being installed
sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
from suite import compiling
from suite.stress_cases import CASES, Case, Tensors

SETS, STREAMS = 6, 3
MEMCHECK_LAUNCHES = 3


def bits(x: torch.Tensor) -> torch.Tensor:
    """The tensor's bits as integers: NaN equals itself."""
    return x.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])


class Launches:
    """Launches of a case on the current stream, their differences counted on the device."""

    def __init__(self, case: Case, sets: list[Tensors], wanted: list[torch.Tensor], device: str, first: int) -> None:
        self.case, self.sets, self.wanted, self.at = case, sets, wanted, first
        self.place = {k: v.clone() for k, v in sets[0].items()}
        self.bad = torch.zeros((), dtype=torch.int64, device=device)

    def one(self) -> None:
        i = self.at
        self.at += 1
        chosen = (i * 7 + i // len(self.sets)) % len(self.sets)
        tensors = self.sets[chosen]
        if i % 2:
            for name, x in self.place.items():
                x.copy_(tensors[name])
            tensors = self.place
        self.bad += (bits(self.case.run(tensors)) != self.wanted[chosen]).any()


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    found = float((got.double() - want).norm() / want.norm().clamp(min=1e-30))
    return found if found == found else float("inf")


def stress(case: Case, launches: int, device: str) -> dict[str, Any]:
    """The result of one case: "error", "limit", "wrong" and "wrong_streams" (launches with other bits), seconds."""
    start = time.perf_counter()
    sets = [case.inputs(device, seed) for seed in range(SETS)]
    first = [case.run(t) for t in sets]
    error = max(relative(f, case.reference(t)) for f, t in zip(first, sets))
    wanted = [bits(f) for f in first]
    one = Launches(case, sets, wanted, device, 0)
    for _ in range(launches):
        one.one()
    wrong = int(one.bad)
    out = {"case": case.name, "launches": launches, "error": error, "limit": case.limit, "wrong": wrong,
           "wrong_streams": None}
    if device == "cuda":
        streams = [torch.cuda.Stream() for _ in range(STREAMS)]
        torch.cuda.synchronize()
        runs = []
        for n, s in enumerate(streams):
            with torch.cuda.stream(s):
                runs.append(Launches(case, sets, wanted, device, n))
        for _ in range(launches // STREAMS):
            for s, r in zip(streams, runs):
                with torch.cuda.stream(s):
                    r.one()
        torch.cuda.synchronize()
        out["wrong_streams"] = sum(int(r.bad) for r in runs)
    out["seconds"] = round(time.perf_counter() - start, 2)
    return out


def good(r: dict[str, Any]) -> bool:
    return "problem" not in r and r["error"] <= r["limit"] and not r["wrong"] and not r["wrong_streams"]


def worker(names: list[str], launches: int, device: str) -> None:
    """Cases one after another, a JSON line each."""
    for name in names:
        print(json.dumps({"begin": name}), flush=True)
        try:
            out = stress(CASES[name], launches, device)
        except Exception as e:
            out = {"case": name, "problem": f"{type(e).__name__}: {str(e).splitlines()[0] if str(e) else ''}"[:300]}
            lost = device == "cuda" and _lost()
            print(json.dumps(out), flush=True)
            if lost:
                os._exit(1)
            continue
        print(json.dumps(out), flush=True)


def _lost() -> bool:
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def supervise(names: list[str], launches: int, device: str, seconds: float) -> list[dict[str, Any]]:
    """Results of all cases; the worker is started again behind a case that takes too long or ends it."""
    results: dict[str, dict[str, Any]] = {}
    while todo := [n for n in names if n not in results]:
        child = subprocess.Popen([sys.executable, __file__, "--worker", "--only", ",".join(todo), "--launches", str(launches),
                                  "--device", device], stdout=subprocess.PIPE, text=True)
        lines: queue.Queue[str] = queue.Queue()

        def read(stream: Any = child.stdout, into: Any = lines) -> None:
            for line in stream:
                into.put(line)
            into.put("")

        threading.Thread(target=read, daemon=True).start()
        current, why = todo[0], ""
        while not why:
            try:
                line = lines.get(timeout=seconds)
            except queue.Empty:
                why = f"not done after {seconds:.0f} s"
                break
            if not line:
                why = "the process ended"
            elif line.startswith("{"):
                found = json.loads(line)
                if "begin" in found:
                    current = found["begin"]
                else:
                    results[found["case"]] = found
                    print(row(found), flush=True)
        child.kill()
        child.wait()
        if current not in results:
            results[current] = {"case": current, "problem": why}
            print(row(results[current]), flush=True)
    return [results[n] for n in names]


def row(r: dict[str, Any]) -> str:
    if "problem" in r:
        return f"{r['case']:24s} {r['problem']}"
    streams = "-" if r["wrong_streams"] is None else r["wrong_streams"]
    return (f"{r['case']:24s} {'ok   ' if good(r) else 'WRONG'} error {r['error']:.1e} of {r['limit']:.1e}; other bits in "
            f"{r['wrong']} of {r['launches']} launches, on streams {streams}; {r['seconds']:.1f} s")


def sanitizer() -> str | None:
    return shutil.which("compute-sanitizer") or next(
        (str(p) for p in sorted(Path("/usr/local").glob("cuda*/bin/compute-sanitizer"), reverse=True)), None)


def memcheck(name: str, tool: str, kind: str, seconds: float) -> dict[str, Any]:
    """One case under compute-sanitizer: its last line, and whether it found nothing."""
    command = [tool, "--tool", kind, "--error-exitcode", "9", sys.executable, __file__, "--worker", "--only", name,
               "--launches", str(MEMCHECK_LAUNCHES)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        return {"case": name, "tool": kind, "ok": False, "last": f"not done after {seconds:.0f} s"}
    lines = (done.stdout + done.stderr).strip().splitlines()
    found = [json.loads(x) for x in done.stdout.splitlines() if x.startswith("{") and "begin" not in x]
    verdict = next((x for x in reversed(lines) if x.startswith("=========")), lines[-1] if lines else "")
    return {"case": name, "tool": kind, "ok": done.returncode == 0 and all(map(good, found)) and bool(found),
            "last": verdict, "errors": [x for x in lines if x.startswith("=========")][:20] if done.returncode else []}


def chosen(patterns: str) -> list[str]:
    """Names of the cases.  Raises SystemExit for a pattern that names none."""
    wanted = [p.strip() for p in patterns.split(",") if p.strip()]
    for p in wanted:
        if not any(fnmatchcase(n, p) for n in CASES):
            raise SystemExit(f"no case is called {p!r}: {', '.join(CASES)}")
    return [n for n in CASES if not wanted or any(fnmatchcase(n, p) for p in wanted)]


def main(argv: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--launches", type=int, default=10_000, help="of each case, and again as many from streams")
    p.add_argument("--only", default="", help=f"patterns of {', '.join(CASES)}")
    p.add_argument("--tools", default="memcheck", help="of compute-sanitizer, comma-separated (racecheck, initcheck, ...)")
    p.add_argument("--no-sanitizer", action="store_true")
    p.add_argument("--case-seconds", type=float, default=90.0, help="a case that takes longer is broken off")
    p.add_argument("--device", default="cuda", help="cpu: the CPU target, without streams")
    p.add_argument("--out", default="bench-out", help="folder of stress.json")
    p.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = p.parse_args(argv)
    names = chosen(args.only)
    if args.worker:
        worker(names, args.launches, args.device)
        return 0
    with tempfile.TemporaryDirectory(prefix="stress-") as caches:  # the sanitizer's processes find the kernels there
        os.environ.update(compiling.private_caches(Path(caches)))
        return run(args, names, Path(args.out))


def run(args: argparse.Namespace, names: list[str], out: Path) -> int:
    """All cases, then the sanitizer; the results as a table and in OUT/stress.json."""
    out.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("TILELANG_PRINT_ON_COMPILATION", "0")
    start = time.time()
    results = supervise(names, args.launches, args.device, args.case_seconds)
    report: dict[str, Any] = {"launches": args.launches, "results": results, "sanitizer": []}
    _write(out, report)
    tool = None if args.no_sanitizer or args.device != "cuda" else sanitizer()
    if tool:
        with ThreadPoolExecutor(max(1, (os.cpu_count() or 2) // 2)) as pool:
            jobs = [(n, kind) for kind in args.tools.split(",") for n in names]
            for found in pool.map(lambda j: memcheck(j[0], tool, j[1], 2 * args.case_seconds), jobs):
                report["sanitizer"].append(found)
                print(f"{found['case']:24s} {found['tool']} {'ok' if found['ok'] else 'FOUND'}: {found['last']}", flush=True)
    elif not args.no_sanitizer:
        report["sanitizer_skipped"] = "compute-sanitizer is not installed" if args.device == "cuda" else "no GPU"
    report["seconds"] = round(time.time() - start, 1)
    _write(out, report)
    bad = [r["case"] for r in results if not good(r)] + [f"{s['case']} ({s['tool']})" for s in report["sanitizer"]
                                                         if not s["ok"]]
    print(f"{len(results)} cases, {args.launches} launches each, {len(bad)} bad{': ' + ', '.join(bad) if bad else ''}; "
          f"{report['seconds']} s; wrote {out / 'stress.json'}")
    return 1 if bad else 0


def _write(out: Path, report: dict[str, Any]) -> None:
    (out / "stress.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
