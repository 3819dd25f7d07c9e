import numpy as np

from tilelang.library import matmul

a = np.ones((16, 16), np.float32)
matmul(a, a, trans_b=True)
