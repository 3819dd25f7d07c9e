"""Public names import, stay light, and do what older programs expect of them."""

import logging
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import tilelang
import tilelang.language as T
from tilelang import tvm
from tilelang.errors import InternalError
from tilelang.target import Target

ROOT = Path(__file__).resolve().parents[2]


@T.prim_func
def scale(A: T.Tensor((64,), "float32"), B: T.Tensor((64,), "float32")):
    with T.Kernel(2, threads=32) as bx:
        for i in T.Parallel(32):
            B[bx * 32 + i] = A[bx * 32 + i] * 2.0


@pytest.mark.spec("R1:surface")
def test_every_name_of_the_package_loads():
    for name in tilelang.__all__:
        assert getattr(tilelang, name) is not None, name
    for name in ("autotuner", "backend", "cache", "carver", "contrib", "engine", "env", "errors", "ir", "jit",
                 "language", "layout", "math", "profiler", "testing", "tileop", "transform", "tvm", "utils", "analysis",
                 "autodd", "cpu", "cuda", "instrumentation", "libinfo", "metal", "rocm", "tools", "webgpu"):
        assert getattr(tilelang, name) is not None, name
        assert name in dir(tilelang)
    assert not hasattr(tilelang, "no_such_name")


def test_import_is_light_and_fast():
    code = ("import sys, time; t = time.perf_counter(); import tilelang; t = time.perf_counter() - t; "
            "heavy = [m for m in ('torch', 'llvmlite', 'tvm_ffi', 'numpy') if m in sys.modules]; print(t, heavy)")
    best = 9.0
    for _ in range(3):
        out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True).stdout
        seconds, _, heavy = out.partition(" ")
        assert heavy.strip() == "[]"
        best = min(best, float(seconds))
    assert best < 0.15


TOP_LEVEL = """
import tilelang
import tvm
from tvm import DataType, tir, tirx
from tvm.tirx import PrimExpr, stmt_functor
import tvm.tirx.stmt_functor, tvm.target, tvm.script
from tvm.script import tirx as T
assert tvm is tilelang.tvm and tvm.target.Target is tilelang.tvm.target.Target and tvm.tirx is tirx
assert DataType("float16").bits == 16 and tvm.transform.PassContext and tvm.error.InternalError and tvm.TVMError
assert issubclass(tvm.ir.PrimExpr, PrimExpr) and tirx.exp is tilelang.language.exp and T is tilelang.language
assert stmt_functor.post_order_visit is tirx.post_order_visit and callable(tvm.testing.requires_cuda)
try:
    import tvm.relay
except ModuleNotFoundError as e:
    print(e.name)
"""


@pytest.fixture
def without_tvm():
    if any(f.find_spec("tvm", None) for f in sys.meta_path if type(f).__module__.partition(".")[0] != "tilelang"
           and hasattr(f, "find_spec")):
        pytest.skip("a package tvm is installed")


def test_tvm_was_no_module_where_none_is_installed(without_tvm):
    out = subprocess.run([sys.executable, "-c", TOP_LEVEL], capture_output=True, text=True, cwd=ROOT)
    assert out.stdout == "tvm.relay\n", out.stderr


def test_an_installed_tvm_wins(tmp_path):
    (tmp_path / "tvm").mkdir()
    (tmp_path / "tvm" / "__init__.py").write_text("real = True\n")
    code = f"import sys, tilelang; sys.path.append({str(tmp_path)!r}); import tvm; print(tvm.real, hasattr(tvm, 'tirx'))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert out.stdout == "True False\n", out.stderr


def test_jit_is_a_decorator_and_a_package():
    import tilelang.jit
    from tilelang.jit import exceptions

    @tilelang.jit
    def f(n):
        return n

    @tilelang.jit(out_idx=[0])
    def g(n):
        return n

    assert isinstance(f, tilelang.jit.JITImpl) and isinstance(g, tilelang.jit.JITImpl)
    assert issubclass(exceptions.JITNoBuilderError, Exception) and exceptions.EagerJITBuildError


