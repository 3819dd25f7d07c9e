"""Reductions and scans by a function of two states: T.reduce_with, T.scan_with, T.reduce_argmax, T.reduce_argmin."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from tilelang.ir import (Bind, Call, Const, Expr, Load, Region, binary, cast, const, contains, convert, dtype,
                         int_range, is_large, load, logical, select, substitute, unary, walk, PRIVATE)
from tilelang.ops.combine import Combine, ReduceWith, ScanWith
from tilelang.ops.reduce import identity as neutral
from tilelang.ops.states import ELEMENT, LEFT, POSITION, RIGHT, given, operand
from tilelang.target.intrinsics import is_pure

from .loops import Parallel, grid
from .tile import EMITTED, copy, dimension, emit_op, temporary, tile_of
from .tracing.builder import Builder, Emitted, check_constant, need_builder
from .tracing.flags import flag
from .tracing.scope import BodyFrame, Frame
from .tracing.state import describe, error, example

Function = Callable[..., Any]


def _tuple(x: Any) -> tuple[Any, ...]:
    return tuple(x) if isinstance(x, (tuple, list)) else (x,)


class _States:
    """The functions of one call: what a state consists of, and the expressions of its operands.

    single: a state is one value, which combine takes and returns as it is, without a tuple.
    """

    def __init__(self, b: Builder, what: str, srcs: Sequence[Region], outs: Sequence[Region | None], combine: Any,
                 identity: Any, start: Any) -> None:
        self.b, self.what, self.single = b, what, not isinstance(identity, (tuple, list))
        given_identity = _tuple(identity)
        self.count = len(given_identity)
        if self.count != len(outs) or start is None and self.count != len(srcs):
            raise error("combine-operand", f"{what} has {len(srcs)} sources, {len(outs)} results and an identity of "
                        f"{self.count} values", expected="a result (or None) for each value, and a source without start",
                        found=f"{len(srcs)} sources, {len(outs)} results, {self.count} values")
        elements = [operand(ELEMENT, k, r.dtype) for k, r in enumerate(srcs)]
        first = elements if start is None else self.values(start, "start", elements)
        types = [o.dtype if o is not None else convert(e).dtype if isinstance(e, Expr) else convert(v).dtype
                 for o, e, v in zip(outs, given_identity, first)]
        self.first = self.cast(first, types)
        self.identity = tuple(b.let("identity", e) if contains(e, Load) else e for e in self.cast(given_identity, types))
        a, c = ([operand(side, k, t) for k, t in enumerate(types)] for side in (LEFT, RIGHT))
        pair = (a[0], c[0]) if self.single else (tuple(a), tuple(c))
        self.joined = self.cast(self.values(combine, "combine", pair), types)
        self.results = tuple(a)

    def values(self, fn: Any, name: str, args: Sequence[Any]) -> list[Any]:
        """What a function of the user gives: an expression for each value of a state."""
        if not callable(fn):
            raise error("combine-operand", f"{name} of {self.what} is «a function», found {describe(fn)}")
        frame = BodyFrame()
        self.b.frames.append(frame)
        try:
            out = fn(*args)
        finally:
            self.b.frames.remove(frame)
        got = [out] if self.single and not isinstance(out, (tuple, list)) else list(_tuple(out))
        if len(got) != self.count or any(v is None or isinstance(v, str) for v in got):
            raise error("combine-result", f"{name} of {self.what} gives {describe(out)}, a state has «{self.count} values»",
                        found=describe(out) if len(got) == self.count else f"{len(got)} values")
        known: dict[Any, Any] = {}
        for s in frame.stmts:
            if not isinstance(s, Bind) or any(not is_pure(x.op) for x in walk(s, Call)):
                raise error("combine-statement", f"{name} of {self.what} contains a statement that stores or has another "
                            "effect",
                            found="a call with an effect" if isinstance(s, Bind) else f"a {type(s).__name__} statement")
            known[s.var] = substitute(s.value, known)
        exprs = [substitute(convert(v), known) if isinstance(v, Expr) or hasattr(v, "__tilelang_expr__") else v for v in got]
        if any(isinstance(e, Expr) and is_large(e) for e in exprs):
            raise error("combine-result", f"{name} of {self.what} gives ‹an expression of thousands of operations›",
                        expected="a short expression for each value")
        return exprs

    def cast(self, values: Sequence[Any], types: Sequence[dtype]) -> tuple[Expr, ...]:
        """The values in the types of a state."""
        out = []
        for v, t in zip(values, types):
            e = convert(v)
            check_constant(e, t)
            out.append(const(v, t) if isinstance(v, (int, float)) and isinstance(e, Const) and t.is_float else cast(e, t))
        return tuple(out)


def _operands(b: Builder, what: str, srcs: Any, outs: Any, updates: bool) -> tuple[list[Region], list[Any], list[Any]]:
    """(sources, results or None, what copies the results back) of a call; updates: the old results are read."""
    sources = [tile_of(b, x, f"a source of {what}")[0] for x in _tuple(srcs)]
    results = [(None, None) if x is None else tile_of(b, x, f"a result of {what}", updates) for x in _tuple(outs)]
    if not sources or all(r is None for r, _ in results):
        raise error("combine-operand", f"{what} needs a source and a result", expected="tiles", found="none")
    return sources, [r for r, _ in results], [put for _, put in results if put is not None]


def _emit(b: Builder, op: type[Combine], srcs: Sequence[Region], outs: Sequence[Region | None], states: Any, dim: int,
          puts: Sequence[Callable[[], None]], **options: Any) -> Emitted:
    kept = [k for k, r in enumerate(outs) if r is not None]
    emit_op(b, op(tuple(srcs), tuple(outs[k] for k in kept), states.first, states.joined, states.identity,  # type: ignore[misc]
                  tuple(states.results[k] for k in kept), dim, **options, span=b.here()))
    for put in puts:
        put()
    return EMITTED


@example('T.reduce_with(acc, m, lambda a, b: T.max(a, b), -T.infinity("float32"), dim=1, commutative=True)')
def reduce_with(srcs: Any, outs: Any, combine: Function, identity: Any, dim: int = -1, start: Function | None = None,
                clear: bool = True, commutative: bool = False) -> Emitted:
    """outs = the elements of srcs along dim, combined by a function; executed by the whole block.

    srcs: a shared or fragment tile (or region of one), or a tuple of tiles of one shape.  outs: the same for results, of that
    shape without dimension dim (or with 1 there); None for a value that is not wanted.  A state has one value for each of
    outs, of its dtype.
    combine(a, b): the state of elements a followed by elements b, associative: a scalar, or tuples of scalars where identity
    is a tuple.  A function of expressions, or a T.macro without stores.  identity: the state that changes no other.
    start(x, …): the state of one element of each source; without it, the elements themselves.
    clear=False: the old values of outs stand first.  commutative=True: combine(a, b) is combine(b, a), which may be faster.
    Elements are combined in their order, in any grouping.
    Raises combine-operand, combine-result, combine-statement, combine-shape, combine-scope, reduce-dim.
    """
    what = "T.reduce_with"
    b = need_builder(what)
    cleared, option = flag(clear, "clear"), flag(commutative, "commutative")
    sources, results, puts = _operands(b, what, srcs, outs, not cleared)
    states = _States(b, what, sources, results, combine, identity, start)
    along = dimension(dim, sources[0], "reduce-dim")
    if cleared:
        return _emit(b, ReduceWith, sources, results, states, along, puts, commutative=option)
    if any(r is None for r in results):
        raise error("combine-operand", f"{what} with clear=False needs all values of a state", expected="no None in outs",
                    found="None in outs")
    new = [temporary(b, r.buffer, tuple(r.extents)) for r in results]
    join = partial(_join, b, [r.buffer for r in results], [t.buffer for t in new], states.joined)
    return _emit(b, ReduceWith, sources, [t.region() for t in new], states, along, [join, *puts], commutative=option)


def _each(like: Any) -> Frame:
    """A loop over the elements of a tile, of the block or of each thread as the tile is."""
    return (grid if like.scope_name in PRIVATE else Parallel)(*like.shape)


def _join(b: Builder, old: Sequence[Any], new: Sequence[Any], joined: Sequence[Expr]) -> None:
    """old = the states old and new, joined at each place."""
    with _each(old[0]) as index:
        where = tuple(index)  # one index unpacks to itself
        out = given(tuple(joined), {LEFT: [load(o, where) for o in old], RIGHT: [load(n, where) for n in new]})
        for o, v in zip(old, [b.let("joined", e) for e in out]):
            b.store(o, where, v)


@example("T.scan_with(x_s, x_s, lambda a, b: a + b, 0.0)   # T.cumsum(x_s)")
def scan_with(srcs: Any, outs: Any, combine: Function, identity: Any, dim: int = 0, reverse: bool = False,
              start: Function | None = None) -> Emitted:
    """outs[…, i, …] = the elements of srcs up to i along dim, combined by a function; executed by the whole block.

    srcs, outs, combine, identity, start: as T.reduce_with, with results of the sources' shape; srcs may be outs.
    reverse: from the end: element i and those after it, the last one standing first.
    """
    what = "T.scan_with"
    b = need_builder(what)
    sources, results, puts = _operands(b, what, srcs, outs, False)
    states = _States(b, what, sources, results, combine, identity, start)
    along = dimension(dim, sources[0], "scan-dim")
    return _emit(b, ScanWith, sources, results, states, along, puts, reverse=flag(reverse, "reverse"))


class _Best:
    """The states of argmax and argmin: a value and its index, the smallest one of equal values.

    An element that is NaN counts as the identity, with an index behind those of all others: n more than its own.  With
    nan_propagate NaN is the best value.
    """

    def __init__(self, kind: str, source: Region, n: int, nan_propagate: bool, types: Sequence[dtype | None]) -> None:
        given_type = source.dtype
        narrow = given_type.is_float and given_type.bits < 16
        dt = dtype("float32") if narrow else dtype("uint8") if given_type.is_bool else given_type
        value, at, last = cast(operand(ELEMENT, 0, given_type), dt), operand(POSITION, 0, "int32"), int_range(dtype("int32"))[1]
        low = const(neutral(kind, dt), dt)
        ignored = dt.is_float and not nan_propagate
        nan = binary("ne", value, value)
        self.first = (select(nan, low, value), select(nan, at + n, at)) if ignored else (value, at)
        self.identity: tuple[Expr, ...] = (low, const(last))
        (v, i), (w, j) = ((operand(side, 0, dt), operand(side, 1, "int32")) for side in (LEFT, RIGHT))
        better, equal = binary("gt" if kind == "max" else "lt", w, v), binary("eq", v, w)
        if dt.is_float and nan_propagate:
            lost, won = binary("ne", v, v), binary("ne", w, w)
            better = logical("or", better, logical("and", won, unary("not", lost)))
            equal = logical("or", equal, logical("and", won, lost))
        take = logical("or", better, logical("and", equal, binary("lt", j, i)))
        self.joined = (select(take, w, v, False), select(take, j, i, False))
        index = select(i >= n, i - n, i) if ignored else i
        self.results = tuple(r if t is None else cast(r, t) for r, t in zip((v, index), types))


def _arg(kind: str, buffer: Any, out: Any, dim: int, values: Any, nan_propagate: bool) -> Emitted:
    what = f"T.reduce_arg{kind}"
    b = need_builder(what)
    sources, (best, index), puts = _operands(b, what, buffer, (values, out), False)
    along, source = dimension(dim, sources[0], "reduce-dim"), sources[0]
    n = source.extents[along]
    if index is None or not index.dtype.is_int or int_range(index.dtype)[1] < n - 1:
        raise error("reduce-dtype", f"{what} gives indices from 0 to {n - 1}, the result is "
                    f"{'None' if index is None else index.dtype}", expected="an integer type that holds the indices",
                    found="None" if index is None else str(index.dtype), hint="use an int32 tile for the indices")
    states = _Best(kind, source, n, flag(nan_propagate, "nan_propagate"),
                   [None if best is None else best.dtype, index.dtype])
    return _emit(b, ReduceWith, sources, [best, index], states, along, puts, commutative=True)


def reduce_argmax(buffer: Any, out: Any, dim: int = -1, values: Any = None, nan_propagate: bool = False) -> Emitted:
    """Index of the greatest element along dim, the first one of equal elements; executed by the whole block.

    buffer: a shared or fragment tile (or region of one) of any shape and numeric dtype.  out: a shared or fragment tile of an
    integer dtype, of that shape without dimension dim (or with 1 there).  values: such a tile for the greatest elements.
    NaN: as T.reduce_max: ignored (the index of a row of NaN is 0), or with nan_propagate the first NaN is the greatest.
    Raises reduce-dtype, reduce-dim, combine-shape, combine-scope.

    Example:
        T.reduce_argmax(acc, at, dim=1)             # (128, 128) -> int32 (128,)
        T.reduce_argmax(acc, at, dim=1, values=m)   # and the maxima
    """
    return _arg("max", buffer, out, dim, values, nan_propagate)


@example("T.reduce_argmin(acc, at, dim=1)   # (128, 128) -> int32 (128,)")
def reduce_argmin(buffer: Any, out: Any, dim: int = -1, values: Any = None, nan_propagate: bool = False) -> Emitted:
    """Index of the least element along dim, the first one of equal elements; executed by the whole block.

    buffer, out, values, nan_propagate: as T.reduce_argmax.
    """
    return _arg("min", buffer, out, dim, values, nan_propagate)


def _moved(what: str, src: Any, dst: Any, dim: int, index: Any = None) -> Emitted:
    """dst = src at other places along dim: those of index, or (None) counted from the end."""
    b = need_builder(what)
    (s, _), (d, put) = tile_of(b, src, f"the source of {what}"), tile_of(b, dst, f"the result of {what}", False)
    at = None if index is None else tile_of(b, index, f"the index of {what}")[0]
    along = dimension(dim, s, "reduce-dim")
    shape, from_ = tuple(d.extents), s.buffer
    like = shape if at is None else (*shape[:along], s.extents[along], *shape[along + 1:])
    if tuple(s.extents) != like or at is not None and not (at.dtype.is_int and tuple(at.extents) == shape):
        found = f"{tuple(s.extents)} into {shape}" + ("" if at is None else f" by indices {tuple(at.extents)} {at.dtype}")
        raise error("gather-operand", f"{what} of ‹{found}›")
    if from_.data is d.buffer.data:
        from_ = temporary(b, from_, shape).buffer
        copy(s.buffer, from_)
    with _each(d.buffer) as index:
        where = tuple(index)
        place = s.extents[along] - 1 - where[along] if at is None else load(at.buffer, where)
        b.store(d.buffer, where, load(from_, (*where[:along], place, *where[along + 1:])))
    if put is not None:
        put()
    return EMITTED


@example("T.gather(acc, bits, acc, dim=1)   # acc[i, j] = acc[i, bits[i, j]]")
def gather(src: Any, index: Any, dst: Any, dim: int = -1) -> Emitted:
    """dst[…, i, …] = src[…, index[…, i, …], …] along dim; executed by the whole block.

    src: a shared or fragment tile (or region of one), or a tensor in global memory, of any shape.  index: a tile of integers.
    dst: a shared or fragment tile of index's shape, which is that of src but for dim; it may be src.
    An index outside src is an access outside: 0 from global memory, an error of the program elsewhere.  Raises gather-operand.
    """
    return _moved("T.gather", src, dst, dim, index)


@example("T.flip(x_s, x_s)")
def flip(src: Any, dst: Any, dim: int = -1) -> Emitted:
    """dst[…, i, …] = src[…, n - 1 - i, …] along dim; executed by the whole block.

    src: as T.gather.  dst: a shared or fragment tile of src's shape; it may be src.  Raises gather-operand.
    """
    return _moved("T.flip", src, dst, dim)


__all__ = ["flip", "gather", "reduce_argmax", "reduce_argmin", "reduce_with", "scan_with"]
