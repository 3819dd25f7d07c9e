"""A key costs what the function reads, whatever else the process holds, and a change of what it reads makes another kernel.

Every factory here has an assertion, which pytest rewrites into code that leads to all of pytest.
"""

import contextvars
import dataclasses
import enum
import functools
import math
import operator
import os
import sys
import time
import types

import numpy as np
import pytest

import tilelang
import tilelang.language as T
from tilelang.jit.reads import WHOLE, reads_of


def shifted(n, step):
    assert n > 0

    @T.prim_func
    def main(A: T.Tensor((n,), "int32"), B: T.Tensor((n,), "int32")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(n):
                B[i] = A[i] + step
    return main


class Part:
    """One of many objects that lead to each other."""

    def __init__(self, world, step):
        self.world, self.step, self.inner, self.data = world, step, None, [step]

    def get(self):
        return self.step


class World:
    def __init__(self, count):
        self.parts = [Part(self, 1) for _ in range(count)]
        self.by_name = {str(k): p for k, p in enumerate(self.parts)}
        self.calls = 0


WORLD = World(50_000)


class Base:
    amount = 1

    def shared(self):
        return self.step

    def __len__(self):
        return self.step


class Settings(Base):
    kind = "plain"

    def __init__(self, step=1):
        self.step, self.world, self.inner, self.calls = step, WORLD, types.SimpleNamespace(step=1, none=None), 0
        self.maybe, self.table, self.steps = None, {"step": 1, "all": WORLD}, [WORLD, 1]

    def plain(self):
        return self.step

    def through(self, k):
        return self.plain() * k

    def shared(self):
        return super().shared()

    @property
    def seen(self):
        return self.inner.step

    @functools.cached_property
    def kept(self):
        return self.step

    @classmethod
    def of_class(cls):
        return cls.amount

    @staticmethod
    def fixed():
        return 1

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return self.table["step"]

    def __add__(self, other):
        return self.step + other

    def __enter__(self):
        return self.inner

    def __exit__(self, *_):
        pass


class Limited:
    """An attribute whose assignment runs a function."""

    def __init__(self):
        self.world, self.kept = WORLD, 1

    @property
    def size(self):
        return self.kept

    @size.setter
    def size(self, value):
        self.kept = value * STEP


class Slots:
    __slots__ = ("step", "world")

    def __init__(self):
        self.step, self.world = 1, WORLD


@dataclasses.dataclass
class Plan:
    step: int = 1
    world: World = WORLD


class Lazy:
    """A descriptor with a function of its own."""

    def __init__(self, func):
        self.func, self.more = func, 0

    def __get__(self, obj, of=None):
        return self.func(obj) + self.more


class Described:
    lazy = Lazy(lambda self: 1)

    def __init__(self):
        self.world = WORLD


class Colour(enum.Enum):
    ONE = 1
    FIVE = 5

    def get(self):
        return self.value


class Derived(Base):
    def __init__(self):
        self.step = 1

    def shared(self):
        return super().shared()

    def __add__(self, other):
        return self.step + other


PLAIN, OPERAND, LENGTH = types.SimpleNamespace(inner=types.SimpleNamespace(none=None)), Derived(), Derived()
CFG, SLOTS, PLAN, DESCRIBED, OTHER, COLOUR = Settings(), Slots(), Plan(), Described(), Settings(), Colour.ONE
STEP, ITEMS, PAIR, CONTEXT = 1, [WORLD, Settings(), 1], (1, WORLD), contextvars.ContextVar("step", default=1)
BOUND, PARTIAL = Settings().plain, functools.partial(operator.add, 1)
MODULE = types.ModuleType("settings_of_this_test")
MODULE.step, MODULE.world, MODULE.inner, MODULE.act = 1, WORLD, Settings(), lambda: STEP
sys.modules["settings_of_this_test"] = MODULE
HEAD, LIMITED = Part(WORLD, 1), Limited()
HEAD.inner = LAST = Part(WORLD, 1)
ARRAY = np.array([1, 2])


def with_default(plan=PLAN):
    return plan.step


def alias():
    c = CFG
    d = c.inner
    return d.step


def counting():
    CFG.calls += 1
    WORLD.calls = 3
    return CFG.step


def assigned():
    LIMITED.size = 1
    return LIMITED.kept


def added():
    LIMITED.kept = 0
    LIMITED.size += 1
    return LIMITED.kept


def last():
    part = HEAD
    while part.inner is not None:
        part = part.inner
    return part.step


def of_local_import():
    from settings_of_this_test import step
    return step


def whole_local_import():
    import settings_of_this_test
    return settings_of_this_test.inner.step


def unpacked():
    one, _ = PAIR
    return one


def entered():
    with CFG as inner:
        return inner.step


def marked():
    return 1


marked.step = 1


def choose(x):
    return 1 if x.inner.none is None else 5


def put(place, name, value):
    """A change, and what undoes it."""
    names = place if isinstance(place, (dict, list)) else vars(place) if isinstance(place, types.ModuleType) else None
    old = names[name] if names is not None else vars(place).get(name, place) if not hasattr(type(place), "__slots__") else 1

    def to(value):
        if names is not None:
            names[name] = value
        elif value is place:
            delattr(place, name)
        else:
            setattr(place, name, value)

    return lambda: to(value), lambda: to(old)


def globe(name, value):
    return put(globals(), name, value)


def five(x=None, y=None):
    return 5


def context():
    held = []
    return lambda: held.append(CONTEXT.set(5)), lambda: CONTEXT.reset(held.pop())


# what is read: (read, (change, undo)); it is 1 before and 5 after the change
PROGRAMS = {
    "an attribute": (lambda: CFG.step, put(CFG, "step", 5)),
    "an attribute of an attribute": (lambda: CFG.inner.step, put(CFG.inner, "step", 5)),
    "an object that takes another's place": (lambda: CFG.inner.step, put(CFG, "inner", types.SimpleNamespace(step=5))),
    "a class attribute": (lambda: CFG.amount, put(Base, "amount", 5)),
    "an attribute of a derived class": (lambda: CFG.amount, (lambda: setattr(Settings, "amount", 5),
                                                             lambda: delattr(Settings, "amount"))),
    "an attribute that hides the class's": (lambda: CFG.amount, put(CFG, "amount", 5)),
    "a slot": (lambda: SLOTS.step, put(SLOTS, "step", 5)),
    "a field of a dataclass": (lambda: PLAN.step, put(PLAN, "step", 5)),
    "a property": (lambda: CFG.seen, put(CFG.inner, "step", 5)),
    "another property": (lambda: CFG.seen, put(Settings, "seen", property(five))),
    "a method": (lambda: CFG.plain(), put(CFG, "step", 5)),
    "a method of a method": (lambda: CFG.through(1), put(Settings, "plain", five)),
    "a method of a base by super": (lambda: Derived().shared(), put(Base, "shared", five)),
    "a class method": (lambda: Settings.of_class(), put(Base, "amount", 5)),
    "a static method": (lambda: CFG.fixed(), put(Settings, "fixed", staticmethod(five))),
    "an attribute made by a method": (lambda: CFG.absent, put(CFG.table, "step", 5)),
    "an attribute that comes later": (lambda: 5 if hasattr(PLAN, "late") else 1, (lambda: setattr(PLAN, "late", 1),
                                                                                  lambda: delattr(PLAN, "late"))),
    "an attribute with a default": (lambda: getattr(PLAN, "late", 1), (lambda: setattr(PLAN, "late", 5),
                                                                       lambda: delattr(PLAN, "late"))),
    "whether there is a value": (lambda: 1 if CFG.maybe is None else 5, put(CFG, "maybe", WORLD)),
    "whether an argument has a value": (lambda: choose(PLAIN), put(PLAIN.inner, "none", 0)),
    "an item of a list": (lambda: CFG.steps[1], put(CFG.steps, 1, 5)),
    "an item from the end of a list": (lambda: ITEMS[-1], put(ITEMS, 2, 5)),
    "an object in a list": (lambda: ITEMS[1].step, put(ITEMS[1], "step", 5)),
    "an item of a dict": (lambda: CFG.table["step"], put(CFG.table, "step", 5)),
    "an item of a module's name": (lambda: MODULE.inner.table["step"], put(MODULE.inner.table, "step", 5)),
    "an attribute of a module": (lambda: MODULE.step, put(MODULE, "step", 5)),
    "a function of a module": (lambda: MODULE.act(), put(MODULE, "act", five)),
    "a module's attribute by a constant name": (lambda: getattr(MODULE, "step", 9), put(MODULE, "step", 5)),
    "a name imported inside": (lambda: of_local_import(), put(MODULE, "step", 5)),
    "a module imported inside": (lambda: whole_local_import(), put(MODULE.inner, "step", 5)),
    "a module that takes another's place": (lambda: of_local_import(), put(sys.modules, "settings_of_this_test",
                                                                          types.SimpleNamespace(step=5))),
    "a local name for an object": (lambda: alias(), put(CFG.inner, "step", 5)),
    "what a loop comes to": (lambda: last(), put(LAST, "step", 5)),
    "an object that the function counts in": (lambda: counting(), put(CFG, "step", 5)),
    "what an assignment runs": (lambda: assigned(), globe("STEP", 5)),
    "what an assignment with an operator runs": (lambda: added(), globe("STEP", 5)),
    "a default argument": (lambda: with_default(), put(PLAN, "step", 5)),
    "another default argument": (lambda: with_default(), (lambda: setattr(with_default, "__defaults__", (Plan(5, None),)),
                                                          lambda: setattr(with_default, "__defaults__", (PLAN,)))),
    "an operator": (lambda: OPERAND + 0, put(OPERAND, "step", 5)),
    "a length": (lambda: len(LENGTH), put(LENGTH, "step", 5)),
    "a member of an enumeration": (lambda: COLOUR.value, globe("COLOUR", Colour.FIVE)),
    "a method of a member": (lambda: COLOUR.get(), globe("COLOUR", Colour.FIVE)),
    "a bound method": (lambda: BOUND(), put(BOUND.__self__, "step", 5)),
    "a partial": (lambda: PARTIAL(0), globe("PARTIAL", functools.partial(operator.add, 5))),
    "an array": (lambda: int(ARRAY[0]), (lambda: ARRAY.__setitem__(0, 5), lambda: ARRAY.__setitem__(0, 1))),
    "an array's shape": (lambda: ARRAY.shape[0] - 1, globe("ARRAY", np.zeros(6, np.int64))),
    "a formatted text": (lambda: int(f"{CFG.inner.step}"), put(CFG.inner, "step", 5)),
    "a comprehension": (lambda: [CFG.step for _ in range(1)][0], put(CFG, "step", 5)),
    "an attribute of a function": (lambda: marked.step, put(marked, "step", 5)),
    "a function of Python that is replaced": (lambda: math.lcm(1, 1), put(math, "lcm", five)),
    "a constant of Python that is replaced": (lambda: int(math.pi) - 2, put(math, "pi", 7)),
    "a variable of the environment": (lambda: int(os.environ.get("STEP_OF_THIS_TEST", 1)),
                                      (lambda: os.environ.update(STEP_OF_THIS_TEST="5"),
                                       lambda: os.environ.pop("STEP_OF_THIS_TEST"))),
    "a context variable": (lambda: CONTEXT.get(), context()),
}
# The same of objects that are used as a whole, and that hold all of WORLD: each call traces.
AGAIN = {
    "a descriptor of one's own": (lambda: DESCRIBED.lazy, put(vars(Described)["lazy"], "more", 4)),
    "an unpacked tuple": (lambda: unpacked()[0] if isinstance(unpacked(), tuple) else unpacked(), globe("PAIR", (5, None))),
    "a context manager": (lambda: entered(), put(CFG.inner, "step", 5)),
    "the type of an object": (lambda: 1 if type(OTHER) is Settings else 5, (
        lambda: setattr(OTHER, "__class__", type("Other", (Settings,), {})), lambda: setattr(OTHER, "__class__", Settings))),
}


@pytest.fixture(scope="module", autouse=True)
def started():
    """What the first kernel of a process imports is no time of a key."""
    tilelang.jit(shifted, out_idx=-1, execution_backend="tile")(4, 1)(np.zeros(4, np.int32))


@pytest.mark.parametrize("name", [*PROGRAMS, *AGAIN])
def test_a_change_of_what_is_read_is_seen_in_a_process_of_many_objects(name):
    read, (change, undo) = {**PROGRAMS, **AGAIN}[name]
    traced = []

    @tilelang.jit(out_idx=-1, execution_backend="tile")
    def make(n):
        assert n % 2 == 0
        traced.append(n)
        return shifted(n, read())

    def results():
        return make(4)(np.zeros(4, np.int32))[0]

    start = time.thread_time()
    assert (results(), results()) == (1, 1)
    assert time.thread_time() - start < 1
    first, count = make(4), len(traced)
    WORLD.parts[7].step = WORLD.by_name["9"].step = WORLD.calls = CFG.world.calls = count
    assert make(4) is first and (len(traced) == count) == (name in PROGRAMS)
    change()
    try:
        assert (results(), results()) == (5, 5)
    finally:
        undo()
    assert results() == 1 and make(4) is first and bool(make.captured.missed) == (name in AGAIN)


def test_a_new_argument_took_seconds_in_a_file_of_tests():
    @tilelang.jit(execution_backend="tile")
    def cast(M: int, a: str, b: str):
        assert M % 256 == 0

        @T.prim_func
        def main(A: T.Tensor[(M,), a], B: T.Tensor[(M,), b]):
            with T.Kernel(1, threads=128):
                T.copy(A, B)
        return main

    start = time.thread_time()
    keys = {cast.parse_cache_key(256 * (k + 1), "float32", "float16") for k in range(8)}
    assert time.thread_time() - start < 0.4 and len(keys) == 8 and not cast.captured.missed


def test_more_than_is_followed_in_short_time_traces_again():
    """No key is taken from a walk that did not end; a walk is attempted ever more rarely."""
    traced = []

    @tilelang.jit(out_idx=-1, execution_backend="tile")
    def make(n):
        traced.append(n)
        return shifted(n, sum(p.step for p in WORLD.parts[:9]) - 8)

    for p in WORLD.parts[:9]:
        p.step = 1
    start = time.thread_time()
    first = make(4)
    calls = 40
    for _ in range(calls):
        assert make(4) is first
    assert (time.thread_time() - start) / calls < 0.05 and len(traced) > calls and not make._kernels and not make._fast
    assert make.captured.failed < 8
    WORLD.parts[5].step = 5
    try:
        assert make(4)(np.zeros(4, np.int32))[0] == 5
    finally:
        WORLD.parts[5].step = 1
    assert make(4) is first


def test_a_method_of_a_large_model_reads_what_it_names():
    torch = pytest.importorskip("torch")

    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.unit = torch.nn.Linear(4, 4), 4
            self.register_buffer("table", torch.tensor([1, 2]))

    def unit_of(model):
        return model.unit

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks, self.unit, self.world, self.calls = torch.nn.ModuleList([Block() for _ in range(250)]), 1, WORLD, 0

        @property
        def size(self):
            return self.blocks[2].inner.in_features

        def fits(self, n):
            return n % self.size == 0 and self.blocks[1].table[0] > 0

        @tilelang.jit(out_idx=-1, execution_backend="tile")
        def make(self, n):
            assert self.fits(n)
            self.calls += 1
            return shifted(n, self.unit * unit_of(self))

    model = Model()

    def result():
        return model.make(4)(np.zeros(4, np.int32))[0]

    start = time.thread_time()
    first, count = model.make(4), model.calls
    assert time.thread_time() - start < 1 and model.make(4) is first
    model.blocks[7].unit = 3
    assert result() == 1 and model.make(4) is first and model.calls == count and not model.make.captured.missed
    model.unit = 3
    assert result() == 9 and result() == 9
    model.unit = 1
    assert model.make(4) is first
    model.blocks[1].table[0] = -1
    with pytest.raises(AssertionError):
        model.make(4)
    model.blocks[1].table[0] = 1
    assert model.make(4) is first


def test_paths_of_variables():
    def read(self, cfg, n):
        import os.path
        from math import pi as number
        x = self.inner
        self.count += 1
        if cfg.act is None or hasattr(cfg, "late"):
            return helper(cfg.plan, n) + self.get(x.step) + x[0]["k"].b + number
        return getattr(cfg, "size", 4), [self.kept for _ in cfg], os.path.join(n), CFG.d[n]

    def helper(plan, n):
        return plan

    paths = reads_of(read.__code__).paths
    assert set(paths["self"]) == {("inner", ("=", "x")), (("set", "count"), "count", WHOLE), ("get", WHOLE), ("kept", WHOLE)}
    assert set(paths["cfg"]) == {("act",), ("late",), ("plan", ("helper", False, (), 0)), ("size", WHOLE), (WHOLE,)}
    assert set(paths["x"]) == {("step", ("self", False, ("get",), 0)), ((0,), ("k",), "b", WHOLE)}
    assert paths["CFG"] == [("d", WHOLE)] and paths["number"] == [(WHOLE,)]
    assert reads_of(read.__code__).imports == {("os", 0): [(("=", "os"),)], ("math", 0): [("pi", ("=", "number"))]}
