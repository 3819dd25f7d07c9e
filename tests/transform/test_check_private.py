"""Thread numbers and private memory in T.Parallel: one meaning on every execution, or refused by name."""

import linecache
import textwrap

import numpy as np
import pytest
from everywhere import WITH_HOPPER, everywhere

import tilelang.language as T
from tilelang.errors import TileLangError
from tilelang.ir import Launch, walk
from tilelang.transform.framework.pass_ import PassContext
from tilelang.transform.pipeline import legalized
from tilelang.transform.check.check_private import VARIES, Values

A64 = np.arange(64, dtype=np.int32) * 3 + 1
HEAD = '''def make():
    @T.prim_func
    def f(A: T.Tensor((64,), "int32"), O: T.Tensor((64,), "int32")):
        with T.Kernel(1, threads={threads}):
            tx = T.get_thread_binding()
'''


def program(body, threads=32):
    text = HEAD.format(threads=threads) + textwrap.indent(textwrap.dedent(body).strip(), " " * 12) + "\n    return f\n"
    name = f"private_{abs(hash(text))}.py"
    linecache.cache[name] = (len(text), None, text.splitlines(True), name)
    scope = {"T": T}
    exec(compile(text, name, "exec"), scope)
    return scope["make"]()


LOOP = "for i in T.Parallel(64):\n    "
REFUSED = {
    "a thread's number": ("parallel-thread", LOOP + "O[i] = A[i] + tx"),
    "a lane's number": ("parallel-thread", LOOP + "O[i] = A[i] + T.get_lane_idx()"),
    "a value made of it": ("parallel-thread", "w = tx // 8\n" + LOOP + "O[i] = A[i] + w"),
    "a value bound in the loop": ("parallel-thread", LOOP + "w = tx // 8\n    O[i] = A[i] + w"),
    "a condition": ("parallel-thread", LOOP + "if tx < 16:\n        O[i] = A[i]"),
    "an index": ("parallel-thread", LOOP + "O[(i + tx) % 64] = A[i]"),
    "the extent": ("parallel-thread", "for i in T.Parallel(tx + 1):\n    O[i] = A[i]"),
    "an inner loop's extent": ("parallel-thread", LOOP + "for k in T.serial(tx):\n        O[i] = A[i]"),
    "an elected thread": ("parallel-thread", LOOP + "if T.shuffle_elect(32):\n        O[i] = A[i]"),
    "what a thread read": ("parallel-thread", "v = A[tx]\n" + LOOP + "O[i] = A[i] + v"),
    "a private array": ("parallel-thread", "L = T.alloc_local((2,), 'int32')\nL[0] = tx\n" + LOOP + "O[i] = A[i] + L[0]"),
    "a variable some threads set": ("parallel-thread", """
        v = T.alloc_var('int32', init=0)
        if tx < 4:
            v = 1
        for i in T.Parallel(64):
            O[i] = A[i] + v"""),
    "a variable of a loop that threads leave apart": ("parallel-thread", """
        v = T.alloc_var('int32', init=0)
        for k in T.serial(8):
            v += 1
            if k > tx:
                break
        for i in T.Parallel(64):
            O[i] = A[i] + v"""),
    "an old value": ("parallel-thread", """
        C = T.alloc_shared((1,), 'int32')
        T.clear(C)
        v = T.atomic_add(C[0], 1, return_prev=True)
        for i in T.Parallel(64):
            O[i] = A[i] + v"""),
    "a tile's place": ("parallel-thread", "S = T.alloc_shared((32,), 'int32')\nT.copy(A[tx:tx + 32], S)"),
    "a tile's value": ("parallel-thread", "S = T.alloc_shared((32,), 'int32')\nT.fill(S, tx)"),
    "loop_layout": ("parallel-thread", """
        for i in T.Parallel(64, loop_layout=T.Fragment((64,), forward_fn=lambda i: (i % 32, i // 32))):
            O[i] = A[i] + tx"""),
    "a sum in a private array": ("parallel-carried", """
        L = T.alloc_local((2,), 'int32')
        L[0] = 0
        for i in T.Parallel(64):
            L[0] = L[0] + A[i]
            O[i] = L[0]"""),
    "an element set in some iterations": ("parallel-carried", """
        L = T.alloc_local((2,), 'int32')
        for i in T.Parallel(64):
            if A[i] % 2 == 0:
                L[1] = A[i]
            O[i] = L[1]"""),
    "an element set for another": ("parallel-carried", """
        L = T.alloc_local((4,), 'int32')
        for i in T.Parallel(64):
            for k in T.serial(3):
                L[k] = A[i] + k
            m = A[i] % 4
            O[i] = L[m]
            L[3] = A[i]"""),
    "what the turn before left": ("parallel-carried", """
        L = T.alloc_local((2,), 'int32')
        L[0] = 0
        for k in T.serial(3):
            for i in T.Parallel(64):
                O[i] = L[0] + A[i]
                L[0] = k"""),
    "an array read behind the loop": ("parallel-left", """
        L = T.alloc_local((2,), 'int32')
        for i in T.Parallel(64):
            L[0] = A[i]
        O[tx] = L[0]"""),
    "a variable read behind the loop": ("parallel-left", """
        v = T.alloc_var('int32', init=0)
        for i in T.Parallel(64):
            v = A[i]
            O[i] = v
        if tx == 0:
            v = 1
        O[tx] = v"""),
    "a variable read in the next turn": ("parallel-left", """
        v = T.alloc_var('int32', init=0)
        for k in T.serial(A[0]):
            O[tx] = v
            for i in T.Parallel(64):
                v = A[i]
                O[i] = v"""),
    "copied behind the loop": ("parallel-left", """
        L = T.alloc_local((2,), 'int32')
        for i in T.Parallel(64):
            L[0] = A[i]
        T.copy(L, O[tx * 2:tx * 2 + 2])"""),
    "threads that have returned": ("collective-divergent", "if tx >= 16:\n    T.thread_return()\n" + LOOP + "O[i] = A[i]"),
    "threads that return from a loop": ("collective-divergent", """
        for k in T.serial(4):
            for i in T.Parallel(64):
                O[i] = A[i] + k
            if tx == k:
                T.thread_return()"""),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_depends_on_who_runs_an_iteration_is_refused_everywhere(name):
    """A GPU gave a result of the chosen layout, and the other executions another one or a refusal of their own."""
    kind, body = REFUSED[name]
    with pytest.raises(TileLangError) as e:
        legalized(program(body).func)
    assert e.value.kind == kind and e.value.span is not None and e.value.hint, str(e.value)


ONE = {
    "a temporary": ("""
        L = T.alloc_local((2,), 'int32')
        v = T.alloc_var('int32', init=0)
        v = A[tx]
        O[tx] = v
        for i in T.Parallel(64):
            L[0] = A[i]
            L[1] = L[0] * 2
            v = L[1]
            O[i] = v + L[0]
        v = A[tx]
        L[0] = v
        O[tx] = O[tx] + L[0] + v - v - A[tx]
        """, A64 * 3),
    "an array in loops": ("""
        L = T.alloc_local((4,), 'int32')
        for i in T.Parallel(64):
            v = T.alloc_var('int32', init=0)
            for k in T.serial(4):
                if A[i] % 2 == 0:
                    L[k] = A[i]
                else:
                    L[k] = 1
                if L[k] > 40:
                    continue
                v += L[k] * k
            m = A[i] % 4
            v += L[m]
            O[i] = v
        """, np.where(A64 % 2 == 0, np.where(A64 > 40, 0, A64) * 6 + A64, 7)),
    "an array filled as a tile": ("""
        L = T.alloc_local((4,), 'int32')
        for k in T.serial(4):
            L[k] = k * 10
        for i in T.Parallel(64):
            O[i] = A[i] + L[2]
        T.clear(L)
        for i in T.Parallel(64):
            m = A[i] % 4
            O[i] += L[3] + L[m]
        """, A64 + 20),
    "elements that the loop leaves alone": ("""
        L = T.alloc_local((2,), 'int32')
        L[0] = 5
        for i in T.Parallel(64):
            L[1] = A[i]
            O[i] = L[1] + L[0]
        """, A64 + 5),
    "a counter": ("""
        k = T.alloc_var('int32', init=0)
        while k < 3:
            for i in T.Parallel(64):
                O[i] += A[i] * k
            k += 1
            if A[0] > 100:
                break
        """, A64 * 3),
    "what threads stored before": ("""
        v = T.alloc_var('int32', init=0)
        v = tx
        O[tx] = v
        v = A[1]
        for i in T.Parallel(64):
            O[i] = A[i] + v
        """, A64 + 4),
}


@pytest.mark.parametrize("name", ONE)
def test_private_memory_of_one_meaning(name):
    body, want = ONE[name]
    assert np.array_equal(everywhere(program(body), A64, on=WITH_HOPPER)[1], want)


def test_what_lanes_of_the_only_warp_agree_on():
    """Sums and votes of one warp are one value; of several warps they are not."""
    body = """
        v = T.alloc_var('int32', init=0)
        v = A[tx]
        for k in T.unroll(5):
            v = v + T.shfl_xor(v, 16 >> k)
        w = T.shfl_sync(A[tx], 3)
        for i in T.Parallel(64):
            O[i] = v + w
    """
    want = np.full(64, A64[:32].sum() + A64[3])
    assert np.array_equal(everywhere(program(body), A64, on=WITH_HOPPER)[1], want)
    with pytest.raises(TileLangError) as e:
        legalized(program(body, threads=64).func)
    assert e.value.kind == "parallel-thread"


def test_a_line_printed_in_a_parallel_loop_may_name_the_thread(capfd):
    """The tile meaning refused T.print there."""
    f = program("for i in T.Parallel(2):\n    T.print(A[i])\n    O[i] = A[i]")
    assert everywhere(f, A64)[1][:3].tolist() == [1, 4, 0]


def test_roles_have_values_of_their_own():
    @T.prim_func
    def f(A: T.Tensor((256,), "int32"), O: T.Tensor((256,), "int32")):
        with T.Kernel(1, threads=256):
            n = T.alloc_var("int32", init=0)
            with T.ws(0):
                n = 5
                for i in T.Parallel(128):
                    O[i] = A[i] + n
            with T.ws(1):
                n = A[0]
                for i in T.Parallel(128):
                    O[i + 128] = A[i + 128] + n
            with T.ws(0):
                for i in T.Parallel(64):
                    O[i] = O[i] + n

    a = np.arange(256, dtype=np.int32) + 1
    want = a + np.where(np.arange(256) < 64, 10, np.where(np.arange(256) < 128, 5, 1))
    assert np.array_equal(everywhere(f, a, on=WITH_HOPPER)[1], want)


def test_values_by_element():
    f = program("L = T.alloc_local((4,), 'int32')\nL[1] = tx\nO[tx] = L[0]")
    (launch,) = [x for x in walk(f.func) if isinstance(x, Launch)]
    at = Values(launch, (0,))
    tx = launch.thread_vars[0]
    assert at.varies(tx + 1) and not at.varies(tx // 32) and not at.varies(tx - tx)
    buffer = next(x.buffer for x in walk(launch.body) if type(x).__name__ == "Alloc")
    at.begin(buffer, 0)
    at.put(buffer, 1, VARIES)
    assert [at.bits(buffer, (T.int32(k),)) for k in range(4)] == [0, VARIES, 0, 0]
    assert at.bits(buffer, (tx,)) == VARIES


def test_programs_without_private_values_are_passed_over():
    from tilelang.transform.check.check_private import check_private

    f = program("T.copy(A, O)")
    assert check_private(f.func, PassContext()) is f.func
