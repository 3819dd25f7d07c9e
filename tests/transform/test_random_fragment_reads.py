"""Random reads of fragments at offsets, by threads that do not hold the elements: every execution gives the same.

More of them: TILELANG_TEST_FRAGMENT_READS=1000 python -m pytest tests/transform/test_random_fragment_reads.py
"""

import os
import random
import runpy
from textwrap import indent

import numpy as np
import pytest
from everywhere import run

COUNT = int(os.environ.get("TILELANG_TEST_FRAGMENT_READS", "72"))
ROWS, COLUMNS, OUT = 64, 16, 32

PROGRAM = """
import tilelang.language as T

@T.prim_func
def f(A: T.Tensor(({rows}, {columns}), "float32"), X: T.Tensor((4,), "int32"), n: T.int32,
      O: T.Tensor((4, {size}, {width}), "float32")):
    with T.Kernel(1, threads={threads}):
        s = T.alloc_shared((3,), "int32")
        v = T.alloc_var("int32", init=0)
        t = T.get_thread_binding()
{body}
"""
FILL = """
f = T.alloc_fragment(({rows}, {columns}), "float32")
for i in T.Parallel(3):
    s[i] = X[i] * 2 % 40
T.copy(A, f)
for i, d in T.Parallel({rows}, {columns}):
    f[i, d] = f[i, d] + 0.5
for p in T.serial(4):
    v = v + p * 5
"""
LOOP = """
for i, d in T.Parallel({size}, {columns}):
    {stores}
"""


def row_of(rng):
    """A row of the fragment; it may lie outside."""
    c = rng.randrange(1, 20)
    return rng.choice([
        f"i + p * {c}", f"i + p * {c} - 3", "i + n * p", f"{ROWS - 1} - i - p * {c}", f"{c} - i + p * 8", "2 * i + p",
        "i * 2 - n * p", "i + X[p]", "i + X[X[p] % 4]", "i + s[p % 3]", "s[1] - i", "i + v", "v + 7 - i", "v", "i // 2 + v",
        f"(i * 3) % 8 + p * {c}", "i", f"{c}", "p * 7", f"i + {c}", "i + p // 2 * 16", "i + 64 // n - p", "(i + p) % 8"])


def column_of(rng):
    return rng.choice(["d", "d", "d", "d", "15 - d", "(d + p) % 16", "d // 2", "d ^ 1", "p", "d // 2 + n", "3"])


def element(rng):
    row, column = row_of(rng), column_of(rng)
    return f"(0 <= {row}) & ({row} < {ROWS})", f"f[{row}, {column}]"


def stores(rng, target):
    """Statements of a loop that store what they read from the fragment, under conditions or not."""
    (inside, value), (other, more) = element(rng), element(rng)
    low, also = rng.randrange(3), rng.random()
    cond = rng.choice(["i < 16", "i < 8 + p", "p < 3", "i % 2 == 0", "i != d", "X[p] > 9", "s[2] < 30", "v > 9", "n < 9",
                       "n > 3", "(i < 20) & (p > 0)", f"{value} > 0.0"])
    out = [f"{target} = {low}.0"] if rng.random() < 0.4 else []
    if rng.random() < 0.3:
        value = f"T.if_then_else({other}, {value} + {more}, {value} * 2.0)"
    elif also < 0.3:
        inside, value = f"({inside}) & ({other})", f"{value} + {more}"
    body = f"if {inside}:\n    {target} = {value}"
    if rng.random() < 0.6:
        order = rng.random() < 0.5 and "f[" not in cond
        body = f"if {cond}:\n{indent(body, '    ')}" if order else f"if ({inside}) & ({cond}):\n    {target} = {value}" \
            if "f[" not in cond else f"if {inside}:\n    if {cond}:\n        {target} = {value}"
        if order and rng.random() < 0.4:
            body += f"\nelse:\n    {target} = -1.0"
    return "\n".join([*out, body])


def program(rng):
    """(text, shape of the output): in all threads or in a warp role, into shared memory, a fragment, the tensor or each
    thread's own memory."""
    kind, threads, role = rng.choice(("shared", "fragment", "global", "local")), rng.choice((64, 128)), rng.random() < 0.3
    size, width = (OUT, COLUMNS) if kind != "local" else (threads, 4)
    fill = FILL.format(rows=ROWS, columns=COLUMNS)
    if kind == "local":
        row = rng.choice([f"{ROWS - 1} - t % {ROWS}", f"(t + p) % {ROWS}", "t // 4", "p * 9", f"(t * 3 + X[p]) % {ROWS}", "v",
                          f"(v + t) % {ROWS}", f"s[t % 3] + {rng.randrange(20)}", "t % 8 + p * 7"])
        low = rng.randrange(12)
        loop = rng.choice([f"T.copy(f[{row}, {low}:{low + 4}], r)",
                           f"for j in T.vectorized(4):\n    r[j] = f[{row}, j + {low}]"])
        loop = f"{loop}\nfor j in range(4):\n    O[p, t, j] = r[j]"
        fill = f'r = T.alloc_local((4,), "float32")\n{fill}'
    else:
        target = "O[p, i, d]" if kind == "global" else "h[i, d]"
        loop = LOOP.format(size=OUT, columns=COLUMNS, stores=indent(stores(rng, target), "    ").lstrip())
        if kind != "global":
            fill = f'h = T.alloc_{kind}(({OUT}, {COLUMNS}), "float32")\n{fill}'
            loop = f"T.clear(h)\n{loop}\nT.copy(h, O[p, :, :])"
    body = f"{fill}{indent(loop, '    ')}"
    if role:
        body = f"with T.ws(0):\n{indent(body, '    ')}"
        threads *= 2 if threads == 128 else 4
        size = max(size, 128) if kind == "local" else size
    return PROGRAM.format(rows=ROWS, columns=COLUMNS, size=size, width=width, threads=threads, body=indent(body, " " * 8))


@pytest.mark.parametrize("part", range(12))
def test_executions_agree(part, tmp_path):
    for seed in range(part, COUNT, 12):
        rng = random.Random(seed)
        text, path = program(rng), tmp_path / f"p{seed}.py"
        path.write_text(text)
        f = runpy.run_path(str(path))["f"]
        a = np.random.default_rng(seed).integers(-9, 9, (ROWS, COLUMNS)).astype(np.float32)
        x = np.array([rng.randrange(33) for _ in range(4)], np.int32)
        n = rng.choice((2, 4))
        got = {on: run(f, a, x, n, on=on, simulated=True)[2] for on in ("tile", "simulator", "sm_90a")}
        for on in got:
            np.testing.assert_array_equal(got[on], got["tile"], f"seed {seed} on {on}:\n{text}")
