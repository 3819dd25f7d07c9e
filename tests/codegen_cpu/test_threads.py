"""Code that names threads, and the thread pool."""

import os
import subprocess
import sys
import threading

import numpy as np
import pytest
from cpu_harness import Compiled, run_cpu
from kernel_text import alloc, program

import tilelang.language as T
from tilelang.errors import TileLangError
from tilelang.ir import numpy_dtype
from tilelang.simulator import run_tile

rng = np.random.default_rng(2)


def agrees(f, args):
    got, want = run_cpu(f, args), run_tile(f, args)
    for name in want:
        np.testing.assert_array_equal(got[name], want[name], name)
    return got


@pytest.mark.spec("T.address_of")
@pytest.mark.spec("L6:alloc_local")
def test_private_memory_has_a_copy_per_thread():
    f = program({"A": ((64,), "int32"), "N": ((1,), "int32")}, f"""
        {alloc("r", (2,), "int32", "local")}
        r[0] = tx * 2
        r[1] = r[0] + 1
        if tx < 40:
            A[bx * 32 + tx] = r[1]
        T.evaluate(T.call("atomic_add", "int32", T.address_of(N[0]), 1))
    """, grid="1", threads=48)
    assert agrees(f, [np.zeros(64, np.int32), np.zeros(1, np.int32)])["N"][0] == 48


def test_a_named_value_that_differs_between_threads():
    f = program({"A": ((64,), "int32")}, """
        i: T.int32 = (tx * 2) % 64 + tx // 32
        A[i] = tx
    """, grid="1", threads=64)
    assert agrees(f, [np.zeros(64, np.int32)])["A"][3] == 33


def test_three_dimensional_thread_index():
    f = program({"A": ((2, 3, 4), "int32")}, "A[tz, ty, tx] = tx + ty * 10 + tz * 100", threads=(4, 3, 2))
    agrees(f, [np.zeros((2, 3, 4), np.int32)])


def test_shared_memory_written_by_one_thread_is_seen_by_another():
    f = program({"A": ((64,), "int32")}, f"""
        {alloc("S", (64,), "int32", "shared.dyn")}
        S[tx] = tx * 3
        T.evaluate(T.call("sync_threads", "int32"))
        A[tx] = S[63 - tx]
    """, threads=64)
    assert np.array_equal(run_cpu(f, [None])["A"], np.arange(63, -1, -1) * 3)


def test_loops_whose_length_depends_on_the_thread():
    f = program({"A": ((32,), "int32"), "B": ((32,), "int32")}, f"""
        {alloc("v", (1,), "int32", "local.var")}
        while v[0] * v[0] < tx:
            v[0] = v[0] + 1
        A[tx] = v[0]
        for k in T.serial(tx):
            if k == 9:
                break
            B[tx] = B[tx] + k
    """)
    agrees(f, [np.zeros(32, np.int32), np.zeros(32, np.int32)])


@pytest.mark.parametrize("op, operand, width", [("shfl_xor", 7, 8), ("shfl_up", 3, 32), ("shfl_down", 5, 16),
                                                ("shfl_idx", 6, 8)])
def test_shuffles(op, operand, width):
    f = program({"A": ((64,), "int32")}, f"""
        A[tx] = T.call("{op}", "int32", tx * 5, {operand}, width={width})
    """, threads=64)
    agrees(f, [np.zeros(64, np.int32)])


def test_a_warp_sum_by_shuffles():
    f = program({"X": ((32,), "float32"), "Y": ((32,), "float32")}, f"""
        {alloc("v", (1,), "float32", "local.var")}
        v[0] = X[tx]
        for k in T.serial(5):
            v[0] = v[0] + T.call("shfl_xor", "float32", v[0], 1 << k)
        Y[tx] = v[0]
    """)
    x = rng.integers(0, 99, 32).astype(np.float32)
    assert np.array_equal(run_cpu(f, [x, None])["Y"], np.full(32, x.sum()))


def test_votes():
    f = program({"A": ((64,), "int32"), "B": ((64,), "uint64")}, """
        A[tx] = T.call("any_sync", "int32", tx == 40) * 2 + T.call("all_sync", "int32", tx < 32)
        B[tx] = T.call("ballot", "uint64", tx % 3 == 0)
    """, threads=64)
    out = run_cpu(f, [None, None])
    assert np.array_equal(out["A"], [1] * 32 + [2] * 32)
    bits = [sum(1 << i for i in range(32) if (w * 32 + i) % 3 == 0) for w in (0, 1)]
    assert np.array_equal(out["B"], np.repeat(np.array(bits, np.uint64), 32))


