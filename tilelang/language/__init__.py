"""The kernel language: `import tilelang.language as T`."""

from __future__ import annotations

import typing as _typing
from importlib import import_module as _import_module

from tilelang import ir as _ir
from tilelang.errors import JITNoBuilderError as _JITNoBuilderError

from . import dtypes as _dtypes
from . import fastmath as _fastmath
from .tracing import error_kinds as _kinds
from .tracing.builder import current_builder as _current_builder
from . import math as _math
from . import spellings as _spellings
from . import thread as _thread
from . import whole as _whole
from .tracing import python_questions as _trace_equality
from .addresses import access_ptr, address_of, region
from .alloc import *
from .allreduce import CommReducer, comm_reducer, tvm_thread_allreduce
from .annotations import *
from .atomic import *
from .atomic import atomic_and, atomic_max, atomic_min, atomic_xor
from .barriers import *
from .blockscaled import gemm_blockscaled
from .combine import *
from .composed import *
from .composed import (all_of, any_of, atomic_addx2, atomic_addx4, warp_reduce_bitand, warp_reduce_bitor, warp_reduce_max,
                       warp_reduce_min, warp_reduce_sum)
from .debug import device_assert, print
from .dtypes import *
from .distributed import *
from .distributed import (get_block, get_pe, get_pe_num, get_warp, put_block, put_warp, wait_eq, wait_ge, wait_gt, wait_le,
                          wait_lt, wait_ne)
from .extern import call_extern, call_pure_extern
from .hopper import *
from .hopper_raw import *
from .kernel import *
from .kernel import ClusterKernel, Kernel, WarpSpecializeFrame
from .loops import (Parallel, Persistent, Pipelined, Serial, Unroll, Vectorized, break_loop, continue_loop, grid,
                    loop_break, parallel, serial, unroll, vectorized)
from .tracing.macro import Macro, Ref, macro
from .math import *
from .math import (acos, acosh, asin, asinh, atan, atan2, atanh, bitwise_and, bitwise_or, bitwise_xor, ceil, clz, cos, cosh,
                   erf, exp, exp10, exp2, floor, floordiv, floormod, fmod, hypot, isfinite, isinf, isnan, log, log10, log1p,
                   log2, nearbyint, popcount, rsqrt, shift_left, shift_right, sigmoid, sin, sinh, sqrt, tan, tanh, trunc,
                   truncdiv, truncmod)
from .meta import *
from .tracing.prim_func import PrimFunc, prim_func
from .nodes import *
from .nodes import (Add, And, Div, EQ, FloatImm, FloorDiv, FloorMod, GE, GT, IntImm, LE, LT, Max, Min, Mod, Mul, NE, Or, Sub)
from .nvshmem import NVSHMEM as _NVSHMEM, barrier_all
from .random import rng_init, rng_rand, rng_rand_float
from .raw import *
from .reducer import *
from .scale import FullCol, FullRow, Replica, Scale, view
from .sparse import gemm_sp
from .symbolics import const, dynamic, symbolic
from .tensor import (Buffer_, FragmentBuffer, LocalBuffer, SharedBuffer, StridedTensor, Tensor, handle, make_tensor,
                     make_tensor_from_addr, match_buffer, ptr, reshape)
from .tensor_core import *
from .thread import *
from .thread import shfl_down, shfl_sync, shfl_up, shfl_xor, syncthreads_and, syncthreads_count, syncthreads_or
from .tile import *
from .tile import reduce_absmax, reduce_bitand, reduce_bitor, reduce_bitxor, reduce_max, reduce_min, reduce_prod
from .wide import (ldg32, ldg64, ldg128, ldg256, lds32, lds64, lds128, stg32, stg64, stg128, stg256, sts32, sts64,
                   sts128)
from .unavailable import UNAVAILABLE as _UNAVAILABLE
from .ws_schedule import *

_own = [n for n in globals() if not n.startswith("_")
        and not isinstance(globals()[n], type(_typing)) and n not in ("annotations", "Buffer_")]

# Names that collide with names of Python or of the IR have another name in the module that defines them.
_public = {
    "Any": _typing.Any, "Buffer": Buffer_, "cast": _math.cast_, "ramp": _math.Ramp_,
    "broadcast": _math.Broadcast_, "If": _thread.If_, "While": _thread.While_, "__ldg": _thread.ldg,
    "__ffs": _math.__ffs, "__fns": _math.__fns,
    "PrimExpr": _ir.Expr, "DataType": _ir.dtype,
    "boolean": _ir.dtype("bool"), "void": _ir.dtype("void"), "JITNoBuilderError": _JITNoBuilderError,
    **{n: getattr(_fastmath, n) for n in _fastmath.__all__},
    **_dtypes.TYPES,
    **_NVSHMEM,
    **_UNAVAILABLE,
}
globals().update(_public)
globals().update(_spellings.spell(globals()))
globals().update({n: _whole.on_tensors(n, globals()[n]) for n in _whole.BOTH})

# Submodules that the tracer does not need: they are loaded on first use.
_LAZY = {
    "Layout": "tilelang.layout", "Fragment": "tilelang.layout", "JITFunc": "tilelang.jit:JITImpl",
    "make_swizzled_layout": "tilelang.layout", "make_linear_layout": "tilelang.layout",
}
_SUBMODULES = ("eager", "dtypes", "fp8", "common", "experimental", "overrides", "proxy", "tile_schedule", "tir", "utils",
               "intrinsics", "ws_schedule")  # some are older paths, which tilelang.compat provides


def var(name: str = "v", dtype: _typing.Any = "int32") -> _ir.Var:
    """A fresh scalar variable.  Raises symbol-name for a name that is no string.

    Example:
        k = T.var("k", "int32")
    """
    return _import_module(f"{__name__}.nodes").variable(name, dtype)  # type: ignore[no-any-return]


def __getattr__(name: str) -> _typing.Any:
    if name in _whole.ALONE and _current_builder() is None:  # in a kernel these are unknown names, with hints of their own
        return _whole.function_of_programs(name)
    if name in _LAZY:
        module, _, attribute = _LAZY[name].partition(":")
        value = getattr(_import_module(module), attribute or name)
    elif name in _SUBMODULES:
        value = _import_module(f"{__name__}.{name}")
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    # what a prompt completes can be used
    return sorted((globals().keys() - _UNAVAILABLE.keys()) | _whole.ALONE | {*_whole.BOTH})


__tilelang_dialect__ = "cuda"
__all__ = sorted({*_own, *_public, "Layout", "Fragment", "JITFunc", "var"} - {"JITNoBuilderError"})
