"""Calls of eager functions: compile-time values select a trace, T.const values select a kernel, other arguments are passed."""

from __future__ import annotations

from typing import Any

from tilelang.errors import called_in_kernel, error, register, strict
from tilelang.ir import dtype

from .artifact import program_of
from .kernel import JITKernel
from .keys import SIMPLE, freeze, strides_of

register("eager-inputs", ValueError, "an eager function is called with too few tensors", expected="every tensor parameter")
register("eager-const", ValueError, "the value of a T.const cannot be determined", expected="a value for every T.const")
register("eager-arguments", TypeError, "an eager function is called with arguments it does not have",
         expected="arguments that the function has")

register("eager-annotation", TypeError, "a tensor is given for a parameter of an eager function that has no annotation",
         expected="an annotation T.Tensor(shape, dtype) for every tensor parameter")

_MISSING: Any = object()


class _Trace:
    """The trace for one set of compile-time values: where its T.const values are read from, and the kernels compiled so far."""

    def __init__(self, traced: Any) -> None:
        self.consts: dict[str, tuple[str, str, int] | None] = dict(traced.consts)
        self.unread = traced.unread  # errors of consts that no tensor gives
        self.is_kept = False  # for calls with equal compile-time values
        self.absent = traced.absent  # tensors given as None, which the program does not have
        self.func = traced.func  # None while consts are symbolic
        self.kernels: dict[Any, Any] = {}
        self.packed: dict[str, Any] = {}  # tensor -> element type narrower than a byte, known after the first trace


