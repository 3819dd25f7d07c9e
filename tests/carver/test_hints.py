"""Hints of the carver fit their architecture, and programs tiled by them are right."""

from math import prod

import numpy as np
import pytest

import tilelang
from tilelang.carver import (
    ConvTemplate,
    ElementwiseTemplate,
    FlashAttentionTemplate,
    GEMVTemplate,
    GeneralReductionTemplate,
    MatmulTemplate,
)
from tilelang.carver.arch import CUDA
from tilelang.carver.roller import DefaultPolicy, Hint, NoRasterization, TensorCorePolicy
from tilelang.carver.utils import get_roller_hints_from_func
from tilelang.tools import Analyzer

ARCHS = {a: CUDA({"kind": "cuda", "arch": a}) for a in ("sm_75", "sm_80", "sm_89", "sm_90a")}
CASES = [MatmulTemplate(1024, 1024, 1024), MatmulTemplate(100, 36, 72, trans_B=False, accum_dtype="float32"),
         MatmulTemplate(16384, 16384, 8192, in_dtype="bfloat16", out_dtype="bfloat16", accum_dtype="float32"),
         MatmulTemplate(256, 256, 256, in_dtype="float32", out_dtype="float32", accum_dtype="float32"),
         GEMVTemplate(1024, 1024), GEMVTemplate(300, 77, trans_B=False), ElementwiseTemplate((64, 1000)),
         GeneralReductionTemplate("SSR", (8, 16, 1024)), GeneralReductionTemplate("RS", (1000, 24), "float32"),
         FlashAttentionTemplate(2, 4, 64, 1024, 1024, False, accum_dtype="float32"),
         ConvTemplate(2, 64, 28, 28, 128, 3, 1, 1, 1, accum_dtype="float32")]


@pytest.mark.spec("R14:templates")
@pytest.mark.parametrize("arch", ARCHS.values(), ids=str)
def test_hints_fit_the_limits_of_the_architecture(arch):
    for template in CASES:
        hints = template.with_arch(arch).recommend_hints(topk=12)
        if isinstance(template, FlashAttentionTemplate) or "bfloat16" not in str(template.params_as_dict()):
            assert hints, template
        assert len(hints) <= 12 and len({repr(h) for h in hints}) == len(hints)
        for h in hints:
            assert h.smem_bytes <= arch.smem_cap and h.registers <= 255 and h.registers * h.threads <= arch.reg_cap
            assert 32 <= h.threads <= 1024 and h.threads % 32 == 0 and h.arch is arch
            if h.use_tc:
                m, n, k = h.intrin_info.micro_size
                assert h.warp[0] % m == 0 and h.warp[1] % n == 0 and h.rstep[0] % k == 0
                assert prod(h.block) // prod(h.warp) * 32 == h.threads and not h.thread
            else:
                assert not h.warp and prod(h.thread) * prod(h.reduce_thread) == h.threads
            assert h.use_async == (h.pipeline_stage > 1 and arch.sm_version >= 80) and len(h.step) == len(h.block)


@pytest.mark.spec("R14:templates")
def test_shared_memory_is_counted_as_staged():
    for h in MatmulTemplate(4096, 4096, 4096).with_arch(ARCHS["sm_80"]).recommend_hints(20):
        assert h.smem_bytes == h.pipeline_stage * sum(h.block) * h.rstep[0] * 2
        assert sum(h.block) >= 192 and prod(h.block) // prod(h.warp) >= 4, "large products want large tiles"


@pytest.mark.spec("R14:Hint")
def test_hints_as_values():
    h = MatmulTemplate(16384, 16384, 16384).with_arch(ARCHS["sm_80"]).recommend_hints(1)[0]
    again = Hint.from_dict(h.to_dict())
    assert again.to_dict() == h.to_dict() and repr(h) == str(h.to_dict()) and again.threads == h.threads
    assert h.rasterization_plan is not NoRasterization and "use_swizzle" in h.rasterization_plan.get_code()[0]
    small = MatmulTemplate(256, 256, 256).with_arch(ARCHS["sm_80"]).recommend_hints(1)[0]
    assert small.rasterization_plan is NoRasterization and isinstance(NoRasterization(), NoRasterization)
    assert Hint(block=[4, 8]).step == [1, 1] and Hint(rstep=[2]).raxis_order == [0] and Hint().split_k_factor == 1
    with pytest.raises(ValueError, match="no entry of a Hint"):
        Hint.from_dict({"blocks": 1})


