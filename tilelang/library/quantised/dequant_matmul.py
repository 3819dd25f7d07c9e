"""`coded_matmul`: products with weights of four bits in groups."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from tilelang.language.tracing.state import error

from ..aliasing import Disjoint
from ..arrays import facts, is_numpy, maker, place, strided, strides, type_name
from ..gemm.matmul import check_disjoint, check_gradient, check_tensors
from ..gemm.plan import Place
from .kernels import CodedForm, CodedTile, chosen, coded_product

_ELEMENTS = ("float16", "bfloat16")
_NAMES = ("a", "w", "scales", "zeros", "values", "out")
_MOST_PLANS = 4096
_SOON = 64  # rows up to which the launch is set up while the one before it ends: 0.7 to 0.9 us of 8 to 10


def coded_matmul(a: Any, w: Any, scales: Any, zeros: Any = None, *, values: Any = None, out: Any = None, target: Any = None,
                 execution_backend: str | None = None) -> Any:
    """a @ d.T for d[i, j] = (q - zeros[i, j // group]) * scales[i, j // group], or values[q] * scales[i, j // group].

    a: (m, k) float16 or bfloat16.  w: (n, k / 2) uint8: the numbers q of 0 to 15 of two neighbours of a row of d, the first in
    the low half.  scales: (n, k / group) of a's type.  zeros: the same of uint8; None: none.  values: (16,) of a's type, with
    which there are no zeros.  Result: (m, n) of a's type, in `out` if given, which has no memory in common with the others.

    Each element of d is rounded once; products are summed in float32.  The bits are the same for the same arguments.
    Tiles, and how many blocks share out k, come from a price that counts what decoding takes.
    Raises matmul-type, matmul-shape, matmul-device, matmul-option, matmul-gradient.

    >>> import numpy as np
    >>> w = np.array([[0x21, 0x43]], np.uint8)
    >>> coded_matmul(np.ones((1, 4), np.float16), w, np.array([[0.5, 2]], np.float16)).tolist()
    [[15.5]]
    """
    given = (a, w, scales, zeros, values, out)
    try:
        key = (facts(a), facts(w), facts(scales), None if zeros is None else facts(zeros),
               None if values is None else facts(values), None if out is None else facts(out),
               target if target is None else str(target), execution_backend)
    except AttributeError:
        check_tensors(given[:3], given[3:])
        raise
    plan = _PLANS.get(key)
    if plan is None:
        if len(_PLANS) >= _MOST_PLANS:
            _PLANS.clear()
        named = {name: x for name, x in zip(_NAMES, given) if x is not None}
        plan = _PLANS[key] = _plan(_check(named), named, Place.of(a, target, execution_backend))
    if not isinstance(a, np.ndarray):
        check_gradient("coded_matmul", *given)
    if out is None:
        out = plan.result()
    elif not plan.disjoint.surely(out, given[:-1]):
        check_disjoint(out, dict(zip(_NAMES[:-1], given)))
    if plan.kernel is None:
        return out
    second = zeros if values is None else values
    result = out if plan.direct else plan.result()
    sums = None if plan.sums is None else plan.sums()  # the kernel takes None for what it does not use
    if not plan.compact[-1]:
        a, w, scales, second = (x if ok else _compact(x) for x, ok in zip((a, w, scales, second), plan.compact))
    plan.kernel(a, w, scales, second, sums, result)
    if result is not out:
        out[...] = result
    return out


@dataclass
class _Plan:
    """What answers calls with arrays of one form.

    kernel: None where there is nothing to compute.  result, sums: make what it writes; None where it has no sums.
    compact: which arguments it takes as they lie, and whether all.  direct: whether it writes to `out` itself.  disjoint: of
    `out`, where one is given.
    """

    kernel: Any
    result: Callable[[], Any]
    sums: Callable[[], Any] | None
    compact: tuple[bool, ...]
    direct: bool
    disjoint: Any


_PLANS: dict[Any, _Plan] = {}


def _plan(sizes: tuple[int, int, int, int], given: dict[str, Any], at: Place) -> _Plan:
    """For arguments that were checked.  sizes: (m, n, k, group)."""
    m, n, k, group = sizes
    a, element = given["a"], type_name(given["a"])
    f = chosen(CodedForm(m, n, k, group, element, "values" in given, "zeros" in given, CodedTile(16, 64, 64, 2)), at.chip)
    kernel = _kernel(f, at) if m and n else None
    parts, second = f.tile.parts, given.get("values", given.get("zeros"))
    taken = [_lies_compact(given[x]) for x in ("a", "w", "scales")] + [second is None or _lies_compact(second)]
    sums = maker(a, (parts, m, n), "float32") if parts > 1 else None
    disjoint = Disjoint(given["out"], [given.get(name) for name in _NAMES[:-1]]) if "out" in given else None
    return _Plan(kernel, maker(a, (m, n), element), sums, (*taken, all(taken)),
                 "out" not in given or _lies_compact(given["out"]), disjoint)


@lru_cache(4096)
def _kernel(f: CodedForm, at: Place) -> Any:
    return at.compile(coded_product(f), soon=at.target.has_wgmma and f.m <= _SOON)


def _lies_compact(x: Any) -> bool:
    steps, shape = strides(x), tuple(int(n) for n in x.shape)
    return strided(x) and steps == ((shape[1], 1) if len(shape) == 2 else (1,))


def _compact(x: Any) -> Any:
    return np.array(x, order="C") if is_numpy(x) else x.clone(memory_format=sys.modules["torch"].contiguous_format)


def _check(given: dict[str, Any]) -> tuple[int, int, int, int]:
    """(m, n, k, group).  Raises matmul-type, matmul-shape, matmul-device."""
    a, w, scales = (given[x] for x in ("a", "w", "scales"))
    for name, x in given.items():
        if not hasattr(x, "shape") or not hasattr(x, "dtype"):
            raise error("matmul-type", f"`{name}` is no torch tensor or NumPy array, found {type(x).__name__}",
                        expected="torch tensors or NumPy arrays", found=type(x).__name__,
                        hint="pass torch.from_numpy(x) or np.asarray(x)")
        if place(x) != place(a):
            raise error("matmul-device", f"a is on {place(a)} and `{name}` on {place(x)}", expected="arrays on one device",
                        found=f"{place(a)} and {place(x)}", hint="move them to one device")
        wanted = _ELEMENTS if name == "a" else ("uint8",) if name in ("w", "zeros") else (type_name(a),)
        if type_name(x) not in wanted:
            raise error("matmul-type", f"`{name}` has elements of {type_name(x)}", expected=" or ".join(wanted),
                        found=type_name(x), hint="weights are pairs of numbers of four bits in a uint8; scales have a's type")
    if "values" in given and "zeros" in given:
        raise error("matmul-shape", "values of a table have no zeros", expected="zeros or values", found="both",
                    hint="subtract the zeros from the values")
    for name in ("a", "w", "scales"):
        if given[name].ndim != 2:
            raise error("matmul-shape", f"`{name}` has {given[name].ndim} dimensions", expected="2 dimensions",
                        found=str(tuple(given[name].shape)), hint="reshape it to (rows, columns)")
    (m, k), n, groups = (int(x) for x in a.shape), int(w.shape[0]), int(scales.shape[1])
    group = k // groups if groups else 0
    shapes = {"w": (n, k // 2), "scales": (n, groups), "zeros": (n, groups), "values": (16,), "out": (m, n)}
    for name, shape in shapes.items():
        x = given.get(name)
        if x is not None and tuple(x.shape) != shape:
            raise error("matmul-shape", f"`{name}` has shape {tuple(x.shape)}", expected=str(shape), found=str(tuple(x.shape)),
                        hint="w is (n, k / 2); scales and zeros are (n, k / group), values (16,)")
    if k % 2 or not group or groups * group != k:
        raise error("matmul-shape", f"{groups} groups do not divide {k} weights of a row into equal parts",
                    expected="an even k and equal groups", found=f"{k} and {groups}", hint="pad a and w with zeros")
    return m, n, k, group


__all__ = ["coded_matmul"]
