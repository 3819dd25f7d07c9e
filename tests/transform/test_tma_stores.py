"""Results that leave by TMA: staging in panels, one warp group by itself (ops/tma_store.py, transform/lower/tma_stores.py)."""

import numpy as np
import pytest
from hopper_lowered import launch_of, lowered, ops, plain_stores, report
from programs import EPS, NP, attention, gemm

import tilelang.language as T
from tilelang.codegen.cuda.printer import print_kernel
from tilelang.errors import TileLangError
from tilelang.ir import AddressOf, Bind, Evaluate, For, Seq, Stmt, call, const, rebuild, replace, walk
from tilelang.ir.expr import Call
from tilelang.ops.tma_store import Pieces, accumulator_pieces
from tilelang.runtime import nvrtc
from tilelang.simulator import run_device, run_tile
from tilelang.target import Target
from tilelang.target.wgmma import accumulator_fragment
from tilelang.transform.pipeline import lower

ONE_ROLE = {"disable_warp_specialized": True}


# ---- meaning ----------------------------------------------------------------------------------------------------------

SHAPES = {
    "ragged": dict(m=130, n=136, k=72, bm=128, bn=128, bk=64, threads=256, stages=2),
    "one_group": dict(m=72, n=64, k=64, bm=64, bn=64, bk=32, threads=128, stages=2),
    "three_groups": dict(m=200, n=96, k=64, bm=192, bn=96, bk=64, threads=384, stages=2),
    "two_tiles_of_rows": dict(m=250, n=64, k=64, bm=256, bn=64, bk=64, threads=256, stages=2),
    "part_of_a_panel": dict(m=64, n=160, k=64, bm=64, bn=160, bk=64, threads=128, stages=2),
    "odd_columns": dict(m=64, n=48, k=64, bm=64, bn=24, bk=64, threads=128, stages=2, tb=True),
    "two_groups_of_columns": dict(m=64, n=256, k=64, bm=64, bn=256, bk=64, threads=256, stages=2),
}


