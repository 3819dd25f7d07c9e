"""The operator graph as tensors of index expressions: maps are substituted into what reads them.

    y = exp(x - max(x, 1))         top[i] = max over j: x[i, j]
                                   y[i, j] = exp(sub(x[i, j], top[i]))

Reductions, contractions, scans, sorts and loops become tensors of their own; element-wise operations, reshapes, slices and
gathers become index expressions in the tensors that read them.  Computed operands of contractions are tensors too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, replace
from itertools import pairwise
from math import nan

from tilelang.errors import register

from .expr import FREE, Axis, Scalar, Tensor, axis, call, const, number, plus, read, remade, rewrite, split, times
from .blocks import Block, walked
from .expr import at as placed
from .graph import BINARY, COMPARE, UNARY, Graph, Node, Size, count_elements
from .nest import contraction
from .rescale import factors, is_float, neutral
from .sorts import fits, key_of

register("program-lowering", NotImplementedError, "a program has an operation that no kernel can compute yet",
         "split the program there, or run it by `program.reference(...)`", expected="tensors that tiles can hold")

Index = tuple[Scalar, ...]
PIECE = 4096  # most elements of a piece of a row of which the first places of an order are wanted
MOST_READS = 16  # of an element-wise expression that reads what another one computes at several places


@dataclass(frozen=True)
class Program:
    """A program of index expressions.

    outputs: a map for each result of the graph, in order.  made: the other computed tensors, operands first.
    """

    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    made: tuple[Tensor, ...]
    name: str


def expand(graph: Graph) -> Program:
    """The index expressions of a graph."""
    e = _Expander()
    e.kept = _read_at_many_places(graph)
    inputs = tuple(e.tensor(n) for n in graph.inputs)
    outputs = []
    for k, n in enumerate(graph.outputs):
        axes = e.axes(n.shape)
        name = "out" if len(graph.outputs) == 1 else f"out{k}"
        body = None if 0 in n.shape else e.element(n, tuple(map(axis, axes)))  # nothing is computed for no element
        outputs.append(Tensor(name, axes, str(n.dtype), "map", body, span=n.span))
    made = tuple(t for t in e.made if 0 not in t.shape or t.kind == "item" or "block" in t.attrs)
    return Program(inputs, tuple(outputs), made, graph.name)


@dataclass(frozen=True)
class Steps:
    """A loop with carried state.

    step: counts the steps.  states: (state, its first elements).  results: (axes, elements) of the new states, then of what a
    step gives.
    """

    step: Axis
    states: tuple[tuple[Tensor, Scalar], ...]
    results: tuple[tuple[tuple[Axis, ...], Scalar], ...]

    def bodies(self) -> list[Scalar]:
        return [e for _, e in (*self.states, *self.results)]


class _Expander:
    """Nodes to elements.  Tensors are made once per node, elements once per node and indices."""

    def __init__(self, outer: _Expander | None = None) -> None:
        self.inside = outer is not None  # the step of a loop
        self.made: list[Tensor] = [] if outer is None else outer.made
        self.operands: dict[Scalar, Tensor] = {} if outer is None else outer.operands
        self.common: dict[tuple[int, Size], Axis] = {} if outer is None else outer.common
        self.steps: set[Tensor] = set() if outer is None else outer.steps  # what is computed in steps of loops
        self.tensors: dict[Node, Tensor] = {}
        self.elements: dict[tuple[Node, Index], Scalar] = {}
        self.outer: dict[Node, Callable[[Index], Scalar]] = {}  # inputs of a loop's body that are elements of other tensors
        self.items: dict[Node, list[Tensor]] = {}
        self.kept: Set[Node] = frozenset()  # nodes that are tensors of their own, however they are computed
        self.after: dict[Node, Tensor] = {}  # new states of a step, which what follows reads

    @staticmethod
    def axes(shape: Sequence[Size]) -> tuple[Axis, ...]:
        return tuple(Axis(f"i{k}", s) for k, s in enumerate(shape))

    def element(self, n: Node, at: Index) -> Scalar:
        """The element of a node at index expressions."""
        at = tuple(const(0) if isinstance(s, int) and s == 1 else i for i, s in zip(at, n.shape))
        if n in self.after:
            return read(self.after[n], at)
        if n in self.kept:
            return read(self.tensor(n), at)
        if (n, at) not in self.elements:
            self.elements[n, at] = ROWS[n.op](self, n, at)
        return self.elements[n, at]

    def tensor(self, n: Node) -> Tensor:
        """The tensor that a node of its own kind is."""
        if n not in self.tensors:
            self.tensors[n] = self._whole(n) if n in self.kept else self._with_operands(TENSORS[n.op](self, n))
        return self.tensors[n]

    def _whole(self, n: Node) -> Tensor:
        """The tensor of a node that others read at many places."""
        axes = self.axes(n.shape)
        body = _rounded(ROWS[n.op](self, n, tuple(map(axis, axes))), str(n.dtype))
        self.made.append(Tensor("kept", axes, str(n.dtype), "map", body, attrs={"kept": True}, span=n.span))
        return self.made[-1]

    def _with_operands(self, t: Tensor) -> Tensor:
        """The tensor, whose computed operands are tensors of their own where it is a contraction, or collects a reduction."""
        body = t.body
        if body is None or t.kind == "map":
            return t
        if not body.axes <= {*t.axes, *t.over} or any(r.value.kind == "state" or r.value in self.steps for r in body.reads):
            self.steps.add(t)
            return t
        computed = [f for f, _ in factors(body)] if contraction(t) is not None else [body] if _collects(body) else []
        for f in computed:
            plain = f.args[0] if f.op == "cast" and is_float(f.args[0].dtype) else f
            if (plain.op not in FREE or plain.op == "cast") and f.reads:
                body = rewrite(body, lambda x, f=f: self._operand(f) if x == f else None)  # type: ignore[misc]
        self.made.append(replace(t, body=body))
        return self.made[-1]

    def _operand(self, f: Scalar) -> Scalar:
        """An expression as an element of a tensor; in common axes, so that equal operands are one tensor."""
        axes = sorted(f.axes, key=lambda a: (
            max((k for r in f.reads for k, i in enumerate(r.args) if a in i.axes), default=0), a.name))
        own = tuple(self.common.setdefault((k, a.extent), Axis(f"i{k}", a.extent)) for k, a in enumerate(axes))
        body = placed(f, dict(zip(axes, map(axis, own))))
        if body not in self.operands:
            self.operands[body] = Tensor("operand", own, f.dtype, "map", body)
            self.made.append(self.operands[body])
        return read(self.operands[body], tuple(map(axis, axes)))


def _collects(body: Scalar) -> bool:
    """Whether a reduction's body has no more elements than a tensor that it reads, which another reduction makes."""
    return any(r.value.over and body.axes <= r.axes and contraction(r.value) is None for r in body.reads)


