"""The host side of a simulated call: binds arguments to parameters, solves symbolic dimensions, returns results."""

from __future__ import annotations

import ctypes
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from tilelang.arith.integers import row_major_strides
from tilelang.errors import warn
from tilelang.ir import Binary, Buffer, Const, Expr, Func, Var, free_vars, numpy_dtype
from tilelang.ir.evaluate import evaluate
from tilelang.ir.numbers import to_dtype

from .addresses import LINE, Addresses, room
from .context import Context
from .faults import fault
from .lanes import LaneFrame
from .memory import Storage, buffers_of, span_of, strided
from .ranks import symmetric


Arguments = Mapping[str, Any] | Sequence[Any]


@dataclass
class Tensor:
    """One tensor parameter: its buffer, run-time shape and strides (elements), and its storage."""

    buffer: Buffer
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    storage: Storage
    address: int | None = None  # of the caller's memory behind a pointer parameter; written back after the run

    @property
    def item(self) -> int:
        """Size of an element in bytes."""
        return numpy_dtype(self.buffer.dtype).itemsize * self.buffer.dtype.lanes

    def array(self) -> np.ndarray:
        """The tensor as a NumPy array that views the storage."""
        return self._window(self.storage.flat(numpy_dtype(self.buffer.dtype)))

    def array_at(self, address: int) -> np.ndarray:
        """An array of the same shape and strides over the memory at `address`."""
        count = span_of(self.shape, self.strides, self.offset) * self.item if 0 not in self.shape else 0
        raw = np.frombuffer((ctypes.c_uint8 * count).from_address(address), np.uint8)  # type: ignore[call-overload]
        return self._window(raw.view(numpy_dtype(self.buffer.dtype)))

    def written(self) -> np.ndarray:
        """Whether each element was written; only of tensors whose storage records it."""
        known, granule, size = self.storage.known, self.storage.granule, numpy_dtype(self.buffer.dtype).itemsize
        assert known is not None, "an output records what is written"
        flags = np.repeat(known.reshape(-1), granule // size) if granule > size else known.reshape(-1, size // granule).all(1)
        return self._window(np.ascontiguousarray(flags))

    def _window(self, flat: np.ndarray) -> np.ndarray:
        shape, strides = self.shape, self.strides
        if self.buffer.dtype.lanes > 1:
            lanes = self.buffer.dtype.lanes
            shape, strides = (*shape, lanes), (*(s * lanes for s in strides), 1)
        return strided(flat, self.offset * self.buffer.dtype.lanes, shape, strides)


@dataclass
class Binding:
    """values: scalars, and pointers that become no tensor of known size.  tensors: in parameter order."""

    values: dict[Var, Any]
    tensors: list[Tensor]
    addresses: Addresses = field(default_factory=Addresses)

    def outputs(self, check: bool = True) -> dict[str, np.ndarray]:
        """Every tensor after the run, by buffer name, as compact copies.  Memory behind pointer parameters is written back.

        check: writes were recorded.  Then elements of outputs that nothing has written are poison, and a warning counts them.
        """
        for t in self.tensors:
            if t.address is not None:
                t.array_at(t.address)[...] = t.array()
        out = {t.buffer.name: np.array(t.array()) for t in self.tensors}
        for t in self.tensors:
            if check and t.storage.known is not None and (missed := ~t.written()).any():
                name = t.buffer.name
                out[name][missed] = poison(out[name].dtype)
                lacks = f"{int(missed.sum())} of {missed.size} elements of `{name}` were not written{_reach(name, ~missed)}"
                warn("unwritten-output", lacks, "compare the grid, the indices of stores and the tiles that are stored with "
                     "its shape", t.buffer.span)
        return out


def _reach(name: str, written: np.ndarray) -> str:
    """Which part of an array is written, and where the first element stands that is not; "" where nothing is."""
    if not written.any() or not written.ndim:
        return ""
    first = ", ".join(str(int(i[0])) for i in np.nonzero(~written))
    box = ", ".join(f"{int(i.min())}:{int(i.max()) + 1}" for i in np.nonzero(written))
    return f", first {name}[{first}]: all that is written lies in {name}[{box}]"


def poison(dt: np.dtype) -> Any:
    """What stands for an element that nothing has written: bytes of ones, NaN in every float type; True in bool."""
    return np.bool_(True) if dt.kind == "b" else np.full(dt.itemsize, 255, np.uint8).view(dt)[0]


def bind_arguments(func: Func, args: Arguments, granule: Mapping[int, int], aliased: bool = False) -> Binding:
    """Bind args to func's parameters.

    args: by name (of the buffer or the parameter) or in order.  Parameters listed in `tilelang_out_idx` may be left out; they
    are allocated and count as unwritten.  Arrays are copied, so the caller's do not change.  A pointer parameter takes an
    address; tensors that the program makes of it are read from there and written back by `outputs`.  aliased: arrays that
    share memory also share their copy, so that writes through one are visible through the other.
    Raises sim-argument.
    """
    given = _by_param(func, args)
    values: dict[Var, Any] = {}
    for p in func.params:
        if func.buffer_of(p) is None:
            if p not in given:
                raise fault("sim-argument", f"argument {p.name} is missing",
                            expected=f"a value for {p.name}", found="none", span=func.span)
            if not p.dtype.is_handle:
                values[p] = to_dtype(np.asarray(given[p], np.float64), p.dtype) if p.dtype.is_float else \
                    np.asarray(given[p], numpy_dtype(p.dtype))
    arrays = {p: np.asarray(given[p]) for p, _ in func.buffers if p in given}
    _solve(func, arrays, values)
    tensors = [_tensor(b, arrays.get(p), values, granule) for p, b in func.buffers]
    made = [t for p in func.params if p.dtype.is_handle and func.buffer_of(p) is None
            for t in _pointer(func, p, int(given[p]), values, granule)]
    there = [(t, arrays[p]) for t, (p, _) in zip(tensors, func.buffers) if p in arrays and arrays[p].size]
    there += [(t, t.array_at(t.address)) for t in made if t.address and 0 not in t.shape]
    if aliased:
        _unify_overlapping(there)
    binding = Binding(values, tensors + made)
    for t, a in there:
        start, s = _start(t, a), t.storage
        if (start - int(s.raw.ctypes.data)) % LINE:  # alignment is checked with the caller's addresses
            copy = room(s.nbytes, start)
            copy[...] = s.raw
            s.place(copy)
        binding.addresses.add(start + t.offset * t.item, span_of(t.shape, t.strides) * t.item, s, t.offset * t.item,
                              span_of(t.shape, t.strides) != math.prod(t.shape))
    return binding


def run_program(c: Context, func: Func, args: Sequence[Arguments], aliased: bool, hold: Callable[[Storage], Any],
                block: Any = None) -> list[Binding]:
    """Compile a program and run it; args: for each rank, and so the result.  hold: what the slot of a tensor holds.  block: the
    state outside of launches.  Raises what the program raises, and as bind_arguments does."""
    c.granules.update({id(b.data): numpy_dtype(b.dtype).itemsize for _, b in func.buffers if b.facts.symmetric})
    bindings = [bind_arguments(func, a, c.granules, aliased) for a in args]
    c.addresses = bindings[0].addresses
    c.ranks.own = symmetric(c, bindings, hold)
    action = c.stmt(func.body)
    slots = c.new_slots(bindings[0].values)
    for k, held in c.ranks.own[0].items():
        slots[k] = held
    with np.errstate(all="ignore"):
        action(LaneFrame(slots, 1, None, block))
    return bindings


def _by_param(func: Func, args: Arguments) -> dict[Var, Any]:
    out_idx = func.facts.out_idx or ()
    outs = {i % len(func.params) for i in ((out_idx,) if isinstance(out_idx, int) else out_idx)}
    if isinstance(args, Mapping):
        names: dict[str, Var] = {}
        for p in func.params:
            b = func.buffer_of(p)
            names[p.name] = p
            if b is not None:
                names[b.name] = p
        unknown = [k for k in args if k not in names]
        if unknown:
            raise fault("sim-argument", f"no parameter is called ‹{unknown[0]}›: expected «one of {', '.join(sorted(names))}»",
                        span=func.span)
        return {names[k]: v for k, v in args.items()}
    if len(args) == len(func.params):
        return dict(zip(func.params, args))
    inputs = [p for i, p in enumerate(func.params) if i not in outs]
    if len(args) != len(inputs):
        raise fault("sim-argument", f"{func.name} takes {len(func.params)} arguments ({len(inputs)} without its outputs), "
                    f"found {len(args)}", expected=f"{len(inputs)} arguments", span=func.span)
    return dict(zip(inputs, args))


def _solve(func: Func, arrays: dict[Var, np.ndarray], values: dict[Var, Any]) -> None:
    """Solve symbolic dimensions and strides from the arrays: plain variables first, then linear expressions in one variable."""
    entries: list[tuple[Any, int, str]] = []
    for p, b in func.buffers:
        a = arrays.get(p)
        if a is None:
            continue
        shape = a.shape[:-1] if b.dtype.lanes > 1 else a.shape
        if len(shape) != len(b.shape):
            raise fault("sim-argument", f"{b.name} has «{len(b.shape)} dimensions», found an array with ‹{len(shape)}›",
                        span=b.span)
        if a.dtype != numpy_dtype(b.dtype):
            raise fault("sim-argument", f"{b.name} has dtype «{b.dtype}», found an array of ‹{a.dtype}›", span=b.span)
        entries += [(d, n, f"{b.name}.shape[{i}]") for i, (d, n) in enumerate(zip(b.shape, shape))]
        entries += [(d, s // a.itemsize, f"{b.name}.strides[{i}]")
                    for i, (d, s) in enumerate(zip(b.strides_ or (), a.strides)) if isinstance(d, Expr)]
    for d, n, _ in entries:
        if isinstance(d, Var) and d not in values:
            values[d] = np.asarray(n, numpy_dtype(d.dtype))
    for d, n, what in entries:
        unknown = [v for v in free_vars(d) if v not in values] if isinstance(d, Expr) else []
        if len(unknown) == 1:
            v, whole = unknown[0], d
            if isinstance(d, Binary) and d.op == "floordiv" and isinstance(d.b, Const):  # rows of packed values: whole bytes
                whole, n = d.a, n * d.b.value
            at0, at1 = (int(evaluate(whole, {**values, v: x})) for x in (0, 1))
            if at1 == at0 or (n - at0) % (at1 - at0):
                raise fault("sim-argument", f"{what} = ‹{n}› has no solution for {v.name}",
                            expected=f"an extent that gives {v.name} an integer", span=func.span)
            values[v] = np.asarray((n - at0) // (at1 - at0), numpy_dtype(v.dtype))
    for d, n, what in entries:
        want = int(evaluate(d, values)) if isinstance(d, Expr) else d
        if want != n:
            raise fault("sim-argument", f"{what}: expected «{want}», found {n}", span=func.span)


def _tensor(b: Buffer, a: np.ndarray | None, values: dict[Var, Any], granule: Mapping[int, int]) -> Tensor:
    def number(d: Any) -> int:
        return int(evaluate(d, values)) if isinstance(d, Expr) else d

    shape = tuple(number(d) for d in b.shape)
    strides = tuple(number(d) for d in b.strides_) if b.strides_ is not None else row_major_strides(shape)
    item = numpy_dtype(b.dtype).itemsize * b.dtype.lanes
    offset = number(b.offset)
    store = Storage(b.name, span_of(shape, strides, offset) * item, granule.get(id(b.data), item), known=a is not None)
    t = Tensor(b, shape, strides, offset, store)
    if a is not None:
        t.array()[...] = a
    return t


def _start(t: Tensor, a: np.ndarray) -> int:
    """The caller's address of the first byte of the storage that holds a's elements."""
    return int(a.ctypes.data) - t.offset * t.item


def _unify_overlapping(given: list[tuple[Tensor, np.ndarray]]) -> None:
    """Give tensors whose arrays overlap one common copy."""
    given = sorted(given, key=lambda x: _start(*x))
    while given:
        first = end = _start(*given[0])
        group: list[tuple[Tensor, np.ndarray]] = []
        while given and (not group or _start(*given[0]) < end):
            t, a = given.pop(0)
            group.append((t, a))
            end = max(end, int(a.ctypes.data) + sum((n - 1) * s for n, s in zip(a.shape, a.strides)) + a.itemsize)
        if len(group) > 1:
            memory = room(end - first + LINE, first)
            for t, a in group:
                at = _start(t, a) - first
                t.storage.place(memory[:, at:at + t.storage.nbytes])
                t.array()[...] = a


def _pointer(func: Func, p: Var, address: int, values: dict[Var, Any], granule: Mapping[int, int]) -> list[Tensor]:
    """The memory behind a pointer parameter, as the largest tensor that the program makes of it.

    Returns none, and binds p to a number in `values`, for the null pointer and where the program makes no tensor of it or one
    whose size only the kernel knows.  Accesses then look up their memory when they are executed.
    """
    views = [b for b in buffers_of(func) if b.data is p]
    sizes = [v for b in views for v in free_vars(b)]
    if not views or not address or any(v not in values for v in sizes):
        values[p] = np.uint64(address)
        return []
    out = max((_tensor(b, None, values, granule) for b in views), key=lambda t: t.storage.nbytes)
    known = Storage(out.storage.name, out.storage.nbytes, out.storage.granule, known=True)
    out = replace(out, storage=known, address=address)
    out.array()[...] = out.array_at(address)
    return [out]


def clusters(extents: list[int], dims: tuple[int, int, int] | None, span: Any) -> Iterator[list[tuple[int, ...]]]:
    """The block indices (x, y, z) of each cluster of a grid, by rank; without clusters one block each."""
    inner = (dims or (1, 1, 1))[:len(extents)]
    for n, extent, axis in zip((*inner, 1), (*extents, 1), "xyz"):
        if extent % n:
            raise fault("sim-cluster", f"clusters of {n} blocks along {axis} do not divide a grid of ‹{extent}›",
                        expected=f"a grid that is a multiple of {n} along {axis}", span=span)
    if dims is not None and any(n > 1 for n in dims[len(extents):]):
        raise fault("sim-cluster", f"clusters of ‹{dims}› blocks do not divide a grid of {len(extents)} dimensions",
                    expected=f"a cluster of {len(extents)} dimensions", span=span)
    for at in itertools.product(*(range(0, n, k) for n, k in zip(reversed(extents), reversed(inner)))):
        yield [tuple(a + b for a, b in zip(reversed(at), reversed(more)))
               for more in itertools.product(*(range(k) for k in reversed(inner)))]
