"""Reads of T.Parallel at places known only at run time: old values of fragments, else refused unless proved to be disjoint."""

import numpy as np
import pytest
from everywhere import WITH_HOPPER, everywhere

import tilelang.language as T
from tilelang.errors import TileLangError
from tilelang.ir import Alloc, walk
from tilelang.target import Target
from tilelang.transform.framework.pass_ import PassContext, run_passes
from tilelang.transform.legalize.resolve_parallel_reads import resolve_parallel_reads
from tilelang.transform.pipeline import TILE_PASSES, lower


def program(body, kind, threads=32):
    """body: macro of (S, V, P, n): 8 x 32 int32 in a fragment ("F"), shared memory ("S") or the tensor ("G"), a view of it as
    256 elements, 8 int32 of a tensor and a scalar."""
    @T.prim_func
    def f(A: T.Tensor((8, 32), "int32"), P: T.Tensor((8,), "int32"), n: T.int32):
        with T.Kernel(1, threads=threads):
            if kind == "G":
                V = T.reshape(A, (256,))
                body(A, V, P, n)
            else:
                S = T.alloc_shared((8, 32), "int32") if kind == "S" else T.alloc_fragment((8, 32), "int32")
                V = T.reshape(S, (256,))
                T.copy(A, S)
                body(S, V, P, n)
                T.copy(S, A)

    return f


# ---- what may meet ----------------------------------------------------------------------------------------------------

@T.macro
def row_of_a_scalar(S, V, P, n):
    for i, j in T.Parallel(8, 32):
        S[i, j] = S[i, j] + S[n, j]


@T.macro
def row_of_an_element(S, V, P, n):
    for i, j in T.Parallel(8, 32):
        S[i, j] = S[i, j] + S[P[0], j]


@T.macro
def row_of_a_serial_loop(S, V, P, n):
    for k in T.serial(3):
        for i, j in T.Parallel(8, 32):
            S[i, j] = S[i, j] + S[k * 2, j]


@T.macro
def pivot_row(S, V, P, n):
    for k in T.serial(8):
        for j in T.Parallel(32):
            S[k, j] = S[k, j] // (S[k, k] % 7 + 9)


@T.macro
def elimination_with_the_pivot_row(S, V, P, n):
    for k in T.serial(3):
        for i, j in T.Parallel(8, 32):
            S[i, j] -= S[i, k] * S[k, j]


@T.macro
def rotated(S, V, P, n):
    for i in T.Parallel(256):
        V[i] = V[(i + n) % 256]


@T.macro
def gathered_rows(S, V, P, n):
    for i, j in T.Parallel(8, 32):
        S[i, j] = S[P[i % 8], j]


@T.macro
def gathered_elements(S, V, P, n):
    for i, j in T.Parallel(8, 32):
        S[i, j] = S[i, P[j % 8] + 4] * 2


@T.macro
def condition_on_an_element(S, V, P, n):
    for i, j in T.Parallel(8, 32):
        if S[0, 5] > 2:
            S[i, j] = S[i, j] + 1


@T.macro
def choice_by_an_element(S, V, P, n):
    for i, j in T.Parallel(8, 32):
        S[i, j] = T.if_then_else(S[n, 5] > 2, S[i, j] + 1, 7)


@T.macro
def added_through_a_view(S, V, P, n):
    for i in T.Parallel(256):
        V[i] += S[n, i % 32]


@T.macro
def steps_of_a_scan(S, V, P, n):
    for s in T.serial(4):
        for i in T.Parallel(256):
            if i >= 1 << s:
                V[i] = V[i] + V[i - (1 << s)]


@T.macro
def at_a_variable(S, V, P, n):
    row = T.alloc_var("int32")
    for i, j in T.Parallel(8, 32):
        row = P[i]
        S[i, j] = S[row, j] + 1


@T.macro
def at_a_variable_that_starts_anew(S, V, P, n):
    for i, j in T.Parallel(8, 32):
        row = T.alloc_var("int32", init=P[i])
        S[row, j] = S[7 - row, j] + 1


@T.macro
def more_iterations_than_are_counted(S, V, P, n):
    for i, j, k in T.Parallel(8, 32, 512):
        if k == n:
            S[i, j] = S[(i + k) % 8, j]