def _read_at_many_places(graph: Graph) -> set[Node]:
    """Nodes that are stored since expressions would read them at so many places, each computed anew, that they would explode.

    A chain of stencils, of which each reads five elements of the one before, would read 5, 25, 125, ... elements.
    """
    kept: set[Node] = set()

    def mapped(n: Node) -> bool:
        return ROWS[n.op] in (_element_wise, _concat, _gather) and n not in kept

    def terms(n: Node) -> int:  # elements that an expression reads
        if n not in counts:
            below = list(fronts[n]) if n in fronts else list(n.inputs) if mapped(n) or ROWS[n.op] in VIEWS else []
            counts[n] = sum(map(terms, below)) if below else int(n.op not in ("constant", "iota"))
        return counts[n]

    def shown(n: Node) -> Node:
        while ROWS[n.op] in VIEWS:
            n = n.inputs[0]
        return n

    fronts: dict[Node, frozenset[Node]] = {}  # what an element-wise expression reads at its own place
    counts: dict[Node, int] = {}
    for n in graph.nodes:
        if ROWS.get(n.op) is not _element_wise:
            continue
        fronts[n] = frozenset(y for x in n.inputs for y in (fronts[x] if x in fronts and x not in kept else (x,)))
        while sum(map(terms, fronts[n])) > MOST_READS:
            found = [s for s in map(shown, fronts[n]) if mapped(s) and terms(s) > 1]
            again = {s for s in found if found.count(s) > 1}
            if not again:
                break
            kept |= again
            counts.clear()
    return kept


# ---- element-wise operations and views --------------------------------------------------------------------------------


def _element_wise(e: _Expander, n: Node, at: Index) -> Scalar:
    operands = [e.element(x, at[len(at) - x.ndim:]) for x in n.inputs]
    return operands[0] if n.op == "broadcast" else call(n.op, *operands, dtype=str(n.dtype))


