"""Copies out of accumulators go by stmatrix where the layouts are made for it; others do not."""

import numpy as np
import pytest
from programs import NP

import tilelang.language as T
from tilelang.ir import Call, walk
from tilelang.simulator.device.run import run_device
from tilelang.layout import make_swizzled_layout
from tilelang.target import Target
from tilelang.target.wgmma import accumulator_fragment
from tilelang.transform.pipeline import lower


def product(out, threads, n=64, turned=False):
    @T.prim_func
    def main(A: T.Tensor((64, 64), "float16"), B: T.Tensor((64, n), "float16"),
             C: T.Tensor((n, 64) if turned else (64, n), out)):
        with T.Kernel(1, threads=threads):
            As, Bs = T.alloc_shared((64, 64), "float16"), T.alloc_shared((64, n), "float16")
            Cs = T.alloc_shared((n, 64) if turned else (64, n), out)
            acc = T.alloc_fragment((64, n), "float32")
            T.copy(A, As)
            T.copy(B, Bs)
            T.clear(acc)
            T.gemm(As, Bs, acc)
            if turned:
                flip = T.alloc_fragment((n, 64), "float32")
                T.transpose(acc, flip)
                T.copy(flip, Cs)
            else:
                T.copy(acc, Cs)
            T.copy(Cs, C)

    return main.func


def stores(program):
    return [x for k in program.kernels for x in walk(k.launch) if isinstance(x, Call) and x.op == "stmatrix"]


@pytest.mark.parametrize("out", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("threads, n", [(128, 64), (32, 64), (64, 24), (128, 96)])
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_90a"])
def test_accumulators_are_stored_as_matrices(out, threads, n, arch):
    program = lower(product(out, threads, n), Target({"kind": "cuda", "arch": arch}),
                    {"tl.enable_hopper": True} if arch == "sm_90a" else {})
    assert bool(stores(program)) == (out != "float32" and arch != "sm_80")
    rng = np.random.default_rng(0)
    a, b = rng.integers(-4, 5, (64, 64)).astype(np.float16), rng.integers(-2, 3, (64, n)).astype(np.float16)
    report = run_device(program, {"A": a, "B": b, "C": np.zeros((64, n), NP[out])})
    want = (a.astype(np.float64) @ b.astype(np.float64)).astype(NP[out])
    assert np.array_equal(report.outputs["C"], want)
    if stores(program) and n == 64:
        assert all(c.wavefronts == c.ideal for c in report.bank_conflicts if c.site.text.startswith("stmatrix"))


def test_turned_tiles():
    program = lower(product("float16", 128, turned=True), Target({"kind": "cuda", "arch": "sm_90"}))
    rng = np.random.default_rng(1)
    a, b = (rng.integers(-4, 5, (64, 64)).astype(np.float16) for _ in "ab")
    got = run_device(program, {"A": a, "B": b, "C": np.zeros((64, 64), np.float16)}).outputs["C"]
    assert np.array_equal(got, (a.astype(np.float64) @ b.astype(np.float64)).T.astype(np.float16))


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_transposed_fragments_are_stored_by_trans(dtype):
    @T.prim_func
    def main(A: T.Tensor((64, 64), dtype), C: T.Tensor((64, 64), "float16")):
        with T.Kernel(1, threads=128):
            F, S = T.alloc_fragment((64, 64), dtype), T.alloc_shared((64, 64), "float16")
            T.annotate_layout({F: accumulator_fragment(64).permuted((1, 0)), S: make_swizzled_layout(S)})
            T.copy(A, F)
            T.copy(F, S)
            T.copy(S, C)

    program = lower(main.func, Target({"kind": "cuda", "arch": "sm_90"}))
    assert [c.options.trans for c in stores(program)] == [True]
    a = np.arange(4096).reshape(64, 64).astype(NP[dtype])
    got = run_device(program, {"A": a, "C": np.zeros((64, 64), np.float16)}).outputs["C"]
    assert np.array_equal(got, a.astype(np.float16))
