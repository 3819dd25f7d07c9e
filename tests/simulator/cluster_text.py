"""Programs with clusters as IR text: a GEMM whose blocks share B by multicast, and blocks that pass data around."""

from __future__ import annotations

from hopper_text import ELECT, SYNC, addr, call, do, groups, indent, init, maps
from kernel_text import alloc, program

from tilelang.ir import Func

MEET = do("cluster_sync")
RANK = 'T.cast(T.call("cluster_rank", "uint32"), "int32")'


def cluster(x: int, y: int = 1, z: int = 1) -> str:
    return f"cluster=({x}, {y}, {z})"


def gemm(m: int = 256, n: int = 64, k: int = 256, *, size: int = 2, start: str = MEET, end: str = MEET,
         empties: str = "own", mask: str | None = None, bytes_off: int = 0, expect: bool = True,
         init_fence: str = do("fence_mbarrier_init")) -> Func:
    """C[m, n] = A[m, k] @ B[n, k].T in float16, 128 x 64 x 64 tiles; `size` blocks along m share the tile of B.

    Each block loads 64 / size rows of B and sends them to all; consumers tell every block when a slot is free.
    empties: "all" is right, "own" tells the own block only (counts follow).  The others plant faults.
    """
    bn, bk, s = 64, 64, 2
    steps, part = k // bk, bn // size
    desc = dict(dtype="uint64", lbo=16, sbo=1024, swizzle=128)
    a_desc = call("wgmma_descriptor", addr(f"SA[(k % {s}) * {128 * bk} + wg * {64 * bk}]"), "j * 32", **desc)
    b_desc = call("wgmma_descriptor", addr(f"SB[(k % {s}) * {bn * bk}]"), "j * 32", **desc)
    free = [do("mbarrier_arrive_remote", addr(f"empty[k % {s}]"), f"T.uint32({r})") for r in range(size)] \
        if empties == "all" else [do("mbarrier_arrive", addr(f"empty[k % {s}]"))]
    full = addr(f"full[k % {s}]")
    mask = mask or f"T.uint16({(1 << size) - 1})"
    row = f"wgmma.m64n{bn}k16.f32.f16.f16"
    body = f"""
{alloc("SA", (s * 128 * bk,), "float16", "shared.dyn")}
{alloc("SB", (s * bn * bk,), "float16", "shared.dyn")}
{alloc("acc", (bn // 2,), "float32", "local")}
{init({"full": [1] * s, "empty": [2 * (size if empties == "all" else 1)] * s}, init_fence, start or SYNC)}
rank: T.int32 = {RANK}
if {groups(2)}:
    if tx == 256:
        for k in T.serial({steps}):
            {do("mbarrier_wait", addr(f"empty[k % {s}]"), f"(k // {s} + 1) % 2")}
            {do("mbarrier_arrive_expect_tx", full, (128 + bn) * bk * 2 + bytes_off) if expect else
             do("mbarrier_arrive", full)}
            {do("tma_load", addr(f"SA[(k % {s}) * {128 * bk}]"), full, f"k * {bk}", "by * 128", map="Am")}
            {do("tma_load", addr(f"SB[(k % {s}) * {bn * bk} + rank * {part * bk}]"), full, f"k * {bk}",
                f"bx * {bn} + rank * {part}", mask, map="Bm", multicast=True)}
else:
    wg: T.int32 = tx // 128
    for k in T.serial({steps}):
        {do("mbarrier_wait", full, f"k // {s} % 2")}
        {do("wgmma_fence")}
        for j in T.unroll({bk // 16}):
            {do("wgmma", addr("acc[0]"), a_desc, b_desc, "(k > 0) or (j > 0)", row=row, a_major="k", b_major="k")}
        {do("wgmma_commit")}
        {do("wgmma_wait", n=0)}
        if tx % 128 == 0:
{indent(chr(10).join(free), 12)}
    {do("wgmma_pin", addr("acc[0]"), count=bn // 2)}
    lane: T.int32 = tx % 32
    for i in T.unroll({bn // 8}):
        for h in T.unroll(2):
            C[by * 128 + wg * 64 + tx // 32 % 4 * 16 + lane // 4 + h * 8, T.Ramp(bx * {bn} + i * 8 + lane % 4 * 2, 1, 2)] = \\
                T.cast(acc[T.Ramp(i * 4 + h * 2, 1, 2)], "float16x2")
{end or "pass"}
"""
    return program({"A": ((m, k), "float16"), "B": ((n, k), "float16"), "C": ((m, n), "float16")}, body,
                   grid=f"{n // bn}, {m // 128}", threads=384,
                   launch_plan=cluster(1, size) + ", " + maps(("Am", "A", (bk, 128), 128), ("Bm", "B", (bk, part), 128)))


def shift(size: int = 4, *, write: bool = False, first: str = MEET, last: str = MEET, to: str | None = None,
          grid: int = 8, arrive: str = "") -> Func:
    """B[block] = A[next block of the cluster], 32 numbers a block, through shared memory of the neighbour.

    write: the neighbour stores them there, else it reads them.
    """
    peer = to or f"(rank + 1) % {size}"
    back = to or f"(rank + {size - 1}) % {size}"
    if write:
        move = f"""{do("cluster_store", addr("S[tx]"), f'T.cast({back}, "uint32")', "A[bx * 32 + tx]")}
{last or "pass"}
B[bx * 32 + tx] = S[tx]"""
    else:
        load = call("cluster_load", addr("S[tx]"), f'T.cast({peer}, "uint32")', dtype="float32")
        move = f"""B[bx * 32 + tx] = {load}
{last or "pass"}"""
    body = f"""
{alloc("S", (32,), "float32", "shared.dyn")}
rank: T.int32 = {RANK}
{"pass" if write else "S[tx] = A[bx * 32 + tx]"}
{arrive or "pass"}
{first or "pass"}
{move}
"""
    return program({"A": ((32 * grid,), "float32"), "B": ((32 * grid,), "float32")}, body, grid=str(grid), threads=32,
                   launch_plan=cluster(size))


def send(*, fence: str = do("fence_proxy_async"), parity: str = "0", last: str = MEET, nbytes: int = 512,
         late_write: str = "", wait: bool = True) -> Func:
    """B[block] = A[other block] + 1 in clusters of two: 128 numbers go by a bulk copy to the other block."""
    body = f"""
{alloc("S", (128,), "float32", "shared.dyn")}
{alloc("R", (128,), "float32", "shared.dyn")}
{init({"bar": [1]}, sync=MEET)}
S[tx] = A[bx * 128 + tx] + T.float32(1.0)
{fence or "pass"}
{SYNC}
if tx < 32:
    if {ELECT}:
        {do("mbarrier_arrive_expect_tx", addr("bar[0]"), nbytes)}
        {do("bulk_copy_cluster", addr("R[0]"), addr("S[0]"), "512", addr("bar[0]"), f'T.cast(1 - {RANK}, "uint32")')}
{late_write or "pass"}
{do("mbarrier_wait", addr("bar[0]"), parity) if wait else "pass"}
B[bx * 128 + tx] = {"R[tx]" if wait else "S[tx]"}
{last or "pass"}
"""
    return program({"A": ((512,), "float32"), "B": ((512,), "float32")}, body, grid="4", threads=128,
                   launch_plan=cluster(2))