def compiled(program):
    return tilelang.compile(program, target="cpu", out_idx=[-1])


def pick(hints):
    return [hints[0], hints[len(hints) // 2], hints[-1]]


rng = np.random.default_rng(5)


def half(*shape):
    return (rng.integers(-4, 5, shape) / 4).astype(np.float16)


@pytest.mark.spec("R14:templates")
@pytest.mark.parametrize("ta,tb", [(False, True), (False, False), (True, False)])
def test_products_tiled_by_hints_are_right(ta, tb):
    t = MatmulTemplate(100, 72, 80, ta, tb, accum_dtype="float32", out_dtype="float32").with_arch(ARCHS["sm_80"])
    a, b = half(100, 80), half(80, 72)
    for h in pick(t.recommend_hints(20)):
        out = compiled(t.program(h))(np.ascontiguousarray(a.T) if ta else a, np.ascontiguousarray(b.T) if tb else b)
        np.testing.assert_allclose(out, a.astype(np.float32) @ b.astype(np.float32), rtol=1e-5, atol=1e-4)


@pytest.mark.spec("R14:templates")
def test_products_with_bias_and_without_matrix_units():
    t = MatmulTemplate(64, 48, 32, in_dtype="float32", out_dtype="float32", accum_dtype="float32", with_bias=True)
    t.with_arch(ARCHS["sm_80"])
    a, b, c = (rng.random(s, np.float32) for s in ((64, 32), (48, 32), (48,)))
    for h in pick(t.recommend_hints(20)):
        assert not h.use_tc
        np.testing.assert_allclose(compiled(t.program(h))(a, b, c), a @ b.T + c, rtol=1e-5)


@pytest.mark.spec("R14:templates")
@pytest.mark.parametrize("trans", [True, False])
def test_matrix_vector_products(trans):
    t = GEMVTemplate(50, 96, trans, out_dtype="float32", accum_dtype="float32", with_bias=True).with_arch(ARCHS["sm_80"])
    a, b, bias = half(1, 96), half(96, 50), rng.random(50, np.float32)
    want = a.astype(np.float32) @ b.astype(np.float32) + bias
    for h in pick(t.recommend_hints(20)):
        assert h.reduce_thread and not h.use_tc
        out = compiled(t.program(h))(a, np.ascontiguousarray(b.T) if trans else b, bias)
        np.testing.assert_allclose(out, want, rtol=1e-5, atol=1e-5)


@pytest.mark.spec("R14:templates")
def test_elementwise_and_reductions():
    x = rng.random((3, 5, 70), np.float32)
    t = ElementwiseTemplate(x.shape, "float32").with_arch(ARCHS["sm_80"])
    for h in pick(t.recommend_hints(20)):
        np.testing.assert_array_equal(compiled(t.program(h))(x), x + 1)
    for structure, axes in (("SSR", 2), ("SRS", 1), ("RSR", (0, 2)), ("RSS", 0), ("RRR", (0, 1, 2)), ("SSS", ())):
        t = GeneralReductionTemplate(structure, x.shape, "float32").with_arch(ARCHS["sm_80"])
        for h in pick(t.recommend_hints(20)):
            want = np.atleast_1d(x.sum(axis=axes)) if axes != () else x + 1  # without an axis: a map, as above
            np.testing.assert_allclose(compiled(t.program(h))(x), want, rtol=1e-4)


@pytest.mark.spec("R14:templates")
@pytest.mark.parametrize("causal", [False, True])
def test_attention_tiled_by_hints(causal):
    t = FlashAttentionTemplate(1, 2, 32, 70, 90, causal, out_dtype="float32", accum_dtype="float32")
    t.with_arch(ARCHS["sm_80"])
    q, k, v = half(2, 70, 32), half(2, 90, 32), half(2, 90, 32)
    s = q.astype(np.float64) @ k.astype(np.float64).transpose(0, 2, 1) / np.sqrt(32)
    if causal:
        s = np.where(np.arange(90)[None, :] <= np.arange(70)[:, None] + 20, s, -np.inf)
    p = np.exp(s - s.max(-1, keepdims=True))
    want = p / p.sum(-1, keepdims=True) @ v
    for h in pick(t.recommend_hints(20)):
        np.testing.assert_allclose(compiled(t.program(h))(q, k, v), want, atol=3e-3)


@pytest.mark.spec("R14:templates")
def test_convolution_tiled_by_hints():
    t = ConvTemplate(2, 5, 9, 8, 20, 3, 2, 1, 1, out_dtype="float32", accum_dtype="float32").with_arch(ARCHS["sm_80"])
    x, w = half(2, 9, 8, 5), half(3, 3, 5, 20)
    padded = np.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0))).astype(np.float32)
    want = np.zeros((2, 5, 4, 20), np.float32)
    for i in range(3):
        for j in range(3):
            want += padded[:, i:i + 9:2, j:j + 8:2] @ w[i, j].astype(np.float32)
    for h in pick(t.recommend_hints(20)):
        np.testing.assert_allclose(compiled(t.program(h))(x, w), want, rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="does not fit"):
        ConvTemplate(1, 1, 2, 2, 1, 5).work  # noqa: B018


