"""single_updates: an update of one element that all threads reach is run once for the block, on every backend."""

import numpy as np
import pytest

import tilelang
import tilelang.language as T
from tilelang.errors import TileLangError, TileLangWarning
from tilelang.target import Target
from tilelang.transform.legalize.single_updates import single_updates
from tilelang.transform.pipeline import lower

ON = ["tile", "cpu", "sm_80", "sm_90a"]


def on(name):
    if name in ("tile", "cpu"):
        return {"target": "cpu", **({"execution_backend": "tile"} if name == "tile" else {})}
    return {"target": {"kind": "cuda", "arch": name}, "execution_backend": "simulator"}


@pytest.mark.filterwarnings("ignore:single-update")
@pytest.mark.parametrize("where", ON)
@pytest.mark.parametrize("threads", [32, 96, 256])
def test_updates_of_shared_and_global_elements_run_once_for_the_block(where, threads):
    @T.prim_func
    def main(X: T.Tensor((64,), "float32"), Y: T.Tensor((4,), "float32"), Z: T.Tensor((2,), "int32"), n: T.int32):
        with T.Kernel(1, threads=threads):
            s, count = T.alloc_shared((64,), "float32"), T.alloc_shared((2,), "int32")
            total, tile = T.alloc_fragment((1,), "float32"), T.alloc_fragment((64,), "float32")
            T.copy(X, s)
            T.copy(s, tile)
            T.reduce_sum(tile, total)
            T.clear(count)
            s[63] = s[63] + total[0]
            s[0] += 1.0
            for k in T.serial(5):
                count[0] = count[0] + 1
                if k < n:
                    count[1] += 3
                s[1] = s[1] * T.exp(s[0] * 0.01)
            Y[0] = s[63]
            Y[1] = s[0]
            Y[2] = s[1]
            Y[3] = Y[3] + 2.0
            T.copy(count, Z)

    x, y, z = np.arange(64, dtype="float32"), np.ones(4, "float32"), np.zeros(2, "int32")
    tilelang.compile(main, **on(where))(x, y, z, 2)
    np.testing.assert_allclose(y, [63 + 2016, 1, np.exp(0.05), 3], rtol=1e-6)
    assert z.tolist() == [5, 6]


def test_the_user_is_told_that_one_thread_runs_the_update():
    @T.prim_func
    def main(Y: T.Tensor((64,), "float32")):
        with T.Kernel(1, threads=64):
            s = T.alloc_shared((64,), "float32")
            T.copy(Y, s)
            s[3] = s[3] * 2.0
            T.copy(s, Y)

    with pytest.warns(TileLangWarning, match="single-update: `s` is updated once for the block"):
        lower(main.func, Target({"kind": "cuda", "arch": "sm_90a"}))
    assert single_updates.__name__ == "single_updates"


@pytest.mark.parametrize("form, kind", [("own value", "update-by-every-thread"), ("other blocks", "block-overwrite")])
def test_updates_that_threads_or_blocks_would_make_differently_are_refused(form, kind):
    @T.prim_func
    def main(X: T.Tensor((64,), "float32"), Y: T.Tensor((64,), "float32")):
        with T.Kernel(1 if form == "own value" else 4, threads=64):
            s = T.alloc_shared((64,), "float32")
            T.copy(Y, s)
            if form == "own value":
                s[3] = s[3] + X[T.get_thread_binding()]
            else:
                Y[3] = Y[3] + 1.0

    with pytest.raises(TileLangError) as e:
        lower(main.func, Target({"kind": "cuda", "arch": "sm_90a"}))
    assert e.value.kind == kind
