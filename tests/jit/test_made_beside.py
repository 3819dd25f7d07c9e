"""What is made of a CUDA program beside the verification of its synchronisation: host part and, for calls, TVM-FFI."""

import sys
import threading
import types
from unittest import mock

import pytest

import tilelang
import tilelang.language as T
from tilelang.errors import InternalError, TileLangError, error
from tilelang.jit import building
from tilelang.runtime import cuda_cache, nvrtc

pytestmark = pytest.mark.skipif(not nvrtc.available(), reason="NVRTC is not installed")
TARGET = {"kind": "cuda", "arch": "sm_80"}


@T.prim_func
def double(A: T.Tensor((128,), "float32"), B: T.Tensor((128,), "float32")):
    with T.Kernel(1, threads=128):
        for i in T.Parallel(128):
            B[i] = A[i] * 2


@pytest.fixture(autouse=True)
def uncached(monkeypatch):
    monkeypatch.setenv("TILELANG_DISABLE_CACHE", "1")


def compiled(cpus, monkeypatch):
    monkeypatch.setattr(building, "usable_cpus", lambda: cpus)
    return tilelang.compile(double, target=TARGET)


def test_many_cores_and_few_make_the_same(monkeypatch):
    few, many = (compiled(n, monkeypatch)._built for n in (2, 16))
    assert few.host_source == many.host_source and few.kernel_source == many.kernel_source and few.files == many.files


@pytest.mark.parametrize("cpus", (2, 16))
def test_faults_and_refusals_of_the_host_part_are_told_alike(monkeypatch, cpus):
    with mock.patch.object(building, "host_text", side_effect=KeyError("lost")), pytest.raises(InternalError, match="'lost'"):
        compiled(cpus, monkeypatch)

    def refuse(*_):
        raise error("cuda-missing", "refused by the host part", found="nothing", hint="none")

    with mock.patch.object(building, "host_text", refuse), pytest.raises(TileLangError, match="refused by the host part") as e:
        compiled(cpus, monkeypatch)
    assert "test_made_beside.py" in str(e.value), str(e.value)  # at the user's call


@pytest.mark.parametrize("cpus", (2, 16))
def test_a_refused_program_is_refused_whatever_was_made_of_it(monkeypatch, cpus):
    from tilelang.transform import pipeline

    made = []
    monkeypatch.setattr(building, "compile_host", lambda *a, make=building.compile_host: made.append(a[2]) or make(*a))
    monkeypatch.setattr(pipeline, "_doubt", lambda func: "not cleared: planted")
    monkeypatch.setattr(pipeline, "_asynchronous", lambda n: False)
    with pytest.raises(TileLangError, match="planted"):
        compiled(cpus, monkeypatch)
    assert cpus > 2 or not made


@pytest.mark.parametrize("loaded,fails", ((False, False), (True, False), (True, True)))
def test_what_calls_need_is_loaded_where_torch_is(monkeypatch, loaded, fails):
    asked = []

    def ffi():
        asked.append(1)
        if fails:
            raise ImportError("broken")

    monkeypatch.setattr(building, "ffi_state", ffi)
    monkeypatch.setattr(building, "load_libcuda", lambda: types.SimpleNamespace())
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    if loaded:
        monkeypatch.setitem(sys.modules, "torch", types.ModuleType("torch"))
    assert compiled(2, monkeypatch).kernel_source and bool(asked) == loaded


def test_the_host_part_is_that_of_the_last_schedule(monkeypatch):
    from tilelang.transform import pipeline

    tried, doubts = [], ["not cleared: planted"]

    class Started(building._Started):
        def __init__(self, program, *rest):
            tried.append(program)
            super().__init__(program, *rest)

    def part(request, sig, program, make=building.compile_host):  # of the first one too, unless it had not begun
        text, *rest = make(request, sig, program)
        return f"{text}; schedule {1 + next(k for k, p in enumerate(tried) if p is program)}", *rest

    monkeypatch.setattr(building, "_Started", Started)

    monkeypatch.setattr(building, "compile_host", part)
    monkeypatch.setattr(pipeline, "_doubt", lambda func: doubts.pop() if doubts else None)
    monkeypatch.setattr(pipeline, "_asynchronous", lambda n: False)
    kernel = compiled(16, monkeypatch)
    assert not doubts and len(tried) == 2 and kernel.host_source.endswith("; schedule 2")


def test_kernels_of_a_program_are_compiled_beside_each_other(monkeypatch):
    @T.prim_func
    def twice(A: T.Tensor((128,), "float32"), B: T.Tensor((128,), "float32")):
        with T.Kernel(1, threads=128):
            for i in T.Parallel(128):
                B[i] = A[i] * 2
        with T.Kernel(1, threads=128):
            for i in T.Parallel(128):
                B[i] = B[i] + A[i]

    both, make = threading.Barrier(2), nvrtc.compile_cubin

    def compile_cubin(source, *rest):
        both.wait(60)  # for the other kernel
        return make(source, *rest)

    monkeypatch.setattr(nvrtc, "compile_cubin", compile_cubin)
    monkeypatch.setattr(cuda_cache, "compile_cubin", compile_cubin)
    assert len(tilelang.compile(twice, target=TARGET).report().split("registers")) > 2
