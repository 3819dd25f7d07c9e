"""Instructions as functions of a wave: scalar and vector ALU, MFMA, and (isa_memory.py) memory.

Sources: CDNA3 Instruction Set Architecture Reference Guide (AMD), chapters "Scalar ALU Operations", "Vector ALU Operations"
(modifiers, packed math, DPP and SDWA), "Instructions".
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import isa_arithmetic as ar
import isa_matrix
import numpy as np
from isa_arithmetic import F16, F32, F64, I16, I32, I64, LANES, M32, M64, U16, U32, U64
from isa_decode import FORMATS, Instruction, Operand

Array = Any
Reader = Callable[[Any], Array]
REGISTERS = 512  # bit of s0 in sets of registers; v0 to v255 and a0 to a255 come before
DTYPES = {"f16": F16, "f32": F32, "f64": F64, "i16": I16, "i32": I32, "i64": I64, "u16": U16, "u32": U32, "u64": U64, "a": U32,
          "h": F16, "I": I16, "U": U16, "p": F32}
TRANSCENDENTAL = ("v_exp_", "v_log_", "v_rcp_", "v_rsq_", "v_sqrt_", "v_sin_", "v_cos_")
VCC, M0, EXEC = 106, 124, 126


@dataclasses.dataclass
class Step:
    """An instruction ready to run, and what it does to registers."""

    instruction: Instruction
    run: Callable[[Any], None]
    reads: int
    writes: int
    queue: str = ""  # where its result is waited for
    cycles: int = 1
    classes: frozenset[str] = frozenset()
    operands: int = 0  # of an MFMA: A and B
    accumulator: int = 0  # of an MFMA: C
    matrix: bool = False

    def __post_init__(self) -> None:
        self.size, self.text, self.touches = self.instruction.size, self.instruction.text, self.reads | self.writes


def bits_of(*operands: Operand | None) -> int:
    found = 0
    for o in operands:
        if o is not None and o.kind in ("v", "a", "s"):
            first = o.index + {"v": 0, "a": 256, "s": REGISTERS}[o.kind]
            found |= ((1 << o.count) - 1) << first
    return found


@functools.cache
def meaning_of(text: str, chip: str, names: str) -> Callable[..., Any]:
    return eval(f"lambda {names}: {text}", {**vars(ar), **ar.SMALL, **ar.float8(chip)})  # type: ignore[no-any-return]


def unsupported(i: Instruction, why: str) -> Exception:
    from isa_machine import Fault

    return Fault(f"`{i.text}`: {why} is not modelled")


def compiled(i: Instruction, chip: str) -> Step:
    if i.format in ("SOP1", "SOP2", "SOPC", "SOPK", "SOPP"):
        return scalar_step(i, chip)
    if i.format == "MFMA":
        return matrix_step(i, chip)
    if i.format.startswith("V"):
        return vector_step(i, chip)
    from isa_memory import memory_step

    return memory_step(i, chip)


def scalar_reader(o: Operand, count: int) -> Callable[[Any], int]:
    if o.kind == "k":
        value = o.index & (M64 if count == 2 else M32)
        return lambda w: value
    n = o.index
    if n in (251, 252, 253):
        return {251: lambda w: int(w.pair(VCC) == 0), 252: lambda w: int(w.exec == 0), 253: lambda w: w.scc}[n]
    return (lambda w: w.s[n] | w.s[n + 1] << 32) if count == 2 else (lambda w: w.s[n])


def scalar_step(i: Instruction, chip: str) -> Step:
    row, reads, writes = i.meaning, bits_of(*i.src), bits_of(*i.dst)
    if i.format == "SOPP":
        return Step(i, program_step(i), 0, 0, cycles=(i.mods["simm"] & 15) + 1 if i.name == "s_nop" else 1)
    if row.types[:1] == ("-",) and i.format == "SOPK" or i.format == "SOPK" and i.name != "s_movk_i32":
        reads |= writes
    if "reg_" in i.name:
        return Step(i, mode_step(i), reads, writes)
    if i.name == "s_getpc_b64":
        n, after = i.dst[0].index, i.address + 4
        return Step(i, lambda w: w.write_scalar(n, w.group.code + after, 2), reads, writes)
    if i.name == "s_set_gpr_idx_on":
        get, which = scalar_reader(i.src[0], 1), i.mods["simm"]

        def index(w: Any) -> None:
            w.s[M0], w.indexed = get(w) & 255 | which << 12, which

        return Step(i, index, reads, bits_of(Operand("s", M0)))
    if not row.meaning:
        raise unsupported(i, i.name)
    compute = meaning_of(row.meaning, chip, "a, b, d, scc, x")
    wide = [2 if t.endswith("64") else 1 for t in row.types]
    values = [scalar_reader(o, n) for o, n in zip(i.src, wide[1:] if i.format != "SOPC" else wide, strict=False)]
    a = values[0] if values else lambda w: 0
    b = values[1] if len(values) > 1 else (lambda w: i.mods["simm"]) if i.format == "SOPK" else (lambda w: 0)
    if i.format == "SOPC" or "cmpk" in i.name:
        n = i.dst[0].index if i.dst else 0

        def compare(w: Any) -> None:
            w.scc = int(bool(compute(a(w), b(w), w.s[n], w.scc, 0)))

        return Step(i, compare, reads, 0 if "cmpk" in i.name else writes)
    n, count = i.dst[0].index, wide[0]
    if "saveexec" in i.name or "wrexec" in i.name:
        saves = "saveexec" in i.name

        def save(w: Any) -> None:
            old = w.exec
            new = compute(a(w), 0, 0, w.scc, old) & M64
            w.write_scalar(n, old if saves else new, 2)
            w.set_exec(new)
            w.scc = int(new != 0)

        return Step(i, save, reads, writes)
    scc = meaning_of(row.scc, chip, "a, b, d, r, scc") if row.scc else None

    def run(w: Any) -> None:
        x, y, d = a(w), b(w), w.s[n] if count == 1 else w.s[n] | w.s[n + 1] << 32
        r = compute(x, y, d, w.scc, 0)
        if scc is not None:
            r = r if i.name[:5] in ("s_add", "s_sub", "s_lsh") else r & (M32 if count == 1 else M64)
            w.scc = int(bool(scc(x, y, d, r, w.scc)))
        w.write_scalar(n, r & (M32 if count == 1 else M64), count)

    return Step(i, run, reads, writes)


def mode_step(i: Instruction) -> Callable[[Any], None]:
    """s_getreg and s_setreg of the MODE register (rounding and subnormals)."""
    n, at, mask = i.dst[0].index, i.mods["offset"], (1 << i.mods["width"]) - 1
    if i.mods["hwreg"] != 1:
        raise unsupported(i, "a hardware register but MODE")

    def run(w: Any) -> None:
        if "getreg" in i.name:
            w.write_scalar(n, w.mode >> at & mask)
        else:
            value = i.words[1] if "imm32" in i.name else w.s[n]
            w.mode = w.mode & ~(mask << at) | (value & mask) << at
            if w.mode & 15:
                raise unsupported(i, "a rounding other than to nearest")

    return run


def program_step(i: Instruction) -> Callable[[Any], None]:
    """Branches, waits, barriers, the end."""
    target = i.address + 4 + 4 * i.mods["simm"]
    tests: dict[str, Callable[[Any], Any]] = {
        "s_branch": lambda w: True, "s_cbranch_scc0": lambda w: not w.scc, "s_cbranch_scc1": lambda w: w.scc,
        "s_cbranch_vccz": lambda w: not w.pair(VCC), "s_cbranch_vccnz": lambda w: w.pair(VCC),
        "s_cbranch_execz": lambda w: not w.exec, "s_cbranch_execnz": lambda w: w.exec}
    if i.name in tests:
        test = tests[i.name]

        def branch(w: Any) -> None:
            if test(w):
                w.pc = target

        return branch
    if i.name == "s_waitcnt":
        return lambda w: w.wait(i.mods["vmcnt"], i.mods["lgkmcnt"])
    if i.name == "s_barrier":
        return lambda w: setattr(w, "state", "barrier")
    if i.name == "s_endpgm":
        return lambda w: (setattr(w, "state", "ended"), w.wait(0, 0))[1]
    if i.name == "s_set_gpr_idx_off":
        return lambda w: setattr(w, "indexed", 0)
    if i.name in ("s_trap", "s_sethalt"):
        raise unsupported(i, i.name)
    return lambda w: None


def constant(o: Operand, of: str) -> Array:
    kind = DTYPES.get(of, U32)
    if of == "p":
        return np.array([[o.index & M32]] * 2, np.uint32).view(F32)
    if of in "hIU":
        word = o.index & M32
        return np.array([[word & 0xFFFF], [word >> 16]], U16).view(kind)
    size = np.dtype(kind).itemsize
    return np.array([o.index & ((1 << 8 * size) - 1)], f"u{size}").view(kind)


def reader(i: Instruction, n: int, of: str) -> Reader:
    """The source n of an instruction over the lanes, as numbers of a type, with its modifiers."""
    o, mods = i.src[n], i.mods
    read = packed_reader(i, n, of) if of in "hIUpx" else plain_reader(i, o, n, of)
    if of[0] != "f" and not (i.name == "v_cndmask_b32" and (mods.get("neg", 0) | mods.get("abs", 0)) >> n & 1):
        return read
    if of[0] != "f":
        plain = read
        read = lambda w: plain(w).view(F32)  # noqa: E731
    result = signs(read, mods.get("neg", 0) >> n & 1, mods.get("abs", 0) >> n & 1)
    if of == "f32":
        return lambda w: result(w) if w.mode >> 4 & 1 else ar.flush(result(w))
    return result if of[0] == "f" else lambda w: result(w).view(U32)


def signs(read: Reader, negative: int, absolute: int) -> Reader:
    if absolute and negative:
        return lambda w: -np.abs(read(w))
    if absolute:
        return lambda w: np.abs(read(w))
    return (lambda w: -read(w)) if negative else read


def plain_reader(i: Instruction, o: Operand, n: int, of: str) -> Reader:
    mods = i.mods
    kind = DTYPES.get(of, U32)
    size = np.dtype(kind).itemsize
    if of == "m":
        from isa_machine import lanes_of

        get = scalar_reader(o, 2)
        return lambda w: lanes_of(get(w))
    if o.kind == "k":
        value = constant(o, of)
        return lambda w: value
    high = bool(mods.get("op_sel", 0) >> n & 1) and i.format == "VOP3"
    if o.kind == "s":
        get = scalar_reader(o, 2 if size == 8 else 1)
        shift = 16 if high else 0
        mask = (1 << 8 * size) - 1
        return lambda w: np.array([get(w) >> shift & mask], f"u{size}").view(kind)
    base = o.index + (256 if o.kind == "a" else 0)
    if "dpp" in mods and n == 0:
        lanes, valid = dpp_lanes(mods["dpp"])
        if size == 8:
            return lambda w: wide(w, base)[lanes].view(kind)

        def moved(w: Any) -> Array:
            found = w.v[base][lanes]
            good = valid if w.full else valid & w.mask[lanes]
            words = np.where(good, found, U32(0))
            return words.view(kind) if size == 4 else words.astype(U16).view(kind)

        return moved
    if "sdwa" in mods and n < 2:
        return selected(base, mods["sdwa"][n], bool(mods["sext"] >> n & 1), kind)
    if size == 8:
        return lambda w: wide(w, base).view(kind)
    if size == 2:
        half = int(high)
        return lambda w: w.halves[base, :, half].view(kind)
    if high:
        return lambda w: (w.v[base] >> U32(16)).view(kind)
    return {U32: lambda w: w.v[base], I32: lambda w: w.vi[base], F32: lambda w: w.vf[base]}[kind]


def wide(w: Any, base: int) -> Array:
    return w.v[base].astype(U64) | w.v[base + 1].astype(U64) << U64(32)


def selected(base: int, select: int, sign: bool, kind: Any) -> Reader:
    """A byte or half of a register (SDWA)."""
    shift, width = ((8 * select, 8) if select < 4 else (16 * (select - 4), 16) if select < 6 else (0, 32))
    size = np.dtype(kind).itemsize

    def read(w: Any) -> Array:
        found = w.v[base] >> U32(shift) & U32((1 << width) - 1)
        if sign:
            found = (found.astype(I64) << (64 - width) >> (64 - width)).astype(I32).view(U32)
        return found.astype(U16).view(kind) if size == 2 else found.view(kind)

    return read


def packed_reader(i: Instruction, n: int, of: str) -> Reader:
    """Two numbers a lane, along a first axis; or (x) one, of 16 or 32 bits, as a float of 32."""
    o, mods = i.src[n], i.mods
    low, high = mods.get("op_sel", 0) >> n & 1, mods.get("op_sel_hi", 7) >> n & 1
    if i.format != "VOP3P":  # v_pk_fmac_f16
        low, high = 0, 1
    base, kind = o.index + (256 if o.kind == "a" else 0), DTYPES.get(of, F32)
    if of == "x":
        half, whole = plain_reader(i, o, n, "f16"), plain_reader(i, o, n, "f32")
        if high and o.kind == "v":
            half = lambda w: w.halves[base, :, low].view(F16)  # noqa: E731
        read: Reader = (lambda w: half(w).astype(F32)) if high else whole
        return signs(read, mods["neg"] >> n & 1, mods["neg_hi"] >> n & 1)
    if o.kind == "k":
        value = constant(o, of)
        both: Reader = lambda w: value[[low, high]]  # noqa: E731
    elif o.kind == "s":
        if of == "p":
            both = lambda w: np.array([[w.s[o.index + low]], [w.s[o.index + high]]], U32).view(F32)  # noqa: E731
        else:
            get = scalar_reader(o, 1)
            both = lambda w: np.array([[get(w) >> 16 * k & 0xFFFF] for k in (low, high)], U16).view(kind)  # noqa: E731
    elif of == "p":
        both = lambda w: w.vf[[base + low, base + high]]  # noqa: E731
    else:
        both = lambda w: w.halves[base].T[[low, high]].view(kind)  # noqa: E731
    negative = [mods.get("neg", 0) >> n & 1, mods.get("neg_hi", 0) >> n & 1]
    if not any(negative) or of not in "hp":
        return both
    factor = np.array([[-1 if x else 1] for x in negative], kind)
    return lambda w: both(w) * factor


@functools.cache
def dpp_lanes(ctrl: int) -> tuple[Array, Array]:
    """The source lane of each lane, and whether there is one."""
    place, row, every = LANES & 15, LANES & ~15, np.ones(64, bool)
    if ctrl < 256:
        return LANES & ~3 | ctrl >> 2 * (LANES & 3) & 3, every
    n = ctrl & 15
    if ctrl >> 4 in (0x10, 0x11):
        moved = place + n if ctrl >> 4 == 0x10 else place - n
        return row | moved & 15, (moved >= 0) & (moved < 16)
    table = {0x140: row | 15 - place, 0x141: LANES & ~7 | 7 - (LANES & 7), 0x142: (row - 1) & 63, 0x143: LANES * 0 + 31,
             0x130: (LANES + 1) & 63, 0x134: (LANES + 1) & 63, 0x138: (LANES - 1) & 63, 0x13C: (LANES - 1) & 63}
    valid = {0x142: LANES >= 16, 0x143: LANES >= 32, 0x130: LANES < 63, 0x138: LANES > 0}
    if ctrl >> 4 in (0x12, 0x15):
        return (row | (place - n) & 15 if ctrl >> 4 == 0x12 else row | n), every
    return table[ctrl], valid.get(ctrl, every)


def enabled(i: Instruction) -> Callable[[Any], Array | None]:
    """The lanes that are written; None for all."""
    if "dpp" not in i.mods:
        return lambda w: None if w.full else w.mask
    lanes, valid = dpp_lanes(i.mods["dpp"])
    chosen = (i.mods["row_mask"] >> LANES // 16 & i.mods["bank_mask"] >> LANES % 16 // 4 & 1).astype(bool)
    if i.mods["bound_ctrl"]:
        return lambda w: chosen & w.mask
    return lambda w: chosen & valid & w.mask & w.mask[lanes]


def put(w: Any, register: int, words: Array, mask: Array | None) -> None:
    if mask is None:
        w.v[register] = words
    else:
        np.copyto(w.v[register], words, where=mask)


def mask_bits(w: Any, found: Array) -> int:
    return int(np.packbits(np.broadcast_to(found, 64) & w.mask, bitorder="little").view(U64)[0])


def writer(i: Instruction, o: Operand, of: str) -> Callable[[Any, Array], None]:
    """Stores a result of a type in the enabled lanes, with clamp and omod."""
    if of == "m":
        n, to_exec = o.index, i.name.startswith("v_cmpx")

        def flags(w: Any, found: Array) -> None:
            value = mask_bits(w, found)
            w.write_scalar(n, value, 2)
            if to_exec:
                w.set_exec(value)

        return flags
    base, lanes = o.index + (256 if o.kind == "a" else 0), enabled(i)
    kind = DTYPES[of]
    finish, clamped = finisher(i, kind), bool(i.mods.get("clamp"))
    size = np.dtype(kind).itemsize
    if of in "hIU":
        def store2(w: Any, found: Array) -> None:
            halves = finish(w, found if clamped else found.astype(kind, copy=False)).view(U16).astype(U32)
            put(w, base, halves[0] | halves[1] << U32(16), lanes(w))

        return store2
    if of == "p":
        def pair(w: Any, found: Array) -> None:
            for n, row in enumerate(finish(w, found).view(U32)):
                put(w, base + n, row, lanes(w))

        return pair
    if size == 8:
        def store8(w: Any, found: Array) -> None:
            words = finish(w, found if clamped else found.astype(kind, copy=False)).view(U64)
            put(w, base, words.astype(U32), lanes(w))
            put(w, base + 1, (words >> U64(32)).astype(U32), lanes(w))

        return store8
    if i.mods.get("dst_sel", 6) != 6:
        return part_writer(i, base, kind, finish)
    if size == 2:
        high = i.mods.get("op_sel", 0) >> 3 if i.format == "VOP3" else i.name == "v_fma_mixhi_f16"
        keeps = i.format == "VOP3P" or i.format == "VOP3" and (i.words[0] >> 16 & 0x3FF) >= 500  # others clear the rest

        def store_half(w: Any, found: Array) -> None:
            half = finish(w, found if clamped else found.astype(kind, copy=False)).view(U16).astype(U32)
            old = w.v[base]
            word = half << U32(16) | old & U32(0xFFFF) if high else half | old & U32(0xFFFF0000) if keeps else half
            put(w, base, word, lanes(w))

        return store_half

    def store(w: Any, found: Array) -> None:
        put(w, base, finish(w, found if clamped else found.astype(kind, copy=False)).view(U32), lanes(w))

    return store


def finisher(i: Instruction, kind: Any) -> Callable[[Any, Array], Array]:
    clamp, omod = i.mods.get("clamp", 0), (1.0, 2.0, 4.0, 0.5)[i.mods.get("omod", 0)]
    if clamp and np.dtype(kind).kind != "f":  # evaluate() computes these in 64 bits
        limits = np.iinfo(kind)
        return lambda w, found: found.clip(limits.min, limits.max).astype(kind)

    def finish(w: Any, found: Array) -> Array:
        found = found if omod == 1.0 else found * kind(omod)
        if clamp:
            found = np.where(np.isnan(found), kind(0), found.clip(0, 1))
        return found if kind is not F32 or w.mode >> 5 & 1 else ar.flush(found)

    return finish


def part_writer(i: Instruction, base: int, kind: Any, finish: Callable[[Any, Array], Array]) -> Callable[[Any, Array], None]:
    """SDWA: a result into a byte or half; the rest is cleared, filled with its sign, or kept."""
    select, unused, lanes = i.mods["dst_sel"], i.mods["dst_unused"], enabled(i)
    shift, width = (8 * select, 8) if select < 4 else (16 * (select - 4), 16)
    mask, clamped = U32(((1 << width) - 1) << shift), bool(i.mods.get("clamp"))

    def store(w: Any, found: Array) -> None:
        word = finish(w, found if clamped else found.astype(kind, copy=False))
        word = word.view(U16).astype(U32) if word.dtype.itemsize == 2 else word.view(U32)
        placed = word << U32(shift) & mask
        if unused == 2:
            placed = placed | w.v[base] & ~mask
        elif unused == 1:
            placed = (placed.astype(I64) << (64 - shift - width) >> (64 - shift - width)).astype(U32)
        put(w, base, placed, lanes(w))

    return store


def classes_of(i: Instruction) -> frozenset[str]:
    """The classes of HAZARDS that a vector instruction belongs to."""
    found = {"vector"}
    if any(o.kind == "s" for o in i.dst):
        found |= {"vector writes scalar"} | ({"vector writes vcc"} if any(o.index == VCC for o in i.dst) else set())
    if any(o.kind in "va" for o in i.dst):
        found.add("vector writes vector")
    found |= {"vector writes exec"} if i.name.startswith("v_cmpx") else set()
    found |= {"transcendental"} if i.name.startswith(TRANSCENDENTAL) else set()
    found |= {"dpp"} if "dpp" in i.mods else set()
    found |= {"div_fmas"} if "div_fmas" in i.name else set()
    found |= {"lane select"} if i.name in ("v_readlane_b32", "v_writelane_b32") and i.src[1].kind == "s" else set()
    if "transcendental" in found:
        found.discard("vector")
    return frozenset(found)


def vector_step(i: Instruction, chip: str) -> Step:
    reads, writes = bits_of(*i.src), bits_of(*i.dst)
    if "fmac" in i.name or "dot2c" in i.name or "dot4c" in i.name or "dot8c" in i.name or "v_mac" in i.name:
        reads |= writes
    if i.name in ("v_swap_b32", "v_permlane16_swap_b32", "v_permlane32_swap_b32"):
        reads = writes = reads | writes
    step = functools.partial(Step, i, reads=reads, writes=writes, classes=classes_of(i))
    if i.name == "v_nop":
        return step(run=lambda w: None, classes=frozenset())
    if i.name in ("v_readfirstlane_b32", "v_readlane_b32", "v_writelane_b32"):
        return step(run=lane_step(i))
    out, sources = i.meaning.types[0], [t for t in i.meaning.types[1:] if t != "-"]
    if len(i.dst) > 1:
        sources = sources[1:]
    if i.name == "v_pk_mov_b32":
        first, second = (packed_reader(i, n, "p") for n in (0, 1))
        store = writer(i, i.dst[0], "p")
        return step(run=lambda w: store(w, np.stack(np.broadcast_arrays(first(w)[0], second(w)[0]))))
    readers = [reader(i, n, "f32" if of == "k" else of) for n, of in enumerate(sources)]
    return step(run=evaluate(i, chip, readers, out))


def evaluate(i: Instruction, chip: str, readers: list[Reader], out: str) -> Callable[[Any], None]:
    compute = meaning_of(i.meaning.meaning, chip, "a, b, c, d, vcc, table")
    stores = [writer(i, o, of) for o, of in zip(i.dst, (out, "m"), strict=False)]
    if i.name.endswith(("swap_b32",)):
        stores.append(writer(i, i.src[0], out))
    text, table = i.meaning.meaning, i.mods.get("table", 0)
    old = plain_reader(dataclasses.replace(i, src=[i.dst[0]], mods={}), i.dst[0], 0, out) if "d" in names_in(text) else None
    if old is not None and out == "h":
        old = packed_reader(dataclasses.replace(i, src=[i.dst[0]], mods={}, format="VOP2"), 0, "h")
    scaled = plain_reader(i, Operand("s", VCC, 2), 2, "m") if "vcc" in text else None
    if i.mods.get("clamp") and np.dtype(DTYPES.get(out, F32)).kind != "f":
        readers = [lambda w, read=read: read(w).astype(I64) for read in readers]  # type: ignore[misc]
    readers = readers + [lambda w: None] * (3 - len(readers))
    a, b, c = readers
    if len(stores) == 1 and old is None and scaled is None:
        store = stores[0]
        return lambda w: store(w, compute(a(w), b(w), c(w), None, None, table))

    def run(w: Any) -> None:
        found = compute(a(w), b(w), c(w), old(w) if old else None, scaled(w) if scaled else None, table)
        values = [value.copy() for value in found] if len(stores) > 1 else [found]  # a store may change the next value
        for store, value in zip(stores, values, strict=True):
            store(w, value)

    return run


@functools.cache
def names_in(text: str) -> frozenset[str]:
    return frozenset(compile(text, "", "eval").co_names)


def lane_step(i: Instruction) -> Callable[[Any], None]:
    """v_readfirstlane, v_readlane, v_writelane: they ignore exec."""
    base, n = i.src[0].index + (256 if i.src[0].kind == "a" else 0), i.dst[0].index
    if i.name == "v_readfirstlane_b32":
        return lambda w: w.write_scalar(n, int(w.v[base, int(w.mask.argmax())]))
    lane = scalar_reader(i.src[1], 1)
    if i.name == "v_readlane_b32":
        return lambda w: w.write_scalar(n, int(w.v[base, lane(w) & 63]))
    value = scalar_reader(i.src[0], 1)

    def write(w: Any) -> None:
        w.v[n, lane(w) & 63] = value(w)

    return write


def matrix_step(i: Instruction, chip: str) -> Step:
    formats = None
    if "f8f6f4" in i.name:
        formats = tuple(FORMATS[i.mods[n]][0] for n in ("cbsz", "blgp"))
        if formats[0][2:] == "6" or formats[1][2:] == "6":
            raise unsupported(i, "a format of 6 bits")
    elif i.mods["cbsz"] or i.mods["abid"] or i.mods["blgp"]:
        raise unsupported(i, "a broadcast or permutation of MFMA operands")
    factors = [plain_reader(i, o, 3 + n, "u32") for n, o in enumerate(i.src[3:])]
    count = i.dst[0].count
    first = [o.index + (256 if o.kind == "a" else 0) for o in i.src]
    to = i.dst[0].index + (256 if i.dst[0].kind == "a" else 0)
    c = i.src[2]
    value = c.index & M32
    if c.kind == "k" and "f64" in i.name and value:
        raise unsupported(i, "a constant C of 64 bits")

    def run(w: Any) -> None:
        if not w.full:
            raise unsupported(i, "MFMA with lanes switched off")
        a, b = (w.v[n:n + o.count] for n, o in zip(first, i.src[:2], strict=False))
        old = w.v[first[2]:first[2] + count] if c.kind != "k" else np.full((count, 64), value, U32)
        scales = [np.ldexp(np.float32(1), (np.broadcast_to(get(w), 64) >> 8 * byte & 255).astype(I32) - 127)
                  for get, byte in zip(factors, i.mods.get("bytes", ()), strict=True)]
        w.v[to:to + count] = isa_matrix.multiply(i.meaning, chip, a, b, old, formats, scales)

    ab = bits_of(*i.src[:2], *i.src[3:])
    return Step(i, run, bits_of(*i.src), bits_of(*i.dst), operands=ab, accumulator=bits_of(c), matrix=True)
