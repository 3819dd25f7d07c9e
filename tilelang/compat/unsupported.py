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
__all__ = ["UNSUPPORTED"]
