"""Parallel loops whose iterations read what others store: old values are kept, or the loop is refused, through all names."""

import numpy as np
import pytest
from everywhere import WITH_HOPPER, everywhere

import tilelang
import tilelang.language as T
from tilelang.errors import TileLangError
from tilelang.ir import Alloc, walk
from tilelang.target import Target
from tilelang.transform.framework.pass_ import PassContext, run_passes
from tilelang.transform.pipeline import lower
from tilelang.transform.legalize.resolve_parallel_reads import resolve_parallel_reads


def program(body, threads=32, shared=False):
    """body: macro of (F, W, G): 64 int32, seen as 8 x 8 by W, and 64 others, 0 at first."""
    @T.prim_func
    def f(A: T.Tensor((64,), "int32"), B: T.Tensor((2, 64), "int32")):
        with T.Kernel(1, threads=threads):
            F = T.alloc_shared((64,), "int32") if shared else T.alloc_fragment((64,), "int32")
            G = T.alloc_fragment((64,), "int32")
            T.copy(A, F)
            T.clear(G)
            W = T.reshape(F, (8, 8))
            body(F, W, G)
            T.copy(F, B[0, 0:64])
            T.copy(G, B[1, 0:64])

    return f


@T.macro
def up(F, W, G):
    for i in T.Parallel(63):
        F[i + 1] = F[i]


