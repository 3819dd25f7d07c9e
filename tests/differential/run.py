"""Runs generated programs on every execution and compares them.

    python tests/differential/run.py --programs 3000 --seed 1 --jobs 2 --out /tmp/differential
    python tests/differential/run.py --programs 500 --seed 1 --jobs 16 --gpu --out /tmp/differential-gpu

Every program is a file in OUT/programs that runs by itself.  Results are lines of OUT/results.jsonl; a second run with
the same OUT goes on where the first one ended.  OUT/summary.json counts outcomes by execution and by feature.  Programs
that fail are cut down (--shrink N: the first N) and left in OUT/failures.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import json
import os
import pathlib
import platform
import sys
import time
from typing import Any

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from gen_hopper import is_hopper  # noqa: E402
from gen_program import make_program  # noqa: E402
from gen_text import features, source  # noqa: E402
from shrinking import shrink  # noqa: E402
from workers import Worker, run_all  # noqa: E402

EXECUTIONS = ("tile", "sm_80", "sm_90a", "cpu")


def program_seed(seed: int, index: int) -> int:
    return seed * 1_000_003 + index


def executions_of(seed: int, gpu: bool = False, cubin: bool = False) -> tuple[str, ...]:
    """What a program runs on: the meaning, and the device, or the CPU and the simulator of one architecture in turn."""
    if gpu or cubin:
        return ("tile", "cuda") if gpu else ("tile", "cubin")
    if is_hopper(seed):
        return ("tile", "sm_90a", "cpu")
    return ("tile", ("sm_80", "sm_90a", "sm_90a")[seed % 3], "cpu")


def status_of(outcomes: dict[str, Any]) -> str:
    """"failed" when anything did, else "agrees" when all did, else "refused"."""
    found = {o["status"] for o in outcomes.values()}
    return "failed" if "failed" in found else "refused" if "refused" in found else "agrees"


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Counts of outcomes: whole programs, by execution, by kind of error, by feature."""
    out: dict[str, Any] = {"programs": len(rows), "status": dict(collections.Counter(r["status"] for r in rows))}
    by: dict[str, Any] = collections.defaultdict(collections.Counter)
    kinds: dict[str, Any] = collections.defaultdict(collections.Counter)
    found: dict[str, Any] = collections.defaultdict(collections.Counter)
    for r in rows:
        for name, o in r["outcomes"].items():
            by[name][o["status"]] += 1
            if o["status"] != "agrees":
                kinds[name][f"{o['status']}: {o['kind']}"] += 1
        for f in r["features"]:
            found[f][r["status"]] += 1
    out["executions"] = {k: dict(v) for k, v in sorted(by.items())}
    out["kinds"] = {k: dict(v.most_common()) for k, v in sorted(kinds.items())}
    drawn = coverage({f: sum(c.values()) for f, c in found.items()})
    out["never drawn"] = [f for f, n in drawn.items() if not n]
    out["features"] = {k: dict(v) for k, v in sorted(found.items())}
    return out


EXPECTED = """
    accumulate:shared alloc:global alloc:shared:bool alloc:shared:int4 atomic:add:int32 atomic:addx2 atomic:load
    atomic:or atomic:order atomic:return atomic:store atomic:tile-add atomic:tile-scalar atomic:shared-add branch:else
    branch:loaded copy:async copy:fragment->fragment copy:global->fragment copy:global->global copy:global->shared
    copy:shared->fragment copy:shared->shared copy-option:prefer_instruction copy-option:annotations expr:clamp
    expr:invert expr:named expr:square gemm:ff gemm:fs gemm:sf gemm:ss gemm:slice gemm:float8 gemm:int8
    hopper:cluster-bulk hopper:cluster-elements hopper:handed hopper:multicast hopper:nreg hopper:one-thread
    hopper:tma hopper:wgmma hopper:ws index:guarded index:negative index:outside int4:copy int4:elements kernels:2
    loop:T.Persistent loop:T.Pipelined loop:T.grid loop:T.unroll loop:T.loop_break loop:break loop:continue
    loop:ordered loop:ordered-annotations loop:ordered-group loop:while loop:while-break macro macro:ref-added
    macro:ref-added_twice macro:ref-results mask:any_of mask:read parallel:run-time parallel:spread-sum
    parallel:two-stores random:integer reduce:absmax reduce:abssum reduce:batch reduce:bitxor reduce:dim0/1
    reduce:dim0/2 reduce:dim0/3 reduce:dim1/2 reduce:dim1/3 reduce:dim2/3 reduce:generic reduce:nan_propagate
    reducer:sum return scalar:assign scan:cummax scan:cumsum shape:dynamic stages:0 stages:4 stages:user1 stages:user3
    stated:assert stated:assume strides:dynamic strides:inner strides:static thread:T.vectorized thread:barrier-in-if
    thread:shuffle threads:odd transpose use_swizzle vector:abs2 vector:slice view:bits view:of-view view:fragment
    view:shared warp:any warp:ballot warp:shfl warp:sum warp:syncthreads-count workspace:copy
""".split()


def coverage(counts: dict[str, int]) -> dict[str, int]:
    """How many programs drew each part of the language that the generator means to cover (names are beginnings)."""
    return {e: sum(n for f, n in counts.items() if f == e or f.startswith((e + ":", e + "->"))
                   or (e in ("atomic:addx2", "gemm:float8", "atomic:order") and f.startswith(e))) for e in EXPECTED}


