"""A GEMM block as a lowered program: cp.async ring, swizzled shared tiles, ldmatrix, mma.m16n8k16."""

from __future__ import annotations

from kernel_text import alloc, program

from tilelang.ir import Func

SYNC = 'T.evaluate(T.call("sync_threads", "void"))'


def device_gemm(m: int, n: int, k: int, *, bm: int = 128, bn: int = 128, bk: int = 32, stages: int = 2,
                swizzle: bool = True, barrier: str = SYNC, slot: str = "t", pending: int | None = None,
                clear: bool = True, extent: int = 0) -> Func:
    """C[m, n] (float32) = A[m, k] @ B[k, n] (float16) with 4 warps in 2 x 2; m, n, k divide evenly.

    The last four arguments plant faults: the barrier text, the stage read, the groups a wait leaves, the accumulator's
    initialisation, and surplus iterations of the store loop.
    """
    wm, wn = bm // 32, bn // 16  # m16 and n8 tiles of a warp
    sa, sb, steps = bm * bk, bk * bn, k // bk
    pending = stages - 1 if pending is None else pending
    a_chunk = f"(c ^ ((r // {max(1, 64 // bk)}) % {bk // 8}))" if swizzle else "c"
    b_chunk = "(c ^ (r % 8))" if swizzle else "c"

    def a_at(stage: str, row: str, chunk: str) -> str:
        return f"{stage} * {sa} + ({row}) * {bk} + {a_chunk.replace('r', f'({row})').replace('c', f'({chunk})')} * 8"

    def b_at(stage: str, row: str, chunk: str) -> str:
        return f"{stage} * {sb} + ({row}) * {bn} + {b_chunk.replace('r', f'({row})').replace('c', f'({chunk})')} * 8"

    def copies(stage: str, t: str, pad: str) -> str:
        lines = [f"for i in T.unroll({sa // 1024}):",
                 f"    ra: T.int32 = (i * 128 + tx) // {bk // 8}",
                 f"    ca: T.int32 = (i * 128 + tx) % {bk // 8}",
                 "    T.evaluate(T.call(\"cp_async\", \"void\", T.address_of(SA["
                 + a_at(stage, "ra", "ca") + f"]), T.address_of(A[by * {bm} + ra, ({t}) * {bk} + ca * 8]), "
                 'bytes=16))',
                 f"for i in T.unroll({sb // 1024}):",
                 f"    rb: T.int32 = (i * 128 + tx) // {bn // 8}",
                 f"    cb: T.int32 = (i * 128 + tx) % {bn // 8}",
                 "    T.evaluate(T.call(\"cp_async\", \"void\", T.address_of(SB["
                 + b_at(stage, "rb", "cb") + f"]), T.address_of(B[({t}) * {bk} + rb, bx * {bn} + cb * 8]), "
                 'bytes=16))']
        return "\n".join(pad + s for s in lines)

    row_a = f"wy * {bm // 2} + im * 16 + lane % 16"
    row_b = "ik * 16 + lane % 16"
    chunk_b = f"(wx * {bn // 2} + jn * 16) // 8 + lane // 16"
    commit = 'T.evaluate(T.call("cp_async_commit", "void"))'
    prologue = "\n".join(copies(str(s), str(s), "") + "\n" + commit if s < steps else commit for s in range(stages - 1))
    text = f"""
{alloc("SA", (stages * sa,), "float16", "shared.dyn")}
{alloc("SB", (stages * sb,), "float16", "shared.dyn")}
{alloc("acc", (wm * wn * 4,), "float32", "local")}
{alloc("ar", (wm * 8,), "float16", "local")}
{alloc("br", (wn * 4,), "float16", "local")}
lane: T.int32 = tx % 32
wx: T.int32 = tx // 32 % 2
wy: T.int32 = tx // 64
for i in T.unroll({wm * wn * 4 if clear else wm * wn * 4 - 1}):
    acc[i] = 0.0
{prologue}
for t in T.serial({steps}):
    if t + {stages - 1} < {steps}:
{copies(f"((t + {stages - 1}) % {stages})", f"t + {stages - 1}", "        ")}
    {commit}
    T.evaluate(T.call("cp_async_wait", "void", n={pending}))
    {SYNC}
    s: T.int32 = ({slot}) % {stages}
    for ik in T.unroll({bk // 16}):
        for im in T.unroll({wm}):
            T.evaluate(T.call("ldmatrix", "void", T.address_of(ar[im * 8]),
                T.address_of(SA[{a_at("s", row_a, "ik * 2 + lane // 16")}]), num=4))
        for jn in T.unroll({wn // 2}):
            T.evaluate(T.call("ldmatrix", "void", T.address_of(br[jn * 8]),
                T.address_of(SB[{b_at("s", row_b, chunk_b)}]), num=4, trans=True))
        for im in T.unroll({wm}):
            for jn in T.unroll({wn}):
                T.evaluate(T.call("mma", "void", T.address_of(acc[(im * {wn} + jn) * 4]), T.address_of(ar[im * 8]),
                    T.address_of(br[jn * 4]), row="mma.m16n8k16.f16.f16.f32"))
    {barrier}
for im in T.unroll({wm}):
    for jn in T.unroll({wn + extent}):
        for h in T.unroll(2):
            C[by * {bm} + wy * {bm // 2} + im * 16 + h * 8 + lane // 4,
              T.Ramp(bx * {bn} + wx * {bn // 2} + jn * 8 + lane % 4 * 2, 1, 2)] = \
                acc[T.Ramp((im * {wn} + jn) * 4 + h * 2, 1, 2)]
"""
    tensors = {"A": ((m, k), "float16"), "B": ((k, n), "float16"), "C": ((m, n), "float32")}
    return program(tensors, text.replace("(ra)", "ra"), grid=f"{n // bn}, {m // bm}", threads=128)
