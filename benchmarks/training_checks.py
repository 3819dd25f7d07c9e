"""Every function of the library with a gradient, forward and backward, on one device: is it right in every way it is used?

    python benchmarks/training_checks.py [--only kda,mamba2] [--launches 10000] [--workers 8] [--out FILE.json]
    python benchmarks/training_checks.py --host            # what the host takes for a call, and for each kernel of it
    python benchmarks/training_checks.py --sanitizer memcheck,racecheck
    python benchmarks/training_checks.py --device cpu      # what a machine without a GPU can check

Columns.  error: the largest of the result and the gradients against float64, over that of torch's formula in the same types
(at most 1.5).  anew: kernels compiled for another length, and for a third one (none).  shared: the error of that other length,
whose kernels all further ones share.  opcheck: torch.library.opcheck of both operators.  graph: captured in a CUDA graph
without a wait for the device, replayed with the same bits.  compiled: torch.compile(fullgraph=True) of a block around the call,
beside the same block without it.  bits: launches of forward and backward whose results have other bits than the first ones.
Each case has a process of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

import torch  # noqa: E402
from stress import bits, relative, sanitizer  # noqa: E402
from suite.training_cases import CASES, Case, make  # noqa: E402

LIMIT = 1.5  # of our error over torch's
SMALL = 2.0**-20  # errors below this are roundings of float32
CHECKS = "error", "anew", "shared", "opcheck", "graph", "compiled", "bits"


def results(call: Callable[..., torch.Tensor], given: list[torch.Tensor], grad: torch.Tensor) -> list[torch.Tensor]:
    out = call(*given)
    return [out.detach(), *torch.autograd.grad(out, given, grad.to(out.dtype))]


def replayed(call: Callable[..., torch.Tensor], like: list[torch.Tensor],
             grad: torch.Tensor) -> Callable[[list[torch.Tensor], torch.Tensor], list[torch.Tensor]]:
    """`results` of a call for tensors like these, from a CUDA graph, whose tensors the next call overwrites."""
    own, grad = [x.clone().requires_grad_() for x in like], grad.clone()
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        results(call, own, grad)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        made = results(call, own, grad)

    def run(given: list[torch.Tensor], g: torch.Tensor) -> list[torch.Tensor]:
        with torch.no_grad():
            for x, y in zip((*own, grad), (*given, g)):
                x.copy_(y)
        graph.replay()
        return made

    return run


class Checks:
    """The checks of one case on a device.  Each returns what the table shows, and raises where it finds a fault."""

    def __init__(self, case: Case, device: str, launches: int) -> None:
        self.case, self.device, self.launches = case, device, launches
        self.given = make(case, device, case.lengths[0])
        self.grad = self._gradient(self.given)
        self.first = results(case.ours, self.given, self.grad)

    def again(self) -> list[torch.Tensor]:
        return results(self.case.ours, self.given, self.grad)

    def _gradient(self, given: list[torch.Tensor]) -> torch.Tensor:
        """That of the result for these tensors."""
        out = self.case.ours(*given)
        g = torch.Generator(device=self.device).manual_seed(1)
        return torch.randn(out.shape, device=self.device, generator=g).to(out.dtype)

    def error(self) -> str:
        return self._error(self.case.lengths[0], self.given, self.grad)

    def shared(self) -> str:
        given = make(self.case, self.device, self.case.lengths[1])
        return self._error(self.case.lengths[1], given, self._gradient(given))

    def _error(self, length: int, like: list[torch.Tensor], grad: torch.Tensor) -> str:
        """Of several draws together: a gradient of few numbers is off by more or less by chance, and two of 16 may decide."""
        sums: list[list[float]] = []
        draws = min(16, max(4, *(64 // x.numel() for x in like))) if self.device == "cuda" else 1
        exact, usual_of = (partial(results, self.case.torchs), ) * 2
        if draws > 4:  # a formula of a step at a time takes thousands of launches
            exact, usual_of = (replayed(self.case.torchs, [x.detach().to(t or x.dtype) for x in like], grad)
                               for t in (torch.float64, None))
        for seed in range(draws):
            given = make(self.case, self.device, length, seed=seed)
            wanted = exact([x.detach().double().requires_grad_() for x in given], grad.double())
            found, usual = results(self.case.ours, given, grad), usual_of(given, grad)
            sums.append([float(v) for w, *xs in zip(wanted, found, usual)
                         for v in (w.square().sum(), *((x.double() - w).square().sum() for x in xs))])
        whole = [sum(x) for x in zip(*sums)]
        names = ["result", *(f"gradient {k}" for k in range(len(self.given)))]
        rows = [((o / w)**0.5, (t / w)**0.5, n) for w, o, t, n in zip(whole[::3], whole[1::3], whole[2::3], names)]
        ratio, ours, what = max((o / max(t, SMALL), o, n) for o, t, n in rows)
        if not ratio <= LIMIT:
            raise AssertionError(f"{what} is off by {ours:.1e}, {ratio:.2f} of torch's")
        return f"{ratio:.2f} ({ours:.0e})"

    def anew(self) -> str:
        from tilelang.library.place import FITTING, KERNELS

        found = []
        for length, most in ((self.case.lengths[1], self.case.anew), (sum(self.case.lengths) // 2, 0)):
            before, other = len(KERNELS) + len(FITTING), make(self.case, self.device, length)
            out = self.case.ours(*other)
            torch.autograd.grad(out, other, torch.ones_like(out))
            found.append(len(KERNELS) + len(FITTING) - before)
            if found[-1] > most:
                raise AssertionError(f"{found[-1]} kernels are compiled for the length {length}, {most} expected")
        return ", ".join(map(str, found))

    def opcheck(self) -> str:
        calls: list[tuple[Any, tuple[Any, ...]]] = []

        class Seen(torch.utils._python_dispatch.TorchDispatchMode):
            def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                if op.namespace == "tilelang_library":
                    calls.append((op, args))
                return op(*args, **(kwargs or {}))

        with Seen():
            self.again()
        names = {op._opname for op, _ in calls}
        while calls:  # none is kept: a graph that lived on would bind later ones to its stream
            _opcheck(*calls.pop())
        if not any(n.endswith("_backward") for n in names):
            raise AssertionError(f"no operator of a gradient was called: {sorted(names)}")
        return f"{len(names)} ok"

    def graph(self) -> str:
        if self.device != "cuda":
            return "-"
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            self.again()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        with torch.cuda.stream(side):
            self.again()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            made = self.again()
        for _ in range(3):
            graph.replay()
        torch.cuda.synchronize()
        self.same(made, "of a graph")
        return "ok"

    def compiled(self) -> str:
        def block(*given: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.silu(self.case.ours(*given)) * 0.5

        model = torch.compile(block, fullgraph=True, **({} if self.device == "cuda" else {"backend": "aot_eager"}))
        found, wanted = (results(f, self.given, self.grad) for f in (model, block))
        worst = max(relative(a, b.double()) for a, b in zip(found, wanted))
        if worst > 2.0**-7:  # roundings between the operations of the block, which the compiler leaves out
            raise AssertionError(f"the compiled block is off by {worst:.1e}")
        return "ok"

    def bits(self) -> str:
        if not self.case.fixed:
            return "not promised"
        wanted, wrong = [bits(x) for x in self.first], torch.zeros((), dtype=torch.int64, device=self.device)
        start = time.perf_counter()
        for _ in range(self.launches):
            wrong += sum((bits(x) != w).any() for x, w in zip(self.again(), wanted)) > 0
        if int(wrong):
            raise AssertionError(f"{int(wrong)} of {self.launches} launches have other bits")
        return f"0 of {self.launches} ({time.perf_counter() - start:.0f} s)"

    def same(self, made: list[torch.Tensor], what: str) -> None:
        for k, (x, y) in enumerate(zip(made, self.first)):
            if not torch.equal(bits(x), bits(y)):
                raise AssertionError(f"result {k} {what} has other bits")


def _opcheck(op: Any, args: tuple[Any, ...]) -> None:
    detached = tuple(x.detach().clone() if isinstance(x, torch.Tensor) else x for x in args)
    torch.library.opcheck(op, detached, test_utils=("test_schema", "test_faketensor"))


def check(name: str, device: str, launches: int, only: tuple[str, ...] = CHECKS) -> dict[str, Any]:
    """All checks of a case: column -> text; "faults": column -> what is wrong."""
    row: dict[str, Any] = {"name": name, "faults": {}}
    start = time.perf_counter()
    try:
        checks = Checks(CASES[name], device, launches)
    except Exception as e:
        return {**row, "faults": {"call": _text(e)}}
    for column in only:
        try:
            row[column] = getattr(checks, column)()
        except Exception as e:
            row[column], row["faults"][column] = "FAULT", _text(e)
    return {**row, "seconds": round(time.perf_counter() - start, 1)}


def _text(e: Exception) -> str:
    return "".join(traceback.format_exception(e, limit=-4))[-1800:]


def line(row: dict[str, Any]) -> str:
    return f"{row['name']:32s}" + "".join(f"{c} {row.get(c, '-'):18s}" for c in CHECKS) + f"{row.get('seconds', 0):6.1f} s"


def host(names: list[str], calls: int) -> list[dict[str, Any]]:
    """Microseconds of the host for a call, the least of several means, and the kernels that it launches."""
    rows = []
    for name in names:
        case = CASES[name]
        given = make(case, "cuda", case.lengths[0])
        plain, out = [x.detach() for x in given], case.ours(*given)
        grad = torch.ones_like(out)
        row: dict[str, Any] = {"name": name}
        for what, run in (("forward", partial(case.ours, *plain)), ("both", partial(results, case.ours, given, grad))):
            row[what] = {"us": queued(run, calls), "kernels": kernels_of(run)}
        rows.append(row)
        print(f"{name:32s} " + ", ".join(f"{w} {row[w]['us']:7.1f} us for {row[w]['kernels']:3d} kernels, "
                                         f"{row[w]['us'] / max(1, row[w]['kernels']):5.1f} each" for w in ("forward", "both")),
              flush=True)
    return rows


def queued(run: Callable[[], Any], calls: int) -> float:
    """Microseconds until a call is queued.  Few are queued at once: a full queue would wait for the device."""
    for _ in range(5):
        run()
    found = []
    for _ in range(8):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            run()
        found.append((time.perf_counter() - start) / calls * 1e6)
    return min(found)


def kernels_of(run: Callable[[], Any]) -> int:
    """Kernels, copies and fills on the device in a call."""
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as p:
        run()
        torch.cuda.synchronize()
    return sum(e.count for e in p.key_averages() if e.self_device_time_total > 0)


def command(name: str, o: argparse.Namespace) -> list[str]:
    return [sys.executable, __file__, "--one", name, "--device", o.device, "--launches", str(o.launches),
            "--columns", o.columns]


def in_process(name: str, o: argparse.Namespace) -> dict[str, Any]:
    try:
        done = subprocess.run(command(name, o), capture_output=True, text=True, timeout=o.seconds, check=False)
    except subprocess.TimeoutExpired:
        return {"name": name, "faults": {"time": f"not done after {o.seconds} s"}}
    last = done.stdout.strip().splitlines()[-1:] or [""]
    if last[0].startswith("{"):
        return dict(json.loads(last[0]))
    return {"name": name, "faults": {"process": f"ended with {done.returncode}: {(done.stdout + done.stderr)[-1500:]}"}}


def sanitized(name: str, tool: str, o: argparse.Namespace) -> dict[str, Any]:
    """One case under compute-sanitizer, forward and backward."""
    program, o = sanitizer(), argparse.Namespace(**{**vars(o), "columns": "bits", "launches": 1})
    if program is None:
        return {"name": name, "faults": {tool: "compute-sanitizer is not installed"}}
    whole = [program, "--tool", tool, "--error-exitcode", "9", "--kernel-name-exclude", "kernel_substring=at::native",
             *command(name, o)]
    try:
        done = subprocess.run(whole, capture_output=True, text=True, timeout=o.seconds, check=False)
    except subprocess.TimeoutExpired:
        return {"name": name, "faults": {tool: f"not done after {o.seconds} s"}}
    lines = [x for x in (done.stdout + done.stderr).splitlines() if x.startswith("=========")]
    row = {"name": name, tool: lines[-1] if lines else "no report", "faults": {}}
    if done.returncode:
        row["faults"] = {tool: "\n".join(lines[:40]) or (done.stdout + done.stderr)[-1500:]}
    return row


def write(rows: list[dict[str, Any]], path: str) -> None:
    if path:
        Path(path).write_text(json.dumps(rows, indent=1) + "\n")


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--only", default="", help="cases that contain one of these")
    options.add_argument("--device", default="cuda")
    options.add_argument("--launches", type=int, default=10_000, help="of forward and backward, for the same bits")
    options.add_argument("--columns", default=",".join(CHECKS))
    options.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) // 2))
    options.add_argument("--seconds", type=float, default=600.0, help="a case that takes longer is broken off")
    options.add_argument("--host", action="store_true")
    options.add_argument("--sanitizer", default="", help="tools of compute-sanitizer: memcheck,racecheck,initcheck,synccheck")
    options.add_argument("--out", default="", help="write the rows as JSON")
    options.add_argument("--one", default="", help=argparse.SUPPRESS)
    o = options.parse_args()
    if o.one:
        print(json.dumps(check(o.one, o.device, o.launches, tuple(o.columns.split(",")))))
        return 0
    names = [n for n in CASES if not o.only or any(w in n for w in o.only.split(","))]
    print(torch.cuda.get_device_name() if o.device == "cuda" else "CPU", flush=True)
    if o.host:
        rows = host(names, 20)
    else:
        jobs: list[Callable[[], dict[str, Any]]] = [lambda n=n: in_process(n, o) for n in names]
        if o.sanitizer:
            jobs = [lambda n=n, t=t: sanitized(n, t, o) for t in o.sanitizer.split(",") for n in names]
        rows = []
        with ThreadPoolExecutor(o.workers) as pool:
            for done in as_completed([pool.submit(job) for job in jobs]):
                rows.append(row := done.result())
                print(line(row) if not o.sanitizer else str({k: v for k, v in row.items() if k != "faults"}), flush=True)
                for column, text in row["faults"].items():
                    print(f"    {column}: {text}", flush=True)
                write(rows, o.out)
    write(rows, o.out)
    bad = [r["name"] for r in rows if r.get("faults")]
    print(f"{len(rows)} rows, {len(bad)} with faults{': ' + ', '.join(bad) if bad else ''}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
