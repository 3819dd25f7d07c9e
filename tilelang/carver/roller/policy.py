"""Enumerates tiles that fit an architecture and orders them by an estimate of their clocks.

Every hint is checked against the architecture's limits: shared memory of a block, registers of a thread, threads, shapes of
the MMA instruction.  The order is an estimate (waves of blocks times the slowest of tensor cores, shared memory, L2 and
global memory).  It ranks candidates for tuning and is no prediction of the time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product as every
from math import ceil, prod
from typing import Any

from tilelang.carver.arch import TileDevice, is_cdna_arch, is_tensorcore_supported_precision
from tilelang.ir import dtype
from tilelang.target.machine import REGISTERS

from .hint import Hint, IntrinInfo, NoRasterization, Rasterization2DRow
from .work import Attention, Map, Matmul, Work

_SIZES = (16, 32, 64, 128, 256)
_SHARED_BYTES_PER_CLOCK = 128


def _pow2(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


def _registers(elements: int, name: str, threads: int) -> int:
    return ceil(elements * dtype(name).bits / 32 / threads)


class _Policy:
    """Base class: candidates for a Work on an architecture, ordered by estimated clocks."""

    def __init__(self, work: Work, arch: TileDevice) -> None:
        self.work, self.arch = work, arch

    @classmethod
    def from_prim_func(cls, func: Any, arch: TileDevice, tags: dict[str, Any] | None = None) -> Any:
        """The policy for the program of a template.  Raises ValueError for other programs."""
        return cls(work_of(func), arch)

    @classmethod
    def from_output_nodes(cls, nodes: list[Any], arch: TileDevice, tags: dict[str, Any] | None = None) -> Any:
        """The policy for the node that computes the output."""
        if len(nodes) != 1:
            raise ValueError(f"one output is tiled at a time, found {len(nodes)}")
        return cls(getattr(nodes[0], "work", None) or work_of(nodes[0]), arch)

    def candidates(self) -> Iterator[tuple[float, Hint]]:
        """(estimated clocks, hint) of every tile that fits."""
        raise NotImplementedError

    def emit_config(self, topk: int = 10) -> list[Hint]:
        """The `topk` hints of least estimated time; fewer when fewer tiles fit."""
        found = sorted(self.candidates(), key=lambda x: x[0])
        return [hint for _, hint in found[:max(0, topk)]]

    def _estimated(self, hint: Hint, blocks: int, steps: int, math: float, read: float, moved: float = 0.0,
                memory: float = 0.0) -> Iterator[tuple[float, Hint]]:
        """A hint with its estimated clocks, if a block of it fits.

        math, read, moved: clocks of arithmetic, bytes from shared memory and bytes from L2 of a step of a block.  memory: bytes
        that all blocks move together.  The SM is divided among its resident blocks.
        """
        arch, cores = self.arch, self.arch.compute_max_core
        resident = _resident(arch, hint.threads, hint.smem_bytes, hint.registers)
        if resident:
            at_once = min(resident, ceil(blocks / cores))
            few = max(1.0, 128 / (hint.threads * at_once))  # an SM has four partitions, and each needs a warp
            step = max(math * few, read / _SHARED_BYTES_PER_CLOCK, moved * cores * arch.clock / (arch.bandwidth[0] * 1e6))
            stall = steps / max(1, (hint.pipeline_stage - 1) * at_once * 2) + 2  # one stage waits for each load
            waves = ceil(blocks / (at_once * cores))
            yield max(waves * (step * steps * at_once + stall * arch.latency), self._clocks_of(memory)), hint

    def _clocks_of(self, nbytes: float) -> float:
        """Clocks in which these bytes pass between global memory and the device."""
        return nbytes * self.arch.clock / (self.arch.bandwidth[1] * 1e6)


def work_of(func: Any) -> Work:
    """The computation (Work) of a template's program.  Raises ValueError for a program that no template made."""
    work = getattr(func, "carver_work", None)
    if work is None:
        raise ValueError("hints are derived for programs that a carver template makes (equivalent_function); "
                         "for another program choose the template that computes the same")
    return work


