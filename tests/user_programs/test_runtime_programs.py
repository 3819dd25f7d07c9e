"""Calls, outputs, tuning, settings, unavailable_names at the call: written from the specification alone."""

import ctypes
import os
import re
import sys
import tempfile

import numpy as np
import pytest
import torch
from spec_harness import close, on

import tilelang
import tilelang.language as T

EVERY = on("tile", "simulator", "cpu")  # what the host does is the same for every device


def refuse(call, error, text=""):
    """Raised with this text."""
    with pytest.raises(error, match=re.escape(text) if text else None):
        call()


@tilelang.jit
def mm(A, B, BM: int = 32):
    M, N, K = T.const("M N K")
    A: T.Tensor((M, K), "float16")
    B: T.Tensor((K, N), "float16")
    C = T.empty((M, N), "float32")
    with T.Kernel(T.ceildiv(N, 32), T.ceildiv(M, BM), threads=64) as (bx, by):
        As = T.alloc_shared((BM, 32), "float16")
        Bs = T.alloc_shared((32, 32), "float16")
        Cf = T.alloc_fragment((BM, 32), "float32")
        T.clear(Cf)
        for k in T.Pipelined(T.ceildiv(K, 32), num_stages=2):
            T.copy(A[by * BM, k * 32], As)
            T.copy(B[k * 32, bx * 32], Bs)
            T.gemm(As, Bs, Cf)
        T.copy(Cf, C[by * BM, bx * 32])
    return C


@EVERY
def test_call_errors(case):
    a, b = case.randn(40, 50).half(), case.randn(50, 60).half()
    k = mm.compile(a, b)
    close(k(a, b), a.float() @ b.float(), 1e-2, 1e-2)
    refuse(lambda: k(a), ValueError, "expected 2 inputs, but 1 are provided")
    refuse(lambda: k(a.float(), b), RuntimeError, "input A dtype mismatch, expected float16")
    refuse(lambda: k(a[:, :49], b), (RuntimeError, ValueError), "A")
    refuse(lambda: k(a, b[:49].contiguous()), RuntimeError, "input B shape[0] violates")
    refuse(lambda: k(a[0], b), RuntimeError, "ndim mismatch, expected 2")
    refuse(lambda: k(a.t().contiguous().t(), b), RuntimeError, "A")
    refuse(lambda: k(None, b), RuntimeError, "non-NULL")
    refuse(lambda: k(3, b), (RuntimeError, TypeError), "A")
    refuse(lambda: k(A=a, b=b), TypeError, "")
    refuse(lambda: mm(a), ValueError, "input")
    refuse(lambda: mm(a, case.randn(49, 60).half()), (ValueError, RuntimeError), "input B shape[0]")
    refuse(lambda: mm.compile(), ValueError, "Cannot find value for constexpr variable")
    k2 = mm.compile(M=40, N=60, K=50)
    assert torch.equal(k2(a, b), k(a, b))
    k3 = mm.compile(T.Tensor((40, 50), "float16"), T.Tensor((50, 60), "float16"))
    assert k3 is k2 or torch.equal(k3(a, b), k2(a, b))
    refuse(lambda: tilelang.compile(3), AssertionError, "target function must be a PrimFunc")


def pf(M, N):
    @T.prim_func
    def add1(A: T.Tensor((M, N), "float32"), n: T.int32, s: T.float32, B: T.Tensor((M, N), "float32")):
        with T.Kernel(M, threads=32) as bx:
            for j in T.Parallel(N):
                B[bx, j] = A[bx, j] * s + n

    return add1


