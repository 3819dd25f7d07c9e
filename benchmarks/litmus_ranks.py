"""Memory orders between two GPUs: message passing, store buffering, IRIW; and what the others say when a rank is killed.

    python benchmarks/litmus_ranks.py [--rounds 20000] [--kill]

Prints how often each outcome was seen; one that PTX forbids is an error.  --kill: rank 1 is killed while a kernel of rank 0
waits for it; prints what rank 0 says, and when.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
import time
from typing import Any

import tilelang
import tilelang.language as T


def message_passing(n: int, store: str, load: str) -> Any:
    """Rank 0 stores data and a flag on rank 1, which reads the flag and then the data: R[i] = flag + 2 * data."""

    @T.prim_func
    def main(D: T.SymmTensor((n,), "int32"), F: T.SymmTensor((n,), "int32"), R: T.Tensor((n, 2), "int32")):
        with T.Kernel(1, threads=32):
            if T.get_thread_binding() == 0:
                for i in T.serial(n):
                    if T.get_rank() == 0:
                        T.st(D[i], 1, scope="sys", sem="relaxed", dst_pe=1)
                        T.st(F[i], 1, scope="sys", sem=store, dst_pe=1)
                    else:
                        T.ld(F[i], R[i, 0], scope="sys", sem=load)
                        T.ld(D[i], R[i, 1], scope="sys", sem="relaxed")

    return main


def store_buffering(n: int, fence: bool) -> Any:
    """Each rank stores its flag and loads the other's: R[i, 0]."""

    @T.prim_func
    def main(D: T.SymmTensor((n,), "int32"), F: T.SymmTensor((n,), "int32"), R: T.Tensor((n, 2), "int32")):
        with T.Kernel(1, threads=32):
            if T.get_thread_binding() == 0:
                for i in T.serial(n):
                    T.st(F[i], 1, scope="sys", sem="relaxed")
                    if fence:
                        T.fence_sys()
                    T.ld(F[i], R[i, 0], scope="sys", sem="relaxed", src_pe=1 - T.get_rank())
                    T.st(D[i], 1, scope="sys", sem="relaxed", dst_pe=1 - T.get_rank())
                    T.wait_eq(D[i], 1)  # the ranks stay together

    return main


def independent_reads(n: int, fence: bool) -> Any:
    """A block of each rank stores its flag; another loads its own rank's flag, then the other's: R[i]."""

    @T.prim_func
    def main(D: T.SymmTensor((n,), "int32"), F: T.SymmTensor((n,), "int32"), R: T.Tensor((n, 2), "int32")):
        with T.Kernel(2, threads=32) as b:
            if T.get_thread_binding() == 0:
                for i in T.serial(n):
                    if b == 0:
                        T.st(F[i], 1, scope="sys", sem="relaxed")
                        T.st(D[i], 1, scope="sys", sem="relaxed", dst_pe=1 - T.get_rank())
                        T.wait_eq(D[i], 1)
                    else:
                        T.ld(F[i], R[i, 0], scope="sys", sem="relaxed")
                        if fence:
                            T.fence_sys()
                        T.ld(F[i], R[i, 1], scope="sys", sem="relaxed", src_pe=1 - T.get_rank())

    return main


def waiting() -> Any:
    """A wait that nothing ends."""

    @T.prim_func
    def main(F: T.SymmTensor((1,), "int64")):
        with T.Kernel(1, threads=32):
            T.wait_ge(F[0], 1)

    return main


# name, program, the outcome (of rank 0's R, rank 1's R), whether PTX forbids it
CASES = (
    ("message passing, release and acquire", lambda n: message_passing(n, "release", "acquire"),
     lambda a, b: (b[:, 0] == 1) & (b[:, 1] == 0), True),
    ("message passing, relaxed", lambda n: message_passing(n, "relaxed", "relaxed"),
     lambda a, b: (b[:, 0] == 1) & (b[:, 1] == 0), False),
    ("store buffering, fences", lambda n: store_buffering(n, True), lambda a, b: (a[:, 0] == 0) & (b[:, 0] == 0), True),
    ("store buffering, none", lambda n: store_buffering(n, False), lambda a, b: (a[:, 0] == 0) & (b[:, 0] == 0), False),
    ("IRIW, fences", lambda n: independent_reads(n, True),
     lambda a, b: (a[:, 0] == 1) & (a[:, 1] == 0) & (b[:, 0] == 1) & (b[:, 1] == 0), True),
    ("IRIW, none", lambda n: independent_reads(n, False),
     lambda a, b: (a[:, 0] == 1) & (a[:, 1] == 0) & (b[:, 0] == 1) & (b[:, 1] == 0), False),
)


def litmus(rounds: int) -> None:
    import torch
    import torch.distributed as torch_dist

    import tilelang.distributed as dist

    n = 2000
    data, flag = (dist.create_tensor((n,), torch.int32, name) for name in ("data", "flag"))
    mine = torch.zeros(n, 2, dtype=torch.int32, device="cuda")
    for name, make, outcome, forbidden in CASES:
        kernel, seen, both = tilelang.compile(make(n), target="cuda"), 0, [torch.empty_like(mine) for _ in range(2)]
        for _ in range(max(1, rounds // n)):
            data.zero_()
            flag.zero_()
            mine.zero_()
            dist.barrier()
            kernel(data, flag, mine)
            dist.barrier()
            torch_dist.all_gather(both, mine)
            seen += int(outcome(*both).sum())
        if dist.rank() == 0:
            print(f"{name}: {seen} of {max(1, rounds // n) * n}" + (", forbidden" if forbidden else ""), flush=True)
        assert not (forbidden and seen), name


def kill() -> None:
    import torch

    import tilelang.distributed as dist

    flag = dist.create_tensor((1,), torch.int64, "the flag")
    kernel = tilelang.compile(waiting(), target="cuda")
    dist.barrier()
    if dist.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.time()
    kernel(flag)
    try:
        dist.synchronize()
    except RuntimeError as e:
        print(f"after {time.time() - began:.1f} s: {e}", flush=True)
    os._exit(0)


def run(rank: int, ranks: int, port: int, args: argparse.Namespace) -> None:
    import tilelang.distributed as dist

    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1",
                      MASTER_PORT=str(port))
    dist.init_dist(heap_bytes=1 << 24, timeout=20.0)
    if args.kill:
        kill()
    litmus(args.rounds)
    dist.destroy_dist()


def main() -> None:
    import torch

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20000)
    parser.add_argument("--kill", action="store_true")
    args = parser.parse_args()
    if torch.cuda.device_count() < 2:
        sys.exit(f"2 GPUs are needed, this machine has {torch.cuda.device_count()}")
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    context = torch.multiprocessing.spawn(run, (2, port, args), nprocs=2, join=False)
    for p in context.processes:
        p.join()


if __name__ == "__main__":
    main()
