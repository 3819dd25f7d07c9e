"""Python's protocols on run-time values, in helpers and in macros: each is refused, or gives what Python gives for the number.

A question that Python answers while tracing (hash, equality, truth, length, order, numbers, text, iteration) has one answer for
every block and every call; before, `{0: a, 1: b}.get(bx, c)` was c for every block.
"""

import collections
import copy
import importlib.util
import logging

import numpy as np
import pytest

import tilelang
import tilelang.language as T

QUESTIONS = {k: [q.strip() for q in v.split(";")] for k, v in {  # expressions of x by protocol
    "hash": """
        hash(x); {3: 5}.get(x, 6); {3: 5}[x]; collections.defaultdict(int)[x]; {1: 2}.setdefault(x, 7); len({x, 3});
        1 if x in {3, 4} else 2; 1 if x in frozenset((3, 4)) else 2; 1 if x in {3: 4} else 2; cached(x);
        collections.Counter([x, 3])[3]; {(1, 3): 5}.get((1, x), 6); dict([(x, 5)]).get(3, 6); hash(Pair(x, 1)) * 0""",
    "equality": """
        1 if x == 3 else 2; 1 if x != 3 else 2; 1 if 3 == x else 2; 1 if (x, 1) == (3, 1) else 2;
        1 if [x] == [3] else 2; 1 if {1: x} == {1: 3} else 2; 1 if x == 'a' else 2; 1 if x == (3,) else 2;
        1 if (x, 1) in {3: 1}.items() else 2; 1 if x == [3] else 2; 1 if x == {3} else 2;
        1 if x == fractions.Fraction(3) else 2; 1 if x == 3j else 2;
        1 if Pair(x, 1) == Pair(3, 1) else 2; 1 if np.any(x == np.arange(3)) else 2; matched(x);
        1 if operator.eq(x, 3) else 2; 1 if slice(x) == slice(3) else 2; 1 if Point(x, 1) == (3, 1) else 2;
        1 if Pair(x, 1) in [Pair(3, 1)] else 2; [k for k, _ in itertools.groupby([x, 3])].__len__()""",
    "containers": """
        1 if x in [3, 4] else 2; 1 if x in (3, 4) else 2; 1 if x in range(4) else 2; 1 if x not in (5, 6) else 2;
        [3, 4].index(x); [3, 4].count(x); [3, 4].remove(x) or 1; 1 if x in np.arange(5) else 2""",
    "truth": """
        1 if x else 2; bool(x) * 2; 1 if not x else 2; any([x, 0]) * 2; all([x, 1]) * 2; len(list(filter(None, [x])));
        1 if x > 2 and x < 5 else 2; 1 if 2 < x < 5 else 2; any([x == 3]) * 2; next(k for k in range(9) if x == k);
        sum(1 for k in range(5) if k < x)""",
    "order": """
        sorted([x, 5])[0]; min(x, 5); max(x, 5); max([x, 1]); min([1, 2], key=lambda k: k * x);
        bisect.bisect([1, 2], x); heapq.nsmallest(1, [x, 5])[0]; max(0, min(x, 4)); 1 if x < 4 else 2;
        functools.reduce(max, [x, 1])""",
    "numbers": """
        int(x); float(x) * 1; complex(x).real; operator.index(x); len(list(range(x))); [1, 2, 3, 4][x]; ([1] * x)[0];
        len([1, 2, 3, 4][:x]); len(bin(x)); len(chr(x)); len(bytes(x)); round(x); round(x, 1); math.floor(x);
        math.trunc(x); math.sqrt(x) * 0; math.isnan(x) * 1; math.gcd(x, 2); abs(x); divmod(x, 2)[1]; pow(x, 2);
        x ** 2; 2 ** x; np.int32(x) * 1; np.arange(5)[x] * 1; np.zeros(x).size; fractions.Fraction(x).numerator;
        len(list(itertools.repeat(1, x))); len(list(itertools.islice([1, 2, 3], x))); struct.pack('i', x)[0];
        struct.pack('f', x)[0] * 0; decimal.Decimal(x) * 1; fractions.Fraction(x, 2) * 2; np.arange(5)[[x]][0] * 1;
        np.tile([1], x).size; np.select([x > 2], [1], 2) * 1; np.where(x > 2, 1, 2) * 1; np.exp(x) * 0; np.maximum(x, 2) * 1;
        np.array([x, 1]).sum(); np.sort([x, 1])[0]; np.isclose(x, 3) * 1; x @ x;
        -x; +x; ~x; x + 1; 1 - x; x // 2; 7 % x; x & 1; x << 1; x ^ 5;
        np.int32(1) + x; sum([x, 1])""",
    "text": """
        len(f'{x}'); len(f'{x:3}'); len('{}'.format(x)); len(format(x, '')); len('%d' % x); len(','.join([x]));
        {'3': 5}.get(f'{x}', 6); len('%s' % x); {'3': 5}.get('%s' % x, 6); len('%s-%s' % (x, 1)); len('%5s' % x);
        len('%r' % x); len('%(a)s' % {'a': x}); len(str(x)); len(f'{x!s}'); len(f'{x!r}'); len('{!s}'.format(x));
        len(f'{[x]}'); len(f'{(x,)}'); len('%s' % [x]); len(str([x])); len(str({'a': x})); len(f'{Pair(x, 1)}');
        len(','.join(map(str, [x, 1]))); 1 if str(x).isdigit() else 2; len('a' + str(x)); len('%x' % x); len('%c' % x);
        len(string.Template('$a').substitute(a=x)); len(json.dumps([x])); len(b'%d' % x); x.__str__() + ''""",
    "copies": """
        copy.copy(x) + 1; copy.deepcopy(x) + 1; copy.deepcopy([x])[0]; copy.deepcopy({'a': (x, 1)})['a'][0];
        dataclasses.replace(Pair(x, 1)).a; dataclasses.asdict(Pair(x, 1))['a']; pickle.loads(pickle.dumps(x));
        pickle.loads(pickle.dumps([x]))[0]""",
    "iteration": """
        len(x[0:2]); len(list(reversed(x))); next(x); dict(x); len(list(map(abs, x)))""",
}.items()}
HEAD = '''
import bisect, collections, copy, dataclasses, decimal, fractions, functools, heapq, itertools, json, math, operator, pickle
import string, struct
import numpy as np
import tilelang.language as T

Point = collections.namedtuple("Point", "a b")
cached = functools.lru_cache(None)(lambda x: 7)

@dataclasses.dataclass(frozen=True)
class Pair:
    a: object
    b: object

def matched(x):
    match x:
        case 3: return 5
        case _: return 6

'''


