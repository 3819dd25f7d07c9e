"""CUDA kernels as far as they go without a GPU: binaries, figures, sources, a clear error when called."""

import logging
import re

import numpy as np
import pytest

import tilelang
import tilelang.language as T
from tilelang.env import env
from tilelang.jit.artifact import Request
from tilelang.jit.building import device_options
from tilelang.runtime import nvrtc
from tilelang.target import Target
from tilelang.target.probe import device_capability
from tilelang.transform.framework.config import normalize_config

pytestmark = pytest.mark.skipif(not nvrtc.available(), reason="NVRTC is not installed")
SM80 = {"kind": "cuda", "arch": "sm_80"}


def matmul(m, n, k, bm=64, bn=64, bk=32):
    @T.prim_func
    def main(A: T.Tensor((m, k), "float16"), B: T.Tensor((k, n), "float16"), C: T.Tensor((m, n), "float32")):
        with T.Kernel(T.ceildiv(n, bn), T.ceildiv(m, bm), threads=128) as (bx, by):
            a_s = T.alloc_shared((bm, bk), "float16")
            b_s = T.alloc_shared((bk, bn), "float16")
            c_f = T.alloc_fragment((bm, bn), "float32")
            T.clear(c_f)
            for i in T.Pipelined(T.ceildiv(k, bk), num_stages=2):
                T.copy(A[by * bm, i * bk], a_s)
                T.copy(B[i * bk, bx * bn], b_s)
                T.gemm(a_s, b_s, c_f)
            T.copy(c_f, C[by * bm, bx * bn])

    return main


@pytest.fixture(scope="module")
def kernel():
    return tilelang.compile(matmul(100, 90, 70), out_idx=[-1], target=SM80)


@pytest.mark.spec("R3:JITKernel")
def test_binaries_and_figures_without_a_gpu(kernel, tmp_path):
    assert kernel.cubin[:4] == b"\x7fELF" and "main_kernel" in kernel.get_kernel_source()
    facts = kernel.resource_usage[0]
    assert facts["name"] == "main_kernel" and facts["threads"] == 128
    assert 16 <= kernel.n_regs <= 255 and kernel.n_spills == 0 and kernel.shared_memory >= 2 * 64 * 32 * 2
    assert kernel.target.arch == "sm_80" and kernel.execution_backend == "tvm_ffi"
    assert "registers" in kernel.report() and "cuLaunchKernel" in kernel.get_host_source()
    kernel.export_ptx(tmp_path / "k.ptx")
    assert ".entry main_kernel" in (tmp_path / "k.ptx").read_text()


@pytest.mark.skipif(device_capability() is not None, reason="there is a GPU")
def test_a_call_without_a_gpu_says_so(kernel):
    a, b = np.zeros((100, 70), np.float16), np.zeros((70, 90), np.float16)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="no CUDA driver was found"):
            kernel(a, b)
    with pytest.raises(ValueError, match="Kernel expected 2 inputs, but 1 are provided"):
        kernel(a)


def test_the_same_program_runs_on_the_simulator(kernel):
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal(s).astype(np.float16) for s in ((100, 70), (70, 90)))
    want = a.astype(np.float64) @ b.astype(np.float64)
    results = [tilelang.compile(matmul(100, 90, 70), out_idx=[-1], target=t, execution_backend=e)(a, b)
               for t, e in ((SM80, "simulator"), ("simulator", None), (SM80, "tile"), ("cpu", None))]
    for got in results:
        assert got.dtype == np.float32 and np.abs(got - want).max() < 1e-3


def test_a_program_with_several_launches_has_a_binary_for_each():
    @T.prim_func
    def main(A: T.Tensor((64,), "float32"), n: T.int32):
        with T.Kernel(1, threads=64):
            for i in T.Parallel(64):
                A[i] = A[i] * 2.0
        with T.Kernel(1, threads=64):
            for i in T.Parallel(64):
                A[i] = A[i] + T.cast(n, "float32")

    kernel = tilelang.compile(main, target=SM80)
    assert [r["name"] for r in kernel.resource_usage] == ["main_kernel", "main_kernel_1"]
    a = np.ones(64, np.float32)
    tilelang.compile(main, target="simulator")(a, 3)
    assert (a == 5).all()


