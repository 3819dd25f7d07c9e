"""Threads that touch each other's places go together on the CPU; statements of a thread's own places stay whole."""

import numpy as np
import pytest

import tilelang
import tilelang.language as T
from tilelang.ir import For, If, Launch, Store, walk
from tilelang.transform.cpu.thread_conflicts import Conflicts
from tilelang.transform.cpu.varying_values import find_varying_values


def _stored_by_others():
    @T.prim_func
    def main(B: T.Tensor((32,), "int32")):
        with T.Kernel(1, threads=32):
            s, tx = T.alloc_shared((32,), "int32"), T.get_thread_binding()
            s[tx] = 0
            if tx < 16:
                for d in range(16):
                    s[(tx + d) % 16] = tx * 100 + d
            else:
                s[tx] = tx
                s[47 - tx] = 100 + tx
            B[tx] = s[tx]
    return main


def _places_with_names():
    @T.prim_func
    def main(B: T.Tensor((32,), "int32")):
        with T.Kernel(1, threads=32):
            s, tx = T.alloc_shared((32,), "int32"), T.get_thread_binding()
            d = T.alloc_var("int32", init=0)
            s[tx] = 1
            if tx < 16:
                for k in range(16):
                    p = (tx + k) % 16
                    s[p] = s[p] * 3 + tx
            else:
                while d < 5:
                    s[16 + (tx + d) % 16] = s[16 + (tx + d) % 16] * 3 + tx
                    d = d + 1
            B[tx] = s[tx]
    return main


def _global_memory():
    @T.prim_func
    def main(B: T.Tensor((32,), "int32")):
        with T.Kernel(1, threads=32):
            tx = T.get_thread_binding()
            B[tx] = tx
            B[tx] = B[31 - tx] + 1
            for k in range(2):
                if tx < 16:
                    for d in range(tx % 4 + 2):
                        B[(tx + d) % 16] = B[(tx + d) % 16] * 3 + tx + k
                else:
                    B[tx] = tx
                    B[47 - tx] = B[47 - tx] + B[tx]
    return main


def _updates():
    @T.prim_func
    def main(B: T.Tensor((32,), "int32")):
        with T.Kernel(1, threads=32):
            s, tx = T.alloc_shared((32,), "int32"), T.get_thread_binding()
            s[tx] = tx
            if tx < 16:
                T.atomic_add(s[0], 1)
                B[tx] = s[0]
            else:
                T.atomic_add(s[20], tx)
                T.atomic_add(s[16 + (tx + 1) % 16], s[tx])
                T.atomic_max(s[tx // 2 + 8], tx)
                T.atomic_add(s[tx // 2 + 8], 1)
                B[tx] = s[tx]
    return main


def _left_early():
    @T.prim_func
    def main(B: T.Tensor((32,), "int32")):
        with T.Kernel(1, threads=32):
            s, tx = T.alloc_shared((32,), "int32"), T.get_thread_binding()
            s[tx] = 1
            for d in range(16):
                if d > tx % 9:
                    break
                s[(tx + d) % 32] = s[(tx + d) % 32] * 3 + tx
            B[tx] = s[tx]
    return main


@pytest.mark.parametrize("program", [_stored_by_others, _places_with_names, _global_memory, _updates, _left_early])
def test_threads_go_together(program):
    """As the tile interpreter runs them: all threads a statement, then the next one."""
    found = []
    for backend in ("tile", None):
        out = np.full(32, 77, np.int32)
        tilelang.compile(program(), target="cpu", execution_backend=backend)(out)
        found.append(out.tolist())
    assert found[0] == found[1]


def _crossings(program, threads):
    launch = next(n for n in walk(program.func.body if hasattr(program, "func") else program.body) if isinstance(n, Launch))
    assert launch.num_threads == threads
    return Conflicts(launch, find_varying_values(launch)), launch


def test_what_is_a_threads_own_stays_whole():
    @T.prim_func
    def main(A: T.Tensor((200, 8, 64), "float32"), n: T.int32):
        with T.Kernel(4, threads=64) as b:
            s, q, tx = T.alloc_shared((64, 8), "float32"), T.alloc_shared((256,), "float32"), T.get_thread_binding()
            w, lane = tx // 32, tx % 32
            if tx < 40:
                for j in range(1, 8):
                    s[tx, j] = s[tx, j - 1] + 1.0
            for i in range(tx, 256, 64):
                q[i] = q[i] + 1.0
            for k in range(tx % 5):
                A[b, w * 4 + k % 4, lane] = A[b, w * 4, lane] + 1.0
            if lane > 3:
                for k in range(n):
                    A[k * 2 + w, 1, lane * 2] = A[k * 2 + w, 1, lane * 2 + 1]
            for k in range(tx % 4 + 1):
                q[tx * 4 + k % 4] = 1.0
            if tx == 0:
                for k in range(255):
                    q[k + 1] = q[k]
            if tx > 1:
                T.atomic_add(q[tx % 3], 1.0)
                T.atomic_add(q[tx % 7], 1.0)

    places, launch = _crossings(main, 64)
    asked = [s for s in launch.body.stmts if isinstance(s, (If, For))]
    assert [places.exist_in(s) for s in asked] == [False] * 7


def test_what_other_threads_access_conflicts():
    @T.prim_func
    def main(A: T.Tensor((64, 64), "float32"), I: T.Tensor((64,), "int32")):
        with T.Kernel(1, threads=64):
            s, tx = T.alloc_shared((64, 8), "float32"), T.get_thread_binding()
            if tx < 40:
                for j in range(9):
                    A[tx, j] = A[tx + 1, j]
            for i in range(tx, 256, 63):
                s[i // 8, i % 8] = 1.0
            for k in range(tx % 4):
                A[I[tx], k] = 1.0
            if tx < 9:
                s[tx // 2, 0] = s[tx // 2, 0] + 1.0
            if tx == 0 or tx == 1:
                s[0, 0] = 1.0
                s[0, 1] = s[0, 0]

    places, launch = _crossings(main, 64)
    asked = [s for s in launch.body.stmts if isinstance(s, (If, For))]
    assert all(places.exist_in(s) for s in asked) and len(asked) == 5
    stores = [n for n in walk(asked[3]) if isinstance(n, Store)]
    assert [places.overwrites(x, x.buffer.data) for x in stores] == [True]
