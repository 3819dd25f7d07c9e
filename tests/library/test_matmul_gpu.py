"""Library products on a GPU: all types, layouts and forms at sizes that cut tiles, against float64 or exact integers."""

from functools import partial

import pytest

from tilelang.library import grouped_matmul, matmul

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu
DEVICE = "cuda"
EPS = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24}
SIZES = [(1000, 1048, 328), (129, 257, 4096), (1021, 517, 333), (4096, 1024, 512), (64, 64, 20000), (1, 4096, 4096)]


def normal(*shape, dtype=torch.float16, seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=g).to(dtype).to(DEVICE)


def check(got, a, b, scale=1.0, extra=0.0, low_bits=0.0):
    """a, b: op applied.  low_bits: of the sum of magnitudes, what the type itself may lose."""
    a, b = a.double(), b.double()
    want, sums = a @ b * scale, a.abs() @ b.abs() * scale
    name = str(got.dtype).removeprefix("torch.")
    bound = (a.shape[-1] * 2.0**-24 + low_bits) * sums + EPS[name] * want.abs() + extra
    assert got.shape == want.shape
    assert bool(((got.double() - want).abs() <= bound + 1e-30).all())


@pytest.mark.parametrize("m, n, k", SIZES)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("ta, tb", [(False, False), (False, True), (True, False), (True, True)])
def test_layouts(m, n, k, dtype, ta, tb):
    a, b = normal(m, k, dtype=getattr(torch, dtype)), normal(k, n, dtype=getattr(torch, dtype), seed=1)
    got = matmul(a.t().contiguous() if ta else a, b.t().contiguous() if tb else b, transpose_a=ta, transpose_b=tb)
    check(got, a, b, low_bits=2.0**-10 if dtype == "float32" else 0.0)
    again = matmul(a.t().contiguous() if ta else a, b.t().contiguous() if tb else b, transpose_a=ta, transpose_b=tb)
    assert torch.equal(got, again)


@pytest.mark.parametrize("m, n, k", [(1, 1001, 517), (1, 129, 8191), (4097, 1, 131), (447, 651, 1187), (65, 67, 69),
                                     (2, 4097, 2049), (9, 1001, 777), (12001, 3, 515), (16, 8191, 129)])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("ta, tb", [(False, False), (True, True)])
def test_odd_rows(m, n, k, dtype, ta, tb):
    """Vectors, few rows, copies of both operands, loads of elements; what was in the workspace before does not matter."""
    torch.full((1 << 24,), float("nan"), device=DEVICE)
    test_layouts(m, n, k, dtype, ta, tb)


@pytest.mark.parametrize("m, n, k", [(1000, 1048, 336), (257, 129, 4096), (333, 517, 1021)])
@pytest.mark.parametrize("tb", [False, True])
def test_bytes_and_float8(m, n, k, tb):
    g = torch.Generator().manual_seed(0)
    a, b = (torch.randint(-128, 128, s, generator=g, dtype=torch.int8).to(DEVICE) for s in ((m, k), (k, n)))
    got = matmul(a, b.t().contiguous() if tb else b, transpose_b=tb)
    assert torch.equal(got.long().cpu(), a.long().cpu() @ b.long().cpu())
    for kinds in ((torch.float8_e4m3fn, torch.float8_e4m3fn), (torch.float8_e4m3fn, torch.float8_e5m2)):
        x, y = normal(m, k, dtype=kinds[0]), normal(k, n, dtype=kinds[1], seed=1)
        other = y.t().contiguous() if tb else y
        check(matmul(x, other, transpose_b=tb), x.double(), y.double(), low_bits=2.0**-11)
        check(matmul(x, other, transpose_b=tb, fast_accum=True), x.double(), y.double(), low_bits=k / 32 * 2.0**-13)
        s = torch.tensor([0.5], device=DEVICE)
        check(matmul(x, other, transpose_b=tb, scale_a=s, scale_b=s, out_dtype=torch.float32), x.double(), y.double(),
              scale=0.25, low_bits=2.0**-11)


