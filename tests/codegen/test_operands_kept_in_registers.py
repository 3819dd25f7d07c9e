"""Operands of wgmma in registers that a loop does not change keep these registers: ptxas 13.0 gave those of attention's queries
to gradients of scores (tests/library/test_flash_attention_backward.py has the disassembly)."""

from __future__ import annotations

import re

import pytest

import tilelang
import tilelang.language as T


def program(loaded: str):
    """Squares of scores times keys. loaded: where queries are loaded into registers: in front of the loop, in its first
    iteration, or in each."""
    @T.prim_func
    def squares(Q: T.Tensor((4096, 64), "float16"), K: T.Tensor((4096, 64), "float16"), O: T.Tensor((4096, 64), "float16")):
        with T.Kernel(64, threads=128) as bx:
            Qs, Ks = T.alloc_shared((64, 64), "float16"), T.alloc_shared((64, 64), "float16")
            q, p = T.alloc_fragment((64, 64), "float16"), T.alloc_fragment((64, 64), "float16")
            s, o = T.alloc_fragment((64, 64), "float32"), T.alloc_fragment((64, 64), "float32")
            T.copy(Q[bx * 64, 0], Qs)
            if loaded == "before":
                T.copy(Qs, q)
            T.clear(o)
            for k in T.Pipelined(64, num_stages=2):
                T.copy(K[k * 64, 0], Ks)
                if loaded == "each":
                    T.copy(Qs, q)
                if loaded == "first":
                    if k == 0:
                        T.copy(Qs, q)
                T.gemm(q, Ks, s, transpose_B=True, clear_accum=True)
                for i, j in T.Parallel(64, 64):
                    p[i, j] = s[i, j] * s[i, j]
                T.gemm(p, Ks, o)
            T.copy(o, O[bx * 64, 0])

    return squares


@pytest.mark.parametrize("loaded", ("before", "first", "each"))
def test_an_operand_that_an_iteration_may_not_write_is_used_at_its_end(loaded):
    text = tilelang.compile(program(loaded), target={"kind": "cuda", "arch": "sm_90a"}).get_kernel_source()
    calls = re.findall(r"^ *(?:tl::wgmma_keep<\d+>\(|tl::keep_)", text, re.M)
    assert len(calls) == (loaded != "each")


def gradients(loaded: str):
    """An operand made of two products. loaded: where queries are loaded anew: in a loop that may run no time, or behind
    `continue`."""
    @T.prim_func
    def changed(Q: T.Tensor((128, 64), "bfloat16"), K: T.Tensor((384, 64), "bfloat16"), N: T.Tensor((2,), "int32"),
                O: T.Tensor((128, 64), "float32")):
        with T.Kernel(1, threads=256):
            Qs, Ks, Vs = (T.alloc_shared((n, 64), "bfloat16") for n in (128, 64, 64))
            q, g = T.alloc_fragment((128, 64), "bfloat16"), T.alloc_fragment((128, 64), "bfloat16")
            x, y = T.alloc_fragment((128, 64), "float32"), T.alloc_fragment((128, 64), "float32")
            p, dq = T.alloc_fragment((128, 64), "bfloat16"), T.alloc_fragment((128, 64), "float32")
            T.copy(Q, Qs)
            T.clear(dq)
            T.copy(Qs, q)
            T.copy(Qs, g)
            for k in T.Pipelined(3, num_stages=1):
                T.copy(K[k * 64, 0], Ks)
                T.copy(K[k * 64 + 64, 0], Vs)
                if loaded == "none":
                    for _ in T.serial(N[1]):
                        T.copy(Qs, q)
                T.gemm(q, Ks, x, transpose_B=True, clear_accum=True)
                T.gemm(g, Vs, y, transpose_B=True, clear_accum=True)
                for i, j in T.Parallel(128, 64):
                    p[i, j] = x[i, j] * y[i, j]
                T.gemm(p, Ks, dq)
                if loaded == "behind":
                    if N[0] != k:
                        continue
                    T.copy(Qs, q)
            T.copy(dq, O)
    return changed


@pytest.mark.parametrize("loaded,kept", (("none", ["g", "q"]), ("behind", ["g", "q", "continue", "g"])))
def test_an_operand_written_behind_a_continue_or_in_a_loop_without_iterations_lost_its_registers(loaded, kept):
    text = tilelang.compile(gradients(loaded), target={"kind": "cuda", "arch": "sm_90a"}).get_kernel_source()
    found = [a or b for a, b in re.findall(r"^ *(?:tl::wgmma_keep<16>\(&(\w)\[0\]\)|(continue));", text, re.M)]
    at = found.index("continue") if "continue" in found else len(found)
    assert [*sorted(found[:at]), *found[at:]] == kept
