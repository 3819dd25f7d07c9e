"""Kernels that stand in programs (T.tile), and the text of programs: pasted back, it is the same kernels."""

import numpy as np
import pytest
from whole_programs import CASES

import tilelang
import tilelang.language as T
from tilelang.ir.printer import to_text
from tilelang.program.api import Program, ProgramOptions
from tilelang.program.run import recipe_of

n, m = T.dynamic("n m")
FACTOR = 3
SIMULATED = {"kind": "cuda", "arch": "sm_90a"}


@T.prim_func
def tripled(A: T.Tensor((n, 64), "float16"), B: T.Tensor((n, 64), "float16")):
    with T.Kernel(T.ceildiv(n, 4), threads=64) as b:
        for i, j in T.Parallel(4, 64):
            if b * 4 + i < n:
                B[b * 4 + i, j] = A[b * 4 + i, j] * FACTOR


def sums(rows, scale):
    @T.macro
    def scaled(x):
        return x * scale

    @T.prim_func
    def kernel(X: T.Tensor((rows, 64), "float16"), Y: T.Tensor((rows, 64), "float16"), P: T.Tensor((rows, 64), "float16"),
               Q: T.Tensor((rows, 64), "float16")):
        with T.Kernel(rows, threads=64) as b:
            for j in T.Parallel(64):
                P[b, j] = X[b, j] + Y[b, j]
                Q[b, j] = X[b, j] - scaled(Y[b, j])

    return kernel


def between(x: T.Tensor((m, 64), "float16")):
    return T.softmax(T.tile(tripled, x + 1))


def alone(x: T.Tensor((m, 64), "float16")):
    return T.tile(tripled, x)


def several(x):
    p, q = T.tile(sums(8, 2), x, x)
    return (p * q).sum(1), q, T.tile(tripled, p) @ x.T, T.tile(tripled, T.tile(tripled, x))


def kernels_of(recipe):
    """The kernels of a program's text, pasted, as text of the IR."""
    return [to_text(tilelang.from_source(recipe.source, name).func) for name, _, _ in recipe.steps]


@pytest.mark.parametrize("target", ["cpu", "simulator"])
@pytest.mark.parametrize("fn", [between, alone, several])
def test_a_kernel_is_a_step_of_a_program(fn, target):
    program = tilelang.program(fn, target=target)
    x = np.random.default_rng(0).standard_normal((8, 64)).astype(np.float16)
    got, want = (v if isinstance(v, tuple) else (v,) for v in (program(x), program.reference(x)))
    for g, w in zip(got, want, strict=True):
        np.testing.assert_allclose(g.astype(float), w.astype(float), rtol=2e-3, atol=2e-3)
    (runner,) = program._runners.values()
    assert kernels_of(runner.recipe) == [to_text(f.func) for f in runner.recipe.functions()]


def test_the_text_of_a_kernel_is_the_users():
    text = tilelang.program(several).tile_source({"x": ((8, 64), "float16")}, target="cpu")
    assert text.count("B[b * 4 + i, j] = A[b * 4 + i, j] * FACTOR") == 1 and "FACTOR = 3\n" in text
    assert text.count("P[b, j] = (X[b, j] + Y[b, j])") == 1 and "parse(" in text  # a macro from outside: as it was traced


def walked(x: T.Tensor((n, 8, 64), "float16"), w: T.Tensor((64, 64), "float16")):
    def step(s, y):
        s = T.tile(tripled, T.tanh(s) + y @ w)
        return s, s.sum(1)

    last, rows = T.loop(step, T.zeros((8, 64), "float16"), x)
    return last / 2, rows


@pytest.mark.parametrize("target", ["cpu", "simulator"])
def test_the_host_walks_over_steps_with_kernels(target):
    program = Program(walked, ProgramOptions(target), None)
    rng = np.random.default_rng(3)
    w = (rng.standard_normal((64, 64)) / 8).astype(np.float16)
    for steps in (3, 1, 0):
        x = rng.standard_normal((steps, 8, 64)).astype(np.float16)
        for got, wanted in zip(program(x, w), program.reference(x, w)):
            assert got.shape == wanted.shape and np.allclose(got, wanted, atol=0.05, rtol=0.01)
    assert len(program._runners) == 1
    text = program.tile_source()
    assert "the host calls these kernels for each step" in text and "A[b * 4 + i, j] * FACTOR" in text


def test_loops_of_kernels_inside_of_loops_and_states_that_change_places():
    @tilelang.program(target="cpu")
    def f(x: T.Tensor((8, 64), "float16"), y: T.Tensor((8, 64), "float16")):
        def inner(s, _):
            return T.tile(tripled, s), None

        def outer(pair, _):
            a, b = pair
            return (T.loop(inner, b, length=2)[0] - a, a), a

        (a, b), rows = T.loop(outer, (x, y), length=3)
        return a, b, rows

    x, y = (np.random.default_rng(k).integers(-2, 3, (8, 64)).astype(np.float16) for k in range(2))
    for got, wanted in zip(f(x, y), f.reference(x, y)):
        assert got.shape == wanted.shape and (got == wanted).all()


QUICK = {"rotary", "layer_norm", "top_five", "attention_causal", "lora", "linear_attention", "quantised_matmul", "llama_block"}


@pytest.mark.parametrize("target", ["cpu", SIMULATED], ids=["cpu", "sm_90a"])
@pytest.mark.parametrize("case", [pytest.param(c, id=c.name, marks=() if c.name in QUICK else pytest.mark.slow) for c in CASES])
def test_the_text_of_each_program_compiles_to_the_same_kernels(case, target):
    program = Program(case.program.fn, ProgramOptions(target), None)
    args = case.arguments()
    recipe = recipe_of(program.graph(*args.values()), None, target)
    named = all(p.shape is not None for p in program.parameters)
    assert program.tile_source(None if named else args) == recipe.source
    own = recipe.functions()
    assert kernels_of(recipe) == [to_text(f.func) for f in own]
    if target == "cpu" and case.name in QUICK:
        pasted = tilelang.compile(tilelang.from_source(recipe.source, recipe.steps[0][0]), target="cpu")
        assert pasted.get_kernel_source() == tilelang.compile(own[0], target="cpu").get_kernel_source()
