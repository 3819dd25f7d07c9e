"""Sizes of annotations as sizes of a program, and what a call's shapes say about them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tilelang.errors import error, register
from tilelang.ir import Binary, Const, Var

from .graph import Dim, Graph, Node, Size, size_at, text_of

register("program-argument", TypeError, "a program is called with an argument that its parameter does not take",
         "pass an array of the declared shape and type")
register("program-sizes", ValueError, "the sizes of a call do not fit the program",
         "the same T.dynamic symbol stands for the same number")

_OPERATIONS = {"add": lambda a, b: a + b, "sub": lambda a, b: a - b, "mul": lambda a, b: a * b, "floordiv": lambda a, b: a // b}


def size_of(d: Any, names: Mapping[Var, Size]) -> Size:
    """A dimension of an annotation as a size.  names: what its symbols are called.  Raises program-sizes for what is none."""
    if isinstance(d, int):
        return d
    if isinstance(d, Const):
        return int(d.value)
    if isinstance(d, Var):
        return names[d] if d in names else Dim.named(d.name)
    if isinstance(d, Binary) and d.op in _OPERATIONS:
        return _OPERATIONS[d.op](size_of(d.a, names), size_of(d.b, names))  # type: ignore[no-any-return,no-untyped-call]
    raise error("program-sizes", f"the size {d} of a parameter is no sum, multiple or quotient of symbols", found=str(d),
                expected="+, -, * and // of T.dynamic symbols and numbers")


def bound(graph: Graph, shapes: Sequence[Sequence[int]]) -> dict[str, int]:
    """The named sizes of a call.  Raises program-argument for shapes that do not fit, program-sizes for sizes that do not."""
    sizes: dict[str, int] = {}
    for n, shape in zip(graph.inputs, shapes):
        if len(shape) != n.ndim:
            raise _shape(graph, n, shape)
        for s, size in zip(n.shape, shape):
            if isinstance(s, Dim):
                _solve(s, size, sizes)
    missing = [d for d in graph.dims if d not in sizes]
    if missing:
        raise error("program-sizes", f"no argument of `{graph.name}` gives the size {missing[0]}", found="no such dimension",
                    expected=f"a dimension {missing[0]}, or {missing[0]} times a number", hint=f"give a parameter a dimension "
                    f"{missing[0]}")
    for n, shape in zip(graph.inputs, shapes):
        if tuple(size_at(s, sizes) for s in n.shape) != tuple(shape):
            raise _shape(graph, n, shape, sizes)
    for g in graph.guards:
        if g.at(sizes) < 0:
            said = ", ".join(f"{k} = {v}" for k, v in sizes.items())
            raise error("program-sizes", f"`{graph.name}` needs {g} not to be negative", expected=f"{g} >= 0",
                        found=f"{g.at(sizes)} for {said}", hint="pass larger tensors")
    return sizes


def _solve(s: Dim, size: int, sizes: dict[str, int]) -> None:
    """Note the size that a dimension of one symbol gives: n, 2 * n, n + 3."""
    names = [names for names, _ in s.terms if names]
    if len(names) == 1 and len(names[0]) == 1 and "(" not in names[0][0]:
        by = dict(s.terms)
        sizes.setdefault(names[0][0], (size - by.get((), 0)) // by[names[0]])


def _shape(graph: Graph, n: Node, shape: Sequence[int], sizes: Mapping[str, int] | None = None) -> Exception:
    said = "".join(f", {k} = {v}" for k, v in (sizes or {}).items())
    return error("program-sizes" if sizes else "program-argument",
                 f"`{graph.name}` takes `{n.attrs['name']}` of the shape {text_of(n.shape)}",
                 expected=text_of(n.shape) + said, found=text_of(shape))