@pytest.mark.spec("R1:surface")
def test_math_and_versions():
    assert tilelang.cdiv(7, 2) == 4 and [tilelang.next_power_of_2(x) for x in (0, 1, 5, 8)] == [1, 1, 8, 8]
    assert tilelang.build_date("0.1.0.d20260102+x") == "20260102" and tilelang.build_date("0.1.0") is None
    assert tilelang.dtypes.float16 == tilelang.DataType("float16")


@pytest.mark.spec("R5:lower")
def test_lower_gives_source_and_params():
    for build in (tilelang.lower, tilelang.engine.lower, tilelang.engine.lower.lower):
        artifact = build(scale, target="cpu")
        assert "define" in artifact.kernel_source and [tuple(p.shape) for p in artifact.params] == [(64,), (64,)]
    artifact = tilelang.lower(tvm.IRModule.from_expr(scale), target="cpu", enable_device_compile=True)
    a, b = np.ones(64, np.float32), np.zeros(64, np.float32)
    artifact.rt_mod(a, b)
    assert (b == 2).all()


def test_tvm_names():
    with tvm.transform.PassContext(config={"tl.enable_fast_math": True}), tvm.target.Target("cpu"):
        kernel = tilelang.compile(scale)
        assert kernel.pass_configs == {"tl.enable_fast_math": True} and kernel.target.kind.name == "cpu"
    assert tilelang.compile(scale, target="cpu").pass_configs == {}
    from tilelang.transform import PassContext, get_pass_context, simplify_prim_func

    with PassContext(config={"tl.enable_fast_math": True}) as outer, PassContext(config={"tl.disable_wgmma": True}):
        assert tilelang.compile(scale, target="cpu").pass_configs == {"tl.enable_fast_math": True,
                                                                      "tl.disable_wgmma": True}
    assert get_pass_context().config == {} and outer.config and simplify_prim_func(scale) is scale
    assert tvm.DataType("float16").bits == 16 and tvm.error.InternalError is InternalError
    tvm.ir.assert_structural_equal(scale, scale)
    tvm.ir.assert_structural_equal(tvm.IRModule.from_expr(scale), tvm.IRModule({scale.name: scale}))
    with pytest.raises(AssertionError, match="the modules hold"):
        tvm.ir.assert_structural_equal(tvm.IRModule.from_expr(scale), tvm.IRModule({"other": scale}))
    with pytest.raises(AssertionError):
        tvm.ir.assert_structural_equal(scale, tilelang.jit(lambda: scale).func().with_attr("global_symbol", "other"))
    seen = []
    tvm.tirx.stmt_functor.post_order_visit(scale, seen.append)
    assert any(isinstance(n, tvm.tirx.BufferStore) for n in seen)
    assert tvm.runtime.enabled("llvm")


def test_settings_read_the_environment_live(monkeypatch):
    from tilelang.env import env as same

    env = tilelang.env
    assert env is same
    monkeypatch.setenv("TILELANG_PRINT_ON_COMPILATION", "off")
    assert not env.is_print_on_compilation_enabled()
    monkeypatch.setenv("TILELANG_PRINT_ON_COMPILATION", "Yes")
    assert env.is_print_on_compilation_enabled()
    with env.using(TILELANG_CACHE_DIR="/somewhere"):
        assert env.TILELANG_TMP_DIR == "/somewhere/tmp"
    monkeypatch.setenv("TILELANG_COMPILE_TIMEOUT_SECONDS", "soon")
    with pytest.raises(ValueError):
        env.get_compile_timeout_seconds()
    monkeypatch.setenv("TILELANG_DEBUG", "x")
    with pytest.raises(ValueError, match="TILELANG_DEBUG"):
        assert env.TILELANG_DEBUG
    assert not hasattr(env, "NO_SUCH_SETTING")
    with pytest.raises(AttributeError):
        env.NO_SUCH_SETTING = 1
    assert all(v.about for v in env.settings().values())


