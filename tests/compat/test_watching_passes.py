"""Watching passes: traces, times, pages, observers, and the analyses that stand among passes."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import tilelang
import tilelang.language as T
from tilelang import analysis, instrumentation, tools, tvm
from tilelang.env import env
from tilelang.errors import TileLangError
from tilelang.tools import lower_trace, pass_timing
from tilelang.tools.pass_visualizer import build_pass_data, emit_html, inspect_structure
from tilelang.transform.cpu import CPU_PASSES
from tilelang.transform.pipeline import DEVICE_PASSES, TILE_PASSES

SM80 = {"kind": "cuda", "arch": "sm_80"}
ROOT = Path(__file__).resolve().parents[2]


@T.prim_func
def scale(A: T.Tensor((64,), "float32"), B: T.Tensor((64,), "float32")):
    with T.Kernel(2, threads=32) as bx:
        F = T.alloc_fragment((32,), "float32")
        T.copy(A[bx * 32], F)
        for i in T.Parallel(32):
            B[bx * 32 + i] = F[i] * 2.0


@pytest.mark.spec("R13:lower_trace")
def test_a_trace_of_chosen_passes_is_data(capsys):
    steps = lower_trace.lower_trace(scale, ["legalize", "infer_layouts"], target=SM80)
    assert [s["name"] for s in steps] == ["legalize", "infer_layouts"] and not steps[0]["changed"]
    last = steps[1]
    assert set(last) == {"name", "before_script", "after_script", "diff_lines", "insertions", "deletions", "changed"}
    assert last["changed"] and "layouts" in last["after_script"] and "layouts" not in last["before_script"]
    added = [x for x in last["diff_lines"][2:] if x.startswith("+")]
    assert last["insertions"] == len(added) > 0 and last["deletions"] > 0 and last["before_script"] == steps[0]["after_script"]
    out = capsys.readouterr().out
    assert "# legalize (unchanged)" in out and f"# infer_layouts +{last['insertions']}" in out and added[0] in out
    wide = lower_trace.lower_trace(scale, ["legalize", "infer_layouts"], mode="none", context=0, target=SM80)
    assert len(wide[1]["diff_lines"]) < len(last["diff_lines"]) and capsys.readouterr().out == ""


@pytest.mark.spec("R13:lower_trace")
def test_a_trace_takes_the_pipeline_modules_and_functions(tmp_path, capsys):
    with tvm.target.Target(SM80):
        steps = tools.lower_trace(tvm.IRModule.from_expr(scale), None, "html", html_path=tmp_path / "deep" / "trace.html")
    assert [s["name"] for s in steps] == [p.__name__ for p in (*TILE_PASSES, *DEVICE_PASSES)]
    page = (tmp_path / "deep" / "trace.html").read_text()
    assert "lower_tile_ops" in page and str(tmp_path) in capsys.readouterr().out
    (step,) = lower_trace.lower_trace(scale, [analysis.NestedLoopChecker()], "none")
    assert step["name"] == "NestedLoopChecker" and not step["changed"]
    for bad in (dict(mode="page"), dict(passes=["no_such_pass"]), dict(passes=[3])):
        with pytest.raises((ValueError, TypeError)):
            lower_trace.lower_trace(scale, **{"passes": None, "mode": "none", **bad})
    with pytest.raises(TypeError, match="a PrimFunc is expected"):
        lower_trace.lower_trace(3, None)


@pytest.fixture
def tracing():
    yield
    lower_trace.reset()


@pytest.mark.spec("R13:lower_trace", "R9:TL_LOWER_TRACE")
def test_every_compilation_is_traced_into_a_folder(tmp_path, monkeypatch, tracing):
    monkeypatch.setattr(sys, "argv", ["/somewhere/my_script.py"])
    cached = tilelang.compile(scale, target="cpu")
    lower_trace.enable("html", tmp_path)
    assert tilelang.compile(scale, target="cpu") is not cached  # one from a cache would show nothing
    tilelang.lower(scale, target=SM80)
    folder = tmp_path / "my_script"
    session = lower_trace.get_last_session()
    assert [(p.name, len(p.passes)) for p in session.pipelines] == [
        ("scale", len(TILE_PASSES) + len(CPU_PASSES)),
        ("scale", len(TILE_PASSES) + len(DEVICE_PASSES) + 1)]  # printing is one more
    assert "scale for cuda -arch=sm_80" in (folder / "report.html").read_text()
    code = (folder / "codegen.cpp").read_text()
    assert "scale_kernel" in code and "define" in code
    assert code == (folder / "codegen.cpp.original").read_text() == (folder / "codegen.cpp.latest").read_text()
    (record,) = (folder / ".run_records").iterdir()
    assert record.name.startswith("run_") and (record / "report.html").exists() and '"lower_tile_ops"' in (
        record / "passes.json").read_text()
    # an edited file stays; the latest run stands beside it
    (folder / "codegen.cpp").write_text("mine")
    tilelang.lower(scale, target=SM80)
    assert (folder / "codegen.cpp").read_text() == "mine" and len((folder / "codegen.cpp.latest").read_text()) > len(code)
    lower_trace.disable()
    assert tilelang.compile(scale, target="cpu") is cached
    lower_trace.enable("both", tmp_path, codegen_output=tmp_path / "out" / "k.cu")
    tilelang.lower(scale, target=SM80)
    assert "scale_kernel" in (tmp_path / "out" / "k.cu").read_text()
    lower_trace.reset()
    assert lower_trace.get_last_session() is None and env.TL_LOWER_TRACE == "0"
    for bad in ("0", "pages"):
        with pytest.raises(ValueError):
            lower_trace.enable(bad)
    monkeypatch.setenv("TL_LOWER_TRACE", "pages")
    with pytest.raises(ValueError, match="TL_LOWER_TRACE is one of 0, 1, terminal, html, both"):
        tilelang.compile(scale, target="cpu")


def test_a_failing_pass_leaves_what_was_done_before(tmp_path, tracing):
    @T.prim_func
    def bad(A: T.Tensor((64,), "float32")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(64):
                A[i] = A[i] // 0.0 if False else A[i]
                for j in T.Parallel(2):
                    A[i] = j
                A[i] = 1.0

    lower_trace.enable("html", tmp_path)
    with pytest.raises(TileLangError):
        tilelang.lower(bad, target=SM80)
    assert lower_trace.get_last_session().pipelines[0].name == "bad"


@pytest.mark.spec("R9:TILELANG_PASS_DIFF")
def test_the_older_name_of_the_trace(tmp_path, capsys):
    from tilelang.utils.pass_diff import pass_diff

    with env.using(TILELANG_PASS_DIFF_OUTPUT=str(tmp_path)):
        assert pass_diff(scale, ["legalize"])[0]["name"] == "legalize"
    assert (tmp_path / "scale.html").exists()
    pass_diff(scale, ["legalize"], output=tmp_path / "there")
    assert (tmp_path / "there" / "scale.html").exists()


@pytest.mark.spec("R13:pass_timing")
def test_times_of_passes():
    with pass_timing.TileLangPassTimingInstrument() as timing:
        tilelang.lower(scale, target=SM80)
    record = next(r for r in timing.records if r.name == "infer_layouts")
    assert isinstance(record, pass_timing.PassTimingRecord) and record.duration_ms > 0 and record.changed
    assert record.program == "scale" and timing.total_ms == sum(r.duration_ms for r in timing.records)
    assert re.search(r"infer_layouts +1 +\d+\.\d\d +\d+\.\d\d +\d+\.\d%", timing.report()), timing.report()
    assert re.search(rf"all +{len(timing.records)} ", timing.report())
    count = len(timing.records)
    tilelang.lower(scale, target=SM80)
    assert len(timing.records) == count
    with tvm.transform.PassContext(instruments=[timing]):
        tilelang.lower(scale, target=SM80)
    assert len(timing.records) == 2 * count
    timing.clear()
    assert timing.records == []
    strict = pass_timing.TileLangPassTimingInstrument(threshold_ms=1e6)
    with strict:
        tilelang.lower(scale, target=SM80)
    assert "infer_layouts" not in strict.report() and "all" in strict.report()
    with pytest.raises(ValueError):
        pass_timing.TileLangPassTimingInstrument(-1)
    with pass_timing.PassTimingTool() as tool:
        kernels = tilelang.par_compile([scale], target="cpu", num_workers=1)  # another thread
    assert {r.name for r in tool.records} == {p.__name__ for p in (*TILE_PASSES, *CPU_PASSES)}
    assert kernels and "legalize" in tool.report()


@pytest.mark.spec("R13:pass_visualizer")
def test_pages_and_outlines(tmp_path):
    data = build_pass_data(scale, SM80)
    assert [d["name"] for d in data] == [p.__name__ for p in (*TILE_PASSES, *DEVICE_PASSES)]
    assert {"seconds", "phase", "structure", "diff_lines"} <= set(data[0]) and data[-1]["phase"] == "DEVICE"
    page = emit_html(data, tmp_path / "x.html", "scale <all>")
    assert page == (tmp_path / "x.html").read_text() and "scale &lt;all&gt;" in page and "place_sync" in page
    outline = inspect_structure(scale)
    assert outline["name"] == "scale" and outline["params"] == {"A": "float32[64]", "B": "float32[64]"}
    assert outline["buffers"] == {"F": "local.fragment float32[32]"}
    (launch,) = outline["body"]
    assert [n["kind"] for n in launch["children"]] == ["Alloc", "Copy", "Parallel"] and launch["line"] > 0
    assert [n["kind"] for n in launch["children"][2]["children"]] == ["Store"]


@pytest.mark.spec("R13:pass_visualizer")
def test_the_viewer_is_a_command(tmp_path):
    source = tmp_path / "kernel.py"
    source.write_text('''import tilelang, tilelang.language as T
@tilelang.jit
def double(N):
    @T.prim_func
    def main(A: T.Tensor((N,), "float32")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(N):
                A[i] = A[i] * 2.0
    return main
''')

    def view(*args):
        return subprocess.run([sys.executable, "-m", "tilelang.tools.pass_visualizer.viewer", *map(str, args)],
                              capture_output=True, text=True, cwd=ROOT)

    done = view(source, "--set", "N=64", "--out", tmp_path / "x.html", "--arch", "sm_80")
    assert done.returncode == 0 and "changed main" in done.stdout, done.stderr
    assert "float32, 64" in (tmp_path / "x.html").read_text() or "64" in (tmp_path / "x.html").read_text()
    assert "--set NAME=VALUE" in view("--help").stdout
    assert "Parallel  line 7" in view(source, "--set", "N=64", "--structure").stdout
    wrong = view(source, "--set", "N=64", "--passes", "nothing")
    assert wrong.returncode == 2 and "no pass 'nothing'" in wrong.stderr and "Traceback" not in wrong.stderr


@pytest.mark.spec("R13:instrumentation")
def test_observers_tools_and_phases():
    class Names(instrumentation.PassEventObserver):
        def __init__(self):
            self.seen, self.code, self.ended = [], [], 0

        def on_pass(self, event):
            self.seen.append((event.phase, event.index, event.name))

        def on_codegen(self, event):
            self.code.append((event.name, event.language))

        def on_pipeline_end(self, func, target):
            self.ended += 1

    names, made = Names(), []
    with instrumentation.pass_pipeline("mine", names) as stacked:
        assert instrumentation.current_compile_pass_instrumentation() is stacked
        assert instrumentation.active_stacked_pass_instruments() == (stacked,)
        assert instrumentation.current_pass_phase() == "mine"
        with instrumentation.pass_phase("inner"):
            tilelang.lower(scale, target="cpu")
    assert names.seen[0] == ("mine/inner", 0, "legalize") and names.ended == 1 and names.code == [("scale", "llvm")]
    assert instrumentation.current_compile_pass_instrumentation() is None and instrumentation.current_pass_phase() == ""

    class Tool(instrumentation.PassInstrumentationTool):
        name = "names"

        def create_instrument(self):
            made.append(Names())
            return made[-1]

    tool = instrumentation.register_pass_instrumentation_tool(Tool())
    try:
        with pytest.raises(ValueError, match="registered already"):
            instrumentation.register_pass_instrumentation_tool(Tool())
        with instrumentation.compile_pass_instrumentation():
            tilelang.lower(scale, target=SM80)
    finally:
        instrumentation.unregister_pass_instrumentation_tool(tool)
    assert made[0].seen[-1][2] == "verify_sync" and made[0].code == [("scale_kernel", "cuda")]
    assert instrumentation.create_pass_instruments() == []
    with instrumentation.compile_pass_instrumentation(names):
        assert instrumentation.run_codegen_with_instrumentation(lambda: "int x;", "other") == "int x;"
    assert names.code[-1] == ("other", "cuda")


@pytest.mark.spec("R13:instrumentation")
def test_instruments_of_a_pass_context():
    class Older:
        def __init__(self):
            self.calls = []

        def run_before_pass(self, program, info):
            self.calls.append(("before", info.name))

        def run_after_pass(self, program, info):
            self.calls.append(("after", info.name, program.name))

    older = Older()
    with tvm.transform.PassContext(instruments=[older]):
        tilelang.lower(scale, target="cpu")
    assert older.calls[:2] == [("before", "legalize"), ("after", "legalize", "scale")]
    with pytest.raises(TypeError, match="an instrument observes passes"):
        tvm.transform.PassContext(instruments=[3]).__enter__()
    assert tilelang.transform.get_pass_context().config == {}


@pytest.mark.spec("R13:analysis")
def test_checks_of_loops_by_their_own_names():
    @T.prim_func
    def nested(A: T.Tensor((8, 8), "float32")):
        with T.Kernel(1, threads=32):
            L = T.alloc_local((8,), "float32")
            for i in T.Parallel(8):
                A[i, 0] = 1.0
                L[i] = 1.0
                for j in T.Parallel(8):
                    A[i, j] = 2.0

    n = T.dynamic("n")

    @T.prim_func
    def symbolic(A: T.Tensor((n,), "float32")):
        with T.Kernel(1, threads=32):
            F = T.alloc_fragment((32,), "float32")
            for i in T.Parallel(n):
                A[i] = F[i]

    with pytest.raises(ValueError, match=r"\[Tilelang Semantic Check\] Nested parallel loops are not allowed"):
        analysis.NestedLoopChecker()(nested)
    with pytest.raises(ValueError, match="Local buffer `L` is indexed by T.Parallel loop variable"):
        analysis.ParallelLocalIndexChecker()(nested)
    with pytest.raises(ValueError, match="with symbolic range"):
        analysis.FragmentLoopChecker()(symbolic)
    for check, program in ((analysis.NestedLoopChecker, symbolic), (analysis.ParallelLocalIndexChecker, symbolic),
                           (analysis.FragmentLoopChecker, nested)):
        assert check()(program) is program
    module = tvm.IRModule.from_expr(scale)
    assert analysis.NestedLoopChecker()(module) is module


@pytest.mark.spec("R13:analysis", "R10:keys")
def test_programs_and_layouts_are_shown(capsys, tmp_path, monkeypatch):
    assert analysis.ASTPrinter()(scale) is scale
    out = capsys.readouterr().out
    assert "scale (TILE)" in out and "buffer F: local.fragment float32[32]" in out and re.search(r"    Parallel  line \d+", out)
    analysis.LayoutVisual()(scale)
    assert "F: Fragment((32,) -> (1,)" in capsys.readouterr().out
    analysis.LayoutVisual("svg, txt", str(tmp_path), SM80)(scale)
    assert "<svg" in (tmp_path / "scale_F.svg").read_text() and "Fragment" in capsys.readouterr().out
    with pytest.raises(ValueError, match="unknown format"):
        analysis.LayoutVisual("bmp")(scale)
    monkeypatch.chdir(tmp_path)
    tilelang.lower(scale.with_attr("tilelang_pass_configs", {
        "tl.layout_visualization_enable": True, "tl.layout_visualization_formats": "svg,txt"}), target=SM80)
    assert (tmp_path / "tmp" / "F.svg").exists() and "# F\nFragment" in capsys.readouterr().err


@pytest.mark.spec("R13:plot_layout")
def test_pictures_of_what_threads_hold(tmp_path, capsys):
    from tilelang.layout import make_gemm_fragment_8x8
    from tilelang.tools import plot_fragment_tv

    plot_fragment_tv(make_gemm_fragment_8x8(), str(tmp_path), formats="svg,pdf")
    assert f"Saved svg format into {tmp_path}/fragment_tv.svg" in capsys.readouterr().out
    text = (tmp_path / "fragment_tv.svg").read_text()
    places = re.findall(r"(?<=[>\u00a0])\d+,\d+(?=[<\u00a0])", text)
    assert len(places) == 64 == len(set(places)) and places[:4] == ["0,0", "0,1", "0,2", "0,3"]
    assert (tmp_path / "fragment_tv.pdf").read_bytes()[:5] == b"%PDF-"
    with pytest.raises(TypeError, match="draws a Fragment"):
        plot_fragment_tv(3)


@pytest.mark.spec("R13:iket")
def test_events_inside_kernels_are_refused_by_name():
    from tilelang.tools.cuda import iket

    for name in ("session", "mark", "range_push", "event_table"):
        with pytest.raises(NotImplementedError, match=f"{name} of iket: .*not available"):
            getattr(iket, name)("x")
    assert tools.cuda.iket is iket
