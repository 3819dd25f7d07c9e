"""Products of float8, int8 and float32 by wgmma: meaning, rounding to tf32, what is declined, what ptxas says."""

import re

import numpy as np
import pytest
from hopper_lowered import lowered
from programs import gemm

import tilelang.language as T
from tilelang.codegen.cuda.printer import print_kernel
from tilelang.ir import For, Launch, dtype, numpy_dtype, stmts_of, walk
from tilelang.ir.expr import Call
from tilelang.ops import Copy
from tilelang.runtime import nvrtc
from tilelang.simulator import run_device
from tilelang.target import Target
from tilelang.ir.numbers import round_tf32
from tilelang.target.tensor_map import TensorMap, tensor_maps_of
from tilelang.transform.framework.pass_ import PassContext
from tilelang.transform.analysis.pipeline_loops import loop_items
from tilelang.transform.schedule.specialize_warps import specialize_warps
from tilelang.transform.analysis.copied_tiles import rounded_tiles, tf32_tiles

SM90 = Target({"kind": "cuda", "arch": "sm_90a"})
F8, F8B = "float8_e4m3fn", "float8_e5m2"
assembled = pytest.mark.skipif(not nvrtc.available(), reason="NVRTC is not installed")


def calls(program):
    return [x for x in walk(program.kernels[0].launch) if isinstance(x, Call)]


def names(program):
    return {x.op for x in calls(program)}


def run(program, a, b, c_shape, out):
    zero = np.zeros(c_shape, numpy_dtype(dtype(out)))
    n = c_shape[1]
    acc = np.zeros(n, np.int32 if out == "int32" else np.float32)
    return run_device(program, {"A": a, "B": b, "bias": acc, "C": zero}).outputs["C"].astype(np.float64)


def mixed(m, n, k, a_type, b_type, bm=64, bn=64, bk=64, stages=3, threads=128):
    @T.prim_func
    def main(A: T.Tensor((m, k), a_type), B: T.Tensor((n, k), b_type), bias: T.Tensor((n,), "float32"),
             C: T.Tensor((m, n), "float32")):
        with T.Kernel(T.ceildiv(n, bn), T.ceildiv(m, bm), threads=threads) as (bx, by):
            As = T.alloc_shared((bm, bk), a_type)
            Bs = T.alloc_shared((bn, bk), b_type)
            Cf = T.alloc_fragment((bm, bn), "float32")
            T.clear(Cf)
            for ko in T.Pipelined(T.ceildiv(k, bk), num_stages=stages):
                T.copy(A[by * bm, ko * bk], As)
                T.copy(B[bx * bn, ko * bk], Bs)
                T.gemm(As, Bs, Cf, transpose_B=True)
            T.copy(Cf, C[by * bm, bx * bn])

    return main


# ---- meaning --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("roles", [True, False])
@pytest.mark.parametrize("b_type", [F8, F8B])
@pytest.mark.parametrize("a_type", [F8, F8B])
def test_float8_of_both_formats(a_type, b_type, roles):
    rng = np.random.default_rng(0)
    m, n, k = 70, 72, 208
    a = rng.integers(-4, 5, (m, k)).astype(numpy_dtype(dtype(a_type)))
    b = rng.integers(-4, 5, (n, k)).astype(numpy_dtype(dtype(b_type)))
    program = lowered(mixed(m, n, k, a_type, b_type), **({} if roles else {"disable_warp_specialized": True}))
    assert {"wgmma"} <= names(program) and ("tma_load" in names(program)) == roles
    got = run(program, a, b, (m, n), "float32")
    assert np.array_equal(got, a.astype(np.float64) @ b.astype(np.float64).T)


@pytest.mark.parametrize("a_type", ["int8", "uint8"])
def test_bytes_are_summed_exactly(a_type):
    rng = np.random.default_rng(1)
    info = np.iinfo(a_type)
    m, n, k = 66, 80, 160
    a, b = (rng.integers(info.min, info.max + 1, s).astype(a_type) for s in ((m, k), (n, k)))
    program = lowered(gemm(m, n, k, 64, 64, 64, tb=True, stages=3, dtype=a_type, acc="int32", out="int32"))
    assert {"wgmma", "tma_load"} <= names(program)
    assert np.array_equal(run(program, a, b, (m, n), "int32"), a.astype(np.float64) @ b.astype(np.float64).T)


