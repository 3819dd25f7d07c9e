"""The tuner on the CPU target and the tile meaning: choice, memo, skipping, checks, failures, time limit."""

import time

import numpy as np
import pytest

import tilelang
import tilelang.language as T
from tilelang.autotuner import AutoTuner, autotune, get_autotune_inputs, set_autotune_inputs
from tilelang.autotuner.tuner import CandidateTimeout, guarded, tune
from tilelang.env import env

torch = pytest.importorskip("torch")


@pytest.fixture(autouse=True)
def fresh(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # tuning writes its log there
    with env.using(TILELANG_CACHE_DIR=str(tmp_path)):
        yield


def program(n, blk, wrong=False):
    @T.prim_func
    def main(A: T.Tensor((n,), "float32"), B: T.Tensor((n,), "float32")):
        with T.Kernel(T.ceildiv(n, blk), threads=32) as bx:
            for i in T.Parallel(blk):
                B[bx * blk + i] = A[bx * blk + i] * (3.0 if wrong else 2.0)

    return main


def tuned(configs, **kwargs):
    @autotune(configs=configs, warmup=1, rep=2, **kwargs)
    @tilelang.jit(out_idx=[-1], target="cpu")
    def scale(n, blk=16, wrong=False):
        return program(n, blk, wrong)

    return scale


def test_the_best_kernel_is_returned_and_remembered():
    scale = tuned([{"blk": 16}, {"blk": 64}])
    kernel = scale(256)
    assert kernel.config in ({"blk": 16}, {"blk": 64}) and kernel.latency > 0
    assert scale(256) is kernel and scale.compile(n=256) is kernel and scale(128) is not kernel
    assert kernel.get_tuner_result()[1] == kernel.config
    assert (kernel(np.ones(256, np.float32)) == 2).all()


def test_candidates_that_fail_or_mismatch_are_skipped():
    scale = tuned([{"blk": 16, "wrong": True}, {"blk": 0}, {"blk": 32}], ref_prog=lambda a: a * 2)
    kernel = scale(256)
    assert kernel.config == {"blk": 32} and kernel.ref_latency > 0
    with pytest.raises(RuntimeError, match="Auto-tuning failed: No configuration successfully compiled"):
        tuned([{"wrong": True}], ref_prog=lambda a: a * 2)(256)


def test_explicit_parameters_skip_tuning():
    scale = tuned([{"blk": 16}, {"blk": 64}])
    assert scale(256, blk=8).latency is None and scale(256, 8) is scale(256, blk=8)


@pytest.mark.spec("must:R7-keys")
def test_configs_are_checked_and_may_be_computed():
    with pytest.raises(ValueError, match="Unused keys in config: bogus"):
        tuned([{"bogus": 1}])(16)
    with pytest.raises(ValueError, match="No configurations to tune"):
        tuned([])(16)
    assert tuned(lambda n: [{"blk": n // 2}])(64).config == {"blk": 32}
    with pytest.raises(TypeError):
        autotune(program)
    with pytest.raises(AssertionError):
        autotune(configs=[])(program)
    with pytest.raises(ValueError, match="at least 1"):
        tuned([{"blk": 16}], early_stop_factor=0.5)(16)
    kernel = tuned([{"pass_configs": {"tl.enable_fast_math": True}}])(16)
    assert kernel.pass_configs == {"tl.enable_fast_math": True}


def test_results_are_kept_on_disk(monkeypatch):
    first = tuned([{"blk": 16}, {"blk": 64}])(256)
    from tilelang.autotuner import tuner

    monkeypatch.setattr(tuner.Measurement, "prepare", lambda *_: pytest.fail("measured again"))
    again = tuned([{"blk": 16}, {"blk": 64}])(256)
    assert again.config == first.config and again.latency == first.latency


def test_eager_functions_run_the_best():
    @autotune(configs=[{"blk": 16}, {"blk": 32}], warmup=1, rep=1)
    @tilelang.jit(target="cpu")
    def double(A, blk: int = 8):
        N = T.const("N")
        A: T.Tensor((N,), "float32")
        B = T.empty((N,), "float32")
        with T.Kernel(T.ceildiv(N, blk), threads=32) as bx:
            for i in T.Parallel(blk):
                B[bx * blk + i] = A[bx * blk + i] * 2.0
        return B

    a = torch.randn(100)
    assert torch.equal(double(a), 2 * a) and double.compile(a).config in ({"blk": 16}, {"blk": 32})


def test_inputs_can_be_given():
    a = torch.ones(64)
    with set_autotune_inputs([a]):
        assert get_autotune_inputs()[0] is not a
        assert tuned([{"blk": 16}])(64).latency > 0
    assert get_autotune_inputs() is None

    def with_scalar(n, blk=16):
        @T.prim_func
        def main(A: T.Tensor((n,), "float32"), x: T.float32):
            with T.Kernel(T.ceildiv(n, blk), threads=32) as bx:
                for i in T.Parallel(blk):
                    A[bx * blk + i] = x

        return main

    tuner = AutoTuner.from_kernel(with_scalar, [{"n": 64, "blk": 8}]).set_compile_args(target="cpu")
    tuner.set_profile_args(warmup=1, rep=1)
    with pytest.raises(ValueError, match="set_autotune_inputs"):
        tuner.run()
    with set_autotune_inputs(a, 2.0):
        assert tuner.run().config == {"n": 64, "blk": 8}


def test_results_can_be_saved_and_loaded(tmp_path):
    def make(blk):
        return program(64, blk)

    tuner = AutoTuner(make, [{"blk": 16}]).set_compile_args(out_idx=[-1], target="cpu").set_profile_args(1, 1)
    result = tuner()
    result.save_to_disk(tmp_path / "r")
    from tilelang.autotuner.param import AutotuneResult

    loaded = AutotuneResult.load_from_disk(tmp_path / "r", tuner.compile_args)
    assert loaded.config == {"blk": 16} and (loaded.kernel(np.ones(64, np.float32)) == 2).all()
    with pytest.raises(ValueError, match="holds no tuning result"):
        AutotuneResult.load_from_disk(tmp_path, tuner.compile_args)
    values = [1]
    with pytest.raises(AssertionError, match="not serializable"):
        AutoTuner(lambda blk: program(values[0], blk), [{"blk": 1}]).run()


def test_a_hanging_candidate_costs_only_itself():
    with pytest.raises(CandidateTimeout):
        guarded(lambda: time.sleep(5), 0.05)
    with pytest.raises(ZeroDivisionError):
        guarded(lambda: 1 // 0, 5)
    from tilelang.autotuner.param import ProfileArgs

    def compile_one(config):
        if config["blk"] == 1:
            time.sleep(5)
        return tilelang.compile(program(64, config["blk"]), out_idx=[1], target="cpu")

    result = tune([{"blk": 1}, {"blk": 32}], compile_one, ProfileArgs(1, 1, timeout=2))
    assert result.config == {"blk": 32} and list(result.failures) == ["{'blk': 1}"]


def test_tensors_of_the_caller_are_measured_on_as_copies():
    @autotune(configs=iter([{"blk": 16}, {"blk": 32}]), warmup=1, rep=2,
              ref_prog=lambda a: [a.add_(1.0)][:0])
    @tilelang.jit
    def bump(A, blk=8):
        N, M = T.const("N M")
        s = T.dynamic("s")
        A: T.StridedTensor((N, M), (s, 1), "float32")
        with T.Kernel(T.ceildiv(N, blk), threads=32) as bx:
            for i, j in T.Parallel(blk, M):
                A[bx * blk + i, j] = A[bx * blk + i, j] + 1.0

    for n in 32, 64:  # the configurations of an iterator serve every call
        a = torch.zeros(n, 8)[:, :4]
        bump(a)
        assert (a == 1).all()
        with set_autotune_inputs(torch.zeros(n, 4)):
            bump.compile(torch.zeros(n, 4))
            assert (get_autotune_inputs()[0] == 0).all()


def test_what_is_no_parameter_is_refused_and_methods_are_tuned():
    with pytest.raises(ValueError, match="do_not_specialize names size, no parameter of `scale`"):
        tuned([{"blk": 16}], do_not_specialize=["size"])

    class Layer:
        factor = 16

        @autotune(configs=lambda self, n: [{"blk": self.factor}], warmup=1, rep=1)
        @tilelang.jit(out_idx=[-1], target="cpu")
        def scale(self, n, blk=8):
            return program(n, blk)

    layer = Layer()
    assert layer.scale(64).config == {"blk": 16} and "autotune" in repr(Layer.scale)
    layer.factor = 32
    assert layer.scale(64).config == {"blk": 32}
