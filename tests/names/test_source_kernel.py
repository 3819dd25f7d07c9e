"""T.CUDASourceCodeKernel (language 7): the user's CUDA source as the kernel of a launch."""

import numpy as np
import pytest
from everywhere import SM80, cuda_text, run

import tilelang
import tilelang.language as T
from tilelang.errors import TileLangError
from tilelang.target import Target
from tilelang.transform.pipeline import lower

SOURCE = """
template <typename S> __device__ S twice(S x) { return x + x; }
__global__ void __launch_bounds__(64) scale(const half_t* x, float* y, int n, float f) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = twice((float)x[i]) * f;
}
extern "C" __global__ void other(float* y) { y[0] = 1; }
"""


def program(source=SOURCE, entry="scale", **options):
    n = T.dynamic("n")

    @T.prim_func
    def f(X: T.Tensor((n,), "float16"), Y: T.Tensor((n,), "float32"), m: T.int32, s: T.float32):
        with T.CUDASourceCodeKernel(T.ceildiv(m, 64), threads=64, source_code_or_path=source, entry_name=entry, **options):
            pass

    return f


@pytest.mark.spec("T.CUDASourceCodeKernel", "L7:CUDASourceCodeKernel")
def test_the_source_is_the_kernel_and_takes_the_parameters_in_order(tmp_path):
    f = program()
    (kernel,) = lower(f.func, Target(SM80), {}).kernels
    assert kernel.name == "scale" and [p.name for p in kernel.params] == ["X", "Y", "m", "s"]
    text = cuda_text(f)
    assert 'extern "C" __global__ void __launch_bounds__(64) scale' in text and text.count("__global__") == 2
    assert "typedef __half half_t;" in text
    path = tmp_path / "kernel.cu"
    path.write_text(SOURCE, encoding="utf-8")
    assert cuda_text(program(str(path))) == text
    assert "#define MINE 3" in cuda_text(program(prelude="#define MINE 3"))


@pytest.mark.spec("L7:CUDASourceCodeKernel")
def test_it_stands_beside_other_kernels_of_the_function():
    @T.prim_func
    def f(Y: T.Tensor((64,), "float32")):
        with T.Kernel(1, threads=64):
            Y[T.get_thread_binding()] = 2
        with T.CUDASourceCodeKernel(1, threads=32, source_code_or_path=SOURCE, entry_name="other"):
            pass

    assert [k.name for k in lower(f.func, Target(SM80), {}).kernels] == ["f_kernel", "other"]


@pytest.mark.spec("L7:CUDASourceCodeKernel")
@pytest.mark.parametrize("build,error,words", [
    (lambda: program(""), ValueError, "found nothing"), (lambda: program(entry=""), ValueError, "name of a function"),
    (lambda: program("missing.cu"), FileNotFoundError, "missing.cu"),
    (lambda: program(entry="main_kernel"), ValueError, "Available entries: scale, other")])
def test_sources_that_cannot_be_used_are_refused(build, error, words):
    with pytest.raises(error, match=words):
        build()


@pytest.mark.spec("L7:CUDASourceCodeKernel", "T.CUDASourceCodeKernel")
@pytest.mark.parametrize("on", ("tile", "simulator", "cpu"))
def test_other_executions_refuse_it(on):
    with pytest.raises(TileLangError) as e:
        run(program(), np.zeros(8, np.float16), np.zeros(8, np.float32), 8, 2.0, on=on, simulated=True)
    assert e.value.kind in ("eval-unsupported", "cpu-unsupported", "sim-unsupported")
    with pytest.raises(TileLangError, match="statements stand in the block"):
        @T.prim_func
        def g(Y: T.Tensor((64,), "float32")):
            with T.CUDASourceCodeKernel(1, source_code_or_path=SOURCE, entry_name="other"):
                Y[0] = 1
    assert tilelang.PassConfigKey
