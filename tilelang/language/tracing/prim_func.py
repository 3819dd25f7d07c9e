"""T.prim_func: rewrites a function, runs it once, and returns the program as a PrimFunc."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any, overload

from tilelang import errors
from tilelang.ir import Buffer, Func, Seq, Span, Stmt, Var, deep, dtype as DType, replace as replace_node, seq

from .rewrite import Rewritten, rewrite_function
from .builder import FACTS, Builder, tracing
from .control_flow import leading_arguments
from .python_errors import place_error, refine
from .python_functions import instead
from ..reducer import check_reducers
from .scope import Context
from .state import current, error, need_function, place
from ..tensor import PointerFactory, TensorFactory, TensorSpec


class PrimFunc:
    """A kernel function: an immutable ir.Func with the public attributes of the language.

    func: the program.  orig_func: the Python function.  Not callable: compile it.
    """

    def __init__(self, func: Func, orig_func: Callable[..., Any] | None = None,
                 defaults: dict[str, Any] | None = None) -> None:
        self.func, self.orig_func = func, orig_func
        self.defaults = dict(defaults or {})

    @property
    def params(self) -> list[Var]:
        """Parameters in order; a tensor A is the handle var A_handle."""
        return list(self.func.params)

    @property
    def buffer_map(self) -> dict[Var, Buffer]:
        return dict(self.func.buffers)

    @property
    def body(self) -> Stmt:
        return self.func.body

    @property
    def attrs(self) -> dict[str, Any]:
        """Attributes as a fresh dict; tuples that the public interface defines as lists become lists."""
        given = self.func.facts.given()
        facts = {key: given[name] for key, name in FACTS.items() if name in given}
        for key, kind in (("tilelang_out_idx", list), ("tilelang_pass_configs", dict), ("tilelang_compile_flags", list)):
            if isinstance(facts.get(key), tuple):
                facts[key] = kind(facts[key])
        return {"global_symbol": self.func.name, **facts, **dict(self.func.attrs)}

    @property
    def name(self) -> str:
        return self.func.name

    __name__ = name

    def with_attr(self, key: Any, value: Any = None) -> PrimFunc:
        """A copy with an attribute set (or several: a dict)."""
        changes = dict(key) if isinstance(key, dict) else {key: value}
        func = self.func
        if "global_symbol" in changes:
            func = replace_node(func, name=str(changes.pop("global_symbol")))
        frozen = {k: tuple(v) if isinstance(v, list) else tuple(sorted(v.items())) if isinstance(v, dict) else v
                  for k, v in changes.items()}
        facts = func.facts.having(**{FACTS[k]: frozen.pop(k) for k in list(frozen) if k in FACTS})
        attrs = {k: v for k, v in {**dict(func.attrs), **frozen}.items() if v is not None}
        func = replace_node(func, facts=facts, attrs=tuple(sorted(attrs.items())))
        return PrimFunc(func, self.orig_func, self.defaults)

    def without_attr(self, key: str) -> PrimFunc:
        """A copy without an attribute."""
        return self.with_attr(key, None)

    def with_body(self, new_body: Stmt) -> PrimFunc:
        """A copy that runs another statement over the same parameters."""
        return PrimFunc(replace_node(self.func, body=new_body), self.orig_func, self.defaults)

    def script(self, show_meta: bool = False) -> str:
        """The program as readable text.  `tilelang.ir.to_text` gives text that can be parsed."""
        from tilelang.ir.script import to_script  # 3 ms

        return to_script(self.func)

    __str__ = script

    def __repr__(self) -> str:
        return self.script()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PrimFunc) and self.func.same(other.func)

    def __hash__(self) -> int:
        return hash(self.func)

    def __reduce__(self) -> Any:
        return PrimFunc, (self.func, None, self.defaults)  # functions inside functions cannot be pickled, programs can

    def __deepcopy__(self, memo: Any) -> PrimFunc:
        return self

    def __call__(self, *args: Any, **kw: Any) -> Any:
        if current() is not None:
            raise error("kernel-in-kernel", f"the kernel `{self.func.name}` is called inside a kernel function",
                        found=f"the PrimFunc `{self.func.name}`")
        raise errors.for_user(errors.error("program-called", f"PrimFunc `{self.func.name}` is not callable: compile it with "
                                       "tilelang.compile and call the kernel", found=f"a call of `{self.func.name}`"))


# ---- parameters ----------------------------------------------------------------------------------------------------

class Unannotated:
    """A parameter whose annotation in the body was not reached yet; every other use is an error."""

    __slots__ = ("_name",)

    def __init__(self, name: str) -> None:
        self._name = name

    def declare(self, b: Builder, annotation: Any) -> Any:
        return declare_param(b, self._name, annotation)

    def _raise(self, *_: Any) -> Any:
        raise error("parameter-annotation", f"Argument `{self._name}` is not annotated", found=f"`{self._name}` without one",
                    hint=f"annotate it in the signature, or by `{self._name}: T.Tensor(shape, dtype)` before its use")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__tilelang_expr__":
            raise AttributeError(name)
        return self._raise()

    __getitem__ = __setitem__ = __add__ = __radd__ = __mul__ = __rmul__ = __sub__ = _raise
    __call__ = __bool__ = __index__ = __iter__ = __eq__ = __ne__ = __hash__ = __format__ = _raise


def declare_param(b: Builder, name: str, annotation: Any, at: Any = None) -> Any:
    """Register a parameter by its annotation; returns the value of its name.  at: its span."""
    at = at or b.span()
    if isinstance(annotation, TensorFactory):
        raise errors.error("parameter-annotation", f"Argument `{name}`: {annotation!r} without «a shape» takes it from the "
                           "argument of the call, which only tilelang.jit functions have", found=f"{annotation!r} without one",
                           span=at, hint=f"write {annotation!r}(shape, dtype)")
    if isinstance(annotation, TensorSpec):
        annotation = annotation.buffer(b.fresh_name(name), span=at)
    if isinstance(annotation, Buffer):
        b.params[name] = (Var(f"{name}_handle", DType("handle"), span=at), annotation)
        return annotation
    if isinstance(annotation, DType):
        annotation = Var(name, annotation, span=at)
    elif isinstance(annotation, PointerFactory):
        annotation = Var(name, DType("handle"), span=at)
    elif not isinstance(annotation, Var) and callable(annotation) and not isinstance(annotation, type):
        return declare_param(b, name, annotation(), at)
    if isinstance(annotation, Var):
        if annotation.name in ("v", "ptr", "handle"):  # made by T.int32(), T.ptr(): takes the parameter's name
            annotation = Var(name, annotation.dtype, span=at)
        b.params[name] = (annotation, None)
        return annotation
    raise errors.error("parameter-annotation", f"Argument `{name}` is annotated with ‹{annotation!r}›, which is neither a "
                       "tensor nor a scalar type", span=at, hint="use T.Tensor(shape, dtype), T.float32, T.int32, T.ptr, …")


def resolve_annotation(text: Any, fn: Callable[..., Any], names: dict[str, Any], span: Any = None) -> Any:
    """An annotation, evaluated when it is a string (from __future__ import annotations)."""
    if not isinstance(text, str) or isinstance(text, DType):
        return text
    scope = {**fn.__globals__, **names}
    value: Any = text
    for _ in range(2):  # twice for a string annotation in a module with postponed annotations
        if not isinstance(value, str) or isinstance(value, DType):
            break
        try:
            value = eval(value, scope)
        except (NameError, SyntaxError) as e:
            try:
                return DType(value.removeprefix("T."))
            except (ValueError, TypeError):
                raise errors.error("parameter-annotation", f"cannot evaluate the annotation ‹{text!r}: {e}›",
                                   span=span or place()) from None
    return value


def closure_names(fn: Callable[..., Any], caller_locals: dict[str, Any] | None) -> dict[str, Any]:
    """Names visible in a function: the locals of the place where it was decorated, then its closure."""
    out = dict(caller_locals or {})
    for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or ()):
        try:
            out[name] = cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    return out


def check_signature(fn: Callable[..., Any]) -> inspect.Signature:
    """The signature, without annotations evaluated.  Raises positional-only."""
    sig = inspect.signature(fn)
    for p in sig.parameters.values():
        if p.kind is p.POSITIONAL_ONLY:
            raise error("positional-only", f"positional-only parameter `{p.name}` of `{fn.__name__}` is not supported",
                        found=f"`{p.name}` in front of a /")
    return sig


# ---- running the rewritten function --------------------------------------------------------------------------------

def outer_locals(depth: int, fn: Callable[..., Any]) -> dict[str, Any] | None:
    """Locals of the running functions that lexically enclose a decorated function.

    With postponed annotations, names that only annotations use are in no closure.  Locals of other callers are not used."""
    if not fn.__code__.co_flags & 0x1000000:  # CO_FUTURE_ANNOTATIONS
        return None
    around = {part.rpartition(".")[2] for part in fn.__qualname__.split(".<locals>.")[:-1]}
    frame = sys._getframe(depth)
    out: dict[str, Any] = {}
    chain: list[dict[str, Any]] = []
    for _ in range(4):  # the user's own decorators may stand between
        if frame is None or frame.f_code.co_name == "<module>":
            break
        if frame.f_code.co_name in around:
            chain.append(frame.f_locals)
        frame = frame.f_back  # type: ignore[assignment]
    for loc in reversed(chain):
        out.update(loc)
    return out


@deep()
def run_rewritten(b: Builder, fn: Callable[..., Any], rw: Rewritten, args: dict[str, Any],
                  names: dict[str, Any] | None) -> Any:
    """Run the rewritten function in the builder; errors of the language get the user's source location."""
    run = rw.function(fn, names)
    b.enter_context(Context(rw.file, rw.name, rw.places, None, run.__code__))
    with tracing(b):
        try:
            result = run(*leading_arguments(b), **args)
            b.exit_context()
            return result
        except Exception as e:
            placed = as_placed(b, e)
            if placed is e:
                raise
            raise placed from e


