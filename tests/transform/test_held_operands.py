"""Columns of an operand that stay in registers during a loop."""

import numpy as np
import pytest

import tilelang.language as T
from tilelang.simulator import run_device, run_tile
from tilelang.target import Target
from tilelang.transform.framework.pass_ import PassContext, run_passes
from tilelang.transform.legalize.held_operands import held_operands
from tilelang.transform.pipeline import DEVICE_PASSES, TILE_PASSES, lower

SM80, SM90A = (Target({"kind": "cuda", "arch": a}) for a in ("sm_80", "sm_90a"))
STEPS = 3


def scores(k=512, columns=64, threads=256, changed=False, kept=False):
    """C = the sum over i of half of A @ B[i]^T, with A in shared memory.  changed: A turns in each iteration.  kept: the sum
    itself is the accumulator."""
    @T.prim_func
    def main(A: T.Tensor((64, k), "float16"), B: T.Tensor((STEPS, columns, k), "float16"),
             C: T.Tensor((64, columns), "float32")):
        with T.Kernel(1, threads=threads):
            a, b = T.alloc_shared((64, k), "float16"), T.alloc_shared((columns, k), "float16")
            s, total = [T.alloc_fragment((64, columns), "float32") for _ in range(2)]
            T.copy(A, a)
            T.clear(s)
            T.clear(total)
            for i in T.Pipelined(STEPS, num_stages=2):
                T.copy(B[i, :, :], b)
                if changed:
                    for x, y in T.Parallel(64, k):
                        a[x, y] = -a[x, y]
                T.gemm(a, b, s, transpose_B=True, clear_accum=not kept, policy=T.GemmWarpPolicy.FullCol)
                if not kept:
                    for x, y in T.Parallel(64, columns):
                        total[x, y] += s[x, y] * 0.5
            if kept:
                for x, y in T.Parallel(64, columns):
                    total[x, y] = s[x, y] * 0.5
            T.copy(total, C)

    return main


CASES = [(dict(), 512), (dict(k=640, columns=32), 640), (dict(columns=32, threads=128), 512), (dict(changed=True), 0),
         (dict(kept=True), 0), (dict(k=128), 0)]


@pytest.mark.parametrize("arguments, columns", CASES, ids=str)
def test_narrow_wgmma_read_an_operand_from_shared_memory_in_every_iteration(arguments, columns):
    """Not where the operand changes, where no other statement needs the accumulator, and where a second block fits an SM."""
    func = scores(**arguments)
    out = lower(func.func, SM90A)
    said = [x for k in out.kernels for x in k.plan.report if "stay in registers" in x]
    assert [int(x.split()[0]) for x in said] == [columns] * bool(columns)
    rng, k, n = np.random.default_rng(0), arguments.get("k", 512), arguments.get("columns", 64)
    given = {"A": rng.integers(-2, 3, (64, k)).astype("float16"), "B": rng.integers(-2, 3, (STEPS, n, k)).astype("float16")}
    signs = [-1 if arguments.get("changed") and i % 2 == 0 else 1 for i in range(STEPS)]
    want = sum(x * (given["A"].astype(float) @ b.T.astype(float)) / 2 for x, b in zip(signs, given["B"]))
    passes = [*TILE_PASSES, *DEVICE_PASSES]
    changed = run_passes(func.func, passes[:passes.index(held_operands) + 1], PassContext(SM90A))
    np.testing.assert_array_equal(run_tile(changed, given)["C"], want)
    for program in (out, lower(func.func, SM80)) if columns == 512 else (out,):
        np.testing.assert_array_equal(run_device(program, given).outputs["C"], want)


def test_columns_that_do_not_fit_the_registers_stay_in_shared_memory():
    """An output of 128 registers leaves room for 13 of 32 steps of K."""
    @T.prim_func
    def main(A: T.Tensor((64, 512), "float16"), B: T.Tensor((STEPS, 64, 512), "float16"), C: T.Tensor((64, 512), "float32")):
        with T.Kernel(1, threads=256):
            a, b = T.alloc_shared((64, 512), "float16"), T.alloc_shared((64, 512), "float16")
            p, s = T.alloc_shared((64, 64), "float16"), T.alloc_fragment((64, 64), "float32")
            out = T.alloc_fragment((64, 512), "float32")
            T.copy(A, a)
            T.clear(out)
            for i in T.Pipelined(STEPS, num_stages=2):
                T.copy(B[i, :, :], b)
                T.gemm(a, b, s, transpose_B=True, clear_accum=True, policy=T.GemmWarpPolicy.FullCol)
                for x, y in T.Parallel(64, 64):
                    p[x, y] = s[x, y] * 0.125
                T.gemm(p, b, out, policy=T.GemmWarpPolicy.FullCol)
            T.copy(out, C)

    out = lower(main.func, SM90A)
    assert any(x.startswith("208 columns of `a` stay in registers") for x in out.kernels[0].plan.report)
    rng = np.random.default_rng(1)
    given = {n: rng.integers(-1, 2, shape).astype("float16") for n, shape in (("A", (64, 512)), ("B", (STEPS, 64, 512)))}
    want = sum((given["A"].astype(float) @ b.T.astype(float)) / 8 @ b.astype(float) for b in given["B"])
    np.testing.assert_array_equal(run_device(out, given).outputs["C"], want)
