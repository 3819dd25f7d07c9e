"""Functions of whole tensors made of others: softmax, norms, activations, losses, convolutions, quantised weights."""

from __future__ import annotations

import math
from typing import Any

from tilelang.errors import error, register

from .functions import broadcast_to, cast, einsum, iota, where
from .graph import text_of
from .tensor import Tensor, axis_of, public, tensor, wide

FORMATS = {"int4": (2, 4, True), "uint4": (2, 4, False), "int8": (1, 8, True), "uint8": (1, 8, False),
           "int2": (4, 2, True), "uint2": (4, 2, False)}  # values in a byte, least bits first, on the last axis; bits; signed

register("program-quantised", ValueError, "T.quantised is given tensors or a format that do not fit",
         f"formats: {', '.join(FORMATS)}; scales have the shape of the weights, divided by the size of a group along each axis")


@public(in_float32=True)
def softmax(x: Any, axis: int = -1) -> Tensor:
    """exp(x) / sum(exp(x)) along an axis, in float32, in the type of x.  Where all elements are -inf, NaN."""
    e = (x - x.max(axis, True)).exp()
    return e / e.sum(axis, True)  # type: ignore[no-any-return]


@public(in_float32=True)
def logsumexp(x: Any, axis: Any = -1, keepdims: bool = False) -> Tensor:
    """log(sum(exp(x))) along axes, in float32, in the type of x."""
    m = x.max(axis, True)
    out = (x - m).exp().sum(axis, True).log() + m
    return out if keepdims else out.squeeze(axis)  # type: ignore[no-any-return]


@public(in_float32=True)
def log_softmax(x: Any, axis: int = -1) -> Tensor:
    """x - logsumexp(x) along an axis, in float32, in the type of x."""
    return x - logsumexp(x, axis, True)  # type: ignore[no-any-return]


@public(in_float32=True)
def cross_entropy(x: Any, target: Any, axis: int = -1) -> Tensor:
    """-log_softmax(x) at the target class, for each row.  target: integers, of the shape of x without the axis."""
    return logsumexp(x, axis) - x.take_along(tensor(target).unsqueeze(axis), axis).squeeze(axis)


@public(in_float32=True)
def layer_norm(x: Any, weight: Any = None, bias: Any = None, axis: Any = -1, eps: float = 1e-5) -> Tensor:
    """(x - mean) / sqrt(variance + eps) * weight + bias along axes, in float32, in the type of x."""
    d = x - x.mean(axis, True)
    return _scaled(d * ((d * d).mean(axis, True) + eps).rsqrt(), weight, bias)


@public(in_float32=True)
def rms_norm(x: Any, weight: Any = None, axis: Any = -1, eps: float = 1e-6) -> Tensor:
    """x / sqrt(mean(x * x) + eps) * weight along axes, in float32, in the type of x."""
    return _scaled(x * ((x * x).mean(axis, True) + eps).rsqrt(), weight, None)


def _scaled(x: Tensor, weight: Any, bias: Any) -> Tensor:
    x = x if weight is None else x * wide(tensor(weight))
    return x if bias is None else x + wide(tensor(bias))


