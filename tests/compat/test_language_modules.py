"""Submodules of the language hold its own names."""

from importlib import import_module

import pytest

import tilelang.language as T
from tilelang import ir, layout


@pytest.mark.spec("L1:submodules")
def test_submodules_hold_the_names_of_the_language():
    for module, names in (("proxy", "Tensor StridedTensor FragmentBuffer ptr"), ("tile_schedule", "PersistentTileScheduler"),
                          ("experimental.gemm_sp_op", "gemm_sp"), ("tir.op", "exp call_extern max"), ("ws_schedule", "WSRole"),
                          ("tir.ir", "If serial buffer_store Let"), ("kernel", "Kernel"), ("symbolics", "dynamic")):
        found = import_module(f"tilelang.language.{module}")
        for name in names.split():
            assert getattr(found, name) is getattr(T, name), (module, name)
    from tilelang.language.eager import EagerFunction
    from tilelang.language.eager.ast import mutate
    from tilelang.language.eager.builder import Builder

    assert EagerFunction and mutate and Builder.__doc__ and T.overrides.__all__ == []
    part = ir.Buffer("A", (4, 8), ir.dtype("float16"))[0:2, 0:8]
    assert isinstance(part, T.utils.BufferSlice)
    with pytest.raises(NotImplementedError, match="not available"):
        T.ws_schedule.WSRole("load", warps_lo=0, warps_hi=3)


@pytest.mark.spec("L18:constructors")
def test_layouts_of_volta_and_of_metadata_place_every_element_once():
    buffer = ir.Buffer("A", (32, 64), ir.dtype("float16"), "shared")
    for k_inner in (True, False):
        table = layout.make_volta_swizzled_layout(buffer, is_a=k_inner, k_inner=k_inner).table()
        assert sorted(table.ravel()) == list(range(32 * 64))
    meta = ir.Buffer("E", (32, 8), ir.dtype("int16"), "shared")
    assert (layout.make_cutlass_metadata_layout(meta, mma_dtype="float16", arch="9.0", block_k=64).table().ravel()
            == range(256)).all()


@pytest.mark.spec("L1:submodules")
def test_dialects():
    from tilelang.cuda import intrinsics
    from tilelang.cuda import language as cuda
    from tilelang.language import common

    assert cuda.__all__ == list(T.__all__) and cuda.copy is T.copy and cuda.__tilelang_dialect__ == "cuda"
    assert common.__tilelang_dialect__ == "common" and common.copy is T.copy
    for name in ("ptx_mma", "ptx_ldmatrix", "ptx_wgmma_ss", "ptx_wait_barrier"):
        assert hasattr(T, name) and not hasattr(common, name), name
    for name in ("ptx_arrive_barrier", "ptx_cp_async", "ptx_commit_group", "ptx_wait_group"):
        assert getattr(common, name) is getattr(T, name), name
    with pytest.raises(NotImplementedError, match="not available"):
        intrinsics.get_ldmatrix_offset("A", 0, 0, 16)
