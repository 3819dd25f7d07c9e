"""loop_order, emit: GEMMs of any loop run under the statements that do not need them."""

import numpy as np
import pytest
import scheduled_programs as programs
from hopper_lowered import lowered

import tilelang.language as T
from tilelang.codegen.cuda.printer import print_kernel
from tilelang.ir import Alloc, Call, For, walk
from tilelang.runtime import nvrtc
from tilelang.simulator import run_device, run_tile
from tilelang.transform.analysis.access_table import GroupTables
from tilelang.transform.analysis.loop_items import LoopItems
from tilelang.transform.schedule.loop_order import Search
from tilelang.transform.analysis.simulate_loop import Event, Held, RingUse, Simulation

NEXT, FLYING = "under the next iteration", "wgmma in flight"
SHAPES = {
    "attention": (lambda **o: programs.attention(**o), NEXT),
    "causal": (lambda **o: programs.attention(causal=True, **o), NEXT),
    "an_extra_store": (lambda **o: programs.attention(extra=True, **o), NEXT),
    "weights_through_shared_memory": (lambda **o: programs.attention(through_shared=True, **o), NEXT),
    "two_values": (lambda **o: programs.attention(values=2, bn=64, causal=False, **o), NEXT),
    "sigmoid": (lambda **o: programs.attention(score="sigmoid", **o), NEXT),
    "latent": (lambda **o: programs.latent_attention(**{"stages": 3, **o}), NEXT),
    "two_products": (lambda **o: programs.two_products(**o), FLYING),
    "normalised": (lambda **o: programs.normalised(**o), FLYING),
    "retention": (lambda **o: programs.retention(**o), ""),
    "backward": (lambda **o: programs.backward(**o), ""),
}


def inputs(func, seed=0):
    rng = np.random.default_rng(seed)
    return [(rng.standard_normal([int(n.value) if hasattr(n, "value") else int(n) for n in b.shape]) / 2).astype(str(b.dtype))
            for _, b in func.buffers]


@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize("name", SHAPES)
def test_loops_in_another_order_compute_the_same(name, stages):
    make, _ = SHAPES[name]
    func = make(stages=stages).func
    (kernel,) = lowered(func).kernels
    assert (kernel.launch.plan.sync_report or "").startswith("ordered")
    args = inputs(func)
    want = run_tile(func, [x.copy() for x in args])
    got = run_device(lowered(func), [x.copy() for x in args]).outputs
    for key, x in got.items():
        # float16 operands of the second GEMMs are rounded alike; sums of up to 384 terms of order one in float32 differ
        assert np.allclose(x.astype("f8"), want[key].astype("f8"), rtol=2e-3, atol=4e-3), key


