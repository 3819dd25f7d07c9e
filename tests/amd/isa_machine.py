"""An interpreter of the machine code of gfx90a, gfx942 and gfx950: waves of 64 lanes, workgroups, LDS, global memory.

It runs the binary, not a program's IR, and shares nothing with tilelang.  What the hardware leaves undefined is a Fault that
names the instruction:

- a register that an outstanding load writes, used before s_waitcnt (CDNA3 guide, section "Manually Inserted Wait States" and
  "Data Dependency Resolution": vmcnt counts down in order; lgkmcnt in order for LDS, in any order for scalar loads),
- bytes of LDS read or written by two waves with no barrier between the end of the one access (its wait) and the other,
- bytes that a load into LDS is still writing, read,
- an access to global memory outside of the arguments' buffers, or to LDS outside of the workgroup's part,
- the result of an MFMA used too few cycles after it, and the other pairs of instructions that need s_nop (HAZARDS).

Memory is read when a load is issued.  Registers and LDS start with noise.  Waves run in turn, each some hundred instructions
at a time, or in a random order (`order`, a seed).
"""

from __future__ import annotations

import dataclasses
import random
import struct
from collections import deque
from collections.abc import Sequence
from typing import Any

import isa_arithmetic as ar
import isa_matrix
import numpy as np
from isa_compile import REGISTERS, Step, bits_of, compiled
from isa_decode import Decoder
from isa_elf import Kernel

Array = Any
SHARED, PRIVATE = 0x7001, 0x7002  # high words of the apertures of LDS and scratch in flat addresses
EDGE = 0x1000  # a buffer n starts EDGE bytes below n << 32, so that addresses carry into their high word
NEVER = 1 << 40  # barrier count at which an outstanding access will have ended
VCC, M0, EXEC = 106, 124, 126


class Fault(Exception):
    """What the hardware leaves undefined, or a binary that the interpreter does not run."""


class Memory:
    """Global memory: buffers at addresses far apart, with bounds."""

    def __init__(self) -> None:
        self.buffers: dict[int, tuple[Array, bool]] = {}
        self.padded: list[tuple[Array, Array]] = []

    def add(self, data: Array, writable: bool = True) -> int:
        """The address of a buffer over the bytes of an array (shared with it).

        Atomics of 16 bits work on the word around: a last word that is not full is completed, and must keep what is beyond.
        """
        number, raw = len(self.buffers) + 1, data.reshape(-1).view(np.uint8)
        if len(raw) % 4 and writable:
            whole = np.append(raw, np.full(-len(raw) % 4, 0xA5, np.uint8))
            self.padded.append((raw, whole))
            raw = whole
        self.buffers[number] = (raw, writable)
        return (number << 32) - EDGE

    def finish(self) -> None:
        """Give back what completed buffers hold."""
        for raw, whole in self.padded:
            if (whole[len(raw):] != 0xA5).any():
                raise Fault(f"bytes beyond the {len(raw)} of a buffer are written")
            raw[...] = whole[:len(raw)]

    def bytes(self, addresses: Array, size: int, write: bool) -> list[tuple[Array, Array, Array]]:
        """(lanes, bytes of the buffer, indices (lanes, size)) for each buffer that is touched, or a Fault outside of all."""
        numbers = (addresses + np.uint64(EDGE)) >> np.uint64(32)
        found = []
        for number in np.unique(numbers).tolist():
            lanes = np.flatnonzero(numbers == number)
            if number not in self.buffers:
                raise Fault(f"address {int(addresses[lanes[0]]):#x} lies in no buffer")
            data, writable = self.buffers[number]
            offsets = (addresses[lanes] - np.uint64((number << 32) - EDGE)).astype(np.int64)
            if offsets.min() < 0 or offsets.max() + size > len(data):
                at = int(offsets.min() if offsets.min() < 0 else offsets.max())
                raise Fault(f"byte {at} and {size - 1} more of buffer {number}, which has {len(data)} bytes")
            if write and not writable:
                raise Fault(f"buffer {number} is read-only")
            found.append((lanes, data, offsets[:, None] + np.arange(size)))
        return found

    def load(self, addresses: Array, size: int) -> Array:
        out = np.empty((len(addresses), size), np.uint8)
        for lanes, data, index in self.bytes(addresses, size, False):
            out[lanes] = data[index]
        return out

    def store(self, addresses: Array, values: Array) -> None:
        for lanes, data, index in self.bytes(addresses, values.shape[1], True):
            data[index] = values[lanes]


