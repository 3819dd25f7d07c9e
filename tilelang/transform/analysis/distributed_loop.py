"""A parallel loop while it is distributed over threads: its accesses, and which threads make those to fragments, from tables.

An access `F[f(i, j)]` inside a distributed loop is direct when every thread that executes a point owns the element that the
point accesses. Then the register is a function of the loop variables only (short code, a compile-time constant once the
register loops are unrolled). An access that is not direct goes through shared memory (lower_parallel.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import field
from functools import cached_property
from typing import Any

import numpy as np

from tilelang.arith import simplify
from tilelang.ir import (AddressOf, Buffer, Const, Expr, For, If, Load, Node, Select, Stmt, Store, Var, While, binary, children,
                         const, controls, convert, fields_of, inner, substitute, walk, DYNAMIC, FRAGMENT, GLOBAL, STATIC)
from tilelang.ir.record import record, state
from tilelang.layout import REGISTER
from tilelang.layout.distinct import distinct, distinct_pairs, meets_several
from tilelang.ops.distribute import Distribution, index_values

_LARGE = 1 << 20  # a bound that all points of a loop are below


@record
class Touch:
    """Result of `resolve`. register: index into the thread's local array; None, with the reason in `why`, when not direct.

    repeated: several points of the loop write one element (an accumulation along a loop dimension).
    """

    register: Expr | None
    why: str = ""
    repeated: bool = False


class Grid:
    """NumPy grids of all variables of a static loop nest: thread, register loops, lanes, loop variables, inner loops."""

    def __init__(self, dist: Distribution, loop_vars: tuple[Var, ...], thread: Var,
                 inner: Sequence[tuple[Var, int]] = ()) -> None:
        self.dist, self.loop_vars, self.thread, self.inner = dist, loop_vars, thread, list(inner)
        self.loops: list[tuple[Var, int]] = [*dist.loops, *inner]
        self.shape = tuple(n for _, n in [(thread, dist.threads), *self.loops])

    @cached_property
    def env(self) -> dict[Var, np.ndarray]:
        """Made where a fragment is asked for: loops over global memory may have more iterations than fit a table."""
        env: dict[Var, np.ndarray] = {}
        for k, (v, n) in enumerate([(self.thread, self.dist.threads), *self.loops]):
            shape = [1] * len(self.shape)
            shape[k] = n
            env[v] = np.arange(n).reshape(shape)
        for v, index in zip(self.loop_vars, self.dist.indices):
            got = index_values(index, env)
            assert got is not None, "indices of a distribution are made of its own variables"
            env[v] = got
        return env

    @cached_property
    def valid(self) -> np.ndarray | None:
        """Which points exist; None where all do."""
        return None if self.dist.exists is None else index_values(self.dist.exists, self.env)

    def with_inner(self, inner: list[tuple[Var, int]]) -> Grid:
        """The grid with more axes: static serial loops inside the body."""
        return self if inner == self.inner else Grid(self.dist, self.loop_vars, self.thread, inner)


def resolve(frag: Any, buffer: Buffer, indices: tuple[Expr, ...], grid: Grid, is_write: bool) -> Touch:
    """Whether buffer[indices], with layout frag, is direct over the grid, and its register."""
    known = _by_structure(frag, indices, grid, is_write)
    if known is not None:
        return Touch(known)
    values: list[np.ndarray] = []
    outside = False
    for d, i in enumerate(indices):
        got = index_values(i, grid.env)
        if got is None and _picks_register(frag, d, i, grid):
            got, outside = np.asarray(0), True
        if got is None:
            return Touch(None, f"index {d} of `{buffer.name}` is not a function of the parallel loop's variables")
        values.append(got)
    inside: Any = True if grid.valid is None else grid.valid
    for v, n in zip(values, frag.shape):
        if v.min() < 0 or v.max() >= n:
            inside = inside & (v >= 0) & (v < n)  # excluded by the condition around the access
    values = [np.clip(v, 0, n - 1) for v, n in zip(values, frag.shape)]
    at = np.broadcast_arrays(*values, np.asarray(inside), grid.env[grid.thread]) if values else []
    *at, mask, thread = at
    owners = np.asarray(frag.owners())
    element = np.ravel_multi_index(tuple(at), tuple(frag.shape))
    table = owners.reshape(owners.shape[0], -1)
    owned = np.zeros(element.shape, bool)
    for rep in table:
        owned |= rep[element] == thread
    if not np.all(owned | ~mask):
        return Touch(None, f"threads need elements of `{buffer.name}` that others own",
                     is_write and _repeats(element, mask, grid))
    if is_write:
        full = np.broadcast_to(element, grid.shape), np.broadcast_to(mask, grid.shape)
        if not _all_owners_write(*full, np.broadcast_to(thread, grid.shape), table, grid):
            return Touch(None, f"not every owner of an element of `{buffer.name}` computes it", _repeats(element, mask, grid))
    if outside:
        return Touch(_formula(frag, indices, grid))
    registers = np.asarray(frag.register_table()).reshape(-1)[element]
    return Touch(_fit(registers, mask, grid, frag, indices))


def _picks_register(frag: Any, d: int, index: Expr, grid: Grid) -> bool:
    """Whether an index that the loop does not determine (for example that of an outer loop) only selects among registers of the
    same threads, so that the owner of the element does not depend on it."""
    bound = {*grid.env, *grid.loop_vars}
    free = not any(x in bound for x in walk(index, Var))
    return free and all(m.to == REGISTER for m in frag.modes[d])


def _by_structure(frag: Any, indices: tuple[Expr, ...], grid: Grid, is_write: bool) -> Expr | None:
    """The register of an access that is direct because its digits are those of the loop; None when that cannot be shown.

    The fragment's digits and replication must distinguish all threads: then a thread with the digits of an element owns
    it. For a write the loop must have no further dimension, and the same replication: then each owner executes it once.
    """
    dist = grid.dist
    if dist.partition is None or frag.threads != dist.threads:
        return None
    told = 1
    for m in [m for ms in frag.modes for m in ms if m.to == "thread"] + list(frag.copies):
        told *= m.size
    if told != frag.threads:
        return None
    used: set[int] = set()
    register: Expr = const(0)
    for d, i in enumerate(indices):
        if not isinstance(i, Var):
            if not (isinstance(i, Const) and i.value == 0 and frag.shape[d] == 1 and not frag.modes[d]):
                return None
            continue
        k = next((k for k, v in enumerate(grid.loop_vars) if v is i), None)
        if k is None or k in used or dist.extents[k] != frag.shape[d]:
            return None
        used.add(k)
        ours, loops = frag.modes[d], dist.partition.modes[k]
        if len(ours) != len(loops) or any(
                a.size != b.size or a.to != b.to or (a.to == "thread" and a.stride != b.stride) for a, b in zip(ours, loops)):
            return None
        for m, value in zip(ours, dist.digits[k]):
            if value is not None:
                register = register + value * m.stride
    if is_write and (any(n > 1 for k, n in enumerate(dist.extents) if k not in used) or
                     set(frag.copies) != set(dist.partition.copies)):
        return None
    return register


def shared_elements(grid: Any, s: Store, conds: tuple[Expr, ...]) -> bool:
    """Whether several threads update one element by the store `X[i] = f(X[i], …)` under conditions.

    False also for stores that do not read their element. Conditions that are read from memory may hold. For indices that are,
    no conflict is assumed where X is in memory, since the program itself distributes those updates, and a conflict is assumed
    where X is a fragment.
    """
    if not any(y.buffer is s.buffer and y.indices == s.indices for y in walk(s.value, Load)):
        return False
    names = {v for e in (*s.indices, *conds) for v in walk(e, Var)} - set(grid.env)
    # What the loop does not set is the same at all points: indices may take any value for it, conditions may need some other.
    asked = {v for c in conds for v in walk(c, Var)} & names if s.buffer.scope_name == FRAGMENT else set()
    choices: list[dict[Var, int]] = [{}, *({v: n} for v in sorted(asked, key=lambda v: v.name) for n in (1, _LARGE))]
    return any(_meet(grid, s, conds, {v: np.asarray(c.get(v, 0)) for v in names}) for c in choices)


def _meet(grid: Any, s: Store, conds: tuple[Expr, ...], chosen: dict[Var, Any]) -> bool:
    """Whether several threads update one element, given the variables that the loop does not set."""
    env = {**grid.env, **chosen}
    values = [index_values(i, env) for i in s.indices]
    masks = [index_values(c, env) for c in conds] + ([] if grid.valid is None else [grid.valid])
    masks += [] if grid.dist.first is None else [index_values(grid.dist.first, env)]
    masks = [m for m in masks if m is not None]
    if any(v is None for v in values):
        return s.buffer.scope_name == FRAGMENT and _several_threads(grid)
    full = np.broadcast_arrays(*values, *masks, *[  # type: ignore[arg-type]
                               grid.env[v] for v in grid.env if v in dict(grid.loops)],
                               grid.env[grid.thread])
    at = np.stack([v.ravel() for v in full[:len(values)]])
    live = np.ones(at.shape[1], bool)
    for m in full[len(values):len(values) + len(masks)]:
        live &= m.ravel().astype(bool)
    low = at.min(axis=1, keepdims=True)
    element = np.ravel_multi_index(tuple(at - low), tuple((at.max(axis=1) - low[:, 0] + 1).tolist()))[live]
    return meets_several(element, full[-1].ravel()[live])


def _several_threads(grid: Any) -> bool:
    """Whether more than one thread has points of the loop."""
    masks = [np.asarray(True)] + ([] if grid.valid is None else [grid.valid])
    first = None if grid.dist.first is None else index_values(grid.dist.first, grid.env)
    masks += [] if first is None else [first]
    thread, *live = np.broadcast_arrays(grid.env[grid.thread], *masks)
    return len(distinct(thread[np.logical_and.reduce(live)])) > 1


def _points(grid: Grid) -> np.ndarray:
    """A number per point of the iteration space (inner serial loops counted as one point)."""
    out: Any = 0
    for v, n in zip(grid.loop_vars, grid.dist.extents):
        out = out * int(n) + grid.env[v]
    return np.asarray(out)


def _repeats(element: np.ndarray, mask: np.ndarray, grid: Grid) -> bool:
    """Whether two points of the iteration space access one element."""
    mask = np.broadcast_to(mask, grid.shape)
    point = np.broadcast_to(_points(grid), grid.shape)[mask]
    return meets_several(np.broadcast_to(element, grid.shape)[mask], point)


def _all_owners_write(element: np.ndarray, mask: np.ndarray, thread: np.ndarray, owners: np.ndarray, grid: Grid) -> bool:
    """Whether each owner of a written element executes every write to it."""
    threads = grid.dist.threads
    if owners.shape[0] == 1 and np.bincount(element[mask].reshape(-1), minlength=1).max() <= 1:
        return True  # each element has one owner and one write
    keys = (element[mask].astype(np.int64) * threads + thread[mask])
    pairs, counts = np.unique(keys, return_counts=True)
    per_element = pairs // threads
    elements, writers = np.unique(per_element, return_counts=True)
    distinct = 1 + (np.diff(np.sort(owners[:, elements], axis=0), axis=0) != 0).sum(axis=0)
    if np.any(writers != distinct):
        return False
    # Each writer of an element makes the same number of writes: with writers == owners, no owner misses one.
    low = np.full(int(elements.max()) + 1 if len(elements) else 1, np.iinfo(np.int64).max)
    high = np.zeros_like(low)
    np.minimum.at(low, per_element, counts)
    np.maximum.at(high, per_element, counts)
    if not np.array_equal(low[elements], high[elements]):
        return False
    if not grid.loop_vars:
        return True
    point = np.broadcast_to(_points(grid), grid.shape)[mask]
    written, _ = distinct_pairs(element[mask].astype(np.int64), point)
    inner = int(np.prod([n for _, n in grid.inner], dtype=np.int64)) if grid.inner else 1
    total = np.bincount(written, minlength=len(low))[elements]
    return bool(np.all(low[elements] >= total)) if inner > 1 else bool(np.array_equal(low[elements], total))


def _formula(frag: Any, indices: tuple[Expr, ...], grid: Grid) -> Expr:
    """The register by the layout's own formula, in terms of the thread and the register loops. The thread cancels out, and the
    register is a constant once the loops are unrolled."""
    env = {v: (0, n - 1) for v, n in grid.loops} | {grid.thread: (0, grid.dist.threads - 1)}
    where = dict(zip(grid.loop_vars, grid.dist.indices))
    return simplify(substitute(convert(frag.register_of(indices)), where), env)


def _fit(registers: np.ndarray, mask: np.ndarray, grid: Grid, frag: Any, indices: tuple[Expr, ...]) -> Expr:
    """The register as sum of loop variable * stride, or as such a sum ^ constant, where the table has that form; else the
    layout's own formula."""
    registers = np.broadcast_to(registers, grid.shape)
    mask = np.broadcast_to(mask, grid.shape)
    if not mask.any():
        return const(0)
    first = int(registers[np.unravel_index(int(np.argmax(mask)), mask.shape)])
    for flipped in dict.fromkeys((0, first)):
        out = _linear(registers ^ flipped, mask, grid)
        if out is not None:
            return binary("bitxor", out, flipped) if flipped else out
    return _formula(frag, indices, grid)


