"""What a kernel is compiled for besides its arguments: values around the function, the object of a method, the mode."""

import copy
import functools
import pickle
import types

import numpy as np
import pytest

import tilelang
import tilelang.language as T
from tilelang.jit.captured import Captured

STEP = 1


def shifted(n, step):
    @T.prim_func
    def main(A: T.Tensor((n,), "int32"), B: T.Tensor((n,), "int32")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(n):
                B[i] = A[i] + step
    return main


@tilelang.jit(out_idx=-1, execution_backend="tile")
def by_global(n):
    return shifted(n, STEP)


@tilelang.jit(out_idx=-1, execution_backend="tile")
def through_helper(n):
    return _helper(n)


def _helper(n):
    return shifted(n, STEP)


def zeros(n=4):
    return np.zeros(n, np.int32)


def test_a_changed_global_or_closure_compiles_a_new_kernel(monkeypatch):
    step, calls = 1, 0

    @tilelang.jit(execution_backend="tile")
    def by_closure(A):
        N = T.const("N")
        A: T.Tensor((N,), "int32")
        with T.Kernel(1, threads=32):
            for i in T.Parallel(N):
                A[i] = step

    @tilelang.jit(out_idx=-1, execution_backend="tile")
    def counting(n):
        nonlocal calls
        calls += 1  # what a function assigns itself is no input of it
        return shifted(n, step)

    a = zeros()
    by_closure(a)
    assert a[0] == 1 and counting(4) is counting(4) and calls == 2  # one call to see that it is a factory
    step = 2
    by_closure(a)
    assert a[0] == 2 and counting(4)(zeros())[0] == 2 and calls == 3
    for make in by_global, through_helper:
        monkeypatch.setitem(globals(), "STEP", 1)
        first = make(4)
        assert make(4) is first and first(zeros())[0] == 1
        monkeypatch.setitem(globals(), "STEP", 5)
        assert make(4)(zeros())[0] == 5
        monkeypatch.setitem(globals(), "STEP", 1)
        assert make(4) is first


ACT = T.floor


def test_a_name_that_stood_for_a_function_of_the_language_kept_its_kernel_when_it_stood_for_another(monkeypatch):
    act = T.floor

    @tilelang.jit(execution_backend="tile")
    def by_global(A):
        N = T.const("N")
        A: T.Tensor((N,), "float32")
        with T.Kernel(1, threads=32):
            for i in T.Parallel(N):
                A[i] = ACT(A[i])

    @tilelang.jit(execution_backend="tile")
    def by_closure(A):
        N = T.const("N")
        A: T.Tensor((N,), "float32")
        with T.Kernel(1, threads=32):
            for i in T.Parallel(N):
                A[i] = act(A[i])

    def of(kernel):
        a = np.full(4, -4.5, np.float32)
        kernel(a)
        return a[0]

    first = by_global.compile(np.zeros(4, np.float32))
    assert of(by_global) == of(by_closure) == -5
    monkeypatch.setitem(globals(), "ACT", T.abs)
    act = T.abs
    assert of(by_global) == of(by_closure) == 4.5
    monkeypatch.setitem(globals(), "ACT", lambda x: x + 1)
    act = lambda x: x + 1  # noqa: E731 - what is rebound is the point
    assert of(by_global) == of(by_closure) == -3.5
    monkeypatch.setitem(globals(), "ACT", T.floor)
    assert of(by_global) == -5 and by_global.compile(np.zeros(4, np.float32)) is first


def test_a_helper_that_is_wrapped_or_reads_another_number_after_a_call_counts(monkeypatch):
    monkeypatch.setitem(globals(), "STEP", 1)

    def plain(n):
        return shifted(n, STEP)

    def helper(n):
        return plain(n)

    @tilelang.jit(out_idx=-1, execution_backend="tile")
    def make(n):
        return helper(n)

    first = make(4)
    assert make(4) is first and make.captured.found is not None and first(zeros())[0] == 1
    monkeypatch.setitem(globals(), "STEP", 7)
    assert make(4)(zeros())[0] == 7 and make(4)(zeros())[0] == 7
    monkeypatch.setitem(globals(), "STEP", 1)
    assert make(4) is first
    plain = lambda n: shifted(n, 9)  # noqa: E731, F811 - what is rebound is the point
    assert make(4)(zeros())[0] == 9
    monkeypatch.setitem(globals(), "STEP", [1])
    helper = lambda n: shifted(n, STEP[0])  # noqa: E731, F811
    assert make(4)(zeros())[0] == 1
    STEP[0] = 5
    assert make(4)(zeros())[0] == 5


def test_pass_configs_changed_in_place_between_calls_make_another_kernel():
    configs = {"tl.enable_fast_math": False}

    @tilelang.jit(execution_backend="tile", pass_configs=configs)
    def eager(A):
        N = T.const("N")
        A: T.Tensor((N,), "float32")
        with T.Kernel(1, threads=32):
            for i in T.Parallel(N):
                A[i] = 1

    kernels = []
    for value in (False, True, True, False):
        (eager.pass_configs or configs)["tl.enable_fast_math"] = value
        eager(np.zeros(4, np.float32))
        kernels.append(eager.compile(np.zeros(4, np.float32)))
    assert kernels[0] is kernels[3] and kernels[1] is kernels[2] and kernels[0] is not kernels[1]


def test_settings_that_decide_a_kernel_count_wherever_they_stand_and_others_do_not(monkeypatch):
    @tilelang.jit
    def eager(A):
        N = T.const("N")
        A: T.Tensor((N,), "int32")
        with T.Kernel(1, threads=32):
            for i in T.Parallel(N):
                A[i] = 1

    monkeypatch.setenv("TILELANG_TARGET", "cpu")
    first = eager.surroundings()
    assert eager.compile(zeros()).target.kind == "cpu"
    with tilelang.env.using(TILELANG_DEBUG=0):
        assert eager.surroundings() == first
    with tilelang.env.using(TILELANG_EXECUTION_BACKEND="tile"):
        assert eager.surroundings() != first and eager.compile(zeros()).execution_backend == "tile"
    monkeypatch.setenv("TILELANG_TARGET", '{"kind": "cuda", "arch": "sm_80"}')
    monkeypatch.setenv("TILELANG_EXECUTION_BACKEND", "simulator")
    assert eager.surroundings() != first and eager.compile(zeros()).target.is_cuda


class Numbers:
    step = 1

    def __init__(self):
        self.own = {"steps": [1, {"inner": 1}]}

    def of_method(self):
        return STEP


TABLE, ARRAY, NUMBERS, ACTS = {"a": [1, (2, 1)], "b": {3}}, np.array([1, 2]), Numbers(), {"act": lambda: ACTS["by"], "by": 1}
MODULE = types.ModuleType("numbers_of_mine")
MODULE.step, MODULE.other = 1, 0
READS = {"a list in a dict": (lambda: TABLE["a"][1][1], lambda: TABLE["a"].__setitem__(1, (2, 5))),
         "a set": (lambda: max(TABLE["b"]) - 2, lambda: TABLE["b"].add(7)),
         "an array": (lambda: int(ARRAY[0]), lambda: ARRAY.__setitem__(0, 5)),
         "an attribute": (lambda: NUMBERS.own["steps"][1]["inner"], lambda: NUMBERS.own["steps"][1].update(inner=5)),
         "a class": (lambda: NUMBERS.step, lambda: setattr(Numbers, "step", 5)),
         "a class by its name": (lambda: Numbers.step, lambda: setattr(Numbers, "step", 5)),
         "a method": (lambda: NUMBERS.of_method(), lambda: globals().update(STEP=5)),
         "a function in a dict": (lambda: ACTS["act"](), lambda: ACTS.update(by=5)),
         "another function": (lambda: ACTS["act"](), lambda: ACTS.update(act=lambda: 5)),
         "a module": (lambda: MODULE.step, lambda: setattr(MODULE, "step", 5)),
         "bound arguments": (functools.partial(lambda t: t[0], [1]), None)}


@pytest.fixture
def unchanged():
    """What READS read is as at first, whichever of them ran before, and afterwards."""
    def restore():
        TABLE.update(a=[1, (2, 1)], b={3})
        ARRAY[0] = 1
        NUMBERS.own["steps"][1].update(inner=1)
        Numbers.step = MODULE.step = 1
        ACTS.update(act=lambda: ACTS["by"], by=1)
        globals().update(STEP=1)

    restore()
    yield
    restore()


@pytest.mark.usefixtures("unchanged")
@pytest.mark.parametrize("name", READS)
def test_what_containers_objects_and_modules_hold_counts(name):
    read, change = READS[name]
    made, run = [], []  # what tracing itself changes asks for no other program

    @tilelang.jit(out_idx=-1, execution_backend="tile")
    def make(n):
        made.append(n)
        return shifted(n, read())

    @tilelang.jit(execution_backend="tile")
    def eager(A):
        N = T.const("N")
        A: T.Tensor((N,), "int32")
        run.append(N)
        with T.Kernel(1, threads=32):
            for i in T.Parallel(N):
                A[i] += read()

    a = zeros()
    first = make(4)
    eager(a)
    traced = len(made), len(run)
    MODULE.other += 1
    assert make(4) is first and first(zeros())[0] == 1
    eager(a)
    assert a[0] == 2 and (len(made), len(run)) == traced
    change = change or (lambda: read.args[0].__setitem__(0, 5))
    change()
    assert make(4)(zeros())[0] == 5
    eager(a)
    assert a[0] == 7


def test_keys_of_equal_surroundings_have_one_text():
    """Results of tuning are found again by it, in another process too."""
    def key(n, how):
        names = {"T": T, "cfg": types.SimpleNamespace(n=n), "NUMBERS": NUMBERS}
        exec(f"def helper(x, k=2):\n    return [x {how} i for i in range(k)]\n"
             "def f(x):\n    return helper(x + cfg.n, NUMBERS)", names)
        return Captured(names["f"]).token()

    a, b = key(1, "+"), key(1, "+")
    assert a != b and str(a) == str(b)
    assert str(key(2, "+")) != str(a) and str(key(1, "-")) != str(a)


class Settings:
    step = 3


class Layer:
    """Kernels written as methods."""

    amount = 7

    def __init__(self, step):
        self.step, self.inner = step, Settings()

    @tilelang.jit(execution_backend="tile")
    def eager(self, A):
        N = T.const("N")
        A: T.Tensor((N,), "int32")
        B = T.empty((N,), "int32")
        with T.Kernel(1, threads=32):
            for i in T.Parallel(N):
                B[i] = A[i] + (self.step + self.inner.step)
        return B

    @tilelang.jit(out_idx=-1, execution_backend="tile")
    def lazy(self, n):
        return shifted(n, self.step)

    @classmethod
    @tilelang.jit(out_idx=-1, execution_backend="tile")
    def of_class(cls, n):
        return shifted(n, cls.amount)

    kept = by_global  # not a method: it takes its own arguments alone


def test_methods_are_compiled_for_the_attributes_of_their_object():
    layer = Layer(1)
    assert layer.eager(zeros())[0] == 4 and Layer.eager(layer, zeros())[0] == 4
    layer.inner.step = 10
    assert layer.eager(zeros())[0] == 11 and Layer(2).eager(zeros())[0] == 5
    assert layer.lazy(4) is layer.lazy.compile(n=4) and layer.lazy(4)(zeros())[0] == 1
    assert [k(zeros(n))[0] for k, n in zip(layer.lazy.par_compile([(4,), {"n": 5}]), (4, 5))] == [1, 1]
    assert Layer.of_class(4)(zeros())[0] == 7 and layer.kept(4) is by_global(4)
    assert "B[i] = " in str(layer.lazy.get_tir(4)) and layer.lazy.get_kernel_source(4) and layer.eager.__name__ == "eager"


def test_objects_given_as_arguments_count_with_their_attributes():
    @tilelang.jit(out_idx=-1, execution_backend="tile")
    def make(n, given):
        return shifted(n, given() if callable(given) else given.step)

    class Plan(Settings):
        def __init__(self, step):
            self.step = step

        def get(self):
            return self.step

    plan = Plan(1)
    for given in plan, plan.get:
        plan.step = 1
        first = make(4, given)
        assert make(4, given) is first and first(zeros())[0] == 1
        plan.step = 2
        assert make(4, given)(zeros())[0] == 2


def test_copies_and_pickles():
    assert by_global.__module__ == __name__ and pickle.loads(pickle.dumps(by_global)) is by_global
    kernel = by_global(4)
    assert copy.deepcopy({"kernel": kernel})["kernel"] is kernel and copy.copy(kernel) is kernel
    assert pickle.loads(pickle.dumps(kernel))(zeros())[0] == STEP
    assert pickle.loads(pickle.dumps(shifted(4, 1))) == shifted(4, 1)


def test_a_factory_that_fails_is_taken_for_what_it_is_at_its_next_call():
    def make(n):
        if n < 0:
            raise KeyError("no such size")
        return shifted(n, 1)

    for out_idx in None, -1:
        @tilelang.jit(out_idx=out_idx, execution_backend="tile")
        def factory(n):
            return make(n)

        assert factory.is_lazy_mode() == (out_idx is not None)
        with pytest.raises(KeyError, match="no such size"):
            factory(-1)
        assert factory(4)(*[zeros()] * (2 if out_idx is None else 1)) is None or out_idx == -1
        assert factory.mode == "lazy"
    with pytest.raises(TypeError, match="missing a required argument"):
        tilelang.jit(functools.partial(make), out_idx=-1)()


def test_functions_without_source_are_refused_as_such():
    names = {"T": T}
    exec("def f(n):\n    @T.prim_func\n    def main(A: T.Tensor((n,), 'int32')):\n        pass\n    return main", names)
    with pytest.raises(ValueError, match="the source of `main` is not available"):
        tilelang.jit(names["f"], out_idx=-1)(4)
