"""Writes encodings_gfx*.txt: words, and the text that LLVM's disassembler gives them, for every row of the tables.

    LLVM_MC=path/to/llvm-mc python tests/amd/isa_record_encodings.py

needs llvm-mc 22 or later with amdgcn (Debian: packages llvm-22 and libllvm22).  The words of a row vary in registers, modifiers
and constants; words that LLVM refuses (an odd first register of a pair, a modifier the instruction lacks) are tried again.
"""

from __future__ import annotations

import os
import pathlib
import random
import re
import subprocess
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent))

import isa_decode as decode

FOLDER = pathlib.Path(__file__).parent
TRIES, KEPT = 24, 1


def texts(words: list[tuple[int, ...]], chip: str, tool: str) -> dict[tuple[int, ...], str]:
    """What llvm-mc writes for each of the words that it accepts."""
    lines = "\n".join(",".join(f"{byte:#04x}" for w in word for byte in w.to_bytes(4, "little")) for word in words)
    command = [tool, "--disassemble", "-triple=amdgcn-amd-amdhsa", f"-mcpu=gfx{chip}", "-show-encoding"]
    out = subprocess.run(command, input=lines, capture_output=True, text=True, check=False).stdout
    found = {}
    for line in out.splitlines():
        match = re.match(r"\s*(\S.*?)\s*(?:;|//) encoding: \[(.*)\]", line)
        if match and "/*" not in match[1]:
            code = [int(x, 16) for x in match[2].split(",")]
            key = tuple(int.from_bytes(bytes(code[n:n + 4]), "little") for n in range(0, len(code), 4))
            found[key] = re.sub(r"\s+", " ", match[1])
    return found


def source(r: random.Random, scalar: bool = False) -> int:
    codes = [r.randrange(0, 50) * 2, r.randrange(128, 209), r.randrange(240, 249), 106]
    return r.choice(codes) if scalar or r.random() < 0.25 else 256 + 2 * r.randrange(100)


