"""Products that start anew in every iteration: two parts in turns, the second under the work on the first."""

import re

import ml_dtypes
import numpy as np
import pytest

import tilelang.language as T
from tilelang.codegen.cuda.printer import print_kernel
from tilelang.ir import Launch, walk
from tilelang.ir.expr import Call
from tilelang.runtime import nvrtc
from tilelang.simulator import run_device
from tilelang.target import Target
from tilelang.transform.schedule import consumer_schedule, emit
from tilelang.transform.pipeline import lower

SM90 = Target({"kind": "cuda", "arch": "sm_90a"})
F8 = "float8_e4m3fn"


def scaled(m=64, n=64, k=512, bm=64, bn=64, bk=128, stages=3, threads=128, group=1, clear=True, keep=False, triangular=False,
           shared=False):
    """C = sum over blocks of k of (A B) * S[block of rows, block of k]; triangular: row tile y has y blocks."""
    blocks = k // bk

    @T.prim_func
    def main(A: T.Tensor((m, k), F8), B: T.Tensor((n, k), F8), S: T.Tensor((m, blocks), "float32"),
             C: T.Tensor((m, n), "float32"), P: T.Tensor((m, n), "float32")):
        with T.Kernel(T.ceildiv(n, bn), T.ceildiv(m, bm), threads=threads) as (bx, by):
            As, Bs = T.alloc_shared((bm, bk), F8), T.alloc_shared((bn, bk), F8)
            part, total = T.alloc_fragment((bm, bn), "float32"), T.alloc_fragment((bm, bn), "float32")
            row = T.alloc_shared((bm,), "float32") if shared else T.alloc_fragment((bm,), "float32")
            T.clear(total)
            T.clear(part)
            for ko in T.Pipelined(by if triangular else blocks, num_stages=stages):
                T.copy(A[by * bm, ko * bk], As)
                T.copy(B[bx * bn, ko * bk], Bs)
                for i in T.Parallel(bm):
                    row[i] = S[by * bm + i, ko]
                T.gemm(As, Bs, part, transpose_B=True, clear_accum=clear)
                for i, j in T.Parallel(bm, bn):
                    total[i, j] += part[i, j] * row[i]
            T.copy(total, C[by * bm, bx * bn])
            if keep:
                T.copy(part, P[by * bm, bx * bn])

    return main


def free(clear_first=False, **o):
    """The same without the use of part outside the loop."""
    m, n, k, bm, bn, bk, stages, threads = (o.get(x, d) for x, d in (
        ("m", 64), ("n", 64), ("k", 512), ("bm", 64), ("bn", 64), ("bk", 128), ("stages", 3), ("threads", 128)))
    blocks, triangular = k // bk, o.get("triangular", False)
    lag = o.get("lag", 0)

    @T.prim_func
    def main(A: T.Tensor((m, k), F8), B: T.Tensor((n, k), F8), S: T.Tensor((m, blocks), "float32"),
             C: T.Tensor((m, n), "float32")):
        with T.Kernel(T.ceildiv(n, bn), T.ceildiv(m, bm), threads=threads) as (bx, by):
            As, Bs = T.alloc_shared((bm, bk), F8), T.alloc_shared((bn, bk), F8)
            part, total = T.alloc_fragment((bm, bn), "float32"), T.alloc_fragment((bm, bn), "float32")
            row = T.alloc_fragment((bm,), "float32")
            T.clear(total)
            for ko in T.Pipelined((by if triangular else blocks) - lag, num_stages=stages):
                T.copy(A[by * bm, ko * bk], As)
                T.copy(B[bx * bn, ko * bk], Bs)
                for i in T.Parallel(bm):
                    row[i] = S[by * bm + i, ko]
                if clear_first:
                    T.clear(part)
                    T.gemm(As, Bs, part, transpose_B=True)
                else:
                    T.gemm(As, Bs, part, transpose_B=True, clear_accum=True)
                for i, j in T.Parallel(bm, bn):
                    total[i, j] += part[i, j] * row[i]
            T.copy(total, C[by * bm, bx * bn])

    return main


