"""Products in registers of their own: with arrays and registers really apart, lowered programs compute what they did."""

import re
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from programs import gemm

import tilelang.language as T
from tilelang.codegen.cuda.printer import print_kernel
from tilelang.codegen.cuda.named_registers import declared_registers, move_function, register_type
from tilelang.ir import (AddressOf, Alloc, Buffer, Call, Evaluate, For, Launch, Store, const, dtype, fresh, load, rewrite, seq,
                         substitute, walk, with_options)
from tilelang.ir import replace as replaced
from tilelang.runtime import nvrtc
from tilelang.simulator import run_device
from tilelang.target import Target
from tilelang.target.register_forms import MOST, Form, constant, form_of, packed_source, register_form
from tilelang.transform import pipeline
from tilelang.transform.framework.pass_ import DEVICE, pass_
from tilelang.transform.registers.accumulator_registers import assign_accumulator_registers

SM90A = Target({"kind": "cuda", "arch": "sm_90a"})


@pass_(needs=DEVICE)
def taken_apart(func, cx):
    """The program with the registers of products as buffers beside the arrays, and moves as loops."""
    made: dict = {}

    def own(b):
        return made.setdefault(b.data, Buffer(f"{b.name}_own", b.shape, b.dtype, "local"))

    def visit(x):
        if isinstance(x, For) and x.plan.registers:
            form = form_of(x)
            named = [form.buffer, *([form.source] if x.plan.registers == "source" else [])]
            return with_options(substitute(x, {b: own(b) for b in named}), registers=None)
        if isinstance(x, Evaluate) and x.call.op == "wgmma" and x.call.options.registers:
            marked = x.call.options.registers
            args = [AddressOf(own(a.buffer), a.indices) if what in marked else a for what, a in zip("ca..", x.call.args)]
            return replaced(x, call=with_options(replaced(x.call, args=tuple(args)), registers=None))
        if isinstance(x, Evaluate) and x.call.op == "wgmma_pin" and x.call.options.move:
            b, r = x.call.args[0].buffer, fresh("r")
            source, to = (b, own(b)) if x.call.options.move == "in" else (own(b), b)
            return For(r, const(0), const(b.size), "unroll", Store(to, (r,), load(source, (r,))))
        return None

    body = rewrite(func.body, visit)
    return replaced(func, body=rewrite(body, lambda x: replaced(
        x, body=seq(*map(Alloc, made.values()), x.body)) if isinstance(x, Launch) else None))


def both_ways(f, *args, monkeypatch, config=None):
    """(result of the last tensor, kernel); computed with registers and arrays apart, and as they are."""
    config = {"tl.resize_blocks": False, **(config or {})}
    plain = pipeline.lower(f.func, SM90A, config)
    monkeypatch.setattr(pipeline, "DEVICE_PASSES", (*pipeline.DEVICE_PASSES[:-1], taken_apart, pipeline.DEVICE_PASSES[-1]))
    apart = pipeline.lower(f.func, SM90A, config)
    monkeypatch.undo()
    name = f.func.buffers[-1][1].name
    assert any("_own" in x.buffer.name for k in apart.kernels for x in walk(k.launch.body) if isinstance(x, Alloc))
    given = [a.copy() if isinstance(a, np.ndarray) else a for a in args]
    got, want = (run_device(p, given, check=p is plain).outputs[name] for p in (apart, plain))  # moves may read what is unset
    assert np.array_equal(got, want) and np.isfinite(got.astype(np.float32)).all()
    return got, plain.kernels[0]


def numbers(*shape, dtype=np.float16):
    return np.random.default_rng(5).integers(-4, 5, shape).astype(dtype)


def marked(kernel):
    """(kinds of loops on registers, number of moves in, of moves out)."""
    kinds = [form_of(x).kind for x in walk(kernel.launch.body)
             if isinstance(x, For) and x.plan.registers]
    moves = [x.options.move for x in walk(kernel.launch.body) if isinstance(x, Call) and x.op == "wgmma_pin"]
    return sorted(kinds), moves.count("in"), moves.count("out")


def test_a_plain_product_is_filled_and_packed_in_its_registers(monkeypatch):
    a, b = numbers(128, 128), numbers(128, 128)
    got, kernel = both_ways(gemm(128, 128, 128, 64, 128, 64), a, b, np.zeros(128, np.float32), np.zeros((128, 128), np.float16),
                            monkeypatch=monkeypatch)
    assert np.array_equal(got, (a.astype(np.float32) @ b.astype(np.float32)).astype(np.float16))
    assert marked(kernel) == (["fill", "read", "read"], 0, 0)
    text = print_kernel(kernel)
    assert 'asm volatile(".reg .f32 tl_Cf_<64>;");' in text and "tl::fill_Cf(0.0f);" in text and "tl::pack_Cf_56(" in text
    body = text[text.index("extern"):]
    assert "Cf[" not in body.replace("float Cf[64]", "") and "wgmma_pin" not in body