@pytest.mark.spec("R14:templates")
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_first_hints_lower_for_their_architecture(arch):
    for t in (MatmulTemplate(1024, 1024, 1024, accum_dtype="float32"), GEMVTemplate(1024, 1024, accum_dtype="float32"),
              GeneralReductionTemplate("SSR", (8, 16, 1024)),
              FlashAttentionTemplate(1, 4, 64, 512, 512, False, accum_dtype="float32")):
        t.with_arch(ARCHS[arch])
        for h in t.recommend_hints(2):
            source = tilelang.lower(t.program(h), target={"kind": "cuda", "arch": arch}).kernel_source
            assert f"__launch_bounds__({h.threads}" in source or arch == "sm_90a"


@pytest.mark.spec("R14:roller")
def test_policies_and_functions():
    arch = ARCHS["sm_80"]
    t = MatmulTemplate(512, 512, 512).with_arch(arch)
    func, first = t.equivalent_function(), t.recommend_hints(3)
    assert [h.to_dict() for h in get_roller_hints_from_func(func, arch, 3)] == [h.to_dict() for h in first]
    assert [h.to_dict() for h in TensorCorePolicy.from_prim_func(func, arch).emit_config(3)] == [h.to_dict() for h in first]
    assert list(map(repr, TensorCorePolicy.from_output_nodes(t.output_nodes, arch).emit_config(3))) == list(map(repr, first))
    assert DefaultPolicy.from_prim_func(func, arch).emit_config(2)[0].thread
    plain = MatmulTemplate(64, 64, 64, in_dtype="float32", out_dtype="float32", accum_dtype="float32").with_arch(arch)
    assert get_roller_hints_from_func(plain.equivalent_function(), arch, 3, tensorcore_only=True) is None
    assert t.params_as_dict()["M"] == 512 and t.class_attributes["trans_B"]
    with pytest.raises(ValueError, match="carver template makes"):
        get_roller_hints_from_func(object(), arch)
    for bad in (lambda: MatmulTemplate(0, 4, 4), lambda: GeneralReductionTemplate("SX", (1, 2)),
                lambda: GeneralReductionTemplate("SR", (1, 2, 3))):
        with pytest.raises(ValueError):
            bad()


@pytest.mark.spec("R14:arch")
def test_questions_about_architectures():
    from tilelang.carver import arch

    by = {a: arch.get_arch({"kind": "cuda", "arch": a}) for a in ("sm_70", "sm_75", "sm_80", "sm_86", "sm_89", "sm_90a")}
    assert [a for a, x in by.items() if arch.is_ampere_arch(x)] == ["sm_80", "sm_86"]
    assert arch.is_volta_arch(by["sm_70"]) and arch.is_ada_arch(by["sm_89"]) and arch.is_hopper_arch(by["sm_90a"])
    assert all(arch.is_cuda_arch(x) and isinstance(x, arch.TileDevice) for x in by.values())
    assert [a for a, x in by.items() if arch.has_mma_support(x)] == ["sm_80", "sm_86", "sm_89", "sm_90a"]
    cases = {("float16", "float16"): "sm_70", ("int8", "int32"): "sm_75", ("bfloat16", "float32"): "sm_80",
             ("float8_e4m3", "float32"): "sm_89"}
    for (a, c), first in cases.items():
        assert next(n for n, x in by.items() if arch.is_tensorcore_supported_precision(a, c, x)) == first
    assert not any(arch.is_tensorcore_supported_precision("float32", "float32", x) for x in by.values())
    cpu = arch.get_arch("cpu")
    assert isinstance(cpu, arch.CPU) and cpu.compute_max_core >= 1 and not arch.is_cuda_arch(cpu)
    assert not arch.is_cdna_arch(cpu) and not arch.is_rdna_arch(cpu) and cpu.get_avaliable_tensorintrin_shapes() == []
    assert any("m16n8k16" in n for n in by["sm_80"].available_tensor_instructions)
    assert arch.check_sm_version("sm_80") == 80 and arch.check_sm_version("sm_90a") == 90
    assert arch.check_sm_version("80") == -1
    with tilelang.tvm.target.Target({"kind": "cuda", "arch": "sm_89"}):
        assert arch.auto_infer_current_arch().sm_version == 89
        assert MatmulTemplate(64, 64, 64).arch.sm_version == 89
    for name in ("RDNA", "METAL"):
        with pytest.raises(NotImplementedError, match="not available"):
            getattr(arch, name)()
    with pytest.raises(NotImplementedError, match="not available"):
        ConvTemplate(1, 8, 8, 8, 8, 3, P=1, with_bias=True).with_arch(by["sm_80"]).equivalent_function()


