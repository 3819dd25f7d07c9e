"""Lets callers give parameters by further names, and those of functions that take any number of arguments by names."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

# Function -> further names of its parameters, in order; those of functions that take any number of arguments.
SPELLINGS = {
    **dict.fromkeys(("shift_left", "shift_right", "ieee_add", "ieee_sub", "ieee_mul", "ieee_fdiv", "add2", "sub2", "mul2",
                     "max2", "min2"), "x y"),
    **dict.fromkeys(("ieee_fmaf", "fma2"), "x y z"),
    **dict.fromkeys(("ieee_frcp", "ieee_fsqrt", "ieee_frsqrt", "abs2"), "x"),
    **dict.fromkeys(("lds32", "lds64", "lds128"), "src"), **dict.fromkeys(("sts32", "sts64", "sts128"), "dst value"),
    **dict.fromkeys(("any_of", "all_of"), "buffer_or_region"), "shfl_sync": "value srcLane", "__ffs": "v",
    **dict.fromkeys(("shfl_xor", "shfl_up", "shfl_down"), "value delta"), "__ldg": "src index",
    **dict.fromkeys(("make_tensor", "handle_add_byte_offset"), "pointer offset"), "evaluate": "value",
    "named_barrier_arrive": "barrier_id", "tvm_warp_shuffle": "mask value", "tvm_thread_invariant": "condition",
    **dict.fromkeys(("get_warp_idx", "get_warp_idx_sync", "get_warp_group_idx"), "warp_size"),
    **dict.fromkeys(("set_max_nreg", "inc_max_nreg", "dec_max_nreg", "annotate_producer_reg_dealloc",
                     "annotate_consumer_reg_alloc"), "reg_count"),
    **dict.fromkeys(("mbarrier_arrive", "mbarrier_wait_parity"), "mbarrier"),
    **dict.fromkeys(("mbarrier_expect_tx", "mbarrier_arrive_expect_tx", "ptx_arrive_barrier_expect_tx"), "mbarrier tx_bytes"),
    **dict.fromkeys(("barrier_arrive", "barrier_wait", "ptx_arrive_barrier", "ptx_wait_barrier", "ptx_cp_async_barrier",
                     "cp_async_barrier_noinc"), "barrier"),
    "ptx_init_barrier_thread_count": "barrier count", "ptx_arrive_cluster_barrier": "barrier cta_id",
    "warpgroup_fence_operand": "buffer_or_ptr", "initialize_wgmma_descriptor": "descriptor start_address",
    "increase_descriptor_offset": "descriptor offset", "get_swizzle_layout": "row_idx col_idx",
    "ptx_ldmatrix": "trans num smem_ptr local_ptr",
    "ptx_wgmma_ss": "dtype wgmma_prefix a_is_k_major b_is_k_major a_dtype_abbrv b_dtype_abbrv accum_dtype_abbrv A_desc "
                    "A_offset B_desc B_offset C_data C_offset",
    "ptx_wgmma_rs": "dtype wgmma_prefix b_is_k_major a_dtype_abbrv b_dtype_abbrv accum_dtype_abbrv A_buf A_offset B_desc "
                    "B_offset C_data C_offset",
    "buffer_store": "buffer", **dict.fromkeys(("If", "While"), "cond"), "Assert": "condition message", "launch_thread": "tag",
    "meta_var": "value", "target": "config", "call_intrin": "dtype op",
    **dict.fromkeys(("call_extern", "call_pure_extern"), "dtype name"),
    **dict.fromkeys(("vectorlow", "vectorhigh", "ptx_mma"), "dtype"), "vectorcombine": "dtype low high",
}


def spelled(fn: Callable[..., Any], names: str) -> Callable[..., Any]:
    """fn, whose parameters may also be given by these names (in order).  A keyword dtype may stand for the first of them beside
    positional arguments: call_extern("f", x, dtype="handle").  Raises TypeError for one that is given twice."""
    order = names.split()

    @functools.wraps(fn)
    def call(*args: Any, **kw: Any) -> Any:
        if order[0] == "dtype" in kw and args:
            args = (kw.pop("dtype"), *args)
        if not kw.keys().isdisjoint(order):
            args = _placed(fn, order, args, kw)
        return fn(*args, **kw)

    return call


def spell(names: dict[str, Any]) -> dict[str, Any]:
    """Apply `spelled` to the functions of SPELLINGS among these names.

    The defining modules get the same wrapped functions, so that a function is one object wherever it is imported from."""
    out = {name: spelled(names[name], order) for name, order in SPELLINGS.items()}
    for name, fn in out.items():
        home = vars(sys.modules[fn.__module__])
        home.update({own: fn for own, x in home.items() if x is names[name]})
    return out


def _placed(fn: Callable[..., Any], order: list[str], args: tuple[Any, ...], kw: dict[str, Any]) -> tuple[Any, ...]:
    """The arguments, with those of `kw` renamed or moved to their position."""
    params = inspect.signature(fn).parameters.values()
    own = [p.name for p in params if p.kind is p.POSITIONAL_OR_KEYWORD]
    for place, name in enumerate(order):
        if name not in kw or name in own:
            continue
        if place < len(args) or place < len(own) and own[place] in kw:
            raise TypeError(f"{fn.__name__}() got multiple values for argument '{name}'")
        if place < len(own):
            kw[own[place]] = kw.pop(name)
        elif place == len(args):  # a positional parameter
            args = (*args, kw.pop(name))
        else:
            raise TypeError(f"{fn.__name__}() missing a required argument: '{order[len(args)]}'")
    return args
