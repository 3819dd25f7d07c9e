"""Operator graphs become few kernels, whose text runs and computes what the graph says."""

import itertools
import linecache
import os
import pathlib
import re
import subprocess
import sys
from types import MappingProxyType

import numpy as np
import pytest
from whole_programs import CASES

import tilelang
from tilelang.ir import dtype
from tilelang.program.expr import Scalar
from tilelang.program.graph import Graph, Node
from tilelang.program.lower import lower
from tilelang.program.text import Printer, in_steps
from tilelang.target import Target

SIMULATED = {"kind": "cuda", "arch": "sm_90a"}
_NUMBERS = itertools.count()


def node(op, *inputs, shape=(), dt="float32", **attrs):
    return Node(op, inputs, MappingProxyType(attrs), shape, dtype(dt))


def tensor(name, shape, dt="float16"):
    return node("input", shape=shape, dt=dt, name=name, index=next(_NUMBERS))


def number(value, dt="float32"):
    return node("constant", dt=dt, value=value)


def apply(op, *xs, dt=None):
    rank = max(len(x.shape) for x in xs)
    shape = tuple(max(x.shape[k] for x in xs if len(x.shape) >= -k) for k in range(-rank, 0))
    return node(op, *xs, shape=shape, dt=dt or str(xs[-1].dtype))


def reduced(kind, x):
    return node("reduce", x, shape=(*x.shape[:-1], 1), kind=kind, axes=(len(x.shape) - 1,), keepdims=True,
                accum=dtype("float32"))


def einsum(spec, *xs):
    sizes = {c: s for x, letters in zip(xs, spec.split("->")[0].split(",")) for c, s in zip(letters, x.shape)}
    return node("einsum", *xs, shape=tuple(sizes[c] for c in spec.split("->")[1]), dt=str(xs[0].dtype), spec=spec,
                accum=dtype("float32"))


def cast(x, dt):
    return node("cast", x, shape=x.shape, dt=dt)


def weights(s):
    w = cast(s, "float32")
    e = apply("exp", apply("sub", w, reduced("max", w)))
    return cast(apply("div", e, reduced("sum", e)), str(s.dtype))


def module_of(*outputs, target="cpu"):
    found = Graph((), outputs).nodes
    inputs = sorted((n for n in found if n.op == "input"), key=lambda n: n.attrs["index"])
    return lower(Graph(tuple(inputs), outputs, single=len(outputs) == 1).shared(), None, Target(target))


def run(module, arrays, target="cpu"):
    """The results of a module's steps.  arrays: in the order of its inputs."""
    name = f"<module {next(_NUMBERS)}>"
    linecache.cache[name] = (len(module.source), None, module.source.splitlines(True), name)
    functions: dict = {}
    exec(compile(module.source, name, "exec"), functions)
    buffers = dict(zip(module.inputs, arrays))
    buffers |= {n: np.full([int(s) for s in shape], 7, kind) for n, (shape, kind) in module.buffers.items()}
    backend = {"execution_backend": "simulator"} if isinstance(target, dict) else {}
    for name, inputs, outputs in module.steps:
        kernel = tilelang.compile(functions[name], target=target, **backend)
        kernel(*(buffers[n] for n in (*inputs, *outputs)))
    return [buffers[n] for n in module.outputs]


def attention(seq=96, dim=32, score=lambda s, i, j: s, flip=False, names="QKV"):
    q, k, v = (tensor(n, (2, seq, dim)) for n in names)
    s = einsum("hkd,hqd->hqk", k, q) if flip else einsum("hqd,hkd->hqk", q, k)
    i, j = (node("iota", shape=shape, dt="int32", axis=a) for a, shape in ((0, (seq, 1)), (1, (1, seq))))
    return einsum("hqk,hkd->hqd", weights(score(apply("mul", s, number(dim**-0.5, "float16")), i, j)), v)


def causal(s, i, j):
    return apply("where", apply("ge", i, j, dt="bool"), s, number(-np.inf, "float16"))


def window(s, i, j):
    near = apply("lt", apply("sub", i, j), number(20, "int32"), dt="bool")
    return apply("where", apply("and", apply("ge", i, j, dt="bool"), near), s, number(-np.inf, "float16"))


def capped(s, i, j):
    return apply("mul", apply("tanh", apply("mul", s, number(0.05, "float16"))), number(20.0, "float16"))


def biased(s, i, j):
    return apply("sub", s, apply("mul", cast(apply("sub", i, j), "float16"), number(0.1, "float16")))


def rectified(s, i, j):
    return apply("max", s, number(0.0, "float16"))


def expected(q, k, v, score):
    s = np.einsum("hqd,hkd->hqk", q, k) * q.shape[-1]**-0.5
    i, j = np.arange(s.shape[1])[:, None], np.arange(s.shape[1])[None]
    s = {causal: lambda: np.where(i >= j, s, -np.inf), window: lambda: np.where((i >= j) & (i - j < 20), s, -np.inf),
         capped: lambda: 20 * np.tanh(s * 0.05), biased: lambda: s - (i - j) * 0.1,
         rectified: lambda: np.maximum(s, 0)}.get(score, lambda: s)()
    p = np.exp(s - s.max(-1, keepdims=True))
    return np.einsum("hqk,hkd->hqd", p / p.sum(-1, keepdims=True), v)


