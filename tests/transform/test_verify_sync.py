"""The verifier clears what the pipeline makes, and finds planted faults in it."""

import pytest

import tilelang.language as T
from tilelang.ir import Binary, Const, Evaluate, Store, const, load, replace, rewrite, seq, walk
from tilelang.ir.build import call
from tilelang.target import Target
from tilelang.transform.framework.pass_ import PassContext, run_passes
from tilelang.transform.pipeline import DEVICE_PASSES, TILE_PASSES
from tilelang.transform.check.verify_sync import verify_sync
from tilelang.transform.verify_sync.launch import check_launch

SM80 = Target({"kind": "cuda", "arch": "sm_80"})


def gemm(stages, k=256, dynamic=False):
    K = T.dynamic("K") if dynamic else k

    @T.prim_func
    def main(A: T.Tensor((64, K), "float16"), B: T.Tensor((K, 64), "float16"), C: T.Tensor((64, 64), "float32")):
        with T.Kernel(1, threads=64):
            a = T.alloc_shared((64, 32), "float16")
            b = T.alloc_shared((32, 64), "float16")
            c = T.alloc_fragment((64, 64), "float32")
            T.clear(c)
            for ko in T.Pipelined(T.ceildiv(K, 32), num_stages=stages):
                T.copy(A[0, ko * 32], a)
                T.copy(B[ko * 32, 0], b)
                T.gemm(a, b, c)
            T.copy(c, C)

    return main.func


def lowered(f):
    passes = [p for p in (*TILE_PASSES, *DEVICE_PASSES) if p is not verify_sync]
    return run_passes(f, passes, PassContext(SM80, verify=True)).body


def calls(s, op):
    return sum(isinstance(x, Evaluate) and x.call.op == op for x in walk(s))


@pytest.mark.parametrize("stages, barriers", [(0, 2), (1, 2), (2, 1), (3, 1), (4, 1)])
@pytest.mark.parametrize("dynamic", [False, True])
def test_gemm_is_cleared(stages, barriers, dynamic):
    launch = lowered(gemm(stages, dynamic=dynamic))
    assert calls(launch, "sync_threads") == barriers
    text, faults = check_launch(launch)
    assert faults == [] and text.startswith("ordered: ") and "a, b" in text


def without(launch, op):
    return rewrite(launch, lambda x: seq() if isinstance(x, Evaluate) and x.call.op == op else None)


@pytest.mark.parametrize("stages", [0, 1, 2, 3, 4])
def test_a_removed_barrier_is_found(stages):
    _, faults = check_launch(without(lowered(gemm(stages)), "sync_threads"))
    assert any("without a barrier in between" in f.message and f.exact for f in faults)


def test_each_single_barrier_is_needed():
    launch = lowered(gemm(1))
    barriers = [x for x in walk(launch) if isinstance(x, Evaluate) and x.call.op == "sync_threads"]
    for gone in barriers:
        _, faults = check_launch(rewrite(launch, lambda x: seq() if x is gone else None))  # noqa: B023
        assert faults


def test_a_wrong_wait_count_is_found():
    def fn(x):
        if isinstance(x, Evaluate) and x.call.op == "cp_async_wait" and x.call.options.n == 1:
            return replace(x, call=call("cp_async_wait", (), "void", n=2))

    _, faults = check_launch(rewrite(lowered(gemm(3)), fn))
    assert any("while an asynchronous copy to it is in flight" in f.message for f in faults)


def test_a_swapped_slot_is_found():
    def fn(x):
        if isinstance(x, Binary) and x.op == "floormod" and isinstance(x.b, Const) and x.b.value == 3 and isinstance(
                x.a, Binary) and isinstance(x.a.b, Const) and x.a.b.value == 2:
            return (x.a.a + 1) % 3

    _, faults = check_launch(rewrite(lowered(gemm(3)), fn))
    assert faults


def test_a_barrier_in_a_divergent_branch_is_found():
    from tilelang.ir import If

    launch = lowered(gemm(2))
    tx = launch.thread_vars[0]
    _, faults = check_launch(rewrite(launch, lambda x: If(tx < 32, x) if isinstance(x, Evaluate) and
                                     x.call.op == "sync_threads" else None))
    assert any("is reached by 32 of 64 threads" in f.message for f in faults)


