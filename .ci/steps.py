#!/usr/bin/env python3
"""What CI runs on a bare machine with Python and pip: the README's two commands, then everything else.

    .ci/run                      all of it
    .ci/run --only readme        one step: readme, full, torch or interpreters

Every step works in a copy of the committed files without a repository.  readme: both commands are read from README.md and
run as they stand there, in a venv without torch and with no compiler and no git on the PATH; the second fails beyond LIMIT.
full: linter, types, the site and all tests, in a venv with torch.  torch: one compilation for sm_90a beside the NVRTC that
torch's CUDA builds pin, without importing torch.  interpreters: import, demo and one compilation for sm_90a with every
Python on this machine that pyproject.toml allows.  A table of exit statuses, seconds and processor seconds comes last.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
TORCH = "torch==2.13.0"
PINNED_BY_TORCH = "nvidia-cuda-nvrtc==13.0.88 nvidia-cuda-runtime==13.0.96"  # by its builds for CUDA 13.0
LIMIT = (300, 600)  # seconds, and processor seconds, of the README's second command on two cores
TOO_LONG = 124  # the exit status of timeout(1)
ROOT_FILES = {".gitignore", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "MANIFEST.in", "README.md", "mkdocs.yml",
              "pyproject.toml"}
COMPILERS = re.compile(r"(.*-)?(gcc|g\+\+|cc|c\+\+|c89|c99|clang.*|tcc|icc|icx|nvcc|ptxas|nvdisasm|ld|ld\..*|as)(-[\d.]+)?$")
OLDEST = (3, 10)
ONE_COMPILATION = """
import tilelang, tilelang.language as T
@T.prim_func
def main(A: T.Tensor((128, 64), "float16"), B: T.Tensor((64, 128), "float16"), C: T.Tensor((128, 128), "float16")):
    with T.Kernel(1, threads=128) as _:
        a, b = T.alloc_shared((128, 64), "float16"), T.alloc_shared((64, 128), "float16")
        c = T.alloc_fragment((128, 128), "float32")
        T.copy(A, a); T.copy(B, b); T.clear(c); T.gemm(a, b, c); T.copy(c, C)
source = tilelang.compile(main, target={"kind": "cuda", "arch": "sm_90a"}).get_kernel_source()
assert "wgmma" in source
"""


class Result(NamedTuple):
    name: str
    rc: int
    seconds: float
    processor: float  # seconds of user and system time, of the command and its children
    said: list[str]  # the lines it printed


results: list[Result] = []
output = threading.Lock()


def run(name: str, command: str, cwd: Path, env: dict[str, str], limit: tuple[float, float] | None = None,
        aside: bool = False) -> int:
    """Run a shell command, enter it into the table.  limit: seconds and processor seconds beyond which it fails.
    aside: other commands run meanwhile, its output is shown at its end."""
    start = time.monotonic()
    head = f"\n==> {name}: {command.strip().splitlines()[0]}"
    if not aside:
        print(head, flush=True)
    process = subprocess.Popen(["bash", "-ec", command], cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                               text=True, errors="replace")
    assert process.stdout is not None
    said: list[str] = []
    for line in process.stdout:
        said.append(line.rstrip("\n"))
        if not aside:
            print(said[-1], flush=True)
    _, status, usage = os.wait4(process.pid, 0)
    rc = process.returncode = os.waitstatus_to_exitcode(status)
    seconds, processor = time.monotonic() - start, usage.ru_utime + usage.ru_stime
    late = rc == 0 and limit is not None and (seconds > limit[0] or processor > limit[1])
    with output:
        results.append(Result(name, TOO_LONG if late else rc, seconds, processor, said))
        print(*[head, *said] * aside, f"<== {name}: exit status {rc}, {seconds:.0f} s, {processor:.0f} s of processor time",
              *[f"more than the {limit} s it may take"] * late, sep="\n", flush=True)
    return results[-1].rc


def environment(venv: Path, path: str) -> dict[str, str]:
    """Of a venv, with caches of its own and no other Python's settings."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "TILELANG_", "VIRTUAL_ENV", "CUDA"))}
    return {**kept, "VIRTUAL_ENV": str(venv), "PATH": f"{venv}/bin:{path}", "PYTHONUNBUFFERED": "1",
            "TILELANG_CACHE_DIR": str(venv / "cache"), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}


