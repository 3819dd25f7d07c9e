"""Which calls share a kernel, how functions are told apart, and what is refused."""

import time

import numpy as np
import pytest
from kernels import add, lazy_scale, relu_or_not, scale_program, scale_t, split

import tilelang
import tilelang.language as T
from tilelang.jit.keys import freeze


@pytest.mark.spec("R2.2:jit")
def test_forms_of_the_same_call_share_a_kernel():
    k = lazy_scale(4)
    assert lazy_scale(4) is k and lazy_scale(m=4) is k and lazy_scale(4, 8) is k and lazy_scale(4, n=8) is k
    assert lazy_scale(4, 8, T.float32) is k and lazy_scale(4, 8, np.float32.__name__) is k
    assert lazy_scale.compile(4) is k
    assert lazy_scale(4, 9) is not k and lazy_scale(4, factor=3.0) is not k
    torch = pytest.importorskip("torch")
    assert lazy_scale(4, 8, torch.float32) is k


def test_values_equal_in_python_but_not_as_programs_differ():
    assert freeze(1) != freeze(True) and freeze(1) != freeze(1.0) and freeze(0.0) != freeze(-0.0)
    assert freeze((1, 2)) != freeze([1, 2]) and freeze((1,)) != freeze((True,))
    assert freeze({"a": [1]}) == freeze({"a": [1]})
    with pytest.raises(TypeError, match="Unsupported unhashable JIT compile-time cache key value"):
        freeze(np.zeros(2))
    assert lazy_scale.parse_cache_key(4, factor=1) != lazy_scale.parse_cache_key(4, factor=1.0)


def test_a_warm_call_is_fast():
    lazy_scale(4)
    best = min(_timed(lambda: [lazy_scale(4) for _ in range(100)]) for _ in range(5)) / 100
    assert best < 20e-6, f"{best * 1e6:.1f} us"


def _timed(f):
    start = time.perf_counter()
    f()
    return time.perf_counter() - start


@pytest.mark.spec("R2.2:jit")
def test_calls_that_do_not_fit_are_type_errors():
    for args, kwargs in (((), {}), ((1, 2, 3, 4, 5), {}), ((1,), {"m": 1}), ((1,), {"bogus": 1})):
        with pytest.raises(TypeError):
            lazy_scale(*args, **kwargs)
    with pytest.raises(TypeError):
        tilelang.jit(scale_program())()
    with pytest.raises(ValueError, match="out_idx is only supported in lazy mode"):
        @tilelang.jit(out_idx=[0], target="cpu")
        def eager(A):
            N = T.const("N")
            A: T.Tensor((N,), "float32")
            with T.Kernel(1, threads=32):
                A[0] = 1.0

        eager(np.zeros(3, np.float32))


@pytest.mark.spec("L2.2:styles", "R2.2:jit")
def test_modes_are_found():
    lazy_scale(4), add(np.ones(4, np.float16), np.ones(4, np.float16))
    assert lazy_scale.mode == "lazy" and add.mode == "eager" and lazy_scale.is_lazy_mode()
    assert lazy_scale.__name__ == "lazy_scale" and "def lazy_scale(" in lazy_scale.func_source
    assert list(lazy_scale.signature.parameters) == ["m", "n", "dtype", "factor"]

    @tilelang.jit(out_idx=[-1], target="cpu")
    def through_a_helper(m):
        return scale_program(m)

    assert (through_a_helper(4)(np.ones((4, 8), np.float32)) == 2).all() and through_a_helper.mode == "lazy"

    @tilelang.jit
    def returns_nothing_useful(n):
        @T.prim_func
        def main(A: T.Tensor((n,), "float32")):
            with T.Kernel(1, threads=32):
                A[0] = 1.0

        return 5

    with pytest.raises(TypeError, match="must return a @T.prim_func"):
        returns_nothing_useful(4)


@pytest.mark.spec("L2.5:symbols")
def test_eager_kernels_specialise_on_constants_only():
    eager = scale_t.eager
    for m in (3, 9):
        x, y = np.ones((m, 10), np.float32), np.zeros((10, m), np.float32)
        scale_t(x, y)
        assert (y == 2).all()
    trace = next(iter(eager.traces.values()))
    assert len(eager.traces) == 1 and list(trace.kernels) == [(10,)]
    scale_t(np.ones((3, 4), np.float32), np.zeros((4, 3), np.float32))
    assert sorted(trace.kernels) == [(4,), (10,)]


def test_eager_constants_by_keyword_win_and_are_checked():
    a = np.ones(8, np.float16)
    assert (add(a, a, N=8) == 2).all()
    with pytest.raises((ValueError, RuntimeError), match=r"shape\[0\]"):
        add(a, a, N=9)
    with pytest.raises((ValueError, RuntimeError), match=r"B shape\[0\]"):
        add(a, np.ones(9, np.float16))
    with pytest.raises(TypeError, match="unexpected keyword argument 'Q'"):
        add(a, a, Q=9)
    with pytest.raises(ValueError, match="Cannot find value for constexpr variable `N`"):
        add.compile()
    with pytest.raises(ValueError, match="Expected 2 inputs, got 1"):
        add(a)
    assert add.compile(N=8) is add.compile(a, a) and add.compile(T.Tensor((8,), "float16"), None) is add.compile(N=8)
    with pytest.raises(TypeError):
        add(a, a, 64, 5)
    with pytest.raises(TypeError, match="multiple values"):
        add(a, a, A=a)


