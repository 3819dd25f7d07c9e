"""Traces functions of the eager style of tilelang.jit: kinds of parameters, and T.const in two phases.

jit/ calls EagerFunction(pyfunc).trace(args, None) first: the statements before the first T.Kernel run with symbolic
consts, which determines the tensor dimension that each const is read from (Traced.consts).  Then trace(args, {"M": 1024, …})
returns the program.

The value of a statement that the first trace of an eager function cannot execute.

In that trace a T.const is a symbol: only the dimensions in which it stands are wanted.  Ordinary Python before the first
T.Kernel (`D ** -0.5`, `range(D)`) needs its number.  Such a statement is left out; what it assigns is UNKNOWN, and statements
that use it are left out too.  The second trace has the numbers and executes them all.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from tilelang import errors
from tilelang.ir import Var, dtype as DType

from ..tensor import PointerFactory, TensorFactory, TensorSpec
from .builder import Builder
from .prim_func import (PrimFunc, Unannotated, as_placed, check_signature, closure_names, declare_param, finish, function_span,
                        outer_locals, param_span, resolve_annotation, run_rewritten, trace_prim_func)
from .rewrite import rewrite_function
from .state import error, place


class NotKnown(Exception):
    """A statement uses what the first trace does not know."""


class Unknown:
    """Every use raises NotKnown."""

    def __getattr__(self, name: str) -> NoReturn:
        raise NotKnown(f"the attribute {name} of a value that depends on the number of a T.const")


def _raise(self: Any, *args: Any, **kwargs: Any) -> NoReturn:
    raise NotKnown("a value that depends on the number of a T.const")


for _name in """abs add and bool call contains divmod eq float floordiv format ge getitem gt hash index int invert iter le len
        lshift lt matmul mod mul ne neg next or pos pow radd rand rfloordiv rlshift rmatmul rmod rmul ror round rpow rrshift
        rshift rsub rtruediv rxor setitem str sub truediv xor""".split():
    setattr(Unknown, f"__{_name}__", _raise)

UNKNOWN = Unknown()


Site = tuple[str, str, int]
TENSOR, SCALAR, COMPILE_TIME = "tensor", "scalar", "compile_time"


@dataclass(frozen=True)
class Parameter:
    """One parameter.  kind: "tensor" | "scalar" (run-time) | "compile_time".  default: inspect.Parameter.empty if it has none.

    annotation: from the signature or the body.  open_shape: a bare T.Tensor, whose argument determines rank, dtype and shape.
    Its dimensions are consts named "<name>.shape[d]"; rank and dtype are part of the compile key.
    """

    name: str
    kind: str
    default: Any
    annotation: Any = None
    open_shape: bool = False

    @property
    def required(self) -> bool:
        return self.default is inspect.Parameter.empty


@dataclass(frozen=True)
class Traced:
    """The result of a trace.  func: the program; None when consts were symbolic and tracing stopped at the first T.Kernel.

    consts: const name -> (tensor parameter, "shape" | "strides", dimension) that it is read from, None where it stands in no
    dimension; `uses` has all such places.
    unread: what was wrong, for consts in no dimension.
    dtypes: const name -> dtype.  absent: tensor parameters given as None without an annotation: the program does not have
    them, and its code sees None.
    """

    func: PrimFunc | None
    consts: dict[str, Site | None]
    uses: dict[str, tuple[Site, ...]] = field(default_factory=dict)
    absent: tuple[str, ...] = ()
    unread: dict[str, Exception] = field(default_factory=dict)


class _StopAtKernel(Exception):
    """Raised at the first T.Kernel while consts are symbolic, to stop the trace."""


class _State:
    """The state of the eager function being traced, which the builder reads.

    postponed: (error, whether it is of an annotation) of statements that the first trace leaves to the second.
    """

    POSTPONED, UNKNOWN = Exception, UNKNOWN

    def __init__(self, values: Mapping[str, int] | None, nones: set[str]) -> None:
        self.values, self.nones = values, nones
        self.consts: dict[str, Any] = {}
        self.postponed: list[tuple[Exception, bool]] = []

    def postpones(self, b: Builder, caught: Exception, is_annotation: bool) -> bool:
        """Whether a statement in front of the kernel that raised is left to the trace that knows the numbers of the consts."""
        if self.values is not None or not self.consts or isinstance(caught, _StopAtKernel):
            return False
        self.postponed.append((as_placed(b, caught), is_annotation))
        while len(b.contexts) > 1:
            b.ctx, b.pos = b.contexts.pop()
        del b.frames[b.ctx.base:]
        return True

    def unread_error(self, name: str) -> Exception:
        """The error of a const that stands in no dimension: an annotation, or its own statement, that failed may be why."""
        span = self.consts[name].span
        for e, is_annotation in self.postponed:
            own = getattr(getattr(e, "span", None), "line", None) == getattr(span, "line", 0)
            if (is_annotation or own) and not isinstance(e, NotKnown):
                return e
        return errors.error("const-unused", f"the T.const `{name}` stands in no shape or stride of a tensor (Constexpr "
                            f"variable `{name}` is not used in any buffer shape or stride)",
                            found=f"`{name}` in none from which its value follows", span=span,
                            hint=f"make it a dimension of a tensor parameter, give it by keyword ({name}=...), or make it a "
                            "Python parameter of the function")

    def const(self, name: str, dt: DType) -> Any:
        if name not in self.consts:
            if self.values is None:
                self.consts[name] = Var(name, dt, span=place())
            elif name in self.values:
                self.consts[name] = int(self.values[name])
            else:
                raise error("const-value", f"no argument gives the value of `{name}` (Cannot find value for constexpr variable "
                            f"`{name}`)", found=f"no value for `{name}`")
        return self.consts[name]

    def declare_none(self, b: Builder, name: str, annotation: Any) -> Any:
        """Handle the annotation of a parameter that is None: a tensor that the call does not pass."""
        return declare_param(b, name, annotation) if name in self.nones else None

    def before_kernel(self, b: Builder) -> None:
        if self.values is None and self.consts:
            raise _StopAtKernel


class EagerFunction:
    """A Python function whose body is the kernel.  parameters: name -> Parameter, in signature order."""

    def __init__(self, pyfunc: Callable[..., Any], caller_locals: dict[str, Any] | None = None) -> None:
        self.pyfunc, self.name = pyfunc, pyfunc.__name__
        self.caller_locals = caller_locals if caller_locals is not None else outer_locals(2, pyfunc)
        self.signature = check_signature(pyfunc)
        self.rewritten = rewrite_function(pyfunc, tuple(self.caller_locals or ()), postponing=True)
        names = closure_names(pyfunc, self.caller_locals)
        annotations = getattr(pyfunc, "__annotations__", {})
        self.parameters: dict[str, Parameter] = {}
        for p in self.signature.parameters.values():
            if p.name in annotations:
                a = resolve_annotation(annotations[p.name], pyfunc, names, param_span(self.rewritten, p.name))
                kind = _kind_of(a)
            elif p.name in self.rewritten.annotated:
                a, kind = _body_annotation(self.rewritten.annotated[p.name], {**pyfunc.__globals__, **names})
            else:
                a, kind = None, COMPILE_TIME
            open_shape = isinstance(a, TensorFactory) and p.name in annotations
            self.parameters[p.name] = Parameter(p.name, kind, p.default, a, open_shape)

    def trace(self, args: Mapping[str, Any] | None = None, const_values: Mapping[str, int] | None = None) -> Traced:
        """Trace with these arguments (name -> tensor, TensorSpec or value; tensors may be missing).

        A tensor given as None whose annotation is in the body is None until that annotation.

        const_values None: consts are symbolic, see Traced.  Raises const-unused, const-value, eager-argument.
        """
        args = dict(args or {})
        nones = {p.name for p in self.parameters.values() if p.kind == TENSOR and p.name in args and args[p.name] is None and
                 p.name not in getattr(self.pyfunc, "__annotations__", {})}
        state = _State(const_values, nones)
        b = Builder(self.name, eager=state)
        values: dict[str, Any] = {}
        order: list[str] = []
        for p in self.parameters.values():
            if p.kind == COMPILE_TIME:
                if p.name not in args and p.required:
                    raise errors.error("eager-argument", f"missing a required argument: '{p.name}'",
                                       found=f"none for `{p.name}`", span=param_span(self.rewritten, p.name))
                values[p.name] = args.get(p.name, p.default)
                continue
            order.append(p.name)
            if p.open_shape:
                values[p.name] = declare_param(b, p.name, self._open_spec(state, p, args.get(p.name)))
            elif p.name in getattr(self.pyfunc, "__annotations__", {}):
                values[p.name] = declare_param(b, p.name, p.annotation, param_span(self.rewritten, p.name))
            else:
                values[p.name] = None if p.name in nones else Unannotated(p.name)
        try:
            run_rewritten(b, self.pyfunc, self.rewritten, values, self.caller_locals)
            stopped = bool(state.postponed)
        except Exception as e:
            stopped = isinstance(e, _StopAtKernel) or bool(state.postponed)
            if not stopped:
                raise
        uses = self._const_uses(b, state)
        absent = tuple(n for n in order if n in nones and n not in b.params)
        order = [n for n in order if n not in absent]
        func = None
        if not stopped:
            span = function_span(self.rewritten)
            scalars = (p for p in self.parameters.values() if p.kind == SCALAR and not p.required)
            func = PrimFunc(finish(b, self.name, order, span), self.pyfunc, {p.name: p.default for p in scalars})
        consts = {n: u[0] if u else None for n, u in uses.items()}
        return Traced(func, consts, uses, absent, {n: state.unread_error(n) for n, site in consts.items() if site is None})

    def _open_spec(self, state: _State, p: Parameter, arg: Any) -> TensorSpec:
        """The type of a bare T.Tensor parameter: rank and dtype of the argument, one const per dimension."""
        if isinstance(arg, TensorSpec):
            return arg
        if arg is None or not hasattr(arg, "shape") or not hasattr(arg, "dtype"):
            raise error("eager-argument", f"`{p.name}` is annotated {p.annotation!r} without a shape: its argument is needed "
                        "to compile", expected="a tensor with a shape and a dtype",
                        found=f"{'no argument' if arg is None else type(arg).__name__}",
                        hint=f"pass the tensor, or annotate `{p.name}` with shape and dtype")
        dims = [state.const(f"{p.name}.shape[{d}]", DType("int32")) for d in range(len(arg.shape))]
        return TensorSpec(dims, arg.dtype)

    def _const_uses(self, b: Builder, state: _State) -> dict[str, tuple[Site, ...]]:
        return {} if state.values is not None else {name: tuple(
            (p, what, d) for what, dims_of in (("shape", "shape"), ("strides", "strides_"))
            for p, (_, buf) in b.params.items() if buf is not None
            for d, dim in enumerate(getattr(buf, dims_of) or ()) if dim is var) for name, var in state.consts.items()}


def _kind_of(annotation: Any) -> str:
    if isinstance(annotation, (TensorSpec, TensorFactory)):
        return TENSOR
    if isinstance(annotation, (DType, Var, PointerFactory)):
        return SCALAR
    return COMPILE_TIME


def _body_annotation(e: ast.expr, scope: dict[str, Any]) -> tuple[Any, str]:
    """The kind of a parameter that has `name: annotation` in the body, judged by the function or name in the annotation."""
    target = e.func if isinstance(e, ast.Call) else e.value if isinstance(e, ast.Subscript) else e
    try:
        value = eval(compile(ast.Expression(target), "<annotation>", "eval"), scope)
    except (NameError, AttributeError):
        return None, TENSOR
    kind = _kind_of(value)
    return value, TENSOR if kind == COMPILE_TIME else kind


__all__ = ["COMPILE_TIME", "EagerFunction", "Parameter", "SCALAR", "TENSOR", "Traced", "trace_prim_func"]
