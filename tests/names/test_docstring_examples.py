"""The example in the docstring of every public function of T compiles for sm_90a in a kernel that declares the names it uses.

An example may use the names of PARAMETERS and NAMES: those that it uses and does not assign are declared.  It stands inside
of a launch (of a cluster launch: CLUSTER), before the launch (BEFORE), in an eager kernel (EAGER), or in a module (MODULE).
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from types import FunctionType

import numpy
import pytest

import tilelang
import tilelang.language as T
from tilelang.language.unavailable import UNAVAILABLE
from tilelang.target import Target
from tilelang.transform.pipeline import lower

WITHOUT: dict[str, str] = {}  # functions that need no example -> why
BEFORE = {"ClusterKernel", "CUDASourceCodeKernel", "Kernel", "launch_kernel", "launch_thread", "thread_binding"}
EAGER = {"const", "empty"}
MODULE = {"dynamic", "inline", "macro", "meta_class", "prim_func", "symbolic", "target"}
CLUSTER = {"alloc_cluster_barrier", "block_rank_in_cluster", "cluster_arrive", "cluster_arrive_relaxed", "cluster_sync",
           "cluster_wait", "copy_cluster", "ptx_arrive_cluster_barrier"}
HALF, FLOAT = "T.Tensor((512, 512), 'float16')", "T.Tensor((4096,), 'float32')"
PARAMETERS = {
    "A": HALF, "B": HALF, "C": "T.Tensor((512, 512), 'float32')", "dQ": "T.Tensor((512, 512), 'float32')",
    "X": FLOAT, "Y": FLOAT, "I": "T.Tensor((4096,), 'int32')", "image": "T.Tensor((2, 16, 16, 64), 'float16')",
    **dict.fromkeys(("a8", "b8"), "T.Tensor((4096,), 'int8')"),
    "S": "T.SymmTensor((4096,), 'float32')", "F": "T.SymmTensor((64,), 'int64')", "P": "T.SymmTensor((64, 16), 'int64')",
    "words": "T.SymmTensor((64,), 'int32')",
    "flags": "T.Tensor((64,), 'bool')", "p": "T.ptr", "n": "T.int32", "address": "T.int64",
}
NAMES = {
    "tx": "T.get_thread_binding(0)", "i": "bx * 128 + T.get_thread_binding(0)", "k": "by",
    "A_s": "T.alloc_shared((128, 64), 'float16')", "B_s": "T.alloc_shared((64, 128), 'float16')",
    **dict.fromkeys(("SA_s", "SB_s"), "T.alloc_shared((128, 2), 'float32')"),
    "C_s": "T.alloc_shared((128, 64), 'float16')", "D_s": "T.alloc_shared((64, 128), 'float16')",
    "A_sp": "T.alloc_shared((128, 32), 'float16')", "E_s": "T.alloc_shared((128, 4), 'int16')",
    "x_s": "T.alloc_shared((128,), 'float32')", "acc": "T.alloc_fragment((128, 128), 'float32')",
    "m": "T.alloc_fragment((128,), 'float32')", "dot": "T.alloc_local((1,), 'int32')",
    "v": "T.alloc_local((8,), 'float32')",
    "bits": "T.alloc_fragment((128, 128), 'int32')", **dict.fromkeys(("mask", "at"), "T.alloc_fragment((128,), 'int32')"),
    "r16": "T.alloc_local((8,), 'float16')", "s16": "T.alloc_local((4,), 'float16')",
    "r32": "T.alloc_local((64,), 'float32')", "bar": "T.alloc_barrier([128])", "cbar": "T.alloc_cluster_barrier([256])",
    "bars": "T.create_barriers(2)", "desc": "T.alloc_wgmma_desc()",
}
GLOBALS = {"SOURCE": 'extern "C" __global__ void scale(float* X, float* Y) { Y[threadIdx.x] = X[threadIdx.x]; }',
           "tilelang": tilelang, "numpy": numpy}


def functions() -> dict[str, FunctionType]:
    """The public functions of T that a program calls."""
    return {n: getattr(T, n) for n in T.__all__ if n not in UNAVAILABLE and inspect.isfunction(getattr(T, n))}


def example(value: object) -> str:
    """The example of a docstring."""
    return textwrap.dedent((inspect.getdoc(value) or "").partition("\nExample:\n")[2]).rstrip()


def program(name: str, text: str) -> str:
    """The source of a program that holds the example of T.name."""
    if name in MODULE:
        return text + "\nprogram = None"
    if name in EAGER:
        made = "" if name == "empty" else "out = T.empty((M, N), 'float16')\n"
        body = f"{text}\n{made}with T.Kernel(1):\n    T.copy(A[0:64, 0:64], out[0:64, 0:64])\nreturn out"
        return ("@tilelang.jit\ndef eager(A):\n" + textwrap.indent(body, "    ")
                + "\nprogram = eager.get_tir(numpy.zeros((64, 64), 'float16'))")
    used = [n.id for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Name)]
    stored = {n.id for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    params = ", ".join(f"{n}: {t}" for n, t in PARAMETERS.items() if n in used and n not in stored or n in "XY")
    body = [f"{n} = {t}" for n, t in NAMES.items() if n in used and n not in stored] if name not in BEFORE else []
    body += text.splitlines()
    if name not in BEFORE:
        launch = "T.ClusterKernel(4, 4, cluster_dims=(2, 1, 1)," if name in CLUSTER else "T.Kernel(1, 1,"
        body = [f"with {launch} threads=128) as (bx, by):", *("    " + line for line in body)]
    return f"@T.prim_func\ndef program({params}):\n" + textwrap.indent("\n".join(body), "    ")


def test_every_public_function_has_an_example_that_names_it():
    named = functions()
    missing = {n for n, f in named.items()
               if not any(re.search(rf"\bT\.{other}\b", example(f)) for other in named if named[other].__name__ == f.__name__)}
    assert missing == set(WITHOUT)


@pytest.mark.filterwarnings("ignore")
def test_every_example_is_compiled_for_sm_90a():
    faults = []
    for name, value in functions().items():
        if name in WITHOUT:
            continue
        source = program(name, example(value))
        try:
            made = tilelang.from_source(source, "program", T=T, **GLOBALS)
            if made is not None:
                lower(getattr(made, "func", made), Target({"kind": "cuda", "arch": "sm_90a"}), {})
        except Exception as e:
            faults.append(f"T.{name}: {type(e).__name__}: {e}\n{source}")
    assert not faults, f"{len(faults)}\n\n" + "\n\n".join(faults)
