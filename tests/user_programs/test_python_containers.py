"""Lists, dicts and tuples of run-time values: read when they are made, not when they are used; scopes of what they hold."""

import logging

import numpy as np
import pytest
from user_harness import agree, refused

import tilelang.language as T

A4 = np.array([3, 5, 7, 9], np.int32)
I4 = T.Tensor((4,), "int32")


def _cleared(want):
    return {0: np.array([0, 0, 7, 9], np.int32), 1: np.array(want, np.int32)}


def test_lists_and_dicts_hold_what_was_read_when_they_were_made():
    @T.prim_func
    def main(A: I4, B: I4):
        with T.Kernel(1, threads=1):
            pair = [A[0], (A[1], 1)]
            named = {"x": A[0] + 1}
            made = [A[i] * 2 for i in (0, 1)]
            held = []
            held.append(A[1])
            slots = [0, 0]
            slots[1] = A[0]
            A[0] = 0
            A[1] = 0
            B[0] = pair[0] * 10 + pair[1][0]
            B[1] = named["x"]
            B[2] = made[0] * 100 + made[1]
            B[3] = held[0] * 10 + slots[1]

    agree(main, [A4, np.zeros(4, np.int32)], _cleared([35, 4, 610, 53]))


def test_a_variable_in_a_list_is_its_value():
    @T.prim_func
    def main(A: I4, B: I4):
        with T.Kernel(1, threads=1):
            a = T.alloc_var("int32", init=1)
            values = [a]
            a = 7
            B[0] = values[0]
            B[1] = a

    agree(main, [A4, np.zeros(4, np.int32)], {1: np.array([1, 7, 0, 0], np.int32)})


def test_elements_in_lists_and_tuples_may_say_where_a_tile_starts():
    @T.prim_func
    def main(A: T.Tensor((4, 8), "int32"), B: T.Tensor((2, 4), "int32")):
        with T.Kernel(1, threads=32):
            s = T.alloc_shared((4,), "int32")
            starts = [A[1, 4], A[3, 0]]
            T.copy(starts[0], s)
            T.copy(s, B[0, 0])
            t = (A[2, 2], 0)
            T.copy(t[0], s)
            T.copy(s, B[1, 0])

    a = np.arange(32, dtype=np.int32).reshape(4, 8)
    agree(main, [a, np.zeros((2, 4), np.int32)], {1: np.stack([a[1, 4:], a[2, 2:6]])})


def _sum_in_list():
    @T.prim_func
    def main(A: I4, B: I4):
        with T.Kernel(1, threads=1):
            total = [0]
            for k in T.serial(4):
                total[0] = total[0] + A[k]
            B[0] = total[0]
    return main


def _sum_in_dict():
    @T.prim_func
    def main(A: I4, B: I4):
        with T.Kernel(1, threads=1):
            total = {"sum": 0}
            for k in T.serial(4):
                total["sum"] += k
            B[0] = total["sum"]
    return main


def _appended():
    @T.prim_func
    def main(A: I4, B: I4):
        with T.Kernel(1, threads=1):
            seen = []
            if A[0] > 0:
                seen.append(A[1])
            B[0] = seen[-1]
    return main


def _buffer_of_a_loop():
    @T.prim_func
    def main(A: I4, B: I4):
        with T.Kernel(1, threads=1):
            made = []
            for k in T.serial(4):
                made.append(T.alloc_local((4,), "int32"))
                made[0][k] = k
            B[0] = made[0][2]
    return main


@pytest.mark.parametrize("build", [_sum_in_list, _sum_in_dict, _appended, _buffer_of_a_loop])
def test_what_a_container_carries_out_of_its_scope_is_refused(build):
    """These read whatever lay in a register, or the last iteration's value."""
    refused(build, "is used outside the scope that defines it")


def test_a_number_kept_in_a_container_in_a_loop_warns(caplog):
    log = logging.getLogger("tilelang")
    log.addHandler(caplog.handler)
    try:
        @T.prim_func
        def main(B: I4):
            with T.Kernel(4, threads=1) as bx:
                flag = [2]
                if bx == 0:
                    flag[0] = 1
                B[bx] = flag[0]
    finally:
        log.removeHandler(caplog.handler)
    assert "an element of a Python list is assigned a number in a run-time loop or branch" in caplog.text
    agree(main, [np.zeros(4, np.int32)], {0: np.ones(4, np.int32)}, on=("tile", "cpu"))


def test_try_and_match_inside_a_kernel():
    """Their rewritten loops were taken for names of the user's."""
    way = "all"

    @T.prim_func
    def main(A: I4, B: I4):
        with T.Kernel(1, threads=1):
            try:
                for i in range(2):
                    B[i] = A[0]
            finally:
                B[2] = 1
            match way:
                case "all":
                    for i in range(3, 4):
                        B[i] = A[i]

    agree(main, [A4, np.zeros(4, np.int32)], {1: np.array([3, 3, 1, 9], np.int32)})
