"""Storage of simulated buffers: bytes with typed views, and flags for which bytes have been written.

Buffers that share `data` share one Storage.  A granule is the unit of these flags, in bytes: the largest size that divides
the element size of every buffer over that storage.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from tilelang.arith.integers import row_major_strides
from tilelang.ir import VARIABLE, AddressOf, Alloc, Buffer, Call, Expr, Func, Var, numpy_dtype, walk, SHARED
from tilelang.ir.evaluate import ExprCompiler, Value

from .faults import fault


class Storage:
    """Bytes of one buffer's storage.  lanes: number of private copies (per-thread arrays), one row each; otherwise one row.

    known: one flag for each granule, False until it is written; None when everything counts as written.
    guard: which granules are registers of a wgmma in flight (registers.Guard), None where there is no wgmma.
    """

    __slots__ = ("name", "nbytes", "granule", "lanes", "raw", "known", "guard", "_views")

    def __init__(self, name: str, nbytes: int, granule: int, lanes: int = 1, known: bool = False) -> None:
        self.name, self.granule, self.lanes = name, granule, lanes
        self.nbytes = -(-max(nbytes, 1) // 16) * 16  # a multiple of 16 bytes, so that every element type divides a row
        self.raw = np.zeros((lanes, self.nbytes), np.uint8)
        self.known = None if known else np.zeros((lanes, self.nbytes // granule), bool)
        self.guard: Any = None
        self._views: dict[Any, np.ndarray] = {}

    def place(self, raw: np.ndarray) -> None:
        """Use other memory as the bytes of this storage: shape (lanes, nbytes)."""
        self.raw = raw
        self._views.clear()

    def view(self, dt: np.dtype) -> np.ndarray:
        """All rows as elements of a NumPy type: shape (lanes, elements)."""
        got = self._views.get(dt)
        if got is None:
            got = self._views[dt] = self.raw.view(dt)
        return got

    def flat(self, dt: np.dtype) -> np.ndarray:
        """The rows one after another, shape (lanes * elements,)."""
        return self.view(dt).reshape(-1)

    def granules_of(self, at: np.ndarray, item: int) -> np.ndarray:
        """Granule numbers of elements (or bytes) of `item` bytes; one axis more where an element has several granules."""
        k = item // self.granule
        return at // self.granule if k == 0 else at if k == 1 else at[..., None] * k + np.arange(k)

    def wrote(self, at: np.ndarray, item: int) -> None:
        """Elements of `item` bytes are written from now on."""
        if self.known is not None:
            self.known.reshape(-1)[self.granules_of(at, item)] = True

    def knows(self, at: np.ndarray, item: int) -> bool:
        """Whether all these elements of `item` bytes have been written."""
        return self.known is None or bool(self.known.reshape(-1)[self.granules_of(at, item)].all())


def strided(flat: np.ndarray, offset: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> np.ndarray:
    """A strided view of a flat array; offset and strides in elements.  (as_strided does not support every fp8 type.)"""
    item = flat.itemsize
    return np.ndarray(shape, flat.dtype, flat, offset * item, tuple(s * item for s in strides))


def granules(func: Func) -> dict[int, int]:
    """Granule size in bytes by id of a buffer's data variable."""
    out: dict[int, int] = {}
    for b in buffers_of(func):
        size = numpy_dtype(b.dtype).itemsize
        out[id(b.data)] = math.gcd(out.get(id(b.data), size), size)
    return out


def buffers_of(func: Func) -> list[Buffer]:
    """Every buffer that a function uses, once."""
    seen: dict[int, Buffer] = {}
    for _, b in func.buffers:
        seen[id(b)] = b
    for n in walk(func):
        if isinstance(n, Buffer):
            seen[id(n)] = n
    return list(seen.values())


def dims(exprs: ExprCompiler, values: tuple[Any, ...]) -> Callable[[Any], tuple[int, ...]]:
    """A function that evaluates shape or stride entries (ints or expressions) to Python ints at run time."""
    if all(isinstance(v, int) for v in values):
        fixed = tuple(values)
        return lambda f: fixed
    fns = [exprs.expr(v) if isinstance(v, Expr) else v for v in values]
    return lambda f: tuple(v if isinstance(v, int) else int(_one(v(f), f)) for v in fns)


def _one(v: Value, f: Any) -> Any:
    """The value of the first active lane: other lanes may not have computed theirs yet."""
    if v.ndim == 0:
        return v
    mask = getattr(f, "mask", None)
    return v.reshape(-1)[0 if mask is None or v.size != mask.size else int(mask.argmax())]


def span_of(shape: tuple[int, ...], strides: tuple[int, ...], offset: int = 0) -> int:
    """Elements from the start of the storage to the end of the buffer."""
    if any(d == 0 for d in shape):
        return offset
    return offset + 1 + sum((d - 1) * s for d, s in zip(shape, strides))


def geometry(exprs: ExprCompiler, b: Buffer) -> Callable[[Any], tuple[tuple[int, ...], tuple[int, ...], int]]:
    """A function that evaluates shape, strides and offset (elements) of a buffer at run time."""
    shape, offset = dims(exprs, b.shape), dims(exprs, (b.offset,))
    if b.strides_ is None:
        if b.is_static and isinstance(b.offset, int):
            fixed = (b.shape, row_major_strides(b.shape), b.offset)
            return lambda f: fixed

        def run(f: Any) -> tuple[tuple[int, ...], tuple[int, ...], int]:
            s = shape(f)
            return s, row_major_strides(s), offset(f)[0]

        return run
    strides = dims(exprs, b.strides_)
    return lambda f: (shape(f), strides(f), offset(f)[0])


