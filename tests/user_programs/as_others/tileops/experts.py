"""Mixture of experts."""

import itertools

import numpy as np

import tilelang
import tilelang.language as T

from ..catalogue import EXACT, Bound, Program, drawn, integers, uniform, wide, zeros
from .common import FLAGS, LOG2E


@tilelang.jit(compile_flags=FLAGS)
def moe_align(experts, block, threads=64):
    """Sorted token positions of each expert, padded to whole blocks, and each block's expert."""
    n, most = T.dynamic("n, most")

    @T.prim_func
    def main(
        choice: T.Tensor((n,), "int32"),
        order: T.Tensor((most,), "int32"),
        owner: T.Tensor((most // block,), "int32"),
        total: T.Tensor((1,), "int32"),
    ):
        with T.Kernel(1, threads=threads) as _:
            tx = T.get_thread_binding()
            count = T.alloc_shared((experts,), "int32")
            start = T.alloc_shared((experts + 1,), "int32")
            T.clear(count)
            for k in T.serial(T.ceildiv(n, threads)):
                i = k * threads + tx
                if i < n:
                    T.atomic_add(count[choice[i]], 1)
            T.sync_threads()
            if tx == 0:
                start[0] = 0
                for e in T.serial(experts):
                    start[e + 1] = start[e] + T.ceildiv(count[e], block) * block
                total[0] = start[experts]
            T.sync_threads()
            for k in T.serial(T.ceildiv(most, threads)):
                i = k * threads + tx
                if i < most:
                    order[i] = n
            T.sync_threads()
            if tx < experts:
                for b in T.serial(start[tx] // block, start[tx + 1] // block):
                    owner[b] = tx
                at = T.alloc_var("int32", init=start[tx])
                for i in T.serial(n):
                    if choice[i] == tx:
                        order[at] = i
                        at += 1

    return main


def moe_align_reference(choice, order, owner, total, experts=6, block=16):
    order, owner, at = np.full(order.shape, len(choice)), owner.copy(), 0
    for e in range(experts):
        mine = np.flatnonzero(choice == e)
        order[at : at + len(mine)] = mine
        blocks = -(-len(mine) // block)
        owner[at // block : at // block + blocks] = e
        at += blocks * block
    return order, owner, np.array([at])


@tilelang.jit(compile_flags=["-O3"])
def grouped_gemm(N, K, experts, block_m=32, block_n=64, block_k=32, dt="bfloat16"):
    """C[rows of e] = A[rows of e] @ B[e].T, with the group found from the offsets by each block."""
    rows = T.dynamic("rows")
    tiles = T.ceildiv(rows, block_m) + experts

    @T.prim_func
    def main(
        A: T.Tensor[(rows, K), dt],
        B: T.Tensor[(experts, N, K), dt],
        ends: T.Tensor((experts,), "int32"),
        C: T.Tensor[(rows, N), dt],
    ):
        with T.Kernel(T.ceildiv(N, block_n), tiles, threads=128) as (bx, by):
            A_s = T.alloc_shared((block_m, block_k), dt)
            B_s = T.alloc_shared((block_n, block_k), dt)
            acc = T.alloc_fragment((block_m, block_n), "float32")
            tile = T.alloc_var("int32", init=by)
            group = T.alloc_var("int32", init=-1)
            first = T.alloc_var("int32", init=0)
            last = T.alloc_var("int32", init=0)
            start = T.alloc_var("int32", init=0)
            for e in T.serial(experts):
                t = T.ceildiv(ends[e] - start, block_m)
                if group < 0:
                    if tile < t:
                        group = e
                        first = start + tile * block_m
                        last = ends[e]
                    else:
                        tile -= t
                start = ends[e]
            if group >= 0:
                T.clear(acc)
                for k in T.Pipelined(T.ceildiv(K, block_k), num_stages=2):
                    T.copy(A[first : first + block_m, k * block_k : (k + 1) * block_k], A_s)
                    T.copy(B[group, bx * block_n : (bx + 1) * block_n, k * block_k : (k + 1) * block_k], B_s)
                    T.gemm(A_s, B_s, acc, transpose_B=True)
                for i, j in T.Parallel(block_m, block_n):
                    if first + i < last and bx * block_n + j < N:
                        C[first + i, bx * block_n + j] = acc[i, j]

    return main


def grouped_gemm_reference(a, b, ends, c):
    a, b, c = wide(a, b, c)
    for e, (start, end) in enumerate(itertools.pairwise([0, *ends])):
        c[start:end] = a[start:end] @ b[e].T
    return c


@tilelang.jit(out_idx=[-1])
def moe_gate_up(hidden, inter, block_m=64, block_n=64, block_k=64, dt="float16"):
    """silu(x @ gate.T) * (x @ up.T): two accumulators, operands in layouts that the author asks for."""
    M = T.dynamic("M")

    @T.prim_func
    def main(
        x: T.Tensor[(M, hidden), dt],
        gate: T.Tensor[(inter, hidden), dt],
        up: T.Tensor[(inter, hidden), dt],
        y: T.Tensor[(M, inter), dt],
    ):
        with T.Kernel(T.ceildiv(M, block_m), T.ceildiv(inter, block_n), threads=128) as (bx, by):
            x_s = T.alloc_shared((block_m, block_k), dt)
            g_s = T.alloc_shared((block_n, block_k), dt)
            u_s = T.alloc_shared((block_n, block_k), dt)
            g = T.alloc_fragment((block_m, block_n), "float32")
            u = T.alloc_fragment((block_m, block_n), "float32")
            T.annotate_layout({b: tilelang.layout.make_swizzled_layout(b) for b in (x_s, g_s, u_s)})
            T.use_swizzle(4)
            T.clear(g)
            T.clear(u)
            for k in T.Pipelined(T.ceildiv(hidden, block_k), num_stages=2):
                T.copy(x[bx * block_m, k * block_k], x_s)
                T.copy(gate[by * block_n, k * block_k], g_s)
                T.gemm(x_s, g_s, g, transpose_B=True)
                T.copy(up[by * block_n, k * block_k], u_s)
                T.gemm(x_s, u_s, u, transpose_B=True)
            for i, j in T.Parallel(block_m, block_n):
                g[i, j] = g[i, j] * (1.0 / (1.0 + T.exp2(-g[i, j] * LOG2E))) * u[i, j]
            T.copy(g, y[bx * block_m, by * block_n])

    return main


def moe_gate_up_reference(x, gate, up):
    x, gate, up = wide(x, gate, up)
    g = x @ gate.T
    return g / (1 + np.exp(-g)) * (x @ up.T)


PROGRAMS = [
    Program(
        "moe_align",
        moe_align,
        dict(experts=6, block=16),
        drawn(integers((100,), 0, 6), zeros((208,), "int32"), zeros((13,), "int32"), zeros((1,), "int32")),
        moe_align_reference,
        EXACT,
        changed=(1, 2, 3),
    ),
    Program(
        "grouped_gemm",
        grouped_gemm,
        dict(N=72, K=64, experts=4),
        drawn(
            uniform((90, 64), "bfloat16"),
            uniform((4, 72, 64), "bfloat16"),
            np.array([20, 20, 75, 90], np.int32),
            zeros((90, 72), "bfloat16"),
        ),
        grouped_gemm_reference,
        Bound("bfloat16", 64, 64.0),
        changed=(3,),
    ),
    Program(
        "moe_gate_up",
        moe_gate_up,
        dict(hidden=128, inter=72),
        drawn(uniform((70, 128), "float16"), uniform((72, 128), "float16"), uniform((72, 128), "float16")),
        moe_gate_up_reference,
        Bound("float16", 256, 512.0),
    ),
]
