"""Divergent branches in which threads communicate become statements under masks."""

from planned import text_of

import tilelang.language as T


def test_a_branch_that_reads_what_it_writes_is_split():
    @T.prim_func
    def main(B: T.Tensor((64,), "int32")):
        with T.Kernel(1, threads=64):
            tx = T.get_thread_binding()
            s = T.alloc_shared((64,), "int32")
            s[tx] = tx
            if tx < 32:
                s[63 - tx] = s[tx] + 1
            B[tx] = s[tx]

    text = text_of(main)
    steps = ("then[0] = (tx < 32)", "moved_s: T.int32 = (s[tx] + 1)", "s[(63 - tx)] = moved_s")
    assert sorted(steps, key=text.index) == list(steps)
    assert text.count("with Masked(mask=then[0], only_returned_absent=False, live=None):") == 2
    assert "if (tx < 32)" not in text


def test_a_branch_of_disjoint_elements_stays_whole():
    @T.prim_func
    def main(B: T.Tensor((64,), "int32")):
        with T.Kernel(1, threads=64):
            tx = T.get_thread_binding()
            s = T.alloc_shared((64, 4), "int32")
            if tx < 32:
                for j in range(4):
                    s[tx, j] = j
            B[tx] = s[tx, 0]

    text = text_of(main)
    assert "Masked" not in text
    assert text.startswith("with ThreadLoop():\n    if (tx < 32):\n        for j in")


def test_barriers_do_not_wait_for_threads_that_returned():
    @T.prim_func
    def main(B: T.Tensor((64,), "int32")):
        with T.Kernel(1, threads=64):
            tx = T.get_thread_binding()
            if tx >= 32:
                T.thread_return()
            T.sync_threads()
            B[tx] = 1

    text = text_of(main)
    assert "live[0] = False" in text
    assert "with Masked(mask=live[0], only_returned_absent=True, live=None):\n        B[tx] = 1" in text
    assert '\nT.evaluate(T.call("sync_threads", "void"))' in text
