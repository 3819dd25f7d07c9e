"""What a reducer of the current form may be used for."""

import pytest

import tilelang.language as T
from tilelang.errors import TileLangError

N, F32 = 16, "float32"


def refused(body, kind):
    """Tracing `body(r, A, total)` between the launch and its end is refused as `kind`."""
    inside = T.macro(body)
    with pytest.raises(TileLangError) as caught:

        @T.prim_func
        def f(A: T.Tensor((N,), F32)):
            with T.Kernel(1, threads=32) as bx:
                r = T.alloc_reducer((N,), F32, op="sum")
                total = T.alloc_fragment((N,), F32)
                inside(r, A, total, bx)

    assert caught.value.kind == kind


def started(r, A):
    T.reducer_init(r)
    for i in T.Parallel(N):
        T.reducer_update(r[i], A[i])


start = T.macro(started)


def read_before_the_end(r, A, total, bx):
    start(r, A)
    for i in T.Parallel(N):
        A[i] = r[i]
    T.finalize_reducer(r, total)


def read_after_the_end(r, A, total, bx):
    start(r, A)
    T.finalize_reducer(r, total)
    T.copy(r, A)


def stored(r, A, total, bx):
    T.reducer_init(r)
    for i in T.Parallel(N):
        r[i] = A[i]
    T.finalize_reducer(r, total)


def cleared(r, A, total, bx):
    start(r, A)
    T.clear(r)
    T.finalize_reducer(r, total)


def added_to_itself(r, A, total, bx):
    T.reducer_init(r)
    for i in T.Parallel(N):
        T.reducer_update(r[i], r[i])
    T.finalize_reducer(r, total)


def read_through_a_view(r, A, total, bx):
    start(r, A)
    v = T.view(r, (4, 4))
    for i, j in T.Parallel(4, 4):
        A[i * 4 + j] = v[i, j]
    T.finalize_reducer(r, total)


USES = [read_before_the_end, read_after_the_end, stored, cleared, added_to_itself, read_through_a_view]


@pytest.mark.parametrize("body", USES)
def test_a_reducer_is_used_by_its_calls_alone(body):
    """Each was read and written as the fragment that holds it."""
    refused(body, "reducer-use")


def never_finalised(r, A, total, bx):
    start(r, A)


def initialised_in_a_branch(r, A, total, bx):
    if bx > 0:
        T.reducer_init(r)
    for i in T.Parallel(N):
        T.reducer_update(r[i], A[i])
    T.finalize_reducer(r, total)


def finalised_in_a_loop(r, A, total, bx):
    start(r, A)
    for _ in T.serial(3):
        T.finalize_reducer(r, total)


@pytest.mark.parametrize("body", [never_finalised, initialised_in_a_branch, finalised_in_a_loop])
def test_each_start_of_a_reducer_meets_its_end(body):
    """A branch that was not taken left the sum of nothing known."""
    refused(body, "reducer-order")


def of_another_shape(r, A, total, bx):
    start(r, A)
    T.finalize_reducer(r, T.alloc_fragment((4, 4), F32))


def of_another_type(r, A, total, bx):
    start(r, A)
    T.finalize_reducer(r, T.alloc_fragment((N,), "float16"))


def start_of_another_type(r, A, total, bx):
    T.reducer_init(r, T.cast(bx, "int32") + 1)


@pytest.mark.parametrize("body", [of_another_shape, of_another_type, start_of_another_type])
def test_the_result_and_the_start_are_of_the_reducers_type(body):
    refused(body, "reducer-operand")
