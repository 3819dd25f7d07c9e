"""Scales that a loop reads for a row and a step come in tiles of several steps."""

import re

import ml_dtypes
import numpy as np
import pytest

import tilelang.language as T
from tilelang.codegen.cuda.printer import print_kernel
from tilelang.errors import TileLangError
from tilelang.ir import Evaluate, Launch, binary, const, replace, rewrite, seq, walk
from tilelang.ir.buffer import AddressOf, Load
from tilelang.ir.expr import Call
from tilelang.ops import Copy
from tilelang.runtime import nvrtc
from tilelang.simulator import run_device, run_tile
from tilelang.target import Target
from tilelang.transform.legalize import staged_reads
from tilelang.transform.framework.pass_ import PassContext, run_passes
from tilelang.transform.pipeline import DEVICE_PASSES, TILE_PASSES, legalized, lower
from tilelang.transform.legalize.given_boxes import unaligned_columns
from tilelang.transform.check.verify_sync import verify_sync
from tilelang.transform.verify_sync.launch import check_launch

SM90 = Target({"kind": "cuda", "arch": "sm_90a"})
F8 = "float8_e4m3fn"
NUMPY = {F8: ml_dtypes.float8_e4m3fn, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32,
         "uint8": np.uint8}
OFF = {"tl.scale_prefetch": False}


