"""Names of the public interface that exist but cannot be used yet: one table, one error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


from .tracing.state import error, named

HOPPER = "is a raw form that is not available: T.wgmma_gemm, T.wait_wgmma and the barriers of T.alloc_barrier are"
BLACKWELL_COPY = "is for Blackwell (sm_100), which is not available yet"
BLACKWELL = "is for Blackwell's tensor memory, which is not available yet"
TMA = "is a raw form that is not available: use T.tma_copy"
RAW = "raw IR-script construct, not available: use the language's own statements"
EMITTER = "hand-written tensor-core code is not available yet: use T.gemm"
HOST = "host plumbing of another runtime, not available"
LATER = "is not available yet"

_TABLE: dict[str, str] = {
    HOPPER: """wgmma_gemm_sp ptx_wgmma_sp_rs ptx_wgmma_sp_ss""",
    TMA: "ptx_cp_async_bulk",
    BLACKWELL_COPY: """tma_load_2sm tma_gather4 tma_gather4_bytes tma_scatter4 clc_get_first_ctaid_x clc_get_first_ctaid_y
        clc_get_first_ctaid_z clc_is_canceled clc_try_cancel clc_try_cancel_multicast""",
    BLACKWELL: """alloc_tmem deallocate_tmem alloc_tcgen05_instr_desc alloc_tcgen05_instruction_desc
        alloc_tcgen05_smem_desc tcgen05_after_thread_sync tcgen05_before_thread_sync tcgen05_cp_warpx4
        tcgen05_gemm tcgen05_gemm_blockscaled tcgen05_gemm_sp tcgen05_mma tcgen05_mma_arrive
        tcgen05_mma_blockscaled tcgen05_sf_warp_transpose initialize_tcgen05_descriptor
        ptx_tcgen05_mma_blockscaled_ss ptx_tcgen05_mma_ss ptx_tcgen05_mma_ts make_blockscaled_gemm_layout
        mma_gemm_blockscaled compute_umma_descriptor TCGEN05DescriptorParams TCGEN05TensorCoreIntrinEmitter
        TensorCoreIntrinEmitterSM120""",
    EMITTER: """SparseTensorCoreIntrinEmitter
        WGMMADescriptorParams WGMMATensorCoreIntrinEmitter WGSparseTensorCoreIntrinEmitter
        compute_gmma_descriptor mma_fill mma_store ptx_mma_block_scale ptx_mma_sm70 ptx_mma_sp
        tvm_bmma_sync tvm_fill_fragment
        tvm_load_matrix_sync tvm_mma_sync tvm_store_matrix_sync""",
    RAW: """CallEffectKind IterVar ProducerLoad Range Reduce arg axis block_name_suffix_context
        buffer buffer_decl buffer_var env_thread func_name func_ret get_active_lane_mask
        ignore_loop_partition index_map init iter_var lookup_param ret vscale Ptr call_kernel""",
    HOST: """TVMBackendAllocWorkspace TVMBackendFreeWorkspace anylist_getitem anylist_resetitem
        anylist_setitem_call_cpacked anylist_setitem_call_packed call_cpacked call_cpacked_lowered
        call_packed call_packed_lowered tvm_call_cpacked tvm_call_cpacked_lowered tvm_call_packed
        tvm_call_packed_lowered tvm_stack_alloca tvm_stack_make_array tvm_stack_make_shape tvm_struct_get
        tvm_struct_set tvm_throw_last_error tvm_tuple call_llvm_intrin call_llvm_pure_intrin
        llvm_lookup_intrinsic_id""",
    LATER: """start_profile_intrinsic end_profile_intrinsic q_multiply_shift q_multiply_shift_per_axis""",
}


def _unavailable(name: str, reason: str, module: str = "T") -> Callable[..., Any]:
    def unavailable(*args: Any, **kw: Any) -> Any:
        raise error("not-available", f"‹{module}.{name}›{':' if reason[0].isupper() else ''} {reason}")

    return named(unavailable, name, f"Not available: {reason}.")


def unavailable_names(reason: str, names: str, module: str = "T") -> dict[str, Callable[..., Any]]:
    """Functions of these names (words of a text), of a module, that raise not-available with the reason."""
    return {name: _unavailable(name, reason, module) for name in names.split()}


UNAVAILABLE: dict[str, Callable[..., Any]] = {
    name: _unavailable(name, reason) for reason, names in _TABLE.items() for name in names.split()}
