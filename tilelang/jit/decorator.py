"""@tilelang.jit: a Python function that makes or is a kernel, compiled per set of compile-time values."""

from __future__ import annotations
import __future__

import ast
import functools
import inspect
import sys
import types
from collections.abc import Callable, Iterable
from operator import is_
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar, overload

from tilelang.env import Environment, env
from tilelang.errors import (InternalError, JITNoBuilderError, TileLangError, error, for_user, keyword_hint, named_arguments,
                             register, strict)
from tilelang.ir import Buffer
from tilelang.ir.record import record
from tilelang.target import Target
from tilelang.transform.framework.scope import current_config
from tilelang.language.tracing.prim_func import PrimFunc, outer_locals
from tilelang.language.tracing.source_text import remember, text_of

from .artifact import program_of
from .captured import Captured
from .compiling import run_parallel
from .eager import EagerCalls
from .graph_names import named
from .kernel import JITKernel, compile_request
from .requests import check_host, make_request
from .keys import SIMPLE, freeze
from .methods import InClasses
from .torch_calls import in_graphs

if TYPE_CHECKING:
    from .kernel import Output

register("jit-out-idx", ValueError, "out_idx is given to an eager function, which returns its T.empty tensors",
         expected="out_idx with a function that returns a @T.prim_func")
register("jit-not-a-function", TypeError, "@tilelang.jit is put on something that is not a plain function",
         expected="a plain function")
register("jit-no-program", TypeError, "a lazy function returned something that is not a PrimFunc",
         expected="a @T.prim_func as the function's result")
register("jit-arguments", TypeError, "a lazy function is called with arguments that do not fit",
         "give each parameter without a default one value")
register("jit-configs", ValueError, "par_compile is given configurations that are neither tuples nor dicts",
         expected="a tuple or a dict for each configuration")

P = ParamSpec("P")
R = TypeVar("R")
_SIMPLE_TYPES = frozenset(SIMPLE)
_DECIDING = (Environment.TILELANG_TARGET, Environment.TILELANG_DEFAULT_TARGET, Environment.TILELANG_EXECUTION_BACKEND)


def names_around(fn: Any) -> dict[str, Any] | None:
    """Locals of the functions that enclose a decorated one, where postponed annotations may need them; else None."""
    code = getattr(fn, "__code__", None)
    if code is None or not code.co_flags & __future__.annotations.compiler_flag:
        return None
    depth = 1
    while sys._getframe(depth).f_globals.get("__name__", "").startswith("tilelang."):
        depth += 1
    return outer_locals(depth + 1, fn) or None


def _definition(func: Any) -> tuple[Any, Any, Any]:
    return getattr(func, "__code__", None), getattr(func, "__defaults__", None), getattr(func, "__kwdefaults__", None)


@record
class JitOptions:
    """The arguments of @tilelang.jit besides the function."""

    out_idx: Any = None
    target: Any = None
    target_host: Any = None
    execution_backend: str | None = None
    verbose: bool | None = None
    pass_configs: Any = None
    debug_root_path: str | None = None
    compile_flags: Any = None


