"""Explicit warp-level tensor-core code: TensorCoreIntrinEmitter, and the raw instructions that it emits.

A warp works on micro tiles: A 16 x k, B 16 x k (n by k), C 16 x 16, where k is 16 for 16-bit, 32 for 8-bit and 8 for
32-bit operands: two m16n8 instructions side by side.  Registers of a micro tile have the order of the PTX fragments, first
those of columns 0..7, then those of 8..15.  Source: PTX ISA, "Matrix Fragments for mma.m16n8k16" and similar sections.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from tilelang.errors import register
from tilelang.ir import AddressOf, Alloc, Buffer, Expr, Load, cast, const, convert, dtype as DType, load, GLOBAL, LOCAL
from tilelang.layout import Fragment, make_linear_layout, make_swizzled_layout
from tilelang.target.mma import operand_dtype, MMA_ROWS
from tilelang.target.mma_row import MmaRow

from .tracing.builder import Emitted, need_builder
from .tracing.flags import flag
from .kernel import get_thread_binding
from .raw import buffer_at
from .tracing.regions import BufferSlice
from .tracing.state import describe, error, example
from .tensor import dtype_of
from .thread import emit_call
from .tile import EMITTED

register("ldmatrix-operand", ValueError, "an operand that ldmatrix cannot read in the order it is kept",
         "16-bit operands can be read in either order")

Factors = list[tuple[Buffer, Callable[[int], Any]]]  # arrays of registers, and the first register of a tile in each
WARP = 32
_K = {8: 32, 16: 16, 32: 8}  # columns of a micro tile by operand bits


@example('mm, mn, mk = T.get_mma_micro_size("float16")   # 16, 8, 16')
def get_mma_micro_size(dtype: Any) -> tuple[int, int, int]:
    """(m, n, k) of the micro tile for operands of a type.  Raises gemm-types."""
    bits = DType(dtype).bits
    if bits not in _K:
        raise error("gemm-types", f"no tensor-core tile for operands of ‹{DType(dtype)}›",
                    expected="operands of 8, 16 or 32 bits", hint="8, 16 and 32 bits have one")
    return 16, 16, _K[bits]


def fragment_place(matrix: str, i: Any, j: Any, k: int) -> tuple[Any, Any]:
    """(lane, register) of element (i, j) of a micro tile: A (16, k), B (n, k) = (16, k), C (16, 16)."""
    e = 2 if matrix == "C" else 32 // {32: 8, 16: 16, 8: 32}[k]  # elements of a 32-bit register, and of a lane's run
    if matrix == "C":
        return i % 8 * 4 + j % 8 // 2, j // 8 * 4 + i // 8 * 2 + j % 2
    half = 4 * e  # columns of one 8 x 16-byte matrix
    lane = i % 8 * 4 + j % half // e
    outer = j // half * (2 * e) + i // 8 * e if matrix == "A" else i // 8 * (2 * e) + j // half * e
    return lane, outer + j % e


def fragment_element(matrix: str, lane: Any, register: Any, k: int) -> tuple[Any, Any]:
    """(row, column) in a micro tile of a lane's register: the inverse of fragment_place."""
    if matrix == "C":
        return lane // 4 + register // 2 % 2 * 8, lane % 4 * 2 + (register // 4 * 8 + register % 2)
    e = 32 // {32: 8, 16: 16, 8: 32}[k]
    first, second = register // e % 2, register // (2 * e) % 2
    row, column = (first, second) if matrix == "A" else (second, first)
    return lane // 4 + row * 8, lane % 4 * e + (column * 4 * e + register % e)


@example("r, c = T.mma_store_index_map(T.get_lane_idx(), 0)")
def mma_store_index_map(thread_id: Any, local_id: Any) -> tuple[Any, Any]:
    """(row, column) of an accumulator register of a 16 x 16 micro tile."""
    return thread_id // 4 + local_id // 2 % 2 * 8, thread_id % 4 * 2 + local_id // 4 * 8 + local_id % 2


