"""The device simulator on hand-written lowered programs: right ones give their results, planted faults are named."""

import dataclasses

import numpy as np
import pytest
from kernel_text import alloc, program

from tilelang.errors import TileLangError
from tilelang.ir import Span, Store, numpy_dtype, rewrite
from tilelang.simulator import run_device
from tilelang.target.mma import MMA_ROWS

rng = np.random.default_rng(1)
SYNC = 'T.evaluate(T.call("sync_threads", "void"))'
COMMIT = 'T.evaluate(T.call("cp_async_commit", "void"))'


def wait(n: int) -> str:
    return f'T.evaluate(T.call("cp_async_wait", "void", n={n}))'


def cp_async(dst: str, src: str, nbytes: int, pred: str = "") -> str:
    more = f", {pred}" if pred else ""
    return (f'T.evaluate(T.call("cp_async", "void", T.address_of({dst}), T.address_of({src}){more}, '
            f'bytes={nbytes}))')


def refused(f, args, kind: str, text: str = "", **kw) -> TileLangError:
    with pytest.raises(TileLangError) as e:
        run_device(f, args, **kw)
    assert e.value.kind == kind and text in str(e.value), str(e.value)
    return e.value


# ---- control flow -----------------------------------------------------------------------------------------------


def test_divergent_branches_and_loops_follow_each_thread():
    f = program({"A": ((64,), "int32")}, f"""
        {alloc("v", (1,), "int32", "local.var")}
        for i in T.serial(tx % 7, start=1):
            if (i + tx) % 3 == 0:
                continue
            if i == 5:
                break
            else:
                v[0] = v[0] + i
        while v[0] > 4:
            v[0] = v[0] - 3
        if tx % 2 == 0:
            if tx % 4 == 0:
                T.evaluate(T.call("thread_return", "void"))
            v[0] = v[0] + 100
        A[tx] = v[0]
    """, threads=48)

    def one(t):
        v = 0
        for i in range(1, 1 + t % 7):
            if (i + t) % 3 == 0:
                continue
            if i == 5:
                break
            v += i
        while v > 4:
            v -= 3
        return -1 if t % 4 == 0 else v + 100 * (t % 2 == 0)

    want = [one(t) for t in range(48)] + [-1] * 16
    assert run_device(f, [np.full(64, -1, np.int32)]).outputs["A"].tolist() == want


def test_lazy_select_guards_a_load_and_branch_guards_a_store():
    f = program({"A": ((5,), "float32"), "B": ((5,), "float32")}, """
        if tx < 5:
            B[tx] = T.if_then_else(tx + 1 < 5, A[tx + 1], 9.0)
    """)
    got = run_device(f, [np.arange(5, dtype=np.float32), np.zeros(5, np.float32)]).outputs["B"]
    assert got.tolist() == [1, 2, 3, 4, 9]


@pytest.mark.spec("T.Ramp")
def test_vector_loads_and_stores_through_registers():
    f = program({"A": ((256,), "float16"), "B": ((256,), "float16")}, f"""
        {alloc("r", (8,), "float16", "local")}
        r[T.Ramp(0, 1, 8)] = A[T.Ramp(tx * 8, 1, 8)]
        for i in T.unroll(8):
            r[i] = r[i] + T.float16(1.0)
        B[T.Ramp(tx * 8, 1, 8)] = r[T.Ramp(0, 1, 8)]
    """)
    a = rng.standard_normal(256).astype(np.float16)
    report = run_device(f, [a, np.zeros_like(a)])
    assert np.array_equal(report.outputs["B"], a + np.float16(1))
    assert report.instructions["ld.global"] == 1 and report.bytes["ld.global"] == 512


# ---- races and barriers -----------------------------------------------------------------------------------------


def exchange(barrier: str, second: str = "") -> object:
    return program({"A": ((256,), "float32"), "B": ((256,), "float32")}, f"""
        {alloc("S", (128,), "float32", "shared.dyn")}
        for k in T.serial(2):
            S[tx] = A[k * 128 + tx]
            {barrier or "pass"}
            B[k * 128 + tx] = S[127 - tx]
            {second or "pass"}
    """, threads=128)