@pytest.mark.spec("R10:TL_DEVICE_COMPILE_FLAGS", "R10:TL_PTXAS_REGISTER_USAGE_LEVEL")
def test_compiler_options_reach_nvrtc():
    with pytest.raises(RuntimeError, match="no-such-option"):
        tilelang.compile(matmul(64, 64, 32), target=SM80, compile_flags=["--no-such-option"])
    for flags in ("-lineinfo --no-such-option", ["--no-such-option"]):
        with pytest.raises(RuntimeError, match="no-such-option"):
            tilelang.compile(matmul(64, 64, 32), target=SM80, pass_configs={"tl.device_compile_flags": flags})
    program = matmul(64, 64, 32)
    asked = {"tl.enable_fast_math": True, "tl.ptxas_register_usage_level": 5, "tl.device_compile_flags": "-DONE=1 -DTWO"}
    request = Request(program.func, None, Target(SM80), "tvm_ffi", normalize_config(asked), ("-DTHREE",))
    assert device_options(request) == ["--use_fast_math", "--ptxas-options=--register-usage-level=5",
                                      "-DONE=1", "-DTWO", "-DTHREE"]
    assert tilelang.compile(program, target=SM80, pass_configs=asked).n_regs > 0


@pytest.mark.spec("R5:lower")
def test_source_hooks_edit_what_is_compiled():
    from tilelang.engine.callback import register_cuda_postproc_callback
    from tilelang.jit.hooks import remove_hook

    @register_cuda_postproc_callback
    def mark(code, target):
        assert target.arch == "sm_80"
        return "// edited\n" + code

    try:
        assert tilelang.compile(matmul(64, 64, 32), target=SM80).get_kernel_source().startswith("// edited")
        assert tilelang.lower(matmul(64, 64, 32), target=SM80).kernel_source.startswith("// edited")
    finally:
        remove_hook("cuda")


@pytest.mark.spec("R9:TILELANG_JIT_DIAGNOSTICS")
def test_phases_are_logged_on_demand():
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("tilelang.jit.diagnostics")
    logger.addHandler(handler)
    try:
        with env.using(TILELANG_JIT_DIAGNOSTICS="1", TILELANG_DISABLE_CACHE="1"):
            tilelang.compile(matmul(64, 64, 32), target=SM80)
    finally:
        logger.removeHandler(handler)
    assert any(x.startswith("TileLang JIT phase start: lower") for x in lines)
    assert any(x.startswith("TileLang JIT phase done: build") for x in lines)


@pytest.mark.spec("R3:JITKernel", "R4:device", "R4:offset", "R6:profiler")
@pytest.mark.gpu
def test_on_a_gpu():
    torch = pytest.importorskip("torch")
    kernel = tilelang.compile(matmul(100, 90, 70), out_idx=[-1], target="cuda")
    a, b = torch.randn(100, 70, device="cuda").half(), torch.randn(70, 90, device="cuda").half()
    want = a.double() @ b.double()
    assert (kernel(a, b).double() - want).abs().max() < 1e-2
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        out = kernel(a, b)
    stream.synchronize()
    assert (out.double() - want).abs().max() < 1e-2
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = kernel(a, b)
    graph.replay()
    torch.cuda.synchronize()
    assert (captured.double() - want).abs().max() < 1e-2
    with pytest.raises(RuntimeError, match="device_type mismatch, expected cuda"):
        kernel(a.cpu(), b)
    view = torch.empty(100 * 70 + 1, device="cuda").half()[1:].view(100, 70).copy_(a)
    assert torch.equal(kernel(view, b), out)  # by another kernel, whose accesses are no wider than an element
    assert kernel.get_profiler().do_bench(n_warmup=1, n_repeat=3) > 0


# ---- the device compiler at work while the program is verified -------------------------------------------------------


