"""Tile programs on the CPU target against NumPy and against the tile simulator."""

import ml_dtypes
import numpy as np
import pytest
from cpu_harness import Compiled, run_cpu
from kernel_text import alloc, program

from tilelang.errors import TileLangError
from tilelang.simulator import run_tile

rng = np.random.default_rng(0)
BF16 = ml_dtypes.bfloat16
NP = {"float16": np.float16, "bfloat16": BF16, "float32": np.float32, "float64": np.float64, "int8": np.int8,
      "int32": np.int32}


def same(f, args, **kw):
    """Bit-equal to the tile simulator on every tensor."""
    got, want = run_cpu(f, args), run_tile(f, args, **kw)
    for name in want:
        np.testing.assert_array_equal(got[name].view(np.uint8), np.ascontiguousarray(want[name]).view(np.uint8), name)
    return got


@pytest.mark.parametrize("n", [0, 1, 31, 32, 70, 1000])
def test_vector_add_with_a_run_time_length(n):
    f = program({k: (("n",), "float32") for k in "ABC"}, """
        for i, in T.Parallel(32):
            C[bx * 32 + i] = A[bx * 32 + i] + B[bx * 32 + i]
    """, grid="(n + 31) // 32", symbols="n")
    a, b = rng.standard_normal((2, n)).astype(np.float32)
    c = np.full(n + 8, 7, np.float32)
    Compiled(f)(a, b, c[:n])
    assert np.array_equal(c[:n], a + b) and (c[n:] == 7).all()


@pytest.mark.parametrize("dt", ["float16", "bfloat16", "float32", "int8", "int32"])
def test_elementwise_rounds_in_its_own_type(dt):
    f = program({k: ((37, 21), dt) for k in "XYZ"}, """
        for i, j in T.Parallel(16, 16):
            Z[by * 16 + i, bx * 16 + j] = X[by * 16 + i, bx * 16 + j] * Y[by * 16 + i, bx * 16 + j] \\
                + T.max(X[by * 16 + i, bx * 16 + j], Y[by * 16 + i, bx * 16 + j])
    """, grid="2, 3")
    x, y = (rng.standard_normal((2, 37, 21)) * 9).astype(NP[dt])
    if dt == "float32":
        got = run_cpu(f, [x, y, None])["Z"]  # a multiply-add may be fused
        np.testing.assert_allclose(got, x * y + np.maximum(x, y), rtol=1e-6, atol=1e-5)
    else:
        same(f, [x, y, np.zeros_like(x)])


def test_columns_do_not_spill_into_the_next_row():
    f = program({"A": ((3, 5), "int32"), "B": ((3, 5), "int32")}, """
        for i, j in T.Parallel(4, 8):
            B[i, j] = A[i, j - 1] + 1
    """)
    same(f, [np.arange(15, dtype=np.int32).reshape(3, 5), np.zeros((3, 5), np.int32)])


@pytest.mark.parametrize("m, n", [(64, 64), (70, 52), (1, 200)])
@pytest.mark.parametrize("dt", ["float32", "float16", "int8"])
def test_copy_and_transpose_through_shared_memory(m, n, dt):
    f = program({"A": ((m, n), dt), "B": ((n, m), dt), "C": ((m, n), dt)}, f"""
        {alloc("S", (32, 32), dt, "shared.dyn")}
        {alloc("R", (32, 32), dt, "shared.dyn")}
        T.copy(src=T.region(A[by * 32, bx * 32], 32, 32), dst=T.region(S[0, 0], 32, 32))
        T.copy(src=T.region(S[0, 0], 32, 32), dst=T.region(C[by * 32, bx * 32], 32, 32))
        T.transpose(src=T.region(S[0, 0], 32, 32), dst=T.region(R[0, 0], 32, 32))
        T.copy(src=T.region(R[0, 0], 32, 32), dst=T.region(B[bx * 32, by * 32], 32, 32))
    """, grid=f"{-(-n // 32)}, {-(-m // 32)}")
    a = (rng.standard_normal((m, n)) * 50).astype(NP[dt])
    out = run_cpu(f, [a, None, None])
    assert np.array_equal(out["B"], a.T) and np.array_equal(out["C"], a)


