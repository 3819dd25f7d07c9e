"""Two numbers of a few bits of one byte become float16 together: exact for every byte and zero, and in five instructions."""

import sys
from pathlib import Path

import numpy as np
import pytest

import tilelang.language as T
from tilelang.codegen.cuda.printer import print_kernel
from tilelang.ir import Call, walk
from tilelang.library.quantised.dequant_matmul import DequantForm, DequantTile, dequant_gemm
from tilelang.runtime import nvrtc, sass
from tilelang.target import Target
from tilelang.simulator import run_device
from tilelang.transform.pipeline import lower
from tilelang.transform.registers import pack_conversions

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "codegen"))
from host_cuda import available, run_on_host
from sass_text import opcodes

SM80, SM90 = (Target({"kind": "cuda", "arch": x}) for x in ("sm_80", "sm_90a"))


def decoded(first=0, step=4, mask=15, zeros="uint8", element="float16"):
    """C[b, t] = both numbers of byte t, less zero b, times a scale."""
    @T.prim_func
    def main(W: T.Tensor((256,), "uint8"), Z: T.Tensor((256,), zeros or "uint8"), S: T.Tensor((256,), element),
             C: T.Tensor((256, 256, 2), element)):
        with T.Kernel(256, threads=256) as b:
            t = T.get_thread_binding()
            D = T.alloc_local((2,), element)
            for v in T.unroll(2):
                q = T.cast((W[t] >> T.cast(first + v * step, "uint8")) & T.uint8(mask), "int32")
                if zeros is not None:
                    D[v] = T.cast(q - T.cast(Z[b], "int32"), element) * S[t]
                else:
                    D[v] = S[t] * T.cast(q, element)
            for v in T.unroll(2):
                C[b, t, v] = D[v]

    return main


def kernel_of(program, target=SM80):
    return lower(program.func, target, {"tl.enable_hopper": target is SM90}).kernels[0]


@pytest.mark.skipif(not available(), reason="g++ and a CPU with F16C are needed")
@pytest.mark.parametrize("options", [
    {}, {"first": 4, "step": -4}, {"zeros": None}, {"step": 2, "mask": 3}, {"first": 4, "step": 2, "mask": 3},
    {"first": 3, "step": 2, "mask": 7}])
def test_every_byte_and_zero(options, tmp_path):
    o = {"first": 0, "step": 4, "mask": 15, "zeros": "uint8", **options}
    kernel = kernel_of(decoded(**options))
    assert "tl::coded_pair<" in print_kernel(kernel)
    w, s = np.arange(256, dtype=np.uint8), np.random.default_rng(0).uniform(-2, 2, 256).astype(np.float16)
    got = np.zeros((256, 256, 2), np.float16)
    run_on_host(kernel, {"W": w, "Z": w, "S": s, "C": got}, (256,), tmp_path)
    q = np.stack([w >> (o["first"] + v * o["step"]) & o["mask"] for v in range(2)], 1).astype(np.float16)
    zeros = w.astype(np.float16)[:, None, None] * np.float16(o["zeros"] is not None)
    want = (q[None] - zeros) * s[None, :, None]
    np.testing.assert_array_equal(got.view(np.uint16), want.astype(np.float16).view(np.uint16))


@pytest.mark.parametrize("options", [{}, {"zeros": None}, {"first": 3, "step": 2, "mask": 7}])
def test_the_simulator_computes_what_single_conversions_do(options, monkeypatch):
    """Bit for bit the program without pairs."""
    w, s = np.arange(256, dtype=np.uint8), np.random.default_rng(1).uniform(-2, 2, 256).astype(np.float16)

    def result():
        program = lower(decoded(**options).func, SM80)
        loops = [x for x in walk(program.kernels[0].launch, Call) if x.op == "dequantise_pair"]
        out = run_device(program, {"W": w, "Z": w, "S": s, "C": np.zeros((256, 256, 2), np.float16)}, check=False).outputs["C"]
        return len(loops), out.view(np.uint16)

    (pairs, got) = result()
    monkeypatch.setattr(pack_conversions._Conversions, "_loop_of_weights", lambda conversions, loop: None)
    (without, want) = result()
    assert pairs == 1 and without == 0
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("what, options", [
    ("a number of two bytes", {"step": 6}), ("zeros of any size", {"zeros": "int32"}),
    ("another type", {"element": "bfloat16"}), ("no mask of low bits", {"mask": 10})])
def test_numbers_that_are_converted_one_by_one(what, options):
    assert "tl::coded_pair<" not in print_kernel(kernel_of(decoded(**options))), what


@pytest.mark.skipif(not nvrtc.available() or sass.find_nvdisasm() is None, reason="no NVRTC or nvdisasm")
def test_instructions_of_a_product():
    """64 weights of a thread: a load, a PRMT, a LOP3, an HFMA2 and an HMUL2 for two of them."""
    f = DequantForm(16, 4096, 4096, 64, "float16", False, True, DequantTile(16, 64, 128, 4, 4))
    text = print_kernel(kernel_of(dequant_gemm(f), SM90))
    ops = opcodes(sass.disassemble(nvrtc.compile_cubin(text, "sm_90a").bytes))
    count = {name: sum(n for op, n in ops.items() if op.split(".")[0] == name) for name in ("PRMT", "HFMA2", "HMUL2", "I2F")}
    assert text.count("tl::coded_pair<0, 4, 15>(Ws") == 1 and count["I2F"] == 0, ops
    assert 32 <= count["PRMT"] <= 40 and count["HMUL2"] <= 33 and count["HFMA2"] >= 32, ops
