"""Vector accesses under run-time sizes: where T.assume promises alignment, where sizes show it, and beyond 2**31 elements."""

import numpy as np
import pytest

import tilelang
import tilelang.language as T
from tilelang.codegen.cuda.printer import print_kernel
from tilelang.target import Target
from tilelang.transform.pipeline import lower
from tilelang.transform.analysis.guards import promised, promises

SM80 = Target({"kind": "cuda", "arch": "sm_80"})


@T.macro
def promised_here(conditions):
    if len(conditions) > 0:
        T.assume(conditions[0])
        promised_here(conditions[1:])


def rows(columns, *conditions, block=256):
    """B = A of run-time rows, element by element, and conditions that are promised."""
    m = T.dynamic("m")

    @T.prim_func
    def program(A: T.Tensor((m, columns), "float16"), B: T.Tensor((m, columns), "float16")):
        promised_here(conditions)
        with T.Kernel(T.ceildiv(columns, block), m, threads=32) as (bx, by):
            for j in T.Parallel(block):
                B[by, bx * block + j] = A[by, bx * block + j]

    return program


def text(program):
    (kernel,) = lower(program.func, SM80).kernels
    return print_kernel(kernel)


def test_vectors_where_a_promise_or_the_size_itself_shows_that_rows_are_aligned():
    n = T.dynamic("n")
    assert "tl::copy<half_t, 8>" in text(rows(n * 8))
    assert "tl::copy<half_t, 8>" in text(rows(n, n % 8 == 0))
    assert "tl::copy<half_t, 8>" in text(rows(n, n % 16 == 0, n > 0))
    assert "tl::copy<half_t, 4>" in text(rows(n, n % 4 == 0))
    assert "tl::copy" not in text(rows(n))  # odd rows start anywhere
    assert "tl::copy" not in text(rows(n, n % 3 == 0))


@pytest.mark.parametrize("elements, dtype, width", [(3 * 2**30, "int8", 8), (3 * 2**30, "float16", 8), (2**20, "float32", 4)])
def test_vectors_beyond_32_bits(elements, dtype, width):
    @T.prim_func
    def program(A: T.Tensor((elements,), dtype), B: T.Tensor((elements,), dtype)):
        with T.Kernel(elements // 1024, threads=128) as bx:
            for j in T.Parallel(1024):
                B[bx * 1024 + j] = A[bx * 1024 + j]

    printed = text(program)
    assert f", {width}>(&B[" in printed and ("long long" in printed) is (elements >= 2**31), printed


@pytest.mark.parametrize("target, backend", [(SM80, "simulator"), ("cpu", None)])
def test_a_promise_is_kept_at_every_call(target, backend):
    n = T.dynamic("n")
    kernel = tilelang.compile(rows(n, n % 8 == 0), target=target, execution_backend=backend)
    for size in (0, 8, 256, 264):
        a = np.random.default_rng(size).standard_normal((3, size)).astype(np.float16)
        b = np.full_like(a, 7)
        kernel(a, b)
        np.testing.assert_array_equal(a, b)
    for size in (1, 12, 255):
        a, b = np.zeros((3, size), np.float16), np.full((3, size), 7, np.float16)
        with pytest.raises(RuntimeError, match="Assume: "):
            kernel(a, b)
        assert (b == 7).all()


def test_only_what_the_host_checks_is_taken_for_true():
    n, m = T.dynamic("n"), T.dynamic("m")

    @T.prim_func
    def program(A: T.Tensor((n, m), "int32"), k: T.int32):
        T.assume(n % 8 == 0)
        T.assume(k >= 4)
        with T.Kernel(n, threads=32) as bx:
            T.assume(m % 2 == 0)
            T.assume(A[bx, 0] % 4 == 0)  # data: nobody checks it
            if bx > 1:
                T.assume(m % 16 == 0)  # not at every call
            A[bx, 0] = k

    assert len(promises(program.func)) == 3
    analyzer, divisors = promised(program.func)
    assert {v.name: d for v, d in divisors.items()} == {"n": 8, "m": 2}
    assert [analyzer.interval(p)[0] for p in program.func.params if p.name == "k"] == [4]
