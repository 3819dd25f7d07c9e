"""Integers of 8 bits become floats by byte permutations, not one by one."""

from __future__ import annotations

import ml_dtypes  # noqa: F401  gives NumPy the name bfloat16
import numpy as np
import pytest
from hopper_lowered import lowered

import tilelang.language as T
from tilelang.codegen.cuda.printer import print_kernel
from tilelang.simulator import run_device, run_tile


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
