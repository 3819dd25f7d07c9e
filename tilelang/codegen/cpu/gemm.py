"""T.gemm on the CPU: a register-blocked micro-kernel over tiles that lie in cache.

The tiles of a block are small and static, so their strides are constants of the kernel. A is read by broadcasting single
elements, B by vectors along n, both from their tiles. An operand is first converted into scratch space of the block only if its
elements do not have the computing type (16- and 8-bit floats, int8), its n is not contiguous (transposed B), or it is the
accumulator too.

    for j in strips of nv vectors:  for i in groups of mr rows:
        acc[mr][nv] = C;   for k: acc[r][v] += A[i + r, k] * B[k, j + v];   C = acc
"""

from __future__ import annotations

from collections.abc import Iterator

from tilelang.ir import as_bool, dtype
from tilelang.ops import Gemm
from tilelang.target.cpu_launch import BlockedGemm, Packing
from tilelang.target.llvm_values import float_literal, splat

from .code import Code
from .text import Fn, Module, widths
from .types import convert, intrinsic, load, memory_type, store, value_type

# ---- operands in the form that the micro-kernel reads ----------------------------------------------------------------

# A word is an int32 that holds elements k and k+1 (16 bits each), or four of 8 bits. One multiply-add of words (pmaddwd,
# vpdpbusd) multiplies and adds them exactly, because 8-bit factors cannot overflow it. What k lacks for whole words is zero.
# The bytes of A are unsigned for vpdpbusd: those of int8 lie 128 above the elements, and 128 times the sum of a column of B is
# subtracted from its results.

I16, I32 = dtype("int16"), dtype("int32")
ABOVE = str(0x80808080 - (1 << 32))  # four bytes of 128


def _columns(f: Fn, count: int, lanes: int) -> Iterator[tuple[str, int]]:
    """(first column, columns at once) of each step of loops over columns: vectors, then the rest one by one."""
    whole = count // lanes * lanes
    for start, stop, step in ((0, whole, lanes), (whole, count, 1)):
        if start != stop:
            with f.loop(str(start), str(stop), step, hint="c") as c:
                yield c, step


def _converted(f: Fn, at: str, src: dtype, to: dtype, n: int = 1) -> str:
    """The register value of n elements at an address in another type."""
    return convert(f, load(f, src.with_lanes(n), at), src.with_lanes(n), to.with_lanes(n))


def convert_rows(f: Fn, p: Packing, src: dtype, ct: dtype, at: str, dst: str) -> None:
    """dst[r*cols + c] = at[r*row + c*col] in the computing type."""
    lanes, rows, cols, row, col = p.lanes, p.rows, p.cols, p.row, p.col
    if row == cols and col == 1:
        rows, cols, row = 1, rows * cols, rows * cols
    with f.loop("0", str(rows), hint="r") as r:
        from_row = f.at(at, memory_type(src), f.mul(r, str(row)))
        to_row = f.at(dst, memory_type(ct), f.mul(r, str(cols)))
        for c, n in _columns(f, cols, lanes):
            v = _converted(f, f.at(from_row, memory_type(src), f.mul(c, str(col))), src, ct, n)
            store(f, ct.with_lanes(n), v, f.at(to_row, memory_type(ct), c))


