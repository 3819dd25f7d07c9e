"""Tile operations on arrays of each thread: every thread does them for itself, in branches and loops of its own as well."""

import numpy as np
import pytest
from everywhere import WITH_HOPPER, cuda_text, everywhere

import tilelang.language as T

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
