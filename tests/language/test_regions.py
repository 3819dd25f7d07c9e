"""Regions of tile ops: slices, start elements, and how two operands' extents are paired."""

import pytest

import tilelang.language as T
from tilelang.ir import is_const, walk
from tilelang.language.tracing.polynomial import difference
from tilelang.ops import Copy

n, m = T.dynamic("n, m")


def copies(body):
    """The Copy ops of a kernel that gets A (64, 64), B (64, 64) global, S (32, 32) shared, F (32, 32) fragment, bx."""
    @T.prim_func
    def f(A: T.Tensor((64, 64), "float32"), B: T.Tensor((64, 64), "float32"), k: T.int32):
        with T.Kernel(4) as bx:
            S = T.alloc_shared((32, 32), "float32")
            F = T.alloc_fragment((32, 32), "float32")
            body(A, B, S, F, bx, k)

    return [x for x in walk(f.func.body) if isinstance(x, Copy)]


def extents(body):
    (c,) = copies(body)
    return [e if isinstance(e, int) else str(e) for e in c.src.extents], [
        e if isinstance(e, int) else str(e) for e in c.dst.extents]


FULL = [32, 32]


@pytest.mark.spec("L9:operands")
@pytest.mark.parametrize("body, src, dst", [
    (lambda A, B, S, F, bx, k: T.copy(A[0, 0], S), FULL, FULL),
    (lambda A, B, S, F, bx, k: T.copy(A[bx * 32, k], S), FULL, FULL),
    (lambda A, B, S, F, bx, k: T.copy(A[bx * 32:(bx + 1) * 32, 0:32], S), FULL, FULL),
    # of sizes known at run time, the operand nearer the registers gives the iteration space, the other its start
    (lambda A, B, S, F, bx, k: T.copy(A[0:k, 0:32], S), FULL, FULL),
    (lambda A, B, S, F, bx, k: T.copy(S, B[0:k, 0:32]), FULL, FULL),
    (lambda A, B, S, F, bx, k: T.copy(A[0:k, 0:32], B[0:k, 0:32]), ["k", 32], ["k", 32]),
    (lambda A, B, S, F, bx, k: T.copy(S, F), FULL, FULL),
    # unit dimensions are ignored in matching
    (lambda A, B, S, F, bx, k: T.copy(A[k, 0:32], S[3, :]), [1, 32], [1, 32]),
    (lambda A, B, S, F, bx, k: T.copy(A[k, 0:32], S[:, 3]), [1, 32], [32, 1]),
    (lambda A, B, S, F, bx, k: T.copy(S[0:8, :], B[0, 0]), [8, 32], [8, 32]),
])
def test_extents(body, src, dst):
    assert extents(body) == (src, dst)


@pytest.mark.parametrize("body", [
    lambda A, B, S, F, bx, k: T.copy(A[0:16, 0:32], S), lambda A, B, S, F, bx, k: T.copy(S, B[0:16, 0:32]),
    lambda A, B, S, F, bx, k: T.copy(S, B[0:64, 0:32]), lambda A, B, S, F, bx, k: T.copy(F[0:16, :], B[0:32, 0:32])])
def test_two_static_sizes_are_refused(body):
    with pytest.raises(ValueError, match="Selected loop range"):
        extents(body)


@pytest.mark.spec("L9:pairing")
def test_both_elements_are_a_scalar_assignment():
    from tilelang.ir import Store

    @T.prim_func
    def f(A: T.Tensor((4,), "float16"), B: T.Tensor((4,), "float32")):
        with T.Kernel(1):
            T.copy(A[1], B[2])

    (s,) = [x for x in walk(f.func.body) if isinstance(x, Store)]
    assert s.buffer.name == "B" and s.value.dtype == "float32"


@pytest.mark.spec("L9:operands")
def test_element_takes_the_trailing_dimensions():
    @T.prim_func
    def f(A: T.Tensor((2, 64, 3, 64), "float32")):
        with T.Kernel(1):
            S = T.alloc_shared((3, 64), "float32")
            U = T.alloc_shared((1, 3, 64), "float32")
            T.copy(A[0, 5, 0, 0], S)
            T.copy(A[0, 5, 0, 0], U)
            T.copy(A[1, 0, 0, 0], U[0, :, :])

    got = [x.src.extents for x in walk(f.func.body) if isinstance(x, Copy)]
    assert got == [(1, 1, 3, 64)] * 3


