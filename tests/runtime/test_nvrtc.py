"""NVRTC in process: resources, errors, choice of a library; SASS reading; driver module without a driver."""

import pytest
from sass_text import loops, opcodes

from tilelang.runtime import cuda_driver, nvrtc, sass
from tilelang.runtime.nvrtc import (INVALID_OPTION, NO_CACHE, NvrtcCandidate, choose_nvrtc, compile_cubin, compile_ptx,
                                    parse_resources)

needs_nvrtc = pytest.mark.skipif(not nvrtc.available(), reason="NVRTC is not installed")
PLAIN = """extern "C" __global__ void __launch_bounds__(128) twice(float* a, int n) {
  __shared__ float s[64];
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  s[threadIdx.x % 64] = a[i];
  __syncthreads();
  if (i < n) a[i] = s[(threadIdx.x + 1) % 64] * 2.0f;
}"""


@needs_nvrtc
def test_cubin_and_resources():
    c = compile_cubin(PLAIN, "sm_80")
    assert c.bytes[:4] == b"\x7fELF" and 4 <= c.registers <= 40 and c.spills == 0 and c.shared_bytes == 256
    assert list(c.kernels) == ["twice"] and c.kernels["twice"].constant_bytes > 0


@needs_nvrtc
def test_the_same_source_gives_the_same_bytes():
    assert compile_cubin(PLAIN, "sm_90a").bytes == compile_cubin(PLAIN, "sm_90a").bytes


@needs_nvrtc
def test_refused_source_is_an_error_with_the_output_and_the_source():
    with pytest.raises(RuntimeError) as e:
        compile_cubin("extern \"C\" __global__ void k() { nonsense(); }", "sm_80")
    text = str(e.value)
    assert text.startswith("error[nvrtc-compile]")
    assert 'identifier "nonsense" is undefined' in text and "    1 | " in text


