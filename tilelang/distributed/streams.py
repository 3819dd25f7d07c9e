"""What the host puts on a stream for other ranks: copies, signals and waits without a kernel; timing, and memory for others."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from math import prod
from typing import Any

from tilelang.errors import error
from tilelang.runtime import world
from tilelang.runtime.cuda_driver import driver

from .host import ALIGN, on_rank, said, symmetric_view

_WRITE, _WAIT = {4: "cuStreamWriteValue32_v2", 8: "cuStreamWriteValue64_v2"}, {
    4: "cuStreamWaitValue32_v2", 8: "cuStreamWaitValue64_v2"}
_COMPARE = {"ge": 0, "eq": 1}  # CU_STREAM_WAIT_VALUE_GEQ, _EQ


def _on_stream(names: dict[int, str], flag: Any, value: int, flags: int, stream: Any) -> None:
    import torch

    size = flag.element_size()
    if flag.numel() != 1 or size not in names or flag.is_floating_point():
        raise error("signal-operand", f"a signal on a stream is an integer of 32 or 64 bits, found {tuple(flag.shape)} of "
                    f"{flag.dtype}", expected="one element of int32 or int64")
    raw = (stream or torch.cuda.current_stream(flag.device)).cuda_stream
    number = (ctypes.c_uint32 if size == 4 else ctypes.c_uint64)(value)
    driver().call(names[size], ctypes.c_void_p(raw), ctypes.c_uint64(flag.data_ptr()), number, ctypes.c_uint(flags))


def set_signal(flag: Any, value: int, stream: Any = None) -> None:
    """flag = value, when the stream comes to it, after all that stands before it there.

    flag: a tensor of one int32 or int64 element, also of another rank (on_rank).  stream: of torch, the current one by default.
    Raises signal-operand.

    Example:
        dist.set_signal(dist.on_rank(flags, 1)[0:1], 1)
    """
    _on_stream(_WRITE, flag, value, 0, stream)


def wait_eq(flag: Any, value: int, stream: Any = None, compare: str = "eq") -> None:
    """The stream waits until flag is `value` (compare "eq") or at least that ("ge"; the difference counts, as for epochs).

    flag: a tensor of one int32 or int64 element of this rank.  stream: of torch, the current one by default.  Raises
    signal-operand, signal-order.

    Example:
        dist.wait_eq(flags[0:1], 1)
    """
    if compare not in _COMPARE:
        raise error("signal-order", f"compare of wait_eq is ‹{compare!r}›", expected="one of eq, ge")
    _on_stream(_WAIT, flag, value, _COMPARE[compare], stream)


def put(x: Any, out: Any, rank: int, flag: Any = None, value: int = 1) -> None:
    """out of another rank = x, on the current stream; then flag of that rank = value.

    A copy engine moves the bytes: no SM is busy, and large tensors travel faster than by T.put_block (decision 215).  x:
    contiguous, of out's shape and dtype.  out: a contiguous symmetric tensor.  flag: one symmetric int32 or int64, for which
    the other rank waits (wait_eq; T.wait_eq in a kernel).  Raises not-symmetric, signal-operand.

    Example:
        dist.put(x, out, (dist.rank() + 1) % dist.num_ranks(), flag=flags[0:1])
    """
    _moved(x, out, "the destination of put")
    on_rank(out, rank).copy_(x)
    if flag is not None:
        set_signal(on_rank(flag, rank), value)


def get(x: Any, rank: int, out: Any) -> Any:
    """out = x of another rank, on the current stream, by a copy engine as put; returns out.

    x: a contiguous symmetric tensor.  out: contiguous, of x's shape and dtype.  Raises not-symmetric, signal-operand.

    Example:
        rows = dist.get(x, (dist.rank() + 1) % dist.num_ranks(), torch.empty_like(x))
    """
    _moved(out, x, "the source of get")
    return out.copy_(on_rank(x, rank))


def _moved(mine: Any, there: Any, what: str) -> None:
    symmetric_view(there, what)
    if (mine.shape, mine.dtype, mine.is_contiguous()) != (there.shape, there.dtype, True):
        shapes = [f"{'' if x.is_contiguous() else 'strided '}{tuple(x.shape)} of {x.dtype}" for x in (there, mine)]
        raise error("signal-operand", f"{what} is «{shapes[0]}», and this rank's tensor ‹{shapes[1]}›",
                    hint="pass contiguous tensors of one shape and type")


def perf_fn(fn: Callable[[], Any], iters: int = 20, warmup_iters: int = 5) -> tuple[Any, float]:
    """(the last result of fn(), milliseconds of a call on the current stream, the mean of `iters` calls).

    Example:
        _, ms = dist.perf_fn(lambda: dist.all_reduce(x), iters=50, warmup_iters=10)
    """
    import torch

    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    out = None
    for k in range(warmup_iters + iters):
        if k == warmup_iters:
            start.record()
        out = fn()
    end.record()
    end.synchronize()
    return out, start.elapsed_time(end) / iters


# ---- memory for other processes ---------------------------------------------------------------------------------------------


def get_local_ipc_handle(x: Any) -> tuple[bytes, int]:
    """(the handle of the allocation of a CUDA tensor for other processes of this machine, bytes from its start to the tensor).

    Memory of create_tensor has none: torch maps it on all ranks (on_rank).

    Example:
        handle, first = dist.get_local_ipc_handle(torch.zeros(1 << 20, device="cuda"))
    """

    handle, base, size = (ctypes.c_char * 64)(), ctypes.c_uint64(), ctypes.c_size_t()
    driver().call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(x.data_ptr()))
    driver().call("cuIpcGetMemHandle", ctypes.byref(handle), base)
    return bytes(handle), x.data_ptr() - base.value


class _Bytes:
    """Memory at an address, for torch.as_tensor."""

    def __init__(self, address: int, nbytes: int, owner: Any) -> None:
        self.__cuda_array_interface__ = {"shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3}
        self.owner = owner


def create_mapped_tensor(shape: Any, dtype: Any) -> tuple[Any, Any]:
    """(a tensor of zeros in pinned host memory, the same memory as a CUDA tensor that kernels access).

    Example:
        host, device = dist.create_mapped_tensor((4,), torch.int64)
    """
    import torch

    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    host = torch.zeros(shape, dtype=dtype, pin_memory=True)
    whole = torch.as_tensor(_Bytes(host.data_ptr(), prod(shape) * dtype.itemsize, host), device="cuda")
    return host, whole.view(dtype).view(shape)


class LocalRanks:
    """The devices of this process, each of which is a rank.  Made by init_local."""

    def __init__(self, devices: list[int], heaps: list[Any], reports: Any) -> None:
        self.devices, self.heaps, self.reports, self.used = devices, heaps, reports, 0

    def synchronize(self) -> None:
        """Wait until the devices are idle.  Raises rank-stopped where a kernel gave up, with rank, signal and line."""
        import torch

        for k, d in enumerate(self.devices):
            try:
                torch.cuda.synchronize(d)
            except RuntimeError as e:
                found = [said(words, r, {}) for r, words in enumerate(self.reports)]
                raise next((x for x in found[k:] + found[:k] if x is not None), e) from None

    def create_tensor(self, shape: Any, dtype: Any) -> list[Any]:
        """Symmetric tensors of zeros, one on each device.  Raises symmetric-memory."""
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        nbytes, start = prod(shape) * dtype.itemsize, self.used
        if start + nbytes > self.heaps[0].numel():
            raise error("symmetric-memory", f"a symmetric tensor of {nbytes} bytes does not fit in heaps of "
                        f"{self.heaps[0].numel()} bytes", found=f"{self.heaps[0].numel() - start} bytes left",
                        hint="pass a larger heap_bytes to init_local")
        self.used = -(-(start + nbytes) // ALIGN) * ALIGN
        return [h[start:start + nbytes].view(dtype).view(shape) for h in self.heaps]


def init_local(devices: Any = None, heap_bytes: int = 1 << 28, timeout: float = 20.0) -> LocalRanks:
    """Make each device of this process a rank, without other processes: heaps that the devices reach by peer access.

    devices: their numbers, all by default.  A kernel is called once for each device, with the tensors of that device.  timeout:
    seconds after which a wait of a kernel stops it.  Raises no-world, and what torch and the driver raise.

    Example:
        ranks = tilelang.distributed.init_local([0, 1])
        for x, y in zip(ranks.create_tensor((1024,), torch.float32), outputs):
            kernel(x, y)
    """
    import torch

    devices = list(range(torch.cuda.device_count())) if devices is None else list(devices)
    heaps = [torch.zeros(heap_bytes, dtype=torch.uint8, device=torch.device("cuda", d)) for d in devices]
    contexts = []
    for d in devices:
        with torch.cuda.device(d):
            contexts.append(ctypes.c_void_p())
            driver().call("cuCtxGetCurrent", ctypes.byref(contexts[-1]))
    for d in devices:
        with torch.cuda.device(d):
            for other, context in zip(devices, contexts):
                if d != other:
                    _enable_peer(driver(), context)
    reports = torch.zeros(len(devices), 6, dtype=torch.int64, pin_memory=True)
    starts = [h.data_ptr() for h in heaps]
    for k, d in enumerate(devices):
        world.enter(world.World(k, len(devices), starts[k], heap_bytes, tuple(p - starts[k] for p in starts),
                                int(timeout * 1e9), reports[k].data_ptr()), d)
    return LocalRanks(devices, heaps, reports)


def _enable_peer(driver: Any, context: Any) -> None:
    """Let the current context access that one's memory; torch may have done so already."""
    try:
        driver.call("cuCtxEnablePeerAccess", context, ctypes.c_uint(0))
    except RuntimeError as e:
        if "PEER_ACCESS_ALREADY_ENABLED" not in str(e) and "already enabled" not in str(e):
            raise
