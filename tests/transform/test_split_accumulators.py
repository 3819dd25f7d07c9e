"""Products too wide for the registers beside their totals: parts of their columns in turn, bit by bit the same sums."""

import re

import ml_dtypes
import numpy as np
import pytest

import tilelang.language as T
from tilelang.codegen.cuda.printer import print_kernel
from tilelang.ir import walk
from tilelang.layout import tile_fragment
from tilelang.ops import Gemm
from tilelang.runtime import nvrtc
from tilelang.simulator import run_device
from tilelang.target import Target
from tilelang.target.wgmma import WGMMA_ROWS
from tilelang.transform.layout import split_accumulators as split_accumulators
from tilelang.transform.pipeline import lower

SM90 = Target({"kind": "cuda", "arch": "sm_90a"})
F8 = "float8_e4m3fn"
NUMPY = {F8: ml_dtypes.float8_e4m3fn, "float16": np.float16}


def wgmma_fragments_of(bm, bn):
    """What the products of two warp groups leave in 128 rows."""
    row = WGMMA_ROWS[f"wgmma.m64n{bn}k32.f32.e4m3.e4m3"]
    return tile_fragment(row.c, (1, 1), (bm // 64, 1), (1, bm // 64), threads=256)


def scaled(m=128, n=256, k=512, bm=128, bn=256, bk=128, stages=3, threads=256, dtype=F8, form="scaled", triangular=False,
           transposed=True):
    """C = sum over blocks of k of (A B) * S[row, block of k] * R[block of 128 columns, block of k], in several forms."""
    blocks = -(-k // bk)

    @T.prim_func
    def main(A: T.Tensor((m, k), dtype), B: T.Tensor((n, k) if transposed else (k, n), dtype),
             S: T.Tensor((m, blocks), "float32"), R: T.Tensor((-(-n // 128), blocks), "float32"),
             C: T.Tensor((m, n), "float32"), D: T.Tensor((m,), "float32")):
        with T.Kernel(T.ceildiv(n, bn), T.ceildiv(m, bm), threads=threads) as (bx, by):
            As, Bs = T.alloc_shared((bm, bk), dtype), T.alloc_shared((bn, bk) if transposed else (bk, bn), dtype)
            part, total = T.alloc_fragment((bm, bn), "float32"), T.alloc_fragment((bm, bn), "float32")
            row, seen = T.alloc_fragment((bm,), "float32"), T.alloc_fragment((bm,), "float32")
            weighed = T.alloc_fragment((bm, bn), "float32") if form == "replaced" else part
            if form == "annotated":
                T.annotate_layout({total: wgmma_fragments_of(bm, bn)})
            T.clear(total)
            T.clear(seen)
            if form == "sum":
                T.clear(part)
            for ko in T.Pipelined(by if triangular else blocks, num_stages=stages):
                T.copy(A[by * bm, ko * bk], As)
                T.copy(B[bx * bn, ko * bk] if transposed else B[ko * bk, bx * bn], Bs)
                if form == "every second":
                    if ko % 2 == 0:
                        for i in T.Parallel(bm):
                            row[i] = S[by * bm + i, ko]
                    other = R[bx * bn // 128, ko]
                elif form != "plain":
                    for i in T.Parallel(bm):
                        row[i] = S[by * bm + i, ko]
                    other = R[bx * bn // 128, ko]
                T.gemm(As, Bs, part, transpose_B=transposed, clear_accum=form != "sum")
                if form == "two loops":
                    for i, j in T.Parallel(bm, bn):
                        part[i, j] = part[i, j] * row[i]
                    for i, j in T.Parallel(bm, bn):
                        total[i, j] += part[i, j] * other
                elif form == "columns first":
                    for j, i in T.Parallel(bn, bm):
                        total[i, j] += part[i, j] * (row[i] * R[(bx * bn + j) // 128, ko])
                elif form == "plain":
                    for i, j in T.Parallel(bm, bn):
                        total[i, j] += part[i, j]
                elif form == "replaced":  # weighed takes the registers of part
                    for i, j in T.Parallel(bm, bn):
                        weighed[i, j] = T.max(part[i, j], 0.0) * row[i]
                    T.reduce_sum(weighed, seen, dim=1, clear=False)
                elif form == "factors":
                    for i, j in T.Parallel(bm, bn):
                        total[i, j] += part[i, j] * (row[i] * other)
                else:
                    for i, j in T.Parallel(bm, bn):
                        total[i, j] += part[i, j] * (row[i] * R[(bx * bn + j) // 128, ko])
                if form == "reduced":
                    T.reduce_sum(part, seen, dim=1, clear=False)
                if form == "row by row":
                    for i, j in T.Parallel(bm, bn):
                        seen[i] += part[i, j]
            T.copy(total, C[by * bm, bx * bn])
            if form in ("reduced", "row by row", "replaced"):
                for i in T.Parallel(bm):
                    D[by * bm + i] = seen[i]
            if form == "kept":
                T.copy(part, C[by * bm, bx * bn])

    return main


def compiled(program, **options):
    return lower(program.func, SM90, {"tl.enable_hopper": True, "tl.resize_blocks": False, **options})


def text_of(program):
    return print_kernel(compiled(program).kernels[0])


def was_split(program):
    return any("chunks of" in line for line in compiled(program).kernels[0].launch.plan.report)


def inputs(m, n, k, bk=128, dtype=F8, transposed=True, whole=True):
    rng = np.random.default_rng(0)
    blocks = -(-k // bk)
    shapes = ((m, k), (n, k) if transposed else (k, n))
    if whole:
        a, b = (rng.integers(-3, 4, s).astype(NUMPY[dtype]) for s in shapes)
        s, r = (rng.integers(1, 4, (x, blocks)).astype(np.float32) for x in (m, -(-n // 128)))
    else:
        a, b = (rng.standard_normal(s).astype(NUMPY[dtype]) for s in shapes)
        s, r = (rng.random((x, blocks)).astype(np.float32) for x in (m, -(-n // 128)))
    return {"A": a, "B": b, "S": s, "R": r, "C": np.zeros((m, n), np.float32), "D": np.zeros(m, np.float32)}


def wanted(x, bk=128, transposed=True, plain=False):
    a, b = x["A"].astype(float), x["B"].astype(float)
    b = b if transposed else b.T
    n, k = b.shape[0], a.shape[1]
    out = np.zeros((a.shape[0], n))
    for t in range(-(-k // bk)):
        at = slice(t * bk, (t + 1) * bk)
        scale = 1 if plain else x["S"][:, t:t + 1] * x["R"][:, t].repeat(128)[None, :n]
        out += a[:, at] @ b[:, at].T * scale
    return out


@pytest.mark.parametrize("blocks", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("stages", [2, 3, 4])
def test_any_number_of_iterations(blocks, stages):
    x = inputs(128, 256, 128 * blocks)
    low = compiled(scaled(k=128 * blocks, stages=stages))
    assert not any("without" in line for line in low.kernels[0].launch.plan.report)
    assert low.kernels[0].launch.plan.sync_report.startswith("ordered:")
    assert np.array_equal(run_device(low, x).outputs["C"], wanted(x))


@pytest.mark.parametrize("form", ["scaled", "columns first", "plain"])
def test_edges_and_forms(form):
    x = inputs(200, 392, 400)
    program = scaled(m=200, n=392, k=400, form=form)
    assert was_split(program)
    assert np.array_equal(run_device(compiled(program), x).outputs["C"], wanted(x, plain=form == "plain"))


def test_several_loops_over_the_sums():
    x = inputs(128, 256, 384)
    x["R"][1] = x["R"][0]
    program = scaled(k=384, form="two loops")
    assert was_split(program)
    assert np.array_equal(run_device(compiled(program), x).outputs["C"], wanted(x))


def test_more_tiles_than_multiprocessors():
    """Persistent: each tile starts its first product anew."""
    assert "tile_step" in text_of(scaled(m=128 * 45, n=256 * 3, k=256))
    x = inputs(128 * 5, 256 * 3, 256)
    program = scaled(m=128 * 5, n=256 * 3, k=256)
    low = compiled(program, **{"tl.persistent": 4})  # 15 tiles for 4 blocks
    assert was_split(program) and "tile_step" in print_kernel(low.kernels[0])
    assert np.array_equal(run_device(low, x).outputs["C"], wanted(x))


def test_numbers_of_iterations_known_at_run_time():
    x = inputs(512, 256, 512)
    low = compiled(scaled(m=512, triangular=True))
    assert low.kernels[0].launch.plan.sync_report.startswith("ordered:")
    for y in range(4):
        x["S"][128 * y:128 * y + 128, y:] = 0
    assert np.array_equal(run_device(low, x).outputs["C"], wanted(x))


def test_columns_of_an_operand_that_is_not_transposed():
    """16 bits: B lies (k, n), its parts start at a column of panels."""
    x = inputs(128, 256, 256, bk=64, dtype="float16", transposed=False)
    program = scaled(k=256, bk=64, dtype="float16", transposed=False)
    assert was_split(program)
    assert np.array_equal(run_device(compiled(program), x).outputs["C"], wanted(x, bk=64, transposed=False))


def test_bits_are_those_of_the_whole_product(monkeypatch):
    """Random numbers, whose sums round: the additions of an element and their order stay."""
    x = inputs(128, 256, 640, whole=False)
    program = scaled(k=640)
    parts = run_device(compiled(program), x).outputs["C"]
    monkeypatch.setattr(split_accumulators, "inner_loops", lambda body: [])
    assert not was_split(program)
    assert np.array_equal(run_device(compiled(program), x).outputs["C"], parts)


@pytest.mark.parametrize("what, options", [
    ("the whole fits", {"n": 128, "bn": 128}), ("two of 96 registers fit", {"n": 192, "bn": 192}),
    ("a sum over iterations", {"form": "sum"}), ("reduced along its rows", {"form": "reduced"}),
    ("summed up by a loop", {"form": "row by row", "stages": 2}), ("used after the loop", {"form": "kept"}),
    ("two warp groups beside one another", {"m": 64, "bm": 64}), ("its layout is the user's", {"form": "annotated"})])
def test_declined(what, options):
    assert not was_split(scaled(**options)), what


def test_a_loop_of_chunks_computed_addresses_between_a_sum_and_the_next_product():
    """Of scales, by the number of the iteration.  A loop of chunks alone has none, and stays as it is."""
    loop = r"#pragma unroll 3\n *for \(int ko = 0; ko < 4; "
    assert re.search(loop, text_of(scaled())) and not re.search(loop, text_of(scaled(form="plain")))


def test_parts_are_as_wide_as_fits():
    assert split_accumulators.LEAST_COLUMNS == 64
    assert re.search(r"m64n128k32.*_ss_", text_of(scaled())) and "float part[64]" in text_of(scaled())
    # 3 groups of 160 registers: 96 totals leave room for 32 sums.
    low = compiled(scaled(m=192, n=192, bm=192, bn=192, threads=384))
    assert "in 3 chunks of 64" in str(low.kernels[0].launch.plan.report)


def test_scales_are_loaded_under_the_first_product():
    low = compiled(scaled(form="factors"), **{"tl.scale_prefetch": False})
    launch = low.kernels[0].launch
    assert not any(isinstance(x, Gemm) for x in walk(launch)) and launch.plan.overlap.startswith("wgmma in flight")
    text = print_kernel(low.kernels[0])
    loop = text[text.rindex("for (int ko"):]
    starts = [m.start() for m in re.finditer("wgmma_commit", loop)]
    waits = [m.start() for m in re.finditer("wgmma_wait", loop)]
    assert loop.index("other = R[") < starts[0] < loop.index("row[r] = S[") < waits[0] < starts[1] < waits[1]


@pytest.mark.parametrize("bn", [256, 128])
def test_scales_that_are_kept_for_an_iteration_more(bn):
    """A fragment that is not filled anew in every iteration has no second copy (bn = 128: two parts of 64 registers)."""
    x = inputs(128, bn, 640)
    got = run_device(compiled(scaled(n=bn, bn=bn, k=640, form="every second", stages=4)), x).outputs["C"]
    x["S"][:, 1::2] = x["S"][:, 0:-1:2]
    assert np.array_equal(got, wanted(x))


def test_scales_that_depend_on_one_another():
    """Values that are loaded for the next iteration read those of the next iteration."""
    @T.prim_func
    def main(A: T.Tensor((128, 640), F8), B: T.Tensor((256, 640), F8), S: T.Tensor((5, 128), "float32"),
             R: T.Tensor((5,), "float32"), where: T.Tensor((5,), "int32"), C: T.Tensor((128, 256), "float32")):
        with T.Kernel(1, threads=256) as _:
            As, Bs = T.alloc_shared((128, 128), F8), T.alloc_shared((256, 128), F8)
            part, total = T.alloc_fragment((128, 256), "float32"), T.alloc_fragment((128, 256), "float32")
            row = T.alloc_fragment((128,), "float32")
            T.clear(total)
            for ko in T.Pipelined(5, num_stages=3):
                T.copy(A[0, ko * 128], As)
                T.copy(B[0, ko * 128], Bs)
                at = where[ko]
                other = R[at]
                for i in T.Parallel(128):
                    row[i] = S[at, i] * other
                T.gemm(As, Bs, part, transpose_B=True, clear_accum=True)
                for i, j in T.Parallel(128, 256):
                    total[i, j] += part[i, j] * (row[i] + other + T.cast(at, "float32"))
            T.copy(total, C)

    rng = np.random.default_rng(1)
    a, b = (rng.integers(-3, 4, (n, 640)).astype(NUMPY[F8]) for n in (128, 256))
    s, r = rng.integers(1, 4, (5, 128)).astype(np.float32), rng.integers(1, 4, 5).astype(np.float32)
    where = np.array([3, 0, 4, 2, 1], np.int32)
    assert was_split(main)
    got = run_device(compiled(main), {"A": a, "B": b, "S": s, "R": r, "where": where, "C": np.zeros((128, 256), np.float32)})
    want = sum((a[:, t * 128:][:, :128].astype(float) @ b[:, t * 128:][:, :128].astype(float).T) *
               (s[w] * r[w] + r[w] + w)[:, None] for t, w in enumerate(where))
    assert np.array_equal(got.outputs["C"], want)


@pytest.mark.skipif(not nvrtc.available(), reason="NVRTC is not installed")
@pytest.mark.parametrize("k", [8192, 8064])
def test_nothing_is_serialised_or_spilt(k):
    (kernel,) = compiled(scaled(m=4096, n=4096, k=k, stages=4)).kernels
    cubin = nvrtc.compile_cubin(print_kernel(kernel), "sm_90a")
    assert cubin.spills == 0 and not re.findall(r"C75\d\d", cubin.log), cubin.log
