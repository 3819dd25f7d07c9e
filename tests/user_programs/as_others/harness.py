"""Runs one program on one backend and compares it with its reference."""

import zlib
from typing import Any

import numpy as np

import tilelang
from tilelang import tvm

from .catalogue import Bound, Program

TARGETS: dict[str, Any] = {
    "tile": {"kind": "cuda", "arch": "sm_90a"},
    "cpu": "cpu",
    "sm_80": {"kind": "cuda", "arch": "sm_80"},
    "sm_90a": {"kind": "cuda", "arch": "sm_90a"},
    "cubin": {"kind": "cuda", "arch": "sm_90a"},
    "gpu": "cuda",
}
EXECUTION = {"tile": "tile", "sm_80": "simulator", "sm_90a": "simulator"}


def build(program: Program, backend: str) -> Any:
    """The kernel, compiled for a backend as its author's decorator says."""
    target = TARGETS[backend]
    with tvm.target.Target({"kind": "llvm"} if target == "cpu" else target):
        maker = program.kernel
        primfunc = maker.get_tir(**program.args) if hasattr(maker, "get_tir") else maker(**program.args)
        options = {
            name: getattr(program, name) if getattr(program, name) is not None else getattr(maker, name, None)
            for name in ("out_idx", "pass_configs", "compile_flags")
        }
        return tilelang.compile(primfunc, target=target, execution_backend=EXECUTION.get(backend), **options)


def draw(program: Program) -> list[Any]:
    """The program's inputs: the same in each run."""
    return list(program.inputs(np.random.default_rng(zlib.crc32(program.name.encode()))))


def compare(program: Program, inputs: list[Any], got: list[np.ndarray]) -> None:
    """Compare outputs and changed inputs with the reference within the program's bounds."""
    wanted = program.reference(*inputs)
    wanted = list(wanted) if isinstance(wanted, (tuple, list)) else [wanted]
    bounds = [program.bounds] * len(wanted) if isinstance(program.bounds, Bound) else list(program.bounds)
    assert len(got) == len(wanted) == len(bounds), (len(got), len(wanted), len(bounds))
    for number, (result, expected, bound) in enumerate(zip(got, wanted, bounds, strict=True)):
        expected = np.asarray(expected)
        assert result.shape == expected.shape, f"output {number} has shape {result.shape}, the reference {expected.shape}"
        result, expected = result.astype(np.float64), expected.astype(np.float64)
        error, limit = np.abs(result - expected), bound.of(expected)
        wrong = ~((error <= limit) | (result == expected) | (np.isnan(result) & np.isnan(expected)))
        place = tuple(np.argwhere(wrong)[0]) if wrong.any() else ()
        assert not wrong.any(), (
            f"output {number}: {wrong.sum()} of {wrong.size} wrong, first at {place}: "
            f"{result[place]} for {expected[place]}, bound {limit[place]:.3g}"
        )


def run(program: Program, backend: str) -> None:
    """Compile, run and compare; "cubin" only compiles."""
    kernel = build(program, backend)
    if backend == "cubin":
        assert "__global__" in kernel.get_kernel_source()
        return
    inputs = draw(program)
    given = [np.array(value, order="C") if isinstance(value, np.ndarray) else value for value in inputs]
    if backend == "gpu":
        given = [to_gpu(value) for value in given]
    results = kernel(*given)
    results = [] if results is None else list(results) if isinstance(results, (tuple, list)) else [results]
    results += [given[i] for i in program.changed]
    compare(program, inputs, program.arrange([from_gpu(r) if backend == "gpu" else np.asarray(r) for r in results]))


def to_gpu(value: Any) -> Any:
    """A torch tensor on the GPU with the same bits."""
    import torch  # 2 s

    if not isinstance(value, np.ndarray):
        return value
    if value.dtype.kind in "biu" or value.dtype.name in ("float16", "float32", "float64"):
        return torch.from_numpy(value).cuda()
    return torch.from_numpy(value.view(f"int{8 * value.itemsize}")).view(getattr(torch, value.dtype.name)).cuda()


def from_gpu(tensor: Any) -> np.ndarray:
    """The array of a torch tensor, with the same bits."""
    import torch  # 2 s

    from .catalogue import dtype

    name = str(tensor.dtype).removeprefix("torch.")
    if name == "float4_e2m1fn_x2":
        return tensor.view(torch.int8).cpu().numpy()
    if tensor.dtype.is_floating_point and name not in ("float16", "float32", "float64"):
        return tensor.view(getattr(torch, f"int{8 * tensor.element_size()}")).cpu().numpy().view(dtype(name))
    return tensor.cpu().numpy()