@EVERY
def test_out_idx_rules(case):
    f = pf(4, 8)
    a = case.randn(4, 8)
    close(tilelang.compile(f, out_idx=[-1])(a, 3, 0.5), a * 0.5 + 3)
    close(tilelang.compile(f, out_idx=3)(a, True, 2), a * 2 + 1)
    assert tilelang.compile(f)(a, 3, 0.5, torch.empty(4, 8)) in (None, [])
    refuse(lambda: tilelang.compile(f, out_idx=4), ValueError, "out")
    refuse(lambda: tilelang.compile(f, out_idx=(3,)), (ValueError, TypeError), "")
    refuse(lambda: tilelang.compile(f, out_idx=[3, -1]), Exception, "")
    refuse(lambda: tilelang.compile(f, out_idx=[1]), Exception, "")
    k = tilelang.compile(f, out_idx=[-1])
    refuse(lambda: k(a, 1.5, 0.5), (TypeError, RuntimeError), "integer")
    refuse(lambda: k(a, 2**31, 0.5), Exception, "n")
    r = k(a, torch.tensor(4), np.float32(0.25)) if True else None
    close(r, a * 0.25 + 4)
    refuse(lambda: k(a, "x", 0.5), Exception, "n")
    refuse(lambda: f(a, 1, 1.0), TypeError, "")
    assert f.attrs["global_symbol"] == "add1" and len(f.params) == 4 and "T.prim_func" in f.script()


@on("cpu")
def test_kernel_methods(case):
    k = mm.compile(M=64, N=64, K=64)
    src = k.get_kernel_source()
    assert isinstance(src, str) and len(src) > 100
    full = k.get_kernel_source(kernel_only=False)
    assert len(full) >= len(src)
    k.get_host_source()
    assert k.out_idx == [2] or k.out_idx == [-1], k.out_idx
    assert [p.dtype for p in k.params][:2] == ["float16", "float16"], [p.dtype for p in k.params]
    assert list(k.params[0].shape) == [64, 64] and not k.params[0].is_scalar() and k.params[0].torch_dtype() == torch.float16
    refuse(lambda: k.export_sources(), ValueError, "")

    d = tempfile.mkdtemp()
    k.export_sources(kernel_path=d + "/k.cu", host_path=d + "/h.cc")
    assert os.path.getsize(d + "/k.cu") > 50
    refuse(lambda: k.get_tuner_result(), ValueError, "")
    assert k.artifact.kernel_source and k.prim_func.attrs["global_symbol"] == "mm" and k.execution_backend


@on("cpu")
def test_profiler_use(case):
    k = mm.compile(M=64, N=64, K=64)
    p = k.get_profiler(tensor_supply_type=tilelang.TensorSupplyType.Normal)
    p.assert_allclose(lambda a, b: a.float() @ b.float(), atol=1e-2, rtol=1e-2)
    ms = p.do_bench(warmup=1, rep=2)
    assert isinstance(ms, float) and ms > 0
    q = p.do_bench(n_warmup=1, n_repeat=3, quantiles=[0.5, 0.9])
    assert len(q) == 2
    p.assert_consistent(repeat=2)
    ins = p._get_inputs()
    assert len(ins) == 2 and ins[0].shape == (64, 64)
    try:
        p.assert_allclose(lambda a, b: a.float() @ b.float() + 1, atol=1e-2, rtol=1e-2)
    except AssertionError:
        pass
    else:
        raise Exception("mismatch accepted")
    from tilelang.profiler import do_bench

    assert do_bench(lambda: k(*ins), warmup=1, rep=1) > 0


