"""Refused calls and settings say what was met and what to do, on every execution alike."""

import re

import numpy as np
import pytest

import tilelang
import tilelang.language as T
from tilelang.errors import InternalError

torch = pytest.importorskip("torch")


def assuming():
    m = T.dynamic("m")

    @T.prim_func
    def assuming(A: T.Tensor((m,), "int32"), U: T.Tensor((4,), "int32")):
        T.assume(m % 8 == 0)
        with T.Kernel(1, threads=32):
            for i in T.Parallel(4):
                U[i] = m
    return assuming


def packed():
    @T.prim_func
    def packed(A: T.Tensor((4, 32), "int4"), B: T.Tensor((4, 32), "int4")):
        with T.Kernel(1, threads=32):
            S = T.alloc_shared((4, 32), "int4")
            T.copy(A, S)
            T.copy(S, B)
    return packed


def test_what_the_host_checks_is_no_fault_of_an_interpreter():
    for target, backend in ("cpu", "tile"), ("cuda", "simulator"):
        kernel = tilelang.compile(assuming(), target=target, execution_backend=backend)
        with pytest.raises(RuntimeError, match=r"Assume: .* does not hold \(T.assume at test_call_messages.py:\d+\)") as caught:
            kernel(np.zeros(4, np.int32), np.zeros(4, np.int32))
        assert not isinstance(caught.value, InternalError)
        with pytest.raises(RuntimeError, match="Symbolic shape variable m requires") as caught:
            kernel(None, np.zeros(4, np.int32))
        assert not isinstance(caught.value, InternalError)


def test_packed_and_strided_tensors_say_what_to_pass():
    kernel = tilelang.compile(packed(), out_idx=-1, target="cpu", execution_backend="tile")
    with pytest.raises(RuntimeError, match=r"passed packed, 2 values a byte: `A` as int8 of shape \(4, 16,\)"):
        kernel(torch.zeros(4, 32, dtype=torch.int8))
    cython = tilelang.compile(packed(), out_idx=-1, target="cpu", execution_backend="cython")
    with pytest.raises(ValueError, match="expected 32 at index 1, got 32 bytes of 2 values"):
        cython(torch.zeros(4, 32, dtype=torch.int8))
    kernel = tilelang.compile(assuming(), target="cpu", execution_backend="tile")
    with pytest.raises(RuntimeError, match="expected: a compact array: each stride the product"):
        kernel(torch.zeros(8, dtype=torch.int32), torch.zeros(1, dtype=torch.int32).expand(4))


def test_tensors_of_transforms_have_no_memory():
    kernel = tilelang.compile(assuming(), out_idx=-1, target="cpu")
    assert kernel(torch.zeros(8, dtype=torch.int32))[0] == 8
    with pytest.raises(RuntimeError, match="`A` has no memory .kernel assuming input A expected pointer"):
        torch.vmap(kernel)(torch.zeros(2, 8, dtype=torch.int32))


def test_settings_that_mean_nothing_are_refused():
    with pytest.raises(TypeError, match="compile_flags are a string or a list of strings, found int 3"):
        tilelang.compile(assuming(), compile_flags=3)
    for host in "abacus", "cuda":
        with pytest.raises(AssertionError, match=f"Target {host}"):
            tilelang.compile(assuming(), target="cpu", target_host=host)
    assert tilelang.compile(assuming(), target="cpu", execution_backend="tile", target_host="llvm").target_host == "llvm"
    kernel = tilelang.compile(assuming(), target="cpu", execution_backend="tile")
    with pytest.raises(ValueError, match="this Profiler has no kernel"):
        tilelang.Profiler(kernel.params, [], tilelang.TensorSupplyType.One).do_bench(input_tensors=[])
    with pytest.raises(ValueError, match="layout_visualization_formats takes all, or a comma list"):
        tilelang.compile(assuming(), target="cpu", pass_configs={"tl.layout_visualization_formats": "txt,gif"})
    with tilelang.tvm.transform.PassContext(config={"tl.enable_fast_math": True}) as scope:
        assert tilelang.tvm.transform.PassContext.current() is scope
    with pytest.raises(TypeError, match="device is an architecture"):
        tilelang.tools.Analyzer.analysis(packed(), "cuda")


def test_an_extent_was_said_to_be_what_the_argument_had():
    m, n = T.dynamic("m"), T.dynamic("n")

    @T.prim_func
    def main(k: T.int32, A: T.Tensor((m, n), "float32"), B: T.Tensor((m * 2 + n,), "float32"), C: T.Tensor((n,), "float32"),
             D):
        D: T.Tensor((k,), "float32")
        with T.Kernel(1, threads=32):
            for i in T.Parallel(n):
                C[i] = A[0, i] + B[i] + D[0]

    kernel = tilelang.compile(main, target="cpu")
    right = {"k": 5, "A": torch.zeros(2, 3), "B": torch.zeros(7), "C": torch.zeros(3), "D": torch.zeros(5)}
    kernel(*right.values())
    for name, wrong, text in (
            ("B", 6, "has shape (6,), the kernel takes ((m * 2) + n) in dimension 0, with m = 2 by `A` and n = 3 by `A` "),
            ("C", 4, "has shape (4,), the kernel takes n in dimension 0, which is 3 by `A` "),
            ("D", 4, "has shape (4,), the kernel takes k in dimension 0, which is 5, the argument `k` ")):
        with pytest.raises(RuntimeError, match=re.escape(f"`{name}` {text}")):
            kernel(*{**right, name: torch.zeros(wrong)}.values())
