"""Kernels as operators of torch: torch.compile, torch.export and autograd treat them as their own.

An operator has a schema, an implementation, a function that computes the shapes of its results without running it ("fake"), and
the names of the arguments that it writes.  All of that follows from the compiled kernel.  Source: torch.library documentation.
"""

from __future__ import annotations

import ast
import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any

from tilelang.errors import error, register, register_warning, warn
from tilelang.ir import Binary, Cast, Const, Expr, Var
from tilelang.language.tracing.source_text import text_of
from tilelang.runtime.signature import PointerArg, ScalarArg, Signature, Solve, TensorArg

from .outputs import packed_dims

register("torch-op", ValueError, "a kernel that torch.library cannot take as an operator",
         expected="a compiled kernel, or an eager @tilelang.jit function of tensors and numbers")
register("kernel-gradient", RuntimeError, "a kernel writes a tensor that torch computes a gradient for",
         "call it under torch.no_grad(), pass x.detach(), or give it a gradient with tilelang.autograd(forward, backward)",
         expected="tensors that may be written: no leaf that requires a gradient, or grad mode off")
register_warning("gradient-dropped", "a kernel is called with a tensor that requires a gradient, and computes none")

_serial = itertools.count()
_running = threading.local()  # .operator: this thread executes an operator's kernel
_operators: dict[Any, Callable[..., Any]] = {}  # of kernels, and of calls of functions, that torch has traced
_OPERATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda a, b: a + b, "sub": lambda a, b: a - b, "mul": lambda a, b: a * b, "floordiv": lambda a, b: a // b,
    "floormod": lambda a, b: a % b, "min": lambda a, b: min(a, b), "max": lambda a, b: max(a, b)}


def torch_op(kernel: Any, name: str | None = None, *, mutates: Sequence[str] = (),
             outputs: int | None = None) -> Callable[..., Any]:
    """A function of torch tensors that runs a kernel and that torch.compile(fullgraph=True) and torch.export take whole.

    kernel: a compiled kernel, or an eager @tilelang.jit function, which is compiled for the shapes it meets.  name: of the
    operator, "scale" or "mylib::scale"; default: the kernel's, in the namespace tilelang.  mutates: of an eager function, the
    parameters that it writes.  outputs: of an eager function, how many tensors it returns, where its last `return` does not
    say.  Raises torch-op where the kernel has parameters that an operator cannot have, or writes others than `mutates`.

        relu = tilelang.torch_op(relu_kernel)
        model = torch.compile(lambda x: relu(x) + 1, fullgraph=True)
    """
    made = _OfKernel(kernel) if is_kernel(kernel) else _OfFunction(kernel, tuple(mutates), outputs)
    return made.register(name)


def is_kernel(x: Any) -> bool:
    """Whether an object is a compiled kernel (jit/kernel.py)."""
    return isinstance(getattr(x, "signature", None), Signature)


class _Operator:
    """A kernel's schema and its fake implementation.  parameters: (name, type in the schema, default or None)."""

    label = "kernel"
    parameters: list[tuple[str, str, str]]
    mutates: tuple[str, ...] = ()
    outputs: int = 0

    def _kernel(self, args: tuple[Any, ...]) -> Any:
        """The kernel that executes a call."""
        raise NotImplementedError

    def _passed(self, args: tuple[Any, ...]) -> Sequence[Any]:
        """The arguments that the kernel takes."""
        return args

    def run(self, *args: Any) -> Any:
        """Execute the kernel."""
        return _as_results(self._kernel(args)(*self._passed(args)), self.outputs)

    def fake(self, *args: Any) -> Any:
        """Tensors of the results' shapes."""
        return _as_results(results_like(self._kernel(args), self._passed(args)), self.outputs)

    def schema(self) -> str:
        """In torch's notation: (Tensor x, Tensor(a0!) y, float s=1.0) -> Tensor."""
        params = []
        for k, (name, kind, default) in enumerate(self.parameters):
            text = kind.replace("Tensor", f"Tensor(a{k}!)") if name in self.mutates else kind
            params.append(f"{text} {name}{default}")
        results = ["Tensor"] * self.outputs
        return f"({', '.join(params)}) -> {results[0] if len(results) == 1 else '(' + ', '.join(results) + ')'}"

    def register(self, name: str | None) -> Callable[..., Any]:
        """Define the operator and return a function that calls it."""
        import torch  # 1 s

        space, _, own = (name or self.label).rpartition("::")
        space, own = space or "tilelang", own if name else f"{own}_{next(_serial)}"
        torch.library.define(f"{space}::{own}", self.schema())
        written = [k for k, p in enumerate(self.parameters) if p[0] in self.mutates]

        def run(*args: Any) -> Any:
            _running.operator = True
            try:
                return self.run(*args)
            finally:
                _running.operator = False

        def recorded(*args: Any) -> Any:
            if torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in args):
                check_gradient(own, names, args, written, self.outputs > 0)
            with torch._C._AutoDispatchBelowAutograd():
                return op(*args)

        torch.library.impl(f"{space}::{own}", "CompositeExplicitAutograd")(run)
        torch.library.impl(f"{space}::{own}", "Autograd")(recorded)
        torch.library.register_fake(f"{space}::{own}")(self.fake)
        op = getattr(getattr(torch.ops, space), own)
        names = [p[0] for p in self.parameters]

        def call(*args: Any, **kwargs: Any) -> Any:
            return op(*args, **kwargs)

        call.__name__ = call.__qualname__ = own
        call.__doc__ = f"The operator {space}::{own}({', '.join(names)}) of torch."
        call.op = op  # type: ignore[attr-defined]
        return call


