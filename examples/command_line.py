"""The command line of an example: options made from the parameters of its checks, sizes that suit the machine, progress.

Without options an example runs the rows of checks.py: in real sizes on a GPU, in small ones where kernels run on the CPU or
are interpreted.  Sizes given on the command line replace single ones of them.
"""

from __future__ import annotations

import argparse
import inspect
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from checks import CHECKS, EXAMPLES, Check
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn


@dataclass(frozen=True)
class Run:
    """One call of a check.  hopper: its program is for sm_90a alone."""

    check: Callable[..., Any]
    sizes: Mapping[str, Any]
    hopper: bool = False

    def __str__(self) -> str:
        return ", ".join([self.check.__name__, *(f"{k}={v}" for k, v in self.sizes.items())])


def parser(checks: Sequence[Callable[..., Any]], choices: Mapping[str, Sequence[str]]) -> argparse.ArgumentParser:
    """Every size of the checks is an option (--m 4096); None where it is not given.  choices: of options by name."""
    found = argparse.ArgumentParser(description=inspect.getdoc(inspect.getmodule(checks[0])),
                                    formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--target", default="auto", help="cuda, cpu; default: the GPU if there is one, else the CPU")
    found.add_argument("--backend", default=None, choices=("tile", "simulator"),
                       help="interpret instead of running compiled code")
    found.add_argument("--sizes", default="auto", choices=("auto", "small", "real"),
                       help="what the options below start from; default: real on a GPU, small elsewhere")
    seen = set()
    for check in checks:
        for name, parameter in inspect.signature(check).parameters.items():
            if name != "on" and name not in seen:
                seen.add(name)
                if isinstance(parameter.default, bool):
                    found.add_argument(f"--{name}", action=argparse.BooleanOptionalAction, default=None)
                else:
                    found.add_argument(f"--{name}", type=type(parameter.default), default=None, choices=choices.get(name),
                                       help=f"real: {parameter.default}")
    return found


def runs(checks: Sequence[Callable[..., Any]], given: Mapping[str, Any], small: bool) -> list[Run]:
    """The calls to make: all rows of checks.py, or with given sizes the first row of every check, changed by them."""
    found = []
    for check in checks:
        taken = inspect.signature(check).parameters
        mine = {k: v for k, v in given.items() if v is not None and k in taken}
        rows = _rows(check)
        for row in rows[:1] if mine else rows:
            found.append(Run(check, {**(row.small if small else row.real), **mine}, row.hopper))
        if not rows:
            found.append(Run(check, mine))
    return found


def _rows(check: Callable[..., Any]) -> list[Check]:
    file = Path(inspect.getfile(check)).resolve()
    return [c for c in CHECKS if c.function == check.__name__ and EXAMPLES / c.file == file]


@contextmanager
def working(text: str) -> Iterator[list[float]]:
    """Say what is being done: by a clock on a terminal, by a line elsewhere.  Gives a list that will hold the seconds."""
    console = Console(width=None if sys.stdout.isatty() else 180)
    if not console.is_terminal:
        print(text, flush=True)
    start, seconds = time.monotonic(), list[float]()
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        progress.add_task(text, total=None)
        yield seconds
    seconds.append(time.monotonic() - start)
    if console.is_terminal:
        print(text)
