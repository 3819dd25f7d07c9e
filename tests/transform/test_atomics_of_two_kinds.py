"""Atomics of different kinds on one buffer keep the order of their statements; those that commute need no barrier."""

import numpy as np
import pytest
from everywhere import WITH_HOPPER, everywhere

import tilelang.language as T
from tilelang.codegen.cuda.printer import print_kernel
from tilelang.errors import TileLangError
from tilelang.ir import Evaluate, For, If, Launch, const, rewrite, seq, walk
from tilelang.simulator import run_device
from tilelang.target import Target
from tilelang.target.atomics import Atomic, Branch, Iterations, WarpRole, commute, family, unordered
from tilelang.transform.analysis.accesses import Update, as_iterations, in_order, must_be_placed, waits
from tilelang.transform.analysis.divergence import Divergence
from tilelang.transform.pipeline import lower
from tilelang.transform.verify_sync.launch import check_launch

OPS = {"min": lambda x: T.atomic_min(x, -3), "max": lambda x: T.atomic_max(x, 50), "add": lambda x: T.atomic_add(x, 1),
       "or": lambda x: T.atomic_or(x, 68), "store": lambda x: T.atomic_store(x, 7)}
AFTER = {"min": lambda x: min(x, -3), "max": lambda x: max(x, 50), "add": lambda x: x + 4, "or": lambda x: x | 68,
         "store": lambda x: 7}
N, PLACES = 128, ("shared", "global")


def lowered(program, arch="sm_80"):
    return lower(program.func, Target({"kind": "cuda", "arch": arch}), {})


def text(program, arch="sm_80"):
    (kernel,) = lowered(program, arch).kernels
    whole = print_kernel(kernel)
    return whole[whole.index("__global__"):]


def between(body, first, second):
    """How many barriers stand between two texts."""
    start = body.index(first)
    return body[start:body.index(second, start)].count("__syncthreads()")


def launch_of(host):
    return next(x for x in walk(host) if isinstance(x, Launch))


def without_barriers(host, op="sync_threads", but=0):
    """A lowered program without its barriers, the first `but` of them excepted."""
    kept = [x for x in walk(host) if isinstance(x, Evaluate) and x.call.op == op][:but]

    def gone(x):
        return seq() if isinstance(x, Evaluate) and x.call.op == op and not any(x is y for y in kept) else None

    return rewrite(host, gone)


def two_loops(first, second, place="shared", turns=1, pipelined=False):
    """One operation by each of 32 threads, then another one four times on each element; all of that `turns` times."""
    @T.prim_func
    def main(G: T.Tensor((32,), "int32"), O: T.Tensor((32,), "int32"), X: T.Tensor((turns, 32), "int32")):
        with T.Kernel(1, threads=N):
            S, R = T.alloc_shared((32,), "int32"), T.alloc_shared((32,), "int32")
            B = S if place == "shared" else G
            if place == "shared":
                T.copy(G, S)
            for k in T.Pipelined(turns, num_stages=2) if pipelined else T.serial(turns):
                T.copy(X[k, 0:32], R)
                for i in T.Parallel(32):
                    OPS[first](B[i])
                for i in T.Parallel(N):
                    OPS[second](B[i % 32])
                if pipelined:
                    for i in T.Parallel(32):
                        O[i] += R[i]
            for i in T.Parallel(32):
                O[i] += T.atomic_load(B[i])

    return main


PAIRS = [("min", "add"), ("add", "min"), ("add", "max"), ("max", "or"), ("or", "add"), ("store", "add"), ("add", "store")]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("first, second", PAIRS)
def test_a_statement_is_over_before_one_of_another_kind_begins(first, second, place):
    body = text(two_loops(first, second, place))
    assert between(body, f"tl::atomic_{first}", f"tl::atomic_{second}") == 1
    assert between(body, f"tl::atomic_{second}", "tl::atomic_load") == 1


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("turns, pipelined", [(3, False), (3, True)])
def test_turns_of_a_loop_and_results(turns, pipelined, place):
    """min(x, -3) + 4, three times: the minimum of a turn comes after the sums of the one before."""
    program = two_loops("min", "add", place, turns, pipelined)
    g, x = np.arange(32, dtype=np.int32), np.arange(96, dtype=np.int32).reshape(3, 32)
    got = everywhere(program, g, np.zeros(32, np.int32), x, on=WITH_HOPPER)[1]
    assert np.array_equal(got, np.full(32, 1) + (x.sum(0) if pipelined else 0))
    body = text(program)
    loop = body[body.index("for (int k"):body.index("tl::atomic_load")]
    assert between(body, "tl::atomic_min", "tl::atomic_add") == 1 and loop.count("__syncthreads()") >= 2


