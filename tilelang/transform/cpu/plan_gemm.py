"""T.gemm as a register-blocked kernel: the accumulator block, and which operands are first converted into scratch space."""

from __future__ import annotations

from functools import lru_cache

from tilelang.ir import Func, Region, Stmt, contains, dtype, rewrite
from tilelang.ops import Gemm
from tilelang.target.cpu import HostCpu, host_cpu, unsupported
from tilelang.target.cpu_launch import BlockedGemm, GemmShape, Packing, ThreadValues, WarpRoleCode, rewrite_codes

from ..framework.pass_ import CPU, PassContext, pass_
from .plan_reductions import constant


@pass_(needs=CPU)
def plan_gemms(func: Func, cx: PassContext) -> Func:
    """Each Gemm of a planned program as a kernel for a processor, and the scratch space that each warp role needs.

        gemm(a, b, c)         ->   convert b into scratch as float32
                                   c (in blocks of 6 x 2 vectors) += a @ scratch

    An operand is read where it lies unless its elements are not of the computing type (16- and 8-bit floats, int8), its
    columns are not contiguous (transposed B), or it is the accumulator too.
    Raises cpu-unsupported for operands of run-time size or strides, and for mixed kinds of elements.
    """
    host = cx.host or host_cpu()
    return rewrite_codes(func, lambda code: _code(code, host))


def _code(code: WarpRoleCode, host: HostCpu) -> WarpRoleCode:
    if not contains(code.body, Gemm):
        return code
    scratch = 0

    def plan(op: Gemm) -> Stmt:
        nonlocal scratch
        out = _plan(op, code.values, host)
        scratch = max(scratch, sum(p.scratch for p in (out.pack_a, out.pack_b) if p is not None))
        return out

    body = rewrite(code.body, plan, Gemm)
    return WarpRoleCode(code.warp_role, body, code.values, scratch)


def computing_type(op: Gemm) -> dtype:
    """The type that is multiplied and accumulated in.  Raises cpu-unsupported for mixed kinds of operands."""
    a, b, c = op.a.dtype, op.b.dtype, op.c.dtype
    if a.is_float and b.is_float and c.is_float:
        return dtype("float64") if 64 in (a.bits, b.bits, c.bits) else dtype("float32")
    if a.is_int and b.is_int and c.is_int and c.bits >= 32:
        return c
    raise unsupported(f"T.gemm of {a} and {b} into {c}", span=op.span,
                      hint="float operands need a float accumulator, integer operands an int32 or int64 one")


MOST_TRANSPOSED = 8  # rows of the squares that are transposed in registers


