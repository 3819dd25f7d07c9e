"""Hopper programs as IR text: copies through TMA, a ring of mbarriers, a warp-specialised wgmma GEMM."""

from __future__ import annotations

import textwrap

from kernel_text import alloc, program

from tilelang.ir import Func


def call(op: str, *args: str, dtype: str = "void", **options: object) -> str:
    """A call as an expression."""
    parts = [f'"{op}"', f'"{dtype}"', *map(str, args), *(f"{k}={v!r}" for k, v in options.items())]
    return f"T.call({', '.join(parts)})"


def do(op: str, *args: str, **attrs: object) -> str:
    """A call as a statement."""
    return f"T.evaluate({call(op, *args, **attrs)})"


def addr(element: str) -> str:
    return f"T.address_of({element})"


def groups(first: int, count: int = 1) -> str:
    return call("in_warp_groups", dtype="bool", first=first, count=count)


ELECT = call("elect_one", dtype="bool")
SYNC = do("sync_threads")


def indent(text: str, by: int) -> str:
    return textwrap.indent(textwrap.dedent(text).strip("\n"), " " * by)


def maps(*entries: tuple) -> str:
    """Launch attributes with tensor maps (name, buffer, box, swizzle[, fill])."""
    out = []
    for name, buffer, box, swizzle, *fill in entries:
        box_text = ", ".join(f"T.py({b})" for b in box)
        out.append(f'("{name}", {buffer}, ({box_text},), T.py({swizzle}), "{fill[0] if fill else "zero"}", T.py(0))')
    return f'tensor_maps=({", ".join(out)},)'


def init(bars: dict[str, list[int]], fence: str = do("fence_mbarrier_init"), sync: str = SYNC) -> str:
    """Allocation and initialisation of mbarriers: name -> counts."""
    lines = [alloc(name, (len(counts),), "uint64", "shared.barrier") for name, counts in bars.items()]
    lines += ["if tx == 0:"]
    lines += ["    " + do("mbarrier_init", addr(f"{name}[{i}]"), n) for name, counts in bars.items()
              for i, n in enumerate(counts)]
    return "\n".join([*lines, "    " + fence, sync])


def tma_copy(shape: tuple[int, int] = (40, 48), box: tuple[int, int] = (32, 16), swizzle: int = 64,
             dtype: str = "float16", expect: int | None = None, parity: str = "0",
             fence: str = do("fence_proxy_async"), end: str | None = None,
             fill: str = "zero", init_fence: str = do("fence_mbarrier_init"), wait: bool = True, op: str = "tma_store",
             ) -> Func:
    """B = A + 1, both of `shape` (rows, columns): a block a box (columns, rows), 128 threads, by TMA both ways."""
    size = {"float16": 2, "float32": 4}[dtype]
    n, w = box[0] * box[1], box[0]
    end = do("bulk_wait", n=0, read=False) if end is None else end
    chunk = 16 // size

    def at(i: str) -> str:  # element i of the box where the swizzle puts it
        if not swizzle:
            return i
        row, col = f"(({i}) // {w})", f"(({i}) % {w})"
        y = f"({row} * {swizzle // size} + {col})"
        return f"({y} ^ ((({y} // {128 // size}) % {swizzle // 16}) * {chunk}))"

    storage = n if not swizzle else box[1] * swizzle // size
    text = f"""
{alloc("S", (storage,), dtype, "shared.dyn")}
{init({"bar": [1]}, init_fence)}
if tx < 32:
    if {ELECT}:
        {do("mbarrier_arrive_expect_tx", addr("bar[0]"), n * size if expect is None else expect)}
        {do("tma_load", addr("S[0]"), addr("bar[0]"), f"bx * {w}", f"by * {box[1]}", map="Am")}
{do("mbarrier_wait", addr("bar[0]"), parity) if wait else "pass"}
for i in T.serial({n // 128}):
    S[{at("i * 128 + tx")}] = S[{at("i * 128 + tx")}] + T.{dtype}(1.0)
{fence or "pass"}
{SYNC}
if tx == 0:
    {do(op, addr("S[0]"), f"bx * {w}", f"by * {box[1]}", map="Bm")}
    {do("bulk_commit")}
    {end or "pass"}
"""
    grid = f"{-(-shape[1] // w)}, {-(-shape[0] // box[1])}"
    return program({"A": (shape, dtype), "B": (shape, dtype)}, text, grid=grid, threads=128,
                   launch_plan=maps(("Am", "A", box, swizzle, fill), ("Bm", "B", box, swizzle)))


