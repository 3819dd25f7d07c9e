"""Hopper's own names: tile meaning, device simulator and assembled code agree; faults and unfit targets are named."""

import numpy as np
import pytest
from everywhere import device_of, on_gpu, run
from hopper_by_hand import (broadcast, dependent, from_registers, gemm_cluster, gemm_two_consumers, gemm_ws,
                            persistent, persistent_loop, raw_barriers, rows, shift)

import tilelang
import tilelang.language as T
from tilelang.codegen.cuda.printer import print_kernel
from tilelang.errors import TileLangError
from tilelang.runtime import nvrtc
from tilelang.simulator import run_device, run_tile
from tilelang.target import Target
from tilelang.transform.pipeline import lower

SM90A = Target({"kind": "cuda", "arch": "sm_90a"})
f16 = "float16"
rng = np.random.default_rng(11)


def kernel_text(f, **config) -> str:
    (k,) = lower(f.func, SM90A, config).kernels
    return print_kernel(k)


def assembled(f) -> str:
    """CUDA text that NVRTC takes without serialised products or spills."""
    text = kernel_text(f)
    if nvrtc.available():
        cubin = nvrtc.compile_cubin(text, "sm_90a")
        assert "C75" not in cubin.log and cubin.spills == 0, cubin.log
    return text


def both(f, *args) -> np.ndarray:
    """The last tensor after the program: tile meaning, device simulator (with --device=gpu a GPU) and the CPU give the same."""
    name = f.func.buffers[-1][1].name
    args = [a.copy() for a in args]
    if device_of("simulator") == "gpu":
        device = on_gpu(f, *args)[-1]
    else:
        device = run_device(lower(f.func, SM90A), args).outputs[name]
    tile = run_tile(f, args)[name]
    assert np.array_equal(device, tile)
    assert np.array_equal(run(f, *args, on="cpu")[-1], tile)
    return device


def numbers(*shape):
    return rng.integers(-4, 5, shape).astype(np.float16)


def product(a, b, dt=np.float16):
    return (a.astype(np.float32) @ b.astype(np.float32)).astype(dt)


# ---- products ---------------------------------------------------------------------------------------------------------


@pytest.mark.spec("T.alloc_barrier", "T.mbarrier_arrive", "T.mbarrier_wait_parity", "T.tma_copy", "T.wait_wgmma",
                  "T.wgmma_gemm")
@pytest.mark.spec("L6:alloc_barrier", "L11:wgmma_gemm", "L11:wait_wgmma", "L16:mbarriers", "L8:ws")
@pytest.mark.parametrize("m, n, k, options", [(256, 128, 64, {}), (128, 256, 128, {}), (128, 128, 704, {"S": 2}),
                                              (128, 64, 256, {"BM": 64, "BN": 64, "BK": 32, "S": 4})])
def test_producer_and_consumer_by_hand(m, n, k, options):
    a, b = numbers(m, k), numbers(k, n)
    assert np.array_equal(both(gemm_ws(m, n, k, **options), a, b, np.zeros((m, n), np.float16)), product(a, b))


@pytest.mark.spec("L16:mbarriers")
def test_a_wrong_parity_deadlocks_and_says_where():
    f = gemm_ws(128, 128, 128, parity=0)
    args = [numbers(128, 128), numbers(128, 128), np.zeros((128, 128), np.float16)]
    for start, kind in ((lambda: lower(f.func, SM90A), "sync-unordered"), (lambda: run_tile(f, args), "sim-barrier")):
        with pytest.raises(TileLangError, match=r"empty\[0\]") as e:
            start()
        assert e.value.kind == kind and "hopper_by_hand.py" in str(e.value)


@pytest.mark.spec("T.warpgroup_wait", "T.wgmma_mma")
@pytest.mark.spec("L15:max_nreg", "L16:tma")
@pytest.mark.parametrize("k", [64, 192, 640])
def test_two_consumers_with_a_product_under_way_and_a_store_by_tma(k):
    a, b = numbers(128, k), numbers(128, k)
    f = gemm_two_consumers(128, 128, k)
    assert np.array_equal(both(f, a, b, np.zeros((128, 128), np.float16)), product(a, b.T))


def on_cpu(f, *args) -> np.ndarray:
    """The last tensor, which starts as zeros, after the program on the CPU."""
    args = [*(a.copy() for a in args[:-1]), np.zeros_like(args[-1])]
    tilelang.compile(f, target="cpu")(*args)
    return args[-1]


