"""spec-status.md says what the tests show: every mark names a row, every row of tiers A and B has a test or is listed."""

import outcomes
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


def test_the_outcome_of_every_marked_test_is_recorded():
    s = spec_status.status()
    late = sorted({t.id for t in s.unrecorded if t.daily})
    assert not late, f"run {outcomes.RENEW} {' '.join(sorted({'tests/' + t.partition('::')[0] for t in late}))}"
    assert not s.stale, f"tests that are gone or name no row: run {outcomes.RENEW} tests/spec/test_spec_status.py"


def test_what_must_be_refused_was_refused_and_what_must_be_computed_ran():
    s = spec_status.status()
    for row, (outcome, _) in s.musts.items():
        assert outcome in ("computed", "refused", "either"), row
        runs = {e for t in s.shown[row] if t.daily for e in t.executions}
        if outcome == "refused":
            assert "refusal" in runs, row
        elif row.startswith("M:"):
            assert "cpu" in runs and runs & {"simulator", "cuda", "printed"}, (row, runs)


def test_marks_and_recorded_executions_make_the_rows(tmp_path):
    (tmp_path / "test_x.py").write_text("""
import pytest

@pytest.mark.spec("L5:ptr", "T.copy")
@pytest.mark.gpu
def test_a():
    pass

@pytest.mark.spec("L5:ptr", "no:row")
def test_b():
    pass

@pytest.mark.spec("L5:ptr")
def test_c():
    pass

def test_d():
    pass
""")
    files = {"cpu": tmp_path / "cpu.json", "gpu": tmp_path / "gpu.json"}
    files["cpu"].write_text(outcomes.text_of(outcomes.Outcomes({
        "test_x.py::test_b": {"[1]": "tile cpu", "[2]": "tile simulator refusal"}, "test_x.py::test_d": {"": "tile"}})))
    files["gpu"].write_text(outcomes.text_of(outcomes.Outcomes({"test_x.py::test_a": {"": "gpu"}},
                                                               {"device": "a GPU", "date": "2001-02-03"})))
    s = spec_status.status(tmp_path, files)
    a, b, c = s.shown["L5:ptr"]
    assert not a.daily and b.daily and a.executions == ("gpu",) and b.executions == ("tile", "simulator", "cpu", "refusal")
    assert [t.id for t in s.unrecorded] == [c.id] and s.stale == ["test_x.py::test_d"]
    assert s.unknown == ["test_x.py::test_b: no:row"]
    assert s.narrow() == {"T.copy": ["tile", "simulator", "cpu"]}
    text = spec_status.render(s)
    assert "a GPU, 2001-02-03" in text and "tile, simulator, CPU, GPU, refusal" in text
    assert "`test_x.py::test_b` TSCR" in text and "`test_x.py::test_c` not recorded" in text
