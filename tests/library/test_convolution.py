"""conv2d and its gradients beside torch's in float64: the CPU, the device simulator with TMA's im2col mode, the checks."""

import numpy as np
import pytest

from tilelang.library import conv2d
from tilelang.library.place import Place
from tilelang.library.training import convolution
from tilelang.library.training.convolution import CONV2D
from tilelang.library.training.convolution import image_gradient, mixed_place, weight_gradient
from tilelang.target import Target

H200 = {"kind": "cuda", "arch": "sm_90a"}
# images, height, width, channels, features, kernel, stride, padding, dilation, type
CASES = {"3x3": (2, 7, 6, 64, 64, (3, 3), (1, 1), (1, 1), (1, 1), "float16"),
         "stride": (2, 8, 9, 64, 64, (3, 3), (2, 2), (1, 1), (1, 1), "float16"),
         "few channels": (2, 7, 6, 16, 32, (3, 3), (1, 1), (1, 1), (1, 1), "float16"),
         "1x1": (3, 6, 5, 32, 16, (1, 1), (2, 2), (0, 0), (1, 1), "float16"),
         "four channels": (1, 6, 5, 4, 64, (3, 3), (1, 1), (1, 1), (1, 1), "float16"),
         "first layer": (1, 8, 9, 3, 32, (7, 7), (2, 2), (3, 3), (1, 1), "float16"),
         "patches": (1, 8, 9, 3, 16, (4, 4), (4, 4), (0, 0), (1, 1), "float16"),
         "odd blocks": (1, 9, 10, 5, 16, (3, 2), (2, 3), (1, 0), (1, 1), "float16"),
         "uneven": (1, 9, 8, 3, 5, (3, 2), (2, 3), (1, 0), (1, 2), "float32"),
         "float64": (1, 6, 6, 4, 3, (2, 3), (1, 2), (2, 1), (3, 1), "float64")}


def case(name):
    """(x, weight, dy, options, exact results and gradients)."""
    import torch

    n, height, width, c, f, kernel, *options, kind = CASES[name]
    rng = np.random.default_rng(0)
    x = rng.standard_normal((n, height, width, c)).astype(kind)
    w = (rng.standard_normal((f, *kernel, c)) / (c * kernel[0] * kernel[1])**0.5).astype(kind)
    exact = [torch.tensor(t).double().requires_grad_() for t in (x, w)]
    y = torch.nn.functional.conv2d(*(t.permute(0, 3, 1, 2) for t in exact), None, *options).permute(0, 2, 3, 1)
    dy = rng.standard_normal(y.shape).astype(kind)
    grads = torch.autograd.grad(y, exact, torch.tensor(dy).double())
    return x, w, dy, [list(o) for o in options], [t.detach().numpy() for t in (y, *grads)]


def check(name, target, limit):
    x, w, dy, options, wanted = case(name)
    found = [*CONV2D.forward(x, w, *options, target), *CONV2D.backward(x, w, [True, True], *options, target, dy)]
    for a, b in zip(found, wanted):
        assert a.shape == b.shape and np.abs(a.astype(np.float64) - b).max() < limit * np.abs(b).max()


@pytest.mark.parametrize("name", CASES)
def test_results_and_gradients_on_the_cpu(name):
    check(name, None, {"float16": 1e-3, "float32": 1e-6, "float64": 1e-13}[CASES[name][-1]])


def test_results_and_gradients_of_the_reference_interpreter():
    check("1x1", "tile", 1e-3)


@pytest.mark.parametrize("name", ["3x3", "stride", "uneven", "four channels", "first layer", "patches", "odd blocks"])
def test_results_and_gradients_on_the_device_simulator(name):
    check(name, "cuda -arch=sm_90a", 1e-3)


def test_blocks_divide_the_columns_of_weights(monkeypatch):
    """Partial sums of three blocks, added up by a second launch, forward and for the gradient of images."""
    monkeypatch.setattr(convolution, "splits_of", lambda tile, sizes, size, sms: 3)
    monkeypatch.setattr(convolution, "tiled", convolution.tiled.__wrapped__)
    check("3x3", "cuda -arch=sm_90a", 1e-3)
    check("four channels", "cuda -arch=sm_90a", 1e-3)  # whose taps get whole 16 bytes


def test_many_steps_of_few_tiles_are_divided():
    """A 7 x 7 image of 512 channels has 16 tiles of 72 steps; 32 of them have tiles enough for all SMs."""
    place = Place(Target("cuda -arch=sm_90a"), None, 132)
    x, w = np.empty((1, 7, 7, 512), np.float16), np.empty((512, 3, 3, 512), np.float16)
    f = convolution._form(x, w, [1, 1], [1, 1], [1, 1])
    assert convolution.tiled(f, place, 49).splits > 1 and convolution.tiled(f, place, 64 * 49).splits == 1


