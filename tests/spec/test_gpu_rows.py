"""Rows on a GPU: programs of the other modules, called with CUDA tensors, against the tile meaning.

    pytest -n 0 -m gpu tests/spec/test_gpu_rows.py
"""

import pathlib
import subprocess
import sys

import numpy as np
import pytest
from everywhere import on_gpu, run
from test_kernel import SPELLINGS, device_source
from test_random_numbers import FAR, MRG, NEAR, OF_CURAND, THREADS, XORWOW, words, words_of
from test_raw_names import allreduce
from test_rows_calls import SMALL_FLOATS, scaled
from test_source_kernel import program as source_program
from test_sparse import compressed
from test_sparse import program as sparse
from test_tensor_core import gemm as by_emitter
from test_thread_names import exchanged
from test_wide import DTYPES, LOADS, moved

import tilelang
import tilelang.language as T
from tilelang.ir import numpy_dtype

pytestmark = pytest.mark.gpu
RNG = np.random.default_rng(99)


def same(program, *args, tol=0.0):
    for got, want in zip(on_gpu(program, *args), run(program, *args, on="tile")):
        np.testing.assert_allclose(got.astype(np.float64), want.astype(np.float64), rtol=tol, atol=tol)


@pytest.mark.spec("L14:wide-access")
@pytest.mark.parametrize("bits", LOADS)
@pytest.mark.parametrize("dtype", [d for d in DTYPES if not d.startswith("float8")])
def test_wide_accesses(bits, dtype):
    f, n = moved(bits, dtype)
    same(f, RNG.integers(0, 120, n * T.dtype(dtype).bytes).astype(np.uint8).view(numpy_dtype(dtype)))


