"""Pass configs and settings do what their line says: files, reports, warnings, limits."""

import inspect
import logging
import pathlib
import re
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import numpy as np
import pytest

import tilelang
import tilelang.language as T
from tilelang.codegen.cuda.printer import print_kernel
from tilelang.env import env
from tilelang.errors import TileLangError
from tilelang.runtime import nvrtc
from tilelang.target import Target
from tilelang.transform.check.check_races import check_races
from tilelang.transform.framework.config import ROWS, PassConfigKey, normalize_config
from tilelang.transform.framework.pass_ import PassContext, run_passes
from tilelang.transform.pipeline import lower

SM80 = {"kind": "cuda", "arch": "sm_80"}
PACKAGE = pathlib.Path(tilelang.__file__).parent


@T.prim_func
def staged(A: T.Tensor((64,), "float32"), B: T.Tensor((64,), "float32")):
    with T.Kernel(1, threads=32):
        S = T.alloc_shared((64,), "float32")
        T.copy(A, S)
        for i in T.Parallel(64):
            B[i] = S[63 - i]


@pytest.mark.spec("R10:keys")
def test_a_key_without_effect_says_so():
    """Each key is read by the package, or its line says that it has no effect."""
    text = "\n".join(p.read_text() for p in PACKAGE.rglob("*.py") if p.name != "config.py")
    text += inspect.getsource(normalize_config).replace("PassConfigKey.TL_SIMPLIFY", "")  # its sub-keys are checked, not used
    words = set(re.findall(r"\w+", text))
    for key, row in ROWS.items():
        used = key.name in words or f'"{key.value}"' in text
        assert bool(used) != ("no effect" in row.about), (key, row.about)


@pytest.mark.spec("R10:keys")
def test_values_and_parts_of_keys_are_checked():
    parts = {PassConfigKey.TL_SIMPLIFY_ENABLE_LET_INLINE: True, "transitively_prove_inequalities": False}
    assert normalize_config({"tl.Simplify": parts}) == {"tl.Simplify": parts}
    with pytest.raises(AttributeError, match="Invalid config option 'tl.Simplify.foo' candidates are: transitively"):
        normalize_config({"tl.Simplify": {"foo": 1}})
    assert normalize_config({"tl.ptxas_register_usage_level": 10})
    with pytest.raises(ValueError, match="takes one of 0, 1"):
        normalize_config({"tl.ptxas_register_usage_level": 11})


@pytest.mark.spec("R10:keys")
def test_what_is_reported_while_lowering():
    said = []
    config = {"tl.ast_print_enable": True, "tl.debug_merge_shared_memory_allocations": True}
    lower(staged.func, cx=PassContext(Target(SM80), config, report=said.append))
    text = "\n".join(said)
    assert "# staged before the first pass" in text and "T.copy" in text
    assert "# shared memory: 256 bytes" in text and "#   S: float32[64] at byte 0, 256 bytes" in text


@pytest.mark.spec("R10:keys")
def test_parameters_that_may_alias():
    (kernel,) = lower(staged.func, Target(SM80), {}).kernels
    assert "float* __restrict__ B" in print_kernel(kernel)
    (kernel,) = lower(staged.func, Target(SM80), {"tirx.noalias": False}).kernels
    assert "__restrict__" not in print_kernel(kernel).split("__global__")[1]
    kernel = tilelang.compile(staged, target="cpu", pass_configs={"tirx.noalias": False})
    a = np.arange(64, dtype=np.float32)
    kernel(a, a)
    assert (a == np.arange(64)[::-1]).all()


@pytest.mark.spec("R10:keys")
def test_source_lines_as_directives():
    source = tilelang.lower(staged.with_attr("tilelang_pass_configs", {"tl.emit_line_directives": True}), target=SM80
                            ).kernel_source
    lines = {int(n) for n in re.findall(r'^#line (\d+) ".*test_rows_effects.py"$', source, re.M)}
    first = staged.orig_func.__code__.co_firstlineno
    assert lines and all(first < n < first + 8 for n in lines)
    assert "#line" not in tilelang.lower(staged, target=SM80).kernel_source
    if nvrtc.available():
        assert nvrtc.compile_cubin(source, "sm_80").bytes


