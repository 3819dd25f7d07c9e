"""Fits the modes (digits) of a layout to a user's functions of indices; what Layout and Fragment have in common."""

from __future__ import annotations

from collections.abc import Sequence
from inspect import signature
from math import prod
from typing import Any

import numpy as np

from tilelang.errors import facts
from tilelang.ir import Expr, Var, const

from .draw import MAX_ROWS
from .mode import REGISTER, THREAD, Modes, error, evaluate_index, fit

_MOST = 1 << 24  # most elements, with their copies, of a fragment given by functions


class IndexMap:
    """A map of the indices of a tile of static shape."""

    shape: tuple[int, ...]
    _symbolic: Any  # the index variables, then what they are mapped to
    index: list[Expr]

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def is_equal(self, other: Any) -> bool:
        """Whether both put every element at the same place (of a Fragment: in the same threads and register)."""
        return bool(self == other)

    def get_input_shape(self) -> list[int]:
        return list(self.shape)

    def get_forward_index(self) -> list[Expr]:
        return self.index

    def get_forward_vars(self) -> list[Var]:
        return list(self._symbolic[0])

    def _repr_svg_(self) -> str:
        """The picture that notebooks show: at most the first 32 rows and columns."""
        from .picture import picture_of, svg_of  # 2 ms

        return svg_of(picture_of(self, most=MAX_ROWS))


def index_vars(n: int) -> tuple[Var, ...]:
    """The index variables in printed layouts: _i, _j, _k, …"""
    return tuple(Var("_" + ("ijklmnpq"[d] if d < 8 else f"d{d}"), const(0).dtype) for d in range(n))


def static_extents(shape: Any, what: str) -> tuple[int, ...]:
    """The extents of a layout.  Raises layout-invalid if shape is not a tuple of integers."""
    try:
        if isinstance(shape, str):
            raise TypeError
        return tuple(int(s) for s in ((shape,) if isinstance(shape, int) else shape))
    except (TypeError, ValueError):
        raise error("layout-invalid", f"the shape of a {what} is «a tuple of integers», found {shape!r}",
                    hint="write (64, 32); layouts have static shapes") from None


def leading_extents(given: Any, what: str) -> tuple[int, ...]:
    """Positive extents given as an integer or a list.  Raises TypeError for anything else, ValueError for extents below 1."""
    extents = (given,) if isinstance(given, int) and not isinstance(given, bool) else given
    if not isinstance(extents, (list, tuple)) or not all(isinstance(s, int) and not isinstance(s, bool) for s in extents):
        raise facts(TypeError(f"{what} takes an integer or a list of integers, found {given!r}"),
                    "an integer or a list of integers", repr(given))
    if any(s <= 0 for s in extents):
        raise facts(ValueError(f"{what}: extents must be positive, found {tuple(extents)}"),
                    "positive extents", str(tuple(extents)))
    return tuple(extents)


def applied(fn: Any, args: Sequence[Any], what: str) -> Any:
    """The result of a user's function of indices.  Raises layout-invalid if it cannot be called with these arguments."""
    if not callable(fn):
        raise error("layout-invalid", f"{what} needs a function of its indices, found {fn!r}",
                    expected="a function of the indices", hint="write lambda i, j: (i, j)")
    try:
        signature(fn).bind(*args)
    except TypeError as e:
        raise error("layout-invalid", f"the function of {what} does not take {len(args)} indices: ‹{e}›",
                    expected=f"a function of {len(args)} indices", hint="one argument for each dimension") from None
    except ValueError:  # a builtin without a signature
        pass
    return fn(*args)


def outer(tables: list[np.ndarray]) -> np.ndarray:
    """The outer sum of 1-D tables: element [i, j, ...] is tables[0][i] + tables[1][j] + ..."""
    out = np.zeros((), dtype=np.int64)
    for t in tables:
        out = out[..., None] + t
    return out


