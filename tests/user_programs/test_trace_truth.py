"""What Python decides while tracing: `in`, `match`, `any`, helpers that compare, generators; strings as numbers."""

import numpy as np
import pytest
from user_harness import agree, mark, refused

import tilelang.language as T


def test_in_and_not_in_of_run_time_values_are_computed():
    @T.prim_func
    def main(A: T.Tensor((8,), "int32"), B: T.Tensor((8, 6), "int32")):
        with T.Kernel(8, threads=1) as bx:
            if bx in (0, 3):
                B[bx, 0] = 1
            else:
                B[bx, 0] = 0
            B[bx, 1] = T.if_then_else(A[bx] not in [1, 2], 5, 6)
            x = 7 if A[bx] in (bx, 4) else 8
            B[bx, 2] = x
            B[bx, 3] = 1 if 3 in (1, 2, 3) else 2
            B[bx, 4] = T.cast(bx in range(1, 8, 3), "int32") * 2 + T.cast(A[bx] in range(9, 2, -2), "int32")
            B[bx, 5] = T.cast(0 < A[bx] in {4: "a", 9: "b"}, "int32")

    a, i = np.array([1, 2, 2, 4, 1, 5, 3, 9], np.int32), np.arange(8)
    want = np.stack([np.isin(i, (0, 3)), np.where(np.isin(a, (1, 2)), 6, 5), np.where((a == i) | (a == 4), 7, 8), np.ones(8),
                     np.isin(i, (1, 4, 7)) * 2 + np.isin(a, (9, 7, 5, 3)), np.isin(a, (4, 9))], 1).astype(np.int32)
    agree(main, [a, mark((8, 6), np.int32)], {1: want})


def test_in_of_shapes_stays_a_python_question():
    shape = (4, 8)

    @T.prim_func
    def main(B: T.Tensor(shape, "int32")):
        with T.Kernel(4, threads=1) as bx:
            if B.shape[1] in (8, 16) and 3 not in shape:
                B[bx, 0] = 1

    want = np.zeros(shape, np.int32)
    want[:, 0] = 1
    agree(main, [np.zeros(shape, np.int32)], {0: want})


def test_containers_of_run_time_values_are_compared_by_their_elements():
    @T.prim_func
    def main(A: T.Tensor((8,), "int32"), B: T.Tensor((8, 5), "int32")):
        with T.Kernel(8, threads=1) as bx:
            B[bx, 0] = 1 if (bx, A[bx]) == (2, 5) else 0
            B[bx, 1] = 1 if [A[bx], 1] != [4, 1] else 0
            B[bx, 2] = 1 if (bx, (A[bx],)) in ((0, (4,)), (3, (3,)), (1, (1,))) else 0
            B[bx, 3] = 1 if {"a": A[bx], "b": 0} == {"b": 0, "a": 3} else 0
            B[bx, 4] = 1 if (A[bx], bx) == (4,) or list(A.shape) == [7] else 0

    a, i = np.array([4, 0, 5, 3, 5, 4, 3, 1], np.int32), np.arange(8)
    want = np.stack([(i == 2) & (a == 5), a != 4, (i == 0) | (i == 3), a == 3, np.zeros(8)], 1).astype(np.int32)
    agree(main, [a, mark((8, 5), np.int32)], {1: want})


def _matched():
    @T.prim_func
    def main(B: T.Tensor((8,), "int32")):
        with T.Kernel(8, threads=1) as bx:
            match bx:
                case 0:
                    B[bx] = 1
                case _:
                    B[bx] = 2
    return main


def _any():
    @T.prim_func
    def main(A: T.Tensor((8,), "int32"), B: T.Tensor((8,), "int32")):
        with T.Kernel(8, threads=1) as bx:
            if any([A[bx] == 1, A[bx] == 2]):
                B[bx] = 1
    return main


def _pick(b):
    return 1 if b == 0 else 2


def _helper():
    @T.prim_func
    def main(B: T.Tensor((8,), "int32")):
        with T.Kernel(8, threads=1) as bx:
            B[bx] = _pick(bx)
    return main


