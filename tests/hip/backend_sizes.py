"""How much the backend for AMD's chips is: lines of its files, and what its commits added.

    python tests/hip/backend_sizes.py          the last needs the history of git

A commit is of the backend if its subject names AMD, HIP, MFMA, LDS, waves or a chip; it counts with all that it changed.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "tilelang"
# What -> its files, and the most lines of them.
FILES = {"printer": (("codegen/hip/*.py", "codegen/hip/prelude_own.hip"), 700),
         "tables, driver, compiler, dialect": (
             ("codegen/hip/prelude_base.hip", "target/hip.py", "target/mfma.py", "runtime/hip_*.py", "runtime/gpu_api.py",
              "language/rocm.py"), 1500)}
COMMITS = {"transform/": 600, "": 6000}  # folder of the package -> the most lines that the commits may add net
SUBJECT = re.compile(r"\bAMD|\bHIP\b|MFMA|\bLDS\b|\bwaves?\b|gfx\d|MI\d{3}")


def lines(what: str) -> int:
    """Lines of the files of a row of FILES."""
    return sum(len(p.read_text(encoding="utf-8").splitlines()) for n in FILES[what][0] for p in PACKAGE.glob(n))


def added(folder: str) -> int:
    """Net lines that the commits of the backend added to a folder of the package, generated stubs aside."""
    log = subprocess.run(["git", "-C", str(PACKAGE), "log", "--no-merges", "--format=@%s", "--numstat", "--", f"./{folder}*.py",
                          f"./{folder}*.hip", f"./{folder}*.cuh"], capture_output=True, text=True, check=True).stdout
    net, mine = 0, False
    for line in log.splitlines():
        if line.startswith("@"):
            mine = SUBJECT.search(line) is not None
        elif mine and (m := re.match(r"(\d+)\t(\d+)\t", line)):
            net += int(m[1]) - int(m[2])
    return net


if __name__ == "__main__":
    for row, (_, most) in FILES.items():
        print(f"{lines(row):6} of {most} lines: {row}")
    for place, most in COMMITS.items():
        print(f"{added(place):6} of {most} lines net by commits: tilelang/{place}")
