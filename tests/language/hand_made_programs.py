"""Products written wholly by hand: tensor maps, mbarriers, TMA, descriptors, wgmma, a store through shared memory."""

import tilelang.language as T
from tilelang.layout import swizzled_box_layout

f16, f32 = "float16", "float32"
SHORT = {f16: "fp16", "bfloat16": "bf16", "float8_e4m3": "e4m3", "int8": "int8", f32: "tf32"}
BYTES = {f16: 2, "bfloat16": 2, "float8_e4m3": 1, "int8": 1, f32: 4}
SUMS = {f32: "fp32", f16: "fp16", "int32": "int32"}
LAYOUT_TYPE, MAP_SWIZZLE = {0: 0, 128: 1, 64: 2, 32: 3}, {0: 0, 32: 1, 64: 2, 128: 3}


@T.macro
def stored(C, c, t, N):
    """The accumulators of `ptx_wgmma_ss` into rows of C, 64 a warp group."""
    for i in T.serial(N // 2):
        C[t // 32 * 16 + t % 32 // 4 + 8 * (i // 2 % 2), i // 4 * 8 + t % 4 * 2 + i % 2] = c[i]


def ring_gemm(M=64, N=16, K=64, dt=f16, acc=f32, width=128, stages=2):
    """C = A @ B.T by a producer and a consumer warp group around a ring of `stages`.

    Tiles of 64 x BK and N x BK lie in rows of `width` bytes under the swizzle of that width; a step is `width` bytes of K.
    """
    BK = width // BYTES[dt]
    steps, k_elements = K // BK, 32 // BYTES[dt]
    a_tile, b_tile = 64 * width, N * width

    @T.macro
    def issue(a_desc, b_desc, c, k, j):
        T.ptx_wgmma_ss(acc, f"m64n{N}k{k_elements}", True, True, SHORT[dt], SHORT[dt], SUMS[acc], a_desc, 2 * j, b_desc, 2 * j,
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
                stored(Cs, c, t, N)
                T.fence_proxy_async()
                T.sync_threads(3, 128)
                T.tma_copy(Cs, C[bx * 64:bx * 64 + 64, 0:N])
                T.tma_store_arrive()
                T.tma_store_wait(0)

    return main


def panels_gemm(N=16, steps=2, dt=f16, acc=f32, width=0, a_mn=False, b_mn=False):
    """C = A @ B.T of tiles in swizzle atoms of `width` bytes (0: of 16 bytes, no swizzle), one TMA box each, by `steps` MMAs.

    a_mn, b_mn: A is given as (K, 64), B as (K, N), so that their rows run along M and N.
    """
    size, w = BYTES[dt], width or 16
    per, k_elements = w // size, 32 // size
    K = steps * k_elements
    a_shape, b_shape = (K, 64) if a_mn else (64, K), (K, N) if b_mn else (N, K)

    def fields(shape, mn):
        """lbo and sbo of the descriptor, in units of 16 bytes."""
        panel = shape[0] * w // 16
        if width:
            return LAYOUT_TYPE[width], panel if mn else 1, w // 2
        return (0, 8, panel) if mn else (0, panel, 8)

    def step(shape, mn):
        """From one product's operand to the next, in bytes (K is at most one panel under a swizzle)."""
        return k_elements * w if mn else 32 if width else 2 * shape[0] * w

    @T.prim_func
    def main(A: T.Tensor(a_shape, dt), B: T.Tensor(b_shape, dt), C: T.Tensor((64, N), acc)):
        with T.Kernel(1, threads=128):
            As = T.alloc_shared((a_shape[1] // per, a_shape[0], per), dt)
            Bs = T.alloc_shared((b_shape[1] // per, b_shape[0], per), dt)
            bar = T.alloc_barrier(1)
            c = T.alloc_local((N // 2,), acc)
            a_desc = T.alloc_wgmma_desc()
            b_desc = T.alloc_wgmma_desc()
            a_map = T.create_tma_descriptor(dt, 2, A.data, a_shape[1], a_shape[0], size, size * a_shape[1], per, a_shape[0],
                                            1, 1, 0, MAP_SWIZZLE[width], 2, 0)
            b_map = T.create_tma_descriptor(dt, 2, B.data, b_shape[1], b_shape[0], size, size * b_shape[1], per, b_shape[0],
                                            1, 1, 0, MAP_SWIZZLE[width], 2, 0)
            t = T.get_thread_binding()
            if t == 0:
                T.mbarrier_expect_tx(bar, (64 + N) * K * size)
                for p in T.serial(a_shape[1] // per):
                    T.tma_load(a_map, bar, As[p, 0, 0], per * p, 0)
                for p in T.serial(b_shape[1] // per):
                    T.tma_load(b_map, bar, Bs[p, 0, 0], per * p, 0)
                T.mbarrier_arrive(bar)
            T.mbarrier_wait_parity(bar, 0)
            T.initialize_wgmma_descriptor(a_desc, As[0, 0, 0], *fields(a_shape, a_mn))
            T.initialize_wgmma_descriptor(b_desc, Bs[0, 0, 0], *fields(b_shape, b_mn))
            T.warpgroup_arrive()
            for j in T.unroll(steps):
                T.ptx_wgmma_ss(acc, f"m64n{N}k{k_elements}", not a_mn, not b_mn, SHORT[dt], SHORT[dt], SUMS[acc],
                               a_desc, 0, b_desc, 0, c.data, 0, T.if_then_else(j > 0, 1, 0))
                T.increase_descriptor_offset(a_desc, step(a_shape, a_mn))
                T.increase_descriptor_offset(b_desc, step(b_shape, b_mn))
            T.warpgroup_commit_batch()
            T.warpgroup_wait(0)
            stored(C, c, t, N)

    return main


def by_threads(groups=1, threads=128, layouts=None, fields=(1, 1, 64), first=None, second=None, offset=2, part=None):
    """C = A @ B.T of tiles that threads copy: 64 rows a warp group, N = 16, K = 64.

    layouts: of As and Bs, shape -> layout; None: the swizzle of 128 bytes.  fields: of the descriptors.  first, second: (As or
    Bs, thread) -> what a descriptor starts at.  offset: of each product after the first, in units of 16 bytes.  part: the first
    threads that multiply.
    """
    M, K = 64 * groups, 64
    first = first or (lambda s, t: s[t // 128 * 64, 0])
    second = second or (lambda s, t: s[0, 0])
    swizzled = layouts or (lambda shape: swizzled_box_layout(shape, f16, 128))

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
        with T.Kernel(1, threads=128) as bx:
            S = T.alloc_shared(tile, dt)
            if layout is not None:
                T.annotate_layout({S: layout})
            bar = T.alloc_barrier(1)
            a_map = T.create_tma_descriptor(dt, 2, A.data, shape[1], shape[0], A.dtype.bytes, A.dtype.bytes * shape[1], *box,
                                            1, 1, 0, MAP_SWIZZLE[width], 2, 0)
            if T.get_thread_binding() == 0:
                T.mbarrier_expect_tx(bar, box[0] * box[1] * A.dtype.bytes)
                T.tma_load(a_map, bar, S[place[0], place[1]], bx + column, row)
                T.mbarrier_arrive(bar)
            T.mbarrier_wait_parity(bar, 0)
            T.copy(S, C)

    return main