def want(body, a, p, n):
    old, v = a.copy(), a.reshape(-1)
    o = old.reshape(-1)
    i = np.arange(256)
    if body is row_of_a_scalar:
        a += old[n]
    elif body is row_of_an_element:
        a += old[p[0]]
    elif body is row_of_a_serial_loop:
        for k in range(3):
            a += a[k * 2].copy()
    elif body is pivot_row:
        for k in range(8):
            a[k] //= a[k, k] % 7 + 9
    elif body is elimination_with_the_pivot_row:
        for k in range(3):
            a -= np.outer(a[:, k], a[k])
    elif body is rotated:
        v[:] = o[(i + n) % 256]
    elif body is gathered_rows or body is at_a_variable:
        a[:] = old[p] + (body is at_a_variable)
    elif body is at_a_variable_that_starts_anew:
        a[:] = old[::-1] + 1
    elif body is gathered_elements:
        a[:] = np.tile(old[:, p + 4], 4) * 2
    elif body is condition_on_an_element:
        a += old[0, 5] > 2
    elif body is choice_by_an_element:
        a[:] = old + 1 if old[n, 5] > 2 else 7
    elif body is added_through_a_view:
        v += np.tile(old[n], 8)
    elif body is steps_of_a_scan:
        for s in range(4):
            v[1 << s:] += v[:-(1 << s)].copy()
    elif body is more_iterations_than_are_counted:
        a[:] = old[(np.arange(8) + n) % 8]
    return a


UNPROVED = [row_of_a_scalar, row_of_an_element, row_of_a_serial_loop, pivot_row, elimination_with_the_pivot_row, rotated,
            gathered_rows, gathered_elements, condition_on_an_element, choice_by_an_element, added_through_a_view,
            steps_of_a_scan, at_a_variable, at_a_variable_that_starts_anew, more_iterations_than_are_counted]


@pytest.mark.parametrize("body", UNPROVED, ids=lambda b: b.__name__)
def test_old_values_of_fragments_are_read_at_places_known_at_run_time(body):
    """They were old values in the reference interpreter only: the CPU and GPUs read what iterations before had stored."""
    rng = np.random.default_rng(3)
    a, p, n = rng.integers(0, 9, (8, 32)).astype(np.int32), rng.permutation(8).astype(np.int32), 3
    a[0, 5] = 2
    on = [x for x in WITH_HOPPER if x != "simulator"] if body is more_iterations_than_are_counted else WITH_HOPPER
    got = everywhere(program(body, "F", 96), a, p, n, on=on)[0]
    np.testing.assert_array_equal(got, want(body, a.copy(), p, n))


@pytest.mark.parametrize("kind", ["S", "G"])
@pytest.mark.parametrize("body", UNPROVED, ids=lambda b: b.__name__)
def test_memory_that_other_iterations_may_store_is_refused(body, kind):
    """The CPU ran such loops in order, and GPUs raced."""
    with pytest.raises(TileLangError) as e:
        run_passes(program(body, kind).func, TILE_PASSES, PassContext(Target("c")))
    assert e.value.kind == "parallel-order" and "test_unproved_parallel_reads.py" in str(e.value)


@T.macro
def updates_beside_a_row(S, V, P, n):
    for i in T.Parallel(32):
        T.atomic_add(S[0, i], S[n - 3, 31 - i])


@T.macro
def updates_beside_an_element(S, V, P, n):
    for i in T.Parallel(32):
        T.atomic_add(S[0, i], 1)
        S[1, i] = S[0, P[i % 8]]


@T.macro
def counts_without_atomics(S, V, P, n):
    for i in T.Parallel(8):
        V[P[i]] += 1


@pytest.mark.parametrize("kind", ["S", "G"])
@pytest.mark.parametrize("body", [updates_beside_a_row, updates_beside_an_element, counts_without_atomics],
                         ids=lambda b: b.__name__)
def test_updates_that_may_meet_name_the_atomic_operations(body, kind):
    with pytest.raises(TileLangError) as e:
        run_passes(program(body, kind).func, TILE_PASSES, PassContext(Target("c")))
    assert e.value.kind == "parallel-order" and "T.atomic_" in (e.value.hint or "")


def test_a_read_through_the_read_only_cache_is_a_read():
    @T.macro
    def rotated_by_ldg(S, V, P, n):
        for i in T.Parallel(256):
            V[i] = T.__ldg(V, (i + n) % 256)

    with pytest.raises(TileLangError, match="not proved to be disjoint") as e:
        run_passes(program(rotated_by_ldg, "G").func, TILE_PASSES, PassContext(Target("c")))
    assert e.value.kind == "parallel-order"


@pytest.mark.parametrize("target", ["c", "sm_80", "sm_90a"])
def test_every_target_refuses_alike(target):
    with pytest.raises(TileLangError, match="not proved to be disjoint") as e:
        lower(program(row_of_a_scalar, "S").func, Target("c" if target == "c" else {"kind": "cuda", "arch": target}))
    assert e.value.kind == "parallel-order" and "copy it to a fragment" in e.value.hint


# ---- what is proved to be disjoint ---------------------------------------------------------------------------------------

@T.macro
def column_of_a_serial_loop(S, V, P, n):
    for k in T.serial(8):
        for i, j in T.Parallel(8, 32):
            if j != k:
                S[i, j] += S[i, k]


@T.macro
def elimination_below_the_pivot(S, V, P, n):
    for k in T.serial(8):
        for i, j in T.Parallel(8, 32):
            if i > k and j > k:
                S[i, j] -= S[i, k] * S[k, j]


