"""Launches with warp roles that loop over tiles (transform/schedule/persistent.py, tile_steps.py)."""

import itertools
import math

import numpy as np
import pytest
from programs import attention, cases, gemm

import tilelang.language as T
from tilelang.ir import For, If, Launch, convert, numpy_dtype, substitute, walk
from tilelang.ir.expr import Call, Const
from tilelang.ir.evaluate import evaluate
from tilelang.simulator import run_device, run_tile
from tilelang.target import Target
from tilelang.transform.schedule import emit
from tilelang.transform.analysis.cluster_pairs import Load, pays_in_one_wave
from tilelang.transform.framework.pass_ import PassContext
from tilelang.transform.schedule.persistent import Work, plan_tiles
from tilelang.transform.pipeline import legalized, lower
from tilelang.transform.schedule.specialize_warps import specialize_warps

CASES = {c.name: c for c in cases() if c.name.startswith(("gemm", "attention"))}
HOPPER = Target({"kind": "cuda", "arch": "sm_90a"})


def options(blocks=3, **more):
    return {"tl.enable_hopper": True, "tl.persistent": blocks, **more}


def run(func, program, inputs, want, bound, out_idx):
    given = iter(inputs)
    outputs = dict(zip([i % len(func.buffers) for i in out_idx], want))
    args = {b.name: np.zeros(outputs[i].shape, numpy_dtype(b.dtype)) if i in outputs else next(given)
            for i, (_, b) in enumerate(func.buffers)}
    got = program(args)
    for i, w in outputs.items():
        assert np.abs(got[func.buffers[i][1].name].astype(np.float64) - w).max() <= bound


@pytest.mark.parametrize("name", CASES)
def test_computes_the_program(name):
    case = CASES[name]
    func = case.program().func
    program = lower(func, HOPPER, options())
    inputs = case.inputs(np.random.default_rng(0))
    run(func, lambda a: run_device(program, a).outputs, inputs, case.reference(*inputs), case.bound(*inputs), case.out_idx)


@pytest.mark.parametrize("stages, k", list(itertools.product((2, 3, 4), (0, 32, 96, 256))))
def test_rings_go_on_from_tile_to_tile(stages, k):
    """3 blocks, 3 x 4 tiles: each block's second tile starts where the first one left the ring."""
    rng = np.random.default_rng(stages * 1000 + k)
    m, n = 130, 200
    func = gemm(m=m, n=n, k=k, bm=64, bn=64, bk=32, threads=128, stages=stages).func
    program = lower(func, HOPPER, options())
    (launch,) = [x.launch for x in program.kernels]
    assert "persistent" in " ".join(launch.plan.report)
    a, b = (rng.integers(-3, 4, s).astype(np.float16) for s in ((m, k), (k, n)))
    got = run_device(program, {"A": a, "B": b, "bias": np.zeros(n, np.float32), "C": np.full((m, n), 7, np.float16)})
    assert np.array_equal(got.outputs["C"], (a.astype(np.float32) @ b.astype(np.float32)).astype(np.float16))


def test_two_consumer_groups_and_a_batch():
    @T.prim_func
    def batched(A: T.Tensor((3, 200, 96), "float16"), B: T.Tensor((3, 96, 136), "float16"),
                C: T.Tensor((3, 200, 136), "float32")):
        with T.Kernel(T.ceildiv(136, 64), T.ceildiv(200, 128), 3, threads=256) as (bx, by, bz):
            As, Bs = T.alloc_shared((128, 32), "float16"), T.alloc_shared((32, 64), "float16")
            Cf = T.alloc_fragment((128, 64), "float32")
            T.clear(Cf)
            for k in T.Pipelined(3, num_stages=2):
                T.copy(A[bz, by * 128, k * 32], As)
                T.copy(B[bz, k * 32, bx * 64], Bs)
                T.gemm(As, Bs, Cf)
            T.copy(Cf, C[bz, by * 128, bx * 64])

    rng = np.random.default_rng(5)
    a, b = (rng.integers(-3, 4, s).astype(np.float16) for s in ((3, 200, 96), (3, 96, 136)))
    got = run_device(lower(batched.func, HOPPER, options(4)), {"A": a, "B": b, "C": np.zeros((3, 200, 136), np.float32)})
    assert np.array_equal(got.outputs["C"], a.astype(np.float32) @ b.astype(np.float32))