@pytest.mark.parametrize("first, second", [("max", "add"), ("store", "or")])
def test_results_of_two_kinds_on_every_execution(first, second):
    start = np.arange(32, dtype=np.int32) * 3
    for place in PLACES:
        got = everywhere(two_loops(first, second, place), start, on=WITH_HOPPER)[1]
        if second == "or":
            assert got.tolist() == [7 | 68] * 32
        else:
            assert got.tolist() == [AFTER[second](AFTER[first](int(x))) for x in start]


def test_one_kind_on_and_on_has_no_barrier():
    """A histogram: no barrier inside, nor between two loops that both count."""
    @T.prim_func
    def main(X: T.Tensor((16, N), "int32"), O: T.Tensor((32,), "int32")):
        with T.Kernel(1, threads=N):
            S = T.alloc_shared((32,), "int32")
            T.clear(S)
            for k in T.serial(16):
                for i in T.Parallel(N):
                    T.atomic_add(S[X[k, i] % 32], 1)
            for i in T.Parallel(N):
                T.atomic_add(S[X[0, i] % 32], 2)
            for i in T.Parallel(32):
                T.atomic_add(O[i], S[i])

    body = text(main)
    assert body.count("__syncthreads()") == 2 and between(body, "X[", "&O[") == 1


@pytest.mark.parametrize("points", [N, 2 * N])
@pytest.mark.parametrize("place", PLACES)
def test_iterations_of_one_parallel_loop_have_no_order(points, place):
    """So there is no barrier between the statements of its body, and nothing to find."""
    @T.prim_func
    def main(G: T.Tensor((4,), "int32"), H: T.Tensor((4,), "int32")):
        with T.Kernel(1, threads=N):
            S = T.alloc_shared((4,), "int32")
            B = S if place == "shared" else H
            T.fill(S, 5)
            for i in T.Parallel(points):
                T.atomic_max(B[i % 4], i)
                if i % 3 == 0:
                    T.atomic_add(B[(i + 1) % 4], 1)
                else:
                    T.atomic_or(B[(i + 2) % 4], 1)
            T.copy(B, G)

    assert between(text(main), "tl::atomic_max", "tl::atomic_or") == 0
    p = lowered(main)
    assert check_launch(launch_of(p.host))[1] == []
    got = run_device(p, [np.zeros(4, np.int32), np.zeros(4, np.int32)]).outputs["G"]
    assert (got >= points - 4).all()


@pytest.mark.parametrize("place", PLACES)
def test_parallel_loops_with_two_kinds_are_ordered_with_each_other(place):
    @T.prim_func
    def main(G: T.Tensor((4,), "int32"), H: T.Tensor((4,), "int32")):
        with T.Kernel(1, threads=N):
            S = T.alloc_shared((4,), "int32")
            B = S if place == "shared" else H
            T.fill(S, 0)
            for _k in T.serial(3):
                for i in T.Parallel(N):
                    T.atomic_add(B[i % 4], 1)
                    T.atomic_max(B[(i + 1) % 4], i)
            T.copy(B, G)

    body = text(main)
    assert between(body, "for (int _k", "atomic_max") + between(body, "atomic_max", "\n}") >= 1


