"""Functions of whole tensors made of others: softmax, norms, activations, losses, convolutions, quantised weights."""

from __future__ import annotations

import math
from typing import Any

from tilelang.errors import error

from .functions import (abs_, broadcast_to, cast, einsum, erf, exp, iota, log, log1p, maximum, mean, narrowed, pad, reduce_max,
                        rsqrt, sigmoid, sqrt, squeeze, sum_, take_along, tanh, unsqueeze, where, wide, windows)
from .graph import FORMATS
from .ops.rules import axis_of, text_of
from .tensor import Tensor, make, node_of, public


@public()
def softmax(x: Any, axis: int = -1) -> Tensor:
    """exp(x) / sum(exp(x)) along an axis, in float32, in the type of x.  Where all elements are -inf, NaN."""
    w = wide(x, "T.softmax")
    e = exp(w - reduce_max(w, axis, True))
    return narrowed(e / sum_(e, axis, True), x)


@public()
def logsumexp(x: Any, axis: Any = -1, keepdims: bool = False) -> Tensor:
    """log(sum(exp(x))) along axes, in float32, in the type of x."""
    w = wide(x, "T.logsumexp")
    m = reduce_max(w, axis, True)
    out = log(sum_(exp(w - m), axis, True)) + m
    return narrowed(out if keepdims else squeeze(out, axis), x)


@public()
def log_softmax(x: Any, axis: int = -1) -> Tensor:
    """x - logsumexp(x) along an axis, in float32, in the type of x."""
    w = wide(x, "T.log_softmax")
    return narrowed(w - logsumexp(w, axis, True), x)


@public()
def cross_entropy(x: Any, target: Any, axis: int = -1) -> Tensor:
    """-log_softmax(x) at the target class, for each row.  target: integers, of the shape of x without the axis."""
    w = wide(x, "T.cross_entropy")
    picked = squeeze(take_along(w, unsqueeze(target, axis), axis), axis)
    return narrowed(logsumexp(w, axis) - picked, x)


@public()
def layer_norm(x: Any, weight: Any = None, bias: Any = None, axis: Any = -1, eps: float = 1e-5) -> Tensor:
    """(x - mean) / sqrt(variance + eps) * weight + bias along axes, in float32, in the type of x."""
    w = wide(x, "T.layer_norm")
    d = w - mean(w, axis, True)
    return _scaled(d * rsqrt(mean(d * d, axis, True) + eps), weight, bias, x)


@public()
def rms_norm(x: Any, weight: Any = None, axis: Any = -1, eps: float = 1e-6) -> Tensor:
    """x / sqrt(mean(x * x) + eps) * weight along axes, in float32, in the type of x."""
    w = wide(x, "T.rms_norm")
    return _scaled(w * rsqrt(mean(w * w, axis, True) + eps), weight, None, x)


def _scaled(x: Tensor, weight: Any, bias: Any, like: Any) -> Tensor:
    x = x if weight is None else x * wide(weight, "a norm")
    return narrowed(x if bias is None else x + wide(bias, "a norm"), like)


