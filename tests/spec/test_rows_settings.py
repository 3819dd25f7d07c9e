"""Settings (runtime 9) and pass configs (runtime 10): what each variable and key does."""

import logging
import os
import re

import numpy as np
import pytest
from everywhere import SM80

import tilelang
import tilelang.language as T
from tilelang.codegen.cuda.printer import print_kernel
from tilelang.env import env
from tilelang.runtime.cache import compiler_stamp, package_stamp
from tilelang.target import Target
from tilelang.testing import process_func
from tilelang.transform import PassConfigKey
from tilelang.transform.framework.config import ROWS, normalize_config
from tilelang.transform.framework.pass_ import PassContext
from tilelang.transform.pipeline import lower


def scaled(factor=2.0, n=64):
    @T.prim_func
    def f(X: T.Tensor((n,), "float32"), Y: T.Tensor((n,), "float32")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(n):
                Y[i] = T.exp(X[i]) * factor

    return f


@pytest.mark.spec("R9:TILELANG_CACHE_DIR", "R9:TILELANG_TMP_DIR")
def test_the_cache_lies_where_it_is_told(tmp_path):
    with env.using(TILELANG_CACHE_DIR=str(tmp_path)):
        assert env.TILELANG_TMP_DIR == str(tmp_path / "tmp")
        tilelang.compile(scaled(3.25), target="cpu")
        assert list(tmp_path.glob("*/*/kernels/*"))
    with env.using(TILELANG_TMP_DIR="/elsewhere"):
        assert env.TILELANG_TMP_DIR == "/elsewhere"


def test_settings_follow_an_environment_that_another_mapping_stands_for(monkeypatch):
    monkeypatch.setenv("TILELANG_TARGET", "a")
    assert env.TILELANG_TARGET == "a"
    monkeypatch.delenv("TILELANG_TARGET")
    assert env.TILELANG_TARGET == ""
    monkeypatch.setattr(os, "environ", {"TILELANG_TARGET": "b"})
    assert env.TILELANG_TARGET == "b" and env.TILELANG_DEBUG == 0


@pytest.mark.spec("R9:TILELANG_DISABLE_CACHE")
def test_the_cache_can_be_disabled(tmp_path, monkeypatch):
    monkeypatch.setenv("TILELANG_DISABLE_CACHE", "yes")
    with env.using(TILELANG_CACHE_DIR=str(tmp_path)):
        assert not tilelang.is_cache_enabled()
        tilelang.compile(scaled(3.5), target="cpu")
        assert not list(tmp_path.rglob("*.json"))


@pytest.mark.spec("R9:TILELANG_KERNEL_CACHE_USE_LIB_STAMP")
def test_keys_may_hold_the_content_of_the_package(monkeypatch):
    assert compiler_stamp() != package_stamp(True)
    monkeypatch.setenv("TILELANG_KERNEL_CACHE_USE_LIB_STAMP", "1")
    assert compiler_stamp() == package_stamp(True) and re.fullmatch("[0-9a-f]{64}", package_stamp(True))


@pytest.mark.spec("R9:TILELANG_PRINT_ON_COMPILATION", "R9:TILELANG_VERBOSE")
@pytest.mark.parametrize("setting", ("TILELANG_PRINT_ON_COMPILATION", "TILELANG_VERBOSE"))
def test_lines_about_a_compilation(monkeypatch, caplog, setting):
    logger = logging.getLogger("tilelang")
    logger.addHandler(caplog.handler)
    try:
        for name in ("TILELANG_PRINT_ON_COMPILATION", "TILELANG_VERBOSE"):
            monkeypatch.setenv(name, "0")
        with caplog.at_level(logging.INFO, logger="tilelang"):
            tilelang.compile(scaled(1.5), target="cpu")
            assert "to compile" not in caplog.text
            monkeypatch.setenv(setting, "1")
            tilelang.compile(scaled(1.75 + (setting == "TILELANG_VERBOSE")), target="cpu")
        assert re.search(r"TileLang completes to compile kernel `f` for cpu in \d+ ms \(\w+\)", caplog.text)
        assert caplog.text.count("to compile kernel") == 1
    finally:
        logger.removeHandler(caplog.handler)


@pytest.mark.spec("R9:TILELANG_COMPILE_TIMEOUT_SECONDS")
def test_a_bad_timeout_is_told_before_anything_is_compiled(monkeypatch):
    for bad in ("soon", "-1", "0"):
        monkeypatch.setenv("TILELANG_COMPILE_TIMEOUT_SECONDS", bad)
        with pytest.raises(ValueError, match="TILELANG_COMPILE_TIMEOUT_SECONDS must be a positive number"):
            tilelang.compile(scaled(), target="cpu")
    monkeypatch.setenv("TILELANG_COMPILE_TIMEOUT_SECONDS", "2.5")
    assert env.get_compile_timeout_seconds() == 2.5


@pytest.mark.spec("R9:TILELANG_ENABLE_IR_SPAN")
def test_places_in_errors_can_be_left_out(monkeypatch):
    def build():
        @T.prim_func
        def f(Y: T.Tensor((4,), "int32")):
            with T.Kernel(1):
                Y[0, 0] = 1

    with pytest.raises(tilelang.errors.TileLangError) as e:
        build()
    assert "-->" in str(e.value) and "^" in str(e.value)
    monkeypatch.setenv("TILELANG_ENABLE_IR_SPAN", "0")
    assert "-->" not in str(e.value) and "cannot be indexed" in str(e.value)


@pytest.mark.spec("R9:TILELANG_PASS_PROFILE", "R9:TL_LOWER_TRACE", "R9:TILELANG_PASS_DIFF")
@pytest.mark.parametrize("name,value,shown", [
    ("TILELANG_PASS_PROFILE", "1", r"infer_layouts: \d+\.\d+ ms"), ("TL_LOWER_TRACE", "terminal", "# after infer_layouts"),
    ("TL_LOWER_TRACE", "both", "# after simplify"), ("TILELANG_PASS_DIFF", "1", "# after infer_layouts"),
    ("TL_LOWER_TRACE", "html", None)])
def test_passes_can_be_watched(monkeypatch, tmp_path, name, value, shown):
    said = []
    monkeypatch.setenv(name, value)
    monkeypatch.setenv("TL_LOWER_TRACE_DIR", str(tmp_path))
    lower(scaled().func, cx=PassContext(Target(SM80), {}, report=said.append))
    assert re.search(shown, "\n".join(map(str, said))) if shown else not said
    assert bool(list(tmp_path.glob("*/report.html"))) == (value in ("html", "both"))
    if name == "TILELANG_PASS_PROFILE":
        monkeypatch.setenv("TILELANG_PASS_PROFILE_THRESHOLD_MS", "1e9")
        said.clear()
        lower(scaled().func, cx=PassContext(Target(SM80), {}, report=said.append))
        assert not said


@pytest.mark.spec("R9:TL_PERF_REGRESSION")
def test_regressions_are_chosen_and_printed(monkeypatch, capsys):
    def regression_a():
        return 1.5

    process_func(regression_a)
    monkeypatch.setenv("TL_PERF_REGRESSION_FORMAT", "json")
    process_func(regression_a, "other")
    monkeypatch.setenv("TL_PERF_REGRESSION_ONLY", "regression_b, other")
    assert np.isnan(process_func(regression_a))
    assert capsys.readouterr().out.splitlines() == ["regression_a: 1.5", '{"name": "other", "latency": 1.5}']


@pytest.mark.spec("R9:TILELANG_CLEANUP_TEMP_FILES", "R9:TILELANG_LAYOUT_COST_MODEL", "R9:TILELANG_ENABLE_DATA_RACE_CHECK",
                  "R9:TILELANG_AUTO_TUNING", "R9:toolchain-paths")
def test_settings_are_read_live_overridden_and_refused_when_unknown(monkeypatch):
    assert env.should_cleanup_temp_files() and env.get_default_layout_cost_model() is None
    assert env.TILELANG_AUTO_TUNING_CPU_COUNTS == "-1" and env.TILELANG_AUTO_TUNING_CPU_UTILITIES == "0.9"
    for word, answer in (("1", True), ("TRUE", True), ("on", True), ("0", False), ("no", False)):
        monkeypatch.setenv("TILELANG_CLEANUP_TEMP_FILES", word)
        assert env.should_cleanup_temp_files() is answer
    monkeypatch.setenv("TILELANG_AUTO_TUNING_DISABLE_CACHE", "1")
    assert env.is_autotune_cache_disabled()
    monkeypatch.setenv("CUDA_HOME", "/toolkit")
    assert env.CUDA_HOME == "/toolkit" == tilelang.env.CUDA_HOME
    with env.using(TILELANG_LAYOUT_COST_MODEL="io-aware"):
        assert env.get_default_layout_cost_model() == "io-aware"
    with pytest.raises(AttributeError, match="no setting"):
        env.TILELANG_NO_SUCH = 1


@pytest.mark.spec("R10:keys")
@pytest.mark.parametrize("key", list(PassConfigKey), ids=[k.name for k in PassConfigKey])
def test_every_key_is_accepted_and_says_what_it_does(key):
    row = ROWS[key]
    assert row.about and key == key.value and str(key) == key.value
    value = {bool: True, int: 32 if row.choices and 32 in row.choices else 1, dict: {}, list: [], tuple: (), float: 1.0,
             str: (row.choices or (row.default or "x",))[-1]}[row.types[0]]
    if row.deprecated:
        with pytest.deprecated_call():
            assert normalize_config({key: value})
    assert {key: value, key.value: value} and (row.deprecated or normalize_config({key.value: value}) == {key.value: value})
    with pytest.raises((TypeError, ValueError)):
        normalize_config({key: object()})


@pytest.mark.spec("R10:TL_DISABLE_SAFE_MEMORY_ACCESS")
def test_guards_can_be_left_out():
    n = T.dynamic("n")

    @T.prim_func
    def f(X: T.Tensor((n,), "float32"), Y: T.Tensor((n,), "float32")):
        with T.Kernel(T.ceildiv(n, 32), threads=32) as b:
            Y[b * 32 + T.get_thread_binding()] = X[b * 32 + T.get_thread_binding()]

    def text(config):
        return repr(lower(f.func, Target(SM80), config).kernels[0].launch)

    assert "if" in text({}) and "if" not in text({"tl.disable_safe_memory_legalize": True}).split("annotations")[0]


@pytest.mark.spec("R10:TL_ENABLE_FAST_MATH")
def test_fast_math_is_used_only_when_asked_for():
    (kernel,) = lower(scaled().func, Target(SM80), {}).kernels
    assert "__expf" in print_kernel(kernel, fast_math=True) and "__expf" not in print_kernel(kernel)


@pytest.mark.spec("R10:TL_DISABLE_WARP_SPECIALIZED", "R10:TL_DISABLE_TMA_LOWER", "R10:TL_DISABLE_WGMMA",
                  "R10:TL_ENABLE_AGGRESSIVE_SHARED_MEMORY_MERGE", "R10:TL_CONFIG_INDEX_BITWIDTH")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("config,gone", [
    ({}, None), ({"tl.disable_warp_specialized": True}, "in_warp_groups"), ({"tl.disable_wgmma": True}, "wgmma_commit"),
    ({"tl.disable_tma_lower": True}, "tma_load"), ({"tl.enable_aggressive_shared_memory_merge": True}, None),
    ({"tl.config_index_bitwidth": 64}, None), ({"tl.config_index_bitwidth": 32}, None)])
def test_switches_of_the_pipeline(config, gone):
    @T.prim_func
    def gemm(A: T.Tensor((128, 256), "float16"), B: T.Tensor((256, 128), "float16"), C: T.Tensor((128, 128), "float32")):
        with T.Kernel(1, threads=128):
            As = T.alloc_shared((128, 64), "float16")
            Bs = T.alloc_shared((64, 128), "float16")
            Cf = T.alloc_fragment((128, 128), "float32")
            T.clear(Cf)
            for k in T.Pipelined(4, num_stages=2):
                T.copy(A[0, k * 64], As)
                T.copy(B[k * 64, 0], Bs)
                T.gemm(As, Bs, Cf)
            T.copy(Cf, C)

    hopper = {"tl.enable_hopper": True, **config}
    text = repr(lower(gemm.func, Target({"kind": "cuda", "arch": "sm_90a"}), hopper).kernels[0].launch)
    for word in ("in_warp_groups", "wgmma_commit", "tma_load"):
        if word == gone:
            assert word not in text
        elif gone is None:
            assert word in text
