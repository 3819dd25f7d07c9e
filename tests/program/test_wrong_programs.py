"""Wrong programs end in an error of a kind at the user's line, with a caret, and say what to do."""

import linecache

import numpy as np
import pytest

import tilelang
import tilelang.language as T
from tilelang.errors import TileLangError

A, V, I, M = (f"T.Tensor({s})" for s in ('(4, 5), "float32"', '(5,), "float32"', '(4,), "int32"', '(4, 5), "bool"'))
D = 'T.Tensor((T.dynamic("n"), 5), "float32")'
WRONG = [  # parameters, statements, kind, what the caret's line holds, a fragment of the text
    (f"x: {A}, i: {I}", "return x + i", "program-shape", "x + i", "(4, 5) and (4,)"),
    (f"x: {A}, y: {D}", "return x + y", "program-shape", "x + y", "not known to be equal"),
    (f"x: {A}, w: {A}", "return x @ w", "program-shape", "x @ w", "expected: 5 rows on the right"),
    (f"x: {A}", "return np.float32(2) @ x", "program-shape", "np.float32(2) @ x", "tensors with axes"),
    (f"x: {A}, v: {V}", "return T.concat([x, v])", "program-shape", "T.concat", "cannot be joined"),
    (f"x: {A}", "return T.concat(x)", "program-operand", "T.concat", "T.concat([a, b])"),
    (f"x: {A}", "return x.split(3)", "program-shape", "x.split", "a divisor of 5"),
    (f"x: {A}", "return T.group_norm(x, 2)", "program-shape", "T.group_norm", "channels that the groups divide"),
    (f"x: {A}", "return T.broadcast_to(x, (4, 6))", "program-shape", "T.broadcast_to", "(4, 6)"),
    (f"x: {A}", "return T.pad(x, [(1, -1)])", "program-shape", "T.pad", "(before, after)"),
    (f"x: {A}", "return x & 1", "program-type", "x & 1", "bool or integers"),
    (f"x: {A}", "return ~x", "program-type", "~x", "bool or integers"),
    (f"m: {M}", "return T.exp(m) << 1", "program-type", "T.exp(m) << 1", "integers"),
    (f"x: {A}", "return T.any(x)", "program-type", "T.any", "x != 0"),
    (f"x: {A}", "return T.where(x, 1, 0)", "program-type", "T.where", "T.where(x != 0, a, b)"),
    (f"i: {I}", "return i + (1 << 40)", "program-type", "1 << 40", "does not fit int32"),
    (f"x: {A}", 'return x.astype("float31")', "dtype-name", "float31", "did you mean"),
    (f"x: {A}", "return x.sum(2)", "program-axis", "x.sum", "from -2 to 1"),
    (f"x: {A}", "return x.sum((0, -2))", "program-axis", "x.sum", "twice"),
    (f"x: {A}", "return x.transpose(0, 0)", "program-axis", "x.transpose", "swapaxes"),
    (f"x: {A}", "return T.topk(x, 6)", "program-axis", "T.topk", "from 1 to 5"),
    (f"x: {A}", "return x.sum()[0]", "program-index", "x.sum()[0]", "at most 0 indices"),
    (f"x: {A}", 'return T.einsum("ij,jk->ik", x)', "program-einsum", "T.einsum", "2 tensors for 2 terms"),
    (f"x: {A}", 'return T.einsum("ii->i", x)', "program-einsum", "T.einsum", "each letter once"),
    (f"x: {A}", 'return T.einsum("ij->ik", x)', "program-einsum", "T.einsum", "letters of the operands"),
    (f"x: {A}", 'return T.einsum("i->i", x)', "program-einsum", "T.einsum", "2 letters"),
    (f"x: {A}", 'return T.einsum("ij", x)', "program-einsum", "T.einsum", '"mk,kn->mn"'),
    (f"x: {A}", "return x.reshape(7, 3)", "program-reshape", "x.reshape", "20 elements"),
    (f"x: {A}", "return x.reshape(4, 2.5)", "program-reshape", "x.reshape", "`2.5`"),
    (f"x: {A}", "return x[1.0]", "program-index", "x[1.0]", "`1.0`"),
    (f"x: {A}", "return x[0, 0, 0]", "program-index", "x[0, 0, 0]", "at most 2"),
    (f"x: {A}, i: {I}", "return x[: i[0]]", "program-data-shape", "x[: i[0]]", "bounds of slices"),
    (f"x: {A}, i: {I}", "return T.zeros((i[0],)) + x", "program-data-shape", "T.zeros", "x.shape[0]"),
    (f"x: {A}, i: {I}", "return T.topk(x, i[0])", "program-data-shape", "T.topk", "a Python number"),
    (f"x: {A}", "return x if x.sum() else -x", "program-condition", "x.sum()", "T.where"),
    (f"x: {A}", "return x * (0 < x < 1)", "program-condition", "0 < x < 1", "&"),
    (f"x: {A}", "return x + float(x.sum())", "program-condition", "float", "known while"),
    (f"x: {A}, i: {I}", "return [x[k] for k in range(i[0])]", "program-condition", "range", "T.loop"),
    (f"x: {A}", "return x + np.asarray(x)", "program-condition", "np.asarray", "T.exp(x)"),
    (f"x: {A}", "return max(x, x * 2)", "program-condition", "max", "T.where"),
    (f"x: {D}", 'return x + T.iota(T.dynamic("m"))[:, None]', "program-sizes", "T.iota", "which no parameter has"),
    (f"x: {D}", "return [r for r in x]", "program-size", "x", "the size n"),
    (f"x: {D}", "return x[:64]", "", "", ""),
    (f"x: {D}", "return x if x.shape[0] > 64 else -x", "program-size", "x.shape[0] > 64", "T.where"),
    (f"x: {A}", "x[0] = 0\nreturn x", "program-assignment", "x[0]", "T.pad"),
    (f"x: {A}", "return x.sofmax()", "program-name", "x.sofmax", "`softmax`"),
    (f"x: {A}", "return T.laplace(x)", "program-name", "laplace", "laplace"),
    (f"x: {A}", "return sofmax(x)", "program-name", "sofmax", "T.softmax"),
    (f"x: {A}", "return x + np.ones((4, 5))", "program-operand", "np.ones", "a parameter of the program"),
    (f"x: {A}", 'return x + "1"', "program-operand", '"1"', "`'1'`"),
    (f"x: {A}", "return x + [1, 2, 3, 4, 5]", "program-operand", "[1, 2", "a list"),
    (f"x: {A}", "return T.exp(2.0) * x", "program-operand", "T.exp(2.0) * x", "math.exp(2.0)"),
    (f"x: {A}", "return x + None", "program-operand", "None", "`None`"),
    (f"x: {A}", 'return "x"', "program-result", "def f", "`'x'`"),
    (f"x: {A}", "return ()", "program-result", "def f", "no tensor"),
    (f"x: {A}", "return x, T.sort(x)", "program-result", "def f", "a tuple as result 1"),
    (f"x: {A}", "return f(x)", "program-cycle", "f(x)", "T.loop"),
    (f"x: {A}", "def g(y):\n    return g(y + 1)\nreturn g(x)", "program-cycle", "def f", "without end"),
    (f"x: {A}", "return T.loop(lambda s, r: s + r, x[0], x)", "program-loop", "T.loop", "(new state, result)"),
    (f"x: {A}", "return T.loop(lambda s, r: (s[1:], r), x[0], x)", "program-loop", "T.loop", "(4,)"),
    (f"x: {A}, v: {V}", "return T.loop(lambda s, r: (s, s), x[0], (x, v))", "program-loop", "T.loop", "one length"),
    (f"x: {A}", "return T.tile(x)", "program-tile", "T.tile", "@T.prim_func"),
    (f"x: {A}, i: {I}", 'return T.quantised(i, x, "int4")', "program-quantised", "T.quantised", "bytes"),
    (f"x: {A}", "return T.gather(x, x)", "program-gather", "T.gather", "integers"),
    (f"x: {A}, i: {I}", "return T.take_along(x, i)", "program-gather", "T.take_along", "but for axis 1"),
    (f"x: {A}", "return x.windows(9, 1)", "program-windows", "x.windows", "at most 5"),
    (f"x: {A}", "return T.softmax(x, dim=1)", "program-option", "T.softmax", "an axis is `axis`"),
    (f"x: {A}", "return x.sum(0, keepdim=True)", "program-option", "x.sum", "did you mean `keepdims`?"),
    (f"x: {A}", "return x.exp(1, 2)", "program-option", "x.exp", "T.exp(x)"),
    (f"x: {A}", "return T.pad(x, 1)", "program-option", "T.pad", "T.pad(x, widths, value=0)"),
    (f"x: {A}", "return T.group_norm(x, 0)", "program-option", "T.group_norm", "by zero"),
    (f"x: {A}", "return T.max(x, x, axis=0)", "program-option", "T.max", "beside two tensors"),
    (f"x: {A}", 'return T.gelu(x, "sigmoid")', "program-option", "T.gelu", '"tanh"'),
    (f"x: {A}", "return x[..., 0, ...]", "program-index", "x[..., 0, ...]", "twice"),
    (f"x: {A}", "return T.pad(x, (1, 1), x)", "program-operand", "T.pad", "a number of float32"),
    (f"x: {A}", "return np.exp(x)", "program-condition", "np.exp(x)", "T.exp(x)"),
    (f"x: {A}", "return torch.exp(x) if torch else np.exp(x)", "program-condition", "exp(x)", ".exp"),
    (f"x: {A}", "return T.full((2,), x)", "program-shape", "T.full", "do not broadcast"),
    (f"x: {A}", "return T.one_hot(x, 3)", "program-gather", "T.one_hot", "takes integers"),
    (f"x: {A}", "del x[0]\nreturn x", "program-assignment", "x[0]", "T.pad"),
    (f"x: {A}", "return T.windows(x, 2, 1, 0)", "program-windows", "T.windows", "numbers from 1 on"),
    (f"x: {A}", "return T.zeros(-3)", "program-reshape", "T.zeros", "the size -3"),
    (f"x: {A}", "return x.flatten(1, 0)", "program-axis", "x.flatten", "from axis 1 on"),
    (f"x: {A}", "return T.loop(lambda s: (s, s), x[0], x)", "program-loop", "T.loop", "too many positional arguments"),
    (f"x: {A}", "return T.loop(3, x[0], x)", "program-loop", "T.loop", "a function"),
    (f"x: {A}", "return T.topk(x, 2) + 1", "program-python", "T.topk", "(values, indices)"),
    (f"x: {A}", "return T.sort(x).sum()", "program-python", "T.sort", "no attribute 'sum'"),
    (f"x: {A}", "v, i = x.max(1)\nreturn v", "program-python", "v, i", "a reduction gives one tensor"),
    (f"x: {A}", "a, b, c = x.shape\nreturn x", "program-python", "a, b, c", "expected 3"),
    (f"x: {A}", "return x.shape[3] + x", "program-python", "x.shape[3]", "IndexError"),
    (f"x: {A}", "return divmod(x, 2)", "program-python", "divmod", "unsupported"),
    (f"x: {A}", "print(f'{x.sum():.3f}')\nreturn x", "program-python", "x.sum()", "format"),
    (f"x: {A}", "return x + 10**400", "program-python", "10**400", "too large"),
    (f"x: {A}", "for i in range(x.shape[0] / 2):\n    x = x - 1\nreturn x", "program-python", "range", "float"),
    (f"x: {D}", "return x * x.shape[0] ** -0.5", "program-python", "** -0.5", "T.dynamic"),
    (f"i: {I}", "return i << 40", "program-constant", "i << 40", "0 to 31"),
    (f"i: {I}", "return i >> -1", "program-constant", "i >> -1", "0 to 31"),
    (f"i: {I}", "return i // 0", "program-constant", "i // 0", "another divisor"),
    (f"i: {I}", "return i % 0", "program-constant", "i % 0", "another divisor"),
    ("x: list[int]", "return x", "program-parameter", "def f", "T.Tensor(shape, dtype)"),
    (f"x: {A}, **more", "return x", "program-parameter", "def f", "`**more`"),
    (f"x: {D}, y: T.Tensor((T.dynamic(\"m\") % 2,), \"float32\")", "return x", "program-sizes", "", "no sum"),
]


