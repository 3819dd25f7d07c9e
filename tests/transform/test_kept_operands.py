"""kept_operands: what a loop only reads stays in registers where more blocks fit without its bytes."""

import numpy as np
import pytest

import tilelang
import tilelang.language as T


def scores(rows=128, dim=128, keys=64, steps=3, threads=256, changed=False):
    """The sum over tiles of keys of (q @ k^T) @ k."""
    @T.prim_func
    def program(Q: T.Tensor((rows, dim), "float16"), K: T.Tensor((keys * steps, dim), "float16"),
                O: T.Tensor((rows, dim), "float32")):
        with T.Kernel(1, threads=threads):
            q, k = T.alloc_shared((rows, dim), "float16"), T.alloc_shared((keys, dim), "float16")
            s, p = T.alloc_fragment((rows, keys), "float32"), T.alloc_fragment((rows, keys), "float16")
            o = T.alloc_fragment((rows, dim), "float32")
            T.copy(Q, q)
            T.clear(o)
            for i in T.Pipelined(steps, num_stages=2):
                T.copy(K[i * keys, 0], k)
                T.gemm(q, k, s, transpose_B=True, clear_accum=True)
                T.copy(s, p)
                T.gemm(p, k, o)
                if changed:
                    q[0, 0] = T.cast(i, "float16")
            T.copy(o, O)

    return program


@pytest.mark.parametrize("chip", ["gfx90a", "gfx942", "gfx950"])
def test_the_operand_is_loaded_once_and_the_result_is_the_same(chip):
    rng = np.random.default_rng(0)
    q, k = ((rng.standard_normal((n, 128)) / 8).astype(np.float16) for n in (128, 192))
    out, plain = np.zeros((128, 128), np.float32), np.zeros((128, 128), np.float32)
    kernel = tilelang.compile(scores(), target=chip, execution_backend="simulator")
    kernel(q, k, out)
    (facts,) = kernel.report_data["kernels"]
    assert ("`q` stays in registers over the loop" in facts["declined"]) == (chip != "gfx950" or facts["shared_bytes"] < 65536)
    tilelang.compile(scores(), target="sm_80", execution_backend="simulator")(q, k, plain)
    np.testing.assert_allclose(out, plain, rtol=1e-3, atol=1e-3)


def test_an_operand_that_the_loop_changes_stays_in_shared_memory():
    kernel = tilelang.compile(scores(64, 64, 32, changed=True), target="gfx942", execution_backend="simulator")
    assert not any("stays in registers" in x for x in kernel.report_data["kernels"][0]["declined"])
