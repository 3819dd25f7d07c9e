"""Every example agrees with its reference: in small, ragged sizes everywhere, in its own sizes on a GPU."""

import pathlib

import pytest
from checks import CHECKS

from tilelang.transform import PassContext

GENERAL = [c for c in CHECKS if not c.hopper]
IDS = [c.id for c in GENERAL]


def run(example, check, on, sizes):
    results = getattr(example(check.file), check.function)(on=on, **sizes)
    for result in results if isinstance(results, (list, tuple)) else [results]:
        assert result.ok, str(result)


@pytest.mark.parametrize("check", GENERAL, ids=IDS)
def test_agrees_with_reference(example, place, check):
    run(example, check, place, check.small)


@pytest.mark.gpu
@pytest.mark.parametrize("config", [{}, {"tl.enable_hopper": False}], ids=["plain", "no_hopper"])
@pytest.mark.parametrize("check", GENERAL, ids=IDS)
def test_agrees_with_reference_on_gpu(example, gpu, check, config):
    with PassContext(config=config):
        run(example, check, gpu, check.real)


def test_every_kernel_file_is_run():
    """A file is an example when it can be run as a program."""
    examples = pathlib.Path(__file__).resolve().parents[2] / "examples"
    files = {str(p.relative_to(examples)) for p in examples.glob("*/*.py") if "__main__" in p.read_text()}
    assert files == {c.file for c in CHECKS}
    readme = (examples / "README.md").read_text()
    assert [f for f in sorted(files) if f"`{f}`" not in readme] == []


def test_a_wrong_result_ends_the_program_with_status_1():
    """The comparison can fail, and main says so."""
    import harness
    import numpy as np

    def wrong(n: int = 4, on: harness.Place = harness.HERE):
        return harness.compare("wrong", np.zeros(n), np.full(n, np.nan), 1.0)

    with pytest.raises(SystemExit) as ended:
        harness.main(wrong, argv=["--n", "3", "--target", "cpu"])
    assert ended.value.code == 1
    assert harness.compare("shape", np.zeros(3), np.zeros((3, 1)), 1.0).ok is False
    assert harness.compare("one", np.array([0.0, 2.0]), np.zeros(2), np.array([0.0, 1.0])).ok is False
