"""Subscripts of buffers, regions as operands of tile ops, and the pairing of two operands' extents."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from typing import Any

import numpy as np

from tilelang.errors import TileLangError, facts, register_warning, warn
from tilelang.ir import (GLOBAL, I32, TMEM, Binary, Broadcast, Buffer, Cast, Const, Expr, For, Load, Ramp, Region, Select, Span,
                         Store, Unary, Var, binary, cast, convert, dtype as DType, is_const, load, ramp, replace)
from tilelang.ir.buffer import subscript as subscript_of_buffer
from tilelang.ir.expr import questions
from tilelang.ir.record import record

from .polynomial import difference
from .state import current, describe, error, place

_BROADCAST = ("elements are broadcast in a loop, for i, j in T.Parallel(M, N): x[i, j] - m[i]; T.view and T.reshape add "
              "dimensions of size 1")
INSIDE = "make the buffer larger, or the index smaller: only accesses to global buffers are guarded"
register_warning("index-outside", "a constant index outside a global tensor: the access is left out")


# ---- subscripts ----------------------------------------------------------------------------------------------------

def subscript(buffer: Buffer, key: Any, storing: bool = False) -> Any:
    """buffer[key]: a Load for plain indices, a BufferSlice when a slice occurs."""
    items = tuple(key) if isinstance(key, (tuple, list)) else (key,)
    n = len(buffer.shape)
    if len(items) != n:
        hint = _BROADCAST if any(i is None for i in items) else ""
        shape = "(" + ", ".join(map(str, buffer.shape)) + ("," if n == 1 else "") + ")"
        if storing:
            raise error("index-count", f"Buffer {buffer.name} is {n}-dimensional, cannot be indexed with the "
                        f"‹{len(items)}›-dimensional indices provided.", expected=f"{n} indices")
        raise error("index-count", f"Buffer {buffer.name} is {n}-dimensional (shape={shape}), but ‹{len(items)}› index(es) "
                    "were provided: give one index or slice per dimension", hint, expected=f"{n} indices or slices")
    sliced = False
    for i in items:
        if type(i) is slice:
            sliced = True
    if not sliced:
        indices = [_index(buffer, d, i) for d, i in enumerate(items)]
        return load(buffer, indices, span=None if storing else _current_span())
    mins: list[Expr] = []
    extents: list[Any] = []
    for d, i in enumerate(items):
        if type(i) is slice:
            lo, ext = _slice_bounds(buffer, d, i)
            mins.append(lo)
            extents.append(ext)
        else:
            mins.append(_index(buffer, d, i))
            extents.append(1)
    return BufferSlice(Region(buffer, tuple(mins), tuple(extents), span=_current_span()))


def _current_span() -> Span | None:
    b = current()
    return b.span() if b is not None else None


def _index(buffer: Buffer, d: int, i: Any) -> Expr:
    """Index i of dimension d as an integer expression; negative constants count from the end."""
    if isinstance(i, int) or type(i) is Const or isinstance(i, np.integer):
        if isinstance(i, Const) and i.dtype.is_float:
            raise error("index-type", f"index {d} of `{buffer.name}` is the float ‹{i.value}›, «an integer» is needed")
        return _constant_index(buffer, d, int(i))
    e = i if isinstance(i, Expr) else _convert_index(buffer, d, i)
    if not (e.dtype.is_int or e.dtype.is_bool):
        raise error("index-type", f"index {d} of `{buffer.name}` has type ‹{e.dtype}›, «an integer» is needed")
    return cast(e, I32) if e.dtype.is_bool else e


def _convert_index(buffer: Buffer, d: int, i: Any) -> Expr:
    named = i is Ellipsis or i is None or isinstance(i, (str, float, Buffer))
    what = "..." if i is Ellipsis else type(i).__name__ if named else f"a {type(i).__name__}"
    if not named:
        try:
            return convert(i)
        except TileLangError:
            raise
        except TypeError:
            pass
    hint = ("write `:` for each dimension that is taken whole" if i is Ellipsis else
            _BROADCAST if i is None else
            "integer division is `//`" if isinstance(i, float) else
            "a buffer is indexed by its elements: loop over it, for i in T.Parallel(n)" if isinstance(i, Buffer) else
            "give an integer, an expression or a slice")
    raise error("index-type", f"index {d} of `{buffer.name}` is ‹{what}›, an integer, an integer expression or a slice is "
                "needed", hint=hint)


def _constant_index(buffer: Buffer, d: int, i: int) -> Expr:
    dim = buffer.shape[d]
    if i < 0:
        if isinstance(dim, int):
            if i + dim < 0:
                raise error("index-range", f"index ‹{i}› is outside dimension {d} of `{buffer.name}` (size {dim})",
                            expected=f"an index from {-dim} to {dim - 1}")
            return convert(i + dim)
        return binary("add", dim, i)
    if isinstance(dim, int) and i >= dim:
        text = f"index {i} is outside dimension {d} of `{buffer.name}` (size {dim})"
        if buffer.scope_name != GLOBAL:
            raise error("index-range", text, expected=f"an index from 0 to {dim - 1}", found=str(i), hint=INSIDE)
        warn("index-outside", f"{text}: nothing is stored there, and what is read is 0", f"indices are 0 to {dim - 1}", place())
    return convert(i)


def _slice_bounds(buffer: Buffer, d: int, s: slice) -> tuple[Expr, Any]:
    """Start and extent of a slice.  Constant negative bounds count from the end, as in Python."""
    if s.step is not None and not is_const(s.step, 1):
        raise error("slice-step", "Buffer slicing with step is not supported", found=f"a step of {s.step}")
    dim = buffer.shape[d]
    lo = _bound(buffer, d, s.start, 0, dim)
    hi = _bound(buffer, d, s.stop, dim, dim)
    extent = difference(hi, lo)
    if isinstance(hi, int) and not isinstance(dim, int) and is_const(s.start) and int(s.start) < 0:
        raise error("slice-bounds", f"the slice ‹{s.start}:{hi}› of dimension {d} of `{buffer.name}` has elements for few "
                    "sizes of it", expected="bounds from one end", hint="a slice needs start < stop")
    if isinstance(extent, int):
        if extent <= 0:
            raise error("slice-bounds", f"the slice of dimension {d} of `{buffer.name}` has ‹{extent} elements›",
                        expected="start < stop", hint="a slice needs start < stop")
        outside = isinstance(lo, int) and isinstance(dim, int) and lo + extent > dim
        if outside and buffer.scope_name != GLOBAL:
            raise error("slice-bounds", f"the slice {lo}:{lo + extent} ends past dimension {d} of "
                                        f"`{buffer.name}` "  # type: ignore
                         f"(size {dim})",
                        expected=f"an end of at most {dim}", found=f"{lo + extent}",
                        hint=INSIDE)
    return convert(lo), extent


def _bound(buffer: Buffer, d: int, v: Any, default: Any, dim: Any) -> Any:
    if v is None:
        return default
    if isinstance(v, Const) and v.dtype.is_int:
        v = int(v.value)
    if isinstance(v, (int, np.integer)) and not isinstance(v, bool):
        v = int(v)
        if v >= 0:
            return v
        if isinstance(dim, int) and v + dim < 0:
            raise error("slice-bounds", f"the slice bound ‹{v}› is outside dimension {d} of `{buffer.name}` (size {dim})",
                        expected=f"a bound of at least {-dim}")
        return dim + v
    e = v if isinstance(v, Expr) else _convert_index(buffer, d, v)
    if not e.dtype.is_int:
        raise error("index-type", f"a slice bound of `{buffer.name}` has type ‹{e.dtype}›, «an integer» is needed")
    return e


@subscript_of_buffer.provide
def _subscript(buffer: Buffer, key: Any) -> Any:
    return subscript(buffer, key)


class BufferSlice:
    """`A[a:b, k]`: a region of a buffer.  Operand of tile ops; used as a value it is a vector.

    by_reference: it is a T.Ref parameter, assignment stores through it.
    """

    __slots__ = ("region", "by_reference")

    def __init__(self, region: Region, by_reference: bool = False) -> None:
        self.region, self.by_reference = region, by_reference

    @property
    def buffer(self) -> Buffer:
        return self.region.buffer

    @property
    def dtype(self) -> DType:
        return self.region.buffer.dtype

    @property
    def shape(self) -> tuple[Any, ...]:
        """Extents, one per dimension of the buffer."""
        return self.region.extents

    def scope(self) -> str:
        return self.region.buffer.scope_name

    def vector(self) -> Load:
        """The elements as one vector value (static extent, along the last dimension)."""
        return load(self.buffer, vector_indices(self.region))

    __tilelang_expr__ = vector

    def astype(self, dt: Any) -> Expr:
        return self.vector().astype(dt)

    def __getitem__(self, key: Any) -> Any:
        raise error("store-target", f"a region of `{self.buffer.name}` cannot be subscripted again",
                    expected="one subscript of the buffer", found=f"a subscript of a region of `{self.buffer.name}`",
                     hint="index the buffer itself, adding the region's start")

    def __repr__(self) -> str:
        return f"a region of `{self.buffer.name}`"

    def __iter__(self) -> Any:
        raise facts(TypeError(f"{self!r} cannot be iterated: loop over its indices"), "a loop over its indices", repr(self))

    def __hash__(self) -> int:
        questions.call(self, "hash", 2)
        return object.__hash__(self)

    def __bool__(self) -> bool:
        questions.call(self, "truth value", 2)
        return True

    def __format__(self, spec: str) -> str:
        questions.call(self, "text", 2)
        return format(repr(self), spec)

    def __str__(self) -> str:
        questions.call(self, "str", 2)
        return repr(self)


def _delegate(name: str) -> Callable[..., Any]:
    def method(self: BufferSlice, *args: Any) -> Any:
        return getattr(self.vector(), name)(*args)

    method.__name__ = name
    return method


for _n in ("add", "sub", "mul", "truediv", "floordiv", "mod", "lshift", "rshift", "and", "or", "xor"):
    setattr(BufferSlice, f"__{_n}__", _delegate(f"__{_n}__"))
    setattr(BufferSlice, f"__r{_n}__", _delegate(f"__r{_n}__"))
for _n in ("lt", "le", "gt", "ge", "eq", "ne", "neg", "invert"):
    setattr(BufferSlice, f"__{_n}__", _delegate(f"__{_n}__"))


def vector_indices(r: Region) -> tuple[Expr, ...]:
    """Indices that address the region as one vector.  Raises slice-value."""
    wide = [d for d, e in enumerate(r.extents) if not is_const(e, 1)]
    last = len(r.extents) - 1
    if not wide:
        return r.mins
    if len(wide) > 1:
        raise error("slice-value", f"a region of `{r.buffer.name}` with {len(wide)} non-unit dimensions is not a value",
                    expected="at most one extent other than 1", found=f"extents {tuple(r.extents)}")
    d = wide[0]
    if d != last or not isinstance(r.extents[d], int):
        raise error("slice-value", f"a slice of `{r.buffer.name}` used as a value must have «a static extent along the last "
                    "dimension»", found=f"extents {tuple(r.extents)}",
                    hint="use T.copy, T.fill for a constant, or loop over the elements")
    return (*r.mins[:d], ramp(r.mins[d], r.extents[d]))


def store_slice(builder: Any, target: BufferSlice, value: Any) -> None:
    """`A[i, 0:4] = vector`, executed by every thread that reaches it.

    Becomes a vectorized loop over the lanes (whose accesses are guarded and widened like any other) where the value
    can be computed lane by lane; otherwise one vector store.
    """
    indices = vector_indices(target.region)
    lanes = max((i.dtype.lanes for i in indices), default=1)
    v = convert(value)
    if v.dtype.lanes != target.dtype.lanes * lanes:
        raise error("store-type", f"the slice of `{target.buffer.name}` has {lanes} elements, the value is ‹{v.dtype}› "
                    "(Incompatible types in BufferStore)",  # programs test for the text in parentheses
                    expected=f"{target.dtype.lanes * lanes} lanes, or one",
                    hint="fill a region with T.fill, or broadcast with T.Broadcast")
    lane = Var("lane", I32, span=builder.span())
    one = lane_of(v, lane, target) if lanes > 1 and target.dtype.lanes == 1 else None
    if one is None:
        builder.store(target.buffer, indices, v)
        return
    where = (*indices[:-1], binary("add", indices[-1].base, lane))  # type: ignore[attr-defined]
    store = Store(target.buffer, where, cast(one, target.dtype), span=builder.here())
    builder.emit(For(lane, Const(0, I32), Const(lanes, I32), "vectorized", store, span=builder.here()))


def lane_of(e: Expr, lane: Var, target: BufferSlice) -> Expr | None:
    """One lane of a vector expression; None where lanes depend on each other or on what the store overwrites."""
    if e.dtype.lanes == 1:
        return e
    if isinstance(e, Broadcast):
        return e.value if e.value.dtype.lanes == 1 else None
    if isinstance(e, Ramp):
        return binary("add", e.base, binary("mul", cast(lane, e.base.dtype), e.stride))
    if isinstance(e, Load):
        if e.buffer.dtype.lanes > 1 or any(i.dtype.lanes > 1 for i in e.indices[:-1]):
            return None
        if e.buffer.data is target.buffer.data and not all(
                a.same(b) for a, b in zip(e.indices, vector_indices(target.region))):
            return None
        last = lane_of(e.indices[-1], lane, target)
        return None if last is None else load(e.buffer, (*e.indices[:-1], last), span=e.span)
    parts: list[Expr] = []
    operands = {Binary: ("a", "b"), Unary: ("a",), Cast: ("value",), Select: ("cond", "a", "b")}.get(type(e))
    if operands is None:
        return None
    for f in operands:
        part = lane_of(getattr(e, f), lane, target)
        if part is None:
            return None
        parts.append(part)
    return replace(e, dtype=e.dtype.scalar, **dict(zip(operands, parts)))


# ---- operands of tile ops ------------------------------------------------------------------------------------------

@record
class Operand:
    """A tile op's operand.  extents None: an element that only says where the tile starts."""

    buffer: Buffer
    mins: tuple[Expr, ...]
    extents: tuple[Any, ...] | None
    whole: bool = False

    def region(self, extents: tuple[Any, ...] | None = None) -> Region:
        """The region with these extents (default: its own)."""
        return Region(self.buffer, self.mins, extents or self.extents or (), span=_current_span())


