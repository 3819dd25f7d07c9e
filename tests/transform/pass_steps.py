"""The program before and after one pass of the pipeline."""

from __future__ import annotations

from typing import Any

import tilelang
from tilelang.instrumentation import PassEvent, PassEventObserver, compile_pass_instrumentation
from tilelang.ir import Func
from tilelang.transform import PassContext

SM80, SM90A = ({"kind": "cuda", "arch": arch} for arch in ("sm_80", "sm_90a"))


class _Last(PassEventObserver):
    """Keeps the last run of a pass."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.event: PassEvent | None = None

    def on_pass(self, event: PassEvent) -> None:
        if event.name == self.name:
            self.event = event


def around(program: Any, name: str, target: Any = SM80, config: dict[str, Any] | None = None) -> tuple[Func, Func]:
    """(program before, program after) of a pass, by its name, where `program` is lowered for a target."""
    last = _Last(name)
    with compile_pass_instrumentation(last), PassContext(config=config or {}):
        tilelang.lower(program, target=target)
    assert last.event is not None, f"no pass is named {name}"
    return last.event.before, last.event.after


__all__ = ["SM80", "SM90A", "around"]
