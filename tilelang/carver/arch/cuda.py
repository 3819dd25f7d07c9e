"""CUDA: the properties of an NVIDIA architecture that the choice of tile sizes needs."""

from __future__ import annotations

from typing import Any

from tilelang.target import Target
from tilelang.target.machine import REGISTERS_PER_SM, clock_rates, nearest_chip
from tilelang.target.mma import MMA_ROWS

from .device import TileDevice
from .driver import get_cuda_device_properties


class CUDA(TileDevice):
    """An NVIDIA architecture.  target: "cuda", or a dict with an arch.  A present device supplies its own figures.

    bandwidth: [L2, memory] in MB/s.  smem_cap, max_smem_usage: bytes of shared memory of a block.
    """

    platform = "CUDA"
    warp_size, reg_cap, sm_partition = 32, REGISTERS_PER_SM, 4
    transaction_size = [32, 128]

    def __init__(self, target: Any = "cuda") -> None:
        self.target = target if isinstance(target, Target) else Target(target)
        if not self.target.is_cuda:
            raise ValueError(f"carver.arch.CUDA describes CUDA targets, found {self.target}")
        number = int(self.target.arch_number or 80)
        chip, rates = nearest_chip(number), clock_rates(number)
        self.sm_version, self.compute_capability = number, str(number)
        self.name, self.compute_max_core, self.l2_cache_size_bytes = chip.name, chip.sm_count, chip.l2_bytes
        self.bandwidth = [round(chip.l2_bandwidth / 1e6), round(chip.bandwidth / 1e6)]
        self.smem_cap = self.max_smem_usage = int(self.target.max_shared_bytes)
        self.smem_per_sm, self.threads_per_sm = self.target.limits.shared_per_sm, self.target.limits.threads_per_sm
        self.tensor_rate, self.fma_rate = rates.mma, rates.fma
        self.clock = chip.clock
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
