"""Lower gemm to warp-group matrix instructions (wgmma, sm_90a).

    wgmma_fence()
    for each k step:                                   # 32 bytes of K
        C[mi, ni] += A[mi, k] @ B[k, ni]               # A: descriptor or registers; B: descriptor
    wgmma_commit(); wgmma_wait(number of later groups that may be in flight)

B, and A unless it is in registers, are in shared memory in the swizzled layout of layout/swizzled_boxes.py.  A warp group
computes contiguous rows of the accumulator (and contiguous columns, when there are more groups than rows allow).  Registers
of accumulators and of A are pinned wherever ordinary code may write them before, or read them after, the instructions: in
between they belong to the tensor core (PTX ISA), which the CUDA C++ compiler does not know.

Where choose_wgmma returns a reason instead of a plan, the gemm uses mma.sync.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Any

from tilelang.arith import Analyzer
from tilelang.errors import InternalError
from tilelang.ir import (AddressOf, Binary, Buffer, Const, Expr, Region, Stmt, Store, Var, call, cast, const, convert, do,
                         each_register, load, seq, unary, FRAGMENT, SHARED)
from tilelang.layout import Fragment, Layout, SwizzledBoxes, swizzled_box_layout, box_width, boxes_of, tile_fragment
from tilelang.target.machine import REGISTERS
from tilelang.target.mma import operand_dtype
from tilelang.target.wgmma import (K_STEP_BYTES, WGMMA_ROWS, WgmmaRow, adjacent_rows, metadata_words, wgmma_row,
                                   wgmma_sizes)

from .select import GemmPlan, GemmWarpPolicy

GROUP = 128  # threads of a warp group
GROUP_ROWS = 8  # rows of an operand in shared memory that lie together; a descriptor says how far the next ones are
SPARSE_STEP = 64  # columns of K whose metadata the four lanes of a row have in a word each


# ---- choice -----------------------------------------------------------------------------------------------------------


def choose_wgmma(op: Any, threads: int, rounded: Container[Var] = (), like: GemmPlan | None = None) -> GemmPlan | str:
    """The plan (row and warps along M, N) of a Gemm in a block of `threads` threads, or the reason why wgmma is not used.

    Warps are counted in fours, so that a warp group stays whole.  rounded: shared storage whose values must be rounded to
    tf32; the instruction would truncate them instead.  like: plan of another gemm into the same accumulator; this one must
    have the same accumulator layout.  Behind a semicolon the reason says what to change.
    """
    if is_tf32(op) and any(r.buffer.scope_name in SHARED and r.buffer.data not in rounded and not r.buffer.facts.tf32
                           for r in (op.a, op.b)):
        return ("float32 operands in shared memory would be cut to tf32, not rounded; fill both by T.copy in a T.Pipelined "
                "loop of two stages or more, with K contiguous (B as (N, K) with transpose_B=True)")
    sizes = wgmma_sizes(op.a.dtype, op.b.dtype, op.c.dtype, op.sparsity > 1)
    if not sizes:
        return f"there is no wgmma of {'sparse ' * (op.sparsity > 1)}{op.a.dtype} and {op.b.dtype} into {op.c.dtype}"
    if threads % GROUP:
        return f"{threads} threads are no whole warp groups; take a multiple of {GROUP} threads"
    if op.c.buffer.scope_name != FRAGMENT or not op.c.is_full or op.c.buffer.ndim != 2:
        return "the accumulator is not a whole fragment; accumulate into a whole T.alloc_fragment of two dimensions"
    if op.b.buffer.scope_name not in SHARED or op.a.buffer.scope_name not in (*SHARED, FRAGMENT):
        where = "B is not in shared memory" if op.b.buffer.scope_name not in SHARED else "A is in per-thread memory"
        return f"{where}; copy it to shared memory"
    for region in (op.a, op.b):
        why = _unfit(region, op.sparsity if region is op.b else 1)
        if why:
            return why
    if op.sparsity > 1 and (op.transpose_a or op.a.buffer.scope_name == FRAGMENT or op.k % SPARSE_STEP or not (
            op.words or op.metadata.buffer.scope_name in SHARED and op.metadata.dtype.bits in (8, 16, 32))):
        return (f"sparse wgmma reads kept values of order (M, K / 2) and metadata of 8 to 32 bits in shared memory, and a "
                f"multiple of {SPARSE_STEP} of K")
    if op.a.dtype.bits != 16 and (op.transpose_a and op.a.buffer.scope_name in SHARED or not op.transpose_b):
        return f"operands of {op.a.dtype} need K contiguous; take A as (M, K), and B as (N, K) with transpose_B=True"
    best: GemmPlan | None = None
    partitions = _partitions(op, threads // GROUP)
    if like is not None:
        partitions = [p for p in partitions if (p[0] * 4, p[1]) == like.warps]
        sizes = tuple(n for n in sizes if n == WGMMA_ROWS[like.instruction].shape[1])
    for groups in partitions:
        row = _row(op, groups, sizes)
        if row is not None:
            best = GemmPlan(row.name, (groups[0] * 4, groups[1]))
            break
    least = wgmma_row(sizes[0], op.a.dtype, op.b.dtype, op.c.dtype, op.sparsity > 1)
    return best or (f"{threads // GROUP} warp group(s) do not divide {op.m} x {op.n} x {op.k} into instructions; take 64 rows "
                    f"for each warp group (A and B exchanged where N is the long side), N in multiples of {sizes[0]}"
                    f"{'' if least is None else f' and K of {least.shape[2]}'}")


def is_tf32(op: Any) -> bool:
    """Whether a Gemm computes in tf32."""
    return bool(operand_dtype(op.a.dtype) == "tfloat32")


def _partitions(op: Any, groups: int) -> list[tuple[int, int]]:
    """(groups along M, along N), the preferred one first: groups along M, unless the policy requires otherwise."""
    out = [(m, groups // m) for m in range(1, groups + 1)
           if groups % m == 0 and op.m % (64 * m) == 0 and op.n % (8 * (groups // m)) == 0]
    return sorted(out, reverse=op.policy is not GemmWarpPolicy.FullCol)


def _row(op: Any, groups: tuple[int, int], sizes: tuple[int, ...]) -> WgmmaRow | None:
    """The widest instruction that divides a group's columns and whose operands start at permitted addresses."""
    m, n = op.m // groups[0], op.n // groups[1]
    if m * n // GROUP * op.c.dtype.bits // 32 > REGISTERS.accumulator:
        return None
    for size in reversed(sizes):
        if n % size:
            continue
        row = wgmma_row(size, op.a.dtype, op.b.dtype, op.c.dtype, op.sparsity > 1)
        if row is None or op.k % row.shape[2]:
            return None
        fits = _starts(op.b, "k" if op.transpose_b else "mn", op.n, size, row.b_bytes)
        if op.a.buffer.scope_name in SHARED:
            fits = fits and _starts(op.a, "mn" if op.transpose_a else "k", op.m, 64)
        if fits:
            return row
    return None


