"""The ranks of this program on the host: set-up by torch.distributed, symmetric memory, errors of kernels that stopped.

torch allocates the symmetric heap and maps those of the other ranks (torch.distributed._symmetric_memory).
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from dataclasses import dataclass, field
from math import prod
from typing import Any

from tilelang.errors import error, register
from tilelang.runtime import nvshmem as nvshmem_device, world

# ---- how ranks meet --------------------------------------------------------------------------------------------------

# Ranks compare texts by the key-value store of torch.distributed.  A thread of every rank writes a count there again and
# again.  Who misses the text of a rank looks at its count: a rank whose count has stopped is gone, one that is only slow (it
# compiles) is not.

BEAT, GONE, POLL = 1.0, 12.0, 0.005  # seconds: between counts, without a new count, between questions


class Meeting:
    """The ranks of a program as one of them sees them.

    store: set(key, text), get(key), check([keys]), delete_key(key).  name: of this set of ranks.  gone: seconds without a
    sign of life.
    """

    def __init__(self, store: Any, rank: int, ranks: int, name: str = "ranks", gone: float = GONE) -> None:
        self.store, self.rank, self.ranks, self.name, self.gone = store, rank, ranks, f"tilelang/{name}", gone
        self.calls, self.lock, self.ended = 0, threading.Lock(), threading.Event()
        self._count(0)
        self.thread = threading.Thread(target=self._beat, name="tilelang-rank", daemon=True)
        self.thread.start()

    def end(self) -> None:
        """Stop giving signs of life.  The first rank, which may keep the store, waits until the others have done so."""
        self.ended.set()
        self.thread.join()
        self._ask("set", f"{self.name}/left/{self.rank}", "")
        for r in range(self.ranks if self.rank == 0 else 0):
            self._text(f"{self.name}/left/{r}", r, "the end")

    def gather(self, text: str) -> list[str]:
        """The texts of all ranks, which call this equally often.  Raises rank-stopped where one of them is gone."""
        call, self.calls = self.calls, self.calls + 1
        self._ask("set", f"{self.name}/{call}/{self.rank}", text)
        said = [self._text(f"{self.name}/{call}/{r}", r, text) for r in range(self.ranks)]
        if call:  # all ranks have come to this call, so none reads the texts of the one before
            self._ask("delete_key", f"{self.name}/{call - 1}/{self.rank}")
        return said

    def _text(self, key: str, rank: int, what: str) -> str:
        seen, since = b"", time.monotonic()
        while not self._ask("check", [key]):
            time.sleep(POLL)
            if time.monotonic() - since > BEAT:
                alive = self._ask("get", f"{self.name}/alive/{rank}") if self._ask("check", [
                    f"{self.name}/alive/{rank}"]) else b""
                if alive != seen:
                    seen, since = alive, time.monotonic()
                elif time.monotonic() - since > self.gone:
                    raise error("rank-stopped", f"rank {self.rank}: rank {rank} is gone; it did not come to {what}",
                                expected=f"a sign of life within {self.gone:g} seconds", found="none")
        return str(self._ask("get", key).decode())

    def _ask(self, method: str, *args: Any) -> Any:
        try:
            with self.lock:  # the store answers one question at a time
                return getattr(self.store, method)(*args)
        except RuntimeError as e:
            raise error("rank-stopped", f"rank {self.rank}: the store that the ranks share does not answer: the process that "
                        "keeps it (rank 0, or torchrun) is gone", expected="an answer of the store",
                        found=str(e).splitlines()[0][:200]) from None

    def _count(self, n: int) -> None:
        with self.lock:
            self.store.set(f"{self.name}/alive/{self.rank}", str(n))

    def _beat(self) -> None:
        n = 0
        while not self.ended.wait(BEAT / 2):
            n += 1
            try:
                self._count(n)
            except RuntimeError:  # the next question of this rank says that the store is gone
                return


register("ranks-disagree", RuntimeError, "ranks call one function with different programs or shapes",
         "every rank calls the same functions with the same shapes in the same order", expected="the same on every rank")
register("symmetric-memory", MemoryError, "the symmetric heap has no room for a tensor",
         "pass a larger heap_bytes to init_dist on every rank", expected="room in the heap")
register("rank-stopped", RuntimeError, "a kernel of several ranks stopped, because another rank did not do what it waited for",
         "look at what that rank was doing; its own error comes first", expected="a signal from the other rank")

ALIGN = 512  # bytes


@dataclass
class _Rank:
    """What init_dist has set up.

    handle: of torch's symmetric memory.  heap: the bytes of this rank.  report: words that a stopped kernel writes.
    meeting: how the ranks compare texts.  used: bytes of the heap that have been given out.  names: of the tensors, by their
    first byte.  agreed: what the ranks have compared.
    """

    rank: int
    ranks: int
    group: Any
    handle: Any
    heap: Any
    report: Any
    meeting: Any = None
    used: int = 0
    names: dict[int, str] = field(default_factory=dict)
    agreed: set[str] = field(default_factory=set)

    def gather(self, text: str) -> list[str]:
        """The texts of all ranks.  Raises rank-stopped."""
        return self.meeting.gather(text)  # type: ignore[no-any-return]


_current: list[_Rank] = []


def init_dist(heap_bytes: int = 1 << 30, timeout: float = 20.0, group: Any = None, nvshmem: bool = False) -> None:
    """Make this process a rank: torch.distributed with NCCL (unless it is set up), and a symmetric heap on its device.

    heap_bytes: of symmetric memory, the same on every rank.  timeout: seconds after which a wait of a kernel stops it.
    group: of torch.distributed, all ranks by default.  nvshmem: start NVSHMEM (torch's backend does), and allocate the heap
    there: kernels may call T.putmem_block and its like, also for ranks of other machines; then group is None.  RANK,
    WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT are read as torchrun sets them.  Raises no-world, ranks-disagree,
    nvshmem-missing, and what torch raises.

    Example:
        tilelang.distributed.init_dist(heap_bytes=1 << 28)   # under: torchrun --nproc-per-node=2 program.py
    """
    import torch
    import torch.distributed as dist
    import torch.distributed._symmetric_memory as symmetric

    if _current:
        raise error("no-world", "this process is a rank already", expected="one init_dist for each process", found="a second")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", os.environ.get("RANK", "0"))))
    torch.cuda.set_device(device)
    if not dist.is_initialized():
        dist.init_process_group("nccl", device_id=device)
    group = group or dist.group.WORLD
    me, ranks = dist.get_rank(group), dist.get_world_size(group)
    if nvshmem:
        nvshmem_device.folder()
        if not getattr(symmetric, "is_nvshmem_available", lambda: False)() or group is not dist.group.WORLD:
            raise error("nvshmem-missing", "this torch cannot start NVSHMEM" if group is dist.group.WORLD else
                        "a PE of NVSHMEM has the number of its rank among all ranks", found=f"torch {torch.__version__}",
                        hint="install a torch of CUDA 12.8 or later, and pass no group")
        symmetric.set_backend("NVSHMEM")
    heap = symmetric.empty(heap_bytes, dtype=torch.uint8, device=device)
    handle = symmetric.rendezvous(heap, group.group_name) if ranks > 1 else None  # torch rejects a group of one
    if nvshmem:
        nvshmem_device.started()
    heap.zero_()
    report = torch.zeros(6, dtype=torch.int64, pin_memory=True)
    starts = [int(p) for p in handle.buffer_ptrs] if handle else [heap.data_ptr()]
    world.enter(world.World(me, ranks, heap.data_ptr(), heap_bytes, tuple(p - starts[me] for p in starts), int(timeout * 1e9),
                            report.data_ptr()), device.index)
    meeting = Meeting(dist.distributed_c10d._get_default_store(), me, ranks, group.group_name)
    _current.append(_Rank(me, ranks, group, handle, heap, report, meeting))
    agree(f"a heap of {heap_bytes} bytes and a limit of {timeout} seconds")
    barrier()


def current() -> _Rank:
    """What init_dist has set up.  Raises no-world."""
    if not _current:
        raise error("no-world", "this process is no rank", found="none")
    return _current[0]


def destroy_dist() -> None:
    """End torch.distributed in this process; its kernels cannot be called afterwards."""
    import torch.distributed as dist

    barrier()
    current().meeting.end()
    _current.clear()
    dist.destroy_process_group()


def rank() -> int:
    """The number of this rank.  Raises no-world."""
    return current().rank


def num_ranks() -> int:
    """How many ranks there are.  Raises no-world."""
    return current().ranks


def create_tensor(shape: Any, dtype: Any, name: str = "") -> Any:
    """A symmetric tensor of zeros: every rank calls this in the same order, with the same shape and dtype.

    It lies on this rank's device and lives as long as the heap.  name: in messages.  Raises symmetric-memory, ranks-disagree.
    """
    me, shape = current(), (shape,) if isinstance(shape, int) else tuple(shape)
    agree(f"create_tensor({shape}, {dtype}) after {me.used} bytes")
    nbytes, room = prod(shape) * dtype.itemsize, me.heap.numel() - me.used
    if nbytes > room:
        raise error("symmetric-memory", f"a symmetric tensor of {nbytes} bytes does not fit in the heap of {me.heap.numel()} "
                    "bytes", found=f"{room} bytes left")
    start, me.used = me.used, -(-(me.used + nbytes) // ALIGN) * ALIGN
    me.names[start] = name or f"the symmetric tensor {shape} at byte {start}"
    return me.heap[start:start + nbytes].view(dtype).view(shape)


def is_symmetric(x: Any) -> bool:
    """Whether a tensor lies in the symmetric heap of this rank."""
    heap = current().heap
    start = x.data_ptr() - heap.data_ptr()
    return bool(0 <= start and start + x.numel() * x.element_size() <= heap.numel())


def symmetric_view(x: Any, what: str) -> Any:
    """The elements of a contiguous symmetric tensor as one row.  Raises not-symmetric."""
    if not x.is_contiguous() or not is_symmetric(x):
        raise error("not-symmetric", f"{what} is no contiguous symmetric tensor", expected="a tensor of create_tensor",
                    found="another tensor", hint="allocate it by tilelang.distributed.create_tensor on every rank")
    return x.view(-1)


def on_rank(x: Any, rank: int) -> Any:
    """The symmetric tensor x of another rank, as a tensor of this process."""
    me = current()
    if me.handle is None:
        return x
    first = (x.data_ptr() - me.heap.data_ptr()) // x.element_size()
    return me.handle.get_buffer(rank, tuple(x.shape), x.dtype, first)


def agree(what: str) -> None:
    """Compare what the ranks are about to do, once for each text.  Raises ranks-disagree, on every rank."""
    me = current()
    if what in me.agreed:
        return
    said = me.gather(what)
    other = next((r for r, text in enumerate(said) if text != what), None)
    if other is not None:
        raise error("ranks-disagree", f"rank {me.rank} calls «{what}», and rank {other} calls {said[other]}",
                    found=f"{said[other]} on rank {other}")
    me.agreed.add(what)


def same_program(kernel: Any, shapes: Any) -> None:
    """Compare the program and the shapes of a kernel with those of the other ranks, once.  Raises ranks-disagree."""
    text = hashlib.sha256(kernel.get_kernel_source().encode()).hexdigest()[:16]
    agree(f"{kernel.prim_func.func.name} ({text}) on {shapes}")


def barrier() -> None:
    """Wait, on the host, until every rank has come and its device is idle.  Raises rank-stopped, also where a rank is gone."""
    synchronize()
    current().gather("barrier()")


def synchronize() -> None:
    """Wait until this rank's device is idle.  Raises rank-stopped, with rank, signal and line, where a kernel gave up."""
    import torch

    try:
        torch.cuda.synchronize()
    except RuntimeError as e:
        raise stopped() or e from None


def stopped() -> Exception | None:
    """The error for the kernel that has stopped on this rank; None where none said why."""
    if _current:
        return said(_current[0].report, _current[0].rank, _current[0].names)
    return said(world.report[0], 0, None) if world.report else None


def said(words: Any, rank: int, names: dict[int, str] | None) -> Exception | None:
    """The error that a stopped kernel of a rank has written.  names: of symmetric tensors by first byte, None without heap."""
    kind, line, at, want, found, block = (int(x) for x in words)
    if kind == 0:
        return None
    start = max((s for s in names or () if s <= at), default=0)
    where = f"address {at:#x}" if names is None else f"byte {at - start} of {names.get(start, 'the heap')}"
    if kind == 3:
        return error("rank-stopped", f"rank {rank}: block {block} waited in line {line} for the signal at {where}, which is "
                     f"‹{found}›", expected=f"{want}")
    if kind == -1:
        return error("rank-stopped", f"rank {rank}: block {block} stopped in line {line}, before it had said why",
                     expected="a reason", found="none")
    if kind == 2:
        return error("rank-stopped", f"rank {rank}: line {line} names rank ‹{found}› of {want}",
                     expected=f"a rank below {want}")
    return error("rank-stopped", f"rank {rank}: a tensor that was passed as T.SymmTensor is not symmetric",
                 expected="a tensor of tilelang.distributed.create_tensor", found="another tensor")
