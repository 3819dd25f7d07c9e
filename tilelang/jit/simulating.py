"""A program on the device simulator, compared with the reference interpreter."""

from __future__ import annotations

import warnings
from typing import Any

import ml_dtypes
import numpy as np

from tilelang.ir import GLOBAL, Cast, Const, For, Func, Load, Store, dtype, free_vars, inner, numpy_dtype, walk
from tilelang.ops import Copy, Gemm, Reduce
from tilelang.target import of_arch
from tilelang.transform.analysis.effects import effects
from tilelang.transform.pipeline import lower


def random_arguments(func: Func, seed: int = 0, symbol: int = 100) -> list[Any]:
    """One random argument for each parameter: standard normal or small integers.  Symbolic dimensions become `symbol`."""
    rng = np.random.default_rng(seed)
    out: list[Any] = []
    for p in func.params:
        b = func.buffer_of(p)
        if b is None:
            out.append(symbol if p.dtype.is_int else 1.0)
            continue
        shape = tuple(d if isinstance(d, int) else symbol for d in b.shape)
        if b.dtype.is_float:
            out.append(rng.standard_normal(shape).astype(np.float32).astype(numpy_dtype(b.dtype)))
        else:
            out.append(rng.integers(0, 2 if b.dtype.is_bool else 8, shape).astype(numpy_dtype(b.dtype)))
    return out


def simulate_program(program: Any, arch: str = "sm_80", seed: int = 0) -> tuple[bool, str]:
    """Run the lowered program on the device simulator and compare with the reference interpreter.

    Returns whether all written tensors agree within a bound, and the report: verdict, tensors, counts.  The bound allows for
    sums in another order (float32 rounding, the square root of their length) and for rounding to the narrowest type that
    values are converted to.
    """
    from tilelang.simulator.device.run import run_device  # 100 ms
    from tilelang.simulator.reference.run import run_tile  # 99 ms

    func: Func = program if isinstance(program, Func) else program.func
    values = dict(zip([p.name for p in func.params], random_arguments(func, seed)))
    written, made = _outputs_of(func)
    given = {k: v for k, v in values.items() if k not in made}
    lowered = lower(func, of_arch(arch))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        want = run_tile(func, given)
        report = run_device(lowered.host, given)
    length, narrow = _longest_sum(func), _narrowest(func)
    largest = max((float(np.abs(v.astype(np.float64)).max(initial=0.0)) for v in values.values()
                   if isinstance(v, np.ndarray)), default=1.0)
    ok, lines = True, []
    for name in written:
        a, b = report.outputs[name].astype(np.float64), want[name].astype(np.float64)
        dt = next(x.dtype for _, x in func.buffers if x.name == name)
        with np.errstate(invalid="ignore"):
            err = float(np.max(np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0.0, np.abs(a - b)), initial=0.0))
        top = float(np.max(np.where(np.isfinite(b), np.abs(b), 0.0), initial=0.0))
        eps = max(_rounding(dt) if dt.is_float else 0.0, narrow)
        bound = 2 * eps * top + 4 * 2.0**-24 * length**0.5 * max(top, largest * largest) if dt.is_float else 0.0
        ok = ok and err <= bound
        terms = f"sums of {length} terms" if length > 1 else "no sums"
        lines.append(f"  {name}: largest difference from the reference interpreter {err:.3g}, bound {bound:.3g} "
                     f"({dt}, {terms}): {'ok' if err <= bound else 'FAIL'}")
    notes = sorted({str(w.message).partition(": ")[2].partition(";")[0] for w in told if "unwritten-output" in str(w.message)})
    return ok, "\n".join([f"{func.name} on the simulated {arch}: {'ok' if ok else 'FAIL'}", *lines,
                          *(f"  note: {n}" for n in notes), report.text()])


def _outputs_of(func: Func) -> tuple[list[str], set[str]]:
    """(tensor parameters that a program writes, those of them that it does not read and whose shapes the others tell)."""
    seen = [e for e in effects(func.body) if e.buffer.scope_name == GLOBAL]
    writes, reads = ({e.storage for e in seen if e.writes}, {e.storage for e in seen if e.reads})
    tensors = [(p.name, b) for p, b in func.buffers]
    kept = [b for _, b in tensors if b.data not in writes or b.data in reads]
    bound = {v for b in kept for d in b.shape if not isinstance(d, int) for v in free_vars(d)} | set(func.params)
    made = {name for name, b in tensors if b not in kept and all(
        isinstance(d, int) or set(free_vars(d)) <= bound for d in (*b.shape, *(b.strides_ or ())))}
    return [b.name for _, b in tensors if b.data in writes], made


def _longest_sum(func: Func) -> int:
    """The most terms that one element of a program sums: the inner extents of T.gemm and reductions times their loops."""
    def longest(s: Any, times: int) -> int:
        if isinstance(s, For):
            times *= int(s.extent.value) if isinstance(s.extent, Const) else 100
        inner_extent = 1
        if isinstance(s, Gemm):
            inner_extent = s.a.extents[-1 if not s.transpose_a else -2]
        elif isinstance(s, Reduce):
            inner_extent = s.src.extents[s.dim]
        elif isinstance(s, Store) and any(x.buffer is s.buffer for x in walk(s.value, Load)):
            return times
        count = int(inner_extent.value) if isinstance(inner_extent, Const) else inner_extent
        here = times * count if isinstance(count, int) and count > 1 else 1
        return max([here, *(longest(x, times) for x in inner(s))])

    return longest(func.body, 1)


def _narrowest(func: Func) -> float:
    """The largest relative rounding error of the float types that a program converts wider values to; 0 without one."""
    made = [n.dtype for n in walk(func.body, Cast) if n.dtype.is_float and n.value.dtype.is_float and n.dtype.bits <
            n.value.dtype.bits]
    made += [n.dst.dtype for n in walk(func.body, Copy) if n.dst.dtype.is_float and n.dst.dtype.bits < n.src.dtype.bits]
    return max((_rounding(dt) for dt in made), default=0.0)


def _rounding(dt: dtype) -> float:
    """The relative error of one rounding to a float type."""
    return float(ml_dtypes.finfo(numpy_dtype(dt)).eps) / 2
