"""What a kernel is compiled for besides its arguments: values around the function, the object of a method, the mode."""

import copy
import functools
import pickle

import numpy as np
import pytest

import tilelang
import tilelang.language as T

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