def _error(what: str, found: str, hint: str) -> Exception:
    return error("torch-op", what, found=found, hint=hint)


def _number_kind(dt: Any) -> str:
    return "bool" if dt.is_bool else "SymInt" if dt.is_int else "float"


def check_gradient(name: str, inputs: Sequence[str], args: Sequence[Any], written: Sequence[int], result: bool) -> None:
    """Warn that gradients end at a call of a kernel, which has floating-point results if `result`.

    Raises kernel-gradient for a leaf that the kernel writes, as torch does."""
    asking = [k for k, x in enumerate(args) if getattr(x, "requires_grad", False)]
    for k in asking:
        if k in written and args[k].is_leaf:
            raise error("kernel-gradient", f"kernel {name} writes `{inputs[k]}`, a leaf that requires a gradient",
                        found=f"a leaf that requires a gradient for `{inputs[k]}`")
    if result or any(args[k].is_floating_point() for k in written):  # others have no gradient
        given = ", ".join(f"`{inputs[k]}`" for k in asking)
        warn("gradient-dropped", f"kernel {name} computes no gradient, but {given} require{'s'[len(asking) > 1:]} one",
             "give it one with tilelang.autograd(forward, backward), or call it under torch.no_grad()")


class _OfKernel(_Operator):
    def __init__(self, kernel: Any) -> None:
        self.kernel, self.label = kernel, kernel.signature.name
        self.parameters = []
        for a in kernel.signature.inputs:
            if isinstance(a, PointerArg):
                raise _error(f"`{a.name}` of `{self.label}` is a pointer", f"the pointer `{a.name}`", "pass a tensor")
            kind = ("Tensor" if a.used else "Tensor?") if isinstance(a, TensorArg) else _number_kind(a.var.dtype)
            self.parameters.append((a.name, kind, ""))
        self.mutates = tuple(n for n, kind, _ in self.parameters if n in kernel.written())
        self.outputs = len(kernel.signature.outputs)

    def _kernel(self, args: tuple[Any, ...]) -> Any:
        return self.kernel


class _OfCall(_OfKernel):
    """One form of call of an eager function: its compile-time values are fixed.  Each run finds the kernel anew, because what
    the function reads may have changed since it was traced."""

    def __init__(self, function: Any, kernel: Any, names: list[str], values: dict[str, Any]) -> None:
        super().__init__(kernel)
        self.function, self.names, self.values, self.checked = function, names, values, {kernel}

    def _kernel(self, args: tuple[Any, ...]) -> Any:
        kernel = self.function.compile(**self.values, **dict(zip(self.names, args)))
        if kernel not in self.checked:
            now = _OfKernel(kernel)
            if now.schema() != self.schema():
                raise _error(f"`{self.label}` has another signature than when torch traced it", f"{now.schema()}",
                             "call torch.compile again after torch.compiler.reset()")
            self.checked.add(kernel)
        return kernel


def check_operator(kernel: Any) -> None:
    """Raises torch-op for a kernel that cannot be an operator."""
    _OfKernel(kernel)