def _linear(registers: np.ndarray, mask: np.ndarray, grid: Grid) -> Expr | None:
    """A table as sum of loop variable * stride; None where it has another form."""
    start = np.unravel_index(int(np.argmax(mask)), mask.shape)
    model: Any = int(registers[start])
    expr: Expr | None = None
    base = int(registers[start])
    for k, (v, n) in enumerate(grid.loops, 1):
        if n == 1:
            continue
        line = tuple(slice(None) if q == k else start[q] for q in range(len(start)))
        ok = np.flatnonzero(mask[line])
        if len(ok) < 2:
            continue
        stride, rest = divmod(int(registers[line][ok[-1]]) - int(registers[line][ok[0]]), int(ok[-1] - ok[0]))
        if rest:
            return None
        base -= stride * start[k]
        model = model + stride * (grid.env[v] - start[k])
        if stride:
            term = v * stride
            expr = term if expr is None else expr + term
    if not np.array_equal(np.broadcast_to(model, grid.shape)[mask], registers[mask]):
        return None
    base_c = const(int(base))
    return base_c if expr is None else expr + base_c


# ---- the state of a distributed loop -------------------------------------------------------------------


@state
class Loop:
    """A distributed loop while it is lowered.

    vars: user's loop variables, bound to a point's coordinates. base: variable of the first lane along the lane
    dimension. staged: the shared buffer that stands for a fragment, from which element on. touches: how each fragment access
    resolves. vloads / vstores: accesses moved to vectors around the lane loop, to the element of a staging array that
    replaces them. values: what the bound coordinates equal.
    loose: vectors may pass the end of a row; a run-time test selects vectors or scalars. scalar: the branch with scalars.
    """

    vars: tuple[Var, ...]
    dist: Distribution
    grid: Grid | None
    is_async: bool = False
    base: Var | None = None
    staged: dict[Buffer, tuple[Buffer, tuple[Expr, ...]]] = field(default_factory=dict)
    touches: dict[tuple[Buffer, tuple[Expr, ...], bool], Touch] = field(default_factory=dict)
    vloads: dict[Load, tuple[Buffer, Expr]] = field(default_factory=dict)
    vstores: dict[int, tuple[Buffer, Expr]] = field(default_factory=dict)
    inner: list[tuple[Var, int]] = field(default_factory=list)
    values: dict[Any, Any] = field(default_factory=dict)
    loose: bool = False
    scalar: bool = False

    @property
    def lane_var(self) -> Var | None:
        return self.vars[self.dist.lane_dim] if self.dist.lanes and self.vars else None

    def touch(self, layout_of: Callable[[Buffer], Any], buffer: Buffer, indices: tuple[Expr, ...], is_write: bool) -> Touch:
        """How a fragment access resolves; computed once."""
        key = (buffer, indices, is_write)
        got = self.touches.get(key)
        if got is None:
            if self.grid is None:
                got = Touch(None, f"`{buffer.name}` is indexed in a loop of run-time extent")
            else:
                used = {x for i in indices for x in walk(i, Var)}
                grid = self.grid.with_inner([(v, n) for v, n in self.inner if v in used])
                got = resolve(layout_of(buffer), buffer, indices, grid, is_write)
            self.touches[key] = got
        return got


