"""Compile-time objects that exist while a kernel is traced: T.meta_class, T.inline, tile schedulers."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from functools import reduce
from typing import Any

from tilelang.ir import I32, Expr, Load, binary, cast, convert

from .alloc import alloc_var
from .tracing.flags import flag, whole_number
from .kernel import need_kernel
from .tracing.macro import Macro
from .tracing.builder import need_builder
from .tracing.source_text import text_of
from .tracing.state import error


def inline(method: Callable[..., Any]) -> Macro:
    """Method decorator: the method is inlined into the kernel at each call.

    Example:
        class Counter:
            @T.inline
            def step(self, x):
                x[0] = x[0] + 1
    """
    return method if isinstance(method, Macro) else Macro(method)


def _state_uses(fn: Callable[..., Any]) -> tuple[bool, bool]:
    """(whether a method subscripts an attribute of its object, as in `self.x[0]`; whether it stores to one)."""
    tree = ast.parse(text_of(fn, needed=True))
    uses = [n for n in ast.walk(tree) if isinstance(n, ast.Subscript) and isinstance(n.value, ast.Attribute)]
    return bool(uses), any(not isinstance(n.ctx, ast.Load) for n in uses)


def meta_class(cls: type) -> type:
    """Class decorator: objects that hold T.alloc_var state in attributes while a kernel is traced.

    Methods that use `self.x[0]` are inlined at the call.  Those that store nothing may be used as expressions
    (`while tiles.valid():`).  Other methods run as plain Python.  A constructor argument `name` prefixes the names of the
    state variables: {name}_{attribute}.

    Example:
        @T.meta_class
        class Counter:
            def __init__(self):
                self.n = T.alloc_var("int32")
            def step(self):
                self.n[0] = self.n[0] + 1
    """
    for key, fn in list(vars(cls).items()):
        if inspect.isfunction(fn) and not key.startswith("__"):
            uses, stores = _state_uses(fn)
            if uses:
                setattr(cls, key, Macro(fn, reads_only=not stores))
    init: Callable[..., None] = vars(cls).get("__init__", object.__init__)
    signature = inspect.signature(init)

    def __init__(self: Any, *args: Any, **kw: Any) -> None:
        init(self, *args, **kw)
        prefix = None
        if "name" in signature.parameters:
            prefix = signature.bind(self, *args, **kw).arguments.get("name", signature.parameters["name"].default)
        b = need_builder(cls.__name__)
        for key, value in vars(self).items():
            if isinstance(value, Load) and id(value) in b.handles:
                b.name_value(f"{prefix}_{key.lstrip('_')}" if prefix else key.lstrip("_"), value.buffer)

    __init__.__wrapped__ = init  # type: ignore[attr-defined]
    cls.__init__ = __init__  # type: ignore[method-assign,misc]
    return cls


class BaseTileScheduler:
    """Base class of tile schedulers that enumerate tiles by a linear index.  Subclasses implement update_current_idx.

    State (stateful=True): linear_idx and current_iter, variables of each thread.
    """

    def __init__(self, stateful: bool = True, name: str | None = None) -> None:
        self.stateful, self.name = stateful, name or "scheduler"
        self._state: dict[str, Load] = {}
        if stateful:
            for key in ("linear_idx", "current_iter", "m_idx", "n_idx"):
                self._state[key] = self._variable(key)

    def _variable(self, key: str) -> Load:
        b = need_builder(type(self).__name__)
        v = alloc_var("int32")
        b.name_value(f"{self.name}_{key}", v.buffer)
        return v

    def _set(self, key: str, value: Any) -> None:
        b = need_builder(type(self).__name__)
        b.store(self._get(key).buffer, self._get(key).indices, value)

    def _get(self, key: str) -> Load:
        if key not in self._state:
            raise error("scheduler", f"a {type(self).__name__} with ‹stateful=False› keeps no {key}: it only gives "
                        "coord(tile_id)", expected="a scheduler that keeps state", hint="leave stateful=False out")
        return self._state[key]

    linear_idx = property(lambda self: self._get("linear_idx"), doc="Linear index of the current tile.")
    current_iter = property(lambda self: self._get("current_iter"), doc="Tiles done so far.")
    m_idx = property(lambda self: self._get("m_idx"), doc="Row of the current tile.")
    n_idx = property(lambda self: self._get("n_idx"), doc="Column of the current tile.")

    def _undefined(self, method: str) -> Exception:
        return error("scheduler", f"{type(self).__name__} must define {method}", expected=f"a subclass with {method}",
                     found=f"none in {type(self).__name__}", hint=f"define {method} in a subclass of T.BaseTileScheduler")

    def update_current_idx(self, linear_idx: Any) -> None:
        """Set the tile coordinates for a linear index."""
        raise self._undefined("update_current_idx(linear_idx)")

    def init(self, linear_idx: Any) -> None:
        """Start at the tile of a linear index."""
        self._set("linear_idx", linear_idx)
        self._set("current_iter", 0)
        self.update_current_idx(self.linear_idx)

    def next_tile(self, step: Any) -> None:
        """Advance by `step` tiles."""
        self._set("linear_idx", self.linear_idx + step)
        self._set("current_iter", self.current_iter + 1)
        self.update_current_idx(self.linear_idx)

    def valid(self) -> Any:
        """Whether the current tile exists."""
        raise self._undefined("valid()")


class PersistentTileScheduler(BaseTileScheduler):
    """Tile scheduler of a (num_m, num_n) grid for persistent workers, in groups of `swizzle_size` for L2 locality."""

    def __init__(self, num_m_tiles: Any, num_n_tiles: Any, num_workers: Any = None, swizzle_size: int = 1,
                 column_major: bool = True, cluster_size: int = 1, stateful: bool = True,
                 name: str | None = None) -> None:
        for what, n in (("num_workers", num_workers), ("swizzle_size", swizzle_size), ("cluster_size", cluster_size)):
            if n is not None and not isinstance(n, Expr):
                whole_number(n, f"{what} of T.PersistentTileScheduler", 1, 1 << 30)
        self.num_m = -(-num_m_tiles // cluster_size) if isinstance(num_m_tiles, int) else (
            num_m_tiles + (cluster_size - 1)) // cluster_size
        self.num_n, self.swizzle, self.column_major = num_n_tiles, swizzle_size, flag(column_major, "column_major")
        self.workers = num_workers if num_workers is not None else _blocks() // cluster_size
        super().__init__(stateful, name)

    @property
    def total_tiles(self) -> Any:
        return self.num_m * self.num_n

    def coord(self, tile_id: Any) -> tuple[Any, Any]:
        """(m, n) of a tile, from its linear id."""
        primary, secondary = (self.num_m, self.num_n) if self.column_major else (self.num_n, self.num_m)
        size = primary * self.swizzle
        group = tile_id // size
        base = group * self.swizzle
        width = binary("max", convert(1), binary("min", convert(self.swizzle), convert(secondary - base)))
        r = tile_id - group * size
        fast, slow = r // width, base + r % width
        return (fast, slow) if self.column_major else (slow, fast)

    def update_current_idx(self, linear_idx: Any) -> None:
        m, n = self.coord(linear_idx)
        self._set("m_idx", cast(convert(m), I32))
        self._set("n_idx", cast(convert(n), I32))

    def init(self, worker_id: Any) -> None:
        """Start at the worker's first tile."""
        super().init(worker_id)

    def next_tile(self, step: Any = None) -> None:
        """Go to the worker's next tile."""
        super().next_tile(self.workers if step is None else step)

    def valid(self) -> Any:
        return self.linear_idx < self.total_tiles


def _blocks() -> Any:
    """The number of blocks of the launch.  Each block is a worker, so that every tile is computed once on any GPU."""
    return reduce(lambda total, e: e * total, need_kernel("a tile scheduler without num_workers").blocks)


__all__ = ["BaseTileScheduler", "PersistentTileScheduler", "inline", "meta_class"]
