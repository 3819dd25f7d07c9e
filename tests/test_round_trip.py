"""The output of every pass, for every program, is text that parses back to the same program."""

import pytest
from programs import cases

from tilelang.ir import parse, to_text
from tilelang.target import Target
from tilelang.transform.framework.pass_ import PassContext, run_passes
from tilelang.transform.pipeline import DEVICE_PASSES, TILE_PASSES

CASES = cases()


@pytest.mark.parametrize("case", CASES, ids=[c.name for c in CASES])
def test_every_pass_output_parses_back(case):
    func = case.program().func
    cx = PassContext(Target({"kind": "cuda", "arch": "sm_80"}), verify=True)
    assert parse(to_text(func)) == func
    for p in (*TILE_PASSES, *DEVICE_PASSES):
        func = run_passes(func, [p], cx)
        text = to_text(func)
        again = parse(text)
        assert again == func, p.__name__
        assert to_text(again) == text, p.__name__


def test_the_same_source_prints_the_same_text():
    first, second = (to_text(run_passes(CASES[0].program().func, (*TILE_PASSES, *DEVICE_PASSES),
                                        PassContext(Target({"kind": "cuda", "arch": "sm_80"})))) for _ in range(2))
    assert first == second
