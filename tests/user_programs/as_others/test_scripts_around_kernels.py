"""What scripts do around a kernel, on the CPU: tuning, profiling, caching, compiling in parallel, looking at sources."""

import itertools
import logging

import numpy as np
import pytest

import tilelang
import tilelang.language as T
from tilelang import tvm
from tilelang.autotuner import AutoTuner, autotune, set_autotune_inputs
from tilelang.profiler import do_bench


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TILELANG_DEFAULT_TARGET", "cpu")
    tilelang.set_log_level(logging.ERROR)
    yield
    tilelang.set_log_level(logging.INFO)


def tile_configs(M, N, K, with_roller=False):
    """All combinations of a few tile sizes, as a list of dictionaries."""
    keys = ("block_M", "block_N", "num_stages")
    return [dict(zip(keys, values)) for values in itertools.product([32, 64], [32], [0, 2])]


def matmul_program(M, N, K, block_M=64, block_N=64, num_stages=2, dtype="float16"):
    @T.prim_func
    def main(A: T.Tensor((M, K), dtype), B: T.Tensor((K, N), dtype), C: T.Tensor((M, N), dtype)):
        with T.Kernel(T.ceildiv(N, block_N), T.ceildiv(M, block_M), threads=128) as (bx, by):
            a = T.alloc_shared((block_M, 32), dtype)
            b = T.alloc_shared((32, block_N), dtype)
            c = T.alloc_fragment((block_M, block_N), "float")
            T.clear(c)
            for k in T.Pipelined(T.ceildiv(K, 32), num_stages=num_stages):
                T.copy(A[by * block_M, k * 32], a)
                T.copy(B[k * 32, bx * block_N], b)
                T.gemm(a, b, c)
            T.copy(c, C[by * block_M, bx * block_N])

    return main


@pytest.fixture
def operands():
    g = np.random.default_rng(1)
    return g.uniform(-1, 1, (64, 96)).astype(np.float16), g.uniform(-1, 1, (96, 64)).astype(np.float16)


def check(result, a, b):
    expected = a.astype(np.float64) @ b.astype(np.float64)
    assert np.all(np.abs(np.asarray(result) - expected) <= 2.0**-10 * np.abs(expected) + 96 * 2.0**-23 * 96)


def test_stacked_autotune_takes_a_function_of_configurations(operands):
    @autotune(configs=tile_configs, warmup=1, rep=1)
    @tilelang.jit(out_idx=[-1])
    def matmul(M, N, K, block_M=64, block_N=64, num_stages=2):
        return matmul_program(M, N, K, block_M, block_N, num_stages)

    with set_autotune_inputs(*operands):
        kernel = matmul(64, 64, 96)
    check(kernel(*operands), *operands)
    assert kernel.config in tile_configs(64, 64, 96) and kernel.latency > 0


def test_configurations_with_pass_configs_of_their_own(operands):
    configs = [
        {"block_M": 32, "pass_configs": {tilelang.PassConfigKey.TL_DISABLE_WARP_SPECIALIZED: True}},
        {"block_M": 64, "pass_configs": {"tl.disable_warp_specialized": False}},
    ]

    @tilelang.autotune(configs=configs, warmup=1, rep=1)
    @tilelang.jit
    def matmul(A, B, block_M: int = 32):
        M, N, K = T.const("M N K")
        A: T.Tensor((M, K), "float16")
        B: T.Tensor((K, N), "float16")
        C = T.empty((M, N), "float16")
        with T.Kernel(T.ceildiv(N, 32), T.ceildiv(M, block_M), threads=128) as (bx, by):
            a = T.alloc_shared((block_M, 32), "float16")
            b = T.alloc_shared((32, 32), "float16")
            c = T.alloc_fragment((block_M, 32), "float32")
            T.clear(c)
            for k in T.Pipelined(T.ceildiv(K, 32), num_stages=2):
                T.copy(A[by * block_M, k * 32], a)
                T.copy(B[k * 32, bx * 32], b)
                T.gemm(a, b, c)
            T.copy(c, C[by * block_M, bx * 32])
        return C

    check(matmul(*operands), *operands)
    check(matmul.compile(M=64, N=64, K=96)(*operands), *operands)


def test_a_tuner_from_a_function_and_its_result(operands):
    tuner = AutoTuner.from_kernel(kernel=lambda block_M=64, num_stages=1: matmul_program(64, 64, 96, block_M, 64, num_stages),
                                  configs=[{"block_M": 32, "num_stages": 0}, {"block_M": 64, "num_stages": 2}])  # fmt: skip
    tuner.set_compile_args(out_idx=[-1], target="cpu").set_profile_args(
        supply_type=tilelang.TensorSupplyType.Integer, warmup=1, rep=1
    )
    result = tuner.run(warmup=1, rep=1)
    assert set(result.config) == {"block_M", "num_stages"}
    check(result.kernel(*operands), *operands)


