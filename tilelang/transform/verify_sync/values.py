"""Evaluates index expressions for the threads of a stream: integers, one per thread or one for all.

Expressions are compiled once to functions of a frame.  None stands for an unknown value (data, floats).
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from tilelang.ir import AddressOf, Binary, Buffer, Call, Cast, Const, Expr, Load, Select, Unary, Var
from tilelang.ir.record import record
from tilelang.ir.numbers import keeps_value, may_wrap, shifted_left, shifted_right, wrapped
from tilelang.target.warp_groups import warps_of

from .sync_fault import Undecided

Fn = Callable[[Any], Any]


class Descriptor(NamedTuple):
    """A wgmma descriptor: address in bytes, lbo, sbo and swizzle; an integer added to it counts units of 16 bytes."""

    address: int
    lbo: int
    sbo: int
    swizzle: int

    def plus(self, n: int) -> Descriptor:
        """This descriptor advanced by n * 16 bytes."""
        return Descriptor(self.address + 16 * n, self.lbo, self.sbo, self.swizzle)


def one(value: Any, what: str) -> int:
    """The value that all threads of a stream have in common.  Raises Undecided where they differ."""
    if value is None:
        raise Undecided(f"{what} is known only at run time")
    if isinstance(value, np.ndarray):
        first = value.flat[0]
        if (value != first).any():
            raise Undecided(f"{what} differs between the threads of a warp group")
        return int(first)
    return int(value)


@record
class Marked:
    """Assumed content of a tensor where loops are left depending on a value read from it.

    The value is `there` at one place of the last dimension and `elsewhere` at the others.
    """

    place: int
    there: int
    elsewhere: int


def number(scale: int | Marked, at: tuple[Any, ...]) -> int | None:
    """The integer that a tensor is assumed to hold at a place: growing by `scale` along it, or as Marked says.

    None at places that are unknown or differ between threads.
    """
    if any(i is None or isinstance(i, np.ndarray) for i in at):
        return None
    if isinstance(scale, Marked):
        return scale.there if at and int(at[-1]) == scale.place else scale.elsewhere
    flat = 0
    for i in at:
        flat = flat * 64 + int(i)
    return scale * (flat + 1)


def _divided(fn: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """A division, which has no value where something is divided by zero."""
    return lambda a, b: fn(a, b) if (b if type(b) is int else np.all(b)) else None


def _trunc(a: Any, b: Any) -> Any:
    return np.sign(a) * np.sign(b) * (abs(a) // abs(b))


def _least(a: Any, b: Any) -> Any:
    return min(a, b) if isinstance(a, int) and isinstance(b, int) else np.minimum(a, b)


def _most(a: Any, b: Any) -> Any:
    return max(a, b) if isinstance(a, int) and isinstance(b, int) else np.maximum(a, b)


_OPS: dict[str, Callable[[Any, Any], Any]] = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "min": _least, "max": _most,
    "bitand": operator.and_, "bitor": operator.or_, "bitxor": operator.xor, "shl": shifted_left,
    "shr": shifted_right, "eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "le": operator.le,
    "gt": operator.gt, "ge": operator.ge, "floordiv": _divided(operator.floordiv),
    "floormod": _divided(operator.mod), "truncdiv": _divided(_trunc), "truncmod": _divided(lambda a, b: a - _trunc(a, b) * b),
}


RANKS = ("world_rank", "world_size")  # what all threads of a device have in common: kept beside the variables
# Numbers of a thread in its block.
_INDICES: dict[str, Callable[..., Any]] = {
    "get_lane_idx": lambda t, warp=32: t % warp, "get_warp_idx": lambda t, warp=32: t // warp,
    "get_warp_idx_sync": lambda t, warp=32: t // warp,
    "get_warp_group_idx": lambda t, warp=32, warps=4: t // (warp * warps)}


def _not(a: Any) -> Any:
    return ~a if isinstance(a, np.ndarray) else not a


class Values:
    """Compiled expressions of one launch.  places: storage -> first byte of shared memory.  threads: thread variables."""

    def __init__(self, places: dict[Var, int], threads: tuple[Var, ...]) -> None:
        self.places, self.threads = places, threads
        self._constant: dict[int, bool] = {}
        self._made: dict[int, tuple[Expr, Fn]] = {}

    def __call__(self, e: Expr, f: Any) -> Any:
        """Value of e in a frame."""
        return self._of(e)(f)

    def address(self, b: Buffer, indices: tuple[Expr, ...], f: Any) -> Any:
        """Byte of shared memory where an element lies, per thread or one for all; None when unknown."""
        at = self(indices[0], f) if len(indices) == 1 else None
        return None if at is None else self.places[b.data] + at * b.dtype.bytes

    def _of(self, e: Expr) -> Fn:
        got = self._made.get(id(e))
        if got is None:
            got = self._made[id(e)] = (e, self._compile(e))
        return got[1]

    def _compile(self, e: Expr) -> Fn:
        match e:
            case Const():
                value = None if e.dtype.is_float else e.value
                return lambda f: value
            case Var():
                return lambda f: f.env.get(e)
            case Binary():
                return self._binary(e)
            case Unary():
                return self._unary(e)
            case Cast():
                return self._cast(e)
            case Select():
                return self._select(e)
            case Load():
                return self._load(e)
            case Call():
                return self._call(e)
        return lambda f: None

    def _binary(self, e: Binary) -> Fn:
        x, y = self._of(e.a), self._of(e.b)
        if e.op in ("and", "or"):
            stop = e.op == "or"

            def logical(f: Any) -> Any:
                a = x(f)
                if a is not None and not isinstance(a, np.ndarray):
                    return stop if bool(a) == stop else y(f)
                b = y(f)
                if a is None or b is None:
                    return stop if b is not None and not isinstance(b, np.ndarray) and bool(b) == stop else None
                return a | b if stop else a & b
            return logical
        if self._is_constant(e):
            return self._once(e, self._operation(e, x, y))
        return self._operation(e, x, y)

    def _is_constant(self, e: Expr) -> bool:
        """Whether a value depends on the thread alone."""
        got = self._constant.get(id(e))
        if got is None:
            if isinstance(e, Binary):
                got = self._is_constant(e.a) and self._is_constant(e.b)
            elif isinstance(e, Cast):
                got = self._is_constant(e.value)
            else:
                got = isinstance(e, Const) or isinstance(e, Var) and e in self.threads
            self._constant[id(e)] = got
        return got

    def _once(self, e: Expr, fn: Fn) -> Fn:
        """Wrap fn to compute its value once per stream; one number where all threads of the stream have the same value."""
        key = id(e)

        def once(f: Any) -> Any:
            if key not in f.constants:
                v = fn(f)
                if isinstance(v, np.ndarray) and (v == v.flat[0]).all():
                    v = v.flat[0].item()
                f.constants[key] = v
            return f.constants[key]
        return once

    def _operation(self, e: Binary, x: Fn, y: Fn) -> Fn:
        op = _OPS.get(e.op)
        if op is None or e.dtype.is_float or e.a.dtype.is_float:
            return lambda f: None
        fits, asks = may_wrap(e.dtype, e.op), e.op in ("eq", "ne")

        def binary(f: Any) -> Any:
            a, b = x(f), y(f)
            if a is None or b is None:
                return f.compared(e, a, b) if asks else None
            if type(a) is int and type(b) is int and not fits:
                return op(a, b)
            if isinstance(a, Descriptor):
                return a.plus(one(b, "a descriptor")) if e.op == "add" else None
            if isinstance(b, Descriptor):
                return b.plus(one(a, "a descriptor")) if e.op == "add" else None
            out = op(a, b)
            return wrapped(out, e.dtype) if fits and out is not None else out
        return binary

    def _unary(self, e: Unary) -> Fn:
        x = self._of(e.a)
        op: Any = {"neg": operator.neg, "not": _not, "bitnot": operator.invert}.get(e.op)
        if op is None:
            return lambda f: None

        def unary(f: Any) -> Any:
            a = x(f)
            return None if a is None else wrapped(op(a), e.dtype) if may_wrap(e.dtype) else op(a)
        return unary

    def _cast(self, e: Cast) -> Fn:
        if e.dtype.is_float or e.value.dtype.is_float:
            return lambda f: None
        x = self._of(e.value)
        if keeps_value(e.value.dtype, e.dtype):
            return x

        def fitted(f: Any) -> Any:
            a = x(f)
            return a if a is None or isinstance(a, Descriptor) else wrapped(a, e.dtype)
        return fitted

    def _select(self, e: Select) -> Fn:
        c, x, y = self._of(e.cond), self._of(e.a), self._of(e.b)

        def select(f: Any) -> Any:
            which = c(f)
            if which is None:
                return None
            if not isinstance(which, np.ndarray):
                return x(f) if which else y(f)
            a, b = x(f), y(f)
            return None if a is None or b is None else np.where(which, a, b)
        return select

    def _load(self, e: Load) -> Fn:
        if e.dtype.is_float or e.dtype.lanes != 1:
            return lambda f: None
        indices = [self._of(i) for i in e.indices]
        return lambda f: f.load(e, tuple(i(f) for i in indices))

    def _call(self, e: Call) -> Fn:
        if e.op == "in_warp_groups":
            first, count = warps_of(e) or (0, 0)
            return lambda f: f.in_warps(first, count)
        if e.op == "elect_one":
            return lambda f: f.elected()
        if e.op == "wgmma_descriptor":
            return self._descriptor(e)
        if e.op == "warp_uniform":
            return self._of(e.args[0])
        if e.op in RANKS:
            return lambda f: f.env.get(e.op)
        if e.op == "by_nvshmem":
            return lambda f: False
        if e.op in ("cluster_rank", "cluster_size"):
            return (lambda f: f.block.rank) if e.op == "cluster_rank" else (lambda f: len(f.block.model.blocks))
        if e.op in _INDICES and all(isinstance(a, Const) for a in e.args):
            fn = _INDICES[e.op]
            sizes = [int(a.value) for a in e.args]  # type: ignore[attr-defined]
            return lambda f: fn(f.threads, *sizes)
        return lambda f: None

    def _descriptor(self, e: Call) -> Fn:
        a = e.args[0]
        more = self._of(e.args[1]) if len(e.args) > 1 else None
        plus, lbo, sbo, swizzle = (getattr(e.options, k) for k in ("offset", "lbo", "sbo", "swizzle"))
        if not isinstance(a, AddressOf):
            return lambda f: None

        def descriptor(f: Any) -> Any:
            at = one(f.block.values.address(a.buffer, a.indices, f), f"where in `{a.buffer.name}` a matrix starts")
            extra = one(more(f), "the start of a matrix") if more is not None else 0
            return Descriptor(at + extra + plus, lbo, sbo, swizzle)
        return descriptor
