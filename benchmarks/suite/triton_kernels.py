"""Matrix products and attention as one writes them in Triton: tiles, masks, grouped order, descriptors where they help."""

import triton
import triton.language as tl


@triton.jit
def _tile(t, M, N, BM: tl.constexpr, BN: tl.constexpr, GROUP: tl.constexpr):
    """Row and column of tile t: GROUP rows of tiles are walked together, so that B stays in the L2 cache."""
    rows, columns = tl.cdiv(M, BM), tl.cdiv(N, BN)
    first = t // (GROUP * columns) * GROUP
    height = min(rows - first, GROUP)
    within = t % (GROUP * columns)
    return first + within % height, within // height


@triton.jit
def gemm(a_ptr, b_ptr, c_ptr, scale_a_ptr, scale_b_ptr, M, N, K, a_row, b_k, b_n,
         BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, SCALED: tl.constexpr):
    """C = A @ B, any shape; SCALED: times the two scalars."""
    row, column = _tile(tl.program_id(0), M, N, BM, BN, GROUP)
    m = row * BM + tl.arange(0, BM)
    n = column * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    a = a_ptr + (m % M)[:, None].to(tl.int64) * a_row + k[None, :]
    b = b_ptr + k[:, None].to(tl.int64) * b_k + (n % N)[None, :].to(tl.int64) * b_n
    acc = tl.zeros((BM, BN), tl.float32)
    for at in range(0, K, BK):
        x = tl.load(a, mask=k[None, :] < K - at, other=0.0)
        y = tl.load(b, mask=k[:, None] < K - at, other=0.0)
        acc = tl.dot(x, y, acc)
        a += BK
        b += BK * b_k
    if SCALED:
        acc = acc * (tl.load(scale_a_ptr) * tl.load(scale_b_ptr))
    c = c_ptr + m[:, None].to(tl.int64) * N + n[None, :]
    tl.store(c, acc.to(c_ptr.dtype.element_ty), mask=(m[:, None] < M) & (n[None, :] < N))


