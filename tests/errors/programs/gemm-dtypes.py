import tilelang.language as T

T.validate_gemm_ab_dtypes("float16", "float32")
