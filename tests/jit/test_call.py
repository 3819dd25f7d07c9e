"""Calling kernels on the CPU target: frameworks, outputs, errors told in full, lives after errors."""

import gc
import threading

import numpy as np
import pytest
from kernels import add, dynamic_program, lazy_scale, scale_program, scale_t, split

import tilelang
import tilelang.language as T
from tilelang.errors import TileLangError

torch = pytest.importorskip("torch")


@pytest.fixture(scope="module")
def scale():
    return tilelang.compile(scale_program(), out_idx=[1], target="cpu")


@pytest.fixture(scope="module")
def in_place():
    return tilelang.compile(scale_program(), target="cpu")


@pytest.mark.spec("R4:calls")
def test_numpy_in_numpy_out_torch_in_torch_out(scale):
    a = np.arange(32, dtype=np.float32).reshape(4, 8)
    out = scale(a)
    assert type(out) is np.ndarray and out.dtype == np.float32 and np.array_equal(out, 2 * a)
    out = scale(torch.from_numpy(a))
    assert isinstance(out, torch.Tensor) and torch.equal(out, 2 * torch.from_numpy(a))
    assert type(scale(a)) is np.ndarray  # frameworks may take turns
    p = torch.nn.Parameter(torch.from_numpy(a))
    assert torch.equal(scale(p), 2 * p.detach())


def test_other_dlpack_objects(scale, in_place):
    class Foreign:
        def __init__(self, array):
            self.array = array

        def __dlpack__(self, **_):
            return self.array.__dlpack__()

        def __dlpack_device__(self):
            return (1, 0)

    a, b = np.ones((4, 8), np.float32), np.zeros((4, 8), np.float32)
    in_place(Foreign(a), Foreign(b))
    assert (b == 2).all()
    assert np.array_equal(np.asarray(scale(Foreign(a))), b)


def test_outputs_passed_by_the_caller_are_written_in_place(in_place):
    a, b = torch.ones(4, 8), torch.zeros(4, 8)
    assert in_place(a, b) is None
    assert (b == 2).all()
    assert in_place(a, a) is None and (a == 2).all()


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3"])
def test_element_types_numpy_does_not_export(name):
    import ml_dtypes

    dt = np.dtype(getattr(ml_dtypes, name if name != "float8_e4m3" else "float8_e4m3fn"))  # one type of ours, two names
    kernel = tilelang.compile(scale_program(dtype=name), out_idx=[1], target="cpu")
    a = (np.arange(32) % 4).astype(dt).reshape(4, 8)
    out = kernel(a)
    assert out.dtype == dt and np.array_equal(out.astype(np.float32), 2 * a.astype(np.float32))
    x = torch.from_numpy(a.astype(np.float32)).to(getattr(torch, dt.name))
    y = kernel(x)
    assert y.dtype == x.dtype and torch.equal(y.float(), 2 * x.float())


def test_read_only_arrays_are_read_and_never_written(scale, in_place):
    a = np.ones((4, 8), np.float32)
    a.flags.writeable = False
    assert (scale(a) == 2).all()
    with pytest.raises(ValueError, match="B is a read-only array and the kernel writes it"):
        in_place(np.ones((4, 8), np.float32), a)
    assert (a == 1).all()


@pytest.mark.spec("L5:symbolic-shapes", "R4:calls")
def test_symbolic_output_shapes():
    kernel = tilelang.compile(dynamic_program(), out_idx=[1], target="cpu")
    for m in (1, 3, 0):
        a = np.arange(4 * m, dtype=np.float32).reshape(m, 4)
        for out in (kernel(a), kernel(torch.from_numpy(a)).numpy()):
            assert out.shape == (2 * m + 1, 4)
            assert np.array_equal(out[:m], a) and (out[m:] == 7).all()


@pytest.mark.spec("R4:calls")
def test_several_results_come_in_the_order_asked():
    x = torch.randn(3, 5)
    for e, d in (split(x), split(x.numpy())):
        assert np.array_equal(np.asarray(e), -x.numpy().T) and np.array_equal(np.asarray(d), 2 * x.numpy())
    assert isinstance(split(x), list) and isinstance(split(x)[0], torch.Tensor)
    kernel = split.compile(M=3, N=5)
    assert kernel.out_idx == [2, 1] or kernel.out_idx == [1, 2]


