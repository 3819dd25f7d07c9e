"""Long runs of sums between two products of a warp group, made to give way to the warps that multiply meanwhile.

A warp that adds up a product (C += P * s, an FFMA a cycle) shares its scheduler with a warp of another group, which has the
next instructions of its own product to issue; held up, it leaves the matrix unit without work.  Each instruction says
whether the scheduler should prefer another warp after it, and which operands the next instruction reads again (these
are not read from the registers twice, but lost when another warp comes in between).  ptxas writes that no sum gives way, or
every second one, by where a product was started; one of SPACING is enough, and the others may keep their operands:
1 to 2 % of the time of a float8 product with scales.

Two kinds of bits of finished machine code are changed, hints both: no instruction, register, order, wait or stall is.  An
operand is kept only for the very next instruction, which is reached from here alone and reads the same register in the same
place, when this one does not write it: what ptxas does itself.  Everything else of the file stays, and files without such
runs stay whole.
Instructions of sm_70 to sm_90 have 128 bits; of their upper 64: 41-44 stall, 45 stay with this warp, 46-51 barriers set, 52-57
barriers waited for, 58-60 operands kept (first, second, third).
"""

from __future__ import annotations

import struct

LEAST = 32  # sums of a run: shorter ones end before another warp has waited long
SPACING = 8  # one of so many sums gives way: 4 to 16 are alike on an H200, 2 and 64 slower
_BYTES = 16
_FFMA, _WARPGROUP = 0x223, 0x9C5  # C = A * B + C of registers; arrive and wait of a warp group
_ALWAYS = 7 << 12  # the predicate that is true
_BRANCH, _MEET = 0x947, 0x945  # to a place; the place where parted lanes meet again
_LEAVES = {0x947, 0x94D, 0x94E, 0x943, 0x944, 0x949, 0x950}  # branches, exits, calls, returns
_PRODUCTS = {0x9F0, 0x9F1, 0x9F2, 0x9F3, 0x9F4, 0x7F0, 0x7F3, 0xDF0, 0xDF3}
_STALL, _STAY, _WAITS, _KEEP = 15 << 41, 1 << 45, 63 << 52, 7 << 58
_KEEP_B = 2 << 58


def give_way(cubin: bytes) -> bytes:
    """The cubin (ELF, sm_90a) with these bits set; itself where no run is long enough, or it is no such file."""
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
                new = high & ~(_STAY | _KEEP) if yields else high | _STAY
                if not yields and n + 1 < len(words) and n + 1 not in entered and _same_factor(words[n], words[n + 1]):
                    new |= _KEEP_B
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
    """Where the sums stand that follow a wait for a product, up to what follows them."""
    out: list[list[int]] = []
    run: list[int] | None = None
    for n, (low, high) in enumerate(words):
        op = low & 0xFFF
        if op == _WARPGROUP or op in _LEAVES or op in _PRODUCTS:
            if run is not None and len(run) >= LEAST:
                out.append(run)
            run = [] if op == _WARPGROUP and high & 1 << 16 else None
        elif run is not None and _is_sum(low, high):
            run.append(n)
    return out


def _targets(words: list[tuple[int, ...]]) -> set[int]:
    """Where branches lead."""
    out = set()
    for n, (low, high) in enumerate(words):
        op = low & 0xFFF
        if op in (_BRANCH, _MEET):  # words of 4 bytes from the next instruction, with a sign; of branches the low 8 bits apart
            steps = low >> 34 | (high & (1 << 18) - 1) << 30
            steps -= steps >> 47 << 48
            out.add(n + 1 + ((steps << 8 | low >> 16 & 255) if op == _BRANCH else steps) * 4 // _BYTES)
    return out


def _is_sum(low: int, high: int) -> bool:
    """Rd = Ra * Rb + Rd in every lane: one that a predicate may leave out need not have read its operands."""
    return low & 0xFFFF == _FFMA | _ALWAYS and low >> 16 & 255 == high & 255


def _same_factor(one: tuple[int, ...], following: tuple[int, ...]) -> bool:
    """Whether the next instruction is a sum that reads the same second operand, at once, and this one leaves it alone."""
    (low, _), (next_low, next_high) = one, following
    return _is_sum(*following) and low >> 32 & 255 == next_low >> 32 & 255 != low >> 16 & 255 and not next_high & _WAITS


__all__ = ["LEAST", "SPACING", "give_way"]
