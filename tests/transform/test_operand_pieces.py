"""Operands in registers that are computed by pieces, between the steps of their GEMM: which loops, and right results."""

import re

import numpy as np
import pytest
from scheduled_programs import attention

from tilelang.codegen.cuda.printer import print_kernel
from tilelang.ir import Call, Evaluate, For, Load, Store, const, replace, rewrite, stmts_of, walk
from tilelang.library.attention import backward
from tilelang.library.attention.problem import attention_problem
from tilelang.library.attention.tile_cost import machine_of
from tilelang.library.place import Place
from tilelang.simulator import run_device
from tilelang.target import Target
from tilelang.transform import pipeline
from tilelang.transform.registers import operand_pieces as pieces

SM90A = Target({"kind": "cuda", "arch": "sm_90a"})
SEQ, DIM = 128, 64


def lowered():
    """The kernels of attention's gradients: blocks of queries compute dS in registers in front of the GEMM of dQ."""
    at, x = Place(SM90A), np.zeros((1, SEQ, 1, DIM), np.float16)
    given = {"q": x, "k": x, "v": x, "out": x, "grad_out": x}
    p = attention_problem({**given, **dict.fromkeys(("out", "cu_seqlens_q", "cu_seqlens_k"))}, False, causal=False, window=None,
                          layout="bshd", scale=None, with_lse=False)
    form, _ = backward.backward_form(p, machine_of(SM90A), given, at, True, backward.PLAIN)
    return pipeline.lower(backward._program(form, 132).func, SM90A, {"tl.enable_fast_math": True})


@pytest.fixture(scope="module")
def made():
    return lowered()


def loop_of(kernel):
    text = print_kernel(kernel, fast_math=True)
    return text[text.rindex("for (int n = 0;"):]


def test_steps_of_a_gemm_stand_behind_the_pieces_of_its_operand(made):
    loop = loop_of(made.kernels[0])
    found = re.findall(r"\n *(dS)\[|wgmma_pin<(8)>\(&dS\[\d+\]|(wgmma_fence)|\(&dq\[0\], &dS\[(\d+)\]", loop)
    order = ["".join(x) for x in found]
    first = order.index("dS")
    assert order[first:first + 16] == [x for k in (0, 8, 16, 24) for x in ("dS", "8", "wgmma_fence", str(k))]


def test_the_gradients_are_right(made):
    rng = np.random.default_rng(0)
    q, k, v, o, do = (rng.standard_normal((1, SEQ, 1, DIM)).astype(np.float16) for _ in range(5))
    lse = np.full((1, 1, SEQ), 5.0, np.float32)
    given = {"Q": q, "K": k, "V": v, "O": o, "dO": do, "LSE": lse, "dLSE": np.zeros(1, np.float32),
             "scale": DIM**-0.5, "first": 0}
    given |= {n: np.zeros((1, 1, 1, 1), np.int32) for n in ("Rows", "Columns")}
    given |= {n: np.zeros(1, np.float32) for n in ("X0", "X1")} | {n: np.zeros((1, 192), np.float32) for n in "LD"}
    given |= {"Sum": np.zeros((1, 1, 1), np.float32), **{n: np.zeros_like(q) for n in ("dQ", "dK", "dV")}}
    got = run_device(made, given).outputs
    s = np.exp(q[0, :, 0].astype(float) @ k[0, :, 0].astype(float).T * DIM**-0.5 - 5.0)
    ds = s * (do[0, :, 0].astype(float) @ v[0, :, 0].astype(float).T - (o * do.astype(float)).sum(-1)[0])
    assert np.abs(got["dQ"][0, :, 0] - ds @ k[0, :, 0].astype(float) * DIM**-0.5).max() < 2e-2


def fills(launch):
    return sum(isinstance(s, For) and any(x.buffer.name == "dS" for x in walk(s, Store)) for x in walk(launch.body, For)
               for s in stmts_of(x.body))


@pytest.mark.parametrize("what", ["read", "order", "fence"])
def test_other_loops_stay_whole(monkeypatch, what):
    """A loop that reads another element of the operand, steps in another order, a GEMM without a fence of its own."""
    kept = pieces._divided

    def edited(s):
        if what == "fence" and isinstance(s, Evaluate) and s.call.op == "wgmma_fence":
            return Evaluate(Call("sync_warp", (), "void"))
        if what == "read" and isinstance(s, Store) and s.buffer.name == "dS":
            return replace(s, value=Load(s.buffer, (const(0),), s.value.dtype))
        return None

    def turned(body):
        steps = [s for s in walk(body, Evaluate) if s.call.op == "wgmma" and s.call.args[1].buffer.name == "dS"]
        swap = {id(a): b for a, b in zip(steps, reversed(steps))}
        return rewrite(body, lambda s: swap.get(id(s)) if isinstance(s, Evaluate) else None)

    counts: list[int] = []

    def divided(launch):
        if launch.plan is not None and any(c.op == "wgmma" for c in walk(launch.body, Call)) and not counts:
            body = turned(launch.body) if what == "order" else rewrite(launch.body, edited)
            changed = replace(launch, body=body)
            counts.append(fills(kept(changed)) - fills(changed))
        return kept(launch)

    monkeypatch.setattr(pieces, "_divided", divided)
    lowered()
    assert counts == [0]


@pytest.fixture(scope="module")
def three_groups():
    """Attention whose weights and late GEMM do not fit the registers of three warp groups together."""
    func = attention(seq=384, dim=64, bm=192, bn=128, threads=384).func
    return func, pipeline.lower(func, SM90A, {"tl.enable_fast_math": True})


def test_weights_in_named_registers_come_between_the_steps_of_their_gemm(three_groups):
    (kernel,) = three_groups[1].kernels
    text = print_kernel(kernel, fast_math=True)
    loop = text[text.rindex("for (int k = 0;"):]
    order = re.findall(r"tl::(map_S|halves_P|wgmma_fence|wgmma_m64n64k16\w+_acc|add_S_0|wgmma_commit)", loop)
    steps = [re.sub(r"^wgmma_m.*", "step", x) for x in order[order.index("map_S"):]]
    assert steps == ["map_S", "halves_P", "wgmma_fence", "step"] * 8 + ["wgmma_commit", "add_S_0"]
    assert kernel.launch.plan.own_values


def test_attention_of_three_groups_is_right(three_groups):
    func, module = three_groups
    rng = np.random.default_rng(1)
    q, k, v = (rng.standard_normal((384, 64)).astype(np.float16) for _ in range(3))
    more = {"W": v, **{n: np.zeros((384, 64), np.float32) for n in ("O", "O2")}, "Tops": np.zeros((3, 384), np.float32)}
    got = run_device(module, {"Q": q, "K": k, "V": v, **more}).outputs["O"]
    p = np.exp(q.astype(float) @ k.astype(float).T * 64**-0.5)
    assert np.abs(got - p @ v.astype(float) / p.sum(1, keepdims=True)).max() < 2e-3
