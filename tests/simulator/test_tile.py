"""The tile meaning of small programs, against plain NumPy."""

import numpy as np
import pytest
from kernel_text import alloc, program

import tilelang.language as T
from tilelang.errors import TileLangError
from tilelang.simulator import run_tile

rng = np.random.default_rng(0)


def test_vector_add_ragged_in_both_parallel_and_bounds():
    f = program({"A": ((70,), "float32"), "B": ((70,), "float32"), "C": ((70,), "float32")}, """
        for i, in T.Parallel(32):
            C[bx * 32 + i] = A[bx * 32 + i] + B[bx * 32 + i]
    """, grid="3")
    a, b = rng.standard_normal((2, 70)).astype(np.float32)
    out = run_tile(f, {"A": a, "B": b, "C": np.zeros(70, np.float32)})
    assert np.array_equal(out["C"], a + b)
    assert np.array_equal(out["A"], a)


def test_out_of_range_columns_do_not_spill_into_the_next_row():
    f = program({"A": ((3, 5), "int32"), "B": ((3, 5), "int32")}, """
        for i, j in T.Parallel(4, 8):
            B[i, j] = A[i, j - 1] + 1
    """)
    a = np.arange(15, dtype=np.int32).reshape(3, 5)
    want = np.concatenate([np.zeros((3, 1), np.int32), a[:, :-1]], 1) + 1
    assert np.array_equal(run_tile(f, [a, np.zeros_like(a)])["B"], want)


def test_safe_value_is_what_out_of_range_loads_and_copies_give():
    f = program({"A": ((3,), "float32"), "B": ((8,), "float32"), "C": ((8,), "float32")}, f"""
        {alloc("S", (8,), "float32", "shared.dyn")}
        T.copy(src=T.region(A[0], 8), dst=T.region(S[0], 8))
        T.copy(src=T.region(S[0], 8), dst=T.region(C[0], 8))
        for i, in T.Parallel(8):
            B[i] = A[i]
    """, launch_plan='safe_values=((A, 7.0),)')
    out = run_tile(f, [np.ones(3, np.float32), np.zeros(8, np.float32), np.zeros(8, np.float32)])
    want = np.array([1, 1, 1, 7, 7, 7, 7, 7], np.float32)
    assert np.array_equal(out["B"], want) and np.array_equal(out["C"], want)


@pytest.mark.parametrize("scope", ["local.fragment", "shared.dyn"])
def test_accumulation_over_an_unused_parallel_dimension_adds_every_element(scope):
    f = program({"A": ((6, 50), "float32"), "B": ((6,), "float32")}, f"""
        {alloc("F", (6,), "float32", scope)}
        T.fill(dst=T.region(F[0], 6), value=0.0)
        for i, j in T.Parallel(6, 50):
            F[i] = F[i] + A[i, j]
        T.copy(src=T.region(F[0], 6), dst=T.region(B[0], 6))
    """)
    a = rng.integers(-9, 9, (6, 50)).astype(np.float32)
    assert np.array_equal(run_tile(f, [a, np.zeros(6, np.float32)])["B"], a.sum(1))


def test_histogram_through_loaded_indices_counts_every_element():
    f = program({"A": ((40,), "int32"), "H": ((4,), "int32")}, """
        for i, in T.Parallel(40):
            H[A[i]] = H[A[i]] + 1
    """)
    a = rng.integers(0, 4, 40).astype(np.int32)
    assert np.array_equal(run_tile(f, [a, np.zeros(4, np.int32)])["H"], np.bincount(a, minlength=4))


def test_two_accumulators_with_different_keys_in_one_loop():
    f = program({"A": ((5, 7), "int32"), "R": ((5,), "int32"), "C": ((7,), "int32")}, """
        for i, j in T.Parallel(5, 7):
            R[i] = R[i] + A[i, j]
            C[j] = C[j] + A[i, j]
    """)
    a = rng.integers(0, 9, (5, 7)).astype(np.int32)
    out = run_tile(f, [a, np.zeros(5, np.int32), np.zeros(7, np.int32)])
    assert np.array_equal(out["R"], a.sum(1)) and np.array_equal(out["C"], a.sum(0))


