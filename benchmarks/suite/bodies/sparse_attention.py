"""Attention over gathered keys: rows picked by index, blocks that a condition skips, tiles of run-time length."""

import tilelang.language as T

from . import program

F16, F32, I32 = "float16", "float32", "int32"


@program("gathered_keys")
def gathered_keys(heads=64, dim=128, chosen=64, rows=4096):
    """Rows of keys are picked by an index tile, some of it -1."""
    @T.prim_func
    def main(Q: T.Tensor((heads, dim), F16), KV: T.Tensor((rows, dim), F16), At: T.Tensor((256,), I32),
             O: T.Tensor((heads, dim), F16)):
        with T.Kernel(1, threads=128):
            q, kv = T.alloc_shared((heads, dim), F16), T.alloc_shared((chosen, dim), F16)
            p_s = T.alloc_shared((heads, chosen), F16)
            s, o = T.alloc_fragment((heads, chosen), F32), T.alloc_fragment((heads, dim), F32)
            m, l, m_old = (T.alloc_fragment((heads,), F32) for _ in range(3))
            row = T.alloc_fragment((heads,), F32)
            T.copy(Q, q)
            T.clear(o)
            T.clear(l)
            T.fill(m, -(2.0**30))
            for k in T.Pipelined(256 // chosen, num_stages=2):
                for i, d in T.Parallel(chosen, dim):
                    kv[i, d] = T.if_then_else(At[k * chosen + i] >= 0, KV[At[k * chosen + i], d], 0)
                for h, i in T.Parallel(heads, chosen):
                    s[h, i] = T.if_then_else(At[k * chosen + i] >= 0, 0, -T.infinity(F32))
                T.gemm(q, kv, s, transpose_B=True, policy=T.GemmWarpPolicy.FullRow)
                T.copy(m, m_old)
                T.reduce_max(s, m, dim=1, clear=False)
                for h, i in T.Parallel(heads, chosen):
                    s[h, i] = T.exp2(s[h, i] - m[h])
                T.reduce_sum(s, row, dim=1)
                for h in T.Parallel(heads):
                    l[h] = l[h] * T.exp2(m_old[h] - m[h]) + row[h]
                for h, d in T.Parallel(heads, dim):
                    o[h, d] *= T.exp2(m_old[h] - m[h])
                T.copy(s, p_s)
                T.gemm(p_s, kv, o, policy=T.GemmWarpPolicy.FullRow)
            for h, d in T.Parallel(heads, dim):
                o[h, d] /= l[h]
            T.copy(o, O)
    return main


@program("halves_of_a_fragment")
def halves_of_a_fragment(heads=64, dim=512, chosen=64, parts=2):
    """Gradients of gathered keys leave through shared memory a part of the rows at a time."""
    @T.prim_func
    def main(Q: T.Tensor((heads, dim), F16), KV: T.Tensor((4096, dim), F16), At: T.Tensor((chosen,), I32),
             G: T.Tensor((4096, dim), F32)):
        with T.Kernel(1, threads=256):
            q, kv = T.alloc_shared((heads, dim), F16), T.alloc_shared((chosen, dim), F16)
            p_s, part = T.alloc_shared((heads, chosen), F16), T.alloc_shared((chosen // parts, dim), F32)
            s, f = T.alloc_fragment((heads, chosen), F32), T.alloc_fragment((chosen, dim), F32)
            T.copy(Q, q)
            for i, d in T.Parallel(chosen, dim):
                kv[i, d] = KV[At[i], d]
            T.gemm(q, kv, s, transpose_B=True, clear_accum=True)
            T.copy(s, p_s)
            T.gemm(p_s, q, f, transpose_A=True, clear_accum=True)
            for p in T.serial(parts):
                for i, d in T.Parallel(chosen, dim):
                    if i < chosen // parts:
                        part[i, d] = f[i + p * (chosen // parts), d]
                for i, d in T.Parallel(chosen // parts, dim // 4):
                    T.atomic_addx4(G[At[i + p * (chosen // parts)], d * 4], part[i, d * 4])
    return main


@program("last_row_apart")
def last_row_apart():
    """All rows but the last, and the last row, are copied by slices of run-time length."""
    n = T.dynamic("n")

    @T.prim_func
    def main(A: T.Tensor((n,), F32), B: T.Tensor((n,), F32)):
        with T.Kernel(1, threads=128):
            f = T.alloc_fragment((1,), F32)
            s = T.alloc_shared((64,), F32)
            T.copy(A[: n - 1], f)
            T.copy(f, B[n - 1 : n])
            T.copy(A[0:n], s)
            T.copy(s, B[0 : n - 1])
    return main


@program("pages_between_offsets")
def pages_between_offsets(pages=16, page=64, dim=128):
    """Sequences of a packed batch: from one offset to the next, empty ones included."""
    total = T.dynamic("total")

    @T.prim_func
    def main(X: T.Tensor((total, dim), F16), Starts: T.Tensor((pages + 1,), I32), Y: T.Tensor((pages, page, dim), F16)):
        with T.Kernel(pages, threads=128) as b:
            s = T.alloc_shared((page, dim), F16)
            T.clear(s)
            T.copy(X[Starts[b] : Starts[b + 1], :], s)
            T.copy(s, Y[b, :, :])
    return main


@program("skipped_blocks")
def skipped_blocks(seq=1024, dim=64, block=64):
    """A mask of blocks decides which tiles of keys are multiplied."""
    @T.prim_func
    def main(Q: T.Tensor((seq, dim), F16), K: T.Tensor((seq, dim), F16), V: T.Tensor((seq, dim), F16),
             Mask: T.Tensor((seq // block, seq // block), "bool"), O: T.Tensor((seq, dim), F16)):
        with T.Kernel(seq // block, threads=128) as b:
            q, k_s, v_s = (T.alloc_shared((block, dim), F16) for _ in range(3))
            s, p = T.alloc_fragment((block, block), F32), T.alloc_fragment((block, block), F16)
            o = T.alloc_fragment((block, dim), F32)
            used = T.alloc_local((seq // block,), "bool")
            T.copy(Q[b * block, 0], q)
            T.clear(o)
            for v in T.serial(seq // block):
                used[v] = Mask[b, v]
            for k in T.Pipelined(seq // block, num_stages=2):
                if used[k] != 0:
                    T.copy(K[k * block, 0], k_s)
                    T.gemm(q, k_s, s, transpose_B=True, clear_accum=True)
                    for i, j in T.Parallel(block, block):
                        p[i, j] = T.sigmoid(s[i, j])
                    T.copy(V[k * block, 0], v_s)
                    T.gemm(p, v_s, o)
            T.copy(o, O[b * block, 0])
    return main


@program("two_loops_of_one_tile")
def two_loops_of_one_tile(M=128, N=256, K=2048, BK=128):
    """Two pipelined products use the same large tiles one after the other."""
    @T.prim_func
    def main(A: T.Tensor((M, K), F16), B: T.Tensor((K, N), F16), D: T.Tensor((K, N), F16), C: T.Tensor((M, N), F16)):
        with T.Kernel(1, threads=256):
            a, b = T.alloc_shared((M, BK), F16), T.alloc_shared((BK, N), F16)
            c, e = T.alloc_fragment((M, N), F32), T.alloc_shared((M, N), F16)
            T.clear(c)
            for k in T.Pipelined(K // BK, num_stages=2):
                T.copy(A[0, k * BK], a)
                T.copy(B[k * BK, 0], b)
                T.gemm(a, b, c)
            for k in T.Pipelined(K // BK, num_stages=2):
                T.copy(A[0, k * BK], a)
                T.copy(D[k * BK, 0], b)
                T.gemm(a, b, c)
            T.copy(c, e)
            T.copy(e, C)
    return main
