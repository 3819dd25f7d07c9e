"""The collectives on both simulators: every rank gets the sum, or the parts of the others, under every schedule."""

import contextlib
from types import SimpleNamespace

import numpy as np
import pytest

import tilelang.language as T
from tilelang.distributed import collectives as c, overlap
from tilelang.errors import TileLangError
from tilelang.library.gemm.kernels import Form
from tilelang.library.gemm.tile import Tile
from tilelang.simulator import run_device, run_device_ranks, run_tile, run_tile_ranks
from tilelang.target import Target
from tilelang.transform.pipeline import lower

BLOCKS, TILE, THREADS = 2, 64, 32


def counts(make, n, dtype, ranks):
    """What a collective keeps between calls."""
    if make is c.all_reduce_one_shot:
        return [np.zeros((2, ranks, n), dtype), np.zeros((c.MOST_BLOCKS, ranks), np.int64), np.zeros(c.MOST_BLOCKS, np.int64)]
    return [np.zeros((c.MOST_BLOCKS, 2 * ranks), np.int64)]


def both(make, n, dtype, args, seeds=(None, 1)):
    """The outputs by rank, which the reference interpreter and the device simulator agree on."""
    program = make(n, dtype, len(args), BLOCKS, TILE, THREADS)
    given = [[*a, *counts(make, n, dtype, len(args))] for a in args]
    want = run_tile_ranks(program, given)
    for arch in ("sm_80", "sm_90a"):
        p = lower(program.func, Target({"kind": "cuda", "arch": arch}))
        for seed in seeds:
            got = [r.outputs for r in run_device_ranks(p, given, seed=seed)]
            assert all(np.array_equal(w[k], g[k]) for w, g in zip(want, got) for k in w), (arch, seed)
    return want


def numbers(ranks, *shape, dtype=np.float16):
    rng = np.random.default_rng(ranks)
    return [rng.integers(-8, 9, shape).astype(dtype) for _ in range(ranks)]


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("n", [BLOCKS * TILE, 100])
def test_all_reduce_one_shot(ranks, n):
    x = numbers(ranks, n)
    out = both(c.all_reduce_one_shot, n, "float16", [[a] for a in x])
    assert all((r["x"] == sum(x)).all() for r in out)


@pytest.mark.parametrize("ranks, n", [(2, 600), (3, 1000), (8, 1024)])
def test_all_reduce_two_shot(ranks, n):
    x = numbers(ranks, n, dtype=np.float32)
    out = both(c.all_reduce_two_shot, n, "float32", [[a] for a in x], (None, 1) if ranks < 8 else (1,))
    assert all((r["x"] == sum(x)).all() for r in out)


@pytest.mark.parametrize("make", [c.all_reduce_one_shot, c.all_reduce_two_shot])
def test_calls_follow_one_another(make):
    x = numbers(3, 300, dtype=np.float32)
    given = [[a, *counts(make, 300, "float32", 3)] for a in x]
    p = lower(make(300, "float32", 3, BLOCKS, 160, THREADS).func, Target({"kind": "cuda", "arch": "sm_90a"}))
    for seed in (1, 2):
        assert all((r.outputs["x"] == 9 * sum(x)).all() for r in run_device_ranks(p, given, seed=seed, repeats=3))


def test_integers_are_added_exactly():
    x = [np.full(128, (1 << 24) + 1, np.int32)] * 2
    assert (both(c.all_reduce_one_shot, 128, "int32", [[a] for a in x], (None,))[0]["x"] == (1 << 25) + 2).all()


@pytest.mark.parametrize("ranks", [2, 4])
def test_all_gather(ranks):
    x = numbers(ranks, 300)
    out = both(c.all_gather_program, 300, "float16", [[a, np.zeros((ranks, 300), np.float16)] for a in x])
    assert all((r["y"] == np.stack(x)).all() for r in out)


@pytest.mark.parametrize("ranks", [2, 4])
def test_reduce_scatter(ranks):
    x = numbers(ranks, ranks, 300)
    out = both(c.reduce_scatter_program, 300, "float16", [[a, np.zeros(300, np.float16)] for a in x])
    assert all((out[r]["y"] == sum(x)[r]).all() for r in range(ranks))