def test_exchange_through_shared_with_both_barriers():
    a = rng.standard_normal(256).astype(np.float32)
    got = run_device(exchange(SYNC, SYNC), [a, np.zeros_like(a)]).outputs["B"]
    assert np.array_equal(got, a.reshape(2, 128)[:, ::-1].reshape(-1))


@pytest.mark.parametrize("barriers, does", [(("", SYNC), "reads S"), ((SYNC, ""), "writes S")])
def test_removed_barrier_is_a_race(barriers, does):
    a = np.zeros(256, np.float32)
    refused(exchange(*barriers), [a, a], "sim-race", does)


def test_reads_that_repeat_are_counted_and_a_write_behind_them_is_a_race():
    """The same read entered again changes nothing, so it is looked up; what it counts and what it orders stay."""
    def f(write):
        return program({"A": ((128,), "float32"), "B": ((128,), "float32")}, f"""
            {alloc("S", (4096,), "float32", "shared.dyn")}
            S[tx * 32] = A[tx]
            {SYNC}
            for k in T.serial(3):
                B[tx] = B[tx] + S[(127 - tx) * 32]
                {write}
        """, threads=128)

    a = rng.standard_normal(128).astype(np.float32)
    report = run_device(f("pass"), [a, np.zeros_like(a)])
    assert report.instructions["ld.shared"] == 3 * 4 and report.bytes["ld.shared"] == 3 * 512
    assert sorted(n.wavefronts for n in report.bank_conflicts) == [4 * 32, 3 * 4 * 32]
    refused(f("S[tx * 32] = T.float32(1.0)"), [a, np.zeros_like(a)], "sim-race", "writes S")


def test_race_is_reported_at_the_users_line_with_the_other_access():
    here = Span("kernel.py", 7, 4)
    f = exchange("", SYNC)
    f = rewrite(f, lambda n: dataclasses.replace(n, span=here)
                if isinstance(n, Store) and n.buffer.name == "S" else None)
    e = refused(f, [np.zeros(256, np.float32)] * 2, "sim-race")
    assert any(place is here for place, _ in e.notes)


def test_warp_barrier_orders_its_warp_only():
    def body(other: str) -> str:
        return f"""
            {alloc("S", (64,), "int32", "shared.dyn")}
            S[tx] = tx
            T.evaluate(T.call("sync_warp", "void"))
            A[tx] = S[{other}]
        """
    a = np.zeros(64, np.int32)
    got = run_device(program({"A": ((64,), "int32")}, body("tx ^ 31"), threads=64), [a]).outputs["A"]
    assert np.array_equal(got, np.arange(64) ^ 31)
    refused(program({"A": ((64,), "int32")}, body("tx ^ 32"), threads=64), [a], "sim-race")


def test_reading_ones_own_element_needs_no_barrier_after_others_read_it_before_one():
    f = program({"A": ((32,), "int32")}, f"""
        {alloc("S", (32,), "int32", "shared.dyn")}
        S[tx] = tx
        {SYNC}
        A[tx] = S[31 - tx]
        {SYNC}
        S[tx] = S[tx] + 1
        {SYNC}
        A[tx] = A[tx] + S[31 - tx]
    """)
    assert np.array_equal(run_device(f, [np.zeros(32, np.int32)]).outputs["A"], 2 * np.arange(31, -1, -1) + 1)


def test_threads_storing_different_values_in_one_place_race_and_equal_values_do_not():
    def store(value: str) -> object:
        return program({"A": ((1,), "int32")}, f"A[0] = {value}")
    assert run_device(store("7"), [np.zeros(1, np.int32)]).outputs["A"][0] == 7
    refused(store("tx"), [np.zeros(1, np.int32)], "sim-race", "A")


