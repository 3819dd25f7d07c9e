"""T.assume is removed for backends that prove nothing with it."""

import tilelang.language as T
from tilelang.ir import Call, walk
from tilelang.transform.framework.pass_ import PassContext
from tilelang.transform.legalize.drop_assumptions import drop_assumptions


def test_only_assumptions_are_removed():
    @T.prim_func
    def main(A: T.Tensor((64,), "float32"), n: T.int32):
        with T.Kernel(1, threads=32):
            T.assume(n > 3)
            T.sync_threads()
            A[0] = 1.0

    assert "assume" in {c.op for c in walk(main.func.body, Call)}
    assert {c.op for c in walk(drop_assumptions(main.func, PassContext()).body, Call)} == {"sync_threads"}


def test_a_program_without_assumptions_is_unchanged():
    @T.prim_func
    def main(A: T.Tensor((64,), "float32")):
        with T.Kernel(1, threads=32):
            A[0] = 1.0

    assert drop_assumptions(main.func, PassContext()) is main.func
