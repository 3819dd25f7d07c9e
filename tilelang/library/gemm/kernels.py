"""GEMM kernels with one accumulator and with two levels of accumulation.

Each function makes the program of a Form, which holds everything that is fixed at compile time. A, B and C have two
dimensions, or three with a batch in front; bias has n elements; sa and sb are scales (see Form.scaling). Tensors that a form
does not use have one element.

Split-K GEMM: the first launch computes partial sums, the second adds them in order.

Partial sums are stored in W as tiles compute them (Form.partials_shape), so that TMA stores whole tiles. The second launch
finds the places of overlapping tiles and transposes those of swap-AB.

The kernel of grouped GEMM: groups of rows of A, one after another, each multiplied by its own matrix.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from math import ceil, gcd, pi
from typing import Any

import tilelang.language as T

from tilelang.ir import dtype as dtype_of

from .repack import Copies, pad_operands, padded
from .tile import Tile

ACTIVATIONS = ("relu", "gelu", "gelu_tanh", "silu")
_TANH = 2 * (2 / pi)**0.5  # the argument of gelu_tanh's tanh is half of this times x + 0.044715 x^3
# Coefficients of log2(erfc(t / sqrt 2)) / t for t in 0..6, from t^0 on: a weighted least-squares fit that minimises gelu's
# largest error (4e-8).
_LOG_ERFC = (-1.15112698, -0.45904392, -0.0529485829, 0.00767080626, -0.000575799029, -1.27946769e-05, 4.27836858e-06)


@dataclass(frozen=True)
class Form:
    """C = activation(scale * (op(A) @ op(B)) + bias), A of m x k, B of k x n, in `batch` copies (0: no batch dimension).

    types: element types of A, B, C and the accumulator. ta, tb: A is stored (k, m), B (n, k). a_strides, b_strides: of all
    dimensions, in elements; () for contiguous. shared_b: one B for the batch. bias: its type, "" for none. scaling: "" none,
    "tensor" one scale for each of A and B, "block" one for 128 elements of k of a row of A and one for 128 x 128 of B. groups:
    number of groups of a grouped GEMM. open_rows: the kernel takes any m (no batch, A not transposed); the form's m is the one
    that tiles were chosen for.
    """

    m: int
    n: int
    k: int
    types: tuple[str, str, str, str]
    tile: Tile
    batch: int = 0
    ta: bool = False
    tb: bool = False
    a_strides: tuple[int, ...] = ()
    b_strides: tuple[int, ...] = ()
    shared_b: bool = False
    bias: str = ""
    activation: str = ""
    scaling: str = ""
    groups: int = 0
    open_rows: bool = False

    @property
    def rows(self) -> Any:
        """m, or the variable that stands for it. All tensors of a program share it."""
        return T.dynamic("m") if self.open_rows else self.m

    def a(self, m: Any) -> Any:
        """The parameter A with m rows."""
        return _tensor((self.batch, *((self.k, m) if self.ta else (m, self.k))), self.types[0], self.a_strides)

    @property
    def b(self) -> Any:
        lead = self.groups or (0 if self.shared_b else self.batch)
        return _tensor((lead, *((self.n, self.k) if self.tb else (self.k, self.n))), self.types[1], self.b_strides)

    def c(self, m: Any) -> Any:
        """The parameter C with m rows."""
        return _tensor((self.batch, m, self.n), self.types[2], ())

    @property
    def bias_vector(self) -> Any:
        return T.Tensor((self.n if self.bias else 1,), self.bias or "float32")

    def sa(self, m: Any) -> Any:
        """The scales of A with m rows."""
        rows = (m, ceil(self.k / 128)) if self.scaling == "block" else (1,)
        return T.Tensor(rows, "float32")

    @property
    def sb(self) -> Any:
        blocks = (ceil(self.n / 128), ceil(self.k / 128)) if self.scaling == "block" else (1,)
        return T.Tensor(blocks, "float32")

    @property
    def partials_shape(self) -> tuple[int, int, int]:
        """The shape of the parameter W of split-K: C for each split.

        With swap-AB or overlapping tiles, W holds whole tiles as they are computed, transposed with swap-AB.
        """
        t, (down, across) = self.tile, (self.n, self.m) if self.tile.swap_ab else (self.m, self.n)
        whole = (ceil(down / t.bm) * t.bm, ceil(across / t.bn) * t.bn) if t.swap_ab or t.overlapping else (down, across)
        return t.splits * max(1, self.batch), *whole

    @property
    def partials(self) -> Any:
        """The parameter W, used by split-K."""
        return T.Tensor(self.partials_shape if self.tile.splits > 1 else (1,), self.types[3])

    def partial_at(self, m: Any, n: Any) -> tuple[Any, Any]:
        """The place in a split of W of the partial sum of C's element (m, n).

        Overlapping tiles have the place that they would have without overlap.
        """
        t, straight, swapped = self.tile, ((m, n), (self.m, self.n)), ((n, m), (self.n, self.m))
        (i, j), (down, across) = swapped if t.swap_ab else straight
        if not t.overlapping:
            return i, j
        return (_shifted_on(i, t.bm, down, self._unit(self.t_left)), _shifted_on(j, t.bn, across, self._unit(not self.t_right)))

    @property
    def t_left(self) -> bool:
        """Whether the left operand of a tile's MMA is stored (k, bm).  With swap-AB that is B."""
        return not self.tb if self.tile.swap_ab else self.ta

    @property
    def t_right(self) -> bool:
        """Whether the right operand of a tile's MMA is stored (bn, k)."""
        return not self.ta if self.tile.swap_ab else self.tb

    @property
    def left_tile(self) -> tuple[int, int]:
        return (self.tile.bk, self.tile.bm) if self.t_left else (self.tile.bm, self.tile.bk)

    @property
    def right_tile(self) -> tuple[int, int]:
        return (self.tile.bn, self.tile.bk) if self.t_right else (self.tile.bk, self.tile.loaded)

    def tiles(self, m: Any) -> tuple[Any, Any]:
        """(number of tiles side by side, number of tiles one below the other)."""
        across, down = (m, self.n) if self.tile.swap_ab else (self.n, m)
        return T.ceildiv(across, self.tile.bn), T.ceildiv(down, self.tile.bm)

    def row(self, by: Any) -> Any:
        """The first row of a tile (a column of C with swap-AB)."""
        return _start(by, self.tile.bm, self.n if self.tile.swap_ab else self.m, self.tile.overlapping, self._unit(self.t_left))

    def column(self, bx: Any) -> Any:
        """The first column of a tile (a row of C with swap-AB)."""
        return _start(bx, self.tile.bn, self.m if self.tile.swap_ab else self.n, self.tile.overlapping,
                      self._unit(not self.t_right))

    def _unit(self, contiguous: bool) -> int:
        """The number of elements that a tile's start is a multiple of: TMA boxes start at multiples of 16 contiguous bytes."""
        return 16 // dtype_of(self.types[0]).bytes if contiguous else 1

    def stored_place(self, bx: Any, by: Any) -> tuple[Any, Any]:
        """The row and column of C where the elements of a tile begin that no earlier tile stores."""
        at = by * self.tile.bm, bx * self.tile.bn
        return at[::-1] if self.tile.swap_ab else at

    def stored(self, tile: Any, bx: Any, by: Any) -> Any:
        """The region of C that a tile stores. An overlapping tile stores its last elements only: one block stores each of C's.

        The region may extend beyond C.
        """
        t = self.tile
        if not t.overlapping:
            return tile
        down, across = by * t.bm - self.row(by), bx * t.bn - self.column(bx)
        if t.swap_ab:
            return tile[across:across + t.bn, down:down + t.bm]
        return tile[down:down + t.bm, across:across + t.bn]

    def columns_of(self, tile: Any) -> Any:
        """The columns that the MMA reads of the right operand's tile, of which more may be loaded."""
        return tile[0:self.tile.bk, 0:self.tile.bn] if self.tile.wide else tile

    def row_tiles(self, m: Any) -> Any:
        """The largest number of row tiles, of all groups and of the rows of no group, of m rows."""
        pieces = min(m, self.groups + 1) if isinstance(m, int) else T.min(m, self.groups + 1)
        return (m - pieces) // self.tile.bm + pieces

    @property
    def steps(self) -> int:
        """Number of steps of the loop over k."""
        return ceil(self.k / self.tile.bk)

    @property
    def result(self) -> str:
        """The type in which the epilogue computes."""
        acc = self.types[3]
        plain = not (self.scaling == "tensor" or self.bias or self.activation)
        return acc if plain or not acc.startswith("int") or self.types[2] == acc else "float32"

    def at_a(self, b: Any, m: Any, k: Any) -> list[Any]:
        """The index of A's element (m, k) of GEMM b of the batch."""
        return [*([b] if self.batch else []), *((k, m) if self.ta else (m, k))]

    def at_b(self, b: Any, k: Any, n: Any) -> list[Any]:
        return [*([b] if self.groups or self.batch and not self.shared_b else []), *((n, k) if self.tb else (k, n))]

    def at_c(self, b: Any, m: Any, n: Any) -> list[Any]:
        return [*([b] if self.batch else []), m, n]

    def left(self, A: Any, B: Any, b: Any, row: Any, k: Any) -> Any:
        """The index in the left operand where a tile begins."""
        return B[self.at_b(b, k, row)] if self.tile.swap_ab else A[self.at_a(b, row, k)]

    def right(self, A: Any, B: Any, b: Any, k: Any, column: Any) -> Any:
        """The index in the right operand where a tile begins."""
        return A[self.at_a(b, column, k)] if self.tile.swap_ab else B[self.at_b(b, k, column)]

    @property
    def finish(self) -> Callable[..., Any]:
        """A function f(x, bias, sa, sb, column) that computes an element of C from the accumulator's element."""

        def scaled(x: Any, bias: Any, sa: Any, sb: Any, column: Any) -> Any:
            x = T.cast(x, self.result)
            if self.scaling == "tensor":
                x = x * (sa[0] * sb[0])
            if self.bias:
                x = x + T.cast(bias[column], self.result)
            return _activated(x, self.activation)

        return scaled

    @property
    def finishes(self) -> bool:
        """Whether the epilogue does more than store."""
        return bool(self.scaling == "tensor" or self.bias or self.activation)


