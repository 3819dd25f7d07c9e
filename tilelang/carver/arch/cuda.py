"""CUDA and CDNA: the properties of GPU architectures that the choice of tile sizes needs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tilelang.target import Target
from tilelang.target.machine import REGISTERS_PER_SM, Chip, chip_of, clock_rates, nearest_chip
from tilelang.target.mfma import MFMA_ROWS
from tilelang.target.mma import MMA_ROWS

from .device import TileDevice
from .driver import get_cuda_device_properties


class _Gpu(TileDevice):
    """What the architectures of GPUs have.  bandwidth: [L2, memory] in MB/s.  smem_cap, max_smem_usage: bytes of shared memory
    of a block."""

    sm_partition = 4

    def _read(self, target: Any, chip_for: Callable[[Any], Chip]) -> Chip:
        self.target = target if isinstance(target, Target) else Target(target)
        if self.platform != {"cuda": "CUDA", "hip": "CDNA"}.get(self.target.kind):
            raise ValueError(f"carver.arch.{self.platform} describes {self.platform} targets, found {self.target}")
        chip, limits = chip_for(self.target.machine), self.target.limits
        self.name, self.compute_max_core, self.l2_cache_size_bytes = chip.name, chip.sm_count, chip.l2_bytes
        self.bandwidth = [round(chip.l2_bandwidth / 1e6), round(chip.bandwidth / 1e6)]
        self.smem_cap = self.max_smem_usage = int(self.target.max_shared_bytes)
        self.smem_per_sm, self.threads_per_sm = limits.shared_per_sm, limits.threads_per_sm
        self.clock, self.compute_capability = chip.clock, str(self.target.machine)
        return chip


class CDNA(_Gpu):
    """A data-centre GPU of AMD.  target: "hip", or a dict with mcpu.  A compute unit is an SM here."""

    platform = "CDNA"
    warp_size, transaction_size = 64, [64, 128]

    def __init__(self, target: Any = "hip") -> None:
        chip = self._read(target, lambda machine: chip_of(machine) or nearest_chip(0))
        self.reg_cap, self.device = self.target.limits.registers_per_sm, None
        rates = (chip.peak(16, True) or 0.0, chip.fp32)
        self.tensor_rate, self.fma_rate = (x / (2 * chip.sm_count * chip.clock) for x in rates)

    @property
    def available_tensor_instructions(self) -> list[str]:
        """Names of the MFMA instructions of this architecture."""
        return [name for name, row in MFMA_ROWS.items() if row.on(self.target)]

    def get_avaliable_tensorintrin_shapes(self) -> list[list[int]]:
        return [[16, 16], [32, 32]]

    def __repr__(self) -> str:
        return f"CDNA({self.name}, {self.target.arch})"


class CUDA(_Gpu):
    """An NVIDIA architecture.  target: "cuda", or a dict with an arch.  A present device supplies its own figures."""

    platform = "CUDA"
    warp_size, reg_cap, transaction_size = 32, REGISTERS_PER_SM, [32, 128]

    def __init__(self, target: Any = "cuda") -> None:
        self._read(target, nearest_chip)
        self.sm_version, rates = self.target.arch_number, clock_rates(self.target.arch_number)
        self.tensor_rate, self.fma_rate = rates.mma, rates.fma
        self.device = get_cuda_device_properties() if target == "cuda" else None
        if self.device is not None:
            self.name, self.compute_max_core = self.device.name, self.device.sm_count

    @property
    def available_tensor_instructions(self) -> list[str]:
        """Names of the warp-level MMA instructions of this architecture."""
        return [name for name, row in MMA_ROWS.items() if self.sm_version >= row.min_arch]

    def get_avaliable_tensorintrin_shapes(self) -> list[list[int]]:
        return [[16, 16]] if self.sm_version >= 70 else []

    def __repr__(self) -> str:
        return f"CUDA({self.name}, sm_{self.sm_version})"
