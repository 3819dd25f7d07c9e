"""Who computes a workload: what every provider has, and the table of them.

A provider is one module with a `provider()` function; nothing of it is imported before it is asked for.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from .problems import Problem
from .workloads import Workload


class Skip(Exception):
    """This provider does not do this workload; the text says why."""


@dataclass
class Candidate:
    """One way to run a workload.

    label: its configuration.  call: runs it once on the current stream and gives the result in the order of
    Problem.new_out (views are free; copies would be timed).  facts: what is reported of it (registers, tiles, ...).
    """

    label: str
    call: Callable[[], Any]
    facts: dict[str, Any] = field(default_factory=dict)


class Provider:
    """Subclasses say what they can do; every method may raise Skip."""

    name = ""
    text = ""  # one line for --list
    is_peer = True  # ours are compared with the best peer

    def unavailable(self) -> str:
        """Why it cannot be used on this machine; "" when it can."""
        return ""

    def labels(self, workload: Workload) -> Sequence[str]:
        """Configurations that are tried; the fastest is measured."""
        raise NotImplementedError

    def compile(self, workload: Workload, label: str) -> dict[str, Any] | None:
        """Compile one configuration into the disk caches, in a worker process; facts, "seconds" among them.

        None: nothing to compile.
        """
        return None

    def candidate(self, problem: Problem, label: str) -> Candidate:
        """The configuration, ready to be called on the problem's tensors."""
        raise NotImplementedError


MODULES = {"tilelang": "provider_tilelang", "programs": "provider_tilelang:open_tiles", "checkout": "provider_checkout",
           "cublas": "provider_torch:cublas", "cudnn": "provider_torch:cudnn", "flash": "provider_torch:flash",
           "fa3": "provider_fa3", "triton": "provider_triton", "cubin": "provider_cubin", "torch": "provider_torch:plain"}
DEFAULT = ("tilelang", "cublas", "cudnn", "flash", "fa3", "triton", "cubin")


def get(name: str) -> Provider:
    """A provider by its name in MODULES; "MODULE:FUNCTION" names one that stands elsewhere on the import path."""
    known = name in MODULES
    if not known and ":" not in name:
        raise ValueError(f"no provider is called {name!r}: {', '.join(MODULES)}")
    module, _, function = (MODULES[name] if known else name).partition(":")
    made: Provider = getattr(importlib.import_module(f".{module}" if known else module, __package__ if known else None),
                             function or "provider")()
    made.name = made.name or name
    return made


def names(patterns: str) -> list[str]:
    """Provider names of a comma-separated list; "" is DEFAULT.  Raises ValueError for an unknown one."""
    chosen = [p.strip() for p in patterns.split(",") if p.strip()] or list(DEFAULT)
    for name in chosen:
        if name not in MODULES and ":" not in name:
            raise ValueError(f"no provider is called {name!r}: {', '.join(MODULES)}")
    return list(dict.fromkeys(chosen))
