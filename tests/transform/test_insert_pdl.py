"""Launches that begin while the kernel before them ends (transform/sync/insert_pdl.py)."""

import numpy as np
import pytest
from programs import gemm

import tilelang.language as T
from tilelang.codegen.cuda.printer import print_kernel
from tilelang.ir import If, Launch, stmts_of, walk
from tilelang.ir.expr import Call
from tilelang.simulator import run_device
from tilelang.target import Target
from tilelang.transform.analysis.statements import around_launch
from tilelang.transform.sync.insert_pdl import insert_pdl, ordered
from tilelang.transform.memory.simplify import simplify
from tilelang.transform.pipeline import DEVICE_PASSES, lower

SM90A = Target({"kind": "cuda", "arch": "sm_90a"})
ON = {"tl.enable_pdl": True}
SIZES = dict(m=128, n=128, k=96, bm=64, bn=64, bk=32, threads=128, stages=2)


def calls(x):
    return [c.op for c in walk(x) if isinstance(c, Call)]


@pytest.mark.parametrize("cluster", [1, 2])
def test_waits_behind_the_barriers_and_in_front_of_the_roles(cluster):
    program = lower(gemm(**SIZES).func, SM90A, {**ON, "tl.cluster": cluster})
    launch = program.kernels[0].launch
    assert launch.plan.pdl is True and ordered(launch) and launch.plan.cluster == ((2, 1, 1) if cluster == 2 else None)
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
    assert DEVICE_PASSES.index(insert_pdl) > DEVICE_PASSES.index(simplify)
    for target, config in ((SM90A, {}), (Target({"kind": "cuda", "arch": "sm_80"}), ON)):
        launch = lower(gemm(**SIZES).func, target, config).kernels[0].launch
        assert not launch.plan.pdl and "pdl_sync" not in calls(launch)


@T.macro
def multiplied(A, B, C, bx, by):
    a, b = T.alloc_shared((64, 32), "float16"), T.alloc_shared((64, 32), "float16")
    c = T.alloc_fragment((64, 64), "float32")
    T.clear(c)
    for k in T.Pipelined(2, num_stages=2):
        T.copy(A[by * 64, k * 32], a)
        T.copy(B[bx * 64, k * 32], b)
        T.gemm(a, b, c, transpose_B=True)
    T.copy(c, C[by * 64, bx * 64])


@T.prim_func
def two_launches(A: T.Tensor((128, 64), "float16"), B: T.Tensor((128, 64), "float16"), C: T.Tensor((128, 128), "float16"),
                 D: T.Tensor((128, 128), "float16")):
    with T.Kernel(2, 2, threads=128) as (bx, by):
        T.pdl_trigger()
        multiplied(A, B, C, bx, by)
    with T.Kernel(2, 2, threads=128) as (bx, by):
        T.pdl_sync()
        multiplied(B, A, D, bx, by)


def test_a_launch_that_lets_the_next_one_start_is_not_started_early_itself():
    """Else the next one could read what the kernel in front of both has not yet written."""
    first, second = (k.launch for k in lower(two_launches.func, SM90A, ON).kernels)
    assert not first.plan.pdl and calls(first).count("pdl_trigger") == 1 and "pdl_sync" not in calls(first)
    assert second.plan.pdl is True and calls(second).count("pdl_sync") == 1 and "pdl_trigger" not in calls(second)


def copied(by_hand=False):
    @T.prim_func
    def f(A: T.Tensor((256,), "float32"), B: T.Tensor((256,), "float32")):
        with T.Kernel(1, threads=64):
            if by_hand:
                T.pdl_sync()
            for i in T.Parallel(256):
                B[i] = A[i] + 1

    return f.func


def test_what_threads_load_by_themselves_stays_behind_the_wait():
    """The compiler may move a load of what the kernel does not write in front of everything, but not of what it may write."""
    kernel, = lower(copied(), SM90A, ON).kernels
    assert not ordered(kernel.launch) and kernel.launch.plan.pdl is True and "A" in kernel.launch.plan.may_alias
    text = print_kernel(kernel)
    assert "__restrict__ A" not in text and text.index("pdl_sync();") < text.index("pdl_trigger();") < text.index("A[")


def test_launches_that_run_foreign_code_keep_the_order_of_launches():
    @T.prim_func
    def f(A: T.Tensor((256,), "float32"), B: T.Tensor((256,), "float32")):
        with T.Kernel(1, threads=64):
            for i in T.Parallel(256):
                B[i] = T.call_extern("float32", "known_elsewhere", A[i])

    kernel, = lower(f.func, SM90A, ON).kernels
    assert not ordered(kernel.launch) and not kernel.launch.plan.pdl and "__restrict__ A" in print_kernel(kernel)


