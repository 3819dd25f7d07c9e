"""What a source distribution holds, and what an installation says of itself."""

import pathlib
import re

import tilelang

ROOT = pathlib.Path(__file__).resolve().parent.parent
PROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")


def test_the_source_distribution_held_few_tests_and_no_page():
    manifest = (ROOT / "MANIFEST.in").read_text(encoding="utf-8").splitlines()
    assert {f"graft {folder}" for folder in ("tests", "examples", "docs", "benchmarks")} <= set(manifest)
    (included,) = (line.split()[1:] for line in manifest if line.startswith("include "))
    assert set(included) >= {"CHANGELOG.md", "CONTRIBUTING.md", "mkdocs.yml"} and all((ROOT / f).exists() for f in included)


def test_an_installation_has_a_command_an_author_and_classifiers():
    assert 'tilelang = "tilelang.cli:main"' in PROJECT and re.search(r"^authors = ", PROJECT, re.MULTILINE)
    assert "Programming Language :: Python :: 3.10" in PROJECT and 'requires-python = ">=3.10"' in PROJECT
    assert 'attr = "tilelang.version.__version__"' in PROJECT and re.fullmatch(r"\d+\.\d+\.\d+.*", tilelang.__version__)
