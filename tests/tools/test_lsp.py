"""The language server, over the protocol: what an editor is told about a file, in what time, and what it never does."""

import ast
import importlib.util
import shutil
import socket
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

if importlib.util.find_spec("pygls") is None:
    pytest.skip("pygls is not installed", allow_module_level=True)

from editor import HEAD, LONG, MACRO, MATMUL, Editor
from lsprotocol import types as lsp

from tilelang.tools.lsp import analysis, texts
from tilelang.tools.lsp.worker import guard

KERNEL = HEAD + MACRO + MATMUL


@pytest.fixture(scope="module")
def editor(tmp_path_factory):
    e = Editor(tmp_path_factory.mktemp("project"), seconds=20)  # other tests run meanwhile
    yield e
    e.close()


def opened(editor, name, text):
    """The uri of a text after its kernels are lowered."""
    uri = editor.open(name, "")
    editor.settled(uri, text)
    return uri


def found_in(text):
    """Diagnostics of the analysis, without a server."""
    out = []
    analysis.check(analysis.Request("/nowhere/kernel.py", text), out.append)
    return out[-1]["diagnostics"], out[-1]["functions"]


def test_an_error_of_the_frontend_stands_at_its_place_and_goes_when_it_is_mended(editor):
    uri = opened(editor, "shapes.py", KERNEL)
    assert not editor.published[uri][-1][1]
    wrong = KERNEL.replace("T.gemm(As, Bs, acc)", "µ = 1; T.gemm(As, As, acc)")
    start = editor.change(uri, wrong)
    _, (d,) = editor.wait(uri, bool, after=start)
    assert d.code == "gemm-shape" and d.source == "tilelang" and d.severity == lsp.DiagnosticSeverity.Error
    line = wrong.splitlines()[d.range.start.line]
    assert line[d.range.start.character:d.range.end.character] == "T.gemm(As, As, acc)"  # columns are no bytes
    assert "expected: " in d.message and "hint: " in d.message
    start = editor.change(uri, KERNEL)
    editor.wait(uri, lambda found: not found, after=start)


def test_a_text_of_200_lines_is_answered_while_one_types(editor):
    assert len(LONG.splitlines()) >= 200
    uri = opened(editor, "long.py", LONG)
    times = []
    for k in range(5):
        start = editor.change(uri, LONG.replace("0.5", f"0.{k + 1}"))
        times.append(editor.wait(uri, after=start)[0] - start)
    assert min(times) < 20, times  # benchmarks/editor.py measures; here other tests run meanwhile


def test_a_file_that_hangs_never_blocks_completion(tmp_path):
    editor = Editor(tmp_path, seconds=4)  # the default of 1 is short beside other tests
    helper = "import time\n\n\ndef slow():\n    while True:\n        time.sleep(0.01)\n\n\n"
    text = helper + KERNEL.replace("        T.clear(acc)\n", "        slow()\n")
    uri = editor.open("hangs.py", text)
    editor.ask("text_document_completion", lsp.CompletionParams(**editor.at(uri, text, "T.copy", 2)))
    editor.change(uri, text + "\n")
    start = time.perf_counter()
    items = editor.ask("text_document_completion", lsp.CompletionParams(**editor.at(uri, text, "T.copy", 2))).items
    assert time.perf_counter() - start < 3 and len(items) > 100
    _, found = editor.wait(uri, lambda found: any(d.code == "late" for d in found))
    (late,) = [d for d in found if d.code == "late"]
    assert 3 <= late.range.start.line < 7 and "stopped after 4 s" in late.message
    editor.close()


def test_hover_says_shape_scope_layout_and_bytes(editor):
    uri = opened(editor, "hover.py", KERNEL)

    def hover(needle, offset=0):
        at = editor.ask("text_document_hover", lsp.HoverParams(**editor.at(uri, KERNEL, needle, offset)))
        return at.contents.value if at else ""

    assert "(64, 32) float16 in shared memory" in hover("As = ") and "bytes of shared memory, Layout(" in hover("As = ")
    assert "registers a thread, Fragment(" in hover("acc = ")
    assert "(128, 128) float16 in global memory" in hover("C = T.empty")
    assert "int32, pipelined loop of 4 steps" in hover("k in T.Pip") and "block index below 2" in hover("bx, by):")
    assert "wgmma" in hover("T.Kernel", 3) and "with M=128, N=128, K=128 assumed" in hover("def matmul", 5)
    assert "T.alloc_shared(" in hover("T.alloc_shared", 4) and "parallel loop of 64 steps" in hover("i, j in T.Par")