@T.macro
def rows_above_a_scalar(S, V, P, n):
    for i, j in T.Parallel(8, 32):
        if i < n:
            S[i, j] += S[n, j]


@T.macro
def rows_that_a_scalar_excludes(S, V, P, n):
    for i, j in T.Parallel(8, 32):
        if not (i == n or i == 0):
            S[i, j] += S[n, j] + S[0, j]


@T.macro
def halves_by_turns(S, V, P, n):
    for k in T.serial(n):
        for i, j in T.Parallel(4, 32):
            S[(k + 1) % 2 * 4 + i, j] = S[k % 2 * 4 + 3 - i, j] + 1


@T.macro
def halves_by_turns_in_a_nest(S, V, P, n):
    for _a, _b, _c in T.grid(9, 9, 9):
        for k in T.serial(3):
            for i, j in T.Parallel(4, 32):
                S[(k + 1) % 2 * 4 + i, j] = S[k % 2 * 4 + 3 - i, j] + 1


@T.macro
def half_of_a_variable(S, V, P, n):
    cur = T.alloc_var("int32")
    cur = 0
    for _ in T.serial(4):
        for j in T.Parallel(31):
            S[1 - cur, j] = S[cur, j + 1]
        cur = 1 - cur


@T.macro
def own_row_of_an_element(S, V, P, n):
    for j in T.Parallel(32):
        S[P[0], j] = S[P[0], j] * 2


@T.macro
def own_element_by_a_view(S, V, P, n):
    for i, j in T.Parallel(8, 32):
        V[i * 32 + j] = S[i, j] + 1


@T.macro
def own_element_from_a_scalar_on(S, V, P, n):
    for i in T.Parallel(8):
        V[n * 8 + i] = V[n * 8 + i] * 2 + V[n * 8 + i + 8]


@T.macro
def halves_of_own_rows(S, V, P, n):
    for i, j in T.Parallel(8, 16):
        x = S[i, j]
        S[i, j] = x - S[i, j + 16]
        S[i, j + 16] = S[i, j + 16] + x


@T.macro
def exchanges_of_a_bitonic_sort(S, V, P, n):
    for s in T.serial(5):
        for i in T.Parallel(256):
            if i ^ (1 << s) > i:
                if V[i] > V[i ^ (1 << s)]:
                    x = V[i]
                    V[i] = V[i ^ (1 << s)]
                    V[i ^ (1 << s)] = x


@T.macro
def exchanges_at_a_distance_in_a_variable(S, V, P, n):
    d = T.alloc_var("int32")
    d = 16
    while d > 0:
        for i in T.Parallel(256):
            p = i ^ d
            if p > i:
                if V[i] > V[p]:
                    x = V[i]
                    V[i] = V[p]
                    V[p] = x
        d = d // 2


@T.macro
def elements_from_the_other_rows(S, V, P, n):
    T.assume(n > 0)
    for j in T.Parallel(32):
        S[0, j] = S[n, 31 - j]


@T.macro
def sums_inside_of_an_iteration(S, V, P, n):
    for i in T.Parallel(8):
        for k in T.serial(n):
            S[i, 31] += S[i, k % 31]


@T.macro
def elements_at_a_distance(S, V, P, n):
    T.assume(n >= 128)
    for i in T.Parallel(128):
        V[i] = V[i + n]


@T.macro
def quotients_and_remainders(S, V, P, n):
    for i in T.Parallel(256):
        S[i // 32, i % 32] = V[i] + S[i // 32, i % 32]


@T.macro
def own_place_in_a_variable(S, V, P, n):
    at = T.alloc_var("int32")
    for i in T.Parallel(200):
        at = i + 7
        V[at] = V[at] + 1


PROVED = [column_of_a_serial_loop, elimination_below_the_pivot, rows_above_a_scalar, rows_that_a_scalar_excludes,
          halves_by_turns, halves_by_turns_in_a_nest, half_of_a_variable, own_row_of_an_element,
          own_element_by_a_view, own_element_from_a_scalar_on,
          halves_of_own_rows, exchanges_of_a_bitonic_sort, exchanges_at_a_distance_in_a_variable, elements_from_the_other_rows,
          sums_inside_of_an_iteration, elements_at_a_distance, quotients_and_remainders, own_place_in_a_variable]


@pytest.mark.parametrize("body", PROVED, ids=lambda b: b.__name__)
@pytest.mark.parametrize("kind", ["F", "S", "G"])
def test_accesses_that_are_disjoint_are_left_alone(body, kind):
    f = program(body, kind).func
    got = run_passes(f, [resolve_parallel_reads], PassContext())
    assert sum(isinstance(x, Alloc) for x in walk(got)) == sum(isinstance(x, Alloc) for x in walk(f))
