"""T.prefetch_l2 changes no results and is an instruction on GPUs."""

import numpy as np
import pytest

import tilelang
import tilelang.language as T
from tilelang.codegen.cuda.printer import print_kernel
from tilelang.errors import TileLangError
from tilelang.simulator import run_device, run_tile
from tilelang.target import Target
from tilelang.transform.pipeline import lower


def doubled(n=512):
    @T.prim_func
    def main(X: T.Tensor((n,), "float32"), Y: T.Tensor((n,), "float32")):
        with T.Kernel(2, threads=64) as b:
            tx = T.get_thread_binding()
            if tx < 16:
                T.prefetch_l2(X[b * 256 + tx * 16], 64)
            for i in T.Parallel(256):
                Y[b * 256 + i] = 2 * X[b * 256 + i]

    return main


def test_results_are_those_without_it():
    x = np.arange(512, dtype=np.float32)
    given, p = [x, np.zeros_like(x)], doubled()
    assert (run_tile(p, given)["Y"] == 2 * x).all()
    for arch in ("sm_80", "sm_90a"):
        lowered = lower(p.func, Target({"kind": "cuda", "arch": arch}))
        assert "tl::prefetch_l2(&X[" in print_kernel(lowered.kernels[0])
        assert (run_device(lowered, given).outputs["Y"] == 2 * x).all()
    y = np.zeros_like(x)
    tilelang.compile(p, target="c")(x, y)
    assert (y == 2 * x).all()


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_it_is_an_instruction(arch):
    assert tilelang.compile(doubled(), target=arch).resource_usage[0]["spills"] == 0


def test_it_takes_an_element_of_a_tensor():
    with pytest.raises(TileLangError) as e:
        @T.prim_func
        def main(X: T.Tensor((64,), "float32")):
            with T.Kernel(1, threads=32):
                s = T.alloc_shared((64,), "float32")
                T.prefetch_l2(s[0], 64)
    assert e.value.kind == "extern-argument"
