"""Maxima of floats in registers as integers, three at a time: the text, read as a program."""

import re

import numpy as np
import pytest

from tilelang.codegen.own_registers import LEAST_THREES, largest_of_threes


def answer(text, start, values):
    """(the integers' maximum as a float32, whether the warp does the other branch) of one thread."""
    asm, condition = re.search(r'asm volatile\("(.*?)"', text).group(1), re.search(r"m > (\w+)u\)", text).group(1)
    at = {"%0": None, "%1": np.float32(start).view(np.int32), **{f"r{i}": x for i, x in enumerate(values.view(np.int32))}}
    for line in asm.replace("\\n", "\n").splitlines():
        op, _, rest = line.strip("{};").partition(" ")
        names = rest.split(", ")
        if op == "mov.b32":
            at[names[0]] = at[names[1]]
        elif op == "max.s32":
            at[names[0]] = max(at[names[1]], at[names[2]])
        else:
            assert op in ("", ".reg"), line
    m = np.int32(at["%0"])
    return m.view(np.float32), int(m.view(np.uint32)) > int(condition, 16)


def floats(rng, n, kind):
    x = rng.standard_normal(n).astype(np.float32) * np.float32(10.0) ** rng.integers(-30, 30, n).astype(np.float32)
    if kind == "negative":
        x = -np.abs(x)
    if kind == "special":
        x[rng.integers(0, n, 5)] = rng.choice(np.float32([np.inf, -np.inf, 0.0, -0.0, np.nan, -np.nan]), 5)
    return x


@pytest.mark.parametrize("n", [LEAST_THREES, 17, 32, 36, 43])
@pytest.mark.parametrize("kind", ["any", "negative", "special"])
def test_a_warp_that_keeps_the_integers_has_the_largest_float(n, kind):
    rng = np.random.default_rng(n)
    text = largest_of_threes([f"r{i}" for i in range(n)], "floats();")
    kept = 0
    for k in range(400):
        x = floats(rng, n, kind)
        start = [-np.inf, 1.0, -1.0][k % 3]
        got, other = answer(text, start, x)
        if not other:
            want = np.fmax.reduce(x, initial=np.float32(start))
            assert got == want or (np.isnan(got) and np.isnan(want)), (got, want)
            kept += 1
    assert kept > 100 if kind != "negative" else kept >= 400 // 3


def test_all_with_a_sign_and_nan_take_the_other_branch():
    text = largest_of_threes([f"r{i}" for i in range(32)], "floats();")
    x = -np.ones(32, np.float32)
    assert answer(text, -np.inf, x)[1] and not answer(text, 0.0, x)[1]
    x[7] = np.nan
    assert answer(text, 2.0, np.abs(x))[1] and "floats();" in text
