"""Host code of CUDA kernels, run against a driver made of Python functions: grids, arguments, contexts, failures."""

import ctypes

import numpy as np
import pytest
from fake_driver import Driver, I, OnGpu, P
from hosts import HANDLE, tensor

from tilelang.ir import (F32, I32, I64, Assert, Bind, Buffer, For, Func, If, Launch, Ramp, Store, Var, const, dtype, load,
                         numpy_dtype, seq, LaunchPlan, FuncFacts)
from tilelang.runtime.host_engine import HostLibrary, compile_object
from tilelang.runtime.host_stub import stub_text
from tilelang.runtime.gpu_api import CUDA
from tilelang.runtime.launchers import GpuLauncher
from tilelang.runtime.signature import signature_of
from tilelang.transform.lower.device_program import split_host


def launch(grid, body, threads=(128, 1, 1), **plan):
    names = "xyz"
    return Launch(grid, tuple(Var(f"b{names[i]}", I32) for i in range(len(grid))), threads,
                  tuple(Var(f"t{n}", I32) for n in names), body, LaunchPlan(**plan))


def built(func, types, out_idx=None):
    program = split_host(func)
    sig = signature_of(func, out_idx)
    text = stub_text(sig, GpuLauncher(program.host, program.kernels), set(sig.symbols), ("call",))
    driver = Driver(program.kernels, types)
    library = HostLibrary(compile_object(text), ("tl_call",), driver.symbols())
    return library.function("tl_call", driver, release_gil=False), driver


def function(params, body):
    variables, buffers = [], []
    for p in params:
        if isinstance(p, Buffer):
            variables.append(Var(p.name + "_handle", HANDLE))
            buffers.append((variables[-1], p))
        else:
            variables.append(p)
    return Func("main", tuple(variables), tuple(buffers), body, facts=FuncFacts(phase="DEVICE"))


def copy_stmt(dst, src):
    return Store(dst, (const(0),), load(src, (const(0),)))


def gpu(n, device=0):
    return OnGpu(np.zeros(n, np.float32), device)