def fit_functions(shape: tuple[int, ...], forward: Any, thread_fn: Any, index_fn: Any,
                   count: int) -> tuple[tuple[Modes, ...], Modes]:
    """(modes of each dimension, modes of the copies) of a fragment given by functions of the indices and, optionally, the copy.

    forward returns (thread, register).  Without it, thread_fn returns the thread and index_fn the register; without index_fn
    the elements of a thread take its registers in row-major order.
    count: copies of each element.  Raises layout-invalid, and layout-no-structure for functions that modes cannot express.
    """
    vs = index_vars(len(shape))
    rep = Var("_rep", const(0).dtype)
    args = (*vs, rep) if count > 1 else vs
    if forward is not None:
        both = _call(forward, args, vs, shape)
        if not isinstance(both, (tuple, list)) or len(both) != 2:
            raise error("layout-invalid", f"forward_fn of Fragment {shape} gives a thread and a register, found {both!r}",
                        expected="two values: thread, register", hint="return (thread, register)")
        thread, index = both
    elif thread_fn is not None:
        thread = _call(thread_fn, args, vs, shape)
        index = None if index_fn is None else applied(index_fn, vs, f"the register of Fragment {shape}")
    else:
        raise error("layout-invalid", "a Fragment needs «forward_fn or forward_thread_fn»", found="neither")
    if isinstance(index, (list, tuple)):
        if len(index) != 1:
            raise error("layout-invalid", f"a Fragment's register must be «one number», found {len(index)}")
        index = index[0]
    if prod((count, *shape)) > _MOST:
        raise error("layout-invalid", f"Fragment {shape} in {count} copies has ‹{prod((count, *shape))}› elements: no block "
                    f"holds them", expected=f"at most {_MOST} elements", hint="use smaller tiles")
    grid = np.meshgrid(*[np.arange(n) for n in (count, *shape)], indexing="ij", sparse=True)
    env = dict(zip((rep, *vs), grid))
    full = (count, *shape)
    t = np.broadcast_to(evaluate_index(thread, env), full).astype(np.int64)
    r = np.broadcast_to(_ranks(t[0]) if index is None else evaluate_index(index, env), full).astype(np.int64)
    what = f"Fragment {shape}"
    if t.flat[0] or r.flat[0]:
        raise error("layout-no-structure", f"{what}: element 0 must be in «thread 0, register 0»; found ‹thread {t.flat[0]}, "
                    f"register {r.flat[0]}›")
    lines = []
    for d in range(len(full)):
        at: list[Any] = [0] * len(full)
        at[d] = slice(None)
        lines.append((t[tuple(at)], r[tuple(at)]))
    if not (np.array_equal(outer([a for a, _ in lines]), t) and np.array_equal(outer([b for _, b in lines]), r)):
        raise error("layout-no-structure", f"{what}: thread and register must be sums of functions of single indices",
                    found="another function")
    modes = [fit({THREAD: a, REGISTER: b}, what) for a, b in lines]
    if any(m.to == REGISTER for m in modes[0]):
        raise error("layout-invalid", f"{what}: copies must lie in different threads, the register depends on the copy",
                    expected="a register that does not depend on the copy", found="one that does")
    return tuple(modes[1:]), modes[0]


def _ranks(threads: np.ndarray) -> np.ndarray:
    """For each element the number of elements before it, in row-major order, that its thread holds."""
    flat = threads.reshape(-1)
    order = np.argsort(flat, kind="stable")
    place = np.empty_like(order)
    place[order] = np.arange(flat.size) - np.searchsorted(flat[order], flat[order])
    return place.reshape(threads.shape)


def _call(fn: Any, args: tuple[Any, ...], without_rep: tuple[Any, ...], shape: tuple[int, ...]) -> Any:
    """Call fn with args, which end with the copy, or without the copy if fn does not take it."""
    return fn(*args) if args != without_rep and _takes(fn, args) else applied(fn, without_rep, f"Fragment {shape}")


def _takes(fn: Any, args: tuple[Any, ...]) -> bool:
    """Whether the signature of fn accepts args.  fn is not called, so that a TypeError raised in fn is not hidden."""
    try:
        signature(fn).bind(*args)
    except (TypeError, ValueError):
        return False
    return True
