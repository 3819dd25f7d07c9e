"""The CUDA printer: text of single constructs, and that NVRTC takes every one of them for sm_80 and sm_90a."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from sass_text import loops, opcodes

from tilelang.ir import (
    Alloc,
    Assert,
    Binary,
    Bind,
    Break,
    Broadcast,
    Buffer,
    Cast,
    Continue,
    For,
    If,
    Select,
    Shuffle,
    Span,
    Store,
    Unary,
    While,
    binary,
    call,
    cast,
    const,
    dtype,
    fresh,
    load,
    logical,
    select,
    seq,
)

sys.path.insert(0, str(Path(__file__).parent))
from handmade import at, evaluate, gemm, kernel, local, ramp, serial, shared, tensor, thread_vars, unrolled

from tilelang.codegen.cuda.printer import print_kernel
from tilelang.codegen.cuda.printer import sections
from tilelang.runtime import nvrtc, sass
from tilelang.target import INTRINSICS
from tilelang.target.mma import MMA_ROWS

needs_nvrtc = pytest.mark.skipif(not nvrtc.available(), reason="NVRTC is not installed")
needs_nvdisasm = pytest.mark.skipif(sass.find_nvdisasm() is None, reason="nvdisasm is not installed")


def text_of(value, *, reads=(), tvars=None, **more) -> str:
    """The expression as printed on the right of `O[tx] = …;`."""
    tvars = tvars or thread_vars()
    out = tensor("O", (128,), value.dtype.base)
    source = print_kernel(kernel((out, *reads), Store(out, (tvars[0],), value), tvars=tvars), **more)
    line = next(x for x in source.splitlines() if x.startswith("  ") and "O[" in x)
    return re.sub(r"^\s*O\[tx\] = (.*);$", r"\1", line).strip()


# ---- expressions ----------------------------------------------------------------------------------------------------

def test_both_sides_of_an_eager_select_are_executed():
    """`lane >= 1 ? shfl_up(x) + x : x` left lane 0 out of a shuffle of all lanes, which waited for it for ever."""
    tv, x = thread_vars(), tensor("X", (128,), "float32")
    tx = tv[0]
    moved = call("shfl_up", (load(x, (tx,)), const(1)), "float32", width=32)
    chosen = Select(binary("ge", tx % 32, 1), moved, load(x, (tx,)), dtype("float32"), False)
    text = text_of(chosen, reads=(x,), tvars=tv)
    assert text.startswith("tl::select_both<float>{(tx & 31) >= 1, (float)(tl::shfl_up_sync(X[tx], 1, 32")
    assert text.endswith("(float)(X[tx])}.pick()") and "?" not in text
    lazy = Select(chosen.cond, load(x, (tx,)), chosen.b, chosen.dtype, False)
    assert text_of(lazy, reads=(x,), tvars=tv) == "(tx & 31) >= 1 ? X[tx] : X[tx]"


def test_index_arithmetic_prints_as_shifts_and_masks():
    tv = thread_vars()
    tx = tv[0]
    assert text_of(tx // 8 * 4 + tx % 8, tvars=tv) == "(tx >> 3) * 4 + (tx & 7)"
    assert text_of(tx // 3 % 5, tvars=tv) == "tx / 3 % 5"
    assert text_of((tx - 64) // 3, tvars=tv) == "tl::floordiv<int>(tx - 64, 3)"
    assert text_of((tx - 64) // 4, tvars=tv) == "(tx - 64) >> 2"
    assert text_of((tx - 64) % 3, tvars=tv) == "tl::floormod<int>(tx - 64, 3)"


def test_a_variable_bound_again_had_the_bounds_of_before():
    """A copy of a loop with more turns: 7 - v is negative in it, where C's division rounds the other way."""
    v, x = fresh("v"), tensor("x", (16,), "int32")

    def loop(n):
        return For(v, const(0), const(n), "serial", Store(x, (v,), (7 - v) // 3))

    text = print_kernel(kernel([x], [loop(4), loop(16)]))
    assert re.findall(r"x\[v\w*\] = (.*);", text) == ["(7 - v) / 3", "tl::floordiv<int>(7 - v, 3)"]



def test_arithmetic_on_data_wraps():
    a = tensor("A", (128,), "int32")
    tv = thread_vars()
    x = load(a, (tv[0],))
    assert text_of(x + 1, reads=(a,), tvars=tv) == "(int)((unsigned)A[tx] + (unsigned)1)"
    assert text_of(tv[0] + 1, tvars=tv) == "tx + 1"
    b = tensor("A", (128,), "int8")
    y = load(b, (tv[0],))
    assert text_of(y + y, reads=(b,), tvars=tv) == "(signed char)(A[tx] + A[tx])"


def test_precedence_needs_no_superfluous_parentheses():
    tv = thread_vars()
    tx = tv[0]
    assert text_of((tx + 1) * 2 - (tx - (tx + 3)), tvars=tv) == "(tx + 1) * 2 - (tx - (tx + 3))"
    a = tensor("A", (128,), "float32")
    x = load(a, (tx,))
    assert text_of(x / (x * x) - (-x), reads=(a,), tvars=tv) == "A[tx] / (A[tx] * A[tx]) - -A[tx]"
    cond = logical("or", logical("and", tx < 3, tx > 1), binary("eq", tx, const(7)))
    assert text_of(select(cond, tx, tx + 1), tvars=tv) == "tx < 3 && tx > 1 || tx == 7 ? tx : tx + 1"


@pytest.mark.parametrize("value, dt, want", [
    (1, "float32", "1.0f"), (-2.5, "float32", "-2.5f"), (1e-8, "float32", "1e-08f"), (0.1, "float64", "0.1"),
    (1, "float16", "half_t(1.0f)"), (3, "int64", "3LL"), (3, "uint32", "3u"), (-3, "int8", "(signed char)-3"),
    (-(2**31), "int32", "(-2147483647 - 1)"), (2**63, "uint64", "9223372036854775808ULL"), (True, "bool", "true"),
    (float("inf"), "float32", "TL_INFINITY"), (float("-inf"), "float16", "half_t(-TL_INFINITY)"),
    (float("nan"), "float32", "TL_NAN"),
])  # fmt: skip
def test_literals(value, dt, want):
    assert text_of(const(value, dt)) == want


@pytest.mark.parametrize("source, to, want", [
    ("float32", "float16", "half_t(A[tx])"), ("float16", "float32", "(float)A[tx]"),
    ("float16", "bfloat16", "bfloat16_t((float)A[tx])"), ("float16", "int8", "tl::to_int<signed char>((float)A[tx])"),
    ("int8", "float16", "half_t((float)A[tx])"), ("int32", "bfloat16", "bfloat16_t(A[tx])"),
    ("float32", "float8_e4m3", "fp8_e4_t(A[tx])"), ("float8_e5m2", "float16", "half_t((float)A[tx])"),
    ("float32", "int32", "tl::to_int<int>(A[tx])"), ("float32", "bool", "A[tx] != 0.0f"), ("uint8", "float32", "(float)A[tx]"),
])  # fmt: skip
def test_conversions(source, to, want):
    tv = thread_vars()
    a = tensor("A", (128,), source)
    assert text_of(cast(load(a, (tv[0],)), to), reads=(a,), tvars=tv) == want


def test_half_functions_go_through_float_once():
    tv = thread_vars()
    a = tensor("A", (128,), "float16")
    x = load(a, (tv[0],))
    assert text_of(call("exp", (x,), "float16"), reads=(a,), tvars=tv) == "half_t(expf((float)A[tx]))"
    assert text_of(call("exp", (x + x,), "float16"), reads=(a,), tvars=tv) == "half_t(expf((float)(A[tx] + A[tx])))"
    assert text_of(call("isnan", (x,), "bool"), reads=(a,), tvars=tv) == "(bool)isnan((float)A[tx])"
    assert text_of(x / x, reads=(a,), tvars=tv) == "half_t((float)A[tx] / (float)A[tx])"


def test_fast_math_prints_fast_functions():
    tv = thread_vars()
    a = tensor("A", (128,), "float32")
    x = call("exp", (load(a, (tv[0],)),), "float32")
    assert text_of(x, reads=(a,), tvars=tv) == "expf(A[tx])"
    assert text_of(x, reads=(a,), tvars=tv, fast_math=True) == "__expf(A[tx])"


def test_global_index_is_64_bits_wide_where_32_may_not_do():
    tv = thread_vars()
    n = fresh("n")
    out = tensor("O", (128,), "float32")

    def index(shape):
        a = tensor("A", shape, "float32")
        source = print_kernel(kernel((out, a, n), Store(out, (tv[0],), load(a, (tv[0], tv[0]))), tvars=tv))
        return re.search(r"A\[(.*)\];", source).group(1)

    assert index((128, 4096)) == "tx * 4096 + tx"
    assert index((2**20, 4096)) == "(long long)tx * 4096LL + (long long)tx"
    assert index((128, n)) == "(long long)tx * (long long)n + (long long)tx"


def test_sibling_scopes_reuse_names_and_keywords_are_avoided():
    out = tensor("float", (64,))
    body = seq(serial(4, lambda i: Store(out, (i,), const(0.0))), serial(8, lambda i: Store(out, (i,), const(1.0))))
    source = print_kernel(kernel((out,), body))
    assert source.count("for (int i = 0;") == 2 and "float* __restrict__ float_1" in source


def test_names_do_not_hide_functions():
    tv = thread_vars()
    a, o = tensor("expf", (128,)), tensor("main_kernel", (128,))
    source = print_kernel(kernel((a, o), Store(o, (tv[0],), call("exp", (load(a, (tv[0],)),), "float32")), tvars=tv))
    assert "main_kernel_1[tx] = expf(expf_1[tx]);" in source


def test_names_are_ascii():
    tv = thread_vars()
    a, o = tensor("größe", (128,)), tensor("漢", (128,))
    source = print_kernel(kernel((a, o), Store(o, (tv[0],), load(a, (tv[0],))), tvars=tv))
    assert "v_[tx] = gr__e[tx];" in source and source.isascii()


def test_read_only_tensors_are_const_and_source_lines_are_shown(tmp_path):
    file = tmp_path / "user.py"
    file.write_text("import x\nB[i] = A[i]\n")
    tv = thread_vars()
    a, b = tensor("A", (128,)), tensor("B", (128,))
    s = Store(b, (tv[0],), load(a, (tv[0],)), span=Span(str(file), 2))
    source = print_kernel(kernel((a, b), seq(s, s), tvars=tv, min_blocks_per_sm=2))
    assert "const float* __restrict__ A, float* __restrict__ B" in source
    assert source.count("// B[i] = A[i]  (user.py:2)") == 1 and "__launch_bounds__(128, 2)" in source


def test_tensors_that_may_alias_are_not_restrict():
    tv = thread_vars()
    a, b = tensor("A", (128,)), tensor("B", (128,))
    source = print_kernel(kernel((a, b), Store(b, (tv[0],), load(a, (tv[0],))), tvars=tv, may_alias=("A",)))
    assert "const float* A, float* __restrict__ B" in source


def test_variables_without_a_first_value_start_at_zero():
    o, x = tensor("O", (8,)), Buffer("x", (1,), dtype("float16"), "local.var")
    source = print_kernel(kernel((o,), seq(Alloc(x), Store(o, (const(0),), load(x, (const(0),)).astype("float32")))))
    assert "half_t x = half_t(0.0f);" in source


def test_what_has_no_form_is_refused_at_the_line():
    out = tensor("O", (8,))
    s = Store(out, (const(0),), call("no_such_function", (const(1.0),), "float32", span=Span("user.py", 7)))
    with pytest.raises(NotImplementedError, match="the function `no_such_function` is not supported") as e:
        print_kernel(kernel((out,), s))
    assert "user.py:7" in str(e.value)
    assert "tl::sync_grid(grid_barrier_);" in print_kernel(kernel((out,), evaluate("sync_grid")))
    small = tensor("S", (8,), "int8")
    with pytest.raises(NotImplementedError, match="`atomic_add` on int8"):
        print_kernel(kernel((small,), evaluate("atomic_add", at(small, 0), const(1, "int8"))))
    with pytest.raises(NotImplementedError, match="element type int4"):
        print_kernel(kernel((tensor("X", (8,), "int4"),), Store(out, (const(0),), const(0.0))))


# ---- whole kernels through NVRTC ------------------------------------------------------------------------------------

def every_statement():
    """Control flow, locals, views, shared memory, predicates, assertions, printing."""
    tv = thread_vars()
    tx = tv[0]
    n = fresh("n")
    a, o = tensor("A", (n,)), tensor("O", (n,))
    s = shared("S", 256, "float32")
    plain = Buffer("P", (64,), dtype("int32"), "shared")
    regs = local("r", 8, "float32")
    view = Buffer("r_bits", (8,), dtype("uint32"), "local", data=regs.data)
    count = Buffer("count", (1,), dtype("int32"), "local.var")
    limit = fresh("limit")
    at_count = load(count, (const(0),))
    body = seq(
        Alloc(s), Alloc(plain), Alloc(regs), Alloc(count, const(0)), Bind(limit, n // 3 - 5),
        Store(plain, (tx % 64,), tx), evaluate("sync_threads"),
        unrolled(8, lambda i: Store(regs, (i,), select(tx < limit, load(a, (tx + i,)), const(0.0)))),
        Store(view, (const(0),), load(view, (const(1),)) ^ const(5, "uint32")),
        While(at_count < limit, seq(
            Store(count, (const(0),), at_count + 1),
            If(binary("eq", at_count, const(3)), Continue()), If(at_count > 9, Break()))),
        serial(limit, lambda i: Store(s, (i % 256,), load(regs, (const(0),)))),
        Assert(tx < n, "too many threads\n\"quoted\""),
        If(binary("eq", tx, const(0)), evaluate("printf", "value=%d %f\n", at_count, load(regs, (const(0),)))),
        evaluate("sync_warp"), evaluate("named_barrier", 1, 64), evaluate("named_barrier_arrive", 2, 64),
        If(tx >= n, evaluate("thread_return")),
        Store(o, (tx,), load(s, (tx,)) + load(plain, (tx % 64,)).astype("float32")))
    return kernel((a, o, n), body, tvars=tv, name="statements", shared_bytes=1024, shared_offsets=((s, 0),))


def every_vector_form():
    tv = thread_vars()
    tx = tv[0]
    h, b = tensor("H", (4096,), "float16"), tensor("B", (4096,), "bfloat16")
    f, i, c = tensor("F", (4096,)), tensor("I", (4096,), "int32"), tensor("C", (4096,), "int8")
    e, d = tensor("E", (4096,), "float8_e4m3"), tensor("D", (4096,), "float64")
    regs, wide = local("r", 8, "float16"), local("w", 8, "float32")

    def v(buf, n):
        return load(buf, (ramp(tx * n, n),))

    def put(buf, n, value):
        return Store(buf, (ramp(tx * n, n),), value)

    half8 = dtype("float16x8")
    zero = Broadcast(const(0.0, "float16"), 8, half8)
    mask = binary("lt", v(f, 4), v(f, 4) * v(f, 4))
    strided = ramp(tx, 4)
    strided = type(strided)(tx, const(16), 4, dtype("int32x4"))
    return kernel((h, b, f, i, c, e, d), seq(
        Alloc(regs), Alloc(wide),
        Store(regs, (ramp(0, 8),), Select(tx < 100, v(h, 8), zero, half8)),
        put(h, 8, load(regs, (ramp(0, 8),)) * v(h, 8) + v(h, 8)),
        put(b, 8, v(b, 8) - v(b, 8) * v(b, 8)),
        Store(wide, (ramp(0, 8),), Cast(v(h, 8), dtype("float32x8"))),
        put(h, 8, Cast(load(wide, (ramp(0, 8),)), half8)),
        put(b, 8, Cast(load(wide, (ramp(0, 8),)), dtype("bfloat16x8"))),
        put(e, 4, Cast(v(f, 4), dtype("float8_e4m3x4"))),
        put(h, 4, Cast(v(e, 4), dtype("float16x4"))),
        put(f, 4, Select(mask, v(f, 4), call("exp", (v(f, 4),), "float32x4"), dtype("float32x4"))),
        put(f, 2, Cast(v(i, 2), dtype("float32x2"))),
        put(c, 16, v(c, 16) + v(c, 16)), put(c, 4, binary("min", v(c, 4), v(c, 4))),
        put(c, 8, Unary("bitnot", v(c, 8), dtype("int8x8"))), put(c, 2, Cast(v(h, 2), dtype("int8x2"))),
        put(i, 4, (v(i, 4) << Broadcast(const(2), 4, dtype("int32x4"))) // Broadcast(const(3), 4, dtype("int32x4"))),
        put(h, 2, binary("max", v(h, 2), v(h, 2) / v(h, 2))),
        put(f, 4, Unary("neg", v(f, 4), dtype("float32x4"))),
        Store(i, (strided,), load(i, (strided,)) + type(strided)(tx, const(1), 4, dtype("int32x4"))),
        *(put(t, 2, call(op, [v(t, 2)] * n, dtype(t.dtype).with_lanes(2))) for t in (f, h, b)
          for op, n in (("add2", 2), ("sub2", 2), ("mul2", 2), ("max2", 2), ("min2", 2), ("abs2", 1), ("fma2", 3))),
        put(d, 2, Cast(v(h, 2), dtype("float64x2"))), Store(d, (tx,), cast(load(h, (tx,)), "float64")),
        evaluate("assume", tx < 100), Store(f, (tx,), Shuffle((v(f, 4), v(f, 4)), (5,), dtype("float32"))),
        put(f, 2, Shuffle((v(f, 4),), (3, 0), dtype("float32x2"))),
    ), tvars=tv, name="vectors")


def every_scalar_function():
    from tilelang.target.intrinsics import PURE

    tv = thread_vars()
    tx = tv[0]
    tensors = {d: tensor(f"T_{d}", (4096,), d) for d in ("float32", "float64", "float16", "bfloat16", "int32", "uint32",
                                                         "int64", "uint8", "bool")}
    stmts = []
    for row in INTRINSICS.values():
        if row.effect != PURE or row.name.startswith("get_") or not row.cuda \
                or row.name in ("isnullptr", "reinterpret"):
            continue
        types = {"popcount": ("int32", "int64", "uint8"), "clz": ("int32", "int64", "uint8"),
                 "__ffs": ("int32", "int64"), "abs": ("int32", "int64"),
                 "__fns": ("uint32",), "to_tf32": ("float32",)}.get(
            row.name, [d for d in ("float32", "float64", "float16", "bfloat16")
                       if d in row.cuda or (d in ("float16", "bfloat16") and "float32" in row.cuda)])
        if row.name in ("add2", "sub2", "mul2", "max2", "min2", "abs2", "fma2"):
            continue
        for d in types:
            x = load(tensors[d], (tx,))
            args = [x] * row.arity
            if row.name == "ldexp":
                args[1] = tx
            if row.name == "__fns":
                args[1:] = [tx.astype("uint32"), tx]
            result = d if row.result == "same" else row.result
            stmts.append(Store(tensors[result], (tx + len(stmts) % 8,), call(row.name, args, result)))
    f = load(tensors["float32"], (tx,))
    stmts += [Store(tensors["uint32"], (tx,), call("reinterpret", (f,), "uint32")),
              Store(tensors["int32"], (tx,), call("get_lane_idx", (), "int32")),
              Store(tensors["int32"], (tx,), call("get_warp_idx_sync", (), "int32")),
              Store(tensors["int32"], (tx,), call("warp_uniform", (tx // 32,), "int32")),
              Store(tensors["bool"], (tx,), call("shuffle_elect", (const(64),), "bool"))]
    for d in ("float32", "float64", "float16", "bfloat16", "int32", "int64", "uint8"):
        for op in ("shfl_xor", "shfl_up", "shfl_down", "shfl_idx"):
            stmts.append(Store(tensors[d], (tx,), call(op, (load(tensors[d], (tx,)), const(1)), d, width=16)))
    i = load(tensors["int32"], (tx,))
    for op in ("any_sync", "all_sync"):
        stmts.append(Store(tensors["int32"], (tx,), call(op, (i,), "int32")))
    stmts.append(Store(tensors["uint32"], (tx,), call("match_any_sync", (i, const(-1, "int32")), "uint32")))
    stmts.append(Store(tensors["int32"], (tx,), call("syncthreads_count", (i,), "int32")))
    return kernel(tuple(tensors.values()), seq(*stmts), tvars=tv, name="functions")


ELEMENTS = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "bool", "float8_e4m3",
            "float8_e5m2", "float16", "bfloat16", "float32", "float64")


def every_operator_on(name):
    """All operators, comparisons and conversions of one element type, scalar and four lanes wide."""
    tv = thread_vars()
    tx, dt = tv[0], dtype(name)
    a, b, flags = tensor("A", (4096,), name), tensor("B", (4096,), name), tensor("flags", (4096,), "bool")
    targets = {t: tensor(f"to_{t}", (4096,), t) for t in ELEMENTS if t != name}
    ops = ["min", "max"] + ["bitand", "bitor", "bitxor"] * (not dt.is_float) + ["add", "sub", "mul"] * (not dt.is_bool)
    ops += ["div"] * dt.is_float
    ops += ["floordiv", "floormod", "truncdiv", "truncmod", "shl", "shr"] * dt.is_int
    body = []
    for index in (tx, ramp(tx * 4, 4)):
        x, y = load(a, (index,)), load(b, (index,))
        boolean = dtype("bool").with_lanes(x.dtype.lanes)
        body += [Store(a, (index,), Binary(op, x, y, x.dtype)) for op in ops]
        body += [Store(flags, (index,), Binary(op, x, y, boolean)) for op in ("eq", "ne", "lt", "le", "gt", "ge")]
        body += [Store(a, (index,), Unary(op, x, x.dtype)) for op in ["neg"] * (dt.is_signed or dt.is_float) +
                 ["bitnot"] * dt.is_int + ["not"] * dt.is_bool]
        body += [Store(a, (index,), Select(tx < 3, x, y, x.dtype)),
                 Store(a, (index,), Select(Binary("lt", x, y, boolean), x, y, x.dtype))]
        body += [Store(t, (index,), Cast(x, t.dtype.with_lanes(x.dtype.lanes))) for t in targets.values()]
    return kernel((a, b, flags, *targets.values()), seq(*body), tvars=tv, name="operators")


@needs_nvrtc
@pytest.mark.parametrize("name", ELEMENTS)
def test_every_operator_on_every_element_type_compiles(name):
    nvrtc.compile_cubin(print_kernel(every_operator_on(name)), "sm_80")


def every_atomic():
    tv = thread_vars()
    tx = tv[0]
    out = []
    params = []
    for d in ("float32", "float64", "float16", "bfloat16", "int32", "uint32", "int64", "uint64"):
        t = tensor(f"T_{d}", (4096,), d)
        params.append(t)
        for op in ("atomic_add", "atomic_max", "atomic_min", "atomic_exchange"):
            out.append(evaluate(op, at(t, tx), const(1, d), order="acq_rel" if op == "atomic_max" else None))
        out.append(Store(t, (tx,), call("atomic_add", (at(t, tx), const(2, d)), d)))
        out.append(evaluate("atomic_store", at(t, tx), call("atomic_load", (at(t, tx),), d, order="acquire"),
                            order="release"))
    u = params[5]
    out += [evaluate(op, at(u, tx), const(3, "uint32")) for op in ("atomic_or", "atomic_and", "atomic_xor")]
    pair = load(params[2], (ramp(tx * 2, 2),))
    out.append(evaluate("atomic_addx2", at(params[2], tx * 2), pair))
    return kernel(params, seq(*out), tvars=tv, name="atomics")


def every_matrix_row(arch_number):
    tv = thread_vars()
    out, body = tensor("O", (65536,)), []
    s = shared("S", 4096, "float16")
    regs = local("m", 8, "float16")
    body += [Alloc(s), Alloc(regs)]
    for num in (1, 2, 4):
        for trans in (False, True):
            body.append(evaluate("ldmatrix", at(regs, 0), at(s, tv[0] * 8), num=num, trans=trans))
            body.append(unrolled(8, lambda i: Store(out, (tv[0] * 8 + i,), load(regs, (i,)).astype("float32"))))
    for n, row in enumerate(r for r in MMA_ROWS.values() if r.min_arch <= arch_number):
        a, b, c = (local(f"{x}{n}", f.registers, str(d)) for x, f, d in
                   (("a", row.a, row.a_dtype), ("b", row.b, row.b_dtype), ("c", row.c, row.c_dtype)))

        def fill(buf, k=n):
            return unrolled(buf.size, lambda i: Store(buf, (i,), load(out, (tv[0] + i + k,)).astype(buf.dtype)))

        body += [Alloc(a), Alloc(b), Alloc(c), fill(a), fill(b), fill(c),
                 evaluate("mma", at(c, 0), at(a, 0), at(b, 0), row=row.name),
                 unrolled(c.size, lambda i, c=c: Store(out, (tv[0] * 8 + i,), load(c, (i,)).astype("float32")))]
    if arch_number >= 90:
        body += [evaluate("stmatrix", at(s, tv[0] * 8), at(regs, 0), num=num, trans=trans)
                 for num in (1, 2, 4) for trans in (False, True)]
    for nbytes in (4, 8, 16):
        body.append(evaluate("cp_async", at(s, tv[0] * 8), at(out, tv[0] * 4), bytes=nbytes))
        body.append(evaluate("cp_async", at(s, tv[0] * 8), at(out, tv[0] * 4), tv[0] < 5, bytes=nbytes))
    body += [evaluate("cp_async_commit"), evaluate("cp_async_wait", n=0)]
    return kernel((out,), seq(*body), tvars=tv, name="matrices", shared_bytes=8192, shared_offsets=((s, 0),))


@needs_nvrtc
@pytest.mark.parametrize("make", [every_statement, every_vector_form, every_scalar_function, every_atomic],
                         ids=lambda f: f.__name__)
def test_every_construct_compiles(make):
    k = make()
    cubin = nvrtc.compile_cubin(print_kernel(k), "sm_80")
    assert cubin.bytes[:4] == b"\x7fELF" and k.name in cubin.kernels


@needs_nvrtc
@pytest.mark.parametrize("arch, number", [("sm_80", 80), ("sm_90a", 90)])
def test_every_matrix_row_compiles_and_stays_in_registers(arch, number):
    cubin = nvrtc.compile_cubin(print_kernel(every_matrix_row(number)), arch)
    assert cubin.kernels["matrices"].stack_bytes == 0 and cubin.spills == 0


@needs_nvrtc
@needs_nvdisasm
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_gemm_main_loop_is_matrix_instructions_and_little_else(arch):
    cubin = nvrtc.compile_cubin(print_kernel(gemm()), arch)
    assert cubin.spills == 0 and cubin.registers <= 255
    code = sass.disassemble(cubin.bytes)
    ops = opcodes(code)
    assert ops["LDL"] == ops["STL"] == 0 and ops["LDGSTS"] == 24
    size, loop = loops(code)[0]
    inside = opcodes(loop)
    assert inside["HMMA"] == 64 and inside["LDSM"] == 16 and inside["LDGSTS"] == 8 and inside["BAR"] == 1
    assert size < 2.25 * 88, f"{size} instructions around 88 useful ones"  # NVRTC 13.0: 185, 13.5: 165


@needs_nvrtc
def test_swizzled_blocks_and_injected_source_compile():
    tv = thread_vars()
    bx, by = fresh("bx"), fresh("by")
    o = tensor("O", (64, 64), "int32")
    k = kernel((o,), Store(o, (by, bx), call("call_extern", ("user_function", tv[0]), "int32")), tvars=tv,
               grid=(64, 64), block_vars=(bx, by), swizzle=(10, "row"),
               import_source=("__device__ int user_function(int x) { return x + 1; }",))
    source = print_kernel(k)
    nvrtc.compile_cubin(source, "sm_80")
    assert source.index("user_function(int x)") < source.index("main_kernel")


@pytest.mark.parametrize("order", ["row", "column"])
def test_swizzled_blocks_visit_every_block_once(order):
    bx, by = fresh("bx"), fresh("by")
    o = tensor("O", (64, 64), "int32")
    source = print_kernel(kernel((o,), Store(o, (by, bx), const(0)), grid=(7, 5), block_vars=(bx, by),
                                 swizzle=(3, order)))
    lines = [x.strip() for x in source.splitlines() if re.match(r"\s+const (unsigned|int) ", x)]
    seen = set()
    for y in range(5):
        for x in range(7):
            env = {"min": min, "blockIdx": type("B", (), {"x": x, "y": y}), "gridDim": type("G", (), {"x": 7, "y": 5})}
            for line in lines:
                text = re.sub(r"^const (unsigned|int) ", "", line).rstrip(";")
                text = re.sub(r"(\d)u\b", r"\1", text).replace("/", "//")
                text = re.sub(r"= (.*?) \? (.*?) : (.*)$", r"= (\2) if (\1) else (\3)", text)
                parts = text.split(", ") if text.startswith("block_") else \
                    text.split(", ", 1) if text.startswith("start_") else [text]
                for part in parts:
                    exec(part, env)
            seen.add((env["bx"], env["by"]))
    assert seen == {(x, y) for x in range(7) for y in range(5)}


def test_every_function_that_a_row_names_is_in_the_prelude():
    for row in INTRINSICS.values():
        for text in (row.cuda or {}).values():
            for name in re.findall(r"tl::(\w+)", text):
                known = [s for s in sections() if s.startswith(name)] if "_x{num}" in text else [name]
                assert known and set(known) <= set(sections()) or "{row_function}" in text, (row.name, name)


def test_function_text_keeps_its_argument_together():
    tv = thread_vars()
    a = tensor("A", (128,), "float32")
    x = load(a, (tv[0],)) - 1.0
    assert text_of(call("sigmoid", (x,), "float32"), reads=(a,), tvars=tv) == "tl::sigmoid(A[tx] - 1.0f)"
