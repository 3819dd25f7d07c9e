"""One process that checks and times: round after round over the workloads, the providers taking turns."""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch

from . import record as rec
from .measuring import Meter, Prepared
from .problems import Problem, make
from .providers import Provider, Skip
from .record import Record
from .workloads import Workload

TUNE_MS, TUNE_WINDOWS = 3.0, 3


class Poisoned(Exception):
    """The device context is lost (an illegal access, say): this process can do nothing more."""


@dataclass(frozen=True)
class Plan:
    """rounds: how many at most.  burst_ms, sustained_ms: lengths of the windows.  deadline: time.time() to stop at."""

    rounds: int
    burst_ms: float
    sustained_ms: float
    deadline: float


class Session:
    """Measures into a Record; what the record already holds is not done again."""

    def __init__(self, record: Record, providers: Sequence[Provider], meter: Meter, plan: Plan) -> None:
        self.record, self.providers, self.meter, self.plan = record, providers, meter, plan
        self.longest: dict[str, float] = {}  # seconds of the longest round so far, by workload

    def run(self, workloads: Sequence[Workload]) -> None:
        """Rounds over all workloads until there are enough, or the deadline comes: later rounds are dropped first."""
        for r in range(self.plan.rounds):
            for w in workloads:
                row = self.record.row(w)
                if len(row["rounds"]) > r or "broken" in row:
                    continue
                if time.time() + self.longest.get(w.name, 0.0) > self.plan.deadline:
                    self.record.event(f"{w.name}: no time for round {r + 1} of {self.plan.rounds}")
                    continue
                start = time.time()
                self.round(w, r)
                self.longest[w.name] = max(self.longest.get(w.name, 0.0), time.time() - start)
        self.record.end()

    def round(self, w: Workload, r: int) -> None:
        """One burst and one sustained window of every provider, in an order that moves on from round to round."""
        self.record.begin("inputs", w.name)
        problem = make(w, self.meter.device)
        ready: dict[str, Prepared] = {}
        for p in self.providers:
            prepared = self._guarded(p, w, partial(self._ready, p, problem))
            if prepared is not None:
                ready[p.name] = prepared
        order = list(ready)
        order = order[r % len(order):] + order[:r % len(order)] if order else []
        found: dict[str, dict[str, Any]] = {name: {} for name in order}
        by_name = {p.name: p for p in self.providers}
        for window, ms in (("burst", self.plan.burst_ms), ("sustained", self.plan.sustained_ms)):
            for name in order:
                result = self._guarded(by_name[name], w, partial(self.meter.window, ready[name], ms), f"{window} window")
                if result is None:
                    found.pop(name, None)
                elif name in found:
                    found[name][window] = asdict(result)
        self.record.row(w)["rounds"].append({n: f for n, f in found.items() if len(f) == 2})
        self.record.end()
        rates = ", ".join(f"{n} {w.flops / f['burst']['ms'] * 1e-9:.0f}/{w.flops / f['sustained']['ms'] * 1e-9:.0f}"
                          for n, f in found.items() if len(f) == 2)
        print(f"round {r + 1} {w.name:14s} {rates}", flush=True)
        gc.collect()  # tensors go before those of the next workload come

    def _guarded(self, p: Provider, w: Workload, do: Any, step: str = "") -> Any:
        """do(), or None when it fails: the provider is then out of this workload.  Raises Poisoned."""
        state = self.record.state(w, p.name)
        if state.get("status", rec.OK) != rec.OK:
            return None
        self.record.begin(step or "preparation", w.name, p.name)
        try:
            result = do()
            self.meter.synchronize()
            return result
        except Skip as e:
            state.update(status=rec.SKIPPED, reason=str(e))
        except Exception as e:
            state.update(status=rec.FAILED, reason=f"{type(e).__name__}: {e}"[:2000])
            print(f"{w.name}: {p.name}: {state['reason'].splitlines()[0]}", flush=True)
            try:
                self.meter.synchronize()
            except Exception as lost:
                raise Poisoned(f"the device context is lost: {str(lost).splitlines()[0]}") from e
        return None

    def _ready(self, p: Provider, problem: Problem) -> Prepared | None:
        state = self.record.state(problem.workload, p.name)
        if "label" not in state:
            self._admit(p, problem, state)
            if state["status"] != rec.OK:
                return None
        candidate = p.candidate(problem, state["label"])
        prepared = self.meter.prepare(candidate.call)
        state["timing"], state["host_us"] = prepared.how, prepared.host_us
        return prepared

    def _admit(self, p: Provider, problem: Problem, state: dict[str, Any]) -> None:
        """Check every configuration; keep the fastest of those that are right.  Fills `state`."""
        w, tried, right = problem.workload, [], []
        for label in p.labels(w):
            self.record.begin(f"check of {label}", w.name, p.name)
            try:
                candidate = p.candidate(problem, label)
                accuracy = problem.check(candidate.call())
            except Skip:
                raise
            except Exception as e:  # another configuration may do
                tried.append({"label": label, "error": f"{type(e).__name__}: {e}"[:500]})
                self.meter.synchronize()  # raises when the context is lost: the caller gives up this process
                continue
            # A peer may add parts of a sum in the result's type: its elements may leave our bound, its norm must not.
            ok = accuracy.ok or p.is_peer and accuracy.finite and accuracy.relative <= accuracy.limit
            entry = {"label": label, "accuracy": {**asdict(accuracy), "ok": accuracy.ok}, "facts": candidate.facts}
            tried.append(entry)
            if ok:
                prepared = self.meter.prepare(candidate.call)
                entry["ms"] = min(self._short(prepared) for _ in range(TUNE_WINDOWS))
                right.append(entry)
        if len(tried) > 1:
            state["tried"] = [{k: v for k, v in t.items() if k != "facts"} for t in tried]
        if right:
            state.update({k: v for k, v in min(right, key=lambda t: t["ms"]).items() if k != "ms"}, status=rec.OK)
            return
        wrong = [t for t in tried if "accuracy" in t]
        if wrong:
            state.update(wrong[0], status=rec.WRONG, reason="the result differs from the reference")
        else:
            state.update(status=rec.FAILED, reason=tried[0]["error"] if tried else "no configuration")
        print(f"{w.name}: {p.name}: {state['status']}: {state['reason'].splitlines()[0]} {state.get('accuracy', '')}",
              flush=True)

    def _short(self, prepared: Prepared) -> float:
        idle, self.meter.idle = self.meter.idle, min(self.meter.idle, 0.05)
        try:
            return self.meter.window(prepared, TUNE_MS).ms
        finally:
            self.meter.idle = idle


def worker_environment() -> None:
    """Float32 stays float32 where torch computes with it; memory of one workload is given to the next."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
