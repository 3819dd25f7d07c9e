"""A call after a change of what tracing reads gets a kernel for the new state, and the old one after the change is undone."""

import collections
import contextvars
import dataclasses
import enum
import functools
import importlib
import json
import operator
import os
import sys
import threading
import types

import numpy as np
import pytest

import tilelang
import tilelang.language as T

torch = pytest.importorskip("torch")


def shifted(n, step):
    @T.prim_func
    def main(A: T.Tensor((n,), "int32"), B: T.Tensor((n,), "int32")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(n):
                B[i] = A[i] + step
    return main


def one():
    return 1


def five():
    return 5


def with_default(step=1):
    return step


def with_keyword(*, step=1):
    return step


class Base:
    amount = 1

    def inherited(self):
        return 1

    @property
    def seen(self):
        return self.step

    @staticmethod
    def static():
        return 1

    def __call__(self):
        return self.step

    def __getitem__(self, k):
        return self.step + k


class Node(Base):
    def __init__(self, step=1, inner=None):
        self.step, self.inner = step, inner

    def get(self):
        return self.step

    def through_helper(self):
        return with_default()


@dataclasses.dataclass
class Plan:
    step: int = 1
    steps: list = dataclasses.field(default_factory=lambda: [1])


@dataclasses.dataclass(frozen=True)
class Frozen:
    plan: Plan


@dataclasses.dataclass(eq=False)
class Slotted:
    __slots__ = ("step",)
    step: int


class Wrapping:
    """Attributes found by a computed name."""

    def __init__(self, **values):
        self.__dict__["_values"] = values

    def __getattr__(self, name):
        return self._values[name]


class Table(dict):
    pass


class Colour(enum.Enum):
    ONE = 1
    FIVE = 5


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(1, 1)
        self.weight = torch.nn.Parameter(torch.tensor([1.0]))
        self.unused = torch.nn.Parameter(torch.tensor([1.0]))

    def get(self):
        return int(self.weight[0].item())


def chain(depth):
    top = here = Node()
    for _ in range(depth):
        here.inner = Node()
        here = here.inner
    return top, here


TOP, LAST = chain(6)
OBJECT, SLOTS, COLOUR, LAYER = Node(), Slotted(1), Colour.ONE, Layer()
HELD = types.SimpleNamespace(act=one, table={"plans": [Plan()]}, obj=Node(), frozen=Frozen(Plan()))
DEEP = {"a": [{"b": (Plan(),)}]}
TENSOR, ARRAY, HALF = torch.tensor([1, 2]), np.array([1, 2]), torch.tensor(1.0, dtype=torch.bfloat16)
CONTEXT, LOCAL = contextvars.ContextVar("step", default=1), threading.local()
LOCAL.step = 1
BOUND, PARTIAL = OBJECT.get, functools.partial(OBJECT.get)
WRAPPING, MAPPING, QUEUE = Wrapping(step=1), Table(step=1), collections.deque([1])
CHAIN = collections.ChainMap({}, {"step": 1})
MODULE = types.ModuleType("settings_of_mine")
MODULE.step, MODULE.act, MODULE.inner = 1, one, types.SimpleNamespace(step=1)
NAME, WANTED, G = "STEP_OF_TEST", "step", 1


def decorated(f):
    @functools.wraps(f)
    def run():
        return f() * G
    return run


@decorated
def scaled():
    return 1


scaled.step = 1


def deep():
    def middle():
        def inner():
            return with_default()
        return inner
    return middle()()


@T.macro
def add_step(B, i):
    B[i] = B[i] + with_default()


def computed(name):
    return getattr(OBJECT, name)


def of_module(name):
    return getattr(MODULE, name)


def set_value(place, name, value):
    """A function that makes the change, and one that undoes it."""
    old = getattr(place, name) if not isinstance(place, dict) else place[name]
    if isinstance(place, dict):
        return lambda: place.__setitem__(name, value), lambda: place.__setitem__(name, old)
    return lambda: setattr(place, name, value), lambda: setattr(place, name, old)


def globe(name, value):
    return set_value(globals(), name, value)


def env(value):
    return lambda: os.environ.__setitem__(NAME, value), lambda: os.environ.pop(NAME, None)


def context():
    held = []
    return lambda: held.append(CONTEXT.set(5)), lambda: CONTEXT.reset(held.pop())


def loaded():
    from tests_of_stale_kernels import K
    return K


# what is read -> (read, (change, undo)); it is 1 before and 5 after the change
READS = {
    "code of a helper": (lambda: one(), set_value(one, "__code__", five.__code__)),
    "code three functions down": (lambda: deep(), set_value(with_default, "__code__", five.__code__)),
    "defaults of a helper": (lambda: with_default(), set_value(with_default, "__defaults__", (5,))),
    "keyword defaults of a helper": (lambda: with_keyword(), set_value(with_keyword, "__kwdefaults__", {"step": 5})),
    "keyword defaults in place": (lambda: with_keyword(), set_value(with_keyword.__kwdefaults__, "step", 5)),
    "a method of a class": (lambda: OBJECT.get(), set_value(Node, "get", lambda self: 5)),
    "code of a method": (lambda: OBJECT.inherited(), set_value(Base.inherited, "__code__", (lambda self: 5).__code__)),
    "a method of a base": (lambda: OBJECT.inherited(), set_value(Base, "inherited", lambda self: 5)),
    "an attribute of a base": (lambda: OBJECT.amount, set_value(Base, "amount", 5)),
    "a static method": (lambda: OBJECT.static(), (lambda: setattr(Base, "static", staticmethod(five)),
                                                  lambda: setattr(Base, "static", staticmethod(one)))),
    "a property's attribute": (lambda: OBJECT.seen, set_value(OBJECT, "step", 5)),
    "a property": (lambda: OBJECT.seen, set_value(Base, "seen", property(lambda self: 5))),
    "a call of an object": (lambda: OBJECT(), set_value(OBJECT, "step", 5)),
    "an index of an object": (lambda: OBJECT[0], set_value(Base, "__getitem__", lambda self, k: 5)),
    "a helper of a method": (lambda: OBJECT.through_helper(), set_value(with_default, "__defaults__", (5,))),
    "an attribute that hides the class's": (lambda: OBJECT.amount, (lambda: setattr(OBJECT, "amount", 5),
                                                                    lambda: delattr(OBJECT, "amount"))),
    "the class of an object": (lambda: OBJECT.get(), set_value(OBJECT, "__class__", type("Other", (Node,), {
        "get": lambda self: 5}))),
    "a bound method": (lambda: BOUND(), set_value(OBJECT, "step", 5)),
    "a partial of a method": (lambda: PARTIAL(), set_value(OBJECT, "step", 5)),
    "a method made by a class": (lambda: Node().get(), set_value(Node.__init__, "__defaults__", (5, None))),
    "a function in an object": (lambda: HELD.act(), set_value(HELD, "act", five)),
    "code of a function in an object": (lambda: HELD.act(), set_value(one, "__code__", five.__code__)),
    "a dataclass in a list in a dict": (lambda: HELD.table["plans"][0].step, set_value(HELD.table["plans"][0], "step", 5)),
    "a list in a dataclass in a dict": (lambda: HELD.table["plans"][0].steps[0],
                                        (lambda: HELD.table["plans"][0].steps.__setitem__(0, 5),
                                         lambda: HELD.table["plans"][0].steps.__setitem__(0, 1))),
    "a dataclass in a tuple in a dict in a list": (lambda: DEEP["a"][0]["b"][0].step,
                                                   set_value(DEEP["a"][0]["b"][0], "step", 5)),
    "what a frozen dataclass holds": (lambda: HELD.frozen.plan.step, set_value(HELD.frozen.plan, "step", 5)),
    "settings six levels down": (lambda: TOP.inner.inner.inner.inner.inner.inner.step, set_value(LAST, "step", 5)),
    "a slot": (lambda: SLOTS.step, set_value(SLOTS, "step", 5)),
    "a wrapped attribute": (lambda: WRAPPING.step, set_value(WRAPPING.__dict__["_values"], "step", 5)),
    "a dict's subclass": (lambda: MAPPING["step"], set_value(MAPPING, "step", 5)),
    "a deque": (lambda: QUEUE[0], (lambda: QUEUE.__setitem__(0, 5), lambda: QUEUE.__setitem__(0, 1))),
    "a chain of dicts": (lambda: CHAIN["step"], (lambda: CHAIN.maps[0].__setitem__("step", 5),
                                                 lambda: CHAIN.maps[0].pop("step"))),
    "a member of an enumeration": (lambda: COLOUR.value, globe("COLOUR", Colour.FIVE)),
    "a tensor": (lambda: int(TENSOR[0].item()), globe("TENSOR", torch.tensor([5, 2]))),
    "a tensor in place": (lambda: int(TENSOR[0]), (lambda: TENSOR.__setitem__(0, 5), lambda: TENSOR.__setitem__(0, 1))),
    "a tensor through its numpy view": (lambda: TENSOR.tolist()[0], (lambda: TENSOR.numpy().__setitem__(0, 5),
                                                                     lambda: TENSOR.numpy().__setitem__(0, 1))),
    "a bfloat16 tensor": (lambda: int(HALF), globe("HALF", torch.tensor(5.0, dtype=torch.bfloat16))),
    "a tensor's shape": (lambda: TENSOR.shape[0] - 1, globe("TENSOR", torch.zeros(6))),
    "a tensor's dtype": (lambda: TENSOR.dtype.itemsize - 7,
                         globe("TENSOR", types.SimpleNamespace(dtype=types.SimpleNamespace(itemsize=12)))),
    "an array": (lambda: int(ARRAY[0]), globe("ARRAY", np.array([5, 2]))),
    "a parameter of a torch module": (lambda: LAYER.get(),
                                      (lambda: LAYER.weight.data.fill_(5), lambda: LAYER.weight.data.fill_(1))),
    "a torch module in a torch module": (lambda: LAYER.inner.in_features, set_value(LAYER.inner, "in_features", 5)),
    "an environment variable": (lambda: int(os.environ.get(NAME, 1)), env("5")),
    "an environment variable by a function": (lambda: int(os.getenv(NAME) or 1), env("5")),
    "a context variable": (lambda: CONTEXT.get(), context()),
    "a variable of a thread": (lambda: LOCAL.step, set_value(LOCAL, "step", 5)),
    "a global by name": (lambda: globals()["G"], globe("G", 5)),
    "a global by eval": (lambda: eval("G"), globe("G", 5)),
    "an attribute of a module by name": (lambda: getattr(MODULE, "step"), set_value(MODULE, "step", 5)),  # noqa: B009
    "an attribute of a module by a computed name": (lambda: of_module(WANTED), set_value(MODULE, "step", 5)),
    "a function of a module": (lambda: MODULE.act(), set_value(MODULE, "act", five)),
    "an object in a module": (lambda: MODULE.inner.step, set_value(MODULE.inner, "step", 5)),
    "an attribute by a computed name": (lambda: computed(WANTED), set_value(OBJECT, "step", 5)),
    "an attribute by operator.attrgetter": (lambda: operator.attrgetter("inner.step")(TOP), set_value(TOP.inner, "step", 5)),
    "an attribute of a dict of attributes": (lambda: OBJECT.__dict__["step"], set_value(OBJECT, "step", 5)),
    "fields of a dataclass": (lambda: dataclasses.asdict(HELD.table["plans"][0])["step"],
                              set_value(HELD.table["plans"][0], "step", 5)),
    "a decorator's own global": (lambda: scaled(), globe("G", 5)),
    "an attribute of a function": (lambda: scaled.step, set_value(scaled, "step", 5)),
    "a module of a package by name": (lambda: sys.modules["settings_of_mine"].step, set_value(MODULE, "step", 5)),
}
sys.modules["settings_of_mine"] = MODULE


@pytest.mark.parametrize("name", READS)
def test_what_tracing_reads_counts(name):
    read, (change, undo) = READS[name]

    @tilelang.jit(out_idx=-1, execution_backend="tile")
    def make(n):
        return shifted(n, read())

    @tilelang.jit(execution_backend="tile")
    def eager(A):
        N = T.const("N")
        A: T.Tensor((N,), "int32")
        with T.Kernel(1, threads=32):
            for i in T.Parallel(N):
                A[i] = read()

    @tilelang.jit(out_idx=-1, execution_backend="tile")
    def given(n, f):
        return shifted(n, f())

    def results():
        a = np.zeros(4, np.int32)
        eager(a)
        return make(4)(np.zeros(4, np.int32))[0], a[0], given(4, read)(np.zeros(4, np.int32))[0]

    assert results() == (1, 1, 1) and results() == (1, 1, 1)
    first = make(4)
    assert make(4) is first
    change()
    try:
        assert results() == (5, 5, 5) and results() == (5, 5, 5)
    finally:
        undo()
    assert results() == (1, 1, 1) and make(4) is first


def test_code_of_the_decorated_function_counts():
    def first(n, k=1):
        return shifted(n, k)

    def other(n, k, more=3):
        return shifted(n, k + more)

    make = tilelang.jit(first, out_idx=-1, execution_backend="tile")
    assert make(4)(np.zeros(4, np.int32))[0] == 1
    first.__defaults__ = (5,)
    assert make(4)(np.zeros(4, np.int32))[0] == 5
    first.__code__, first.__defaults__ = other.__code__, other.__defaults__
    assert make(4, 4)(np.zeros(4, np.int32))[0] == 7 and make(4, more=1, k=1)(np.zeros(4, np.int32))[0] == 2

    def one_more(A):
        N = T.const("N")
        A: T.Tensor((N,), "int32")
        with T.Kernel(1, threads=32):
            A[0] += 1

    def two_more(A, k: int = 2):
        N = T.const("N")
        A: T.Tensor((N,), "int32")
        with T.Kernel(1, threads=32):
            A[0] += k

    eager, a = tilelang.jit(one_more, execution_backend="tile"), np.zeros(4, np.int32)
    eager(a)
    eager(a)
    one_more.__code__, one_more.__defaults__ = two_more.__code__, two_more.__defaults__
    eager(a)
    assert a[0] == 4
    eager(a, 3)
    assert a[0] == 7


def test_code_of_a_macro_counts():
    def add(B, k=1):
        B[0] = B[0] + k

    def twice(B, k, more=4):
        B[0] = B[0] + k + more

    inlined = T.macro(add)

    @tilelang.jit(execution_backend="tile")
    def eager(A):
        N = T.const("N")
        A: T.Tensor((N,), "int32")
        with T.Kernel(1, threads=32):
            inlined(A, 1)

    a = np.zeros(4, np.int32)
    eager(a)
    add.__code__, add.__defaults__ = twice.__code__, twice.__defaults__
    eager(a)
    assert a[0] == 6


def test_arguments_changed_in_place_count():
    top, last = chain(5)

    @tilelang.jit(out_idx=-1, execution_backend="tile")
    def make(n, x, get):
        return shifted(n, get(x))

    cases = [(top, lambda x: x.inner.inner.inner.inner.inner.step, set_value(last, "step", 5)),
             ([{"k": [1]}], lambda x: x[0]["k"][0], None),
             (Frozen(Plan()), lambda x: x.plan.steps[0], None),
             (HELD, lambda x: x.obj.get(), set_value(HELD.obj, "step", 5)),
             (OBJECT.get, lambda x: x(), set_value(OBJECT, "step", 5)),
             (functools.partial(Node.get, OBJECT), lambda x: x(), set_value(Node.get, "__code__", (lambda self: 5).__code__)),
             (LAYER, lambda x: x.get(), (lambda: LAYER.weight.data.fill_(5), lambda: LAYER.weight.data.fill_(1))),
             (Node, lambda x: x().get(), set_value(Node, "get", lambda self: 5)),
             (MODULE, lambda x: x.act(), set_value(MODULE, "act", five))]
    for x, get, changes in cases:
        first = make(4, x, get)
        assert first(np.zeros(4, np.int32))[0] == 1 and make(4, x, get) is first, x
        if isinstance(x, list):
            changes = lambda: x[0]["k"].__setitem__(0, 5), lambda: None  # noqa: B023
        elif isinstance(x, Frozen):
            changes = lambda: x.plan.steps.__setitem__(0, 5), lambda: None  # noqa: B023
        changes[0]()
        try:
            assert make(4, x, get)(np.zeros(4, np.int32))[0] == 5, x
        finally:
            changes[1]()


def test_a_callback_that_names_another_attribute_of_a_known_object_counts():
    shared = types.SimpleNamespace(first=1, second=1)

    @tilelang.jit(out_idx=-1, execution_backend="tile")
    def make(n, get):
        return shifted(n, shared.first * get(shared))

    def second(x):
        return x.second

    assert make(4, lambda x: 1)(np.zeros(4, np.int32))[0] == 1 and make(4, second)(np.zeros(4, np.int32))[0] == 1
    shared.second = 5
    assert make(4, second)(np.zeros(4, np.int32))[0] == 5


def test_what_the_code_does_not_name_asks_for_no_other_kernel():
    """Counters and tensors of an object that a kernel does not read."""
    class Running:
        def __init__(self):
            self.step, self.calls, self.table = 1, 0, torch.zeros(4, device="meta")

        @tilelang.jit(execution_backend="tile")
        def add(self, A):
            N = T.const("N")
            A: T.Tensor((N,), "int32")
            with T.Kernel(1, threads=32):
                A[0] += self.step

    obj, a = Running(), np.zeros(4, np.int32)
    kernels = set()
    for _ in range(3):
        obj.calls += 1
        obj.add(a)
        kernels.add(obj.add.compile(a))
    assert a[0] == 3 and len(kernels) == 1 and not obj.add.captured.missed and len(obj.add.eager.traces) == 1


def test_equal_lambdas_share_a_kernel():
    traced = []

    @tilelang.jit(out_idx=-1, execution_backend="tile")
    def make(n, f):
        traced.append(n)
        return shifted(n, f(1))

    def give(k):
        return lambda x: x + k

    first = make(4, give(1))
    count = len(traced)
    assert make(4, give(1)) is first and len(traced) == count
    assert make(4, give(4))(np.zeros(4, np.int32))[0] == 5


def test_what_cannot_be_followed_is_traced_again(tmp_path):
    path = tmp_path / "step.json"
    path.write_text("1")
    counter, traced = iter([1, 1, 1, 5, 5]), []

    def of_file():
        with open(path) as f:
            return json.load(f)

    @tilelang.jit(out_idx=-1, execution_backend="tile")
    def make(n):
        traced.append(n)
        return shifted(n, of_file())

    @tilelang.jit(out_idx=-1, execution_backend="tile")
    def by_iterator(n):
        return shifted(n, next(counter))

    first = make(4)
    assert make(4) is first and len(traced) >= 2
    path.write_text("5")
    assert make(4)(np.zeros(4, np.int32))[0] == 5
    assert not make._kernels and not make._fast
    while by_iterator(4)(np.zeros(4, np.int32))[0] == 1:
        pass
    assert next(counter) == 5


def test_a_module_that_is_reloaded_or_imported_inside_counts(tmp_path, monkeypatch):
    path = tmp_path / "tests_of_stale_kernels.py"
    path.write_text("K = 1\ndef get():\n    return K\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    import tests_of_stale_kernels as settings

    @tilelang.jit(out_idx=-1, execution_backend="tile")
    def make(n):
        return shifted(n, settings.get())

    @tilelang.jit(out_idx=-1, execution_backend="tile")
    def inside(n):
        return shifted(n, loaded())

    assert make(4)(np.zeros(4, np.int32))[0] == inside(4)(np.zeros(4, np.int32))[0] == 1
    path.write_text("K = 55\ndef get():\n    return K + 0\n")
    importlib.reload(settings)
    assert make(4)(np.zeros(4, np.int32))[0] == inside(4)(np.zeros(4, np.int32))[0] == 55
    settings.K = 7
    assert make(4)(np.zeros(4, np.int32))[0] == inside(4)(np.zeros(4, np.int32))[0] == 7


def test_tuned_functions_follow_what_tracing_reads(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "step"
    path.write_text("1")

    @tilelang.autotune(configs=[{"k": 0}], warmup=1, rep=1)
    @tilelang.jit(out_idx=-1, execution_backend="tile")
    def make(n, k=0):
        return shifted(n, with_default() + k)

    @tilelang.autotune(configs=[{"k": 0}], warmup=1, rep=1)
    @tilelang.jit(out_idx=-1, execution_backend="tile")
    def of_file(n, k=0):
        return shifted(n, int(open(path).read()) + k)

    assert make(4)(np.zeros(4, np.int32))[0] == of_file(4)(np.zeros(4, np.int32))[0] == 1
    monkeypatch.setattr(with_default, "__defaults__", (5,))
    path.write_text("5")
    assert make(4)(np.zeros(4, np.int32))[0] == of_file(4)(np.zeros(4, np.int32))[0] == 5
    assert len(set(map(id, of_file.results.values()))) == 1


def test_values_of_torch_that_are_the_same_ask_for_no_other_kernel():
    @tilelang.jit(out_idx=-1, execution_backend="tile")
    def make(n, dt, device):
        return shifted(n, dt.itemsize - 3 if device.type == "cpu" else 9)

    first = make(4, torch.float32, torch.device("cpu"))
    assert first(np.zeros(4, np.int32))[0] == 1 and make(4, torch.float32, torch.device("cpu")) is first
    assert make(4, torch.float64, torch.device("cpu"))(np.zeros(4, np.int32))[0] == 5
    assert make(4, torch.float32, torch.device("meta"))(np.zeros(4, np.int32))[0] == 9