def _unfit(region: Region, kept: int = 1) -> str:
    """Why the shared-memory region of an operand cannot be named by a wgmma descriptor; "" when it can.  kept: an instruction
    reads so many times 32 bytes of its rows."""
    b = region.buffer
    if b.scope_name == FRAGMENT:
        return ""
    if b.ndim < 2 or not b.is_static or b.strides_ is not None:
        return f"`{b.name}` is not a plain matrix; allocate it with a static shape and without strides"
    if shared_boxes(b) is None:
        return f"{no_boxes(b)}; give it rows of a multiple of 32 bytes and no layout"
    if not _multiple(region.mins[-2], 8) or not _multiple(region.mins[-1], max(1, 256 * kept // b.dtype.bits)):
        return f"the tile of `{b.name}` starts inside a swizzle pattern; start it at multiples of 8 rows and {32 * kept} bytes"
    return ""


def _starts(region: Region, major: str, total: int, extent: int, k_bytes: int = K_STEP_BYTES) -> bool:
    """Whether the operand piece of every instruction starts at a permitted address, and lies in one box where it has more than
    K_STEP_BYTES of K."""
    p = shared_boxes(region.buffer)
    if p is None or major == "k":
        return p is not None and (k_bytes == K_STEP_BYTES or k_bytes <= p.width)
    w = p.box_columns
    first = 0 if _multiple(region.mins[-1], w) else _number(region.mins[-1])
    if first is None:
        return False
    return all(at % w == 0 or at % w + extent <= w for at in range(first, first + total, extent))


def shared_layout(b: Buffer) -> Layout | None:
    """The swizzled layout of an operand's shared buffer; it depends on the buffer alone."""
    bits = b.dtype.bits * b.dtype.lanes
    width = box_width(int(b.shape[-1]), bits) if b.facts.box_width is None else b.facts.box_width
    return swizzled_box_layout(tuple(b.shape), bits, width) if width else None


def shared_boxes(b: Buffer) -> SwizzledBoxes | None:
    """The swizzled boxes of one stage of a shared buffer; None when it has no such layout."""
    layout = shared_layout(b)
    return None if layout is None else boxes_of(layout, b.dtype.bits * b.dtype.lanes)


def no_boxes(b: Buffer) -> str:
    """Why shared_boxes gives none."""
    if b.facts.box_width is not None:
        return f"the layout given for `{b.name}` is not made of swizzle atoms"
    return f"rows of `{b.name}` are no whole swizzle atoms"


def _number(e: Any) -> int | None:
    if isinstance(e, int):
        return e
    return int(e.value) if isinstance(e, Const) else None


def _multiple(e: Any, n: int) -> bool:
    """Whether an index is surely a multiple of n, also where it depends on variables."""
    form = Analyzer().linear(convert(e))
    return all(c % n == 0 for c in (form.const, *form.terms.values()))


def operand_layouts(op: Any) -> dict[Buffer, Layout]:
    """The shared layouts that a Gemm by wgmma requires."""
    out: dict[Buffer, Layout] = {}
    for region in (op.a, op.b):
        if region.buffer.scope_name in SHARED:
            layout = shared_layout(region.buffer)
            if layout is not None:
                out[region.buffer] = layout
    return out


def wgmma_cycles(op: Any, groups: int = 1) -> float:
    """Tensor-core cycles of a GEMM of so many warp groups with the widest instructions.

    An instruction takes max(N / 2, 16 + N / 4) cycles, or N / 2 (at least 13) with A in registers, for 64 rows and 32 bytes
    of K; with 64 bytes of K of a sparse A 16 + N / 2.  Measured on an H200, the same for all types.
    """
    n = min(op.n // next((columns for _, columns in _partitions(op, groups)), 1), 256)
    each = max(n / 2, 13) if op.a.buffer.scope_name == FRAGMENT else max(n / 2, 16 + n / 4 * op.sparsity)
    return op.m / 64 * op.n / n * op.k * op.a.dtype.bits / 256 / op.sparsity * each


def wgmma_fragments(op: Any, row: WgmmaRow, warps: tuple[int, int],
                    threads: int) -> tuple[Fragment, None, Fragment]:
    """Fragments of a (when it is in registers) and c, in the shape of each region's last two dimensions.

    Registers: one instruction tile after another, a with K slowest, c with M slowest.  With a transposed a in registers whose
    elements have not 16 bits, lanes hold neighbouring rows (`adjacent_rows`).
    """
    pairs = op.transpose_a and op.a.buffer.scope_name == FRAGMENT and op.a.dtype.bits != 16
    row_a, row_c = (adjacent_rows(x, op.a.dtype.bits) if pairs else x for x in (row.a, row.c))
    mg, ng = warps[0] // 4, warps[1]
    m, n, k = op.m // (64 * mg), op.n // (row.shape[1] * ng), op.k // row.shape[2]
    a = tile_fragment(row_a, (m, k), (mg, 1), (1, 0), ((ng, mg),), order=(1, 0), threads=threads)
    c = tile_fragment(row_c, (m, n), (mg, ng), (1, mg), threads=threads)
    return (a.permuted((1, 0)) if op.transpose_a else a, None, c.permuted((1, 0)) if op.plan.exchanged else c)


def metadata_fragment(op: Any, warps: tuple[int, int], threads: int) -> Fragment:
    """The words of metadata that the threads give the instructions, of 64 rows and SPARSE_STEP columns one each."""
    base = metadata_words(op.a.dtype.bits)
    mg, ng = warps[0] // 4, warps[1]
    return tile_fragment(base, (op.m // (64 * mg), op.k // SPARSE_STEP), (mg, 1), (1, 0), ((ng, mg),), order=(1, 0),
                         threads=threads)


# ---- lowering ---------------------------------------------------------------------------------------------------------


class _Matrix:
    """An operand in shared memory and its descriptors.  repeats: its eight rows stand for all."""

    def __init__(self, cx: Any, region: Region, major: str, repeats: bool = False) -> None:
        buffer = region.buffer
        got = boxes_of(cx.layout_of(buffer), buffer.dtype.bits)
        if got is None:
            raise InternalError(f"`{buffer.name}` is not made of swizzle atoms")
        self.boxes, self.major, self.cx = got, major, cx
        zero = const(0)
        lead = tuple(cx.expr(convert(m)) for m in region.mins[:-2])
        self.storage, self.base = cx.physical(buffer, (*lead, zero, zero))
        first = tuple(convert(m) for m in region.mins[-2:])
        self.outer, self.k = first if major == "k" else first[::-1]
        self.count = got.bytes * 8 // buffer.dtype.bits
        d = got.descriptor(major)
        self.fields: dict[str, Any] = {"lbo": d.lbo, "sbo": 0 if repeats else d.sbo, "swizzle": d.swizzle, "count": self.count}

    def descriptor(self, start: Expr, k: int) -> Expr:
        """Descriptor of the piece that starts at row or column `start` of the operand and at element k of K."""
        at = self.boxes.offset(self.major, self.outer + start, self.k + k)
        at, = self.cx.simplified((convert(at),))
        args: tuple[Expr, ...] = (AddressOf(self.storage, self.base),)
        fixed = 0
        while isinstance(at, Binary) and at.op == "add" and isinstance(at.b, Const):
            fixed, at = fixed + int(at.b.value), at.a
        if isinstance(at, Const):
            return call("wgmma_descriptor", args, "uint64", offset=fixed + int(at.value), **self.fields)
        return call("wgmma_descriptor", (*args, at), "uint64", offset=fixed, **self.fields)


def lower_wgmma(op: Any, cx: Any, row: WgmmaRow) -> Stmt:
    """The per-thread statements of a gemm on `row`.

    attr `wait`: 0 waits for the result; n > 0 lets up to n later groups run on the same accumulator, which the pass that set
    `wait` pins around all of them; -1 only starts the gemm, and the pass that set it waits and pins the registers.
    attr `in_flight`: an earlier wgmma may still be adding to the accumulator.
    """
    warps = op.plan.warps
    mg, ng = warps[0] // 4, warps[1]
    want_a, _, want_c = wgmma_fragments(op, row, warps, cx.num_threads)
    if cx.layout_of(op.c.buffer) != want_c:
        raise InternalError(f"the layout of accumulator `{op.c.buffer.name}` is not that of {row.name}")
    local_c = cx.local_of(op.c.buffer)
    m_tiles, n_tiles, steps = op.m // (64 * mg), op.n // (row.shape[1] * ng), op.k // row.shape[2]
    group = cx.warp_group()
    m_first = group % mg * (op.m // mg) if mg > 1 else const(0)
    n_first = group // mg * (op.n // ng) if ng > 1 else const(0)
    a_local, a_shared = _left(op, cx, want_a)
    b_shared = _Matrix(cx, op.b, "k" if op.transpose_b else "mn")
    attrs = {"row": row.name, "a_major": "k" if a_shared is None else a_shared.major, "b_major": b_shared.major}
    running = op.plan.wait or 0  # then the accumulators may be in use: the pass that set `wait` pins them around the loop
    pins = [] if running > 0 or op.plan.in_flight else [_pin(local_c)]
    if running <= 0 and a_local is not None:
        pins.append(_pin(a_local))
    words = cx.local_of(op.metadata.buffer) if row.sparse else None
    stmts: list[Stmt] = [*pins, *([] if op.plan.joined else [do("wgmma_fence")])]
    for step in range(steps):
        k = step * row.shape[2]
        scale = _scale(op, cx, step)
        for mi in range(m_tiles):
            a: Expr
            if a_local is not None:
                a = AddressOf(a_local, (const((step * m_tiles + mi) * row.a.registers),))
            elif a_shared is not None:
                a = a_shared.descriptor(const(0) if op.repeats else m_first + mi * 64, k // op.sparsity)
            word = () if words is None else (load(words, (const(k // SPARSE_STEP * m_tiles + mi),)),)
            for ni in range(n_tiles):
                b = b_shared.descriptor(n_first + ni * row.shape[1], k)
                c = AddressOf(local_c, (const((mi * n_tiles + ni) * row.c.registers),))
                stmts.append(do("wgmma", c, a, b, scale, *word, span=op.span, selector=k % SPARSE_STEP // row.shape[2], **attrs)
                             if word else do("wgmma", c, a, b, scale, span=op.span, **attrs))
    stmts.append(do("wgmma_commit"))
    if running >= 0:
        used = [] if words is None else [do("wgmma_used", AddressOf(words, (const(0),)), count=int(words.shape[0]))]
        stmts += [do("wgmma_wait", n=running), *used, *pins]
    return seq(*stmts, span=op.span)


def drained(local: Buffer) -> Stmt:
    """Wait for all wgmma in flight; ordinary accesses of the register array stay behind the wait."""
    return seq(do("wgmma_wait", n=0), _pin(local))


def _pin(local: Buffer) -> Stmt:
    """Stop the compiler from moving ordinary accesses of a register array across this point."""
    return do("wgmma_pin", AddressOf(local, (const(0),)), count=int(local.shape[0]))


def _scale(op: Any, cx: Any, step: int) -> Expr:
    """Whether a k step adds to the accumulator; the first step may overwrite it instead."""
    if step:
        return const(True)
    clear = op.clear_accum
    return const(not clear.value) if isinstance(clear, Const) else unary("not", cast(cx.expr(clear), "bool"))


def _left(op: Any, cx: Any, want: Fragment) -> tuple[Buffer | None, _Matrix | None]:
    """A as registers if its layout is the instruction's, else as a matrix in shared memory (copied there if necessary)."""
    region = op.a
    major = "mn" if op.transpose_a else "k"
    if region.buffer.scope_name != FRAGMENT:
        return None, _Matrix(cx, region, major, op.repeats)
    source = region.buffer
    own = source.data is not op.c.buffer.data  # not when A is the accumulator itself, whose registers change
    if own and region.is_full and source.ndim == 2 and cx.layout_of(source) == want:
        local = cx.local_of(source)
        return (local if not is_tf32(op) or source.facts.tf32 else _rounded(cx, local)), None
    turn = slice(None, None, -1 if major == "mn" and source.dtype.bits != 16 else 1)  # to K contiguous
    shape = tuple(int(n) for n in region.extents[-2:])[turn]
    width = box_width(shape[-1], source.dtype.bits)
    scratch = cx.new_shared(f"{source.name}_s", shape, source.dtype, swizzled_box_layout(shape, source.dtype.bits, width))

    def move(p: tuple[Any, ...]) -> Stmt:
        value = load(source, region.at(*p[turn]))
        return Store(scratch, p, to_tf32(value) if is_tf32(op) else value)

    cx.prepend(cx.parallel(shape, move, span=op.span))
    return None, _Matrix(cx, Region(scratch, (const(0), const(0)), shape, span=region.span), major if turn.step == 1 else "k")


def _rounded(cx: Any, local: Buffer) -> Buffer:
    """A copy of float32 registers, rounded to tf32."""
    out: Buffer = cx.new_local(f"{local.name}_r", int(local.shape[0]), "tfloat32")  # PTX asks for registers of type b32
    cx.prepend(each_register(local, lambda r: Store(out, (r,), cast(to_tf32(load(local, (r,))), out.dtype))))
    return out


def to_tf32(value: Expr) -> Expr:
    """A value of type float32 or tfloat32 rounded to tf32, in its own type."""
    return cast(call("to_tf32", (cast(value, "float32"),), "float32"), value.dtype)
