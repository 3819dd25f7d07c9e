"""Copies into matrix operands go by ldmatrix; others do not."""

import numpy as np
import pytest

import tilelang.language as T
from tilelang.ir import Call, walk
from tilelang.simulator.device.run import run_device
from tilelang.target import Target
from tilelang.transform.pipeline import lower


def operand_program(side, transpose, dtype="float16", threads=128):
    @T.prim_func
    def main(A: T.Tensor((64, 64), dtype), B: T.Tensor((64, 64), dtype), C: T.Tensor((64, 64), "float32")):
        with T.Kernel(1, threads=threads):
            As = T.alloc_shared((64, 64), dtype)
            Bs = T.alloc_shared((64, 64), dtype)
            F = T.alloc_fragment((64, 64), dtype)
            acc = T.alloc_fragment((64, 64), "float32")
            T.copy(A, As)
            T.copy(B, Bs)
            T.clear(acc)
            if side == "a":
                T.copy(As, F)
                T.gemm(F, Bs, acc, transpose_B=transpose)
            else:
                T.copy(Bs, F)
                T.gemm(As, F, acc, transpose_B=transpose)
            T.copy(acc, C)

    return main.func


def loads(program):
    return [x for k in program.kernels for x in walk(k.launch) if isinstance(x, Call) and x.op == "ldmatrix"]


@pytest.mark.parametrize("side", ["a", "b"])
@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("threads", [128, 32])
def test_operand_in_registers_is_loaded_four_matrices_at_a_time(side, transpose, threads):
    program = lower(operand_program(side, transpose, threads=threads), Target({"kind": "cuda", "arch": "sm_80"}))
    assert all(c.options.num == 4 for c in loads(program))
    assert loads(program)[0].options.trans == (side == "b" and not transpose)
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal((64, 64)).astype(np.float16) for _ in "ab")
    report = run_device(program, {"A": a, "B": b, "C": np.zeros((64, 64), np.float32)})
    want = a.astype(np.float64) @ (b.T if transpose else b).astype(np.float64)
    np.testing.assert_allclose(report.outputs["C"], want, atol=1e-3)
    assert all(c.wavefronts == c.ideal for c in report.bank_conflicts)


def test_other_fragments_are_loaded_by_elements():
    @T.prim_func
    def main(A: T.Tensor((64, 64), "float16"), C: T.Tensor((64, 64), "float16")):
        with T.Kernel(1, threads=128):
            S = T.alloc_shared((64, 64), "float16")
            F = T.alloc_fragment((64, 64), "float16")
            T.copy(A, S)
            T.copy(S, F)
            T.copy(F, C)

    assert loads(lower(main.func, Target({"kind": "cuda", "arch": "sm_80"}))) == []
