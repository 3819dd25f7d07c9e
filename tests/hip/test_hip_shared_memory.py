"""Programs of fixed tiles on chips with less LDS than they ask for: stages are lost first, then copies ahead, then an error."""

import numpy as np
import pytest

import tilelang
import tilelang.language as T


def attention(keys, stages, dim=128, queries=128, threads=256, seq=256):
    """One head of softmax-free attention: what decides is the order of the tiles."""
    @T.prim_func
    def program(Q: T.Tensor((queries, dim), "float16"), K: T.Tensor((seq, dim), "float16"), V: T.Tensor((seq, dim), "float16"),
                O: T.Tensor((queries, dim), "float16")):
        with T.Kernel(1, threads=threads):
            q, k, v = (T.alloc_shared((n, dim), "float16") for n in (queries, keys, keys))
            T.alloc_shared((queries, keys), "float16")  # which nothing uses
            s, p = T.alloc_fragment((queries, keys), "float32"), T.alloc_fragment((queries, keys), "float16")
            o = T.alloc_fragment((queries, dim), "float32")
            T.copy(Q, q)
            T.clear(o)
            for i in T.Pipelined(seq // keys, num_stages=stages):
                T.copy(K[i * keys, 0], k)
                T.gemm(q, k, s, transpose_B=True, clear_accum=True, policy=T.GemmWarpPolicy.FullRow)
                T.copy(s, p)
                T.copy(V[i * keys, 0], v)
                T.gemm(p, v, o, policy=T.GemmWarpPolicy.FullRow)
            T.copy(o, O)

    return program


@pytest.mark.parametrize("chip, keys, stages, bytes_, note", [
    ("gfx942", 32, 2, 64 << 10, ""), ("gfx942", 64, 2, 64 << 10, ""),
    ("gfx942", 128, 2, 64 << 10, "some pipeline stages"), ("gfx950", 128, 2, 160 << 10, ""),
    ("gfx950", 64, 2, 160 << 10, "")])
def test_stages_are_lost_first_and_then_what_is_copied_ahead(chip, keys, stages, bytes_, note):
    pytest.importorskip("ziglang", reason="the package ziglang is not installed: pip install ziglang")
    kernel = tilelang.compile(attention(keys, stages), target=chip)
    (facts,) = kernel.report_data["kernels"]
    assert facts["shared_bytes"] <= bytes_ and facts["spills"] == 0
    given_up = [x for x in facts["declined"] if x.startswith("compiled without")]
    assert len(given_up) == bool(note) and (not note or f"without {note}" in given_up[0])


def test_tiles_that_fit_no_chip_are_refused_with_those_that_do():
    with pytest.raises(ValueError) as caught:
        tilelang.compile(attention(64, 2, dim=512, threads=256), target="gfx942")
    assert caught.value.kind == "shared-memory" and "fits with q of 65536 bytes, k of 32768 bytes" in caught.value.hint
    assert caught.value.expected == "at most 65536 bytes"


def test_tiles_that_share_bytes_give_the_same_result():
    rng = np.random.default_rng(2)
    q, k, v = ((rng.standard_normal((n, 128)) / 8).astype(np.float16) for n in (128, 256, 256))
    out = np.zeros((128, 128), np.float16)
    tilelang.compile(attention(128, 2), target="gfx942", execution_backend="simulator")(q, k, v, out)
    p = (q.astype(np.float32) @ k.astype(np.float32).T).astype(np.float16).astype(np.float32)
    np.testing.assert_allclose(out, p @ v.astype(np.float32), rtol=2e-2, atol=2e-2)


def test_rows_are_not_padded_where_a_stage_would_be_lost():
    """The rows of K and V were padded, and with 172,032 bytes the loop lost its second stage."""
    pytest.importorskip("ziglang", reason="the package ziglang is not installed: pip install ziglang")
    (facts,) = tilelang.compile(attention(128, 2), target="gfx950").report_data["kernels"]
    assert facts["shared_bytes"] == 163840 and facts["stages"] == {"k": 2, "v": 2} and not facts["declined"]
