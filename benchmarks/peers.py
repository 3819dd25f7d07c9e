"""Our kernels beside their peers, in one interleaved run on a GPU.

    python benchmarks/peers.py [--workloads '@M-nt-f16,FA*'] [--providers tilelang,cublas] [--rounds 5]
                               [--budget-seconds 540] [--out results] [--cubins FOLDER] [--list]

Everything is compiled first, by as many processes as there are cores.  Each result is compared with a float64 reference
before it is timed.  Then rounds: for every workload each provider gets one burst window (12 ms) and one sustained window
(100 ms), each after the same idling, the order moving on from round to round.  A figure is the median over the rounds, a
ratio the median of the ratios within rounds.  When time is short the later rounds are dropped.  Results are written to
OUT/peers.json after every step; a process that hangs or loses the device is started again without what broke it.
Calls shorter than 0.1 ms are replayed from a CUDA graph.  The cache is warm: a call's operands are those of the call before.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a checkout works without being installed
sys.path.insert(0, str(Path(__file__).resolve().parent))

from suite import cold, compiling, providers, report, supervising
from suite.record import Record
from suite.workloads import TINY, WORKLOADS, Workload, select

HERE = Path(__file__).resolve().parent
MARGIN = 10.0  # seconds kept for the end of a run
COLD = ("SQ4096-nt-f16", "FA-8k-c")


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--workloads", default="*,!@tiny", help="names, patterns, @groups and shapes (gemm:4096x512x4096:nn:bf16,"
                   " attention:b2h32/8s4096d64:causal), comma-separated; ! takes out")
    p.add_argument("--providers", default="", help=f"of {', '.join(providers.MODULES)}; default "
                   f"{','.join(providers.DEFAULT)}")
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--budget-seconds", type=float, default=540.0, help="for all of it; later rounds are dropped")
    p.add_argument("--compile-seconds", type=float, default=150.0, help="at most, of the budget")
    p.add_argument("--workers", type=int, default=compiling.default_workers(), help="compiling processes")
    p.add_argument("--no-cold", action="store_true", help="without the cold compiles in processes of their own")
    p.add_argument("--idle", type=float, default=0.5, help="seconds before each window")
    p.add_argument("--burst-ms", type=float, default=12.0)
    p.add_argument("--sustained-ms", type=float, default=100.0)
    p.add_argument("--hang-seconds", type=float, default=60.0, help="a step that takes longer is broken off")
    p.add_argument("--device", default="cuda", help="cpu: for trying the harness with providers torch and "
                   "suite.provider_tilelang:on_cpu")
    p.add_argument("--cubins", default="", help="folder of prebuilt kernels with an index.json (suite/provider_cubin.py)")
    p.add_argument("--out", default="bench-out", help="folder of the results")
    p.add_argument("--list", action="store_true", help="print workloads and providers, and end")
    p.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    p.add_argument("--deadline", type=float, default=0.0, help=argparse.SUPPRESS)
    return p


def listing() -> None:
    for w in (*WORKLOADS.values(), *TINY.values()):
        print(f"{w.name:16s} {w.shape:32s} {w.flops * 1e-9:10.1f} GFLOP  {' '.join('@' + g for g in w.groups)}")
    for name in providers.MODULES:
        try:
            made = providers.get(name)
            print(f"{name:10s} {made.text}{'; here: ' + made.unavailable() if made.unavailable() else ''}")
        except ImportError as e:
            print(f"{name:10s} not here: {e}")


def machine() -> dict[str, Any]:
    """Versions and the device, as far as they are to be had."""
    out: dict[str, Any] = {"date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
                           "python": platform.python_version(), "cores": os.cpu_count()}
    import torch

    import tilelang

    out.update(torch=torch.__version__, torch_cuda=torch.version.cuda, tilelang=tilelang.__version__)
    if torch.cuda.is_available():
        props = torch.cuda.get_device_properties(0)
        out.update(gpu=props.name, sms=props.multi_processor_count, memory=props.total_memory,
                   cudnn=torch.backends.cudnn.version())
    try:
        import triton
        out["triton"] = triton.__version__
    except ImportError:
        pass
    try:
        out["driver"] = subprocess.run(["nvidia-smi", "--query-gpu=driver_version,power.limit,clocks.max.sm",
                                        "--format=csv,noheader"], capture_output=True, text=True, timeout=20,
                                       check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        pass
    return out


def usable(names: list[str], record: Record) -> list[str]:
    """Providers that can be used here; the others are recorded with their reason."""
    out = []
    for name in names:
        try:
            why = providers.get(name).unavailable()
        except ImportError as e:
            why = f"not installed: {e}"
        if why:
            record.event(f"provider {name} left out: {why}")
        else:
            out.append(name)
    return out


def work(args: argparse.Namespace, record: Record, chosen: list[Workload]) -> int:
    """The measuring process."""
    from suite.measuring import meter_for
    from suite.session import Plan, Poisoned, Session, worker_environment

    worker_environment()
    made = [providers.get(n) for n in record.data["options"]["usable"]]
    session = Session(record, made, meter_for(args.device, args.idle),
                      Plan(args.rounds, args.burst_ms, args.sustained_ms, args.deadline))
    try:
        session.run(chosen)
    except Poisoned as e:
        print(e, file=sys.stderr)
        sys.stderr.flush()
        os._exit(supervising.POISONED)  # destructors would call into the lost context
    return 0


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    p = parser()
    args = p.parse_args(argv)
    if args.list:
        listing()
        return 0
    try:
        chosen, names = select(args.workloads), providers.names(args.providers)
    except ValueError as e:
        p.error(str(e))
    path = Path(args.out) / "peers.json"
    if args.cubins:
        os.environ["TILELANG_BENCH_CUBINS"] = str(Path(args.cubins).resolve())
    if args.worker:
        return work(args, Record.load(path), chosen)
    with tempfile.TemporaryDirectory(prefix="peers-") as caches:
        return run(args, argv, chosen, names, path, Path(caches))


def run(args: argparse.Namespace, argv: list[str], chosen: list[Workload], names: list[str], path: Path,
        caches: Path) -> int:
    """The watching process: compile, measure in another process, report."""
    start = time.time()
    path.parent.mkdir(parents=True, exist_ok=True)
    record = Record(path)
    record.data["machine"] = machine()
    record.data["options"] = {**{k: v for k, v in vars(args).items() if k not in ("worker", "deadline", "list")},
                              "usable": usable(names, record)}
    record.save()
    os.environ.update(compiling.private_caches(caches))
    os.environ.setdefault("TILELANG_PRINT_ON_COMPILATION", "0")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH"))))
    good = record.data["options"]["usable"]
    prepare(args, record, good, chosen)
    deadline = start + args.budget_seconds - MARGIN
    command = [sys.executable, str(Path(__file__).resolve()), *argv, "--worker", "--deadline", str(deadline)]
    supervising.supervise(command, path, args.hang_seconds, deadline)
    record = Record.load(path)
    record.data["seconds"] = round(time.time() - start, 1)
    record.save()
    made = [providers.get(n) for n in good]
    text = report.summary(record.data, [p.name for p in made], [p.name for p in made if p.is_peer])
    print(text)
    path.with_suffix(".txt").write_text(text + "\n", encoding="utf-8")
    print(f"wrote {path}, {record.data['seconds']} s")
    broken = [s for r in record.data["rows"].values() for n, s in r["providers"].items()
              if n == report.OURS and s.get("status") not in ("ok", "skipped")]
    return 1 if broken or not record.data["rows"] else 0


def prepare(args: argparse.Namespace, record: Record, good: list[str], chosen: list[Workload]) -> None:
    """Compile everything in parallel, then a few kernels cold, one at a time."""
    begin = time.time()
    todo = compiling.jobs(good, chosen)
    record.data["compile"] = compiling.compile_all(todo, args.workers, args.compile_seconds)
    record.save()
    print(f"compiled {len(todo)} configurations in {time.time() - begin:.0f} s", flush=True)
    if not args.no_cold:
        wanted = [w for w in chosen if w.name in COLD] or [w for w in chosen if w.name in TINY][:1]
        record.data["cold"] = cold.measure(good, wanted)
        record.save()


if __name__ == "__main__":
    sys.exit(main())