def test_output_shapes_may_come_from_scalars():
    @T.prim_func
    def main(n, B):
        n: T.int32
        B: T.Tensor((2 * n,), "int32")
        with T.Kernel(2 * n, threads=32) as bx:
            B[bx] = bx * bx

    kernel = tilelang.compile(main, out_idx=[1], target="cpu")
    for n in (3, 0):
        assert np.array_equal(np.asarray(kernel(n)), np.arange(2 * n) ** 2)
    with pytest.raises((RuntimeError, ValueError)):
        kernel(-1)
    assert len(kernel(1)) == 2


@pytest.mark.spec("T.make_tensor", "T.ptr")
@pytest.mark.parametrize("backend", ["tile", "simulator"])
def test_pointer_parameters_of_interpreted_kernels_take_tensors_and_addresses(backend):
    @T.prim_func
    def main(p: T.ptr, n: T.int32):
        A = T.make_tensor(p, (n,), "float32")
        with T.Kernel(n, threads=1) as bx:
            A[bx] = A[bx] + 1.0

    kernel = tilelang.compile(main, target={"kind": "cuda", "arch": "sm_80"}, execution_backend=backend)
    a = np.zeros(4, np.float32)
    kernel(a, 4)
    kernel(a.ctypes.data, 2)
    kernel(torch.from_numpy(a), 1)
    assert list(a) == [3, 2, 1, 1]
    with pytest.raises(ValueError, match="null"):
        kernel(0, 1)


@pytest.mark.spec("L5:ptr")
def test_pointer_parameters_take_tensors_and_addresses():
    @T.prim_func
    def main(p: T.ptr, n: T.int32):
        A = T.make_tensor(p, (n,), "float32")
        with T.Kernel(n, threads=32) as bx:
            A[bx] = A[bx] + 1.0

    kernel = tilelang.compile(main, target="cpu")
    a = np.zeros(4, np.float32)
    kernel(a, 4)
    kernel(a.ctypes.data, 2)
    kernel(torch.from_numpy(a), 1)
    assert list(a) == [3, 2, 1, 1]
    with pytest.raises(RuntimeError, match="input p expected pointer or tensor handle"):
        kernel("a", 1)


def test_debug_output_says_what_was_compiled(capsys):
    with tilelang.env.using(TILELANG_DEBUG=2, TILELANG_DISABLE_CACHE="1"):
        tilelang.compile(scale_program(3, 3), target="cpu")
    out = capsys.readouterr().out
    assert "[tilelang] main for cpu: compiled in" in out and "define" in out


def test_eager_with_and_without_results():
    a, b = torch.full((1000,), 2048.0).half(), torch.ones(1000).half()
    assert torch.equal(add(a, b), torch.full((1000,), 2048.0))
    base = torch.randn(20, 16)
    x, store = base[:, :10], torch.zeros(10, 32)
    assert scale_t(x, store[:, :20]) is None
    assert torch.equal(store[:, :20], 2 * x.T) and not store[:, 20:].any()
    scale_t(x, store[:, :20], f=3)
    assert torch.equal(store[:, :20], 3 * x.T)


BAD = [
    ((), ValueError, r"Kernel expected 1 inputs, but 0 are provided\."),
    ((np.zeros((4, 8), np.float32),) * 2, ValueError, r"Kernel expected 1 inputs, but 2 are provided\."),
    ((3,), RuntimeError, "kernel main input A expected pointer or tensor handle, got 3"),
    (([[1.0]],), RuntimeError, "kernel main input A expected pointer or tensor handle"),
    ((None,), RuntimeError, r"main\.A is expected to have non-NULL pointer"),
    ((np.zeros(32, np.float32),), RuntimeError, "kernel main input A ndim mismatch, expected 2"),
    ((np.zeros((4, 8)),), RuntimeError, "kernel main input A dtype mismatch, expected float32, got float64 tensor"),
    ((np.zeros((4, 9), np.float32),), RuntimeError, r"kernel main input A shape\[1\] violates packed ABI constraint"),
    ((np.zeros((8, 4), np.float32).T,), RuntimeError, r"kernel main input A strides\[1\] violates packed ABI"),
    ((torch.zeros(4, 8, device="meta"),), Exception, "."),
    ((np.array([["a"] * 8] * 4),), RuntimeError, "kernel main input A dtype mismatch"),
    ((np.zeros((4, 8), ">f4"),), RuntimeError, "kernel main input A"),
]


