"""The printed CUDA text of scalar expressions, compiled by a C++ compiler, computes what the reference interpreter computes.

The simulators run the program, not its text: what C leaves undefined shows only here.  The second run stops where the text is
undefined in C.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tilelang
import tilelang.language as T
from tilelang.target import Target
from tilelang.transform.pipeline import lower

sys.path.insert(0, str(Path(__file__).parent))
from host_cuda import available, run_on_host

pytestmark = pytest.mark.skipif(not available(), reason="g++ and a CPU with F16C are needed")

INTEGERS = [f"{u}int{b}" for b in (8, 16, 32, 64) for u in ("", "u")]
FLOATS = ("float32", "float64")
N = 128  # threads, or four times as many
Made = Callable[..., Any]


def bits(dt: str) -> int:
    return int(dt.lstrip("uint"))


OPERATORS: tuple[Callable[[Any, Any], Any], ...] = (
    lambda a, b: a + b, lambda a, b: a - b, lambda a, b: a * b, lambda a, b: a // b, lambda a, b: a % b, T.truncdiv, T.truncmod,
    lambda a, b: a << b, lambda a, b: a >> b, lambda a, b: a & b, lambda a, b: a | b, lambda a, b: a ^ b, T.min, T.max,
    lambda a, b: a * a * a + b, lambda a, b: (a + b) >> (a - b), lambda a, b: (a >> b) + (a << b),
    lambda a, b: (a - b) % (a ^ b), lambda a, b: (a * a) // (b * b))


def operations(dt: str) -> Iterator[Made]:
    """Expressions of two values of an integer type, and of a thread index."""
    yield from (lambda a, b, t, op=op: op(a, b) for op in OPERATORS)
    yield from (lambda a, b, t, op=op: op(a, b) for op in (
        lambda a, b: T.if_then_else(a < b, a, b + b), lambda a, b: T.Select(a >= b, a - b, b),
        lambda a, b: T.cast((a << 1) == b, dt), lambda a, b: T.cast(a != (b >> 1), dt), T.ceildiv,
        lambda a, b: a << (b & T.cast(bits(dt) - 1, dt)), lambda a, b: ~a, lambda a, b: T.abs(a), lambda a, b: T.popcount(a),
        lambda a, b: T.clz(a), lambda a, b: T.cast(1, dt) << (b + 1)))
    yield from (lambda a, b, t: a << T.cast(t, dt), lambda a, b, t: a >> T.cast(t - 3, dt),
                lambda a, b, t: a + T.cast(t * 65536 * 65536, dt), lambda a, b, t: a % T.cast(t % 5, dt))
    if not dt.startswith("u"):
        yield from (lambda a, b, t: -a, lambda a, b, t: a // T.cast(-1, dt),
                    lambda a, b, t: T.if_then_else(a < T.cast(0, dt), -a, a) // (b | T.cast(1, dt)))


def sources() -> Iterator[tuple[str, str, Made]]:
    """(type of the operands, type of the result, expression)."""
    for dt in INTEGERS:
        yield from ((dt, dt, made) for made in operations(dt))
        for other in (*INTEGERS, *FLOATS):
            if other != dt:
                yield dt, other, lambda a, b, t, other=other: T.cast(a, other)
                yield dt, other, lambda a, b, t, other=other: T.cast(a < T.cast(b, other), other)
    for dt in FLOATS:
        yield from ((dt, other, lambda a, b, t, other=other: T.cast(a * b, other)) for other in INTEGERS)
        yield from ((dt, dt, op) for op in (lambda a, b, t: T.min(a, b), lambda a, b, t: T.max(a, b) - T.abs(a)))


SCALARS = list(sources())
VECTORS = [(dt, dt, lambda a, b, t, op=op: op(a, b)) for dt in INTEGERS for op in OPERATORS]


TYPES = (*INTEGERS, *FLOATS)


@T.macro
def store(results, row, t, lanes, values, made, to):
    if lanes == 1:
        results[row, t] = T.cast(made(values[0, t], values[1, t], t), to)
    else:
        results[row, t * 4:t * 4 + 4] = made(values[0, t * 4:t * 4 + 4], values[1, t * 4:t * 4 + 4], t)


def program(sources: list[tuple[str, str, Made]], lanes: int) -> Any:
    """One program of all expressions: a row of its type's result for each."""
    rows = {dt: iter(range(10**6)) for dt in TYPES}
    numbered = [(frm, to, next(rows[to]), made) for frm, to, made in sources]
    ins, outs = [T.Tensor((2, N), dt) for dt in TYPES], [T.Tensor((next(rows[dt]) + 1, N), dt) for dt in TYPES]

    @T.prim_func
    def expressions(A0: ins[0], A1: ins[1], A2: ins[2], A3: ins[3], A4: ins[4], A5: ins[5], A6: ins[6], A7: ins[7], A8: ins[8],
                    A9: ins[9], O0: outs[0], O1: outs[1], O2: outs[2], O3: outs[3], O4: outs[4], O5: outs[5], O6: outs[6],
                    O7: outs[7], O8: outs[8], O9: outs[9]):
        with T.Kernel(1, threads=N // lanes):
            t = T.get_thread_binding()
            a = dict(zip(TYPES, (A0, A1, A2, A3, A4, A5, A6, A7, A8, A9)))
            o = dict(zip(TYPES, (O0, O1, O2, O3, O4, O5, O6, O7, O8, O9)))
            _ = [store(o[to], row, t, lanes, a[frm], made, to) for frm, to, row, made in numbered]

    return expressions


def values(func: Any) -> dict[str, np.ndarray]:
    """Numbers by parameter: those at the ends of the types, amounts of shifts at theirs, and others; results start as 1."""
    rng, out, results = np.random.default_rng(0), {}, {}
    for k, dt in enumerate(TYPES):
        if dt in FLOATS:
            x = np.resize(np.array([0.0, -0.5, 1.5, 1e9, -1e19, 3e38, 255.9, -128.5, np.nan, np.inf, -np.inf]), (2, N))
            x[1] = rng.permutation(np.resize([1.0, -1.0, 3.0, 1e-3], N))
        else:
            info = np.iinfo(dt)
            ends = [0, 1, 2, info.min, info.max, info.max - 1, -1, bits(dt) - 1, bits(dt), bits(dt) + 1, 8, 16, 31, 32, 33, 64]
            near = np.array([n % 2**bits(dt) for n in ends], np.uint64).astype(f"uint{bits(dt)}").view(dt)
            x = rng.integers(info.min, info.max, (2, N), dt, endpoint=True)
            x[0, ::2], x[1, 1::2] = rng.choice(near, N // 2), rng.choice(near, N // 2)
            x[1, ::4] = rng.choice(near, N // 4)
        out[f"A{k}"], results[f"O{k}"] = x.astype(dt), np.ones(func.buffer_map[func.params[10 + k]].shape, dt)
    return out | results


@pytest.mark.parametrize("sources, lanes", [(SCALARS, 1), (VECTORS, 4)], ids=["scalars", "vectors"])
def test_the_text_of_six_hundred_expressions_means_what_the_interpreter_computes(sources, lanes, tmp_path, capfd):
    func = program(sources, lanes)
    want, got = values(func), values(func)
    tilelang.compile(func, execution_backend="tile")(*want.values())
    (kernel,) = lower(func.func, Target({"kind": "cuda", "arch": "sm_80"})).kernels
    run_on_host(kernel, dict(got), (1,), tmp_path, "-O0", "-std=c++20", "-fsanitize=undefined")
    wrong = [line for line in capfd.readouterr().err.splitlines() if "runtime error" in line]
    rows = {dt: iter(range(10**6)) for dt in TYPES}
    for frm, to, made in sources:
        k, row = TYPES.index(to), next(rows[to])
        a, b = want[f"O{k}"][row], got[f"O{k}"][row]
        if not np.array_equal(a, b, equal_nan=to in FLOATS):
            lane = int(np.argmax(a != b))
            x = want[f"A{TYPES.index(frm)}"][:, lane]
            text = inspect.getsource(made).strip()
            wrong.append(f"{frm} -> {to}, {text}: {x[0]}, {x[1]}, element {lane}: {a[lane]} {b[lane]}")
    assert not wrong, "\n".join(wrong)
