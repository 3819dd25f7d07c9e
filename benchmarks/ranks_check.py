"""Checks the functions of tilelang.distributed that have no peer of the same bits, on the GPUs of one host or without any.

    python benchmarks/ranks_check.py [--ranks 2] [--simulate] [--large]

Every rank draws the same numbers and computes in float64 what the ranks compute together.  --simulate: the ranks are processes.
The reference interpreter runs their common kernels, the blocks of all ranks at once; other kernels run on the CPU, and copies
between devices are copies between shared memories.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import socket
import sys
import time
import traceback
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as torch_dist

import tilelang
import tilelang.distributed as dist
from tilelang.distributed import host, overlap, streams
from tilelang.runtime.cuda_driver import driver

HEAP = 1 << 24  # bytes of each simulated rank


# ---- ranks without GPUs ------------------------------------------------------------------------------------------------------


class _Stream:
    """A stream whose operations are done when they are enqueued."""

    cuda_stream = 0

    def wait_stream(self, other: Any) -> None: ...
    def wait_event(self, event: Any) -> None: ...
    def record_event(self) -> None: ...


def _as_array(x: Any) -> Any:
    import ml_dtypes

    if not isinstance(x, torch.Tensor):
        return x
    return x.view(torch.int16).numpy().view(ml_dtypes.bfloat16) if x.dtype == torch.bfloat16 else x.numpy()


class SimulatedKernel:
    """A kernel that all ranks launch together: rank 0 interprets the blocks of all of them."""

    def __init__(self, program: Any) -> None:
        self.prim_func = program

    def get_kernel_source(self) -> str:
        return str(self.prim_func.func)

    def __call__(self, *args: Any) -> None:
        from tilelang.simulator import run_tile_ranks

        arrays, me, ranks = [_as_array(a) for a in args], dist.rank(), dist.num_ranks()
        torch_dist.barrier()  # what others copied to this rank before they came is there
        every: list[Any] = [None] * ranks
        torch_dist.gather_object(arrays, every if me == 0 else None)
        out: list[Any] = [None]
        torch_dist.scatter_object_list(out, run_tile_ranks(self.prim_func, every, check=False) if me == 0 else None)
        for p, a in zip(self.prim_func.func.params, arrays):
            name = p.name.removesuffix("_handle")
            if name in out[0]:
                a[...] = out[0][name]
        torch_dist.barrier()


class _Handle:
    def __init__(self, heaps: list[Any]) -> None:
        self.heaps = heaps

    def get_buffer(self, rank: int, shape: Any, dtype: Any, first: int) -> Any:
        size = torch.Size(shape).numel() * dtype.itemsize
        return self.heaps[rank][first * dtype.itemsize:first * dtype.itemsize + size].view(dtype).view(shape)


class _SimulatedRank(host._Rank):
    def gather(self, text: str) -> list[str]:
        said: list[Any] = [None] * self.ranks
        torch_dist.all_gather_object(said, text)
        return said


def simulate(rank: int, heaps: list[Any]) -> None:
    """Make this process a rank without a device."""
    torch_dist.init_process_group("gloo")
    host._current.append(_SimulatedRank(rank, len(heaps), None, _Handle(heaps), heaps[rank], None))
    cuda: Any = torch.cuda
    cuda.current_stream, cuda.Stream, cuda.stream = lambda *_: _Stream(), _Stream, lambda s: contextlib.nullcontext()
    cuda.synchronize, cuda.get_device_properties = lambda *_: None, lambda d: SimpleNamespace(multi_processor_count=4)
    anything: Any = tilelang
    anything.compile = lambda program, **options: SimulatedKernel(program)
    overlap.set_signal = streams.set_signal = lambda flag, value, stream=None: flag.fill_(value)


# ---- checks ------------------------------------------------------------------------------------------------------------------


class Numbers:
    """The same random numbers on every rank."""

    def __init__(self, device: str) -> None:
        self.device, self.state = device, torch.Generator().manual_seed(5)

    def normal(self, *shape: int, scale: float = 1.0) -> Any:
        return (torch.randn(shape, generator=self.state) * scale).to(self.device, torch.bfloat16)

    def below(self, most: int, *shape: int) -> Any:
        return torch.randint(most, shape, generator=self.state).to(self.device)


def symmetric(x: Any) -> Any:
    return dist.create_tensor(tuple(x.shape), x.dtype).copy_(x)


def worst(got: Any, want: Any) -> float:
    return float((got.double() - want.double()).abs().max() / want.double().abs().max().clamp(min=1e-30))


def exchanges(g: Numbers, large: bool) -> float:
    """all_to_all, equal and ragged: bit by bit."""
    me, ranks, n, rows, width = dist.rank(), dist.num_ranks(), 1 << 18 if large else 300, 4096 if large else 12, 512
    x = g.normal(ranks, ranks, n)
    got = dist.all_to_all(x[me].contiguous(), dist.create_tensor((ranks, n), x.dtype))
    dist.barrier()
    assert torch.equal(got, x[:, me]), "all_to_all"
    sent = g.below(rows // ranks, ranks, ranks)  # some rows of each rank go nowhere
    y = g.normal(ranks, rows, width)
    out = dist.create_tensor((rows * ranks, width), y.dtype)
    table = dist.all_to_all_rows(y[me].contiguous(), sent[me].contiguous(), out)
    dist.barrier()
    first = sent.cumsum(1) - sent
    want = torch.cat([y[s, int(first[s, me]):int(first[s, me] + sent[s, me])] for s in range(ranks)])
    assert torch.equal(table, sent) and torch.equal(out[:len(want)], want) and not out[len(want):].any(), "all_to_all_rows"
    return 0.0


def copies(g: Numbers, large: bool) -> float:
    """put with a flag, and get: bit by bit."""
    me, ranks, n = dist.rank(), dist.num_ranks(), 1 << 22 if large else 100
    x = g.normal(ranks, n)
    there, flags = dist.create_tensor((n,), x.dtype), dist.create_tensor((1,), torch.int64)
    dist.put(x[me].contiguous(), there, (me + 1) % ranks, flag=flags)
    if g.device != "cpu":  # the simulation's streams do not wait
        dist.wait_eq(flags, 1)
    dist.barrier()
    assert torch.equal(there, x[me - 1]) and int(flags) == 1, "put"
    got = dist.get(there, (me + 1) % ranks, torch.empty_like(there))
    dist.barrier()
    assert torch.equal(got, x[me]), "get"
    for wrong in (x[me, :n // 2], x[me].float()):
        try:
            dist.put(wrong, there, 0)
        except ValueError as e:
            assert "signal-operand" in str(e)
        else:
            raise AssertionError("an operand of put that differs")
    return 0.0


def experts(g: Numbers, large: bool) -> float:
    """A layer of experts over all ranks."""
    me, ranks = dist.rank(), dist.num_ranks()
    tokens, width, hidden, own, k = (1024, 1024, 512, 8, 4) if large else (6, 64, 64, 2, 2)
    count = own * ranks
    x = g.normal(ranks, tokens, width)
    chosen = torch.stack([torch.randperm(count, generator=g.state)[:k] for _ in range(ranks * tokens)]).view(
        ranks, tokens, k).to(g.device)
    weights = g.normal(ranks, tokens, k).abs().float()
    gate_up = g.normal(count, width, 2 * hidden, scale=width ** -0.5)
    down = g.normal(count, hidden, width, scale=hidden ** -0.5)
    mine = slice(me * own, me * own + own)
    got = dist.moe(x[me].contiguous(), chosen[me], weights[me], gate_up[mine].contiguous(), down[mine].contiguous(),
                   room=ranks * tokens * k)
    dist.barrier()
    want = torch.zeros(tokens, width, dtype=torch.float64, device=g.device)
    for e in range(count):
        token, slot = (chosen[me] == e).nonzero(as_tuple=True)
        gate, up = (x[me][token].double() @ gate_up[e].double()).chunk(2, -1)
        want.index_add_(0, token, torch.nn.functional.silu(gate) * up @ down[e].double() * weights[me][token, slot, None])
    return worst(got, want)


def attended(q: Any, k: Any, v: Any, causal: bool) -> Any:
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True).transpose(1, 2)


def attentions(g: Numbers, large: bool) -> float:
    """A sequence that is divided among the ranks, by keys that travel and by heads that travel."""
    me, ranks, found = dist.rank(), dist.num_ranks(), []
    b, s, heads, kv, d = (2, 512, 16, 8, 128) if large else (1, 32, 2 * ranks, ranks, 64)
    q, k, v = (g.normal(b, ranks * s, h, d) for h in (heads, kv, kv))
    part = slice(me * s, me * s + s)
    mine = [x[:, part].contiguous() for x in (q, k, v)]
    held = [symmetric(x) for x in mine[1:]]
    for causal in (False, True):
        want = attended(q, k, v, causal)[:, part]
        for fn, args in ((dist.gathered_attention, (mine[0], *held)), (dist.ulysses_attention, mine)):
            for _ in range(2):  # the second call uses memory of the first again
                got = fn(*args, causal=causal)
            dist.barrier()
            found.append(worst(got, want))
    return max(found)


def llama_blocks(g: Numbers, large: bool) -> float:
    """A block of a Llama-like model whose heads and MLP are divided."""
    me, ranks = dist.rank(), dist.num_ranks()
    batch, seq, dim, heads, kv, hidden, ffn = (1, 1024, 128, 16, 8, 2048, 4096) if large else (
        1, 16 * ranks, 64, 2 * ranks, ranks, 64, 64 * ranks)
    rows = batch * seq
    x, norms = g.normal(rows, hidden), g.normal(2, hidden)
    wq, wk, wv = (g.normal(hidden, n * dim, scale=hidden ** -0.5) for n in (heads, kv, kv))
    wo, wd = g.normal(heads * dim, hidden, scale=(heads * dim) ** -0.5), g.normal(ffn, hidden, scale=ffn ** -0.5)
    wg, wu = (g.normal(hidden, ffn, scale=hidden ** -0.5) for _ in range(2))
    angle = torch.rand(seq, dim // 2, generator=g.state).to(g.device) * 6
    cos, sin = angle.cos(), angle.sin()

    def part(w: Any, axis: int) -> Any:
        return w.chunk(ranks, axis)[me]

    got = dist.llama_block(
        x.chunk(ranks)[me].contiguous(), norms, torch.cat([part(w, 1) for w in (wq, wk, wv)], 1).contiguous(),
        part(wo, 0).contiguous(), torch.cat([part(w, 1) for w in (wg, wu)], 1).contiguous(), part(wd, 0).contiguous(), cos, sin,
        batch=batch, dim=dim, kv_heads=kv // ranks)
    dist.barrier()
    x, norms, wq, wk, wv, wo, wd, wg, wu, cos, sin = (
        a.double() for a in (x, norms, wq, wk, wv, wo, wd, wg, wu, cos, sin))

    def normed(y: Any, w: Any) -> Any:
        return y * (y.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * w

    def turned(y: Any) -> Any:
        a, b = y.view(batch, seq, -1, dim).chunk(2, -1)
        c, s = cos[:, None], sin[:, None]
        return torch.cat([a * c - b * s, b * c + a * s], -1)

    y = normed(x, norms[0])
    mixed = attended(turned(y @ wq), turned(y @ wk), (y @ wv).view(batch, seq, kv, dim), True)
    x = x + mixed.reshape(rows, -1) @ wo
    y = normed(x, norms[1])
    want = x + torch.nn.functional.silu(y @ wg) * (y @ wu) @ wd
    return worst(got, want.chunk(ranks)[me])


def captured(calls: Any) -> Any:
    """Capture the calls, twice in a row, and replay them twice."""
    def way() -> None:
        calls()
        dist.barrier()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            calls()
            calls()
        graph.replay()
        graph.replay()

    return way


def elsewhere(calls: Any) -> Any:
    """Make the calls on two streams of their own and on the present one, all before the first has ended."""
    def way() -> None:
        here = torch.cuda.current_stream()
        for stream in (torch.cuda.Stream(), torch.cuda.Stream(), here):
            stream.wait_stream(here)
            with torch.cuda.stream(stream):
                calls()
            here.wait_stream(stream)

    return way


def products(g: Numbers, large: bool) -> float:
    """GEMMs whose operands are gathered, or whose results are scattered or summed."""
    me, ranks, found = dist.rank(), dist.num_ranks(), []
    m, n, k = (1024 * ranks, 8192, 512) if large else (32 * ranks, 64, 64)  # large: rows of a rank travel in two chunks
    x, w = g.normal(ranks, m, k), g.normal(ranks, k, n, scale=k ** -0.5)
    rows = symmetric(x[me])
    out = torch.empty(ranks * m, n, dtype=x.dtype, device=g.device)
    y, total = torch.empty(m // ranks, n, dtype=x.dtype, device=g.device), dist.create_tensor((m, n), x.dtype)
    want = (x.double() @ w.double()).sum(0)

    def calls() -> None:
        dist.all_gather_matmul(rows, w[0].contiguous(), out.zero_())
        dist.matmul_reduce_scatter(x[me].contiguous(), w[me].contiguous(), y.zero_())
        dist.matmul_all_reduce(x[me].contiguous(), w[me].contiguous(), total)

    ways = (lambda: (calls(), calls()), *([captured(calls), elsewhere(calls)] if g.device != "cpu" else []))
    for least in (overlap.ONE_LAUNCH, 0):  # by cost, then in one launch wherever the device can
        for way in ways:
            with mock.patch.object(overlap, "ONE_LAUNCH", least):
                way()
            dist.barrier()
            found += [worst(out, x.double().reshape(-1, k) @ w[0].double())]
            found += [worst(y, want.chunk(ranks)[me]), worst(total, want)]
            total.zero_()
            dist.barrier()
    return max(found)


def odd_sizes(g: Numbers, large: bool) -> float:
    """Collectives of one element and of sizes that nothing divides, and ragged ones with empty parts: bit by bit."""
    for dtype in (torch.bfloat16, torch.float32):
        for n in (1, 7, 40_003, (1 << 19) + 1) if large else (1, 301):
            _collectives_of(g, n, dtype)
    me, ranks = dist.rank(), dist.num_ranks()
    for case in range(4):  # nobody sends; only the last, only to the first; all to one; all but to themselves
        sent = torch.zeros(ranks, ranks, dtype=torch.int64, device=g.device)
        sent[-1, 0] = 5 * (case == 1)
        sent[:, 1] += 3 * (case == 2)
        sent += (1 - torch.eye(ranks, dtype=torch.int64, device=g.device)) * (case == 3)
        y = g.normal(ranks, 5, 24)
        out = dist.create_tensor((5 * ranks, 24), y.dtype)
        for way in _ways(g, lambda y=y, sent=sent, out=out: dist.all_to_all_rows(y[me], sent[me].contiguous(), out)):
            out.zero_()
            dist.barrier()
            way()
            dist.barrier()
            first = sent.cumsum(1) - sent
            want = torch.cat([y[s, int(first[s, me]):int(first[s, me] + sent[s, me])] for s in range(ranks)])
            assert torch.equal(out[:len(want)], want) and not out[len(want):].any(), f"rows, case {case}"
    return 0.0


def _ways(g: Numbers, calls: Any) -> Any:
    return calls, *([captured(calls)] if g.device != "cpu" else [])


def _collectives_of(g: Numbers, n: int, dtype: Any) -> None:
    """All collectives of n small integers; a captured sum is summed again and again."""
    me, ranks = dist.rank(), dist.num_ranks()
    x = (g.below(17, ranks, ranks, n) - 8).to(dtype)
    total, every, gathered, swapped = (dist.create_tensor(s, dtype) for s in ((n,), (ranks, n), (ranks, n), (ranks, n)))
    scattered, sums = torch.zeros(n, dtype=dtype, device=g.device), x.float().sum(0)

    def calls() -> None:
        dist.all_reduce(total)
        dist.reduce_scatter(every, scattered)
        dist.all_gather(x[me, 0], gathered)
        dist.all_to_all(x[me], swapped)

    for way, before in zip(_ways(g, calls), (0, 4)):
        total.copy_(x[me, 0])
        every.copy_(x[me])
        for y in (scattered, gathered, swapped):
            y.zero_()
        dist.barrier()
        way()
        dist.barrier()
        for name, got, want in (("all_reduce", total, sums[0] * ranks ** before), ("reduce_scatter", scattered, sums[me]),
                                ("all_gather", gathered, x[:, 0]), ("all_to_all", swapped, x[:, me])):
            assert torch.equal(got.float(), want.float()), (name, n, dtype, before)


class _Handle64(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_char * 64)]


def host_names(g: Numbers, large: bool) -> float:
    """Memory for other processes, memory of the host, signals on a stream, and timing."""
    if g.device == "cpu":  # the simulation has no driver
        return 0.0
    me, ranks = dist.rank(), dist.num_ranks()
    x = torch.full((1 << 20,), me + 5, dtype=torch.int32, device="cuda")
    torch.cuda.synchronize()
    every: list[Any] = [None] * ranks
    torch_dist.all_gather_object(every, dist.get_local_ipc_handle(x[8:]))
    (handle, first), there = every[(me + 1) % ranks], ctypes.c_uint64()
    driver().call("cuIpcOpenMemHandle_v2", ctypes.byref(there), _Handle64.from_buffer_copy(handle), ctypes.c_uint(1))
    got = torch.as_tensor(streams._Bytes(there.value + first, 64, None), device="cuda").view(torch.int32)
    assert (got == (me + 1) % ranks + 5).all(), got
    dist.barrier()
    driver().call("cuIpcCloseMemHandle", there)
    host, device = dist.create_mapped_tensor((4,), torch.int64)
    device.fill_(7 + me)
    torch.cuda.synchronize()
    assert (host == 7 + me).all() and host.is_pinned()
    flags = dist.create_dist_tensor((2,), torch.int64)
    dist.set_signal(dist.on_rank(flags, (me + 1) % ranks)[0:1], 3)
    dist.wait_eq(flags[0:1], 3)
    last, ms = dist.perf_fn(lambda: dist.all_reduce(flags[1:2]), iters=5, warmup_iters=1)
    dist.barrier()
    assert int(flags[0]) == 3 and ms > 0 and last.data_ptr() == flags[1:2].data_ptr()
    assert dist.init_distributed is dist.init_dist
    return 0.0


CHECKS = exchanges, odd_sizes, copies, experts, attentions, products, llama_blocks, host_names


def run(rank: int, port: int, args: argparse.Namespace, heaps: list[Any]) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(args.ranks), MASTER_ADDR="127.0.0.1",
                      MASTER_PORT=str(port))
    torch.set_num_threads(1)
    if args.simulate:
        simulate(rank, heaps)
    else:
        dist.init_dist(heap_bytes=1 << 29, timeout=20.0)
    failed = 0
    for check in CHECKS:
        if args.only and check.__name__ not in args.only.split(","):
            continue
        began = time.time()
        try:
            error = check(Numbers("cpu" if args.simulate else "cuda"), args.large)
            said = "" if error < 2 ** -5 else ", WRONG"
            print(f"rank {rank}: {check.__name__}: error {error:.2g}{said}, {time.time() - began:.1f} s", flush=True)
        except Exception:
            said = traceback.format_exc()
            print(f"rank {rank}: {check.__name__} failed\n{said}", flush=True)
        failed += bool(said)
    if failed:
        os._exit(1)
    if args.simulate:
        torch_dist.destroy_process_group()
    else:
        dist.destroy_dist()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--simulate", action="store_true")
    parser.add_argument("--large", action="store_true")
    parser.add_argument("--only", default="", help=",".join(f.__name__ for f in CHECKS))
    args = parser.parse_args()
    if not args.simulate and torch.cuda.device_count() < args.ranks:
        sys.exit(f"{args.ranks} GPUs are needed, this machine has {torch.cuda.device_count()}")
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    heaps = [torch.zeros(HEAP, dtype=torch.uint8).share_memory_() for _ in range(args.ranks if args.simulate else 0)]
    torch.multiprocessing.spawn(run, (port, args, heaps), nprocs=args.ranks)


if __name__ == "__main__":
    main()
