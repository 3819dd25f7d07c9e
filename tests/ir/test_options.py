"""Options of nodes: names and types are checked, texts are read back, the verifier knows the phase of each."""

import pytest

from tilelang import ops
from tilelang.ir import (CALL_OPTIONS, TILE_OPS, AddressOf, Alloc, Buffer, BufferFacts, Call, Evaluate, For, Func, FuncFacts,
                         Launch, LaunchPlan, LoopPlan, Options, Parallel, ParallelPlan, Region, Seq, Stmt, Var, call, const,
                         contains, dtype, parse, rewrite, seq, substitute, to_text, walk, with_options)
from tilelang.ir.verify import verify
from tilelang.layout import row_fragment

F32 = dtype("float32")
PLAIN, HERE = LaunchPlan(), FuncFacts()


def program(*stmts: Stmt, plan: LaunchPlan = PLAIN, facts: FuncFacts = HERE, tensors=()) -> Func:
    names = [Var(n, dtype("int32")) for n in ("bx", "tx", "ty", "tz")]
    handles = tuple(Var(f"{b.name}_handle", dtype("handle")) for b in tensors)
    launch = Launch((const(1),), (names[0],), (32, 1, 1), tuple(names[1:]), seq(*stmts), plan)
    return Func("main", handles, tuple(zip(handles, tensors)), launch, facts=facts)


def value_of(kind: str):
    """Some value of a type other than the usual default."""
    return {"int": 7, "bool": True, "str": "text", "tuple[int, ...]": (3,), "tuple[str, ...]": ("one", 'a "quoted" one'),
            "tuple[int, int]": (4, 2), "tuple[int, int, int]": (2, 1, 1), "tuple[tuple[str, int], ...]": (("S", 2),),
            "tuple[int | str, ...]": (4, "row"), "Expr": const(5, "uint32")}.get(kind)


def filled(record: type[Options], skip: tuple[str, ...] = ()) -> Options:
    """A record with a value for every option whose type says what one is."""
    kinds = {f.name: str(f.type).removesuffix(" | None").removesuffix(" | int").removeprefix("int | ")
             for f in record.__dataclass_fields__.values()}
    return record(**{n: v for n, k in kinds.items() if n not in skip and (v := value_of(k)) is not None})


@pytest.mark.parametrize("op", sorted(CALL_OPTIONS))
def test_options_of_intrinsics_are_read_back(op):
    options = filled(CALL_OPTIONS[op])
    assert len(options.given()) == len(options.names)
    f = program(Evaluate(Call(op, (), dtype("void"), options)))
    (got,) = walk(parse(to_text(f)), Call)
    assert got.options == options and hash(got.options) == hash(options) and got == Call(op, (), dtype("void"), options)


def test_plans_and_facts_are_read_back():
    bar = Buffer("bar", (2,), dtype("uint64"), "shared.barrier", facts=BufferFacts(arrive=(1, 4), cluster=True, align=16))
    a = Buffer("A", (4,), F32)
    i = Var("i", dtype("int32"))
    copy = ops.Copy(Region(a, (const(0),), (4,)), Region(a, (const(0),), (4,)), (("note", "mine"),),
                    ops.CopyPlan(barrier=(bar, i % 2), tma=True, iterations=3, loop_layout=row_fragment((4, 4), 32)))
    loop = For(i, const(0), const(4), "pipelined", copy, (("note", (1, "mine")),), LoopPlan(num_stages=2, order=(1, 0)))
    plan = LaunchPlan(layouts=((bar, row_fragment((4, 4), 32)),), shared_offsets=((bar, 128),), shared_bytes=const(3) + i,
                      report=("one", 'a "quoted" one'), cluster=(2, 1, 1), safe_values=((a, const(1.0)),))
    f = program(Alloc(bar), loop, plan=plan, tensors=(a,),
                facts=FuncFacts(phase="SYNCED", out_idx=(-1,), pass_configs=(("tl.x", True),)))
    g = parse(to_text(f))
    assert g == f and to_text(g) == to_text(f) and g.facts == f.facts
    for change in ({"iterations": 2}, {"barrier": None}, {"tma": None}):
        assert rewrite(f, lambda n, to=change: with_options(n, **to) if isinstance(n, ops.Copy) else None) != f, change