@pytest.mark.parametrize("causal", [False, True])
def test_queries_are_loaded_by_the_producer_once_a_tile(causal):
    func = attention(1, 2, 200, 64, causal=causal, threads=128).func
    tile = specialize_warps(legalized(func, HOPPER, options()), PassContext(HOPPER, options()))
    launch = next(x for x in walk(tile.body) if isinstance(x, Launch))
    names = {x.buffer.name for x in walk(launch) if getattr(getattr(x, "buffer", None), "scope_name", "") == "shared.barrier"}
    assert {"Qs_full", "Qs_empty"} <= names
    assert (" longest first" in " ".join(launch.plan.report)) == causal
    rng = np.random.default_rng(3)
    q, k, v = (rng.standard_normal((1, 200, 2, 64)).astype(np.float16) for _ in range(3))
    args = {"Q": q, "K": k, "V": v, "O": np.zeros_like(q)}
    want = run_tile(func, args)["O"].astype(np.float64)
    assert np.abs(run_tile(tile, args)["O"].astype(np.float64) - want).max() < 2e-3
    got = run_device(lower(func, HOPPER, options()), args).outputs["O"].astype(np.float64)
    assert np.abs(got - want).max() < 2e-3


GRIDS = [(7,), (5, 3), (1, 9), (9, 1), (4, 4, 3), (3, 5, 2)]


@pytest.mark.parametrize("swizzle", [None, (2, "row"), (3, "column")])
@pytest.mark.parametrize("growing", [None, 0, 1])
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("grid", GRIDS)
def test_every_tile_is_computed_once(grid, sign, growing, swizzle):
    names = ("bx", "by", "bz")[:len(grid)]
    launch = _launch(grid, swizzle)
    bx = launch.block_vars
    extent = convert(8) if growing is None or growing >= len(grid) else 10 + bx[growing] * sign
    loads = ((4096, (bx[0],)), (8192, (bx[-1],))) if len(bx) > 1 else ((4096, (bx[0],)),)
    tiles = plan_tiles(launch, Work(loads, extent, bx), PassContext(HOPPER, options(3 if 3 < np.prod(grid) else 2)))
    assert not isinstance(tiles, str)
    seen = []
    for block in range(int(tiles.grid.value)):
        count = _value(tiles.count, {tiles.block: block})
        for i in range(count):
            values = {tiles.block: block, tiles.index: i}
            for bind in tiles.binds:
                values[bind.var] = _value(bind.value, values)
            seen.append(tuple(values[v] for v in bx))
    assert sorted(seen) == sorted(itertools.product(*map(range, grid))), names


@pytest.mark.parametrize("grows", [True, False])
def test_tiles_that_got_shorter_along_a_dimension_came_in_order(grows):
    launch = _launch((6, 4), None)
    bx, _ = launch.block_vars
    work = Work(((1 << 20, ()),), bx + 1 if grows else 6 - bx, launch.block_vars)
    tiles = plan_tiles(launch, work, PassContext(HOPPER, options(2)))
    order = []
    for i in range(_value(tiles.count, {tiles.block: 0})):
        values = {tiles.block: 0, tiles.index: i}
        for bind in tiles.binds:
            values[bind.var] = _value(bind.value, values)
        order.append(values[bx])
    assert order == sorted(order, reverse=grows) and order[0] == (5 if grows else 0)


