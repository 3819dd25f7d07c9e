"""A picture of copies between two devices under GEMMs, from times that the blocks of one kernel write down.

    python benchmarks/rank_timeline.py OUT.json OUT.svg      two GPUs: measure and draw
    python benchmarks/rank_timeline.py --draw IN.json OUT.svg

Some blocks put rows to the other device, the others multiply tiles; each writes the global timer before and after a step.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from typing import Any

import tilelang
import tilelang.language as T

MOVERS, WORKERS, STEPS, TILE, DEPTH, ROW = 4, 8, 6, 128, 2048, 1 << 18


def overlapped() -> Any:
    """stamps[block, step] = (begin, end) in nanoseconds.  Blocks below MOVERS put rows of X, the others multiply A and B."""
    blocks = MOVERS + WORKERS

    @T.prim_func
    def main(X: T.Tensor((MOVERS * STEPS, ROW), "int32"), S: T.SymmTensor((MOVERS * STEPS, ROW), "int32"),
             A: T.Tensor((TILE, DEPTH), "float16"), B: T.Tensor((DEPTH, TILE), "float16"),
             C: T.Tensor((WORKERS, TILE, TILE), "float16"), stamps: T.Tensor((blocks, STEPS, 2), "int64"),
             pad: T.SymmTensor((blocks, 4), "int64")):
        with T.Kernel(blocks, threads=128) as b:
            a, w = T.alloc_shared((TILE, 64), "float16"), T.alloc_shared((64, TILE), "float16")
            acc, tx = T.alloc_fragment((TILE, TILE), "float32"), T.get_thread_binding()
            T.barrier_all(pad[b, 0:4])
            for step in T.serial(STEPS):
                T.sync_threads()
                if tx == 0:
                    stamps[b, step, 0] = T.cast(T.globaltimer(), "int64")
                if b < MOVERS:
                    T.put_block(X[b * STEPS + step, 0], S[b * STEPS + step, 0], ROW, dst_pe=1 - T.get_rank())
                else:
                    T.clear(acc)
                    for k in T.serial(DEPTH // 64):
                        T.copy(A[0:TILE, k * 64:k * 64 + 64], a)
                        T.copy(B[k * 64:k * 64 + 64, 0:TILE], w)
                        T.gemm(a, w, acc)
                    T.copy(acc, C[b - MOVERS, :, :])
                T.fence_sys()
                T.sync_threads()
                if tx == 0:
                    stamps[b, step, 1] = T.cast(T.globaltimer(), "int64")

    return main


def picture(ranks: list[list[list[list[int]]]]) -> str:
    """An SVG of the steps: a row for each block of each rank, puts in one colour and GEMMs in another.

    Times count from the first step of the rank: the devices have clocks of their own, and start together at a barrier.
    """
    starts = [min(s[0] for block in rank for s in block) for rank in ranks]
    ranks = [[[[t - start for t in s] for s in block] for block in rank] for rank, start in zip(ranks, starts)]
    first, last = 0, max(s[1] for rank in ranks for block in rank for s in block)
    height, left, wide = 14, 110, 800
    scale, rows = wide / max(1, last - first), sum(len(rank) + 1 for rank in ranks)
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + wide + 10}" height="{rows * height + 50}" '
           'font-family="sans-serif" font-size="11">', '<rect width="100%" height="100%" fill="white"/>']
    y = 6
    for r, rank in enumerate(ranks):
        for b, block in enumerate(rank):
            what, colour = ("put", "#d9822b") if b < MOVERS else ("GEMM", "#2b6cb0")
            out.append(f'<text x="4" y="{y + 10}">rank {r} {what} {b}</text>')
            out += [f'<rect x="{left + (s[0] - first) * scale:.1f}" y="{y}" width="{max(1, (s[1] - s[0]) * scale - 1):.1f}" '
                    f'height="{height - 3}" fill="{colour}"/>' for s in block]
            y += height
        y += height
    ticks = [f'<text x="{left + wide * k / 4:.0f}" y="{y + 12}" text-anchor="middle">{(last - first) * k / 4000:.0f} us</text>'
             for k in range(5)]
    return "\n".join([*out, *ticks, "</svg>"]) + "\n"


def run(rank: int, port: int, path: str) -> None:
    import torch

    import tilelang.distributed as dist

    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_dist(heap_bytes=1 << 26)
    x = torch.arange(MOVERS * STEPS * ROW, dtype=torch.int32, device="cuda").view(-1, ROW)
    s = dist.create_tensor(tuple(x.shape), torch.int32)
    a, w = (torch.randn(*shape, device="cuda").half() for shape in ((TILE, DEPTH), (DEPTH, TILE)))
    c = torch.empty(WORKERS, TILE, TILE, dtype=torch.float16, device="cuda")
    stamps = torch.zeros(MOVERS + WORKERS, STEPS, 2, dtype=torch.int64, device="cuda")
    kernel, pad = tilelang.compile(overlapped(), target="cuda"), dist.create_tensor((MOVERS + WORKERS, 4), torch.int64)
    for _ in range(3):
        dist.barrier()
        kernel(x, s, a, w, c, stamps, pad)
        dist.barrier()
    assert torch.equal(s, x)
    every = dist.create_tensor((2, *stamps.shape), torch.int64)
    dist.all_gather(stamps, every)
    dist.barrier()
    if rank == 0:
        with open(path, "w", encoding="utf-8") as f:
            json.dump(every.tolist(), f)
    dist.destroy_dist()


def main() -> None:
    source, target = sys.argv[-2:]
    if sys.argv[1] != "--draw":
        import torch

        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        torch.multiprocessing.spawn(run, (port, source), nprocs=2)
    with open(source, encoding="utf-8") as f, open(target, "w", encoding="utf-8") as out:
        out.write(picture(json.load(f)))


if __name__ == "__main__":
    main()
