"""Warp groups that run different code: statements and barriers of each warp role."""

from planned import planned_body, text_of

import tilelang.language as T
from tilelang.ir import TileOp, walk


@T.prim_func
def _copied_through(A: T.Tensor((64, 64), "float16"), B: T.Tensor((64, 64), "float16"), C: T.Tensor((64, 64), "float16")):
    with T.Kernel(1, threads=256):
        s, r = T.alloc_shared((64, 64), "float16"), T.alloc_shared((64, 64), "float16")
        bar = T.alloc_barrier(128)
        T.copy(C, r)
        with T.ws(0):
            T.copy(A, s)
            T.barrier_arrive(bar)
        with T.ws(1):
            T.barrier_wait(bar, 0)
            T.copy(s, B)


def test_each_warp_role_has_its_own_statements():
    launch = planned_body(_copied_through)
    assert launch.waits and [c.warp_role.ranges for c in launch.codes] == [((0, 128),), ((128, 256),)]
    first, second = text_of(_copied_through, 0), text_of(_copied_through, 1)
    assert "mbarrier_arrive" in first and "mbarrier_wait" not in first
    assert "mbarrier_wait" in second and "mbarrier_arrive" not in second


def test_a_tile_operation_of_the_block_runs_once():
    launch = planned_body(_copied_through)
    texts = [text_of(_copied_through, k) for k in (0, 1)]
    assert all(t.startswith("with OncePerBlock(barrier=0, arriving=0):") for t in texts)
    assert launch.warp_role_barriers == 1
    assert [sum(1 for _ in walk(c.body, TileOp)) for c in launch.codes] == [2, 2]


def test_a_launch_without_roles_is_no_coroutine():
    @T.prim_func
    def main(A: T.Tensor((64,), "float32"), B: T.Tensor((64,), "float32")):
        with T.Kernel(1, threads=64):
            T.copy(A, B)

    launch = planned_body(main)
    assert not launch.waits and launch.warp_role_barriers == 0 and len(launch.codes) == 1