def test_inner_loop_branch_continue_and_temporary():
    f = program({"A": ((16, 8), "int32"), "B": ((16,), "int32")}, f"""
        {alloc("v", (1,), "int32", "local.var")}
        for i, in T.Parallel(16):
            if i == 3:
                continue
            v[0] = 0
            for k in T.serial(8):
                if A[i, k] < 0:
                    break
                v[0] = v[0] + A[i, k]
            B[i] = v[0]
    """)
    a = rng.integers(-1, 9, (16, 8)).astype(np.int32)
    want = np.array([sum(r[: np.argmax(r < 0)] if (r < 0).any() else r) for r in a])
    want[3] = -5
    assert np.array_equal(run_tile(f, [a, np.full(16, -5, np.int32)])["B"], want)


def test_code_per_thread_runs_on_every_thread():
    f = program({"A": ((64,), "int32"), "N": ((1,), "int32")}, f"""
        {alloc("r", (2,), "int32", "local")}
        r[0] = tx * 2
        r[1] = r[0] + 1
        if tx < 40:
            A[bx * 32 + tx] = r[1]
        T.evaluate(T.call("atomic_add", "int32", T.address_of(N[0]), 1))
    """, grid="2", threads=48)
    out = run_tile(f, [np.zeros(64, np.int32), np.zeros(1, np.int32)])
    want = np.zeros(64, np.int32)
    want[:40] = np.arange(40) * 2 + 1
    want[32:] = np.arange(32) * 2 + 1
    assert np.array_equal(out["A"], want) and out["N"][0] == 96


def test_while_loop_with_a_value_that_differs_by_thread():
    f = program({"A": ((32,), "int32")}, f"""
        {alloc("v", (1,), "int32", "local.var")}
        while v[0] * v[0] < tx:
            v[0] = v[0] + 1
        A[tx] = v[0]
    """)
    assert np.array_equal(run_tile(f, [np.zeros(32, np.int32)])["A"], np.ceil(np.sqrt(np.arange(32))).astype(np.int32))


def test_shuffle_reverses_within_width():
    f = program({"A": ((32,), "int32")}, """
        A[tx] = T.call("shfl_xor", "int32", tx, 7, width=8)
    """)
    assert np.array_equal(run_tile(f, [np.zeros(32, np.int32)])["A"], np.arange(32) ^ 7)


def test_copy_to_thread_private_array_uses_each_threads_region():
    f = program({"A": ((32, 4), "float32"), "B": ((32, 4), "float32")}, f"""
        {alloc("r", (4,), "float32", "local")}
        T.copy(src=T.region(A[tx, 0], 1, 4), dst=T.region(r[0], 4))
        for k in T.serial(4):
            B[tx, 3 - k] = r[k]
    """)
    a = rng.standard_normal((32, 4)).astype(np.float32)
    assert np.array_equal(run_tile(f, [a, np.zeros_like(a)])["B"], a[:, ::-1])


@pytest.mark.spec("T.decl_buffer")
def test_view_shares_storage_with_another_shape_and_type():
    f = program({"A": ((4, 8), "uint32"), "B": ((64,), "uint16")}, f"""
        {alloc("S", (4, 8), "uint32", "shared.dyn")}
        V = T.decl_buffer("V", (64,), "uint16", scope="shared.dyn", data="S_p")
        T.copy(src=T.region(A[0, 0], 4, 8), dst=T.region(S[0, 0], 4, 8))
        T.copy(src=T.region(V[0], 64), dst=T.region(B[0], 64))
    """)
    a = rng.integers(0, 2**32, (4, 8), dtype=np.uint32)
    assert np.array_equal(run_tile(f, [a, np.zeros(64, np.uint16)])["B"], a.view(np.uint16).reshape(-1))


def test_dynamic_shape_is_solved_from_the_arguments():
    f = program({"A": (("m", "m * 2"), "int32"), "B": (("m",), "int32")}, """
        for i, in T.Parallel(m):
            B[i] = A[i, m * 2 - 1]
    """, symbols="m")
    a = np.arange(18, dtype=np.int32).reshape(3, 6)
    assert np.array_equal(run_tile(f, [a, np.zeros(3, np.int32)])["B"], a[:, -1])
    with pytest.raises(TileLangError, match=r"A.shape\[1\]: expected 6, found 5"):
        run_tile(f, [np.zeros((3, 5), np.int32), np.zeros(3, np.int32)])


