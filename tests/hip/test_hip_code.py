"""Kernels for AMD GPUs: the text, the code objects of three chips, what they use, what is refused."""

import re

import pytest

pytest.importorskip("ziglang", reason="the package ziglang is not installed: pip install ziglang")

import tilelang
import tilelang.language as T
from tilelang.codegen.device.page import Page
from tilelang.codegen.device.types import TYPES
from tilelang.codegen.hip.printer import available, kernel_header, sections
from tilelang.jit.requests import make_request
from tilelang.runtime.hip_compiler import compile_hsaco
from tilelang.target.hip import HIP_CHIPS
from tilelang.target.instructions import function_name
from tilelang.target.mfma import MFMA_ROWS


def row_maxima(n=128, dtype="float32"):
    @T.prim_func
    def program(A: T.Tensor((64, n), dtype), B: T.Tensor((64, n), dtype)):
        with T.Kernel(64, threads=128) as bx:
            shared = T.alloc_shared((n,), dtype)
            row, top = T.alloc_fragment((n,), "float32"), T.alloc_fragment((1,), "float32")
            T.copy(A[bx, 0], shared)
            T.copy(shared, row)
            T.reduce_max(row, top)
            for i in T.Parallel(n):
                B[bx, i] = T.exp(row[i] - top[0])

    return program


@pytest.mark.parametrize("chip", HIP_CHIPS)
def test_a_kernel_is_assembled_without_a_device(chip, capsys):
    kernel = tilelang.compile(row_maxima(), target={"kind": "hip", "mcpu": chip})
    source, isa = kernel.get_kernel_source(), kernel._built.files["kernel.s"].decode()
    kernel.show_sass()
    assert "#include" not in source and "amdgpu_flat_work_group_size(128, 128)" in source
    assert kernel.hsaco[:4] == b"\x7fELF" and chip in isa and isa in capsys.readouterr().out and kernel.cubin is None
    (facts,) = kernel.report_data["kernels"]
    assert facts["spills"] == facts["scratch"] == facts["agprs"] == 0 and 4 <= facts["registers"] <= 32
    assert facts["occupancy"]["warps"] == 32 and " SGPRs " in kernel.report()


def test_a_barrier_waits_for_shared_memory():
    isa = compile_hsaco(tilelang.lower(row_maxima(), target="hip").kernel_source, "gfx942").isa
    lines = [x.split()[0] for x in isa.splitlines() if x.startswith("\t") and x[1] in "sdvg"]
    at = lines.index("s_barrier")
    assert lines[at - 1] == "s_waitcnt" and "ds_write_b32" in lines[:at]
    assert {"ds_swizzle_b32", "v_mov_b32_dpp"} <= set(lines)  # exchanges between lanes stay in registers


def _computes(rows):
    body = "".join(
        f'extern "C" __attribute__((global)) void k{i}({TYPES[r.c_dtype.base]}* c, const {TYPES[r.a_dtype.base]}* a, '
        f"const {TYPES[r.b_dtype.base]}* b) {{ tl::{function_name(r)}(c, a, b); }}\n" for i, r in enumerate(rows))
    return kernel_header(Page("k", False), body, "", rows) + body


@pytest.mark.parametrize("chip", HIP_CHIPS)
def test_every_matrix_instruction_of_a_chip_assembles(chip):
    rows = [r for r in MFMA_ROWS.values() if chip in dict(r.chips) and {r.a_dtype.base, r.b_dtype.base} <= set(TYPES)]
    assert len(rows) >= 9 and len(re.findall(r"v_mfma", compile_hsaco(_computes(rows), chip).isa)) == len(rows)


@pytest.mark.parametrize("chip", HIP_CHIPS)
def test_every_section_of_the_prelude_compiles(chip):
    """Sections without templates are compiled whole; of the others at least the syntax and the names are checked."""
    words = " ".join(available() - {"fp8_value"})
    compile_hsaco(kernel_header(Page("k", False), f"{words} half_t bfloat16_t", "", []), chip)
    assert not any("cvt.rn" in sections()[name] or "sync.aligned" in sections()[name] for name in available())


@pytest.mark.parametrize("line, said", [
    ("T.print(A[bx, 0])", "print nothing"), ("T.sync_threads(1, 128)", "one barrier"),
    ("T.call_extern('float32', 'tl::thing', A[bx, 0])", "another device library"),
    ("A[bx, 0] = T.sin(T.cast(A[bx, 1], 'float64'))", "`sin` on float64"),
    ("A[bx, 0] = T.sin(T.cast(A[bx, 1], 'float64'))", "compute it in float32"),
    ("A[bx, 0] = T.get_rank()", "run on CUDA devices")])
def test_what_the_target_has_no_form_for_is_refused(line, said):
    program = tilelang.from_source(f"""
import tilelang.language as T

@T.prim_func
def program(A: T.Tensor((64, 128), "float32")):
    with T.Kernel(64, threads=128) as bx:
        {line}
""", "program")
    with pytest.raises(NotImplementedError, match=said) as caught:
        tilelang.lower(program, target="hip")
    assert caught.value.span.line == 7


def test_loads_of_the_next_tiles_are_in_flight_over_the_barrier():
    """Until a barrier nothing waits for them (vmcnt); their results are stored to LDS behind it."""
    from test_hip_lowering import products

    isa = compile_hsaco(tilelang.lower(products(2), target="hip").kernel_source, "gfx942").isa
    seen = re.findall("_load(?=_dwordx4)|s_barrier|vmcnt|ds_write", isa)
    assert re.search("_load (s_barrier )+vmcnt ds_write", " ".join(seen))


@pytest.mark.parametrize("plain, taken", [(0, True), (12, False)])
def test_tiles_are_not_held_in_registers_that_are_spilled(monkeypatch, plain, taken):
    """What decides is the compiler's count, here made up: 10 with tiles in flight, `plain` without."""
    from tilelang.jit import building

    def made(request, sig):
        ahead = request.config.get("tl.enable_async_copy", True)
        facts = {"stages": {"A": 2} if ahead else {}, "declined": []}
        return building.Artifact("hip", "ahead" if ahead else "plain", "", {}, {
            "kernels": [{"spills": 10 if ahead else plain}], "facts": [facts]})

    monkeypatch.setattr(building, "_build_hip", made)
    request = make_request(row_maxima(), target="hip")
    found = building.build_hip(request, None)
    assert found.kernel_source == ("plain" if taken else "ahead")
    assert found.meta["facts"][0]["declined"] == ["tiles in flight in registers: 10 registers a thread are spilled"] * taken


@pytest.mark.parametrize("line, branch", [("with T.ws(0):", True), ("if tx < 128:", False)])
def test_a_warp_role_is_rejected_at_its_branch(line, branch):
    """The error pointed at the line that compiles."""
    @T.prim_func
    def roles(A: T.Tensor((128, 64), "float16"), B: T.Tensor((128, 64), "float16")):
        with T.Kernel(1, threads=256):
            s = T.alloc_shared((128, 64), "float16")
            with T.ws(0):
                T.copy(A, s)
            T.copy(s, B)

    @T.prim_func
    def branches(A: T.Tensor((128, 64), "float16"), B: T.Tensor((128, 64), "float16")):
        with T.Kernel(1, threads=256):
            tx, s = T.get_thread_binding(), T.alloc_shared((128, 64), "float16")
            if tx < 128:
                T.copy(A, s)
            T.copy(s, B)

    with pytest.raises(NotImplementedError, match="warp role") as caught:
        tilelang.compile(roles if branch else branches, target="gfx942")
    assert line in str(caught.value) and "T.Pipelined" in caught.value.hint
