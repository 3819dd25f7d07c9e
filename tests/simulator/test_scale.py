"""T.Scale: tile collectives of the blocks of one number, on both simulators, for 2, 4 and 8 ranks."""

import numpy as np
import pytest

import tilelang.language as T
from tilelang.errors import TileLangError
from tilelang.simulator import run_device_ranks, run_tile, run_tile_ranks
from tilelang.target import Target
from tilelang.transform.pipeline import lower

M, N = 8, 16
HOPPER = Target({"kind": "cuda", "arch": "sm_90a"})


def collectives(ranks, dtype="float32", rounds=1, blocks=1):
    """Each block calls every collective with its tile."""

    @T.prim_func
    def main(X: T.Tensor((blocks, ranks, M, N), dtype), box: T.SymmTensor((blocks, 2, ranks, M, N), dtype),
             pad: T.SymmTensor((blocks, 2 * ranks), "int64"), gathered: T.Tensor((blocks, ranks, M, N), dtype),
             exchanged: T.Tensor((blocks, ranks, M, N), dtype), out: T.Tensor((blocks, 3, M, N), dtype)):
        with T.Kernel(blocks, threads=32) as b:
            tiles = [T.alloc_fragment((M, N), dtype) for _ in range(ranks)]
            got = [T.alloc_fragment((M, N), dtype) for _ in range(ranks)]
            shared = T.alloc_shared((M, N), dtype)
            with T.Scale("device") as device:
                _ = [T.copy(X[b, r, :, :], tile) for r, tile in enumerate(tiles)]
                T.copy(X[b, device.rank % ranks, :, :], shared)
            for _ in T.serial(rounds):
                with T.Scale("node", box=box, pad=pad, block=b) as node:
                    node.all_gather(tiles[0], got)
                    _ = [T.copy(tile, gathered[b, r, :, :]) for r, tile in enumerate(got)]
                    node.all_to_all(tiles, got)
                    _ = [T.copy(tile, exchanged[b, r, :, :]) for r, tile in enumerate(got)]
                    node.reduce_scatter(tiles, got[0])
                    T.copy(got[0], out[b, 0, :, :])
                    T.copy(tiles[1], got[1])
                    node.all_reduce(got[1])
                    T.copy(got[1], out[b, 1, :, :])
                    node.broadcast(shared, ranks - 1)
            T.copy(shared, out[b, 2, :, :])

    return main


def arguments(ranks, dtype, blocks=1):
    rng = np.random.default_rng(ranks)
    shapes = (blocks, ranks, M, N), (blocks, ranks, M, N), (blocks, 3, M, N)
    return [[rng.integers(-8, 9, (blocks, ranks, M, N)).astype(dtype), np.zeros((blocks, 2, ranks, M, N), dtype),
             np.zeros((blocks, 2 * ranks), np.int64), *(np.zeros(s, dtype) for s in shapes)] for _ in range(ranks)]


def right(out, args):
    x = np.stack([a[0] for a in args])  # rank, block, tile
    for r, o in enumerate(out):
        assert (o["gathered"] == x[:, :, 0].swapaxes(0, 1)).all() and (o["exchanged"] == x[:, :, r].swapaxes(0, 1)).all()
        assert (o["out"][:, 0] == x[:, :, r].sum(0)).all() and (o["out"][:, 1] == x[:, :, 1].sum(0)).all()
        assert (o["out"][:, 2] == x[-1, :, len(args) - 1]).all()


@pytest.mark.parametrize("ranks, dtype, seeds, blocks", [(2, "float16", (1, 2), 2), (4, "float32", (1,), 1),
                                                         (8, "int32", (None,), 1)])
def test_collectives_of_tiles(ranks, dtype, seeds, blocks):
    args, program = arguments(ranks, dtype, blocks), collectives(ranks, dtype, blocks=blocks)
    right(run_tile_ranks(program, args), args)
    for seed in seeds:
        lowered = lower(program.func, Target({"kind": "cuda", "arch": "sm_80" if seed == 2 else "sm_90a"}))
        right([r.outputs for r in run_device_ranks(lowered, args, seed=seed)], args)


def test_a_half_of_the_box_is_used_again_when_all_have_read_it():
    args, seed = arguments(2, "float32"), 1
    lowered = lower(collectives(2, rounds=3).func, Target({"kind": "cuda", "arch": "sm_90a"}))
    right([r.outputs for r in run_device_ranks(lowered, args, seed=seed)], args)
    right([r.outputs for r in run_device_ranks(lower(collectives(2).func, Target({"kind": "cuda", "arch": "sm_90a"})), args,
                                               seed=seed, repeats=2)], args)