def operator_of(kernel: Any) -> Callable[..., Any] | None:
    """The call of a kernel as an operator, which returns what the kernel returns.  None for a call that comes from an operator,
    and for kernels with pointers."""
    if getattr(_running, "operator", False) or any(isinstance(a, PointerArg) for a in kernel.signature.inputs):
        return None
    if kernel not in _operators:
        _operators[kernel] = _returning_lists(_OfKernel(kernel).register(None))
    return _operators[kernel]


def operator_of_call(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Callable[..., Any], list[Any]]:
    """A call of an eager function as an operator, and the operator's arguments: the tensors and numbers of run time."""
    eager = function.eager
    values, consts = eager.bound(args, kwargs)
    kernel = eager.compile(args, kwargs)
    names = [n for n in eager.runtime if n in {a.name for a in kernel.signature.inputs}]
    fixed = {**{n: v for n, v in values.items() if n not in names}, **consts}
    made = _OfCall(function, kernel, names, fixed)
    key = function, made.schema(), repr(sorted((n, id(v) if callable(v) else v) for n, v in fixed.items()))
    if key not in _operators:
        _operators[key] = _returning_lists(made.register(None))
    return _operators[key], [values[n] for n in names]


def _returning_lists(op: Callable[..., Any]) -> Callable[..., Any]:
    """Operators return several results as a tuple, kernels as a list."""
    def call(*args: Any) -> Any:
        out = op(*args)
        return list(out) if isinstance(out, tuple) else out

    return call


class _OfFunction(_Operator):
    def __init__(self, function: Any, mutates: tuple[str, ...], outputs: int | None) -> None:
        if not hasattr(type(function), "eager"):
            raise _error(f"a {type(function).__name__} is no kernel", type(function).__name__,
                           "pass a compiled kernel, or an eager @tilelang.jit function")
        self.function, self.label, self.mutates = function, function.__name__, mutates
        self.parameters = []
        for p in function.eager.function.parameters.values():
            default = "" if p.required else f"={p.default!r}"
            if p.kind == "tensor":
                kind = "Tensor" if p.required else "Tensor?"
                default = "" if p.required else "=None"
            elif p.kind == "scalar":
                kind = _number_kind(p.annotation.dtype if isinstance(p.annotation, Var) else p.annotation)
            else:
                kind = {bool: "bool", int: "int", float: "float", str: "str"}.get(type(p.default), "")
                if not kind:
                    raise _error(f"`{p.name}` of `{self.label}` is a compile-time value without a default that is a number "
                                   "or a string", f"`{p.name}`",
                                   "give it a default, or compile the function and pass the kernel")
                default = f'="{p.default}"' if kind == "str" else default
            self.parameters.append((p.name, kind, default))
        unknown = [n for n in mutates if n not in function.eager.function.parameters]
        if unknown:
            raise _error(f"`{unknown[0]}` is no parameter of `{self.label}`", unknown[0],
                           f"the parameters are {', '.join(function.eager.function.parameters)}")
        self.outputs = _returned(function) if outputs is None else outputs

    def _kernel(self, args: tuple[Any, ...]) -> Any:
        kernel = self.function.compile(*args)
        others = [n for n in kernel.written() if n not in self.mutates and n in (p[0] for p in self.parameters)]
        if others:
            raise _error(f"`{self.label}` writes its parameter `{others[0]}`", f"a store to `{others[0]}`",
                           f"say so: torch_op(..., mutates={sorted({*self.mutates, *others})!r})")
        if len(kernel.signature.outputs) != self.outputs:
            count = len(kernel.signature.outputs)
            raise _error(f"`{self.label}` returns {count} tensors", f"{count} results", f"torch_op(..., outputs={count})")
        return kernel

    def _passed(self, args: tuple[Any, ...]) -> list[Any]:
        return passed(self.function, args)


def passed(function: Any, args: Sequence[Any]) -> list[Any]:
    """The arguments of a call of an eager function that its kernel takes: neither compile-time values nor tensors left out.

    args: without the last ones where these have their defaults, which torch leaves out.
    """
    parameters = [*function.eager.function.parameters.values()]
    values = *args, *(p.default for p in parameters[len(args):])
    return [x for x, p in zip(values, parameters) if p.kind != "compile_time" and x is not None]


def _returned(function: Any) -> int:
    """How many tensors the last return statement of an eager function names."""
    body = ast.parse(text_of(function.func, needed=True)).body[0]
    last = [s for s in ast.walk(body) if isinstance(s, ast.Return)]
    value = last[-1].value if last else None
    return 0 if value is None else len(value.elts) if isinstance(value, (ast.Tuple, ast.List)) else 1