def test_logger(capsys):
    tilelang.set_log_level("WARNING")
    try:
        tilelang.logger.info("quiet")
        tilelang.logger.warning("loud")
    finally:
        tilelang.set_log_level(logging.INFO)
    err = capsys.readouterr().err
    assert "quiet" not in err and "[TileLang:tilelang:WARNING] (test_public_surface.py:" in err and "loud" in err
    with pytest.raises(ValueError):
        tilelang.set_log_level("chatty")


@pytest.mark.spec("T.GemmWarpPolicy")
@pytest.mark.spec("R12:utils", "R12:nvcc")
def test_helpers_of_older_scripts():
    from tilelang.backend.target import determine_target
    from tilelang.carver.arch import driver
    from tilelang.contrib import nvcc
    from tilelang.tileop.base import GemmWarpPolicy
    from tilelang.utils import deprecated, is_global, is_shared
    from tilelang.utils.device import get_available_cpu_count

    assert determine_target("cpu", return_object=True) == Target("cpu")
    assert nvcc.get_target_compute_version({"kind": "cuda", "arch": "sm_90"}) == "9.0"
    assert nvcc.parse_compute_version("8.9") == (8, 9) and nvcc.is_hopper({"kind": "cuda", "arch": "sm_90a"})
    assert GemmWarpPolicy is T.GemmWarpPolicy and get_available_cpu_count() >= 1
    buffer = next(iter(scale.buffer_map.values()))
    assert is_global(buffer) and not is_shared(buffer)
    with pytest.warns(DeprecationWarning, match="old is deprecated"):
        deprecated("old", "new")(lambda: 1)()
    if driver.get_cuda_device_properties() is None:
        with pytest.raises(RuntimeError, match="Failed to get device properties."):
            driver.get_num_sms()


@pytest.mark.spec("R12:testing")
def test_testing_marks_and_runner(capsys, monkeypatch):
    from tilelang import testing

    @testing.requires_llvm
    def needs_llvm():
        return 1

    assert needs_llvm() == 1
    with pytest.raises(ValueError):
        testing.requires_cuda_compute_version(9, mode="near")
    assert testing.process_func(lambda x: x, "gemm", x=0.5) == 0.5
    assert capsys.readouterr().out == "gemm: 0.5\n"
    monkeypatch.setenv("TL_PERF_REGRESSION_FORMAT", "json")
    testing.process_func(lambda: 2, "add")
    assert capsys.readouterr().out == '{"name": "add", "latency": 2.0}\n'
    testing.set_random_seed(1)
    first = np.random.rand()
    testing.set_random_seed(1)
    assert np.random.rand() == first


@pytest.mark.spec("R12:testing")
def test_comparison_allows_a_share_of_outliers():
    torch = pytest.importorskip("torch")
    from tilelang.utils.tensor import torch_assert_close

    a, b = torch.zeros(1000), torch.zeros(1000)
    b[0] = 5
    assert torch_assert_close(a, b, max_mismatched_ratio=0.001)
    b[1] = float("nan")
    with pytest.raises(AssertionError, match="Too many mismatched elements: 2 of 1000"):
        torch_assert_close(a, b, max_mismatched_ratio=0.001)
    with pytest.raises(AssertionError, match="shape differs"):
        torch_assert_close(a, b[:3])
    with pytest.raises(AssertionError, match="dtype differs"):
        torch_assert_close(a, b.double())
    nan = torch.full((3,), float("nan"))
    assert torch_assert_close(nan, nan)


