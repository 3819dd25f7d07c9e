"""Every public callable of tilelang.language with any arguments: refused by name at the user's line, or meant."""

import inspect
import random

import pytest
from test_bad_programs import ODD, outcome, spoil

import tilelang.language as T

GOOD = ["X", "X2", "S", "Q", "F", "R", "H", "C", "I", "J", "N", "B", "B[0]", "X[0, 0]", "I[0]", "I[tx]", "S[0, 0]", "F[0, 0]",
        "X[0:16, 0:16]", "I[0:4]", "S[0, 0:2]", "1", "2", "16", "32", "128", "0.5", "'float32'", "'int32'", "'float16'",
        "(4, 4)", "(16,)", "tx", "bx", "X[0, 0] > 0", "T.int32(3)", "T.float16(1)", "'r'", "'sum'", "S.data", "{}", "[0]",
        "lambda i, j: i * 16 + j"]
POOL = GOOD + ODD
FORMS = ("{call}", "v = {call}", "X[0, 0] = {call}", "I[0] = {call}", "with {call} as v: X[0, 0] = 1.0",
         "for v in {call}: X[0, 0] = 1.0", "if {call}: X[0, 0] = 1.0")
NAMES = sorted(n for n in dir(T) if n[0] != "_" and callable(getattr(T, n)))


def parameters(name):
    """(most positional arguments, names of parameters)."""
    try:
        ps = inspect.signature(getattr(T, name)).parameters.values()
    except (TypeError, ValueError):
        return 3, []
    many = any(p.kind is p.VAR_POSITIONAL for p in ps)
    named = [p.name for p in ps if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    return len(named) + 3 * many, named


def statement(rng, name):
    """A statement that calls the name: arguments drawn from the pool, a few too many or too few, some by keyword."""
    most, named = parameters(name)
    n = max(0, min(rng.choice((most, most, rng.randint(0, most), most + 1)), 8))
    args = [rng.choice(POOL if rng.random() < 0.5 else GOOD) for _ in range(n)]
    by_name = {}
    for _ in range(rng.choice((0, 0, 1, 2))):
        key = rng.choice([*named, "nothing"])
        if key not in named[:n]:
            by_name[key] = rng.choice(POOL)
    text = ", ".join(args + [f"{k}={v}" for k, v in by_name.items()])
    return rng.choice(FORMS).format(call=f"T.{name}({text})")


def refusals_and_meanings(name, count, seed):
    """Calls of a name with anything; what is meant is spoilt further in one place."""
    rng, meant = random.Random(f"{name} {seed}"), []
    for k in range(count):
        text = spoil(rng, rng.choice(meant)) if meant and rng.random() < 0.6 else statement(rng, name)
        if outcome(text, f"<{name} {seed} {k}>") == "meant":
            meant.append(text)


@pytest.mark.parametrize("part", range(4))
def test_names_called_with_anything(part):
    for name in NAMES[part::4]:
        refusals_and_meanings(name, 2, "always")


@pytest.mark.slow
@pytest.mark.parametrize("part", range(8))
def test_names_called_with_anything_often(part):
    for name in NAMES[part::8]:
        refusals_and_meanings(name, 100, "often")
