"""T.tma_load on the CPU: copies a box of a global tensor into shared memory; complete when it is issued.

    for each row of the box, for each 16 bytes of it:
        inside the tensor: copied;  else element by element, elements outside are filled
    the barrier counts the bytes

Source: CUDA Driver API, "Tensor Map Object Management". The reference interpreter does the same in NumPy.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

from tilelang.ir import AddressOf, Call
from tilelang.target.cpu import unsupported
from tilelang.target.shared_space import UNIT
from tilelang.target.tensor_map import NAN_BITS, STRIDE_ALIGN, TensorMap

from .barriers import barrier_operand, warp_role_of
from .coroutine import signal
from .wgmma import address_table, misuse, shared_address
from .shared_addresses import move
from .code import CallPrinter, Code

_ALIGN = 128  # bytes; alignment of a box in shared memory


def _tma_load(cx: Code, e: Call) -> str:
    """tma_load(address, barrier, coordinates innermost first), executed by each active thread."""
    span = e.span or cx.span
    m: TensorMap | None = warp_role_of(cx, f"{e.op} outside a kernel", span).maps.get(e.options.map)
    if m is None or m.tf32 or e.options.multicast:
        raise unsupported("a box through a map that this launch does not have, that rounds, or for several blocks", span=span)
    if not isinstance(e.args[1], AddressOf):
        raise unsupported("an mbarrier that is not an element of T.alloc_barrier", span=span)
    f, (held, at) = cx.f, shared_address(cx, e.args[0], e)
    starts = [cx.index(c) for c in e.args[2:]]
    size = m.buffer.dtype.bytes
    for value, by, why in ((at, _ALIGN, f"a box of T.tma_load starts at no multiple of {_ALIGN} bytes of shared memory"),
                           (f.mul(starts[0], str(size)), STRIDE_ALIGN,
                            f"a box of T.tma_load starts at a column that is no multiple of {STRIDE_ALIGN} bytes")):
        odd = f.let(f"icmp ne i64 {f.let(f'and i64 {value}, {by - 1}')}, 0")
        f.branch(odd, lambda why=why: misuse(cx, why, span))  # type: ignore[misc]
    record, base = address_table(cx, e).of(f, held)
    ok = f.alloca("i1", hint="there")
    f.do(f"store i1 true, ptr {ok}")
    _rows(cx, m, starts, lambda place, source: _copy_piece(cx, ok, record, base, place, source), at)
    f.branch(f.let(f"load i1, ptr {ok}"), lambda: None, lambda: misuse(
        cx, f"a box of {m.box} elements of T.tma_load leaves the shared buffer {held.buffer.name}", span))
    signal(f, barrier_operand(cx, e.args[1], span), "0", str(-m.box_bytes))
    return "0"


def _copy_piece(cx: Code, ok: str, record: str, base: str, place: str, source: str) -> None:
    f = cx.f
    done = f.let(f"call i1 @{move(f.module)}(ptr {record}, ptr {base}, i64 {place}, ptr {source}, i1 true)")
    f.branch(done, lambda: None, lambda: f.do(f"store i1 false, ptr {ok}"))


def _rows(cx: Code, m: TensorMap, starts: list[str], copy: Callable[[str, str], None], at: str) -> None:
    """copy(address in shared memory, address of the 16 source bytes) for each piece of the box."""
    f, b, rank = cx.f, m.buffer, m.rank
    size, per = b.dtype.bytes, UNIT // b.dtype.bytes
    extents = [cx.index(d) for d in m.extents()]
    piece = f.alloca(f"[{UNIT} x i8]", 16, "piece")
    with ExitStack() as loops:
        row, coords, inside = "0", [""] * rank, "true"
        for d in range(rank - 1, 0, -1):
            i = loops.enter_context(f.loop("0", str(m.box[d]), hint="box"))
            row = f.add(f.mul(row, str(m.box[d])), i)
            coords[d] = f.add(starts[d], i)
            inside = f.both(inside, f.let(f"icmp ult i64 {coords[d]}, {extents[d]}"))
        c = loops.enter_context(f.loop("0", str(m.box[0] // per), hint="piece"))
        coords[0] = f.add(starts[0], f.mul(c, str(per)))
        place = f.add(f.add(at, f.mul(row, str(m.swizzle or m.box[0] * size))), f.mul(c, str(UNIT)))
        if m.swizzle:
            flip = f.let(f"and i64 {f.let(f'lshr i64 {place}, 7')}, {m.swizzle // UNIT - 1}")
            place = f.let(f"xor i64 {place}, {f.let(f'shl i64 {flip}, 4')}")
        last = f.let(f"icmp sle i64 {f.add(coords[0], str(per))}, {extents[0]}")
        whole = f.both(f.both(inside, last), f.let(f"icmp sge i64 {coords[0]}, 0"))

        def elements() -> None:
            with f.loop("0", str(per), hint="element") as j:
                column = f.add(coords[0], j)
                there = f.both(inside, f.let(f"icmp ult i64 {column}, {extents[0]}"))
                kind = f"i{8 * size}"
                v = f.choose(there, kind, lambda: f.let(f"load {kind}, ptr {source(column)}, align 1"),
                             lambda: "0" if m.fill == "zero" else str(NAN_BITS[size]))
                f.do(f"store {kind} {v}, ptr {f.at(piece, kind, j)}, align 1")
            copy(place, piece)

        def source(column: str) -> str:
            return cx.address(b, [*reversed(coords[1:]), column])

        f.branch(whole, lambda: copy(place, source(coords[0])), elements)


BOX_CALLS: dict[str, CallPrinter] = {"tma_load": _tma_load}