def test_copies_from_outside_give_the_safe_value_per_dimension():
    f = program({"A": ((3, 5), "float32"), "B": ((8, 8), "float32")}, f"""
        {alloc("S", (8, 8), "float32", "shared.dyn")}
        T.copy(src=T.region(A[-2, -1], 8, 8), dst=T.region(S[0, 0], 8, 8))
        T.copy(src=T.region(S[0, 0], 8, 8), dst=T.region(B[0, 0], 8, 8))
    """, launch_plan='safe_values=((A, 7.0),)')
    a = rng.standard_normal((3, 5)).astype(np.float32)
    want = np.full((8, 8), 7, np.float32)
    want[2:5, 1:6] = a
    assert np.array_equal(run_cpu(f, [a, None])["B"], want)


@pytest.mark.parametrize("kind", ["sum", "max", "min", "abssum", "absmax"])
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("clear", [True, False])
def test_reduce(kind, dim, clear):
    shape = (5, 37)
    rest = shape[1 - dim]
    f = program({"A": (shape, "float32"), "B": ((rest,), "float32")}, f"""
        {alloc("x", shape, "float32", "local.fragment")}
        {alloc("r", (rest,), "float32", "local.fragment")}
        T.copy(src=T.region(A[0, 0], 5, 37), dst=T.region(x[0, 0], 5, 37))
        T.copy(src=T.region(B[0], {rest}), dst=T.region(r[0], {rest}))
        T.reduce(src=T.region(x[0, 0], 5, 37), dst=T.region(r[0], {rest}), kind="{kind}", dim={dim}, clear={clear},
                 nan_propagate=False)
        T.copy(src=T.region(r[0], {rest}), dst=T.region(B[0], {rest}))
    """)
    a, b = rng.standard_normal(shape).astype(np.float32), np.full(rest, 0.5, np.float32)
    x = np.abs(a) if kind.startswith("abs") else a
    op = {"sum": np.add, "abssum": np.add, "min": np.minimum}.get(kind, np.maximum)
    want = op.reduce(x.astype(np.float64), axis=dim)
    want = want if clear else op(want, b)
    np.testing.assert_allclose(run_cpu(f, [a, b])["B"], want, rtol=1e-6, atol=37 * 2.0 ** -22)


def test_reductions_ignore_nan_unless_asked():
    f = program({"A": ((2, 40), "float16"), "B": ((2,), "float16"), "C": ((2,), "float16")}, f"""
        {alloc("x", (2, 40), "float16", "local.fragment")}
        {alloc("r", (2,), "float16", "local.fragment")}
        T.copy(src=T.region(A[0, 0], 2, 40), dst=T.region(x[0, 0], 2, 40))
        T.reduce(src=T.region(x[0, 0], 2, 40), dst=T.region(r[0], 2),
                 kind="max", dim=1, clear=True, nan_propagate=False)
        T.copy(src=T.region(r[0], 2), dst=T.region(B[0], 2))
        T.reduce(src=T.region(x[0, 0], 2, 40), dst=T.region(r[0], 2),
                 kind="max", dim=1, clear=True, nan_propagate=True)
        T.copy(src=T.region(r[0], 2), dst=T.region(C[0], 2))
    """)
    a = rng.standard_normal((2, 40)).astype(np.float16)
    a[0, 11] = np.nan
    out = run_cpu(f, [a, None, None])
    assert np.array_equal(out["B"], np.nanmax(a, 1)) and np.isnan(out["C"][0]) and out["C"][1] == a[1].max()


