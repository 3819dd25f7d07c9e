"""Code outside T.Kernel, workspaces, and the lines of T.print on every execution."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import tilelang
import tilelang.language as T
from tilelang.errors import TileLangError

A100 = {"kind": "cuda", "arch": "sm_80"}


@T.prim_func
def serial_work(A: T.Tensor((8,), "float32"), B: T.Tensor((8,), "float32"), n: T.int32):
    for i in range(8):
        if i < n:
            B[i] = A[i] + 1.0
        else:
            B[i] = 0.0
    for i in T.Parallel(8):
        B[i] = B[i] * 2.0
    with T.Kernel(8, threads=32) as bx:
        B[bx] = B[bx] + 100.0
    for k in range(3):
        B[k] = 7.0
        with T.Kernel(1, threads=1):
            B[k] = B[k] + 1.0
    B[7] = A[0] + 5.0


@pytest.mark.parametrize("backend", ["tvm_ffi", "tile"])
def test_work_outside_kernels_runs_in_order_on_the_cpu(backend):
    b = np.full(8, -1, np.float32)
    tilelang.compile(serial_work, target="llvm", execution_backend=backend)(np.arange(8, dtype=np.float32), b, 5)
    assert list(b) == [8, 8, 8, 108, 110, 100, 100, 5]


def test_work_outside_kernels_is_refused_for_a_gpu():
    with pytest.raises(TileLangError, match="outside T.Kernel cannot run on the host") as e:
        tilelang.compile(serial_work, target=A100)
    assert e.value.kind == "collective-outside-kernel"

    @T.prim_func
    def stores(B: T.Tensor((8,), "float32")):
        for i in range(8):
            B[i] = 1.0

    with pytest.raises(TileLangError, match="outside T.Kernel cannot run on the host") as e:
        tilelang.compile(stores, target=A100)
    assert e.value.kind == "host-statement"


@pytest.mark.spec("T.thread_binding")
def test_hand_written_thread_loops_are_a_launch():
    @T.prim_func
    def main(A: T.Tensor((64,), "float32"), B: T.Tensor((64,), "float32")):
        for bx in T.thread_binding(2, thread="blockIdx.x"):
            for tx in T.thread_binding(32, thread="threadIdx.x"):
                B[bx * 32 + tx] = A[bx * 32 + tx] + 1.0

    a = np.arange(64, dtype=np.float32)
    for target, backend in (("llvm", "tvm_ffi"), (A100, "simulator")):
        b = np.zeros(64, np.float32)
        tilelang.compile(main, target=target, execution_backend=backend)(a, b)
        assert np.array_equal(b, a + 1)


@pytest.mark.parametrize("target, backend", [("llvm", "tvm_ffi"), ("llvm", "tile"), (A100, "simulator")])
def test_a_global_workspace_made_in_a_kernel_is_one_for_all_blocks(target, backend):
    @T.prim_func
    def main(A: T.Tensor((64,), "float32"), B: T.Tensor((64,), "float32")):
        with T.Kernel(2, threads=32) as bx:
            W = T.alloc_global((64,), "float32")
            for i in T.Parallel(32):
                W[bx * 32 + i] = A[bx * 32 + i] + 1.0
            for i in T.Parallel(32):
                B[bx * 32 + i] = W[bx * 32 + i] * 2.0

    a, b = np.arange(64, dtype=np.float32), np.zeros(64, np.float32)
    tilelang.compile(main, target=target, execution_backend=backend)(a, b)
    assert np.array_equal(b, (a + 1) * 2)


@pytest.mark.parametrize("target, backend", [("llvm", "tvm_ffi"), ("llvm", "tile"), (A100, "simulator")])
def test_host_conditions_are_checked_at_every_call(target, backend):
    n = T.dynamic("n")

    @T.prim_func
    def main(A: T.Tensor((n,), "float32"), k: T.int32):
        T.assume(n % 8 == 0)
        if k > 5:
            assert n > 8, "too short"
        with T.Kernel(n, threads=32) as bx:
            T.assume(k < n)
            last = k + 1
            T.assume(last < 100)
            A[bx] = 1.0

    kernel = tilelang.compile(main, target=target, execution_backend=backend)
    for size, k, text in ((12, 0, r"Assume: \(n % 8\) == 0"), (16, 16, "Assume: k < n"), (8, 6, "too short"),
                          (200, 99, r"Assume: \(k \+ 1\) < 100")):
        a = np.zeros(size, np.float32)
        with pytest.raises(RuntimeError, match=text):
            kernel(a, k)
        assert not a.any()
    kernel(a, 7)
    assert a.all()


PRINTS = """
import numpy as np, tilelang, tilelang.language as T

@T.prim_func
def main(A: T.Tensor((4,), "float32")):
    with T.Kernel(1, threads=2) as bx:
        tx = T.get_thread_binding()
        S = T.alloc_shared((2,), "float16")
        L = T.alloc_local((1,), "bool")
        for i in T.Parallel(2):
            S[i] = A[i]
        L[0] = tx > 0
        T.print(tx, msg="t")
        T.print(S)
        T.print(L, msg="l")
        T.print(msg="only")
        T.print(A[1] > 0.5, msg="b")

for target, backend in (("llvm", "tvm_ffi"), ("llvm", "tile"), ({"kind": "cuda", "arch": "sm_80"}, "simulator")):
    print("==", flush=True)
    tilelang.compile(main, target=target, execution_backend=backend)(np.arange(4, dtype=np.float32))
"""

LINES = """
msg='t' BlockIdx=(0, 0, 0), ThreadIdx=(0, 0, 0): dtype=int value=0
msg='t' BlockIdx=(0, 0, 0), ThreadIdx=(1, 0, 0): dtype=int value=1
msg='buffer<S, float16>' BlockIdx=(0, 0, 0), ThreadIdx=(0, 0, 0): buffer=S, index=0, dtype=half value=0.000000
msg='buffer<S, float16>' BlockIdx=(0, 0, 0), ThreadIdx=(0, 0, 0): buffer=S, index=1, dtype=half value=1.000000
msg='l' BlockIdx=(0, 0, 0), ThreadIdx=(0, 0, 0): buffer=L, index=0, dtype=bool value=false
msg='l' BlockIdx=(0, 0, 0), ThreadIdx=(1, 0, 0): buffer=L, index=0, dtype=bool value=true
msg='only' BlockIdx=(0, 0, 0), ThreadIdx=(0, 0, 0)
msg='only' BlockIdx=(0, 0, 0), ThreadIdx=(1, 0, 0)
msg='b' BlockIdx=(0, 0, 0), ThreadIdx=(0, 0, 0): dtype=bool value=true
msg='b' BlockIdx=(0, 0, 0), ThreadIdx=(1, 0, 0): dtype=bool value=true
"""


@pytest.mark.spec("T.print")
def test_printed_lines_are_the_same_on_every_execution(tmp_path):
    file = tmp_path / "prints.py"
    file.write_text(PRINTS)
    done = subprocess.run([sys.executable, str(file)], capture_output=True, text=True, check=True,
                          env={**os.environ, "PYTHONPATH": str(Path(tilelang.__file__).parents[1])})
    parts = done.stdout.split("==")[1:]
    assert len(parts) == 3
    for part in parts:
        found = [x for x in part.splitlines() if x.startswith("msg=")]
        assert sorted(found) == sorted(LINES.strip().splitlines())