@example('r, c = T.get_swizzle_layout(tx // 64, tx % 64, 64, "float16")')
def get_swizzle_layout(row: Any, col: Any, row_size: int, dtype: Any,
                       swizzle_bytes: int | None = None) -> tuple[Any, Any]:
    """(row, column) at which an element of a swizzled tile with rows of `row_size` elements is stored.

    16-byte units are permuted by row, so that a read of eight rows at one column has no bank conflict.

    swizzle_bytes: 32, 64 or 128 (default: the row, at most 128).  Raises layout-invalid for rows that do not divide.
    """
    bits = DType(dtype).bits
    row_bytes = row_size * bits // 8
    span = min(128, row_bytes) if swizzle_bytes is None else swizzle_bytes
    if span not in (32, 64, 128) or row_bytes % span:
        raise error("layout-annotation", f"rows of {row_bytes} bytes have no swizzle of ‹{span}› bytes",
                    expected=f"a swizzle of 32, 64 or 128 bytes that divides {row_bytes}")
    chunk, n = 128 // bits, span // 16
    outer, inside = col // (chunk * n), col // chunk % n
    moved = inside ^ (row // (8 // n) % n)
    return row, (outer * n + moved) * chunk + col % chunk


@example('offset = T.get_ldmatrix_offset("A", T.get_lane_idx(), 0, 64, "float16")')
def get_ldmatrix_offset(matrix: str, row_idx: Any, col_idx: Any, stride: Any, dtype: Any = "float16",
                        transposed: bool = False) -> Any:
    """Offset in elements, from the start of a micro tile, of the row address that a lane passes to ldmatrix (four matrices).

    The loaded registers are then those of the operand.  A is stored as (m, k), or (k, m) when transposed; B as (k, n), or
    (n, k) when transposed.

    matrix: "A" or "B".  row_idx: the lane.  col_idx: elements into its row of 16 bytes, 0 for the address.  stride:
    elements of a row of the tile.  16-bit operands stored as (k, m) or (k, n) are read with trans=True.
    Raises ValueError for another matrix, and for 8- and 32-bit operands stored as (k, m) or (k, n), since ldmatrix transposes
    16-bit elements only.  Source: PTX ISA, "ldmatrix".
    """
    bits = DType(dtype).bits
    if matrix not in ("A", "B"):
        raise error("ldmatrix-operand", f'matrix is "A" or "B", found {matrix!r}', expected='"A" or "B"')
    get_mma_micro_size(dtype)
    if bits != 16 and transposed != (matrix == "B"):
        kept = "(k, m)" if matrix == "A" else "(k, n)"
        raise error("ldmatrix-operand", f"ldmatrix cannot read {matrix} of {DType(dtype)} kept ‹{kept}›",
                    expected=f"{matrix} kept {'(m, k)' if matrix == 'A' else '(n, k)'}",
                    hint=f"keep it {'(m, k)' if matrix == 'A' else '(n, k), with transposed=True'}")
    run = 128 // bits
    rows, columns = row_idx % 16, row_idx // 16 * run
    if transposed:
        rows, columns = row_idx // 16 * 8 + row_idx % 8, row_idx % 16 // 8 * run
    return rows * stride + columns + col_idx % run


@example("T.annotate_layout({A_s: T.make_mma_swizzle_layout(A_s)})")
def make_mma_swizzle_layout(shared_buf: Any, is_smooth: bool = False) -> Any:
    """Layout of a shared tile read by ldmatrix without bank conflicts.  is_smooth: row-major instead."""
    return make_linear_layout(shared_buf) if is_smooth else make_swizzled_layout(shared_buf)


def _origin(x: Any, what: str) -> tuple[Buffer, tuple[Any, ...]]:
    """The buffer of an operand and the indices of its first element."""
    if isinstance(x, Buffer):
        return x, tuple(convert(0) for _ in x.shape)
    if isinstance(x, BufferSlice):
        return x.buffer, x.region.mins
    if isinstance(x, Load):
        return x.buffer, x.indices
    raise error("region-operand", f"{what} is a buffer, region or element, found {describe(x)}",
                expected="a buffer, a region or an element")


class TensorCoreIntrinEmitter:
    """Emits the loads, MMAs and stores of one warp's sub-tile of a block tile.

    The block tile is block_row_warps * warp_row_tiles by block_col_warps * warp_col_tiles; a warp owns warp_row_tiles by
    warp_col_tiles of it, in 16 x 16 micro tiles.  a_transposed: A_shared is (K, M); b_transposed: B_shared is (N, K).
    chunk: columns of K in shared memory, reduce_k: how many such chunks lie side by side.  Local buffers are flat:
    warp_rows * local_size_a, warp_cols * local_size_b, warp_rows * warp_cols * local_size_out elements a thread.
    Raises gemm-types for types without a tensor-core instruction, gemm-shape for tiles that are no multiple of 16.
    """

    M_DIM = N_DIM = 16
    WARP_SIZE = WARP
    k_pack = 1  # steps of K that a load brings at once

    def __init__(self, a_dtype: Any = "float16", b_dtype: Any = "float16", accum_dtype: Any = "float16",
                 a_transposed: bool = False, b_transposed: bool = False, block_row_warps: int = 2, block_col_warps: int = 2,
                 warp_row_tiles: int = 8, warp_col_tiles: int = 8, chunk: int = 16, reduce_k: int = 1,
                 num_elems_per_byte: int = 1, is_m_first: bool = False, thread_var: Any = None) -> None:
        self.a_dtype, self.b_dtype, self.accum_dtype = (dtype_of(d, type(self).__name__) for d in
                                                        (a_dtype, b_dtype, accum_dtype))
        self.a_transposed, self.b_transposed, self.is_m_first = a_transposed, b_transposed, is_m_first
        self.block_row_warps, self.block_col_warps = block_row_warps, block_col_warps
        self.warp_row_tiles, self.warp_col_tiles = warp_row_tiles, warp_col_tiles
        self.chunk, self.reduce_k, self.thread_var = chunk, reduce_k, thread_var
        if num_elems_per_byte != 1:
            raise error("not-available", f"operands packed several a byte are not available in {type(self).__name__}",
                        expected="one element a byte", found=str(num_elems_per_byte),
                        hint="unpack them into a shared tile first")
        row = self._instruction()
        if row is None:
            raise error("gemm-types", f"no tensor-core instruction multiplies ‹{a_dtype} by {b_dtype} into {accum_dtype}›",
                        expected="operands that a tensor-core instruction multiplies")
        self.row = row
        if warp_row_tiles % 16 or warp_col_tiles % 16 or chunk % (self.micro_size_k * self.k_pack):
            raise error("gemm-shape", f"a warp's tile of {warp_row_tiles} x {warp_col_tiles} with K in chunks of {chunk} is "
                        f"not made of micro tiles of 16 x 16 x {self.micro_size_k * self.k_pack}",
                        expected=f"multiples of 16, 16 and {self.micro_size_k * self.k_pack}",
                        found=f"{warp_row_tiles}, {warp_col_tiles} and {chunk}")
        self.local_size_a = self.local_size_b = 16 * self.micro_size_k // self.WARP_SIZE
        self.local_size_out = 16 * 16 // self.WARP_SIZE
        self.warp_rows, self.warp_cols = warp_row_tiles // 16, warp_col_tiles // 16
        self.mma_num_inst_m, self.mma_num_inst_n = self.warp_rows, self.warp_cols
        self.threads = self.WARP_SIZE * block_row_warps * block_col_warps

    # ---- the instruction --------------------------------------------------------------------------------------------

    def _instruction(self) -> MmaRow | None:
        """The instruction of the emitter, after micro_size_x, micro_size_y and micro_size_k of its tile are set."""
        self.micro_size_x, self.micro_size_y, self.micro_size_k = get_mma_micro_size(self.a_dtype)
        want = tuple(operand_dtype(d) for d in (self.a_dtype, self.b_dtype))
        return next((r for r in MMA_ROWS.values() if r.shape == (16, 8, self.micro_size_k) and
                     (r.a_dtype, r.b_dtype, r.c_dtype) == (*want, self.accum_dtype)), None)

    def _place_of(self, matrix: str, i: Any, j: Any) -> tuple[Any, Any]:
        """(lane, register) of element (i, j) of a micro tile of "A", "B" (n by k) or "C"."""
        return fragment_place(matrix, i, j, self.micro_size_k)

    def _element(self, matrix: str, lane: Any, register: Any) -> tuple[Any, Any]:
        """The inverse of _place_of."""
        return fragment_element(matrix, lane, register, self.micro_size_k)

    # ---- threads ----------------------------------------------------------------------------------------------------

    def get_thread_binding(self) -> Any:
        """The thread index that lanes and warps are counted from."""
        return get_thread_binding(0) if self.thread_var is None else self.thread_var

    def extract_thread_binding(self, thread_id: Any, is_m_first: bool | None = None) -> tuple[Any, Any, Any]:
        """(lane, warp along n, warp along m) of a thread."""
        first = self.is_m_first if is_m_first is None else is_m_first
        warp = thread_id // self.WARP_SIZE
        if first:
            return thread_id % self.WARP_SIZE, warp // self.block_row_warps % self.block_col_warps, warp % self.block_row_warps
        return thread_id % self.WARP_SIZE, warp % self.block_col_warps, warp // self.block_col_warps % self.block_row_warps

    def _place(self) -> tuple[Expr, Expr, Expr]:
        b = need_builder("TensorCoreIntrinEmitter")
        lane, n, m = self.extract_thread_binding(self.get_thread_binding())
        return b.let("lane", convert(lane)), b.let("warp_n", convert(n)), b.let("warp_m", convert(m))

    # ---- loads ------------------------------------------------------------------------------------------------------

    def ldmatrix_a(self, A_local: Any, A_shared: Any, ki: Any, rk: Any = 0) -> Emitted:
        """The warp's rows of A, columns of step ki of chunk rk, into registers."""
        return self._load("A", A_local, A_shared, ki, rk)

    def ldmatrix_b(self, B_local: Any, B_shared: Any, ki: Any, rk: Any = 0) -> Emitted:
        """The warp's columns of B, rows of step ki of chunk rk, into registers."""
        return self._load("B", B_local, B_shared, ki, rk)

    def _load(self, matrix: str, local: Any, shared: Any, ki: Any, rk: Any) -> Emitted:
        lane, warp_n, warp_m = self._place()
        if matrix == "A":
            start, tiles, k_first, size = warp_m * self.warp_row_tiles, self.warp_rows, self.a_transposed, self.local_size_a
        else:
            start, tiles, k_first, size = (warp_n * self.warp_col_tiles, self.warp_cols, not self.b_transposed,
                                           self.local_size_b)
        b, size = need_builder("TensorCoreIntrinEmitter"), size * self.k_pack
        to, (source, origin) = _origin(local, "registers of an operand")[0], _origin(shared, "a shared operand")
        k0 = b.let("k0", convert(rk * self.chunk + ki * self.micro_size_k * self.k_pack))
        lead = origin[:-2]

        def element(row: Any, column: Any) -> tuple[Any, ...]:
            outer, inner = (k0 + column, start + row) if k_first else (start + row, k0 + column)
            return (*lead, origin[-2] + outer, origin[-1] + inner)

        dt = self.a_dtype if matrix == "A" else self.b_dtype
        for t in range(tiles):
            if self.row.run == 0 and dt.bits == 16 and source.dtype == dt and source.scope_name.startswith("shared"):
                j = lane // 8
                low, high = (j % 2, j // 2) if matrix == "A" else (j // 2, j % 2)  # which half of the rows, of k
                row, column = (low * 8, high * 8 + lane % 8) if k_first else (low * 8 + lane % 8, high * 8)
                emit_call("ldmatrix", (AddressOf(to, (convert(t * size),)), AddressOf(source, tuple(
                    convert(x) for x in element(t * 16 + row, column)))), "void", num=4, trans=k_first)
                continue
            for r in range(size):
                row, column = self._element(matrix, lane, r)
                b.store(to, (convert(t * size + r),), load(source, element(t * 16 + row, column)))
        return EMITTED

    # ---- MMA --------------------------------------------------------------------------------------------------------

    def mma(self, A_local: Any, B_local: Any, C_local: Any, k_inner: Any = 0) -> Emitted:
        """C_local += A_local times B_local, all micro tiles of the warp; operands of step k_inner of their buffers."""
        return self._multiply(A_local, B_local, C_local, range(self.warp_rows), range(self.warp_cols), k_inner)

    def mma_atom(self, A_local: Any, B_local: Any, C_local: Any, inst_m_idx: int, inst_n_idx: int, k_inner: Any = 0) -> Emitted:
        """One micro tile of `mma`."""
        return self._multiply(A_local, B_local, C_local, (inst_m_idx,), (inst_n_idx,), k_inner)

    def _multiply(self, A_local: Any, B_local: Any, C_local: Any, rows: Sequence[int], columns: Sequence[int],
                  k: Any) -> Emitted:
        """Micro tiles of `mma`: those of these rows and columns of tiles."""
        a, b, c = (_origin(x, "registers of an operand")[0] for x in (A_local, B_local, C_local))
        factors = list(zip(self._factors(a, k * self.warp_rows, rows, self.local_size_a * self.k_pack),
                           self._factors(b, k * self.warp_cols, columns, self.local_size_b * self.k_pack)))
        for i in rows:
            for j in columns:
                for (x, first_x), (y, first_y) in factors:
                    for of_c, of_a, of_b in self._steps():
                        at = ((c, (i * self.warp_cols + j) * self.local_size_out + of_c), (x, first_x(i) + of_a),
                              (y, first_y(j) + of_b))
                        emit_call("mma", tuple(AddressOf(r, (convert(n),)) for r, n in at), "void", row=self.row.name)
        return EMITTED

    def _steps(self) -> list[tuple[int, int, int]]:
        """The instructions of a micro tile: their first registers in those of C, A and B."""
        return [(0, 0, 0), (4, 0, self.local_size_b // 2)]

    def _factors(self, source: Buffer, first: Any, tiles: Sequence[int], size: int) -> Factors:
        """The arrays that an operand is in, each multiplied by that of the other operand."""
        return [(source, lambda t: (first + t) * size)]

    # ---- stores -----------------------------------------------------------------------------------------------------

    def stmatrix(self, C_local: Any, C_buf: Any, pid_m: Any = None, pid_n: Any = None) -> Emitted:
        """Registers of C into C_buf: (M/16, N/16, 16, 16), or 2-D, at the block tile (pid_m, pid_n)."""
        b = need_builder("TensorCoreIntrinEmitter")
        lane, warp_n, warp_m = self._place()
        source, (to, origin) = _origin(C_local, "registers of C")[0], _origin(C_buf, "the destination of stmatrix")
        for i in range(self.warp_rows):
            for j in range(self.warp_cols):
                for r in range(self.local_size_out):
                    row, column = self._element("C", lane, r)
                    tile = warp_m * self.warp_rows + i, warp_n * self.warp_cols + j
                    if len(to.shape) == 4:
                        at: tuple[Any, ...] = (*tile, row, column)
                    else:
                        base_m = (0 if pid_m is None else pid_m) * (self.block_row_warps * self.warp_row_tiles)
                        base_n = (0 if pid_n is None else pid_n) * (self.block_col_warps * self.warp_col_tiles)
                        at = (base_m + tile[0] * 16 + row, base_n + tile[1] * 16 + column)
                    where = tuple(convert(o + x) for o, x in zip(origin[-len(at):], at))
                    value = load(source, (convert((i * self.warp_cols + j) * self.local_size_out + r),))
                    b.store(to, (*origin[:-len(at)], *where), value)
        return EMITTED

    def get_store_index_map(self, inverse: bool = False) -> Any:
        """(lane, register) -> (row, column) of an accumulator micro tile; inverse: the other way."""
        return partial(self._place_of if inverse else self._element, "C")

    # ---- layouts of fragments ---------------------------------------------------------------------------------------

    def make_mma_load_layout(self, local_buf: Any, matrix: str = "A") -> Fragment:
        """Fragment of an operand tile (rows of all warps by micro_size_k columns), in the order of the loads."""
        if matrix not in ("A", "B"):
            raise error("value", f"matrix is «'A' or 'B'», found {matrix!r}")
        rows = (self.block_row_warps * self.warp_rows if matrix == "A" else self.block_col_warps * self.warp_cols) * 16
        per_warp, size = (self.warp_rows, self.local_size_a) if matrix == "A" else (self.warp_cols, self.local_size_b)
        size, step = size * self.k_pack, self.micro_size_k * self.k_pack
        copies = self.block_col_warps if matrix == "A" else self.block_row_warps

        def forward(i: Any, j: Any, rep: Any) -> tuple[Any, Any]:
            lane, register = self._place_of(matrix, i % 16, j % step)
            warp = i // (16 * per_warp)
            m, n = (warp, rep) if matrix == "A" else (rep, warp)
            index = (j // step * per_warp + i // 16 % per_warp) * size + register
            return self._warp(m, n) * self.WARP_SIZE + lane, index

        return Fragment((rows, int(local_buf.shape[-1]) if len(local_buf.shape) > 1 else step),
                        forward_fn=forward, replicate=copies)

    def make_mma_store_layout(self, local_buf: Any) -> Fragment:
        """Fragment of the accumulators of the block tile, in the order of `mma`."""
        def forward(i: Any, j: Any) -> tuple[Any, Any]:
            lane, register = self._place_of("C", i % 16, j % 16)
            m, n = i // self.warp_row_tiles, j // self.warp_col_tiles
            tile = i // 16 % self.warp_rows * self.warp_cols + j // 16 % self.warp_cols
            return self._warp(m, n) * self.WARP_SIZE + lane, tile * self.local_size_out + register

        return Fragment((self.block_row_warps * self.warp_row_tiles, self.block_col_warps * self.warp_col_tiles),
                        forward_fn=forward)

    def _warp(self, m: Any, n: Any) -> Any:
        return n * self.block_row_warps + m if self.is_m_first else m * self.block_col_warps + n


class TensorCoreIntrinEmitterWithLadderTransform(TensorCoreIntrinEmitter):
    """The emitter for operands that may have been permuted.  transform_kind_a, transform_kind_b: only 0, not permuted."""

    def __init__(self, *args: Any, transform_kind_a: int = 0, transform_kind_b: int = 0, **kw: Any) -> None:
        super().__init__(*args, **kw)
        self.transform_kind_a, self.transform_kind_b = int(transform_kind_a or 0), int(transform_kind_b or 0)
        if self.transform_kind_a or self.transform_kind_b:
            raise error("not-available", "operands permuted beforehand are not available", expected="transform kind 0",
                        found=f"{self.transform_kind_a} and {self.transform_kind_b}", hint="pass transform_kind 0")


class INT4TensorCoreIntrinEmitter(TensorCoreIntrinEmitter):
    """The emitter for operands with two int4 values per byte, of which the lower column is in the low half.

    Shared and local operands are int8 arrays of such bytes.  chunk counts bytes, so that a micro tile is 16 x 16 x 32 bytes,
    with 64 values of K.  The low and the high halves are multiplied separately as int8 values; the result is exact.
    a_dtype, b_dtype: "int4", or "int8" as their bytes are called; accum_dtype: "int32".  Raises gemm-types for others.
    """

    def __init__(self, a_dtype: Any = "int4", b_dtype: Any = "int4", accum_dtype: Any = "int32", *args: Any, **kw: Any) -> None:
        for d in (a_dtype, b_dtype):
            if DType(d) not in ("int4", "int8"):
                raise error("gemm-types", f"INT4TensorCoreIntrinEmitter multiplies int4 values, found {DType(d)}",
                            expected="int4, or int8 for its bytes")
        super().__init__("int8", "int8", accum_dtype, *args, **kw)

    def _factors(self, source: Buffer, first: Any, tiles: Sequence[int], size: int) -> Factors:
        """The low and the high values of the bytes of tiles, in two local arrays with one value per element."""
        b, four, start, count = need_builder("INT4TensorCoreIntrinEmitter"), const(4, "int8"), tiles[0], len(tiles) * size
        out = [Buffer(b.fresh_name(name), (count,), DType("int8"), LOCAL, span=b.here()) for name in ("low", "high")]
        for x in out:
            b.emit(Alloc(x, None, span=b.here()))
        for r in range(count):
            byte = load(source, (convert((first + start) * size + r),))
            b.store(out[0], (convert(r),), (byte << four) >> four)
            b.store(out[1], (convert(r),), byte >> four)
        return [(x, lambda t: (t - start) * size) for x in out]


# ---- raw calls --------------------------------------------------------------------------------------------------------

def _pointer(x: Any, what: str) -> AddressOf:
    if isinstance(x, AddressOf):
        return x
    raise error("extern-argument", f"{what} is «a pointer», found {describe(x)}",
                hint="write A.access_ptr('r') or T.access_ptr(A[i, j])")


@example('T.ptx_ldmatrix(False, 4, T.access_ptr(A_s[tx % 16, tx % 32 // 16 * 8], "r"), T.access_ptr(r16[0], "w"))')
def ptx_ldmatrix(trans: bool, num: int, src_access_ptr: Any, dst_access_ptr: Any) -> Emitted:
    """ldmatrix: a warp loads num (1, 2 or 4) 8 x 8 matrices of 16-bit elements from shared memory (sm_75).

    src_access_ptr: address in shared memory of a row of 8 elements, 16-byte aligned; lane 8 * m + r gives row r of matrix m.
    dst_access_ptr: address of the first of 2 * num elements in local memory, two of each matrix; trans: of its transpose.
    Executed by all lanes of the warp.  Raises lane-arguments, extern-argument.
    """
    if num not in (1, 2, 4):
        raise error("lane-arguments", f"ldmatrix loads «1, 2 or 4 matrices», found {num!r}")
    return emit_call("ldmatrix", (_pointer(dst_access_ptr, "the destination"), _pointer(src_access_ptr, "the source")), "void",
                     num=int(num), trans=flag(trans, "trans"))


def ptx_mma(dtype: Any, shape: str, A_layout: str, B_layout: str, A_dtype: Any, B_dtype: Any, C_dtype: Any, a: Any,
            a_index: Any, b: Any, b_index: Any, c: Any, c_index: Any, saturate: bool = False,
            bit_op: str | None = None) -> Emitted:
    """One mma instruction: c += a @ b.  shape: "m16n8k16" and others of PTX ISA, "mma"; executed by all lanes of a warp.

    a, b, c: `.data` of local buffers of A_dtype, B_dtype, C_dtype, each with at least M*K/32, K*N/32, M*N/32 elements from
    a_index, b_index, c_index on, in the order of PTX ISA, "Matrix Fragments".  dtype: the type of the result, C_dtype.
    Raises gemm-types where there is no such instruction; not-available for layouts other than row, col
    and for saturate and bit_op.

    Example:
        T.ptx_mma("float32", "m16n8k16", "row", "col", "float16", "float16", "float32", r16.data, 0, s16.data, 0, r32.data, 0)
    """
    if (A_layout, B_layout) != ("row", "col") or saturate or bit_op:
        raise error("not-available", "mma is available for row-major A and column-major B without saturation or bit "
                    f"operations, found {A_layout!r}, {B_layout!r}, saturate={saturate}, {bit_op!r}",
                    expected="A 'row', B 'col', no saturation or bit operation",
                    found=f"{A_layout!r}, {B_layout!r}, {saturate}, {bit_op!r}")
    types = tuple(operand_dtype(dtype_of(d, "T.ptx_mma")) for d in (A_dtype, B_dtype))
    row = next((r for r in MMA_ROWS.values() if "m{}n{}k{}".format(*r.shape) == shape and (r.a_dtype, r.b_dtype) == types
                and r.c_dtype == dtype_of(C_dtype, "T.ptx_mma")), None)
    if row is None:
        raise error("gemm-types", f"no mma instruction ‹{shape} of {A_dtype}, {B_dtype} into {C_dtype}›",
                    expected="an mma instruction")
    places = [(x if isinstance(x, Buffer) else buffer_at(x), i) for x, i in ((c, c_index), (a, a_index), (b, b_index))]
    return emit_call("mma", tuple(AddressOf(buf, (convert(i),)) for buf, i in places), "void", row=row.name)


def ptx_cp_async(dst_ptr: Any, src_ptr: Any, num_elems: int, predicate: Any = None) -> Emitted:
    """cp.async by each executing thread, without waiting (sm_80); T.ptx_commit_group and T.ptx_wait_group wait.

    dst_ptr: address in shared memory of num_elems elements: 4, 8 or 16 bytes, aligned to as many.  src_ptr: address in global
    memory of as many elements of that dtype.  A false predicate writes zeros.  Raises lane-arguments, extern-argument.

    Example:
        T.ptx_cp_async(T.access_ptr(A_s[tx, 0], "w"), T.access_ptr(A[tx, 0], "r"), 8)   # 16 bytes
        T.ptx_commit_group()
        T.ptx_wait_group(0)
    """
    dst, src = _pointer(dst_ptr, "the destination"), _pointer(src_ptr, "the source")
    nbytes = int(num_elems) * dst.buffer.dtype.bytes
    if nbytes not in (4, 8, 16) or not dst.buffer.scope_name.startswith("shared") or src.buffer.scope_name != GLOBAL:
        raise error("lane-arguments", f"cp.async moves «4, 8 or 16 bytes from global to shared memory», found {nbytes} bytes "
                    f"from {src.buffer.scope_name} to {dst.buffer.scope_name}",
                    found=f"{nbytes} from {src.buffer.scope_name} to {dst.buffer.scope_name}")
    args = (dst, src) if predicate is None else (dst, src, cast(convert(predicate), "bool"))
    return emit_call("cp_async", args, "void", bytes=nbytes)


__all__ = ["TensorCoreIntrinEmitter", "TensorCoreIntrinEmitterWithLadderTransform", "get_ldmatrix_offset", "get_mma_micro_size",
           "get_swizzle_layout", "make_mma_swizzle_layout", "mma_store_index_map", "ptx_cp_async", "ptx_ldmatrix", "ptx_mma"]
