"""GEMMs with two tiles: whole waves of one, the tail by another (library/gemm/tail_plan.py, tail_kernels.py)."""

from dataclasses import replace

import numpy as np
import pytest

import tilelang
from tilelang.codegen.cuda.printer import print_kernel
from tilelang.ir import dtype, numpy_dtype, walk
from tilelang.ir.expr import Call
from tilelang.library.gemm.kernels import Form
from tilelang.library.gemm.operands import operand
from tilelang.library.gemm.plan import plan_matmul
from tilelang.library.gemm.problem import MatmulProblem
from tilelang.library.gemm.split_k_kernels import gemm_tail
from tilelang.library.gemm.tail_plan import choose_tail, tails
from tilelang.library.gemm.tile import Tail, Tile, TileProblem, chip_of
from tilelang.library.gemm.tile_cost import choose_tile
from tilelang.runtime import nvrtc
from tilelang.simulator import run_device
from tilelang.target import Target
from tilelang.transform.pipeline import lower

SM90, SM80 = (Target({"kind": "cuda", "arch": x}) for x in ("sm_90a", "sm_80"))
H200 = replace(chip_of(SM90), sms=132)
HALF, F8 = ("float16",) * 3 + ("float32",), ("float8_e4m3fn", "float8_e4m3fn", "bfloat16", "float32")
LOSES = TileProblem(2664, 5448, 6200, may_swap_ab=True, may_overlap=True, a_rows=16, b_rows=16)


def test_where_a_gemm_has_a_tail():
    """One tile takes 277 us, 392 of 192x192 (three waves of 132 SMs) and a tail of 72 columns 262 (H200)."""
    plain = choose_tile(H200, LOSES)
    tile, tail = choose_tail(H200, LOSES, plain)
    assert tile.seconds < 0.96 * plain.seconds and tail.tile.splits == 1
    f = Form(2664, 5448, 6200, HALF, tile, tail=tail)
    first, rest = f.pieces
    count = -(-first.m // tile.bm) * -(-first.n // tile.bn)
    assert count % 132 == 0 or count % 132 > 0.9 * 132
    assert first.m % tile.bm == 0 if tail.axis == 0 else first.n % tile.bn == 0
    assert first.m * first.n + rest.m * rest.n == 2664 * 5448
    assert tails(H200, LOSES, plain.seconds)[0][0] == tile.seconds
    assert f.pieces[0].pieces == (f.pieces[0],)


@pytest.mark.parametrize("p", [
    TileProblem(4096, 4096, 4096), TileProblem(8192, 1024, 8192), TileProblem(8192, 8192, 8192, b_k=True),
    TileProblem(1024, 1024, 1024),
    replace(LOSES, two_level=True, kind="fp8", bits=8, b_k=True), replace(LOSES, open_rows=True), replace(LOSES, m=40)],
    ids=str)
def test_where_none_is(p):
    assert choose_tail(H200, p, choose_tile(H200, p)) is None


def test_the_library_has_tails_where_the_model_says():
    a, b = np.empty((2664, 6200), np.float16), np.empty((6200, 5448), np.float16)
    p = MatmulProblem(2664, 5448, 6200, HALF, "half", operand(a, "a", False), operand(b, "b", False))
    found = plan_matmul(p, H200).form
    assert (found.tile, found.tail) == choose_tail(H200, LOSES, choose_tile(H200, LOSES))
    assert plan_matmul(replace(p, dynamic=True), H200).form.tail is None


BIAS = dict(bias="float32", activation="relu")
SMALL, TURNED = Tile(64, 96, 64, 2, 128), Tile(64, 40, 64, 2, 128, swap_ab=True)
CASES = {
    "rows NN": (HALF, SMALL, Tail(0, 128, Tile(64, 128, 64, 2, 128)), {}),
    "rows TT": (HALF, SMALL, Tail(0, 64, Tile(128, 72, 64, 2, 256)), {"ta": True, "tb": True, **BIAS}),
    "columns NT": (HALF, SMALL, Tail(1, 96, Tile(64, 72, 64, 3, 128)), {"tb": True, **BIAS}),
    "columns TN batch": (HALF, SMALL, Tail(1, 96, SMALL), {"ta": True, "batch": 2}),
    "turned": (HALF, SMALL, Tail(1, 96, TURNED), {"tb": True, **BIAS}),
    "moved": (HALF, SMALL, Tail(0, 128, replace(TURNED, staged=True, overlapping=True)), {"tb": True, **BIAS}),
    "fp8": (F8, replace(SMALL, bk=128), Tail(0, 128, Tile(64, 128, 128, 2, 128)), {"tb": True, "scaling": "tensor"}),
}


def tensors(f):
    rng = np.random.default_rng(0)
    lead = (f.batch,) if f.batch else ()
    shapes = (*lead, *((f.k, f.m) if f.ta else (f.m, f.k))), (*lead, *((f.n, f.k) if f.tb else (f.k, f.n)))
    a, b = (rng.integers(-3, 4, s).astype(numpy_dtype(dtype(x))) for s, x in zip(shapes, f.types))
    bias = rng.integers(-3, 4, f.n).astype(np.float32) if f.bias else np.ones(1, np.float32)
    one = np.ones(1, np.float32)
    wide = [x.astype(np.float64) for x in (a, b)]
    want = (wide[0].swapaxes(-1, -2) if f.ta else wide[0]) @ (wide[1].swapaxes(-1, -2) if f.tb else wide[1])
    want = np.maximum(want + bias, 0) if f.bias else want
    out = np.full((*lead, f.m, f.n), np.nan, numpy_dtype(dtype(f.types[2])))
    return {"A": a, "B": b, "bias": bias, "sa": one, "sb": one, "C": out}, want.astype(out.dtype)


@pytest.mark.parametrize("name", CASES)
def test_both_pieces_everywhere(name):
    """Sizes that no tile divides: sm_90a, with roles, on the simulator, and the CPU; sm_80 has one launch after the other."""
    types, tile, cut, more = CASES[name]
    f = Form(152, 200, 144, types, tile, tail=cut, **more)
    program = gemm_tail(f)
    given, want = tensors(f)
    lowered = lower(program.func, SM90, {"tl.enable_hopper": True})
    for kernel in lowered.kernels:
        ops = {x.op for x in walk(kernel.launch) if isinstance(x, Call)}
        assert {"wgmma", "tma_load", "in_warp_groups"} <= ops
    first, second = (print_kernel(x) for x in lowered.kernels)
    assert "launch_dependents" in first and "griddepcontrol.wait" not in first and "griddepcontrol.wait" in second
    assert [x.launch.plan.pdl for x in lowered.kernels] == [False, True]
    assert np.array_equal(run_device(lowered, given).outputs["C"], want)
    if name in ("rows TT", "moved"):
        tilelang.compile(program, target="cpu", verbose=False)(*given.values())
        assert np.array_equal(given["C"], want)
    if name == "rows NN":
        assert "griddepcontrol" not in "".join(map(print_kernel, lower(program.func, SM80).kernels))


@pytest.mark.skipif(not nvrtc.available(), reason="NVRTC is not installed")
def test_compiles_clean():
    tile, tail = choose_tail(H200, LOSES, choose_tile(H200, LOSES))
    f = Form(2664, 5448, 6200, HALF, tile, tail=tail, bias="float16", activation="silu")
    for kernel in lower(gemm_tail(f).func, SM90, {"tl.enable_hopper": True}).kernels:
        cubin = nvrtc.compile_cubin(print_kernel(kernel), "sm_90a")
        assert cubin.spills == 0 and "C75" not in cubin.log, cubin.log