def test_copy_to_private_memory_uses_each_threads_region():
    f = program({"A": ((32, 4), "float32"), "B": ((32, 4), "float32")}, f"""
        {alloc("r", (4,), "float32", "local")}
        T.copy(src=T.region(A[tx, 0], 1, 4), dst=T.region(r[0], 4))
        for k in T.serial(4):
            B[tx, 3 - k] = r[k]
    """)
    a = rng.standard_normal((32, 4)).astype(np.float32)
    assert np.array_equal(agrees(f, [a, np.zeros_like(a)])["B"], a[:, ::-1])


@pytest.mark.parametrize("body, what", [
    ("if tx < 8:\n    T.fill(dst=T.region(S[0], 32), value=1.0)", "tile operation"),
    ("if tx < 8:\n    T.evaluate(T.call('sync_threads', 'int32'))", "sync_threads"),
    ("for k in T.serial(tx):\n    S[tx] = 1.0\n    A[tx] = S[15 - tx]", "reading and writing one shared buffer"),
    ("if tx < 8:\n    T.evaluate(T.call('thread_return', 'void'))\nT.fill(dst=T.region(S[0], 32), value=1.0)",
     "tile operation"),
    ("for i, in T.Parallel(8):\n    A[i] = T.cast(tx, 'float32')", "thread-dependent value tx"),
])
def test_what_one_cpu_thread_cannot_do_is_refused(body, what):
    f = program({"A": ((32,), "float32")}, alloc("S", (32,), "float32", "shared.dyn") + "\n" + body)
    with pytest.raises(TileLangError, match=what) as e:
        Compiled(f)
    assert e.value.kind == "cpu-unsupported" and e.value.hint


def test_threads_return_in_a_loop_and_exchange_values_in_a_branch():
    f = program({"A": ((32,), "int32")}, """
        A[tx] = tx
        if tx < 8:
            A[tx] = T.call('shfl_xor', 'int32', A[tx], 1, T.uint32(255))
        for k in T.serial(4):
            A[tx] = A[tx] + 100
            if tx < k:
                T.evaluate(T.call('thread_return', 'void'))
        A[tx] = A[tx] + 1000
    """)
    tx = np.arange(32)
    turns = np.array([2, 3, 4])
    want = np.where(tx < 8, tx ^ 1, tx) + np.where(tx < 3, 100 * turns[np.minimum(tx, 2)], 1400)
    assert np.array_equal(agrees(f, [np.zeros(32, np.int32)])["A"], want)


def test_threads_of_a_branch_see_what_others_of_it_wrote():
    f = program({"A": ((32,), "int32"), "B": ((32,), "int32")}, f"""
        {alloc("S", (32,), "int32", "shared.dyn")}
        {alloc("r", (1,), "int32", "local.var")}
        S[tx] = 0 - tx
        if tx < 16:
            v: T.int32 = tx * 2
            S[tx] = v
            w: T.int32 = S[15 - tx] + v
            r[0] = w
            if S[tx] < 10:
                S[tx] = w + 1
                r[0] = r[0] + S[(tx + 1) % 4]
            else:
                S[tx] = 7
                r[0] = r[0] - S[tx + 1]
            for k in T.serial(3):
                S[tx] = r[0] + k
                r[0] = S[15 - tx]
        else:
            S[tx] = tx
            r[0] = S[47 - tx]
        A[tx] = r[0]
        B[tx] = S[tx]
    """, grid="1", threads=32)
    got = run_cpu(f, [np.zeros(32, np.int32)] * 2)
    tx = np.arange(16)
    s = np.append(tx * 2, -16)
    w = s[15 - tx] + tx * 2
    low = s[:16] < 10
    s1 = np.where(low, w + 1, s[:16])
    r = np.where(low, w + s1[(tx + 1) % 4], w)
    s2 = np.append(np.where(low, s1, 7), -16)
    r = np.where(low, r, r - s2[tx + 1])
    for k in range(3):
        s3 = r + k
        r = s3[15 - tx]
    assert np.array_equal(got["A"], [*r, *np.arange(31, 15, -1)])
    assert np.array_equal(got["B"], [*s3, *np.arange(16, 32)])


