"""A program as a module of tile programs: the text of its kernels, and the steps that run it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from tilelang.language.tracing.prim_func import PrimFunc
from tilelang.target import Target

from .blocks import Block, block_text
from .cut import Cut, cut, not_compiled
from .emit import head_lines, kernel_text
from .expand import expand
from .expr import Tensor
from .graph import Dim, Graph, Node
from .nest import Unfit, base_of
from .plan import Choice, Plan
from .recipe import Recipe
from .stateful import StepsPlan, steps_text
from .text import unused


def lower(graph: Graph, shapes: Mapping[str, int] | None, target: Target, choices: Sequence[Choice] = ()) -> Recipe:
    """The tile programs of an operator graph.

    shapes: numbers for named sizes; a size without one stays open: one kernel serves all its values.  choices: for the first of
    the groups of kernels that are planned by themselves.
    Raises program-lowering, at the user's line, for what is not compiled yet.
    """
    graph = graph.at(shapes or {})
    program = expand(graph)
    out = assemble(program.name, program.inputs, cut(program, target, shapes or {}, choices), target, graph.dims)
    for name, loop in list(out.loops.items()):
        out.loops[name] = graph.nodes.index(loop)
        text = lower(replace(loop.attrs["body"], name=f"{name}_step"), None, target).source
        out.source += f"\n\n# {name}: the host calls these kernels for each step of the loop\n{text}"
    return out


def assemble(name: str, inputs: tuple[Tensor, ...], kernels: Cut, target: Target, dims: tuple[str, ...]) -> Recipe:
    """The text of all kernels and the steps."""
    used = {"T", "tilelang", *dims}
    loops: dict[str, Node] = {}
    names: dict[Tensor, str] = {t: unused(t.name, used) for t in inputs}
    name = unused(name if name.isidentifier() else "program", used)  # a lambda has none
    for group, _ in kernels.kernels:
        for t in group:
            names[t] = unused(t.name, used)
    steps, texts, stored = [], [], []
    symbols: set[str] = set()  # of blocks
    blocks: dict[PrimFunc, str] = {}
    forms: dict[str, tuple[str, int]] = {}  # texts without names -> their kernel, and where its text is
    for t in kernels.outputs:
        if t not in names and 0 in t.shape:
            names[t] = unused(t.name, used)
            stored.append(t)
    for k, (group, plan) in enumerate(kernels.kernels):
        stored += group
        kernel = name if len(kernels.kernels) == 1 else f"{name}_{k}"
        if isinstance(plan, Block):
            if isinstance(plan.of, Node):
                loops[kernel] = plan.of
            elif isinstance(plan.of, str):
                parameters = [(names[t], t) for t in (*plan.operands, *group)]
                head = "\n".join(["@T.prim_func", *head_lines(kernel, parameters)])
                texts.append(f"{head}\n    {plan.of}({', '.join(name for name, _ in parameters)})\n")
            elif plan.of not in blocks:
                text, sizes = block_text(plan.of, kernel, used)
                texts.append(text)
                symbols.update(sizes)
                blocks[plan.of] = kernel
            kernel = blocks[plan.of] if isinstance(plan.of, PrimFunc) else kernel
            steps.append((kernel, [names[t] for t in plan.operands], [names[t] for t in group]))
            continue
        plans = [plan] if isinstance(plan, Plan) else [*plan.starts, *plan.results]
        read = {base_of(r.value) for p in plans for e in p.nest.bodies() for r in e.reads}
        needed = [t for t in names if t in read] if len(kernels.kernels) > 1 else [*inputs]
        write = steps_text if isinstance(plan, StepsPlan) else kernel_text
        try:
            text = write(plan, kernel, [(names[t], t) for t in (*needed, *group)], target)  # type: ignore[arg-type]
            if more := _givers(text, needed, inputs):
                needed += more
                text = write(plan, kernel, [(names[t], t) for t in (*needed, *group)], target)  # type: ignore[arg-type]
            form = write(plan, "kernel", [(f"p{k}", t) for k, t in enumerate((*needed, *group))], target)  # type: ignore[arg-type]
        except Unfit as e:
            raise not_compiled(group, str(e)) from None
        reads, writes = [names[t] for t in needed], [names[t] for t in group]
        if form in forms:  # the same kernel for other tensors
            kernel, at = forms[form]
            texts[at] = f"# also: {', '.join(reads)} -> {', '.join(writes)}\n{texts[at]}"
        else:
            forms[form] = kernel, len(texts)
            texts.append(text)
        steps.append((kernel, reads, writes))
    head = "import tilelang.language as T\n"
    called = [f for f in ("order_of_keys", "selected_order", "sorted_order") if any(f"{f}(" in text for text in texts)]
    head += f"from tilelang.library.sorting import {', '.join(called)}\n\n" if called else "\n"
    if any(" = T.PrimFunc(parse(" in text for text in texts):
        head = head.rstrip() + "\nfrom tilelang.ir.parser import parse\n\n"
    open_sizes = sorted({n for t in names for s in t.shape if isinstance(s, Dim) for n in s.names} | set(dims) | symbols)
    head += "".join(f'{n} = T.dynamic("{n}")\n' for n in open_sizes)
    buffers = {names[t]: (list(map(str, t.shape)), t.dtype) for t in stored}
    return Recipe(head + "\n\n" + "\n\n".join(texts), steps, [names[t] for t in inputs], [names[t] for t in kernels.outputs],
                  buffers, groups=kernels.groups, loops=loops)


def _givers(text: str, parameters: list[Tensor], inputs: tuple[Tensor, ...]) -> list[Tensor]:
    """Inputs of the program whose shapes give the open sizes that a kernel computes with, where its own parameters do not."""
    known = {n for t in parameters for n in _shown(t)}
    out: list[Tensor] = []
    for n in dict.fromkeys(n for t in inputs for n in _shown(t)):
        if n not in known and re.search(rf"\b{n}\b", text):
            out.append(next(t for t in inputs if n in _shown(t)))
            known |= set(_shown(out[-1]))
    return out


def _shown(t: Tensor) -> list[str]:
    """The open sizes that are extents of a tensor by themselves, or that its extents are multiples of."""
    return [n for s in t.shape if isinstance(s, Dim) and len(s.names) == 1 for n in s.names]