def test_the_pass_reports_and_refuses():
    f = gemm(2)
    passes = [p for p in (*TILE_PASSES, *DEVICE_PASSES) if p is not verify_sync]
    low = run_passes(f, passes, PassContext(SM80))
    ok = run_passes(low, [verify_sync], PassContext(SM80))
    assert ok.body.plan.sync_report.startswith("ordered: ")
    broken = replace(low, body=without(low.body, "sync_threads"))
    with pytest.raises(ValueError, match="is touched by two threads without a barrier in between"):
        run_passes(broken, [verify_sync], PassContext(SM80))
    off = PassContext(SM80, config={"tl.disable_thread_storage_sync": True})
    assert run_passes(broken, [verify_sync], off).body.plan.sync_report.startswith("not cleared: ")


def test_unknown_addresses_are_taken_as_anywhere():
    launch = lowered(gemm(2))
    shared = next(b for b, _ in launch.plan.shared_offsets)
    out = next(x for x in walk(launch) if isinstance(x, Store) and x.buffer.name == "C").buffer
    v = load(load_index(launch), (const(0),))
    more = Store(out, (const(0), const(0)), const(0.0) + load(shared, (v,)).astype("float32"))
    _, faults = check_launch(replace(launch, body=seq(launch.body, more)))
    assert faults == []  # a read after the last barrier, and nobody writes any more


def load_index(launch):
    from tilelang.ir import Buffer

    return Buffer("idx", (1,), const(0).dtype)


@pytest.mark.parametrize("waits", [True, False])
def test_copies_under_a_condition_on_data_are_followed(waits):
    """A program was "not checked" where each thread decides by its own data whether it copies."""
    from tilelang.ir import If

    launch = lowered(gemm(3))
    chosen = load(load_index(launch), (launch.thread_vars[0],)) > 3
    launch = rewrite(launch, lambda x: If(chosen, x) if isinstance(x, Evaluate) and x.call.op == "cp_async" else None)
    text, faults = check_launch(launch if waits else without(launch, "cp_async_wait"))
    assert text.startswith("ordered: " if waits else "not cleared: ") and bool(faults) != waits, text


def test_a_program_that_is_not_cleared_is_compiled_plainer(monkeypatch, caplog):
    from tilelang.errors import error
    from tilelang.transform import pipeline
    from tilelang.transform.framework.pass_ import DEVICE, pass_

    @pass_(needs=DEVICE)
    def verify(func, cx):
        if any(isinstance(x, Evaluate) and x.call.op == "cp_async" for x in walk(func)):
            raise error("sync-unordered", "planted", found="a planted fault")
        return func

    monkeypatch.setattr(pipeline, "DEVICE_PASSES", (*[p for p in DEVICE_PASSES if p is not verify_sync], verify))
    out = pipeline.lower(gemm(3), SM80)
    assert calls(out.host, "cp_async") == 0 and calls(out.host, "sync_threads") == 2
    never = pass_(needs=DEVICE)(lambda func, cx: (_ for _ in ()).throw(error("sync-unordered", "always", found="a fault")))
    monkeypatch.setattr(pipeline, "DEVICE_PASSES", (*pipeline.DEVICE_PASSES[:-1], never))
    with pytest.raises(ValueError, match="always"):
        pipeline.lower(gemm(3), SM80)


@pytest.mark.parametrize("first", (1, 2))
def test_a_condition_that_is_half_known_leaves_out_the_threads_it_surely_leaves_out(first):
    """One thread may pass `tx < 1 and unknown`; two that update one element are found."""
    @T.prim_func
    def f(X: T.Tensor((64,), "int32")):
        with T.Kernel(1, threads=64):
            S = T.alloc_shared((64,), "int32")
            tx = T.get_thread_binding()
            S[tx] = X[tx]
            some = tx < first and X[tx] > 3
            other = tx < first and not some
            if other:
                S[2] = S[2] + 1
            X[tx] = S[63 - tx]

    _, faults = check_launch(lowered(f.func))
    assert [m.message for m in faults] == ([] if first == 1 else ["`S` is touched by two threads without a barrier in between"])


def several(place, threads):
    """Iterations of a parallel loop that store what they read from A in the same elements of S."""
    @T.prim_func
    def main(A: T.Tensor((64, 8), "float32"), B: T.Tensor((64,), "float32")):
        with T.Kernel(1, threads=threads):
            S = T.alloc_shared((64,), "float32")
            for i, j in T.Parallel(64, 8):
                S[place(i, j)] = A[i, j]
            T.copy(S, B)

    return main.func


