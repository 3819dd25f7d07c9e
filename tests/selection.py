"""Which tests a plain `python -m pytest` runs, and which may be skipped.

A plain run takes a part of every test function: as many of its cases, spread evenly, as fit into BUDGET seconds of processor
time, and at least one.  So every file, and with it every operation, pass, element type and backend, is represented.  Only
functions whose single case takes longer than LONGEST are left out, but for those marked `core`.  seconds.json says how long a
case takes of functions that need another number of cases than ASSUMED gives; `--full --record-seconds` renews it.
--full runs all cases of a function, or of one whose cases take longer than WHOLE seconds in all, as many as fit, spread evenly:
the others are marked slow and run each night.  Those marked `core` run whole.
Whatever is named on the command line (files, -k, -m) runs whole.

skips.txt names the modules and tests that need something which a machine may lack, one a line after what that is (MISSING).
Those that need torch are skipped where it is not installed.  --listed-skips-only fails the run when a test is skipped that
the list does not excuse on this machine.
"""

from __future__ import annotations

import importlib.util
import json
import os
import pathlib
import shutil
from collections.abc import Callable
from typing import Any

import pytest

FOLDER = pathlib.Path(__file__).parent
SECONDS, SKIPS = FOLDER / "seconds.json", FOLDER / "skips.txt"
BUDGET, ASSUMED, LONGEST, WHOLE = 0.07, 0.1, 0.4, 4.0
SPENT = "processor seconds"  # property of reports
TORCH = "torch is not installed"


def has_torch() -> bool:
    return importlib.util.find_spec("torch") is not None


def has_compiler() -> bool:
    return shutil.which("g++") is not None and shutil.which("cc") is not None


# What a test may need -> whether it is missing here.  "torch-case": some cases of the test need torch, and skip themselves;
# "case": of some of its cases a test says that they mean nothing.
MISSING: dict[str, Callable[[], bool]] = {"jax": lambda: importlib.util.find_spec("jax") is None,
                                          "torch": lambda: not has_torch(), "torch-case": lambda: not has_torch(),
                                          "pygls": lambda: importlib.util.find_spec("pygls") is None,
                                          "nbclient": lambda: importlib.util.find_spec("nbclient") is None,
                                          "mypy": lambda: importlib.util.find_spec("mypy") is None,
                                          "compiler": lambda: not has_compiler(), "case": lambda: True,
                                          "ziglang": lambda: importlib.util.find_spec("ziglang") is None}


def add_options(parser: Any) -> None:
    parser.addoption("--full", action="store_true",
                     help=f"all cases of all tests, of long functions {WHOLE:.0f} s, not a part of each test function")
    parser.addoption("--record-seconds", action="store_true", help="renew tests/seconds.json from this run")
    parser.addoption("--listed-skips-only", action="store_true",
                     help="fail when a test is skipped that tests/skips.txt does not excuse")


# ---- the part of a plain run ---------------------------------------------------------------------------------------------


def function_of(nodeid: str) -> str:
    """A test without its parameters."""
    return nodeid.partition("[")[0]


def takes_part(config: Any) -> bool:
    """Whether this run takes a part of each function: nothing was named.  Workers are told by their controller."""
    if hasattr(config, "workerinput"):
        return bool(config.workerinput["part"])
    named = config.args_source is not pytest.Config.ArgsSource.TESTPATHS or config.option.keyword
    options = ("--full", "--record-outcomes", "--device", "--lf", "--ff", "--update-golden")
    given = any(config.getoption(o, False) for o in options)
    return not (named or given or config.option.markexpr != default_marks(config))


def default_marks(config: Any) -> str:
    """The -m of pyproject.toml."""
    line = " ".join(config.getini("addopts"))
    return line.partition("-m ")[2].strip("'\"")


def part_of(count: int, seconds: float = ASSUMED, core: bool = False) -> set[int]:
    """Which of `count` cases of a function run.  seconds: of one case.  core: at least one does."""
    return set() if seconds > LONGEST and not core else spread(count, seconds, BUDGET)


