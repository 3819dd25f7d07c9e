import ml_dtypes
import numpy as np

from tilelang.library import matmul

a = np.zeros((64, 64), ml_dtypes.float8_e4m3fn)
matmul(a, a, target={"kind": "cuda", "arch": "sm_80"}, execution_backend="simulator")
