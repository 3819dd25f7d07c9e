"""The tables of hardware figures, and that there are no others."""

import ast
import math
import pathlib

import pytest

import tilelang
from tilelang.target.machine import CHIPS, KERNEL_RATES, LIMITS, chip_of, kernel_rates, nearest_chip

PACKAGE = pathlib.Path(tilelang.__file__).parent
OTHER_NUMBERS = {"machine.py", "cuda_driver.py"}  # the table; numbers of the driver's attributes
SM_COUNTS = {c.sm_count for c in CHIPS} - {128}  # 128 is a size of tiles and warp groups too


def rates_in(tree):
    """Lines with a number that is a rate of a chip: of 1e9 and more a second, or a count of SMs.

    Powers of ten are units; numbers from 1e16 on stand for infinity.
    """
    for n in ast.walk(tree):
        if isinstance(n, ast.Constant) and isinstance(n.value, (int, float)) and not isinstance(n.value, bool):
            v = abs(n.value)
            rate = isinstance(v, float) and 1e9 <= v < 1e16 and math.log10(v) != round(math.log10(v))
            if rate or v in SM_COUNTS:
                yield n.lineno


def test_rates_of_chips_stand_in_one_table():
    wrong = [f"{p.relative_to(PACKAGE)}:{line}" for p in sorted(PACKAGE.rglob("*.py")) if p.name not in OTHER_NUMBERS
             for line in rates_in(ast.parse(p.read_text(encoding="utf-8")))]
    assert not wrong, "numbers of chips belong in target/machine.py: " + ", ".join(wrong)


def test_the_search_finds_rates():
    assert list(rates_in(ast.parse("a = 1.98e9\nb = 132\nc = 1e12\nd = 1e30\ne = 4096\nf = 2.5"))) == [1, 2]


@pytest.mark.parametrize("capability, mma", [(75, 1024), (80, 2048), (86, 2048), (90, 2540), (100, 2048)])
def test_rates_of_mma_sync(capability, mma):
    assert kernel_rates("mma", capability).mma == mma


def test_kernels_do_not_exceed_the_peak_of_their_chip():
    for kind, capability in (("wgmma", 90), ("mma", 80)):
        chip, rates = chip_of(capability), KERNEL_RATES[kind]
        assert rates.sm_count == chip.sm_count and rates.bandwidth <= chip.bandwidth
        assert rates.mma * rates.sm_count * chip.clock <= 1.01 * chip.peak(16, True)


def test_every_chip_has_limits_and_is_the_nearest_of_its_capability():
    for c in CHIPS:
        assert c.capability in LIMITS and nearest_chip(c.capability).capability == c.capability
