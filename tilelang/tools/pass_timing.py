"""Measures the time of each pass: an observer that sums up times, and its report table.

    with TileLangPassTimingInstrument() as timing:
        tilelang.lower(program, target="cuda")
    print(timing.report())
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tilelang.env import resolve_pass_profile_threshold_ms
from tilelang.transform.framework.observe import PassEvent, PassEventObserver, add_observer, observing, remove_observer


@dataclass(frozen=True)
class PassTimingRecord:
    """One run of a pass: its name, milliseconds, whether the program changed, the program's name, and the phase."""

    name: str
    duration_ms: float
    changed: bool = False
    program: str = ""
    phase: str = ""


class TileLangPassTimingInstrument(PassEventObserver):
    """Records the time of each pass that runs in its `with` block, or under PassContext(instruments=[it]).

    threshold_ms: the report omits faster passes (None: TILELANG_PASS_PROFILE_THRESHOLD_MS).
    Raises ValueError for a threshold that is no number >= 0.
    """

    def __init__(self, threshold_ms: float | None = 0) -> None:
        self.threshold_ms = resolve_pass_profile_threshold_ms(threshold_ms)
        self.records: list[PassTimingRecord] = []
        self._watch: Any = None

    def on_pass(self, event: PassEvent) -> None:
        self.records.append(PassTimingRecord(event.name, event.seconds * 1e3, event.changed, event.after.name, event.phase))

    def __enter__(self) -> TileLangPassTimingInstrument:
        self._watch = observing(self)
        self._watch.__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        self._watch.__exit__(*exc)

    def clear(self) -> None:
        """Delete the records."""
        self.records.clear()

    @property
    def total_ms(self) -> float:
        """Total time of all recorded passes."""
        return sum(r.duration_ms for r in self.records)

    def report(self) -> str:
        """A table: runs, total, mean and percentage of each pass, slowest first, and the total of all passes."""
        rows: dict[str, list[PassTimingRecord]] = {}
        for r in self.records:
            rows.setdefault(r.name, []).append(r)
        total = self.total_ms
        lines = [f"{'pass':<24}{'runs':>6}{'total ms':>11}{'mean ms':>10}{'share':>8}"]
        for name, found in sorted(rows.items(), key=lambda kv: -sum(r.duration_ms for r in kv[1])):
            spent = sum(r.duration_ms for r in found)
            if spent >= self.threshold_ms:
                share = spent / total if total else 0.0
                lines.append(f"{name:<24}{len(found):>6}{spent:>11.2f}{spent / len(found):>10.2f}{share:>8.1%}")
        lines.append(f"{'all':<24}{len(self.records):>6}{total:>11.2f}")
        return "\n".join(lines)


class PassTimingTool(TileLangPassTimingInstrument):
    """Measures passes in the whole process: start(), stop(), report()."""

    name = "pass_timing"

    def start(self) -> PassTimingTool:
        """Start recording, in all threads."""
        add_observer(self)
        return self

    def stop(self) -> PassTimingTool:
        """Stop recording; the records stay."""
        remove_observer(self)
        return self

    @property
    def instrument(self) -> TileLangPassTimingInstrument:
        """The observer."""
        return self

    def create(self) -> TileLangPassTimingInstrument:
        """The observer, for PassContext(instruments=[...])."""
        return self

    def __enter__(self) -> PassTimingTool:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.stop()
