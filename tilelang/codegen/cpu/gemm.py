"""T.gemm on the CPU: a register-blocked micro-kernel over tiles that already lie in cache.

The tiles of a block are small and static, so their strides are constants of the kernel: A is read by broadcasting
single elements, B by vectors along n, both where they are.  Only an operand whose elements are not of the computing
type (16- and 8-bit floats, int8), whose n is not contiguous (transposed B) or that is the accumulator too is first
converted into scratch space of the block.

    for j in panels of nv vectors:  for i in groups of mr rows:
        acc[mr][nv] = C;   for k: acc[r][v] += A[i + r, k] * B[k, j + v];   C = acc
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from tilelang.ir import Region, as_bool, dtype
from tilelang.ops import Gemm
from tilelang.target.cpu import HostCpu, unsupported

from .gemm_pack import convert_rows, pairs_of_columns, pairs_of_rows, transpose_rows
from .state import Code
from .text import Fn, Module
from .types import convert, float_literal, intrinsic, load, memory_type, splat, store, value_type


@dataclass(frozen=True)
class Shape:
    """A gemm on tiles with static strides (elements): a[i*ai + k*ak], b[k*ldb + j], c[i*ldc + j]."""

    m: int
    n: int
    k: int
    ai: int
    ak: int
    ldb: int
    ldc: int
    compute: dtype
    c: dtype
    pairs: bool = False  # elements of a and b are pairs of 16-bit integers, k counts pairs

    @property
    def name(self) -> str:
        kind = "pairs" if self.pairs else str(self.compute)
        return f"gemm_{self.m}x{self.n}x{self.k}_{kind}_{self.c}_{self.ai}_{self.ak}_{self.ldb}_{self.ldc}"


def compute_type(op: Gemm) -> dtype:
    """The type products are formed and added in.  Raises cpu-unsupported for mixed kinds of operands."""
    a, b, c = op.a.dtype, op.b.dtype, op.c.dtype
    if a.is_float and b.is_float and c.is_float:
        return dtype("float64") if 64 in (a.bits, b.bits, c.bits) else dtype("float32")
    if a.is_int and b.is_int and c.is_int and c.bits >= 32:
        return c
    raise unsupported(f"T.gemm of {a} and {b} into {c}", span=op.span,
                      hint="float operands need a float accumulator, integer operands an int32 or int64 one")


@lru_cache(maxsize=256)
def blocking(m: int, n: int, lanes: int, registers: int) -> tuple[int, int]:
    """Rows and vectors of the accumulator block: fits the registers, fewest loads per multiply-add over the tile.

    Per step of k a block costs mr*nv multiply-adds, at least 8 of them in flight to hide their latency, and mr + nv
    loads, which mostly run beside them.
    """
    vectors = -(-n // lanes)

    def split(total: int, size: int) -> list[int]:
        parts = -(-total // size)
        even = -(-total // parts)
        return [even] * (total // even) + ([total % even] if total % even else [])

    best = (float("inf"), 1, 1)
    for nv in range(1, min(vectors, 6) + 1):
        for mr in range(1, min(m, 16) + 1):
            if mr * nv + nv + 1 > registers:
                break
            cost = sum(max(r * v, 8) + 0.25 * (r + v) for r in split(m, mr) for v in split(vectors, nv))
            best = min(best, (cost, split(m, mr)[0], split(vectors, nv)[0]))
    return best[1], best[2]


def emit_gemm(cx: Code, op: Gemm) -> None:
    """c += op(a) @ op(b), or = when clear_accum."""
    ct = compute_type(op)
    m, n = _static(op, op.c, -2), _static(op, op.c, -1)
    k = _static(op, op.a, -2 if op.transpose_a else -1)
    f = cx.f
    a_at, (a0, a1) = _operand(cx, op, op.a)
    b_at, (b0, b1) = _operand(cx, op, op.b)
    c_at, (ldc, c1) = _operand(cx, op, op.c)
    if c1 != 1:
        raise unsupported("an accumulator of T.gemm whose columns are not contiguous", span=op.span)
    ai, ak = (a1, a0) if op.transpose_a else (a0, a1)
    bk, bn = (b1, b0) if op.transpose_b else (b0, b1)
    bytes_only = op.a.dtype.bits == op.b.dtype.bits == 8
    pairs = ct == "int32" and bytes_only and cx.host.has_pmadd and a1 == b1 == 1
    scratch = Scratch(cx)
    if pairs:
        a_at, ai, ak = _pairs_a(cx, op, scratch, a_at, a0, m, k)
        b_at, bk = _pairs_b(cx, op, scratch, b_at, b0, n, k), n
        k = -(-k // 2)
    else:
        if memory_type(op.a.dtype) != value_type(ct) or op.a.buffer.data is op.c.buffer.data:
            rows, cols = (k, m) if op.transpose_a else (m, k)
            dst = scratch.take(rows * cols * ct.bytes)
            convert_rows(f, cx.host, op.a.dtype, ct, a_at, a0, a1, dst, rows, cols)
            a_at, ai, ak = (dst, 1, m) if op.transpose_a else (dst, k, 1)
        if memory_type(op.b.dtype) != value_type(ct) or bn != 1 or op.b.buffer.data is op.c.buffer.data:
            dst = scratch.take(k * n * ct.bytes)
            if bn == 1:
                convert_rows(f, cx.host, op.b.dtype, ct, b_at, bk, 1, dst, k, n)
            else:
                transpose_rows(f, cx.host, op.b.dtype, ct, b_at, bn, bk, dst, n, k)
            b_at, bk = dst, n
    shape = Shape(m, n, k, ai, ak, bk, ldc, ct, op.c.dtype, pairs)
    name = f.module.need(shape.name, lambda: _tile_function(f.module, cx.host, shape))
    f.do(f"call void @{name}(ptr {a_at}, ptr {b_at}, ptr {c_at}, i1 {cx.value(as_bool(op.clear_accum))})")


class Scratch:
    """Space of the block for converted operands, given out in 64-byte steps; freed when the gemm is done."""

    def __init__(self, cx: Code) -> None:
        self.cx, self.used = cx, 0

    def take(self, size: int) -> str:
        """Address of `size` fresh bytes."""
        at = self.cx.f.at(self.cx.block.scratch, "i8", str(self.used))
        self.used += -(-size // 64) * 64
        self.cx.block.scratch_bytes = max(self.cx.block.scratch_bytes, self.used)
        return at


def _pairs_a(cx: Code, op: Gemm, scratch: Scratch, at: str, row: int, m: int, k: int) -> tuple[str, int, int]:
    """A as pairs along k; address and strides (rows, k) in pairs."""
    kp = -(-k // 2)
    dst = scratch.take(m * kp * 4)
    if op.transpose_a:
        pairs_of_rows(cx.f, cx.host, op.a.dtype, at, row, dst, k, m)
        return dst, 1, m
    pairs_of_columns(cx.f, cx.host, op.a.dtype, at, row, dst, m, k)
    return dst, kp, 1


def _pairs_b(cx: Code, op: Gemm, scratch: Scratch, at: str, row: int, n: int, k: int) -> str:
    """B as pairs along k, one row of n pairs after another."""
    kp = -(-k // 2)
    dst = scratch.take(n * kp * 4)
    if not op.transpose_b:
        pairs_of_rows(cx.f, cx.host, op.b.dtype, at, row, dst, k, n)
        return dst
    rows = scratch.take(n * kp * 4)
    pairs_of_columns(cx.f, cx.host, op.b.dtype, at, row, rows, n, k)
    i32 = dtype("int32")
    transpose_rows(cx.f, cx.host, i32, i32, rows, kp, 1, dst, n, kp)
    return dst


def _static(op: Gemm, r: Region, d: int) -> int:
    e = r.extents[d]
    if not isinstance(e, int):
        raise unsupported("T.gemm on tiles of run-time size", span=op.span, hint="give the tile a static shape")
    return e


def _operand(cx: Code, op: Gemm, r: Region) -> tuple[str, tuple[int, int]]:
    """Address of a region's first element, and its static strides over the last two dimensions."""
    s = cx.memory.strides(r.buffer)[-2:]
    if len(s) < 2 or any(x[0] == "%" for x in s):
        raise unsupported(f"operand {r.buffer.name} of T.gemm with run-time strides", span=op.span,
                          hint="copy it to a shared buffer or a fragment of static shape first")
    if cx.memory.base_of(r.buffer).copies > 1:
        raise unsupported(f"per-thread operand {r.buffer.name} of T.gemm", span=op.span, hint="use a fragment")
    return cx.address(r.buffer, [cx.index(x) for x in r.mins]), (int(s[0]), int(s[1]))