def test_the_ranks_meet():
    pads = [[np.zeros((1, 6), np.int64)] for _ in range(3)]
    for seed in (None, 1):
        out = run_device_ranks(lower(overlap.meeting(3).func, Target({"kind": "cuda", "arch": "sm_90a"})), pads, seed=seed)
        assert all((r.outputs["pad"] == 1).all() for r in out)


def test_a_row_of_a_barrier_has_room_for_every_rank():
    """With a third rank the counts went to the row of the next block."""
    pads = [[np.zeros((2, 4), np.int64)] for _ in range(3)]

    @T.prim_func
    def main(pad: T.SymmTensor((2, 4), "int64")):
        with T.Kernel(2, threads=32) as bx:
            T.barrier_all(pad[bx, 0:4])

    lowered = lower(main.func, Target({"kind": "cuda", "arch": "sm_90a"}))
    for run in (lambda: run_tile_ranks(main, pads), lambda: run_device_ranks(lowered, pads)):
        with pytest.raises(TileLangError, match="room for 2 ranks, found 3"):
            run()


@pytest.mark.parametrize("others", [1, 3, 7])
def test_a_gemm_adds_what_the_ranks_have_sent(others):
    f = Form(64, 64, 96, ("float16", "float16", "float16", "float32"), Tile(64, 64, 32, 2, 128))
    (a,), (b,), (sent,) = numbers(1, 64, 96), numbers(1, 96, 64), numbers(1, others, 64, 64)
    program, given = overlap.gemm_added(f, others), [a, b, sent, np.zeros((64, 64), np.float16)]
    want = (a.astype(float) @ b + sent.sum(0)).astype(np.float16)
    lowered = lower(program.func, Target({"kind": "cuda", "arch": "sm_90a"}))
    assert (run_tile(program, given)["C"] == want).all() and (run_device(lowered, given).outputs["C"] == want).all()


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_row_of_flags_is_taken_once(ranks):
    program = overlap.taking(ranks)
    lowered = lower(program.func, Target({"kind": "cuda", "arch": "sm_90a"}))
    told = [[np.ones((overlap.ROWS, ranks), np.int64), 1] for _ in range(ranks)]
    for run in (lambda x: run_tile_ranks(program, x), lambda x: [r.outputs for r in run_device_ranks(lowered, x)]):
        for out in run(told):
            assert not out["flags"][1, :-1].any() and out["flags"].sum() == overlap.ROWS * ranks - (ranks - 1)
        with pytest.raises(TileLangError, match="wait"):
            run([[(r > 0) * flags, row] for r, (flags, row) in enumerate(told)])


class Stream:
    """A stream that keeps what its operations wait for."""

    def __init__(self):
        self.before = frozenset()

    def do(self, name):
        self.before |= {name}
        return self.before

    def record_event(self):
        return self.before

    def wait_event(self, event):
        self.before |= event

    def wait_stream(self, other):
        self.before |= other.before


@pytest.fixture(params=[2, 4, 8])
def streams(request, monkeypatch):
    """What operations of a call on rank 1 wait for: told by (row, rank), heard by row, gemms in order, main."""
    torch = pytest.importorskip("torch")
    found = SimpleNamespace(ranks=request.param, main=Stream(), told={}, heard={}, gemms=[])
    side, now, others = Stream(), [found.main], [Stream() for _ in range(2 * found.ranks)]

    @contextlib.contextmanager
    def on(stream):
        now.append(stream)
        yield
        now.pop()

    def tell(row, k):
        found.told[row, k] = now[-1].before
        now[-1].do(("told", row, k))

    def hear(row, stream):
        assert row not in found.heard
        found.heard[row] = stream.before
        stream.do(("heard", row))

    for name, value in (("current_stream", lambda *_: now[-1]), ("stream", on),
                        ("get_device_properties", lambda d: SimpleNamespace(multi_processor_count=1))):
        monkeypatch.setattr(torch.cuda, name, value)
    for name, value in (
            ("current", lambda: SimpleNamespace(rank=1, ranks=found.ranks)), ("_stream", lambda: side), ("_tell", tell),
            ("_streams", lambda n: others[:n]), ("on_rank", lambda x, r: x.clone()), ("_hear", hear),
            ("_space", lambda shape, dtype, symmetric: torch.zeros(shape, dtype=dtype)), ("set_signal", lambda *_: None),
            ("matmul", lambda a, b, out: found.gemms.append(now[-1].do("gemm"))),
            ("_adding", lambda *_: lambda *_: now[-1].do("added")), ("symmetric_view", lambda *_: None),
            ("_one_launch", lambda *_: None), ("_meeting", lambda: lambda: found.main.do("met"))):
        monkeypatch.setattr(overlap, name, value)
    return found


