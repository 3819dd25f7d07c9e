"""The verifier refutes every mutant of a kernel's synchronisation that the device simulator finds faulty."""

import pytest
from sync_mutants import KERNELS, corpus, judge, lowered, mutants

from tilelang.ir import Launch, rewrite, walk
from tilelang.transform.verify_sync.launch import check_launch

QUICK = ("gemm of one stage", "gemm of three stages", "softmax", "row_reduce", "transpose", "scatter", "waits by hand",
         "named barriers")


@pytest.mark.parametrize("name", QUICK)
def test_faulty_mutants_are_refuted(name):
    """It cleared two of four dropped barriers around a scatter, and waits for more groups than were pending."""
    rows = judge(name)
    assert rows and any(faulty for _, faulty, *_ in rows)
    for mutation, faulty, refuted, certain, span in rows:
        assert refuted or not faulty, (mutation, span)
        assert faulty or not certain, (mutation, span)


def test_faulty_mutants_of_a_ring_are_refuted():
    """Every third one; python tests/transform/sync_mutants.py looks at all of all kernels."""
    rows = judge("ring by hand", lambda k: k % 3 == 0)
    assert len(rows) > 10 and sum(faulty for _, faulty, *_ in rows) > 5
    assert [row for row in rows if row[1] and not row[2]] == []


def test_a_fault_that_needs_the_longest_loop_is_refuted():
    """Loops of at most four iterations were followed for 0 to 3: two mbarriers that wait for an arrival too many passed."""
    arch, program, config = KERNELS["hopper causal attention"]
    func = lowered(arch, program(), config)
    found = [check_launch(next(walk(rewrite(func, lambda n, s=s, other=other: other if n is s else None).body, Launch)))[0]
             for mutation, s, other in mutants(next(walk(func.body, Launch))) if mutation == "mbarrier_init +1"]
    assert len(found) == 9 and all(text.startswith("not cleared: the block comes to a standstill") for text in found)


def plain_mutants_are_refuted(name, every, turn):
    pytest.importorskip("torch")
    for mutation, faulty, refuted, _, span in judge(name, lambda k: k % every == turn):
        assert refuted or not faulty, (mutation, span)


@pytest.mark.parametrize("turn, name", list(enumerate((
    "attention causal", "gemm bf16", "packed sequences", "retention"))))
def test_faulty_mutants_of_plain_programs_are_refuted(turn, name):
    plain_mutants_are_refuted(name, 16, turn)


@pytest.mark.slow
@pytest.mark.parametrize("turn, name", list(enumerate(corpus())))
def test_faulty_mutants_of_all_plain_programs_are_refuted(turn, name):
    """python tests/transform/sync_mutants.py --plain looks at all of them."""
    plain_mutants_are_refuted(name, 4, turn % 4)


def test_there_are_fourteen_kernels():
    assert len(KERNELS) == 14 and set(QUICK) < set(KERNELS)
