import torch

from tilelang.library import softmax

x = torch.ones(4, 64, requires_grad=True)
first, = torch.autograd.grad(softmax(x).sum(), x, create_graph=True)
torch.autograd.grad(first.sum(), x)