def program_of(parameters, statements, name):
    body = "".join(f"    {line}\n" for line in statements.splitlines())
    head = "import sys\nimport numpy as np\nimport tilelang\nimport tilelang.language as T\n"
    head += "torch = sys.modules.get('torch')\n\n"
    text = f"{head}@tilelang.program\ndef f({parameters}):\n{body}"
    linecache.cache[name] = (len(text), None, text.splitlines(True), name)
    space = {"__name__": "wrong"}
    exec(compile(text, name, "exec"), space)
    return space["f"]


def test_thirty_kinds_of_mistakes_are_tried():
    assert len(WRONG) >= 60 and len({w[2] for w in WRONG if w[2]}) >= 20


@pytest.mark.parametrize("k", range(len(WRONG)), ids=[w[1].splitlines()[0] for w in WRONG])
def test_a_wrong_program_is_refused_at_its_line(k):
    parameters, statements, kind, place, said = WRONG[k]
    name = f"<wrong {k}>"
    if not kind:
        assert program_of(parameters, statements, name).graph()
        return
    with pytest.raises(TileLangError) as e:
        program_of(parameters, statements, name).graph()
    shown = str(e.value)
    assert e.value.kind == kind, shown
    assert said in shown and e.value.expected and e.value.found and e.value.hint, shown
    if place:
        lines = shown.splitlines()
        at = next(i for i, line in enumerate(lines) if line.startswith("  --> "))
        assert f"--> {name}:" in lines[at] and place in lines[at + 1] and "^" in lines[at + 2], shown