def test_one_decorator_of_2025_that_compiles_and_tunes(operands):
    from tilelang.autotuner import jit as tuned_jit

    @autotune(configs=[{"block_M": 32}, {"block_M": 64}], warmup=1, rep=1)
    @tuned_jit(out_idx=[2])
    def kernel(block_M=None):
        return matmul_program(64, 64, 96, block_M)

    best = kernel()
    check((best.kernel if hasattr(best, "kernel") else best)(*operands), *operands)


def test_cached_of_the_profiler(operands):
    from tilelang.profiler import cached

    check(cached(matmul_program, [2], 64, 64, 96)(*operands), *operands)


def test_profiler_compares_and_measures(operands):
    kernel = tilelang.compile(matmul_program(64, 64, 96), out_idx=-1, target="cpu")
    profiler = kernel.get_profiler(tensor_supply_type=tilelang.TensorSupplyType.Normal)
    assert profiler.do_bench(warmup=1, rep=1) > 0
    assert do_bench(lambda: kernel(*operands), warmup=1, rep=1, return_mode="median") > 0
    torch = pytest.importorskip("torch")
    profiler.assert_allclose(lambda a, b: (a.float() @ b.float()).to(torch.float16), rtol=1e-2, atol=1e-2)


def test_kernels_compiled_in_parallel_and_their_sources(operands, tmp_path):
    programs = [matmul_program(64, 64, 96, m) for m in (32, 64)]
    for kernel in tilelang.par_compile(programs, out_idx=[-1], target="cpu", num_workers=2):
        check(kernel(*operands), *operands)
    target = tvm.target.Target({"kind": "cuda", "arch": "sm_90a"})
    with tvm.transform.PassContext(config={"tl.disable_warp_specialized": True}), target:
        artifact = tilelang.lower(programs[0], target=target)
    assert "main_kernel" in artifact.kernel_source
    kernel = tilelang.compile(programs[0], out_idx=[-1], target=target)
    kernel.export_sources(kernel_path=str(tmp_path / "kernel.cu"))
    assert "__global__" in (tmp_path / "kernel.cu").read_text()


def test_a_factory_kept_by_arguments_and_its_kernel_by_configuration():
    class Operator:
        """An operator class of a library: one factory for the problem, one kernel for each configuration."""

        def __init__(self, n, dtype="float32"):
            self.n, self.dtype, self.kernels = n, dtype, {}
            self.factory = self.make(n, dtype)

        @staticmethod
        def make(n, dtype):
            @tilelang.jit(out_idx=[1], compile_flags=["-O3", "-DENABLE_BF16"])
            def scale(threads, factor=2.0):
                @T.prim_func
                def main(x: T.Tensor((n,), dtype), y: T.Tensor((n,), dtype)):
                    with T.Kernel(T.ceildiv(n, threads), threads=threads) as b:
                        for i in T.Parallel(threads):
                            if b * threads + i < n:
                                y[b * threads + i] = x[b * threads + i] * factor

                return main

            return scale

        def __call__(self, x, threads=64, **options):
            key = (threads, *sorted(options.items()))
            if key not in self.kernels:
                self.kernels[key] = self.factory(threads, **options)
            return self.kernels[key](x)

    op = Operator(100)
    x = np.arange(100, dtype=np.float32)
    assert np.array_equal(op(x), 2 * x) and np.array_equal(op(x, 32, factor=3.0), 3 * x)
    assert op.factory(64) is op.kernels[(64,)] and len(op.kernels) == 2


def test_hints_of_the_carver_for_products_and_reductions():
    from tilelang.carver.arch import CUDA
    from tilelang.carver.template import GeneralReductionTemplate, MatmulTemplate

    arch = CUDA({"kind": "cuda", "arch": "sm_90a"})
    matmul = MatmulTemplate(M=256, N=256, K=128, in_dtype="float16", out_dtype="float16", accum_dtype="float32").with_arch(arch)
    for hint in matmul.recommend_hints(topk=3):
        assert 256 % hint.block[0] == 0 and 256 % hint.block[1] == 0 and hint.rstep[0] > 0
    reduction = GeneralReductionTemplate(structure="SSR", shape=[64, 64, 128], dtype="float16").with_arch(arch)
    assert reduction.recommend_hints(topk=2)


def test_hints_of_a_template_without_a_reduced_axis():
    from tilelang.carver.arch import CUDA
    from tilelang.carver.template import GeneralReductionTemplate

    plain = GeneralReductionTemplate(structure="SS", shape=[64, 64], dtype="float16")
    plain = plain.with_arch(CUDA({"kind": "cuda", "arch": "sm_90a"}))
    assert all(len(hint.block) == 2 for hint in plain.recommend_hints(topk=2))
