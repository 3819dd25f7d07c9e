"""A library of operators around the compiler: its passes, types, adapters and the names of newer releases."""

import tilelang
import tilelang.language as T

from . import program

F16, F32, I32 = "float16", "float32", "int32"


def scaled(n, scale):
    @T.prim_func
    def main(X: T.Tensor((n,), F32), Y: T.Tensor((n,), F32)):
        with T.Kernel(T.ceildiv(n, 128), threads=128) as b:
            for i in T.Parallel(128):
                Y[b * 128 + i] = X[b * 128 + i] * scale
    return main


@program("rewritten_before_compiling")
def rewritten_before_compiling():
    """A pass of the library visits the statements of a function."""
    from tvm.tirx.stmt_functor import ir_transform

    func = scaled(256, 2.0)
    ir_transform(func.body, lambda s: None, lambda s: None, [])
    return func


@program("bits_of_a_type")
def bits_of_a_type():
    """Vectors are as wide as the type allows."""
    return scaled(128 * 128 // T.DataType("bfloat16").bits, 2.0)


@program("indices_of_results")
def indices_of_results():
    """A library asks the adapter which parameters are results."""
    from tilelang.jit.adapter import BaseKernelAdapter

    kernel = tilelang.compile(scaled(512, 3.0), out_idx=-1)
    assert BaseKernelAdapter._legalize_result_idx(kernel.adapter, -1) == [1]
    return scaled(1024, 3.0)


@program("emitter_of_products")
def emitter_of_products():
    """The module that the emitters of tensor-core instructions stand in."""
    from tilelang.cuda.intrinsics.macro.mma_macro_generator import TensorCoreIntrinEmitter

    emitter = TensorCoreIntrinEmitter(a_dtype=F16, b_dtype=F16, accum_dtype=F32, b_transposed=True, block_row_warps=2,
                                      block_col_warps=2, warp_row_tiles=32, warp_col_tiles=32, chunk=32)
    return scaled(emitter.micro_size_x * 32, 0.5)


@program("fused_and_rounded")
def fused_and_rounded(n=256):
    """One rounding for a product and a sum, one for a product."""
    @T.prim_func
    def main(X: T.Tensor((n,), F32), Y: T.Tensor((n,), F32), Z: T.Tensor((n,), F32)):
        with T.Kernel(1, threads=n):
            for i in T.Parallel(n):
                Z[i] = T.fma(X[i], Y[i], 1.0) + T.fmul(X[i], Y[i])
    return main


@program("scales_of_blocks")
def scales_of_blocks(M=128, N=128, K=512, BK=128):
    """A product of float8 whose scales cover 128 values of K."""
    @T.prim_func
    def main(A: T.Tensor((M, K), "float8_e4m3fn"), B: T.Tensor((N, K), "float8_e4m3fn"), SA: T.Tensor((M, K // BK), F32),
             SB: T.Tensor((N, K // BK), F32), C: T.Tensor((M, N), F32)):
        with T.Kernel(1, threads=128):
            a, b = T.alloc_shared((M, BK), "float8_e4m3fn"), T.alloc_shared((N, BK), "float8_e4m3fn")
            sa, sb = T.alloc_shared((M, K // BK), F32), T.alloc_shared((N, K // BK), F32)
            c = T.alloc_fragment((M, N), F32)
            T.copy(SA, sa)
            T.copy(SB, sb)
            T.clear(c)
            for k in T.serial(K // BK):
                T.copy(A[0, k * BK], a)
                T.copy(B[0, k * BK], b)
                T.gemm_blockscaled(a, b, c, sa, sb, transpose_B=True, k_start=k * BK, sf_a_granularity_k=BK,
                                   sf_b_granularity_k=BK)
            T.copy(c, C)
    return main


@program("tiles_in_turn")
def tiles_in_turn(M=512, N=512, K=256):
    """A persistent loop over tiles that is itself a pipeline."""
    @T.prim_func
    def main(A: T.Tensor((M, K), F16), B: T.Tensor((K, N), F16), C: T.Tensor((M, N), F16)):
        with T.Kernel(8, threads=128) as block:
            a, b, c = T.alloc_shared((128, 64), F16), T.alloc_shared((64, 128), F16), T.alloc_fragment((128, 128), F32)
            for by, bx in T.Persistent([M // 128, N // 128], 8, block, num_stages=2, annotations={"author": "me"}):
                T.clear(c)
                for k in T.serial(K // 64):
                    T.copy(A[by * 128, k * 64], a)
                    T.copy(B[k * 64, bx * 128], b)
                    T.gemm(a, b, c)
                T.copy(c, C[by * 128, bx * 128])
    return main


@program("a_view_with_strides")
def a_view_with_strides(n=64):
    """Every second row of a matrix, by a view."""
    @T.prim_func
    def main(X: T.Tensor((2 * n, n), F32), Y: T.Tensor((n, n), F32)):
        with T.Kernel(1, threads=128):
            even_and_odd = T.view(X, (2, n, n), strides=(n, 2 * n, 1))
            for i, j in T.Parallel(n, n):
                Y[i, j] = even_and_odd[1, i, j]
    return main


@program("partial_sums_by_layout")
def partial_sums_by_layout(rows=64, dim=128):
    """The author places the partial sums of a reducer."""
    from tilelang.layout import PartialFragment

    @T.prim_func
    def main(X: T.Tensor((rows, dim), F32), Y: T.Tensor((rows,), F32)):
        with T.Kernel(1, threads=128):
            x, y = T.alloc_fragment((rows, dim), F32), T.alloc_fragment((rows,), F32)
            total = T.alloc_reducer((rows,), F32, op="sum")
            T.annotate_layout({total: PartialFragment((rows,), forward_thread_fn=lambda i, r: i * 2 + r,
                                                      forward_index_fn=lambda i: 0, replicate=2)})
            T.copy(X, x)
            T.reducer_init(total)
            for i, j in T.Parallel(rows, dim):
                T.reducer_update(total[i], x[i, j])
            T.finalize_reducer(total, y)
            T.copy(y, Y)
    return main


@program("names_of_the_cuda_dialect")
def names_of_the_cuda_dialect(n=256):
    """A kernel whose names come from the target's own module."""
    import tilelang.cuda.language as C

    @C.prim_func
    def main(X: C.Tensor((n, 64), F16), Y: C.Tensor((n, 64), F16)):
        with C.Kernel(n // 64, threads=128) as b:
            s = C.alloc_shared((64, 64), F16)
            C.copy(X[b * 64, 0], s, disable_tma=True, eviction_policy="evict_first")
            C.copy(s, Y[b * 64, 0], prefer_instruction="sync")
    return main


@program("a_launch_by_its_own_name")
def a_launch_by_its_own_name(n=256):
    """What every dialect's Kernel calls."""
    @T.prim_func
    def main(X: T.Tensor((n,), F32), Y: T.Tensor((n,), F32)):
        with T.launch_kernel((n // 64,), threads=64) as b:
            for i in T.Parallel(64):
                Y[b * 64 + i] = X[b * 64 + i]
    return main


@program("settings_of_schedules")
def settings_of_schedules():
    """A kernel compiled with the settings of newer releases."""
    func = scaled(1024, 4.0)
    tilelang.compile(func, pass_configs={"tl.enable_auto_warp_specialization": "role_based", "tl.enable_auto_schedule": True,
                                         "tl.enable_fp32x2_reduction": False})
    return func


@program("helpers_of_the_host")
def helpers_of_the_host(n=128):
    """An injected device function that takes pointers."""
    source = "__device__ void twice(float* y, const float* x) { *y = *x * 2; }"

    @T.prim_func
    def main(X: T.Tensor((n,), F32), Y: T.Tensor((n,), F32)):
        with T.Kernel(1, threads=n):
            T.import_source(source)
            tx = T.get_thread_binding()
            T.call_extern("twice", T.address_of(Y[tx]), T.address_of(X[tx]), dtype="handle")
    return main
