"""Kernels that examples called, timed afterwards beside what torch offers for the same work."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Call:
    """One call of a kernel.  flops, bytes: of products and of tensors, None where only the call knows them."""

    kernel: str
    run: Callable[[], Any]
    flops: float | None = None
    bytes: float | None = None
    peer: str = ""
    run_peer: Callable[[], Any] | None = None

    def timed(self, budget_ms: float = 40.0) -> dict[str, Any]:
        """Median milliseconds of kernel and peer, with the L2 cache flushed before every run; rates; JSON facts."""
        from tilelang.profiler import do_bench

        def median(run: Callable[[], Any]) -> float:
            return float(do_bench(run, warmup=budget_ms / 4, rep=budget_ms, return_mode="median"))

        ms = median(self.run)
        facts: dict[str, Any] = {"kernel": self.kernel, "ms": ms, "tflops": None, "gb_per_s": None}
        if self.flops:
            facts["tflops"] = self.flops / ms * 1e-9
        if self.bytes:
            facts["gb_per_s"] = self.bytes / ms * 1e-6
        if self.run_peer is not None:
            facts["peer"] = self.peer
            try:
                facts["peer_ms"] = median(self.run_peer)
            except Exception as e:  # a torch that lacks the operation must not cost the kernel its figure
                facts["peer_ms"], facts["peer_error"] = None, f"{type(e).__name__}: {e}".splitlines()[0]
        return facts


@dataclass
class Measured:
    """The calls of one check, in order."""

    calls: list[Call] = field(default_factory=list)

    def called(self, kernel: Any, run: Callable[[], Any]) -> None:
        """A kernel ran; `run` runs it again on the same tensors."""
        self.calls.append(Call(_name(kernel), run, *_work(kernel)))

    def beside(self, name: str, run: Callable[[], Any]) -> None:
        """What the kernel called last is compared with."""
        if self.calls:
            self.calls[-1].peer, self.calls[-1].run_peer = name, run


def _name(kernel: Any) -> str:
    data = getattr(kernel, "report_data", None)
    return str(data["name"] if data else getattr(kernel, "__name__", type(kernel).__name__))


def _work(kernel: Any) -> tuple[float | None, float | None]:
    """Of all launches together, by the kernel's own report; None where a launch's work depends on the call."""
    data = getattr(kernel, "report_data", None)
    limits = [k.get("limits") or {} for k in data["kernels"]] if data else []

    def total(key: str) -> float | None:
        parts = [x.get(key) for x in limits]
        return sum(parts) if parts and None not in parts else None

    return total("flops"), total("bytes")
