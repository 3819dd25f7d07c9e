"""T.gemm on the CPU: shapes, types, transposes, processors."""

import numpy as np
import pytest
from cpu_harness import Compiled, run_cpu
from kernel_text import alloc, program

from tilelang.transform.cpu.plan_gemm import blocking
from tilelang.target.cpu import describe, host_cpu
from tilelang.errors import TileLangError
from tilelang.ir import numpy_dtype

rng = np.random.default_rng(3)
HAVE = frozenset(x[1:] for x in host_cpu().features.split(",") if x.startswith("+"))
AVX2 = frozenset({"avx2", "fma", "f16c"})
# The same IR is compiled for this machine; the description decides vector width and blocking.
HOSTS = {"here": host_cpu(), "avx2": describe("x", AVX2, "", True), "sse": describe("x", frozenset(), "", True),
         "avx512": describe("x", AVX2 | {"avx512f", "avx512vl", "avx512bw", "avx512dq"}, "", True)}


def one_gemm(m, n, k, ta=False, tb=False, dt="float32", acc="float32", clear="False"):
    """C += op(A) @ op(B) on one tile."""
    sa, sb = (k, m) if ta else (m, k), (n, k) if tb else (k, n)
    da, db = (dt.split() * 2)[:2]
    return program({"A": (sa, da), "B": (sb, db), "C": ((m, n), acc)}, f"""
        {alloc("As", sa, da, "shared.dyn")}
        {alloc("Bs", sb, db, "shared.dyn")}
        {alloc("Cf", (m, n), acc, "local.fragment")}
        T.copy(src=T.region(A[0, 0], {sa[0]}, {sa[1]}), dst=T.region(As[0, 0], {sa[0]}, {sa[1]}))
        T.copy(src=T.region(B[0, 0], {sb[0]}, {sb[1]}), dst=T.region(Bs[0, 0], {sb[0]}, {sb[1]}))
        T.copy(src=T.region(C[0, 0], {m}, {n}), dst=T.region(Cf[0, 0], {m}, {n}))
        T.gemm(a=T.region(As[0, 0], {sa[0]}, {sa[1]}), b=T.region(Bs[0, 0], {sb[0]}, {sb[1]}),
               c=T.region(Cf[0, 0], {m}, {n}), transpose_a={ta}, transpose_b={tb}, policy=T.py(0), clear_accum={clear})
        T.copy(src=T.region(Cf[0, 0], {m}, {n}), dst=T.region(C[0, 0], {m}, {n}))
    """)


def operands(m, n, k, ta, tb, dt, acc):
    def make(*shape, d):
        nt = numpy_dtype(d)
        if nt.kind in "iu":
            return rng.integers(-100 if nt.kind == "i" else 0, 100, shape).astype(nt)
        return rng.standard_normal(shape).astype(nt)

    da, db = (dt.split() * 2)[:2]
    return make(*((k, m) if ta else (m, k)), d=da), make(*((n, k) if tb else (k, n)), d=db), make(m, n, d=acc)


def check(m, n, k, ta=False, tb=False, dt="float32", acc="float32", clear=False, host=None):
    a, b, c = operands(m, n, k, ta, tb, dt, acc)
    got = run_cpu(one_gemm(m, n, k, ta, tb, dt, acc, str(clear)), [a, b, c], host=host)["C"]
    wide = np.int64 if numpy_dtype(acc).kind == "i" else np.float64
    x, y = (a.T if ta else a).astype(wide), (b.T if tb else b).astype(wide)
    want = x @ y + (0 if clear else c.astype(wide))
    if wide is np.int64:
        assert np.array_equal(got, want.astype(numpy_dtype(acc)))
        return
    size = np.abs(x) @ np.abs(y) + np.abs(c.astype(wide))
    eps = 2.0**-53 if acc == "float64" else 2.0**-24
    last = {"float16": 2.0**-11, "bfloat16": 2.0**-8}.get(acc, 0.0)
    assert np.all(np.abs(got.astype(np.float64) - want) <= (k + 1) * eps * size + last * np.abs(want) + 1e-30)


@pytest.mark.parametrize("ta", [False, True])
@pytest.mark.parametrize("tb", [False, True])
@pytest.mark.parametrize("dt, acc", [("float32", "float32"), ("float16", "float32"), ("bfloat16", "float32"),
                                     ("float64", "float64"), ("int8", "int32"), ("float16", "float16"),
                                     ("float8_e4m3fn", "float32")])
def test_types_and_transposes(ta, tb, dt, acc):
    check(48, 40, 24, ta, tb, dt, acc)


