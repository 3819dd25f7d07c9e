"""What blocks hand on by atomics that release and acquire is no race; everything else between blocks stays one."""

import numpy as np
import pytest

import tilelang.language as T
from tilelang.errors import TileLangError
from tilelang.simulator import run_device
from tilelang.target import Target
from tilelang.transform.pipeline import lower

A100 = Target({"kind": "cuda", "arch": "sm_80"})
N, BLOCKS = 64, 4
DATA, FLAGS = np.arange(BLOCKS * N, dtype=np.int32), np.zeros(BLOCKS, np.int32)


def outcome(program):
    """"ordered", or the kind of the error; the outputs when there is none."""
    p = lower(program.func, A100)
    given = {"X": DATA, "W": np.zeros_like(DATA), "Flag": FLAGS, "Y": np.zeros_like(DATA)}
    try:
        return "ordered", run_device(p, [given[b.name] for _, b in program.func.buffers]).outputs
    except TileLangError as e:
        return e.kind, str(e)


def handed_on(release="release", acquire="acquire", barriers=True, late=False, update=False):
    """Block b writes its part of W and sets its flag; the next one waits for that and reads what was written."""
    @T.prim_func
    def main(X: T.Tensor((BLOCKS * N,), "int32"), W: T.Tensor((BLOCKS * N,), "int32"), Flag: T.Tensor((BLOCKS,), "int32"),
             Y: T.Tensor((BLOCKS * N,), "int32")):
        with T.Kernel(BLOCKS, threads=N) as b:
            tx, seen = T.get_thread_binding(), T.alloc_var("int32", init=0)
            if tx == 0 and b > 0:
                while seen == 0:
                    if acquire == "acquire":
                        seen = T.atomic_load(Flag[b - 1], memory_order="acquire")
                    else:
                        seen = T.atomic_add(Flag[b - 1], 0, memory_order=acquire, return_prev=True)
            if barriers:
                T.sync_threads()
            if b > 0:
                Y[b * N + tx] = W[(b - 1) * N + N - 1 - tx]
            if not late:
                W[b * N + tx] = X[b * N + tx] + 1
            if barriers:
                T.sync_threads()
            if tx == 0:
                if update:
                    T.atomic_add(Flag[b], 1, memory_order=release)
                else:
                    T.atomic_store(Flag[b], 1, memory_order=release)
            if late:
                W[b * N + tx] = X[b * N + tx] + 1

    return main


@pytest.mark.parametrize("orders", [("release", "acquire", False), ("seq_cst", "acquire", False), ("release", "acq_rel", True),
                                    ("acq_rel", "acquire", True)])
def test_a_flag_hands_on_what_was_written_before_it(orders):
    release, acquire, update = orders
    kind, got = outcome(handed_on(release, acquire, update=update))
    assert kind == "ordered", got
    want = (DATA + 1).reshape(BLOCKS, N)[:, ::-1]
    assert np.array_equal(got["Y"].reshape(BLOCKS, N)[1:], want[:-1])


@pytest.mark.parametrize("change", [{"release": "relaxed"}, {"acquire": "relaxed"}, {"acquire": "release"}, {"barriers": False},
                                    {"late": True}], ids=str)
def test_what_is_missing_is_found(change):
    """Plain orders, no barrier between the threads of a block and the one that sets the flag, a flag set too early."""
    kind, text = outcome(handed_on(**change))
    assert kind == "sim-race" and "ones that release and acquire" in text, text


def test_what_two_blocks_left_at_one_counter_and_what_a_third_knew_of_a_fourth():
    """Updates keep what earlier ones released; a block hands on what was handed to it; the last one starts over."""
    @T.prim_func
    def main(X: T.Tensor((BLOCKS * N,), "int32"), W: T.Tensor((BLOCKS * N,), "int32"), Flag: T.Tensor((BLOCKS,), "int32"),
             Y: T.Tensor((BLOCKS * N,), "int32")):
        with T.Kernel(BLOCKS, threads=N) as b:
            tx, last = T.get_thread_binding(), T.alloc_shared((1,), "int32")
            W[b * N + tx] = X[b * N + tx] + 1
            T.sync_threads()
            if tx == 0:
                last[0] = T.atomic_add(Flag[b // 2], 1, memory_order="acq_rel", return_prev=True)
                if last[0] == 1:
                    last[0] = 2 + T.atomic_add(Flag[2], 1, memory_order="acq_rel", return_prev=True)
            T.sync_threads()
            if last[0] == 3:
                for k in T.serial(BLOCKS):
                    Y[k * N + tx] = W[k * N + N - 1 - tx]
                    W[k * N + N - 1 - tx] = 0
                if tx < BLOCKS:
                    Flag[tx] = 0

    kind, got = outcome(main)
    assert kind == "ordered", got
    assert np.array_equal(got["Y"], (DATA + 1).reshape(BLOCKS, N)[:, ::-1].reshape(-1))
    assert not got["W"].any() and not got["Flag"].any()


def test_blocks_that_run_side_by_side():
    """Those of a grid with a barrier of its own have their clocks in common."""
    @T.prim_func
    def main(X: T.Tensor((BLOCKS * N,), "int32"), W: T.Tensor((BLOCKS * N,), "int32"), Flag: T.Tensor((BLOCKS,), "int32"),
             Y: T.Tensor((BLOCKS * N,), "int32")):
        with T.Kernel(BLOCKS, threads=N) as b:
            tx, last = T.get_thread_binding(), T.alloc_shared((1,), "int32")
            T.sync_grid()
            W[b * N + tx] = X[b * N + tx] + 1
            T.sync_threads()
            if tx == 0:
                last[0] = T.atomic_add(Flag[0], 1, memory_order="acq_rel", return_prev=True)
            T.sync_threads()
            if last[0] == BLOCKS - 1:
                for k in T.serial(BLOCKS):
                    Y[k * N + tx] = W[k * N + N - 1 - tx]

    kind, got = outcome(main)
    assert kind == "ordered", got
    assert np.array_equal(got["Y"], (DATA + 1).reshape(BLOCKS, N)[:, ::-1].reshape(-1))
