"""The program after each pass that changes it, for twelve programs: tests/golden/ir/NAME.txt, renewed with --update-golden."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

import checks
import programs

import tilelang
from tilelang.instrumentation import PassEventObserver, compile_pass_instrumentation


def persistent():
    return checks.load("gemm/gemm.py").persistent(512, 256, 128)


PROGRAMS = {
    "add_dynamic sm_80": lambda: programs.vector_add(dynamic=True),
    "transpose sm_80": programs.transpose,
    "softmax sm_80": programs.softmax,
    "reduce_max sm_90a": lambda: programs.row_reduce(kind="max"),
    "gemm sm_80": lambda: programs.gemm(256, 128, 128, stages=3),
    "gemm_ragged_relu sm_80": lambda: programs.gemm(epilogue="relu", tb=True, swizzle=True),
    "gemm_tf32 sm_80": lambda: programs.gemm(128, 128, 64, 64, 64, 16, dtype="float32", out="float32"),
    "gemm sm_90a": lambda: programs.gemm(256, 128, 256, 128, 128, 64, threads=256),
    "gemm_dynamic_bias sm_90a": lambda: programs.gemm(256, 128, 128, 64, 64, 64, tb=True, dynamic=True, epilogue="bias"),
    "gemm_persistent sm_90a": persistent,
    "attention sm_80": lambda: programs.attention(causal=True),
    "attention sm_90a": lambda: programs.attention(seq=512, dim=64, bm=128, bn=64, threads=256),
}


class Steps(PassEventObserver):
    """The program after each pass that changed it."""

    def __init__(self):
        self.texts = []

    def on_pipeline_start(self, func, target):
        self.texts = [f"# ---- the program\n{func!r}"]  # of the last schedule tried

    def on_pass(self, event):
        if event.changed:
            self.texts.append(f"# ---- after {event.name}\n{event.after!r}")


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_after_each_pass(name, golden):
    steps, arch = Steps(), name.split()[1]
    with compile_pass_instrumentation(steps):
        tilelang.lower(PROGRAMS[name](), target={"kind": "cuda", "arch": arch})
    assert len(steps.texts) > 3
    golden(f"golden/ir/{name.replace(' ', '_')}.txt", "\n\n".join(steps.texts) + "\n")
