"""Small kernels in phase DEVICE, written by hand: what the printer is tested on."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from tilelang.ir import (AddressOf, Alloc, Buffer, Evaluate, For, Func, Launch, Ramp, Seq, Store, Var, call, const, dtype,
                         fresh, load, seq, LaunchPlan, FuncFacts)
from tilelang.transform.framework.pass_ import PassContext
from tilelang.transform.registers.pack_conversions import pack_conversions


@dataclass(frozen=True)
class Kernel:
    name: str
    params: tuple[Any, ...]
    launch: Launch


def tensor(name: str, shape: tuple, dt: str = "float32") -> Buffer:
    return Buffer(name, shape, dtype(dt))


def shared(name: str, size: int, dt: str) -> Buffer:
    return Buffer(name, (size,), dtype(dt), "shared.dyn")


def local(name: str, size: int, dt: str) -> Buffer:
    return Buffer(name, (size,), dtype(dt), "local")


def thread_vars() -> tuple[Var, Var, Var]:
    return fresh("tx"), fresh("ty"), fresh("tz")


def kernel(params, body, *, threads=128, grid=(1,), block_vars=None, tvars=None, name="main_kernel", **plan) -> Kernel:
    block_vars = block_vars or tuple(fresh(n) for n in ("bx", "by", "bz")[:len(grid)])
    launch = Launch(tuple(const(g) if isinstance(g, int) else g for g in grid), block_vars, (threads, 1, 1),
                    tvars or thread_vars(), body if not isinstance(body, (list, tuple)) else seq(*body),
                    LaunchPlan(**plan))
    return Kernel(name, tuple(params), launch)


def behind(pass_, k: Kernel) -> Kernel:
    """The kernel behind a pass."""
    func = Func(k.name, (), (), k.launch, facts=FuncFacts(phase="DEVICE"))
    return replace(k, launch=pass_(func, PassContext()).body)


def packed(k: Kernel) -> Kernel:
    """The kernel behind the pass that packs conversions."""
    return behind(pack_conversions, k)


def ramp(base, lanes: int) -> Ramp:
    base = base if not isinstance(base, int) else const(base)
    return Ramp(base, const(1, base.dtype), lanes, base.dtype.with_lanes(lanes))


def evaluate(op: str, *args, **attrs) -> Evaluate:
    return Evaluate(call(op, args, "void", **attrs))


def at(b: Buffer, index) -> AddressOf:
    return AddressOf(b, (index if not isinstance(index, int) else const(index),))


def unrolled(n: int, body, name: str = "i") -> For:
    v = fresh(name)
    return For(v, const(0), const(n), "unroll", body(v))


def serial(n, body, name: str = "i") -> For:
    v = fresh(name)
    return For(v, const(0), const(n) if isinstance(n, int) else n, "serial", body(v))


def gemm(M=4096, N=4096, K=4096, BM=128, BN=128, BK=32, stages=3, threads=128, dt="float16") -> Kernel:
    """C = A @ B, row-major, dividing shapes: cp.async ring, ldmatrix from XOR-swizzled rows, mma.m16n8k16."""
    A, B, C = tensor("A", (M, K), dt), tensor("B", (K, N), dt), tensor("C", (M, N), dt)
    tx, ty, tz = thread_vars()
    bx, by = fresh("bx"), fresh("by")
    As, Bs = shared("A_shared", stages * BM * BK, dt), shared("B_shared", stages * BK * BN, dt)
    acc, a, b = local("C_local", 128, "float32"), local("A_frag", 32, dt), local("B_frag", 32, dt)
    lane, warp = tx % 32, tx // 32
    wm, wn = warp % 2, warp // 2
    ptx = "bf16" if dt == "bfloat16" else "f16"

    def a_offset(slot, r, c):  # 64-byte rows: chunk ^ (row / 2) % 4
        return slot * (BM * BK) + r * BK + ((c // 8) ^ ((r // 2) % 4)) * 8

    def b_offset(slot, r, c):  # 256-byte rows, chunk ^ row % 8
        return slot * (BK * BN) + r * BN + ((c // 8) ^ (r % 8)) * 8

    def copies(k, slot):
        def a_piece(i):
            r, c = tx // 4 + i * 32, tx % 4 * 8
            return evaluate("cp_async", at(As, a_offset(slot, r, c)), AddressOf(A, (by * BM + r, k * BK + c)), bytes=16)

        def b_piece(i):
            r, c = tx // 16 + i * 8, tx % 16 * 8
            return evaluate("cp_async", at(Bs, b_offset(slot, r, c)), AddressOf(B, (k * BK + r, bx * BN + c)), bytes=16)

        return seq(unrolled(BM * BK // 8 // threads, a_piece), unrolled(BK * BN // 8 // threads, b_piece),
                   evaluate("cp_async_commit"))

    def compute(slot):
        def step(ks):
            def load_a(i):
                r, c = wm * 64 + i * 16 + lane % 16, ks * 16 + lane // 16 * 8
                return evaluate("ldmatrix", at(a, i * 8), at(As, a_offset(slot, r, c)), num=4, trans=False)

            def load_b(j):
                r, c = ks * 16 + lane % 16, wn * 64 + j * 16 + lane // 16 * 8
                return evaluate("ldmatrix", at(b, j * 8), at(Bs, b_offset(slot, r, c)), num=4, trans=True)

            def product(i):
                row = f"mma.m16n8k16.{ptx}.{ptx}.f32"
                return unrolled(8, lambda j: evaluate("mma", at(acc, i * 32 + j * 4), at(a, i * 8), at(b, j * 4),
                                                      row=row), "j")

            return seq(unrolled(4, load_a), unrolled(4, load_b, "j"), unrolled(4, product))

        return unrolled(BK // 16, step, "ks")

    steps = K // BK

    def main(t):
        from tilelang.ir import If

        ahead = t + (stages - 1)
        return seq(evaluate("cp_async_wait", n=stages - 2), evaluate("sync_threads"),
                   If(ahead < steps, copies(ahead, ahead % stages), evaluate("cp_async_commit")),
                   compute(t % stages))

    def write(i):
        def piece(j):
            r, c = by * BM + wm * 64 + i * 16 + lane // 4, bx * BN + wn * 64 + j * 8 + lane % 4 * 2
            half = dtype(dt).with_lanes(2)

            def row(h):
                v = load(acc, (ramp(i * 32 + j * 4 + h * 2, 2),))
                return Store(C, (r + h * 8, ramp(c, 2)), v.astype(half))

            return seq(row(0), row(1))

        return unrolled(8, piece, "j")

    body = seq(Alloc(As), Alloc(Bs), Alloc(acc), Alloc(a), Alloc(b),
               unrolled(128, lambda i: Store(acc, (i,), const(0.0))),
               *(copies(const(s), const(s)) for s in range(stages - 1)),
               serial(steps, main, "t"), unrolled(4, write))
    a_bytes, b_bytes = stages * BM * BK * 2, stages * BK * BN * 2
    return kernel((A, B, C), body, threads=threads, grid=(N // BN, M // BM), block_vars=(bx, by), tvars=(tx, ty, tz),
                  shared_bytes=a_bytes + b_bytes, shared_offsets=((As, 0), (Bs, a_bytes)))


__all__ = ["Kernel", "Seq", "at", "evaluate", "gemm", "kernel", "local", "ramp", "serial", "shared", "tensor",
           "thread_vars", "unrolled"]
