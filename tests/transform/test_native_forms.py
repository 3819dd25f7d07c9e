"""Tiles of im2col matrices: TMA's im2col mode where it fits, loops over elements elsewhere (native_forms, untaken_im2col)."""

import numpy as np
import pytest

import tilelang.language as T
from tilelang.simulator import run_device, run_tile
from tilelang.target import Target
from tilelang.transform.pipeline import lower

H200 = Target({"kind": "cuda", "arch": "sm_90a"})


def tiles(shape, kernel, stride, dilation, pad, bm=32, bk=64, images=None, by_hand=False):
    """The program that stores the im2col matrix, and its (rows, columns)."""
    n, *image = shape
    pads = [p if isinstance(p, tuple) else (p, p) for p in (pad if isinstance(pad, tuple) else (pad, pad))]
    taps, steps, apart = (v if isinstance(v, tuple) else (v, v) for v in (kernel, stride, dilation))
    oh, ow = ((image[d] + sum(pads[d]) - apart[d] * (taps[d] - 1) - 1) // steps[d] + 1 for d in (0, 1))
    rows, columns = -(-n * oh * ow // bm), -(-taps[0] * taps[1] * image[2] // bk)
    count = T.dynamic("n") if images else n

    @T.prim_func
    def f(A: T.Tensor((count, *image), "float16"), O: T.Tensor((rows * bm, columns * bk), "float16")):
        with T.Kernel(columns, rows, threads=128) as (bx, by):
            S = T.alloc_shared((bm, bk), "float16")
            if by_hand:
                T.annotate_layout({S: T.Layout((bm, bk), lambda i, j: j * bm + i)})
            T.im2col(A, S, by, bx, kernel, stride, dilation, pad)
            T.copy(S, O[by * bm, bx * bk])

    a = np.random.default_rng(0).standard_normal(shape).astype(np.float16)
    want = np.zeros((rows * bm, columns * bk), np.float16)
    for i, h, w in np.ndindex(n, oh, ow):
        for kh, kw in np.ndindex(*taps):
            y, x = h * steps[0] + kh * apart[0] - pads[0][0], w * steps[1] + kw * apart[1] - pads[1][0]
            if 0 <= y < image[0] and 0 <= x < image[1]:
                at = (kh * taps[1] + kw) * image[2]
                want[(i * oh + h) * ow + w, at:at + image[2]] = a[i, y, x]
    return f, a, want


CASES = [((2, 5, 6, 64), 3, 1, 1, 1), ((2, 7, 5, 64), 3, 2, 1, 1), ((1, 6, 9, 128), (3, 2), (1, 2), (2, 1), (2, 0)),
         ((2, 4, 4, 64), (1, 2), 1, 1, ((0, 0), (0, 1))), ((1, 6, 7, 64), 2, 1, 1, ((-1, 0), (0, -2)))]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_tma_loads_windows(case):
    f, a, want = tiles(*case)
    program = lower(f.func, H200)
    assert "tma_load" in str(program) and "im2col" in str(program)
    np.testing.assert_array_equal(run_device(program, {"A": a}).outputs["O"], want)
    np.testing.assert_array_equal(run_tile(f, {"A": a})["O"], want)


def test_any_number_of_images():
    f, a, want = tiles((3, 5, 6, 64), 3, 1, 1, 1, bk=128, images=True)  # columns end inside a tile
    np.testing.assert_array_equal(run_device(lower(f.func, H200), {"A": a}).outputs["O"], want)


@pytest.mark.parametrize("what, options", [
    ("channels that boxes cross", {"shape": (2, 5, 6, 48)}), ("a layout without boxes", {"by_hand": True}),
    ("a stride that is too large", {"stride": 9, "pad": 9}), ("offsets that are too large", {"dilation": 150, "pad": 150})])
def test_threads_load_other_windows(what, options):
    f, a, want = tiles(**{"shape": (2, 5, 6, 64), "kernel": 3, "stride": 1, "dilation": 1, "pad": 1, **options})
    program = lower(f.func, H200)
    assert "tma_load" not in str(program)
    np.testing.assert_array_equal(run_device(program, {"A": a}).outputs["O"], want)


def test_a_descriptor_is_encoded_for_windows():
    import tilelang

    f, *_ = tiles((2, 5, 6, 64), 3, 2, 1, 1)
    k = tilelang.compile(f, target={"kind": "cuda", "arch": "sm_90a"}, execution_backend=None)
    assert "cp.async.bulk.tensor.4d.shared::cluster.global.im2col" in k.get_kernel_source()
    assert "call i32 @cuTensorMapEncodeIm2col" in k.get_host_source()
