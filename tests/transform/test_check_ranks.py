"""check_ranks: missing and late signals that the compiler sees, and programs that only look like them."""

import pytest

import tilelang.language as T
from tilelang.errors import TileLangError
from tilelang.target import Target
from tilelang.transform.pipeline import lower


def program(before=None, between=None, after=None, source=0, rank=1, read=True):
    @T.prim_func
    def main(X: T.Tensor((256,), "float32"), S: T.SymmTensor((256,), "float32"), F: T.SymmTensor((2,), "int64"),
             P: T.SymmTensor((1, 16), "int64"), Y: T.Tensor((128,), "float32")):
        with T.Kernel(1, threads=64):
            if before:
                before(F, P)
            T.copy(X[0:128], T.remote(S, (T.get_rank() + rank) % T.get_num_ranks() if rank else T.get_rank())[0:128])
            if between:
                between(F, P)
            if read:
                T.copy(S[source:source + 128], Y)
            if after:
                after(F, P)

    return main


def verdict(p):
    try:
        lower(p.func, Target({"kind": "cuda", "arch": "sm_90a"}))
    except TileLangError as e:
        return e.kind, str(e)
    return "", ""


def signal(F, P):
    T.signal(F[0], rank=1)


def wait(F, P):
    T.wait_ge(F[0], 1)


def both(F, P):
    T.signal(F[0], rank=1)
    T.wait_ge(F[0], 1)


def meet(F, P):
    T.barrier_all(P[0, 0:16])


@pytest.mark.parametrize("case, text", [
    (dict(), "nothing is waited for before this read"), (dict(between=signal), "nothing is waited for before this read"),
    (dict(between=wait), "no signal follows this store"), (dict(before=signal, between=wait), "no signal follows this store")])
def test_a_signal_or_a_wait_that_is_missing_is_found_at_its_line(case, text):
    kind, said = verdict(program(**case))
    assert kind == "rank-order" and text in said
    assert ("T.copy(X[0:128]" if "store" in text.split()[-1] else "T.copy(S[source") in said.splitlines()[2]


@pytest.mark.parametrize("case", [
    dict(between=both), dict(between=meet), dict(source=128), dict(rank=0), dict(read=False), dict(before=wait, between=signal),
    dict(between=wait, after=signal)])
def test_what_only_looks_like_one_is_compiled(case):
    assert verdict(program(**case)) == ("", "")


def test_branches_of_ranks_exclude_each_other():
    @T.prim_func
    def main(X: T.Tensor((128,), "float32"), S: T.SymmTensor((128,), "float32"), F: T.SymmTensor((1,), "int64"),
             Y: T.Tensor((128,), "float32")):
        with T.Kernel(1, threads=64):
            if T.get_rank() == 0:
                T.copy(X, T.remote(S, 1))
                T.signal(F[0], rank=1)
            else:
                T.wait_ge(F[0], 1)
                T.copy(S, Y)

    assert verdict(main) == ("", "")


def test_a_signal_of_the_iteration_before_counts():
    @T.prim_func
    def main(X: T.Tensor((128,), "float32"), S: T.SymmTensor((128,), "float32"), F: T.SymmTensor((1,), "int64"),
             Y: T.Tensor((128,), "float32")):
        with T.Kernel(1, threads=64):
            for k in T.serial(4):
                T.signal(F[0], rank=1 - T.get_rank())
                T.wait_ge(F[0], k + 1)
                T.copy(X, T.remote(S, 1 - T.get_rank()))
                T.copy(S, Y)

    assert verdict(main) == ("", "")
