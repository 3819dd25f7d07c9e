"""order_warp_roles: a barrier between warp roles that share memory; an error on every target where none may stand there."""

import numpy as np
import pytest

import tilelang
import tilelang.language as T
from tilelang.errors import TileLangError
from tilelang.ir import Call, walk
from tilelang.target import Target
from tilelang.transform.framework.pass_ import PassContext, run_passes
from tilelang.transform.legalize.order_warp_roles import order_warp_roles
from tilelang.transform.pipeline import TILE_PASSES

SM80, SM90A = (Target({"kind": "cuda", "arch": a}) for a in ("sm_80", "sm_90a"))


def roles(form):
    """Warp roles that store in S and read it."""

    @T.prim_func
    def f(A: T.Tensor((128,), "float32"), B: T.Tensor((256,), "float32"), n: T.int32):
        with T.Kernel(1, threads=512 if "wait" in form else 256):
            S, tx = T.alloc_shared((256,), "float32"), T.get_thread_binding()
            if "wait" in form:
                done = T.alloc_barrier(128)
            if form == "threads":
                with T.ws(0):
                    S[tx] = A[tx]
                with T.ws(1):
                    B[tx] = S[255 - tx]
            elif form == "tiles":
                T.fill(S, 7.0)
                with T.ws(1):
                    T.copy(S[0:128], B[0:128])
                with T.ws(0):
                    T.copy(A, S[0:128])
            elif form == "loop":
                for k in T.serial(4):
                    with T.ws(0):
                        for i in T.Parallel(128):
                            S[i] = A[i] + k
                    with T.ws(1):
                        for i in T.Parallel(128):
                            B[i] = S[127 - i]
            elif form == "loop that begins with the reader":
                T.fill(S, 7.0)
                for _ in T.serial(4):
                    with T.ws(1):
                        T.copy(S[0:128], B[128:256])
                    with T.ws(0):
                        T.copy(A, S[0:128])
            elif form == "branches of warps":
                if tx < 32:
                    T.copy(A[0:32], S[0:32])
                if tx < 32:
                    B[tx] = S[31 - tx]
                else:
                    B[tx] = S[tx % 32]
            elif form == "more warps":
                if tx < 32:
                    T.copy(A[0:64], S[0:64])
                if tx < 64:
                    B[tx] = S[63 - tx]
            elif form == "unknown place":
                with T.ws(0):
                    T.copy(A, S[n:n + 128])
                with T.ws(1):
                    B[tx] = S[n + 255 - tx]
            elif form == "place of the iteration before":
                for k in T.serial(3):
                    with T.ws(0):
                        T.copy(A, S[k % 2 * 128:k % 2 * 128 + 128])
                    with T.ws(1):
                        if k > 0:
                            T.copy(S[(k + 1) % 2 * 128:(k + 1) % 2 * 128 + 128], B[0:128])
            elif form == "the other way of the branch":
                if tx < 128:
                    T.copy(A, S[0:128])
                else:
                    T.copy(S[0:128], B[0:128])
            elif form == "behind a wait for a later warp role":
                with T.ws(2):
                    T.mbarrier_wait_parity(done, 0)
                with T.ws(0):
                    T.copy(A, S[0:128])
                with T.ws(1):
                    T.copy(S[0:128], B[0:128])
                with T.ws(3):
                    T.mbarrier_arrive(done)
            elif form == "barrier of the reader alone":
                with T.ws(0):
                    S[tx] = A[tx]
                with T.ws(1):
                    T.sync_threads(3, 128)
                    B[tx] = S[255 - tx]
            elif form == "apart":
                with T.ws(0):
                    S[2 * tx] = A[tx]
                    B[tx] = S[2 * tx]
                with T.ws(1):
                    S[2 * tx - 255] = A[tx - 128]
                    B[tx] = S[2 * tx - 255]
            elif form == "atomics apart":
                T.fill(S, 7.0)
                with T.ws(0):
                    T.atomic_add(S[tx // 2], 1.0)
                    B[tx] = tx
                with T.ws(1):
                    T.copy(S[64:128], B[128:192])
            elif form == "atomics of two":
                T.fill(S, 7.0)
                with T.ws(0):
                    if tx < 32:
                        T.atomic_addx2(S[tx * 2 + 1], A[2 * tx])
                with T.ws(1):
                    T.copy(S[64:128], B[128:192])
            elif form == "named barrier":
                with T.ws(0):
                    S[tx] = A[tx]
                    T.sync_threads(3, 256)
                with T.ws(1):
                    T.sync_threads(3, 256)
                    B[tx] = S[255 - tx]
            elif form == "barrier of all":
                with T.ws(0):
                    S[tx] = A[tx]
                T.sync_threads()
                with T.ws(1):
                    B[tx] = S[255 - tx]

    return f


def everywhere(f):
    """Ways to compile a program."""
    for on in ({"target": SM80, "execution_backend": "simulator"}, {"target": SM90A, "execution_backend": "simulator"},
               {"target": "cpu"}, {"execution_backend": "tile"}):
        yield lambda on=on: tilelang.compile(f, **on)


PLACED = ("threads", "tiles", "the other way of the branch", "loop", "loop that begins with the reader", "branches of warps",
          "more warps", "unknown place", "place of the iteration before", "barrier of the reader alone", "apart",
          "atomics apart", "named barrier", "barrier of all")


@pytest.mark.parametrize("form", PLACED)
def test_a_barrier_stands_between_warp_roles_that_nothing_else_orders(form):
    """They were rejected, though all threads pass between the two."""
    A, out = np.random.default_rng(0).standard_normal(128).astype(np.float32), []
    for compiled in everywhere(roles(form)):
        B = np.zeros(256, np.float32)
        compiled()(A, B, 0)
        out.append(B)
    for got in out[1:]:
        np.testing.assert_array_equal(got, out[0])


@pytest.mark.parametrize("form, barriers", [("apart", 0), ("atomics apart", 0), ("atomics of two", 1),
                                            ("barrier of all", 1), ("threads", 1), ("loop", 2),
                                            ("place of the iteration before", 1), ("barrier of the reader alone", 1)])
def test_no_more_barriers_than_needed(form, barriers):
    """One in front of the reader, and one in front of the warp role that stores again in the next iteration."""
    f = roles(form).func
    f = run_passes(f, TILE_PASSES[:TILE_PASSES.index(order_warp_roles) + 1], PassContext(SM90A, {}))
    assert sum(x.op == "sync_threads" for x in walk(f.body, Call)) == barriers


def test_warp_roles_without_a_place_for_a_barrier_are_refused_alike():
    for compiled in everywhere(roles("behind a wait for a later warp role")):
        with pytest.raises(TileLangError, match="`S` is touched by two warp roles that nothing orders|requires sm_90") as e:
            compiled()
        assert e.value.kind == "needs-arch" or "stored here by another warp role" in str(e.value)
