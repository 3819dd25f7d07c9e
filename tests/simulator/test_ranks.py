"""Programs of several ranks: both simulators agree, memory is weak between devices, and faults of synchronisation are found."""

import numpy as np
import pytest

import tilelang.language as T
from tilelang.errors import TileLangError
from tilelang.ir import parse, to_text
from tilelang.simulator import run_device_ranks, run_tile_ranks
from tilelang.target import Target
from tilelang.transform.pipeline import lower

TARGETS = {arch: Target({"kind": "cuda", "arch": arch}) for arch in ("sm_80", "sm_90a")}
N = 256


def lowered(program, arch="sm_90a"):
    return lower(program.func, TARGETS[arch], {"tl.disable_data_race_check": True})  # simulators find what is planted


def agree(program, args, seeds=(None, 1, 2)):
    """The outputs of each rank, which both simulators give under every schedule."""
    want = run_tile_ranks(program, args)
    for seed in seeds:
        got = run_tile_ranks(program, args, seed=seed)
        assert all(np.array_equal(a[k], b[k]) for a, b in zip(want, got) for k in a)
        for arch in TARGETS:
            got = [r.outputs for r in run_device_ranks(lowered(program, arch), args, seed=seed)]
            assert all(np.array_equal(a[k], b[k]) for a, b in zip(want, got) for k in a), (seed, arch)
    return want


def kind_of(program, args, seeds=(None,), **kw):
    """The kind of the first error under these schedules, None without one; and its text."""
    p = lowered(program)
    for seed in seeds:
        try:
            run_device_ranks(p, args, seed=seed, **kw)
        except TileLangError as e:
            return e.kind, str(e)
    return None, ""


def ring(signal=True, wait=True, skip=1, scope="sys", barrier=True):
    """Each rank stores its part on the next one, signals it, and waits for the part of the one before."""

    @T.prim_func
    def main(X: T.Tensor((N,), "float32"), S: T.SymmTensor((N,), "float32"), F: T.SymmTensor((2,), "int64"),
             Y: T.Tensor((N,), "float32")):
        with T.Kernel(2, threads=64) as bx:
            tx = T.get_thread_binding()
            right = (T.get_rank() + 1) % T.get_num_ranks()
            T.copy(X[bx * 128:bx * 128 + 128], T.remote(S, right)[bx * 128:bx * 128 + 128])
            if signal:
                if barrier:
                    T.sync_threads()
                if tx == 0:
                    T.atom_add(F[bx], 1, scope=scope, sem="release", dst_pe=(T.get_rank() + skip) % T.get_num_ranks())
            if wait:
                T.wait_ge(F[bx], 1)
            T.copy(S[bx * 128:bx * 128 + 128], Y[bx * 128:bx * 128 + 128])

    return main


def ring_args(ranks):
    return [[np.arange(N, dtype=np.float32) + 1000 * r, np.zeros(N, np.float32), np.zeros(2, np.int64), np.zeros(N, np.float32)]
            for r in range(ranks)]


@pytest.mark.parametrize("ranks, seeds", [(2, (None, 1, 2)), (4, (None, 1)), (8, (1,))])
def test_a_rank_reads_what_another_stored_and_signalled(ranks, seeds):
    args = ring_args(ranks)
    out = agree(ring(), args, seeds)
    assert all((out[r]["Y"] == args[r - 1][0]).all() for r in range(ranks))


def test_one_rank_is_its_own_neighbour():
    args = ring_args(1)
    assert (agree(ring(), args, (None,))[0]["Y"] == args[0][0]).all()


def words(boxes):
    """Each rank takes numbers of the one before out of the words that end its waits: a number below the count of the round."""

    @T.prim_func
    def main(X: T.Tensor((64,), "int64"), B: T.SymmTensor((boxes, 64), "int64"), Y: T.Tensor((4, 64), "int64")):
        with T.Kernel(1, threads=64):
            tx, word, right = T.get_thread_binding(), T.alloc_var("int64"), (T.get_rank() + 1) % T.get_num_ranks()
            for r in T.serial(4):
                T.st(B[r % boxes, tx], (r + 1) * (1 << 32) + X[tx] + r, scope="sys", dst_pe=right)
                T.wait_ge(B[r % boxes, tx], (r + 1) * (1 << 32), found=word)
                Y[r, tx] = word % (1 << 32)

    return main


