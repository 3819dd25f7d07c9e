"""`softmax` and `cross_entropy` with gradients."""

from __future__ import annotations

from functools import partial
from math import prod
from typing import Any

from tilelang.errors import error

from ..arrays import empty, type_name
from ..attention.inputs import running_on
from ..autograd import Function, Results, Step
from ..place import target_text
from .rows import RowTile, accumulator, as_rows, check_alike
from .softmax_kernels import (EntropyForm, SoftmaxForm, entropy_backward, entropy_forward, softmax_backward, softmax_forward)

REDUCTIONS = ("none", "sum", "mean")


def softmax(x: Any, *, target: Any = None) -> Any:
    """exp(x) / sum(exp(x)) over the last dimension; of x's shape and type.

    x: (..., n), float16, bfloat16, float32 or float64; rows are reduced in float32 (float64 for float64).  A row of which all
    elements are -inf gives NaN.  target: as for rms_norm.

    Gradient of x, of its type.  Saved for it: the result.  The same inputs give the same bits.

    Raises training-argument.

    >>> import numpy as np
    >>> softmax(np.zeros((1, 4), np.float32)).tolist()
    [[0.25, 0.25, 0.25, 0.25]]
    """
    return SOFTMAX(x, target_text(target))


def cross_entropy(logits: Any, labels: Any, *, ignore_index: int = -100, label_smoothing: float = 0.0, z_loss: float = 0.0,
                  reduction: str = "mean", target: Any = None) -> Any:
    """The cross-entropy of rows of logits: for each row x with label t, with s = log(sum(exp(x))),

        s - (1 - label_smoothing) x_t - label_smoothing mean(x) + z_loss s^2

    logits: (..., n), float16, bfloat16, float32 or float64.  labels: (...), int32 or int64.  Rows with the label ignore_index
    have neither loss nor gradient; the loss of any other label outside 0 … n - 1 is NaN.
    reduction: "mean" over the rows that are not ignored (NaN where all are), "sum": (); or "none": one loss a row, (...).
    Losses are float32 (float64 for logits of float64).  target: as for rms_norm.

    Gradient of logits, of their type.  Saved for it: logits, labels, and 4 bytes a row (8 for float64): probabilities are
    formed again.  The same inputs give the same bits; nothing waits for the device.

    Raises training-argument.

    >>> import numpy as np
    >>> float(cross_entropy(np.zeros((2, 1), np.float32), np.array([0, -100])))
    0.0
    """
    check_reduction("cross_entropy", reduction)
    return CROSS_ENTROPY(logits, labels, int(ignore_index), float(label_smoothing), float(z_loss), reduction,
                         target_text(target))


def check_reduction(name: str, reduction: str) -> None:
    """Raises training-argument for a reduction that there is not."""
    if reduction not in REDUCTIONS:
        raise error("training-argument", f"{name} has no reduction ‹{reduction!r}›", expected=f"one of {', '.join(REDUCTIONS)}")


def _softmax_results(x: Any, *others: Any) -> Results:
    check_alike("softmax", x, {})
    return ((tuple(x.shape), type_name(x)),)


def _softmax_run(make: Any, each: int, x: Any, *others: Any) -> None:
    """others: the gradient of the result, for backward; then the target and the result."""
    *grads, out = (y for y in others if y is not None and not isinstance(y, str))
    if 0 not in x.shape:
        n, kind, at = x.shape[-1], type_name(x), running_on(x, next((y for y in others if isinstance(y, str)), None))
        kernel = at.kernel(make, SoftmaxForm(n, kind, accumulator(kind), RowTile.of(n, each)))
        kernel(*(as_rows(y, n) for y in (x, *grads)), out.reshape(-1, n))


SOFTMAX = Function("softmax", Step("Tensor x, str? target", _softmax_results, partial(_softmax_run, softmax_forward, 32)),
                   Step("Tensor y, str? target, Tensor dy", _softmax_results, partial(_softmax_run, softmax_backward, 16)),
                   lambda needs, given, made: (made[0], given[1]), (0,))


def _entropy_form(x: Any, labels: Any, ignored: int, smoothing: float, z_loss: float, reduction: str) -> EntropyForm:
    n, kind = int(x.shape[-1]), type_name(x)
    return EntropyForm(n, kind, accumulator(kind), RowTile.of(n), type_name(labels), reduction, ignored, smoothing, z_loss)


def _entropy_results(x: Any, labels: Any, *options: Any) -> Results:
    check_alike("cross_entropy", x, {"labels": (labels, tuple(x.shape[:-1]), ("int32", "int64"))})
    acc, rows = accumulator(type_name(x)), tuple(x.shape[:-1])
    return (rows if options[3] == "none" else (), acc), ((prod(rows),), acc), ((1,), acc)


def _entropy_run(x: Any, labels: Any, *others: Any) -> None:
    """others: the options, among them the reduction and the target; the results."""
    *options, target, loss, logs, count = others
    n, rows, whole = int(x.shape[-1]), prod(x.shape[:-1]), options[-1] != "none"
    if rows == 0 or n == 0:
        loss[...] = float("nan") if options[-1] == "mean" else 0.0
        return
    f = _entropy_form(x, labels, *options)
    each = empty(x, (rows,), f.acc) if whole else loss.reshape(rows)
    running_on(x, target).kernel(entropy_forward, f)(as_rows(x, n), as_rows(labels, 1).reshape(rows), each, logs,
                                                     loss.reshape(1) if whole else None, count if whole else None)


def _entropy_gradient_results(x: Any, *others: Any) -> Results:
    return ((tuple(x.shape), type_name(x)),)


def _entropy_gradient(x: Any, labels: Any, logs: Any, count: Any, *others: Any) -> None:
    *options, target, grad, dx = others
    if 0 not in x.shape:
        n, f = x.shape[-1], _entropy_form(x, labels, *options)
        running_on(x, target).kernel(entropy_backward, f)(
            as_rows(x, n), as_rows(labels, 1).reshape(-1), logs, count if f.reduction == "mean" else None,
            as_rows(grad, 1).reshape(-1), dx.reshape(-1, n))


CROSS_ENTROPY = Function(
    "cross_entropy",
    Step("Tensor logits, Tensor labels, int ignored, float smoothing, float z_loss, str reduction, str? target",
         _entropy_results, _entropy_run, 3),
    Step("Tensor logits, Tensor labels, Tensor logs, Tensor count, int ignored, float smoothing, float z_loss, "
         "str reduction, str? target, Tensor grad", _entropy_gradient_results, _entropy_gradient),
    lambda needs, given, made: (*given[:2], *made[1:], *given[2:]), (0,))