@pytest.mark.parametrize("m, n", [(16, 64), (37, 100), (3, 129)])
def test_softmax(m, n):
    f = program({"X": ((m, n), "float16"), "Y": ((m, n), "float16")}, f"""
        {alloc("x", (4, n), "float32", "local.fragment")}
        {alloc("mx", (4,), "float32", "local.fragment")}
        {alloc("s", (4,), "float32", "local.fragment")}
        T.copy(src=T.region(X[bx * 4, 0], 4, {n}), dst=T.region(x[0, 0], 4, {n}))
        T.reduce(src=T.region(x[0, 0], 4, {n}), dst=T.region(mx[0], 4),
                 kind="max", dim=1, clear=True, nan_propagate=False)
        for i, j in T.Parallel(4, {n}):
            x[i, j] = T.call("exp", "float32", x[i, j] - mx[i])
        T.reduce(src=T.region(x[0, 0], 4, {n}), dst=T.region(s[0], 4),
                 kind="sum", dim=1, clear=True, nan_propagate=False)
        for i, j in T.Parallel(4, {n}):
            x[i, j] = x[i, j] / s[i]
        T.copy(src=T.region(x[0, 0], 4, {n}), dst=T.region(Y[bx * 4, 0], 4, {n}))
    """, grid=f"{-(-m // 4)}")
    x = (rng.standard_normal((m, n)) * 5).astype(np.float16)
    e = np.exp(x.astype(np.float64) - x.max(1, keepdims=True))
    want = e / e.sum(1, keepdims=True)
    np.testing.assert_allclose(run_cpu(f, [x, None])["Y"], want, rtol=2.0 ** -10, atol=2.0 ** -24)


def test_atomic_tile_adds_once_and_blocks_do_not_lose_updates():
    f = program({"C": ((20, 30), "float32"), "H": ((2,), "float16")}, f"""
        {alloc("F", (16, 16), "float32", "local.fragment")}
        T.fill(dst=T.region(F[0, 0], 16, 16), value=1.0)
        T.atomic(dst=T.region(C[8, 16], 16, 16), value=T.region(F[0, 0], 16, 16), kind="add")
        for i, in T.Parallel(4):
            T.evaluate(T.call("atomic_add", "float16", T.address_of(H[i % 2]), T.float16(1)))
    """, grid="200")
    want = np.zeros((20, 30), np.float32)
    want[8:20, 16:30] = 200
    out = run_cpu(f, [None, None])
    assert np.array_equal(out["C"], want) and np.array_equal(out["H"], np.full(2, 400, np.float16))


def test_host_assertion_stops_the_call_before_any_launch():
    f = program({"A": (("n",), "int32")}, "A[0] = 1", symbols="n",
                     before="T.Assert(n > 2, 'n must be above 2', 'assert')")
    a = np.zeros(3, np.int32)
    Compiled(f)(a)
    assert a[0] == 1
    b = np.zeros(2, np.int32)
    with pytest.raises(RuntimeError, match="n must be above 2"):
        Compiled(f)(b)
    assert b[0] == 0


def test_break_out_of_parallel_is_refused():
    f = program({"A": ((8,), "int32")}, """
        for i, in T.Parallel(8):
            if A[i] > 0:
                break
    """)
    with pytest.raises(TileLangError, match="break"):
        Compiled(f)


def test_a_bound_atomic_happens_once():
    f = program({"N": ((1,), "int32"), "A": ((4,), "int32")}, """
        for i, in T.Parallel(4):
            old: T.int32 = T.call("atomic_add", "int32", T.address_of(N[0]), 1)
            A[old] = old + 10
    """, threads=1)
    out = run_cpu(f, [None, None])
    assert out["N"][0] == 4 and np.array_equal(out["A"], [10, 11, 12, 13])


def test_an_index_computed_by_a_hash_wraps_as_its_type_does():
    f = program({"A": ((16,), "int32"), "B": ((64,), "int32")}, """
        for i, in T.Parallel(64):
            B[i] = A[(i * 1103515245 + 12345) % 16] + A[T.max(i * 1103515245, 0) // 400000000]
    """)
    i = np.arange(64, dtype=np.int32)
    a = rng.integers(0, 99, 16).astype(np.int32)
    h = i * np.int32(1103515245)
    want = a[(h + np.int32(12345)) % 16] + a[np.maximum(h, 0) // 400000000]
    assert np.array_equal(run_cpu(f, [a, None])["B"], want)


def test_the_text_does_not_depend_on_the_run():
    def text():
        return Compiled(program({"A": (("n", 8), "float16"), "B": (("n", 8), "float32")}, """
            for i, j in T.Parallel(16, 8):
                B[bx * 16 + i, j] = T.call("exp", "float32", T.cast(A[bx * 16 + i, j], "float32"))
        """, grid="(n + 15) // 16", symbols="n")).program.llvm_ir

    assert text() == text()
