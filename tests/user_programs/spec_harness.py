"""Runs programs that leave target and backend to the environment, once for each execution, against torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

torch = pytest.importorskip("torch")

A100, H100 = '{"kind": "cuda", "arch": "sm_80"}', '{"kind": "cuda", "arch": "sm_90a"}'
SETTINGS = {"tile": ("cpu", "tile"), "simulator": (A100, "simulator"), "hopper": (H100, "simulator"), "cpu": ("cpu", "auto"),
            "gpu": ("cuda", "auto")}  # fmt: skip


def on(*executions: str, slow: tuple[str, ...] = ()) -> Any:
    """The executions a test is run on; "hopper" is the simulator of sm_90a.  slow: those of the nightly run."""
    marks = {"gpu": pytest.mark.gpu, **dict.fromkeys(slow, pytest.mark.slow)}
    return pytest.mark.parametrize("case", [pytest.param(e, marks=marks.get(e, ())) for e in executions], indirect=True)


EVERY = on("tile", "simulator", "cpu", "gpu")
HEAVY = on("tile", "simulator", "hopper", "cpu", "gpu", slow=("simulator", "hopper", "cpu"))


class Case:
    """One execution; inputs come from a fixed seed, lie on the CPU and are copied to the device of a call."""

    def __init__(self, execution: str) -> None:
        torch.manual_seed(7)
        self.execution = execution
        self.device = "cuda" if execution == "gpu" else "cpu"

    def randn(self, *shape: int, dt: Any = torch.float32, scale: float = 1.0) -> Any:
        return (torch.randn(*shape) * scale).to(dt)

    def randint(self, low: int, high: int, shape: Sequence[int], dt: Any = torch.int32) -> Any:
        return torch.randint(low, high, tuple(shape)).to(dt)

    def call(self, kernel: Any, *inputs: Any) -> tuple[list[Any], list[Any]]:
        """(results, inputs after the call), on the CPU."""
        own = [x.to(self.device) if isinstance(x, torch.Tensor) else x for x in inputs]
        out = kernel(*own)
        results = list(out) if isinstance(out, (list, tuple)) else [] if out is None else [out]
        return [r.cpu() for r in results], [x.cpu() if isinstance(x, torch.Tensor) else x for x in own]

    def run(self, kernel: Any, inputs: Sequence[Any], expected: Any, rtol: float = 1e-3, atol: float = 1e-3,
            inplace: Mapping[int, Any] | None = None) -> None:
        """expected: the result or list of results, None when they are not compared; inplace: inputs after the call."""
        results, after = self.call(kernel, *inputs)
        if expected is not None:
            wanted = list(expected) if isinstance(expected, (list, tuple)) else [expected]
            assert len(results) == len(wanted)
            for i, (got, want) in enumerate(zip(results, wanted)):
                close(got, want, rtol, atol, f"result {i}")
        for i, want in (inplace or {}).items():
            close(after[i], want, rtol, atol, f"input {i}")


def close(got: Any, want: Any, rtol: float = 1e-3, atol: float = 1e-3, what: str = "result") -> None:
    """Same shape; floats within the tolerances (NaN equals NaN), all else equal and of the same type."""
    assert tuple(got.shape) == tuple(want.shape), what
    if want.is_floating_point():
        torch.testing.assert_close(got.double(), want.double(), rtol=rtol, atol=atol, equal_nan=True,
                                   msg=lambda m: f"{what}: {m}")
        return
    assert got.dtype == want.dtype, what
    bad = (got != want).nonzero()
    assert not len(bad), f"{what}: {len(bad)} differ, first at {bad[0].tolist()}"