@public(in_float32=True)
def group_norm(x: Any, groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> Tensor:
    """The layer norm of each of the groups of channels, axis 1, together with all axes after it."""
    if x.ndim < 2 or x.shape[1] % groups != 0:
        raise error("program-shape", f"T.group_norm of ‹{text_of(x.shape)}› in {groups} groups",
                    expected="(batch, channels, ...) with channels that the groups divide")
    grouped = x.reshape(x.shape[0], groups, x.shape[1] // groups, *x.shape[2:])
    y = layer_norm(grouped, axis=tuple(range(2, x.ndim + 1)), eps=eps).reshape(x.shape)
    column = (-1, *(1,) * (x.ndim - 2))
    return _scaled(y, *(None if v is None else tensor(v).reshape(column) for v in (weight, bias)))


# ---- activations -----------------------------------------------------------------------------------------------------

@public()
def relu(x: Any) -> Tensor:
    """max(x, 0); NaN stays."""
    return where(x < 0, 0, x)


@public("swish", in_float32=True)
def silu(x: Any) -> Tensor:
    """x * sigmoid(x), in float32, in the type of x."""
    return x * x.sigmoid()  # type: ignore[no-any-return]


@public(in_float32=True)
def gelu(x: Any, approximate: str = "none") -> Tensor:
    """x times the normal distribution function of x, in float32; approximate="tanh": by tanh."""
    if approximate not in ("none", "tanh"):
        raise error("program-option", f"T.gelu is computed by ‹{approximate!r}›", expected='"none" or "tanh"',
                    hint='approximate="tanh" computes by tanh; leave it out for the error function')
    if approximate == "tanh":
        return x * 0.5 * (((x + x * x * x * 0.044715) * math.sqrt(2 / math.pi)).tanh() + 1)  # type: ignore[no-any-return]
    return x * 0.5 * ((x * math.sqrt(0.5)).erf() + 1)  # type: ignore[no-any-return]


@public(in_float32=True)
def softplus(x: Any) -> Tensor:
    """log(1 + exp(x)), in float32, in the type of x."""
    return x.maximum(0) + (-abs(x)).exp().log1p()  # type: ignore[no-any-return]


@public()
def leaky_relu(x: Any, slope: float = 0.01) -> Tensor:
    """x where it is positive, else x * slope."""
    return where(x < 0, x * slope, x)


@public()
def square(x: Any) -> Tensor:
    """x * x."""
    return x * x  # type: ignore[no-any-return]


@public(in_float32=True)
def norm(x: Any, axis: Any = None, keepdims: bool = False) -> Tensor:
    """The root of the sum of squares along axes, in float32, in the type of x."""
    return (x * x).sum(axis, keepdims).sqrt()  # type: ignore[no-any-return]


# ---- masks -----------------------------------------------------------------------------------------------------------

def _places(x: Tensor) -> tuple[Tensor, Tensor]:
    """The indices along the last two axes."""
    axis_of(x, -2)
    return iota(x.shape[-2]).unsqueeze(1), iota(x.shape[-1])


@public()
def tril(x: Any, diagonal: int = 0) -> Tensor:
    """The elements of the last two axes up to a diagonal, else 0."""
    i, j = _places(x)
    return where(j <= i + diagonal, x, 0)


@public()
def triu(x: Any, diagonal: int = 0) -> Tensor:
    """The elements of the last two axes from a diagonal on, else 0."""
    i, j = _places(x)
    return where(j >= i + diagonal, x, 0)


# ---- convolutions ----------------------------------------------------------------------------------------------------

@public("conv1d", "conv2d", "conv3d")
def conv(x: Any, weight: Any, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1) -> Tensor:
    """A convolution (without reversal) of x (N, C, ...) by weight (O, C / groups, ...); as many spatial axes as x has.

    stride, padding (before and after), dilation: a number, or one for each spatial axis.
    """
    w, spatial = tensor(weight), x.ndim - 2
    if spatial < 1 or w.ndim != x.ndim or x.shape[1] != w.shape[1] * groups or w.shape[0] % groups != 0:
        raise error("program-shape", f"T.conv of {text_of(x.shape)} by {text_of(w.shape)} in {groups} groups",
                    expected="x (N, C, ...), weight (O, C / groups, ...)", found=f"{text_of(x.shape)}, {text_of(w.shape)}")
    pads = padding if isinstance(padding, (tuple, list)) else (padding,) * spatial
    padded = x.pad([(0, 0), (0, 0), *((p, p) for p in pads)]) if any(pads) else x
    view = padded.windows(w.shape[2:], tuple(range(2, x.ndim)), stride, dilation)
    out, taps = "xyz"[:spatial], "uvw"[:spatial]
    if groups == 1:
        return einsum(f"nc{out}{taps},oc{taps}->no{out}", view, w)
    view = view.reshape(x.shape[0], groups, w.shape[1], *view.shape[2:])
    grouped = w.reshape(groups, w.shape[0] // groups, *w.shape[1:])
    y = einsum(f"ngc{out}{taps},goc{taps}->ngo{out}", view, grouped)
    return y.reshape(x.shape[0], w.shape[0], *y.shape[3:])


# ---- quantised weights -----------------------------------------------------------------------------------------------

@public()
def quantised(weights: Any, scales: Any, format: str = "int4", zeros: Any = None) -> Tensor:
    """(w - zeros) * scales, where bytes hold the integers w: the weights of a quantised matmul, in the type of the scales.

    weights: int8 or uint8; formats narrower than a byte are packed along the last axis, the least bits first.
    scales, zeros: of the shape of w, divided along each axis by the size of a group that shares one.
    format: int4, uint4, int8, uint8, int2 or uint2.
    """
    q, s = tensor(weights), tensor(scales)
    if format not in FORMATS or q.dtype.bits != 8 or not q.dtype.is_int or not s.dtype.is_float or not q.shape:
        raise error("program-quantised", f"T.quantised of {q.dtype} by {s.dtype} in the format {format!r}",
                    expected="bytes, scales of a float type, a known format", found=f"{q.dtype}, {s.dtype}, {format!r}")
    count, bits, signed = FORMATS[format]
    shape = (*q.shape[:-1], q.shape[-1] * count)
    if s.ndim != len(shape):
        raise error("program-quantised", f"weights {text_of(shape)} have scales {text_of(s.shape)}",
                    expected=f"{len(shape)} axes", found=f"{s.ndim} axes")
    groups = tuple(1 if n == t else n // t if isinstance(n, int) and isinstance(t, int) and t and n % t == 0 else 0
                   for n, t in zip(shape, s.shape))
    if any(t * g != n for t, g, n in zip(s.shape, groups, shape)):
        raise error("program-quantised", f"scales ‹{text_of(s.shape)}› do not cut weights {text_of(shape)} into groups",
                    expected="an extent that divides the weights' along each axis")
    w = cast(q, "int32")
    if count > 1:
        w = w.unsqueeze(-1) >> iota(count) * bits & (1 << bits) - 1
    elif signed == q.dtype.is_unsigned:  # a byte holds the other kind of integers
        w = w & 255
    if signed and (count > 1 or q.dtype.is_unsigned):
        w = (w ^ 1 << bits - 1) - (1 << bits - 1)

    def spread(x: Tensor) -> Tensor:
        """What a group shares, for each of its elements."""
        rows = x.reshape([s for t in x.shape for s in (t, 1)])
        return rows.expand([s for pair in zip(x.shape, groups) for s in pair]).reshape(shape)  # type: ignore[no-any-return]

    w = cast(w.reshape(shape), s.dtype)
    return (w if zeros is None else w - spread(broadcast_to(cast(zeros, s.dtype), *s.shape))) * spread(s)


__all__ = ["conv", "cross_entropy", "gelu", "group_norm", "layer_norm", "leaky_relu", "log_softmax", "logsumexp", "norm",
           "quantised", "relu", "rms_norm", "silu", "softmax", "softplus", "square", "tril", "triu"]
