"""Loading code objects of AMD GPUs and launching them, against a driver library that fails what a test names."""

import re
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

import tilelang.language as T
from tilelang.jit.artifact import Artifact
from tilelang.compat.cuda_target import check_hip_availability
from tilelang.jit.building import host_text
from tilelang.jit.inspect import machine_facts
from tilelang.jit.kernel import JITKernel
from tilelang.jit.requests import make_request
from tilelang.jit.timing import do_bench
from tilelang.runtime import hip_driver
from tilelang.runtime.gpu_api import HIP
from tilelang.runtime.host_engine import compile_object
from tilelang.runtime.launchers import GpuLauncher
from tilelang.runtime.signature import signature_of
from tilelang.target import Target, probe
from tilelang.transform.pipeline import lower

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "runtime"))
from fake_hip import HAS_COMPILER, FakeHip, OnRocm, compiler

pytestmark = pytest.mark.skipif(not HAS_COMPILER, reason="needs a C compiler: install gcc or clang")
CODE = b"\x7fELF code object"


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return FakeHip(tmp_path_factory.mktemp("rocm"))


def forget():
    for known in (probe.load_rocm, probe.hip_device_arch, hip_driver._driver):
        known.cache_clear()


@pytest.fixture
def hip(library, monkeypatch):
    """The fake driver as that of this machine."""
    monkeypatch.setattr(probe, "_hip_libraries", lambda name: [library.path] if name == "amdhip64" else [])
    forget()
    library.reset()
    library.arguments("")
    yield library
    forget()


def kernel_of(func):
    """A kernel whose host program is for HIP; its code objects do nothing."""
    request, artifact = artifact_of(func)
    return JITKernel(_request=request, _artifact=replace(artifact, files=dict(artifact.files)))


@cache
def artifact_of(func):
    request = make_request(func, target={"kind": "cuda", "arch": "sm_80"})
    program, sig = lower(request.func, request.target, {}), signature_of(request.func, None)
    host = host_text(request, sig, GpuLauncher(program.host, program.kernels, 65536, HIP))
    files, kernels = {"host.o": compile_object(host)}, []
    for k, kernel in enumerate(program.kernels):
        files[f"kernel_{k}.hsaco"] = CODE
        kernels.append({"name": kernel.name, "file": f"kernel_{k}.hsaco", "shared_bytes": kernel.shared_bytes})
    return request, Artifact("hip", "", host, files, {"kernels": kernels})


@T.prim_func
def main(A: T.Tensor((256,), "float32"), B: T.Tensor((256,), "float32"), n: T.int32):
    with T.Kernel(2, threads=128) as bx:
        s = T.alloc_shared((128,), "float32")
        T.copy(A[bx * 128], s)
        for i in T.Parallel(128):
            B[bx * 128 + i] = s[i] * T.cast(n, "float32")
    with T.Kernel(n, threads=64) as bx:
        for i in T.Parallel(64):
            B[i] = 1.0


@T.prim_func
def together(X: T.Tensor((256,), "float32"), Y: T.Tensor((256,), "float32")):
    with T.Kernel(4, threads=64) as bx:
        W = T.alloc_global((256,), "float32")
        for i in T.Parallel(64):
            W[bx * 64 + i] = X[bx * 64 + i]
        T.sync_grid()
        for i in T.Parallel(64):
            Y[bx * 64 + i] = W[255 - bx * 64 - i]


def arrays(device=0, n=256):
    return [OnRocm(np.zeros(n, np.float32), device) for _ in range(2)]


def test_code_objects_load_once_per_device_and_launch_there(hip):
    kernel = kernel_of(main)
    assert "hipModuleLaunchKernel" in kernel.host_source and "@cu" not in kernel.host_source
    for device in (0, 0, 3):
        assert kernel(*arrays(device), 2) is None
    assert [x for x in hip.log if not x.startswith("launch")] == [
        line for d in (0, 3) for line in (f"load on {d}", "function main_kernel", f"load on {d}", "function main_kernel_1")]
    launches = [x for x in hip.log if x.startswith("launch")]
    assert [x.split(":")[0] for x in launches] == [f"launch {1000 + 100 * d + k} on {d}" for d in (0, 0, 3) for k in (0, 1)]
    assert "2 1 1 by 128 1 1, 512 bytes, stream 0" in launches[0] and "2 1 1 by 64 1 1, 0 bytes" in launches[1]
    assert hip.lib.fake_current() == 0 and hip.held == (4, 0)


