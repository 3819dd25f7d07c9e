"""Waits for GEMMs that ptxas would move in front of the arithmetic that the GEMMs run under."""

import re

import numpy as np
import pytest

import tilelang.language as T
from tilelang.codegen.cuda.printer import print_kernel
from tilelang.simulator import run_device, run_tile
from tilelang.target import Target
from tilelang.transform.pipeline import lower

SM90, SM80 = (Target({"kind": "cuda", "arch": a}) for a in ("sm_90a", "sm_80"))
SEQ, DIM, ROWS, KEYS = 256, 128, 128, 64


def attention(score, values):
    """Without a softmax for a score function; else a softmax with one or two outputs, the second of U."""
    shape = (SEQ, DIM)

    @T.prim_func
    def attend(Q: T.Tensor(shape, "float16"), K: T.Tensor(shape, "float16"), V: T.Tensor(shape, "float16"),
               U: T.Tensor(shape, "float16"), O: T.Tensor(shape, "float32"), W: T.Tensor(shape, "float32")):
        with T.Kernel(SEQ // ROWS, threads=2 * ROWS) as bx:
            q, k, v, u = [T.alloc_shared((n, DIM), "float16") for n in (ROWS, KEYS, KEYS, KEYS)]
            s, p = T.alloc_fragment((ROWS, KEYS), "float32"), T.alloc_fragment((ROWS, KEYS), "float16")
            o, w = T.alloc_fragment((ROWS, DIM), "float32"), T.alloc_fragment((ROWS, DIM), "float32")
            top, before, rescale, total, row = [T.alloc_fragment((ROWS,), "float32") for _ in range(5)]
            T.copy(Q[bx * ROWS, 0], q)
            T.clear(o)
            T.clear(w)
            T.clear(total)
            T.fill(top, -1e4)
            for step in T.Pipelined(SEQ // KEYS, num_stages=2):
                T.copy(K[step * KEYS, 0], k)
                T.gemm(q, k, s, transpose_B=True, clear_accum=True)
                if score is not None:
                    for i, j in T.Parallel(ROWS, KEYS):
                        s[i, j] = score(s[i, j])
                    T.copy(s, p)
                else:
                    T.copy(top, before)
                    T.reduce_max(s, top, dim=1, clear=False)
                    for i in T.Parallel(ROWS):
                        rescale[i] = T.exp2(before[i] * 0.125 - top[i] * 0.125)
                    for i, j in T.Parallel(ROWS, KEYS):
                        s[i, j] = T.exp2(s[i, j] * 0.125 - top[i] * 0.125)
                    T.reduce_sum(s, row, dim=1)
                    for i in T.Parallel(ROWS):
                        total[i] = total[i] * rescale[i] + row[i]
                    T.copy(s, p)
                    for i, j in T.Parallel(ROWS, DIM):
                        o[i, j] *= rescale[i]
                    if values == 2:
                        for i, j in T.Parallel(ROWS, DIM):
                            w[i, j] *= rescale[i]
                T.copy(V[step * KEYS, 0], v)
                T.gemm(p, v, o)
                if values == 2:
                    T.copy(U[step * KEYS, 0], u)
                    T.gemm(p, u, w)
            T.copy(o, O[bx * ROWS, 0])
            if values == 2:
                T.copy(w, W[bx * ROWS, 0])

    return attend


def loop_of(kernel):
    text = print_kernel(kernel)
    return text[text.index("for (int step = 1;"):]


def compared(program):
    rng = np.random.default_rng(0)
    args = {n: (rng.standard_normal((SEQ, DIM)) / 4).astype("f2") for n in "QKVU"}
    args |= {n: np.zeros((SEQ, DIM), "f4") for n in "OW"}
    want = run_tile(program, args)
    for target in (SM90, SM80):
        got = run_device(lower(program.func, target), args).outputs
        assert all(np.allclose(got[n], want[n], rtol=2e-3, atol=2e-3) for n in "OW" if n in got)


@pytest.mark.parametrize("score", [lambda x: T.sigmoid(x - 2.0), lambda x: x * T.tanh(x), lambda x: T.exp(x) - 1.0],
                         ids=["sigmoid", "tanh", "exp"])
def test_the_wait_for_a_gemm_ran_ahead_of_a_loop_without_a_reduction(score):
    program = attention(score, 1)
    loop = loop_of(lower(program.func, SM90).kernels[0])
    ahead = loop[loop.index("wgmma_wait<1>"):loop.index("wgmma_wait<0>")]  # scores lie in an array, or in named registers
    assert re.search(r"s\[[^\n]*\] = .*?wgmma_hold<\d+>\(&s\[0\]\);\s*tl::$|tl::map_s\(.*tl::$", ahead, re.S)
    compared(program)


def test_the_first_of_two_accumulators_was_scaled_behind_the_exponentials():
    program = attention(None, 2)
    loop = loop_of(lower(program.func, SM90).kernels[0])
    found = re.findall(r"tl::(map_s|wgmma_wait<\d>|scale_[ow])", loop[loop.index("tl::map_s"):])
    assert found[:7] == ["map_s", "wgmma_wait<1>", "scale_o", "map_s", "map_s", "wgmma_wait<0>", "scale_w"]
    compared(program)
