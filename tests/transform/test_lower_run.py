"""Lowered programs compute what the tile program means: device simulator against tile simulator."""

from __future__ import annotations

import numpy as np
import pytest
from tile_programs import Store, const, fragment, load, lowered, parallel, program, region, shared, tensor

from tilelang.ir import (FALSE, TRUE, AddressOf, Alloc, Bind, Buffer, Continue, Evaluate, For, Func, If, Ramp, Region,
                         Select, Seq, Var, binary, call, cast, dtype, fresh, numpy_dtype, replace, walk)
from tilelang.ir.verify import THREADS_BOUND, verify
from tilelang.layout import replicated_fragment, row_fragment, swizzled_layout, tile_fragment
from tilelang.ops import AtomicTile, Copy, CopyPlan, Fill, Gemm, GemmWarpPolicy, Reduce, Scan, Transpose
from tilelang.simulator.device.run import run_device
from tilelang.simulator.reference.run import run_tile
from tilelang.target.mma import MMA_ROWS


def values(shape, dt, seed=0):
    rng = np.random.default_rng(seed)
    if dtype(dt).is_int:
        return rng.integers(-7, 8, shape).astype(numpy_dtype(dt))
    return rng.standard_normal(shape).astype(numpy_dtype(dt))


def arguments(func: Func, sizes=None):
    out = {}
    for k, (_, b) in enumerate(func.buffers):
        shape = tuple(d if isinstance(d, int) else sizes[d.name] for d in b.shape)
        out[b.name] = values(shape, b.dtype, k)
    for p in func.params:
        if not p.dtype.is_handle:
            out[p.name] = sizes[p.name]
    return out


def agree(func: Func, tolerance=0.0, sizes=None):
    """Both meanings give the same tensors; returns the device report."""
    args = arguments(func, sizes)
    out = lowered(func)
    assert [str(f) for f in verify(out, THREADS_BOUND)] == []
    want = run_tile(func, args)
    report = run_device(out, args, check=False)
    for name, w in want.items():
        got = report.outputs[name].astype(np.float64)
        np.testing.assert_allclose(got, w.astype(np.float64), rtol=tolerance, atol=tolerance, err_msg=name)
    return report


# ---- elementwise and copies -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("n,tile,threads,dt", [(1000, 256, 128, "float32"), (1000, 100, 96, "float16"),
                                               (77, 32, 128, "int8"), (513, 512, 32, "bfloat16")])
