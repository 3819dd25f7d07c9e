"""Programs whose warps do different work: some compute small things, load, or take a part of the keys."""

import numpy as np
import pytest
from everywhere import WITH_HOPPER, cuda_text, everywhere, run

import tilelang
import tilelang.language as T
from tilelang.errors import TileLangError

SM80, SM90A = "sm_80", "sm_90a"
HOPPER = {"tile": WITH_HOPPER["tile"], "cpu": WITH_HOPPER["cpu"], "sm_90a": WITH_HOPPER["sm_90a"]}  # what T.tma_copy runs on


def whole(rng, *shape, dtype=np.float32, high=4):
    """Small integers, whose sums are exact in any order."""
    return rng.integers(-high, high + 1, shape).astype(dtype)


def check(program, args, want, on=WITH_HOPPER, tol=0.0):
    """Every execution gives `want` for the tensors behind args, within tol of the largest number."""
    for name in on:
        got = run(program, *args, on=name)[len(args):]
        assert len(got) == len(want)
        for g, w in zip(got, want):
            w = np.asarray(w, np.float64)
            np.testing.assert_allclose(g.astype(np.float64), w, rtol=0, atol=tol * max(1.0, np.abs(w).max()), err_msg=name)
    for arch in (SM80, SM90A) if on is WITH_HOPPER else (SM90A,):
        cuda_text(program, arch)


# ---- one warp for the small things --------------------------------------------------------------------------------------


