"""Stores to slots that threads take from a counter need no barriers, while the counter only grows."""

import numpy as np
import pytest

import tilelang.language as T
from tilelang.errors import TileLangError
from tilelang.simulator import run_device
from tilelang.target import Target
from tilelang.transform.pipeline import lower

A100 = Target({"kind": "cuda", "arch": "sm_80"})
TURNS = np.arange(64, dtype=np.int32) % 5


def queue(kind):
    """Each thread appends its number X[tx] times to a list in shared memory; variants break what makes that safe."""
    @T.prim_func
    def main(X: T.Tensor((64,), "int32"), Y: T.Tensor((256,), "int32")):
        with T.Kernel(1, threads=64):
            n, q, tx = T.alloc_shared((2,), "int32"), T.alloc_shared((256,), "int32"), T.get_thread_binding()
            p = T.alloc_shared((16, 16), "int32")
            T.fill(n, 0)
            T.fill(q, -1)
            T.fill(p, -1)
            for _e in T.serial(X[tx]):
                at = T.atomic_add(n[1], 0 if kind == "no step" else 1, return_prev=True)
                if kind == "beside":
                    q[at % 8] = tx
                elif kind == "back":
                    T.atomic_add(n[1], -1)
                    q[at] = tx
                elif kind == "reset":
                    n[1] = 0
                    q[at] = tx
                elif kind == "both ways":
                    p[at % 16, 3] = tx
                    p[5, at % 16] = tx
                else:
                    q[at] = tx
            T.sync_threads()
            T.copy(q, Y)

    return main


def test_a_list_that_threads_append_to_in_loops_of_their_own():
    p = lower(queue("plain").func, A100)
    got = run_device(p, [TURNS, np.zeros(256, np.int32)]).outputs["Y"]
    want = np.repeat(np.arange(64), TURNS)
    assert np.array_equal(np.sort(got[:len(want)]), want) and (got[len(want):] == -1).all()


@pytest.mark.parametrize("kind", ["no step", "beside", "back", "reset", "both ways"])
def test_numbers_that_two_threads_may_get(kind):
    with pytest.raises(TileLangError) as e:
        lower(queue(kind).func, A100)
    assert e.value.kind in ("sync-divergent", "update-by-every-thread")


def test_a_list_that_starts_over_each_round():
    """What a plain store sets back is behind a barrier from both sides."""
    @T.prim_func
    def main(X: T.Tensor((64,), "int32"), Y: T.Tensor((3, 256), "int32")):
        with T.Kernel(1, threads=64):
            n, q, tx = T.alloc_shared((1,), "int32"), T.alloc_shared((256,), "int32"), T.get_thread_binding()
            for r in T.serial(3):
                T.fill(q, -1)
                if tx == 0:
                    n[0] = 0
                for _e in T.serial(X[tx]):
                    at = T.atomic_add(n[0], 1, return_prev=True)
                    q[at] = tx + r
                T.copy(q, Y[r, 0:256])

    got = run_device(lower(main.func, A100), [TURNS, np.zeros((3, 256), np.int32)]).outputs["Y"]
    want = np.repeat(np.arange(64), TURNS)
    for r in range(3):
        assert np.array_equal(np.sort(got[r, :len(want)]), want + r) and (got[r, len(want):] == -1).all()