def test_blocks_of_a_launch_race_on_global_memory_unless_atomic():
    plain = program({"A": ((1,), "int32")}, "if tx == 0:\n    A[0] = A[0] + 1", grid="3")
    refused(plain, [np.zeros(1, np.int32)], "sim-race", "another block")
    atomic = program({"A": ((1,), "int32")}, """
        T.evaluate(T.call("atomic_add", "int32", T.address_of(A[0]), tx))
    """, grid="3")
    assert run_device(atomic, [np.zeros(1, np.int32)]).outputs["A"][0] == 3 * 31 * 16


@pytest.mark.parametrize("body", [
    "if bx == 0:\n    A[tx] = 1\nelse:\n    B[tx] = A[tx]",  # written, then read elsewhere
    "if bx > 0:\n    A[tx] = 1\nelse:\n    B[tx] = A[tx]",  # read, then written elsewhere
    "B[bx * 32 + tx] = A[0]\nif bx == 2:\n    A[tx] = 1",  # read by this block too
    "A[tx // 32 + bx // 2] = 1",
])
def test_blocks_that_read_what_another_writes_race(body):
    f = program({"A": ((32,), "int32"), "B": ((96,), "int32")}, body, grid="3")
    refused(f, [np.zeros(32, np.int32), np.zeros(96, np.int32)], "sim-race", "another block")


def test_blocks_may_reuse_thread_numbers_on_their_own_elements():
    f = program({"A": ((96,), "int32")}, f"""
        A[bx * 32 + tx] = tx
        {SYNC}
        A[bx * 32 + 31 - tx] = A[bx * 32 + 31 - tx] + 1
    """, grid="3")
    assert np.array_equal(run_device(f, [np.zeros(96, np.int32)]).outputs["A"], np.tile(np.arange(32) + 1, 3))


def test_barrier_reached_by_some_threads_is_refused():
    f = program({"A": ((1,), "int32")}, f"if tx < 32:\n    {SYNC}", threads=64)
    refused(f, [np.zeros(1, np.int32)], "sim-barrier", "32 of 64 threads")


def test_barrier_after_some_threads_returned_is_passed():
    f = program({"A": ((64,), "int32")}, f"""
        if tx >= 40:
            T.evaluate(T.call("thread_return", "void"))
        {SYNC}
        A[tx] = 1
    """, threads=64)
    assert run_device(f, [np.zeros(64, np.int32)]).outputs["A"].sum() == 40


def test_overlapping_shared_memory_plan_is_a_race_without_a_barrier():
    def planned(barrier: str) -> object:
        return program({"A": ((64,), "int32")}, f"""
            {alloc("S", (64,), "int32", "shared.dyn")}
            {alloc("R", (64,), "int32", "shared.dyn")}
            S[tx] = tx
            {SYNC}
            A[tx] = S[63 - tx]
            {barrier}
            R[tx] = tx
            A[tx] = A[tx] + R[tx]
        """, threads=64, launch_plan='shared_bytes=T.py(256), shared_offsets=((S, T.py(0)), (R, T.py(0)))')
    assert (run_device(planned(SYNC), [np.zeros(64, np.int32)]).outputs["A"] == 63).all()
    refused(planned("pass"), [np.zeros(64, np.int32)], "sim-race", "writes R")


def test_buffers_planned_over_each_other_may_be_declared_early_but_not_read_through():
    def planned(read: str) -> object:
        return program({"A": ((32,), "int32")}, f"""
            {alloc("S", (32,), "int32", "shared.dyn")}
            S[tx] = tx
            {alloc("R", (32,), "int32", "shared.dyn")}
            {SYNC}
            A[tx] = {read}[31 - tx]
        """, launch_plan='shared_bytes=T.py(128), shared_offsets=((S, T.py(0)), (R, T.py(0)))')
    assert run_device(planned("S"), [np.zeros(32, np.int32)]).outputs["A"].tolist() == list(range(31, -1, -1))
    refused(planned("R"), [np.zeros(32, np.int32)], "sim-uninitialized", "R (shared")


# ---- roles and named barriers ---------------------------------------------------------------------------------------


