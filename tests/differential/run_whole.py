"""Runs a random whole-tensor program: its reference, NumPy in float64, the CPU and the simulator against its bounds."""

from __future__ import annotations

import sys
import time
import types
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from backends import AGREES, FAILED, Outcome, Result, judged, numpy_type
from whole_bounds import Interval, bounds, outside

EXECUTIONS = ("reference", "numpy", "cpu", "sm_90a")  # the last one in the simulator
REFUSALS = ("program-lowering",)  # what a program may be refused for; other errors are faults of the lowering


def whole_inputs(seed: int, rows: Sequence[Any], sizes: Mapping[str, int]) -> list[np.ndarray]:
    """Arrays for rows (name, shape, dtype, kind, high)."""
    return [
        _array(
            np.random.default_rng([seed, zlib.crc32(name.encode())]),
            tuple(_size(s, sizes) for s in shape),
            dt,
            kind,
            _size(high, sizes) if high else 0,
        )
        for name, shape, dt, kind, high in rows
    ]


def _size(text: str, sizes: Mapping[str, int]) -> int:
    return int(eval(text, {}, dict(sizes)))


def _array(rng: np.random.Generator, shape: tuple[int, ...], dt: str, kind: str, high: int) -> np.ndarray:
    t = numpy_type(dt)
    if dt == "bool":
        return rng.random(shape) < 0.6
    if kind == "full":
        return rng.integers(0, 256, shape).astype(np.uint8).view(t)
    if kind in ("index", "whole"):
        return rng.integers(*((0, high) if kind == "index" else (-5, 6)), shape).astype(t)
    x = rng.random(shape) if kind == "unit" else rng.standard_normal(shape)
    if kind == "special":
        x = np.where(rng.random(shape) < 0.15, rng.choice([np.nan, np.inf, -np.inf, 0.0, -0.0, 1e4], shape), x)
    return x.astype(np.float32).astype(t)


def run_module(module: Any, executions: Sequence[str] = EXECUTIONS) -> Result:
    """Every execution of a program's module, for all of its sizes."""
    from tilelang.errors import TileLangError
    from tilelang.program.api import Program, ProgramOptions

    result = Result()
    calls = [whole_inputs(module.SEED, module.INPUTS, sizes) for sizes in module.SIZES]
    plain = Program(module.program, ProgramOptions("cpu"), None)
    try:
        with np.errstate(all="ignore"):
            graphs = [plain.graph(*args) for args in calls]
            wanted = [bounds(g, args, {n: sizes[n] for n in g.dims}) for g, args, sizes in zip(graphs, calls, module.SIZES)]
    except Exception as e:  # whatever it raises is the result
        result.outcomes["trace"] = judged(e, False)
        return result
    for name in executions:
        begin, running = time.process_time(), False
        try:
            found = Outcome(AGREES)
            call = _callable(name, module, plain, graphs[0])
            for args, want in zip(calls, wanted):
                with np.errstate(all="ignore"):
                    got = call(*[a.copy() for a in args])
                running = True
                narrow = any(n.dtype.is_float and n.dtype.bits < 32 for n in graphs[0].nodes)
                found = _judge(args, got, want, 0.0 if name != "numpy" else 2.0**-5 if narrow else 1e-9)
                if found.status != AGREES:
                    break
            result.outcomes[name] = found
        except Exception as e:
            result.outcomes[name] = judged(e, running)
            if isinstance(e, TileLangError) and e.kind not in REFUSALS:
                result.outcomes[name].status = FAILED
        result.outcomes[name].seconds = time.process_time() - begin
    return result


def _callable(name: str, module: Any, plain: Any, graph: Any) -> Callable[..., Any]:
    from tilelang.program.api import Program, ProgramOptions

    if name == "reference":
        return plain.reference
    if name == "numpy":
        from whole_numpy import Functions, whole

        fn = types.FunctionType(module.program.__code__, {**vars(module), "T": Functions})
        types_of = [str(n.dtype) for n in graph.outputs]

        def eager(*args: np.ndarray) -> Any:
            out = fn(*(whole(np.asarray(a)) for a in args))
            return tuple(Functions.cast(y, dt) for y, dt in zip(out if isinstance(out, tuple) else (out,), types_of))

        return eager
    return plain if name == "cpu" else Program(module.program, ProgramOptions("simulator"), None)


def _judge(args: Sequence[np.ndarray], got: Any, want: Sequence[Interval], margin: float) -> Outcome:
    got = got if isinstance(got, tuple) else (got,)
    if len(got) != len(want):
        return Outcome(FAILED, "mismatch", f"{len(got)} results, expected {len(want)}")
    for k, (g, w) in enumerate(zip(got, want)):
        said = outside(np.asarray(g), w, margin)
        if not said and not margin and any(np.shares_memory(g, x) for x in (*args, *got[:k]) if isinstance(g, np.ndarray)):
            said = "it shares memory"
        if said:
            return Outcome(FAILED, "mismatch", f"result {k}: {said}")
    return Outcome(AGREES)


def main(module: Any) -> None:
    """What a program's file does when it is run: all executions, one line each."""
    names = sys.argv[1:] or EXECUTIONS
    result = run_module(module, names)
    for name, o in result.outcomes.items():
        print(f"{name:9} {o.status:8} {o.kind} {o.text}")
    sys.exit(bool(result.failed))