def _reshape(e: _Expander, n: Node, at: Index) -> Scalar:
    """Groups of axes with as many elements are mapped by themselves, so that a dynamic size in one does not blur the others."""
    x, i, j = n.inputs[0], 0, 0
    places: list[Scalar] = []
    sizes = list(x.shape)
    while i < len(sizes) or j < len(at):
        a, b = i, j
        left: Size = 1
        right: Size = 1
        first = True
        while first or left != right:
            first = False
            if i < len(sizes) and (j >= len(at) or not _less(right, left) or j == b and i == a):
                left, i = left * sizes[i], i + 1
            elif j < len(at):
                right, j = right * n.shape[j], j + 1
            else:
                break
        places += _flat(at[b:j], n.shape[b:j], sizes[a:i])
    return e.element(x, tuple(places))


def _less(a: Size, b: Size) -> bool:
    return a < b if isinstance(a, int) and isinstance(b, int) else isinstance(a, int)


def _flat(at: Sequence[Scalar], shape: Sequence[Size], sizes: Sequence[Size]) -> list[Scalar]:
    """Indices in `sizes` of the element at `at` in `shape`, both in row-major order."""
    flat = const(0)
    for i, s in zip(at, shape):
        flat = plus(times(flat, s), i)
    out = []
    for s in reversed(sizes[1:]):
        flat, low = split(flat, s)
        out.append(low)
    return [flat, *reversed(out)] if sizes else []


def _transpose(e: _Expander, n: Node, at: Index) -> Scalar:
    perm = n.attrs["perm"]
    return e.element(n.inputs[0], tuple(at[perm.index(k)] for k in range(len(perm))))


def _slice(e: _Expander, n: Node, at: Index) -> Scalar:
    places = (plus(times(i, step), start) for i, start, step in zip(at, n.attrs["starts"], n.attrs["steps"]))
    return e.element(n.inputs[0], tuple(places))


def _concat(e: _Expander, n: Node, at: Index) -> Scalar:
    k = n.attrs["axis"]
    ends, total = [], 0
    for x in n.inputs:
        if x.shape[k] == 0:
            continue
        ends.append((total, x))
        total = total + x.shape[k]
    pieces = [(start, x, e.element(x, (*at[:k], plus(at[k], start * -1), *at[k + 1:]))) for start, x in ends]
    if len(pieces) > 2 and all(x.shape[k] == 1 for _, x in ends) and (one := _counted([p for _, _, p in pieces], at[k])):
        return one
    out: Scalar | None = None
    even = all(x.shape[k] == ends[0][1].shape[k] for _, x in ends)  # neighbours in memory stay neighbours
    for start, x, one in reversed(pieces):
        inside = call("lt", at[k], const(start + x.shape[k]), dtype="bool")
        if out is not None and {one.op, out.op} == {"read"} and one.value == out.value and not even:
            out = read(one.value, tuple(a if a == b else call("where", inside, a, b) for a, b in zip(one.args, out.args)))
            continue
        out = one if out is None else call("where", inside, one, out, dtype=str(n.dtype))
    return const(0, str(n.dtype)) if out is None else out  # there is no element


def _counted(pieces: list[Scalar], index: Scalar) -> Scalar | None:
    """The expression of `index` that is each of the pieces, where they differ in an integer that grows evenly; else None."""
    first = pieces[0]
    if all(p == first for p in pieces):
        return first
    if first.op == "const":
        numbers = [number(p) for p in pieces]
        steps = {b - a for a, b in pairwise(numbers)} if all(isinstance(n, int) for n in numbers) else set()  # type: ignore
        if len(steps) != 1 or {p.dtype for p in pieces} != {first.dtype} or first.dtype == "bool":
            return None
        counted = plus(times(index, steps.pop()), first.value)
        return counted if first.dtype == "int32" else call("cast", counted, dtype=first.dtype)
    if any((p.op, p.dtype, p.value, len(p.args)) != (first.op, first.dtype, first.value, len(first.args)) for p in pieces):
        return None
    args = [_counted(list(a), index) for a in zip(*(p.args for p in pieces))]
    return None if None in args else remade(first, tuple(args))  # type: ignore[arg-type]