def named(op: str, number: int, count: int) -> str:
    return f'T.evaluate(T.call("{op}", "void", {number}, {count}))' if op else "pass"


def producer_consumer(full: str = "named_barrier", empty: str = "named_barrier_arrive", count: int = 64,
                      rounds: int = 3, room: str = "named_barrier", filled: str = "named_barrier_arrive") -> object:
    """Warp 0 fills a buffer three times, warp 1 takes it: barrier 1 says full, barrier 2 says empty."""
    return program({"A": ((3, 32), "int32"), "B": ((3, 32), "int32")}, f"""
        {alloc("S", (32,), "int32", "shared.dyn")}
        if tx < 32:
            for k in T.serial(3):
                {named(room, 2, 64)}
                S[tx] = A[k, tx]
                {named(filled, 1, count)}
        if tx >= 32:
            for k in T.serial({rounds}):
                {named(empty, 2, 64)}
                {named(full, 1, 64)}
                B[k, tx - 32] = S[63 - tx]
    """, threads=64)


A3 = np.arange(96, dtype=np.int32).reshape(3, 32)


def test_producer_and_consumer_warps_meet_at_named_barriers():
    out = run_device(producer_consumer(), [A3, np.zeros_like(A3)]).outputs["B"]
    assert np.array_equal(out, A3[:, ::-1])


@pytest.mark.parametrize("fault, kind", [
    ({"full": "named_barrier_arrive"}, "sim-uninitialized"),  # the consumer does not wait for the first tile
    ({"room": "", "empty": "", "filled": "named_barrier"}, "sim-race"),  # refilled before it has been taken
])
def test_role_that_arrives_where_it_must_wait_is_found(fault, kind):
    refused(producer_consumer(**fault), [A3, np.zeros_like(A3)], kind, "S")


@pytest.mark.parametrize("fault", [{"rounds": 2}, {"count": 96}])
def test_roles_that_wait_for_ever_are_a_deadlock(fault):
    kind = refused(producer_consumer(**fault), [A3, np.zeros_like(A3)], "sim-barrier")
    assert "wait" in str(kind) or "at once" in str(kind)


def test_block_barrier_between_roles_and_early_return():
    f = program({"A": ((96,), "int32")}, f"""
        {alloc("S", (96,), "int32", "shared.dyn")}
        if tx >= 64:
            T.evaluate(T.call("thread_return", "void"))
        S[tx] = tx
        if tx < 32:
            {named("named_barrier", 3, 32)}
        {SYNC}
        A[tx] = S[63 - tx]
    """, threads=96)
    out = run_device(f, [np.zeros(96, np.int32)]).outputs["A"]
    assert out.tolist() == list(range(63, -1, -1)) + [0] * 32


# ---- bounds, alignment, initialisation ----------------------------------------------------------------------------


@pytest.mark.parametrize("body, kind, text", [
    ("A[tx + 1] = 0", "sim-out-of-bounds", "store to A[32]"),
    ("for i in T.serial(33):\n    S[i] = 0", "sim-out-of-bounds", "store to S[32]"),
    ("for i in T.unroll(5):\n    r[i] = 0", "sim-out-of-bounds", "store to r[4]"),
    ("r[0] = A[tx - 1]", "sim-out-of-bounds", "load of A[-1]"),
    ("r[T.Ramp(0, 1, 4)] = A[T.Ramp(tx * 4 % 32 + 1, 1, 4)]", "sim-out-of-bounds", "load of A[29]"),
    ("r[T.Ramp(0, 1, 4)] = A[T.Ramp(tx % 4 * 4 + 1, 1, 4)]", "sim-misaligned", "16 bytes at byte 4"),
    ("A[tx] = r[0]", "sim-uninitialized", "r (local)"),
    ("S[tx % 8] = 1\nA[tx] = S[tx]", "sim-uninitialized", "S (shared"),
])
def test_wrong_accesses_are_named(body, kind, text):
    f = program({"A": ((32,), "int32")}, "\n".join([alloc("S", (32,), "int32", "shared.dyn"),
                                                    alloc("r", (4,), "int32", "local"), body]))
    refused(f, [np.zeros(32, np.int32)], kind, text)