@pytest.mark.spec("R4:inputs", "R4:non-tensor")
@pytest.mark.parametrize("bad, kind, message", BAD, ids=range(len(BAD)))
def test_bad_arguments_are_refused_and_the_next_call_works(scale, bad, kind, message):
    with pytest.raises(kind, match=message):
        scale(*bad)
    assert (scale(np.ones((4, 8), np.float32)) == 2).all()


def test_keywords_that_are_no_inputs_are_refused(scale):
    assert (scale(A=np.ones((4, 8), np.float32)) == 2).all()
    with pytest.raises(TypeError, match="unexpected keyword argument 'a'"):
        scale(a=np.ones((4, 8), np.float32))


def test_messages_say_what_was_found_and_what_to_do(scale):
    with pytest.raises(TileLangError) as e:
        scale(torch.zeros(8, 4).T)
    assert "got float32 tensor of shape (4, 8) strides (1, 4) on cpu" in str(e.value)
    assert "hint: pass x.contiguous()" in str(e.value)


@pytest.mark.spec("must:R4-scalar-kinds")
@pytest.mark.spec("R4:scalar")
def test_scalar_arguments():
    @T.prim_func
    def main(A: T.Tensor((4,), "float32"), n: T.int32, x: T.float32, u: T.uint64):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(4):
                A[i] = x + T.cast(n, "float32") + T.cast(u >> T.uint64(60), "float32")

    kernel = tilelang.compile(main, target="cpu")
    a = np.zeros(4, np.float32)

    def run(*scalars):
        kernel(a, *scalars)
        return a[0]

    assert run(2, 0.5, 0) == 2.5
    assert run(True, 1, 2**64 - 1) == 17
    assert run(np.int64(3), np.float32(0.25), np.uint64(2**63)) == 11.25
    assert run(torch.tensor(3), torch.tensor(0.5), 0) == 3.5
    assert run(np.bool_(True), np.float64(0.5), 0) == 1.5
    for n in (2**31, -2**31 - 1, 2**70):
        with pytest.raises((OverflowError, ValueError), match="scalar n expected integer"):
            run(n, 0.0, 0)
    for bad in ((1.5, 0.0, 0), (None, 0.0, 0), ("1", 0.0, 0), (torch.ones(2), 0.0, 0), (np.float32(1), 0.0, 0)):
        with pytest.raises(TypeError, match="scalar n expected integer"):
            run(*bad)
    with pytest.raises((OverflowError, ValueError), match="scalar x expected float"):
        run(1, 1e300, 0)
    with pytest.raises((OverflowError, ValueError), match="scalar u expected integer"):
        run(1, 0.0, -1)
    assert run(2, 0.5, 0) == 2.5


@pytest.mark.spec("L2.3:assert", "R4:host-assert")
def test_host_asserts_and_assumptions_launch_nothing():
    m = T.dynamic("m")

    @T.prim_func
    def main(A: T.Tensor((m,), "float32"), n: T.int32):
        assert m % 4 == 0, "rows come in fours"
        with T.Kernel(1, threads=32):
            for i in T.Parallel(4):
                A[i] = T.cast(n, "float32")

    kernel = tilelang.compile(main, target="cpu")
    a = np.zeros(4, np.float32)
    kernel(a, 3)
    assert (a == 3).all()
    with pytest.raises(RuntimeError, match="rows come in fours"):
        kernel(np.zeros(5, np.float32), 1)
    kernel(a, 4)
    assert (a == 4).all()


@pytest.mark.spec("R4:assume")
def test_assumptions_on_shapes_and_scalars_are_checked():
    m = T.dynamic("m")

    @T.prim_func
    def main(A: T.Tensor((m,), "float32"), n: T.int32):
        T.assume(m % 8 == 0)
        with T.Kernel(1, threads=32):
            T.assume(n < m)
            for i in T.Parallel(8):
                A[i] = T.cast(n, "float32")

    for backend in (None, "tile"):
        kernel = tilelang.compile(main, target="cpu", execution_backend=backend)
        a = np.zeros(16, np.float32)
        kernel(a, 3)
        assert (a[:8] == 3).all()
        with pytest.raises(RuntimeError, match=r"Assume: \(m % 8\) == 0"):
            kernel(np.zeros(9, np.float32), 1)
        with pytest.raises(RuntimeError, match="Assume: n < m"):
            kernel(a, 16)
        kernel(a, 4)
        assert (a[:8] == 4).all()