class EagerCalls:
    """The eager side of a @tilelang.jit function.  owner: its decorator.JITImpl."""

    def __init__(self, owner: Any) -> None:
        self.owner, self.captured = owner, owner.captured
        self.function = self._parsed()
        about = self.function.parameters
        self.parameters = {name: p.kind for name, p in about.items()}
        self.defaults = {name: _MISSING if p.required else p.default for name, p in about.items()}
        self.open = [n for n, p in about.items() if p.open_shape]
        self.names = tuple(self.parameters)
        self.tensors = [n for n, k in self.parameters.items() if k == "tensor"]
        self.static = [n for n, k in self.parameters.items() if k == "compile_time"]
        self.runtime = [n for n, k in self.parameters.items() if k in ("tensor", "scalar")]
        self.traces: dict[Any, _Trace] = {}
        # Kernels of positional calls that are determined by tensor shapes and simple values alone.
        self.fast: dict[Any, tuple[Any, Any]] = {}
        self.code = tuple({"tensor": 0, "scalar": 1}.get(k, 2) for k in self.parameters.values())

    def _parsed(self) -> Any:
        from tilelang.language.tracing.eager_function import EagerFunction  # 3 ms

        return EagerFunction(self.owner.func, self.owner.outer_names)

    # ---- public -----------------------------------------------------------------------------------------------------
    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call.  out=: memory for the results, unless the function has a parameter of that name."""
        out = kwargs.pop("out", None) if kwargs and "out" not in self.parameters else None
        key, missed = None, self.captured.missed
        if not kwargs and not self.open:
            try:
                key = (self.owner.surroundings(), *[
                    x.shape if c == 0 else None if c == 1 or x is None else
                    (x.__class__, x) if x.__class__ in SIMPLE or not callable(x) else self.captured.argument(x, n)
                    for c, x, n in zip(self.code, args, self.names)])
                hit = self.fast.get(key)
            except (AttributeError, TypeError):  # not a tensor, or an unhashable value: take the slow path
                key = hit = None
            if hit is not None and len(args) <= len(self.code):
                kernel, rest = hit
                passed = args if rest is None else [args[i] if i < len(args) else d for i, d in rest]
                return kernel(*passed) if out is None else kernel(*passed, out=out)
        if self.owner.is_redefined():
            return self.owner(*args, **kwargs) if out is None else self.owner(*args, out=out, **kwargs)
        values, consts = self.bound(args, kwargs)
        missing = [n for n in self.runtime if values[n] is _MISSING]
        if missing:
            given = len(self.runtime) - len(missing)
            known = [n for n in kwargs if n not in self.names]
            near = f"`{known[0]}` is no parameter; " if known else ""
            raise error("eager-inputs", f"Expected {len(self.runtime)} inputs, got {given} with {missing[0]!r} missing: "
                        f"`{self.owner.__name__}` takes «{', '.join(self.runtime)}»", found=f"no {missing[0]}",
                        hint=f"{near}pass every tensor; results made by T.empty are returned, not passed")
        trace = self._trace(values, consts)
        kernel = self._kernel(trace, values, consts)
        names = self._given(trace)
        if key is not None and missed == self.captured.missed and self._is_simple(trace, values):
            whole = len(args) == len(names) == len(self.names)
            self.fast[key] = kernel, None if whole else [(i, self.defaults[n]) for i, n in enumerate(self.names) if n in names]
        return kernel(*(values[n] for n in names), **({} if out is None else {"out": out}))

    def _given(self, trace: _Trace) -> list[str]:
        """Parameters of the kernel; tensors given as None are left out."""
        return [n for n in self.runtime if n not in trace.absent]

    def _nones(self, values: dict[str, Any]) -> tuple[str, ...]:
        return tuple(n for n in self.tensors if values[n] is None)

    def _is_simple(self, trace: _Trace, values: dict[str, Any]) -> bool:
        """Whether shapes and compile-time values alone determine the kernel: no const is read from a stride, no tensor is
        packed, and no value compares equal to a different one (floats, containers)."""
        if any(type(v) not in SIMPLE and not callable(v) for v in (values[n] for n in self.static)):
            return False
        return not trace.packed and all(site is not None and site[1] == "shape" for site in trace.consts.values())

    def compile(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> JITKernel:
        return self._kernel(*self._at(args, kwargs))

    def program(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._traced(*self._at(args, kwargs))[0]

    def key(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        trace, values, consts = self._at(args, kwargs)
        return self._static_key(values), tuple(self._const_values(trace, values, consts).items())

    def inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """The arguments for the kernel of a call, without tensors that are None and that the kernel does not have."""
        values = self.bound(args, kwargs)[0]
        return [values[n] for n in self._given(self._trace(values, {}))]

    def _at(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[_Trace, dict[str, Any], dict[str, Any]]:
        """(trace, values, keyword values of consts) of a call."""
        values, consts = self.bound(args, kwargs)
        return self._trace(values, consts), values, consts

    # ---- steps ------------------------------------------------------------------------------------------------------
    def bound(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """(value or _MISSING per parameter, keyword values of consts)."""
        names = self.names
        if len(args) > len(names):
            raise error("eager-arguments", f"`{self.owner.__name__}` takes {len(names)} arguments, ‹{len(args)}› given",
                        expected=f"at most {len(names)} arguments", hint=f"its parameters are {', '.join(names)}")
        values = dict(zip(names, args))
        consts: dict[str, Any] = {}
        for name, value in kwargs.items():
            if name not in self.parameters:
                consts[name] = value
            elif name in values:
                raise error("eager-arguments", f"`{self.owner.__name__}` got multiple values for argument {name!r}",
                            expected=f"one value for `{name}`", found="two", hint="give it by position or by name, not both")
            else:
                values[name] = value
        for name in names:
            if name not in values:
                values[name] = self.defaults[name]
                if values[name] is _MISSING and self.parameters[name] == "compile_time":
                    raise error("eager-arguments", f"`{self.owner.__name__}` is missing a required argument: {name!r}",
                                expected=f"a value for `{name}`", found="none",
                                hint="it has no default and is needed to compile")
        return values, consts

    def _static_key(self, values: dict[str, Any]) -> Any:
        opened = tuple((str(x.dtype), len(x.shape)) if hasattr(x, "shape") else None
                       for x in (values[n] for n in self.open))
        for n in self.static:
            if hasattr(values[n], "__dlpack__"):
                raise error("eager-annotation", f"`{n}` of `{self.owner.__name__}` is given a tensor and has no annotation: "
                            "without one a parameter is a value to compile for", found=f"{type(values[n]).__name__} for `{n}`",
                            hint=self._missing_annotation(n))
        static = tuple([freeze(values[n], self.captured.argument, n) for n in self.static])
        return static, opened, self._nones(values), self.owner.surroundings()

    def _trace(self, values: dict[str, Any], consts: dict[str, Any]) -> _Trace:
        missed = self.captured.missed
        key = self._static_key(values)
        trace = self.traces.get(key)
        if trace is None:
            if any(isinstance(a, str) for a in getattr(self.owner.func, "__annotations__", {}).values()):
                self.function = self._parsed()  # names in texts may mean others now
            with strict(self.owner.pass_configs):
                traced = self.function.trace(self._static(values), None)
            trace = _Trace(traced)
            if missed == self.captured.missed:
                self.traces[key], trace.is_kept = trace, True
        for name in consts:
            if name not in trace.consts:
                raise error("eager-arguments", f"`{self.owner.__name__}` got an unexpected keyword argument {name!r}: "
                            "it has neither a parameter nor a T.const of that name",
                            expected=f"one of {', '.join([*self.names, *trace.consts])}", found=str(name),
                            hint=f"parameters: {', '.join(self.names)}; consts: {', '.join(trace.consts) or 'none'}")
        return trace

    def _missing_annotation(self, name: str) -> str:
        """The hint for a parameter without an annotation that is given a tensor."""
        func = self.owner.func
        if hasattr(func, "__wrapped__"):
            return (f"`{self.owner.__name__}` is wrapped by `{func.__code__.co_name}`, whose parameters have no annotations: "
                    "put @tilelang.jit innermost, directly above the def")
        if "shape" in getattr(getattr(func, "__code__", None), "co_names", ()):
            return (f'a shape is read by T.const: write `M, N = T.const("M N")` and `{name}: T.Tensor((M, N), dtype)` in '
                    "front of T.Kernel")
        return f"write `{name}: T.Tensor(shape, dtype)` in the body, in front of T.Kernel"

    def _static(self, values: dict[str, Any]) -> dict[str, Any]:
        names = (*self.static, *self.open, *self._nones(values))
        return {n: values[n] for n in names if values[n] is not _MISSING}

    def _const_values(self, trace: _Trace, values: dict[str, Any], consts: dict[str, Any]) -> dict[str, int]:
        out: dict[str, int] = {}
        for name, site in trace.consts.items():
            if name in consts:
                out[name] = _whole(name, consts[name])
                continue
            if site is None:
                raise trace.unread[name]
            tensor = values.get(site[0], _MISSING)
            found = None if tensor is _MISSING or tensor is None else _site_value(tensor, site, trace.packed)
            if found is None:
                if (nested := called_in_kernel(self.owner.func.__name__, (tensor,))) is not None:
                    raise nested
                what = f"`{site[0]}` has no {site[1]}[{site[2]}]"
                if tensor is _MISSING:
                    what = f"it is {site[1]}[{site[2]}] of `{site[0]}`, which is not passed"
                elif not hasattr(tensor, "shape"):
                    what = f"it is {site[1]}[{site[2]}] of the tensor `{site[0]}`, found {type(tensor).__name__}"
                is_tensor = tensor is _MISSING or hasattr(tensor, "shape")
                raise error("eager-const", f"the T.const `{name}` has no value: {what} (Cannot find value for constexpr "
                            f"variable `{name}`)",
                            expected=f"a tensor `{site[0]}` with {site[1]}[{site[2]}]",
                            found=f"{'none' if tensor is _MISSING else type(tensor).__name__}",
                            hint=f"pass the tensor, or the value by keyword: {name}=…" if is_tensor else
                            f"the argument is no tensor: pass a torch tensor or np.asarray(...) for `{site[0]}`")
            out[name] = found
        return out

    def _kernel(self, trace: _Trace, values: dict[str, Any], consts: dict[str, Any]) -> Any:
        numbers = self._const_values(trace, values, consts) if trace.consts else {}
        key = tuple(numbers.values())
        kernel = trace.kernels.get(key)
        if kernel is None:
            with strict(self.owner.pass_configs):
                func, key = self._traced(trace, values, consts)
            kernel = trace.kernels[key] = self.owner.compile_program(func)
            missed = self.captured.missed
            after = self._static_key(values)  # tracing may have changed them
            if trace.is_kept and missed == self.captured.missed:
                self.traces[after] = trace
        return kernel

    def _traced(self, trace: _Trace, values: dict[str, Any], consts: dict[str, Any]) -> tuple[Any, Any]:
        """(program, key of its const values).

        Tensors of sub-byte types are known only after a trace.  Their consts count values, not storage elements, so the
        function is traced a second time with the right numbers."""
        numbers = self._const_values(trace, values, consts)
        func = trace.func
        if func is None:
            func = self.function.trace(self._static(values), numbers).func
            traced = program_of(func)
            packed = {b.name: b.dtype for _, b in (traced.buffers if traced else ()) if b.dtype.bits < 8}
            if packed and not trace.packed:
                trace.packed = packed
                numbers = self._const_values(trace, values, consts)
                func = self.function.trace(self._static(values), numbers).func
        return func, tuple(numbers.values())


def _whole(name: str, value: Any) -> int:
    try:
        return int(value.__index__())
    except (AttributeError, TypeError):
        raise error("eager-const", f"T.const `{name}` needs «an integer», found {value!r}",
                    hint="it is a dimension or stride of a tensor") from None


def _site_value(tensor: Any, site: tuple[str, str, int], packing: dict[str, Any]) -> int | None:
    """The shape or stride entry of a tensor (or placeholder) at a site; None when it has none."""
    name, what, dim = site
    shape = getattr(tensor, "shape", None)
    if shape is None or not -len(shape) <= dim < len(shape):
        return None
    if what == "shape":
        value = shape[dim]
        wanted = packing.get(name)
        if wanted is not None and wanted.bits < 8 and dim in (-1, len(shape) - 1) and hasattr(tensor, "__dlpack__"):
            value = int(value) * (dtype(tensor.dtype).bits * dtype(tensor.dtype).lanes) // (wanted.bits * wanted.lanes)
    else:
        strides = strides_of(tensor)
        if strides is None:
            step = 1
            for d in shape[dim + 1:] if dim >= 0 else shape[len(shape) + dim + 1:]:
                step *= int(d)
            return step
        value = strides[dim]
    try:
        return int(value)
    except TypeError:
        return None
