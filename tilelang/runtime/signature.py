"""The call signature of a kernel: its tensor, scalar and pointer parameters, and how each shape symbol gets its value."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tilelang.errors import error, register
from tilelang.ir import Buffer, Const, Expr, Func, Var, binary, const, dtype, free_vars, is_large, replace, substitute, walk
from tilelang.ir.record import record, state

register("out-idx-type", ValueError, "out_idx is not an integer or a list of integers",
         expected="an integer or a list of integers")
register("out-idx-range", ValueError, "out_idx names no tensor parameter, or one twice",
         expected="positions of tensor parameters, each once")
register("output-type", ValueError, "an output tensor has elements that are vectors",
         "declare it with the scalar type and one more dimension")
register("out-idx-conflict", ValueError, "the function returns T.empty tensors and out_idx is given too",
         expected="T.empty outputs or out_idx", found="both")
register("symbol-unsolved", ValueError, "the value of a symbol cannot be computed from the arguments",
         expected="a symbol that follows from one argument")
register("output-strides", ValueError, "an output tensor has declared strides that are not compact", expected="compact strides")
register("output-rank", ValueError, "an output tensor has no dimensions", expected="at least one dimension", found="none")


OUT_IDX_HINT = "give positions of tensor parameters, counted from 0 or backwards from -1: out_idx=[-1]"


@record
class TensorArg:
    """A tensor parameter.  index: position among all parameters.  used: the program accesses it, so that None is rejected."""

    index: int
    name: str
    buffer: Buffer
    used: bool
    output: bool


@record
class ScalarArg:
    """A number passed by value, of type var.dtype."""

    index: int
    name: str
    var: Var


@record
class PointerArg:
    """A T.ptr parameter: tensor, integer address or None."""

    index: int
    name: str
    var: Var


Arg = Any  # TensorArg | ScalarArg | PointerArg


@record
class Site:
    """One shape or stride entry of an input tensor.  what: "shape" or "strides"."""

    arg: TensorArg
    what: str
    dim: int
    value: Any


@record
class Solve:
    """Solves symbol = (actual - offset) / factor at a site; the division is exact.  factor and offset use earlier symbols."""

    symbol: Var
    site: Site
    factor: Expr
    offset: Expr


@record
class Signature:
    """Call signature of a program.

    args: all parameters.  out_idx: positions of outputs in the order results are returned.
    symbols: shape and stride variables in the order in which they get values.  steps: Solve, or a Site to be compared, in an
    order in which all values needed are known.  optional: steps of tensors that the program never accesses.
    """

    name: str
    args: tuple[Arg, ...]
    out_idx: tuple[int, ...]
    symbols: tuple[Var, ...]
    steps: tuple[Solve | Site, ...]
    optional: tuple[Solve | Site, ...]
    sources: tuple[tuple[Var, tuple[str, ...]], ...]  # symbol -> tensors whose shape or strides mention it

    @property
    def inputs(self) -> tuple[Arg, ...]:
        return tuple(a for a in self.args if a.index not in self.out_idx)

    @property
    def outputs(self) -> tuple[TensorArg, ...]:
        """The outputs in the order in which they are returned."""
        return tuple(self.args[i] for i in self.out_idx)


def resolve_out_idx(func: Func, out_idx: Any) -> tuple[int, ...]:
    """Non-negative positions of the outputs, in the order they are returned.

    out_idx: None, an int or a list of ints, negative counts from the end; merged with the function's own T.empty
    results.  Raises ValueError for other types, positions out of range, duplicates, scalar or pointer parameters, and
    when both are given.
    """
    own = func.facts.out_idx
    given = out_idx is not None and not (isinstance(out_idx, list) and not out_idx)
    if own and given:
        raise error("out-idx-conflict", f"Out index conflict: `{func.name}` returns tensors made by T.empty, and "
                    f"out_idx={out_idx!r} is given too",
                    found=f"out_idx={out_idx!r} and T.empty outputs", hint="leave out_idx out")
    source = (list(own) if isinstance(own, tuple) else [own]) if own else [] if not given else out_idx
    if isinstance(source, int) and not isinstance(source, bool):
        source = [source]
    if not isinstance(source, list) or any(not isinstance(i, int) or isinstance(i, bool) for i in source):
        raise error("out-idx-type", f"out_idx is an integer or a list of integers, found {out_idx!r} (result_idx should be a "
                    "list of integers)",  # programs test for the text in parentheses
                    found=repr(out_idx), hint=OUT_IDX_HINT)
    n = len(func.params)
    found: list[int] = []
    for i in source:
        if not -n <= i < n:
            raise error("out-idx-range", f"out_idx index {i} is out of range of {n} parameters (result_idx should be an "
                        f"integer between -{n} and {n - 1})",  # programs test for the text in parentheses
                        expected=f"-{n} to {n - 1}", found=str(i), hint=OUT_IDX_HINT)
        at = i % n
        if at in found:
            raise error("out-idx-range", f"out_idx=‹{out_idx!r}› names parameter {at} twice", expected="each position once",
                        hint=OUT_IDX_HINT)
        buffer = func.buffer_of(func.params[at])
        if buffer is None:
            raise error("out-idx-range", f"out_idx={out_idx!r} names `{func.params[at].name}`, which is not a tensor",
                        found=f"`{func.params[at].name}`, which is no tensor", hint=OUT_IDX_HINT)
        if buffer.dtype.lanes != 1 and buffer.dtype != "float4_e2m1fnx2":
            raise error("output-type", f"output `{buffer.name}` has elements of ‹{buffer.dtype}›: no framework makes such "
                        "tensors", expected="a scalar type")
        if not buffer.shape:
            raise error("output-rank", f"output `{buffer.name}` has no dimensions", hint="give it the shape (1,)")
        if buffer.strides_ is not None and not _is_compact(buffer):
            raise error("output-strides", f"output `{buffer.name}` has declared strides ‹{buffer.strides_!r}› that are not "
                        "compact: outputs are allocated compact", span=buffer.span,
                        hint="pass the tensor as an input and write into it")
        found.append(at)
    return tuple(found)


def _is_compact(buffer: Buffer) -> bool:
    step: Any = 1
    for extent, stride in zip(reversed(buffer.shape), reversed(buffer.strides_ or ())):
        if not (stride == step if isinstance(stride, int) or isinstance(step, int) else stride.same(step)):
            return False
        step = step * extent
    return True


def signature_of(func: Func, out_idx: Any = None) -> Signature:
    """The call signature of a program.  Raises ValueError for a bad out_idx and for symbols that cannot be solved."""
    outs = resolve_out_idx(func, out_idx)
    used = {b for b in walk(func.body, Buffer)}
    storage = {b.data for b in used}
    in_body = free_vars(func.body)
    args: list[Arg] = []
    for i, p in enumerate(func.params):
        buffer = func.buffer_of(p)
        if buffer is not None:
            touched = buffer in used or buffer.data in storage or p in in_body or buffer.data in in_body
            args.append(TensorArg(i, buffer.name, buffer, touched or i in outs, i in outs))
        elif p.dtype.is_handle:
            args.append(PointerArg(i, p.name, p))
        else:
            args.append(ScalarArg(i, p.name, p))
    known = {a.var for a in args if isinstance(a, ScalarArg)}
    needed = [a for a in args if isinstance(a, TensorArg) and a.used and not a.output]
    spare = [a for a in args if isinstance(a, TensorArg) and not a.used]
    symbols: list[Var] = []
    steps, left = _order(_sites(needed), known, symbols)
    optional, left_optional = _order(_sites(spare), known, symbols, left)
    _reject_unsolved(func, [*left_optional], args, known)
    return Signature(func.name, tuple(args), outs, tuple(symbols), tuple(steps), tuple(optional),
                     _sources(symbols, [*needed, *spare]))


def _sites(args: Iterable[TensorArg]) -> list[Site]:
    out = []
    for a in args:
        out += [Site(a, "shape", d, v) for d, v in enumerate(a.buffer.shape)]
        if a.buffer.strides_ is not None:
            out += [Site(a, "strides", d, v) for d, v in enumerate(a.buffer.strides_)]
    return out


def _order(sites: list[Site], known: set[Var], symbols: list[Var],
           late: Iterable[Site] = ()) -> tuple[list[Solve | Site], list[Site]]:
    """Solve symbols one after another, until no further one can be solved.

    Compact strides are checked by the stub, not here.  Returns the steps and the sites that remain unsolved.
    """
    steps: list[Solve | Site] = []
    pending = [*late, *sites]
    while pending:
        still: list[Site] = []
        for site in pending:
            unknown = set() if isinstance(site.value, int) else free_vars(site.value) - known
            if not unknown:
                steps.append(site)
                continue
            parts = affine(site.value, next(iter(unknown))) if len(unknown) == 1 else None
            if parts is None:
                still.append(site)
                continue
            symbol = next(iter(unknown))
            steps.append(Solve(symbol, site, *parts))
            symbols.append(symbol)
            known.add(symbol)
        if len(still) == len(pending):
            break
        pending = still
    else:
        still = []
    return steps, still


def affine(e: Any, v: Var) -> tuple[Expr, Expr] | None:
    """(factor, offset) with e == factor * v + offset, factor and offset free of v; None when e is not of that form."""
    kind = type(e).__name__
    if e is v:
        return const(1, v.dtype), const(0, v.dtype)
    if isinstance(e, int):
        return const(0, v.dtype), const(e, v.dtype)
    if v not in free_vars(e):
        return const(0, v.dtype), e
    if kind == "Cast":
        return affine(e.value, v)
    if kind == "Unary" and e.op == "neg":
        e = binary("mul", Const(-1, e.dtype), e.a)
    if type(e).__name__ != "Binary" or e.op not in ("add", "sub", "mul"):
        return None
    a, b = affine(e.a, v), affine(e.b, v)
    if a is None or b is None:
        return None
    if e.op in ("add", "sub"):
        return binary(e.op, a[0], b[0]), binary(e.op, a[1], b[1])
    if v not in free_vars(e.b):
        return binary("mul", a[0], b[1]), binary("mul", a[1], b[1])
    if v not in free_vars(e.a):
        return binary("mul", b[0], a[1]), binary("mul", b[1], a[1])
    return None


def _reject_unsolved(func: Func, open_sites: list[Site], args: list[Arg], known: set[Var]) -> None:
    for site in open_sites:
        names = ", ".join(sorted(v.name for v in free_vars(site.value) - known))
        raise error("symbol-unsolved", f"unable to solve variables ({names}) from {site.what}[{site.dim}] of `{site.arg.name}` "
                    f"= {site.value!r}", found=f"`{site.arg.name}` with {site.what}[{site.dim}] = {site.value!r}",
                    span=site.arg.buffer.span or func.span, hint="give the variable as a separate dimension, or as a scalar "
                    "parameter")
    for a in args:
        if isinstance(a, TensorArg) and a.output:
            for d in (*a.buffer.shape, *(a.buffer.strides_ or ())):
                missing = set() if isinstance(d, int) else free_vars(d) - known
                if missing:
                    names = ", ".join(sorted(v.name for v in missing))
                    raise error("symbol-unsolved", f"unable to solve variables ({names}): they occur only in the shape of "
                                f"output `{a.name}`", expected="symbols of the inputs",
                                found=f"{names}, in the shape of output `{a.name}` alone", span=a.buffer.span or func.span,
                                hint="an output's shape must follow from the inputs")


def host_assumptions(func: Func, sig: Signature) -> tuple[Expr, ...]:
    """Conditions of T.assume outside of control flow that contain only scalars, shape symbols and names bound to them.

    They are checked at every call.  Other conditions are assumed without a check.
    """
    known = {a.var for a in sig.args if isinstance(a, ScalarArg)} | set(sig.symbols)
    out: list[Expr] = []
    names: dict[Var, Expr] = {}  # names bound to values that the host knows

    def visit(s: Any) -> None:
        kind = type(s).__name__
        if kind == "Bind" and (value := on_host(s.value)) is not None and not is_large(value):
            names[s.var] = value
        elif kind == "Seq":
            for x in s.stmts:
                visit(x)
        elif kind == "Launch":
            visit(s.body)
        elif kind == "Evaluate" and s.call.op == "assume":
            condition = on_host(s.call.args[0])
            if condition is not None:
                out.append(condition if s.span is None else replace(condition, span=s.span))

    def on_host(e: Expr) -> Expr | None:
        e = substitute(e, names)
        if free_vars(e) <= known and not any(type(n).__name__ in ("Load", "Call") for n in walk(e)):
            return e
        return None

    visit(func.body)
    return tuple(out)


def _sources(symbols: list[Var], tensors: list[TensorArg]) -> tuple[tuple[Var, tuple[str, ...]], ...]:
    mentions = {a.name: set().union(*(free_vars(d) for d in (*a.buffer.shape, *(a.buffer.strides_ or ()))
                                      if isinstance(d, Expr)), set()) for a in tensors}
    return tuple((s, tuple(n for n, vs in mentions.items() if s in vs)) for s in symbols)


def needed_symbols(func: Func, sig: Signature) -> set[Any]:
    """The symbols that the program or its outputs use."""
    out = free_vars(func.body)
    for a in sig.outputs:
        for d in a.buffer.shape:
            if isinstance(d, Expr):
                out |= free_vars(d)
    return {s for s in sig.symbols if s in out}


# ---- the public description of parameters -----------------------------------------------------------------------------

@state
class KernelParam:
    """dtype: tilelang dtype.  shape: ints or symbol Vars; [] for scalars."""

    dtype: Any
    shape: list[Any]

    @classmethod
    def from_buffer(cls, buffer: Buffer) -> KernelParam:
        return cls(buffer.dtype, list(buffer.shape))

    @classmethod
    def from_var(cls, var: Var) -> KernelParam:
        return cls(var.dtype, [])

    def is_scalar(self) -> bool:
        return len(self.shape) == 0

    def tilelang_dtype(self) -> dtype:
        return dtype(self.dtype)

    def torch_dtype(self) -> Any:
        """The torch dtype; imports torch."""
        return dtype(self.dtype).as_torch()

    def is_unsigned(self) -> bool: return dtype(self.dtype).is_unsigned
    def is_float8(self) -> bool: return dtype(self.dtype).is_float8
    def is_float4(self) -> bool: return dtype(self.dtype).is_float4()
    def is_boolean(self) -> bool: return dtype(self.dtype).is_bool


def params_of(func: Func) -> list[KernelParam]:
    """One KernelParam per parameter, in signature order."""
    out = []
    for p in func.params:
        buffer = func.buffer_of(p)
        out.append(KernelParam.from_var(p) if buffer is None else KernelParam.from_buffer(buffer))
    return out
