"""The library of another checkout of this package, in the same process: did a change make anything slower?

The environment variable TILELANG_BENCH_CHECKOUT names the folder in which that checkout's `tilelang` package stands.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from .problems import Problem, make
from .provider_tilelang import TileLang, library_call
from .providers import Candidate, Provider
from .workloads import Workload

VARIABLE = "TILELANG_BENCH_CHECKOUT"


def _take_out() -> dict[str, ModuleType]:
    """Modules of the package that is in use; they are no longer imported afterwards."""
    return {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] == "tilelang"}


class Checkout(TileLang):
    """Both packages are called tilelang: the other one's modules stand in sys.modules only while it compiles."""

    name, text, is_peer = "checkout", f"tilelang.library of the checkout in ${VARIABLE}", True

    def __init__(self, device: str = "cuda") -> None:
        super().__init__(device)
        self.folder, self.modules = os.environ.get(VARIABLE, ""), dict[str, ModuleType]()

    def unavailable(self) -> str:
        if not self.folder or not os.path.isdir(os.path.join(self.folder, "tilelang")):
            return f"${VARIABLE} names no folder with a tilelang package"
        return super().unavailable()

    @contextmanager
    def imported(self) -> Iterator[None]:
        """`import tilelang` gives the other checkout's package."""
        ours = _take_out()
        sys.modules.update(self.modules)
        sys.path.insert(0, self.folder)
        try:
            yield
        finally:
            sys.path.remove(self.folder)
            self.modules = _take_out()
            sys.modules.update(ours)

    def compile(self, workload: Workload, label: str) -> dict[str, Any]:
        start = time.perf_counter()
        self._call(make(workload, self.device), label)
        return {"seconds": time.perf_counter() - start}

    def candidate(self, problem: Problem, label: str) -> Candidate:
        return Candidate(label, self._call(problem, label), {})

    def _call(self, problem: Problem, label: str) -> Callable[[], Any]:
        """The library's function, called twice: what it imports late is imported then."""
        with self.imported():
            call = library_call(problem, label)
            call(), call()
        return call


def provider() -> Provider:
    return Checkout()


def on_cpu() -> Provider:
    """The library on the CPU target, for trying the harness."""
    return Checkout("cpu")