@public()
def group_norm(x: Any, groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> Tensor:
    """The layer norm of each of the groups of channels, axis 1, together with all axes after it."""
    n = node_of(x, "T.group_norm")
    if n.ndim < 2 or n.shape[1] % groups != 0:
        raise error("program-shape", f"T.group_norm of {text_of(n.shape)} in {groups} groups", found=text_of(n.shape),
                    expected="(batch, channels, ...) with channels that the groups divide")
    parts = wide(x, "T.group_norm").reshape(n.shape[0], groups, n.shape[1] // groups, *n.shape[2:])
    y = layer_norm(parts, axis=tuple(range(2, n.ndim + 1)), eps=eps).reshape(n.shape)
    column = (-1, *(1,) * (n.ndim - 2))
    weight, bias = (None if v is None else v.reshape(column) for v in (weight, bias))
    return _scaled(y, weight, bias, x)


# ---- activations -----------------------------------------------------------------------------------------------------

@public()
def relu(x: Any) -> Tensor:
    """max(x, 0); NaN stays."""
    return where(Tensor(node_of(x, "T.relu")) < 0, 0, x)


@public("swish")
def silu(x: Any) -> Tensor:
    """x * sigmoid(x), in float32, in the type of x."""
    w = wide(x, "T.silu")
    return narrowed(w * sigmoid(w), x)


@public()
def gelu(x: Any, approximate: str = "none") -> Tensor:
    """x times the normal distribution function of x, in float32; approximate="tanh": by tanh."""
    w = wide(x, "T.gelu")
    if approximate == "tanh":
        return narrowed(w * 0.5 * (tanh((w + w * w * w * 0.044715) * math.sqrt(2 / math.pi)) + 1), x)
    return narrowed(w * 0.5 * (erf(w * math.sqrt(0.5)) + 1), x)


@public()
def softplus(x: Any) -> Tensor:
    """log(1 + exp(x)), in float32, in the type of x."""
    w = wide(x, "T.softplus")
    return narrowed(maximum(w, 0) + log1p(exp(-abs_(w))), x)


@public()
def leaky_relu(x: Any, slope: float = 0.01) -> Tensor:
    """x where it is positive, else x * slope."""
    t = Tensor(node_of(x, "T.leaky_relu"))
    return where(t < 0, t * slope, t)


@public()
def square(x: Any) -> Tensor:
    """x * x."""
    return Tensor(node_of(x, "T.square")) * x


@public()
def norm(x: Any, axis: Any = None, keepdims: bool = False) -> Tensor:
    """The root of the sum of squares along axes, in float32, in the type of x."""
    w = wide(x, "T.norm")
    return narrowed(sqrt(sum_(w * w, axis, keepdims)), x)


# ---- masks -----------------------------------------------------------------------------------------------------------

def _triangle(x: Any, what: str) -> tuple[Tensor, Tensor, Tensor]:
    n = node_of(x, what)
    axis_of(n, -2, what)
    rows, columns = n.shape[-2:]
    return Tensor(n), iota(rows).reshape(rows, 1), iota(columns)


@public()
def tril(x: Any, diagonal: int = 0) -> Tensor:
    """The elements of the last two axes up to a diagonal, else 0."""
    t, i, j = _triangle(x, "T.tril")
    return where(j <= i + diagonal, t, 0)


@public()
def triu(x: Any, diagonal: int = 0) -> Tensor:
    """The elements of the last two axes from a diagonal on, else 0."""
    t, i, j = _triangle(x, "T.triu")
    return where(j >= i + diagonal, t, 0)


# ---- convolutions ----------------------------------------------------------------------------------------------------

@public("conv1d", "conv2d", "conv3d")
def conv(x: Any, weight: Any, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1) -> Tensor:
    """A convolution (without reversal) of x (N, C, ...) by weight (O, C / groups, ...); as many spatial axes as x has.

    stride, padding (before and after), dilation: a number, or one for each spatial axis.
    """
    n, w = node_of(x, "T.conv"), node_of(weight, "T.conv")
    spatial = n.ndim - 2
    if spatial < 1 or w.ndim != n.ndim or n.shape[1] != w.shape[1] * groups or w.shape[0] % groups != 0:
        raise error("program-shape", f"T.conv of {text_of(n.shape)} by {text_of(w.shape)} in {groups} groups",
                    expected="x (N, C, ...), weight (O, C / groups, ...)", found=f"{text_of(n.shape)}, {text_of(w.shape)}")
    pads = padding if isinstance(padding, (tuple, list)) else (padding,) * spatial
    padded = pad(x, [(0, 0), (0, 0), *((p, p) for p in pads)]) if any(pads) else x
    view = windows(padded, w.shape[2:], tuple(range(2, n.ndim)), stride, dilation)
    out, taps = "xyz"[:spatial], "uvw"[:spatial]
    if groups == 1:
        return einsum(f"nc{out}{taps},oc{taps}->no{out}", view, weight)
    view = view.reshape(n.shape[0], groups, w.shape[1], *view.shape[2:])
    parts = Tensor(w).reshape(groups, w.shape[0] // groups, *w.shape[1:])
    y = einsum(f"ngc{out}{taps},goc{taps}->ngo{out}", view, parts)
    return y.reshape(n.shape[0], w.shape[0], *y.shape[3:])


# ---- quantised weights -----------------------------------------------------------------------------------------------

@public(methods=False)
def quantised(weights: Any, scales: Any, format: str = "int4", zeros: Any = None) -> Tensor:
    """(w - zeros) * scales, where bytes hold the integers w: the weights of a quantised matmul, in the type of the scales.

    weights: int8 or uint8; formats narrower than a byte are packed along the last axis, the least bits first.
    scales, zeros: of the shape of w, divided along each axis by the size of a group that shares one.
    format: int4, uint4, int8, uint8, int2 or uint2.
    """
    q, s = node_of(weights, "T.quantised"), node_of(scales, "T.quantised")
    if format not in FORMATS or q.dtype.bits != 8 or not q.dtype.is_int or not s.dtype.is_float or not q.shape:
        raise error("program-quantised", f"T.quantised of {q.dtype} by {s.dtype} in the format {format!r}",
                    expected="bytes, scales of a float type, a known format", found=f"{q.dtype}, {s.dtype}, {format!r}")
    shape = (*q.shape[:-1], q.shape[-1] * FORMATS[format][0])
    if s.ndim != len(shape):
        raise error("program-quantised", f"weights {text_of(shape)} have scales {text_of(s.shape)}",
                    expected=f"{len(shape)} axes", found=f"{s.ndim} axes")
    groups = tuple(1 if n == t else n // t if isinstance(n, int) and isinstance(t, int) and t and n % t == 0 else 0
                   for n, t in zip(shape, s.shape))
    rest = [] if zeros is None else [broadcast_to(cast(zeros, s.dtype), *s.shape).node]
    return Tensor(make("dequantise", [q, s, *rest], {"format": format, "groups": groups}))
