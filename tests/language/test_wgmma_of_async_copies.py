"""T.wgmma_gemm of tiles that T.ptx_cp_async fills through pointers to elements."""

import numpy as np
import pytest

import tilelang
import tilelang.language as T
from tilelang.errors import TileLangError
from tilelang.ir import Evaluate, Launch, Seq, rewrite, seq, walk
from tilelang.simulator import run_device
from tilelang.target import Target
from tilelang.transform.framework.pass_ import PassContext, run_passes
from tilelang.transform.pipeline import DEVICE_PASSES, TILE_PASSES
from tilelang.transform.verify_sync.launch import check_launch

SM90 = {"kind": "cuda", "arch": "sm_90a"}
M, N, K = 64, 64, 128


def filled(way):
    @T.prim_func
    def f(A: T.Tensor((M, K), "float16"), B: T.Tensor((N, K), "float16"), C: T.Tensor((M, N), "float32")):
        with T.Kernel(1, threads=128):
            A_s, KV_s = T.alloc_shared((M, K), "float16"), T.alloc_shared((N, K), "float16")
            c, tx = T.alloc_fragment((M, N), "float32"), T.get_thread_binding()
            T.copy(A, A_s)
            for i in T.serial(N * K // 8 // 128):
                row, column = (i * 128 + tx) // 16, tx % 16 * 8
                if way == "16 bytes":
                    T.ptx_cp_async(T.access_ptr(KV_s[row, column], "w", 8), T.access_ptr(B[row, column], "r", 8), 8)
                elif way == "8 bytes":
                    for half in T.serial(2):
                        T.ptx_cp_async(T.access_ptr(KV_s[row, column + half * 4], "w", 4),
                                       T.access_ptr(B[row, column + half * 4], "r", 4), 4)
                else:
                    T.call_extern("handle", "fill16", T.address_of(KV_s[row, column]), T.address_of(B[row, column]))
            T.ptx_commit_group()
            T.ptx_wait_group(0)
            T.fence_proxy_async()
            T.sync_threads()
            T.clear(c)
            T.wgmma_gemm(A_s, KV_s, c, transpose_B=True)
            T.wait_wgmma(0)
            T.copy(c, C)

    return f


def ring(stages=2, steps=4):
    """A producer whose copies arrive at mbarriers when they land, as kernels with gathered rows do."""
    @T.prim_func
    def f(A: T.Tensor((M, K), "float16"), B: T.Tensor((steps * N, K), "float16"), C: T.Tensor((M, N), "float32")):
        with T.Kernel(1, threads=256):
            A_s, KV_s = T.alloc_shared((M, K), "float16"), T.alloc_shared((stages, N, K), "float16")
            c, tx = T.alloc_fragment((M, N), "float32"), T.get_thread_binding()
            ready, free = T.alloc_barrier([128] * stages), T.alloc_barrier([128] * stages)
            T.copy(A, A_s)
            if tx < 128:
                T.clear(c)
                for k in T.serial(steps):
                    T.barrier_wait(ready[k % stages], k // stages & 1)
                    T.wgmma_gemm(A_s, KV_s[k % stages, :, :], c, transpose_B=True)
                    T.wait_wgmma(0)
                    T.barrier_arrive(free[k % stages])
                T.copy(c, C)
            else:
                for k in T.serial(steps):
                    T.barrier_wait(free[k % stages], (k // stages & 1) ^ 1)
                    for i in T.serial(N * K // 8 // 128):
                        row, column = i * 8 + (tx - 128) // 16, (tx - 128) % 16 * 8
                        T.ptx_cp_async(T.access_ptr(KV_s[k % stages, row, column], "w", 8),
                                       T.access_ptr(B[k * N + row, column], "r", 8), 8)
                    T.cp_async_barrier_noinc(ready[k % stages])

    return f


def arguments(program):
    rng = np.random.default_rng(0)
    return [rng.integers(-3, 4, tuple(map(int, b.shape))).astype(str(b.dtype)) for _, b in program.func.buffers]


@pytest.mark.parametrize("way", ["16 bytes", "8 bytes"])
def test_wgmma_was_refused_because_cp_async_has_the_address(way):
    """"constraints were not satisfied: the address of `KV_shared` is taken": each copy goes through the tile's layout."""
    kernel = tilelang.compile(filled(way), target=SM90, execution_backend="simulator")
    a, b, c = arguments(filled(way))
    kernel(a, b, c)
    np.testing.assert_array_equal(c, a.astype(np.float32) @ b.astype(np.float32).T)
    assert kernel.sync_report().startswith("f_kernel: ordered")


def test_copies_that_arrive_when_they_land_are_fenced_by_the_threads_that_wait():
    """The copies land after each fence of the thread that started them."""
    program = ring()
    func = run_passes(program.func, (*TILE_PASSES, *DEVICE_PASSES), PassContext(Target(SM90), {}))
    args = arguments(program)
    want = sum(args[0].astype(np.float32) @ args[1][k * N:(k + 1) * N].astype(np.float32).T for k in range(4))
    np.testing.assert_array_equal(run_device(func, args).outputs["C"], want)
    (launch,) = walk(func.body, Launch)
    fences = {s for s in walk(launch, Evaluate) if s.call.op == "fence_proxy_async"}
    assert fences
    unfenced = rewrite(func, lambda n: seq() if n in fences else None)
    with pytest.raises(TileLangError) as e:
        run_device(unfenced, args)
    assert e.value.kind == "sim-proxy"
    text, faults = check_launch(launch)
    assert text.startswith("ordered") and not faults
    assert {f.kind for f in check_launch(rewrite(launch, lambda n: seq() if n in fences else None))[1]} == {"proxy"}
    landing = next(s for s in walk(launch, Seq) if any(op_of(x) == "cp_async_mbarrier_arrive" for x in s.stmts)).stmts
    assert not any(op_of(x) == "fence_proxy_async" for x in landing), "copies land behind a fence of the threads that made them"
    for which in (0, 1):  # the consumer's wait, the producer's
        wait = [s for s in walk(launch, Evaluate) if s.call.op == "mbarrier_wait"][-2:][which]
        assert check_launch(rewrite(launch, lambda n, wait=wait: seq() if n is wait else None))[1], which


def op_of(s):
    return s.call.op if isinstance(s, Evaluate) else ""


def test_the_error_names_the_call_that_has_the_address():
    with pytest.raises(TileLangError) as e:
        tilelang.compile(filled("extern"), target=SM90)
    text = str(e.value)
    assert e.value.kind == "wgmma-gemm" and "its address is taken here" in text and 'T.call_extern("handle", "fill16"' in text
    assert "T.ptx_cp_async or element stores, which go through its layout" in text