class Shared:
    """LDS of a workgroup, and which accesses of which waves its bytes took part in.

    An access ends when its wave has waited for it; `ended` holds the barrier count then.  Two accesses of different waves, one
    of them a write, need a barrier after the end of the first.
    """

    def __init__(self, size: int, waves: int, noise: Array) -> None:
        self.data = noise.integers(0, 256, max(size, 1), np.uint8)
        self.size, self.barriers = size, 0
        self.writer = np.zeros(max(size, 1), np.int32)
        self.readers = np.zeros((waves, max(size, 1)), np.int32)
        self.ended, self.wave, self.text = np.full(1024, -1), np.full(1024, -1), [""]
        self.direct, self.atomic = np.zeros(1024, bool), np.zeros(1024, bool)

    def begin(self, wave: int, kind: str, text: str) -> int:
        """The number of a new access; kind: "", "atomic", or "direct" (a load into LDS, which its own wave must wait for)."""
        number = len(self.text)
        self.text.append(text)
        if number == len(self.ended):
            grown = [np.resize(v, 2 * number) for v in (self.ended, self.wave, self.direct, self.atomic)]
            self.ended, self.wave, self.direct, self.atomic = grown
        self.ended[number], self.wave[number] = NEVER, wave
        self.direct[number], self.atomic[number] = kind == "direct", kind == "atomic"
        return number

    def index(self, addresses: Array, size: int) -> Array:
        index = addresses.astype(np.int64)[:, None] + np.arange(size)
        if len(addresses) and (index.min() < 0 or index.max() >= self.size):
            raise Fault(f"LDS byte {int(index.max())} of {self.size}")
        return index

    def _conflict(self, events: Array, wave: int) -> Array:
        ended = self.ended[events]
        return (ended >= self.barriers) & ((self.wave[events] != wave) | self.direct[events] & (ended == NEVER))

    def load(self, wave: int, index: Array, event: int) -> Array:
        bad = self._conflict(self.writer[index], wave) & ~(self.atomic[self.writer[index]] & self.atomic[event])
        if bad.any():
            raise Fault(self._race(index, self.writer[index], bad, "read"))
        self.readers[wave][index] = event
        return self.data[index]

    def store(self, wave: int, index: Array, values: Array, event: int) -> None:
        before = np.concatenate([self.writer[index][None], self.readers[:, index]])
        bad = self._conflict(before, wave) & (self.data[index] != values)
        bad |= self._conflict(before[:1], wave) & self.direct[before[:1]]
        bad |= self.direct[event] & (self.ended[before] == NEVER)  # not ordered with the wave's own accesses
        if bad.any():
            raise Fault(self._race(np.broadcast_to(index, before.shape), before, bad, "written"))
        self.data[index] = values
        self.writer[index] = event

    def touch(self, wave: int, index: Array, event: int) -> None:
        """An atomic access; atomics of several waves do not disturb each other."""
        before = np.concatenate([self.writer[index][None], self.readers[:, index]])
        bad = self._conflict(before, wave) & ~self.atomic[before]
        if bad.any():
            raise Fault(self._race(np.broadcast_to(index, before.shape), before, bad, "changed"))
        self.writer[index] = event

    def _race(self, index: Array, events: Array, bad: Array, done: str) -> str:
        byte, event = int(index[bad][0]), int(events[bad][0])
        state = "has not been waited for" if self.ended[event] == NEVER else "ended with no barrier since"
        return f"LDS byte {byte} is {done} while `{self.text[event]}` of wave {int(self.wave[event])} {state}"


