"""A model's block of three kernels under torch.compile(fullgraph=True): forward and backward, on the CPU and on a GPU."""

import pytest
import torch

import tilelang
import tilelang.language as T


def kernels(target):
    """rms norm, GEMM and a gated activation, each with its gradient, as operators of torch."""

    @tilelang.jit(target=target)
    def norm(X, W):
        M, N = T.const("M N")
        X: T.Tensor((M, N), "float32")
        W: T.Tensor((N,), "float32")
        Y = T.empty((M, N), "float32")
        with T.Kernel(M, threads=128) as m:
            x, square = T.alloc_fragment((N,), "float32"), T.alloc_fragment((N,), "float32")
            total = T.alloc_fragment((1,), "float32")
            T.copy(X[m, 0:N], x)
            for i in T.Parallel(N):
                square[i] = x[i] * x[i]
            T.reduce_sum(square, total, dim=0)
            for i in T.Parallel(N):
                Y[m, i] = x[i] * T.rsqrt(total[0] / N + 1e-6) * W[i]
        return Y

    @tilelang.jit(target=target)
    def norm_gradient(X, W, dY):
        M, N = T.const("M N")
        X: T.Tensor((M, N), "float32")
        W: T.Tensor((N,), "float32")
        dY: T.Tensor((M, N), "float32")
        dX = T.empty((M, N), "float32")
        dW = T.empty((M, N), "float32")
        with T.Kernel(M, threads=128) as m:
            x, g = T.alloc_fragment((N,), "float32"), T.alloc_fragment((N,), "float32")
            square, inner = T.alloc_fragment((N,), "float32"), T.alloc_fragment((N,), "float32")
            total, dot = T.alloc_fragment((1,), "float32"), T.alloc_fragment((1,), "float32")
            T.copy(X[m, 0:N], x)
            for i in T.Parallel(N):
                g[i] = dY[m, i] * W[i]
                square[i] = x[i] * x[i]
                inner[i] = g[i] * x[i]
            T.reduce_sum(square, total, dim=0)
            T.reduce_sum(inner, dot, dim=0)
            for i in T.Parallel(N):
                scale = T.rsqrt(total[0] / N + 1e-6)
                dX[m, i] = g[i] * scale - x[i] * scale * scale * scale * dot[0] / N
                dW[m, i] = dY[m, i] * x[i] * scale
        return dX, dW

    @tilelang.jit(target=target)
    def gemm(A, B, flip_a: bool = False, flip_b: bool = False):
        P, Q, R, S = T.const("P Q R S")
        A: T.Tensor((P, Q), "float32")
        B: T.Tensor((R, S), "float32")
        M, K, N = (Q, P, R) if flip_a and flip_b else (Q, P, S) if flip_a else (P, Q, R) if flip_b else (P, Q, S)
        C = T.empty((M, N), "float32")
        with T.Kernel(T.ceildiv(N, 32), T.ceildiv(M, 32), threads=128) as (bx, by):
            c = T.alloc_fragment((32, 32), "float32")
            a = T.alloc_shared((32, 32), "float32")
            b = T.alloc_shared((32, 32), "float32")
            T.clear(c)
            for k in T.serial(T.ceildiv(K, 32)):
                T.copy(A[k * 32, by * 32] if flip_a else A[by * 32, k * 32], a)
                T.copy(B[bx * 32, k * 32] if flip_b else B[k * 32, bx * 32], b)
                T.gemm(a, b, c, transpose_A=flip_a, transpose_B=flip_b)
            T.copy(c, C[by * 32, bx * 32])
        return C

    @tilelang.jit(target=target)
    def gate(X):
        M, N = T.const("M N")
        X: T.Tensor((M, N), "float32")
        Y = T.empty((M, N // 2), "float32")
        with T.Kernel(M, threads=128) as m:
            for i in T.Parallel(N // 2):
                Y[m, i] = X[m, i] * T.sigmoid(X[m, i]) * X[m, i + N // 2]
        return Y

    @tilelang.jit(target=target)
    def gate_gradient(X, dY):
        M, N = T.const("M N")
        X: T.Tensor((M, N), "float32")
        dY: T.Tensor((M, N // 2), "float32")
        dX = T.empty((M, N), "float32")
        with T.Kernel(M, threads=128) as m:
            for i in T.Parallel(N // 2):
                s = T.sigmoid(X[m, i])
                dX[m, i] = dY[m, i] * X[m, i + N // 2] * (s + X[m, i] * s * (1.0 - s))
                dX[m, i + N // 2] = dY[m, i] * X[m, i] * s
        return dX

    norm_op, norm_back, gemm_op = (tilelang.torch_op(k) for k in (norm, norm_gradient, gemm))
    gate_op, gate_back = tilelang.torch_op(gate), tilelang.torch_op(gate_gradient)

    def back_of_norm(x, w, y, dy):
        dx, dw = norm_back(x, w, dy)
        return dx, dw.sum(0)

    return (tilelang.autograd(norm_op, back_of_norm),
            tilelang.autograd(gemm_op, lambda a, b, c, dc: (gemm_op(dc, b, False, True), gemm_op(a, dc, True, False))),
            tilelang.autograd(gate_op, lambda x, y, dy: gate_back(x, dy)))


@pytest.mark.parametrize("target, device, backend", [
    ("cpu", "cpu", "aot_eager"), pytest.param("cuda", "cuda", "inductor", marks=pytest.mark.gpu)], ids=["cpu", "gpu"])
def test_a_block_of_three_kernels_is_one_graph_forward_and_backward(target, device, backend):
    torch.manual_seed(3)
    norm, gemm, gate = kernels(target)

    def block(x, w, up, down):
        return x + gemm(gate(gemm(norm(x, w), up)), down)

    def plain(x, w, up, down):
        h = (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * w) @ up
        a, b = h.chunk(2, dim=-1)
        return x + (torch.nn.functional.silu(a) * b) @ down

    sizes = {"x": (50, 64), "w": (64,), "up": (64, 192), "down": (96, 64)}
    values = {n: torch.randn(*s, device=device) * 0.3 for n, s in sizes.items()}
    torch._dynamo.reset()
    ours = {n: v.clone().requires_grad_() for n, v in values.items()}
    wanted = {n: v.double().requires_grad_() for n, v in values.items()}
    out = torch.compile(block, fullgraph=True, backend=backend)(*ours.values())
    want = plain(*wanted.values())
    # products of float32 operands may be computed in tf32 on a GPU: 11 bits, sums of up to 192 terms of size about 1
    close = dict(rtol=2e-5, atol=2e-5) if device == "cpu" else dict(rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(out.double(), want, **close)
    weights = torch.randn_like(out)
    (out * weights).sum().backward()
    (want * weights.double()).sum().backward()
    for name in sizes:
        torch.testing.assert_close(ours[name].grad.double(), wanted[name].grad, **{k: 10 * v for k, v in close.items()})
