"""Accumulators scaled under the exponentials: where statements go, that the program means the same, what keeps the order."""

import dataclasses
import re
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from programs import attention

from tilelang.codegen.cuda.printer import print_kernel
from tilelang.ir import Call, For, Store, replace, rewrite, seq, stmts_of, walk, with_options
from tilelang.target import Target
from tilelang.target.register_forms import form_of
from tilelang.transform import pipeline
from tilelang.transform.registers.early_rescale import rescale_early
from tilelang.transform.analysis.statements import do
from transform.test_accumulator_registers import both_ways, numbers

passes = sys.modules["tilelang.transform.registers.accumulator_registers"]
SM90A = Target({"kind": "cuda", "arch": "sm_90a"})
FAST = {"tl.enable_fast_math": True}


def lowered(monkeypatch, early, **options):
    monkeypatch.setattr(passes, "EARLY", early)
    (kernel,) = pipeline.lower(attention(1, 1, 256, 64, bm=128, bn=64, threads=256, **options).func, SM90A, FAST).kernels
    return kernel


def hot(kernel):
    """Statements of the innermost loop with two products."""
    def products(x):
        return sum(isinstance(c, Call) and c.op == "wgmma" for c in walk(x))

    loops = [x for x in walk(kernel.launch.body) if isinstance(x, For) and products(x) > 1]
    (loop,) = [x for x in loops if not any(y is not x and isinstance(y, For) and products(y) > 1 for y in walk(x))]
    return list(stmts_of(loop.body))


def kind(s):
    form = form_of(s) if isinstance(s, For) and s.plan.registers else None
    return form and form.kind


def order(text):
    """What the loop over keys does, in the order of the text."""
    loop = text[text.index("for (int k = 1;"):]
    return re.findall(r"tl::(map_P|wgmma_hold|wgmma_wait<0>|scale_Of|add_P|halves_Ph)", loop)


@pytest.mark.parametrize("causal", [False, True])
def test_accumulators_are_scaled_between_exponentials(monkeypatch, causal):
    text = print_kernel(lowered(monkeypatch, True, causal=causal), fast_math=True)
    assert order(text)[:9] == ["map_P", "wgmma_hold", "wgmma_wait<0>", "scale_Of", "map_P", "wgmma_hold", "map_P", "add_P",
                               "add_P"]
    text = print_kernel(lowered(monkeypatch, False, causal=causal), fast_math=True)
    assert order(text)[:6] == ["wgmma_hold", "map_P", "add_P", "add_P", "wgmma_wait<0>", "scale_Of"]


@pytest.mark.parametrize("causal", [False, True])
def test_the_order_changes_no_result(monkeypatch, causal):
    monkeypatch.setattr(passes, "EARLY", True)
    x = numbers(1, 256, 1, 64)
    both_ways(attention(1, 1, 256, 64, causal=causal, bm=128, bn=64, threads=256), x, x, x, np.zeros_like(x),
              monkeypatch=monkeypatch, config=FAST)


def test_each_score_is_computed_once(monkeypatch):
    kernel = lowered(monkeypatch, True)
    stores = []
    for s in hot(kernel):
        extents = [int(x.extent.value) for x in walk(s) if isinstance(x, For)]
        if kind(s) == "map" and any(isinstance(x, Store) and x.buffer.name == "P" for x in walk(s)):
            stores.append(int(np.prod(extents)))
    assert len(stores) == 3 and sum(stores) == 64 * 64 // 128 and stores[0] == 2 * stores[1] == 2 * stores[2]


def test_accumulators_that_are_touched_in_between_stay_where_they_are(monkeypatch):
    kernel = lowered(monkeypatch, False)
    assert order(print_kernel(dataclasses.replace(kernel, launch=rescale_early(kernel.launch)), fast_math=True)) == order(
        print_kernel(lowered(monkeypatch, True), fast_math=True))
    scale = next(s for s in hot(kernel) if kind(s) == "scale")

    def scaled_before_the_sums_too(x):
        mapped = kind(x) == "map"
        return seq(x, with_options(scale, registers=None)) if mapped else None

    launch = replace(kernel.launch, body=rewrite(kernel.launch.body, scaled_before_the_sums_too))
    assert str(rescale_early(launch)) == str(launch)


def test_a_wait_stays_behind_the_products_it_is_for(monkeypatch):
    kernel = lowered(monkeypatch, False)

    def another_commit(x):
        return seq(x, do("wgmma_commit")) if kind(x) == "map" else None

    launch = replace(kernel.launch, body=rewrite(kernel.launch.body, another_commit))
    assert str(rescale_early(launch)) == str(launch)
