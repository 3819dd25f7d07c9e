"""Random T.Parallel bodies that read what they store: every execution gives the same, or all refuse the program.

More of them: TILELANG_TEST_PARALLEL_READS=1000 python -m pytest tests/transform/test_random_parallel_reads.py
"""

import os
import random

import numpy as np
import pytest
from everywhere import SM80, SM90A, WITH_HOPPER, run

import tilelang.language as T
from tilelang.errors import TileLangError
from tilelang.target import Target
from tilelang.transform.pipeline import lower

COUNT = int(os.environ.get("TILELANG_TEST_PARALLEL_READS", "12"))
N = 8
REFUSED = ("parallel-order", "parallel-overwrite")


def index(rng, names):
    """An index below N as text, of the loop's variables, a serial variable, a scalar, a block, elements and constants."""
    a, b = rng.choice(names), rng.choice(names)
    return rng.choice([
        a, a, a, a, f"({a} + {rng.randrange(1, N)}) % {N}", f"({a} + {b}) % {N}", f"{N - 1} - {a}",
        f"{a} ^ {rng.randrange(1, N)}", str(rng.randrange(N)), f"P[{a}]", f"P[{rng.randrange(N)}]", f"({a} * 3 + 1) % {N}",
        f"{a} // 2", f"{a} % 4 + 4", f"({a} + k) % 2 * 4 + {b} % 4"])


def condition(rng, names):
    a, b = rng.choice(names), rng.choice(names)
    return rng.choice([f"{a} != {b}", f"{a} < {b}", f"{a} >= {b} + 1", f"{a} % 2 == 0", f"{a} < 4", f"P[{a}] > 3",
                       f"S({index(rng, names)}, {index(rng, names)}) > 0", f"({a} ^ {rng.randrange(1, N)}) > {a}",
                       f"({a} > {b}) & ({rng.choice(names)} != {rng.choice(names)})"])


def body(rng):
    """(loop variables, statements): each a condition or "", the stored row and column, a value."""
    two = rng.random() < 0.6
    own = ["i", "j"] if two else ["i"]
    names = [*own, *own, "k", "n", "b"]
    stores = [("i", "j"), ("i", "j"), ("j", "i"), ("7 - i", "j")] if two else [
        ("i", "n"), ("n", "i"), ("k", "i"), ("i", "k"), ("P[k]", "i"), ("b", "7 - i"), ("(k + 1) % 2", "i"), ("i", "i")]
    out = []
    row, col = rng.choice(stores)
    for _ in range(rng.choice((1, 1, 1, 2))):
        reads = [f"S({index(rng, names)}, {index(rng, names)})" for _ in range(rng.choice((1, 1, 2)))]
        if rng.random() < 0.3:
            reads = [f"S({row}, {col})", reads[0]]
        value = " + ".join([*reads, str(rng.randrange(1, 9))])
        if rng.random() < 0.2:
            value = f"T.if_then_else({condition(rng, names)}, {value}, {rng.choice(reads)} * 2)"
        out.append((condition(rng, names) if rng.random() < 0.4 else "", row, col, value))
    return own, out


def program(own, statements, kind, threads):
    made = [tuple(compile(x, "<index>", "eval") if x else None for x in s) for s in statements]

    @T.prim_func
    def f(A: T.Tensor((2, N, N), "int32"), P: T.Tensor((N,), "int32"), n: T.int32):
        with T.Kernel(2, threads=threads) as b:
            S = T.alloc_shared((N, N), "int32") if kind == "S" else T.alloc_fragment((N, N), "int32")
            if kind != "G":
                T.copy(A[b, 0, 0], S)
            for k in T.serial(3):
                if len(own) == 2:
                    for i, j in T.Parallel(N, N):
                        step(made, A, S, kind, P, n, b, k, i, j)
                else:
                    for i in T.Parallel(N):
                        step(made, A, S, kind, P, n, b, k, i, i)
            if kind != "G":
                T.copy(S, A[b, 0, 0])

    return f


