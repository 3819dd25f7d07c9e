import pytest
from pass_programs import F32, gemm, region

import tilelang.language as T
from tilelang import ops
from tilelang.errors import InternalError, TileLangError
from tilelang.ir import (I32, Alloc, Bind, Buffer, Call, Evaluate, For, If, Parallel, Store, const, fresh, load, parse, to_text,
                         walk)
from tilelang.transform.framework.pass_ import PassContext, run_passes
from tilelang.transform.schedule.plan_pipelines import plan_pipelines


def plan(f, **config):
    out = run_passes(f, [plan_pipelines], PassContext(verify=True, config=config))
    assert to_text(parse(to_text(out))) == to_text(out)
    return out


def loop_of(f):
    return [x for x in walk(f) if isinstance(x, For) and x.plan.pipeline_report][-1]


def report(f):
    return loop_of(f).plan.pipeline_report


def waits(s):
    return [x.call.options.n for x in walk(s) if isinstance(x, Evaluate) and x.call.op == "cp_async_wait"]


def commits(s):
    return sum(isinstance(x, Evaluate) and x.call.op == "cp_async_commit" for x in walk(s))


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_versions_commits_and_waits(stages):
    out = plan(gemm(K=320, stages=stages)[0])
    loop = loop_of(out)
    assert report(out) == out.body.plan.pipeline_report == f"pipelined: {stages} stage{'s' * (stages > 1)} of A_s, B_s"
    shapes = {x.buffer.name: x.buffer.shape for x in walk(out) if isinstance(x, Alloc)}
    assert shapes["A_s"] == ((stages, 64, 32) if stages > 1 else (64, 32))
    assert waits(loop) == [max(stages - 2, 0)] and commits(loop) == 1
    assert commits(out) == stages  # one per prologue step
    copies = [x for x in walk(out) if isinstance(x, ops.Copy) and x.plan.async_group]
    assert len(copies) == 2 * stages


def test_no_stages_is_a_plain_loop():
    f, _ = gemm(stages=0)
    out = plan(f)
    assert not any(isinstance(x, For) and x.kind == "pipelined" for x in walk(out))
    assert commits(out) == 0


def test_short_loops_leave_out_prologue_steps():
    out = plan(gemm(K=32, stages=4)[0])
    assert len([x for x in walk(out.body.body.stmts[2]) if isinstance(x, ops.Copy)]) <= 1
    assert commits(out) == 4


def test_run_time_extent_is_evaluated_once_and_guards_the_prologue():
    n = Buffer("n", (1,), I32, "local.var")
    f, _ = gemm(stages=3, n=load(n, (0,)))
    launch = f.body
    from tilelang.ir import replace, seq
    f = replace(f, body=replace(launch, body=seq(Alloc(n, const(2)), launch.body)))
    out = plan(f)
    reads = [x for x in walk(out) if type(x).__name__ == "Load" and x.buffer is n]
    assert len(reads) == 1
    assert len([x for x in walk(out) if isinstance(x, If)]) == 3


def declined(f, text):
    out = plan(f)
    assert report(out).startswith("sequential: ") and text in report(out), report(out)
    assert commits(out) == 0


def test_declines_when_a_copied_tensor_is_written():
    i, j = fresh("i"), fresh("j")
    write = lambda v: Parallel((i, j), (const(4), const(4)), Store(v["A"], (i, j), load(v["B"], (i, j))))  # noqa: E731
    out = plan(gemm(middle=[write])[0])
    assert report(out) == "pipelined: 3 stages of B_s"  # A may have changed before the next copy, B not


@pytest.mark.spec("M:atomic-dependence")
def test_declines_when_a_tensor_is_updated_atomically():
    add = lambda v: ops.AtomicTile(region(v["A"], (0, 0), (4, 4)), const(1.0, "float16"), "add")  # noqa: E731
    assert report(plan(gemm(middle=[add])[0])) == "pipelined: 3 stages of B_s"


@pytest.mark.spec("M:stages-read-overwrite")
def test_a_buffer_modified_in_place_after_its_copy_is_pipelined():
    i, j = fresh("i"), fresh("j")
    scale = lambda v: Parallel((i, j), (const(64), const(32)), Store(  # noqa: E731
        v["A_s"], (i, j), load(v["A_s"], (i, j)) * 2))
    out = plan(gemm(middle=[scale])[0])
    assert report(out) == "pipelined: 3 stages of A_s, B_s"