def hyper_connection(tokens=3, streams=4, hidden=256, block=64, steps=3):
    """A warp normalises the mixing matrix of a token, the others mix its residual streams."""
    @T.prim_func
    def main(mixes: T.Tensor((tokens, 2 * streams + streams * streams), "float32"),
             residual: T.Tensor((tokens, streams, hidden), "float16"), scale: T.Tensor((3,), "float32"),
             post: T.Tensor((tokens, streams), "float32"), comb: T.Tensor((tokens, streams, streams), "float32"),
             layer: T.Tensor((tokens, hidden), "float16")):
        with T.Kernel(tokens, threads=96) as i:
            if T.get_thread_binding() < 32:
                cm = T.alloc_fragment((streams, streams), "float32")
                for j in T.Parallel(streams):
                    post[i, j] = T.sigmoid(mixes[i, j + streams] * scale[1]) * 2.0
                for j, k in T.Parallel(streams, streams):
                    cm[j, k] = mixes[i, j * streams + k + streams * 2] * scale[2]
                row = T.alloc_fragment((streams,), "float32")
                col = T.alloc_fragment((streams,), "float32")
                top = T.alloc_fragment((streams,), "float32")
                T.reduce_max(cm, top, dim=1)
                for j, k in T.Parallel(streams, streams):
                    cm[j, k] = T.exp(cm[j, k] - top[j])
                T.reduce_sum(cm, row, dim=1)
                for j, k in T.Parallel(streams, streams):
                    cm[j, k] = cm[j, k] / row[j]
                for _ in T.serial(steps):
                    T.reduce_sum(cm, col, dim=0)
                    for j, k in T.Parallel(streams, streams):
                        cm[j, k] = cm[j, k] / col[k]
                    T.reduce_sum(cm, row, dim=1)
                    for j, k in T.Parallel(streams, streams):
                        cm[j, k] = cm[j, k] / row[j]
                for j, k in T.Parallel(streams, streams):
                    comb[i, j, k] = cm[j, k]
            else:
                pre = T.alloc_shared((streams,), "float32")
                for j in T.Parallel(streams):
                    pre[j] = T.sigmoid(mixes[i, j] * scale[0])
                for h in T.Pipelined(hidden // block, num_stages=2):
                    xs = T.alloc_shared((streams, block), "float16")
                    xl = T.alloc_fragment((streams, block), "float32")
                    out = T.alloc_fragment((block,), "float32")
                    T.copy(residual[i, 0, h * block], xs)
                    T.copy(xs, xl)
                    T.clear(out)
                    for m in T.serial(streams):
                        for j in T.Parallel(block):
                            out[j] += pre[m] * xl[m, j]
                    T.copy(out, layer[i, h * block])

    return main


def test_a_warp_normalises_while_the_others_mix_streams():
    rng = np.random.default_rng(1)
    t, m, h = 3, 4, 256
    mixes, residual = rng.standard_normal((t, 2 * m + m * m)).astype(np.float32), whole(rng, t, m, h, dtype=np.float16)
    scale = np.array([0.5, 0.75, 1.5], np.float32)
    wide = mixes.astype(np.float64)
    pre, post = 1 / (1 + np.exp(-wide[:, :m] * 0.5)), 2 / (1 + np.exp(-wide[:, m:2 * m] * 0.75))
    cm = np.exp(wide[:, 2 * m:].reshape(t, m, m) * 1.5)
    cm /= cm.sum(2, keepdims=True)
    for _ in range(3):
        cm /= cm.sum(1, keepdims=True)
        cm /= cm.sum(2, keepdims=True)
    layer = np.einsum("tm,tmh->th", pre, residual.astype(np.float64))
    check(hyper_connection(), (mixes, residual, scale), [post, cm, layer], tol=1e-3)


def statistics(rows=4, n=192, threads=160):
    """Warps by number: sums, a scan, a histogram by atomics, a reducer, and rows for the rest."""
    @T.prim_func
    def main(X: T.Tensor((rows, n), "int32"), total: T.Tensor((rows,), "int32"), scan: T.Tensor((rows, n), "int32"),
             counts: T.Tensor((rows, 8), "int32"), top: T.Tensor((rows,), "int32"), back: T.Tensor((rows, n), "int32")):
        with T.Kernel(rows, threads=threads) as b:
            tx = T.get_thread_binding()
            x = T.alloc_shared((n,), "int32")
            T.copy(X[b, :], x)
            warp = tx // 32
            if warp == 0:
                f = T.alloc_fragment((n,), "int32")
                s = T.alloc_fragment((1,), "int32")
                T.copy(x, f)
                T.reduce_sum(f, s, dim=0)
                T.copy(s, total[b:b + 1])
            elif warp == 1:
                y = T.alloc_shared((n,), "int32")
                T.copy(x, y)
                T.cumsum(y, dim=0)
                T.copy(y, scan[b, :])
            elif warp == 2:
                h = T.alloc_shared((8,), "int32")
                T.clear(h)
                for i in T.Parallel(n):
                    T.atomic_add(h[x[i] & 7], 1)
                T.copy(h, counts[b, :])
            elif tx >= 96 and tx < 128:
                m = T.alloc_reducer((1,), "int32", op="max")
                m_out = T.alloc_fragment((1,), "int32")
                T.reducer_init(m)
                for i in T.Parallel(n):
                    T.reducer_update(m[0], x[i])
                T.finalize_reducer(m, m_out)
                T.copy(m_out, top[b:b + 1])
            else:
                for i in T.Parallel(n):
                    back[b, i] = x[n - 1 - i]

    return main


@pytest.mark.parametrize("threads", [160, 192, 256])
def test_each_warp_computes_a_statistic_of_its_own(threads):
    x = np.random.default_rng(2).integers(-50, 50, (4, 192)).astype(np.int32)
    counts = np.stack([np.bincount(r & 7, minlength=8) for r in x])
    check(statistics(threads=threads), (x,), [x.sum(1), x.cumsum(1), counts, x.max(1), x[:, ::-1]])


# ---- warps that load, warps that compute -----------------------------------------------------------------------------------


def loader_warp_attention(pages=6, page=32, d=64, heads=64):
    """Decoding over a page table: a warp behind two consuming groups loads pages, each group takes every other page."""
    @T.prim_func
    def main(Q: T.Tensor((heads, d), "float16"), cache: T.Tensor((pages + 2, page, d), "float16"),
             table: T.Tensor((pages,), "int32"), parts: T.Tensor((2, heads, d), "float32")):
        with T.Kernel(1, threads=288):
            tx = T.get_thread_binding()
            q = T.alloc_shared((heads, d), "float16")
            k0, k1 = T.alloc_shared((page, d), "float16"), T.alloc_shared((page, d), "float16")
            full, empty = T.alloc_barrier([32, 32]), T.alloc_barrier([128, 128])
            T.copy(Q, q)
            if tx >= 256 and tx < 288:
                for i in T.serial(pages // 2):
                    T.mbarrier_wait_parity(empty[0], (i & 1) ^ 1)
                    T.tma_copy(cache[table[2 * i], :, :], k0, barrier=full[0])
                    T.mbarrier_arrive(full[0])
                    T.mbarrier_wait_parity(empty[1], (i & 1) ^ 1)
                    T.tma_copy(cache[table[2 * i + 1], :, :], k1, barrier=full[1])
                    T.mbarrier_arrive(full[1])
            elif tx < 128:
                s0 = T.alloc_fragment((heads, page), "float32")
                p0 = T.alloc_fragment((heads, page), "float16")
                o0 = T.alloc_fragment((heads, d), "float32")
                T.clear(o0)
                for i in T.serial(pages // 2):
                    T.mbarrier_wait_parity(full[0], i & 1)
                    T.gemm(q, k0, s0, transpose_B=True, clear_accum=True)
                    T.copy(s0, p0)
                    T.gemm(p0, k0, o0)
                    T.mbarrier_arrive(empty[0])
                T.copy(o0, parts[0, :, :])
            else:
                s1 = T.alloc_fragment((heads, page), "float32")
                p1 = T.alloc_fragment((heads, page), "float16")
                o1 = T.alloc_fragment((heads, d), "float32")
                T.clear(o1)
                for i in T.serial(pages // 2):
                    T.mbarrier_wait_parity(full[1], i & 1)
                    T.gemm(q, k1, s1, transpose_B=True, clear_accum=True)
                    T.copy(s1, p1)
                    T.gemm(p1, k1, o1)
                    T.mbarrier_arrive(empty[1])
                T.copy(o1, parts[1, :, :])

    return main


def test_a_warp_loads_pages_for_two_groups():
    rng = np.random.default_rng(3)
    q, cache = whole(rng, 64, 64, dtype=np.float16, high=1), whole(rng, 8, 32, 64, dtype=np.float16, high=1)
    table = np.array([5, 0, 7, 2, 1, 4], np.int32)
    k = cache[table].astype(np.float32)
    each = np.einsum("phk,pkd->phd", np.einsum("hd,pkd->phk", q.astype(np.float32), k), k)
    check(loader_warp_attention(), (q, cache, table), [np.stack([each[0::2].sum(0), each[1::2].sum(0)])], on=HOPPER)


def split_prefill(n=128, d=64, block=64, consumers=128):
    """A producer branch stores keys and values, the consumer multiplies; both named by comparison."""
    @T.prim_func
    def main(Q: T.Tensor((64, d), "float16"), K: T.Tensor((n, d), "float16"), V: T.Tensor((n, d), "float16"),
             O: T.Tensor((64, d), "float32")):
        with T.Kernel(1, threads=consumers + 128):
            tx = T.get_thread_binding()
            q = T.alloc_shared((64, d), "float16")
            k, v = T.alloc_shared((2, block, d), "float16"), T.alloc_shared((2, block, d), "float16")
            full, empty = T.alloc_barrier([128, 128]), T.alloc_barrier([consumers, consumers])
            s = T.alloc_fragment((64, block), "float32")
            p = T.alloc_fragment((64, block), "float16")
            o = T.alloc_fragment((64, d), "float32")
            T.copy(Q, q)
            if tx >= consumers:
                for i in T.serial(n // block):
                    T.mbarrier_wait_parity(empty[i % 2], (i // 2 + 1) % 2)
                    T.tma_copy(K[i * block:(i + 1) * block, :], k[i % 2, :, :], barrier=full[i % 2])
                    T.tma_copy(V[i * block:(i + 1) * block, :], v[i % 2, :, :], barrier=full[i % 2])
                    T.mbarrier_arrive(full[i % 2])
            else:
                T.clear(o)
                for i in T.serial(n // block):
                    T.mbarrier_wait_parity(full[i % 2], (i // 2) % 2)
                    T.gemm(q, k[i % 2, :, :], s, transpose_B=True, clear_accum=True)
                    T.copy(s, p)
                    T.gemm(p, v[i % 2, :, :], o)
                    T.mbarrier_arrive(empty[i % 2])
                T.copy(o, O)

    return main


@pytest.mark.parametrize("consumers", [128, 256])
def test_a_producer_and_a_consumer_split_by_comparison(consumers):
    rng = np.random.default_rng(4)
    q, k, v = (whole(rng, *s, dtype=np.float16, high=1) for s in ((64, 64), (128, 64), (128, 64)))
    want = (q.astype(np.float32) @ k.astype(np.float32).T) @ v.astype(np.float32)
    check(split_prefill(consumers=consumers), (q, k, v), [want], on=HOPPER)


def stored_by_threads(n=256, block=64, consumers=96):
    """Plain copies by the producing warps and named barriers of both sides, so that it runs on any GPU."""
    @T.prim_func
    def main(A: T.Tensor((n,), "float32"), B: T.Tensor((n,), "float32"), total: T.Tensor((1,), "float32")):
        with T.Kernel(1, threads=consumers + 32):
            tx = T.get_thread_binding()
            s = T.alloc_shared((2, block), "float32")
            f = T.alloc_fragment((block,), "float32")
            t = T.alloc_fragment((1,), "float32")
            m = T.alloc_fragment((1,), "float32")
            T.fill(s, 0.0)
            if tx >= consumers:
                for i in T.serial(n // block):
                    T.copy(A[i * block:(i + 1) * block], s[i % 2, :])
                    T.sync_threads(8, consumers + 32)
            else:
                T.clear(t)
                for i in T.serial(n // block):
                    T.sync_threads(8, consumers + 32)
                    for j in T.Parallel(block):
                        f[j] = s[i % 2, block - 1 - j] * 2.0
                    T.reduce_sum(f, m, dim=0)
                    t[0] += m[0]
                    T.copy(f, B[i * block:(i + 1) * block])
                T.copy(t, total)

    return main


@pytest.mark.parametrize("consumers", [32, 64, 96])
def test_warps_hand_rows_over_at_a_named_barrier(consumers):
    a = whole(np.random.default_rng(5), 256)
    want = 2 * a.reshape(4, 64)[:, ::-1].reshape(-1)
    check(stored_by_threads(consumers=consumers), (a,), [want, want.sum(keepdims=True)])


def consumers_then_ws(cons=128):
    """A comparison around T.ws: the branch holds what T.ws names already."""
    @T.prim_func
    def main(A: T.Tensor((2, 128), "float32"), B: T.Tensor((2, 128), "float32")):
        with T.Kernel(1, threads=256):
            tx = T.get_thread_binding()
            s = T.alloc_shared((128,), "float32")
            if tx >= cons:
                with T.ws(1):
                    T.copy(A[0, :], s)
                    for i in T.Parallel(128):
                        B[0, i] = s[127 - i]
            else:
                f = T.alloc_fragment((128,), "float32")
                T.copy(A[1, :], f)
                for i in T.Parallel(128):
                    f[i] = f[i] + 1.0
                T.copy(f, B[1, :])

    return main


def test_a_comparison_around_a_warp_role():
    a = whole(np.random.default_rng(6), 2, 128)
    check(consumers_then_ws(), (a,), [np.stack([a[0, ::-1], a[1] + 1])])


def rows_by_one_warp():
    """The warp that loads has no work of its own beside T.tma_copy and its mbarriers."""
    @T.prim_func
    def main(A: T.Tensor((4, 64), "float32"), B: T.Tensor((4, 64), "float32")):
        with T.Kernel(1, threads=160):
            tx = T.get_thread_binding()
            s = T.alloc_shared((64,), "float32")
            full, empty = T.alloc_barrier([32]), T.alloc_barrier([128])
            if tx < 32:
                for i in T.serial(4):
                    T.mbarrier_wait_parity(empty, (i & 1) ^ 1)
                    T.tma_copy(A[i, :], s, barrier=full)
                    T.mbarrier_arrive(full)
            if tx >= 32:
                f = T.alloc_fragment((64,), "float32")
                for i in T.serial(4):
                    T.mbarrier_wait_parity(full, i & 1)
                    T.copy(s, f)
                    T.mbarrier_arrive(empty)
                    for j in T.Parallel(64):
                        B[i, j] = f[j] + 1.0

    return main


def test_a_warp_that_only_loads():
    a = whole(np.random.default_rng(12), 4, 64)
    check(rows_by_one_warp(), (a,), [a + 1], on=HOPPER)


def cleared_in_front():
    """Accumulators that all threads clear and store, though the warps of one branch alone compute with each."""
    @T.prim_func
    def main(A: T.Tensor((128, 64), "float16"), B: T.Tensor((64, 64), "float16"), C: T.Tensor((128, 64), "float32"),
             D: T.Tensor((64,), "float32")):
        with T.Kernel(1, threads=256):
            tx = T.get_thread_binding()
            a, b = T.alloc_shared((128, 64), "float16"), T.alloc_shared((64, 64), "float16")
            c, acc = T.alloc_shared((128, 64), "float32"), T.alloc_fragment((128, 64), "float32")
            r = T.alloc_fragment((64,), "float32")
            T.clear(acc)
            T.fill(r, 1.0)
            T.copy(A, a)
            T.copy(B, b)
            if tx < 128:
                T.gemm(a, b, acc)
            else:
                for i in T.Parallel(64):
                    r[i] += b[i, 0]
            T.copy(acc, c)
            T.copy(r, D)
            for i, j in T.Parallel(128, 64):
                C[i, j] = c[127 - i, j]

    return main


def test_fragments_of_one_branch_are_cleared_and_stored_around_it():
    rng = np.random.default_rng(13)
    a, b = whole(rng, 128, 64, dtype=np.float16), whole(rng, 64, 64, dtype=np.float16)
    check(cleared_in_front(), (a, b), [(a.astype(np.float32) @ b)[::-1], 1.0 + b[:, 0]])


# ---- parts of the keys, warps inside warps -----------------------------------------------------------------------------------


def decode_halves(n=256, d=64):
    """One query row: each half of the warps takes half of the keys, and the first warp joins the two."""
    @T.macro
    def part(half, K, V, qs, tops, sums, acc):
        x = T.alloc_fragment((n // 2, d), "float32")
        s = T.alloc_fragment((n // 2,), "float32")
        m, z = T.alloc_fragment((1,), "float32"), T.alloc_fragment((1,), "float32")
        o = T.alloc_fragment((d,), "float32")
        T.copy(K[half * (n // 2):(half + 1) * (n // 2), :], x)
        for i, j in T.Parallel(n // 2, d):
            x[i, j] = x[i, j] * qs[j]
        T.reduce_sum(x, s, dim=1)
        T.reduce_max(s, m, dim=0)
        for i in T.Parallel(n // 2):
            s[i] = T.exp(s[i] - m[0])
        T.reduce_sum(s, z, dim=0)
        T.copy(V[half * (n // 2):(half + 1) * (n // 2), :], x)
        for i, j in T.Parallel(n // 2, d):
            x[i, j] = x[i, j] * s[i]
        T.reduce_sum(x, o, dim=0)
        T.copy(m, tops[half:half + 1])
        T.copy(z, sums[half:half + 1])
        T.copy(o, acc[half, :])

    @T.prim_func
    def main(q: T.Tensor((d,), "float32"), K: T.Tensor((n, d), "float32"), V: T.Tensor((n, d), "float32"),
             O: T.Tensor((d,), "float32")):
        with T.Kernel(1, threads=128):
            tx = T.get_thread_binding()
            qs = T.alloc_shared((d,), "float32")
            tops, sums = T.alloc_shared((2,), "float32"), T.alloc_shared((2,), "float32")
            acc = T.alloc_shared((2, d), "float32")
            T.copy(q, qs)
            if tx // 64 == 0:
                part(0, K, V, qs, tops, sums, acc)
            else:
                part(1, K, V, qs, tops, sums, acc)
            T.sync_threads()
            if T.get_warp_idx_sync() == 0:
                for j in T.Parallel(d):
                    top = T.max(tops[0], tops[1])
                    a, b = T.exp(tops[0] - top), T.exp(tops[1] - top)
                    O[j] = (acc[0, j] * a + acc[1, j] * b) / (sums[0] * a + sums[1] * b)

    return main


def test_halves_of_the_warps_take_halves_of_the_keys():
    rng = np.random.default_rng(7)
    q, k, v = (rng.standard_normal(s).astype(np.float32) for s in ((64,), (256, 64), (256, 64)))
    s = k.astype(np.float64) @ q
    p = np.exp(s - s.max())
    check(decode_halves(), (q, k, v), [p @ v / p.sum()], tol=1e-5)


def nested_parts():
    @T.prim_func
    def main(A: T.Tensor((2, 256), "float32"), B: T.Tensor((2, 256), "float32"), C: T.Tensor((2, 64), "float32"),
             D: T.Tensor((2, 64), "float32")):
        with T.Kernel(2, threads=256) as b:
            tx = T.get_thread_binding()
            s, q = T.alloc_shared((256,), "float32"), T.alloc_shared((64,), "float32")
            if tx >= 64:
                T.copy(A[b, :], s)
                for k in T.serial(2):
                    if tx >= 128 and tx < 160:
                        for i in T.Parallel(64):
                            q[i] = s[i] * (k + 1)
                        for i in T.Parallel(64):
                            C[b, i] = q[63 - i]
                    elif tx >= 160:
                        for i in T.Parallel(64):
                            D[b, i] = s[255 - i] + k
                    for i in T.Parallel(256):
                        B[b, i] = s[255 - i]
                    for i in T.Parallel(128):
                        s[i] = s[i] + 1.0

    return main


def test_warps_inside_warps_wait_for_their_own():
    a = whole(np.random.default_rng(8), 2, 256)
    later = a + np.where(np.arange(256) < 128, 1.0, 0.0)
    check(nested_parts(), (a,), [later[:, ::-1], 2 * later[:, :64][:, ::-1], later[:, ::-1][:, :64] + 1])


def rows_of_threads():
    """Warps as the rows of a block of two dimensions."""
    @T.prim_func
    def main(A: T.Tensor((4, 64), "float32"), B: T.Tensor((4, 64), "float32"), total: T.Tensor((64,), "float32")):
        with T.Kernel(1, threads=(32, 4)):
            ty = T.get_thread_binding(1)
            s, f = T.alloc_shared((4, 64), "float32"), T.alloc_fragment((64,), "float32")
            m = T.alloc_fragment((1,), "float32")
            if ty == 0:
                T.copy(A[0, :], f)
                T.reduce_sum(f, m, dim=0)
                for i in T.Parallel(64):
                    total[i] = m[0]
            else:
                T.copy(A, s)
                for i, j in T.Parallel(4, 64):
                    B[i, j] = s[3 - i, 63 - j]

    return main


def test_warps_as_rows_of_the_block():
    a = whole(np.random.default_rng(9), 4, 64)
    check(rows_of_threads(), (a,), [a[::-1, ::-1], np.full(64, a[0].sum())])


def gemm_beside_norms():
    @T.prim_func
    def main(A: T.Tensor((128, 32), "float16"), B: T.Tensor((32, 64), "float16"), flag: T.Tensor((1,), "int32"),
             C: T.Tensor((128, 64), "float32"), S: T.Tensor((128,), "float32")):
        with T.Kernel(1, threads=160):
            tx = T.get_thread_binding()
            a, b = T.alloc_shared((128, 32), "float16"), T.alloc_shared((32, 64), "float16")
            acc = T.alloc_fragment((128, 64), "float32")
            af, r = T.alloc_fragment((128, 32), "float16"), T.alloc_fragment((128,), "float32")
            T.copy(A, a)
            T.copy(B, b)
            if tx >= 32:
                T.clear(acc)
                T.gemm(a, b, acc)
                T.copy(acc, C)
            elif flag[0] > 0:
                T.copy(a, af)
                for i, j in T.Parallel(128, 32):
                    af[i, j] = af[i, j] * af[i, j]
                T.reduce_sum(af, r, dim=1)
                T.copy(r, S)

    return main


@pytest.mark.parametrize("on", [0, 1])
def test_four_warps_multiply_beside_a_fifth(on):
    rng = np.random.default_rng(10)
    a, b = whole(rng, 128, 32, dtype=np.float16), whole(rng, 32, 64, dtype=np.float16)
    wide = a.astype(np.float32)
    check(gemm_beside_norms(), (a, b, np.array([on], np.int32)), [wide @ b, on * (wide * wide).sum(1)])


def element_read_then_changed():
    """All threads read an element of a fragment and change it, in front of branches by warps."""
    @T.prim_func
    def main(A: T.Tensor((64,), "float32"), B: T.Tensor((3, 64), "float32")):
        with T.Kernel(1, threads=96):
            tx = T.get_thread_binding()
            r, v = T.alloc_fragment((1,), "float32"), T.alloc_var("float32")
            r[0] = 0
            for k in T.serial(4):
                r[0] += A[k]
            v = r[0]
            r[0] = 5.0
            for i in T.Parallel(64):
                B[2, i] = r[0]
            if tx < 32:
                B[0, tx] = v
                for i in T.Parallel(32):
                    B[0, 32 + i] = A[i]
            else:
                B[1, tx - 32] = v
                for i in T.Parallel(1):
                    B[1, i] = A[i]

    return main


def test_an_element_that_all_threads_read_and_then_change():
    a = whole(np.random.default_rng(14), 64)
    total = a[:4].sum()
    rows = np.full(32, total), a[:32], a[:1], np.full(63, total), np.full(64, 5.0)
    want = np.concatenate(rows).reshape(3, 64)
    check(element_read_then_changed(), (a,), [want])


# ---- what is refused ---------------------------------------------------------------------------------------------------------


def parts_of_a_warp(cond):
    @T.prim_func
    def main(A: T.Tensor((64,), "float32")):
        with T.Kernel(1, threads=128):
            if cond(T.get_thread_binding()):
                for i in T.Parallel(64):
                    A[i] = 1.0

    return main


@pytest.mark.parametrize("cond, kind, found", [
    (lambda t: t < 16, "collective-divergent", "16 of 128 threads"),
    (lambda t: t % 2 == 0, "collective-divergent", "64 of 128"),
    (lambda t: t // 32 % 2 == 0, "role-place", "warps 0, 2")])
def test_parts_of_a_warp_and_scattered_warps_are_refused_by_name(cond, kind, found):
    with pytest.raises(TileLangError) as e:
        tilelang.compile(parts_of_a_warp(cond), target=WITH_HOPPER["sm_90a"][0])
    assert e.value.kind == kind and found in str(e.value) and "warps that follow each other" in str(e.value)


def fragment_of_two(read):
    @T.prim_func
    def main(A: T.Tensor((64,), "float32"), B: T.Tensor((64,), "float32")):
        with T.Kernel(1, threads=96):
            tx = T.get_thread_binding()
            frag = T.alloc_fragment((64,), "float32")
            if tx < 32:
                T.copy(A, frag)
            else:
                if read:
                    B[tx - 32] = frag[0]
                else:
                    T.copy(frag, B)

    return main


@pytest.mark.parametrize("read", [False, True])
def test_a_fragment_of_two_sets_of_warps_is_refused_by_name(read):
    with pytest.raises(TileLangError, match="`frag` is used by warps 1 to 2, and by warp 0") as e:
        tilelang.compile(fragment_of_two(read), target=WITH_HOPPER["sm_90a"][0])
    assert e.value.kind == "role-fragment"


def test_warps_that_run_alone_agree_bit_for_bit():
    x = np.random.default_rng(11).integers(-50, 50, (4, 192)).astype(np.int32)
    everywhere(statistics(), x, on=WITH_HOPPER)
