"""float64 arrays on a torch device behind NumPy's functions, so that one reference serves both machines.

`wide` of harness.py gives a DeviceArray where there is a GPU.  NumPy hands its functions over to it (`np.exp(x)`,
`np.where(keep, x, 0)`, `x @ y`, `np.einsum(...)`); what is not listed here is done by NumPy on a copy in host memory, so a
reference is right either way and only slower.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np


class DeviceArray(np.lib.mixins.NDArrayOperatorsMixin):
    """A float64, int64 or bool torch tensor.  Operators, NumPy's functions and the usual methods work; `astype` and
    `np.asarray` give NumPy arrays in host memory."""

    __array_priority__ = 100
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor

    shape = property(lambda self: tuple(self.tensor.shape))
    ndim = property(lambda self: self.tensor.ndim)
    size = property(lambda self: self.tensor.numel())
    T = property(lambda self: DeviceArray(self.tensor.permute(*reversed(range(self.ndim)))))

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(str(self.tensor.dtype).removeprefix("torch."))

    # ---- NumPy's protocols ----------------------------------------------------------------------------------------
    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        host = self.tensor.cpu().numpy()
        return host if dtype is None else host.astype(dtype)

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any) -> Any:
        if method == "__call__" and ufunc.__name__ in UFUNCS and not set(kwargs) - {"out"}:
            result = UFUNCS[ufunc.__name__](*(self._tensor(x) for x in inputs))
            out, = kwargs.get("out", (None,))
            if out is None:
                return DeviceArray(result)
            if isinstance(out, DeviceArray):  # x += y
                out.tensor = result
                return out
        if method == "accumulate" and ufunc is np.maximum:
            axis = kwargs.get("axis", inputs[1] if len(inputs) > 1 else 0)
            return DeviceArray(self._tensor(next(iter(inputs))).cummax(axis).values)
        out, = kwargs.pop("out", (None,))
        result = getattr(ufunc, method)(*_host(inputs), **_host(kwargs))
        if out is None:
            return result
        out[...] = result
        return out

    def __array_function__(self, function: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
        ours = FUNCTIONS.get(function.__name__)
        if ours is not None:
            try:
                return ours(self, *args, **kwargs)
            except (TypeError, NotImplementedError):  # a form of the call that is not covered
                pass
        return function(*_host(args), **_host(kwargs))

    def _tensor(self, x: Any) -> Any:
        """x as torch takes it beside this array: a tensor on its device, or a Python number."""
        if isinstance(x, DeviceArray):
            return x.tensor
        if isinstance(x, (bool, int, float)):
            return x
        import torch

        host = np.asarray(x)
        if host.ndim == 0:
            return host.item()
        host = host.astype(np.float64 if host.dtype.kind not in "biu" else np.int64 if host.dtype.kind != "b" else bool)
        return torch.from_numpy(np.ascontiguousarray(host)).to(self.tensor.device)

    # ---- indexing -------------------------------------------------------------------------------------------------
    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, key: Any) -> Any:
        if any(isinstance(k, slice) and (k.step or 1) < 0 for k in (key if isinstance(key, tuple) else (key,))):
            return wrap(np.asarray(self)[_host(key)], self)  # torch has no negative steps
        return DeviceArray(self.tensor[self._key(key)])

    def __setitem__(self, key: Any, value: Any) -> None:
        self.tensor[self._key(key)] = self._tensor(value)

    def _key(self, key: Any) -> Any:
        if isinstance(key, tuple):
            return tuple(self._key(k) for k in key)
        return self._tensor(key) if isinstance(key, (np.ndarray, DeviceArray, list)) else key

    # ---- methods --------------------------------------------------------------------------------------------------
    def __float__(self) -> float:
        return float(self.tensor)

    def __bool__(self) -> bool:
        return bool(self.tensor)

    def item(self) -> Any:
        return self.tensor.item()

    def astype(self, dtype: Any) -> np.ndarray:
        """A NumPy array."""
        return np.asarray(self).astype(dtype)

    def copy(self) -> DeviceArray:
        return DeviceArray(self.tensor.clone())

    def reshape(self, *shape: Any) -> DeviceArray:
        return DeviceArray(self.tensor.reshape(*shape))

    def transpose(self, *axes: int) -> DeviceArray:
        return DeviceArray(self.tensor.permute(*axes)) if axes else self.T

    def swapaxes(self, a: int, b: int) -> DeviceArray:
        return DeviceArray(self.tensor.transpose(a, b))

    def repeat(self, count: int, axis: int) -> DeviceArray:
        return DeviceArray(self.tensor.repeat_interleave(count, axis))

    def sum(self, axis: Any = None, keepdims: bool = False) -> DeviceArray:
        return DeviceArray(self.tensor.sum(axis, keepdim=keepdims) if axis is not None else self.tensor.sum())

    def mean(self, axis: Any = None, keepdims: bool = False) -> DeviceArray:
        return DeviceArray(self.tensor.mean(axis, keepdim=keepdims) if axis is not None else self.tensor.mean())

    def max(self, axis: Any = None, keepdims: bool = False, initial: float | None = None) -> DeviceArray:
        return self._extreme("amax", "maximum", axis, keepdims, initial)

    def min(self, axis: Any = None, keepdims: bool = False, initial: float | None = None) -> DeviceArray:
        return self._extreme("amin", "minimum", axis, keepdims, initial)

    def _extreme(self, whole: str, pair: str, axis: Any, keepdims: bool, initial: float | None) -> DeviceArray:
        import torch

        if initial is not None and self.size == 0:
            return DeviceArray(torch.full(np.asarray(self).sum(axis, keepdims=keepdims).shape, float(initial),
                                          dtype=torch.float64, device=self.tensor.device))
        over = tuple(range(self.ndim)) if axis is None else axis
        out = getattr(torch, whole)(self.tensor, over, keepdim=keepdims)
        if initial is not None:
            out = getattr(torch, pair)(out, torch.as_tensor(float(initial), dtype=out.dtype, device=out.device))
        return DeviceArray(out)

    def any(self) -> bool:
        return bool(self.tensor.any())

    def all(self) -> bool:
        return bool(self.tensor.all())


def wrap(x: Any, like: DeviceArray) -> DeviceArray:
    """x on the device of another array."""
    return DeviceArray(like._tensor(x))


def _host(x: Any) -> Any:
    if isinstance(x, DeviceArray):
        return np.asarray(x)
    if isinstance(x, (tuple, list)):
        return type(x)(_host(v) for v in x)
    return {k: _host(v) for k, v in x.items()} if isinstance(x, dict) else x


def _pair(name: str) -> Callable[..., Any]:
    """A torch function of two tensors, one of which may come as a Python number."""
    def call(a: Any, b: Any) -> Any:
        import torch

        like = a if isinstance(a, torch.Tensor) else b
        a, b = (x if isinstance(x, torch.Tensor) else torch.as_tensor(x, device=like.device, dtype=torch.float64
                                                                      if isinstance(x, float) else None) for x in (a, b))
        if name == "matmul" and a.dtype != b.dtype:
            a, b = a.double(), b.double()
        return getattr(torch, name)(a, b)

    return call


def _one(name: str) -> Callable[..., Any]:
    def call(a: Any) -> Any:
        import torch

        return getattr(torch, name)(a)

    return call


UFUNCS: dict[str, Callable[..., Any]] = {
    **{name: _pair(ours) for name, ours in {
        "add": "add", "subtract": "sub", "multiply": "mul", "divide": "true_divide", "true_divide": "true_divide",
        "power": "pow", "matmul": "matmul", "maximum": "maximum", "minimum": "minimum", "floor_divide": "floor_divide",
        "remainder": "remainder", "greater": "gt", "greater_equal": "ge", "less": "lt", "less_equal": "le", "equal": "eq",
        "not_equal": "ne", "bitwise_and": "bitwise_and", "bitwise_or": "bitwise_or", "logical_and": "logical_and",
        "logical_or": "logical_or", "hypot": "hypot"}.items()},
    **{name: _one(ours) for name, ours in {
        "negative": "neg", "absolute": "abs", "exp": "exp", "exp2": "exp2", "log": "log", "log2": "log2", "sqrt": "sqrt",
        "square": "square", "tanh": "tanh", "sin": "sin", "cos": "cos", "isnan": "isnan", "isinf": "isinf",
        "isfinite": "isfinite", "invert": "bitwise_not", "logical_not": "logical_not", "floor": "floor",
        "rint": "round", "sign": "sign", "expm1": "expm1", "log1p": "log1p"}.items()}}


def _where(self: DeviceArray, keep: Any, a: Any, b: Any) -> DeviceArray:
    import torch

    a, b = (x if isinstance(x, torch.Tensor) else torch.as_tensor(x, device=self.tensor.device, dtype=torch.float64)
            for x in (self._tensor(a), self._tensor(b)))
    return DeviceArray(torch.where(torch.as_tensor(self._tensor(keep), device=self.tensor.device, dtype=torch.bool), a, b))


def _joined(name: str) -> Callable[..., DeviceArray]:
    def call(self: DeviceArray, arrays: Sequence[Any], axis: int = 0) -> DeviceArray:
        import torch

        return DeviceArray(getattr(torch, name)([self._tensor(x) for x in arrays], axis))

    return call


def _einsum(self: DeviceArray, form: str, *arrays: Any) -> DeviceArray:
    import torch

    return DeviceArray(torch.einsum(form, *(self._tensor(x).double() for x in arrays)))


def _pad(self: DeviceArray, x: Any, widths: Any) -> DeviceArray:
    import torch

    flat = [int(n) for pair in reversed(np.broadcast_to(widths, (self.ndim, 2)).tolist()) for n in pair]
    return DeviceArray(torch.nn.functional.pad(self._tensor(x), flat))


def _broadcast(self: DeviceArray, x: Any, shape: Any) -> DeviceArray:
    return DeviceArray(self._tensor(x).broadcast_to(shape))


def _linalg() -> Any:
    import torch

    return torch.linalg


def _new(value: float) -> Callable[..., DeviceArray]:
    def call(self: DeviceArray, x: Any) -> DeviceArray:
        import torch

        return DeviceArray(torch.full_like(self._tensor(x), value))

    return call


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "ndim": lambda self, x: self._tensor(x).ndim,
    "sort": lambda self, x, axis=-1: DeviceArray(self._tensor(x).sort(axis).values),
    "where": _where, "concatenate": _joined("cat"), "stack": _joined("stack"), "einsum": _einsum, "pad": _pad,
    "broadcast_to": _broadcast, "zeros_like": _new(0.0), "ones_like": _new(1.0),
    "cumsum": lambda self, x, axis: DeviceArray(self._tensor(x).cumsum(axis)),
    "solve": lambda self, a, b: DeviceArray(_linalg().solve(self._tensor(a), self._tensor(b))),
    "tril": lambda self, x, k=0: DeviceArray(self._tensor(x).tril(k)),
    "flip": lambda self, x, axis: DeviceArray(self._tensor(x).flip(axis)),
    "repeat": lambda self, x, count, axis: x.repeat(count, axis),
    "tile": lambda self, x, count: DeviceArray(self._tensor(x).tile(count)),
    "sum": lambda self, x, axis=None, keepdims=False: x.sum(axis, keepdims),
    "max": lambda self, x, axis=None, keepdims=False: x.max(axis, keepdims),
    "argmax": lambda self, x: int(self._tensor(x).argmax()),
    "swapaxes": lambda self, x, a, b: x.swapaxes(a, b),
    "transpose": lambda self, x, axes=None: x.transpose(*(axes or ())),
    "reshape": lambda self, x, shape: x.reshape(shape),
    "expand_dims": lambda self, x, axis: DeviceArray(self._tensor(x).unsqueeze(axis)),
    "clip": lambda self, x, low, high: DeviceArray(self._tensor(x).clamp(low, high)),
}