def test_eager_compile_time_values_and_callables():
    x = np.array([-1.0, 2.0], np.float32)

    def relu(v):
        return T.max(v, 0.0)

    def same(v):
        return v

    assert list(relu_or_not(x, relu)) == [3.0, 5.0]
    assert list(relu_or_not(x, same)) == [2.0, 5.0]
    assert list(relu_or_not(x, same, 10)) == [9.0, 12.0]
    assert list(relu_or_not(x, relu, n=0)) == [0.0, 2.0]
    with pytest.raises(TypeError, match="missing a required argument: 'act'"):
        relu_or_not(x)


def test_programs_and_sources_without_running():
    assert "main" in lazy_scale.get_tir(4).script()
    assert "define" in lazy_scale.get_kernel_source(4)
    assert add.get_tir(N=8).attrs["tilelang_out_idx"] == [-1]
    assert lazy_scale.parse_cache_key(4) == lazy_scale.parse_cache_key(m=4) != lazy_scale.parse_cache_key(5)
    assert split.parse_cache_key(M=1, N=2) != split.parse_cache_key(M=2, N=2)


@pytest.mark.spec("R2.1:compile")
def test_par_compile_keeps_order_and_may_ignore_errors():
    kernels = lazy_scale.par_compile([(4,), {"m": 5, "n": 6}], num_workers=2)
    assert [tuple(k.params[0].shape) for k in kernels] == [(4, 8), (5, 6)]
    assert kernels[0] is lazy_scale(4)
    with pytest.raises(ValueError):
        lazy_scale.par_compile([[4]])
    both = tilelang.par_compile([scale_program(), "not a program"], target="cpu", ignore_error=True)
    assert isinstance(both[0], tilelang.JITKernel) and both[1] is None
    with pytest.raises(AssertionError):
        tilelang.par_compile([scale_program(), 3], target="cpu")


@pytest.mark.spec("must:R2-program")
@pytest.mark.spec("R2.1:compile")
def test_compile_refuses_what_it_does_not_know():
    program = scale_program()
    with pytest.raises(AssertionError, match="target function must be a PrimFunc but got"):
        tilelang.compile(lambda: 0, target="cpu")
    with pytest.raises(ValueError, match="Invalid execution backend 'foo' for target 'cpu'. Allowed: tvm_ffi"):
        tilelang.compile(program, target="cpu", execution_backend="foo")
    with pytest.raises(AttributeError, match="Invalid config option 'tl.foo' candidates are"):
        tilelang.compile(program, target="cpu", pass_configs={"tl.foo": 1})
    with pytest.raises(AssertionError, match="Target foo is not supported"):
        tilelang.compile(program, target="foo")
    with pytest.raises(ValueError, match="list of integers"):
        tilelang.compile(program, out_idx=(1,), target="cpu")
    with pytest.raises(ValueError, match="Out index conflict"):
        tilelang.compile(add.get_tir(N=4), out_idx=[0], target="cpu")


@pytest.mark.spec("R9:TILELANG_DEFAULT_TARGET", "R9:TILELANG_EXECUTION_BACKEND")
def test_defaults_come_from_the_environment(monkeypatch):
    program = scale_program(5, 3)
    monkeypatch.setenv("TILELANG_DEFAULT_TARGET", "cpu")
    monkeypatch.setenv("TILELANG_EXECUTION_BACKEND", "tile")
    kernel = tilelang.compile(program, out_idx=[1])
    assert kernel.execution_backend == "tile" and kernel.target.kind == "cpu"
    assert (kernel(np.ones((5, 3), np.float32)) == 2).all()
    monkeypatch.setenv("TILELANG_DEFAULT_TARGET", '{"kind": "cuda", "arch": ')
    with pytest.raises(ValueError, match="Use JSON syntax"):
        tilelang.compile(program)


def test_debug_root_writes_both_files(tmp_path):
    @tilelang.jit(out_idx=[-1], target="cpu", debug_root_path=str(tmp_path))
    def made(m):
        return scale_program(m)

    made(3)
    assert "define" in (tmp_path / "tilelang_jit_kernel_made.c").read_text()
    assert "main" in (tmp_path / "tilelang_jit_program_made.py").read_text()


@pytest.mark.spec("R2.1:compile")
def test_pass_configs_and_flags_merge():
    @tilelang.jit(out_idx=[-1], target="cpu", pass_configs={tilelang.PassConfigKey.TL_ENABLE_FAST_MATH: True},
                  compile_flags="-a -b")
    def made(m):
        return scale_program(m)

    k = made(3)
    assert k.pass_configs == {"tl.enable_fast_math": True} and k.compile_flags == ["-a", "-b"]
    made.pass_configs["tl.enable_fast_math"] = False
    assert made(3) is not k


def test_kernels_compiled_together_missed_the_target_and_configs_around_the_call():
    from tilelang.autotuner.tuner import guarded
    from tilelang.target import Target
    from tilelang.tvm import transform

    @tilelang.jit(out_idx=-1)
    def double(n):
        @T.prim_func
        def main(A: T.Tensor((n,), "float32"), B: T.Tensor((n,), "float32")):
            with T.Kernel(1, threads=32):
                for i in T.Parallel(n):
                    B[i] = A[i] * 2
        return main

    with Target({"kind": "cuda", "arch": "sm_80"}), transform.PassContext(config={"tl.enable_fast_math": True}):
        kernels = [*double.par_compile([(32,), (64,)]), *tilelang.par_compile([double.get_tir(96)])]
        kernels.append(guarded(lambda: double(128), 60))  # as the tuner compiles candidates
    for kernel in kernels:
        assert kernel.target.arch == "sm_80" and kernel.request.config["tl.enable_fast_math"] is True
    assert all(k.target.is_cpu and not k.request.config for k in double.par_compile([(128,)])) or Target("auto").is_cuda
