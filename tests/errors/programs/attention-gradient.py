import torch

from tilelang.library import flash_attention

q = torch.zeros(1, 128, 4, 64, dtype=torch.float16, requires_grad=True)
flash_attention(q, q, q, out=torch.empty_like(q))
