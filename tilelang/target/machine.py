"""Tables of hardware figures: limits and rates of each compute capability, chips by name, rates of kernels, register budgets.

Passes, the library's cost models, carver and reports all read these tables.

Sources: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability" (limits); NVIDIA data sheets of A100 80GB
SXM, L40S, H100 SXM, H200 SXM, RTX 3090 and RTX 4090 and the whitepapers of the architectures (rates, dense figures); ROCm
documentation, "AMD GPU specifications", data sheets of MI250, MI300X and MI350X, CDNA2 and CDNA3 whitepapers (AMD); orders of
magnitude for the bandwidth of L2.  Rates of kernels: measured on an H200 for wgmma, by the data sheet of A100 otherwise
(benchmarks/results/notes.md).  Register budgets: what ptxas needed for the library's kernels without a spill.
"""

from __future__ import annotations

from dataclasses import replace

from tilelang.errors import register_warning
from tilelang.ir.record import record

register_warning("l2-hint-unused", "a tensor of T.annotate_l2_hit_ratio is not kept in L2")

_KB = 1024
REGISTERS_PER_SM = 65536  # of 32 bits, on every capability from 7.0 on
MOST_REGISTERS = 255  # of a thread: the encoding of the instructions
MAX_GRID = (2**31 - 1, 65535, 65535)  # most blocks along x, y and z
MOST_BYTES = 2**47  # of one buffer: the address space of a process
RESERVED_SHARED = 1024  # bytes of shared memory that CUDA reserves for each block, from capability 8.0 on


@record
class DeviceLimits:
    """Hardware limits of a compute capability, or of an AMD chip.

    shared_per_block: bytes of dynamic shared memory a block may opt in to.  shared_per_sm: bytes.  threads_per_sm,
    blocks_per_sm, registers_per_sm: counts.  sm_count: of the largest chip sold, 0 where no schedule depends on it.
    """

    shared_per_block: int
    shared_per_sm: int
    threads_per_sm: int
    blocks_per_sm: int = 32
    registers_per_sm: int = REGISTERS_PER_SM
    sm_count: int = 0


LIMITS: dict[int, DeviceLimits] = {  # by compute capability
    70: DeviceLimits(96 * _KB, 96 * _KB, 2048),
    75: DeviceLimits(64 * _KB, 64 * _KB, 1024, 16),
    80: DeviceLimits(163 * _KB, 164 * _KB, 2048),
    86: DeviceLimits(99 * _KB, 100 * _KB, 1536, 16),
    87: DeviceLimits(163 * _KB, 164 * _KB, 1536, 16),
    88: DeviceLimits(163 * _KB, 164 * _KB, 1536),
    89: DeviceLimits(99 * _KB, 100 * _KB, 1536, 24),
    90: DeviceLimits(227 * _KB, 228 * _KB, 2048, sm_count=132),
    100: DeviceLimits(227 * _KB, 228 * _KB, 2048),
    103: DeviceLimits(227 * _KB, 228 * _KB, 2048),
    107: DeviceLimits(227 * _KB, 228 * _KB, 2048),
    110: DeviceLimits(227 * _KB, 228 * _KB, 1536),
    120: DeviceLimits(99 * _KB, 100 * _KB, 1536),
    121: DeviceLimits(99 * _KB, 100 * _KB, 1536),
}
MOST_SHARED = max(x.shared_per_block for x in LIMITS.values())  # bytes per block, the maximum of all capabilities


@record
class Rates:
    """Multiply-adds per clock of one SM.  mma: of tensor cores in half precision.  fma: of FP32 units."""

    mma: int
    fma: int


CLOCK_RATES: dict[int, Rates] = {  # by compute capability; others take the nearest older one
    70: Rates(512, 64), 75: Rates(512, 64), 80: Rates(1024, 64), 86: Rates(512, 128), 90: Rates(2048, 128),
    100: Rates(4096, 128), 120: Rates(512, 128),
}


@record
class Chip:
    """One chip.  capability: 90 for sm_90, "gfx942" for AMD's.  l2_bytes; l2_bandwidth, bandwidth: of L2 and device memory,
    bytes/s.  clock: Hz.

    tensor: FLOP/s of tensor cores by operand bits (8 bits: integer operations/s).  fp32: FLOP/s of FP32 units.  They are empty
    and 0 where no report needs them.
    """

    name: str
    capability: int | str
    sm_count: int
    l2_bytes: int
    l2_bandwidth: float
    bandwidth: float
    clock: float
    tensor: tuple[tuple[int, float], ...] = ()
    fp32: float = 0.0

    def peak(self, bits: int, tensor_cores: bool) -> float | None:
        """FLOP/s for operands of so many bits, with or without tensor cores; None where the chip has none."""
        return dict(self.tensor).get(bits) if tensor_cores else self.fp32 or None


