"""Programs whose accesses become vectors, in every combination of shape, place, element type and threads that matters to the
width of a vector, and what they compute, in NumPy.

A form says how a tile is filled (`fill`), how it leaves (`leave`), its size, the tensors it lies in and the threads.  All of
it is drawn independently of the others from a seed and the form's number.  Values are small integers, which every type
involved holds exactly.  Tensors are compared as a whole: what is written outside the tile counts as wrong too.
vector_sweep.py runs many of them.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from backends import (AGREES, FAILED, NARROW, REFUSED, SIMULATED, _execute, _from_device, _to_device, compare, judged, laid_out,
                      numpy_type)

import tilelang.language as T
from tilelang.target.instructions import ATOMIC_DTYPES

SMALL = ("int8", "uint8", "float8_e4m3fn", "float8_e5m2")
TYPES = (*SMALL * 3, "float16", "bfloat16", "int16", "uint16", "float32", "int32", "float64", "int64", "int4", "uint4")
OPERANDS = ("float16", "bfloat16", "int8", "float8_e4m3fn", "float32")
PLACES = ("copy", "cast", "shared", "within")  # ways to leave that may copy the first rows only
SUMS = ("rows", "columns", "line", "scanned")  # ways to leave with sums
# What may be refused, and why: a schedule or an instruction cannot be chosen for the tile.
MAY_BE_REFUSED = ("shared-memory",)


@dataclass(frozen=True)
class Form:
    """One program.

    fill: gemm (accumulators) | registers (of a GEMM with A in registers) | parallel (T.Parallel) | vectorized (T.vectorized) |
    fragment, shared, staged, asynchronous, within, line, view (copied from global memory: to registers, to shared memory, to
    the stages of a pipeline, by T.async_copy, into the middle of a wider shared tile, as one row, and read as another type) |
    direct (no tile: from tensor to tensor in T.Parallel).
    leave: copy | cast (through a fragment of the tensor's type) | shared (through a shared tile) | within (the middle of a
    wider one) | elements (T.Parallel) | vectorized (T.vectorized) | atomic, atomic_shared, atomic_tile (T.atomic_add of
    registers to the tensor, of registers to a shared tile, of a shared tile to the tensor) | transposed | filled (T.fill of
    the tensor's region) | rows (the sums of the rows) | columns (of the columns) | line (those through a shared row) |
    scanned (T.cumsum along the rows).
    rows, columns: of the tile.  depth: K of the GEMM.  blocks: tiles side by side.  row, column: where the first tile starts.
    more_rows, more_columns: of the tensor behind the last tile; negative: the tensor cuts it.
    first: rows that are copied; 0: all.  counted: their number is known at run time only.  placed: so is the column.
    source: columns in front of the tile and behind it in the tensor that is read.  rank: dimensions of the tensor.
    margin: columns in front of the middle of a wider shared tile, and behind it.  lanes: of T.vectorized.
    symbolic: the tensors' widths are known at run time only; assumed: as a multiple of this.  gap: elements between rows.
    shift: elements of the storage in front of the tensors (CPU and GPU; the simulators assume that alignment).
    """

    fill: str
    leave: str
    rows: int
    columns: int
    threads: int
    operand: str
    inside: str
    dtype: str
    depth: int = 32
    stages: int = 1
    policy: str = "Square"
    blocks: int = 1
    row: int = 0
    column: int = 0
    more_rows: int = 0
    more_columns: int = 0
    first: int = 0
    counted: bool = False
    placed: bool = False
    source: tuple[int, int] = (0, 0)
    rank: int = 2
    margin: tuple[int, int] = (0, 0)
    lanes: int = 2
    symbolic: bool = False
    assumed: int = 1
    gap: int = 0
    shift: int = 0

    @property
    def tile(self) -> tuple[int, int]:
        """Rows and columns of what one block writes."""
        rows, columns = self.first or self.rows, self.columns
        one = {"transposed": (columns, rows), "rows": (1, rows), "columns": (1, columns), "line": (1, columns)}
        return one.get(self.leave, (rows, columns))

    @property
    def tensor(self) -> tuple[int, ...]:
        """Shape of the tensor that is written."""
        rows, columns = self.tile
        shape = self.row + rows + self.more_rows, self.column + columns * self.blocks + self.more_columns
        return shape if self.rank == 2 else (3, *shape)

    @property
    def steps(self) -> int:
        """Iterations of the loop that fills the tile."""
        return 2 if self.fill == "staged" or self.of_gemm and self.stages > 1 else 1

    @property
    def of_gemm(self) -> bool:
        return self.fill in ("gemm", "registers")

    @property
    def sources(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Shapes of the tensors that are read."""
        before, behind = self.source
        if self.of_gemm:
            width = before + self.steps * self.depth + behind
            return (self.rows, width), (self.columns * self.blocks, width)
        return (self.rows * self.steps, before + self.read * self.blocks + behind), (1, 2)

    @property
    def read(self) -> int:
        """Columns of the source that a tile is made of."""
        return self.columns * np.dtype(self.inside).itemsize // np.dtype(self.operand).itemsize if self.fill == "view" else \
            self.columns


FILLS = ("gemm", "registers", "parallel", "vectorized", "fragment", "shared", "staged", "asynchronous", "within", "line",
         "view", "direct")
LEAVES = ("copy", "cast", "shared", "within", "elements", "vectorized", "atomic", "atomic_shared", "atomic_tile", "transposed",
          "filled", "rows", "columns", "line", "scanned")


def draw(seed: int, number: int) -> Form:
    """The form of a number; the same for the same seed."""
    r = random.Random(f"{seed}/{number}")
    fill = r.choice(("gemm",) * 7 + FILLS)
    leave = r.choice(("copy",) * 6 + LEAVES)
    operand = r.choice(OPERANDS)
    wide = "int32" if operand == "int8" else "float32"
    dtype = r.choice(TYPES)
    if fill in ("gemm", "registers"):
        threads, inside = r.choice((32, 64, 128, 128, 128, 256, 256, 256, 384, 512)), wide
        rows = threads // 2 if r.random() < 0.4 else r.choice((16, 32, 48, 64, 64, 64, 80, 96, 128, 128, 192))
        columns = 8 * r.randint(1, 20) if r.random() < 0.85 else r.choice((16, 32, 64, 128, 136, 192, 256))
        while rows * columns > 64 * threads:
            rows, columns = (rows // 2, columns) if rows > 16 and r.random() < 0.5 else (rows, max(8, columns // 16 * 8))
    else:
        threads = r.choice((32, 64, 96, 128, 128, 128, 256, 256, 384, 512))
        rows = r.choice((1, 2, 3, 4, 7, 8, 12, 16, 17, 32, 33, 64, 96))
        columns = r.choice((r.randint(1, 160), 2 * r.randint(1, 80), 4 * r.randint(1, 40), 8 * r.randint(1, 24), 64, 128))
        inside = dtype if r.random() < 0.6 else r.choice(("int32", "float32", "float16", *SMALL))
        operand = inside if r.random() < 0.7 else r.choice((*SMALL, "float16", "int32", "float32", "int4"))
    step = r.choice((1, 2, 4, 8, 16, 16))
    some = [step * r.randint(0, 4) for _ in range(4)]
    form = Form(fill, leave, rows, columns, threads, operand, inside, dtype,
                depth=r.choice((16, 32, 32, 64)), stages=r.choice((0, 1, 2, 3)),
                policy=r.choice(("Square", "FullRow", "FullCol")), blocks=r.choice((1, 1, 1, 2, 3)),
                row=r.choice((0, 0, 1, 3, 16)), column=r.choice((0, 0, step * r.randint(0, 5))),
                more_rows=r.choice((0, 0, 1, 5, 16)), more_columns=r.choice((0, 0, step * r.randint(0, 6))),
                placed=r.random() < 0.1, source=r.choice(((0, 0), (some[0], 0), (0, some[1]), (some[0], some[1]))),
                rank=r.choice((2, 2, 2, 3)), margin=(some[2], some[3]), lanes=r.choice((2, 4, 8, 16)),
                symbolic=r.random() < 0.15, assumed=r.choice((1, 2, 4, 8, 16)), gap=r.choice((0,) * 8 + (step, 1)),
                shift=r.choice((0,) * 9 + (1, 2, 4)))
    if r.random() < 0.2:
        form = replace(form, first=r.randint(1, rows), counted=r.random() < 0.5)
    if r.random() < 0.15:
        form = replace(form, more_columns=-step * r.randint(0, 3), more_rows=-r.choice((0, 1, 7)))
    return _valid(form, r)


def _valid(f: Form, r: random.Random) -> Form:
    """The form with what no program may have taken out of it."""
    if f.fill == "direct":
        f = replace(f, leave="copy")
    if f.of_gemm and f.operand in ("int8", "float8_e4m3fn"):
        f = replace(f, depth=max(32, f.depth))
    f = _types(f, r)
    narrow = any(t in NARROW for t in (f.dtype, f.operand))
    if narrow:  # whole bytes only
        even = {n: getattr(f, n) // 2 * 2 for n in ("column", "more_columns")}
        f = replace(f, **even, columns=-(-f.columns // 2) * 2, source=(f.source[0] // 2 * 2, f.source[1] // 2 * 2),
                    placed=False, shift=0, gap=0, symbolic=False)
    if f.fill == "vectorized" or f.leave == "vectorized":
        f = replace(f, columns=-(-f.columns // f.lanes) * f.lanes)
    if f.fill == "view":
        f = replace(f, columns=-(-f.columns // 4) * 4)
    if f.leave not in PLACES or f.fill == "direct" or f.dtype in NARROW and f.leave != "shared":
        f = replace(f, first=0, counted=False)
    f = replace(f, first=min(f.first, f.rows))
    in_shared = f.leave in (*SUMS, "shared", "within", "vectorized", "atomic_shared", "atomic_tile")
    if (in_shared or not f.of_gemm) and f.rows * f.columns > 6144:
        f = replace(f, rows=16 if f.of_gemm else 8, first=0, counted=False)
    least_rows, least_columns, even = 1 - f.tile[0], 1 - min(f.tile[1], 24), 2 if narrow else 1
    f = replace(f, more_rows=max(f.more_rows, least_rows), more_columns=max(f.more_columns, -(-least_columns // even) * even))
    known = [f.tensor[-1] + f.gap, f.sources[0][1] + f.gap]
    return f if all(n % f.assumed == 0 for n in known) else replace(f, assumed=1)


def _types(f: Form, r: random.Random) -> Form:
    """The form with types that fit together and to what is computed."""
    if f.leave in SUMS:
        kind = "int32" if f.operand == "int8" and f.of_gemm else "float32"
        f = replace(f, dtype=kind, inside=kind)
    elif f.leave.startswith("atomic"):
        f = replace(f, dtype=r.choice(ATOMIC_DTYPES))
    elif f.leave in ("transposed", "vectorized") and f.of_gemm:
        f = replace(f, dtype=f.inside)
    if f.fill == "view":
        kind = r.choice(("int8", "int16", "int32"))
        f = replace(f, operand=r.choice(("int8", "int16", "int32")), inside=kind, dtype=kind)
        if f.leave in (*SUMS, "atomic", "atomic_shared", "atomic_tile"):
            f = replace(f, leave="copy")
    if f.inside in NARROW or f.dtype in NARROW and f.leave not in ("copy", "cast", "shared", "filled"):
        f = replace(f, inside="int8" if f.inside in NARROW else f.inside, dtype="int8" if f.dtype in NARROW else f.dtype)
    if f.operand in NARROW and f.fill in ("within", "staged", "asynchronous", "line", "vectorized"):
        f = replace(f, operand="int8")
    if f.dtype in NARROW and (f.fill == "direct" or f.leave == "filled"):
        f = replace(f, dtype="int8")
    if f.leave in ("transposed", "vectorized"):
        f = replace(f, dtype=f.inside)
    return f


# ---- the program ---------------------------------------------------------------------------------------------------------


@T.macro
def fill_gemm(f, A, B, C, bx, x):
    SA = T.alloc_shared((f.rows, f.depth), f.operand)
    SB = T.alloc_shared((f.columns, f.depth), f.operand)
    T.clear(C)
    for ko in T.Pipelined(f.steps, num_stages=f.stages):
        k = f.source[0] + ko * f.depth
        T.copy(A[0:f.rows, k:k + f.depth], SA)
        T.copy(B[bx * f.columns:(bx + 1) * f.columns, k:k + f.depth], SB)
        T.gemm(SA, SB, C, transpose_B=True, policy=getattr(T.GemmWarpPolicy, f.policy))


@T.macro
def fill_registers(f, A, B, C, bx, x):
    RA = T.alloc_fragment((f.rows, f.depth), f.operand)
    SB = T.alloc_shared((f.columns, f.depth), f.operand)
    T.clear(C)
    for ko in T.serial(f.steps):
        k = f.source[0] + ko * f.depth
        T.copy(A[0:f.rows, k:k + f.depth], RA)
        T.copy(B[bx * f.columns:(bx + 1) * f.columns, k:k + f.depth], SB)
        T.gemm(RA, SB, C, transpose_B=True, policy=getattr(T.GemmWarpPolicy, f.policy))


@T.macro
def fill_parallel(f, A, B, C, bx, x):
    for i, j in T.Parallel(f.rows, f.columns):
        C[i, j] = T.cast(A[i, x + j], f.inside)


@T.macro
def fill_vectorized(f, A, B, C, bx, x):
    S = T.alloc_shared((f.rows, f.columns), f.inside)
    for i, j in T.Parallel(f.rows, f.columns // f.lanes):
        for v in T.vectorized(f.lanes):
            S[i, j * f.lanes + v] = T.cast(A[i, x + j * f.lanes + v], f.inside)
    T.copy(S, C)


@T.macro
def fill_fragment(f, A, B, C, bx, x):
    T.copy(A[0:f.rows, x:x + f.columns], C)


@T.macro
def fill_shared(f, A, B, C, bx, x):
    S = T.alloc_shared((f.rows, f.columns), f.operand)
    T.copy(A[0:f.rows, x:x + f.columns], S)
    T.copy(S, C)


@T.macro
def fill_staged(f, A, B, C, bx, x):
    S = T.alloc_shared((f.rows, f.columns), f.operand)
    for ko in T.Pipelined(f.steps, num_stages=f.stages):
        T.copy(A[ko * f.rows:(ko + 1) * f.rows, x:x + f.columns], S)
        for i, j in T.Parallel(f.rows, f.columns):
            C[i, j] = T.cast(S[i, j], f.inside)


@T.macro
def fill_asynchronous(f, A, B, C, bx, x):
    S = T.alloc_shared((f.rows, f.columns), f.operand)
    T.async_copy(A[0:f.rows, x:x + f.columns], S)
    T.ptx_wait_group(0)
    T.copy(S, C)


@T.macro
def fill_within(f, A, B, C, bx, x):
    S = T.alloc_shared((f.rows + 1, f.margin[0] + f.columns + f.margin[1]), f.operand)
    T.copy(A[0:f.rows, x:x + f.columns], S[1:f.rows + 1, f.margin[0]:f.margin[0] + f.columns])
    T.copy(S[1:f.rows + 1, f.margin[0]:f.margin[0] + f.columns], C)


@T.macro
def fill_line(f, A, B, C, bx, x):
    S = T.alloc_shared((f.columns,), f.operand)
    T.copy(A[f.rows - 1, x:x + f.columns], S)
    for i, j in T.Parallel(f.rows, f.columns):
        C[i, j] = T.cast(S[j], f.inside)


@T.macro
def fill_view(f, A, B, C, bx, x):
    S = T.alloc_shared((f.rows, f.read), f.operand)
    T.copy(A[0:f.rows, x:x + f.read], S)
    V = T.view(S, (f.rows, f.columns), dtype=f.inside)
    T.copy(V, C)


@T.macro
def leave_copy(f, C, D, at, count):
    T.copy(C[0:count, :], D[region(f, at, count, f.columns)])


@T.macro
def leave_cast(f, C, D, at, count):
    E = T.alloc_fragment((f.rows, f.columns), f.dtype)
    T.copy(C, E)
    T.copy(E[0:count, :], D[region(f, at, count, f.columns)])


@T.macro
def leave_shared(f, C, D, at, count):
    S = T.alloc_shared((f.rows, f.columns), f.dtype)
    T.copy(C, S)
    T.copy(S[0:count, :], D[region(f, at, count, f.columns)])


@T.macro
def leave_within(f, C, D, at, count):
    S = T.alloc_shared((f.rows + 1, f.margin[0] + f.columns + f.margin[1]), f.dtype)
    T.copy(C, S[1:f.rows + 1, f.margin[0]:f.margin[0] + f.columns])
    T.copy(S[1:count + 1, f.margin[0]:f.margin[0] + f.columns], D[region(f, at, count, f.columns)])


@T.macro
def leave_elements(f, C, D, at, count):
    for i, j in T.Parallel(f.rows, f.columns):
        D[element(f, at, i, j)] = T.cast(C[i, j], f.dtype)


@T.macro
def leave_vectorized(f, C, D, at, count):
    S = T.alloc_shared((f.rows, f.columns), f.dtype)
    T.copy(C, S)
    for i, j in T.Parallel(f.rows, f.columns // f.lanes):
        for v in T.vectorized(f.lanes):
            D[element(f, at, i, j * f.lanes + v)] = S[i, j * f.lanes + v]


@T.macro
def leave_atomic(f, C, D, at, count):
    T.atomic_add(D[region(f, at, f.rows, f.columns)], C)


@T.macro
def leave_atomic_shared(f, C, D, at, count):
    S = T.alloc_shared((f.rows, f.columns), f.dtype)
    T.copy(D[region(f, at, f.rows, f.columns)], S)
    T.atomic_add(S, C)
    T.copy(S, D[region(f, at, f.rows, f.columns)])


@T.macro
def leave_atomic_tile(f, C, D, at, count):
    S = T.alloc_shared((f.rows, f.columns), f.dtype)
    T.copy(C, S)
    T.atomic_add(D[region(f, at, f.rows, f.columns)], S)


@T.macro
def leave_transposed(f, C, D, at, count):
    E = T.alloc_fragment((f.columns, f.rows), f.dtype)
    T.transpose(C, E)
    T.copy(E, D[region(f, at, f.columns, f.rows)])


@T.macro
def leave_filled(f, C, D, at, count):
    T.fill(D[region(f, at, f.rows, f.columns)], 3)


@T.macro
def leave_rows(f, C, D, at, count):
    V = T.alloc_fragment((f.rows,), f.dtype)
    T.reduce_sum(C, V, dim=1)
    T.copy(V, D[row_region(f, at, f.rows)])


@T.macro
def leave_columns(f, C, D, at, count):
    V = T.alloc_fragment((f.columns,), f.dtype)
    T.reduce_sum(C, V, dim=0)
    T.copy(V, D[row_region(f, at, f.columns)])


@T.macro
def leave_line(f, C, D, at, count):
    S = T.alloc_shared((f.rows, f.columns), f.dtype)
    V = T.alloc_shared((f.columns,), f.dtype)
    T.copy(C, S)
    T.reduce_sum(S, V, dim=0)
    T.copy(V, D[row_region(f, at, f.columns)])


@T.macro
def leave_scanned(f, C, D, at, count):
    S = T.alloc_shared((f.rows, f.columns), f.dtype)
    T.copy(C, S)
    T.cumsum(S, dim=1)
    T.copy(S, D[region(f, at, f.rows, f.columns)])


def region(f: Form, x: Any, rows: Any, columns: Any) -> tuple[Any, ...]:
    return (*(1,) * (f.rank - 2), slice(f.row, f.row + rows), slice(x, x + columns))


def row_region(f: Form, x: Any, columns: int) -> tuple[Any, ...]:
    return (*(1,) * (f.rank - 2), f.row, slice(x, x + columns))


def element(f: Form, x: Any, i: Any, j: Any) -> tuple[Any, ...]:
    return (*(1,) * (f.rank - 2), f.row + i, x + j)


def _typed(shape: tuple[int, ...], dtype: str, width: str, f: Form) -> Any:
    """The type of a parameter, with a symbolic width and with a gap between rows where the form has them."""
    last = T.dynamic(width) if f.symbolic else shape[-1]
    sizes = *shape[:-1], last
    if not f.gap:
        return T.Tensor(sizes, dtype)
    strides, step = [1], last + f.gap
    for n in reversed(shape[1:-1]):
        strides.insert(0, step)
        step = step * n
    return T.StridedTensor(sizes, (step, *strides), dtype)


def program(f: Form) -> Any:
    """The PrimFunc of a form.  Tensors: two that are read, the number of rows and the column, the one that is written."""
    fill, leave = (globals().get(n) for n in (f"fill_{f.fill}", f"leave_{f.leave}"))
    step, many = f.tile[1], f.first or f.rows
    source, target = _typed(f.sources[0], f.operand, "v", f), _typed(f.tensor, f.dtype, "w", f)

    @T.prim_func
    def kernel(A: source, B: T.Tensor(f.sources[1], f.operand), P: T.Tensor((2,), "int32"), D: target):
        T.assume((A.shape[1] + f.gap) % f.assumed == 0)
        T.assume((D.shape[f.rank - 1] + f.gap) % f.assumed == 0)
        with T.Kernel(f.blocks, threads=f.threads) as bx:
            x = f.source[0] + bx * f.read
            y = bx * step + (P[1] if f.placed else f.column)
            count = P[0] if f.counted else many
            if f.fill == "direct":
                for i, j in T.Parallel(f.rows, f.columns):
                    D[element(f, y, i, j)] = T.cast(A[i, x + j], f.dtype)
            else:
                C = T.alloc_fragment((f.rows, f.columns), f.inside)
                fill(f, A, B, C, bx, x)
                leave(f, C, D, y, count)

    return kernel


# ---- its meaning in NumPy ------------------------------------------------------------------------------------------------


def expected(f: Form, seed: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """(arguments of a call, what they hold after it), as integers of int64; types of four bits not yet packed."""
    r = np.random.default_rng([seed, f.rows, f.columns])
    low = 0 if any(t.startswith("u") for t in (f.dtype, f.inside, f.operand)) else -1
    a_shape, b_shape = f.sources
    before, many = f.source[0], f.first or f.rows
    if f.of_gemm:
        a, b = (r.integers(low, 2, shape) for shape in (a_shape, b_shape))
        a[:, r.integers(0, a_shape[1], a_shape[1] // 2)] = 0  # sums stay small
        used = slice(before, before + f.steps * f.depth)
        full = a[:, used] @ b[:, used].T
    else:
        a, b = r.integers(low * 7, 7, a_shape), np.zeros(b_shape, np.int64)
        full = a[-f.rows:, before:before + f.read * f.blocks]
        if f.fill == "line":
            full = np.repeat(full[-1:], f.rows, 0)
        if f.fill == "view":
            full = np.ascontiguousarray(full.astype(f.operand)).view(f.inside).astype(np.int64)
    d = r.integers(0, 5, f.tensor)
    out = d.copy()
    plane = out if f.rank == 2 else out[1]
    rows, columns = f.tile
    for bx in range(f.blocks):
        tile = full[:many, bx * f.columns:(bx + 1) * f.columns]
        y, x = f.row, f.column + bx * columns
        at = plane[y:y + rows, x:x + columns]
        at[...] = _left(f, tile, at)
    given = [a, b, np.array([many, f.column])]
    return [*given, d], [*given, out]


def _left(f: Form, tile: np.ndarray, at: np.ndarray) -> Any:
    """What a tile leaves where `at` stood."""
    if f.leave == "filled":
        return 3
    tile = {"transposed": lambda: tile.T, "rows": lambda: tile.sum(1)[None], "columns": lambda: tile.sum(0)[None],
            "line": lambda: tile.sum(0)[None], "scanned": lambda: tile.cumsum(1)}.get(f.leave, lambda: tile)()
    tile = tile[:at.shape[0], :at.shape[1]]
    return at + tile if f.leave.startswith("atomic") else tile


def arrays(f: Form, values: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The arguments in their types, packed and laid out as the program has them."""
    out = [_as(v, t) for v, t in zip(values, (f.operand, f.operand, "int32", f.dtype))]
    for k in (0, 3) if f.gap else ():
        shape = out[k].shape
        strides, step = [1], shape[-1] + f.gap
        for n in reversed(shape[:-1]):
            strides.insert(0, step)
            step *= n
        out[k] = laid_out(out[k], strides)
    return out


def _as(v: np.ndarray, name: str) -> np.ndarray:
    if name in NARROW:
        if v.shape[-1] % 2:
            v = np.concatenate([v, np.zeros_like(v[..., :1])], -1)
        low = v.astype(np.uint8) & 15
        return (low[..., 0::2] | low[..., 1::2] << 4).view(np.int8)
    return v.astype(np.float64 if "float" in name else np.int64).astype(numpy_type(name))


# ---- one form ------------------------------------------------------------------------------------------------------------


def outcomes(f: Form, executions: Sequence[str], seed: int = 0) -> dict[str, tuple[str, str]]:
    """(status, text) of each execution; "trace": the program itself is rejected."""
    before, after = (arrays(f, v) for v in expected(f, seed))
    try:
        prim = program(f)
    except Exception as e:
        return {"trace": _said(e, False)}
    tensors = [(b.name, b.shape, str(b.dtype)) for b in prim.buffer_map.values()]
    out = {}
    for name in executions:
        running = [False]
        try:
            if name in (*SIMULATED, "cubin"):
                configs = {"tl.global_alignment": 1} if f.shift else {}
                got = _execute(name, prim.func, prim, before, tensors, configs, running)
            else:
                got = _called(name, prim, before, f.shift, running)
            found = compare(tensors, got, after)
            out[name] = (found.status, found.text)
        except Exception as e:
            out[name] = _said(e, running[0])
    return out


def _called(name: str, prim: Any, args: Sequence[np.ndarray], shift: int, running: list[bool]) -> list[np.ndarray]:
    """The arrays after a call of the compiled kernel with tensors that start `shift` elements behind an aligned address."""
    import tilelang

    kernel = tilelang.compile(prim, target=name)
    running[0] = True
    sizes = [a.size if a.flags.c_contiguous or a.base is None else a.base.size for a in args]
    flats = [np.zeros(shift + n, a.dtype) for a, n in zip(args, sizes)]
    windows = [np.ndarray(a.shape, a.dtype, flat, shift * a.itemsize, a.strides) for a, flat in zip(args, flats)]
    for w, a in zip(windows, args):
        w[...] = a
    if name == "cpu":
        kernel(*windows)
    else:
        import torch

        moved = [_to_device(flat, torch) for flat in flats]
        kernel(*(torch.as_strided(m, a.shape, [s // a.itemsize for s in a.strides], shift) for m, a in zip(moved, args)))
        torch.cuda.synchronize()
        for flat, m in zip(flats, moved):
            flat[...] = _from_device(m, flat.dtype)
    out = [w.copy() for w in windows]
    for w, flat in zip(windows, flats):
        w[...] = np.zeros((), w.dtype)
        assert not flat.view(np.uint8).any(), "written in front of a tensor or between its rows"
    return out


def _said(e: BaseException, running: bool) -> tuple[str, str]:
    o = judged(e, running)
    return (FAILED if o.status == REFUSED and o.kind not in MAY_BE_REFUSED else o.status), f"{o.kind}: {o.text}"


__all__ = ["AGREES", "FAILED", "Form", "draw", "expected", "outcomes", "program"]
