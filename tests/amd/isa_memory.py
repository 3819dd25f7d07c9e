"""Memory instructions as functions of a wave: scalar loads, LDS, global, flat, scratch and buffer accesses, atomics.

Sources: CDNA3 Instruction Set Architecture Reference Guide (AMD), chapters "Scalar Memory Operations", "Vector Memory
Operations" (buffer resource descriptor, range checking, memory buffer load to LDS), "Flat Memory Instructions", "Data Share
Operations".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from isa_arithmetic import LANES, M32, U8, U32, U64
from isa_compile import M0, REGISTERS, Step, bits_of, meaning_of, scalar_reader, unsupported
from isa_decode import Instruction, Operand

Array = Any
SIZES = {"ubyte": (1, ""), "sbyte": (1, "i1"), "ushort": (2, ""), "sshort": (2, "i2"), "short": (2, ""), "byte": (1, ""),
         "dword": (4, ""), "dwordx2": (8, ""), "dwordx3": (12, ""), "dwordx4": (16, ""),
         "b8": (1, ""), "u8": (1, ""), "i8": (1, "i1"), "b16": (2, ""), "u16": (2, ""), "i16": (2, "i2"), "b32": (4, ""),
         "b64": (8, ""), "b96": (12, ""), "b128": (16, "")}


def memory_step(i: Instruction, chip: str) -> Step:
    if i.format == "SMEM":
        return scalar_memory(i)
    if i.format == "DS":
        return local_memory(i, chip)
    return vector_memory(i, chip)


def base_of(o: Operand) -> int:
    return o.index + (256 if o.kind == "a" else 0)


def active(w: Any) -> Array:
    return LANES if w.full else np.flatnonzero(w.mask)


def scalar_memory(i: Instruction) -> Step:
    name = i.name
    if "dcache" in name:
        return Step(i, lambda w: None, 0, 0)
    n, count = i.dst[0].index, i.dst[0].count
    writes = bits_of(*i.dst)
    if "time" in name:
        def clock(w: Any) -> None:
            w.write_scalar(n, w.clock, 2)
            w.issue("scalar", writes)

        return Step(i, clock, 0, writes, "scalar")
    base, buffer = i.src[0].index, "buffer" in name
    soffset = scalar_reader(i.mods["soffset"], 1) if "soffset" in i.mods else lambda w: 0

    def load(w: Any) -> None:
        address = w.pair(base) & ((1 << 48) - 1 if buffer else (1 << 64) - 1)
        offset = i.mods["offset"] + soffset(w)
        size = 4 * count
        if buffer:
            size = max(0, min(size, w.s[base + 2] - offset))
        data = w.memory.load(np.array([(address + offset) & ~3], U64), size)[0].tobytes() if size else b""
        data = data.ljust(4 * count, b"\0")
        for k in range(count):
            w.s[n + k] = int.from_bytes(data[4 * k:4 * k + 4], "little")
        w.issue("scalar", writes)

    return Step(i, load, bits_of(*i.src, i.mods.get("soffset")), writes, "scalar")


def local_memory(i: Instruction, chip: str) -> Step:
    name = i.name[3:]
    reads, writes = bits_of(*i.src), bits_of(*i.dst)
    run = exchange(i, name) if name.startswith(("bpermute", "permute", "swizzle")) else \
        local_access(i, name) if name.startswith(("read", "write")) else local_atomic(i, chip)
    return Step(i, run, reads, writes, "local")


def exchange(i: Instruction, name: str) -> Callable[[Any], None]:
    """Values of other lanes, through the LDS hardware but not its memory."""
    writes, to, address = bits_of(*i.dst), base_of(i.dst[0]), i.src[0].index
    offset = i.mods["offset"]
    if name.startswith("swizzle"):
        if offset & 0x8000:
            lanes = LANES & ~3 | offset >> 2 * (LANES & 3) & 3
        else:
            lanes = LANES & 32 | (LANES & 31 & offset | offset >> 5 & 31) ^ offset >> 10 & 31

    def run(w: Any) -> None:
        if name.startswith("permute"):
            found = np.zeros(64, U32)
            for lane in active(w):
                found[(int(w.v[address, lane]) + offset) // 4 % 64] = w.v[base_of(i.src[1]), lane]
        else:
            source = lanes if name.startswith("swizzle") else (w.v[address] + U32(offset)) // 4 % 64
            values = w.v[address] if name.startswith("swizzle") else w.v[base_of(i.src[1])]
            found = np.where(w.mask[source], values[source], U32(0))
        np.copyto(w.v[to], found, where=w.mask)
        w.issue("local", writes)

    return run


def deliver(w: Any, to: int, lanes: Array, data: Array, sign: str, half: str) -> None:
    """Loaded bytes (lanes, size) into registers from `to` on: of bytes and halves the number, into a half if asked."""
    size = data.shape[1]
    if size < 4:
        values = data.view(sign or f"u{size}")[:, 0].astype(np.int64).astype(U32)
        old = w.v[to, lanes]
        if half == "hi":
            values = values << U32(16) | old & U32(0xFFFF)
        elif half:
            values = values & U32(0xFFFF) | old & U32(0xFFFF0000)
        w.v[to, lanes] = values
        return
    words = data.view(U32)
    for k in range(size // 4):
        w.v[to + k, lanes] = words[:, k]


def collect(w: Any, base: int, lanes: Array, size: int, high: bool) -> Array:
    """Bytes (lanes, size) of registers to store."""
    if size < 4:
        return np.ascontiguousarray(((w.v[base, lanes] >> U32(16)) if high else w.v[base, lanes])[:, None]).view(U8)[:, :size]
    return np.ascontiguousarray(w.v[base:base + size // 4, lanes].T).view(U8)


def exchanged(i: Instruction, lanes: Array, data: Array) -> Array:
    """What lanes get of ds_read_b64_tr_b16: number n of lane l is number l % 4 of lane 4 n + (l / 4) % 4 of its 16."""
    if len(lanes) != 64:
        raise unsupported(i, "a transposing read of some lanes")
    source = (LANES[:, None] & ~15) + (LANES[:, None] >> 2 & 3) + 4 * np.arange(4)
    return np.ascontiguousarray(data.view("u2")[source, LANES[:, None] & 3]).view(U8)


def local_access(i: Instruction, name: str) -> Callable[[Any], None]:
    """Reads and writes; read2 and write2 have two places a lane."""
    transposed = "_tr_b16" in name
    if "_tr_" in name and not transposed:
        raise unsupported(i, "a transposing read of LDS")
    (size, sign, half, _), address, writes = split(name), i.src[0].index, bits_of(*i.dst)
    offsets = i.mods["offsets"] if i.mods["two"] else (i.mods["offset"],)

    def run(w: Any) -> None:
        lanes = active(w)
        compared = writes and size in (2, 4, 8) and w.group.program.compares(i.address)
        event = w.shared.begin(w.number, "atomic" if compared else "", i.text)
        start = w.v[address, lanes].copy()
        for k, offset in enumerate(offsets):
            index = w.shared.index(start + U32(offset), size)
            if writes:
                data = w.shared.load(w.number, index, event)
                if transposed:
                    data = exchanged(i, lanes, data)
                deliver(w, base_of(i.dst[0]) + k * size // 4, lanes, data, sign, half)
            else:
                w.shared.store(w.number, index, collect(w, base_of(i.src[1 + k]), lanes, size, half == "hi"), event)
        w.issue("local", writes, event)

    return run


def atomic_type(name: str) -> tuple[str, bool]:
    """The type of an atomic operation, and whether it is on pairs of 16 bits."""
    for mark, of in (("pk_add_f16", "f2"), ("pk_add_rtn_f16", "f2"), ("pk_add_bf16", "u2"), ("pk_add_rtn_bf16", "u2")):
        if mark in name:
            return of, True
    size = 8 if name.endswith(("x2", "64")) else 4
    signed = "smin" in name or "smax" in name or name.endswith(("_i32", "_i64"))
    kind = "f" if name.endswith(("f32", "f64")) else "i" if signed else "u"
    return f"{kind}{size}", False


def combine(i: Instruction, chip: str, name: str, data: list[int]) -> tuple[int, Callable[..., Array]]:
    """Bytes an atomic works on; and the function that applies it to bytes in memory and gives the old ones."""
    of, _ = atomic_type(name)
    size = 8 if of[1] == "8" else 4
    compute = meaning_of(i.meaning.meaning, chip, "a, b, c")

    def apply(w: Any, lanes: Array, memory: Array, index: Array) -> Array:
        operands = [np.ascontiguousarray(w.v[n:n + size // 4, lanes].T).view(U8) for n in data] + [None] * (2 - len(data))
        old = np.empty((len(lanes), size), U8)
        together = len(np.unique(index[:, 0])) == len(lanes)
        for rows in [slice(None)] if together else [slice(n, n + 1) for n in range(len(lanes))]:
            before = np.ascontiguousarray(memory[index[rows]])
            b, c = (np.ascontiguousarray(v[rows]).view(of) if v is not None else None for v in operands)
            after = compute(before.view(of), b, c).astype(of)
            memory[index[rows]] = after.view(U8).reshape(before.shape)
            old[rows] = before
        return old

    return size, apply


def local_atomic(i: Instruction, chip: str) -> Callable[[Any], None]:
    size, apply = combine(i, chip, i.name, [base_of(o) for o in i.src[1:]])
    address, offset, writes = i.src[0].index, i.mods["offset"], bits_of(*i.dst)

    def run(w: Any) -> None:
        lanes = active(w)
        index = w.shared.index(w.v[address, lanes] + U32(offset), size)
        event = w.shared.begin(w.number, "atomic", i.text)
        w.shared.touch(w.number, index, event)
        old = apply(w, lanes, w.shared.data, index)
        if writes:
            deliver(w, base_of(i.dst[0]), lanes, old, "", "")
        w.issue("local", writes, event)

    return run


def addresses(i: Instruction) -> Callable[[Any, Array], Array]:
    """Addresses of lanes, for global and flat instructions."""
    v, offset, saddr = i.src[0], i.mods["offset"], i.mods["saddr"]
    if saddr is not None and saddr.kind == "s":
        n, base = saddr.index, v.index
        return lambda w, lanes: w.v[base, lanes].astype(U64) + U64((w.pair(n) + offset) & (1 << 64) - 1)
    base, added = v.index, U64(offset & (1 << 64) - 1)
    return lambda w, lanes: (w.v[base, lanes].astype(U64) | w.v[base + 1, lanes].astype(U64) << U64(32)) + added


def vector_memory(i: Instruction, chip: str) -> Step:
    scalars = [i.mods[name] for name in ("saddr", "rsrc", "soffset") if isinstance(i.mods.get(name), Operand)]
    reads, writes = bits_of(*i.src, *scalars), bits_of(*i.dst)
    classes = frozenset(["memory reads scalar"]) if reads >> REGISTERS else frozenset()
    if not i.meaning.types:
        return Step(i, lambda w: w.issue("vector", 0), 0, 0, "vector")  # caches
    name = i.name.split("_", 1)[1]
    run: Callable[[Any], None]
    if i.format == "MUBUF":
        run = buffer_step(i, name, chip)
    elif i.mods["segment"] == "scratch":
        run = scratch_step(i, name)
    elif i.mods["lds"]:
        reads |= 1 << REGISTERS + M0
        run = direct_step(i, name)
    elif "atomic" in name:
        run = atomic_step(i, name, chip)
    else:
        run = global_step(i, name)
    return Step(i, run, reads, writes, "vector", classes=classes)


def split(name: str) -> tuple[int, str, str, bool]:
    """Size, sign, half and whether it is a load, of a name like load_short_d16_hi."""
    words = name.split("_")
    size, sign = SIZES[words[1]]
    return size, sign, "hi" if name.endswith("_hi") else "lo" if name.endswith("_d16") else "", words[0] == "load"


def flat_parts(i: Instruction, w: Any, lanes: Array, at: Array) -> list[tuple[str, Array]]:
    """Where the lanes of a flat access lie: LDS, scratch or global memory."""
    if i.mods["segment"] != "flat":
        return [("global", np.arange(len(lanes)))]
    w.issue("scalar", bits_of(*i.dst))
    high = (at >> U64(32)).astype(np.int64)
    from isa_machine import PRIVATE, SHARED

    kinds = [("shared", high == SHARED), ("scratch", high == PRIVATE), ("global", (high != SHARED) & (high != PRIVATE))]
    return [(kind, np.flatnonzero(where)) for kind, where in kinds if where.any()]


def global_step(i: Instruction, name: str) -> Callable[[Any], None]:
    where, writes, kind = addresses(i), bits_of(*i.dst), split(name)
    size, sign, half, load = kind

    def run(w: Any) -> None:
        lanes = active(w)
        at = where(w, lanes)
        for memory, rows in flat_parts(i, w, lanes, at):
            some, places = lanes[rows], at[rows]
            low = (places & U64(M32)).astype(U32)
            if memory == "scratch":
                private(w, i, some, low, kind)
                continue
            index = w.shared.index(low, size) if memory == "shared" else None
            event = w.shared.begin(w.number, "", i.text) if memory == "shared" else 0
            if load:
                data = w.memory.load(places, size) if index is None else w.shared.load(w.number, index, event)
                deliver(w, base_of(i.dst[0]), some, data, sign, half)
                continue
            data = collect(w, base_of(i.src[1]), some, size, half == "hi")
            if index is None:
                w.memory.store(places, data)
            else:
                w.shared.store(w.number, index, data, event)
        w.issue("vector", writes)

    return run


def private(w: Any, i: Instruction, lanes: Array, start: Array, kind: tuple[int, str, str, bool]) -> None:
    """A load or store of lanes' own scratch memory.  kind: what split() gives."""
    from isa_machine import Fault

    size, sign, half, load = kind
    if len(start) and int(start.max()) + size > w.scratch.shape[1]:
        raise Fault(f"byte {int(start.max())} of scratch, which has {w.scratch.shape[1]} bytes a lane")
    index = lanes[:, None], start.astype(np.int64)[:, None] + np.arange(size)
    if load:
        deliver(w, base_of(i.dst[0]), lanes, w.scratch[index], sign, half)
    else:
        w.scratch[index] = collect(w, base_of(i.src[1]), lanes, size, half == "hi")


