"""Distribution of an iteration space over the threads of a block.

A Distribution gives the points that one thread executes: loops over the thread's own points (`axes`, then `lanes`, the
innermost loop, which steps by one along one dimension so that memory accesses can be vectors), and the coordinates of a
point as expressions of the thread index and the loop variables.  Two constructors:

    from_fragment   the threads that hold an element of a Fragment execute its point; loops follow the registers
    flat            chunks of `width` consecutive points, assigned to threads cyclically: any shape, any thread count
"""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from tilelang.arith import Analyzer
from tilelang.ir import FALSE, TRUE, Binary, Cast, Const, Expr, Select, Unary, Var, const, convert, fresh, logical
from tilelang.ir.record import record
from tilelang.ir.numbers import INTEGERS, keeps_value, may_wrap, wrapped


@record
class Distribution:
    """The points of an iteration space that one thread executes.

    axes: (loop variable, extent), outermost first.  Extents are ints, or Exprs for run-time spaces.
    lanes: (variable, width) of the innermost loop, or None.  It steps by one along dimension lane_dim.
    indices: the coordinate in each dimension, in terms of the thread index, the axes and the lane variable.
    exists: false where this thread has no such point (padding, idle threads); None when always true.
    first: true in exactly one of the threads that execute the same point; None when only one does.
    axis_dims: the dimension that each axis steps along (fragments only).  register: this thread's register of the point, in
    the Fragment the distribution came from.  idle: true in threads that have points.  paddings: for each dimension, whether
    the coordinate is inside it (None: always).  exists is the conjunction of these.  partition: the Fragment given to
    from_fragment.  digits: for each dimension and each of its register digits, the loop value (None for thread digits).
    """

    extents: tuple[Any, ...]
    thread: Expr
    threads: int
    axes: tuple[tuple[Var, Any], ...]
    lanes: tuple[Var, int] | None
    lane_dim: int
    indices: tuple[Expr, ...]
    exists: Expr | None = None
    first: Expr | None = None
    axis_dims: tuple[int, ...] = ()
    register: Expr | None = None
    idle: Expr | None = None
    paddings: tuple[Expr | None, ...] = ()
    partition: Any = None
    digits: tuple[tuple[Expr | None, ...], ...] = ()

    @property
    def is_static(self) -> bool:
        return all(isinstance(n, int) for _, n in self.axes)

    @property
    def loops(self) -> tuple[tuple[Var, Any], ...]:
        """All loops, innermost (`lanes`) last."""
        return self.axes + ((self.lanes,) if self.lanes else ())


def counting(n: Any) -> str:
    """The type of a variable that counts to n, an integer or an expression."""
    return "int64" if (n.dtype.bits > 32 if isinstance(n, Expr) else n >= 1 << 31) else "int32"


def digit(value: Expr, stride: int, size: int, limit: int) -> Expr:
    """(value // stride) % size for 0 <= value < limit, without operations that have no effect in that range."""
    out = value // stride if stride > 1 else value
    return out % size if stride * size < limit else out


def conjunction(*conds: Expr | None) -> Expr | None:
    """The `and` of the conditions that are not None; None when all are."""
    out: Expr | None = None
    for c in conds:
        if c is not None and not (isinstance(c, Const) and c.value):
            out = c if out is None else logical("and", out, c)
    return out