@pytest.mark.parametrize("score,target", [(causal, "cpu"), (window, "cpu"), (capped, "cpu"), (biased, "cpu"),
                                          (window, SIMULATED)])
def test_a_chain_of_products_streams_in_one_kernel(score, target):
    """One pass: the sums follow the running maximum; tiles that the mask hides are skipped."""
    module = module_of(attention(score=score), target=target)
    assert len(module.steps) == 1 and module.source.count("T.Pipelined") == 1
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, 96, 32)).astype(np.float16) for _ in range(3))
    (got,) = run(module, (q, k, v), target)
    want = expected(*(x.astype(np.float64) for x in (q, k, v)), score)
    assert np.abs(got - want).max() <= 4 * 2.0**-11 * np.abs(want).max()


@pytest.mark.parametrize("score", [causal, window, capped, biased, rectified])
@pytest.mark.parametrize("flip", [False, True])
@pytest.mark.parametrize("names", ["QKV", ("left", "acc", "T_s")])
def test_changed_programs_have_as_many_kernels(score, flip, names):
    assert len(module_of(attention(score=score, flip=flip, names=names), target=SIMULATED).steps) == 1


def test_the_fusion_names_no_workload():
    room = pathlib.Path(tilelang.__file__).parent / "program"
    workloads = re.compile(r"soft_?max|attention|\bmlp\b|\blora\b|rms_?norm|cross.entropy", re.I)
    for name in ("nest", "rescale", "cut", "emit"):
        assert not workloads.search((room / f"{name}.py").read_text())


def test_a_mask_of_large_numbers_keeps_rows_that_it_hides_wholly():
    """Of a row of equal scores of -1e9, the rounding error of a fused multiply-add would be felt in the exponent."""
    def hidden(s, i, j):
        return apply("where", apply("ge", i, number(3, "int32"), dt="bool"), cast(s, "float32"), number(-1e9))

    module = module_of(attention(seq=16, score=hidden))
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, 16, 32)).astype(np.float16) for _ in range(3))
    (got,) = run(module, (q, k, v))
    assert np.abs(got[:, :3] - v.astype(np.float64).mean(1, keepdims=True)).max() < 2e-3


def test_a_factor_that_many_blocks_read_is_stored_in_halves(monkeypatch):
    """Windows of the other one are loaded into the registers that multiply."""
    monkeypatch.setattr("tilelang.program.cut.EXACT", {"": 1.0, "halves": 1e6, "stored": 1.0})
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((1, 17, 40)).astype(np.float32), rng.standard_normal((20, 17, 2)).astype(np.float32)
    program = tilelang.program(lambda x, w: tilelang.language.conv1d(x, w, padding=1))
    module = lower(program.graph(x, w), None, Target(SIMULATED))
    assert "T.gemm(left_low, high_s, " in module.source
    (got,) = run(module, (x, w), SIMULATED)
    assert np.abs(got - program.reference(x.astype(np.float64), w.astype(np.float64))).max() < 2e-5


def test_the_longest_dimension_of_a_grid_is_its_first():
    """A second one of 131,072 blocks cannot be launched."""
    x = tensor("X", (131072, 4, 2048))
    module = module_of(apply("add", x, tensor("Y", (2048,))), target=SIMULATED)
    assert "T.Kernel(131072, " in module.source


def test_a_program_has_one_text_in_each_process():
    cases = [c for c in CASES if c.name in ("linear_attention", "group_norm", "top_five", "attention_causal")]
    said = "\n".join(c.program.tile_source(c.arguments(), "cpu") for c in cases)
    names = [c.name for c in cases]
    code = ("from whole_programs import CASES\n"
            f"print('\\n'.join(c.program.tile_source(c.arguments(), 'cpu') for c in CASES if c.name in {names}))")
    settings = {**os.environ, "PYTHONHASHSEED": "7", "TILELANG_DISABLE_CACHE": "1"}
    other = subprocess.run([sys.executable, "-c", code], cwd=pathlib.Path(__file__).parent, env=settings, check=True,
                           capture_output=True, text=True, timeout=60)
    assert other.stdout == said + "\n"


def test_what_a_condition_and_its_choice_compute_has_one_name():
    (case,) = (c for c in CASES if c.name == "linear_relu")
    loop = case.program.tile_source(case.arguments(), SIMULATED).rpartition("T.Parallel")[2]
    assert re.search(r"value = acc\[.*\] \+ .*\n.* = T.if_then_else\(value < 0.0, 0.0, value\)\n", loop)

    x, zero = (Scalar("read", (), "float32", name) for name in "x0")
    double = Scalar("add", (x, x), "float32")
    relu = Scalar("where", (Scalar("lt", (double, zero), "bool"), zero, double), "float32")
    printer = Printer(lambda e: e.value if e.op == "read" else None)
    assert in_steps(printer, relu, lambda name: name) == (["value = x + x"], "T.if_then_else(value < 0, 0, value)")
    inside = Scalar("where", (Scalar("lt", (x, zero), "bool"), relu, zero), "float32")  # computed only where x is below 0
    assert in_steps(printer, inside, lambda name: name)[0] == []