def _resident(arch: TileDevice, threads: int, shared: int, registers: int) -> int:
    """Occupancy: resident blocks of an SM; 0 when a block does not fit."""
    if shared > arch.smem_cap or registers > 255 or threads > 1024:
        return 0
    by_registers = arch.reg_cap // (threads * max(16, -(-registers // 8) * 8))
    return min(by_registers, arch.threads_per_sm // threads, arch.smem_per_sm // max(1, shared + 1024), 16)


class TensorCorePolicy(_Policy):
    """Tiles of GEMM and attention on tensor cores."""

    def candidates(self) -> Iterator[tuple[float, Hint]]:
        work = self.work
        if isinstance(work, Map) or not is_tensorcore_supported_precision(work.in_dtype, work.accum_dtype, self.arch):
            return
        yield from self._attention(work) if isinstance(work, Attention) else self._gemm(work)

    def _micro(self, name: str) -> tuple[int, int, int]:
        k = 256 // dtype(name).bits
        if is_cdna_arch(self.arch):
            return 16, 16, k
        return 16, 8, k if self.arch.sm_version >= 80 else max(8, k // 2)

    def _rate(self, name: str) -> float:
        """Multiply-adds per clock of an SM's tensor cores."""
        return self.arch.tensor_rate * 16 / dtype(name).bits

    def _stages(self) -> tuple[int, ...]:
        return (1, 2, 3, 4) if self.arch.sm_version >= 80 else (1, 2)

    def _tiled(self, w: Matmul | Attention, stages: int, **more: Any) -> Hint:
        """A hint for tensor cores."""
        trans = (w.trans_b, w.trans_a) if isinstance(w, Matmul) else (True, False)
        return Hint(arch=self.arch, use_tc=True, pipeline_stage=stages, use_async=stages > 1 and self.arch.sm_version >= 80,
                    cached_tensors=list(more["vectorize"]), intrin_info=IntrinInfo(w.in_dtype, w.accum_dtype, *trans,
                                                                                   self._micro(w.in_dtype)), **more)

    def _gemm(self, w: Matmul) -> Iterator[tuple[float, Hint]]:
        size, inner = dtype(w.in_dtype).bits / 8, self._micro(w.in_dtype)[2]
        limit_m, limit_n = (max(16, _pow2(x)) for x in (w.m, w.n))
        bks = [k for k in (inner, 2 * inner, 4 * inner, 8 * inner) if k <= max(inner, _pow2(w.k))]
        memory = ((w.m + w.n) * w.k * size + w.m * w.n * dtype(w.out_dtype).bits / 8) * w.batch
        ordered = self.arch.sm_version == 90  # the compiler orders the tiles itself
        fits_l2 = (w.m + w.n) * w.k * size <= self.arch.l2_cache_size_bytes // 2
        for bm, bn, bk, wm, wn, stages in every(_SIZES, _SIZES, bks, (1, 2, 4, 8), (1, 2, 4, 8), self._stages()):
            steps, rows = ceil(w.k / bk), ceil(w.m / bm)
            if bm > limit_m or bn > limit_n or bm % (wm * 16) or bn % (wn * 16) or wm * wn > 16 or stages > max(1, steps):
                continue
            warp, threads = [bm // wm, bn // wn], wm * wn * max(32, self.arch.warp_size)
            hint = self._tiled(
                w, stages, block=[bm, bn], warp=warp, rstep=[bk], vectorize=_loads(w.in_dtype, bk, "A", "B"),
                rasterization_plan=NoRasterization if ordered or fits_l2 or rows < 8 else Rasterization2DRow(8),
                smem_bytes=int(stages * (bm + bn) * bk * size),
                registers=REGISTERS.tiled_loop + _registers(bm * bn, w.accum_dtype, threads)
                + _registers(sum(warp) * inner, w.in_dtype, 32))
            yield from self._estimated(hint, rows * ceil(w.n / bn) * w.batch, steps, bm * bn * bk / self._rate(w.in_dtype),
                                    wm * wn * sum(warp) * bk * size, (bm + bn) * bk * size, memory)

    def _attention(self, w: Attention) -> Iterator[tuple[float, Hint]]:
        size, width = dtype(w.in_dtype).bits / 8, max(16, _pow2(w.width))
        for bq, bk, warps, stages in every((64, 128, 256, 16, 32), (16, 32, 64, 128), (1, 2, 4, 8), self._stages()):
            steps, threads = ceil(w.keys / bk), warps * max(32, self.arch.warp_size)
            if bq % (warps * 16) or bq > max(16, _pow2(w.rows)) or bk > max(16, _pow2(w.keys)) or stages > max(1, steps):
                continue
            hint = self._tiled(
                w, stages, block=[bq, bk], warp=[bq // warps, bk], rstep=[width],
                vectorize=_loads(w.in_dtype, width, "Q", "K", "V"), smem_bytes=int((bq + stages * 2 * bk) * width * size),
                registers=REGISTERS.tiled_loop + _registers(bq * (width + bk), w.accum_dtype, threads)
                + _registers(bq * bk, w.in_dtype, threads))
            powers = bq * bk / 16  # an SM computes 16 exponentials per clock
            yield from self._estimated(hint, ceil(w.rows / bq) * w.heads, steps, 2 * bq * bk * width / self._rate(w.in_dtype)
                                    + powers, warps * 2 * bk * width * size)


def _loads(name: str, row: int, *tensors: str) -> dict[str, int]:
    """Elements per load of up to 16 bytes from rows of this many elements."""
    width = max(1, 128 // dtype(name).bits)
    while row % width:
        width //= 2
    return dict.fromkeys(tensors, width)


class DefaultPolicy(_Policy):
    """Tiles of element-wise maps, reductions and GEMM without tensor cores: each thread computes elements of the output."""

    def candidates(self) -> Iterator[tuple[float, Hint]]:
        if isinstance(self.work, Attention):
            return
        yield from self._plain_gemm(self.work) if isinstance(self.work, Matmul) else self._map(self.work)

    def _plain_gemm(self, w: Matmul) -> Iterator[tuple[float, Hint]]:
        arch, size = self.arch, dtype(w.in_dtype).bits / 8
        for bm, bn, bk, tm, tn in every((8, 16, 32, 64, 128), (8, 16, 32, 64, 128), (8, 16, 32), (4, 8, 16), (8, 16, 32)):
            if bm % tm or bn % tn or bm > max(8, _pow2(w.m)) or bn > max(8, _pow2(w.n)) or tm * tn % arch.warp_size:
                continue
            threads, each = tm * tn, (bm // tm, bn // tn)
            hint = Hint(arch=arch, block=[bm, bn], thread=[tm, tn], rstep=[bk], cached_tensors=["A", "B"],
                        vectorize=_loads(w.in_dtype, bk, "A", "B"), smem_bytes=int((bm + bn) * bk * size),
                        registers=REGISTERS.tiled_loop + _registers(bm * bn, w.accum_dtype, threads) + sum(each))
            blocks, products = ceil(w.m / bm) * ceil(w.n / bn) * w.batch, bm * bn * bk
            yield from self._estimated(hint, blocks, ceil(w.k / bk), products / arch.fma_rate,
                                    products * size * (1 / each[0] + 1 / each[1]))

    def _map(self, w: Map) -> Iterator[tuple[float, Hint]]:
        arch, bits = self.arch, dtype(w.dtype).bits
        outer, space, reduced = [1] * max(0, len(w.space) - 1), w.space or (1,), prod(w.reduced)
        for threads, vector, along in every((32, 64, 128, 256, 512), (1, 2, 4, 8, 16), (1, 8, 32, 128, 256)):
            if vector * bits > 128 or along > threads or (along > 1 and along > _pow2(reduced)):
                continue
            last = w.reduced[-1] if w.inner else space[-1]
            if last % vector:
                continue
            across, each = threads // along, 1 if w.inner else vector
            block = across * each
            if block > _pow2(space[-1]) and across > 1:
                continue
            rest = [1] * max(0, len(w.reduced) - 1)
            rstep = [*rest, along * (vector if w.inner else 1)] if w.reduced else []
            if w.reduced and rstep[-1] > max(vector, _pow2(w.reduced[-1])):
                continue
            registers = REGISTERS.tiled_loop + 2 * _registers(block * (1 if w.reduced else 2), w.accum_dtype, threads) + vector
            shared = threads * dtype(w.accum_dtype).bits // 8 if along > 32 else 0
            resident = _resident(arch, threads, shared, registers)
            if resident == 0:
                continue
            blocks = prod(space[:-1]) * ceil(space[-1] / block)
            busy = min(1.0, blocks * threads / (arch.compute_max_core * 512))  # 512 threads per SM keep memory busy
            run = min(last, (along * vector if w.inner else block)) * bits / 8  # contiguous bytes that a block requests at once
            moved = self._clocks_of(w.points * bits / 8)
            chain = ceil(reduced / (rstep[-1] if rstep else 1)) * 8 + (along.bit_length() * 30 if along > 1 else 0)
            waves = ceil(blocks / (resident * arch.compute_max_core))
            clocks = moved / max(busy, 1e-3) * max(1.0, 32 / run) + waves * (chain + arch.latency) + 64 / vector
            yield clocks, Hint(arch=arch, block=[*outer, block], thread=[*outer, across], rstep=rstep,
                               reduce_thread=[*rest, along] if w.reduced else [], _step=[*outer, each],
                               vectorize={"A": vector} if vector > 1 else {}, smem_bytes=shared, registers=registers)


def hints_for(work: Work, arch: TileDevice, topk: int = 10) -> list[Hint]:
    """Hints for a computation: for tensor cores where they support the types, else for the ordinary units."""
    return TensorCorePolicy(work, arch).emit_config(topk) or DefaultPolicy(work, arch).emit_config(topk)


# ---- computations as nodes -------------------------------------------------------------------------------------------

@dataclass(eq=False)
class PrimFuncNode:
    """A template's program.  Raises ValueError for other programs."""

    prim_func: Any
    tags: dict[str, Any] = field(default_factory=dict)
    name: str = "PrimFuncNode"

    def __post_init__(self) -> None:
        self.work = work_of(self.prim_func)


@dataclass(eq=False)
class OutputNode:
    """The result `id` of a node."""

    node: PrimFuncNode
    id: int = 0

    @property
    def work(self) -> Any:
        """The computation of the node."""
        return self.node.work


@dataclass(frozen=True, eq=False)
class Edge:
    """Output src_id of one node is input dst_id of another."""

    src_node: Any
    dst_node: Any
    src_id: int = 0
    dst_id: int = 0
