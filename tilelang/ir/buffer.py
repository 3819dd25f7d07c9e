"""Buffers, their regions, loads and addresses of elements.  See ir/__init__.py for the grammar and the semantics."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, ClassVar

from tilelang.errors import facts
from .dtype import dtype
from .expr import Expr, Var, as_dim, const, convert, is_const
from .hook import Hook
from .facts import BufferFacts
from .nodes import Node, node
from .record import record
from .span import Span


DType = dtype  # in a class with a field of that name


@node
class Buffer(Node):
    """A named array.  Compared by identity; `data` identifies the storage, shared by all views of it.

    shape: per dimension a Python int or an Expr.  strides: in elements, None for compact row-major.
    scope: one of SCOPES.  offset: elements from the start of the storage to element 0.
    facts: further properties, such as the alignment (facts.py).
    """

    name: str
    shape: tuple[Any, ...]
    dtype: dtype
    scope_name: str = "global"
    strides_: tuple[Any, ...] | None = None
    offset: Any = 0
    data: Var = None  # type: ignore[assignment]
    facts: BufferFacts = BufferFacts()
    span: Span | None = None

    _is_name: ClassVar[bool] = True
    _extent: ClassVar[tuple[int, int] | None] = (1, 1)
    _options: ClassVar[str] = "facts"

    def __post_init__(self) -> None:
        if self.data is None:
            object.__setattr__(self, "data", Var(self.name, dtype("handle"), span=self.span))
        object.__setattr__(self, "shape", tuple(as_dim(d) for d in self.shape))
        if self.strides_ is not None:
            object.__setattr__(self, "strides_", tuple(as_dim(d) for d in self.strides_))

    def same(self, other: object) -> bool:
        return self is other

    __hash__ = object.__hash__
    __copy__, __deepcopy__ = Expr.__copy__, Expr.__deepcopy__

    def __eq__(self, other: object) -> bool:
        return self is other

    def __ne__(self, other: object) -> bool:
        return self is not other

    def scope(self) -> str:
        """The scope as users see it; "local.descriptor.<kind>" for a variable that holds a hardware descriptor."""
        kind = self.facts.descriptor
        return f"local.descriptor.{kind}" if kind else self.scope_name

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def elem_offset(self) -> Any:
        return self.offset

    @property
    def strides(self) -> tuple[Any, ...]:
        """Strides in elements; computed row-major when none were declared."""
        if self.strides_ is not None:
            return self.strides_
        out: list[Any] = []
        step: Any = 1
        for d in reversed(self.shape):
            out.append(step)
            step = step * d
        return tuple(as_dim(s) for s in reversed(out))

    @property
    def exprs(self) -> tuple[Expr, ...]:
        """The expressions among its extents, strides and offset."""
        return tuple(d for d in (*self.shape, *(self.strides_ or ()), self.offset) if isinstance(d, Expr))

    def dtype_at(self, indices: tuple[Expr, ...]) -> DType:
        """The type of a value at these indices, of which the last may be a vector."""
        return self.dtype.with_lanes(self.dtype.lanes * max([i.dtype.lanes for i in indices], default=1))

    @property
    def is_static(self) -> bool:
        return all(isinstance(d, int) for d in self.shape)

    @property
    def size(self) -> int:
        """Number of elements; only for static shapes."""
        return math.prod(map(int, self.shape))

    @property
    def bits(self) -> int:
        """Bits of all elements, with those of all lanes; only for static shapes."""
        return self.size * self.dtype.bits * self.dtype.lanes

    def __getitem__(self, key: Any) -> Any:
        return subscript.call(self, key)

    if TYPE_CHECKING:  # the frontend turns it into a statement
        def __setitem__(self, key: Any, value: Any) -> None: ...

    def access_ptr(self, access_mask: Any = "r", offset: Any = 0, extent: Any = None, **_: Any) -> AddressOf:
        """`buf.access_ptr("r")`: pointer to the buffer's first element, or `offset` elements on (1-D buffers)."""
        return pointer.call(self, access_mask, offset, extent)

    def vload(self, begin: Any, dtype: Any = None) -> Expr:
        """`buf.vload([i, j], "float32x4")`: the element at an index, or consecutive elements, one for each lane of the type.

        Raises dtype-name if the element type of `dtype` is not that of the buffer.
        """
        return vector_load.call(self, begin, dtype)

    def vstore(self, begin: Any, value: Any) -> Any:
        """`buf.vstore([i, j], value)`: store a value, or the lanes of a vector to consecutive elements."""
        return vector_store.call(self, begin, value)

    def __iter__(self) -> Iterator[Any]:
        raise facts(TypeError(f"Buffer {self.name} cannot be iterated: loop over its indices"),
                    "a loop over its indices", f"the buffer `{self.name}`")

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise facts(TypeError(f"Buffer {self.name} cannot become an array: it has values only while the kernel runs"),
                    "operations of T", f"the buffer `{self.name}`")

    def __bool__(self) -> bool:
        raise facts(TypeError(f"Buffer {self.name} has no truth value: compare an element of it"),
                    "an element of it", f"the buffer `{self.name}`")


