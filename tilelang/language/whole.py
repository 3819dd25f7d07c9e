"""T.name on whole tensors of @tilelang.program: functions of the language that programs have too, and those of theirs alone."""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib import import_module
from typing import Any

# Functions of the language that have a meaning on whole tensors: a tensor among the arguments decides (see on_tensors).
BOTH = tuple("""
abs atan2 bitwise_and bitwise_not bitwise_or bitwise_xor cast ceil clamp cos cummax cummin cumprod cumsum erf exp exp2 fabs
flip floor floordiv floormod gather if_then_else isfinite isinf isnan log log1p log2 max min nearbyint pow reduce_max
reduce_min reduce_sum reshape round rsqrt shift_left shift_right sigmoid sin sqrt tan tanh transpose trunc view where
""".split())
# Functions of whole tensors alone: T.name finds them in tilelang.program.
ALONE = frozenset("""
all amax amin any arange argmax argmin argsort astype broadcast_to cat chunk clip concat concatenate conv conv1d conv2d conv3d
cross_entropy dot einsum expand expand_dims expm1 flatten full gelu group_norm iota layer_norm leaky_relu log_softmax
logical_and logical_not logical_or logical_xor logsumexp loop matmul maximum mean minimum norm one_hot ones pad permute power
prod quantised relu remainder rms_norm roll sign silu softmax softplus sort split square squeeze stack std sum swapaxes swish
take take_along take_along_axis to topk tril triu unsqueeze variance windows zeros zeros_like
""".split())


def on_tensors(name: str, fn: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which leaves a call with a tensor of a program among its arguments to that tensor's class."""
    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        for x in args:
            if "__tilelang_program__" in type(x).__dict__:
                return x.__tilelang_program__(name, args, kwargs)
        return fn(*args, **kwargs)

    return call


def function_of_programs(name: str) -> Any:
    """A function of tilelang.program."""
    return import_module("tilelang.program").FUNCTIONS[name]
