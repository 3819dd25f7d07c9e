"""Buffers, regions of them, and reading an element.  See ir/__init__.py for the grammar and the semantics."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar

from tilelang.errors import facts
from .build import convert
from .dtype import dtype
from .expr import Expr, Load, Var, as_dim, is_const
from .nodes import Node, node
from .span import Span

SCOPES = ("global", "shared", "shared.dyn", "local", "local.fragment", "local.var", "local.reducer",
          "shared.barrier", "shared.cluster_barrier", "shared.tmem")


@node
class Buffer(Node):
    """A named array.  Compared by identity; `data` identifies the storage, shared by all views of it.

    shape: per dimension a Python int or an Expr.  strides: in elements, None for compact row-major.
    scope: one of SCOPES.  offset: elements from the start of the storage to element 0.
    attrs: compile-time facts, sorted by key (e.g. align).
    """

    name: str
    shape: tuple[Any, ...]
    dtype: dtype
    scope_name: str = "global"
    strides_: tuple[Any, ...] | None = None
    offset: Any = 0
    data: Var = None  # type: ignore[assignment]
    attrs: tuple[tuple[str, Any], ...] = ()
    span: Span | None = None

    _is_name: ClassVar[bool] = True
    # Set by the language module when it is imported: what A[...] means there (loads, regions, aliases).
    subscript: ClassVar[Any] = None

    def __post_init__(self) -> None:
        if self.data is None:
            object.__setattr__(self, "data", Var(self.name, dtype("handle"), span=self.span))
        object.__setattr__(self, "shape", tuple(as_dim(d) for d in self.shape))
        if self.strides_ is not None:
            object.__setattr__(self, "strides_", tuple(as_dim(d) for d in self.strides_))

    def same(self, other: object) -> bool:
        return self is other

    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other

    def __ne__(self, other: object) -> bool:
        return self is not other

    def scope(self) -> str:
        """The scope as users see it: a variable that holds a hardware descriptor says so."""
        kind = self.attr("descriptor")
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

    def attr(self, key: str, default: Any = None) -> Any:
        for k, v in self.attrs:
            if k == key:
                return v
        return default

    @property
    def is_static(self) -> bool:
        return all(isinstance(d, int) for d in self.shape)

    @property
    def size(self) -> int:
        """Number of elements; only for static shapes."""
        n = 1
        for d in self.shape:
            n *= int(d)
        return n

    def __getitem__(self, key: Any) -> Any:
        if Buffer.subscript is None:
            return load(self, key if isinstance(key, tuple) else (key,))
        return Buffer.subscript(self, key)

    if TYPE_CHECKING:  # the frontend makes a statement of it
        def __setitem__(self, key: Any, value: Any) -> None: ...

    def __iter__(self) -> Iterator[Any]:
        raise facts(TypeError(f"Buffer {self.name} cannot be iterated: loop over its indices"),
                    "a loop over its indices", f"the buffer `{self.name}`")

    def __bool__(self) -> bool:
        raise facts(TypeError(f"Buffer {self.name} has no truth value: compare an element of it"),
                    "an element of it", f"the buffer `{self.name}`")


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

    @property
    def is_full(self) -> bool:
        """Whether it is the whole buffer."""
        return all(is_const(m, 0) for m in self.mins) and all(
            a is b or (isinstance(a, int) and a == b) or (isinstance(a, Expr) and a.same(b))
            for a, b in zip(self.extents, self.buffer.shape))


def load(buffer: Buffer, indices: Any, span: Span | None = None) -> Load:
    """buffer[indices]; a vector index (Ramp) as the last one gives a vector."""
    idx = tuple(convert(i) for i in indices)
    lanes = max([i.dtype.lanes for i in idx], default=1)
    return Load(buffer, idx, buffer.dtype.with_lanes(buffer.dtype.lanes * lanes), span=span)
