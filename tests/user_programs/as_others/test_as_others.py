"""Programs as others write them agree with a float64 reference on every backend that can run them."""

import importlib

import pytest

import tilelang

from .catalogue import BACKENDS
from .harness import run

MODULES = (
    "deepseek",
    "tilekernels",
    "tileops",
    "puzzles",
    "linear_attention",
    "serving",
    "scripts",
    "warp_roles",
    "corners",
    "low_level",
    "training",
)
PROGRAMS = {
    f"{module}.{program.name}": program
    for module in MODULES
    for program in importlib.import_module(f"{__package__}.{module}").PROGRAMS
}
tilelang.set_log_level("INFO")  # scripts set other levels when they are imported


def cases(backends):
    """(program, backend) for each backend that can run the program; what fails today is marked."""
    for name, program in PROGRAMS.items():
        for backend in backends:
            reason = program.faults.get(backend, program.faults.get("all"))
            marks = [pytest.mark.xfail(strict=True, reason=reason)] if reason else []
            if backend not in program.absent:
                yield pytest.param(name, backend, id=f"{name}-{backend}", marks=marks)


@pytest.mark.core
@pytest.mark.parametrize("name, backend", list(cases(BACKENDS)))
def test_program_of_others(name, backend):
    run(PROGRAMS[name], backend)


@pytest.mark.gpu
@pytest.mark.parametrize("name, backend", list(cases(("gpu",))))
def test_program_of_others_on_the_gpu(name, backend):
    run(PROGRAMS[name], backend)