def as_placed(b: Builder, e: Exception) -> Exception:
    """An error of the trace with the user's source location; the same exception where it has one, or is the user's own."""
    if b.unopened is not None and getattr(e, "kind", "") in ("frame-value", "alloc-outside-kernel", "no-kernel"):
        return not_opened(b)
    if isinstance(e, errors.TileLangError):
        e.span = refine(b, e) if e.span is None or e.span is b.span() else e.span
        if e.kind in ("condition", "slice-value"):  # of a function that the program calls
            e.hint = instead(e) or e.hint
        return e
    return place_error(b, e) or e


def not_opened(b: Builder) -> Exception:
    """The error of a T.Kernel(...) whose statements do not stand under `with`."""
    return errors.error("frame-value", "T.Kernel(...) is not opened: it launches nothing, and gives no block index",
                        found="T.Kernel without `with`", span=b.unopened.span, hint=f"open it: {b.unopened.opened_by}")


def finish(b: Builder, name: str, order: list[str], span: Any) -> Func:
    """The Func of a finished trace.  order: parameter names in signature order."""
    while b.frames[-1] is not b.root:
        b.exit(b.frames[-1])
    check_reducers(b)
    if b.unopened is not None:
        raise not_opened(b)
    if b.outputs and (b.returned is None or len(b.returned) != len(b.outputs)):
        kept = {len(b.outputs) + k for k in b.returned or ()}
        missing = [o.name for k, o in enumerate(b.outputs) if k not in kept]
        raise errors.error("outputs-not-returned", f"{', '.join(missing)} of T.empty is not returned (Not all tensor "
                           "allocated from `T.empty` are returned)",  # programs test for the text in parentheses
                           found=f"not {', '.join(missing)}", span=span)
    for p in order:
        if p not in b.params:
            raise errors.error("parameter-annotation", f"Argument `{p}` is not annotated",
                               found=f"`{p}` without one", span=span)
    given = [*map(b.params.__getitem__, order),
             *((Var(f"{o.name}_handle", DType("handle"), span=o.span), o) for o in b.outputs)]
    buffers = tuple((var, buffer) for var, buffer in given if buffer is not None)
    facts = b.facts.having(out_idx=b.returned) if b.returned else b.facts
    body = seq(*b.root.stmts, span=span)
    return Func(name, tuple(var for var, _ in given), buffers, body if b.root.stmts else Seq((), span=span),
                tuple(sorted(b.func_attrs.items())), facts, span=span)


