"""Which weights of attention dropout keeps: random numbers by position, so that the backward pass draws them again.

Philox4x32 with seven rounds (Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC11: the fewest that
pass BigCrush).  The key is the seed.  A counter stands for 16 weights of one head: query q and key k have the counter
(q // 32 * 8 + q % 8, k // 32 * 8 + k % 8, head, sequence), the word 2 (q // 8 % 2) + k // 8 % 2 of its four, and the byte
2 (q // 16 % 2) + k // 16 % 2 of that word.  A thread that holds 64 x N scores of a GEMM, queries or keys as rows, has eight of
the 16, two in each word, so that it computes a counter once for eight, and which word it needs is known when it is compiled.
A weight is kept where its byte is at least `drop`, the number of bytes of 256 that are dropped.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

import tilelang.language as T
from tilelang.errors import error

from ..arrays import copied_to, is_numpy, type_name
from .inputs import device_of

_REPEATS, _FACTORS, _STEPS = 7, (0xD2511F53, 0xCD9E8D57), (0x9E3779B9, 0xBB67AE85)
LEVELS = 256


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


def kept(seed: Any, drop: int, b: Any, h: Any, query: Any, key: Any) -> Any:
    """Whether the weight of a query for a key is kept.  seed: int64.  b, h: numbers of sequence and query head."""
    w = words(seed, (query // 32 * 8 + query % 8, key // 32 * 8 + key % 8, h, b))
    second, byte = key // 8 % 2 == 1, query // 16 % 2 * 2 + key // 16 % 2
    word = T.if_then_else(query // 8 % 2 == 0, T.if_then_else(second, w[1], w[0]), T.if_then_else(second, w[3], w[2]))
    # The byte is moved to the top: what lies below it does not change the comparison.
    return (word << T.cast(24 - 8 * byte, "uint32")) >= T.uint32(drop << 24)


def check_dropout(dropout: Any, seed: Any, q: Any) -> tuple[int, Any]:
    """(bytes of 256 that are dropped, the seed: an int64 tensor of one element on the device of q, or None).  Raises
    attention-option."""
    if not 0.0 <= dropout < 1.0:
        raise error("attention-option", f"dropout is a fraction of the weights, found {dropout}", expected="0 <= dropout < 1",
                    found=str(dropout), hint="dropout=0.1")
    drop = min(LEVELS - 1, round(dropout * LEVELS))
    if drop == 0:
        return 0, None
    if seed is None:
        torch = sys.modules.get("torch")
        return drop, (np.random.default_rng().integers(2**62, size=1) if is_numpy(q) or torch is None
                      else torch.randint(2**62, (1,), device=q.device))
    if isinstance(seed, (int, np.integer)):
        number = np.array([seed], np.int64)
        return drop, number if is_numpy(q) else copied_to(q, number)
    if is_numpy(seed) != is_numpy(q) or type_name(seed) != "int64" or tuple(seed.shape) != (1,) or device_of(
            seed) != device_of(q):
        raise error("attention-option", f"seed is {type_name(seed)} {tuple(seed.shape)} on {device_of(seed)}",
                    expected=f"an int, or int64 (1,) on {device_of(q)}", found=f"{type_name(seed)} {tuple(seed.shape)}",
                    hint="torch.randint(2**62, (1,), device=q.device)")
    return drop, seed