@pytest.mark.parametrize("threads", [64, 256])
@pytest.mark.parametrize("place", [lambda i, j: i % 16, lambda i, j: j, lambda i, j: i], ids=["turns", "columns", "rows"])
def test_threads_that_store_in_one_place_in_one_instruction(place, threads):
    _, faults = check_launch(lowered(several(place, threads)))
    assert any("written by two threads at once" in f.message and f.exact for f in faults)


def test_threads_that_store_in_one_place_in_different_iterations():
    """Iterations that are followed at once were not compared with each other."""
    @T.prim_func
    def main(A: T.Tensor((384,), "float32"), B: T.Tensor((128, 3), "float32")):
        with T.Kernel(1, threads=64):
            S = T.alloc_shared((128, 3), "float32")
            for i in T.Parallel(128):
                S[i, 0] = A[i * 3]
            T.copy(S, B)

    launch = rewrite(lowered(main.func), lambda x: replace(x, indices=(T.min(x.indices[0], 381 - x.indices[0]),))
                     if isinstance(x, Store) and x.buffer.name == "S" else None)
    text, faults = check_launch(launch)
    assert any("`S` is touched by two threads" in f.message and f.exact for f in faults), text


def test_threads_that_store_one_value_in_one_place():
    @T.prim_func
    def main(A: T.Tensor((64,), "float32"), B: T.Tensor((64,), "float32"), n: T.int32):
        with T.Kernel(1, threads=128):
            S = T.alloc_shared((64,), "float32")
            T.copy(A, S)
            S[n % 64] = A[n % 32] + 1.0
            T.copy(S, B)

    text, faults = check_launch(lowered(main.func))
    assert faults == [] and text.startswith("ordered: "), text


def test_a_barrier_of_the_grid_is_one_of_each_block():
    """What the blocks exchanged before it and what one stores behind it may lie in the same bytes."""
    @T.prim_func
    def main(X: T.Tensor((64,), "float32"), Y: T.Tensor((64,), "float32")):
        with T.Kernel(2, threads=64) as b:
            t, m = T.alloc_shared((64,), "float32"), T.alloc_fragment((64,), "float32")
            T.copy(X, t)
            for i in T.Parallel(64):
                m[i] = t[63 - i]
            T.sync_grid()
            if b == 0:
                s = T.alloc_shared((64,), "float32")
                for i in T.Parallel(64):
                    s[i] = X[i] + m[i]
                for i in T.Parallel(64):
                    Y[i] = s[63 - i]

    launch = lowered(main.func)
    assert {at for _, at in launch.plan.shared_offsets} == {0}, "the two share their place"
    text, faults = check_launch(launch)
    assert faults == [] and text.startswith("ordered: "), text
    _, faults = check_launch(without(launch, "sync_grid"))
    assert any("without a barrier in between" in f.message and f.exact for f in faults)


@pytest.mark.parametrize("same, other, ordered", [(1, 0, True), (2, 0, False), (1, 5, False)])
def test_threads_that_compare_their_numbers_with_a_parameter(same, other, ordered):
    """Only threads with one number may both be the ones; what else asks for the parameter takes it to be the same."""
    @T.prim_func
    def main(A: T.Tensor((64,), "int32"), n: T.int32):
        with T.Kernel(1, threads=64):
            S = T.alloc_shared((64,), "int32")
            tx = T.get_thread_binding()
            m = n + 3
            if tx // same == m:
                S[0] = tx
            if tx // same == m + other:
                A[tx] = S[0]

    text, faults = check_launch(without(lowered(main.func), "sync_threads"))
    assert (not faults) == ordered == text.startswith("ordered: "), text


