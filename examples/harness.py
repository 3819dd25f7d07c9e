"""What every example shares: where to run, how to compare, a command line made from the check's parameters.

An example is a file with kernels, an independent reference in float64, and checks: functions whose keyword parameters are
the sizes, and `on`, where the kernel runs.  A check returns the Comparison (or several) of what the kernel gave with the
reference.  References are written with NumPy's functions; where there is a GPU, large arrays of `wide` lie there
(device_arrays.py), so that a reference of real size takes milliseconds.
"""

from __future__ import annotations

import argparse
import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a checkout works without being installed
sys.path.insert(0, str(Path(__file__).resolve().parent))

import ml_dtypes
import numpy as np
from device_arrays import DeviceArray
from measuring import Measured

import tilelang
from tilelang.target import determine_target

# Half a unit in the last place of 1.0: rounding to the type changes x by at most EPS * |x|.
EPS = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24, "tf32": 2.0**-11,
       "float8_e4m3fn": 2.0**-4, "float8_e5m2": 2.0**-3, "int32": 0.0, "int8": 0.0}
NUMPY = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32, "int8": np.int8,
         "int32": np.int32, "uint8": np.uint8, "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
         "float8_e5m2": ml_dtypes.float8_e5m2}


@dataclass(frozen=True)
class Place:
    """Where kernels run: a target ("auto" is the GPU if there is one, else the CPU) and an execution backend.

    backend "tile" interprets the tile program, "simulator" the lowered GPU program; None runs compiled code.  measured,
    where it is given, collects the calls made on a GPU, to be timed later.
    """

    target: Any = "auto"
    backend: str | None = None
    measured: Measured | None = None

    def compile(self, program: Any, out_idx: Any = None, **options: Any) -> Callable[..., Any]:
        """The kernel of a prim_func; it takes and gives NumPy arrays."""
        return self._numpy(tilelang.compile(program, out_idx=out_idx, target=self.target,
                                            execution_backend=self.backend, **options))

    def jit(self, function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        """An eager function or a factory under tilelang.jit; calls take and give NumPy arrays."""
        return self._numpy(self.jit_raw(function, **options))

    def jit_raw(self, function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        """The same for tensors of the place itself: NumPy arrays, or torch tensors on the GPU."""
        return tilelang.jit(function, target=self.target, execution_backend=self.backend, **options)

    def library(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function of tilelang.library, which compiles for the device its tensors are on; NumPy arrays in and out."""
        if self.on_gpu:
            return self._numpy(function)
        return partial(function, target="cpu" if self.target == "auto" else self.target, execution_backend=self.backend)

    def peer(self, name: str, function: Callable[..., Any], *arrays: Any) -> None:
        """What torch does with the same arrays: timed beside the kernel called last, where calls are measured."""
        if self.measured is not None and self.on_gpu:
            self.measured.beside(name, partial(function, *(to_gpu(a) if isinstance(a, np.ndarray) else a for a in arrays)))

    def work(self, flops: float | None = None, nbytes: float | None = None) -> None:
        """What the kernel called last computes and moves, where its own report cannot say: eager and library functions."""
        if self.measured is not None and self.measured.calls:
            last = self.measured.calls[-1]
            last.flops, last.bytes = last.flops or flops, last.bytes or nbytes

    @property
    def on_gpu(self) -> bool:
        """Whether tensors must lie in GPU memory."""
        return self.backend not in ("tile", "simulator") and \
            determine_target(self.target, return_object=True).kind.name == "cuda"

    def _numpy(self, kernel: Callable[..., Any]) -> Callable[..., Any]:
        if not self.on_gpu:
            return kernel

        def call(*args: Any, **kwargs: Any) -> Any:
            sent, options = ([to_gpu(a) if isinstance(a, np.ndarray) else a for a in x] for x in (args, kwargs.values()))
            run = partial(kernel, *sent, **dict(zip(kwargs, options)))
            out = run()
            for array, tensor in zip(args, sent):  # tensors a kernel writes in place come back too
                if isinstance(array, np.ndarray) and array.flags.writeable and array.size:
                    array[...] = from_gpu(tensor)
            result = [from_gpu(o) for o in out] if isinstance(out, (list, tuple)) else None if out is None else from_gpu(out)
            if self.measured is not None:
                self.measured.called(kernel, run)
            return result

        return call


HERE = Place()


def to_gpu(array: np.ndarray) -> Any:
    """A torch tensor on the GPU with the array's bits, shape and strides."""
    return to_device(array, "cuda")


def to_device(array: np.ndarray, device: Any) -> Any:
    """The same on any torch device."""
    import torch

    if not array.flags.writeable:  # torch warns of them, whatever is done with the tensor
        array = array.copy()
    if array.dtype.kind in "V" or array.dtype.type.__module__.startswith("ml_dtypes"):  # torch reads no ml_dtypes
        bits = array.view({1: np.uint8, 2: np.int16}[array.itemsize])
        return torch.from_numpy(bits).to(device).view(getattr(torch, array.dtype.name))
    return torch.from_numpy(array).to(device)


def from_gpu(tensor: Any) -> np.ndarray:
    """The NumPy array of a torch tensor."""
    import torch

    tensor = tensor.detach().cpu()
    name = str(tensor.dtype).removeprefix("torch.")
    if tensor.dtype == torch.bfloat16 or name.startswith("float8"):
        return tensor.view({1: torch.uint8, 2: torch.int16}[tensor.element_size()]).numpy().view(NUMPY[name])
    return tensor.numpy()


LEAST_ON_DEVICE = 1 << 14  # elements; smaller arrays are not worth the way


@cache
def reference_device() -> Any:
    """The torch device that references are computed on; None: NumPy on the CPU."""
    try:
        import torch
    except ImportError:
        return None
    return torch.device("cuda") if torch.cuda.is_available() else None


def wide(x: Any) -> Any:
    """float64 copy: references are computed in it."""
    if isinstance(x, DeviceArray):
        return DeviceArray(x.tensor.double())
    x, device = np.asarray(x), reference_device()
    if device is None or x.size < LEAST_ON_DEVICE:
        return x.astype(np.float64)
    return DeviceArray(to_device(x, device).double())


def normal(shape: Any, dtype: str = "float32", seed: int = 0) -> np.ndarray:
    """Standard normal values, or for integer types values in [-8, 8)."""
    rng = np.random.default_rng(seed)
    if dtype.startswith("int"):
        return rng.integers(-8, 8, shape).astype(NUMPY[dtype])
    return rng.standard_normal(shape, np.float32).astype(NUMPY[dtype])


def product(a: Any, b: Any) -> Any:
    """a @ b in float64."""
    return wide(a) @ wide(b)


def product_bound(a: np.ndarray, b: np.ndarray, dtype: str, out: str, acc: str = "float32") -> float:
    """Allowed error of a @ b (float64 operands), products summed in acc, one rounding to out.

    Every partial sum is at most |a| @ |b| and each addition rounds by EPS[acc] of it; over k additions the roundings
    behave like a random walk, so they grow with sqrt(k): four standard deviations.  float32 operands go through tf32.
    """
    k = a.shape[-1]
    error = 4 * EPS[acc] * k**0.5 * float(product(np.abs(a), np.abs(b)).max(initial=0.0))
    error += EPS[out] * float(np.abs(product(a, b)).max(initial=0.0))
    if dtype == "float32":
        error += 8 * EPS["tf32"] * float(product(a**2, b**2).max(initial=0.0)) ** 0.5
    return error


@dataclass(frozen=True)
class Comparison:
    """The element that uses the largest part of its bound."""

    name: str
    error: float
    bound: float

    @property
    def ok(self) -> bool:
        return self.error <= self.bound

    def __str__(self) -> str:
        return f"{self.name}: {'ok' if self.ok else 'WRONG'}, error {self.error:.3g}, allowed {self.bound:.3g}"


def compare(name: str, got: Any, want: Any, bound: Any = 0.0) -> Comparison:
    """Compare outputs with their reference; bound is one number or one per element (0: bit for bit).

    Elements where both are the same infinity, or both NaN, are equal.
    """
    g, w = wide(got), wide(want)
    if g.shape != w.shape:
        return Comparison(f"{name} has shape {g.shape}, expected {w.shape}", np.inf, 0.0)
    limit = np.broadcast_to(bound, w.shape) if np.ndim(bound) else float(bound)
    with np.errstate(invalid="ignore"):
        error = np.where((g == w) | (np.isnan(g) & np.isnan(w)), 0.0, np.abs(g - w))
    error = np.where(np.isnan(error), np.inf, error)
    if not error.size:
        return Comparison(name, 0.0, 0.0)
    with np.errstate(over="ignore"):
        used = np.where(error == 0, 0.0, error / np.maximum(limit, np.finfo(np.float64).tiny))
    at = np.unravel_index(int(np.argmax(used)), error.shape)
    return Comparison(name, float(error[at]), float(limit[at] if np.ndim(bound) else limit))


def main(*checks: Callable[..., Any], argv: Sequence[str] | None = None) -> None:
    """Run the checks of an example; every size is an option (--m 4096).  Exits with status 1 if one is wrong."""
    parser = argparse.ArgumentParser(description=inspect.getdoc(inspect.getmodule(checks[0])),
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="auto", help="auto, cuda, cpu")
    parser.add_argument("--backend", default=None, help="tile or simulator: interpret instead of running compiled code")
    sizes: dict[str, Any] = {}
    for check in checks:
        for name, parameter in inspect.signature(check).parameters.items():
            if name != "on" and name not in sizes:
                sizes[name] = parameter.default
                if isinstance(parameter.default, bool):
                    parser.add_argument(f"--{name}", action=argparse.BooleanOptionalAction, default=None)
                else:
                    parser.add_argument(f"--{name}", type=type(parameter.default), default=None,
                                        help=f"default {parameter.default}")
    given = vars(parser.parse_args(argv))
    on = Place(given.pop("target"), given.pop("backend"))
    good = True
    for check in checks:
        taken = inspect.signature(check).parameters
        result = check(on=on, **{k: v for k, v in given.items() if v is not None and k in taken})
        for comparison in [result] if isinstance(result, Comparison) else result:
            print(comparison)
            good &= comparison.ok
    if not good:
        sys.exit(1)
