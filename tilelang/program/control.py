"""Loops with carried state, and blocks of tile programs, inside whole-tensor programs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from tilelang.errors import error, register
from tilelang.ir import Var, dtype
from tilelang.language.tracing.prim_func import PrimFunc

from .functions import transpose
from .graph import Graph, Node, Size
from .ops.rules import axis_of, text_of
from .sizes import size_of
from .tensor import Tensor, Trace, current, described, here, node_of, operand, public, tracing

register("program-loop", TypeError, "the step of a T.loop does not give the states that it was given",
         "step(state, x) returns (new state, result); the new state has the shape and type of the old one: T.cast")
register("program-tile", TypeError, "a T.tile block does not fit the tensors that it is given",
         "T.tile(kernel, *tensors): the kernel's parameters are the tensors, then the results")

Step = Callable[[Any, Any], tuple[Any, Any]]


def _flat(x: Any, what: str) -> tuple[list[Node], bool]:
    """Tensors given alone or as a tuple."""
    alone = not isinstance(x, (tuple, list))
    return [node_of(v, what) for v in ([x] if alone else x)], alone


def _packed(xs: Sequence[Any], alone: bool) -> Any:
    return xs[0] if alone else tuple(xs)


def _front(x: Any, axis: int) -> Node:
    """A tensor with an axis moved to the front."""
    n = node_of(x, "T.loop")
    at = axis_of(n, axis, "T.loop")
    return transpose(Tensor(n), (at, *(k for k in range(n.ndim) if k != at))).node


def _back(x: Tensor, axis: int) -> Tensor:
    at = axis_of(x.node, axis, "T.loop")
    order = list(range(1, x.ndim))
    order.insert(at, 0)
    return transpose(x, order)


def _length(xs: Sequence[Node], length: Size | None) -> Size:
    sizes = list(dict.fromkeys([n.shape[0] for n in xs] + ([] if length is None else [length])))
    if len(sizes) != 1:
        raise error("program-loop", f"T.loop goes over {' and '.join(map(str, sizes)) or 'nothing'}", found=str(sizes or None),
                    expected="one extent of all sequences", hint="give sequences of one length, or length=n")
    return sizes[0]


def _input(n: Node, k: int, name: str, shape: tuple[Size, ...]) -> Node:
    return Node("input", (), MappingProxyType({"name": name, "index": k}), shape, n.dtype, n.span)


@public(methods=False)
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
    outer = current()
    states, alone = _flat(init, "T.loop")
    operand(0, "T.loop")
    many = [] if xs is None else [_front(x, axis) for x in (xs if isinstance(xs, (tuple, list)) else [xs])]
    count = _length(many, length)
    inputs = [_input(n, k, f"state{k}", n.shape) for k, n in enumerate(states)]
    inputs += [_input(n, len(states) + k, f"x{k}", n.shape[1:]) for k, n in enumerate(many)]
    with tracing(Trace(None if outer is None else outer.code, outer)):
        given = [Tensor(n) for n in inputs]
        x = None if xs is None else _packed(given[len(states):], not isinstance(xs, (tuple, list)))
        out = step(_packed(given[:len(states)], alone), x)
        if not isinstance(out, tuple) or len(out) != 2:
            raise error("program-loop", f"the step of T.loop returns {described(out)}", expected="(new state, result)",
                        found=described(out))
        new, _ = _flat(out[0], "the new state of T.loop")
        results, single = ([], True) if out[1] is None else _flat(out[1], "the result of T.loop")
    _check_states(states, new)
    node, made = _loop_node(states, many, inputs, [*new, *results], count)
    items = [Tensor(Node("item", (node,), MappingProxyType({"index": k}), shape, n.dtype, node.span))
             for k, (n, shape) in enumerate(made)]
    ys = [_back(t, axis) for t in items[len(states):]]
    return _packed(items[:len(states)], alone), None if out[1] is None else _packed(ys, single)


def _check_states(old: Sequence[Node], new: Sequence[Node]) -> None:
    def said(nodes: Sequence[Node]) -> str:
        return ", ".join(f"{n.dtype}{text_of(n.shape)}" for n in nodes)

    if [(n.shape, n.dtype) for n in old] != [(n.shape, n.dtype) for n in new]:
        raise error("program-loop", "the step of T.loop changes its state", expected=said(old), found=said(new))


def _loop_node(states: list[Node], many: list[Node], inputs: list[Node], outputs: list[Node],
               length: Size) -> tuple[Node, list[tuple[Node, tuple[Size, ...]]]]:
    """The loop, and (node of the body, shape) of each of its results."""
    outer = _outer_nodes(outputs, inputs)
    captured = [_input(n, len(inputs) + k, f"c{k}", n.shape) for k, n in enumerate(outer)]
    body = Graph(tuple([*inputs, *outer]), tuple(outputs), "step", False)
    swap = dict(zip(outer, captured))
    body = _with_inputs(body, swap)
    attrs = {"body": body, "carried": len(states), "scanned": len(many), "length": length}
    node = Node("loop", (*states, *many, *outer), MappingProxyType(attrs), (), dtype("void"), here())
    made = [(n, n.shape if k < len(states) else (length, *n.shape)) for k, n in enumerate(outputs)]
    return node, made


def _outer_nodes(outputs: Sequence[Node], inputs: Sequence[Node]) -> list[Node]:
    """The greatest subexpressions that do not depend on the inputs of the body, but for constants."""
    depends: dict[Node, bool] = dict.fromkeys(inputs, True)
    order = Graph((), tuple(outputs)).nodes
    for n in order:
        if n not in depends:
            depends[n] = any(depends[x] for x in n.inputs)
    found = {x: None for n in order if depends[n] for x in n.inputs if not depends[x]}
    found |= {n: None for n in outputs if not depends[n]}
    return [n for n in found if n.op not in ("constant", "iota")]


def _with_inputs(body: Graph, swap: Mapping[Node, Node]) -> Graph:
    """The body with inputs in place of the outer nodes, which nothing below stands under any more."""
    new: dict[Node, Node] = dict(swap)

    def of(n: Node) -> Node:
        if n not in new:
            inputs = tuple(of(x) for x in n.inputs)
            new[n] = n if inputs == n.inputs else Node(n.op, inputs, n.attrs, n.shape, n.dtype, n.span)
        return new[n]

    return Graph(tuple(of(n) for n in body.inputs), tuple(of(n) for n in body.outputs), body.name, False)


# ---- tile blocks -----------------------------------------------------------------------------------------------------

@public(methods=False)
def tile(kernel: Any, *xs: Any) -> Any:
    """A tile program as one operation: its parameters are the tensors given, then the results, which are returned.

    kernel: a @T.prim_func whose first parameters have the shapes and types of the tensors; the others are written.
    """
    if not isinstance(kernel, PrimFunc):
        raise error("program-tile", f"T.tile is given {described(kernel)}", expected="a @T.prim_func", found=described(kernel))
    nodes = [node_of(x, "T.tile") for x in xs]
    buffers = [b for _, b in kernel.func.buffers]
    if len(buffers) != len(kernel.func.params) or len(buffers) <= len(nodes):
        raise error("program-tile", f"`{kernel.func.name}` has {len(kernel.func.params)} parameters, "
                    f"{len(nodes)} tensors are given",
                    expected="tensors as parameters, and at least one more than are given", found=f"{len(nodes)} tensors")
    sizes: dict[Var, Size] = {}
    for n, b in zip(nodes, buffers):
        _bind(kernel.func.name, n, b, sizes)
    results = tuple((tuple(size_of(d, sizes) for d in b.shape), b.dtype) for b in buffers[len(nodes):])
    node = Node("tile", tuple(nodes), MappingProxyType({"kernel": kernel, "results": results}), (), dtype("void"), here())
    out = [Tensor(Node("item", (node,), MappingProxyType({"index": k}), shape, dt, node.span))
           for k, (shape, dt) in enumerate(results)]
    return _packed(out, len(out) == 1)


def _bind(kernel: str, n: Node, b: Any, sizes: dict[Var, Size]) -> None:
    """Check that a tensor fits a parameter, and note what its symbols are."""
    fits = n.dtype == b.dtype and n.ndim == len(b.shape)
    for have, want in zip(n.shape, b.shape):
        if isinstance(want, Var):
            want = sizes.setdefault(want, have)
        fits = fits and (not isinstance(want, int) or have == want)
    if not fits:
        raise error("program-tile", f"`{kernel}` takes another tensor as `{b.name}`",
                    expected=f"{b.dtype}{text_of(b.shape)}", found=f"{n.dtype}{text_of(n.shape)}")
