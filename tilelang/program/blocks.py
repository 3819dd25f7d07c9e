"""Blocks of tile statements in programs (T.tile): a kernel that the user wrote is a step of the program as it is.

A loop whose steps have such blocks is a step too: the host starts the kernels of its steps one after another.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import textwrap
from collections.abc import Iterable, Mapping
from typing import Any

from tilelang import language
from tilelang.ir import Var
from tilelang.ir.printer import to_text
from tilelang.language.tracing.prim_func import PrimFunc

from .expr import Tensor
from .graph import Node

PLAIN = (bool, int, float, str)


class Block:
    """A kernel, or a loop that the host walks, and what it is given.

    of: the kernel, the loop, or the name of a program of library/sorting.py.
    operands: inputs of the program, or tensors that other kernels store.  results: what it writes, in the order of parameters.
    """

    def __init__(self, of: PrimFunc | Node | str, operands: Iterable[Tensor]) -> None:
        self.of, self.operands = of, tuple(operands)
        self.results: list[Tensor] = []


def walked(n: Node) -> bool:
    """Whether a loop has blocks in its steps."""
    return any(x.op == "tile" or x.op == "loop" and walked(x) for x in n.attrs["body"].nodes)


def block_text(kernel: PrimFunc, name: str, used: set[str]) -> tuple[str, list[str]]:
    """(statements that make the kernel under this name, its open sizes): the user's text, where it stands by itself.

    That of a function which uses more than numbers and T.dynamic symbols from outside is the program as tracing made it.
    used: names that the module has.
    """
    found = _own_text(kernel, used)
    if found is None:
        text = to_text(kernel.func).rstrip()
        return f"{name} = T.PrimFunc(parse(r'''\n{text}\n'''))\n", []
    own, sizes = found
    head, rest = own.split(f"def {kernel.orig_func.__name__}(", 1)  # type: ignore[union-attr]
    return f"{head}def {name}({rest}", sizes


def _own_text(kernel: PrimFunc, used: set[str]) -> tuple[str, list[str]] | None:
    """The text of the user's function and the open sizes in it; None where it needs more."""
    fn = kernel.orig_func
    if fn is None:
        return None
    try:
        text = textwrap.dedent(inspect.getsource(fn))
        tree = ast.parse(text)
    except (OSError, TypeError, SyntaxError):
        return None
    (node,) = tree.body
    if not isinstance(node, ast.FunctionDef) or [ast.unparse(d) for d in node.decorator_list] != ["T.prim_func"]:
        return None
    bound = {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Load)}
    bound |= {a.arg for a in ast.walk(node) if isinstance(a, ast.arg)}
    outside = dict.fromkeys(n.id for n in ast.walk(node) if isinstance(n, ast.Name) and n.id not in bound)
    values = _values(kernel, fn)
    lines, sizes = [], []
    for n in outside:
        x = values.get(n)
        if n == "T" and x in (None, language) or n not in values and hasattr(builtins, n):
            continue
        if isinstance(x, Var) and x.name == n:
            sizes.append(n)
        elif type(x) in PLAIN and n not in used:
            used.add(n)
            lines.append(f"{n} = {x!r}\n")
        else:
            return None
    return "".join(lines) + ("\n\n" if lines else "") + text, sizes


def _values(kernel: PrimFunc, fn: Any) -> Mapping[str, Any]:
    """What names outside of the function stand for; those of annotations alone are symbols of its parameters."""
    symbols = {v.name: v for _, b in kernel.func.buffers for s in b.shape for v in (s,) if isinstance(v, Var)}
    return {**symbols, **fn.__globals__, **inspect.getclosurevars(fn).nonlocals}
