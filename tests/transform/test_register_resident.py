"""All values of products of products in registers of their own: attention, what keeps a launch from it, PTX of its loops."""

import dataclasses
import re
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from programs import attention

import tilelang.language as T
from tilelang.codegen.cuda import print_kernel
from tilelang.target.wgmma import SWIZZLE_CODE
from tilelang.ir import (Buffer, Call, For, If, Store, const, dtype, fresh, load, replace, rewrite,
                         rewrite_launches, walk, with_options)
from tilelang.runtime import nvrtc
from tilelang.target import Target
from tilelang.target.register_forms import MAPPED, MIN_CHAINS, SUMMED, form_of, own_element, sum_form, value_form
from tilelang.transform import pipeline
from tilelang.transform.registers.accumulator_registers import move
from transform.test_accumulator_registers import both_ways, marked, numbers

SM90A = Target({"kind": "cuda", "arch": "sm_90a"})
FAST = {"tl.enable_fast_math": True}


def lowered(f, **config):
    (kernel,) = pipeline.lower(f.func, SM90A, {**FAST, **config}).kernels
    return kernel


@pytest.mark.parametrize("causal", [False, True])
def test_attention_keeps_its_values_in_registers(monkeypatch, causal):
    x = numbers(1, 256, 1, 64)
    _, kernel = both_ways(attention(1, 1, 256, 64, causal=causal, bm=128, bn=64, threads=256), x, x, x, np.zeros_like(x),
                          monkeypatch=monkeypatch, config=FAST)
    kinds, into, out = marked(kernel)
    assert kernel.launch.plan.own_values and {"map", "sums", "halves", "scale"} <= set(kinds)
    masks = [x for x in walk(kernel.launch.body) if isinstance(x, If) and any(
        isinstance(y, Call) and y.op == "wgmma_pin" and y.options.move == "out" for y in walk(x.then))]
    assert len(masks) == 2 * causal and into == out == 1 + len(masks), "in arrays under masks, and to be divided"
    text = print_kernel(kernel, fast_math=True)
    body = text[text.index("extern"):]
    assert "wgmma_pin" not in body


def softmax_of(change):
    """Attention of one head, its scores changed by `change` before the second product."""
    @T.prim_func
    def program(Q: T.Tensor((64, 64), "float16"), K: T.Tensor((128, 64), "float16"), O: T.Tensor((64, 64), "float32")):
        with T.Kernel(1, threads=128):
            Qs, Ks = T.alloc_shared((64, 64), "float16"), T.alloc_shared((64, 64), "float16")
            S, P = T.alloc_fragment((64, 64), "float32"), T.alloc_fragment((64, 64), "float16")
            acc = T.alloc_fragment((64, 64), "float32")
            T.copy(Q, Qs)
            T.clear(acc)
            for k in T.serial(2):
                T.copy(K[k * 64, 0], Ks)
                T.gemm(Qs, Ks, S, transpose_B=True, clear_accum=True)
                change(S)
                T.copy(S, P)
                T.gemm(P, Ks, acc)
            T.copy(acc, O)

    return program


@T.macro
def doubled(S):
    for i, j in T.Parallel(64, 64):
        S[i, j] = T.max(S[i, j] * 2.0, 0.0) - 1.0


@T.macro
def tanh(S):
    for i, j in T.Parallel(64, 64):
        S[i, j] = T.tanh(S[i, j])


@T.macro
def power(S):
    for i, j in T.Parallel(64, 64):
        S[i, j] = T.exp2(S[i, j] - 1.0)


@T.macro
def distances(S):
    for i, j in T.Parallel(64, 64):
        S[i, j] = S[i, j] - T.abs(T.cast(i - j, "float32")) * 0.5


def test_a_map_of_other_operations(monkeypatch):
    q, k = numbers(64, 64), numbers(128, 64)
    q //= 4
    got, kernel = both_ways(softmax_of(doubled), q, k, np.zeros((64, 64), np.float32), monkeypatch=monkeypatch, config=FAST)
    s = np.maximum(q.astype(np.float32) @ k.astype(np.float32).T * 2, 0) - 1
    assert np.array_equal(got, s.astype(np.float16).astype(np.float32) @ k.astype(np.float32))
    kinds, into, out = marked(kernel)
    assert kernel.launch.plan.own_values and "map" in kinds and (into, out) == (0, 2), "results leave behind the loop"


def test_loops_without_a_form_keep_the_arrays():
    assert not lowered(softmax_of(tanh)).launch.plan.own_values
    plain, short, exact = (pipeline.lower(softmax_of(change).func, SM90A, config).kernels[0].launch for change, config in (
        (doubled, {}), (power, {}), (power, {"tl.shorten_rounded": False})))
    assert plain.plan.own_values and short.plan.own_values
    assert not exact.plan.own_values, "exp2 with subnormal results"


