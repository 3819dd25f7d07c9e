"""Shared tiles with layouts that the user gives: TMA and wgmma use their boxes, other instructions take the rest."""

import numpy as np
import pytest
from covering import every_pair

import tilelang
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
# Layouts of tiles of 64 x 64 elements of 16 bits, "xor" as boxes and "blocks of rows" as core matrices of no swizzle.
ORDERS = {
    **{name: OTHERS[name] for name in ("linear", "xor", "padded", "odd", "columns")},
    "rows backwards": lambda b: T.Layout(b.shape, lambda i, j: (63 - i, j)),
    "blocks": lambda b: T.Layout(b.shape, lambda i, j: (i // 16, j // 16, i % 16, j % 16)),
    "core matrices": lambda b: T.Layout(b.shape, lambda i, j: (i // 8, j // 8, i % 8, j % 8)),
    "blocks of rows": lambda b: T.Layout(b.shape, lambda i, j: (j // 8, i // 8, i % 8, j % 8)),
}
EXECUTIONS = [(SM90A, "simulator"), (SM90A, "tile"), ("cpu", None)]


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


@pytest.mark.parametrize("tile, layout, threads, stages", every_pair(["q", "k", "o"], LAYOUTS, [128, 256, 384], range(5)))
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


def carried(layout, m, k, stages, roles):
    """A copied by T.tma_copy to tiles with a layout and from them to O."""
    @T.prim_func
    def main(A: T.Tensor((m, k), "float16"), O: T.Tensor((m, k), "float16")):
        with T.Kernel(T.ceildiv(m, 64), threads=256 if roles else 128) as b:
            s = T.alloc_shared((stages, 64, 64), "float16")
            o = T.alloc_shared((64, 64), "float16")
            f = T.alloc_fragment((64, 64), "float16")
            one = ORDERS[layout](o)
            T.annotate_layout({o: one, s: one.expand((stages,))})
            full = T.alloc_barrier([128] * stages)
            empty = T.alloc_barrier([128] * stages)
            for c in T.serial(T.ceildiv(k, 64)):
                if roles:
                    with T.ws(1):
                        T.mbarrier_wait_parity(empty[c % stages], (c // stages) % 2 ^ 1)
                        T.tma_copy(A[b * 64:b * 64 + 64, c * 64:c * 64 + 64], s[c % stages, :, :], barrier=full[c % stages])
                        T.mbarrier_arrive(full[c % stages])
                    with T.ws(0):
                        T.mbarrier_wait_parity(full[c % stages], (c // stages) % 2)
                        T.copy(s[c % stages, :, :], f)
                        T.mbarrier_arrive(empty[c % stages])
                        T.copy(f, o)
                        T.fence_proxy_async()
                        T.sync_threads(1, 128)
                        T.tma_copy(o, O[b * 64:b * 64 + 64, c * 64:c * 64 + 64])
                        T.tma_store_wait(0)
                        T.sync_threads(1, 128)
                else:
                    T.tma_copy(A[b * 64:b * 64 + 64, c * 64:c * 64 + 64], s[c % stages, :, :], barrier=full[c % stages])
                    T.mbarrier_arrive(full[c % stages])
                    T.mbarrier_wait_parity(full[c % stages], (c // stages) % 2)
                    T.copy(s[c % stages, :, :], f)
                    T.copy(f, o)
                    T.fence_proxy_async()
                    T.sync_threads()
                    T.tma_copy(o, O[b * 64:b * 64 + 64, c * 64:c * 64 + 64])
                    T.tma_store_wait(0)
                    T.sync_threads()

    return main


@pytest.mark.parametrize("target, backend", EXECUTIONS)
@pytest.mark.parametrize("m, k, stages, roles", [(128, 192, 2, True), (100, 136, 1, False), (100, 136, 3, True)])
@pytest.mark.parametrize("layout", ORDERS)
def test_tma_copy_of_a_tile_with_any_layout_was_a_conflict(layout, m, k, stages, roles, target, backend):
    a = integers(m, k)
    out = np.zeros_like(a)
    kernel = tilelang.compile(carried(layout, m, k, stages, roles), target=target, execution_backend=backend)
    kernel(a, out)
    assert np.array_equal(a, out)
    if backend == "simulator":
        assert "ordered" in str(kernel.sync_report())
        assert ("is done by threads" in str(kernel.report())) is (layout not in ("xor", "blocks of rows"))


def by_wgmma(first, second, m, n, k, transpose_a, transpose_b, waiting):
    """O = A @ B by T.wgmma_gemm on tiles with layouts; the last wait is `waiting` wgmmas late."""
    @T.prim_func
    def main(A: T.Tensor((k, m) if transpose_a else (m, k), "float16"),
             B: T.Tensor((n, k) if transpose_b else (k, n), "float16"), O: T.Tensor((m, n), "float32")):
        with T.Kernel(1, threads=128):
            a = T.alloc_shared((64, 64), "float16")
            b = T.alloc_shared((64, 64), "float16")
            c = T.alloc_fragment((64, 64), "float32")
            T.annotate_layout({x: ORDERS[order](x) for x, order in ((a, first), (b, second)) if order is not None})
            T.clear(c)
            for i in T.serial(T.ceildiv(k, 64)):
                if transpose_a:
                    T.copy(A[i * 64, 0], a)
                else:
                    T.copy(A[0, i * 64], a)
                if transpose_b:
                    T.copy(B[0, i * 64], b)
                else:
                    T.copy(B[i * 64, 0], b)
                T.wgmma_gemm(a, b, c, transpose_A=transpose_a, transpose_B=transpose_b)
                T.wait_wgmma(waiting)
            T.wait_wgmma(0)
            T.copy(c, O[0, 0])

    return main


@pytest.mark.parametrize("target, backend", EXECUTIONS)
@pytest.mark.parametrize("transposed", [(False, True), (False, False), (True, True)])
@pytest.mark.parametrize("layout", ORDERS)
def test_wgmma_gemm_of_a_tile_with_any_layout_was_refused(layout, transposed, target, backend):
    a, b = integers(50, 150), integers(150, 40)
    given = a.T.copy() if transposed[0] else a, b.T.copy() if transposed[1] else b
    for orders in ((layout, None), (None, layout), (layout, layout)):
        prim = by_wgmma(*orders, 50, 40, 150, *transposed, 0)
        kernel, out = tilelang.compile(prim, target=target, execution_backend=backend), np.zeros((50, 40), np.float32)
        kernel(*given, out)
        assert np.array_equal(out, a.astype(np.float32) @ b.astype(np.float32))
        if backend == "simulator":
            assert "ordered" in str(kernel.sync_report())
            assert ("multiplies a copy of" in str(kernel.report())) is (layout not in ("xor", "blocks of rows"))


@pytest.mark.parametrize("target, backend", EXECUTIONS[:2])
@pytest.mark.parametrize("layout", ORDERS)
def test_atomic_addition_by_tma_of_other_layouts_was_refused(layout, target, backend):
    @T.prim_func
    def main(A: T.Tensor((100, 72), "float32"), O: T.Tensor((100, 72), "float32")):
        with T.Kernel(2, 2, threads=128) as (bx, by):
            s = T.alloc_shared((64, 64), "float32")
            T.annotate_layout({s: ORDERS[layout](s)})
            T.copy(A[by * 64, bx * 64], s)
            T.atomic_add(O[by * 64, bx * 64], s, use_tma=True)

    a = np.random.default_rng(0).random((100, 72), np.float32)
    out = a.copy()
    tilelang.compile(main, target=target, execution_backend=backend)(a, out)
    assert np.array_equal(out, a + a)


@pytest.mark.parametrize("execution", ["simulator", "tile"])
@pytest.mark.parametrize("given", ["source", "destination", "both"])
@pytest.mark.parametrize("layout", ["linear", "padded", "columns", "blocks", "odd"])
def test_copies_to_another_block_took_the_rows_of_a_given_layout_for_contiguous(layout, given, execution):
    @T.prim_func
    def main(A: T.Tensor((128, 64), "float16"), O: T.Tensor((128, 64), "float16")):
        with T.ClusterKernel(2, cluster_dims=(2, 1, 1), threads=128) as b:
            s = T.alloc_shared((64, 64), "float16")
            d = T.alloc_shared((64, 64), "float16")
            T.annotate_layout({x: ORDERS[layout](x) for x, name in ((s, "source"), (d, "destination"))
                               if given in (name, "both")})
            bar = T.alloc_barrier(1)
            T.copy(A[b * 64, 0], s)
            T.fence_proxy_async()
            if T.get_thread_binding() == 0:
                T.mbarrier_expect_tx(bar, 64 * 64 * 2)
                T.mbarrier_arrive(bar)
            T.cluster_sync()
            T.copy_cluster(s, d, dst_block=1 - T.block_rank_in_cluster(), remote_barrier=bar)
            T.mbarrier_wait_parity(bar, 0)
            T.copy(d, O[b * 64, 0])

    a = integers(128, 64)
    out = np.zeros_like(a)
    tilelang.compile(main, target=SM90A, execution_backend=execution)(a, out)
    assert np.array_equal(out, np.roll(a, 64, 0))


@pytest.mark.parametrize("target, backend", EXECUTIONS)
@pytest.mark.parametrize("stages", range(1, 5))
@pytest.mark.parametrize("layout", ["padded", "columns", "core matrices", "xor"])
def test_warp_roles_fill_and_multiply_tiles_of_any_layout(layout, stages, target, backend):
    @T.prim_func
    def main(A: T.Tensor((100, 136), "float16"), B: T.Tensor((60, 136), "float16"), O: T.Tensor((100, 60), "float32")):
        with T.Kernel(1, threads=384):
            a = T.alloc_shared((stages, 128, 64), "float16")
            b = T.alloc_shared((stages, 64, 64), "float16")
            c = T.alloc_fragment((128, 64), "float32")
            one = T.alloc_shared((64, 64), "float16")
            T.annotate_layout({b: ORDERS[layout](one).expand((stages,))})
            full, empty = T.alloc_barrier([128] * stages), T.alloc_barrier([256] * stages)
            with T.ws(2):
                for k in T.serial(3):
                    T.mbarrier_wait_parity(empty[k % stages], (k // stages) % 2 ^ 1)
                    T.tma_copy(A[0:128, k * 64:k * 64 + 64], a[k % stages, :, :], barrier=full[k % stages])
                    T.tma_copy(B[0:64, k * 64:k * 64 + 64], b[k % stages, :, :], barrier=full[k % stages])
                    T.mbarrier_arrive(full[k % stages])
            with T.ws(0, 1):
                T.clear(c)
                for k in T.serial(3):
                    T.mbarrier_wait_parity(full[k % stages], (k // stages) % 2)
                    T.wgmma_gemm(a[k % stages, :, :], b[k % stages, :, :], c, transpose_B=True)
                    T.wait_wgmma(0)
                    T.mbarrier_arrive(empty[k % stages])
                T.copy(c, O[0, 0])

    x, y = integers(100, 136), integers(60, 136)
    kernel, out = tilelang.compile(main, target=target, execution_backend=backend), np.zeros((100, 60), np.float32)
    kernel(x, y, out)
    assert np.array_equal(out, x.astype(np.float32) @ y.astype(np.float32).T)
    if backend == "simulator":
        assert "ordered" in str(kernel.sync_report())


@pytest.mark.parametrize("prim", [carried("padded", 100, 136, 2, True), carried("core matrices", 100, 136, 2, False),
                                  by_wgmma("columns", "padded", 64, 64, 128, False, True, 1)])
def test_copies_and_products_of_other_layouts_assemble(prim):
    assert "by threads" in (text := str(tilelang.compile(prim, target=SM90A).report())) or "multiplies a copy" in text
