"""fp32 GEMM on the CPU target against NumPy's BLAS, measured in turn on the same cores.

    python benchmarks/cpu_gemm.py [size] [tile_m tile_n tile_k] [--tb]

The program is the plain tiled GEMM: copies into shared memory, T.gemm, copy out.
"""

from __future__ import annotations

import argparse
import ctypes
import time

import numpy as np

from tilelang import ops
from tilelang.codegen.cpu import compile_tile
from tilelang.ir import FALSE, Alloc, Buffer, For, Func, Launch, Region, Seq, Var, const, convert, dtype
from tilelang.runtime.cpu_engine import cpu_engine, thread_count
from tilelang.transform.cpu import CPU_PASSES
from tilelang.transform.framework.pass_ import PassContext, run_passes


def plain_gemm(m: int, n: int, k: int, bm: int, bn: int, bk: int, tb: bool = False, dt: str = "float32",
               out: str = "float32", acc: str = "float32") -> Func:
    """C = A @ B (or A @ B.T) as a tile program."""
    shapes = {"A": (m, k), "B": (n, k) if tb else (k, n), "C": (m, n)}
    types = {"A": dt, "B": dt, "C": out}
    params = {x: Var(f"{x}_handle", dtype("handle")) for x in shapes}
    g = {x: Buffer(x, s, dtype(types[x])) for x, s in shapes.items()}
    a = Buffer("As", (bm, bk), dtype(dt), "shared.dyn")
    b = Buffer("Bs", (bn, bk) if tb else (bk, bn), dtype(dt), "shared.dyn")
    c = Buffer("Cf", (bm, bn), dtype(acc), "local.fragment")
    bx, by, ko = (Var(x, dtype("int32")) for x in ("bx", "by", "ko"))

    def tile(buf: Buffer, *at: object) -> Region:
        return Region(buf, tuple(convert(x) for x in at), tuple(a.shape if buf is g["A"] else b.shape if buf is g["B"]
                                                                else c.shape if buf is g["C"] else buf.shape))

    body = Seq((
        Alloc(a), Alloc(b), Alloc(c), ops.Fill(tile(c, 0, 0), const(0.0)),
        For(ko, const(0), const(-(-k // bk)), "pipelined", Seq((
            ops.Copy(tile(g["A"], by * bm, ko * bk), tile(a, 0, 0)),
            ops.Copy(tile(g["B"], bx * bn, ko * bk) if tb else tile(g["B"], ko * bk, bx * bn), tile(b, 0, 0)),
            ops.Gemm(tile(a, 0, 0), tile(b, 0, 0), tile(c, 0, 0), False, tb, ops.GemmWarpPolicy.Square, FALSE)))),
        ops.Copy(tile(c, 0, 0), tile(g["C"], by * bm, bx * bn))))
    launch = Launch((const(-(-n // bn)), const(-(-m // bm))), (bx, by), (128, 1, 1),
                    tuple(Var(x, dtype("int32")) for x in ("tx", "ty", "tz")), body)
    return Func("gemm", tuple(params.values()), tuple((params[x], g[x]) for x in shapes), launch)


def main() -> None:
    """Run the benchmark."""
    p = argparse.ArgumentParser()
    p.add_argument("size", type=int, nargs="?", default=1024)
    p.add_argument("tile", type=int, nargs="*", default=[128, 128, 32])
    p.add_argument("--tb", action="store_true")
    p.add_argument("--rounds", type=int, default=15)
    o = p.parse_args()
    m = n = k = o.size
    start = time.perf_counter()
    program = compile_tile(run_passes(plain_gemm(m, n, k, *o.tile, tb=o.tb), CPU_PASSES, PassContext()))
    traced = time.perf_counter()
    engine = cpu_engine()
    ready = time.perf_counter()
    code = engine.emit_object(program.llvm_ir)
    done = time.perf_counter()
    loaded = engine.load(code, program.entry)
    entry = ctypes.CFUNCTYPE(ctypes.c_char_p, *[ctypes.c_void_p] * 3)(loaded.address)
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((m, k), np.float32), rng.standard_normal((n, k) if o.tb else (k, n), np.float32)
    c, want = np.zeros((m, n), np.float32), np.zeros((m, n), np.float32)
    args = [x.ctypes.data for x in (a, b, c)]
    entry(*args)
    np.matmul(a, b.T if o.tb else b, out=want)
    error = np.abs(c - want).max() / np.abs(want).max()
    ours, theirs = [], []
    for _ in range(o.rounds):
        t0 = time.perf_counter()
        entry(*args)
        t1 = time.perf_counter()
        np.matmul(a, b.T if o.tb else b, out=want)
        ours.append(t1 - t0)
        theirs.append(time.perf_counter() - t1)
    flops = 2 * m * n * k
    best, median = min(theirs) / min(ours), np.median(theirs) / np.median(ours)
    print(f"{m}x{n}x{k} tiles {o.tile} threads {thread_count()} cpu {engine.cpu}: "
          f"{flops / min(ours) / 1e9:.1f} GFLOP/s, numpy {flops / min(theirs) / 1e9:.1f}, "
          f"ratio best {best:.2f} median {median:.2f}, error {error:.1e}")
    print(f"IR {1e3 * (traced - start):.1f} ms, engine {1e3 * (ready - traced):.1f} ms, "
          f"LLVM {1e3 * (done - ready):.1f} ms, object {len(code)} bytes")


if __name__ == "__main__":
    main()
