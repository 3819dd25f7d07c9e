"""Pictures of layouts: titles, names of axes, legends; what notebooks show."""

import re
from xml.etree import ElementTree

import numpy as np
import pytest

import tilelang.language as T
from tilelang.jit.display import layouts_html
from tilelang.layout.picture import picture_of, svg_of
from tilelang.tools import plot_fragment_tv, plot_layout

FRAGMENT = T.Fragment((8, 8), lambda i, j: (i * 4 + j // 2, j % 2))
LAYOUT = T.Layout((2, 4, 8), lambda i, j, k: (i, k, j))


def words(svg):
    """The texts of an SVG picture, and its number of cells."""
    root = ElementTree.fromstring(svg)
    rows = {"#" + g.get("id"): sum(path.get("d").count("z") for path in g) for g in root.findall("{*}defs/{*}g")}
    return [e.text for e in root.findall(".//{*}text")], sum(rows[use.get("href")] for use in root.findall("{*}use"))


@pytest.mark.parametrize("layout, title, axes, legend", [
    (FRAGMENT, "acc: Fragment 8 x 8: 32 threads, 2 registers each", {"i", "j"},
     "T: thread, L: its register; a hue for every four threads"),
    (FRAGMENT.replicate(2), "acc: Fragment 8 x 8: 64 threads, 2 registers each, 2 copies", {"i", "j"}, "T: thread"),
    (LAYOUT, "acc: Layout 2 x 4 x 8: 64 places", {"i, j", "k"}, "number: place of the element; a hue for every four places")])
def test_pictures_had_no_title_axis_names_or_legend(layout, title, axes, legend):
    texts, cells = words(svg_of(picture_of(layout, "acc")))
    assert title in texts and axes <= set(texts) and any(t.startswith(legend) for t in texts) and cells == 64


def test_every_kind_of_picture_has_the_words(tmp_path, capsys):
    plot_layout(LAYOUT, str(tmp_path), "layout", formats="svg,pdf", view="output")
    plot_fragment_tv(FRAGMENT, str(tmp_path), "tv", formats="svg,pdf")
    for name, expected in (("layout", ("place % 8", "number: element at the place")), ("tv", ("thread", "register"))):
        assert set(expected) <= {re.sub("; a hue.*", "", t) for t in words((tmp_path / f"{name}.svg").read_text())[0]}
        pdf = (tmp_path / f"{name}.pdf").read_bytes()
        assert pdf.startswith(b"%PDF") and all(w.encode() in pdf for w in expected)


def test_notebooks_show_the_first_cells_of_a_large_layout():
    large = T.Layout((128, 128), lambda i, j: (j, i))
    texts, cells = words(large._repr_svg_())
    assert cells == 32 * 32 and "Layout 128 x 128: 16384 places (the first 32 x 32)" in texts
    assert words(FRAGMENT._repr_svg_())[1] == 64


def test_a_picture_of_a_gemm_took_megabytes():
    """Every cell was a rectangle and two texts, every stage of a pipeline a picture."""
    large = T.Fragment((128, 128), lambda i, j: (i % 64 * 2 + j // 2 % 2, i // 64 * 64 + j // 4 * 2 + j % 2))
    fragment = svg_of(picture_of(large))
    assert len(fragment) < 500_000 and words(fragment)[1] == 128 * 128
    assert "T1\u00a0" in fragment and words(fragment)[0][0].split()[:4] == ["T0", "T0", "T1", "T1"]


def test_equal_stages_and_equal_layouts_are_drawn_once():
    stages = T.Layout((3, 4, 8), lambda i, j, k: i * 32 + j * 8 + (k ^ j))
    texts, cells = words(svg_of(picture_of(stages, "A", one_stage=True)))
    assert cells == 32 and "A: Layout 3 x 4 x 8: 96 places, one of 3 equal stages, places + 32" in texts
    turned = T.Layout((2, 4, 8), lambda i, j, k: j * 16 + k * 2 + i)  # a stage is every other place
    assert "equal stages, places + 1" in svg_of(picture_of(turned, one_stage=True))
    unequal = T.Layout((2, 4, 8), lambda i, j, k: i * 32 + j * 8 + (k ^ i))
    assert words(svg_of(picture_of(unequal, one_stage=True)))[1] == 64
    page = layouts_html([("A", stages), ("F", FRAGMENT), ("B", stages)], None, "open")
    assert page.count("<svg") == 2 == page.count("<details open>") and "<summary>A, B: Layout(" in page


def test_labels_are_the_tables():
    p = picture_of(FRAGMENT)
    owners, registers = FRAGMENT.owners()[0], FRAGMENT.register_table()
    assert p.labels == [[[f"T{owners[i, j]}", f"L{registers[i, j]}"] for j in range(8)] for i in range(8)]
    shown = [[int(c[0]) for c in row] for row in picture_of(LAYOUT).labels]
    assert np.array_equal(np.reshape(shown, LAYOUT.shape), LAYOUT.table())
