"""Methods and helpers that the specification names one by one: what each gives."""

import numpy as np
import pytest
import torch

import tilelang
import tilelang.language as T
from tilelang import layout
from tilelang.backend.target import determine_target
from tilelang.errors import TileLangError
from tilelang.ir import Buffer, dtype


@T.prim_func
def double(A: T.Tensor((64,), "float32"), B: T.Tensor((64,), "float32")):
    with T.Kernel(1, threads=64):
        for i in T.Parallel(64):
            B[i] = A[i] * 2


def buffer(shape, dt="float32", scope="shared.dyn"):
    return Buffer("b", shape, dtype(dt), scope)


@pytest.mark.spec("L18:Layout")
def test_methods_of_layouts():
    lay = T.Layout((4, 6), lambda i, j: (j, i))
    assert repr(lay) == "Layout((4, 6) -> (6, 4), transform: (_i, _j) -> (_j, _i))"
    i, j = lay.get_forward_vars()
    assert lay.get_input_shape() == [4, 6] and lay.get_output_shape() == [6, 4]
    assert [e is v for e, v in zip(lay.get_forward_index(), (j, i))] == [True, True] and len(lay.index) == 2
    assert str(lay.get_linearized_forward_index()) == "((_j * 4) + _i)"
    assert [int(e) for e in lay.map_forward_index([1, 2])] == [2, 1] == [int(e) for e in lay(1, 2)]
    wide = lay.expand((3,))  # dimensions that pass through, in front of its own
    assert wide.get_output_shape() == [3, 6, 4] and [int(e) for e in wide(2, 1, 5)] == [2, 5, 1]
    np.testing.assert_array_equal(wide.table()[2], lay.table() + 48)
    assert lay.inverse().is_equal(T.Layout((6, 4), lambda i, j: (j, i))) and not lay.is_equal(lay.inverse())
    assert [int(e) for e in lay.repeat(0, 2)(5, 3)] == [1, 3, 1]