def spread(count: int, seconds: float, budget: float) -> set[int]:
    """Those of `count` cases, evenly spread, that fit into a budget of seconds; at least one."""
    taken = max(1, min(count, int(budget / max(seconds, 1e-3))))
    return {i * count // taken for i in range(taken)}


def keep_part(config: Any, items: list[Any]) -> None:
    """Leave out what this run does not take."""
    seconds = json.loads(SECONDS.read_text(encoding="utf-8")) if SECONDS.exists() else {}
    functions: dict[str, list[Any]] = {}
    for item in items:
        if item.get_closest_marker("gpu") is None and item.get_closest_marker("slow") is None:
            functions.setdefault(function_of(item.nodeid), []).append(item)
    night = "slow" in config.option.markexpr.replace("not slow", "")
    if not takes_part(config):
        if (config.getoption("--full") or night) and not config.getoption("--record-seconds"):
            for name, cases in functions.items():
                if cases[0].get_closest_marker("core") is not None:
                    continue
                taken = spread(len(cases), seconds.get(name, 0.0), WHOLE)
                for i in set(range(len(cases))) - taken:
                    cases[i].add_marker("slow")
        if config.getoption("--full") and not night:
            _keep(config, items, lambda i: i.get_closest_marker("slow") is None)
        return
    kept = {id(cases[k]) for name, cases in functions.items()
            for k in part_of(len(cases), seconds.get(name, ASSUMED), cases[0].get_closest_marker("core") is not None)}
    _keep(config, items, lambda i: id(i) in kept)


def _keep(config: Any, items: list[Any], wanted: Any) -> None:
    dropped = [i for i in items if not wanted(i)]
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        items[:] = [i for i in items if wanted(i)]


# ---- tests that may be skipped -----------------------------------------------------------------------------------------


def listed() -> dict[str, str]:
    """Module or test of skips.txt -> what it needs."""
    lines = SKIPS.read_text(encoding="utf-8").splitlines()
    return {name: need for need, name in (line.split(maxsplit=1) for line in lines if line and not line.startswith("#"))}


def needs_of(nodeid: str, needs: dict[str, str]) -> set[str]:
    """What a module, a test or a case of it needs, by the list."""
    return {needs[n] for n in (nodeid, function_of(nodeid), nodeid.partition("::")[0]) if n in needs}


class NeedsTorch(pytest.Module):
    """A listed module, where torch is not installed."""

    def collect(self) -> Any:
        pytest.skip(TORCH, allow_module_level=True)


def module_without_torch(module_path: pathlib.Path, parent: Any) -> Any:
    """Stands for a module that skips.txt names, where torch is not installed."""
    name = module_path.relative_to(FOLDER.parent).as_posix() if module_path.is_relative_to(FOLDER) else ""
    if listed().get(name) == "torch" and not has_torch():
        return NeedsTorch.from_parent(parent, path=module_path)
    return None


def skip_without_torch(items: list[Any]) -> None:
    if has_torch():
        return
    needs = listed()
    for item in items:
        if "torch" in needs_of(item.nodeid, needs):
            item.add_marker(pytest.mark.skip(reason=TORCH))


# ---- what a run says ---------------------------------------------------------------------------------------------------


def processor_seconds() -> float:
    """Of this process and its finished children."""
    t = os.times()
    return t.user + t.system + t.children_user + t.children_system


class Clock:
    """In processes that run tests: the processor time of each test goes into its report."""

    def __init__(self) -> None:
        self.start = 0.0

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self, item: Any) -> Any:
        self.start = processor_seconds()
        return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self, item: Any) -> Any:
        out = yield
        item.user_properties.append((SPENT, processor_seconds() - self.start))
        return out


class Watch:
    """In the process that sees all reports: skips that nobody expects, and seconds to record."""

    def __init__(self, config: Any) -> None:
        self.config, self.needs = config, listed()
        self.skipped: set[str] = set()
        self.seconds: dict[str, list[float]] = {}

    def pytest_collectreport(self, report: Any) -> None:
        if report.skipped:
            self.skipped.add(report.nodeid)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.skipped and not hasattr(report, "wasxfail"):
            self.skipped.add(report.nodeid)
        if report.when == "call" and report.passed:
            spent = dict(report.user_properties).get(SPENT, 0.0)
            self.seconds.setdefault(function_of(report.nodeid), []).append(spent)

    @property
    def unexpected(self) -> list[str]:
        return sorted(n for n in self.skipped if not any(MISSING[need]() for need in needs_of(n, self.needs)))

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: Any) -> None:
        if self.config.getoption("--listed-skips-only") and self.unexpected:
            session.exitstatus = session.exitstatus or pytest.ExitCode.TESTS_FAILED
        if self.config.getoption("--record-seconds"):
            SECONDS.write_text(self.text(), encoding="utf-8")

    def text(self) -> str:
        """seconds.json: functions of whose cases another number runs than ASSUMED gives, and those longer than WHOLE; of
        functions that did not run, what stands there."""
        found = json.loads(SECONDS.read_text(encoding="utf-8")) if SECONDS.exists() else {}
        for name, times in self.seconds.items():
            mean = round(sum(times) / len(times), 3)
            found.pop(name, None)
            if part_of(len(times), mean) != part_of(len(times)) or mean * len(times) > WHOLE:
                found[name] = mean
        found = {name: s for name, s in found.items() if (FOLDER.parent / name.partition("::")[0]).exists()}
        return "{\n" + ",\n".join(f" {json.dumps(name)}: {s}" for name, s in sorted(found.items())) + "\n}\n"

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if self.config.getoption("--listed-skips-only") and self.unexpected:
            terminalreporter.section("skipped, but not excused by tests/skips.txt")
            for name in self.unexpected:
                terminalreporter.line(name)
        if takes_part(self.config):
            terminalreporter.line('A part of every test function ran.  All of them: python -m pytest -m "not gpu" --full')


class TellWorkers:
    """In the controller of xdist: workers take the same part."""

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        node.workerinput["part"] = takes_part(node.config)


def configure(config: Any) -> None:
    """Register what this process does: run tests, see their reports, or both."""
    worker = hasattr(config, "workerinput")
    if worker or not getattr(config.option, "numprocesses", None):
        config.pluginmanager.register(Clock(), "selection-clock")
    if not worker:
        config.pluginmanager.register(Watch(config), "selection-watch")
        config.pluginmanager.register(TellWorkers(), "selection-tell")
