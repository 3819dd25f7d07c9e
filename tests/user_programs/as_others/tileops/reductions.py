"""Reductions and scans along rows."""

import numpy as np

import tilelang
import tilelang.language as T

from ..catalogue import EXACT, Bound, Program, drawn, uniform, wide, zeros
from .common import LOG2E


@tilelang.jit(out_idx=[1, 2], compile_flags=["-O3"])
def var_std(N, correction=1, rows=1, threads=256):
    M = T.dynamic("M")

    @T.prim_func
    def main(x: T.Tensor((M, N), "float32"), var: T.Tensor((M,), "float32"), std: T.Tensor((M,), "float32")):
        with T.Kernel(T.ceildiv(M, rows), threads=threads) as pid:
            p = T.alloc_fragment((rows, N), "float32")
            sq = T.alloc_fragment((rows, N), "float32")
            mean = T.alloc_fragment((rows,), "float32")
            acc = T.alloc_fragment((rows,), "float32")
            T.copy(x[pid * rows, 0], p)
            T.reduce_sum(p, mean, dim=1)
            for i in T.serial(rows):
                mean[i] = mean[i] / T.float32(N)
            for i in T.serial(rows):
                for j in T.Parallel(N):
                    sq[i, j] = (p[i, j] - mean[i]) * (p[i, j] - mean[i])
            T.reduce_sum(sq, acc, dim=1)
            for i in T.Parallel(rows):
                acc[i] = acc[i] / T.float32(N - correction)
            T.copy(acc, var[pid * rows])
            for i in T.Parallel(rows):
                std[pid * rows + i] = T.sqrt(acc[i])

    return main


def reduce_kinds(N):
    """All kinds of reductions in one launch, of a row in shared memory and in registers."""
    M = T.dynamic("M")

    @T.prim_func
    def main(x: T.Tensor((M, N), "float16"), out: T.Tensor((M, 5), "float32")):
        with T.Kernel(M, threads=64) as pid:
            x_s = T.alloc_shared((1, N), "float16")
            x_f = T.alloc_fragment((1, N), "float32")
            r = T.alloc_fragment((1, 1), "float32")
            T.copy(x[pid, 0], x_s)
            T.copy(x_s, x_f)
            T.reduce(x_f, r, "sum", 1, True)
            out[pid, 0] = r[0, 0]
            T.reduce(x_f, r, "max", 1, True)
            out[pid, 1] = r[0, 0]
            T.reduce(x_f, r, "min", 1, True)
            out[pid, 2] = r[0, 0]
            T.reduce_absmax(x_f, r, dim=-1)
            out[pid, 3] = r[0, 0]
            T.reduce_abssum(x_f, r, dim=-1)
            out[pid, 4] = r[0, 0]

    return main


def reduce_kinds_reference(x, out):
    (x,) = wide(x)
    return np.stack([x.sum(1), x.max(1), x.min(1), np.abs(x).max(1), np.abs(x).sum(1)], 1)


@tilelang.jit(out_idx=[-1], compile_flags="-O3")
def log_softmax(N, block_n=128, dt="float32"):
    """Online: a running maximum and sum over column blocks, then a second pass."""
    M = T.dynamic("M")

    @T.prim_func
    def main(x: T.Tensor[(M, N), dt], y: T.Tensor[(M, N), dt]):
        with T.Kernel(M, threads=128) as pid:
            x_l = T.alloc_fragment((1, block_n), dt)
            e = T.alloc_fragment((1, block_n), dt)
            mx = T.alloc_fragment((1,), dt)
            s = T.alloc_fragment((1,), dt)
            lse = T.alloc_fragment((1,), dt)
            T.fill(lse, -T.infinity(dt))
            for k in T.Pipelined(T.ceildiv(N, block_n), num_stages=2):
                for i, j in T.Parallel(1, block_n):
                    x_l[i, j] = T.if_then_else(k * block_n + j < N, x[pid, k * block_n + j], -T.infinity(dt))
                T.reduce_max(x_l, mx, dim=1, clear=True)
                for i, j in T.Parallel(1, block_n):
                    e[i, j] = T.exp2((x_l[i, j] - mx[i]) * LOG2E)
                T.reduce_sum(e, s, dim=1, clear=True)
                for i in T.Parallel(1):
                    lse[i] = mx[i] * LOG2E + T.log2(T.exp2(lse[i] - mx[i] * LOG2E) + s[i])
            for k in T.serial(T.ceildiv(N, block_n)):
                for i, j in T.Parallel(1, block_n):
                    if k * block_n + j < N:
                        y[pid + i, k * block_n + j] = x[pid + i, k * block_n + j] - lse[i] / LOG2E

    return main


