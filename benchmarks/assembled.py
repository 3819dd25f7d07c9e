"""Which programs assemble for AMD GPUs, and why others do not: examples, kernels of the library, plain programs.

    python benchmarks/assembled.py                          all, for gfx90a, gfx942 and gfx950
    python benchmarks/assembled.py --chips gfx942 --only attention --out benchmarks/results/NAME.json

Examples run with their small sizes: each kernel that they compile is assembled for the chip with the tiles of that chip, and
the check itself runs it on the CPU, so that what follows it is compiled too.  Plain programs have their full sizes.  A row is a
kernel: registers, spills, LDS, or the error that refuses it.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
import warnings
from collections import Counter
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "examples"), str(ROOT / "benchmarks")]

import tilelang  # noqa: E402
from tilelang.errors import TileLangError  # noqa: E402
from tilelang.jit import kernel as kernels  # noqa: E402
from tilelang.library.caches import Cache  # noqa: E402
from tilelang.target import Target  # noqa: E402
from tilelang.target.hip import HIP_CHIPS  # noqa: E402

COMPILE = kernels._compile_now


def assembled(request: Any) -> dict[str, Any]:
    """What came of a request for a chip: the figures of its kernels, or the error."""
    start = time.perf_counter()
    try:
        facts = COMPILE(replace(request, backend="tvm_ffi"), None).report_data["kernels"]
    except TileLangError as e:
        return {"kernel": request.func.name, "error": e.kind, "reason": e.message.splitlines()[0], "hint": e.hint}
    return {"kernel": request.func.name, "seconds": round(time.perf_counter() - start, 2),
            **{name: max(x[name] or 0 for x in facts) for name in ("registers", "agprs", "spills", "scratch", "shared_bytes")},
            "mfma": sum(n for x in facts for row, n in x["instructions"].get("MMAs", {}).items() if row.startswith("mfma")),
            "notes": [n for x in facts for n in x["declined"] if n.startswith("compiled without")]}


def of_check(check: Any, chip: str) -> list[dict[str, Any]]:
    """The kernels that the check of an example compiles."""
    from checks import load
    from harness import Place

    rows: list[dict[str, Any]] = []

    def compiled(request: Any, key: Any) -> Any:
        if not request.target.is_hip:
            return COMPILE(request, key)
        rows.append(assembled(request))
        return COMPILE(replace(request, target=Target("cpu"), backend="tvm_ffi"), None)

    kernels._compile_now = compiled
    kernels.clear_memory()
    for name, module in list(sys.modules.items()):  # what another check made the library compile
        if name.startswith("tilelang.library"):
            for kept in (x for x in vars(module).values() if isinstance(x, Cache)):
                kept.clear()
    try:
        getattr(load(check.file), check.function)(on=Place(chip, "simulator"), **check.small)
    except TileLangError as e:  # of a library function that has no kernel for the chip
        rows.append({"kernel": check.function, "error": e.kind, "reason": e.message.splitlines()[0], "hint": e.hint})
    except Exception as e:
        rows.append({"kernel": check.function, "error": type(e).__name__, "reason": str(e).splitlines()[0][:200], "hint": ""})
    finally:
        kernels._compile_now = COMPILE
    return rows


def of_plain(spec: Any, chip: str) -> list[dict[str, Any]]:
    """The kernel of a plain program."""
    from tilelang.jit.requests import make_request

    return [assembled(make_request(spec.program(**spec.full), target=chip, pass_configs=spec.config or None))]


def work(only: str) -> list[tuple[str, Any]]:
    """(name, function of a chip that gives rows) of all programs whose names contain `only`."""
    from checks import CHECKS
    from suite.plain import CORPUS

    out = [(f"{c.file} {c.function} {dict(c.small)}", lambda chip, c=c: of_check(c, chip)) for c in CHECKS if not c.hopper]
    out += [(f"plain: {name}", lambda chip, p=p: of_plain(p, chip)) for name, p in CORPUS.items()]
    return [x for x in out if only in x[0]]


def main() -> None:
    """Print the rows, then how many assemble and how often each reason stands."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chips", default=",".join(HIP_CHIPS), help="architectures, separated by commas")
    parser.add_argument("--only", default="", help="programs whose names contain this")
    parser.add_argument("--out", type=Path, help="a file for the rows, as JSON")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    rows = []
    for name, run in work(options.only):
        for chip in options.chips.split(","):
            for row in run(chip):
                rows.append({"program": name, "chip": chip, **row})
                said = f"{row['error']}: {row['reason']}" if "error" in row else \
                    f"registers {row['registers']}, spills {row['spills']}, LDS {row['shared_bytes']}, MFMA {row['mfma']}"
                print(f"{chip}  {name}  {row['kernel']}: {said}", flush=True)
    reasons = Counter((r["chip"], r["error"]) for r in rows if "error" in r)
    for chip in options.chips.split(","):
        mine = [r for r in rows if r["chip"] == chip]
        print(f"{chip}: {sum('error' not in r for r in mine)} of {len(mine)} kernels assemble; refused: "
              f"{ {kind: n for (c, kind), n in reasons.items() if c == chip} or 'none'}; "
              f"with spills: {sum(r.get('spills', 0) > 0 for r in mine)}")
    if options.out:
        about = {"date": str(date.today()), "version": tilelang.__version__, "machine": platform.machine()}
        options.out.write_text(json.dumps({"about": about, "rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
