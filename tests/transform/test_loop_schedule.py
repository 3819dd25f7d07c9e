"""analysis/loop_schedule, schedule/loop_record: the schedule of a loop as a value, its bound, its text and its picture."""

import importlib.util
import json
import random

import pytest
import scheduled_programs as programs
from programs import gemm

import tilelang
import tilelang.language as T
from tilelang.transform.analysis import simulate_loop
from tilelang.transform.analysis.loop_schedule import Bound, Item, Place, Schedule
from tilelang.transform.analysis.simulate_loop import Event, Held, RingUse, Simulation, Wait

UNITS = "tensor cores", "loads", "memory", "shared memory", "MUFU", "FMA", "recurrence"
LOOPS = {"attention": lambda: programs.attention(), "backward": lambda: programs.backward(),
         "two_products": lambda: programs.two_products(), "retention": lambda: programs.retention()}


def drawn(r):
    """A schedule of random values."""
    def time():
        return round(r.choice([r.randrange(5000), r.random() * 5000]), 1)

    def names(least=0):
        return tuple(f"b{r.randrange(30)}" for _ in range(r.randrange(least, 4)))

    items = tuple(Item(r.choice(("gemm", "copy", "parallel")), names(), names(), r.choice(UNITS), time(), r.random() < 0.5,
                       r.randrange(256)) for _ in range(r.randrange(5)))
    places = tuple(Place(r.randrange(len(items)), r.randrange(-1, 3), r.randrange(-4, 3), time(), time())
                   for _ in range(r.randrange(6) if items else 0))
    return Schedule(r.choice(("k", "step_1")), round(r.random() * 90, 2), r.randrange(999), r.randrange(4), items, places,
                    tuple((n, r.randrange(9)) for n in names()), tuple((n, r.choice("MN")) for n in names()),
                    tuple((n, r.choice(("tma", "cp.async", "threads"))) for n in names()),
                    tuple(r.randrange(256) for _ in range(r.choice((0, 2)))), Bound(tuple((u, time()) for u in UNITS)), time(),
                    time())


@pytest.mark.parametrize("seed", range(8))
def test_a_schedule_is_read_from_its_text(seed):
    r = random.Random(seed)
    for s in (drawn(r) for _ in range(50)):
        assert Schedule.parse(str(s)) == s and hash(Schedule.parse(str(s))) == hash(s)


def compiled(program, arch, **configs):
    return tilelang.compile(getattr(program, "func", program), target={"kind": "cuda", "arch": arch},
                            execution_backend="simulator", pass_configs={f"tl.{k}": v for k, v in configs.items()})


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("name", LOOPS)
def test_schedules_say_what_was_chosen(name, arch):
    kernel = compiled(LOOPS[name](), arch)
    s, facts = kernel.schedule(), kernel.report_data["kernels"][0]
    assert Schedule.parse(str(s)) == s
    assert s.cycles >= s.bound.cycles == max(c for _, c in s.bound.terms) > 0 and s.bound.term in UNITS
    assert (s.groups > 0) == facts["schedule"].startswith("warp groups")
    assert {how for _, how in s.loads} <= ({"tma"} if s.groups else {"cp.async", "threads"})
    assert dict(s.versions) == facts["stages"]
    for group in range(max(1, s.groups)):
        mine = [p.item for p in s.places if p.group == group]
        assert len(mine) == len(set(mine)) and {*mine, *(p.item for p in s.places if p.group < 0)} == set(range(len(s.items)))
    assert f"loop {s.loop}: " in kernel.report() and facts["predicted"]["us"] >= facts["predicted"]["least"] > 0


def test_each_loop_of_a_launch_has_a_schedule():
    @T.prim_func
    def two(A: T.Tensor((128, 512), "float16"), B: T.Tensor((128, 256), "float16"), C: T.Tensor((128, 128), "float32")):
        with T.Kernel(1, threads=128) as _:
            a, b = T.alloc_shared((128, 64), "float16"), T.alloc_shared((128, 64), "float16")
            c = T.alloc_fragment((128, 128), "float32")
            T.clear(c)
            for first in T.Pipelined(8, num_stages=2):
                T.copy(A[0, first * 64], a)
                T.gemm(a, a, c, transpose_B=True)
            for second in T.Pipelined(4, num_stages=3):
                T.copy(B[0, second * 64], b)
                T.gemm(b, b, c, transpose_B=True)
            T.copy(c, C)

    for arch in ("sm_80", "sm_90a"):
        kernel = compiled(two, arch)
        assert [(kernel.schedule(n).loop, kernel.schedule(n).iterations) for n in range(2)] == [("first", 8), ("second", 4)]
        assert kernel.schedule(-1) == kernel.schedule(1)
        with pytest.raises(IndexError, match="no pipelined loop 2"):
            kernel.schedule(2)