def test_sums_of_rows_beside_an_accumulator_passed_through_shared_memory():
    """The tile that is summed takes the rows of its sum, which are the accumulator's."""
    (kernel,) = lowered(programs.normalised()).kernels
    assert "squares_s" not in print_kernel(kernel), "the buffer in which sums change threads"


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_a_vector_in_the_loop_left_it_without_warp_roles(stages):
    """Vectors are loaded by TMA boxes of one row; what lies behind their end is zero."""
    func = programs.scaled_operand(stages=stages).func
    module = lowered(func)
    (kernel,) = module.kernels
    assert (kernel.launch.plan.sync_report or "").startswith("ordered")
    assert stages == 1 or "V_map" in print_kernel(kernel)
    args = inputs(func)
    want = run_tile(func, [x.copy() for x in args])
    got = run_device(module, [x.copy() for x in args]).outputs
    assert np.allclose(got["C"], want["C"], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", [x for x in SHAPES if x != "backward"])  # two blocks of an SM run under each other
def test_no_gemm_of_these_loops_was_waited_for_where_it_starts(name):
    """Each of these loops fell to synchronous wgmma, except plain attention."""
    make, said = SHAPES[name]
    (kernel,) = lowered(make()).kernels
    overlap = kernel.launch.plan.overlap or ""
    assert overlap and not overlap.startswith("wgmma synchronous") and said in overlap, overlap
    waits = [x.options.n for x in kernel_calls(kernel) if x.op == "wgmma_wait"]
    assert len(waits) and "wgmma" in {x.op for x in kernel_calls(kernel)}


def kernel_calls(kernel):
    return list(walk(kernel.launch, Call))


@pytest.mark.skipif(not nvrtc.available(), reason="NVRTC is not installed")
@pytest.mark.parametrize("name", SHAPES)
def test_ptxas_keeps_these_wgmmas_asynchronous(name):
    (kernel,) = lowered(SHAPES[name][0]()).kernels
    cubin = nvrtc.compile_cubin(print_kernel(kernel), "sm_90a")
    assert cubin.spills == 0 and "C75" not in cubin.log, cubin.log


def test_a_stage_that_is_released_late_costs_the_time_of_its_load():
    """One GEMM of 100 cycles and work of 100 cycles on its result; the stage lasts one iteration longer in the second run."""
    events = (Event(0, 0), Event(1, 0))
    ring = RingUse(frozenset({0}), 3500, 2)  # 100 cycles to load, and the latency

    def cycles(held):
        return Simulation(events, {}, {0: 100.0}, [0.0, 100.0], set(), [(ring, held)], 1).cycles

    soon, late = cycles(Held(0, 0, 0, False, 0, (0, 0, False))), cycles(Held(0, 1, 0, False, 0, (1, 0, False)))
    assert late > 1.5 * soon


def stages_of(program, **options):
    (kernel,) = lowered(program, **options).kernels
    assert (kernel.launch.plan.sync_report or "").startswith("ordered")
    return dict(kernel.launch.plan.stages)


def test_a_loop_waited_for_loads_beside_free_shared_memory():
    gemm = programs.two_products
    assert stages_of(gemm(m=128, n=64, k=2048, stages=2)) == {"As": 6, "Bs": 6, "Gs": 6}
    assert stages_of(gemm(m=128, n=64, k=2048, stages=2), extra_stages=False) == {"As": 2, "Bs": 2, "Gs": 2}
    assert stages_of(gemm(m=128, n=64, k=448, stages=2))["As"] == 2  # seven steps: most of a tile is its start
    assert stages_of(gemm(m=128, n=64, k=2048, stages=5))["As"] == 6


def blocks_of_64_rows(blocks):
    @T.prim_func
    def main(A: T.Tensor((blocks * 64, 1024), "float16"), B: T.Tensor((64, 1024), "float16"),
             C: T.Tensor((blocks * 64, 64), "float16")):
        with T.Kernel(blocks, threads=128) as by:
            a, b = T.alloc_shared((64, 64), "float16"), T.alloc_shared((64, 64), "float16")
            c = T.alloc_fragment((64, 64), "float32")
            T.clear(c)
            for k in T.Pipelined(16, num_stages=2):
                T.copy(A[by * 64, k * 64], a)
                T.copy(B[0, k * 64], b)
                T.gemm(a, b, c, transpose_B=True)
            T.copy(c, C[by * 64, 0])

    return main


def test_blocks_that_have_an_sm_each_left_memory_to_a_second_one():
    assert [stages_of(blocks_of_64_rows(n))["a"] for n in (8, 132)] == [8, 8]
    assert stages_of(blocks_of_64_rows(133))["a"] == 2  # another block of the SM hides the loads


def test_loops_with_more_stages_than_asked_for_compute_the_same():
    func = programs.two_products(m=128, n=64, k=640, stages=2).func
    assert stages_of(func)["As"] > 2
    args = inputs(func)
    want, got = (run_device(lowered(func, extra_stages=on), [x.copy() for x in args]).outputs for on in (False, True))
    assert all(np.array_equal(want[key], x) for key, x in got.items())


def test_orders_that_need_more_registers_are_not_taken():
    seen = []

    class Loop(LoopItems):  # of no items
        def registers(self, events, waits):
            seen.append(events)
            return 1000

    loop = Loop([], [], 1, lambda v: False)
    order = Search().best(loop, 240)
    assert order.events == () and not order.cycles and seen


def barrier_sizes(kernel):
    """How many threads meet at the named barriers inside the loops of a kernel."""
    loops = [x for x in walk(kernel.launch, For) if any(c.op == "wgmma" for c in walk(x, Call))]
    return {int(c.args[1].value) for x in loops for c in walk(x, Call) if c.op == "named_barrier"}


def test_rows_that_a_warp_group_writes_and_reads_alone_are_ordered_within_the_group():
    """Weights of attention: 128 threads write the 64 rows that their own wgmma reads.  256 threads met there."""
    (kernel,) = lowered(programs.attention(seq=512, through_shared=True)).kernels
    assert barrier_sizes(kernel) == {128}


def test_rows_of_other_warp_groups_are_ordered_between_the_groups(monkeypatch, caplog):
    """Latent attention: each group reads the weights of all rows.  Barriers of one group would be a race: the
    verifier finds it, and the warps are not specialised."""
    (kernel,) = lowered(programs.latent_attention()).kernels
    assert barrier_sizes(kernel) == {256}
    monkeypatch.setattr(GroupTables, "meet", lambda self, a, b: False)
    with caplog.at_level("WARNING"):
        (kernel,) = lowered(programs.latent_attention()).kernels
    assert "without a barrier in between" in caplog.text and kernel.launch.num_threads == 256


@pytest.mark.parametrize("stages, same", [(2, True), (3, True), (4, True), (2, False), (3, False), (4, False)])
def test_two_pipelined_loops_share_a_producer(stages, same):
    """Loops over the same tiles continue the rings; the trip counts are read at run time, also zero.  Such a launch had no
    warp roles ("several pipelined loops")."""
    func = programs.two_loops(k=(None, None), stages=stages, same=same).func
    program = lowered(func)
    (kernel,) = program.kernels
    assert kernel.launch.num_threads == 384 and (kernel.launch.plan.sync_report or "").startswith("ordered")
    assert kernel.launch.plan.overlap.startswith("pipelined loop 1 of 2: wgmma")
    assert sum(b.name.endswith("_full") for b in made_in(kernel)) == (1 if same or stages == 4 else 2)  # 256 KiB do not fit
    a, b, c, d = (x.astype("f2") for x in np.random.default_rng(1).standard_normal((4, 128, 256)))
    for one, two in ((4, 3), (0, 3), (3, 0), (0, 0), (1, 4)):
        args = [a, b.reshape(256, 128), c, d.reshape(256, 128), np.array([one, two], "i4"), np.zeros((128, 128), "f4")]
        got = run_device(program, args).outputs["C"]
        m, n = one * 64, two * 64
        want = a[:, :m].astype("f8") @ args[1][:m] / 2 + c[:, :n].astype("f8") @ args[3][:n]
        assert np.allclose(got, want, atol=1e-4)


def made_in(kernel):
    return [x.buffer for x in walk(kernel.launch, Alloc)]


@pytest.mark.parametrize("stages", [2, 3])
def test_full_and_masked_tiles_in_two_loops_are_both_overlapped(stages):
    func = programs.attention_of_two_loops(stages=stages).func
    program = lowered(func)
    (kernel,) = program.kernels
    assert (kernel.launch.plan.overlap or "").count(NEXT) == 2, kernel.launch.plan.overlap
    q, k, v, out = inputs(func)
    got = run_device(program, [q, k, v, out]).outputs["O"]
    scores = np.where(np.tri(len(q)) > 0, q.astype("f8") @ k.T.astype("f8") * 128**-0.5, -np.inf)
    weights = np.exp(scores - scores.max(1, keepdims=True))
    want = weights / weights.sum(1, keepdims=True) @ v.astype("f8")
    assert np.allclose(got, want, rtol=2e-3, atol=2e-3)  # weights are rounded to float16
    if nvrtc.available():
        cubin = nvrtc.compile_cubin(print_kernel(kernel), "sm_90a")
        assert cubin.spills == 0 and "C75" not in cubin.log, cubin.log


@pytest.mark.parametrize("name, threads, first", [("backward", 128, True), ("two_products", 256, False)])
def test_gemms_that_start_together_wait_for_all_their_tiles_where_threads_use_the_first_result(name, threads, first):
    """ptxas lets the warps of a group meet after each wait between GEMMs. A loop of GEMMs alone starts the first at once."""
    make, _ = SHAPES[name]
    (kernel,) = lowered(make(threads=threads).func).kernels
    ops = [c.op for c in walk(next(x for x in walk(kernel.launch.body, For) if any(
        c.op == "wgmma" for c in walk(x, Call))), Call) if c.op in ("wgmma", "wgmma_fence", "mbarrier_wait", "wgmma_wait")]
    start = ops.index("wgmma")
    run = ops[start:ops.index("wgmma_wait", start)]
    assert ("mbarrier_wait" not in run and "wgmma_fence" not in run) == first, ops
