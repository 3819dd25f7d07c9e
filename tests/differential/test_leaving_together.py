"""Loops that threads leave by break or continue, in which they meet: on every execution."""

import numpy as np
import pytest
from backends import agree

import tilelang
import tilelang.language as T
from tilelang.errors import TileLangError
from tilelang.target import Target
from tilelang.transform.pipeline import lower

I32 = np.int32


@pytest.mark.parametrize("leave", ["break", "continue"])
@pytest.mark.parametrize("nested", [False, True])
def test_all_threads_of_a_branch_leave_a_round_in_which_they_exchange(leave, nested):
    """On the CPU the jump left the loop over the threads instead, and the program's loop went on."""
    @T.prim_func
    def f(O: T.Tensor((128,), "int32")):
        with T.Kernel(1, threads=128):
            tx = T.get_thread_binding()
            x = T.alloc_var("int32", init=1)
            if tx >= 32 and tx < 96:
                for r in T.serial(5):
                    x = x + T.shfl_xor(x + tx, 1)
                    if leave == "break":
                        if nested:
                            if r >= 1:
                                x = x + 5
                                if r < 4:
                                    break
                        elif r == 1:
                            break
                    elif nested:
                        if r >= 1:
                            x = x + 5
                            if r < 4:
                                continue
                    elif r == 1:
                        continue
                    x = x * 3
            O[tx] = x

    t = np.arange(32, 96)
    x = np.ones(64, np.int64)
    for r in range(5):
        x = x + (x + t)[(t ^ 1) - 32]
        x = x + 5 * (nested and r >= 1)
        if leave == "break" and r == 1:
            break
        if leave == "continue" and (nested and 1 <= r < 4 or r == 1):
            continue
        x = x * 3
    o = np.ones(128, I32)
    o[32:96] = x
    agree(f, [np.zeros(128, I32)], {0: o})


KINDS = ["break on the round", "break on a variable", "break on shared memory", "continue", "while", "break of an inner loop"]


@pytest.mark.parametrize("kind", KINDS)
def test_roles_meet_in_a_loop_that_all_threads_leave_early(kind):
    """Tile meaning ran such a loop role by role: threads of one warp group found nothing of the other's rounds."""
    @T.prim_func
    def f(O: T.Tensor((256,), "int32"), P: T.Tensor((256,), "int32")):
        with T.Kernel(1, threads=256):
            tx = T.get_thread_binding()
            S = T.alloc_shared((256,), "int32")
            x = T.alloc_var("int32", init=0)
            c = T.alloc_var("int32", init=0)
            for i in T.Parallel(256):
                S[i] = -1
            if kind == "while":
                while c < 5:
                    S[tx] = tx * (c + 1) + x
                    x = x + S[255 - tx]
                    if c == 2:
                        break
                    c = c + 1
            else:
                for r in T.serial(5):
                    S[tx] = tx * (r + 1) + x
                    c = c + 1
                    if kind == "continue":
                        if r == 1:
                            continue
                    if kind == "break on a variable":
                        if c == 3:
                            break
                    if kind == "break of an inner loop":
                        for q in T.serial(3):
                            if q == r:
                                break
                            x = x + S[(tx + 1) % 256]
                    x = x + S[255 - tx]
                    if kind == "break on the round":
                        if r == 2:
                            break
                    if kind == "break on shared memory":
                        if S[255] >= 255 * 3:
                            break
            O[tx] = x
            with T.ws(0):
                T.copy(S, P)

    t, x = np.arange(256), np.zeros(256, np.int64)
    for r in range(5):
        s = t * (r + 1) + x
        if kind == "continue" and r == 1:
            continue
        if kind == "break on a variable" and r == 2:
            break
        if kind == "break of an inner loop":
            x = x + min(r, 3) * np.roll(s, -1)
        x = x + s[::-1]
        if kind in ("break on the round", "while") and r == 2 or kind == "break on shared memory" and s[255] >= 255 * 3:
            break
    agree(f, [np.zeros(256, I32), np.zeros(256, I32)], {0: x.astype(I32), 1: s.astype(I32)})