def _pad(e: _Expander, n: Node, at: Index) -> Scalar:
    inside: Scalar | None = None
    x = n.inputs[0]
    places = tuple(plus(i, -b) for i, b in zip(at, n.attrs["before"]))
    for p, b, a, s in zip(places, n.attrs["before"], n.attrs["after"], x.shape):
        tests = [call("ge", p, const(0), dtype="bool")] * (b > 0) + [call("lt", p, const(s), dtype="bool")] * (a > 0)
        for t in tests:
            inside = t if inside is None else call("and", inside, t)
    one = e.element(x, places)
    return one if inside is None else call("where", inside, one, const(n.attrs["value"], str(n.dtype)), dtype=str(n.dtype))


def _gather(e: _Expander, n: Node, at: Index) -> Scalar:
    x, i = n.inputs
    k = n.attrs["axis"]
    end = k + (i.ndim if n.op == "gather" else 1)
    place = e.element(i, at[k:end] if n.op == "gather" else at)
    place = place if place.dtype == "int32" else call("cast", place, dtype="int32")
    return e.element(x, (*at[:k], place, *at[end:]))


# ---- tensors of their own ---------------------------------------------------------------------------------------------


def _read(e: _Expander, n: Node, at: Index) -> Scalar:
    """An element of a tensor; a reduction over axes of one element is that element."""
    if n in e.outer:
        return e.outer[n](at)
    t = e.tensor(n)
    if n.attrs.get("keepdims"):
        at = tuple(i for k, i in enumerate(at) if k not in n.attrs["axes"])
    value = read(t, at) if t.kind != "map" or t.body is None else placed(t.body, dict(zip(t.axes, at)))
    return call("gt", value, const(0), dtype="bool") if n.attrs.get("kind") in ("any", "all") else value


def _reduce(e: _Expander, n: Node) -> Tensor:
    x, kind = n.inputs[0], n.attrs["kind"]
    inner = tuple(Axis(f"i{k}" if k not in n.attrs["axes"] else f"k{k}", s) for k, s in enumerate(x.shape))
    body = e.element(x, tuple(map(axis, inner)))
    over = tuple(inner[k] for k in n.attrs["axes"] if x.shape[k] != 1)
    kept = tuple(a for k, a in enumerate(inner) if k not in n.attrs["axes"])
    out = str(n.dtype)
    accum = str(n.attrs["accum"])
    if kind in ("any", "all"):
        kind, body, out, accum = {"any": "max", "all": "min"}[kind], call("cast", body, dtype="int32"), "int32", "int32"
    if not over or any(a.extent == 0 for a in over):
        return Tensor(kind, kept, out, "map", _of_few(kind, body, not over), span=n.span)
    return Tensor(kind, kept, out, kind, body, over, {"accum": accum}, n.span)


def _of_few(kind: str, body: Scalar, one: bool) -> Scalar:
    """A reduction or scan of one element, or of none."""
    if kind.startswith("arg"):
        return const(0)
    none = neutral(kind, body.dtype)
    if not one:
        return none
    return call(kind, body, none, dtype=body.dtype) if is_float(body.dtype) and kind in ("max", "min") else body


def _einsum(e: _Expander, n: Node) -> Tensor:
    operands, result = n.attrs["spec"].split("->")
    sizes = {letter: s for x, letters in zip(n.inputs, operands.split(",")) for letter, s in zip(letters, x.shape)
             if not (isinstance(s, int) and s == 1)}
    letters = {c: Axis(c, sizes.get(c, 1)) for c in dict.fromkeys(operands.replace(",", ""))}
    accum = str(n.attrs["accum"])
    factors = []
    for x, names in zip(n.inputs, operands.split(",")):
        one = e.element(x, tuple(axis(letters[c]) for c in names))
        # The cast says that the operand is rounded to its own type: it stays where it is computed in a wider one.
        factors.append(_rounded(one, str(x.dtype)))
    body = factors[0]
    for f in factors[1:]:
        body = call("mul", body, f, dtype=accum)
    over = tuple(a for c, a in letters.items() if c not in result and a.extent != 1)
    kept = tuple(letters[c] for c in result)
    if not over or any(a.extent == 0 for a in over):
        return Tensor("acc", kept, str(n.dtype), "map", body if not over else neutral("sum", accum), span=n.span)
    return Tensor("acc", kept, str(n.dtype), "sum", body, over, {"accum": accum}, n.span)


def _rounded(e: Scalar, dtype: str) -> Scalar:
    exact = e.op == "cast" or e.op == "read" and e.value.kind == "input"
    return e if exact and e.dtype == dtype else call("cast", e, dtype=dtype)


