"""Kernels that examples called, timed afterwards beside what torch offers for the same work."""

from __future__ import annotations

import time
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
    took: float | None = None  # milliseconds of the call itself, where it cannot be repeated

    def figures(self) -> tuple[str, str, str]:
        """(time, rate, peer) as text; times it, but for calls that were timed when they were made."""
        if self.took is None:
            return figures(self.timed())
        rate = f"{self.flops / self.took * 1e-6:.2g} GFLOP/s" if self.flops else ""
        return f"{self.took:.3g} ms", rate, ""

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


def figures(call: dict[str, Any]) -> tuple[str, str, str]:
    """(time, rate, peer) as text, of what Call.timed gives."""
    rate = peer = ""
    if call["tflops"] and call["tflops"] >= 1:
        rate = f"{call['tflops']:.0f} TFLOP/s"
    elif call["gb_per_s"]:
        rate = f"{call['gb_per_s']:.0f} GB/s"
    if call.get("peer_ms"):
        peer = f"{call['peer']} {call['peer_ms'] * 1e3:.1f} us, {call['peer_ms'] / call['ms']:.2f}x"
    elif call.get("peer_error"):
        peer = f"{call['peer']}: {call['peer_error'][:40]}"
    return f"{call['ms'] * 1e3:.1f} us", rate, peer


@dataclass
class Measured:
    """The calls of one check, in order."""

    calls: list[Call] = field(default_factory=list)

    def called(self, kernel: Any, run: Callable[[], Any]) -> None:
        """A kernel ran; `run` runs it again on the same tensors."""
        self.calls.append(Call(_name(kernel), run, *_work(kernel)))

    def watched(self, kernel: Any, warm: bool) -> Callable[..., Any]:
        """The kernel, whose calls are timed as they are made.  warm: a call with copies of the arrays goes before, which
        loads and makes what first calls need."""
        def call(*args: Any, **kwargs: Any) -> Any:
            if warm:
                kernel(*(a.copy() if hasattr(a, "copy") else a for a in args), **kwargs)
            start = time.perf_counter()
            result = kernel(*args, **kwargs)
            self.calls.append(Call(_name(kernel), lambda: None, *_work(kernel), took=(time.perf_counter() - start) * 1e3))
            return result

        return call

    def beside(self, name: str, run: Callable[[], Any]) -> None:
        """What the kernel called last is compared with."""
        if self.calls:
            self.calls[-1].peer, self.calls[-1].run_peer = name, run


def _name(kernel: Any) -> str:
    data = getattr(kernel, "report_data", None)
    kernel = getattr(kernel, "func", kernel)  # of a partial
    return str(data["name"] if data else getattr(kernel, "__name__", type(kernel).__name__))


def _work(kernel: Any) -> tuple[float | None, float | None]:
    """Of all launches together, by the kernel's own report; None where a launch's work depends on the call."""
    data = getattr(kernel, "report_data", None)
    limits = [k.get("limits") or {} for k in data["kernels"]] if data else []

    def total(key: str) -> float | None:
        parts: list[Any] = [x.get(key) for x in limits]
        return sum(parts) if parts and None not in parts else None

    return total("flops"), total("bytes")
