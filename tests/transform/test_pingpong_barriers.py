"""Warp groups that take turns, and what becomes of loops in which they have to meet."""

import numpy as np

import tilelang.language as T
from tilelang.ir import Call, walk
from tilelang.simulator import run_device, run_tile
from tilelang.target import Target
from tilelang.transform.pipeline import lower

SM90A = Target({"kind": "cuda", "arch": "sm_90a"})
ROWS, COLS, DEPTH, STEPS = 128, 64, 64, 3


def program(mirrored):
    """Sums of products that start anew, scaled by rows; mirrored: by factors that the other warp group's threads hold."""

    @T.prim_func
    def main(A: T.Tensor((ROWS, DEPTH * STEPS), "float16"), B: T.Tensor((COLS, DEPTH * STEPS), "float16"),
             F: T.Tensor((ROWS,), "float32"), O: T.Tensor((ROWS, COLS), "float32")):
        with T.Kernel(1, threads=256):
            As, Bs = T.alloc_shared((ROWS, DEPTH), "float16"), T.alloc_shared((COLS, DEPTH), "float16")
            P, C = [T.alloc_fragment((ROWS, COLS), "float32") for _ in range(2)]
            row = T.alloc_fragment((ROWS,), "float32")
            T.clear(C)
            T.copy(F, row)
            for k in T.Pipelined(STEPS, num_stages=2):
                T.copy(A[0, k * DEPTH], As)
                T.copy(B[0, k * DEPTH], Bs)
                for i in T.Parallel(ROWS):
                    row[i] = (row[ROWS - 1 - i] if mirrored else row[i]) * 0.5 + 1.0
                T.gemm(As, Bs, P, transpose_B=True, clear_accum=True)
                for i, j in T.Parallel(ROWS, COLS):
                    C[i, j] += P[i, j] * row[i]
            T.copy(C, O)

    return main


def launch_of(mirrored):
    return lower(program(mirrored).func, SM90A).kernels[0].launch


def has_warp_roles(launch):
    return any(isinstance(x, Call) and x.op == "in_warp_groups" for x in walk(launch.body))


def test_roles_were_given_up_where_turns_alone_came_to_a_standstill():
    """The barrier of both groups stands in front of the product: one group waits there, the other for its turn."""
    plain, mirrored = launch_of(False), launch_of(True)
    assert has_warp_roles(plain) and "one GEMM after another" in plain.plan.overlap
    assert not any("compiled without" in line for line in plain.plan.report)
    assert has_warp_roles(mirrored) and "one GEMM after another" not in mirrored.plan.overlap
    assert any("compiled without ping-pong" in line for line in mirrored.plan.report)
    assert mirrored.plan.sync_report.startswith("ordered")


def test_without_turns_the_results_are_the_same():
    rng = np.random.default_rng(0)
    given = {n: rng.integers(-3, 4, s).astype(d) for n, s, d in (
        ("A", (ROWS, DEPTH * STEPS), "float16"), ("B", (COLS, DEPTH * STEPS), "float16"), ("F", (ROWS,), "float32"))}
    for mirrored in (False, True):
        func = program(mirrored).func
        want = run_tile(func, given)["O"]
        for config in ({}, {"tl.ping_pong": False}):
            np.testing.assert_array_equal(run_device(lower(func, SM90A, config), given).outputs["O"], want)
