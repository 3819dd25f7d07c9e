"""`sparse_matmul`: a GEMM whose first operand is 2:4 sparse, and `sparse_compress`, which makes its compressed form."""

from __future__ import annotations

from dataclasses import replace
from math import ceil
from typing import Any

import tilelang.language as T
from tilelang.errors import error
from tilelang.ir import dtype
from tilelang.target.tile_order import tile_order

from ..arrays import contiguous, empty, maker, place, type_name, zeros
from ..caches import Cache, Prepared, enter, known
from ..place import Place
from .kernels import Form, add_in_place
from .operands import operand
from .problem import TYPES, MatmulProblem, check_gradient, check_target, check_tensors, check_types
from .tile import Chip, Tile
from .tile_cost import FILLS_L2, PDL, PDL_ONCE

COLUMNS = 64  # k is a multiple of this: the metadata that one instruction, or two, take from a thread
_NO_TILE = Tile(64, 64, COLUMNS, 2, 128)
# For each set of columns of a group that are not zero, a bit each, 4 bits: the two that are kept; 0 where there are more.
_CODES = 0x09884444, 0x000E0DCC  # of sets without the last column, and with it


def metadata_of(element: str) -> tuple[str, int]:
    """(type of metadata of kept values of a type, columns that one describes).

    TMA needs tiles of whole 8 rows, and threads load a word of metadata for a row (8 bits) or two in the fewest elements.
    """
    return ("int16", 16) if dtype(element).bits == 8 else ("uint8", 8)


def padded_rows(m: int) -> int:
    """Columns of the metadata of m rows: TMA needs rows of whole 16 bytes."""
    return ceil(m / 16) * 16


