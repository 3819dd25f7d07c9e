import torch

from tilelang.library import matmul

a = torch.zeros(64, 64, dtype=torch.float16, requires_grad=True)
matmul(a, a)