@pytest.mark.spec("L9:pairing")
def test_differences_of_runtime_bounds():
    from tilelang.ir.evaluate import evaluate

    x, y = T.dynamic("x, y")
    for stop, start, want in [((x + 1) * 64, x * 64, 64), (x * y + y, x * y, None), (x + y + 3, y + x, 3),
                              ((x + 1) * (y + 1), x * y + x, None), (x * 2, x, None), (2 * (x - y), 2 * x, None),
                              (x // 2 + 5, x // 2, 5), (T.cast(x, "int64") + 4, x, 4), (x, y, None), (7, x, None)]:
        d = difference(stop, start)
        assert want is None or d == want
        for a, b in ((3, 5), (10, 2)):
            values = {x: a, y: b}
            value = evaluate(T.int32(0) + d, values)
            assert value == evaluate(T.int32(0) + stop, values) - evaluate(T.int32(0) + start, values)


@pytest.mark.spec("L9:pairing")
@pytest.mark.parametrize("key, lo, ext", [
    (slice(None, 8), 0, 8), (slice(56, None), 56, 8), (slice(-8, None), 56, 8), (slice(-16, -8), 48, 8),
    (slice(4, 4 + 8), 4, 8)])
def test_slices_are_pythons(key, lo, ext):
    @T.prim_func
    def f(A: T.Tensor((64,), "float32")):
        with T.Kernel(1):
            S = T.alloc_shared((8,), "float32")
            T.copy(A[key], S)

    (c,) = [x for x in walk(f.func.body) if isinstance(x, Copy)]
    assert is_const(c.src.mins[0], lo) and c.src.extents == (ext,)


def test_negative_bounds_of_symbolic_dimensions():
    @T.prim_func
    def f(A: T.Tensor((n,), "float32")):
        with T.Kernel(1):
            S = T.alloc_shared((8,), "float32")
            T.copy(A[-8:], S)
            S[0] = A[-1]

    (c,) = [x for x in walk(f.func.body) if isinstance(x, Copy)]
    assert c.src.extents == (8,) and difference(c.src.mins[0], n) == -8


@pytest.mark.parametrize("key", [slice(-8, 0), slice(-2, 1)], ids=str)
def test_a_slice_from_the_end_to_a_number_was_as_long_as_the_other_operand(key):
    """X[-8:0] of n rows has no elements in Python, X[-2:1] has one of two rows."""
    with pytest.raises(ValueError, match="slice-bounds"):
        @T.prim_func
        def f(X: T.Tensor((n, 8), "float32")):
            with T.Kernel(1):
                S = T.alloc_shared((8, 8), "float32")
                T.copy(X[key, 0:8], S)


@pytest.mark.spec("L5:Tensor")
def test_symbolic_whole_buffers_match_by_structure():
    @T.prim_func
    def f(A: T.Tensor((n, 8), "float32"), B: T.Tensor((n, 8), "float32")):
        with T.Kernel(1):
            T.copy(A, B)

    with pytest.raises(ValueError, match="StructuralEqual check failed"):
        @T.prim_func
        def g(A: T.Tensor((n, 8), "float32"), B: T.Tensor((m, 8), "float32")):
            with T.Kernel(1):
                T.copy(A, B)


def test_accesses_of_ops():
    @T.prim_func
    def f(A: T.Tensor((32, 32), "float16"), C: T.Tensor((32, 32), "float32")):
        with T.Kernel(1):
            S = T.alloc_shared((32, 32), "float16")
            F = T.alloc_fragment((32, 32), "float32")
            r = T.alloc_fragment((32,), "float32")
            T.copy(A, S)
            T.gemm(S, S, F, clear_accum=True)
            T.gemm(S, S, F)
            T.reduce_max(F, r, clear=False)
            T.fill(r, 1)
            T.atomic_add(C, F)

    from tilelang.ir import TileOp

    modes = [[(a.region.buffer.name, a.mode) for a in x.accesses()] for x in walk(f.func.body) if isinstance(x, TileOp)]
    assert modes == [[("A", "read"), ("S", "write")], [("S", "read"), ("S", "read"), ("F", "write")],
                     [("S", "read"), ("S", "read"), ("F", "readwrite")], [("F", "read"), ("r", "readwrite")],
                     [("r", "write")], [("F", "read"), ("C", "atomic")]]
