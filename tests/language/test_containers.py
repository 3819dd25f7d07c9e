"""Values in Python containers and objects that kernel code makes: those at the time they are made."""

from collections import namedtuple

import numpy as np
import pytest
from everywhere import EXECUTIONS, run

import tilelang.language as T


Point = namedtuple("Point", "x y")


class Pair:
    """An object of the user's."""

    def __init__(self, first, **named):
        self.first, self.named = first, named


def made(v):
    return [v + 1, (v + 2, {"k": v + 3})]


@pytest.mark.spec("L2.3:python")
@pytest.mark.parametrize("on", EXECUTIONS)
def test_elements_and_attributes_are_read_when_they_are_made(on):
    @T.prim_func
    def f(X: T.Tensor((4, 8), "int32"), A: T.Tensor((12,), "int32"), B: T.Tensor((2, 8), "int32")):
        with T.Kernel(1, threads=1):
            v = T.alloc_var("int32", init=1)
            s = T.alloc_local((1,), "int32")
            s[0] = 7
            display, returned = [v + 10, {"k": v}], made(v)
            pair, element = Pair(v + 20, k=v + 30), Pair(s[0])
            rows, row = [X[v, 0:8]], Pair(X[v, 0:8])
            constant, point = Pair(5, k=[1, 2]), Point(v, v + 40)
            v = 3
            s[0] = 70
            A[0], A[1] = display[0], display[1]["k"]
            A[2], A[3], A[4] = returned[0], returned[1][0], made(v)[0]
            A[5], A[6], A[7] = pair.first, pair.named["k"], element.first
            A[8], A[9] = constant.first, constant.named["k"][1]
            A[10], A[11] = returned[1][1]["k"], point.y
            T.copy(rows[0], B[0, 0:8])
            T.copy(row.first, B[1, 0:8])

    x = np.arange(32, dtype=np.int32).reshape(4, 8)
    _, a, b = run(f, x, on=on)
    assert a.tolist() == [11, 1, 2, 3, 4, 21, 31, 7, 5, 2, 4, 41]
    assert np.array_equal(b, x[[1, 1]])


@pytest.mark.parametrize("on", EXECUTIONS)
def test_variables_in_objects_stay_variables(on):
    """What T.alloc_var made is a variable wherever it is kept; only expressions of it are values."""
    @T.prim_func
    def f(A: T.Tensor((4,), "int32")):
        with T.Kernel(1, threads=1):
            p = Pair(T.alloc_var("int32", init=4))
            q = p
            q.first[0] = 9
            A[0] = p.first
            r = [p]
            r[0].first[0] = 11
            A[1] = q.first
            v = p.first
            s = q
            v = 20
            A[2] = s.first + 1
            A[3] = v

    assert run(f, on=on)[0].tolist() == [9, 11, 21, 20]