_ZERO = Const(0, I32)


def operand(x: Any, what: str) -> Operand:
    """The operand an argument stands for.  Raises region-operand."""
    if isinstance(x, Buffer):
        return Operand(x, (_ZERO,) * len(x.shape), x.shape, whole=True)
    if isinstance(x, BufferSlice):
        return Operand(x.region.buffer, x.region.mins, x.region.extents)
    if isinstance(x, Region):
        return Operand(x.buffer, x.mins, x.extents)
    b = current()
    if isinstance(x, Var) and b is not None and id(x) in b.elements:
        x = b.elements[id(x)][1]
    if isinstance(x, Load):
        last = x.indices[-1] if x.indices else None
        if isinstance(last, Ramp) and is_const(last.stride, 1):  # neighbours: the slice of that length
            return Operand(x.buffer, (*x.indices[:-1], last.base), (*(1 for _ in x.indices[:-1]), last.dtype.lanes))
        if isinstance(last, (Ramp, Broadcast)):
            raise error("region-operand", f"{what} is ‹a vector load›: write the slice `{x.buffer.name}[a:b]`",
                        expected=f"a slice {x.buffer.name}[a:b]")
        return Operand(x.buffer, x.indices, None)
    if hasattr(x, "__tilelang_expr__"):
        x.__tilelang_expr__()  # a dead name says so itself
    hint = ""
    if isinstance(x, (int, float)) or type(x) is Const:
        hint = f"T.fill(buffer, {x!r}) gives every element of a tile a value"
    elif hasattr(x, "__getitem__") and not isinstance(x, (str, Expr)):
        hint = "pass it to the kernel: a parameter `name: T.Tensor(shape, dtype)`; arrays and lists of the host are no buffers"
    raise error("region-operand", f"{what} must be a buffer, a region of it or an element of it, found {describe(x)}", hint)