def test_misaligned_views_give_the_right_result(in_place):
    raw = np.zeros(4 * 32 + 1, np.uint8)
    a = raw[1:].view(np.float32).reshape(4, 8)  # not even aligned to its element
    b = np.zeros(33, np.float32)[1:].reshape(4, 8)
    a[:] = 1
    try:
        in_place(a, b)
    except RuntimeError as e:
        assert "byte_offset violates packed ABI constraint" in str(e)
    else:
        assert (b == 2).all()
    good = np.ones((4, 8), np.float32)
    in_place(good, b)
    assert (b == 2).all()


def test_calls_from_many_threads(scale):
    failures = []

    def work(k):
        for _ in range(50):
            out = scale(np.full((4, 8), k, np.float32))
            if not (out == 2 * k).all():
                failures.append(k)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failures


def test_results_own_their_memory(scale):
    out = scale(torch.ones(4, 8))
    again = [scale(torch.full((4, 8), float(k))) for k in range(20)]
    gc.collect()
    assert (out == 2).all() and all((r == 2 * k).all() for k, r in enumerate(again))


@pytest.mark.spec("R3:JITKernel")
def test_kernel_object(scale, tmp_path, capsys):
    assert scale.out_idx == [1] and [tuple(p.shape) for p in scale.params] == [(4, 8), (4, 8)]
    assert scale.params[0].torch_dtype() is torch.float32 and not scale.params[0].is_scalar()
    assert scale.adapter.result_idx == [1] and scale.target.kind.name == "cpu"
    assert "define" in scale.get_kernel_source() and "tl_call" in scale.get_host_source()
    assert scale.get_kernel_source(False).endswith(scale.get_host_source())
    scale.show_source("host")
    assert "tl_prepare" in capsys.readouterr().out
    scale.export_sources(tmp_path / "k.ll", tmp_path / "h.ll")
    assert (tmp_path / "k.ll").read_text() == scale.kernel_source
    with pytest.raises(ValueError):
        scale.export_sources()
    with pytest.raises(ValueError):
        scale.get_tuner_result()
    with pytest.raises(ValueError):
        scale.export_ptx("")
    scale.show_ptx()  # logged, not raised
    with pytest.raises(ValueError):
        scale.export_library("")
    assert "kernel main" in scale.report() and scale.sync_report()
    assert scale.prim_func.script() == scale_program().script()


@pytest.mark.spec("R11:cuda")
def test_the_cython_backend_words_its_errors_differently():
    kernel = tilelang.compile(scale_program(), target="cpu", execution_backend="cython")
    good = np.ones((4, 8), np.float32)
    for bad, message in (((good,), "Expected 2 inputs, got 1"),
                         ((good.astype(np.float16), good), "Buffer dtype mismatch for parameter A: expected "
                                                           "torch.float32"),
                         ((good[0], good), "Static shape mismatch for parameter A: expected 2 dimensions, got 1"),
                         ((np.ones((4, 9), np.float32), good), "expected 8 at index 1, got 9"),
                         ((np.ones((8, 4), np.float32).T, good), "Expected parameter A to be a contiguous tensor")):
        with pytest.raises(ValueError, match=message):
            kernel(*bad)
    assert kernel(good, good, skip_tensor_validation=True) == []


def test_views_that_negate_their_memory_are_refused():
    m, n, sx, sy = T.dynamic("m, n, sx, sy")

    @T.prim_func
    def main(X: T.StridedTensor((m, n), (sx, sy), "float32"), Y: T.Tensor((m, n), "float32")):
        with T.Kernel(m, threads=32) as b:
            for j in T.Parallel(n):
                Y[b, j] = X[b, j]

    kernel, z = tilelang.compile(main, target="cpu", out_idx=[1]), torch.randn(3, 5, dtype=torch.complex64)
    assert torch.equal(kernel(z.imag), z.imag) and torch.equal(kernel(z.conj().real), z.real)
    with pytest.raises(RuntimeError, match="kernel main input X is a view that negates what its memory holds"):
        kernel(z.conj().imag)
    assert torch.equal(kernel(z.conj().imag.resolve_neg()), -z.imag)
    assert np.array_equal(kernel(z.numpy().imag), z.numpy().imag)
    with pytest.raises(ValueError, match="expected 1 inputs|num_args|Expected 1"):
        kernel()
    with pytest.raises(RuntimeError, match="compact"):  # declared strides rule such views out
        tilelang.compile(dynamic_program(), out_idx=[1], target="cpu")(z[:, :4].conj().imag)


