"""`dequant_matmul`: GEMM with quantised weights of four bits in groups."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..aliasing import Disjoint
from ..arrays import facts, is_numpy, maker, strided, strides
from ..caches import Cache
from ..gemm.build import Place
from ..gemm.problem import check_disjoint, check_gradient, check_tensors
from .form import DequantForm
from .kernels import dequant_gemm
from .plan import plan_dequant
from .problem import DequantProblem, dequant_problem

_NAMES = ("a", "w", "scales", "zero_points", "lut", "out")
_PDL = 64  # rows up to which the launch uses PDL, which saves 0.7 to 0.9 us of 8 to 10


def dequant_matmul(a: Any, w: Any, scales: Any, zero_points: Any = None, *, lut: Any = None, out: Any = None,
                   target: Any = None, execution_backend: str | None = None) -> Any:
    """a @ d.T for d[i, j] = (q - zero_points[i, j // group]) * scales[i, j // group], or lut[q] * scales[i, j // group].

    a: (m, k) float16 or bfloat16. w: (n, k / 2) uint8; each byte holds the 4-bit numbers q of two neighbours in a row of d, the
    first in the low half. scales: (n, k / group) of a's type. zero_points: (n, k / group) uint8, or None for zeros. lut: (16,)
    of a's type, a look-up table; it excludes zero_points. Result: (m, n) of a's type, in `out` if given. `out` must be disjoint
    from the other tensors.

    Each element of d is rounded once, and sums are accumulated in float32. Equal arguments give equal bits. A cost model, which
    includes the time of dequantisation, chooses the tile and the number of blocks that split k. Raises matmul-type,
    matmul-shape, matmul-device, matmul-option, matmul-gradient.

    >>> import numpy as np
    >>> w = np.array([[0x21, 0x43]], np.uint8)
    >>> dequant_matmul(np.ones((1, 4), np.float16), w, np.array([[0.5, 2]], np.float16)).tolist()
    [[15.5]]
    """
    given = (a, w, scales, zero_points, lut, out)
    try:
        key = (facts(a), facts(w), facts(scales), None if zero_points is None else facts(zero_points),
               None if lut is None else facts(lut), None if out is None else facts(out),
               target if target is None else str(target), execution_backend)
    except AttributeError:
        check_tensors(given[:3], given[3:])
        raise
    plan = _PLANS.get(key)
    if plan is None:
        named = {name: x for name, x in zip(_NAMES, given) if x is not None}
        plan = _PLANS.keep(key, _planned(dequant_problem(named), named, Place.of(a, target, execution_backend)))
    if not isinstance(a, np.ndarray):
        check_gradient("dequant_matmul", *given)
    if out is None:
        out = plan.result()
    elif not plan.disjoint.surely(out, given[:-1]):
        check_disjoint(out, dict(zip(_NAMES[:-1], given)))
    if plan.kernel is None:
        return out
    second = zero_points if lut is None else lut
    result = out if plan.direct else plan.result()
    partials = None if plan.partials is None else plan.partials()  # the kernel takes None for an argument that it does not use
    if not plan.compact[-1]:
        a, w, scales, second = (x if ok else _compact(x) for x, ok in zip((a, w, scales, second), plan.compact))
    plan.kernel(a, w, scales, second, partials, result)
    if result is not out:
        out[...] = result
    return out


def coded_matmul(a: Any, w: Any, scales: Any, zeros: Any = None, *, values: Any = None, **options: Any) -> Any:
    """Deprecated name of dequant_matmul(a, w, scales, zero_points, lut=…). Warns with DeprecationWarning.

    The arguments `zeros` and `values` are dequant_matmul's `zero_points` and `lut`. Shapes, types and errors are the same.
    """
    warnings.warn("coded_matmul is deprecated, use dequant_matmul; its zeros are zero_points there, values are lut",
                  DeprecationWarning, stacklevel=2)
    return dequant_matmul(a, w, scales, zeros, lut=values, **options)


@dataclass
class _Planned:
    """The prepared answer to calls with arrays of one form.

    kernel: None where there is nothing to compute. result, partials: allocate what the kernel writes; partials is None where k
    is not split. compact: which arguments the kernel can read as they are stored, and whether it can read all. direct: whether
    it writes to `out` itself. disjoint: the test of `out` against the other tensors, where `out` is given.
    """

    kernel: Any
    result: Callable[[], Any]
    partials: Callable[[], Any] | None
    compact: tuple[bool, ...]
    direct: bool
    disjoint: Any


_PLANS: Cache[_Planned] = Cache(4096)
_KERNELS: Cache[Any] = Cache(4096)


def _planned(p: DequantProblem, given: dict[str, Any], at: Place) -> _Planned:
    """The prepared answer for arguments that were checked."""
    a, f = given["a"], plan_dequant(p, at.chip)
    kernel = _kernel(f, at) if p.m and p.n else None
    splits, second = f.tile.splits, given.get("lut", given.get("zero_points"))
    taken = [_is_compact(given[x]) for x in ("a", "w", "scales")] + [second is None or _is_compact(second)]
    partials = maker(a, (splits, p.m, p.n), "float32") if splits > 1 else None
    disjoint = Disjoint(given["out"], [given.get(name) for name in _NAMES[:-1]]) if "out" in given else None
    return _Planned(kernel, maker(a, (p.m, p.n), p.element), partials, (*taken, all(taken)),
                    "out" not in given or _is_compact(given["out"]), disjoint)


def _kernel(f: DequantForm, at: Place) -> Any:
    return _KERNELS.made((f, at), lambda: at.compile(dequant_gemm(f), pdl=at.target.has_wgmma and f.m <= _PDL))


def _is_compact(x: Any) -> bool:
    steps, shape = strides(x), tuple(int(n) for n in x.shape)
    return strided(x) and steps == ((shape[1], 1) if len(shape) == 2 else (1,))


def _compact(x: Any) -> Any:
    return np.array(x, order="C") if is_numpy(x) else x.clone(memory_format=sys.modules["torch"].contiguous_format)
