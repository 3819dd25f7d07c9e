import tilelang.language as T


@T.prim_func
def f(A: T.Tensor((64, 64), "float16")):
    with T.Kernel(1, threads=128):
        a, c = T.alloc_shared((64, 64), "float16"), T.alloc_fragment((64, 64), "float32")
        s = T.alloc_shared((32, 2), "float32")
        T.gemm_blockscaled(a, a, c, s, s, k_start=0, sf_a_granularity_k=32, sf_b_granularity_k=32)
