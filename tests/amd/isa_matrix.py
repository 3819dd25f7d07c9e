"""MFMA: where the elements of the operands lie in registers, how each chip adds, and the cycles that must pass after one.

Layouts: AMD matrix instruction calculator (repository ROCm/amd_matrix_instruction_calculator), and chapter "Matrix Arithmetic
Instructions" of the CDNA3 guide.  Sums: MMA-Sim (arXiv 2511.10909), a model measured on CDNA2 and CDNA3; nothing is
published for CDNA4, which is taken to add as CDNA3 does.  Subnormals of gfx90a: ROCm documentation of MIOpen, "MI200 MFMA
behavior specifics".  Required cycles: section "Dependency Resolution: Required Independent Instructions" of the CDNA3
guide, as ROCm's rocRoller repeats it by instruction pair; gfx950 needs one more after 4 and more passes (the waits of its
compiler).
"""

from __future__ import annotations

import functools
from typing import Any

import isa_arithmetic as ar
import numpy as np

Array = Any
# chip -> type of A and B -> (how it adds, elements of k in a group, whether subnormals are flushed).
SUMS: dict[str, dict[str, tuple[str, int, bool]]] = {
    "90a": {"f64": ("chain", 1, False), "f32": ("chain", 1, False), "f16": ("pairs", 4, True), "bf16_1k": ("pairs", 4, True),
            "bf16": ("pairs", 2, True)},
    "942": {"f64": ("chain", 1, False), "f32": ("chain", 1, False), "f16": ("aligned", 8, False), "bf16": ("aligned", 8, False),
            "xf32": ("aligned", 4, False), "fp8": ("halves", 16, False), "bf8": ("halves", 16, False)},
}
SUMS["950"] = {of: how for of, how in SUMS["942"].items() if of != "xf32"} | {"f8f6f4": ("halves", 16, False)}
LEAST = {"f16": -14, "bf16": -126, "f32": -126, "xf32": -126}  # exponents of the least normal numbers
LEAST8 = {"942": {"fp8": -7, "bf8": -15}, "950": {"fp8": -6, "bf8": -14, "fp4": 0}}


def elements(registers: Array, of: str, chip: str) -> Array:
    """The elements of a lane in order, as the widest type needed: registers (n, 64) -> (64, elements)."""
    words = np.ascontiguousarray(registers.T)
    match of:
        case "f64":
            return words.view(np.float64)
        case "f32":
            return words.view(np.float32)
        case "xf32":
            return (words & np.uint32(0xFFFFE000)).view(np.float32)
        case "f16":
            return words.view(np.float16).astype(np.float32)
        case "bf16":
            return ar.from_bf16(words.view(np.uint16))
        case "i8":
            return words.view(np.int8).astype(np.int64)
    if of == "fp4":
        pairs = words.view(np.uint8)
        values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
        return np.concatenate([values, -values])[np.stack([pairs & 15, pairs >> 4], axis=-1).reshape(64, -1)]
    return ar.fp8_values(chip, of)[words.view(np.uint8)]


