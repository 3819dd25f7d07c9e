"""Whole programs of several ranks, of many kinds: both simulators agree with NumPy, and planted faults are found."""

import numpy as np
import pytest

import tilelang.language as T
from tilelang.errors import TileLangError
from tilelang.simulator import run_device_ranks, run_tile_ranks
from tilelang.target import Target
from tilelang.transform.pipeline import lower

HOPPER = Target({"kind": "cuda", "arch": "sm_90a"})
N = 64


def zeros(*shape, kind=np.float32):
    return np.zeros(shape, kind)


def numbers(ranks, *shape, kind=np.float32):
    return np.random.default_rng(ranks).integers(-50, 50, (ranks, *shape)).astype(kind)


def halving_sum(ranks, wait=True):
    """Recursive doubling: in step s ranks whose numbers differ in bit s exchange their sums."""
    steps = ranks.bit_length() - 1

    @T.prim_func
    def main(X: T.Tensor((N,), "float32"), box: T.SymmTensor((steps, N), "float32"), came: T.SymmTensor((steps,), "int32"),
             Y: T.Tensor((N,), "float32")):
        with T.Kernel(1, threads=32):
            total, other = T.alloc_fragment((N,), "float32"), T.alloc_fragment((N,), "float32")
            T.copy(X, total)
            for s in T.serial(steps):
                peer = T.get_rank() ^ (1 << s)
                T.copy(total, T.remote(box, peer)[s, 0:N])
                T.signal(came[s], rank=peer)
                if wait:
                    T.wait_ge(came[s], 1)
                T.copy(box[s, 0:N], other)
                for i in T.Parallel(N):
                    total[i] += other[i]
            T.copy(total, Y)

    x = numbers(ranks, N)
    args = [[x[r], zeros(steps, N), zeros(steps, kind=np.int32), zeros(N)] for r in range(ranks)]
    return main, args, lambda out, r: (out["Y"] == x.sum(0)).all()


def ring_sum(ranks, ahead=1):
    """Reduce-scatter and all-gather around a ring, a part in each step, with one flag that counts steps."""
    part = N // ranks

    @T.prim_func
    def main(X: T.SymmTensor((N,), "float32"), box: T.SymmTensor((ranks, part), "float32"), came: T.SymmTensor((1,), "int64")):
        with T.Kernel(1, threads=32):
            tile, more = T.alloc_fragment((part,), "float32"), T.alloc_fragment((part,), "float32")
            me, right = T.get_rank(), (T.get_rank() + 1) % ranks
            for s in T.serial(ranks - 1):
                at = (me - s + ranks) % ranks
                T.copy(X[at * part:at * part + part], tile)
                T.copy(tile, T.remote(box, right)[s, 0:part])
                T.signal(came[0], rank=right)
                T.wait_ge(came[0], s + ahead)
                into = (me - s - 1 + ranks) % ranks
                T.copy(X[into * part:into * part + part], tile)
                T.copy(box[s, 0:part], more)
                for i in T.Parallel(part):
                    tile[i] += more[i]
                T.copy(tile, X[into * part:into * part + part])
            for s in T.serial(ranks - 1):
                at = (me + 1 - s + ranks) % ranks
                T.copy(X[at * part:at * part + part], tile)
                T.copy(tile, T.remote(X, right)[at * part:at * part + part])
                T.signal(came[0], rank=right)
                T.wait_ge(came[0], ranks + s)

    x = numbers(ranks, N)
    args = [[x[r], zeros(ranks, part), zeros(1, kind=np.int64)] for r in range(ranks)]
    return main, args, lambda out, r: (out["X"] == x.sum(0)).all()


def tree(ranks):
    """Rank 0's vector goes down a binary tree: rank r waits, then passes it to 2 r + 1 and 2 r + 2."""
    @T.prim_func
    def main(S: T.SymmTensor((N,), "float32"), ready: T.SymmTensor((1,), "int32")):
        with T.Kernel(1, threads=32):
            me = T.get_rank()
            if me > 0:
                T.wait_eq(ready[0], 1)
            for k in T.serial(2):
                if 2 * me + 1 + k < ranks:
                    T.put_block(S[0], S[0], N, dst_pe=2 * me + 1 + k)
                    T.signal(ready[0], rank=2 * me + 1 + k)

    x = numbers(ranks, N)
    args = [[x[r], zeros(1, kind=np.int32)] for r in range(ranks)]
    return main, args, lambda out, r: (out["S"] == x[0]).all()


