"""Measures tilelang.distributed beside NCCL and torch's symmetric memory, on the GPUs of one host, in one run.

    python benchmarks/distributed.py [--ranks 2] [--parts copies,decodes] [--out FILE] [--seconds 90]

Results are compared first: collectives with a sum in float64, copies bit by bit.  Times are medians, in microseconds.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import socket
import statistics
import sys
import time
import traceback
from functools import partial
from unittest import mock

import torch
import torch.distributed as torch_dist

import tilelang
import tilelang.distributed as dist
import tilelang.language as T
from bulk_movers import FORMS, bulk_mover
from tilelang.distributed import collectives, overlap
from tilelang.library import matmul

KIB, MIB = 1 << 10, 1 << 20
SHAPES = ((128, 4, 512), (256, 4, 512), (512, 4, 512), (128, 8, 256))  # blocks, vectors of a thread, threads
UNCHECKED = {"tl.disable_data_race_check": True}
SIZES = (64 * KIB, MIB, 16 * MIB, 256 * MIB)


def mover(n: int, put: bool, blocks: int, times: int = 8, threads: int = 256):
    """A kernel that moves n elements to or from the next rank, each thread `times` vectors at once."""
    each = n // blocks

    @T.prim_func
    def move(mine: T.Tensor((n,), "int32"), theirs: T.SymmTensor((n,), "int32")):
        with T.Kernel(blocks, threads=threads) as b:
            peer = (T.get_rank() + 1) % T.get_num_ranks()
            if put:
                T.put_block(mine[b * each], theirs[b * each], each, dst_pe=peer, unroll_factor=times)
            else:
                T.get_block(theirs[b * each], mine[b * each], each, src_pe=peer, unroll_factor=times)

    return move


def round_trips(rounds: int, barrier: bool = False):
    """Two ranks signal each other in turn.  barrier: of the block in front of each wait, as in round_trips_without_limit."""

    @T.prim_func
    def play(flag: T.SymmTensor((2,), "int64"), start: T.int64):
        with T.Kernel(1, threads=32):
            for k in T.serial(rounds):
                if T.get_rank() == 0:
                    T.signal(flag[0], rank=1)
                if barrier:
                    T.sync_threads()
                if T.get_rank() == 0:
                    T.wait_ge(flag[0], start + k + 1)
                elif T.get_rank() == 1:
                    T.wait_ge(flag[0], start + k + 1)
                    T.signal(flag[0], rank=0)

    return play


def barriers(rounds: int, ranks: int):
    """All ranks wait for each other, again and again."""

    @T.prim_func
    def wait(pad: T.SymmTensor((1, 2 * ranks), "int64")):
        with T.Kernel(1, threads=32):
            for _ in T.serial(rounds):
                T.barrier_all(pad[0, 0:2 * ranks])

    return wait


def round_trips_without_limit(rounds: int):
    """round_trips whose loops of loads have no limit of time."""

    @T.prim_func
    def play(flag: T.SymmTensor((2,), "int64"), start: T.int64):
        with T.Kernel(1, threads=32):
            seen = T.alloc_local((1,), "int64")
            for k in T.serial(rounds):
                if T.get_rank() == 0:
                    T.signal(flag[0], rank=1)
                seen[0] = -1
                while seen[0] < start + k + 1:
                    T.ld(flag[0], seen[0], scope="sys", sem="acquire")
                if T.get_rank() == 1:
                    T.signal(flag[0], rank=0)

    return play


class Bench:
    """This rank's measurements; rank 0 prints and keeps them."""

    def __init__(self, out: str, seconds: float) -> None:
        self.rows: list[dict] = []
        self.out, self.until, self.started = out, time.time() + seconds, time.time()
        self.group, self.one = torch_dist.group.WORLD, torch.ones(1, device="cuda")

    def left(self) -> bool:
        """Whether there is time for more; the same on every rank."""
        flag = torch.tensor([time.time() < self.until], dtype=torch.int32, device="cuda")
        torch_dist.all_reduce(flag, torch_dist.ReduceOp.MIN)
        return bool(flag.item())

    def say(self, row: dict) -> None:
        if dist.rank():
            return
        self.rows.append(row)
        print(f"[{time.time() - self.started:5.1f} s] " + "  ".join(
            f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()), flush=True)
        if self.out:
            with open(self.out, "w", encoding="utf-8") as f:
                json.dump({"device": torch.cuda.get_device_name(), "torch": torch.__version__, "ranks": dist.num_ranks(),
                           "rows": self.rows}, f, indent=1)

    def time(self, inner: int, fn, *args, repeats: int = 9, graph: bool = True) -> float:
        """Median microseconds of fn(*args), of `inner` calls between two events; as a CUDA graph where it can be captured."""
        for _ in range(3):
            fn(*args)
        dist.barrier()
        replay = None
        if graph:
            g = torch.cuda.CUDAGraph()
            with torch.cuda.graph(g, capture_error_mode="thread_local"):
                for _ in range(inner):
                    fn(*args)
            replay = g.replay
            replay()
        dist.barrier()
        times = []
        for _ in range(repeats):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch_dist.barrier()
            torch.cuda.synchronize()
            if replay:  # the devices begin together, with all launches enqueued: one host may be 40 us late
                torch_dist.all_reduce(self.one)
                torch.cuda._sleep(300_000)
            start.record()
            if replay:
                replay()
            else:
                for _ in range(inner):
                    fn(*args)
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) * 1e3 / inner)
        mine = torch.tensor([statistics.median(times)], device="cuda")
        torch_dist.all_reduce(mine, torch_dist.ReduceOp.MAX)
        return float(mine.item())


    def graph(self, call):
        """The replay of a call as a CUDA graph, where it can be captured; else the call."""
        call()
        dist.barrier()
        g = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(g, capture_error_mode="thread_local"):
                call()
        except Exception as e:
            print(f"no graph: {e}"[:200], flush=True)
            torch.cuda.synchronize()
            return call
        g.replay()
        dist.barrier()
        return g.replay

    def compare(self, row: dict, calls: dict, inner: int = 4, repeats: int = 9) -> None:
        """Say the median microseconds of each call, measured in turns of changing order, so that they meet the same clocks.

        A call of all ranks takes as long as on the slowest.
        """
        def again(call):
            for _ in range(inner):
                call()

        runs = {name: self.graph(partial(again, call)) if name != "fused" else partial(again, call)
                for name, call in calls.items() if call}
        times: dict[str, list[float]] = {name: [] for name in runs}
        for turn in range(repeats + 1):
            for name in random.Random(turn).sample(sorted(runs), len(runs)):  # what a GPU did before changes its clock
                start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                torch_dist.barrier()
                start.record()
                runs[name]()
                end.record()
                end.synchronize()
                times[name] += [start.elapsed_time(end) * 1e3 / inner] * (turn > 0)
        every = torch.tensor(list(times.values()), device="cuda")
        torch_dist.all_reduce(every, torch_dist.ReduceOp.MAX)
        quartiles = every.quantile(torch.tensor([0.25, 0.5, 0.75], device="cuda"), dim=1)
        low, middle, high = (dict(zip(runs, x)) for x in quartiles.tolist())
        self.say(row | {f"{name} us": us for name, us in middle.items()} | {
            "quartiles": {name: [round(low[name], 1), round(high[name], 1)] for name in runs}})


