"""Runs a program on every execution and says how it ended.

Executions: "tile" (the meaning), "sm_80" and "sm_90a" (lowered, in the device simulator), "gfx90a", "gfx942" and "gfx950" (the
same for waves of 64 lanes, in generated programs judged by the meaning for such waves), "cpu", "cuda" (on a device); "cubin"
runs nothing: the CUDA source must compile.  The first is the judge of the others; all tensors are compared after the call, also
those a program must not write.
"""

from __future__ import annotations

import importlib.util
import os
import pathlib
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np

NARROW = ("int4", "uint4", "float4_e2m1fn")
SIMULATED = ("sm_80", "sm_90a")
WAVES = ("gfx942", "gfx90a", "gfx950")
HERE = ("tile", *SIMULATED, "cpu", "gfx942")

AGREES, REFUSED, FAILED, INVALID = "agrees", "refused", "failed", "invalid"


@dataclass
class Outcome:
    """How one execution ended.

    status: "agrees"; "refused" by a named error; "failed": it disagrees, or raises what no program should.
    kind: the error's kind, or "mismatch" or the exception's type.  text: one line.
    """

    status: str
    kind: str = ""
    text: str = ""
    seconds: float = 0.0

    @property
    def same(self) -> tuple[str, str]:
        """What must stay the same while a failing program is cut down."""
        return self.status, self.kind


@dataclass
class Result:
    """The outcomes of a program by execution; `trace` stands for what happens before any of them."""

    outcomes: dict[str, Outcome] = field(default_factory=dict)

    @property
    def failed(self) -> list[str]:
        return [k for k, o in self.outcomes.items() if o.status == FAILED]

    def plain(self) -> dict[str, Any]:
        return {k: {"status": o.status, "kind": o.kind, "text": o.text, "seconds": round(o.seconds, 4)}
                for k, o in self.outcomes.items()}


def numpy_type(name: str) -> Any:
    return np.dtype(getattr(ml_dtypes, name)) if hasattr(ml_dtypes, name) else np.dtype(name)


def inputs(seed: int, tensors: Sequence[Any]) -> list[np.ndarray]:
    """Arrays for rows (name, shape, dtype, low, high[, more]): small integers.

    more: "strides" in elements (the array is a window on storage of its own), "normal": numbers of a normal distribution
    within low .. high, "tol": how far results may be from the meaning, "nibbles": what the four-bit digits of each element
    are, "full": any numbers of the type, "scalar": no tensor but a number, "pointer": the call is given the address.  Types of
    four bits are packed, two a byte.
    """
    rng = np.random.default_rng(seed)
    out = []
    for _, shape, dt, low, high, *rest in tensors:
        more = rest[0] if rest else {}
        if more.get("nibbles"):
            codes = rng.choice(np.array(more["nibbles"], np.uint32), (*shape, np.dtype(dt).itemsize * 2))
            word = sum(codes[..., k] << np.uint32(4 * k) for k in range(codes.shape[-1]))
            out.append(word.astype(f"u{np.dtype(dt).itemsize}").view(dt))
            continue
        if dt in NARROW:
            v = rng.integers(low, high + 1, shape)
            v = _fp4(v) if dt[0] == "f" else v.astype(np.uint8) & 15
            out.append((v[..., 0::2] | v[..., 1::2] << 4).view(np.int8))
            continue
        if more.get("full"):
            out.append(_of_whole_range(rng, shape, numpy_type(dt)))
            continue
        values: Any = rng.integers(low, high + 1, shape)
        if more.get("normal"):
            values = np.clip(rng.standard_normal(shape), low, high)
        out.append(laid_out(values.astype(np.float64 if dt.startswith(("f", "b")) else np.int64).astype(numpy_type(dt)),
                            more.get("strides")))
    return out


