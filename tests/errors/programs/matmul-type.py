import numpy as np

from tilelang.library import matmul

matmul(np.zeros((8, 16), np.float16), np.zeros((16, 8), np.float32))