@pytest.mark.parametrize("spins", [False, True])
def test_the_longest_blocks_under_a_condition_started_last(spins):
    @T.prim_func
    def main(A: T.Tensor((256, 256), "float16"), N: T.Tensor((1,), "int32"), C: T.Tensor((256, 64), "float32")):
        with T.Kernel(4, threads=128) as bx:
            a, b = T.alloc_shared((64, 64), "float16"), T.alloc_shared((64, 64), "float16")
            c = T.alloc_fragment((64, 64), "float32")
            if spins:
                while N[0] < 0:
                    T.sync_threads()
            if bx * 64 < N[0]:
                T.clear(c)
                for k in T.Pipelined(bx + 1, num_stages=2):
                    T.copy(A[bx * 64, k * 64], a)
                    T.copy(A[k * 64, bx * 64], b)
                    T.gemm(a, b, c)
                T.copy(c, C[bx * 64, 0])

    program = lower(main.func, HOPPER, options())
    if spins:
        assert "the longest blocks first" not in " ".join(program.kernels[0].launch.plan.report)
        return
    assert "the longest blocks first" in " ".join(program.kernels[0].launch.plan.report)
    a = np.random.default_rng(2).integers(-3, 4, (256, 256)).astype(np.float16)
    args = {"A": a, "N": np.array([200], np.int32), "C": np.zeros((256, 64), np.float32)}
    assert np.array_equal(run_device(program, args).outputs["C"], run_tile(main.func, args)["C"])


@pytest.mark.parametrize("value, why", [(False, "tl.persistent is off"), (None, "no more tiles than sm_count")])
def test_declined(value, why):
    launch = _launch((6, 4), None)
    assert why in plan_tiles(launch, Work((), convert(8), launch.block_vars), PassContext(HOPPER, options(value)))


def test_blocks_that_may_wait_for_each_other_stay_apart():
    @T.prim_func
    def main(A: T.Tensor((256,), "int32")):
        with T.Kernel(200, threads=128):
            ticket = T.alloc_local((1,), "int32")
            ticket[0] = T.atomic_add(A[0], 1, return_prev=True)
            A[1] = ticket[0]

    launch = next(x for x in walk(main.func.body) if isinstance(x, Launch))
    assert "wait for each other" in plan_tiles(launch, Work((), convert(8), launch.block_vars), PassContext(HOPPER, options(2)))


CLUSTERED = [dict(m=256, n=136, k=200, bm=64, bn=64, bk=64, threads=128, stages=2),
             dict(m=250, n=136, k=200, bm=64, bn=64, bk=64, threads=128, stages=3, tb=True),
             dict(m=256, n=130 * 8, k=96, bm=128, bn=128, bk=32, threads=256, stages=4, ta=True),
             dict(m=64, n=256, k=128, bm=64, bn=64, bk=64, threads=128, stages=2, tb=True)]


@pytest.mark.parametrize("shape", CLUSTERED)
def test_a_cluster_loads_what_its_blocks_share_once(shape):
    rng = np.random.default_rng(1)
    m, n, k, ta, tb = (shape.get(x, False) for x in ("m", "n", "k", "ta", "tb"))
    a, b = (rng.integers(-3, 4, s).astype(np.float16) for s in ((k, m) if ta else (m, k), (n, k) if tb else (k, n)))
    func = gemm(**shape).func
    config = options(2, **{"tl.cluster": 2})
    program = lower(func, HOPPER, config)
    launch = program.kernels[0].launch
    assert launch.plan.cluster == (2, 1, 1) and "clusters of 2" in " ".join(launch.plan.report)
    found = [x.op for x in walk(launch) if isinstance(x, Call)]
    assert "mbarrier_arrive_remote" in found and found.count("cluster_sync") == 2
    loads = [x for x in walk(launch) if isinstance(x, Call) and x.op == "tma_load"]
    assert {x.options.multicast for x in loads} == {True, False}
    args = {"A": a, "B": b, "bias": np.zeros(n, np.float32), "C": np.full((m, n), 7, np.float16)}
    want = ((a.T if ta else a).astype(np.float32) @ (b.T if tb else b).astype(np.float32)).astype(np.float16)
    assert np.array_equal(run_device(program, args).outputs["C"], want)
    tile = specialize_warps(legalized(func, HOPPER, config), PassContext(HOPPER, config))
    assert np.array_equal(run_tile(tile, args)["C"], want)