def _scalar():
    @T.prim_func
    def main(n: T.int32, B: T.Tensor((8,), "int32")):
        with T.Kernel(8, threads=1) as bx:
            B[bx] = _pick(n)
    return main


def _same(i, j):
    return 1 if i == j else 0


def _diagonal():
    @T.prim_func
    def main(B: T.Tensor((8, 8), "int32")):
        with T.Kernel(1, threads=32):
            for i, j in T.Parallel(8, 8):
                B[i, j] = _same(i, j)
    return main


def _position():
    @T.prim_func
    def main(A: T.Tensor((8,), "int32"), B: T.Tensor((8,), "int32")):
        with T.Kernel(8, threads=1) as bx:
            B[bx] = [1, 2, 3].count(A[bx])
    return main


@pytest.mark.parametrize("build", [_matched, _any, _helper, _scalar, _diagonal, _position])
def test_python_truth_of_an_equality_of_run_time_values_is_refused(build):
    """Each of these took the branch of "not equal" for every block, without a word."""
    refused(build, "only the kernel knows it|is known only when the kernel runs", on=("cpu",))


def test_a_dict_has_no_run_time_keys():
    def build():
        table = {1: 5, 2: 6}

        @T.prim_func
        def main(A: T.Tensor((8,), "int32"), B: T.Tensor((8,), "int32")):
            with T.Kernel(8, threads=1) as bx:
                B[bx] = table[A[bx]]
        return main

    refused(build, r"`A\[bx\]` is asked for its hash", error=TypeError, on=("cpu",))


def test_python_truth_of_an_equality_of_symbols_is_structural():
    n, m = T.dynamic("n"), T.dynamic("m")
    seen = []

    @T.prim_func
    def main(A: T.Tensor((n,), "int32"), B: T.Tensor((m,), "int32")):
        with T.Kernel(1, threads=1) as bx:
            seen.append((_pick(n), bool(A.shape[0] == B.shape[0]), bool(A.shape[0] == n), [bx, n].index(n)))
            B[0] = A[0]

    assert seen[0] == (2, False, True, 1)
    agree(main, [np.array([3], np.int32), np.zeros(1, np.int32)], {1: np.array([3], np.int32)}, on=("cpu",))


def test_a_match_of_python_values_is_traced():
    way = "double"

    @T.prim_func
    def main(B: T.Tensor((8,), "int32")):
        with T.Kernel(8, threads=1) as bx:
            match way:
                case "double":
                    B[bx] = bx * 2
                case _:
                    B[bx] = 0

    agree(main, [mark(8, np.int32)], {0: np.arange(8, dtype=np.int32) * 2})


def _generator():
    @T.prim_func
    def main(B: T.Tensor((8,), "int32")):
        with T.Kernel(8, threads=1) as bx:
            B[bx] = 3
            yield B
    return main


def _atomic_string():
    @T.prim_func
    def main(B: T.Tensor((8,), "float32")):
        with T.Kernel(8, threads=1):
            T.atomic_add(B[0], "x")
    return main


def _filled_string():
    @T.prim_func
    def main(B: T.Tensor((8,), "float32")):
        with T.Kernel(1, threads=32):
            s = T.alloc_shared((8,), "float32")
            T.fill(s, "1.0")
            T.copy(s, B)
    return main


def _two_float8_kinds():
    @T.prim_func
    def main(A: T.Tensor((8,), "float8_e4m3fn"), B: T.Tensor((8,), "float8_e5m2"), C: T.Tensor((8,), "bool")):
        with T.Kernel(8, threads=1) as bx:
            C[bx] = A[bx] == B[bx]
    return main


@pytest.mark.parametrize("build, text", [
    (_generator, "cannot yield"), (_atomic_string, "string 'x' cannot be used as a float32"),
    (_filled_string, "string '1.0' cannot be used"), (_two_float8_kinds, "Cannot match type")])
def test_what_computed_nonsense_is_refused(build, text):
    refused(build, text, on=("cpu",))
