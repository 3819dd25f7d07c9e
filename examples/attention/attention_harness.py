"""What every example of this folder shares beside ../harness.py: the float64 reference of attention, and its bound."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from harness import EPS, HERE, NUMPY, Comparison, Place, compare, main, wide  # the examples take them from here

LOG2E = 1.4426950408889634
MOST_SCORES = 1 << 26  # that a reference holds at once: many examples may run beside each other


def random(rng: np.random.Generator, shape: Sequence[int], dtype: str = "float16", scale: float = 1.0) -> np.ndarray:
    """Normally distributed values, already rounded to `dtype`, so that the reference sees what the kernel sees."""
    return (rng.standard_normal(shape, np.float32) * np.float32(scale)).astype(NUMPY[dtype])


def run(program: Any, inputs: Sequence[Any], outputs: Sequence[int], on: Place) -> list[Any]:
    """Compile `program`, call it with NumPy arrays and give back its outputs as float64."""
    got = on.compile(program, out_idx=list(outputs))(*inputs)
    return [wide(x) for x in (got if isinstance(got, (list, tuple)) else [got])]


def _of_heads(x: Any, first: int, count: int) -> Any:
    """The part of a mask or bias, (..., heads or 1, m, n) or without heads, that concerns some of the heads."""
    if x is None or np.ndim(x) < 3 or x.shape[-3] == 1:
        return x
    return x[..., first:first + count, :, :]


def attention(q: Any, k: Any, v: Any, keep: Any = None, scale: float | None = None, bias: Any = 0.0, sink: Any = None,
              cap: float = 0.0) -> tuple[Any, Any]:
    """softmax(q k^T scale + bias) v in float64 and the log of the row sums.

    q (batch, heads, m, d), k and v (batch, kv heads, n, d); query head h uses kv head h // group.  `keep` (m, n) or
    broadcastable is False where a score is masked; `sink` (heads,) is one more score a row whose value is zero.
    Rows that see nothing give 0 and -inf.
    """
    heads, group = q.shape[1], q.shape[1] // k.shape[1]
    each = max(1, MOST_SCORES // max(1, q.shape[0] * q.shape[2] * k.shape[2]))
    if each < heads:  # a part of the heads at a time: whole groups, or equal parts of one
        each = each - each % group if each >= group else max(n for n in range(1, each + 1) if group % n == 0)
        parts = [attention(q[:, h:h + each], k[:, h // group:(h + each - 1) // group + 1],
                           v[:, h // group:(h + each - 1) // group + 1], _of_heads(keep, h, each), scale,
                           _of_heads(bias, h, each), None if sink is None else sink[h:h + each], cap)
                 for h in range(0, heads, each)]
        return np.concatenate([o for o, _ in parts], 1), np.concatenate([lse for _, lse in parts], 1)
    k, v = (np.repeat(x, group, axis=1) for x in (k, v))
    s = q @ k.swapaxes(-1, -2) * (q.shape[-1]**-0.5 if scale is None else scale)
    if cap:
        s = cap * np.tanh(s / cap)
    s = s + bias
    if keep is not None:
        s = np.where(keep, s, -np.inf)
    extra = np.full(s.shape[:-1] + (1,), -np.inf) if sink is None else np.broadcast_to(
        wide(sink)[None, :, None, None], s.shape[:-1] + (1,))
    top = np.maximum(s.max(-1, keepdims=True, initial=-np.inf), extra)
    top = np.where(np.isinf(top), 0.0, top)
    p = np.exp(s - top)
    total = p.sum(-1, keepdims=True) + np.exp(extra - top)
    with np.errstate(divide="ignore"):
        lse = (np.log(total) + top)[..., 0]
    return p @ v / np.where(total == 0, 1.0, total), lse


def attention_bound(q: np.ndarray, k: np.ndarray, v: np.ndarray, dtype: str, scale: float | None = None) -> float:
    """Allowed error of an output of `attention` computed in tiles with float32 sums.

    A weighted mean of v with weights that sum to one.  The weights are rounded once to `dtype` before the second product,
    the result once more: 2 EPS max|v|.  A score is a sum of d products, off by at most d EPS[float32] |q| |k| scale;
    exp turns that into a relative error of numerator and of denominator.  2^-18 covers exp2 of the device and the
    rescaling by the running maximum.
    """
    d = q.shape[-1]
    q, k, v = wide(q), wide(k), wide(v)
    longest = float(np.sqrt((q**2).sum(-1).max(initial=0.0) * (k**2).sum(-1).max(initial=0.0)))
    score = d * EPS["float32"] * longest * (d**-0.5 if scale is None else scale)
    return float(np.abs(v).max(initial=0.0)) * (2 * EPS[dtype] + 2 * score + 2.0**-18)


def rounding(dtype: str, scale: float = 1.0) -> Callable[[Any], Any]:
    """Rounds float64 numbers to the significant bits of `dtype`, to nearest, by Veltkamp's splitting.

    scale: numbers are multiplied by it for the rounding, so that another one gives an independent error.  float32: products
    take it rounded to tf32.
    """
    split = 2.0**53 * EPS["tf32" if dtype == "float32" else dtype] + 1  # 2 ** (bits that go) + 1

    def rounded(x: Any) -> Any:
        x = x * scale
        return (split * x - (split * x - x)) / scale

    return rounded


def compare_rough(names: Sequence[str], got: Sequence[Any], wants: Sequence[Any], samples: Sequence[Sequence[Any]],
                  dtypes: Sequence[str]) -> list[Comparison]:
    """Compare results of a kernel that rounds intermediate values with exact ones.

    What roundings do to a result is found by making them: each of `samples` holds the results of the reference with such
    values rounded.  Every number is a sum of the effects of many independent roundings, so kernel and sample are off by
    draws from one distribution.  Its spread is taken over the last axis, or over all steps and channels of a head where
    that is larger (few roundings may be lucky ones); the kernel, which rounds in other places too, may be off by ten times
    that, beside the rounding of the result itself to its dtype.  Shapes: (batch, seq, heads, dim), (batch, heads, seq) or
    (heads,).
    """
    def spread(errors: Sequence[Any]) -> Any:
        squares = sum(e**2 for e in errors[1:]) / len(errors) + errors[0]**2 / len(errors)
        overall = squares.mean((1, 3), keepdims=True) if squares.ndim == 4 else squares.mean(-1, keepdims=True)
        return np.sqrt(np.maximum(squares.mean(-1, keepdims=True), overall))

    return [compare(name, g, want, 10 * spread([r - want for r in roughs]) + EPS[dtype] * np.abs(want) + 2.0**-24)
            for name, g, want, roughs, dtype in zip(names, got, wants, zip(*samples), dtypes)]


__all__ = ["EPS", "HERE", "LOG2E", "NUMPY", "Comparison", "Place", "attention", "attention_bound", "compare", "compare_rough",
           "main", "random", "rounding", "run", "wide"]
