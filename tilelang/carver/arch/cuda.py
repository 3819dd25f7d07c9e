"""CUDA: what a program may ask of an architecture when it chooses tile sizes."""

from __future__ import annotations

from typing import Any

from tilelang.target import Target

from .device import TileDevice
from .driver import get_cuda_device_properties

# sm -> (name, sm_count, L2 bytes, bandwidth of L2 and of memory in MB/s).  Sources: NVIDIA data sheets of A100 80 GB
# (SXM), RTX 3090, RTX 4090 and H100 (SXM); the L2 figures are order of magnitude.
_KNOWN = {80: ("A100", 108, 40 << 20, 4000_000, 2039_000), 86: ("RTX 3090", 82, 6 << 20, 2000_000, 936_000),
          89: ("RTX 4090", 128, 72 << 20, 5000_000, 1008_000), 90: ("H100", 132, 50 << 20, 5500_000, 3352_000)}


# sm -> multiply-adds a clock of a multiprocessor: half precision on matrix units, float32.  Source: the whitepapers of the
# architectures.  Other numbers use the nearest older one.
_RATES = {70: (512, 64), 75: (512, 64), 80: (1024, 64), 86: (512, 128), 90: (2048, 128), 100: (4096, 128), 120: (512, 128)}


class CUDA(TileDevice):
    """An NVIDIA architecture.  target: "cuda", or a dict with an arch; the device at hand fills in its own figures.

    bandwidth: [L2, memory] in MB/s.  smem_cap, max_smem_usage: bytes of shared memory of a block.
    """

    platform = "CUDA"
    warp_size, reg_cap, sm_partition = 32, 65536, 4
    transaction_size = [32, 128]

    def __init__(self, target: Any = "cuda") -> None:
        self.target = target if isinstance(target, Target) else Target(target)
        if not self.target.is_cuda:
            raise ValueError(f"carver.arch.CUDA describes CUDA targets, found {self.target}")
        number = int(self.target.arch_number or 80)
        known = _KNOWN.get(number) or _KNOWN[max(n for n in _KNOWN if n <= number or n == min(_KNOWN))]
        self.sm_version, self.compute_capability = number, str(number)
        self.name, self.compute_max_core, self.l2_cache_size_bytes = known[:3]
        self.bandwidth = list(known[3:])
        self.smem_cap = self.max_smem_usage = int(self.target.max_shared_bytes)
        self.smem_per_sm, self.threads_per_sm = self.target.limits.shared_per_sm, self.target.limits.threads_per_sm
        self.tensor_rate, self.fma_rate = _RATES[max(n for n in _RATES if n <= max(number, 70))]
        self.clock = 1.7e9 if number >= 86 else 1.41e9
        self.device = get_cuda_device_properties() if target == "cuda" else None
        if self.device is not None:
            self.name, self.compute_max_core = self.device.name, self.device.sm_count

    @property
    def available_tensor_instructions(self) -> list[str]:
        """Names of the matrix instructions of a warp that this architecture has."""
        from tilelang.target.mma import MMA_ROWS

        return [name for name, row in MMA_ROWS.items() if self.sm_version >= row.min_arch]

    def get_avaliable_tensorintrin_shapes(self) -> list[list[int]]:
        return [[16, 16]] if self.sm_version >= 70 else []

    def __repr__(self) -> str:
        return f"CUDA({self.name}, sm_{self.sm_version})"


__all__ = ["CUDA"]