@pytest.mark.parametrize("kind, fn", [("sum", np.sum), ("max", np.max), ("min", np.min),
                                      ("abssum", lambda x, axis: np.abs(x).sum(axis)),
                                      ("absmax", lambda x, axis: np.abs(x).max(axis))])
@pytest.mark.parametrize("clear", [True, False])
def test_reduce(kind, fn, clear):
    f = program({"A": ((5, 9), "float32"), "B": ((5,), "float32")}, f"""
        {alloc("F", (5, 9), "float32", "local.fragment")}
        {alloc("R", (5,), "float32", "local.fragment")}
        T.copy(src=T.region(A[0, 0], 5, 9), dst=T.region(F[0, 0], 5, 9))
        T.fill(dst=T.region(R[0], 5), value=2.0)
        T.reduce(src=T.region(F[0, 0], 5, 9), dst=T.region(R[0], 5), kind="{kind}", dim=T.py(1), clear={clear},
                 nan_propagate=False)
        T.copy(src=T.region(R[0], 5), dst=T.region(B[0], 5))
    """)
    a = rng.integers(-20, 20, (5, 9)).astype(np.float32)
    want = fn(a, axis=1)
    if not clear:
        want = {"sum": want + 2, "abssum": want + 2, "max": np.maximum(want, 2), "absmax": np.maximum(want, 2),
                "min": np.minimum(want, 2)}[kind]
    assert np.array_equal(run_tile(f, [a, np.zeros(5, np.float32)])["B"], want)


def test_narrow_sum_does_not_stall():
    f = program({"A": ((1, 4096), "bfloat16"), "B": ((1,), "bfloat16")}, f"""
        {alloc("F", (1, 4096), "bfloat16", "local.fragment")}
        {alloc("R", (1,), "bfloat16", "local.fragment")}
        T.copy(src=T.region(A[0, 0], 1, 4096), dst=T.region(F[0, 0], 1, 4096))
        T.reduce(src=T.region(F[0, 0], 1, 4096), dst=T.region(R[0], 1), kind="sum", dim=T.py(1), clear=True,
                 nan_propagate=False)
        T.copy(src=T.region(R[0], 1), dst=T.region(B[0], 1))
    """)
    import ml_dtypes

    assert float(run_tile(f, [np.ones((1, 4096), ml_dtypes.bfloat16), np.zeros(1, ml_dtypes.bfloat16)])["B"][0]) == 4096


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("kind, fn", [("sum", np.cumsum), ("max", np.maximum.accumulate)])
def test_scan(kind, fn, reverse):
    f = program({"A": ((4, 6), "int32")}, f"""
        {alloc("S", (4, 6), "int32", "shared.dyn")}
        T.copy(src=T.region(A[0, 0], 4, 6), dst=T.region(S[0, 0], 4, 6))
        T.scan(src=T.region(S[0, 0], 4, 6), dst=T.region(S[0, 0], 4, 6), kind="{kind}", dim=T.py(1), reverse={reverse})
        T.copy(src=T.region(S[0, 0], 4, 6), dst=T.region(A[0, 0], 4, 6))
    """)
    a = rng.integers(-9, 9, (4, 6)).astype(np.int32)
    want = fn(a[:, ::-1], axis=1)[:, ::-1] if reverse else fn(a, axis=1)
    assert np.array_equal(run_tile(f, [a])["A"], want)


def test_transpose():
    """The Transpose op exchanges the last two dimensions; Scan and AtomicTile are tested beside it."""
    f = program({"A": ((3, 4, 6), "int8"), "B": ((3, 6, 4), "int8")}, f"""
        {alloc("S", (3, 4, 6), "int8", "shared.dyn")}
        {alloc("R", (3, 6, 4), "int8", "shared.dyn")}
        T.copy(src=T.region(A[0, 0, 0], 3, 4, 6), dst=T.region(S[0, 0, 0], 3, 4, 6))
        T.transpose(src=T.region(S[0, 0, 0], 3, 4, 6), dst=T.region(R[0, 0, 0], 3, 6, 4))
        T.copy(src=T.region(R[0, 0, 0], 3, 6, 4), dst=T.region(B[0, 0, 0], 3, 6, 4))
    """)
    a = rng.integers(-9, 9, (3, 4, 6)).astype(np.int8)
    assert np.array_equal(run_tile(f, [a, np.zeros((3, 6, 4), np.int8)])["B"], a.swapaxes(1, 2))