def test_a_wait_gives_the_word_that_ended_it():
    args = [[np.arange(64) + 1000 * r, np.zeros((2, 64), np.int64), np.zeros((4, 64), np.int64)] for r in range(2)]
    out = agree(words(2), args)
    assert all((out[r]["Y"] == args[r - 1][0] + np.arange(4)[:, None]).all() for r in range(2))


def test_words_of_one_box_are_overwritten():
    args = [[np.arange(64), np.zeros((1, 64), np.int64), np.zeros((4, 64), np.int64)] for r in range(2)]
    found = [run_device_ranks(lowered(words(1)), args, seed=s)[r].outputs["Y"] for s in range(6) for r in range(2)]
    assert any((y != np.arange(64) + np.arange(4)[:, None]).any() for y in found)


@pytest.mark.parametrize("fault, kind, text", [
    (dict(signal=False), "sim-barrier", "F >= 1"), (dict(wait=False), "sim-race", "of rank"), (dict(skip=2), "sim-race", ""),
    (dict(scope="gpu"), "sim-race", "of rank"), (dict(barrier=False), "sim-race", ""),
])
def test_a_planted_fault_is_found(fault, kind, text):
    found, said = kind_of(ring(**fault), ring_args(3), (None, 1, 2))
    assert found == kind and text in said, said


def test_an_endless_wait_names_its_line_and_its_ranks():
    found, said = kind_of(ring(signal=False), ring_args(2))
    assert found == "sim-barrier" and "T.wait_ge(F[bx], 1)" in said and "on rank 0 until F >= 1, which is 0" in said


def test_a_rank_that_does_not_exist_is_an_error():
    @T.prim_func
    def main(S: T.SymmTensor((N,), "float32")):
        with T.Kernel(1, threads=64):
            T.fill(T.remote(S, T.get_rank() + 1), 0)

    assert kind_of(main, [[np.zeros(N, np.float32)]] * 2)[0] == "sim-rank"


WAITS = [(T.wait_eq, 3, 3), (T.wait_ne, 0, 3), (T.wait_ge, 2, 3), (T.wait_gt, 2, 3), (T.wait_le, -2, -3), (T.wait_lt, -2, -3)]


@pytest.mark.parametrize("wait, expected, sent", WAITS)
@pytest.mark.parametrize("op", ["add", "set"])
def test_a_signal_ends_a_wait(wait, expected, sent, op):
    @T.prim_func
    def main(S: T.SymmTensor((64,), "float32"), F: T.SymmTensor((1,), "int32"), Y: T.Tensor((64,), "float32")):
        with T.Kernel(1, threads=64):
            if T.get_rank() == 0:
                T.fill(T.remote(S, 1), 5)
                T.signal(F[0], sent, rank=1, op=op)
            else:
                wait(F[0], expected)
                T.copy(S, Y)

    args = [[np.zeros(64, np.float32), np.zeros(1, np.int32), np.zeros(64, np.float32)] for _ in range(2)]
    out = agree(main, args, (None, 1))
    assert (out[1]["Y"] == 5).all() and not out[0]["Y"].any()


def rounds(count, second=True):
    """In each round a rank reads the others' numbers and then changes its own; `second`: after all have read them."""

    @T.prim_func
    def main(P: T.SymmTensor((1, 16), "int64"), S: T.SymmTensor((64,), "int32"), Y: T.Tensor((count, 64), "int32")):
        with T.Kernel(1, threads=64):
            for k in T.serial(count):
                T.barrier_all(P[0, 0:16])
                T.copy(T.remote(S, (T.get_rank() + 1) % T.get_num_ranks()), Y[k, 0:64])
                if second:
                    T.barrier_all(P[0, 0:16])
                for i in T.Parallel(64):
                    S[i] += 1

    return main