@pytest.mark.parametrize("every", [False, True])
def test_no_rank_waits_before_it_has_sent(streams, every):
    """Else ranks could wait for each other for ever: a chunk is sent behind the meeting and no wait, and awaited behind its
    sends, and all stands before the end.  GEMMs wait for no other rank."""
    import torch

    a, b, others = torch.zeros(streams.ranks * 256, 8), torch.zeros(8, 256), range(streams.ranks - 1)
    if every:
        overlap.matmul_all_reduce(a, b, torch.zeros(streams.ranks * 256, 256))
    else:
        overlap.matmul_reduce_scatter(a, b, torch.zeros(256, 256))
    told, heard = streams.told, streams.heard
    assert len(streams.gemms) == 2 * len(others) and not any("met" in before for before in streams.gemms)
    rows = [0, 1, *((2, 3) if every else ())]
    assert set(told) == {(row, k) for row in rows for k in others} and list(heard) == rows
    for chunk in rows[:2]:
        assert all({"met", "gemm"} <= told[chunk, k] and not {x for x in told[chunk, k] if x[0] == "heard"} and
                   ("told", chunk, k) in heard[chunk] for k in others)
    for row in rows[2:]:
        assert all("added" in told[row, k] and ("told", row, k) in heard[row] for k in others)
    assert {("heard", row) for row in rows} | {"added"} <= streams.main.before


def test_rows_are_fetched_behind_the_meeting(streams):
    """And the call ends when all have fetched this rank's."""
    import torch

    overlap.all_gather_matmul(torch.zeros(256, 8), torch.zeros(8, 256), torch.zeros(streams.ranks * 256, 256))
    flags = {("told", 0, k) for k in range(streams.ranks - 1)}
    assert all("met" in before for before in streams.told.values()) and flags <= streams.heard[0]
    first, *later = streams.gemms
    assert "met" not in first and all({"met", ("told", 0, k)} <= before for k, before in enumerate(later))
    assert {("heard", 0), "gemm"} <= streams.main.before


def test_more_ranks_read_less_in_one_step():
    most = [max(n for n in range(1 << 12, 1 << 21, 1 << 12) if c.in_one_step(n, ranks)) for ranks in (2, 4, 8)]
    assert most[0] == c.ONE_SHOT and c.ONE_SHOT > 4 * most[1] > 8 * most[2] > 1 << 18


def test_one_launch_where_blocks_of_rows_waste_waves():
    for m, n in ((4096, 14336), (4096, 8192), (1024, 8192), (2048, 14336)):
        assert not overlap.pays_in_one_launch(m, n, 8192 // m if m > 1024 else 2, 132)
    assert overlap.pays_in_one_launch(1024, 14336, 8, 132) and overlap.pays_in_one_launch(128, 4096, 2, 132)


def test_chunks_of_rows_take_no_more_waves():
    assert overlap.chunks_of(4096, 14336, 132) == overlap.chunks_of(4096, 8192, 132) == overlap.chunks_of(1024, 8192, 132) == 2
    assert overlap.chunks_of(1024, 4096, 132) == overlap.chunks_of(128, 8192, 132) == 1


@pytest.mark.parametrize("n", [1, 4096, 1 << 19, 1 << 20, 1 << 27, (1 << 27) + 8])
@pytest.mark.parametrize("item", [2, 4])
def test_a_plan_covers_all_elements_with_whole_vectors(n, item):
    blocks, tile = c.plan(n, item, 4)
    assert 1 <= blocks <= c.MOST_BLOCKS and tile % (c.THREADS * c.VECTOR // item) == 0
    assert n * item > c.ONE_SHOT or blocks * tile >= n
