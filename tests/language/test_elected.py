"""T.shuffle_elect: one thread of each group, in every execution that needs no GPU."""

import numpy as np
import pytest
from everywhere import call, cuda_text, placed

import tilelang
import tilelang.language as T


def program(extent):
    @T.prim_func
    def main(A: T.Tensor((96,), "int32")):
        with T.Kernel(1, threads=96):
            t = T.get_thread_binding()
            if T.shuffle_elect(extent):
                A[t] = t + 1

    return main


@pytest.mark.spec("T.shuffle_elect")
@pytest.mark.spec("L15:shuffle_elect")
@pytest.mark.parametrize("backend, target", [("tile", "cuda"), ("simulator", "cuda"), ("tvm_ffi", "cpu")])
@pytest.mark.parametrize("extent", [0, 32, 48, 96])
def test_one_thread_of_each_group(extent, backend, target):
    where = placed({"target": target, "execution_backend": backend})
    kernel = tilelang.compile(program(extent), **where)
    a = np.zeros(96, np.int32)
    call(where, kernel, a)
    t = np.arange(96)
    assert np.array_equal(a, np.where(t % (extent or 96) == 0, t + 1, 0))
    if backend == "simulator":
        cuda_text(program(extent))


@pytest.mark.parametrize("extent", [-1, True, "32"])
def test_the_group_is_a_number_known_when_compiled(extent):
    with pytest.raises(TypeError, match="thread_extent must be an integer from 0"):
        program(extent)