@deep()
def trace_prim_func(pyfunc: Callable[..., Any], caller_locals: dict[str, Any] | None = None) -> PrimFunc:
    """Rewrite and run a fully annotated Python function; returns its program as a PrimFunc."""
    sig = check_signature(pyfunc)
    rw = rewrite_function(pyfunc, tuple(caller_locals or ()))
    b = Builder(pyfunc.__name__)
    names = closure_names(pyfunc, caller_locals)
    args: dict[str, Any] = {}
    defaults: dict[str, Any] = {}
    annotations = getattr(pyfunc, "__annotations__", {})
    for p in sig.parameters.values():
        if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD):
            raise error("parameter-annotation", f"`‹*{p.name}›` is not supported as a kernel parameter")
        if p.default is not p.empty:
            defaults[p.name] = p.default
        if p.name in annotations:
            where = param_span(rw, p.name)
            args[p.name] = declare_param(b, p.name, resolve_annotation(annotations[p.name], pyfunc, names, where), where)
        elif p.name in rw.annotated:
            args[p.name] = Unannotated(p.name)
        else:
            raise errors.error("parameter-missing", f"Argument `{p.name}` is not annotated: missing a required argument "
                               "annotation", found=f"`{p.name}` without one", span=param_span(rw, p.name),
                               hint="a kernel is no method: define it outside of the class, or inside a method"
                               if p.name == "self" else
                               f"write `{p.name}: T.Tensor(shape, dtype)` or a scalar type such as T.int32")
    run_rewritten(b, pyfunc, rw, args, caller_locals)
    func = finish(b, pyfunc.__name__, list(sig.parameters), function_span(rw))
    return PrimFunc(func, pyfunc, defaults)


