"""Lowering for sm_90a: wgmma, TMA loads and warp roles.  Behind tl.enable_hopper."""

import numpy as np
import pytest
from hopper_lowered import launch_of, lowered, ops, report
from programs import attention, cases, gemm

import tilelang.language as T
from tilelang.codegen.cuda.printer import print_kernel
from tilelang.ir import Evaluate, For, If, Launch, numpy_dtype, walk
from tilelang.ir.expr import Call
from tilelang.ops import Copy, Gemm
from tilelang.runtime import nvrtc
from tilelang.simulator import run_device
from tilelang.target import Target
from tilelang.transform.framework.pass_ import PassContext
from tilelang.transform.pipeline import lower
from tilelang.transform.schedule.specialize_warps import specialize_warps

CASES = {c.name: c for c in cases() if c.name.startswith(("gemm", "attention"))}
MODES = {"roles": {}, "one_role": {"tl.disable_warp_specialized": True}}


# ---- meaning --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", CASES)
def test_computes_the_program(name, mode):
    case = CASES[name]
    func = case.program().func
    program = lower(func, Target({"kind": "cuda", "arch": "sm_90a"}), {"tl.enable_hopper": True, **MODES[mode]})
    inputs = case.inputs(np.random.default_rng(0))
    want = case.reference(*inputs)
    given = iter(inputs)
    outputs = dict(zip([i % len(func.buffers) for i in case.out_idx], want))
    args = {b.name: np.zeros(outputs[i].shape, numpy_dtype(b.dtype)) if i in outputs else next(given)
            for i, (_, b) in enumerate(func.buffers)}
    got = run_device(program, args)
    for i, w in outputs.items():
        assert np.abs(got.outputs[func.buffers[i][1].name].astype(np.float64) - w).max() <= case.bound(*inputs)


