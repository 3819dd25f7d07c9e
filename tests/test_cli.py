"""Every command of `python -m tilelang` answers --help and does its work."""

import os
import shutil
import subprocess
import sys

import pytest

import tilelang
from tilelang import cli

KERNEL = '''
import tilelang.language as T

@T.prim_func
def add(A: T.Tensor((100,), "float32"), B: T.Tensor((100,), "float32")):
    with T.Kernel(1, threads=64):
        S = T.alloc_shared((128,), "float32")
        T.copy(A[0:100], S[0:100])
        T.copy(S[0:100], B[0:100])
'''


@pytest.fixture
def kernel_file(tmp_path):
    path = tmp_path / "add.py"
    path.write_text(KERNEL, encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("command", ["demo", "compile", "export", "show", "simulate", "bench", "doctor", "library", "puzzles"])
def test_help(command, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main([command, "--help"])
    assert stop.value.code == 0 and "usage" in capsys.readouterr().out


def test_demo_prints_its_result_first_and_the_kernel_alone_where_asked(capsys):
    assert cli.main(["demo", "--size", "128", "--target", "cpu"]) == 0
    out = capsys.readouterr().out
    assert "GFLOP/s" in out and "define" not in out and "): ok" in out and len(out.splitlines()) == 4
    assert cli.main(["demo", "--size", "128", "--target", "cpu", "--source"]) == 0
    out = capsys.readouterr().out
    assert out.index("GFLOP/s") < out.index("define") and out.count("\ndefine ") == 1 and out.endswith("}\n")


@pytest.mark.parametrize("kind", ["svg", "pdf", "html"])
def test_show_draws_layouts_into_files(kernel_file, tmp_path, capsys, kind):
    drawn = tmp_path / f"layouts.{kind}"
    assert cli.main(["show", str(kernel_file), "--arch", "sm_80", "--plot", str(drawn)]) == 0
    out = capsys.readouterr().out
    assert f"picture: {drawn}" in out and len(out.splitlines()) < 5  # not the tables too
    assert (b"S: Layout" if kind == "html" else b"S: Layout 128: 128 places") in drawn.read_bytes()


def test_show_draws_into_a_file_that_need_not_be_named(kernel_file, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["show", str(kernel_file), "--arch", "sm_80", "--plot"]) == 0
    assert f"picture: {tmp_path}/layouts.html (open it in a browser)" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        cli.main(["show", "--plot", str(kernel_file)])
    assert "a program comes first" in capsys.readouterr().err


def test_a_file_of_plain_functions_beside_its_modules_is_shown(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.path", [*sys.path])
    (tmp_path / "sibling_of_shown.py").write_text("WIDTH = 64\n")
    (tmp_path / "shown_maker.py").write_text("""
import tilelang.language as T
from sibling_of_shown import WIDTH
def make(n, by=2.0):
    @T.prim_func
    def main(A: T.Tensor((n,), "float32")):
        with T.Kernel(n // WIDTH, threads=32) as b:
            for i in T.Parallel(WIDTH):
                A[b * WIDTH + i] = A[b * WIDTH + i] * by
    return main
""")
    file = str(tmp_path / "shown_maker.py")
    assert cli.main(["show", file]) == 2
    assert f"name a function that returns one, {file}:NAME --set ARGUMENT=VALUE, of: make" in capsys.readouterr().err
    assert cli.main(["show", f"{file}:make"]) == 2
    assert "missing a required argument: 'n'; give it: --set NAME=VALUE" in capsys.readouterr().err
    assert cli.main(["show", f"{file}:make", "--set", "n=128", "--arch", "sm_80"]) == 0
    assert "__global__" in capsys.readouterr().out


def test_version_and_the_name_of_the_command(monkeypatch, capsys):
    with pytest.raises(SystemExit, match="0"):
        cli.main(["--version"])
    assert capsys.readouterr().out == f"tilelang {tilelang.__version__}\n"
    for argv, name in (("/x/bin/tilelang", "tilelang"), ("/x/tilelang/__main__.py", "python -m tilelang")):
        monkeypatch.setattr("sys.argv", [argv])
        assert cli.build_parser().format_usage().startswith(f"usage: {name} [-h]")


def test_show_names_the_kinds_of_pictures(kernel_file, capsys):
    with pytest.raises(SystemExit):
        cli.main(["show", str(kernel_file), "--plot", "layouts.bmp"])
    assert "pictures are .html, .svg, .pdf or .png files" in capsys.readouterr().err


def test_show_prints_cuda_source_ir_and_layouts(kernel_file, capsys):
    assert cli.main(["show", kernel_file, "--arch", "sm_80"]) == 0
    assert "__global__" in capsys.readouterr().out
    assert cli.main(["show", kernel_file, "--arch", "sm_80", "--what", "ir", "--after", "lower_tile_ops"]) == 0
    assert "T.Kernel" in capsys.readouterr().out
    assert cli.main(["show", kernel_file, "--arch", "sm_80", "--what", "layout"]) == 0
    assert "S:" in capsys.readouterr().out
    assert cli.main(["show", kernel_file, "--arch", "sm_80", "--what", "report"]) == 0
    assert "occupancy:" in capsys.readouterr().out
    assert cli.main(["show", kernel_file, "--what", "ir", "--after", "no_such_pass"]) == 2
    assert "infer_layouts" in capsys.readouterr().err


@pytest.mark.parametrize("where", [["--arch", "sm_90a"], ["--target", "cpu"]])
def test_show_needs_no_device_compiler(kernel_file, where, monkeypatch, capsys):
    from tilelang.runtime import nvrtc

    monkeypatch.setattr(nvrtc, "find_nvrtc", lambda: [])
    nvrtc.choose_nvrtc.cache_clear()
    for what in ("source", "host"):
        assert cli.main(["show", kernel_file, *where, "--what", what]) == 0
        shown = capsys.readouterr().out
        assert ("__global__" in shown) == (what == "source" and "sm_90a" in where)
        assert ("\ndefine " in shown) == (what == "host" or "cpu" in where)
    nvrtc.choose_nvrtc.cache_clear()


def test_shown_sources_are_those_of_the_kernel(kernel_file):
    import tilelang
    from tilelang.jit.inspect import sources_of

    program = cli.find_program(kernel_file, {})
    for target in ({"kind": "cuda", "arch": "sm_80"}, "cpu"):
        kernel = tilelang.compile(program, target=target)
        assert sources_of(program, target) == (kernel.get_kernel_source(), kernel.get_host_source())


def test_compile_writes_source_and_says_registers(kernel_file, tmp_path, capsys):
    out = tmp_path / "k.cu"
    assert cli.main(["compile", kernel_file, "--arch", "sm_80", "--output", str(out)]) == 0
    assert "__global__" in out.read_text(encoding="utf-8") and "registers" in capsys.readouterr().out


def test_simulate_says_ok_with_the_bound_and_names_written_tensors_only(kernel_file, capsys):
    assert cli.main(["simulate", kernel_file]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "add on the simulated sm_80: ok"
    assert lines[1].startswith("  B: largest difference from the reference interpreter 0, bound ") and lines[1].endswith(": ok")
    assert lines[2] == "instructions (by warp):" and not any(x.startswith("  A:") for x in lines)


def test_simulate_says_fail_where_the_executions_differ(kernel_file, monkeypatch, capsys):
    from tilelang.jit import inspect

    monkeypatch.setattr(inspect, "_narrowest", lambda _: -1.0)
    monkeypatch.setattr(inspect, "_rounding", lambda _: -1.0)  # no difference is small enough
    assert cli.main(["simulate", kernel_file]) == 1
    assert capsys.readouterr().out.splitlines()[0] == "add on the simulated sm_80: FAIL"


def test_simulate_counts_elements_that_nothing_wrote(tmp_path, capsys):
    path = tmp_path / "half.py"
    path.write_text(KERNEL.replace("B[0:100])", "B[0:64])").replace("S[0:100], B", "S[0:64], B"), encoding="utf-8")
    assert cli.main(["simulate", str(path)]) == 0
    assert "  note: 36 of 100 elements of `B` were not written" in capsys.readouterr().out


def test_a_sum_of_many_terms_has_a_wider_bound(tmp_path, capsys):
    path = tmp_path / "gemm.py"
    path.write_text(cli.DEMO, encoding="utf-8")
    sizes = [x for n in ("M=64", "N=64", "K=96", "BM=32", "BN=32") for x in ("--set", n)]
    assert cli.main(["simulate", str(path), *sizes]) == 0
    assert "(float16, sums of 96 terms): ok" in capsys.readouterr().out


@pytest.mark.parametrize("settings, coloured", [({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)])
def test_errors_have_colours_on_a_terminal_only(settings, coloured, monkeypatch):
    import sys

    from tilelang import errors

    text = "error[type]: a\n  --> f.py:1:2\n1 | x\n  | ^ here\nhint: b"
    assert errors.in_colours(text) == text
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    for k, v in settings.items():
        monkeypatch.setenv(k, v)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    shown = errors.in_colours(text)
    assert ("\033[1;31merror[type]:\033[0m a" in shown and "  | \033[1;31m^ here\033[0m" in shown) == coloured
    assert shown.replace("\033[0m", "").count("\033[") == (4 if coloured else 0)


def test_the_help_says_what_a_const_takes(capsys):
    for command in ("compile", "show", "simulate"):
        with pytest.raises(SystemExit):
            cli.main([command, "--help"])
        assert "T.const dimensions: --set M=512" in " ".join(capsys.readouterr().out.split())


def test_doctor_names_what_is_missing(capsys):
    assert cli.main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "LLVM" in out and "NVRTC" in out
    assert "AMD GPU" in out and "ziglang" in out and "gfx90a" in out


def test_a_user_error_is_printed_without_a_trace(tmp_path, capsys):
    path = tmp_path / "bad.py"
    path.write_text(KERNEL.replace("S[0:100])", "S[0:50, 0])"), encoding="utf-8")
    assert cli.main(["compile", str(path)]) == 2
    assert "error[" in capsys.readouterr().err


@pytest.mark.parametrize("arch, tool", [("sm_90a", "nvrtc"), ("gfx942", "clang")])
def test_bench_compile_prints_each_phase(arch, tool, capsys):
    if tool == "clang":
        pytest.importorskip("ziglang", reason="the package ziglang is not installed: pip install ziglang")
    assert cli.main(["bench", "compile", "--repeat", "2", "--arch", arch]) == 0
    out = capsys.readouterr().out
    assert "lower" in out and f"  {tool} " in out and "registers" in out


def test_what_is_missing_is_named(kernel_file, tmp_path, capsys):
    empty = tmp_path / "empty.py"
    empty.write_text("x = 1\n", encoding="utf-8")
    assert cli.main(["compile", str(empty)]) != 0
    assert "defines no kernel" in capsys.readouterr().err


def test_a_file_that_fails_by_itself_is_told_by_its_line(tmp_path, capsys):
    path = tmp_path / "broken.py"
    path.write_text("import tilelang\ndef f(:\n", encoding="utf-8")
    assert cli.main(["compile", str(path)]) == 2
    told = capsys.readouterr().err
    assert f"{path}:2: " in told and "def f(:" in told and "^" in told and "Traceback" not in told
    path.write_text("import tilelang\nx = missing + 1\n", encoding="utf-8")
    assert cli.main(["compile", str(path)]) == 2
    assert f"{path}:2: NameError: name 'missing' is not defined" in capsys.readouterr().err


def test_what_is_missing_on_the_command_line_is_named(tmp_path, capsys):
    path = tmp_path / "kernels.py"
    path.write_text("import tilelang\nimport tilelang.language as T\n\n\n@tilelang.jit\ndef wanting(A):\n    N = T.const('N')\n"
                    "    A: T.Tensor((N,), 'float32')\n    with T.Kernel(1, threads=32):\n        A[0] = 1.0\n\n\n"
                    "@tilelang.jit(out_idx=-1)\ndef sized(n):\n    return n\n", encoding="utf-8")
    for file, said in ((f"{path}:wanting", "give the values of its T.const: --set N=…"),
                       (f"{path}:sized", "missing a required argument: 'n'; give it: --set"),
                       (str(tmp_path), "is not a Python file")):
        assert cli.main(["compile", file]) == 2
        err = capsys.readouterr().err
        assert said in err and "Traceback" not in err
    with pytest.raises(SystemExit):
        cli.main(["demo", "--size", "0"])
    assert "it must be at least 1, found 0" in capsys.readouterr().err


def test_a_place_is_the_users_or_none():
    """Run as `python -m tilelang`, errors of the command line show no line of the package."""
    out = subprocess.run([sys.executable, "-m", "tilelang", "demo", "--target", "nowhere"], capture_output=True, text=True)
    assert out.returncode == 2 and "Target nowhere is not supported" in out.stderr and "-->" not in out.stderr


def test_a_file_that_cannot_be_written_is_told_without_a_trace(kernel_file, tmp_path, capsys):
    assert cli.main(["compile", kernel_file, "--target", "cpu", "--output", str(tmp_path)]) == 2
    assert str(tmp_path) in capsys.readouterr().err


def test_memory_that_is_not_there_and_interruptions_are_told_without_a_trace(monkeypatch, capsys):
    def stopped(how):
        def run(*_):
            raise how
        return run

    monkeypatch.setattr(cli, "_demo_target", stopped(MemoryError("Unable to allocate 728. TiB")))
    assert cli.main(["demo"]) == 2 and capsys.readouterr().err == "Unable to allocate 728. TiB\n"
    monkeypatch.setattr(cli, "_demo_target", stopped(KeyboardInterrupt()))
    assert cli.main(["demo"]) == 130 and capsys.readouterr().err == "interrupted\n"


def test_a_reader_that_stops_early_ends_the_command_quietly(kernel_file):
    tilelang = subprocess.Popen([sys.executable, "-m", "tilelang", "show", kernel_file, "--target", "cpu"],
                                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    tilelang.stdout.close()
    assert "Traceback" not in tilelang.stderr.read() and tilelang.wait() == 1


def test_a_terminal_of_few_letters_shows_the_rest_as_numbers():
    few = {**os.environ, "PYTHONIOENCODING": "ascii"}
    out = subprocess.run([sys.executable, "-m", "tilelang", "show", "--help"], capture_output=True, text=True, env=few)
    assert out.returncode == 0 and "sm_90a, \\u2026" in out.stdout


@pytest.mark.parametrize("torch, nvrtc, said", [(False, True, "torch"), (True, False, "pip install 'tilelang-py[cuda]'")])
def test_the_demo_runs_on_the_cpu_where_a_gpu_lacks_something(torch, nvrtc, said, monkeypatch, capsys):
    from tilelang.runtime import nvrtc as compiler

    monkeypatch.setattr(cli, "_gpu_count", lambda kind: 1)
    monkeypatch.setattr(cli.importlib.util, "find_spec", lambda name: object() if torch else None)
    monkeypatch.setattr(compiler, "available", lambda: nvrtc)
    assert cli._demo_target("auto") == ("cpu", False) and said in capsys.readouterr().err
    assert cli._demo_target("cpu") == ("cpu", False)
    with pytest.raises(LookupError, match="the GPU needs"):
        cli._demo_target("cuda")


def test_the_demo_runs_on_a_gpu_that_lacks_nothing(monkeypatch):
    from tilelang.runtime import nvrtc as compiler

    monkeypatch.setattr(cli, "_gpu_count", lambda kind: 1)
    monkeypatch.setattr(cli.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(compiler, "available", lambda: True)
    assert cli._demo_target("auto") == ("auto", True)


def test_export_writes_a_library_and_what_calls_it(tmp_path, capsys):
    if not any(map(shutil.which, ("cc", "gcc", "clang"))):
        pytest.skip("needs a linker")
    (tmp_path / "scale.py").write_text(
        "import tilelang\nimport tilelang.language as T\n\n\n@tilelang.jit(out_idx=[-1], target='cpu')\ndef scale(N, by=2):\n"
        "    @T.prim_func\n    def main(A: T.Tensor((N,), 'float32'), B: T.Tensor((N,), 'float32')):\n"
        "        with T.Kernel(1, threads=32):\n            for i in T.Parallel(N):\n                B[i] = A[i] * by\n"
        "    return main\n", encoding="utf-8")
    folder = tmp_path / "out"
    assert cli.main(["export", str(tmp_path / "scale.py"), "--set", "N=100", "-o", str(folder)]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said == [str(folder / f) for f in ("libscale.so", "scale.o", "scale.h", "scale.json", "CMakeLists.txt", "main.c")]
    assert "int scale(const float *A, float *B);" in (folder / "scale.h").read_text()
    assert cli.main(["export", str(tmp_path / "scale.py"), "-o", str(folder)]) == 2
    assert "give it: --set NAME=VALUE" in capsys.readouterr().err
    assert cli.main(["export", str(tmp_path / "scale.py"), "--set", "N=4", "--name", "int", "-o", str(folder)]) == 2
    assert "a C function cannot have the name 'int'" in capsys.readouterr().err
