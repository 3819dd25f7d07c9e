"""Maxima of floats in registers as integers, three at a time: the text, read as a program."""

import re

import numpy as np
import pytest

from tilelang.codegen.cuda.register_loops import largest_of_threes
from tilelang.target.register_forms import MIN_INTEGER


def answer(text, starts, rows):
    """([the maximum of a row by integers as a float32], whether the warp computes it by floats) of one thread."""
    found = []
    for number, (start, values) in enumerate(zip(starts, rows)):
        results = []
        for name, kind in (("m", np.int32), ("n", np.uint32)):
            asm = re.search(rf'int {name}{number}; asm volatile\("(.*?)"', text).group(1)
            at = {"%1": np.float32(start).view(kind), **{f"r{number}_{i}": x for i, x in enumerate(values.view(kind))}}
            for line in asm.replace("\\n", "\n").splitlines():
                op, _, rest = line.strip("{};").partition(" ")
                names = rest.split(", ")
                if op in ("max.s32", "min.u32"):
                    at[names[0]] = (max if name == "m" else min)(at[names[1]], at[names[2]])
                elif op == "mov.b32":
                    at[names[0]] = at[names[1]]
                else:
                    assert op in ("", ".reg"), line
            results.append(at["%0"])
        found.append(results)
    count = len(rows)
    odd, number = (re.findall(pattern, text) for pattern in (r"\(unsigned\)m(\d+) > (\w+)u", r" m(\d+) > (\w+)[ )]"))
    assert len(odd) == count and {k for k, _ in odd} == {k for k, _ in number} and text.count("if (m") == count
    most = int(odd[0][1], 16)
    if not any(int(m.view(np.uint32)) > most for m, _ in found):
        return [m.view(np.float32) for m, _ in found], False
    return [n.view(np.float32) if m < 0 else m.view(np.float32) for m, n in found], any(int(m) > most for m, _ in found)


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


def test_all_with_a_sign_take_the_least_unsigned_and_nan_the_floats():
    text, x = text_of(1, 32), -np.arange(1, 33, dtype=np.float32)
    assert answer(text, [-np.inf], [x]) == ([-1], False) and answer(text, [0.0], [x]) == ([0], False)
    x[7] = -np.nan
    assert answer(text, [-np.inf], [x]) == ([-1], False)
    x[7] = np.nan
    assert answer(text, [2.0], [x])[1] and answer(text, [-2.0], [x])[1] and "floats;" in text
    assert answer(text_of(2, 32), [0.0, -np.inf], [-np.ones(32, np.float32)] * 2) == ([0, -1], False)