CHIPS: tuple[Chip, ...] = (
    Chip("A100 80GB SXM", 80, 108, 40 << 20, 4.0e12, 2.039e12, 1.41e9,
         ((8, 624e12), (16, 312e12), (32, 156e12), (64, 19.5e12)), 19.5e12),
    Chip("RTX 3090", 86, 82, 6 << 20, 2.0e12, 0.936e12, 1.7e9, ((16, 142e12),)),
    Chip("L40S", 89, 142, 96 << 20, 5.0e12, 0.864e12, 1.7e9, ((8, 733e12), (16, 362e12), (32, 183e12)), 91.6e12),
    Chip("RTX 4090", 89, 128, 72 << 20, 5.0e12, 1.008e12, 1.7e9),
    Chip("H200 SXM", 90, 132, 50 << 20, 5.5e12, 4.8e12, 1.7e9,
         ((8, 1979e12), (16, 989e12), (32, 495e12), (64, 67e12)), 67e12),
    Chip("H100 SXM", 90, 132, 50 << 20, 5.5e12, 3.352e12, 1.7e9),
)
# A compute unit is an SM here.  32 and 64 bits: MFMA of float32 and float64.  fp32: packed instructions, two lanes' at once.
AMD_CHIPS: tuple[Chip, ...] = (
    Chip("MI250 (one of its two dies)", "gfx90a", 104, 8 << 20, 7.0e12, 1.638e12, 1.7e9,
         ((8, 181e12), (16, 181e12), (32, 45.3e12), (64, 45.3e12)), 45.3e12),
    Chip("MI300X", "gfx942", 304, 32 << 20, 3.4e13, 5.3e12, 2.1e9,
         ((8, 2615e12), (16, 1307e12), (32, 163.4e12), (64, 163.4e12)), 163.4e12),
    Chip("MI350X", "gfx950", 256, 32 << 20, 3.6e13, 8.0e12, 2.2e9,
         ((4, 9228e12), (6, 9228e12), (8, 4614e12), (16, 2307e12), (32, 144.2e12), (64, 72.1e12)), 144.2e12),
)


# One core of a common processor: two FMAs of 64 bytes a cycle.
CPU_CHIP = Chip("CPU", 0, 1, 2 << 20, 1.0e11, 2.0e10, 3e9, fp32=64 * 3e9)


def chip_of(capability: int | str) -> Chip | None:
    """The first chip of the tables with a compute capability (90 for sm_90, "gfx942"); None for one that is not in them."""
    return next((c for c in (*CHIPS, *AMD_CHIPS) if c.capability == capability), None)


def nearest_chip(capability: int) -> Chip:
    """The chip of the nearest capability that is not newer, else the oldest one."""
    known = [int(c.capability) for c in CHIPS]
    older = [n for n in known if n <= capability] or [min(known)]
    return next(c for c in CHIPS if c.capability == max(older))


def clock_rates(capability: int) -> Rates:
    """Rates of one SM, those of the nearest capability that is not newer."""
    return CLOCK_RATES[max(n for n in CLOCK_RATES if n <= max(capability, min(CLOCK_RATES)))]


# ---- what kernels reach: the numbers of cost models -------------------------------------------------------------------


@record
class KernelRates:
    """The rates that kernels of a kind reach on a chip, for cost models.  A Chip holds the peak rates.

    sm_count: SMs, or cores.  clock: Hz of short kernels.  mma: FLOP of 16-bit MMAs a cycle and SM.  l2: bytes a cycle and SM
    with all SMs loading; l2_alone: with one.  store: bytes a cycle and SM to memory.  bandwidth: bytes/s of memory.  l2_bytes:
    as far as it keeps what a kernel used.  launch: seconds of a launch.  copy: bytes/s that a kernel reads and writes which
    copies; split_k: that split-K stores and loads.  scalar_loads: operations/s of GEMMs that load single elements.
    """

    sm_count: int
    clock: float
    mma: float
    l2: float
    l2_alone: float
    store: float
    bandwidth: float
    l2_bytes: int
    launch: float
    copy: float = 0.0
    split_k: float = 0.0
    scalar_loads: float = 0.0


KERNEL_RATES: dict[str, KernelRates] = {
    # Tiles that neighbours ask for at the same time reach 77 bytes a cycle and more from L2.
    "wgmma": KernelRates(132, 1.98e9, 4096, 83, 95, 19, 3.83e12, 60 << 20, 1.3e-6, 4.2e12, 6e12, 5e13),
    "mma": KernelRates(108, 1.4e9, 2048, 40, 64, 19, 1.5e12, 40 << 20, 2e-6),
    # Compute units load a cache line of 128 bytes in two cycles.  Memory: what the vendor's copies reach.
    "gfx90a": KernelRates(104, 1.7e9, 1024, 64, 64, 8, 1.3e12, 8 << 20, 5e-6),
    "gfx942": KernelRates(304, 2.1e9, 2048, 64, 64, 8, 4.2e12, 256 << 20, 5e-6),
    "gfx950": KernelRates(256, 2.2e9, 4096, 64, 64, 14, 6.4e12, 256 << 20, 5e-6),
    "cpu": KernelRates(1, CPU_CHIP.clock, 64, 32, 32, 16, CPU_CHIP.bandwidth, CPU_CHIP.l2_bytes, 1e-6),
}
MMA_SYNC: dict[int, int] = {90: 2540, 80: 2048, 0: 1024}  # FLOP a cycle and SM by capability; on sm_90 62 % of wgmma


