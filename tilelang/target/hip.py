"""AMD's data-centre GPUs that the target kind "hip" compiles for: one record of limits and features for each.

Sources: CDNA2, CDNA3 and CDNA4 instruction set references (waits, LDS, loads into LDS, conversions); ROCm documentation, "AMD
GPU specifications" (compute units, LDS, registers); what ds_read_b64_tr_b16 exchanges: tests of AMD's simulator rocjitsu (pull
request 10175 of ROCm/rocm-systems).  All run wavefronts of 64 lanes; a workgroup lies on one compute unit.
"""

from __future__ import annotations

from tilelang.errors import TileLangError, error
from tilelang.ir.record import record

from .machine import DeviceLimits

WAVE = 64  # lanes of a wavefront
SIMDS = 4  # of a compute unit; each wave stays on one
VECTOR_REGISTERS = 512  # of a lane on one SIMD: those of all its waves together
MOST_WAVES = 8  # of a SIMD
DEFAULT_ARCH = "gfx942"  # without a device
# What reports call by another noun than on NVIDIA's GPUs.
NOUNS = {"an SM": "a CU", "warps": "waves", "tensor cores": "MFMA", "MMAs": "MFMA", "FMA": "VALU", "shared memory": "LDS",
         "private memory": "scratch", "registers": "VGPRs"}
_KB = 1024


@record
class HipChip:
    """One architecture.

    limits: of a compute unit; sm_count is the number of units of the largest chip sold (one die of two for gfx90a).
    async_load_bytes: bytes a lane that a load from global memory into LDS may copy.  lds_banks: of 4 bytes, for reads.
    fp8: "fnuz" or "ocp", the format of its fp8 instructions, "" without any.  flushes_mfma: whether MFMA of 16-bit operands
    takes and gives subnormals as zero.  transposed_loads: bits of the elements that loads of LDS transpose among 16 lanes.
    """

    limits: DeviceLimits
    async_load_bytes: tuple[int, ...]
    lds_banks: int = 32
    fp8: str = ""
    flushes_mfma: bool = False
    transposed_loads: tuple[int, ...] = ()


def _limits(lds: int, units: int) -> DeviceLimits:
    return DeviceLimits(lds, lds, WAVE * SIMDS * MOST_WAVES, 16, VECTOR_REGISTERS * WAVE * SIMDS, units)


HIP_CHIPS: dict[str, HipChip] = {
    "gfx90a": HipChip(_limits(64 * _KB, 104), (4,), flushes_mfma=True),
    "gfx942": HipChip(_limits(64 * _KB, 304), (4,), fp8="fnuz"),
    "gfx950": HipChip(_limits(160 * _KB, 256), (4, 16), 64, "ocp", transposed_loads=(16,)),
}


def check_gfx(arch: object) -> str:
    """The name of an architecture, without the settings that a driver adds ("gfx942:sramecc+:xnack-").  Raises target-arch."""
    name = arch.split(":")[0] if isinstance(arch, str) else ""
    if name not in HIP_CHIPS:
        raise unknown_gfx(arch)
    return name


def unknown_gfx(arch: object) -> TileLangError:
    """The error for the name of another architecture."""
    known, word = ", ".join(HIP_CHIPS), str(arch)
    reason = "it is a chip with waves of 32 lanes and without MFMA" if word.startswith(("gfx10", "gfx11", "gfx12")) else \
        "it is an MI300 from before its release, and those that are sold are gfx942" if word in ("gfx940", "gfx941") else \
        "it is no architecture of AMD's data-centre GPUs from MI200 on"
    return error("target-arch", f"HIP target arch ‹{arch!r}› is not supported: {reason}", expected=f"one of {known}",
                 hint=f'write {{"kind": "hip", "mcpu": "{DEFAULT_ARCH}"}}')


def blocks_by_registers(registers: int, threads: int) -> int:
    """Workgroups that the vector registers of a compute unit hold: whole waves lie on one SIMD."""
    waves = min(MOST_WAVES, VECTOR_REGISTERS // max(8, -(-registers // 8) * 8))
    return waves * SIMDS // -(-threads // WAVE)