def test_atomic_tile_adds_each_element_once_and_skips_the_outside():
    f = program({"A": ((10,), "float16")}, f"""
        {alloc("S", (8,), "float16", "shared.dyn")}
        T.fill(dst=T.region(S[0], 8), value=T.float16(1.0))
        T.atomic(dst=T.region(A[bx * 6], 8), value=T.region(S[0], 8), kind="add")
    """, grid="2")
    out = run_tile(f, [np.zeros(10, np.float16)])["A"]
    assert np.array_equal(out, [1, 1, 1, 1, 1, 1, 2, 2, 1, 1])


GEMM_DTYPES = [("float16", "float32"), ("float16", "float16"), ("bfloat16", "float32"), ("float32", "float32"),
               ("int8", "int32")]


@pytest.mark.parametrize("dt, acc", GEMM_DTYPES)
@pytest.mark.parametrize("ta, tb", [(False, False), (True, False), (False, True), (True, True)])
def test_gemm(dt, acc, ta, tb):
    from tilelang.ir import numpy_dtype

    m, n, k = 20, 12, 40
    sa, sb = ((k, m) if ta else (m, k)), ((n, k) if tb else (k, n))
    ta_, tb_ = ((16, 16), (16, 16))
    f = program({"A": (sa, dt), "B": (sb, dt), "C": ((m, n), acc)}, f"""
        {alloc("a", ta_, dt, "shared.dyn")}
        {alloc("b", tb_, dt, "shared.dyn")}
        {alloc("c", (16, 16), acc, "local.fragment")}
        for k in T.Pipelined(3):
            T.copy(src=T.region(A[{'k * 16, bx * 16' if ta else 'bx * 16, k * 16'}], 16, 16),
                   dst=T.region(a[0, 0], 16, 16))
            T.copy(src=T.region(B[{'0, k * 16' if tb else 'k * 16, 0'}], 16, 16), dst=T.region(b[0, 0], 16, 16))
            T.gemm(a=T.region(a[0, 0], 16, 16), b=T.region(b[0, 0], 16, 16), c=T.region(c[0, 0], 16, 16),
                   transpose_a={ta}, transpose_b={tb}, policy=T.py(0), clear_accum=(k == 0))
        T.copy(src=T.region(c[0, 0], 16, 16), dst=T.region(C[bx * 16, 0], 16, 16))
    """, grid="2", threads=128)
    make = (lambda s: rng.integers(-128, 128, s)) if dt == "int8" else rng.standard_normal
    a, b = make(sa).astype(numpy_dtype(dt)), make(sb).astype(numpy_dtype(dt))
    wide = np.int64 if dt == "int8" else np.float64
    want = (a.T if ta else a).astype(wide) @ (b.T if tb else b).astype(wide)
    got = run_tile(f, [a, b, np.zeros((m, n), numpy_dtype(acc))])["C"]
    if dt == "int8":
        assert np.array_equal(got, want)
    else:  # each of the K sums and the 3 roundings to acc loses at most half a unit in the last place
        eps = {"float16": 2.0**-11, "float32": 2.0**-24}[acc]
        size = np.abs(a.T if ta else a).astype(wide) @ np.abs(b.T if tb else b).astype(wide)
        bound = (3 * eps + k * 2.0**-24) * size
        assert (np.abs(got - want) <= bound).all()


def test_uninitialised_accumulator_is_refused():
    f = program({"A": ((16, 16), "float16"), "C": ((16, 16), "float32")}, f"""
        {alloc("a", (16, 16), "float16", "shared.dyn")}
        {alloc("c", (16, 16), "float32", "local.fragment")}
        T.copy(src=T.region(A[0, 0], 16, 16), dst=T.region(a[0, 0], 16, 16))
        T.gemm(a=T.region(a[0, 0], 16, 16), b=T.region(a[0, 0], 16, 16), c=T.region(c[0, 0], 16, 16),
               transpose_a=False, transpose_b=False, policy=T.py(0), clear_accum=False)
        T.copy(src=T.region(c[0, 0], 16, 16), dst=T.region(C[0, 0], 16, 16))
    """)
    with pytest.raises(TileLangError, match="c .local.fragment. is read before it is written") as e:
        run_tile(f, [np.zeros((16, 16), np.float16), np.zeros((16, 16), np.float32)])
    assert e.value.kind == "sim-uninitialized"


