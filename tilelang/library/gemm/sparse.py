"""`sparse_matmul`: a GEMM whose first operand is 2:4 sparse, and `sparse_compress`, which makes its compressed form."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Any

import tilelang.language as T
from tilelang.errors import error

from ..arrays import contiguous, empty, maker, place, type_name, zeros
from ..caches import Cache, Prepared, enter, known
from ..place import Place
from .operands import operand
from .problem import TYPES, MatmulProblem, check_gradient, check_target, check_tensors, check_types
from .tile import Chip

COLUMNS = 64  # k is a multiple of this: the metadata that one instruction, or two, take from a thread
_BYTE = 8  # columns that a byte of metadata describes
# For each set of columns of a group that are not zero, a bit each, 4 bits: the two that are kept; 0 where there are more.
_CODES = 0x09884444, 0x000E0DCC  # of sets without the last column, and with it


@dataclass(frozen=True)
class SparseTile:
    """A tile of bm x bn, with steps of bk columns of k in `stages` stages and `groups` warp groups that compute."""

    bm: int
    bn: int
    bk: int
    stages: int
    groups: int


@dataclass(frozen=True)
class SparseForm:
    """C (m, n) = A @ B, A of kept values (m, k / 2) and metadata (k / 8, padded m).

    types: of A, B, C and the accumulator.  tb: B is stored (n, k).
    """

    m: int
    n: int
    k: int
    types: tuple[str, str, str, str]
    tb: bool
    tile: SparseTile

    @property
    def padded(self) -> int:
        return padded_rows(self.m)


def padded_rows(m: int) -> int:
    """Columns of the metadata of m rows: TMA needs rows of whole 16 bytes."""
    return ceil(m / 16) * 16


def sparse_gemm(f: SparseForm) -> Any:
    """The kernel with the parameters (A, E, B, C)."""
    t, (element, element_b, result, acc) = f.tile, f.types

    @T.prim_func
    def sparse_matmul(A: T.Tensor((f.m, f.k // 2), element), E: T.Tensor((f.k // _BYTE, f.padded), "uint8"),
                      B: T.Tensor((f.n, f.k) if f.tb else (f.k, f.n), element_b), C: T.Tensor((f.m, f.n), result)):
        with T.Kernel(T.ceildiv(f.n, t.bn), T.ceildiv(f.m, t.bm), threads=128 * t.groups) as (bx, by):
            As = T.alloc_shared((t.bm, t.bk // 2), element)
            Es = T.alloc_shared((t.bk // _BYTE, t.bm), "uint8")
            Bs = T.alloc_shared((t.bn, t.bk) if f.tb else (t.bk, t.bn), element_b)
            Cf = T.alloc_fragment((t.bm, t.bn), acc)
            T.use_swizzle(8)
            T.clear(Cf)
            for ko in T.Pipelined(f.k // t.bk, num_stages=t.stages):
                T.copy(A[by * t.bm, ko * t.bk // 2], As)
                T.copy(E[ko * t.bk // _BYTE, by * t.bm], Es)
                T.copy(B[bx * t.bn, ko * t.bk] if f.tb else B[ko * t.bk, bx * t.bn], Bs)
                T.gemm_sp(As, Es, Bs, Cf, transpose_E=True, transpose_B=f.tb)
            T.copy(Cf, C[by * t.bm, bx * t.bn])

    return sparse_matmul


def compress(m: int, k: int, element: str) -> Any:
    """The kernel with the parameters (A, values, E, wrong): wrong becomes 1 where a group has more than two values."""
    rows, wide = 32, 8  # of a block; groups of 16 columns

    @T.prim_func
    def sparse_compress(A: T.Tensor((m, k), element), values: T.Tensor((m, k // 2), element),
                        E: T.Tensor((k // _BYTE, padded_rows(m)), "uint8"), wrong: T.Tensor((1,), "int32")):
        with T.Kernel(T.ceildiv(k // _BYTE, wide), T.ceildiv(m, rows), threads=rows * wide) as (bx, by):
            for i, j in T.Parallel(rows, wide):
                r, c = by * rows + i, bx * wide + j
                if r < m and c < k // _BYTE:
                    word = T.alloc_var("int32", init=0)
                    for g in T.unroll(2):
                        x = [A[r, c * _BYTE + g * 4 + n] for n in range(4)]
                        bits = [T.if_then_else(T.cast(v, "float32") == 0.0, 0, 1 << n) for n, v in enumerate(x)]
                        code = T.if_then_else(bits[3] == 0, *_CODES) >> 4 * (bits[0] + bits[1] + bits[2]) & 15
                        if code == 0:
                            T.atomic_max(wrong[0], 1)
                        word = word | code << 4 * g
                        for h in T.unroll(2):
                            at = (code >> 2 * h) & 3
                            values[r, c * (_BYTE // 2) + g * 2 + h] = T.if_then_else(
                                at < 2, T.if_then_else(at == 0, x[0], x[1]), T.if_then_else(at == 2, x[2], x[3]))
                    E[c, r] = T.cast(word, "uint8")

    return sparse_compress


# Cycles that a tile takes beside its steps, and a step beside its work, because each GEMM is waited for; bytes a cycle that L2
# gives an SM while the others load.  36 pairs of tiles and sizes of few columns lie within 25 %, 8 % in the root mean square.
_START, _WAIT, _LOADED = 2000, 250, 80
_STAGES = 190 * 1024  # bytes of shared memory for stages


def sparse_tile(chip: Chip, m: int, n: int, k: int, size: int) -> SparseTile:
    """The tile of the least estimated time.  size: bytes of an element."""
    if chip.kind != "wgmma":
        return SparseTile(64 if m <= 64 else 128, 64 if n <= 64 else 128, COLUMNS, 2, 1 if m <= 64 else 2)
    tiles = [SparseTile(64 * groups, bn, bk, min(8, _STAGES // _loaded(64 * groups, bn, bk, size)), groups)
             for groups in (1, 2) for bn in range(32, 257, 32) for bk in (512 // size, 256 // size, COLUMNS)]
    return min((t for t in tiles if t.stages > 1 and k % t.bk == 0), key=lambda t: _cycles(chip, m, n, k, size, t))


def _loaded(bm: int, bn: int, bk: int, size: int) -> int:
    """Bytes of a stage."""
    return bm * bk * size // 2 + bm * bk // _BYTE + bn * bk * size


def _cycles(chip: Chip, m: int, n: int, k: int, size: int, t: SparseTile) -> float:
    """Estimated cycles of a tile: an instruction reads 64 rows of A in 16 cycles and B in N / 2."""
    waves = ceil(ceil(m / t.bm) * ceil(n / t.bn) / chip.sms)
    step = max(t.bk / COLUMNS * t.bm / 64 * size * (16 + t.bn / 2), _loaded(t.bm, t.bn, t.bk, size) / _LOADED)
    return waves * (k / t.bk * (step + _WAIT) + _START + t.bm * t.bn / 8)


def sparse_compress(a: Any, *, target: Any = None, execution_backend: str | None = None) -> tuple[Any, Any]:
    """The compressed form of a 2:4 sparse matrix, for sparse_matmul: (kept values, metadata).

    a: (m, k), of float16, bfloat16, float8_e4m3fn, float8_e5m2, int8 or uint8, k a multiple of 64; of each four neighbours in a
    row, from column 0 on, two are zero at least.  A torch tensor or a NumPy array.
    Result: (m, k / 2) of a's type, and uint8 (k / 8, m rounded up to 16): each byte describes 8 columns of a row, 4 bits for
    each four: the two kept columns, 2 bits each, the lower column first.

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
    values, words = empty(a, (m, k // 2), element), zeros(a, (k // _BYTE, padded_rows(m)), "uint8")
    wrong = zeros(a, (1,), "int32")
    at.kernel(compress, m, k, element)(contiguous(a), values, words, wrong)
    if int(wrong[0]):
        raise error("matmul-option", "a of sparse_compress is not 2:4 sparse", found="a group of more than two values",
                    expected="two zeros in each four neighbours of a row", hint="set the two smallest of each four to zero")
    return values, words


def sparse_matmul(values: Any, metadata: Any, b: Any, *, transpose_b: bool = False, out_dtype: Any = None, target: Any = None,
                  execution_backend: str | None = None) -> Any:
    """a @ op(b) for a 2:4 sparse a of m x k, which sparse_compress has made (values, metadata) of.

    values: (m, k / 2).  metadata: uint8 (k / 8, m rounded up to 16).  b: (k, n), or (n, k) with transpose_b, of values' type.
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
    want = (k // _BYTE, padded_rows(m))
    if k != k_b or k % COLUMNS or 0 in (m, n, k) or tuple(metadata.shape) != want:
        raise error("matmul-shape", f"values {tuple(values.shape)} and metadata {tuple(metadata.shape)} by b "
                    f"{tuple(b.shape)}{' transposed' if transpose_b else ''}", found=f"k = {k} of values, {k_b} of b",
                    expected=f"one k, a positive multiple of {COLUMNS}, and metadata {want}",
                    hint="pass both results of sparse_compress, and b as (k, n), or as (n, k) with transpose_b=True")
    if type_name(metadata) != "uint8":
        raise error("matmul-type", f"metadata of ‹{type_name(metadata)}›", expected="uint8",
                    hint="pass the second result of sparse_compress")
    if len({place(x) for x in arrays}) > 1:
        raise error("matmul-device", "values, metadata and b are on different devices", expected="one device",
                    found=", ".join(str(place(x)) for x in arrays), hint="move them to one")
    sides = operand(values, "values", False), operand(b, "b", transpose_b)
    check_target(MatmulProblem(m, n, k, types, TYPES[types[0]][0], *sides), at.target)
    f = SparseForm(m, n, k, types, transpose_b, sparse_tile(at.chip, m, n, k, values.itemsize))
    # Clusters wait for each other: 128 x 256 takes 130 us at 4096^3, in clusters of two 141 and 170.
    kernel = at.kernel(sparse_gemm, f, cluster=(1, 1) if at.chip.kind == "wgmma" else None)
    made = maker(values, (m, n), types[2])

    def run(values: Any, metadata: Any, b: Any) -> Any:
        out = made()
        kernel(contiguous(values), contiguous(metadata), contiguous(b), out)
        return out

    return Prepared(run)
