"""Products written wholly by hand: tensor maps, mbarriers, TMA, descriptors, wgmma, a store through shared memory."""

import tilelang.language as T
from tilelang.layout import panel_layout

f16, f32 = "float16", "float32"
SHORT = {f16: "fp16", "float8_e4m3": "e4m3", "int8": "int8", f32: "fp32", "int32": "int32"}
BYTES = {f16: 2, "float8_e4m3": 1, "int8": 1}
LAYOUT_TYPE, MAP_SWIZZLE = {0: 0, 128: 1, 64: 2, 32: 3}, {0: 0, 32: 1, 64: 2, 128: 3}


def ring_gemm(M=64, N=16, K=64, dt=f16, acc=f32, width=128, stages=2):
    """C = A @ B.T by a producer and a consumer warp group around a ring of `stages`.

    Tiles of 64 x BK and N x BK lie in rows of `width` bytes under the swizzle of that width; a step is `width` bytes of K.
    """
    BK = width // BYTES[dt]
    steps, k_elements = K // BK, 32 // BYTES[dt]
    a_tile, b_tile = 64 * width, N * width

    @T.macro
    def issue(a_desc, b_desc, c, k, j):
        T.ptx_wgmma_ss(acc, f"m64n{N}k{k_elements}", True, True, SHORT[dt], SHORT[dt], SHORT[acc], a_desc, 2 * j, b_desc, 2 * j,
                       c.data, 0, T.if_then_else(k + j > 0, 1, 0))

    @T.prim_func
    def main(A: T.Tensor((M, K), dt), B: T.Tensor((N, K), dt), C: T.Tensor((M, N), acc)):
        with T.Kernel(M // 64, threads=256) as bx:
            As = T.alloc_shared((stages, 64, BK), dt)
            Bs = T.alloc_shared((stages, N, BK), dt)
            Cs = T.alloc_shared((64, N), acc)
            full = T.alloc_barrier([1] * stages)
            empty = T.alloc_barrier([128] * stages)
            a_map = T.create_tma_descriptor(dt, 2, A.data, K, M, BYTES[dt], BYTES[dt] * K, BK, 64, 1, 1, 0, MAP_SWIZZLE[width],
                                            2, 0)
            b_map = T.create_tma_descriptor(dt, 2, B.data, K, N, BYTES[dt], BYTES[dt] * K, BK, N, 1, 1, 0, MAP_SWIZZLE[width],
                                            2, 0)
            t = T.get_thread_binding()
            with T.ws(1):
                if t == 128:
                    for k in T.serial(steps):
                        T.mbarrier_wait_parity(empty[k % stages], k // stages % 2 ^ 1)
                        T.ptx_arrive_barrier_expect_tx(full[k % stages], a_tile + b_tile)
                        T.tma_load(a_map, full[k % stages], As[k % stages, 0, 0], k * BK, bx * 64)
                        T.tma_load(b_map, full[k % stages], T.address_of(Bs[k % stages, 0, 0]), k * BK, 0)
            with T.ws(0):
                c = T.alloc_local((N // 2,), acc)
                a_desc = T.alloc_wgmma_desc()
                b_desc = T.alloc_wgmma_desc()
                for k in T.serial(steps):
                    T.mbarrier_wait_parity(full[k % stages], k // stages % 2)
                    T.initialize_wgmma_descriptor(a_desc, As[k % stages, 0, 0], LAYOUT_TYPE[width], 1, width // 2)
                    T.initialize_wgmma_descriptor(b_desc, Bs[k % stages, 0, 0], LAYOUT_TYPE[width], 1, width // 2)
                    T.warpgroup_arrive()
                    for j in range(width // 32):
                        issue(a_desc, b_desc, c, k, j)
                    T.warpgroup_commit_batch()
                    T.warpgroup_wait(0)
                    T.mbarrier_arrive(empty[k % stages])
                for i in T.serial(N // 2):
                    Cs[t // 32 * 16 + t % 32 // 4 + 8 * (i // 2 % 2), i // 4 * 8 + t % 4 * 2 + i % 2] = c[i]
                T.fence_proxy_async()
                T.sync_threads(3, 128)
                T.tma_copy(Cs, C[bx * 64:bx * 64 + 64, 0:N])
                T.tma_store_arrive()
                T.tma_store_wait(0)

    return main


def plain_gemm(N=16, K=32, b_rows_along_n=False):
    """C = A @ B.T without a swizzle: boxes of 16 bytes a row lie side by side, 8 rows of one are a core matrix.

    b_rows_along_n: B is given as (K, N), its rows along N ("mn").
    """
    b_shape = (K, N) if b_rows_along_n else (N, K)

    @T.prim_func
    def main(A: T.Tensor((64, K), f16), B: T.Tensor(b_shape, f16), C: T.Tensor((64, N), f32)):
        with T.Kernel(1, threads=128):
            As = T.alloc_shared((K // 8, 64, 8), f16)
            Bs = T.alloc_shared((b_shape[1] // 8, b_shape[0], 8), f16)
            bar = T.alloc_barrier(1)
            c = T.alloc_local((N // 2,), f32)
            a_desc = T.alloc_wgmma_desc()
            b_desc = T.alloc_wgmma_desc()
            a_map = T.create_tma_descriptor(f16, 2, A.data, K, 64, 2, 2 * K, 8, 64, 1, 1, 0, 0, 2, 0)
            b_map = T.create_tma_descriptor(f16, 2, B.data, b_shape[1], b_shape[0], 2, 2 * b_shape[1], 8, b_shape[0], 1, 1,
                                            0, 0, 2, 0)
            t = T.get_thread_binding()
            if t == 0:
                T.mbarrier_expect_tx(bar, (64 + N) * K * 2)
                for p in T.serial(K // 8):
                    T.tma_load(a_map, bar, As[p, 0, 0], 8 * p, 0)
                for p in T.serial(b_shape[1] // 8):
                    T.tma_load(b_map, bar, Bs[p, 0, 0], 8 * p, 0)
                T.mbarrier_arrive(bar)
            T.mbarrier_wait_parity(bar, 0)
            T.initialize_wgmma_descriptor(a_desc, As[0, 0, 0], 0, 64, 8)
            if b_rows_along_n:
                T.initialize_wgmma_descriptor(b_desc, Bs[0, 0, 0], 0, 8, K)
            else:
                T.initialize_wgmma_descriptor(b_desc, Bs[0, 0, 0], 0, N, 8)
            T.warpgroup_arrive()
            T.ptx_wgmma_ss(f32, f"m64n{N}k16", True, not b_rows_along_n, "fp16", "fp16", "fp32", a_desc, 0, b_desc, 0,
                           c.data, 0, 0)
            T.increase_descriptor_offset(a_desc, 2 * 64 * 16)
            T.increase_descriptor_offset(b_desc, 2 * 8 * 16 if b_rows_along_n else 2 * N * 16)
            T.ptx_wgmma_ss(f32, f"m64n{N}k16", True, not b_rows_along_n, "fp16", "fp16", "fp32", a_desc, 0, b_desc, 0,
                           c.data, 0, 1)
            T.warpgroup_commit_batch()
            T.warpgroup_wait(0)
            for i in T.serial(N // 2):
                C[t // 32 * 16 + t % 32 // 4 + 8 * (i // 2 % 2), i // 4 * 8 + t % 4 * 2 + i % 2] = c[i]

    return main


@T.macro
def stored(C, c, t, N):
    """The accumulators of `ptx_wgmma_ss` into rows of C, 64 a warp group."""
    for i in T.serial(N // 2):
        C[t // 32 * 16 + t % 32 // 4 + 8 * (i // 2 % 2), i // 4 * 8 + t % 4 * 2 + i % 2] = c[i]


def by_threads(groups=1, threads=128, layouts=None, fields=(1, 1, 64), first=None, second=None, offset=2, part=None):
    """C = A @ B.T of tiles that threads copy: 64 rows a warp group, N = 16, K = 64.

    layouts: of As and Bs, shape -> layout; None: the swizzle of 128 bytes.  fields: of the descriptors.  first, second: (As or
    Bs, thread) -> what a descriptor starts at.  offset: of each product after the first, in units of 16 bytes.  part: the first
    threads that multiply.
    """
    M, K = 64 * groups, 64
    first = first or (lambda s, t: s[t // 128 * 64, 0])
    second = second or (lambda s, t: s[0, 0])
    swizzled = layouts or (lambda shape: panel_layout(shape, f16, 128))

    @T.macro
    def multiply(C, c, a_desc, b_desc, t):
        T.warpgroup_arrive()
        for k in T.unroll(4):
            T.ptx_wgmma_ss(f32, "m64n16k16", True, True, "fp16", "fp16", "fp32", a_desc, offset * k, b_desc, offset * k,
                           c.data, 0, T.if_then_else(k > 0, 1, 0))
        T.warpgroup_commit_batch()
        T.warpgroup_wait(0)
        stored(C, c, t, 16)

    @T.prim_func
    def main(A: T.Tensor((M, K), f16), B: T.Tensor((16, K), f16), C: T.Tensor((M, 16), f32)):
        with T.Kernel(1, threads=threads):
            As = T.alloc_shared((M, K), f16)
            Bs = T.alloc_shared((16, K), f16)
            T.annotate_layout({As: swizzled((M, K)), Bs: swizzled((16, K))})
            c = T.alloc_local((8,), f32)
            a_desc = T.alloc_wgmma_desc()
            b_desc = T.alloc_wgmma_desc()
            t = T.get_thread_binding()
            T.copy(A, As)
            T.copy(B, Bs)
            T.fence_proxy_async()
            T.sync_threads()
            T.initialize_wgmma_descriptor(a_desc, first(As, t), *fields)
            T.initialize_wgmma_descriptor(b_desc, second(Bs, t), *fields)
            if part is None:
                multiply(C, c, a_desc, b_desc, t)
            else:
                if t < part:
                    multiply(C, c, a_desc, b_desc, t)

    return main


def one_box(column=0, place=(0, 0), box=(64, 64), width=128, shape=(64, 64), dt=f16, rows=64, row=0, layout=None):
    """The tile of one box: A, loaded by a tensor map, stored as threads see it in shared memory.  width: of the swizzle."""
    tile = (rows, box[0])

    @T.prim_func
    def main(A: T.Tensor(shape, dt), C: T.Tensor(tile, dt)):
        with T.Kernel(1, threads=128):
            S = T.alloc_shared(tile, dt)
            if layout is not None:
                T.annotate_layout({S: layout})
            bar = T.alloc_barrier(1)
            a_map = T.create_tma_descriptor(dt, 2, A.data, shape[1], shape[0], A.dtype.bytes, A.dtype.bytes * shape[1], *box,
                                            1, 1, 0, MAP_SWIZZLE[width], 2, 0)
            if T.get_thread_binding() == 0:
                T.mbarrier_expect_tx(bar, box[0] * box[1] * A.dtype.bytes)
                T.tma_load(a_map, bar, S[place[0], place[1]], column, row)
                T.mbarrier_arrive(bar)
            T.mbarrier_wait_parity(bar, 0)
            T.copy(S, C)

    return main
