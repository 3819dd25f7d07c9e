"""Rows that travel: all-to-all, ragged all-to-all, and tokens that go to their experts and come back."""

import numpy as np
import pytest

from tilelang.distributed import collectives as c, experts as e
from tilelang.simulator import run_device_ranks, run_tile_ranks
from tilelang.target import Target
from tilelang.transform.pipeline import lower

BLOCKS, TILE, THREADS, WIDTH = 2, 64, 32, 64
ARCH = Target({"kind": "cuda", "arch": "sm_90a"})


def run(program, given, names=("y",), seed=1):
    """The outputs of each rank, for each name, which both simulators agree on."""
    want = run_tile_ranks(program, given)
    got = run_device_ranks(lower(program.func, ARCH), given, seed=seed)
    assert all(np.array_equal(w[name], g.outputs[name]) for w, g in zip(want, got) for name in names)
    return [[w[name] for w in want] for name in names]


def pads(ranks):
    return np.zeros((c.MOST_BLOCKS, 2 * ranks), np.int64)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_all_to_all(ranks):
    x = np.random.default_rng(ranks).integers(-99, 99, (ranks, ranks, 70)).astype(np.float16)
    program = c.all_to_all_program(70, "float16", ranks, BLOCKS, TILE, THREADS)
    out, = run(program, [[x[r], np.zeros((ranks, 70), np.float16), pads(ranks)] for r in range(ranks)])
    assert all((out[r] == x[:, r]).all() for r in range(ranks))


def test_rows_go_to_given_places():
    ranks, rows, room = 3, 7, 9
    rng = np.random.default_rng(0)
    x = rng.integers(-99, 99, (ranks, rows, WIDTH)).astype(np.float16)
    places = rng.permutation([(r, i) for r in range(ranks) for i in range(room)])[:ranks * rows].reshape(ranks, rows, 2)
    places[:, 2, 0] = -1
    program = c.send_rows_program(rows, room, WIDTH, "float16", ranks, BLOCKS, THREADS)
    out, = run(program, [[x[r], places[r].astype(np.int32), np.zeros((room, WIDTH), np.float16), pads(ranks)]
                         for r in range(ranks)])
    want = np.zeros((ranks, room, WIDTH), np.float16)
    for r, i in np.ndindex(ranks, rows):
        if places[r, i, 0] >= 0:
            want[tuple(places[r, i])] = x[r, i]
    assert (np.stack(out) == want).all()


@pytest.mark.parametrize("ranks", [2, 4])
def test_ragged_all_to_all(ranks):
    rng, rows = np.random.default_rng(ranks), 12
    counts = rng.multinomial(rows, np.full(ranks + 1, 1 / (ranks + 1)), ranks)[:, :ranks]  # some rows go nowhere
    x = [rng.integers(-99, 99, (rows, WIDTH)).astype(np.float16) for _ in range(ranks)]
    program = c.send_counted_program(rows, rows * ranks, WIDTH, "float16", ranks, BLOCKS, THREADS)
    given = [[x[r], counts[r].astype(np.int64), np.zeros((rows * ranks, WIDTH), np.float16), np.zeros((ranks, ranks), np.int64),
              np.zeros((c.MOST_BLOCKS, ranks, ranks), np.int64), pads(ranks)] for r in range(ranks)]
    out, tables = run(program, given, ("y", "all_"))
    assert all((table == counts).all() for table in tables)
    first = np.cumsum(counts, 1) - counts
    for r in range(ranks):
        want = np.concatenate([x[s][first[s, r]:first[s, r] + counts[s, r]] for s in range(ranks)])
        assert (out[r][:len(want)] == want).all() and not out[r][len(want):].any()


@pytest.mark.parametrize("ranks, count, k, kind", [(2, 12, 9, np.int64), (4, 12, 3, np.int32), (8, 8, 2, np.int64)])
def test_tokens_go_to_their_experts_and_come_back(ranks, count, k, kind):
    rng, tokens, own = np.random.default_rng(count), 3, count // ranks
    room, name = tokens * k * ranks, np.dtype(kind).name
    x = rng.integers(-9, 9, (ranks, tokens, WIDTH)).astype(np.float32)
    experts = np.stack([[rng.permutation(count)[:k] for _ in range(tokens)] for _ in range(ranks)]).astype(kind)
    weights = rng.integers(1, 4, (ranks, tokens, k)).astype(np.float32)
    pairs = experts.reshape(ranks, -1)
    table = np.stack([np.bincount(p, minlength=count) for p in pairs]).astype(np.int32)
    index, tables = run(e.number_program(tokens * k, name, count, ranks), [
        [pairs[r], np.zeros(tokens * k, np.int32), np.zeros((ranks, count), np.int32)] for r in range(ranks)],
        ("index", "table"))
    assert all((index[r] == [(p[:i] == p[i]).sum() for i in range(len(p))]).all() for r, p in enumerate(pairs))
    assert all((t == table).all() for t in tables)

    send = e.send_pairs_program((tokens, k, WIDTH), room, "float32", name, count, ranks, BLOCKS, THREADS)
    given = [[x[r], pairs[r], index[r], np.zeros((tokens * k, 2), np.int32), np.zeros(own, np.int32),
              np.zeros((room, WIDTH), np.float32), table, pads(ranks)] for r in range(ranks)]
    rows, there, sizes = run(send, given, ("y", "there", "sizes"))
    for r in range(ranks):
        mine = range(r * own, r * own + own)
        assert (sizes[r] == table[:, mine].sum(0)).all()
        want = np.concatenate([x[s][pairs[s].reshape(tokens, k).__eq__(n).any(1)] for n in mine for s in range(ranks)])
        assert (rows[r][:len(want)] == want).all() and not rows[r][len(want):].any()

    scale = [np.repeat(np.arange(r * own, r * own + own) + 1, sizes[r]) for r in range(ranks)]  # expert e multiplies by e + 1
    worked = [rows[r] * np.pad(s, (0, room - len(s)))[:, None].astype(np.float32) for r, s in enumerate(scale)]
    fetch = e.sum_pairs_program((tokens, k, WIDTH), room, "float32", "float32", ranks, BLOCKS, THREADS)
    out, = run(fetch, [[worked[r], there[r].reshape(tokens, k, 2), weights[r], np.zeros((tokens, WIDTH), np.float32),
                        pads(ranks)] for r in range(ranks)], ("out",))
    for r in range(ranks):
        assert (out[r] == x[r] * (weights[r] * (experts[r] + 1)).sum(1, keepdims=True)).all()


def test_attention_over_parts_of_the_keys():
    import torch

    from tilelang.distributed.attention import merged

    rng = np.random.default_rng(0)
    q, k, v = (torch.tensor(rng.standard_normal((1, n, 2, 8))) for n in (3, 12, 12))
    score = torch.einsum("bshd,bthd->bhst", q, k)

    def part(at):
        lse = torch.logsumexp(score[..., at], -1)
        return torch.einsum("bhst,bthd->bshd", (score[..., at] - lse[..., None]).exp(), v[:, at]), lse

    out, _ = merged([part(slice(n, n + 4)) for n in (0, 4, 8)])
    assert abs(out - part(slice(0, 12))[0]).max() < 1e-6