def test_output_that_the_caller_did_not_give_is_uninitialised():
    f = program({"A": ((32,), "int32")}, "A[tx] = A[tx] + 1", facts="out_idx=(0,)")
    refused(f, [], "sim-uninitialized", "A (global)")
    assert run_device(f, [np.zeros(32, np.int32)]).outputs["A"].sum() == 32


# ---- asynchronous copies ------------------------------------------------------------------------------------------


def ring(stages: int = 2, ahead: str = "(t + 1) % 2", use: str = "t % 2", pending: int = 1, after: str = SYNC,
         end: str = SYNC) -> object:
    """out = sum over t of A[t] reversed, through a ring of buffers filled by cp.async."""
    return program({"A": ((4, 128), "float32"), "B": ((128,), "float32")}, f"""
        {alloc("S", (stages * 128,), "float32", "shared.dyn")}
        {alloc("c", (4,), "float32", "local")}
        c[T.Ramp(0, 1, 4)] = T.Broadcast(0.0, 4)
        {cp_async("S[tx * 4]", "A[0, tx * 4]", 16)}
        {COMMIT}
        for t in T.serial(4):
            if t + 1 < 4:
                {cp_async(f"S[({ahead}) * 128 + tx * 4]", "A[t + 1, tx * 4]", 16)}
            {COMMIT}
            {wait(pending)}
            {after}
            c[T.Ramp(0, 1, 4)] = c[T.Ramp(0, 1, 4)] + S[T.Ramp(({use}) * 128 + (31 - tx) * 4, 1, 4)]
            {end}
        B[T.Ramp(tx * 4, 1, 4)] = c[T.Ramp(0, 1, 4)]
    """)


A4 = rng.integers(0, 9, (4, 128)).astype(np.float32)


def test_ring_of_asynchronous_copies():
    got = run_device(ring(), [A4, np.zeros(128, np.float32)]).outputs["B"]
    assert np.array_equal(got, A4.sum(0).reshape(32, 4)[::-1].reshape(-1))


@pytest.mark.parametrize("fault, kinds", [
    ({"pending": 2}, {"sim-async", "sim-uninitialized"}),  # a wait that lets the needed group fly
    ({"use": "(t + 1) % 2"}, {"sim-async"}),  # reads the stage being filled
    ({"ahead": "t % 2"}, {"sim-async"}),  # fills the stage in use
    ({"after": "pass"}, {"sim-race"}),  # landed for the issuing thread only
    ({"end": "pass"}, {"sim-race"}),  # refilled while others still read
    ({"stages": 1}, {"sim-out-of-bounds"}),
])
def test_faulty_ring_is_refused(fault, kinds):
    with pytest.raises(TileLangError) as e:
        run_device(ring(**fault), [A4, np.zeros(128, np.float32)])
    assert e.value.kind in kinds, str(e.value)


def test_unchecked_run_of_a_wrong_wait_reads_stale_bytes():
    got = run_device(ring(pending=2), [A4, np.zeros(128, np.float32)], check=False).outputs["B"]
    assert not np.array_equal(got, A4.sum(0).reshape(32, 4)[::-1].reshape(-1))


def test_false_predicate_of_an_asynchronous_copy_writes_zeros_and_reads_nothing():
    f = program({"A": ((20,), "float32"), "B": ((32,), "float32")}, f"""
        {alloc("S", (32,), "float32", "shared.dyn")}
        {cp_async("S[tx]", "A[tx]", 4, "tx < 20")}
        {wait(0)}
        B[tx] = S[tx]
    """)
    # Not committed: the wait does not cover it.
    refused(f, [np.ones(20, np.float32), np.zeros(32, np.float32)], "sim-async")
    f = program({"A": ((20,), "float32"), "B": ((32,), "float32")}, f"""
        {alloc("S", (32,), "float32", "shared.dyn")}
        {cp_async("S[tx]", "A[tx]", 4, "tx < 20")}
        {COMMIT}
        {wait(0)}
        B[tx] = S[tx]
    """)
    got = run_device(f, [np.ones(20, np.float32), np.zeros(32, np.float32)]).outputs["B"]
    assert got.tolist() == [1] * 20 + [0] * 12