@pytest.mark.spec("R10:keys", "R9:TILELANG_CLEANUP_TEMP_FILES", "R9:TILELANG_TMP_DIR")
@pytest.mark.skipif(not nvrtc.available(), reason="needs NVRTC")
def test_sources_and_binaries_are_kept_where_asked(tmp_path):
    kernel = tilelang.compile(staged, target=SM80, pass_configs={"cuda.kernels_output_dir": str(tmp_path / "k")})
    assert (tmp_path / "k" / "staged_kernel.cu").read_text() == kernel.get_kernel_source()
    assert (tmp_path / "k" / "staged_kernel.cubin").read_bytes() == kernel.cubin
    with env.using(TILELANG_CLEANUP_TEMP_FILES="0", TILELANG_TMP_DIR=str(tmp_path / "t")):
        tilelang.JITKernel(staged, target=SM80)
    assert (tmp_path / "t" / "staged_kernel.cu").exists()


def races(program, caplog, **config):
    logger = logging.getLogger("tilelang")
    logger.addHandler(caplog.handler)
    caplog.clear()
    try:
        with caplog.at_level(logging.WARNING, logger="tilelang"), suppress(TileLangError):  # certain races are refused then
            run_passes(program.func, [check_races], PassContext(config=config))
    finally:
        logger.removeHandler(caplog.handler)
    return caplog.text