def log_softmax_reference(x):
    (x,) = wide(x)
    return x - np.log(np.exp(x).sum(1, keepdims=True))


@tilelang.jit(out_idx=[-1])
def argmax(N, threads=128):
    M = T.dynamic("M")

    @T.prim_func
    def main(x: T.Tensor((M, N), "float16"), out: T.Tensor((M,), "int64")):
        with T.Kernel(M, threads=threads) as pid:
            tx = T.get_thread_binding()
            best = T.alloc_var("float32", init=-T.infinity("float32"))
            at = T.alloc_var("int32", init=0)
            vals = T.alloc_shared((threads,), "float32")
            ats = T.alloc_shared((threads,), "int32")
            for k in T.serial(T.ceildiv(N, threads)):
                j = k * threads + tx
                if j < N and T.cast(x[pid, j], "float32") > best:
                    best = x[pid, j]
                    at = j
            vals[tx] = best
            ats[tx] = at
            for s in T.unroll(7):
                half = threads >> (s + 1)
                T.sync_threads()
                if tx < half:
                    if vals[tx + half] > vals[tx] or (vals[tx + half] == vals[tx] and ats[tx + half] < ats[tx]):
                        vals[tx] = vals[tx + half]
                        ats[tx] = ats[tx + half]
            T.sync_threads()
            if tx == 0:
                out[pid] = T.cast(ats[0], "int64")

    return main


@tilelang.jit(out_idx=[1, 2])
def cumulative(N, block=64):
    """Inclusive sums and running maxima of long rows, block by block with a carry."""
    M = T.dynamic("M")

    @T.prim_func
    def main(x: T.Tensor((M, N), "float32"), total: T.Tensor((M, N), "float32"), largest: T.Tensor((M, N), "float32")):
        with T.Kernel(M, threads=64) as pid:
            s = T.alloc_shared((block,), "float32")
            mx = T.alloc_shared((block,), "float32")
            carry = T.alloc_fragment((1,), "float32")
            high = T.alloc_fragment((1,), "float32")
            T.clear(carry)
            T.fill(high, -T.infinity("float32"))
            for k in T.serial(T.ceildiv(N, block)):
                T.copy(x[pid, k * block], s)
                T.copy(x[pid, k * block], mx)
                T.cumsum(s, dim=0)
                T.cummax(mx, dim=0)
                for j in T.Parallel(block):
                    if k * block + j < N:
                        total[pid, k * block + j] = s[j] + carry[0]
                        largest[pid, k * block + j] = T.max(mx[j], high[0])
                carry[0] += s[block - 1]
                high[0] = T.max(high[0], mx[block - 1])

    return main


PROGRAMS = [
    Program(
        "var_std",
        var_std,
        dict(N=1024),
        drawn(uniform((3, 1024))),
        lambda x: (wide(x)[0].var(1, ddof=1), wide(x)[0].std(1, ddof=1)),
        Bound("float32", 1024, 2.0),
    ),
    Program(
        "reduce_kinds",
        reduce_kinds,
        dict(N=160),
        drawn(uniform((4, 160), "float16"), zeros((4, 5))),
        reduce_kinds_reference,
        Bound("float32", 160, 160.0),
        changed=(1,),
    ),
    Program(
        "log_softmax",
        log_softmax,
        dict(N=300),
        drawn(uniform((4, 300), low=-4, high=4)),
        log_softmax_reference,
        Bound("float32", 300, 16.0),
    ),
    Program(
        "argmax", argmax, dict(N=300), drawn(uniform((4, 300), "float16")), lambda x: x.astype(np.float32).argmax(1), EXACT
    ),
    Program(
        "cumulative",
        cumulative,
        dict(N=150),
        drawn(uniform((3, 150))),
        lambda x: (np.cumsum(wide(x)[0], 1), np.maximum.accumulate(wide(x)[0], 1)),
        (Bound("float32", 150, 75.0), EXACT),
    ),
]