def queue(ranks, slots=2, early=0):
    """Every rank sends six rows to the next one through two slots; a slot is used again when its reader has given it back."""
    rows = 6

    @T.prim_func
    def main(X: T.Tensor((rows, N), "int32"), box: T.SymmTensor((slots, N), "int32"), sent: T.SymmTensor((1,), "int64"),
             taken: T.SymmTensor((1,), "int64"), Y: T.Tensor((rows, N), "int32")):
        with T.Kernel(2, threads=32) as b:
            row = T.alloc_fragment((N,), "int32")
            for k in T.serial(rows):
                if b == 0:
                    T.wait_gt(taken[0], k - slots - early)
                    T.copy(X[k, :], row)
                    T.copy(row, T.remote(box, (T.get_rank() + 1) % ranks)[k % slots, 0:N])
                    T.signal(sent[0], rank=(T.get_rank() + 1) % ranks)
                else:
                    T.wait_ge(sent[0], k + 1)
                    T.copy(box[k % slots, 0:N], row)
                    T.copy(row, Y[k, :])
                    T.signal(taken[0], rank=(T.get_rank() + ranks - 1) % ranks)

    x = numbers(ranks, rows, N, kind=np.int32)
    args = [[x[r], zeros(slots, N, kind=np.int32), *(zeros(1, kind=np.int64) for _ in range(2)), zeros(rows, N, kind=np.int32)]
            for r in range(ranks)]
    return main, args, lambda out, r: (out["Y"] == x[r - 1]).all()


def ticket_lock(ranks, ordered=True):
    """Blocks of all ranks take a ticket on rank 0, and change its total by plain accesses when it is their turn."""
    @T.prim_func
    def main(ticket: T.SymmTensor((1,), "int32"), serving: T.SymmTensor((1,), "int32"), total: T.SymmTensor((1,), "int32")):
        with T.Kernel(2, threads=32) as b:
            if T.get_thread_binding() == 0:
                mine = T.atom_add(ticket[0], 1, scope="sys", dst_pe=0)
                seen = T.alloc_local((1,), "int32")
                seen[0] = -1
                while seen[0] != mine:
                    T.ld(serving[0], seen[0], scope="sys", sem="acquire", src_pe=0)
                there = T.remote(total, 0)
                there[0] = there[0] * 2 + T.get_rank() * 0 + b * 0 + 1
                _ = T.atom_add(serving[0], 1, scope="sys", sem="release" if ordered else "relaxed", dst_pe=0)

    args = [[zeros(1, kind=np.int32) for _ in range(3)] for _ in range(ranks)]
    return main, args, lambda out, r: r > 0 or out["total"][0] == 2 ** (2 * ranks) - 1


def halo(ranks, barrier=True):
    """Four steps of a stencil over a vector that is divided among the ranks, with a halo from both neighbours in each."""
    steps = 4

    @T.prim_func
    def main(X: T.Tensor((N,), "float32"), edge: T.SymmTensor((2, 2), "float32"), pad: T.SymmTensor((1, 2 * ranks), "int64"),
             Y: T.Tensor((N,), "float32")):
        with T.Kernel(1, threads=N):
            held, i = T.alloc_shared((N,), "float32"), T.get_thread_binding()
            me = T.get_rank()
            held[i] = X[i]
            T.sync_threads()
            for s in T.serial(steps):
                if i == 0:
                    T.remote(edge, (me + ranks - 1) % ranks)[s % 2, 1] = held[0]
                if i == N - 1:
                    T.remote(edge, (me + 1) % ranks)[s % 2, 0] = held[N - 1]
                if barrier:
                    T.barrier_all(pad[0, 0:2 * ranks])
                left = T.if_then_else(i == 0, edge[s % 2, 0], held[T.max(i - 1, 0)])
                right = T.if_then_else(i == N - 1, edge[s % 2, 1], held[T.min(i + 1, N - 1)])
                new = left + 2 * held[i] + right
                T.sync_threads()
                held[i] = new
                T.sync_threads()
            Y[i] = held[i]

    x = numbers(ranks, N)
    want = x.reshape(-1)
    for _ in range(steps):
        want = np.roll(want, 1) + 2 * want + np.roll(want, -1)
    args = [[x[r], zeros(2, 2), zeros(1, 2 * ranks, kind=np.int64), zeros(N)] for r in range(ranks)]
    return main, args, lambda out, r: (out["Y"] == want.reshape(ranks, N)[r]).all()