# ---- matrix instructions ------------------------------------------------------------------------------------------


def one_mma(row, clear: bool = True) -> object:
    """C registers = mma of registers that the caller has laid out."""
    (ra, rb, rc) = (x.registers for x in (row.a, row.b, row.c))
    ta, tb, tc = str(row.a_dtype), str(row.b_dtype), str(row.c_dtype)
    return program({"A": ((64, ra), ta), "B": ((64, rb), tb), "C": ((64, rc), tc)}, f"""
        {alloc("a", (ra,), ta, "local")}
        {alloc("b", (rb,), tb, "local")}
        {alloc("c", (rc,), tc, "local")}
        for i in T.unroll({ra}):
            a[i] = A[tx, i]
        for i in T.unroll({rb}):
            b[i] = B[tx, i]
        for i in T.unroll({rc if clear else rc - 1}):
            c[i] = C[tx, i]
        T.evaluate(T.call("mma", "void", T.address_of(c[0]), T.address_of(a[0]), T.address_of(b[0]),
                          row="{row.name}"))
        for i in T.unroll({rc}):
            C[tx, i] = c[i]
    """, threads=64)


def registers(frag, tiles: np.ndarray) -> np.ndarray:
    """(64, registers) of two warps' tiles."""
    out = np.zeros((2, 32, frag.registers), tiles.dtype)
    for w in range(2):
        out[w, frag.owners()[0], frag.register_table()] = tiles[w]
    return out.reshape(64, -1)


@pytest.mark.parametrize("name", sorted(MMA_ROWS))
def test_mma_rows_multiply(name):
    row = MMA_ROWS[name]
    m, n, k = row.shape
    low = 0 if row.a_dtype.is_unsigned or row.b_dtype.is_unsigned else -4
    a, b, c = (rng.integers(low, 5, (2, *s)).astype(numpy_dtype(dt)) for s, dt in
               (((m, k), row.a_dtype), ((k, n), row.b_dtype), ((m, n), row.c_dtype)))
    got = run_device(one_mma(row), [registers(row.a, a), registers(row.b, b), registers(row.c, c)]).outputs["C"]
    want = c.astype(np.float64) + a.astype(np.float64) @ b.astype(np.float64)
    assert np.array_equal(got.astype(np.float64), registers(row.c, want))


