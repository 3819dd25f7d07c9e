"""Where barriers go.  Programs are per-thread code over a block of 64 threads."""

import importlib
import time

import numpy as np
import pytest
from everywhere import everywhere
from pass_programs import F32, program

import tilelang.language as T
from tilelang.ir import (Alloc, Bind, Buffer, Evaluate, For, If, Store, While, const, fresh, load, parse, seq, to_text, walk,
                         with_options, LoopPlan)
from tilelang.ir.build import call
from tilelang.ir.buffer import AddressOf
from tilelang.target import Target
from tilelang.transform.framework.pass_ import PassContext, run_passes
from tilelang.transform.pipeline import lower
from tilelang.transform.sync.place_sync import place_sync

N = 64
S, P, G = Buffer("S", (256,), F32, "shared.dyn"), Buffer("P", (256,), F32, "shared.dyn"), Buffer("G", (4096,), F32)
H = Buffer("H", (4096,), F32)


def block(body, threads=N, locals_=()):
    f = program("f", (G, H), (1,), threads, lambda b, t: seq(Alloc(S), Alloc(P), *map(Alloc, locals_), body(b[0], t[0])))
    return with_options(f, phase="THREADS_BOUND")


def placed(f, **config):
    out = run_passes(f, [place_sync], PassContext(verify=True, config=config))
    assert out.facts.phase == "SYNCED" and parse(to_text(out)) == out
    return out


def barriers(f):
    return sum(isinstance(x, Evaluate) and x.call.op == "sync_threads" for x in walk(f))


def put(b, i, v):
    return Store(b, (i,), v)


def get(b, i):
    return load(b, (i,))


def is_sync(s):
    return isinstance(s, Evaluate) and s.call.op == "sync_threads"


def test_write_then_read_of_another_thread():
    out = placed(block(lambda bx, tx: seq(put(S, tx, get(G, tx)), put(H, tx, get(S, 63 - tx)))))
    assert [is_sync(s) for s in out.body.body.stmts[2:]] == [False, True, False]


def test_own_element_needs_none():
    assert barriers(placed(block(lambda bx, tx: seq(put(S, tx, get(G, tx)), put(H, tx, get(S, tx)))))) == 0


def test_disjoint_halves_need_none():
    f = block(lambda bx, tx: seq(put(S, tx, get(G, tx)), put(H, tx, get(S, tx + 64))))
    assert barriers(placed(f)) == 0


def test_predicates_count():
    f = block(lambda bx, tx: seq(If(tx < 32, put(S, tx, get(G, tx))), put(H, tx, get(S, tx % 32 + 32))))
    assert barriers(placed(f)) == 0
    f = block(lambda bx, tx: seq(If(tx < 33, put(S, tx, get(G, tx))), put(H, tx, get(S, tx % 32 + 32))))
    assert barriers(placed(f)) == 1


def test_conditions_on_fractions_are_not_taken_for_whole_numbers():
    """2.5 > 2 holds, and for all that is known here so may any comparison of floats."""
    f = block(lambda bx, tx: seq(If(const(2.5, F32) > const(2.0, F32), put(S, tx, get(G, tx))), put(H, tx, get(S, 63 - tx))))
    assert barriers(placed(f)) == 1


def test_write_after_read():
    f = block(lambda bx, tx: seq(put(H, tx, get(S, 63 - tx)), put(S, tx, get(G, tx))))
    assert barriers(placed(f)) == 1


def test_one_barrier_serves_several_conflicts():
    f = block(lambda bx, tx: seq(put(S, tx, get(G, tx)), put(P, tx, get(G, tx)), put(H, tx, get(S, 63 - tx)),
                                 put(H, tx + 64, get(P, 63 - tx))))
    assert barriers(placed(f)) == 1


@pytest.mark.spec("L15:automatic-sync", "M:back-edge-war")
def test_loop_carried_hazard_of_for_and_while():
    def inside(tx, k):
        return seq(put(S, tx, get(G, tx + k)), put(H, tx + k * 64, get(S, 63 - tx)))

    k = fresh("k")
    out = placed(block(lambda bx, tx: For(k, const(0), const(8), "serial", inside(tx, k))))
    assert barriers(out) == 2
    n = Buffer("n", (1,), const(0).dtype, "local.var")
    out = placed(block(lambda bx, tx: seq(Store(n, (const(0),), const(4)), While(get(n, 0) > 0, seq(
        inside(tx, get(n, 0)), Store(n, (const(0),), get(n, 0) - 1)))), locals_=(n,)))
    assert barriers(out) == 2


