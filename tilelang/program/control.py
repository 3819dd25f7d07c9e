"""Loops with carried state, and blocks of tile programs, inside whole-tensor programs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import Any

from tilelang.errors import bare, error, register
from tilelang.ir import Var, dtype
from tilelang.language.tracing.prim_func import PrimFunc

from .functions import moved
from .graph import Graph, Node, Size, input_node, size_of, text_of
from .tensor import Tensor, Trace, axis_of, current, described, make, public, sized, tensor, tracing

register("program-loop", TypeError, "the step of a T.loop does not give the states that it was given",
         "step(state, x) returns (new state, result); the new state has the shape and type of the old one: T.cast")
register("program-tile", TypeError, "a T.tile block does not fit the tensors that it is given",
         "T.tile(kernel, *tensors): the kernel's parameters are the tensors, then the results")

Step = Callable[[Any, Any], tuple[Any, Any]]


def _listed(x: Any) -> list[Tensor]:
    """Tensors given alone or as a tuple; none for None."""
    return [tensor(v) for v in (x if isinstance(x, (tuple, list)) else () if x is None else (x,))]


def _like(x: Any, tensors: Sequence[Any]) -> Any:
    """Tensors alone or as a tuple, or None, as x is."""
    return None if x is None else tuple(tensors) if isinstance(x, (tuple, list)) else tensors[0]


def _items(block: Tensor, results: Sequence[tuple[tuple[Size, ...], dtype]]) -> list[Tensor]:
    """The results of a loop or tile block.  results: (shape, type) of each."""
    return [Tensor(Node("item", (block.node,), MappingProxyType({"index": k}), shape, dt, block.node.span))
            for k, (shape, dt) in enumerate(results)]


def _check_step(step: Any, given: tuple[Any, ...]) -> None:
    """Raises program-loop where a step does not take a state and an element."""
    try:
        found = inspect.signature(step)
    except (TypeError, ValueError):  # not callable, or a function of C
        if callable(step):
            return
        raise error("program-loop", f"the step of T.loop is ‹{described(step)}›", expected="a function") from None
    try:
        found.bind(*given)
    except TypeError as e:
        raise error("program-loop", f"the step of T.loop: {e}", expected="step(state, x)", found=f"step{bare(found)}") from None


@public()
def loop(step: Step, init: Any, xs: Any = None, length: Any = None, axis: int = 0) -> tuple[Any, Any]:
    """Repeat a step over a sequence axis, carrying state: (last state, results along the axis).

    step(state, x) -> (new state, result): x is one slice of xs along the axis (None without xs), state has the shapes and
    types of init.  init, xs, the result: a tensor, a tuple of tensors; the result may be None.  length: without xs.

    Example:
        def step(s, kv):
            s = s + kv[0].unsqueeze(1) * kv[1]
            return s, s.sum(0)
        last, y = T.loop(step, T.zeros((64, 64)), (k, v))
    """
    outer, states = current(), _listed(init)
    many = [moved(x, axis_of(x, axis), 0) for x in _listed(xs)]
    lengths = list(dict.fromkeys([x.shape[0] for x in many] + ([] if length is None else [sized(length)])))
    if len(lengths) != 1:
        raise error("program-loop", f"T.loop goes over {' and '.join(map(str, lengths)) or 'nothing'}",
                    found=str(lengths or None), expected="one extent of all sequences",
                    hint="give sequences of one length, or length=n")
    inputs = [input_node(f"state{k}", k, t.shape, t.dtype, t.node.span) for k, t in enumerate(states)]
    inputs += [input_node(f"x{k}", len(states) + k, x.shape[1:], x.dtype, x.node.span) for k, x in enumerate(many)]
    with tracing(Trace(None if outer is None else outer.code, outer)):
        given = [Tensor(n) for n in inputs]
        pair = _like(init, given[:len(states)]), _like(xs, given[len(states):])
        _check_step(step, pair)
        out = step(*pair)
        if not isinstance(out, tuple) or len(out) != 2:
            raise error("program-loop", f"the step of T.loop returns ‹{described(out)}›", expected="(new state, result)")
        new, results = _listed(out[0]), _listed(out[1])
        old_types, new_types = ([f"{t.dtype}{text_of(t.shape)}" for t in ts] for ts in (states, new))
        if old_types != new_types:
            raise error("program-loop", "the step of T.loop changes its state", expected=", ".join(old_types),
                        found=", ".join(new_types))
        outputs = tuple(t.node for t in (*new, *results))
    captured = _captured(outputs, inputs)
    swap = {n: input_node(f"c{k}", len(inputs) + k, n.shape, n.dtype, n.span) for k, n in enumerate(captured)}
    body = Graph((*inputs, *captured), outputs, "step", False).map(lambda n, operands: swap.get(n) or n.on(operands))
    block = make("loop", *states, *many, *map(Tensor, captured), shape=(), dt=dtype("void"), body=body, carried=len(states),
                 scanned=len(many), length=lengths[0])
    items = _items(block, [(t.shape, t.dtype) for t in states] + [((lengths[0], *t.shape), t.dtype) for t in results])
    stacked = [moved(y, 0, axis_of(y, axis)) for y in items[len(states):]]
    return _like(init, items[:len(states)]), _like(out[1], stacked)


def _captured(outputs: Sequence[Node], inputs: Sequence[Node]) -> list[Node]:
    """The greatest subexpressions that do not depend on the inputs of the body, but for constants."""
    depends: dict[Node, bool] = dict.fromkeys(inputs, True)
    order = Graph((), tuple(outputs)).nodes
    for n in order:
        if n not in depends:
            depends[n] = any(depends[x] for x in n.inputs)
    found = {x: None for n in order if depends[n] for x in n.inputs if not depends[x]}
    found |= {n: None for n in outputs if not depends[n]}
    return [n for n in found if n.op not in ("constant", "iota")]


# ---- tile blocks -----------------------------------------------------------------------------------------------------

@public()
def tile(kernel: Any, *xs: Any) -> Any:
    """A tile program as one operation: its parameters are the tensors given, then the results, which are returned.

    kernel: a @T.prim_func whose first parameters have the shapes and types of the tensors; the others are written.
    """
    if not isinstance(kernel, PrimFunc):
        raise error("program-tile", f"T.tile is given ‹{described(kernel)}›", expected="a @T.prim_func")
    tensors = [tensor(x) for x in xs]
    buffers = [b for _, b in kernel.func.buffers]
    if len(buffers) != len(kernel.func.params) or len(buffers) <= len(tensors):
        raise error("program-tile", f"`{kernel.func.name}` has {len(kernel.func.params)} parameters, ‹{len(tensors)} tensors› "
                    "are given", expected="tensors as parameters, and at least one more than are given")
    sizes: dict[Var, Size] = {}
    for x, b in zip(tensors, buffers):
        wanted = [sizes.setdefault(d, s) if isinstance(d, Var) else d for d, s in zip(b.shape, x.shape)]
        if x.dtype != b.dtype or x.ndim != len(b.shape) or any(isinstance(d, int) and d != s for d, s in zip(wanted, x.shape)):
            raise error("program-tile", f"`{kernel.func.name}` takes another tensor as `{b.name}`",
                        expected=f"{b.dtype}{text_of(b.shape)}", found=f"{x.dtype}{text_of(x.shape)}")
    results = tuple((tuple(size_of(d, sizes) for d in b.shape), b.dtype) for b in buffers[len(tensors):])
    out = _items(make("tile", *tensors, shape=(), dt=dtype("void"), kernel=kernel, results=results), results)
    return out[0] if len(out) == 1 else tuple(out)