def round_args(ranks, count):
    return [[np.zeros((1, 16), np.int64), np.full(64, 10 * r, np.int32), np.zeros((count, 64), np.int32)] for r in range(ranks)]


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_barrier_of_ranks_serves_many_rounds(ranks):
    out = agree(rounds(4), round_args(ranks, 4))
    assert all((out[r]["Y"] == 10 * ((r + 1) % ranks) + np.arange(4)[:, None]).all() for r in range(ranks))
    assert all((out[r]["P"][0, :ranks] == 8).all() for r in range(ranks))


def exchange(last=True):
    """Each rank reads the numbers of the next one, and stores them in its own at the end."""

    @T.prim_func
    def main(P: T.SymmTensor((2, 8), "int64"), S: T.SymmTensor((128,), "int32")):
        with T.Kernel(2, threads=32) as b:
            held = T.alloc_fragment((64,), "int32")
            T.barrier_all(P[b, 0:8])
            T.copy(T.remote(S, (T.get_rank() + 1) % T.get_num_ranks())[b * 64:b * 64 + 64], held)
            if last:
                T.barrier_all(P[b, 0:8])
            T.copy(held, S[b * 64:b * 64 + 64])

    return main


@pytest.mark.parametrize("seed", [None, 1, 2, 3])
def test_a_rank_may_be_a_launch_ahead_of_the_others(seed):
    args = [[np.zeros((2, 8), np.int64), np.full(128, r, np.int32)] for r in range(3)]
    out = run_device_ranks(lowered(exchange()), args, seed=seed, repeats=4)
    assert all((out[r].outputs["S"] == (r + 4) % 3).all() and (out[r].outputs["P"][:, :3] == 8).all() for r in range(3))


def test_what_the_next_launch_overwrites_too_early_is_a_race():
    args = [[np.zeros((2, 8), np.int64), np.full(128, r, np.int32)] for r in range(3)]
    assert kind_of(exchange(last=False), args, (None, 1), repeats=4)[0] == "sim-race"
    assert kind_of(ring(), ring_args(2), (None, 1), repeats=2)[0] == "sim-race"  # the flag stands at 1 from the first launch on


def test_repeats_need_one_launch_on_several_ranks():
    assert kind_of(ring(), ring_args(1), repeats=2)[0] == "sim-unsupported"


def test_a_flag_that_is_used_again_too_early_is_a_race():
    assert kind_of(rounds(4, second=False), round_args(2, 4), (None, 1, 2))[0] == "sim-race"


@pytest.mark.parametrize("move, put", [(T.put_block, True), (T.get_block, False), (T.put_warp, True), (T.get_warp, False)])
@pytest.mark.parametrize("size", [64, 1000])
def test_elements_move_to_and_from_another_rank(move, put, size):
    @T.prim_func
    def main(P: T.SymmTensor((1, 16), "int64"), X: T.SymmTensor((1024,), "float16"), Y: T.SymmTensor((1024,), "float16")):
        with T.Kernel(1, threads=32):
            peer = (T.get_rank() + 1) % T.get_num_ranks()
            T.barrier_all(P[0, 0:16])
            if put:
                move(X[8], Y[0], size, dst_pe=peer)
            else:
                move(X[8], Y[0], size, src_pe=peer)
            T.barrier_all(P[0, 0:16])

    args = [[np.zeros((1, 16), np.int64), (np.arange(1024) + r).astype(np.float16), np.zeros(1024, np.float16)]
            for r in range(2)]
    out = agree(main, args, (None, 1))
    for r in range(2):
        assert (out[r]["Y"][:size] == args[1 - r][1][8:8 + size]).all() and not out[r]["Y"][size:].any()