def test_accumulator_layout_is_the_one_of_the_manual():
    # PTX ISA, m16n8k16: lane l holds c(l/4, 2*(l%4)) first and c(l/4 + 8, 2*(l%4) + 1) last.
    row = MMA_ROWS["mma.m16n8k16.f16.f16.f32"]
    a, b = np.eye(16, dtype=np.float16)[None].repeat(2, 0), rng.integers(0, 99, (2, 16, 8)).astype(np.float16)
    c = np.zeros((2, 16, 8), np.float32)
    got = run_device(one_mma(row), [registers(row.a, a), registers(row.b, b), registers(row.c, c)]).outputs["C"]
    for lane in (0, 5, 31, 40):
        w, l = divmod(lane, 32)
        assert got[lane, 0] == b[w, l // 4, 2 * (l % 4)] and got[lane, 3] == b[w, l // 4 + 8, 2 * (l % 4) + 1]


def test_uninitialised_accumulator_of_mma_is_refused():
    row = MMA_ROWS["mma.m16n8k16.f16.f16.f32"]
    args = [np.zeros((64, f.registers), numpy_dtype(d)) for f, d in
            ((row.a, row.a_dtype), (row.b, row.b_dtype), (row.c, row.c_dtype))]
    refused(one_mma(row, clear=False), args, "sim-uninitialized", "c is an operand")


@pytest.mark.spec("T.Broadcast")
def test_mma_in_half_a_warp_is_refused():
    f = program({"A": ((1,), "int32")}, f"""
        {alloc("r", (8,), "float16", "local")}
        {alloc("c", (4,), "float32", "local")}
        r[T.Ramp(0, 1, 8)] = T.Broadcast(T.float16(0.0), 8)
        c[T.Ramp(0, 1, 4)] = T.Broadcast(0.0, 4)
        if tx < 16:
            T.evaluate(T.call("mma", "void", T.address_of(c[0]), T.address_of(r[0]), T.address_of(r[0]),
                              row="mma.m16n8k16.f16.f16.f32"))
    """)
    refused(f, [np.zeros(1, np.int32)], "sim-warp-divergence", "16 active")


@pytest.mark.parametrize("trans", [False, True])
@pytest.mark.parametrize("num", [1, 2, 4])
def test_ldmatrix(num, trans):
    f = program({"A": ((32, 8), "float16"), "B": ((32, 2 * num), "float16")}, f"""
        {alloc("S", (256,), "float16", "shared.dyn")}
        {alloc("r", (8,), "float16", "local")}
        S[T.Ramp(tx * 8, 1, 8)] = A[tx, T.Ramp(0, 1, 8)]
        {SYNC}
        T.evaluate(T.call("ldmatrix", "void", T.address_of(r[0]), T.address_of(S[tx * 8]),
                          num={num}, trans={trans}))
        for i in T.unroll({2 * num}):
            B[tx, i] = r[i]
    """)
    a = np.arange(256, dtype=np.float16).reshape(32, 8)
    got = run_device(f, [a, np.zeros((32, 2 * num), np.float16)]).outputs["B"]
    for lane in range(32):
        for j in range(num):
            m = a[8 * j:8 * j + 8].T if trans else a[8 * j:8 * j + 8]
            assert got[lane, 2 * j:2 * j + 2].tolist() == m[lane // 4, 2 * (lane % 4):2 * (lane % 4) + 2].tolist()


# ---- bank conflicts -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("index, dt, lanes, passes, ideal", [
    ("tx", "float32", 1, 1, 1),
    ("tx * 2", "float32", 1, 2, 1),
    ("tx * 32", "float32", 1, 32, 1),
    ("tx * 33", "float32", 1, 1, 1),
    ("0", "float32", 1, 1, 1),  # one word for all lanes
    ("tx", "float16", 1, 1, 1),
    ("tx * 64", "float16", 1, 32, 1),
    ("tx * 2", "float32", 2, 2, 2),
    ("tx * 4", "float32", 4, 4, 4),
    ("tx * 32", "float32", 4, 32, 4),
    ("tx * 36", "float32", 4, 4, 4),
])
def test_bank_conflicts_of_a_shared_read(index, dt, lanes, passes, ideal):
    at = index if lanes == 1 else f"T.Ramp({index}, 1, {lanes})"
    r = "0" if lanes == 1 else f"T.Ramp(0, 1, {lanes})"
    zero = f"T.{dt}(0.0)" if dt != "float32" else "0.0"
    f = program({"A": ((1,), "int32")}, f"""
        {alloc("S", (2048,), dt, "shared.dyn")}
        {alloc("r", (4,), dt, "local")}
        for i in T.serial(64):
            S[i * 32 + tx] = {zero}
        {SYNC}
        r[{r}] = S[{at}]
    """)
    banks = {b.site.text: b for b in run_device(f, [np.zeros(1, np.int32)]).bank_conflicts}
    assert (banks["read"].wavefronts, banks["read"].ideal) == (passes, ideal)
    assert banks["write"].conflicts == 0 and banks["write"].instructions == 64


