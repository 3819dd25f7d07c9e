"""Multiplications and additions in one instruction, where the device compiler may not contract them."""

from __future__ import annotations

import pytest

import tilelang.language as T
from tilelang.codegen import cuda, hip
from tilelang.target import Target
from tilelang.transform.pipeline import lower


@pytest.mark.parametrize("target, text", [("gfx942", ("fmaf(", "fmaf(", "fmaf(-")), ("sm_80", (" * ", " * ", " * "))])
def test_fused_multiplies_are_in_the_text_where_the_compiler_may_not_contract(target, text):
    """The pass fused_multiplies: additions and subtractions on either side."""
    @T.prim_func
    def main(A: T.Tensor((64,), "float32"), B: T.Tensor((64,), "float32"), C: T.Tensor((3, 64), "float32")):
        with T.Kernel(1, threads=64):
            t = T.get_thread_binding()
            C[0, t] = A[t] * B[t] + A[t]
            C[1, t] = A[t] * B[t] - B[t]
            C[2, t] = B[t] - A[t] * B[t]

    (kernel,), printer = lower(main.func, Target(target), {}).kernels, hip if target == "gfx942" else cuda
    lines = [x for x in printer.print_kernel(kernel).splitlines() if x.strip().startswith("C[")]
    assert len(lines) == 3 and all(piece in line for piece, line in zip(text, lines)), lines
    assert sum("fmaf" in x for x in lines) == 3 * (target == "gfx942")
