"""Opaque thread indices and barrier addresses that are computed where they are used, in register-resident launches."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from programs import attention, gemm

from tilelang.ir import Bind, Call, Evaluate, For, If, walk
from tilelang.target import Target
from tilelang.transform import pipeline
from tilelang.transform.registers.order_register_reductions import borrows_registers
from tilelang.transform.registers.shorten_live_ranges import multiplies, shorten_live_ranges

SM90A = Target({"kind": "cuda", "arch": "sm_90a"})
FAST = {"tl.enable_fast_math": True}


def launch_of(program, **config):
    return pipeline.lower(program.func, SM90A, config).kernels[0].launch


def opaque(launch, op):
    return [x for x in walk(launch.body, Call) if x.op == op]


def test_a_causal_attention_has_copies_in_its_masks_and_one_behind_its_loop():
    launch = launch_of(attention(1, 1, 256, 64, causal=True, bm=128, bn=64, threads=256), **FAST)
    assert launch.plan.own_values and launch.plan.sync_report.startswith("ordered")
    assert len(opaque(launch, "make_opaque")) == 1
    masks = [x for x in walk(launch.body, If) if borrows_registers(x.then)]
    assert len(masks) == 2
    for x in masks:
        copy = next(s for s in walk(x.then, Bind) if isinstance(s.value, Call) and s.value.op == "opaque_copy")
        assert copy.value.args == (launch.thread_vars[0],)
        uses = [v for s in walk(x.then, Bind) for v in walk(s.value) if v is launch.thread_vars[0]]
        assert len(uses) == 1, "only the copy reads the index"
    loops = [x for x in walk(launch.body, For) if multiplies(x)]
    assert loops and all(x.kind == "serial" for x in loops)


def test_barriers_of_a_ring_are_found_where_a_thread_arrives():
    launch = launch_of(attention(1, 1, 256, 64, causal=False, bm=128, bn=64, threads=256), **FAST)
    arrivals = [x.call for x in walk(launch.body, Evaluate) if x.call.op == "mbarrier_arrive"]
    assert arrivals and any(x.options.recompute for x in arrivals)


def test_launches_with_values_in_arrays_stay(monkeypatch):
    program = gemm(256, 256, 256, bm=128, bn=128, bk=64)
    launch = launch_of(program)
    assert not launch.plan.own_values and not opaque(launch, "make_opaque") and not opaque(launch, "opaque_copy")
    passes = tuple(p for p in pipeline.DEVICE_PASSES if p is not shorten_live_ranges)
    monkeypatch.setattr(pipeline, "DEVICE_PASSES", passes)
    assert str(launch_of(program)) == str(launch)
