"""docs/spec-status.md says what the tests show: every mark names a row, every row of tiers A and B has a test or is listed."""

import spec_status

# Rows and names that no test shows yet.  Take out what has got one; nothing may be added.
OPEN = (HERE := spec_status.HERE / "open.txt").read_text(encoding="utf-8").split()


def test_every_mark_names_a_row_of_the_specification():
    assert not spec_status.status().unknown


def test_every_row_of_the_upper_tiers_has_a_test():
    missing = spec_status.status().missing()
    assert set(missing) <= set(OPEN), f"no test shows {sorted(set(missing) - set(OPEN))}"
    assert set(OPEN) <= set(missing), f"shown now, take them out of {HERE.name}: {sorted(set(OPEN) - set(missing))}"


def test_the_status_is_up_to_date():
    written = spec_status.STATUS.read_text(encoding="utf-8") if spec_status.STATUS.exists() else ""
    assert written == spec_status.render(spec_status.status()), "run python tests/spec/spec_status.py --write"


def test_what_must_be_refused_is_asked_for_and_what_must_be_computed_is_run():
    s = spec_status.status()
    for row, (outcome, _) in s.musts.items():
        assert outcome in ("computed", "refused", "either"), row
        runs = {e for t in s.shown[row] if t.daily for e in t.executions}
        if outcome == "refused":
            assert "refusal" in runs, row
        elif row.startswith("M:"):
            assert "cpu" in runs and runs & {"simulator", "cuda text"}, (row, runs)


def test_executions_are_read_from_the_helpers_a_test_calls(tmp_path):
    (tmp_path / "test_x.py").write_text("""
import pytest

def helper(f):
    everywhere(f)

@pytest.mark.spec("L5:ptr", "T.copy")
@pytest.mark.gpu
def test_a():
    helper(T.copy)

def test_b():
    with pytest.raises(ValueError):
        T.gemm()
""")
    a, b = spec_status.collect(tmp_path)
    assert not a.daily and b.daily
    assert a.rows == ("L5:ptr", "T.copy") and a.executions == ("tile", "simulator", "cpu", "gpu")
    assert b.names == {"gemm"} and b.executions == ("refusal",)