def test_a_cluster_shares_keys_and_values():
    func = attention(1, 2, 256, 64, threads=128).func
    program = lower(func, HOPPER, options(4, **{"tl.cluster": 2}))
    assert program.kernels[0].launch.plan.cluster == (2, 1, 1)
    rng = np.random.default_rng(3)
    q, k, v = (rng.standard_normal((1, 256, 2, 64)).astype(np.float16) for _ in range(3))
    args = {"Q": q, "K": k, "V": v, "O": np.zeros_like(q)}
    got = run_device(program, args).outputs["O"].astype(np.float64)
    assert np.abs(got - run_tile(func, args)["O"].astype(np.float64)).max() < 2e-3


def test_unknown_grids_have_no_clusters():
    program = lower(gemm(m=192, n=192, k=64, dynamic=True, threads=128).func, HOPPER, options(2, **{"tl.cluster": 2}))
    assert program.kernels[0].launch.plan.cluster is None


@pytest.mark.parametrize("n, blocks", [(320, 6), (192, 2)])
def test_the_last_pair_may_lack_a_tile(n, blocks):
    """3 x 5 tiles for 6 blocks: three waves, with 3 x 6 too. 3 x 3 tiles for two blocks: five waves, with 3 x 4 six."""
    rng = np.random.default_rng(5)
    a, b = (rng.integers(-3, 4, s).astype(np.float16) for s in ((192, 96), (96, n)))
    program = lower(gemm(m=192, n=n, k=96, threads=128).func, HOPPER, options(blocks, **{"tl.cluster": 2}))
    launch = program.kernels[0].launch
    assert launch.plan.cluster == (2, 1, 1) and launch.grid[0].value == blocks
    got = run_device(program, {"A": a, "B": b, "bias": np.zeros(n, np.float32), "C": np.full((192, n), 7, np.float16)})
    assert np.array_equal(got.outputs["C"], (a.astype(np.float32) @ b.astype(np.float32)).astype(np.float16))


def test_clusters_of_four_run_as_many_at_a_time_as_groups_of_multiprocessors_hold():
    config = {"tl.enable_hopper": True, "tl.cluster": (2, 2)}
    func = gemm(m=2048, n=2048, k=64, bm=128, bn=128, bk=64, stages=6, threads=256).func
    tiles = specialize_warps(legalized(func, HOPPER, config), PassContext(HOPPER, config))
    launch = next(x for x in walk(tiles.body) if isinstance(x, Launch))
    assert "persistent: 120 blocks" in " ".join(launch.plan.report)