class JITImpl(InClasses, Generic[P, R]):
    """The object that @tilelang.jit makes of a function.

    mode: "auto" until the first use, then "lazy" (a factory that returns a PrimFunc: calling gives the kernel) or
    "eager" (the body is the kernel: calling runs it).
    """

    def __init__(self, func: Any, options: JitOptions) -> None:
        self.func, self.options = func, options
        self.out_idx, self.target, self.target_host = options.out_idx, options.target, options.target_host
        self.execution_backend, self.verbose = options.execution_backend, options.verbose
        self.pass_configs = dict(options.pass_configs) if options.pass_configs else {}
        self.debug_root_path, self.compile_flags = options.debug_root_path, options.compile_flags
        self.mode = "auto"
        self._fast: dict[Any, JITKernel] = {}
        self._kernels: dict[Any, JITKernel] = {}
        self._eager: EagerCalls | None = None
        self._source: str | None = None
        self._signature: inspect.Signature | None = None
        self.outer_names = names_around(func)
        self.captured = Captured(func)
        self._definition = _definition(func)
        self._configs: tuple[Any, tuple[Any, ...]] | None = None
        self.graph_name = named(self)
        remember(func)
        self.first_parameter = next(iter(getattr(getattr(inspect.unwrap(func), "__code__", None), "co_varnames", ())), "")
        self.__doc__, self.__module__ = getattr(func, "__doc__", None), getattr(func, "__module__", None) or __name__

    def __getattr__(self, name: str) -> Any:
        if name in ("__name__", "__qualname__", "__closure__", "__code__", "__globals__", "__defaults__",
                    "__kwdefaults__"):
            return getattr(self.func, name)
        if name == "__wrapped__":
            return self.func
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __repr__(self) -> str:
        return f"<tilelang.jit {getattr(self.func, '__name__', self.func)!r} ({self.mode})>"

    @property
    def factory(self) -> Any:
        """The function to call for a program.

        With postponed annotations, names that only inner annotations use are in no closure.  They are added to the globals
        of the returned function, with the values that they had at the decoration."""
        if not self.outer_names:
            return self.func
        f = self.func
        lent = types.FunctionType(f.__code__, {**f.__globals__, **self.outer_names}, f.__name__, f.__defaults__,
                                  f.__closure__)
        lent.__kwdefaults__, lent.__annotations__, lent.__module__ = f.__kwdefaults__, f.__annotations__, f.__module__
        return lent

    @property
    def func_source(self) -> str:
        """Source text of the function, "" where Python cannot find it."""
        if self._source is None:
            self._source = text_of(self.func)
        return self._source

    @property
    def signature(self) -> inspect.Signature:
        if self._signature is None:
            self._signature = inspect.signature(self.func)
        return self._signature

    def is_redefined(self) -> bool:
        """Whether the function has been given other code or defaults; then everything known about it is forgotten."""
        now = _definition(self.func)
        if all(map(is_, now, self._definition)):
            return False
        self._definition, self.mode = now, "auto"
        self._eager, self._source, self._signature = None, None, None
        return True

    # ---- which of the two styles ------------------------------------------------------------------------------------
    def initialize_jit_mode(self, /, *args: Any, **kwargs: Any) -> str:
        """Determine the mode from the function and the arguments of the present call.

        The mode is kept unless it was a guess: when the call fails before the mode is known, the next call decides.
        """
        self.is_redefined()
        if self.mode == "auto":
            if program_of(self.func) is not None or not callable(self.func):
                raise error("jit-not-a-function", f"@tilelang.jit takes a function, found {type(self.func).__name__}",
                            hint="compile a PrimFunc with tilelang.compile(func)")
            mode, sure = ("lazy", True) if self._has_prim_func() else self._tried(args, kwargs)
            if mode == "eager" and not hasattr(self.func, "__code__"):
                raise error("jit-not-a-function", f"@tilelang.jit takes a function defined by def, found "
                            f"{getattr(self.func, '__name__', '') or type(self.func).__name__} ({type(self.func).__name__})",
                            found=f"a {type(self.func).__name__}", hint="decorate the def itself, or a factory that returns "
                            "a @T.prim_func")
            if mode == "eager" and self.out_idx is not None:
                raise error("jit-out-idx", "out_idx is only supported in lazy mode: an eager function returns the tensors it "
                            "makes with T.empty", found=f"out_idx={self.out_idx!r} with an eager function",
                            hint="remove out_idx, or return a @T.prim_func")
            if not sure:
                return mode
            self.mode = mode
        return self.mode

    def is_lazy_mode(self) -> bool:
        return self.initialize_jit_mode() == "lazy"

    def _has_prim_func(self) -> bool:
        """Whether the source contains a nested function decorated with prim_func."""
        try:
            tree = ast.parse(self.func_source)
        except SyntaxError:
            return False
        outer = next((n for n in tree.body if isinstance(n, ast.FunctionDef)), None)
        for n in ast.walk(outer) if outer is not None else ():
            if n is not outer and isinstance(n, ast.FunctionDef):
                for d in n.decorator_list:
                    d = d.func if isinstance(d, ast.Call) else d
                    if (d.attr if isinstance(d, ast.Attribute) else getattr(d, "id", "")) == "prim_func":
                        return True
        return False

    def _tried(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, bool]:
        """(mode, whether it is certain) of a function without a nested prim_func.

        Such a function may be a factory that calls another function to make the program; only a call shows that."""
        tree = self.func_source
        if "T.Kernel" in tree or "T.const" in tree or "T.empty" in tree:
            return "eager", True
        try:
            return ("lazy" if program_of(self.factory(*args, **kwargs)) is not None else "eager"), True
        except JITNoBuilderError:
            return "eager", True
        except Exception:
            return ("eager" if self.out_idx is None else "lazy"), False

    # ---- calling ----------------------------------------------------------------------------------------------------
    def __getitem__(self, grid: Any) -> Any:
        raise error("kernel-keyword", f"`{self._name()}` takes no grid in brackets", found=f"{self._name()}[...]",
                    hint=f"call {self._name()}(...): the grid is what T.Kernel says")

    @overload  # the body is the kernel; also where the function has no annotation of its result
    def __call__(self: JITImpl[P, Buffer | tuple[Buffer, ...]], /, *args: P.args, **kwargs: P.kwargs) -> Output: ...
    @overload  # a factory
    def __call__(self: JITImpl[P, PrimFunc], /, *args: P.args, **kwargs: P.kwargs) -> JITKernel: ...  # type: ignore[overload-overlap]
    @overload
    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> R: ...
    @overload
    def __call__(self, /, *args: Any, out: Any, **kwargs: Any) -> Output: ...
    @in_graphs
    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        if kwargs and kwargs.pop("__return_kernel", False):  # an older way to ask for the kernel
            return self.compile(*args, **kwargs)
        try:
            if self.mode == "eager":
                return self.eager.call(args, kwargs)
            if self.mode == "lazy":
                return self._lazy(args, kwargs)
            mode = self.initialize_jit_mode(*args, **kwargs)
            out = self.eager.call(args, kwargs) if mode == "eager" else self._lazy(args, kwargs)
            self.mode = mode
            return out
        except (TileLangError, InternalError) as e:
            raise for_user(e)  # noqa: B904 - for_user decides what goes with it

    @property
    def eager(self) -> EagerCalls:
        """The eager side, made on first use."""
        if self._eager is None:
            self._eager = EagerCalls(self)
        return self._eager

    def surroundings(self) -> Any:
        """What a compilation depends on besides the arguments: pass configs, the values that the function reads from closures
        and globals, and target and backend where the decorator does not fix them."""
        configs: tuple[Any, ...] = tuple(self.pass_configs.items()) if self.pass_configs else ()
        scope = current_config()
        if configs or scope:
            configs = self._frozen_configs((*scope.items(), *configs))
        found = self.captured.found
        token = found.token if found is not None and found.hold() else self.captured.token()
        if self.target is None or self.target == "auto":
            return configs, token, Target.current(), env.standing(_DECIDING)
        return (configs, token) if configs else token

    def _frozen_configs(self, configs: tuple[Any, ...]) -> tuple[Any, ...]:
        """A hashable form of the pass configs.  They are mostly those of the previous call, whose form is kept."""
        token = configs, tuple([type(v) for _, v in configs])
        held = self._configs
        if held is not None and held[0] == token:
            return held[1]
        frozen = tuple((str(k), freeze(v)) for k, v in configs)
        if _SIMPLE_TYPES.issuperset(token[1]):  # values of other types may change inside or compare equal though they differ
            self._configs = token, frozen
        return frozen

    def _lazy(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> JITKernel:
        types = tuple(map(type, args))
        fast = None
        if not kwargs and _SIMPLE_TYPES.issuperset(types):
            fast = (args, types, self.surroundings())
            kernel = self._fast.get(fast)
            if kernel is not None:
                return kernel
        if self.is_redefined():
            return self(*args, **kwargs)
        missed = self.captured.missed
        bound = self._bind(args, kwargs)
        key = (self._frozen(bound), self.surroundings())
        kernel, after = self._kernels.get(key), key
        if kernel is None:
            kernel = self.compile_program(self._program(bound))
            after = (self._frozen(bound), self.surroundings())  # the trace may have changed them
        if missed == self.captured.missed and (fast is None or fast[2] == key[1]):
            self._kernels[key] = self._kernels[after] = kernel
            if fast is not None:
                self._fast[fast] = kernel
        return kernel

    def _name(self) -> str:
        return getattr(self.func, "__name__", None) or type(self.func).__name__  # a functools.partial has none

    def _bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> inspect.BoundArguments:
        """Raises jit-arguments for a call that does not fit."""
        try:
            bound = self.signature.bind(*args, **kwargs)
        except TypeError as e:
            name = self._name()
            raise error("jit-arguments", f"`{name}`: ‹{e}›", expected=f"{name}{self.signature}",
                        hint=keyword_hint(e, self.signature)) from None
        bound.apply_defaults()
        return bound

    def _frozen(self, bound: inspect.BoundArguments) -> Any:
        return tuple([(name, freeze(value, self.captured.argument, name)) for name, value in bound.arguments.items()])

    def parse_cache_key(self, /, *args: Any, **kwargs: Any) -> Any:
        """The key of a call: calls with equal keys use one kernel."""
        if self.initialize_jit_mode(*args, **kwargs) == "eager":
            return self.eager.key(args, kwargs)
        return self._frozen(self._bind(args, kwargs)), self.surroundings()

    def _program(self, bound: inspect.BoundArguments) -> Any:
        with strict(self.pass_configs):
            out = self.factory(*bound.args, **bound.kwargs)
        if program_of(out) is None:
            raise error("jit-no-program", f"`{self._name()}` must return a @T.prim_func, it returned ‹{type(out).__name__}›",
                        hint="end the function with `return` and the prim_func's name")
        return out

    # ---- compiling --------------------------------------------------------------------------------------------------
    def compile_program(self, func: Any, pass_configs: Any = None) -> JITKernel:
        """Compile a program with this decorator's settings, and return its kernel."""
        request = make_request(func, self.out_idx, self.execution_backend, self.target, self.verbose,
                               self.pass_configs if pass_configs is None else pass_configs, self.compile_flags)
        kernel = compile_request(request)
        if self.target_host is not None:
            kernel.target_host = check_host(self.target_host)
        if self.debug_root_path is not None:
            self._write_debug(kernel)
        return kernel

    def _write_debug(self, kernel: JITKernel) -> None:
        root = Path(self.debug_root_path or ".")
        root.mkdir(parents=True, exist_ok=True)
        name = self.__name__
        (root / f"tilelang_jit_kernel_{name}.c").write_text(kernel.get_kernel_source(), encoding="utf-8")
        (root / f"tilelang_jit_program_{name}.py").write_text(repr(kernel.prim_func), encoding="utf-8")

    def compile(self, /, *args: Any, **kwargs: Any) -> JITKernel:
        """The kernel for these arguments, without running it.

        Eager functions take real tensors, T.Tensor placeholders, or keyword values for their T.const dimensions.
        """
        if self.initialize_jit_mode(*args, **kwargs) == "eager":
            return self.eager.compile(args, kwargs)
        return self._lazy(args, kwargs)

    def get_tir(self, /, *args: Any, **kwargs: Any) -> Any:
        """The program for these arguments, not compiled."""
        if self.initialize_jit_mode(*args, **kwargs) == "eager":
            return self.eager.program(args, kwargs)
        return self._program(self._bind(args, kwargs))

    def get_kernel_source(self, /, *args: Any, **kwargs: Any) -> str:
        return self.compile(*args, **kwargs).get_kernel_source()

    def par_compile(self, configs: Iterable[Any], num_workers: int | None = None,
                    ignore_error: bool = False) -> list[JITKernel | None]:
        """Compile for many argument sets in a thread pool.  configs: tuples of positionals, or dicts."""
        jobs: list[Callable[[], Any]] = []
        for config in configs:
            if isinstance(config, tuple):
                jobs.append(functools.partial(self.compile, *config))
            elif isinstance(config, dict):
                jobs.append(functools.partial(self.compile, **config))
            else:
                raise error("jit-configs", f"each configuration must be a tuple or a dict, found {type(config).__name__} "
                            f"{config!r}", hint="write [(4,), {\"m\": 5}]")
        return run_parallel(jobs, num_workers, ignore_error)


@overload
def jit(func: Callable[P, R], *, out_idx: Any = None, target: Any = None, target_host: Any = None,
        execution_backend: str | None = None, verbose: bool | None = None, pass_configs: Any = None,
        debug_root_path: str | None = None, compile_flags: Any = None) -> JITImpl[P, R]: ...
@overload
def jit(func: None = None, *, out_idx: Any = None, target: Any = None, target_host: Any = None,
        execution_backend: str | None = None, verbose: bool | None = None, pass_configs: Any = None,
        debug_root_path: str | None = None, compile_flags: Any = None) -> Callable[[Callable[P, R]], JITImpl[P, R]]: ...
@named_arguments("compile-option")
def jit(func: Any = None, *, out_idx: Any = None, target: Any = None, target_host: Any = None,
        execution_backend: str | None = None, verbose: bool | None = None, pass_configs: Any = None,
        debug_root_path: str | None = None, compile_flags: Any = None) -> Any:
    """Decorator, with or without parentheses: see JITImpl.

    @tilelang.jit(out_idx=[-1])
    def make(n, dt="float32"):            # lazy: make(1024) is a kernel
        @T.prim_func
        def main(A: T.Tensor((n,), dt), B: T.Tensor((n,), dt)): ...
        return main
    """
    def wrap(f: Any) -> JITImpl:
        if not callable(f) and program_of(f) is None:
            raise error("jit-not-a-function", f"tilelang.jit decorates a function, found {type(f).__name__}",
                        found=f"a {type(f).__name__}", hint="write @tilelang.jit above a def")
        return JITImpl(f, JitOptions(out_idx, target, target_host, execution_backend, verbose, pass_configs,
                                     debug_root_path, compile_flags))

    return wrap if func is None else wrap(func)
