"""`prim_func.script()`: the text form of a program that the specification describes."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import programs

import tilelang.language as T
from tilelang.ir import parse, to_text

WANT = '''\
# from tvm.script import tirx as T

@T.prim_func
def main(A_handle: T.handle, B_handle: T.handle, n: T.int32):
    A = T.match_buffer(A_handle, (16, 8), strides=(8, 1))
    B = T.match_buffer(B_handle, (16, 8), "float16", strides=(8, 1))
    for bx in T.thread_binding(2, thread="blockIdx.x"):
        for tx in T.thread_binding(128, thread="threadIdx.x"):
            for ty in T.thread_binding(1, thread="threadIdx.y"):
                for tz in T.thread_binding(1, thread="threadIdx.z"):
                    with T.sblock("tilelang_root"):
                        T.reads()
                        T.writes()
                        S = T.sblock_alloc_buffer((16, 8), scope="shared.dyn")
                        v = T.sblock_alloc_buffer((1,), scope="local.var")
                        v[0] = T.float32(0.0)
                        T.copy(T.region(A[0, 0], 1, 16, 8), T.region(S[0, 0], 2, 16, 8), coalesced_width=2)
                        v[0] = T.Cast("float32", n)
                        y: T.float32 = (v[0] + T.float32(1.0))
                        for i in T.parallel(16):
                            for j in T.parallel(8):
                                B[i, j] = T.Cast("float16", (S[i, j] + y))
                        for k in range(n):
                            if (k < 3):
                                v[0] = (v[0] + y)'''


@pytest.mark.spec("L23:script", "L2.1:prim_func")
def test_the_script_of_a_program():
    @T.prim_func
    def main(A: T.Tensor((16, 8), "float32"), B: T.Tensor((16, 8), "float16"), n: T.int32):
        with T.Kernel(2, threads=128):
            S = T.alloc_shared((16, 8), "float32")
            v = T.alloc_var("float32")
            T.copy(A, S, coalesced_width=2)
            v = T.Cast("float32", n)
            y = v + 1.0
            for i, j in T.Parallel(16, 8):
                B[i, j] = S[i, j] + y
            for k in range(n):
                if k < 3:
                    v = v + y

    assert main.script() == WANT == str(main) == repr(main)
    assert parse(to_text(main.func)) == main.func  # the form that reads back is another


@pytest.mark.spec("L23:script")
def test_attributes_loops_symbols_and_pieces_of_storage():
    n = T.dynamic("n")

    @T.prim_func
    def main(A: T.Tensor((n, 8), "float32"), B: T.StridedTensor((8, n), (n, 1), "int8")):
        T.func_attr({"tir.noalias": True})
        with T.Kernel(T.ceildiv(n, 4), 2, threads=(32, 2)):
            T.use_swizzle(4)
            F = T.alloc_fragment((8, 8), "float32")
            G = T.reshape(F, (64,))
            T.fill(G, -T.infinity("float32"))
            for k in T.Pipelined(3, num_stages=2):
                for u in T.unroll(1, 4):
                    B[k, u] = 1

    text = main.script()
    for line in ('n = T.dynamic("n", "int32")', "A = T.match_buffer(A_handle, (n, 8), strides=(8, 1))",
                 'B = T.match_buffer(B_handle, (8, n), "int8", strides=(n, 1))', 'T.func_attr({"tir.noalias": True})',
                 'for by in T.thread_binding(2, thread="blockIdx.y"):', 'for ty in T.thread_binding(2, thread="threadIdx.y"):',
                 'for k in T.serial(3, annotations={"num_stages": 2}):', "for u in T.unroll(1, 4):",
                 'T.fill(T.region(G[0], 2, 64), T.float32("-inf"))', 'T.sblock_attr({"swizzle": (4, "row")})'):
        assert line in text, (line, text)


def test_every_program_has_a_script():
    for case in programs.cases():
        text = case.program().script()
        assert "T.thread_binding" in text and "opaque" not in text, case.name
        compile(text, case.name, "exec")  # Python's own grammar