def test_completion_and_signatures(editor):
    text = KERNEL.replace("        T.clear(acc)\n", "        T.\n        T.copy(acc, \n")
    uri = editor.open("typing.py", text)  # it does not parse while one types
    items = editor.ask("text_document_completion", lsp.CompletionParams(**editor.at(uri, text, "        T.\n", 10))).items
    by = {i.label: i for i in items}
    assert by["gemm"].label_details.detail.startswith("(A")
    assert "T.gemm" in by["gemm"].documentation.value and "float16" in by and "alloc_fragment" in by
    got = editor.ask("text_document_signature_help", lsp.SignatureHelpParams(**editor.at(uri, text, "T.copy(acc, \n", 12)))
    assert got.signatures[0].label.startswith("T.copy(src")
    _, found = editor.wait(uri, bool)
    assert found[0].code == "syntax"


def test_inlay_hints_show_layouts_and_stages(editor):
    uri = opened(editor, "inlay.py", "# tilelang: arch=sm_80\n" + KERNEL)
    whole = lsp.Range(lsp.Position(0, 0), lsp.Position(99, 0))
    hints = editor.ask("text_document_inlay_hint", lsp.InlayHintParams(lsp.TextDocumentIdentifier(uri), whole))
    lines = ("# tilelang: arch=sm_80\n" + KERNEL).splitlines()
    shown = {lines[h.position.line].strip().partition(" ")[0]: h.label for h in hints}
    assert shown["As"].startswith("3 stages, 12288 bytes") and "swizzled" in shown["As"]
    assert shown["acc"] == "32 registers a thread" and shown["for"] == "stages: 3 of As, 3 of Bs"
    assert "128 threads, 24576 bytes of shared memory, mma" in shown["with"]


def test_definitions_of_macros_helpers_and_the_language(editor):
    parts = "import tilelang.language as T\n\n\n@T.macro\ndef add(x):\n    pass\n"
    (editor.folder / "parts.py").write_text(parts, encoding="utf-8")
    text = KERNEL.replace("import tilelang.language as T\n", "import tilelang.language as T\nfrom parts import add\n")
    text = text.replace("        scale(acc, 0.5)", "        scale(acc, 0.5)\n        add(acc)")
    uri = editor.open("go.py", text)

    def go(needle, offset=0):
        at = editor.ask("text_document_definition", lsp.DefinitionParams(**editor.at(uri, text, needle, offset)))
        return Path(at.uri).name, at.range.start.line

    assert go("scale(acc") == ("go.py", text.splitlines().index("def scale(tile, factor):"))
    assert go("add(acc)") == ("parts.py", 4)
    assert go("T.copy(A", 3)[0] == "tile.py"


def test_pages_of_a_kernel(editor):
    uri = opened(editor, "pages.py", "# tilelang: M=512 arch=sm_80\n" + KERNEL)
    at = lsp.Range(lsp.Position(15, 0), lsp.Position(15, 0))
    actions = editor.ask("text_document_code_action", lsp.CodeActionParams(
        lsp.TextDocumentIdentifier(uri), at, lsp.CodeActionContext([])))
    assert [a.title for a in actions] == [f"Show {x} of matmul" for x in ("tile program", "CUDA", "report")]
    for what, says in {"tile": "for k in T.Pipelined(", "source": "mma.sync", "report": "kernel matmul for cuda"}.items():
        if what == "report" and importlib.util.find_spec("nvidia") is None:
            continue
        page = editor.ask("workspace_execute_command", lsp.ExecuteCommandParams("tilelang.show", [uri, "matmul", what]))
        page = page if isinstance(page, dict) else page._asdict() if hasattr(page, "_asdict") else vars(page)
        assert says in page["text"] and "N=128, K=128 assumed" in page["text"] and page["title"].startswith("matmul")


