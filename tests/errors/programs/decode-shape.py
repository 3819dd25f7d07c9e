import numpy as np
from ml_dtypes import bfloat16

from tilelang.library import llama_decode

x, norms = np.zeros((1, 4096), bfloat16), np.zeros((1, 2, 4096), bfloat16)
weights = [np.zeros((1, *shape), bfloat16) for shape in ((6144, 4096), (4096, 4096), (2 * 1000, 4096), (4096, 1000))]
caches, angles = [np.zeros((1, 1, 4096, 8, 128), bfloat16)] * 2, [np.zeros((1, 64), np.float32)] * 2
llama_decode(x, norms, *weights, *caches, np.zeros(1, np.int32), *angles, target="sm_90a")