@pytest.mark.spec("T.alloc_barrier", "T.mbarrier_arrive", "T.mbarrier_wait_parity", "T.tma_copy", "T.wait_wgmma",
                  "T.wgmma_gemm", "T.wgmma_mma", "T.warpgroup_wait", "T.tma_store_wait", "T.barrier_arrive", "T.barrier_wait",
                  "T.fence_proxy_async", "T.set_max_nreg")
@pytest.mark.spec("L6:alloc_barrier", "L11:wgmma_gemm", "L11:wait_wgmma", "L16:mbarriers", "L8:ws", "L15:max_nreg", "L16:tma")
@pytest.mark.parametrize("program, sizes, nt", [
    (gemm_ws, (256, 128, 192), False), (lambda *s: gemm_ws(*s, S=2), (128, 128, 704), False),
    (gemm_two_consumers, (128, 128, 192), True), (persistent, (256, 128, 192), True), (persistent_loop, (256, 128, 192), True)])
def test_roles_that_wait_for_each_other_on_the_cpu(program, sizes, nt):
    m, n, k = sizes
    a, b = numbers(m, k), numbers(n, k) if nt else numbers(k, n)
    want = product(a, b.T if nt else b)
    assert np.array_equal(on_cpu(program(m, n, k), a, b, want), want)


@pytest.mark.spec("T.warpgroup_arrive", "T.warpgroup_commit_batch", "T.warpgroup_fence_operand", "T.ptx_arrive_barrier",
                  "T.ptx_fence_barrier_init", "T.ptx_init_barrier_thread_count", "L16:wgmma-control")
def test_raw_names_of_barriers_and_products_on_the_cpu():
    a, b = numbers(64, 64), numbers(32, 64)
    want = product(a + np.float16(1), b.T, np.float32)
    assert np.array_equal(on_cpu(from_registers(64, 32, 64), a, b, want), want)
    x = np.arange(512, dtype=np.int32).reshape(4, 128)
    assert np.array_equal(on_cpu(raw_barriers(), x, x), 2 * x)
    r = rng.standard_normal((6, 128)).astype(np.float32)
    assert np.array_equal(on_cpu(rows(128), r, r), 2 * r)


@pytest.mark.spec("T.alloc_cluster_barrier", "T.block_rank_in_cluster", "T.copy_cluster", "T.cluster_arrive",
                  "T.cluster_sync", "T.cluster_wait", "T.mbarrier_expect_tx", "L17:clusters", "L6:alloc_cluster_barrier",
                  "T.ClusterKernel")
