"""Maxima of floats in registers as integers, three at a time: the text, read as a program."""

import re

import numpy as np
import pytest

from tilelang.codegen.cuda.register_loops import largest_of_threes
from tilelang.target.register_forms import MIN_INTEGER


def answer(text, starts, rows):
    """([the integers' maximum of a row as a float32], whether the warp does the other branch) of one thread."""
    found = []
    for number, (start, values) in enumerate(zip(starts, rows)):
        asm = re.search(rf'int m{number}; asm volatile\("(.*?)"', text).group(1)
        at = {"%1": np.float32(start).view(np.int32), **{f"r{number}_{i}": x for i, x in enumerate(values.view(np.int32))}}
        for line in asm.replace("\\n", "\n").splitlines():
            op, _, rest = line.strip("{};").partition(" ")
            names = rest.split(", ")
            if op == "mov.b32":
                at[names[0]] = at[names[1]]
            elif op == "max.s32":
                at[names[0]] = max(at[names[1]], at[names[2]])
            else:
                assert op in ("", ".reg"), line
        found.append(np.int32(at["%0"]))
    looked = re.findall(r"\(unsigned\)m(\d+) > (\w+)u", text)
    assert len(looked) == len(rows)
    return [m.view(np.float32) for m in found], any(int(found[int(i)].view(np.uint32)) > int(most, 16) for i, most in looked)


def floats(rng, n, kind):
    x = rng.standard_normal(n).astype(np.float32) * np.float32(10.0) ** rng.integers(-30, 30, n).astype(np.float32)
    if kind == "negative":
        x = -np.abs(x)
    if kind == "special":
        x[rng.integers(0, n, 5)] = rng.choice(np.float32([np.inf, -np.inf, 0.0, -0.0, np.nan, -np.nan]), 5)
    return x


def text_of(rows, n):
    return largest_of_threes([[f"r{row}_{i}" for i in range(n)] for row in range(rows)], lambda points: ["floats;"])


@pytest.mark.parametrize("n", [MIN_INTEGER, 17, 32, 36, 43])
@pytest.mark.parametrize("kind", ["any", "negative", "special"])
def test_a_warp_that_keeps_the_integers_has_the_largest_float(n, kind):
    rng = np.random.default_rng(n)
    text = text_of(2, n)
    kept = 0
    for k in range(400):
        rows = [floats(rng, n, kind) for _ in range(2)]
        starts = [-np.inf, 1.0, -1.0][k % 3], [2.0, -np.inf][k // 3 % 2]
        got, other = answer(text, starts, rows)
        if not other:
            want = [np.fmax.reduce(x, initial=np.float32(start)) for x, start in zip(rows, starts)]
            assert got == want, (got, want)
            kept += 1
    assert kept >= 60


def test_all_with_a_sign_and_nan_take_the_other_branch():
    text, x = text_of(1, 32), -np.ones(32, np.float32)
    assert answer(text, [-np.inf], [x])[1] and not answer(text, [0.0], [x])[1]
    x[7] = np.nan
    assert answer(text, [2.0], [np.abs(x)])[1] and "floats;" in text
    assert answer(text_of(2, 32), [0.0, -np.inf], [-np.ones(32, np.float32)] * 2)[1]