def sample(form: str, opcode: int, row: decode.Row, chip: str, r: random.Random) -> tuple[int, ...]:
    """Words of an instruction with varied fields."""
    plain = r.random() < 0.5
    s, even = (lambda: source(r, True)), (lambda: 2 * r.randrange(40))

    def few(bits: int) -> int:
        return 0 if plain or r.random() < 0.6 else r.getrandbits(bits)

    match form:
        case "SOP1" if "-" in row.types:
            return (0xBE800000 | opcode << 8 | (even() << 16 if row.types[0] != "-" else even()),)
        case "SOP1":
            return (0xBE800000 | opcode << 8 | even() << 16 | s(),)
        case "SOP2":
            return (0x80000000 | opcode << 23 | even() << 16 | s() << 8 | s(),)
        case "SOPC" if "k" in row.types:
            return (0xBF000000 | opcode << 16 | r.randrange(1, 16) << 8 | even(),)
        case "SOPC":
            return (0xBF000000 | opcode << 16 | s() << 8 | s(),)
        case "SOPK":
            value = r.choice((1, 2 | 4 << 6 | 3 << 11)) if "reg_" in row.name else r.getrandbits(16)
            return (0xB0000000 | opcode << 23 | even() << 16 | value, *((r.getrandbits(32),) if "imm32" in row.name else ()))
        case "SOPP":
            bare = row.name in ("s_barrier", "s_endpgm", "s_icache_inv", "s_set_gpr_idx_off")
            return (0xBF800000 | opcode << 16 | (0 if bare else r.getrandbits(16)),)
        case "SMEM" if row.types[0] == "0":
            return 0xC0000000 | opcode << 18, 0
        case "SMEM" if "mem" in row.name:
            return 0xC0000000 | opcode << 18 | even() << 6, 0
        case "SMEM":
            return 0xC0000000 | opcode << 18 | 1 << 17 | r.randrange(8) << 8 | r.randrange(16) << 1, r.getrandbits(12)
        case "VOP1" | "VOP2" | "VOPC":
            top = {"VOP1": 0x7E000000 | opcode << 9 | even() << 17, "VOP2": opcode << 25 | even() << 17 | even() << 9,
                   "VOPC": 0x7C000000 | opcode << 17 | even() << 9}[form]
            if "k" in row.types or r.random() < 0.1:
                return top | (255 if "k" not in row.types else source(r)), r.getrandbits(32)
            if r.random() < 0.2:
                control = r.choice((0xB1, 0x4E, 0x111, 0x128, 0x140, 0x142, 0x143, 0x105)) << 8
                return top | 250, even() | control | r.getrandbits(1) << 19 | 0xFF << 24
            if r.random() < 0.2:
                select = r.randrange(7) << 8 | r.randrange(3) << 11 if form != "VOPC" else 0
                return top | 249, even() | select | r.randrange(7) << 16 | r.randrange(7) << 24
            return (top | source(r),)
        case "VOP3":
            w = 0xD0000000 | opcode << 16 | even() | few(1) << 15
            w |= even() << 8 if row.types[1:2] == ("m",) else few(3) << 8 | (few(4) << 11 if "16" in row.name else 0)
            sources = [source(r) if n < len(row.types) - 1 else 0 for n in range(3)]
            if "m" in row.types[2:]:
                sources[2 if "m" != row.types[0] else 2] = even()
            if opcode < 256 or row.types[0] == "m":
                w &= ~0x7800
            last = row.types[1:] if row.types[1:2] != ("m",) else row.types[2:]
            sources = [c if n < len(last) else 0 for n, c in enumerate(sources)]
            return w, sources[0] | sources[1] << 9 | sources[2] << 18 | few(2) << 27 | few(3) << 29
        case "VOP3P":
            count = len(row.types) - 1
            sources = [256 + even() if n < count else 0 for n in range(3)]
            high = 3 | (1 << 2 if count == 3 else 0)
            high = high if plain else r.getrandbits(count)
            w = 0xD3800000 | opcode << 16 | even() | (high >> 2 & 1) << 14 | (few(count) << 11) | few(count) << 8
            w = w | (1 << 14 if count < 3 else 0)
            return w, sources[0] | sources[1] << 9 | sources[2] << 18 | (high & 3) << 27 | few(count) << 29
        case "MFMA" if "f8f6f4" in row.name:
            scales = (0xD3AC0000 | r.getrandbits(2) << 11, 256 + even() | 256 + even() << 9 | r.getrandbits(2) << 27)
            w = 0xD3800000 | opcode << 16 | even() | r.choice((0, 1, 4)) << 8
            x = 256 + even() | (256 + even()) << 9 | (256 + even()) << 18 | r.choice((0, 1, 4)) << 29
            return (*scales, w | 1 << 11, x) if r.random() < 0.7 else (w, x)
        case "MFMA":
            sides, w = r.getrandbits(3), 0xD3800000 | opcode << 16 | even() | r.getrandbits(1) << 15
            c = 256 + even() if r.random() < 0.7 else 128
            return w, 256 + even() | (256 + even()) << 9 | c << 18 | (sides & 3) << 27
        case "DS":
            two, tr = "2_b" in row.name or "2st64" in row.name, "_tr_" in row.name
            offset = r.getrandbits(16) if two else 16 * r.getrandbits(8)
            offset = r.choice((0, 4, 1024, 0x401F)) if "swizzle" in row.name else offset
            stores, pair = row.types[0] != "0", two or "cmpst" in row.name
            x = even() | (even() << 8 if stores else 0) | (even() << 16 if pair and stores else 0)
            w = 0xD8000000 | opcode << 17 | offset | few(0 if tr else 1) << 25
            return w, x | (even() << 24 if row.types[1] != "0" else 0)
        case "FLAT":
            segment = r.choice((2, 2, 1, 0)) if "atomic" not in row.name and "lds" not in row.name else 2
            back = few(1) if "atomic" in row.name else 0
            result = row.types[1] != "0" and ("atomic" not in row.name or back)
            w = 0xDC000000 | opcode << 18 | segment << 14 | back << 16 | few(1) << 17 | r.getrandbits(11)
            base = 0x7F if r.random() < 0.5 else even()
            if segment == 1 and chip != "90a":
                w |= 1 << 13 if base == 0x7F or r.random() < 0.3 else 0
            address = 0 if segment == 1 and (base != 0x7F if chip == "90a" else not w >> 13 & 1) else even()
            x = address | (even() << 8 if row.types[0] != "0" else 0) | (base if segment else 0) << 16
            return w, x | (even() << 24 if result else 0)
        case "MUBUF":
            if not row.types:
                return 0xE0000000 | opcode << 18, 0
            w = 0xE0000000 | opcode << 18 | r.getrandbits(12) | r.getrandbits(1) << 12 | (few(1) << 14)
            address = even() if w >> 12 & 1 else 0
            return w, address | even() << 8 | r.randrange(10) << 16 | r.choice((128, 4, 9)) << 24
    raise AssertionError(form)


def record(chip: str, tool: str) -> list[str]:
    r, decoder, lines = random.Random(int(chip, 16)), decode.Decoder(chip), []
    for form, table in decoder.table.items():
        wanted = {opcode: [sample(form, opcode, row, chip, r) for _ in range(TRIES)] for opcode, row in table.items()}
        for opcode, many in wanted.items():
            found = texts(many, chip, tool)
            accepted = list(dict.fromkeys(words for words in many if words in found))[:KEPT]
            if not accepted:
                print(f"gfx{chip}: LLVM accepts no {form} {opcode} {table[opcode].name}", file=sys.stderr)
            lines += [" ".join(f"{w:08x}" for w in words) + " | " + found[words] for words in accepted]
    return lines


if __name__ == "__main__":
    for name in decode.CHIPS:
        path = FOLDER / f"encodings_gfx{name}.txt"
        path.write_text("\n".join(record(name, os.environ.get("LLVM_MC", "llvm-mc"))) + "\n")
        print(path.name, len(path.read_text().splitlines()))
