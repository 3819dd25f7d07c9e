"""tilelang.utils.sparse: random 2:4 sparse tensors of torch, and their compressed form, which T.gemm_sp multiplies."""

import numpy as np
import pytest

import tilelang
import tilelang.language as T

torch = pytest.importorskip("torch")


@pytest.mark.parametrize("dtype", ("float16", "bfloat16", "float32", "int8", "float8_e4m3fn"))
@pytest.mark.parametrize("transposed", (False, True))
def test_what_is_compressed_comes_back(dtype, transposed):
    from tilelang.utils.sparse import arange_semi_sparse, compress, decompress, randint_semi_sparse, randn_semi_sparse

    dt = getattr(torch, dtype)
    for dense in (randn_semi_sparse(32, 128, dt, "cpu", transposed), randint_semi_sparse(32, 128, 0, 3, dt, "cpu", transposed),
                  arange_semi_sparse(32, 128, dt, "cpu", transposed)):
        values, e = compress(dense, transposed)
        assert values.shape[not transposed] == 64
        back = decompress(values, e, transposed).float()
        assert torch.allclose(back, dense.float(), rtol=0, atol=0, equal_nan=True)  # beyond float8's range: nan


def test_a_group_with_too_many_values_is_rejected():
    from tilelang.utils.sparse import compress

    with pytest.raises(ValueError, match="not 2:4 sparse"):
        compress(torch.ones(16, 128, dtype=torch.float16))


@pytest.mark.parametrize("dtype, meta", [("float16", "int16"), ("float32", "int16"), ("int8", "int32")])
def test_gemm_sp_multiplies_the_compressed_form(dtype, meta):
    from tilelang.utils.sparse import compress, randint_semi_sparse

    acc = "int32" if dtype == "int8" else "float32"
    M, N, K = 32, 32, 128
    a = randint_semi_sparse(M, K, -3, 4, getattr(torch, dtype), "cpu")
    values, e = compress(a)
    b = torch.randint(-3, 4, (K, N)).to(a.dtype)

    @T.prim_func
    def f(A: T.Tensor(tuple(values.shape), dtype), E: T.Tensor(tuple(e.shape), meta), B: T.Tensor((K, N), dtype),
          C: T.Tensor((M, N), acc)):
        with T.Kernel(1, threads=64):
            As = T.alloc_shared(tuple(values.shape), dtype)
            Es = T.alloc_shared(tuple(e.shape), meta)
            Bs = T.alloc_shared((K, N), dtype)
            Cf = T.alloc_fragment((M, N), acc)
            T.copy(A, As)
            T.copy(E, Es)
            T.copy(B, Bs)
            T.gemm_sp(As, Es, Bs, Cf, clear_accum=True)
            T.copy(Cf, C)

    c = np.zeros((M, N), acc)
    tilelang.compile(f, target="cpu")(values.numpy(), e.numpy(), b.numpy(), c)
    assert np.array_equal(c, (a.double() @ b.double()).numpy())