def scaled(m=64, n=64, k=512, bm=64, bn=64, bk=128, stages=3, threads=128, dtype=F8, scale="float32", columns=0, turned=False,
           first=0, counts="all", stride=1, where="before"):
    """C = sum over steps of (A B) * S[row, first + step], S[first + step, row] where turned.  columns: that S has.

    counts: steps of a row tile: all; its number (by); a number read for it.  where the values are loaded: before the
    product, under a condition, in the sums, or nowhere.
    """
    steps = -(-k // bk)
    columns = columns or steps + first

    @T.prim_func
    def main(A: T.Tensor((m, k), dtype), B: T.Tensor((n, k), dtype),
             S: T.Tensor((columns, m) if turned else (m, columns), scale), N: T.Tensor((-(-m // bm),), "int32"),
             C: T.Tensor((m, n), "float32")):
        with T.Kernel(T.ceildiv(n, bn), T.ceildiv(m, bm), threads=threads) as (bx, by):
            As, Bs = T.alloc_shared((bm, bk), dtype), T.alloc_shared((bn, bk), dtype)
            part, total = T.alloc_fragment((bm, bn), "float32"), T.alloc_fragment((bm, bn), "float32")
            row = T.alloc_fragment((bm,), "float32")
            T.clear(total)
            for ko in T.Pipelined(N[by] if counts == "read" else by if counts == "by" else steps, num_stages=stages):
                T.copy(A[by * bm, ko * bk], As)
                T.copy(B[bx * bn, ko * bk], Bs)
                at = ko * stride + first
                if where == "condition":
                    if ko % 2 == 0:
                        for i in T.Parallel(bm):
                            row[i] = T.cast(S[by * bm + i, at], "float32")
                elif where == "before":
                    for i in T.Parallel(bm):
                        row[i] = T.cast(S[at, by * bm + i] if turned else S[by * bm + i, at], "float32")
                T.gemm(As, Bs, part, transpose_B=True, clear_accum=True)
                for i, j in T.Parallel(bm, bn):
                    if where == "sums":
                        total[i, j] += part[i, j] * S[by * bm + i, at]
                    elif where == "nowhere":
                        total[i, j] += part[i, j]
                    else:
                        total[i, j] += part[i, j] * row[i]
            T.copy(total, C[by * bm, bx * bn])

    return main


def compiled(program, **options):
    return lower(program.func, SM90, {"tl.enable_hopper": True, "tl.resize_blocks": False, **options})


def inputs(m=64, n=64, k=512, bm=64, bk=128, dtype=F8, scale="float32", columns=0, turned=False, first=0, whole=True,
           counts=()):
    rng = np.random.default_rng(0)
    columns = columns or -(-k // bk) + first
    if whole:
        a, b = (rng.integers(-3, 4, s).astype(NUMPY[dtype]) for s in ((m, k), (n, k)))
    else:
        a, b = (rng.standard_normal(s).astype(NUMPY[dtype]) for s in ((m, k), (n, k)))
    s = rng.integers(1, 5, (m, columns)).astype(NUMPY[scale]) if whole else rng.random((m, columns)).astype(NUMPY[scale])
    return {"A": a, "B": b, "S": np.ascontiguousarray(s.T) if turned else s, "C": np.zeros((m, n), np.float32),
            "N": np.array(counts or [0] * -(-m // bm), np.int32)}


def wanted(x, bm=64, bk=128, turned=False, first=0, counts=None):
    a, b, s = (x[name].astype(np.float64) for name in "ABS")
    s = s.T if turned else s
    out = np.zeros((a.shape[0], b.shape[0]))
    for t in range(-(-a.shape[1] // bk)):
        at = slice(t * bk, (t + 1) * bk)
        live = np.array([counts is None or t < counts[i // bm] for i in range(a.shape[0])])
        out += live[:, None] * (a[:, at] @ b[:, at].T) * s[:, t + first:t + first + 1]
    return out


def tile_of(low):
    """(steps of a tile of several, its stages); None where there is none."""
    launch = low.kernels[0].launch
    stages = dict(launch.plan.stages or ()).get("S_steps")
    (size,) = [b.size for b, _ in launch.plan.shared_offsets if b.name == "S_steps"] or [0]
    return None if stages is None else (size // stages // 64, stages)


def verdict(low):
    launch = low.kernels[0].launch
    assert not any("without" in line for line in launch.plan.report)
    return str(launch.plan.sync_report)


# How a loop is scheduled: in parts of its columns, two parts in turn, in its own order (nothing to spare for a second part).
SCHEDULES = {"chain": {"bn": 256, "n": 256}, "two parts": {}, "plain": {"stages": 2}}


@pytest.mark.parametrize("form", SCHEDULES)
@pytest.mark.parametrize("steps, where", [(4, "before"), (6, "before"), (9, "before"), (9, "sums")])
def test_every_schedule_reads_the_values_of_its_step(form, steps, where):
    """Values that the sums read behind the GEMM were loaded there, each from memory while the tensor cores waited."""
    o = {**SCHEDULES[form], "where": where, "k": 128 * steps, "columns": 12}
    low = compiled(scaled(**o))
    assert tile_of(low) == (4, 2) and verdict(low).startswith("ordered:")
    x = inputs(n=o.get("n", 64), k=o["k"], columns=12)
    assert np.array_equal(run_device(low, x).outputs["C"], wanted(x))


def test_edges_read_zeros_and_the_bits_stay():
    o = {"m": 100, "n": 300, "k": 1104, "bn": 256, "columns": 12}
    x = inputs(m=100, n=300, k=1104, columns=12, whole=False)
    program = scaled(**o)
    low, other = compiled(program), compiled(program, **OFF)
    assert tile_of(low) and not tile_of(other)
    got = run_device(low, x).outputs["C"]
    assert np.allclose(got, wanted(x), rtol=1e-4, atol=1e-3)
    assert np.array_equal(run_device(other, x).outputs["C"], got)


@pytest.mark.parametrize("form", SCHEDULES)
def test_rows_that_are_contiguous(form):
    """S[step, row]: eight rows of the tensor are a tile in panels."""
    o = {**SCHEDULES[form], "m": 128, "k": 128 * 11, "turned": True}
    low = compiled(scaled(**o))
    assert tile_of(low) == (8, 2) and verdict(low).startswith("ordered:")
    x = inputs(m=128, n=o.get("n", 64), k=o["k"], turned=True)
    assert np.array_equal(run_device(low, x).outputs["C"], wanted(x, turned=True))


@pytest.mark.parametrize("scale, steps", [("float16", 8), ("bfloat16", 8), ("uint8", 16)])
def test_sixteen_bytes_of_a_row(scale, steps):
    x = inputs(k=128 * 18, scale=scale, columns=32)
    low = compiled(scaled(k=128 * 18, scale=scale, columns=32))
    assert tile_of(low) == (steps, 2)
    assert np.array_equal(run_device(low, x).outputs["C"], wanted(x))


@pytest.mark.parametrize("form", ["chain", "plain"])
@pytest.mark.parametrize("counts, tiles", [("by", 7), ("read", 6)])
def test_persistent_loops_of_unequal_lengths(counts, tiles, form):
    """A block's tiles have other numbers of steps, none and less than a tile's among them: the ring goes on where it stood."""
    o = {**SCHEDULES[form], "m": 64 * tiles, "k": 128 * 10, "columns": 12, "counts": counts}
    n = o.get("n", 64)
    steps = list(range(tiles)) if counts == "by" else [5, 0, 1, 10, 4, 2]
    low = compiled(scaled(**o), **{"tl.persistent": 2})
    assert tile_of(low) and verdict(low).startswith("ordered:") and "step_count" in print_kernel(low.kernels[0])
    x = inputs(m=o["m"], n=n, k=o["k"], columns=12, counts=steps)
    assert np.array_equal(run_device(low, x).outputs["C"], wanted(x, counts=steps))


def test_tiles_of_one_length():
    """10 steps of an output tile, 3 stages: the second one starts in another stage."""
    low = compiled(scaled(m=64 * 5, k=1280, columns=12), **{"tl.persistent": 2})
    x = inputs(m=64 * 5, k=1280, columns=12)
    assert tile_of(low) and np.array_equal(run_device(low, x).outputs["C"], wanted(x))


def test_clusters_share_the_tile():
    """Neighbours along the columns have the same rows: each loads half of them for both."""
    low = compiled(scaled(m=192, n=512, k=1024, bn=256), **{"tl.cluster": 2, "tl.persistent": 2})
    loads = [x for x in walk(low.kernels[0].launch) if isinstance(x, Call) and x.op == "tma_load" and x.options.map == "S_map"]
    assert loads and all(x.options.multicast for x in loads) and verdict(low).startswith("ordered:")
    x = inputs(m=192, n=512, k=1024)
    assert np.array_equal(run_device(low, x).outputs["C"], wanted(x))


def test_a_tile_of_scales_does_not_keep_a_loop_from_more_stages():
    """It did: tiles of 128 x 128 waited for their loads with the three stages that the program asks for."""
    low = compiled(scaled(m=4096, n=4096, k=4096, bm=128, bn=128, threads=256, columns=32))
    assert tile_of(low) == (8, 2) and dict(low.kernels[0].launch.plan.stages)["As"] == 4  # 128 rows of 4 steps


def test_values_that_the_program_starts_at_a_later_column():
    x = inputs(columns=12, first=4)
    low = compiled(scaled(columns=12, first=4))
    assert tile_of(low) and np.array_equal(run_device(low, x).outputs["C"], wanted(x, first=4))
    x = inputs(columns=12, first=2)
    low = compiled(scaled(columns=12, first=2))
    assert not tile_of(low) and np.array_equal(run_device(low, x).outputs["C"], wanted(x, first=2))


@pytest.mark.parametrize("what, options", [
    ("rows of 20 bytes", {"columns": 5}), ("fewer steps than a tile has", {"k": 384, "columns": 4}),
    ("every second column", {"stride": 2, "columns": 12}), ("under a condition", {"where": "condition"}),
    ("fewer steps than eight", {"turned": True})])
def test_loads_that_stay(what, options):
    low = compiled(scaled(**options))
    assert not tile_of(low) and "in_warp_groups" in {x.op for x in walk(low.kernels[0].launch) if isinstance(x, Call)}, what


def other_program(kind):
    """Loads of a step and a row that are no tile's."""
    @T.prim_func
    def main(A: T.Tensor((128, 512), F8), B: T.Tensor((64, 512), F8), S: T.Tensor((128, 4), "float32"),
             rows: T.Tensor((4,), "int32"), C: T.Tensor((128, 64), "float32")):
        with T.Kernel(2, threads=128) as by:
            As, Bs = T.alloc_shared((64, 128), F8), T.alloc_shared((64, 128), F8)
            part, total = T.alloc_fragment((64, 64), "float32"), T.alloc_fragment((64, 64), "float32")
            row = T.alloc_fragment((64,), "float32")
            T.clear(total)
            for ko in T.Pipelined(4, num_stages=3):
                T.copy(A[by * 64, ko * 128], As)
                T.copy(B[0, ko * 128], Bs)
                for i in T.Parallel(64):
                    if kind == "rows by number":
                        row[i] = S[rows[ko] * 64 + i, ko]
                    elif kind == "two variables":
                        row[i] = S[ko + i, ko]
                    else:
                        row[i] = S[by * 64 + i, ko]
                T.gemm(As, Bs, part, transpose_B=True, clear_accum=True)
                for i, j in T.Parallel(64, 64):
                    total[i, j] += part[i, j] * row[i]
            if kind == "written":
                for i in T.Parallel(64):
                    S[by * 64 + i, 0] = 1.0
            T.copy(total, C[by * 64, 0])

    return main


@pytest.mark.parametrize("kind", ["rows by number", "two variables", "written"])
def test_loads_that_are_no_tiles(kind):
    low = compiled(other_program(kind))
    assert not tile_of(low) and not any("without" in line for line in low.kernels[0].launch.plan.report)


def test_the_last_shared_memory_is_not_taken(monkeypatch):
    """Where the lowering needs it for something else the program is compiled again without such tiles."""
    program = scaled(k=2048, turned=True, stages=14)
    low = compiled(program)
    assert not tile_of(low) and verdict(low).startswith("ordered:")
    monkeypatch.setattr(staged_reads, "_fits", lambda *_: True)
    low = compiled(program)
    assert not tile_of(low) and "in_warp_groups" in {x.op for x in walk(low.kernels[0].launch) if isinstance(x, Call)}
    assert any("compiled without scale prefetch" in line for line in low.kernels[0].launch.plan.report)


# ---- the rewriting itself --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("turned, steps, shape", [(False, 4, (64, 4)), (True, 8, (8, 64))])
def test_the_program_stays_what_it_was(turned, steps, shape):
    """As the interpreter of tile programs runs it."""
    func = staged_reads.staged_reads(legalized(scaled(m=128, k=1200, columns=12, turned=turned).func, SM90), PassContext(SM90))
    (copy,) = [x for x in walk(func.body) if isinstance(x, Copy) and x.dst.buffer.name == "S_steps"]
    assert copy.dst.buffer.shape == shape and not unaligned_columns(copy.src, {})
    assert any(isinstance(x, Load) and x.buffer is copy.dst.buffer for x in walk(func.body))
    x = inputs(m=128, k=1200, columns=12, turned=turned)
    assert np.array_equal(run_tile(func, x)["C"], wanted(x, turned=turned))


def test_which_programs_are_asked():
    cx = PassContext(SM90)
    assert staged_reads.may_have_scales(scaled().func, cx) and not staged_reads.may_have_scales(
        scaled().func, PassContext(SM90, OFF))
    assert not staged_reads.may_have_scales(scaled(where="condition").func, PassContext(Target({"kind": "cuda",
                                                                                                 "arch": "sm_80"})))
    assert staged_reads.ATOM_ROWS == 8 and staged_reads.MOST_STEPS == 16


# ---- planted faults --------------------------------------------------------------------------------------------------


def on(x, op, name):
    """Whether a statement is a call of an op on barriers of that name."""
    return isinstance(x, Evaluate) and x.call.op == op and any(
        isinstance(a, AddressOf) and a.buffer.name == name for a in x.call.args)


def dropped(op, name):
    return lambda launch: rewrite(launch, lambda x: seq() if on(x, op, name) else None)


def altered(op, name, fn):
    return lambda launch: rewrite(launch, lambda x: replace(x, call=replace(x.call, args=fn(x.call.args)))
                                  if on(x, op, name) else None)


def without_fences(launch):
    return rewrite(launch, lambda x: seq() if isinstance(x, Evaluate) and x.call.op == "fence_proxy_async" else None)


def twice(op, name):
    return lambda launch: rewrite(launch, lambda x: seq(x, x) if on(x, op, name) else None)


FULL, EMPTY = "S_steps_As_Bs_full", "S_steps_As_Bs_empty"
FAULTS = {
    "consumers do not wait": dropped("mbarrier_wait", FULL), "the producer does not wait": dropped("mbarrier_wait", EMPTY),
    "nothing is given back": dropped("mbarrier_arrive", EMPTY), "no fence of the readers": without_fences,
    "other bytes": altered("mbarrier_arrive_expect_tx", FULL, lambda a: (a[0], const(512, "uint32"))),
    "the other parity": altered("mbarrier_wait", FULL, lambda a: (a[0], binary("bitxor", a[1], const(1, "uint32")))),
    "given back twice": twice("mbarrier_arrive", EMPTY),
}


@pytest.fixture(scope="module")
def sound():
    """A block's two tiles of 16 steps each, as verify_sync gets them."""
    passes = [p for p in (*TILE_PASSES, *DEVICE_PASSES) if p is not verify_sync]
    func = run_passes(scaled(m=128, k=2048, stages=9).func, passes, PassContext(SM90, {"tl.persistent": 1}))
    launch = launch_of(func)
    text, faults = check_launch(launch)
    assert not faults and text.startswith("ordered: model of ") and FULL in {b.name for b, _ in launch.plan.shared_offsets}
    return func


def launch_of(func):
    (launch,) = [x for x in walk(func.body) if isinstance(x, Launch)]
    return launch


@pytest.mark.parametrize("name", FAULTS)
def test_planted_faults_are_found(name, sound):
    launch = launch_of(sound)
    bad = FAULTS[name](launch)
    assert bad != launch
    text, faults = check_launch(bad)
    assert faults and text.startswith("not cleared:"), text
    with pytest.raises(TileLangError) as e:
        run_device(rewrite_launch(sound, launch, bad), inputs(m=128, k=2048))
    assert e.value.kind.startswith("sim-")


def rewrite_launch(func, launch, new):
    return replace(func, body=rewrite(func.body, lambda x: new if x is launch else None))


@pytest.mark.skipif(not nvrtc.available(), reason="NVRTC is not installed")
@pytest.mark.parametrize("bn, threads, stages", [(256, 256, 4), (128, 256, 6)])
def test_nothing_is_serialised_or_spilt(bn, threads, stages):
    (kernel,) = compiled(scaled(m=4096, n=4096, k=4096, bm=128, bn=bn, threads=threads, stages=stages)).kernels
    assert "S_steps" in print_kernel(kernel)
    cubin = nvrtc.compile_cubin(print_kernel(kernel), "sm_90a")
    assert cubin.spills == 0 and not re.findall(r"C75\d\d", cubin.log), cubin.log
