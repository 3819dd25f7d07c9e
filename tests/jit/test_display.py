"""kernel.layouts, and what notebooks show of kernels and reports."""

import numpy as np

import tilelang
import tilelang.language as T
from tilelang.jit.display import Report
from tilelang.layout import Fragment, Layout

SM80, SM90A = ({"kind": "cuda", "arch": arch} for arch in ("sm_80", "sm_90a"))


def product(stages=0):
    @T.prim_func
    def main(A: T.Tensor((64, 256), "float16"), B: T.Tensor((64, 256), "float16"), C: T.Tensor((64, 64), "float32")):
        with T.Kernel(1, threads=128):
            a = T.alloc_shared((64, 64), "float16")
            b = T.alloc_shared((64, 64), "float16")
            acc = T.alloc_fragment((64, 64), "float32")
            T.clear(acc)
            for k in T.Pipelined(4, num_stages=stages):
                T.copy(A[:, k * 64:(k + 1) * 64], a)
                T.copy(B[:, k * 64:(k + 1) * 64], b)
                T.gemm(a, b, acc, transpose_B=True)
            T.copy(acc, C)
        with T.Kernel(1, threads=64):
            acc = T.alloc_fragment((64,), "float32")
            T.copy(C[0, :], acc)
            for i in T.Parallel(64):
                C[0, i] = acc[i] * 2

    return main


def test_a_kernel_gives_the_layouts_of_all_its_kernels():
    kernel = tilelang.compile(product(), target=SM80, execution_backend="simulator")
    assert list(kernel.layouts) == ["a", "b", "acc", "acc_1"]
    a, b, acc, second = kernel.layouts.values()
    assert isinstance(a, Layout) and a.shape == b.shape == (64, 64)
    assert isinstance(acc, Fragment) and (acc.threads, acc.registers) == (128, 32)
    assert second.shape == (64,) and second.threads == 64
    assert kernel.layouts is kernel.layouts


def test_layouts_are_those_of_the_schedule_that_was_compiled():
    kernel = tilelang.compile(product(stages=2), target=SM90A, execution_backend="simulator")
    assert kernel.layouts["a"].shape == (2, 64, 64)  # the stages of the ring
    plain = tilelang.compile(product(stages=2), target=SM90A, execution_backend="simulator",
                             pass_configs={"tl.enable_hopper": False, "tl.enable_async_copy": False})
    assert plain.layouts["a"].shape == (64, 64)


def test_a_given_layout_is_the_one_of_the_kernel():
    lay = T.Layout((16, 16), lambda i, j: (j, i))

    @T.prim_func
    def main(A: T.Tensor((16, 16), "float32")):
        with T.Kernel(1, threads=32):
            s = T.alloc_shared((16, 16), "float32")
            T.annotate_layout({s: lay})
            T.copy(A, s)
            T.copy(s, A)

    assert tilelang.compile(main, target=SM80, execution_backend="simulator").layouts == {"s": lay}
    assert tilelang.compile(main, target="cpu").layouts == {}


def test_notebooks_show_kernels_layouts_and_reports():
    kernel = tilelang.compile(product(), target=SM80, execution_backend="simulator")
    assert "<svg" in kernel.layouts._repr_html_() and "acc_1: Fragment(" in kernel.layouts._repr_html_()
    page = kernel._repr_html_()
    assert "<table>" in page and page.count("<svg") == 3 and "<summary>source</summary>" in page
    report = kernel.report()
    assert isinstance(report, str) and report._repr_html_() in page
    assert Report("kernel f\n  a<b: 1")._repr_html_() == (
        '<table><tr><th colspan="2" style="text-align:left">kernel f</th></tr>'
        '<tr><td style="text-align:left">a&lt;b</td><td style="text-align:left">1</td></tr></table>')
    on_cpu = tilelang.compile(product(), target="cpu")
    assert "no shared or fragment buffers" in on_cpu._repr_html_()
    c = np.zeros((64, 64), np.float32)
    on_cpu(np.zeros((64, 256), np.float16), np.zeros((64, 256), np.float16), c)
