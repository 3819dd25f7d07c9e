"""Loops short of time: the descriptors of a turn are computed in the one before, what follows is not computed in them."""

import re

import pytest

import tilelang.language as T
from tilelang.codegen.cuda.printer import CudaPrinter, print_kernel
from tilelang.codegen.cuda.tight_loops import MOST_DESCRIPTORS, TightLoops, descriptors_ahead
from tilelang.ir import Evaluate, For, Load, const, replace, rewrite, seq, stmts_of, substitute, walk
from tilelang.ir.expr import Call
from tilelang.runtime import nvrtc
from tilelang.target import Target
from tilelang.transform.pipeline import lower

SM90 = Target({"kind": "cuda", "arch": "sm_90a"})
F8 = "float8_e4m3fn"


def kernel_of(k=1024, stages=3, **options):
    """A product of float8 that is scaled every 128 of k, in two parts of its columns."""
    @T.prim_func
    def main(A: T.Tensor((64, k), F8), B: T.Tensor((256, k), F8), S: T.Tensor((64, k // 128), "float32"),
             C: T.Tensor((64, 256), "bfloat16")):
        with T.Kernel(1, threads=128) as _:
            As, Bs = T.alloc_shared((64, 128), F8), T.alloc_shared((256, 128), F8)
            part, total = T.alloc_fragment((64, 256), "float32"), T.alloc_fragment((64, 256), "float32")
            row = T.alloc_fragment((64,), "float32")
            T.clear(total)
            for ko in T.Pipelined(k // 128, num_stages=stages):
                T.copy(A[0, ko * 128], As)
                T.copy(B[0, ko * 128], Bs)
                for i in T.Parallel(64):
                    row[i] = S[i, ko]
                T.gemm(As, Bs, part, transpose_B=True, clear_accum=True)
                for i, j in T.Parallel(64, 256):
                    total[i, j] += part[i, j] * row[i]
            T.copy(total, C)

    return lower(main.func, SM90, options).kernels[0]


def tight(kernel):
    (loop,) = [x for x in walk(kernel.launch) if isinstance(x, For) and x.attr("tight")]
    return loop


def products(x):
    return [e for e in walk(x) if isinstance(e, Call) and e.op == "wgmma"]


def is_call(s, op):
    return isinstance(s, Evaluate) and s.call.op == op


def parts(d, more):
    """A descriptor and `more` bytes: (arguments, options, bytes behind them)."""
    return d.args, d.options.offset + more, d.options.having(offset=0)


@pytest.mark.parametrize("stages", [3, 4])
def test_the_descriptors_are_those_of_the_loop(stages):
    """In the first turn, and in each one from what the turn before has left."""
    loop = tight(kernel_of(stages=stages))
    first, new = descriptors_ahead(loop)
    assert [v.dtype.bits for v, _ in first] == [64, 64] and len(first) <= MOST_DESCRIPTORS
    assert not any(x.op == "wgmma_descriptor" for e in products(new) for x in walk(e) if isinstance(x, Call))
    last = max(n for n, s in enumerate(stmts_of(new.body)) if products(s))
    found = {n: s.call.args for n, s in enumerate(stmts_of(new.body)) if is_call(s, "computed_here")}
    updates = dict(found.values())
    assert set(updates) == {v for v, _ in first} and min(found) > last

    def given(values):
        """The operands of the products, where these are what the variables hold."""
        out = []
        for e in products(new):
            for d in e.args[1:3]:
                v, units = (d, 0) if d in values else (d.a, int(d.b.value))
                out.append(parts(values[v], units * 16))
        return out

    def plain(k):
        return [parts(substitute(d, {loop.var: k}), 0) for e in products(loop) for d in e.args[1:3]]

    assert given(dict(first)) == plain(loop.start)
    assert given(updates) == plain(loop.var + 1)


def test_loops_without_such_descriptors_stay():
    loop = tight(kernel_of())
    body = list(stmts_of(loop.body))
    assert descriptors_ahead(replace(loop, body=seq(*(s for s in body if not products(s)))))[0] == []
    last = max(n for n, s in enumerate(body) if products(s))
    behind = replace(loop, body=seq(*body, body[last]))  # a product behind the last commit
    assert descriptors_ahead(behind) == ([], behind)
    bound = rewrite(loop, lambda x: const(0, "int32") if x is loop.var else None)
    assert descriptors_ahead(bound)[0] == []


def test_the_text():
    kernel = kernel_of()
    text = print_kernel(kernel)
    at = text.rindex("for (int ko")
    loop, end = text[at:], text.index("alignas(16) bfloat16_t packed")
    assert issubclass(CudaPrinter, TightLoops)
    assert text[:at].count("unsigned long long descriptor") == 2
    assert loop.index("descriptor, descriptor_1,") < loop.index("descriptor, descriptor_1 + 1024ULL,") < loop.index(
        "tl::computed_here(descriptor, tl::wgmma_descriptor<") < loop.index("tl::mbarrier_wait(&As_Bs_full")
    assert "int tx_1 = tl::afresh(tx);" in loop
    behind = text[end:]
    assert re.search(r"\btx_1\b", behind) and not re.search(r"\btx\b", behind[:behind.index("tma_store")])


def test_only_where_it_was_asked_for():
    text = print_kernel(kernel_of(**{"tl.step_tiles": False}))
    assert "computed_here" not in text and "descriptor_1" not in text
    assert not any(isinstance(x, Load) and x.buffer.name == "descriptor" for x in walk(kernel_of().launch))


@pytest.mark.skipif(not nvrtc.available(), reason="NVRTC is not installed")
def test_nothing_is_serialised():
    cubin = nvrtc.compile_cubin(print_kernel(kernel_of(k=1536)), "sm_90a")
    assert cubin.spills == 0 and "C75" not in cubin.log, cubin.log
