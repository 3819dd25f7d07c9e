"""The computations of the templates as programs, with the tiles of a hint."""

from __future__ import annotations

from math import ceil, prod
from typing import Any

import tilelang.language as T
from tilelang.carver.roller.hint import Hint
from tilelang.carver.roller.work import Attention, Map, Matmul


def matmul_program(w: Matmul, hint: Hint, with_bias: bool = False) -> Any:
    """C = A @ B, with A (M, K) or transposed, B (K, N) or transposed; bias (N,) is added to rows."""
    m, n, k = w.m, w.n, w.k
    (bm, bn), bk, threads, stages = hint.block, hint.rstep[0], hint.threads, hint.pipeline_stage
    ta, tb = w.trans_a, w.trans_b
    width = hint.rasterization_plan.box_width

    a_shape, a_tile = ((k, m), (bk, bm)) if ta else ((m, k), (bm, bk))
    b_shape, b_tile = ((n, k), (bn, bk)) if tb else ((k, n), (bk, bn))

    @T.macro
    def multiplied(A, B, bx, by):
        """The tile (by, bx) of A @ B, in registers."""
        As = T.alloc_shared(a_tile, w.in_dtype)
        Bs = T.alloc_shared(b_tile, w.in_dtype)
        acc = T.alloc_fragment((bm, bn), w.accum_dtype)
        if width:
            T.use_swizzle(panel_size=width)
        T.clear(acc)
        for ko in T.Pipelined(T.ceildiv(k, bk), num_stages=stages if stages > 1 else 0):
            if ta:
                T.copy(A[ko * bk, by * bm], As)
            else:
                T.copy(A[by * bm, ko * bk], As)
            if tb:
                T.copy(B[bx * bn, ko * bk], Bs)
            else:
                T.copy(B[ko * bk, bx * bn], Bs)
            T.gemm(As, Bs, acc, transpose_A=ta, transpose_B=tb)
        return acc

    @T.prim_func
    def gemm(A: T.Tensor(a_shape, w.in_dtype), B: T.Tensor(b_shape, w.in_dtype), C: T.Tensor((m, n), w.out_dtype)):
        with T.Kernel(T.ceildiv(n, bn), T.ceildiv(m, bm), threads=threads) as (bx, by):
            acc = multiplied(A, B, bx, by)
            T.copy(acc, C[by * bm, bx * bn])

    @T.prim_func
    def gemm_bias(A: T.Tensor(a_shape, w.in_dtype), B: T.Tensor(b_shape, w.in_dtype), Bias: T.Tensor((n,), w.out_dtype),
                     C: T.Tensor((m, n), w.out_dtype)):
        with T.Kernel(T.ceildiv(n, bn), T.ceildiv(m, bm), threads=threads) as (bx, by):
            acc = multiplied(A, B, bx, by)
            for i, j in T.Parallel(bm, bn):
                if by * bm + i < m and bx * bn + j < n:
                    C[by * bm + i, bx * bn + j] = acc[i, j] + Bias[bx * bn + j]

    return gemm_bias if with_bias else gemm


