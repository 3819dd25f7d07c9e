"""Names of 2025 scripts: autotuner.jit, profiler.cached, utils.target, quantize, jit.adapter.base."""

import numpy as np
import pytest

import tilelang
import tilelang.language as T


def double(n, block=32):
    @T.prim_func
    def main(X: T.Tensor((n,), "float32"), Y: T.Tensor((n,), "float32")):
        with T.Kernel(T.ceildiv(n, block), threads=block) as bx:
            for i in T.Parallel(block):
                Y[bx * block + i] = X[bx * block + i] * 2

    return main


def test_a_result_of_a_measured_jit_was_no_triple(monkeypatch, tmp_path):
    from tilelang.autotuner import autotune, jit

    monkeypatch.chdir(tmp_path)

    @autotune(configs=[{"block": 32}, {"block": 64}], keys=["n"], warmup=1, rep=2)
    @jit(out_idx=[1], supply_type=tilelang.TensorSupplyType.Integer, ref_prog=lambda x: x * 2, skip_check=False,
         profiler="auto", target="cpu")
    def kernel(n, block=None):
        return double(n, block)

    result = kernel(100)
    latency, config, ref_latency = result
    assert latency > 0 and ref_latency > 0 and config in ({"block": 32}, {"block": 64})
    assert result.config == config and result.kernel.config == config
    x = np.arange(100, dtype=np.float32)
    assert (np.from_dlpack(result(x)) == 2 * x).all()


def test_cached_did_not_call_a_factory():
    from tilelang.profiler import cached

    kernel = cached(double, [1], 64, 16, target="cpu")
    x = np.arange(64, dtype=np.float32)
    assert (np.from_dlpack(kernel(x)) == 2 * x).all()
    from tilelang.jit.adapter.base import BaseKernelAdapter

    assert isinstance(kernel.adapter, BaseKernelAdapter)


def test_targets_by_their_older_path():
    from tilelang.utils.target import AVALIABLE_TARGETS, check_cuda_availability, determine_target, target_is_hopper

    assert str(determine_target("cpu")) == "cpu" and "cuda" in AVALIABLE_TARGETS
    assert target_is_hopper({"kind": "cuda", "arch": "sm_90a"}) and check_cuda_availability() in (True, False)


@pytest.mark.parametrize("name, wanted", [("_tir_packed_to_unsigned_convert", lambda q: q),
                                          ("_tir_packed_to_signed_convert", lambda q: q - 8),
                                          ("_tir_packed_int_to_int_convert", lambda q: q - 16 * (q >= 8))])
def test_fields_of_packed_weights(name, wanted):
    import tilelang.quantize

    convert = getattr(tilelang.quantize, name)("uint", 8)

    @T.prim_func
    def unpack(P: T.Tensor((64,), "uint8"), Y: T.Tensor((128,), "float16")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(128):
                Y[i] = convert(4, P[i // 2], i % 2, "float16")

    kernel = tilelang.compile(unpack, [1], target="cpu")
    packed = np.random.default_rng(4).integers(0, 256, 64, dtype=np.uint8)
    fields = np.stack([packed & 15, packed >> 4], axis=1).reshape(-1).astype(int)
    assert (np.from_dlpack(kernel(packed)) == wanted(fields)).all()


def test_fast_math_off_by_its_older_key():
    key = tilelang.PassConfigKey.TL_DISABLE_FAST_MATH
    with pytest.warns(DeprecationWarning, match="tl.disable_fast_math"):
        tilelang.compile(double(64), target="cpu", pass_configs={key: True})
    with pytest.warns(DeprecationWarning), pytest.raises(ValueError, match="both set"):
        tilelang.compile(double(64), target="cpu", pass_configs={key: True, "tl.enable_fast_math": True})
