"""Every error kind has a failing program and its full text."""

import importlib
import pathlib
import pkgutil
import re
import runpy
import sys

import pytest

import tilelang
from tilelang.errors import KINDS, TileLangError

HERE = pathlib.Path(__file__).parent
PROGRAMS = sorted((HERE / "programs").glob("*.py"))


def all_kinds() -> set[str]:
    """Kinds registered by any module of the package."""
    for m in pkgutil.walk_packages(tilelang.__path__, "tilelang."):
        if not m.name.endswith("__main__"):
            importlib.import_module(m.name)
    return {k for k in KINDS if not k.startswith("test-")}  # tests register kinds of their own


def failure(path: pathlib.Path) -> TileLangError:
    with pytest.raises(TileLangError) as caught:
        runpy.run_path(str(path), run_name="__main__")
    return caught.value


@pytest.mark.parametrize("path", PROGRAMS, ids=[p.stem for p in PROGRAMS])
def test_the_program_fails_with_this_text(path, golden, monkeypatch):
    monkeypatch.setenv("TILELANG_DISABLE_CACHE", "1")  # a kernel kept of an equal program knows that one's places
    err = failure(path)
    assert err.kind == path.stem
    assert err.hint, "an error ends with something to do"
    text = str(err).replace(str(path), path.name)
    if sys.version_info < (3, 11):  # Python tells the place inside a statement from 3.11 on
        expected = path.with_suffix(".txt").read_text(encoding="utf-8")
        assert text.splitlines()[0] == expected.splitlines()[0]
        return
    golden(f"errors/programs/{path.stem}.txt", text + "\n")


def test_every_kind_has_its_program():
    missing = sorted(all_kinds() - {p.stem for p in PROGRAMS})
    assert not missing, missing


def test_there_are_at_least_a_hundred_and_fifty_kinds():
    assert len(PROGRAMS) >= 150


def test_every_text_has_a_line_a_caret_what_was_expected_and_found_and_a_hint():
    """The line is the statement's, or the user's call where there is no statement."""
    for path in sorted((HERE / "programs").glob("*.txt")):
        text = path.read_text(encoding="utf-8")
        first, *rest = text.splitlines()
        assert re.match(rf"error\[{path.stem}\]: \S", first), path.name
        said = [line.partition(": ")[0] for line in rest if re.match(r"(expected|found|hint): \S", line)]
        assert said == ["expected", "found", "hint"], path.name
        points = [k for k, line in enumerate(rest) if re.fullmatch(r"  --> \S+:\d+:\d+", line)]
        shown = [re.match(r"\d+ \| ", rest[k + 1]) and re.match(r" +\| +\^", rest[k + 2]) for k in points]
        assert points and all(shown), path.name