@pytest.mark.parametrize("first", [0, 100])
def test_roles_store_over_what_the_others_read_in_the_same_statement(first):
    """Tile meaning and CPU ran the statement role by role, so the second read what the first had stored; GPUs refused it."""
    @T.prim_func
    def f(O: T.Tensor((256,), "int32"), P: T.Tensor((256,), "int32")):
        with T.Kernel(1, threads=256):
            tx = T.get_thread_binding()
            S = T.alloc_shared((256,), "int32")
            for i in T.Parallel(256):
                S[i] = i + 1
            if first == 0:
                S[255 - tx] = S[tx] * 2
            elif tx >= first:
                S[255 - tx] = S[tx] * 2
            O[tx] = S[tx]
            with T.ws(0):
                T.copy(S, P)

    s = np.arange(1, 257)
    s[:256 - first] = 2 * s[first:][::-1]
    agree(f, [np.zeros(256, I32), np.zeros(256, I32)], {0: s.astype(I32), 1: s.astype(I32)})


def test_roles_that_store_one_value_from_what_was_there_do_it_once():
    """Tile meaning added one for each role."""
    @T.prim_func
    def f(O: T.Tensor((256,), "int32"), P: T.Tensor((8,), "int32")):
        with T.Kernel(1, threads=256):
            tx = T.get_thread_binding()
            S = T.alloc_shared((8,), "int32")
            for i in T.Parallel(8):
                S[i] = i
            S[3] = S[3] + 1
            y = T.alloc_var("int32", init=5)
            y = y + S[3]
            O[tx] = S[tx % 8] + y
            with T.ws(0):
                T.copy(S, P)

    s = np.array([0, 1, 2, 4, 4, 5, 6, 7], I32)
    agree(f, [np.zeros(256, I32), np.zeros(8, I32)], {0: np.tile(s, 32) + 9, 1: s}, ("tile", "cpu"))


@pytest.mark.parametrize("on", ["tile", "cpu", "sm_90a"])
@pytest.mark.parametrize("kind", ["break of some", "break of a branch", "break on a variable of some", "continue of some"])
def test_roles_that_exchange_in_a_loop_that_some_leave_early_are_refused(kind, on):
    """Tile meaning ran the loop role by role, and the CPU did where a branch is around it: wrong values without an error."""
    @T.prim_func
    def f(O: T.Tensor((256,), "int32"), P: T.Tensor((256,), "int32")):
        with T.Kernel(1, threads=256):
            tx = T.get_thread_binding()
            S = T.alloc_shared((256,), "int32")
            x = T.alloc_var("int32", init=0)
            c = T.alloc_var("int32", init=0)
            for i in T.Parallel(256):
                S[i] = -1
            if kind == "break of a branch":
                if tx >= 96 and tx < 160:
                    for r in T.serial(3):
                        S[tx] = tx * (r + 1) + x
                        x = x + S[255 - tx]
                        if r == 1:
                            break
            else:
                if tx < 64:
                    c = 1
                for r in T.serial(4):
                    S[tx] = tx * (r + 1) + x
                    if kind == "continue of some":
                        if tx < 64:
                            continue
                    x = x + S[255 - tx]
                    if kind == "break of some":
                        if r >= tx // 64:
                            break
                    if kind == "break on a variable of some":
                        if c == 1:
                            break
            O[tx] = x
            with T.ws(0):
                T.copy(S, P)

    refused(f, on, {"tile": "sim-unsupported", "cpu": "cpu-unsupported", "sm_90a": "sync-divergent"}[on])