def test_an_epilogue_on_elements_is_computed_in_an_array(monkeypatch):
    a, b, bias = numbers(64, 128), numbers(128, 64), numbers(64, dtype=np.float32)
    got, kernel = both_ways(gemm(64, 64, 128, 64, 64, 64, epilogue="bias"), a, b, bias, np.zeros((64, 64), np.float16),
                            monkeypatch=monkeypatch)
    assert np.array_equal(got, np.maximum(a.astype(np.float32) @ b.astype(np.float32) + bias, 0).astype(np.float16))
    assert marked(kernel) == (["fill", "read"], 1, 1)


@T.prim_func
def turns(A: T.Tensor((64, 64), "float16"), n: T.int32, C: T.Tensor((64, 64), "float32")):
    with T.Kernel(1, threads=128):
        S = T.alloc_shared((64, 64), "float16")
        F = T.alloc_fragment((64, 64), "float32")
        T.copy(A, S)
        T.fill(F, 2.0)
        for k in T.serial(n):
            T.gemm(S, S, F, transpose_B=True)
            if k == 1:
                for i, j in T.Parallel(64, 64):
                    F[i, j] += 1.0
        T.copy(F, C)


@pytest.mark.parametrize("n", [0, 1, 3])
def test_loops_of_no_turns_and_writes_between_products(monkeypatch, n):
    a = numbers(64, 64)
    got, _ = both_ways(turns, a, n, np.zeros((64, 64), np.float32), monkeypatch=monkeypatch)
    assert np.array_equal(got, 2 + n * (a.astype(np.float32) @ a.astype(np.float32).T) + (n > 1))


@T.prim_func
def chain(A: T.Tensor((64, 64), "float16"), C: T.Tensor((64, 64), "float32")):
    with T.Kernel(1, threads=128):
        S = T.alloc_shared((64, 64), "float16")
        F = T.alloc_fragment((64, 64), "float32")
        P = T.alloc_fragment((64, 64), "float16")
        G = T.alloc_fragment((64, 64), "float32")
        T.copy(A, S)
        T.gemm(S, S, F, transpose_B=True, clear_accum=True)
        T.copy(F, P)
        T.gemm(P, S, G, clear_accum=True)
        for i, j in T.Parallel(64, 64):
            G[i, j] *= 2.0
        T.gemm(P, S, G)
        T.copy(G, C)


def test_a_product_of_a_product(monkeypatch):
    a = numbers(64, 64)
    got, kernel = both_ways(chain, a, np.zeros((64, 64), np.float32), monkeypatch=monkeypatch)
    f = a.astype(np.float32)
    assert np.array_equal(got, 3 * ((f @ f.T).astype(np.float16).astype(np.float32) @ f))
    assert {"halves", "scale"} <= set(marked(kernel)[0])


@T.prim_func
def summed(A: T.Tensor((64, 256), "float16"), C: T.Tensor((64, 64), "float32")):
    with T.Kernel(1, threads=128):
        S = T.alloc_shared((64, 64), "float16")
        P, F = T.alloc_fragment((64, 64), "float32"), T.alloc_fragment((64, 64), "float32")
        T.clear(F)
        for k in T.Pipelined(4, num_stages=2):
            T.copy(A[:, k * 64:k * 64 + 64], S)
            T.gemm(S, S, P, transpose_B=True, clear_accum=True)
            for i, j in T.Parallel(64, 64):
                F[i, j] += P[i, j]
        T.copy(F, C)


def test_products_are_added_to_an_array_from_their_registers(monkeypatch):
    a = numbers(64, 256)
    got, kernel = both_ways(summed, a, np.zeros((64, 64), np.float32), monkeypatch=monkeypatch)
    assert np.array_equal(got, a.astype(np.float32) @ a.astype(np.float32).T)
    kinds, *moves = marked(kernel)
    assert set(kinds) == {"sum"} and moves == [0, 0]
    text = print_kernel(kernel)
    assert "tl::add_P_0(F[0], F[1]," in text and "tl_P_<32>" in text and "tl_F" not in text


def test_accumulators_that_cannot_be_followed_stay_arrays(monkeypatch):
    @pass_(needs=DEVICE)
    def pins_of_parts(func, cx):
        return replaced(func, body=rewrite(func.body, lambda x: with_options(x, count=x.options.count // 2) if isinstance(
            x, Call) and x.op == "wgmma_pin" else None))

    before = pipeline.DEVICE_PASSES
    at = before.index(assign_accumulator_registers)
    monkeypatch.setattr(pipeline, "DEVICE_PASSES", (*before[:at], pins_of_parts, *before[at:]))
    (kernel,) = pipeline.lower(turns.func, SM90A).kernels
    assert not any(x.options.registers for x in walk(kernel.launch.body) if isinstance(x, Call) and x.op == "wgmma")
    assert ".reg" not in print_kernel(kernel).split("extern")[1] and "wgmma_pin<16>(&F[0])" in print_kernel(kernel)