def test_a_launch_gets_its_grid_block_shared_memory_and_arguments():
    m, n, x = Var("m", I32), Var("n", I64), Var("x", F32)
    a, b = tensor("A", (m,)), tensor("B", (m,))
    body = seq(copy_stmt(b, a), Store(b, (const(0),), x * n))
    call, driver = built(function((a, b, n, x), launch(((m + 127) // 128, const(2)), body, shared_bytes=4096)),
                         [(P, P, ctypes.c_int64, ctypes.c_float, ctypes.c_int32)])
    u, v = gpu(300), gpu(300)
    assert call(u, v, 2**40, 0.5) is None
    f, grid, block, shared, stream, values, context = driver.launches[0]
    assert (f, grid, block, shared, stream) == (1000, (3, 2, 1), (128, 1, 1), 4096, None)
    assert values == [u.array.ctypes.data, v.array.ctypes.data, 2**40, 0.5, 300]
    assert context == 7000 and driver.pushed == 1 and driver.current == 0  # the caller's context is back
    driver.current = 7000
    call(u, v, 1, 1)
    assert driver.pushed == 1 and driver.loads == [0]


@pytest.mark.spec("R4:scalar")
@pytest.mark.parametrize("name", ["float16", "bfloat16", "float8_e4m3", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz",
                                  "float8_e5m2fnuz"])
def test_small_floats_are_passed_as_their_bits(name):
    """Nearest even from the Python float, as ml_dtypes rounds; what is beyond the type's range is refused."""
    dt, x, a = dtype(name), Var("x", dtype(name)), tensor("A", (4,))
    kind = numpy_dtype(dt)
    words = ctypes.c_uint8 if dt.bits == 8 else ctypes.c_uint16
    call, driver = built(function((a, x), launch((const(1),), Store(a, (const(0),), x.astype("float32")))), [(P, words)])
    codes = np.arange(2**dt.bits, step=1 if dt.bits == 8 else 37).astype(f"uint{dt.bits}").view(kind)
    values = np.unique(codes[np.isfinite(codes.astype(np.float32))].astype(np.float64))
    between = ((values[:-1] + values[1:]) / 2).astype(np.float32)  # ml_dtypes rounds a double to float32 first
    up, down = np.nextafter(between, np.float32(np.inf)), np.nextafter(between, np.float32(-np.inf))
    given = [*values, *between, *up, *down, -0.0, float("nan"), 1, True]
    given += [float("inf"), float("-inf")] * bool(np.isinf(kind.type(float("inf"))))
    array = gpu(4)
    for v in given:
        call(array, v if isinstance(v, int) else float(v))
    got = np.array([x[5][1] for x in driver.launches], np.uint64).astype(f"uint{dt.bits}").view(kind).astype(np.float64)
    want = np.array(given, np.float64).astype(kind).astype(np.float64)
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(np.signbit(got[want == 0]), np.signbit(want[want == 0]))
    for v in (float(values.max()) * 1.1, -1e30 if dt.bits == 8 else -1e39):
        with pytest.raises(ValueError, match=f"scalar x expected float of {name}, the value is too large"):
            call(array, v)


@pytest.mark.spec("L6:alloc_shared")
def test_shared_memory_of_run_time_size_beyond_the_device_is_refused():
    m = Var("m", I64)
    a = tensor("A", (4,))
    call, driver = built(function((a, m), launch((const(1),), copy_stmt(a, a), shared_bytes=m * 4)), [(P,)])
    call(gpu(4), 56 * 1024)
    assert driver.launches[-1][3] == 224 * 1024
    for n in (57 * 1024 + 1, 2**30 + 16, -1):  # 2**32 + 64 bytes would be 64 in the word that the driver takes
        with pytest.raises(RuntimeError, match="needs more shared memory than the 232448 bytes a block may have"):
            call(gpu(4), n)
    assert len(driver.launches) == 1


@pytest.mark.spec("L7:Kernel")
def test_an_empty_grid_launches_nothing():
    m = Var("m", I32)
    a = tensor("A", (m,))
    call, driver = built(function((a,), launch((m,), copy_stmt(a, a))), [(P, I)])
    call(gpu(0))
    assert driver.launches == []
    call(gpu(5))
    assert driver.launches[0][1] == (5, 1, 1)


def test_a_grid_beyond_the_hardware_is_refused():
    y = Var("y", I32)
    a = tensor("A", (4,))
    call, driver = built(function((a, y), launch((const(1), y), copy_stmt(a, a))), [(P,)])
    call(gpu(4), 65535)
    with pytest.raises(RuntimeError, match="kernel main grid dimension y is larger than 65535"):
        call(gpu(4), 65536)
    assert len(driver.launches) == 1


def test_host_statements_decide_what_is_launched():
    n, i, twice = Var("n", I32), Var("i", I32), Var("twice", I32)
    a = tensor("A", (4,))
    body = seq(Assert(n >= 0, "n is not negative"), Bind(twice, n * 2),
               If(n > 3, launch((twice,), copy_stmt(a, a)), launch((const(1),), copy_stmt(a, a))),
               For(i, const(1), n % 3, "serial", launch((i,), Store(a, (const(0),), i.astype("float32")))))
    call, driver = built(function((a, n), body), [(P,), (P,), (P, I)])
    call(gpu(4), 5)
    assert [(x[0], x[1][0], x[5][1:]) for x in driver.launches] == [(1000, 10, []), (1002, 1, [1]), (1002, 2, [2])]
    driver.launches.clear()
    call(gpu(4), 3)
    assert [(x[0], x[1][0]) for x in driver.launches] == [(1001, 1)]
    driver.launches.clear()
    with pytest.raises(RuntimeError, match="n is not negative"):
        call(gpu(4), -1)
    assert driver.launches == []


@pytest.mark.parametrize("expression, values", [
    (lambda n, d: n // d, [(7, 2, 3), (-7, 2, -4), (7, -2, -4), (-8, 2, -4), (-2**31, -1, -2**31)]),
    (lambda n, d: n % d, [(7, 2, 1), (-7, 2, 1), (7, -2, -1), (-8, 2, 0), (-2**31, -1, 0)]),
    (lambda n, d: n * d + 1, [(2**30, 4, 1), (3, -5, -14)]),
    (lambda n, d: n << 3, [(2**30, 0, 0), (-3, 0, -24)]),
])
def test_host_integers_wrap_and_divide_as_the_language_says(expression, values):
    n, d, got = Var("n", I32), Var("d", I32), Var("got", I32)
    a = tensor("A", (4,))
    body = seq(Bind(got, expression(n, d)), launch((const(1),), Store(a, (const(0),), got.astype("float32"))))
    call, driver = built(function((a, n, d), body), [(P, I)])
    for x, y, want in values:
        call(gpu(4), x, y)
        assert driver.launches[-1][5][1] == want


def test_division_by_zero_is_an_error_not_a_crash():
    n, d, got = Var("n", I32), Var("d", I32), Var("got", I32)
    a = tensor("A", (4,))
    body = seq(Bind(got, n // d), launch((const(1),), Store(a, (const(0),), got.astype("float32"))))
    call, driver = built(function((a, n, d), body), [(P, I)])
    with pytest.raises(RuntimeError, match="division by zero in `n // d`"):
        call(gpu(4), 1, 0)
    call(gpu(4), 4, 2)
    assert driver.launches[-1][5][1] == 2


@pytest.mark.spec("R4:device", "R4:device-id")
def test_devices():
    a, b = tensor("A", (4,)), tensor("B", (4,))
    call, driver = built(function((a, b), launch((const(1),), copy_stmt(b, a))), [(P, P)])
    call(gpu(4, 3), gpu(4, 3))
    assert driver.launches[0][0] == 1300 and driver.launches[0][6] == 7003 and driver.loads == [3]
    with pytest.raises(RuntimeError, match="kernel main input B device_id violates packed ABI constraint"):
        call(gpu(4, 3), gpu(4, 1))
    with pytest.raises(RuntimeError, match="kernel main input A device_type mismatch, expected cuda"):
        call(np.zeros(4, np.float32), gpu(4))
    with pytest.raises(RuntimeError, match="device index above 63"):
        call(gpu(4, 64), gpu(4, 64))


def test_a_call_without_tensors_runs_on_the_default_device_and_its_stream():
    from tilelang.jit.loading import _on_current_device
    from tilelang.runtime.host_engine import ffi_state

    p = Var("p", HANDLE)
    a = Buffer("A", (4,), dtype("float32"), data=p)
    call, driver = built(function((p,), launch((const(1),), copy_stmt(a, a))), [(P,)])

    class Current:
        api = CUDA

        def current_device(self):
            return 5

    memory = np.zeros(4, np.float32)
    try:
        _on_current_device(call, Current())(memory.ctypes.data)
    finally:
        ffi_state().default_device.value = 0
    assert driver.launches[0][0] == 1500 and driver.launches[0][5] == [memory.ctypes.data]
    with ffi_state().module.use_raw_stream(ffi_state().module.device("cuda", 0), 0x77):
        call(memory.ctypes.data)
    assert driver.launches[1][0] == 1000 and driver.launches[1][4] == 0x77


def test_vector_accesses_ask_for_aligned_tensors():
    a, b = tensor("A", (64,)), tensor("B", (64,))
    ramp = Ramp(const(0), const(1), 4, dtype("int32x4"))
    body = Store(b, (const(0),), load(a, (const(0),))), Store(a, (ramp,), load(a, (ramp,)))
    call, driver = built(function((a, b), launch((const(1),), seq(*body))), [(P, P)])
    base = np.zeros(256, np.float32)
    start = (-base.ctypes.data % 16) // 4

    def at(k):
        return OnGpu(base[start + k:start + k + 64])

    call(at(0), at(65))  # B is only read element by element
    with pytest.raises(RuntimeError, match="input A byte_offset violates packed ABI constraint: its data must be "
                                           "aligned to 16 bytes"):
        call(at(1), at(68))


def test_failures_of_the_driver_reach_the_caller():
    a = tensor("A", (4,))
    call, driver = built(function((a,), launch((const(1),), copy_stmt(a, a))), [(P,)])
    driver.load_result = -1
    with pytest.raises(RuntimeError, match="kernel main cannot be loaded on its device"):
        call(gpu(4))
    driver.load_result = 0
    driver.result = 701
    with pytest.raises(RuntimeError, match="launch of main_kernel failed"):
        call(gpu(4))
    assert driver.status.value == 701 and driver.current == 0
    driver.result = 0
    assert call(gpu(4)) is None


def test_a_launch_in_clusters_carries_its_attributes():
    m = Var("m", I32)
    a = tensor("A", (m,))
    call, driver = built(function((a, m), launch((m, const(4)), copy_stmt(a, a), cluster=(2, 4, 1), pdl=True,
                                                 shared_bytes=2048)), [(P, I)])
    call(gpu(6), 6)
    assert driver.launches == [] and driver.extended == [
        (1000, (6, 4, 1), (128, 1, 1), 2048, None, [(4, (2, 4, 1)), (6, (1, 0, 0))])]
    with pytest.raises(RuntimeError, match="kernel main grid dimension x is no multiple of 2, the cluster's extent"):
        call(gpu(5), 5)
    assert len(driver.extended) == 1


def test_clusters_that_cannot_divide_the_grid_are_refused_while_compiling():
    a = tensor("A", (4,))
    with pytest.raises(ValueError, match="clusters of 2 blocks along y do not divide a grid of 3"):
        built(function((a,), launch((const(2), const(3)), copy_stmt(a, a), cluster=(1, 2, 1))), [(P,)])
