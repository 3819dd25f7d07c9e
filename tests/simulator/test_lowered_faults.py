"""Faults planted in lowered programs are found by the device simulator; the programs as lowered are clean."""

import dataclasses
import functools

import numpy as np
import programs
import pytest

from tilelang.errors import TileLangError
from tilelang.ir import (AddressOf, Bind, Call, Const, Evaluate, For, Func, If, Seq, Store, const, free_vars, rewrite,
                         substitute, walk, with_options)
from tilelang.simulator import run_device
from tilelang.target import Target
from tilelang.transform.pipeline import lower

SM80 = Target({"kind": "cuda", "arch": "sm_80"})


@functools.cache
def lowered(name: str) -> tuple[Func, tuple[np.ndarray, ...], tuple[np.ndarray, ...]]:
    """(device program, inputs, reference outputs) of a named case."""
    case = {
        "gemm": programs.gemm_case("plain", m=128, n=64, k=128, stages=3),
        "attention": programs.attention_case("small", seq=128, heads=1),
        "transpose": next(c for c in programs.cases() if c.name.startswith("transpose")),
    }[name]
    inputs = case.inputs(np.random.default_rng(0))
    outs = [np.zeros(r.shape, programs.NP["float16"]) for r in case.reference(*inputs)]
    return lower(case.program().func, SM80).host, (*inputs, *outs), tuple(case.reference(*inputs))


def barriers(f: Func) -> list[Evaluate]:
    return [n for n in walk(f) if isinstance(n, Evaluate) and n.call.op == "sync_threads"]


def without(f: Func, number: int) -> Func:
    """f without its barrier of this number, in program order."""
    seen = -1

    def visit(n):
        nonlocal seen
        if isinstance(n, Evaluate) and n.call.op == "sync_threads":
            seen += 1
            return Seq(()) if seen == number else None
        return None

    # Equal statements are one object to a memoising rewrite: make each barrier its own first.
    count = iter(range(10**6))
    f = _distinct(f, count)
    return rewrite(f, visit)


def _distinct(n, count):
    if isinstance(n, Seq):
        return dataclasses.replace(n, stmts=tuple(_distinct(s, count) for s in n.stmts))
    if isinstance(n, Evaluate) and n.call.op == "sync_threads":
        next(count)
        return Evaluate(dataclasses.replace(n.call), span=n.span)
    for field in ("body", "then", "orelse"):
        inner = getattr(n, field, None)
        if inner is not None and not isinstance(n, (Bind, Store)):
            n = dataclasses.replace(n, **{field: _distinct(inner, count)})
    return n


def kind_of_failure(f: Func, args) -> str:
    with pytest.raises(TileLangError) as e:
        run_device(f, args)
    assert e.value.hint
    return e.value.kind


@pytest.mark.parametrize("name", ["gemm", "attention"])
def test_as_lowered_it_is_clean_and_right(name):
    f, args, want = lowered(name)
    report = run_device(f, args)
    got = list(report.outputs.values())[-1]
    assert np.abs(got.astype(float) - want[0]).max() < 0.05 * np.abs(want[0]).max()
    assert report.instructions["sync_threads"] > 0


@pytest.mark.parametrize("name", ["gemm", "attention", "transpose"])
def test_removing_any_barrier_is_found(name):
    f, args, _ = lowered(name)
    count = len(barriers(f))
    assert count
    for k in range(count):
        broken = without(f, k)
        assert len(barriers(broken)) == count - 1
        assert kind_of_failure(broken, args) in ("sim-race", "sim-async"), f"barrier {k}"


def test_wait_that_lets_one_more_group_fly():
    f, args, _ = lowered("gemm")

    def later(n):
        if isinstance(n, Call) and n.op == "cp_async_wait" and n.options.n:
            return with_options(n, n=n.options.n + 1)
        return None

    assert kind_of_failure(rewrite(f, later), args) == "sim-async"


@pytest.mark.parametrize("shift", [1, 2])
def test_matrix_load_from_another_stage(shift):
    f, args, _ = lowered("gemm")
    (loop,) = [n for n in walk(f) if isinstance(n, For) and n.kind == "serial"]

    def other_stage(n):
        if isinstance(n, Call) and n.op == "ldmatrix" and loop.var in free_vars(n.args[1]):
            return dataclasses.replace(n, args=(n.args[0], substitute(n.args[1], {loop.var: loop.var + shift})))
        return None

    assert kind_of_failure(rewrite(f, other_stage), args) in ("sim-async", "sim-race")


def test_copy_into_the_stage_in_use():
    f, args, _ = lowered("gemm")
    (loop,) = [n for n in walk(f) if isinstance(n, For) and n.kind == "serial"]

    def in_use(n):
        if isinstance(n, Call) and n.op == "cp_async" and loop.var in free_vars(n.args[0]):
            return dataclasses.replace(n, args=(substitute(n.args[0], {loop.var: loop.var + 1}), *n.args[1:]))
        return None

    assert kind_of_failure(rewrite(f, in_use), args) in ("sim-race", "sim-async")


def test_one_iteration_too_many():
    f, args, _ = lowered("gemm")
    (loop,) = [n for n in walk(f) if isinstance(n, For) and n.kind == "serial"]

    def longer(n):
        return dataclasses.replace(n, extent=const(int(n.extent.value) + 1)) if n is loop else None

    # The slot it reads was never refilled or is being overwritten, or the copy runs past A.
    def bodies(n):
        return longer(n) if isinstance(n, For) else None

    g = rewrite(f, bodies)
    with_copy = rewrite(g, lambda n: dataclasses.replace(n, cond=Const(True, n.cond.dtype))
                        if isinstance(n, If) and loop.var in free_vars(n.cond) else None)
    assert kind_of_failure(with_copy, args) == "sim-out-of-bounds"


def test_store_loop_one_register_too_long():
    f, args, _ = lowered("gemm")
    stores = [n for n in walk(f) if isinstance(n, For) and any(
        isinstance(x, Store) and x.buffer.name == "C" for x in walk(n)) and n.kind == "unroll"]
    inner = stores[-1]
    broken = rewrite(f, lambda n: dataclasses.replace(n, extent=const(int(n.extent.value) + 1)) if n is inner else None)
    assert kind_of_failure(broken, args) == "sim-out-of-bounds"


def test_accumulator_cleared_one_register_short():
    f, args, _ = lowered("gemm")
    clear = next(n for n in walk(f) if isinstance(n, For) and isinstance(n.body, Store) and n.body.buffer.name == "Cf")
    broken = rewrite(f, lambda n: dataclasses.replace(n, extent=const(int(n.extent.value) - 1)) if n is clear else None)
    assert kind_of_failure(broken, args) == "sim-uninitialized"


def test_misplaced_vector():
    f, args, _ = lowered("gemm")

    def off_by_one(n):
        if isinstance(n, Call) and n.op == "cp_async":
            src = n.args[1]
            moved = AddressOf(src.buffer, (*src.indices[:-1], src.indices[-1] + 1))
            return dataclasses.replace(n, args=(n.args[0], moved, *n.args[2:]))
        return None

    assert kind_of_failure(rewrite(f, off_by_one), args) in ("sim-misaligned", "sim-out-of-bounds")
