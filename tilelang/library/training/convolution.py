"""`conv2d` with gradients, over images with the channels last.

Convolution as implicit GEMMs: forward, gradient of the image, gradient of the weights.

    Y[pixel, f]     = sum over (tap, c)   of  im2col(X)[pixel, (tap, c)]   W[f, (tap, c)]
    dX[pixel, c]    = sum over (tap, f)   of  im2col(dY)[pixel, (tap, f)]  W[f, (tap, c)]
    dW[f, (tap, c)] = sum over pixels     of  dY[pixel, f]                 im2col(X)[pixel, (tap, c)]

A stride of s divides the pixels of an image's gradient into s x s classes: each has taps of its own, which all read one im2col
matrix of dY with stride 1.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from math import ceil, gcd
from numbers import Integral
from typing import Any, NamedTuple

import tilelang.language as T

from tilelang.errors import error
from tilelang.ir import dtype
from tilelang.target.machine import MAX_GRID

from ..arrays import accumulator, contiguous, empty, in_chunks, padded, type_name
from ..attention.inputs import running_on
from ..autograd import Function, Results, Step
from ..gemm.kernels import chosen
from ..gemm.plan import choose_tile
from ..gemm.problem import TYPES
from ..gemm.tile import Chip, Tile, TileProblem, without_wgmma
from ..place import Place, target_text
from .pixel_blocks import CHANNELS, Blocks, blocks_of, gather_blocks, scatter_blocks
from .rows import check_alike

_STEP = 64  # columns of k that a tile of 16-bit elements has at least, where the channels permit it
_FEW_STEPS = 16  # fewer of a class hide less of a tile's stores (128 images of 28x28x256: 56 us, by 256 rows 58)
_MANY_WAVES = 8  # of tiles, in which classes are mixed: in few, blocks would have tiles of too different lengths
SPLIT = {"enable_pdl": True, "extra_stages": False}  # options of the compiler for the gradient of weights
_STEP_AT_LEAST, _ADDING = 200, 4000  # cycles of a step, and of the launch that adds up partial sums
_LOADED, _SUMMED = 52, 1700  # bytes per cycle: that L2 gives an SM; of partial sums, stored and read by all SMs (measured)


def conv2d(x: Any, weight: Any, *, stride: Any = 1, padding: Any = 0, dilation: Any = 1, target: Any = None) -> Any:
    """The 2-D convolution (cross-correlation, as torch's) of images with the channels last: (n, out height, out width, f).

    x: (n, height, width, c).  weight: (f, kernel height, kernel width, c).  Both float16, bfloat16, float32 (multiplied as
    tf32 on a GPU) or float64, of one type, which is the result's too; sums are in float32 (float64 for float64).  torch's
    tensors in channels_last memory are such images after x.permute(0, 2, 3, 1), without a copy.
    stride, padding, dilation: an integer, or one for height and one for width; pixels around the image are zero.
    target: as for rms_norm.  On sm_90a TMA loads the windows of images with a multiple of 16 channels.  Of others, of 16-bit
    elements without dilation, each call stores a copy first, of stride x stride pixels as one with a multiple of 16 channels;
    the gradient of images with an odd number of channels is computed in these blocks, and copied.

    Gradients of x and weight, of their type; the same inputs give the same bits.  Saved for them: x and weight.

    Raises training-argument.

    >>> import numpy as np
    >>> conv2d(np.arange(4, dtype=np.float32).reshape(1, 2, 2, 1), np.ones((1, 2, 2, 1), np.float32)).ravel().tolist()
    [6.0]
    """
    return CONV2D(x, weight, *(_pair(n, v, least) for n, v, least in (
        ("stride", stride, 1), ("padding", padding, 0), ("dilation", dilation, 1))), target_text(target))


def _pair(name: str, value: Any, least: int) -> list[int]:
    """An option for height and width."""
    both = list(value) if isinstance(value, (tuple, list)) else [value, value]
    if len(both) != 2 or not all(isinstance(v, Integral) and not isinstance(v, bool) and v >= least for v in both):
        wanted = f"an integer of at least {least}, or two of them"
        raise error("training-argument", f"{name} of conv2d is ‹{value!r}›", expected=wanted)
    return [int(v) for v in both]


def _form(x: Any, weight: Any, stride: list[int], padding: list[int], dilation: list[int]) -> ConvForm:
    """The form without its tile.  Raises training-argument."""
    for name, t in (("x", x), ("weight", weight)):
        if len(getattr(t, "shape", ())) != 4 or 0 in t.shape[1:]:
            found = str(tuple(getattr(t, "shape", ())))
            raise error("training-argument", f"{name} of conv2d has the shape ‹{found}›", expected="four dimensions that are "
                        "not 0: images, height, width, channels; features, height, width, channels of the kernel")
    check_alike("conv2d", x, {"weight": (weight, (*weight.shape[:3], x.shape[3]), (type_name(x),))})
    kind = type_name(x)
    f = ConvForm(tuple(map(int, x.shape[1:])), int(weight.shape[0]), tuple(map(int, weight.shape[1:3])), tuple(stride),
                 tuple(dilation), tuple(padding), kind, accumulator(kind), None)
    if min(f.out) < 1:
        raise error("training-argument", f"the kernel of conv2d reaches over {x.shape[1]} x {x.shape[2]} pixels",
                    expected="a kernel no larger than the padded image", found=f"a result of {f.out[0]} x {f.out[1]} pixels")
    return f


@lru_cache(maxsize=4096)
def tiled(f: ConvForm, at: Place, rows: int, transposed: bool = False) -> ConvForm:
    """The form with a tile for a GEMM of so many rows, forward, or with transposed=True for the gradient of the image."""
    size, inner = dtype(f.kind).bytes, f.features if transposed else f.image[2]
    n, taps, classes = f.image[2] if transposed else f.features, f.kernel[0] * f.kernel[1], 1
    if transposed:  # rows and taps of a class
        classes = f.stride[0] * f.stride[1]
        rows, taps = rows // (f.out[0] * f.out[1]) * ceil(f.image[0] / f.stride[0]) * ceil(f.image[1] / f.stride[1]), ceil(
            taps / classes)
    chip, kind = _chip(f, at, not transposed)
    t = choose_tile(chip, TileProblem(rows, n, taps * inner, classes, kind, 8 * size, 8 * size, b_k=not transposed,
                                      may_split=False))
    if classes > 1 and taps * inner < _FEW_STEPS * _STEP and t.bm * t.bn > 128 * 128 and chip.kind == "wgmma":
        t = replace(t, bm=128, bn=128, stages=4, threads=256, cluster=())  # nothing hides how a tile's rows are stored
    bk = next((k for k in (t.bk, _STEP, _STEP // 2, _STEP // 4) if k <= t.bk and inner % k == 0), t.bk)
    mixed = classes > 1 and ceil(rows / t.bm) * ceil(n / t.bn) * classes >= _MANY_WAVES * at.chip.sms
    t = replace(t, bk=bk, stages=t.stages * t.bk // bk)
    even = classes == 1 and inner % bk == 0 and chip.kind == "wgmma"
    splits = splits_of(t, (rows, n, taps * inner // bk), size, chip.sms) if even else 1
    return f._replace(tile=replace(t, cluster=()) if splits > 1 else t, mixed=at.chip.sms if mixed else 0, splits=splits)


def splits_of(t: Tile, sizes: tuple[int, int, int], size: int, sms: int) -> int:
    """Blocks that divide the steps of a tile evenly, where tiles are fewer than SMs.  sizes: rows, columns, steps."""
    rows, columns, steps = sizes
    tiles = ceil(rows / t.bm) * ceil(columns / t.bn)
    step = max(t.bm * t.bn * t.bk / 2048, (t.bm + t.bn) * t.bk * size / _LOADED, _STEP_AT_LEAST)
    found = [(steps // n * step + (n > 1) * (_ADDING + n * rows * columns * 8 / _SUMMED), n)
             for n in range(1, sms // tiles + 1) if steps % n == 0]
    return min(found, default=(0, 1))[1]


def _chip(f: ConvForm, at: Place, k_inner: bool) -> tuple[Chip, str]:
    kind = TYPES[f.kind][0]
    return without_wgmma(at.chip) if kind == "tf32" and not k_inner and at.chip.kind == "wgmma" else at.chip, kind


def power(images: int) -> int:
    """Tiles are chosen for powers of two, so that few numbers of images have kernels of their own."""
    return 1 << (images - 1).bit_length()


@lru_cache(maxsize=4096)
def tiled_for_weights(f: ConvForm, at: Place, rows: int) -> ConvForm:
    """The form with a tile and the splits for the gradient of the weights from so many pixels.

    With wgmma that is a tile of few, by loads (_LOADED), waves, and partial sums (_SUMMED).  The number of stages is a power of
    two: a loop of unknown length can be proved with these.
    """
    size, (chip, kind) = dtype(f.kind).bytes, _chip(f, at, False)
    box, narrow = gcd(f.image[2], _STEP), f.image[2] % _STEP != 0  # boxes of TMA are 64 channels wide in wider tiles
    if chip.kind != "wgmma" or kind != "half" or narrow:
        t = choose_tile(chip, TileProblem(f.features, f.columns, rows, 1, kind, 8 * size, 32, a_k=False, may_split=False))
        t = replace(t, bn=box if narrow and box >= 16 else t.bn, stages=1 << t.stages.bit_length() - 1)
        tiles = ceil(f.features / t.bm) * ceil(f.columns / t.bn)
        return f._replace(tile=t, splits=1 if chip.kind == "cpu" else max(1, min(chip.sms // tiles, rows // (4 * t.bk))))
    bm, found = 64 if f.features <= 64 else 128, []
    for bn in (64, 128, 192, 256):
        tiles, step = ceil(f.features / bm) * ceil(f.columns / bn), max(bm * bn / 32, (bm + bn) * 128 / _LOADED)
        for splits in range(1, min(chip.sms, max(1, rows // (4 * _STEP))) + 1):
            waves = ceil(tiles * splits / chip.sms)
            cycles = waves * ceil(rows / (_STEP * splits)) * step + splits * f.features * f.columns * 8 / _SUMMED
            found.append((cycles, splits, bn))
    _, splits, bn = min(found)
    return f._replace(tile=Tile(bm, bn, _STEP, 8 if bm + bn <= 192 else 4, 2 * bm), splits=splits)


def _results(x: Any, weight: Any, stride: list[int], padding: list[int], dilation: list[int], target: str | None) -> Results:
    f = _form(x, weight, stride, padding, dilation)
    return (((x.shape[0], *f.out, f.features), f.kind),)


def _matrix(f: ConvForm, weight: Any) -> Any:
    return contiguous(weight).reshape(f.features, f.columns)


@lru_cache(maxsize=4096)
def in_blocks(f: ConvForm, at: Place) -> tuple[ConvForm, Blocks, Blocks] | None:
    """The form over blocks of pixels, and the blocks of images and weights, where TMA can load these and not the pixels."""
    if f.image[2] % CHANNELS == 0 or _chip(f, at, True)[0].kind != "wgmma" or TYPES[f.kind][0] != "half" or max(f.dilation) > 1:
        return None
    images, weights, pads = blocks_of(f.image, f.kernel, f.stride, f.pad, f.kind)
    return f._replace(image=images.shape, kernel=weights.grid, stride=(1, 1), pad=tuple(p for p, _ in pads),
                      behind=tuple(q - p for p, q in pads)), images, weights


def _gathered(at: Place, b: Blocks, x: Any) -> Any:
    """Images of blocks."""
    y = empty(x, (x.shape[0], *b.shape), b.kind)
    at.kernel(gather_blocks, b)(contiguous(x), y)
    return y


def _run(x: Any, weight: Any, stride: list[int], padding: list[int], dilation: list[int], target: str | None, y: Any) -> None:
    f, at = _form(x, weight, stride, padding, dilation), running_on(x, target)
    if not f.reaches:
        y[...] = 0
    elif 0 not in y.shape:
        if found := in_blocks(f, at):
            f, *blocks = found
            x, weight = (_gathered(at, b, t) for b, t in zip(blocks, (x, weight)))
        f = tiled(f, at, power(x.shape[0]) * f.out[0] * f.out[1])
        w, pixels = _matrix(f, weight), f.out[0] * f.out[1]
        in_chunks(_in_splits(f, at, convolution, w, (pixels, f.features)), _images(f, f.out), contiguous(x), y)


def _in_splits(f: ConvForm, at: Place, program: Any, w: Any, result: tuple[int, int]) -> Any:
    """The call (input, output) of a kernel with weights, whose splits, if there are any, have a workspace.  result: rows of an
    image, and columns."""
    if f.splits == 1:
        kernel = at.kernel(program, f, cluster=f.tile.cluster or None)
        return lambda x, y: kernel(x, w, y)
    kernel = at.kernel(program, f, **SPLIT)
    return lambda x, y: kernel(x, w, empty(x, (f.splits, x.shape[0] * result[0], result[1]), f.acc), y)


def _images(f: ConvForm, size: tuple[int, int]) -> int:
    """The most images of a launch, whose tiles of pixels stand along y of the grid."""
    return max(1, MAX_GRID[1] * f.tile.bm // (size[0] * size[1]))


def _gradient_results(x: Any, weight: Any, needs: list[bool], *others: Any) -> Results:
    return tuple((tuple(t.shape) if need else (0,), type_name(x)) for t, need in zip((x, weight), needs))


def _gradient(x: Any, weight: Any, needs: list[bool], stride: list[int], padding: list[int], dilation: list[int],
              target: str | None, dy: Any) -> tuple[Any, ...]:
    f, at, dy = _form(x, weight, stride, padding, dilation), running_on(x, target), contiguous(dy)
    dx, dw = (empty(x, tuple(t.shape) if need else (0,), f.kind) for t, need in zip((x, weight), needs))
    rows = x.shape[0] * f.out[0] * f.out[1]
    if not rows or not f.features or not f.reaches:
        for t in (dx, dw):
            t[...] = 0
        return dx, dw
    if needs[0]:
        g, w, images, to = f, weight, None, dx
        if (found := in_blocks(f, at)) and f.image[2] % 2:  # others are stored by words as they lie
            g, images, weights = found
            w, to = _gathered(at, weights, weight), empty(x, (x.shape[0], *images.shape), f.kind)
        g = tiled(g, at, power(x.shape[0]) * f.out[0] * f.out[1], True)
        if g.splits > 1 and g.image[2] * dtype(g.kind).bytes % 16:  # TMA loads whole 16 bytes of a tap; a copy takes 3 us
            w = padded(w, -g.image[2] % (16 // dtype(g.kind).bytes))
            g = g._replace(tap=int(w.shape[3]))
        call = _in_splits(g, at, image_gradient, contiguous(w).reshape(g.features, -1), (g.image[0] * g.image[1], g.image[2]))
        in_chunks(call, _images(g, g.image[:2]), dy, to)
        if images is not None:
            in_chunks(at.kernel(scatter_blocks, images), MAX_GRID[1] // f.image[0], to, dx)
    if needs[1]:
        whole, found = dw, in_blocks(f, at)
        if found:
            f, images, weights = found
            x, dw = _gathered(at, images, x), empty(x, (f.features, *weights.shape), f.kind)
        g = tiled_for_weights(f, at, power(x.shape[0]) * f.out[0] * f.out[1])
        partial = empty(x, (g.splits, f.features, f.columns), f.acc)
        steps = ceil(rows / (g.tile.bk * g.splits))
        kernel = at.kernel(weight_gradient, g, **SPLIT)
        kernel(contiguous(x), dy, steps, partial, dw.reshape(f.features, f.columns))
        if found:
            at.kernel(scatter_blocks, weights)(dw, whole)
        dw = whole
    return dx, dw


CONV2D = Function(
    "conv2d", Step("Tensor x, Tensor weight, int[] stride, int[] padding, int[] dilation, str? target", _results, _run),
    Step("Tensor x, Tensor weight, bool[] needs, int[] stride, int[] padding, int[] dilation, str? target, Tensor dy",
         _gradient_results, _gradient, 2, owns=True),
    lambda needs, given, made: (*given[:2], list(needs[:2]), *given[2:]), (0, 1))


# ---- kernels ----------------------------------------------------------------------------------------------------------

_ADDED_UP = 16, 64  # elements of a block that adds up partial sums


class ConvForm(NamedTuple):
    """What a kernel is compiled for, for any number of images.

    image: height, width and channels.  features: of the result.  kernel, stride, dilation, pad: for height and width.
    behind: pixels that the padding behind the image has more than that before it.  kind, acc: element types.  splits: of the
    pixels, for the gradient of weights, of the columns of weights for others.  mixed: tiles of all classes of the gradient
    of images that run at a time; 0 for one class after another.  tap: columns of a tap of the weights, for the gradient of
    images; 0 for the channels.
    """

    image: tuple[int, int, int]
    features: int
    kernel: tuple[int, int]
    stride: tuple[int, int]
    dilation: tuple[int, int]
    pad: tuple[int, int]
    kind: str
    acc: str
    tile: Tile
    splits: int = 1
    mixed: int = 0
    behind: tuple[int, int] = (0, 0)
    tap: int = 0

    @property
    def out(self) -> tuple[int, int]:
        """Height and width of the result."""
        h, w = ((self.image[d] + 2 * self.pad[d] + self.behind[d] - self.dilation[d] * (self.kernel[d] - 1) - 1)
                // self.stride[d] + 1 for d in (0, 1))
        return h, w

    @property
    def reaches(self) -> bool:
        """Whether any window has a pixel that is not padding."""
        return all(any(0 <= at * self.stride[d] + tap * self.dilation[d] - self.pad[d] < self.image[d]
                       for at in range(self.out[d]) for tap in range(self.kernel[d])) for d in (0, 1))

    @property
    def around(self) -> Any:
        """The padding as T.im2col takes it."""
        return tuple((p, p + more) for p, more in zip(self.pad, self.behind)) if any(self.behind) else self.pad

    @property
    def columns(self) -> int:
        """Of the weights as a matrix."""
        return self.kernel[0] * self.kernel[1] * self.image[2]

    @property
    def taps(self) -> Any:
        """The weights whose taps have `tap` columns."""
        return T.Tensor((self.features, self.kernel[0] * self.kernel[1] * (self.tap or self.image[2])), self.kind)

    def x(self, n: Any) -> Any:
        return T.Tensor((n, *self.image), self.kind)

    @property
    def w(self) -> Any:
        return T.Tensor((self.features, self.columns), self.kind)

    def y(self, n: Any) -> Any:
        return T.Tensor((n, *self.out, self.features), self.kind)


@T.macro
def add_up(P, Rows, bx, by):
    """Store a tile of the sum of partial sums, in order."""
    T.pdl_sync()
    down, across = _ADDED_UP
    total = T.alloc_fragment(_ADDED_UP, P.dtype)
    T.clear(total)
    for s in T.serial(P.shape[0]):
        for i, j in T.Parallel(down, across):
            total[i, j] += P[s, by * down + i, bx * across + j]
    T.copy(total, Rows[by * down, bx * across])


def convolution(f: ConvForm) -> Any:
    """The kernel (X, W, Y), or with splits (X, W, P, Y).  P: partial sums of the splits."""
    t, n = f.tile, T.dynamic("n")
    pixels, each = f.out[0] * f.out[1], f.columns // t.bk // f.splits
    down, across = _ADDED_UP

    @T.prim_func
    def divided_convolution(X: f.x(n), W: f.w, P: T.Tensor((f.splits, n * pixels, f.features), f.acc), Y: f.y(n)):
        Rows = T.reshape(Y, (n * pixels, f.features))
        with T.Kernel(T.ceildiv(f.features, t.bn), T.ceildiv(n * pixels, t.bm), f.splits, threads=t.threads) as (bx, by, bz):
            Xs, Ws = T.alloc_shared((t.bm, t.bk), f.kind), T.alloc_shared((t.bn, t.bk), f.kind)
            acc = T.alloc_fragment((t.bm, t.bn), f.acc)
            T.clear(acc)
            for k in T.Pipelined(each, num_stages=t.stages):
                T.im2col(X, Xs, by, bz * each + k, f.kernel, f.stride, f.dilation, f.around)
                T.copy(W[bx * t.bn, (bz * each + k) * t.bk], Ws)
                T.gemm(Xs, Ws, acc, transpose_B=True)
            T.copy(acc, P[bz, by * t.bm, bx * t.bn])
        with T.Kernel(T.ceildiv(f.features, across), T.ceildiv(n * pixels, down), threads=256) as (bx, by):
            add_up(P, Rows, bx, by)

    if f.splits > 1:
        return divided_convolution

    @T.prim_func
    def convolution(X: f.x(n), W: f.w, Y: f.y(n)):
        Rows = T.reshape(Y, (n * pixels, f.features))
        with T.Kernel(T.ceildiv(f.features, t.bn), T.ceildiv(n * pixels, t.bm), threads=t.threads) as (bx, by):
            Xs, Ws = T.alloc_shared((t.bm, t.bk), f.kind), T.alloc_shared((t.bn, t.bk), f.kind)
            acc = T.alloc_fragment((t.bm, t.bn), f.acc)
            T.use_swizzle(t.panel_size, order=t.order)
            T.clear(acc)
            for k in T.Pipelined(ceil(f.columns / t.bk), num_stages=t.stages):
                T.im2col(X, Xs, by, k, f.kernel, f.stride, f.dilation, f.around)
                T.copy(W[bx * t.bn, k * t.bk], Ws)
                T.gemm(Xs, Ws, acc, transpose_B=True)
            T.copy(acc, Rows[by * t.bm, bx * t.bn])

    return convolution


class Classes(NamedTuple):
    """The classes of an image's pixels along one dimension.

    Class a has the pixels a, a + s, …, and taps[a] pairs: the tap of the weights, and its place in a window of `size` elements
    of dY, whose first one for the class's first pixel is `low`.  rows: pixels of a class at most.
    """

    taps: tuple[tuple[tuple[int, int], ...], ...]
    low: int
    size: int
    rows: int

    @staticmethod
    def of(f: ConvForm, d: int) -> Classes:
        s, each = f.stride[d], f.dilation[d]
        taps = [[(tap, (a + f.pad[d] - tap * each) // s) for tap in range(f.kernel[d]) if (a + f.pad[d] - tap * each) % s == 0]
                for a in range(min(s, f.image[d]))]
        places = [at for pairs in taps for _, at in pairs]
        low = min(places)
        return Classes(tuple(tuple((tap, at - low) for tap, at in pairs) for pairs in taps), low, max(places) - low + 1,
                       ceil(f.image[d] / s))

    def pad(self, out: int) -> tuple[int, int]:
        """Around dY, so that it has a window for each pixel."""
        return -self.low, self.rows - out + self.low + self.size - 1

    def count(self, a: Any) -> Any:
        return chosen([len(pairs) for pairs in self.taps], a)

    def at(self, a: Any, nth: Any, place: bool) -> Any:
        """The nth tap of class a, or its place in the window."""
        most = max(map(len, self.taps))
        return chosen([chosen([pairs[min(k, len(pairs) - 1)][place] if pairs else 0 for k in range(most)], nth)
                       for pairs in self.taps], a)


def _rows_of_groups(t: Tile, vector: int) -> Any:
    """Iterations over a tile in which each warp group has the rows of its accumulator, so that groups do not wait for each
    other; None where a group has no whole ones.  vector: elements of an access."""
    groups, words = t.threads // 128, t.bn // vector
    if t.threads % 128 or t.bn % vector or t.bm % (64 * groups) or 64 * words % 128 or words & (words - 1):
        return None  # what is no power of two makes no sums of digits of i and of j
    each = t.bm // groups

    def place(i: Any, j: Any) -> tuple[Any, Any]:
        at = i % each * words + j // vector
        return i // each * 128 + at % 128, at // 128 * vector + j % vector

    return T.Fragment((t.bm, t.bn), forward_fn=place)


def mixed_place(x: Any, classes: int, each: int, columns: int) -> tuple[Any, Any, Any]:
    """Column, row and class of tile x, of `each` tiles of every class in a wave."""
    wave, place = x // (each * classes), x % (each * classes)
    nth = wave * each + place // classes
    return nth % columns, nth // columns, (place + wave) % classes


def image_gradient(f: ConvForm) -> Any:
    """The kernel (dY, W, dX), or with splits that of divided_image_gradient.

    With f.mixed, tiles of all classes run at the same time: those of few taps store while those of many multiply, and the
    pixels of neighbouring classes lie side by side.  From wave to wave, a block gets a tile of another class.
    """
    if f.splits > 1:
        return divided_image_gradient(f)
    t, n, (height, width, channels) = f.tile, T.dynamic("n"), f.image
    down, across = Classes.of(f, 0), Classes.of(f, 1)
    pixels, whole = down.rows * across.rows, f.features % t.bk == 0
    steps, kinds, each_tap = f.features // t.bk, len(across.taps), f.tap or channels
    classes = len(down.taps) * kinds
    pads = down.pad(f.out[0]), across.pad(f.out[1])
    layout = _rows_of_groups(t, 16 // dtype(f.kind).bytes)
    columns, rows, each = ceil(channels / t.bn), T.ceildiv(n * pixels, t.bm), f.mixed // classes  # tiles; of a class in a wave

    @T.prim_func
    def convolution_image_gradient(dY: f.y(n), W: f.taps, dX: f.x(n)):
        Rows = T.reshape(dX, (n * height * width, channels))
        grid = (T.ceildiv(rows * columns, each) * each * classes, 1, 1) if each else (columns, rows, classes)
        with T.Kernel(*grid, threads=t.threads) as (x, y, z):
            bx, by, bz = mixed_place(x, classes, each, columns) if each else (x, y, z)
            Ys, Ws = T.alloc_shared((t.bm, t.bk), f.kind), T.alloc_shared((t.bk, t.bn), f.kind)
            acc, Xs = T.alloc_fragment((t.bm, t.bn), f.acc), T.alloc_shared((t.bm, t.bn), f.kind)
            a, b = (classes - 1 - bz) // kinds, (classes - 1 - bz) % kinds  # the last ones have the most taps
            wide = across.count(b)
            T.clear(acc)
            if whole:
                taps = down.count(a) * wide
                for k in T.Pipelined((T.if_then_else(by < rows, taps, 0) if each else taps) * steps, num_stages=t.stages):
                    i, j, at = k // steps // wide, k // steps % wide, k % steps
                    T.im2col(dY, Ys, by, (down.at(a, i, True) * across.size + across.at(b, j, True)) * steps + at,
                             (down.size, across.size), 1, 1, pads)
                    T.copy(W[at * t.bk, (down.at(a, i, False) * f.kernel[1] + across.at(b, j, False)) * each_tap + bx * t.bn],
                           Ws)
                    T.gemm(Ys, Ws, acc)
            else:
                for k in T.Pipelined(T.ceildiv(down.count(a) * wide * f.features, t.bk), num_stages=t.stages):
                    for i, j in T.Parallel(t.bm, t.bk):
                        pixel, e = by * t.bm + i, k * t.bk + j
                        nth = e // f.features
                        h = pixel % pixels // across.rows + down.low + down.at(a, nth // wide, True)
                        w = pixel % across.rows + across.low + across.at(b, nth % wide, True)
                        there = (e < down.count(a) * wide * f.features) & (pixel < n * pixels) & (h >= 0) & (h < f.out[0]) & (
                            w >= 0) & (w < f.out[1])
                        Ys[i, j] = T.if_then_else(there, dY[pixel // pixels, h, w, e % f.features], T.cast(0, f.kind))
                    for i, j in T.Parallel(t.bk, t.bn):
                        e = k * t.bk + i
                        nth, column = e // f.features, bx * t.bn + j
                        tap = down.at(a, nth // wide, False) * f.kernel[1] + across.at(b, nth % wide, False)
                        Ws[i, j] = T.if_then_else((e < down.count(a) * wide * f.features) & (column < channels),
                                                  W[e % f.features, tap * each_tap + column], T.cast(0, f.kind))
                    T.gemm(Ys, Ws, acc)
            if classes == 1:
                T.copy(acc, Rows[by * t.bm, bx * t.bn])
            else:
                T.copy(acc, Xs)
                for i, j in T.Parallel(t.bm, t.bn, loop_layout=layout):
                    pixel = by * t.bm + i
                    h, w = pixel % pixels // across.rows * f.stride[0] + a, pixel % across.rows * f.stride[1] + b
                    if pixel < n * pixels and h < height and w < width and bx * t.bn + j < channels:
                        dX[pixel // pixels, h, w, bx * t.bn + j] = Xs[i, j]

    return convolution_image_gradient


def divided_image_gradient(f: ConvForm) -> Any:
    """The kernels (dY, W, P, dX) for images of one class of pixels.  P: partial sums of the splits of the taps' features."""
    t, n, (height, width, channels) = f.tile, T.dynamic("n"), f.image
    down, across = Classes.of(f, 0), Classes.of(f, 1)
    pixels, wide, steps = down.rows * across.rows, across.count(0), f.features // t.bk
    divided, pads = down.count(0) * wide * steps // f.splits, (down.pad(f.out[0]), across.pad(f.out[1]))

    @T.prim_func
    def divided_image_gradient(dY: f.y(n), W: f.taps, P: T.Tensor((f.splits, n * pixels, channels), f.acc), dX: f.x(n)):
        Rows = T.reshape(dX, (n * height * width, channels))
        with T.Kernel(ceil(channels / t.bn), T.ceildiv(n * pixels, t.bm), f.splits, threads=t.threads) as (bx, by, bz):
            Ys, Ws = T.alloc_shared((t.bm, t.bk), f.kind), T.alloc_shared((t.bk, t.bn), f.kind)
            acc = T.alloc_fragment((t.bm, t.bn), f.acc)
            T.clear(acc)
            for s in T.Pipelined(divided, num_stages=t.stages):
                k = bz * divided + s
                i, j, at = k // steps // wide, k // steps % wide, k % steps
                T.im2col(dY, Ys, by, (down.at(0, i, True) * across.size + across.at(0, j, True)) * steps + at,
                         (down.size, across.size), 1, 1, pads)
                T.copy(W[at * t.bk, (down.at(0, i, False) * f.kernel[1] + across.at(0, j, False)) * (f.tap or channels) +
                         bx * t.bn], Ws)
                T.gemm(Ys, Ws, acc)
            T.copy(acc, P[bz, by * t.bm, bx * t.bn])
        with T.Kernel(T.ceildiv(channels, _ADDED_UP[1]), T.ceildiv(n * pixels, _ADDED_UP[0]), threads=256) as (bx, by):
            add_up(P, Rows, bx, by)

    return divided_image_gradient


def weight_gradient(f: ConvForm) -> Any:
    """The kernel (X, dY, steps, P, dW).

    steps: of t.bk pixels in a split.  P: (splits, features, columns), workspace of partial sums, added up in order.
    """
    t, n, pixels = f.tile, T.dynamic("n"), f.out[0] * f.out[1]
    down, across = _ADDED_UP

    @T.prim_func
    def convolution_weight_gradient(X: f.x(n), dY: f.y(n), steps: T.int32,
                                    P: T.Tensor((f.splits, f.features, f.columns), f.acc), dW: f.w):
        Rows = T.reshape(dY, (n * pixels, f.features))
        with T.Kernel(T.ceildiv(f.columns, t.bn), T.ceildiv(f.features, t.bm), f.splits, threads=t.threads) as (bx, by, bz):
            Ys, Xs = T.alloc_shared((t.bk, t.bm), f.kind), T.alloc_shared((t.bk, t.bn), f.kind)
            acc = T.alloc_fragment((t.bm, t.bn), f.acc)
            T.clear(acc)
            for k in T.Pipelined(steps, num_stages=t.stages):
                T.copy(Rows[(bz * steps + k) * t.bk, by * t.bm], Ys)
                T.im2col(X, Xs, bz * steps + k, bx, f.kernel, f.stride, f.dilation, f.around)
                T.gemm(Ys, Xs, acc, transpose_A=True)
            T.copy(acc, P[bz, by * t.bm, bx * t.bn])
        with T.Kernel(T.ceildiv(f.columns, across), T.ceildiv(f.features, down), threads=256) as (bx, by):
            add_up(P, dW, bx, by)

    return convolution_weight_gradient