@lru_cache(maxsize=256)
def blocking(m: int, n: int, lanes: int, registers: int) -> tuple[int, int]:
    """Rows and vectors of the accumulator block: fits the registers, fewest loads per multiply-add over the tile.

    Per step of k a block costs mr*nv multiply-adds, at least 8 of them in flight to hide their latency, and mr + nv
    loads, which mostly run beside them.
    """
    vectors = -(-n // lanes)

    def split(total: int, size: int) -> list[int]:
        blocks = -(-total // size)
        even = -(-total // blocks)
        return [even] * (total // even) + ([total % even] if total % even else [])

    best = (float("inf"), 1, 1)
    for nv in range(1, min(vectors, 6) + 1):
        for mr in range(1, min(m, 16) + 1):
            if mr * nv + nv + 1 > registers:
                break
            cost = sum(max(r * v, 8) + 0.25 * (r + v) for r in split(m, mr) for v in split(vectors, nv))
            best = min(best, (cost, split(m, mr)[0], split(vectors, nv)[0]))
    return best[1], best[2]


def _plan(op: Gemm, values: ThreadValues, host: HostCpu) -> BlockedGemm:
    compute = computing_type(op)
    m, n = _static(op, op.c, -2), _static(op, op.c, -1)
    k = _static(op, op.a, -2 if op.transpose_a else -1)
    (a0, a1), (b0, b1), (ldc, c1) = (_strides(op, r, values) for r in (op.a, op.b, op.c))
    if c1 != 1:
        raise unsupported("an accumulator of T.gemm whose columns are not contiguous", span=op.span)
    ai, ak = (a1, a0) if op.transpose_a else (a0, a1)
    bk, bn = (b1, b0) if op.transpose_b else (b0, b1)
    bytes_ = compute == "int32" and op.a.dtype.bits == op.b.dtype.bits == 8 and host.has_pmadd and a1 == b1 == 1
    group = 4 if bytes_ and host.has_dot_bytes and op.b.dtype == "int8" else 2 if bytes_ else 1
    above = group == 4 and op.a.dtype == "int8"
    pack_a = pack_b = None
    if bytes_:
        pack_a, pack_b = _word_packing(op, (m, n, k), (a0, b0), host, group, above)
        k = -(-k // group)
        ai, ak = (1, m) if op.transpose_a else (k, 1)
        bk = n
    else:
        if _needs_conversion(op.a, op, compute):
            rows, cols = (k, m) if op.transpose_a else (m, k)
            lanes = host.lanes(compute.bits) if a1 == 1 else 1
            pack_a = Packing("convert", rows, cols, a0, a1, 0, _padded(rows * cols * compute.bytes), lanes)
            ai, ak = (1, m) if op.transpose_a else (k, 1)
        if _needs_conversion(op.b, op, compute) or bn != 1:
            at = 0 if pack_a is None else pack_a.scratch
            size = _padded(k * n * compute.bytes)
            lanes = host.lanes(compute.bits)
            pack_b = (Packing("convert", k, n, bk, 1, at, size, lanes) if bn == 1 else
                      Packing("transpose", n, k, bn, bk, at, size, min(lanes, MOST_TRANSPOSED)))
            bk = n
    shape = GemmShape(m, n, k, ai, ak, bk, ldc, compute, op.c.dtype, group, above)
    lanes = host.lanes(compute.bits)
    rows_in_block, vectors = blocking(m, n, lanes, host.registers - 3 * above)
    return BlockedGemm(op, shape, rows_in_block, vectors, lanes, host.has_fma, pack_a, pack_b, span=op.span)


def _needs_conversion(r: Region, op: Gemm, compute: dtype) -> bool:
    """Whether an operand does not lie in memory as the values that are computed with, or is overwritten meanwhile."""
    return r.dtype.bits != compute.bits or r.buffer.data is op.c.buffer.data


def _padded(size: int) -> int:
    return -(-size // 64) * 64


def _word_packing(op: Gemm, size: tuple[int, int, int], strides: tuple[int, int], host: HostCpu, group: int,
                  above: bool) -> tuple[Packing, Packing]:
    """Operands of 8-bit integers as words along k: A by rows, B one row of n words after another.

    size: m, n, k.  strides: of the rows of A and B.
    """
    (m, n, k), (a_row, b_row) = size, strides
    steps, elements, words = -(-k // group), host.lanes(32 // group), host.lanes(32)
    size_a, size_b = _padded(m * steps * 4), _padded(n * steps * 4)
    a = Packing("words_of_rows", k, m, a_row, 1, 0, size_a, words, group, above) if op.transpose_a else (
        Packing("words_of_columns", m, k, a_row, 1, 0, size_a, elements, group, above))
    b = Packing("transposed_words", n, k, b_row, 1, size_a, 2 * size_b, elements, group) if op.transpose_b else (
        Packing("words_of_rows", k, n, b_row, 1, size_a, size_b, words, group))
    return a, b


def _static(op: Gemm, r: Region, d: int) -> int:
    e = r.extents[d]
    if not isinstance(e, int):
        raise unsupported("T.gemm on tiles of run-time size", span=op.span, hint="give the tile a static shape")
    return e


def _strides(op: Gemm, r: Region, values: ThreadValues) -> tuple[int, int]:
    """Static strides of an operand over its last two dimensions."""
    found = [constant(n) for n in r.buffer.strides[-2:]]
    if len(found) < 2 or None in found:
        raise unsupported(f"operand {r.buffer.name} of T.gemm with run-time strides", span=op.span,
                          hint="copy it to a shared buffer or a fragment of static shape first")
    if values.count > 1 and r.buffer.data in values.private:
        raise unsupported(f"per-thread operand {r.buffer.name} of T.gemm", span=op.span, hint="use a fragment")
    return found[0], found[1]  # type: ignore[return-value]