@T.macro
def step(made, A, S, kind, P, n, b, k, i, j):
    one(*made[0], A, S, kind, P, n, b, k, i, j)
    if len(made) == 2:
        one(*made[1], A, S, kind, P, n, b, k, i, j)


@T.macro
def one(cond, row, col, value, A, S, kind, P, n, b, k, i, j):
    if cond is None:
        assign(row, col, value, A, S, kind, P, n, b, k, i, j)
    else:
        if computed(cond, A, S, kind, P, n, b, k, i, j):
            assign(row, col, value, A, S, kind, P, n, b, k, i, j)


@T.macro
def assign(row, col, value, A, S, kind, P, n, b, k, i, j):
    r = computed(row, A, S, kind, P, n, b, k, i, j)
    c = computed(col, A, S, kind, P, n, b, k, i, j)
    if kind == "G":
        A[b, r, c] = computed(value, A, S, kind, P, n, b, k, i, j)
    else:
        S[r, c] = computed(value, A, S, kind, P, n, b, k, i, j)


def computed(code, A, S, kind, P, n, b, k, i, j):
    def at(r, c):
        return A[b, r, c] if kind == "G" else S[r, c]

    return eval(code, {"T": T}, {"S": at, "P": P, "n": n, "b": b, "k": k, "i": i, "j": j})


def expected(own, statements, a, p, n):
    """Each iteration sees what it stored itself, else the values from before the loop."""
    made = [tuple(compile(x, "<index>", "eval") if x else None for x in s) for s in statements]
    for b in range(2):
        for k in range(3):
            old = a[b].copy()
            for i in range(N):
                for j in range(N) if len(own) == 2 else [i]:
                    mine = {}
                    names = {"T": _Plain, "P": p.tolist(), "n": n, "b": b, "k": k, "i": i, "j": j,
                             "S": lambda r, c, mine=mine, old=old: mine.get((r, c), int(old[r, c]))}
                    for cond, row, col, value in made:
                        if cond is None or eval(cond, {}, names):
                            mine[eval(row, {}, names), eval(col, {}, names)] = eval(value, {}, names)
                    for (r, c), v in mine.items():
                        a[b, r, c] = np.int64(v).astype(np.int32)
    return a


class _Plain:
    @staticmethod
    def if_then_else(cond, x, y):
        return x if cond else y


def outcome(f, on, *args):
    """The tensors of one execution, or the kind of the error that refused the program."""
    try:
        return run(f, *args, on=on, simulated=True)[0]
    except TileLangError as e:
        return e.kind


def agree(seed):
    """"refused", or "same": raises where executions differ."""
    rng = random.Random(seed)
    own, statements = body(rng)
    kind, threads = rng.choice("FFSG"), rng.choice((32, 64, 128))
    f = program(own, statements, kind, threads)
    values = np.random.default_rng(seed)
    a, p, n = values.integers(-9, 9, (2, N, N)).astype(np.int32), values.integers(0, N, N).astype(np.int32), rng.randrange(N)
    got = {on: outcome(f, on, a, p, n) for on in WITH_HOPPER}
    told = f"seed {seed}, {kind}, {threads} threads: {own} {statements}"
    kinds = {on: g for on, g in got.items() if isinstance(g, str)}
    if kinds:
        assert len(kinds) == len(got) and set(kinds.values()) <= set(REFUSED), f"{told}: {kinds}"
        for target in (SM80, SM90A):  # without running it
            with pytest.raises(TileLangError):
                lower(f.func, Target(target))
        return "refused"
    want = expected(own, statements, a.copy(), p, n)
    for on, g in got.items():
        np.testing.assert_array_equal(g, want, f"{told}: {on}")
    return "same"


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", range(2))
def test_executions_agree_or_all_refuse(part):
    found = [agree(seed) for seed in range(part, COUNT, 2)]
    assert {"same"} <= set(found)
