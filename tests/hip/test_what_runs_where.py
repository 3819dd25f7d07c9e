"""The page about what runs where says what is recorded, and nothing recorded is wrong."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import amd_page as page
import amd_record as record



def test_the_page_is_that_of_the_record():
    assert page.PAGE.read_text(encoding="utf-8") == page.text(), "run python tests/hip/amd_page.py"


def test_no_program_is_recorded_as_wrong():
    programs = record.read()["programs"]
    assert len(programs) >= 120
    assert not [(n, where) for n, p in programs.items() for where, x in p.items() if x.startswith("wrong")]
    for chip in record.CHIPS:
        assert sum(p.get(f"{chip} simulated") == "right" for p in programs.values()) >= 100
        assert sum(p.get(f"{chip} interpreted", "").startswith("right") for p in programs.values()) >= 100


def test_every_example_is_recorded_as_right_and_assembled():
    from checks import CHECKS

    found = record.read()["examples"]
    assert sorted(found) == sorted(f"{n} {c.file} {c.function}" for n, c in enumerate(CHECKS) if not c.hopper)
    assert {what for entry in found.values() for what in entry.values()} == {"assembled", "right"}
