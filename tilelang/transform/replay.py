"""Repeat a failed compilation from its report folder:  python -m tilelang.transform.replay FOLDER

The folder is what an InternalError names: before.tl, the program before the failing pass, and facts.json.
The text of a program in phase CPU does not parse: before.tl is then the last program before it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tilelang.ir import parse, to_text
from tilelang.target import Target

from .framework.pass_ import PassContext, run_passes
from .cpu import CPU_PASSES
from .pipeline import DEVICE_PASSES, TILE_PASSES


def replay(folder: str | Path) -> str:
    """Run the passes from the failing one on; the text of the program after the last.  Raises what they raise."""
    folder = Path(folder)
    facts = json.loads((folder / "facts.json").read_text(encoding="utf-8"))
    func = parse((folder / "before.tl").read_text(encoding="utf-8"))
    target = Target(facts["target"]) if facts.get("target") else None
    on_gpu = target is not None and target.is_gpu or facts["from"] in [p.__name__ for p in DEVICE_PASSES]
    passes = [*TILE_PASSES, *(DEVICE_PASSES if on_gpu else CPU_PASSES)]
    names = [p.__name__ for p in passes]
    start = names.index(facts["from"]) if facts["from"] in names else 0
    config = {k: json.loads(v) for k, v in facts.get("config", {}).items()}
    return to_text(run_passes(func, passes[start:], PassContext(target, config, verify=True)))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    print(replay(sys.argv[1]))
