#!/usr/bin/env python3
"""What CI runs on a bare machine with Python and pip: the README's two commands, then everything else.

    .ci/run                      all of it
    .ci/run --only readme        one step: readme, full, torch or interpreters

readme: both commands are read from README.md and run as they stand there, in a venv without torch and with no compiler on
the PATH.  full: linter, types, the site and all tests, in a venv with torch.  torch: one compilation for sm_90a beside the
NVRTC that torch's CUDA builds pin, without importing torch.  interpreters: import, demo and one compilation
for sm_90a with every Python on this machine that pyproject.toml allows.  A table of exit statuses and seconds comes last.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TORCH = "torch==2.13.0"
PINNED_BY_TORCH = "nvidia-cuda-nvrtc==13.0.88 nvidia-cuda-runtime==13.0.96"  # by its builds for CUDA 13.0
LIMIT = 300  # seconds of the README's second command on two cores
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

results: list[tuple[str, int, float]] = []


def run(name: str, command: str, cwd: Path, env: dict[str, str]) -> int:
    """Run a shell command, enter it into the table."""
    print(f"\n==> {name}: {command.strip().splitlines()[0]}", flush=True)
    start = time.monotonic()
    rc = subprocess.run(["bash", "-ec", command], cwd=cwd, env=env, check=False).returncode
    results.append((name, rc, time.monotonic() - start))
    print(f"<== {name}: exit status {rc}, {results[-1][2]:.0f} s", flush=True)
    return rc


def environment(venv: Path, path: str) -> dict[str, str]:
    """Of a venv, with caches of its own and no other Python's settings."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "TILELANG_", "VIRTUAL_ENV", "CUDA"))}
    return {**kept, "VIRTUAL_ENV": str(venv), "PATH": f"{venv}/bin:{path}", "PYTHONUNBUFFERED": "1",
            "TILELANG_CACHE_DIR": str(venv / "cache"), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}


def checkout(folder: Path) -> Path:
    """A clean copy of the committed tree; of the files themselves where there is no repository."""
    tree = folder / "tree"
    if (ROOT / ".git").exists():
        subprocess.run(["git", "clone", "-q", str(ROOT), str(tree)], check=True)
    else:
        shutil.copytree(ROOT, tree)
    return tree


def path_without_compilers(folder: Path) -> str:
    """A folder of links to the programs of the PATH that compile nothing, and are no Python."""
    tools = folder / "tools"
    tools.mkdir()
    for place in ("/usr/bin", "/bin"):
        for program in Path(place).iterdir():
            link = tools / program.name
            if not COMPILERS.fullmatch(program.name) and not program.name.startswith(("python", "pip")) and not link.exists():
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
    run("there is no compiler", "! command -v gcc g++ cc c++ clang nvcc ptxas", tree, env)
    first, second = readme_commands((tree / "README.md").read_text(encoding="utf-8"))
    run("README, first command", first, tree, env)
    if run("README, second command", second, tree, {**env, "PYTEST_ADDOPTS": "--listed-skips-only"}) == 0 and \
            results[-1][2] > LIMIT:
        print(f"the second command takes longer than {LIMIT} s", flush=True)
    run("torch still cannot be imported", "! python -c 'import torch' 2>/dev/null", tree, env)


def full(folder: Path) -> None:
    """Everything that CI checks, with torch."""
    venv, tree = folder / "full", checkout(folder)
    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    env = environment(venv, os.environ["PATH"])
    if run("install", f"pip install -q '.[test,dev,docs]' {TORCH}", tree, env):
        return
    run("linter", "ruff check tilelang tests benchmarks examples", tree, env)
    run("types", "mypy", tree, env)
    if (tree / "mkdocs.yml").exists():
        run("site", "mkdocs build -q --strict", tree, env)
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
    """Import, demo on the CPU and one compilation for sm_90a, in a venv of each interpreter."""
    tree, found = checkout(folder), pythons()
    newest = max(found)
    for version in [(3, minor) for minor in range(OLDEST[1], newest[1] + 1)]:
        name = ".".join(map(str, version))
        if version not in found:
            print(f"skipped: no Python {name} on this machine", flush=True)
            continue
        venv = folder / f"python{name}"
        subprocess.run([found[version], "-m", "venv", str(venv)], check=True)
        env = environment(venv, os.environ["PATH"])
        (venv / "compilation.py").write_text(ONE_COMPILATION, encoding="utf-8")
        run(f"Python {name}: install", "pip install -q '.[cuda]'", tree, env)
        run(f"Python {name}: import", f"cd / && python -c 'import sys, tilelang, tilelang.language, tilelang.library; "
            f"assert sys.version_info[:2] == {version}'", tree, env)
        run(f"Python {name}: demo", "cd / && python -m tilelang demo --target cpu", tree, env)
        run(f"Python {name}: sm_90a", f"cd / && python {venv}/compilation.py", tree, env)
        shutil.rmtree(venv)


STEPS = {"readme": readme, "full": full, "torch": torch, "interpreters": interpreters}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=STEPS, help="one step alone")
    only = parser.parse_args().only
    for name, step in STEPS.items():
        if only in (None, name):
            with tempfile.TemporaryDirectory(prefix=f"tilelang-ci-{name}-") as folder:
                step(Path(folder))
    print("\nexit status  seconds  step")
    for name, rc, seconds in results:
        print(f"{rc:11d}  {seconds:7.0f}  {name}")
    return 1 if any(rc for _, rc, _ in results) else 0


if __name__ == "__main__":
    sys.exit(main())