def _idle(thread: Expr, threads: int, thread_modes: list[tuple[int, int]]) -> Expr | None:
    """A condition that holds for one thread of each set of threads that no mode distinguishes; None when not needed."""
    cond: Expr | None = None
    at = 1
    for stride, size in thread_modes:
        if stride > at:
            cond = conjunction(cond, Binary("eq", digit(thread, at, stride // at, threads), const(0), TRUE.dtype))
        at = max(at, stride * size)
    if at < threads:
        cond = conjunction(cond, thread < at)
    return cond


def from_fragment(frag: Any, thread: Expr, extents: tuple[int, ...] | None = None, width: int = 1) -> Distribution:
    """The points of a Fragment's shape (cut to `extents`), each executed by the threads that hold it.

    width: wanted vector width; reduced to what the registers along the last dimension allow.
    """
    extents = tuple(frag.shape) if extents is None else extents
    threads = frag.threads
    axes: list[tuple[int, Var, int, int]] = []
    lanes: tuple[Var, int] | None = None
    register: Expr = const(0)
    indices: list[Expr] = []
    paddings: list[Expr | None] = []
    thread_modes = sorted((m.stride, m.size) for modes in (*frag.modes, frag.copies) for m in modes
                          if m.to == "thread" and m.size > 1)
    rank = len(frag.modes)
    digits: list[tuple[Expr | None, ...]] = []
    for d, modes in enumerate(frag.modes):
        index: Expr = const(0)
        weight = 1
        terms: list[Expr] = []
        values: list[Expr | None] = []
        for k, m in enumerate(reversed(modes)):
            value: Expr | None = None
            if m.size > 1:
                if m.to == "thread":
                    terms.append(digit(thread, m.stride, m.size, threads) * weight)
                else:
                    size, step, reg = m.size, weight, m.stride
                    if k == 0 and d == rank - 1:
                        w = _common_width(size, width)
                        if w > 1:
                            lanes = (fresh("v"), w)
                            terms.append(lanes[0])
                            value = lanes[0]
                            register = lanes[0] * reg
                            size, step, reg = size // w, weight * w, reg * w
                    if size > 1:
                        axes.append((reg, fresh("r"), size, d))
                        terms.append(axes[-1][1] * step)
                        outer = axes[-1][1] * (step // weight)
                        value = outer if value is None else outer + value
                    value = const(0) if value is None else value
            values.insert(0, value)
            weight *= m.size
        digits.append(tuple(values))
        for t in reversed(terms):
            index = index + t
        indices.append(index)
        if lanes is not None and d == rank - 1 and extents[d] % lanes[1] == 0:  # all lanes of a vector exist, or none
            index = sum((t for t in reversed(terms) if t is not lanes[0]), const(0))
        paddings.append(index < extents[d] if weight > extents[d] else None)
    axes.sort(key=lambda a: -a[0])
    first: Expr | None = None
    for m in frag.copies:
        if m.size > 1:
            first = conjunction(first, Binary("eq", digit(thread, m.stride, m.size, threads), const(0), TRUE.dtype))
    for stride, v, _, _ in reversed(axes):
        register = v * stride + register
    idle = _idle(thread, threads, thread_modes)
    return Distribution(extents, thread, threads, tuple((v, n) for _, v, n, _ in axes), lanes, rank - 1, tuple(indices),
                        conjunction(idle, *paddings), first, tuple(d for *_, d in axes), register, idle,
                        tuple(paddings), frag, tuple(digits))


def _common_width(size: int, width: int) -> int:
    while width > 1 and size % width:
        width //= 2
    return max(1, width)


def flat(extents: tuple[Any, ...], thread: Expr, threads: int, width: int = 1, lane_dim: int = -1) -> Distribution:
    """Chunks of `width` consecutive points along lane_dim, assigned to the threads cyclically.

    extents: ints or Exprs.  width must divide the extent of lane_dim, which must be an int when width > 1.
    """
    rank = len(extents)
    lane_dim %= rank
    lanes = (fresh("v"), width) if width > 1 else None
    order = [d for d in range(rank) if d != lane_dim] + [lane_dim]  # slowest to fastest
    sizes = [extents[d] for d in order]
    if lanes:
        sizes[-1] //= width
    if not all(isinstance(s, int) for s in sizes):
        axes, digits, exists = _runtime_loops(sizes, thread, threads)
    else:
        axes, digits, exists = _static_loops(sizes, thread, threads)
    indices: list[Expr] = [const(0)] * rank
    for d, g in zip(order, digits):
        indices[d] = g
    if lanes:
        indices[lane_dim] = indices[lane_dim] * width + lanes[0]
    return Distribution(tuple(extents), thread, threads, tuple(axes), lanes, lane_dim, tuple(indices), exists)


def private(extents: tuple[int, ...], thread: Expr, threads: int, width: int = 1) -> Distribution:
    """Every thread executes every point, for loops over per-thread arrays.  width must divide the last extent."""
    axes: list[tuple[Var, int]] = []
    indices: list[Expr] = []
    lanes = (fresh("v"), width) if width > 1 else None
    for d, n in enumerate(extents):
        step = width if d == len(extents) - 1 else 1
        index: Expr = const(0)
        if n // step > 1:
            axes.append((fresh("r"), n // step))
            index = axes[-1][0] * step
        if step > 1 and lanes:
            index = index + lanes[0]
        indices.append(index)
    return Distribution(tuple(extents), thread, threads, tuple(axes), lanes, len(extents) - 1, tuple(indices))


def _static_loops(sizes: list[int], thread: Expr, threads: int) -> tuple[list[Any], list[Expr], Expr | None]:
    """(loops, digits slowest first, existence condition) of one thread in a static space; sizes: fastest last."""
    total = int(np.prod(sizes, dtype=np.int64))
    trips = -(-total // threads) if total else 0
    digits: list[Expr] = [const(0)] * len(sizes)
    if trips <= 1:
        limit = threads
        at: Expr = thread
        for k in reversed(range(len(sizes))):
            if sizes[k] > 1:
                digits[k] = at % sizes[k] if sizes[k] < limit else at
                at, limit = at // sizes[k], -(-limit // sizes[k])
        if total < threads:
            # The slowest digit exceeds its size in idle threads; they are predicated off.
            return [], digits, (thread < total) if total else FALSE
        return [], digits, None
    axes: list[Any] = []
    split = _even_split(sizes, threads)
    if split is None:
        it = fresh("it", counting(total + threads))
        c = it * threads + thread
        left = trips * threads
        for k in reversed(range(len(sizes))):
            digits[k] = c % sizes[k] if sizes[k] < left else c
            c, left = c // sizes[k], -(-left // sizes[k])
        exists = it * threads + thread < total if total % threads else None
        return [(it, trips)], digits, exists
    at, limit = thread, threads
    for k in reversed(range(len(sizes))):
        across, own = split[k]  # digit = own_loop * across + digit of the thread index
        part = (at % across if across < limit else at) if across > 1 else const(0)
        if across > 1:
            at, limit = at // across, limit // across
        if own > 1:
            axes.insert(0, (fresh("it", counting(sizes[k])), own))
            part = axes[0][0] * across + part
        digits[k] = convert(part)
    return axes, digits, None


def _even_split(sizes: list[int], threads: int) -> list[tuple[int, int]] | None:
    """For each dimension (threads across, steps of each) when the threads evenly fill the fastest dimensions; else None."""
    out = [(1, n) for n in sizes]
    left = threads
    for k in reversed(range(len(sizes))):
        if left == 1:
            break
        n = sizes[k]
        if left % n == 0:
            out[k] = (n, 1)
            left //= n
        elif n % left == 0:
            out[k] = (left, n // left)
            left = 1
        else:
            return None
    return out if left == 1 else None


def _runtime_loops(sizes: list[Any], thread: Expr, threads: int) -> tuple[list[Any], list[Expr], Expr | None]:
    total: Any = prod(sizes)
    it = fresh("it", counting(total))
    c: Expr = it * threads + thread
    exists = c < total
    digits: list[Expr] = [const(0)] * len(sizes)
    for k in reversed(range(len(sizes))):
        digits[k] = c % sizes[k] if k else c
        c = c // sizes[k]
    return [(it, (total + (threads - 1)) // threads)], digits, exists


_NUMPY = INTEGERS | {"floordiv": np.floor_divide, "floormod": np.mod}


def index_values(e: Any, env: dict[Var, np.ndarray]) -> np.ndarray | None:
    """Evaluate an index expression on whole NumPy grids of its variables.

    Returns None when it contains anything else (a load, another variable).  truncdiv and truncmod are not evaluated; for
    non-negative indices they equal floor division.
    """
    if isinstance(e, int):
        return np.asarray(e)
    if isinstance(e, Const):
        return np.asarray(e.value)
    if isinstance(e, Var):
        return env.get(e)
    if isinstance(e, Binary):
        fn = _NUMPY.get(e.op)
        a, b = index_values(e.a, env), index_values(e.b, env)
        if fn is None or a is None or b is None:
            return None
        if e.op in ("floordiv", "floormod") and not (e.b.value if isinstance(e.b, Const) else np.all(b)):
            return None
        return wrapped(fn(a, b), e.dtype) if may_wrap(e.dtype, e.op) else fn(a, b)
    if isinstance(e, Cast) and e.dtype.is_int and e.value.dtype.is_int:
        a = index_values(e.value, env)
        return a if a is None or keeps_value(e.value.dtype, e.dtype) else wrapped(a, e.dtype)
    if isinstance(e, Select):
        c, a, b = (index_values(x, env) for x in (e.cond, e.a, e.b))
        return None if c is None or a is None or b is None else np.where(c, a, b)
    if isinstance(e, Unary) and e.op in ("neg", "not"):
        a = index_values(e.a, env)
        if a is None or e.op == "not":
            return None if a is None else np.logical_not(a)
        return wrapped(np.negative(a), e.dtype) if may_wrap(e.dtype) else np.negative(a)
    return None


def bind_ranges(dist: Distribution, analyzer: Analyzer) -> Analyzer:
    """An analyzer that also knows the ranges of the distribution's loop variables."""
    for v, n in dist.loops:
        hi = n - 1 if isinstance(n, int) else analyzer.interval(n)[1]
        analyzer = analyzer.bind(v, 0, hi - (0 if isinstance(n, int) else 1) if hi is not None else None)
    return analyzer
