"""Two numbers of a few bits of one byte become 16-bit floats together: exact for every byte and zero, in few instructions."""

import sys
from pathlib import Path

import ml_dtypes
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

TYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
PAIRS = {"float16": "tl::coded_pair<", "bfloat16": "tl::coded_pair_bfloat16<"}
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
@pytest.mark.parametrize("element", ["float16", "bfloat16"])
@pytest.mark.parametrize("options", [
    {}, {"first": 4, "step": -4}, {"zeros": None}, {"step": 2, "mask": 3}, {"first": 4, "step": 2, "mask": 3},
    {"first": 3, "step": 2, "mask": 7}])
def test_every_byte_and_zero(options, element, tmp_path):
    o, t = {"first": 0, "step": 4, "mask": 15, "zeros": "uint8", **options}, TYPES[element]
    kernel = kernel_of(decoded(**options, element=element))
    assert PAIRS[element] in print_kernel(kernel)
    w, s = np.arange(256, dtype=np.uint8), np.random.default_rng(0).uniform(-2, 2, 256).astype(t)
    got = np.zeros((256, 256, 2), t)
    run_on_host(kernel, {"W": w, "Z": w, "S": s, "C": got}, (256,), tmp_path)
    q = np.stack([w >> (o["first"] + v * o["step"]) & o["mask"] for v in range(2)], 1).astype(t)
    zeros = w.astype(t)[:, None, None] * t(o["zeros"] is not None)
    want = (q[None] - zeros) * s[None, :, None]
    np.testing.assert_array_equal(got.view(np.uint16), want.astype(t).view(np.uint16))


@pytest.mark.parametrize("options", [{}, {"zeros": None}, {"first": 3, "step": 2, "mask": 7}, {"element": "bfloat16"}])
def test_the_simulator_computes_what_single_conversions_do(options, monkeypatch):
    """Bit for bit the program without pairs."""
    w, s = np.arange(256, dtype=np.uint8), np.random.default_rng(1).uniform(-2, 2, 256)
    t = TYPES[options.get("element", "float16")]

    def result():
        program = lower(decoded(**options).func, SM80)
        loops = [x for x in walk(program.kernels[0].launch, Call) if x.op == "dequantise_pair"]
        out = run_device(program, {"W": w, "Z": w, "S": s.astype(t), "C": np.zeros((256, 256, 2), t)}, check=False).outputs["C"]
        return len(loops), out.view(np.uint16)

    (pairs, got) = result()
    monkeypatch.setattr(pack_conversions._Conversions, "_loop_of_weights", lambda conversions, loop: None)
    (without, want) = result()
    assert pairs == 1 and without == 0
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("what, options", [
    ("a number of two bytes", {"step": 6}), ("zeros of any size", {"zeros": "int32"}),
    ("another type", {"element": "float32"}), ("no mask of low bits", {"mask": 10}),
    ("a byte, whose numbers bfloat16 does not count from a power of two on", {"step": 0, "mask": 255, "element": "bfloat16"})])
def test_numbers_that_are_converted_one_by_one(what, options):
    assert "tl::coded_pair" not in print_kernel(kernel_of(decoded(**options))), what


def instructions(element):
    """The text of a GEMM with 64 weights a thread, and how often instructions occur."""
    f = DequantForm(16, 4096, 4096, 64, element, False, True, DequantTile(16, 64, 128, 4, 4))
    text = print_kernel(kernel_of(dequant_gemm(f), SM90))
    ops = opcodes(sass.disassemble(nvrtc.compile_cubin(text, "sm_90a").bytes))
    return text, ops, {name: sum(n for op, n in ops.items() if op.split(".")[0] == name) for name in (
        "PRMT", "HADD2", "HFMA2", "HMUL2", "I2F")}


@pytest.mark.skipif(not nvrtc.available() or sass.find_nvdisasm() is None, reason="no NVRTC or nvdisasm")
def test_instructions_of_a_product_of_bfloat16():
    """Two HADD2 and an HMUL2 for two weights; no conversion, which has a quarter of their rate."""
    text, ops, count = instructions("bfloat16")
    assert text.count("tl::coded_pair_bfloat16<0, 4, 15>(Ws") == 1 and count["I2F"] == 0, ops
    assert count["HMUL2"] <= 33 and 64 <= count["HADD2"] + count["HFMA2"] <= 70, ops


@pytest.mark.skipif(not nvrtc.available() or sass.find_nvdisasm() is None, reason="no NVRTC or nvdisasm")
def test_instructions_of_a_product():
    """64 weights of a thread: a load, a PRMT, a LOP3, an HFMA2 and an HMUL2 for two of them."""
    text, ops, count = instructions("float16")
    assert text.count("tl::coded_pair<0, 4, 15>(Ws") == 1 and count["I2F"] == 0, ops
    assert 32 <= count["PRMT"] <= 40 and count["HMUL2"] <= 33 and count["HFMA2"] >= 32, ops