@pytest.mark.parametrize("body, kind", [
    ("for i, in T.Parallel(9):\n    S[i] = 1.0", "sim-out-of-bounds"),
    ("T.fill(dst=T.region(S[1], 8), value=1.0)", "sim-out-of-bounds"),
    ("for i, in T.Parallel(8):\n    A[i] = S[i]", "sim-uninitialized"),
    ("for i, in T.Parallel(tx + 1):\n    S[0] = 1.0", "sim-thread-dependent"),
    ("for i, in T.Parallel(8):\n    break", "sim-unsupported"),
    ("if True:\n    T.Assert(bx > 0, 'bx is zero', 'assert')", "sim-assert"),
])
def test_wrong_programs_are_refused(body, kind):
    f = program({"A": ((8,), "float32")}, alloc("S", (8,), "float32", "shared.dyn") + "\n" + body)
    with pytest.raises(TileLangError) as e:
        run_tile(f, [np.zeros(8, np.float32)])
    assert e.value.kind == kind


def test_private_variable_is_unknown_after_iterations_disagree():
    f = program({"A": ((4,), "int32")}, f"""
        {alloc("v", (1,), "int32", "local.var")}
        for i, in T.Parallel(4):
            v[0] = i
        A[0] = v[0]
    """)
    with pytest.raises(TileLangError, match="read before"):
        run_tile(f, [np.zeros(4, np.int32)])


def test_loop_over_thread_dependent_extent():
    f = program({"A": ((32,), "int32")}, """
        for k in T.serial(tx):
            A[tx] = A[tx] + k
    """)
    assert np.array_equal(run_tile(f, [np.zeros(32, np.int32)])["A"], [t * (t - 1) // 2 for t in range(32)])


def test_pipelined_form_with_versions_and_async_groups_runs():
    f = program({"A": ((4, 8), "float32"), "B": ((8,), "float32")}, f"""
        {alloc("S", (2, 8), "float32", "shared.dyn")}
        {alloc("c", (8,), "float32", "local.fragment")}
        T.fill(dst=T.region(c[0], 8), value=0.0)
        T.copy(src=T.region(A[0, 0], 1, 8), dst=T.region(S[0, 0], 1, 8), async_group=True)
        T.evaluate(T.call("cp_async_commit", "void"))
        for t in T.serial(4):
            if t + 1 < 4:
                T.copy(src=T.region(A[t + 1, 0], 1, 8), dst=T.region(S[(t + 1) % 2, 0], 1, 8))
            T.evaluate(T.call("cp_async_commit", "void"))
            T.evaluate(T.call("cp_async_wait", "void", n=1))
            for i, in T.Parallel(8):
                c[i] = c[i] + S[t % 2, i]
        T.copy(src=T.region(c[0], 8), dst=T.region(B[0], 8))
    """)
    a = rng.integers(0, 9, (4, 8)).astype(np.float32)
    assert np.array_equal(run_tile(f, [a, np.zeros(8, np.float32)])["B"], a.sum(0))


def test_printing(capsys):
    f = program({"A": ((1,), "int32")}, """
        if tx < 2:
            T.evaluate(T.call("printf", "int32", "x=%d y=%f\\n", tx, 1.5))
    """)
    run_tile(f, [np.zeros(1, np.int32)])
    assert capsys.readouterr().out == "x=0 y=1.500000\nx=1 y=1.500000\n"


def test_every_tile_op_has_a_reference():
    from tilelang.ir import TILE_OPS

    assert len(TILE_OPS) >= 7
    assert not [name for name, cls in TILE_OPS.items()
                if not any(callable(getattr(cls, how, None)) for how in ("reference", "expanded"))]


def test_safe_values_are_those_of_their_own_kernel():
    """A kernel in front of another one that reads outside the same tensor."""
    @T.prim_func
    def later(A: T.Tensor((4,), "int32"), B: T.Tensor((8,), "int32")):
        with T.Kernel(1, threads=32):
            T.annotate_safe_value({A: 3})
        with T.Kernel(1, threads=32):
            S = T.alloc_shared((8,), "int32")
            T.copy(A[0:8], S)
            T.copy(S, B)

    got = run_tile(later.func, {"A": np.full(4, 5, np.int32), "B": np.full(8, 9, np.int32)})["B"]
    assert got.tolist() == [5] * 4 + [0] * 4