def test_a_layout_is_reshaped_to_wider_elements_only_where_they_lie_together():
    pairs = T.Layout((4, 8), lambda i, j: (j // 2, i, j % 2)).reshape((4, 4), 1, 2)
    np.testing.assert_array_equal(pairs.table(), np.arange(16).reshape(4, 4).T)
    with pytest.raises(ValueError, match="are to be one element"):  # the second of each pair lies elsewhere
        T.Layout((8,), lambda i: T.if_then_else(i % 2 == 0, i, (i + 2) % 8)).reshape((4,), 1, 2)


@pytest.mark.spec("L18:Fragment")
def test_methods_of_fragments():
    f = T.Fragment((8, 8), lambda i, j: (i * 4 + j // 2, j % 2))
    assert repr(f).startswith("Fragment((8, 8) -> (2,), replicate: 1, thread: 32, forward_thread: ")
    assert f.get_thread_size() == 32 and int(f.map_forward_thread([1, 2])) == 5
    assert f.is_equal(T.Fragment((8, 8), forward_thread_fn=lambda i, j: i * 4 + j // 2, forward_index_fn=lambda i, j: j % 2))
    assert f.repeat([2, 1]).shape == (16, 8) and f.repeat([2, 1]).get_thread_size() == 32
    assert f.repeat([1, 2], repeat_on_thread=True).get_thread_size() == 64
    both = f.replicate(2)
    assert both.get_thread_size() == 64 and both.replicas == 2
    np.testing.assert_array_equal(both.condense_rep_var().owners(), both.owners())


@pytest.mark.spec("L18:constructors")
def test_swizzle_modes_and_constructors():
    mode = layout.SwizzleMode
    modes = [mode.NONE, mode.SWIZZLE_32B, mode.SWIZZLE_64B, mode.SWIZZLE_128B]
    assert [mode.from_ordinal(n) for n in range(4)] == modes
    assert [m.wgmma_layout_type() for m in modes] == [0, 3, 2, 1]
    assert [m.tcgen05_layout_type() for m in modes] == [0, 6, 4, 2]
    assert [m.swizzle_byte_size() for m in modes] == [1, 32, 64, 128] == [m.swizzle_atom_size() for m in modes]
    assert [m.smem_alignment() for m in modes] == [128, 256, 512, 1024]
    tests = ("is_none", "is_swizzle_32b", "is_swizzle_64b", "is_swizzle_128b")
    assert [[getattr(m, t)() for t in tests] for m in modes] == np.eye(4).astype(bool).tolist()
    tile = buffer((64, 64), "float16")
    rows = {}
    for name in ("linear", "swizzled", "full_bank_swizzled", "half_bank_swizzled", "quarter_bank_swizzled", "wgmma_swizzled",
                 "volta_swizzled"):
        table = getattr(layout, f"make_{name}_layout")(tile).table()
        assert sorted(table.ravel()) == list(range(4096)), name
        rows[name] = table
        assert len(set((table[:8, 0] * 2 % 128 // 16).tolist())) == (1 if name == "linear" else 8), name  # banks of a column
    pitches = [int(np.diff(np.sort(rows[f"{n}_bank_swizzled"][:8, :8].ravel() * 2 // p * p)).max())
               for n, p in (("full", 128), ("half", 64), ("quarter", 32))]
    assert pitches == [128, 64, 32]  # bytes from a row to the next
    every = layout.make_fully_replicated_layout_fragment(buffer((4,), scope="local.fragment"), 32)
    assert every.replicas == 32 and every.registers == 4
    eight, turned = layout.make_gemm_fragment_8x8(), layout.make_gemm_fragment_8x8_transposed()
    np.testing.assert_array_equal(eight.owners()[0].T, turned.owners()[0])
    assert int(eight.map_forward_thread([3, 5])) == 3 * 4 + 5 // 2


@pytest.mark.spec("L22:layout-functions")
def test_layout_functions_cover_their_tile():
    from tilelang.cuda.intrinsics import get_mma_micro_size, mma_store_index_map
    from tilelang.cuda.intrinsics.layout import mma_layout

    for name, rows, columns in (("shared_16x8_to_mma_32x4", 16, 8), ("shared_16x16_to_mma_32x8", 16, 16),
                                ("shared_16x32_to_mma_32x16", 16, 32)):
        for operand in "ab":
            fn = getattr(mma_layout, f"{name}_layout_sr_{operand}")
            got = {tuple(map(int, fn(i, j))) for i in range(rows) for j in range(columns)}
            assert got == {(t, n) for t in range(32) for n in range(rows * columns // 32)}, name
    # rows of A and D: PTX ISA, "mma.m16n8k16": a lane has pairs of columns of row lane / 4 and of the row 8 below
    assert [tuple(map(int, mma_layout.shared_16x16_to_mma_32x8_layout_sr_a(i, j)))
            for i, j in ((0, 0), (1, 3), (8, 0), (0, 8), (15, 15))] == [(0, 0), (5, 1), (0, 2), (0, 4), (31, 7)]
    assert {tuple(map(int, mma_store_index_map(t, n))) for t in range(32) for n in range(8)} == {
        (i, j) for i in range(16) for j in range(16)}
    assert [get_mma_micro_size(d) for d in ("float16", "int8", "float32")] == [(16, 16, 16), (16, 16, 32), (16, 16, 8)]


@pytest.mark.spec("T.GemmWarpPolicy")
def test_warp_policies():
    policy = T.GemmWarpPolicy
    assert (policy.Square, policy.FullRow, policy.FullCol) == (0, 1, 2)
    tests = ("is_square", "is_full_row", "is_full_col")
    assert [[getattr(p, t)() for t in tests] for p in policy] == np.eye(3).astype(bool).tolist()
    assert policy.to_prime_factors(12) == [2, 2, 3] and policy.to_prime_factors(7) == [7]
    assert policy.FullRow.compute_warp_partition(128, 128, 4) == (4, 1)
    assert policy.FullCol.compute_warp_partition(128, 128, 4) == (1, 4)
    assert policy.Square.compute_warp_partition(128, 128, 4) == (2, 2)
    assert policy.FullRow.compute_warp_partition(32, 128, 4) == (2, 2)  # two tiles of 16 rows are all there are
    assert policy.FullCol.compute_warp_partition(128, 16, 4) == (2, 2)
    assert [policy.from_warp_partition(*p) for p in ((4, 1), (1, 4), (2, 2))] == [1, 2, 0]


@pytest.mark.spec("L5:slice-value")
def test_vector_loads_and_stores_of_a_buffer():
    @T.prim_func
    def f(A: T.Tensor((4, 8), "float32"), B: T.Tensor((4, 8), "float32")):
        with T.Kernel(1, threads=1):
            B.vstore([0, 4], A.vload([1, 0], "float32x4") * 2)
            B.vstore([2, 3], A.vload([1, 1]))

    x = np.arange(32, dtype=np.float32).reshape(4, 8)
    want = np.zeros_like(x)
    want[0, 4:], want[2, 3] = x[1, :4] * 2, x[1, 1]
    for place in ({"target": "cpu"}, {"target": "cpu", "execution_backend": "tile"}, {"target": "simulator"}):
        y = np.zeros_like(x)
        tilelang.compile(f, **place)(x, y)
        np.testing.assert_array_equal(y, want, str(place))
    with pytest.raises(TileLangError, match="vload of `A`"):

        @T.prim_func
        def g(A: T.Tensor((8,), "float32")):
            with T.Kernel(1, threads=1):
                A.vload([0], "int32x2")


@pytest.mark.spec("L1:submodules")
def test_names_of_small_floats_and_torch_types():
    from tilelang.language.dtypes import _TORCH_DTYPE_TO_STR, _all_dtypes, is_float4
    from tilelang.language.fp8 import determine_fp8_type, determine_torch_fp8_type
    from tilelang.utils.tensor import fp8_remove_negative_zeros_, is_float8_dtype

    assert _TORCH_DTYPE_TO_STR[torch.float16] == "float16" and _TORCH_DTYPE_TO_STR[torch.bool] == "bool"
    assert {"float16", "int8x4"} <= set(_all_dtypes) and is_float4("float4_e2m1fn")
    assert determine_fp8_type() == "float8_e4m3fn" and determine_fp8_type("e5m2") == "float8_e5m2"
    assert determine_torch_fp8_type("e5m2") == torch.float8_e5m2
    with pytest.raises(ValueError):
        determine_fp8_type("e3m4")
    assert is_float8_dtype(torch.float8_e5m2) and not is_float8_dtype(torch.float16)
    t = torch.tensor([-0.0, 1.0, -1.0]).to(torch.float8_e4m3fn)
    fp8_remove_negative_zeros_(t)
    assert t.view(torch.uint8).tolist()[0] == 0 and t.float().tolist() == [0, 1, -1]


@pytest.mark.spec("R12:utils", "R12:nvcc")
def test_predicates_of_buffers_and_targets():
    import tilelang.contrib.nvcc as nvcc
    import tilelang.cuda.target as cuda
    from tilelang import utils

    shared, dynamic = buffer((4, 8), scope="shared"), buffer((4, 8))
    assert utils.is_shared(shared) and utils.is_shared(dynamic) and not utils.is_shared(dynamic, allow_dynamic=False)
    assert utils.is_shared_dynamic(dynamic) and not utils.is_shared_dynamic(shared) and not utils.is_tensor_memory(shared)
    assert utils.is_global(buffer((4,), scope="global")) and utils.is_local(buffer((4,), scope="local"))
    assert utils.is_fragment(buffer((4,), scope="local.fragment")) and not utils.is_fragment(shared)
    assert utils.array_reduce([2, 3, 4]) == 24 and list(map(int, utils.retrieve_stride(shared))) == [8, 1]
    assert utils.is_full_region(utils.to_buffer_region(shared)) and utils.get_prim_func_name(double) == "double"

    def arch(token):
        return determine_target({"kind": "cuda", "arch": token}, return_object=True)

    of = {"volta": "sm_70", "turing": "sm_75", "ampere": "sm_80", "hopper": "sm_90", "sm120": "sm_120"}
    for name, own in of.items():
        for token in of.values():
            assert getattr(cuda, f"target_is_{name}")(arch(token)) is (own == token), (name, token)
            assert cuda.target_is_cuda(arch(token))
    has = {"async_copy": "ampere", "ldmatrix": "turing", "stmatrix": "hopper", "bulk_copy": "hopper"}
    order = list(of.values())
    for what, first in has.items():
        got = [getattr(cuda, f"target_has_{what}")(arch(t)) for t in order]
        assert got == [k >= order.index(of[first]) for k in range(5)], what
    assert nvcc.get_target_compute_version(arch("sm_90a")) == "9.0" and nvcc.get_target_arch("9.0") == "90"
    since = {"fp16": ("5.3", "5.2"), "int8": ("6.1", "6.0"), "tensorcore": ("7.0", "6.1"), "bf16": ("8.0", "7.5"),
             "fp8": ("8.9", "8.6")}
    for what, (yes, no) in since.items():
        assert getattr(nvcc, f"have_{what}")(yes) and not getattr(nvcc, f"have_{what}")(no), what
    for what, no in (("tma", "sm_80"), ("pdl", "sm_80"), ("mbarrier", "sm_75")):
        assert getattr(nvcc, f"have_{what}")(arch("sm_90")) and not getattr(nvcc, f"have_{what}")(arch(no)), what
    assert nvcc.is_hopper(arch("sm_90a")) and not nvcc.is_hopper(arch("sm_100"))


@pytest.mark.spec("R3:JITKernel")
def test_other_ways_to_a_kernel():
    kernel = tilelang.JITKernel.from_tilelang_function(double, out_idx=[1], target="cpu")
    x = np.ones(64, np.float32)
    assert kernel(x)[0] == kernel.torch_function(x)[0] == 2
    a, b = kernel.params
    assert a.torch_dtype() == torch.float32 and a.tilelang_dtype() == "float32" and not b.is_scalar()
    assert not (a.is_unsigned() or a.is_float8() or a.is_float4() or a.is_boolean())
    for write in (kernel.export_ptx, kernel.export_sass):
        with pytest.raises(ValueError):
            write("")


def test_the_driver_without_a_device():
    from tilelang.carver.arch import driver

    if driver.get_cuda_device_properties() is not None:
        assert driver.get_num_sms() > 0
        return
    for name in ("num_sms", "device_name", "shared_memory_per_block", "max_dynamic_shared_size_bytes", "registers_per_block",
                 "persisting_l2_cache_max_size"):
        with pytest.raises(RuntimeError, match="Failed to get device properties"):
            getattr(driver, f"get_{name}")()
    with pytest.raises(RuntimeError, match="Failed to get device properties"):
        driver.get_device_attribute(1)
