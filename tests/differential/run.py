"""Runs generated programs on every execution and compares them.

    python tests/differential/run.py --programs 3000 --seed 1 --workers 2 --out /tmp/differential
    python tests/differential/run.py --programs 3000 --seed 1 --workers 16 --gpu --out /tmp/differential-gpu
    python tests/differential/run.py --programs 2500 --workers 2 --backend hip --chip gfx942 --out /tmp/differential-hip
    python tests/differential/run.py --family whole --programs 2000 --workers 2 --out /tmp/differential-whole

Every program is a file in OUT/programs that runs by itself.  Results are lines of OUT/results.jsonl; a second run with
the same OUT goes on where the first one ended.  OUT/summary.json has the number of programs, their outcomes by execution
and by feature, what disagreed, and the seconds.  --gpu adds the device to meaning, simulator and CPU; --only leaves
simulator and CPU out.  --backend hip: the simulator of an AMD chip instead, with waves of 64 lanes (--chip: always this one),
and with --gpu an AMD GPU.  --family whole: whole-tensor programs, on their reference, NumPy, CPU and simulator, against bounds
that follow from their types and lengths (--on: some of these).  Programs that fail are cut down (--shrink N: the first N) and
left in OUT/failures.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import json
import os
import pathlib
import platform
import re
import sys
import time
from collections.abc import Iterable
from typing import Any

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from backends import WAVES  # noqa: E402
from gen_hopper import is_hopper  # noqa: E402
from gen_program import make_program  # noqa: E402
from gen_text import features, source  # noqa: E402
from gen_whole import make_whole  # noqa: E402
from run_whole import EXECUTIONS as WHOLE  # noqa: E402
from shrinking import shrink  # noqa: E402
from text_whole import shrink_whole, whole_features, whole_source  # noqa: E402
from workers import Worker, run_all  # noqa: E402

EXECUTIONS = ("tile", "sm_80", "sm_90a", "cpu")
FAMILIES = {"tiles": (make_program, source, features, shrink),
            "whole": (make_whole, whole_source, whole_features, shrink_whole)}
FEW = 30  # of 3,000 programs: what fewer draw is named in the summary


def program_seed(seed: int, index: int) -> int:
    return seed * 1_000_003 + index


def executions_of(seed: int, gpu: bool = False, cubin: bool = False, only: bool = False,
                  backend: str = "cuda", chip: str | None = None) -> tuple[str, ...]:
    """What a program runs on: the meaning, the simulator of one architecture in turn, and the CPU; with gpu the device too,
    with cubin the compiler of its text.  only: these and the meaning.  backend hip: the meaning, the simulator of a chip, and
    with gpu the device."""
    if backend == "hip":
        simulated = chip or WAVES[max(0, seed % 4 - 1)]  # gfx942 every other time
        return ("tile", *(() if only else (simulated,)), *("hip",) * gpu)
    more = ("cuda",) * gpu + ("cubin",) * cubin
    if only:
        return ("tile", *more)
    return ("tile", "sm_90a" if is_hopper(seed) else ("sm_80", "sm_90a", "sm_90a")[seed % 3], "cpu", *more)


def status_of(outcomes: dict[str, Any]) -> str:
    """"failed" when anything did, else "agrees" when all did, else "refused"."""
    found = {o["status"] for o in outcomes.values()}
    return "failed" if "failed" in found else "refused" if "refused" in found else "agrees"


def summary(rows: list[dict[str, Any]], family: str = "tiles") -> dict[str, Any]:
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
    drawn = counted(family, [r["features"] for r in rows])
    out["never drawn"] = [f for f, n in drawn.items() if not n]
    out["seldom drawn"] = {f: n for f, n in drawn.items() if n * 3000 < FEW * len(rows)}
    out["features"] = {k: dict(v) for k, v in sorted(found.items())}
    out["disagreements"] = [{"seed": r["seed"], "execution": name, "kind": o["kind"], "text": o["text"]}
                            for r in rows for name, o in r["outcomes"].items() if o["status"] == "failed"]
    return out


EXPECTED = """
    accumulate:fragment accumulate:shared alloc:global alloc:shared:bool alloc:shared:int4 atomic:add:int32
    atomic:addx2 atomic:addx4 atomic:load atomic:max atomic:min atomic:or atomic:order atomic:return
    atomic:return-global atomic:return-x2 atomic:shared-add atomic:shared-max atomic:shared-min atomic:store
    atomic:ticket atomic:tile-add atomic:tile-max atomic:tile-min atomic:tile-scalar bits:% bits:& bits:* bits:+
    bits:- bits:<< bits:>> bits:^ bits:abs bits:atomic-add bits:atomic-max bits:atomic-min bits:bool bits:cast
    bits:copy bits:count bits:cummax bits:cumsum bits:floordiv bits:max bits:min bits:neg bits:pow bits:reduce-max
    bits:reduce-min bits:reduce-sum bits:reinterpret bits:nearest bits:round bits:scalar bits:select bits:sign
    bits:staged bits:trunc bits:| bits:~ branch:else branch:loaded cond:and cond:chain cond:not cond:or
    config:tl.cluster config:tl.disable_warp_specialized config:tl.enable_fast_math config:tl.enable_hopper
    config:tl.persistent copy-option:annotations copy-option:coalesced_width copy-option:disable_tma
    copy-option:eviction_policy copy-option:prefer_instruction copy:async copy:fragment->fragment
    copy:fragment->global copy:fragment->shared copy:global->fragment copy:global->global copy:global->local
    copy:global->shared copy:im2col copy:local->global copy:local->local copy:local->shared copy:shared->fragment
    copy:shared->global copy:shared->local copy:shared->shared counts:__ffs counts:clz counts:popcount dp4a
    dtype:bfloat16 dtype:float64 dtype:float8_e4m3fn dtype:float8_e5m2 dtype:int16 dtype:int64 dtype:int8
    dtype:uint16 dtype:uint32 dtype:uint8 expr:bits expr:choose expr:clamp expr:functions expr:invert expr:named
    expr:select expr:shift expr:square extern fill:fragment fill:global fill:local fill:shared float4_e2m1fn:copy
    float4_e2m1fn:elements function:add function:fdiv function:fmaf function:fmod function:fsqrt function:isfinite
    function:mul function:nearbyint function:reinterpret function:sub gemm:bfloat16 gemm:clear-runtime gemm:ff
    gemm:float32 gemm:float64 gemm:float8 gemm:fs gemm:int8 gemm:policy-FullCol gemm:policy-FullRow
    gemm:policy-Square gemm:region:NN gemm:region:NT gemm:region:TN gemm:region:TT gemm:sf gemm:slice gemm:sparse
    gemm:ss:NN gemm:ss:NT gemm:ss:TN gemm:ss:TT gemm:tiny gemm:two-types gemm:uint8 grid:1d grid:2d grid:3d
    grid:atomic-add grid:branch grid:last grid:loop grid:sync grid:while grid:workspace hint:layout hint:safe-value
    hopper:cluster-bulk hopper:cluster-elements hopper:handed hopper:multicast hopper:nreg hopper:one-thread
    hopper:tma hopper:wgmma hopper:ws host:for host:if index:guarded index:half index:mix index:mod index:negative
    index:outside index:plain index:reverse index:ring index:shift inner:break-continue int4:copy int4:elements
    kernels:2 loop:T.Persistent loop:T.Pipelined loop:T.Serial loop:T.grid loop:T.loop_break loop:T.serial
    loop:T.unroll loop:break loop:continue loop:down loop:ordered loop:ordered-annotations loop:ordered-group
    loop:pipelined-runtime loop:range loop:runtime loop:scheduler loop:start loop:step loop:symbol
    loop:unroll-option loop:while loop:while-break macro macro:ref-added macro:ref-added_twice macro:ref-results
    mask:all mask:all_of mask:any mask:any_of mask:ballot mask:lanes-ballot mask:lanes-chosen mask:lanes-even
    mask:lanes-half mask:lanes-low mask:match_all mask:match_any mask:read mask:shfl-down mask:shfl-sync
    mask:shfl-up mask:shfl-xor mask:written near:attention near:attention-causal near:log-sum near:norm near:product
    near:softmax parallel:1d parallel:2d parallel:3d parallel:coalesced_width parallel:if parallel:inner-loop
    parallel:inner-while parallel:permuted parallel:run-time parallel:scratch parallel:spread-sum
    parallel:two-stores param:pointer param:scalar persistent:idle persistent:unequal pointer:global pointer:shared
    random:integer raw:barriers raw:cluster-ring raw:registers raw:tensor-map raw:tma-load raw:walkers raw:wgmma
    reduce:absmax reduce:abssum reduce:batch reduce:bitand reduce:bitor reduce:bitxor reduce:dim0/1 reduce:dim0/2
    reduce:dim0/3 reduce:dim1/2 reduce:dim1/3 reduce:dim2/3 reduce:fragment->fragment reduce:fragment->shared
    reduce:generic reduce:local-max reduce:local-sum reduce:max reduce:min reduce:nan_propagate
    reduce:shared->fragment reduce:shared->shared reduce:sum reducer:bits reducer:max reducer:min reducer:old
    reducer:started reducer:sum region:negative region:open return rounded:float16 rounded:float32 rounded:float64
    scalar:assign scalar:let scalar:swap scan:cummax scan:cummax-in-place scan:cumsum scan:fragment->fragment
    scan:fragment->shared scan:local scan:shared->fragment scan:shared->shared scratch:T.serial scratch:T.unroll
    scratch:T.vectorized shape:dynamic sort:private-break sort:private-condition sort:shared sort:shared-break
    stages:0 stages:1 stages:2 stages:3 stages:4 stages:user1 stages:user2 stages:user3 stated:assert stated:assume
    strides:dynamic strides:inner strides:static style:const style:eager style:lazy thread:T.serial thread:T.unroll
    thread:T.vectorized thread:barrier-in-if thread:guard thread:lane thread:shuffle thread:stride threads:2d
    threads:3d threads:odd transpose uint4:copy uint4:elements use_swizzle vector:abs2 vector:extract vector:max2
    vector:min2 vector:row-load vector:row-store vector:slice view:bits view:fragment view:of-view view:shared
    warp:all warp:any warp:ballot warp:bitand warp:bitor warp:shfl warp:sum warp:syncthreads-count words:ldg
    words:lds words:sts workspace:copy ws:tiles
