"""Schedules of warp specialisation: objects that are checked, and kernels that mean what their statements say."""

import numpy as np
import pytest
from everywhere import SM80, SM90A, WITH_HOPPER, run

import tilelang
import tilelang.language as T

pytestmark = pytest.mark.spec("L18:ws_schedule", "L21:ws-schedules")


def roles():
    return [T.WSRole("load", warps_lo=0, warps_hi=4, max_nreg=40), T.WSRole("multiply", warps_lo=4, warps_hi=8)]


def test_parts_are_values():
    assert T.WSRole("a", warps_lo=0, warps_hi=4) == T.WSRole("a", warps_lo=0, warps_hi=4, max_nreg=0)
    ring = T.WSPipeline("ring", ["A", "B"], 3)
    assert ring.buffers == ("A", "B") and ring.depth == 3
    for make, kind in ((T.WSSync.producer_acquire, "PRODUCER_ACQUIRE"), (T.WSSync.producer_commit, "PRODUCER_COMMIT"),
                       (T.WSSync.consumer_wait, "CONSUMER_WAIT"), (T.WSSync.consumer_release, "CONSUMER_RELEASE")):
        step = make("ring", stage=1)
        assert step == T.WSSync(getattr(T.WSSyncKind, kind), "ring", 1) and isinstance(step, T.WSInstr)
        assert make(ring).pipeline_name == "ring" and make(ring).stage == 0
    scope = T.WSScope(T.WSScope.ROOT, {"load": ["copy", T.WSSync.producer_commit(ring)]})
    assert scope.bodies == (("load", (T.WSOpRef("copy"), T.WSSync.producer_commit(ring))),)
    assert T.WSID == T.ws_schedule.WSID and T.ws_schedule.WSSchedule is T.WSSchedule
    with pytest.raises(TypeError, match="keyword|positional"):
        T.WSRole("a", 0, 4)


@pytest.mark.parametrize("make,words", [
    (lambda: T.WSSchedule(6, roles()), "num_warps must be a positive multiple of 4, found 6"),
    (lambda: T.WSSchedule(0, []), "multiple of 4"),
    (lambda: T.WSSchedule(4, roles()), "role 'multiply' has warps up to 8, of 4"),
    (lambda: T.WSSchedule(8, [*roles(), T.WSRole("x", warps_lo=7, warps_hi=8)]),
     "warp 7 has two warp roles: 'multiply' and 'x'"),
    (lambda: T.WSSchedule(8, [roles()[0]] * 2), "names of their own"),
    (lambda: T.WSSchedule(8, roles(), [], [T.WSScope("root", {"store": []})]), "role 'store', which is not there"),
    (lambda: T.WSSchedule(8, roles(), [], [T.WSScope("root", {"load": [T.WSSync.consumer_wait("ring")]})]),
     "pipeline 'ring', which is not there"),
    (lambda: T.WSRole("a", warps_lo=4, warps_hi=4), "none"),
    (lambda: T.WSRole("a", warps_lo=0, warps_hi=4, max_nreg=300), "255 are the most"),
    (lambda: T.WSPipeline("a", [], 0), "depth 0")])
def test_parts_that_do_not_fit_are_refused(make, words):
    with pytest.raises(AssertionError, match=words):
        make()


def test_names_and_kinds_of_parts():
    for make in (lambda: T.WSOpRef(""), lambda: T.WSRole(3, warps_lo=0, warps_hi=4), lambda: T.WSScope("", {})):
        with pytest.raises(ValueError, match="a text that is not empty"):
            make()
    for make in (lambda: T.WSScope("root", {"load": [3]}), lambda: T.WSSchedule(8, ["load"])):
        with pytest.raises(TypeError):
            make()
    with pytest.raises(ValueError):
        T.WSSync("produce", "ring")


def scheduled(annotated):
    schedule = T.WSSchedule(8, roles(), [T.WSPipeline("ring", ["As", "Bs"], 2)], [
        T.WSScope(T.WSScope.ROOT, {"load": ["loop"], "multiply": ["loop", "store"]}),
        T.WSScope("loop", {"load": [T.WSSync.producer_acquire("ring"), "a", "b", T.WSSync.producer_commit("ring")],
                           "multiply": [T.WSSync.consumer_wait("ring"), "gemm", T.WSSync.consumer_release("ring")]})])

    @T.prim_func
    def main(A: T.Tensor((128, 128), "float16"), B: T.Tensor((128, 128), "float16"), C: T.Tensor((128, 128), "float32")):
        with T.Kernel(1, threads=256):
            As = T.alloc_shared((128, 32), "float16")
            Bs = T.alloc_shared((32, 128), "float16")
            Cf = T.alloc_fragment((128, 128), "float32")
            if annotated:
                T.annotate_ws_schedule(schedule)
            T.clear(Cf)
            with T.ws_op("loop"):
                for k in T.Pipelined(4, num_stages=2):
                    T.copy(A[0, k * 32], As, annotations={T.WSID: "a"})
                    T.copy(B[k * 32, 0], Bs, annotations={T.WSID: "b"})
                    with T.ws_op("gemm"):
                        T.gemm(As, Bs, Cf)
            with T.ws_op("store"):
                T.copy(Cf, C)

    return main


@pytest.mark.parametrize("on", WITH_HOPPER)
def test_a_scheduled_kernel_computes_what_its_statements_say(on):
    rng = np.random.default_rng(21)
    a, b = (rng.integers(-3, 4, (128, 128)).astype(np.float16) for _ in range(2))
    got = run(scheduled(True), a, b, on=on)[2]
    assert np.array_equal(got, a.astype(np.float32) @ b.astype(np.float32))
    assert np.array_equal(got, run(scheduled(False), a, b, on=on)[2])


def test_the_report_says_that_the_schedule_is_the_compilers():
    for target in (SM80, SM90A):
        kernel = tilelang.compile(scheduled(True), target=target, execution_backend="simulator")
        assert "the annotated schedule of warp roles (load 0-3, multiply 4-7): the compiler's own is used" in kernel.report()
        assert "annotated" not in tilelang.compile(scheduled(False), target=target, execution_backend="simulator").report()


def test_what_is_no_schedule_is_refused():
    def build(schedule):
        @T.prim_func
        def main(A: T.Tensor((4,), "float32")):
            with T.Kernel(1, threads=32):
                T.annotate_ws_schedule(schedule)

    with pytest.raises(TypeError, match="takes a WSSchedule, found str"):
        build("load")
    for call in (lambda: T.annotate_ws_schedule(T.WSSchedule(8, roles())), lambda: T.ws_op("a")):
        with pytest.raises((RuntimeError, ValueError)):
            call()