@pytest.mark.parametrize("m, n, k", [(1, 1, 1), (13, 7, 5), (16, 100, 3), (33, 31, 17), (64, 8, 64), (5, 130, 9)])
@pytest.mark.parametrize("tb", [False, True])
def test_any_size(m, n, k, tb):
    check(m, n, k, tb=tb, dt="float16" if m % 2 else "float32")


@pytest.mark.parametrize("m, n, k", [(1, 1, 1), (13, 7, 5), (16, 100, 3), (33, 31, 17), (64, 8, 64)])
@pytest.mark.parametrize("ta", [False, True])
@pytest.mark.parametrize("tb", [False, True])
@pytest.mark.parametrize("dt", ["int8", "uint8", "uint8 int8"])
def test_integer_words_of_any_size(m, n, k, ta, tb, dt):
    check(m, n, k, ta, tb, dt=dt, acc="int32")


def test_products_of_the_extreme_bytes_do_not_overflow():
    for dt, low in (("int8", -128), ("uint8", 255)):
        a, b = np.full((16, 64), low, dt), np.full((64, 16), low, dt)
        got = run_cpu(one_gemm(16, 16, 64, dt=dt, acc="int32"), [a, b, np.zeros((16, 16), np.int32)])["C"]
        assert (got == low * low * 64).all()


@pytest.mark.parametrize("name", ["avx2", "sse", "avx512"])
@pytest.mark.parametrize("tb", [False, True])
def test_blocking_of_other_processors_gives_the_same(name, tb):
    if name == "sse" or (AVX2 <= HAVE and (name != "avx512" or "avx512f" in HAVE)):
        check(37, 53, 19, tb=tb, host=HOSTS[name])
        check(24, 16, 19, tb=tb, dt="int8", acc="int32", host=HOSTS[name])


@pytest.mark.parametrize("lanes, registers", [(16, 32), (8, 16), (4, 16)])
def test_blocks_fit_the_registers_and_keep_the_multipliers_busy(lanes, registers):
    for m, n in [(128, 128), (64, 64), (128, 256), (16, 16), (1, 8)]:
        mr, nv = blocking(m, n, lanes, registers)
        assert mr * nv + nv + 1 <= registers and mr <= m
        if m >= 64:
            assert mr * nv >= 8


def test_clearing_the_accumulator_ignores_what_was_there():
    a, b, c = operands(16, 32, 8, False, False, "float32", "float32")
    c[:] = np.nan
    got = run_cpu(one_gemm(16, 32, 8, clear="True"), [a, b, c])["C"]
    np.testing.assert_allclose(got, a @ b, rtol=1e-5, atol=1e-5)


def test_versions_of_a_shared_operand_and_a_run_time_clear():
    f = program({"A": ((4, 16, 8), "float32"), "B": ((4, 8, 32), "float32"), "C": ((16, 32), "float32")}, f"""
        {alloc("As", (2, 16, 8), "float32", "shared.dyn")}
        {alloc("Bs", (2, 8, 32), "float32", "shared.dyn")}
        {alloc("Cf", (16, 32), "float32", "local.fragment")}
        for k in T.serial(4):
            T.copy(src=T.region(A[k, 0, 0], 1, 16, 8), dst=T.region(As[k % 2, 0, 0], 1, 16, 8))
            T.copy(src=T.region(B[k, 0, 0], 1, 8, 32), dst=T.region(Bs[k % 2, 0, 0], 1, 8, 32))
            T.gemm(a=T.region(As[k % 2, 0, 0], 1, 16, 8), b=T.region(Bs[k % 2, 0, 0], 1, 8, 32),
                   c=T.region(Cf[0, 0], 16, 32), transpose_a=False, transpose_b=False, policy=T.py(0),
                   clear_accum=k == 0)
        T.copy(src=T.region(Cf[0, 0], 16, 32), dst=T.region(C[0, 0], 16, 32))
    """)
    a, b, _ = rng.standard_normal((4, 16, 8)).astype(np.float32), rng.standard_normal((4, 8, 32)).astype(np.float32), 0
    np.testing.assert_allclose(run_cpu(f, [a, b, None])["C"], np.einsum("kij,kjl->il", a, b), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dt, acc", [("int8", "float32"), ("float16", "int32"), ("int8", "int8")])
def test_mixed_kinds_are_refused(dt, acc):
    with pytest.raises(TileLangError, match=f"T.gemm of {dt} and {dt} into {acc}"):
        Compiled(one_gemm(16, 16, 16, dt=dt, acc=acc))
