"""A file that is written again: each function is traced with the text that it was compiled from, or not at all."""

import __future__
import doctest
import importlib
import importlib.util
import linecache
import os
import sys
import types
import zipfile

import numpy as np
import pytest

import tilelang
import tilelang.language as T

HEAD = "import tilelang\nimport tilelang.language as T\n"
PLAIN = HEAD + """
def build(n):
    @T.prim_func
    def kernel(A: T.Tensor((n,), "int32")):
        with T.Kernel(1, threads=32):
            A[0] = VALUE
    return kernel
"""
LAZY = PLAIN.replace("def build", '@tilelang.jit(execution_backend="tile")\ndef build')
EAGER = HEAD + """
@tilelang.jit(execution_backend="tile")
def eager(A):
    N = T.const("N")
    A: T.Tensor((N,), "int32")
    with T.Kernel(1, threads=32):
        A[0] = VALUE
"""
MACRO = HEAD + """
@T.macro
def put(A):
    A[0] = VALUE
"""
BESIDE = PLAIN + """
@tilelang.jit(execution_backend="tile")
def beside(n):
    return build(n)
"""


@pytest.fixture
def load(tmp_path):
    """load(text, **values): the module of a text, always from one file."""
    path = tmp_path / "edited_kernels.py"

    def load(text, value, seconds=None):
        path.write_text(text.replace("VALUE", value))
        if seconds is not None:
            os.utime(path, (seconds, seconds))
        spec = importlib.util.spec_from_file_location("edited_kernels", path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    load.path = path
    return load


def result(function, *args):
    a = np.zeros(4, np.int32)
    if isinstance(function, tilelang.jit(lambda: 0).__class__):
        function(a) if function.__name__ == "eager" else function(4)(a)
    else:
        tilelang.compile(function(4), execution_backend="tile")(a)
    return a[0]


def by_macro(module):
    @tilelang.jit(execution_backend="tile")
    def eager(A):
        N = T.const("N")
        A: T.Tensor((N,), "int32")
        with T.Kernel(1, threads=32):
            module.put(A)

    return result(eager)


KINDS = {"a plain factory": (PLAIN, lambda m: result(m.build)), "a lazy function": (LAZY, lambda m: result(m.build)),
         "an eager function": (EAGER, lambda m: result(m.eager)), "a macro": (MACRO, by_macro),
         "a factory beside a lazy function": (BESIDE, lambda m: result(m.beside))}
DECORATED = [k for k in KINDS if k != "a plain factory"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_second_text_in_one_file_was_compiled_as_the_first(kind, load, monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    text, run = KINDS[kind]
    assert [run(load(text, value)) for value in ("1", "5", "A[1] + 7")] == [1, 5, 7]


@pytest.mark.parametrize("kind", KINDS)
def test_two_texts_of_one_file_live_side_by_side(kind, load):
    text, run = KINDS[kind]
    modules = [load(text, value) for value in ("1", "5")]
    if kind == "a plain factory":
        assert run(modules[1]) == 5
        with pytest.raises(ValueError, match="the source of `kernel` has changed since Python imported it") as e:
            run(modules[0])
        assert f"{load.path}:5:" in str(e.value) and "importlib.reload" in str(e.value)
    else:
        assert run(modules[0]) == 1 and run(modules[1]) == 5 and run(modules[0]) == 1


@pytest.mark.parametrize("kind", DECORATED)
@pytest.mark.parametrize("change", ["other", "nothing", "lines", "deleted"])
def test_a_file_that_changes_between_decoration_and_call(kind, change, load):
    text, run = KINDS[kind]
    module = load(text, "1")
    if change == "deleted":
        os.remove(load.path)
    else:
        load.path.write_text({"other": text.replace("VALUE", "5"), "nothing": "",
                              "lines": "# a line\n" * 3 + text.replace("VALUE", "6")}[change])
    assert run(module) == 1


def test_a_plain_factory_whose_lines_moved(load):
    module = load(PLAIN, "1")
    load.path.write_text("# one more line\n\n" + PLAIN.replace("VALUE", "1"))
    assert result(module.build) == 1
    module = load(PLAIN + PLAIN.replace("build", "other").replace("VALUE", "2"), "1")
    load.path.write_text(PLAIN.replace("build", "other").replace("VALUE", "2") + PLAIN.replace("VALUE", "1"))
    assert result(module.build) == 1 and result(module.other) == 2


@pytest.mark.parametrize("new", ["", "A[0] + 2", "1.5", "-1"])
def test_an_edited_plain_factory_is_refused(new, load):
    """The code of `A[0] + 1` and `A[0] + 2` differs in its constants alone."""
    module = load(PLAIN, "A[0] + 1" if new.startswith("A") else "1")
    load.path.write_text(new and PLAIN.replace("VALUE", new))
    linecache.clearcache()
    with pytest.raises(ValueError, match="source-changed" if new else "source"):
        result(module.build)


def test_a_reloaded_module_is_traced_with_its_new_text(load, monkeypatch):
    monkeypatch.syspath_prepend(str(load.path.parent))
    for text, of in ((PLAIN, "build"), (LAZY, "build"), (EAGER, "eager")):
        load.path.write_text(text.replace("VALUE", "1"))
        module = importlib.import_module("edited_kernels")
        try:
            assert result(getattr(module, of)) == 1
            load.path.write_text("# more\n" + text.replace("VALUE", "5"))
            assert result(getattr(importlib.reload(module), of)) == 5
        finally:
            del sys.modules["edited_kernels"]


def test_an_annotation_in_a_body_is_of_the_text_at_decoration(load):
    """Python leaves it out of the code, which is the same for both texts."""
    text = EAGER.replace('"int32"', '"VALUE"')
    narrow, wide = load(text.replace("= VALUE", "= 3"), "int32"), load(text.replace("= VALUE", "= 3"), "int64")
    for module, dtype in ((narrow, np.int32), (wide, np.int64)):
        a = np.zeros(4, dtype)
        module.eager(a)
        assert a[0] == 3


def test_byte_code_of_an_older_text_is_refused(load, monkeypatch):
    """Python takes a file for unchanged if its size and the second of its last change are the same."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    load(PLAIN, "1", 1_000_000)
    old = load(PLAIN, "5", 1_000_000)
    with pytest.raises(ValueError, match="source-changed") as e:
        result(old.build)
    assert "__pycache__" in str(e.value)


def test_assertions_that_pytest_rewrites():
    def build(n, k):
        @T.prim_func
        def kernel(A: T.Tensor((n,), "int32")):
            assert k > 1 and n == 4, "sizes"
            with T.Kernel(1, threads=32):
                A[0] = k
        return kernel

    assert result(lambda n: build(n, 3)) == 3


class Rewriting(importlib.machinery.SourceFileLoader):
    """An import hook that changes programs."""

    def source_to_code(self, data, path, **_):
        import ast

        tree = ast.parse(data)
        for f in [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)]:
            f.body.insert(0, ast.fix_missing_locations(ast.copy_location(ast.parse("checked = True").body[0], f.body[0])))
        return compile(tree, path, "exec", dont_inherit=True)


def test_a_program_that_an_import_hook_changes(load):
    load.path.write_text(PLAIN.replace("VALUE", "5"))
    spec = importlib.util.spec_from_file_location("hooked", load.path, loader=Rewriting("hooked", str(load.path)))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert result(module.build) == 5


def test_a_module_in_an_archive(tmp_path, monkeypatch):
    with zipfile.ZipFile(tmp_path / "all.zip", "w") as z:
        z.writestr("zipped_kernels.py", BESIDE.replace("VALUE", "5"))
    monkeypatch.syspath_prepend(str(tmp_path / "all.zip"))
    import zipped_kernels

    assert result(zipped_kernels.build) == result(zipped_kernels.beside) == 5


@pytest.mark.parametrize("flags", [0, __future__.annotations.compiler_flag])
def test_cells_of_one_name(flags):
    """Text that a tool keeps in the line cache, as notebooks do.  flags: of a cell before."""
    made = []
    for value in ("1", "5"):
        text = LAZY.replace("VALUE", value)
        names = {"__name__": "cell"}
        linecache.cache["<cell>"] = len(text), None, text.splitlines(keepends=True), "<cell>"
        exec(compile(text, "<cell>", "exec", flags), names)
        made.append(names["build"])
    assert [result(f) for f in made] == [1, 5]


def test_an_example_of_doctest(tmp_path):
    text = ">>> " + BESIDE.replace("VALUE", "5").strip().replace("\n", "\n... ").replace("... import", ">>> import")
    text = text.replace("... \n... def", "... \n>>> def").replace("... \n... @tilelang", "... \n>>> @tilelang")
    text += "\n...\n>>> import numpy as np\n>>> a = np.zeros(4, np.int32)\n>>> beside(4)(a)\n>>> int(a[0])\n5\n"
    test = doctest.DocTestParser().get_doctest(text, {}, "kernels", "kernels", 0)
    assert doctest.DocTestRunner().run(test).failed == 0


def test_a_cell_with_a_magic_had_no_source(monkeypatch):
    """IPython compiles the rest of such a cell under a name of its own, and has its text in its history only."""
    history = []
    shell = types.SimpleNamespace(history_manager=types.SimpleNamespace(input_hist_raw=history))
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: shell))
    for value in ("1", "5"):
        text = EAGER.replace("VALUE", value)
        history += ["%%time\n" + text, "print(1)"]
        names = {"__name__": "__main__"}
        exec(compile(text, "<timed exec>", "exec"), names)
        assert result(names["eager"]) == int(value)
