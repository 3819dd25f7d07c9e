"""Calls of the listed programs, compiled for the CPU and for the simulator, equal what they compute in float64."""

import pathlib
import re

import numpy as np
import pytest
from whole_programs import CASES

import tilelang
import tilelang.language as T
from tilelang.library import tuning
from tilelang.program import run
from tilelang.program.api import Program, ProgramOptions

QUICK = {"scaled_sum", "rotary", "integer_bits", "rms_norm", "dynamic_softmax", "cross_entropy", "attention_causal", "lora",
         "quantised_matmul", "embedding", "squared_error", "llama_block"}
SIMULATED = {"scaled_sum", "softmax", "attention_dynamic", "mlp"}


def slow_but(names):
    return [pytest.param(c, id=c.name, marks=() if c.name in names else pytest.mark.slow) for c in CASES]


def check(case, target):
    program = Program(case.program.fn, ProgramOptions(target), None)
    for spec in (case.small, *case.also):
        args = case.arguments(spec)
        case.check(program(*args.values()), args)


@pytest.mark.parametrize("case", slow_but(QUICK))
def test_a_call_on_the_cpu_computes_the_program(case):
    check(case, "cpu")


@pytest.mark.parametrize("case", slow_but(SIMULATED))
def test_a_call_on_the_simulator_computes_the_program(case):
    check(case, "simulator")


def test_the_benchmark_has_a_torch_form_of_each_program():
    text = (pathlib.Path(__file__).parents[2] / "benchmarks" / "suite" / "torch_programs.py").read_text(encoding="utf-8")
    assert {c.name for c in CASES} == set(re.findall(r"@program\ndef (\w+)", text))


def test_one_kernel_serves_all_values_of_an_open_size():
    @tilelang.program(target="cpu")
    def f(x: T.Tensor((T.dynamic("n"), 8), "float32"), s: T.float32):
        return (x * s).sum(1)

    x = np.ones((5, 8), np.float32)
    assert (f(x, 2.0) == 16).all() and (f(x[:3], 3) == 24).all() and f(x, np.float32(1)).shape == (5,)
    assert len(f._runners) == 1 and len(f._graphs) == 1


def test_a_scalar_of_numpy_is_a_number_of_the_call():
    torch = pytest.importorskip("torch")
    program = tilelang.program(lambda s, x: (x * s + T.where(x > s, s, x), s + 1), target="cpu")
    x, s = np.arange(6, dtype=np.float32), np.float32(2.5)
    for like in (x, torch.from_numpy(x)):
        for got, want in zip(program(s, like), program.reference(s, like), strict=True):
            assert type(got) is type(want) is type(like) and np.array_equal(got, want)


def test_arrays_with_gaps_are_copied():
    @tilelang.program(target="cpu")
    def f(x):
        return x * 2

    x = np.arange(24, dtype=np.float32).reshape(4, 6)
    for view in (x.T, x[::2], x[:, 1:]):
        assert np.array_equal(f(view), view * 2)


def test_results_are_arrays_of_their_own():
    @tilelang.program(target="cpu")
    def f(x):
        return x, x[0], x.reshape(-1), T.zeros((2,))

    x = np.ones((2, 3), np.float32)
    out = f(x)
    assert [y.shape for y in out] == [(2, 3), (3,), (6,), (2,)] and not any(np.shares_memory(x, y) for y in out)


def test_the_source_compiles_to_what_the_program_runs():
    case = next(c for c in CASES if c.name == "softmax")
    args = case.arguments()
    program = Program(case.program.fn, ProgramOptions("cpu"), None)
    source = program.tile_source(args)
    kernel = tilelang.compile(tilelang.from_source(source, "softmax"), out_idx=[1], target="cpu")
    out = program(*args.values())
    (own,) = program._runners.values()
    assert kernel.get_kernel_source() == own.kernels[0].get_kernel_source()
    assert np.array_equal(kernel(*args.values()), out)


