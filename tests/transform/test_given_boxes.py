"""Shared tiles with layouts that the user gives: TMA and wgmma use their boxes, other instructions take the rest."""

import numpy as np
import pytest

import tilelang.language as T
from tilelang.ir import walk
from tilelang.ir.expr import Call
from tilelang.layout import (make_full_bank_swizzled_layout, make_half_bank_swizzled_layout, make_linear_layout,
                             make_quarter_bank_swizzled_layout, make_swizzled_layout, make_wgmma_swizzled_layout)
from tilelang.simulator import run_device
from tilelang.target import Target
from tilelang.transform.framework.pass_ import PassContext
from tilelang.transform.legalize.given_boxes import given_boxes
from tilelang.transform.pipeline import legalized, lower

SM90A = Target({"kind": "cuda", "arch": "sm_90a"})
BOXES = {"swizzled": make_swizzled_layout, "wgmma": make_wgmma_swizzled_layout, "full": make_full_bank_swizzled_layout,
         "half": make_half_bank_swizzled_layout, "quarter": make_quarter_bank_swizzled_layout}
OTHERS = {
    "linear": make_linear_layout,
    "xor": lambda b: T.Layout(b.shape, lambda i, j: (i, (j // 8 ^ i % 8) * 8 + j % 8)),
    "padded": lambda b: T.Layout(b.shape, lambda i, j: i * (b.shape[1] + 8) + j),
    "odd": lambda b: T.Layout(b.shape, lambda i, j: i * (b.shape[1] + 1) + j),
    "columns": lambda b: T.Layout(b.shape, lambda i, j: (j, i)),
}
LAYOUTS = {**BOXES, **OTHERS}


def scores(tile, layout, threads, stages):
    """O = Q @ K.T with a layout for one of the tiles q, k, o."""
    give = LAYOUTS[layout]

    @T.prim_func
    def main(Q: T.Tensor((128, 128), "float16"), K: T.Tensor((256, 128), "float16"), O: T.Tensor((128, 256), "float16")):
        with T.Kernel(1, threads=threads):
            q = T.alloc_shared((128, 128), "float16")
            k = T.alloc_shared((64, 128), "float16")
            o = T.alloc_shared((128, 64), "float16")
            s = T.alloc_fragment((128, 64), "float32")
            given = {"q": q, "k": k, "o": o}[tile]
            T.annotate_layout({given: give(given)})
            T.copy(Q, q)
            for i in T.Pipelined(4, num_stages=stages):
                T.copy(K[i * 64:(i + 1) * 64, :], k)
                T.clear(s)
                T.gemm(q, k, s, transpose_B=True)
                T.copy(s, o)
                T.copy(o, O[:, i * 64:(i + 1) * 64])

    return main


def agrees(prim, *args):
    """Run a program with float16 outputs of integer values on the simulator; returns the intrinsics that it calls."""
    program = lower(prim.func, SM90A)
    out = run_device(program, [*args, np.zeros((args[0].shape[0], args[1].shape[0]), np.float16)]).outputs["O"]
    assert np.array_equal(out, args[0].astype(np.float32) @ args[1].astype(np.float32).T)
    return {x.op for kernel in program.kernels for x in walk(kernel.launch) if isinstance(x, Call)}


def integers(*shape):
    return np.random.default_rng(0).integers(-3, 4, shape).astype(np.float16)


@pytest.mark.parametrize("stages", range(5))
@pytest.mark.parametrize("threads", [128, 256, 384])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("tile", ["q", "k", "o"])
def test_a_given_layout_was_a_conflict_with_tma(tile, layout, threads, stages):
    agrees(scores(tile, layout, threads, stages), integers(128, 128), integers(256, 128))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_boxes_of_any_width_go_by_tma_and_wgmma_and_other_layouts_do_not(layout):
    used = agrees(scores("q", layout, 128, 2), integers(128, 128), integers(256, 128))
    assert ("wgmma" in used) is (layout in BOXES)
    if layout in BOXES:
        assert "tma_load" in used and "cp_async" not in used


@pytest.mark.parametrize("layout, width", [("half", 64), ("quarter", 32), ("xor", 0), ("full", None), ("swizzled", None)])
def test_given_boxes_mark_what_differs_from_the_default(layout, width):
    func = legalized(scores("q", layout, 128, 2).func, SM90A)
    out = given_boxes(func, PassContext(SM90A))
    buffers = {b.name: b for x in walk(out.body) if (b := getattr(x, "buffer", None)) is not None}
    assert buffers["q"].facts.box_width == width and buffers["k"].facts.box_width is None


@pytest.mark.parametrize("layout", ["half", "quarter"])
def test_atomic_addition_by_tma_uses_the_given_boxes(layout):
    @T.prim_func
    def main(A: T.Tensor((64, 64), "float32"), O: T.Tensor((64, 64), "float32")):
        with T.Kernel(1, threads=128):
            s = T.alloc_shared((64, 64), "float32")
            T.annotate_layout({s: LAYOUTS[layout](s)})
            T.copy(A, s)
            T.atomic_add(O, s, use_tma=True)

    a = np.random.default_rng(0).random((64, 64), np.float32)
    assert np.array_equal(run_device(lower(main.func, SM90A), [a, a.copy()]).outputs["O"], a + a)
