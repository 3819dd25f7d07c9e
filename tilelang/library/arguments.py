"""Arguments of calls: under torch.autocast, and what was wrong with those of a call that failed with one of Python's errors."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Sequence
from numbers import Integral, Real
from typing import Any

from tilelang.errors import TileLangError, error

# type in an annotation -> what an error says is expected, and whether a value is one
_TYPES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "Any": ("a torch.Tensor or a numpy.ndarray", lambda x: hasattr(x, "shape") and hasattr(x, "dtype")),
    "None": ("None", lambda x: x is None),
    "int": ("an integer", lambda x: isinstance(x, Integral)),
    "float": ("a number", lambda x: isinstance(x, Real)),
    "bool": ("True or False", lambda x: isinstance(x, bool)),
    "str": ("a str", lambda x: isinstance(x, str)),
    "tuple": ("a tuple", lambda x: isinstance(x, tuple)),
    "Sequence": ("a sequence", lambda x: isinstance(x, Sequence) and not isinstance(x, str)),
    "ScoreMod": ("a function", callable),
    "Value": ("a function", callable),
    "BlockMask": ("a mask of tilelang.library.create_block_mask", lambda x: hasattr(x, "columns")),
}
# function -> operands that have the type of torch.autocast where that is on, as those of torch.matmul and SDPA have
LOWERED: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("matmul", "grouped_matmul"), ("a", "b", "bias")), "fused_matmul": ("a", "b", "second"),
    **dict.fromkeys(("flash_attention", "flex_attention", "online_attention", "linear_attention", "gated_delta", "kda",
                     "retention"), ("q", "k", "v")),
    "mla_prefill": ("q", "k", "k_rope", "v"), "conv2d": ("x", "weight"), "linear_cross_entropy": ("x", "weight"),
    "mamba2": ("x", "b", "c"),
}
_OF_SHAPES = (AttributeError, IndexError, ZeroDivisionError)


def under_autocast(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A function whose operands in `LOWERED` are converted by torch.autocast where it is on, and no `out` is given."""
    if fn.__name__ not in LOWERED:
        return fn
    order = list(inspect.signature(fn).parameters)
    places = {n: order.index(n) for n in LOWERED[fn.__name__]}
    first = min(places.values())

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        torch = sys.modules.get("torch")
        if torch is None or not torch._C._is_any_autocast_enabled() or kwargs.get("out") is not None:  # 0.1 us
            return fn(*args, **kwargs)
        like = args[first] if first < len(args) else kwargs.get(order[first])
        kinds = torch.float32, torch.float16, torch.bfloat16
        if not isinstance(like, torch.Tensor) or like.dtype not in kinds or not torch.is_autocast_enabled(like.device.type):
            return fn(*args, **kwargs)
        kind, given = torch.get_autocast_dtype(like.device.type), [*args]
        for n, k in places.items():
            x = given[k] if k < len(given) else kwargs.get(n)
            if isinstance(x, torch.Tensor) and x.dtype in kinds:
                if k < len(given):
                    given[k] = x.to(kind)
                else:
                    kwargs[n] = x.to(kind)
        return fn(*given, **kwargs)

    return call


def explained(name: str, signature: inspect.Signature, given: dict[str, Any], failed: Exception) -> TileLangError | None:
    """The error of a call of the public function `name` that raised `failed`; None where its arguments explain nothing.

    given: the arguments by the names of parameters.  They are compared with the annotations (of `Any` those without a default),
    then the dimensions of tensors are named where the library itself could not read them.
    """
    for n, x in given.items():
        if getattr(x, "is_nested", False) or str(getattr(x, "layout", "torch.strided")) != "torch.strided":
            found = "a nested tensor" if getattr(x, "is_nested", False) else f"a tensor of layout {x.layout}"
            return error("library-argument", f"{n} of {name} is {found}", found=found, expected="a tensor with strides",
                         hint="x.to_dense(); packed sequences are x.values() and cumulative lengths")
    for p in signature.parameters.values():
        types = [_TYPES.get(x.partition("[")[0]) for x in str(p.annotation).split(" | ")]
        if p.name not in given or None in types or p.annotation == "Any" and p.default is not p.empty:
            continue
        wanted = [t for t in types if t is not None]
        if not any(fits(given[p.name]) for _, fits in wanted):
            found = type(given[p.name]).__name__
            return error("library-argument", f"{p.name} of {name} is of type ‹{found}›",
                         expected=" or ".join(text for text, _ in wanted),
                         hint="make a tensor of it: numpy.asarray(x, numpy.float32)" if found in ("list", "tuple") else "")
    for n, f in given.items():
        f = getattr(f, "mask_mod", f)
        code = getattr(f, "__code__", None)
        if code is not None and (code in _codes_of(failed) or str(failed).startswith(f"{f.__qualname__}()")):
            return error("library-argument", f"{n} of {name} raised {type(failed).__name__}: {failed}",
                         expected="a function of what it is called with, by operators and functions of tilelang.language",
                         found=str(failed), hint="T.tanh(x), T.if_then_else(c, a, b), a & b")
    if (isinstance(failed, _OF_SHAPES) and _within_the_library(failed)) or hasattr(failed, "facts"):
        shown = ", ".join(f"{n} {_text(x)}" for n, x in given.items() if hasattr(x, "shape") and hasattr(x, "dtype"))
        return error("library-argument", f"{name} does not take tensors of these shapes and types: {failed}", found=shown,
                     expected=f"shapes and types as in help(tilelang.library.{name})")
    return None


def _text(x: Any) -> str:
    return f"{str(x.dtype).rpartition('.')[2]} {tuple(x.shape)}"


def _codes_of(e: BaseException) -> set[Any]:
    """The code that an error passed."""
    found, at = set(), e.__traceback__
    while at is not None:
        found.add(at.tb_frame.f_code)
        at = at.tb_next
    return found


def _within_the_library(e: BaseException) -> bool:
    """Whether code of the library raised an error, not a function that it called."""
    at = e.__traceback__
    while at is not None and at.tb_next is not None:
        at = at.tb_next
    return at is not None and str(at.tb_frame.f_globals.get("__name__", "")).startswith("tilelang.library")