def test_a_number_that_its_view_negates_was_read_as_it_lies():
    """A tensor of one element is contiguous with any stride."""
    @T.prim_func
    def main(X: T.Tensor((1,), "float32"), Y: T.Tensor((4,), "float32")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(4):
                Y[i] = X[0]

    kernel, z = tilelang.compile(main, target="cpu", out_idx=[1]), torch.tensor([1 + 2j])
    assert kernel(z.imag).tolist() == [2.0] * 4 == kernel(-z.conj().imag.resolve_neg()).tolist()
    with pytest.raises(RuntimeError, match="negates what its memory holds"):
        kernel(z.conj().imag)


@pytest.mark.spec("R11:backends")
def test_interpreted_backends_give_the_same(scale):
    a = torch.randn(4, 8)
    tile = tilelang.compile(scale_program(), out_idx=[1], target="cpu", execution_backend="tile")
    assert torch.equal(tile(a), scale(a)) and np.array_equal(tile(a.numpy()), scale(a.numpy()))
    with pytest.raises(RuntimeError, match="dtype mismatch"):
        tile(a.double())


@pytest.mark.parametrize("backend", [None, "tile", "simulator"])
def test_tensors_that_share_memory(backend):
    """What is written through one parameter is read through the other, at whatever distance they overlap."""
    @T.prim_func
    def main(A: T.Tensor((8,), "float32"), B: T.Tensor((8,), "float32"), C: T.Tensor((8,), "float32")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(8):
                B[i] = A[i] + 1
        with T.Kernel(1, threads=32):
            for i in T.Parallel(8):
                C[i] = A[i] * 2

    target = {"kind": "cuda", "arch": "sm_80"} if backend == "simulator" else "cpu"
    kernel = tilelang.compile(main, target=target, execution_backend=backend)
    x, c = torch.arange(8).float(), torch.zeros(8)
    kernel(x, x, c)
    assert torch.equal(x, torch.arange(8) + 1.0) and torch.equal(c, 2 * x)
    x = np.arange(24, dtype=np.float32)
    kernel(x[:8], x[8:16], x[16:])
    assert np.array_equal(x[8:16], x[:8] + 1) and np.array_equal(x[16:], 2 * x[:8])
    y, c = np.zeros(10, np.float32), np.zeros(8, np.float32)
    kernel(y[2:], y[:8], c)
    assert np.array_equal(y, [1] * 8 + [0] * 2) and np.array_equal(c, 2 * y[2:])


@pytest.mark.spec("must:R6-static-shape")
@pytest.mark.spec("R6:profiler")
def test_profiler_on_the_cpu(scale):
    profiler = scale.get_profiler()
    assert profiler.do_bench(n_warmup=1, n_repeat=3) > 0
    profiler.assert_allclose(lambda x: x * 2, atol=0, rtol=0)
    with pytest.raises(AssertionError, match="Too many mismatched"):
        profiler.assert_allclose(lambda x: x * 3)
    profiler.assert_consistent(3)
    assert lazy_scale(4).get_profiler(tilelang.TensorSupplyType.One).run_once().eq(2).all()
    dynamic = tilelang.compile(dynamic_program(), out_idx=[1], target="cpu").get_profiler()
    with pytest.raises(ValueError, match="expected: a static shape"):
        dynamic.run_once()
    with pytest.raises(ValueError, match="'m' not found"):
        dynamic._get_inputs(dynamic_symbolic_constraints={"n": 1})
    assert dynamic._get_inputs(dynamic_symbolic_constraints={"m": 5})[0].shape == (5, 4)
    assert dynamic._get_inputs(True, {"m": 5})[1].shape == (11, 4)


@pytest.mark.parametrize("in_use", [True, False], ids=["torch", "numpy"])
def test_results_of_calls_without_tensors_are_those_of_the_framework_in_use(in_use, monkeypatch):
    torch = pytest.importorskip("torch")
    from tilelang.runtime.host_engine import ffi_state

    @T.prim_func
    def count(n: T.int32, O: T.Tensor((4,), "int32")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(4):
                O[i] = n + i

    monkeypatch.setattr(ffi_state(), "torch_in_use", in_use)
    for target, backend in (("cpu", None), ("cpu", "tile"), ({"kind": "cuda", "arch": "sm_80"}, "simulator")):
        got = tilelang.compile(count, out_idx=[1], target=target, execution_backend=backend)(3)
        assert isinstance(got, torch.Tensor if in_use else np.ndarray), (target, backend)
        assert got.tolist() == [3, 4, 5, 6]