def compiled(program):
    return lower(program.func, SM90, {"tl.enable_hopper": True})


def waits(program):
    launch = next(x for k in program.kernels for x in [k.launch] if isinstance(x, Launch))
    return [x.options.n for x in walk(launch) if isinstance(x, Call) and x.op == "wgmma_wait"]


def inputs(m, n, k, blocks):
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-3, 4, s).astype(ml_dtypes.float8_e4m3fn) for s in ((m, k), (n, k)))
    return a, b, rng.integers(1, 5, (m, blocks)).astype(np.float32)


@pytest.mark.parametrize("blocks", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("stages", [3, 4])
def test_any_number_of_iterations(blocks, stages):
    m, n, k = 70, 72, 128 * blocks
    a, b, s = inputs(m, n, k, blocks)
    program = compiled(free(m=m, n=n, k=k, stages=stages))
    assert (1 in waits(program)) == (blocks > 1)
    got = run_device(program, {"A": a, "B": b, "S": s, "C": np.zeros((m, n), np.float32)}).outputs["C"]
    want = (a.astype(float) * s.repeat(128, 1)) @ b.astype(float).T
    assert np.array_equal(got, want)


@pytest.mark.parametrize("threads, bm, lag", [(128, 64, 0), (256, 128, 0), (128, 64, 1)])
def test_numbers_of_iterations_known_at_run_time(threads, bm, lag):
    """Negative ones are no iteration."""
    m, n, k = 4 * bm, 64, 512
    a, b, s = inputs(m, n, k, 4)
    program = compiled(free(m=m, n=n, k=k, bm=bm, threads=threads, triangular=True, lag=lag))
    assert 1 in waits(program)
    got = run_device(program, {"A": a, "B": b, "S": s, "C": np.zeros((m, n), np.float32)}).outputs["C"]
    seen = np.arange(k)[None, :] < (np.arange(m)[:, None] // bm - lag) * 128
    want = (a.astype(float) * s.repeat(128, 1) * seen) @ b.astype(float).T
    assert np.array_equal(got, want)


def test_a_number_below_zero_is_no_iteration():
    program = compiled(free(m=128, k=128, lag=2))
    a, b, s = inputs(128, 64, 128, 1)
    got = run_device(program, {"A": a, "B": b, "S": s, "C": np.ones((128, 64), np.float32)}).outputs["C"]
    assert not got.any() and "warp groups" in str(program.kernels[0].launch.plan.pipeline_report)


@pytest.mark.parametrize("what, program", [
    ("two stages", lambda: free(stages=2)), ("no room", lambda: free(bm=128, bn=192, m=128, n=192, threads=256)),
    ("the part is read after the loop", lambda: scaled(keep=True)),
    ("the part is a sum over iterations", lambda: scaled(clear=False))])
def test_declined(what, program):
    assert 1 not in waits(compiled(program()))


def test_a_part_cleared_by_a_statement():
    a, b, s = inputs(64, 64, 512, 4)
    got = run_device(compiled(free(clear_first=True)), {"A": a, "B": b, "S": s, "C": np.zeros((64, 64), np.float32)})
    assert np.array_equal(got.outputs["C"], (a.astype(float) * s.repeat(128, 1)) @ b.astype(float).T)


def test_declined_loops_compute_the_same():
    a, b, s = inputs(64, 64, 512, 4)
    zeros = np.zeros((64, 64), np.float32)
    got = run_device(compiled(scaled(keep=True)), {"A": a, "B": b, "S": s, "C": zeros, "P": zeros}).outputs
    parts = [a[:, i:i + 128].astype(float) @ b[:, i:i + 128].astype(float).T for i in range(0, 512, 128)]
    assert np.array_equal(got["P"], parts[-1])
    assert np.array_equal(got["C"], sum(p * s[:, i:i + 1] for i, p in enumerate(parts)))


def test_the_choice_alone(monkeypatch):
    """One product on a part that is cleared; the loop has a second part of its own."""
    seen = []
    monkeypatch.setattr(emit, "promoted_gemm", lambda r: seen.append(consumer_schedule.promoted_gemm(r)) or seen[-1])
    text = print_kernel(compiled(free()).kernels[0])
    assert seen[-1] is not None and "float part_2[" in text


def test_groups_that_share_what_they_write():
    """The barrier behind `row` in front of the product waited for the group that waited for its turn: a standstill that the
    check of the synchronisation found, and the roles were given up."""
    rng = np.random.default_rng(2)
    a, b = (rng.integers(-3, 4, (n, 512)).astype(ml_dtypes.float8_e4m3fn) for n in (128, 64))
    s = rng.integers(1, 4, (128, 4)).astype(np.float32)
    low = compiled(scaled(m=128, bm=128, threads=256, shared=True))
    assert not any("without warp specialisation" in line for line in low.kernels[0].launch.plan.report)
    got = run_device(low, {"A": a, "B": b, "S": s}).outputs
    parts = [a[:, i:i + 128].astype(float) @ b[:, i:i + 128].astype(float).T for i in range(0, 512, 128)]
    assert np.array_equal(got["C"], sum(p * s[:, i:i + 1] for i, p in enumerate(parts)))


@pytest.mark.parametrize("bn, threads", [(64, 384), (192, 256), (128, 384)])
@pytest.mark.parametrize("blocks", [1, 2, 5])
def test_groups_that_take_turns(bn, threads, blocks):
    m, n, k = threads // 2, bn, 128 * blocks
    a, b, s = inputs(m, n, k, blocks)
    got = run_device(compiled(free(m=m, n=n, k=k, bm=m, bn=bn, threads=threads)),
                     {"A": a, "B": b, "S": s, "C": np.zeros((m, n), np.float32)}).outputs["C"]
    assert np.array_equal(got, (a.astype(float) * s.repeat(128, 1)) @ b.astype(float).T)


def test_iterations_are_left_out_alike_in_all_roles():
    """Loops of 64 iterations and of 32 pairs: the model of their barriers is cut short, and ordered."""
    launch = compiled(free(m=4096, n=4096, k=8192, bm=128, bn=128, threads=256, stages=4)).kernels[0].launch
    assert launch.plan.sync_report.startswith("ordered:") and "left out of long loops" in launch.plan.sync_report


@pytest.mark.skipif(not nvrtc.available(), reason="NVRTC is not installed")
@pytest.mark.parametrize("k", [8192, 8064])
def test_nothing_is_serialised(k):
    (kernel,) = compiled(free(m=4096, n=4096, k=k, bm=128, bn=128, threads=256, stages=6)).kernels
    cubin = nvrtc.compile_cubin(print_kernel(kernel), "sm_90a")
    assert cubin.spills == 0 and not re.findall(r"C75\d\d", cubin.log), cubin.log


def test_scales_of_an_iteration_are_loaded_before_its_product_is_started():
    """In a second copy: those of the iteration before are still in use."""
    text = print_kernel(lower(free(k=1024, bn=128, n=128).func, SM90, {"tl.scale_prefetch": False}).kernels[0])
    loop = text[text.rindex("for (int ko_4"):]
    loads = [m.start() for m in re.finditer(r"row(_2)?\[r\] = S\[", loop)]
    starts = [m.start() for m in re.finditer(r"wgmma_commit", loop)]
    waits = [m.start() for m in re.finditer(r"wgmma_wait", loop)]
    assert len(loads) == len(starts) == len(waits) == emit.UNROLL
    assert all(a < b for a, b in zip(loads, starts)) and all(a < b for a, b in zip(loads[1:], waits))
    assert re.search(r"part_2\[[^;]*\* row_2\[", loop) and not re.search(r"part_2\[[^;]*\* row\[", loop)
