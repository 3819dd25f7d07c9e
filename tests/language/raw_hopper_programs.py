"""Programs in Hopper's raw forms: descriptors and wgmma by hand, boxes by T.tma_load, cp.async on an mbarrier."""

import tilelang.language as T
from tilelang.layout import make_full_bank_swizzled_layout

f16, f32 = "float16", "float32"
DRIVER_F16 = 6  # CU_TENSOR_MAP_DATA_TYPE_FLOAT16


def product(N=64, K=64, from_registers=False, pinned=True, dt=f16):
    """C = A @ B.T of one 64 x N tile: operands of 64 columns (128 bytes) loaded by TMA, one wgmma for 16 columns of K."""
    panel = 64

    @T.macro
    def multiply(As, Bs, a_desc, b_desc, c, k):
        T.ptx_wgmma_ss(f32, f"m64n{N}k16", True, True, "fp16", "fp16", "fp32", a_desc, 2 * k, b_desc, 2 * k, c.data, 0,
                       1 if k else 0, 1, 1)

    @T.prim_func
    def main(A: T.Tensor((64, K), dt), B: T.Tensor((N, K), dt), C: T.Tensor((64, N), f32)):
        with T.Kernel(1, threads=128):
            As = T.alloc_shared((64, panel), dt)
            Bs = T.alloc_shared((N, panel), dt)
            T.annotate_layout({As: make_full_bank_swizzled_layout(As), Bs: make_full_bank_swizzled_layout(Bs)})
            bar = T.alloc_barrier(1)
            c = T.alloc_local((N // 2,), f32)
            a_desc = T.alloc_wgmma_desc()
            b_desc = T.alloc_wgmma_desc()
            t = T.get_thread_binding()
            a_map = T.create_tma_descriptor(DRIVER_F16, 2, A.data, K, 64, 2, 2 * K, panel, 64, 1, 1, 0, 3, 2, 0)
            b_map = T.create_tma_descriptor("float16", 2, B.data, K, N, 2, 2 * K, panel, N, 1, 1, 0, 3, 2, 0)
            if t == 0:
                T.mbarrier_expect_tx(bar[0], (64 + N) * panel * 2)
                T.tma_load(a_map, bar[0], As.access_ptr("w"), 0, 0)
                T.tma_load(b_map, bar[0], T.address_of(Bs[0, 0]), 0, 0)
                T.mbarrier_arrive(bar[0])
            T.mbarrier_wait_parity(bar[0], 0)
            T.initialize_wgmma_descriptor(a_desc, As.access_ptr("r"), 1, 1, 64)
            T.initialize_wgmma_descriptor(b_desc, Bs.access_ptr("r"), 1, 1, 64)
            T.warpgroup_fence_operand(c)
            T.warpgroup_arrive()
            [multiply(As, Bs, a_desc, b_desc, c, k) for k in range(panel // 16)]
            T.warpgroup_commit_batch()
            T.warpgroup_wait(0)
            T.warpgroup_fence_operand(c)
            for i in T.serial(N // 2):
                row = t // 32 * 16 + t % 32 // 4 + 8 * (i // 2 % 2)
                C[row, i // 4 * 8 + t % 4 * 2 + i % 2] = c[i]

    return main


def product_of_registers(N=32):
    """C = A @ B.T with A in registers, and B named by a descriptor that moves."""

    @T.prim_func
    def main(A: T.Tensor((64, 32), f16), B: T.Tensor((N, 64), f16), C: T.Tensor((64, N), f32)):
        with T.Kernel(1, threads=128):
            Bs = T.alloc_shared((N, 64), f16)
            T.annotate_layout({Bs: make_full_bank_swizzled_layout(Bs)})
            a = T.alloc_local((16,), f16)
            c = T.alloc_local((N // 2,), f32)
            b_desc = T.alloc_descriptor("wgmma")
            t = T.get_thread_binding()
            T.copy(B, Bs)
            T.fence_proxy_async()
            T.sync_threads()
            for k in T.unroll(16):
                row = t // 32 * 16 + t % 32 // 4 + 8 * (k // 2 % 2)
                a[k] = A[row, k // 8 * 16 + t % 4 * 2 + k // 4 % 2 * 8 + k % 2]
            T.initialize_wgmma_descriptor(b_desc, Bs[0, 0], layout_type_=1, leading_byte_offset=1, stride_byte_offset=64)
            T.warpgroup_arrive()
            T.ptx_wgmma_rs(f32, f"m64n{N}k16", True, "float16", "float16", "float32", a.data, 0, b_desc, 0, c.data, 0, False)
            T.increase_descriptor_offset(b_desc, 32)
            T.ptx_wgmma_rs(f32, f"m64n{N}k16", True, "float16", "float16", "float32", a.data, 8, b_desc, 0, c.data, 0, True)
            T.warpgroup_commit_batch()
            T.warpgroup_wait(0)
            for i in T.serial(N // 2):
                row = t // 32 * 16 + t % 32 // 4 + 8 * (i // 2 % 2)
                C[row, i // 4 * 8 + t % 4 * 2 + i % 2] = c[i]

    return main


def signalled(counted=True, rounds=3, wait=True):
    """Rows reversed: cp.async into shared memory, whose end an mbarrier tells all threads."""

    @T.prim_func
    def main(X: T.Tensor((rounds, 512), f32), Y: T.Tensor((rounds, 512), f32)):
        with T.Kernel(1, threads=128):
            S = T.alloc_shared((512,), f32)
            bar = T.alloc_barrier(128)
            t = T.get_thread_binding()
            for r in T.serial(rounds):
                T.ptx_cp_async(T.access_ptr(S[t * 4], "w"), T.access_ptr(X[r, t * 4], "r"), 4)
                if counted:
                    T.cp_async_barrier_noinc(bar[0])
                else:
                    T.ptx_cp_async_barrier(bar[0])
                    T.mbarrier_arrive(bar[0])
                if wait:
                    T.mbarrier_wait_parity(bar[0], r % 2)
                for k in T.serial(4):
                    Y[r, t * 4 + k] = S[511 - t * 4 - k]
                T.sync_threads()

    return main
