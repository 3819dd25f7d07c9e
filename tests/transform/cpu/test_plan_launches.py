"""Launches of the CPU target: warp roles, storage, tests for null pointers, tensors that may overlap."""

import pytest
from planned import plan_cpu, planned_body

import tilelang.language as T
from tilelang.ir import walk
from tilelang.ir.phases import CPU
from tilelang.ir.verify import verify
from tilelang.target.cpu_launch import CpuLaunch
from tilelang.transform.framework.pass_ import PassContext
from tilelang.transform.cpu.plan_launches import plan_launches
from tilelang.transform.cpu import CPU_PASSES
from tilelang.transform.replay import replay


@T.prim_func
def doubled(A: T.Tensor((64,), "float32"), B: T.Tensor((64,), "float32")):
    with T.Kernel(2, threads=32) as bx:
        for i in T.Parallel(32):
            B[bx * 32 + i] = A[bx * 32 + i] * 2.0


def test_a_launch_without_warp_roles_has_one_code():
    out = plan_launches(doubled.func, PassContext())
    assert out.facts.phase == CPU and not verify(out, CPU)
    (launch,) = walk(out.body, CpuLaunch)
    assert [c.warp_role.ranges for c in launch.codes] == [((0, 32),)]
    assert not launch.waits and launch.may_alias == () and launch.when_null is None


def test_a_launch_that_is_left_is_found():
    out = plan_launches(doubled.func, PassContext())
    (launch,) = walk(out.body, CpuLaunch)
    from tilelang.ir import replace

    assert {f.rule for f in verify(replace(out, body=launch.launch), CPU)} == {"no-launch"}


def test_statements_of_the_cpu_stand_in_no_other_phase():
    out = plan_launches(doubled.func, PassContext())
    assert "backend" in {f.rule for f in verify(out, "TILE")}


def test_names_of_the_codes_are_verified():
    """A code that uses what another launch defines."""
    from dataclasses import replace as changed

    from tilelang.ir import I32, Bind, Var, const, replace, seq
    out = plan_launches(doubled.func, PassContext())
    (launch,) = walk(out.body, CpuLaunch)
    (code,) = launch.codes
    wrong = seq(Bind(Var("k", I32), Var("nowhere", I32) + const(1)), code.body)
    broken = replace(out, body=replace(launch, codes=(changed(code, body=wrong),)))
    assert [f.rule for f in verify(broken, CPU)] == ["defined"]


def test_an_address_behind_a_condition_has_a_second_form():
    @T.prim_func
    def main(address: T.ptr, n: T.int32, B: T.Tensor((4,), "float32")):
        with T.Kernel(1, threads=1):
            A = T.make_tensor(address, (4,), "float32")
            if n > 0:
                B[0] = A[0]

    launch = planned_body(main)
    assert [p.name for p in launch.pointers] == ["address"]
    assert launch.when_null is not None and len(launch.when_null.null_checks) == 1


def test_passes_of_the_cpu_are_reported_with_their_programs():
    lines = []
    cx = PassContext(debug=3, verify=True, report=lines.append)
    from tilelang.transform.framework.pass_ import run_passes

    run_passes(doubled.func, CPU_PASSES, cx)
    assert list(cx.seconds) == [p.__name__ for p in CPU_PASSES]
    after = lines.index(next(x for x in lines if x.startswith("# after plan_launches")))
    assert "with CpuLaunch(" in lines[after + 1]


def test_a_failing_pass_of_the_cpu_is_repeated_from_the_tile_program(monkeypatch):
    from tilelang.errors import InternalError
    from tilelang.transform import cpu
    from tilelang.transform.framework.pass_ import pass_

    @pass_(needs=CPU)
    def plan_gemms(func, cx):
        raise RuntimeError("planted")

    passes = tuple(plan_gemms if p.__name__ == "plan_gemms" else p for p in CPU_PASSES)
    monkeypatch.setattr(cpu, "CPU_PASSES", passes)
    with pytest.raises(InternalError, match="pass plan_gemms failed.*planted") as e:
        plan_cpu(doubled.func)
    assert "with CpuLaunch(" in replay(str(e.value).split("report: ")[1].strip())
