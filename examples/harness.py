"""What every example shares: where to run, how to compare, a command line made from the check's parameters.

An example is a file with kernels, an independent reference in float64, and checks: functions whose keyword parameters are
the sizes, and `on`, where the kernel runs.  A check returns the Comparison (or several) of what the kernel gave with the
reference.  References are written with NumPy's functions; where there is a GPU, large arrays of `wide` lie there
(device_arrays.py), so that a reference of real size takes milliseconds.
"""

from __future__ import annotations

import inspect
import os
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
from command_line import Run, parser, runs, working
from device_arrays import DeviceArray
from measuring import Measured

import tilelang
from tilelang.errors import TileLangError
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
    where it is given, collects the calls of kernels: on a GPU to be timed later, elsewhere with the time they took.
    """

    target: Any = "auto"
    backend: str | None = None
    measured: Measured | None = None

    def compile(self, program: Any, out_idx: Any = None, **options: Any) -> Callable[..., Any]:
        """The kernel of a prim_func; it takes and gives NumPy arrays."""
        return self._numpy(tilelang.compile(program, out_idx=out_idx, target=self.target,
                                            execution_backend=self.backend, **options), compiled=True)

    def fitting(self, program: Callable[..., Any], *sizes: Any) -> Any:
        """The first of these sizes whose tiles a block of the target has shared memory for (tilelang.first_fitting)."""
        return tilelang.first_fitting(program, *sizes, target=self.target)

    def jit(self, function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        """An eager function or a factory under tilelang.jit; calls take and give NumPy arrays."""
        return self._numpy(self.jit_raw(function, **options), compiled=self.backend is None)

    def jit_raw(self, function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        """The same for tensors of the place itself: NumPy arrays, or torch tensors on the GPU."""
        return tilelang.jit(function, target=self.target, execution_backend=self.backend, **options)

    def library(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function of tilelang.library, which compiles for the device its tensors are on; NumPy arrays in and out."""
        if self.on_gpu:
            return self._numpy(function)
        given = partial(function, target="cpu" if self.target == "auto" else self.target, execution_backend=self.backend)
        return self._numpy(given, compiled=self.backend is None)

    def peer(self, name: str, function: Callable[..., Any], *arrays: Any) -> None:
        """What torch does with the same arrays: timed beside the kernel called last, where calls are measured."""
        if self.measured is not None and self.on_gpu:
            self.measured.beside(name, partial(function, *(to_gpu(a) if isinstance(a, np.ndarray) else a for a in arrays)))

    def work(self, flops: float | None = None, nbytes: float | None = None) -> None:
        """What the kernel called last computes and moves, where its own report cannot say: eager and library functions."""
        if self.measured is not None and self.measured.calls and self.backend is None:  # calls that interpret may be missing
            last = self.measured.calls[-1]
            last.flops, last.bytes = last.flops or flops, last.bytes or nbytes

    @property
    def on_gpu(self) -> bool:
        """Whether tensors must lie in GPU memory."""
        return self.backend not in ("tile", "simulator") and \
            determine_target(self.target, return_object=True).kind.name == "cuda"

    def __str__(self) -> str:
        target = determine_target(self.target, return_object=True)
        name = "the CPU" if target.kind.name == "cpu" else f"the GPU, {target.arch}"
        interpreters = {"tile": "the interpreter of tile programs", "simulator": f"the simulator of {name}"}
        return interpreters.get(self.backend or "", name)

    def _numpy(self, kernel: Callable[..., Any], compiled: bool = False) -> Callable[..., Any]:
        """compiled: a call's time is the kernel's, but for what the first one loads and makes."""
        if not self.on_gpu:
            if self.measured is None or not compiled:
                return kernel
            return self.measured.watched(kernel, warm=self.backend is None)

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
    if determine_target("auto", return_object=True).kind.name != "cuda":  # importing torch takes seconds
        return None
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
    return Comparison(name, float(error[at]), float(np.broadcast_to(limit, error.shape)[at]))


def main(*checks: Callable[..., Any], argv: Sequence[str] | None = None) -> None:
    """Run the checks of an example; every size is an option (--m 4096).

    Prints errors beside what they may be, and how long kernels took.  Exits with status 1 if a result is wrong, with 2 if
    the kernel cannot be made or run as asked.
    """
    given = vars(parser(checks, {"dtype": tuple(NUMPY)}).parse_args(argv))
    os.environ.setdefault("TILELANG_PRINT_ON_COMPILATION", "0")  # what is being done is said here
    measured = Measured()
    on = Place(given.pop("target"), given.pop("backend"), measured)
    try:
        sizes, there = given.pop("sizes"), on.on_gpu
        small = sizes == "small" or sizes == "auto" and not there
        if there and reference_device() is None:
            print("On a GPU the examples need torch with CUDA, for its memory; --target cpu does without.", file=sys.stderr)
            sys.exit(2)
        print((inspect.getdoc(inspect.getmodule(checks[0])) or "").partition("\n")[0])
        print(f"Runs on {on}{', in small sizes (--sizes real for those of a GPU)' if small else ''}.")
        good = all([_run(run, on) for run in runs(checks, given, small)])
    except (TileLangError, ModuleNotFoundError) as e:
        print(e, file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    if not good:
        sys.exit(1)


def _run(run: Run, on: Place) -> bool:
    """Check and time one row."""
    measured = on.measured
    assert measured is not None
    measured.calls.clear()
    if run.hopper and not determine_target(on.target, return_object=True).has_wgmma:
        on = Place({"kind": "cuda", "arch": "sm_90a"}, on.backend or "simulator", measured)
    with working(str(run)) as seconds:
        result = run.check(on=on, **run.sizes)
    found = [result] if isinstance(result, Comparison) else list(result)
    for comparison in found:
        print(f"  {comparison}")
    for call in measured.calls:
        print("  " + ", ".join(x for x in (f"{call.kernel}: {call.figures()[0]}", *call.figures()[1:]) if x))
    print(f"  {seconds[0]:.1f} s with compilation and reference")
    return all(c.ok for c in found)