def test_a_buffer_used_after_the_loop_stays():
    f, v = gemm()
    from tilelang.ir import replace, seq
    more = ops.Copy(region(v["A_s"]), region(v["A"], (0, 0), (64, 32)))
    f = replace(f, body=replace(f.body, body=seq(f.body.body, more)))
    assert report(plan(f)) == "pipelined: 3 stages of B_s"


def test_a_partial_copy_carries_values():
    f, v = gemm()
    from tilelang.ir import replace
    out = []

    def part(s):
        if isinstance(s, ops.Copy) and s.dst.buffer is v["A_s"]:
            out.append(s)
            return ops.Copy(region(v["A"], (0, 0), (32, 32)), region(v["A_s"], (0, 0), (32, 32)))

    from tilelang.ir import rewrite
    f = replace(f, body=rewrite(f.body, part))
    assert out and report(plan(f)) == "pipelined: 3 stages of B_s"


@pytest.mark.spec("R10:TL_ENABLE_ASYNC_COPY")
def test_no_async_copies():
    out = plan(gemm()[0], **{"tl.enable_async_copy": False})
    assert report(out).startswith("sequential: tl.enable_async_copy is off")


def test_bindings_follow_the_copy_they_serve():
    f, v = gemm()
    from tilelang.ir import replace, rewrite, seq
    at = fresh("at")

    def bind(s):
        if isinstance(s, ops.Copy) and s.dst.buffer is v["A_s"]:
            return seq(Bind(at, v["k"] * 32), ops.Copy(region(v["A"], (0, at), (64, 32)), s.dst))

    out = plan(replace(f, body=rewrite(f.body, bind)))
    assert report(out) == "pipelined: 3 stages of A_s, B_s"
    assert len([x for x in walk(out) if isinstance(x, Bind)]) == 3


def manual(order, stage, **kw):
    return gemm(stages=0, order=order, stage=stage, **kw)[0]


def test_manual_schedule():
    out = plan(manual((0, 1, 2), (0, 0, 2)))
    assert report(out) == "pipelined: 3 stages of A_s, B_s" and waits(loop_of(out)) == [1]
    out = plan(manual((2, 1, 0), (0, 0, 1)))  # reversed across stages: the gemm first
    assert report(out) == "pipelined: 2 stages of A_s, B_s"


def test_manual_schedule_errors():
    with pytest.raises(InternalError, match="pipeline annotation size"):
        plan(manual((0, 1), (0, 0)))
    with pytest.raises(InternalError, match="same order"):
        plan(manual((0, 0, 1), (0, 0, 1)))
    with pytest.raises(ValueError, match="a consumer of `A_s` is in stage 0, before stage 1 of its producer"):
        plan(manual((0, 1, 2), (1, 0, 0)))
    with pytest.raises(ValueError, match="comes before its producer in `order`"):
        plan(manual((2, 1, 0), (0, 0, 0)))
    with pytest.raises(TileLangError, match="num_stages of T.Pipelined must be an integer >= 0, found -1"):
        plan(gemm(stages=-1)[0])


def test_lists_that_count_bindings_are_accepted():
    f = manual((0, 1, 2, 3), (0, 0, 0, 1), middle=[lambda v: Bind(fresh("x"), v["k"] + 1)])
    assert report(plan(f)) == "pipelined: 2 stages of A_s, B_s"


def test_a_fragment_across_stages_stays_sequential():
    acc2 = Buffer("acc2", (4,), F32, "local.fragment")
    steps = [lambda v: Alloc(acc2), lambda v: ops.Fill(region(acc2), const(1.0)),
             lambda v: ops.Copy(region(acc2), region(v["C"], (0, 0), (1, 4)))]
    f = manual((0, 1, 2, 3, 4), (0, 0, 0, 1, 1), middle=steps)
    assert "would break a dependence on `acc2`" in report(plan(f))


def test_a_function_that_may_act_is_called_once_an_iteration():
    """The next row, whoever asks: a copy ahead would take the row of another iteration."""
    @T.prim_func
    def f(A: T.Tensor((64, 64), "float16"), C: T.Tensor((64, 64), "float16")):
        with T.Kernel(1, threads=128):
            As = T.alloc_shared((1, 64), "float16")
            for _ in T.Pipelined(8, num_stages=2):
                x = T.call_extern("int32", "next_row")
                T.copy(A[x, 0], As)
                T.copy(As, C[x, 0])

    assert sum(isinstance(x, Call) and x.op == "call_extern" for x in walk(plan(f.func))) == 1
