"""What of the plain programs (benchmarks/suite/plain) and of examples runs for AMD GPUs, without one: recorded, and read by the
guide's page.

    python tests/hip/amd_record.py [--only WORDS] [--workers 2]     # renews record.json; what is not asked for stays
    python tests/hip/amd_record.py --examples [--only WORDS]        # of the checks of examples/, assembled and simulated

At its small sizes each program is, for each of three chips, assembled, run by the device simulator and compared with its
float64 reference, and so is its machine code, which tests/amd's interpreter runs.  An entry is "assembled", "right" ("equal
bits" where the simulator gives the same), or why not: a named refusal, a difference, "long" beyond the interpreter's limit.
"right but for flushed subnormals": where the chip's matrix instructions take subnormal operands for zero, and the simulator
without that is within the bounds.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import functools
import importlib.metadata
import json
import logging
import sys
import warnings
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
FILE = HERE / "record.json"
CHIPS = ("gfx90a", "gfx942", "gfx950")
LIMIT = 8_000_000  # instructions of all waves that the interpreter of machine code runs
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks"), str(ROOT / "tests" / "amd"), str(ROOT / "examples")]

from tilelang.target import mfma  # noqa: E402
from tilelang.target.hip import HIP_CHIPS  # noqa: E402
from tilelang.target.mfma import MFMA_ROWS  # noqa: E402


def why(e: BaseException) -> str:
    """The kind of a named refusal, else the beginning of what was raised."""
    kind = getattr(e, "kind", "")
    return f"refused: {kind}" if kind else f"{type(e).__name__}: {str(e).splitlines()[0][:120] if str(e) else ''}"


def options(p: Any) -> dict[str, Any]:
    return {"pass_configs": dict(p.config) or None}


def judged(want: Any, given: dict[str, Any]) -> str:
    """Whether outputs lie within the bounds of the reference."""
    far = max(float(((given[n].double() - w).abs() / b).nan_to_num(nan=np.inf).max()) for n, w, b in want)
    return "right" if far <= 1 else f"wrong: {far:.3g} of the bound"


def simulated(p: Any, chip: str, given: dict[str, Any]) -> str:
    """Run by the device simulator; the tensors are written."""
    import tilelang

    want = p.reference(given, p.small)
    kernel = tilelang.compile(p.program(**p.small), target=chip, execution_backend="simulator", **options(p))
    kept = {n: t.clone() for n, t in given.items()}
    kernel(*(given[n] for n in p.tensors(**p.small)))
    said = judged(want, given)
    if said.startswith("wrong") and HIP_CHIPS[chip].flushes_mfma:
        with subnormals_kept():
            kernel(*(kept[n] for n in p.tensors(**p.small)))
        said = said.replace("wrong:", "right but for flushed subnormals:") if judged(want, kept) == "right" else said
    return said


@contextlib.contextmanager
def subnormals_kept() -> Iterator[None]:
    """MFMA of 16-bit operands on gfx90a adds in the same order, and takes subnormal operands for what they are."""
    rows = {n: r for n, r in MFMA_ROWS.items() if isinstance(r.multiply, functools.partial) and r.multiply.func is mfma._pairs}
    assert rows
    MFMA_ROWS.update((n, replace(r, multiply=functools.partial(mfma._pairs, 0.0))) for n, r in rows.items())
    try:
        yield
    finally:
        MFMA_ROWS.update(rows)


def by_machine_code(p: Any, kernel: Any, given: dict[str, Any], wanted: dict[str, Any], found: str) -> str:
    """Run by the interpreter of machine code, kernel by kernel of the host program.  wanted: what the simulator gave, of which
    `found` was said."""
    import isa_elf
    import isa_machine
    import torch
    from tilelang.ir import Launch, is_const, stmts_of
    from tilelang.transform.pipeline import lower

    program = lower(kernel.request.func, kernel.target, dict(p.config))
    launches = list(stmts_of(program.host.body))
    if not all(isinstance(s, Launch) and all(isinstance(n, int) or is_const(n) for n in s.grid) for s in launches):
        return "not run: the host decides what is launched"
    facts = {k["name"]: k for k in kernel._built.meta["kernels"]}
    want = p.reference(given, p.small)
    arrays = {n: t.reshape(-1).view(torch.uint8).numpy() for n, t in given.items()}
    run = 0
    for s in launches:
        k = next(x for x in program.kernels if x.name == s.plan.name)
        code = isa_elf.read(kernel._built.files[facts[k.name]["file"]])
        args = [arrays[x.name] for x in k.params]
        args += [np.zeros(int(np.prod([int(n) for n in b.shape])) * b.dtype.bytes + 256, np.uint8) for b in k.workspaces]
        grid = [int(getattr(n, "value", n)) for n in s.grid]
        shared = facts[k.name]["shared_bytes"] or 0
        run += isa_machine.Program(code[k.name]).run(grid, s.threads, args, lds=shared, limit=LIMIT - run)
    same = all(torch.equal(t.view(torch.uint8), given[n].view(torch.uint8)) for n, t in wanted.items() if t.dim())
    said = judged(want, given)
    if same and found.endswith(said.removeprefix("wrong")):  # what the simulator's result is, this is
        said = found
    return said + ", equal bits" * same


def one(name: str) -> tuple[str, dict[str, str]]:
    """The entry of a program."""
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    import tilelang
    from suite.plain import CORPUS

    tilelang.disable_cache()
    p, out = CORPUS[name], {}
    for chip in CHIPS:
        given, wanted = p.make(p.small, "cpu"), p.make(p.small, "cpu")
        step = "assembled"
        try:
            kernel = tilelang.compile(p.program(**p.small), target=chip, **options(p))
            out[f"{chip} {step}"] = "assembled" + (f", spills {kernel.n_spills} registers" if kernel.n_spills else "")
            step = "simulated"
            out[f"{chip} {step}"] = found = simulated(p, chip, wanted)
            step = "interpreted"
            out[f"{chip} {step}"] = by_machine_code(p, kernel, given, wanted, found)
        except Exception as e:
            out[f"{chip} {step}"] = "long" if "more than" in str(e) and "instructions" in str(e) else why(e)
    return name, out


def example(number: int) -> tuple[str, dict[str, str]]:
    """The entry of a check of examples/: its kernels assembled for each chip, right on the simulator of gfx942."""
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    import assembled
    from checks import CHECKS, load
    from harness import Place

    check, out = CHECKS[number], {}
    for chip in CHIPS:
        bad = [r.get("error") or "spills" for r in assembled.of_check(check, chip) if "error" in r or r["spills"]]
        out[f"{chip} assembled"] = f"refused: {', '.join(sorted(set(bad)))}" if bad else "assembled"
    try:
        found = getattr(load(check.file), check.function)(on=Place("gfx942", "simulator"), **check.small)
        wrong = [str(x) for x in (found if isinstance(found, (list, tuple)) else [found]) if not x.ok]
        out["gfx942 simulated"] = f"wrong: {wrong[0]}" if wrong else "right"
    except Exception as e:
        out["gfx942 simulated"] = why(e)
    return f"{number} {check.file} {check.function}", out


def read() -> dict[str, Any]:
    return json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {"about": {}, "programs": {}}


def main() -> None:
    from suite.plain import CORPUS

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="names that contain one of these words, separated by commas")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--examples", action="store_true", help="the checks of examples/ in place of the plain programs")
    o = parser.parse_args()
    words = [w for w in o.only.split(",") if w]
    names = [n for n in CORPUS if not words or any(w in n for w in words)]
    found, kind, work = read(), "programs", (one, names)
    if o.examples:
        from checks import CHECKS

        kind, work = "examples", (example, [n for n, c in enumerate(CHECKS) if not c.hopper and (
            not words or any(w in f"{c.file} {c.function}" for w in words))])
    about = {"date": str(datetime.datetime.now(datetime.timezone.utc).date()), "ziglang": importlib.metadata.version("ziglang")}
    with ProcessPoolExecutor(o.workers) as pool:
        for name, entry in pool.map(*work):
            found.setdefault(kind, {})[name] = entry
            print(name, entry, flush=True)
            write(found, CORPUS)
    found["about" if kind == "programs" else "about examples"] = about
    write(found, CORPUS)


def write(found: dict[str, Any], known: Any) -> None:
    """The record of the known programs and of examples, one a line."""
    parts = [f" {json.dumps(k)}: {json.dumps(v)}" for k, v in found.items() if k.startswith("about")]
    for kind, names in (("programs", known), ("examples", found.get("examples", {}))):
        lines = ",\n".join(f"  {json.dumps(n)}: {json.dumps(e)}" for n, e in sorted(found.get(kind, {}).items()) if n in names)
        parts.append(f' "{kind}": {{\n{lines}\n }}')
    FILE.write_text("{\n" + ",\n".join(parts) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
