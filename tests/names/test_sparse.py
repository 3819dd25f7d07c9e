"""2:4 sparse products (language 11): compressed operands and their metadata against a dense product."""

import ml_dtypes
import numpy as np
import pytest
from everywhere import EXECUTIONS, cuda_text, run

import tilelang.language as T
from tilelang.errors import TileLangError
from tilelang.cuda.intrinsics.sparse_layout import GROUP_CONFIG, get_e_factor as e_factor, get_e_replicate_factor

RNG = np.random.default_rng(7)
TYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "int8": np.int8, "float32": np.float32}


def compressed(M, K, dtype, meta):
    """(dense matrix, kept values, metadata) of a random sparse matrix."""
    keep, group = GROUP_CONFIG[dtype]
    dense, kept, codes = np.zeros((M, K), np.float32), [], []
    for i in range(M):
        for g in range(K // group):
            places = sorted(RNG.choice(group, keep, replace=False))
            values = RNG.integers(-3, 4, keep)
            dense[i, g * group + np.array(places)] = values
            kept.append(values)
            codes.append([4, 14][places[0]] if group == 2 else places[0] | places[1] << 2)
    per = np.dtype(meta).itemsize * 2
    words = np.array(codes, np.uint64).reshape(M, -1, per)
    e = sum(words[..., k] << np.uint64(4 * k) for k in range(per)).astype(f"u{np.dtype(meta).itemsize}").view(meta)
    return dense, np.array(kept).reshape(M, K // 2).astype(TYPES[dtype]), e


def program(M, N, K, BK, dtype, acc, meta, ta=False, te=False, tb=False, stages=0):
    f = e_factor(dtype, meta)
    a, e, b = ((K // 2, M) if ta else (M, K // 2)), ((K // f, M) if te else (M, K // f)), ((N, K) if tb else (K, N))
    ab, eb, bb = ((BK // 2, M) if ta else (M, BK // 2)), ((BK // f, M) if te else (M, BK // f)), ((N, BK) if tb else (BK, N))

    @T.prim_func
    def main(A: T.Tensor(a, dtype), E: T.Tensor(e, meta), B: T.Tensor(b, dtype), C: T.Tensor((M, N), acc)):
        with T.Kernel(1, threads=64):
            As = T.alloc_shared(ab, dtype)
            Es = T.alloc_shared(eb, meta)
            Bs = T.alloc_shared(bb, dtype)
            Cf = T.alloc_fragment((M, N), acc)
            T.clear(Cf)
            for k in T.Pipelined(K // BK, num_stages=stages):
                T.copy(A[k * BK // 2, 0] if ta else A[0, k * BK // 2], As)
                T.copy(E[k * BK // f, 0] if te else E[0, k * BK // f], Es)
                T.copy(B[0, k * BK] if tb else B[k * BK, 0], Bs)
                T.gemm_sp(As, Es, Bs, Cf, transpose_A=ta, transpose_E=te, transpose_B=tb)
            T.copy(Cf, C)

    return main


@pytest.mark.spec("T.gemm_sp", "L11:gemm_sp")
@pytest.mark.parametrize("dtype,acc,meta,flags,stages", [
    ("float16", "float32", "int16", {}, 2), ("float16", "float32", "int32", {"tb": True}, 0),
    ("bfloat16", "float32", "int16", {"ta": True, "te": True}, 2), ("int8", "int32", "int32", {"tb": True}, 0),
    ("float32", "float32", "int16", {}, 0)])
def test_products_of_compressed_operands(dtype, acc, meta, flags, stages):
    M, N, K, BK = 32, 16, 128, 64
    dense, kept, e = compressed(M, K, dtype, meta)
    b = RNG.integers(-3, 4, (K, N))
    args = [np.ascontiguousarray(kept.T) if flags.get("ta") else kept, np.ascontiguousarray(e.T) if flags.get("te") else e,
            np.ascontiguousarray((b.T if flags.get("tb") else b).astype(TYPES[dtype]))]
    f = program(M, N, K, BK, dtype, acc, meta, stages=stages, **flags)
    for on in EXECUTIONS:
        assert np.array_equal(run(f, *args, on=on)[3], dense @ b), on
    cuda_text(f)


@pytest.mark.spec("L11:gemm_sp")
def test_sizes_of_metadata():
    """4 bits a group; a quad of lanes holds an instruction's words once for 8-bit operands, else twice."""
    for dtype, (keep, group) in GROUP_CONFIG.items():
        assert 2 * keep == group
        for meta, bits in (("int16", 16), ("int32", 32), ("uint8", 8)):
            assert e_factor(dtype, meta) == bits // 4 * group
        assert get_e_replicate_factor(dtype) == (1 if T.dtype(dtype).bits == 8 else 2)


@pytest.mark.spec("L11:gemm_sp")
def test_shapes_that_do_not_fit_are_refused():
    def build(e_cols, k, meta="int16"):
        @T.prim_func
        def f():
            with T.Kernel(1, threads=32):
                A = T.alloc_shared((16, 32), "float16")
                E = T.alloc_shared((16, e_cols), meta)
                B = T.alloc_shared((k, 16), "float16")
                C = T.alloc_fragment((16, 16), "float32")
                T.gemm_sp(A, E, B, C)

    for bad in ((4, 32), (3, 64)):
        with pytest.raises(AssertionError, match="T.gemm_sp K shape check failed"):
            build(*bad)
    with pytest.raises(TileLangError, match="metadata of T.gemm_sp are integers"):
        build(4, 64, "float16")
    assert (e_factor("float16", "int16"), e_factor("float32", "int32"), e_factor("int8", "int32")) == (16, 16, 32)
