"""Lets callers use the specification's parameter names where a function here names a parameter differently."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

# Function -> the specification's names of its parameters, in order.
SPELLINGS = {
    "shift_left": "x y", "shift_right": "x y", "make_tensor": "ptr shape dtype strides", "evaluate": "expr",
    "any_of": "buffer_or_region", "all_of": "buffer_or_region",
    **dict.fromkeys(("ieee_add", "ieee_sub", "ieee_mul", "ieee_fdiv", "add2", "sub2", "mul2", "max2", "min2"), "x y"),
    **dict.fromkeys(("ieee_fmaf", "fma2"), "x y z"),
    **dict.fromkeys(("ieee_frcp", "ieee_fsqrt", "ieee_frsqrt", "abs2"), "x"),
    "__ldg": "A idx", "__ffs": "v",
    **dict.fromkeys(("ldg32", "ldg64", "ldg128", "ldg256"), "src pred"), **dict.fromkeys(("lds32", "lds64", "lds128"), "src"),
    **dict.fromkeys(("stg32", "stg64", "stg128", "stg256"), "dst value pred"),
    **dict.fromkeys(("sts32", "sts64", "sts128"), "dst value"),
    "named_barrier_arrive": "id count", "shfl_sync": "value srcLane width mask",
    **dict.fromkeys(("shfl_xor", "shfl_up", "shfl_down"), "value delta width mask"),
    **dict.fromkeys(("get_warp_idx", "get_warp_idx_sync"), "ws"), "get_warp_group_idx": "ws warps_per_group",
    "set_max_nreg": "n is_inc",
    **dict.fromkeys(("inc_max_nreg", "dec_max_nreg", "annotate_producer_reg_dealloc", "annotate_consumer_reg_alloc"), "n"),
    "tvm_warp_shuffle": "mask v lane width warp_size", "tvm_thread_invariant": "c",
    "mbarrier_arrive": "bar cta_id", "barrier_arrive": "bar",
    **dict.fromkeys(("mbarrier_wait_parity", "barrier_wait"), "bar parity"),
    **dict.fromkeys(("mbarrier_expect_tx", "mbarrier_arrive_expect_tx"), "bar bytes"),
    **dict.fromkeys(("ptx_arrive_barrier", "ptx_wait_barrier", "ptx_cp_async_barrier", "cp_async_barrier_noinc"), "b"),
    "ptx_arrive_barrier_expect_tx": "b bytes", "ptx_init_barrier_thread_count": "b n", "ptx_arrive_cluster_barrier": "b cta",
    "warpgroup_fence_operand": "buf_or_ptr offset num_regs dtype",
    "initialize_wgmma_descriptor": "desc addr layout_type_ leading_byte_offset stride_byte_offset",
    "increase_descriptor_offset": "desc off", "get_swizzle_layout": "row col row_size dtype",
    "handle_add_byte_offset": "h n", "ptx_ldmatrix": "trans num src_access_ptr dst_access_ptr",
    "ptx_wgmma_ss": "dtype prefix a_is_k_major b_is_k_major a_abbrv b_abbrv acc_abbrv A_desc A_off B_desc B_off C_data C_off "
                    "scale_out scale_in_a scale_in_b",
    "ptx_wgmma_rs": "dtype prefix b_is_k_major a_abbrv b_abbrv acc_abbrv A_buf A_off B_desc B_off C_data C_off scale_out "
                    "scale_in_a scale_in_b",
    "buffer_store": "buf value indices predicate", "If": "c", "While": "c", "Assert": "c msg error_kind",
    "launch_thread": "tag_or_itervar extent", "meta_var": "v", "target": "cfg host", "call_intrin": "dtype op_or_name",
    **dict.fromkeys(("call_extern", "call_pure_extern"), "dtype func_name"),
    **dict.fromkeys(("vectorlow", "vectorhigh"), "dtype vec"), "vectorcombine": "dtype vec1 vec2", "ptx_mma": "dtype",
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


__all__ = ["SPELLINGS", "spell", "spelled"]