@pytest.mark.parametrize("leave, stays", [("bx == 1", lambda b, t: b != 1), ("tx % 3 == bx", lambda b, t: t % 3 != b)])
def test_threads_that_returned_do_nothing_more(leave, stays):
    f = program({"A": ((2, 32), "int32"), "B": ((2, 32), "int32")}, f"""
        {alloc("S", (32,), "int32", "shared.dyn")}
        S[tx] = 0
        if {leave}:
            A[bx, tx] = 5
            T.evaluate(T.call("thread_return", "void"))
        S[tx] = tx + 1
        A[bx, tx] = 1
        if tx < 8:
            B[bx, tx] = S[7 - tx]
    """, grid="2", threads=32)
    got = run_cpu(f, [np.zeros((2, 32), np.int32)] * 2)
    left = np.array([[stays(b, t) for t in range(32)] for b in range(2)])
    seen = np.where(left, np.arange(32) + 1, 0)[:, 7::-1]
    assert np.array_equal(got["A"], np.where(left, 1, 5))
    assert np.array_equal(got["B"][:, :8], np.where(left[:, :8], seen, 0)) and not got["B"][:, 8:].any()


@pytest.mark.parametrize("shape", [(1, 5), (5, 1), (1, 1), (3, 1, 5), (3, 5, 1), (1, 4, 6), (3, 4, 6)])
def test_a_transpose_with_unit_dimensions_keeps_the_others_in_order(shape):
    turned = (*shape[:-2], shape[-1], shape[-2])
    copies = [f"{', '.join(['0'] * len(shape))}], {', '.join(map(str, s))}" for s in (shape, turned)]
    f = program({"A": (shape, "int32"), "B": (turned, "int32")}, f"""
        {alloc("S", shape, "int32", "shared.dyn")}
        {alloc("R", turned, "int32", "shared.dyn")}
        T.copy(src=T.region(A[{copies[0]}), dst=T.region(S[{copies[0]}))
        T.transpose(src=T.region(S[{copies[0]}), dst=T.region(R[{copies[1]}))
        T.copy(src=T.region(R[{copies[1]}), dst=T.region(B[{copies[1]}))
    """, grid="1", threads=32)
    a = np.arange(np.prod(shape), dtype=np.int32).reshape(shape)
    assert np.array_equal(agrees(f, [a, np.zeros(turned, np.int32)])["B"], a.swapaxes(-1, -2))


def big_blocks(blocks):
    """Each block needs 2 MiB of its own memory."""
    return program({"A": ((blocks,), "int64")}, f"""
        {alloc("S", (512, 1024), "int32", "shared.dyn")}
        {alloc("r", (1,), "int64", "local.fragment")}
        for i, j in T.Parallel(512, 1024):
            S[i, j] = i + j + bx
        T.fill(dst=T.region(r[0], 1), value=0)
        for i, j in T.Parallel(512, 1024):
            r[0] = r[0] + T.cast(S[i, j], "int64")
        A[bx] = r[0]
    """, grid=str(blocks))


def test_calls_from_several_python_threads_do_not_mix():
    kernel = Compiled(big_blocks(6))
    want = np.add.outer(np.arange(512), np.arange(1024)).sum() + np.arange(6) * 512 * 1024
    bad = []

    def call():
        for _ in range(4):
            a = np.zeros(6, np.int64)
            kernel(a)
            if not np.array_equal(a, want):
                bad.append(a)

    workers = [threading.Thread(target=call) for _ in range(4)]
    for w in workers:
        w.start()
    for w in workers:
        w.join()
    assert not bad


SCRIPT = """
import os, sys
import numpy as np
sys.path[:0] = [{here!r}, os.path.dirname({here!r})]
from test_threads import big_blocks, Compiled
k = Compiled(big_blocks(5))
a = np.zeros(5, np.int64); k(a)
pid = os.fork()
b = np.zeros(5, np.int64); k(b); k(b)
assert np.array_equal(a, b)
if pid == 0:
    os._exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
print("good")
"""


@pytest.mark.parametrize("count", ["1", "2", "5"])
def test_pool_of_any_size_also_after_fork(count):
    env = {**os.environ, "TILELANG_NUM_THREADS": count}
    here = os.path.dirname(__file__)
    done = subprocess.run([sys.executable, "-c", SCRIPT.format(here=here)], env=env, capture_output=True, text=True,
                          timeout=120, cwd=os.path.dirname(os.path.dirname(here)))
    assert done.stdout == "good\n", done.stderr


