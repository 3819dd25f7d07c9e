"""Functions of the library with gradients: operators of torch that autograd, torch.compile and torch.export take whole.

A Function consists of two Steps, forward and backward.  A Step says what its results are without reading values, and computes
them.  From that follow the operators, their fake implementations, what is saved, and the gradients; NumPy arrays and calls
without a gradient go to the kernels directly.  Source: torch.library documentation.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from hashlib import sha256
from typing import Any

from tilelang.errors import TileLangError, error, register

from .arrays import compact, empty, is_numpy
from .caches import Cache

register("library-derivative", RuntimeError, "a derivative that a function of the library does not have",
         "differentiate once, backward; for others write this part with functions of torch",
         expected="first derivatives, backward")
register("library-number", ValueError, "an operator of torch names functions that this process does not know",
         "call the function of the library with them once before an exported program runs",
         expected="functions that were given to the library in this process")

SPACE = "tilelang_library"  # the namespace of the operators
Results = Sequence[tuple[tuple[Any, ...], str]]
_FUNCTIONS: dict[str, Function] = {}


class Numbered(dict[int, Any]):
    """Functions of users by numbers, which operators of torch take in their place.

    A number follows from the text of what tells the functions, so that it is the same in another process that has them; one
    that does not finds nothing, or else it would compute something else.
    """

    def __init__(self) -> None:
        super().__init__()
        self._numbers: dict[Any, int] = {}

    def number(self, key: Any, value: Any) -> int:
        """The number of functions.  key: tells them, hashable; its text is the same in other processes."""
        if key not in self._numbers:
            found = int.from_bytes(sha256(repr(key).encode()).digest()[:7], "big")
            while found in self:  # other functions of the same text
                found += 1
            self._numbers[key], self[found] = found, value
        return self._numbers[key]

    def __missing__(self, number: int) -> Any:
        raise error("library-number", "an operator of tilelang.library names functions that this process does not know",
                    found=f"number {number}")


@dataclass(frozen=True)
class Step:
    """One direction of a function, for torch tensors and NumPy arrays.  The first argument is a tensor.

    schema: the arguments in torch's notation: "Tensor x, Tensor? weight, float eps, str? target".  results: (arguments) ->
    (shape, element type) of each result.  It checks the arguments and reads neither values nor addresses; sizes may be symbols
    of torch.  run: (*arguments, *results) computes the results.  count: of results.  owns: run takes the
    arguments alone, and returns a tuple of new tensors, none of them one of the arguments.  known: what results said of torch
    tensors of these shapes, strides, types and devices, and other arguments: its checks take longer than a launch.
    """

    schema: str
    results: Callable[..., Results]
    run: Callable[..., Any]
    count: int = 1
    owns: bool = False
    known: Cache[Any] = field(default_factory=lambda: Cache(1024), repr=False, compare=False)

    def __call__(self, *args: Any) -> tuple[Any, ...]:
        """New tensors with the results."""
        if self.owns:
            return tuple(self.run(*args))
        made = self._made(args)
        self.run(*args, *made)
        return made

    def _made(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """New tensors for the results."""
        like, torch = args[0], sys.modules.get("torch")
        if torch is None or not isinstance(like, torch.Tensor):
            return tuple(empty(like, shape, element) for shape, element in self.results(*args))
        key = tuple([(x.shape, x.stride(), x.dtype, x.device) if isinstance(x, torch.Tensor) else
                     tuple(x) if type(x) is list else x for x in args])
        try:
            plans = self.known.get(key)
        except TypeError:  # an argument that no function takes: the checks say so
            return tuple(empty(like, shape, element) for shape, element in self.results(*args))
        if plans is None:
            plans = self.known.keep(key, [(s, compact(s), getattr(torch, element)) for s, element in self.results(*args)])
        make, device = torch.empty_strided, like.device
        return tuple([make(shape, steps, dtype=dtype, device=device) for shape, steps, dtype in plans])

    def define(self, name: str) -> Any:
        """Define the operator `name` of torch with its fake implementation."""
        import torch  # 1 s

        def run(*args: Any) -> Any:
            with torch.no_grad():  # autograd works above the operator
                made = self(*args)
            return made if self.count > 1 else made[0]

        def fake(*args: Any) -> Any:
            made = tuple(args[0].new_empty(shape, dtype=getattr(torch, element)) for shape, element in self.results(*args))
            return made if self.count > 1 else made[0]

        result = f"({', '.join(['Tensor'] * self.count)})" if self.count > 1 else "Tensor"
        op = torch.library.custom_op(f"{SPACE}::{name}", run, mutates_args=(), schema=f"({self.schema}) -> {result}")
        op.register_fake(fake)
        return op


@dataclass(frozen=True)
class Function:
    """A differentiable function.

    name: of its operators, `name` and `name_backward`.  saved: (needs, arguments, results of forward) -> the first arguments of
    backward; tensors among them are kept for it, and `needs` tells for each argument whether its gradient is wanted.  The
    gradients of the first `visible` results follow them, None where nothing depends on a result; the other results are for
    `saved` alone.  gradients: the arguments of forward that the results of backward are the gradients of, in order.
    """

    name: str
    forward: Step
    backward: Step
    saved: Callable[..., tuple[Any, ...]]
    gradients: tuple[int, ...]
    visible: int = 1

    def __post_init__(self) -> None:
        _FUNCTIONS[self.name] = self

    def __call__(self, *args: Any) -> Any:
        """The visible results: one tensor, or a tuple of several."""
        if not direct(args):
            return self.recorded(*args)
        out = self.forward(*args)
        return out[0] if self.visible == 1 else out[:self.visible]

    def recorded(self, *args: Any) -> Any:
        """The same for a call that is not direct."""
        if traced() or _has_other_kind(args) or args[0].is_meta:
            out = _operator(self.name)(*args)
        elif _transform() is not None:
            out = _functional(self.name).apply(*args)
        else:
            out = _recorded(self.name).apply(*args)
        if self.forward.count == 1:
            return out
        return out[0] if self.visible == 1 else out[:self.visible]


def direct(args: tuple[Any, ...]) -> bool:
    """Whether a call computes its results at once: nobody traces it, and no gradient is wanted."""
    if is_numpy(args[0]):
        return True
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(args[0], torch.Tensor):  # no tensors: the checks say so
        return True
    if traced() or _transform() is not None or args[0].is_meta:
        return False
    if torch.autograd.forward_ad._current_level >= 0:
        _check_no_tangent(args)
    return not (torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in args))


def traced() -> bool:
    """Whether torch follows the operations of a call instead of executing them."""
    torch = sys.modules["torch"]
    return bool(torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0)


def untraced(x: Any) -> bool:
    """Whether a call with x is executed.  Checks of padded arguments wait for that: torch.compile follows no texts."""
    return is_numpy(x) or "torch" not in sys.modules or not traced()


def _transform() -> Any:
    """The transform of torch.func that a call is within, or None."""
    return sys.modules["torch"]._C._functorch.peek_interpreter_stack()


def _check_no_tangent(args: tuple[Any, ...]) -> None:
    """Raises library-derivative where a tensor has a tangent, which results would lose."""
    torch = sys.modules["torch"]
    if any(isinstance(x, torch.Tensor) and torch.autograd.forward_ad.unpack_dual(x).tangent is not None for x in args):
        raise _without("in forward mode")


def _without(mode: str) -> TileLangError:
    return error("library-derivative", f"functions of the library have no derivatives {mode}", found=mode,
                 expected="first derivatives in backward mode")


def _operator(name: str) -> Any:
    """The operator of a Function, or of its backward Step."""
    define(name.removesuffix("_backward"))
    return getattr(sys.modules["torch"].ops.tilelang_library, name)


def _has_other_kind(args: tuple[Any, ...]) -> bool:
    """Whether there is a tensor of a subclass, which says itself what operators do with it. (isinstance takes torch 0.4 us.)"""
    torch = sys.modules["torch"]
    common = {torch.Tensor, torch.nn.Parameter, type(None), int, float, bool, str}
    return any(x.__class__ not in common and isinstance(x, torch.Tensor) for x in args)


def _keep(f: Function, ctx: Any, inputs: tuple[Any, ...], results: tuple[Any, ...]) -> None:
    """Save in ctx what backward needs."""
    Tensor = sys.modules["torch"].Tensor
    kept = f.saved(ctx.needs_input_grad, inputs, results)
    ctx.tensors = [isinstance(x, Tensor) for x in kept]
    ctx.numbers = [None if t else x for t, x in zip(ctx.tensors, kept)]
    ctx.save_for_backward(*(x for x, t in zip(kept, ctx.tensors) if t))
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*results[f.visible:])


def _gradients(f: Function, ctx: Any, grads: tuple[Any, ...], backward: Callable[..., tuple[Any, ...]]) -> tuple[Any, ...]:
    found: list[Any] = [None] * len(ctx.needs_input_grad)
    if any(g is not None for g in grads[:f.visible]):
        tensors = iter(ctx.saved_tensors)
        kept = [next(tensors) if t else x for t, x in zip(ctx.tensors, ctx.numbers)]
        for k, x in zip(f.gradients, backward(*kept, *grads[:f.visible])):
            found[k] = x if ctx.needs_input_grad[k] else None
    return tuple(found)


@cache
def _recorded(name: str) -> Any:
    """The function as torch records it where nobody traces: an operator would cost the host 60 us more a call."""
    import torch  # 1 s

    f = _FUNCTIONS[name]

    class Recorded(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> Any:
            results = f.forward(*inputs)
            _keep(f, ctx, inputs, results)
            return results if f.forward.count > 1 else results[0]

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:  # with grad mode for create_graph=True
            return _gradients(f, ctx, grads, _once(name) if torch.is_grad_enabled() else f.backward)

        @staticmethod
        def jvp(*_: Any) -> Any:
            raise _without("in forward mode")

    return Recorded


@cache
def _functional(name: str) -> Any:
    """The function as the transforms of torch.func take it: theirs of torch.autograd.Function, which bind arguments slowly."""
    import torch  # 1 s

    f = _FUNCTIONS[name]

    class Functional(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(*inputs: Any) -> Any:
            return _below(name, f.forward, inputs)

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            _keep(f, ctx, inputs, output if f.forward.count > 1 else (output,))

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return _gradients(f, ctx, grads, _once(name))

        @staticmethod
        def jvp(*_: Any) -> Any:
            raise _without("in forward mode")

    return Functional


def _below(name: str, step: Step, inputs: tuple[Any, ...]) -> Any:
    """The results of a step below all transforms; of vmap torch gives slices to the operator."""
    if _transform() is not None:
        return _operator(name)(*inputs)
    with sys.modules["torch"].no_grad():
        made = step(*inputs)
    return made if step.count > 1 else made[0]


@cache
def _once(name: str) -> Callable[..., tuple[Any, ...]]:
    """The backward Step of a function, whose own derivative is an error: without a node of its own, torch.autograd.grad would
    leave out what the gradient contributes to it."""
    import torch  # 1 s

    step = _FUNCTIONS[name].backward

    class Once(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(*inputs: Any) -> Any:
            return _below(f"{name}_backward", step, inputs)

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            pass

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            raise _without("of second order")

        @staticmethod
        def jvp(*_: Any) -> Any:
            raise _without("in forward mode")

    def run(*args: Any) -> tuple[Any, ...]:
        out = Once.apply(*args)
        return out if step.count > 1 else (out,)

    return run


@cache
def _define(name: str) -> None:
    import torch  # 1 s

    f = _FUNCTIONS[name]
    of_gradients = f.backward.define(f"{name}_backward")
    op = f.forward.define(name)

    def setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        _keep(f, ctx, inputs, output if f.forward.count > 1 else (output,))

    def gradient(ctx: Any, *grads: Any) -> Any:
        def backward(*args: Any) -> tuple[Any, ...]:
            out = getattr(torch.ops.tilelang_library, f"{name}_backward")(*args)
            return out if f.backward.count > 1 else (out,)

        return _gradients(f, ctx, grads, backward)

    def twice(ctx: Any, *grads: Any) -> Any:
        raise _without("of second order")

    op.register_autograd(gradient, setup_context=setup)
    of_gradients.register_autograd(twice)


def define(name: str) -> bool:
    """Define the operators of a function, once.  torch.compile executes it while it traces, without looking into it."""
    _define(name)
    return True


define._dynamo_marked_constant = True  # type: ignore[attr-defined]  # torch.compiler.assume_constant_result, without torch
