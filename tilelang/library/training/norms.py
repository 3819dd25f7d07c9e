"""`rms_norm` and `layer_norm` with gradients."""

from __future__ import annotations

from functools import partial
from math import prod
from typing import Any

from ..arrays import empty, type_name
from ..attention.inputs import running_on
from ..autograd import Function, Results, Step
from ..place import Place, target_text
from .norm_kernels import NormForm, norm_backward, norm_forward
from .rows import RowTile, accumulator, as_rows, check_alike


def rms_norm(x: Any, weight: Any = None, *, eps: float = 1e-6, target: Any = None) -> Any:
    """x / sqrt(mean(x^2) + eps) * weight, over the last dimension; of x's shape and type.

    x: (..., n), float16, bfloat16, float32 or float64.  weight: (n,), of x's type or float32, ones by default.  Means and
    gradients are formed in float32 (float64 for float64).
    target: as for tilelang.compile, instead of the device that x is on; "tile" and "simulator" as for attention.

    Gradients of x and weight, of the types of these.  Saved for them: x, weight, and 4 bytes a row (8 for float64).  The same
    inputs give the same bits.  One kernel takes any number of rows; torch.compile takes the call whole.

    Raises training-argument.

    >>> import numpy as np
    >>> rms_norm(np.array([[3, 4]], np.float32), eps=0.0).round(3).tolist()
    [[0.849, 1.131]]
    """
    return RMS_NORM(x, weight, None, float(eps), target_text(target))


def layer_norm(x: Any, weight: Any = None, bias: Any = None, *, eps: float = 1e-5, target: Any = None) -> Any:
    """(x - mean(x)) / sqrt(mean((x - mean(x))^2) + eps) * weight + bias, over the last dimension; of x's shape and type.

    x: (..., n), float16, bfloat16, float32 or float64.  weight, bias: (n,), of x's type or float32; ones and zeros by default.
    The variance does not cancel: it is formed from x - mean.  The rest is as for rms_norm.

    Gradients of x, weight and bias, of the types of these.  Saved for them: x, weight, and 8 bytes a row (16 for float64).

    Raises training-argument.

    >>> import numpy as np
    >>> layer_norm(np.array([[1, 3]], np.float32), eps=0.0).tolist()
    [[-1.0, 1.0]]
    """
    return LAYER_NORM(x, weight, bias, float(eps), target_text(target))


def _form(x: Any, weight: Any, bias: Any, centred: bool, each: int, summed: bool = False) -> NormForm:
    """The form of a call.  each: see RowTile.of; the sums of backward take registers too."""
    n, kind = int(x.shape[-1]), type_name(x)
    kinds = ["" if v is None else type_name(v) for v in (weight, bias)]
    return NormForm(n, kind, accumulator(kind), *kinds, centred, RowTile.of(n, each), summed)


def _checked(name: str, x: Any, weight: Any, bias: Any) -> None:
    n = tuple(x.shape[-1:])
    kinds = (type_name(x), "float32")
    check_alike(name, x, {"weight": (weight, n, kinds), "bias": (bias, n, kinds)})


def _forward_results(centred: bool, x: Any, weight: Any, bias: Any, eps: float, target: str | None) -> Results:
    _checked("layer_norm" if centred else "rms_norm", x, weight, bias)
    acc, rows = accumulator(type_name(x)), prod(x.shape[:-1])
    return (tuple(x.shape), type_name(x)), ((1 + centred, rows), acc)


def _forward(centred: bool, x: Any, weight: Any, bias: Any, eps: float, target: str | None, y: Any, stats: Any) -> None:
    if 0 not in x.shape:
        n, kernel = x.shape[-1], running_on(x, target).kernel(norm_forward, _form(x, weight, bias, centred, 32))
        kernel(as_rows(x, n), weight, bias, eps, y.reshape(-1, n), stats)


def _backward_results(centred: bool, x: Any, weight: Any, bias: Any, *others: Any) -> Results:
    n, wanted, summed = x.shape[-1], (tuple(x.shape), type_name(x)), others[1]
    of_vectors = (((n,) if summed and v is not None else (0,), type_name(x if v is None else v)) for v in (weight, bias))
    return wanted, *of_vectors


def _backward(centred: bool, x: Any, weight: Any, bias: Any, stats: Any, summed: bool, target: str | None, dy: Any,
              *made: Any) -> None:
    dx, dw, db = made
    if 0 in x.shape:
        for v in (dw, db):
            v[...] = 0
        return
    at, f = running_on(x, target), _form(x, weight, bias, centred, 16, summed)
    n, rows = f.n, stats.shape[1]
    blocks = _blocks(at, f, rows)
    partials = empty(x, (2, blocks, n), f.acc)
    means = empty(x, (rows, 2), f.acc) if f.tile.chunks > 1 else None
    kernel = at.kernel(norm_backward, f)
    kernel(as_rows(x, n), weight, stats, as_rows(dy, n), partials, means, dx.reshape(rows, n),
           dw if summed and f.weight else None, db if summed and f.bias else None)


def _blocks(at: Place, f: NormForm, rows: int) -> int:
    """The number of blocks that go over the rows: those that run at once."""
    return max(1, min(-(-rows // f.tile.rows), at.chip.sms * (512 // f.tile.threads)))


def _norm(name: str, centred: bool) -> Function:
    forward = Step("Tensor x, Tensor? weight, Tensor? bias, float eps, str? target", partial(_forward_results, centred),
                   partial(_forward, centred), 2)
    backward = Step("Tensor x, Tensor? weight, Tensor? bias, Tensor stats, bool summed, str? target, Tensor dy",
                    partial(_backward_results, centred), partial(_backward, centred), 3)
    return Function(name, forward, backward,
                    lambda needs, given, made: (*given[:3], made[1], any(needs[1:3]), given[4]), (0, 1, 2))


RMS_NORM, LAYER_NORM = _norm("rms_norm", False), _norm("layer_norm", True)
