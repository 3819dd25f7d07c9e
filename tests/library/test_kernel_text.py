"""The library's kernels are short programs in the language, and its functions say what they take."""

import ast
import inspect
from pathlib import Path

import pytest

import tilelang.library

FOLDER = Path(tilelang.library.__file__).parent
MOST_LINES = 80


def kernels():
    """(file, name of the factory, lines of the factory with the kernel in it, lines of the kernel).  A macro in a factory is
    the kernel of several programs."""
    for file in sorted(FOLDER.rglob("*.py")):
        for f in ast.parse(file.read_text()).body:
            for x in ast.walk(f) if isinstance(f, ast.FunctionDef) else ():
                if isinstance(x, ast.FunctionDef) and x is not f and any(
                        name in ast.unparse(d) for d in x.decorator_list for name in ("prim_func", "T.macro")):
                    yield file.name, f.name, f.end_lineno - f.lineno + 1, x.end_lineno - x.lineno + 1


def test_kernels_are_short():
    found = {}
    for _, name, whole, kernel in kernels():
        found[name] = (whole, max(kernel, found.get(name, (0, 0))[1]))
    assert {"gemm", "gemm_two_level", "gemm_split", "gemm_grouped", "dense_attention", "packed_attention",
            "decode_attention"} <= set(found)
    assert all(whole <= MOST_LINES and 3 <= kernel < whole for whole, kernel in found.values()), found


@pytest.mark.parametrize("name", ["matmul", "grouped_matmul", "flash_attention", "flash_decode"])
def test_functions_say_what_they_take(name):
    function = getattr(tilelang.library, name)
    text = inspect.getdoc(function)
    assert "Raises" in text and ">>>" in text
    named = [p for p in inspect.signature(function).parameters if p not in ("a", "b", "q", "k", "v", "target",
                                                                           "execution_backend")]
    assert [p for p in named if p not in text] == []
