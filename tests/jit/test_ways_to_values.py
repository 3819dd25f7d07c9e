"""Python's ways to a value: each is followed, so that a change of the value makes another kernel."""

from __future__ import annotations

import functools
import sys
import threading
import types
import typing
import weakref

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


class Meta(type):
    step = 1


class WithMeta(metaclass=Meta):
    pass


class Plain:
    def get(self):
        return 1


class Derived(Plain):
    def get(self):
        return super().get()


class Pair(typing.NamedTuple):
    cfg: object
    b: int = 2


class Settings:
    step = 1

    def __init__(self):
        self.d = {"step": 1}

    @classmethod
    def make(cls):
        return cls().d["step"]

    def __iter__(self):
        return iter(self.d.values())


class Descriptor:
    def __get__(self, obj, of=None):
        return VALUE


class Described:
    d = Descriptor()


VALUE, SIZE = 1, 4
PAIR, DERIVED, SETTINGS, DESCRIBED = Pair(Settings()), Derived(), Settings(), Described()
ACTS, REF = [lambda: VALUE], weakref.ref(SETTINGS)
LAZY = types.ModuleType("a_lazy_module")
exec("def __getattr__(name):\n    return TABLE[name]\nTABLE = {'K': 1}", LAZY.__dict__)
PACKAGE = types.ModuleType("a_package_of_mine")
PACKAGE.sub = types.ModuleType("a_package_of_mine.sub")
PACKAGE.sub.K = 1


@functools.singledispatch
def dispatched(x):
    return 1


@dispatched.register
def _(x: str):
    return VALUE


def matched(c):
    match c:
        case Settings(step=s):
            return s


def made():
    yield VALUE


def item(o, n):
    return o[n]


def of_default_dtype():
    return {torch.float32: 1, torch.float64: 5}[torch.get_default_dtype()]


def put(o, n, v):
    """A function that makes the change, and one that undoes it."""
    old = o[n] if isinstance(o, dict) else getattr(o, n)

    def to(v):
        if isinstance(o, dict):
            o[n] = v
        else:
            setattr(o, n, v)

    return lambda: to(v), lambda: to(old)


def late(o):
    return lambda: setattr(o, "late", 5), lambda: delattr(o, "late")


def value():
    return put(globals(), "VALUE", 5)


# a way -> (what is read, (change, undo)); it is 1 before and 5 after the change
WAYS = {
    "a metaclass": (lambda: WithMeta.step, put(Meta, "step", 5)),
    "super": (lambda: DERIVED.get(), put(Plain, "get", lambda self: 5)),
    "an object in a named tuple": (lambda: PAIR.cfg.d["step"], put(PAIR.cfg.d, "step", 5)),
    "a class method that makes an object": (lambda: Settings.make(), put(
        Settings, "__init__", lambda self: setattr(self, "d", {"step": 5}))),
    "iteration": (lambda: [*SETTINGS][0], put(SETTINGS.d, "step", 5)),
    "a lambda in a list": (lambda: ACTS[0](), value()),
    "a weak reference": (lambda: REF().d["step"], put(SETTINGS.d, "step", 5)),
    "a builtin that is hidden": (lambda: abs(-1), (lambda: globals().update(abs=lambda x: 5), lambda: globals().pop("abs"))),
    "single dispatch": (lambda: dispatched("a"), value()),
    "a descriptor": (lambda: DESCRIBED.d, value()),
    "attributes that a module makes": (lambda: LAZY.K, put(LAZY.TABLE, "K", 5)),
    "a module in a module": (lambda: PACKAGE.sub.K, put(PACKAGE.sub, "K", 5)),
    "a class pattern": (lambda: matched(SETTINGS), put(Settings, "step", 5)),
    "arguments of the process": (lambda: 5 if "five" in sys.argv else 1, (lambda: sys.argv.append("five"),
                                                                         lambda: sys.argv.remove("five"))),
    "the default dtype": (of_default_dtype, (lambda: torch.set_default_dtype(torch.float64),
                                             lambda: torch.set_default_dtype(torch.float32))),
    "a generator": (lambda: next(made()), value()),
    "a comprehension": (lambda: [VALUE for _ in range(1)][0], value()),
    "an attribute that comes later": (lambda: 5 if hasattr(DERIVED, "late") else 1, late(DERIVED)),
    "a module's name that comes later": (lambda: getattr(PACKAGE, "late", 1), late(PACKAGE)),
    "the length of a list": (lambda: len(ACTS), (lambda: ACTS.extend([1] * 4), lambda: ACTS.__delitem__(slice(1, None)))),
    "the type of a number": (lambda: 5 if VALUE is True else 1, put(globals(), "VALUE", True)),
    "an object in a dict made anew": (lambda: item({"a": SETTINGS}, "a").d["step"], put(SETTINGS.d, "step", 5)),
    "map": (lambda: [*map(item, [SETTINGS.d], ["step"])][0], put(SETTINGS.d, "step", 5)),
    "types of Python": (lambda: VALUE if isinstance(item, types.FunctionType) else 9, value()),
    "a partial made anew": (lambda: functools.partial(item, SETTINGS.d)("step"), put(SETTINGS.d, "step", 5)),
}


@pytest.mark.parametrize("way", WAYS)
def test_ways_to_a_value(way):
    read, (change, undo) = WAYS[way]

    @tilelang.jit(out_idx=-1, execution_backend="tile")
    def make(n):
        return shifted(n, read())

    def result():
        return make(4)(np.zeros(4, np.int32))[0]

    assert (result(), result()) == (1, 1)
    first = make(4)
    change()
    try:
        assert (result(), result()) == (5, 5)
    finally:
        undo()
    assert result() == 1 and make(4) is first and not make.captured.missed


def test_names_in_postponed_annotations_count(monkeypatch):
    @tilelang.jit(out_idx=-1, execution_backend="tile")
    def make():
        @T.prim_func
        def main(B: T.Tensor((SIZE,), "int32")):
            with T.Kernel(1, threads=32):
                B[0] = 1
        return main

    @tilelang.jit(execution_backend="tile")
    def eager(A: T.Tensor((SIZE,), "int32")):
        with T.Kernel(1, threads=32):
            A[0] = 1

    assert make()().shape == (4,)
    eager(np.zeros(4, np.int32))
    monkeypatch.setitem(globals(), "SIZE", 8)
    assert make()().shape == (8,)
    eager(np.zeros(8, np.int32))


def test_variables_of_a_thread_count_in_each_thread():
    local, out = threading.local(), []
    local.v = 1

    @tilelang.jit(out_idx=-1, execution_backend="tile")
    def make(n):
        return shifted(n, getattr(local, "v", 5))

    def result():
        return make(4)(np.zeros(4, np.int32))[0]

    assert result() == 1
    thread = threading.Thread(target=lambda: out.append(result()))
    thread.start()
    thread.join()
    assert out == [5] and result() == 1