@pytest.mark.parametrize("name", [n for n in sorted(TILE_OPS) if TILE_OPS[n]._options])
def test_plans_of_tile_operations_are_read_back(name):
    plan = filled(type(TILE_OPS[name].plan), skip=("barrier", "share", "loop_layout"))
    whole = Region(Buffer("A", (4, 4), F32), (const(0), const(0)), (4, 4))
    fields = {"copy": (whole, whole), "atomic": (whole, whole, "add"), "reduce": (whole, whole, "sum", 0, True, False),
              "gemm": (whole, whole, whole, False, False, ops.GemmWarpPolicy.Square, const(False)),
              "gemm_sp": (whole, whole, whole, False, False, ops.GemmWarpPolicy.Square, const(False))}[name]
    f = program(TILE_OPS[name](*fields, plan=plan, **({"e": whole} if name == "gemm_sp" else {})), tensors=(whole.buffer,))
    (got,) = walk(parse(to_text(f)), TILE_OPS[name])
    assert got.plan.given() == plan.given() and len(plan.given()) >= 2


@pytest.mark.parametrize("make", [
    lambda: call("cp_async", (), "void", byte=16), lambda: call("cp_async", (), "void", bytes="16"),
    lambda: call("cp_async", (), "void"), lambda: call("cp_async_commit", (), "void", n=1),
    lambda: Call("mma", (), dtype("void"), CALL_OPTIONS["cp_async_wait"](n=1)), lambda: LoopPlan(num_stages=True),
    lambda: LaunchPlan(cluster=2), lambda: LaunchPlan(report="one line"), lambda: ops.CopyPlan(barrier=True),
    lambda: with_options(call("mma", (), "void", row="x"), column="y"), lambda: with_options(ops.GemmSchedule(), wait=0)])
def test_wrong_names_and_types_raise(make):
    with pytest.raises((TypeError, AttributeError)):
        make()


def test_none_puts_an_option_back_and_what_does_not_change_is_the_same_object():
    launch = program(plan=LaunchPlan(pdl=True, report=("x",))).body
    assert with_options(launch, pdl=True) is launch and with_options(launch, report=("x",)).plan is launch.plan
    assert with_options(launch, pdl=None, report=None).plan == LaunchPlan()
    assert call("wgmma_wait", (), "void") == call("wgmma_wait", (), "void", n=0) != call("wgmma_wait", (), "void", n=1)


def test_walks_and_rewrites_see_what_options_name():
    old, new = (Buffer(n, (2,), dtype("uint64")) for n in ("bar", "other"))
    i, j = (Var(n, dtype("int32")) for n in "ij")
    a = Region(Buffer("A", (4,), F32), (const(0),), (4,))
    copy = ops.Copy(a, a, plan=ops.CopyPlan(barrier=(old, i + 1)))
    assert old in list(walk(copy, Buffer)) and i in list(walk(copy, Var)) and contains(copy, Var)
    done = substitute(copy, {old: new, i: j})
    assert done.plan.barrier[0] is new and done.plan.barrier[1].same(j + 1) and substitute(copy, {j: i}) is copy


def rules(f: Func, phase: str) -> set[str]:
    return {x.rule for x in verify(f, phase)}


@pytest.mark.parametrize("plan, here, elsewhere", [
    (LaunchPlan(compute_threads=128), "TILE", "THREADS_BOUND"),
    (LaunchPlan(layouts=((Buffer("b", (1,), F32), 0),)), "TILE", "SYNCED"),
    (LaunchPlan(shared_bytes=4), "DEVICE", "SYNCED"), (LaunchPlan(sync_report="ordered"), "DEVICE", "TILE"),
    (LoopPlan(independent=True), "THREADS_BOUND", "TILE"), (LoopPlan(registers=True), "DEVICE", "SYNCED")])
def test_an_option_stands_in_its_phases_alone(plan, here, elsewhere):
    i, of_loop = Var("i", dtype("int32")), isinstance(plan, LoopPlan)
    f = program(For(i, const(0), const(4), "unroll", Seq(()), (), plan)) if of_loop else program(plan=plan)
    assert "options" not in rules(f, here) and "options" in rules(f, elsewhere)


def test_an_option_is_no_annotation_and_the_other_way_round():
    loop = Parallel((Var("i", dtype("int32")),), (const(4),), Seq(()), (("coalesced_width", 4), ("note", 1)), ParallelPlan())
    assert loop.attr("note") == 1 and rules(program(loop), "TILE") == {"options"}
    with pytest.raises(KeyError, match="coalesced_width is an option"):
        loop.attr("coalesced_width")
    with pytest.raises(TypeError):
        with_options(loop, note=2)
    assert not rules(program(Parallel(loop.vars, loop.extents, Seq(()), (("note", 1),))), "TILE")


def test_addresses_in_calls_are_no_options():
    b = Buffer("b", (4,), F32)
    pin = Evaluate(call("wgmma_pin", (AddressOf(b, (const(1),)),), "void", count=4, move="in"))
    (c,) = walk(parse(to_text(program(pin, tensors=(b,)))), Call)
    assert (c.options.count, c.options.move, len(c.args)) == (4, "in", 1)