@pytest.mark.spec("R14:roller")
def test_strides_of_staged_tensors():
    from tilelang.carver.roller.hint import IntrinInfo, Stride, TensorCoreExtraConfig, TileDict
    from tilelang.carver.utils import get_rasterization_code, get_tensorized_func_and_tags, retrieve_func_from_module

    assert Stride().compute_strides_from_shape([4, 8]) == [8, 1] and Stride().compute_elements_from_shape([4, 8]) == 32
    assert Stride(12, 0).compute_strides_from_shape([4, 8]) == [12, 1] and Stride(12, 0).is_valid()
    assert TileDict((4, 8)).output_tile == (4, 8) and TensorCoreExtraConfig().tc_axis == ()
    assert IntrinInfo("float16", "float32", True).trans_b and "panel_size=8" in get_rasterization_code()
    func = MatmulTemplate(64, 64, 64).with_arch(ARCHS["sm_80"]).equivalent_function()
    same, tags = get_tensorized_func_and_tags(func, {"kind": "cuda", "arch": "sm_80"})
    assert same is func and tags["intrin_info"].micro_size == (16, 8, 16)
    assert retrieve_func_from_module(tilelang.tvm.IRModule.from_expr(func)) is func


@pytest.mark.spec("R14:arch", "S:amd-tools")
@pytest.mark.parametrize("chip, units, shared", [("gfx90a", 104, 64), ("gfx942", 304, 64), ("gfx950", 256, 160)])
def test_architectures_of_amd(chip, units, shared):
    from tilelang.carver import arch

    amd = arch.get_arch({"kind": "hip", "mcpu": chip})
    assert isinstance(amd, arch.CDNA) and arch.is_cdna_arch(amd)
    assert not arch.is_cuda_arch(amd) and not arch.has_mma_support(amd)
    assert (amd.compute_max_core, amd.smem_cap, amd.warp_size, amd.reg_cap) == (units, shared << 10, 64, 131072)
    assert amd.tensor_rate == pytest.approx({"gfx90a": 512, "gfx942": 1024, "gfx950": 2048}[chip], rel=0.01)
    assert any("mfma.16x16x" in n for n in amd.available_tensor_instructions) and amd.get_avaliable_tensorintrin_shapes()
    assert [t for t in ("float16", "float8_e4m3", "float8_e4m3fnuz", "float32") if arch.is_tensorcore_supported_precision(
        t, "float32", amd)] == ["float16", *{"gfx942": ["float8_e4m3fnuz"], "gfx950": ["float8_e4m3"]}.get(chip, []), "float32"]
    assert arch.CDNA().target.arch == "gfx942"
    with pytest.raises(ValueError, match="carver.arch.CDNA describes CDNA targets"):
        arch.CDNA("cpu")
    func = MatmulTemplate(64, 64, 64).with_arch(amd).equivalent_function()
    assert Analyzer.analysis(func, amd).expected_tflops == {"gfx90a": 181, "gfx942": 1307, "gfx950": 2307}[chip]
    single = {"accum_dtype": "float32"}  # MFMA has no accumulators of float16
    for template in (MatmulTemplate(4096, 4096, 4096, **single), FlashAttentionTemplate(1, 16, 128, 4096, **single)):
        hints = template.with_arch(amd).recommend_hints(5)
        assert len(hints) == 5 and all(h.smem_bytes <= shared << 10 and h.threads % 64 == 0 for h in hints)