def whole_region(x: Any, what: str) -> Region:
    """The region of an operand that has extents of its own (an element: one element)."""
    o = operand(x, what)
    return o.region(o.extents if o.extents is not None else (1,) * len(o.mins))


def non_unit(extents: tuple[Any, ...]) -> list[int]:
    """Dimensions whose extent is not statically 1."""
    return [d for d, e in enumerate(extents) if not is_const(e, 1)]


def same_extent(a: Any, b: Any) -> bool:
    """Whether two extents are provably equal."""
    return is_const(difference(a, b), 0) if not (isinstance(a, int) and isinstance(b, int)) else a == b


def _nearness(b: Buffer) -> int:
    scope = b.scope_name
    return 2 if scope.startswith("local") or scope == TMEM else 1 if scope.startswith("shared") else 0


def pair(src: Any, dst: Any, what: str = "copy") -> tuple[Region, Region]:
    """Regions of source and destination whose non-unit extents agree in order.

    When both have extents and they differ, the operand nearer the registers gives the iteration space (at equal
    distance the source) and the other only its start.  Raises copy-shapes, copy-extents, copy-ranks, copy-range.
    """
    s, d = operand(src, f"the source of T.{what}"), operand(dst, f"the destination of T.{what}")
    if s.whole and d.whole:
        if len(s.buffer.shape) != len(d.buffer.shape) or not all(map(same_extent, s.buffer.shape, d.buffer.shape)):
            raise error("copy-shapes", f"T.{what} of whole buffers needs equal shapes, found `{s.buffer.name}` "
                        f"{_shape(s.extents)} and `{d.buffer.name}` {_shape(d.extents)} "
                        "(StructuralEqual check failed)",  # programs test for the text in parentheses
                        found=f"{_shape(s.extents)} and {_shape(d.extents)}",
                        hint=f"slice one of them, or give the start element: T.{what}({s.buffer.name}[…], {d.buffer.name})")
        return _checked(s.region(), d.region(), what)
    if s.extents is None and d.extents is None:
        raise error("copy-extents", f"Can't deduce {what} extents from args: both operands are elements", found="two elements")
    s, d = (_only_element(o) for o in (s, d))
    if s.extents is None or d.extents is None:
        base, point = (d, s) if s.extents is None else (s, d)
        region = base.region()
        other = point.region(trailing(point, base.extents, what))  # type: ignore[arg-type]
        return _checked(other, region, what) if s.extents is None else _checked(region, other, what)
    s, d = _one_of_run_time_extent(s, d)
    a, b = non_unit(s.extents), non_unit(d.extents)  # type: ignore[arg-type]
    if len(a) != len(b):
        raise error("copy-ranks", f"T.{what} does not broadcast or flatten: `{s.buffer.name}` has extents {_shape(s.extents)}, "
                    f"`{d.buffer.name}` {_shape(d.extents)}", found=f"{_shape(s.extents)} and {_shape(d.extents)}",
                    hint="take a part of the larger one by an index, A[i, 0:n]: the extents other than 1 must be as many on "
                    "both sides")
    assert s.extents is not None and d.extents is not None
    if all(same_extent(s.extents[i], d.extents[j]) for i, j in zip(a, b)):
        return _checked(s.region(), d.region(), what)
    for i, j in zip(a, b):
        x, y = s.extents[i], d.extents[j]
        if isinstance(x, int) and isinstance(y, int) and x != y:
            raise error("copy-range", f"dimension {i} of `{s.buffer.name}` has {x} elements, `{d.buffer.name}` takes {y} "
                        # Programs test for this text.
                        f"(Selected loop range is {'smaller' if x > y else 'larger'} than original src range)",
                        expected=f"{'at most ' if x > y else ''}{y} in dimension {i}", found=str(x),
                        hint="slice the source to the tile's size; a start alone, A[i, 0], takes the size of the other side")
    if _nearness(d.buffer) > _nearness(s.buffer):
        return _checked(s.region(_replaced(s.extents, a, d.extents, b)), d.region(), what)
    return _checked(s.region(), d.region(_replaced(d.extents, b, s.extents, a)), what)


