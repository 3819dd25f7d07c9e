"""The pass join_wgmmas: wgmma of one k-block become one asm."""

import pytest

import tilelang.language as T
from tilelang.codegen.cuda import print_kernel
from tilelang.ir import FALSE, TRUE, Call, Evaluate, Seq, to_text, walk, with_options
from tilelang.ir import replace as replaced
from tilelang.target import Target
from tilelang.transform.pipeline import lower
from tilelang.transform.registers.join_wgmmas import MOST, _runs

SM90 = Target({"kind": "cuda", "arch": "sm_90a"})


def kernel_of(k=64):
    @T.prim_func
    def main(A: T.Tensor((64, 256), "float16"), B: T.Tensor((256, 64), "float16"), C: T.Tensor((64, 64), "float32")):
        with T.Kernel(1, threads=128) as _:
            a, b = T.alloc_shared((64, k), "float16"), T.alloc_shared((k, 64), "float16")
            c = T.alloc_fragment((64, 64), "float32")
            T.clear(c)
            for ko in T.Pipelined(256 // k, num_stages=2):
                T.copy(A[0, ko * k], a)
                T.copy(B[ko * k, 0], b)
                T.gemm(a, b, c)
            T.copy(c, C)

    return lower(main.func, SM90, {"tl.resize_blocks": False}).kernels[0]


def wgmmas(s):
    return [c for c in walk(s, Call) if c.op == "wgmma"]


@pytest.mark.parametrize("k, count", [(64, 4), (16, 1)])
def test_wgmmas_of_a_k_block_are_one_asm(k, count):
    kernel = kernel_of(k)
    assert [c.options.joined for c in wgmmas(kernel.launch)] == [False, *[True] * (count - 1)]
    assert (f"_ss_km_x{count}_" in print_kernel(kernel)) or count == 1


def test_the_marks_stand_in_the_text():
    text = to_text(kernel_of().launch)
    assert text.count("joined=True") == 3


def _sequence(calls):
    return Seq(tuple(Evaluate(c) for c in calls))


def test_another_accumulator_or_a_cleared_one_starts_an_asm():
    first, *_ = wgmmas(kernel_of().launch)
    first = with_options(first, joined=False, based=False)
    kept = replaced(first, args=(*first.args[:3], TRUE, *first.args[4:]))
    assert [len(r) for r in _runs(_sequence([kept] * (MOST + 1)).stmts)] == [MOST, 1]
    cleared = replaced(first, args=(*first.args[:3], FALSE, *first.args[4:]))
    assert [len(r) for r in _runs(_sequence([kept, cleared, kept]).stmts)] == [1, 2]
    other = with_options(kept, a_major="mn")
    assert [len(r) for r in _runs(_sequence([kept, other, kept]).stmts)] == [1, 1, 1]
