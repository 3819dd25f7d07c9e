"""Tile operations on arrays of each thread: every thread does them for itself, in branches and loops of its own as well."""

import numpy as np
import pytest
from everywhere import WITH_HOPPER, cuda_text, everywhere, run

import tilelang.language as T
from tilelang.errors import TileLangError

TILES = ((np.arange(512) * 37) % 101 - 40).reshape(64, 2, 4).astype(np.float32)


def program(form):
    @T.prim_func
    def f(A: T.Tensor((64, 2, 4), "float32"), O: T.Tensor((64, 2, 4), "float32"), P: T.Tensor((64, 4, 2), "float32")):
        with T.Kernel(1, threads=64):
            t = T.get_thread_binding()
            L = T.alloc_local((2, 4), "float32")
            M = T.alloc_local((4, 2), "float32")
            T.copy(A[t, 0:2, 0:4], L)
            if form == "add":
                T.atomic_add(O[t // 2, 0:2, 0:4], L)
            elif form == "max":
                if t > 10:
                    T.atomic_max(O[0, 0:2, 0:4], L)
            elif form == "transpose":
                T.transpose(L, M)
                T.copy(M, P[t, 0:4, 0:2])
            elif form == "scan":
                T.cumsum(L, dim=1)
                T.copy(L, O[t, 0:2, 0:4])
            elif form == "reverse":
                if t % 2 == 0:
                    T.cummax(L, dim=0, reverse=True)
                T.copy(L, O[t, 0:2, 0:4])

    return f


def expected(form):
    """(O, P)."""
    o, p = np.zeros_like(TILES), np.zeros((64, 4, 2), np.float32)
    if form == "add":
        o[:32] = TILES[0::2] + TILES[1::2]
    elif form == "max":
        o[0] = np.maximum(TILES[11:].max(0), 0)
    elif form == "transpose":
        p = TILES.transpose(0, 2, 1)
    elif form == "scan":
        o = np.cumsum(TILES, axis=2)
    else:
        o = TILES.copy()
        o[0::2] = np.maximum.accumulate(TILES[0::2, ::-1], axis=1)[:, ::-1]
    return o, p


@pytest.mark.spec("T.atomic_add", "T.atomic_max", "T.transpose", "T.cumsum", "T.cummax", "T.alloc_local")
@pytest.mark.parametrize("form", ["add", "max", "transpose", "scan", "reverse"])
def test_each_thread_works_on_its_own_tile(form):
    """They were dealt out over the threads, which each hold another tile."""
    f = program(form)
    _, o, p = everywhere(f, TILES)
    want = expected(form)
    assert np.array_equal(o, want[0]) and np.array_equal(p, want[1])
    cuda_text(f)


@pytest.mark.spec("T.copy", "T.alloc_local")
@pytest.mark.parametrize("form", ["in", "out", "loop"])
def test_copies_between_shared_memory_and_arrays_of_threads_that_part(form):
    @T.prim_func
    def f(A: T.Tensor((64, 4), "float32"), O: T.Tensor((64, 4), "float32")):
        with T.Kernel(1, threads=64):
            t = T.get_thread_binding()
            L = T.alloc_local((4,), "float32")
            S = T.alloc_shared((64, 4), "float32")
            T.copy(A, S)
            T.clear(L)
            if form == "in":
                if t < 50:
                    T.copy(S[63 - t, 0:4], L)
                T.copy(L, O[t, 0:4])
            elif form == "out":
                T.copy(A[63 - t, 0:4], L)
                if t % 3 == 0:
                    T.copy(L, S[t, 0:4])
                T.copy(S, O)
            else:
                for k in range(t % 4):
                    T.copy(S[(t + k) % 64, 0:4], L)
                    for i in range(4):
                        L[i] = L[i] + k
                T.copy(L, O[t, 0:4])

    a, t = TILES.reshape(-1)[:256].reshape(64, 4), np.arange(64)
    if form == "in":
        want = np.where(t[:, None] < 50, a[::-1], 0)
    elif form == "out":
        want = np.where(t[:, None] % 3 == 0, a[::-1], a)
    else:
        last = t % 4 - 1
        want = np.where(last[:, None] < 0, 0, a[(t + last) % 64] + last[:, None])
    assert np.array_equal(everywhere(f, a)[1], want)


@pytest.mark.spec("T.copy", "T.ws", "T.alloc_local")
def test_copies_to_arrays_of_threads_beside_warp_groups_of_their_own():
    @T.prim_func
    def f(A: T.Tensor((256, 4), "float32"), O: T.Tensor((256, 4), "float32")):
        with T.Kernel(1, threads=256):
            t = T.get_thread_binding()
            L = T.alloc_local((4,), "float32")
            S = T.alloc_shared((256, 4), "float32")
            with T.ws(0):
                T.copy(A[0:128, :], S[128:256, :])
            with T.ws(1):
                T.copy(A[128:256, :], S[0:128, :])
            T.copy(S[t, 0:4], L)
            if t % 2 == 0:
                T.copy(S[255 - t, 0:4], L)
            T.copy(L, O[t, 0:4])

    a = np.arange(1024, dtype=np.float32).reshape(256, 4)
    s, t = np.roll(a, 128, 0), np.arange(256)
    want = np.where(t[:, None] % 2 == 0, s[255 - t], s)
    assert np.array_equal(everywhere(f, a, on=WITH_HOPPER)[1], want)


def parts_of_fragments(form):
    @T.prim_func
    def f(A: T.Tensor((64, 8), "float32"), O: T.Tensor((64, 8), "float32")):
        with T.Kernel(1, threads=64):
            t = T.get_thread_binding()
            R = T.alloc_local((4,), "float32")
            H = T.alloc_fragment((64, 8), "float32")
            T.copy(A, H)
            T.clear(R)
            if form == "read":
                T.copy(H[63 - t, 2:6], R)
            elif form == "one for all":
                T.copy(H[5, 2:6], R)
            elif form == "branch":
                if t % 2 == 0:
                    T.copy(H[63 - t, 2:6], R)
            else:
                for i in range(4):
                    R[i] = t * 10 + i
                T.copy(R, H[t, 2:6])
                T.copy(H, O)
            if form != "written":
                for i in range(4):
                    O[t, i] = R[i]

    return f


@pytest.mark.spec("T.copy", "T.alloc_local", "T.alloc_fragment")
@pytest.mark.parametrize("form", ["read", "one for all", "written"])
def test_parts_of_fragments_reach_arrays_of_threads_that_do_not_hold_them(form):
    """The threads that held the part got it, and no others."""
    a, t = TILES.reshape(64, 8), np.arange(64)[:, None]
    want = np.zeros_like(a)
    if form == "read":
        want[:, :4] = a[::-1, 2:6]
    elif form == "one for all":
        want[:, :4] = a[5, 2:6]
    else:
        want = a.copy()
        want[:, 2:6] = t * 10 + np.arange(4)
    assert np.array_equal(everywhere(parts_of_fragments(form), a)[1], want)


@pytest.mark.spec("T.copy", "T.alloc_local", "T.alloc_fragment")
def test_a_part_of_a_fragment_under_a_condition_of_the_thread_is_refused_on_a_gpu():
    a, t = TILES.reshape(64, 8), np.arange(64)[:, None]
    want = np.zeros_like(a)
    want[:, :4] = np.where(t % 2 == 0, a[::-1, 2:6], 0)
    f = parts_of_fragments("branch")
    assert np.array_equal(everywhere(f, a, on=("tile", "cpu"))[1], want)
    with pytest.raises(TileLangError) as e:
        run(f, a, on="simulator")
    assert e.value.kind == "collective-divergent"
