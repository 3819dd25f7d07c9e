"""GEMMs by stream-K: partial sums of blocks that share tiles, on the device simulator."""

import numpy as np
import pytest

from tilelang.library.gemm.kernels import Form
from tilelang.library.gemm.split_k_kernels import gemm_stream
from tilelang.library.gemm.tile import Tile
from tilelang.library.place import Place
from tilelang.target import Target

H200 = Place(Target({"kind": "cuda", "arch": "sm_90a"}), "simulator", 132)


@pytest.mark.parametrize("m, n, k, tile, tb", [
    (256, 192, 640, Tile(128, 128, 64, 4, 256, stream=5), True),  # two tiles a block, and tiles of three blocks
    (200, 136, 384, Tile(128, 64, 64, 4, 256, stream=7), False),  # edge tiles
    (128, 256, 192, Tile(128, 64, 64, 4, 256, stream=2), True)])  # whole tiles inside a block
def test_blocks_share_the_steps_of_tiles(m, n, k, tile, tb):
    f = Form(m, n, k, ("float16", "float16", "float16", "float32"), tile, tb=tb, bias="float32", activation="relu")
    kernel = H200.kernel(gemm_stream, f, (None, None), extra_stages=False)
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((m, k)).astype(np.float16), rng.standard_normal((n, k) if tb else (k, n)).astype(np.float16)
    bias, c = rng.standard_normal(n).astype(np.float32), np.empty((m, n), np.float16)
    kernel(a, b, None, None, bias, None, None, np.full(f.partials_shape, np.nan, np.float32), c)
    x, y = a.astype(np.float64), (b.T if tb else b).astype(np.float64)
    assert (abs(c - np.maximum(x @ y + bias, 0)) <= 2.0**-9 * (abs(x) @ abs(y) / 8 + 1)).all()
    assert kernel.report_data["kernels"][0]["warp_roles"]
