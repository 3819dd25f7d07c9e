"""Descriptions of architectures, which the choice of tile sizes needs, and properties read from the device driver."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tilelang.ir import dtype
from tilelang.language.tracing.state import error
from tilelang.runtime.cpus import usable_cpus
from tilelang.target import Target, determine_target
from tilelang.target.machine import CHIPS, CPU_CHIP, REGISTERS_PER_SM, Chip, chip_of, clock_rates, nearest_chip
from tilelang.target.mfma import MFMA_ROWS
from tilelang.target.mma import MMA_ROWS, mma_rows

from . import driver
from .driver import get_cuda_device_properties


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


# ---- GPUs ------------------------------------------------------------------------------------------------------------

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


# ---- look-ups --------------------------------------------------------------------------------------------------------

def get_arch(target: Any = "cuda") -> TileDevice:
    """The architecture of a target.  Raises AssertionError for a target this version does not compile for."""
    found = target if isinstance(target, Target) else Target(target)
    return CUDA(target) if found.is_cuda else CDNA(found) if found.is_gpu else CPU(found)


def auto_infer_current_arch() -> TileDevice:
    """The architecture of the current target or device.  Raises ValueError when there is neither."""
    return get_arch(determine_target("auto", return_object=True))


def is_cuda_arch(arch: TileDevice) -> bool:
    """Whether an architecture is NVIDIA's."""
    return isinstance(arch, CUDA)


def _between(chip: str, low: int, high: int, about: str) -> Callable[[TileDevice], bool]:
    def asked(arch: TileDevice) -> bool:
        return is_cuda_arch(arch) and low <= arch.sm_version < high

    asked.__name__ = asked.__qualname__ = f"is_{chip}_arch"
    asked.__doc__ = f"Whether an architecture is {about}."
    return asked


is_volta_arch, is_ampere_arch = _between("volta", 70, 75, "sm_70 or sm_72"), _between("ampere", 80, 89, "sm_80 up to sm_88")
is_ada_arch, is_hopper_arch = _between("ada", 89, 90, "sm_89"), _between("hopper", 90, 91, "sm_90")


def is_cdna_arch(arch: TileDevice) -> bool:
    """Whether an architecture is a data-centre GPU of AMD."""
    return isinstance(arch, CDNA)


is_rdna_arch = _between("rdna", 0, 0, "another AMD GPU: never, they are not supported")


def has_mma_support(arch: TileDevice) -> bool:
    """Whether an architecture has mma.sync."""
    return is_cuda_arch(arch) and arch.sm_version >= 80


_HALF = {("float16", "float16"), ("float16", "float32")}
_WHOLE = {("int8", "int32"), ("uint8", "int32")}
_SINCE = ((70, _HALF), (75, _WHOLE), (80, {("bfloat16", "float32"), ("int4", "int32")}),
          (89, {(f, a) for f in ("float8_e4m3fn", "float8_e5m2") for a in ("float32", "float16")}))


def is_tensorcore_supported_precision(in_dtype: Any, accum_dtype: Any, arch: TileDevice) -> bool:
    """Whether tensor cores multiply these element types without rounding them first (so not float32)."""
    pair = f"{dtype(in_dtype)}", f"{dtype(accum_dtype)}"
    if isinstance(arch, CDNA):
        return any(row.a_dtype == dtype(in_dtype) for row in mma_rows(arch.target, in_dtype, in_dtype, accum_dtype))
    pair = pair[0].replace("float8_e4m3", "float8_e4m3fn").replace("fnfn", "fn"), pair[1]
    return is_cuda_arch(arch) and any(arch.sm_version >= since and pair in pairs for since, pairs in _SINCE)


def check_sm_version(arch: str) -> int:
    """"sm_80" -> 80; -1 for other text."""
    digits = arch.removeprefix("sm_").rstrip("af")
    return int(digits) if arch.startswith("sm_") and digits.isdigit() else -1


__all__ = ["CDNA", "CPU", "CUDA", "METAL", "RDNA", "TileDevice", "auto_infer_current_arch", "check_sm_version", "driver",
           "get_arch", "has_mma_support", "is_ada_arch", "is_ampere_arch", "is_cdna_arch", "is_cuda_arch", "is_hopper_arch",
           "is_rdna_arch", "is_tensorcore_supported_precision", "is_volta_arch"]