def test_arguments_arrive_on_the_stream_of_the_caller(hip):
    import tvm_ffi

    hip.arguments("884")
    a, b = arrays(1)
    with tvm_ffi.use_raw_stream(tvm_ffi.device("rocm", 1), 44):
        kernel_of(main)(a, b, 0)  # the second grid is empty
    assert hip.log[-4:] == ["launch 1100 on 1: 2 1 1 by 128 1 1, 512 bytes, stream 44",
                            *(f"  {x}" for x in (a.array.ctypes.data, b.array.ctypes.data, 0))]
    assert hip.lib.fake_current() == 0


def test_workspaces_and_grids_that_run_together(hip):
    kernel = kernel_of(together)
    kernel(*arrays())
    assert hip.log[2:] == ["pool keeps 67108864", "allocate 1536 on stream 0", "clear 256", "launch together 1000 on 0: "
                           "4 1 1 by 64 1 1, 0 bytes, stream 0", "free"]
    assert hip.held == (1, 0)


def test_arguments_are_checked_as_for_cuda(hip):
    kernel = kernel_of(main)
    a, b = arrays()
    for bad, message in (((a, b), "Kernel expected 3 inputs, but 2"), ((a, b, 0.5), "scalar n expected integer"),
                         ((np.zeros(256, np.float32), b, 1), "input A device_type mismatch, expected rocm"),
                         ((a, OnRocm(np.zeros(256, np.float32), 1), 1), "input B device_id violates"),
                         ((a, OnRocm(np.zeros(255, np.float32)), 1), r"input B shape\[0\] violates")):
        with pytest.raises((RuntimeError, ValueError), match=message):
            kernel(*bad)
    assert hip.log == []


LOADING = ("hipGetDevice", "hipSetDevice", "hipModuleLoadData", "hipModuleGetFunction")
RUNNING = ("hipModuleLaunchKernel",)


@pytest.mark.parametrize("name", LOADING)
def test_each_failing_call_of_loading_is_named_and_leaks_nothing(hip, name):
    kernel = kernel_of(main)
    hip.fail(name, 209)
    with pytest.raises(RuntimeError, match=rf"hip-driver\]: {name} failed: hipErrorNoBinaryForGpu \(209\): no k") as e:
        kernel(*arrays(1), 1)
    assert "tilelang doctor" in str(e.value) and hip.held == (0, 0) and hip.lib.fake_current() == 0
    hip.fail("", 0)
    kernel(*arrays(1), 1)
    assert hip.held == (2, 0) and hip.log[-1].startswith("launch 1101 on 1")


def test_the_first_of_two_code_objects_stayed_loaded(hip):
    """After the second one could not be loaded, and each later call loaded it once more."""
    kernel = kernel_of(main)
    kernel._built.files["kernel_1.hsaco"] = b"damaged"
    for _ in range(3):
        with pytest.raises(RuntimeError, match="hipModuleLoadData failed: hipErrorUnknown .200."):
            kernel(*arrays(), 1)
        assert hip.held == (0, 0)


@pytest.mark.parametrize("name, code, told", [
    ("hipModuleLaunchKernel", 701, r"launch of main_kernel failed: hipErrorLaunchOutOfResources \(701\)"),
    ("hipGetDevice", 101, r"launch of main_kernel \(hipSetDevice\) failed: hipErrorInvalidDevice \(101\)"),
    ("hipSetDevice", 101, r"launch of main_kernel \(hipSetDevice\) failed: hipErrorInvalidDevice \(101\)")])
