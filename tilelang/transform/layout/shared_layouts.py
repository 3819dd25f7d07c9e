"""Chooses the layout of a shared buffer: the candidate whose accesses need the fewest transactions.

Each access is reduced to samples: the elements that the 32 lanes of one warp touch at once.  The cost of a candidate is
counted exactly on these samples (banks of 4 bytes, transactions of 128 bytes), so "free of bank conflicts" is computed and
not assumed.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from tilelang.arith import Analyzer
from tilelang.ir import Buffer, Expr, Load, Node, Parallel, Store, Var, dtype, walk, FRAGMENT, GLOBAL, SHARED
from tilelang.ir.record import record
from tilelang.layout import Fragment, Layout, linear_layout, padded_layout, swizzled_layout
from tilelang.layout.mode import evaluate_index
from tilelang.ops import Copy, Gemm, Transpose
from tilelang.ops.ldmatrix import in_columns_of_bytes, in_tiles_of_bytes
from tilelang.ops.pairing import iteration_space, matched_indices
from tilelang.ops.gemm.select import row_of_steps
from tilelang.target.banks import Sample, cost_of, lane_groups, least_cost
from tilelang.target.mma import row as row_of
from tilelang.target.wgmma import WGMMA_ROWS

from ..analysis.vectorize import ANYWHERE, MAX_BYTES, Widths, lane_dimension, power_of_two_in, stride_along


@record
class Access:
    """Uses of a shared buffer by one statement.

    indices: in terms of vars, which run over extents.  partition: the fragment buffer or Parallel whose layout distributes the
    points over threads; None when the threads take them cyclically, width consecutive points along lane_dim at a time.
    matrix: rows of 16 bytes read by ldmatrix instead.
    """

    buffer: Buffer
    vars: tuple[Var, ...]
    extents: tuple[int, ...]
    indices: tuple[Expr, ...]
    partition: Any
    lane_dim: int
    width: int
    matrix: bool = False
    instruction: Fragment | None = None


def memory_accesses(s: Node, analyzer: Analyzer) -> list[Access]:
    """The accesses of a statement to shared memory (those of static extent)."""
    if isinstance(s, Gemm):
        return _operand_accesses(s)
    if isinstance(s, Copy):
        vars, extents, sides = copy_loops(s)
        frag = next((b for b, _ in sides if b.scope_name == FRAGMENT), None)
        return _loop_accesses(vars, extents, sides, frag, analyzer)
    if isinstance(s, Transpose) and all(isinstance(_static(e), int) for e in s.space):
        vars = tuple(Var(f"c{k}", dtype("int32")) for k in range(len(s.space)))
        sides = list(zip((s.dst.buffer, s.src.buffer), s.places(vars)))
        frag = next((b for b, _ in sides if b.scope_name == FRAGMENT), None)
        out = _loop_accesses(vars, tuple(_static(e) for e in s.space), sides, frag, analyzer)
        return [replace(x, vars=vars[-2:] if x.buffer is s.dst.buffer else vars[:-3:-1], matrix=True) for x in out] if (
            in_tiles_of_bytes(s.src, s.dst)) else out
    if isinstance(s, Parallel):
        sides = [(x.buffer, x.indices) for x in walk(s.body, Load, Store)]
        return _loop_accesses(s.vars, tuple(_static(n) for n in s.extents), sides, s, analyzer)
    return []


def _static(n: Any) -> Any:
    return int(n.value) if isinstance(n, Expr) and hasattr(n, "value") else n


def copy_loops(s: Copy) -> tuple[tuple[Var, ...], tuple[Any, ...], list[tuple[Buffer, tuple[Expr, ...]]]]:
    """A copy as a loop nest: variables, extents and both accesses."""
    extents, *dims = iteration_space(s.dst, s.src)
    vars = tuple(Var(f"c{k}", dtype("int32")) for k in range(len(extents)))
    return vars, extents, [(r.buffer, matched_indices(r, ds, vars)) for r, ds in zip((s.src, s.dst), reversed(dims))]


def _loop_accesses(vars: tuple[Var, ...], extents: tuple[Any, ...], sides: list[tuple[Buffer, tuple[Expr, ...]]],
                   partition: Any, analyzer: Analyzer) -> list[Access]:
    shared = [(b, i) for b, i in sides if b.scope_name in SHARED]
    if not shared or not all(isinstance(n, int) for n in extents):
        return []
    lane_dim, width = lane_dimension(sides, vars, extents, lambda b, at, d, limit: (
        (w := contiguous_width(b, at, vars[d], limit, analyzer)) > 0, w))
    return [Access(b, vars, extents, i, partition, lane_dim, width) for b, i in shared]


_WIDTHS = Widths(lambda b: None)


def contiguous_width(b: Buffer, indices: tuple[Expr, ...], var: Var, limit: int, analyzer: Analyzer, loose: int = 0) -> int:
    """Vector width that the alignment of an access allows along var; 0 when it is not contiguous along var.

    For a shared buffer, whose layout is still to be chosen, the width is `limit`.  loose: see Widths.width.
    """
    if not indices or stride_along(indices[-1], var, analyzer) != 1 or \
            any(stride_along(i, var, analyzer) != 0 for i in indices[:-1]):
        return 0
    if b.scope_name != GLOBAL:
        return max(1, min(limit, MAX_BYTES * 8 // (b.dtype.bits * b.dtype.lanes)))
    return _WIDTHS.width(b, indices, var, limit, analyzer, {}, loose)


def vector_elements(b: Buffer, ops: list[Any], loops: list[Parallel], analyzer: Analyzer) -> tuple[int, int]:
    """(dimension, elements) of a fragment that a thread should hold consecutively, by its copies from and to memory.

    Without such copies: the last dimension and 16 bytes.
    """
    votes: dict[tuple[int, int], int] = {}
    nests = [copy_loops(op) for op in ops if isinstance(op, Copy)]
    stores = [(vars, extents, sides[1:]) for vars, extents, sides in nests]
    for loop in loops:
        extents = tuple(_static(n) for n in loop.extents)
        nests.append((loop.vars, extents, [(x.buffer, x.indices) for x in walk(loop.body, Load, Store)]))
        stores.append((loop.vars, extents, [(x.buffer, x.indices) for x in walk(loop.body, Store)]))
    # Elements that are stored one by one are best stored by neighbouring threads, so they are loaded like that too.
    single = any(x.scope_name == GLOBAL and n != 1 and contiguous_width(x, at, v, MAX_BYTES, analyzer) == 1
                 for vars, extents, sides in stores for x, at in sides for v, n in zip(vars, extents))
    for vars, extents, sides in nests:
        if any(x is b for x, _ in sides):
            _vote(b, vars, extents, sides, analyzer, votes, 0 if single else ANYWHERE)
    if votes:
        return max(votes, key=lambda k: (votes[k], k[1]))
    last = max(0, len(b.shape) - 1)
    return last, power_of_two_in(b.shape[-1] if b.shape else 1, max(1, MAX_BYTES * 8 // (b.dtype.bits * b.dtype.lanes)))


def _vote(b: Buffer, vars: tuple[Var, ...], extents: tuple[Any, ...], sides: list[tuple[Buffer, tuple[Expr, ...]]],
          analyzer: Analyzer, votes: dict[tuple[int, int], int], loose: int) -> None:
    own = next(i for x, i in sides if x is b)
    for x, indices in sides:
        if x.scope_name != GLOBAL and not x.scope_name.startswith("shared"):
            continue
        for k, v in enumerate(vars):
            at = [d for d, i in enumerate(own) if stride_along(i, v, analyzer) == 1]
            if len(at) != 1 or not isinstance(extents[k], int):
                continue
            limit = power_of_two_in(extents[k], MAX_BYTES * 8 // min(128, x.dtype.bits * x.dtype.lanes))
            w = contiguous_width(x, indices, v, limit, analyzer, loose)
            if w:
                key = (at[0], w)
                votes[key] = votes.get(key, 0) + (4 if x.scope_name == GLOBAL else 1)


# ---- GEMM operands --------------------------------------------------------------------------------------------------


def _operand_accesses(op: Gemm) -> list[Access]:
    if op.plan.instruction in WGMMA_ROWS or op.sparsity > 1:  # in swizzle atoms; expanded where it is lowered
        return []
    row = row_of(op.plan.instruction)
    out: list[Access] = []
    if row is None:
        return _simt_accesses(op)
    row = row_of_steps(op, row)
    first = row.of_addresses() if op.plan.transposed else (row.a, row.b)  # with K outermost
    for region, frag, transposed, k_last in (
            (op.a, first[0] if op.transpose_a else row.a, op.transpose_a, not op.transpose_a),
            (op.b, row.b if op.transpose_b else first[1], op.transpose_b, op.transpose_b)):
        if region.buffer.scope_name not in SHARED:
            continue
        vars = tuple(Var(f"c{k}", dtype("int32")) for k in range(2))
        # ldmatrix moves 16-bit pairs, so its transposed form (.trans) is right for 16-bit elements only.
        bits = region.dtype.bits
        matrix = not row.run and (bits == 16 or (k_last and bits in (8, 32)))
        out.append(Access(region.buffer, vars, tuple(region.extents[-2:]), region.at(*vars), None, 1, 1, matrix,
                          frag.permuted((1, 0)) if transposed else frag))
    return out


def _simt_accesses(op: Gemm) -> list[Access]:
    """Accesses of a GEMM by plain multiply-adds: a thread reads one element of a and b per accumulator element, k by k."""
    if op.c.buffer.scope_name != FRAGMENT:
        return []
    i, j = (Var(n, dtype("int32")) for n in "ij")
    out = []
    for region, v, at in ((op.a, i, -1 if op.transpose_a else -2), (op.b, j, -2 if op.transpose_b else -1)):
        if region.buffer.scope_name in SHARED:
            indices = list(region.mins)
            indices[at] = indices[at] + v
            out.append(Access(region.buffer, (i, j), (op.m, op.n), tuple(indices), op.c.buffer, 1, 1))
    return out


# ---- choice ---------------------------------------------------------------------------------------------------------


def choose_shared_layout(b: Buffer, accesses: list[Access], partition_of: Any, plain: bool, target: Any = None,
                         pads: bool = True) -> Layout:
    """The lowest-cost layout of a shared buffer.

    partition_of(access) -> Fragment | None.  plain: row-major at any cost (the buffer's address is taken, or another view of
    its storage is used).  target: whose banks of shared memory count, None for NVIDIA's.  pads: whether rows may be padded.
    """
    shape, bits = tuple(b.shape), b.dtype.bits * b.dtype.lanes
    linear = linear_layout(shape)
    if plain or len(shape) < 2 or not accesses or bits % 8:
        return linear
    arch, warp = ("", 32) if target is None else (target.arch, target.warp_size)
    samples = [s for a in accesses for s in _samples(a, partition_of(a), bits, warp)]
    best, cost = linear, cost_of(linear, samples, bits, arch)
    if cost == least_cost(samples, bits, arch):
        return linear
    wide = [_swizzle(n, line=256) for n in (16, 32)] if lane_groups(arch, 16)[1] == 64 else []
    for make in (*wide, *_CANDIDATES):
        layout = make(shape, bits)
        if layout is None or layout.size > linear.size and not pads:
            continue
        c = cost_of(layout, samples, bits, arch)
        if c < cost:
            best, cost = layout, c
            if cost == least_cost(samples, bits, arch):
                break
    return best


def _swizzle(chunk_bytes: int, every: int = 0, line: int = 128) -> Any:
    def make(shape: tuple[int, ...], bits: int) -> Layout | None:
        chunk = chunk_bytes * 8 // bits
        return swizzled_layout(shape, bits, chunk_bytes, every, line) if chunk >= 1 and shape[-1] % chunk == 0 else None

    return make


def _pad(nbytes: int) -> Any:
    def make(shape: tuple[int, ...], bits: int) -> Layout | None:
        return padded_layout(shape, nbytes * 8 // bits) if nbytes * 8 >= bits else None

    return make


# In order of preference at equal cost: no extra memory first, wide vectors first.
_CANDIDATES = (_swizzle(16), _swizzle(32), _swizzle(64), *(_swizzle(16, n) for n in (2, 4, 8, 16)), _swizzle(8),
               *(_swizzle(8, n) for n in (2, 4, 8)), _swizzle(4), _pad(16), _pad(32), _pad(4))


def _samples(a: Access, partition: Fragment | None, bits: int, warp: int) -> list[Sample]:
    bytes_ = bits // 8
    total = int(np.prod(a.extents))
    if a.matrix or bits == 8 and partition is not None and partition.ndim == 2 and in_columns_of_bytes(partition):
        chunk = MAX_BYTES // bytes_
        rows = np.arange(8)
        return [_sample(a, (rows, np.full(8, 0)), chunk, total / (8 * chunk), True)]
    if a.instruction is not None:
        last = a.instruction.modes[-1][-1]
        along = last.size if last.to == "register" and a.instruction.threads > 32 else 1
        return _fragment_samples(a, a.instruction, min(along, MAX_BYTES // bytes_), 4, warp)
    if partition is not None:
        return _fragment_samples(a, partition, partition.vector_width, 2, warp)
    lanes = np.arange(warp)
    order = [d for d in range(len(a.extents)) if d != a.lane_dim] + [a.lane_dim]
    sizes = [a.extents[d] // (a.width if d == a.lane_dim else 1) for d in order]
    if int(np.prod(sizes)) < warp:
        lanes = np.arange(int(np.prod(sizes)))
    digits = np.unravel_index(lanes, sizes)
    at: list[Any] = [None] * len(order)
    for d, g in zip(order, digits):
        at[d] = g * a.width if d == a.lane_dim else g
    return _along(a, tuple(at), a.lane_dim, a.width, total / (len(lanes) * a.width))


def _fragment_samples(a: Access, frag: Fragment, vector: int, registers: int, warp: int) -> list[Sample]:
    """Samples of the first registers of the first warp of a fragment's layout."""
    if tuple(frag.shape) != tuple(a.extents) and a.instruction is None:
        return []
    owners, regs = frag.owners()[0].reshape(-1), frag.register_table().reshape(-1)
    first = np.flatnonzero(owners < warp)
    out: list[Sample] = []
    weight = float(np.prod(a.extents)) / (warp * vector)
    step = frag.modes[-1][-1].stride if vector > 1 else 1
    picks = [r for r in range(frag.registers) if r // step % vector == 0][:registers]
    for r in picks:
        flat = first[regs[first] == r]
        if len(flat):
            flat = flat[np.argsort(owners[flat])]
            at = np.unravel_index(flat, frag.shape)
            out += _along(a, tuple(at), len(frag.shape) - 1, vector, weight / len(picks))
    return out


def _along(a: Access, at: tuple[np.ndarray, ...], dim: int, width: int, weight: float) -> list[Sample]:
    """One wide access when the buffer is contiguous along the lanes' dimension, else one per element."""
    if width == 1:
        return [_sample(a, at, 1, weight)]
    probe = _sample(a, at, 1, weight).points
    nxt = _sample(a, tuple(p + 1 if d == dim else p for d, p in enumerate(at)), 1, weight).points
    if all(np.array_equal(q, p) for p, q in zip(probe[:-1], nxt[:-1])) and np.array_equal(nxt[-1], probe[-1] + 1):
        return [_sample(a, at, width, weight)]
    return [_sample(a, tuple(p + v if d == dim else p for d, p in enumerate(at)), 1, weight) for v in range(width)]


def _sample(a: Access, at: tuple[np.ndarray, ...], width: int, weight: float, rigid: bool = False) -> Sample:
    env: dict[Var, Any] = dict(zip(a.vars, at))
    points = []
    for i, n in zip(a.indices, a.buffer.shape):
        points.append(np.clip(np.broadcast_to(_index(i, env), at[0].shape), 0, n - 1))
    return Sample(tuple(points), width, weight, rigid, a.instruction is None)


def _index(e: Expr, env: dict[Var, Any]) -> Any:
    """Value of an index over the lanes; everything else that it depends on is the same for all lanes and taken as 0."""
    full = dict(env)
    for x in walk(e):
        if isinstance(x, Var):
            full.setdefault(x, np.int64(0))
        elif isinstance(x, Load):
            return np.int64(0)
    try:
        return evaluate_index(e, full)
    except ValueError:
        return np.int64(0)
