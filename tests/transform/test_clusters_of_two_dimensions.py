"""Clusters along two dimensions of a grid, and along one of any length (transform/schedule/persistent.py)."""

import re
from itertools import product

import numpy as np
import pytest
from programs import attention, gemm

import tilelang.language as T
from tilelang.codegen.cuda.printer import print_kernel
from tilelang.errors import TileLangError
from tilelang.ir import Evaluate, For, Launch, Store, Var, const, convert, dtype, replace, rewrite, substitute, walk
from tilelang.ir.evaluate import evaluate
from tilelang.ir.expr import Call
from tilelang.layout import boxes_of
from tilelang.layout.swizzled_boxes import swizzled_box_layout
from tilelang.ops.tma import _sub_tiles
from tilelang.simulator import run_device, run_tile
from tilelang.target import Target
from tilelang.transform.analysis.effects import acts
from tilelang.transform.framework.pass_ import PassContext
from tilelang.transform.pipeline import legalized, lower
from tilelang.transform.schedule.specialize_warps import specialize_warps
from tilelang.transform.schedule.persistent import ClusterMap, make_cluster
from tilelang.transform.verify_sync.launch import check_launch

HOPPER = Target({"kind": "cuda", "arch": "sm_90a"})


def options(cluster, blocks=None):
    return {"tl.enable_hopper": True, "tl.persistent": blocks, "tl.cluster": cluster}


def launch_of(func, cluster, blocks=None):
    return lower(func, HOPPER, options(cluster, blocks)).kernels[0].launch


def value(e, values):
    return int(evaluate(substitute(convert(e), {v: const(n, v.dtype) for v, n in values.items()}), {}))


