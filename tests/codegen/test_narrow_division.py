"""Division of 8- and 16-bit integers: one element's division by 0 must not reach the elements beside it."""

import pytest

import tilelang.language as T
from tilelang.codegen.cuda.printer import print_kernel
from tilelang.runtime import nvrtc
from tilelang.target import Target
from tilelang.transform.pipeline import lower

SM90A = Target({"kind": "cuda", "arch": "sm_90a"})


def divided(dtype, op):
    @T.prim_func
    def f(X: T.Tensor((256,), dtype), Z: T.Tensor((256,), dtype), Y: T.Tensor((256,), dtype)):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(256):
                Y[i] = op(X[i], Z[i])

    return print_kernel(lower(f.func, SM90A).kernels[0])


DIVISIONS = {"//": lambda a, b: a // b, "%": lambda a, b: a % b, "truncdiv": T.truncdiv, "truncmod": T.truncmod}


@pytest.mark.parametrize("dtype, guarded", [("uint8", True), ("uint16", True), ("int8", True), ("int16", True),
                                            ("int32", False)])
@pytest.mark.parametrize("op", DIVISIONS.values(), ids=DIVISIONS)
def test_quotients_that_are_packed_into_words_have_divisors_that_are_not_zero(dtype, guarded, op):
    text = divided(dtype, op)
    body = text[text.index("f_kernel("):]
    assert ("tl::nonzero(" in body or "tl::floor" in body) is (guarded or "tl::floor" in body)
    assert "nonzero" in text or not guarded
    if nvrtc.available():
        assert nvrtc.compile_cubin(text, "sm_90a").spills == 0


def test_constant_divisors_are_printed_as_they_are():
    assert "nonzero" not in divided("uint8", lambda a, b: a // 3)