def test_forms_are_found_once_and_launches_without_a_look_inside():
    kernel = lowered(softmax_of(doubled))
    launch = kernel.launch
    loop = next(x for x in walk(launch.body) if isinstance(x, For) and x.plan.registers)
    assert form_of(loop) is form_of(loop) is not None
    assert rewrite_launches(launch, lambda x: None) is launch
    assert rewrite_launches(If(fresh("c", dtype("bool")), launch), lambda x: x.body).then is launch.body


def test_forms_of_values():
    r, q = fresh("r"), fresh("q")
    b, x = Buffer("b", (8,), dtype("float32"), "local"), Buffer("x", (2,), dtype("float32"), "local")

    def loop(body, n=8, var=r):
        return For(var, const(0), const(n), "unroll", body)

    c = fresh("c", dtype("float32"))
    form = value_form(loop(Store(b, (r,), load(b, (r,)) * c - load(x, (r // 4,)))))
    assert form.kind == "map" and form.buffer is b and [k for k, _ in form.points] == list(range(8)) and form.source is None
    assert value_form(loop(Store(b, (r,), load(b, (7 - r,)) * c))) is None, "another element"
    assert value_form(loop(Store(b, (r,), load(b, (r,)).astype("int32").astype("float32")))) is None
    assert own_element(load(b, (r,)) + c, b) and not own_element(c + c, b)
    add = Store(x, (q,), load(x, (q,)) + load(b, (q * 4 + r,)))
    form = value_form(loop(loop(add, 4), 2, q))
    assert form.kind == "sum" and form.buffer is b and form.points[5] == (1, 5)
    assert sum_form(loop(add, 4)) is None and sum_form(loop(add, 4), {q: 1}).points[0] == (1, 4)
    assert value_form(loop(loop(Store(x, (q,), load(x, (q,)) - load(b, (q * 4 + r,))), 4), 2, q)) is None
    assert set(SUMMED) < set(MAPPED) and SWIZZLE_CODE[128] == 1


def test_a_move_into_registers_names_its_way():
    assert move(Buffer("s", (8,), dtype("float32"), "local"), "in").call.options.move == "in"


# ---- the PTX of the loops, instruction by instruction ------------------------------------------------------------------


def run_ptx(text, operands, registers):
    """Executes the lines of an `asm` on float32 registers and words of two halves; operands: the list of %0, %1 …"""
    ops = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "max": np.maximum, "min": np.minimum}
    for line in re.findall(r"\w[\w.]* [^;{}]+;", text.replace("\\n", "\n")):
        op, rest = line.rstrip(";").split(" ", 1)
        if op == ".reg" or op.startswith("reg"):
            continue
        to, *args = [a.strip() for a in rest.split(",")]
        values = [operands[int(a[1:])] if a[0] == "%" else np.uint32(int(a[2:], 16)).view(np.float32) if a[:2] == "0f"
                  else registers[a] for a in args]
        kind = op.split(".")[0]
        if kind == "cvt":
            made = (np.float16(values[1]), np.float16(values[0]))  # the first source is the upper half
        elif kind == "ex2":
            made = np.exp2(values[0])
        elif kind == "abs":
            made = np.abs(values[0])
        else:
            made = values[0] if kind == "mov" else ops[kind](*values)
        if to[0] == "%":
            operands[int(to[1:])] = made
        else:
            registers[to] = made


def test_the_text_of_loops_computes_what_they_say():
    kernel = lowered(attention(1, 1, 128, 64, causal=False, bm=64, bn=64, threads=128))
    text = print_kernel(kernel, fast_math=True)
    rng = np.random.default_rng(3)
    n = 32  # registers of P
    start = rng.standard_normal(n).astype(np.float32)

    registers = {f"tl_P_{k}": v for k, v in enumerate(start)}
    asm = re.search(r'map_P\(.*?\) \{ asm volatile\("(.*?)" ::', text).group(1)
    call = re.search(r"tl::map_P\((.*?)\);", text).group(1).split(", ")
    given = {c: np.float32(rng.standard_normal()) for c in call}
    top, (scale,) = [given["mx[0]"], given["mx[1]"]], [v for c, v in given.items() if "mx" not in c]
    run_ptx(asm, [given[c] for c in call], registers)
    want = [np.exp2((v - top[k >> 1 & 1]) * scale) for k, v in enumerate(start)]
    assert np.array_equal([registers[f"tl_P_{k}"] for k in range(n)], want)

    rows = [[v for k, v in enumerate(start) if k >> 1 & 1 == row] for row in (0, 1)]
    for row in (0, 1):
        asm = re.search(rf'add_P_{2 * row}\(float& x0\) {{ asm volatile\("(.*?)" :', text).group(1)
        operands = [np.float32(0)]
        run_ptx(asm, operands, {f"tl_P_{k}": v for k, v in enumerate(start)})
        halves = [np.add.accumulate(rows[row][k::2], dtype=np.float32)[-1] for k in (0, 1)]
        assert operands[0] == halves[0] + halves[1]

    for row in (0, 1):  # maxima as integers (tests/codegen/test_maxima_by_threes.py), or in the last branch as floats
        body = re.search(rf"max_P_{2 * row}\(float& x0\) \{{(.*)\}}\n", text).group(1)
        operands = [np.float32(-3)]
        run_ptx(re.findall(r'asm volatile\("(.*?)" :', body)[-1], operands, {f"tl_P_{k}": v for k, v in enumerate(start)})
        assert operands == [max(rows[row])]

    registers = {f"tl_P_{k}": np.float32(k) for k in range(n)}
    run_ptx(re.search(r'halves_Ph\(\) \{ asm volatile\("(.*?)" ::', text).group(1), [], registers)
    assert all(registers[f"tl_Ph_{w}"] == (2 * w, 2 * w + 1) for w in range(n // 2))


def test_the_text_of_distances_computes_them():
    """Numbers of iterations are constants of the text; a distance that several elements have is computed once."""
    kernel = lowered(softmax_of(distances))
    assert kernel.launch.plan.own_values
    text = print_kernel(kernel, fast_math=True)
    asm = re.search(r'map_S\(float x0.*?\) \{ asm volatile\("(.*?)" ::', text).group(1)
    call = re.search(r"tl::map_S\((.*?)\);", text).group(1).split(", ")
    lane, slope = np.float32(3), np.float32(0.5)
    count = 32
    start = np.random.default_rng(3).standard_normal(count).astype(np.float32)
    registers = {f"tl_S_{k}": v for k, v in enumerate(start)}
    run_ptx(asm, [lane if "tx" in c else slope for c in call], registers)
    row, column = np.arange(count) // 2 % 2 * 8, np.arange(count) // 4 * 8 + np.arange(count) % 2
    assert len(call) == 2 and np.array_equal([registers[f"tl_S_{k}"] for k in range(count)],
                                             start - np.abs(lane + (row - column).astype(np.float32)) * slope)
    assert asm.count("add.ftz.f32 s") == len(set(row - column))


def test_sums_that_are_no_reduction_keep_their_order():
    """x[0] += P[r] written as a loop is summed up in that order; T.reduce_sum may be in two halves."""
    def lines(order):
        kernel = lowered(attention(1, 1, 128, 64, causal=False, bm=64, bn=64, threads=128))

        def changed(x):
            if not isinstance(x, For) or not x.plan.any_order:
                return None
            return with_options(x, any_order=order)

        launch = replace(kernel.launch, body=rewrite(kernel.launch.body, changed))
        text = print_kernel(dataclasses.replace(kernel, launch=launch), fast_math=True)
        return re.search(r'add_P_0\(float& x0\) { asm volatile\("(.*?)" :', text).group(1).split("\\n")

    assert all(x.startswith("add.ftz.f32 %0, %0, tl_P_") for x in lines(False))
    assert sum("u0, u0, tl_P_" in x for x in lines(True)) == len(lines(False)) // 2 - 1 and MIN_CHAINS <= 16


def test_descriptors_are_made_where_they_are_used():
    """Low half: that of the first product and 16-byte steps; high half: as tl::wgmma_descriptor makes it."""
    text = print_kernel(lowered(attention(1, 1, 128, 64, causal=False, bm=64, bn=64, threads=128)), fast_math=True)
    body = text[text.index("extern"):]
    calls = list(dict.fromkeys(re.findall(r"tl::(wgmma_m64n64k16_f32_f16_f16_ss_kk_P_0\w*)\(", body)))
    assert [c.rpartition("P_0_")[2] for c in calls] == ["0_0", "2_2", "4_4", "6_6"]
    for step, call in zip("0246", calls):
        asm = text[text.index(f"void {call}("):]
        asm = asm[:asm.index("\n}\n")]
        assert re.findall(r"add\.s32 low, %(\d), (\d+);", asm) == [("1", step), ("2", step)]
        assert set(re.findall(r"0x(\w+);", asm)) == {f"{(1024 >> 4 | SWIZZLE_CODE[128] << 30) << 32:x}"}
        assert "}, a, b, p, 1, 1, 0, 0;" in asm
    assert re.findall(r"_rs_m_\w+_(\d+)\(bool", text) == ["0", "128", "256", "384"]


@pytest.mark.skipif(not nvrtc.available(), reason="NVRTC is not installed")
def test_the_assembler_neither_spills_nor_serialises():
    kernel = lowered(attention(1, 1, 256, 64, causal=True, bm=128, bn=64, threads=256))
    cubin = nvrtc.compile_cubin(print_kernel(kernel, fast_math=True), "sm_90a", ["--use_fast_math"])
    assert cubin.spills == 0 and "C75" not in cubin.log
    assert not any(isinstance(x, Call) and x.op == "wgmma" and not x.options.registers for x in walk(kernel.launch.body))
