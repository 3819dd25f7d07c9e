"""Results of GEMMs that branches store: packed in their registers, or by way of an array."""

import re
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

sys.path.insert(0, str(Path(__file__).parent))

import tilelang.language as T
from tilelang.codegen.cuda.printer import print_kernel
from tilelang.runtime import nvrtc
from tilelang.target import Target
from tilelang.transform.pipeline import lower
from transform.test_accumulator_registers import both_ways, marked, numbers

FAST = {"tl.enable_fast_math": True}


def after_branches(wide):
    """A product of a product whose result one block of two stores by TMA, the other in float32."""
    @T.prim_func
    def program(Q: T.Tensor((128, 64), "float16"), K: T.Tensor((128, 64), "float16"), O: T.Tensor((64, 64), "float16"),
                M: T.Tensor((64, wide), "float32")):
        with T.Kernel(2, threads=128) as block:
            Qs, Ks = T.alloc_shared((64, 64), "float16"), T.alloc_shared((64, 64), "float16")
            S, P = T.alloc_fragment((64, 64), "float32"), T.alloc_fragment((64, 64), "float16")
            acc = T.alloc_fragment((64, 64), "float32")
            T.copy(Q[block * 64, 0], Qs)
            T.clear(acc)
            for k in T.serial(2):
                T.copy(K[k * 64, 0], Ks)
                T.gemm(Qs, Ks, S, transpose_B=True, clear_accum=True)
                T.copy(S, P)
                T.gemm(P, Ks, acc)
            if block < 1:
                T.copy(acc, O)
            else:
                for i, j in T.Parallel(64, 64):
                    M[i, j] = acc[i, j]

    return program


@pytest.mark.parametrize("wide", [64, 72])
def test_branches_work_on_the_registers(monkeypatch, wide):
    q, k = numbers(128, 64) // 3, numbers(128, 64) // 3
    got, lowered = both_ways(after_branches(wide), q, k, np.zeros((64, 64), np.float16), np.zeros((64, wide), np.float32),
                            monkeypatch=monkeypatch, config=FAST)
    s = q.astype(np.float32) @ k.astype(np.float32).T
    p = s.astype(np.float16).astype(np.float32)
    assert np.array_equal(got[:, :64], (p @ k.astype(np.float32))[64:]) and not got[:, 64:].any()
    kinds, into, out = marked(lowered)
    assert "read" in kinds and (into, out) == (0, 1), "the float32 values alone leave their registers"
    text = print_kernel(lowered, fast_math=True)
    if nvrtc.available():
        cubin = nvrtc.compile_cubin(text, "sm_90a", ["--use_fast_math"])
        assert cubin.spills == 0 and "C75" not in cubin.log


def in_halves(n, form):
    """A product whose result is rounded to 16 bits in registers before it is stored."""
    @T.prim_func
    def program(A: T.Tensor((64, 64), "float16"), B: T.Tensor((2 * n, 64), "float16"), rows: T.Tensor((1,), "int32"),
                C: T.Tensor((64, n), "float16")):
        with T.Kernel(1, threads=128):
            a, b = T.alloc_shared((64, 64), "float16"), T.alloc_shared((n, 64), "float16")
            acc, packed = T.alloc_fragment((64, n), "float32"), T.alloc_fragment((64, n), "float16")
            T.copy(A, a)
            T.clear(acc)
            for k in T.Pipelined(2, num_stages=2):
                T.copy(B[k * n, 0], b)
                T.gemm(a, b, acc, transpose_B=True)
            if form == "copies":
                T.copy(acc, packed)
                T.copy(packed, C)
            elif form == "branch":
                if rows[0] > 3:
                    for i, j in T.Parallel(64, n):
                        packed[i, j] = acc[i, j]
                    T.copy(packed, C)
            else:
                for i, j in T.Parallel(64, n):
                    if i < rows[0]:
                        C[i, j] = acc[i, j]

    return program


@pytest.mark.parametrize("n", [24, 64])
@pytest.mark.parametrize("form", ["copies", "branch", "rows"])
def test_halves_of_a_result_were_read_from_an_array_that_nothing_wrote(form, n):
    """They were in named registers, which the stores do not know: only operands of wgmma are read from there."""
    (lowered,) = lower(in_halves(n, form).func, Target({"kind": "cuda", "arch": "sm_90a"}), {}).kernels
    text = print_kernel(lowered)
    name = "C_tile" if form == "rows" else "packed"
    assert f"tl::halves_{name}(&{name}[0]);" in text and f"tl_{name}_" not in text
    outputs = re.search(rf'halves_{name}\(void\* p\).*?asm volatile\(".*?" : (.*?)\);', text).group(1)
    assert outputs == ", ".join(f'"=r"(to[{k}])' for k in range(n // 4))
    if nvrtc.available():
        assert nvrtc.compile_cubin(text, "sm_90a").spills == 0
