import numpy as np
import pytest

import tilelang.language as T
from tilelang.errors import TileLangWarning
from tilelang.ir import Load, Parallel, walk
from tilelang.simulator import run_tile
from tilelang.transform.legalize.legalize import legalize
from tilelang.transform.framework.pass_ import PassContext, run_passes
from tilelang.transform.pipeline import legalized


def legal(f, **config):
    return run_passes(f.func, [legalize], PassContext(verify=True, config=config))




def nested():
    @T.prim_func
    def main(A: T.Tensor((8, 8), "float32")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(8):
                A[i, 0] = 1.0
                for j in T.Parallel(8):
                    A[i, j] = 0.0

    return main


def pipelined():
    @T.prim_func
    def main(A: T.Tensor((8, 8), "float32")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(8):
                for j in T.Pipelined(8, num_stages=2):
                    A[i, j] = 0.0

    return main


def tile_op():
    @T.prim_func
    def main(A: T.Tensor((8, 8), "float32")):
        with T.Kernel(1, threads=32):
            S = T.alloc_shared((8,), "float32")
            for i in T.Parallel(8):
                T.copy(A[i, 0], S)

    return main


def symbolic():
    n = T.dynamic("n")

    @T.prim_func
    def main(A: T.Tensor((n,), "float32")):
        with T.Kernel(1, threads=32):
            F = T.alloc_fragment((64,), "float32")
            for i in T.Parallel(n):
                F[i] = A[i]

    return main


def local_index():
    @T.prim_func
    def main(A: T.Tensor((8,), "float32")):
        with T.Kernel(1, threads=32):
            x = T.alloc_local((8,), "float32")
            for i in T.Parallel(8):
                x[i] = A[i]

    return main


def carried():
    @T.prim_func
    def main(A: T.Tensor((64,), "float32"), B: T.Tensor((1,), "float32")):
        with T.Kernel(1, threads=32):
            v = T.alloc_var("float32", init=0.0)
            for i in T.Parallel(64):
                v = v + A[i]
            B[0] = v

    return main


@pytest.mark.parametrize("make, text", [
    (nested, "[Tilelang Semantic Check] Nested parallel loops are not allowed"),
    (pipelined, "Pipelined loop cannot be nested inside a parallel loop"),
    (tile_op, "Only elementwise operations are allowed inside a parallel loop. Got a tile-op copy"),
    (symbolic, "Loop variable `i` with symbolic range [0, n) is used to index a fragment buffer `F`"),
    (local_index, "Local buffer `x` is indexed by T.Parallel loop variable `i`"),
])
def test_refused_at_the_users_line(make, text):
    with pytest.raises(ValueError) as e:
        legal(make())
    assert text in str(e.value) and "test_legalize.py:" in str(e.value) and "hint:" in str(e.value)


def test_a_variable_that_iterations_pass_on_is_refused():
    with pytest.raises(ValueError, match="`v` carries a value from one iteration of T.Parallel to the next"):
        legalized(carried().func)


@pytest.mark.spec("R10:TL_DISABLE_PRELOWER_SEMANTIC_CHECK")
def test_checks_can_be_switched_off():
    legal(local_index(), **{"tl.disable_prelower_semantic_check": True})


def test_temporaries_of_an_iteration_are_fine():
    @T.prim_func
    def main(A: T.Tensor((64,), "float32"), B: T.Tensor((64,), "float32")):
        with T.Kernel(1, threads=32):
            v = T.alloc_var("float32", init=0.0)
            for i in T.Parallel(64):
                v = A[i] * 2.0
                if v > 1.0:
                    v = v + 1.0
                B[i] = v

    legal(main)


def test_directly_nested_parallel_loops_become_one():
    @T.prim_func
    def main(A: T.Tensor((8, 4), "float32")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(8):
                for j in T.Parallel(4):
                    A[i, j] = 1.0

    loops = [x for x in walk(legal(main)) if isinstance(x, Parallel)]
    assert len(loops) == 1 and [int(e) for e in loops[0].extents] == [8, 4]


def test_negative_constant_indices_count_from_the_end():
    @T.prim_func
    def main(A: T.Tensor((8, 4), "float32"), B: T.Tensor((8,), "float32")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(8):
                B[i] = A[i, -1]

    loads = [x for x in walk(legal(main)) if isinstance(x, Load)]
    assert [int(x.indices[1]) for x in loads] == [3]


def test_indices_below_zero_in_loops_whose_extent_is_known_in_part_count_from_the_end():
    """Only constant extents were looked at: S[i - 12] under i < T.min(n, 12) stood outside S."""
    n = T.dynamic("n")

    @T.prim_func
    def main(A: T.Tensor((n,), "float32"), B: T.Tensor((3, 12), "float32")):
        with T.Kernel(3, threads=32) as b:
            S = T.alloc_shared((12,), "float32")
            for i in T.Parallel(12):
                S[i] = i
            for i in T.Parallel(T.min(n, 12)):
                for k in T.serial(b + 1):
                    B[b, i] = S[i - 12] + S[k - 3] + A[i - 3]

    got = run_tile(legal(main), [np.ones(5, np.float32), np.zeros((3, 12), np.float32)])["B"]
    i = np.arange(5)
    assert np.array_equal(got[:, :5], i + 9 + np.arange(3)[:, None] + (i >= 3))  # A[i - 3] is of either sign: guarded


def test_a_symbol_without_a_value():
    n = T.dynamic("n")

    @T.prim_func
    def main(A: T.Tensor((64,), "float32")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(64):
                if i < n:
                    A[i] = 0.0

    with pytest.raises(ValueError, match=r"variables \(n,\) are used, but are not passed in as API arguments"):
        legal(main)


@pytest.mark.spec("L24:uninitialised", "R10:TL_DISABLE_BUFFER_INIT_CHECK")
def test_reading_before_writing_warns():
    @T.prim_func
    def main(A: T.Tensor((64,), "float32")):
        with T.Kernel(1, threads=32):
            S = T.alloc_shared((64,), "float32")
            T.copy(S, A)

    with pytest.warns(TileLangWarning, match="uninitialized: buffer `S` is read before it is written; write it first"):
        legal(main)


@pytest.mark.parametrize("reads, warned", [("rows above", False), ("behind the first turn", False), ("in any turn", True)])
def test_rows_that_the_first_turn_does_not_read_are_no_reason_to_warn(reads, warned, recwarn):
    @T.prim_func
    def main(A: T.Tensor((8, 32), "float32")):
        with T.Kernel(1, threads=32):
            S = T.alloc_shared((8, 32), "float32")
            for i in T.serial(8):
                for j in T.Parallel(32):
                    s = T.alloc_var("float32", init=0.0)
                    if reads == "rows above":
                        for k in T.serial(i):
                            s += S[k, j]
                    elif reads == "behind the first turn":
                        if i > 0:
                            s += S[i - 1, j]
                    else:
                        s += S[i, j]
                    S[i, j] = A[i, j] - s
            T.copy(S, A)

    legal(main)
    assert any("`S` is read before it is written" in str(w.message) for w in recwarn) == warned


def test_long_dimensions_are_indexed_in_64_bits():
    n = 3 * 2**30

    @T.prim_func
    def main(A: T.Tensor((n,), "int8"), B: T.Tensor((n,), "int8"), C: T.Tensor((64,), "int8")):
        with T.Kernel(n // 1024, threads=128) as bx:
            for i in T.Parallel(1024):
                B[bx * 1024 + i] = A[bx * 1024 + i] + C[i % 64]

    loads = {x.buffer.name: x.indices[0].dtype for x in walk(legal(main)) if isinstance(x, Load)}
    assert loads == {"A": "int64", "C": "int32"}
