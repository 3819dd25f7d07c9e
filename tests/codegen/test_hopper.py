"""CUDA text of Hopper's operations, taken by NVRTC for sm_90a: no serialised wgmma, no spills, the right instructions."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import hopper_programs as hopper
from handmade import at, evaluate, kernel, local, packed, ramp, tensor, thread_vars, unrolled
from sass_text import opcodes

from tilelang.codegen.cuda.printer import print_kernel
from tilelang.errors import InternalError
from tilelang.ir import (Alloc, Buffer, If, Store, StringConst, call, cast, const, dtype, load, parse, replace, seq, to_text)
from tilelang.ir.verify import verify
from tilelang.runtime import nvrtc, sass
from tilelang.target.instructions import CACHE_HINTS
from tilelang.target.tensor_map import REDUCE_ADD, TensorMap
from tilelang.target.wgmma import WGMMA_ROWS, wgmma_row
from tilelang.transform.analysis.divergence import Divergence

needs_nvrtc = pytest.mark.skipif(not nvrtc.available(), reason="NVRTC is not installed")
needs_nvdisasm = pytest.mark.skipif(sass.find_nvdisasm() is None, reason="nvdisasm is not installed")
PROGRAMS = {
    "copy": lambda: hopper.copy(1000, 1000), "copy_hint": lambda: hopper.copy(64, 512, hint="evict_first"),
    "copy_plain": lambda: hopper.copy(1000, 1000, columns=32, width=64, out="plain"),
    "gemm_nt": lambda: hopper.gemm(500, 392, 264), "gemm_nn": lambda: hopper.gemm(500, 392, 264, trans_b=False),
    "gemm_bf16": lambda: hopper.gemm(256, 256, 128, "bfloat16", out="bfloat16"),
    "gemm_fp8": lambda: hopper.gemm(256, 256, 256, "float8_e4m3"),
    "gemm_f16_accumulator": lambda: hopper.gemm(256, 256, 128, acc="float16"),
}  # fmt: skip


def complaints(log: str) -> list[str]:
    """ptxas lines about serialised or patched-up wgmma."""
    return [line for line in log.splitlines() if re.search(r"C75\d\d", line)]


def compiled(k) -> nvrtc.Cubin:
    return nvrtc.compile_cubin(print_kernel(k), "sm_90a")


# ---- the two programs -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_are_valid_and_read_back(name):
    func = PROGRAMS[name]()
    assert verify(func, "DEVICE") == []
    again = parse(to_text(func))
    assert again == func and to_text(again) == to_text(func)
    assert hopper.kernel_of(again).tensor_maps[0].box == hopper.kernel_of(func).tensor_maps[0].box


@needs_nvrtc
@needs_nvdisasm
@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_compile_to_the_instructions_meant(name):
    cubin = compiled(hopper.kernel_of(PROGRAMS[name]()))
    (facts,) = cubin.kernels.values()
    assert complaints(cubin.log) == [] and cubin.spills == 0 and facts.stack_bytes == 0
    ops = opcodes(sass.disassemble(cubin.bytes))
    assert ops["UTMALDG"] > 0 and ops["LDL"] == ops["STL"] == 0
    assert (ops["UTMASTG"] > 0) == (name != "copy_plain")
    if name.startswith("gemm"):
        assert facts.registers == 168  # 65536 / 384, what setmaxnreg divides anew
        assert ops["QGMMA" if "fp8" in name else "HGMMA"] > 0
    else:
        assert ops["HGMMA"] == 0


@needs_nvrtc
@pytest.mark.parametrize("fault, code", [("touched", "C7517"), ("printf", "C7510")])
def test_the_log_tells_of_faults(fault, code):
    """The check above can fail: accumulators used, or a function called, between commit and wait."""
    row = wgmma_row(64, "float16", "float16", "float32")
    out, acc, tv = tensor("O", (128, 32)), local("acc", 32, "float32"), thread_vars()
    word = const(1 << 62, "uint64")
    between = evaluate("printf", StringConst("x")) if fault == "printf" else unrolled(
        32, lambda i: Store(acc, (i,), load(acc, (i,)) * 2.0))
    body = seq(Alloc(acc), unrolled(32, lambda i: Store(acc, (i,), load(out, (tv[0], i)))), evaluate("wgmma_fence"),
               evaluate("wgmma", at(acc, 0), word, word, const(True), row=row.name, a_major="k", b_major="k"),
               evaluate("wgmma_commit"), between, evaluate("wgmma_wait", n=0),
               unrolled(32, lambda i: Store(out, (tv[0], i), load(acc, (i,)))))
    assert code in complaints(compiled(kernel((out,), body, tvars=tv)).log)[0]


# ---- every form -------------------------------------------------------------------------------------------------------


def every_wgmma(n: int):
    """One instruction of each type and operand kind with n columns."""
    tv = thread_vars()
    tx = tv[0]
    words = tensor("words", (2,), "uint64")
    body, outs = [], {}
    seen = set()
    for row in WGMMA_ROWS.values():
        if row.shape[1] != n:
            continue
        dt = str(row.c_dtype)
        out = outs.setdefault(dt, tensor(f"O_{dt}", (128, row.c.registers), dt))
        for in_registers in (False, True):
            for a_major in row.majors if not in_registers else ("k",):
                for b_major in row.majors:
                    seen.add(row.function(in_registers, a_major, b_major))
                    acc, a = local("acc", row.c.registers, dt), local("a", row.a.registers, str(row.a_dtype))
                    a_words = Buffer("a_words", (4,), dtype("uint32"), "local", data=a.data)
                    first = at(a, 0) if in_registers else load(words, (const(0),))
                    fill = [unrolled(4, lambda i, w=a_words: Store(w, (i,), cast(tx + i, "uint32"))),
                            evaluate("wgmma_pin", at(a, 0), count=row.a.registers)] if in_registers else []
                    which = local("which", 1, "uint32")  # the metadata of a sparse instruction
                    given = [Alloc(which), Store(which, (const(0),), cast(tx, "uint32"))] if row.sparse else []
                    word = (load(which, (const(0),)),) if row.sparse else ()
                    used = [evaluate("wgmma_used", at(which, 0), count=1)] if row.sparse else []
                    body.append(If(tx >= 0, seq(
                        Alloc(acc), Alloc(a), *given, *fill, evaluate("wgmma_fence"),
                        evaluate("wgmma", at(acc, 0), first, load(words, (const(1),)), const(False), *word, row=row.name,
                                 a_major=a_major, b_major=b_major, **({"selector": 0} if row.sparse else {})),
                        evaluate("wgmma_commit"), evaluate("wgmma_wait", n=0), *used,
                        evaluate("wgmma_pin", at(acc, 0), count=row.c.registers),
                        unrolled(row.c.registers // 4, lambda i, o=out, c=acc: Store(
                            o, (tx, ramp(i * 4, 4)), load(c, (ramp(i * 4, 4),)))))))
    return kernel((words, *outs.values()), body, tvars=tv, name="every_wgmma"), seen


@needs_nvrtc
@pytest.mark.parametrize("n", [8, 96])
def test_every_type_and_operand_kind_assembles(n):
    k, seen = every_wgmma(n)
    # f16 twice and bf16: ss in 4 orders, rs in 2; others one each; once more for sparse ones, but tf32
    assert len(seen) == 2 * (3 * (4 + 2) + 8 * 2 + 4 * 2) + 2
    cubin = compiled(k)
    assert complaints(cubin.log) == [] and cubin.spills == 0


@needs_nvrtc
def test_every_size_assembles():
    tv = thread_vars()
    word = const(1 << 62, "uint64")
    out = tensor("O", (128,), "float32")
    body = []
    for n in range(8, 257, 8):
        acc = local("acc", n // 2, "float32")
        row = wgmma_row(n, "bfloat16", "bfloat16", "float32")
        body.append(If(tv[0] >= 0, seq(
            Alloc(acc), evaluate("wgmma_fence"),
            evaluate("wgmma", at(acc, 0), word, word, const(False), row=row.name, a_major="k", b_major="k"),
            evaluate("wgmma_commit"), evaluate("wgmma_wait", n=0), evaluate("wgmma_pin", at(acc, 0), count=n // 2),
            Store(out, (tv[0],), load(acc, (const(n // 2 - 1),))))))
    cubin = compiled(kernel((out,), body, tvars=tv))
    assert complaints(cubin.log) == []


def every_copy():
    """Each rank of each TMA form, bulk copies, barriers and fences."""
    tv = thread_vars()
    tile = hopper.shared("tile", 4096, "float32")
    bar = hopper.barriers("bar", (1, 4))
    g = tensor("G", (1024,), "float32")
    maps, body = [], []
    for rank in range(1, 6):
        t = tensor(f"T{rank}", (4,) * (rank - 1) + (64,), "float32")
        maps.append(TensorMap(f"map{rank}", t, (32,) + (1,) * (rank - 1), 128))
        origin = [const(0)] * rank
        name = {"map": f"map{rank}"}
        body += [evaluate("tma_prefetch", **name),
                 evaluate("tma_load", at(tile, 0), at(bar, 0), *origin, **name),
                 evaluate("tma_load", at(tile, 0), at(bar, 1), *origin, cache_hint="evict_last", **name),
                 evaluate("tma_store", at(tile, 0), *origin, **name),
                 evaluate("tma_store", at(tile, 0), *origin, cache_hint=CACHE_HINTS["evict_first"], **name),
                 evaluate("tma_reduce_add", at(tile, 0), *origin, **name)]
    body += [evaluate("bulk_load", at(tile, 0), at(g, 0), const(512, "uint32"), at(bar, 0)),
             evaluate("bulk_store", at(g, 512), at(tile, 0), const(512, "uint32")), evaluate("bulk_commit"),
             evaluate("bulk_wait", n=1, read=False), evaluate("bulk_wait", n=0, read=True),
             evaluate("mbarrier_expect_tx", at(bar, 0), const(64, "uint32")), evaluate("mbarrier_arrive", at(bar, 1)),
             evaluate("fence_proxy_async"), evaluate("fence_proxy_async_global")]
    body = seq(Alloc(tile), Alloc(bar), If(call("elect_one", (), "bool"), seq(*body)))
    return kernel((g,), body, tvars=tv, name="every_copy", tensor_maps=tuple(m.entry for m in maps),
                  shared_offsets=((tile, 0), (bar, 16384)), shared_bytes=16512)


@needs_nvrtc
@needs_nvdisasm
def test_every_copy_assembles():
    k = every_copy()
    text = print_kernel(k)
    assert "void every_copy(float*" not in text and "every_copy(float* __restrict__ G, const __grid_constant__" in text
    ops = opcodes(sass.disassemble(nvrtc.compile_cubin(text, "sm_90a").bytes))
    assert ops["UTMALDG"] == 10 and ops["UTMASTG"] == 10 and ops["UTMAREDG"] == 5 and ops["UTMACCTL"] == 5


# ---- text ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first, count, want", [(0, 2, "threadIdx.x < 256"), (2, 1, "threadIdx.x >= 256"),
                                                (1, 1, "threadIdx.x - 128u < 128u")])
def test_roles_are_ranges_of_threads(first, count, want):
    tv, out = thread_vars(), tensor("O", (384,))
    k = kernel((out,), If(hopper.in_groups(first, count), Store(out, (tv[0],), const(1.0))), tvars=tv, threads=384)
    assert f"if ({want}) {{" in print_kernel(k)


def test_roles_differ_between_the_threads_of_a_block():
    launch = hopper.gemm(128, 128, 128).body
    assert Divergence(launch).divergent(hopper.in_groups(2, 1))


def test_only_what_is_used_is_printed():
    text = print_kernel(hopper.kernel_of(hopper.copy(64, 128)))
    assert "wgmma" not in text and "tma_load_3d" not in text and "bulk_load" not in text
    assert "tma_" not in print_kernel(kernel((tensor("O", (4,)),), Store(tensor("O", (4,)), (const(0),), const(0.0))))


def test_a_store_through_a_map_makes_the_tensor_writable():
    """A tensor read by pointer and written by TMA is no read-only data."""
    func = hopper.copy(64, 128)
    b = next(t for _, t in func.buffers if t.name == "B")
    launch = func.body
    peek = Store(next(t for _, t in func.buffers if t.name == "A"), (const(0), const(0)), load(b, (const(0), const(0))))
    k = hopper.kernel_of(replace(func, body=replace(launch, body=seq(launch.body, peek))))
    assert "half_t* __restrict__ B" in print_kernel(k) and "const half_t* __restrict__ B" not in print_kernel(k)
    assert {x.name for x in k.written} == {"A", "B"}


def test_wrong_uses_are_told():
    tv, t = thread_vars(), tensor("T", (64,), "int64")
    tile = hopper.shared("tile", 64, "int64")
    entry = TensorMap("m", t, (32,)).entry

    def text(stmt):
        return print_kernel(kernel((t,), seq(Alloc(tile), stmt), tvars=tv, tensor_maps=(entry,),
                                   shared_offsets=((tile, 0),)))

    with pytest.raises(InternalError, match="other"):
        text(evaluate("tma_store", at(tile, 0), const(0), map="other"))
    with pytest.raises(InternalError, match="2 of 1 coordinates"):
        text(evaluate("tma_store", at(tile, 0), const(0), const(0), map="m"))
    assert "int64" not in REDUCE_ADD
    with pytest.raises(NotImplementedError, match="reduction of int64"):
        text(evaluate("tma_reduce_add", at(tile, 0), const(0), map="m"))


@needs_nvrtc
@pytest.mark.parametrize("dt", ["float16", "bfloat16"])
def test_floats_in_registers_become_words_of_two_halves(dt):
    """pack_half and pack_bfloat16: only for whole words of registers, and the same instructions as conversion and store."""
    tv, inp, out = thread_vars(), tensor("I", (128, 8), "float32"), tensor("O", (128, 8), dt)
    floats, halves = local("floats", 8, "float32"), local("halves", 10, dt)
    short = {"float16": "half", "bfloat16": "bfloat16"}[dt]

    def text(first: int) -> str:
        return print_kernel(packed(kernel((inp, out), seq(
            Alloc(floats), Alloc(halves), Store(floats, (ramp(0, 8),), load(inp, (tv[0], ramp(0, 8)))),
            Store(halves, (ramp(first, 8),), cast(load(floats, (ramp(0, 8),)), f"{dt}x8")),
            Store(out, (tv[0], ramp(0, 8)), load(halves, (ramp(first, 8),)))), tvars=tv)))

    pairs = f"tl::pack_{short}<8>(&halves[0], &floats[0])"
    assert pairs in text(0) and f"tl::cast_{short}(" in text(1).split("__global__")[1] and "pack_" not in text(1)
    own = {"float16": "half_t", "bfloat16": "bfloat16_t"}[dt]
    stored = f"tl::store<{own}, 8>(&halves[0], tl::cast_{short}(tl::load<float, 8>(&floats[0])))"
    header, body = text(1).split('extern "C"')[0], text(0).split('extern "C"')[1]  # the one that converts has what it needs
    plain = f'{header}extern "C"{body.replace(pairs, stored)}'
    assert stored in plain
    words, apart = (opcodes(sass.disassemble(nvrtc.compile_cubin(x, "sm_90a").bytes)) for x in (text(0), plain))
    assert words == apart and words["F2FP"] == 4
