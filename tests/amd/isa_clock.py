"""Cycles of a steady loop on a compute unit, from the binary: which wave issues what when, and what it waits for.

The interpreter gives one iteration of each wave of a workgroup, with the passes of its LDS accesses; these are repeated by the
waves of all workgroups that a compute unit holds, wave n on SIMD n % 4.  A SIMD has a slot of 4 clocks in turn; in a slot each
of its waves may issue its next instruction, at most one instruction of each kind.

Sources, gfx942: CDNA3 Instruction Set Architecture Reference Guide (waits; s_nop in slots; barriers); ROCm Compute Profiler,
"Pipeline descriptions" and "Local data share" (four 16-lane SIMDs, 128 bytes of LDS a clock, kinds of instructions); LLVM pull
request 233721, rules that fit thread traces of MI308X: VALU may issue 1 + (bytes of A or B) / 16 slots behind an MFMA, packed
float32 only passes + 2 slots behind it; LLVM's scheduling model SISchedule (MFMA and VALU are two resources; passes of MFMA;
transcendental functions take 4 slots).  Latencies of LDS and L2 are not measured here: of the order of public models of MI300X
(48 and 254 clocks), and rather longer.  That older waves of one priority issue first is an assumption, which costs: waves that
take turns keep MFMA busier.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import isa_launch
import numpy as np
from isa_compile import TRANSCENDENTAL, Step
from isa_elf import Kernel, read
from isa_machine import Program, Wave
from isa_memory import SIZES

SLOT, SIMDS, WAVES, REGISTERS = 4, 4, 8, 512  # clocks of a slot; SIMDs; waves and registers of a lane that one holds
LDS_LATENCY, LOAD_LATENCY, LOAD_BYTES, BRANCH = 64, 300, 64, 16
# Lanes that a load of 16 bytes is served for together on gfx942 (measured on MI300), of the first 32, and on gfx950 (measured
# on MI355X), which has 64 banks for loads of 8 and 16 bytes: 256 bytes a clock (HIP documentation, "Hardware implementation").
GROUPS = {"942": ((0, 1, 2, 3, 20, 21, 22, 23), (4, 5, 6, 7, 16, 17, 18, 19), (8, 9, 10, 11, 28, 29, 30, 31),
                     (12, 13, 14, 15, 24, 25, 26, 27)),
          "950": ((0, 1, 2, 3, 12, 13, 14, 15, *range(20, 28)), (*range(4, 12), 16, 17, 18, 19, 28, 29, 30, 31))}
LDS = {"942": 65536, "950": 163840}  # bytes of a compute unit


class Traced(Exception):
    """The iterations that are wanted have run."""


@dataclasses.dataclass(frozen=True)
class Op:
    """An instruction of the loop.  kind: what issues it.  clocks: of its unit.  counter: what is waited for with `left`."""

    text: str
    kind: str
    clocks: int
    passes: int = 0  # of an MFMA
    hold: int = 0  # slots behind an MFMA until VALU may issue
    packed: bool = False
    vector: int = 63
    local: int = 15


@dataclasses.dataclass(frozen=True)
class Timing:
    """clocks: of an iteration of all waves.  busy: unit -> its part of them.  counts: instructions of a wave by kind."""

    clocks: float
    busy: dict[str, float]
    counts: Counter[str]
    blocks: int
    listing: tuple[tuple[int, str], ...]  # slots of a wave's last iteration: clock from its start, text


def loop_of(program: Program) -> tuple[int, int]:
    """(first, last) place in the code of the shortest loop that has the most MFMAs."""
    pc, found, matrices = 0, list[tuple[int, int]](), list[int]()
    while pc < len(program.kernel.code):
        i = program.at(pc).instruction
        matrices += [pc] * (i.format == "MFMA")
        offset = ((i.mods["simm"] & 0xFFFF) ^ 0x8000) - 0x8000 if i.name.startswith(("s_branch", "s_cbranch")) else 0
        if offset < 0:
            found.append((pc + 4 + 4 * offset, pc))
        pc += i.size
    return max(found, key=lambda x: (sum(x[0] <= p <= x[1] for p in matrices), x[0] - x[1]))


class Recorder(Program):
    """Runs a kernel until each wave of a workgroup has begun its loop's iteration `upto`; keeps the one before.

    The workgroup is one in the middle of the grid: where lengths of loops depend on places, the first one's may be short.
    """

    def __init__(self, kernel: Kernel, upto: int = 3) -> None:
        super().__init__(kernel)
        self.first, _ = loop_of(self)
        self.upto, self.begun, self.ops = upto, Counter[int](), dict[int, list[Op]]()
        self.waves: Any = None

    def run(self, grid: Any, *args: Any, **named: Any) -> int:
        self.grid = grid
        return super().run(grid, *args, **named)

    def _group(self, memory: Any, noise: Any, at: Any, *rest: Any) -> Any:
        return super()._group(memory, noise, ((at[0] + self.grid[0] // 2) % self.grid[0], *at[1:]), *rest)

    def _steps(self, wave: Wave, count: int) -> int:
        self.waves = self.waves or wave.group.waves
        if wave.group.waves is not self.waves:
            return super()._steps(wave, count)
        for done in range(count):
            step = self.at(wave.pc)
            if wave.pc == self.first:
                self.begun[wave.number] += 1
                if self.begun[wave.number] < self.upto:
                    self.ops[wave.number] = []
                elif all(self.begun[w.number] >= self.upto for w in self.waves):
                    raise Traced
            if self.begun[wave.number] == self.upto - 1:
                taken, passes = wave.pc, lds_passes(step, wave, self.kernel.chip)
                super()._steps(wave, 1)
                self.ops[wave.number].append(op_of(step, passes, wave.pc != taken + step.size))
            else:
                super()._steps(wave, 1)
            if wave.state != "ready":
                return done + 1
        return count


def lds_passes(step: Step, wave: Wave, chip: str) -> int:
    """Clocks of the LDS for an access, with what banks cost."""
    i = step.instruction
    if i.format != "DS":
        return 0
    name = i.name[3:]
    if not name.startswith(("read", "write")):
        return 2  # lanes exchange a register of 4 bytes
    size = SIZES[name.replace("read2", "read").replace("write2", "write").replace("st64", "").split("_")[1]][0]
    lanes = np.flatnonzero(wave.mask)
    offsets = i.mods["offsets"] if i.mods["two"] else (i.mods["offset"],)
    return sum(passes_of(lanes, wave.v[i.src[0].index, lanes].astype(np.int64) + offset, size, "write" in name, chip)
               for offset in offsets)


def passes_of(lanes: Any, address: Any, size: int, writes: bool, chip: str = "942") -> int:
    banks = 64 if chip == "950" and size >= 8 and not writes else 32
    group = lanes // (banks // 2 if size == 8 else {16: 8}.get(size, 32))
    if size == 16 and not writes:
        which = np.empty(32, np.int64)
        for n, members in enumerate(GROUPS[chip]):
            which[list(members)] = n
        group = which[lanes % 32] + len(GROUPS[chip]) * (lanes // 32)
    total = 0
    for g in np.unique(group):
        words = {int(a) // 4 + k for a in address[group == g] for k in range(max(1, size // 4))}
        total += max(Counter(w % banks for w in words).values())
    return total


def op_of(step: Step, passes: int, taken: bool) -> Op:
    i, name = step.instruction, step.instruction.name
    if i.format == "MFMA":
        n, width = int(i.meaning.types[5]), 4 * max(i.src[0].count, i.src[1].count)
        return Op(i.text, "vector", SLOT * n, n, 1 + width // 16)
    if i.format == "DS":
        return Op(i.text, "local", passes)
    if i.format in ("FLAT", "GLOBAL", "MUBUF") or step.queue == "vector":
        size = next((n for key, (n, _) in sorted(SIZES.items(), key=lambda x: -len(x[0])) if name.endswith(key)), 4)
        return Op(i.text, "memory", 64 * size // LOAD_BYTES)
    if name == "s_waitcnt":
        simm = i.mods["simm"]
        return Op(i.text, "wait", 0, vector=simm & 15 | (simm >> 14 & 3) << 4, local=simm >> 8 & 15)
    if name == "s_barrier":
        return Op(i.text, "barrier", 0)
    if name == "s_nop":
        return Op(i.text, "idle", SLOT * (i.mods["simm"] + 1))
    if name.startswith(("s_branch", "s_cbranch")):
        return Op(i.text, "branch", BRANCH if taken else SLOT)
    if i.format.startswith("V"):
        packed = name.startswith("v_pk_") and "f32" in name
        return Op(i.text, "vector", SLOT * (4 if name.startswith(TRANSCENDENTAL) else 1), packed=packed)
    return Op(i.text, "idle" if name.startswith(("s_setprio", "s_sched", "s_sleep")) else "scalar", SLOT)


@dataclasses.dataclass
class Place:
    """A wave of the simulation."""

    ops: list[Op]
    block: int
    simd: int
    age: int
    pc: int = 0
    done: int = 0  # iterations
    free: int = 0  # clock from which it may issue
    vector: list[int] = dataclasses.field(default_factory=list)  # clocks at which loads end
    local: list[int] = dataclasses.field(default_factory=list)
    priority: int = 0
    arrived: bool = False
    log: list[tuple[int, str]] = dataclasses.field(default_factory=list)
    last: list[tuple[int, str]] = dataclasses.field(default_factory=list)  # of the iteration before


class Unit:
    """A compute unit with its waves."""

    def __init__(self, ops: dict[int, list[Op]], blocks: int) -> None:
        self.waves = [Place(ops[n], b, n % SIMDS, b * len(ops) + n, free=b * 256) for b in range(blocks) for n in sorted(ops)]
        self.on = [[w for w in self.waves if w.simd == s] for s in range(SIMDS)]
        self.valu, self.matrix, self.behind = [0] * SIMDS, [0] * SIMDS, [(0, 0)] * SIMDS
        self.lds = self.bus = 0
        self.busy = Counter[str]()
        self.blocks = blocks

    def run(self, iterations: int) -> Timing:
        """iterations: of all workgroups together, of which the first half is left out.  Older waves issue first."""
        now, marks = 0, list[tuple[int, float, Counter[str]]]()
        order = [sorted(waves, key=lambda w: w.age) for waves in self.on]
        while len(marks) < 2:
            for simd in range(SIMDS):
                used: set[str] = set()
                for w in sorted(order[simd], key=lambda w: -w.priority):
                    if w.free <= now + simd:
                        self.issue(w, simd, now + simd, used)
            now += SLOT
            done = sum(w.done + w.pc / len(w.ops) for w in self.waves)
            if done >= iterations * len(self.waves) * (1 + len(marks)) // 2 // self.blocks:
                marks.append((now, done, self.busy.copy()))
        (t0, n0, b0), (t1, n1, b1) = marks
        clocks = (t1 - t0) / (n1 - n0) * len(self.waves)
        busy = {k: (b1[k] - b0[k]) / (t1 - t0) / (SIMDS if k in ("MFMA", "VALU") else 1) for k in b1}
        first = self.waves[0]
        start = first.last[0][0]
        return Timing(clocks, busy, Counter(o.kind if not o.passes else "MFMA" for o in first.ops), self.blocks,
                      tuple((t - start, text) for t, text in first.last))

    def issue(self, w: Place, simd: int, now: int, used: set[str]) -> None:
        """Issues the next instruction of a wave if it can."""
        op = w.ops[w.pc]
        outstanding = {"local": w.local, "memory": w.vector}.get(op.kind, [])
        if op.kind in used or sum(t > now for t in outstanding) >= (15 if op.kind == "local" else 63):
            return  # or more than the counter holds
        if op.kind == "vector":
            begun, held = self.behind[simd]
            matrix = op.passes > 0
            if self.matrix[simd] > now if matrix else self.valu[simd] > now or now < begun + held * SLOT or (
                    op.packed and self.matrix[simd] + 2 * SLOT > now):
                return
            if matrix:
                self.matrix[simd], self.behind[simd] = now + op.clocks, (now, op.hold)
            else:
                self.valu[simd] = now + op.clocks
            self.busy["MFMA" if matrix else "VALU"] += op.clocks
        elif op.kind == "local":
            begin = max(self.lds, now)
            self.lds = begin + op.clocks
            w.local.append(self.lds + LDS_LATENCY)
            self.busy["LDS"] += op.clocks
        elif op.kind == "memory":
            begin = max(self.bus, now)
            self.bus = begin + op.clocks
            w.vector.append(self.bus + LOAD_LATENCY)
            self.busy["loads"] += op.clocks
        elif op.kind == "wait":
            if not self.waited(w, op, now):
                return
        elif op.kind == "barrier" and not self.meet(w, now):
            return
        if op.kind not in ("wait", "barrier", "idle"):
            used.add(op.kind)
        if op.text.startswith("s_setprio"):
            w.priority = int(op.text.split()[-1], 0)
        w.log.append((now, op.text))
        w.free = now + (op.clocks if op.kind in ("idle", "branch") else SLOT)
        w.pc += 1
        if w.pc == len(w.ops):
            self.again(w)

    @staticmethod
    def again(w: Place) -> None:
        w.pc, w.done, w.last, w.log = 0, w.done + 1, w.log, []

    @staticmethod
    def waited(w: Place, op: Op, now: int) -> bool:
        for queue, left in ((w.vector, op.vector), (w.local, op.local)):
            if len(queue) > left and sorted(queue)[len(queue) - left - 1] > now:
                return False
            del queue[:max(0, len(queue) - left)]
        return True

    def meet(self, w: Place, now: int) -> bool:
        """Whether all waves of the workgroup are at the barrier."""
        w.arrived = True
        others = [x for x in self.waves if x.block == w.block]
        if all(x.arrived for x in others):
            for x in others:
                x.arrived = False
                if x is not w:
                    x.free = now + SLOT
                    x.log.append((now, x.ops[x.pc].text))
                    x.pc += 1
                    if x.pc == len(x.ops):
                        self.again(x)
            return True
        w.free = 1 << 60
        return False


def resident(kernel: Kernel, threads: int, lds: int) -> int:
    """Workgroups of a compute unit, by registers and LDS."""
    registers = max(8, -(-kernel.counts["vgpr_count"] // 8) * 8)
    waves = min(WAVES, REGISTERS // registers) * SIMDS
    return max(1, min(waves // -(-threads // 64), LDS[kernel.chip] // max(1, lds)))


def loop_timing(lowered: Any, kernel: Any, values: dict[str, Any], iterations: int = 24) -> Timing:
    """The steady loop of a program's first kernel, for the workgroups that a compute unit holds."""
    k = lowered.kernels[0]
    binary = read(kernel._built.files["kernel.hsaco"])[k.name]
    recorder = Recorder(binary)
    host = isa_launch.Host(lowered, [(k, recorder)], values, None)
    try:
        host.run(lowered.host.body)
    except Traced:
        pass
    threads, lds = int(np.prod(k.threads)), host.number(k.shared_bytes)
    return Unit(recorder.ops, resident(binary, threads, lds)).run(iterations)
