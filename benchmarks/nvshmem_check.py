"""Checks the names of NVSHMEM on GPUs: every kind of call between all PEs, and its puts beside ours.

    python benchmarks/nvshmem_check.py [--ranks 2] [--shared]

--ranks: processes, one for each GPU.  --shared: all on one GPU, which NVSHMEM allows; then nothing is timed.
"""

from __future__ import annotations

import argparse
import os
import socket

import torch
import torch.distributed as torch_dist

import tilelang
import tilelang.distributed as dist
import tilelang.language as T

N = 256


@T.prim_func
def calls(X: T.Tensor((N,), "int32"), S: T.SymmTensor((8, N), "int32"), F: T.SymmTensor((4,), "int64"),
          Y: T.Tensor((4, N), "int32")):
    """S: 0 an asynchronous put, 1 a put of one thread and int_p, 2 own rows, 3 a broadcast, 4 and 5 puts with signals.  Y: what
    a get brings, and rows 3 to 5 as they are when their signals have come."""
    with T.Kernel(1, threads=64):
        tx, right = T.get_thread_binding(), (T.get_pe() + 1) % T.get_pe_num()
        T.putmem_nbi_block(S[0, 0], X[0], 4 * N, right)
        if tx == 0:
            T.putmem(S[1, 0], X[0], 64, right)
            T.int_p(S[1, 16], 77, right)
        T.quiet()
        T.sync_threads()
        if tx == 0:
            T.quiet()
            T.signal_op(F[0], 5, "set", right)
        T.signal_wait_until(F[0], "eq", 5)
        for i in T.Parallel(N):
            S[2, i] = X[i] + 1
        T.barrier_all_block()
        T.getmem_block(Y[0, 0], S[2, 0], 4 * N, right)
        T.broadcast_block(S[3, 0], S[2, 0], 4 * N, T.get_pe_num() - 1)
        T.putmem_signal_block(S[4, 0], X[0], 4 * N, F[1], 1, "add", right)
        if tx < 32:
            T.putmem_signal_nbi_warp(S[5, 0], X[0], 4 * N, F[1], 2, "add", right)
        T.quiet()
        T.signal_wait_until(F[1], "ge", 3)
        T.copy(S[3:6, :], Y[1:4, :])
        T.sync_all_block()


def gathers(pes: int):
    @T.prim_func
    def gather(X: T.Tensor((N,), "int32"), S: T.SymmTensor((1 + pes, N), "int32"), Y: T.Tensor((pes, N), "int32")):
        with T.Kernel(1, threads=64):
            T.copy(X, S[0, :])
            T.fcollect_block(S[1, 0], S[0, 0], 4 * N)
            T.copy(S[1:1 + pes, :], Y)

    return gather


def mover(n: int, blocks: int, ours: bool):
    each = n // blocks

    @T.prim_func
    def move(X: T.Tensor((n,), "int32"), S: T.SymmTensor((n,), "int32")):
        with T.Kernel(blocks, threads=512) as b:
            right = (T.get_pe() + 1) % T.get_pe_num()
            if ours:
                T.put_block(X[b * each], S[b * each], each, dst_pe=right)
            else:
                T.putmem_block(S[b * each], X[b * each], 4 * each, right)

    return move


def times(rank: int, before: int) -> None:
    for n in (1 << 18, 1 << 22):
        x, s = torch.arange(n, device="cuda", dtype=torch.int32) + rank, dist.create_tensor((n,), torch.int32)
        for ours in (False, True):
            kernel = tilelang.compile(mover(n, 128, ours), target="cuda")
            s.zero_()
            dist.barrier()
            kernel(x, s)
            dist.barrier()
            assert torch.equal(s, torch.arange(n, device="cuda", dtype=torch.int32) + before)
            _, ms = dist.perf_fn(lambda k=kernel, x=x, s=s: k(x, s))
            dist.barrier()
            if rank == 0:
                name = "T.put_block" if ours else "T.putmem_block"
                print(f"{name}, {n >> 18} MiB: {ms * 1e3:.1f} us, {4e-6 * n / ms:.1f} GB/s", flush=True)


def run(rank: int, port: int, ranks: int, shared: bool) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK="0" if shared else str(rank), WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1",
                      MASTER_PORT=str(port))
    if shared:
        torch.cuda.set_device(0)
        torch_dist.init_process_group("gloo")
    dist.init_dist(heap_bytes=1 << 28, timeout=20.0, nvshmem=True)
    before, after, i = (rank - 1) % ranks, (rank + 1) % ranks, torch.arange(N, device="cuda", dtype=torch.int32)
    x, s, f = i + 1000 * rank, dist.create_tensor((8, N), torch.int32), dist.create_tensor((4,), torch.int64)
    y, z = (torch.zeros(rows, N, dtype=torch.int32, device="cuda") for rows in (4, ranks))
    tilelang.compile(calls, target="cuda")(x, s, f, y)
    tilelang.compile(gathers(ranks), target="cuda")(x, dist.create_tensor((1 + ranks, N), torch.int32), z)
    dist.barrier()
    came = i + 1000 * before
    assert torch.equal(s[0], came) and torch.equal(s[1, :16], came[:16]) and int(s[1, 16]) == 77, "putmem"
    assert torch.equal(y[0], i + 1000 * after + 1), "getmem"
    assert torch.equal(y[1], i + 1000 * (ranks - 1) + 1), "broadcast"
    assert torch.equal(y[2], came) and torch.equal(y[3], came), "putmem_signal"
    assert torch.equal(z, i + 1000 * torch.arange(ranks, device="cuda", dtype=torch.int32)[:, None]), "fcollect"
    total = dist.create_tensor((1 << 20,), torch.bfloat16).fill_(rank + 1)
    dist.barrier()
    dist.all_reduce(total)
    dist.barrier()
    assert bool((total == sum(range(1, ranks + 1))).all()), "all_reduce on the heap of NVSHMEM"
    print(f"rank {rank}: all calls are right", flush=True)
    if not shared:
        times(rank, before)
        dist.destroy_dist()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--shared", action="store_true")
    args = parser.parse_args()
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    torch.multiprocessing.spawn(run, (port, args.ranks, args.shared), nprocs=args.ranks)


if __name__ == "__main__":
    main()
