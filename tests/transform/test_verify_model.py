"""The synchronisation model clears what the pipeline makes for Hopper and finds planted faults by itself."""

import re
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "simulator"))
sys.path.insert(0, str(Path(__file__).parent.parent / "codegen"))
import cluster_text
import hopper_programs
import hopper_text
import test_hopper_simulated as simulated
from hopper_text import SYNC, addr, do, groups, init, maps
from programs import attention, gemm
from kernel_text import alloc, program

import tilelang.language as T
from tilelang.ir import Call, Evaluate, For, Launch, binary, const, replace, rewrite, seq, substitute, walk, with_options
from tilelang.target import Target
from tilelang.library.attention.mla_kernels import MlaForm, mla_attention
from tilelang.transform import pipeline
from tilelang.transform.verify_sync import trials as verify_sync_trials
from tilelang.transform.framework.pass_ import DEVICE, PassContext, pass_, run_passes
from tilelang.transform.pipeline import DEVICE_PASSES, TILE_PASSES, lower
from tilelang.transform.framework.scope import as_planned, plan_only
from tilelang.transform.check.verify_sync import verify_sync
from tilelang.transform.verify_sync.launch import check_launch
from tilelang.transform.verify_sync.memory import Pattern
from tilelang.transform.verify_sync.plan import Plan

SM90 = Target({"kind": "cuda", "arch": "sm_90a"})
ON = {"tl.enable_hopper": True}


def launch_of(func):
    (launch,) = [x for x in walk(func.body) if isinstance(x, Launch)]
    return launch


def unchecked(prog, **options):
    """The launch of a program as verify_sync gets it."""
    passes = [p for p in (*TILE_PASSES, *DEVICE_PASSES) if p is not verify_sync]
    config = {**ON, **{f"tl.{k}": v for k, v in options.items()}}
    return launch_of(run_passes(getattr(prog, "func", prog), passes, PassContext(SM90, config)))


def ordered(launch):
    text, faults = check_launch(launch)
    assert faults == [] and text.startswith("ordered: model of "), text
    return text


def fault_of(launch):
    text, faults = check_launch(launch)
    assert faults and faults[0].exact and text.startswith("not cleared: "), text
    return faults[0].message


# ---- what the pipeline makes -----------------------------------------------------------------------------------------

PROGRAMS = {
    "gemm_nt": lambda: gemm(m=512, n=512, k=1024, bm=128, bn=256, bk=64, stages=4, threads=256, tb=True),
    "gemm_nn": lambda: gemm(m=512, n=512, k=1024, bm=128, bn=128, bk=64, stages=3, threads=256),
    "gemm_one_group": lambda: gemm(m=256, n=128, k=96, bm=64, bn=128, bk=32, stages=2, threads=128, tb=True),
    "attention": lambda: attention(1, 2, 1024, 128, bm=128, bn=128, threads=256),
    "causal": lambda: attention(1, 2, 1024, 64, causal=True, bm=128, bn=128, threads=256),
}