Pending = tuple[int, int]  # an operation in flight: the registers it will write, and its access of LDS


class Wave:
    """Registers and state of 64 lanes."""

    def __init__(self, group: Group, number: int) -> None:
        self.group, self.number, self.memory, self.shared = group, number, group.memory, group.shared
        noise = group.noise
        self.v = noise.integers(0, 1 << 32, (512, 64), np.uint32)
        self.vf, self.vi = self.v.view(np.float32), self.v.view(np.int32)
        self.halves = self.v.view(np.uint16).reshape(512, 64, 2)
        self.s = [int(x) for x in noise.integers(0, 1 << 32, 256)]
        self.scc, self.mode, self.pc, self.state = 0, 0, 0, "ready"
        self.indexed = 0  # which operands M0 is added to: bits 0 to 2 the sources, bit 3 the destination
        self.mask, self.full = np.ones(64, bool), True
        self.scratch = noise.integers(0, 256, (64, max(group.kernel.scratch, 4)), np.uint8)
        self.vector, self.local, self.scalar = deque[Pending](), deque[Pending](), list[Pending]()
        self.pending = 0
        self.clock, self.steps = 0, 0
        self.matrices = deque[tuple[int, Step, int]]()  # (clock after it, step, the registers that it wrote last)
        self.recent = deque[tuple[int, Step]](maxlen=6)
        self.step: Step | None = None

    # ---- exec ----

    def set_exec(self, value: int) -> None:
        self.s[EXEC], self.s[EXEC + 1] = value & ar.M32, value >> 32
        self.mask = lanes_of(value)
        self.full = value == ar.M64

    @property
    def exec(self) -> int:
        return self.s[EXEC] | self.s[EXEC + 1] << 32

    def pair(self, index: int) -> int:
        return self.s[index] | self.s[index + 1] << 32

    def write_scalar(self, index: int, value: int, count: int = 1) -> None:
        for n in range(count):
            self.s[index + n] = value >> 32 * n & ar.M32
        if index + count > EXEC and index <= EXEC + 1:
            self.set_exec(self.exec)

    # ---- counters ----

    def issue(self, queue: str, registers: int, event: int = 0) -> None:
        getattr(self, queue).append((registers, event))
        self.pending |= registers
        if queue == "vector" and len(self.vector) > 63:
            self.wait(63, 15)

    def wait(self, vector: int, local: int) -> None:
        """s_waitcnt: at most `vector` and `local` operations stay outstanding; which ones is known but for scalar loads."""
        while len(self.vector) > vector:
            self._end(self.vector.popleft())
        while len(self.local) > local:
            self._end(self.local.popleft())
        if local == 0:
            self.scalar.clear()
        self.pending = 0
        for queue in (self.vector, self.local, self.scalar):
            for operation in queue:
                self.pending |= operation[0]

    def _end(self, operation: Pending) -> None:
        if operation[1]:
            self.shared.ended[operation[1]] = self.shared.barriers


def lanes_of(value: int) -> Array:
    return np.unpackbits(np.array([value], np.uint64).view(np.uint8), bitorder="little").astype(bool)


@dataclasses.dataclass
class Group:
    """A workgroup."""

    kernel: Kernel
    memory: Memory
    noise: Array
    shared: Shared
    code: int  # address of the kernel's first instruction
    program: Program
    waves: list[Wave] = dataclasses.field(default_factory=list)


# Pairs of instructions with required cycles between them: the class of the first, the class of the second, cycles, chips.
# CDNA3 guide, table "Required Software-inserted Wait States".
HAZARDS = (("vector writes scalar", "memory reads scalar", 5, "90a,942,950"),
           ("vector writes vcc", "div_fmas", 4, "90a,942,950"), ("vector writes scalar", "lane select", 4, "90a,942,950"),
           ("vector writes vector", "dpp", 2, "90a,942,950"),
           ("vector writes exec", "dpp", 5, "90a,942,950"), ("transcendental", "vector", 1, "942,950"))