@pytest.mark.parametrize("images, size, channels", [(4, 128, 48), (8, 32, 320)])
def test_gradients_of_images_have_tiles_of_any_width(images, size, channels):
    """Their layout is for widths that are powers of two; others have the compiler's."""
    place = Place(Target("cuda -arch=sm_90a"), None, 132)
    x, w = np.empty((images, size, size, channels), np.float16), np.empty((channels, 3, 3, channels), np.float16)
    f = convolution.tiled(convolution._form(x, w, [1, 1], [1, 1], [1, 1]), place, images * size**2, True)
    assert f.tile.bn & (f.tile.bn - 1) and image_gradient(f) is not None


@pytest.mark.parametrize("program", [convolution.convolution, image_gradient, weight_gradient])
def test_windows_are_loaded_by_tma(program):
    from tilelang.library.place import Place
    from tilelang.target import Target

    at = Place(Target(H200), None, 132)
    x, w = np.empty((32, 28, 28, 128), np.float16), np.empty((128, 3, 3, 128), np.float16)
    f = convolution._form(x, w, [2, 2], [1, 1], [1, 1])
    tiled = convolution.tiled_for_weights(f, at, 6272) if program is weight_gradient else convolution.tiled(
        f, at, 6272, program is image_gradient)
    first = at.kernel(program, tiled).report_data["kernels"][0]
    loads = [name for name in first["instructions"]["loads"] if "im2col" in name]
    assert len(loads) == 1 and first["warp_roles"] and first["spills"] == 0 and "wgmma" in str(first["instructions"]["MMAs"])


def test_torch_takes_the_call_whole():
    import torch

    g = torch.Generator().manual_seed(0)
    x, w = (torch.randn(s, dtype=torch.float64, generator=g, requires_grad=True) for s in ((2, 4, 5, 3), (2, 2, 2, 3)))
    assert torch.autograd.gradcheck(lambda x, w: conv2d(x, w, stride=(2, 1), padding=1), (x, w), fast_mode=True)
    model = torch.compile(lambda x, w: conv2d(x * 2, w, padding=(0, 1)), fullgraph=True, dynamic=True, backend="aot_eager")
    for n in (2, 1):
        found = torch.autograd.grad(model(x[:n], w).sum(), (x, w))
        plain = torch.nn.functional.conv2d((x[:n] * 2).permute(0, 3, 1, 2), w.permute(0, 3, 1, 2), padding=(0, 1))
        torch.testing.assert_close(found, torch.autograd.grad(plain.sum(), (x, w)))


@pytest.mark.parametrize("given, words", [
    ({"x": np.zeros((2, 5, 5), np.float32)}, "x of conv2d has the shape"),
    ({"weight": np.zeros((4, 3, 3, 2), np.float32)}, "weight of conv2d is float32"),
    ({"stride": 0}, "stride of conv2d is 0"), ({"padding": (1, 2, 3)}, "padding of conv2d is"),
    ({"dilation": 3}, "the kernel of conv2d reaches over 5 x 5 pixels")])
def test_arguments_that_do_not_go_together(given, words):
    x, w = np.zeros((2, 5, 5, 3), np.float32), np.zeros((4, 3, 3, 3), np.float32)
    with pytest.raises(ValueError, match=words):
        conv2d(**{"x": x, "weight": w, **given})


@pytest.mark.parametrize("size, features, options", [((1, 5), 8, {"stride": 2, "padding": (1, 0)}), ((4, 4), 0, {}),
                                                     ((1, 1), 8, {"stride": 3, "padding": 1})])
def test_nothing_but_padding_and_no_features_had_no_result_or_any_gradient(size, features, options):
    import torch

    x, w = torch.randn(2, *size, 3, requires_grad=True), torch.randn(features, 1, 1, 3, requires_grad=True)
    y = conv2d(x, w, **options)
    assert not y.any() and y.shape[3] == features
    assert not any(g.any() for g in torch.autograd.grad(y.sum(), (x, w)))


def test_no_images():
    x, w = np.zeros((0, 5, 5, 3), np.float32), np.zeros((4, 3, 3, 3), np.float32)
    assert conv2d(x, w).shape == (0, 3, 3, 4)
    dx, dw = CONV2D.backward(x, w, [True, True], [1, 1], [0, 0], [1, 1], None, np.zeros((0, 3, 3, 4), np.float32))
    assert dx.shape == x.shape and not dw.any()


@pytest.mark.parametrize("classes, each, columns", [(4, 33, 1), (4, 33, 3), (2, 66, 2), (9, 14, 1)])
def test_every_tile_of_every_class_comes_once_and_blocks_get_all_classes(classes, each, columns):
    waves = 2 * classes
    places = [mixed_place(x, classes, each, columns) for x in range(waves * each * classes)]
    tiles = waves * each
    assert set(places) == {(k % columns, k // columns, c) for k in range(tiles) for c in range(classes)}
    assert len(set(places)) == len(places)
    assert all(sorted(c for _, _, c in places[k::each * classes]) == sorted([*range(classes)] * 2) for k in range(each))
