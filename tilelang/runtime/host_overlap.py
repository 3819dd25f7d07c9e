"""Emits the checks that tensors which a kernel assumes to be disjoint do not overlap."""

from __future__ import annotations

from typing import Any

from tilelang.ir import Expr, Load, convert, free_vars, walk

from .signature import PointerArg, TensorArg


def reject_overlaps(stub: Any) -> None:
    """Emit checks at the end of `prepare` (stub: a host_checks.Prepare) that each pair of stub.disjoint is disjoint."""
    w = stub.w
    named = {a.name: a for a in stub.sig.inputs if a.index in stub.data}
    bounds: dict[str, tuple[str, str]] = {}
    for pair in stub.disjoint:
        if not all(n in named for n in pair):
            continue  # the caller does not pass it, or the program never accesses it
        for n in pair:
            if n not in bounds:
                a = named[n]
                bounds[n] = _bounds(stub, a) if isinstance(a, TensorArg) else _reach(stub, a)
        (low, high), (other_low, other_high) = (bounds[n] for n in pair)
        before = w.ins(f"icmp ule i64 {high}, {other_low}")
        behind = w.ins(f"icmp ule i64 {other_high}, {low}")
        w.check(w.ins(f"or i1 {before}, {behind}"), "RuntimeError",
                f"kernel {stub.sig.name} input {pair[1]} overlaps input {pair[0]}, which is written before it is read")


def _reach(stub: Any, a: PointerArg) -> tuple[str, str]:
    """(first address, end address) of the memory that the program accesses through a pointer parameter.

    The end covers all buffers that the program makes of the pointer.  A buffer whose size only the kernel knows counts as one
    byte.
    """
    w = stub.w
    low = w.ins(f"ptrtoint ptr {stub.data[a.index]} to i64")
    high = w.ins(f"add i64 {low}, 1")
    known = {*stub.scalars}
    for b in stub.made.get(a.name, ()):
        dims = [d for d in (*b.shape, *(b.strides_ or ()), b.offset) if isinstance(d, Expr)]
        if not all(free_vars(d) <= known for d in dims) or any(isinstance(x, Load) for d in dims for x in walk(d)):
            continue
        size, step = stub.expr(convert(b.offset)), "1"
        for d in reversed(range(len(b.shape))):
            n = stub.expr(convert(b.shape[d]))
            stride = step if b.strides_ is None else stub.expr(convert(b.strides_[d]))
            last = w.ins(f"sub i64 {n}, 1")
            size = w.ins(f"add i64 {size}, {w.ins(f'mul i64 {last}, {stride}')}")
            step = w.ins(f"mul i64 {step}, {n}")
        size = w.ins(f"mul i64 {w.ins(f'add i64 {size}, 1')}, {max(1, b.dtype.bytes)}")
        end = w.ins(f"add i64 {low}, {size}")
        high = w.ins(f"select i1 {w.ins(f'icmp ugt i64 {end}, {high}')}, i64 {end}, i64 {high}")
    return low, high


def _bounds(stub: Any, a: TensorArg) -> tuple[str, str]:
    """(first address, end address) of a tensor."""
    w, dt = stub.w, a.buffer.dtype
    low = w.ins(f"ptrtoint ptr {stub.data[a.index]} to i64")
    high = low
    for d in range(len(a.buffer.shape)):
        last = w.ins(f"sub i64 {stub._extent(a, d)}, 1")
        reach = w.ins(f"mul i64 {last}, {w.ins(f'mul i64 {stub._stride(a, d)}, {dt.bits * dt.lanes}')}")
        reach = w.ins(f"sdiv i64 {reach}, 8")  # rounds packed types down by less than a byte, which is added below
        back = w.ins(f"icmp slt i64 {reach}, 0")
        low = w.ins(f"add i64 {low}, {w.ins(f'select i1 {back}, i64 {reach}, i64 0')}")
        high = w.ins(f"add i64 {high}, {w.ins(f'select i1 {back}, i64 0, i64 {reach}')}")
    high = w.ins(f"add i64 {high}, {max(1, dt.bytes)}")
    return low, w.ins(f"select i1 {stub.empty[a.index]}, i64 {low}, i64 {high}")