def test_relative_imports_are_found(editor):
    folder = editor.folder / "package" / "kernels"
    folder.mkdir(parents=True)
    (folder.parent / "__init__.py").write_text("", encoding="utf-8")
    (folder.parent / "sizes.py").write_text("ROWS = 64\n", encoding="utf-8")
    (folder / "parts.py").write_text("import tilelang.language as T\n\n\n" + MACRO.replace("scale", "halve"), encoding="utf-8")
    head = HEAD.rstrip("\n") + "\n\nfrom ..sizes import ROWS\nfrom . import parts\nfrom .parts import halve\n\n\n"
    text = head + MATMUL.replace("(64, BK)", "(ROWS, BK)")
    text = text.replace("scale(acc, 0.5)", "halve(acc, 0.5)\n        parts.halve(acc, 2)")
    uri = opened(editor, "package/kernels/relative.py", text)
    assert not editor.published[uri][-1][1]
    at = editor.ask("text_document_definition", lsp.DefinitionParams(**editor.at(uri, text, "halve(acc")))
    assert Path(at.uri).name == "parts.py" and at.range.start.line == 4
    found = editor.settled(uri, text.replace(".sizes", ".size"))
    assert any("package.size" in d.message for d in found)


PROGRAM = HEAD + '''n = T.dynamic("n")


@tilelang.program
def attention(q: T.Tensor((n, 64), "float16"), k: T.Tensor((n, 64), "float16"), v: T.Tensor((n, 64), "float16")):
    scores = q @ k.T * 0.125
    weights = T.softmax(scores)
    return weights @ v
'''


def test_whole_tensor_programs_have_errors_shapes_and_pages(editor):
    uri = opened(editor, "program.py", PROGRAM)
    assert not editor.published[uri][-1][1]

    def hover(needle, offset=0):
        at = editor.ask("text_document_hover", lsp.HoverParams(**editor.at(uri, PROGRAM, needle, offset)))
        return at.contents.value if at else ""

    assert "(n, n) float16" in hover("scores =") and "(n, n) float16" in hover("weights =")
    assert "(n, 64) float16" in hover("v: T.Tensor")
    assert "kernel attention(" in hover("def attention", 5) and "sm_90a" in hover("def attention", 5)
    assert "exp(x) / sum(exp(x))" in hover("T.softmax", 3)
    for what, says in {"tile": "def attention", "source": "__global__"}.items():
        page = editor.ask("workspace_execute_command", lsp.ExecuteCommandParams("tilelang.show", [uri, "attention", what]))
        page = page if isinstance(page, dict) else page._asdict() if hasattr(page, "_asdict") else vars(page)
        assert says in page["text"], page["text"]
    wrong = PROGRAM.replace("weights @ v", "weights @ v.T")
    (d,) = editor.settled(uri, wrong)
    line = wrong.splitlines()[d.range.start.line]
    assert d.code == "program-shape" and line[d.range.start.character:d.range.end.character] == "weights @ v.T"


# ---- what an analysis runs ------------------------------------------------------------------------------------------
def test_only_kernels_and_what_they_need_run(tmp_path):
    mark = tmp_path / "mark"
    unused = f"\nimport pathlib\npathlib.Path({str(mark)!r}).write_text('x')\nHUGE = [0] * 10**9 * 10**9\n\n\n"
    text = KERNEL.replace("\n\n\n", unused, 1)
    text += "\nraise SystemExit(1)\nif __name__ == '__main__':\n    matmul(1, 2)\n"
    diagnostics, functions = found_in(text)
    assert diagnostics == [] and [f["name"] for f in functions] == ["matmul"] and not mark.exists()


EFFECTS = {
    "a file": "open({mark!r}, 'w')", "a file by its number": "__import__('os').open({mark!r}, 0o102)",
    "a process": "__import__('subprocess').run(['touch', {mark!r}])", "a shell": "__import__('os').system('touch {mark}')",
    "a connection": "__import__('socket').create_connection(('127.0.0.1', {port}))",
    "a folder": "__import__('os').mkdir({mark!r})", "removing": "__import__('os').remove(__import__('sys').argv[0])",
}