def test_stages_that_the_program_gives():
    @T.prim_func
    def late(A: T.Tensor((128, 512), "float32"), C: T.Tensor((128, 64), "float32")):
        with T.Kernel(1, threads=128) as _:
            a, c = T.alloc_shared((128, 64), "float32"), T.alloc_fragment((128, 64), "float32")
            T.clear(c)
            for k in T.Pipelined(8, order=[0, 1], stage=[0, 2]):
                T.copy(A[0, k * 64], a)
                for i, j in T.Parallel(128, 64):
                    c[i, j] += a[i, j]
            T.copy(c, C)

    s = compiled(late, "sm_80").schedule()
    assert s.versions == (("a", 3),) and s.loads == (("a", "cp.async"),) and [p.stage for p in s.places] == [-2, 0]


def test_operands_of_tf32_have_a_split():
    program = gemm(256, 256, 256, 128, 128, 32, dtype="float32", out="float32", tb=True, stages=3, threads=256)
    assert compiled(program, "sm_90a").schedule().split == (("Cf", "M"),)


def test_iterations_are_the_mean_of_all_blocks():
    """Causal attention over tiles of 64 keys: 1, 2, 3, 4 iterations for the tiles of 64 queries."""
    s = compiled(programs.attention(seq=256, dim=64, bm=64, bn=64, threads=128, causal=True), "sm_90a").schedule()
    assert s.iterations == 2.5


def test_pictures(tmp_path):
    kernel = compiled(programs.attention(), "sm_90a")
    s = kernel.schedule()
    events = json.loads(kernel.plot_schedule(tmp_path / "a.json", measured=0.1).read_text())
    names = [e["args"]["name"] for e in events["traceEvents"] if e["ph"] == "M"]
    assert "loads" in names and "group 1: tensor cores" in names and "measured" in events["otherData"]["title"]
    assert sum(e["ph"] == "X" for e in events["traceEvents"]) == len(s.places)
    with pytest.raises(ValueError, match=r"a schedule is not drawn into a.txt"):
        kernel.plot_schedule("a.txt")
    if importlib.util.find_spec("matplotlib") is None:
        with pytest.raises(ImportError, match="matplotlib"):
            kernel.plot_schedule(tmp_path / "a.svg")
        return
    drawn = kernel.plot_schedule(tmp_path / "a.svg").read_bytes()
    assert drawn == kernel.plot_schedule(tmp_path / "b.svg").read_bytes(), "pictures of one schedule differ"


def test_the_first_iterations_were_taken_for_steady_ones():
    """Loads of 700 cycles and 140 of work: the stages are full at first, so iterations 5 to 10 of 8 stages took 140."""
    ring = RingUse(frozenset({0}), 3500, 8)
    slow = RingUse(frozenset({0}), 350 * 83, 8)
    held = Held(0, 0, 0, False, 0, (0, 0, False))
    events = (Event(0, 0), Event(1, 0))
    assert Simulation(events, {}, {0: 100.0}, [0.0, 100.0], set(), [(ring, held)], 1).cycles == pytest.approx(140)
    assert Simulation(events, {}, {0: 100.0}, [0.0, 100.0], set(), [(slow, held)], 1).cycles == pytest.approx(350)


