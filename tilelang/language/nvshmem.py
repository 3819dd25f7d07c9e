"""The calls of NVSHMEM under its names.  Its processing elements (PEs) are the ranks, its symmetric objects T.SymmTensors.

A call stands in the program as a branch: the call itself, which code for CUDA makes (runtime/nvshmem.py), and the same by the
statements of ranks, which the simulators run and the checks read.  Source: NVSHMEM API, "Memory Ordering": a put is complete,
and a later signal sees it, after T.quiet; T.fence keeps the order of deliveries; a put with signal brings its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tilelang.ir import I32, AddressOf, Const, Evaluate, as_bool, binary, call, cast, convert, load

from . import distributed as ranks
from .kernel import need_kernel, thread_index
from .loops import serial
from .thread import Else, If_, Then, emit_call, get_lane_idx, sync_threads, sync_warp
from .tile import EMITTED
from .tracing.builder import Emitted, need_builder
from .tracing.regions import operand
from .tracing.scope import IfFrame
from .tracing.state import describe, error, example, named

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


def _together(form: str) -> None:
    if form:
        (sync_threads if form == "_block" else sync_warp)()


def _alone(form: str, then: Callable[[], Any]) -> None:
    """One thread of those that make the call together."""
    if not form:
        then()
        return
    first = thread_index() if form == "_block" else get_lane_idx()
    with IfFrame(as_bool(binary("eq", first, Const(0, I32)))):
        then()


def _met(form: str) -> None:
    need_kernel("T.barrier_all").set(cooperative=True)
    _alone(form, lambda: emit_call("pe_barrier"))
    _together(form)


def _address(x: Any, what: str) -> AddressOf:
    o = operand(load(x.buffer, x.indices) if isinstance(x, AddressOf) else x, what)
    return AddressOf(o.buffer, o.mins)


def _flag(x: Any, what: str) -> AddressOf:
    at = _address(x, what)
    if at.buffer.dtype.bits != 64 or not at.buffer.facts.symmetric:
        raise error("signal-operand", f"{what} is ‹{describe(x)}›", expected="an element of int64 or uint64 of a T.SymmTensor")
    return at


def _number(value: Any, table: dict[str, int], what: str) -> tuple[str, int]:
    """(the word, NVSHMEM's constant) of a word or a constant."""
    for word, n in table.items():
        if isinstance(value, (str, int)) and value in (word, n):
            return word, n
    raise error("signal-order", f"{what} is ‹{value!r}›", expected=f"one of {', '.join(table)}")


def _moved(name: str, dest: Any, source: Any, nbytes: Any) -> tuple[tuple[Any, ...], Any]:
    """(the operands of NVSHMEM's call, the number of elements)."""
    to, origin = _address(dest, f"dest of T.{name}"), _address(source, f"source of T.{name}")
    each = to.buffer.dtype.bytes
    if isinstance(nbytes, int) and nbytes % each:
        raise error("signal-operand", f"T.{name} moves ‹{nbytes} bytes› of elements of {each} bytes", expected="whole elements")
    return (to, origin, nbytes), nbytes // each


def _update(flag: Any, value: Any, word: str, pe: Any, order: str) -> None:
    (ranks.st if word == "set" else ranks.atom_add)(flag, value, scope="sys", sem=order, dst_pe=pe)


_OPERANDS = """dest, source: the first elements, of row-major tensors of one type in global memory; what is on another PE is a
    T.SymmTensor.  Raises signal-operand, not-symmetric, rank; on CUDA nvshmem-missing."""

_SIGNAL_OPERANDS = f"""sig_addr: an element of 64 bits of a T.SymmTensor.  signal: a number.  sig_op: "set" or "add", or
    NVSHMEM's constant, else signal-order is raised.
    {_OPERANDS}"""
_ALONE = "One block of a PE calls it at a time; the launch becomes cooperative.  "


def _once(name: str, base: str, text: str) -> str:
    """What the documentation of T.base says of its use; that of its other forms refers to it."""
    return text if name == base else f"Its operands and errors are as T.{base} has them."


def _mover(verb: str, nbi: str, form: str) -> Callable[..., Emitted]:
    name, put = f"{verb}mem{nbi}{form}", verb == "put"
    move = ranks.mover(name, _BY[form], put)

    def fn(dest: Any, source: Any, nbytes: Any, pe: Any) -> Emitted:
        args, count = _moved(name, dest, source, nbytes)
        return _instead(f"{verb}mem{nbi}", form, (*args, pe), lambda: move(source, dest, count, pe, 4))

    kept = f"T.quiet completes it; {'source is kept' if put else 'dest is not read'} until then" if nbi else \
        "T.quiet or T.fence stands before a signal that tells of it" if put else "dest is there when it returns"
    return named(fn, name, f"""Copy `nbytes` consecutive bytes {'to' if put else 'from'} PE `pe`, by {_WHO[form]}.  {kept}.

    {_once(name, verb + "mem", _OPERANDS)}

    Example:
        T.{name}({'S[0], X[0]' if put else 'X[0], S[0]'}, 128, 1)
    """)


def _signalled(nbi: str, form: str) -> Callable[..., Emitted]:
    name = f"putmem_signal{nbi}{form}"
    move = ranks.mover(name, _BY[form], True)

    def fn(dest: Any, source: Any, nbytes: Any, sig_addr: Any, signal: Any, sig_op: Any, pe: Any) -> Emitted:
        args, count = _moved(name, dest, source, nbytes)
        word, op = _number(sig_op, _SIGNAL, f"sig_op of T.{name}")

        def otherwise() -> None:
            move(source, dest, count, pe, 4)
            _together(form)
            _alone(form, lambda: _update(sig_addr, signal, word, pe, "release"))

        return _instead(f"putmem_signal{nbi}", form, (*args, _flag(sig_addr, f"the signal of T.{name}"), cast(convert(
            signal), "uint64"), op, pe), otherwise)

    return named(fn, name, f"""Copy `nbytes` bytes to PE `pe`, then update a signal there, by {_WHO[form]}: a wait that sees the
    signal sees the bytes{'.  Until T.quiet source is kept' if nbi else ''}.

    {_once(name, "putmem_signal", _SIGNAL_OPERANDS)}

    Example:
        T.{name}(S[0], X[0], 128, F[0], 1, "add", 1)
    """)


def _collective(name: str, form: str) -> Callable[..., Emitted]:
    gathers, whole = name == "fcollect", name + form
    move = ranks.mover(whole, _BY[form], False)

    def emit(dest: Any, source: Any, nbytes: Any, *root: Any) -> Emitted:
        args, count = _moved(whole, dest, source, nbytes)

        def otherwise() -> None:
            _met(form)
            if root:
                move(source, dest, count, root[0], 4)
            else:
                row, at = ranks.row_of(dest, -1, f"dest of T.{whole}")
                with serial(ranks.get_num_ranks()) as pe:
                    move(source, load(row, (at + pe * count,)), count, pe, 4)
            _together(form)
            _met(form)

        return _instead(f"{name}mem", form, (*args, *root), otherwise)

    def gather(dest: Any, source: Any, nbytes: Any) -> Emitted:
        return emit(dest, source, nbytes)

    def broadcast(dest: Any, source: Any, nbytes: Any, root: Any) -> Emitted:
        return emit(dest, source, nbytes, root)

    what = "`nbytes` bytes of each PE, one PE after another" if gathers else "`nbytes` bytes of PE `root`"
    return named(gather if gathers else broadcast, whole, f"""All PEs together, by {_WHO[form]}: {what}, go to all PEs.

    {_once(whole, "fcollect" if gathers else "broadcast_warp", _ALONE + _OPERANDS)}

    Example:
        T.{whole}({'S[0], S[64], 64' if gathers else 'S[0], S[32], 64, 0'})
    """)


def _barrier(kind: str, form: str) -> Callable[[], Emitted]:
    def fn() -> Emitted:
        return _instead(f"{kind}_all", form, (), lambda: _met(form))

    done = "puts are complete" if kind == "barrier" else "what they stored in their own memory is seen"
    return named(fn, f"{kind}_all{form}", f"""Wait until all PEs have come, by {_WHO[form]}: their {done}.

    {_once(kind + "_all" + form, "sync_all", _ALONE + "Raises nvshmem-missing on CUDA.")}

    Example:
        T.{kind}_all{form}()
    """.replace("their what", "what"))


_barrier_of_thread = _barrier("barrier", "")


@example("T.barrier_all(P[bx, 0:16])")
def barrier_all(pad: Any = None) -> Emitted:
    """Wait for the same block of every rank: what their blocks did before is seen after it.

    The whole block reaches it, and the blocks of one number on all ranks equally often, also over several launches.
    pad: a row of 2 * n zeros of int64 in a T.SymmTensor, for at most n ranks, that only these blocks use: first how often
    each rank has come, then how often it was waited for.  n is at most the threads of a block.  None: NVSHMEM's barrier of all
    PEs, by one thread of each.  Raises signal-operand; without pad on CUDA nvshmem-missing.
    """
    return _barrier_of_thread() if pad is None else ranks.barrier_all(pad)


@example('T.signal_op(F[0], 1, "add", 1)')
def signal_op(sig_addr: Any, signal: Any, sig_op: Any, pe: Any) -> Emitted:
    """Update a signal of PE `pe`, by each executing thread.  It says nothing of earlier puts: T.quiet or T.fence does.

    sig_addr: an element of 64 bits of a T.SymmTensor.  signal: a number.  sig_op: "set" or "add", or NVSHMEM's constant.
    Raises signal-operand, signal-order, rank; on CUDA nvshmem-missing.
    """
    word, op = _number(sig_op, _SIGNAL, "sig_op of T.signal_op")
    return _instead("signal_op", "", (_flag(sig_addr, "the signal of T.signal_op"), cast(convert(signal), "uint64"), op, pe),
                    lambda: _update(sig_addr, signal, word, pe, "relaxed"))


@example('T.signal_wait_until(F[0], "ge", 1)')
def signal_wait_until(sig_addr: Any, cmp: Any, cmp_value: Any) -> Emitted:
    """Each executing thread waits until a signal of this PE compares so, and then sees what it tells of (an acquire).

    sig_addr: an element of 64 bits of a T.SymmTensor.  cmp: eq, ne, gt, le, lt or ge, or NVSHMEM's constant.  The launch
    becomes cooperative.  Raises signal-operand, signal-order; on CUDA nvshmem-missing.
    """
    word, op = _number(cmp, _COMPARE, "cmp of T.signal_wait_until")
    at = _flag(sig_addr, "the signal of T.signal_wait_until")
    return _instead("signal_wait_until", "", (at, op, cast(convert(cmp_value), "uint64")),
                    lambda: getattr(ranks, f"wait_{word}")(sig_addr, cmp_value))


@example("T.int_p(words[0], 7, 1)")
def int_p(dest: Any, value: Any, pe: Any) -> Emitted:
    """Store one int32 on PE `pe`, by each executing thread.  dest: an element of a T.SymmTensor of int32.

    Raises signal-operand, not-symmetric, rank; on CUDA nvshmem-missing.
    """
    to = _address(dest, "dest of T.int_p")
    if to.buffer.dtype != I32:
        raise error("signal-operand", f"T.int_p stores an «int32», found {to.buffer.dtype}")
    return _instead("int_p", "", (to, cast(convert(value), I32), pe), lambda: ranks.st(dest, value, scope="sys", dst_pe=pe))


@example("T.quiet()")
def quiet() -> Emitted:
    """This thread's puts and signals so far are complete, its asynchronous gets have come.  Raises nvshmem-missing on CUDA."""
    return _instead("quiet", "", (), ranks.fence_sys)


@example("T.fence()")
def fence() -> Emitted:
    """This thread's puts and signals so far reach a PE before those that follow.  Raises nvshmem-missing on CUDA."""
    return _instead("fence", "", (), ranks.fence_sys)


_MADE: list[Callable[..., Any]] = [
    *(_mover(verb, nbi, form) for form in _BY for verb in ("put", "get") for nbi in ("", "_nbi")),
    *(_signalled(nbi, form) for form in _BY for nbi in ("", "_nbi")), *(_barrier("sync", form) for form in _BY),
    *(_collective("fcollect", form) for form in _BY), *(_collective("broadcast", f) for f in ("_warp", "_block")),
    *(_barrier("barrier", form) for form in ("_warp", "_block")), signal_op, signal_wait_until, int_p, quiet, fence]
NVSHMEM = {f.__name__: f for f in _MADE}
