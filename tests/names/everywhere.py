"""Runs one program on every execution this machine has; prints and assembles it for a GPU.

`pytest --device=gpu` puts the GPU where the device simulator stands, `--device=text` assembles each program beside it.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np

import tilelang
from tilelang.codegen.cuda.printer import print_kernel
from tilelang.ir import numpy_dtype
from tilelang.runtime import nvrtc
from tilelang.target import Target
from tilelang.transform.pipeline import lower

SM80 = {"kind": "cuda", "arch": "sm_80"}
SM90A = {"kind": "cuda", "arch": "sm_90a"}
EXECUTIONS = {"tile": ("cpu", "tile"), "simulator": (SM80, "simulator"), "cpu": ("cpu", None)}
WITH_HOPPER = {**EXECUTIONS, "sm_90a": (SM90A, "simulator")}  # Hopper's schedules beside the older device's


def device_of(backend: Any) -> str:
    """What `--device` asks for in place of the device simulator or beside it: "gpu", "text" or ""."""
    return os.environ.get("TILELANG_TEST_DEVICE", "") if backend == "simulator" else ""


def is_gpu(on: str) -> bool:
    """Whether an execution is a GPU, or the device simulator that `--device=gpu` puts one in place of."""
    return on == "gpu" or device_of(WITH_HOPPER[on][1]) == "gpu"


def run(program: Any, *args: Any, on: str, simulated: bool = False) -> list[np.ndarray]:
    """The tensors of a program after one call, in parameter order.  Parameters not given start as zeros.

    simulated: `--device` changes nothing (a trap or an address of this machine ends all further work on a GPU).
    """
    func = program.func
    full: list[Any] = [a.copy() if isinstance(a, np.ndarray) else a for a in args]
    for p in func.params[len(full):]:
        b = func.buffer_of(p)
        full.append(np.zeros(tuple(int(d) for d in b.shape), numpy_dtype(b.dtype)))
    target, backend = WITH_HOPPER[on]
    device = "" if simulated else device_of(backend)
    if device == "gpu":
        return on_gpu(program, *full)
    if device == "text":
        tilelang.compile(program, target=target)
    tilelang.compile(program, target=target, execution_backend=backend)(*full)
    return [a for a in full if isinstance(a, np.ndarray)]


def everywhere(program: Any, *args: Any, on: Any = EXECUTIONS) -> list[np.ndarray]:
    """`run` on every execution; the results must agree bit for bit, NaN as NaN."""
    results = {name: run(program, *args, on=name) for name in on}
    first = next(iter(results.values()))
    for name, got in results.items():
        for g, w in zip(got, first):
            np.testing.assert_array_equal(g, w, name)
    return first


def on_gpu(program, *args):
    """The arrays after one call on the GPU, in parameter order; tensors not given start as zeros.

    Tensors travel as bytes, so that every element type does, and keep their strides.
    """
    import torch

    func = getattr(program, "func", program)
    full = list(args)
    for p in func.params[len(full):]:
        b = func.buffer_of(p)
        full.append(np.zeros(tuple(int(d) for d in b.shape), numpy_dtype(b.dtype)))
    sent, back = [], []
    for p, a in zip(func.params, full):
        if not isinstance(a, np.ndarray):
            sent.append(a)
            continue
        b = func.buffer_of(p)  # none of a pointer: what lies there is NumPy's to say
        raw, tensor = _sent(a, None if b is None else b.dtype)
        sent.append(tensor)
        back.append((raw, a))
    tilelang.compile(program, target="cuda")(*sent)
    torch.cuda.synchronize()
    return [_received(raw, a) for raw, a in back]


def placed(on: Any) -> dict[str, Any]:
    """What `compile` and `jit` take for an execution, by name or as these settings; `--device=gpu`: a GPU for the simulator."""
    target, backend = WITH_HOPPER[on] if isinstance(on, str) else (on["target"], on.get("execution_backend"))
    return {"target": "cuda"} if device_of(backend) == "gpu" else {"target": target, "execution_backend": backend}


def call(where: dict[str, Any], kernel: Any, *args: Any, **named: Any) -> Any:
    """kernel(*args) with arrays of NumPy, on every execution that `placed` gives.

    A GPU gets copies of them, whose contents come back also when the call raises; its results come back as arrays.
    """
    if where != {"target": "cuda"}:
        return kernel(*args, **named)
    import torch

    sent = [_sent(a) if isinstance(a, np.ndarray) else (None, a) for a in args]
    try:
        out = kernel(*(x for _, x in sent), **named)
    finally:
        torch.cuda.synchronize()
        for (raw, _), a in zip(sent, args):
            if isinstance(a, np.ndarray) and a.flags.writeable:
                a[...] = _received(raw, a)
    if isinstance(out, (list, tuple)):
        return [x.cpu().numpy() for x in out]
    return out.cpu().numpy() if isinstance(out, torch.Tensor) else out


def _sent(a: np.ndarray, dtype: Any = None) -> tuple[Any, Any]:
    """(the bytes of an array on the GPU, the tensor over them).  dtype: of its elements, where NumPy's name is not torch's."""
    import torch

    raw = torch.from_numpy(_bytes_of(a)).cuda()
    kind = getattr(torch, a.dtype.name) if dtype is None else dtype.as_torch()
    return raw, raw.view(kind).as_strided(a.shape, tuple(s // a.itemsize for s in a.strides))


def _received(raw: Any, a: np.ndarray) -> np.ndarray:
    """What lies on the GPU now, with type, shape and strides of the array that was sent."""
    return np.ndarray(a.shape, a.dtype, raw.cpu().numpy(), 0, a.strides)


def _bytes_of(a: np.ndarray) -> np.ndarray:
    """A copy of the memory an array spans from its first element on (strides that are not negative)."""
    span = a.itemsize + sum((n - 1) * s for n, s in zip(a.shape, a.strides)) if a.size else 0
    whole = a.reshape(a.shape or (1,)).view(f"V{a.itemsize}")  # NumPy knows the strides of its own types alone
    return np.lib.stride_tricks.as_strided(whole, (span // a.itemsize,), (a.itemsize,)).copy().view(np.uint8)


def cuda_text(program: Any, arch: str = "sm_80", assemble: bool = True) -> str:
    """The CUDA text of a program of one kernel, accepted by NVRTC where it is installed."""
    (kernel,) = lower(program.func, Target({"kind": "cuda", "arch": arch}), {}).kernels
    text = print_kernel(kernel)
    if assemble and nvrtc.available():
        assert nvrtc.compile_cubin(text, arch).kernels[kernel.name] is not None
    return text