@triton.jit
def gemm_descriptors(a_ptr, b_ptr, c_ptr, scale_a_ptr, scale_b_ptr, M, N, K, programs,
                     BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, SCALED: tl.constexpr,
                     SPLIT: tl.constexpr, TRANS_B: tl.constexpr):
    """The same by tensor descriptors, each program doing several tiles.  Rows must be multiples of 16 bytes.

    SPLIT = 2 stores halves of a tile: less shared memory on the way out, so more stages.
    """
    a = tl.make_tensor_descriptor(a_ptr, shape=[M, K], strides=[K, 1], block_shape=[BM, BK])
    if TRANS_B:
        b = tl.make_tensor_descriptor(b_ptr, shape=[N, K], strides=[K, 1], block_shape=[BN, BK])
    else:
        b = tl.make_tensor_descriptor(b_ptr, shape=[K, N], strides=[N, 1], block_shape=[BK, BN])
    c = tl.make_tensor_descriptor(c_ptr, shape=[M, N], strides=[N, 1], block_shape=[BM, BN // SPLIT])
    scale = 1.0
    if SCALED:
        scale = tl.load(scale_a_ptr) * tl.load(scale_b_ptr)
    for t in tl.range(tl.program_id(0), tl.cdiv(M, BM) * tl.cdiv(N, BN), programs, flatten=True):
        row, column = _tile(t, M, N, BM, BN, GROUP)
        acc = tl.zeros((BM, BN), tl.float32)
        for at in range(0, K, BK):
            x = a.load([row * BM, at])
            if TRANS_B:
                acc = tl.dot(x, b.load([column * BN, at]).T, acc)
            else:
                acc = tl.dot(x, b.load([at, column * BN]), acc)
        acc = acc * scale
        if SPLIT == 1:
            c.store([row * BM, column * BN], acc.to(c_ptr.dtype.element_ty))
        else:
            left, right = tl.split(tl.permute(tl.reshape(acc, (BM, 2, BN // 2)), (0, 2, 1)))
            c.store([row * BM, column * BN], left.to(c_ptr.dtype.element_ty))
            c.store([row * BM, column * BN + BN // 2], right.to(c_ptr.dtype.element_ty))


@triton.jit
def gemm_blocks(a_ptr, b_ptr, c_ptr, scale_a_ptr, scale_b_ptr, M, N, K,
                BM: tl.constexpr, BN: tl.constexpr, GROUP: tl.constexpr):
    """fp8 with a scale for every 1x128 of A and 128x128 of B (n, k): each 128 of k is a product of its own, then scaled."""
    BK: tl.constexpr = 128
    row, column = _tile(tl.program_id(0), M, N, BM, BN, GROUP)
    m = (row * BM + tl.arange(0, BM)) % M
    n = (column * BN + tl.arange(0, BN)) % N
    k = tl.arange(0, BK)
    blocks = tl.cdiv(K, BK)
    a = a_ptr + m[:, None].to(tl.int64) * K + k[None, :]
    b = b_ptr + n[None, :].to(tl.int64) * K + k[:, None]
    acc = tl.zeros((BM, BN), tl.float32)
    for i in range(0, blocks):
        x = tl.load(a, mask=k[None, :] < K - i * BK, other=0.0)
        y = tl.load(b, mask=k[:, None] < K - i * BK, other=0.0)
        scale_a = tl.load(scale_a_ptr + m * blocks + i)
        scale_b = tl.load(scale_b_ptr + n // BK * blocks + i)
        acc += tl.dot(x, y) * scale_a[:, None] * scale_b[None, :]
        a += BK
        b += BK
    m = row * BM + tl.arange(0, BM)
    n = column * BN + tl.arange(0, BN)
    tl.store(c_ptr + m[:, None].to(tl.int64) * N + n[None, :], acc.to(c_ptr.dtype.element_ty),
             mask=(m[:, None] < M) & (n[None, :] < N))


@triton.jit
def _attend(acc, total, top, q, k, v, first, row, lo, hi, c, BM: tl.constexpr, BN: tl.constexpr, MASKED: tl.constexpr):
    """Keys lo to hi into acc, total and top (in powers of two)."""
    m = row + tl.arange(0, BM)
    for at in tl.range(lo, hi, BN):
        s = tl.dot(q, k.load([first + at, 0]).T) * c
        if MASKED:
            s = tl.where(m[:, None] >= (at + tl.arange(0, BN))[None, :], s, -1.0e30)
        new = tl.maximum(top, tl.max(s, 1))
        p = tl.exp2(s - new[:, None])
        factor = tl.exp2(top - new)
        total = total * factor + tl.sum(p, 1)
        acc = tl.dot(p.to(q.dtype), v.load([first + at, 0]), acc * factor[:, None])
        top = new
    return acc, total, top


@triton.jit
def attention(q_ptr, k_ptr, v_ptr, o_ptr, c, B, H, GROUP, S,
              D: tl.constexpr, CAUSAL: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """softmax(q k^T c) v in powers of two; (batch, heads, seq, D), seq a multiple of BM and BN."""
    block = tl.program_id(0)
    if CAUSAL:
        block = tl.num_programs(0) - 1 - block  # long rows first
    head = tl.program_id(1)
    first = (head // GROUP) * S
    qd = tl.make_tensor_descriptor(q_ptr, shape=[B * H * S, D], strides=[D, 1], block_shape=[BM, D])
    kd = tl.make_tensor_descriptor(k_ptr, shape=[B * H // GROUP * S, D], strides=[D, 1], block_shape=[BN, D])
    vd = tl.make_tensor_descriptor(v_ptr, shape=[B * H // GROUP * S, D], strides=[D, 1], block_shape=[BN, D])
    od = tl.make_tensor_descriptor(o_ptr, shape=[B * H * S, D], strides=[D, 1], block_shape=[BM, D])
    acc = tl.zeros((BM, D), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    top = tl.full((BM,), -1.0e30, tl.float32)
    q = qd.load([head * S + block * BM, 0])
    if CAUSAL:
        edge = block * BM // BN * BN
        acc, total, top = _attend(acc, total, top, q, kd, vd, first, block * BM, 0, edge, c, BM, BN, False)
        acc, total, top = _attend(acc, total, top, q, kd, vd, first, block * BM, edge, (block + 1) * BM, c, BM, BN, True)
    else:
        acc, total, top = _attend(acc, total, top, q, kd, vd, first, block * BM, 0, S, c, BM, BN, False)
    od.store([head * S + block * BM, 0], (acc / total[:, None]).to(o_ptr.dtype.element_ty))
