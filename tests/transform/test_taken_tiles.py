"""Tiles of a length that is known in the kernel only: blocks take them from a counter."""

import numpy as np
import pytest

import tilelang
import tilelang.language as T
from tilelang.codegen.cuda.printer import print_kernel
from tilelang.target import Target
from tilelang.transform.pipeline import lower

SM90 = {"kind": "cuda", "arch": "sm_90a"}
ENDS = np.array([0, 70, 70, 198, 230], np.int32)  # the second sequence is empty


def ragged(guard: bool = True):
    """Each row times the sum of all 64-row blocks of its sequence."""
    rows = int(ENDS[-1])

    @T.prim_func
    def f(Q: T.Tensor((rows, 64), "float16"), K: T.Tensor((rows, 64), "float16"), ends: T.Tensor((len(ENDS),), "int32"),
          Y: T.Tensor((rows, 64), "float32")):
        with T.Kernel(3, len(ENDS) - 1, threads=128) as (x, b):
            q, k = T.alloc_shared((64, 64), "float16"), T.alloc_shared((64, 64), "float16")
            acc = T.alloc_fragment((64, 64), "float32")
            first, length = ends[b], ends[b + 1] - ends[b]
            if x * 64 < length if guard else True:
                T.copy(Q[first + x * 64:first + x * 64 + 64, :], q)
                T.clear(acc)
                for step in T.Pipelined(T.ceildiv(length, 64), num_stages=2):
                    T.copy(K[first + step * 64:first + step * 64 + 64, :], k)
                    T.gemm(q, k, acc, transpose_B=True)
                for i, j in T.Parallel(64, 64):
                    if x * 64 + i < length:
                        Y[first + x * 64 + i, j] = acc[i, j]

    return f


def wanted(q, k):
    out = np.zeros((len(q), 64), np.float32)
    k = np.concatenate([k, np.zeros((64, 64), k.dtype)]).astype(np.float32)
    for a, b in zip(ENDS, ENDS[1:]):
        blocks = sum((k[s:s + 64] for s in range(a, b, 64)), np.zeros((64, 64), np.float32))
        out[a:b] = q[a:b].astype(np.float32) @ blocks.T
    return out


def agrees(program, **options):
    rng = np.random.default_rng(1)
    q, k = (rng.integers(-4, 5, (int(ENDS[-1]), 64)).astype(np.float16) for _ in range(2))
    y = np.full((len(q), 64), np.nan, np.float32)
    kernel = tilelang.compile(program, **options)
    kernel(q, k, ENDS, y)
    assert np.array_equal(y, wanted(q, k))
    return kernel


@pytest.mark.parametrize("blocks, guard", [(1, True), (2, True), (5, True), (2, False)])
def test_blocks_of_unknown_length_were_no_tiles(blocks: int, guard: bool):
    kernel = agrees(ragged(guard), target=SM90, execution_backend="simulator", pass_configs={"tl.persistent": blocks})
    (facts,) = kernel.report_data["kernels"]
    assert facts["declined"] == [f"persistent: {blocks} blocks take tiles from a counter"]
    assert "ordered" in kernel.sync_report()


@pytest.mark.parametrize("options", [
    dict(target="cpu", execution_backend="tile"), dict(target={"kind": "cuda", "arch": "sm_80"}, execution_backend="simulator"),
    dict(target=SM90, execution_backend="simulator")], ids=["reference", "sm_80", "sm_90a"])
def test_other_executions_of_tiles_of_unknown_length(options):
    agrees(ragged(), **options)


def test_the_counter_had_the_name_of_a_tensor():
    @T.prim_func
    def f(A: T.Tensor((64, 64), "float16"), n: T.Tensor((1,), "int32"), tiles_taken: T.Tensor((256, 64), "float32")):
        with T.Kernel(4, threads=128) as x:
            a, c = T.alloc_shared((64, 64), "float16"), T.alloc_fragment((64, 64), "float32")
            T.clear(c)
            for _ in T.Pipelined(n[0], num_stages=2):
                T.copy(A, a)
                T.gemm(a, a, c)
            for i, j in T.Parallel(64, 64):
                tiles_taken[x * 64 + i, j] = c[i, j]

    text = print_kernel(lower(f.func, Target(SM90), {"tl.persistent": 2}).kernels[0])
    assert "float* __restrict__ tiles_taken" in text and "int* __restrict__ tiles_taken_1" in text
    assert "atomic_add<0>(&tiles_taken_1[0], 1)" in text


def test_few_tiles_of_unknown_length_keep_their_blocks():
    """A counter is allocated and cleared for each call."""
    (kernel,) = lower(ragged().func, Target(SM90), {}).kernels
    assert "counter" not in " ".join(kernel.launch.plan.report)
