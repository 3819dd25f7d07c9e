import torch

import tilelang
import tilelang.language as T


@tilelang.jit(target="cpu")
def double(A):
    N = T.const("N")
    A: T.Tensor((N,), "float32")
    with T.Kernel(1, threads=32):
        for i in T.Parallel(N):
            A[i] = A[i] * 2


double(torch.ones(8, requires_grad=True))
