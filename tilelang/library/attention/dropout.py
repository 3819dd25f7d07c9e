"""Which weights of attention dropout keeps: random numbers by position, so that the backward pass draws them again.

Philox4x32 with seven rounds (Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC11: the fewest that
pass BigCrush).  The key is the seed.  The eight words of two counters decide on 32 weights of one head: a weight has one bit of
each word, and is kept where the number of these eight bits, the last word's the highest, is at least `drop`, the number of
values of 256 that are dropped.  All 32 are compared at once, by a logical operation for each word.  Query q and key k have the
counters (q // 16 * 2 + q // 4 % 2, 2 (k // 16 * 4 + k // 2 % 4) + n, head, sequence), n 0 and 1, and bit 8 (q % 4) +
4 (q // 8 % 2) + 2 (k % 2) + k // 8 % 2 of each word.

A tile of scores has a tile of such decisions (`draw`), each computed once, whatever threads hold the scores.  The 32 weights
are of 16 queries and 16 keys: a warp holds as many rows of a tile, queries or keys, so that it draws all that it reads.  A
thread has eight of the 32.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import numpy as np

import tilelang.language as T
from tilelang.errors import error

from ..arrays import filled, is_numpy, type_name
from .inputs import device_of

_REPEATS, _FACTORS, _STEPS = 7, (0xD2511F53, 0xCD9E8D57), (0x9E3779B9, 0xBB67AE85)
LEVELS = 256
_PIECE = 0x9E3779B97F4A7C15  # far from the differences between seeds of users


def words(seed: Any, counter: tuple[Any, Any, Any, Any]) -> list[Any]:
    """The four words of a counter, expressions.  seed: int64; counter: integers."""
    key = [T.cast(seed & 0xFFFFFFFF, "uint32"), T.cast((seed >> 32) & 0xFFFFFFFF, "uint32")]
    w = [T.cast(x, "uint32") for x in counter]
    for n in range(_REPEATS):
        p = [T.bind(T.cast(w[2 * i], "uint64") * T.uint64(_FACTORS[i])) for i in (0, 1)]
        k = [key[i] + T.uint32(n * _STEPS[i] % 2**32) for i in (0, 1)]
        high, low = ([T.cast(x, "uint32") for x in side] for side in ((x >> T.uint64(32) for x in p), p))
        w = [T.bind(x) for x in (high[1] ^ w[1] ^ k[0], low[1], high[0] ^ w[3] ^ k[1], low[0])]
    return w


class Dropout(NamedTuple):
    """The dropout of a head. seed: int64. drop: values of 256 that are dropped. sequence, head: numbers of the sequence and the
    query head. corner: maps what names a tile to its first query and key."""

    seed: Any
    drop: int
    sequence: Any
    head: Any
    corner: Any = None


def decisions(d: Dropout, a: Any, c: Any) -> Any:
    """The word that decides on the weights of group a of queries and group c of keys; bits that are set keep theirs."""
    planes = [x for n in (0, 1) for x in words(d.seed, (a, 2 * c + n, d.head, d.sequence))]
    found = None  # for the lower bits of a number, whether it is at least that of `drop`; None: always
    for n, plane in enumerate(planes):
        if d.drop >> n & 1:
            found = plane if found is None else plane & found
        elif found is not None:
            found = plane | found
    return found


def alloc_decisions(rows: int, keys: int, of_keys: bool = False) -> Any:
    """The tile of decisions of a tile of `rows` queries and `keys` keys, multiples of 16. of_keys: whether rows of the tile are
    keys; its rows are groups of them then."""
    groups = rows // 8, keys // 4
    return T.alloc_shared(groups[::-1] if of_keys else groups, "uint32")


@T.macro
def draw(Kept, d, row, key, of_keys=False):
    """Decide on the weights of the tile from query `row` and key `key` on, multiples of 16."""
    for n, m in T.Parallel(*Kept.shape):
        Kept[n, m] = decisions(d, row // 8 + (m if of_keys else n), key // 4 + (n if of_keys else m))


def stays(Kept: Any, i: Any, j: Any, of_keys: bool = False) -> Any:
    """Whether a weight of the tile is kept. What lies in lanes of a tile of wgmma or mma.sync is shifted first, once for a
    word."""
    query, key = (j, i) if of_keys else (i, j)
    at = query // 16 * 2 + query // 4 % 2, key // 16 * 4 + key // 2 % 4
    lanes, rest = (query // 2 % 2 * 16 + key % 2 * 2, query % 2 * 8) if of_keys else (query % 4 * 8, key % 2 * 2)
    word = Kept[at[::-1] if of_keys else at] >> T.cast(lanes, "uint32")
    return (word >> T.cast(rest + query // 8 % 2 * 4 + key // 8 % 2, "uint32")) & T.uint32(1) != T.uint32(0)


def seed_of_piece(seed: Any, number: int) -> Any:
    """The seed of a launch for some sequences of a call, whose kernel counts them from 0."""
    return seed if seed is None or number == 0 else seed + ((number * _PIECE + 2**63) % 2**64 - 2**63)


def check_dropout(dropout: Any, seed: Any, q: Any) -> tuple[int, Any]:
    """(bytes of 256 that are dropped, the seed: an int64 tensor of one element on the device of q, or None).  Raises
    attention-option."""
    if not 0.0 <= dropout < 1.0:
        raise error("attention-option", f"dropout is a fraction of the weights, found {dropout}", expected="0 <= dropout < 1",
                    hint="dropout=0.1")
    drop = min(LEVELS - 1, round(dropout * LEVELS))
    if drop == 0:
        return 0, None
    if seed is None:
        torch = sys.modules.get("torch")
        return drop, (np.random.default_rng().integers(2**62, size=1) if is_numpy(q) or torch is None
                      else torch.randint(2**62, (1,), device=q.device))
    if isinstance(seed, (int, np.integer)) and -2**63 <= seed < 2**63:
        return drop, filled(q, (1,), int(seed), "int64")  # which a CUDA graph captures, as it does no copy from the host
    if not hasattr(seed, "dtype"):
        raise error("attention-option", f"seed is {seed!r}", expected="an int of 64 bits, or an int64 tensor of shape (1,)",
                    found=repr(seed), hint="seed=1")
    if is_numpy(seed) != is_numpy(q) or type_name(seed) != "int64" or tuple(seed.shape) != (1,) or device_of(
            seed) != device_of(q):
        raise error("attention-option", f"seed is ‹{type_name(seed)} {tuple(seed.shape)}› on {device_of(seed)}",
                    expected=f"an int, or int64 (1,) on {device_of(q)}", hint="torch.randint(2**62, (1,), device=q.device)")
    return drop, seed
