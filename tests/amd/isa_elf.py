"""Reader of AMD code objects (.hsaco): the kernels of an ELF file with their code, resources, and argument layout.

Sources: LLVM's "User Guide for AMDGPU Backend", sections "Code Object" (ELF header, note records, metadata maps of version 3
to 6) and "Kernel Descriptor" (the 64 bytes of symbol NAME.kd, fields of compute_pgm_rsrc1 to 3 and kernel_code_properties).
"""

from __future__ import annotations

import dataclasses
import struct
from typing import Any

MACHINES = {0x3F: "90a", 0x4C: "942", 0x4F: "950"}  # e_flags, low byte
NOTE_METADATA = 32


class Malformed(ValueError):
    """The file is no code object of a chip that is known."""


@dataclasses.dataclass
class Kernel:
    """One kernel of a code object."""

    name: str
    chip: str
    code: bytes
    address: int  # of the first instruction, in the file's image
    metadata: dict[str, Any]
    descriptor: bytes
    image: bytes  # all that is loaded, at its addresses

    lds = property(lambda self: int.from_bytes(self.descriptor[0:4], "little"))  # bytes of a workgroup
    scratch = property(lambda self: int.from_bytes(self.descriptor[4:8], "little"))  # bytes of a lane

    def rsrc(self, number: int) -> int:
        """compute_pgm_rsrc1, 2 or 3."""
        at = {1: 48, 2: 52, 3: 44}[number]
        return int.from_bytes(self.descriptor[at:at + 4], "little")

    @property
    def properties(self) -> int:
        """Bits 0 to 6: which scalar registers are set at the start; 16 to 22: how many argument words are put there."""
        return int.from_bytes(self.descriptor[56:60], "little")

    @property
    def accum_offset(self) -> int:
        """The first accumulation register within the unified file."""
        return 4 * ((self.rsrc(3) & 63) + 1)

    @property
    def counts(self) -> dict[str, int]:
        """Registers and bytes that the metadata gives."""
        names = ("vgpr_count", "agpr_count", "sgpr_count", "vgpr_spill_count", "sgpr_spill_count", "group_segment_fixed_size",
                 "private_segment_fixed_size", "kernarg_segment_size", "max_flat_workgroup_size", "wavefront_size")
        return {name: self.metadata[f".{name}"] for name in names}

    @property
    def args(self) -> list[dict[str, Any]]:
        """The arguments: .offset, .size, .value_kind, and where given .name."""
        return list(self.metadata.get(".args", []))


def unpack(data: bytes, at: int = 0) -> tuple[Any, int]:
    """One MessagePack value and where it ends (the types that code objects use)."""
    tag = data[at]
    if tag < 0x80 or tag >= 0xE0:
        return (tag if tag < 0x80 else tag - 256), at + 1
    if tag in (0xC0, 0xC2, 0xC3):
        return {0xC0: None, 0xC2: False, 0xC3: True}[tag], at + 1
    if tag in (0xCC, 0xCD, 0xCE, 0xCF, 0xD0, 0xD1, 0xD2, 0xD3):
        size = 1 << (tag & 3)
        return int.from_bytes(data[at + 1:at + 1 + size], "big", signed=tag >= 0xD0), at + 1 + size
    if 0xA0 <= tag < 0xC0 or tag in (0xD9, 0xDA, 0xDB, 0xC4, 0xC5, 0xC6):
        head = 0 if tag < 0xC0 else 1 << ((tag - 0xD9) if tag >= 0xD9 else (tag - 0xC4))
        length = tag & 31 if not head else int.from_bytes(data[at + 1:at + 1 + head], "big")
        start = at + 1 + head
        raw = data[start:start + length]
        return raw if 0xC4 <= tag <= 0xC6 else raw.decode(), start + length
    if 0x80 <= tag < 0xA0 or tag in (0xDC, 0xDD, 0xDE, 0xDF):
        head = 0 if tag < 0xC0 else 2 << (tag & 1)
        length = tag & 15 if not head else int.from_bytes(data[at + 1:at + 1 + head], "big")
        is_map = tag < 0x90 or tag in (0xDE, 0xDF)
        at, items = at + 1 + head, []
        for _ in range(length * (2 if is_map else 1)):
            item, at = unpack(data, at)
            items.append(item)
        return (dict(zip(items[::2], items[1::2], strict=True)) if is_map else items), at
    raise Malformed(f"MessagePack tag {tag:#x}")


def read(data: bytes) -> dict[str, Kernel]:
    """Name -> kernel of a linked code object."""
    if data[:4] != b"\x7fELF" or data[4:6] != b"\x02\x01" or struct.unpack_from("<H", data, 18)[0] != 224:
        raise Malformed("no little-endian 64-bit ELF file of machine EM_AMDGPU")
    chip = MACHINES.get(struct.unpack_from("<I", data, 48)[0] & 0xFF)
    if chip is None:
        raise Malformed(f"flags {struct.unpack_from('<I', data, 48)[0]:#x} name no chip of {sorted(MACHINES.values())}")
    start, entry, count = struct.unpack_from("<Q", data, 40)[0], *struct.unpack_from("<HH", data, 58)
    sections = [struct.unpack_from("<IIQQQQIIQQ", data, start + entry * n) for n in range(count)]
    metadata: dict[str, dict[str, Any]] = {}
    symbols: dict[str, tuple[int, int]] = {}
    for kind, offset, size, link in ((s[1], s[4], s[5], s[6]) for s in sections):
        if kind == 7:
            metadata |= {item[".name"]: item for item in _notes(data[offset:offset + size])}
        if kind in (2, 11):
            names = sections[link][4]
            for at in range(offset, offset + size, 24):
                name, _, _, _, value, length = struct.unpack_from("<IBBHQQ", data, at)
                symbols[data[names + name:data.index(b"\0", names + name)].decode()] = (value, length)

    def image(address: int, length: int) -> bytes:
        for _, kind, _, base, offset, size, *_ in sections:
            if kind == 1 and base <= address < base + size:
                return data[offset + address - base:offset + address - base + length]
        raise Malformed(f"no section holds address {address:#x}")

    kernels, whole = {}, bytearray(max(s[3] + s[5] for s in sections if s[2] & 2))
    for _, kind, flags, base, offset, size, *_ in sections:
        if flags & 2 and kind != 8:
            whole[base:base + size] = data[offset:offset + size]
    for name, item in metadata.items():
        value, length = symbols[name]
        descriptor = image(symbols[item[".symbol"]][0], 64)
        kernels[name] = Kernel(name, chip, image(value, length), value, item, descriptor, bytes(whole))
    return kernels


def _notes(data: bytes) -> list[dict[str, Any]]:
    at, found = 0, []
    while at + 12 <= len(data):
        names, size, kind = struct.unpack_from("<III", data, at)
        start = at + 12 + (names + 3) // 4 * 4
        if kind == NOTE_METADATA:
            found += unpack(data[start:start + size])[0]["amdhsa.kernels"]
        at = start + (size + 3) // 4 * 4
    return found