def refusing(monkeypatch, refused):
    """The pipeline with a last pass that refuses programs with one of these calls; returns the list of texts NVRTC got."""
    from tilelang.errors import error
    from tilelang.ir import Evaluate, walk
    from tilelang.transform import pipeline
    from tilelang.transform.check.verify_sync import verify_sync
    from tilelang.transform.framework.pass_ import DEVICE, pass_

    @pass_(needs=DEVICE)
    def verify(func, cx):
        if any(isinstance(x, Evaluate) and x.call.op in refused for x in walk(func)):
            raise error("sync-unordered", "planted", found="a planted fault")
        return verify_sync(func, cx)

    assert pipeline.DEVICE_PASSES[-1] is verify_sync
    monkeypatch.setattr(pipeline, "DEVICE_PASSES", (*pipeline.DEVICE_PASSES[:-1], verify))
    got, compile_cubin = [], nvrtc.compile_cubin

    def seen(source, *rest):
        got.append(source)
        return compile_cubin(source, *rest)

    monkeypatch.setattr(nvrtc, "compile_cubin", seen)
    monkeypatch.setenv("TILELANG_DISABLE_CACHE", "1")
    return got


def test_the_text_is_compiled_while_it_is_verified_and_the_verdict_gates_it(monkeypatch):
    got = refusing(monkeypatch, ())
    kernel = tilelang.compile(matmul(100, 90, 70), target=SM80)
    assert got[-1] == kernel.get_kernel_source() and "ordered" in kernel.sync_report()
    assert len({re.sub(r"__launch_bounds__\(\d+, \d\)", "", text) for text in got}) == 1  # more resident blocks may be tried
    assert {"lower", "print", "verify", "host", "nvrtc"} == set(kernel.report_data["times"])
    monkeypatch.undo()
    refusing(monkeypatch, ("sync_threads",))
    with pytest.raises(ValueError, match="planted"):
        tilelang.compile(matmul(100, 90, 70), target=SM80)


def test_what_was_compiled_of_a_refused_schedule_is_thrown_away(monkeypatch):
    got = refusing(monkeypatch, ("cp_async",))
    kernel = tilelang.compile(matmul(100, 90, 72), target=SM80)
    source = kernel.get_kernel_source()
    assert got[-1] == source and "cp_async" not in source
    assert kernel.cubin == nvrtc.compile_cubin(source, "sm_80").bytes
    assert "without asynchronous copies" in kernel.report()


def test_an_edited_text_is_compiled_once(monkeypatch):
    from tilelang.jit.hooks import register_cuda_postproc, remove_hook

    got, edited = refusing(monkeypatch, ("cp_async",)), []

    def hook(code, target):
        edited.append(code)
        return code + "// edited\n"

    register_cuda_postproc(hook)
    try:
        kernel = tilelang.compile(matmul(100, 90, 72), target=SM80)
    finally:
        remove_hook("cuda")
    assert len(edited) == 1 and got[0] == edited[0] + "// edited\n" and got[-1] == kernel.get_kernel_source()
    assert len({re.sub(r"__launch_bounds__\(\d+, \d\)", "", text) for text in got}) == 1


def test_loading_early_is_no_place_for_errors(monkeypatch):
    """Without an NVRTC, a program that is wrong is told that, and a right one what is missing."""
    monkeypatch.setattr(nvrtc, "choose_nvrtc", lambda *a: (_ for _ in ()).throw(RuntimeError("none is here")))

    @T.prim_func
    def too_large(A: T.Tensor((80000,), "float32")):
        with T.Kernel(1, threads=128):
            s = T.alloc_shared((80000,), "float32")
            T.copy(A, s)
            T.copy(s, A)

    with tilelang.env.using(TILELANG_DISABLE_CACHE="1"):
        with pytest.raises(RuntimeError, match="none is here"):
            tilelang.compile(matmul(96, 90, 72), target=SM80)
        with pytest.raises(ValueError, match="shared memory"):
            tilelang.compile(too_large, target=SM80)