""".split()
BEGINNINGS = ("atomic:addx2", "gemm:float8", "atomic:order")  # of names that go on without a colon


def coverage(programs: Iterable[list[str]]) -> dict[str, int]:
    """How many programs drew each part of the language that the generator means to cover (names are beginnings)."""
    counts = dict.fromkeys(EXPECTED, 0)
    for drawn in programs:
        found = {f[:m.start()] for f in drawn for m in re.finditer(":|->|$", f)}
        found |= {e for e in BEGINNINGS if any(f.startswith(e) for f in drawn)}
        for e in found & counts.keys():
            counts[e] += 1
    return counts


def counted(family: str, programs: list[list[str]]) -> dict[str, int]:
    """How many programs drew what: of whole-tensor programs, each operation that came up."""
    if family == "tiles":
        return coverage(programs)
    return dict(sorted(collections.Counter(f for fs in programs for f in fs).items()))


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
    p.add_argument("--family", choices=FAMILIES, default="tiles", help="tile programs, or whole-tensor programs")
    p.add_argument("--on", nargs="+", choices=WHOLE, default=WHOLE, help="what runs whole-tensor programs")
    p.add_argument("--programs", type=int, default=300)
    p.add_argument("--first", type=int, default=0, help="index of the first program")
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("-n", "--workers", "--jobs", dest="workers", type=int, default=os.cpu_count() or 1, help="processes")
    p.add_argument("--out", type=pathlib.Path, default=pathlib.Path("differential-out"))
    p.add_argument("--gpu", action="store_true", help="run on the device as well")
    p.add_argument("--cubin", action="store_true", help="compile the CUDA source of every program as well, no device needed")
    p.add_argument("--backend", choices=("cuda", "hip"), default="cuda", help="the GPUs that are simulated")
    p.add_argument("--chip", choices=WAVES, help="of --backend hip: the chip of all programs")
    p.add_argument("--only", action="store_true", help="leave out simulator and CPU")
    p.add_argument("--record", type=pathlib.Path, help="also write the summary, with the machine it was made on, to this file")
    p.add_argument("--profile", help="draw all programs from one profile")
    p.add_argument("--shrink", type=int, default=0, help="cut down the first N programs that fail")
    p.add_argument("--cut", help="cut down the program of this seed or .json file, and do nothing else")
    p.add_argument("--coverage", action="store_true", help="only draw the programs, and print how often what is drawn")
    p.add_argument("--wanted", default="failed", choices=("failed", "refused"), help="the outcome that --cut keeps")
    a = p.parse_args()
    make, written, drawn, _ = FAMILIES[a.family]

    def on(seed: int) -> tuple[str, ...]:
        return tuple(a.on) if a.family == "whole" else executions_of(seed, a.gpu, a.cubin, a.only, a.backend, a.chip)

    if a.cut is not None:
        program = make(int(a.cut), a.profile) if a.cut.isdigit() else json.loads(pathlib.Path(a.cut).read_text())
        names = tuple(a.on) if a.family == "whole" else ("tile", "cuda") if a.gpu else EXECUTIONS
        cut_down(program, names, a.out, wanted=a.wanted)
        return 0
    if a.coverage:
        found = counted(a.family, [drawn(make(program_seed(a.seed, a.first + i), a.profile)) for i in range(a.programs)])
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
        program = make(seed, a.profile)
        made[seed] = program
        path = a.out / "programs" / f"p{seed}.py"
        path.write_text(written(program))
        return path

    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    start = time.time()
    failures: list[int] = []
    with Progress(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()) as bar, \
            log.open("a") as file:
        task = bar.add_task("programs", total=len(seeds))

        def done(seed: int, path: pathlib.Path, outcomes: dict[str, Any]) -> None:
            program = made.pop(seed)
            row = {"seed": seed, "profile": program["profile"], "status": status_of(outcomes), "features": drawn(program),
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

        run_all([(s, lambda s=s: write(s), on(s)) for s in seeds], a.workers, done, {
            "TILELANG_CACHE_DIR": str(a.out / "cache"), "TILELANG_VERIFY": os.environ.get("TILELANG_VERIFY", "1")})
    out = summary(rows, a.family)
    out.update(seed=a.seed, seconds=round(time.time() - start, 1))
    (a.out / "summary.json").write_text(json.dumps(out, indent=1) + "\n")
    if a.record:
        a.record.write_text(json.dumps({"machine": machine(a.gpu), **out}, indent=1) + "\n")
    print(json.dumps({k: v for k, v in out.items() if k != "features"}, indent=1))
    for seed in failures[:a.shrink]:
        cut_down(make(seed, a.profile), on(seed), a.out)
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
        trial.write_text(written(p, "Cut down from a generated program"))
        found = worker.run(trial, names)
        trial.unlink()
        return {(k, o["kind"]) for k, o in found.items() if o["status"] == wanted}

    family = program.get("family", "tiles")
    _, written, _, smallest = FAMILIES[family]
    judge = ("tile",) if family == "tiles" else ()
    first = outcome(program, executions)
    if first:
        which = sorted(first)[0]
        names = judge if which[0] in ("tile", "trace", "process") else (*judge, which[0])
        program = smallest(program, lambda p: which in outcome(p, names if which[0] != "process" else executions), budget)
        path.write_text(written(program, f"Cut down from a generated program: {which[0]} {which[1]}"))
        print(path.read_text())
    worker.close()
    return path


if __name__ == "__main__":
    sys.exit(main())