def test_each_failing_call_of_a_launch_is_named(hip, name, code, told):
    kernel = kernel_of(main)
    kernel(*arrays(1), 1)
    before = len(hip.log)
    hip.fail(name, code)
    if name == "hipGetDevice":
        kernel(*arrays(1), 1)  # what is current need not be known
        hip.fail("", 0)
        return
    with pytest.raises(RuntimeError, match=told):
        kernel(*arrays(1), 1)
    hip.fail("", 0)
    assert len(hip.log) == before and hip.held == (2, 0)
    with pytest.raises(RuntimeError, match="input A device_type"):  # the old result is not told again
        kernel(np.zeros(256, np.float32), *arrays(1)[1:], 1)
    kernel(*arrays(1), 1)


@pytest.mark.parametrize("name, code, told", [
    ("hipMallocAsync", 2, r"its workspace failed: hipErrorOutOfMemory \(2\)"),
    ("hipMemsetD8Async", 701, r"its workspace failed: hipErrorLaunchOutOfResources \(701\)"),
    ("hipModuleLaunchCooperativeKernel", 701, "launch of together_kernel failed: hipErrorLaunchOutOfResources")])
def test_a_failing_call_between_two_leaves_no_memory(hip, name, code, told):
    kernel = kernel_of(together)
    kernel(*arrays())
    hip.fail(name, code)
    with pytest.raises(RuntimeError, match=told):
        kernel(*arrays())
    assert hip.held == (1, 0)


@pytest.mark.parametrize("name", ["hipDeviceGetDefaultMemPool", "hipMemPoolGetAttribute", "hipMemPoolSetAttribute"])
def test_a_failing_call_for_the_pool_of_workspaces_is_named(hip, name):
    kernel = kernel_of(together)
    hip.fail(name, 101)
    with pytest.raises(RuntimeError, match=rf"hip-driver\]: {name} failed: hipErrorInvalidDevice \(101\)"):
        kernel(*arrays())
    assert hip.held == (0, 0)
    hip.fail("", 0)
    kernel(*arrays())
    assert hip.held == (1, 0)


def test_results_stand_where_a_workspace_cannot_be_freed(hip):
    """The launch has run; what the driver then says is told by its next call."""
    kernel = kernel_of(together)
    hip.fail("hipFreeAsync", 701)
    kernel(*arrays())
    assert hip.log[-1] == "free"


def test_each_function_of_the_driver_fails_once_in_these_tests():
    """But one that kernels of HIP do not call: shared memory of any size is asked for by the launch itself."""
    from fake_hip import SOURCE

    named = set(re.findall(r'TRY\("(\w+)"\)', SOURCE)) - {"hipFuncGetAttribute"}
    assert len(named) >= 20 and not [n for n in named if f'"{n}"' not in Path(__file__).read_text(encoding="utf-8")]


@pytest.mark.parametrize("name", ["hipInit", "hipGetDeviceCount", "hipDeviceGetName", "hipDeviceTotalMem",
                                  "hipDeviceGetAttribute", "hipRuntimeGetVersion", "hipDeviceGet"])
def test_questions_about_a_device_fail_by_name(hip, name):
    hip.fail(name, 101)
    with pytest.raises(RuntimeError, match=f"{name} failed: hipErrorInvalidDevice"):
        hip_driver.driver_of("hip").device_count()
        hip_driver.driver_of("hip").version()
        hip_driver.driver_of("hip").properties(0)


def test_properties_of_a_device(hip):
    p = hip_driver.driver_of("hip").properties(2)
    assert (p.name, p.arch, p.capability) == ("AMD Instinct MI300X", "gfx942", (9, 4))
    assert (p.sm_count, p.max_shared_optin) == (304, 65536)
    assert hip_driver.driver_of("hip").version() == (6, 4)


def test_without_a_driver_the_call_says_so(monkeypatch):
    monkeypatch.setattr(hip_driver, "load_rocm", lambda: None)
    hip_driver._driver.cache_clear()
    with pytest.raises(RuntimeError, match="no HIP driver .libamdhip64. was found on this machine.*do not run") as e:
        kernel_of(main)(*arrays(), 1)
    assert "install the amdgpu driver and ROCm" in str(e.value)


