"""Decoder of the machine code of gfx90a, gfx942 and gfx950: 32-bit words to instructions, and their text as LLVM writes it.

Fields: chapter "Microcode Formats" of the CDNA2, CDNA3 and CDNA4 Instruction Set Architecture Reference Guides (AMD), with the
SDWA and DPP words; operand codes: its tables of scalar and vector sources (SSRC0, SRC0) and section "Literal Constants".
"""

from __future__ import annotations

import dataclasses
import re
import struct
from typing import Any

import isa_rows as rows
from isa_arithmetic import field

CHIPS = ("90a", "942", "950")
INLINE_FLOATS = (0.5, -0.5, 1.0, -1.0, 2.0, -2.0, 4.0, -4.0, 0.15915494309189532)  # codes 240 to 248
WIDTH = {"u64": 2, "i64": 2, "f64": 2, "m": 2, "p": 2}  # registers of 32 bits; the others have one
SPECIAL = {102: "flat_scratch_lo", 103: "flat_scratch_hi", 104: "xnack_mask_lo", 105: "xnack_mask_hi", 106: "vcc_lo",
           107: "vcc_hi", 124: "m0", 126: "exec_lo", 127: "exec_hi", 235: "src_shared_base", 236: "src_shared_limit",
           237: "src_private_base", 238: "src_private_limit", 251: "src_vccz", 252: "src_execz", 253: "src_scc"}
PAIRS = {102: "flat_scratch", 104: "xnack_mask", 106: "vcc", 126: "exec"}
NO_E32 = {"v_readfirstlane_b32", "v_swap_b32", "v_accvgpr_mov_b32", "v_fmamk_f32", "v_fmaak_f32",
          "v_madmk_f32", "v_madak_f32"}


class UnknownCode(ValueError):
    """Words that are no instruction the tables know."""


@dataclasses.dataclass(frozen=True)
class Operand:
    """A register range ("v", "a", "s"; `index`, `count`), a constant ("k": its bits, as an operand of `type`), or "off"."""

    kind: str
    index: int = 0
    count: int = 1
    text: str = ""
    type: str = "u32"

    def __str__(self) -> str:
        if self.text:
            return self.text
        if self.kind == "s":
            if self.count == 2 and self.index in PAIRS:
                return PAIRS[self.index]
            if self.index in SPECIAL:
                return SPECIAL[self.index]
        name, first = (self.kind, self.index) if self.kind != "s" or self.index < 108 else ("ttmp", self.index - 108)
        return f"{name}{first}" if self.count == 1 else f"{name}[{first}:{first + self.count - 1}]"


@dataclasses.dataclass
class Instruction:
    address: int
    words: tuple[int, ...]
    format: str
    name: str  # as in the guides, with its prefix: v_add_f32
    meaning: Any  # the row
    dst: list[Operand]
    src: list[Operand]
    mods: dict[str, Any]
    text: str = ""

    @property
    def size(self) -> int:
        return 4 * len(self.words)


@dataclasses.dataclass(frozen=True)
class Row:
    name: str
    types: tuple[str, ...]
    meaning: str = ""
    scc: str = ""


def _rows(text: str, chip: str, prefix: str) -> dict[int, Row]:
    result = {}
    for line in re.split(r" ; |\n", text.strip()):
        head, meaning, scc = ([part.strip().replace("\\|", "|") for part in re.split(r"(?<!\\)\|", line)] + ["", ""])[:3]
        opcode, name, *types = head.split()
        if types and types[0].startswith("@"):
            if chip not in types.pop(0)[1:].split(","):
                continue
        result[int(opcode)] = Row(prefix + name, tuple(types), meaning, scc)
    return result


def _comparisons(chip: str) -> dict[int, Row]:
    result = {}
    for number, of in enumerate(("f32", "f64", "f16")):
        for x in (0, 1):
            result[16 + 2 * number + x] = Row(f"v_cmp{'x' * x}_class_{of}", ("m", of, "u32"), "in_class(a, b)")
    for of, first in rows.COMPARE_FIRST.items():
        table = rows.COMPARISONS_FLOAT if of[0] == "f" else rows.COMPARISONS_INT
        for place, item in enumerate(re.split(r"\||\n", table)):
            name, meaning = item.split(":")
            for x in (0, 1):
                result[first + place + 16 * x] = Row(f"v_cmp{'x' * x}_{name.strip()}_{of}", ("m", of, of), meaning.strip())
    return result