def checkout(folder: Path) -> Path:
    """The committed files, without a repository: those of this folder where it has none."""
    tree = folder / "tree"
    if not (ROOT / ".git").exists():
        return Path(shutil.copytree(ROOT, tree))
    archive = folder / "tree.tar"
    subprocess.run(["git", "archive", "-o", str(archive), "HEAD"], cwd=ROOT, check=True)
    with tarfile.open(archive) as files:
        files.extractall(tree)
    return tree


def path_without_compilers(folder: Path) -> str:
    """A folder of links to the programs of the PATH that compile nothing, and are neither Python nor git."""
    tools = folder / "tools"
    tools.mkdir()
    for place in ("/usr/bin", "/bin"):
        for program in Path(place).iterdir():
            link = tools / program.name
            left_out = COMPILERS.fullmatch(program.name) or program.name.startswith(("python", "pip", "git"))
            if not left_out and not link.exists():
                link.symlink_to(program)
    return str(tools)


def readme_commands(text: str) -> list[str]:
    """The indented lines of README.md that begin with pip install: to run, and to test."""
    commands = re.findall(r"^    (pip install .*)$", text, re.MULTILINE)
    if len(commands) < 2 or not commands[0].endswith("python -m tilelang demo") or not commands[1].endswith("python -m pytest"):
        raise SystemExit(f"README.md does not hold the two commands, but {commands}")
    return commands[:2]


def readme(folder: Path) -> None:
    """Both commands of the README where there is nothing but Python."""
    venv, tree = folder / "bare", checkout(folder)
    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    env = environment(venv, path_without_compilers(folder))
    run("torch cannot be imported", "! python -c 'import torch' 2>/dev/null", tree, env)
    run("there is no compiler and no git", "! command -v gcc g++ cc c++ clang nvcc ptxas git", tree, env)
    stray = sorted(p.name for p in tree.iterdir() if p.is_file() and p.name not in ROOT_FILES)
    run("no stray file", f"exit {len(stray)}  # {stray}", tree, env)
    first, second = readme_commands((tree / "README.md").read_text(encoding="utf-8"))
    run("README, first command", first, tree, env)
    run("README, second command", second, tree, {**env, "PYTEST_ADDOPTS": "--listed-skips-only"}, LIMIT)
    run("torch still cannot be imported", "! python -c 'import torch' 2>/dev/null", tree, env)