@on("cpu")
def test_autotune_flow(case):

    def cfgs(*a, **kw):
        return [dict(blk=64, th=32), dict(blk=128, th=64), dict(blk=7, th=33)]

    @tilelang.autotune(configs=cfgs, warmup=1, rep=2, ref_prog=lambda A: A * 2)
    @tilelang.jit(out_idx=[-1])
    def dbl(N, blk=32, th=32):
        @T.prim_func
        def main(A: T.Tensor((N,), "float32"), B: T.Tensor((N,), "float32")):
            with T.Kernel(T.ceildiv(N, blk), threads=th) as bx:
                for i in T.Parallel(blk):
                    B[bx * blk + i] = A[bx * blk + i] * 2

        return main

    k = dbl(500)
    a = case.randn(500)
    close(k(a), a * 2)
    assert k.config in [dict(blk=64, th=32), dict(blk=128, th=64), dict(blk=7, th=33)] and k.latency > 0, (k.config, k.latency)
    assert dbl(500) is k
    k2 = dbl(500, blk=16)
    close(k2(a), a * 2)
    refuse(lambda: tilelang.autotune(lambda: 0), TypeError, "")

    @tilelang.autotune(configs=[dict(zz=1)])
    @tilelang.jit(out_idx=[-1])
    def bad(N, blk=32):
        return pf(N, N)

    refuse(lambda: bad(8), ValueError, "Unused keys in config")

    @tilelang.autotune(configs=[dict(blk=32), dict(blk=64)], warmup=1, rep=1)
    @tilelang.jit
    def eager(A, blk: int = 8):
        N = T.const("N")
        A: T.Tensor((N,), "float32")
        B = T.empty((N,), "float32")
        with T.Kernel(T.ceildiv(N, blk), threads=32) as bx:
            for i in T.Parallel(blk):
                B[bx * blk + i] = A[bx * blk + i] + 1
        return B

    from tilelang.autotuner import set_autotune_inputs

    with set_autotune_inputs(a):
        close(eager(a), a + 1)
    from tilelang.autotuner import AutoTuner

    def plain(blk=32):
        N = 500

        @T.prim_func
        def main(A: T.Tensor((N,), "float32"), B: T.Tensor((N,), "float32")):
            with T.Kernel(T.ceildiv(N, blk), threads=32) as bx:
                for i in T.Parallel(blk):
                    B[bx * blk + i] = A[bx * blk + i] * 3

        return main

    r = (
        AutoTuner.from_kernel(plain, configs=[dict(blk=32), dict(blk=64)])
        .set_compile_args(out_idx=[-1])
        .set_profile_args(warmup=1, rep=1, ref_prog=lambda A: A * 3)
        .run(warmup=1, rep=2)
    )
    assert r.config in (dict(blk=32), dict(blk=64)) and r.latency > 0
    close(r.kernel(a), a * 3)


@on("cpu")
def test_par_compile_use(case):
    fs = [pf(4, 8), pf(5, 8), pf(6, 16)]
    ks = tilelang.par_compile(fs, out_idx=[-1], num_workers=2)
    assert len(ks) == 3
    for k, m, n in zip(ks, (4, 5, 6), (8, 8, 16)):
        a = case.randn(m, n)
        close(k(a, 1, 1.0), a + 1)
    ks = mm.par_compile([dict(M=32, N=32, K=32), dict(M=64, N=32, K=32, BM=16)])
    assert len(ks) == 2
    refuse(lambda: mm.par_compile([3]), ValueError, "")


@on("cpu")
def test_pass_context_lower(case):
    from tilelang import tvm

    with (
        tvm.transform.PassContext(config={tilelang.PassConfigKey.TL_DISABLE_WARP_SPECIALIZED: True, "tl.disable_wgmma": True}),
        tvm.target.Target({"kind": "cuda", "arch": "sm_90"}),
    ):
        art = tilelang.lower(mm.get_tir(M=128, N=128, K=64))
    assert "wgmma" not in art.kernel_source and "__global__" in art.kernel_source
    art = tilelang.lower(mm.get_tir(M=128, N=128, K=64), target={"kind": "cuda", "arch": "sm_80"})
    assert len(art.params) == 3
    refuse(lambda: tilelang.compile(pf(4, 4), pass_configs={"tl.foo": 1}), AttributeError, "Invalid config option 'tl.foo'")
    refuse(lambda: tilelang.compile(pf(4, 4), target="foo"), AssertionError, "Target foo is not supported")
    refuse(lambda: tilelang.compile(pf(4, 4), execution_backend="foo"), ValueError, "Invalid execution backend 'foo'")
    tilelang.compile(
        pf(4, 4),
        out_idx=-1,
        pass_configs={
            "tl.disable_safe_memory_legalize": True,
            tilelang.PassConfigKey.TL_ENABLE_FAST_MATH: True,
            "tl.config_index_bitwidth": 64,
        },
    )


