"""-1 in the lists of T.Pipelined leaves copies to the producer: the public form of FlashAttention-3 kernels."""

import numpy as np
import pytest

import tilelang
import tilelang.language as T
from tilelang.errors import InternalError, TileLangError

S80, S90 = {"kind": "cuda", "arch": "sm_80"}, {"kind": "cuda", "arch": "sm_90a"}


def matmul(**lists):
    @T.prim_func
    def main(A: T.Tensor((64, 320), "float16"), B: T.Tensor((320, 64), "float16"), C: T.Tensor((64, 64), "float32")):
        with T.Kernel(1, threads=128):
            a, b = T.alloc_shared((64, 64), "float16"), T.alloc_shared((64, 64), "float16")
            c = T.alloc_fragment((64, 64), "float32")
            T.clear(c)
            for k in T.Pipelined(5, **lists):
                T.copy(A[0, k * 64], a)
                T.copy(B[k * 64, 0], b)
                T.gemm(a, b, c)
            T.copy(c, C)
    return main


def attention(**lists):
    @T.prim_func
    def main(Q: T.Tensor((64, 64), "float16"), K: T.Tensor((192, 64), "float16"), V: T.Tensor((192, 64), "float16"),
             O: T.Tensor((64, 64), "float32")):
        with T.Kernel(1, threads=128):
            q, k_s, v_s = (T.alloc_shared((64, 64), "float16") for _ in range(3))
            s, p = T.alloc_fragment((64, 64), "float32"), T.alloc_fragment((64, 64), "float16")
            o, m, before, scale = T.alloc_fragment((64, 64), "float32"), *(T.alloc_fragment((64,), "float32") for _ in range(3))
            T.copy(Q, q)
            T.clear(o)
            T.fill(m, -1e4)
            for k in T.Pipelined(3, **lists):
                T.copy(K[k * 64, 0], k_s)
                T.clear(s)
                T.gemm(q, k_s, s, transpose_B=True)
                T.copy(m, before)
                T.reduce_max(s, m, dim=1, clear=False)
                for i in T.Parallel(64):
                    scale[i] = T.exp2(before[i] - m[i])
                for i, j in T.Parallel(64, 64):
                    p[i, j] = T.exp2(s[i, j] - m[i])
                for i, j in T.Parallel(64, 64):
                    o[i, j] *= scale[i]
                T.copy(V[k * 64, 0], v_s)
                T.gemm(p, v_s, o)
            T.copy(o, O)
    return main


def agree(program, inputs, shape, names):
    """The results of all executions, which agree; the reports of the simulators say that `names` are loaded ahead."""
    out = {}
    for name, target, options in (("tile", S90, {"execution_backend": "tile"}), ("cpu", "cpu", {}),
                                  ("sm_80", S80, {"execution_backend": "simulator"}),
                                  ("sm_90a", S90, {"execution_backend": "simulator"})):
        kernel, out[name] = tilelang.compile(program, target=target, **options), np.zeros(shape, np.float32)
        kernel(*inputs, out[name])
        if name == "sm_80":
            assert f"of {', '.join(names)}" in kernel.report()
        if name == "sm_90a":
            assert f"1 loads {', '.join(names)} by TMA" in kernel.report()
            assert "ordered:" in kernel.sync_report()
    for name, got in out.items():
        np.testing.assert_allclose(got, out["tile"], rtol=1e-2, atol=1e-2, err_msg=name)
    return out


FORMS = {
    "groups of one": dict(order=[-1, -1, 0], stage=[-1, -1, 0], group=[[0], [1], [2]]),
    "without groups": dict(order=[-1, -1, 0], stage=[-1, -1, 0], num_stages=3),
    "a group of copies": dict(order=[-1, 0], stage=[-1, 0], group=[[0, 1], [2]], num_stages=2),
    "stages alone": dict(stage=[-1, -1, 0]),
    "one copy": dict(order=[-1, 0, 1], stage=[-1, 0, 0], num_stages=2),
    "annotations": dict(annotations={f"software_pipeline_{x}": [-1, -1, 0] for x in ("order", "stage")}, num_stages=2),
}


@pytest.mark.parametrize("form", FORMS)
def test_lists_of_a_gemm_leave_copies_to_the_producer(form, as_planned):
    rng = np.random.default_rng(0)
    A, B = rng.standard_normal((64, 320)).astype(np.float16), rng.standard_normal((320, 64)).astype(np.float16)
    out = agree(matmul(**FORMS[form]), (A, B), (64, 64), ("a", "b"))
    np.testing.assert_allclose(out["tile"], A.astype(np.float32) @ B.astype(np.float32), rtol=1e-3, atol=1e-3)


def test_groups_of_attention_order_the_consumers(as_planned):
    rng = np.random.default_rng(1)
    inputs = [rng.standard_normal(n).astype(np.float16) for n in ((64, 64), (192, 64), (192, 64))]
    lists = dict(order=[-1, 0, 3, 1, -1, 2], stage=[-1, 0, 0, 1, -1, 1], group=[[0], [1, 2], [3, 4, 5, 6], [7], [8], [9]])
    program = attention(num_stages=2, **lists)
    agree(program, inputs, (64, 64), ("k_s", "v_s"))
    report = tilelang.compile(program, target=S90, execution_backend="simulator").report()
    assert "the GEMM into `o` of an iteration runs under the next iteration" in report


WRONG = {
    "a gemm left to the producer": (dict(order=[-1, -1, -1], stage=[-1, -1, -1]), "this statement is none", "T.gemm(a, b, c)"),
    "an order alone": (dict(order=[-1, 0, 1], stage=[0, 0, 1]), "found 0 with order -1", "T.copy(A[0, k * 64], a)"),
    "another number below zero": (dict(order=[-2, -1, 0], stage=[-2, -1, 0]), "stages start at 0", "T.copy(A[0, k * 64], a)"),
    "a statement in no group": (dict(order=[-1, 0], stage=[-1, 0], group=[[0], [1]]), "its 3 statements once", "Pipelined"),
    "a statement that is not there": (dict(order=[-1, 0], stage=[-1, 0], group=[[0, 1], [3]]), "statements once", "Pipelined"),
    "too few entries": (dict(order=[-1, 0], stage=[-1, 0]), "has 2 entries, the loop body has 3", "Pipelined"),
}


@pytest.mark.parametrize("name", WRONG)
def test_lists_that_do_not_fit_are_named(name):
    lists, message, line = WRONG[name]
    with pytest.raises(InternalError) as e:
        tilelang.compile(matmul(**lists), target="cpu")
    assert isinstance(e.value, TileLangError) and e.value.kind == "pipeline-annotation"
    assert message in str(e.value) and line in str(e.value)