def machine(gpu: bool) -> dict[str, Any]:
    """Where a run was made."""
    found: dict[str, Any] = {"date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "cores": os.cpu_count(),
                             "python": platform.python_version()}
    if gpu:
        import torch

        found["gpu"] = torch.cuda.get_device_name()
    return found


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--programs", type=int, default=300)
    p.add_argument("--first", type=int, default=0, help="index of the first program")
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    p.add_argument("--out", type=pathlib.Path, default=pathlib.Path("differential-out"))
    p.add_argument("--gpu", action="store_true", help="compare the CUDA device with the tile meaning")
    p.add_argument("--cubin", action="store_true", help="only compile the CUDA source of every program, no device needed")
    p.add_argument("--record", type=pathlib.Path, help="also write the summary, with the machine it was made on, to this file")
    p.add_argument("--profile", help="draw all programs from one profile")
    p.add_argument("--shrink", type=int, default=0, help="cut down the first N programs that fail")
    p.add_argument("--cut", help="cut down the program of this seed or .json file, and do nothing else")
    p.add_argument("--coverage", action="store_true", help="only draw the programs, and print how often what is drawn")
    p.add_argument("--wanted", default="failed", choices=("failed", "refused"), help="the outcome that --cut keeps")
    a = p.parse_args()
    if a.cut is not None:
        program = make_program(int(a.cut), a.profile) if a.cut.isdigit() else json.loads(pathlib.Path(a.cut).read_text())
        cut_down(program, ("tile", "cuda") if a.gpu else EXECUTIONS, a.out, wanted=a.wanted)
        return 0
    if a.coverage:
        drawn = collections.Counter(f for i in range(a.programs)
                                    for f in features(make_program(program_seed(a.seed, a.first + i), a.profile)))
        found = coverage(drawn)
        for name, n in sorted(found.items(), key=lambda x: x[1]):
            print(f"{n:6} {name}")
        return 1 if not all(found.values()) else 0
    (a.out / "programs").mkdir(parents=True, exist_ok=True)
    log = a.out / "results.jsonl"
    rows = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    known = {r["seed"] for r in rows}
    seeds = [s for s in (program_seed(a.seed, i) for i in range(a.first, a.first + a.programs)) if s not in known]
    made: dict[int, Any] = {}

    def write(seed: int) -> pathlib.Path:
        program = make_program(seed, a.profile)
        made[seed] = program
        path = a.out / "programs" / f"p{seed}.py"
        path.write_text(source(program))
        return path

    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    start = time.time()
    failures: list[int] = []
    with Progress(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()) as bar, \
            log.open("a") as file:
        task = bar.add_task("programs", total=len(seeds))

        def done(seed: int, path: pathlib.Path, outcomes: dict[str, Any]) -> None:
            program = made.pop(seed)
            row = {"seed": seed, "profile": program["profile"], "status": status_of(outcomes), "features": features(program),
                   "outcomes": outcomes}
            rows.append(row)
            file.write(json.dumps(row) + "\n")
            file.flush()
            if row["status"] == "failed":
                failures.append(seed)
                path.with_suffix(".json").write_text(json.dumps(program))
                bad = {k: f"{o['kind']}: {o['text']}" for k, o in outcomes.items() if o["status"] == "failed"}
                bar.console.print(f"[red]failed[/red] {path} {bad}", markup=True, soft_wrap=True)
            else:
                path.unlink()
            bar.advance(task)

        run_all([(s, lambda s=s: write(s), executions_of(s, a.gpu, a.cubin)) for s in seeds], a.jobs, done,
                {"TILELANG_CACHE_DIR": str(a.out / "cache"), "TILELANG_VERIFY": os.environ.get("TILELANG_VERIFY", "1")})
    out = summary(rows)
    out.update(seed=a.seed, seconds=round(time.time() - start, 1))
    (a.out / "summary.json").write_text(json.dumps(out, indent=1) + "\n")
    if a.record:
        a.record.write_text(json.dumps({"machine": machine(a.gpu), **out}, indent=1) + "\n")
    print(json.dumps({k: out[k] for k in ("programs", "status", "executions", "kinds", "never drawn")}, indent=1))
    for seed in failures[:a.shrink]:
        cut_down(make_program(seed, a.profile), executions_of(seed, a.gpu), a.out)
    return 1 if out["status"].get("failed") else 0


def cut_down(program: dict[str, Any], executions: tuple[str, ...], out: pathlib.Path, budget: int = 400,
             wanted: str = "failed") -> pathlib.Path:
    """Shrink a failing program, keep its file in out/failures and print it."""
    folder = out / "failures"
    folder.mkdir(parents=True, exist_ok=True)
    worker = Worker({"TILELANG_CACHE_DIR": str(out / "cache"), "TILELANG_VERIFY": "1"}, timeout=60)
    path = folder / f"p{program['seed']}.py"

    trials = itertools.count()

    def outcome(p: dict[str, Any], names: tuple[str, ...]) -> set[tuple[str, str]]:
        trial = folder / f"trial{os.getpid()}_{next(trials)}.py"  # a name of its own: source lines are cached by name
        trial.write_text(source(p, "Cut down from a generated program"))
        found = worker.run(trial, names)
        trial.unlink()
        return {(k, o["kind"]) for k, o in found.items() if o["status"] == wanted}

    first = outcome(program, executions)
    if first:
        which = sorted(first)[0]
        names = ("tile",) if which[0] in ("tile", "trace", "process") else ("tile", which[0])
        program = shrink(program, lambda p: which in outcome(p, names if which[0] != "process" else executions), budget)
        path.write_text(source(program, f"Cut down from a generated program: {which[0]} {which[1]}"))
        print(path.read_text())
    worker.close()
    return path


if __name__ == "__main__":
    sys.exit(main())
