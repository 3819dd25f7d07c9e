"""Laws of shared layouts, by brute force."""

import numpy as np
import pytest

import tilelang.language as T
from tilelang.ir import Alloc, Buffer, Func, Launch, Var, const, dtype, is_const, parse, to_text, LaunchPlan
import tilelang.layout as layouts
from tilelang.layout import (
    Layout,
    SwizzleMode,
    bank_conflicts,
    linear_layout,
    make_full_bank_swizzled_layout,
    make_linear_layout,
    make_swizzled_layout,
    padded_layout,
    swizzled_box_layout,
    row_fragment,
    swizzled_layout,
)
from tilelang.layout.mode import evaluate_index

I32 = dtype("int32")


def rows_of_chunks(rows, bits):
    """What one ldmatrix phase touches: 8 rows, one 16-byte chunk."""
    return lambda r0, c: np.array([(r0 + r, c * 128 // bits) for r in range(8)])


@pytest.mark.parametrize("bits", [8, 16, 32])
@pytest.mark.parametrize("cols_bytes", [16, 32, 48, 64, 80, 96, 128, 160, 192, 256, 384, 512])
def test_swizzle_is_a_bijection_free_of_conflicts(bits, cols_bytes):
    cols = cols_bytes * 8 // bits
    lay = swizzled_layout((32, cols), bits)
    table = lay.table()
    assert np.unique(table).size == table.size == lay.size
    access = rows_of_chunks(32, bits)
    for r0 in range(0, 32, 8):
        for c in range(cols_bytes // 16):
            assert bank_conflicts(table, access(r0, c), bits, 128 // bits) == 0
            start = table[r0, c * 128 // bits]
            assert start * bits % 128 == 0  # vectors stay aligned
            assert np.array_equal(table[r0, c * 128 // bits:(c + 1) * 128 // bits], start + np.arange(128 // bits))


def test_linear_layout_of_128_byte_rows_conflicts():
    table = linear_layout((32, 64)).table()
    assert bank_conflicts(table, rows_of_chunks(32, 16)(0, 0), 16, 8) == 7


@pytest.mark.parametrize("nbytes", [32, 64, 128])
def test_panels_follow_the_hardware_swizzle(nbytes):
    """PTX ISA: in a panel, byte address bits 4.. are XORed with bits 7.. (1, 2 or 3 of them)."""
    lay = swizzled_box_layout((16, 3 * nbytes // 2), 16, nbytes)
    mask = nbytes // 16 - 1
    for (i, j), at in np.ndenumerate(lay.table()):
        p, inside = divmod(j * 2, nbytes)
        plain = p * 16 * nbytes + i * nbytes + inside
        assert at * 2 == plain ^ (((plain >> 7) & mask) << 4)
    assert lay.swizzle.bytes == nbytes


def test_swizzle_of_a_whole_row_is_the_hardware_mode():
    assert np.array_equal(swizzled_layout((16, 64), 16).table(), swizzled_box_layout((16, 64), 16, 128).table())
    assert swizzled_layout((16, 64), 16).swizzle.bytes == 128 and swizzled_layout((16, 128), 16).swizzle.bytes == 0


def test_column_reads_of_single_elements():
    access = np.array([(lane, 5) for lane in range(32)])
    assert bank_conflicts(linear_layout((32, 32)).table(), access, 32) == 31
    assert bank_conflicts(padded_layout((32, 32), 1).table(), access, 32) == 0
    assert bank_conflicts(swizzled_layout((32, 32), 32, chunk_bytes=4).table(), access, 32) == 0


@pytest.mark.parametrize("lay", [swizzled_layout((2, 16, 24), 16), padded_layout((5, 7), 3),
                                 swizzled_box_layout((8, 128), 16, 128), Layout((4, 8), lambda i, j: (j, i)),
                                 linear_layout((7,))], ids=range(5))
def test_symbolic_offset_equals_table(lay):
    vs = [Var(f"i{d}", I32) for d in range(lay.ndim)]
    grid = dict(zip(vs, np.meshgrid(*[np.arange(n) for n in lay.shape], indexing="ij")))
    assert np.array_equal(np.broadcast_to(evaluate_index(lay.offset(vs), grid), lay.shape), lay.table())
    assert lay.offset([0] * lay.ndim) == 0 and lay.size > lay.table().max()


@pytest.mark.spec("L18:Layout")
def test_user_layout():
    lay = Layout((4, 4), lambda i, j: (j, i))
    assert repr(lay) == "Layout((4, 4) -> (4, 4), transform: (_i, _j) -> (_j, _i))"
    a, b = lay(1, 2)
    assert is_const(a, 2) and is_const(b, 1)
    assert lay.get_output_shape() == [4, 4] and lay.get_input_shape() == [4, 4]
    with pytest.raises(ValueError, match="layout-not-injective"):
        Layout((4, 4), lambda i, j: i)


@pytest.mark.spec("L18:Layout")
def test_inverse_and_reshape():
    lay = Layout((4, 8), lambda i, j: (j // 2, i, j % 2))
    back = lay.inverse()
    for at in np.ndindex(4, 8):
        place = np.unravel_index(lay.table()[at], lay.output_shape)
        assert back.table()[place] == at[0] * 8 + at[1]
    flat = lay.reshape((32,))
    assert np.array_equal(flat.table(), lay.table().reshape(-1))
    assert np.array_equal(lay.reshape((8, 4)).table(), lay.table().reshape(8, 4))
    wide = linear_layout((4, 8)).reshape((4, 16), rescale_num=2, rescale_den=1)
    assert wide.is_equal(linear_layout((4, 16)))
    with pytest.raises(ValueError, match="layout-invalid"):
        lay.reshape((5, 5))


@pytest.mark.spec("L18:Layout")
def test_repeat_and_expand():
    lay = swizzled_layout((8, 64), 16)
    rep = lay.repeat(0, 2)
    assert rep.shape == (16, 64) and np.array_equal(rep.table()[8:], lay.table() + lay.size)
    exp = lay.expand([3])
    assert exp.shape == (3, 8, 64) and np.array_equal(exp.table()[2], lay.table() + 2 * lay.size)
    for bad, err in (((0, 0), ValueError), ((5, 2), ValueError), ((0, "a"), TypeError)):
        with pytest.raises(err):
            lay.repeat(*bad)
    with pytest.raises(ValueError):
        lay.expand([0])
    for other in ("3", True, 3.0):
        with pytest.raises(TypeError):
            lay.expand(other)


def test_expand_by_an_integer_prepends_one_dimension():
    lay = swizzled_layout((8, 64), 16)
    assert lay.expand(3).is_equal(lay.expand([3]))
    rows = T.Fragment((8, 8), lambda i, j: (i * 4 + j // 2, j % 2))
    assert rows.expand(2).is_equal(rows.expand([2])) and rows.expand(2).shape == (2, 8, 8)


def test_constructors_take_buffers():
    buf = Buffer("S", (64, 64), dtype("float16"), "shared.dyn")
    assert make_swizzled_layout(buf) == swizzled_layout((64, 64), 16)
    wide = Buffer("S", (64, 128), dtype("float16"), "shared.dyn")
    assert make_swizzled_layout(wide) == swizzled_box_layout((64, 128), 16, 128)
    assert make_linear_layout(buf) == linear_layout((64, 64))
    assert make_full_bank_swizzled_layout(buf) == swizzled_box_layout((64, 64), 16, 128)
    odd = Buffer("S", (64, 63), dtype("float16"), "shared.dyn")
    with pytest.raises(ValueError, match="layout-invalid"):
        make_swizzled_layout(odd, allow_pad=False)
    assert make_swizzled_layout(odd).size == 64 * 64
    mode = SwizzleMode.SWIZZLE_128B
    assert mode.is_swizzle_128b() and mode.swizzle_byte_size() == 128 and mode.smem_alignment() == 1024
    assert [SwizzleMode(k).wgmma_layout_type() for k in range(4)] == [0, 3, 2, 1]


def test_drawing():
    assert str(Layout((2, 2), lambda i, j: (j, i))).splitlines() == [
        "Layout 2x2  4 elements", "  | 0 1", "--+----", "0 | 0 2", "1 | 1 3"]


@pytest.mark.parametrize("lay", [swizzled_layout((3, 32, 64), 16), padded_layout((5, 7), 3), linear_layout((7,)),
                                 Layout((4, 8), lambda i, j: (j, i)), swizzled_layout((16, 32), 16).expand([2]),
                                 row_fragment((7, 100), 96, 4), row_fragment((64, 32), 128, 8).reduce(1),
                                 row_fragment((64,), 128).reduce(0)], ids=range(8))
def test_text_reads_back(lay):
    tx = tuple(Var(n, I32) for n in ("tx", "ty", "tz"))
    buf = Buffer("S", lay.shape, dtype("float16"), "shared.dyn")
    launch = Launch((const(1),), (Var("bx", I32),), (32, 1, 1), tx, Alloc(buf), LaunchPlan(layouts=((buf, lay),)))
    func = Func("main", (), (), launch)
    again = parse(to_text(func))
    got = again.body.plan.layouts[0][1]
    assert got == lay and type(got) is type(lay) and getattr(got, "swizzle", None) == getattr(lay, "swizzle", None)
    assert to_text(again) == to_text(func)


@pytest.mark.parametrize("narrow, want", [("int8", lambda i: (i + 128) % 256), ("uint8", lambda i: i % 256),
                                          ("int4", lambda i: (i + 8) % 16)])
def test_narrow_numbers_in_a_layout_function_wrap(narrow, want):
    """The cast was taken for the number itself, so that the table was another than the places of the program."""
    half = {"int8": 128, "uint8": 0, "int4": 8}[narrow]
    lay = T.Layout((300,), lambda i: (i // 256, T.cast(T.cast(i, narrow), "int32") + half, i % 256 // 16))
    i = np.arange(300)
    size = [2, 16 if narrow == "int4" else 256, 16]
    np.testing.assert_array_equal(lay.table(), np.ravel_multi_index((i // 256, want(i), i % 256 // 16), size))


def test_narrow_arithmetic_in_a_layout_function_wraps():
    lay = T.Layout((16, 16), lambda i, j: T.cast(T.cast(i, "uint8") * T.cast(16, "uint8") + T.cast(j, "uint8"), "int32"))
    np.testing.assert_array_equal(lay.table(), np.arange(256).reshape(16, 16))
    shifted = T.Layout((64,), lambda i: T.cast(T.cast(i, "uint8") + T.cast(224, "uint8"), "int32"))
    np.testing.assert_array_equal(shifted.table(), (np.arange(64) + 224) % 256)


def test_float_numbers_in_a_layout_function_are_refused():
    """A fraction was cut from the factor, not from the product."""
    with pytest.raises(ValueError, match="integer arithmetic"):
        T.Layout((64,), lambda i: T.cast(T.cast(i, "float32") * 1.5, "int32")).table()


@pytest.mark.parametrize("name, nbytes", [("full", 128), ("half", 64), ("quarter", 32)])
def test_bank_swizzled_layouts_take_rows_columns_and_bits(name, nbytes):
    make = getattr(layouts, f"make_{name}_bank_swizzled_layout")
    want = swizzled_box_layout((32, 128), 16, nbytes)
    assert make(32, 128, 16) == want == make(stride=32, continuous=128, element_size=16)
    assert make(Buffer("S", (32, 128), dtype("float16"), "shared.dyn")) == want
    for wrong in ((32, 128), (32, 0, 16), ("a", 128, 16)):
        with pytest.raises(TypeError, match="a buffer, or rows, elements of a row and bits of an element"):
            make(*wrong)


def test_linear_layouts_take_extents():
    assert make_linear_layout(4, 8) == make_linear_layout((4, 8)) == linear_layout((4, 8))
    assert make_linear_layout(8) == linear_layout((8,)) == T.Layout(8, lambda i: i)


@pytest.mark.parametrize("of", [
    T.Layout((8, 8), lambda i, j: (i, j)), T.Fragment((8, 8), lambda i, j: (i * 4 + j // 2, j % 2))])
def test_extents_of_expand_are_positive_integers(of):
    assert of.expand((2, 3)).shape == (2, 3, 8, 8) and of.expand(2) == of.expand([2])
    for wrong, kind in ((0, ValueError), ([2, -1], ValueError), ("a", TypeError), (True, TypeError), ([True], TypeError)):
        with pytest.raises(kind, match="expand"):
            of.expand(wrong)
