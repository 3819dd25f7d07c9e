"""Large fragments that every thread would hold: dealt out in digits that all their shapes have, or kept in shared memory."""

import numpy as np
import pytest

import tilelang.language as T
from tilelang.errors import TileLangError
from tilelang.ir import Launch, Parallel, walk
from tilelang.layout import viewed_fragment
from tilelang.simulator import run_device, run_tile
from tilelang.target import Target
from tilelang.transform.layout.infer_layouts import infer_layouts
from tilelang.transform.framework.pass_ import PassContext, run_passes
from tilelang.transform.pipeline import DEVICE_PASSES, TILE_PASSES, lower
from tilelang.target.machine import REGISTERS

SM80 = Target({"kind": "cuda", "arch": "sm_80"})
UP_TO_LAYOUTS = (*TILE_PASSES, *DEVICE_PASSES[:DEVICE_PASSES.index(infer_layouts) + 1])


def launch_of(prim, **config):
    func = run_passes(prim.func, UP_TO_LAYOUTS, PassContext(SM80, config))
    (launch,) = [x for x in walk(func.body) if isinstance(x, Launch)]
    return launch


def kinds(prim, **config):
    """Name -> registers of a thread, "shared" or "whole" (every thread holds all)."""
    out = {}
    for b, lay in launch_of(prim, **config).plan.layouts:
        whole = b.scope_name == "local.fragment" and lay.replicas == lay.threads
        out[b.name] = "whole" if whole else lay.registers if b.scope_name == "local.fragment" else "shared"
    return out


def agrees(prim):
    rng = np.random.default_rng(3)
    args = [rng.standard_normal(b.shape).astype(str(b.dtype)) for _, b in prim.func.buffers]
    name = prim.func.buffers[-1][1].name
    assert np.array_equal(run_device(lower(prim.func, SM80), args).outputs[name], run_tile(prim.func, args)[name])


def two_shapes(shape, view, threads=128):
    m, n = shape
    p, q = view

    @T.prim_func
    def f(A: T.Tensor(shape, "float32"), C: T.Tensor(view, "float32")):
        with T.Kernel(1, threads=threads):
            F = T.alloc_fragment(shape, "float32")
            W = T.reshape(F, view)
            T.copy(A, F)
            for i, j in T.Parallel(m, n):
                F[i, j] = F[i, j] * 2.0
            for i, j in T.Parallel(p, q):
                W[i, j] = W[i, j] + T.cast(i * 3 - j, "float32")
            T.copy(W, C)

    return f


@pytest.mark.parametrize("shape, view, threads, registers", [
    ((64, 64), (4, 1024), 384, 16),  # 384 threads have no part that is one in both shapes
    ((64, 64), (16, 256), 96, 64), ((12, 40), (96, 5), 128, 4), ((15, 32), (5, 96), 64, 20)])
def test_common_digits_of_two_shapes_are_dealt_out(shape, view, threads, registers):
    f = two_shapes(shape, view, threads)
    assert kinds(f) == {"F": registers, "W": registers}
    agrees(f)


@pytest.mark.parametrize("shape, view, where", [((34, 60), (60, 34), "shared"), ((6, 15), (15, 6), 1), ((6, 21), (21, 6), 1)])
def test_shapes_without_common_digits(shape, view, where):
    f = two_shapes(shape, view)
    assert kinds(f) == {"F": where, "W": where}
    agrees(f)


def test_a_small_tile_without_common_digits_stays_in_registers():
    f = two_shapes((6, 21), (21, 6), 64)
    assert 6 * 21 <= REGISTERS.replicated_tile and kinds(f) == {"F": "whole", "W": "whole"}
    agrees(f)


def any_element(size, touch):
    """touch: fn(F, k, tx) -> statements that every thread runs."""
    @T.prim_func
    def f(A: T.Tensor((size, size), "float32"), C: T.Tensor((size, size), "float32")):
        with T.Kernel(1, threads=64):
            F = T.alloc_fragment((size, size), "float32")
            tx = T.get_thread_binding()
            T.copy(A, F)
            for k in T.serial(4):
                touch(F, k, tx)
            T.copy(F, C)

    return f


@T.macro
def read(F, k, tx):
    for i, j in T.Parallel(16, 16):
        F[i, j] = F[i, j] + 1.0
    x = F[k, 5]
    for i, j in T.Parallel(16, 16):
        F[i, j] = F[i, j] * x


@T.macro
def update(F, k, tx):
    F[k, k] = F[k + 1, k] + F[k, k]


@T.macro
def each_thread(F, k, tx):
    F[k, 3] = T.cast(T.min(tx, k), "float32")


@T.macro
def some_threads(F, k, tx):
    if tx < 32:
        F[k, 3] = 1.0


@T.macro
def neighbours(F, k, tx):
    x = F[k, 3]
    for i, j in T.Parallel(15, 16):
        F[i, j] = F[i + 1, j] + x


@pytest.mark.parametrize("touch, where", [(read, "shared"), (update, "shared"), (neighbours, "shared")])
def test_a_tile_whose_elements_every_thread_touches(touch, where):
    f = any_element(16, touch)
    copies = {"F_old": 4} if touch is neighbours else {}  # the rows below, as they were before the loop: a share of a thread
    assert kinds(f) == {"F": where, **copies}
    agrees(f)


@pytest.mark.parametrize("touch", [each_thread, some_threads])
def test_what_single_threads_store_in_their_copies_is_refused(touch):
    with pytest.raises(TileLangError, match="threads store different things in `F`"):
        kinds(any_element(16, touch))


def test_a_store_that_every_thread_would_make_is_made_once():
    launch = launch_of(any_element(16, update))
    assert sum(isinstance(x, Parallel) for x in walk(launch)) == 1
    assert kinds(any_element(8, update)) == {"F": "whole"}  # 64 registers are no burden


def test_without_room_in_shared_memory_threads_hold_it():
    @T.prim_func
    def f(A: T.Tensor((2080, 20), "float32"), C: T.Tensor((16, 16), "float32")):
        with T.Kernel(1, threads=64):
            F = T.alloc_fragment((16, 16), "float32")
            S = T.alloc_shared((2080, 20), "float32")
            T.copy(A, S)
            T.copy(S[0:16, 0:16], F)
            F[1, 2] = F[3, 4]
            T.copy(F, C)

    assert kinds(f) == {"F": "whole", "S": "shared"}


def test_every_element_has_a_register_of_its_own():
    for shape, cuts, threads, vector in (((12, 40), (5, 480), 128, 1), ((4, 6, 10), (10, 240), 128, 2), ((3,), (3,), 1, 1),
                                         ((7, 34), (7, 34), 384, 1), ((34, 60), (34, 60), 128, 1)):
        f = viewed_fragment(shape, cuts, threads, vector)
        owners, registers = np.asarray(f.owners()), np.asarray(f.register_table())
        assert owners.max() < threads and f.vector_width % vector == 0
        for copy in owners:
            assert len(set(zip(copy.ravel().tolist(), registers.ravel().tolist()))) == registers.size
