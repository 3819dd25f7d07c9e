"""check_warp_role_order: warp roles that share memory and nothing that orders them are refused on every target."""

import pytest

import tilelang
import tilelang.language as T
from tilelang.errors import TileLangError
from tilelang.target import Target

SM80, SM90A = (Target({"kind": "cuda", "arch": a}) for a in ("sm_80", "sm_90a"))


def roles(form):
    """Warp group 0 stores in S, and warp group 1 reads it."""

    @T.prim_func
    def f(A: T.Tensor((128,), "float32"), B: T.Tensor((256,), "float32")):
        with T.Kernel(1, threads=256):
            S, tx = T.alloc_shared((256,), "float32"), T.get_thread_binding()
            if form == "threads":
                with T.ws(0):
                    S[tx] = A[tx]
                with T.ws(1):
                    B[tx] = S[255 - tx]
            elif form == "tiles":
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


@pytest.mark.parametrize("form", ["threads", "tiles", "loop", "barrier of the reader alone"])
def test_warp_roles_that_nothing_orders_are_refused_alike(form):
    """sm_90a refused them; the reference interpreter and the CPU took a meaning of their own: zeros, or all the values."""
    for compiled in everywhere(roles(form)):
        with pytest.raises(TileLangError, match="`S` is touched by two warp roles that nothing orders") as e:
            compiled()
        assert e.value.kind == "sync-unordered" and "T.sync_threads(id, threads)" in e.value.hint
        assert "stored here by another warp role" in str(e.value)


@pytest.mark.parametrize("form", ["apart", "named barrier", "barrier of all"])
def test_warp_roles_that_meet_or_stay_apart_are_accepted(form):
    """check_warp_role_order lets them pass."""
    for compiled in everywhere(roles(form)):
        compiled()