def _only_element(o: Operand) -> Operand:
    """An element of a tile of one element as that tile: no other extent fits, whatever the other side's is at run time."""
    if o.extents is None and o.buffer.scope_name != GLOBAL and not non_unit(o.buffer.shape):
        return Operand(o.buffer, o.mins, o.buffer.shape)
    return o


def _one_of_run_time_extent(s: Operand, d: Operand) -> tuple[Operand, Operand]:
    """The operands, where the side that does not give the loops has dimensions of run-time extent too many: it gives its start
    alone there, as everywhere.  They are those at the place of an extent 1 in tiles of one rank, else the only ones possible.
    """
    base, other = (d, s) if _nearness(d.buffer) > _nearness(s.buffer) else (s, d)
    inner, outer = base.extents or (), other.extents or ()
    loops, dims = non_unit(inner), non_unit(outer)
    if len(dims) <= len(loops):
        return s, d
    kept = [k for k in combinations(dims, len(loops)) if all(isinstance(outer[i], Expr) for i in dims if i not in k)]
    if len(inner) == len(outer) and tuple(loops) in kept:
        kept = [tuple(loops)]
    if len(kept) != 1:
        return s, d
    start = Operand(other.buffer, other.mins, tuple(e if i in kept[0] else 1 for i, e in enumerate(outer)))
    return (start, d) if other is s else (s, start)


