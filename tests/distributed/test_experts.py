"""Rows that travel: all-to-all, ragged all-to-all, and tokens that go to their experts and come back."""

import numpy as np
import pytest

from tilelang.distributed import collectives as c
from tilelang.simulator import run_device_ranks, run_tile_ranks
from tilelang.target import Target
from tilelang.transform.pipeline import lower

BLOCKS, TILE, THREADS, WIDTH = 2, 64, 32, 64
ARCH = Target({"kind": "cuda", "arch": "sm_90a"})


def run(program, given, name="y", seed=1):
    """The output of each rank, which both simulators agree on."""
    want = run_tile_ranks(program, given)
    got = run_device_ranks(lower(program.func, ARCH), given, seed=seed)
    assert all(np.array_equal(w[name], g.outputs[name]) for w, g in zip(want, got))
    return [w[name] for w in want]


def pads(ranks):
    return np.zeros((c.MOST_BLOCKS, 2 * ranks), np.int64)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_all_to_all(ranks):
    x = np.random.default_rng(ranks).integers(-99, 99, (ranks, ranks, 70)).astype(np.float16)
    program = c.all_to_all_program(70, "float16", ranks, BLOCKS, TILE, THREADS)
    out = run(program, [[x[r], np.zeros((ranks, 70), np.float16), pads(ranks)] for r in range(ranks)])
    assert all((out[r] == x[:, r]).all() for r in range(ranks))


def sent(x, at, room):
    """What every rank has behind send_rows."""
    ranks, (rows, width) = len(x), x[0].shape
    program = c.send_rows_program(rows, room, width, str(x[0].dtype), ranks, BLOCKS, THREADS)
    return run(program, [[x[r], np.asarray(at[r], np.int32), np.zeros((room, width), x[0].dtype), pads(ranks)]
                         for r in range(ranks)])


@pytest.mark.parametrize("ranks", [2, 4])
def test_ragged_all_to_all(ranks):
    rng, rows = np.random.default_rng(ranks), 12
    counts = rng.multinomial(rows, np.full(ranks + 1, 1 / (ranks + 1)), ranks)[:, :ranks]  # some rows go nowhere
    x = [rng.integers(-99, 99, (rows, WIDTH)).astype(np.float16) for _ in range(ranks)]
    program = c.send_counted_program(rows, rows * ranks, WIDTH, "float16", ranks, BLOCKS, THREADS)
    given = [[x[r], counts[r].astype(np.int64), np.zeros((rows * ranks, WIDTH), np.float16), np.zeros((ranks, ranks), np.int64),
              np.zeros((c.MOST_BLOCKS, ranks, ranks), np.int64), pads(ranks)] for r in range(ranks)]
    out = run(program, given)
    assert all((table == counts).all() for table in run(program, given, "all_"))
    first = np.cumsum(counts, 1) - counts
    for r in range(ranks):
        want = np.concatenate([x[s][first[s, r]:first[s, r] + counts[s, r]] for s in range(ranks)])
        assert (out[r][:len(want)] == want).all() and not out[r][len(want):].any()


@pytest.mark.parametrize("ranks, count", [(2, 4), (4, 8)])
def test_tokens_go_to_their_experts_and_come_back(ranks, count):
    import torch

    from tilelang.distributed.experts import routes

    rng, tokens, k, room = np.random.default_rng(count), 5, 2, 5 * 2 * ranks
    x = [rng.integers(-9, 9, (tokens, WIDTH)).astype(np.float32) for _ in range(ranks)]
    experts = [np.stack([rng.permutation(count)[:k] for _ in range(tokens)]) for _ in range(ranks)]
    table = torch.tensor(np.stack([np.bincount(e.ravel(), minlength=count) for e in experts]))
    ways = [routes(torch.tensor(e.ravel()), table, r, room) for r, e in enumerate(experts)]
    rows = sent([x[r][ways[r].order.numpy() // k] for r in range(ranks)], [w.there for w in ways], room)
    worked = []
    for r, way in enumerate(ways):  # expert e multiplies by e + 1
        numbers = np.repeat(np.arange(count // ranks) + r * (count // ranks) + 1, way.sizes.numpy())
        scale = np.zeros((room, 1), np.float32)
        scale[:len(numbers), 0] = numbers
        worked.append(rows[r] * scale)
    back = sent(worked, [w.back for w in ways], tokens * k)
    for r in range(ranks):
        pairs = np.empty_like(back[r])
        pairs[ways[r].order.numpy()] = back[r]
        want = x[r][:, None] * (experts[r][..., None] + 1)
        assert (pairs.reshape(tokens, k, WIDTH) == want).all()



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