def test_an_accumulator_goes_to_the_next_rank():
    @T.prim_func
    def main(A: T.Tensor((64, 128), "float16"), B: T.Tensor((128, 64), "float16"), P: T.SymmTensor((1, 16), "int64"),
             S: T.SymmTensor((64, 64), "float16"), C: T.Tensor((64, 64), "float16")):
        with T.Kernel(1, threads=128):
            a, b = T.alloc_shared((64, 64), "float16"), T.alloc_shared((64, 64), "float16")
            other, acc = T.alloc_shared((64, 64), "float16"), T.alloc_fragment((64, 64), "float32")
            T.clear(acc)
            for k in T.Pipelined(2, num_stages=2):
                T.copy(A[0, k * 64], a)
                T.copy(B[k * 64, 0], b)
                T.gemm(a, b, acc)
            T.copy(acc, T.remote(S, (T.get_rank() + 1) % T.get_num_ranks()))
            T.barrier_all(P[0, 0:16])
            T.copy(S, other)
            for i, j in T.Parallel(64, 64):
                acc[i, j] += other[j, i]
            T.copy(acc, C)

    rng = np.random.default_rng(0)
    make = lambda *shape: rng.integers(-2, 3, shape).astype(np.float16)  # noqa: E731 - sums are exact
    args = [[make(64, 128), make(128, 64), np.zeros((1, 16), np.int64), make(64, 64), make(64, 64)] for _ in range(2)]
    products = [a[0].astype(np.float32) @ a[1].astype(np.float32) for a in args]
    out = agree(main, args, (None, 1))
    assert all((out[r]["C"] == products[r] + products[1 - r].T).all() for r in range(2))


def test_tiles_that_other_ranks_reach_are_not_copied_by_tma():
    @T.prim_func
    def main(S: T.SymmTensor((128, 128), "float16"), P: T.SymmTensor((1, 16), "int64"), C: T.Tensor((128, 128), "float16")):
        with T.Kernel(1, threads=128):
            s = T.alloc_shared((128, 128), "float16")
            T.barrier_all(P[0, 0:16])
            T.copy(S, s)
            T.copy(s, C)
            T.copy(s, S)

    from tilelang.codegen.cuda.printer import print_kernel

    (kernel,) = lowered(main).kernels
    text = print_kernel(kernel)
    body = text[text.index("__global__"):]
    assert "S_map" not in body and "half_t* S," in body and "__restrict__ S" not in body


def test_a_program_of_several_ranks_prints_and_parses_back():
    func = ring().func
    assert parse(to_text(func)) == func and "symmetric=True" in to_text(func)


def test_an_address_that_some_threads_compute_stays_with_them():
    """The barrier that their stores would need stands in no branch: the address of a tensor went into a variable there."""
    @T.prim_func
    def main(F: T.SymmTensor((64,), "int32"), Y: T.Tensor((64,), "int32")):
        with T.Kernel(1, threads=64):
            tx = T.get_thread_binding()
            if tx < 8:
                F[32 + tx] = 5
                T.atom_add(F[tx], F[32 + tx], scope="sys", sem="release", dst_pe=(T.get_rank() + 1) % T.get_num_ranks())
                T.wait_eq(F[tx], 5)
            Y[tx] = T.if_then_else(tx < 8, 1, 0)

    out = agree(main, [[np.zeros(64, np.int32), np.zeros(64, np.int32)] for _ in range(2)], (None, 1))
    assert all((r["F"][:8] == 5).all() for r in out)


# ---- litmus tests: what loads of flags may return ----------------------------------------------------------------------------


def outcomes(program, ranks, runs=60):
    """All results R of the ranks, over schedules chosen at random."""
    p, found = lowered(program), set()
    args = [[np.zeros(2, np.int32), np.zeros(2, np.int32)] for _ in range(ranks)]
    for seed in (None, *range(runs)):
        found.add(tuple(tuple(r.outputs["R"].tolist()) for r in run_device_ranks(p, args, seed=seed)))
    return found


