"""Writes docs/guide/what-runs-where.md from recorded outcomes: `python tests/hip/amd_page.py`; spec_status.py --write too."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
import outcomes  # noqa: E402
import amd_record as record  # noqa: E402

PAGE = record.ROOT / "docs" / "guide" / "what-runs-where.md"
HEAD = """# What runs where

Generated from recorded outcomes by `python tests/hip/amd_page.py`; a test fails when it is stale.

Four ways stand behind a target, the strongest first. *On hardware*: launched on such a card. *Machine code interpreted*: an
interpreter of the chip's instructions, which shares nothing with the compiler, ran the binary. *Simulated*: the device
simulator ran the lowered program. *Assembled*: the target's compiler made a binary of the text.

| target | on hardware | machine code interpreted | simulated | assembled |
|---|---|---|---|---|
"""


END = """`gfx90a` takes subnormal numbers of 16-bit operands for zero in its matrix instructions: results of rows that are
scaled to such numbers lie outside of the bound there, with the same bits in the simulator and in the machine code. With a
simulator that keeps subnormals they are within the bound, so nothing else is wrong. A *Fault* is what the interpreter of
machine code knows of hazards; *long* is beyond its limit of instructions.
"""


def tests_that(found: outcomes.Outcomes, execution: str) -> int:
    """Test functions of which a case completed an execution."""
    return sum(execution in found.of(t) for t in found.tests)


def rows() -> list[str]:
    """Rows of the table."""
    cpu, gpu, amd = outcomes.read(outcomes.FILES["cpu"]), outcomes.read(outcomes.FILES["gpu"]), record.read()
    date = amd["about"]["date"]

    def count(where: str, words: str = "") -> int:
        return sum(p.get(where, "").startswith(("right", "assembled")) and words in p[where] for p in amd["programs"].values())

    every = "compared in every run of the tests"
    n = {e: f"{tests_that(cpu, e)} tests, {every}" for e in ("simulator", "cuda", "cpu", "tile")}
    launched = f"{tests_that(gpu, 'gpu')} tests on {gpu.about['device']}, {gpu.about['date']}"
    table = [("CUDA, `sm_90a` and `sm_80`", launched, "no", n["simulator"], n["cuda"]),
             ("CPU", n["cpu"], "no", f"by the reference interpreter: {n['tile']}", "as on hardware")]
    for chip in record.CHIPS:
        ran, simulated, made = (f"{count(f'{chip} {how}')} programs" for how in ("interpreted", "simulated", "assembled"))
        bits = f"{count(f'{chip} interpreted', 'equal bits')} of them with the simulator's bits"
        table.append((f"HIP, `{chip}`", "no", f"{ran}, {bits}, {date}", f"{simulated}, {date}", f"{made}, {date}"))
    return [f"| {' | '.join(row)} |" for row in table]


def refusals() -> list[str]:
    """Lines about the programs that do not come to their end."""
    found: dict[str, dict[str, list[str]]] = {}
    amd = record.read()
    for name, p in [*sorted(amd["programs"].items()), *sorted(amd.get("examples", {}).items())]:
        for where, what in p.items():
            if not what.startswith(("assembled", "right")) or "but for" in what:
                found.setdefault(what.removeprefix("refused: "), {}).setdefault(name, []).append(where)
    return [f"- {why}: " + "; ".join(f"{name} ({', '.join(places)})" for name, places in names.items())
            for why, names in sorted(found.items())]


def examples(amd: dict[str, Any]) -> list[str]:
    """What is recorded of the checks of examples/."""
    found = amd.get("examples", {})
    made = ", ".join(f"{sum(e.get(f'{c} assembled') == 'assembled' for e in found.values())} for `{c}`" for c in record.CHIPS)
    right = sum(e.get("gfx942 simulated") == "right" for e in found.values())
    said = (f"Of the {len(found)} checks of `examples/` that use no instruction of one maker, all kernels assemble without "
            f"spilled registers: {made}; {right} are right on the simulator of `gfx942` "
            f"({amd['about examples']['date']}, `python tests/hip/amd_record.py --examples`).")
    return [said, ""]


def text() -> str:
    """The page."""
    amd: dict[str, Any] = record.read()
    spilled = Counter(c for p in amd["programs"].values() for c in record.CHIPS if "spills" in p.get(f"{c} assembled", ""))
    lines = refusals()
    return "\n".join([
        HEAD + "\n".join(rows()), "",
        f"The programs are the {len(amd['programs'])} plain ones of `benchmarks/suite/plain` at small sizes, recorded by "
        f"`python tests/hip/amd_record.py` with ziglang {amd['about']['ziglang']}.",
        "Results are compared with float64. Programs with spilled registers: "
        + ", ".join(f"{spilled[c]} on `{c}`" for c in record.CHIPS) + ".", "",
        *examples(amd),
        "## What does not come to its end on AMD GPUs", "",
        *(lines or ["Nothing."]), "",
        END])


if __name__ == "__main__":
    PAGE.write_text(text(), encoding="utf-8")