# ---- the kernel ----------------------------------------------------------------------------------------------------


def _widths(count: int, lanes: int) -> list[int]:
    """count columns as vectors of `lanes`, then powers of two."""
    out, w = [lanes] * (count // lanes), lanes // 2
    rest = count % lanes
    while rest:
        if rest >= w:
            out.append(w)
            rest -= w
        w //= 2
    return out


def _tile_function(module: Module, host: HostCpu, s: Shape) -> str:
    """The whole tile: panels of columns, groups of rows, micro-kernels for the full and the edge blocks."""
    lanes = host.lanes(s.compute.bits)
    mr, nv = blocking(s.m, s.n, lanes, host.registers)
    f = Fn(module, s.name, "void",
           [("ptr", "a", "noalias readonly"), ("ptr", "b", "noalias readonly"), ("ptr", "c", "noalias"),
            ("i1", "clear", "")],
           attrs='nounwind noinline "prefer-vector-width"="512" "min-legal-vector-width"="512"')
    ct, cd = memory_type(s.compute), memory_type(s.c)
    nr = nv * lanes

    def rows(j: str, widths: list[int]) -> None:
        bp = f.at("%b", ct, j)
        for start, stop, count in ((0, s.m // mr * mr, mr), (s.m // mr * mr, s.m, s.m % mr)):
            if start == stop:
                continue
            with f.loop(str(start), str(stop), count, hint="i") as i:
                ap = f.at("%a", ct, f.mul(i, str(s.ai)))
                cp = f.at("%c", cd, f.add(f.mul(i, str(s.ldc)), j))
                _micro_kernel(f, host, s, count, widths, ap, bp, cp)

    if s.n >= nr:
        with f.loop("0", str(s.n // nr * nr), nr, hint="j") as j:
            rows(j, [lanes] * nv)
    if s.n % nr:
        rows(str(s.n // nr * nr), _widths(s.n % nr, lanes))
    f.end("ret void")
    f.finish()
    return module.parts[f.name]


def _micro_kernel(f: Fn, host: HostCpu, s: Shape, mr: int, widths: list[int], ap: str, bp: str, cp: str) -> None:
    """An mr x sum(widths) block of C kept in registers over all of k."""
    ct, at = s.compute, memory_type(s.compute)
    starts = [sum(widths[:v]) for v in range(len(widths))]
    types = [value_type(ct.with_lanes(w)) for w in widths]
    cells = [(r, v) for r in range(mr) for v in range(len(widths))]
    zero = float_literal(0.0) if ct.is_float else "0"

    def c_address(r: int, v: int) -> str:
        return f.at(cp, memory_type(s.c), str(r * s.ldc + starts[v]))

    first = {}
    for r, v in cells:
        wide = s.c.with_lanes(widths[v])
        old = convert(f, load(f, wide, c_address(r, v)), wide, ct.with_lanes(widths[v]))
        first[r, v] = f.let(f"select i1 %clear, {types[v]} {splat(zero, types[v])}, {types[v]} {old}")
    before, head, out = f.label, f.name_of("k"), f.name_of("kend")
    f.start(head)
    k, k2 = f"%{f.name_of('k')}", f"%{f.name_of('k')}"
    acc = {c: f"%{f.name_of('acc')}" for c in cells}
    nxt = {}
    f.lines.append(f"  {k} = phi i64 [ 0, %{before} ], [ {k2}, %{head} ]")
    place = len(f.lines)
    brow, acol = f.at(bp, at, f.mul(k, str(s.ldb))), f.at(ap, at, f.mul(k, str(s.ak)))
    b = [load(f, ct.with_lanes(w), f.at(brow, at, str(x))) for w, x in zip(widths, starts)]
    for r in range(mr):
        a = load(f, ct, f.at(acol, at, str(r * s.ai)))
        spread: dict[int, str] = {1: a}
        for v, w in enumerate(widths):
            if w not in spread:
                one = f.let(f"insertelement {types[v]} poison, {at} {a}, i64 0")
                spread[w] = f.let(f"shufflevector {types[v]} {one}, {types[v]} poison, <{w} x i32> zeroinitializer")
            nxt[r, v] = _multiply_add(f, host, s, types[v], spread[w], b[v], acc[r, v])
    f.do(f"{k2} = add nuw nsw i64 {k}, 1")
    f.lines[place:place] = [f"  {acc[c]} = phi {types[c[1]]} [ {first[c]}, %{before} ], [ {nxt[c]}, %{head} ]"
                            for c in cells]
    more = f.let(f"icmp slt i64 {k2}, {s.k}")
    f.end(f"br i1 {more}, label %{head}, label %{out}"
          + f.module.loop_metadata('!"llvm.loop.unroll.disable"'))
    f.start(out)
    for r, v in cells:
        wide = s.c.with_lanes(widths[v])
        store(f, wide, convert(f, nxt[r, v], ct.with_lanes(widths[v]), wide), c_address(r, v))


def _multiply_add(f: Fn, host: HostCpu, s: Shape, ty: str, a: str, b: str, c: str) -> str:
    if s.pairs:
        return f.let(f"add {ty} {_pair_products(f, ty, a, b)}, {c}")
    if not s.compute.is_float:
        return f.let(f"add {ty} {f.let(f'mul {ty} {a}, {b}')}, {c}")
    if host.has_fma:
        return intrinsic(f, "llvm.fma", ty, a, b, c)
    return f.let(f"fadd {ty} {f.let(f'fmul {ty} {a}, {b}')}, {c}")


_PMADD = {4: "llvm.x86.sse2.pmadd.wd", 8: "llvm.x86.avx2.pmadd.wd", 16: "llvm.x86.avx512.pmaddw.d.512"}


def _pair_products(f: Fn, ty: str, a: str, b: str) -> str:
    """Per int32 lane: low half * low half + high half * high half, halves signed."""
    lanes = int(ty[1:].split(" ")[0]) if ty[0] == "<" else 1
    if lanes in _PMADD:
        half = f"<{2 * lanes} x i16>"
        fn = f.module.declare(_PMADD[lanes], ty, f"{half}, {half}")
        x, y = f.let(f"bitcast {ty} {a} to {half}"), f.let(f"bitcast {ty} {b} to {half}")
        return f.let(f"call {ty} {fn}({half} {x}, {half} {y})")
    by = splat("16", ty)
    parts = []
    for shift in (True, False):
        x, y = ((f.let(f"shl {ty} {v}, {by}") if shift else v) for v in (a, b))
        parts.append(f.let(f"mul {ty} {f.let(f'ashr {ty} {x}, {by}')}, {f.let(f'ashr {ty} {y}, {by}')}"))
    return f.let(f"add {ty} {parts[0]}, {parts[1]}")