@pytest.mark.parametrize("spans", [(4, 2), (2, 4), (1, 8), (3, 2), (2, 1, 2)])
def test_masks_and_parts_are_those_of_the_blocks_that_differ_in_the_dimensions_shared(spans):
    rank = Var("rank", dtype("int32"))
    team, binds = make_cluster(spans, rank)
    size = int(np.prod(spans))
    assert team.size == size and team.wide == {k for k, n in enumerate(spans) if n > 1}
    places = [tuple(r // team.stride(k) % n for k, n in enumerate(spans)) for r in range(size)]
    sets = [frozenset(k for k, on in enumerate(bits) if on and spans[k] > 1) for bits in product((0, 1), repeat=len(spans))]
    for r in range(size):
        at = {rank: r}
        for b in binds:
            at[b.var] = value(b.value, at)
        for dims in sets:
            same = [q for q in range(size) if all(places[q][k] == places[r][k] for k in team.wide - dims)]
            assert value(team.mask(dims), at) == sum(1 << q for q in same)
            assert len(team.sharers(dims)) == len(same) and value(team.sharer(dims), at) == same.index(r)
        for some in ([sets[-1]], [frozenset({0}), frozenset({1})]):
            want = {q for dims in some for q in range(size) if all(places[q][k] == places[r][k] for k in team.wide - dims)}
            count, mask = team.peers(some)
            assert count == len(want) and (mask is None) == (count == size)
            assert mask is None or value(mask, at) == sum(1 << q for q in want)
    assert ClusterMap(spans, team.ranks) == team


@pytest.mark.parametrize("rows, columns, blocks, part", [
    (64, 64, 4, (1, 16)), (72, 64, 4, (1, 18)), (104, 64, 8, (1, 13)), (64, 128, 2, (1, 64)), (64, 128, 4, (2, 16)),
    (128, 64, 3, (1, 16)), (64, 192, 4, (3, 16)), (64, 32, 8, (1, 8))])
def test_each_block_has_a_part(rows, columns, blocks, part):
    """(boxes, rows) of the first part; all of them together are the tile, each starting where TMA may."""
    p = boxes_of(swizzled_box_layout((rows, columns), 16, min(128, columns * 2)), 16)
    got = _sub_tiles(p, blocks)
    assert (len(got.boxes), got.boxes[0].rows) == part
    assert got.number >= blocks
    seen = np.zeros((rows, columns), int)
    for k in range(got.number):
        for b in got.boxes:
            row, column = b.row + k * got.step.row, b.column + k * got.step.column
            seen[row:row + b.rows, column:column + b.columns] += 1
            assert b.offset + k * got.step.offset == column * 2 // p.width * p.box_row_bytes + row * p.width
            assert (b.offset + k * got.step.offset) % 128 == 0
    assert (seen == 1).all()


SHAPES = {  # cluster, blocks of a persistent launch, program
    "rows-and-columns": ((2, 2), None, dict(m=128, n=128, k=168, bm=64, bn=64, bk=32, stages=2, tb=True)),
    "grid-is-no-multiple": ((2, 4), None, dict(m=190, n=184, k=96, bm=64, bn=64, bk=32, stages=2)),
    "several-tiles": ((2, 2), 8, dict(m=190, n=328, k=96, bm=64, bn=64, bk=32, stages=3)),
    "parts-of-18-rows": ((1, 4), None, dict(m=250, n=72, k=200, bm=64, bn=72, bk=32, stages=2, tb=True)),
    "parts-that-differ": ((2, 3), None, dict(m=192, n=128, k=136, bm=64, bn=64, bk=32, stages=2, ta=True, tb=True)),
    "two-groups": ((4, 1), 4, dict(m=256, n=256, k=96, bm=128, bn=64, bk=32, stages=2, threads=256)),
}


@pytest.mark.parametrize("name", SHAPES)
def test_computes_the_product(name):
    cluster, blocks, shape = SHAPES[name]
    shape = {"threads": 128, **shape}
    rng = np.random.default_rng(1)
    m, n, k, ta, tb = (shape.get(x, False) for x in ("m", "n", "k", "ta", "tb"))
    a, b = (rng.integers(-3, 4, s).astype(np.float16) for s in ((k, m) if ta else (m, k), (n, k) if tb else (k, n)))
    func = gemm(**shape).func
    program = lower(func, HOPPER, options(cluster, blocks))
    launch = program.kernels[0].launch
    assert launch.plan.cluster == (cluster[0] * cluster[1], 1, 1)
    said = " ".join(launch.plan.report)
    assert re.search(r"clusters of \d( x \d)? along dimensions? \d( and \d)? of the grid", said), said
    assert launch.plan.sync_report.startswith("ordered: model of")
    loads = [x for x in walk(launch) if isinstance(x, Call) and x.op == "tma_load"]
    assert any(x.options.multicast for x in loads)
    args = {"A": a, "B": b, "bias": np.zeros(n, np.float32), "C": np.full((m, n), 7, np.float16)}
    want = ((a.T if ta else a).astype(np.float32) @ (b.T if tb else b).astype(np.float32)).astype(np.float16)
    assert np.array_equal(run_device(program, args).outputs["C"], want)
    tile = specialize_warps(legalized(func, HOPPER, options(cluster, blocks)), PassContext(HOPPER, options(cluster, blocks)))
    assert np.array_equal(run_tile(tile, args)["C"], want)


@pytest.mark.parametrize("cluster", [1, 2, (2, 2)])
def test_rows_that_tma_cannot_store_leave_without_barriers_between_them(cluster):
    """Threads store other elements in each turn of the loop, wherever a block of a cluster has its tile."""
    n = 123
    program = lower(gemm(m=128, n=n, k=64, bm=64, bn=64, bk=32, stages=2, tb=True, threads=128).func, HOPPER, options(cluster))
    launch = program.kernels[0].launch
    assert cluster == 1 or launch.plan.cluster == ((2, 1, 1) if cluster == 2 else (4, 1, 1))
    loops = [x for x in walk(launch) if isinstance(x, For) and any(
        isinstance(y, Store) and y.buffer.name == "C" for y in walk(x)) and not x.plan.tiles]
    assert loops and not any(isinstance(y, Call) and y.op in ("sync_threads", "named_barrier") for x in loops for y in walk(x))
    rng = np.random.default_rng(3)
    a, b = (rng.integers(-3, 4, s).astype(np.float16) for s in ((128, 64), (n, 64)))
    got = run_device(program, {"A": a, "B": b, "bias": np.zeros(n, np.float32), "C": np.full((128, n), 7, np.float16)})
    assert np.array_equal(got.outputs["C"], (a.astype(np.float32) @ b.astype(np.float32).T).astype(np.float16))


def test_sizes_known_at_run_time():
    func = gemm(n=136, k=96, bm=64, bn=64, bk=32, tb=True, dynamic=True).func
    program = lower(func, HOPPER, options((2, 2)))
    assert program.kernels[0].launch.plan.cluster == (4, 1, 1)
    rng = np.random.default_rng(2)
    a, b = (rng.integers(-3, 4, s).astype(np.float16) for s in ((150, 96), (136, 96)))
    got = run_device(program, {"A": a, "B": b, "bias": np.zeros(136, np.float32), "C": np.full((150, 136), 7, np.float16)})
    assert np.array_equal(got.outputs["C"], (a.astype(np.float32) @ b.astype(np.float32).T).astype(np.float16))


def test_a_split_sum_shares_within_its_part():
    """Blocks of different parts of k (dimension 2) are never in one cluster."""
    @T.prim_func
    def main(A: T.Tensor((128, 128), "float16"), B: T.Tensor((128, 128), "float16"), C: T.Tensor((2, 128, 128), "float32")):
        with T.Kernel(2, 2, 2, threads=128) as (bx, by, bz):
            a, b = T.alloc_shared((64, 32), "float16"), T.alloc_shared((64, 32), "float16")
            c = T.alloc_fragment((64, 64), "float32")
            T.clear(c)
            for k in T.Pipelined(2, num_stages=2):
                T.copy(A[by * 64, bz * 64 + k * 32], a)
                T.copy(B[bx * 64, bz * 64 + k * 32], b)
                T.gemm(a, b, c, transpose_B=True)
            T.copy(c, C[bz, by * 64, bx * 64])

    rng = np.random.default_rng(4)
    a, b = (rng.integers(-3, 4, (128, 128)).astype(np.float16) for _ in range(2))
    program = lower(main.func, HOPPER, options((2, 2)))
    assert program.kernels[0].launch.plan.cluster == (4, 1, 1)
    got = run_device(program, {"A": a, "B": b, "C": np.zeros((2, 128, 128), np.float32)}).outputs["C"]
    x, y = (v.astype(np.float32).reshape(128, 2, 64) for v in (a, b))
    assert np.array_equal(got, np.einsum("mpk,npk->pmn", x, y))


def part_of_a_tensor(before=False):
    """Three tiles of 64 rows, of a tensor that has more."""
    @T.prim_func
    def main(A: T.Tensor((256, 64), "float16"), B: T.Tensor((64, 64), "float16"), D: T.Tensor((4,), "int32"),
             C: T.Tensor((256, 64), "float32")):
        with T.Kernel(1, 3, threads=128) as (bx, by):
            a, b = T.alloc_shared((64, 32), "float16"), T.alloc_shared((64, 32), "float16")
            c = T.alloc_fragment((64, 64), "float32")
            if before:
                D[by] = 1
            T.clear(c)
            for k in T.Pipelined(2, num_stages=2):
                T.copy(A[by * 64, k * 32], a)
                T.copy(B[bx * 64, k * 32], b)
                T.gemm(a, b, c, transpose_B=True)
            for i, j in T.Parallel(64, 64):
                T.atomic_add(C[by * 64 + i, j], c[i, j])
            T.atomic_add(D[by], 1)

    return main.func


def test_blocks_beyond_the_grid_change_nothing():
    rng = np.random.default_rng(3)
    a, b = (rng.integers(-3, 4, s).astype(np.float16) for s in ((256, 64), (64, 64)))
    program = lower(part_of_a_tensor(), HOPPER, options((1, 2)))
    launch = program.kernels[0].launch
    assert launch.plan.cluster == (2, 1, 1) and launch.grid[0].value == 4
    got = run_device(program, {"A": a, "B": b, "D": np.zeros(4, np.int32), "C": np.ones((256, 64), np.float32)}).outputs
    want = a.astype(np.float32) @ b.astype(np.float32).T + 1
    want[192:] = 1
    assert np.array_equal(got["C"], want) and got["D"][3] == 0


def test_blocks_beyond_the_grid_load_only_what_others_need():
    """TMA fills a tile outside the tensor with zeros, slower than it loads one, and a GEMM of them takes power."""
    rng = np.random.default_rng(5)
    a, b = (rng.integers(-3, 4, s).astype(np.float16) for s in ((128, 96), (96, 184)))
    for cluster, beyond in (((2, 1), True), ((2, 2), False)):  # two dimensions: such a block might load nothing for another one
        program = lower(gemm(m=128, n=184, k=96, bm=64, bn=64, bk=32, stages=2, threads=128).func, HOPPER, options(cluster))
        assert program.kernels[0].launch.plan.cluster == (cluster[0] * cluster[1], 1, 1)
        text = print_kernel(program.kernels[0])
        found = re.findall(r"if \(bx < 3\) \{\s*(?://[^\n]*\s*)?tl::(tma_load_2d(?:_multicast)?)\(", text)
        assert found == ["tma_load_2d"] * beyond
        got = run_device(program, {"A": a, "B": b, "bias": np.zeros(184, np.float32), "C": np.full((128, 184), 7, np.float16)})
        assert np.array_equal(got.outputs["C"], (a.astype(np.float32) @ b.astype(np.float32)).astype(np.float16))


def grows():
    return attention(1, 2, 256, 64, causal=True, threads=128).func


@pytest.mark.parametrize("func, cluster, blocks, says", [
    (lambda: part_of_a_tensor(True), (1, 2), None, "no clusters of 1 x 2: dimension 1 of the grid is no multiple of 2, and "
     "blocks have effects before or in their loop"),
    (lambda: gemm(m=512, n=128, k=64).func, (4, 2), 4, "no clusters of 4 x 2: there are 4 blocks"),
    (grows, (2, 1), None, "no clusters of 2 x 1: the length of a tile depends on its place along dimension 0"),
    (lambda: attention(1, 2, 256, 64, threads=128).func, (1, 2), None,
     "no clusters of 1 x 2: no load is the same along dimension 1"),
])
def test_what_cannot_be_a_cluster_is_said(func, cluster, blocks, says):
    launch = launch_of(func(), cluster, blocks)
    assert launch.plan.cluster is None and says in " ".join(launch.plan.report), launch.plan.report


def test_a_grid_of_one_dimension():
    @T.prim_func
    def main(A: T.Tensor((192, 64), "float16"), B: T.Tensor((64, 64), "float16"), C: T.Tensor((192, 64), "float32")):
        with T.Kernel(3, threads=128) as bx:
            a, b = T.alloc_shared((64, 32), "float16"), T.alloc_shared((64, 32), "float16")
            c = T.alloc_fragment((64, 64), "float32")
            T.clear(c)
            for k in T.Pipelined(2, num_stages=2):
                T.copy(A[bx * 64, k * 32], a)
                T.copy(B[0, k * 32], b)
                T.gemm(a, b, c, transpose_B=True)
            T.copy(c, C[bx * 64, 0])

    assert "no clusters of 2 x 2: the grid has no dimension 1" in " ".join(launch_of(main.func, (2, 2)).plan.report)
    program = lower(main.func, HOPPER, options((4, 1)))
    assert program.kernels[0].launch.plan.cluster == (4, 1, 1)
    rng = np.random.default_rng(5)
    a, b = (rng.integers(-3, 4, s).astype(np.float16) for s in ((192, 64), (64, 64)))
    got = run_device(program, {"A": a, "B": b, "C": np.zeros((192, 64), np.float32)}).outputs["C"]
    assert np.array_equal(got, a.astype(np.float32) @ b.astype(np.float32).T)


@pytest.mark.parametrize("value, kind", [
    ((4, 4), ValueError), ((0, 2), ValueError), ((2,), ValueError), ((2, 2, 1), ValueError), (3, ValueError),
    ((True, 2), ValueError), ("2x2", TypeError)])
def test_other_values_of_the_option(value, kind):
    with pytest.raises(kind, match=r"tl\.cluster takes"):
        PassContext(HOPPER, {"tl.cluster": value})


def test_pairs_may_be_lists():
    assert PassContext(HOPPER, {"tl.cluster": [2, 1]}).config["tl.cluster"] == (2, 1)


@pytest.mark.parametrize("size, tile, cluster", [
    (1000, (128, 72), (2, 4)), (1024, (128, 72), None), (1000, (64, 128), 2), (1000, (192, 128), (2, 2))])
def test_launches_of_one_round_take_the_cluster_that_saves_most(size, tile, cluster):
    """1024: rows of whole lines.  64x128: 128 blocks, of which not all would run at once in clusters of 4."""
    config = {"tl.enable_hopper": True}
    func = gemm(m=size, n=size, k=size, bm=tile[0], bn=tile[1], bk=64, stages=5 if tile[0] == 192 else 8, threads=tile[0] * 2,
                tb=True).func
    tiles = specialize_warps(legalized(func, HOPPER, config), PassContext(HOPPER, config))
    launch = next(x for x in walk(tiles.body) if isinstance(x, Launch))
    said = " ".join(launch.plan.report)
    if cluster is None:
        assert launch.plan.cluster is None
    elif cluster == 2:
        assert launch.plan.cluster == (2, 1, 1)
    else:
        assert f"clusters of {cluster[0]} x {cluster[1]} along" in said, said


# ---- faults planted in it --------------------------------------------------------------------------------------------


def calls(launch, op):
    return [x for x in walk(launch) if isinstance(x, Evaluate) and x.call.op == op]


def with_arg(k, fn):
    return lambda c: replace(c, args=tuple(fn(a) if n == k % len(c.args) else a for n, a in enumerate(c.args)))


FAULTS = {
    "mask-without-a-block": ("tma_load", with_arg(-1, lambda a: a & const(7, "uint16")), 0),
    "mask-of-one-block-more": ("tma_load", with_arg(-1, lambda a: a | const(8, "uint16")), 1),
    "mask-of-the-own-block": ("tma_load", with_arg(-1, lambda a: const(1, "uint16")), 1),
    "one-arrival-too-many": ("mbarrier_init", with_arg(1, lambda a: const(a.value + 1, "uint32")), -1),
    "one-arrival-too-few": ("mbarrier_init", with_arg(1, lambda a: const(a.value - 1, "uint32")), -1),
    "bytes-of-the-own-part": ("mbarrier_arrive_expect_tx", with_arg(1, lambda a: const(a.value // 2, "uint32")), 0),
    "released-in-the-own-block-only": ("mbarrier_arrive_remote", with_arg(1, lambda a: a * const(0, "uint32")), 0),
}


def ones():
    return {"A": np.ones((128, 256), np.float16), "B": np.ones((128, 256), np.float16), "bias": np.zeros(128, np.float32),
            "C": np.zeros((128, 128), np.float16)}


@pytest.fixture(scope="module")
def sound():
    func = gemm(m=128, n=128, k=256, bm=64, bn=64, bk=32, stages=2, tb=True, threads=128).func
    return lower(func, HOPPER, options((2, 2)))


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(sound, name):
    kernel = sound.kernels[0]
    op, fn, which = FAULTS[name]
    launch = kernel.launch
    found = calls(launch, op)[which]
    bad = rewrite(launch, lambda x: replace(x, call=fn(x.call)) if x is found else None)
    assert check_launch(launch)[0].startswith("ordered: model of")
    text, faults = check_launch(bad)
    assert faults and text.startswith("not cleared"), text
    host = rewrite(sound.host, lambda x: bad if isinstance(x, Launch) else None)
    with pytest.raises(TileLangError, match=r"error\[sim-"):
        run_device(host, ones())


def test_without_a_fault_it_runs(sound):
    assert (run_device(sound.host, ones()).outputs["C"] == 256).all()


# ---- text ------------------------------------------------------------------------------------------------------------


def test_cuda_text(sound):
    text = print_kernel(sound.kernels[0])
    assert "__cluster_dims__(4, 1, 1)" in text
    assert "(unsigned short)(3u << (unsigned)(rank_y * 2))" in text and "(unsigned short)(5u << (unsigned)rank_x)" in text
    inits = re.findall(r"mbarrier_init\(&As_Bs_empty\[\d\], (\d+)u\)", text)
    assert inits == ["12", "12"]  # 4 warps of the block itself and of the two that it shares a load with


def test_what_is_seen_outside_a_block():
    @T.prim_func
    def main(A: T.Tensor((128,), "float32"), B: T.Tensor((1,), "float32")):
        with T.Kernel(1, threads=128):
            s = T.alloc_shared((128,), "float32")
            T.copy(A, s)
            T.atomic_add(B[0], s[0])
            T.print(s[0])

    launch = next(x for x in walk(main.func.body) if isinstance(x, Launch))
    got = [acts(s) for s in launch.body.stmts]
    assert got[-2:] == [True, True] and not any(got[:-2])
