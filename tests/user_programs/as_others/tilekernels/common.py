"""What several modules of this folder use."""


import tilelang
import tilelang.language as T

from ..catalogue import Bound

BF16, F32, I32, I64, FP8, FP4 = T.bfloat16, T.float32, T.int32, T.int64, T.float8_e4m3fn, T.float4_e2m1fn

NO_SPECIALISATION = {tilelang.PassConfigKey.TL_DISABLE_WARP_SPECIALIZED: True}


@T.macro
def scale_of(amax, limit, least=1e-4):
    clamped = T.max(amax, least)
    return clamped / limit, limit / clamped


ROUNDED = Bound("float8_e4m3fn", via=(("float8_e4m3fn", 0.002),))
