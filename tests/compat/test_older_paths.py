"""Import paths of older programs: every module and name of tests/compat/older_paths.txt imports, lazily, from the table."""

import importlib
import pathlib
import subprocess
import sys

import pytest

from tilelang.compat.table import PATHS

ROOT = pathlib.Path(__file__).resolve().parents[2]
LINES = (pathlib.Path(__file__).parent / "older_paths.txt").read_text(encoding="utf-8").splitlines()
OLDER = {module: names.split() for module, _, names in (line.partition(":") for line in LINES)}


@pytest.mark.parametrize("module", sorted(OLDER))
def test_every_name_of_an_older_path_imports(module):
    found = importlib.import_module(module)
    for name in OLDER[module]:
        scope = {}
        exec(f"from {module} import {name}", scope)
        assert scope[name] is getattr(found, name), name


def test_the_table_holds_no_path_that_a_file_holds():
    for path in PATHS:
        file = ROOT.joinpath(*path.split("."))
        assert not file.with_suffix(".py").exists() and not file.exists(), path


def test_importing_tilelang_loads_no_older_path():
    code = ("import sys, tilelang; print(sorted(m for m in sys.modules if m.startswith('tilelang.compat') "
            "and m not in ('tilelang.compat', 'tilelang.compat.finder')))")
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert out.stdout.strip() == "[]", out.stdout + out.stderr


def test_star_import_takes_the_names_of_an_older_path():
    scope = {}
    exec("from tilelang.engine.param import *", scope)
    assert {"KernelParam", "CompiledArtifact"} <= set(scope)


def test_an_unknown_path_is_not_found():
    with pytest.raises(ModuleNotFoundError, match="tilelang.engine.nothing"):
        importlib.import_module("tilelang.engine.nothing")
    with pytest.raises(AttributeError, match="nothing"):
        importlib.import_module("tilelang.engine").nothing  # noqa: B018


def test_a_module_that_is_called_lowers_a_program():
    import tilelang

    lower = importlib.import_module("tilelang.engine.lower")
    assert lower.lower is tilelang.lower and callable(lower)


@pytest.mark.parametrize("module, instead", [("tilelang.primitives.gemm", "T.gemm")])
def test_a_module_without_meaning_here_says_what_to_use(module, instead):
    with pytest.raises(ModuleNotFoundError, match=instead):
        importlib.import_module(module)