def check(wave: Wave, step: Step, chip: str) -> None:
    """Faults of using a register too early."""
    if wave.pending & step.touches and not _in_order(wave, step):
        early = wave.pending & step.touches
        raise Fault(f"{names_of(early)} of a load that was not waited for")
    while wave.matrices and wave.clock - wave.matrices[0][0] > 24:
        wave.matrices.popleft()
    for at, other, last in wave.matrices:
        if last & step.touches:
            _check_matrix(wave.clock - at, other, last, step, chip)
    for at, other in wave.recent:
        for first, second, cycles, chips in HAZARDS:
            if first in other.classes and second in step.classes and wave.clock - at < cycles and chip in chips:
                touched = other.writes & (bits_of(step.instruction.src[1]) if second == "lane select" else step.touches)
                if second == "div_fmas" or "exec" in first or (second == "memory reads scalar" and touched & SCALARS) or (
                        second not in ("memory reads scalar",) and touched):
                    raise Fault(f"{cycles} cycles are needed after `{other.text}`, {wave.clock - at} passed")


SCALARS = ((1 << 128) - 1) << REGISTERS


def _in_order(wave: Wave, step: Step) -> bool:
    """A load may write what an older load of the same kind writes: they end in order."""
    early = wave.pending & step.touches
    if early & step.reads or not step.queue:
        return False
    queues = {"vector": wave.vector, "local": wave.local, "scalar": wave.scalar}
    others = [queue for name, queue in queues.items() if name != step.queue]
    return step.queue != "scalar" and not any(p[0] & early for queue in others for p in queue)


def _check_matrix(passed: int, matrix: Step, last: int, step: Step, chip: str) -> None:
    i = matrix.instruction
    passes = int(i.meaning.types[5])
    if step.instruction.format == "MFMA":
        ours, c = i.dst[0], step.instruction.src[2]
        uses = ["A or B"] if last & step.operands else []
        if last & step.accumulator:
            same = (ours.kind, ours.index, ours.count) == (c.kind, c.index, c.count)
            kind = ("f64" in i.name) == ("f64" in step.instruction.name)
            uses.append("same C" if same and kind else "overlapping C")
    else:
        uses = ["memory" if step.queue else "vector"]
    for use in uses:
        need = isa_matrix.required(chip, i.name, passes, use)
        if passed < need:
            raise Fault(f"{need} cycles are needed after `{matrix.text}`, {passed} passed")


def names_of(registers: int) -> str:
    low = (registers & -registers).bit_length() - 1
    return f"v{low}" if low < 256 else f"a{low - 256}" if low < REGISTERS else f"s{low - REGISTERS}"