def test_where_the_driver_is_looked_for(tmp_path, monkeypatch):
    monkeypatch.setenv("ROCM_PATH", str(tmp_path))
    found = list(probe._hip_libraries("amdhip64"))
    own = str(tmp_path / "lib" / "libamdhip64.so")
    assert found.index(own) < found.index("libamdhip64.so.6") and all("amdhip64" in x for x in found)
    torch = [x for x in found if x.endswith("torch/lib/libamdhip64.so")]
    assert not torch or found.index(torch[0]) < found.index(own)


@pytest.mark.spec("R11:detectors")
@pytest.mark.parametrize("name, found", [("gfx942:sramecc+:xnack-", "gfx942"), ("gfx90a", "gfx90a"), ("gfx950", "gfx950"),
                                         ("gfx1100", None)])
def test_the_chip_of_this_machine_is_a_target(hip, name, found, monkeypatch):
    monkeypatch.setattr("tilelang.target.target.device_capability", lambda: None)
    hip.lib.fake_arch(name.encode())
    try:
        assert Target("auto") == (Target("cpu") if found is None else Target({"kind": "hip", "mcpu": found}))
        assert Target("hip").arch == (found or "gfx942") and check_hip_availability() == (found is not None)
    finally:
        hip.lib.fake_arch(b"gfx942:sramecc+:xnack-")


@pytest.mark.parametrize("name", ["hipInit", "hipGetDeviceCount", "hipGetDevicePropertiesR0600", ""])
def test_a_driver_that_fails_or_has_no_device_is_no_target(hip, name, monkeypatch):
    monkeypatch.setattr("tilelang.target.target.device_capability", lambda: None)
    hip.reset(devices=4 if name else 0)
    hip.fail(name, 100)
    assert Target("auto") == Target("cpu") and Target("hip").arch == "gfx942"


def test_the_doctor_lists_amd_gpus(hip, monkeypatch):
    rows = {part: (state, hint) for part, state, hint in machine_facts()}
    assert "MI300X" in rows["AMD GPU 3"][0] and "gfx942" in rows["AMD GPU 3"][0] and rows["AMD GPU 3"][1] == 'runs target="hip"'
    assert rows["HIP driver"][0] == "6.4"
    hip.fail("hipGetDeviceCount", 100)
    rows = {part: (state, hint) for part, state, hint in machine_facts()}
    assert "hipGetDeviceCount failed" in rows["AMD GPU"][0] and "kernels still compile for any arch" in rows["AMD GPU"][1]


@pytest.mark.spec("S:amd-tools")
def test_measuring_without_the_gpu_says_so(monkeypatch):
    monkeypatch.setattr(hip_driver, "load_rocm", lambda: None)
    hip_driver._driver.cache_clear()
    request, artifact = artifact_of(main)
    kernel = JITKernel(_request=replace(request, target=Target("gfx942")), _artifact=artifact)
    for ask in (lambda: kernel.get_profiler(), lambda: do_bench(lambda: None, device="hip:1")):
        with pytest.raises(RuntimeError, match="no HIP driver .libamdhip64. was found"):
            ask()


def test_without_the_wheel_rocms_own_compiler_is_taken(library, monkeypatch):
    from tilelang.runtime import hip_compiler

    made = compiler(library.folder)
    monkeypatch.setattr(probe, "_hip_libraries", lambda name: [made._name] if name == "hiprtc" else [])
    monkeypatch.setattr(hip_compiler, "find_zig", lambda: None)
    forget()
    try:
        found = hip_compiler.compile_hsaco("a kernel", "gfx942", ["-DX"])
        assert found.bytes[:4] == b"\x7fELF" and (found.registers, found.agprs, found.spills) == (42, 258, 0)
        options = made.fake_options().decode().split()
        assert options[0] == "--offload-arch=gfx942" and options[-1] == "-DX" and "-ffp-contract=off" in options
        assert hip_compiler.zig_stamp().startswith("hiprtc /")
        with pytest.raises(RuntimeError, match="hiprtc rejected the HIP source for gfx942:\nkernel.cu:1:1: error: this"):
            hip_compiler.compile_hsaco("wrong", "gfx942")
    finally:
        forget()
