"""torch.compile(backend="tilelang"): graphs of ATen operators as whole-tensor programs; unknown operators stay eager.

An operator is a row of OPERATORS: its name -> the function of whole tensors that computes it.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

from tilelang.errors import TileLangError, error, register
from tilelang.ir import dtype
from tilelang.log import logger

from .functions import at_axis
from .graph import Graph, input_node
from .run import Runner, target_of
from .tensor import FUNCTIONS, Tensor, elementwise
from .trace import traced

register("program-fx", TypeError, "tilelang.from_fx is given something that is no graph of torch",
         "pass a torch.fx.GraphModule, or use torch.compile(model, backend=\"tilelang\")", expected="a torch.fx.GraphModule")

TYPES = ("float16", "bfloat16", "float32", "float64", "int8", "uint8", "int32", "int64", "bool")
f = SimpleNamespace(**FUNCTIONS)  # the functions of whole tensors

# ---- operators whose arguments are not those of a function of whole tensors -------------------------------------------


def _binary(op: str) -> Callable[..., Tensor]:
    return lambda a, b, *, alpha=1: elementwise(op, a, b if alpha == 1 else b * alpha)


def _div(a: Any, b: Any, *, rounding_mode: str | None = None) -> Any:
    if rounding_mode == "trunc" and not a.dtype.is_float:
        raise NotImplementedError("division of integers towards zero")
    return a // b if rounding_mode == "floor" else a / b if rounding_mode is None else f.trunc(a / b)


def _addmm(bias: Any, a: Any, b: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
    y = a @ b
    return (y if alpha == 1 else y * alpha) + (bias if beta == 1 else bias * beta)


def _expand(x: Any, sizes: Sequence[int], *, implicit: bool = False) -> Any:
    lead = len(sizes) - x.ndim
    return x.expand(tuple(x.shape[k - lead] if s == -1 else s for k, s in enumerate(sizes)))


def _split(x: Any, size: Any, dim: int = 0) -> tuple[Any, ...]:
    extent = x.shape[dim]
    sizes = size if isinstance(size, (list, tuple)) else [min(size, extent - k) for k in range(0, extent, size)]
    starts = accumulate(sizes, initial=0)
    return tuple(at_axis(x, dim, slice(start, start + n)) for start, n in zip(starts, sizes))


def _squeeze(x: Any, dim: Any = None) -> Any:
    """torch leaves axes that have another extent than 1."""
    axes = range(x.ndim) if dim is None else dim if isinstance(dim, (list, tuple)) else (dim,)
    return x.squeeze(tuple(a for a in axes if x.shape[a] == 1))


def _long(x: Any, dtype: Any = None) -> Any:
    """The type in which torch adds: the one asked for; int64 for integers and bools."""
    return x.astype(dtype) if dtype is not None else x if x.dtype.is_float else x.astype("int64")


def _axes(dim: Any) -> Any:
    return None if dim is None or dim == [] else tuple(dim) if isinstance(dim, (list, tuple)) else dim


def _reduction(name: str) -> Callable[..., Any]:
    def fn(x: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
        y = _long(x, dtype) if name == "sum" or dtype is not None else x
        return getattr(y, name)(_axes(dim), keepdim)

    return fn


def _softmax(name: str) -> Callable[..., Any]:
    return lambda x, dim, widen=False: getattr(x.astype("float32") if widen else x, name)(dim)


def _norm(name: str) -> Callable[..., Any]:
    def fn(x: Any, shape: Sequence[int], *scales: Any) -> tuple[Any, ...]:
        *scales, eps = scales  # type: ignore[assignment]
        if eps is None:
            raise NotImplementedError("the eps of a norm is left to torch")
        return (getattr(x, name)(*scales, axis=tuple(range(x.ndim - len(shape), x.ndim)), eps=eps),)

    return fn


def _attention(q: Any, k: Any, v: Any, dropout: float = 0.0, causal: bool = False, *rest: Any, attn_mask: Any = None,
               scale: float | None = None, **_: Any) -> tuple[Any, ...]:
    """softmax(q @ k.T * scale + mask) @ v, scores in float32; heads that share keys as torch repeats them."""
    if dropout:
        raise NotImplementedError("dropout draws random numbers of torch")
    wide = "float64" if q.dtype == "float64" else "float32"
    s = q.matmul(k.swapaxes(-1, -2), wide) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if causal:
        rows, columns = s.shape[-2:]
        s = f.where(f.iota(columns) <= f.iota(rows).unsqueeze(1), s, -math.inf)
    if attn_mask is not None:
        s = f.where(attn_mask, s, -math.inf) if attn_mask.dtype.is_bool else s + attn_mask
    return (s.softmax().astype(v.dtype) @ v,)


def _masked_attention(q: Any, k: Any, v: Any, bias: Any = None, logsumexp: bool = False, dropout: float = 0.0,
                      causal: bool = False, *rest: Any, scale: float | None = None, **_: Any) -> Any:
    return _attention(q, k, v, dropout, causal, attn_mask=bias, scale=scale)


def _arange(*bounds: Any, dtype: Any = "int64", **_: Any) -> Any:
    start, end, step = (0, bounds[0], 1) if len(bounds) == 1 else (*bounds, 1)[:3]
    return f.cast(f.iota(max(0, -(-(end - start) // step))) * step + start, dtype)


def _full(shape: Sequence[int], value: Any, *, dtype: Any = None, **_: Any) -> Any:
    default = "bool" if isinstance(value, bool) else "int64" if isinstance(value, int) else "float32"
    return f.full(tuple(shape), value, default if dtype is None else dtype)


def _index(x: Any, indices: Sequence[Any]) -> Any:
    at = [k for k, i in enumerate(indices) if i is not None]
    if len(at) != 1 or indices[at[0]].dtype.is_bool:
        raise NotImplementedError("index by several tensors or by a mask")
    i = indices[at[0]]
    return x.gather(f.where(i < 0, i + x.shape[at[0]], i), at[0])


def _clamp(x: Any, low: Any = None, high: Any = None) -> Any:
    """NaN stays, as in torch."""
    y = x if low is None else f.where(x < low, low, x)
    return y if high is None else f.where(y > high, high, y)


def _ordered(x: Any, dim: int, descending: bool, k: int) -> tuple[Any, Any]:
    """(elements in order, their indices); NaN counts as the greatest, as in torch."""
    keys = f.where(f.isnan(x), math.inf, x) if descending and x.dtype.is_float else x
    _, order = f.topk(keys, k, dim, descending)
    return x.take_along(order, dim), order


def _extreme(name: str) -> Callable[..., Any]:
    def fn(x: Any, dim: int | None = None, keepdim: bool = False) -> Any:
        y = f.where(f.isnan(x), math.inf if name == "argmax" else -math.inf, x) if x.dtype.is_float else x
        out = getattr(y.flatten() if dim is None else y, name)(-1 if dim is None else dim, keepdim and dim is not None)
        return out.reshape((1,) * x.ndim) if keepdim and dim is None else out

    return fn


def _pair(x: Any) -> tuple[int, int]:
    return tuple(x) * (3 - len(x)) if isinstance(x, (tuple, list)) else (x, x)


def _max_pool(x: Any, size: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1, ceil: bool = False) -> Any:
    if ceil:
        raise NotImplementedError("windows that hang over")
    y = x.pad([(0, 0)] * (x.ndim - 2) + [(p, p) for p in _pair(padding)], -math.inf)
    y = y.windows(_pair(size), (-2, -1), _pair(stride or size), _pair(dilation))
    return (f.where(f.isnan(y).any((-2, -1)), math.nan, y.max(axis=(-2, -1))),)


def _batch_norm(x: Any, weight: Any, bias: Any, mean: Any, variance: Any, momentum: float, eps: float) -> tuple[Any, ...]:
    def beside(t: Any) -> Any:
        return t.reshape((-1,) + (1,) * (x.ndim - 2))

    y = (x - beside(mean)) * beside(f.rsqrt(variance + eps))
    y = y if weight is None else y * beside(weight)
    return (y if bias is None else y + beside(bias),)


def _truth(x: Any) -> Any:
    return x if x.dtype.is_bool else x != 0


# ---- the table -------------------------------------------------------------------------------------------------------

_ALIKE = """exp exp2 log log2 log1p expm1 sqrt rsqrt sin cos tan tanh erf sigmoid floor ceil trunc round abs sign isnan isinf
pow square matmul where relu silu tril triu view reshape unsqueeze""".split()  # the arguments of T's function of that name
_SAME = ("clone", "alias", "detach", "contiguous", "lift_fresh_copy")
OPERATORS: dict[str, Callable[..., Any]] = {
    **{n: FUNCTIONS[n] for n in _ALIKE}, **dict.fromkeys(_SAME, lambda x, **_: x),
    **{op: _binary(op) for op in ("add", "sub", "mul", "eq", "ne", "lt", "le", "gt", "ge")},
    **{f"bitwise_{op}": _binary(op) for op in ("and", "or", "xor")},
    "div": _div, "rsub": lambda a, b, alpha=1: b - (a if alpha == 1 else a * alpha), "neg": lambda x: -x,
    "reciprocal": lambda x: 1.0 / x, "bitwise_not": lambda x: ~x, "logical_not": lambda x: ~_truth(x),
    "logical_and": lambda a, b: _truth(a) & _truth(b), "logical_or": lambda a, b: _truth(a) | _truth(b),
    "maximum": lambda a, b: f.where((a > b) | f.isnan(a), a, b),  # NaN stays, as in torch
    "minimum": lambda a, b: f.where((a < b) | f.isnan(a), a, b),
    "masked_fill": lambda x, m, v: f.where(m, v, x), "clamp": _clamp, "gelu": lambda x, approximate="none": x.gelu(approximate),
    "_to_copy": lambda x, *, dtype=None, **_: x if dtype is None else x.astype(dtype),
    **{n: _reduction(n) for n in ("sum", "mean", "amax", "amin", "any", "all")},
    "var": lambda x, dim=None, *, correction=1, keepdim=False: x.var(_axes(dim), keepdim, int(correction)),
    "cumsum": lambda x, dim, dtype=None: _long(x, dtype).cumsum(dim),
    "_softmax": _softmax("softmax"), "_log_softmax": _softmax("log_softmax"),
    "native_layer_norm": _norm("layer_norm"), "_fused_rms_norm": _norm("rms_norm"),
    "topk": lambda x, k, dim=-1, largest=True, sorted=True: _ordered(x, dim, largest, k),
    "sort": lambda x, dim=-1, descending=False, stable=False: _ordered(x, dim, descending, x.shape[dim]),
    "argmax": _extreme("argmax"), "argmin": _extreme("argmin"), "max_pool2d_with_indices": _max_pool,
    "_native_batch_norm_legit_no_training": _batch_norm,
    "native_group_norm": lambda x, w, b, n, c, hw, groups, eps: (x.group_norm(groups, w, b, eps),),
    "leaky_relu": lambda x, slope=0.01: x.leaky_relu(slope), "hardtanh": lambda x, low=-1.0, high=1.0: _clamp(x, low, high),
    "elu": lambda x, a=1.0, scale=1.0, inner=1.0: f.where(x > 0, x * scale, f.expm1(x * inner) * (a * scale)),
    "unbind": lambda x, dim=0: tuple(at_axis(x, dim, k) for k in range(x.shape[dim])),
    "mm": f.matmul, "bmm": f.matmul, "addmm": _addmm, "baddbmm": _addmm,
    "_scaled_dot_product_flash_attention_for_cpu": _attention, "_scaled_dot_product_flash_attention": _attention,
    "_scaled_dot_product_cudnn_attention": _masked_attention, "_scaled_dot_product_efficient_attention": _masked_attention,
    "_unsafe_view": f.reshape, "permute": f.transpose, "t": f.transpose, "transpose": f.swapaxes, "expand": _expand,
    "squeeze": _squeeze, "select": at_axis, "split": _split, "split_with_sizes": _split,
    "slice": lambda x, dim=0, start=None, end=None, step=1: at_axis(x, dim, slice(start, end, step)),
    "cat": lambda xs, dim=0: f.concat(list(xs), dim), "stack": lambda xs, dim=0: f.stack(list(xs), dim),
    "flip": lambda x, dims: x.flip(tuple(dims)), "embedding": lambda w, i, *_: w.gather(i), "index": _index,
    "gather": lambda x, dim, i, **_: x.take_along(i, dim), "arange": _arange, "full": _full,
    "scalar_tensor": lambda v, **k: _full((), v, **k),
    "ones": lambda shape, **k: _full(shape, 1.0, **k), "zeros": lambda shape, **k: _full(shape, 0.0, **k),
    "ones_like": lambda x, **_: f.full(x.shape, 1, x.dtype), "zeros_like": lambda x, **_: x.zeros_like(),
}
FIRST_ALONE = {  # of several results, programs give the first
    n for n in OPERATORS if "attention" in n or n.endswith(("_norm", "_no_training", "_indices"))}

# ---- graphs of torch -------------------------------------------------------------------------------------------------


def operator_of(node: Any) -> Callable[..., Any] | None:
    """The function of an fx node; None where it is not known: another operator, type or device, sizes that are open."""
    if node.op != "call_function":
        return None
    if node.target is operator.getitem:
        return operator.getitem if operator_of(node.args[0]) else None  # type: ignore[no-any-return]
    room, name, overload = (*str(node.target).split("."), "", "")[:3]
    fn = OPERATORS.get(name) if room == "aten" and overload != "dtype" else None  # view.dtype reads bits as another type
    alone = name in FIRST_ALONE
    if alone and any(u.args[1] != 0 and u.users for u in node.users):
        return None
    return fn if fn is not None and _is_known(node, alone) else None


def _is_known(node: Any, alone: bool) -> bool:
    """Whether shapes and types of a node and its operands are those of programs.  alone: only the first result is used."""
    import torch

    for n in (node, *node.all_input_nodes):
        values = n.meta.get("val")
        several = isinstance(values, (tuple, list))
        for v in (values[:1] if alone and n is node else values) if several else (values,):
            if isinstance(v, torch.Tensor) and (str(v.dtype).removeprefix("torch.") not in TYPES
                                                or not all(type(s) is int and s > 0 for s in v.shape)):
                return False
            if not isinstance(v, (torch.Tensor, type(None))):
                return False
    return all(type(a) is not torch.SymInt for a in node.args)


def graph_of(module: Any) -> Graph:
    """The operator graph of a torch.fx.GraphModule of ATen operators whose nodes know their shapes (meta "val")."""
    import torch

    placeholders = [n for n in module.graph.nodes if n.op == "placeholder"]
    inputs = {n.name: input_node(n.name, k, n.meta["val"].shape, dtype(n.meta["val"].dtype))
              for k, n in enumerate(placeholders)}

    def run(**given: Any) -> Any:
        made: dict[Any, Any] = {n: given[n.name] for n in placeholders}
        for n in module.graph.nodes:
            if n.op == "call_function":
                fn = operator_of(n)
                if fn is None:
                    raise error("program-fx", f"the operator ‹{n.target}› is not known")
                args, kwargs = torch.fx.node.map_arg((n.args, n.kwargs), made.__getitem__)
                made[n] = _as_meta(fn(*args, **{k: v for k, v in kwargs.items() if v is not None}), n.meta.get("val"))
            elif n.op == "output":
                out = torch.fx.node.map_arg(n.args[0], made.__getitem__)
        return tuple(out) if isinstance(out, (tuple, list)) else out

    run.__name__ = "graph"
    return traced(run, inputs, "fx")


def _as_meta(x: Any, value: Any) -> Any:
    """A result in the type that torch gives it.  Raises program-fx where its shape is another one."""
    if isinstance(x, tuple):
        return tuple(_as_meta(y, v) for y, v in zip(x, value))
    if tuple(x.shape) != tuple(value.shape):
        raise error("program-fx", f"an operator gives ‹{x.said()}›", expected=str(tuple(value.shape)))
    return f.cast(x, str(value.dtype).removeprefix("torch."))


class CompiledGraph:
    """A part of a graph that runs compiled.  graph: its operators."""

    def __init__(self, module: Any, target: Any) -> None:
        self.graph = graph_of(module)
        outputs = next(n for n in module.graph.nodes if n.op == "output").args[0]
        self.metas = [n.meta["val"] for n in (outputs if isinstance(outputs, (tuple, list)) else [outputs])]
        chosen = target_of([v.meta["val"] for v in module.graph.nodes if v.op == "placeholder"], target)
        self.runner = Runner(self.graph, chosen)

    def __call__(self, *args: Any) -> Any:
        out = self.runner([x.contiguous() for x in args])
        made = [y if y.stride() == m.stride() else y.new_empty_strided(m.shape, m.stride()).copy_(y)
                for y, m in zip([out] if self.graph.single else out, self.metas)]
        return made[0] if self.graph.single else tuple(made)


class FxProgram:
    """A graph of torch whose known operators run as programs.

    programs: the compiled parts; left: (nodes, reason) of those that run as torch does.  Called as the module.
    """

    def __init__(self, module: Any, target: Any = None) -> None:
        from torch.fx.passes.infra.partitioner import CapabilityBasedPartitioner
        from torch.fx.passes.operator_support import OperatorSupportBase

        class Known(OperatorSupportBase):
            def is_node_supported(self, submodules: Mapping[str, Any], node: Any) -> bool:
                return operator_of(node) is not None

        self.programs: list[CompiledGraph] = []
        self.left: list[tuple[int, str]] = []
        self.module = CapabilityBasedPartitioner(module, Known(), allows_single_node_partition=False).partition_and_fuse()
        for node in list(self.module.graph.nodes):
            if node.op == "call_module" and node.target.startswith("fused_"):
                part: Any = self.module.get_submodule(node.target)
                count = sum(n.op == "call_function" for n in part.graph.nodes)
                try:
                    self.programs.append(CompiledGraph(part, target))
                except (TileLangError, NotImplementedError) as e:
                    if not getattr(e, "kind", "program-").startswith("program-"):  # what programs do not compute, torch does
                        raise
                    self.left.append((count, str(e).splitlines()[0]))
                    logger.info("torch runs %d operators: %s", count, self.left[-1][1])
                    continue
                part.forward = self.programs[-1]
            elif node.op == "call_function":
                self.left.append((1, f"{node.target} is not known here"))

    def __call__(self, *args: Any) -> Any:
        return self.module(*args)


def from_fx(module: Any, example_inputs: Sequence[Any] | None = None, *, target: Any = None) -> Any:
    """A torch.fx.GraphModule compiled: parts of known operators are whole-tensor programs, the others run as torch does.

    Also the backend of torch.compile(model, backend="tilelang"), which calls it.  Forward only.
    example_inputs: tensors like those of the calls; they may be left out where nodes know their shapes (meta "val").
    Raises program-fx for what is no graph of torch.

    Example:
        model = torch.compile(model, backend=tilelang.from_fx)
    """
    import torch

    if not isinstance(module, torch.fx.GraphModule):
        raise error("program-fx", f"tilelang.from_fx is given ‹a {type(module).__name__}›")
    if example_inputs is None:
        return FxProgram(module, target)
    from torch._dynamo.backends.common import aot_autograd

    def forward(graph: Any, inputs: Sequence[Any]) -> Any:
        return FxProgram(graph, target)

    return aot_autograd(fw_compiler=forward, bw_compiler=lambda g, _: g, inference_compiler=forward)(module, example_inputs)