def stolen_work(ranks):
    """Blocks of all ranks take rows from one counter on the last rank, and put the results on the rank that owns the row."""
    own = 3 if ranks < 8 else 1
    rows = own * ranks

    @T.prim_func
    def main(X: T.SymmTensor((own, N), "int32"), next_: T.SymmTensor((1,), "int32"), Y: T.SymmTensor((own, N), "int32"),
             done: T.SymmTensor((1,), "int32"), Z: T.Tensor((own, N), "int32")):
        with T.Kernel(2, threads=32):
            row, at = T.alloc_fragment((N,), "int32"), T.alloc_shared((1,), "int32")
            for _ in T.serial(rows):  # as many turns as there are rows: one block may take them all
                if T.get_thread_binding() == 0:
                    at[0] = T.atom_add(next_[0], 1, scope="sys", dst_pe=ranks - 1)
                T.sync_threads()
                k = at[0]
                T.sync_threads()
                if k < rows:
                    T.copy(T.remote(X, k % ranks)[k // ranks, 0:N], row)
                    for i in T.Parallel(N):
                        row[i] = row[i] * row[i] + k
                    T.copy(row, T.remote(Y, k % ranks)[k // ranks, 0:N])
                    T.signal(done[0], rank=k % ranks)
            if T.get_block_binding(0) == 0:
                T.wait_ge(done[0], own)
                T.copy(Y, Z)

    x, one = numbers(ranks, own, N, kind=np.int32), zeros(1, kind=np.int32)
    args = [[x[r], one, np.zeros_like(x[r]), one, np.zeros_like(x[r])] for r in range(ranks)]
    return main, args, lambda out, r: (out["Z"] == x[r] ** 2 + np.arange(own)[:, None] * ranks + r).all()


def words(ranks):
    """Each number travels in one word with the number of the round, and no signal: five rounds through two boxes in turn."""
    rounds = 5

    @T.prim_func
    def main(X: T.Tensor((rounds, N), "float32"), box: T.SymmTensor((2, ranks, N), "int64"),
             Y: T.Tensor((rounds, N), "float32")):
        with T.Kernel(1, threads=N):
            i, me = T.get_thread_binding(), T.get_rank() % ranks
            word = T.alloc_local((1,), "int64")
            for k in T.serial(rounds):
                bits = T.cast(T.reinterpret(X[k, i], "uint32"), "int64")
                for r in T.serial(ranks):
                    T.st(box[k % 2, me, i], T.cast(k + 1, "int64") * (1 << 32) + bits, scope="sys", dst_pe=r)
                Y[k, i] = 0
                for r in T.serial(ranks):
                    T.wait_ge(box[k % 2, r, i], T.cast(k + 1, "int64") * (1 << 32))
                    T.ld(box[k % 2, r, i], word[0], scope="sys")
                    Y[k, i] += T.reinterpret(T.cast(word[0], "uint32"), "float32")

    x = numbers(ranks, rounds, N)
    args = [[x[r], zeros(2, ranks, N, kind=np.int64), zeros(rounds, N)] for r in range(ranks)]
    return main, args, lambda out, r: (out["Y"] == x.sum(0)).all()


def histogram(ranks):
    """Atomic additions of all ranks to counts that are divided among them, between two barriers."""
    bins = 4 * ranks

    @T.prim_func
    def main(X: T.Tensor((N,), "int32"), counts: T.SymmTensor((4,), "int32"), pad: T.SymmTensor((1, 2 * ranks), "int64"),
             Y: T.Tensor((bins,), "int32")):
        with T.Kernel(1, threads=32):
            for k in T.serial(N // 32):
                x = X[k * 32 + T.get_thread_binding()]
                _ = T.atom_add(counts[x % 4], 1, scope="sys", dst_pe=x // 4)
            T.barrier_all(pad[0, 0:2 * ranks])
            for r in T.serial(ranks):
                T.get_block(counts[0], Y[r * 4], 4, src_pe=r)

    x = np.random.default_rng(ranks).integers(0, bins, (ranks, N)).astype(np.int32)
    args = [[x[r], zeros(4, kind=np.int32), zeros(1, 2 * ranks, kind=np.int64), zeros(bins, kind=np.int32)]
            for r in range(ranks)]
    return main, args, lambda out, r: (out["Y"] == np.bincount(x.ravel(), minlength=bins)).all()


def gathered_product(ranks):
    """C = the rows A of all ranks times this rank's columns of B: tiles of A are fetched while MMAs run."""
    @T.prim_func
    def main(A: T.SymmTensor((64, 32), "float16"), B: T.Tensor((32, 64), "float16"), pad: T.SymmTensor((1, 2 * ranks), "int64"),
             C: T.Tensor((64 * ranks, 64), "float32")):
        with T.Kernel(1, threads=128):
            As, Bs = T.alloc_shared((64, 32), "float16"), T.alloc_shared((32, 64), "float16")
            acc = T.alloc_fragment((64, 64), "float32")
            T.copy(B, Bs)
            T.barrier_all(pad[0, 0:2 * ranks])
            for k in T.serial(ranks):
                owner = (T.get_rank() + k) % ranks
                T.copy(T.remote(A, owner)[0:64, 0:32], As)
                T.gemm(As, Bs, acc, clear_accum=True)
                T.copy(acc, C[owner * 64:owner * 64 + 64, 0:64])

    a = np.random.default_rng(1).integers(-4, 5, (ranks, 64, 32)).astype(np.float16)
    b = np.random.default_rng(2).integers(-4, 5, (ranks, 32, 64)).astype(np.float16)
    args = [[a[r], b[r], zeros(1, 2 * ranks, kind=np.int64), zeros(64 * ranks, 64)] for r in range(ranks)]
    return main, args, lambda out, r: (out["C"] == a.reshape(-1, 32).astype("f") @ b[r].astype("f")).all()


def rows_of_warps(ranks):
    """Warps of a block put a row each on different ranks, and signal by themselves."""
    @T.prim_func
    def main(X: T.Tensor((4, N), "int32"), S: T.SymmTensor((ranks, 4, N), "int32"), came: T.SymmTensor((4,), "int64"),
             Y: T.Tensor((ranks, 4, N), "int32")):
        with T.Kernel(1, threads=128):
            w, lane, me = T.get_thread_binding() // 32, T.get_thread_binding() % 32, T.get_rank() % ranks
            for k in T.serial(ranks):
                to = (w + k) % ranks
                T.put_warp(X[w, 0], S[me, w, 0], N, dst_pe=to)
                T.sync_warp()
                if lane == 0:
                    _ = T.atom_add(came[w], 1, scope="sys", sem="release", dst_pe=to)
            T.wait_eq(came[w], ranks)
            T.sync_threads()
            T.copy(S, Y)

    x = numbers(ranks, 4, N, kind=np.int32)
    args = [[x[r], zeros(ranks, 4, N, kind=np.int32), zeros(4, kind=np.int64), zeros(ranks, 4, N, kind=np.int32)]
            for r in range(ranks)]
    return main, args, lambda out, r: (out["Y"] == x).all()


def tiles_by_tma(ranks):
    """Tiles go around the ring three times by bulk copies, through two slots of shared memory."""
    rounds = 3

    @T.prim_func
    def main(S: T.SymmTensor((2, 16, N), "float16"), came: T.SymmTensor((1,), "int64"),
             pad: T.SymmTensor((1, 2 * ranks), "int64")):
        with T.Kernel(1, threads=32):
            tile, bar = T.alloc_shared((2, 16, N), "float16"), T.alloc_barrier([32] * 2)
            for k in T.serial(rounds):
                T.wait_ge(came[0], k)
                T.tma_copy(S[k % 2, 0:16, 0:N], tile[k % 2, :, :], barrier=bar[k % 2])
                T.mbarrier_arrive(bar[k % 2])
                T.mbarrier_wait_parity(bar[k % 2], k // 2 % 2)
                T.barrier_all(pad[0, 0:2 * ranks])  # all have loaded what is overwritten now
                T.tma_copy(tile[k % 2, :, :], T.remote(S, (T.get_rank() + 1) % ranks)[1 - k % 2, 0:16, 0:N])
                T.tma_store_wait(0, read=False)
                T.signal(came[0], rank=(T.get_rank() + 1) % ranks)
            T.wait_ge(came[0], rounds)

    x = numbers(ranks, 2, 16, N, kind=np.float16)
    args = [[x[r], zeros(1, kind=np.int64), zeros(1, 2 * ranks, kind=np.int64)] for r in range(ranks)]
    return main, args, lambda out, r: (out["S"][rounds % 2] == x[(r - rounds) % ranks, 0]).all()


def countdown(ranks):
    """A flag of each rank counts down by what the others subtract, and waits of all comparisons see it."""
    @T.prim_func
    def main(left: T.SymmTensor((1,), "int32"), S: T.SymmTensor((ranks,), "int32"), Y: T.Tensor((ranks,), "int32")):
        with T.Kernel(1, threads=32):
            me, tx = T.get_rank(), T.get_thread_binding()
            if tx < ranks:
                T.remote(S, tx)[me] = me * 10 + tx
            T.sync_threads()
            if tx < ranks:
                _ = T.atom_add(left[0], -1, scope="sys", sem="release", dst_pe=tx)
            T.wait_ne(left[0], ranks)
            T.wait_lt(left[0], 1)
            T.wait_le(left[0], 0)
            if tx < ranks:
                Y[tx] = S[tx]

    args = [[np.full(1, ranks, np.int32), zeros(ranks, kind=np.int32), zeros(ranks, kind=np.int32)] for _ in range(ranks)]
    return main, args, lambda out, r: (out["Y"] == np.arange(ranks) * 10 + r).all()


def waits_in_a_pipeline(ranks):
    """Block 0 sends tiles with a flag each; block 1 waits for them in a pipelined loop of GEMMs."""
    tiles = 4

    @T.prim_func
    def main(X: T.Tensor((tiles * 32, 64), "float16"), A: T.SymmTensor((tiles * 32, 64), "float16"),
             came: T.SymmTensor((tiles,), "int32"), B: T.Tensor((64, 32), "float16"), C: T.Tensor((tiles * 32, 32), "float32")):
        with T.Kernel(2, threads=128) as b:
            As, Bs = T.alloc_shared((32, 64), "float16"), T.alloc_shared((64, 32), "float16")
            acc = T.alloc_fragment((32, 32), "float32")
            if b == 0:
                for k in T.serial(tiles):
                    T.copy(X[k * 32:k * 32 + 32, :], T.remote(A, (T.get_rank() + 1) % ranks)[k * 32:k * 32 + 32, 0:64])
                    T.signal(came[k], rank=(T.get_rank() + 1) % ranks)
            else:
                T.copy(B, Bs)
                for k in T.Pipelined(tiles, num_stages=2):
                    T.wait_ge(came[k], 1)
                    T.copy(A[k * 32:k * 32 + 32, 0:64], As)
                    T.gemm(As, Bs, acc, clear_accum=True)
                    T.copy(acc, C[k * 32:k * 32 + 32, 0:32])

    x = np.random.default_rng(1).integers(-3, 4, (ranks, tiles * 32, 64)).astype(np.float16)
    b = np.random.default_rng(2).integers(-3, 4, (64, 32)).astype(np.float16)
    args = [[x[r], np.zeros_like(x[r]), zeros(tiles, kind=np.int32), b, zeros(tiles * 32, 32)] for r in range(ranks)]
    return main, args, lambda out, r: (out["C"] == x[r - 1].astype("f") @ b.astype("f")).all()


def warp_groups(ranks):
    """Warp group 0 fetches tiles of all ranks into a ring, warp group 1 adds them."""
    tiles = 5

    @T.prim_func
    def main(S: T.SymmTensor((tiles, 32, 32), "float32"), pad: T.SymmTensor((1, 2 * ranks), "int64"),
             Y: T.Tensor((32, 32), "float32")):
        with T.Kernel(1, threads=256):
            held = T.alloc_shared((2, 32, 32), "float32")
            full, free = T.alloc_barrier([128] * 2), T.alloc_barrier([128] * 2)
            T.barrier_all(pad[0, 0:2 * ranks])
            with T.ws(0):
                for k in T.serial(tiles):
                    T.mbarrier_wait_parity(free[k % 2], (k // 2 + 1) % 2)
                    T.copy(T.remote(S, (T.get_rank() + k) % ranks)[k, 0:32, 0:32], held[k % 2, :, :])
                    T.mbarrier_arrive(full[k % 2])
            with T.ws(1):
                total, tile = T.alloc_fragment((32, 32), "float32"), T.alloc_fragment((32, 32), "float32")
                T.clear(total)
                for k in T.serial(tiles):
                    T.mbarrier_wait_parity(full[k % 2], k // 2 % 2)
                    T.copy(held[k % 2, :, :], tile)
                    for i, j in T.Parallel(32, 32):
                        total[i, j] += tile[i, j]
                    T.mbarrier_arrive(free[k % 2])
                T.copy(total, Y)

    x = numbers(ranks, tiles, 32, 32)
    args = [[x[r], zeros(1, 2 * ranks, kind=np.int64), zeros(32, 32)] for r in range(ranks)]
    return main, args, lambda out, r: (out["Y"] == sum(x[(r + k) % ranks, k] for k in range(tiles))).all()


def clusters(ranks):
    """Each block of a cluster stores on another rank, and the cluster goes on when all its blocks have their data."""
    @T.prim_func
    def main(X: T.Tensor((4, N), "float32"), S: T.SymmTensor((4, N), "float32"), came: T.SymmTensor((4,), "int32"),
             Y: T.Tensor((4, N), "float32")):
        with T.ClusterKernel(4, cluster_dims=2, threads=N) as b:
            i, to = T.get_thread_binding(), (T.get_rank() + T.block_rank_in_cluster()) % ranks
            T.remote(S, to)[b, i] = X[b, i]
            T.signal(came[b], rank=to)
            T.wait_ge(came[b], 1)
            T.cluster_sync()
            Y[b, i] = S[b, i]

    x = numbers(ranks, 4, N)
    args = [[x[r], zeros(4, N), zeros(4, kind=np.int32), zeros(4, N)] for r in range(ranks)]
    return main, args, lambda out, r: all((out["Y"][b] == x[(r - b % 2) % ranks, b]).all() for b in range(4))


def places_from_memory(ranks):
    """Each thread stores on a rank, and in a place, that it reads."""
    @T.prim_func
    def main(X: T.Tensor((N,), "int32"), to: T.Tensor((N, 2), "int32"), S: T.SymmTensor((N,), "int32"),
             pad: T.SymmTensor((1, 2 * ranks), "int64"), Y: T.Tensor((N,), "int32")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(N):
                T.remote(S, to[i, 0])[to[i, 1]] = X[i]
            T.barrier_all(pad[0, 0:2 * ranks])
            T.copy(S, Y)

    order = np.random.default_rng(3).permutation(ranks * N).reshape(ranks, N)
    x, want = numbers(ranks, N, kind=np.int32), np.empty(ranks * N, np.int32)
    want[order.ravel()] = x.ravel()
    args = [[x[r], np.stack([order[r] // N, order[r] % N], 1).astype(np.int32), zeros(N, kind=np.int32),
             zeros(1, 2 * ranks, kind=np.int64), zeros(N, kind=np.int32)] for r in range(ranks)]
    return main, args, lambda out, r: (out["Y"] == want.reshape(ranks, N)[r]).all()


def grid_and_ranks(ranks):
    """All blocks of all ranks meet: a barrier of the grid on both sides of one block's barrier of the ranks."""
    @T.prim_func
    def main(X: T.Tensor((3, 32), "float32"), S: T.SymmTensor((ranks, 3, 32), "float32"),
             pad: T.SymmTensor((1, 2 * ranks), "int64"), Y: T.Tensor((3, 32), "float32")):
        with T.Kernel(3, threads=32) as b:
            i = T.get_thread_binding()
            for r in T.serial(ranks):
                T.remote(S, r)[T.get_rank() % ranks, b, i] = X[b, i] + r
            T.sync_grid()
            if b == 0:
                T.barrier_all(pad[0, 0:2 * ranks])
            T.sync_grid()
            Y[b, i] = 0.0
            for r in T.serial(ranks):
                Y[b, i] += S[r, (b + 1) % 3, i]

    x = numbers(ranks, 3, 32)
    args = [[x[r], zeros(ranks, 3, 32), zeros(1, 2 * ranks, kind=np.int64), zeros(3, 32)] for r in range(ranks)]
    return main, args, lambda out, r: (out["Y"] == np.roll(x.sum(0) + r * ranks, -1, 0)).all()


def sums_of_shared_tiles(ranks):
    """Shared tiles are added to tensors of two ranks by atomic tile operations."""
    @T.prim_func
    def main(X: T.Tensor((16, N), "float32"), S: T.SymmTensor((16, N), "float32"), pad: T.SymmTensor((1, 2 * ranks), "int64"),
             Y: T.Tensor((16, N), "float32")):
        with T.Kernel(1, threads=64):
            tile = T.alloc_shared((16, N), "float32")
            T.copy(X, tile)
            T.atomic_add(T.remote(S, (T.get_rank() + 1) % ranks), tile)
            T.atomic_add(T.remote(S, 0), tile)
            T.barrier_all(pad[0, 0:2 * ranks])
            T.copy(S, Y)

    x = numbers(ranks, 16, N)
    args = [[x[r], zeros(16, N), zeros(1, 2 * ranks, kind=np.int64), zeros(16, N)] for r in range(ranks)]
    return main, args, lambda out, r: (out["Y"] == x[r - 1] + (x.sum(0) if r == 0 else 0)).all()


PROGRAMS = (halving_sum, ring_sum, tree, queue, ticket_lock, halo, stolen_work, words, histogram, gathered_product,
            rows_of_warps, tiles_by_tma, countdown)
OF_TILES = waits_in_a_pipeline, warp_groups, clusters, places_from_memory, grid_and_ranks, sums_of_shared_tiles


def kinds(program, args):
    """The kinds of the errors that schedules of the device simulator find."""
    lowered, found = lower(program.func, HOPPER, {"tl.disable_data_race_check": True}), set()
    for seed in (None, 1, 2, 3):
        try:
            run_device_ranks(lowered, args, seed=seed)
        except TileLangError as e:
            found.add(e.kind)
    return found


@pytest.mark.parametrize("make, ranks, seed", [
    *((make, *x) for make in PROGRAMS for x in ((2, None), (4, 1), (8, 2))),
    *((make, *x) for make in OF_TILES for x in ((2, None), (4, 1)))], ids=lambda x: getattr(x, "__name__", str(x)))
def test_a_program_of_ranks(make, ranks, seed):
    program, args, right = make(ranks)
    for out in (run_tile_ranks(program, args, seed=seed),
                [r.outputs for r in run_device_ranks(lower(program.func, HOPPER), args, seed=seed)]):
        assert all(right(o, r) for r, o in enumerate(out))


@pytest.mark.parametrize("make, faulty", [(halving_sum, {"wait": False}), (ring_sum, {"ahead": 0}), (queue, {"early": 1}),
                                          (ticket_lock, {"ordered": False}), (halo, {"barrier": False})],
                         ids=lambda x: getattr(x, "__name__", ""))
def test_a_fault_in_a_program_of_ranks_is_a_race(make, faulty):
    program, args, _ = make(4, **faulty)
    assert "sim-race" in kinds(program, args)