@pytest.mark.parametrize("seed, most", [(0, 256), (1, 256), (2, 4), (3, 256)])
def test_no_unit_is_busy_for_longer_than_an_iteration(seed, most, monkeypatch):
    """Simulation asserts it; drawn loops of two GEMMs with work between them, one to three groups, rings of 1 to 4 stages.

    A GEMM of 533x2979x1617 was not compiled: without a period, the mean over half of its 256 iterations was 431.9 of 432.
    """
    monkeypatch.setattr(simulate_loop, "_MOST", most)
    r = random.Random(seed)
    for _ in range(40):
        tensor = {0: r.choice((64.0, 200.0)), 2: r.choice((10.0, 300.0))}
        waits = {1: Wait(r.randrange(2), (0,)), 3: Wait(r.randrange(2), (2,) if r.random() < 0.5 else (), (2,))}
        rings = [(RingUse(frozenset({n}), r.randrange(1, 60000), r.randrange(1, 5)), Held(n, 0, n, False, n, (0, n, False)))
                 for n in (0, 2) if r.random() < 0.8]
        run = Simulation([Event(n, 0) for n in range(4)], waits, tensor, [0.0, r.random() * 500, 0.0, 40.0],
                         {1} if r.random() < 0.3 else set(), rings, r.randrange(1, 4))
        assert run.cycles >= max(t for t in tensor.values())
        assert all(end >= begin for begin, end in run.ran.values())