def _checked(src: Region, dst: Region, what: str) -> tuple[Region, Region]:
    """Reject tiles that provably exceed an unguarded buffer, and copies of a buffer onto itself."""
    for r in (src, dst):
        check_inside(r)
    if src.buffer is dst.buffer and all(a.same(b) for a, b in zip(src.mins, dst.mins)):
        raise error("copy-overlap", f"T.{what}: source and destination are the same region of `{src.buffer.name}`",
                    found=f"one region of `{src.buffer.name}`")
    if src.buffer is dst.buffer and all(map(_meet, src.mins, src.extents, dst.mins, dst.extents)):
        raise error("copy-overlap", f"T.{what}: source and destination overlap in `{src.buffer.name}`",
                    found=f"two that share elements of `{src.buffer.name}`")
    return src, dst


def _meet(a: Expr, n: Any, b: Expr, m: Any) -> bool:
    """Whether a : a+n and b : b+m provably overlap (their distance is constant)."""
    d = difference(b, a)
    return isinstance(d, int) and isinstance(n, int) and isinstance(m, int) and -m < d < n


def check_inside(r: Region) -> None:
    """Reject a region with constant bounds that exceeds an unguarded (not global) buffer."""
    if r.buffer.scope_name == GLOBAL:
        return
    for d, (lo, ext, dim) in enumerate(zip(r.mins, r.extents, r.buffer.shape)):
        if isinstance(lo, Const) and isinstance(ext, int) and isinstance(dim, int) and lo.value + ext > dim:
            raise error("slice-bounds", f"the tile covers {lo.value}:‹{lo.value + ext}› of dimension {d} of `{r.buffer.name}`, "
                        f"which has {dim}", expected=f"an end of at most {dim}", hint=INSIDE)


def _replaced(own: tuple[Any, ...], dims: list[int], other: tuple[Any, ...], odims: list[int]) -> tuple[Any, ...]:
    out = list(own)
    for i, j in zip(dims, odims):
        out[i] = other[j]
    return tuple(out)


def trailing(point: Operand, extents: tuple[Any, ...], what: str) -> tuple[Any, ...]:
    """Extents of the other operand aligned to the last dimensions of an element operand."""
    n = len(point.mins)
    while len(extents) > n and is_const(extents[0], 1):
        extents = extents[1:]
    if len(extents) > n:
        raise error("copy-extents", f"Can't deduce {what} extents from args: `{point.buffer.name}` has {n} dimensions, the "
                    f"other operand extents ‹{_shape(extents)}›", expected=f"at most {n} extents",
                    hint=f"slice `{point.buffer.name}` instead")
    return (1,) * (n - len(extents)) + tuple(extents)


def _shape(extents: Any) -> str:
    return "(" + ", ".join(map(str, extents)) + ("," if len(extents) == 1 else "") + ")"
