"""What a user meets in the first hour: names spelt almost right, annotations that are strings twice, whose access waits."""

import numpy as np
import pytest

import tilelang
import tilelang.language as T
from tilelang import errors

SM80 = {"kind": "cuda", "arch": "sm_80"}


def test_a_name_spelt_almost_right_is_suggested():
    with pytest.raises(AttributeError, match=r"did you mean T\.Parallel\?"):
        @T.prim_func
        def main(A: T.Tensor((8,), "int32")):
            with T.Kernel(1):
                for i in T.parallell(8):
                    A[i] = 0


def test_annotations_may_be_strings_of_strings():
    def main(A: "'T.Tensor((4,), T.int32)'", n: "T.int32"):
        with T.Kernel(1, threads=4):
            A[T.get_thread_binding()] = n

    a = np.zeros(4, np.int32)
    tilelang.compile(T.prim_func(main), target="cpu")(a, 3)
    assert (a == 3).all()


def test_a_type_may_be_named_by_a_string_of_a_string():
    """A scalar annotated "float32" in a module whose annotations are strings was no name that is defined."""
    def main(A: "T.Tensor((4,), 'float32')", x: "'float32'", n: "'T.int64'"):  # noqa: F821
        with T.Kernel(1, threads=4):
            A[T.get_thread_binding()] = x + n

    a = np.zeros(4, np.float32)
    tilelang.compile(T.prim_func(main), target="cpu")(a, 0.5, 3)
    assert (a == 3.5).all()


def test_an_annotation_that_means_nothing_is_told_at_its_parameter():
    def main(A: T.Tensor((4,), "float32"), x: "flaot32"):  # noqa: F821
        with T.Kernel(1, threads=4):
            A[0] = x

    with pytest.raises(errors.TileLangError) as caught:
        T.prim_func(main)
    assert caught.value.kind == "parameter-annotation" and 'x: "flaot32"' in str(caught.value).splitlines()[2]


@pytest.mark.parametrize("framework", ["torch", "numpy"])
def test_an_output_of_negative_extent_is_named(framework):
    """The call failed where the framework allocates: "negative dimensions are not allowed"."""
    @T.prim_func
    def main(n: T.int32, A, O):
        A: T.Tensor((4,), "float32")
        O: T.Tensor((n - 1, 4), "float32")
        with T.Kernel(n, threads=4) as b:
            for i in T.Parallel(4):
                O[b, i] = A[i] * b

    a = np.arange(4, dtype=np.float32)
    a = a if framework == "numpy" else pytest.importorskip("torch").from_numpy(a)
    kernel = tilelang.compile(main, target="cpu", out_idx=-1)
    assert tuple(kernel(3, a).shape) == (2, 4) and tuple(kernel(1, a).shape) == (0, 4)
    with pytest.raises(errors.TileLangError, match=r"output O shape\[0\] is negative") as caught:
        kernel(0, a)
    assert caught.value.kind == "kernel-argument" and "`O` is declared here" in str(caught.value)


def test_the_shared_buffer_that_needs_the_barrier_is_named():
    @T.prim_func
    def main(A: T.Tensor((64,), "float32")):
        with T.Kernel(1, threads=64):
            t = T.get_thread_binding()
            S = T.alloc_shared((64,), "float32")
            for k in T.serial(t):
                S[t] = A[t] + k
                A[t] = S[63 - t]

    with pytest.raises(errors.TileLangError, match="the accesses of `S` need a block barrier"):
        tilelang.compile(main, target=SM80)


def test_an_eager_call_says_what_was_passed_for_a_tensor(monkeypatch):
    @tilelang.jit(target="cpu")
    def f(A):
        N = T.const("N")
        A: T.Tensor((N,), "float32")
        with T.Kernel(1, threads=32):
            A[0] = 0

    with pytest.raises(ValueError, match=r"it is shape\[0\] of the tensor `A`, found int"):
        f(3)
    with pytest.raises(ValueError, match=r"it is shape\[0\] of `A`, which is not passed"):
        f.compile()


def test_a_stride_too_long_for_its_symbol_asks_for_more_bits():
    s = T.dynamic("s")

    @T.prim_func
    def main(A: T.StridedTensor((2, 4), (s, 1), "int8")):
        with T.Kernel(1, threads=4):
            A[0, T.get_thread_binding()] = 0

    far = np.lib.stride_tricks.as_strided(np.zeros(1, np.int8), (2, 4), (2**31, 1), writeable=True)
    with pytest.raises(errors.TileLangError, match='T.dynamic\\("…", dtype="int64"\\)'):
        tilelang.compile(main, target="cpu")(far)


def test_a_call_that_does_not_fit_shows_the_parameters():
    with pytest.raises(TypeError, match=r"did you mean `num_stages`\? T\.Pipelined\(start, stop=None, num_stages=0, "):
        @T.prim_func
        def main(A: T.Tensor((8,), "int32")):
            with T.Kernel(1):
                for i in T.Pipelined(8, stages=2):
                    A[i] = 0


def test_jit_decorates_functions_alone():
    with pytest.raises(TypeError, match="tilelang.jit decorates a function, found int"):
        tilelang.jit(3)
