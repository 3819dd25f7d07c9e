"""The order of the tiles of packed sequences: all of them once, longest first."""

from math import ceil

import numpy as np
import pytest

import tilelang
import tilelang.language as T
from tilelang.library import flash_attention
from tilelang.library.attention.backward import gradients
from tilelang.library.attention.form import FACTS, AttentionForm, Tile
from tilelang.library.attention.packed_kernels import order_tiles, packed_attention
from tilelang.library.attention.problem import Mask, Sizes

TILE = Tile(64, 48, 2, 128)
MASKS = {"full": Mask(), "causal": Mask(None, 0), "ahead": Mask(None, 70), "window": Mask(100, 0), "both": Mask(60, 90),
         "behind": Mask(0, None), "far behind": Mask(70, None)}


def order(mask, cu_q, cu_k, slots, heads, wide, near, **options):
    batch = len(cu_q) - 1
    sizes = Sizes(batch, int(cu_q[-1]), int(cu_k[-1]), heads, heads, 16, 16)
    form = AttentionForm(sizes, (), "packed", "float16", mask, TILE, False)

    @T.prim_func
    def program(cu_q: T.Tensor((batch + 1,), "int32"), cu_k: T.Tensor((batch + 1,), "int32"),
                Tiles: T.Tensor((slots * heads, FACTS), "int32")):
        with T.Kernel(slots, threads=128) as slot:
            order_tiles(form, Tiles, (cu_q, cu_k), slot, wide, near, 1)

    out = np.full((slots * heads, FACTS), -7, np.int32)
    tilelang.compile(program, **options)(np.array(cu_q, np.int32), np.array(cu_k, np.int32), out)
    return out[:, :6].tolist()


def steps(mask, row, seq_q, seq_k):
    """Tiles of keys up to the last that some row of the tile sees."""
    seen = [j for r in range(row, row + TILE.rows) for j in range(seq_k)
            if mask.right is None or j <= r + seq_k - seq_q + mask.right]
    ahead = mask.left is not None and mask.right is None  # then tiles of keys in front of the first that it sees count
    first = max(0, row + seq_k - seq_q - mask.left) // TILE.keys if ahead else 0
    return max(0, max(seen, default=-1) // TILE.keys + 1 - first)


def check(mask, cu_q, cu_k, spare, wide=2, near=10**6, **options):
    """Groups of heads, in them parts of the sequences, in them the tiles with most steps first, every second group in the
    opposite order, at last slots of no queries."""
    heads, slots = 3, (cu_q[-1] + spare) // TILE.rows + len(cu_q) - 1
    got = order(mask, cu_q, cu_k, slots, heads, wide, near, **options)
    most = 10**9 if mask.left is None or mask.right is None else ceil((mask.left + TILE.rows) / TILE.keys) + 1
    places = []
    for s, (a, b, c, d) in enumerate(zip(cu_q, cu_q[1:], cu_k, cu_k[1:])):
        for row in range(0, b - a, TILE.rows):
            taken = min(most, steps(mask, row, b - a, d - c))
            places.append((c // near, -taken, s, row, [a, b - a, c, d - c]))
    want = []
    for turn in range(0, heads, wide):
        order_of_turn = sorted(places, reverse=turn // wide % 2 == 1)
        want += [[h, row, *facts] for *_, row, facts in order_of_turn for h in range(turn, min(heads, turn + wide))]
    assert got[:len(want)] == want
    assert all(facts[3] == 0 for facts in got[len(want):])
    assert sorted(h for h, *_ in got) == sorted(list(range(heads)) * slots)


@pytest.mark.parametrize("name", MASKS)
def test_every_tile_has_its_place_by_its_steps(name):
    rng = np.random.default_rng(0)
    for case in range(4):
        batch = (1, 5, 9, 140)[case]  # 140: more than a block looks at together
        lengths = [rng.integers(0, 300 if batch < 100 else 90, batch) * (rng.random(batch) < 0.8) for _ in "qk"]
        cu_q, cu_k = ([int(x) for x in np.cumsum([0, *n])] for n in lengths)
        front = 150 if case == 2 else 0  # tokens of no sequence
        check(MASKS[name], [front + x for x in cu_q], cu_k, 80 * (case % 2), 1 + case, (10**6, 300)[case % 2], target="cpu")


def test_the_order_is_the_same_on_a_gpu():
    check(MASKS["causal"], [0, 130, 130, 500], [0, 200, 210, 590], 70, target={"kind": "cuda", "arch": "sm_90a"},
          execution_backend="simulator")


@pytest.mark.parametrize("sms", [1, 3, 4, 50])
def test_waves_of_alternating_direction_take_every_tile(sms):
    lengths, heads, dim = [130, 0, 70, 3], 3, 16
    cu = np.cumsum([0, *lengths]).astype(np.int32)
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((cu[-1], heads, dim)).astype(np.float16) for _ in "qkv")
    sizes, strides = Sizes(len(lengths), *[int(cu[-1])] * 2, heads, heads, dim, dim), ((heads * dim, dim, 1),) * 4
    program = packed_attention(AttentionForm(sizes, strides, "packed", "float16", MASKS["causal"], TILE, False, 1.0), sms)
    kernel = tilelang.compile(program, target="cpu")
    out = np.full_like(q, np.nan)
    kernel(q, k, v, 1.0, cu, cu, np.empty(((int(cu[-1]) // TILE.rows + len(lengths)) * heads, FACTS), np.int32), out, None)
    for a, b in zip(cu, cu[1:]):
        s = np.einsum("ihd,jhd->hij", *(x[a:b].astype(np.float64) for x in (q, k)))
        p = np.exp(s - s.max(-1, keepdims=True, initial=-np.inf)) * np.tri(b - a)
        want = np.einsum("hij,jhd->ihd", p / p.sum(-1, keepdims=True), v[a:b].astype(np.float64))
        longest = np.sqrt((q.astype(float)**2).sum(-1).max() * (k.astype(float)**2).sum(-1).max())
        assert np.all(np.abs(out[a:b] - want) <= np.abs(v).max() * (2.0**-10 + 2.0**-25 * 130 + 32 * 2.0**-24 * longest))


@pytest.mark.parametrize("ends", [(0, 5, 20), (0, 5, 12), (0, 100, 200), (-2, 10), (3, 5, 10)])
def test_sequences_behind_the_last_token_were_written_there(ends):
    torch = pytest.importorskip("torch")
    cu, (q, k, v) = torch.tensor(ends, dtype=torch.int32), torch.randn(3, 10, 2, 16).half()
    room = [torch.full((60, 2, 16), 7.0).half() for _ in range(4)]
    out, *grads = (x[20:30] for x in room)
    _, logs = flash_attention(q, k, v, cu_seqlens_q=cu, causal=True, return_lse=True, out=out)
    gradients((q, k, v, out, logs, q, None, cu, None, None, None), tuple(grads), scale=None, deterministic=None, target=None,
              causal=True, window=None, layout="bshd", drop=0)
    assert all((x[:20] == 7).all() and (x[30:] == 7).all() for x in room)
    inside = [min(max(n, 0), 10) for n in ends]
    wanted = flash_attention(q, k, v, cu_seqlens_q=torch.tensor(inside, dtype=torch.int32), causal=True)
    assert torch.equal(out[inside[0]:inside[-1]], wanted[inside[0]:inside[-1]])