def accesses(body: Stmt, around: Sequence[tuple[Var, int]] = ()) -> list[tuple[Any, list[tuple[Var, int]]]]:
    """Loads, stores and addresses below body, each with the static serial loops around it."""
    below = inner(body)
    own = [e for e in children(body) if not isinstance(e, Stmt)] if below else [body]
    out = [(x, [*around]) for e in own for x in walk(e, Load, Store, AddressOf)]
    around = [*around, *serial_axis(body)] if isinstance(body, For) else around
    return out + [y for x in below for y in accesses(x, around)]


def serial_axis(s: For | While) -> list[tuple[Var, int]]:
    """The variable and extent of a loop from 0 whose number of iterations is known; nothing for others."""
    static = isinstance(s, For) and isinstance(s.extent, Const) and isinstance(s.start, Const) and s.start.value == 0
    return [(s.var, int(s.extent.value))] if static else []  # type: ignore[union-attr]


def in_order(n: Any, conditional: bool = False) -> Iterator[tuple[Node, bool]]:
    """Memory accesses below n in order of evaluation, each with whether it may be skipped or repeated."""
    match n:
        case Store():
            yield from in_order((*n.indices, n.value), conditional)
            yield n, conditional
        case Load() | AddressOf():
            yield from in_order(n.indices, conditional)
            yield n, conditional
        case If():
            yield from in_order(n.cond, conditional)
            yield from in_order((n.then, n.orelse), True)
        case Select():
            yield from in_order(n.cond, conditional)
            arms = [list(in_order(e)) for e in (n.a, n.b)]
            both = set.intersection(*({x for x, maybe in arm if not maybe} for arm in arms))
            yield from ((x, conditional or x not in both) for arm in arms for x, _ in arm)
        case For() | While():
            once = [*in_order(controls(n), conditional), *in_order(n.body, True)]
            yield from once * 2  # the body's beginning follows its end
        case Node():
            short = getattr(n, "op", "") in ("and", "or")
            for f in fields_of(type(n)):
                if f not in ("buffer", "attrs"):
                    yield from in_order(getattr(n, f), conditional or (short and f == "b"))
        case tuple():
            for x in n:
                yield from in_order(x, conditional)


def is_memory(buffer: Buffer) -> bool:
    """Whether a buffer is in memory that several threads see."""
    return buffer.scope_name in (GLOBAL, STATIC, DYNAMIC)


def depends(e: Node, var: Var) -> bool:
    """Whether var occurs below e."""
    return any(x is var for x in walk(e))
