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
    assert T.ws_schedule.WSRole("load", warps_lo=0, warps_hi=3) == T.WSRole("load", warps_lo=0, warps_hi=3)


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
    from tilelang.cuda import language as cuda
    from tilelang.language import common

    assert cuda.__all__ == list(T.__all__) and cuda.copy is T.copy and cuda.__tilelang_dialect__ == "cuda"
    assert common.__tilelang_dialect__ == "common" and common.copy is T.copy
    for name in ("ptx_mma", "ptx_ldmatrix", "ptx_wgmma_ss", "ptx_wait_barrier"):
        assert hasattr(T, name) and not hasattr(common, name), name
    for name in ("ptx_arrive_barrier", "ptx_cp_async", "ptx_commit_group", "ptx_wait_group"):
        assert getattr(common, name) is getattr(T, name), name


@pytest.mark.spec("L1:submodules")
def test_dialects_of_other_targets():
    from tilelang.language import common

    own = {"rocm": "rdna_wmma_store rdna_wmma MatrixCorePreshuffleIntrinEmitter ds_read_tr8_b64", "cpu": "", "webgpu": "",
           "metal": "simdgroup_load cooperative_tensor_fill make_filled_simdgroup_matrix"}
    for name, words in own.items():
        found = import_module(f"tilelang.{name}.language")
        assert found.__tilelang_dialect__ == name and found.copy is T.copy and not hasattr(found, "ptx_mma")
        assert set(common.__all__) | set(words.split()) <= set(found.__all__)
        for word in words.split():
            assert not hasattr(T, word) and not hasattr(common, word)
            with pytest.raises(NotImplementedError, match=f"{word} is (for .* GPUs, which are )?not available"):
                getattr(found, word)(1)


@pytest.mark.spec("R11:others")
def test_questions_about_targets_of_other_makers():
    from tilelang.metal import target as metal
    from tilelang.rocm import target as rocm

    for ask, on_942, on_950 in ((rocm.target_is_hip, True, True), (rocm.target_is_rocm, True, True),
                                (rocm.target_is_cdna, True, True),
                                (rocm.target_is_rdna, False, False), (rocm.target_is_gfx950, False, True),
                                (metal.target_is_metal, False, False)):
        assert ask("cpu") is ask({"kind": "cuda", "arch": "sm_90"}) is False
        assert (ask("gfx942"), ask({"kind": "hip", "mcpu": "gfx950"})) == (on_942, on_950)
        with pytest.raises(AssertionError, match="not supported"):
            ask("metal")
    assert not rocm.check_hip_availability() and not metal.check_metal_availability()


@pytest.mark.spec("L18:constructors", "L22:layout-functions")
def test_layouts_and_emitters_of_other_hardware_are_refused_by_name():
    from tilelang.cuda import intrinsics
    from tilelang.layout import cute

    for refuse, words in ((layout.make_tcgen05mma_swizzled_layout, "Blackwell"), (cute.composition, "layout.cute.composition"),
                          (cute.make_layout, "no CuTe algebra"),
                          (intrinsics.INT4TensorCoreIntrinEmitterWithLadderTransform, "permuted beforehand"),
                          (intrinsics.WGMMATensorCoreIntrinEmitter, "T.gemm"),
                          (intrinsics.compute_umma_descriptor, "Blackwell")):
        with pytest.raises(NotImplementedError, match=words):
            refuse(1)
    assert cute.Layout is layout.Layout and {"coalesce", "complement", "restrict"} <= set(cute.__all__)


@pytest.mark.spec("L22:layout-functions")
def test_registers_of_4_bit_operands():
    """PTX ISA, m16n8k64: a lane holds runs of 8 columns, rows g and g + 8, then the same 32 columns on."""
    from tilelang.cuda.intrinsics.layout.mma_layout import mma_load_a_32x32_to_shared_16x64_layout as place

    found = {place(lane, r) for lane in range(32) for r in range(32)}
    assert found == {(i, j) for i in range(16) for j in range(64)}
    for lane, r, at in ((0, 0, (0, 0)), (0, 7, (0, 7)), (0, 8, (8, 0)), (1, 0, (0, 8)), (4, 0, (1, 0)), (0, 16, (0, 32)),
                        (31, 31, (15, 63))):
        assert place(lane, r) == at
