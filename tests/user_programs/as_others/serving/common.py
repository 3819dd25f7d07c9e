"""What several modules of this folder use."""

import tilelang

from ..catalogue import Bound

F16, BF16, F32, I32, FP8 = "float16", "bfloat16", "float32", "int32", "float8_e4m3fn"

PLAIN = {tilelang.PassConfigKey.TL_DISABLE_WARP_SPECIALIZED: True, tilelang.PassConfigKey.TL_DISABLE_TMA_LOWER: True}

LOG2E = 1.44269504

HALF = Bound(F16, via=((F16, 1.0),))
