"""Programs of whole_programs.py with another score function, swapped operands, an operator more, or other names.

Each has the arguments of the program that it was made of, and must become as many kernels at nearly the same rate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from whole_programs import CASES, EPS, Case, attention, causal

import tilelang
import tilelang.language as T
from tilelang.program import Program

CHANGED: dict[str, tuple[Case, Any]] = {}  # name -> the case that was changed, the changed program


def changed(base: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator: a changed form of the case with this name."""

    def add(fn: Callable[..., Any]) -> Callable[..., Any]:
        CHANGED[fn.__name__] = next(c for c in CASES if c.name == base), (
            fn if isinstance(fn, Program) else tilelang.program(fn))
        return fn

    return add


def agree(program: Any, args: Sequence[Any], case: Case) -> None:
    """Checks a changed program against its definition, within the bound of the case.  Raises AssertionError."""
    both = program(*args), program.reference(*args)
    for got, want in zip(*(x if isinstance(x, tuple) else (x,) for x in both), strict=True):
        assert got.shape == want.shape and got.dtype == want.dtype
        g, w = (np.asarray(x.double().cpu() if hasattr(x, "cpu") else x).astype(np.float64) for x in (got, want))
        eps = max(EPS.get(str(s[1]), 0) for s in case.small.values())
        error = np.abs(g - w).max(initial=0)
        assert error <= 4 * case.rounds * eps * np.abs(w).max(initial=0), error


# ---- score functions -------------------------------------------------------------------------------------------------


@changed("attention_plain")
def attention_of_slopes(q, k, v):
    return attention(lambda s, i, j: s - T.abs(i - j) * 0.125)(q, k, v)


@changed("attention_plain")
def attention_of_weighted_distance(q, k, v):
    return attention(lambda s, i, j: s * (1 - T.minimum(T.abs(i - j), 64) * 0.01))(q, k, v)


@changed("attention_plain")
def attention_of_clamped_scores(q, k, v):
    return attention(lambda s, i, j: T.clamp(s, -8, 8))(q, k, v)


@changed("attention_causal")
def attention_strictly_causal_with_self(q, k, v):
    return attention(lambda s, i, j: T.where((i > j) | (i == j), s * 1.5, -float("inf")))(q, k, v)


@changed("attention_causal")
def attention_causal_with_slopes(q, k, v):
    return attention(lambda s, i, j: T.where(i < j, -float("inf"), s + (j - i) * 0.0625))(q, k, v)


@changed("attention_window")
def attention_in_blocks_of_a_window(q, k, v):
    return attention(lambda s, i, j: T.where((i - j < 8) & ~(j > i), s + 0.5, -float("inf")))(q, k, v)


# ---- swapped operands ------------------------------------------------------------------------------------------------


@changed("attention_plain")
def attention_from_the_keys_side(q, k, v):
    s = T.einsum("bhkd,bhqd->bhqk", k, q, dtype="float32") * q.shape[-1] ** -0.5
    return T.einsum("bhkd,bhqk->bhqd", v, T.softmax(s).astype(v.dtype))


@changed("attention_causal")
def attention_by_matmuls(queries, keys, values):
    w = T.matmul(queries, keys.transpose(0, 1, 3, 2), dtype="float32") / 11.313708
    w = T.where(T.iota(keys.shape[2]) <= T.iota(queries.shape[2])[:, None], w, -float("inf"))
    return T.softmax(w).astype(values.dtype) @ values


@changed("linear_relu")
def linear_relu_transposed_twice(x, w, b):
    return T.maximum(0, b + (w.T @ x.T).T)


@changed("swiglu_mlp")
def swiglu_with_the_gate_last(x, g, u, d):
    return ((x @ u) * T.silu(x @ g)) @ d


@changed("lora")
def lora_with_the_low_rank_first(x, w, a, b):
    return 2 * ((x @ a) @ b) + x @ w


@changed("retention")
def retention_from_the_other_side(q, k, v):
    n = q.shape[0]
    d = T.iota(n) - T.iota(n)[:, None]
    return T.where(d <= 0, T.exp(T.maximum(-d, 0) * -0.105), 0) * (q @ k.T) @ v


# ---- an operator more, or another ------------------------------------------------------------------------------------


@changed("mlp")
def mlp_with_another_activation(x, w1, w2):
    h = x @ w1
    return (h * T.sigmoid(1.702 * h)) @ w2


@changed("norm_matmul_swiglu")
def norm_matmul_gelu(hidden, scale, left, right):
    h = T.rms_norm(hidden, scale)
    return T.gelu(h @ left, approximate="tanh") * (h @ right)


@changed("cross_entropy")
def cross_entropy_of_scaled_logits(x, t):
    scaled = x * 0.5
    return T.logsumexp(scaled) - T.take_along(scaled, t[:, None]).squeeze(-1)


@changed("softmax")
def softmax_with_a_temperature_and_a_floor(x):
    return T.maximum(T.softmax(x / 0.7), 1e-5)


@changed("layer_norm")
def layer_norm_with_relu(x, w, b):
    return T.relu(T.layer_norm(x, w, b)) * 2


@changed("quantised_matmul")
def quantised_matmul_with_relu(activations, packed, scales):
    return T.relu(activations @ T.quantised(packed, scales, "int4"))


@changed("top_five")
def top_five_of_halves(x):
    values, at = T.topk(x * 0.5, 5)
    return values + 1, at


length = T.dynamic("length")


@changed("attention_dynamic")
@tilelang.program
def attention_dynamic_renamed(
    a: T.Tensor((1, 2, length, 16), "float16"), b: T.Tensor((1, 2, length, 16), "float16"),
    c: T.Tensor((1, 2, length, 16), "float16")
):
    return T.relu(causal(a, b, c))