def linear_index(indices: list[np.ndarray], shape: tuple[int, ...], strides: tuple[int, ...],
                 offset: int) -> tuple[np.ndarray, np.ndarray]:
    """(element number in the storage, whether it is outside the shape in some dimension); indices: int64."""
    linear: Value = np.int64(offset)
    bad: Value = np.False_
    for d, (i, n, s) in enumerate(zip(indices, shape, strides)):
        step = i if s == 1 else i * s
        out = i.view(np.uint64) >= n  # negative indices become larger than every extent
        linear = linear + step if d or offset else step
        bad = bad | out if d else out
    return np.asarray(linear), np.asarray(bad)


def out_of_bounds(b: Buffer, indices: list[Value], shape: tuple[int, ...], bad: np.ndarray, span: Any, what: str,
                  where: str = "") -> Exception:
    """The error for the first access in `bad` (a mask over the broadcast index arrays)."""
    grids = np.broadcast_arrays(*[np.asarray(i) for i in indices], np.asarray(bad))
    at = tuple(np.argwhere(grids[-1])[0])
    found = ", ".join(str(int(g[at])) for g in grids[:-1])
    return fault("sim-out-of-bounds", f"{what} {b.name}‹[{found}]› is outside its shape ({', '.join(map(str, shape))}){where}",
                 expected=f"indices below ({', '.join(map(str, shape))})", span=span,
                 hint=f"{b.name} is a {b.scope()} buffer: check the extent of the loop or region that indexes it")


class Memory:
    """Compiles the accesses to memory that intrinsics make; each simulator adds its own.  c: the context of the program."""

    named_block = False  # whether errors name the block

    def __init__(self, c: Any) -> None:
        self.c = c

    def elements(self, b: Buffer, indices: tuple[Expr, ...], count: int, span: Any, what: str,
                 write: bool = False) -> Callable[[Any], Any]:
        """f(frame) -> element numbers in b's storage, of shape () or (lanes,) (with `count` 0: one more axis, for vectors).

        Raises sim-out-of-bounds unless all `count` elements of every active lane are inside b's shape.
        """
        fns = [self.c.expr(i) for i in indices]
        geo, last, more = geometry(self.c, b), len(fns) - 1, max(count, 1) - 1

        def run(f: Any) -> np.ndarray:
            shape, strides, offset = geo(f)
            idx = [np.asarray(fn(f)).astype(np.int64, copy=False) for fn in fns]
            if count == 0:
                idx = [i if d == last else i[..., None] for d, i in enumerate(idx)]
            linear, bad = linear_index(idx, shape, strides, offset)
            if more:
                bad = bad | (idx[last] + more >= shape[last])
            if not bad.any():
                return linear
            m = f.mask if count or f.mask is None else f.mask[:, None]
            hit = bad if m is None else bad & m
            if hit.any():
                raise out_of_bounds(b, idx, shape, hit, span, what, f" in block {f.block.where}" if self.named_block else "")
            return np.where(bad, 0, linear)

        return run

    def cells(self, e: AddressOf, count: int, what: str, order: Any = None, atomic: Any = None) -> Callable[[Any], Any]:
        """f(frame) -> (flat array, element numbers (lanes, count), which of them to access) for an atomic access.

        order: its release and acquire semantics (releases.Releases).  atomic: what it does (target.atomics.Atomic).
        """
        raise NotImplementedError

    def start_of(self, f: Any, v: Var, held: Any) -> Value:
        """The address of the storage that the slot of v holds."""
        return self.c.addresses.start_of(v, held)


def new_storage(c: Any, s: Alloc, private: bool) -> Callable[[Any], Storage]:
    """f(frame) -> the storage of a buffer, with a row for each lane if it is private.

    A variable without an initial value starts at zero, and so does a workspace with the fact `zeroed`.
    """
    b, dt = s.buffer, numpy_dtype(s.buffer.dtype)
    geo, lanes, granule = geometry(c, b), b.dtype.lanes, c.granules[id(b.data)]
    init, item = c.expr(s.init) if s.init is not None else None, dt.itemsize * lanes

    def make(f: Any) -> Storage:
        store = Storage(b.name, span_of(*geo(f)) * item, granule, f.lanes if private else 1,
                        known=b.scope_name == VARIABLE or b.facts.zeroed)
        if init is not None:
            first = np.asarray(init(f))
            store.view(dt)[:, :lanes if lanes > 1 else None] = first[:, None] if lanes == 1 and first.ndim else first
        return store

    return make


def without_storage(b: Buffer, span: Any) -> Exception:
    """The error for an access to a buffer that has no storage where it is accessed."""
    return fault("sim-unsupported", f"{b.name} has no storage here",
                 expected="a buffer with storage", found=f"{b.name} without", span=span)


def shared_operand(e: Call, a: Expr, what: str = "element") -> AddressOf:
    """The operand a of an intrinsic.  Raises sim-unsupported unless it is the address of shared memory."""
    if not isinstance(a, AddressOf) or a.buffer.scope() not in SHARED:
        raise fault("sim-unsupported", f"{e.op} needs «the address of a shared {what}»", found=f"another operand of {e.op}",
                    span=e.span)
    return a


def uninitialized(b: Buffer, span: Any, where: str = "") -> Exception:
    """The error for a read of memory that nothing has written."""
    return fault("sim-uninitialized", f"{b.name} ({b.scope()}) is read before it is written{where}",
                 found=f"{b.name}, which nothing has written", span=span)
