"""Programs that a new user might write and that mean nothing: each is refused by a kind, at its line, or meant as written."""

import linecache

import numpy as np
import pytest

import tilelang
import tilelang.language as T
from tilelang.errors import TileLangError

HEAD = "import functools, math\nimport numpy as np\nimport tilelang, tilelang.language as T\nf32 = 'float32'\n"
PARAMS = "X: T.Tensor((16, 16), f32), I: T.Tensor((32,), 'int32'), n: T.int32"
KERNEL = "@T.prim_func\ndef main({}):\n    with T.Kernel(2, threads=32) as bx:\n        tx = T.get_thread_binding()\n{}"
EAGER = "@tilelang.jit(target='cpu')\ndef k({}):\n{}{}\n"
BODY = "N = T.const('N')\nA: T.Tensor((N,), f32)\nwith T.Kernel(1):\n    A[0] = 1.0"


def indented(text, by):
    return "".join(f"{' ' * by}{line}\n" for line in text.splitlines())


def with_head(text):
    """The program with its imports, torch where it is used."""
    if "torch." not in text:
        return HEAD + text
    pytest.importorskip("torch")
    return HEAD.replace("as np\n", "as np, torch\n") + text


def refused(text, kind, name):
    """The error of a program: of this kind, with all that an error says, at a line of the program."""
    linecache.cache[name] = (len(text), None, text.splitlines(True), name)
    with pytest.raises(TileLangError) as e:
        exec(compile(text, name, "exec"), {"__name__": "malformed"})
    shown = str(e.value)
    assert e.value.kind == kind, shown
    assert f"--> {name}:" in shown and "^" in shown and e.value.expected and e.value.found and e.value.hint, shown
    return e.value


# Statements of a kernel's body.
STATEMENTS = {
    "yield from [1]": "unsupported-syntax",
    "class Q:\n    z = 1": "nested-function",
    "def g(x):\n    return x\nX[0, 0] = g(1.0)": "nested-function",
    "global zz\nzz = X[0, 0]": "unsupported-syntax",
    "match tx:\n    case 0:\n        X[0, 0] = 1.0": "condition",
    "while True:\n    X[0, 0] = 1.0": "infinite-loop",
    "while X:\n    X[0, 0] = 1.0": "condition",
    "for i in [1, 2, 3]:\n    X[0, i] = 1.0": "for-iterator",
    "for i, j in zip((1, 2), (3, 4)):\n    X[i, j] = 1.0": "for-iterator",
    "for i in 5:\n    X[0, i] = 1.0": "for-iterator",
    "for i in None:\n    X[0, 0] = 1.0": "for-iterator",
    "for i, j in T.Parallel(4):\n    X[i, j] = 1.0": "unpack",
    "for i in T.Parallel(4, 4):\n    X[i, 0] = 1.0": "unpack",
    "for i in range(4):\n    X[0, i] = 1.0\nelse:\n    X[0, 0] = 1.0": "unsupported-syntax",
    "if X == 1:\n    X[0, 0] = 1.0": "condition",
    "flag = T.alloc_local((1,), 'int32')\nflag[0] = 1\nif 1 != flag:\n    X[0, 0] = 1.0": "condition",
    "if X[0, 0] == X:\n    X[0, 0] = 1.0": "condition",
    "if X[0, 0] == 'a':\n    X[0, 0] = 1.0": "condition",
    "if 0 < tx == 'a':\n    X[0, 0] = 1.0": "condition",
    "X += 1": "whole-buffer-assignment",
    "X.y = 3": "unsupported-syntax",
    "a, b = 1, 2, 3": "unpack",
    "a, b = X": "unpack",
    "return X[0, 0]": "return-value",
    "with T.Kernel(2):\n    X[0, 0] = 1.0": "nested-kernel",
    "T.import_source(3)": "import-source",
    "main(X)": "undefined-name",
}


@pytest.mark.parametrize("text", STATEMENTS)
def test_statements_that_mean_nothing(text):
    name = f"<statement {list(STATEMENTS).index(text)}>"
    refused(with_head(KERNEL.format(PARAMS, indented(text, 8))), STATEMENTS[text], name)


# Values that are no values of a kernel, and Python functions that need them while tracing.
VALUES = ("'a'", "None", "[1.0]", "X", "1j", "np.ones(3)", "torch.ones(3)", "T", "X[0, 1] + 'a'", "X[0, 1] + None", "X + 1",
          "X[0, 1] ** 2", "X[0, 1] @ X[0, 2]", "abs(X[0, 1])", "int(X[0, 1])", "float(X[0, 1])", "max(X[0, 1], X[0, 2])",
          "round(X[0, 1])", "len(X)", "math.sqrt(X[0, 1])", "np.sqrt(X[0, 1])", "torch.exp(X[0, 1])", "X[0, 1] << 2",
          "~X[0, 1]", "undefined", "T.copyy(X)", "X.foo()", "X[0, 0].foo()", "X[0, 0](3)", "X(0, 0)", "X['a', 0]",
          "X[None, 0]", "X[1.5, 0]", "X[..., 0]", "X[2**80, 0]", "X[0, 0, 0]", "X[0]", "X[X[0, 0], 0]", "I[1] // 0",
          "I[1] / I[2]", "2**100")