def _scan(e: _Expander, n: Node) -> Tensor:
    inner = e.axes(n.shape)
    body = e.element(n.inputs[0], tuple(map(axis, inner)))
    if n.shape[n.attrs["axis"]] == 1:
        return Tensor("scan", inner, str(n.dtype), "map", _of_few(n.attrs["kind"], body, True), span=n.span)
    return Tensor("scan", inner, str(n.dtype), f"scan {n.attrs['kind']}", body, (inner[n.attrs["axis"]],),
                  {"accum": str(n.attrs["accum"]), "reverse": n.attrs["reverse"]}, n.span)


def _sort(e: _Expander, n: Node) -> Tensor:
    x, k = n.inputs[0], n.attrs["axis"]
    inner = e.axes(x.shape)
    if x.shape[k] == 1:
        return Tensor("order", inner, "int32", "map", const(0), span=n.span)
    place = Axis("place", n.shape[k])
    body = _rounded(e.element(x, tuple(map(axis, inner))), str(x.dtype))
    out = Tensor("order", (*inner[:k], place, *inner[k + 1:]), "int32", "order", body, (inner[k],),
                 {"largest": n.attrs["largest"]}, n.span)
    most, few = x.shape[k], n.shape[k]
    if not e.inside and isinstance(most, int) and isinstance(few, int) and PIECE < most and (
            pieces := -(-most // PIECE)) * few <= PIECE // 2:
        return _best_of_pieces(e, out, body, (most, pieces, few))
    return out if e.inside or isinstance(most, int) and fits(out, most) else _sorted_in_memory(e, out, inner[k], place)


def _best_of_pieces(e: _Expander, t: Tensor, body: Scalar, sizes: tuple[int, int, int]) -> Tensor:
    """The first places of a long sort of a body: those of the first places of its pieces.

    sizes: elements of a row, its pieces, places.
    """
    n, pieces, few = sizes
    (along,), place = t.over, next(a for a in t.axes if a.name == "place")
    piece, inner, found = Axis("piece", pieces), Axis(along.name, -(-n // pieces)), Axis("found", pieces * few)

    def element(index: Scalar) -> Scalar:
        one, dt = placed(body, {along: index}), body.dtype
        if n % pieces == 0:
            return one
        last = const(nan, dt) if is_float(dt) else neutral("max" if t.attrs["largest"] else "min", dt)
        return call("where", call("lt", index, const(n), dtype="bool"), one, last, dtype=dt)

    def best(axes: tuple[Axis, ...], body: Scalar, over: Axis) -> Tensor:
        return e._with_operands(Tensor("order", axes, "int32", "order", body, (over,), t.attrs, t.span))

    k = t.axes.index(place)
    first = best((*t.axes[:k], piece, *t.axes[k:]), element(plus(times(axis(piece), inner.extent), axis(inner))), inner)
    p, q = split(axis(found), few)
    places = tuple(q if a is place else axis(a) for a in t.axes)
    index = plus(times(p, inner.extent), read(first, (*places[:k], p, *places[k:])))
    second = best(t.axes, element(index), found)
    return Tensor("order", t.axes, "int32", "map", placed(index, {found: read(second)}), span=t.span)


def _sorted_in_memory(e: _Expander, t: Tensor, along: Axis, place: Axis) -> Tensor:
    """A sort of rows that no tile holds: a kernel that reads a tensor of keys, a row for each index of the other axes."""
    assert t.body is not None
    others = [a for a in t.axes if a is not place]
    row, j = Axis("row", count_elements(a.extent for a in others)), Axis("j", along.extent)
    left, flat, places = axis(row), const(0), {along: axis(j)}
    for a in reversed(others):
        left, places[a] = split(left, a.extent) if a is not others[0] else (left, left)
    for a in others:
        flat = plus(times(flat, a.extent), axis(a))
    keys = Tensor("keys", (row, j), "int32", "map", placed(key_of(t)[0], places), span=t.span)
    block = Block("order_of_keys", [keys])
    block.results = [Tensor("order", (Axis("row", row.extent), Axis("place", place.extent)), "int32", "item",
                            attrs={"block": block, "index": 0}, span=t.span)]
    e.made += [keys, *block.results]
    return Tensor("order", t.axes, "int32", "map", read(block.results[0], (flat, axis(place))), span=t.span)


def _item(e: _Expander, n: Node, at: Index) -> Scalar:
    source = n.inputs[0]
    if source not in e.items:
        e.items[source] = _loop(e, source) if source.op == "loop" and not walked(source) else _block(e, source)
    found = e.items[source][n.attrs["index"]]
    if found not in e.made:
        e.made.append(found)
    return read(found, at)


def _block(e: _Expander, n: Node) -> list[Tensor]:
    """The results of a kernel that stands in the program, or of a loop over such kernels, whose operands lie in memory."""
    operands = []
    for x in n.inputs:
        axes, dt = e.axes(x.shape), str(x.dtype)
        one = e.element(x, tuple(map(axis, axes)))
        lies = one.op == "read" and one.value.kind in ("input", "item") and one.value.dtype == dt and (
            x.shape == one.value.shape and one.args == tuple(map(axis, axes)))
        operands.append(one.value if lies else Tensor("operand", axes, dt, "map", _rounded(one, dt), span=x.span))
        e.made += [] if lies else operands[-1:]
    if n.op == "tile":
        block, results = Block(n.attrs["kernel"], operands), n.attrs["results"]
        names = [b.name for _, b in n.attrs["kernel"].func.buffers][len(operands):]
    else:
        block, carried, outputs = Block(n, operands), n.attrs["carried"], n.attrs["body"].outputs
        results = [((n.attrs["length"],) * (k >= carried) + x.shape, x.dtype) for k, x in enumerate(outputs)]
        names = [f"last{k + 1}" if k < carried else f"result{k + 1 - carried}" for k in range(len(outputs))]
    block.results = [Tensor(name, e.axes(shape), str(dt), "item", attrs={"block": block, "index": k}, span=n.span)
                     for k, (name, (shape, dt)) in enumerate(zip(names, results))]
    e.made += block.results
    return block.results


def _loop(e: _Expander, n: Node) -> list[Tensor]:
    """The results of a loop: its last states, then what its steps give along the first axis."""
    body, carried, step = n.attrs["body"], n.attrs["carried"], Axis("t", n.attrs["length"])
    inner = _Expander(e)
    states = []
    for k, (x, init) in enumerate(zip(body.inputs[:carried], n.inputs)):
        inner.tensors[x] = Tensor(f"state{k + 1}", e.axes(x.shape), str(x.dtype), "state", attrs={"index": k})
        states.append((inner.tensors[x], e.element(init, tuple(map(axis, inner.tensors[x].axes)))))
    for k, (x, source) in enumerate(zip(body.inputs[carried:], n.inputs[carried:])):
        front = (axis(step),) if k < n.attrs["scanned"] else ()
        inner.outer[x] = lambda at, source=source, front=front: e.element(source, (*front, *at))  # type: ignore[misc]
    results = []
    for k, x in enumerate(body.outputs):
        axes = states[k][0].axes if k < carried else e.axes(x.shape)
        results.append((axes, inner.element(x, tuple(map(axis, axes)))))
        if k < carried and x.op != "input":
            inner.after[x] = Tensor(f"next{k + 1}", axes, str(x.dtype), "state", attrs={"index": k, "new": True})
            inner.elements.clear()
    steps = Steps(step, tuple(states), tuple(results))
    out = []
    for k, (x, (axes, _)) in enumerate(zip(body.outputs, results)):
        own = axes if k < carried else (Axis("t", n.attrs["length"]), *axes)
        out.append(Tensor(f"last{k + 1}" if k < carried else f"result{k + 1 - carried}", own, str(x.dtype), "item",
                          attrs={"steps": steps, "index": k}, span=n.span))
    return out


VIEWS = (_reshape, _transpose, _slice, _pad)
Row = Callable[[_Expander, Node, Index], Scalar]
ROWS: dict[str, Row] = {
    **dict.fromkeys((*UNARY, *BINARY, *COMPARE, "where", "cast", "broadcast"), _element_wise),
    "constant": lambda e, n, at: const(n.attrs["value"], str(n.dtype)), "iota": lambda e, n, at: at[n.attrs["axis"]],
    "reshape": _reshape, "transpose": _transpose, "slice": _slice, "concat": _concat,
    "pad": _pad, "gather": _gather, "take_along": _gather, "item": _item,
    **dict.fromkeys(("input", "reduce", "einsum", "scan", "order"), _read)}
TENSORS: dict[str, Callable[[_Expander, Node], Tensor]] = {
    "input": lambda e, n: Tensor(n.attrs["name"], e.axes(n.shape), str(n.dtype), "input", span=n.span),
    "reduce": _reduce, "einsum": _einsum, "scan": _scan, "order": _sort}
