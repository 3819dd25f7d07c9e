"""What several modules of this folder use."""

import numpy as np

import tilelang

tilelang.set_log_level("WARNING")

FAST = {
    tilelang.PassConfigKey.TL_DISABLE_WARP_SPECIALIZED: True,
    tilelang.PassConfigKey.TL_DISABLE_TMA_LOWER: True,
    tilelang.PassConfigKey.TL_DISABLE_FAST_MATH: True,
}

FP8, BF16, F32, I32, FP4, UE8 = "float8_e4m3fn", "bfloat16", "float32", "int32", "float4_e2m1fn", "float8_e8m0fnu"


def chosen(batch, seq, kv, topk):
    def draw(g):
        table = np.stack([g.permutation(kv)[:topk] for _ in range(batch * seq)]).reshape(batch, seq, topk)
        table[:, :, -3:] = -1
        return table.astype(np.int32)

    return draw
