import torch

from tilelang.library import flex_attention
from tilelang.library.autograd import define

define(flex_attention.__name__)
x = torch.ones(1, 64, 1, 64)
torch.ops.tilelang_library.flex_attention(x, x, x, None, None, None, None, 12345, None, "bshd", None)
