"""What every example of this folder shares: run a program on a target, the float64 reference of attention, bounds.

Targets are those of `tilelang.compile`: "cuda", "cpu", "simulator" (the lowered program for an sm_80 device, interpreted)
and "tile" (the meaning of the tile program, interpreted).  The last two need no hardware and check every access.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np

import tilelang

NUMPY = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32, "int32": np.int32}
ROUND = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24, "tf32": 2.0**-11}  # largest relative error of rounding
LOG2E = 1.4426950408889634
TARGETS: dict[str, tuple[Any, str | None]] = {
    "cuda": ("cuda", None), "cpu": ("cpu", None), "tile": ("cpu", "tile"),
    "simulator": ({"kind": "cuda", "arch": "sm_80"}, "simulator")}


def random(rng: np.random.Generator, shape: Sequence[int], dtype: str = "float16", scale: float = 1.0) -> np.ndarray:
    """Normally distributed values, already rounded to `dtype`, so that the reference sees what the kernel sees."""
    return (rng.standard_normal(shape) * scale).astype(np.float32).astype(NUMPY[dtype])


def wide(x: np.ndarray) -> np.ndarray:
    return np.asarray(x).astype(np.float64)


def run(program: Any, inputs: Sequence[Any], outputs: Sequence[int], target: str) -> list[np.ndarray]:
    """Compile `program` for a target of TARGETS, call it with NumPy arrays and give back its outputs as float64."""
    where, backend = TARGETS[target]
    kernel = tilelang.compile(program, out_idx=list(outputs), target=where, execution_backend=backend)
    args = [_to_torch(x) for x in inputs] if target == "cuda" else list(inputs)
    got = kernel(*args)
    return [_to_numpy(x) for x in (got if isinstance(got, (list, tuple)) else [got])]


def _to_torch(x: Any) -> Any:
    import torch

    if not isinstance(x, np.ndarray):
        return x
    if x.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(np.ascontiguousarray(x).view(np.int16)).view(torch.bfloat16).cuda()
    return torch.from_numpy(np.ascontiguousarray(x)).cuda()


def _to_numpy(x: Any) -> np.ndarray:
    return x.detach().cpu().double().numpy() if hasattr(x, "detach") else wide(x)


def distance(got: np.ndarray, want: np.ndarray) -> float:
    """Largest absolute difference; infinite for another shape and where only one of the two is infinite or NaN."""
    if got.shape != want.shape:
        return float("inf")
    with np.errstate(invalid="ignore"):
        d = np.where((got == want) | (np.isnan(got) & np.isnan(want)), 0.0, np.abs(got - want))
    return float(np.where(np.isnan(d), np.inf, d).max(initial=0.0))


def attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, keep: np.ndarray | None = None, scale: float | None = None,
              bias: np.ndarray | float = 0.0, sink: np.ndarray | None = None,
              cap: float = 0.0) -> tuple[np.ndarray, np.ndarray]:
    """softmax(q k^T scale + bias) v in float64 and the log of the row sums.

    q (batch, heads, m, d), k and v (batch, kv heads, n, d); query head h uses kv head h // group.  `keep` (m, n) or
    broadcastable is False where a score is masked; `sink` (heads,) is one more score a row whose value is zero.
    Rows that see nothing give 0 and -inf.
    """
    group = q.shape[1] // k.shape[1]
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
    the result once more: 2 ROUND max|v|.  A score is a sum of d products, off by at most d ROUND[float32] |q| |k| scale;
    exp turns that into a relative error of numerator and of denominator.  2^-18 covers exp2 of the device and the
    rescaling by the running maximum.
    """
    d = q.shape[-1]
    q, k, v = wide(q), wide(k), wide(v)
    longest = float(np.sqrt((q**2).sum(-1).max(initial=0.0) * (k**2).sum(-1).max(initial=0.0)))
    score = d * ROUND["float32"] * longest * (d**-0.5 if scale is None else scale)
    return float(np.abs(v).max(initial=0.0)) * (2 * ROUND[dtype] + 2 * score + 2.0**-18)


def main(check: Callable[..., tuple[float, float]], doc: str | None, **sizes: Any) -> None:
    """The command line of an example: one option a size, `--target`; prints the error beside its bound."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", choices=sorted(TARGETS), default="cpu")
    for name, default in sizes.items():
        if isinstance(default, bool):
            parser.add_argument(f"--{name.replace('_', '-')}", action=argparse.BooleanOptionalAction, default=default)
        else:
            parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
    options = vars(parser.parse_args())
    error, bound = check(**options)
    print(f"largest error {error:.3g}, allowed {bound:.3g}")
    if not error <= bound:
        raise SystemExit("the result differs from the reference")
