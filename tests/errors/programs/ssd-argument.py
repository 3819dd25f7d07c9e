import numpy as np

from tilelang.library import chunk_state

x = np.zeros((1, 100, 2, 64), np.float16)
b = np.zeros((1, 100, 1, 64), np.float16)
dt = np.zeros((1, 2, 2, 50), np.float32)
chunk_state(x, b, dt, dt)