def refused(f, on, kind):
    """A call of f, or its lowering, raises an error of this kind."""
    with pytest.raises(TileLangError) as told:
        if on == "sm_90a":
            lower(f.func, Target({"kind": "cuda", "arch": on}))
        else:
            args = [np.zeros([int(n) for n in b.shape], I32) for b in f.buffer_map.values()]
            tilelang.compile(f, target="cpu", **({"execution_backend": "tile"} if on == "tile" else {}))(*args)
    assert told.value.kind == kind


def test_threads_of_one_role_leave_a_branch_in_which_they_exchange():
    """Not refused with the ones above: no other role comes there."""
    @T.prim_func
    def f(O: T.Tensor((256,), "int32"), P: T.Tensor((64,), "int32")):
        with T.Kernel(1, threads=256):
            tx = T.get_thread_binding()
            S = T.alloc_shared((64,), "int32")
            x = T.alloc_var("int32", init=0)
            for i in T.Parallel(64):
                S[i] = -1
            if tx >= 160 and tx < 192:
                for r in T.serial(3):
                    S[tx - 160] = tx * (r + 1) + x
                    T.sync_warp()
                    x = x + S[191 - tx]
                    T.sync_warp()
                    if r == 1:
                        break
            O[tx] = x
            with T.ws(0):
                T.copy(S, P)

    t, x = np.arange(160, 192), np.zeros(32, np.int64)
    for r in range(2):
        s = t * (r + 1) + x
        x = x + s[::-1]
    o, p = np.zeros(256, I32), np.full(64, -1, I32)
    o[160:192], p[:32] = x, s
    agree(f, [np.zeros(256, I32), np.zeros(64, I32)], {0: o, 1: p}, ("tile", "cpu"))


@pytest.mark.parametrize("leave", ["break", "continue"])
def test_threads_leave_a_loop_one_by_one_beside_roles_where_they_exchange_nothing(leave):
    """The CPU refused it: it let the roles meet in a loop that some of their threads had left."""
    @T.prim_func
    def f(O: T.Tensor((256,), "int32"), P: T.Tensor((256,), "int32")):
        with T.Kernel(1, threads=256):
            tx = T.get_thread_binding()
            S = T.alloc_shared((256,), "int32")
            x = T.alloc_var("int32", init=0)
            for i in T.Parallel(256):
                S[i] = i
            for r in T.serial(4):
                S[tx] = S[tx] + r + x
                if tx % 3 == r:
                    if leave == "break":
                        break
                    else:
                        continue
                x = x + S[tx]
            O[tx] = x
            with T.ws(0):
                T.copy(S, P)

    t = np.arange(256)
    s, x, on = t.copy(), np.zeros(256, np.int64), np.ones(256, bool)
    for r in range(4):
        s = np.where(on, s + r + x, s)
        now = on & (t % 3 != r)
        x = np.where(now, x + s, x)
        on = now if leave == "break" else on
    agree(f, [np.zeros(256, I32), np.zeros(256, I32)], {0: x.astype(I32), 1: s.astype(I32)})


def test_roles_that_store_the_same_where_threads_part_are_not_refused():
    """A value that a role stored itself is its own, though another role was the one to change it."""
    @T.prim_func
    def f(O: T.Tensor((256,), "int32"), P: T.Tensor((64,), "int32")):
        with T.Kernel(1, threads=256):
            tx = T.get_thread_binding()
            S = T.alloc_shared((64,), "int32")
            x = T.alloc_var("int32", init=0)
            for i in T.Parallel(64):
                S[i] = 0
            for r in T.serial(tx // 64 + 1):
                S[tx % 64] = 5
                x = x + S[tx % 64] + r
            O[tx] = x
            with T.ws(0):
                T.copy(S, P)

    n = np.arange(256) // 64 + 1
    agree(f, [np.zeros(256, I32), np.zeros(64, I32)],
          {0: (5 * n + n * (n - 1) // 2).astype(I32), 1: np.full(64, 5, I32)}, ("tile",))