def _as_results(found: Any, count: int) -> Any:
    return found if count == 1 else tuple(found) if count else None


def results_like(kernel: Any, inputs: Sequence[Any]) -> Any:
    """Tensors without contents of the shapes, types and device of a kernel's results for these inputs."""
    import torch  # 1 s

    device = next((x.device for a, x in zip(kernel.signature.inputs, inputs) if isinstance(a, TensorArg)), kernel.target.kind)
    out = [torch.empty(shape, dtype=a.buffer.dtype.as_torch(), device=device)
           for a, shape in zip(kernel.signature.outputs, result_shapes(kernel, inputs))]
    return out[0] if len(out) == 1 else out


def result_shapes(kernel: Any, inputs: Sequence[Any]) -> list[list[Any]]:
    """The shapes of a kernel's results for these inputs, tensors of torch or arrays of JAX; they may be symbols of torch."""
    sig = kernel.signature
    given = {a.name: x for a, x in zip(sig.inputs, inputs)}
    sizes: dict[Var, Any] = {a.var: given[a.name] for a in sig.inputs if isinstance(a, ScalarArg)}
    for s in (*sig.steps, *sig.optional):
        if isinstance(s, Solve) and (x := given[s.site.arg.name]) is not None:
            found = (x.shape if s.site.what == "shape" else x.stride())[s.site.dim]
            sizes[s.symbol] = (found - _value(s.offset, sizes)) // _value(s.factor, sizes)
    return [packed_dims(a, [_value(d, sizes) for d in a.buffer.shape]) for a in sig.outputs]


def _value(e: Any, sizes: dict[Var, Any]) -> Any:
    """A dimension with the sizes of a call, which may be symbols of torch."""
    if isinstance(e, Var):
        return sizes[e]
    if isinstance(e, Cast):
        return _value(e.value, sizes)
    if isinstance(e, Binary) and e.op in _OPERATIONS:
        return _OPERATIONS[e.op](_value(e.a, sizes), _value(e.b, sizes))
    if isinstance(e, Const) or not isinstance(e, Expr):
        return int(e.value if isinstance(e, Const) else e)
    raise _error(f"the size {e!r} of a result cannot be computed by torch", repr(e), "compile the kernel for fixed sizes")


def autograd(forward: Any, backward: Any) -> Callable[..., Any]:
    """A function of torch tensors with a gradient: forward computes, backward gives the gradients of its tensor inputs.

    forward, backward: compiled kernels, eager @tilelang.jit functions, or functions of torch_op.  backward is called with the
    inputs of forward, its results, and the gradients of the results (contiguous), and returns one gradient for each tensor
    input, None for those without one.  Works under torch.compile(fullgraph=True).

        scale = tilelang.autograd(scale_kernel, scale_gradient)     # scale_gradient(x, y, dy) -> dx
    """
    import torch  # 1 s

    run, gradient = forward, backward

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> Any:
            out = run(*inputs)
            results = out if isinstance(out, (tuple, list)) else (out,)
            ctx.tensors = [isinstance(x, torch.Tensor) for x in inputs]
            ctx.numbers = [None if t else x for t, x in zip(ctx.tensors, inputs)]
            ctx.save_for_backward(*(x for x, t in zip(inputs, ctx.tensors) if t), *results)
            return tuple(results) if isinstance(out, (tuple, list)) else out

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            saved = list(ctx.saved_tensors)
            inputs = [saved.pop(0) if t else x for t, x in zip(ctx.tensors, ctx.numbers)]
            whole = [torch.zeros_like(r) if g is None else g.contiguous() for g, r in zip(grads, saved)]
            found = gradient(*inputs, *saved, *whole)
            each = list(found) if isinstance(found, (tuple, list)) else [found]
            if len(each) != sum(ctx.tensors):
                raise error("torch-op", f"backward returned ‹{len(each)}› gradients for {sum(ctx.tensors)} tensor inputs",
                            expected=f"{sum(ctx.tensors)} gradients",
                            hint="return one for each tensor input of forward, None where there is none")
            return tuple(each.pop(0) if t else None for t in ctx.tensors)

    def call(*inputs: Any) -> Any:
        return Function.apply(*inputs)

    call.__doc__ = "A kernel with a gradient."
    return call