@pytest.mark.parametrize("element", ["float32", "tfloat32"])
def test_tma_rounds_float32_tiles_to_tf32(element):
    rng = np.random.default_rng(2)
    m, n, k = 70, 72, 100
    a, b = rng.standard_normal((m, k)).astype(np.float32), rng.standard_normal((n, k)).astype(np.float32)
    program = lowered(gemm(m, n, k, 64, 64, 32, tb=True, stages=3, dtype=element, out="float32"))
    assert {"wgmma", "tma_load"} <= names(program)
    assert {x.buffer.name: x.tf32 for x in tensor_maps_of(program.kernels[0].launch)} == {"A": True, "B": True, "C": False}
    got = run(program, a, b, (m, n), "float32")
    want = round_tf32(a).astype(np.float64) @ round_tf32(b).astype(np.float64).T
    assert np.abs(got - want).max() < 4 * 2.0**-24 * k**0.5 * (np.abs(a) @ np.abs(b).T).max()


def attend32(n=64, d=32, blocks=3):
    """Two products in float32: the second takes its first operand from registers."""
    @T.prim_func
    def main(Q: T.Tensor((64, d), "float32"), K: T.Tensor((blocks * n, d), "float32"),
             V: T.Tensor((d, blocks * n), "float32"), O: T.Tensor((64, d), "float32")):
        with T.Kernel(1, threads=128) as _:
            Qs, Ks = T.alloc_shared((64, d), "float32"), T.alloc_shared((n, d), "float32")
            Vs = T.alloc_shared((d, n), "float32")
            S, Of = T.alloc_fragment((64, n), "float32"), T.alloc_fragment((64, d), "float32")
            T.clear(Of)
            for k in T.Pipelined(blocks, num_stages=2):
                T.copy(Q, Qs)
                T.copy(K[k * n, 0], Ks)
                T.copy(V[0, k * n], Vs)
                T.gemm(Qs, Ks, S, transpose_B=True, clear_accum=True)
                T.gemm(S, Vs, Of, transpose_B=True)
            T.copy(Of, O)

    return main


def test_float32_fragments_are_rounded_when_they_become_operands():
    rng = np.random.default_rng(3)
    q, k, v = (rng.standard_normal(s).astype(np.float32) for s in ((64, 32), (192, 32), (32, 192)))
    program = lowered(attend32())
    assert "wgmma" in names(program) and "to_tf32" in names(program)
    got = run_device(program, {"Q": q, "K": k, "V": v, "O": np.zeros((64, 32), np.float32)}).outputs["O"]
    s = round_tf32((round_tf32(q).astype(np.float64) @ round_tf32(k).astype(np.float64).T).astype(np.float32))
    want = s.astype(np.float64) @ round_tf32(v).astype(np.float64).T
    assert np.abs(got - want).max() < 2.0**-11 * np.abs(s).max()  # one value of S may round the other way


# ---- what is declined -----------------------------------------------------------------------------------------------


def test_float32_tiles_that_are_read_otherwise_too_keep_their_bits():
    @T.prim_func
    def main(A: T.Tensor((64, 128), "float32"), B: T.Tensor((64, 128), "float32"), C: T.Tensor((64, 64), "float32"),
             R: T.Tensor((64,), "float32")):
        with T.Kernel(1, threads=128) as _:
            As, Bs = T.alloc_shared((64, 32), "float32"), T.alloc_shared((64, 32), "float32")
            Cf, s = T.alloc_fragment((64, 64), "float32"), T.alloc_fragment((64,), "float32")
            T.clear(Cf)
            T.clear(s)
            for k in T.Pipelined(4, num_stages=2):
                T.copy(A[0, k * 32], As)
                T.copy(B[0, k * 32], Bs)
                T.gemm(As, Bs, Cf, transpose_B=True)
                T.reduce_sum(As, s, dim=1, clear=False)
            T.copy(Cf, C)
            T.copy(s, R)

    program = lowered(main)
    assert "mma" in names(program) and "wgmma" not in names(program)
    assert not any(x.tf32 for x in tensor_maps_of(program.kernels[0].launch))
    a = np.full((64, 128), 1 + 2.0**-20, np.float32)
    got = run_device(program, {"A": a, "B": a, "C": np.zeros((64, 64), np.float32), "R": np.zeros(64, np.float32)})
    assert np.abs(got.outputs["R"] - 128 * (1 + 2.0**-20)).max() < 2e-5
    assert "cut to tf32" in " ".join(program.kernels[0].launch.plan.report)


