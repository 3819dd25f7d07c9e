"""DequantProblem: a checked call of dequant_matmul."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tilelang.language.tracing.state import error

from ..arrays import place, type_name

_ELEMENTS = ("float16", "bfloat16")


@dataclass(frozen=True)
class DequantProblem:
    """A call of dequant_matmul: m x k by the n x k weights, with one scale for `group` weights of a row.

    element: type of a, the scales and the result. lut: the weights are indices of a look-up table. zero_points: whether there
    are zero points.
    """

    m: int
    n: int
    k: int
    group: int
    element: str
    lut: bool
    zero_points: bool


def dequant_problem(given: Mapping[str, Any]) -> DequantProblem:
    """The problem of a call.

    given: a, w, scales and, where given, zero_points, lut, out. Raises matmul-type, matmul-shape, matmul-device.
    """
    a, w, scales = (given[x] for x in ("a", "w", "scales"))
    for name, x in given.items():
        if not hasattr(x, "shape") or not hasattr(x, "dtype"):
            raise error("matmul-type", f"`{name}` is no torch tensor or NumPy array, found {type(x).__name__}",
                        expected="torch tensors or NumPy arrays", hint="pass torch.from_numpy(x) or np.asarray(x)")
        if place(x) != place(a):
            raise error("matmul-device", f"a is on {place(a)} and `{name}` on {place(x)}", expected="arrays on one device",
                        found=f"{place(a)} and {place(x)}", hint="move them to one device")
        wanted = _ELEMENTS if name == "a" else ("uint8",) if name in ("w", "zero_points") else (type_name(a),)
        if type_name(x) not in wanted:
            raise error("matmul-type", f"`{name}` has elements of {type_name(x)}", expected=" or ".join(wanted),
                        found=type_name(x), hint="weights are pairs of numbers of four bits in a uint8; scales have a's type")
    if "lut" in given and "zero_points" in given:
        raise error("matmul-shape", "a look-up table has no zero points", expected="zero_points or lut", found="both",
                    hint="subtract the zero points from the table's values")
    for name in ("a", "w", "scales"):
        if given[name].ndim != 2:
            raise error("matmul-shape", f"`{name}` has {given[name].ndim} dimensions", expected="2 dimensions",
                        found=str(tuple(given[name].shape)), hint="reshape it to (rows, columns)")
    (m, k), n, groups = (int(x) for x in a.shape), int(w.shape[0]), int(scales.shape[1])
    group = k // groups if groups else 0
    shapes = {"w": (n, k // 2), "scales": (n, groups), "zero_points": (n, groups), "lut": (16,), "out": (m, n)}
    for name, shape in shapes.items():
        x = given.get(name)
        if x is not None and tuple(x.shape) != shape:
            raise error("matmul-shape", f"`{name}` has shape {tuple(x.shape)}", expected=str(shape), found=str(tuple(x.shape)),
                        hint="w is (n, k / 2); scales and zero_points are (n, k / group), lut (16,)")
    if k % 2 or not group or groups * group != k:
        raise error("matmul-shape", f"{groups} groups do not divide {k} weights of a row into equal parts",
                    expected="an even k and equal groups", found=f"{k} and {groups}", hint="pad a and w with zeros")
    return DequantProblem(m, n, k, group, type_name(a), "lut" in given, "zero_points" in given)