def test_ldmatrix_of_unswizzled_rows_conflicts_and_padded_rows_do_not():
    def passes(pitch: int) -> tuple[int, int]:
        f = program({"A": ((1,), "int32")}, f"""
            {alloc("S", (32 * pitch,), "float16", "shared.dyn")}
            {alloc("r", (8,), "float16", "local")}
            S[T.Ramp(tx * {pitch}, 1, 8)] = T.Broadcast(T.float16(0.0), 8)
            {SYNC}
            T.evaluate(T.call("ldmatrix", "void", T.address_of(r[0]), T.address_of(S[tx * {pitch}]),
                              num=4))
        """)
        b = next(b for b in run_device(f, [np.zeros(1, np.int32)]).bank_conflicts if b.site.text == "read")
        return b.wavefronts, b.ideal
    assert passes(64) == (32, 4)
    assert passes(72) == (4, 4)


def test_dynamic_shape_and_host_loop_of_launches():
    f = program({"A": (("m",), "int32")}, """
        if bx * 32 + tx < m:
            A[bx * 32 + tx] = A[bx * 32 + tx] + bx
    """, symbols="m", grid="(m + 31) // 32")
    a = np.zeros(70, np.int32)
    assert np.array_equal(run_device(f, [a]).outputs["A"], np.arange(70) // 32)


# ---- votes ----------------------------------------------------------------------------------------------------------


@pytest.mark.spec("L15:warp-votes")
@pytest.mark.parametrize("op, dt, want", [
    ("any_sync", "int32", lambda p, x: int(p.any())),
    ("all_sync", "int32", lambda p, x: int(p.all())),
    ("ballot_sync", "uint64", lambda p, x: sum(1 << i for i in np.flatnonzero(p))),
])
def test_votes_of_a_warp(op, dt, want):
    f = program({"A": ((64,), dt), "X": ((64,), "int32")}, f"""
        A[tx] = T.call("{op}", "{dt}", X[tx], T.uint32(0xFFFFFFFF))
    """, threads=64)
    x = np.concatenate([rng.integers(0, 2, 32), np.ones(32)]).astype(np.int32)
    got = run_device(f, [np.zeros(64, numpy_dtype(dt)), x]).outputs["A"]
    assert [int(v) for v in got] == [want(w != 0, w) for w in x.reshape(2, 32) for _ in range(32)]


def test_match_and_block_votes():
    f = program({"M": ((32,), "uint32"), "N": ((32,), "uint32"), "C": ((32,), "int32")}, """
        M[tx] = T.call("match_any_sync", "uint32", tx % 5, T.uint32(0xFFFFFFFF))
        N[tx] = T.call("match_all_sync", "uint32", tx // 32, T.uint32(0xFFFFFFFF))
        C[tx] = T.call("syncthreads_count", "int32", tx % 3)
    """)
    out = run_device(f, [np.zeros(32, np.uint32), np.zeros(32, np.uint32), np.zeros(32, np.int32)]).outputs
    assert [int(v) for v in out["M"]] == [sum(1 << j for j in range(32) if j % 5 == i % 5) for i in range(32)]
    assert (out["N"] == 0xFFFFFFFF).all() and (out["C"] == 21).all()


def test_vote_that_names_an_absent_lane_is_refused():
    f = program({"A": ((32,), "int32")}, """
        if tx < 16:
            A[tx] = T.call("any_sync", "int32", tx, T.uint32(0xFFFFFFFF))
    """)
    refused(f, [np.zeros(32, np.int32)], "sim-warp-divergence", "names thread 16")


def test_printed_text_is_kept_and_written(capsys):
    f = program({"A": ((1,), "int32")}, 'if tx == 3:\n    T.evaluate(T.call("printf", "int32", "t=%d%%\\n", tx))')
    assert run_device(f, [np.zeros(1, np.int32)]).printed == "t=3%\n" == capsys.readouterr().out


def test_a_value_that_the_lanes_of_a_warp_agree_on():
    def numbered(value: str):
        return program({"A": ((64,), "int32")}, f'A[tx] = T.call("warp_uniform", "int32", {value})', threads=64)

    zero = np.zeros(64, np.int32)
    assert np.array_equal(run_device(numbered("tx // 32 + 5"), [zero]).outputs["A"], np.repeat([5, 6], 32))
    refused(numbered("tx // 16"), [zero], "sim-warp-divergence", "do not agree")
