"""Roles of warp groups with ordinary tile operations: each role's barriers are its own, the block's stand between."""

import sys
from pathlib import Path

import numpy as np
import pytest

import tilelang
import tilelang.language as T
from hopper_lowered import launch_of, ops
from tilelang.codegen.cuda.printer import print_kernel
from tilelang.ir import AddressOf, Const, For, replace, rewrite, walk
from tilelang.runtime import nvrtc
from tilelang.simulator import run_device, run_tile
from tilelang.target import Target
from tilelang.transform.pipeline import lower
from tilelang.transform.verify_sync.launch import check_launch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "names"))
from everywhere import WITH_HOPPER, everywhere

SM90A = Target({"kind": "cuda", "arch": "sm_90a"})


def both(f, *args):
    name = f.func.buffers[-1][1].name
    p = lower(f.func, SM90A, {"tl.enable_hopper": False})
    device = run_device(p, args).outputs[name]
    assert np.array_equal(device, run_tile(f, args)[name])
    text = print_kernel(p.kernels[0])
    if nvrtc.available():
        nvrtc.compile_cubin(text, "sm_90a")
    return device, text


@pytest.mark.parametrize("group", [0, 1, 2])
def test_a_role_reverses_rows_through_shared_memory_with_its_own_barrier(group):
    @T.prim_func
    def f(A: T.Tensor((4, 128), "float32"), B: T.Tensor((4, 128), "float32")):
        with T.Kernel(1, threads=384):
            S = T.alloc_shared((128,), "float32")
            with T.ws(group):
                for k in T.serial(4):
                    T.copy(A[k, :], S)
                    for i in T.Parallel(128):
                        B[k, i] = S[127 - i] + 1.0

    a = np.arange(512, dtype=np.float32).reshape(4, 128)
    got, text = both(f, a, np.zeros_like(a))
    assert np.array_equal(got, a[:, ::-1] + 1)
    assert f"named_barrier({group + 1}, 128)" in text and "__syncthreads" not in text


def test_work_of_the_block_before_between_and_after_roles():
    @T.prim_func
    def f(A: T.Tensor((3, 256), "float32"), B: T.Tensor((3, 256), "float32")):
        with T.Kernel(1, threads=256):
            S, R = T.alloc_shared((256,), "float32"), T.alloc_shared((256,), "float32")
            for k in T.serial(3):
                T.copy(A[k, :], S)
                with T.ws(1):
                    for i in T.Parallel(128):
                        R[i] = S[255 - i]
                with T.ws(0):
                    for i in T.Parallel(128):
                        R[128 + i] = S[127 - i] * 2.0
                for i in T.Parallel(256):
                    B[k, i] = R[255 - i]

    a = np.arange(768, dtype=np.float32).reshape(3, 256)
    r = np.concatenate([a[:, ::-1][:, :128], a[:, ::-1][:, 128:] * 2], axis=1)
    got, text = both(f, a, np.zeros_like(a))
    assert np.array_equal(got, r[:, ::-1])
    assert text.count("__syncthreads()") == 3  # in front of the roles, behind them, before the next round


def test_roles_of_different_size_have_fragments_of_their_own():
    @T.prim_func
    def f(A: T.Tensor((64, 64), "float32"), B: T.Tensor((2, 64), "float32")):
        with T.Kernel(1, threads=384):
            F, G = T.alloc_fragment((64, 64), "float32"), T.alloc_fragment((64, 64), "float32")
            rows, columns = T.alloc_fragment((64,), "float32"), T.alloc_fragment((64,), "float32")
            with T.ws(0):
                T.copy(A, F)
                T.reduce_sum(F, rows, dim=1)
                T.copy(rows, B[0, :])
            with T.ws(1, 2):
                T.copy(A, G)
                T.reduce_max(G, columns, dim=0)
                T.copy(columns, B[1, :])

    a = np.arange(4096, dtype=np.float32).reshape(64, 64) % 37
    got, _ = both(f, a, np.zeros((2, 64), np.float32))
    assert np.array_equal(got, np.stack([a.sum(1), a.max(0)]))


