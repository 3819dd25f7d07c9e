"""Kernels whose buffers fit in shared memory only if some use the bytes of others."""

import numpy as np
import pytest
from sync_mutants import DROPPED, arguments, is_faulty, lowered

import tilelang
import tilelang.language as T
from tilelang.errors import TileLangError
from tilelang.ir import Evaluate, Launch, rewrite, seq, walk
from tilelang.simulator import run_device
from tilelang.target import Target
from tilelang.transform.framework.pass_ import PassContext, run_passes
from tilelang.transform.pipeline import DEVICE_PASSES, TILE_PASSES
from tilelang.transform.memory.reuse_shared_memory import reuse_shared_memory
from tilelang.transform.verify_sync.launch import check_launch

SM90 = {"kind": "cuda", "arch": "sm_90a"}
BLOCK = 232448  # bytes of shared memory of a block of sm_90


def mla_decode(batch=1, heads=64, keys=128, dim=512, rope=64, rows=64, stages=2):
    """64 query heads against one latent head: with two stages the tiles take 288 KB."""
    scale = (dim + rope) ** -0.5 * 1.44269504

    @T.prim_func
    def f(Q: T.Tensor((batch, heads, dim), "float16"), Q_pe: T.Tensor((batch, heads, rope), "float16"),
          KV: T.Tensor((batch, keys, dim), "float16"), K_pe: T.Tensor((batch, keys, rope), "float16"),
          Out: T.Tensor((batch, heads, dim), "float16")):
        with T.Kernel(heads // rows, batch, threads=256) as (h, b):
            Q_s, Q_pe_s = T.alloc_shared((rows, dim), "float16"), T.alloc_shared((rows, rope), "float16")
            KV_s, K_pe_s = T.alloc_shared((64, dim), "float16"), T.alloc_shared((64, rope), "float16")
            S_s, O_s = T.alloc_shared((rows, 64), "float16"), T.alloc_shared((rows, dim), "float16")
            s, o = T.alloc_fragment((rows, 64), "float32"), T.alloc_fragment((rows, dim), "float32")
            m, last, part, total = (T.alloc_fragment((rows,), "float32") for _ in range(4))
            T.copy(Q[b, h * rows:(h + 1) * rows, :], Q_s)
            T.copy(Q_pe[b, h * rows:(h + 1) * rows, :], Q_pe_s)
            T.fill(o, 0)
            T.fill(total, 0)
            T.fill(m, -T.infinity("float32"))
            for k in T.Pipelined(T.ceildiv(keys, 64), num_stages=stages):
                T.copy(KV[b, k * 64:(k + 1) * 64, :], KV_s)
                T.copy(K_pe[b, k * 64:(k + 1) * 64, :], K_pe_s)
                T.clear(s)
                T.gemm(Q_s, KV_s, s, transpose_B=True, policy=T.GemmWarpPolicy.FullCol)
                T.gemm(Q_pe_s, K_pe_s, s, transpose_B=True, policy=T.GemmWarpPolicy.FullCol)
                T.copy(m, last)
                T.reduce_max(s, m, dim=1, clear=False)
                for i in T.Parallel(rows):
                    last[i] = T.exp2(last[i] * scale - m[i] * scale)
                for i, j in T.Parallel(rows, 64):
                    s[i, j] = T.exp2(s[i, j] * scale - m[i] * scale)
                T.reduce_sum(s, part, dim=1)
                T.copy(s, S_s)
                for i in T.Parallel(rows):
                    total[i] = total[i] * last[i] + part[i]
                for i, j in T.Parallel(rows, dim):
                    o[i, j] *= last[i]
                T.gemm(S_s, KV_s, o, policy=T.GemmWarpPolicy.FullCol)
            for i, j in T.Parallel(rows, dim):
                o[i, j] /= total[i]
            T.copy(o, O_s)
            T.copy(O_s, Out[b, h * rows:(h + 1) * rows, :])

    return f


def gemm(m=128, n=256, k=256, bm=128, bn=256, stages=4):
    """A GEMM whose float32 output tile is as large as two of its four stages."""
    @T.prim_func
    def f(A: T.Tensor((m, k), "float16"), B: T.Tensor((k, n), "float16"), C: T.Tensor((m, n), "float32")):
        with T.Kernel(n // bn, m // bm, threads=256) as (x, y):
            A_s, B_s = T.alloc_shared((bm, 64), "float16"), T.alloc_shared((64, bn), "float16")
            C_s, c = T.alloc_shared((bm, bn), "float32"), T.alloc_fragment((bm, bn), "float32")
            T.clear(c)
            for i in T.Pipelined(k // 64, num_stages=stages):
                T.copy(A[y * bm, i * 64], A_s)
                T.copy(B[i * 64, x * bn], B_s)
                T.gemm(A_s, B_s, c)
            T.copy(c, C_s)
            T.copy(C_s, C[y * bm, x * bn])

    return f


def gemm_by_hand(ready=True, k=256, stages=4):
    """The same with warp roles and mbarriers of the program.  ready: the consumers await the last tile that is loaded."""
    loads = k // 64 if ready else k // 64 + 1

    @T.prim_func
    def f(A: T.Tensor((128, k + 64), "float16"), B: T.Tensor((k + 64, 256), "float16"), C: T.Tensor((128, 256), "float32")):
        with T.Kernel(1, threads=384):
            A_s, B_s = T.alloc_shared((stages, 128, 64), "float16"), T.alloc_shared((stages, 64, 256), "float16")
            C_s, c = T.alloc_shared((128, 256), "float32"), T.alloc_fragment((128, 256), "float32")
            full, empty = T.alloc_barrier([128] * stages), T.alloc_barrier([256] * stages)
            with T.ws(2):
                for i in T.serial(loads):
                    T.barrier_wait(empty[i % stages], (i // stages & 1) ^ 1)
                    T.tma_copy(A[0:128, i * 64:(i + 1) * 64], A_s[i % stages, :, :], barrier=full[i % stages])
                    T.tma_copy(B[i * 64:(i + 1) * 64, 0:256], B_s[i % stages, :, :], barrier=full[i % stages])
                    T.barrier_arrive(full[i % stages])
            with T.ws(0, 1):
                T.clear(c)
                for i in T.serial(k // 64):
                    T.barrier_wait(full[i % stages], i // stages & 1)
                    T.gemm(A_s[i % stages, :, :], B_s[i % stages, :, :], c)
                    T.barrier_arrive(empty[i % stages])
                T.copy(c, C_s)
                T.copy(C_s, C)

    return f


def prologue():
    """A tile that is dead when the pipelined loop begins."""
    @T.prim_func
    def f(P: T.Tensor((128, 512), "float16"), A: T.Tensor((128, 512), "float16"), B: T.Tensor((512, 128), "float16"),
          R: T.Tensor((512, 128), "float16"), C: T.Tensor((128, 128), "float32")):
        with T.Kernel(1, threads=256):
            P_s, A_s = T.alloc_shared((128, 512), "float16"), T.alloc_shared((128, 64), "float16")
            B_s, c = T.alloc_shared((64, 128), "float16"), T.alloc_fragment((128, 128), "float32")
            T.copy(P, P_s)
            for i, j in T.Parallel(512, 128):
                R[i, j] = P_s[j, i]
            T.clear(c)
            for k in T.Pipelined(8, num_stages=4):
                T.copy(A[0, k * 64], A_s)
                T.copy(B[k * 64, 0], B_s)
                T.gemm(A_s, B_s, c)
            T.copy(c, C)

    return f


def launch_of(func):
    (launch,) = walk(func.body, Launch)
    return launch


@pytest.mark.parametrize("program", [mla_decode, gemm, gemm_by_hand], ids=lambda f: f.__name__)
def test_an_output_tile_after_the_loop_did_not_use_the_bytes_of_the_stages(program):
    """It was refused: "the kernel needs 296072 bytes of shared memory, a block has 232448"."""
    func = lowered("sm_90a", program(), {})
    launch = launch_of(func)
    assert launch.plan.reuse
    assert launch.plan.shared_bytes <= BLOCK < sum(b.size * b.dtype.bytes for b, _ in launch.plan.shared_offsets)
    assert check_launch(launch)[0].startswith("ordered") and check_launch(launch)[1] == []
    args = arguments(program())
    got = run_device(func, args).outputs
    if program is mla_decode:
        q, q_pe, kv, k_pe = (x.astype(np.float64) for x in args[:4])
        s = (np.einsum("bhd,bkd->bhk", q, kv) + np.einsum("bhd,bkd->bhk", q_pe, k_pe)) * 576 ** -0.5
        p = np.exp(s - s.max(-1, keepdims=True))
        want = np.einsum("bhk,bkd->bhd", p / p.sum(-1, keepdims=True), kv)
        np.testing.assert_allclose(got["Out"], want, atol=2e-2)
    else:
        np.testing.assert_array_equal(got["C"], args[0][:, :256].astype(np.float32) @ args[1][:256].astype(np.float32))


def test_blocks_with_several_tiles_keep_one_tile():
    """The loads of the next tile would overwrite the output tile."""
    launch = launch_of(lowered("sm_90a", gemm(4096, 4096), {}))
    assert launch.plan.reuse and launch.grid == launch_of(lowered("sm_90a", gemm(4096, 4096), {"tl.persistent": False})).grid


@pytest.mark.parametrize("program", [gemm, gemm_by_hand], ids=lambda f: f.__name__)
def test_dropped_orders_of_shared_bytes_are_refuted(program):
    """Without the barrier of the consumers, an output tile overwrites stages that another warp group still multiplies."""
    func, args = lowered("sm_90a", program(), {}), arguments(program())
    want, wrong = run_device(func, args).outputs, []
    for s in walk(launch_of(func), Evaluate):
        if s.call.op not in ("named_barrier", "wgmma_wait", "fence_proxy_async", "mbarrier_wait") or s.call.op not in DROPPED:
            continue
        mutant = rewrite(func, lambda n, s=s: seq() if n is s else None)
        faulty, text = is_faulty(mutant, args, want), check_launch(launch_of(mutant))[0]
        assert not faulty or not text.startswith("ordered"), s
        wrong += [s.call.op] * faulty
    assert "named_barrier" in wrong and "wgmma_wait" in wrong, wrong


def test_a_tile_that_is_loaded_but_never_awaited_keeps_its_bytes():
    """Its loads could land in the output tile."""
    with pytest.raises(ValueError, match=r"bytes cannot be used twice \(`C_s` in"):
        tilelang.compile(gemm_by_hand(ready=False), target=SM90)


def test_a_tile_that_is_dead_before_the_loop_takes_off_a_stage():
    """Producers load while the consumers still use it: the loop of one warp role has the bytes, that of two gets fewer stages.
    """
    func = lowered("sm_90a", prologue(), {"tl.disable_warp_specialized": True})
    assert launch_of(func).plan.shared_bytes == 131072
    kernel = tilelang.compile(prologue(), target=SM90)
    assert "compiled without some pipeline stages: the kernel needs" in kernel.report()
    assert "1 loads A_s, B_s by TMA, 2 compute, 3 stages" in kernel.report()


def test_no_more_stages_are_taken_off_than_do_not_fit():
    """Beside shared bytes, four of five stages fit."""
    report = tilelang.compile(gemm(stages=5, bn=256), target=SM90).report()
    assert "compiled without some pipeline stages" in report and "4 stages" in report


def test_kernels_that_do_not_fit_at_all_are_refused():
    with pytest.raises(TileLangError) as e:
        tilelang.compile(gemm(bm=256, bn=256, m=256), target=SM90, pass_configs={"tl.resize_blocks": False})
    assert e.value.kind == "shared-memory" and "the kernel needs" in str(e.value)


def test_kernels_that_fit_are_left_alone():
    cx = PassContext(Target(SM90), {})
    earlier = DEVICE_PASSES[:DEVICE_PASSES.index(reuse_shared_memory)]
    before = run_passes(gemm(stages=2, bn=128).func, (*TILE_PASSES, *earlier), cx)
    after = run_passes(before, [reuse_shared_memory], cx)
    assert launch_of(after).body is launch_of(before).body and not launch_of(after).plan.reuse
