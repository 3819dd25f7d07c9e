"""What torch has to know of a direct call: which tensors were written, which gradients end here, and that a call is traced."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from tilelang.runtime.signature import PointerArg, TensorArg

from .arguments import torch_if_loaded
from .graph_names import HELD, PLAIN

def with_torch(kernel: Any, run: Callable[..., Any]) -> Callable[..., Any]:
    """A wrapper of `run` that counts up the versions of torch tensors that the kernel writes, so that autograd notices the
    change; that warns of gradients that end at the call; and that makes the call an operator where torch traces it.

    These take 0.25 us together, and 0.2 us more for a tensor that is written.  Returns `run` without torch or tensors."""
    torch = torch_if_loaded()
    inputs = kernel.signature.inputs
    if torch is None or not any(isinstance(a, (TensorArg, PointerArg)) for a in inputs):
        return run
    traces, records, wants_gradient = torch._C._len_torch_dispatch_stack, torch.is_grad_enabled, torch._C._any_requires_grad
    count_up, names = torch._C._increment_version, kernel.written()
    written = [k for k, a in enumerate(inputs) if a.name in names]
    foreign: set[type] = set()  # types of arguments that are no torch tensors

    def call(*args: Any) -> Any:
        if traces() and (op := traced(kernel)) is not None:
            return op(*args)
        if records() and wants_gradient(*args):
            _check_gradient(kernel, args, written)
        out = run(*args)
        for k in written:
            x = args[k]
            if x.__class__ not in foreign:
                try:
                    count_up((x,))
                except Exception:
                    if isinstance(x, torch.Tensor):
                        raise
                    foreign.add(x.__class__)
        return out

    return call


def traced(kernel: Any) -> Callable[..., Any] | None:
    """The operator for a call of a kernel that a mode of torch traces (make_fx, FakeTensorMode); else None."""
    torch = torch_if_loaded()
    if torch is None or not torch._C._len_torch_dispatch_stack():
        return None
    from .torch_ops import operator_of  # 4 ms: only where torch traces

    return operator_of(kernel)


def _check_gradient(kernel: Any, args: Sequence[Any], written: Sequence[int]) -> None:
    from .torch_ops import check_gradient  # 4 ms: only for tensors that require a gradient

    check_gradient(kernel.signature.name, [a.name for a in kernel.signature.inputs], args, written,
                   any(a.buffer.dtype.is_float for a in kernel.signature.outputs))


# ---- torch.compile ----------------------------------------------------------------------------------------------------

def called_in_a_graph(self: Any, /, *args: Any, **kwargs: Any) -> Any:
    """What Dynamo traces in place of the call of a kernel or of a decorated function."""
    from .torch_graph import call, is_factory, made  # 4 ms: only under torch.compile

    def put(name: str, args: Any, kwargs: Any) -> Any:
        return call(name, [x if isinstance(x, PLAIN) or hasattr(x, "__dlpack__") else (HELD, id(x)) for x in args],
                    {n: x if isinstance(x, PLAIN) or hasattr(x, "__dlpack__") else (HELD, id(x)) for n, x in kwargs.items()})

    if not is_factory(self.graph_name):
        return put(self.graph_name, args, kwargs)
    kernel = made(self.graph_name, *args, **kwargs)
    return lambda *args, **kwargs: put(kernel, args, kwargs)


F = TypeVar("F", bound=Callable[..., Any])


def in_graphs(call: F) -> F:
    """Decorator of __call__: Dynamo traces `called_in_a_graph` in its place.  A plain call takes no longer for it."""
    call._torchdynamo_inline = called_in_a_graph  # type: ignore[attr-defined]
    return call
