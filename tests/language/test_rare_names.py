"""Names that programs seldom use: types say what they hold, and names of what is not there say so and why."""

import re

import pytest

import tilelang.language as T
from tilelang.errors import TileLangError

VECTORS = """
    T.bfloat16x16 T.bfloat16x32 T.bfloat16x4 T.bfloat16x64 T.bfloat16x8 T.float16x16 T.float16x32 T.float16x4 T.float16x64
    T.float16x8 T.float32x16 T.float32x32 T.float32x64 T.float4_e2m1fnx16 T.float4_e2m1fnx32 T.float4_e2m1fnx4
    T.float4_e2m1fnx64 T.float4_e2m1fnx8 T.float64x16 T.float64x2 T.float64x32 T.float64x4 T.float64x64 T.float64x8
    T.float6_e2m3fnx16 T.float6_e2m3fnx2 T.float6_e2m3fnx32 T.float6_e2m3fnx4 T.float6_e2m3fnx64 T.float6_e2m3fnx8
    T.float6_e3m2fnx16 T.float6_e3m2fnx2 T.float6_e3m2fnx32 T.float6_e3m2fnx4 T.float6_e3m2fnx64 T.float6_e3m2fnx8
    T.float8_e3m4x16 T.float8_e3m4x2 T.float8_e3m4x32 T.float8_e3m4x4 T.float8_e3m4x64 T.float8_e3m4x8
    T.float8_e4m3b11fnuzx16 T.float8_e4m3b11fnuzx2 T.float8_e4m3b11fnuzx32 T.float8_e4m3b11fnuzx4 T.float8_e4m3b11fnuzx64
    T.float8_e4m3b11fnuzx8 T.float8_e4m3fnuzx16 T.float8_e4m3fnuzx2 T.float8_e4m3fnuzx32 T.float8_e4m3fnuzx4
    T.float8_e4m3fnuzx64 T.float8_e4m3fnuzx8 T.float8_e4m3fnx16 T.float8_e4m3fnx2 T.float8_e4m3fnx32 T.float8_e4m3fnx4
    T.float8_e4m3fnx64 T.float8_e4m3x16 T.float8_e4m3x2 T.float8_e4m3x32 T.float8_e4m3x4 T.float8_e4m3x64 T.float8_e4m3x8
    T.float8_e5m2fnuzx16 T.float8_e5m2fnuzx2 T.float8_e5m2fnuzx32 T.float8_e5m2fnuzx4 T.float8_e5m2fnuzx64
    T.float8_e5m2fnuzx8 T.float8_e5m2x16 T.float8_e5m2x2 T.float8_e5m2x32 T.float8_e5m2x4 T.float8_e5m2x64 T.float8_e5m2x8
    T.float8_e8m0fnux16 T.float8_e8m0fnux2 T.float8_e8m0fnux32 T.float8_e8m0fnux4 T.float8_e8m0fnux64 T.float8_e8m0fnux8
    T.int16x16 T.int16x2 T.int16x32 T.int16x4 T.int16x64 T.int16x8 T.int32x16 T.int32x2 T.int32x32 T.int32x4 T.int32x64
    T.int32x8 T.int64x16 T.int64x2 T.int64x32 T.int64x4 T.int64x64 T.int64x8 T.int8x16 T.int8x2 T.int8x32 T.int8x4 T.int8x64
    T.int8x8 T.tfloat32x16 T.tfloat32x2 T.tfloat32x32 T.tfloat32x4 T.tfloat32x64 T.tfloat32x8 T.uint16x16 T.uint16x2
    T.uint16x32 T.uint16x4 T.uint16x64 T.uint16x8 T.uint32x16 T.uint32x2 T.uint32x32 T.uint32x4 T.uint32x64 T.uint32x8
    T.uint64x16 T.uint64x2 T.uint64x32 T.uint64x4 T.uint64x64 T.uint64x8 T.uint8x16 T.uint8x2 T.uint8x32 T.uint8x4
    T.uint8x64 T.uint8x8
""".split()
# What the error says of each of these.
REFUSED = {
    "T.wgmma_gemm, T.wait_wgmma": """
        T.ptx_wgmma_sp_rs T.ptx_wgmma_sp_ss T.wgmma_gemm_sp""",
    "use T.tma_copy": """
        T.ptx_cp_async_bulk""",
    "Blackwell (sm_100)": """
        T.clc_get_first_ctaid_x T.clc_get_first_ctaid_y T.clc_get_first_ctaid_z T.clc_is_canceled T.clc_try_cancel
        T.clc_try_cancel_multicast T.tma_gather4 T.tma_gather4_bytes T.tma_load_2sm T.tma_scatter4""",
    "Blackwell's tensor memory": """
        T.TCGEN05DescriptorParams T.TCGEN05TensorCoreIntrinEmitter T.TensorCoreIntrinEmitterSM120 T.alloc_tcgen05_instr_desc
        T.alloc_tcgen05_instruction_desc T.alloc_tcgen05_smem_desc T.compute_umma_descriptor T.deallocate_tmem
        T.initialize_tcgen05_descriptor T.make_blockscaled_gemm_layout T.mma_gemm_blockscaled
        T.ptx_tcgen05_mma_blockscaled_ss T.ptx_tcgen05_mma_ss T.ptx_tcgen05_mma_ts T.tcgen05_after_thread_sync
        T.tcgen05_before_thread_sync T.tcgen05_cp_warpx4 T.tcgen05_gemm T.tcgen05_gemm_blockscaled T.tcgen05_gemm_sp
        T.tcgen05_mma T.tcgen05_mma_arrive T.tcgen05_mma_blockscaled T.tcgen05_sf_warp_transpose""",
    "hand-written tensor-core code": """
        T.SparseTensorCoreIntrinEmitter T.WGMMADescriptorParams T.WGMMATensorCoreIntrinEmitter
        T.WGSparseTensorCoreIntrinEmitter T.compute_gmma_descriptor T.mma_fill T.mma_store T.ptx_mma_block_scale
        T.ptx_mma_sm70 T.ptx_mma_sp T.tvm_bmma_sync T.tvm_fill_fragment T.tvm_load_matrix_sync T.tvm_mma_sync
        T.tvm_store_matrix_sync""",
    "raw IR-script construct": """
        T.CallEffectKind T.IterVar T.ProducerLoad T.Ptr T.Range T.Reduce T.arg T.axis T.block_name_suffix_context T.buffer
        T.buffer_decl T.buffer_var T.call_kernel T.env_thread T.func_name T.func_ret T.get_active_lane_mask
        T.ignore_loop_partition T.index_map T.init T.iter_var T.lookup_param T.ret T.vscale""",
    "host plumbing": """
        T.TVMBackendAllocWorkspace T.TVMBackendFreeWorkspace T.anylist_getitem T.anylist_resetitem
        T.anylist_setitem_call_cpacked T.anylist_setitem_call_packed T.call_cpacked T.call_cpacked_lowered
        T.call_llvm_intrin T.call_llvm_pure_intrin T.call_packed T.call_packed_lowered T.llvm_lookup_intrinsic_id
        T.tvm_call_cpacked T.tvm_call_cpacked_lowered T.tvm_call_packed T.tvm_call_packed_lowered T.tvm_stack_alloca
        T.tvm_stack_make_array T.tvm_stack_make_shape T.tvm_struct_get T.tvm_struct_set T.tvm_throw_last_error T.tvm_tuple""",
    "is not available yet": """
        T.end_profile_intrinsic T.q_multiply_shift T.q_multiply_shift_per_axis T.start_profile_intrinsic""",
}


@pytest.mark.parametrize("name", VECTORS)
def test_a_vector_type_holds_what_its_name_says(name):
    base, lanes = re.fullmatch(r"T\.(\w+)x(\d+)", name).groups()
    one, found = getattr(T, base), getattr(T, name[2:])
    assert (found.base, found.lanes, str(found)) == (base, int(lanes), name[2:]) and found == T.dtype(name[2:])
    assert one.lanes == 1 and found.bits == one.bits and found.bytes == -(-int(lanes) * one.bits // 8)


def test_single_types_hold_what_their_names_say():
    bits = {T.float6_e2m3fn: 6, T.float6_e3m2fn: 6, T.float8_e3m4: 8, T.float8_e4m3b11fnuz: 8, T.boolean: 8, T.void: 0}
    assert {t: t.bits for t in bits} == bits and T.boolean == T.bool and len(set(map(str, bits))) == len(bits)


@pytest.mark.parametrize("name, said", [(n, said) for said, names in REFUSED.items() for n in names.split()])
def test_a_name_that_is_not_there_says_why(name, said):
    with pytest.raises(TileLangError, match=re.escape(name) + r"\b.*" + re.escape(said)):
        getattr(T, name[2:])(1)