def operand(found: Array, size: int, blocks: int, depth: int) -> Array:
    """A as (block, row, k), or B as (block, column, k), of elements (64, p)."""
    if blocks == 4 and found.shape[1] == 1 and depth == 4:  # f64 4x4x4: lane = row + 4 * block + 16 * k
        return found.reshape(4, 4, 4).transpose(1, 2, 0)
    if blocks == 1:
        return found.reshape(64 // size, size, -1).transpose(1, 0, 2).reshape(1, size, depth)
    return found.reshape(blocks, size, depth)


@functools.cache
def places(size: int, blocks: int, double: bool) -> tuple[Array, Array, Array]:
    """(block, row, column) of element r of lane l of C and D, each of shape (elements, 64)."""
    r, lane = np.meshgrid(np.arange(size * size * blocks // 64), np.arange(64), indexing="ij")
    if double:
        return (lane // 4 % 4, lane // 16, lane % 4) if size == 4 else (lane * 0, 4 * r + lane // 16, lane % 16)
    if size == 4:
        return lane // 4, r, lane % 4
    if size == 16:
        return r // 4, 4 * (lane // 16) + r % 4, lane % 16
    return r // 16, 8 * (r % 16 // 4) + 4 * (lane // 32) + r % 4, lane % 32


def multiply(row: Any, chip: str, a: Array, b: Array, c: Array, formats: tuple[str, str] | None = None,
             scales: list[Array] | None = None) -> Array:
    """Registers of D = A * B + C, from registers (n, 64) of words.

    formats: of A and B of f8f6f4.  scales: a factor a lane, for the elements that it holds of A and of B.
    """
    shape, many, of_a, of_b, of_c, _, kind = row.types
    of_a, of_b = formats or (of_a, of_b)
    size, _, depth = (int(part) for part in shape.split("x"))
    blocks, double = int(many), of_c == "f64"
    found = [elements(v, of, chip) for v, of in ((a, of_a), (b, of_b))]
    if scales:
        found = [v * factor[:, None] for v, factor in zip(found, scales, strict=True)]
    x, y = (operand(v, size, blocks, depth) for v in found)
    at = places(size, blocks, double)
    view = {"f64": np.float64, "f32": np.float32, "i32": np.int32}[of_c]
    z = np.empty((blocks, size, size), view)
    z[at] = np.ascontiguousarray(c.T).view(view).T
    if of_c == "i32":
        z = (np.einsum("bik,bjk->bij", x, y) + z).astype(np.int32)
    else:
        how, group, flushed = SUMS[chip][kind if kind in SUMS[chip] else of_a]
        least = tuple(LEAST[of] if of in LEAST else LEAST8.get(chip, {}).get(of, 0) for of in (of_a, of_b))
        z = _sums(how, min(group, depth), flushed, least, x, y, z)
    return np.ascontiguousarray(np.ascontiguousarray(z[at].T).view(np.uint32).T)


def _sums(how: str, group: int, flushed: bool, least: tuple[int, int], x: Array, y: Array, z: Array) -> Array:
    if flushed:
        x, y = (np.where(np.abs(v) < 2.0**e, np.float32(0), v) for v, e in zip((x, y), least, strict=True))
        z = np.where(np.abs(z) < 2.0**-126, np.float32(0), z)
    for k in range(0, x.shape[2], group):
        p, q = x[:, :, None, k:k + group], y[:, None, :, k:k + group]
        if how == "chain":
            z = ar.fma(p[..., 0], q[..., 0], z)
        elif how == "pairs":
            z = ar.flush(z + _tree(ar.flush(p * q)))
        else:
            z = _aligned(p, q, z, least, how == "halves")
    return z


def _tree(products: Array) -> Array:
    """Sums of pairs, then of pairs of sums, in float32; subnormals are flushed at each step."""
    while products.shape[-1] > 1:
        products = ar.flush(products[..., 0::2] + products[..., 1::2])
    return products[..., 0]


def _split(value: Array, least: int) -> tuple[Array, Array]:
    """Significand (1 <= |s| < 2, less for subnormals) and exponent; that of zero is -126."""
    s, e = np.frexp(value.astype(np.float64))
    s, e = s * 2, e - 1
    low = e < least
    s = np.where(low, np.ldexp(s, e - least), s)
    return s, np.where(s == 0, -126, np.where(low, least, e))


def _cut(s: Array, e: Array) -> tuple[Array, Array]:
    """Sum over the last axis of terms cut toward zero at 24 bits below the largest exponent."""
    most = e.max(axis=-1)
    return np.trunc(np.ldexp(s, e - most[..., None] + 24)).sum(axis=-1) * 2.0**-24, most


def _down(s: Array, e: Array, most: Array, bits: int) -> Array:
    return np.floor(np.ldexp(s, e - most + bits)) * 2.0**-bits


def _aligned(p: Array, q: Array, z: Array, least: tuple[int, int], halves: bool) -> Array:
    (sp, ep), (sq, eq), (sz, ez) = _split(p, least[0]), _split(q, least[1]), _split(z, -126)
    s, e = sp * sq, ep + eq
    if halves:
        (s0, e0), (s1, e1) = (_cut(s[..., n::2], e[..., n::2]) for n in (0, 1))
        e = np.maximum(e0, e1)
        s = _down(s0, e0, e, 24) + _down(s1, e1, e, 24)
    else:
        s, e = _cut(s, e)
    most = np.maximum(e, ez)
    carried = _down(sz, ez, most, 24)
    if halves:
        carried = np.where(ez >= most - 25, carried, 0.0)
    total = np.ldexp(_down(s, e, most, 31) + carried, most).astype(np.float32)
    products = p.astype(np.float64) * q
    plain = products.sum(axis=-1) + z
    large = [(products >= 2.0**128).any(axis=-1), (products <= -(2.0**128)).any(axis=-1)]
    total = np.where(large[0] | large[1], np.where(large[0] & large[1], np.nan, np.where(large[0], np.inf, -np.inf)), total)
    return np.where(np.isfinite(plain), total, plain).astype(np.float32)


# ---- required cycles between an MFMA and what uses its result -------------------------------------------------------------


def required(chip: str, name: str, passes: int, use: str) -> int:
    """Independent instructions (or s_nop cycles) needed before a use of the result of an MFMA.

    `use`: "same C" (the same registers as C of an MFMA of the same kind), "overlapping C", "A or B" (of an MFMA), "vector"
    (read or written by the vector ALU), "memory".
    """
    if "f64" in name:
        large = "16x16" in name
        table = {"same C": 0 if large else 4, "overlapping C": 9 if large else 4, "A or B": 11 if large else 6,
                 "vector": 11 if large else 6, "memory": 18 if large else 9}
        return table[use] if chip == "90a" else min(table[use], 4 if use == "same C" else 99)
    single = name.startswith("v_mfma_f32") and name.endswith("f32") and "xf32" not in name
    later = int(chip == "950" and passes >= 4)
    if use == "same C":
        return 2 if passes == 2 and chip != "90a" else 0
    if use == "overlapping C":
        return passes + (0 if chip == "90a" or single else 1 + later)
    return passes + 2 if single and chip != "90a" else passes + 3 + later
