"""The calls of NVSHMEM under its names.  Its processing elements (PEs) are the ranks, its symmetric objects T.SymmTensors.

A call stands in the program as a branch: the call itself, which code for CUDA makes (runtime/nvshmem.py), and the same by the
statements of ranks, which the simulators run and the checks read.  Source: NVSHMEM API, "Memory Ordering": a put is complete,
and a later signal sees it, after T.quiet; T.fence keeps the order of deliveries; a put with signal brings its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tilelang.ir import AddressOf, Const, Evaluate, I32, as_bool, binary, call, cast, convert, load

from . import distributed as ranks
from .kernel import need_kernel, thread_index
from .loops import serial
from .thread import Else, If_, Then, emit_call, get_lane_idx, sync_threads, sync_warp
from .tile import EMITTED
from .tracing.builder import Emitted, need_builder
from .tracing.regions import operand
from .tracing.scope import IfFrame
from .tracing.state import describe, error, named

_COMPARE = {"eq": 0, "ne": 1, "gt": 2, "le": 3, "lt": 4, "ge": 5}  # NVSHMEM_CMP_EQ and so on
_SIGNAL = {"set": 9, "add": 10}  # NVSHMEM_SIGNAL_SET, NVSHMEM_SIGNAL_ADD
_BY = {"": "thread", "_warp": "warp", "_block": "block"}
_WHO = {"": "each executing thread", "_warp": "the lanes of each executing warp", "_block": "all threads of the block"}


def _instead(name: str, form: str, args: tuple[Any, ...], otherwise: Callable[[], Any]) -> Emitted:
    """The call of NVSHMEM's function, and the statements of ranks in its place, once the threads of the form have come."""
    b = need_builder(f"T.{name}")
    need_kernel(f"T.{name}")
    _together(form)
    with If_(call("by_nvshmem", (), "bool")):
        with Then():
            b.emit(Evaluate(call("nvshmem", args, "void", span=b.here(), name=f"nvshmem{'x' if form else ''}_{name}{form}"),
                            span=b.here()))
        with Else():
            otherwise()
    return EMITTED


def _address(x: Any, what: str) -> tuple[AddressOf, int]:
    """(the address of an operand, bytes of its elements)."""
    o = operand(load(x.buffer, x.indices) if isinstance(x, AddressOf) else x, what)
    return AddressOf(o.buffer, o.mins), o.buffer.dtype.bytes


def _together(form: str) -> None:
    if form:
        (sync_threads if form == "_block" else sync_warp)()


def _number(value: Any, table: dict[str, int], what: str) -> tuple[str, int]:
    """(the word, NVSHMEM's constant) of a word or a constant."""
    for word, n in table.items():
        if isinstance(value, (str, int)) and value in (word, n):
            return word, n
    raise error("signal-order", f"{what} is {value!r}", expected=f"one of {', '.join(table)}", found=repr(value))


def _elements(nbytes: Any, each: int, what: str) -> Any:
    if isinstance(nbytes, int) and nbytes % each:
        raise error("signal-operand", f"{what} moves {nbytes} bytes of elements of {each} bytes", expected="whole elements",
                    found=f"{nbytes} bytes")
    return nbytes // each


def _alone(form: str, then: Callable[[], Any]) -> None:
    """One thread of those that make the call together."""
    if not form:
        then()
        return
    first = binary("eq", thread_index() if form == "_block" else get_lane_idx(), Const(0, I32))
    with IfFrame(as_bool(first)):
        then()


def _mover(put: bool, nbi: str, form: str) -> Callable[..., Emitted]:
    verb, where = ("put", "to") if put else ("get", "from")
    name = f"{verb}mem{nbi}{form}"
    move = ranks.mover(f"{verb}mem{form}", _BY[form], put)

    def fn(dest: Any, source: Any, nbytes: Any, pe: Any) -> Emitted:
        (to, each), (origin, _) = _address(dest, f"dest of T.{name}"), _address(source, f"source of T.{name}")
        count = _elements(nbytes, each, f"T.{name}")
        return _instead(f"{verb}mem{nbi}", form, (to, origin, nbytes, pe), lambda: move(source, dest, count, pe, 4))

    kept = ("T.quiet completes it: until then source must not change, and no signal but a put's own tells that it has come"
            if put else "T.quiet completes it: until then dest must not be read") if nbi else \
        ("T.quiet or T.fence stands before a signal that tells of it" if put else "dest is there when it returns")
    return named(fn, name, f"""Copy `nbytes` consecutive bytes {where} PE `pe`, by {_WHO[form]}.

    dest, source: the first elements, of row-major tensors of one type in global memory; the one on the other PE is a
    T.SymmTensor.  {kept}.  Raises signal-operand, not-symmetric, rank; on CUDA nvshmem-missing.

    Example:
        T.{name}({'S[0], X[0]' if put else 'X[0], S[0]'}, 128, 1)
    """)


