"""Tracing of whole programs: what statements become."""

import tilelang.language as T
from tilelang.ir import For, Launch, Parallel, stmts_of, walk
from tilelang.ops import Copy, Fill, Gemm, Scan, Transpose


def gemm(M, N, K, bm=64, bn=64, bk=32, dtype="float16", accum="float", stages=3):
    @T.prim_func
    def main(A: T.Tensor((M, K), dtype), B: T.Tensor((K, N), dtype), C: T.Tensor((M, N), dtype)):
        with T.Kernel(T.ceildiv(N, bn), T.ceildiv(M, bm), threads=128) as (bx, by):
            A_shared = T.alloc_shared((bm, bk), dtype)
            B_shared = T.alloc_shared((bk, bn), dtype)
            C_local = T.alloc_fragment((bm, bn), accum)
            T.clear(C_local)
            for k in T.Pipelined(T.ceildiv(K, bk), num_stages=stages):
                T.copy(A[by * bm, k * bk], A_shared)
                T.copy(B[k * bk, bx * bn], B_shared)
                T.gemm(A_shared, B_shared, C_local)
            for i, j in T.Parallel(bm, bn):
                C_local[i, j] = T.max(C_local[i, j], 0)
            T.copy(C_local, C[by * bm, bx * bn])

    return main


def ops_of(f, kind):
    return [n for n in walk(f.func.body) if isinstance(n, kind)]


def test_gemm_becomes_launch_loop_and_tile_ops():
    f = gemm(200, 96, 100)
    (launch,) = stmts_of(f.body)
    assert isinstance(launch, Launch) and launch.threads == (128, 1, 1)
    assert [int(g.value) for g in launch.grid] == [2, 4]
    (loop,) = ops_of(f, For)
    assert loop.kind == "pipelined" and loop.plan.num_stages == 3 and int(loop.extent.value) == 4
    assert [len(ops_of(f, t)) for t in (Copy, Fill, Gemm, Parallel)] == [3, 1, 1, 1]
    first = ops_of(f, Copy)[0]
    assert first.src.extents == (64, 32) and first.dst.is_full
    assert first.dst.buffer.name == "A_shared"


def test_params_follow_the_signature():
    f = gemm(64, 64, 64)
    assert [p.name for p in f.params] == ["A_handle", "B_handle", "C_handle"]
    assert [b.name for b in f.buffer_map.values()] == ["A", "B", "C"]
    assert f.attrs["global_symbol"] == "main"


def test_spans_point_at_the_statement():
    f = gemm(64, 64, 64)
    (g,) = ops_of(f, Gemm)
    line = open(__file__).read().splitlines()[g.span.line - 1]
    assert line[g.span.col:g.span.end_col] == "T.gemm(A_shared, B_shared, C_local)"
    assert g.span.file == __file__ and g.span.function == "main"


def test_scan_and_transpose_are_ops():
    @T.prim_func
    def f(A: T.Tensor((32, 16), "float32")):
        with T.Kernel(1):
            S = T.alloc_shared((32, 16), "float32")
            R = T.alloc_shared((16, 32), "float32")
            T.copy(A, S)
            T.cumsum(S, dim=-1, reverse=True)
            T.transpose(S, R)

    (scan,) = ops_of(f, Scan)
    assert scan.dim == 1 and scan.reverse and scan.src.buffer is scan.dst.buffer
    (tr,) = ops_of(f, Transpose)
    assert tr.dst.extents == (16, 32)
    assert [a.mode for a in scan.accesses() + tr.accesses()] == ["readwrite", "read", "write"]
