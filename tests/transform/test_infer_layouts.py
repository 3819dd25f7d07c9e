"""Layout inference: what each op demands, what follows, what is chosen freely; always a layout for every buffer."""

import numpy as np
import pytest

from tilelang.ir import (FALSE, TRUE, Alloc, Buffer, For, Func, Launch, Load, Parallel, Region, Seq, Store, Var, call, cast,
                         const, convert, dtype, fresh, load, walk, LaunchPlan, ParallelPlan, with_options)
from tilelang.layout import Fragment, bank_conflicts, row_fragment, swizzled_layout
from tilelang.ops import Copy, Fill, Gemm, GemmWarpPolicy, Reduce
from tilelang.ops.gemm.select import operand_fragments
from tilelang.target.mma import MMA_ROWS
from tilelang.transform.layout.infer_layouts import infer_layouts
from tilelang.transform.lower.lower_tile_ops import lower_tile_ops
from tilelang.transform.framework.pass_ import PassContext

F16_ROW = "mma.m16n8k16.f16.f16.f32"


def tensor(name, shape, dt="float16"):
    return Buffer(name, shape, dtype(dt))


def shared(name, shape, dt="float16"):
    return Buffer(name, shape, dtype(dt), "shared.dyn")


def frag(name, shape, dt="float32"):
    return Buffer(name, shape, dtype(dt), "local.fragment")


def region(b, mins=None, extents=None):
    return Region(b, tuple(convert(m) for m in (mins or [0] * b.ndim)), tuple(extents or b.shape))


def copy(src, dst, src_at=None, dst_at=None):
    size = dst.shape if src.scope_name == "global" else src.shape
    return Copy(region(src, src_at, size if src.scope_name == "global" else None),
                region(dst, dst_at, size if dst.scope_name == "global" else None))


def gemm(a, b, c, ta=False, tb=False, policy=GemmWarpPolicy.Square, a_at=None):
    ra = region(a) if a_at is None else region(a, a_at, [1] * (a.ndim - 2) + list(a.shape[-2:]))
    return Gemm(ra, region(b), region(c), ta, tb, policy, FALSE)


def parallel(extents, body):
    vs = tuple(fresh("ij"[k]) for k in range(len(extents)))
    return Parallel(vs, tuple(convert(e) for e in extents), body(*vs))


def infer(tensors, locals_, stmts, threads=128, layouts=(), grid=(8, 8), target=None):
    block = tuple(fresh(n) for n in ("bx", "by"))
    body = Seq((*[Alloc(b) for b in locals_], *(stmts(*block) if callable(stmts) else stmts)))
    launch = Launch(tuple(const(g) for g in grid), block, (threads, 1, 1), tuple(fresh(n) for n in ("tx", "ty", "tz")),
                    body, LaunchPlan(layouts=layouts))
    handles = tuple(Var(b.name + "_handle", dtype("handle")) for b in tensors)
    out = infer_layouts(Func("main", handles, tuple(zip(handles, tensors)), launch), PassContext(target))
    layouts = dict(out.body.plan.layouts)
    for b in locals_:
        assert b in layouts, f"{b.name} has no layout"
        assert tuple(layouts[b].shape) == tuple(b.shape)
    return layouts, out.body


def nodes(launch, kind):
    return [x for x in walk(launch) if isinstance(x, kind)]


