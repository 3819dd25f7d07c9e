"""Runs one program on every execution this machine has; prints and assembles it for a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np

import tilelang
from tilelang.codegen.cuda import print_kernel
from tilelang.ir import numpy_dtype
from tilelang.runtime import nvrtc
from tilelang.target import Target
from tilelang.transform.pipeline import lower

SM80 = {"kind": "cuda", "arch": "sm_80"}
SM90A = {"kind": "cuda", "arch": "sm_90a"}
EXECUTIONS = {"tile": ("cpu", "tile"), "simulator": (SM80, "simulator"), "cpu": ("cpu", None)}
WITH_HOPPER = {**EXECUTIONS, "sm_90a": (SM90A, "simulator")}  # Hopper's schedules beside the older device's


def run(program: Any, *args: Any, on: str) -> list[np.ndarray]:
    """The tensors of a program after one call, in parameter order.  Parameters not given start as zeros."""
    func = program.func
    full: list[Any] = [a.copy() if isinstance(a, np.ndarray) else a for a in args]
    for p in func.params[len(full):]:
        b = func.buffer_of(p)
        full.append(np.zeros(tuple(int(d) for d in b.shape), numpy_dtype(b.dtype)))
    target, backend = WITH_HOPPER[on]
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

    Tensors travel as bytes, so that every element type does.
    """
    import torch

    func = program.func
    full = list(args)
    for p in func.params[len(full):]:
        b = func.buffer_of(p)
        full.append(np.zeros(tuple(int(d) for d in b.shape), numpy_dtype(b.dtype)))
    sent = []
    for p, a in zip(func.params, full):
        if isinstance(a, np.ndarray):
            b, a = func.buffer_of(p), np.ascontiguousarray(a)
            raw = torch.from_numpy(a.reshape(-1).view(np.uint8).copy()).cuda()
            sent.append(raw.view(b.dtype.as_torch()).reshape(a.shape))
        else:
            sent.append(a)
    tilelang.compile(program, target="cuda")(*sent)
    torch.cuda.synchronize()
    return [t.reshape(-1).view(torch.uint8).cpu().numpy().view(a.dtype).reshape(a.shape)
            for t, a in zip(sent, full) if isinstance(a, np.ndarray)]


def cuda_text(program: Any, arch: str = "sm_80", assemble: bool = True) -> str:
    """The CUDA text of a program of one kernel, accepted by NVRTC where it is installed."""
    (kernel,) = lower(program.func, Target({"kind": "cuda", "arch": arch}), {}).kernels
    text = print_kernel(kernel)
    if assemble and nvrtc.available():
        assert nvrtc.compile_cubin(text, arch).kernels[kernel.name] is not None
    return text
