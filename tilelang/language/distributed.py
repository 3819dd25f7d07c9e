"""Programs that several devices run together: ranks, symmetric tensors, remote tiles, signals.

Each rank runs the same program on one device.  A symmetric tensor (T.SymmTensor) has the same shape on every rank, and
T.remote names the one of another rank.  What a rank stores there is seen after a signal: the store of a rank, then its
T.signal; the wait of the other rank, then its load.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tilelang.arith import flat_index
from tilelang.ir import (GLOBAL, I32, AddressOf, Buffer, BufferFacts, Call, Const, Evaluate, Expr, Load, Region, Var, as_bool,
                         binary, call, cast, convert, is_const, load)
from tilelang.target.instructions import SIGNAL_COMPARISONS

from .alloc import alloc_fragment, alloc_local, alloc_var
from .kernel import need_kernel, thread_index
from .loops import Parallel, serial, unroll, vectorized
from .tensor import TensorFactory, TensorSpec, over_storage
from .thread import emit_call, get_lane_idx, sync_threads
from .tile import EMITTED, copy
from .tracing.builder import Builder, Emitted, need_builder
from .tracing.regions import BufferSlice, operand
from .tracing.scope import IfFrame
from .tracing.state import describe, error, example, named

MOST_RANKS = 64
_ORDERS = {"weak": "relaxed", "volatile": "relaxed", "relaxed": "relaxed", "acquire": "acquire", "release": "release"}
_SCOPES = {"cta": None, "gpu": None, "sys": "sys"}


class _SymmetricSpec(TensorSpec):
    """The annotation of a symmetric tensor."""

    __slots__ = ()
    symmetric = True


class _SymmetricFactory(TensorFactory):
    """T.SymmTensor(shape, dtype): a tensor parameter that every rank has, in memory that the others reach."""

    def _plain(self, shape: Any, dtype: Any = "float32", data: Any = None, scope: str | None = None) -> Any:
        spec = _SymmetricSpec(shape, dtype)
        return spec if data is None else over_storage("T.SymmTensor", spec, data)


SymmTensor = _SymmetricFactory("SymmTensor", GLOBAL)


@example("if T.get_rank() == 0:", "    Y[i] = X[i]")
def get_rank() -> Expr:
    """The number of this rank among those that run the program: int32, from 0 on."""
    need_kernel("T.get_rank")
    return call("world_rank", (), I32)


@example("right = (T.get_rank() + 1) % T.get_num_ranks()")
def get_num_ranks() -> Expr:
    """How many ranks run the program: int32."""
    need_kernel("T.get_num_ranks")
    return call("world_size", (), I32)


def _is_here(rank: Any) -> bool:
    return isinstance(rank, int) and rank == -1 or isinstance(rank, Const) and rank.value == -1


def _rank(rank: Any, what: str) -> Expr:
    e = convert(rank)
    if not e.dtype.is_int or e.dtype.lanes != 1:
        raise error("rank", f"the rank of {what} is «an integer», found {describe(rank)}")
    if isinstance(e, Const) and not 0 <= e.value < MOST_RANKS:
        raise error("rank", f"the rank of {what} is ‹{e.value}›", expected=f"a rank from 0 to {MOST_RANKS - 1}")
    return cast(e, I32)


@example("T.copy(x_s, T.remote(S, (T.get_rank() + 1) % T.get_num_ranks())[bx * 128:bx * 128 + 128])")
def remote(buffer: Any, rank: Any) -> Buffer:
    """The symmetric tensor `buffer` of another rank: a tensor of the same shape, for loads, stores, copies and atomics.

    buffer: a T.SymmTensor parameter, in global memory, of any shape.  rank: an integer; one that no rank has stops the
    kernel.  Raises not-symmetric, rank.
    """
    b = need_builder("T.remote")
    need_kernel("T.remote")
    if not isinstance(buffer, Buffer) or not buffer.facts.symmetric:
        raise error("not-symmetric", f"T.remote of ‹{describe(buffer)}›, which other ranks do not reach",
                    expected="a T.SymmTensor parameter")
    start = AddressOf(Buffer("storage", (1,), buffer.dtype, GLOBAL, data=buffer.data), (Const(0, I32),))
    data = b.let("ptr", call("remote_address", (start, _rank(rank, "T.remote")), "handle", span=b.here()))
    return b.nameless(Buffer(b.fresh_name(f"{buffer.name}_remote"), buffer.shape, buffer.dtype, GLOBAL, buffer.strides_,
                             buffer.offset, data, BufferFacts(symmetric=True, remote=True), span=b.here()))


# ---- moving elements ------------------------------------------------------------------------------------------------------


def _row(b: Buffer, start: Any, count: Any) -> BufferSlice:
    return BufferSlice(Region(b, (convert(start),), (count,)))


def _move_by_block(src: Buffer, s: Expr, dst: Buffer, d: Expr, size: Any, chunk: int) -> None:
    """All loads of a chunk precede its stores, whatever the two tensors share."""
    held, whole = alloc_fragment((chunk,), src.dtype), size // chunk
    with serial(whole) as c:
        copy(_row(src, s + c * chunk, chunk), held)
        copy(held, _row(dst, d + c * chunk, chunk))
    if is_const(convert(size - whole * chunk), 0):
        return
    b = need_builder("T.put_block")
    with Parallel(chunk) as i, IfFrame(as_bool(binary("lt", whole * chunk + i, convert(size)))):
        b.store(dst, (d + whole * chunk + i,), load(src, (s + whole * chunk + i,)))


def _move_by_warp(src: Buffer, s: Expr, dst: Buffer, d: Expr, size: Any, lanes: int, times: int) -> None:
    """As _move_by_block, by the lanes of each warp: vectors of `lanes` elements, `times` of them held by a lane."""
    b, held, lane = need_builder("T.put_warp"), alloc_local((times * lanes,), src.dtype), get_lane_idx()
    chunk = 32 * lanes * times
    whole = size // chunk
    with serial(whole) as c:
        for out in (False, True):
            with unroll(times) as k, vectorized(lanes) as v:
                at, mine = c * chunk + (k * 32 + lane) * lanes + v, (k * lanes + v,)
                b.store(*((dst, (d + at,), load(held, mine)) if out else (held, mine, load(src, (s + at,)))))
    with serial((size - whole * chunk + 31) // 32) as k, IfFrame(as_bool(binary("lt", whole * chunk + k * 32 + lane,
                                                                                 convert(size)))):
        b.store(dst, (d + whole * chunk + k * 32 + lane,), load(src, (s + whole * chunk + k * 32 + lane,)))


def row_of(x: Any, rank: Any, what: str) -> tuple[Buffer, Expr]:
    """(the tensor of an operand as one row of elements, on the rank; the number of the operand's first element in it)."""
    o = operand(load(x.buffer, x.indices) if isinstance(x, AddressOf) else x, what)
    b = o.buffer
    if b.scope_name != GLOBAL or b.strides_ is not None or b.dtype.lanes != 1 or not isinstance(b.offset, int):
        raise error("signal-operand", f"{what} is in `{b.name}`, which is no row-major tensor in global memory",
                    expected="a row-major tensor in global memory", found=f"`{b.name}` in {b.scope_name}")
    at = flat_index(b, o.mins)
    there = b if _is_here(rank) else remote(b, rank)
    return Buffer(f"{b.name}_row", (b.size + b.offset,), b.dtype, GLOBAL, data=there.data, facts=b.facts), at


def _move_by_thread(src: Buffer, s: Expr, dst: Buffer, d: Expr, size: Any) -> None:
    b = need_builder("T.putmem")
    with serial(size) as k:
        b.store(dst, (d + k,), load(src, (s + k,)))


def mover(name: str, by: str, put: bool) -> Callable[..., Emitted]:
    """T.put_block and its like.  by: who moves the elements together: block, warp or thread."""
    def move(src: Any, dst: Any, size: Any, rank: Any, times: int) -> Emitted:
        (a, s), (b, d) = (row_of(src, -1 if put else rank, f"src of T.{name}"),
                          row_of(dst, rank if put else -1, f"dst of T.{name}"))
        lanes = max(1, 128 // a.dtype.bits)
        if a.dtype != b.dtype:
            raise error("signal-operand", f"T.{name} moves elements of {a.dtype} to {b.dtype}", expected="one type",
                        found=f"{a.dtype} and {b.dtype}")
        if by == "block":
            _move_by_block(a, s, b, d, size, lanes * times * need_kernel(f"T.{name}").num_threads)
        elif by == "warp":
            _move_by_warp(a, s, b, d, size, lanes, times)
        else:
            _move_by_thread(a, s, b, d, size)
        return EMITTED

    def put_fn(src: Any, dst: Any, size: Any, dst_pe: Any = -1, unroll_factor: int = 4,
               enable_aggressive_vectorize: bool = False) -> Emitted:
        return move(src, dst, size, dst_pe, unroll_factor)

    def get_fn(src: Any, dst: Any, size: Any, src_pe: Any = -1, unroll_factor: int = 4,
               enable_aggressive_vectorize: bool = False) -> Emitted:
        return move(src, dst, size, src_pe, unroll_factor)

    pe, what = ("dst_pe", "to") if put else ("src_pe", "from")
    how = f"src, dst: as T.{name[:3]}_block, and so is all else." if by != "block" else f"""src, dst: the first elements, of
    row-major tensors of one type in global memory; the one on the other rank is a T.SymmTensor.  {pe}: that rank, -1 for this
    one.  unroll_factor: vectors of 16 bytes that a thread has loaded before it stores.  enable_aggressive_vectorize: no effect;
    accesses are as wide as the addresses allow.  Raises signal-operand, not-symmetric."""
    return named(put_fn if put else get_fn, name, f"""Copy `size` consecutive elements {what} another rank, by {
        'all threads of the block' if by == 'block' else 'the lanes of each executing warp'}.

    {how}

    Example:
        T.{name}({'X[bx * 128], S[bx * 128]' if put else 'S[bx * 128], X[bx * 128]'}, 128, {pe}=1)
    """)


put_block, get_block = mover("put_block", "block", True), mover("get_block", "block", False)
put_warp, get_warp = mover("put_warp", "warp", True), mover("get_warp", "warp", False)


# ---- elements -------------------------------------------------------------------------------------------------------------


def _element(b: Builder, x: Any, rank: Any, what: str) -> Load:
    """The element that an operand names, on the rank.  Raises signal-operand, not-symmetric."""
    if isinstance(x, AddressOf):
        x = load(x.buffer, x.indices)
    elif isinstance(x, (Buffer, BufferSlice)) and not isinstance(x, Load):
        o = operand(x, f"the operand of {what}")
        x = load(o.buffer, o.mins)
    elif not isinstance(x, Load):
        x = load((o := operand(x, f"the operand of {what}")).buffer, o.mins)
    if x.buffer.scope_name != GLOBAL or x.dtype.bits not in (32, 64) or not x.dtype.is_int or x.dtype.lanes != 1:
        raise error("signal-operand", f"{what} works on an integer of 32 or 64 bits in global memory, found {x.dtype} of "
                    f"`{x.buffer.name}`", expected="an element of int32, uint32, int64 or uint64 in global memory")
    return x if _is_here(rank) else load(remote(x.buffer, rank), x.indices)


def _word(name: str, value: Any, table: dict[str, Any], what: str) -> Any:
    if value not in table:
        raise error("signal-order", f"{name} of {what} is ‹{value!r}›", expected=f"one of {', '.join(table)}")
    return table[value]


def _access(b: Builder, kind: str, x: Load, values: tuple[Any, ...], order: str, scope: str | None) -> Call:
    return call(f"atomic_{kind}", (AddressOf(x.buffer, x.indices), *(cast(convert(v), x.dtype) for v in values)), x.dtype,
                span=b.here(), order=order, scope=scope)


@example('seen = T.ld(F[0], scope="sys", sem="acquire")')
def ld(src: Any, value: Any = None, scope: str = "gpu", sem: str = "relaxed", src_pe: Any = -1) -> Any:
    """The value of an integer element, read by each executing thread.

    src: an element in global memory, or its address.  value: a variable or element that takes the value; None: it is returned.
    scope: cta, gpu or sys: the threads that the order concerns.  sem: weak, volatile, relaxed or acquire.  src_pe: the rank,
    -1 for this one.  Raises signal-operand, signal-order, not-symmetric, rank.
    """
    b = need_builder("T.ld")
    orders = {k: v for k, v in _ORDERS.items() if k != "release"}
    order, within = _word("sem", sem, orders, "T.ld"), _word("scope", scope, _SCOPES, "T.ld")
    x = _element(b, src, src_pe, "T.ld")
    got = b.nameless(b.let("loaded", _access(b, "load", x, (), order, within)))
    if value is None:
        return got
    target = operand(value, "the value of T.ld")
    b.store(target.buffer, target.mins, got)
    return EMITTED


@example('T.st(F[0], 1, scope="sys", sem="release")')
def st(dst: Any, value: Any, scope: str = "gpu", sem: str = "relaxed", dst_pe: Any = -1) -> Emitted:
    """dst = value, written by each executing thread.

    dst: an integer element in global memory, or its address.  scope: cta, gpu or sys: the threads that the order concerns.
    sem: weak, volatile, relaxed or release.  dst_pe: the rank, -1 for this one.  Raises what T.ld raises.
    """
    b = need_builder("T.st")
    orders = {k: v for k, v in _ORDERS.items() if k != "acquire"}
    order, within = _word("sem", sem, orders, "T.st"), _word("scope", scope, _SCOPES, "T.st")
    x = _element(b, dst, dst_pe, "T.st")
    b.emit(Evaluate(_access(b, "store", x, (value,), order, within), span=b.here()))
    return EMITTED


@example('ticket = T.atom_add(F[0], 1, scope="sys", sem="acq_rel")')
def atom_add(dst: Any, value: Any, scope: str = "gpu", sem: str = "relaxed", dst_pe: Any = -1) -> Var:
    """dst += value, atomically, by each executing thread; the value before.

    dst: an integer element in global memory, or its address.  scope: cta, gpu or sys.  sem: relaxed, acquire, release or
    acq_rel.  dst_pe: the rank, -1 for this one.  Raises what T.ld raises.
    """
    b = need_builder("T.atom_add")
    order = _word("sem", sem, {**_ORDERS, "acq_rel": "acq_rel"}, "T.atom_add")
    x = _element(b, dst, dst_pe, "T.atom_add")
    return b.nameless(b.let("old", _access(b, "add", x, (value,), order, _word("scope", scope, _SCOPES, "T.atom_add"))))


@example("Y[i] = X[i]", "T.fence_sys()")
def fence_sys() -> Emitted:
    """Accesses of this thread before the fence are ordered before those after it, for the threads of all devices."""
    return emit_call("fence_sys")


# ---- signals --------------------------------------------------------------------------------------------------------------

_OPERATIONS = {"add": "add", "set": "store"}


@example("T.copy(X[bx * 128:bx * 128 + 128], T.remote(S, 1)[bx * 128:bx * 128 + 128])", "T.signal(F[bx], rank=1)")
def signal(flag: Any, value: Any = 1, rank: Any = -1, op: str = "add") -> Emitted:
    """Tell another rank that what this block has done so far is done: a wait that sees the signal sees the block's stores.

    The whole block reaches it, and one thread sends it (a release of system scope).
    flag: an integer element of a T.SymmTensor.  value: added to it (op "add") or stored there (op "set").  rank: where, -1
    for this one.  Raises what T.st raises.
    """
    b = need_builder("T.signal")
    kind = _word("op", op, _OPERATIONS, "T.signal")
    x = _element(b, flag, rank, "T.signal")  # before the barrier: the address is there when the last thread comes
    sync_threads()
    with IfFrame(as_bool(binary("eq", thread_index(), Const(0, I32)))):
        b.emit(Evaluate(_access(b, kind, x, (value,), "release", "sys"), span=b.here()))
    return EMITTED


_WORDS = {"eq": "is", "ne": "is not", "ge": "is at least", "le": "is at most", "gt": "is above", "lt": "is below"}


def _wait(compare: str) -> Callable[..., Emitted]:
    def fn(value: Any, expected: Any, peer: Any = -1, found: Any = None) -> Emitted:
        b = need_builder(f"T.wait_{compare}")
        need_kernel(f"T.wait_{compare}").set(cooperative=True)  # whoever is waited for must run at the same time
        x, place = _element(b, value, peer, f"T.wait_{compare}"), b.here()
        seen = call("wait_signal", (AddressOf(x.buffer, x.indices), cast(convert(expected), x.dtype)),
                    "void" if found is None else x.dtype, span=place, compare=compare, line=place.line if place else 0)
        if found is None:
            b.emit(Evaluate(seen, span=place))
        else:
            target = operand(found, f"found of T.wait_{compare}")
            b.store(target.buffer, target.mins, b.nameless(b.let("seen", seen)))
        return EMITTED

    how = "All else is as T.wait_eq has it." if compare != "eq" else """Each executing thread waits, and then sees what happened
    before the release that wrote the value (an acquire of system scope).  A wait beyond the limit of tilelang.distributed stops
    the kernel, and the error names rank, signal and line.
    value: an element in global memory, or its address.  peer: the rank that has it, -1 for this one.  found: a variable or
    element that takes the value that ended the wait.  Raises signal-operand."""
    return named(fn, f"wait_{compare}", f"""Wait until an integer element {_WORDS[compare]} `expected`.

    {how}

    Example:
        T.wait_{compare}(F[0], 1)
    """)


wait_eq, wait_ne, wait_ge, wait_le, wait_gt, wait_lt = map(_wait, SIGNAL_COMPARISONS)


@example("T.barrier_all(P[bx, 0:16])")
def barrier_all(pad: Any) -> Emitted:
    """Wait for the same block of every rank: what their blocks did before is seen after it.

    The whole block reaches it, and the blocks of one number on all ranks equally often, also over several launches.
    pad: a row of 2 * n zeros of int64 in a T.SymmTensor, for at most n ranks, that only these blocks use: first how often
    each rank has come, then how often it was waited for.  n is at most the threads of a block.  Raises signal-operand.
    """
    b = need_builder("T.barrier_all")
    o = operand(pad, "the operand of T.barrier_all")
    words = o.extents[-1] if o.extents else None
    if not isinstance(words, int) or words % 2 or o.buffer.dtype != "int64" or not o.buffer.facts.symmetric or \
            words // 2 > need_kernel("T.barrier_all").num_threads:
        raise error("signal-operand", f"T.barrier_all takes a row of 2 * n int64 elements, found {describe(pad)}",
                    expected="a row of a T.SymmTensor of int64")
    need_kernel("T.barrier_all").set(cooperative=True)
    place = b.here()
    b.emit(Evaluate(call("rank_barrier", (AddressOf(o.buffer, o.mins),), "void", span=place, words=words,
                         line=place.line if place else 0), span=place))
    return EMITTED


# ---- names of other systems -------------------------------------------------------------------------------------------

get_pe, get_pe_num = get_rank, get_num_ranks
barrier_blocks = sync_blocks = barrier_all


@example("Y[i] = X[i]", "T.fence_gpu()")
def fence_gpu() -> Emitted:
    """Accesses of this thread before the fence are ordered before those after it, for the threads of the device."""
    return emit_call("fence_gpu")


@example("Y[i] = X[i]", "T.fence_cta()")
def fence_cta() -> Emitted:
    """Accesses of this thread before the fence are ordered before those after it, for the threads of the block."""
    return emit_call("fence_block")


# ---- barriers of a grid ---------------------------------------------------------------------------------------------------


@example("bar = T.alloc_barrier_gpu()", "T.init_barrier_gpu(bar, 8)", "T.sync_barrier_gpu(bar)")
def alloc_barrier_gpu() -> Buffer:
    """A barrier in global memory that all blocks of the launch see, for T.init_barrier_gpu.  It is new in every launch."""
    b = need_builder("T.alloc_barrier_gpu")
    return b.allocate(Buffer(b.fresh_name("barrier"), (1,), I32, GLOBAL, facts=BufferFacts(zeroed=True), span=b.here()))


def _phases(barrier: Any, what: str) -> tuple[int, Var]:
    known: dict[Any, tuple[int, Any]] = need_kernel(what).__dict__.setdefault("gpu_barriers", {})
    if not isinstance(barrier, Buffer) or barrier.data not in known:
        raise error("signal-operand", f"{what} of ‹{describe(barrier)}›, which T.init_barrier_gpu has not set up",
                    expected="a barrier of T.alloc_barrier_gpu that is set up before")
    return known[barrier.data]


@example("bar = T.alloc_barrier_gpu()", "T.init_barrier_gpu(bar, 8)")
def init_barrier_gpu(barrier: Any, expected: Any) -> Emitted:
    """Say how many blocks arrive at a barrier in each phase.  Every block reaches it, before it uses the barrier.

    barrier: of T.alloc_barrier_gpu.  expected: an integer.
    """
    frame = need_kernel("T.init_barrier_gpu")
    if not isinstance(barrier, Buffer) or barrier.scope_name != GLOBAL or barrier.dtype != I32:
        raise error("signal-operand", f"T.init_barrier_gpu of ‹{describe(barrier)}›",
                    expected="a barrier of T.alloc_barrier_gpu")
    frame.__dict__.setdefault("gpu_barriers", {})[barrier.data] = (expected, alloc_var("int32", init=0))
    return EMITTED


@example("bar = T.alloc_barrier_gpu()", "T.init_barrier_gpu(bar, 8)", "T.arrive_barrier_gpu(bar)", "T.wait_barrier_gpu(bar)")
def arrive_barrier_gpu(barrier: Any) -> Emitted:
    """The block arrives: what it did before is seen by the blocks that wait.  The whole block reaches it."""
    _phases(barrier, "T.arrive_barrier_gpu")
    sync_threads()
    with IfFrame(as_bool(binary("eq", thread_index(), Const(0, I32)))):
        atom_add(barrier[0], 1, scope="gpu", sem="release")
    return EMITTED


@example("bar = T.alloc_barrier_gpu()", "T.init_barrier_gpu(bar, 8)", "T.arrive_barrier_gpu(bar)", "T.wait_barrier_gpu(bar)")
def wait_barrier_gpu(barrier: Any) -> Emitted:
    """Wait until all blocks of a phase have arrived: the first wait of a block for the first phase, and so on.

    The whole block reaches it.  The launch becomes cooperative.
    """
    expected, count = _phases(barrier, "T.wait_barrier_gpu")
    b = need_builder("T.wait_barrier_gpu")
    b.store(count.buffer, count.indices, count + 1)  # type: ignore[attr-defined]
    wait_ge(barrier[0], count * expected)
    return EMITTED


@example("bar = T.alloc_barrier_gpu()", "T.init_barrier_gpu(bar, 8)", "T.sync_barrier_gpu(bar)")
def sync_barrier_gpu(barrier: Any) -> Emitted:
    """T.arrive_barrier_gpu, then T.wait_barrier_gpu."""
    arrive_barrier_gpu(barrier)
    return wait_barrier_gpu(barrier)

__all__ = ["SymmTensor", "alloc_barrier_gpu", "arrive_barrier_gpu", "atom_add", "barrier_blocks", "fence_cta", "fence_gpu",
           "fence_sys", "get_num_ranks", "get_rank", "init_barrier_gpu", "ld", "remote", "signal", "st", "sync_barrier_gpu",
           "sync_blocks", "wait_barrier_gpu"]