def test_old_values_that_are_used():
    """Numbers that a second loop takes come after all that the first one took; turns of one statement come in any order."""
    @T.prim_func
    def main(O: T.Tensor((6, N), "int32")):
        with T.Kernel(1, threads=N):
            S = T.alloc_shared((1,), "int32")
            T.clear(S)
            for k in T.serial(4):
                for i in T.Parallel(N):
                    O[k, i] = T.atomic_add(S[0], 1, return_prev=True)
            for _i in T.Parallel(N):
                T.atomic_add(S[0], 1)
            for i in T.Parallel(N):
                O[5, i] = T.atomic_add(S[0], 1, return_prev=True)

    body = text(main)
    assert body.count("__syncthreads()") == 3  # behind the clearing and on both sides of the sums in between
    got = run_device(lowered(main), [np.zeros((6, N), np.int32)]).outputs["O"]
    assert np.array_equal(np.sort(got[:4].reshape(-1)), np.arange(4 * N))
    assert np.array_equal(np.sort(got[5]), np.arange(N) + 5 * N)


def divergent(kind, place="shared"):
    @T.prim_func
    def main(X: T.Tensor((N,), "int32"), G: T.Tensor((32,), "int32"), H: T.Tensor((32,), "int32")):
        with T.Kernel(1, threads=N):
            S, tx = T.alloc_shared((32,), "int32"), T.get_thread_binding()
            B = S if place == "shared" else H
            T.fill(S, 5)
            if kind == "branch":
                if X[tx] > 3:
                    T.atomic_min(B[tx % 32], 0)
                    T.atomic_add(B[X[tx] % 32], 1)
            elif kind == "ways":
                if X[tx] > 3:
                    T.atomic_min(B[tx % 32], 0)
                else:
                    T.atomic_add(B[X[tx] % 32], 1)
            else:
                for _k in T.serial(X[tx]):
                    T.atomic_min(B[tx % 32], 0)
                    T.atomic_add(B[X[tx] % 32], 1)
            T.copy(B, G)

    return main


def test_threads_that_run_apart():
    """A branch is split; in a loop that threads run differently often no barrier can stand; both ways of a branch are run at
    once, by different threads."""
    body = text(divergent("branch"))
    assert between(body, "tl::atomic_min", "tl::atomic_add") == 1 and body.count("if (taken") == 2
    with pytest.raises(TileLangError) as e:
        lowered(divergent("loop"))
    assert e.value.kind == "sync-divergent" and "`S`" in str(e.value)
    p = lowered(divergent("ways"))
    assert check_launch(launch_of(p.host))[1] == []
    assert between(text(divergent("ways")), "tl::atomic_min", "tl::atomic_add") == 0
    run_device(p, [np.arange(N, dtype=np.int32) % 7, *np.zeros((2, 32), np.int32)])  # no race is reported


def test_the_order_of_threads_that_run_apart_in_global_memory_is_told_by_the_simulator():
    p = lowered(divergent("loop", "global"))
    with pytest.raises(TileLangError) as e:
        run_device(p, [np.arange(N, dtype=np.int32) % 7, *np.zeros((2, 32), np.int32)])
    assert e.value.kind == "sim-race" and "atomic min" in str(e.value) and "atomic add" in str(e.value)


@pytest.mark.parametrize("first, second", PAIRS)
def test_a_barrier_taken_away_is_found(first, second):
    """By the verifier in shared memory, by the simulator everywhere."""
    start = [np.arange(32, dtype=np.int32), np.zeros(32, np.int32), np.zeros((1, 32), np.int32)]
    for place in PLACES:
        p = without_barriers(lowered(two_loops(first, second, place)).host, but=place == "shared")
        if place == "shared":
            faults = check_launch(launch_of(p))[1]
            assert any(f.exact and f.other is not None for f in faults)
        with pytest.raises(TileLangError) as e:
            run_device(p, start)
        assert e.value.kind == "sim-race" and f"atomic {second}" in str(e.value) and f"atomic {first}" in str(e.value)


def in_roles():
    """The threads of one warp group of two count, those of the other take minima and sums."""
    @T.prim_func
    def main(G: T.Tensor((32,), "int32"), H: T.Tensor((32,), "int32")):
        with T.Kernel(1, threads=256):
            S, Q = T.alloc_shared((32,), "int32"), T.alloc_shared((32,), "int32")
            tx = T.get_thread_binding()
            T.fill(S, 5)
            T.fill(Q, 5)
            with T.ws(0):
                T.atomic_add(Q[tx % 32], 2)
            with T.ws(1):
                T.atomic_min(S[tx % 32], 0)
                T.atomic_add(S[(tx + 5) % 32], 1)
                T.atomic_min(Q[tx % 32], 100)
            T.sync_threads()
            T.copy(S, G)
            T.copy(Q, H)

    return main