def scratch_step(i: Instruction, name: str) -> Callable[[Any], None]:
    kind, v, offset, writes = split(name), i.src[0], i.mods["offset"], bits_of(*i.dst)
    saddr = scalar_reader(i.mods["saddr"], 1) if i.mods["saddr"].kind == "s" else lambda w: 0

    def run(w: Any) -> None:
        lanes = active(w)
        start = w.v[v.index, lanes] if v.kind == "v" else np.zeros(len(lanes), U32)
        private(w, i, lanes, start + U32((saddr(w) + offset) & M32), kind)
        w.issue("vector", writes)

    return run


def atomic_step(i: Instruction, name: str, chip: str) -> Callable[[Any], None]:
    base, of = base_of(i.src[1]), atomic_type(name)[0]
    words = 2 if of[1] == "8" else 1
    size, apply = combine(i, chip, name, [base, base + words] if "cmpswap" in name else [base])
    where, writes = addresses(i), bits_of(*i.dst)

    def run(w: Any) -> None:
        lanes = active(w)
        if i.mods["segment"] == "flat":
            raise unsupported(i, "a flat atomic")
        for rows, data, index in w.memory.bytes(where(w, lanes), size, True):
            old = apply(w, lanes[rows], data, index)
            if writes:
                deliver(w, base_of(i.dst[0]), lanes[rows], old, "", "")
        w.issue("vector", writes)

    return run