def kernel_rates(kind: str, capability: int | str = 80) -> KernelRates:
    """Rates of kernels of a kind: "wgmma", "mma" (mma.sync; MFMA of an AMD chip) or "cpu"."""
    rates = KERNEL_RATES[kind if isinstance(capability, int) else capability]
    if kind != "mma" or isinstance(capability, str):
        return rates
    return replace(rates, mma=MMA_SYNC[capability if capability in MMA_SYNC else 80 if capability >= 80 else 0])


# ---- register budgets: 32-bit registers of one thread ---------------------------------------------------------------

# Number of consumer warp groups -> (producer, consumer) registers that setmaxnreg sets.  Together they fit in the registers
# that a launch of one producer group and so many consumer groups gets.
WARP_ROLE_REGISTERS: dict[int, tuple[int, int]] = {2: (24, 240), 3: (32, 160)}


def consumer_registers(groups: int) -> int:
    """Registers that a thread of a consumer may use when there are so many consumer warp groups."""
    return WARP_ROLE_REGISTERS[groups][1] if groups in WARP_ROLE_REGISTERS else MOST_REGISTERS


@record
class RegisterBudget:
    """Registers used in addition to fragments (addresses, loop variables, barriers, row statistics), and limits of fragments.

    plain_loop: a warp-specialised loop.  overlapped_gemms: two GEMMs with softmax between them.  overlapped_least: what some of
    them do with; the compiler's log tells whether one does.  double_buffered: two accumulators in alternation.
    split_accumulator: chunks of an accumulator.  tiled_loop: carver's estimate for any loop.
    accumulator: the most that one accumulator of wgmma may take.  replicated_tile: of a tile that every thread holds whole.
    """

    plain_loop: int = 45
    overlapped_gemms: int = 44
    overlapped_least: int = 24
    double_buffered: int = 32
    split_accumulator: int = 28
    tiled_loop: int = 40
    accumulator: int = 208
    replicated_tile: int = 128


REGISTERS = RegisterBudget()


@record
class UnitRates:
    """Operations per cycle of one SM of capability 9.0 (CUDA C++ Programming Guide, "Arithmetic Instructions").

    arithmetic: FP32 instructions.  special: special functions.  moves: elements moved between registers and shared memory.
    loads: bytes that TMA loads while neighbours load the same tiles; alone: bytes of tiles that no neighbour loads; latency:
    cycles until the first of them arrive; most: the bytes that TMA loads at most; by_threads: bytes that cp.async loads while
    neighbours load the same tiles; far: latency of tiles that come from memory; wait: cycles to find a stage full; drain: from
    the end of a GEMM on the tensor cores to its results; meet: of a barrier of 256 threads and a fence for what reads shared
    memory asynchronously; staging: of two barriers of 128 threads and a fence (measured on an H200).  port: bytes of shared
    memory.  link: bytes to or from another device over NVLink 4, shared by all SMs (385 GB/s each way, measured on two H200s).
    one_group: the part of the issue slots that one warp group fills, whose warps wait for their own results.
    simds: of an SM on which each warp stays, with matrix instructions that start in order while warps go on; 0: warps wait for
    mma.  fetch: cycles from a load of shared memory until the registers may be read.
    """

    arithmetic: float = 128.0
    special: float = 16.0
    moves: float = 64.0
    loads: float = 83.0
    alone: float = 35.0
    latency: float = 600.0
    most: float = 100.0
    by_threads: float = 45.0
    far: float = 1060.0
    wait: float = 44.0
    drain: float = 74.0
    meet: float = 65.0
    staging: float = 90.0
    port: float = 128.0
    link: float = 1.6
    one_group: float = 0.6
    simds: int = 0
    fetch: float = 0.0


UNIT_RATES = UnitRates()
# Compute units: four SIMDs of 16 lanes, an instruction of 64 lanes in 4 cycles, a transcendental one in 16; 128 bytes of LDS
# and 64 of L1 a cycle (CDNA3 whitepaper; ROCm Compute Profiler, "Pipeline descriptions").  latency, far, fetch: of L2, memory
# and LDS; not measured here, of the order of public models of MI300X (LDS 48, L2 254 cycles), and rather longer.  drain: a
# matrix instruction of 4 passes and the s_nop behind it.  meet: the last warp's accesses of LDS, and s_barrier.
_COMPUTE_UNIT = UnitRates(arithmetic=64.0, special=16.0, loads=64.0, alone=64.0, latency=300.0, most=64.0, by_threads=64.0,
                          far=740.0, wait=0.0, drain=44.0, meet=72.0, simds=4, fetch=64.0)


def unit_rates(capability: int | str) -> UnitRates:
    """The units of an SM or compute unit; those of capability 9.0 for all of NVIDIA's."""
    return UNIT_RATES if isinstance(capability, int) else _COMPUTE_UNIT