SHAPES = [dict(m=130, n=136, k=200, bm=128, bn=128, bk=64, threads=256, tb=True, stages=3),
          dict(m=64, n=256, k=72, bm=64, bn=256, bk=64, threads=256, stages=2),
          dict(m=192, n=96, k=128, bm=192, bn=96, bk=64, threads=384, stages=4, ta=True),
          dict(m=72, n=64, k=64, bm=64, bn=64, bk=16, threads=128, stages=2, ta=True, tb=True),
          dict(m=128, n=40, k=96, bm=128, bn=40, bk=32, threads=128, stages=2)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("mode", MODES)
def test_tiles_of_many_forms(shape, mode):
    rng = np.random.default_rng(1)
    m, n, k, ta, tb = (shape.get(x, False) for x in ("m", "n", "k", "ta", "tb"))
    a, b = (rng.integers(-3, 4, s).astype(np.float16) for s in ((k, m) if ta else (m, k), (n, k) if tb else (k, n)))
    program = lowered(gemm(**shape), **{k.removeprefix("tl."): v for k, v in MODES[mode].items()})
    assert "wgmma" in ops(program.kernels[0].launch)
    got = run_device(program, {"A": a, "B": b, "bias": np.zeros(n, np.float32), "C": np.zeros((m, n), np.float16)})
    want = (a.T if ta else a).astype(np.float64) @ (b.T if tb else b).astype(np.float64)
    assert np.array_equal(got.outputs["C"].astype(np.float64), want.astype(np.float16).astype(np.float64))


def test_the_pass_alone():
    func = gemm(m=128, n=128, k=128, stages=4).func
    target = Target({"kind": "cuda", "arch": "sm_90a"})
    assert specialize_warps(func, PassContext(target, {"tl.enable_hopper": False})) is func
    on = PassContext(target, {"tl.enable_hopper": True})
    launch = next(x for x in walk(specialize_warps(func, on).body) if isinstance(x, Launch))
    assert launch.threads == (256, 1, 1) and launch.plan.compute_threads == 128
    assert [x.plan.tma for x in walk(launch) if isinstance(x, Copy)] == [True, True, False]
    (product,) = [x for x in walk(launch) if isinstance(x, Gemm)]
    assert product.a.buffer.shape == (4, 64, 32)


# ---- structure ------------------------------------------------------------------------------------------------------


def test_off_when_asked_and_on_other_architectures():
    for arch, options in (("sm_90a", {"enable_hopper": False}), ("sm_90a", {"disable_thread_storage_sync": True}),
                          ("sm_90", {}), ("sm_80", {}), ("sm_100a", {})):
        found = ops(lowered(gemm(), arch, **options).kernels[0].launch)
        assert "mma" in found and not {"wgmma", "tma_load", "fence_proxy_async"} & set(found)


def test_roles():
    launch = launch_of(gemm(m=256, n=256, k=256, bm=128, bn=128, bk=64, threads=256, stages=4, tb=True), cluster=1)
    assert launch.threads == (384, 1, 1)
    (branch,) = [x for x in walk(launch) if isinstance(x, If) and isinstance(x.cond, Call)
                 and x.cond.op == "in_warp_groups"]
    producer, consumer = set(ops(branch.then)), set(ops(branch.orelse))
    assert "tma_load" in producer and not {"wgmma", "sync_threads", "cp_async"} & producer
    assert "wgmma" in consumer and not {"tma_load", "sync_threads", "cp_async"} & consumer
    assert [(m[1].name, tuple(m[2])) for m in launch.plan.tensor_maps] == [
        ("A", (64, 128)), ("B", (64, 128)), ("C", (64, 64))]
    counts = {x.buffer.name: tuple(int(n) for n in x.buffer.facts.arrive) for x in walk(launch)
              if hasattr(x, "buffer") and getattr(x.buffer, "scope_name", "") == "shared.barrier"}
    assert sorted(counts.values()) == [(1,) * 4, (8,) * 4]
    expected = [int(x.args[1].value) for x in walk(launch) if isinstance(x, Call) and x.op == "mbarrier_arrive_expect_tx"]
    assert expected == [2 * 128 * 64 * 2]
    assert {x.options.n: x.options.inc for x in walk(launch) if isinstance(x, Call) and x.op == "set_max_nreg"} == {
        24: False, 240: True}


def test_keys_and_values_have_rings_of_their_own():
    launch = launch_of(attention(1, 1, 256, 64))
    names = {x.buffer.name for x in walk(launch) if getattr(getattr(x, "buffer", None), "scope_name", "") == "shared.barrier"}
    assert names == {"Ks_full", "Ks_empty", "Vs_full", "Vs_empty", "Qs_full"}


def test_writes_are_fenced_before_the_barrier_that_matrix_reads_wait_at():
    launch = launch_of(gemm(), disable_warp_specialized=True)
    calls = [x.call.op for x in walk(launch) if isinstance(x, Evaluate)]
    barriers = [k for k, op in enumerate(calls) if op == "sync_threads"]
    assert barriers and all(calls[k - 1] == "fence_proxy_async" for k in barriers)
    assert launch.plan.sync_report.startswith("ordered:")


def test_the_second_product_runs_under_the_work_on_the_first():
    launch = launch_of(attention(1, 1, 512, 64))
    loop = next(x for x in walk(launch) if isinstance(x, For) and "wgmma" in ops(x.body))
    waits = [(x.op, x.options and x.options.n) for x in walk(loop.body)
             if isinstance(x, Call) and x.op in ("wgmma_commit", "wgmma_wait")]
    assert waits == [("wgmma_commit", None), ("wgmma_commit", None), ("wgmma_wait", 1), ("wgmma_wait", 0)]


@pytest.mark.parametrize("seq", [1, 64, 65, 300])
def test_attention_of_few_and_many_blocks(seq):
    rng = np.random.default_rng(3)
    q, k, v = (rng.standard_normal((1, seq, 1, 64)).astype(np.float16) for _ in range(3))
    program = lowered(attention(1, 1, seq, 64, causal=True, threads=128))
    assert "tma_load" in ops(program.kernels[0].launch)
    got = run_device(program, {"Q": q, "K": k, "V": v, "O": np.zeros_like(q)}).outputs["O"][0, :, 0].astype(np.float64)
    s = q[0, :, 0].astype(np.float64) @ k[0, :, 0].astype(np.float64).T / 8
    p = np.exp(np.where(np.tril(np.ones((seq, seq), bool)), s, -np.inf))
    want = p / p.sum(1, keepdims=True) @ v[0, :, 0].astype(np.float64)
    assert np.abs(got - want).max() < 6 * 2.0**-11 * np.abs(v.astype(np.float64)).max()


def strided(k):
    return gemm(m=128, n=128, k=k, tb=True)


def leaves_early():
    @T.prim_func
    def main(A: T.Tensor((256, 256), "float16"), B: T.Tensor((256, 256), "float16"), C: T.Tensor((256, 256), "float16"),
             n: T.int32):
        with T.Kernel(4, 4, threads=128) as (bx, by):
            As, Bs = T.alloc_shared((64, 64), "float16"), T.alloc_shared((64, 64), "float16")
            Cf = T.alloc_fragment((64, 64), "float32")
            if by > 0:
                if bx >= n:
                    T.thread_return()
            T.clear(Cf)
            for k in T.Pipelined(4, num_stages=2):
                T.copy(A[by * 64, k * 64], As)
                T.copy(B[k * 64, bx * 64], Bs)
                T.gemm(As, Bs, Cf)
            T.copy(Cf, C[by * 64, bx * 64])

    return main


def in_place():
    @T.prim_func
    def main(A: T.Tensor((256, 256), "float16"), C: T.Tensor((256, 256), "float16")):
        with T.Kernel(4, 4, threads=128) as (bx, by):
            As, Bs = T.alloc_shared((64, 64), "float16"), T.alloc_shared((64, 64), "float16")
            Cf = T.alloc_fragment((64, 64), "float32")
            T.clear(Cf)
            for k in T.Pipelined(4, num_stages=2):
                T.copy(A[by * 64, k * 64], As)
                T.copy(A[k * 64, bx * 64], Bs)
                T.gemm(As, Bs, Cf)
            T.copy(Cf, A[by * 64, bx * 64])

    return main


def indexed(table_written=False):
    @T.prim_func
    def main(A: T.Tensor((64, 512), "float16"), B: T.Tensor((512, 64), "float16"), I: T.Tensor((4,), "int32"),
             C: T.Tensor((64, 64), "float32")):
        with T.Kernel(1, threads=128):
            As, Bs = T.alloc_shared((64, 64), "float16"), T.alloc_shared((64, 64), "float16")
            Cf = T.alloc_fragment((64, 64), "float32")
            T.clear(Cf)
            for k in T.Pipelined(4, num_stages=2):
                at = I[k]
                T.copy(A[0, at * 64], As)
                T.copy(B[at * 64, 0], Bs)
                T.gemm(As, Bs, Cf)
            if table_written:
                I[0] = 1
            T.copy(Cf, C)

    return main


@pytest.mark.parametrize("program, why", [
    (lambda: strided(100), "multiple of 16"), (in_place, "written by the kernel"),
    (lambda: indexed(True), "would not load"), (lambda: gemm(m=128, n=128, k=128, ta=True, dtype="float32"), "K contiguous"),
    (lambda: gemm(m=128, n=128, k=128, threads=192), "groups"),
])
def test_declined_programs_say_why(program, why):
    launch = launch_of(program())
    assert "tma_load" not in ops(launch) and why in report(launch)


def test_blocks_that_return_in_a_nested_branch_load_by_tma():
    assert "tma_load" in ops(launch_of(leaves_early()))


def with_run_time_strides(step):
    """Batches of matrices whose rows and batches lie step * r and step * s elements apart."""
    n, m, r, s = T.dynamic("n, m, r, s")

    @T.prim_func
    def main(A: T.StridedTensor((n, m, 64), (step * s, step * r, 1), "float16"), B: T.Tensor((64, 64), "float16"),
             C: T.Tensor((n, 64, 64), "float32")):
        with T.Kernel(n, threads=128) as b:
            As, Bs = T.alloc_shared((64, 64), "float16"), T.alloc_shared((64, 64), "float16")
            Cf = T.alloc_fragment((64, 64), "float32")
            T.clear(Cf)
            for k in T.Pipelined(T.ceildiv(m, 64), num_stages=2):
                T.copy(A[b, k * 64:(k + 1) * 64, :], As)
                T.copy(B, Bs)
                T.gemm(As, Bs, Cf)
            T.copy(Cf, C[b, :, :])

    return main


def test_strides_known_at_run_time_need_a_proven_alignment():
    launch = launch_of(with_run_time_strides(4))
    assert "tma_load" not in ops(launch) and "no multiples of 16 bytes" in report(launch)
    program = lowered(with_run_time_strides(8))
    assert "tma_load" in ops(program.kernels[0].launch)
    rng = np.random.default_rng(3)
    room = rng.integers(-3, 4, (2, 150, 72)).astype(np.float16)
    a, b = room[:, :140, :64], rng.integers(-3, 4, (64, 64)).astype(np.float16)
    got = run_device(program, {"A": a, "B": b, "C": np.zeros((2, 64, 64), np.float32)})
    padded = np.zeros((2, 192, 64))
    padded[:, :140] = a
    want = sum(padded[:, i:i + 64] @ b.astype(np.float64) for i in (0, 64, 128))
    assert np.array_equal(got.outputs["C"], want)


def test_coordinates_read_from_memory():
    launch = launch_of(indexed())
    assert "tma_load" in ops(launch)
    rng = np.random.default_rng(2)
    a, b = rng.integers(-3, 4, (64, 512)).astype(np.float16), rng.integers(-3, 4, (512, 64)).astype(np.float16)
    index = np.array([5, 0, 7, 5], np.int32)
    got = run_device(lowered(indexed()), {"A": a, "B": b, "I": index, "C": np.zeros((64, 64), np.float32)})
    want = sum(a[:, i * 64:i * 64 + 64].astype(np.float64) @ b[i * 64:i * 64 + 64].astype(np.float64) for i in index)
    assert np.array_equal(got.outputs["C"], want)


def test_accumulators_of_one_tile_take_one_way():
    @T.prim_func
    def main(A: T.Tensor((64, 64), "float16"), B: T.Tensor((64, 64), "float16"), C: T.Tensor((64, 64), "float32")):
        with T.Kernel(1, threads=128):
            As, Bs = T.alloc_shared((64, 64), "float16"), T.alloc_shared((64, 64), "float16")
            Bf, Cf = T.alloc_fragment((64, 64), "float16"), T.alloc_fragment((64, 64), "float32")
            T.copy(A, As)
            T.copy(B, Bs)
            T.copy(Bs, Bf)
            T.clear(Cf)
            T.gemm(As, Bs, Cf)
            T.gemm(As, Bf, Cf)
            T.copy(Cf, C)

    launch = launch_of(main)
    assert "wgmma" not in ops(launch) and "B is not in shared memory" in report(launch)


# ---- what ptxas makes of it -------------------------------------------------------------------------------------------

LARGE = {"gemm_tn": lambda: gemm(m=4096, n=4096, k=4096, bm=128, bn=256, bk=64, stages=4, threads=256, tb=True),
         "gemm_nn": lambda: gemm(m=4096, n=4096, k=4096, bm=128, bn=128, bk=64, stages=4, threads=256),
         "gemm_small": lambda: gemm(),
         "attention": lambda: attention(1, 16, 4096, 128, bm=128, bn=128, threads=256),
         "attention_causal": lambda: attention(1, 16, 4096, 128, causal=True, bm=128, bn=64, threads=256)}


@pytest.mark.skipif(not nvrtc.available(), reason="NVRTC is not installed")
@pytest.mark.parametrize("name", LARGE)
def test_assembles_without_serialisation_or_spills(name):
    (kernel,) = lowered(LARGE[name]()).kernels
    cubin = nvrtc.compile_cubin(print_kernel(kernel), "sm_90a")
    assert cubin.spills == 0 and "C75" not in cubin.log, cubin.log


def paged(pages, stages=2):
    """Attention over pages of keys and values named by a table."""
    @T.prim_func
    def main(Q: T.Tensor((64, 64), "float16"), K: T.Tensor((512, 64), "float16"), V: T.Tensor((512, 64), "float16"),
             table: T.Tensor((pages,), "int32"), O: T.Tensor((64, 64), "float32")):
        with T.Kernel(1, threads=128):
            Qs, Ks, Vs = (T.alloc_shared((64, 64), "float16") for _ in range(3))
            P, Of = T.alloc_fragment((64, 64), "float32"), T.alloc_fragment((64, 64), "float32")
            Ph = T.alloc_fragment((64, 64), "float16")
            T.copy(Q, Qs)
            T.clear(Of)
            for k in T.Pipelined(pages, num_stages=stages):
                page = table[k]
                T.copy(K[page * 64, 0], Ks)
                T.gemm(Qs, Ks, P, transpose_B=True, clear_accum=True)
                for i, j in T.Parallel(64, 64):
                    P[i, j] = P[i, j] * 0.125
                T.copy(P, Ph)
                T.copy(V[page * 64, 0], Vs)
                T.gemm(Ph, Vs, Of)
            T.copy(Of, O)

    return main


def test_loads_come_in_the_order_of_their_use():
    """The second product of an iteration runs with the first of the next one, and so do the loads."""
    launch = launch_of(paged(5, stages=4))
    (branch,) = [x for x in walk(launch) if isinstance(x, If) and isinstance(x.cond, Call)
                 and x.cond.op == "in_warp_groups"]
    loop = next(x for x in walk(branch.then) if isinstance(x, For) and "tma_load" in ops(x.body))
    assert loop.extent.value == 5
    maps = [x.options.map for x in walk(loop) if isinstance(x, Call) and x.op == "tma_load"]
    assert maps == ["K_map", "Q_map", "V_map"]
    once, late = (s for s in loop.body.stmts if isinstance(s, If))
    assert [str(s.cond) for s in (once, late)] == [f"({loop.var.name} == 0)", f"({loop.var.name} > 0)"]
    loads = [x for x in walk(branch.then) if isinstance(x, Call) and x.op == "tma_load"]
    assert loads[-1].options.map == "V_map" and len(loads) == 4  # the last values come after the loop


@pytest.mark.parametrize("pages", [1, 2, 3, 8])
def test_pages_read_from_a_table(pages):
    rng = np.random.default_rng(5)
    q, k, v = (rng.integers(-2, 3, s).astype(np.float16) for s in ((64, 64), (512, 64), (512, 64)))
    table = rng.permutation(8)[:pages].astype(np.int32)
    got = run_device(lowered(paged(pages)), {"Q": q, "K": k, "V": v, "table": table, "O": np.zeros((64, 64), np.float32)})
    rows = (table[:, None] * 64 + np.arange(64)).ravel()
    want = (q.astype(np.float64) @ k[rows].T.astype(np.float64) * 0.125) @ v[rows].astype(np.float64)
    assert np.array_equal(got.outputs["O"], want)


def test_blocks_that_return_early_have_roles():
    @T.prim_func
    def main(A: T.Tensor((256, 256), "float16"), B: T.Tensor((256, 256), "float16"), C: T.Tensor((256, 256), "float16"),
             n: T.int32):
        with T.Kernel(4, 4, threads=128) as (bx, by):
            if bx >= n:
                T.thread_return()
            As, Bs = T.alloc_shared((64, 64), "float16"), T.alloc_shared((64, 64), "float16")
            Cf = T.alloc_fragment((64, 64), "float32")
            T.clear(Cf)
            for k in T.Pipelined(4, num_stages=2):
                T.copy(A[by * 64, k * 64], As)
                T.copy(B[k * 64, bx * 64], Bs)
                T.gemm(As, Bs, Cf)
            T.copy(Cf, C[by * 64, bx * 64])

    launch = launch_of(main)
    assert "tma_load" in ops(launch) and "thread_return" not in ops(launch) and "ordered: " in launch.plan.sync_report