@pytest.fixture(scope="module")
def helpers(tmp_path_factory):
    """A module with each question as a plain function and as a macro."""
    path = tmp_path_factory.mktemp("helpers") / "questions.py"
    texts = [q for qs in QUESTIONS.values() for q in qs]
    path.write_text(HEAD + "".join(f"def plain{k}(x):\n    return {q}\n\n@T.macro\ndef macro{k}(x):\n    return {q}\n\n"
                                   for k, q in enumerate(texts)))
    spec = importlib.util.spec_from_file_location("questions", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return {q: (getattr(module, f"plain{k}"), getattr(module, f"macro{k}")) for k, q in enumerate(texts)}


OPERANDS = ("loop", "block", "element", "scalar", "variable", "sum")


def program(ask, operand):
    @T.prim_func
    def f(A: T.Tensor((4,), "int32"), B: T.Tensor((1,), "float32"), k: T.int32):
        with T.Kernel(4, threads=1) as bx:
            if bx == 3:
                v = T.alloc_var("int32", init=3)
                for i in T.serial(3, 4):
                    values = dict(loop=i, block=bx, element=A[3], scalar=k, variable=v, sum=A[2] + 1)
                    B[0] = ask(values[operand])

    return f


@pytest.mark.parametrize("form", ["plain", "macro"])
@pytest.mark.parametrize("protocol", QUESTIONS)
def test_what_python_asks_of_run_time_values_is_refused_or_right(protocol, form, helpers):
    silent = []
    for k, text in enumerate(QUESTIONS[protocol]):
        plain, macro = helpers[text]
        for operand in OPERANDS[k % 2::2]:
            try:
                func = program(plain if form == "plain" else macro, operand)
            except (TypeError, ValueError, IndexError) as e:
                if getattr(e, "span", None) is None:
                    silent.append(f"{text} of {operand}: {e}")
                continue
            try:
                want = plain(3)
            except Exception as e:
                want = e
            b = np.zeros(1, np.float32)
            tilelang.compile(func, execution_backend="tile")(np.arange(4, dtype=np.int32), b, 3)
            if b[0] != want:
                silent.append(f"{text} of {operand}: {b[0]}, Python gives {want}")
    assert not silent, "\n".join(silent)


@pytest.mark.parametrize("ask", [bool, lambda r: not r, hash, lambda r: {r: 1}, lambda r: f"{r}", lambda r: r == "a",
                                 lambda r: 1 if r else 2, lambda r: r in {3: 4}, len, list, int, lambda r: r < 3 and 1])
def test_what_python_asks_of_a_region_is_refused(ask):
    with pytest.raises((TypeError, ValueError, RuntimeError)):
        @T.prim_func
        def f(A: T.Tensor((4,), "int32"), B: T.Tensor((1,), "float32")):
            with T.Kernel(1, threads=1):
                _ = ask(A[0:2])
                B[0] = 1


def test_python_questions_that_have_an_answer_while_tracing_keep_it():
    n = T.dynamic("n")
    seen = []

    @T.prim_func
    def f(A: T.Tensor((n, 8), "int32")):
        with T.Kernel(1, threads=1) as bx:
            seen.append(({A: 1}[A], {n: 2}[A.shape[0]], {3: 4}[T.int32(3)], f"{n}", f"{T.int32(3)}", repr(bx), len({A, A})))
            A[0, 0] = 1

    assert seen == [(1, 2, 4, "n", "3", "bx", 1)]
    assert hash(T.dynamic("m")) is not None


def test_a_copy_of_a_buffer_is_the_buffer():
    @T.prim_func
    def f(A: T.Tensor((4,), "int32")):
        with T.Kernel(1, threads=1):
            held = copy.deepcopy({"A": A})
            assert held["A"] is A and copy.copy(A) is A
            A[0] = 1


def test_an_address_has_no_hash_while_tracing():
    with pytest.raises(TypeError, match="python-question"):
        @T.prim_func
        def f(A: T.Tensor((4,), "float32")):
            with T.Kernel(1, threads=1):
                _ = {0: 1.0}.get(T.address_of(A[0]), 2.0)
                A[0] = 1.0


def test_a_name_used_outside_of_its_loop_has_no_hash():
    with pytest.raises(RuntimeError, match="outside its defining region"):
        @T.prim_func
        def f(A: T.Tensor((4,), "float32")):
            with T.Kernel(1, threads=1):
                for i in T.serial(4):
                    x = A[i] + 1.0
                A[0] = {0: 1.0}.get(x, 2.0)


class Holder:
    def __init__(self, v):
        self.v = v

    def __repr__(self):
        return f"Holder({self.v})"


def test_print_repr_and_logs_show_expressions(capsys, caplog):
    def show(x):
        print("x is", x, [x], Holder(x))
        logging.getLogger("kernel").warning("x is %s, %r", x, [x])
        assert repr([x]) == "[bx]" and repr(x) + "!" == "bx!" and repr(Holder(x)) == "Holder(bx)"
        return x

    @T.prim_func
    def f(A: T.Tensor((4,), "int32")):
        with T.Kernel(4, threads=1) as bx:
            print(bx, [bx])
            A[bx] = show(bx)

    assert capsys.readouterr().out == "bx [bx]\nx is bx [bx] Holder(bx)\n" and caplog.messages == ["x is bx, [bx]"]


@T.macro
def into_numpy(x):
    a = np.zeros(4)
    a[x] = 1
    return a[3]


@T.macro
def past_a_list(x):
    a = [1, 2]
    a[5] = 1
    return a[0]


@T.macro
def into_a_missing_key(x):
    a = {}
    a["k"] += 1
    return a["k"]


@T.macro
def counted(x):
    a = collections.Counter()
    a[x] += 1
    return a[3]


@pytest.mark.parametrize("ask, kind", [(into_numpy, "host-index"), (past_a_list, "container-key"),
                                       (into_a_missing_key, "container-key"), (counted, "python-question")])
def test_an_element_that_a_container_does_not_have_was_called_a_fault_of_the_compiler(ask, kind):
    """Counter counted an expression, which is no number that a block has."""
    with pytest.raises((TypeError, LookupError)) as e:
        program(ask, "block")
    assert e.value.kind == kind and e.value.span.file == __file__


def test_an_error_of_python_in_a_helper_names_its_line():
    def helper(x):
        return x @ x

    with pytest.raises(TypeError) as e:
        program(helper, "block")
    assert e.value.kind == "python-question" and e.value.span.line == helper.__code__.co_firstlineno + 1
    assert "called here" in str(e.value)