def function_span(rw: Rewritten) -> Span:
    """The span of the definition."""
    return Span(rw.file, rw.line, function=rw.name)


def param_span(rw: Rewritten, name: str) -> Span:
    """The span of a parameter in the signature."""
    return Span(rw.file, *rw.params.get(name, (rw.line, 0, 0, 0)), rw.name)


@overload
def prim_func(func: Callable[..., Any], *, eager_jit: bool = False) -> PrimFunc: ...
@overload
def prim_func(func: None = None, *, eager_jit: bool = False) -> Callable[[Callable[..., Any]], PrimFunc]: ...
def prim_func(func: Callable[..., Any] | None = None, *, eager_jit: bool = False) -> Any:
    """Decorator: trace a fully annotated function into a PrimFunc.  Raises the errors of its definition.

    Example:
        @T.prim_func
        def twice(X: T.Tensor((1024,), "float32"), Y: T.Tensor((1024,), "float32")):
            with T.Kernel(8, threads=128) as bx:
                for i in T.Parallel(128):
                    Y[bx * 128 + i] = X[bx * 128 + i] * 2
    """
    if func is None:
        return lambda f: _trace_for_user(need_function(f, "T.prim_func"), outer_locals(2, f))
    return _trace_for_user(need_function(func, "T.prim_func"), outer_locals(2, func))


def _trace_for_user(func: Callable[..., Any], names: dict[str, Any] | None) -> PrimFunc:
    """Trace a function; errors are raised without the tracer's frames."""
    try:
        return trace_prim_func(func, names)
    except (errors.TileLangError, errors.InternalError) as e:
        raise errors.for_user(e)  # noqa: B904 - for_user decides what goes with it