@pytest.mark.parametrize("m, n, k", [(1000, 1048, 640), (4096, 4096, 512), (1, 129, 257), (333, 960, 1024)])
def test_scales_of_blocks(m, n, k):
    x, y = normal(m, k, dtype=torch.float8_e4m3fn), normal(n, k, dtype=torch.float8_e4m3fn, seed=1)
    g = torch.Generator().manual_seed(2)
    sa = (torch.rand(m, -(-k // 128), generator=g) + 0.5).to(DEVICE)
    sb = (torch.rand(-(-n // 128), -(-k // 128), generator=g) + 0.5).to(DEVICE)
    wa = x.double() * sa.double().repeat_interleave(128, 1)[:, :k]
    wb = y.double() * sb.double().repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)[:, :k]
    check(matmul(x, y, transpose_b=True, scale_a=sa, scale_b=sb), wa, wb.t(), low_bits=2.0**-11)


@pytest.mark.parametrize("activation", [None, "relu", "gelu", "gelu_tanh", "silu"])
def test_epilogues(activation):
    a, b, bias = normal(333, 512), normal(512, 264, seed=1), normal(264, seed=2)
    x = a.double() @ b.double() + bias.double()
    f = {None: lambda v: v, "relu": torch.relu, "gelu": torch.nn.functional.gelu,
         "gelu_tanh": partial(torch.nn.functional.gelu, approximate="tanh"), "silu": torch.nn.functional.silu}[activation]
    got = matmul(a, b, bias=bias, activation=activation)
    assert (got.double() - f(x)).abs().max() <= 2.0**-11 * f(x).abs().max() + 1e-3


def test_batches_views_and_addresses():
    a, b = normal(5, 200, 136), normal(5, 136, 72, seed=1)
    check(matmul(a, b), a, b)
    check(matmul(a, b[0]), a, b[0])
    check(matmul(a[:, :, 3:130], b[:, 3:130, 1:]), a[:, :, 3:130], b[:, 3:130, 1:])
    check(matmul(a[0].t(), b[0].t().contiguous().t()[:, :40], transpose_a=True), a[0], b[0][:, :40])
    odd = normal(200 * 136 + 1)[1:].view(200, 136)  # starts at no multiple of 16 bytes
    check(matmul(odd, b[0]), odd, b[0])
    out = torch.empty(200, 72, dtype=torch.float16, device=DEVICE)
    assert matmul(a[0], b[0], out=out) is out
    check(out, a[0], b[0])


@pytest.mark.parametrize("sizes", [[100, 0, 412, 1], [0, 0, 0, 0], [512, 1, 0, 0], [128, 128, 128, 128]])
def test_groups(sizes):
    rows = 513
    a, b = normal(rows, 256), normal(4, 256, 136, seed=1)
    got = grouped_matmul(a, b, torch.tensor(sizes, dtype=torch.int32, device=DEVICE))
    row = 0
    for g, n in enumerate(sizes):
        check(got[row:row + n], a[row:row + n], b[g])
        row += n
    assert not got[row:].any()


def test_many_rows_and_streams():
    """Kernels for any number of rows; two streams at a time; the same bits at every call."""
    b = normal(512, 384, seed=1)
    for m in (7, 8, 9, 10, 11, 12, 13, 100, 1000, 3001):
        a = normal(m, 512, seed=m)
        check(matmul(a, b), a, b)
    if DEVICE != "cuda":
        return
    a = [normal(777, 512, seed=s) for s in range(8)]
    want = [matmul(x, b) for x in a]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(3)]
    for _ in range(20):
        got = []
        for i, x in enumerate(a):
            with torch.cuda.stream(streams[i % 3]):
                got.append(matmul(x, b))
        torch.cuda.synchronize()
        assert all(torch.equal(g, w) for g, w in zip(got, want))
