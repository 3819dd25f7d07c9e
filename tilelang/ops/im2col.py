"""T.im2col: tiles of a matrix whose rows are the pixels that a convolution computes and whose columns are (kh, kw, c).

The matrix is a buffer in the memory of an NHWC image with the fact `im2col`: T.copy of its tiles is TMA's im2col mode where
target and sizes permit it, and a loop over elements of the image otherwise.  Elements outside image and matrix are zero.
Source: PTX ISA, "cp.async.bulk.tensor", im2col mode.
"""

from __future__ import annotations

from typing import Any

from tilelang.ir import (Bind, Buffer, Func, Parallel, Stmt, Store, Var, cast, convert, fresh, load, logical, rewrite, select,
                         seq)
from tilelang.target.im2col import Im2col

from .copy import Copy


def view(image: Buffer, m: Im2col) -> Buffer:
    """The im2col matrix of an image of static height, width and channels."""
    (height, width), (kh, kw) = m.out, m.kernel
    return Buffer(f"{image.name}_im2col", (image.shape[0] * (height * width), kh * kw * m.image[2]), image.dtype,
                  data=image.data, facts=image.facts.having(im2col=m.entry), span=image.span)


def by_elements(op: Copy, image: Buffer, m: Im2col) -> Stmt:
    """A loop that copies the tile of an op from the image."""
    (height, width, channels), (out_h, out_w), span = m.image, m.out, op.span
    r, c = fresh("i"), fresh("j")
    binds: list[Stmt] = []

    def let(name: str, e: Any) -> Any:
        v = Var(name, convert(e).dtype, span=span)
        binds.append(Bind(v, convert(e), span=span))
        return v

    pixel, entry = (let(n, first + i) for n, first, i in zip(("pixel", "entry"), op.src.mins, (r, c)))
    n, place = let("n", pixel // (out_h * out_w)), let("place", pixel % (out_h * out_w))
    tap, channel = let("tap", entry // channels), let("channel", entry % channels)
    h, w = (let(name, at * m.stride[d] + way * m.dilation[d] - -m.low[d]) for d, (name, at, way) in enumerate((
        ("h", place // out_w, tap // m.kernel[1]), ("w", place % out_w, tap % m.kernel[1]))))
    inside: Any = entry < m.kernel[0] * m.kernel[1] * channels
    for test in (h >= 0, h < height, w >= 0, w < width, n < image.shape[0]):
        inside = logical("and", inside, test)
    value = select(inside, load(image, (n, h, w, channel)), cast(0, image.dtype))
    rows, columns = op.dst.extents[-2:]
    binds.append(Store(op.dst.buffer, op.dst.at(r, c), value, span=span))
    return Parallel((r, c), (convert(rows), convert(columns)), seq(*binds), span=span)


def without(func: Func, keep: Any = lambda op: False) -> Func:
    """The function with the copies of im2col matrices as loops over elements, except those of which keep(copy) is true."""
    given = {p.data: p for p in func.params if isinstance(p, Buffer)}

    def fn(op: Copy) -> Stmt | None:
        m = Im2col.of(op.src.buffer)
        if m is None or keep(op):
            return None
        b = op.src.buffer
        image = Buffer(b.name.removesuffix("_im2col"), (b.shape[0] // (m.out[0] * m.out[1]), *m.image), b.dtype, data=b.data,
                       facts=b.facts.having(im2col=None), span=b.span)
        return by_elements(op, given.get(b.data, image), m)

    return rewrite(func, fn, Copy)  # type: ignore[no-any-return]
