"""Modules of another compiler's insides: path -> (why it is not here and what is, the names that it is known to have).

The modules import.  The names raise not-available when they are called; other names are missing, with the same reason.
"""

_PASS = "is a pass over another compiler's programs; tilelang.tools.lower_trace runs and shows those of this one"
_CHOSEN = "is not available: T.gemm chooses its instruction while compiling, and kernel.report() names it"
_HOST = "is not available: a kernel is called through its host function (kernel.get_host_source())"
_HARDWARE = "is for hardware that is not available: tensor cores of Blackwell, AMD and Apple"

UNSUPPORTED: dict[str, tuple[str, str]] = {
    "tilelang._ffi_api": ("is not available: the compiler is written in Python", ""),
    "tilelang.autotuner.grouped_compile": ("is not available: AutoTuner.run compiles candidates by itself", ""),
    "tilelang.contrib.cc": ("is not available: no C compiler is called", "create_shared cross_compiler get_cc"),
    "tilelang.cuda.pipeline": ("is not available: loops are planned while compiling", ""),
    **{f"tilelang.{path}": (_CHOSEN, "resolve_gemm_impl") for path in ("cuda.op", "cuda.op.gemm", "tileop.gemm",
                                                                       "tileop.gemm.registry")},
    **{f"tilelang.{path}": (_HARDWARE, "") for path in ("cuda.intrinsics.layout.mma_sm100_layout", "metal.intrinsics",
                                                        "rocm.intrinsics.mfma_layout")},
    **{f"tilelang.jit.{path}": (_HOST, "CachedTextSource match_declare_kernel check_cutedsl_available") for path in (
        "abi", "adapter.base", "adapter.cutedsl", "adapter.cutedsl.checks", "adapter.utils", "adapter.wrapper")},
    **{f"tilelang.{path}": ("is not available: operands permuted beforehand are not; use INT4TensorCoreIntrinEmitter",
                            "INT4TensorCoreIntrinEmitterWithLadderTransform") for path in (
        "cuda.intrinsics", "cuda.intrinsics.macro", "intrinsics", "language.intrinsics")},
    "tilelang.language.tir.exports": ("is not available: each dialect's __all__ names what it has", ""),
    "tilelang.cuda.transform": (_PASS, """AnnotateDeviceBoundTmaCopies AnnotateWarpGroupRegAlloc FuseMBarrierArriveExpectTx
        InjectFenceProxy InjectTcgen05Fence LowerBlackwell2SM LowerHopperIntrin LowerL2Persistent LowerLDGSTG LowerSharedBarrier
        LowerSharedTmem MarkCudaSyncCalls MaterializeWSSchedule PersistThreadblock ProducerConsumerWarpSpecialized"""),
    "tilelang.transform.other_passes": (_PASS, """AddWrapperForSingleBufStore AnnotateDeviceRegions AnnotateReadOnlyParams
        CanonicalizeLegacyReducer ClusterPlanning ConfigIndexBitwidth DecoupleTypeCast FlattenBuffer HoistBroadcastValues
        HoistGlobalBufferAllocations IfStmtBinding InjectAssumes InjectSoftwarePipeline LayoutInference LegalizeNegativeIndex
        LegalizeSafeMemoryAccess LegalizeVectorizedLoop LetInline LoopUnswitching LowerAccessPtr LowerDeviceKernelLaunch
        LowerIntrin LowerOpaqueBlock LowerThreadAllreduce LowerTileOp MakePackedAPI MaterializeKernelLaunch MergeIfStmt
        MergeSharedMemoryAllocations PipelinePlanning PlanAndUpdateBufferAllocationLocation ReducerPlanAndMaterialize Simplify
        SplitHostDevice StorageRewrite ThreadSync UnrollLoop VectorizeLoop VerifyBufferInit VerifyParallelLoop
        VerifyReducerConsumed VerifyReducerEpoch"""),
}
# The names of a dialect beside the common ones: target -> (its machines, its names).
DIALECTS: dict[str, tuple[str, str]] = {
    "ascend": ("Ascend NPUs", """MixedKernel Cube Vector SimtVF SimdVF Task Stage PerCoreTask Scope assume_conflict
        assume_no_conflict alloc_l1 alloc_l0a alloc_l0b alloc_l0c alloc_l0a_sf alloc_l0b_sf alloc_L1 alloc_L0A
        alloc_L0B alloc_L0C alloc_ub make_zn_layout dual_copy gemm_v0 annotate_buffer_versions ascend_set_flag
        ascend_wait_flag ascend_pipe_barrier ascend_cross_core_set_flag ascend_cross_core_wait_flag
        ascend_sync_inter_arrive ascend_sync_inter_wait ascend_get_buf ascend_rls_buf set_atomic set_atomic_none
        set_hf32_mode set_flag wait_flag set_cross_flag wait_cross_flag pipe_barrier barrier_all dump_tensor
        printf"""),
    "cpu": ("CPUs", ""), "webgpu": ("WebGPU", ""),
    "metal": ("Apple GPUs", """make_filled_simdgroup_matrix simdgroup_load simdgroup_multiply_accumulate simdgroup_store
        cooperative_tensor_fill cooperative_tensor_load cooperative_tensor_store cooperative_tensor_multiply_accumulate"""),
    "rocm": ("AMD GPUs", """MatrixCorePreshuffleIntrinEmitter WMMAIntrinEmitter ds_read_tr16_b64 ds_read_tr8_b64 rdna_wmma
        rdna_wmma_store tvm_rdna_wmma tvm_rdna_wmma_store"""),
}
UNSUPPORTED.update({f"tilelang.{target}.language": (f"is for {machines}, which are not available", names)
                    for target, (machines, names) in DIALECTS.items()})
UNSUPPORTED["tilelang.rocm.language"] = (
    "is not available: T.gemm and T.copy choose their instructions for AMD's CDNA GPUs, and RDNA GPUs are no target; mfma and "
    "mfma_store_index_map are there for code by hand", DIALECTS["rocm"][1])
__all__ = ["DIALECTS", "UNSUPPORTED"]