@pytest.mark.parametrize("dt, acc", [(F8, "float32"), ("int8", "int32"), ("float32", "float32")])
@pytest.mark.parametrize("ta, tb", [(False, False), (True, True)])
def test_operands_with_k_outermost_go_by_wgmma(dt, acc, ta, tb):
    program = lowered(gemm(128, 128, 128, 64, 64, 64, ta=ta, tb=tb, dtype=dt, acc=acc, out=acc))
    assert "wgmma" in names(program) and "mma" not in names(program)
    rng = np.random.default_rng(4)
    a, b = (rng.integers(-4, 5, (128, 128)).astype(numpy_dtype(dtype(dt))) for _ in range(2))
    want = (a.T if ta else a).astype(np.float64) @ (b.T if tb else b).astype(np.float64)
    assert np.array_equal(run(program, a, b, (128, 128), acc), want)


def test_which_tiles_may_be_rounded():
    func = gemm(128, 128, 128, 64, 64, 32, tb=True, dtype="float32", out="float32").func
    new = specialize_warps(func, PassContext(SM90, {"tl.enable_hopper": True}))
    launch = next(x for x in walk(new.body) if isinstance(x, Launch))
    copies = [x for x in walk(launch) if isinstance(x, Copy)]
    assert [x.plan.tf32 for x in copies] == [True, True, False]
    assert {v.name for v in rounded_tiles(copies)} == {"As", "Bs"}
    old = next(x for x in walk(func.body) if isinstance(x, Launch))
    loop = next(x for x in stmts_of(old.body) if isinstance(x, For))
    assert {v.name for v in tf32_tiles(old, loop, loop_items(stmts_of(loop.body)).items)} == {"As", "Bs"}


def test_a_tf32_map_is_of_float32_alone():
    func = gemm(dtype="float16").func
    buffer = func.buffers[0][1]
    assert TensorMap("m", buffer, (64, 64), 128).codes[0] == 6
    with pytest.raises(ValueError, match="not rounded to tf32"):
        TensorMap("m", buffer, (64, 64), 128, tf32=True).check()
    f32 = gemm(dtype="float32", k=128).func.buffers[0][1]
    assert TensorMap("m", f32, (32, 64), 128, tf32=True).check().codes[0] == 11
    assert TensorMap("m", f32, (32, 64), 128).entry + (True,) == TensorMap("m", f32, (32, 64), 128, tf32=True).entry


# ---- machine code ---------------------------------------------------------------------------------------------------


@assembled
@pytest.mark.parametrize("dt, acc, out, bk", [(F8, "float32", "bfloat16", 128), ("int8", "int32", "int32", 128),
                                              ("float32", "float32", "float32", 32)])
def test_compiles_without_spills_or_serialised_products(dt, acc, out, bk):
    program = lowered(gemm(1024, 1024, 1024, 128, 256, bk, tb=True, stages=4, dtype=dt, acc=acc, out=out, threads=256))
    assert {"wgmma", "tma_load"} <= names(program)
    cubin = nvrtc.compile_cubin(print_kernel(program.kernels[0]), "sm_90a")
    assert not re.findall(r"C75\d\d", cubin.log) and not cubin.spills, cubin.log
    assert {x.options.row.split(".")[1] for x in calls(program) if x.op == "wgmma"} == {
        f"m64n256k{32 // dtype(dt).bytes}"}