@needs_nvrtc
def test_refused_long_source_is_told_on_one_screen_and_saved(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    lines = [f"__device__ int unused_{i}(int x) {{ return x + {i}; }}" for i in range(200)]
    lines[120] = "__device__ int wrong(int x) { return nonsense(x); }"
    source = "\n".join([*lines, 'extern "C" __global__ void k() {}'])
    with pytest.raises(RuntimeError) as e:
        compile_cubin(source, "sm_80")
    text = str(e.value)
    assert 'identifier "nonsense" is undefined' in text and "  121 | __device__ int wrong" in text and "  122 | " in text
    assert "unused_1(" not in text and "unused_130(" not in text and len(text.splitlines()) < 30
    (folder,) = tmp_path.iterdir()
    assert f"all of it: {folder}" in text and (folder / "kernel.cu").read_text().strip() == source
    assert "nonsense" in (folder / "nvrtc.log").read_text()


@needs_nvrtc
def test_options_reach_the_compiler():
    source = 'extern "C" __global__ void k(float* a) { a[0] = VALUE / a[1]; }'
    slow = compile_cubin(source, "sm_80", ["-DVALUE=a[2]"])
    fast = compile_cubin(source, "sm_80", ["-DVALUE=a[2]", "--use_fast_math"])
    assert len(fast.bytes) < len(slow.bytes)


def test_no_library_for_an_architecture_says_what_to_install(monkeypatch):
    monkeypatch.setattr(nvrtc, "find_nvrtc", lambda: [NvrtcCandidate("/nowhere/libnvrtc.so.13", (), 13)])
    with pytest.raises(RuntimeError) as e:
        choose_nvrtc.__wrapped__(80, 12)
    assert "newer than the driver (CUDA 12)" in str(e.value) and "nvidia-cuda-nvrtc-cu12" in str(e.value)
    with pytest.raises(RuntimeError, match="does not load"):
        choose_nvrtc.__wrapped__(80, None)
    monkeypatch.setattr(nvrtc, "find_nvrtc", lambda: [])
    with pytest.raises(RuntimeError, match="nvidia-cuda-nvrtc-cu12"):
        choose_nvrtc.__wrapped__(70, None)
    with pytest.raises(RuntimeError, match=r"tilelang-py\[cuda\]"):
        choose_nvrtc.__wrapped__(80, None)


@pytest.fixture
def two_installed(tmp_path, monkeypatch):
    """Two NVRTCs found, newest first; a function that makes those of the given majors fail every source as 13.0 does."""
    found = [NvrtcCandidate(str(tmp_path / f"{major}" / f"libnvrtc.so.{major}"), (), major) for major in (13, 12)]
    for c in found:
        (tmp_path / f"{c.major}").mkdir()
        (tmp_path / f"{c.major}" / f"libnvrtc-builtins.so.{c.major}.0").touch()
    opened, failing = [], set()

    class Fake(nvrtc.Nvrtc):
        def __init__(self, candidate):
            opened.extend([*nvrtc._builtins_beside(candidate.library), candidate.library])
            self.path, self.includes, self.archs, self.version = candidate.library, (), (80, 90), (candidate.major, 0)

        def compile(self, source, options, what="CUBIN"):
            if self.version[0] in failing:
                return 7, "nvrtc: error: failed to open libnvrtc-builtins.so.13.0.", b""
            return 0, "", b"made"

    monkeypatch.setattr(nvrtc, "find_nvrtc", lambda: found)
    monkeypatch.setattr(nvrtc, "driver_cuda_major", lambda: None)
    monkeypatch.setattr(nvrtc, "Nvrtc", Fake)
    for cached in (nvrtc.load_nvrtc, choose_nvrtc):
        cached.cache_clear()
    yield lambda *majors: failing.update(majors) or opened
    for cached in (nvrtc.load_nvrtc, choose_nvrtc):
        cached.cache_clear()


def test_an_nvrtc_that_cannot_open_its_builtins_gives_way_to_the_next(two_installed):
    two_installed(13)
    assert compile_cubin("k", "sm_90a").bytes == b"made" and nvrtc.compiler_for("sm_90a").version == (12, 0)


def test_an_nvrtc_that_compiles_nothing_is_no_compiler_bug(two_installed):
    two_installed(12, 13)
    with pytest.raises(RuntimeError) as e:
        compile_cubin("k", "sm_90a")
    text = str(e.value)
    assert text.startswith("error[nvrtc-broken]") and text.count("failed to open libnvrtc-builtins") == 2
    assert "compiler bug" not in text and "--force-reinstall" in text


def test_builtins_are_opened_before_the_library_that_opens_them_by_name(tmp_path, monkeypatch):
    """torch pins NVRTC 13.0.88, whose library has no RPATH to find the file beside it."""
    opened = []

    def open_library(path):
        opened.append(path)
        if path.endswith("libnvrtc.so.13"):
            raise OSError("seen")

    for name in ("libnvrtc.so.13", "libnvrtc-builtins.so.13.0", "libnvrtc.alt.so.13", "libnvrtc-builtins.alt.so.13.0"):
        (tmp_path / name).touch()
    monkeypatch.setattr(nvrtc, "open_library", open_library)
    said = nvrtc.load_nvrtc.__wrapped__(NvrtcCandidate(str(tmp_path / "libnvrtc.so.13"), (), 13))
    assert said == "does not load: seen"
    assert opened == [str(tmp_path / "libnvrtc-builtins.so.13.0"), str(tmp_path / "libnvrtc.so.13")]


def test_doctor_compiles_with_every_nvrtc(two_installed):
    from tilelang.jit.inspect import machine_facts

    two_installed(13)
    (_, bad, why), (_, good, says) = [row for row in machine_facts() if row[0] == "NVRTC"]
    assert bad == "broken" and "libnvrtc-builtins" in why
    assert good == "12.0" and "compiles for sm_80 to sm_90" in says


@pytest.mark.parametrize("rc,kind", [(6, "nvrtc-compile"), (7, "nvrtc-broken"), (11, "nvrtc-broken")])
def test_a_failure_that_names_no_line_shows_the_source(monkeypatch, rc, kind):
    class Failing:
        includes, path = (), "libnvrtc.so.13"

        def compile(self, source, options):
            return rc, "nvrtc: error: it failed", b""

    monkeypatch.setattr(nvrtc, "choose_nvrtc", lambda *a: Failing())
    with pytest.raises(RuntimeError) as e:
        compile_cubin("\n".join(f"int a{i};" for i in range(60)), "sm_80")
    assert e.value.kind == kind and "    1 | int a0;" in str(e.value) and "a40" not in str(e.value)
    assert ("compiler bug" in str(e.value)) == (kind == "nvrtc-compile")


@needs_nvrtc
def test_a_value_of_an_option_that_nvrtc_refuses_is_no_compiler_bug():
    with pytest.raises(RuntimeError, match="nvrtc-option.*--std") as e:
        compile_cubin(PLAIN, "sm_80", ["-std=c++99"])
    assert "compiler bug" not in str(e.value)


@needs_nvrtc
def test_a_missing_header_is_named_and_no_compiler_bug():
    with pytest.raises(RuntimeError, match="nowhere/a.h lies in none of|the CUDA headers are missing") as e:
        compile_cubin("#include <nowhere/a.h>\n" + PLAIN, "sm_80")
    assert "compiler bug" not in str(e.value)


def test_resources_are_read_per_kernel():
    log = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'a' for 'sm_80'
ptxas info    : Function properties for a
ptxas         .     16 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, 16 bytes cumulative stack size, 1024 bytes smem, 372 bytes cmem[0]
ptxas info    : Compiling entry function 'b' for 'sm_80'
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 8 registers, used 0 barriers, 352 bytes cmem[0]"""
    got = parse_resources(log)
    assert got["a"] == nvrtc.Resources(40, 8, 12, 16, 1024, 372) and got["a"].spills == 20
    assert got["b"] == nvrtc.Resources(8, 0, 0, 0, 0, 352)


SASS = """.text.k:
        /*0000*/                   MOV R1, c[0x0][0x28] ;
.L_x_0:
        /*0010*/                   IADD3 R0, R0, 0x1, RZ ;
        /*0020*/              @P0  HMMA.16816.F32 R4, R8, R12, R4 ;
        /*0030*/                   ISETP.GE.AND P0, PT, R0, R2, PT ;
        /*0040*/             @!P0  BRA `(.L_x_0) ;
        /*0050*/                   EXIT ;
"""


def test_sass_is_counted_by_opcode_and_loop():
    assert opcodes(SASS) == {"MOV": 1, "IADD3": 1, "HMMA": 1, "ISETP": 1, "BRA": 1, "EXIT": 1}
    (size, body), = loops(SASS)
    assert size == 4 and "HMMA" in body and "MOV" not in body


@pytest.mark.skipif(sass.find_nvdisasm() is None or not nvrtc.available(), reason="nvdisasm is not installed")
def test_a_cubin_disassembles():
    assert opcodes(sass.disassemble(compile_cubin(PLAIN, "sm_80").bytes))["BAR"] == 1
    with pytest.raises(RuntimeError, match="nvdisasm failed"):
        sass.disassemble(b"no cubin")


def test_without_a_driver_the_error_says_so(monkeypatch):
    monkeypatch.setattr(cuda_driver, "load_libcuda", lambda: None)
    with pytest.raises(RuntimeError, match="no CUDA driver was found") as e:
        cuda_driver.Driver()
    assert 'target="cpu"' in str(e.value)


def test_what_the_compiler_cache_does_not_say_is_asked_again(monkeypatch):
    full = "ptxas info    : Compiling entry function 'k' for 'sm_90a'\nptxas info    : Used 42 registers"

    class Fake:
        includes = ()
        version = (13, 0)

        def compile(self, source, flags):
            return (0, full, b"\x7fELF again") if "--no-cache" in flags else (0, "", b"\x7fELF cached")

    monkeypatch.setattr(nvrtc, "choose_nvrtc", lambda *a: Fake())
    got = compile_cubin("", "sm_90a")
    assert got.registers == 42 and got.bytes == b"\x7fELF again"


@pytest.mark.parametrize("knows", (True, False))
def test_the_drivers_cache_is_never_asked(monkeypatch, knows):
    """To ask it, NVRTC initialises the driver, which takes as long as compiling a product of tiles."""
    seen = []

    class Fake:
        includes = ()
        version = (13, 0) if knows else (12, 0)

        def compile(self, source, flags, what="CUBIN"):
            seen.append((source, NO_CACHE in flags, what))
            known = knows or NO_CACHE not in flags
            return (0, "", b"made") if known else (INVALID_OPTION, "unrecognized option", b"")

    monkeypatch.setattr(nvrtc, "choose_nvrtc", lambda *a: Fake())
    assert compile_cubin("k", "sm_80").bytes == b"made" and compile_ptx("k", "sm_80") == "made"
    wanted = [("k", "CUBIN"), ("k", "PTX")]
    assert [s for s in seen if s[1]] == [(source, True, what) for source, what in wanted]
    assert [s for s in seen if not s[1]] == ([] if knows else [(source, False, what) for source, what in wanted])


@needs_nvrtc
def test_a_user_may_ask_for_no_cache_too():
    assert compile_cubin(PLAIN, "sm_80", ["--no-cache"]).registers