@EVERY
def test_host_asserts(case):

    @tilelang.jit
    def f(A, n: T.int32 = 2):
        m = T.dynamic("m")
        A: T.Tensor((m, 8), "float32")
        B = T.empty((m * 2 + 1, 8), "float32")
        T.assume(m % 4 == 0)
        assert n > 0, "n must be positive"
        with T.Kernel(T.ceildiv(m, 4), threads=32) as bx:
            for i, j in T.Parallel(4, 8):
                B[(bx * 4 + i) * 2, j] = A[bx * 4 + i, j] * n
                B[(bx * 4 + i) * 2 + 1, j] = -A[bx * 4 + i, j]
            if bx == 0:
                for j in T.Parallel(8):
                    B[m * 2, j] = 7.0
        return B

    a = case.randn(8, 8)
    r = torch.stack([a * 2, -a], 1).reshape(16, 8)
    r = torch.cat([r, torch.full((1, 8), 7.0)])
    close(f(a), r)
    close(f(a, 3)[::2][:8], a * 3)
    refuse(lambda: f(case.randn(6, 8)), RuntimeError, "Assume")
    refuse(lambda: f(a, -1), RuntimeError, "n must be positive")


@EVERY
def test_solve_shapes(case):
    m, n = T.dynamic("m n")

    @T.prim_func
    def main(A: T.Tensor((m,), "int32"), B: T.Tensor((m + n,), "int32"), C: T.Tensor((2 * n, 3), "int32")):
        with T.Kernel(1, threads=32) as _:
            for i in T.Parallel(32):
                if i < n:
                    C[2 * i, 0] = B[m + i]
            for i in T.Parallel(32):
                if i < n:
                    C[2 * i + 1, 2] = A[0] * n

    k = tilelang.compile(main)
    a, b, o = torch.arange(4).int() + 3, torch.arange(9).int(), torch.zeros(10, 3).int()
    k(a, b, o)
    r = torch.zeros(10, 3).int()
    r[::2, 0] = b[4:]
    r[1::2, 2] = 3 * 5
    close(o, r)
    refuse(lambda: k(a, b, torch.zeros(9, 3).int()), RuntimeError, "C")
    refuse(lambda: k(a, torch.arange(3).int(), torch.zeros(2, 3).int()), Exception, "")
    q = T.dynamic("q")

    def unbound():
        @T.prim_func
        def bad(A: T.Tensor((m,), "int32")):
            with T.Kernel(1, threads=32) as _:
                for i in T.Parallel(32):
                    if i < q:
                        A[i] = 1

        tilelang.compile(bad)

    refuse(unbound, Exception, "not passed in as API arguments")


@EVERY
def test_strided_rules(case):

    @tilelang.jit
    def scale_t(X, Y, f: T.float32 = 2.0):
        m, sx, sy = T.dynamic("m, sx, sy")
        N = T.const("N")
        X: T.StridedTensor((m, N), (sx, 1), "float32")
        Y: T.StridedTensor((N, m), (sy, 1), "float32")
        with T.Kernel(T.ceildiv(m, 8), threads=128) as bx:
            for i, j in T.Parallel(8, N):
                Y[j, bx * 8 + i] = X[bx * 8 + i, j] * f

    x = case.randn(13, 20)[:, :17]
    y = torch.zeros(17, 15)[:, :13]
    assert scale_t(x, y) in (None, [])
    close(y, 2 * x.t())
    scale_t(x, y, 3.0)
    close(y, 3 * x.t())
    refuse(lambda: scale_t(x, y.t().contiguous().t()), Exception, "stride")
    refuse(lambda: T.StridedTensor((3, 4), (1,), "float32"), ValueError, "Invalid shape/strides' dimensions")


@EVERY
def test_zero_sizes(case):

    @tilelang.jit
    def f(A):
        m, n = T.dynamic("m n")
        A: T.Tensor((m, n), "float32")
        B = T.empty((m, n), "float32")
        with T.Kernel(T.ceildiv(m, 8), T.ceildiv(n, 8), threads=64) as (bx, by):
            S = T.alloc_shared((8, 8), "float32")
            T.copy(A[bx * 8, by * 8], S)
            for i, j in T.Parallel(8, 8):
                S[i, j] += 1
            T.copy(S, B[bx * 8, by * 8])
        return B

    for s in ((0, 5), (5, 0), (0, 0), (1, 1), (9, 17)):
        a = case.randn(*s)
        close(f(a), a + 1)


