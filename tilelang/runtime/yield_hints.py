"""Rewrites the yield and operand-reuse hints of long runs of FFMA between two wgmma, in a finished sm_90a cubin.

Off by default; `TILELANG_YIELD_HINTS=1` enables it (the setting is part of cache keys).

A warp group that scales and adds an accumulator (C += P * s, one FFMA a cycle) shares its schedulers with a warp group whose
next wgmma has still to be issued.  If the first never yields, the tensor cores run dry.  The control bits of an instruction
say whether the scheduler should prefer another warp after it, and which operands stay in the reuse cache for the next
instruction (a reused operand is not read from the register file again, and is lost when another warp is issued in between).
ptxas lets no FFMA of such a run yield, or every second one, depending on where the wgmma was issued.  Here one of SPACING
yields, and the others keep an operand that the next one reads too: 4 % of the time of a float8 GEMM with block scales.

Only these hint bits change: no instruction, register, order, scoreboard or stall count.  An operand is kept only for the
very next instruction, when that one is reached from here alone and reads the same register in the same operand slot, and
when this instruction does not write it; ptxas follows the same rule.  A cubin without such runs is returned as it is.
The test of this file disassembles both cubins and compares them instruction by instruction.

Instructions of sm_70 to sm_90 have 128 bits.  Of the upper 64: 41-44 stall count, 45 "stay with this warp" (the inverse of
yield), 46-51 scoreboards set, 52-57 scoreboards waited for, 58-60 reuse of operands a, b, c.
"""

from __future__ import annotations

import struct

MIN_RUN = 32  # FFMA of a run: shorter runs end before another warp has waited long
SPACING = 8  # one FFMA of so many yields: 4 to 16 measure alike on an H200, 2 and 64 are slower
_BYTES = 16
_FFMA, _WARPGROUP = 0x223, 0x9C5  # FFMA on registers; WARPGROUP.ARRIVE and WARPGROUP.DEPBAR
_ALWAYS = 7 << 12  # predicate PT
_BRANCH, _MEET = 0x947, 0x945  # BRA; BSSY (the reconvergence point)
_JUMPS = {0x947, 0x94D, 0x94E, 0x943, 0x944, 0x949, 0x950}  # branches, exits, calls, returns
_MATRIX = {0x9F0, 0x9F1, 0x9F2, 0x9F3, 0x9F4, 0x7F0, 0x7F3, 0xDF0, 0xDF3}
_STALL, _NO_YIELD, _WAITS, _REUSE = 15 << 41, 1 << 45, 63 << 52, 7 << 58
_REUSE_B = 2 << 58


def set_yield_hints(cubin: bytes) -> bytes:
    """The cubin (ELF, sm_90a) with its hint bits rewritten; the same object where no run is long enough, or it is no ELF."""
    out: bytearray | None = None
    for start, size in _code(cubin):
        words = [struct.unpack_from("<QQ", cubin, start + n) for n in range(0, size - size % _BYTES, _BYTES)]
        entered = _targets(words)
        for run in _runs(words):
            for k, n in enumerate(run):
                low, high = words[n]
                if high & _STALL != 1 << 41 or high & _WAITS:
                    continue
                yields = k % SPACING == SPACING - 1
                new = high & ~(_NO_YIELD | _REUSE) if yields else high | _NO_YIELD
                if not yields and n + 1 < len(words) and n + 1 not in entered and _reads_same_b(words[n], words[n + 1]):
                    new |= _REUSE_B
                if new != high:
                    out = bytearray(cubin) if out is None else out
                    struct.pack_into("<Q", out, start + n * _BYTES + 8, new)
    return cubin if out is None else bytes(out)


def _code(cubin: bytes) -> list[tuple[int, int]]:
    """(offset, size) of the sections of machine code."""
    if cubin[:6] != b"\x7fELF\x02\x01":
        return []
    at, = struct.unpack_from("<Q", cubin, 0x28)
    size, count, names = struct.unpack_from("<HHH", cubin, 0x3A)
    heads = [struct.unpack_from("<IIQQQQ", cubin, at + k * size) for k in range(count)]
    text = heads[names][4]
    return [(h[4], h[5]) for h in heads if h[1] == 1 and cubin[text + h[0]:text + h[0] + 6] == b".text."]


def _runs(words: list[tuple[int, ...]]) -> list[list[int]]:
    """Indices of the accumulating FFMA of each run: after a wait for wgmma, up to the next jump or matrix instruction."""
    out: list[list[int]] = []
    run: list[int] | None = None
    for n, (low, high) in enumerate(words):
        op = low & 0xFFF
        if op == _WARPGROUP or op in _JUMPS or op in _MATRIX:
            if run is not None and len(run) >= MIN_RUN:
                out.append(run)
            run = [] if op == _WARPGROUP and high & 1 << 16 else None
        elif run is not None and _accumulates(low, high):
            run.append(n)
    return out


def _targets(words: list[tuple[int, ...]]) -> set[int]:
    """Indices of the instructions that branches lead to."""
    out = set()
    for n, (low, high) in enumerate(words):
        op = low & 0xFFF
        if op in (_BRANCH, _MEET):  # signed, in 4-byte words from the next instruction; a branch has the low 8 bits elsewhere
            steps = low >> 34 | (high & (1 << 18) - 1) << 30
            steps -= steps >> 47 << 48
            out.add(n + 1 + ((steps << 8 | low >> 16 & 255) if op == _BRANCH else steps) * 4 // _BYTES)
    return out


def _accumulates(low: int, high: int) -> bool:
    """Whether an instruction is FFMA Rd = Ra * Rb + Rd under PT; under another predicate it may not read its operands."""
    return low & 0xFFFF == _FFMA | _ALWAYS and low >> 16 & 255 == high & 255


def _reads_same_b(one: tuple[int, ...], following: tuple[int, ...]) -> bool:
    """Whether the next instruction is such an FFMA, reads the same operand b without a wait, and this one does not write b."""
    (low, _), (next_low, next_high) = one, following
    return _accumulates(*following) and low >> 32 & 255 == next_low >> 32 & 255 != low >> 16 & 255 and not next_high & _WAITS