def convolution_program(w: Matmul, sizes: tuple[int, ...], hint: Hint) -> Any:
    """Out (N, OH, OW, F) of Data (N, H, W, C) and Kernel (K, K, C, F), as a GEMM over windows.

    sizes: (N, C, H, W, F, K, S, D, P): batch, channels, height, width, filters, window, stride, dilation, padding.
    """
    n, c, h, wd, f, kk, s, d, p = sizes
    oh, ow = output_size(h, kk, s, d, p), output_size(wd, kk, s, d, p)
    (bm, bn), bk, threads, stages = hint.block, hint.rstep[0], hint.threads, hint.pipeline_stage

    @T.prim_func
    def convolution(Data: T.Tensor((n, h, wd, c), w.in_dtype), Weight: T.Tensor((kk, kk, c, f), w.in_dtype),
                    Out: T.Tensor((n, oh, ow, f), w.out_dtype)):
        with T.Kernel(T.ceildiv(f, bn), T.ceildiv(n * oh * ow, bm), threads=threads) as (bx, by):
            As = T.alloc_shared((bm, bk), w.in_dtype)
            Bs = T.alloc_shared((bk, bn), w.in_dtype)
            acc = T.alloc_fragment((bm, bn), w.accum_dtype)
            flat = T.reshape(Weight, (kk * kk * c, f))
            out = T.reshape(Out, (n * oh * ow, f))
            T.clear(acc)
            for ko in T.Pipelined(T.ceildiv(kk * kk * c, bk), num_stages=stages if stages > 1 else 0):
                for i, j in T.Parallel(bm, bk):
                    k = ko * bk + j
                    m = by * bm + i
                    y = m % (oh * ow) // ow * s + k // (kk * c) * d - p
                    x = m % ow * s + k // c % kk * d - p
                    inside = (y >= 0) & (x >= 0) & (y < h) & (x < wd) & (k < kk * kk * c) & (m < n * oh * ow)
                    As[i, j] = T.if_then_else(inside, Data[m // (oh * ow), y, x, k % c], T.cast(0, w.in_dtype))
                T.copy(flat[ko * bk, bx * bn], Bs)
                T.gemm(As, Bs, acc)
            T.copy(acc, out[by * bm, bx * bn])

    return convolution


def output_size(size: int, window: int, stride: int, dilation: int, padding: int) -> int:
    """Places of a window along an axis."""
    return (size + 2 * padding - dilation * (window - 1) - 1) // stride + 1


def elementwise_program(w: Map, hint: Hint) -> Any:
    """B = A + 1, over a tensor of any rank."""
    shape, block, threads = w.space, hint.block[-1], hint.threads
    outer = prod(shape[:-1])

    def at(before: Any, last: Any) -> tuple[Any, ...]:
        return (*_digits(before, shape[:-1]), last)

    @T.prim_func
    def elementwise(A: T.Tensor(shape, w.dtype), B: T.Tensor(shape, w.dtype)):
        with T.Kernel(ceil(shape[-1] / block), outer, threads=threads) as (bx, by):
            for i in T.Parallel(block):
                if bx * block + i < shape[-1]:
                    B[at(by, bx * block + i)] = A[at(by, bx * block + i)] + T.cast(1, w.dtype)

    return elementwise


def reduction_program(w: Map, structure: str, hint: Hint) -> Any:
    """B = the sum of A over the axes marked R in `structure`; B keeps the axes marked S in their order."""
    space, block, step, threads = w.space or (1,), hint.block[-1], hint.rstep[-1], hint.threads
    kept = iter(w.space)
    summed = iter(w.reduced)
    shape = tuple(next(kept) if s == "S" else next(summed) for s in structure)
    count = prod(w.reduced)

    def place(outer: Any, last: Any, term: Any) -> tuple[Any, ...]:
        spatial = iter((*_digits(outer, space[:-1]), last))
        terms = iter(_digits(term, w.reduced))
        return tuple(next(spatial) if s == "S" else next(terms) for s in structure)

    def at(before: Any, last: Any) -> tuple[Any, ...]:
        return (*_digits(before, space[:-1]), last)

    @T.prim_func
    def reduction(A: T.Tensor(shape, w.dtype), B: T.Tensor(space, w.dtype)):
        with T.Kernel(ceil(space[-1] / block), prod(space[:-1]), threads=threads) as (bx, by):
            terms = T.alloc_fragment((block, step), w.accum_dtype)
            total = T.alloc_fragment((block,), w.accum_dtype)
            T.clear(total)
            for ro in T.serial(ceil(count / step)):
                for i, r in T.Parallel(block, step):
                    terms[i, r] = T.if_then_else((ro * step + r < count) & (bx * block + i < space[-1]),
                                                 T.cast(A[place(by, bx * block + i, ro * step + r)], w.accum_dtype),
                                                 T.cast(0, w.accum_dtype))
                T.reduce_sum(terms, total, dim=1, clear=False)
            for i in T.Parallel(block):
                if bx * block + i < space[-1]:
                    B[at(by, bx * block + i)] = total[i]

    return reduction


def gemv_program(w: Map, out_dtype: str, with_bias: bool, hint: Hint) -> Any:
    """C = A @ B with A (1, K) and B (N, K) (w.inner) or (K, N); bias (N,)."""
    (n,), (k,), block, step, threads = w.space, w.reduced, hint.block[-1], hint.rstep[-1], hint.threads
    along = w.inner

    @T.prim_func
    def gemv(A: T.Tensor((1, k), w.dtype), B: T.Tensor((n, k) if along else (k, n), w.dtype),
             Bias: T.Tensor((n,), out_dtype), C: T.Tensor((1, n), out_dtype)):
        with T.Kernel(ceil(n / block), threads=threads) as bx:
            terms = T.alloc_fragment((block, step), w.accum_dtype)
            total = T.alloc_fragment((block,), w.accum_dtype)
            T.clear(total)
            for ko in T.serial(ceil(k / step)):
                for i, r in T.Parallel(block, step):
                    inside = (ko * step + r < k) & (bx * block + i < n)
                    at = (bx * block + i, ko * step + r) if along else (ko * step + r, bx * block + i)
                    terms[i, r] = T.if_then_else(inside, T.cast(A[0, ko * step + r], w.accum_dtype) * T.cast(
                        B[at], w.accum_dtype), T.cast(0, w.accum_dtype))
                T.reduce_sum(terms, total, dim=1, clear=False)
            for i in T.Parallel(block):
                if bx * block + i < n:
                    if with_bias:
                        C[0, bx * block + i] = total[i] + Bias[bx * block + i]
                    else:
                        C[0, bx * block + i] = total[i]

    return gemv


def attention_program(w: Attention, hint: Hint) -> Any:
    """Out = softmax(Q @ K^T / sqrt(width)) @ V for Q (heads, rows, width), K and V (heads, keys, width).

    causal: a row sees the keys up to its own number, counted from the last key.
    """
    (bq, bk), threads, stages = hint.block, hint.threads, hint.pipeline_stage
    scale, heads, rows, keys, width = w.width ** -0.5, w.heads, w.rows, w.keys, w.width

    @T.prim_func
    def attention(Q: T.Tensor((heads, rows, width), w.in_dtype), K: T.Tensor((heads, keys, width), w.in_dtype),
                  V: T.Tensor((heads, keys, width), w.in_dtype), Out: T.Tensor((heads, rows, width), w.out_dtype)):
        with T.Kernel(T.ceildiv(rows, bq), heads, threads=threads) as (bx, by):
            Qs = T.alloc_shared((bq, width), w.in_dtype)
            Ks = T.alloc_shared((bk, width), w.in_dtype)
            Vs = T.alloc_shared((bk, width), w.in_dtype)
            scores = T.alloc_fragment((bq, bk), w.accum_dtype)
            weights = T.alloc_fragment((bq, bk), w.in_dtype)
            acc = T.alloc_fragment((bq, width), w.accum_dtype)
            highest = T.alloc_fragment((bq,), w.accum_dtype)
            before = T.alloc_fragment((bq,), w.accum_dtype)
            part = T.alloc_fragment((bq,), w.accum_dtype)
            total = T.alloc_fragment((bq,), w.accum_dtype)
            T.copy(Q[by, bx * bq, 0], Qs)
            T.clear(acc)
            T.clear(total)
            T.fill(highest, -1e30)
            for ko in T.Pipelined(T.ceildiv(keys, bk), num_stages=stages if stages > 1 else 0):
                T.copy(K[by, ko * bk, 0], Ks)
                T.gemm(Qs, Ks, scores, transpose_B=True, clear_accum=True)
                for i, j in T.Parallel(bq, bk):
                    seen = ko * bk + j < keys
                    if w.causal:
                        seen = seen & (ko * bk + j <= bx * bq + i + keys - rows)
                    scores[i, j] = T.if_then_else(seen, scores[i, j] * scale, -1e30)
                T.copy(highest, before)
                T.reduce_max(scores, highest, dim=1, clear=False)
                for i, j in T.Parallel(bq, bk):
                    scores[i, j] = T.if_then_else(scores[i, j] > -1e29, T.exp(scores[i, j] - highest[i]), 0.0)
                T.reduce_sum(scores, part, dim=1)
                for i in T.Parallel(bq):
                    total[i] = total[i] * T.exp(before[i] - highest[i]) + part[i]
                for i, j in T.Parallel(bq, width):
                    acc[i, j] *= T.exp(before[i] - highest[i])
                T.copy(scores, weights)
                T.copy(V[by, ko * bk, 0], Vs)
                T.gemm(weights, Vs, acc)
            for i, j in T.Parallel(bq, width):
                acc[i, j] = acc[i, j] / total[i]
            T.copy(acc, Out[by, bx * bq, 0])

    return attention


def _digits(flat: Any, shape: tuple[int, ...]) -> tuple[Any, ...]:
    """Indices of a flat number in a shape; what lies beyond shows in the first."""
    out: list[Any] = []
    for size in reversed(shape[1:]):
        out.append(flat % size)
        flat = flat // size
    return (*((flat,) if shape else ()), *reversed(out))
