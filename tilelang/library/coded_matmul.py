"""`coded_matmul`: products with weights of four bits in groups."""

from __future__ import annotations

from functools import lru_cache
from importlib import import_module
from typing import Any

from tilelang.language.state import error

from .arrays import empty, is_numpy, maker, overlap, place, strides, type_name
from .coded_kernels import CodedForm, CodedTile, chosen, coded_product
from .matmul_plan import Place

import_module("tilelang.library.matmul")  # registers the kinds of errors

_ELEMENTS = ("float16", "bfloat16")


def coded_matmul(a: Any, w: Any, scales: Any, zeros: Any = None, *, values: Any = None, out: Any = None, target: Any = None,
                 execution_backend: str | None = None) -> Any:
    """a @ d.T for d[i, j] = (q - zeros[i, j // group]) * scales[i, j // group], or values[q] * scales[i, j // group].

    a: (m, k) float16 or bfloat16.  w: (n, k / 2) uint8: the numbers q of 0 to 15 of two neighbours of a row of d, the first in
    the low half.  scales: (n, k / group) of a's type.  zeros: the same of uint8; None: none.  values: (16,) of a's type, with
    which there are no zeros.  Result: (m, n) of a's type, in `out` if given, which has no memory in common with the others.

    Each element of d is rounded once; products are summed in float32.  The bits are the same for the same arguments.
    Tiles, and how many blocks share out k, come from a price that counts what decoding takes.
    Raises matmul-type, matmul-shape, matmul-device.

    >>> import numpy as np
    >>> w = np.array([[0x21, 0x43]], np.uint8)
    >>> coded_matmul(np.ones((1, 4), np.float16), w, np.array([[0.5, 2]], np.float16)).tolist()
    [[15.5]]
    """
    given = {"a": a, "w": w, "scales": scales, "zeros": zeros, "values": values, "out": out}
    m, n, k, group = _check({name: x for name, x in given.items() if x is not None})
    if out is None:
        out = empty(a, (m, n), type_name(a))
    if 0 in (m, n):
        return out
    f, kernel = _kernel(m, n, k, group, type_name(a), values is not None, zeros is not None,
                        Place.of(a, target, execution_backend))
    second = values if values is not None else zeros if zeros is not None else maker(a, (1,), "uint8")()
    sums = empty(a, (f.tile.parts, m, n) if f.tile.parts > 1 else (1,), "float32")
    result = out if strides(out) == (n, 1) else empty(a, (m, n), type_name(a))
    kernel(*(_compact(x) for x in (a, w, scales, second)), sums, result)
    if result is not out:
        out[...] = result
    return out


@lru_cache(4096)
def _kernel(m: int, n: int, k: int, group: int, element: str, table: bool, zeros: bool, at: Place) -> tuple[CodedForm, Any]:
    """The form with its tile, and the kernel."""
    f = chosen(CodedForm(m, n, k, group, element, table, zeros, CodedTile(16, 64, 64, 2)), at.chip)
    return f, at.compile(coded_product(f))


def _compact(x: Any) -> Any:
    if is_numpy(x):
        return x if x.flags.c_contiguous else x.copy()
    return x.contiguous()


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
    if "out" in given and any(overlap(given["out"], x) for name, x in given.items() if name != "out"):
        raise error("matmul-shape", "out has memory in common with an argument", expected="an array of its own",
                    found="shared memory", hint="pass another array")
    return m, n, k, group


__all__ = ["coded_matmul"]
