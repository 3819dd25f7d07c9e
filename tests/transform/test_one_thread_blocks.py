"""Launches without `threads`: one thread a block on the CPU, 128 on GPUs and wherever the body uses threads by itself."""

import numpy as np
import pytest

import tilelang
import tilelang.language as T
from tilelang.ir import Launch, walk
from tilelang.target import Target
from tilelang.transform.framework.pass_ import PassContext
from tilelang.transform.legalize.legalize import legalize

CUDA = {"kind": "cuda", "arch": "sm_80"}
WAYS = [("cpu", "cython", 1), ("cpu", "tile", 1), (CUDA, "tile", 128), (CUDA, "simulator", 128)]


@T.prim_func
def counted(A: T.Tensor((4,), "int32")):
    with T.Kernel(4) as b:
        T.sync_threads()
        T.atomic_add(A[b], 1)


@T.prim_func
def by_extent(A: T.Tensor((4,), "int32")):
    with T.Kernel(4) as b:
        T.atomic_add(A[b], T.get_thread_extent(0))


@T.prim_func
def by_index(A: T.Tensor((4,), "int32")):
    with T.Kernel(4) as b:
        T.atomic_add(A[b], T.get_thread_binding())


@T.prim_func
def by_vote(A: T.Tensor((4,), "int32")):
    with T.Kernel(4) as b:
        n = T.syncthreads_count(A[b] == 0)
        T.atomic_max(A[b], n)


@T.prim_func
def given(A: T.Tensor((4,), "int32")):
    with T.Kernel(4, threads=128) as b:
        T.atomic_add(A[b], 1)


def run(program, target, backend):
    a = np.zeros(4, "int32")
    tilelang.compile(program, target=target, execution_backend=backend)(a)
    return a.tolist()


@pytest.mark.parametrize("target, backend, times", WAYS, ids=["cpu", "cpu by the reference", "reference", "simulator"])
def test_an_atomic_of_a_cpu_block_happened_128_times(target, backend, times):
    assert run(counted, target, backend) == [times] * 4


@pytest.mark.parametrize("program, want", [(by_extent, 128 * 128), (by_index, 127 * 64), (by_vote, 128), (given, 128)],
                         ids=lambda x: getattr(x, "__name__", ""))
def test_a_body_that_uses_threads_has_128_everywhere(program, want):
    for target, backend, _ in WAYS[:3]:
        assert run(program, target, backend) == [want] * 4


def test_a_print_of_a_cpu_block_was_128_lines(capfd):
    @T.prim_func
    def f(A: T.Tensor((4,), "int32")):
        with T.Kernel(2) as b:
            T.print(A[b], msg="here")

    for backend in ("cython", "tile"):
        run(f, "cpu", backend)
        assert capfd.readouterr().out.count("here") == 2


def test_the_pass_leaves_other_targets_alone():
    threads = {kind: next(walk(legalize(counted.func, PassContext(kind and Target(kind))).body, Launch)).threads
               for kind in (None, "cpu")}
    assert threads == {None: (128, 1, 1), "cpu": (1, 1, 1)}
    kept = legalize(given.func, PassContext(Target("cpu")))
    assert next(walk(kept.body, Launch)).threads == next(walk(given.func.body, Launch)).threads
