"""Runs one program on all executions of this machine and compares every array with plain NumPy.

Outputs are handed in filled with a mark, so that what a program must not write is compared as well.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
from everywhere import device_of, on_gpu

import tilelang

F8 = ml_dtypes.float8_e4m3fn
BF = ml_dtypes.bfloat16
NP = {"float16": np.float16, "bfloat16": BF, "float32": np.float32, "float64": np.float64, "int8": np.int8, "int32": np.int32,
      "uint8": np.uint8, "int64": np.int64, "int16": np.int16, "float8_e4m3fn": F8, "float8_e5m2": ml_dtypes.float8_e5m2,
      "bool": np.bool_}  # types by the names of the language
SIM = {"kind": "cuda", "arch": "sm_80"}
EXECUTIONS: dict[str, tuple[Any, str | None]] = {"tile": ("cpu", "tile"), "simulator": (SIM, "simulator"), "cpu": ("cpu", None)}
RUNS = EXECUTIONS | {"hopper": ({"kind": "cuda", "arch": "sm_90a"}, "simulator")}


def mark(shape: Any, dtype: Any) -> np.ndarray:
    """An array no program writes by accident."""
    return np.full(shape, True if dtype is bool else 77, dtype)


def drawn(rng: np.random.Generator) -> Callable[..., np.ndarray]:
    """data(shape, dtype="float32", low=-9, high=9): arrays of numbers from rng, normal ones for floats."""
    def data(shape: Any, dtype: Any = "float32", low: int = -9, high: int = 9) -> np.ndarray:
        dt = np.dtype(NP.get(dtype, dtype))
        if dt == np.bool_:
            return rng.random(shape) < 0.5
        if dt.kind in "iu":
            return rng.integers(max(low, 0) if dt.kind == "u" else low, high, shape).astype(dt)
        return rng.standard_normal(shape).astype(np.float32).astype(dt)

    return data


def run(f: Any, args: list[Any], execution: str) -> list[Any]:
    """Copies of args after the call."""
    target, backend = RUNS[execution]
    device = device_of(backend)
    if device == "gpu":
        back = iter(on_gpu(f, *args))
        return [next(back) if isinstance(a, np.ndarray) else a for a in args]
    if device == "text":
        tilelang.compile(f, target=target)
    kernel = tilelang.compile(f, target=target, execution_backend=backend)
    own = [a.copy() if isinstance(a, np.ndarray) else a for a in args]
    kernel(*own)
    return own


def difference(got: np.ndarray, want: np.ndarray, tol: float) -> str:
    """Empty, or where and how the arrays differ (NaN equals NaN)."""
    want = np.asarray(want)
    if got.shape != want.shape:
        return f"shape {got.shape}, expected {want.shape}"
    g, w = (x.astype(np.float64) if x.dtype.kind not in "iub" else x.astype(object) for x in (got, want))
    if g.dtype == object:
        bad = g != w
    else:
        with np.errstate(invalid="ignore"):
            bad = ~((np.abs(g - w) <= tol * np.maximum(1.0, np.abs(w))) | (g == w) | (np.isnan(g) & np.isnan(w)))
    if not bad.any():
        return ""
    at = tuple(int(x) for x in np.argwhere(bad)[0])
    return f"{int(bad.sum())} of {bad.size} differ, first at {at}: got {got[at]}, expected {want[at]}"


def agree(f: Any, args: list[Any], want: dict[int, Any], tol: float = 0.0, on: tuple[str, ...] = tuple(EXECUTIONS)) -> None:
    """Every array after the call equals want[position], or what was passed; on every execution."""
    said = []
    for execution in on:
        try:
            got = run(f, args, execution)
        except Exception as e:  # all executions are reported together
            said.append(f"{execution}: {type(e).__name__}: {e}")
            continue
        for i, a in enumerate(args):
            if isinstance(a, np.ndarray):
                d = difference(got[i], want.get(i, a), tol)
                if d:
                    said.append(f"{execution}: argument {i}: {d}")
    assert not said, "\n" + "\n".join(said)


def refused(build: Any, match: str | None, error: type[Exception] = Exception, on: tuple[str, ...] = tuple(EXECUTIONS)) -> None:
    """Tracing or compiling is refused on every execution, with this in the text."""
    import pytest

    for execution in on:
        target, backend = EXECUTIONS[execution]
        with pytest.raises(error, match=match):
            tilelang.compile(build(), target=target, execution_backend=backend)