@pytest.mark.parametrize("step, needed", [(64, False), (65, False), (62, True), (1, True)])
def test_a_loop_that_moves_further_than_its_threads_reach_needs_no_barrier(step, needed):
    """Iterations of an unknown number that store to rows of an unknown length."""
    n = T.dynamic("n")

    @T.prim_func
    def f(A: T.Tensor((2, 64), "float32"), H: T.Tensor((2, n), "float32")):
        with T.Kernel(2, threads=64) as b:
            tx = T.get_thread_binding()
            for i in T.serial(n // step - 1):
                H[b, i * step + tx] = A[b, tx]

    launch = lower(f.func, Target({"kind": "cuda", "arch": "sm_80"})).kernels[0].launch
    assert any(isinstance(x, Evaluate) and x.call.op == "sync_threads" for x in walk(launch)) == needed


def test_two_slots_need_one_barrier_a_round():
    k = fresh("k")

    def body(bx, tx):
        slot = k % 2 * 64
        return For(k, const(0), const(100), "serial", seq(
            put(S, slot + tx, get(G, tx + k)), put(H, tx + k * 64, get(S, slot + 63 - tx))))

    assert barriers(placed(block(body))) == 1


def pipeline(stages, n=None):
    """async copies stages-1 iterations ahead, as plan_pipelines writes them."""
    k = fresh("k")

    def copy(tx, at, i):
        return Evaluate(call("cp_async", (AddressOf(S, (at + tx,)), AddressOf(G, (tx + i * 64,))), "void", bytes=4))

    def body(bx, tx):
        commit = Evaluate(call("cp_async_commit", (), "void"))
        ahead = stages - 1
        extent = const(10) if n is None else n
        return seq(
            *[x for i in range(ahead) for x in (If(const(i) < extent, copy(tx, const(i * 64), const(i))), commit)],
            For(k, const(0), extent, "serial", seq(
                Evaluate(call("cp_async_wait", (), "void", n=stages - 2)),
                If(k + ahead < extent, copy(tx, (k + ahead) % stages * 64, k + ahead)), commit,
                put(H, tx + k * 64, get(S, k % stages * 64 + 63 - tx)))),
            Evaluate(call("cp_async_wait", (), "void", n=0)))

    return body


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_pipelined_loop_has_one_barrier(stages):
    out = placed(block(pipeline(stages)))
    loop = next(x for x in walk(out) if isinstance(x, For))
    assert barriers(out) == barriers(loop) == 1
    at = [is_sync(s) for s in loop.body.stmts].index(True)
    assert loop.body.stmts[at - 1].call.op == "cp_async_wait"


def test_pipelined_loop_with_run_time_extent():
    m = Buffer("m", (1,), const(0).dtype, "local.var")
    v = fresh("n")
    body = pipeline(3, n=v)
    out = placed(block(lambda bx, tx: seq(Bind(v, get(m, 0)), body(bx, tx)), locals_=(m,)))
    assert barriers(out) == 1


def test_persistent_loop_around_a_pipeline():
    o = fresh("o")
    inner = pipeline(3)
    out = placed(block(lambda bx, tx: For(o, const(0), const(5), "serial", inner(bx, tx))))
    assert barriers(out) == 2  # one in the main loop, one before the next tile's prologue


@pytest.mark.spec("L15:automatic-sync", "M:barrier-in-branch")
def test_divergent_branch_is_split():
    out = placed(block(lambda bx, tx: If(tx < 16, seq(put(S, tx, get(G, tx)), put(H, tx, get(S, 15 - tx))))))
    assert barriers(out) == 1
    for x in walk(out):
        if isinstance(x, If):
            assert barriers(x) == 0


def test_values_cross_a_split():
    v = fresh("v", "float32")
    out = placed(block(lambda bx, tx: If(tx < 16, seq(Bind(v, get(G, tx)), put(S, tx, v), put(H, tx, get(S, 15 - tx) + v)),
                                         put(S, tx + 128, get(G, tx)))))
    assert barriers(out) == 1


def test_barrier_moves_before_a_branch():
    out = placed(block(lambda bx, tx: seq(put(S, tx, get(G, tx)), If(tx < 16, put(H, tx, get(S, 63 - tx))))))
    assert [is_sync(s) for s in out.body.body.stmts[2:]] == [False, True, False]


def test_what_a_condition_reads_is_read_behind_the_barrier_in_front_of_its_branch():
    """P's barrier moves in front of the branch; S, which the condition reads, is stored behind the branch."""
    out = placed(block(lambda bx, tx: seq(put(H, tx, get(P, 63 - tx)), If(get(S, 63 - tx) > 0, put(P, tx, get(G, tx))),
                                          put(S, tx, get(G, tx)))))
    assert [is_sync(s) for s in out.body.body.stmts[2:]] == [False, True, False, True, False]


def test_uniform_loop_in_a_divergent_branch_is_lifted():
    k = fresh("k")
    out = placed(block(lambda bx, tx: If(tx < 16, For(k, const(0), const(4), "serial", seq(
        put(S, tx, get(G, tx)), put(H, tx, get(S, 15 - tx)))))))
    assert barriers(out) == 2
    assert not any(barriers(x) for x in walk(out) if isinstance(x, If))


@pytest.mark.spec("L15:automatic-sync", "M:barrier-in-branch")
def test_barrier_in_a_divergent_loop_is_refused():
    k = fresh("k")
    with pytest.raises(ValueError, match="need a block barrier inside a loop that not all threads run alike"):
        placed(block(lambda bx, tx: For(k, const(0), tx, "serial", seq(put(S, tx, get(G, k)), put(H, tx, get(S, 63 - tx))))))
    with pytest.raises(ValueError, match="need a block barrier inside a loop"):
        placed(block(lambda bx, tx: While(get(G, tx) > 0.0, seq(put(S, tx, get(G, tx)), put(H, tx, get(S, 63 - tx))))))


def test_global_memory_that_a_block_reads_back():
    assert barriers(placed(block(lambda bx, tx: seq(put(G, tx, const(1.0)), put(H, tx, get(G, 63 - tx)))))) == 1
    assert barriers(placed(block(lambda bx, tx: seq(put(G, bx * 64 + tx, const(1.0)),
                                                    put(H, tx, get(G, bx * 64 + tx)))))) == 0


def test_atomics_do_not_conflict_with_each_other():
    def add(tx):
        return Evaluate(call("atomic_add", (AddressOf(S, (tx % 4,)), const(1.0)), "float32"))

    assert barriers(placed(block(lambda bx, tx: seq(add(tx), add(tx + 1))))) == 0
    assert barriers(placed(block(lambda bx, tx: seq(put(S, tx, const(0.0)), add(tx), put(H, tx, get(S, tx % 4)))))) == 2


def test_existing_barriers_count():
    sync = Evaluate(call("sync_threads", (), "void"))
    assert barriers(placed(block(lambda bx, tx: seq(put(S, tx, get(G, tx)), sync, put(H, tx, get(S, 63 - tx)))))) == 1


@pytest.mark.spec("R10:TL_DISABLE_THREAD_STORAGE_SYNC")
def test_switched_off():
    f = block(lambda bx, tx: seq(put(S, tx, get(G, tx)), put(H, tx, get(S, 63 - tx))))
    assert barriers(placed(f, **{"tl.disable_thread_storage_sync": True})) == 0


def test_unknown_index_is_a_conflict():
    f = block(lambda bx, tx: seq(put(S, tx, get(G, tx)), Bind(v := fresh("v"), get(Q, tx)), put(H, tx, get(S, v))),
              locals_=(Q := Buffer("Q", (64,), const(0).dtype, "local"),))
    assert barriers(placed(f)) == 1


def test_independent_iterations_of_a_parallel_loop():
    k = fresh("k")
    loop = lambda tx: For(k, const(0), const(4), "unroll", put(S, (tx * 7 + k) % 64, get(G, tx)),  # noqa: E731
                          plan=LoopPlan(independent=True))
    assert barriers(placed(block(lambda bx, tx: loop(tx)))) == 0


def test_a_loop_in_an_iteration_of_a_parallel_loop_needs_no_barrier():
    """What an iteration writes at places that data decides, step after step, is its own."""
    @T.prim_func
    def f(A: T.Tensor((64, 4), "int32"), B: T.Tensor((256,), "int32")):
        with T.Kernel(1, threads=64):
            S, n = T.alloc_shared((256,), "int32"), T.alloc_fragment((64,), "int32")
            T.clear(n)
            for t in T.Parallel(64):
                for i in T.unroll(4):
                    if A[t, i] > 0:
                        S[t * 4 + n[t] + A[t, i] % 2] = A[t, i]
                        n[t] += 1
            T.copy(S, B)

    launch, = lower(f.func, Target({"kind": "cuda", "arch": "sm_80"})).kernels
    assert barriers(launch.launch) == 1 and launch.launch.plan.sync_report.startswith("ordered")


def test_one_thread_needs_nothing():
    f = block(lambda bx, tx: seq(put(S, tx, get(G, tx)), put(H, tx, get(S, 63 - tx))), threads=1)
    assert barriers(placed(f)) == 0




def test_global_memory_in_a_divergent_loop_is_the_threads_own_affair():
    k = fresh("k")
    idx = Buffer("idx", (64,), const(0).dtype, "local")
    f = block(lambda bx, tx: For(k, const(0), tx, "serial", put(G, get(idx, k), get(G, get(idx, k)) + 1.0)), locals_=(idx,))
    assert barriers(placed(f)) == 0


def nest(depth, threads=64):
    """Loops in loops, each of which turns a buffer of two rows that it both reads and writes."""
    @T.macro
    def level(S, F, n):
        if n == 0:
            for i in T.Parallel(64):
                F[i] = F[i] + S[0, (i + 1) % 64]
        else:
            for k in T.serial(3):
                for i in T.Parallel(64):
                    S[(k + 1) % 2, i] = F[i] + S[k % 2, 63 - i]
                level(S, F, n - 1)

    @T.prim_func
    def f(A: T.Tensor((64,), "int32")):
        with T.Kernel(1, threads=threads):
            S, F = T.alloc_shared((2, 64), "int32"), T.alloc_fragment((64,), "int32")
            T.clear(S)
            T.copy(A, F)
            level(S, F, depth)
            T.copy(F, A)

    return f


def test_deep_nests_are_synchronised_in_time(monkeypatch):
    """Beyond ITERATIONS passes iterations are counted apart no more: more barriers at most, and the same values."""
    a = np.arange(64, dtype=np.int32)
    want = everywhere(nest(3), a, on=("tile", "simulator"))
    begin = time.process_time()
    lower(nest(6).func, Target({"kind": "cuda", "arch": "sm_80"}))
    assert time.process_time() - begin < 60
    monkeypatch.setattr(importlib.import_module("tilelang.transform.sync.place_sync"), "ITERATIONS", 5)
    np.testing.assert_array_equal(everywhere(nest(3, 96), a, on=("tile", "simulator"))[0], want[0])


def test_what_is_left_out_where_threads_run_apart_separates_nothing():
    """The order in G is the threads' own affair in that loop; S still needs its barrier, in front of it."""
    @T.prim_func
    def main(X: T.Tensor((N,), "int32"), G: T.Tensor((N,), "int32"), O: T.Tensor((N,), "int32")):
        with T.Kernel(1, threads=N):
            S, tx = T.alloc_shared((N,), "int32"), T.get_thread_binding()
            S[tx] = X[tx]
            for k in T.serial(X[tx]):
                G[(tx + k) % N] = k
                O[tx] = S[(tx + 1) % N]

    launch = lower(main.func, Target({"kind": "cuda", "arch": "sm_80"}), {}).kernels[0].launch
    order = [x for x in walk(launch) if isinstance(x, For) or isinstance(x, Evaluate) and is_sync(x)]
    assert [isinstance(x, For) for x in order] == [False, True] and launch.plan.sync_report.startswith("ordered:")


def test_eight_nested_loops_followed_for_seconds(monkeypatch):
    """Each loop was followed anew for every pass over the loops around it: four times as often for each level."""
    from tilelang.transform.sync.place_sync import _Flow

    @T.macro
    def nest(k, A, B, at):
        if k:
            for j in T.serial(2):
                nest(k - 1, A, B, at + j)
        else:
            for i in T.Parallel(64):
                B[i] += A[i + at]

    @T.prim_func
    def main(A: T.Tensor((128,), "float32"), B: T.Tensor((64,), "float32")):
        with T.Kernel(1, threads=64):
            nest(8, A, B, 0)

    passes = []
    fixpoint = _Flow.fixpoint
    monkeypatch.setattr(_Flow, "fixpoint", lambda self, *a: passes.append(1) or fixpoint(self, *a))
    lower(main.func, Target({"kind": "cuda", "arch": "sm_90a"}))
    assert 8 <= len(passes) <= 2048  # 65,536 then
