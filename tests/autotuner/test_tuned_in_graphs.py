"""Functions tuned by tilelang.autotune under torch.compile."""

import pytest

import tilelang
import tilelang.language as T

torch = pytest.importorskip("torch")


@tilelang.autotune(configs=[{"block": 16}, {"block": 32}])
@tilelang.jit(target="cpu")
def twice(X, block=16):
    M = T.const("M")
    X: T.Tensor((M,), "float32")
    Y = T.empty((M,), "float32")
    with T.Kernel(T.ceildiv(M, block), threads=32) as bx:
        for i in T.Parallel(block):
            Y[bx * block + i] = X[bx * block + i] * 2
    return Y


def test_dynamo_looked_into_the_tuner():
    graph = torch.compile(lambda x: twice(x) + 1, fullgraph=True, backend="aot_eager")
    x = torch.arange(64, dtype=torch.float32)
    assert torch.equal(graph(x), x * 2 + 1) and len(twice.results) >= 1
    assert torch.equal(graph(x + 1), x * 2 + 3) and torch.equal(twice(x), x * 2)
