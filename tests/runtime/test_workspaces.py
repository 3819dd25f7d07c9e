"""Workspaces of launches (T.alloc_global, the counter of T.sync_grid): allocated, cleared and freed on the stream."""

import ctypes

import pytest
from everywhere import SM80
from fake_driver import Driver, I, OnGpu, P

import numpy as np

import tilelang.language as T
from tilelang.runtime.host_engine import HostLibrary, compile_object
from tilelang.runtime.host_stub import stub_text
from tilelang.runtime.launchers import GpuLauncher, launch_attributes
from tilelang.runtime.signature import signature_of
from tilelang.target import Target
from tilelang.transform.lower.device_program import GRID_BARRIER
from tilelang.transform.pipeline import lower


def built(f, types):
    program = lower(f.func, Target(SM80), {})
    sig = signature_of(f.func, None)
    text = stub_text(sig, GpuLauncher(program.host, program.kernels), set(sig.symbols), ("call",))
    driver = Driver(program.kernels, types)
    return HostLibrary(compile_object(text), ("tl_call",), driver.symbols()).function("tl_call", driver, release_gil=False), \
        driver, program.kernels


def staged():
    """Y = reversed 2 * X through a workspace of run-time size, with a barrier of the grid between."""
    n = T.dynamic("n")

    @T.prim_func
    def f(X: T.Tensor((n,), "float32"), Y: T.Tensor((n,), "float32")):
        with T.Kernel(4, threads=32) as bx:
            W = T.alloc_global((n,), "float32")
            V = T.alloc_global((3, 5), "float16")
            for i in T.serial(T.ceildiv(n, 128)):
                k = (i * 4 + bx) * 32 + T.get_thread_binding()
                if k < n:
                    W[k] = X[k] * 2
            V[0, 0] = 1
            T.sync_grid()
            for i in T.serial(T.ceildiv(n, 128)):
                k = (i * 4 + bx) * 32 + T.get_thread_binding()
                if k < n:
                    Y[k] = W[n - 1 - k]

    return f


@pytest.mark.spec("L6:alloc_global", "T.alloc_global", "T.sync_grid", "L15:sync_grid")
def test_one_allocation_a_launch_is_cleared_where_needed_and_freed():
    call, driver, (kernel,) = built(staged(), [()])
    assert [b.name for b in kernel.workspaces] == [GRID_BARRIER.name, "V", "W"]
    assert launch_attributes(kernel.launch) == [(2, (1,))]
    x, y = (OnGpu(np.zeros(300, np.float32)) for _ in range(2))
    call(x, y)
    total = 256 + 256 + 1280 + 256  # counter, V, W rounded up, and never nothing
    assert driver.memory == [("allocate", total), ("clear", 1 << 20, 256), ("free", 1 << 20)]
    assert driver.extended[0][5] == [(2, (1, 0, 0))]


@pytest.mark.spec("L6:alloc_global")
def test_addresses_follow_the_parameters():
    @T.prim_func
    def f(Y: T.Tensor((8,), "float32"), n: T.int32):
        with T.Kernel(1, threads=8):
            W = T.alloc_global((n, 7), "float32")
            t = T.get_thread_binding()
            W[t, 0] = t
            Y[t] = W[t, 0]

    call, driver, (kernel,) = built(f, [(P, I, ctypes.c_int64)])
    y = OnGpu(np.zeros(8, np.float32))
    call(y, 20)
    assert driver.launches[0][5] == [y.array.ctypes.data, 20, 1 << 20]
    assert driver.memory == [("allocate", 768 + 256), ("free", 1 << 20)]
    driver.memory_result = 2
    with pytest.raises(RuntimeError, match="its workspace cannot be allocated"):
        call(y, 20)
    assert len(driver.launches) == 1


@pytest.mark.spec("L6:alloc_global")
def test_a_workspace_of_several_launches_is_freed_behind_them_and_where_the_host_refuses():
    @T.prim_func
    def f(A: T.Tensor((40,), "float32"), O: T.Tensor((40,), "float32"), n: T.int32):
        W = T.alloc_global((40 * n,), "float32")
        with T.Kernel(1, threads=40):
            W[T.get_thread_binding()] = A[T.get_thread_binding()]
        assert n < 9, "n is too large"
        with T.Kernel(1, threads=40):
            O[T.get_thread_binding()] = W[39 - T.get_thread_binding()]

    call, driver, kernels = built(f, [(P, P, I), (P, P, I)])
    a, o = (OnGpu(np.zeros(40, np.float32)) for _ in range(2))
    call(a, o, 2)
    assert [k.workspaces for k in kernels] == [(), ()]
    assert driver.memory == [("allocate", 512 + 256), ("free", 1 << 20)]
    assert [1 << 20 in launch[5] for launch in driver.launches] == [True, True]
    with pytest.raises(RuntimeError, match="n is too large"):
        call(a, o, 9)
    assert driver.memory[2:] == [("allocate", 1536 + 256), ("free", 1 << 20)] and len(driver.launches) == 3