def _mfma(chip: str) -> dict[int, Row]:
    result = {}
    for line in re.split(r" ; |\n", rows.MFMA.strip()):
        opcode, shape, blocks, a, b, c, passes = line.split()
        cycles = int(passes.split("/")[CHIPS.index(chip)])
        if not cycles:
            continue
        many = f"_{blocks}b" if blocks != "1" else ""
        inputs = a if a == b and a not in ("fp8", "bf8") else f"{a}_{b}"
        name = f"v_mfma_{c}_{shape}{inputs}" if chip == "90a" else f"v_mfma_{c}_{shape}{many}_{inputs}"
        result[int(opcode)] = Row(name, (shape, blocks, a.replace("_1k", ""), b.replace("_1k", ""), c, str(cycles), a))
    return result


def table_of(chip: str) -> dict[str, dict[int, Row]]:
    """Format -> opcode -> row."""
    t = {name: _rows(getattr(rows, name), chip, "v_" if name.startswith("V") else "s_" if name.startswith("S") else "")
         for name in ("SOP1", "SOP2", "SOPK", "SOPC", "SOPP", "SMEM", "VOP1", "VOP2", "VOP3", "VOP3P", "DS", "FLAT")}
    t["VOPC"] = _comparisons(chip)
    t["VOP3"] |= t["VOPC"] | {256 + n: row for n, row in t["VOP2"].items() if "k" not in row.types}
    t["VOP3"] |= {320 + n: row for n, row in t["VOP1"].items() if row.name not in (*NO_E32, "v_nop")}
    t["MFMA"] = _mfma(chip)
    control = {n: row for n, row in _rows(rows.MUBUF_CONTROL, chip, "buffer_").items() if n < 60 or chip == "90a"}
    t["MUBUF"] = {n: dataclasses.replace(row, name="buffer_" + row.name) for n, row in t["FLAT"].items()
                  if "lds" not in row.name and (n != 82 or chip == "950")} | control
    return t


def float_text(value: float, of: str) -> str:
    return ("0.15915494309189532" if WIDTH.get(of) == 2 and of != "p" else "0.15915494") if 0.15 < value < 0.16 else repr(value)


def float_bits(value: float, of: str) -> int:
    """An inline constant as an operand of a type: that type's format, f32 for those of integers of 32 bits."""
    code = "e" if of in ("f16", "i16", "u16", "h", "I", "U") else "d" if of in ("f64", "u64", "i64") else "f"
    return int.from_bytes(struct.pack("<" + code, value), "little")