def test_loops_of_resized_blocks_were_predicted_for_the_blocks_of_the_program():
    """Two blocks of 64 rows became one of 128: the least time was twice the true one, and longer than measured."""
    for rows in (64, 128):
        kernel = compiled(gemm(4096, 4096, 4096, rows, 128, 64, tb=True, stages=3, threads=128 * rows // 64), "sm_90a")
        s, facts = kernel.schedule(), kernel.report_data["kernels"][0]
        assert s.blocks * s.iterations == 32 * 16 * 64 and dict(s.bound.terms)["tensor cores"] == 1024  # of 128 x 256
        assert facts["predicted"]["least"] == pytest.approx(2 * 4096**3 / (132 * 4096 * 1.98e9) * 1e6)


def test_a_bound_of_shared_memory_was_slower_than_measured():
    """128 x 128 tiles: 640 cycles with what TMA writes, and 585 measured (195.9 us at 1518 MHz, stores and starts included)."""
    program = gemm(4096, 8192, 8192, 128, 128, 64, tb=True, stages=3, threads=256)
    s = compiled(program, "sm_90a", resize_blocks=False).schedule()
    assert s.bound.term == "tensor cores" and dict(s.bound.terms)["shared memory"] == 384


def sums_of_tiles(many):
    """Each of 256 blocks adds up 64 tiles: its own, or those that all blocks read."""
    @T.prim_func
    def sums(A: T.Tensor((many, 64, 128, 64), "float16"), O: T.Tensor((256, 128, 64), "float16")):
        with T.Kernel(256, threads=128) as b:
            a, c = T.alloc_shared((128, 64), "float16"), T.alloc_fragment((128, 64), "float32")
            T.clear(c)
            for k in T.Pipelined(64, num_stages=2):
                T.copy(A[b % many, k, :, :], a)
                for i, j in T.Parallel(128, 64):
                    c[i, j] += a[i, j]
            T.copy(c, O[b, :, :])

    return sums


def test_tiles_that_no_other_block_loads_come_from_memory():
    """A copy's rate was that of tiles that neighbours load too: linear attention was predicted at half of its time."""
    own, common = (Schedule.parse(compiled(sums_of_tiles(n), "sm_90a").report_data["kernels"][0]["schedules"][0])
                   for n in (256, 1))
    assert dict(own.bound.terms)["memory"] == pytest.approx(128 * 64 * 2 / (4.8e12 / 132 / 1.98e9), rel=1e-3)
    assert dict(common.bound.terms)["memory"] == pytest.approx(dict(own.bound.terms)["memory"] / 256, abs=0.1)
    assert own.cycles > common.cycles


def test_a_clock_scales_what_the_sms_do():
    """Predictions at the clock that a measurement saw: the time of the tensor cores grows, that of memory does not."""
    from tilelang.jit.report import predicted

    kernel = compiled(gemm(4096, 4096, 4096, 128, 128, 64, tb=True, stages=3, threads=256), "sm_90a")
    facts = kernel.report_data["kernels"][0]
    fast, slow = (predicted(kernel.target, facts, mhz) for mhz in (1980, 990))
    assert slow["least"] == pytest.approx(2 * fast["least"]) and 1.8 < slow["us"] / fast["us"] < 2
    assert fast == facts["predicted"]


def test_launches_without_pipelined_loops_are_predicted_by_their_bytes():
    @T.prim_func
    def double(A: T.Tensor((1 << 24,), "float32"), B: T.Tensor((1 << 24,), "float32")):
        with T.Kernel(1 << 14, threads=128) as b:
            for i in T.Parallel(1024):
                B[b * 1024 + i] = A[b * 1024 + i] * 2.0

    p = compiled(double, "sm_90a").report_data["kernels"][0]["predicted"]
    assert p["least"] == pytest.approx(2**27 / 4.8e6) and p["us"] == pytest.approx(2**27 / 4.2e6 + 1.3)


def test_what_a_loop_of_no_stages_loads_was_counted_beside_it():
    """Plain loops over loads and a GEMM get stages: their tiles were added to the loads in front of the loop."""
    us = [compiled(gemm(4096, 4096, 4096, 128, 128, 64, tb=True, stages=n, threads=256), "sm_90a").report_data["kernels"][0][
        "predicted"]["us"] for n in (0, 4)]
    assert us[0] == pytest.approx(us[1], rel=0.01)


def streamed(stages):
    """Each of 128 blocks streams the rows of one head, 16 KB a tile, through one product."""
    @T.prim_func
    def stream(K: T.Tensor((4, 8192, 32, 128), "float16"), W: T.Tensor((128, 64), "float16"),
               O: T.Tensor((4, 32, 64, 64), "float16")):
        with T.Kernel(32, 4, threads=128) as (h, b):
            k, w = T.alloc_shared((64, 128), "float16"), T.alloc_shared((128, 64), "float16")
            c = T.alloc_fragment((64, 64), "float32")
            T.copy(W, w)
            T.clear(c)
            for i in T.Pipelined(128, num_stages=stages):
                T.copy(K[b, i * 64:(i + 1) * 64, h, :], k)
                T.gemm(k, w, c)
            T.copy(c, O[b, h, :, :])

    return stream


def test_fewer_bytes_in_flight_stream_slower():
    """Measured on an H200: 1174, 1104 and 985 cycles of 1,980 MHz with 2, 3 and 4 tiles of 16 KB."""
    found = [compiled(streamed(n), "sm_90a", extra_stages=False).report_data["kernels"][0] for n in (2, 3, 4)]
    assert [Schedule.parse(f["schedules"][0]).cycles for f in found] == [pytest.approx(n, rel=0.05) for n in (1174, 1104, 985)]
    us = [f["predicted"]["us"] for f in found]
    assert us[0] > 1.05 * us[1] > 1.1 * us[2]


def test_a_slow_clock_left_loops_that_memory_feeds_as_they_were():
    """Time of memory does not follow the clock of the SMs, what they do in an iteration does."""
    from tilelang.jit.report import predicted

    kernel = compiled(streamed(4), "sm_90a", extra_stages=False)
    s, facts = kernel.schedule(), kernel.report_data["kernels"][0]
    fast, slow, slower = (predicted(kernel.target, facts, mhz)["us"] for mhz in (1980, 1780, 1980 * s.near / s.cycles / 2))
    assert s.bound.term == "memory" and s.near < s.cycles and slow == pytest.approx(fast, rel=0.01) and slower > 1.9 * fast


def test_accumulators_split_by_columns_were_whole_operands_at_no_cost():
    """Each group has half of the columns of S, and makes all of P: S goes through shared memory first."""
    alone, both = (compiled(programs.retention(seq=8192, threads=n), "sm_90a").schedule() for n in (128, 256))
    (one,), (two,) = ([i.cycles for i in s.items if i.writes == ("P",)] for s in (alone, both))
    assert dict(both.split)["S"] == "N" and two == 2 * one and both.near > alone.near


def test_results_of_a_gemm_come_after_its_last_cycle():
    """A wait right behind a GEMM took none of the 74 cycles from the tensor cores to the registers."""
    events, waits = (Event(0, 0), Event(1, 0)), {1: Wait(0, (0,))}
    plain, late = (Simulation(events, waits, {0: 100.0}, [0.0, 50.0], {1}, [], 1, delays).cycles for delays in (False, True))
    assert (plain, late) == (150, 224)  # the groups meet under the GEMM


def test_loads_that_nothing_waits_for_bound_the_cycles_of_a_block():
    from tilelang.transform.analysis.simulate_loop import Blocks, Event, Usage

    usage = Usage((("loads", 512.0),), 0.0, None, True), Usage((("FMA", 392.0),))
    assert Blocks((Event(0, 0), Event(1, 0)), usage, 1).cycles == 512
