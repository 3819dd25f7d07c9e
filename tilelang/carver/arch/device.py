"""Base class of architectures: the properties that the choice of tile sizes needs."""

from __future__ import annotations

from typing import Any

from tilelang.language.tracing.state import error
from tilelang.runtime.cpus import usable_cpus
from tilelang.target import Target
from tilelang.target.machine import CHIPS, CPU_CHIP


class TileDevice:
    """An architecture: platform, bytes of shared memory, registers, cores, bandwidth [L2, memory] in MB/s.

    clock: cycles per second.  latency: cycles of a load from memory.  tensor_rate: half-precision multiply-adds per cycle on
    the tensor cores of an SM; fma_rate: float32 multiply-adds per cycle on its ordinary units.
    """

    platform = ""
    warp_size, reg_cap, sm_partition, sm_version = 1, 65536, 1, 0
    smem_cap = smem_per_sm = max_smem_usage = l2_cache_size_bytes = 0
    compute_max_core, threads_per_sm = 1, 2048
    compute_capability = ""
    transaction_size: list[int] = [32, 128]
    bandwidth: list[int] = [1, 1]
    clock, latency, tensor_rate, fma_rate = CHIPS[0].clock, 700.0, 0.0, 64.0
    target: Any = None

    def get_avaliable_tensorintrin_shapes(self) -> list[list[int]]:
        """[m, n] of the tiles that MMA instructions compute; empty without tensor cores."""
        return []


def _absent(name: str, about: str, kind: str) -> type[TileDevice]:
    """A class of devices that no target of this version is: to make one raises NotImplementedError."""
    def missing(self: TileDevice, target: Any = kind) -> None:
        raise error("not-available", f"architecture {name} is not available: no target of this version is {name}",
                    expected="carver.arch.CUDA, CDNA or CPU", found=name,
                    hint="kernels are compiled for CUDA, CDNA and the CPU: carver.arch.CUDA, carver.arch.CDNA, carver.arch.CPU")

    about = f"{about}: not available, raises NotImplementedError."
    return type(name, (TileDevice,), {"__init__": missing, "__doc__": about, "__module__": __name__})


RDNA, METAL = _absent("RDNA", "AMD's other GPUs", "hip"), _absent("METAL", "Apple's GPUs", "metal")


class CPU(TileDevice):
    """The present CPU.  A core is modelled as an SM of one thread."""

    platform = "CPU"

    def __init__(self, target: Any = "cpu") -> None:
        self.target = target if isinstance(target, Target) else Target(target)
        if not self.target.is_cpu:
            raise ValueError(f"carver.arch.CPU describes CPU targets, found {self.target}")
        self.name, self.device = "CPU", None
        self.compute_max_core = usable_cpus()
        self.smem_cap = self.smem_per_sm = self.max_smem_usage = int(self.target.max_shared_bytes)
        self.bandwidth = [round(CPU_CHIP.l2_bandwidth / 1e6), round(CPU_CHIP.bandwidth / 1e6)]
        self.clock, self.latency = CPU_CHIP.clock, 200.0

    def __repr__(self) -> str:
        return f"CPU({self.compute_max_core})"
