"""loads_first: a loop over shared memory waited for its latency in every iteration."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hopper_lowered import lowered

import tilelang.language as T
from tilelang.codegen.cuda.printer import print_kernel
from tilelang.ir import For, Load, Store, walk
from tilelang.simulator import run_device, run_tile


def doubled(rows: int, same: bool) -> Any:
    @T.prim_func
    def main(A: T.Tensor((rows, 128), "float16"), B: T.Tensor((rows, 128), "float16")):
        with T.Kernel(1, threads=64):
            a, b = T.alloc_shared((rows, 128), "float16"), T.alloc_shared((rows, 128), "float16")
            T.copy(A, a)
            if same:
                for i, j in T.Parallel(rows, 128):
                    a[i, j] = a[i, j] * T.float16(2)
                T.copy(a, B)
            else:
                for i, j in T.Parallel(rows, 128):
                    b[i, j] = a[i, j] * T.float16(2)
                T.copy(b, B)

    return main


def loading(program: Any) -> list[For]:
    """The unrolled loops that load vectors from shared memory and do nothing else."""
    (kernel,) = lowered(program).kernels
    return [s for s in walk(kernel.launch, For) if s.kind == "unroll" and isinstance(s.body, Store)
            and isinstance(s.body.value, Load) and s.body.value.buffer.scope_name.startswith("shared")]


@pytest.mark.parametrize("same", [False, True])
@pytest.mark.parametrize("rows, ahead", [(8, 1), (32, 1), (128, 0)])
def test_each_iteration_waited_for_its_loads(rows: int, ahead: int, same: bool):
    """Loops whose vectors do not fit a thread's registers stay."""
    program = doubled(rows, same)
    assert len(loading(program)) == ahead
    given = {"A": np.arange(rows * 128).reshape(rows, 128).astype(np.float16), "B": np.zeros((rows, 128), np.float16)}
    assert np.array_equal(run_device(lowered(program), given).outputs["B"], run_tile(program, given)["B"])


@pytest.mark.parametrize("source", ["int8", "uint8"])
@pytest.mark.parametrize("to", ["float16", "bfloat16", "float32"])
def test_integers_of_8_bits_were_converted_one_by_one(source: str, to: str):
    @T.prim_func
    def main(A: T.Tensor((16, 256), source), B: T.Tensor((16, 256), to)):
        with T.Kernel(1, threads=128):
            a, b = T.alloc_shared((16, 256), source), T.alloc_shared((16, 256), to)
            T.copy(A, a)
            for i, j in T.Parallel(16, 256):
                b[i, j] = T.cast(a[i, j], to) + T.cast(1, to)
            T.copy(b, B)

    low = -128 if source == "int8" else 0
    values = np.arange(16 * 256).reshape(16, 256) % 256 + low
    module = lowered(main)
    want = run_tile(main.func, [values.astype(source), np.zeros((16, 256), str(main.func.buffers[1][1].dtype))])["B"]
    got = run_device(module, [values.astype(source), np.zeros_like(want)]).outputs["B"]
    assert np.array_equal(got, want)
    assert "_of_bytes<" in print_kernel(module.kernels[0])