def racing(kind):
    @T.prim_func
    def f(A: T.Tensor((64, 8), "float32"), B: T.Tensor((64,), "float32")):
        with T.Kernel(2, threads=32) as bx:
            for i, j in T.Parallel(32, 8):
                if kind == "halves":
                    A[i // 2, j] = i
                elif kind == "column":
                    B[i] = A[i, j]
                elif kind == "guarded":
                    if j == 3:
                        B[i] = j
                elif kind == "equal":
                    B[i] = i * 2
                elif kind == "same read":
                    B[i] = A[i, 0]
                elif kind == "bound":
                    k = i * 8 + j
                    B[k % 64] = k
                elif kind == "blocks":
                    A[bx * 32 + i, j] = i + j
                elif kind == "read index":
                    A[T.cast(B[i], "int32"), j] = i
                elif kind == "guarded update":
                    at = T.cast(A[i, j], "int32")
                    if B[at] < 3:
                        T.atomic_max(B[at], 3)

    return f


@pytest.mark.spec("R9:TILELANG_ENABLE_DATA_RACE_CHECK", "L8:Parallel")
@pytest.mark.parametrize("kind,found", [
    ("halves", r"iterations \(i=0, j=0\) and \(i=1, j=0\) of T.Parallel store different values in `A`"),
    ("column", r"\(i=0, j=0\) and \(i=0, j=1\) .* `B`"), ("guarded", None), ("equal", None), ("same read", None),
    ("bound", r"\(i=0, j=0\) and \(i=8, j=0\) .* `B`"), ("blocks", None), ("read index", None),
    ("guarded update", None)])
def test_racing_iterations_are_warned_about_where_asked(kind, found, caplog, monkeypatch):
    program = racing(kind)
    assert races(program, caplog) == ""
    monkeypatch.setenv("TILELANG_ENABLE_DATA_RACE_CHECK", "1")
    text = races(program, caplog)
    assert re.search("Data race detected: .*" + found, text) if found else text == "", text
    assert ("test_rows_effects.py" in text) == bool(found)
    key = PassConfigKey.TL_DISABLE_DATA_RACE_CHECK.value
    assert races(program, caplog, **{key: True}) == ""
    monkeypatch.delenv("TILELANG_ENABLE_DATA_RACE_CHECK")
    assert ("Data race" in races(program, caplog, **{key: False})) == bool(found)


@pytest.mark.spec("R9:TILELANG_LAYOUT_COST_MODEL", "R9:TILELANG_AUTO_TUNING")
def test_settings_with_few_values(monkeypatch):
    monkeypatch.setenv("TILELANG_LAYOUT_COST_MODEL", "cheap")
    with pytest.raises(ValueError, match="register-count or io-aware"):
        env.get_default_layout_cost_model()
    assert env.tuning_workers(10) == 9 and env.tuning_workers(1) == 1
    with env.using(TILELANG_AUTO_TUNING_CPU_UTILITIES="0.5"):
        assert env.tuning_workers(10) == 5
    with env.using(TILELANG_AUTO_TUNING_CPU_COUNTS="7"):
        assert env.tuning_workers(2) == 7
        with env.using(TILELANG_AUTO_TUNING_MAX_CPU_COUNT="3"):
            assert env.tuning_workers(2) == 3
    with env.using(TILELANG_AUTO_TUNING_CPU_COUNTS="many"), pytest.raises(ValueError, match="CPU_COUNTS must be a number"):
        env.tuning_workers(2)


@pytest.mark.spec("R9:TILELANG_AUTO_TUNING", "R7:tuning")
def test_the_tuner_uses_so_many_threads_and_writes_its_log(tmp_path, monkeypatch):
    pools = []

    class Counted(ThreadPoolExecutor):
        def __init__(self, max_workers=None, **kw):
            pools.append(max_workers)
            super().__init__(max_workers, **kw)

    monkeypatch.setattr("concurrent.futures.ThreadPoolExecutor", Counted)
    monkeypatch.chdir(tmp_path)
    kept = tmp_path / "cache"

    @tilelang.autotune(configs=[{"B": 8}, {"B": 16}, {"B": 3}], warmup=1, rep=2)
    @tilelang.jit(target="cpu", out_idx=[1])
    def twice(N, B=8):
        assert N % B == 0, "no whole tiles"

        @T.prim_func
        def main(X: T.Tensor((N,), "float32"), Y: T.Tensor((N,), "float32")):
            with T.Kernel(N // B, threads=32) as b:
                for i in T.Parallel(B):
                    Y[b * B + i] = X[b * B + i] * 2.0

        return main

    with pytest.raises(TypeError, match="missing a required argument: 'N'"):
        twice()
    with env.using(TILELANG_AUTO_TUNING_CPU_COUNTS="2", TILELANG_CACHE_DIR=str(kept)):
        assert twice(64).config["B"] in (8, 16)
    assert 2 in pools
    text = (kept / "autotuner.log").read_text()
    assert [p.name for p in tmp_path.iterdir()] == ["cache"], "the tuner left a file in the working directory"
    assert "no whole tiles" in text and "tuning: {'B': 8} takes" in text


@pytest.mark.spec("R6:profiler", "R3:JITKernel")
def test_an_adapter_is_called_like_its_kernel():
    kernel = tilelang.compile(staged, out_idx=[1], target="cpu")
    profiler = tilelang.Profiler(kernel.params, [1], tilelang.TensorSupplyType.Auto).with_default_adapter(kernel.adapter)
    assert profiler.do_bench(n_warmup=1, n_repeat=2) > 0
    a = np.arange(64, dtype=np.float32)
    assert (kernel.adapter(a) == a[::-1]).all()


@pytest.mark.spec("R4:device")
@pytest.mark.parametrize("backend", ("tvm_ffi", "cython"))
def test_a_tensor_without_data_is_refused_by_name(backend):
    torch = pytest.importorskip("torch")
    kernel = tilelang.compile(staged, target="cpu", execution_backend=backend)
    with pytest.raises(RuntimeError, match="kernel staged input B device_type mismatch, .*got float32 tensor .* on meta"):
        kernel(torch.zeros(64), torch.zeros(64, device="meta"))


@pytest.mark.spec("R12:utils")
def test_modules_of_utils_are_there_without_importing_them():
    assert tilelang.utils.device.get_available_cpu_count() >= 1
    assert callable(tilelang.utils.pass_diff.pass_diff) and not hasattr(tilelang.utils, "no_such")
