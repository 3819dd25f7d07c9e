"""Small programs written as IR text, for tests of executions and passes."""

from __future__ import annotations

import textwrap
from typing import Any

from tilelang import ops  # noqa: F401 - registers the tile ops that the text names
from tilelang.ir import Func, parse


def program(tensors: dict[str, tuple[tuple, str]], body: str, *, grid: str = "1", threads: Any = 32, scalars: str = "",
            symbols: str = "", facts: str = "", launch_plan: str = "", before: str = "") -> Func:
    """A function with tensor parameters {name: (shape, dtype)} and one kernel, from text.

    body: statements of the kernel, using bx, by as many as grid has extents, and tx, ty, tz.  before: host statements.
    """
    threads = (threads, 1, 1) if isinstance(threads, int) else threads
    params = ", ".join([f"{n}_handle: T.handle" for n in tensors] + [s for s in [scalars] if s])
    lines = [f'{s} = T.dynamic("{s}", "int32")' for s in symbols.split()]
    lines += ["@T.prim_func", f"def main({params}):"]
    for n, (shape, dt) in tensors.items():
        dims = ", ".join(str(d) if isinstance(d, int) else f"T.expr({d})" for d in shape)
        lines.append(f'    {n} = T.match_buffer({n}_handle, "{n}", ({dims},), "{dt}", scope="global", data="{n}_p")')
    if facts:
        lines.append(f"    T.func_attr({facts})")
    lines += [textwrap.indent(textwrap.dedent(before).strip("\n"), "    ")] if before else []
    names = ", ".join([*("bx", "by", "bz")[:grid.count(",") + 1], "tx", "ty", "tz"])
    more = f", {launch_plan}" if launch_plan else ""
    lines.append(f"    with T.Kernel({grid}, threads={threads}{more}) as ({names}):")
    lines.append(textwrap.indent(textwrap.dedent(body).strip("\n"), "        "))
    return parse("\n".join(lines) + "\n")


def alloc(name: str, shape: tuple[int, ...], dt: str, scope: str) -> str:
    """An allocation line."""
    return f'{name} = T.alloc("{name}", {shape}, "{dt}", scope="{scope}", data="{name}_p")'