def sparse_gemm(f: Form, far: bool = False) -> Any:
    """The kernel of a form whose A is 2:4 sparse, with the parameters (A, E, B, C); (A, E, B, W, C) where k is split.

    A: the kept values (m, k / 2).  E: metadata (k / columns, padded m).  W: partial sums, Form.partials.  far: results leave L2
    before operands do.
    """
    t, m, k = f.tile, f.m, f.k
    depth = ceil(f.steps / t.splits)  # steps of a block
    meta, columns = metadata_of(f.types[0])
    a, e = T.Tensor((m, k // 2), f.types[0]), T.Tensor((k // columns, padded_rows(m)), meta)

    @T.macro
    def accumulated(A, E, B, bx, by, first):
        As = T.alloc_shared((t.bm, t.bk // 2), f.types[0])
        Es = T.alloc_shared((t.bk // columns, t.bm), meta)
        Bs = T.alloc_shared(f.right_tile, f.types[1])
        Cf = T.alloc_fragment((t.bm, t.bn), f.types[3])
        T.use_swizzle(t.panel_size, order=t.order)
        T.clear(Cf)
        for ko in T.Pipelined(depth, num_stages=t.stages):
            at = (first + ko) * t.bk
            T.copy(A[by * t.bm, at // 2], As)
            T.copy(E[at // columns, by * t.bm], Es)
            T.copy(B[f.at_b(0, at, bx * t.bn)], Bs)
            T.gemm_sp(As, Es, Bs, Cf, transpose_E=True, transpose_B=f.tb)
        return Cf

    if t.splits == 1:
        @T.prim_func
        def sparse_matmul(A: a, E: e, B: f.b, C: f.c(m)):
            with T.Kernel(*f.tiles(m), threads=t.threads) as (bx, by):
                T.copy(accumulated(A, E, B, bx, by, 0), C[by * t.bm, bx * t.bn], eviction_policy="evict_first" if far else None)

        return sparse_matmul

    @T.prim_func
    def sparse_matmul_split(A: a, E: e, B: f.b, W: f.partials, C: f.c(m)):
        with T.Kernel(*f.tiles(m), t.splits, threads=t.threads) as (bx, by, bz):
            T.copy(accumulated(A, E, B, bx, by, bz * depth), W[bz, by * t.bm, bx * t.bn])
        with T.Kernel(T.ceildiv(f.n, 64), T.ceildiv(m, 16), 1, threads=256) as (bx, by, bz):
            T.pdl_sync()
            add_in_place(f, (bx, by, bz), W, None, None, None, C)

    return sparse_matmul_split


def compress(m: int, k: int, element: str) -> Any:
    """The kernel with the parameters (A, values, E, wrong): wrong becomes 1 where a group has more than two values."""
    rows, wide = 32, 8  # of a block: rows, and metadata of a row
    meta, columns = metadata_of(element)

    @T.prim_func
    def sparse_compress(A: T.Tensor((m, k), element), values: T.Tensor((m, k // 2), element),
                        E: T.Tensor((k // columns, padded_rows(m)), meta), wrong: T.Tensor((1,), "int32")):
        with T.Kernel(T.ceildiv(k // columns, wide), T.ceildiv(m, rows), threads=rows * wide) as (bx, by):
            for i, j in T.Parallel(rows, wide):
                r, c = by * rows + i, bx * wide + j
                if r < m and c < k // columns:
                    word = T.alloc_var("uint32", init=0)
                    for g in T.unroll(columns // 4):
                        x = [A[r, c * columns + g * 4 + n] for n in range(4)]
                        bits = [T.if_then_else(T.cast(v, "float32") == 0.0, 0, 1 << n) for n, v in enumerate(x)]
                        code = T.if_then_else(bits[3] == 0, *_CODES) >> 4 * (bits[0] + bits[1] + bits[2]) & 15
                        if code == 0:
                            T.atomic_max(wrong[0], 1)
                        word = word | T.cast(code, "uint32") << 4 * g
                        for h in T.unroll(2):
                            at = (code >> 2 * h) & 3
                            values[r, c * (columns // 2) + g * 2 + h] = T.if_then_else(
                                at < 2, T.if_then_else(at == 0, x[0], x[1]), T.if_then_else(at == 2, x[2], x[3]))
                    E[c, r] = T.cast(word, meta)

    return sparse_compress


# (rows of a tile, warp groups, most columns for 16-bit types and for others): 256 x 208 leaves 32 registers of a thread for
# metadata and addresses. With 8-bit types 256 x 168 takes 540 us where 128 x 256 takes 520 (float8, 8192 cubed), 89 where 69.
_SHAPES = (64, 1, 256, 256), (128, 2, 256, 256), (256, 2, 208, 0), (192, 3, 192, 0)
_START = 2000  # cycles of a launch beside its tiles
_WRITTEN = 0.54  # of the cycles of shared memory's port in which TMA writes a stage, those in which wgmma does not read
_RING_OF_TWO = 1.08  # factor of a step
# Cycles of a step, however small its tile: between two GEMMs of a warp group, and for each word of metadata of its threads.
_LEAST, _LEAST_WORD = 400, 90
# The part of L2 up to which operands are near all SMs, in up to so many waves: 12 rows in place of 8 at 4096 cubed take 126.6
# us of 127.9 in float16, 121.3 of 122.9 in bfloat16 (52 MB), and in int8 and float8 (27 MB) 0.4 to 1 % longer.
_NEAR, _FEW_WAVES = 0.56, 6
_STAGING, _BARRIERS = 32 * 1024, 2048  # bytes of shared memory


def sparse_tile(chip: Chip, f: Form) -> Tile:
    """The tile of the least estimated time for a form, whose own tile is not looked at."""
    size, out = dtype(f.types[0]).bytes, dtype(f.types[2]).bytes
    if chip.kind != "wgmma" or size == 1 and not f.tb:
        return Tile(64 if f.m <= 64 else 128, 64 if f.n <= 64 else 128, COLUMNS, 2, 128 if f.m <= 64 else 256)
    narrow = 16 if dtype(f.types[0]).is_int else 8 if f.tb else 64  # columns that instructions, or boxes of 128 bytes, have
    found = []
    for bm, groups, *most in _SHAPES:
        for bn in range(max(16, narrow), max(16, min(most[size == 1], ceil(f.n / narrow) * narrow)) + 1, narrow):
            for bk in (128 // size, 256 // size, 512 // size):
                for splits in _splits(chip, f, bm, bn, bk):
                    room = chip.shared - _BARRIERS - (min(_STAGING, bm * bn * out) if splits == 1 else 0)
                    stages = min(8, room // _loaded(bm, bn, bk, size), ceil(ceil(f.k / bk) / splits) + 1)
                    if stages > 1:
                        t = Tile(bm, bn, bk, stages, 128 * groups, splits=splits)
                        found.append((_cycles(chip, f, t), splits, -bm * bn, len(found), t))
    return _finished(chip, f, min(found)[-1])


def _splits(chip: Chip, f: Form, bm: int, bn: int, bk: int) -> list[int]:
    """The numbers of splits of k: more than one where tiles leave SMs idle."""
    tiles, steps = ceil(f.m / bm) * ceil(f.n / bn), ceil(f.k / bk)
    return [1, *(x for x in range(2, min(16, steps // 4) + 1) if tiles * x <= chip.sms)]


def _loaded(bm: int, bn: int, bk: int, size: int) -> int:
    """Bytes of a stage."""
    return bm * bk * size // 2 + bm * bk // 8 + bn * bk * size


def _cycles(chip: Chip, f: Form, t: Tile) -> float:
    """Estimated cycles of a tile.

    Shared memory moves 128 bytes a cycle: an instruction reads 64 rows of A in 16 cycles and B in N / 2, and TMA writes stages.
    """
    size, out = dtype(f.types[0]).bytes, 4 if t.splits > 1 else dtype(f.types[2]).bytes
    blocks, stage = ceil(f.m / t.bm) * ceil(f.n / t.bn) * t.splits, _loaded(t.bm, t.bn, t.bk, size)
    step = max(t.bk * size / 64 * t.bm / 64 * (16 + t.bn / 2) + _WRITTEN * stage / 128, stage / chip.l2)
    words = t.bm // (t.threads // 128 * 64) * t.bk / COLUMNS
    step = max(_LEAST + _LEAST_WORD * words, step * (_RING_OF_TWO if t.stages == 2 else 1.0))
    cycles = ceil(blocks / chip.sms) * (ceil(ceil(f.k / t.bk) / t.splits) * step + t.bm * t.bn * out / chip.store) + _START
    if t.splits > 1:
        moved = f.m * f.n * (4 * t.splits + dtype(f.types[2]).bytes)
        cycles += chip.clock * (chip.start + moved / (1.5 * chip.memory))
    return cycles


def _finished(chip: Chip, f: Form, t: Tile) -> Tile:
    """The tile with its order of rasterisation, and with PDL where launches gain by it."""
    size, rows, columns = dtype(f.types[0]).bytes, ceil(f.m / t.bm), ceil(f.n / t.bn)
    waves = ceil(rows * columns * t.splits / chip.sms)
    # L2 keeps data near the SMs that read it: operands of more than a part of it come from far in each wave, if waves are few.
    near = chip.cache * (_NEAR if 1 < waves <= _FEW_WAVES else 1)
    panel, order = tile_order((rows, columns, t.splits), (t.bm * _kept(f), t.bn * f.k * size), chip.sms, near)
    steps = waves * ceil(f.k / t.splits) * size / 2 / 128  # a step of kept values
    pdl = steps <= (PDL_ONCE if waves == 1 else PDL) and not FILLS_L2[0] < _taken(chip, f) < FILLS_L2[1]
    return replace(t, panel_size=panel, order=order, pdl=pdl)


def _kept(f: Form) -> float:
    """Bytes of a row of A and of its metadata."""
    return f.k * (dtype(f.types[0]).bytes / 2 + 1 / 8)


def _taken(chip: Chip, f: Form) -> float:
    """The fraction of L2 that operands and result take."""
    return (f.m * _kept(f) + f.n * f.k * dtype(f.types[0]).bytes + f.m * f.n * dtype(f.types[2]).bytes) / chip.cache


def sparse_compress(a: Any, *, target: Any = None, execution_backend: str | None = None) -> tuple[Any, Any]:
    """The compressed form of a 2:4 sparse matrix, for sparse_matmul: (kept values, metadata).

    a: (m, k), of float16, bfloat16, float8_e4m3fn, float8_e5m2, int8 or uint8, k a multiple of 64; of each four neighbours in a
    row, from column 0 on, two are zero at least.  A torch tensor or a NumPy array.
    Result: (m, k / 2) of a's type, and uint8 (k / 8, m rounded up to 16), of 8-bit types int16 (k / 16, m rounded up to 16):
    each describes 8, or 16, columns of a row, 4 bits for each four: the two kept columns, 2 bits each, the lower column first.

    The call waits for the result.  Raises matmul-shape, matmul-type, matmul-device; matmul-option where a group has more than
    two values.

    >>> import numpy as np
    >>> values, metadata = sparse_compress(np.tile(np.array([[0, 1, 0, 2]], np.float16), (1, 16)))
    >>> values.shape, values[0, :4].tolist(), hex(int(metadata[0, 0]))
    ((1, 32), [1.0, 2.0, 1.0, 2.0], '0xdd')
    """
    check_tensors([a])
    at = Place.of(a, target, execution_backend)
    _check_matrix(a, "a")
    (m, k), element = (int(x) for x in a.shape), type_name(a)
    if k % COLUMNS or not m * k:
        raise error("matmul-shape", f"a of sparse_compress is ‹{m} x {k}›", expected="rows of a positive multiple of "
                    f"{COLUMNS} elements", hint=f"pad the rows with zeros, and those of b, to a multiple of {COLUMNS}")
    meta, columns = metadata_of(element)
    values, words = empty(a, (m, k // 2), element), zeros(a, (k // columns, padded_rows(m)), meta)
    wrong = zeros(a, (1,), "int32")
    at.kernel(compress, m, k, element)(contiguous(a), values, words, wrong)
    if int(wrong[0]):
        raise error("matmul-option", "a of sparse_compress is not 2:4 sparse", found="a group of more than two values",
                    expected="two zeros in each four neighbours of a row", hint="set the two smallest of each four to zero")
    return values, words


def sparse_matmul(values: Any, metadata: Any, b: Any, *, transpose_b: bool = False, out_dtype: Any = None, target: Any = None,
                  execution_backend: str | None = None) -> Any:
    """a @ op(b) for a 2:4 sparse a of m x k, which sparse_compress has made (values, metadata) of.

    values: (m, k / 2).  metadata: as sparse_compress makes them.  b: (k, n), or (n, k) with transpose_b, of values' type.
    Result: (m, n) of out_dtype.  Types: float16, bfloat16, float8_e4m3fn, float8_e5m2 (in any mix), int8, uint8, accumulated as
    by matmul, where sums of float8 stay in the matrix unit (its fast_accum).
    On sm_90a the matrix unit skips the zeros: 16-bit types with any b, 8-bit types with transpose_b.  Other targets expand a
    tile at a time and multiply it densely, as does sm_90a for 8-bit types with b as (k, n).

    Error of an element as for matmul.  Identical inputs give identical bits.
    Raises matmul-shape, matmul-type, matmul-device, matmul-gradient.

    >>> import numpy as np
    >>> a = np.tile(np.array([[0, 1, 0, 2]], np.float16), (1, 16))
    >>> sparse_matmul(*sparse_compress(a), np.ones((64, 2), np.float16)).tolist()
    [[48.0, 48.0]]
    """
    arrays = values, metadata, b
    options = transpose_b, out_dtype, str(target), execution_backend
    answer = known(_ANSWERS, arrays, options)
    if answer is None:
        check_tensors(arrays)
        at = Place.of(values, target, execution_backend)
        answer = enter(_ANSWERS, arrays, options, _prepare(arrays, transpose_b, out_dtype, at))
    check_gradient("sparse_matmul", *arrays)
    return answer.run(*arrays)


_ANSWERS: Cache[Prepared] = Cache(1024)


def _check_matrix(x: Any, name: str) -> None:
    element = type_name(x)
    if element not in TYPES or TYPES[element][0] not in ("half", "fp8", "int8"):
        raise error("matmul-type", f"sparse matrices of ‹{element}› are not supported",
                    expected="float16, bfloat16, float8_e4m3fn, float8_e5m2, int8 or uint8", hint="convert it to one of these")
    if x.ndim != 2:
        raise error("matmul-shape", f"{name} has {x.ndim} dimensions", found=str(tuple(x.shape)), expected="a matrix",
                    hint="pass one matrix a call")


def _prepare(arrays: tuple[Any, ...], transpose_b: bool, out_dtype: Any, at: Place) -> Prepared:
    """Check the arguments, and compile the kernel."""
    values, metadata, b = arrays
    types = check_types(values, b, out_dtype)
    for x, name in ((values, "values"), (b, "b")):
        _check_matrix(x, name)
    m, k = int(values.shape[0]), 2 * int(values.shape[1])
    n, k_b = (int(x) for x in (b.shape if transpose_b else b.shape[::-1]))
    meta, columns = metadata_of(types[0])
    want = (k // columns, padded_rows(m))
    if type_name(metadata) != meta:
        raise error("matmul-type", f"metadata of ‹{type_name(metadata)}›", expected=meta,
                    hint="pass the second result of sparse_compress")
    if k != k_b or k % COLUMNS or 0 in (m, n, k) or tuple(metadata.shape) != want:
        raise error("matmul-shape", f"values {tuple(values.shape)} and metadata {tuple(metadata.shape)} by b "
                    f"{tuple(b.shape)}{' transposed' if transpose_b else ''}", found=f"k = {k} of values, {k_b} of b",
                    expected=f"one k, a positive multiple of {COLUMNS}, and metadata {want}",
                    hint="pass both results of sparse_compress, and b as (k, n), or as (n, k) with transpose_b=True")
    if len({place(x) for x in arrays}) > 1:
        raise error("matmul-device", "values, metadata and b are on different devices", expected="one device",
                    found=", ".join(str(place(x)) for x in arrays), hint="move them to one")
    sides = operand(values, "values", False), operand(b, "b", transpose_b)
    check_target(MatmulProblem(m, n, k, types, TYPES[types[0]][0], *sides), at.target)
    f = Form(m, n, k, types, _NO_TILE, tb=transpose_b)
    f = replace(f, tile=sparse_tile(at.chip, f))
    # Clusters wait for each other: 128 x 256 takes 130 us at 4096^3, in clusters of two 141 and 170.
    far = at.chip.kind == "wgmma" and _taken(at.chip, f) > 1
    kernel = at.kernel(sparse_gemm, f, far, enable_pdl=f.tile.pdl or None, cluster=(1, 1) if at.chip.kind == "wgmma" else None)
    made, partials = maker(values, (m, n), types[2]), maker(values, f.partials_shape, types[3])

    def run(values: Any, metadata: Any, b: Any) -> Any:
        out = made()
        kernel(contiguous(values), contiguous(metadata), contiguous(b), *((partials(),) if f.tile.splits > 1 else ()), out)
        return out

    return Prepared(run)
