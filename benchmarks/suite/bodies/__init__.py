"""Programs for benchmarks/survey.py in the manner of public repositories, with constructs that tests/user_programs/as_others
has no example of.  A module is a manner; `@program("name")` stands before a function that returns one kernel's program."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

PROGRAMS: dict[tuple[str, str], Callable[[], Any]] = {}


def program(name: str) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """Enter the function below as a program of its module."""
    def enter(make: Callable[[], Any]) -> Callable[[], Any]:
        PROGRAMS[make.__module__.rpartition(".")[2], name] = make
        return make
    return enter


def compile_program(manner: str, name: str) -> None:
    """Compile one program for the target of TILELANG_DEFAULT_TARGET."""
    import tilelang

    importlib.import_module(f"{__name__}.{manner}")
    tilelang.compile(PROGRAMS[manner, name]())
