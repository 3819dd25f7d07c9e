"""Products with weights of four bits: tiles, their price, the program.

The weights are decoded into registers, as the left operand of the product: C.T = D A.T.  So nothing decoded goes through
shared memory, whose bandwidth such products would use up, and a product of few rows of A is as narrow as they are.  Where that
makes too few blocks, k is shared out, and a second launch adds the sums in order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import ceil
from typing import Any

import tilelang.language as T

from ..gemm.tile import Chip

# Of an H200, fitted to 18 timed tiles of 1 to 4096 rows (benchmarks/results/notes.md): seconds of a launch, of the second
# one; bytes a second of partial sums on their way; cycles of a step, of a weight that a thread dequantises while no other warp
# of its scheduler does; the fraction of the MMA time that is not hidden; bytes a cycle that each SM loads while all do.
_START, _SECOND, _SUMS = 2.0e-6, 1.5e-6, 6e12
_STEP, _DECODE, _PRODUCT, _LOAD = 250.0, 4.0, 0.66, 32.0
_CLOCK = 1.7e9  # of short kernels
_GROUP = 64  # rows of the weights for a warp group
_BARRIERS = 1024


@dataclass(frozen=True)
class CodedTile:
    """bm, bn: rows of A and of the weights of a tile.  bk, stages: of the loop.  parts: blocks that share out k."""

    bm: int
    bn: int
    bk: int
    stages: int
    parts: int = 1

    @property
    def threads(self) -> int:
        return self.bn // _GROUP * 128


@dataclass(frozen=True)
class CodedForm:
    """A product of m x k by the n x k weights in groups along k.

    element: of A, the scales and the result.  table: the weights are places of a table, else integers.  zeros: they have
    zeros.
    """

    m: int
    n: int
    k: int
    group: int
    element: str
    table: bool
    zeros: bool
    tile: CodedTile

    @property
    def steps(self) -> int:
        """Of a block."""
        return ceil(ceil(self.k / self.tile.bk) / self.tile.parts)

    @property
    def groups(self) -> int:
        """Of a row of a block's weights."""
        return ceil(self.steps * self.tile.bk / self.group)

    @property
    def shared(self) -> int:
        """Bytes of a block."""
        t = self.tile
        return t.stages * t.bk * (t.bm * 2 + t.bn // 2) + t.bn * self.groups * (2 + self.zeros) + _BARRIERS


def tiles(f: CodedForm, chip: Chip) -> Iterator[CodedForm]:
    """The form with each tile that it may have on a chip."""
    for bm in (16, 32, 64, 128, 256):
        if bm > 16 and bm >= 2 * f.m:
            break
        for bn in (64, 128):
            for bk, stages in ((64, 4), (128, 4), (128, 2), (256, 3)):
                if bm * bk * stages > 256 * 256 or bm * bn > 256 * 128:
                    continue
                for parts in range(1, 9):
                    v = replace(f, tile=CodedTile(bm, bn, bk, stages, parts))
                    own = v.steps * bk
                    # A part begins with a group, and none is empty.
                    if v.shared <= chip.shared and (parts == 1 or own % f.group == 0 and own * (parts - 1) < f.k):
                        yield v


def seconds(f: CodedForm, chip: Chip) -> float:
    """What a form with its tile is expected to take."""
    t = f.tile
    blocks = ceil(f.m / t.bm) * ceil(f.n / t.bn) * t.parts
    together = max(1, min(chip.shared_unit // f.shared, 2048 // (t.threads + 128), ceil(blocks / chip.units)))
    together = min(together, 2) if t.bm <= 64 else 1  # registers
    warps = together * t.bn // _GROUP  # of a scheduler
    product = t.bk / 16 * max(t.bm / 2, 20.0)
    loaded = together * t.bk * (t.bm * 2 + t.bn // 2) / _LOAD
    step = max(_STEP + warps * (_DECODE * t.bk / 2 + _PRODUCT * product), loaded * min(1, blocks / chip.units / together))
    rounds = ceil(blocks / (chip.units * together))
    sums = _SECOND + 8.0 * t.parts * f.m * f.n / _SUMS if t.parts > 1 else 0.0
    return _START + (loaded + rounds * f.steps * step) / _CLOCK + sums


def chosen(f: CodedForm, chip: Chip) -> CodedForm:
    """The form with the tile of the least price."""
    found = list(tiles(f, chip))
    if not found:  # groups that no part may begin with, too many for one block
        return replace(f, tile=CodedTile(16, 64, 64, 2))
    return min(found, key=lambda v: (seconds(v, chip), v.tile.parts, v.shared))


@T.macro
def _sums(f, A, W, scales, zeros, at, Cf):
    """A block's sums of C.T, of its part of k."""
    t, (bx, by, bz) = f.tile, at
    own, column = f.steps * t.bk, bx * t.bn
    As = T.alloc_shared((t.bm, t.bk), f.element)
    Ws = T.alloc_shared((t.bn, t.bk // 2), "uint8")
    Ss = T.alloc_shared((t.bn, f.groups), f.element)
    D = T.alloc_fragment((t.bn, t.bk), f.element)
    T.copy(scales[column, bz * own // f.group], Ss)
    if f.table:
        values = T.alloc_shared((16,), f.element)
        T.copy(zeros, values)
    elif f.zeros:
        Zs = T.alloc_shared((t.bn, f.groups), "uint8")
        T.copy(zeros[column, bz * own // f.group], Zs)
    T.clear(Cf)
    for ko in T.Pipelined(f.steps, num_stages=t.stages):
        T.copy(W[column, (bz * own + ko * t.bk) // 2], Ws)
        T.copy(A[by * t.bm, bz * own + ko * t.bk], As)
        for i, j in T.Parallel(t.bn, t.bk):
            g = (ko * t.bk + j) // f.group
            q = T.cast((Ws[i, j // 2] >> T.cast(j % 2 * 4, "uint8")) & T.uint8(15), "int32")
            if f.table:
                D[i, j] = values[q] * Ss[i, g]
            elif f.zeros:
                D[i, j] = T.cast(q - T.cast(Zs[i, g], "int32"), f.element) * Ss[i, g]
            else:
                D[i, j] = T.cast(q, f.element) * Ss[i, g]
        T.gemm(D, As, Cf, transpose_B=True)


def coded_product(f: CodedForm) -> Any:
    """(A, W, scales, zeros or the table, P, C).  P: (parts, m, n) float32, any contents, for several parts."""
    m, n, k, t = f.m, f.n, f.k, f.tile
    second = (16,) if f.table else (n, ceil(k / f.group)) if f.zeros else (1,)
    blocks = (ceil(n / t.bn), ceil(m / t.bm))

    @T.prim_func
    def coded_matmul(A: T.Tensor((m, k), f.element), W: T.Tensor((n, k // 2), "uint8"),
                     scales: T.Tensor((n, k // f.group), f.element),
                     zeros: T.Tensor(second, f.element if f.table else "uint8"),
                     P: T.Tensor((t.parts, m, n) if t.parts > 1 else (1,), "float32"), C: T.Tensor((m, n), f.element)):
        if t.parts == 1:
            with T.Kernel(*blocks, threads=t.threads) as (bx, by):
                Cf = T.alloc_fragment((t.bn, t.bm), "float32")
                _sums(f, A, W, scales, zeros, (bx, by, 0), Cf)
                turned = T.alloc_fragment((t.bm, t.bn), "float32")
                T.transpose(Cf, turned)
                T.copy(turned, C[by * t.bm, bx * t.bn])
        else:
            with T.Kernel(*blocks, t.parts, threads=t.threads) as (bx, by, bz):
                Cf = T.alloc_fragment((t.bn, t.bm), "float32")
                _sums(f, A, W, scales, zeros, (bx, by, bz), Cf)
                for i, j in T.Parallel(t.bn, t.bm):
                    if T.And(by * t.bm + j < m, bx * t.bn + i < n):
                        P[bz, by * t.bm + j, bx * t.bn + i] = Cf[i, j]
            with T.Kernel(ceil(n / 256), m, threads=256) as (bx, row):
                T.pdl_sync()
                total = T.alloc_fragment((256,), "float32")
                T.clear(total)
                for p in T.unroll(t.parts):
                    for j in T.Parallel(256):
                        total[j] += P[p, row, bx * 256 + j]
                for j in T.Parallel(256):
                    C[row, bx * 256 + j] = T.cast(total[j], f.element)

    return coded_matmul


__all__ = ["CodedForm", "CodedTile", "chosen", "coded_product", "seconds", "tiles"]