@pytest.mark.spec("L20:rng")
def test_random_words_are_those_of_philox():
    @T.prim_func
    def f(Y: T.Tensor((THREADS, 7), "int32")):
        with T.Kernel(2, threads=THREADS // 2) as bx:
            T.rng_init(42, off=5)
            for k in T.serial(7):
                Y[bx * (THREADS // 2) + T.get_thread_binding(), k] = T.reinterpret(T.rng_rand(), "int32")

    assert on_gpu(f)[0].view(np.uint32).tolist() == [words(42, t, 5, 7) for t in range(THREADS)]


@pytest.mark.spec("L15:sync_grid", "T.sync_grid")
@pytest.mark.parametrize("grid,threads", [((4,), 40), ((1,), 64), ((3, 2), 128), ((64,), 256)])
def test_grid_barriers(grid, threads):
    for _ in range(20):
        same(exchanged(T.sync_grid, grid, threads))


@pytest.mark.spec("L6:alloc_global", "T.alloc_global")
def test_workspaces():
    @T.prim_func
    def f(X: T.Tensor((512,), "float32"), Y: T.Tensor((512,), "float32")):
        with T.Kernel(8, threads=64) as b:
            W = T.alloc_global((512,), "float32")
            t = T.get_thread_binding()
            W[b * 64 + t] = X[b * 64 + t] * 2
            T.sync_grid()
            Y[b * 64 + t] = W[511 - b * 64 - t]

    same(f, RNG.standard_normal(512).astype(np.float32))


@pytest.mark.spec("R4:scalar")
@pytest.mark.parametrize("dt", SMALL_FLOATS)
def test_scalars_of_small_types(dt):
    same(scaled(dt), 1.3, np.arange(8).astype(np.float32).astype(numpy_dtype(dt)))


@pytest.mark.spec("L11:gemm")
def test_half_sums_of_bfloat16():
    a, b = (RNG.integers(-2, 3, (64, 64)).astype(numpy_dtype("bfloat16")) for _ in range(2))

    @T.prim_func
    def f(A: T.Tensor((64, 64), "bfloat16"), B: T.Tensor((64, 64), "bfloat16"), C: T.Tensor((64, 64), "float16")):
        with T.Kernel(1, threads=128):
            As, Bs = T.alloc_shared((64, 64), "bfloat16"), T.alloc_shared((64, 64), "bfloat16")
            F = T.alloc_fragment((64, 64), "float16")
            T.copy(A, As)
            T.copy(B, Bs)
            T.gemm(As, Bs, F, clear_accum=True)
            T.copy(F, C)

    same(f, a, b)


@pytest.mark.spec("L6:alloc_shared")
@pytest.mark.parametrize("n", (1, 40, 1000, 20000))
def test_shared_memory_of_run_time_size(n):
    @T.prim_func
    def f(k: T.int32, X: T.Tensor((n,), "int32"), Y: T.Tensor((n,), "int32")):
        with T.Kernel(1, threads=64):
            S = T.alloc_shared((k,), "int32")
            for i in T.Parallel(n):
                S[i] = X[i]
            for i in T.Parallel(n):
                Y[i] = S[n - 1 - i]

    same(f, n, RNG.integers(-9, 9, n).astype(np.int32))


@pytest.mark.spec("T.tvm_thread_allreduce", "L15:raw-forms")
@pytest.mark.parametrize("threads,over", [((32, 4, 1), (0,)), ((8, 4, 1), (1,)), ((64, 2, 1), (0,)), ((5, 3, 2), (1, 2))])
def test_reductions_over_threads(threads, over):
    same(allreduce(threads, over, "sum"), RNG.integers(-99, 99, int(np.prod(threads))).astype(np.int32))


@pytest.mark.spec("L11:gemm_sp", "T.gemm_sp")
def test_sparse_products():
    dense, kept, e = compressed(32, 128, "float16", "int16")
    b = RNG.integers(-3, 4, (128, 16))
    f = sparse(32, 16, 128, 64, "float16", "float32", "int16", stages=2)
    assert np.array_equal(on_gpu(f, kept, e, b.astype(np.float16))[3], dense @ b)


@pytest.mark.spec("L22:emitter", "T.TensorCoreIntrinEmitter")
@pytest.mark.parametrize("dtype,acc,options", [
    ("float16", "float32", {}), ("float16", "float32", {"ta": True, "swizzle": True}),
    ("int8", "int32", {"ta": True, "tb": False}), ("float32", "float32", {"chunk": 16})])
def test_products_by_an_emitter(dtype, acc, options):
    f, a, b = by_emitter(dtype, acc, **options)
    x, y = (RNG.integers(-3, 4, s).astype(dtype) for s in (a, b))
    got = on_gpu(f, x, y)[2].astype(np.float64)
    left, right = (v.astype(np.float64) for v in (x.T if options.get("ta") else x, y.T if options.get("tb", True) else y))
    assert np.array_equal(got, left @ right)


@pytest.mark.spec("L3.2:int4", "T.int4")
def test_packed_int4():
    import torch

    @T.prim_func
    def f(X: T.Tensor((8, 64), "int4"), Y: T.Tensor((8, 64), "int32"), Z: T.Tensor((8, 64), "int4")):
        with T.Kernel(1, threads=64):
            F = T.alloc_fragment((8, 64), "int4")
            T.copy(X, F)
            for i, j in T.Parallel(8, 64):
                Y[i, j] = T.cast(F[i, j], "int32")
            T.copy(F, Z)

    codes = RNG.integers(0, 16, (8, 64)).astype(np.uint8)
    packed = torch.from_numpy((codes[:, ::2] | codes[:, 1::2] << 4).view(np.int8)).cuda()
    y, z = torch.zeros((8, 64), dtype=torch.int32).cuda(), torch.zeros((8, 32), dtype=torch.int8).cuda()
    tilelang.compile(f, target="cuda")(packed, y, z)
    assert np.array_equal(y.cpu().numpy(), (codes.astype(np.int32) ^ 8) - 8) and torch.equal(packed, z)


@pytest.mark.spec("L7:CUDASourceCodeKernel", "T.CUDASourceCodeKernel")
def test_the_users_own_source():
    import torch

    x = torch.arange(200, dtype=torch.float16).cuda()
    y = torch.zeros(200).cuda()
    tilelang.compile(source_program(), target="cuda")(x, y, 150, 3.0)
    assert torch.equal(y[:150], 6 * x[:150].float()) and not y[150:].any()


@pytest.mark.spec("L20:rng", "T.rng_init", "T.rng_rand")
@pytest.mark.parametrize("generator", (XORWOW, MRG))
def test_random_words_are_those_of_curands_other_generators(generator):
    got = on_gpu(words_of(generator, NEAR + FAR), np.array(NEAR + FAR))[1]
    assert got.tolist() == [OF_CURAND[generator, case] for case in NEAR + FAR]


@pytest.mark.spec("T.import_source", "T.sblock_attr", "T.attr", "T.call_pure_extern", "L18:raw-attributes", "L19:extern")
@pytest.mark.parametrize("spell", SPELLINGS)
def test_functions_of_the_users_source(spell):
    x = RNG.integers(-99, 99, 64).astype(np.int32)
    assert np.array_equal(on_gpu(device_source(spell), x)[1], 2 * x)


@pytest.mark.spec("T.call_extern", "T.import_source", "T.access_ptr", "T.address_of", "L19:extern", "L19:pointers")
def test_functions_of_the_users_source_store_through_pointers():
    @T.prim_func
    def f(X: T.Tensor((64,), "float16"), Y: T.Tensor((64,), "float16"), Z: T.Tensor((64,), "float16")):
        with T.Kernel(1, threads=64):
            T.import_source("TL_DEVICE void put(half_t* p, half_t x, int by) { *p = x * half_t(by); }")
            t = T.get_thread_binding()
            S = T.alloc_shared((64,), "float16")
            T.call_extern("handle", "put", T.access_ptr(S[t], "w"), X[t], 3)
            T.sync_threads()
            T.call_extern("handle", "put", T.address_of(Y[63 - t]), S[t], 1)
            Z[t] = S[63 - t]

    x = RNG.integers(-99, 99, 64).astype(np.float16)
    _, y, z = on_gpu(f, x)
    assert np.array_equal(y, 3 * x[::-1]) and np.array_equal(z, 3 * x[::-1])


PRINTS = """
import tilelang, torch, tilelang.language as T

@T.prim_func
def f(A: T.Tensor((4,), "int32")):
    with T.Kernel(1, threads=4):
        t = T.get_thread_binding()
        S = T.alloc_shared((2,), "int32")
        F = T.alloc_fragment((2,), "float32")
        L = T.alloc_local((1,), "float16")
        L[0] = 1.5
        T.copy(A[0:2], S)
        T.copy(A[0:2], F)
        T.print(S)
        T.print(F, msg="held")
        T.print(L, msg="own")
        T.print(A[t] + 1, msg="next")
        if t == 3:
            T.print(msg="done")
        ASSERT

tilelang.compile(f, target="cuda")(torch.arange(4, dtype=torch.int32, device="cuda") * 5)
torch.cuda.synchronize()
"""


def printed(tmp_path: pathlib.Path, statement: str) -> subprocess.CompletedProcess[str]:
    """A process of its own: what the device prints comes out when its context ends, and a trap ends it."""
    path = tmp_path / "prints.py"
    path.write_text(PRINTS.replace("ASSERT", statement), encoding="utf-8")
    return subprocess.run([sys.executable, str(path)], capture_output=True, text=True, timeout=200)


@pytest.mark.spec("T.print", "L20:print")
def test_lines_of_every_kind_are_printed(tmp_path):
    done = printed(tmp_path, "pass")
    assert done.returncode == 0, done.stderr[-2000:]
    at = [f"BlockIdx=(0, 0, 0), ThreadIdx=({t}, 0, 0)" for t in range(4)]
    want = [f"msg='buffer<S, int32>' {at[0]}: buffer=S, index={i}, dtype=int value={5 * i}" for i in range(2)]
    want += [f"msg='held' {at[0]}: buffer=F, index={i}, dtype=float value={5.0 * i:f}" for i in range(2)]
    want += [f"msg='own' {a}: buffer=L, index=0, dtype=half value=1.500000" for a in at]
    want += [f"msg='next' {a}: dtype=int value={5 * t + 1}" for t, a in enumerate(at)]
    want += [f"msg='done' {at[3]}"]
    assert sorted(line for line in done.stdout.splitlines() if line.startswith("msg=")) == sorted(want)


@pytest.mark.spec("T.device_assert", "L20:device_assert")
def test_a_device_assertion_tells_its_message_and_place_and_ends_the_launch(tmp_path):
    done = printed(tmp_path, 'T.device_assert(A[t] < 15, "too large")')
    assert done.returncode != 0 and "Device assert failed: too large" in done.stdout
    assert "prints.py:" in done.stdout and "CUDA" in done.stderr
    assert printed(tmp_path, 'T.device_assert(A[t] < 16, "too large")').returncode == 0


@pytest.mark.spec("R11:cuda", "R11:backends", "R6:profiler")
def test_every_backend_gives_the_same_and_is_measured():
    import torch

    @T.prim_func
    def f(X: T.Tensor((256,), "float32"), Y: T.Tensor((256,), "float32")):
        with T.Kernel(2, threads=128) as b:
            for i in T.Parallel(128):
                Y[b * 128 + i] = T.exp(X[b * 128 + i])

    x = torch.randn(256, device="cuda")
    kernels = [tilelang.compile(f, out_idx=[1], target="cuda", execution_backend=e)
               for e in ("tvm_ffi", "nvrtc", "cython", "auto")]
    results = [k(x) for k in kernels]
    assert torch.allclose(results[0], x.exp(), rtol=1e-5) and all(torch.equal(r, results[0]) for r in results)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    other = kernels[2](x, stream=stream.cuda_stream, skip_tensor_validation=False)
    stream.synchronize()
    assert torch.equal(other, results[0])
    profiler = kernels[0].get_profiler(tilelang.TensorSupplyType.Normal)
    profiler.assert_allclose(torch.exp, atol=1e-5, rtol=1e-5)
    with pytest.raises(AssertionError, match="Too many mismatched"):
        profiler.assert_allclose(torch.sin, atol=1e-5, rtol=1e-5)
    profiler.assert_consistent(3)
    for backend in ("event", "cudagraph"):
        assert profiler.do_bench(n_warmup=1, n_repeat=3, backend=backend) > 0
    low, high = profiler.do_bench(n_warmup=1, n_repeat=5, quantiles=[0.2, 0.8])
    assert 0 < low <= high
