"""The plain programs of benchmarks/suite/plain at small sizes: reference interpreter, simulator and CPU agree with float64."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import tilelang

pytest.importorskip("torch")
from tilelang.target import Target
from tilelang.transform.framework.scope import as_planned
from tilelang.transform.pipeline import lower

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
from suite.plain import CORPUS

BACKENDS = {
    "reference": dict(execution_backend="tile", target="cpu"), "cpu": dict(target="cpu"),
    "sm_90a": dict(execution_backend="simulator", target={"kind": "cuda", "arch": "sm_90a"}),
    "sm_80": dict(execution_backend="simulator", target={"kind": "cuda", "arch": "sm_80"}),
}
EVERY = 12  # of the cases in each run, so that each backend has its turn; all of them at night


def agrees(name: str, backend: str) -> None:
    p = CORPUS[name]
    tensors = p.make(p.small, "cpu")
    want = p.reference(tensors, p.small)
    kernel = tilelang.compile(p.program(**p.small), **BACKENDS[backend], pass_configs=dict(p.config) or None)
    kernel(*(tensors[n] for n in p.tensors(**p.small)))
    for n, w, bound in want:
        worst = float(((tensors[n].double() - w).abs() / bound).nan_to_num(nan=float("inf")).max())
        assert worst <= 1, f"{n} of {name} on {backend}: {worst:.3g} times its bound"


LARGE = ("latent attention", "attention backward", "linear attention, chunks of 128")  # more than a block has on sm_80
CASES = [(n, b) for n in CORPUS for b in BACKENDS if b != "sm_80" or not n.startswith(LARGE)]


@pytest.mark.parametrize("name, backend", CASES[::EVERY + 1])
def test_a_plain_program_agrees_with_float64(name: str, backend: str):
    agrees(name, backend)


@pytest.mark.slow
@pytest.mark.parametrize("name, backend", CASES)
def test_every_plain_program_agrees_with_float64(name: str, backend: str):
    agrees(name, backend)


def test_every_program_has_another_form_to_be_compared_with():
    assert len(CORPUS) >= 120
    for p in CORPUS.values():
        assert callable(p.best[-1]) or p.best[0] in ("copy", "program")
        if p.best[0] == "program":
            assert p.best[1] in CORPUS and p.flops(**p.full) > 0


@pytest.mark.parametrize("name", ["linear attention, 256 threads", "gated linear attention, 256 threads"])
def test_an_accumulator_that_threads_touch_was_in_flight_over_the_end_of_an_iteration(name: str):
    """ptxas serialised all wgmma of these loops (C7514), and the schedule that replaced this one overlapped less."""
    p = CORPUS[name]
    with as_planned():
        (kernel,) = lower(p.program(**p.full).func, Target(BACKENDS["sm_90a"]["target"])).kernels
    assert "under the next iteration" in kernel.launch.plan.overlap and "while the next" not in kernel.launch.plan.overlap


SEARCHED = ("retention", "attention backward d 64", "gemm fp8 nn", "SwiGLU", "attention causal")


def one_search(name: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    from tilelang.transform.schedule.loop_order import Search

    searches: list[str] = []
    make = Search.__init__

    def made(self: Search, flight: str = "iterations") -> None:
        searches.append(flight)
        make(self, flight)

    monkeypatch.setattr(Search, "__init__", made)
    lower(CORPUS[name].program(**CORPUS[name].full).func, Target({"kind": "cuda", "arch": "sm_90a"}))
    declined = searches[1:] == ["iteration"]  # a loop that gets no warp roles is ordered within its iterations
    assert len(searches) <= 1 or declined, searches
    return searches


@pytest.mark.parametrize("name", SEARCHED)
def test_a_kernel_had_a_search_for_each_number_of_stages_and_for_versions(name: str, monkeypatch: pytest.MonkeyPatch):
    """The orders of a loop were made and compared again for each number of stages that it may get, for the same loop without
    versions of operands, and for the form of the program that was taken when these gained nothing."""
    assert one_search(name, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("name", CORPUS)
def test_every_kernel_has_one_search(name: str, monkeypatch: pytest.MonkeyPatch):
    one_search(name, monkeypatch)