def test_accumulators_of_several_instructions():
    (kernel,) = pipeline.lower(gemm(128, 128, 128, 128, 128, 64).func, SM90A, {"tl.resize_blocks": False}).kernels
    assert ".reg .f32 tl_Cf_<128>" in print_kernel(kernel)


def test_products_in_no_loop_stay_arrays():
    (kernel,) = pipeline.lower(gemm(64, 64, 64, 64, 64, 64).func, SM90A, {"tl.resize_blocks": False}).kernels
    assert not kernel.launch.plan.own_values and "wgmma_pin" in print_kernel(kernel)


@pytest.mark.parametrize("n, own", [(256, True), (249, False)])
def test_threads_stored_chunks_of_an_accumulator_behind_branches(n: int, own: bool):
    """256 x 128 tiles: threads store a result of an odd pitch, TMA one of 256 columns."""
    (kernel,) = pipeline.lower(gemm(256, n, 256, 256, 128, 64, tb=True, stages=3, threads=256).func, SM90A).kernels
    assert kernel.launch.plan.own_values == own


def test_programs_without_products_are_left_alone():
    from tilelang.transform.framework.pass_ import PassContext

    func = pipeline.lower(turns.func, Target({"kind": "cuda", "arch": "sm_80"})).host
    assert assign_accumulator_registers(with_options(func, phase=DEVICE), PassContext(SM90A, {})).body is func.body


def test_forms_of_loops():
    r, b, p = fresh("r"), Buffer("b", (8,), dtype("float32"), "local"), Buffer("p", (8,), dtype("float16"), "local")

    def loop(body, n=8):
        return For(r, const(0), const(n), "unroll", body)

    x = fresh("x", dtype("float32"))
    fill = register_form(loop(Store(b, (r,), x)))
    assert isinstance(fill, Form) and fill.kind == "fill" and fill.buffer is b and len(fill.points) == 8
    assert register_form(loop(Store(b, (r,), load(b, (r,)) * x))).kind == "scale"
    halves = register_form(loop(Store(p, (r,), load(b, (r,)).astype("float16"))))
    assert halves.kind == "halves" and halves.points[1] == (1, b, 2, 3)
    assert register_form(loop(Store(p, (r,), load(b, (r,)).astype("float16")), 7)) is None, "half a word"
    assert register_form(loop(Store(b, (r,), load(b, (r,)) + x))) is None
    assert register_form(loop(Store(b, (r % 4,), x))) is None, "an element twice"
    assert register_form(Store(b, (const(0),), x)) is None and packed_source(Store(b, (const(0),), x)) is None
    assert constant(r * 2 + 1, {r: 3}) == 7 and constant(r, {}) is None and MOST == 256


def test_text_of_declarations_and_moves():
    kept = [Buffer("b", (8,), dtype(x), "local") for x in ("float32", "int32", "float16")]
    assert [register_type(b) for b in kept] == ["f32", "b32", "b32"]
    assert declared_registers({}) is None and declared_registers({"P": ("b32", 4)}) == 'asm volatile(".reg .b32 tl_P_<4>;");'
    assert "mov.f32 tl_F_1, %1;" in move_function("in_F", "F", "f32", 2, True)
    assert re.search(r'mov.b32 %1, tl_P_1;.*"=r"\(C\[1\]\)', move_function("out_P", "P", "b32", 2, False), re.S)


@pytest.mark.skipif(not nvrtc.available(), reason="NVRTC is not installed")
@pytest.mark.parametrize("options", [[], ["-G"]])
def test_the_assembler_takes_names_in_inlined_functions(options):
    (kernel,) = pipeline.lower(chain.func, SM90A).kernels
    assert nvrtc.compile_cubin(print_kernel(kernel), "sm_90a", options).bytes


@pytest.mark.skipif(not nvrtc.available(), reason="NVRTC is not installed")
@pytest.mark.parametrize("depth", [16, 32])
def test_operands_rounded_to_tf32_had_registers_that_the_assembler_refuses(depth):
    """In one step of K, where accumulator and operand are named registers; a wgmma of tf32 reads registers of type b32."""
    @T.prim_func
    def one_step(A: T.Tensor((64, depth), "float32"), B: T.Tensor((64, depth), "float32"), C: T.Tensor((64, 64), "float32")):
        with T.Kernel(1, threads=128) as _:
            left, right = T.alloc_fragment((64, depth), "float32"), T.alloc_shared((64, depth), "float32")
            acc = T.alloc_fragment((64, 64), "float32")
            T.copy(A, left)
            T.copy(B, right)
            T.gemm(left, right, acc, transpose_B=True, clear_accum=True)
            T.copy(acc, C)

    program = pipeline.lower(one_step.func, SM90A)
    assert nvrtc.compile_cubin(print_kernel(program.kernels[0]), "sm_90a").bytes
    a, b = numbers(64, depth, dtype=np.float32), numbers(64, depth, dtype=np.float32)
    found = run_device(program, {"A": a, "B": b, "C": np.zeros((64, 64), np.float32)}).outputs["C"]
    np.testing.assert_allclose(found, a @ b.T, atol=1e-2)