def in_tiles(kernel, chunk: int, mine, theirs) -> None:
    kernel(mine.view(-1, chunk), theirs.view(-1, chunk))


def by_function(put: bool, mine, theirs, peer: int) -> tuple:
    """The function that moves a whole tensor, and its arguments."""
    return (dist.put, mine, theirs, peer) if put else (dist.get, theirs, peer, mine)


def copies(b: Bench) -> None:
    """Put and get in a kernel and of whole tensors against the copy engine, both directions at once."""
    peer = (dist.rank() + 1) % dist.num_ranks()
    for nbytes in (16 * MIB, 256 * MIB):
        n = nbytes // 4
        there = dist.create_tensor((n,), torch.int32)
        remote = dist.on_rank(there, peer)
        mine, what = dist.create_tensor((n,), torch.int32), {"row": "copy", "MiB": nbytes // MIB}
        for name, put in (("put", True), ("get", False)):
            kernels = {f"{g} x {k} x {t}": tilelang.compile(mover(n, put, g, k, t), target="cuda") for g, k, t in SHAPES}
            for form in FORMS:
                bulk = tilelang.compile(bulk_mover(n, put, *form), target="cuda")
                kernels[f"bulk {form}"] = partial(in_tiles, bulk, form[1])
            kernel = kernels[f"bulk {FORMS[0]}"]
            torch.arange(n, out=mine if put else there)
            mine.add_(0 if not put else dist.rank())
            there.add_(dist.rank() if not put else 0)
            dist.barrier()
            kernel(mine, there)
            dist.barrier()
            got = there if put else mine
            assert dist.num_ranks() != 2 or torch.equal(got, torch.arange(n, dtype=torch.int32, device="cuda") + peer), name
            inner = max(2, 64 * MIB // nbytes * 4)
            times = {text: b.time(inner, k, mine, there) for text, k in kernels.items()}
            if nbytes > 16 * MIB:
                what |= {f"{name} all GB/s": {text: round(nbytes / us / 1e3, 1) for text, us in times.items()}}
            text, ours = min(times.items(), key=lambda x: x[1])
            to, source = (remote, mine) if put else (mine, remote)
            engine = b.time(inner, to.copy_, source, graph=False)
            whole = b.time(inner, *by_function(put, mine, there, peer), graph=False)
            what |= {f"{name} blocks x vectors x threads": text,
                     f"{name} GB/s": nbytes / ours / 1e3, f"engine {name} GB/s": nbytes / engine / 1e3,
                     f"{name} ratio": engine / ours, f"dist.{name} ratio": engine / whole}
        b.say(what)


def one_way(b: Bench) -> None:
    """Put and get by threads beside the copy engine, where rank 0 alone moves 256 MiB: no request shares a link with data."""
    n, first = 256 * MIB // 4, dist.rank() == 0
    there, mine = (dist.create_tensor((n,), torch.int32) for _ in range(2))
    peer = (dist.rank() + 1) % dist.num_ranks()
    remote = dist.on_rank(there, peer)
    row = {"row": "copy, one way", "MiB": 256}
    for name, put in (("put", True), ("get", False)):
        kernel = tilelang.compile(mover(n, put, 128), target="cuda")
        to, source = (remote, mine) if put else (mine, remote)
        calls = partial(kernel, mine, there), partial(to.copy_, source), partial(*by_function(put, mine, there, peer))
        ours, engine, whole = (b.time(4, call if first else lambda: None, graph=False) for call in calls)
        row |= {f"{name} GB/s": 4 * n / ours / 1e3, f"engine {name} GB/s": 4 * n / engine / 1e3, f"{name} ratio": engine / ours,
                f"dist.{name} ratio": engine / whole}
    b.say(row)


def signals(b: Bench) -> None:
    """The time of a round trip of signals, and of a barrier, inside a kernel."""
    rounds = 1000
    flag = dist.create_tensor((2,), torch.int64)
    play = tilelang.compile(round_trips(rounds), target="cuda")
    calls = [0]

    def call() -> None:
        play(flag, calls[0] * rounds)
        calls[0] += 1

    us = b.time(1, call, graph=False) / rounds
    dist.barrier()
    assert int(flag[0]) == calls[0] * rounds
    b.say({"row": "signal round trip", "us": us})
    limits: dict[str, list[float]] = {"with": [], "without": []}
    loops = (("without", round_trips_without_limit(rounds)), ("with", round_trips(rounds, True)))
    kernels = [(name, tilelang.compile(p, target="cuda", pass_configs=UNCHECKED)) for name, p in loops]
    for _ in range(5):
        for name, kernel in kernels:
            def again(kernel=kernel) -> None:
                kernel(flag, calls[0] * rounds)
                calls[0] += 1
            limits[name].append(b.time(1, again, graph=False, repeats=5) / rounds)
    dist.barrier()
    assert int(flag[0]) == calls[0] * rounds
    b.say({"row": "limit of a wait", **{f"round trip {k} us": statistics.median(v) for k, v in limits.items()},
           "least": {k: round(min(v), 4) for k, v in limits.items()}, "most": {k: round(max(v), 4) for k, v in limits.items()}})
    pad = dist.create_tensor((1, 2 * dist.num_ranks()), torch.int64)
    wait = tilelang.compile(barriers(rounds, dist.num_ranks()), target="cuda")
    b.say({"row": "barrier in a kernel", "us": b.time(1, wait, pad, graph=False) / rounds})


def all_reduces(b: Bench) -> None:
    """All-reduce of bfloat16 beside NCCL and torch's symmetric-memory kernels."""
    symm = torch.ops.symm_mem
    import torch.distributed._symmetric_memory as symmetric

    name = b.group.group_name
    for nbytes in SIZES:
        n = nbytes // 2
        x = dist.create_tensor((n,), torch.bfloat16)
        theirs = symmetric.empty(n, dtype=torch.bfloat16, device=torch.device("cuda", torch.cuda.current_device()))
        symmetric.rendezvous(theirs, name)
        generator = torch.Generator(device="cuda").manual_seed(7)
        parts = [torch.randn(n, generator=generator, device="cuda").bfloat16() for _ in range(dist.num_ranks())]
        want = sum(p.double() for p in parts)
        x.copy_(parts[dist.rank()])
        dist.all_reduce(x)
        dist.barrier()
        worst = float((x.double() - want).abs().max() / want.abs().max())
        assert worst < 2 ** -8, worst
        x.zero_()
        theirs.zero_()
        plain = torch.zeros(n, dtype=torch.bfloat16, device="cuda")
        inner = {64 * KIB: 50, MIB: 50, 16 * MIB: 20, 256 * MIB: 4}[nbytes]
        row = {"row": "all_reduce", "KiB": nbytes // KIB, "error": worst, "ours us": b.time(inner, dist.all_reduce, x),
               "NCCL us": b.time(inner, torch_dist.all_reduce, plain),
               "one-shot us": b.time(inner, symm.one_shot_all_reduce, theirs, "sum", name),
               "two-shot us": b.time(inner, symm.two_shot_all_reduce_, theirs, "sum", name)}
        if nbytes <= MIB:
            two = collectives._kernel(collectives.all_reduce_two_shot, n, x.dtype, dist.num_ranks())
            row["our two-shot us"] = b.time(inner, two, x)
        row["ratio"] = row["ours us"] / min(row["NCCL us"], row["one-shot us"], row["two-shot us"])
        b.say(row)
        if not b.left():
            return


def gathers(b: Bench) -> None:
    """All-gather and reduce-scatter beside NCCL."""
    ranks = dist.num_ranks()
    for nbytes in (MIB, 64 * MIB):
        n = nbytes // 2
        x = torch.full((n,), dist.rank() + 1.0, dtype=torch.bfloat16, device="cuda")
        y, z = dist.create_tensor((ranks, n), torch.bfloat16), torch.empty(ranks, n, dtype=torch.bfloat16, device="cuda")
        dist.all_gather(x, y)
        dist.barrier()
        torch_dist.all_gather_into_tensor(z.view(-1), x)
        assert torch.equal(y, z)
        w, v = torch.empty_like(x), torch.empty_like(x)
        dist.reduce_scatter(y, w)
        dist.barrier()
        torch_dist.reduce_scatter_tensor(v, z.view(-1))
        assert torch.equal(w, v)
        inner = 20 if nbytes <= MIB else 5
        b.say({"row": "gather, scatter", "KiB": nbytes // KIB, "all_gather us": b.time(inner, dist.all_gather, x, y),
               "NCCL ag us": b.time(inner, torch_dist.all_gather_into_tensor, z.view(-1), x),
               "reduce_scatter us": b.time(inner, dist.reduce_scatter, y, w),
               "NCCL rs us": b.time(inner, torch_dist.reduce_scatter_tensor, v, z.view(-1))})


def gather_then_multiply(a, w, whole, out) -> None:
    torch_dist.all_gather_into_tensor(whole, a)
    torch.mm(whole, w, out=out)


def multiply_then_scatter(x, w, out, mine) -> None:
    torch.mm(x, w, out=out)
    torch_dist.reduce_scatter_tensor(mine, out)


def launched_once(fn, *args) -> None:
    """The same in one launch, whether it pays or not."""
    with mock.patch.object(overlap, "ONE_LAUNCH", 0):
        fn(*args)


def multiply_then_reduce(x, w, out) -> None:
    torch.mm(x, w, out=out)
    torch_dist.all_reduce(out)


def works(fn, *args):
    """The call of an operation of torch; None where this version has none."""
    try:
        fn(*args)
        torch.cuda.synchronize()
        return partial(fn, *args)
    except Exception as e:
        print(f"{type(e).__name__}: {e}"[:80], flush=True)
        return None


PRODUCTS = (8192, 14336, 8192), (8192, 8192, 14336), (2048, 8192, 8192)
HALF = {"dtype": torch.bfloat16, "device": "cuda"}


def gather_products(b: Bench) -> None:
    """All-gather and matrix product, beside both in turn, torch's fused one, and the product and the communication alone."""
    ranks, name = dist.num_ranks(), b.group.group_name
    for m, n, k in PRODUCTS:
        a, w = dist.create_tensor((m // ranks, k), torch.bfloat16), torch.randn(k, n, device="cuda").bfloat16().div_(k ** 0.5)
        a.normal_()
        out, whole, got = torch.empty(m, n, **HALF), torch.empty(m, k, **HALF), torch.empty(m, n, **HALF)
        gather_then_multiply(a, w, whole, out)
        dist.all_gather_matmul(a, w, got)
        dist.barrier()
        worst = float((got.float() - out.float()).abs().max())
        assert worst < 0.1, worst
        b.compare({"row": "gather, product", "shape": f"{m} x {n} x {k}", "error": worst}, {
            "ours": partial(dist.all_gather_matmul, a, w, got), "our product": partial(matmul, whole, w, out=out),
            "one launch": partial(launched_once, dist.all_gather_matmul, a, w, got),
            "in turn": partial(gather_then_multiply, a, w, whole, out),
            "fused": works(torch.ops.symm_mem.fused_all_gather_matmul, a, [w], 0, name),
            "gather": partial(torch_dist.all_gather_into_tensor, whole, a)})


def scatter_products(b: Bench) -> None:
    """Matrix product and reduce-scatter or all-reduce, beside the same."""
    ranks, name = dist.num_ranks(), b.group.group_name
    for m, n, k in PRODUCTS:
        x, w = torch.randn(m, k, device="cuda").bfloat16(), torch.randn(k, n, device="cuda").bfloat16().div_(k ** 0.5)
        out, mine, got = torch.empty(m, n, **HALF), torch.empty(m // ranks, n, **HALF), torch.empty(m // ranks, n, **HALF)
        multiply_then_scatter(x, w, out, mine)
        dist.matmul_reduce_scatter(x, w, got)
        dist.barrier()
        worst = float((got.float() - mine.float()).abs().max())
        assert worst < 0.2, worst
        b.compare({"row": "product, scatter", "shape": f"{m} x {n} x {k}", "error": worst}, {
            "ours": partial(dist.matmul_reduce_scatter, x, w, got), "our product": partial(matmul, x, w, out=out),
            "one launch": partial(launched_once, dist.matmul_reduce_scatter, x, w, got),
            "in turn": partial(multiply_then_scatter, x, w, out, mine),
            "fused": works(torch.ops.symm_mem.fused_matmul_reduce_scatter, x, w, "sum", 0, name),
            "scatter": partial(torch_dist.reduce_scatter_tensor, mine, out)})
        if m * n <= 1 << 25:
            every = dist.create_tensor((m, n), torch.bfloat16)
            dist.matmul_all_reduce(x, w, every)
            multiply_then_reduce(x, w, out)
            dist.barrier()
            worst = float((every.float() - out.float()).abs().max())
            assert worst < 0.2, worst
            b.compare({"row": "product, all-reduce", "shape": f"{m} x {n} x {k}", "error": worst}, {
                "ours": partial(dist.matmul_all_reduce, x, w, every), "our product": partial(matmul, x, w, out=out),
                "one launch": partial(launched_once, dist.matmul_all_reduce, x, w, every),
                "in turn": partial(multiply_then_reduce, x, w, out)})


def decodes(b: Bench) -> None:
    """A decode step of a Llama-8B-sized block on all ranks, beside one GPU."""
    import decode
    from tilelang.library import llama_decode

    ranks = dist.num_ranks()
    for batch in (1, 8):
        whole = [decode.make(1, batch, seed) for seed in range(2)]
        parts = [decode.share(args, ranks, dist.rank()) for args in whole]
        want = decode.exact(whole[0])
        y, _, _ = dist.llama_decode(*parts[0])
        dist.barrier()
        worst = float((y.double() - want).abs().max() / want.abs().max())
        assert worst < 2 ** -6, worst
        calls = [0]

        def turn(fn, sets, calls=calls):
            calls[0] += 1
            fn(*sets[calls[0] % 2])

        one, all_ = (b.time(10, turn, fn, sets) for fn, sets in ((llama_decode, whole), (dist.llama_decode, parts)))
        b.say({"row": "decode step", "batch": batch, "error": worst, "one GPU us": one, "all ranks us": all_,
               "ratio": all_ / one})


def exchanges(b: Bench) -> None:
    """All-to-all, equal and ragged, beside NCCL, which is told on the host how many rows come."""
    me, ranks = dist.rank(), dist.num_ranks()
    for nbytes in (MIB, 64 * MIB):
        n = nbytes // 2 // ranks
        x, y = torch.randn(ranks, n, device="cuda").bfloat16(), torch.empty(ranks, n, **HALF)
        out = dist.create_tensor((ranks, n), torch.bfloat16)
        torch_dist.all_to_all_single(y, x)
        dist.all_to_all(x, out)
        dist.barrier()
        assert torch.equal(out, y)
        b.compare({"row": "all-to-all", "KiB": nbytes // KIB}, {
            "ours": partial(dist.all_to_all, x, out), "NCCL": partial(torch_dist.all_to_all_single, y, x)}, inner=10)
    rows, width = 4096, 4096
    generator = torch.Generator().manual_seed(3)
    counts = torch.randint(rows // (2 * ranks), rows // ranks, (ranks, ranks), generator=generator)
    x, sent, came = torch.randn(rows, width, device="cuda").bfloat16(), counts[me].tolist(), counts[:, me].tolist()
    y, out = torch.empty(sum(came), width, **HALF), dist.create_tensor((rows * ranks, width), torch.bfloat16)
    on_device = counts[me].cuda()

    def nccl() -> None:
        torch_dist.all_to_all_single(y, x[:sum(sent)], came, sent)

    nccl()
    dist.all_to_all_rows(x, on_device, out)
    dist.barrier()
    assert torch.equal(out[:sum(came)], y)
    b.compare({"row": "ragged all-to-all", "rows": sum(sent), "width": width}, {
        "ours": partial(dist.all_to_all_rows, x, on_device, out), "NCCL": nccl}, inner=5)


def experts(b: Bench) -> None:
    """A layer of experts (128 experts of width 768, 8 of a token): its exchange beside NCCL's, its GEMMs alone, all of it."""
    from tilelang.library import grouped_matmul

    me, ranks = dist.rank(), dist.num_ranks()
    count, k, width, hidden = 128, 8, 2048, 768
    own = count // ranks
    for tokens in (128, 4096):
        generator = torch.Generator(device="cuda").manual_seed(me)
        x, room = torch.randn(tokens, width, device="cuda").bfloat16(), ranks * tokens * k
        chosen = torch.rand(tokens, count, device="cuda", generator=generator).topk(k).indices
        weights = torch.rand(tokens, k, device="cuda")
        gate_up = torch.randn(own, width, 2 * hidden, device="cuda").bfloat16().div_(width ** 0.5)
        down = torch.randn(own, hidden, width, device="cuda").bfloat16().div_(hidden ** 0.5)
        y = dist.moe(x, chosen, weights, gate_up, down, room)
        dist.barrier()
        rows, way = dist.dispatch(x, chosen, count, room)
        came = int(way.sizes.sum())
        order = torch.argsort(chosen.view(-1), stable=True)
        sent = torch.bincount(chosen.view(-1) // own, minlength=ranks).tolist()
        got = [None] * ranks
        torch_dist.all_gather_object(got, sent)
        parts, back = [g[me] for g in got], torch.empty(tokens * k, width, **HALF)
        held = torch.empty(sum(parts), width, **HALF)
        assert sum(parts) == came

        def nccl(x=x, order=order, held=held, parts=parts, sent=sent, back=back, weights=weights, tokens=tokens) -> None:
            torch_dist.all_to_all_single(held, x[order // k], parts, sent)
            torch_dist.all_to_all_single(back, held, sent, parts)
            pairs = torch.empty_like(back)
            pairs[order] = back
            torch.einsum("tkw,tk->tw", pairs.view(tokens, k, -1).float(), weights).to(x.dtype)

        def exchange(x=x, chosen=chosen, weights=weights, room=room) -> None:
            rows, way = dist.dispatch(x, chosen, count, room)
            dist.combine(rows, way, weights)

        def multiply(rows=rows, way=way, gate_up=gate_up, down=down) -> None:
            gate, up = grouped_matmul(rows, gate_up, way.sizes).chunk(2, -1)
            grouped_matmul(torch.nn.functional.silu(gate) * up, down, way.sizes)

        exchange()
        dist.barrier()
        assert torch.isfinite(y.float()).all()
        b.compare({"row": "experts", "tokens": tokens, "experts": count, "of a token": k}, {
            "layer": partial(dist.moe, x, chosen, weights, gate_up, down, room), "exchange": exchange,
            "NCCL's exchange": nccl, "GEMMs": multiply}, inner=3, repeats=5)


def attentions(b: Bench) -> None:
    """Attention over 8,192 rows of each rank, beside NCCL's gathering of keys and torch's attention, and the parts alone."""
    from tilelang.library import flash_attention

    ranks, (heads, kv, d, s) = dist.num_ranks(), (32, 8, 128, 8192)
    q = torch.randn(1, s, heads, d, device="cuda").bfloat16()
    k, v = (dist.create_tensor((1, s, kv, d), torch.bfloat16).normal_() for _ in range(2))
    every = torch.empty(2, ranks, s, kv, d, **HALF)

    def gathered() -> None:
        for to, x in zip(every, (k, v)):
            torch_dist.all_gather_into_tensor(to, x)

    def torchs() -> torch.Tensor:
        gathered()
        return torch.nn.functional.scaled_dot_product_attention(
            q.transpose(1, 2), *(x.view(1, ranks * s, kv, d).transpose(1, 2) for x in every), enable_gqa=True).transpose(1, 2)

    def alone() -> None:
        for _ in range(ranks):
            flash_attention(q, k, v)

    want = torchs()
    for fn in (dist.gathered_attention, dist.ulysses_attention):
        got = fn(q, k, v)
        dist.barrier()
        worst = float((got.float() - want.float()).abs().max() / want.float().abs().max())
        assert worst < 2 ** -5, (fn.__name__, worst)
    b.compare({"row": "attention", "rows of a rank": s, "error": worst}, {
        "gathered": partial(dist.gathered_attention, q, k, v), "ulysses": partial(dist.ulysses_attention, q, k, v),
        "torch in turn": torchs, "attention alone": alone, "gathering alone": gathered}, inner=2, repeats=5)
    b.compare({"row": "causal attention", "rows of a rank": s}, {
        "gathered": partial(dist.gathered_attention, q, k, v, causal=True),
        "ulysses": partial(dist.ulysses_attention, q, k, v, causal=True)}, inner=2, repeats=5)


def llama_blocks(b: Bench) -> None:
    """The forward pass of a Llama-8B-sized block of 8,192 rows over all ranks, beside torch with NCCL in turn."""
    ranks, (rows, hidden, dim) = dist.num_ranks(), (8192, 4096, 128)
    heads, kv, ffn = 32 // ranks, 8 // ranks, 14336 // ranks

    def weight(*shape):
        return torch.randn(*shape, device="cuda").bfloat16().div_(shape[0] ** 0.5)

    x, norms = torch.randn(rows // ranks, hidden, device="cuda").bfloat16(), torch.ones(2, hidden, **HALF)
    shapes = (hidden, (heads + 2 * kv) * dim), (heads * dim, hidden), (hidden, 2 * ffn), (ffn, hidden)
    qkv, o, gate_up, down = (weight(*s) for s in shapes)
    angle = torch.rand(rows, dim // 2, device="cuda") * 6
    cos, sin = angle.cos(), angle.sin()
    whole, mine = torch.empty(rows, hidden, **HALF), torch.empty(rows // ranks, hidden, **HALF)

    def rotated(y):
        u, w = y.float().chunk(2, -1)
        c, s = cos[:, None], sin[:, None]
        return torch.cat([u * c - w * s, w * c + u * s], -1).to(y.dtype)

    def torchs() -> torch.Tensor:
        torch_dist.all_gather_into_tensor(whole, torch.nn.functional.rms_norm(x, (hidden,), norms[0], 1e-5))
        q, k, v = (whole @ qkv).view(1, rows, -1, dim).split([heads, kv, kv], 2)
        a = torch.nn.functional.scaled_dot_product_attention(
            *(y.transpose(1, 2) for y in (rotated(q), rotated(k), v)), is_causal=True, enable_gqa=True)
        torch_dist.reduce_scatter_tensor(mine, a.transpose(1, 2).reshape(rows, -1) @ o)
        h = x + mine
        torch_dist.all_gather_into_tensor(whole, torch.nn.functional.rms_norm(h, (hidden,), norms[1], 1e-5))
        gate, up = (whole @ gate_up).chunk(2, -1)
        torch_dist.reduce_scatter_tensor(mine, (torch.nn.functional.silu(gate) * up) @ down)
        return h + mine

    ours = partial(dist.llama_block, x, norms, qkv, o, gate_up, down, cos, sin, batch=1, dim=dim, kv_heads=kv)
    want, got = torchs(), ours()
    dist.barrier()
    worst = float((got.float() - want.float()).abs().max() / want.float().abs().max())
    assert worst < 2 ** -5, worst
    b.compare({"row": "llama block", "rows": rows, "error": worst}, {"ours": ours, "torch in turn": torchs}, inner=2, repeats=5)


def endurance(b: Bench) -> None:
    """A million rounds of signals in one kernel, and a hundred thousand collective calls: none hangs, no memory grows."""
    rounds, flag = 1_000_000, dist.create_tensor((2,), torch.int64)
    play = tilelang.compile(round_trips(rounds), target="cuda")
    dist.barrier()
    start = time.time()
    play(flag, 0)
    dist.barrier()
    assert int(flag[0]) == rounds
    row = {"row": "endurance", "signal rounds": rounds, "s": time.time() - start}
    x = dist.create_tensor((32 * KIB,), torch.bfloat16)
    y = dist.create_tensor((dist.num_ranks(), 32 * KIB), torch.bfloat16)
    for call in (lambda: dist.all_reduce(x), lambda: dist.all_gather(x, y), lambda: dist.reduce_scatter(y, x)):
        call()
    dist.barrier()
    used, start = torch.cuda.mem_get_info()[0], time.time()
    for n in range(100_000):
        (dist.all_reduce(x) if n % 4 else dist.all_gather(x, y) if n % 8 else dist.reduce_scatter(y, x))
    dist.barrier()
    x.fill_(dist.rank() + 1)
    dist.barrier()
    dist.all_reduce(x)
    dist.barrier()
    assert (x == sum(range(1, dist.num_ranks() + 1))).all()
    b.say(row | {"collective calls": 100_000, "calls s": time.time() - start,
                 "bytes grown": used - torch.cuda.mem_get_info()[0]})


def run(rank: int, ranks: int, port: int, args: argparse.Namespace) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1",
                      MASTER_PORT=str(port))
    dist.init_dist(heap_bytes=3 << 30, timeout=25.0)
    b = Bench(args.out, args.seconds)
    parts = {f.__name__: f for f in (
        all_reduces, signals, copies, one_way, gather_products, decodes, gathers, endurance, scatter_products, exchanges,
        experts, attentions, llama_blocks)}
    for part in (parts[name] for name in args.parts.split(",") if name) if args.parts else parts.values():
        if b.left():
            try:
                part(b)
            except Exception:  # the other measurements may still succeed
                print(f"rank {rank}: {part.__name__} failed\n{traceback.format_exc()}", flush=True)
    dist.destroy_dist()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--out", default="")
    parser.add_argument("--parts", default="", help="all_reduces,signals,copies,exchanges,experts,attentions,decodes, ...")
    parser.add_argument("--seconds", type=float, default=90)
    args = parser.parse_args()
    if torch.cuda.device_count() < args.ranks:
        sys.exit(f"{args.ranks} GPUs are needed, this machine has {torch.cuda.device_count()}")
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    torch.multiprocessing.spawn(run, (args.ranks, port, args), nprocs=args.ranks)


if __name__ == "__main__":
    main()