@record
class Range:
    """min : min+extent, one dimension of a region."""

    min: Expr
    extent: Any


@node
class Region(Node):
    """buffer[min : min+extent, …], one (min, extent) per dimension.  extents: Python ints where static."""

    buffer: Buffer
    mins: tuple[Expr, ...]
    extents: tuple[Any, ...]
    span: Span | None = None

    @property
    def dtype(self) -> dtype:
        return self.buffer.dtype

    def __iter__(self) -> Iterator[Range]:
        """The dimensions, as ranges."""
        return map(Range, self.mins, self.extents)

    @property
    def region(self) -> tuple[Range, ...]:
        return tuple(self)

    def at(self, *index: Any) -> tuple[Expr, ...]:
        """The indices in the buffer of an element: its place along the last dimensions, the first along the others."""
        lead = len(self.mins) - len(index)
        return (*map(convert, self.mins[:lead]), *(convert(m) + i for m, i in zip(self.mins[lead:], index)))

    @property
    def is_full(self) -> bool:
        """Whether the region is the whole buffer."""
        return all(is_const(m, 0) for m in self.mins) and all(
            a is b or (isinstance(a, int) and a == b) or (isinstance(a, Expr) and a.same(b))
            for a, b in zip(self.extents, self.buffer.shape))

    def narrowed(self, dim: int, first: int, width: int) -> Region:
        """The region with `width` indices of a dimension, from index `first` of the region on."""
        at = dim % len(self.mins)
        return Region(self.buffer, tuple(m + first if d == at and first else m for d, m in enumerate(self.mins)),
                      tuple(width if d == at else n for d, n in enumerate(self.extents)), self.span)


def region_of(buffer: Buffer, span: Span | None = None) -> Region:
    """All elements of a buffer."""
    return Region(buffer, (const(0),) * buffer.ndim, buffer.shape, span)


@node
class Load(Expr):
    """buffer[indices], read as the buffer's element type.  indices: one per dimension, in elements.

    A Ramp as the last index reads a vector; dtype then has its lanes.
    """

    buffer: Buffer
    indices: tuple[Expr, ...]
    dtype: dtype
    span: Span | None = None

    def __getitem__(self, key: Any) -> Any:
        """Supports `obj.v[0]` in Python code that runs only while tracing, where v is a variable of the language."""
        return element_of_load.call(self, key)


@node
class AddressOf(Expr):
    """Address of buffer[indices]; dtype handle."""

    buffer: Buffer
    indices: tuple[Expr, ...]
    dtype: dtype = dtype("handle")
    span: Span | None = None


def load(buffer: Buffer, indices: Any, span: Span | None = None) -> Load:
    """buffer[indices]; a vector index (Ramp) as the last one gives a vector."""
    idx = tuple(convert(i) for i in indices)
    return Load(buffer, idx, buffer.dtype_at(idx), span=span)


def _no_element(variable: Load, key: Any) -> Any:
    raise TypeError("'Load' object is not subscriptable")


def _load_element(buffer: Buffer, key: Any) -> Any:
    return load(buffer, key if isinstance(key, tuple) else (key,))


# Hooks that tilelang.language provides: A[...] (loads, regions, aliases), the element of a variable, and methods of buffers.
subscript: Hook[Callable[[Buffer, Any], Any]] = Hook("the subscript of a buffer", _load_element)
element_of_load: Hook[Callable[[Load, Any], Any]] = Hook("the element of a variable", _no_element)
pointer: Hook[Callable[[Buffer, Any, Any, Any], AddressOf]] = Hook("Buffer.access_ptr")
vector_load: Hook[Callable[[Buffer, Any, Any], Expr]] = Hook("Buffer.vload")
vector_store: Hook[Callable[[Buffer, Any, Any], Any]] = Hook("Buffer.vstore")