def _signalled(nbi: str, form: str) -> Callable[..., Emitted]:
    name, move = f"putmem_signal{nbi}{form}", ranks.mover(f"putmem{form}", _BY[form], True)

    def fn(dest: Any, source: Any, nbytes: Any, sig_addr: Any, signal: Any, sig_op: Any, pe: Any) -> Emitted:
        (to, each), (origin, _) = _address(dest, f"dest of T.{name}"), _address(source, f"source of T.{name}")
        count, (word, op) = _elements(nbytes, each, f"T.{name}"), _number(sig_op, _SIGNAL, f"sig_op of T.{name}")

        def otherwise() -> None:
            move(source, dest, count, pe, 4)
            _together(form)
            _alone(form, lambda: _update(sig_addr, signal, word, pe, "release"))

        return _instead(f"putmem_signal{nbi}", form, (to, origin, nbytes, _flag(sig_addr, name), cast(convert(
            signal), "uint64"), op, pe), otherwise)

    later = "; until T.quiet source must not change" if nbi else ""
    return named(fn, name, f"""Copy `nbytes` bytes to PE `pe`, then update a signal there, by {_WHO[form]}.

    A wait that sees the signal sees the bytes{later}.  dest, source: as T.putmem.  sig_addr: an element of 64 bits of a
    T.SymmTensor.  signal: the number.  sig_op: "set" or "add", or NVSHMEM's constant.  Raises what T.putmem raises, and
    signal-order.

    Example:
        T.{name}(S[0], X[0], 128, F[0], 1, "add", 1)
    """)


def _flag(x: Any, name: str) -> AddressOf:
    at, each = _address(x, f"the signal of T.{name}")
    if each != 8 or not at.buffer.facts.symmetric:
        raise error("signal-operand", f"the signal of T.{name} is {describe(x)}", expected="an element of int64 or uint64 of a "
                    "T.SymmTensor", found=describe(x))
    return at


def _update(flag: Any, value: Any, word: str, pe: Any, order: str) -> None:
    (ranks.st if word == "set" else ranks.atom_add)(flag, value, scope="sys", sem=order, dst_pe=pe)


def signal_op(sig_addr: Any, signal: Any, sig_op: Any, pe: Any) -> Emitted:
    """Update a signal of PE `pe`, by each executing thread.  It says nothing of earlier puts: T.quiet or T.fence does.

    sig_addr: an element of 64 bits of a T.SymmTensor.  signal: the number.  sig_op: "set" or "add", or NVSHMEM's constant.
    Raises signal-operand, signal-order, rank; on CUDA nvshmem-missing.

    Example:
        T.signal_op(F[0], 1, "add", 1)
    """
    word, op = _number(sig_op, _SIGNAL, "sig_op of T.signal_op")
    return _instead("signal_op", "", (_flag(sig_addr, "signal_op"), cast(convert(signal), "uint64"), op, pe),
                    lambda: _update(sig_addr, signal, word, pe, "relaxed"))


def signal_wait_until(sig_addr: Any, cmp: Any, cmp_value: Any) -> Emitted:
    """Each executing thread waits until a signal of this PE compares so, and then sees what it tells of (an acquire).

    sig_addr: an element of 64 bits of a T.SymmTensor.  cmp: eq, ne, gt, le, lt or ge, or NVSHMEM's constant.  The launch
    becomes cooperative.  Raises signal-operand, signal-order; on CUDA nvshmem-missing.

    Example:
        T.signal_wait_until(F[0], "ge", 1)
    """
    word, op = _number(cmp, _COMPARE, "cmp of T.signal_wait_until")
    return _instead("signal_wait_until", "", (_flag(sig_addr, "signal_wait_until"), op, cast(convert(cmp_value), "uint64")),
                    lambda: getattr(ranks, f"wait_{word}")(sig_addr, cmp_value))


def int_p(dest: Any, value: Any, pe: Any) -> Emitted:
    """Store one int32 on PE `pe`, by each executing thread.

    dest: an element of a T.SymmTensor of int32.  Raises signal-operand, not-symmetric, rank; on CUDA nvshmem-missing.

    Example:
        T.int_p(words[0], 7, 1)
    """
    to, _ = _address(dest, "dest of T.int_p")
    if to.buffer.dtype != I32:
        raise error("signal-operand", f"T.int_p stores an int32, found {to.buffer.dtype}", expected="int32")
    return _instead("int_p", "", (to, cast(convert(value), I32), pe),
                    lambda: ranks.st(dest, value, scope="sys", dst_pe=pe))


