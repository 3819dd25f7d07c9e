import numpy as np
import torch

from tilelang.library import matmul

matmul(np.zeros((8, 16), np.float16), torch.zeros(16, 8, dtype=torch.float16))
