"""What a run has found so far, in one JSON file: written after every step, read again when a worker is started anew."""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from .workloads import Workload

OK, SKIPPED, FAILED, WRONG, CRASHED = "ok", "skipped", "failed", "wrong", "crashed"


class Record:
    """The file and its content.

    data: "machine", "options", "compile" (a list), "cold" (a list), "events" (texts), "current" (what is being done, with
    the workload and provider to blame if it never ends) and "rows": workload -> {"shape", "flops", "groups", "rounds":
    [{provider: {"burst": Window, "sustained": Window}}], "providers": {provider: {"status", "reason", "label", "timing",
    "host_us", "accuracy", "facts"}}, "broken": why its inputs cannot be made}.
    """

    def __init__(self, path: Path, data: dict[str, Any] | None = None) -> None:
        self.path = path
        self.data: dict[str, Any] = data or {"machine": {}, "options": {}, "compile": [], "cold": [], "events": [],
                                             "current": None, "rows": {}}

    @classmethod
    def load(cls, path: Path) -> Record:
        return cls(path, json.loads(path.read_text(encoding="utf-8")))

    def save(self) -> None:
        """Replace the file in one step: a reader never sees half of it."""
        new = self.path.with_suffix(".new")
        new.write_text(json.dumps(self.data, indent=1) + "\n", encoding="utf-8")
        os.replace(new, self.path)

    def begin(self, step: str, workload: str | None = None, provider: str | None = None) -> None:
        """Say what is being done now."""
        self.data["current"] = {"step": step, "workload": workload, "provider": provider}
        self.save()

    def end(self) -> None:
        self.data["current"] = None
        self.save()

    def event(self, text: str) -> None:
        self.data["events"].append(text)
        self.save()

    def row(self, workload: Workload) -> dict[str, Any]:
        """The workload's entry, made when it is new."""
        return self.data["rows"].setdefault(workload.name, {
            "shape": workload.shape, "kind": workload.kind, "flops": workload.flops, "groups": list(workload.groups),
            "rounds": [], "providers": {}})

    def state(self, workload: Workload, provider: str) -> dict[str, Any]:
        """The provider's entry in a row; empty when it has not been tried."""
        return self.row(workload)["providers"].setdefault(provider, {})

    def blame(self, why: str) -> str:
        """Mark what was being done as crashed; it will not be tried again.  Says what it was."""
        current = self.data["current"] or {"step": "nothing", "workload": None, "provider": None}
        workload, provider = current["workload"], current["provider"]
        if workload in self.data["rows"] and provider:
            self.data["rows"][workload]["providers"].setdefault(provider, {}).update(status=CRASHED, reason=why)
        elif workload in self.data["rows"]:  # its inputs: nobody can run it
            self.data["rows"][workload]["broken"] = why
        text = f"{why} during {current['step']} of {workload} by {provider}"
        self.data["current"] = None
        self.event(text)
        return text


def times(row: dict[str, Any], provider: str, window: str) -> list[float]:
    """Milliseconds of a provider's windows, one a round."""
    return [r[provider][window]["ms"] for r in row["rounds"] if provider in r]


def spread(values: Sequence[float]) -> float:
    """(largest - smallest) / median."""
    return (max(values) - min(values)) / statistics.median(values)


def tflops(row: dict[str, Any], provider: str, window: str) -> float | None:
    """Median rate in TFLOP/s; None when it was not timed."""
    found = times(row, provider, window)
    return row["flops"] / statistics.median(found) * 1e-9 if found else None


def ratio(row: dict[str, Any], ours: str, peer: str, window: str) -> float | None:
    """Speed of `ours` over `peer`: median over the rounds that have both."""
    pairs = [r[peer][window]["ms"] / r[ours][window]["ms"] for r in row["rounds"] if ours in r and peer in r]
    return statistics.median(pairs) if pairs else None


def best_peer(row: dict[str, Any], peers: Iterable[str], window: str) -> str | None:
    """The fastest of the peers that were timed."""
    rates = {p: tflops(row, p, window) for p in peers}
    timed = {p: r for p, r in rates.items() if r is not None}
    return max(timed, key=lambda p: timed[p]) if timed else None
