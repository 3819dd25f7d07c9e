"""block_returns: a return of the whole block is a branch around what follows; other returns stay."""

import numpy as np
import pytest

import tilelang.language as T
from tilelang.ir import Call, walk
from tilelang.simulator import run_device, run_tile
from tilelang.target import Target
from tilelang.transform.legalize.block_returns import block_returns
from tilelang.transform.framework.pass_ import PassContext, run_passes
from tilelang.transform.pipeline import lower

SM80 = Target({"kind": "cuda", "arch": "sm_80"})


def program(where):
    """Rows of A turned round; which ones return before it, and where, is `where`'s."""
    @T.prim_func
    def main(A: T.Tensor((4, 32), "int32"), L: T.Tensor((4,), "int32"), C: T.Tensor((4, 32), "int32")):
        with T.Kernel(4, threads=32) as b:
            tx = T.get_thread_binding()
            if where == "twice":
                if L[b] == 0:
                    C[b, tx] = -7
                    T.thread_return()
                elif L[b] == 3:
                    C[b, tx] = -8
                n = T.alloc_var("int32", init=L[b])
                if n == 1:
                    T.thread_return()
            elif where == "both":
                if L[b] != 2:
                    if L[b] == 0:
                        C[b, tx] = -7
                        T.thread_return()
                    T.thread_return()
            elif where == "other way":
                if L[b] == 2:
                    C[b, tx] = -7
                else:
                    T.thread_return()
            elif where == "some way":
                if L[b] != 2:
                    C[b, tx] = -7
                    if L[b] == 0:
                        T.thread_return()
            elif where == "loop":
                for k in T.serial(2):
                    if L[b] == k:
                        T.thread_return()
            elif where == "threads":
                if tx < L[b]:
                    T.thread_return()
                C[b, tx] = A[b, tx]
            elif where == "end":
                C[b, tx] = L[b]
                T.thread_return()
            if where != "threads":
                S = T.alloc_shared((32,), "int32")
                T.copy(A[b, :], S)
                for i in T.Parallel(32):
                    C[b, i] = S[31 - i]

    return main


@pytest.mark.parametrize("where, left", [("twice", 0), ("both", 0), ("other way", 0), ("some way", 0), ("loop", 0),
                                         ("threads", 1), ("end", 0)])
def test_returns_of_whole_blocks_are_branches(where, left):
    f = program(where).func
    out = run_passes(f, [block_returns], PassContext(SM80, verify=True))
    assert (sum(isinstance(x, Call) and x.op == "thread_return" for x in walk(out.body)) > 0) == (left > 0)
    args = [np.arange(128, dtype=np.int32).reshape(4, 32), np.array([2, 0, 1, 3], np.int32), np.full((4, 32), -1, np.int32)]
    want = run_tile(f, args)["C"]
    turned, full = args[0][:, ::-1], np.full(32, -1)
    rows = {"twice": [turned[0], full - 6, full, turned[3]], "both": [turned[0], full - 6, full, full],
            "other way": [turned[0], full, full, full], "some way": [turned[0], full - 6, turned[2], turned[3]],
            "loop": [turned[0], full, full, turned[3]], "end": [np.full(32, n) for n in args[1]],
            "threads": [np.where(np.arange(32) < n, -1, r) for n, r in zip(args[1], args[0])]}
    assert np.array_equal(want, rows[where])
    assert np.array_equal(run_tile(out, args)["C"], want)
    assert np.array_equal(run_device(lower(f, SM80), args).outputs["C"], want)


@pytest.mark.parametrize("where", ["nested branches", "a loop", "a while loop", "loops in loops", "a vote"])
def test_returns_in_loops_and_nested_branches_kept_tma_away(where):
    @T.prim_func
    def main(A: T.Tensor((2, 64, 128), "float16"), L: T.Tensor((4,), "int32"), C: T.Tensor((2, 64, 64), "float32")):
        with T.Kernel(2, threads=128) as b:
            S = T.alloc_shared((64, 64), "float16")
            acc = T.alloc_fragment((64, 64), "float32")
            if where == "nested branches":
                if L[0] == 1:
                    if b == L[1]:
                        T.thread_return()
                    else:
                        C[b, 0, 0] = 7
            elif where == "a loop":
                for k in T.serial(4):
                    if L[k] == b + 7:
                        T.thread_return()
            elif where == "a while loop":
                n = T.alloc_var("int32", init=0)
                while n < 4:
                    if L[n] == b + 7:
                        T.thread_return()
                    n += 1
            elif where == "loops in loops":
                for i in T.serial(2):
                    for k in T.serial(2):
                        if L[2 * i + k] == b + 7:
                            if i == 1:
                                T.thread_return()
            elif T.syncthreads_or(L[T.get_thread_binding() % 4] == b + 7) != 0:
                T.thread_return()
            T.clear(acc)
            for k in T.Pipelined(2, num_stages=2):
                T.copy(A[b, 0, k * 64], S)
                T.gemm(S, S, acc, transpose_B=True)
            T.copy(acc, C[b, :, :])

    args = [np.random.default_rng(0).integers(-2, 3, (2, 64, 128)).astype(np.float16), np.array([1, 0, 0, 7], np.int32),
            np.full((2, 64, 64), -1, np.float32)]
    want = args[0].astype(np.float32) @ args[0].astype(np.float32).transpose(0, 2, 1)
    want[0] = -1
    lowered = lower(main.func, Target({"kind": "cuda", "arch": "sm_90a"}))
    calls = {x.op for k in lowered.kernels for x in walk(k.launch.body, Call)}
    assert "thread_return" not in calls and ("tma_load" in calls or where == "a vote")
    assert np.array_equal(run_tile(main.func, args)["C"], want)
    assert np.array_equal(run_device(lowered, args).outputs["C"], want)


def test_a_return_in_a_loop_that_some_threads_leave_earlier_stays():
    @T.prim_func
    def main(L: T.Tensor((8,), "int32"), C: T.Tensor((64,), "int32")):
        with T.Kernel(1, threads=64):
            t = T.get_thread_binding()
            s = T.alloc_shared((64,), "int32")
            for k in T.serial(8):
                if t < k * 8:
                    T.loop_break()
                if L[k] == 1:
                    T.thread_return()
            s[t] = t
            T.sync_threads()
            C[t] = s[63 - t]

    lower(main.func, Target({"kind": "cuda", "arch": "sm_80"}))  # an error before: some threads did not reach the barrier