def test_vector_add(n, tile, threads, dt):
    a, b, c = (tensor(x, (n,), dt) for x in "ABC")
    agree(program([a, b, c], [], lambda bx: [parallel((tile,), lambda i: Store(
        c, (bx * tile + i,), load(a, (bx * tile + i,)) + load(b, (bx * tile + i,))))],
        grid=(-(-n // tile),), threads=threads))


def test_run_time_length():
    n = Var("n", dtype("int32"))
    a, c = tensor("A", (n, 40)), tensor("C", (n, 40))
    f = program([a, c], [], lambda bx: [parallel((8, 40), lambda i, j: Store(
        c, (bx * 8 + i, j), load(a, (bx * 8 + i, j)) * 2.0))], grid=((n + 7) // 8,), scalars=(n,))
    for size in (1, 8, 13):
        agree(f, sizes={"n": size})


def test_run_time_extent():
    n = Var("n", dtype("int32"))
    a, c = tensor("A", (3, n)), tensor("C", (3, n))
    f = program([a, c], [], lambda bx: [parallel((3, n), lambda i, j: Store(c, (i, j), load(a, (i, j)) + 1.0))],
                scalars=(n,))
    for size in (1, 100, 131):
        agree(f, sizes={"n": size})


@pytest.mark.parametrize("m,n,dt", [(100, 96, "float16"), (64, 131, "float16"), (33, 60, "float32"), (40, 70, "int8")])
@pytest.mark.parametrize("is_async", [False, True])
def test_copy_through_shared_and_fragment(m, n, dt, is_async):
    a, c = tensor("A", (m, n), dt), tensor("C", (m, n), dt)
    s, f = shared("S", (32, 64), dt), fragment("F", (32, 64))

    def body(bx, by):
        wait = [Evaluate(call("cp_async_commit", (), "void")), Evaluate(call("cp_async_wait", (), "void", n=0))]
        return [Copy(region(a, bx * 32, by * 64, extents=(32, 64)), region(s), plan=CopyPlan(async_group=is_async)), *wait,
                Copy(region(s), region(f)), Copy(region(f), region(c, bx * 32, by * 64, extents=(32, 64)))]

    agree(program([a, c], [(s, swizzled_layout((32, 64), dtype(dt).bits)), (f, row_fragment((32, 64), 128, 4))], body,
                  grid=(-(-m // 32), -(-n // 64))))


@pytest.mark.parametrize("threads", [128, 96])
def test_transpose_through_shared(threads):
    a, c, s = tensor("A", (50, 70)), tensor("C", (70, 50)), shared("S", (32, 32))
    agree(program([a, c], [(s, None)], lambda bx, by: [
        Copy(region(a, by * 32, bx * 32, extents=(32, 32)), region(s)),
        parallel((32, 32), lambda i, j: Store(c, (bx * 32 + i, by * 32 + j), load(s, (j, i))))], grid=(3, 2),
        threads=threads))


def test_transpose_op_on_fragments_goes_through_shared():
    a, c = tensor("A", (32, 16)), tensor("C", (16, 32))
    f, g = fragment("F", (32, 16)), fragment("G", (16, 32))
    agree(program([a, c], [(f, row_fragment((32, 16), 128)), (g, row_fragment((16, 32), 128, 4))], lambda bx: [
        Copy(region(a), region(f)), Transpose(region(f), region(g)), Copy(region(g), region(c))]))


def test_part_of_a_fragment():
    a, c, f = tensor("A", (8, 32)), tensor("C", (8, 32)), fragment("F", (16, 32))
    agree(program([a, c], [(f, row_fragment((16, 32), 128))], lambda bx: [
        Fill(region(f), const(3.0)), Copy(region(a), region(f, 4, 0, extents=(8, 32))),
        Copy(region(f, 6, 0, extents=(8, 32)), region(c))]))


@pytest.mark.spec("L6:alloc_fragment")
def test_padded_fragment():
    a, c, f = tensor("A", (10, 30)), tensor("C", (10, 30)), fragment("F", (10, 30))
    agree(program([a, c], [(f, row_fragment((10, 30), 128))], lambda bx: [
        Copy(region(a), region(f)), parallel((10, 30), lambda i, j: Store(f, (i, j), load(f, (i, j)) + 1.0)),
        Copy(region(f), region(c))]))


@pytest.mark.spec("L12.1:fill")
def test_fill_part_and_shared():
    c, s = tensor("C", (16, 32)), shared("S", (16, 32))
    agree(program([c], [(s, None)], lambda bx: [
        Fill(region(s), const(2.0)), Fill(region(s, 3, 5, extents=(4, 9)), const(7.0)), Copy(region(s), region(c))]))


def test_fragment_to_fragment_of_another_layout():
    a, c = tensor("A", (32, 32), "float16"), tensor("C", (32, 32))
    f, g = fragment("F", (32, 32), "float16"), fragment("G", (32, 32))
    agree(program([a, c], [(f, row_fragment((32, 32), 128, 8)), (g, row_fragment((32, 32), 128, 2, order=(1, 0)))],
                  lambda bx: [Copy(region(a), region(f)), Copy(region(f), region(g)), Copy(region(g), region(c))]))


def test_private_arrays_are_copied_by_every_thread():
    a, c = tensor("A", (64, 8)), tensor("C", (64, 8))
    x, y = Buffer("x", (8,), dtype("float32"), "local"), Buffer("y", (8,), dtype("float32"), "local")
    f = program([a, c], [(x, None), (y, None)], lambda bx: [], threads=64)
    tx = f.body.thread_vars[0]
    body = Seq((Alloc(x), Alloc(y), Copy(region(a, tx, 0, extents=(1, 8)), region(x)), Fill(region(y), const(1.0)),
                Copy(region(x), region(c, tx, 0, extents=(1, 8)))))
    f = replace(f, body=replace(f.body, body=body))
    agree(f)
    assert any(isinstance(n, Ramp) and n.lanes == 4 for n in walk(lowered(f)))


@pytest.mark.spec("L8:vectorized")
def test_vectorized_loop_of_a_thread():
    a, c = tensor("A", (64, 8), "float16"), tensor("C", (64, 8), "float16")
    f = program([a, c], [], lambda bx: [], threads=64)
    tx, v = f.body.thread_vars[0], fresh("v")
    body = For(v, const(0), const(8), "vectorized", Store(c, (tx, v), load(a, (tx, v)) + load(a, (tx, v))))
    f = replace(f, body=replace(f.body, body=body))
    agree(f)
    assert any(isinstance(n, Ramp) and n.lanes == 8 for n in walk(lowered(f)))


# ---- bodies of parallel loops ---------------------------------------------------------------------------------------


def test_conditions_and_continue():
    a, c = tensor("A", (64, 48)), tensor("C", (64, 48))

    def point(i, j):
        skip = If(binary("lt", i + j, 10), Continue())
        both = If(load(a, (i, j)) > 0.0, Store(c, (i, j), load(a, (i, j))), Store(c, (i, j), const(-1.0)))
        return Seq((skip, both))

    agree(program([a, c], [], lambda bx: [parallel((64, 48), point)]))


def test_bound_values_and_inner_loops():
    a, c = tensor("A", (40, 33)), tensor("C", (40,))

    def point(i):
        acc = Buffer("acc", (1,), dtype("float32"), "local")
        k, x = fresh("k"), fresh("x", "float32")
        return Seq((Alloc(acc), Store(acc, (const(0),), const(0.0)),
                    For(k, const(0), const(33), "serial", Seq((
                        Bind(x, load(a, (i, k)) * 2.0), Store(acc, (const(0),), load(acc, (0,)) + x)))),
                    Store(c, (i,), load(acc, (0,)))))

    agree(program([a, c], [], lambda bx: [parallel((40,), point)]), 1e-6)


@pytest.mark.parametrize("layout", ["row", "column"])
def test_accumulation_along_a_loop_dimension_adds_every_element(layout):
    a, c, f = tensor("A", (32, 24)), tensor("C", (32,)), fragment("F", (32,))
    frag = row_fragment((32, 24), 128, 1, order=(0, 1) if layout == "row" else (1, 0))
    g = fragment("G", (32, 24))
    agree(program([a, c], [(f, frag.reduce(1)), (g, frag)], lambda bx: [
        Fill(region(f), const(0.0)), Copy(region(a), region(g)),
        parallel((32, 24), lambda i, j: Store(f, (i,), load(f, (i,)) + load(g, (i, j)))),
        Copy(region(f), region(c))]), 1e-5)


def test_accumulation_into_shared_memory():
    a, c, s = tensor("A", (32, 24)), tensor("C", (32,)), shared("S", (32,))
    agree(program([a, c], [(s, None)], lambda bx: [
        Fill(region(s), const(0.0)),
        parallel((32, 24), lambda i, j: Store(s, (i,), load(s, (i,)) + load(a, (i, j)))),
        Copy(region(s), region(c))]), 1e-5)


def test_atomics_happen_once_an_element_from_replicated_fragments():
    c, f = tensor("C", (32,)), fragment("F", (32,))
    rows = row_fragment((32, 4), 128, 1).reduce(1)
    for body in (lambda bx: [Fill(region(f), const(1.0)), AtomicTile(region(c), region(f), "add")],
                 lambda bx: [Fill(region(f), const(1.0)), parallel((32,), lambda i: Evaluate(call(
                     "atomic_add", (AddressOf(c, (i,)), load(f, (i,))), "float32", order="relaxed")))]):
        agree(program([c], [(f, rows)], body))


def test_atomic_tile_is_guarded():
    c, s = tensor("C", (20, 20)), shared("S", (16, 16))
    agree(program([c], [(s, None)], lambda bx, by: [
        Fill(region(s), const(2.0)),
        AtomicTile(region(c, bx * 16, by * 16, extents=(16, 16)), region(s), "add")], grid=(2, 2)))


def test_column_broadcast_of_a_reduced_fragment():
    a, c = tensor("A", (32, 64)), tensor("C", (32, 64))
    frag = row_fragment((32, 64), 128, 4)
    f, m = fragment("F", (32, 64)), fragment("M", (32,))
    agree(program([a, c], [(f, frag), (m, frag.reduce(1))], lambda bx: [
        Copy(region(a), region(f)), Reduce(region(f), region(m), "max", 1),
        parallel((32, 64), lambda i, j: Store(f, (i, j), load(f, (i, j)) - load(m, (i,))), loop_layout=frag),
        Copy(region(f), region(c))]))


def test_indices_of_global_memory_read_from_memory():
    a, p, c = tensor("A", (64, 32)), tensor("P", (16,), "int32"), tensor("C", (16, 32))
    agree(program([a, p, c], [], lambda bx: [parallel((16, 32), lambda i, j: Store(
        c, (i, j), load(a, (load(p, (i,)), j))))]))


# ---- reductions and scans -------------------------------------------------------------------------------------------

ROW = row_fragment((32, 64), 128, 4)
COLUMN = row_fragment((32, 64), 128, 1, order=(1, 0))
ODD = row_fragment((32, 64), 96, 1)
MMA_C = tile_fragment(MMA_ROWS["mma.m16n8k16.f16.f16.f32"].c, (1, 4), (2, 2))


@pytest.mark.parametrize("layout", [ROW, COLUMN, ODD, MMA_C], ids=["row", "column", "odd", "mma"])
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("clear", [True, False])
def test_reduce(layout, dim, clear):
    n = (64, 32)[dim]
    a, c, f, m = tensor("A", (32, 64)), tensor("C", (n,)), fragment("F", (32, 64)), fragment("M", (n,))
    agree(program([a, c], [(f, layout), (m, layout.reduce(dim))], lambda bx: [
        Copy(region(a), region(f)), Fill(region(m), const(0.5)),
        Reduce(region(f), region(m), "sum", dim, clear), Copy(region(m), region(c))], threads=layout.threads), 1e-5)


@pytest.mark.parametrize("kind,dt", [("max", "float32"), ("min", "int32"), ("abssum", "float32"), ("absmax", "int32"),
                                     ("bitand", "int32"), ("bitor", "uint8"), ("bitxor", "int32"), ("max", "float16"),
                                     ("sum", "int8")])
def test_reduce_kinds(kind, dt):
    a, c = tensor("A", (32, 64), dt), tensor("C", (32,), dt)
    f, m = fragment("F", (32, 64), dt), fragment("M", (32,), dt)
    agree(program([a, c], [(f, ROW), (m, ROW.reduce(1))], lambda bx: [
        Copy(region(a), region(f)), Reduce(region(f), region(m), kind, 1), Copy(region(m), region(c))]), 1e-5)


def test_reduce_into_another_type_and_a_foreign_layout():
    a, c = tensor("A", (32, 64), "float16"), tensor("C", (32,))
    f, m = fragment("F", (32, 64), "float16"), fragment("M", (32,))
    agree(program([a, c], [(f, ROW), (m, row_fragment((32,), 128))], lambda bx: [
        Copy(region(a), region(f)), Reduce(region(f), region(m), "sum", 1), Copy(region(m), region(c))]), 1e-5)


@pytest.mark.parametrize("keep", [True, False])
def test_reduce_of_one_dimension_and_kept_dimension(keep):
    shape = (8, 100) if keep else (100,)
    out = (8, 1) if keep else (1,)
    a, c = tensor("A", shape), tensor("C", out)
    f, m = fragment("F", shape), fragment("M", out)
    lay = row_fragment(shape, 128)
    agree(program([a, c], [(f, lay), (m, lay.reduce(len(shape) - 1, keep=True))], lambda bx: [
        Copy(region(a), region(f)), Reduce(region(f), region(m), "sum", -1), Copy(region(m), region(c))]), 1e-5)


@pytest.mark.parametrize("dim", [0, 1])
def test_reduce_in_shared_memory(dim):
    n = (24, 50)[dim]
    a, c, s, m = tensor("A", (50, 24)), tensor("C", (n,)), shared("S", (50, 24)), shared("M", (n,))
    agree(program([a, c], [(s, None), (m, None)], lambda bx: [
        Copy(region(a), region(s)), Reduce(region(s), region(m), "max", dim), Copy(region(m), region(c))]))


def test_reduce_private_arrays():
    a, c = tensor("A", (128, 8)), tensor("C", (128,))
    x, y = Buffer("x", (8,), dtype("float32"), "local"), Buffer("y", (1,), dtype("float32"), "local")
    f = program([a, c], [(x, None), (y, None)], lambda bx: [])
    tx = f.body.thread_vars[0]
    k = fresh("k")
    body = Seq((Alloc(x), Alloc(y), For(k, const(0), const(8), "serial", Store(x, (k,), load(a, (tx, k)))),
                Reduce(region(x), region(y), "sum", 0), Store(c, (tx,), load(y, (0,)))))
    agree(replace(f, body=replace(f.body, body=body)), 1e-5)


@pytest.mark.parametrize("kind,dim,reverse", [("sum", 1, False), ("sum", 0, True), ("max", 1, True)])
@pytest.mark.parametrize("scope", ["shared", "fragment"])
def test_scan(kind, dim, reverse, scope):
    a, c = tensor("A", (16, 40)), tensor("C", (16, 40))
    x = shared("X", (16, 40)) if scope == "shared" else fragment("X", (16, 40))
    lay = None if scope == "shared" else row_fragment((16, 40), 128)
    agree(program([a, c], [(x, lay)], lambda bx: [
        Copy(region(a), region(x)), Scan(region(x), region(x), kind, dim, reverse), Copy(region(x), region(c))]), 1e-5)


@pytest.mark.parametrize("shape,dim,threads", [((200,), 0, 64), ((300, 3), 1, 64), ((3, 70), 1, 128), ((40, 5), 0, 96),
                                               ((7, 33), 1, 33)])
@pytest.mark.parametrize("dt", ["float32", "int8"])
def test_scan_by_warps_and_by_threads(shape, dim, threads, dt):
    a, c, x = tensor("A", shape, dt), tensor("C", shape, dt), shared("X", shape, dt)
    agree(program([a, c], [(x, None)], lambda bx: [
        Copy(region(a), region(x)), Scan(region(x), region(x), "sum", dim), Copy(region(x), region(c))],
        threads=threads), 1e-4)


def test_softmax_rows():
    a, c = tensor("A", (10, 100), "float16"), tensor("C", (10, 100), "float16")
    lay = row_fragment((4, 100), 128)
    x, m, s = fragment("x", (4, 100)), fragment("m", (4,)), fragment("s", (4,))
    rows = lay.reduce(1)
    f = program([a, c], [(x, lay), (m, rows), (s, rows)], lambda bx: [
        Copy(region(a, bx * 4, 0, extents=(4, 100)), region(x)), Reduce(region(x), region(m), "max", 1),
        parallel((4, 100), lambda i, j: Store(x, (i, j), call("exp", (load(x, (i, j)) - load(m, (i,)),), "float32")),
                 loop_layout=lay),
        Reduce(region(x), region(s), "sum", 1),
        parallel((4, 100), lambda i, j: Store(x, (i, j), load(x, (i, j)) / load(s, (i,))), loop_layout=lay),
        Copy(region(x), region(c, bx * 4, 0, extents=(4, 100)))], grid=(3,))
    agree(f, 1e-3)


# ---- gemm -----------------------------------------------------------------------------------------------------------


def gemm_program(dt, acc, row_name, m=64, n=32, k=32, ta=False, tb=False, *, warps=(2, 2), a_frag=None, b_frag=None,
                 clear=TRUE, loops=1, out_dt=None) -> Func:
    a = tensor("A", (k * loops, m) if ta else (m, k * loops), dt)
    b = tensor("B", (n, k * loops) if tb else (k * loops, n), dt)
    c = tensor("C", (m, n), out_dt or acc)
    at, bt = ((k, m) if ta else (m, k)), ((n, k) if tb else (k, n))
    bits = dtype(dt).bits
    sa, sb, cf = shared("As", at, dt), shared("Bs", bt, dt), fragment("Cf", (m, n), acc)
    threads = 32 * warps[0] * warps[1]
    if row_name == "simt":
        lay = row_fragment((m, n), threads, 2)
    else:
        row = MMA_ROWS[row_name]
        lay = tile_fragment(row.c, (m // warps[0] // row.shape[0], n // warps[1] // row.shape[1]), warps)
    kk = fresh("k")
    more = []
    ops = [sa, sb]
    locals_ = [(sa, swizzled_layout(at, bits)), (sb, swizzled_layout(bt, bits)), (cf, lay)]
    for x, (which, frag) in enumerate((("A", a_frag), ("B", b_frag))):
        if frag is not None:
            f = fragment(which + "f", (at, bt)[x], dt)
            locals_.append((f, frag))
            more.append(Copy(region(ops[x]), region(f)))
            ops[x] = f

    def body(bx):
        step = [Copy(region(a, *((kk * k, 0) if ta else (0, kk * k)), extents=at), region(sa)),
                Copy(region(b, *((0, kk * k) if tb else (kk * k, 0)), extents=bt), region(sb)), *more,
                Gemm(region(ops[0]), region(ops[1]), region(cf), ta, tb, GemmWarpPolicy.Square, clear(kk) if callable(
                    clear) and not hasattr(clear, "dtype") else clear,
                     (("instruction", row_name), ("warps", warps)))]
        first = [] if clear is not FALSE else [Fill(region(cf), const(0.0 if dtype(acc).is_float else 0, acc))]
        return [*first, For(kk, const(0), const(loops), "serial", Seq(tuple(step))), Copy(region(cf), region(c))]

    return program([a, b, c], locals_, body, threads=threads)


F16 = "mma.m16n8k16.f16.f16.f32"


@pytest.mark.parametrize("ta", [False, True])
@pytest.mark.parametrize("tb", [False, True])
@pytest.mark.parametrize("dt,acc,row", [("float16", "float32", F16), ("float16", "float16", "mma.m16n8k16.f16.f16.f16"),
                                        ("bfloat16", "float32", "mma.m16n8k16.bf16.bf16.f32"),
                                        ("int8", "int32", "mma.m16n8k32.s8.s8.s32"),
                                        ("float32", "float32", "mma.m16n8k8.tf32.tf32.f32"),
                                        ("float8_e4m3fn", "float32", "mma.m16n8k32.e4m3.e4m3.f32"),
                                        ("float64", "float64", "mma.m8n8k4.f64.f64.f64"),
                                        ("float32", "float32", "simt"), ("float16", "float32", "simt")])
def test_gemm_transposes_and_types(ta, tb, dt, acc, row):
    tolerance = 0 if dt == "int8" else 2e-2 if acc == "float16" or "tf32" in row else 1e-4
    agree(gemm_program(dt, acc, row, ta=ta, tb=tb, clear=FALSE, loops=2), tolerance)


@pytest.mark.spec("L11:gemm")
@pytest.mark.parametrize("warps,m,n,k", [((1, 1), 16, 8, 16), ((4, 1), 64, 24, 48), ((1, 3), 48, 24, 32),
                                         ((2, 4), 96, 96, 16)])
def test_gemm_shapes_and_warps(warps, m, n, k):
    agree(gemm_program("float16", "float32", F16, m, n, k, warps=warps), 1e-4)


def test_gemm_main_loop_has_no_bank_conflicts():
    report = agree(gemm_program("float16", "float32", F16, 128, 128, 32, clear=FALSE, loops=2), 1e-4)
    assert report.bank_conflicts and all(c.wavefronts == c.ideal for c in report.bank_conflicts)


@pytest.mark.parametrize("clear", [FALSE, TRUE, lambda k: binary("eq", k, 0)], ids=["keep", "clear", "run time"])
def test_gemm_clear_accum(clear):
    if callable(clear) and not hasattr(clear, "dtype"):
        agree(gemm_program("float16", "float32", F16, clear=clear, loops=3), 1e-4)
    else:
        agree(gemm_program("float16", "float32", F16, clear=clear, loops=3), 1e-4)


def a_operand(m, k, warps):
    row = MMA_ROWS[F16]
    return tile_fragment(row.a, (m // warps[0] // 16, k // 16), (warps[0], 1), replicas=((warps[1], warps[0]),)
                         if warps[1] > 1 else ())


@pytest.mark.parametrize("warps", [(4, 1), (2, 2)])
def test_gemm_operand_in_registers(warps):
    agree(gemm_program("float16", "float32", F16, 64, 32, 64, warps=warps, a_frag=a_operand(64, 64, warps)), 1e-4)


def test_gemm_operand_in_registers_of_another_layout():
    agree(gemm_program("float16", "float32", F16, 64, 32, 32, a_frag=row_fragment((64, 32), 128, 8),
                       b_frag=row_fragment((32, 32), 128, 2)), 1e-4)


def test_gemm_from_a_version_of_a_shared_buffer():
    a, b, c = tensor("A", (32, 16), "float16"), tensor("B", (16, 16), "float16"), tensor("C", (32, 16))
    sa, sb, cf = shared("As", (2, 32, 16), "float16"), shared("Bs", (2, 16, 16), "float16"), fragment("Cf", (32, 16))
    slot = fresh("slot")
    lay = tile_fragment(MMA_ROWS[F16].c, (1, 2), (2, 1))
    f = program([a, b, c], [(sa, None), (sb, None), (cf, lay)], lambda bx: [
        For(slot, const(0), const(2), "serial", Seq((
            Copy(region(a), Region(sa, (slot, const(0), const(0)), (1, 32, 16))),
            Copy(region(b), Region(sb, (slot, const(0), const(0)), (1, 16, 16))),
            Gemm(Region(sa, (slot, const(0), const(0)), (1, 32, 16)),
                 Region(sb, (slot, const(0), const(0)), (1, 16, 16)), region(cf), False, False,
                 GemmWarpPolicy.Square, binary("eq", slot, 0),
                 (("instruction", F16), ("warps", (2, 1))))))),
        Copy(region(cf), region(c))], threads=64)
    agree(f, 1e-4)


def test_select_guarded_values_and_replicated_scalars():
    c, f = tensor("C", (16,)), fragment("F", (4,))
    agree(program([c], [(f, replicated_fragment((4,), 64))], lambda bx: [
        Fill(region(f), const(2.0)), parallel((4,), lambda i: Store(f, (i,), cast(i, "float32"))),
        parallel((16,), lambda i: Store(c, (i,), Select(binary("lt", i, 9), load(f, (i // 4,)), const(0.0),
                                                        dtype("float32"))))], threads=64))


def test_two_dimensional_thread_blocks():
    a, c = tensor("A", (64,)), tensor("C", (64,))
    agree(program([a, c], [], lambda bx: [parallel((64,), lambda i: Store(c, (i,), load(a, (i,)) + 1.0))],
                  threads=(8, 4, 2)))




@pytest.mark.parametrize("threads", [33, 48, 160])
def test_reduce_with_a_part_of_a_warp(threads):
    a, c, f, m = tensor("A", (5, 48)), tensor("C", (5,)), fragment("F", (5, 48)), fragment("M", (5,))
    lay = row_fragment((5, 48), threads)
    func = program([a, c], [(f, lay), (m, lay.reduce(1))], lambda bx: [
        Copy(region(a), region(f)), Reduce(region(f), region(m), "sum", 1), Copy(region(m), region(c))],
        threads=threads)
    agree(func, 1e-5)