def _of_whole_range(rng: np.random.Generator, shape: Sequence[int], dt: np.dtype) -> np.ndarray:
    """Any numbers of a type, every third one that arithmetic treats in its own way."""
    some = rng.integers(0, 256, (*shape, dt.itemsize), np.uint8).view(dt).reshape(shape)
    if dt.kind in "iu":
        i = np.iinfo(dt)
        edges = [0, 1, 2, i.max, i.max - 1, i.max // 2 + 1, i.min, i.min + 1, *([-1, -2] if i.min else [])]
    else:
        f = ml_dtypes.finfo(dt)
        edges = [0.0, -0.0, 1.0, -1.0, 0.5, 2.5, -3.5, float(f.max), float(f.min), float(f.smallest_normal),
                 float(f.smallest_subnormal), np.nan, 127.5, -129.0, *([np.inf, -np.inf] if dt.name != "float8_e4m3fn" else [])]
    with np.errstate(all="ignore"):
        return np.where(rng.random(shape) < 0.35, rng.choice(np.array(edges, dt), shape), some).astype(dt)


def _fp4(v: np.ndarray) -> np.ndarray:
    """Codes of float4_e2m1fn for whole numbers of -6 .. 6; 5 becomes 4."""
    size = np.abs(v)
    return (np.array([0, 2, 4, 5, 6, 6, 7], np.uint8)[size] | (v < 0) << 3).astype(np.uint8)


def laid_out(a: np.ndarray, strides: Sequence[int] | None) -> np.ndarray:
    """a with these strides (elements), a window on zeros."""
    if strides is None or a.size == 0:
        return a
    flat = np.zeros(1 + sum((n - 1) * s for n, s in zip(a.shape, strides)), a.dtype)
    window = np.ndarray(a.shape, a.dtype, flat, 0, tuple(s * a.itemsize for s in strides))
    window[...] = a
    return window


def own_copy(a: np.ndarray) -> np.ndarray:
    """A copy with the same strides, a window on zeros where a is one."""
    return a.copy() if a.flags.c_contiguous else laid_out(a, [s // a.itemsize for s in a.strides])


def between_rows(a: np.ndarray) -> bool:
    """Whether something stands in the storage that a window leaves out."""
    if a.base is None or a.flags.c_contiguous:
        return False
    flat = np.array(a.base)
    np.ndarray(a.shape, a.dtype, flat, 0, a.strides)[...] = np.zeros((), a.dtype)
    return bool((flat != np.zeros((), a.dtype)).any())


def load(path: pathlib.Path) -> Any:
    """The module of a program's file."""
    spec = importlib.util.spec_from_file_location(f"generated_{path.stem}_{time.monotonic_ns()}", path)
    assert spec is not None and spec.loader is not None
    sys.dont_write_bytecode = True
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def difference(got: np.ndarray, want: np.ndarray, tol: float = 0.0) -> str:
    """Empty, or where two arrays differ by more than tol; NaN equals NaN, zeros of both signs are equal."""
    g, w = (x.astype(np.float64) if x.dtype.kind not in "iub" else x for x in (got, want))
    if got.dtype != want.dtype and got.dtype.itemsize == want.dtype.itemsize == 1:  # packed values
        g, w = got.view(np.uint8), want.view(np.uint8)
    bad = ~((g == w) | ((g != g) & (w != w)))
    if tol:
        with np.errstate(invalid="ignore"):
            bad &= ~(np.abs(g - w) <= tol)
    if not bad.any():
        return ""
    at = tuple(int(x) for x in np.argwhere(bad)[0])
    return f"{int(bad.sum())} of {bad.size} differ, first at {at}: {got[at]}, meaning {want[at]}"


def compare(tensors: Sequence[Any], got: Sequence[np.ndarray], want: Sequence[np.ndarray]) -> Outcome:
    for t, g, w in zip(tensors, got, want):
        said = difference(np.asarray(g), w, t[5].get("tol", 0.0) if len(t) > 5 else 0.0)
        if not said and between_rows(np.asarray(g)):
            said = "written between the elements of a strided tensor"
        if said:
            return Outcome(FAILED, "mismatch", f"{t[0]}: {said}")
    return Outcome(AGREES)


def judged(error: BaseException, running: bool) -> Outcome:
    """The outcome an exception stands for.  running: the program was compiled, so nothing may be refused any more."""
    from tilelang.errors import TileLangError

    line = (str(error).splitlines() or [""])[0][:300]
    if isinstance(error, TileLangError):
        found = error.kind.startswith(("sim-", "eval-")) and error.kind not in ("sim-unsupported",)
        return Outcome(FAILED if found or running else REFUSED, error.kind, line)
    where = traceback.extract_tb(error.__traceback__)[-1]
    return Outcome(FAILED, type(error).__name__, f"{line} ({os.path.basename(where.filename)}:{where.lineno})")


def run(path: pathlib.Path, executions: Sequence[str] = HERE) -> Result:
    """Every execution of a program's file."""
    result = Result()
    try:
        module = load(path)
    except Exception as e:  # whatever it raises is the result
        result.outcomes["trace"] = judged(e, False)
        return result
    if hasattr(module, "SIZES"):
        from run_whole import run_module

        return run_module(module, executions)
    return run_func(module.program.func, module.program, module.SEED, module.TENSORS, module.CONFIGS, executions)


def run_func(func: Any, prim: Any, seed: int, tensors: Sequence[Any], configs: dict[str, Any],
             executions: Sequence[str] = HERE) -> Result:
    """Every execution of a traced program."""
    result = Result()
    args = inputs(seed, tensors)
    begin = time.process_time()
    try:
        want = _execute("tile", func, prim, args, tensors, configs, [False])
        result.outcomes["tile"] = Outcome(AGREES)
    except Exception as e:
        # A fault found while the meaning runs is the generator's, or the oracle's.
        result.outcomes["tile"] = judged(e, False)
        return result
    finally:
        if "tile" in result.outcomes:
            result.outcomes["tile"].seconds = time.process_time() - begin
    for name in executions:
        if name == "tile":
            continue
        begin, running = time.process_time(), [False]
        try:
            want = _meaning(func, args, tensors, _hip(name)) if name in (*WAVES, "hip") else want
            got = _execute(name, func, prim, args, tensors, configs, running)
            result.outcomes[name] = compare(tensors, got, want)
        except Exception as e:
            result.outcomes[name] = judged(e, running[0])
        result.outcomes[name].seconds = time.process_time() - begin
    return result


def _execute(name: str, func: Any, prim: Any, args: list[np.ndarray], tensors: Sequence[Any], configs: dict[str, Any],
             running: list[bool]) -> list[np.ndarray]:
    if name == "tile":
        from tilelang.errors import TileLangError
        from tilelang.target import Target

        try:
            return _meaning(func, args, tensors, Target("cpu"))
        except TileLangError as e:
            if e.kind != "needs-arch":
                raise
            return _meaning(func, args, tensors, Target({"kind": "cuda", "arch": "sm_90a"}))
    if name == "cubin":
        from tilelang.codegen.cuda.printer import print_kernel
        from tilelang.runtime.nvrtc import compile_cubin
        from tilelang.target import Target
        from tilelang.transform.pipeline import lower

        lowered = lower(func, Target({"kind": "cuda", "arch": "sm_90a"}), configs)
        running[0] = True
        for kernel in lowered.kernels:
            compile_cubin(print_kernel(kernel), "sm_90a")
        return []
    if name in (*SIMULATED, *WAVES):
        from tilelang.simulator import run_device
        from tilelang.target import Target
        from tilelang.transform.pipeline import lower

        program = lower(func, _hip(name) if name in WAVES else Target({"kind": "cuda", "arch": name}), configs)
        running[0] = True
        own, passed = _packed(args, tensors)
        return _left(run_device(program, passed).outputs, own, tensors)
    import tilelang

    kernel = tilelang.compile(prim, target=name, pass_configs=configs or None)
    running[0] = True
    own = [own_copy(a) for a in args]
    if name == "cpu":
        kernel(*(_number(a, t) for a, t in zip(own, tensors)))
        return own
    import torch

    moved = [_to_device(a, torch) if not _said(t, "scalar") else a for a, t in zip(own, tensors)]
    kernel(*(_number(m, t) for m, t in zip(moved, tensors)))
    torch.cuda.synchronize()
    return [_from_device(m, a.dtype) if not _said(t, "scalar") else a for m, a, t in zip(moved, own, tensors)]


def _hip(chip: str) -> Any:
    from tilelang.target import Target

    return Target(chip)


def _meaning(func: Any, args: list[np.ndarray], tensors: Sequence[Any], target: Any) -> list[np.ndarray]:
    """What the program leaves in its tensors by the reference interpreter, with the warps of a target."""
    from tilelang.simulator import run_tile
    from tilelang.transform.pipeline import legalized

    own, passed = _packed(args, tensors)
    return _left(run_tile(legalized(func, target), passed), own, tensors)


def _said(t: Sequence[Any], what: str) -> bool:
    return len(t) > 5 and bool(t[5].get(what))


def _number(a: Any, t: Sequence[Any]) -> Any:
    return int(a) if _said(t, "scalar") else a


def _packed(args: Sequence[np.ndarray], tensors: Sequence[Any]) -> tuple[list[np.ndarray], list[Any]]:
    """Arrays as the lowered program sees them, types of four bits as bytes, and what stands for them in the call."""
    own = [own_copy(a) if _said(t, "pointer") else a.view(np.uint8) if t[2:3] and t[2] in NARROW else a
           for a, t in zip(args, tensors)]
    return own, [a.ctypes.data if _said(t, "pointer") else _number(a, t) for a, t in zip(own, tensors)]


def _left(outputs: dict[str, Any], own: Sequence[np.ndarray], tensors: Sequence[Any]) -> list[np.ndarray]:
    """The arrays after the call: what is handed over as a number or address is no output of the simulators."""
    return [a if _said(t, "scalar") or _said(t, "pointer") else np.asarray(outputs[t[0]]) for a, t in zip(own, tensors)]


_BITS = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}


def _to_device(a: np.ndarray, torch: Any) -> Any:
    """A tensor of the same bits on the device."""
    names = {"bfloat16": torch.bfloat16, "float8_e4m3fn": torch.float8_e4m3fn, "float8_e5m2": torch.float8_e5m2,
             **{x: getattr(torch, x, None) for x in ("uint16", "uint32", "uint64")}}
    dt = names.get(a.dtype.name)
    if a.base is not None and not a.flags.c_contiguous:
        flat = _to_device(np.asarray(a.base), torch)
        return torch.as_strided(flat, a.shape, [s // a.itemsize for s in a.strides])
    if dt is None:
        return torch.from_numpy(np.ascontiguousarray(a)).cuda()
    return torch.from_numpy(np.ascontiguousarray(a).view(_BITS[a.dtype.itemsize])).cuda().view(dt)


def _from_device(x: Any, dt: np.dtype) -> np.ndarray:
    import torch

    bits = getattr(torch, _BITS[dt.itemsize])
    if not x.is_contiguous():
        whole = _from_device(x.as_strided((x.untyped_storage().nbytes() // dt.itemsize,), (1,), 0), dt)
        return np.ndarray(tuple(x.shape), dt, whole, 0, tuple(s * dt.itemsize for s in x.stride()))
    return x.view(bits).cpu().numpy().view(dt)


def disagreements(prim: Any, args: list[np.ndarray], want: list[np.ndarray],
                  executions: Sequence[str] = HERE) -> dict[str, str]:
    """What every execution of a program says against the arrays expected after the call; empty when all agree."""
    tensors = [(b.name, b.shape) for b in prim.buffer_map.values()]
    said = {}
    for name in executions:
        try:
            o = compare(tensors, _execute(name, prim.func, prim, args, tensors, {}, [False]), want)
        except Exception as e:  # all are reported together
            o = judged(e, True)
        if o.status != AGREES:
            said[name] = f"{o.kind} {o.text}"
    return said


def agree(prim: Any, args: list[np.ndarray], want: dict[int, np.ndarray], on: Sequence[str] = HERE) -> None:
    """Every execution leaves want[i] in argument i, and the others as they were."""
    said = disagreements(prim, args, [want.get(i, a) for i, a in enumerate(args)], on)
    assert not said, said


def main(func: Any, seed: int, tensors: Sequence[Any], configs: dict[str, Any]) -> None:
    """What a program's file does when it is run: all executions, one line each."""
    names = sys.argv[1:] or HERE
    module = sys.modules["__main__"]
    result = run_func(func, module.program, seed, tensors, configs, names)
    for name, o in result.outcomes.items():
        print(f"{name:8} {o.status:8} {o.kind} {o.text}")
    sys.exit(bool(result.failed))
