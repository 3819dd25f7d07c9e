"""What a call's kernel and bits depend on: the call and the machine, and which lengths of its family came first."""

import importlib

import numpy as np
import pytest

from tilelang.library import flash_attention, flash_decode, grouped_matmul, linear_cross_entropy, matmul, place

attention = importlib.import_module("tilelang.library.attention.flash_attention")
decode = importlib.import_module("tilelang.library.attention.flash_decode")
gemm = importlib.import_module("tilelang.library.gemm.matmul")
grouped = importlib.import_module("tilelang.library.gemm.grouped")

SM90 = {"kind": "cuda", "arch": "sm_90a"}
RNG = np.random.default_rng(0)
LENGTHS = [int(n) for n in RNG.choice(np.arange(2, 700), 40, replace=False)]
ORDERS = {"as drawn": list(range(40)), "reversed": list(range(39, -1, -1)), "shuffled": [int(n) for n in RNG.permutation(40)]}


def forget():
    for cache in (attention._RUNS, decode._RUNS, gemm._ANSWERS, grouped._ANSWERS, place.KERNELS, place._FIRST):
        cache.clear()


@pytest.fixture
def compiled(monkeypatch):
    """The programs that are compiled, as text with the options of each; what is compiled does nothing."""
    made = []

    def compile(program, **options):
        made.append((str(program.func), str(options.get("pass_configs"))))
        return lambda *args: None

    monkeypatch.setattr(place, "compile", compile)
    forget()
    yield made
    forget()


def kernels_of(made, call, order):
    """What each of 40 calls compiles, in a fresh process's state."""
    forget()
    found = {}
    for k in order:
        made.clear()
        call(LENGTHS[k], k)
        found[k] = list(made)
    return found


def attend(length, k):
    q = np.zeros((1, length, 2, 32), np.float16)
    flash_attention(q, q, q, causal=True, window=40 if k % 2 else None, target=SM90)


def attend_packed(length, k):
    q = np.zeros((length, 2, 32), np.float16)
    flash_attention(q, q, q, causal=True, cu_seqlens_q=np.int32([0, length // 3, length]), target=SM90)


def multiply_groups(length, _):
    grouped_matmul(np.zeros((length, 64), np.float16), np.zeros((2, 64, 96), np.float16), np.int32([1, length - 1]),
                   target=SM90, execution_backend="simulator")


def entropy(length, _):
    linear_cross_entropy(np.zeros((length, 64), np.float16), np.zeros((512, 64), np.float16), np.zeros(length, np.int64),
                         target=SM90)


def attend_scaled(length, k):
    q = np.zeros((1, 64, 2, 32), np.float16)
    flash_attention(q, q, q, scale=1 / (k + 1), target=SM90)


def multiply(length, _):
    matmul(np.zeros((length, 64), np.float16), np.zeros((64, 96), np.float16), target=SM90, execution_backend="simulator")


@pytest.mark.parametrize("call, families", [(attend, 2), (attend_packed, 1), (multiply_groups, 1), (entropy, 1)])
def test_all_lengths_but_the_first_of_a_family_share_one_kernel(compiled, call, families):
    """That kernel is the same whichever length comes first."""
    made = [[x for programs in kernels_of(compiled, call, order).values() for x in programs] for order in ORDERS.values()]
    assert all(len(set(x)) == len(x) <= 2 * families for x in made)
    assert len(set(made[0]).intersection(*made[1:])) >= families


@pytest.mark.parametrize("call", [attend_scaled, multiply])
def test_40_calls_choose_the_same_kernels_in_any_order(compiled, call):
    first, *others = (kernels_of(compiled, call, order) for order in ORDERS.values())
    assert all(first.values()) and all(found == first for found in others)


def test_lengths_of_decode_steps_share_one_kernel(compiled):
    def step(length, _):
        kv = np.zeros((2, length, 2, 32), np.float16)
        flash_decode(np.zeros((2, 4, 32), np.float16), kv, kv, np.full(2, length, np.int32), splits=2)

    for order in ORDERS.values():
        assert sum(map(len, kernels_of(compiled, step, order).values())) == 1


def test_40_shapes_give_the_same_bits_in_any_order():
    """On the interpreter of tile programs, which compiles nothing."""
    def results(order):
        forget()
        found = {}
        for k in order:
            rng, length = np.random.default_rng(k), LENGTHS[k] % 48 + 1
            q, kv = (rng.standard_normal((1, n, 1, 16)).astype(np.float16) for n in (length, 50))
            found[k] = flash_attention(q, kv, kv, causal=bool(k % 2), target="tile", scale=1 / (1 + k % 12)).tobytes()
        return found

    first, *others = (results(order) for order in ORDERS.values())
    assert len(set(first.values())) == 40 and all(found == first for found in others)