def test_a_factor_that_stands_twice_in_a_sum_of_products_counts_twice():
    @tilelang.program
    def squares(q, k, v):
        w = (1 + q @ k.T * 0.5) ** 2
        return w @ v, w @ v / w.sum(-1, keepdims=True), T.einsum("ik,ik,kj->ij", q, q, v[:q.shape[1]])

    rng = np.random.default_rng(0)
    q, k, v = (rng.integers(-2, 3, s).astype(np.float32) for s in ((19, 8), (33, 8), (33, 5)))
    for got, want in zip(squares(q, k, v), squares.reference(q, k, v)):
        assert np.abs(got - want).max() <= 1e-5 * np.abs(want).max()


def test_a_result_that_reads_no_array_lies_beside_the_arguments():
    pytest.importorskip("torch")  # loaded, it is what kernels without arrays give

    @tilelang.program(target="cpu")
    def f(x):
        return x * 2, T.zeros((2, 3)) + 1

    out = f(np.ones((2, 3), np.float32))
    assert all(isinstance(y, np.ndarray) for y in out) and (out[1] == 1).all()


def test_a_tuned_program_runs_the_plans_that_were_fastest(monkeypatch, tmp_path):
    """Times are made up: of each group of kernels the second plan wins."""
    monkeypatch.setenv("TILELANG_CACHE_DIR", str(tmp_path))
    races = []

    class Clock:
        def __call__(self, like, target, backend):
            return self

        def release(self):
            pass

    def won(measure, count):
        races.append(count)
        return 1, {0: 1.0, 1: 0.5}

    monkeypatch.setattr(tuning, "race", won)
    monkeypatch.setattr(tuning, "tuner", tuning.Tuner(Clock()))

    def f(x, w):
        return T.softmax(x @ w)

    x, w = (np.random.default_rng(k).standard_normal(s).astype(np.float32) for k, s in enumerate(((40, 96), (96, 700))))
    plain, first, second = (Program(f, ProgramOptions("cpu", tune=t), None) for t in (False, True, True))
    wanted = plain(x, w)
    assert np.allclose(first(x, w), wanted, atol=1e-5) and min(races) > 1
    tuned = first.tile_source({"x": x, "w": w})
    assert tuned != plain.tile_source({"x": x, "w": w}) and "measured to be faster" in tuned
    count = len(races)
    monkeypatch.setattr(tuning, "tuner", tuning.Tuner(Clock()))  # another process: found on disk
    assert np.allclose(second(x, w), wanted, atol=1e-5) and len(races) == count
    assert second.tile_source({"x": x, "w": w}) == tuned
    monkeypatch.setattr(tuning, "tuner", tuning.Tuner(lambda *_: None))  # a device without a clock
    assert np.allclose(Program(f, ProgramOptions("cpu", tune=True), None)(x, w), wanted, atol=1e-5) and len(races) == count


def test_plans_that_give_other_results_are_not_taken():
    agree = run._agree
    x = np.array([1.0, np.inf, np.nan, 3.0], np.float32)
    with np.errstate(invalid="ignore"):
        near, far = x + np.float32(1e-5), x + np.float32(1e-3)
        assert agree(([x],), ([near],)) and not agree(([x],), ([far],))
        assert not agree(([x],), ([np.array([1.0, np.inf, 2.0, 3.0], np.float32)],))
    assert agree(([np.arange(3)],), ([np.arange(3)],)) and not agree(([np.arange(3)],), ([np.arange(3) + 1],))


def test_kernels_that_do_not_need_each_other_are_branches():
    steps = [("a", ["x"], ["p"]), ("b", ["p"], ["q"]), ("c", ["x"], ["r"]), ("d", ["x", "q", "r"], ["s"]), ("e", ["r"], ["t"])]
    assert run.branches(steps) == [(0, []), (0, []), (1, []), (0, [2]), (1, [])]
    assert run.branches([("a", ["x"], ["p"]), ("b", ["x"], ["q"]), ("c", ["q", "p"], ["r"])]) == [(0, []), (1, []), (0, [1])]


@pytest.mark.gpu
def test_branches_of_a_captured_call():
    torch = pytest.importorskip("torch")

    @tilelang.program
    def f(x):
        y = x.sum(0)
        return x.max(), x.argmax(1), y - y.max(), x.sum(1)

    x = torch.randn(3000, 2000, device="cuda")
    wanted = f(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            got = f(x)
    for _ in range(3):
        for g in got:
            g.zero_()
        graph.replay()
        assert all(torch.equal(g, w) for g, w in zip(got, wanted))
