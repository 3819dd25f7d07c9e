"""Tools (runtime 13): pictures of layouts, and counts of a program's work."""

import re
import sys
import xml.etree.ElementTree as xml
from types import SimpleNamespace

import pytest

import tilelang
import tilelang.language as T
from tilelang.carver.arch import CUDA
from tilelang.tools import Analyzer, plot_layout


def written(path):
    """The words of each text of a picture, in the order of the file: a row of the layout is one text."""
    return [(t.text or "").replace("\xa0", " ").split() for t in xml.parse(path).getroot().iter() if t.tag.endswith("text")]


def fills_of(path):
    return [x.get("fill") for x in xml.parse(path).getroot().iter() if x.tag.endswith("path") and x.get("fill")]


@pytest.mark.spec("R13:plot_layout")
def test_pictures_of_layouts_show_every_cell(tmp_path, capsys):
    layout = T.Layout((4, 8), lambda i, j: (j, i))
    plot_layout(layout, str(tmp_path), "swap", formats="svg, pdf")
    assert re.findall(r"Saved (\w+) format into", capsys.readouterr().out) == ["svg", "pdf"]
    texts = [x for row in written(tmp_path / "swap.svg")[:4] for x in row]
    assert texts == [str(j * 4 + i) for i in range(4) for j in range(8)]
    data = (tmp_path / "swap.pdf").read_bytes()
    assert data.startswith(b"%PDF-1.4") and data.endswith(b"%%EOF\n") and data.count(b" re B") == 32
    start = int(re.search(rb"startxref\n(\d+)", data).group(1))
    assert data[start:start + 4] == b"xref"
    for k, place in enumerate(re.findall(rb"(\d{10}) 00000 n", data), 1):
        assert data[int(place):].startswith(b"%d 0 obj" % k)
    plot_layout(layout, str(tmp_path), "inverse", formats="svg", view="output", verbose=True)
    texts = [x for row in written(tmp_path / "inverse.svg") for x in row]
    assert texts[:5] == ["0", "8", "16", "24", "1"] and "Layout" in capsys.readouterr().out


@pytest.mark.spec("R13:plot_layout")
def test_pictures_of_fragments_name_thread_and_register(tmp_path):
    fragment = T.Fragment((8, 8), forward_fn=lambda i, j: (i * 4 + j // 2, j % 2))
    plot_layout(fragment, str(tmp_path), formats="svg", colormap=lambda i, j, v: (1, 0, v / 32))
    rows = written(tmp_path / "layout.svg")[:16]  # a line of threads and a line of registers for each row
    assert rows[0][:3] == ["T0", "T0", "T1"] and rows[1][:3] == ["L0", "L1", "L0"]
    assert rows[14][-1] == "T31" and rows[15][-1] == "L1"
    assert fills_of(tmp_path / "layout.svg")[-1] == "#ff00f7"


@pytest.mark.spec("R13:plot_layout")
def test_what_cannot_be_drawn_is_refused(tmp_path):
    layout = T.Layout((4, 8), lambda i, j: (i, j))
    with pytest.raises(TypeError, match="a Layout or a Fragment"):
        plot_layout("layout", str(tmp_path))
    for bad in ({"formats": "gif"}, {"view": "side"}):
        with pytest.raises(ValueError):
            plot_layout(layout, str(tmp_path), **bad)
    try:
        plot_layout(layout, str(tmp_path), formats="png")
    except ImportError as e:
        assert "tilelang-py[vis]" in str(e)
    else:
        assert (tmp_path / "layout.png").read_bytes().startswith(b"\x89PNG")


def gemm(M, N, K, BM=128, BN=64, BK=32):
    @T.prim_func
    def main(A: T.Tensor((M, K), "float16"), B: T.Tensor((K, N), "float16"), C: T.Tensor((M, N), "float32")):
        with T.Kernel(T.ceildiv(N, BN), T.ceildiv(M, BM), threads=128) as (bx, by):
            As = T.alloc_shared((BM, BK), "float16")
            Bs = T.alloc_shared((BK, BN), "float16")
            Cf = T.alloc_fragment((BM, BN), "float32")
            T.clear(Cf)
            for k in T.Pipelined(K // BK, num_stages=2):
                T.copy(A[by * BM, k * BK], As)
                T.copy(B[k * BK, bx * BN], Bs)
                T.gemm(As, Bs, Cf)
            T.copy(Cf, C[by * BM, bx * BN])

    return main


@pytest.mark.spec("R13:Analyzer")
def test_work_and_traffic_of_a_product():
    M, N, K = 1024, 512, 256
    device = CUDA({"kind": "cuda", "arch": "sm_90"})
    r = Analyzer.analysis(gemm(M, N, K), device)
    blocks = (M // 128) * (N // 64)
    assert r.total_flops == 2 * M * N * K
    assert r.total_global_bytes == blocks * (K * (128 + 64) * 2 + 128 * 64 * 4)
    assert r.expected_bandwidth_GBps == device.bandwidth[1] / 1000 and r.expected_tflops == 989
    assert r.estimated_time == max(r.total_flops / 989e12, r.total_global_bytes / (device.bandwidth[1] * 1e6))
    with pytest.raises(ValueError, match="run-time extent"):
        Analyzer.analysis(gemm(T.dynamic("m"), N, K), device)
    assert tilelang.tools.Analyzer is Analyzer


@pytest.mark.spec("R13:Analyzer")
@pytest.mark.parametrize("arch,cap", [("sm_80", "80"), ("sm_86", "86"), ("sm_89", "89"), ("sm_90a", "90"), ("sm_75", "75")])
def test_facts_of_architectures(arch, cap):
    device = CUDA({"kind": "cuda", "arch": arch})
    assert device.compute_capability == cap and device.sm_version == int(cap) and device.platform == "CUDA"
    assert device.warp_size == 32 and device.reg_cap == 65536 and device.smem_cap >= 48 << 10 and len(device.bandwidth) == 2
    with pytest.raises(ValueError):
        CUDA("cpu")


def test_colour_maps_come_by_name(tmp_path, monkeypatch):
    """Of matplotlib, which a stand-in plays here: maps of 0..1 have N."""
    class Map:
        N = 256

        def __call__(self, x):
            return (x, 0.0, 1.0 - x, 1.0)

    layout = T.Layout((2, 2), lambda i, j: i * 2 + j)
    monkeypatch.setitem(sys.modules, "matplotlib", SimpleNamespace(colormaps={"blues": Map()}))
    for name in "blues", Map():
        plot_layout(layout, str(tmp_path), formats="svg", colormap=name)
        assert fills_of(tmp_path / "layout.svg") == ["#0000ff", "#5500aa", "#aa0055", "#ff0000"]
    with pytest.raises(ValueError, match="no colour map 'greens'"):
        plot_layout(layout, str(tmp_path), formats="svg", colormap="greens")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match="the colour map 'blues' is matplotlib's"):
        plot_layout(layout, str(tmp_path), formats="svg", colormap="blues")
