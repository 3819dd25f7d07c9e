"""Loops short of time: the descriptors of a turn are computed in the one before, what follows is not computed in them."""

import re

import numpy as np
import pytest

import tilelang.language as T
from tilelang.codegen.cuda import print_kernel
from tilelang.ir import For, Load, Store, const, numpy_dtype, replace, rewrite, seq, stmts_of, substitute, walk
from tilelang.ir.expr import Call
from tilelang.runtime import nvrtc
from tilelang.simulator import run_device
from tilelang.target import Target
from tilelang.transform import pipeline
from tilelang.transform.framework.pass_ import DEVICE, pass_
from tilelang.transform.pipeline import lower
from tilelang.transform.registers.pipeline_descriptors import MAX_DESCRIPTORS, descriptors_ahead, pipeline_descriptors

SM90 = Target({"kind": "cuda", "arch": "sm_90a"})
F8 = "float8_e4m3fn"


def program_of(k=1024, stages=3, **options):
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

    return lower(main.func, SM90, options)


def kernel_of(**options):
    return program_of(**options).kernels[0]


def before_the_pass(monkeypatch, **options):
    """The kernel as pipeline_descriptors finds it."""
    at = pipeline.DEVICE_PASSES.index(pipeline_descriptors)
    monkeypatch.setattr(pipeline, "DEVICE_PASSES", (*pipeline.DEVICE_PASSES[:at], *pipeline.DEVICE_PASSES[at + 1:]))
    return kernel_of(**options)


def tight(kernel):
    (loop,) = [x for x in walk(kernel.launch) if isinstance(x, For) and x.plan.tight]
    return loop


def products(x):
    return [e for e in walk(x) if isinstance(e, Call) and e.op == "wgmma"]


def update(s):
    """(variable, descriptor) that a statement carries to the next iteration; None for others."""
    opaque = isinstance(s, Store) and isinstance(s.value, Call) and s.value.op == "opaque_copy"
    return (s.buffer, s.value.args[0]) if opaque else None


def parts(d, more):
    """A descriptor and `more` bytes: (arguments, options, bytes behind them)."""
    return d.args, d.options.offset + more, d.options.having(offset=0)


@pytest.mark.parametrize("stages", [3, 4])
def test_the_descriptors_are_those_of_the_loop(monkeypatch, stages):
    """In the first iteration, and in each one from what the iteration before has left."""
    loop = tight(before_the_pass(monkeypatch, stages=stages))
    first, new = descriptors_ahead(loop)
    assert [v.dtype.bits for v, _ in first] == [64, 64] and len(first) <= MAX_DESCRIPTORS
    assert not any(x.op == "wgmma_descriptor" for e in products(new) for x in walk(e) if isinstance(x, Call))
    last = max(n for n, s in enumerate(stmts_of(new.body)) if products(s))
    found = {n: pair for n, s in enumerate(stmts_of(new.body)) if (pair := update(s))}
    updates = dict(found.values())
    assert set(updates) == {v for v, _ in first} and min(found) > last

    def given(values):
        """The operands of the products, where these are what the variables hold."""
        out = []
        for e in products(new):
            for d in e.args[1:3]:
                v, units = (d, 0) if isinstance(d, Load) else (d.a, int(d.b.value))
                out.append(parts(values[v.buffer], units * 16))
        return out

    def plain(k):
        return [parts(substitute(d, {loop.var: k}), 0) for e in products(loop) for d in e.args[1:3]]

    assert given(dict(first)) == plain(loop.start)
    assert given(updates) == plain(loop.var + 1)


def test_loops_without_such_descriptors_stay(monkeypatch):
    loop = tight(before_the_pass(monkeypatch))
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
    assert text[:at].count("unsigned long long descriptor") == 2
    assert loop.index("descriptor, descriptor_1,") < loop.index("descriptor, descriptor_1 + 1024ULL,") < loop.index(
        "tl::computed_here(descriptor, tl::wgmma_descriptor<") < loop.index("tl::mbarrier_wait(&As_Bs_full")
    assert "int tx_1 = tl::afresh(tx);" in loop
    behind = text[end:]
    assert re.search(r"\btx_1\b", behind) and not re.search(r"\btx\b", behind[:behind.index("tma_store")])


def test_only_where_it_was_asked_for():
    text = print_kernel(kernel_of(**{"tl.scale_prefetch": False}))
    assert "computed_here" not in text and "descriptor_1" not in text
    assert any(isinstance(x, Load) and x.buffer.name == "descriptor" for x in walk(kernel_of().launch))


def numbers():
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-2, 3, shape).astype(np.float32) for shape in ((64, 1024), (256, 1024)))
    s = rng.integers(1, 4, (64, 8)).astype(np.float32)
    want = sum(s[:, k:k + 1] * (a[:, k * 128:][:, :128] @ b[:, k * 128:][:, :128].T) for k in range(8))
    return {"A": a.astype(numpy_dtype(F8)), "B": b.astype(numpy_dtype(F8)), "S": s}, want


def test_the_simulator_runs_what_is_printed():
    args, want = numbers()
    program = program_of()
    assert program.kernels[0].launch.plan.sync_report.startswith("ordered")
    got = run_device(program, {**args, "C": np.zeros((64, 256), numpy_dtype("bfloat16"))}).outputs["C"]
    np.testing.assert_array_equal(got.astype(np.float32), want.astype(got.dtype).astype(np.float32))


def test_a_descriptor_of_the_wrong_stage_is_diagnosed(monkeypatch):
    """The verifier follows the variables: what it checks is what is printed."""
    @pass_(needs=DEVICE)
    def stale(func, cx):
        loop = next((x for x in walk(func, For) if x.plan.tight), None)

        def change(s):
            pair = update(s) if isinstance(s, Store) else None
            return None if pair is None else replace(s, value=substitute(s.value, {loop.var: loop.var + 1}))
        return func if loop is None else rewrite(func, change)

    at = pipeline.DEVICE_PASSES.index(pipeline_descriptors) + 1
    monkeypatch.setattr(pipeline, "DEVICE_PASSES", (*pipeline.DEVICE_PASSES[:at], stale, *pipeline.DEVICE_PASSES[at:]))
    (why,) = [x for x in kernel_of().launch.plan.report if x.startswith("compiled without")]
    assert "is read by a copy or a matrix instruction before what was written there is known to be complete" in why


@pytest.mark.skipif(not nvrtc.available(), reason="NVRTC is not installed")
def test_nothing_is_serialised():
    cubin = nvrtc.compile_cubin(print_kernel(kernel_of(k=1536)), "sm_90a")
    assert cubin.spills == 0 and "C75" not in cubin.log, cubin.log