@pytest.mark.spec("R6:profiler")
@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16", "int8", "uint8", "int32", "bool", "float8_e4m3fn"])
def test_supplied_inputs_have_their_types_and_ranges(name):
    torch = pytest.importorskip("torch")
    from tilelang.engine.param import KernelParam
    from tilelang.utils.tensor import TensorSupplyType, get_tensor_supply

    for kind in TensorSupplyType:
        x = get_tensor_supply(kind, seed=1)(KernelParam(T.dtype(name), [64, 3]))
        assert x.dtype == getattr(torch, name) and tuple(x.shape) == (64, 3)
        v = x.float()
        if kind is TensorSupplyType.Zero:
            assert not v.any()
        elif kind is TensorSupplyType.One:
            assert (v == 1).all()
        elif kind is TensorSupplyType.Integer:
            assert (v == v.round()).all() and v.abs().max() <= 2
        elif kind is TensorSupplyType.Auto and name in ("float32", "float16", "bfloat16"):
            assert v.abs().max() <= 1 and len(v.unique()) > 10


@pytest.mark.spec("R6:profiler")
def test_do_bench_forms():
    from tilelang.profiler import do_bench

    def nothing():
        pass

    assert do_bench(nothing, _n_warmup=1, _n_repeat=5, device="cpu", cache_size=1) >= 0
    q = do_bench(nothing, _n_warmup=1, _n_repeat=5, device="cpu", cache_size=1, quantiles=[0.2, 0.8])
    assert len(q) == 2 and q[0] <= q[1]
    assert isinstance(do_bench(nothing, _n_warmup=1, _n_repeat=5, device="cpu", cache_size=1, quantiles=[0.5]), float)
    with pytest.raises(AssertionError):
        do_bench(nothing, return_mode="sum")
    for bad in ({"backend": "x"}, {"device": "xpu"}):
        with pytest.raises(ValueError):
            do_bench(nothing, **bad)


def test_libraries_are_found_by_name():
    from tilelang import libinfo

    assert Path(libinfo.package_path()) == ROOT / "tilelang" and libinfo.__version__ == tilelang.__version__
    assert any("llvmlite" in p for p in libinfo.find_lib_path("llvmlite"))
    assert libinfo.find_lib_path("no_such_library", optional=True) == []
    with pytest.raises(RuntimeError, match="no library no_such_library is found"):
        libinfo.find_lib_path("no_such_library")


def test_functions_of_a_regression_call_process_func_or_return_milliseconds(monkeypatch, capsys):
    from tilelang.testing import process_func, regression, requires_package

    monkeypatch.setitem(globals(), "perf_ms", lambda: 1.5)
    monkeypatch.setitem(globals(), "perf_itself", lambda: [process_func(lambda: 2.5, "mine"), None][1])
    regression(prefixes=("perf_",), verbose=False)
    assert capsys.readouterr().out.splitlines() == ["perf_ms: 1.5", "mine: 2.5"]
    monkeypatch.setitem(globals(), "perf_nothing", lambda: None)
    with pytest.raises(ValueError, match="perf_nothing must call process_func or return milliseconds"):
        regression(prefixes=("perf_nothing",), verbose=False)
    @requires_package("no_such_package.part")
    def skipped():
        pass

    assert skipped.pytestmark[0].args == (True,)


def test_functions_made_from_rows_keep_their_names_and_parameters():
    import inspect
    import pickle

    from tilelang.carver import arch
    from tilelang.carver.arch import driver
    from tilelang.compat import buffers, nvcc
    from tilelang.jit import hooks
    from tilelang.tools import analysis

    for module, prefix in ((driver, "get_"), (arch, "is_"), (buffers, "is_"), (nvcc, "have_"), (hooks, "register_"),
                           (analysis, "Nested")):
        for name, fn in vars(module).items():
            if name.startswith(prefix) and inspect.isfunction(fn):
                assert fn.__name__ == name and pickle.loads(pickle.dumps(fn)) is fn, name
    hopper = {"kind": "cuda", "arch": "sm_90a"}
    assert nvcc.have_tma(target=hopper) and nvcc.have_pdl(target=hopper) and nvcc.have_mbarrier(target=hopper)
    assert nvcc.have_fp8(compute_version="8.9") and not nvcc.have_fp8(compute_version="8.6")