def gemm(m: int = 128, n: int = 128, k: int = 256, *, bn: int = 64, stages: int = 2, bytes_off: int = 0,
         full_parity: str = "k // {s} % 2", empty_parity: str = "(k // {s} + 1) % 2", room: bool = True,
         pending: int = 0, release: bool = True, fence: str = do("wgmma_fence"), last_wait: bool = True,
         producer_steps: int | None = None, registers: tuple[int, int] = (40, 232), b_major: str = "k",
         proxy: str = do("fence_proxy_async"), early_release: bool = False) -> Func:
    """C[m, n] (float16) = A[m, k] @ B float16, 128 x bn x 64 tiles: a producer group, two consumers of 64 rows each.

    B is [n, k] (b_major "k") or [k, n] ("mn", bn = 64).  pending: wgmma groups a consumer lets run; it then releases
    the stage of that long ago.  The output goes through shared memory and TMA.  The others plant faults.
    """
    s, bk, steps = stages, 64, k // 64
    b_shape, b_box = ((n, k), (bk, bn)) if b_major == "k" else ((k, n), (bn, bk))
    b_at = (f"k * {bk}", f"bx * {bn}") if b_major == "k" else (f"bx * {bn}", f"k * {bk}")
    row = f"wgmma.m64n{bn}k16.f32.f16.f16"
    nbytes = (128 + bn) * bk * 2 + bytes_off
    a_desc = call("wgmma_descriptor", addr(f"SA[(k % {s}) * {128 * bk} + wg * {64 * bk}]"), "j * 32", dtype="uint64",
                  lbo=16, sbo=1024, swizzle=128)
    b_step = "j * 32" if b_major == "k" else "j * 2048"
    b_desc = call("wgmma_descriptor", addr(f"SB[(k % {s}) * {bn * bk}]"), b_step, dtype="uint64", lbo=8192, sbo=1024,
                  swizzle=128)
    bar = addr(f"full[k % {s}]")
    arrive = f"if tx % 128 == 0:\n    {do('mbarrier_arrive', addr(f'empty[(k - {pending}) % {s}]'))}"
    if pending:
        arrive = f"if k >= {pending}:\n" + indent(arrive, 4)
    body = f"""
{alloc("SA", (s * 128 * bk,), "float16", "shared.dyn")}
{alloc("SB", (s * bn * bk,), "float16", "shared.dyn")}
{alloc("SC", (128 * bn,), "float16", "shared.dyn")}
{alloc("acc", (bn // 2,), "float32", "local")}
{init({"full": [1] * s, "empty": [2] * s})}
if {groups(2)}:
    {do("set_max_nreg", n=registers[0], inc=False)}
    if tx == 256:
        for k in T.serial({steps if producer_steps is None else producer_steps}):
            {do("mbarrier_wait", addr(f"empty[k % {s}]"), empty_parity.format(s=s)) if room else "pass"}
            {do("mbarrier_arrive_expect_tx", addr(f"full[k % {s}]"), nbytes)}
            {do("tma_load", addr(f"SA[(k % {s}) * {128 * bk}]"), bar, f"k * {bk}", "by * 128", map="Am")}
            {do("tma_load", addr(f"SB[(k % {s}) * {bn * bk}]"), bar, *b_at, map="Bm")}
else:
    {do("set_max_nreg", n=registers[1], inc=True)}
    wg: T.int32 = tx // 128
    for k in T.serial({steps}):
        {do("mbarrier_wait", addr(f"full[k % {s}]"), full_parity.format(s=s))}
{indent(arrive, 8) if early_release else "        pass"}
        {fence or "pass"}
        for j in T.unroll({bk // 16}):
            {do("wgmma", addr("acc[0]"), a_desc, b_desc, "(k > 0) or (j > 0)", row=row, a_major="k", b_major=b_major)}
        {do("wgmma_commit")}
        {do("wgmma_wait", n=pending)}
{indent(arrive, 8) if release and not early_release else "        pass"}
    {do("wgmma_wait", n=0) if last_wait else "pass"}
    {do("wgmma_pin", addr("acc[0]"), count=bn // 2)}
    lane: T.int32 = tx % 32
    for i in T.unroll({bn // 8}):
        for h in T.unroll(2):
            SC[T.Ramp((wg * 64 + tx // 32 % 4 * 16 + lane // 4 + h * 8) * {bn} + i * 8 + lane % 4 * 2, 1, 2)] = \\
                T.cast(acc[T.Ramp(i * 4 + h * 2, 1, 2)], "float16x2")
    {proxy or "pass"}
    {do("named_barrier", 1, 256)}
    if tx == 0:
        {do("tma_store", addr("SC[0]"), f"bx * {bn}", "by * 128", map="Cm")}
        {do("bulk_commit")}
        {do("bulk_wait", n=0, read=True)}
"""
    return program({"A": ((m, k), "float16"), "B": (b_shape, "float16"), "C": ((m, n), "float16")}, body,
                   grid=f"{-(-n // bn)}, {-(-m // 128)}", threads=384,
                   launch_plan=maps(("Am", "A", (bk, 128), 128), ("Bm", "B", b_box, 128), ("Cm", "C", (bn, 128), 0)))