def test_warp_groups_with_roles():
    """A role's own atomics are ordered by a barrier of its threads, those of two roles by nothing."""
    p = lowered(in_roles(), "sm_90a")
    launch = launch_of(p.host)
    own = [x for x in walk(launch) if isinstance(x, Evaluate) and x.call.op == "named_barrier"]
    assert len(own) == 1 and own[0].call.args[1].value == 128
    assert check_launch(launch)[1] == []
    got = run_device(p, [np.zeros(32, np.int32)] * 2).outputs
    assert got["G"].tolist() == [4] * 32 and got["H"].tolist() == [13] * 32
    planted = without_barriers(p.host, "named_barrier")
    (fault, *_) = check_launch(launch_of(planted))[1]
    assert fault.exact and "`S`" in fault.message
    with pytest.raises(TileLangError) as e:
        run_device(planted, [np.zeros(32, np.int32)] * 2)
    assert e.value.kind == "sim-race"


def flags(kind):
    """Threads that tell each other something by a flag, in code that only some of them come to."""
    @T.prim_func
    def main(G: T.Tensor((4,), "int32"), O: T.Tensor((N,), "int32")):
        with T.Kernel(1, threads=N):
            tx, seen = T.get_thread_binding(), T.alloc_var("int32", init=0)
            if kind == "own":  # one thread counts, waits and sets back
                if tx == 0:
                    T.atomic_add(G[0], 1, memory_order="release")
                    while seen == 0:
                        seen = T.atomic_load(G[0], memory_order="acquire")
                    T.atomic_store(G[0], 0, memory_order="release")
            else:  # one warp waits for another that comes to its statement later
                if tx < 32:
                    while seen == 0:
                        seen = T.atomic_load(G[0], memory_order="acquire")
                if tx == 64:
                    T.atomic_store(G[0], 1, memory_order="release")
            T.sync_threads()
            O[tx] = tx

    return main


@pytest.mark.parametrize("kind", ["own", "handed on"])
def test_flags_that_threads_wait_for_get_no_barriers(kind):
    assert text(flags(kind)).count("__syncthreads()") == 1


def test_facts_about_atomics():
    assert family("atomic_addx4") == "add" and family("atomic_exchange") == "exchange"
    assert commute("add", "add") and commute("load", "load") and not commute("add", "min")
    assert not commute("store", "store") and not commute("load", "add")
    yes, no = Branch(1, True), Branch(1, False)
    assert unordered((yes,), (no,)) and not unordered((yes,), (yes,)) and not unordered((yes,), (Branch(2, False),))
    assert unordered((Iterations(3), yes), (Iterations(3), yes)) and not unordered((), (Iterations(3),))
    assert unordered((WarpRole(0, 1),), (Branch(9, True), WarpRole(1, 2)))
    assert not unordered((WarpRole(0, 2),), (WarpRole(1, 1),))
    add, low = Atomic("add"), Atomic("min")
    assert add.misses_order(low) and not add.misses_order(add) and not low.misses_order(Atomic("load", waits=True))
    assert not Atomic("load").misses_order(Atomic("store")) and Atomic("load").misses_order(add)


def in_a_while_loop(waiting):
    """Old values that are used in a while loop: one that all threads run alike, or one that each leaves by itself."""
    @T.prim_func
    def main(O: T.Tensor((32,), "int32"), X: T.Tensor((N,), "int32")):
        with T.Kernel(1, threads=N):
            S, tx, k = T.alloc_shared((32,), "int32"), T.get_thread_binding(), T.alloc_var("int32", init=0)
            T.fill(S, 3)
            if waiting:
                while k < X[tx]:
                    k = T.atomic_add(S[tx % 32], 1, return_prev=True)
                    T.atomic_max(S[(tx + 1) % 32], 2)
            else:
                while k < 3:
                    for i in T.Parallel(32):
                        O[i] = T.atomic_add(S[i], 1, return_prev=True)
                    for i in T.Parallel(32):
                        T.atomic_max(S[31 - i], 40)
                    k += 1
            T.copy(S, O)

    return main


