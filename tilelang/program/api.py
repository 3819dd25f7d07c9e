"""The decorator @tilelang.program: tracing for the arguments of a call, reference results, tile source, compiled calls."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, TypeVar

from tilelang.env import Environment, env
from tilelang.errors import TileLangError, bare, error, for_user, register
from tilelang.ir import dtype
from tilelang.jit.captured import Captured
from tilelang.jit.decorator import names_around
from tilelang.target import Target

from .graph import Graph, Node, input_node
from .run import Runner, recipe_of, target_of, tuned
from .tensor import Tensor, current
from .trace import called, parameters_of, traced

register("program-function", TypeError, "@tilelang.program is put on something that is no plain function",
         "put it on a function whose parameters are tensors", expected="a function that is defined with `def`")
register("program-call", TypeError, "a program is called with arguments that its function does not have",
         "give each parameter without a default one value")

_OPEN = object()
_DECIDING = (Environment.TILELANG_TARGET, Environment.TILELANG_DEFAULT_TARGET)
MOST_KEPT = 4096  # calls and graphs of a program that are remembered
Fn = TypeVar("Fn", bound=Callable[..., Any])


def _for_users(fn: Fn) -> Fn:
    """Decorator of what users call: its errors leave out the frames of this package."""
    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return fn(*args, **kwargs)
        except TileLangError as e:
            raise for_user(e)  # noqa: B904 - for_user decides what goes with it

    return call  # type: ignore[return-value]


def _kept(store: dict[Any, Any], key: Any, make: Callable[[], Any]) -> Any:
    """The value of a key, made where the store does not have it; a full store starts again."""
    found = store.get(key)
    if found is None:
        found = make()
        if len(store) >= MOST_KEPT:
            store.clear()
        store[key] = found
    return found


def _has_axes(x: Any) -> bool:
    return hasattr(x, "shape") and hasattr(x, "dtype") and not isinstance(x, type)


@dataclass(frozen=True)
class ProgramOptions:
    """The arguments of @tilelang.program besides the function."""

    target: Any = None
    pass_configs: Any = None
    tune: bool = False


class Program:
    """A whole-tensor program.  Called with arrays, it runs compiled; `reference` runs it in NumPy.

    fn: the Python function.  Called inside another program with its tensors, it becomes part of that.
    """

    def __init__(self, fn: Callable[..., Any], options: ProgramOptions, outer: Mapping[str, Any] | None) -> None:
        self.fn, self.options = fn, options
        self.__name__, self.__doc__, self.__wrapped__ = fn.__name__, fn.__doc__, fn
        self.__module__ = fn.__module__
        self.signature = inspect.signature(fn)
        self.parameters, self.symbols = parameters_of(fn, outer)
        self._captured = Captured(fn)
        self._graphs: dict[Any, Graph] = {}
        self._runners: dict[Any, Runner] = {}
        self._ready: dict[Any, tuple[Runner, list[int]]] = {}  # for calls by position

    def __repr__(self) -> str:
        return f"<program {self.__name__}{bare(self.signature)}>"

    # ---- arguments --------------------------------------------------------------------------------------------------
    def bound(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Parameter -> argument.  Raises program-call."""
        try:
            found = self.signature.bind(*args, **kwargs)
        except TypeError as e:
            raise error("program-call", f"`{self.__name__}`: ‹{e}›",
                        expected=f"{self.__name__}{bare(self.signature)}") from None
        found.apply_defaults()
        return found.arguments

    @_for_users
    def graph(self, *args: Any, **kwargs: Any) -> Graph:
        """The operator graph for arrays, or for anything with a shape and a dtype.

        Parameters that declare a shape may be left out, or be None.
        """
        given = {**dict(zip((p.name for p in self.parameters), args)), **kwargs}
        for p in self.parameters:
            if given.get(p.name) is None and p.dtype is not None:
                given[p.name] = _OPEN
        return self._graph(self.bound((), given))[0]

    def _graph(self, values: Mapping[str, Any]) -> tuple[Graph, list[Any]]:
        """The graph of a call, traced once for each of its shapes, types and Python values; the tensors of the call."""
        arrays: list[Any] = []
        given: dict[str, Any] = {}
        for p in self.parameters:
            x = given[p.name] = values[p.name]
            if p.shape is not None and p.dtype is not None:
                if x is not _OPEN:
                    p.check(x, self.__name__)
                given[p.name] = input_node(p.name, len(arrays), p.shape, p.dtype)
            elif _has_axes(x):
                given[p.name] = input_node(p.name, len(arrays), tuple(map(int, x.shape)), dtype(x.dtype))
            arrays += [x] if isinstance(given[p.name], Node) else []
        key = (self._surroundings(), *((v.shape, str(v.dtype)) if isinstance(v, Node) else repr(v) for v in given.values()))
        return _kept(self._graphs, key, lambda: traced(self.fn, given, key[1:], self.symbols)), arrays

    # ---- running ----------------------------------------------------------------------------------------------------
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._inlined(args, kwargs) if current() is not None else self._called(args, kwargs)

    def _inlined(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The results of a call inside another program, where the function runs in that trace.  Raises program-argument."""
        values = self.bound(args, kwargs)
        for p in self.parameters:
            p.check(values[p.name], self.__name__)
        key = ((x.shape, str(x.dtype)) if isinstance(x, Tensor) else repr(x) for x in values.values())
        found = {s: t for p in self.parameters for s, t in zip(p.shape or (), getattr(values[p.name], "shape", ()))}
        root = current().root  # type: ignore[union-attr]
        outer, root.symbols = root.symbols, {v: found[s] for v, s in self.symbols.items() if s in found}
        try:
            return called(self.fn, values, tuple(key))
        finally:
            root.symbols = outer

    @_for_users
    def _called(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        key = None if kwargs else (self._surroundings(), *[
            (type(x), x.shape, x.dtype, getattr(x, "device", None)) if hasattr(x, "shape") else (type(x), x) for x in args])
        try:
            ready = self._ready.get(key) if key is not None else None
        except TypeError:  # an argument without a hash
            ready = key = None
        if ready is None:
            missed = self._captured.missed
            ready = self._prepared(self.bound(args, kwargs))
            if key is not None and missed == self._captured.missed and ready[0].final:
                _kept(self._ready, key, lambda: ready)
        runner, at = ready
        values = args if not kwargs and len(args) == len(self.parameters) else list(self.bound(args, kwargs).values())
        return runner([values[k] for k in at])

    def _surroundings(self) -> Any:
        """What a call depends on besides its arguments: values that the function reads from outside, the default target."""
        found = self._captured.found
        token = found.token if found is not None and found.hold() else self._captured.token()
        return token if self.options.target is not None else (token, Target.current(), env.standing(_DECIDING))

    def _prepared(self, values: Mapping[str, Any]) -> tuple[Runner, list[int]]:
        """The compiled program of a call, and which of the parameters are its inputs."""
        graph, arrays = self._graph(values)
        graph.bound([tuple(getattr(x, "shape", ())) for x in arrays])
        target = target_of(arrays, self.options.target)
        key, configs = (graph.digest(), str(target)), self.options.pass_configs
        runner = self._runners.get(key) or (tuned(graph, target, configs, arrays) if self.options.tune else
                                            Runner(graph, target, configs))
        if runner.final:
            _kept(self._runners, key, lambda: runner)
        names = [n.attrs["name"] for n in graph.inputs]
        return runner, [k for k, p in enumerate(self.parameters) if p.name in names]

    @_for_users
    def reference(self, *args: Any, **kwargs: Any) -> Any:
        """The results by the definition of each operation, in NumPy, in the package of the first array.

        16-bit floats are computed in float32, float64 in float64; sums as T.einsum says.  Runs on the CPU.

        Example:
            @tilelang.program
            def f(x):
                return T.softmax(x @ x.T)

            f.reference(numpy.ones((4, 4), "float32"))
        """
        from .numpy_values import referenced  # 110 ms: the reference interpreter

        graph, arrays = self._graph(self.bound(args, kwargs))
        sizes = graph.bound([tuple(getattr(x, "shape", ())) for x in arrays])
        out = referenced(graph, arrays, sizes)
        return out[0] if graph.single else tuple(out)

    @_for_users
    def tile_source(self, shapes: Mapping[str, Any] | None = None, target: Any = None) -> str:
        """The text of a Python module with the tile programs that a call runs, which can be edited and compiled.

        shapes: size of each named size that the kernels are made for, others stay open; or, for parameters that declare no
        shape, parameter -> array, or (shape, dtype).  target: as tilelang.compile, default that of the program.
        """
        given = dict(shapes or {})
        arrays = {p.name: _like_array(given.pop(p.name)) for p in self.parameters if p.name in given}
        graph = self.graph(**arrays)
        for name in sorted(given.keys() - set(graph.dims)):
            raise error("program-call", f"`{self.__name__}` has no size or parameter `‹{name}›`",
                        expected=", ".join([*graph.dims, *(p.name for p in self.parameters)]))
        chosen = target_of([], self.options.target if target is None else target)
        known = None if given else self._runners.get((graph.digest(), str(chosen)))  # tuned, where calls are
        return (recipe_of(graph, given, chosen) if known is None else known.recipe).source


def _like_array(x: Any) -> Any:
    """A value of `shapes`: (shape, dtype) as something that has these."""
    return SimpleNamespace(shape=tuple(x[0]), dtype=x[1]) if isinstance(x, tuple) and not _has_axes(x) else x


@_for_users
def decorated(fn: Any, options: ProgramOptions) -> Program:
    """The program of a function.  Raises program-function."""
    if not inspect.isfunction(fn):
        raise error("program-function", f"@tilelang.program is put on ‹a {type(fn).__name__}›")
    return Program(fn, options, names_around(fn))


def program(fn: Any = None, *, target: Any = None, pass_configs: Any = None, tune: bool = False) -> Any:
    """Make a function of whole tensors a program: traced for the shapes of a call, cut into kernels, compiled, cached.

    Parameters annotated with T.Tensor(shape, dtype) declare their shapes; T.dynamic symbols in them are sizes that one kernel
    takes at each call.  Without an annotation, the shapes and types of each call are compiled in.  An element type as the
    annotation (T.float32) declares a number of the call; other values are constants of the program.

    target: as tilelang.compile; None: a GPU where the arrays lie on one.  pass_configs: of all kernels.
    tune: the first call with new shapes times some plans of each kernel on the arrays' GPU (tiles, stages, pieces of loops),
    keeps the fastest and stores it on disk; that of the cost model is one of them and stays unless another is 2 % faster.
    The sizes of that call count for open sizes.  On the CPU and simulators, and in a call that goes into a CUDA graph, the cost
    models decide.
    Raises program-function, program-parameter, and at a call what tracing and compiling raise.

    Example:
        n = T.dynamic("n")

        @tilelang.program
        def attention(q: T.Tensor((n, 64), "float16"), k: T.Tensor((n, 64), "float16"), v: T.Tensor((n, 64), "float16")):
            return T.softmax(q @ k.T * 0.125) @ v
    """
    options = ProgramOptions(target, pass_configs, tune)
    return (lambda f: decorated(f, options)) if fn is None else decorated(fn, options)


__all__ = ["Program", "program"]