def transpose_rows(f: Fn, p: Packing, src: dtype, ct: dtype, at: str, dst: str) -> None:
    """dst[c*rows + r] = at[r*row + c*col]: squares of `lanes` x `lanes` through shuffles, the rest one by one."""
    lanes, rows, cols, row, col = p.lanes, p.rows, p.cols, p.row, p.col
    square = col == 1 and rows >= lanes and cols >= lanes
    whole_r, whole_c = (rows // lanes * lanes, cols // lanes * lanes) if square else (0, 0)
    st, mt = memory_type(src), memory_type(ct)
    if square:
        with f.loop("0", str(whole_r), lanes, hint="r") as r, f.loop("0", str(whole_c), lanes, hint="c") as c:
            corner = f.at(at, st, f.add(f.mul(r, str(row)), c))
            lines = [_converted(f, f.at(corner, st, str(k * row)), src, ct, lanes) for k in range(lanes)]
            to = f.at(dst, mt, f.add(f.mul(c, str(rows)), r))
            for k, v in enumerate(_transposed(f, value_type(ct), lines)):
                store(f, ct.with_lanes(lanes), v, f.at(to, mt, str(k * rows)))

    def one_by_one(r0: int, r1: int, c0: int, c1: int) -> None:
        if r0 == r1 or c0 == c1:
            return
        with f.loop(str(c0), str(c1), hint="c") as c, f.loop(str(r0), str(r1), hint="r") as r:
            v = _converted(f, f.at(at, st, f.add(f.mul(r, str(row)), f.mul(c, str(col)))), src, ct)
            store(f, ct, v, f.at(dst, mt, f.add(f.mul(c, str(rows)), r)))

    one_by_one(0, whole_r, whole_c, cols)
    one_by_one(whole_r, rows, 0, cols)


def _transposed(f: Fn, scalar: str, lines: list[str]) -> list[str]:
    """Transpose a square matrix whose rows are vectors, in log2(n) steps that exchange halves of blocks."""
    n = len(lines)
    ty, out, half = f"<{n} x {scalar}>", list(lines), n // 2
    while half:
        for i in range(n):
            if i & half:
                continue
            a, b = out[i], out[i + half]
            low = [j if not j & half else n + (j ^ half) for j in range(n)]
            high = [j ^ half if not j & half else n + j for j in range(n)]
            for at, mask in ((i, low), (i + half, high)):
                text = ", ".join(f"i32 {x}" for x in mask)
                out[at] = f.let(f"shufflevector {ty} {a}, {ty} {b}, <{n} x i32> <{text}>")
        half //= 2
    return out


def words_of_columns(f: Fn, p: Packing, src: dtype, at: str, dst: str) -> None:
    """dst[r][c / group] = word of at[r*row + c], …: each row in elements of a word, to whole words with zeros."""
    lanes, rows, cols, row, group = p.lanes, p.rows, p.cols, p.row, p.group
    part = I16 if group == 2 else src
    whole = -(-cols // group) * group
    with f.loop("0", str(rows), hint="r") as r:
        from_row = f.at(at, memory_type(src), f.mul(r, str(row)))
        to_row = f.at(dst, memory_type(part), f.mul(r, str(whole)))
        for c, n in _columns(f, cols, lanes):
            v = _converted(f, f.at(from_row, memory_type(src), c), src, part, n)
            if p.above:
                ty = value_type(part.with_lanes(n))
                v = f.let(f"xor {ty} {v}, {splat('-128', ty)}")
            store(f, part.with_lanes(n), v, f.at(to_row, memory_type(part), c))
        for k in range(cols, whole):
            store(f, part, "0", f.at(to_row, memory_type(part), str(k)))


def words_of_rows(f: Fn, p: Packing, src: dtype, at: str, dst: str) -> None:
    """dst[r / group][c] = word of at[r*row + c], at[(r+1)*row + c], …"""
    lanes, rows, cols, row, group = p.lanes, p.rows, p.cols, p.row, p.group
    st = memory_type(src)

    def line(count: str, given: int) -> None:
        with f.loop("0", count, hint="r") as at_word:
            r = at_word if given == group else str(rows // group)
            first = f.at(at, st, f.mul(f.mul(r, str(group)), str(row)))
            to_row = f.at(dst, "i32", f.mul(r, str(cols)))
            for c, n in _columns(f, cols, lanes):
                store(f, I32.with_lanes(n), word(first, c, n, given), f.at(to_row, "i32", c))

    def word(first: str, c: str, n: int, given: int) -> str:
        ty, bits, out = value_type(I32.with_lanes(n)), 32 // group, ""
        for k in range(given):
            one = _converted(f, f.at(f.at(first, st, str(k * row)), st, c), src, I32, n)
            one = f.let(f"and {ty} {one}, {splat(str((1 << bits) - 1), ty)}")
            one = f.let(f"shl {ty} {one}, {splat(str(bits * k), ty)}") if k else one
            out = f.let(f"or {ty} {out}, {one}") if out else one
        return f.let(f"xor {ty} {out}, {splat(ABOVE, ty)}") if p.above else out

    if rows >= group:
        line(str(rows // group), group)
    if rows % group:
        line("1", rows % group)


def print_gemm(cx: Code, s: BlockedGemm) -> None:
    """Print c += op(a) @ op(b), or c = op(a) @ op(b) when clear_accum."""
    op, f = s.op, cx.f
    assert isinstance(op, Gemm), "what plan_gemms plans"
    a, b, c = (cx.address(r.buffer, [cx.index(x) for x in r.mins]) for r in (op.a, op.b, op.c))
    if s.pack_a is not None:
        a = _packed(cx, s.pack_a, op.a.dtype, s.shape.compute, a)
    if s.pack_b is not None:
        b = _packed(cx, s.pack_b, op.b.dtype, s.shape.compute, b)
    name = f.module.need(s.shape.name, lambda: _tile_function(f.module, s))
    f.do(f"call void @{name}(ptr {a}, ptr {b}, ptr {c}, i1 {cx.value(as_bool(op.clear_accum))})")


def _packed(cx: Code, p: Packing, src: dtype, compute: dtype, operand: str) -> str:
    """Convert an operand into scratch space; returns its address there."""
    f = cx.f
    dst = f.at(cx.block.scratch, "i8", str(p.at))
    match p.kind:
        case "convert":
            convert_rows(f, p, src, compute, operand, dst)
        case "transpose":
            transpose_rows(f, p, src, compute, operand, dst)
        case "words_of_rows":
            words_of_rows(f, p, src, operand, dst)
        case "words_of_columns":
            words_of_columns(f, p, src, operand, dst)
        case "transposed_words":
            lines = f.at(cx.block.scratch, "i8", str(p.at + p.scratch // 2))
            words_of_columns(f, p, src, operand, lines)
            transpose_rows(f, p.of_words, I32, I32, lines, dst)
    return dst


# ---- the kernel ----------------------------------------------------------------------------------------------------


def _tile_function(module: Module, plan: BlockedGemm) -> str:
    """Print the whole tile: strips of columns, groups of rows, micro-kernels for the full and the edge blocks."""
    s, mr, nv, lanes = plan.shape, plan.rows, plan.vectors, plan.lanes
    f = Fn(module, s.name, "void",
           [("ptr", "a", "noalias readonly"), ("ptr", "b", "noalias readonly"), ("ptr", "c", "noalias"),
            ("i1", "clear", "")],
           attrs='nounwind noinline "prefer-vector-width"="512" "min-legal-vector-width"="512"')
    ct, cd = memory_type(s.compute), memory_type(s.c)
    nr = nv * lanes

    def rows(j: str, widths: list[int]) -> None:
        bp = f.at("%b", ct, j)
        columns = _reduced_columns(f, plan, widths, bp) if s.above else []
        for start, stop, count in ((0, s.m // mr * mr, mr), (s.m // mr * mr, s.m, s.m % mr)):
            if start == stop:
                continue
            with f.loop(str(start), str(stop), count, hint="i") as i:
                ap = f.at("%a", ct, f.mul(i, str(s.ai)))
                cp = f.at("%c", cd, f.add(f.mul(i, str(s.ldc)), j))
                _micro_kernel(f, plan, count, widths, (ap, bp, cp), columns)

    if s.n >= nr:
        with f.loop("0", str(s.n // nr * nr), nr, hint="j") as j:
            rows(j, [lanes] * nv)
    if s.n % nr:
        rows(str(s.n // nr * nr), widths(s.n % nr, lanes))
    f.end("ret void")
    f.finish()
    return module.entries[f.name]


def _reduced_columns(f: Fn, plan: BlockedGemm, widths: list[int], bp: str) -> list[str]:
    """128 times the sums of columns of B, by vectors."""
    s = plan.shape
    types = [value_type(I32.with_lanes(w)) for w in widths]
    before, head, out = f.label, f.name_of("k"), f.name_of("kend")
    f.start(head)
    k, k2 = f"%{f.name_of('k')}", f"%{f.name_of('k')}"
    columns = [f"%{f.name_of('column')}" for _ in widths]
    f.lines.append(f"  {k} = phi i64 [ 0, %{before} ], [ {k2}, %{head} ]")
    place = len(f.lines)
    row = f.at(bp, "i32", f.mul(k, str(s.ldb)))
    starts = [sum(widths[:v]) for v in range(len(widths))]
    nxt = [_dot_bytes(f, ty, splat(ABOVE, ty), load(f, I32.with_lanes(w), f.at(row, "i32", str(x))), c)
           for ty, w, x, c in zip(types, widths, starts, columns)]
    f.do(f"{k2} = add nuw nsw i64 {k}, 1")
    f.lines[place:place] = [f"  {c} = phi {ty} [ {splat('0', ty)}, %{before} ], [ {n}, %{head} ]"
                            for c, ty, n in zip(columns, types, nxt)]
    f.end(f"br i1 {f.let(f'icmp slt i64 {k2}, {s.k}')}, label %{head}, label %{out}")
    f.start(out)
    return nxt


def _micro_kernel(f: Fn, plan: BlockedGemm, mr: int, widths: list[int], operands: tuple[str, str, str],
                  columns: list[str]) -> None:
    """Print the micro-kernel of an mr x sum(widths) block of C, which stays in registers over all of k.

    operands: addresses of A, B and C.  columns: what is subtracted from them, by vectors.
    """
    s, (ap, bp, cp) = plan.shape, operands
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
            nxt[r, v] = _multiply_add(f, plan, types[v], spread[w], b[v], acc[r, v])
    f.do(f"{k2} = add nuw nsw i64 {k}, 1")
    f.lines[place:place] = [f"  {acc[c]} = phi {types[c[1]]} [ {first[c]}, %{before} ], [ {nxt[c]}, %{head} ]"
                            for c in cells]
    more = f.let(f"icmp slt i64 {k2}, {s.k}")
    f.end(f"br i1 {more}, label %{head}, label %{out}"
          + f.module.loop_metadata('!"llvm.loop.unroll.disable"'))
    f.start(out)
    for r, v in cells:
        wide = s.c.with_lanes(widths[v])
        result = f.let(f"sub {types[v]} {nxt[r, v]}, {columns[v]}") if columns else nxt[r, v]
        store(f, wide, convert(f, result, ct.with_lanes(widths[v]), wide), c_address(r, v))


def _multiply_add(f: Fn, plan: BlockedGemm, ty: str, a: str, b: str, c: str) -> str:
    s = plan.shape
    if s.group == 4:
        return _dot_bytes(f, ty, a, b, c)
    if s.group == 2:
        return f.let(f"add {ty} {_dot_pairs(f, ty, a, b)}, {c}")
    if not s.compute.is_float:
        return f.let(f"add {ty} {f.let(f'mul {ty} {a}, {b}')}, {c}")
    if plan.fma:
        return intrinsic(f, "llvm.fma", ty, a, b, c)
    return f.let(f"fadd {ty} {f.let(f'fmul {ty} {a}, {b}')}, {c}")


_PMADD = {4: "llvm.x86.sse2.pmadd.wd", 8: "llvm.x86.avx2.pmadd.wd", 16: "llvm.x86.avx512.pmaddw.d.512"}


def _dot_bytes(f: Fn, ty: str, a: str, b: str, c: str) -> str:
    """Per int32 lane: c plus the four bytes of a, unsigned, times those of b, signed."""
    lanes = int(ty[1:].split(" ")[0]) if ty[0] == "<" else 1
    if lanes in _PMADD:
        fn = f.module.declare(f"llvm.x86.avx512.vpdpbusd.{32 * lanes}", ty, f"{ty}, {ty}, {ty}")
        return f.let(f"call {ty} {fn}({ty} {c}, {ty} {a}, {ty} {b})")
    for k in range(4):
        x = f.let(f"and {ty} {f.let(f'lshr {ty} {a}, ' + splat(str(8 * k), ty))}, {splat('255', ty)}")
        y = f.let(f"ashr {ty} {f.let(f'shl {ty} {b}, ' + splat(str(24 - 8 * k), ty))}, {splat('24', ty)}")
        c = f.let(f"add {ty} {c}, {f.let(f'mul {ty} {x}, {y}')}")
    return c


def _dot_pairs(f: Fn, ty: str, a: str, b: str) -> str:
    """Per int32 lane: low half * low half + high half * high half, halves signed."""
    lanes = int(ty[1:].split(" ")[0]) if ty[0] == "<" else 1
    if lanes in _PMADD:
        half = f"<{2 * lanes} x i16>"
        fn = f.module.declare(_PMADD[lanes], ty, f"{half}, {half}")
        x, y = f.let(f"bitcast {ty} {a} to {half}"), f.let(f"bitcast {ty} {b} to {half}")
        return f.let(f"call {ty} {fn}({half} {x}, {half} {y})")
    by = splat("16", ty)
    halves = []
    for shift in (True, False):
        x, y = ((f.let(f"shl {ty} {v}, {by}") if shift else v) for v in (a, b))
        halves.append(f.let(f"mul {ty} {f.let(f'ashr {ty} {x}, {by}')}, {f.let(f'ashr {ty} {y}, {by}')}"))
    return f.let(f"add {ty} {halves[0]}, {halves[1]}")