@pytest.mark.parametrize("m, n, k, found", [(3320, 1584, 10680, True), (3328, 1600, 10752, False), (3320, 1584, 680, False)])
def test_pairs_in_long_loops_whose_rows_lie_across_sectors(m, n, k, found):
    """256x160 tiles, 130 of them: 163 us alone, 152 in pairs; where all rows lie in lines 152 and 148."""
    assert pays_in_one_wave((Load(256 * 128, math.gcd(2 * k, 128), True), Load(160 * 128, math.gcd(2 * n, 128))), 1280,
                             -(-k // 64)) == found


def test_small_grids_keep_one_tile_a_block():
    launch = lower(gemm(m=256, n=256, k=64, bm=128, bn=128, bk=32, threads=256).func, HOPPER, options(None)).kernels[0].launch
    assert "one tile a block" in " ".join(launch.plan.report)
    large = lower(gemm(m=4096, n=4096, k=64, bm=128, bn=128, bk=32, threads=256).func, HOPPER, options(None)).kernels[0].launch
    assert isinstance(large.grid[0], Const) and large.grid[0].value == 132
    (branch,) = [x for x in walk(large) if isinstance(x, If) and isinstance(x.cond, Call) and x.cond.op == "in_warp_groups"]
    assert any(isinstance(x, For) for x in walk(branch.orelse))


def _launch(grid, swizzle):
    @T.prim_func
    def main(A: T.Tensor((4,), "float32")):
        with T.Kernel(*grid, threads=32) as _:
            if swizzle:
                T.use_swizzle(swizzle[0], order=swizzle[1])
            A[0] = 1.0

    return next(x for x in walk(main.func.body) if isinstance(x, Launch))


def _value(e, values):
    return int(evaluate(substitute(convert(e), {v: convert(n) for v, n in values.items()}), {}))


@pytest.mark.parametrize("tile, alone", [((64, 64, 128), False), ((64, 128, 128), False), ((128, 128, 256), True),
                                         ((64, 256, 128), True)])
def test_blocks_share_a_multiprocessor_where_two_fit(tile, alone):
    bm, bn, threads = tile
    launch = lower(gemm(m=4096, n=4096, k=128, bm=bm, bn=bn, bk=64, threads=threads).func, HOPPER,
                   options(None, **{"tl.resize_blocks": False})).kernels[0].launch
    assert ("several blocks run on one SM" not in " ".join(launch.plan.report)) == alone


@pytest.mark.parametrize("n, k, tile, clusters", [
    (4096, 128, (128, 256, 256), False), (4096, 136, (128, 256, 256), True),  # rows of 272 bytes lie across lines
    (4096, 128, (64, 128, 128), False), (256, 136, (64, 128, 128), False)])  # one tile a block
def test_clusters_where_loads_would_keep_the_matrix_unit_waiting(n, k, tile, clusters):
    bm, bn, threads = tile
    launch = lower(gemm(m=4096, n=n, k=k, bm=bm, bn=bn, bk=64, threads=threads, tb=True).func, HOPPER,
                   options(None)).kernels[0].launch
    assert (launch.plan.cluster == (2, 1, 1)) == clusters


@pytest.mark.parametrize("m, n, k, tile, clusters", [
    (1000, 1000, 1000, (64, 128, 128), True), (1024, 1024, 1024, (64, 128, 128), False),  # rows across sectors, or not
    (1000, 4000, 1000, (128, 256, 256), True), (1200, 1200, 1200, (128, 96, 128), False),  # across lines only
    (4096, 128, 4096, (64, 64, 128), False), (1000, 1000, 328, (64, 128, 128), False)])  # too short
def test_clusters_in_one_round_of_tiles_where_they_are_worth_it(m, n, k, tile, clusters):
    bm, bn, threads = tile
    launch = lower(gemm(m=m, n=n, k=k, bm=bm, bn=bn, bk=64, threads=threads, tb=True, stages=8 if threads == 128 else 4).func,
                   HOPPER, options(None)).kernels[0].launch
    assert "one tile a block" in " ".join(launch.plan.report) and (launch.plan.cluster == (2, 1, 1)) == clusters


def test_clusters_of_a_grid_that_is_not_persistent():
    rng = np.random.default_rng(7)
    a, b = (rng.integers(-3, 4, s).astype(np.float16) for s in ((256, 96), (136, 96)))
    program = lower(gemm(m=256, n=136, k=96, bm=64, bn=64, bk=32, tb=True, threads=128).func, HOPPER,
                    options(None, **{"tl.cluster": 2}))
    launch = program.kernels[0].launch
    assert launch.plan.cluster == (2, 1, 1) and launch.grid[0].value == 12
    assert "one tile a block" in " ".join(launch.plan.report)
    ops = [x.op for x in walk(launch) if isinstance(x, Call)]  # blocks part behind their loops, before they store
    assert ops.count("cluster_sync") == 1 and ops.count("cluster_arrive") == 2 and ops[-1] == "cluster_wait"
    assert max(i for i, op in enumerate(ops) if op == "cluster_arrive") < ops.index("tma_store")
    got = run_device(program, {"A": a, "B": b, "bias": np.zeros(136, np.float32), "C": np.full((256, 136), 7, np.float16)})
    assert np.array_equal(got.outputs["C"], (a.astype(np.float32) @ b.astype(np.float32).T).astype(np.float16))


@pytest.mark.parametrize("causal", [False, True])
def test_each_group_takes_its_own_queries(causal, monkeypatch):
    """Two groups of 64 rows: each waits for its part and gives it back by itself, before the last product of a tile."""
    # The interpreter of tiles runs both groups as one: they cannot alternate there.
    monkeypatch.setattr(emit, "LONG", (1e9, 1e9))
    func = attention(1, 2, 300, 64, causal=causal, bm=128, bn=64, threads=256).func
    tile = specialize_warps(legalized(func, HOPPER, options()), PassContext(HOPPER, options()))
    launch = next(x for x in walk(tile.body) if isinstance(x, Launch))
    counts = {x.buffer.name: tuple(int(n) for n in x.buffer.facts.arrive) for x in walk(launch)
              if getattr(getattr(x, "buffer", None), "scope_name", "") == "shared.barrier"}
    assert counts["Qs_full"] == (1, 1) and counts["Qs_empty"] == (4, 4)
    rng = np.random.default_rng(4)
    q, k, v = (rng.standard_normal((1, 300, 2, 64)).astype(np.float16) for _ in range(3))
    args = {"Q": q, "K": k, "V": v, "O": np.zeros_like(q)}
    want = run_tile(func, args)["O"].astype(np.float64)
    assert np.abs(run_tile(tile, args)["O"].astype(np.float64) - want).max() < 2e-3
    program = lower(func, HOPPER, options())
    got = run_device(program, args).outputs["O"].astype(np.float64)
    assert np.abs(got - want).max() < 2e-3
    (kernel,) = program.kernels
    calls = [(x.op, getattr(x.args[0], "buffer", None)) for x in walk(kernel.launch)
             if isinstance(x, Call) and x.op in ("mbarrier_arrive", "wgmma_wait", "tma_load") and x.args]
    empties = [n for n, (op, b) in enumerate(calls) if op == "mbarrier_arrive" and b.name == "Qs_empty"]
    values = [n for n, (op, b) in enumerate(calls) if op == "mbarrier_arrive" and b.name == "Vs_empty"]
    assert empties[0] < values[-1]


def test_a_tile_that_all_groups_read_is_one_load():
    @T.prim_func
    def main(A: T.Tensor((512, 64), "float16"), B: T.Tensor((512, 64), "float16"), C: T.Tensor((512, 64), "float32")):
        with T.Kernel(4, threads=256) as bx:
            As, Bs = T.alloc_shared((128, 64), "float16"), T.alloc_shared((64, 64), "float16")
            Cf = T.alloc_fragment((128, 64), "float32")
            T.copy(A[bx * 128, 0], As)
            T.clear(Cf)
            for k in T.Pipelined(8, num_stages=2):
                T.copy(B[k * 64, 0], Bs)
                T.gemm(As, Bs, Cf)
            for i, j in T.Parallel(128, 64):
                Cf[i, j] = Cf[i, j] + As[127 - i, j]
            T.copy(Cf, C[bx * 128, 0])

    tile = specialize_warps(legalized(main.func, HOPPER, options()), PassContext(HOPPER, options()))
    names = {x.buffer.name: len(x.buffer.facts.arrive) for x in walk(tile.body)
             if getattr(getattr(x, "buffer", None), "scope_name", "") == "shared.barrier"}
    assert names["As_full"] == 1
    rng = np.random.default_rng(6)
    a, b = (rng.integers(-3, 4, (512, 64)).astype(np.float16) for _ in range(2))
    got = run_device(lower(main.func, HOPPER, options()), {"A": a, "B": b, "C": np.zeros((512, 64), np.float32)})
    turned = a.reshape(4, 128, 64)[:, ::-1].reshape(512, 64).astype(np.float64)
    want = a.astype(np.float64) @ b.reshape(8, 64, 64).sum(0).astype(np.float64) + turned
    assert np.array_equal(got.outputs["C"], want)