@T.macro
def down_by_a_view(F, W, G):
    for i in T.Parallel(56):
        W[(i + 8) // 8, i % 8] = F[i + 3]


@T.macro
def taken_then_cleared(F, W, G):
    for i in T.Parallel(32):
        G[i + 8] = F[i + 5]
        F[i + 8] = 7


@T.macro
def mirrored_by_a_view(F, W, G):
    for i, j in T.Parallel(8, 8):
        W[i, j] = F[63 - i * 8 - j] * 2


@T.macro
def under_conditions(F, W, G):
    for i in T.Parallel(64):
        if i >= 4:
            F[i] = F[i - 4] + T.if_then_else(i < 60, F[(i + 4) % 64], 0)


def want_up(a, g):
    a[1:] = a[:-1].copy()


def want_down(a, g):
    a[8:] = a[3:59].copy()


def want_taken(a, g):
    g[8:40] = a[5:37]
    a[8:40] = 7


def want_mirrored(a, g):
    a[:] = a[::-1].copy() * 2


def want_conditions(a, g):
    old = a.copy()
    for i in range(4, 64):
        a[i] = old[i - 4] + (old[i + 4] if i < 60 else 0)


COMPUTED = {up: want_up, down_by_a_view: want_down, taken_then_cleared: want_taken, mirrored_by_a_view: want_mirrored,
            under_conditions: want_conditions}


@pytest.mark.parametrize("threads", [1, 32, 96])
@pytest.mark.parametrize("body", COMPUTED, ids=lambda b: b.__name__)
def test_old_values_are_read_on_every_execution(body, threads):
    f = program(body, threads)
    a = np.random.default_rng(3).integers(-99, 99, 64).astype(np.int32)
    want = np.stack([a, np.zeros_like(a)])
    COMPUTED[body](want[0], want[1])
    _, got = everywhere(f, a, on=WITH_HOPPER if threads == 96 else ("tile", "simulator", "cpu"))
    np.testing.assert_array_equal(got, want)


@T.macro
def stored_then_read(F, W, G):
    for i in T.Parallel(32):
        F[i] = 7
        G[i] = F[i + 3]


@T.macro
def stored_then_read_by_a_view(F, W, G):
    for i in T.Parallel(32):
        W[i // 8, i % 8] = 7
        G[i] = F[i + 3]


@T.macro
def read_again_after_the_store(F, W, G):
    for i in T.Parallel(32):
        for k in T.serial(2):
            F[i + 1] = F[i] + k


REFUSED = {stored_then_read: "`F`", stored_then_read_by_a_view: "`F` and `W`", read_again_after_the_store: "`F`"}


@pytest.mark.parametrize("target", ["c", "sm_90a"])
@pytest.mark.parametrize("body", REFUSED, ids=lambda b: b.__name__)
def test_reads_of_what_others_have_stored_are_refused(body, target):
    with pytest.raises(TileLangError, match=f"element of {REFUSED[body]} that") as e:
        lower(program(body).func, Target("c" if target == "c" else {"kind": "cuda", "arch": target}))
    assert e.value.kind == "parallel-order" and "test_resolve_parallel_reads.py" in str(e.value)


def test_shared_memory_that_others_store_is_refused():
    with pytest.raises(TileLangError, match="element of `F` that") as e:
        lower(program(up, shared=True).func, Target("c"))
    assert e.value.kind == "parallel-order"


def of_tensors(body, n=16):
    """body: macro of (A, b, n): an 8 x n tensor of int32 and the index of one of two blocks."""
    @T.prim_func
    def f(A: T.Tensor((8, n), "int32")):
        with T.Kernel(2, threads=32) as b:
            body(A, b, n)

    return f


@T.macro
def one_to_the_left(A, b, n):
    for j in T.Parallel(15):
        A[b, j] = A[b, j] + A[b, j + 1]


@T.macro
def mirrored_rows(A, b, n):
    for i, j in T.Parallel(4, 16):
        A[i, j] = A[3 - i, j]


@T.macro
def left_half_from_the_right(A, b, n):
    for j in T.Parallel(8):
        A[b, j] = A[b, j + 8]


@T.macro
def outside_of_the_row(A, b, n):
    for i, j in T.Parallel(8, 16):
        if j == 15:
            A[i, j] = A[i, j + 1]
        if j == 0:
            A[i, j - 1] = A[i, j + 3]


@T.macro
def swapped(A, b, n):
    for j in T.Parallel(8):
        t = A[b, j]
        A[b, j] = A[b, 15 - j]
        A[b, 15 - j] = t


@pytest.mark.parametrize("n", [16, T.dynamic("n")], ids=["static", "dynamic"])
@pytest.mark.parametrize("body", [one_to_the_left, mirrored_rows], ids=lambda b: b.__name__)
def test_elements_of_tensors_that_other_iterations_store_are_refused(body, n):
    """They were read before or after the store, as threads happened to run."""
    with pytest.raises(TileLangError) as caught:
        lower(of_tensors(body, n).func, Target({"kind": "cuda", "arch": "sm_80"}))
    assert caught.value.kind == "parallel-order"


@pytest.mark.parametrize("body", [left_half_from_the_right, outside_of_the_row, swapped], ids=lambda b: b.__name__)
def test_elements_of_tensors_that_only_their_iteration_stores_are_left_alone(body):
    """An access outside reads no element of the next row."""
    f = of_tensors(body).func
    assert run_passes(f, (resolve_parallel_reads,), PassContext(Target("cpu"))) == f


@T.macro
def own_element(F, W, G):
    for i in T.Parallel(64):
        F[i] = F[i] + 1
        G[i] = W[i // 8, i % 8] * 2


@T.macro
def other_half(F, W, G):
    for i in T.Parallel(32):
        F[i] = F[i + 32]


@T.macro
def swapped_by_one_of_two(F, W, G):
    for i in T.Parallel(64):
        if i < i ^ 1:
            G[i] = F[i]
            F[i] = F[i ^ 1]
            F[i ^ 1] = G[i]


@T.macro
def where_memory_says(F, W, G):
    for i in T.Parallel(64):
        if F[i] > 0:
            F[i] = G[(F[i] + i) % 64]


@pytest.mark.parametrize("body", [own_element, other_half, swapped_by_one_of_two, where_memory_says], ids=lambda b: b.__name__)
def test_what_is_an_iterations_own_or_does_not_show_is_left_alone(body):
    f = program(body).func
    got = run_passes(f, [resolve_parallel_reads], PassContext())
    assert sum(isinstance(x, Alloc) for x in walk(got)) == sum(isinstance(x, Alloc) for x in walk(f))


@T.macro
def sums_read_behind(F, W, G):
    for i, j in T.Parallel(8, 8):
        G[i] += j + 1
        F[i * 8 + j] = G[i]


@T.macro
def sums_read_in_front(F, W, G):
    for i, j in T.Parallel(8, 8):
        F[i * 8 + j] = G[i]
        G[i] += j + 1


@T.macro
def sums_of_sums(F, W, G):
    for i, j in T.Parallel(8, 8):
        G[i] += W[i, j]
        G[i + 8] += G[i]


SUMS = np.cumsum(np.arange(8) + 1)
SUMS_OF_F = np.cumsum(np.arange(64).reshape(8, 8), 1)


@pytest.mark.parametrize("threads", [32, 128])
@pytest.mark.parametrize("body, f, g", [
    (sums_read_behind, np.tile(SUMS, 8), [36] * 8 + [0] * 8),
    (sums_read_in_front, np.tile(SUMS - np.arange(8) - 1, 8), [36] * 8 + [0] * 8),
    (sums_of_sums, np.arange(64), [*SUMS_OF_F[:, -1], *SUMS_OF_F.sum(1)]),
], ids=["behind", "in front", "of sums"])
def test_sums_of_several_iterations_are_seen_as_far_as_they_are_formed(body, f, g, threads):
    """GPUs did a statement for a whole vector of iterations before the next one, and read what those further on had added."""
    out = everywhere(program(body, threads), np.arange(64, dtype=np.int32), on=WITH_HOPPER)[1]
    assert np.array_equal(out[0], f) and np.array_equal(out[1, :16], g)


@T.macro
def up_to_forty(F, W, G):
    for i in T.Parallel(63):
        if i > 40:
            continue
        F[i + 1] = F[i]


def test_iterations_that_go_on_to_the_next_are_followed():
    """Loops with `continue` were passed over: the tile meaning gave old values, the CPU new ones."""
    a = np.arange(64, dtype=np.int32)
    want = np.where((a > 0) & (a < 42), a - 1, a)
    assert np.array_equal(everywhere(program(up_to_forty), a, on=WITH_HOPPER)[1][0], want)
    with pytest.raises(TileLangError) as e:
        lower(program(up_to_forty, shared=True).func, Target("c"))
    assert e.value.kind == "parallel-order"


@T.macro
def read_behind_updates(F, W, G):
    for i in T.Parallel(64):
        T.atomic_add(F[i % 4], 1)
        G[i] = F[(i + 1) % 4]


@T.macro
def read_before_updates(F, W, G):
    for i in T.Parallel(64):
        G[i] = W[0, (i + 1) % 4]
        T.atomic_max(F[i % 4], 99)


@T.macro
def value_of_an_update(F, W, G):
    for i in T.Parallel(64):
        T.atomic_add(F[i % 4], F[(i + 1) % 4])


@T.macro
def stored_beside_updates(F, W, G):
    for i in T.Parallel(64):
        if i < 4:
            F[i] = 7
        T.atomic_add(F[i % 4], 1)


BESIDE_UPDATES = {read_behind_updates: "reads", read_before_updates: "reads", value_of_an_update: "reads",
                  stored_beside_updates: "stores in"}


@pytest.mark.parametrize("target", ["c", "sm_90a"])
@pytest.mark.parametrize("body", BESIDE_UPDATES, ids=lambda b: b.__name__)
def test_plain_accesses_to_what_others_update_atomically_are_refused(body, target):
    with pytest.raises(TileLangError, match=f"{BESIDE_UPDATES[body]} the element of `[FW]` that .* updates atomically") as e:
        lower(program(body, shared=True).func, Target("c" if target == "c" else {"kind": "cuda", "arch": target}))
    assert e.value.kind == "parallel-order" and "T.atomic_load" in str(e.value)


def test_tensors_that_others_update_atomically_are_not_read_either():
    @T.prim_func
    def f(C: T.Tensor((4,), "int32"), B: T.Tensor((64,), "int32")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(64):
                T.atomic_add(C[i % 4], 1)
                B[i] = C[(i + 1) % 4]

    with pytest.raises(TileLangError) as e:
        lower(f.func, Target("c"))
    assert e.value.kind == "parallel-order"


@T.macro
def own_updates(F, W, G):
    for i in T.Parallel(64):
        T.atomic_add(F[i], 3)
        G[i] = W[i // 8, i % 8]


@T.macro
def read_and_updated_apart(F, W, G):
    for i in T.Parallel(32):
        T.atomic_add(F[i % 4], 1)
        G[i] = F[i + 32]


@T.macro
def a_guard_of_a_maximum(F, W, G):
    for i in T.Parallel(64):
        if F[i % 4] < i:
            T.atomic_max(F[i % 4], i)


@pytest.mark.parametrize("body", [own_updates, read_and_updated_apart], ids=lambda b: b.__name__)
def test_what_no_other_iteration_updates_is_read(body):
    a = np.arange(64, dtype=np.int32)
    got = everywhere(program(body, shared=True), a, on=WITH_HOPPER)[1]
    f = a + 3 if body is own_updates else np.where(a < 4, a + 8, a)
    g = f if body is own_updates else np.where(a < 32, np.roll(a, -32), 0)
    assert np.array_equal(got, [f, g])


def test_whether_a_maximum_would_change_something_may_be_looked_up_first():
    lower(program(a_guard_of_a_maximum, 64, shared=True).func, Target({"kind": "cuda", "arch": "sm_80"}))
    got = everywhere(program(a_guard_of_a_maximum, 64, shared=True), np.zeros(64, np.int32))[1]
    assert got[0, :4].tolist() == [60, 61, 62, 63]


def of_degree(n):
    @T.prim_func
    def f(A: T.Tensor((64,), "float32")):
        with T.Kernel(1, threads=32):
            F = T.alloc_fragment((64,), "float32")
            T.copy(A, F)
            for i in T.Parallel(64):
                F[i] = horner(F[i], n)
            T.copy(F, A)

    return f


def horner(x, n):
    y = x * 0.5
    for k in range(n):
        y = y * x + 0.25 * k
    return y


@pytest.mark.timeout(60)
def test_parts_of_a_deep_expression_are_looked_at_once():
    # Each level was visited twice: its children by their fields, and again as kept for other passes.  Degree 40 took hours.
    got = lower(of_degree(40).func, Target({"kind": "cuda", "arch": "sm_90a"}))
    assert got.kernels


ROTATIONS = {"by a remainder": lambda i, v: (i + v % 67) % 64, "by any value": lambda i, v: (i + v) % 64,
             "by a mask": lambda i, v: (i + v) & 63, "backwards": lambda i, v: (63 - i + v % 67) % 64,
             "by steps of five": lambda i, v: (5 * i + v) % 64}
COLLISIONS = {"by steps of two": lambda i, v: (2 * i + v) % 64, "of fewer elements": lambda i, v: (i + v) % 63}


def rotated(index):
    @T.prim_func
    def f(X: T.Tensor((1,), "int32"), Y: T.Tensor((64,), "float32")):
        with T.Kernel(1, threads=64):
            s, v = T.alloc_shared((64,), "float32"), T.alloc_var("int32")
            v = X[0]
            T.clear(s)
            for i in T.Parallel(64):
                s[index(i, v)] += 1.0 + i
            T.copy(s, Y)
    return f


@pytest.mark.parametrize("name", ROTATIONS)
def test_an_index_rotated_by_a_variable_is_an_element_of_its_own(name):
    """It was rejected: no two remainders of i + v by 64 are equal for 64 values of i."""
    want = np.zeros(64, np.float32)
    want[[int(ROTATIONS[name](i, 5)) for i in range(64)]] = 1.0 + np.arange(64)
    gpu = {"kind": "cuda", "arch": "sm_80"}
    for on in ({"target": "cpu"}, *({"target": gpu, "execution_backend": x} for x in ("tile", "simulator"))):
        got = np.zeros(64, np.float32)
        tilelang.compile(rotated(ROTATIONS[name]), **on)(np.array([5], np.int32), got)
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("name", COLLISIONS)
def test_rotations_that_meet_are_refused(name):
    with pytest.raises(TileLangError) as e:
        tilelang.compile(rotated(COLLISIONS[name]), target="cpu")
    assert e.value.kind == "parallel-order"
