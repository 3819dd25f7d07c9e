"""The pass launch_host_statements: statements outside of T.Kernel become launches of one thread."""

from planned import planned_body

import tilelang.language as T
from tilelang.ir import Seq
from tilelang.target.cpu_launch import CpuLaunch


def test_a_store_outside_of_a_kernel_is_a_launch():
    @T.prim_func
    def main(A: T.Tensor((4,), "float32"), B: T.Tensor((4,), "float32")):
        B[0] = A[0] + 1.0
        with T.Kernel(2, threads=32):
            T.copy(A, B)

    body = planned_body(main)
    assert isinstance(body, Seq) and [type(s) for s in body.stmts] == [CpuLaunch, CpuLaunch]
    assert [s.launch.num_threads for s in body.stmts] == [1, 32]


def test_large_buffers_lie_in_the_arena():
    @T.prim_func
    def main(A: T.Tensor((64, 64), "float32"), B: T.Tensor((8,), "float32")):
        with T.Kernel(1, threads=32):
            big, small = T.alloc_shared((64, 64), "float32"), T.alloc_shared((8,), "float32")
            T.copy(A, big)
            T.copy(big[0, 0:8], small)
            T.copy(small, B)

    assert [(t.buffer.name, t.copies) for t in planned_body(main).slots] == [("big", 1)]
