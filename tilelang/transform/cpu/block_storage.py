"""Which buffers of a block lie in the arena of the worker thread, and which on the stack of the block's function."""

from __future__ import annotations

from tilelang.ir import Alloc, Buffer, Stmt, walk, GLOBAL, TMEM, VARIABLE
from tilelang.target.cpu import unsupported
from tilelang.target.cpu_launch import BARRIER_WORDS, StorageSlot, ThreadValues, is_barrier_array, is_private

STACK_BYTES = 4096  # larger arrays lie in the arena


def fits_stack(b: Buffer, copies: int) -> bool:
    """Whether a buffer is small enough for the stack of the block's function."""
    return b.scope_name == VARIABLE and copies == 1 or b.is_static and b.size * b.dtype.bytes * copies <= STACK_BYTES


def place_block_buffers(body: Stmt, values: ThreadValues) -> tuple[StorageSlot, ...]:
    """Arena storage of a launch whose blocks run one after another: what is too large for the stack.

    Raises cpu-unsupported for tensor memory and for barriers, which such a launch does not use.
    """
    out: dict[object, StorageSlot] = {}
    for n in walk(body, Alloc):
        b = n.buffer
        if b.data in out:
            continue
        if is_barrier_array(b) or b.scope() == TMEM:
            raise unsupported(f"memory of scope {b.scope()}", span=n.span)
        copies = values.count if b.data in values.private else 1
        if b.scope() != GLOBAL and not fits_stack(b, copies):
            out[b.data] = StorageSlot(b, copies, values.unit_of(b))
    return tuple(out.values())


def place_shared_buffers(body: Stmt) -> tuple[StorageSlot, ...]:
    """Arena storage of a launch whose warp roles are coroutines: all that the warp roles of a block share.

    Raises cpu-unsupported for tensor memory.
    """
    out: dict[object, StorageSlot] = {}
    for n in walk(body, Alloc):
        b = n.buffer
        if b.data in out or b.scope() == GLOBAL or is_private(b):
            continue
        if b.scope() == TMEM:
            raise unsupported(f"memory of scope {b.scope()}", span=n.span)
        out[b.data] = StorageSlot(b, BARRIER_WORDS if is_barrier_array(b) else 1)
    return tuple(out.values())
