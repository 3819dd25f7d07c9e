"""Launches that begin while the kernel before them ends (transform/dependent_launch.py)."""

import numpy as np
import pytest
from programs import gemm

import tilelang.language as T
from tilelang.codegen.cuda import print_kernel
from tilelang.ir import If, stmts_of, walk
from tilelang.ir.expr import Call
from tilelang.simulator import run_device
from tilelang.target import Target
from tilelang.transform.dependent_launch import dependent_launch, ordered
from tilelang.transform.pipeline import DEVICE_PASSES, lower

SM90A = Target({"kind": "cuda", "arch": "sm_90a"})
ON = {"tl.dependent_launch": True}
SIZES = dict(m=128, n=128, k=96, bm=64, bn=64, bk=32, threads=128, stages=2)


def calls(x):
    return [c.op for c in walk(x) if isinstance(c, Call)]


@pytest.mark.parametrize("cluster", [1, 2])
def test_waits_behind_the_barriers_and_in_front_of_the_roles(cluster):
    program = lower(gemm(**SIZES).func, SM90A, {**ON, "tl.cluster": cluster})
    launch = program.kernels[0].launch
    assert launch.attr("pdl") is True and ordered(launch) and launch.attr("cluster") == ((2, 1, 1) if cluster == 2 else None)
    stmts = stmts_of(launch.body)
    at = next(n for n, s in enumerate(stmts) if "pdl_sync" in calls(s))
    assert calls(stmts[at]) == ["pdl_sync"] and calls(stmts[at + 1]) == ["pdl_trigger"] and isinstance(stmts[at + 2], If)
    assert ("cluster_sync" if cluster == 2 else "sync_threads") in calls(stmts[at - 1])
    assert not any(op.startswith(("tma_load", "tma_store")) for s in stmts[:at] for op in calls(s))
    text = print_kernel(program.kernels[0])
    assert "griddepcontrol.wait" in text and "griddepcontrol.launch_dependents" in text
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-3, 4, s).astype(np.float16) for s in ((128, 96), (96, 128)))
    got = run_device(program, {"A": a, "B": b, "bias": np.zeros(128, np.float32), "C": np.zeros((128, 128), np.float16)})
    assert np.array_equal(got.outputs["C"], (a.astype(np.float32) @ b.astype(np.float32)).astype(np.float16))


def test_only_where_asked_for_and_from_sm_90_on():
    assert DEVICE_PASSES[-2] is dependent_launch
    for target, config in ((SM90A, {}), (Target({"kind": "cuda", "arch": "sm_80"}), ON)):
        launch = lower(gemm(**SIZES).func, target, config).kernels[0].launch
        assert launch.attr("pdl") is None and "pdl_sync" not in calls(launch)


def copied(by_hand=False):
    @T.prim_func
    def f(A: T.Tensor((256,), "float32"), B: T.Tensor((256,), "float32")):
        with T.Kernel(1, threads=64):
            if by_hand:
                T.pdl_sync()
            for i in T.Parallel(256):
                B[i] = A[i] + 1

    return f.func


def test_threads_that_load_by_themselves_keep_the_order_of_launches():
    """The compiler may move a load of what the kernel does not write in front of everything."""
    kernel, = lower(copied(), SM90A, ON).kernels
    assert not ordered(kernel.launch) and kernel.launch.attr("pdl") is None
    assert "__restrict__ A" in print_kernel(kernel)


def test_what_a_program_loads_behind_its_own_wait_stays_there():
    kernel, = lower(copied(by_hand=True), SM90A).kernels
    assert kernel.launch.attr("pdl") is True and "A" in kernel.launch.attr("may_alias")
    text = print_kernel(kernel)
    assert "__restrict__ A" not in text and text.index("pdl_sync();") < text.index("A[")