@pytest.mark.parametrize("roles", [True, False], ids=["roles", "one_role"])
@pytest.mark.parametrize("out", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("name", SHAPES)
def test_products(name, out, roles):
    shape = SHAPES[name]
    rng = np.random.default_rng(5)
    m, n, k, tb = (shape.get(x, False) for x in ("m", "n", "k", "tb"))
    a, b = rng.standard_normal((m, k)).astype(np.float16), rng.standard_normal((n, k) if tb else (k, n)).astype(np.float16)
    program = lowered(gemm(**shape, out=out), **({} if roles else ONE_ROLE))
    launch = program.kernels[0].launch
    assert ("in_warp_groups" in ops(launch)) == roles
    assert "tma_store" in ops(launch) and not plain_stores(launch)
    assert ("stmatrix" in ops(launch)) == (out != "float32")
    got = run_device(program, {"A": a, "B": b, "bias": np.zeros(n, np.float32), "C": np.zeros((m, n), NP[out])})
    want = a.astype(np.float64) @ (b.T if tb else b).astype(np.float64)
    assert np.abs(got.outputs["C"].astype(np.float64) - want).max() <= (EPS[out] + k * 2.0**-22) * np.abs(want).max()


TRANSPOSED = {  # columns and rows of C, of k, of a tile, threads
    "ragged": (136, 130, 72, 128, 120, 256), "three_groups": (200, 104, 64, 192, 136, 384),
    "two_tiles_of_columns": (256, 40, 64, 256, 72, 256), "one_group": (72, 64, 64, 64, 24, 128),
    "no_whole_rows": (99, 70, 64, 64, 72, 128),
}


def transposed(m, n, k, bm, bn, threads, out="float16"):
    """C = (A @ B^T)^T."""

    @T.prim_func
    def main(A: T.Tensor((m, k), "float16"), B: T.Tensor((n, k), "float16"), C: T.Tensor((n, m), out)):
        with T.Kernel(T.ceildiv(n, bn), T.ceildiv(m, bm), threads=threads) as (bx, by):
            As, Bs = T.alloc_shared((bm, 64), "float16"), T.alloc_shared((bn, 64), "float16")
            F, G = T.alloc_fragment((bm, bn), "float32"), T.alloc_fragment((bn, bm), "float32")
            T.clear(F)
            for ko in T.Pipelined(T.ceildiv(k, 64), num_stages=2):
                T.copy(A[by * bm, ko * 64], As)
                T.copy(B[bx * bn, ko * 64], Bs)
                T.gemm(As, Bs, F, transpose_B=True)
            T.transpose(F, G)
            T.copy(G, C[bx * bn, by * bm])

    return main


@pytest.mark.parametrize("name", TRANSPOSED)
def test_transposed_accumulators(name):
    """A group's 64 rows are a panel's 128 bytes; what TMA cannot write the group carries there, and it turns 16 bits only."""
    shape = TRANSPOSED[name]
    m, n, k = shape[:3]
    rng = np.random.default_rng(5)
    a, b = rng.integers(-3, 4, (m, k)).astype(np.float16), rng.integers(-3, 4, (n, k)).astype(np.float16)
    program = lowered(transposed(*shape))
    launch = program.kernels[0].launch
    assert ("tma_store" in ops(launch)) == (m % 8 == 0) and "stmatrix" in ops(launch)
    assert all(x.options.trans for x in walk(launch) if isinstance(x, Call) and x.op == "stmatrix")
    if m % 8:
        assert "by all threads, from staged boxes" in report(launch)
    got = run_device(program, {"A": a, "B": b, "C": np.full((n, m), np.nan, np.float16)})
    assert np.array_equal(got.outputs["C"], (b.astype(np.float64) @ a.T.astype(np.float64)).astype(np.float16))


def test_transposed_accumulators_of_other_sizes():
    launch = launch_of(transposed(72, 64, 64, 64, 24, 128, "float32"))
    assert "tma_store" not in ops(launch) and "transposed elements of float32" in report(launch)


@pytest.mark.parametrize("out", ["int32", "int8"])
def test_integers(out):
    rng = np.random.default_rng(6)
    a, b = rng.integers(-2, 3, (64, 64)).astype(np.int8), rng.integers(-1, 2, (64, 64)).astype(np.int8)
    program = lowered(gemm(m=64, n=64, k=64, bm=64, bn=64, bk=64, tb=True, dtype="int8", acc="int32", out=out))
    assert {"wgmma", "tma_store"} <= set(ops(program.kernels[0].launch))
    got = run_device(program, {"A": a, "B": b, "bias": np.zeros(64, np.int32), "C": np.zeros((64, 64), NP[out])})
    assert np.array_equal(got.outputs["C"], (a.astype(np.int32) @ b.T.astype(np.int32)).astype(NP[out]))


def test_attention_writes_its_rows_between_the_heads():
    program = lowered(attention(2, 2, 100, 64))
    launch = program.kernels[0].launch
    assert "tma_store" in ops(launch) and not plain_stores(launch)
    assert ("O", (64, 1, 64, 1)) in [(m[1].name, tuple(m[2])) for m in launch.plan.tensor_maps]
    rng = np.random.default_rng(7)
    q, k, v = (rng.standard_normal((2, 100, 2, 64)).astype(np.float16) for _ in range(3))
    got = run_device(program, {"Q": q, "K": k, "V": v, "O": np.zeros_like(q)}).outputs["O"].astype(np.float64)
    s = np.einsum("bihd,bjhd->bhij", q.astype(np.float64), k.astype(np.float64)) / 8
    p = np.exp(s - s.max(-1, keepdims=True))
    want = np.einsum("bhij,bjhd->bihd", p / p.sum(-1, keepdims=True), v.astype(np.float64))
    assert np.abs(got - want).max() < 6 * 2.0**-11 * np.abs(v.astype(np.float64)).max()


def in_a_loop(bn=160, moves=True, tiles=3, rows=64):
    """Tiles one after another in one block; without `moves` each over the one before.  rows: of the first operand's tile."""

    @T.prim_func
    def main(A: T.Tensor((rows, 64), "float16"), B: T.Tensor((64, tiles * bn), "float16"),
             C: T.Tensor((64, tiles * bn), "float16")):
        with T.Kernel(1, threads=128):
            As, Bs = T.alloc_shared((rows, 64), "float16"), T.alloc_shared((64, bn), "float16")
            Cf = T.alloc_fragment((64, bn), "float32")
            T.copy(A, As)
            for t in range(tiles):
                T.copy(B[0, t * bn], Bs)
                T.gemm(As[0:64, :], Bs, Cf, clear_accum=True)
                place = (t if moves else 0) * bn
                T.copy(Cf, C[0, place])

    return main


def test_a_place_that_was_bound_to_a_name_awaited_whole_writes():
    launch = lowered(in_a_loop(64)).kernels[0].launch
    assert any(isinstance(x, Bind) and x.var.name == "place" for x in walk(launch))
    assert [x.options.read for x in walk(launch) if isinstance(x, Call) and x.op == "bulk_wait"] == [True, True]


def test_two_boxes_of_an_iteration_met_four_barriers():
    loop = next(x for x in walk(lowered(in_a_loop(128, rows=896)).kernels[0].launch, For) if "tma_store" in ops(x))
    assert ops(loop).count("tma_store") == 2 and ops(loop).count("bulk_commit") == 1


def by_warps(tiles=3):
    """Two warp groups store a box each in every iteration, beside results of the loop that are stored behind it."""

    @T.prim_func
    def main(A: T.Tensor((128, 64), "float16"), B: T.Tensor((tiles, 64, 64), "float16"),
             C: T.Tensor((128, tiles * 64), "float16"), D: T.Tensor((128, 64), "float16")):
        with T.Kernel(1, threads=256):
            As, Bs = T.alloc_shared((128, 64), "float16"), T.alloc_shared((64, 64), "float16")
            c, d = T.alloc_fragment((128, 64), "float32"), T.alloc_fragment((128, 64), "float32")
            h = T.alloc_fragment((128, 64), "float16")
            T.copy(A, As)
            T.clear(d)
            for t in T.Pipelined(tiles, num_stages=2):
                T.copy(B[t, :, :], Bs)
                T.gemm(As, Bs, c, clear_accum=True)
                T.copy(c, h)
                T.copy(h, C[0, t * 64])
                T.gemm(h, Bs, d)
            T.copy(d, D)

    return main


@pytest.mark.parametrize("fault", [None, "fence_proxy_async", "bulk_wait", "bulk_commit"])
def test_each_warp_stores_its_rows(fault):
    tiles, rng = 5, np.random.default_rng(4)
    program = lowered(by_warps(tiles))
    loop = next(x for x in walk(program.kernels[0].launch, For) if {"tma_store", "wgmma"} <= set(ops(x)))
    assert "named_barrier" not in ops(loop)
    stored = next(x.options.map for x in walk(loop, Call) if x.op == "tma_store")
    assert next(m.box for m in program.kernels[0].tensor_maps if m.name == stored)[1] == 16
    a, b = rng.integers(-2, 3, (128, 64)).astype(np.float16), rng.integers(-2, 3, (tiles, 64, 64)).astype(np.float16)
    given = {"A": a, "B": b, "C": np.zeros((128, tiles * 64), np.float16), "D": np.zeros((128, 64), np.float16)}
    if fault is None:
        got = run_device(program, given).outputs
        c = np.einsum("ik,tkj->tij", a.astype(np.float64), b.astype(np.float64))
        assert np.array_equal(got["C"], np.concatenate(c, 1).astype(np.float16))
        assert np.allclose(got["D"], np.einsum("tij,tjk->ik", c, b.astype(np.float64)), rtol=2e-3)
    else:
        change, seen = without(fault)
        with pytest.raises(TileLangError) as e:
            run_device(edited(program, change), given)
        assert seen and e.value.kind.startswith("sim-")


@pytest.mark.parametrize("far, by_tma", [(320, False), (576, True)])
def test_tiles_that_meet_in_different_iterations_are_not_disjoint(far, by_tma):
    """Within an iteration they do not meet; tile 2 t of iteration 3 is tile t + 5 of iteration 1."""
    @T.prim_func
    def main(A: T.Tensor((64, 64), "float16"), B: T.Tensor((64, 320), "float16"), C: T.Tensor((64, 896), "float16")):
        with T.Kernel(1, threads=128):
            a, b = T.alloc_shared((64, 64), "float16"), T.alloc_shared((64, 64), "float16")
            c, d = T.alloc_fragment((64, 64), "float32"), T.alloc_fragment((64, 64), "float32")
            T.copy(A, a)
            for t in range(5):
                T.copy(B[0, t * 64], b)
                T.gemm(a, b, c, clear_accum=True)
                T.gemm(b, a, d, clear_accum=True)
                T.copy(c, C[0, t * 128])
                T.copy(d, C[0, t * 64 + far])

    assert ("tma_store" in ops(lowered(main).kernels[0].launch)) == by_tma


@pytest.mark.parametrize("back, by_tma", [(1, True), (2, False)])
def test_a_tile_behind_a_loop_of_run_time_length_is_disjoint_from_those_in_it(back, by_tma):
    """The loop stores all tiles but the last one; the tile behind it has a name and indices of 64 bits."""
    n = T.dynamic("n")

    @T.prim_func
    def main(A: T.Tensor((64, 64), "float16"), B: T.Tensor((n, 64), "float16"), C: T.Tensor((n, 64), "float16")):
        with T.Kernel(1, threads=128):
            a, b = T.alloc_shared((64, 64), "float16"), T.alloc_shared((64, 64), "float16")
            c = T.alloc_fragment((64, 64), "float32")
            T.copy(A, a)
            for t in range(T.ceildiv(n, 64) - 1):
                T.copy(B[t * 64, 0], b)
                T.gemm(a, b, c, clear_accum=True)
                T.copy(c, C[T.cast(t, "int64") * 64, 0])
            last = T.cast(T.ceildiv(n, 64) - back, "int64") * 64
            T.copy(B[last, 0], b)
            T.gemm(a, b, c, clear_accum=True)
            T.copy(c, C[last, 0])

    assert ("tma_store" in ops(lowered(main).kernels[0].launch)) == by_tma


@pytest.mark.parametrize("step, far, by_tma", [
    (64, 64, False), (64, -64, False), (128, 64, True), (64, 256, True), (64, 128, False)])
@pytest.mark.parametrize("named", [False, True, "offset"])
def test_what_the_next_iteration_writes_again_was_called_disjoint(step, far, by_tma, named):
    """Tiles k and k + 1 have a constant distance, and iteration k + 1 writes the second one again, perhaps too early."""
    @T.prim_func
    def main(A: T.Tensor((64, 64), "float16"), B: T.Tensor((64, 256), "float16"), C: T.Tensor((64, 640), "float16"),
             first: T.Tensor((1,), "int32")):
        with T.Kernel(1, threads=128):
            a, b = T.alloc_shared((64, 64), "float16"), T.alloc_shared((64, 64), "float16")
            c, d = T.alloc_fragment((64, 64), "float32"), T.alloc_fragment((64, 64), "float32")
            T.copy(A, a)
            for t in range(4):
                T.copy(B[0, t * 64], b)
                T.gemm(a, b, c, clear_accum=True)
                T.gemm(b, a, d, clear_accum=True)
                if named == "offset":
                    T.copy(c, C[0, first[0] * 64 + t * step])
                    T.copy(d, C[0, first[0] * 64 + t * step + far])
                elif named:
                    place = t * step + 64
                    T.copy(c, C[0, place])
                    T.copy(d, C[0, place + far])
                else:
                    T.copy(c, C[0, t * step + 64])
                    T.copy(d, C[0, t * step + 64 + far])

    rng = np.random.default_rng(2)
    a, b = rng.integers(-3, 4, (64, 64)).astype(np.float16), rng.integers(-3, 4, (64, 256)).astype(np.float16)
    program = lowered(main)
    assert ("tma_store" in ops(program.kernels[0].launch)) == by_tma
    got, want = (run(f, {"A": a, "B": b, "C": np.zeros((64, 640), np.float16), "first": np.ones(1, np.int32)}) for run, f in (
        (run_device, program), (run_tile, main.func)))
    assert np.array_equal(got.outputs["C"], want["C"])


@pytest.mark.parametrize("bn", [64, 128, 160, 192])
@pytest.mark.parametrize("moves", [True, False])
def test_tiles_one_after_another(bn, moves):
    rng = np.random.default_rng(8)
    a, b = rng.integers(-3, 4, (64, 64)).astype(np.float16), rng.integers(-3, 4, (64, 3 * bn)).astype(np.float16)
    program = lowered(in_a_loop(bn, moves))
    launch = program.kernels[0].launch
    assert "tma_store" in ops(launch)
    waits = [x.options.read for x in walk(launch) if isinstance(x, Call) and x.op == "bulk_wait"]
    assert (False in waits) == (not moves)  # the same elements again: the stores before are awaited to their end
    got = run_device(program, {"A": a, "B": b, "C": np.zeros((64, 3 * bn), np.float16)}).outputs["C"]
    want = (a.astype(np.float64) @ b.astype(np.float64)).astype(np.float16)
    assert np.array_equal(got if moves else got[:, :bn], want if moves else want[:, 2 * bn:])


@pytest.mark.parametrize("roles", [True, False], ids=["roles", "one_role"])
@pytest.mark.parametrize("n, out, lanes", [(100, "float16", 4), (99, "float16", 1), (102, "float32", 2), (101, "bfloat16", 1),
                                           (60, "int8", 4)])
@pytest.mark.parametrize("threads", [128, 256])
def test_rows_that_tma_cannot_write_leave_in_one_piece(n, out, lanes, threads, roles):
    """Strides that are no multiples of 16 bytes: panels are carried by the threads, as wide as the rows are aligned."""
    rng = np.random.default_rng(14)
    bm, k = threads // 2, 64
    integer = out == "int8"
    dtype, m = ("int8" if integer else "float16"), bm + 9
    a, b = rng.integers(-2, 3, (m, k)).astype(NP[dtype]), rng.integers(-1, 2, (n, k)).astype(NP[dtype])
    program = lowered(gemm(m=m, n=n, k=k, bm=bm, bn=64, bk=32, threads=threads, tb=True, stages=2, dtype=dtype,
                           acc="int32" if integer else "float32", out=out), **({} if roles else ONE_ROLE))
    launch = program.kernels[0].launch
    stores = plain_stores(launch)
    assert "tma_store" not in ops(launch) and "from staged boxes" in report(launch) and "multiple of 16" in report(launch)
    assert stores and all(x.indices[-1].dtype.lanes == lanes for x in stores)
    got = run_device(program, {"A": a, "B": b, "bias": np.zeros(n, np.int32 if integer else np.float32),
                               "C": np.zeros((m, n), NP[out])}).outputs["C"]
    want = a.astype(np.float64) @ b.astype(np.float64).T
    assert np.array_equal(got.astype(np.float64), want.astype(NP[out]).astype(np.float64))


def of_some_rows(n, out, threads, tiles=0):
    """Rows counts[t] of each tile t go to C one after another; tiles: in a loop of one block, at the same place each time."""
    bm = threads // 2

    @T.prim_func
    def main(A: T.Tensor((4 * bm, 64), "float16"), B: T.Tensor((64, n), "float16"), counts: T.Tensor((4,), "int32"),
             starts: T.Tensor((4,), "int32"), C: T.Tensor((4 * bm, n), out)):
        with T.Kernel(T.ceildiv(n, 128), 1 if tiles else 4, threads=threads) as (bx, by):
            As, Bs = T.alloc_shared((bm, 32), "float16"), T.alloc_shared((32, 128), "float16")
            Cf = T.alloc_fragment((bm, 128), "float32")
            for t in T.serial(tiles or 1):
                T.clear(Cf)
                for k in T.Pipelined(2, num_stages=2):
                    T.copy(A[(by + t) * bm, k * 32], As)
                    T.copy(B[k * 32, bx * 128], Bs)
                    T.gemm(As, Bs, Cf)
                rows = counts[by + t]
                first = 0 if tiles else starts[by]
                T.copy(Cf[0:rows, 0:128], C[first:first + rows, bx * 128:bx * 128 + 128])

    return main


@pytest.mark.parametrize("roles", [True, False], ids=["roles", "one_role"])
@pytest.mark.parametrize("n, out", [(136, "float16"), (128, "float32"), (99, "bfloat16")])
@pytest.mark.parametrize("threads, counts", [(128, (0, 1, 63, 64)), (256, (64, 65, 128, 127))])
@pytest.mark.parametrize("tiles", [0, 4])
def test_rows_known_at_run_time_leave_in_panels(tiles, threads, counts, n, out, roles):
    """Whole panels by TMA, the rest by threads.  Tiles begin where the one before ended, or in a loop all at row 0."""
    rng = np.random.default_rng(17)
    bm = threads // 2
    a, b = rng.integers(-3, 4, (4 * bm, 64)).astype(np.float16), rng.integers(-3, 4, (64, n)).astype(np.float16)
    program = lowered(of_some_rows(n, out, threads, tiles), **({} if roles else ONE_ROLE))
    launch = program.kernels[0].launch
    assert ("tma_store" in ops(launch)) == (n % 8 == 0)
    lanes = 1 if n % 8 else 16 // np.dtype(NP[out]).itemsize
    assert all(x.indices[-1].dtype.lanes == lanes for x in plain_stores(launch))
    starts = np.cumsum((0, *counts[:-1])).astype(np.int32)
    kept = rng.integers(20, 30, (4 * bm, n)).astype(NP[out])
    got = run_device(program, {"A": a, "B": b, "counts": np.int32(counts), "starts": starts, "C": kept}).outputs["C"]
    sums, want = a.astype(np.float64) @ b.astype(np.float64), kept.astype(np.float64)
    for t, count in enumerate(counts):
        first = 0 if tiles else starts[t]
        want[first:first + count] = sums[t * bm:t * bm + count].astype(NP[out])
    assert np.array_equal(got.astype(np.float64), want)


# ---- loops over tiles -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bn, out", [(64, "float16"), (160, "bfloat16"), (192, "float32")])
@pytest.mark.parametrize("threads", [128, 256])
def test_persistent_launches(bn, out, threads):
    """Roles in a loop over tiles: panels go on from tile to tile, one wait at the end."""
    rng = np.random.default_rng(11)
    bm = threads // 2
    m, n, k = 5 * bm + 9, 2 * bn + 8, 40
    a, b = rng.integers(-3, 4, (m, k)).astype(np.float16), rng.integers(-3, 4, (k, n)).astype(np.float16)
    program = lowered(gemm(m=m, n=n, k=k, bm=bm, bn=bn, bk=32, threads=threads, stages=2, out=out), persistent=3)
    launch = program.kernels[0].launch
    assert "tma_store" in ops(launch) and not plain_stores(launch)
    assert any(isinstance(x, For) and x.plan.tiles and "tma_store" in ops(x.body) for x in walk(launch))
    waits = [x.options.n for x in walk(launch) if isinstance(x, Call) and x.op == "bulk_wait"]
    assert waits[-1] == 0
    got = run_device(program, {"A": a, "B": b, "bias": np.zeros(n, np.float32), "C": np.zeros((m, n), NP[out])})
    want = a.astype(np.float64) @ b.astype(np.float64)
    assert np.array_equal(got.outputs["C"].astype(np.float64), want.astype(NP[out]).astype(np.float64))


# ---- sums -------------------------------------------------------------------------------------------------------------


def split_k(out="float32", through_shared=False, **options):
    @T.prim_func
    def main(A: T.Tensor((72, 128), "float16"), B: T.Tensor((128, 136), "float16"), C: T.Tensor((72, 136), out)):
        with T.Kernel(2, 2, 2, threads=128) as (bx, by, bz):
            As, Bs = T.alloc_shared((64, 32), "float16"), T.alloc_shared((32, 128), "float16")
            Cf, Cs = T.alloc_fragment((64, 128), "float32"), T.alloc_shared((64, 128), out)
            T.clear(Cf)
            for k in T.Pipelined(2, num_stages=2):
                T.copy(A[by * 64, bz * 64 + k * 32], As)
                T.copy(B[bz * 64 + k * 32, bx * 128], Bs)
                T.gemm(As, Bs, Cf)
            if through_shared:
                T.copy(Cf, Cs)
                T.atomic_add(C[by * 64, bx * 128], Cs, **options)
            else:
                T.atomic_add(C[by * 64, bx * 128], Cf, **options)

    return main


@pytest.mark.parametrize("out", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("through_shared", [False, True])
@pytest.mark.parametrize("roles", [True, False])
def test_sums(out, through_shared, roles):
    program = lowered(split_k(out, through_shared), **({} if roles else ONE_ROLE))
    launch = program.kernels[0].launch
    assert "tma_reduce_add" in ops(launch) and not {"atomic_add", "tma_store"} & set(ops(launch))
    rng = np.random.default_rng(12)
    a, b = rng.integers(-2, 3, (72, 128)).astype(np.float16), rng.integers(-1, 2, (128, 136)).astype(np.float16)
    c = rng.integers(-3, 4, (72, 136)).astype(NP[out])
    got = run_device(program, {"A": a, "B": b, "C": c}).outputs["C"].astype(np.float64)
    assert np.array_equal(got, a.astype(np.float64) @ b.astype(np.float64) + c.astype(np.float64))


def test_sums_that_ask_for_tma():
    off = lower(split_k(through_shared=True, use_tma=True).func, Target({"kind": "cuda", "arch": "sm_90a"}),
                {"tl.enable_hopper": False})
    found = ops(off.kernels[0].launch)
    assert "tma_reduce_add" in found and not {"tma_load", "tma_store", "wgmma"} & set(found)
    rng = np.random.default_rng(13)
    a, b = rng.integers(-2, 3, (72, 128)).astype(np.float16), rng.integers(-1, 2, (128, 136)).astype(np.float16)
    got = run_device(off, {"A": a, "B": b, "C": np.zeros((72, 136), np.float32)}).outputs["C"]
    assert np.array_equal(got, a.astype(np.float64) @ b.astype(np.float64))


def added(dtype="float32", order=None, kind="add", again=False):
    @T.prim_func
    def main(A: T.Tensor((64, 64), dtype), C: T.Tensor((64, 64), dtype)):
        with T.Kernel(2, threads=128):
            S = T.alloc_shared((64, 64), dtype)
            T.copy(A, S)
            if kind == "add":
                T.atomic_add(C, S, memory_order=order)
            else:
                T.atomic_max(C, S)
            if again:
                T.atomic_max(C, S)

    return main


@pytest.mark.parametrize("program", [lambda: added(order="release"), lambda: added(kind="max"), lambda: added("int64"),
                                     lambda: added(again=True)])
def test_sums_that_tma_has_not(program):
    launch = launch_of(program())
    assert "tma_reduce_add" not in ops(launch) and {"atomic_add", "atomic_max"} & set(ops(launch))


def test_rows_of_one_dimension_are_added_by_tma_and_not_refused():
    @T.prim_func
    def main(X: T.Tensor((4, 300), "float32"), Y: T.Tensor((2, 300), "float32")):
        with T.Kernel(4, 2, threads=64) as (b, c):
            s = T.alloc_shared((256,), "float32")
            T.copy(X[b, c * 256], s)
            T.atomic_add(Y[b % 2, c * 256:c * 256 + 256], s, use_tma=True)

    program = lowered(main)
    assert ops(program.kernels[0].launch).count("tma_reduce_add") == 1
    x, y = (np.arange(n * 300, dtype=np.float32).reshape(n, 300) for n in (4, 2))
    assert np.array_equal(run_device(program, {"X": x, "Y": y}).outputs["Y"], y + x[:2] + x[2:])


@pytest.mark.parametrize("target, dtype, words", [("sm_80", "float32", "TMA support"), ("sm_90a", "int64", "does not support"),
                                                  ("sm_90a", "float32", "whole shared tile")])
def test_sums_by_tma_are_refused_by_name(target, dtype, words):
    @T.prim_func
    def main(A: T.Tensor((64, 64), dtype), C: T.Tensor((64, 64), dtype)):
        with T.Kernel(1, threads=128):
            F = T.alloc_fragment((64, 64), dtype)
            T.copy(A, F)
            T.atomic_add(C, F, use_tma=True)

    with pytest.raises(TileLangError) as e:
        lower(main.func, Target({"kind": "cuda", "arch": target}))
    assert e.value.kind == "atomic-option" and words in str(e.value)


# ---- where it is not done ---------------------------------------------------------------------------------------------


def reads_again():
    @T.prim_func
    def main(A: T.Tensor((64, 64), "float16"), C: T.Tensor((64, 64), "float16"), D: T.Tensor((64, 64), "float16")):
        with T.Kernel(1, threads=128):
            As, Cf = T.alloc_shared((64, 64), "float16"), T.alloc_fragment((64, 64), "float32")
            T.copy(A, As)
            T.gemm(As, As, Cf, clear_accum=True)
            T.copy(Cf, C)
            for i, j in T.Parallel(64, 64):
                D[i, j] = C[i, j] + T.float16(1)

    return main


def overlapping():
    @T.prim_func
    def main(A: T.Tensor((64, 64), "float16"), C: T.Tensor((64, 96), "float16")):
        with T.Kernel(1, threads=128):
            As, Cf = T.alloc_shared((64, 64), "float16"), T.alloc_fragment((64, 64), "float32")
            T.copy(A, As)
            T.gemm(As, As, Cf, clear_accum=True)
            T.copy(Cf, C[0, 0])
            T.copy(Cf, C[0, 32])

    return main


def asks_for_another_way():
    @T.prim_func
    def main(A: T.Tensor((64, 64), "float16"), C: T.Tensor((64, 64), "float16")):
        with T.Kernel(1, threads=128):
            As, Cf = T.alloc_shared((64, 64), "float16"), T.alloc_fragment((64, 64), "float32")
            T.copy(A, As)
            T.gemm(As, As, Cf, clear_accum=True)
            T.copy(Cf, C, disable_tma=True)

    return main


def own_barriers():
    @T.prim_func
    def main(A: T.Tensor((64, 64), "float16"), C: T.Tensor((64, 64), "float16")):
        with T.Kernel(1, threads=128):
            As, Cf = T.alloc_shared((64, 64), "float16"), T.alloc_fragment((64, 64), "float32")
            T.copy(A, As)
            T.sync_threads(9, 128)
            T.gemm(As, As, Cf, clear_accum=True)
            T.copy(Cf, C)

    return main


@pytest.mark.parametrize("program, why", [
    (reads_again, "read in another way"), (overlapping, "the same elements"), (asks_for_another_way, "another way"),
    (own_barriers, "chooses its barriers itself"),
    (lambda: gemm(m=64, n=100, k=64, bm=64, bn=64, bk=64), "multiple of 16"),
    (lambda: gemm(m=128, n=256, k=256, bm=128, bn=256, bk=64, stages=4, threads=256, out="float32", dynamic=True), ""),
])
def test_declined_stores_say_why(program, why):
    launch = launch_of(program())
    if why:
        assert "tma_store" not in ops(launch) and why in report(launch)
        assert plain_stores(launch)
    else:
        assert "tma_store" in ops(launch)


def test_what_is_declined_still_computes():
    a = np.random.default_rng(9).integers(-2, 3, (64, 64)).astype(np.float16)
    want = a.astype(np.float64) @ a.astype(np.float64)
    got = run_device(lowered(reads_again()), {"A": a, "C": np.zeros_like(a), "D": np.zeros_like(a)}).outputs
    assert np.array_equal(got["C"], want) and np.array_equal(got["D"], want + 1)
    got = run_device(lowered(overlapping()), {"A": a, "C": np.zeros((64, 96), np.float16)}).outputs
    assert np.array_equal(got["C"][:, 32:], want) and np.array_equal(got["C"][:, :32], want[:, :32])


@pytest.mark.parametrize("bn, bk, stages, panels", [(256, 64, 2, 4), (256, 64, 4, 2), (192, 32, 10, 1)])
def test_staging_takes_what_shared_memory_is_left(bn, bk, stages, panels):
    """Where a block goes on to the next tile, whose stages are loaded meanwhile."""
    made = gemm(m=1024, n=bn, k=448, bm=128, bn=bn, bk=bk, stages=stages, threads=256, tb=True)
    launch = lowered(made, persistent=3).kernels[0].launch
    (staging,) = [b for b, _ in launch.plan.shared_offsets if b.name == "staging"]
    assert staging.size * staging.dtype.bytes == panels * 2 * 8192 and launch.plan.shared_bytes <= 232448
    pending = {x.options.n for x in walk(launch) if isinstance(x, Call) and x.op == "bulk_wait"}
    assert pending == {panels - 1, 0}


@pytest.mark.parametrize("bn, bk, stages", [(256, 64, 4), (192, 32, 11)])
def test_one_tile_is_staged_where_its_operands_were(bn, bk, stages):
    """After a barrier of all threads that multiply; then no box waits for another one."""
    launch = launch_of(gemm(m=256, n=bn, k=448, bm=128, bn=bn, bk=bk, stages=stages, threads=256, tb=True))
    at = {b.name: (offset, b.size * b.dtype.bytes) for b, offset in launch.plan.shared_offsets}
    first, size = at["staging"]
    assert size == bn // 64 * 2 * 8192 and launch.plan.shared_bytes <= 232448
    assert any(start <= first < start + n for name, (start, n) in at.items() if name != "staging")
    assert [x.options.n for x in walk(launch) if isinstance(x, Call) and x.op == "bulk_wait"] == [0]


def test_a_second_panel_costs_no_block_of_a_multiprocessor():
    """Two blocks of 110 KB fit with one panel of 8 KB each, not with two; of 115 KB they fit with two."""
    for bn, bk, stages, panels in ((256, 32, 5, 1), (128, 64, 4, 2)):
        launch = launch_of(gemm(m=64, n=bn, k=512, bm=64, bn=bn, bk=bk, stages=stages, threads=128))
        (staging,) = [b for b, _ in launch.plan.shared_offsets if b.name == "staging"]
        assert staging.size * 2 == panels * 8192 and 2 * (launch.plan.shared_bytes + 1024) <= 228 * 1024


def test_no_room_for_staging():
    """The tiles alone fill shared memory, and the next one's are loaded meanwhile."""
    made = gemm(m=1024, n=192, k=512, bm=128, bn=192, bk=32, stages=11, threads=256, tb=True)
    launch = lowered(made, persistent=3).kernels[0].launch
    assert "tma_store" not in ops(launch) and "no shared memory" in report(launch)
    assert launch.plan.shared_bytes <= 232448


def test_pieces_of_accumulators():
    for n in (8, 64, 256):
        pieces = accumulator_pieces(accumulator_fragment(n), 128)
        assert pieces is not None and pieces.groups == n // 8 and not pieces.tiles
        turned = accumulator_pieces(accumulator_fragment(n).permuted((1, 0)), 128)
        assert turned == Pieces(pieces.groups, (), (), (), transposed=True)


# ---- planted faults ---------------------------------------------------------------------------------------------------


def edited(program, change):
    """The program with change(statement) -> statement or None (keep) applied everywhere."""

    def visit(x):
        if isinstance(x, Stmt):
            new = change(x)
            return new if new is not None else rebuild(x, visit)
        return tuple(map(visit, x)) if isinstance(x, tuple) else x

    return replace(program.host, body=visit(program.host.body))


def without(name, **attrs):
    seen = []

    def change(s):
        if isinstance(s, Evaluate) and s.call.op == name and all(getattr(s.call.options, k) == v for k, v in attrs.items()):
            seen.append(s)
            return Seq(())
        return None

    return change, seen


GEMM = dict(m=256, n=256, k=64, bm=128, bn=256, bk=64, threads=256, stages=4)


def faulty(change, shape=None, program=None):
    rng = np.random.default_rng(1)
    shape = shape or GEMM
    program = program or lowered(gemm(**shape), persistent=1)
    a, b = (rng.standard_normal(s).astype(np.float16) for s in ((shape["m"], shape["k"]), (shape["k"], shape["n"])))
    return run_device(edited(program, change), {
        "A": a, "B": b, "bias": np.zeros(shape["n"], np.float32), "C": np.zeros((shape["m"], shape["n"]), np.float16)}), a, b


@pytest.mark.parametrize("name, attrs, kind", [
    ("fence_proxy_async", {}, "sim-proxy"), ("bulk_wait", {"n": 1}, "sim-race"), ("bulk_wait", {"n": 0}, "sim-async"),
    ("named_barrier", {}, "sim-"), ("bulk_commit", {}, "sim-"),
])
def test_faults_are_found(name, attrs, kind):
    change, seen = without(name, **attrs)
    with pytest.raises(TileLangError) as e:
        faulty(change)
    assert seen and e.value.kind.startswith(kind)


def test_waiting_for_one_panel_too_few_is_found():
    def change(s):
        if isinstance(s, Evaluate) and s.call.op == "bulk_wait" and s.call.options.n == 1:
            return Evaluate(call("bulk_wait", (), "void", n=2, read=True))
        return None

    with pytest.raises(TileLangError) as e:
        faulty(change)
    assert e.value.kind == "sim-race"


def test_tiles_that_are_staged_whole_wait_for_those_before_them():
    """One block, four tiles; the panels of a warp group hold all of its part of one."""
    shape = dict(m=256, n=512, k=64, bm=128, bn=256, bk=64, threads=256, stages=2)
    program = lowered(gemm(**shape), persistent=1)
    got, a, b = faulty(lambda s: None, shape, program)
    want = a.astype(np.float64) @ b.astype(np.float64)
    assert np.abs(got.outputs["C"] - want).max() <= 2.0**-10 * np.abs(want).max()
    change, seen = without("bulk_wait", n=3)
    with pytest.raises(TileLangError) as e:
        faulty(change, shape, program)
    assert len(seen) == 4 and e.value.kind == "sim-race"


def test_a_store_from_the_wrong_panel_is_found():
    def change(s):
        if isinstance(s, Evaluate) and s.call.op == "tma_store":
            at = s.call.args[0]
            wrong = AddressOf(at.buffer, (at.indices[0] + const(4096),) if "4096" not in str(at) else (at.indices[0] - 4096,),
                              at.dtype)
            return replace(s, call=replace(s.call, args=(wrong, *s.call.args[1:])))
        return None

    with pytest.raises(TileLangError) as e:
        faulty(change)
    assert e.value.kind.startswith("sim-")


# ---- what ptxas makes of it -------------------------------------------------------------------------------------------

LARGE = {"gemm": lambda: gemm(m=4096, n=4096, k=4096, bm=128, bn=256, bk=64, stages=4, threads=256, tb=True),
         "gemm_bf16": lambda: gemm(m=4096, n=4096, k=4096, bm=256, bn=128, bk=64, stages=4, threads=256, out="bfloat16",
                                   dtype="bfloat16"),
         "gemm_f32": lambda: gemm(m=4096, n=4096, k=4096, bm=128, bn=160, bk=64, stages=4, threads=256, out="float32"),
         "gemm_int8": lambda: gemm(m=4096, n=4096, k=4096, bm=128, bn=128, bk=128, stages=4, threads=256, tb=True,
                                   dtype="int8", acc="int32", out="int8"),
         "gemm_odd": lambda: gemm(m=4096, n=4001, k=4096, bm=128, bn=256, bk=64, stages=4, threads=256, tb=True),
         "attention": lambda: attention(1, 16, 4096, 128, bm=128, bn=128, threads=256)}


@pytest.mark.skipif(not nvrtc.available(), reason="NVRTC is not installed")
@pytest.mark.parametrize("name", LARGE)
def test_assembles(name):
    (kernel,) = lowered(LARGE[name]()).kernels
    assert ("tma_store" in ops(kernel.launch)) == (name != "gemm_odd")
    cubin = nvrtc.compile_cubin(print_kernel(kernel), "sm_90a")
    assert cubin.spills == 0 and "C75" not in cubin.log, cubin.log


def test_groups_that_reduce_rows_do_not_wait_for_each_other_to_store():
    """They end at different times: a barrier of all in front of staging in the ring took 1 to 2 % of attention of one wave."""
    (kernel,) = lower(attention(1, 1, 128, 64, bm=128, bn=64, threads=256).func,
                      Target({"kind": "cuda", "arch": "sm_90a"})).kernels
    found = [c.op for c in walk(kernel.launch.body, Call)]
    # A group waits for its own stores before it stages and at its end; behind a barrier of all it would wait at the end alone.
    assert found.count("bulk_wait") == 2 and found.count("tma_store") == 1


@pytest.mark.parametrize("trips", [0, 1])
def test_a_loop_that_never_runs_made_any_two_stores_disjoint(trips):
    """Its bounds contradict each other, from which anything follows: both copies went by TMA, in any order."""
    @T.prim_func
    def main(A: T.Tensor((64, 64), "float16"), C: T.Tensor((2, 64, 64), "float32")):
        with T.Kernel(2, threads=128) as b:
            a, x = T.alloc_shared((64, 64), "float16"), T.alloc_fragment((64, 64), "float32")
            T.clear(x)
            T.copy(x, C[b, :, :])
            for _ in T.serial(trips):
                T.copy(A, a)
                T.gemm(a, a, x)
            for i, j in T.Parallel(64, 64):
                x[i, j] += 1.0
            T.copy(x, C[b, :, :])

    args = [np.ones((64, 64), np.float16), np.zeros((2, 64, 64), np.float32)]
    out = run_device(lower(main.func, Target({"kind": "cuda", "arch": "sm_90a"})), args).outputs["C"]
    assert np.array_equal(out, np.full((2, 64, 64), 64 * trips + 1))