@pytest.mark.core
def test_an_analysis_has_no_effects(editor):
    mark, door = editor.folder / "mark", socket.create_server(("127.0.0.1", 0))
    door.setblocking(False)
    port = door.getsockname()[1]
    lines = [f"try:\n    SIZE = {code.format(mark=str(mark), port=port)}\nexcept PermissionError as e:\n    SIZE = 1 / 0"
             for code in EFFECTS.values()]
    for k, (what, line) in enumerate(zip(EFFECTS, lines)):
        text = KERNEL.replace("\n\n\n", f"\n{line}\n\n\n", 1).replace("BK: int = 32", "BK: int = 32 + 0 * SIZE")
        uri = editor.open(f"effect_{k}.py", text)
        _, found = editor.wait(uri, bool)
        assert any("ZeroDivisionError" in d.message for d in found), (what, found)
        assert not mark.exists()
    with pytest.raises(BlockingIOError):
        door.accept()
    door.close()


def test_the_guard_knows_what_opens_for_reading():
    guard("open", (__file__, "r", 0))
    guard("import", ("x",))
    with pytest.raises(PermissionError):
        guard("open", ("x", "r+", 0))


def test_values_of_comments_and_defaults_come_before_assumed_ones():
    text = KERNEL.replace("    M, N, K =", "    # tilelang: M=96 BK=16\n    M, N, K =")
    _, (f,) = found_in("# tilelang: N=72, M=5\n" + text)
    shapes = {b["name"]: b["text"] for b in f["buffers"]}
    assert f["assumed"] == {"K": 128} and "(96, 128)" in shapes["A"]
    assert "(64, 16)" in shapes["As"] and "(128, 72)" in shapes["B"]


def test_a_size_that_was_assumed_is_no_error_where_another_one_works():
    text = HEAD + '''@tilelang.jit
def rows(A, SIZE: int = 256):
    D = T.const("D")
    A: T.Tensor((64, D), "float32")
    B = T.empty((64, D), "float32")
    with T.Kernel(1, threads=128):
        s = T.alloc_shared((D // SIZE, 16), "float32")
        T.copy(A[0:D // SIZE, 0:16], s)
        T.copy(s, B[0:D // SIZE, 0:16])
    return B
'''
    diagnostics, (f,) = found_in(text)  # D = 128 gives a tile without rows
    assert diagnostics == [] and f["assumed"] == {"D": 1024} and f["layouts"]["s"]["short"].startswith("256 bytes")
    diagnostics, _ = found_in("# tilelang: D=128\n" + text)
    assert [d["severity"] for d in diagnostics] == [1]
    whole = text.replace("(D // SIZE, 16)", "(64, D)").replace("[0:D // SIZE, 0:16]", "")
    diagnostics, _ = found_in("# tilelang: D=1024\n" + whole)
    assert [d["code"] for d in diagnostics] == ["shared-memory"]


FACTORY = HEAD + '''def make({arguments}):
    @T.prim_func
    def main(A: T.Tensor((n,), dtype), B: T.Tensor((n,), dtype)):
        with T.Kernel(T.ceildiv(n, 128), threads=128) as bx:
            s = T.alloc_shared((128,), dtype)
            T.copy(A[bx * 128], s)
            T.copy(s, B[bx * 128])
    return main
'''


@pytest.mark.parametrize("arguments, comment, codes, says", [
    ("n, dtype='float32'", "", [], ""), ("n=64, dtype='float16'", "", [], ""),
    ("n, dtype", "", ["not-analysed"], "# tilelang: dtype="),
    ("n, dtype", "# tilelang: dtype=int8 n=300\n", [], ""), ("n, dtype", "# tilelang: dtype=int9\n", ["dtype-name"], ""),
])
def test_arguments_of_factories(arguments, comment, codes, says):
    diagnostics, functions = found_in(comment + FACTORY.format(arguments=arguments))
    assert [d["code"] for d in diagnostics] == codes or codes == ["dtype-name"] and len(diagnostics) == 1, diagnostics
    assert all(says in d["text"] for d in diagnostics) and functions[0]["name"] == "make"


ACTIVATED = HEAD + '''def double(x):
    return x * 2


def make(n, act{default}):
    @T.prim_func
    def main(A: T.Tensor((n,), "float32"), B: T.Tensor((n,), "float32")):
        with T.Kernel(T.ceildiv(n, 128), threads=128) as bx:
            for i in T.Parallel(128):
                B[bx * 128 + i] = act(A[bx * 128 + i])
    return main
'''


