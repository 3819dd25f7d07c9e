"""Random programs of tests/differential on an AMD chip: the interpreted machine code beside the device simulator.

    python tests/amd/isa_random.py --programs 300 --seed 1 --chip 942

A program that the target refuses counts as refused.  The others must leave the same bits in all tensors, but for tensors of
which the generator says that results may differ (exponentials: the instruction is an approximation).  Nightly.
"""

from __future__ import annotations

import argparse
import collections
import pathlib
import sys
import tempfile
import traceback
import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))
sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "differential"))
sys.path.insert(0, str(pathlib.Path(__file__).parent))

import isa_launch
import isa_machine
from backends import _left, _number, _packed, difference, inputs, load, own_copy
from gen_program import make_program
from gen_text import source


def outcome(path: pathlib.Path, chip: str) -> tuple[str, str]:
    """("equal" | "near" | "refused" | "differs" | "fails", why) of a program's file."""
    import tilelang
    from tilelang.errors import TileLangError
    from tilelang.simulator import run_device
    from tilelang.target import Target
    from tilelang.transform.pipeline import lower

    try:
        module = load(path)
    except TileLangError as error:
        return "refused", error.kind
    target = {"kind": "hip", "mcpu": f"gfx{chip}"}
    args = inputs(module.SEED, module.TENSORS)
    try:
        lowered = lower(module.program.func, Target(target), module.CONFIGS)
        kernel = tilelang.compile(module.program, target=target, pass_configs=module.CONFIGS or None)
        own, passed = _packed([own_copy(a) for a in args], module.TENSORS)
        want = _left(run_device(lowered, passed).outputs, own, module.TENSORS)
    except TileLangError as error:
        return "refused", error.kind
    got = [own_copy(a) for a in args]
    values = {t[0]: _number(a, t) if a.ndim == 0 else a for a, t in zip(got, module.TENSORS, strict=True)}
    try:
        isa_launch.launch(lowered, kernel, values)
    except isa_machine.Fault as fault:
        return "fails", str(fault)
    near = ""
    for t, g, w in zip(module.TENSORS, got, want, strict=True):
        said = difference(g, np.asarray(w).view(g.dtype).reshape(g.shape))
        tolerance = t[5].get("tol", 0.0) if len(t) > 5 else 0.0
        if said and difference(g, np.asarray(w).view(g.dtype).reshape(g.shape), tolerance):
            return "differs", f"{t[0]}: {said}"
        near = near or said
    return ("near" if near else "equal"), near


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--programs", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--chip", default="942", choices=["90a", "942", "950"])
    options = parser.parse_args()
    counts: collections.Counter[str] = collections.Counter()
    with tempfile.TemporaryDirectory() as folder:
        for n in range(options.programs):
            seed = options.seed * 1_000_003 + n
            path = pathlib.Path(folder, f"p{seed}.py")
            path.write_text(source(make_program(seed)))
            try:
                status, why = outcome(path, options.chip)
            except Exception as error:  # whatever a program raises is its outcome
                status, why = "raises", f"{type(error).__name__}: {error} {traceback.format_tb(error.__traceback__)[-1]}"
            counts[status] += 1
            if status not in ("equal", "near"):
                print(f"{seed}: {status}: {why[:300]}", flush=True)
    print(dict(counts))


if __name__ == "__main__":
    main()