class Program:
    """A kernel ready to run: decoded and compiled once."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel, self.decoder = kernel, Decoder(kernel.chip)
        self.steps: dict[int, Step] = {}
        self.moved: dict[tuple[int, int, int], Step] = {}

    def at(self, pc: int) -> Step:
        step = self.steps.get(pc)
        if step is None:
            code = self.kernel.code
            if not 0 <= pc < len(code):
                raise Fault(f"no code at {self.kernel.address + pc:#x}")
            words = struct.unpack_from(f"<{min(4, (len(code) - pc) // 4)}I", code, pc)
            step = self.steps[pc] = compiled(self.decoder.one((*words, 0), pc), self.kernel.chip)
        return step

    def compares(self, pc: int) -> bool:
        """Whether a compare-and-swap of LDS follows soon: the first value of its loop is read by an ordinary instruction."""
        for _ in range(64):
            i = self.at(pc).instruction if pc < len(self.kernel.code) else None
            if i is None or i.name.startswith(("ds_cmpst", "s_endpgm")):
                return i is not None and i.name != "s_endpgm"
            pc += i.size
        return False

    def indexed(self, wave: Wave) -> Step:
        """The next instruction with M0 added to the vector registers that s_set_gpr_idx_on names."""
        key = (wave.pc, wave.indexed, wave.s[M0] & 255)
        if key not in self.moved:
            i = self.at(wave.pc).instruction
            move = [dataclasses.replace(o, index=o.index + key[2], text="") if o.kind == "v" and wave.indexed >> n & 1 else o
                    for n, o in [*enumerate(i.src), *((3, o) for o in i.dst)]] if i.format.startswith("V") else [*i.src, *i.dst]
            self.moved[key] = compiled(dataclasses.replace(i, src=move[:len(i.src)], dst=move[len(i.src):]), self.kernel.chip)
        return self.moved[key]

    def run(self, grid: Sequence[int], block: Sequence[int], args: Sequence[Any], *, lds: int = 0, order: int | None = None,
            resident: int = 2, limit: int = 20_000_000) -> int:
        """Run all workgroups of a grid; arrays among the arguments are read and written in place.  Number of instructions."""
        grid, block = (*grid, 1, 1)[:3], (*block, 1, 1)[:3]
        memory, noise = Memory(), np.random.default_rng(order or 0)
        kernarg = memory.add(self._arguments(memory, grid, block, args, lds), False)
        sizes = [g * b for g, b in zip(grid, block, strict=True)]
        packet = memory.add(np.frombuffer(struct.pack("<6H3I36x", 0, 3, *block, 0, *sizes), np.uint8).copy(), False)
        code = memory.add(np.frombuffer(self.kernel.image, np.uint8), False) + self.kernel.address
        chooser = random.Random(order) if order is not None else None
        blocks = [(x, y, z) for z in range(grid[2]) for y in range(grid[1]) for x in range(grid[0])]
        if chooser:
            chooser.shuffle(blocks)
        running: list[Group] = []
        total = 0
        with np.errstate(all="ignore"):
            while blocks or running:
                while blocks and len(running) < resident:
                    running.append(self._group(memory, noise, blocks.pop(0), block, (kernarg, packet, code), lds))
                group = chooser.choice(running) if chooser else running[0]
                total += self._advance(group, chooser)
                if all(w.state == "ended" for w in group.waves):
                    running.remove(group)
                elif not chooser:
                    running.append(running.pop(0))
                if total > limit:
                    raise Fault(f"more than {limit} instructions")
        memory.finish()
        return total

    def _arguments(self, memory: Memory, grid: Sequence[int], block: Sequence[int], args: Sequence[Any], lds: int) -> Array:
        size = (self.kernel.counts["kernarg_segment_size"] + 63) // 64 * 64  # loads may read beyond the last argument
        data = np.zeros(size, np.uint8)
        given = iter(args)
        hidden = {"hidden_block_count_": grid, "hidden_group_size_": block}
        for item in self.kernel.args:
            kind, at, size = item[".value_kind"], item[".offset"], item[".size"]
            if kind.startswith("hidden_"):
                found = hidden.get(kind[:-1])
                value = found["xyz".index(kind[-1])] if found else 3 if kind == "hidden_grid_dims" else \
                    lds if kind == "hidden_dynamic_lds_size" else 0
                raw = int(value).to_bytes(size, "little")
            else:
                value = next(given)
                buffer = isinstance(value, np.ndarray) and value.ndim > 0
                raw = memory.add(value).to_bytes(8, "little") if buffer else _raw(value, size)
            data[at:at + size] = np.frombuffer(raw, np.uint8)
        return data

    def _group(self, memory: Memory, noise: Array, at: Sequence[int], block: Sequence[int], where: tuple[int, int, int],
               lds: int) -> Group:
        count = block[0] * block[1] * block[2]
        size = self.kernel.lds + lds
        waves = (count + 63) // 64
        group = Group(self.kernel, memory, noise, Shared(size, waves, noise), where[2], self)
        for number in range(waves):
            wave = Wave(group, number)
            ids = np.arange(64 * number, 64 * number + 64)
            wave.set_exec(sum(1 << n for n in range(64) if ids[n] < count))
            x, y, z = ids % block[0], ids // block[0] % block[1], ids // (block[0] * block[1])
            wave.v[0] = x | y << 10 | z << 20
            self._scalars(wave, at, where)
            group.waves.append(wave)
        return group

    def _scalars(self, wave: Wave, at: Sequence[int], where: tuple[int, int, int]) -> None:
        """The scalar registers at the start ("Initial Kernel Execution State" of LLVM's guide)."""
        bits, rsrc = self.kernel.properties, self.kernel.rsrc(2)
        packet, kernarg = ([address & ar.M32, address >> 32] for address in (where[1], where[0]))
        given = ([0, PRIVATE, 0xFFFFFFFF, 0], packet, [0, 0], kernarg, [0, 0], [0, 0], [0])
        values = [word for n, words in enumerate(given) if bits >> n & 1 for word in words]
        if bits >> 16 & 127:
            raise Fault("arguments preloaded into scalar registers")
        values += [0] * (((rsrc >> 1) & 31) - len(values))
        values += [at[n] for n in range(3) if rsrc >> (7 + n) & 1]
        values += [0] if rsrc >> 10 & 1 else []
        values += [0] if rsrc & 1 else []
        wave.s[:len(values)] = values
        wave.s[235:239] = [0, SHARED, 0, PRIVATE]
        wave.mode = self.kernel.rsrc(1) >> 12 & 0xFF
        if wave.mode & 15:
            raise Fault("a rounding other than to nearest")

    def _advance(self, group: Group, chooser: random.Random | None) -> int:
        """Some instructions of some waves of a group, and its barrier."""
        ready = [w for w in group.waves if w.state == "ready"]
        some = [chooser.choice(ready)] if chooser and ready else ready
        done = sum(self._steps(wave, chooser.randint(1, 40) if chooser else 400) for wave in some)
        live = [w for w in group.waves if w.state != "ended"]
        if live and all(w.state == "barrier" for w in live):
            if len(live) < len(group.waves) or len({w.pc for w in live}) > 1:
                raise Fault(f"{self.kernel.name}: {len(live)} of {len(group.waves)} waves wait at a barrier that not all reach")
            group.shared.barriers += 1
            for wave in live:
                wave.state = "ready"
        return done

    def _steps(self, wave: Wave, count: int) -> int:
        chip, steps = self.kernel.chip, self.steps
        for done in range(count):
            step = (steps.get(wave.pc) or self.at(wave.pc)) if not wave.indexed else self.indexed(wave)
            try:
                if wave.pending & step.touches or wave.matrices or step.classes:
                    check(wave, step, chip)
                wave.step = step
                wave.pc += step.size
                step.run(wave)
            except Fault as fault:
                where = f"{self.kernel.name} at {step.instruction.address:#x}, wave {wave.number}: `{step.text}`: "
                raise fault if fault.args[0].startswith(self.kernel.name) else Fault(where + fault.args[0]) from None
            wave.clock += step.cycles
            if step.matrix:
                older = ((at, other, last & ~step.writes) for at, other, last in wave.matrices)
                wave.matrices = deque([*older, (wave.clock, step, step.writes)])
            if step.classes:
                wave.recent.append((wave.clock, step))
            if wave.state != "ready":
                return done + 1
        return count


def _raw(value: Any, size: int) -> bytes:
    if isinstance(value, np.ndarray | np.generic):
        return value.tobytes()
    if isinstance(value, float):
        return struct.pack("<f" if size == 4 else "<d", value)
    return (int(value) & (1 << 8 * size) - 1).to_bytes(size, "little")