def chosen(values: list[Any], index: Any) -> Any:
    """values[index], for an index that is constant once loops are unrolled."""
    out = values[-1]
    for k in reversed(range(len(values) - 1)):
        out = T.if_then_else(index == k, values[k], out)
    return out


def _start(index: Any, size: int, extent: int, overlapping: bool, unit: int) -> Any:
    """The start of a tile, a multiple of `unit`. If tiles overlap, the last one ends less than `unit` behind the tensor's end.
    """
    if not overlapping or extent <= size or extent % size == 0:
        return index * size
    return T.min(index * size, -(-(extent - size) // unit) * unit)


def _shifted_on(index: Any, size: int, extent: int, unit: int) -> Any:
    """The place of an element in a row of whole tiles, the last of which begins at `_start`."""
    last = (ceil(extent / size) - 1) * size
    by = last - -(-(extent - size) // unit) * unit
    unit = gcd(last, by, 8)  # elements that stay side by side
    return index + T.if_then_else(index // unit >= last // unit, by, 0) if last and by else index


def _tensor(shape: tuple[int, ...], dtype: str, strides: tuple[int, ...]) -> Any:
    shape = shape if shape[0] else shape[1:]
    return T.StridedTensor(shape, strides, dtype) if strides else T.Tensor(shape, dtype)


def _activated(x: Any, name: str) -> Any:
    if name == "relu":
        return T.if_then_else(x < 0, T.cast(0, x.dtype), x)  # a maximum would hide NaN
    if x.dtype == "float64" and name in ("gelu", "gelu_tanh", "silu"):
        return _activated_exactly(x, name)
    if name == "gelu":  # x - x erfc(x / sqrt 2) / 2 with the odd factor of x taken out: half the instructions of erf and 1 / x
        t = T.min(T.abs(x), 6.0)
        power = functools.reduce(lambda p, c: p * t + c, reversed(_LOG_ERFC)) * t
        return T.if_then_else(x < 0, T.cast(0, x.dtype), x) - t * 0.5 * T.fast_exp2(power)
    if name == "gelu_tanh":  # tanh y = 2 / (1 + exp(-2 y)) - 1
        return _times_sigmoid(x, x * (_TANH + _TANH * 0.044715 * (x * x)))
    return _times_sigmoid(x, x) if name == "silu" else x


def _activated_exactly(x: Any, name: str) -> Any:
    """The activation in float64, by exact functions. Constants are written as float64, because the default is float32."""
    def number(value: float) -> Any:
        return T.float64(value)

    if name == "gelu":
        return x * number(0.5) * (number(1.0) + T.erf(x * number(0.5**0.5)))
    if name == "gelu_tanh":
        return x / (number(1.0) + T.exp(-x * (number(_TANH) + number(_TANH * 0.044715) * (x * x))))
    return x / (number(1.0) + T.exp(-x))


def _times_sigmoid(x: Any, y: Any) -> Any:
    """x / (1 + exp(-y)). The error of the fast functions is small beside that of the sum x."""
    return x * T.fast_rcp(1.0 + T.fast_exp2(y * -1.4426950408889634))


@T.macro
def epilogue(f, m, Cf, at, bias, sa, sb, C):
    """The epilogue of a tile: finish Cf and store it to C, which has m rows. at: the block variables."""
    t, finish = f.tile, f.finish
    bx, by, bz = at
    halves = dtype_of(f.types[2]).bits == 16  # stored to shared memory by stmatrix, transposed or not
    if t.swap_ab and not (t.staged or halves):
        for i, j in T.Parallel(t.bm, t.bn):
            if bx * t.bn + j < m and by * t.bm + i < f.n:
                C[f.at_c(bz, bx * t.bn + j, by * t.bm + i)] = T.cast(
                    finish(Cf[i, j], bias, sa, sb, by * t.bm + i), f.types[2])
    else:
        D = Cf if f.result == f.types[3] else T.alloc_fragment((t.bm, t.bn), f.result)
        if f.finishes:
            for i, j in T.Parallel(t.bm, t.bn):
                c = (f.row(by) + i) if t.swap_ab else (f.column(bx) + j)
                D[i, j] = finish(Cf[i, j], bias, sa, sb, c)
        if t.swap_ab:
            E = T.alloc_fragment((t.bn, t.bm), f.result)
            T.transpose(D, E)
        else:
            E = D
        if t.overlapping or t.staged and not halves:  # only some elements are stored, or TMA cannot transpose them
            Cs = T.alloc_shared((t.bn, t.bm) if t.swap_ab else (t.bm, t.bn), f.types[2])
            T.copy(E, Cs)
            T.copy(f.stored(Cs, bx, by), C[f.at_c(bz, *f.stored_place(bx, by))])
        else:
            T.copy(E, C[f.at_c(bz, *f.stored_place(bx, by))])


@T.macro
def main_loop(f, A, B, at, first, steps):
    """The accumulator of a block's tile over `steps` steps of k, from step `first` on.

    at: column and row of the tile, and the GEMM of the batch.
    """
    t = f.tile
    As = T.alloc_shared(f.left_tile, f.types[t.swap_ab])
    Bs = T.alloc_shared(f.right_tile, f.types[not t.swap_ab])
    Cf = T.alloc_fragment((t.bm, t.bn), f.types[3])
    Lf = T.alloc_fragment((t.bm, t.bk), f.types[t.swap_ab]) if t.from_registers else As
    T.use_swizzle(t.panel_size, order=t.order)
    T.clear(Cf)
    for ko in T.Pipelined(steps, num_stages=t.stages):
        T.copy(f.left(A, B, at[2], f.row(at[1]), (first + ko) * t.bk), As)
        T.copy(f.right(A, B, at[2], (first + ko) * t.bk, f.column(at[0])), Bs)
        if t.from_registers:
            for i, j in T.Parallel(t.bm, t.bk):
                Lf[i, j] = As[j, i]
        T.gemm(Lf, f.columns_of(Bs), Cf, transpose_A=f.t_left and not t.from_registers, transpose_B=f.t_right)
    return Cf


def program(name: str, f: Form, m: Any, launch: Callable[..., Any], copies: Copies) -> Any:
    """The program of a Form with m rows that calls launch(A, B, bias, sa, sb, W, C).

    Its parameters are (A, B, bias, sa, sb, C); where operands are copied first or k is split, (A, B, AP, BP, bias, sa, sb, W,
    C), with workspace of any contents: the copies, and partial sums (Form.partials). What is not used has one element.
    """
    if not any(copies) and f.tile.splits == 1:
        def main(A: f.a(m), B: f.b, bias: f.bias_vector, sa: f.sa(m), sb: f.sb, C: f.c(m)):
            launch(A, B, bias, sa, sb, None, C)
    else:
        a, b = (given if r is None else r.source for r, given in zip(copies, (f.a(m), f.b)))
        ap, bp = (T.Tensor((1,), element) if r is None else r.copy for r, element in zip(copies, f.types))

        def main(A: a, B: b, AP: ap, BP: bp, bias: f.bias_vector, sa: f.sa(m), sb: f.sb, W: f.partials, C: f.c(m)):
            if any(copies):
                pad_operands(copies, (A, B), (AP, BP))
            launch(padded(A, AP, copies[0]), padded(B, BP, copies[1]), bias, sa, sb, W, C)

    main.__name__ = f"{name}_padded" if any(copies) else name
    return T.prim_func(main)


def gemm(f: Form, copies: Copies = (None, None)) -> Any:
    """The GEMM with one accumulator; parameters (A, B, bias, sa, sb, C). copies: see `program`."""
    m = f.rows

    @T.macro
    def launch(A, B, bias, sa, sb, W, C):
        with T.Kernel(*f.tiles(m), f.batch or 1, threads=f.tile.threads) as (bx, by, bz):
            Cf = main_loop(f, A, B, (bx, by, bz), 0, f.steps)
            epilogue(f, m, Cf, (bx, by, bz), bias, sa, sb, C)

    return program("matmul", f, m, launch, copies)


def gemm_two_level(f: Form, copies: Copies = (None, None)) -> Any:
    """The GEMM with two accumulators; parameters as gemm's.

    Partial sums over 128 elements of k, scaled with block scaling, are added to the second accumulator (accumulator promotion).
    """
    t, m = f.tile, f.rows
    width = gcd(t.bn, 128) if f.scaling == "block" else t.bn  # columns that lie in one scale block of 128
    chunks, last = t.bn // width, ceil(f.n / 128) - 1

    @T.macro
    def launch(A, B, bias, sa, sb, W, C):
        with T.Kernel(*f.tiles(m), f.batch or 1, threads=t.threads) as (bx, by, bz):
            As = T.alloc_shared(f.left_tile, f.types[t.swap_ab])
            Bs = T.alloc_shared(f.right_tile, f.types[not t.swap_ab])
            part = T.alloc_fragment((t.bm, t.bn), "float32")
            Cf = T.alloc_fragment((t.bm, t.bn), "float32")
            row = T.alloc_fragment((t.bn if t.swap_ab else t.bm,), "float32")  # of A
            T.use_swizzle(t.panel_size, order=t.order)
            T.clear(Cf)
            for ko in T.Pipelined(f.steps, num_stages=t.stages):
                T.copy(f.left(A, B, bz, by * t.bm, ko * t.bk), As)
                T.copy(f.right(A, B, bz, ko * t.bk, bx * t.bn), Bs)
                if f.scaling == "block" and t.swap_ab:  # rows of the tile lie in one scale block of B
                    for j in T.Parallel(t.bn):
                        row[j] = sa[bx * t.bn + j, ko]
                    weight = sb[by * t.bm // 128, ko]
                elif f.scaling == "block":  # loaded here and used after the MMA, which hides their latency
                    for i in T.Parallel(t.bm):
                        row[i] = sa[by * t.bm + i, ko]
                    here, beyond = sb[bx * t.bn // 128, ko], sb[T.min(bx * t.bn // 128 + 1, last), ko]
                    left = 128 - bx * t.bn % 128  # columns of the tile in the first of two scale blocks
                    scales = [T.if_then_else(c * width < left, here, beyond) for c in range(chunks)]
                T.gemm(As, Bs, part, transpose_A=f.t_left, transpose_B=f.t_right, clear_accum=True)
                for i, j in T.Parallel(t.bm, t.bn):
                    if f.scaling == "block" and t.swap_ab:
                        Cf[i, j] += part[i, j] * (row[j] * weight)
                    elif f.scaling == "block":
                        Cf[i, j] += part[i, j] * (row[i] * chosen(scales, j // width))
                    else:
                        Cf[i, j] += part[i, j]
            epilogue(f, m, Cf, (bx, by, bz), bias, sa, sb, C)

    return program("matmul_two_level", f, m, launch, copies)


# ---- split-K: the first launch computes partial sums, the second adds them in order -----------------------------------

_FINDERS = 128  # threads that search for tiles


def gemm_grouped(f: Form, two_level: bool = False) -> Any:
    """The kernel with the parameters (A, B, bias, sizes, where, C): f.groups groups of rows of A, each with its own B.

    sizes: (groups,) int32, rows of each group; rows of no group become zeros. where: (tiles, 3) int32 workspace: group
    (f.groups for rows of no group), first row and end of the rows of each row tile. two_level: partial sums of one step of k
    are added to a second accumulator.
    """
    t, finish, m = f.tile, f.finish, f.rows
    tiles = f.row_tiles(m)
    pieces = f.groups + 1  # the groups, and the rows of no group

    @T.prim_func
    def matmul_grouped(A: f.a(m), B: f.b, bias: f.bias_vector, sizes: T.Tensor((f.groups,), "int32"),
                       where: T.Tensor((tiles, 3), "int32"), C: f.c(m)):
        with T.Kernel(1, threads=_FINDERS) as _:
            length = T.alloc_shared((pieces,), "int32")
            end_row = T.alloc_shared((pieces,), "int64")
            end_tile = T.alloc_shared((pieces,), "int32")
            for g in T.Parallel(pieces):
                length[g] = T.if_then_else(g < f.groups, T.max(T.min(sizes[T.min(g, f.groups - 1)], m), 0), m)
                end_row[g] = T.cast(length[g], "int64")
            T.cumsum(end_row)
            for g in T.Parallel(pieces):
                first = T.min(end_row[g] - length[g], m)
                length[g] = T.cast(T.min(end_row[g], m) - first, "int32")
                end_tile[g] = T.ceildiv(length[g], t.bm)
            T.cumsum(end_tile)
            for s in T.Parallel(tiles):
                g = T.alloc_var("int32", init=0)  # groups that end before tile s
                for bit in T.unroll(pieces.bit_length()):
                    more = g + (1 << (pieces.bit_length() - 1 - bit))
                    g = T.if_then_else(more <= pieces and end_tile[T.min(more, pieces) - 1] <= s, more, g)
                piece = T.min(g, f.groups)
                last = T.cast(T.min(end_row[piece], m), "int32")
                size = length[piece]
                nth = s - end_tile[piece] + T.ceildiv(size, t.bm)
                where[s, 0] = piece
                where[s, 1] = T.if_then_else(g < pieces, last - size + nth * t.bm, 0)
                where[s, 2] = T.if_then_else(g < pieces, last, 0)
        with T.Kernel(T.ceildiv(f.n, t.bn), tiles, threads=t.threads) as (bx, by):
            As = T.alloc_shared(f.left_tile, f.types[0])
            Bs = T.alloc_shared(f.right_tile, f.types[1])
            Cf = T.alloc_fragment((t.bm, t.bn), f.types[3])
            group = where[by, 0]
            first = where[by, 1]
            end = where[by, 2]
            part = T.alloc_fragment((t.bm, t.bn), "float32") if two_level else Cf
            T.use_swizzle(t.panel_size)
            T.clear(Cf)
            for ko in T.Pipelined(T.if_then_else(group < f.groups, f.steps, 0), num_stages=t.stages):
                T.copy(A[f.at_a(0, first, ko * t.bk)], As)
                T.copy(B[f.at_b(group, ko * t.bk, bx * t.bn)], Bs)
                T.gemm(As, Bs, part, transpose_A=f.ta, transpose_B=f.tb, clear_accum=two_level)
                if two_level:
                    for i, j in T.Parallel(t.bm, t.bn):
                        Cf[i, j] += part[i, j]
            D = Cf if f.result == f.types[3] else T.alloc_fragment((t.bm, t.bn), f.result)
            if f.finishes:
                for i, j in T.Parallel(t.bm, t.bn):
                    D[i, j] = T.if_then_else(group < f.groups, finish(Cf[i, j], bias, None, None, bx * t.bn + j), 0)
            rows = T.min(end - first, t.bm)
            T.copy(D[0:rows, 0:t.bn], C[first:first + rows, bx * t.bn:bx * t.bn + t.bn])

    return matmul_grouped


@T.macro
def add_in_place(f, at, W, bias, sa, sb, C):
    """Add the partial sums of a block's 16 x 64 elements of C, where they are stored in the order of C."""
    bx, by, bz = at
    lead, finish = f.batch or 1, f.finish
    total, D = T.alloc_fragment((16, 64), f.types[3]), T.alloc_fragment((16, 64), f.result)
    T.clear(total)
    for p in T.unroll(f.tile.splits):  # all loads are in flight at once
        for i, j in T.Parallel(16, 64):
            total[i, j] += W[p * lead + bz, by * 16 + i, bx * 64 + j]
    for i, j in T.Parallel(16, 64):
        D[i, j] = finish(total[i, j], bias, sa, sb, bx * 64 + j)
    T.copy(D, C[f.at_c(bz, by * 16, bx * 64)])


@T.macro
def add_tiles(f, size, at, W, bias, sa, sb, C):
    """Add the partial sums of a block's elements of C, where they are stored as swap-AB or overlapping tiles.

    size: rows and columns of W. Neighbouring elements belong to neighbouring threads, though those of overlapping tiles may not
    be adjacent in memory.
    """
    bx, by, bz = at
    t, lead, finish = f.tile, f.batch or 1, f.finish
    down, across = size
    rows, columns = size[::-1] if t.swap_ab else size
    step = 256 // across
    total = T.alloc_fragment(size, f.types[3])
    lanes = T.Fragment(size, forward_fn=lambda i, j: (i % step * across + j, i // step))
    T.annotate_layout({total: lanes})
    Cs = T.alloc_shared((rows, columns), f.types[2])
    count, *whole = f.partials_shape
    sums = T.make_tensor(W.data, (count, whole[0] * whole[1]), f.types[3])
    places = T.alloc_fragment(size, "int32")  # the same in every split: computed once
    T.annotate_layout({places: lanes})
    for i, j in T.Parallel(down, across):
        at, beside = f.partial_at(by * rows + (j if t.swap_ab else i), bx * columns + (i if t.swap_ab else j))
        places[i, j] = at * whole[1] + beside
    T.clear(total)
    for p in T.unroll(t.splits):
        for i, j in T.Parallel(down, across):
            total[i, j] += sums[p * lead + bz, places[i, j]]
    for i, j in T.Parallel(down, across):
        r, c = (j, i) if t.swap_ab else (i, j)
        Cs[r, c] = T.cast(finish(total[i, j], bias, sa, sb, bx * columns + c), f.types[2])
    T.copy(Cs, C[f.at_c(bz, by * rows, bx * columns)], disable_tma=True)  # few bytes per thread: faster without TMA


def gemm_split(f: Form, copies: Copies = (None, None)) -> Any:
    """The kernel with k split over tile.splits blocks; parameters as gemm's. Partial sums are added in order, so every call
    gives the same bits."""
    t, lead, share = f.tile, f.batch or 1, ceil(f.steps / f.tile.splits)
    rows, columns = (32, 32) if t.swap_ab else (16, 64)

    @T.macro
    def launch(A, B, bias, sa, sb, W, C):
        with T.Kernel(*f.tiles(f.m), t.splits * lead, threads=t.threads) as (bx, by, bz):
            T.copy(main_loop(f, A, B, (bx, by, bz % lead), bz // lead * share, share), W[bz, by * t.bm, bx * t.bn])
        with T.Kernel(T.ceildiv(f.n, columns), T.ceildiv(f.m, rows), lead, threads=256) as (bx, by, bz):
            T.pdl_sync()
            if t.swap_ab or t.overlapping:
                add_tiles(f, (columns, rows) if t.swap_ab else (rows, columns), (bx, by, bz), W, bias, sa, sb, C)
            else:
                add_in_place(f, (bx, by, bz), W, bias, sa, sb, C)

    return program("matmul_split", f, f.m, launch, copies)