def test_printing_in_a_kernel():
    script = f"""
import sys; sys.path[:0] = [{os.path.dirname(__file__)!r}, {os.path.dirname(os.path.dirname(__file__))!r}]
from cpu_harness import Compiled
from kernel_text import program
import numpy as np
f = program({{"A": ((1,), "int32")}}, '''
    if tx < 2:
        T.evaluate(T.call("printf", "int32", "x=%d y=%f %s\\\\n", tx, 1.5, "z"))
''')
Compiled(f)(np.zeros(1, np.int32))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120,
                          cwd=os.path.dirname(os.path.dirname(os.path.dirname(__file__))))
    assert done.stdout == "x=0 y=1.500000 z\nx=1 y=1.500000 z\n", done.stderr


def test_a_name_bound_to_a_value_of_the_thread_is_an_index():
    @T.prim_func
    def main(A: T.Tensor((256,), "int32")):
        with T.Kernel(2, threads=128) as bx:
            tx = T.get_thread_binding()
            i = bx * 128 + tx
            A[i] = i * 2

    got = agrees(main.func, [np.zeros(256, np.int32)])["A"]
    assert np.array_equal(got, np.arange(256) * 2)


@pytest.mark.parametrize("n", [2, 200])  # on the stack, and in the arena of the worker
@pytest.mark.parametrize("of, seen, per", [("float16x2", "float16", 2), ("bfloat16x2", "bfloat16", 2),
                                           ("float32x2", "float32", 2), ("int32", "int8", 4), ("int64", "int16", 4),
                                           ("int32", "int64", 0.5)])
def test_views_of_private_memory_with_other_elements_stay_in_their_thread(of, seen, per, n):
    """Elements of a view lay among those of the neighbouring threads."""
    count = int(n * per)

    @T.prim_func
    def main(A: T.Tensor((33, count), seen), B: T.Tensor((33, count), seen)):
        with T.Kernel(1, threads=33):
            t = T.get_thread_binding()
            r = T.alloc_local((n,), of)
            s = T.alloc_local((n,), of)
            v = T.view(r, (count,), seen)
            w = T.view(s, (count,), seen)
            for k in T.serial(count):
                v[k] = A[t, k]
            for k in T.serial(n):
                s[k] = r[n - 1 - k]
            B[t, 0] = w[0]
            for k in T.serial(1, count):
                B[t, k] = w[k]

    dt = numpy_dtype(seen)
    a = rng.integers(-100, 100, (33, count)).astype(dt)
    got = agrees(main.func, [a, np.zeros_like(a)])["B"]
    words = a.view(np.uint8).reshape(33, n, -1)
    np.testing.assert_array_equal(got.view(np.uint8), words[:, ::-1].reshape(33, -1))


@pytest.mark.parametrize("where", ["parallel", "branch", "loop", "roles"])
def test_an_assertion_that_fails_fails_the_call(where):
    """Assertions in kernels were left out on the CPU."""
    @T.prim_func
    def main(A: T.Tensor((256,), "int32"), B: T.Tensor((256,), "int32")):
        with T.Kernel(2, threads=128) as b:
            if where == "parallel":
                for i in T.Parallel(128):
                    assert A[b * 128 + i] < 100, "too large"
                    B[b * 128 + i] = A[b * 128 + i]
            elif where == "branch":
                t = T.get_thread_binding()
                if t >= 64:
                    assert A[b * 128 + t] < 100, "too large"
                T.sync_threads()
                B[b * 128 + t] = A[b * 128 + t]
            elif where == "loop":
                for k in T.serial(128):
                    assert A[b * 128 + k] < 100, "too large"
                T.copy(A[b * 128:b * 128 + 128], B[b * 128:b * 128 + 128])
            else:
                s = T.alloc_shared((128,), "int32")
                full = T.alloc_barrier(64)
                t = T.get_thread_binding()
                if t < 64:
                    for k in T.serial(2):
                        s[t * 2 + k] = A[b * 128 + t * 2 + k]
                    T.barrier_arrive(full)
                else:
                    T.barrier_wait(full, 0)
                    for k in T.serial(2):
                        assert s[t * 2 - 128 + k] < 100, "too large"
                        B[b * 128 + t * 2 - 128 + k] = s[t * 2 - 128 + k]

    a = np.full(256, 99, np.int32)
    np.testing.assert_array_equal(run_cpu(main.func, [a, np.zeros_like(a)])["B"], a)
    a[255] = 100
    with pytest.raises(RuntimeError, match=r"assertion failed \(test_threads.py:\d+\): too large"):
        run_cpu(main.func, [a, np.zeros_like(a)])