def test_products_in_a_role_by_mma_and_numbers_that_the_program_names():
    @T.prim_func
    def f(A: T.Tensor((64, 64), "float16"), B: T.Tensor((64, 64), "float16"), C: T.Tensor((64, 64), "float32")):
        with T.Kernel(1, threads=256):
            As, Bs = T.alloc_shared((64, 64), "float16"), T.alloc_shared((64, 64), "float16")
            F = T.alloc_fragment((64, 64), "float32")
            with T.ws(0):
                T.copy(A, As)
                T.copy(B, Bs)
                T.named_barrier_arrive(2, 256)
            with T.ws(1):
                T.sync_threads(2, 256)
                T.clear(F)
                T.gemm(As, Bs, F)
                T.copy(F, C)

    rng = np.random.default_rng(1)
    a, b = (rng.integers(-4, 5, (64, 64)).astype(np.float16) for _ in "ab")
    got, text = both(f, a, b, np.zeros((64, 64), np.float32))
    assert np.array_equal(got, a.astype(np.float32) @ b.astype(np.float32)) and "mma_m16n8k16" in text


def test_a_producer_that_stores_itself_tells_the_matrix_unit():
    """Ordinary stores, an arrival, then wgmma: the proxy fence stands before the arrival, and nowhere in the consumer."""
    @T.prim_func
    def f(A: T.Tensor((64, 256), "float16"), B: T.Tensor((64, 256), "float16"), C: T.Tensor((64, 64), "float32")):
        with T.Kernel(1, threads=256):
            As, Bs = T.alloc_shared((2, 64, 64), "float16"), T.alloc_shared((2, 64, 64), "float16")
            F = T.alloc_fragment((64, 64), "float32")
            full, empty = T.alloc_barrier([128] * 2), T.alloc_barrier([128] * 2)
            with T.ws(1):
                for k in T.serial(4):
                    T.mbarrier_wait_parity(empty[k % 2], (k // 2 + 1) % 2)
                    T.copy(A[0:64, k * 64:k * 64 + 64], As[k % 2, :, :])
                    T.copy(B[0:64, k * 64:k * 64 + 64], Bs[k % 2, :, :])
                    T.mbarrier_arrive(full[k % 2])
            with T.ws(0):
                T.clear(F)
                for k in T.serial(4):
                    T.mbarrier_wait_parity(full[k % 2], k // 2 % 2)
                    T.wgmma_gemm(As[k % 2, :, :], Bs[k % 2, :, :], F, transpose_B=True)
                    T.wait_wgmma(0)
                    T.mbarrier_arrive(empty[k % 2])
                T.copy(F, C)

    rng = np.random.default_rng(2)
    a, b = (rng.integers(-4, 5, (64, 256)).astype(np.float16) for _ in "ab")
    got, text = both(f, a, b, np.zeros((64, 64), np.float32))
    assert np.array_equal(got, a.astype(np.float32) @ b.astype(np.float32).T)
    kernel = text[text.index("main_kernel" if "main_kernel" in text else "f_kernel"):]
    assert kernel.count("tl::fence_proxy_async()") == 1 and "__syncthreads" not in kernel[kernel.index("if (threadIdx"):]


def test_a_pipelined_loop_inside_a_role():
    @T.prim_func
    def f(A: T.Tensor((64, 256), "float16"), B: T.Tensor((256, 64), "float16"), C: T.Tensor((64, 64), "float32")):
        with T.Kernel(1, threads=256):
            As, Bs = T.alloc_shared((64, 32), "float16"), T.alloc_shared((32, 64), "float16")
            F = T.alloc_fragment((64, 64), "float32")
            with T.ws(1):
                T.clear(F)
                for k in T.Pipelined(8, num_stages=3):
                    T.copy(A[0, k * 32], As)
                    T.copy(B[k * 32, 0], Bs)
                    T.gemm(As, Bs, F)
                T.copy(F, C)

    rng = np.random.default_rng(3)
    a, b = rng.integers(-4, 5, (64, 256)).astype(np.float16), rng.integers(-4, 5, (256, 64)).astype(np.float16)
    got, text = both(f, a, b, np.zeros((64, 64), np.float32))
    assert np.array_equal(got, a.astype(np.float32) @ b.astype(np.float32))


def test_two_consumers_take_turns_by_named_barriers():
    @T.prim_func
    def f(A: T.Tensor((2, 64, 64), "float16"), C: T.Tensor((2, 64, 64), "float32")):
        with T.Kernel(1, threads=256):
            S = T.alloc_shared((64, 64), "float16")
            F, G = T.alloc_fragment((64, 64), "float32"), T.alloc_fragment((64, 64), "float32")
            with T.ws(0):
                T.copy(A[0, 0:64, 0:64], S)
                T.clear(F)
                T.gemm(S, S, F)
                T.named_barrier_arrive(3, 256)
                T.copy(F, C[0, 0:64, 0:64])
            with T.ws(1):
                T.clear(G)
                T.sync_threads(3, 256)
                T.copy(A[1, 0:64, 0:64], S)
                T.gemm(S, S, G)
                T.copy(G, C[1, 0:64, 0:64])

    a = np.random.default_rng(4).integers(-4, 5, (2, 64, 64)).astype(np.float16)
    got, text = both(f, a, np.zeros((2, 64, 64), np.float32))
    w = a.astype(np.float32)
    assert np.array_equal(got, w @ w) and "named_barrier_arrive(3, 256)" in text


def test_buffers_of_roles_that_run_side_by_side_share_no_memory():
    """Each role has a buffer of its own and waits for the other: a barrier between the two would never be passed."""
    @T.prim_func
    def f(A: T.Tensor((2, 128), "float32"), B: T.Tensor((2, 128), "float32")):
        with T.Kernel(1, threads=256):
            P, Q = T.alloc_shared((128,), "float32"), T.alloc_shared((128,), "float32")
            there, back = T.alloc_barrier(128), T.alloc_barrier(128)
            with T.ws(0):
                T.copy(A[0, :], P)
                T.mbarrier_arrive(there)
                T.mbarrier_wait_parity(back, 0)
                for i in T.Parallel(128):
                    B[0, i] = P[127 - i]
            with T.ws(1):
                T.mbarrier_wait_parity(there, 0)
                T.copy(A[1, :], Q)
                T.mbarrier_arrive(back)
                for i in T.Parallel(128):
                    B[1, i] = Q[127 - i]

    a = np.arange(256, dtype=np.float32).reshape(2, 128)
    got, text = both(f, a, np.zeros_like(a))
    assert np.array_equal(got, a[:, ::-1]) and text.count("__syncthreads()") == 1
    at = dict((b.name, o) for b, o in lower(f.func, SM90A).kernels[0].launch.plan.shared_offsets)
    assert abs(at["P"] - at["Q"]) >= 512


def test_what_threads_load_from_a_stage_has_arrived_before_it_is_given_back():
    """A in registers, loaded by threads from a stage of a ring: on an H200 the next copy into the stage overtook the loads.
    Stages that matrix instructions alone read need no fence."""
    def program(registers):
        @T.prim_func
        def f(A: T.Tensor((512, 1024), "float16"), B: T.Tensor((1024, 512), "float16"), C: T.Tensor((512, 512), "float16")):
            with T.Kernel(4, 4, threads=256) as (bx, by):
                As, Bs = T.alloc_shared((128, 64), "float16"), T.alloc_shared((64, 128), "float16")
                Af, Cf = T.alloc_fragment((128, 64), "float16"), T.alloc_fragment((128, 128), "float32")
                T.clear(Cf)
                for k in T.Pipelined(16, num_stages=3):
                    T.copy(A[by * 128, k * 64], As)
                    T.copy(B[k * 64, bx * 128], Bs)
                    if registers:
                        T.copy(As, Af)
                    T.gemm(Af if registers else As, Bs, Cf)
                T.copy(Cf, C[by * 128, bx * 128])

        return print_kernel(lower(f.func, SM90A).kernels[0])

    with_loads, without = program(True), program(False)
    loop = with_loads[with_loads.rindex("for (int k"):]
    assert loop.index("ldmatrix") < loop.index("fence_proxy_async") < loop.index("mbarrier_arrive(&As_empty")
    loop = without[without.rindex("for (int k"):without.rindex("stmatrix")]
    assert "mbarrier_arrive" in loop and "fence_proxy_async" not in loop[:loop.index("mbarrier_arrive")]


def test_roles_by_hand_wait_for_their_loads_before_they_give_a_tile_back():
    @T.prim_func
    def f(A: T.Tensor((512, 64), "float32"), B: T.Tensor((512, 64), "float32")):
        with T.Kernel(1, threads=256):
            S = T.alloc_shared((2, 64, 64), "float32")
            full, empty = T.alloc_barrier([128, 128]), T.alloc_barrier([128, 128])
            with T.ws(1):
                for k in T.serial(8):
                    T.mbarrier_wait_parity(empty[k % 2], (k // 2 + 1) % 2)
                    T.tma_copy(A[k * 64, 0], S[k % 2, :, :], barrier=full[k % 2])
                    T.mbarrier_arrive(full[k % 2])
            with T.ws(0):
                for k in T.serial(8):
                    T.mbarrier_wait_parity(full[k % 2], k // 2 % 2)
                    for i, j in T.Parallel(64, 64):
                        B[k * 64 + i, j] = S[k % 2, i, j] * 2.0
                    T.mbarrier_arrive(empty[k % 2])

    text = print_kernel(lower(f.func, SM90A).kernels[0])
    loop = text[text.rindex("for (int k"):]
    assert loop.index("fence_proxy_async") < loop.index("mbarrier_arrive(&empty")


def test_sums_over_warps_in_roles_side_by_side_and_again_and_again():
    """Each role has scratch memory of its own, and its threads wait for each other before its next turn."""
    @T.prim_func
    def f(A: T.Tensor((8, 512), "float32"), B: T.Tensor((8, 1), "float32")):
        with T.Kernel(1, threads=384):
            for k in T.serial(2):
                with T.ws(0):
                    x, s = T.alloc_fragment((512,), "float32"), T.alloc_fragment((1,), "float32")
                    T.copy(A[4 * k, 0:512], x)
                    T.reduce_sum(x, s)
                    T.copy(s, B[4 * k, 0:1])
                with T.ws(1, 2):
                    y, t = T.alloc_fragment((512,), "float32"), T.alloc_fragment((1,), "float32")
                    for m in T.serial(2):
                        T.copy(A[4 * k + 1 + m, 0:512], y)
                        T.reduce_sum(y, t)
                        T.copy(t, B[4 * k + 1 + m, 0:1])
                with T.ws(0):
                    z, u = T.alloc_fragment((512,), "float32"), T.alloc_fragment((1,), "float32")
                    T.copy(A[4 * k + 3, 0:512], z)
                    T.reduce_sum(z, u)
                    T.copy(u, B[4 * k + 3, 0:1])

    a = np.arange(4096, dtype=np.float32).reshape(8, 512) % 17
    got, _ = both(f, a, np.zeros((8, 1), np.float32))
    assert np.array_equal(got, a.sum(1, keepdims=True))


@pytest.mark.parametrize("slots", [1, 2])
def test_a_role_in_loops_waits_before_it_writes_what_its_last_turn_reads(slots):
    """With two slots the turn before the last one counts, and the first of the next round."""
    @T.prim_func
    def f(A: T.Tensor((6, 128), "float32"), B: T.Tensor((6, 128), "float32")):
        with T.Kernel(1, threads=256):
            S = T.alloc_shared((slots, 128), "float32")
            for r in T.serial(2):
                for k in T.serial(3):
                    with T.ws(1):
                        for i in T.Parallel(128):
                            S[k % slots, i] = A[r * 3 + k, i]
                        for i in T.Parallel(128):
                            B[r * 3 + k, i] = S[k % slots, 127 - i]

    a = np.arange(768, dtype=np.float32).reshape(6, 128)
    got, text = both(f, a, np.zeros_like(a))
    assert np.array_equal(got, a[:, ::-1]) and text.count("named_barrier(2, 128)") == 2 and "__syncthreads" not in text


def test_each_consumer_stores_its_rows_from_panels_of_its_own():
    @T.prim_func
    def f(A: T.Tensor((128, 64), "float16"), B: T.Tensor((64, 64), "float16"), C: T.Tensor((128, 64), "float32")):
        with T.Kernel(1, threads=256):
            a, b = T.alloc_shared((128, 64), "float16"), T.alloc_shared((64, 64), "float16")
            x, y = T.alloc_fragment((64, 64), "float32"), T.alloc_fragment((64, 64), "float32")
            T.copy(A, a)
            T.copy(B, b)
            with T.ws(0):
                T.wgmma_gemm(a[0:64, :], b, x, clear_accum=True)
                T.wait_wgmma(0)
                T.copy(x, C[0, 0])
            with T.ws(1):
                T.wgmma_gemm(a[64:128, :], b, y, clear_accum=True)
                T.wait_wgmma(0)
                T.copy(y, C[64, 0])

    p = lower(f.func, SM90A)
    text, launch = print_kernel(p.kernels[0]), p.kernels[0].launch
    assert text.count("tl::tma_store_2d(") == 4 and not any("compiled without" in x for x in launch.plan.report)
    rng = np.random.default_rng(3)
    args = [rng.integers(-4, 5, s).astype(np.float16) for s in ((128, 64), (64, 64))]
    got = run_device(p, [*args, np.zeros((128, 64), np.float32)]).outputs["C"]
    assert np.array_equal(got, args[0].astype(np.float32) @ args[1].astype(np.float32))


@pytest.mark.parametrize("source", ["shared", "global"])
def test_a_uniform_decision_by_a_float_around_barriers_of_a_warp_role(source):
    """All threads of the warp role read one element, so all take the branch with its barriers, or none."""
    @T.prim_func
    def main(A: T.Tensor((4, 128), "float32"), F: T.Tensor((4,), "float32"), B: T.Tensor((4, 128), "float32")):
        with T.Kernel(1, threads=256):
            s, u = T.alloc_shared((128,), "float32"), T.alloc_shared((128,), "float32")
            with T.ws(0):
                for k in T.serial(4):
                    T.copy(A[k, :], s)
                    if (s[0] if source == "shared" else F[k]) > 0.5:
                        for i in T.Parallel(128):
                            u[i] = s[127 - i] * 2
                        for i in T.Parallel(128):
                            B[k, i] = u[127 - i]

    a, f = np.arange(512, dtype=np.float32).reshape(4, 128), np.array([1, 0, 1, 0], np.float32)
    a[:, 0] = f
    want = np.where(f[:, None] > 0.5, a * 2, 0)
    assert np.array_equal(everywhere(main, a, f, on=WITH_HOPPER)[2], want)
    for arch in ("sm_80", "sm_90a"):
        assert "named_barrier" in tilelang.compile(main, target={"kind": "cuda", "arch": arch}).get_kernel_source()


@pytest.mark.parametrize("step, message", [(0, None), (128, "is touched by two threads without a barrier")])
def test_rows_that_threads_write_in_different_iterations_of_an_epilogue(step, message):
    """Iterations that write where only their thread writes are followed at once; others one after another."""
    @T.prim_func
    def f(A: T.Tensor((1024, 512), "float16"), B: T.Tensor((512, 512), "float16"), C: T.Tensor((1024, 512), "float16")):
        with T.Kernel(4, 8, threads=128) as (bx, by):
            a, b = T.alloc_shared((128, 64), "float16"), T.alloc_shared((64, 128), "float16")
            c = T.alloc_fragment((128, 128), "float32")
            T.clear(c)
            for k in T.Pipelined(8, num_stages=3):
                T.copy(A[by * 128, k * 64], a)
                T.copy(B[k * 64, bx * 128], b)
                T.gemm(a, b, c)
            T.copy(c, C[by * 128, bx * 128])

    launch = launch_of(f)
    (loop, *_) = [x for x in walk(launch, For) if isinstance(x.extent, Const) and "stmatrix" in ops(x) and "wgmma" not in ops(x)
                  and "tma_store" not in ops(x)]
    moved = rewrite(loop, lambda x: replace(x, indices=(x.indices[0] + loop.var * step,))
                    if isinstance(x, AddressOf) and x.buffer.scope_name.startswith("shared") else None)
    text, faults = check_launch(rewrite(launch, lambda x: moved if x is loop else None))
    assert [message in x.message for x in faults] == [True] if message else text.startswith("ordered"), text


def test_fences_stand_only_behind_stores_to_what_the_async_proxy_accesses():
    """Group 0 tells group 1 of both: `told` is a number for its threads, `left` an operand of wgmma."""
    @T.prim_func
    def f(A: T.Tensor((64, 64), "float16"), B: T.Tensor((64, 64), "float16"), C: T.Tensor((64, 64), "float32")):
        with T.Kernel(1, threads=256):
            left, right = T.alloc_shared((64, 64), "float16"), T.alloc_shared((64, 64), "float16")
            told = T.alloc_shared((64,), "float32")
            number, operands = T.alloc_barrier([128]), T.alloc_barrier([128])
            with T.ws(0):
                for i in T.Parallel(64):
                    told[i] = 2.0
                T.mbarrier_arrive(number[0])
                T.copy(A, left)
                T.copy(B, right)
                T.mbarrier_arrive(operands[0])
            with T.ws(1):
                acc = T.alloc_fragment((64, 64), "float32")
                T.mbarrier_wait_parity(number[0], 0)
                T.mbarrier_wait_parity(operands[0], 0)
                T.wgmma_gemm(left, right, acc, clear_accum=True)
                T.wait_wgmma(0)
                for i, j in T.Parallel(64, 64):
                    C[i, j] = acc[i, j] * told[i]

    text = print_kernel(lower(f.func, SM90A, {}).kernels[0])
    fences = text.split('extern "C"')[1].split("tl::fence_proxy_async();")
    assert len(fences) == 2 and "mbarrier_arrive(&number[0])" in fences[0] and "mbarrier_arrive(&operands[0])" in fences[1]


def test_threads_that_read_bytes_which_tma_fills_as_another_tile_have_a_fence():
    """Two tiles of 128 KiB share bytes: the second one is filled by TMA, the first one by threads."""
    @T.prim_func
    def f(A: T.Tensor((256, 256), "float16"), B: T.Tensor((256, 256), "float16"), C: T.Tensor((256, 256), "float16")):
        with T.Kernel(1, threads=128):
            first, second = T.alloc_shared((256, 256), "float16"), T.alloc_shared((256, 256), "float16")
            bar = T.alloc_barrier([128])
            for i, j in T.Parallel(256, 256):
                first[i, j] = A[i, j] * 2.0
            for i, j in T.Parallel(256, 256):
                C[i, j] = first[255 - i, j]
            T.sync_threads()
            T.tma_copy(B, second, barrier=bar[0])
            T.mbarrier_arrive(bar[0])
            T.mbarrier_wait_parity(bar[0], 0)
            for i, j in T.Parallel(256, 256):
                C[i, j] += second[i, j]

    text = print_kernel(lower(f.func, SM90A, {}).kernels[0]).split('extern "C"')[1]
    assert "fence_proxy_async();\n  __syncthreads();\n  // T.tma_copy" in "\n".join(
        line for line in text.splitlines() if "T.sync_threads" not in line), text


def test_no_barrier_stands_between_the_boxes_of_one_load():
    """Both are counted by the mbarrier of their stage."""
    @T.prim_func
    def f(A: T.Tensor((6, 64, 64), "float16"), B: T.Tensor((3, 128, 64), "float16")):
        with T.Kernel(1, threads=256):
            S, full = T.alloc_shared((2, 128, 64), "float16"), T.alloc_barrier([128] * 2)
            with T.ws(0):
                for k in T.serial(3):
                    s = k % 2
                    T.tma_copy(A[2 * k, :, :], S[s, 0:64, :], barrier=full[s])
                    T.tma_copy(A[2 * k + 1, :, :], S[s, 64:128, :], barrier=full[s])
                    T.mbarrier_arrive(full[s])
                    T.mbarrier_wait_parity(full[s], k // 2 % 2)
                    T.copy(S[s, :, :], B[k, :, :])
                    T.sync_threads(1, 128)

    a = np.arange(6 * 64 * 64, dtype=np.float16).reshape(6, 64, 64) % 8
    got, text = both(f, a, np.zeros((3, 128, 64), np.float16))
    assert np.array_equal(got, a.reshape(3, 128, 64))
    copies = [line for line in text.split('extern "C"')[1].splitlines() if "tma_load" in line or "named_barrier" in line]
    assert ["tma_load" in line for line in copies][:2] == [True, True], copies