@pytest.mark.parametrize("value", VALUES)
def test_values_that_are_none(value):
    text = with_head(KERNEL.format(PARAMS, f"        X[0, 0] = {value}\n")) + "tilelang.lower(main, target='cpu')\n"
    linecache.cache["<value>"] = (len(text), None, text.splitlines(True), "<value>")
    with pytest.raises(TileLangError) as e:
        exec(compile(text, "<value>", "exec"), {"__name__": "malformed"})
    shown = str(e.value)
    assert "--> <value>:9:" in shown and e.value.expected and e.value.found and e.value.hint, shown


FUNCTIONS = {  # whole modules
    "@T.prim_func\nclass Main:\n    x = 1\n": "not-a-function",
    "@T.macro\nclass Main:\n    x = 1\n": "not-a-function",
    "T.prim_func(print)\n": "not-a-function",
    "T.prim_func('main')\n": "not-a-function",
    "T.prim_func()(None)\n": "not-a-function",
    "T.macro(3)\n": "not-a-function",
    "@T.prim_func\n@staticmethod\ndef main(X: T.Tensor((4,), f32)):\n    pass\n": "not-a-function",
    "main = T.prim_func(lambda X: X)\n": "source-unavailable",
    "@tilelang.jit\nclass Main:\n    x = 1\nMain()\n": "jit-not-a-function",
    "tilelang.jit(len)([1])\n": "jit-not-a-function",
    "tilelang.jit(3)\n": "jit-not-a-function",
    "def f(A, n):\n    A: T.Tensor((4,), f32)\n    with T.Kernel(1):\n        A[0] = n\n"
    "tilelang.jit(functools.partial(f, n=3))(np.ones(4, np.float32))\n": "jit-not-a-function",
    "@T.prim_func\nasync def main(X: T.Tensor((4,), f32)):\n    with T.Kernel(1):\n        X[0] = 1.0\n": "source-unavailable",
    "@T.prim_func\ndef main(X: T.Tensor((4,), f32)):\n    with T.Kernel(1):\n        yield 3\n": "unsupported-syntax",
    "def outer():\n    q = 1\n    @T.prim_func\n    def main(X: T.Tensor((4,), f32)):\n        nonlocal q\n        q = X[0]\n"
    "outer()\n": "unsupported-syntax",
    "@T.macro\ndef m(X):\n    q(X)\n@T.macro\ndef q(X):\n    m(X)\n"
    + KERNEL.format(PARAMS, "        m(X)\n"): "macro-recursion",
    KERNEL.format("X: T.Tensor((2**70,), f32)", "        X[0] = 1.0\n"): "tensor-shape",
    KERNEL.format("X: T.Tensor((-4,), f32)", "        X[0] = 1.0\n"): "tensor-shape",
    KERNEL.format("X: T.Tensor(('a',), f32)", "        X[0] = 1.0\n"): "tensor-shape",
    KERNEL.format("X: T.Tensor((4,), 'float31')", "        X[0] = 1.0\n"): "dtype-name",
    KERNEL.format("X: 3", "        pass\n"): "parameter-annotation",
    KERNEL.format("X", "        pass\n"): "parameter-missing",
    KERNEL.format("*X: T.Tensor((4,), f32)", "        pass\n"): "parameter-annotation",
    EAGER.format("A", indented("with T.Kernel(1):\n    A[0] = 1.0", 4), "k(np.ones(4, np.float32))"): "eager-annotation",
    EAGER.format("A", "    pass\n", "k(torch.ones(4))"): "eager-annotation",
    EAGER.format("A", indented(BODY, 4), "import warnings\nwarnings.simplefilter('ignore')\n"
                 "k(torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8))"): "kernel-argument",
    EAGER.format("A", indented(BODY, 4), "k(torch.ones(3, device='meta'))"): "kernel-argument",
    EAGER.format("A", indented(BODY + "\nreturn 3", 4), "k(np.ones(4, np.float32))"): "return-value",
    "tilelang.compile('main')\n": "compile-not-a-program",
    "tilelang.par_compile(3)\n": "compile-not-a-program",
    "tilelang.par_compile([3])\n": "compile-not-a-program",
    "tilelang.first_fitting(lambda n: n, 3)\n": "compile-not-a-program",
}


@pytest.mark.parametrize("text", FUNCTIONS, ids=range(len(FUNCTIONS)))
def test_functions_that_are_none(text):
    refused(with_head(text), FUNCTIONS[text], f"<module {list(FUNCTIONS).index(text)}>")


def test_what_python_compares_by_identity_is_still_compared():
    """Buffers with None, and dtypes with strings, are known while tracing."""
    @T.prim_func
    def main(X: T.Tensor((4,), "float32"), Y: T.Tensor((4,), "float32")):
        with T.Kernel(1, threads=32):
            if X != None and X.dtype == "float32":  # noqa: E711
                X[0] = 1.0
            if Y == None:  # noqa: E711
                X[1] = 1.0

    x, y = np.zeros(4, np.float32), np.zeros(4, np.float32)
    tilelang.compile(main, target="cpu", execution_backend="tile")(x, y)
    assert x.tolist() == [1, 0, 0, 0]