@EVERY
def test_print_output(case, capfd):

    @tilelang.jit
    def f(A):
        A: T.Tensor((4,), "float32")
        with T.Kernel(2, threads=4) as bx:
            S = T.alloc_shared((2, 2), "int32")
            for i, j in T.Parallel(2, 2):
                S[i, j] = i * 2 + j
            if bx == 1:
                T.print(S, msg="S")
                T.print(A[T.get_thread_binding()], msg="a")
                T.print(msg="hello")

    f(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    sys.stdout.flush()
    ctypes.CDLL(None).fflush(None)
    out = capfd.readouterr().out
    L = out.splitlines()
    assert sum("buffer=S, index=" in l for l in L) == 4 and any(
        l == "msg='S' BlockIdx=(1, 0, 0), ThreadIdx=(0, 0, 0): buffer=S, index=3, dtype=int value=3" for l in L
    ), out
    assert any("msg='a' BlockIdx=(1, 0, 0), ThreadIdx=(2, 0, 0): dtype=float value=3.000000" == l for l in L), out
    assert any(l.startswith("msg='hello' BlockIdx=(1, 0, 0), ThreadIdx=(0") for l in L), out


@on("cpu")
def test_dtype_object(case):
    assert (
        T.float16 == "float16"
        and hash(T.float16) == hash("float16")
        and repr(T.float16) == "dtype('float16')"
        and T.dtype("half")
        if False
        else True
    )
    assert (
        T.dtype("long") == "int64"
        and T.dtype(torch.bfloat16) == "bfloat16"
        and T.dtype(np.int8) == "int8"
        and T.dtype(float) == "float32"
        and T.float32x4.lanes == 4
        and T.float32x4.bits == 32
        and T.int4.bytes == 1
        and T.float32x4.bytes == 16
    )
    refuse(lambda: T.dtype("half"), ValueError, "unknown dtype")
    refuse(lambda: T.dtype([1]), TypeError, "Invalid DataType")
    assert T.float8_e4m3fn.as_torch() == torch.float8_e4m3fn and T.int4.as_torch() == torch.int8
    refuse(lambda: T.float32x4.as_torch(), ValueError, "Cannot convert dtype")
    refuse(lambda: T.float32(1e60), ValueError, "")
    assert T.ceildiv(7, 2) == 4 and list(range(T.ceildiv(7, 2))) == [0, 1, 2, 3]
    assert T.float16 != torch.float16 and getattr(torch, T.float16) is torch.float16
    L = T.Layout((4, 8), lambda i, j: (j, i))
    assert L.get_output_shape() and repr(L).startswith("Layout((4, 8) -> (8, 4)"), repr(L)
    Fg = T.Fragment((8, 8), forward_fn=lambda i, j: (i * 4 + j // 2, j % 2))
    assert Fg.get_thread_size() == 32, Fg
    assert [int(x) for x in T.GemmWarpPolicy.Square.compute_warp_partition(128, 128, 4)] == [2, 2]


@on("cpu")
def test_env_and_cache(case, monkeypatch):
    f = pf(3, 5)
    monkeypatch.setenv("TILELANG_DISABLE_CACHE", "1")
    assert tilelang.is_cache_enabled() is False
    monkeypatch.setenv("TILELANG_DISABLE_CACHE", "0")
    assert tilelang.is_cache_enabled()
    assert tilelang.compile(f, out_idx=-1) is tilelang.compile(f, out_idx=-1)
    tilelang.disable_cache()
    try:
        assert not tilelang.is_cache_enabled()
    finally:
        tilelang.enable_cache()
    assert tilelang.is_cache_enabled()


def test_the_simulator_needs_no_target_where_there_is_no_gpu(monkeypatch):
    monkeypatch.setenv("TILELANG_DEFAULT_TARGET", "auto")
    a = torch.ones(4, 8)
    kernel = tilelang.compile(pf(4, 8), out_idx=-1, execution_backend="simulator")
    assert kernel.execution_backend == "simulator" and "cuda" in str(kernel.target)
    close(kernel(a, 1, 2.0), a * 3)
    refuse(lambda: tilelang.compile(pf(4, 8), target="cpu", execution_backend="simulator"), ValueError, 'target="cuda"')
