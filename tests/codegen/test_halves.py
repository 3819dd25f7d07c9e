"""Elements of 16-bit types in CUDA text: packed in pairs, without the types' headers where they are only moved."""

import re

import pytest

import tilelang.language as T
from tilelang.codegen.cuda.printer import print_kernel
from tilelang.runtime import nvrtc
from tilelang.target import Target
from tilelang.transform.pipeline import lower

HEADERS = {"float16": "cuda_fp16.h", "bfloat16": "cuda_bf16.h"}


def text_of(program, arch="sm_90a"):
    (kernel,) = lower(program.func, Target({"kind": "cuda", "arch": arch}), {"tl.enable_hopper": True}).kernels
    return print_kernel(kernel)


def assemble(text, arch="sm_90a"):
    if not nvrtc.available():
        pytest.skip("no NVRTC")
    return nvrtc.compile_cubin(text, arch)


def product(dt, work=False, source=None):
    @T.prim_func
    def main(A: T.Tensor((128, 64), dt), B: T.Tensor((64, 64), dt), C: T.Tensor((128, 64), dt)):
        with T.Kernel(1, threads=128):
            if source is not None:
                T.import_source(source)
            As, Bs = T.alloc_shared((128, 64), dt), T.alloc_shared((64, 64), dt)
            S, total = T.alloc_fragment((128, 64), "float32"), T.alloc_fragment((128, 64), "float32")
            P = T.alloc_fragment((128, 64), dt)
            T.copy(A, As)
            T.copy(B, Bs)
            T.clear(total)
            for _ in T.serial(2):
                T.gemm(As, Bs, S, clear_accum=True)
                for i, j in T.Parallel(128, 64):
                    S[i, j] = T.erf(S[i, j])  # in a loop with wgmma, this keeps the values out of named registers
                T.copy(S, P)
                if work:
                    for i, j in T.Parallel(128, 64):
                        P[i, j] = P[i, j] + P[i, j]
                T.gemm(P, Bs, total)
            T.copy(total, C)

    return main


@pytest.mark.parametrize("dt", HEADERS)
def test_elements_that_are_only_moved_need_no_header(dt):
    text = text_of(product(dt))
    assert "#include" not in text and re.search(r"^struct (half_t|bfloat16_t) \{ unsigned short bits; \};", text)
    assert assemble(text).bytes


@pytest.mark.parametrize("dt", HEADERS)
def test_elements_that_are_worked_with_come_from_the_header(dt):
    text = text_of(product(dt, work=True))
    assert f"#include <{HEADERS[dt]}>" in text and "bits;" not in text
    assert assemble(text).bytes


def test_the_users_source_may_use_what_the_header_defines():
    text = text_of(product("float16", source="__device__ half one() { return __float2half(1.0f); }"))
    assert "#include <cuda_fp16.h>" in text
    assert assemble(text).bytes


@pytest.mark.parametrize("dt,name,instruction", [("float16", "pack_half", "cvt.rn.f16x2.f32"),
                                                 ("bfloat16", "pack_bfloat16", "cvt.rn.bf16x2.f32")])
def test_floats_become_operands_in_pairs(dt, name, instruction):
    text = text_of(product(dt))
    assert re.search(rf"tl::{name}<2>\(&P\[[^;]*\], &S\[[^;]*\]\);", text)
    assert not re.search(r"P\[[^\n]*\] = (half_t|bfloat16_t)\(", text) and instruction in text


@pytest.mark.parametrize("dt", HEADERS)
def test_pairs_assemble_where_no_instruction_makes_them(dt):
    text = text_of(product(dt))
    start = text.index("template <int N> TL_DEVICE void pack_")
    section = text[start:text.index("\n}\n", start) + 3]
    kind, name = text.split()[1], section.split("void ")[1].split("(")[0]
    assert assemble(f"struct {kind} {{ unsigned short bits; }};\n#define TL_DEVICE __device__ __forceinline__\n{section}"
                    f'extern "C" __global__ void main_kernel(const float* from, {kind}* to) {{\n'
                    f"  float x[4]; alignas(16) {kind} y[4];\n  for (int i = 0; i < 4; ++i) x[i] = from[i];\n"
                    f"  {name}<4>(y, x);\n  for (int i = 0; i < 4; ++i) to[i] = y[i];\n}}\n", "sm_75").bytes


def test_what_the_small_front_end_leaves_out_still_compiles():
    text = 'extern "C" __global__ void main_kernel(cudaTextureObject_t t, float* x) { x[0] = tex1Dfetch<float>(t, 0); }'
    assert assemble(text).bytes