@pytest.mark.parametrize("options", [{}, {"disable_warp_specialized": True}], ids=["roles", "one_role"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_what_the_pipeline_makes_is_cleared(name, options):
    ordered(unchecked(PROGRAMS[name](), **options))


def dynamic(stages=3):
    m, k = T.dynamic("m"), T.dynamic("k")

    @T.prim_func
    def main(A: T.Tensor((m, k), "float16"), B: T.Tensor((128, k), "float16"), C: T.Tensor((m, 128), "float16")):
        with T.Kernel(T.ceildiv(m, 128), threads=256) as bx:
            a, b = T.alloc_shared((128, 64), "float16"), T.alloc_shared((128, 64), "float16")
            c = T.alloc_fragment((128, 128), "float32")
            T.clear(c)
            for ko in T.Pipelined(T.ceildiv(k, 64), num_stages=stages):
                T.copy(A[bx * 128, ko * 64], a)
                T.copy(B[0, ko * 64], b)
                T.gemm(a, b, c, transpose_B=True)
            T.copy(c, C[bx * 128, 0])

    return main


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_unknown_extents_are_tried_around_the_number_of_stages(stages):
    launch = unchecked(dynamic(stages))
    text = ordered(launch)
    runs = int(text.split(" run")[0].split(", ")[-1])
    assert runs >= len({0, 1, 2, stages - 1, stages, stages + 1, 2 * stages + 1})


# ---- faults planted in it --------------------------------------------------------------------------------------------


def is_call(x, op):
    return isinstance(x, Evaluate) and x.call.op == op


def without(launch, op, which=None):
    """The launch without its calls of an op, or without one of them."""
    found = [x for x in walk(launch) if is_call(x, op)]
    assert found, op
    gone = found if which is None else [found[which]]
    return rewrite(launch, lambda x: seq() if any(x is g for g in gone) else None)


def changed(launch, op, fn, which=None):
    """The launch with another call instead of its calls of an op."""
    found = [x for x in walk(launch) if is_call(x, op)]
    assert found, op
    at = found if which is None else [found[which]]
    return rewrite(launch, lambda x: replace(x, call=fn(x.call)) if any(x is g for g in at) else None)


def with_args(c, **at):
    return replace(c, args=tuple(at.get(f"a{k}", a) for k, a in enumerate(c.args)))


def other_parity(c):
    return with_args(c, a1=binary("bitxor", c.args[1], const(1, c.args[1].dtype)))


def less(n):
    return lambda c: with_args(c, a1=const(int(c.args[1].value) - n, c.args[1].dtype))


GEMM = [
    ("a wait of the consumers removed", lambda x: without(x, "mbarrier_wait", 1), "is not known|before what was written"),
    ("a wait of the producer removed", lambda x: without(x, "mbarrier_wait", 0), "is overwritten by a copy"),
    ("parity of the consumers", lambda x: changed(x, "mbarrier_wait", other_parity, 1), "may be in phase|before what"),
    ("parity of the producer", lambda x: changed(x, "mbarrier_wait", other_parity, 0), "standstill"),
    ("too few bytes", lambda x: changed(x, "mbarrier_arrive_expect_tx", less(2)), "standstill.*more than expected"),
    ("too many bytes", lambda x: changed(x, "mbarrier_arrive_expect_tx", less(-2)), "standstill.*still expected"),
    ("bytes of one of two copies", lambda x: changed(x, "mbarrier_arrive_expect_tx", less(16384)), "standstill|may come"),
    ("count too large", lambda x: changed(x, "mbarrier_init", less(-1), -1), "standstill.*arrivals pending"),
    ("count too small", lambda x: changed(x, "mbarrier_init", less(1), -1), "arrival|overwritten"),
    ("no arrival at all", lambda x: without(x, "mbarrier_arrive"), "standstill"),
    ("no fence after the initialisation", lambda x: without(x, "fence_mbarrier_init"), "without a fence_mbarrier_init"),
    ("no barrier after the initialisation", lambda x: without(x, "sync_threads"),
     "initialisation|before mbarrier_init"),
    ("no fence before products", lambda x: without(x, "wgmma_fence"), "no wgmma_fence|without a wgmma_fence"),
    ("no wait for products", lambda x: without(x, "wgmma_wait"), "overwritten|used while the wgmma"),
    ("one product more in flight", lambda x: changed(x, "wgmma_wait", lambda c: with_options(c, n=2), 0), "overwritten"),
    ("no last wait", lambda x: without(x, "wgmma_wait", -1), "is used while the wgmma that writes it"),
    ("no proxy fence before stores", lambda x: without(x, "fence_proxy_async"), "no fence_proxy_async"),
    ("no barrier before stores", lambda x: without(x, "named_barrier"), "before what was written|written while|proxy"),
    ("no wait of stores", lambda x: without(x, "bulk_wait"), "while a copy|bulk store"),
    ("a copy into the stage in use", lambda x: changed(
        x, "tma_load", lambda c: with_args(c, a0=replace(c.args[0], indices=(c.args[0].indices[0] * 0,)))), "overwritten"),
]


@pytest.mark.parametrize("what, plant, says", GEMM, ids=[g[0].replace(" ", "-") for g in GEMM])
def test_a_fault_planted_in_a_gemm_is_found(what, plant, says):
    launch = unchecked(gemm(m=512, n=512, k=1024, bm=128, bn=256, bk=64, stages=4, threads=256, tb=True))
    assert re.search(says, fault_of(plant(launch))), fault_of(plant(launch))


def test_every_wait_and_barrier_of_attention_is_needed():
    launch = unchecked(attention(1, 64, 1024, 128, bm=128, bn=128, threads=256))  # several tiles a block
    for op in ("mbarrier_wait", "mbarrier_arrive", "wgmma_wait", "wgmma_fence"):
        for k in range(sum(is_call(x, op) for x in walk(launch))):
            _, faults = check_launch(without(launch, op, k))
            if not faults:
                assert op == "wgmma_fence"  # no ordinary instruction writes registers since the one before


def test_registers_in_flight_are_not_touched():
    launch = unchecked(attention(1, 2, 1024, 128, bm=128, bn=128, threads=256))
    waits = [k for k, x in enumerate(y for y in walk(launch) if is_call(y, "wgmma_wait"))]
    later = [changed(launch, "wgmma_wait", lambda c: with_options(c, n=c.options.n + 1), k) for k in waits]
    assert any("is used while the wgmma" in fault_of(x) for x in later)


# ---- programs by hand ------------------------------------------------------------------------------------------------


def test_mbarriers_that_constants_name_are_a_ring_of_what_counters_say():
    """Six mbarriers of which an iteration uses each, with phases that alternate: two iterations, not six, meet all others."""
    form = MlaForm(64, 1, 128, 64, None, "float16", "float16", 2, False, True)
    (kernel,) = lower(mla_attention(form).func, SM90, {"tl.enable_hopper": True}).kernels
    plan = Plan(kernel.launch, list(walk(kernel.launch)))
    assert max(int(b.shape[0]) for b in plan.barriers) == 6 and (plan.stages, plan.period) == (2, 4)


@pytest.mark.parametrize("options", [{}, {"stages": 3, "pending": 1}, {"bn": 128}, {"b_major": "mn"}])
def test_a_gemm_by_hand_is_cleared(options):
    ordered(launch_of(hopper_text.gemm(200, 120, 1024, **options)))


@pytest.mark.parametrize("fault, says", [
    ({"proxy": ""}, "no fence_proxy_async"), ({"full_parity": "(k // {s} + 1) % 2"}, "may be in phase 1 before"),
    ({"empty_parity": "k // {s} % 2"}, "comes to a standstill"), ({"bytes_off": 2}, "2 bytes still expected"),
    ({"bytes_off": -2}, "2 bytes more than expected"), ({"room": False}, "is overwritten by a copy"),
    ({"pending": 1, "last_wait": False, "stages": 3}, "is used while the wgmma that writes it"),
    ({"early_release": True}, "is overwritten by a copy"), ({"release": False}, "2 of 2 arrivals pending"),
    ({"producer_steps": 3}, "overwritten by a copy|standstill"), ({"producer_steps": 5}, "may end while a copy"),
    ({"fence": ""}, "no wgmma_fence"), ({"registers": (40, 240)}, "for 240 registers a thread|overwritten"),
])
def test_a_fault_planted_in_a_gemm_by_hand_is_found(fault, says):
    assert re.search(says, fault_of(launch_of(hopper_text.gemm(128, 64, 256, **fault))))


@pytest.mark.parametrize("fault, says", [
    ({"fence": ""}, "no fence_proxy_async"), ({"parity": "1"}, "may be in phase 1"),
    ({"wait": False}, "copy to it is in flight"),
    ({"fence": f"{SYNC}\nif tx == 0:\n    " + do("fence_proxy_async")}, "no fence_proxy_async of the writer"),
    ({"expect": 1023}, "1 bytes more than expected"), ({"init_fence": "pass"}, "without a fence_mbarrier_init"),
    ({"end": "pass"}, "a bulk store reads its shared memory"),
])
def test_a_fault_planted_in_a_copy_is_found(fault, says):
    ordered(launch_of(hopper_text.tma_copy()))
    assert says in fault_of(launch_of(hopper_text.tma_copy(**fault)))


@pytest.mark.parametrize("fault, says", [
    ({"proxy": ""}, "no fence_proxy_async"), ({"before": ""}, "no wgmma_fence before it"),
    ({"between": "a[0] = T.float16(1.0)"}, "wgmma that reads it"), ({"between": "acc[0] = acc[0]"}, "wgmma that writes it"),
    ({"between": do("wgmma_commit") + "\n    " + do("wgmma_wait", n=0) + "\n    a[0] = T.float16(1.0)"},
     "without a wgmma_fence in between"),
    ({"after": do("wgmma_commit")}, "wgmma that writes it"), ({"after": do("wgmma_wait", n=0)}, "wgmma that writes it"),
])
def test_a_fault_planted_in_a_product_from_registers_is_found(fault, says):
    ordered(launch_of(simulated.from_registers()))
    assert says in fault_of(launch_of(simulated.from_registers(**fault)))


def test_hand_built_programs_are_cleared():
    for args in ((200, 136, 576, "float16", True), (200, 136, 576, "float16", False),
                 (200, 136, 576, "float8_e4m3", True, "float32", "float16")):
        ordered(launch_of(hopper_programs.gemm(*args)))
    for options in ({}, {"out": "plain"}, {"width": 64, "columns": 64}):
        ordered(launch_of(hopper_programs.copy(100, 200, **options)))


@pytest.mark.parametrize("place", [lambda i, j: i % 16, lambda i, j: j, lambda i, j: i], ids=["turns", "columns", "rows"])
def test_threads_that_store_in_one_place_in_one_instruction(place):
    @T.prim_func
    def main(A: T.Tensor((64, 64), "float32"), C: T.Tensor((64, 64), "float32"), B: T.Tensor((64,), "float32")):
        with T.Kernel(1, threads=256):
            S, Q = T.alloc_shared((64,), "float32"), T.alloc_shared((64, 64), "float32")
            T.copy(A, Q)
            for i, j in T.Parallel(64, 8):
                S[place(i, j)] = Q[i, j]
            T.copy(S, B)
            T.copy(Q, C)

    assert "is written by two threads at once" in fault_of(unchecked(main))


def test_warps_of_one_group_that_wait_for_each_other():
    ordered(launch_of(simulated.two_warps()))
    assert "standstill" in fault_of(launch_of(simulated.two_warps(count=2)))


@pytest.mark.parametrize("waits", [False, True])
def test_an_mbarrier_that_nobody_waits_for_orders_nothing(waits):
    """Arrivals on `idle` of two iterations are not ordered with each other: no fault, as long as nothing waits for them."""
    f = program({"A": ((4, 128), "float32"), "B": ((4, 128), "float32")}, f"""
{alloc("S", (128,), "float32", "shared.dyn")}
{init({"full": [128], "empty": [128], "idle": [128]})}
if {groups(0)}:
    for k in T.serial(4):
        {do("mbarrier_wait", addr("empty[0]"), "(k + 1) % 2")}
        S[tx] = A[k, tx]
        {do("mbarrier_arrive", addr("full[0]"))}
        {do("mbarrier_arrive", addr("idle[0]"))}
else:
    for k in T.serial(4):
        {do("mbarrier_wait", addr("full[0]"), "k % 2")}
        B[k, tx - 128] = S[255 - tx]
        {do("mbarrier_arrive", addr("empty[0]"))}
    {do("mbarrier_wait", addr("idle[0]"), 1) if waits else "pass"}
""", threads=256)
    if waits:
        assert "an arrival on idle[0] may come before phase 0 is over" in fault_of(launch_of(f))
    else:
        ordered(launch_of(f))


def test_ping_pong_by_named_barriers():
    def turns(last):
        return program({"A": ((1,), "int32")}, f"""
{alloc("S", (1,), "int32", "shared.dyn")}
if {groups(0)}:
    for k in T.serial(4):
        if tx == 0:
            S[0] = k
        {do("named_barrier_arrive", 2, 256)}
        {do("named_barrier", 3, 256) if last else "pass"}
else:
    for k in T.serial(4):
        {do("named_barrier", 2, 256)}
        if tx == 128:
            A[0] = S[0]
        {do("named_barrier_arrive", 3, 256) if last else "pass"}
""", threads=256)

    ordered(launch_of(turns(True)))
    assert "may arrive at barrier 2 before its phase 0" in fault_of(launch_of(turns(False)))


def test_a_lane_that_waits_speaks_for_itself_alone():
    def one_waits(sync):
        return program({"A": ((32, 8), "float16"), "R": ((256,), "float16")}, f"""
{alloc("S", (256,), "float16", "shared.dyn")}
{init({"bar": [1]})}
if tx == 0:
    {do("mbarrier_arrive_expect_tx", addr("bar[0]"), 512)}
    {do("tma_load", addr("S[0]"), addr("bar[0]"), 0, 0, map="Am")}
    {do("mbarrier_wait", addr("bar[0]"), 0)}
{sync}
for i in T.serial(8):
    R[i * 32 + tx] = S[i * 32 + tx]
""", launch_plan=maps(("Am", "A", (8, 32), 0)))

    ordered(launch_of(one_waits(do("sync_warp"))))
    assert "copy to it is in flight" in fault_of(launch_of(one_waits("pass")))


def test_what_depends_on_data_is_not_checked():
    f = program({"A": ((1,), "float32")}, f"""
{alloc("S", (32,), "float32", "shared.dyn")}
{init({"bar": [32]})}
if A[0] > T.float32(0.0):
    {do("mbarrier_arrive", addr("bar[0]"))}
""")
    text, faults = check_launch(launch_of(f))
    assert faults == [] and text.startswith("not checked: synchronisation under a condition")


# ---- clusters --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("m, n, size", [(256, 64, 2), (512, 128, 2), (512, 64, 4)])
def test_multicast_is_cleared(m, n, size):
    ordered(launch_of(cluster_text.gemm(m, n, 256, size=size, empties="all")))


@pytest.mark.parametrize("fault, says", [
    ({"start": ""}, "before mbarrier_init|may not have started"), ({"end": ""}, "may end before another block"),
    ({"empties": "own"}, "is overwritten by a copy"), ({"mask": "T.uint16(1)"}, "standstill"),
    ({"mask": "T.uint16(7)"}, "mask 0x7"), ({"bytes_off": 2}, "standstill"), ({"init_fence": ""}, "fence_mbarrier_init"),
])
def test_a_fault_planted_in_a_multicast_gemm_is_found(fault, says):
    assert re.search(says, fault_of(launch_of(cluster_text.gemm(256, 64, 256, **{"empties": "all", **fault}))))


@pytest.mark.parametrize("write", [False, True])
def test_shared_memory_of_neighbours(write):
    meet = cluster_text.MEET
    ordered(launch_of(cluster_text.shift(4, write=write)))
    relaxed = do("cluster_arrive", relaxed=True) + "\n" + do("cluster_wait")
    for fault in ({"first": relaxed}, {"first": ""}, {"last": ""}, {"to": "rank + 1"},
                  {"arrive": do("cluster_arrive") + "\n" + do("cluster_arrive")}, {"arrive": do("cluster_wait")},
                  {"arrive": f"if bx == 0:\n    {meet}"}):
        if write and fault == {"first": relaxed}:
            continue  # nothing was written before that the relaxed arrival would have to show
        fault_of(launch_of(cluster_text.shift(4, write=write, **fault)))


@pytest.mark.parametrize("fault, says", [
    ({"fence": ""}, "no fence_proxy_async"), ({"last": ""}, "may end before another block"), ({"nbytes": 496}, "standstill"),
    ({"late_write": "S[tx] = T.float32(0.0)"}, "written while a copy"), ({"wait": False}, "may end while a copy"),
])
def test_a_fault_planted_in_a_copy_between_blocks_is_found(fault, says):
    ordered(launch_of(cluster_text.send()))
    assert says in fault_of(launch_of(cluster_text.send(**fault)))


# ---- what becomes of a program that is not cleared -------------------------------------------------------------------


def refusing(ops, message="planted"):
    """verify_sync that refuses programs with one of these calls."""
    from tilelang.errors import error

    @pass_(needs=DEVICE)
    def verify(func, cx):
        if any(isinstance(x, Evaluate) and x.call.op in ops for x in walk(func)):
            raise error("sync-unordered", message, found=message)
        return verify_sync(func, cx)

    return (*[p for p in DEVICE_PASSES if p is not verify_sync], verify)


def ops_of(low):
    return {x.call.op for k in low.kernels for x in walk(k.launch) if isinstance(x, Evaluate)}


@pytest.mark.parametrize("refused, gone, left, said", [
    (("set_max_nreg",), "set_max_nreg", "wgmma", "without warp specialisation: planted"),
    (("wgmma",), "wgmma", "cp_async", "without Hopper features: planted"),
    (("wgmma", "cp_async"), "cp_async", "sync_threads", "without asynchronous copies: planted"),
])
def test_a_program_that_is_not_cleared_is_compiled_by_a_plainer_schedule(monkeypatch, refused, gone, left, said):
    monkeypatch.setattr(pipeline, "DEVICE_PASSES", refusing(refused))
    low = lower(PROGRAMS["gemm_nt"]().func, SM90, ON)
    assert gone not in ops_of(low) and left in ops_of(low)
    assert any(said in line for line in low.kernels[0].plan.report)


def test_a_program_in_doubt_is_compiled_by_a_plainer_schedule(monkeypatch):
    def doubtful(launch, nodes):
        roles = any(x.op == "in_warp_groups" for x in nodes if hasattr(x, "op"))
        return ("not checked: of a doubt", []) if roles else ("ordered: model of it", [])

    monkeypatch.setattr(verify_sync_trials, "check_model", doubtful)
    low = lower(PROGRAMS["gemm_nt"]().func, SM90, ON)
    assert "set_max_nreg" not in ops_of(low) and "wgmma" in ops_of(low)
    assert any("without warp specialisation: not checked: of a doubt" in line for line in low.kernels[0].plan.report)


def test_where_the_first_schedule_is_asked_for_no_other_is_tried(monkeypatch):
    monkeypatch.setattr(pipeline, "_doubt", lambda func: "not checked: of a doubt")
    tried = []
    with as_planned():
        assert plan_only()
        with pytest.raises(ValueError, match="of a doubt"):
            lower(PROGRAMS["gemm_nt"]().func, SM90, ON, early=tried.append)
    assert len(tried) == 1 and not plan_only()


def test_what_no_schedule_clears_is_refused(monkeypatch):
    monkeypatch.setattr(pipeline, "DEVICE_PASSES", refusing(("sync_threads",), "always"))
    with pytest.raises(ValueError, match="always"):
        lower(PROGRAMS["gemm_nt"]().func, SM90, ON)


# ---- how loops are followed ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", range(20, 25))
def test_a_role_that_does_its_last_iteration_apart_needs_no_exact_run(steps, monkeypatch):
    """What is left out of its loop and of the producer's differed at some lengths: every iteration was then followed."""
    launch = unchecked(gemm(m=128, n=128, k=64 * steps, bm=128, bn=128, bk=64, stages=2, threads=256, tb=True))
    (loop,) = [x for x in walk(launch) if isinstance(x, For) and x.extent == const(steps)
               and any(is_call(y, "wgmma") for y in walk(x.body))]
    last = substitute(loop.body, {loop.var: const(steps - 1)})
    apart = rewrite(launch, lambda x: seq(replace(x, extent=const(steps - 1)), last) if x is loop else None)
    ways = []

    class Recorded(verify_sync_trials.Model):
        def __init__(self, *args):
            ways.append(args[5].whole)
            super().__init__(*args)

    monkeypatch.setattr(verify_sync_trials, "Model", Recorded)
    ordered(apart)
    assert max(ways) == 1


def test_a_fault_that_only_an_endless_run_could_confirm_is_a_doubt():
    launch = unchecked(gemm(m=128, n=128, k=64 * 4000, bm=128, bn=128, bk=64, stages=4, threads=256, tb=True))
    ordered(launch)
    assert check_launch(without(launch, "mbarrier_wait", 1))[1]  # one that shows at the start is confirmed
    text, faults = check_launch(without(launch, "wgmma_wait", -1))
    assert faults == [] and text.startswith("not checked: its loops run too often to be followed step by step (with iterations "
                                            "left out: ")


@pytest.mark.parametrize("end", range(17, 27))
def test_loops_that_differ_by_what_is_done_apart_leave_out_the_same_turns(end):
    launch = unchecked(PROGRAMS["gemm_nt"]())
    plan = verify_sync_trials.Plan(launch, list(walk(launch.body)))
    model = verify_sync_trials.Model(plan, verify_sync_trials.Values(plan.places, launch.thread_vars), {
        v: 0 for v in launch.block_vars}, 1)
    turns = {model.left_out((0, 0, 8), end - apart, 5) for apart in (1, 0, 2)}
    assert len(turns) == 1 and turns.pop() % 8 == 0


@pytest.mark.parametrize("count", [0, 1 << 20])
def test_an_mbarrier_that_counts_no_such_number_of_arrivals_is_found(count):
    launch = unchecked(gemm(m=256, n=128, k=96, bm=64, bn=128, bk=32, stages=2, threads=128, tb=True))

    def other(x):
        return replace(x, args=(x.args[0], const(count, "uint32"))) if x.op == "mbarrier_init" else None

    assert "it counts 1 to 1048575" in fault_of(rewrite(launch, other, Call))


def test_reads_of_the_lanes_of_a_warp_stay_on_record():
    """The lane that read the tile again and arrived stood for all of them."""
    @T.prim_func
    def main(A: T.Tensor((2, 32), "int32"), B: T.Tensor((2, 32), "int32"), C: T.Tensor((2,), "int32")):
        with T.Kernel(1, threads=64):
            S = T.alloc_shared((32,), "int32")
            full, empty = T.alloc_barrier(32), T.alloc_barrier(1)
            tx = T.get_thread_binding()
            if tx >= 32:
                for k in T.serial(2):
                    T.mbarrier_wait_parity(empty, (k + 1) % 2)
                    S[tx - 32] = A[k, tx - 32]
                    T.mbarrier_arrive(full)
            else:
                for k in T.serial(2):
                    T.mbarrier_wait_parity(full, k % 2)
                    B[k, tx] = S[tx]
                    T.sync_warp()
                    if tx == 0:
                        x = T.alloc_local((1,), "int32")
                        x[0] = 0
                        for j in T.serial(32):
                            x[0] += S[j]
                        C[k] = x[0]
                        T.mbarrier_arrive(empty)

    launch = unchecked(main)
    ordered(launch)
    without = rewrite(launch, lambda s: seq() if isinstance(s, Evaluate) and s.call.op == "sync_warp" else None)
    assert "`S` is touched by two threads" in fault_of(without)


def test_which_threads_meet_in_two_patterns():
    rng = np.random.default_rng(3)
    some = [(rng.integers(40, size=n), rng.integers(96, size=n)) for n in (1, 5, 20, 60)]
    patterns = [Pattern(g, thread, 32, 4) for g, thread in some]
    patterns.append(Pattern(np.tile(np.arange(5, 9), 2), np.repeat([~0, ~64], 4), 32, 4))  # any thread of warps 0 and 2
    for p in patterns:
        for q in patterns:
            for several in (False, True):
                want = np.zeros((4, 4), bool)
                for g, a, w in zip(p.g, p.thread, p.warp):
                    for h, b, v in zip(q.g, q.thread, q.warp):
                        want[w, v] |= g == h and (several or a < 0 or a != b)
                got = p.meets(q, several)
                assert (got is None and not want.any()) or np.array_equal(got, want)
        assert p.within(7, 30).tolist() == [any(7 <= g < 30 for g in p.g[p.warp == w]) for w in range(4)]


def test_an_index_that_data_chooses_was_said_to_need_an_initialisation():
    @T.prim_func
    def f(N: T.Tensor((1,), "int32"), Y: T.Tensor((128,), "int32")):
        with T.Kernel(1, threads=128):
            bar, p = T.alloc_barrier([128] * 2), T.alloc_var("int32")
            p = N[0]
            T.mbarrier_arrive(bar[p])
            T.mbarrier_wait_parity(bar[p], 0)
            for i in T.Parallel(128):
                Y[i] = i

    with pytest.raises(ValueError, match="may be used, and `bar` has 2 mbarriers") as e:
        lower(f.func, SM90, {})
    assert "bar[p % 2]" in str(e.value)