def test_a_device_alone_has_no_collectives():
    with pytest.raises(TileLangError, match="has no box for tiles"):
        @T.prim_func
        def main(X: T.Tensor((8, 16), "float32")):
            with T.Kernel(1, threads=32):
                tile = T.alloc_fragment((8, 16), "float32")
                with T.Scale("device") as device:
                    T.copy(X, tile)
                    device.all_reduce(tile)


def test_a_rank_starts_with_its_own_tiles():
    @T.prim_func
    def main(box: T.SymmTensor((1, 2, 2, 8, 16), "float32"), pad: T.SymmTensor((1, 4), "int64"), Y: T.Tensor((6,), "int32")):
        with T.Kernel(1, threads=32):
            with T.Scale("node", box=box, pad=pad) as node:
                for k in T.serial(6):
                    Y[k] = node.local_first(k, 6)

    args = [[np.zeros((1, 2, 2, 8, 16), np.float32), np.zeros((1, 4), np.int64), np.zeros(6, np.int32)] for _ in range(2)]
    out = run_tile_ranks(main, args)
    assert [o["Y"].tolist() for o in out] == [[0, 1, 2, 3, 4, 5], [3, 4, 5, 0, 1, 2]]


def test_copies_to_other_ranks_are_priced_by_the_link():
    from tilelang.ir import walk
    from tilelang.ops import Copy
    from tilelang.transform.analysis.item_cost import item_cycles

    @T.prim_func
    def main(X: T.Tensor((128, 128), "float16"), S: T.SymmTensor((128, 128), "float16")):
        with T.Kernel(1, threads=128):
            tile = T.alloc_fragment((128, 128), "float16")
            T.copy(X, tile)
            T.copy(tile, T.remote(S, 1))

    near, far = (item_cycles(c) for c in walk(main.func.body, Copy))
    assert near.link == 0 and far.link == far.ordinary > 10 * near.ordinary


def test_an_unknown_scale_is_an_error():
    with pytest.raises(TileLangError, match="unknown scale"):
        @T.prim_func
        def main(X: T.Tensor((8, 16), "float32")):
            with T.Kernel(1, threads=32):
                with T.Scale("grid"):
                    T.clear(X)


# ---- names of other systems -----------------------------------------------------------------------------------------------


def test_barriers_of_a_grid_have_rounds():
    @T.prim_func
    def main(X: T.Tensor((4, 32), "int32"), Y: T.Tensor((4, 32), "int32")):
        with T.Kernel(4, threads=32) as b:
            tx = T.get_thread_binding()
            bar = T.alloc_barrier_gpu()
            T.init_barrier_gpu(bar, 4)
            for _ in T.serial(3):
                X[b, tx] = X[b, tx] + 1
                T.sync_barrier_gpu(bar)
                Y[b, tx] = X[(b + 1) % 4, tx]
                T.arrive_barrier_gpu(bar)
                T.wait_barrier_gpu(bar)

    x = np.arange(128, dtype=np.int32).reshape(4, 32)
    args = [[x, np.zeros_like(x)]]
    want = np.roll(x, -1, 0) + 3
    assert (run_tile_ranks(main, args)[0]["Y"] == want).all()
    lowered = lower(main.func, Target({"kind": "cuda", "arch": "sm_90a"}))
    for seed in (None, 1, 2):
        assert (run_device_ranks(lowered, args, seed=seed)[0].outputs["Y"] == want).all()


def test_names_of_the_public_fork_mean_the_same():
    @T.prim_func
    def main(P: T.SymmTensor((1, 4), "int64"), X: T.SymmTensor((32,), "int32"), Y: T.Tensor((32,), "int32")):
        with T.Kernel(1, threads=32):
            X[T.get_thread_binding()] = T.get_pe() + 10 * T.get_pe_num()
            T.fence_cta()
            T.fence_gpu()
            T.barrier_blocks(P[0, 0:4])
            Y[T.get_thread_binding()] = T.remote(X, 1 - T.get_pe())[T.get_thread_binding()]
            T.sync_blocks(P[0, 0:4])

    args = [[np.zeros((1, 4), np.int64), np.zeros(32, np.int32), np.zeros(32, np.int32)] for _ in range(2)]
    runs = [run_tile_ranks(main, args), [r.outputs for r in run_device_ranks(
        lower(main.func, Target({"kind": "cuda", "arch": "sm_90a"})), args, seed=1)]]
    assert all((out[r]["Y"] == 21 - r).all() for out in runs for r in range(2))