def together(jobs: list[Callable[[], object]]) -> None:
    """Do all of them, as many at once as there are cores."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for done in [pool.submit(job) for job in jobs]:
            done.result()


def full(folder: Path) -> None:
    """Everything that CI checks, with torch."""
    venv, tree = folder / "full", checkout(folder)
    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    env = environment(venv, os.environ["PATH"])
    if run("install", f"pip install -q '.[test,dev,docs]' {TORCH}", tree, env):
        return
    run("linter", "ruff check tilelang tests benchmarks examples", tree, env)
    together([lambda: run("types", "mypy", tree, env, aside=True),
              lambda: run("site", "mkdocs build -q --strict", tree, env, aside=True)])
    run("all tests", 'python -m pytest -m "not gpu" --full --listed-skips-only', tree, env)


def torch(folder: Path) -> None:
    """One compilation in a venv with torch and what its CUDA builds pin, in a process that does not import torch."""
    venv, tree = folder / "torch", checkout(folder)
    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    env = environment(venv, os.environ["PATH"])
    (venv / "compilation.py").write_text(ONE_COMPILATION + "import sys\nassert 'torch' not in sys.modules\n", encoding="utf-8")
    if run("torch and .[cuda]: install", f"pip install -q '.[cuda]' {TORCH} {PINNED_BY_TORCH}", tree, env) == 0:
        run("torch and .[cuda]: sm_90a", f"cd / && python {venv}/compilation.py", tree, env)
        run("torch and .[cuda]: doctor", "cd / && python -m tilelang doctor | tee /dev/stderr | grep -q 'NVRTC *│ 13.0 '",
            tree, env)


def pythons() -> dict[tuple[int, int], str]:
    """The interpreters of this machine, by version: those on the PATH and those of pyenv."""
    places = [Path(p) for p in os.environ["PATH"].split(os.pathsep) if "shims" not in p]
    places += sorted(Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")).glob("versions/*/bin"))
    found: dict[tuple[int, int], str] = {}
    for place in (Path(sys.executable).parent, *places):
        for program in sorted(place.glob("python3*")) if place.is_dir() else ():
            if re.fullmatch(r"python3(\.\d+)?", program.name):
                say = subprocess.run([str(program), "-c", "import sys, venv, ensurepip; print(*sys.version_info[:2])"],
                                     capture_output=True, text=True, check=False)
                if say.returncode == 0:
                    major, minor = map(int, say.stdout.split())
                    found.setdefault((major, minor), str(program))
    return dict(sorted(found.items()))


def interpreters(folder: Path) -> None:
    """Import, demo on the CPU and one compilation for sm_90a, in a venv of each interpreter, of one wheel."""
    tree, found = checkout(folder), pythons()
    wheel = f"{sys.executable} -m pip wheel -q --no-deps -w {folder} ."
    if run("wheel", wheel, tree, environment(folder, os.environ["PATH"])):
        return
    versions = [(3, minor) for minor in range(OLDEST[1], max(found)[1] + 1)]
    for version in versions:
        if version not in found:
            print(f"skipped: no Python {version[0]}.{version[1]} on this machine", flush=True)
    together([partial(interpreter, folder, version, found[version]) for version in versions if version in found])


def interpreter(folder: Path, version: tuple[int, int], program: str) -> None:
    """One of them.  version: major and minor.  program: its path."""
    name = "Python " + ".".join(map(str, version))
    venv, (wheel,) = folder / name.replace(" ", ""), folder.glob("*.whl")
    subprocess.run([program, "-m", "venv", str(venv)], check=True)
    (venv / "compilation.py").write_text(ONE_COMPILATION, encoding="utf-8")
    names = "tilelang, tilelang.language, tilelang.library"
    for what, command in {
            "install": f"pip install -q '{wheel}[cuda]'",
            "import": f"python -c 'import sys, {names}; assert sys.version_info[:2] == {version}'",
            "demo": "python -m tilelang demo --target cpu",
            "sm_90a": f"python {venv}/compilation.py"}.items():
        run(f"{name}: {what}", command, Path("/"), environment(venv, os.environ["PATH"]), aside=True)
    shutil.rmtree(venv)


def why(said: list[str]) -> list[str]:
    """Of what a failed step printed: the last lines, with the summary of failed tests and what each of them said."""
    summary = [line for line in said if line.startswith(("FAILED", "ERROR", "E  "))]
    return [*summary[-150:], "...", *said[-40:]]


STEPS = {"readme": readme, "full": full, "torch": torch, "interpreters": interpreters}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=STEPS, help="one step alone")
    only = parser.parse_args().only
    for name, step in STEPS.items():
        if only in (None, name):
            with tempfile.TemporaryDirectory(prefix=f"tilelang-ci-{name}-") as folder:
                step(Path(folder))
    print("\nexit status  seconds  processor  step")
    for name, rc, seconds, processor, _ in results:
        print(f"{rc:11d}  {seconds:7.0f}  {processor:9.0f}  {name}")
    for result in results:
        if result.rc:
            print(f"\nFailed: {result.name}", *why(result.said), sep="\n")
    return 1 if any(r.rc for r in results) else 0


if __name__ == "__main__":
    sys.exit(main())
