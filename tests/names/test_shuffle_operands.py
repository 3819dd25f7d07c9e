"""What shuffles do with operands that name no lane of the segment: the same on every target."""

import numpy as np
import pytest

import tilelang
import tilelang.language as T
from tilelang.simulator import run_tile

LANES = np.arange(64, dtype=np.int32)


def shuffled(name, operand, width, dynamic):
    @T.prim_func
    def main(D: T.Tensor((1,), "int32"), Y: T.Tensor((64,), "int32")):
        with T.Kernel(1, threads=64):
            tx = T.get_thread_binding()
            Y[tx] = getattr(T, name)(tx, D[0] if dynamic else operand, width)

    return main


def rule(name, operand, width):
    """PTX ISA, shfl.sync: five bits of the operand; a lane whose source is beyond its segment reads itself."""
    lane, b = LANES % 32, operand & 31
    start = lane // width * width
    source = {"shfl_xor": lane ^ b, "shfl_up": lane - b, "shfl_down": lane + b}[name]
    inside = source >= start if name == "shfl_up" else source < start + width
    return np.where(inside, source, lane) + LANES // 32 * 32


@pytest.mark.parametrize("name", ["shfl_xor", "shfl_up", "shfl_down"])
@pytest.mark.parametrize("operand, width", [(8, 8), (9, 4), (16, 16), (32, 32), (33, 32), (40, 16), (-3, 32)])
@pytest.mark.parametrize("dynamic", [False, True])
def test_operands_beyond_the_segment_mean_the_same_everywhere(name, operand, width, dynamic):
    """They crossed to the other warp on AMD and raised an IndexError in the interpreter; the CPU kept xor in its segment."""
    func, want, given = shuffled(name, operand, width, dynamic), rule(name, operand, width), np.array([operand], np.int32)
    np.testing.assert_array_equal(run_tile(func, [given, np.zeros(64, np.int32)])["Y"], want)
    for target, backend in (("sm_80", "simulator"), ("gfx942", "simulator"), ("cpu", None)):
        target = {"kind": "cuda", "arch": target} if target == "sm_80" else target
        kernel = tilelang.compile(func, target=target, **({"execution_backend": backend} if backend else {}))
        got = np.zeros(64, np.int32)
        kernel(given, got)
        np.testing.assert_array_equal(got, want, err_msg=str(target))