@pytest.mark.parametrize("ends, ordered", [(lambda n: T.min(n + 2, 32), True), (lambda n: T.max(n + 2, 32), False),
                                           (lambda n: (n + 5) % 16 + 17, True), (lambda n: n % 64, False),
                                           (lambda n: T.if_then_else(n > 3, T.min(n, 30) // 2, n & 15), True)])
def test_threads_beyond_all_that_a_number_may_be_stay_out(ends, ordered):
    """Of `tx < min(n, 32)` the threads from 32 on are no part, whatever n is."""
    @T.prim_func
    def main(A: T.Tensor((64,), "int32"), n: T.int32):
        with T.Kernel(1, threads=64):
            S = T.alloc_shared((64,), "int32")
            tx = T.get_thread_binding()
            if tx < ends(n):
                S[tx] = tx
            A[tx] = S[63 - tx % 32]

    text, faults = check_launch(without(lowered(main.func), "sync_threads"))
    assert (not faults) == ordered == text.startswith("ordered: "), text


def test_a_part_of_a_fragment_at_a_run_time_index_is_copied_without_a_barrier():
    @T.prim_func
    def main(A: T.Tensor((2, 24, 8), "float32"), n: T.int32, p: T.int32, C: T.Tensor((24,), "float32")):
        with T.Kernel(1, threads=64):
            F, S = T.alloc_fragment((2, 24, 8), "float32"), T.alloc_shared((24,), "float32")
            T.copy(A, F)
            T.copy(F[p:p + 1, 0:24, n], S)
            for i in T.Parallel(24):
                C[i] = S[i] * 2

    launch = lowered(main.func)
    text, faults = check_launch(launch)
    assert faults == [] and text.startswith("ordered: ") and calls(launch, "sync_threads") == 1, text


def test_a_store_by_the_thread_that_data_chooses_is_a_doubt_and_no_fault():
    """The threshold of a radix top-k: one bin, known from the counts alone, satisfies the condition."""
    @T.prim_func
    def main(A: T.Tensor((257,), "int32"), B: T.Tensor((1,), "int32")):
        with T.Kernel(1, threads=256):
            tx = T.get_thread_binding()
            count, found = T.alloc_shared((257,), "int32"), T.alloc_shared((1,), "int32")
            T.copy(A, count)
            if count[tx] > 40 and count[tx + 1] <= 40:
                found[0] = tx
            T.sync_threads()
            if tx == 0:
                B[0] = found[0]

    _, faults = check_launch(lowered(main.func))
    assert faults and not any(f.exact for f in faults)


def faults_without_barrier(f, k):
    """Faults of a program that is cleared as it is, without its k-th block barrier."""
    launch = lowered(f)
    assert check_launch(launch)[1] == []
    gone = [x for x in walk(launch) if isinstance(x, Evaluate) and x.call.op == "sync_threads"][k]
    return check_launch(rewrite(launch, lambda x: seq() if x is gone else None))[1]


def test_reads_of_other_threads_are_not_replaced_by_a_later_read():
    """The read of thread 40 stood for those of threads 0 to 31, and its own store needs no barrier behind it."""
    @T.prim_func
    def main(A: T.Tensor((64,), "int32"), B: T.Tensor((64,), "int32")):
        with T.Kernel(1, threads=64):
            S = T.alloc_shared((64,), "int32")
            tx = T.get_thread_binding()
            S[tx] = A[tx]
            T.sync_threads()
            if tx < 32:
                B[tx] = S[0]
            if tx == 40:
                B[tx] = S[0]
            T.sync_threads()
            if tx == 40:
                S[0] = 77

    assert [f.kind for f in faults_without_barrier(main.func, 1) if f.exact] == ["order"]


def test_conditional_reads_of_later_iterations_are_followed():
    """Of iterations that are followed at once, the threads of the first decided which are active: here none."""
    @T.prim_func
    def main(A: T.Tensor((64,), "int32"), B: T.Tensor((64,), "int32")):
        with T.Kernel(1, threads=64):
            S = T.alloc_shared((64,), "int32")
            c = T.alloc_local((4,), "int32")
            tx = T.get_thread_binding()
            S[tx] = A[tx]
            T.sync_threads()
            for k in T.serial(4):
                c[k] = T.if_then_else(k * 64 + tx >= 64, S[(tx + k) % 64], 0)
            B[tx] = c[0] + c[1] + c[2] + c[3]

    assert [f.kind for f in faults_without_barrier(main.func, 0) if f.exact] == ["order"]


def test_while_loops_of_a_hundred_iterations_are_followed():
    @T.prim_func
    def main(A: T.Tensor((150, 64), "int32"), B: T.Tensor((150, 64), "int32")):
        with T.Kernel(1, threads=64):
            S = T.alloc_shared((64,), "int32")
            tx = T.get_thread_binding()
            t = T.alloc_var("int32", init=0)
            S[tx] = 5
            while t < 150:
                if t == 100:
                    T.sync_threads()
                    S[tx] = A[t, tx]
                    T.sync_threads()
                B[t, tx] = S[63 - tx]
                t = t + 1

    assert any(f.kind == "order" and f.exact for f in faults_without_barrier(main.func, 0))


def test_iterations_that_only_later_blocks_have_are_followed():
    """Only the first block was followed, which has one iteration."""
    @T.prim_func
    def main(A: T.Tensor((4, 4, 64), "int32"), B: T.Tensor((4, 4, 64), "int32")):
        with T.Kernel(4, threads=64) as bx:
            S = T.alloc_shared((64,), "int32")
            for k in T.serial(bx + 1):
                T.copy(A[bx, k, :], S)
                for i in T.Parallel(64):
                    B[bx, k, i] = S[63 - i]

    for k in (0, 1):
        assert any(f.kind == "order" and f.exact for f in faults_without_barrier(main.func, k)), k


def test_places_that_depend_on_the_block_are_followed():
    @T.prim_func
    def main(A: T.Tensor((2, 64), "int32"), B: T.Tensor((2, 64), "int32")):
        with T.Kernel(2, threads=64) as bx:
            S = T.alloc_shared((128,), "int32")
            tx = T.get_thread_binding()
            S[tx] = 1
            S[tx + 64] = 2
            T.sync_threads()
            S[bx * 64 + tx] = A[bx, tx]
            T.sync_threads()
            B[bx, tx] = S[bx * 32 + tx]

    assert any(f.kind == "order" and f.exact for f in faults_without_barrier(main.func, 1))


def test_variables_that_some_threads_set_keep_what_others_hold():
    """Behind a loop that is cut short `x` was taken as 1 in threads that set it nowhere else."""
    @T.prim_func
    def main(A: T.Tensor((64,), "int32"), B: T.Tensor((64,), "int32")):
        with T.Kernel(1, threads=64):
            S = T.alloc_shared((64,), "int32")
            tx = T.get_thread_binding()
            x = T.alloc_var("int32", init=0)
            S[tx] = A[tx]
            for k in T.serial(300):
                T.sync_threads()
                x = k + 1
                if x == 7:
                    B[tx] = S[(tx + k) % 64]
            if tx < 8:
                x = 1
            if tx >= 32:
                x = 2
            T.sync_threads()
            if x == 300:
                S[63 - tx] = tx
            T.sync_threads()
            B[tx] += S[(tx * 3) % 64]

    launch = lowered(main.func)
    last = [x for x in walk(launch) if isinstance(x, Evaluate) and x.call.op == "sync_threads"][-1]
    text, faults = check_launch(rewrite(launch, lambda x: seq() if x is last else None))
    assert any(f.kind == "order" for f in faults), text


def test_variables_that_threads_set_behind_a_jump_differ():
    """Threads for which `continue` came were taken to have counted."""
    @T.prim_func
    def main(A: T.Tensor((4, 64), "int32"), B: T.Tensor((64,), "int32")):
        with T.Kernel(1, threads=64):
            S = T.alloc_shared((64,), "int32")
            tx = T.get_thread_binding()
            n = T.alloc_var("int32", init=0)
            S[tx] = A[0, tx]
            T.sync_threads()
            for k in T.serial(4):
                if A[k, tx] > 5:
                    continue
                n = n + 1
            B[tx] = S[tx]
            T.sync_threads()
            if n < 4:
                S[63 - tx] = 5
            T.sync_threads()
            B[tx] += S[(tx * 3) % 64]

    for k in (1, 2):
        assert any(f.kind == "order" for f in faults_without_barrier(main.func, k)), k


def test_two_accesses_at_unknown_places_may_meet():
    """Both counted as accesses of the first thread, which needs no barrier between them."""
    @T.prim_func
    def main(A: T.Tensor((64,), "int32"), P: T.Tensor((64,), "int32"), B: T.Tensor((64,), "int32")):
        with T.Kernel(1, threads=64):
            S = T.alloc_shared((64,), "int32")
            tx = T.get_thread_binding()
            S[P[tx] % 64] = A[tx]
            T.sync_threads()
            B[tx] = S[P[63 - tx] % 64]

    (fault,) = faults_without_barrier(main.func, 0)
    assert fault.kind == "order" and not fault.exact