def store_buffering(store, load, fence):
    @T.prim_func
    def main(F: T.SymmTensor((2,), "int32"), R: T.Tensor((2,), "int32")):
        with T.Kernel(1, threads=32):
            if T.get_thread_binding() == 0:
                T.st(F[T.get_rank()], 1, scope="sys", sem=store, dst_pe=0)
                if fence:
                    T.fence_sys()
                R[0] = T.ld(F[1 - T.get_rank()], scope="sys", sem=load, src_pe=0)

    return main


def test_store_buffering_lets_both_loads_miss_the_stores():
    assert ((0, 0), (0, 0)) in outcomes(store_buffering("release", "acquire", False), 2)


def test_fences_of_system_scope_forbid_store_buffering():
    found = outcomes(store_buffering("relaxed", "relaxed", True), 2)
    assert ((0, 0), (0, 0)) not in found and ((1, 0), (0, 0)) in found


def independent_reads(fence):
    """Ranks 0 and 1 store x and y; rank 2 sees x and then loads y, rank 3 sees y and then loads x."""

    @T.prim_func
    def main(F: T.SymmTensor((2,), "int32"), R: T.Tensor((2,), "int32")):
        with T.Kernel(1, threads=32):
            me = T.get_rank()
            if T.get_thread_binding() == 0:
                if me < 2:
                    T.st(F[me], 1, scope="sys", sem="release", dst_pe=0)
                else:
                    T.wait_eq(F[me - 2], 1, peer=0)
                    if fence:
                        T.fence_sys()
                    R[0] = T.ld(F[3 - me], scope="sys", sem="acquire", src_pe=0)

    return main


def test_ranks_may_see_independent_stores_in_different_orders():
    assert ((0, 0),) * 4 in outcomes(independent_reads(False), 4, 80)


def test_fences_of_system_scope_give_independent_stores_one_order():
    found = outcomes(independent_reads(True), 4, 80)
    assert ((0, 0),) * 4 not in found and ((0, 0), (0, 0), (1, 0), (0, 0)) in found


def test_a_flag_never_goes_back():
    @T.prim_func
    def main(F: T.SymmTensor((2,), "int32"), R: T.Tensor((2,), "int32")):
        with T.Kernel(1, threads=32):
            if T.get_thread_binding() == 0:
                if T.get_rank() == 0:
                    T.st(F[0], 1, scope="sys", sem="relaxed")
                    T.st(F[0], 2, scope="sys", sem="relaxed")
                else:
                    R[0] = T.ld(F[0], scope="sys", src_pe=0)
                    R[1] = T.ld(F[0], scope="sys", src_pe=0)

    seen = {r for _, r in outcomes(main, 2)}
    assert all(a <= b for a, b in seen) and len(seen) >= 5


def passing(store, load, fences=False):
    """Rank 0 stores data and then a flag on rank 1, which reads the data if it sees the flag."""

    @T.prim_func
    def main(F: T.SymmTensor((2,), "int32"), R: T.Tensor((2,), "int32"), D: T.SymmTensor((32,), "int32")):
        with T.Kernel(1, threads=32):
            if T.get_thread_binding() == 0:
                if T.get_rank() == 0:
                    T.remote(D, 1)[0] = 7
                    if fences:
                        T.fence_sys()
                    T.st(F[0], 1, scope="sys", sem=store, dst_pe=1)
                elif T.ld(F[0], scope="sys", sem=load) == 1:
                    if fences:
                        T.fence_sys()
                    R[0] = D[0]

    return main


@pytest.mark.parametrize("store, load, fences, ordered", [
    ("release", "acquire", False, True), ("relaxed", "relaxed", True, True), ("relaxed", "acquire", False, False),
    ("release", "relaxed", False, False), ("relaxed", "relaxed", False, False)])
def test_message_passing_needs_a_release_and_an_acquire(store, load, fences, ordered):
    args = [[np.zeros(2, np.int32), np.zeros(2, np.int32), np.zeros(32, np.int32)] for _ in range(2)]
    assert kind_of(passing(store, load, fences), args, range(20))[0] == (None if ordered else "sim-race")