def test_what_a_program_loads_behind_its_own_wait_stays_there():
    kernel, = lower(copied(by_hand=True), SM90A).kernels
    assert kernel.launch.plan.pdl is True and "A" in kernel.launch.plan.may_alias
    text = print_kernel(kernel)
    assert "__restrict__ A" not in text and text.index("pdl_sync();") < text.index("A[")


@pytest.mark.parametrize("by_hand", [False, True])
def test_what_a_launch_before_has_written_is_loaded_behind_the_wait(by_hand):
    """A workspace that is only read here, and `__restrict__`, could be read before the launch that writes it has ended."""
    @T.prim_func
    def f(A: T.Tensor((256,), "float32"), B: T.Tensor((256,), "float32")):
        sums = T.alloc_global((256,), "float32")
        with T.Kernel(1, threads=64):
            for i in T.Parallel(256):
                sums[i] = A[i] + 1
        with T.Kernel(1, threads=64):
            if by_hand:
                T.pdl_sync()
            for i in T.Parallel(256):
                B[i] = sums[255 - i]

    second = lower(f.func, SM90A, {} if by_hand else ON).kernels[1]
    text = print_kernel(second)
    assert second.launch.plan.pdl is True and "__restrict__ sums" not in text
    assert text.index("pdl_sync();") < text.index("sums[")


def test_the_first_value_of_a_variable_is_loaded_behind_the_wait():
    @T.prim_func
    def f(A: T.Tensor((256,), "float32"), B: T.Tensor((256,), "float32")):
        with T.Kernel(1, threads=64):
            total = T.alloc_var("float32", init=A[T.get_thread_binding()])
            for i in T.serial(1, 4):
                total += A[i * 64 + T.get_thread_binding()]
            B[T.get_thread_binding()] = total

    text = print_kernel(lower(f.func, SM90A, ON).kernels[0])
    assert text.index("pdl_sync();") < text.index("total = A[")


def in_a_row(where):
    @T.prim_func
    def f(A: T.Tensor((128, 64), "float16"), B: T.Tensor((64, 64), "float16"), C: T.Tensor((128, 64), "float32")):
        with T.Kernel(2, threads=128) as bx:
            As, Bs = T.alloc_shared((64, 32), "float16"), T.alloc_shared((32, 64), "float16")
            Cf = T.alloc_fragment((64, 64), "float32")
            if where == "top":
                T.pdl_sync()
                T.pdl_trigger()
            T.clear(Cf)
            if where == "middle":
                T.pdl_sync()
            for k in T.Pipelined(2, num_stages=2):
                T.copy(A[bx * 64, k * 32], As)
                T.copy(B[k * 32, 0], Bs)
                T.gemm(As, Bs, Cf)
            T.copy(Cf, C[bx * 64, 0])
            if where == "end":
                T.pdl_sync()

    return f.func


@pytest.mark.parametrize("where, ops", [("top", ["pdl_sync", "pdl_trigger"]), ("end", ["pdl_sync"]), ("middle", [])])
def test_roles_of_launches_that_wait_at_their_top_or_end(where, ops):
    """What stands in front of all loads, or behind all stores, is not in the way of roles (around_launch)."""
    lowered = lower(in_a_row(where), SM90A, {"tl.enable_hopper": True})
    launch = lowered.kernels[0].launch
    stmts = [c for s in stmts_of(launch.body) for c in [calls(s)] if c]
    if where == "middle":
        assert "in_warp_groups" not in calls(launch) and any("calls pdl_sync itself" in x for x in launch.plan.report)
        return
    at = next(k for k, c in enumerate(stmts) if "in_warp_groups" in c)
    around = [c for c in (stmts[:at] if where == "top" else stmts[at + 1:]) if any(op.startswith("pdl") for op in c)]
    assert around == [[op] for op in ops]
    assert launch.plan.pdl is True and "tma_load" in stmts[at] and not any(op.startswith("pdl") for op in stmts[at])
    head, _, tail = around_launch(next(x for x in walk(in_a_row(where)) if isinstance(x, Launch)))
    assert [op for s in (tail if where == "end" else head) for op in calls(s)] == ops
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-3, 4, s).astype(np.float16) for s in ((128, 64), (64, 64)))
    got = run_device(lowered, {"A": a, "B": b, "C": np.zeros((128, 64), np.float32)})
    assert np.array_equal(got.outputs["C"], a.astype(np.float32) @ b.astype(np.float32))
