import numpy as np

from tilelang.library import gated_delta

q = np.zeros((1, 100, 2, 288), np.float16)
step = np.zeros((1, 100, 2), np.float32)
gated_delta(q, q, q, step, step)
