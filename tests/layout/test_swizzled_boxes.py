"""Panel layouts against the published swizzle formula, written out again here, and what descriptors read of them."""

import numpy as np
import pytest

from tilelang.ir import dtype
from tilelang.layout import Layout, SwizzledBoxes, linear_layout, swizzled_box_layout, boxes_of, swizzled_layout
from tilelang.layout.swizzled_boxes import box_width
from tilelang.target.wgmma import decode_descriptor, encode_descriptor, operand_addresses


def published(rows, column_bytes, width):
    """Byte offset of byte column c of row r of a tile: panels of `width` bytes, 16-byte chunks xored with the row."""
    r, c = np.arange(rows)[:, None], np.arange(column_bytes)[None, :]
    y = r * width + c % width
    return c // width * (rows * width) + (y ^ ((y >> 7 & width // 16 - 1) << 4))


@pytest.mark.parametrize("width", [16, 32, 64, 128])
@pytest.mark.parametrize("dt, rows, columns", [("float16", 64, 128), ("float32", 8, 64), ("int8", 24, 256)])
def test_layout_is_the_published_formula(dt, rows, columns, width):
    size = dtype(dt).bytes
    layout = swizzled_box_layout((rows, columns), dt, width)
    assert np.array_equal(layout.table() * size, published(rows, columns * size, width)[:, ::size])
    p = boxes_of(layout, dt)
    assert p == SwizzledBoxes(rows, columns, 8 * size, width) and p.bytes == layout.size * size
    assert layout.swizzle.bytes == width and p.swizzle == (0 if width == 16 else width)


def test_versions_stand_one_after_another_at_aligned_places():
    layout = swizzled_box_layout((3, 8, 64), "float16", 128)
    p = boxes_of(layout, "float16")
    assert p.bytes == 1024 and p.align == 1024
    assert np.array_equal(layout.table()[2], layout.table()[0] + 2 * 512)


def test_boxes_write_each_panel_once():
    p = SwizzledBoxes(320, 128, 16, 128)
    boxes = p.boxes()
    assert [(b.row, b.column, b.rows, b.columns) for b in boxes] == [
        (0, 0, 256, 64), (256, 0, 64, 64), (0, 64, 256, 64), (256, 64, 64, 64)]
    table = swizzled_box_layout((320, 128), 16, 128).table() * 2
    assert all(b.offset == table[b.row, b.column] for b in boxes)
    assert p.transaction_bytes == 320 * 128 * 2 == p.bytes
    narrow = SwizzledBoxes(16, 24, 16, 64)  # rows of 48 bytes stand 64 bytes apart, the box counts 48
    assert narrow.bytes == 1024 and narrow.transaction_bytes == 768


def test_which_layouts_have_panels():
    assert boxes_of(swizzled_layout((16, 64), 16), 16) == SwizzledBoxes(16, 64, 16, 128)
    assert boxes_of(swizzled_layout((16, 128), 16), 16) is None
    assert boxes_of(linear_layout((16, 64)), 16) is None
    assert boxes_of(Layout((4, 8), lambda i, j: (j, i)), 16) is None
    assert boxes_of(swizzled_box_layout((12, 128), 16, 128), 16) is None  # else the second box's rows were permuted
    assert boxes_of(swizzled_box_layout((12, 64), 16, 128), 16) is not None
    assert [box_width(c, 16) for c in (64, 96, 48, 24, 20)] == [128, 64, 32, 16, 0]
    for width, columns in ((128, 60), (48, 64)):
        with pytest.raises(ValueError):
            swizzled_box_layout((8, columns), 16, width)


@pytest.mark.parametrize("width", [16, 32, 64, 128])
@pytest.mark.parametrize("dt, n, start", [("float16", 64, 64), ("int8", 96, 8), ("float32", 256, 0), ("bfloat16", 8, 0)])
def test_k_major_descriptors_read_their_rows(dt, n, start, width):
    """A tile of K = 256 bytes a row: every k-step of rows start .. start + n."""
    size = dtype(dt).bytes
    rows, columns = start + n, 256 // size
    layout = swizzled_box_layout((2, rows, columns), dt, width)
    p, table = boxes_of(layout, dt), layout.table() * size
    d, base = p.descriptor("k"), 4096 + p.bytes  # the second version
    assert p.bytes % p.align == 0
    step = 32 // size
    for k in range(0, columns, step):
        word = encode_descriptor(base + p.offset("k", start, k), d.lbo, d.sbo, d.swizzle)
        got = operand_addresses(word, "k", n, size)
        assert np.array_equal(got, 4096 + table[1, start:, k:k + step])


@pytest.mark.parametrize("width", [16, 32, 64, 128])
@pytest.mark.parametrize("extent, start", [(64, 0), (128, 64), (192, 0), (8, 0)])
def test_mn_major_descriptors_read_their_columns(extent, start, width):
    """A tile of K rows: columns start .. start + extent are M or N."""
    columns = -(-(start + extent) * 2 // width) * width // 2
    layout = swizzled_box_layout((64, columns), "float16", width)
    p, table = boxes_of(layout, "float16"), layout.table() * 2
    d = p.descriptor("mn")
    for k in range(0, 64, 16):
        word = encode_descriptor(2048 + p.offset("mn", start, k), d.lbo, d.sbo, d.swizzle)
        got = operand_addresses(word, "mn", extent, 2)
        assert np.array_equal(got, 2048 + table[k:k + 16, start:start + extent].T)


def test_offsets_of_expressions_are_those_of_numbers():
    from tilelang.ir import Var
    from tilelang.ir.evaluate import evaluate

    k, m = Var("k", dtype("int32")), Var("m", dtype("int32"))
    for p in (SwizzledBoxes(64, 256, 16, 128), SwizzledBoxes(64, 64, 16, 128), SwizzledBoxes(64, 64, 16, 16)):
        for major in ("k", "mn"):
            e = p.offset(major, m, k)
            for mv, kv in ((0, 0), (0, 16), (64, 48)):
                assert int(evaluate(e, {k: kv, m: mv})) == p.offset(major, mv, kv)


def test_descriptor_fields():
    assert encode_descriptor(0x1000400, 16, 1024, 128) == (0x400 >> 4) | 1 << 16 | 64 << 32 | 1 << 62
    assert decode_descriptor(encode_descriptor(8192, 8192, 512, 64)) == (8192, 8192, 512, 64)
    assert encode_descriptor(0, 0, 0, 32) >> 62 == 3 and encode_descriptor(0, 0, 0, 0) >> 62 == 0
