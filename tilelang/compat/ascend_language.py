"""The dialect of Ascend NPUs: the common language; its own names raise errors."""

from tilelang.language.dialect import dialect

globals().update(dialect("ascend", "is for Ascend NPUs, which are not available", """MixedKernel Cube Vector SimtVF SimdVF Task
    Stage PerCoreTask Scope assume_conflict assume_no_conflict alloc_l1 alloc_l0a alloc_l0b alloc_l0c alloc_l0a_sf alloc_l0b_sf
    alloc_L1 alloc_L0A alloc_L0B alloc_L0C alloc_ub make_zn_layout dual_copy gemm_v0 annotate_buffer_versions ascend_set_flag
    ascend_wait_flag ascend_pipe_barrier ascend_cross_core_set_flag ascend_cross_core_wait_flag ascend_sync_inter_arrive
    ascend_sync_inter_wait ascend_get_buf ascend_rls_buf set_atomic set_atomic_none set_hf32_mode set_flag wait_flag
    set_cross_flag wait_cross_flag pipe_barrier barrier_all dump_tensor"""))
