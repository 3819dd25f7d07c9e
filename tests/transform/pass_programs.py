"""Small tile programs as IR."""

from tilelang import ops
from tilelang.ir import (FALSE, Alloc, Bind, Buffer, For, Func, Launch, Parallel, Region, Store, Var, cast, const, convert,
                         dtype, fresh, load, seq, LoopPlan)

F16, F32 = dtype("float16"), dtype("float32")


def region(b, mins=None, extents=None):
    return Region(b, tuple(convert(m) for m in (mins or [0] * len(b.shape))), tuple(extents or b.shape))


def program(name, tensors, grid, threads, body):
    handles = [Var(b.name + "_handle", dtype("handle")) for b in tensors]
    block = tuple(fresh(x) for x in ("bx", "by", "bz")[: len(grid)])
    thread = tuple(fresh(x) for x in ("tx", "ty", "tz"))
    return Func(name, tuple(handles), tuple(zip(handles, tensors)),
                Launch(tuple(convert(g) for g in grid), block, (threads, 1, 1), thread, body(block, thread)))


def gemm(M=128, N=128, K=96, BM=64, BN=64, BK=32, stages=3, threads=128, middle=(), n=None, kind="pipelined", **plan):
    a, b, c = Buffer("A", (M, K), F16), Buffer("B", (K, N), F16), Buffer("C", (M, N), F32)
    a_s, b_s = Buffer("A_s", (BM, BK), F16, "shared.dyn"), Buffer("B_s", (BK, BN), F16, "shared.dyn")
    acc, k = Buffer("acc", (BM, BN), F32, "local.fragment"), fresh("k")
    names = dict(A=a, B=b, C=c, A_s=a_s, B_s=b_s, acc=acc, k=k)

    def body(block, thread):
        bx, by = block
        return seq(
            Alloc(a_s), Alloc(b_s), Alloc(acc), ops.Fill(region(acc), const(0.0)),
            For(k, const(0), convert(-(-K // BK) if n is None else n), kind, seq(
                ops.Copy(region(a, (by * BM, k * BK), (BM, BK)), region(a_s)),
                ops.Copy(region(b, (k * BK, bx * BN), (BK, BN)), region(b_s)), *[m(names) for m in middle],
                ops.Gemm(region(a_s), region(b_s), region(acc), False, False, ops.GemmWarpPolicy.Square, FALSE)),
                plan=LoopPlan(num_stages=stages, **plan)),
            ops.Copy(region(acc), region(c, (by * BM, bx * BN), (BM, BN))))

    tensors = (a, b, c)
    f = program("gemm", tensors, (N // BN, M // BM), threads, lambda *x: body(*x))
    return f, names


__all__ = ["F16", "F32", "Bind", "Parallel", "Store", "cast", "gemm", "load", "program", "region"]