def test_a_barrier_that_is_not_set_up_is_an_error():
    with pytest.raises(TileLangError, match="has not set up"):
        @T.prim_func
        def main(X: T.Tensor((4, 32), "int32")):
            with T.Kernel(4, threads=32):
                T.sync_barrier_gpu(T.alloc_barrier_gpu())


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_views_divide_a_tensor_among_the_units_of_a_scale(ranks):
    rows, blocks = 8 * ranks, 4

    @T.prim_func
    def main(X: T.Tensor((rows, N), "float32"), S: T.SymmTensor((rows, N), "float32"),
             box: T.SymmTensor((blocks, 2, ranks, 2, N), "float32"), pad: T.SymmTensor((blocks, 2 * ranks), "int64"),
             Y: T.Tensor((rows, N), "float32"), Z: T.Tensor((rows, N), "float32")):
        with T.Kernel(blocks, threads=32) as b:
            with T.Scale("node", box=box, pad=pad, block=b) as node:
                tile, got = T.alloc_fragment((2, N), "float32"), [T.alloc_fragment((2, N), "float32") for _ in range(ranks)]
                T.copy(T.view(X, layout=lambda unit, units: (slice(unit * 8 + b * 2, unit * 8 + b * 2 + 2), slice(None))), tile)
                node.all_gather(tile, got)
                _ = [T.copy(one, Y[r * 8 + b * 2:r * 8 + b * 2 + 2, :]) for r, one in enumerate(got)]
                if b == 0:
                    T.copy(T.view(X, layout=T.FullRow), T.view(T.remote(S, (node.rank + 1) % ranks), layout=T.FullRow))
            with T.Scale("device"):
                part = T.view(X, layout=T.FullCol)
                assert part.shape == (rows, N // blocks) and T.view(X, layout=T.Replica).shape == (rows, N)
                T.copy(part, T.view(Z, layout=T.FullCol))

    x = np.random.default_rng(ranks).standard_normal((ranks, rows, N)).astype(np.float32)
    args = [[x[r], *(np.zeros(s, k) for s, k in (((rows, N), "f"), ((blocks, 2, ranks, 2, N), "f"), ((blocks, 2 * ranks), "i8"),
                                                ((rows, N), "f"), ((rows, N), "f")))] for r in range(ranks)]
    for out in (run_tile_ranks(main, args), [r.outputs for r in run_device_ranks(lower(main.func, HOPPER), args, seed=1)]):
        for r in range(ranks):
            before = (r - 1) % ranks
            assert (out[r]["Y"] == np.concatenate([x[s, 8 * s:8 * s + 8] for s in range(ranks)])).all()
            mine = slice(8 * before, 8 * before + 8)
            assert (out[r]["Z"] == x[r]).all() and (out[r]["S"][mine] == x[before, mine]).all()


def test_a_view_at_a_cluster_is_the_part_of_a_block():
    @T.prim_func
    def main(X: T.Tensor((8, 32), "float32"), Y: T.Tensor((8, 32), "float32")):
        with T.ClusterKernel(8, cluster_dims=4, threads=32) as b:
            with T.Scale("cta_cluster"):
                if b < 4:
                    T.copy(T.view(X, layout=T.FullRow), T.view(Y, layout=T.FullRow))

    x = np.arange(256, dtype=np.float32).reshape(8, 32)
    assert (run_tile(main, [x, x * 0])["Y"] == x).all()


@pytest.mark.parametrize("given, kind, words", [
    (lambda X: T.view(X, layout=T.FullRow), "scale", "do not divide among 4 units"),
    (lambda X: T.view(X, layout=3), "scale", "is 3"),
    (lambda X: T.view(X, (5, 32), layout=T.FullCol), "view-source", "and nothing else"),
    (lambda X: T.view(X[0:4, :], layout=T.FullCol), "view-source", "whole buffer")])
def test_what_a_view_cannot_divide_is_an_error(given, kind, words):
    with pytest.raises(TileLangError, match=words) as e:
        @T.prim_func
        def main(X: T.Tensor((10, 16), "float32"), Y: T.Tensor((10, 16), "float32")):
            with T.Kernel(4, threads=32):
                with T.Scale("device"):
                    T.copy(given(X), Y)
    assert e.value.kind == kind


def test_a_view_is_divided_in_a_scale_only():
    with pytest.raises(TileLangError, match="outside of a T.Scale"):
        @T.prim_func
        def main(X: T.Tensor((8, 16), "float32"), Y: T.Tensor((8, 16), "float32")):
            with T.Kernel(4, threads=32):
                T.copy(T.view(X, layout=T.FullRow), Y[0:2, :])