def into_lds(w: Any, i: Instruction, lanes: Array, offset: int, data: Array) -> None:
    """Bytes of lanes to LDS: M0 + offset of the instruction + lane * size."""
    size = data.shape[1]
    event = w.shared.begin(w.number, "direct", i.text)
    index = w.shared.index((w.s[M0] & 0xFFFF if size == 4 and w.s[M0] < 1 << 16 else w.s[M0]) + offset + lanes * size, size)
    w.shared.store(w.number, index, data, event)
    w.issue("vector", 0, event)


def direct_step(i: Instruction, name: str) -> Callable[[Any], None]:
    """Global memory to LDS without registers."""
    size = SIZES[name.split("_")[-1]][0]
    where = addresses(i)
    if size < 4:
        raise unsupported(i, "a load of bytes into LDS")

    def run(w: Any) -> None:
        lanes = active(w)
        into_lds(w, i, lanes, i.mods["offset"], w.memory.load(where(w, lanes), size))

    return run


def buffer_step(i: Instruction, name: str, chip: str) -> Callable[[Any], None]:
    """Buffer accesses by a descriptor of four scalar registers: loads beyond its size give 0, stores and atomics do nothing."""
    rsrc, mods, v = i.mods["rsrc"].index, i.mods, i.src[0]
    soffset, writes = scalar_reader(i.mods["soffset"], 1), bits_of(*i.dst)
    atomic = "atomic" in name
    if atomic:
        base, words = base_of(i.src[1]), 2 if atomic_type(name)[0][1] == "8" else 1
        size, apply = combine(i, chip, name, [base, base + words] if "cmpswap" in name else [base])
        sign = half = ""
        load = False
    else:
        size, sign, half, load = split(name)
    from isa_machine import PRIVATE

    def run(w: Any) -> None:
        lanes = active(w)
        address, stride, records = w.pair(rsrc) & (1 << 48) - 1, w.s[rsrc + 1] >> 16 & 0x3FFF, w.s[rsrc + 2]
        last = w.v[v.index + (1 if mods["idxen"] else 0), lanes] if mods["offen"] else U32(0)
        place = (np.zeros(len(lanes), np.int64) + last + mods["offset"])
        moved = soffset(w)
        if address >> 32 == PRIVATE:
            private(w, i, lanes, place + moved, (size, sign, half, load))
            w.issue("vector", writes)
            return
        number = w.v[v.index, lanes].astype(np.int64) if mods["idxen"] else 0
        inside = (number < records) & (place < stride) if stride else place + moved < records
        step = min(size, 4)
        data = np.zeros((len(lanes), size), U8)
        at = (address + moved + number * stride + place).astype(U64)
        if atomic:
            rows = np.flatnonzero(inside)
            for some, memory, index in w.memory.bytes(at[rows], size, True):
                old = apply(w, lanes[rows[some]], memory, index)
                data[rows[some]] = old
        for k in range(0, 0 if atomic else size, step):  # each word is checked
            rows = np.flatnonzero(inside if stride else place + moved + k + step <= records)
            if len(rows) and load:
                data[rows, k:k + step] = w.memory.load(at[rows] + U64(k), step)
            elif len(rows):
                stored = collect(w, base_of(i.src[1]), lanes, size, half == "hi")
                w.memory.store(at[rows] + U64(k), stored[rows, k:k + step])
        if mods["lds"]:
            into_lds(w, i, lanes, mods["offset"], data)
            return
        if writes:
            deliver(w, base_of(i.dst[0]), lanes, data, sign, half)
        w.issue("vector", writes)

    return run
