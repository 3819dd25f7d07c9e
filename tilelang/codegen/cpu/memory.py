"""Prints memory accesses: addresses, guards of global memory, vector accesses."""

from __future__ import annotations

from functools import partial

from tilelang.ir import AddressOf, Buffer, Const, Expr, Load, Ramp, Store, dtype, GLOBAL
from tilelang.target.cpu import unsupported
from tilelang.target.cpu_launch import CheckedAddress, CheckedLoad, CheckedStore

from .state import Code, Storage
from .types import convert, literal, load, memory_type, store, value_type


class MemoryPrinter:
    """Prints accesses into the function of a Code."""

    def __init__(self, cx: Code) -> None:
        self.cx = cx

    def strides(self, b: Buffer) -> list[str]:
        """The strides of a buffer in elements, i64."""
        if b.strides_ is not None:
            return [self.cx.index(s) for s in b.strides_]
        out, step = ["1"], "1"
        for d in reversed(b.shape[1:]):
            step = self.cx.f.mul(step, self.cx.index(d))
            out.append(step)
        return out[::-1] if b.shape else []

    def offset(self, b: Buffer, indices: list[str]) -> str:
        """The linear offset of b[indices] from the start of its storage, in elements."""
        at = self.cx.index(b.offset)
        for i, s in zip(indices, self.strides(b)):
            at = self.cx.f.add(self.cx.f.mul(i, s), at)
        return at

    def base_of(self, b: Buffer) -> Storage:
        got = self.cx.storage.get(b.data)
        if got is None:
            bound = self.cx.vars.get(b.data)  # an untyped pointer parameter, or a pointer computed in the program
            if b.data in self.cx.block.slots:
                return Storage(self.cx.value(b.data))
            if bound is None or bound.value is None:
                raise unsupported(f"buffer {b.name} ({b.scope()}) here", span=b.span or self.cx.span,
                                  hint="it has no storage on the CPU target at this place")
            return Storage(bound.value)
        return got

    def address(self, b: Buffer, indices: list[str]) -> str:
        """The address of an element, without a guard."""
        at, where = self.offset(b, indices), self.base_of(b)
        base, size = where.base, b.dtype.bytes
        if where.copies > 1:
            tid = self.cx.block.tid or self.cx.block.first_thread
            if where.unit > size:  # an element of a view: which bytes of which unit
                f, parts = self.cx.f, str(where.unit // size)
                whole, part = (f.let(f"udiv i64 {at}, {parts}"), f.let(f"urem i64 {at}, {parts}")) if not at.isdigit() else map(
                    str, divmod(int(at), int(parts)))
                at = f.add(f.mul(f.add(f.mul(whole, str(where.copies)), tid), parts), part)
            else:
                at = self.cx.f.add(self.cx.f.mul(at, str(where.copies)), tid)
        return self.cx.f.at(base, memory_type(b.dtype, self.cx.span), at)

    def in_range(self, n: Load | Store | AddressOf, at: list[str]) -> str:
        """i1: whether the element of an access at indices `at` exists ("true" where that is known)."""
        b, f = n.buffer, self.cx.f
        if b.scope() != GLOBAL:
            return "true"
        ok = "true"
        dims = n.guards if isinstance(n, (CheckedLoad, CheckedStore, CheckedAddress)) else range(len(at))
        for d in dims:
            ok = f.both(ok, f.let(f"icmp ult i64 {at[d]}, {self.cx.index(b.shape[d])}"))
        return ok

    def safe_value(self, b: Buffer, dt: dtype) -> str:
        """The value of a load outside b's shape."""
        e = self.cx.safe_values.get(b)
        return literal(0, dt) if e is None else self.cx.cast_value(e, dt)

    def load(self, e: Load) -> str:
        b = e.buffer
        if any(i.dtype.lanes > 1 for i in e.indices):
            return self._load_lanes(e)
        at = [self.cx.index(i) for i in e.indices]
        ok = self.in_range(e, at)
        if ok == "true":
            return load(self.cx.f, e.dtype, self.address(b, at), e.span or self.cx.span)
        return self.cx.f.choose(ok, value_type(e.dtype), lambda: load(self.cx.f, e.dtype, self.address(b, at)),
                             lambda: self.safe_value(b, e.dtype))

    def _load_lanes(self, e: Load) -> str:
        b, dt = e.buffer, e.buffer.dtype
        lanes = max(i.dtype.lanes for i in e.indices)
        if dt.lanes > 1:
            raise unsupported("a vector index into a buffer of vectors", span=e.span or self.cx.span)
        if self._is_run(b, e.indices):
            at = [self.cx.index(i) for i in e.indices[:-1]] + [self.cx.index(e.indices[-1].base)]  # type: ignore[attr-defined]
            return load(self.cx.f, e.dtype, self.address(b, at), e.span or self.cx.span)
        out = []
        for at in self._lane_indices(e.indices, lanes):
            ok = self.in_range(e, at)
            one = partial(self._load_at, b, at)
            out.append(self.cx.f.choose(ok, value_type(dt), one, lambda: self.safe_value(b, dt)))
        return self.cx.values.pack(out, e.dtype)

    def _is_run(self, b: Buffer, indices: tuple[Expr, ...]) -> bool:
        """Whether a vector access is contiguous and needs no guard."""
        last = indices[-1]
        copies = self.base_of(b).copies
        return (b.scope() != GLOBAL and isinstance(last, Ramp) and isinstance(last.stride, Const) and copies == 1
                and last.stride.value == 1 and all(i.dtype.lanes == 1 for i in indices[:-1])
                and (b.strides_ is None or b.strides_[-1] == 1))

    def _lane_indices(self, indices: tuple[Expr, ...], lanes: int) -> list[list[str]]:
        """The scalar i64 indices of each lane of a vector access."""
        columns = []
        for e in indices:
            if e.dtype.lanes == 1:
                columns.append([self.cx.index(e)] * lanes)
            else:
                ty, v = value_type(e.dtype), self.cx.value(e)
                lane = [self.cx.f.let(f"extractelement {ty} {v}, i64 {k}") for k in range(lanes)]
                columns.append([self.cx.indices.extended(x, e.dtype.scalar) for x in lane])
        return [list(c) for c in zip(*columns)]

    def store(self, s: Store) -> None:
        """Print buffer[indices] = value; skipped outside a global buffer's shape."""
        b, indices, value = s.buffer, s.indices, s.value
        v = self.cx.value(value)
        if any(i.dtype.lanes > 1 for i in indices):
            self._store_lanes(s, v)
            return
        v = convert(self.cx.f, v, value.dtype, b.dtype)
        at = [self.cx.index(i) for i in indices]
        self.cx.f.branch(self.in_range(s, at),
                      lambda: store(self.cx.f, b.dtype, v, self.address(b, at), self.cx.span))

    def _store_lanes(self, s: Store, v: str) -> None:
        b, indices, value = s.buffer, s.indices, s.value
        lanes = max(i.dtype.lanes for i in indices)
        dt = b.dtype.with_lanes(lanes)
        if value.dtype.lanes == 1:
            v = self.cx.values.pack([v] * lanes, value.dtype.with_lanes(lanes))
        v = convert(self.cx.f, v, value.dtype.with_lanes(lanes), dt)
        if self._is_run(b, indices):
            at = [self.cx.index(i) for i in indices[:-1]] + [self.cx.index(indices[-1].base)]  # type: ignore[attr-defined]
            store(self.cx.f, dt, v, self.address(b, at), self.cx.span)
            return
        for k, at in enumerate(self._lane_indices(indices, lanes)):
            one = self.cx.f.let(f"extractelement {value_type(dt)} {v}, i64 {k}")
            self.cx.f.branch(self.in_range(s, at), partial(self._store_at, b, at, one))

    def _load_at(self, b: Buffer, at: list[str]) -> str:
        return load(self.cx.f, b.dtype, self.address(b, at), self.cx.span)

    def _store_at(self, b: Buffer, at: list[str], value: str) -> None:
        store(self.cx.f, b.dtype, value, self.address(b, at), self.cx.span)
