"""The verifier refutes every mutant of a kernel's synchronisation that the device simulator finds faulty."""

import pytest
from sync_mutants import KERNELS, judge

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


def test_there_are_fourteen_kernels():
    assert len(KERNELS) == 14 and set(QUICK) < set(KERNELS)