def quiet() -> Emitted:
    """Puts and signals of this thread so far are complete, and asynchronous gets have come.

    Raises nvshmem-missing on CUDA.

    Example:
        T.quiet()
    """
    return _instead("quiet", "", (), ranks.fence_sys)


def fence() -> Emitted:
    """Puts and signals of this thread so far are delivered to a PE before those that follow.  Raises nvshmem-missing on CUDA.

    Example:
        T.fence()
    """
    return _instead("fence", "", (), ranks.fence_sys)


def _met(form: str) -> None:
    need_kernel("T.barrier_all").set(cooperative=True)
    _alone(form, lambda: emit_call("pe_barrier"))
    _together(form)


def _barrier(kind: str, form: str) -> Callable[[], Emitted]:
    def fn() -> Emitted:
        return _instead(f"{kind}_all", form, (), lambda: _met(form))

    done = "their puts are complete" if kind == "barrier" else "what they stored in their own memory is seen"
    return named(fn, f"{kind}_all{form}", f"""Wait until all PEs have come, by {_WHO[form]}: {done}.

    One block of a PE calls it at a time.  The launch becomes cooperative.  Raises nvshmem-missing on CUDA.

    Example:
        T.{kind}_all{form}()
    """)


def _collective(name: str, form: str, gathers: bool) -> Callable[..., Emitted]:
    move = ranks.mover(f"{name}{form}", _BY[form], False)

    def emit(dest: Any, source: Any, nbytes: Any, root: Any) -> Emitted:
        (to, each), (origin, _) = _address(dest, f"dest of T.{name}{form}"), _address(source, f"source of T.{name}{form}")
        count = _elements(nbytes, each, f"T.{name}{form}")

        def otherwise() -> None:
            _met(form)
            if gathers:
                row, at = ranks.row_of(dest, -1, f"dest of T.{name}{form}")
                with serial(ranks.get_num_ranks()) as pe:
                    move(source, load(row, (at + pe * count,)), count, pe, 4)
            else:
                move(source, dest, count, root, 4)
            _together(form)
            _met(form)

        return _instead(f"{name}mem", form, (to, origin, nbytes, *(() if gathers else (root,))), otherwise)

    def gather(dest: Any, source: Any, nbytes: Any) -> Emitted:
        return emit(dest, source, nbytes, None)

    what = ("`nbytes` bytes of each PE, one PE after another, go to all PEs" if gathers
            else "`nbytes` bytes of PE `root` go to all PEs")
    return named(gather if gathers else emit, f"{name}{form}", f"""All PEs together: {what}, by {_WHO[form]}.

    dest, source: the first elements, of T.SymmTensors of one type.  One block of a PE calls it at a time.  The launch becomes
    cooperative.  Raises signal-operand, not-symmetric; on CUDA nvshmem-missing.

    Example:
        T.{name}{form}(S[0], S[{'64' if gathers else '32'}], 64{'' if gathers else ', 0'})
    """)


_barrier_of_thread = _barrier("barrier", "")


def barrier_all(pad: Any = None) -> Emitted:
    """Wait for the same block of every rank: what their blocks did before is seen after it.

    The whole block reaches it, and the blocks of one number on all ranks equally often, also over several launches.
    pad: a row of 2 * n zeros of int64 in a T.SymmTensor, for at most n ranks, that only these blocks use: first how often
    each rank has come, then how often it was waited for.  n is at most the threads of a block.  None: NVSHMEM's barrier of all
    PEs, by each executing thread; one thread of a PE calls it at a time.  Raises signal-operand; without pad on CUDA
    nvshmem-missing.

    Example:
        T.barrier_all(P[bx, 0:16])
    """
    return _barrier_of_thread() if pad is None else ranks.barrier_all(pad)


_MADE = [*(_mover(put, nbi, form) for form in _BY for put in (True, False) for nbi in ("", "_nbi")),
         *(_signalled(nbi, form) for form in _BY for nbi in ("", "_nbi")), *(_collective("fcollect", f, True) for f in _BY),
         *(_barrier("sync", form) for form in _BY), *(_barrier("barrier", f) for f in ("_warp", "_block")),
         *(_collective("broadcast", form, False) for form in ("_warp", "_block"))]  # T.broadcast is of vectors
NVSHMEM: dict[str, Callable[..., Any]] = {f.__name__: f for f in (*_MADE, signal_op, signal_wait_until, int_p, quiet, fence)}