def test_what_a_user_raises_stays_as_it_is():
    with pytest.raises(ValueError, match="no heads") as e:
        program_of(f"x: {A}", 'raise ValueError("no heads")', "<raised>").graph()
    assert not isinstance(e.value, TileLangError)


def test_a_size_that_a_slice_needs_is_checked_at_the_call():
    @tilelang.program
    def first(x: T.Tensor((T.dynamic("n"), 2), "float32")):
        return x[:64]

    assert first.reference(np.ones((70, 2), np.float32)).shape == (64, 2)
    with pytest.raises(TileLangError) as e:
        first.reference(np.ones((63, 2), np.float32))
    assert e.value.kind == "program-sizes" and "n - 64" in str(e.value) and "n = 63" in str(e.value)


def test_arguments_that_do_not_fit_are_named_at_the_call():
    @tilelang.program
    def f(x: T.Tensor((4, 5), "float32"), s: T.float32 = 2.0):
        return x * s

    x = np.ones((4, 5), np.float32)
    assert (f.reference(x) == 2).all() and (f.reference(x, 3) == 3).all()
    wrongs = [((x[:3],), "program-argument"), ((x[0],), "program-argument"), ((x.astype(np.int32),), "program-argument"),
              ((1.0,), "program-argument"), (([1.0],), "program-argument"), ((), "program-call"), ((x, 1.0, 2), "program-call"),
              ((x, "2"), "program-argument")]
    for wrong, kind in wrongs:
        with pytest.raises(TileLangError) as e:
            f.reference(*wrong)
        assert e.value.kind == kind and "test_wrong_programs.py" in str(e.value), (wrong, str(e.value))


def test_the_functions_of_programs_are_named_errors_in_kernels():
    with pytest.raises(TileLangError) as e:
        @T.prim_func
        def kernel(X: T.Tensor((4, 4), "float32")):
            with T.Kernel(1, threads=32):
                T.softmax(X)
    assert e.value.kind == "attribute" and "T.softmax(X)" in str(e.value) and "T.reduce_max" in e.value.hint