@pytest.mark.parametrize("default, comment, codes", [
    ("", "", ["not-analysed"]), ("=double", "", []), ("=T.exp", "", []), ("", "# tilelang: act=double\n", []),
    ("", "# tilelang: act=T.exp\n", []), ("=7", "", ["type-error"]), ("", "# tilelang: act=no_such\n", ["type-error"]),
])
def test_a_function_is_no_number_among_the_arguments_of_a_factory(default, comment, codes):
    diagnostics, (f,) = found_in(comment + ACTIVATED.format(default=default))
    assert len(diagnostics) == len(codes) and f["name"] == "make", diagnostics
    assert all(d["severity"] == (3 if d["code"] == "not-analysed" else 1) for d in diagnostics), diagnostics
    assert codes != ["not-analysed"] or diagnostics[0]["code"] == "not-analysed" and "`act`" in diagnostics[0]["text"]


@pytest.mark.parametrize("comment, codes", [("", ["not-analysed"]), ("# tilelang: x=int32[6x4]\n", []),
                                            ("# tilelang: x=float32[6x4]\n", ["program-type"])])
def test_a_comment_gives_the_shape_of_a_parameter_of_a_program(comment, codes):
    text = comment + HEAD + "@tilelang.program\ndef f(x, k=2):\n    y = x.sum(1)\n    return y / k, x << k\n"
    diagnostics, (f,) = found_in(text)
    assert [d["code"] for d in diagnostics] == codes, diagnostics
    assert codes or {b["name"]: b["text"] for b in f["buffers"]}["y"].startswith("(6,) int32")


@pytest.mark.parametrize("text, code, line", [
    (KERNEL.replace("scale(acc, 0.5)", "scal(acc, 0.5)"), "", 26), (KERNEL.replace("T.clear(acc)", "1 / 0"), "", 21),
    (KERNEL.replace("        tile[i, j] *= factor", "        T.gem(tile)"), "", 8), ("def f(:\n", "syntax", 1),
    ("import tilelang\0", "syntax", 1), ("import no_such_module as np\n" + KERNEL.replace("0.5", "np.pi"), "python", 1),
    (KERNEL + "\n\n@tilelang.jit\ndef f(x):\n    return f\n", "", 32), (KERNEL.replace("return C", "return 7"), "", 0),
])
def test_every_error_has_a_line_of_the_file(text, code, line):
    diagnostics, _ = found_in(text)
    assert diagnostics and (not code or diagnostics[0]["code"] == code), diagnostics
    assert not line or diagnostics[0]["line"] == line, diagnostics


def test_warnings_are_shown_at_their_lines():
    text = KERNEL.replace("        T.clear(acc)\n", "")
    diagnostics, _ = found_in(text)
    assert [d["severity"] for d in diagnostics] == [2] and diagnostics[0]["code"] == "uninitialized"


def test_decorators_of_others_are_none():
    tree = ast.parse("import numba\nfrom tilelang import jit as compiled\nimport tilelang as tl\n@numba.jit\ndef a(): pass\n"
                     "@compiled(out_idx=[0])\ndef b(): pass\n@tl.jit\ndef c(): pass\ndef d(): pass\n")
    assert [n.name for n in texts.outline(tree).kernels] == ["b", "c"]


@pytest.mark.parametrize("column, word", [(0, "a"), (4, "T"), (6, "T.copy"), (9, "T.copy"), (11, "x"), (2, "")])
def test_the_word_under_a_column(column, word):
    assert texts.word_at("a = T.copy(x)", column) == word


# ---- the extension --------------------------------------------------------------------------------------------------
def test_the_extension_packages_without_network(tmp_path):
    root = Path(__file__).resolve().parents[2] / "editors" / "vscode"
    out = tmp_path / "tilelang.vsix"
    subprocess.run([sys.executable, str(root / "package.py"), str(out)], check=True, timeout=60)
    with zipfile.ZipFile(out) as z:
        names = z.namelist()
        wanted = {"extension.vsixmanifest", "[Content_Types].xml", "extension/package.json", "extension/extension.js"}
        assert wanted <= set(names)
    if shutil.which("node"):
        subprocess.run(["node", "--check", str(root / "extension.js")], check=True, timeout=60)