class Decoder:
    """Decodes the code of one chip."""

    def __init__(self, chip: str) -> None:
        self.chip = chip
        self.table = table_of(chip)

    def row(self, form: str, opcode: int) -> Row:
        row = self.table[form].get(opcode)
        if row is None:
            raise UnknownCode(f"no {form} instruction {opcode} on gfx{self.chip}")
        return row

    def all(self, code: bytes, address: int = 0) -> list[Instruction]:
        words = struct.unpack(f"<{len(code) // 4}I", code)
        at, result = 0, []
        while at < len(words):
            result.append(self.one(words[at:at + 4], address + 4 * at))
            at += len(result[-1].words)
        return result

    def one(self, words: tuple[int, ...], address: int = 0) -> Instruction:
        """The instruction at the start of the words; UnknownCode names the words."""
        try:
            form, decode = self._format(words[0])
            found = decode(words, address)
            found.text = found.text or write(found, form)
            return found
        except (UnknownCode, KeyError, IndexError) as error:
            shown = " ".join(f"{w:08x}" for w in words[:2])
            raise UnknownCode(f"{address:#x}: unknown words {shown}: {error}") from None

    def _format(self, w: int) -> tuple[str, Any]:
        if w >> 31 == 0:
            low = field(w, 17, 8)
            others = {0x3E: ("VOPC", low, 0), 0x3F: ("VOP1", field(w, 9, 8), low)}
            form, opcode, dst = others.get(w >> 25, ("VOP2", w >> 25, low))
            return form, lambda words, at: self._short(form, opcode, words, at, dst)
        if w >> 30 == 2:
            if w >> 23 in (0x17E, 0x17F):
                return ("SOPC", self.sopc) if w >> 23 == 0x17E else ("SOPP", self.sopp)
            if w >> 28 == 0xB and w >> 23 != 0x17D:
                return "SOPK", self.sopk
            form, opcode = ("SOP1", field(w, 8, 8)) if w >> 23 == 0x17D else ("SOP2", field(w, 23, 7))
            return form, lambda words, at: self._scalar_alu(form, opcode, words, at)
        six = {0x30: ("SMEM", self.smem), 0x34: ("VOP3", self.vop3), 0x36: ("DS", self.ds), 0x37: ("FLAT", self.flat),
               0x38: ("MUBUF", self.mubuf)}.get(w >> 26)
        if six is None:
            raise UnknownCode("no such format")
        return ("VOP3P", self.vop3p) if w >> 23 == 0x1A7 else six

    # ---- operands ----

    def scalar(self, code: int, of: str, words: tuple[int, ...] = ()) -> Operand:
        """A scalar source or destination code; 255 takes the second word as a literal."""
        if code < 128:
            return Operand("s", code, WIDTH.get(of, 1))
        if code == 255:
            value = words[1] << 32 if of == "f64" else words[1] & 0xFFFF if of in ("i16", "u16", "f16") else words[1]
            return Operand("k", value, text=f"{value >> 32 if of == 'f64' else value:#x}", type="literal")
        if code <= 208:
            value = code - 128 if code <= 192 else 192 - code
            return Operand("k", value, text=str(value), type=of)
        if 240 <= code <= 248:
            value = INLINE_FLOATS[code - 240]
            return Operand("k", float_bits(value, of), text=float_text(value, of), type=of)
        if code in SPECIAL:
            return Operand("s", code, 1)
        raise UnknownCode(f"operand code {code}")

    def source(self, code: int, of: str, words: tuple[int, ...] = ()) -> Operand:
        return Operand("v", code - 256, WIDTH.get(of, 1)) if code >= 256 else self.scalar(code, of, words)

    # ---- scalar formats ----

    def _scalar_alu(self, form: str, opcode: int, words: tuple[int, ...], at: int) -> Instruction:
        w, row = words[0], self.row(form, opcode)
        codes = [c for c, t in zip((field(w, 0, 8), field(w, 8, 8)), row.types[1:], strict=False) if t != "-"]
        src = [self.scalar(c, t, words) for c, t in zip(codes, row.types[1:], strict=False)]
        dst = [] if row.types[0] == "-" else [self.scalar(field(w, 16, 7), row.types[0])]
        return Instruction(at, words[:2 if 255 in codes else 1], form, row.name, row, dst, src, {})

    def sopc(self, words: tuple[int, ...], at: int) -> Instruction:
        w = words[0]
        row = self.row("SOPC", field(w, 16, 7))
        codes = field(w, 0, 8), field(w, 8, 8)
        if row.types[1] == "k":  # s_set_gpr_idx_on: bits name operands
            source, which = self.scalar(codes[0], "u32", words), codes[1] & 15
            names = ",".join(name for n, name in enumerate(("SRC0", "SRC1", "SRC2", "DST")) if which >> n & 1)
            text = f"{row.name} {source}, gpr_idx({names})"
            size = 2 if codes[0] == 255 else 1
            return Instruction(at, words[:size], "SOPC", row.name, row, [], [source], {"simm": which}, text)
        src = [self.scalar(c, t, words) for c, t in zip(codes, row.types, strict=True)]
        return Instruction(at, words[:2 if 255 in codes else 1], "SOPC", row.name, row, [], src, {})

    def sopk(self, words: tuple[int, ...], at: int) -> Instruction:
        w = words[0]
        row = self.row("SOPK", field(w, 23, 5))
        value, reg = field(w, 0, 16), self.scalar(field(w, 16, 7), "u32")
        mods = {"simm": value - (value >> 15 << 16)}
        size = 2 if row.name == "s_setreg_imm32_b32" else 1
        if "reg_" in row.name:
            part = f"hwreg({HWREG.get(value & 63, value & 63)}, {value >> 6 & 31}, {(value >> 11) + 1})"
            part = part.replace(", 0, 32)", ")")
            texts = {"s_getreg_b32": f"{reg}, {part}", "s_setreg_b32": f"{part}, {reg}",
                     "s_setreg_imm32_b32": f"{part}, {words[1]:#x}" if size == 2 else ""}
            mods |= {"hwreg": value & 63, "offset": value >> 6 & 31, "width": (value >> 11) + 1}
            text = f"{row.name} {texts[row.name]}"
        else:
            text = f"{row.name} {reg}, {simm_text(value)}"
        return Instruction(at, words[:size], "SOPK", row.name, row, [reg], [], mods, text)

    def sopp(self, words: tuple[int, ...], at: int) -> Instruction:
        row = self.row("SOPP", field(words[0], 16, 7))
        value = field(words[0], 0, 16)
        mods: dict[str, Any] = {"simm": value - (value >> 15 << 16)}
        text = row.name
        if row.name == "s_waitcnt":
            counts = {"vmcnt": (value & 15 | value >> 14 << 4, 63), "expcnt": (value >> 4 & 7, 7),
                      "lgkmcnt": (value >> 8 & 15, 15)}
            mods |= {name: n for name, (n, _) in counts.items()}
            shown = [f"{name}({n})" for name, (n, most) in counts.items() if n != most]
            text += " " + " ".join(shown or [f"{name}({n})" for name, (n, _) in counts.items()])
        elif row.name not in ("s_endpgm", "s_barrier", "s_icache_inv", "s_set_gpr_idx_off"):
            text += f" {value}" if "branch" in row.name else f" {simm_text(value)}"
        return Instruction(at, words[:1], "SOPP", row.name, row, [], [], mods, text)

    def smem(self, words: tuple[int, ...], at: int) -> Instruction:
        w, x = words[0], words[1]
        row = self.row("SMEM", field(w, 18, 8))
        count = int(row.types[0])
        base = Operand("s", field(w, 0, 6) * 2, 4 if "buffer" in row.name else 2)
        offset = field(x, 0, 21)
        mods = {"offset": (offset - (offset >> 20 << 21)) if field(w, 17, 1) else 0, "glc": field(w, 16, 1),
                "imm": field(w, 17, 1)}
        dst = [Operand("s", field(w, 6, 7), count)] if count else []
        src = [] if "load" not in row.name else [base]
        text = row.name
        if src:
            last = f"{mods['offset']:#x}" if mods["offset"] >= 0 else f"-{-mods['offset']:#x}"
            if field(w, 14, 1) or not mods["imm"]:
                mods["soffset"] = self.scalar(field(x, 25, 7) if field(w, 14, 1) else field(x, 0, 7), "u32")
                last = f"{mods['soffset']}" + (f" offset:{last}" if mods["imm"] else "")
            text += f" {dst[0]}, {base}, {last}" + " glc" * mods["glc"]
        elif dst:
            text += f" {dst[0]}"
        return Instruction(at, words[:2], "SMEM", row.name, row, dst, src, mods, text)

    # ---- vector formats ----

    def _vector(self, form: str, row: Row, words: tuple[int, ...], at: int, codes: list[int], dst: int, size: int = 1,
                mods: dict[str, Any] | None = None) -> Instruction:
        """Operands of a vector instruction of the types of a row; implied masks are vcc."""
        mods = mods if mods is not None else {}
        types = list(row.types)
        out: list[Operand] = []
        sdst = mods.pop("sdst", 106)
        first = types.pop(0)
        if first == "s":
            out.append(self.scalar(dst, "u32"))
        elif first == "m":
            out.append(self.scalar(mods.pop("vopc", sdst), "m"))
        elif first != "-":
            out.append(Operand("a" if first == "a" else "v", dst, WIDTH.get(first, 1)))
            if types and types[0] == "m" and row.name.endswith(CARRY):
                types.pop(0)
                out.append(self.scalar(sdst, "m"))
        src = []
        signed = sum(1 << n for n, of in enumerate(t for t in types if t != "m") if of[0] in "fhpx" or row.name in SIGNED)
        if "neg_hi" not in mods:
            mods.update({name: mods[name] & signed for name in ("neg", "abs") if name in mods})
        for of in types:
            if of == "k":
                src.append(Operand("k", words[1], text=f"{words[1]:#x}", type="literal"))
                size = 2
            elif of == "m":
                code = codes.pop(0) if codes else 106
                src.append(Operand("s", code, 2) if code < 128 else self.scalar(code, "u32", words))
            elif of != "-":
                code = codes.pop(0)
                found = self.source(code, of, words)
                src.append(dataclasses.replace(found, kind="a") if of == "a" and found.kind == "v" else found)
                if code == 255:
                    size = 2
        return Instruction(at, words[:size], form, row.name, row, out, src, mods)

    def _short(self, form: str, opcode: int, words: tuple[int, ...], at: int, dst: int) -> Instruction:
        """A 32-bit vector instruction; source codes 249 and 250 announce an SDWA and a DPP word."""
        row, codes = self.row(form, opcode), [field(words[0], 0, 9)]
        codes += [256 + field(words[0], 9, 8)] if form != "VOP1" else []
        if codes[0] not in (249, 250):
            return self._vector(form, row, words, at, codes, dst)
        x = words[1]
        if codes[0] == 250:
            mods: dict[str, Any] = {
                "dpp": field(x, 8, 9), "bound_ctrl": field(x, 19, 1), "bank_mask": field(x, 24, 4), "row_mask": field(x, 28, 4),
                "neg": field(x, 20, 1) | field(x, 22, 1) << 1, "abs": field(x, 21, 1) | field(x, 23, 1) << 1}
            codes[0] = 256 + field(x, 0, 8)
        else:
            mods = {"sdwa": (field(x, 16, 3), field(x, 24, 3)), "sext": field(x, 19, 1) | field(x, 27, 1) << 1,
                    "neg": field(x, 20, 1) | field(x, 28, 1) << 1, "abs": field(x, 21, 1) | field(x, 29, 1) << 1}
            codes[0] = field(x, 0, 8) + (0 if field(x, 23, 1) else 256)
            if len(codes) > 1 and field(x, 31, 1):
                codes[1] -= 256
            if form == "VOPC":
                mods["vopc"] = field(x, 8, 7) if field(x, 15, 1) else 106
            else:
                mods |= {"dst_sel": field(x, 8, 3), "dst_unused": field(x, 11, 2), "clamp": field(x, 13, 1),
                         "omod": field(x, 14, 2)}
        return self._vector(form, row, words, at, codes, dst, 2, mods)

    def vop3(self, words: tuple[int, ...], at: int) -> Instruction:
        w, x = words[0], words[1]
        row = self.row("VOP3", field(w, 16, 10))
        mods: dict[str, Any] = {"clamp": field(w, 15, 1), "omod": field(x, 27, 2), "neg": field(x, 29, 3), "vop3": True}
        if row.types[1:2] == ("m",) and row.name.endswith(CARRY):
            mods["sdst"] = field(w, 8, 7)
        else:
            mods |= {"abs": field(w, 8, 3), "op_sel": field(w, 11, 4)}
        if row.types[0] == "m":
            mods["vopc"] = field(w, 0, 8)
        if "bitop3" in row.name:
            mods |= {"table": field(w, 8, 3) << 3 | field(x, 27, 2) << 6 | field(x, 29, 3), "abs": 0, "neg": 0, "omod": 0}
        codes = [field(x, 0, 9), field(x, 9, 9), field(x, 18, 9)]
        if 255 in codes[:len(row.types) - 1]:
            raise UnknownCode("literal in VOP3")
        return self._vector("VOP3", row, words, at, codes, field(w, 0, 8), 2, mods)

    def vop3p(self, words: tuple[int, ...], at: int) -> Instruction:
        w, x = words[0], words[1]
        opcode = field(w, 16, 7)
        codes = [field(x, 0, 9), field(x, 9, 9), field(x, 18, 9)]
        if opcode == 44:  # the scales of the matrix instruction that follows
            return self._matrix(self.row("MFMA", field(words[2], 16, 7)), words[2:], at, words[:2])
        if opcode in self.table["MFMA"]:
            return self._matrix(self.row("MFMA", opcode), words, at, ())
        row = self.row("VOP3P", opcode)
        mods = {"neg_hi": field(w, 8, 3), "op_sel": field(w, 11, 3), "op_sel_hi": field(x, 27, 2) | field(w, 14, 1) << 2,
                "clamp": field(w, 15, 1), "neg": field(x, 29, 3)}
        return self._vector("VOP3P", row, words, at, codes, field(w, 0, 8), 2, mods)

    def _matrix(self, row: Row, words: tuple[int, ...], at: int, scales: tuple[int, ...]) -> Instruction:
        w, x = words[0], words[1]
        codes = [field(x, 0, 9), field(x, 9, 9), field(x, 18, 9)]
        shape, blocks, a, b, c = row.types[:5]
        m, n, k = (int(part) for part in shape.split("x"))
        bits = {"f64": 64, "f32": 32, "xf32": 32, "i32": 32, "f16": 16, "bf16": 16}
        mods: dict[str, Any] = {"cbsz": field(w, 8, 3), "abid": field(w, 11, 4), "blgp": field(x, 29, 3)}
        widths = [FORMATS[mods[n]][1] if a == "f8f6f4" else bits.get(t, 8) for n, t in (("cbsz", a), ("blgp", b))]
        counts = [m * k * int(blocks) * widths[0] // 2048, n * k * int(blocks) * widths[1] // 2048,
                  m * n * int(blocks) * bits[c] // 2048]
        sides = [field(x, 27, 1), field(x, 28, 1), field(w, 15, 1)]
        src = [Operand("a" if side else "v", code - 256, count) if code >= 256 else self.scalar(code, c)
               for code, count, side in zip(codes, counts, sides, strict=True)]
        dst = [Operand("a" if sides[2] else "v", field(w, 0, 8), counts[2])]
        name = row.name
        if scales:
            name, mods["abid"] = name.replace("v_mfma_", "v_mfma_scale_"), 0
            src += [self.source(field(scales[1], 9 * n, 9), "u32") for n in (0, 1)]
            mods["bytes"] = [field(scales[0], 11 + n, 1) | field(scales[1], 27 + n, 1) << 1 for n in (0, 1)]
        return Instruction(at, (*scales, *words[:2]), "MFMA", name, row, dst, src, mods)

    # ---- memory formats ----

    def ds(self, words: tuple[int, ...], at: int) -> Instruction:
        w, x = words[0], words[1]
        row = self.row("DS", field(w, 17, 8))
        data, result = int(row.types[0]), int(row.types[1])
        two = "2_b" in row.name or "2st64" in row.name
        kind = "a" if field(w, 25, 1) else "v"
        width = 2 if two and "b64" in row.name else 1
        src = [Operand("v", field(x, 0, 8))]
        if two and data:
            src += [Operand(kind, field(x, 8, 8), width), Operand(kind, field(x, 16, 8), width)]
        elif "cmpst" in row.name:
            src += [Operand(kind, field(x, 8, 8), data // 2), Operand(kind, field(x, 16, 8), data // 2)]
        elif data:
            src.append(Operand(kind, field(x, 8, 8), data))
        dst = [Operand(kind, field(x, 24, 8), result)] if result else []
        low, high = field(w, 0, 8), field(w, 8, 8)
        scale = (256 if width == 1 else 512) if "st64" in row.name else 4 * width
        mods = {"two": two, "offset": low | high << 8, "offsets": (low * scale, high * scale), "raw": (low, high)}
        return Instruction(at, words[:2], "DS", "ds_" + row.name, row, dst, src, mods)

    def cache_bits(self, w: int, sc0: int, sc1: int, nt: int) -> list[str]:
        names = ("glc", "", "slc") if self.chip == "90a" else ("sc0", "sc1", "nt")
        return [name for name, bit in zip(names, (sc0, sc1, nt), strict=True) if field(w, bit, 1) and name]

    def flat(self, words: tuple[int, ...], at: int) -> Instruction:
        w, x = words[0], words[1]
        row = self.row("FLAT", field(w, 18, 7))
        segment = ("flat", "scratch", "global")[field(w, 14, 2)]
        data, result = int(row.types[0]), int(row.types[1])
        atomic, kind = "atomic" in row.name, "a" if field(x, 23, 1) else "v"
        returns = atomic and field(w, 16, 1)
        base, none = field(x, 16, 7), Operand("off", text="off")
        vaddr: Operand = Operand("v", field(x, 0, 8), 2 if segment == "flat" or base == 0x7F else 1)
        saddr = None if segment == "flat" else none if base == 0x7F else Operand("s", base, 2)
        if segment == "scratch":
            by_lane = base == 0x7F if self.chip == "90a" else field(w, 13, 1)
            vaddr = Operand("v", field(x, 0, 8)) if by_lane else none
            saddr = none if base == 0x7F else self.scalar(base, "u32")
        offset = field(w, 0, 13)
        offset = offset - (offset >> 12 << 13) if segment != "flat" else offset
        cache = self.cache_bits(w, 16, 25, 17)
        marked = self.chip == "90a" and field(w, 13, 1)  # an ordinary load whose results go to LDS
        result, cache = (0, [*cache, "lds"]) if marked else (result, cache)
        mods = {"segment": segment, "offset": offset, "saddr": saddr, "cache": cache, "lds": "lds" in row.name or marked}
        stored = [Operand(kind, field(x, 8, 8), data)] if data else []
        dst = [Operand(kind, field(x, 24, 8), result)] if result and (not atomic or returns) else []
        return Instruction(at, words[:2], "FLAT", f"{segment}_{row.name}", row, dst, [vaddr, *stored], mods)

    def mubuf(self, words: tuple[int, ...], at: int) -> Instruction:
        w, x = words[0], words[1]
        row = self.row("MUBUF", field(w, 18, 7))
        offen, idxen, kind = field(w, 12, 1), field(w, 13, 1), "a" if field(x, 23, 1) else "v"
        mods: dict[str, Any] = {"cache": self.cache_bits(w, 14, 15, 17), "offset": field(w, 0, 12), "offen": offen,
                                "idxen": idxen, "lds": field(w, 16, 1)}
        if not row.types:
            return Instruction(at, words[:2], "MUBUF", row.name, row, [], [], mods, " ".join([row.name, *mods["cache"]]))
        data, result = int(row.types[0]), int(row.types[1])
        atomic = "atomic" in row.name
        mods |= {"returns": atomic and field(w, 14, 1), "soffset": self.scalar(field(x, 24, 8), "u32"),
                 "rsrc": Operand("s", field(x, 16, 5) * 4, 4)}
        vaddr = Operand("v", field(x, 0, 8), 1 + (offen and idxen)) if offen or idxen else Operand("off", text="off")
        vdata = Operand(kind, field(x, 8, 8), data or result)
        dst = [vdata] if result and (not atomic or mods["returns"]) and not mods["lds"] else []
        if atomic and dst:
            dst = [dataclasses.replace(vdata, count=result)]
        return Instruction(at, words[:2], "MUBUF", row.name, row, dst, [vaddr, *([vdata] if data else [])], mods)


CARRY = ("_co_u32", "div_scale_f32", "div_scale_f64", "mad_u64_u32", "mad_i64_i32")
FORMATS = (("fp8", 8), ("bf8", 8), ("fp6", 6), ("bf6", 6), ("fp4", 4))  # of f8f6f4, by number, with bits
SIGNED = ("v_cndmask_b32", "v_dot2c_f32_f16", "v_dot2c_f32_bf16")  # take signs of sources though those are words
HWREG = {1: "HW_REG_MODE", 2: "HW_REG_STATUS", 3: "HW_REG_TRAPSTS", 4: "HW_REG_HW_ID", 5: "HW_REG_GPR_ALLOC",
         6: "HW_REG_LDS_ALLOC", 7: "HW_REG_IB_STS", 15: "HW_REG_SH_MEM_BASES", 20: "HW_REG_XCC_ID"}
SELECTS = ("BYTE_0", "BYTE_1", "BYTE_2", "BYTE_3", "WORD_0", "WORD_1", "DWORD")


def simm_text(value: int) -> str:
    return str(value - (value >> 15 << 16)) if -16 <= value - (value >> 15 << 16) <= 64 else f"{value:#x}"


def write(i: Instruction, form: str) -> str:
    """The instruction as LLVM's disassembler writes it."""
    if form.startswith("V"):
        return _vector_text(i)
    if form == "DS":
        return _ds_text(i)
    if form in ("FLAT", "MUBUF"):
        return _memory_text(i)
    return f"{i.name} {', '.join(map(str, [*i.dst, *i.src]))}".strip()


def _modified(i: Instruction, number: int) -> str:
    text, bit = str(i.src[number]), 1 << number
    if i.format in ("VOP3P", "MFMA"):
        return text if "_mix" not in i.name else _signs(text, i.mods["neg"] & bit, i.mods["neg_hi"] & bit)
    if i.mods.get("sext", 0) & bit:
        return f"sext({text})"
    return _signs(text, i.mods.get("neg", 0) & bit, i.mods.get("abs", 0) & bit)


def _signs(text: str, negative: int, absolute: int) -> str:
    text = f"|{text}|" if absolute else text
    return text if not negative else f"neg({text})" if text[0] in "-0123456789" else f"-{text}"


def _vector_text(i: Instruction) -> str:
    mods, bare = i.mods, i.name in NO_E32 or i.name == "v_nop" or i.name.startswith("v_bitop3")
    name = i.name
    if "dpp" in mods:
        name += "_dpp"
    elif "sdwa" in mods:
        name += "_sdwa"
    elif i.format in ("VOP1", "VOP2", "VOPC") and not bare:
        name += "_e32"
    elif i.format == "VOP3" and field(i.words[0], 16, 10) < 448 and name not in NO_E32:
        name += "_e64"
    operands = [*map(str, i.dst), *(_modified(i, n) for n in range(len(i.src)))]
    text = f"{name} {', '.join(operands)}".strip() + "".join(f" {part}" for part in _suffixes(i))
    return text


def _suffixes(i: Instruction) -> list[str]:
    mods, parts, count = i.mods, [], len(i.src)

    def bits(value: int, n: int = count) -> str:
        return "[" + ",".join(str(value >> k & 1) for k in range(n)) + "]"

    if "table" in mods and mods["table"]:
        parts.append(f"bitop3:{mods['table']:#x}")
    if i.format == "MFMA":
        names = ("cbsz", "abid", "blgp")
        signs = "f64" in i.name
        parts += [f"neg:{bits(mods[n])}" if n == "blgp" and signs else f"{n}:{mods[n]}" for n in names if mods[n]]
        for n, name in enumerate(("op_sel", "op_sel_hi")):
            chosen = [x >> n & 1 for x in mods.get("bytes", ())]
            parts += [f"{name}:[{chosen[0]},{chosen[1]},0]"] if chosen and (n or any(chosen)) else []
        return sorted(parts, key=lambda part: not part.startswith("op_sel"))
    if i.format == "VOP3P":
        mixed = "_mix" in i.name
        parts += [f"op_sel:{bits(mods['op_sel'])}"] if mods["op_sel"] else []
        full = 0 if mixed else (1 << count) - 1
        if i.name.startswith("v_accvgpr"):
            return []
        parts += [f"op_sel_hi:{bits(mods['op_sel_hi'])}"] if mods["op_sel_hi"] & ((1 << count) - 1) != full else []
        if not mixed:
            parts += [f"neg_lo:{bits(mods['neg'])}"] if mods["neg"] else []
            parts += [f"neg_hi:{bits(mods['neg_hi'])}"] if mods["neg_hi"] else []
    elif mods.get("op_sel") and "cvt_sr" not in i.name:
        value = mods["op_sel"]
        parts.append(f"op_sel:{bits(value & ((1 << count) - 1) | (value >> 3) << count, count + 1)}")
    if mods.get("clamp"):
        parts.append("clamp")
    if mods.get("omod"):
        parts.append(("", "mul:2", "mul:4", "div:2")[mods["omod"]])
    if "dpp" in mods:
        parts.append(_dpp_text(mods["dpp"]))
        parts += [f"row_mask:{mods['row_mask']:#x}", f"bank_mask:{mods['bank_mask']:#x}"]
        parts += ["bound_ctrl:1"] * mods["bound_ctrl"]
    if "sdwa" in mods:
        if "dst_sel" in mods and "p8" not in i.name and "f8" not in i.name:
            parts.append(f"dst_sel:{SELECTS[mods['dst_sel']]}")
            parts.append("dst_unused:" + ("UNUSED_PAD", "UNUSED_SEXT", "UNUSED_PRESERVE")[mods["dst_unused"]])
        shown = sum(1 for t in i.meaning.types[1:] if t not in ("m", "-"))
        parts += [f"src{n}_sel:{SELECTS[mods['sdwa'][n]]}" for n in range(min(2, shown))]
    return parts


def _dpp_text(ctrl: int) -> str:
    if ctrl < 256:
        return "quad_perm:[" + ",".join(str(ctrl >> 2 * n & 3) for n in range(4)) + "]"
    named = {0x130: "wave_shl:1", 0x134: "wave_rol:1", 0x138: "wave_shr:1", 0x13C: "wave_ror:1", 0x140: "row_mirror",
             0x141: "row_half_mirror", 0x142: "row_bcast:15", 0x143: "row_bcast:31"}
    if ctrl in named:
        return named[ctrl]
    return f"{({0x10: 'row_shl', 0x11: 'row_shr', 0x12: 'row_ror', 0x15: 'row_newbcast'})[ctrl >> 4]}:{ctrl & 15}"


def _ds_text(i: Instruction) -> str:
    text = f"{i.name} {', '.join(map(str, [*i.dst, *i.src]))}"
    if i.mods["two"]:
        return text + "".join(f" offset{n}:{value}" for n, value in enumerate(i.mods["raw"]) if value)
    if "swizzle" in i.name:
        value = i.mods["offset"]
        if value & 0x8000:
            return text + " offset:swizzle(QUAD_PERM," + ",".join(str(value >> 2 * n & 3) for n in range(4)) + ")"
        x, o, a = value >> 10 & 31, value >> 5 & 31, value & 31
        if a == 31 and not o and x and x & (x - 1) == 0:
            return text + f" offset:swizzle(SWAP,{x})"
        if a == 31 and not o and x & (x + 1) == 0 and x:
            return text + f" offset:swizzle(REVERSE,{x + 1})"
        bits = [(a >> n & 1, o >> n & 1, x >> n & 1) for n in range(4, -1, -1)]
        marks = "".join("pi"[flip] if keep and not put else str(put ^ flip) for keep, put, flip in bits)
        return text + (f' offset:swizzle(BITMASK_PERM,"{marks}")' if value else "")
    return text + (f" offset:{i.mods['offset']}" if i.mods["offset"] else "")


def _memory_text(i: Instruction) -> str:
    mods, cache = i.mods, list(i.mods["cache"])
    data = list(map(str, i.src[1:]))
    if i.format == "MUBUF":
        parts = [*(map(str, [i.dst[0]] if i.dst else [])), ] if not data else data
        if "atomic" in i.name or data:
            parts = [str(i.src[1])]
        text = f"{i.name} " + ", ".join([*parts, str(i.src[0]), str(mods["rsrc"]), str(mods["soffset"])])
        extra = [name for name in ("idxen", "offen") if mods[name]]
        extra += [f"offset:{mods['offset']}"] if mods["offset"] else []
        return " ".join([text, *extra, *cache, *(["lds"] if mods["lds"] else [])])
    addresses = [str(i.src[0]), *data]
    parts = [*map(str, i.dst), *addresses]
    if i.mods["saddr"] is not None:
        parts.append(str(mods["saddr"]))
    offset = [f"offset:{mods['offset']}"] if mods["offset"] else []
    return " ".join([f"{i.name} " + ", ".join(parts), *offset, *cache])