def test_old_values_in_while_loops():
    """Only threads that leave a loop one by one wait in it."""
    body = text(in_a_while_loop(False))
    assert between(body, "tl::atomic_add", "tl::atomic_max") == 1 and between(body, "while (", "tl::atomic_add") == 1
    body = text(in_a_while_loop(True))
    assert between(body, "while (", "tl::atomic_max") == 0 and "__syncthreads" in body


class _Made:
    def __init__(self, kind, used=False):
        self.update, self.span, self.conds, self.loops = Update(kind, used), None, (), ()


def test_what_cannot_be_compiled_without_a_barrier():
    def must(a, b):
        return must_be_placed(a, b, None)

    assert must(_Made("min"), _Made("add")) and must(_Made("load", True), _Made("add"))
    assert not must(_Made("add", True), _Made("add")) and not must(_Made("exchange", True), _Made("store"))
    assert not waits(_Made("load", True), None)
    assert in_order(_Made("add", True), _Made("add"), Divergence(launch_of(lowered(flags("own")).host)))


def test_bodies_with_one_kind_stay_as_they_are():
    body = two_loops("min", "add").func.body
    loops = [x for x in walk(body) if type(x).__name__ == "Parallel"]
    inner = If(const(True), seq())
    assert as_iterations(loops[0].body, inner, True, None) is inner
    both = as_iterations(seq(loops[0].body, loops[1].body), inner, False, None)
    assert isinstance(both, For) and both.body is inner and both.plan.independent and both.plan.kept


def test_a_barrier_taken_away_beside_copies_by_tma():
    """Programs that the model of the verifier follows."""
    @T.prim_func
    def main(A: T.Tensor((64, 64), "float32"), M: T.Tensor((64,), "float32")):
        with T.Kernel(1, threads=N):
            a, low = T.alloc_shared((64, 64), "float32"), T.alloc_shared((64,), "float32")
            T.fill(low, 100)
            T.copy(A, a)
            for i, j in T.Parallel(64, 64):
                T.atomic_min(low[i], a[i, j])
            for _i, j in T.Parallel(64, 64):
                T.atomic_add(low[j], 1.0)
            T.copy(low, M)

    p = lowered(main, "sm_90a")
    assert any(isinstance(x, Evaluate) and x.call.op == "sync_threads" for x in walk(p.host))
    assert "tma_load" in text(main, "sm_90a") and check_launch(launch_of(p.host))[1] == []
    body = text(main, "sm_90a")
    assert between(body, "tl::atomic_min", "tl::atomic_add") == 1
    kept = body[:body.index("tl::atomic_min")].count("__syncthreads()")
    planted = without_barriers(p.host, but=kept)
    (fault, *_) = check_launch(launch_of(planted))[1]
    assert fault.exact and "`low`" in fault.message
    with pytest.raises(TileLangError) as e:
        run_device(planted, [np.ones((64, 64), np.float32), np.zeros(64, np.float32)])
    assert e.value.kind == "sim-race" and "atomic add" in str(e.value)


def test_an_atomic_store_needs_nothing_there_before_it():
    @T.prim_func
    def main(X: T.Tensor((3, N), "int32"), H: T.Tensor((3, 32), "int32")):
        with T.Kernel(1, threads=N):
            S = T.alloc_shared((32,), "int32")
            for k in T.serial(3):
                for i in T.Parallel(32):
                    T.atomic_store(S[i], 0)
                for i in T.Parallel(N):
                    T.atomic_add(S[X[k, i] % 32], 1)
                for i in T.Parallel(32):
                    H[k, i] = T.atomic_load(S[31 - i])

    x = np.arange(3 * N, dtype=np.int32).reshape(3, N) ** 2
    got = everywhere(main, x)[1]
    assert np.array_equal(got[:, ::-1], [np.bincount(r % 32, minlength=32) for r in x])
