"""conv2d and its gradients on the GPU, by TMA and by threads, beside torch's in float64; the same bits each time."""

import pytest

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("n, size, c, f, kernel, stride, padding, dilation, kind", [
    (5, (13, 17), 64, 64, 3, 1, 1, 1, "bfloat16"), (5, (13, 17), 64, 96, 3, 2, 1, 1, "float16"),
    (3, (15, 14), 128, 64, 3, 1, 2, 2, "float16"), (4, (9, 11), 32, 48, (3, 5), (2, 3), (1, 2), 1, "bfloat16"),
    (2, (30, 31), 16, 64, 7, 2, 3, 1, "float16"), (2, (12, 12), 3, 8, 3, 1, 1, 1, "float16"),
    (64, (14, 14), 256, 256, 3, 1, 1, 1, "bfloat16"), (33, (28, 28), 128, 128, 3, 2, 1, 1, "bfloat16"),
    (2, (9, 9), 16, 16, 3, 1, 1, 1, "float32")])
def test_results_and_gradients(n, size, c, f, kernel, stride, padding, dilation, kind):
    import torch

    from tilelang.library import conv2d

    kernel = kernel if isinstance(kernel, tuple) else (kernel, kernel)
    g, dt = torch.Generator(device="cuda").manual_seed(0), getattr(torch, kind)
    x = torch.randn((n, *size, c), device="cuda", generator=g).to(dt).requires_grad_()
    w = (torch.randn((f, *kernel, c), device="cuda", generator=g) / (c * kernel[0] * kernel[1])**0.5).to(dt).requires_grad_()
    exact = [t.detach().double().requires_grad_() for t in (x, w)]
    y = torch.nn.functional.conv2d(*(t.permute(0, 3, 1, 2) for t in exact), None, stride, padding, dilation).permute(0, 2, 3, 1)
    dy = torch.randn(y.shape, device="cuda", generator=g).to(dt)
    wanted = [y, *torch.autograd.grad(y, exact, dy.double())]
    found = conv2d(x, w, stride=stride, padding=padding, dilation=dilation)
    results = [found, *torch.autograd.grad(found, (x, w), dy)]
    limit = {"float16": 1e-3, "bfloat16": 6e-3, "float32": 2e-3}[kind]
    for a, b in zip(results, wanted):
        assert float((a.double() - b).norm() / b.norm()) < limit
    again = conv2d(x, w, stride=stride, padding=padding, dilation=dilation)
    for a, b in zip(results, [again, *torch.autograd.grad(again, (x, w), dy)]):
        assert torch.equal(a, b)
