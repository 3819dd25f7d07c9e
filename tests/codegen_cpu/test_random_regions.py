"""Copies, reductions and scans of random regions: the CPU target equals the tile simulator bit for bit."""

import numpy as np
import pytest
from cpu_harness import run_cpu
from kernel_text import alloc, program
from hypothesis import given, settings
from hypothesis import strategies as st

from tilelang.ir import numpy_dtype
from tilelang.simulator import run_tile

TYPES = ["float32", "float16", "bfloat16", "int8", "int32", "float64"]
SETTINGS = settings(max_examples=40, deadline=None, database=None, derandomize=True)


def region(name, mins, extents):
    return f"T.region({name}[{', '.join(map(str, mins))}], {', '.join(map(str, extents))})"


def agree(f, args, names):
    got, want = run_cpu(f, args), run_tile(f, args)
    for n in names:
        np.testing.assert_array_equal(got[n].astype(np.float64), want[n].astype(np.float64), n)


@st.composite
def copies(draw):
    """A region of a tensor that may stick out on any side, copied through block memory into another such region."""
    extents = draw(st.lists(st.sampled_from([1, 2, 3, 5, 8, 16, 33]), min_size=1, max_size=3))
    while np.prod(extents) > 2000:
        extents = [max(1, e // 2) for e in extents]
    unit = draw(st.integers(0, len(extents)))  # a dimension of extent 1 stands somewhere in the source
    source = [*extents[:unit], 1, *extents[unit:]]

    def around(sizes):
        shape = [max(1, e + draw(st.integers(-3, 4))) for e in sizes]
        return shape, [draw(st.integers(-3, 3)) for _ in sizes]

    return dict(extents=extents, source=source, a=around(source), b=around(extents), src=draw(st.sampled_from(TYPES)),
                dst=draw(st.sampled_from(TYPES)), dynamic=draw(st.booleans()), by_block=draw(st.booleans()),
                scope=draw(st.sampled_from(["shared.dyn", "local.fragment"])), seed=draw(st.integers(0, 999)))


@pytest.mark.spec("T.copy")
@SETTINGS
@given(copies())
def test_copies_clip_each_dimension(d):
    (a_shape, a_at), (b_shape, b_at) = d["a"], d["b"]
    zero, e = [0] * len(d["extents"]), d["extents"]
    at = [f"{a_at[0]} + bx" if d["by_block"] else a_at[0], *a_at[1:]]
    tensors = {"A": (("n", *a_shape[1:]) if d["dynamic"] else tuple(a_shape), d["src"]),
               "B": (tuple(b_shape), d["dst"]), "D": ((2, *e), d["dst"])}
    f = program(tensors, f"""
        {alloc("S", tuple(e), d["dst"], d["scope"])}
        T.copy(src={region("A", at, d["source"])}, dst={region("S", zero, e)})
        T.copy(src={region("S", zero, e)}, dst={region("D", ["bx", *zero], [1, *e])})
        if bx == 0:
            T.copy(src={region("S", zero, e)}, dst={region("B", b_at, e)})
    """, grid="2", symbols="n" if d["dynamic"] else "")
    a = (np.random.default_rng(d["seed"]).standard_normal(a_shape) * 20).astype(numpy_dtype(d["src"]))
    agree(f, [a, np.zeros(b_shape, numpy_dtype(d["dst"])), np.zeros((2, *e), numpy_dtype(d["dst"]))], "BD")


@st.composite
def reductions(draw):
    """A reduction or scan over any dimension; values are small integers, so every order gives the same sum."""
    extents = draw(st.lists(st.sampled_from([1, 2, 3, 5, 8, 16, 17, 40]), min_size=1, max_size=3))
    while np.prod(extents) > 2000:
        extents = [max(1, e // 2) for e in extents]
    whole = draw(st.booleans())
    op = draw(st.sampled_from(["reduce", "reduce", "scan"]))
    kinds = ["sum", "max"] if op == "scan" else ["sum", "abssum", "max", "absmax", "min"]
    kinds += ["bitand", "bitor", "bitxor"] if whole and op == "reduce" else []
    kind = draw(st.sampled_from(kinds))
    src = draw(st.sampled_from(["int8", "int32", "uint8"] if whole else ["float32", "float16", "bfloat16"]))
    dst = src if op == "scan" else draw(st.sampled_from(["int32", "int64"] if whole else ["float32", "float64"]))
    return dict(extents=extents, dim=draw(st.integers(0, len(extents) - 1)), kept=draw(st.booleans()), op=op, kind=kind,
                src=src, dst=dst, clear=draw(st.booleans()) or kind == "abssum", reverse=draw(st.booleans()),
                seed=draw(st.integers(0, 999)))


@SETTINGS
@given(reductions())
def test_reductions_and_scans_over_any_dimension(d):
    e, dim = d["extents"], d["dim"]
    out = list(e)
    if d["op"] == "reduce":
        out[dim] = 1
        if not d["kept"] and len(e) > 1:
            del out[dim]
    more = f"clear={d['clear']}, nan_propagate=False" if d["op"] == "reduce" else f"reverse={d['reverse']}"
    zx, zr = [0] * len(e), [0] * len(out)
    f = program({"A": (tuple(e), d["src"]), "B": (tuple(out), d["dst"])}, f"""
        {alloc("x", tuple(e), d["src"], "local.fragment")}
        {alloc("r", tuple(out), d["dst"], "local.fragment")}
        T.copy(src={region("A", zx, e)}, dst={region("x", zx, e)})
        T.copy(src={region("B", zr, out)}, dst={region("r", zr, out)})
        T.{d["op"]}(src={region("x", zx, e)}, dst={region("r", zr, out)}, kind="{d["kind"]}", dim={dim}, {more})
        T.copy(src={region("r", zr, out)}, dst={region("B", zr, out)})
    """)
    r = np.random.default_rng(d["seed"])
    a, b = r.integers(0, 6, e), r.integers(0, 6, out)
    a = a if d["src"].startswith("uint") else a - 3
    agree(f, [a.astype(numpy_dtype(d["src"])), b.astype(numpy_dtype(d["dst"]))], "B")