def gemm_program(ta=False, tb=False, dt="float16", acc="float32", bm=128, bn=128, bk=32, threads=128, stages=0,
                 policy=GemmWarpPolicy.Square):
    m, n, k = 1024, 1024, 1024
    a, b = tensor("A", (k, m) if ta else (m, k), dt), tensor("B", (n, k) if tb else (k, n), dt)
    c = tensor("C", (m, n), dt)
    lead = (stages,) if stages else ()
    a_s = shared("A_s", lead + ((bk, bm) if ta else (bm, bk)), dt)
    b_s = shared("B_s", lead + ((bn, bk) if tb else (bk, bn)), dt)
    acc_f = frag("acc", (bm, bn), acc)
    ko = fresh("ko")

    def at(x, slot=0):
        return region(x, ([slot] if stages else []) + [0, 0], ([1] if stages else []) + list(x.shape[-2:]))

    def stmts(bx, by):
        slot = ko % stages if stages else 0
        ra = region(a, (ko * bk, by * bm) if ta else (by * bm, ko * bk), a_s.shape[-2:])
        rb = region(b, (bx * bn, ko * bk) if tb else (ko * bk, bx * bn), b_s.shape[-2:])
        body = Seq((Copy(ra, at(a_s, slot)), Copy(rb, at(b_s, slot)),
                    Gemm(at(a_s, slot), at(b_s, slot), region(acc_f), ta, tb, policy, FALSE)))
        return [Fill(region(acc_f), const(0, acc)), For(ko, const(0), const(k // bk), "serial", body),
                Copy(region(acc_f), region(c, (by * bm, bx * bn), (bm, bn)))]

    return infer([a, b, c], [a_s, b_s, acc_f], stmts, threads) + (a_s, b_s, acc_f)


@pytest.mark.parametrize("ta", [False, True])
@pytest.mark.parametrize("tb", [False, True])
@pytest.mark.parametrize("stages", [0, 3])
def test_gemm_operands_and_accumulator(ta, tb, stages):
    layouts, launch, a_s, b_s, acc = gemm_program(ta, tb, stages=stages)
    g, = nodes(launch, Gemm)
    assert g.plan.instruction == F16_ROW and g.plan.warps == (2, 2)
    assert layouts[acc] == operand_fragments(g, MMA_ROWS[F16_ROW], (2, 2), 128)[2]
    for s in (a_s, b_s):
        table = layouts[s].table()
        table = table[0] if stages else table
        assert layouts[s].size == s.size, "no padding"
        for r0 in range(0, s.shape[-2], 8):
            for chunk in range(s.shape[-1] // 8):
                rows = np.array([(r0 + r, chunk * 8) for r in range(8)])
                assert bank_conflicts(table, rows, 16, 8) == 0


@pytest.mark.parametrize("dt, acc, row", [("bfloat16", "float32", "mma.m16n8k16.bf16.bf16.f32"),
                                          ("float16", "float16", "mma.m16n8k16.f16.f16.f16"),
                                          ("float32", "float32", "mma.m16n8k8.tf32.tf32.f32"),
                                          ("int8", "int32", "mma.m16n8k32.s8.s8.s32")])
@pytest.mark.parametrize("ta, tb", [(False, False), (True, True)])
def test_gemm_of_other_types_has_no_conflicts(dt, acc, row, ta, tb):
    """Operands of 8 and 32 bits whose K is not contiguous are read element by element: also free of conflicts."""
    layouts, launch, a_s, b_s, acc_f = gemm_program(ta, tb, dt, acc, bk=64)
    g, = nodes(launch, Gemm)
    assert g.plan.instruction == row
    fa, fb, _ = operand_fragments(g, MMA_ROWS[row], g.plan.warps, 128)
    bits = dtype(dt).bits
    for s, f, k_last in ((a_s, fa, not ta), (b_s, fb, tb)):
        if bits == 16 or k_last:
            continue
        owner, reg = f.owners()[0], f.register_table()
        worst = 0
        for r in range(4):
            at = np.argwhere((owner < 32) & (reg == r))
            at = at[np.argsort(owner[tuple(at.T)])]
            worst = max(worst, bank_conflicts(layouts[s].table(), at, bits))
        assert worst <= (0 if bits == 32 else 3), f"{s.name}: {worst} {layouts[s]!r}"


def test_policies():
    assert nodes(gemm_program(policy=GemmWarpPolicy.FullRow)[1], Gemm)[0].plan.warps == (4, 1)
    assert nodes(gemm_program(policy=GemmWarpPolicy.FullCol)[1], Gemm)[0].plan.warps == (1, 4)
    assert nodes(gemm_program(bm=64, bn=256)[1], Gemm)[0].plan.warps == (1, 4)
    assert nodes(gemm_program(bm=16, bn=128, policy=GemmWarpPolicy.FullRow)[1], Gemm)[0].plan.warps == (1, 4)


@pytest.mark.parametrize("options, row, warps", [
    (dict(bm=24), F16_ROW, (1, 4)),
    (dict(bk=24), "mma.m16n8k8.f16.f16.f32", (2, 2)),
    (dict(bk=20), F16_ROW, (2, 2)),
    (dict(bm=16, bn=8), F16_ROW, (1, 1)),
    (dict(bm=16, bn=104, threads=384), F16_ROW, (1, 7)),
])
def test_gemm_shapes_that_instructions_do_not_divide(options, row, warps):
    layouts, launch, _, _, acc = gemm_program(**options)
    g, = nodes(launch, Gemm)
    assert g.plan.instruction == row and g.plan.warps == warps
    assert layouts[acc] == operand_fragments(g, MMA_ROWS[row], warps, launch.num_threads)[2]


@pytest.mark.parametrize("options, text", [
    (dict(dt="int8", acc="float32"), "does not multiply int8 by int8 into float32"),
    (dict(dt="float16", acc="int32"), "does not multiply"),
])
def test_gemm_shapes_that_are_refused(options, text):
    with pytest.raises(ValueError, match=text):
        gemm_program(**options)


def test_float32_of_odd_size_takes_plain_multiply_adds():
    layouts, launch, _, _, acc = gemm_program(dt="float32", bm=24, bn=20, bk=12)
    g, = nodes(launch, Gemm)
    assert g.plan.instruction == "simt"
    keys = layouts[acc].owners()[0] * layouts[acc].registers + layouts[acc].register_table()
    assert np.unique(keys).size == 24 * 20


def test_plain_multiply_adds_read_shared_without_conflicts():
    layouts, launch, a_s, b_s, acc = gemm_program(dt="float32", bm=64, bn=128, bk=20, tb=True, threads=96)
    assert nodes(launch, Gemm)[0].plan.instruction == "simt"
    owner, reg = layouts[acc].owners()[0], layouts[acc].register_table()
    at = np.argwhere((owner < 32) & (reg == 0))
    for k in range(4):
        for s, side in ((a_s, 0), (b_s, 1)):
            points = np.stack([at[:, side], np.full(len(at), k)], axis=1)
            assert bank_conflicts(layouts[s].table(), points, 32) == 0, repr(layouts[s])


def attention(bm=64, bn=64, d=64, threads=128):
    q, k, v, o = (tensor(n, (4096, d)) for n in "QKVO")
    qs, ks, vs = shared("Qs", (bm, d)), shared("Ks", (bn, d)), shared("Vs", (bn, d))
    p, ph, of = frag("P", (bm, bn)), frag("Ph", (bm, bn), "float16"), frag("Of", (bm, d))
    m, m0, r, row, lsum = (frag(n, (bm,)) for n in ("m", "m0", "r", "row", "l"))
    ko = fresh("ko")

    def stmts(bx, by):
        def exps(i, j):
            return Store(p, (i, j), call("exp2", [load(p, (i, j)) - load(m, (i,))], "float32"))

        body = Seq((
            Copy(region(k, (ko * bn, 0), (bn, d)), region(ks)),
            Gemm(region(qs), region(ks), region(p), False, True, GemmWarpPolicy.Square, TRUE),
            Copy(region(v, (ko * bn, 0), (bn, d)), region(vs)),
            Copy(region(m), region(m0)), Reduce(region(p), region(m), "max", 1, False),
            parallel((bm,), lambda i: Store(r, (i,), load(m0, (i,)) - load(m, (i,)))),
            parallel((bm, bn), exps), Reduce(region(p), region(row), "sum", 1),
            parallel((bm,), lambda i: Store(lsum, (i,), load(lsum, (i,)) * load(r, (i,)) + load(row, (i,)))),
            parallel((bm, d), lambda i, j: Store(of, (i, j), load(of, (i, j)) * load(r, (i,)))),
            Copy(region(p), region(ph)),
            Gemm(region(ph), region(vs), region(of), False, False, GemmWarpPolicy.Square, FALSE)))
        return [Copy(region(q, (bx * bm, 0), (bm, d)), region(qs)), Fill(region(of), const(0.0)),
                For(ko, const(0), const(8), "serial", body),
                parallel((bm, d), lambda i, j: Store(of, (i, j), load(of, (i, j)) / load(lsum, (i,)))),
                Copy(region(of), region(o, (bx * bm, 0), (bm, d)))]

    locals_ = [qs, ks, vs, p, ph, of, m, m0, r, row, lsum]
    return infer([q, k, v, o], locals_, stmts, threads), {b.name: b for b in locals_}


def test_attention_keeps_rows_in_one_warp_and_everything_in_registers():
    (layouts, launch), b = attention()
    assert [g.plan.warps for g in nodes(launch, Gemm)] == [(4, 1), (4, 1)]
    assert layouts[b["P"]].same_owners(layouts[b["Ph"]]), "P moves to the A operand without leaving its thread"
    rows = layouts[b["P"]].reduce(1)
    for name in ("m", "m0", "r", "row", "l"):
        assert layouts[b[name]] == rows
    for loop in nodes(launch, Parallel):
        lay = loop.plan.loop_layout
        for x in walk(loop.body):
            if isinstance(x, (Load, Store)):
                dims = [loop.vars.index(i) for i in x.indices]
                mine = lay.project(dims) if len(dims) < lay.ndim else lay
                assert layouts[x.buffer].same_owners(mine)


def test_attention_with_more_warps_than_row_tiles_still_has_layouts():
    (layouts, launch), b = attention(threads=256)
    assert nodes(launch, Gemm)[0].plan.warps == (4, 2)
    assert layouts[b["Ph"]].replicas == 2


def test_softmax_rows_follow_the_copy():
    x, y = tensor("X", (1024, 256), "float32"), tensor("Y", (1024, 256), "float32")
    xf, m = frag("xf", (16, 256)), frag("m", (16,))

    def stmts(bx, by):
        return [Copy(region(x, (bx * 16, 0), (16, 256)), region(xf)), Reduce(region(xf), region(m), "max", 1),
                parallel((16, 256), lambda i, j: Store(xf, (i, j), load(xf, (i, j)) - load(m, (i,)))),
                Copy(region(xf), region(y, (bx * 16, 0), (16, 256)))]

    layouts, launch = infer([x, y], [xf, m], stmts)
    assert layouts[xf].vector_width == 4 and layouts[m] == layouts[xf].reduce(1)
    loop, = nodes(launch, Parallel)
    assert loop.plan.loop_layout.same_owners(layouts[xf])
    assert len(np.unique(layouts[xf].owners()[0][0] // 32)) == 1, "a row stays in one warp"


def test_bias_is_replicated_along_rows():
    c, bias = tensor("C", (1024, 1024), "float32"), tensor("bias", (1024,), "float32")
    a_s, b_s, acc, bf = shared("A_s", (64, 32)), shared("B_s", (32, 64)), frag("acc", (64, 64)), frag("bf", (64,))

    def stmts(bx, by):
        return [gemm(a_s, b_s, acc), Copy(region(bias, (bx * 64,), (64,)), region(bf)),
                parallel((64, 64), lambda i, j: Store(acc, (i, j), load(acc, (i, j)) + load(bf, (j,)))),
                Copy(region(acc), region(c, (by * 64, bx * 64), (64, 64)))]

    layouts, _ = infer([c, bias], [a_s, b_s, acc, bf], stmts)
    have, want = layouts[bf].owners(), layouts[acc].project([1]).owners()
    assert all((have == t).any(axis=0).all() for t in want) and layouts[bf].replicas == 16


def test_accumulation_along_a_loop_stays_in_one_thread():
    a, s = frag("A", (64, 16)), frag("s", (64,))
    x = tensor("X", (64, 16), "float32")
    stmts = [parallel((64, 16), lambda i, j: Store(s, (i,), load(s, (i,)) + load(a, (i, j)))), copy(x, a)]
    layouts, launch = infer([x], [a, s], stmts)
    lay = nodes(launch, Parallel)[0].plan.loop_layout
    assert all(len(np.unique(lay.owners()[0][i])) == 1 for i in range(64))
    assert layouts[a].same_owners(lay)


def test_fragment_read_by_every_thread_is_replicated():
    f, out = frag("f", (4,)), tensor("out", (128,), "float32")
    t = Var("t", dtype("int32"))
    stmts = [Store(f, (const(0),), const(1.0)), For(t, const(0), const(4), "serial", Store(out, (t,), load(f, (t,))))]
    layouts, _ = infer([out], [f], stmts)
    assert layouts[f].replicas == 128 and layouts[f].registers == 4


@pytest.mark.parametrize("dt, n, most", [("float32", 32, 0), ("float32", 64, 1), ("float16", 32, 0), ("float16", 64, 0),
                                         ("int8", 64, 0)])
def test_transpose_through_shared_is_free_of_conflicts(dt, n, most):
    """Vectors stay whole on the way in; a 64-wide row of 4-byte elements halves them and leaves one conflict."""
    a, b, s = tensor("A", (1024, 1024), dt), tensor("B", (1024, 1024), dt), shared("S", (n, n), dt)

    def stmts(bx, by):
        return [Copy(region(a, (by * n, bx * n), (n, n)), region(s)),
                parallel((n, n), lambda i, j: Store(b, (bx * n + i, by * n + j), load(s, (j, i))))]

    layouts, _ = infer([a, b], [s], stmts)
    # The reading warp: consecutive vectors of a row of B, element v of each at a time.
    bits, w = dtype(dt).bits, 128 // dtype(dt).bits
    table = layouts[s].table()
    for v in range(w):
        points = [np.unravel_index(lane * w, (n, n)) for lane in range(32)]
        column = np.array([(j + v, i) for i, j in points])
        assert bank_conflicts(table, column, bits) <= most, repr(layouts[s])
    starts = table[:, ::w]
    assert most or np.array_equal(table.reshape(n, n // w, w), starts[..., None] + np.arange(w))


def test_buffer_used_row_by_row_stays_linear():
    a, b, s = tensor("A", (1024, 64)), tensor("B", (1024, 64)), shared("S", (16, 64))

    def stmts(bx, by):
        return [Copy(region(a, (bx * 16, 0), (16, 64)), region(s)), Copy(region(s), region(b, (bx * 16, 0), (16, 64)))]

    layouts, _ = infer([a, b], [s], stmts)
    assert np.array_equal(layouts[s].table(), np.arange(1024).reshape(16, 64))


def test_views_share_the_storage():
    s = shared("S", (8, 64))
    v = Buffer("V", (512,), dtype("float16"), "shared.dyn", data=s.data)
    b = tensor("B", (512,))
    layouts, launch = infer([b], [s], [copy(v, b)])
    assert layouts[v].size == 512 and np.array_equal(layouts[v].table(), layouts[s].table().reshape(-1))


@pytest.mark.spec("L18:annotate_layout")
def test_user_annotations_hold():
    a_s, b_s, acc = shared("A_s", (64, 32)), shared("B_s", (32, 64)), frag("acc", (64, 64))
    mine = swizzled_layout((64, 32), 16, 32)
    layouts, _ = infer([], [a_s, b_s, acc], [gemm(a_s, b_s, acc)], layouts=((a_s, mine),))
    assert layouts[a_s] == mine
    staged = shared("A_s", (3, 64, 32))
    layouts, _ = infer([], [staged, b_s, acc], [gemm(staged, b_s, acc, a_at=(0, 0, 0))],
                       layouts=((staged, mine),))
    assert np.array_equal(layouts[staged].table()[1], mine.table() + 2048)


def test_a_reduction_into_a_shared_tile_of_a_given_layout():
    f, s = frag("F", (16, 8)), shared("S", (1, 8), "float32")
    mine = swizzled_layout((1, 8), 32)
    stmts = [Fill(region(f), const(0.0)), Reduce(region(f), region(s), "sum", 0, True)]
    layouts, _ = infer([], [f, s], stmts, layouts=((s, mine),))
    assert layouts[s] == mine and layouts[f].shape == (16, 8)


@pytest.mark.spec("L18:annotate_layout", "L24:layout-conflict")
def test_annotations_that_cannot_hold_are_refused():
    a_s, b_s, acc = shared("A_s", (64, 32)), shared("B_s", (32, 64)), frag("acc", (64, 64))
    wrong = row_fragment((64, 64), 128)
    with pytest.raises(ValueError, match="Layout infer conflict between"):
        infer([], [a_s, b_s, acc], [gemm(a_s, b_s, acc)], layouts=((acc, wrong),))
    with pytest.raises(ValueError, match="needs a Fragment, found Layout"):
        infer([], [acc], [], layouts=((acc, swizzled_layout((64, 64), 32)),))
    with pytest.raises(ValueError, match="has shape"):
        infer([], [a_s], [], layouts=((a_s, swizzled_layout((32, 32), 16)),))


def test_runtime_shapes_are_refused():
    n = Var("n", dtype("int32"))
    with pytest.raises(ValueError, match="run-time shape"):
        infer([], [frag("F", (n, 4))], [])  # shared memory of run-time size has RowMajor storage


@pytest.mark.spec("M:odd-threads")
@pytest.mark.parametrize("threads", [32, 96, 100, 256])
def test_any_number_of_threads(threads):
    x, f = tensor("X", (1000, 100), "float32"), frag("f", (7, 100))
    layouts, _ = infer([x], [f], lambda bx, by: [Copy(region(x, (bx * 7, 0), (7, 100)), region(f))], threads)
    lay = layouts[f]
    keys = lay.owners()[0] * lay.registers + lay.register_table()
    assert isinstance(lay, Fragment) and np.unique(keys).size == 700 and lay.threads == threads


def test_nothing_to_do_leaves_the_body_alone():
    b = tensor("B", (64,), "float32")
    loop = parallel((64,), lambda i: Store(b, (i,), cast(i, "float32")))
    _, launch = infer([b], [], [loop])
    assert nodes(launch, Parallel)[0] is loop


def test_element_shared_by_neighbours_stays_with_them():
    """G[i, j] = F[i, j // 2]: F's layout is G's without the innermost register digit."""
    f, g, out = frag("F", (64, 32)), frag("G", (64, 64)), tensor("out", (64, 64), "float32")
    stmts = [parallel((64, 64), lambda i, j: Store(g, (i, j), load(f, (i, j // 2)))), copy(g, out)]
    layouts, launch = infer([out], [f, g], stmts)
    lay = nodes(launch, Parallel)[0].plan.loop_layout.owners()[0]
    assert np.array_equal(layouts[f].owners()[0], lay[:, ::2]) and np.array_equal(layouts[f].owners()[0], lay[:, 1::2])


def test_loop_layout_of_the_user_rules_the_fragments():
    f, x = frag("F", (16, 32)), tensor("X", (16, 32), "float32")
    mine = Fragment((16, 32), forward_fn=lambda i, j: (i % 8 * 16 + j // 2, j % 2 + i // 8 * 2))
    loop = parallel((16, 32), lambda i, j: Store(f, (i, j), load(x, (i, j))))
    loop = Parallel(loop.vars, loop.extents, loop.body, plan=ParallelPlan(loop_layout=mine))
    layouts, _ = infer([x], [f], [loop, copy(f, x)])
    assert layouts[f] == mine
    with pytest.raises(ValueError, match="must be a Fragment of that shape"):
        infer([x], [f], [with_options(loop, loop_layout=row_fragment((16, 16), 128))])


def test_the_trace_says_why():
    lines = []
    a_s, b_s, acc = shared("A_s", (64, 32)), shared("B_s", (32, 64)), frag("acc", (64, 64))
    body = Seq((Alloc(a_s), Alloc(b_s), Alloc(acc), gemm(a_s, b_s, acc)))
    launch = Launch((const(1),), (fresh("bx"),), (128, 1, 1), tuple(fresh(n) for n in ("tx", "ty", "tz")), body)
    cx = PassContext(None, {"tl.layout_visualization_enable": True}, debug=4, report=lines.append)
    infer_layouts(Func("main", (), (), launch), cx)
    assert lines[2].startswith("# layout of acc (mma.m16n8k16.f16.f16.f32 on 2x2 warps): Fragment((64, 64)")
    assert lines[0].startswith("# layout of A_s (1 accesses): Layout((64, 32)")
    assert any(line.startswith("# acc\nFragment 64x64  128 threads") for line in lines)


def test_dimension_walked_by_an_outer_loop_stays_in_registers():
    """for k: for i in Parallel: s[i] += F[i, k] needs no exchange: each thread owns its rows of F."""
    f, s, x = frag("F", (64, 8)), frag("s", (64,)), tensor("X", (64, 8), "float32")
    k = Var("k", dtype("int32"))
    add = parallel((64,), lambda i: Store(s, (i,), load(s, (i,)) + load(f, (i, k))))
    stmts = [copy(x, f), Fill(region(s), const(0.0)), For(k, const(0), const(8), "serial", add)]
    layouts, launch = infer([x], [f, s], stmts, threads=64)
    assert layouts[f].register_of((5, 3)) == 3 and layouts[f].thread_of((5, 3)) == 5
    func = Func("main", (Var("X_handle", dtype("handle")),), (), launch)
    lowered = lower_tile_ops(func, PassContext())
    assert not [a for a in walk(lowered) if isinstance(a, Alloc) and a.buffer.scope_name.startswith("shared")]
