"""Kernels and decorated functions in the graphs of torch.compile: Dynamo puts these functions into a graph without looking into
them.  Imported by Dynamo alone, with torch."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

try:
    import torch
except ImportError:  # what documents or checks all modules imports this one too
    torch = None  # type: ignore[assignment]

from .graph_names import HELD, owners
from .torch_ops import check_operator, is_kernel, operator_of_call

_kept: dict[Any, Any] = {}  # what a graph names: owners by name, objects of Python by address


def _owner(name: str) -> Any:
    if name not in _kept:
        _kept[name] = owners[name]
    return _kept[name]


def _object(x: Any) -> Any:
    """The value of an argument of a graph.  Objects are named by their address; Dynamo checks that it is the same object at
    each call of the graph, and holds it while tracing."""
    if not isinstance(x, tuple) or x[:1] != (HELD,):
        return list(x) if isinstance(x, list) else x
    if x not in _kept:
        _kept[x] = ctypes.cast(x[1], ctypes.py_object).value
    return _kept[x]


def _for_dynamo(decorator: str) -> Callable[[Any], Any]:
    """A decorator of torch.compiler; without torch, of nothing."""
    return (lambda fn: fn) if torch is None else getattr(torch.compiler, decorator)


@_for_dynamo("allow_in_graph")
def call(name: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Execute a call.  While torch traces it, the call becomes an operator."""
    owner = _owner(name)
    args, kwargs = [_object(x) for x in args], {n: _object(x) for n, x in kwargs.items()}
    traced = torch._C._len_torch_dispatch_stack() > 0
    if is_kernel(owner) and traced:
        check_operator(owner)
    if is_kernel(owner) or not traced or "out" in kwargs:
        return owner(*args, **kwargs)
    if hasattr(type(owner), "chosen"):  # a tuned function
        with torch._subclasses.fake_tensor.unset_fake_temporarily():
            owner, kwargs = owner.chosen(tuple(args), kwargs)
    op, given = operator_of_call(owner, tuple(args), kwargs)
    return op(*given)


@_for_dynamo("assume_constant_result")
def is_factory(name: str) -> bool:
    """Whether the owner is a function that makes kernels."""
    owner = _owner(name)
    return not is_kernel(owner) and owner.is_lazy_mode()


@_for_dynamo("assume_constant_result")
def made(name: str, *args: Any, **kwargs: Any) -> str:
    """The name of the kernel that a factory makes."""
    kernel = _owner(name)(*args, **kwargs)
    return str(_kept.setdefault(kernel.graph_name, kernel).graph_name)
