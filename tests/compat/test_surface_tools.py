"""Helpers of the package's surface: the toolchain, buffers and regions, places of source, targets."""

import numpy as np
import pytest

import tilelang
import tilelang.language as T
from tilelang import errors, ir
from tilelang.contrib import nvcc
from tilelang.cuda import target as cuda_target
from tilelang.runtime import nvrtc, sass
from tilelang.target import Target
from tilelang.utils import language as buffers

SOURCE = 'extern "C" __global__ void add(float* a) { a[threadIdx.x] += 1.0f; }'


@T.prim_func
def shift(A: T.Tensor((8, 16), "float32"), B: T.Tensor((8, 16), "float32")):
    with T.Kernel(1, threads=32):
        for i, j in T.Parallel(8, 16):
            B[i, j] = A[i, j] + 1.0


@pytest.mark.spec("R12:nvcc")
@pytest.mark.skipif(not nvrtc.available(), reason="needs NVRTC")
def test_sources_compile_without_a_toolkit(tmp_path):
    ptx = nvcc.get_ptx_from_source(SOURCE, arch="sm_80")
    assert ".target sm_80" in ptx and ".entry add" in ptx
    cubin = nvcc.compile_cuda(SOURCE, "cubin", arch=["90"], options="-lineinfo", path_target=str(tmp_path / "add.cubin"))
    assert bytes(cubin[:4]) == b"\x7fELF" == (tmp_path / "add.cubin").read_bytes()[:4]
    with Target({"kind": "cuda", "arch": "sm_80"}):
        assert nvcc.get_ptx_from_source(SOURCE) == ptx
        if sass.find_nvdisasm():
            assert "FADD" in nvcc.get_sass_from_source(SOURCE)
    assert nvcc.get_cuda_library_dirs()
    with pytest.raises(RuntimeError, match="NVRTC rejected"):
        nvcc.compile_cuda("not C++", arch="sm_80")
    with pytest.raises(ValueError, match="target_format"):
        nvcc.compile_cuda(SOURCE, "fatbin", arch="sm_80")
    with pytest.raises(ValueError, match="one architecture"):
        nvcc.compile_cuda(SOURCE, "cubin", arch=["80", "90"])


def test_a_missing_toolkit_is_named(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with tilelang.env.using(CUDA_HOME=""), pytest.raises(RuntimeError, match="NVRTC compiles"):
        nvcc.get_nvcc_compiler()


@pytest.mark.spec("R12:utils")
def test_buffers_regions_and_elements():
    a = next(iter(shift.buffer_map.values()))
    assert buffers.array_reduce((2, 3, 4)) == 24 and buffers.retrieve_shape(a) == [8, 16]
    assert buffers.retrieve_stride(a) == [16, 1] and buffers.is_full_region(a)
    part = a[2:4, 0:8]
    assert buffers.retrieve_shape(part) == [2, 8] and not buffers.is_full_region(part)
    element = a[3, 5]
    assert buffers.get_buffer_region_from_load(element) is None
    region = buffers.to_buffer_region(element, extents=(4,))
    assert region.extents == (1, 4) and [m.value for m in region.mins] == [3, 5]
    vector = ir.load(a, (ir.const(1), T.Ramp(ir.const(4), 1, 4)))
    assert buffers.get_buffer_region_from_load(vector).extents == (1, 4) and buffers.retrieve_shape(vector) == [1, 4]
    at = buffers.retrive_ptr_from_buffer_region(part)
    assert at.buffer is a and [m.value for m in at.indices] == [2, 0]
    assert tilelang.utils.to_buffer_region(region) is region
    for bad in (lambda: buffers.retrieve_shape(3), lambda: buffers.retrieve_stride("A"), lambda: buffers.to_buffer_region(1)):
        with pytest.raises(TypeError, match="a buffer, a region"):
            bad()
    with pytest.raises(ValueError, match="access_type"):
        buffers.to_buffer_region(a, "x")
    n = ir.Var("n", ir.I32)
    assert [buffers.side_effect(e) for e in (n + 1, element + 1.0)] == [0, 1]
    assert buffers.side_effect(ir.call("user_function", (n,), ir.I32)) == 2


@pytest.mark.spec("R15:spans")
def test_places_of_source():
    span = ir.make_span("kernel.py", 7)
    assert ir.span_to_location(span) == ("kernel.py", 7) and ir.span_to_location(None) is None
    assert ir.get_prim_func_span(shift).file == __file__ and 0 < ir.span_coverage(shift) <= 1
    a = next(iter(shift.buffer_map.values()))
    assert ir.get_buffer_span(ir.set_buffer_span(ir.Buffer("X", (4,), a.dtype), span)) is span
    store = ir.Store(a, (ir.const(0), ir.const(0)), ir.const(0.0, "float32"))
    same = ir.Store(a, (ir.const(0), ir.const(0)), ir.const(0.0, "float32"))
    assert ir.get_stmt_span(ir.set_stmt_span(store, span)) is span and store.same(same)
    for bad in (ir.get_stmt_span, ir.get_buffer_span, ir.get_prim_func_span):
        with pytest.raises(TypeError, match="is expected"):
            bad(3)


@pytest.mark.spec("R15:spans")
def test_a_place_at_the_end_of_a_message_shows_the_source(tmp_path):
    path = tmp_path / "kernel.py"
    path.write_text("import this\n    T.copy(a, b)\n")
    exc = errors.enrich_error(ValueError(f"shapes differ\n --> {path}:2:8", 5))
    assert exc.args[0].splitlines() == ["shapes differ", f"  --> {path}:2:8", "2 |     T.copy(a, b)",
                                        "  |        ^^^^^^^^^"] and exc.args[1] == 5
    whole = errors.enrich_error(RuntimeError(f"bad --> {path}:2"))
    assert whole.args[0].splitlines()[-1] == "  |     ^^^^^^^^^^^^"
    for text in ("nothing", f"gone --> {tmp_path}/none.py:3"):
        assert errors.enrich_error(ValueError(text)).args == (text,)


@pytest.mark.spec("R11:forms")
def test_what_cuda_targets_have():
    of = {a: Target({"kind": "cuda", "arch": a}) for a in ("sm_70", "sm_75", "sm_86", "sm_90a", "sm_120")}
    for name, yes in (("is_volta", {"sm_70"}), ("is_turing", {"sm_75"}), ("is_ampere", {"sm_86"}), ("is_hopper", {"sm_90a"}),
                      ("is_sm120", {"sm_120"}), ("is_cuda", set(of)), ("has_async_copy", {"sm_86", "sm_90a", "sm_120"}),
                      ("has_ldmatrix", set(of) - {"sm_70"}), ("has_stmatrix", {"sm_90a", "sm_120"}),
                      ("has_bulk_copy", {"sm_90a", "sm_120"})):
        ask = getattr(cuda_target, f"target_{name}")
        assert {a for a, t in of.items() if ask(t)} == yes, name
        assert not ask("cpu")
    assert isinstance(cuda_target.check_cuda_availability(), bool)
    assert cuda_target.normalize_cutedsl_target("cuda") is None
    with pytest.raises(NotImplementedError, match="not available"):
        cuda_target.normalize_cutedsl_target("cutedsl")


def test_the_program_of_these_tests_runs():
    a = np.ones((8, 16), np.float32)
    assert (tilelang.compile(shift, target="cpu", out_idx=[1])(a) == 2).all()
