"""Per-thread programs over shared memory: with the barriers placed they compute what their statements mean one after
another, without a race, and the verifier clears them."""

import numpy as np
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import tilelang.language as T
from tilelang.simulator.device.run import run_device
from tilelang.simulator.reference.run import run_tile
from tilelang.target import Target
from tilelang.transform.framework.pass_ import PassContext
from tilelang.transform.pipeline import lower

N = 64
SM80 = Target({"kind": "cuda", "arch": "sm_80"})


@T.macro
def write(S, A, B, tx, c, row):
    S[(tx + c) % N] = A[tx] + c


@T.macro
def read(S, A, B, tx, c, row):
    B[row, tx] = S[(tx * c + row) % N]


@T.macro
def write_half(S, A, B, tx, c, row):
    if tx < 32:
        S[tx + c % 32] = A[tx] * 2.0


@T.macro
def update_even(S, A, B, tx, c, row):
    if tx % 2 == 0:
        S[tx] = S[tx] + 1.0
        B[row, tx] = S[(tx * 3 + c) % N]


@T.macro
def carry(S, A, B, tx, c, row):
    if tx >= 16:
        x = S[(tx + c) % N] + A[tx]
        S[tx] = x
        B[row, tx] = S[79 - tx] + x


STEPS = (write, read, write_half, update_even, carry)
step = st.tuples(st.sampled_from(STEPS), st.sampled_from((1, 3, 5, 7)), st.booleans())


def program(steps, rounds):
    @T.prim_func
    def main(A: T.Tensor((N,), "float32"), B: T.Tensor((8, N), "float32")):
        with T.Kernel(1, threads=N):
            S = T.alloc_shared((N,), "float32")
            P = T.alloc_shared((N,), "float32")
            tx = T.get_thread_binding(0)
            S[tx] = 0.0
            P[tx] = 1.0
            for _k in T.serial(rounds):
                [f(S if first else P, A, B, tx, c, row) for row, (f, c, first) in enumerate(steps)]

    return main.func


@settings(max_examples=30, deadline=None, derandomize=True, phases=(Phase.explicit, Phase.generate))
@given(st.lists(step, min_size=1, max_size=5), st.sampled_from((1, 3)))
def test_random_programs(steps, rounds):
    f = program(steps, rounds)
    rng = np.random.default_rng(1)
    args = {"A": rng.integers(-4, 5, N).astype(np.float32), "B": np.zeros((8, N), np.float32)}
    lowered = lower(f, cx=PassContext(SM80, verify=True))
    assert lowered.kernels[0].plan.sync_report.startswith("ordered: ")
    np.testing.assert_array_equal(run_device(lowered, args, check=True).outputs["B"], run_tile(f, args)["B"])
