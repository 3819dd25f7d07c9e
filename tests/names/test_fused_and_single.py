"""T.fma is one fused multiply-add and T.fmul one product: neither is contracted with its neighbours."""

from fractions import Fraction

import numpy as np
import pytest
from everywhere import SM80, SM90A, WITH_HOPPER, everywhere

import tilelang
import tilelang.language as T
from tilelang.ir import numpy_dtype

N = 256


def program(dt):
    @T.prim_func
    def main(X: T.Tensor((N,), dt), Y: T.Tensor((N,), dt), Z: T.Tensor((N,), dt), F: T.Tensor((N,), dt), M: T.Tensor((N,), dt),
             S: T.Tensor((N,), dt)):
        with T.Kernel(1, threads=64):
            for i in T.Parallel(N):
                F[i] = T.fma(X[i], Y[i], Z[i])
                M[i] = T.fmul(X[i], Y[i])
                S[i] = T.fmul(X[i], Y[i]) + Z[i]

    return main


def rounded(x, dt):
    """A fraction rounded once to a type (through float64 where that is exact for the type's doubled width)."""
    best = np.asarray(float(x)).astype(dt)
    near = [best, np.nextafter(best, dt(np.inf)), np.nextafter(best, dt(-np.inf))]
    exact = sorted(near, key=lambda v: (abs(Fraction(float(v)) - x), int(np.asarray(v).view(f"u{np.dtype(dt).itemsize}")) & 1))
    return exact[0]


def operands(dt):
    """Values for which a product's rounding shows: z is close to -x*y, so that a fused result is the product's error."""
    rng = np.random.default_rng(7)
    x, y = (rng.uniform(1, 2, N).astype(dt) for _ in (0, 1))
    return x, y, (-(x.astype(np.float64) * y.astype(np.float64))).astype(dt)


@pytest.mark.spec("S:fma", "S:fmul")
@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32", "float64"])
def test_a_product_and_a_fused_sum_are_rounded_once(name):
    dt = numpy_dtype(tilelang.DataType(name)).type
    x, y, z = operands(dt)
    f, m, s = everywhere(program(name), x, y, z, on=WITH_HOPPER)[3:]
    want_m = np.array([rounded(Fraction(float(a)) * Fraction(float(b)), dt) for a, b in zip(x, y)])
    want_f = np.array([rounded(Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c)), dt) for a, b, c in zip(x, y, z)])
    want_s = np.array([rounded(Fraction(float(a)) + Fraction(float(c)), dt) for a, c in zip(want_m, z)])
    np.testing.assert_array_equal(m, want_m)
    np.testing.assert_array_equal(f.astype(np.float64), want_f.astype(np.float64))
    np.testing.assert_array_equal(s.astype(np.float64), want_s.astype(np.float64))
    assert name == "float64" or (want_f.astype(np.float64) != want_s.astype(np.float64)).mean() > 0.5


@pytest.mark.parametrize("dt", ["float16", "float32"])
def test_vectors_of_floats(dt):
    @T.prim_func
    def main(X: T.Tensor((N,), dt), Y: T.Tensor((N,), dt), Z: T.Tensor((N,), dt), F: T.Tensor((N,), dt), M: T.Tensor((N,), dt)):
        with T.Kernel(1, threads=N // 2):
            i = T.get_thread_binding() * 2
            F[i:i + 2] = T.fma(X[i:i + 2], Y[i:i + 2], Z[i:i + 2])
            M[i:i + 2] = T.fmul(X[i:i + 2], Y[i:i + 2])

    given = operands(numpy_dtype(tilelang.DataType(dt)).type)
    one = everywhere(program(dt), *given)
    for got, want in zip(everywhere(main, *given, on=WITH_HOPPER)[3:], one[3:]):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("target", [SM80, SM90A], ids=["sm_80", "sm_90a"])
@pytest.mark.parametrize("name,texts", [("float32", ["__fmaf_rn(", "__fmul_rn("]), ("float64", ["__fma_rn(", "__dmul_rn("]),
                                        ("float16", ["__hfma(", "__hmul_rn("]), ("bfloat16", ["fma_bfloat16(", "__hmul_rn("])])
def test_the_text_names_instructions_that_are_not_contracted(target, name, texts):
    source = tilelang.compile(program(name), target=target).get_kernel_source()
    for text in texts:
        assert text in source, text


@pytest.mark.parametrize("wrong,words", [
    (lambda x, h, n: T.fma(x, h, x), "floats of one type, found float32, float16, float32"),
    (lambda x, h, n: T.fmul(h, 2.0), r"float16, float32[\s\S]*T.float16\(2.0\)"),
    (lambda x, h, n: T.fma(n, n, n), "floats of one type, found int32"),
    (lambda x, h, n: T.fmul(x), "missing 1 required positional argument"),
    (lambda x, h, n: T.fmul("a", x), "T.fmul"),
])
def test_operands_that_are_no_floats_of_one_type(wrong, words):
    with pytest.raises((TypeError, ValueError), match=words):
        @T.prim_func
        def main(X: T.Tensor((8,), "float32"), H: T.Tensor((8,), "float16"), I: T.Tensor((8,), "int32")):
            with T.Kernel(1, threads=8):
                X[0] = T.cast(wrong(X[0], H[0], I[0]), "float32")
