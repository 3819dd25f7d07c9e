"""Bulk copies (TMA without tensor maps) from and to other ranks: signals order them like the accesses of threads."""

import numpy as np
import pytest

import tilelang.language as T
from tilelang.codegen.cuda.printer import print_kernel
from tilelang.errors import TileLangError
from tilelang.simulator import run_device_ranks, run_tile_ranks
from tilelang.target import Target
from tilelang.transform.pipeline import lower

N, CHUNK = 4096, 512
HOPPER = Target({"kind": "cuda", "arch": "sm_90a"})


def in_turn(put):
    """Each block copies its part through one shared tile."""

    @T.prim_func
    def main(P: T.SymmTensor((2, 8), "int64"), X: T.Tensor((N,), "int32"), S: T.SymmTensor((N,), "int32")):
        with T.Kernel(2, threads=64) as b:
            tile = T.alloc_shared((CHUNK,), "int32")
            there = T.remote(S, (T.get_rank() + 1) % T.get_num_ranks())
            src, dst = (X, there) if put else (there, X)
            T.barrier_all(P[b, 0:8])
            for k in T.serial(N // 2 // CHUNK):
                at = b * (N // 2) + k * CHUNK
                T.copy(src[at:at + CHUNK], tile)
                T.copy(tile, dst[at:at + CHUNK])
            T.barrier_all(P[b, 0:8])

    return main


def by_hand(put, stages=4, ahead=2):
    """The same with several tiles in flight."""
    tiles = N // 2 // CHUNK

    @T.prim_func
    def main(P: T.SymmTensor((2, 8), "int64"), X: T.Tensor((N,), "int32"), S: T.SymmTensor((N,), "int32")):
        with T.Kernel(2, threads=32) as b:
            held, full = T.alloc_shared((stages, CHUNK), "int32"), T.alloc_barrier([1] * stages)
            there = T.remote(S, (T.get_rank() + 1) % T.get_num_ranks())
            src, dst = (X, there) if put else (there, X)
            T.barrier_all(P[b, 0:8])
            for k in T.serial(tiles + ahead):
                if k < tiles:
                    at = b * (N // 2) + k * CHUNK
                    T.tma_store_wait(stages - 1 - ahead)
                    T.tma_copy(src[at:at + CHUNK], held[k % stages, :], barrier=full[k % stages])
                    if T.get_thread_binding() == 0:
                        T.mbarrier_arrive(full[k % stages])
                if k >= ahead:
                    old = k - ahead
                    T.mbarrier_wait_parity(full[old % stages], old // stages % 2)
                    T.tma_copy(held[old % stages, :], dst[b * (N // 2) + old * CHUNK:b * (N // 2) + (old + 1) * CHUNK])
            T.tma_store_wait(0, read=False)
            T.barrier_all(P[b, 0:8])

    return main


def body_of(lowered):
    text = print_kernel(lowered.kernels[0])
    return text[text.index("__global__"):]


def moved(ranks):
    return [[np.zeros((2, 8), np.int64), np.arange(N, dtype=np.int32) + 10_000 * r, np.arange(N, dtype=np.int32) - 10_000 * r]
            for r in range(ranks)]


@pytest.mark.parametrize("make", [in_turn, by_hand])
@pytest.mark.parametrize("put", [True, False])
def test_tiles_move_by_bulk_copies(make, put):
    program, args = make(put), moved(2)
    lowered = lower(program.func, HOPPER)
    text = body_of(lowered)
    assert ("tl::bulk_store(&reinterpret_cast<int*>(ptr)" if put else "reinterpret_cast<const int*>(ptr)[") in text
    runs = [run_tile_ranks(program, args)] + [[r.outputs for r in run_device_ranks(lowered, args, seed=s)] for s in (None, 1)]
    for out in runs:
        for r in range(2):
            assert (out[r]["S"] == args[1 - r][1]).all() if put else (out[r]["X"] == args[1 - r][2]).all()


def test_a_signal_follows_the_end_of_a_bulk_store():
    """The store was awaited only until shared memory had been read, as for tensors that no other rank reads."""
    text = body_of(lower(in_turn(True).func, HOPPER))
    assert "bulk_wait<0>" in text and "bulk_wait_read" not in text[text.index("bulk_store"):]


def test_a_bulk_store_that_nothing_awaits_is_a_race():
    @T.prim_func
    def main(X: T.Tensor((CHUNK,), "int32"), S: T.SymmTensor((CHUNK,), "int32"), F: T.SymmTensor((1,), "int32"),
             Y: T.Tensor((CHUNK,), "int32")):
        with T.Kernel(1, threads=32):
            tile = T.alloc_shared((CHUNK,), "int32")
            T.copy(X, tile)
            T.fence_proxy_async()
            T.sync_threads()
            T.tma_copy(tile, T.remote(S, 1 - T.get_rank()))
            T.tma_store_wait(0)  # only until shared memory has been read
            T.signal(F[0], rank=1 - T.get_rank())
            T.wait_ge(F[0], 1)
            T.copy(S, Y)

    args = [[np.arange(CHUNK, dtype=np.int32), np.zeros(CHUNK, np.int32), np.zeros(1, np.int32), np.zeros(CHUNK, np.int32)]
            for _ in range(2)]
    with pytest.raises(TileLangError) as e:
        run_device_ranks(lower(main.func, HOPPER), args)
    assert e.value.kind == "sim-race" and "bulk store" in str(e.value)


def test_what_threads_of_another_rank_stored_is_loaded_after_a_fence_of_the_reader():
    @T.prim_func
    def main(S: T.SymmTensor((1024,), "int32"), F: T.SymmTensor((1,), "int32"), Y: T.Tensor((1024,), "int32")):
        with T.Kernel(1, threads=64):
            if T.get_rank() == 0:
                if T.get_thread_binding() == 0:
                    there = T.remote(S, 1)
                    for i in T.serial(1024):
                        there[i] = i
                    T.st(F[0], 1, scope="sys", sem="release", dst_pe=1)
            else:
                tile = T.alloc_shared((1024,), "int32")
                T.wait_eq(F[0], 1)
                T.copy(S, tile)
                T.copy(tile, Y)

    lowered = lower(main.func, HOPPER)
    text = body_of(lowered)
    assert "bulk_load" in text and "tl::fence_proxy_async_global();" in text[text.index("wait_signal"):text.index("bulk_load")]
    args = [[np.zeros(1024, np.int32), np.zeros(1, np.int32), np.zeros(1024, np.int32)] for _ in range(2)]
    assert (run_device_ranks(lowered, args, seed=1)[1].outputs["Y"] == np.arange(1024)).all()


def test_a_bulk_copy_that_may_leave_the_tensor_of_another_rank_is_an_error():
    @T.prim_func
    def main(S: T.SymmTensor((N,), "int32"), n: T.int32):
        with T.Kernel(1, threads=32):
            tile, bar = T.alloc_shared((CHUNK,), "int32"), T.alloc_barrier([1])
            T.tma_copy(T.remote(S, 1)[n * CHUNK:n * CHUNK + CHUNK], tile, barrier=bar[0])

    with pytest.raises(TileLangError, match="may leave"):
        lower(main.func, HOPPER)


def test_a_rank_that_is_its_own_neighbour_loads_what_its_threads_have_stored():
    """The fence stood behind waits only; here a block barrier orders the two."""

    @T.prim_func
    def main(X: T.Tensor((1024,), "int32"), S: T.SymmTensor((1024,), "int32"), Y: T.Tensor((1024,), "int32")):
        with T.Kernel(1, threads=64):
            tile, own = T.alloc_shared((1024,), "int32"), T.alloc_fragment((1024,), "int32")
            T.copy(X, own)
            T.copy(own, T.remote(S, T.get_rank()))
            T.sync_threads()
            T.copy(S, tile)
            T.copy(tile, Y)

    lowered = lower(main.func, HOPPER)
    assert "bulk_load" in body_of(lowered)
    args = [[np.arange(1024, dtype=np.int32) + r, np.zeros(1024, np.int32), np.zeros(1024, np.int32)] for r in range(2)]
    for seed in (None, 1):
        out = run_device_ranks(lowered, args, seed=seed)
        assert all((out[r].outputs["Y"] == args[r][0]).all() for r in range(2))


@pytest.mark.parametrize("width", [128, 64])
@pytest.mark.parametrize("put", [True, False])
def test_a_tile_goes_to_another_rank_row_by_row(put, width):
    """width 64: rows of the tile are whole rows of the tensor, so that one copy moves all of them."""
    @T.prim_func
    def main(P: T.SymmTensor((1, 8), "int64"), X: T.Tensor((2, 32, 64), "float16"), S: T.SymmTensor((3, 64, width), "float16")):
        with T.Kernel(1, threads=64):
            tile, bar = T.alloc_shared((2, 32, 64), "float16"), T.alloc_barrier([64])
            there = T.remote(S, (T.get_rank() + 1) % T.get_num_ranks())
            T.barrier_all(P[0, 0:8])
            for k in T.serial(2):
                if put:
                    T.copy(X[k, :, :], tile[k, :, :])
                    T.fence_proxy_async()
                    T.sync_threads()
                    T.tma_copy(tile[k, :, :], there[1, k * 32:k * 32 + 32, width - 64:width])
                    T.tma_store_wait(0, read=False)
                else:
                    T.tma_copy(there[1, k * 32:k * 32 + 32, width - 64:width], tile[k, :, :], barrier=bar)
                    T.mbarrier_arrive(bar)
                    T.mbarrier_wait_parity(bar, k)
                    T.copy(tile[k, :, :], X[k, :, :])
            T.barrier_all(P[0, 0:8])

    rng = np.random.default_rng(width)
    args = [[np.zeros((1, 8), np.int64), *(rng.standard_normal(s).astype(np.float16) for s in ((2, 32, 64), (3, 64, width)))]
            for _ in range(2)]
    lowered = lower(main.func, HOPPER)
    text = body_of(lowered)
    assert ("for (int row = 0; row < 32" in text) == (width != 64) and text.count("bulk_commit") == put
    for out in (run_tile_ranks(main, args), [r.outputs for r in run_device_ranks(lowered, args, seed=1)]):
        for r, (_, x, s) in enumerate(args[::-1]):
            if put:
                assert (out[r]["S"][1, :, width - 64:] == x.reshape(64, 64)).all() and (out[r]["S"][0] == args[r][2][0]).all()
            else:
                assert (out[r]["X"].reshape(64, 64) == s[1, :, width - 64:]).all()


@pytest.mark.parametrize("width, columns, words", [(100, 64, "16 bytes"), (128, 60, "16 bytes"), (128, 64, "may leave")])
def test_a_tile_that_bulk_copies_cannot_move_to_another_rank_is_an_error(width, columns, words):
    @T.prim_func
    def main(S: T.SymmTensor((64, width), "float16"), n: T.int32):
        with T.Kernel(1, threads=32):
            tile = T.alloc_shared((32, columns), "float16")
            T.clear(tile)
            T.tma_copy(tile, T.remote(S, 1)[n * (words == "may leave"), 0])

    with pytest.raises(TileLangError, match=words) as e:
        lower(main.func, HOPPER)
    assert e.value.kind == "tma-copy"
