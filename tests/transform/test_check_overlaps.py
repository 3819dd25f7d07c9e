"""Tile operations whose operands may share elements are refused on every target, unless they are proved to be disjoint."""

import numpy as np
import pytest
from everywhere import everywhere

import tilelang.language as T
from tilelang.errors import TileLangError
from tilelang.target import Target
from tilelang.transform.framework.pass_ import PassContext, run_passes
from tilelang.transform.pipeline import TILE_PASSES, lower


def program(body):
    """body: macro of (S, A, P, n): 32 x 32 int32 of shared memory, the tensor that it is copied from and to, four numbers of
    rows and one."""
    @T.prim_func
    def f(A: T.Tensor((32, 32), "int32"), P: T.Tensor((4,), "int32"), n: T.int32):
        with T.Kernel(1, threads=32):
            S = T.alloc_shared((32, 32), "int32")
            T.copy(A, S)
            body(S, A, P, n)
            T.copy(S, A)

    return f


@T.macro
def copy_to_half_of_the_columns_of_a_view(S, A, P, n):
    V = T.reshape(S, (16, 64))
    T.copy(S[0:16, :], V[:, 32:64])


@T.macro
def copy_to_a_view_of_other_elements(S, A, P, n):
    V = T.view(S, (32, 64), "int16")
    T.copy(S[0:16, :], V[2:18, 0:32])


@T.macro
def copy_by_rows_known_at_run_time(S, A, P, n):
    T.copy(S[0:16, :], S[n:n + 16, :])


@T.macro
def copy_by_rows_of_a_tensor(S, A, P, n):
    T.copy(S[0:8, :], S[P[0]:P[0] + 8, :])


@T.macro
def copy_in_a_serial_loop(S, A, P, n):
    for k in T.serial(4):
        T.copy(S[k:k + 2, :], S[2 * k:2 * k + 2, :])


@T.macro
def copy_in_global_memory(S, A, P, n):
    T.copy(A[0:16, :], A[n:n + 16, :])


@T.macro
def transpose_to_a_view(S, A, P, n):
    V = T.reshape(S, (32, 32))
    T.transpose(S, V)


@T.macro
def transpose_by_rows_known_at_run_time(S, A, P, n):
    V = T.reshape(S, (32, 32))
    T.transpose(S[0:8, 0:8], V[n:n + 8, 0:8])


COPIES = [copy_to_half_of_the_columns_of_a_view, copy_to_a_view_of_other_elements, copy_by_rows_known_at_run_time,
          copy_by_rows_of_a_tensor, copy_in_a_serial_loop, copy_in_global_memory, transpose_to_a_view,
          transpose_by_rows_known_at_run_time]


@T.macro
def sums_into_the_first_row(S, A, P, n):
    V = T.decl_buffer((32,), "int32", data=S.data, scope="shared.dyn")
    T.reduce_sum(S, V, dim=1)


@T.macro
def sums_into_a_view_of_rows(S, A, P, n):
    V = T.reshape(S, (1024,))
    T.cumsum(V, T.view(S, (1024,), "int32"), reverse=True)


@T.macro
def added_to_rows_known_at_run_time(S, A, P, n):
    T.atomic_add(S[n:n + 4, :], S[0:4, :])


@T.macro
def filled_with_an_element(S, A, P, n):
    T.fill(S, S[0, 0] + 1)


@T.macro
def at_a_row_that_is_written(S, A, P, n):
    T.copy(A[0:4, :], S[S[0, 0]:S[0, 0] + 4, :])


OTHERS = [sums_into_the_first_row, sums_into_a_view_of_rows, added_to_rows_known_at_run_time, filled_with_an_element,
          at_a_row_that_is_written]


@pytest.mark.parametrize("target", ["c", "sm_80", "sm_90a"])
@pytest.mark.parametrize("body", [*COPIES, *OTHERS], ids=lambda b: b.__name__)
def test_operands_that_may_overlap_are_refused(body, target):
    """The CPU copied in order, and GPUs raced; some were refused by the verifier of synchronisation."""
    with pytest.raises(TileLangError, match="not proved to be disjoint") as e:
        lower(program(body).func, Target("c" if target == "c" else {"kind": "cuda", "arch": target}))
    assert e.value.kind == ("copy-overlap" if body in COPIES else "tile-overlap")
    assert "test_check_overlaps.py" in str(e.value)


@T.macro
def other_half(S, A, P, n):
    V = T.reshape(S, (16, 64))
    T.copy(V[0:8, :], V[8:16, :])


@T.macro
def halves_by_a_view(S, A, P, n):
    V = T.reshape(S, (16, 64))
    T.copy(S[0:8, :], V[8:16, 32:64])


@T.macro
def in_turns(S, A, P, n):
    for k in T.serial(5):
        T.copy(S[k % 2 * 16:k % 2 * 16 + 16, :], S[(k + 1) % 2 * 16:(k + 1) % 2 * 16 + 16, :])


@T.macro
def whole_rows_of_a_tensor(S, A, P, n):
    T.copy(S[P[0], :], S[P[1], :])


@T.macro
def far_enough(S, A, P, n):
    if n >= 16:
        T.copy(S[0:16, :], S[n:n + 16, :])


@T.macro
def sums_in_place(S, A, P, n):
    T.cumsum(S, dim=1)


@T.macro
def turned_block(S, A, P, n):
    V = T.reshape(S, (32, 32))
    T.transpose(S[0:8, 8:16], V[8:16, 0:8])


@T.macro
def first_row_of_other_rows(S, A, P, n):
    V = T.decl_buffer((32,), "int32", data=S.data, scope="shared.dyn", elem_offset=31 * 32)
    F = T.alloc_fragment((32, 32), "int32")
    T.copy(S, F)
    T.reduce_sum(F, V, dim=1)


def want(body, a, p, n):
    v = a.reshape(16, 64)
    if body is other_half:
        v[8:] = v[:8]
    elif body is halves_by_a_view:
        v[8:, 32:] = a[:8]
    elif body is in_turns:
        a[16:] = a[:16]
    elif body is whole_rows_of_a_tensor:
        a[p[1]] = a[p[0]]
    elif body is far_enough:
        a[n:n + 16] = a[:16].copy()
    elif body is sums_in_place:
        a[:] = np.cumsum(a, 1)
    elif body is turned_block:
        a[8:16, 0:8] = a[0:8, 8:16].T
    elif body is first_row_of_other_rows:
        a[31] = a.sum(1)
    return a


RIGHT = [other_half, halves_by_a_view, in_turns, whole_rows_of_a_tensor, far_enough, sums_in_place, turned_block,
         first_row_of_other_rows]


@pytest.mark.parametrize("body", RIGHT, ids=lambda b: b.__name__)
def test_operands_that_are_disjoint_are_accepted(body):
    a = np.random.default_rng(5).integers(-9, 9, (32, 32)).astype(np.int32)
    p = np.array([7, 3, 0, 0], np.int32)
    run_passes(program(body).func, TILE_PASSES, PassContext(Target({"kind": "cuda", "arch": "sm_90a"})))
    np.testing.assert_array_equal(everywhere(program(body), a, p, 16)[0], want(body, a.copy(), p, 16))
