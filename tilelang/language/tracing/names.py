"""The values of the names of a traced function: assignment, and the values of a place at a time.

Elements of Python containers and objects in kernel code that read memory: they are read when the object is assigned.

Variables (T.alloc_var) in attributes and containers: `obj.v[0]` reads the variable, where a plain name reads as `v`.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

from tilelang import errors
from tilelang.errors import facts
from tilelang.ir import Buffer, Const, Expr, Load, Region, Var
from tilelang.ir.buffer import element_of_load

from .builder import OPS, SCALARS, Builder, log, reads_memory
from .python_questions import differs
from .regions import BufferSlice, store_slice, subscript
from .scope import Frame, Poison, Undefined
from .state import current, describe, error


def is_held(value: Any) -> bool:
    """Whether value is a variable of the program being traced that is not bound to a name of the function."""
    b = current()
    return b is not None and isinstance(value, Load) and id(value) in b.handles and id(value) not in b.named


@element_of_load.provide  # also in Python code that is not rewritten: properties, plain helpers
def element(value: Load, key: Any) -> Load:
    """`value[key]` of a held variable, whose only index is 0.  Raises TypeError, index-count."""
    if not is_held(value):
        raise facts(TypeError("'Load' object is not subscriptable"), "a buffer, or a variable in an attribute or container",
                    f"`{value!r}`")
    for k in key if isinstance(key, tuple) and len(key) == 1 else (key,):
        k = k.value if isinstance(k, Const) else k
        if not isinstance(k, int) or isinstance(k, bool) or k not in (0, -1):
            raise error("index-count", f"`{value.buffer.name}` is a variable: its only element is 0",
                        expected="the index 0", found=repr(key), hint="T.alloc_local makes an array")
    return value


_OTHERS = (type, ModuleType, FunctionType, MethodType, BuiltinFunctionType)
_LIBRARIES = frozenset(("tilelang", "torch", "numpy", "builtins", "functools"))


_DEPTH = 4  # of nested objects.  Objects that kernel code makes are shallow; others that it names may hold a whole model


def settle(value: Any, now: Callable[[Any], Any], depth: int = 0) -> Any:
    """Apply `now` to each element of lists and dicts and each attribute of the user's objects in an assigned value.

    Containers and objects are changed in place; tuples are rebuilt.  Objects of libraries and objects without a __dict__
    stay unchanged.
    """
    if isinstance(value, (Expr, BufferSlice)):
        return now(value)
    if depth == _DEPTH:
        return value
    if type(value) is tuple or isinstance(value, tuple) and hasattr(value, "_make"):
        kept = [settle(x, now, depth + 1) for x in value]
        if all(x is y for x, y in zip(kept, value)):
            return value
        return tuple(kept) if type(value) is tuple else value._make(kept)  # type: ignore[attr-defined]
    if not _is_open(value):
        return value
    inside = value if isinstance(value, (list, dict)) else vars(value)
    for key, x in list(inside.items() if isinstance(inside, dict) else enumerate(inside)):
        kept = settle(x, now, depth + 1)
        if kept is not x:
            inside[key] = kept
    return value


def _is_open(value: Any) -> bool:
    if isinstance(value, (list, dict)):
        return True
    return (not isinstance(value, _OTHERS) and hasattr(value, "__dict__")
            and type(value).__module__.partition(".")[0] not in _LIBRARIES)


class Names:
    """Assignment to names, elements and containers."""

    def __init__(self, b: Builder) -> None:
        self.b = b

    def bind(self, name: str, value: Any, old: Any = None) -> Any:
        """`name = value`: store into a variable, or bind the value and return what the name now stands for."""
        if isinstance(old, Load) and id(old) in self.b.named and not is_held(value):
            if isinstance(value, (Expr, BufferSlice, *SCALARS)) or hasattr(value, "__tilelang_expr__"):
                self.b.store(old.buffer, old.indices, value)
                return old
        elif isinstance(old, BufferSlice) and old.by_reference and isinstance(value, (Expr, *SCALARS)):
            store_slice(self.b, old, value)
            return old
        if isinstance(value, Frame) and value.opens_by_name:
            return self.bind_frame(name, self.b.enter(value))
        if isinstance(value, Expr):
            return self._bind_expr(name, value, old)
        if isinstance(value, Buffer):
            self.b.name_value(name, value)
        elif isinstance(value, BufferSlice):
            return self.freeze_slice(value)
        elif isinstance(value, Undefined):
            raise error("scope", f"`{name}` is assigned from a name that has no value yet",
                        found=f"`{name}` assigned from a name without one")
        elif isinstance(value, Poison):
            value._raise()  # assigning from a dead name is a use
        elif not self.b.lazy:  # variables made for a container stay in it, whatever else they are called later
            return settle(value, lambda x: x if id(x) in self.b.kept else self.as_it_is_now(x))
        return value

    def _bind_expr(self, name: str, value: Expr, old: Any) -> Any:
        if isinstance(value, Load) and id(value) in self.b.handles and id(value) not in self.b.named:
            self.b.named.add(id(value))
            self.b.name_value(name, value.buffer)
            return value
        if isinstance(value, Const):
            return value
        if isinstance(value, Var):
            self.b.name_value(name, value)
            return value
        if self.b.lazy or value.dtype.is_handle or (self.b.kernel is None and not reads_memory(value)):
            return value  # lazy: the name is used inside one expression, during which nothing changes
        if isinstance(old, Var) and not isinstance(old, Const):
            errors.warn("rebound", f"Immutable value `{name}` is re-bound", "use T.alloc_var for a variable that changes",
                        self.b.span(), log)
        v = self.b.let(name, value)
        if isinstance(value, Load) and not any(reads_memory(i) for i in value.indices):
            self.b.elements[id(v)] = (v, value)
        return v

    def bind_frame(self, name: str, value: Any, old: Any = None) -> Any:
        """Bind the target of a for header or `with … as`.  A loop over several extents needs one name per extent."""
        if isinstance(value, tuple):
            raise error("unpack", f"the header names one variable, the loop gives {len(value)}", expected="one name",
                        found=f"{len(value)} values", hint="name one variable per extent")
        self.b.name_value(name, value)
        return value

    def frame_values(self, value: Any, n: int, star: int | None = None) -> tuple[Any, ...]:
        """Unpack the value of a frame (a variable unpacks to itself)."""
        items = (value,) if isinstance(value, Var) else tuple(value) if isinstance(value, (tuple, list)) else None
        if items is None or len(items) != n:
            found = "one value" if items is None else f"{len(items)}"
            raise error("unpack", f"the header names {n} variables, the loop or launch gives ‹{found}›", expected=f"{n} values",
                        hint="name one variable per extent")
        return items

    def freeze(self, value: Any) -> Any:
        """The present value: an expression that reads memory is bound to a variable."""
        if self.b.lazy:
            return value
        if isinstance(value, Expr) and not isinstance(value, (Var, Const)) and not is_held(value):
            if reads_memory(value) or self.b.kernel is not None and not value.dtype.is_handle:
                v = self.b.nameless(self.b.let("t", value))
                if isinstance(value, Load) and not any(reads_memory(i) for i in value.indices):
                    self.b.elements[id(v)] = (v, value)
                return v
        if isinstance(value, tuple) and type(value) is tuple:
            return tuple(self.freeze(v) for v in value)
        return value

    def as_it_is_now(self, value: Any) -> Any:
        """An element of a Python container: an expression that reads memory is read here, not where it is used."""
        if isinstance(value, tuple) and type(value) is tuple:
            return tuple(self.as_it_is_now(v) for v in value)
        if isinstance(value, BufferSlice):
            return self.freeze_slice(value)
        if is_held(value):
            self.b.kept.add(id(value))
        elif isinstance(value, Expr) and reads_memory(value):
            return self.freeze(value)
        return value

    def freeze_slice(self, value: BufferSlice) -> BufferSlice:
        """The region with the present values of its bounds."""
        r = value.region
        if not any(isinstance(e, Expr) and reads_memory(e) for e in (*r.mins, *r.extents)):
            return value
        fixed = Region(r.buffer, tuple(self.freeze(e) for e in r.mins), tuple(self.freeze(e) for e in r.extents),
                       span=r.span)
        return BufferSlice(fixed, value.by_reference)

    def unpack(self, value: Any, n: int, star: int | None = None) -> tuple[Any, ...]:
        """The n values of a tuple assignment, all computed before the first is assigned."""
        if isinstance(value, (Expr, Buffer, BufferSlice)) and not isinstance(value, Var):
            raise error("unpack", f"cannot unpack ‹one› value into {n} names", expected=f"{n} values")
        items = list(value)
        if star is None and len(items) != n:
            raise error("unpack", f"expected «{n} values» to unpack, found {len(items)}")
        if star is not None:
            if len(items) < n - 1:
                raise error("unpack", f"expected «at least {n - 1} values» to unpack, found {len(items)}")
            tail = n - 1 - star
            items = [*items[:star], items[star:len(items) - tail], *items[len(items) - tail:]]
        return tuple(self.freeze(v) for v in items)

    def augment(self, name: str, old: Any, op: str, value: Any) -> Any:
        """`name op= value`."""
        if isinstance(old, Undefined):
            raise error("scope", f"`{name}` is used before it has a value", found=f"`{name}` without one")
        if isinstance(old, (Buffer, BufferSlice)):
            raise error("whole-buffer-assignment", f"`{name} {op}=` on a whole buffer is not supported: use slice assignment",
                        found=f"`{name}`, a whole buffer")
        return self.bind(name, self._apply(op, old, value), old)

    def _apply(self, op: str, a: Any, b: Any) -> Any:
        if isinstance(a, Expr) and isinstance(b, str):
            raise facts(TypeError(f"`{op}=` of an expression and a string"), "two values", "a string")
        return OPS[op](a, b)

    def setitem(self, target: Any, key: Any, value: Any, op: str = "") -> None:
        """`target[key] = value`, or `target[key] op= value`; indices are evaluated once."""
        def new(old: Any) -> Any:
            return OPS[op](old, value) if op else value

        if isinstance(target, Buffer):
            where = subscript(target, key, storing=True)
            if isinstance(where, BufferSlice):
                store_slice(self.b, where, new(where))
            else:
                self.b.store(target, where.indices, new(where))
        elif is_held(target):
            self.b.store(target.buffer, element(target, key).indices, new(target))
        elif op:
            self._keep(target, key, new(self.getitem(target, key)))
        elif isinstance(target, Poison):
            target._raise()
        elif isinstance(target, (Expr, BufferSlice)):
            raise error("store-target", f"‹{describe(target)}› does not support item assignment")
        else:
            self._keep(target, key, value)

    def _keep(self, container: Any, key: Any, value: Any) -> None:
        """`container[key] = value` of Python: once, while tracing."""
        if isinstance(value, SCALARS) and not all(f.once for f in self.b.frames):
            errors.warn("python-element", f"an element of a Python {type(container).__name__} is assigned a number in a "
                        "run-time loop or branch; that happens once, while tracing", "use T.alloc_var for a value that changes",
                        self.b.span(), log)
        self._of_host(container, key, lambda: container.__setitem__(key, self.as_it_is_now(value)))

    def getitem(self, target: Any, key: Any) -> Any:
        """`target[key]` where target is an attribute or an element of a container (it may hold a variable)."""
        return self._of_host(target, key, lambda: target[key])

    def _of_host(self, target: Any, key: Any, access: Callable[[], Any]) -> Any:
        """access() to an element.  Raises container-key, host-index where a container of Python or NumPy has none."""
        try:
            return access()
        except (IndexError, KeyError) as e:
            if isinstance(e, errors.TileLangError) or type(target).__module__ not in ("builtins", "collections", "numpy"):
                raise
            kind, hint = ("host-index", "pass the array as a parameter, `name: T.Tensor(shape, dtype)`") if differs(key) else (
                "container-key", "")
            raise error(kind, f"{type(e).__name__}: {e}", found=describe(key), hint=hint) from None

    def slice(self, start: Any, stop: Any, step: Any) -> builtins.slice:
        return slice(start, stop, step)

    def collected(self, made: Any) -> Any:
        """A list or dict that was just made: elements that read memory are read now."""
        if not self.b.lazy:
            for key, value in made.items() if isinstance(made, dict) else enumerate(made):
                kept = self.as_it_is_now(value)
                if kept is not value:
                    made[key] = kept
        return made
