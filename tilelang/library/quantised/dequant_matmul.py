"""`dequant_matmul`: GEMM with quantised weights of four bits in groups.

The weights are dequantised into registers, as the left operand of the MMA (swap-AB): C.T = D A.T. So the dequantised weights
need no bandwidth of shared memory, and a tile can be as narrow as the few rows of A. Where this gives too few blocks, the
blocks split k, and a second launch adds the partial sums in a fixed order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import ceil
from typing import Any

import tilelang.language as T
from tilelang.language.tracing.state import error
from tilelang.target.machine import kernel_rates, nearest_chip

from ..agreement import Disjoint
from ..arrays import compact, compact_copy, maker, place, strided, strides, type_name
from ..caches import Cache, Prepared, enter, known
from ..gemm.problem import check_disjoint, check_gradient, check_tensors
from ..gemm.tile import Chip
from ..place import Place

GROUP_ROWS = 64  # rows of the weights that one warp group computes
_BARRIERS = 1024


@dataclass(frozen=True)
class DequantTile:
    """A tile of dequant_matmul.

    bm, bn: rows of A and rows of the weights in a tile. bk: columns of k in one step of the loop. stages: of its pipeline.
    splits: number of blocks that split k.
    """

    bm: int
    bn: int
    bk: int
    stages: int
    splits: int = 1

    @property
    def threads(self) -> int:
        return self.bn // GROUP_ROWS * 128


@dataclass(frozen=True)
class DequantForm:
    """A GEMM of m x k by n x k weights, which are quantised in groups along k, and its tile.

    element: type of A, the scales and the result. lut: the weights are indices of a look-up table; otherwise they are integers.
    zero_points: whether there are zero points.
    """

    m: int
    n: int
    k: int
    group: int
    element: str
    lut: bool
    zero_points: bool
    tile: DequantTile

    @property
    def steps(self) -> int:
        """Number of steps that a block runs, each over `bk` columns of k."""
        return ceil(ceil(self.k / self.tile.bk) / self.tile.splits)

    @property
    def groups(self) -> int:
        """Number of quantisation groups in the columns of k that a block reads of one row of the weights."""
        return ceil(self.steps * self.tile.bk / self.group)

    @property
    def shared(self) -> int:
        """Shared memory of a block, in bytes."""
        t = self.tile
        return t.stages * t.bk * (t.bm * 2 + t.bn // 2) + t.bn * self.groups * (2 + self.zero_points) + _BARRIERS


_ELEMENTS = ("float16", "bfloat16")


def dequant_problem(given: Mapping[str, Any]) -> DequantForm:
    """The form of a call, whose tile is still to be chosen.

    given: a, w, scales and, where given, zero_points, lut, out. Raises matmul-type, matmul-shape, matmul-device.
    """
    a, w, scales = (given[x] for x in ("a", "w", "scales"))
    for name, x in given.items():
        if place(x) != place(a):
            raise error("matmul-device", f"a is on {place(a)} and `{name}` on {place(x)}", expected="arrays on one device",
                        found=f"{place(a)} and {place(x)}", hint="move them to one device")
        wanted = _ELEMENTS if name == "a" else ("uint8",) if name in ("w", "zero_points") else (type_name(a),)
        if type_name(x) not in wanted:
            raise error("matmul-type", f"`{name}` has elements of ‹{type_name(x)}›", expected=" or ".join(wanted),
                        hint="weights are pairs of numbers of four bits in a uint8; scales have a's type")
    if "lut" in given and "zero_points" in given:
        raise error("matmul-shape", "a look-up table has no zero points", expected="zero_points or lut", found="both",
                    hint="subtract the zero points from the table's values")
    for name in ("a", "w", "scales"):
        if given[name].ndim != 2:
            raise error("matmul-shape", f"`{name}` has {given[name].ndim} dimensions", expected="2 dimensions",
                        found=str(tuple(given[name].shape)), hint="reshape it to (rows, columns)")
    (m, k), n, groups = (int(x) for x in a.shape), int(w.shape[0]), int(scales.shape[1])
    group = k // groups if groups else 0
    shapes = {"w": (n, k // 2), "scales": (n, groups), "zero_points": (n, groups), "lut": (16,), "out": (m, n)}
    for name, shape in shapes.items():
        x = given.get(name)
        if x is not None and tuple(x.shape) != shape:
            raise error("matmul-shape", f"`{name}` has shape ‹{tuple(x.shape)}›", expected=str(shape),
                        hint="w is (n, k / 2); scales and zero_points are (n, k / group), lut (16,)")
    if k % 2 or not group or groups * group != k:
        raise error("matmul-shape", f"{groups} groups do not divide {k} weights of a row into equal parts",
                    expected="an even k and equal groups", found=f"{k} and {groups}", hint="pad a and w with zeros")
    return DequantForm(m, n, k, group, type_name(a), "lut" in given, "zero_points" in given, DequantTile(16, 64, 64, 2))


# Constants of an H200, fitted to 18 timed tiles of 1 to 4096 rows (benchmarks/results/notes.md): seconds of a launch and of the
# second launch; cycles of a step; cycles to dequantise one weight in a thread while no other warp of its scheduler does; the
# fraction of the MMA time that is not hidden; bytes per cycle that each SM loads while all do.
_START, _SECOND = 2.0e-6, 1.5e-6
_STEP, _DECODE, _MMA, _LOAD = 250.0, 4.0, 0.66, 32.0
_PARTIALS, _CLOCK = kernel_rates("wgmma").split_k, nearest_chip(90).clock


def tiles(f: DequantForm, chip: Chip) -> Iterator[DequantForm]:
    """The form with each tile that is possible on a chip."""
    for bm in (16, 32, 64, 128, 256):
        if bm > 16 and bm >= 2 * f.m:
            break
        for bn in (64, 128):
            for bk, stages in ((64, 4), (128, 4), (128, 2), (256, 3)):
                if bm * bk * stages > 256 * 256 or bm * bn > 256 * 128:
                    continue
                for splits in range(1, 9):
                    v = replace(f, tile=DequantTile(bm, bn, bk, stages, splits))
                    own = v.steps * bk
                    # Each split begins at the start of a quantisation group, and none is empty.
                    if v.shared <= chip.shared and (splits == 1 or own % f.group == 0 and own * (splits - 1) < f.k):
                        yield v


def seconds(f: DequantForm, chip: Chip) -> float:
    """The estimated time of a form with its tile, in seconds."""
    t = f.tile
    blocks = ceil(f.m / t.bm) * ceil(f.n / t.bn) * t.splits
    together = max(1, min(chip.shared_sm // f.shared, 2048 // (t.threads + 128), ceil(blocks / chip.sms)))
    together = min(together, 2) if t.bm <= 64 else 1  # limited by registers
    warps = together * t.bn // GROUP_ROWS  # warps of one scheduler
    mma = t.bk / 16 * max(t.bm / 2, 20.0)
    loaded = together * t.bk * (t.bm * 2 + t.bn // 2) / _LOAD
    step = max(_STEP + warps * (_DECODE * t.bk / 2 + _MMA * mma), loaded * min(1, blocks / chip.sms / together))
    waves = ceil(blocks / (chip.sms * together))
    sums = _SECOND + 8.0 * t.splits * f.m * f.n / _PARTIALS if t.splits > 1 else 0.0
    return _START + (loaded + waves * f.steps * step) / _CLOCK + sums


def choose_tile(f: DequantForm, chip: Chip) -> DequantForm:
    """The form with the tile of the least cost."""
    found = list(tiles(f, chip))
    if not found:  # the groups allow no split, and there are too many for one block
        return replace(f, tile=DequantTile(16, 64, 64, 2))
    return min(found, key=lambda v: (seconds(v, chip), v.tile.splits, v.shared))


@T.macro
def _accumulate_split(f, A, W, scales, zeros, at, Cf):
    """Compute a block's partial sums of C.T, over its split of k."""
    t, (bx, by, bz) = f.tile, at
    own, column = f.steps * t.bk, bx * t.bn
    As = T.alloc_shared((t.bm, t.bk), f.element)
    Ws = T.alloc_shared((t.bn, t.bk // 2), "uint8")
    Ss = T.alloc_shared((t.bn, f.groups), f.element)
    D = T.alloc_fragment((t.bn, t.bk), f.element)
    T.copy(scales[column, bz * own // f.group], Ss)
    if f.lut:
        values = T.alloc_shared((16,), f.element)
        T.copy(zeros, values)
    elif f.zero_points:
        Zs = T.alloc_shared((t.bn, f.groups), "uint8")
        T.copy(zeros[column, bz * own // f.group], Zs)
    T.clear(Cf)
    for ko in T.Pipelined(f.steps, num_stages=t.stages):
        T.copy(W[column, (bz * own + ko * t.bk) // 2], Ws)
        T.copy(A[by * t.bm, bz * own + ko * t.bk], As)
        for i, j in T.Parallel(t.bn, t.bk):
            g = (ko * t.bk + j) // f.group
            q = T.cast((Ws[i, j // 2] >> T.cast(j % 2 * 4, "uint8")) & T.uint8(15), "int32")
            if f.lut:
                D[i, j] = values[q] * Ss[i, g]
            elif f.zero_points:
                D[i, j] = T.cast(q - T.cast(Zs[i, g], "int32"), f.element) * Ss[i, g]
            else:
                D[i, j] = T.cast(q, f.element) * Ss[i, g]
        T.gemm(D, As, Cf, transpose_B=True)


def dequant_gemm(f: DequantForm) -> Any:
    """The kernel with the parameters (A, W, scales, zero points or look-up table, P, C).

    P: (splits, m, n) float32 workspace of any contents, used for more than one split.
    """
    m, n, k, t = f.m, f.n, f.k, f.tile
    second = (16,) if f.lut else (n, ceil(k / f.group)) if f.zero_points else (1,)
    blocks = (ceil(n / t.bn), ceil(m / t.bm))

    @T.prim_func
    def dequant_matmul(A: T.Tensor((m, k), f.element), W: T.Tensor((n, k // 2), "uint8"),
                     scales: T.Tensor((n, k // f.group), f.element),
                     zeros: T.Tensor(second, f.element if f.lut else "uint8"),
                     P: T.Tensor((t.splits, m, n) if t.splits > 1 else (1,), "float32"), C: T.Tensor((m, n), f.element)):
        if t.splits == 1:
            with T.Kernel(*blocks, threads=t.threads) as (bx, by):
                Cf = T.alloc_fragment((t.bn, t.bm), "float32")
                _accumulate_split(f, A, W, scales, zeros, (bx, by, 0), Cf)
                turned = T.alloc_fragment((t.bm, t.bn), "float32")
                T.transpose(Cf, turned)
                T.copy(turned, C[by * t.bm, bx * t.bn])
        else:
            with T.Kernel(*blocks, t.splits, threads=t.threads) as (bx, by, bz):
                Cf = T.alloc_fragment((t.bn, t.bm), "float32")
                _accumulate_split(f, A, W, scales, zeros, (bx, by, bz), Cf)
                for i, j in T.Parallel(t.bn, t.bm):
                    if T.And(by * t.bm + j < m, bx * t.bn + i < n):
                        P[bz, by * t.bm + j, bx * t.bn + i] = Cf[i, j]
            with T.Kernel(ceil(n / 256), m, threads=256) as (bx, row):
                T.pdl_sync()
                total = T.alloc_fragment((256,), "float32")
                T.clear(total)
                for p in T.unroll(t.splits):
                    for j in T.Parallel(256):
                        total[j] += P[p, row, bx * 256 + j]
                for j in T.Parallel(256):
                    C[row, bx * 256 + j] = T.cast(total[j], f.element)

    return dequant_matmul


_NAMES = ("a", "w", "scales", "zero_points", "lut", "out")
_PDL = 64  # rows up to which the launch uses PDL


def dequant_matmul(a: Any, w: Any, scales: Any, zero_points: Any = None, *, lut: Any = None, out: Any = None,
                   target: Any = None, execution_backend: str | None = None) -> Any:
    """a @ d.T for d[i, j] = (q - zero_points[i, j // group]) * scales[i, j // group], or lut[q] * scales[i, j // group].

    a: (m, k) float16 or bfloat16. w: (n, k / 2) uint8; each byte holds the 4-bit numbers q of two neighbours in a row of d, the
    first in the low half. scales: (n, k / group) of a's type. zero_points: (n, k / group) uint8, or None for zeros. lut: (16,)
    of a's type, a look-up table; it excludes zero_points. Result: (m, n) of a's type, in `out` if given. `out` must be disjoint
    from the other tensors.

    Each element of d is rounded once, and sums are accumulated in float32. Equal arguments give equal bits. A cost model, which
    includes the time of dequantisation, chooses the tile and the number of blocks that split k. Raises matmul-type,
    matmul-shape, matmul-device, matmul-option, matmul-gradient.

    >>> import numpy as np
    >>> w = np.array([[0x21, 0x43]], np.uint8)
    >>> dequant_matmul(np.ones((1, 4), np.float16), w, np.array([[0.5, 2]], np.float16)).tolist()
    [[15.5]]
    """
    given = (a, w, scales, zero_points, lut, out)
    options = str(target), execution_backend
    answer = known(_ANSWERS, given, options)
    if answer is None:
        answer = enter(_ANSWERS, given, options, _prepare(given, target, execution_backend))
    check_gradient("dequant_matmul", *given)
    if out is None:
        out = answer.result()
    elif not answer.disjoint.surely(out, given[:-1]):
        check_disjoint(out, dict(zip(_NAMES, given[:-1])))
    answer.run(a, w, scales, zero_points if lut is None else lut, out)
    return out


_ANSWERS: Cache[Prepared] = Cache(4096)


def _prepare(given: tuple[Any, ...], target: Any, backend: str | None) -> Prepared:
    """Check the arguments, and find or compile their kernel. given: in the order of _NAMES."""
    check_tensors((*given[:3], *(x for x in given[3:] if x is not None)))
    named = {name: x for name, x in zip(_NAMES, given) if x is not None}
    a, at = given[0], Place.of(given[0], target, backend)
    f = choose_tile(dequant_problem(named), at.chip)
    # The launch of few rows uses PDL, which saves 0.7 to 0.9 us of 8 to 10.
    kernel = at.kernel(dequant_gemm, f, enable_pdl=at.target.has_wgmma and f.m <= _PDL or None) if f.m and f.n else None
    result, splits = maker(a, (f.m, f.n), f.element), f.tile.splits
    partials = maker(a, (splits, f.m, f.n), "float32") if splits > 1 else lambda: None  # an argument that is not used
    *taken, direct = (x is None or strided(x) and strides(x) == compact(x.shape) for x in (
        *given[:3], named.get("lut", named.get("zero_points")), given[-1]))

    def run(a: Any, w: Any, scales: Any, second: Any, out: Any) -> None:
        if kernel is None:
            return
        arrays = (a, w, scales, second) if all(taken) else (
            x if ok else compact_copy(x) for x, ok in zip((a, w, scales, second), taken))
        own = out if direct else result()
        kernel(*arrays, partials(), own)
        if own is not out:
            out[...] = own

    return Prepared(run, result, disjoint=None if given[-1] is None else Disjoint(given[-1], given[:-1]))