def test_blocks_of_a_cluster_reach_each_other_on_the_cpu():
    a, b = numbers(256, 192), numbers(192, 128)
    assert np.array_equal(on_cpu(gemm_cluster(256, 128, 192), a, b, want := product(a, b)), want)
    for way, size in (("elements", 4), ("bulk", 2), ("rows", 2)):
        x = numbers(8, 32, 64)
        moved = np.roll(x.reshape(8 // size, size, 32, 64), 1, axis=1).reshape(x.shape)
        assert np.array_equal(on_cpu(shift(way, size), x, x), moved)
    x = numbers(4, 64, 64)
    assert np.array_equal(on_cpu(broadcast(2, 2), x, want := np.repeat(x, 2, axis=0)), want)


@pytest.mark.spec("L16:mbarriers")
def test_a_deadlock_on_the_cpu_is_an_error_of_the_call():
    f = gemm_ws(128, 128, 128, parity=0)
    for _ in range(2):  # what was left waiting is freed: the next call begins anew
        with pytest.raises(RuntimeError, match="wait for each other for ever: check parities"):
            on_cpu(f, numbers(128, 128), numbers(128, 128), numbers(128, 128))


@pytest.mark.spec("T.alloc_barrier", "T.mbarrier_arrive")
def test_more_arrivals_than_a_barrier_counts_are_an_error_of_the_call_on_the_cpu():
    @T.prim_func
    def f(A: T.Tensor((128,), "int32")):
        with T.Kernel(2, threads=128):
            bar = T.alloc_barrier([1])
            if T.get_thread_binding() == 0:
                T.mbarrier_expect_tx(bar, 64)  # which nothing brings
            if T.get_thread_binding() < 2:
                T.mbarrier_arrive(bar)
            A[T.get_thread_binding()] = 1

    with pytest.raises(RuntimeError, match="more threads arrive at a barrier than its count"):
        on_cpu(f, np.zeros(128, np.int32))


@pytest.mark.spec("T.alloc_cluster_barrier", "T.block_rank_in_cluster")
@pytest.mark.spec("L17:clusters")
@pytest.mark.parametrize("size", [2, 4])
def test_cluster_that_shares_a_tile_by_hand(size):
    m = 128 * size
    a, b = numbers(m, 256), numbers(256, 128)
    assert np.array_equal(both(gemm_cluster(m, 128, 256, size=size), a, b, np.zeros((m, 128), np.float16)), product(a, b))


def test_loads_for_a_cluster_that_do_not_wait_for_its_consumers_are_refused():
    f = gemm_cluster(256, 128, 320, remote=False, S=2)
    with pytest.raises(TileLangError, match=r"a copy on full\[0\] of block 1 may come before") as e:
        lower(f.func, SM90A)
    assert e.value.kind == "sync-unordered" and "hopper_by_hand.py" in str(e.value)


@pytest.mark.spec("T.warpgroup_arrive", "T.warpgroup_commit_batch", "T.warpgroup_fence_operand")
@pytest.mark.spec("L16:wgmma-control")
def test_operand_in_registers_and_raw_names():
    a, b = numbers(64, 64), numbers(32, 64)
    got = both(from_registers(64, 32, 64), a, b, np.zeros((64, 32), np.float32))
    assert np.array_equal(got, product(a + np.float16(1), b.T, np.float32))


@pytest.mark.parametrize("workers", [1, 3, 5])
@pytest.mark.parametrize("kernel", [persistent, persistent_loop])
def test_persistent_roles_walk_over_tiles_of_their_own(workers, kernel):
    a, b = numbers(256, 192), numbers(128, 192)
    got = both(kernel(256, 128, 192, workers), a, b, np.zeros((256, 128), np.float16))
    assert np.array_equal(got, product(a, b.T))


@pytest.mark.parametrize("program, sizes, nt", [
    (gemm_ws, (256, 128, 192), False), (gemm_two_consumers, (128, 256, 320), True), (gemm_cluster, (256, 128, 128), False),
    (persistent_loop, (256, 64, 128), True)])
def test_what_the_compiler_does_by_itself_leaves_them_alone(program, sizes, nt):
    """With tl.enable_hopper the stores of accumulators go by TMA: the roles and their barriers stay."""
    m, n, k = sizes
    a, b = numbers(m, k), numbers(n, k) if nt else numbers(k, n)
    lowered = lower(program(m, n, k).func, SM90A, {"tl.enable_hopper": True})
    got = run_device(lowered, [a, b, np.zeros((m, n), np.float16)]).outputs["C"]
    assert np.array_equal(got, product(a, b.T if nt else b))
    if nvrtc.available():
        cubin = nvrtc.compile_cubin(print_kernel(lowered.kernels[0]), "sm_90a")
        assert "C75" not in cubin.log and cubin.spills == 0, cubin.log


PROGRAMS = {
    "ws": (lambda: gemm_ws(256, 256, 512), ("tl::tma_load_2d", "wgmma_m64n128k16", "tl::mbarrier_expect_tx")),
    "two_consumers": (lambda: gemm_two_consumers(256, 256, 512), ("set_max_nreg<24, false>", "set_max_nreg<240, true>",
                      "tl::wgmma_wait<1>()", "tl::tma_store_2d", "tl::bulk_wait_read<0>()", "named_barrier(5, 256)")),
    "cluster": (lambda: gemm_cluster(256, 128, 512), ("__cluster_dims__(1, 2, 1)", "tma_load_2d_multicast",
                "mbarrier_arrive_remote", "tl::cluster_sync()")),
    "registers": (lambda: from_registers(64, 64, 64), ("wgmma_m64n64k16_f32_f16_f16_rs", "tma_load_2d_hint")),
    "persistent": (lambda: persistent(256, 128, 192), ("while (", "wgmma_m64n64k16")),
    "raw_barriers": (raw_barriers, ("mbarrier_init(&bars[1], 128u)",)),
    "elements": (lambda: shift("elements"), ("tl::cluster_store(&R[",)),
    "bulk": (lambda: shift("bulk"), ("bulk_copy_cluster(&R[0], &S[0], 4096u, &bar[0]",)),
    "rows": (lambda: shift("rows"), ("128u, &bar[0]",)),
    "broadcast": (broadcast, ("tma_load_3d_multicast",)),
    "dependent": (dependent, ("griddepcontrol.wait;", "griddepcontrol.launch_dependents;")),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_assemble_clean(name):
    program, texts = PROGRAMS[name]
    text = assembled(program())
    assert all(t in text for t in texts), [t for t in texts if t not in text]


def test_roles_need_no_barriers_but_the_users():
    text = kernel_text(gemm_ws(256, 128, 512), **{"tl.enable_hopper": False})  # nor TMA stores of the compiler's
    body = text[text.index("if (threadIdx.x >= 128)"):]
    assert "__syncthreads" not in body and "named_barrier" not in body and "fence_proxy" not in body


@pytest.mark.parametrize("n, boxes", [(128, 1), (256, 1), (768, 3), (1024, 4)])
def test_rows_by_tma_both_ways(n, boxes):
    a = rng.standard_normal((6, n)).astype(np.float32)
    f = rows(n, eviction="evict_last")
    assert np.array_equal(both(f, a, np.zeros_like(a)), 2 * a)
    text = assembled(f)
    assert text.count("tl::tma_load_2d_hint(&R") == text.count("tl::tma_store_2d(&W") == boxes


def test_rows_that_no_boxes_make_up_are_refused():
    with pytest.raises(TileLangError, match="the slice is 514 of 514 columns of `R`: no equal boxes") as e:
        lower(rows(514).func, SM90A)
    assert e.value.kind == "tma-copy"


def test_jit_of_the_worked_program_on_both_interpreters():
    @tilelang.jit(out_idx=[2], execution_backend="tile")
    def tiles(m, n, k):
        return gemm_ws(m, n, k)

    @tilelang.jit(out_idx=[2], execution_backend="simulator", target={"kind": "cuda", "arch": "sm_90a"})
    def device(m, n, k):
        return gemm_ws(m, n, k)

    a, b = numbers(128, 192), numbers(192, 128)
    for make in (tiles, device):
        assert np.array_equal(np.asarray(make(128, 128, 192)(a, b)), product(a, b))


@pytest.mark.spec("T.annotate_producer_reg_dealloc", "T.annotate_consumer_reg_alloc", "T.no_set_max_nreg", "L15:register-hints")
@pytest.mark.parametrize("asked, sets", [((), ("<24, false>", "<240, true>")), ((40, 232), ("<40, false>", "<232, true>")),
                                         ((64, 240), ("<24, false>", "<240, true>")), (None, ())])
def test_registers_of_the_roles_that_the_compiler_makes(asked, sets):
    @T.prim_func
    def f(A: T.Tensor((512, 512), f16), B: T.Tensor((512, 512), f16), C: T.Tensor((512, 512), f16)):
        with T.Kernel(4, 4, threads=256) as (bx, by):
            As, Bs = T.alloc_shared((128, 64), f16), T.alloc_shared((128, 64), f16)
            F = T.alloc_fragment((128, 128), "float32")
            if asked is None:
                T.disable_warp_group_reg_alloc()
            elif asked:
                T.annotate_producer_reg_dealloc(asked[0])
                T.annotate_consumer_reg_alloc(asked[1])
            T.clear(F)
            for k in T.Pipelined(8, num_stages=4):
                T.copy(A[by * 128, k * 64], As)
                T.copy(B[bx * 128, k * 64], Bs)
                T.gemm(As, Bs, F, transpose_B=True)
            T.copy(F, C[by * 128, bx * 128])

    (k,) = lower(f.func, SM90A, {"tl.enable_hopper": True, "tl.resize_blocks": False}).kernels
    text = print_kernel(k)
    assert text.count("tl::set_max_nreg<") == len(sets) and all(f"set_max_nreg{s}" in text for s in sets), text


def test_clusters_that_the_program_launches_stay_its_own():
    @T.prim_func
    def f(A: T.Tensor((512, 512), f16), B: T.Tensor((512, 512), f16), C: T.Tensor((512, 512), "float32")):
        with T.ClusterKernel(4, 4, cluster_dims=(2, 1), threads=256) as (bx, by):
            As, Bs = T.alloc_shared((128, 64), f16), T.alloc_shared((128, 64), f16)
            F = T.alloc_fragment((128, 128), "float32")
            T.fill(F, T.cast(T.block_rank_in_cluster(), "float32"))
            for k in T.Pipelined(8, num_stages=4):
                T.copy(A[by * 128, k * 64], As)
                T.copy(B[bx * 128, k * 64], Bs)
                T.gemm(As, Bs, F, transpose_B=True)
            T.copy(F, C[by * 128, bx * 128])

    launch = lower(f.func, SM90A, {"tl.enable_hopper": True}).kernels[0].launch
    assert launch.plan.cluster == (2, 1, 1) and len(launch.grid) == 2 and launch.num_threads == 384
    assert any("the program chooses its clusters itself" in r for r in launch.plan.report)


# ---- barriers, clusters, launches ---------------------------------------------------------------------------------------


@pytest.mark.spec("T.ptx_arrive_barrier", "T.ptx_fence_barrier_init", "T.ptx_init_barrier_thread_count")
def test_barriers_that_the_program_sets_up():
    x = np.arange(512, dtype=np.int32).reshape(4, 128)
    assert np.array_equal(both(raw_barriers(), x, np.zeros_like(x)), 2 * x)
    assert "mbarrier_init" in assembled(raw_barriers())
    with pytest.raises(TileLangError, match=r"bars\[0\] is used before mbarrier_init") as e:
        run_tile(raw_barriers(setup=False), [x, np.zeros_like(x)])
    assert e.value.kind == "sim-mbarrier"


@pytest.mark.spec("T.cluster_arrive", "T.cluster_sync", "T.cluster_wait", "T.fence_proxy_async",
                  "T.mbarrier_expect_tx")
@pytest.mark.spec("L17:clusters")
@pytest.mark.parametrize("way", ["elements", "bulk", "rows"])
@pytest.mark.parametrize("size", [2, 4])
def test_tiles_go_to_the_next_block_of_the_cluster(way, size):
    a = numbers(8, 32, 64)
    got = both(shift(way, size), a, np.zeros_like(a))
    assert np.array_equal(got, np.roll(a.reshape(8 // size, size, 32, 64), 1, axis=1).reshape(a.shape))


@pytest.mark.spec("T.copy_cluster")
def test_one_load_for_the_blocks_of_a_mask():
    a = numbers(4, 64, 64)
    for mask in (3, 1, 2):
        got = both(broadcast(2, mask), a, np.zeros((8, 64, 64), np.float16))
        assert np.array_equal(got, np.repeat(a, 2, axis=0))


@pytest.mark.spec("L17:pdl")
def test_dependent_launches_wait_before_they_read():
    f = dependent()
    a = rng.standard_normal(256).astype(np.float32)
    assert np.array_equal(both(f, a, np.zeros_like(a)), a + 1)
    launch = lower(f.func, SM90A).kernels[0].launch
    assert launch.plan.pdl is True
    older = lower(f.func, Target({"kind": "cuda", "arch": "sm_80"})).kernels[0]
    assert not older.launch.plan.pdl and "griddep" not in print_kernel(older)
    b = np.zeros_like(a)
    tilelang.compile(f, target="cpu")(a, b)
    assert np.array_equal(b, a + 1)


def by_other_names(apart=False):
    """A copy of A for the two blocks of a cluster; apart: each stores its own."""
    @T.prim_func
    def f(A: T.Tensor((64, 64), "float16"), B: T.Tensor((128 if apart else 64, 64), "float16")):
        with T.ClusterKernel(2, cluster_dims=2, threads=128) as bx:
            S = T.alloc_shared((64, 64), "float16")
            bar, other = T.alloc_barrier([2]), T.alloc_cluster_barrier([128, 256])
            if T.get_thread_binding() == 0:
                T.ptx_arrive_barrier_expect_tx(bar, 0)
                T.mbarrier_expect_tx(bar, 0)
                T.mbarrier_arrive_expect_tx(bar, 0)
            T.barrier_wait(bar, 0)
            T.tma_copy(A, S, barrier=other[0], leader_scope_threads=128)
            T.barrier_arrive(other[0])
            T.barrier_wait(other[0])
            T.ptx_arrive_cluster_barrier(other[1], 0)
            T.mbarrier_arrive(other[1], cta_id=1)
            T.mbarrier_wait_parity(other[1], 0)
            T.cluster_arrive_relaxed()
            T.cluster_wait()
            T.set_max_nreg(240, False)
            if apart:
                T.tma_copy(S, B[bx * 64, 0])
            else:
                T.tma_copy(S, B)
            T.tma_store_arrive()
            T.tma_store_wait(0, read=False)

    return f


@pytest.mark.spec("T.ClusterKernel", "T.barrier_arrive", "T.barrier_wait", "T.set_max_nreg", "T.tma_store_arrive",
                  "T.tma_store_wait", "L6:alloc_cluster_barrier")
def test_both_blocks_of_a_cluster_store_a_copy_of_their_own():
    a = numbers(64, 64)
    assert np.array_equal(both(by_other_names(apart=True), a, np.zeros((128, 64), np.float16)), np.concatenate([a, a]))


@pytest.mark.spec("T.barrier_arrive", "T.barrier_wait", "T.set_max_nreg", "T.tma_store_arrive", "T.tma_store_wait")
@pytest.mark.spec("L6:alloc_cluster_barrier")
def test_arrivals_and_expected_bytes_by_their_other_names():
    f = by_other_names()
    a = numbers(64, 64)
    assert np.array_equal(on_cpu(f, a, a), a)
    # Both blocks store the same tile: on the device that is a race, so the simulator must say so.
    assert np.array_equal(run_tile(f, [a, np.zeros_like(a)])["B"], a)
    with pytest.raises(TileLangError, match="sim-race"):
        run_device(lower(f.func, SM90A), [a, np.zeros_like(a)])
    assert "bulk_wait<0>" in assembled(f)


# ---- what cannot be -----------------------------------------------------------------------------------------------------

A100, H100 = Target({"kind": "cuda", "arch": "sm_80"}), Target({"kind": "cuda", "arch": "sm_90"})


@pytest.mark.spec("L24:arch")
@pytest.mark.parametrize("program, target, text", [
    (lambda: gemm_ws(128, 128, 64), A100, "T.alloc_barrier requires sm_90 or newer, got sm_80|T.wgmma_gemm requires sm_90a"),
    (lambda: gemm_ws(128, 128, 64), H100, "requires sm_90a, got sm_90"),
    (lambda: shift("elements"), A100, "T.ClusterKernel requires sm_90 or newer, got sm_80"),
])
def test_targets_without_the_instructions_are_refused_by_name(program, target, text):
    with pytest.raises(ValueError, match=text) as e:
        tilelang.compile(program(), target=target)
    assert e.value.kind == "needs-arch" and "hopper_by_hand.py" in str(e.value)


@pytest.mark.spec("T.alloc_barrier", "T.mbarrier_arrive", "T.mbarrier_wait_parity", "T.tma_copy", "T.wait_wgmma",
                  "T.wgmma_gemm", "T.warpgroup_wait", "T.wgmma_mma", "T.alloc_cluster_barrier", "T.block_rank_in_cluster",
                  "T.warpgroup_arrive", "T.warpgroup_commit_batch", "T.warpgroup_fence_operand", "T.cluster_arrive",
                  "T.cluster_sync", "T.cluster_wait", "T.fence_proxy_async", "T.mbarrier_expect_tx", "T.copy_cluster",
                  "T.barrier_arrive", "T.barrier_wait", "T.set_max_nreg", "T.tma_store_arrive", "T.tma_store_wait")
@pytest.mark.spec("L6:alloc_barrier", "L6:alloc_cluster_barrier", "L11:wgmma_gemm", "L11:wait_wgmma", "L15:max_nreg",
                  "L16:mbarriers", "L16:tma", "L16:wgmma-control", "L17:clusters")
def test_older_targets_refuse_every_program_by_hand():
    for build in (lambda: gemm_ws(128, 128, 64), lambda: gemm_two_consumers(128, 128, 64), lambda: from_registers(64, 32, 64),
                  lambda: gemm_cluster(256, 128, 256, size=2), lambda: shift("bulk"), lambda: broadcast(2, 3), raw_barriers,
                  by_other_names):
        with pytest.raises(TileLangError, match="requires sm_90") as e:
            tilelang.compile(build(), target=A100)
        assert e.value.kind == "needs-arch"


def refused(body, kind, match, threads=256, target=SM90A):
    """body(A, B, S, F): statements of a kernel over (128, 128) float16 tiles."""
    with pytest.raises(TileLangError, match=match) as e:
        lower(body().func, target)
    assert e.value.kind == kind
    return e.value


def test_a_fragment_belongs_to_one_role():
    def program():
        @T.prim_func
        def f(A: T.Tensor((64, 64), "float16")):
            with T.Kernel(1, threads=256):
                F = T.alloc_fragment((64, 64), "float16")
                with T.ws(0):
                    T.clear(F)
                with T.ws(1):
                    T.copy(F, A)
        return f

    refused(program, "role-fragment", "`F` is used by warp group 1, and by warp group 0")


def test_tile_operations_of_scattered_roles_are_refused():
    def scattered():
        @T.prim_func
        def f(A: T.Tensor((64,), "float16")):
            with T.Kernel(1, threads=384), T.ws(0, 2):
                T.fill(A, 1.0)
        return f

    refused(scattered, "role-place", "warps that follow each other")


@pytest.mark.parametrize("threads, roles", [(384, ((0, 1), (1,))), (192, ((1,),))])
def test_roles_inside_each_other_and_of_the_last_warps(threads, roles):
    """T.ws(1) of 192 threads has two warps."""
    @T.prim_func
    def f(A: T.Tensor((256,), "float16"), B: T.Tensor((256,), "float16")):
        with T.Kernel(1, threads=threads):
            s = T.alloc_shared((256,), "float16")
            with T.ws(*roles[0]):
                with T.ws(*roles[-1]):
                    T.copy(A, s)
                    for i in T.Parallel(256):
                        B[i] = s[255 - i]

    a = np.arange(256, dtype=np.float16)
    got = run_device(lower(f.func, SM90A), [a, np.zeros(256, np.float16)]).outputs["B"]
    assert np.array_equal(got, a[::-1])


@pytest.mark.spec("L16:tma")
def test_tiles_that_tma_cannot_move_are_refused():
    def program(shape, take, tile):
        @T.prim_func
        def f(A: T.Tensor(shape, "float16")):
            with T.Kernel(1, threads=128):
                S = T.alloc_shared(tile, "float16")
                bar = T.alloc_barrier(128)
                T.tma_copy(take(A), S, barrier=bar)
        return lambda: f

    refused(program((64, 100), lambda A: A[0:64, 0:100], (64, 100)), "tma-copy", "rows of `S` are no whole swizzle atoms")
    refused(program((64, 36), lambda A: A[0:64, 0:32], (64, 32)), "tma-copy", "16")
    refused(program((4096,), lambda A: A[0:60], (60,)), "tma-copy", "no equal boxes of multiples of 16 bytes")
    refused(program((8, 64, 64), lambda A: A[0:2, 0:64, 0:64], (2, 64, 64)), "tma-copy", "no matrix")


def test_loads_of_what_the_kernel_writes_or_fills_otherwise_are_refused():
    def written():
        @T.prim_func
        def f(A: T.Tensor((64, 64), "float16")):
            with T.Kernel(1, threads=128):
                S, bar = T.alloc_shared((64, 64), "float16"), T.alloc_barrier(128)
                T.fill(A, 1.0)
                T.tma_copy(A, S, barrier=bar)
        return f

    def filled():
        @T.prim_func
        def f(A: T.Tensor((64, 64), "float16")):
            with T.Kernel(1, threads=128):
                S, bar = T.alloc_shared((64, 64), "float16"), T.alloc_barrier(128)
                T.annotate_safe_value({A: 1.0})
                T.tma_copy(A, S, barrier=bar)
        return f

    refused(written, "tma-copy", "is written by the kernel")
    refused(filled, "tma-copy", "outside `A` reads as")


def test_roles_of_a_block_that_is_no_whole_warps():
    def program():
        @T.prim_func
        def f(A: T.Tensor((64,), "float16")):
            with T.Kernel(1, threads=200), T.ws(1):
                T.fill(A, 1.0)
        return f

    refused(program, "role-place", "whole warps")


@pytest.mark.spec("L11:wgmma_gemm")
def test_products_without_a_warp_group_instruction_are_refused():
    def program():
        @T.prim_func
        def f(C: T.Tensor((32, 32), "float32")):
            with T.Kernel(1, threads=128):
                S, F = T.alloc_shared((32, 64), "float16"), T.alloc_fragment((32, 32), "float32")
                T.clear(S)
                T.wgmma_gemm(S, S, F, transpose_B=True)
                T.wait_wgmma(0)
                T.copy(F, C)
        return f

    refused(program, "wgmma-gemm", r"T.wgmma_gemm\(\) requires Hopper WGMMA lowering, but constraints were not satisfied")


@pytest.mark.parametrize("call, exception, text", [
    (lambda b, S, A: T.alloc_barrier([]), ValueError, "number of arrivals"),
    (lambda b, S, A: T.alloc_barrier(0), ValueError, "number of arrivals"),
    (lambda b, S, A: T.mbarrier_arrive(b), TypeError, "takes one barrier"),
    (lambda b, S, A: T.mbarrier_arrive(S), TypeError, "takes one barrier"),
    (lambda b, S, A: T.mbarrier_arrive(b[0], cta_id=1), AssertionError, "T.alloc_cluster_barrier"),
    (lambda b, S, A: T.mbarrier_wait_parity(b[0], 0.5), TypeError, "an integer"),
    (lambda b, S, A: T.tma_copy(A, S), ValueError, "needs the barrier"),
    (lambda b, S, A: T.tma_copy(S, A, barrier=b[0]), ValueError, "takes no barrier"),
    (lambda b, S, A: T.tma_copy(S, S, barrier=b[0]), ValueError, "between global and shared"),
    (lambda b, S, A: T.tma_copy(A, S, barrier=b[0], cluster_mask=0), ValueError, "positive bit mask"),
    (lambda b, S, A: T.tma_copy(A, S, barrier=b[0], cluster_mask=2), ValueError, "beyond the 1 of the cluster"),
    (lambda b, S, A: T.tma_copy(A, S, barrier=b[0], leader_scope_threads=33), ValueError, "multiple of 32"),
    (lambda b, S, A: T.tma_copy(A, S, barrier=b[0], eviction_policy="never"), KeyError, "eviction policy"),
    (lambda b, S, A: T.copy_cluster(A, S), ValueError, "either dst_block or cluster_mask"),
    (lambda b, S, A: T.copy_cluster(A, S, dst_block=1), ValueError, "shared to shared"),
    (lambda b, S, A: T.set_max_nreg(100, True), ValueError, "multiple of 8"),
    (lambda b, S, A: T.wait_wgmma(-1), ValueError, "number of groups"),
    (lambda b, S, A: T.warpgroup_fence_operand(S), ValueError, "takes registers"),
    (lambda b, S, A: T.warpgroup_fence_operand(T.address_of(S[0, 0])), ValueError, "needs num_regs"),
    (lambda b, S, A: T.warpgroup_fence_operand(S, dtype="float32"), ValueError, "holds float16"),
    (lambda b, S, A: T.wgmma_gemm(S, S, S, clear_accum=1), TypeError, "clear_accum must be a bool"),
    (lambda b, S, A: T.ws(2), AssertionError, "has no warp group 2"),
])
def test_arguments_that_make_no_sense_are_refused_at_once(call, exception, text):
    with pytest.raises(exception, match=text):
        @T.prim_func
        def f(A: T.Tensor((64, 64), "float16")):
            with T.Kernel(1, threads=256):
                S = T.alloc_shared((64, 64), "float16")
                b = T.alloc_barrier([1, 1])
                call(b, S, A)


def test_barriers_are_allocated_at_the_top():
    with pytest.raises(ValueError, match="barriers live as long as the kernel"):
        @T.prim_func
        def f(A: T.Tensor((64, 64), "float16")):
            with T.Kernel(1, threads=256), T.ws(0):
                T.alloc_barrier(1)


def test_registers_of_a_local_array_are_pinned():
    @T.prim_func
    def f(A: T.Tensor((128,), "float32")):
        with T.Kernel(1, threads=128):
            x = T.alloc_local((8,), "float32")
            for i in T.unroll(8):
                x[i] = 1.0
            T.warpgroup_fence_operand(x, offset=0, num_regs=4)
            T.warpgroup_fence_operand(T.address_of(x[4]), num_regs=4, dtype="float32")
            A[T.get_thread_binding()] = x[7]

    text = kernel_text(f)
    assert "wgmma_pin<4>(&x[0])" in text and "wgmma_pin<4>(&x[4])" in text


def test_passes_leave_programs_without_these_names_alone():
    """check_hopper and lower_manual_warp_roles."""
    from tilelang.transform.check.check_hopper import check_hopper
    from tilelang.transform.framework.pass_ import PassContext
    from tilelang.transform.legalize.manual_warp_roles import lower_manual_warp_roles

    @T.prim_func
    def f(A: T.Tensor((64, 64), "float16")):
        with T.Kernel(1, threads=128):
            T.fill(A, 1.0)

    cx = PassContext(SM90A)
    assert check_hopper(f.func, cx) == f.func and lower_manual_warp_roles(f.func, cx) == f.func


def test_accumulators_are_pinned_by_the_role_that_waits_for_them():
    """Two consumers, each with an accumulator of its own, over two blocks of T.ws each."""
    @T.prim_func
    def f(A: T.Tensor((64, 64), "float16"), C: T.Tensor((2, 64, 64), "float32")):
        with T.Kernel(1, threads=256):
            S = T.alloc_shared((64, 64), "float16")
            F, G = T.alloc_fragment((64, 64), "float32"), T.alloc_fragment((64, 64), "float32")
            T.copy(A, S)
            with T.ws(0):
                T.wgmma_gemm(S, S, F, clear_accum=True)
            with T.ws(1):
                T.wgmma_gemm(S, S, G, transpose_B=True, clear_accum=True)
            with T.ws(0):
                T.wait_wgmma(0)
                T.copy(F, C[0, 0:64, 0:64])
            with T.ws(1):
                T.wait_wgmma(0)
                T.copy(G, C[1, 0:64, 0:64])

    a = numbers(64, 64)
    got = both(f, a, np.zeros((2, 64, 64), np.float32))
    assert np.array_equal(got[0], product(a, a, np.float32)) and np.array_equal(got[1], product(a, a.T, np.float32))
    text = kernel_text(f)
    first, second = (text.index(f"tl::wgmma_wait<0>();\n    tl::wgmma_pin<32>(&{x}[0])") for x in "FG")
    assert first < second and text.count("wgmma_pin<32>(&F[0])") == text.count("wgmma_pin<32>(&G[0])") == 2
