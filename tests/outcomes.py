"""Outcomes of the tests that show rows of the specification: recorded once, compared in every run.

Every test's executions (completed.py) travel with its report.  A run with `--record-outcomes` keeps only the tests that
spec/spec-status.md names and writes what they did to spec/outcomes.json.  Any other run compares: a marked test that
did something else than recorded fails the run.  `--device=gpu -m "not slow" --record-outcomes` runs the tests of a GPU, and
with a GPU in its place those that use the device simulator; what it launched goes to outcomes_gpu.json, with device and date.
"""

from __future__ import annotations

import datetime
import json
import os
import pathlib
from dataclasses import dataclass, field
from typing import Any

import completed
import pytest

FOLDER = pathlib.Path(__file__).parent / "spec"
FILES = {"cpu": FOLDER / "outcomes.json", "gpu": FOLDER / "outcomes_gpu.json"}
RENEW = "python -m pytest --record-outcomes"
SKIPPED = "skipped"
MARKED, DONE = "names a row", "executions"  # properties of reports
ANY = "*"  # parameters that are not named


@dataclass
class Outcomes:
    """tests: test function -> parameters in brackets ("" without) -> executions, in words.  about: device and date (GPU)."""

    tests: dict[str, dict[str, str]] = field(default_factory=dict)
    about: dict[str, str] = field(default_factory=dict)

    def of(self, test: str) -> tuple[str, ...]:
        """Executions that some case of a test function completed."""
        done = {e for words in self.tests.get(test, {}).values() for e in words.split()}
        return tuple(e for e in completed.EXECUTIONS if e in done)

    def expected(self, test: str, case: str) -> str | None:
        """Of one case; None when the test was never recorded."""
        cases = self.tests.get(test, {})
        return cases.get(case, cases.get(ANY))


def read(file: pathlib.Path) -> Outcomes:
    """The recorded outcomes; none when the file is not there."""
    if not file.exists():
        return Outcomes()
    data = json.loads(file.read_text(encoding="utf-8"))
    tests: dict[str, dict[str, str]] = {}
    for test, found in data["tests"].items():
        if isinstance(found, str):
            tests[test] = {ANY: found}
        else:
            tests[test] = {case: words for words, cases in found.items() for case in cases}
    return Outcomes(tests, data.get("about", {}))


def text_of(outcomes: Outcomes) -> str:
    """The file's text: a test a line; cases that differ from most are named."""
    lines = []
    for test, cases in sorted(outcomes.tests.items()):
        groups: dict[str, list[str]] = {}
        for case, words in sorted(cases.items()):
            groups.setdefault(words, []).append(case)
        if len(groups) == 1:
            entry: Any = next(iter(groups))
        else:
            most = ANY if ANY in cases else None
            common = cases[ANY] if most else max(groups, key=lambda w: (len(groups[w]), w))
            entry = {w: [ANY] if w == common else c for w, c in sorted(groups.items())}
        lines.append(f"  {json.dumps(test)}: {json.dumps(entry)}")
    about = f' "about": {json.dumps(outcomes.about)},\n' if outcomes.about else ""
    return "{\n" + about + ' "tests": {\n' + ",\n".join(lines) + "\n }\n}\n"


def split(nodeid: str) -> tuple[str, str]:
    """(test function as tests/spec/spec-status.md names it, "[case]" or "")."""
    name = nodeid.removeprefix("tests/")
    head, bracket, case = name.partition("[")
    return head, bracket + case


def difference(outcomes: Outcomes, test: str, case: str, done: str, assembles: bool) -> str:
    """Empty, or how a case that passed differs from what is recorded.  assembles: this machine has an NVRTC."""
    want = outcomes.expected(test, case)
    if want is None:
        return "is not recorded"
    if want == SKIPPED:
        return ""
    told, have = set(want.split()), set(done.split()) - {"gpu"} | ({"gpu"} & set(want.split()) & set(done.split()))
    if not assembles:  # the text is the same, nobody looked at it
        told = {"printed" if e == "cuda" else e for e in told} if "printed" in have else told - {"cuda"}
    lost, new = sorted(told - have), sorted(have - told)
    said = [f"no longer completes: {', '.join(lost)}"] * bool(lost) + [f"not recorded: {', '.join(new)}"] * bool(new)
    return "; ".join(said)


class Watch:
    """In processes that run tests: each test's executions go into its report."""

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self, item):
        item.user_properties.append((MARKED, item.get_closest_marker("spec") is not None))
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item):
        completed.begin()
        out = yield
        item.user_properties.append((DONE, " ".join(completed.taken())))
        return out


class Book:
    """In the process that sees all reports: compares them, or writes them down."""

    def __init__(self, config: Any) -> None:
        self.config = config
        self.recording = bool(config.getoption("--record-outcomes"))
        self.on_gpu = config.getoption("--device") == "gpu"
        self.found: dict[tuple[str, str], str] = {}
        self.marked: set[str] = set()
        self.failed: set[str] = set()
        self.of_gpu: set[str] = set()  # tests that run on a GPU alone, where outcomes are not recorded
        self.said: list[str] = []

    def pytest_runtest_logreport(self, report):
        test, case = split(report.nodeid)
        if "gpu" in report.keywords:
            self.of_gpu.add(test)
        if report.skipped and report.when in ("setup", "call"):
            self.found[test, case] = SKIPPED
        elif report.failed:
            self.failed.add(test)
        elif report.when == "call":
            self.found[test, case] = dict(report.user_properties).get(DONE, "")
        if dict(report.user_properties).get(MARKED):
            self.marked.add(test)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session):
        if self.config.option.collectonly:
            return
        file = FILES["gpu" if self.on_gpu else "cpu"]
        stored = read(file)
        if self.recording:
            if self.on_gpu:
                self.found = {k: "gpu" for k, done in self.found.items() if "gpu" in done.split()}
            self.said = record(file, stored, {k: v for k, v in self.found.items() if k[0] in self.marked},
                               self.failed & self.marked, self.on_gpu)
            return
        if self.config.getoption("--device"):
            return  # other executions than recorded
        from tilelang.runtime import nvrtc

        assembles = nvrtc.available()
        left = self.failed | self.of_gpu
        for (test, case), done in sorted(self.found.items()):
            on_a_gpu = "gpu" in done.split()  # it may leave out what machines without one do in its place
            if done == SKIPPED or on_a_gpu or test in left or not (test in stored.tests or test in self.marked):
                continue
            told = difference(stored, test, case, done, assembles)
            if told:
                self.said.append(f"{test}{case}: {told}")
        if self.said:
            self.said.append(f"if that is right: {RENEW} {' '.join(sorted(self._files()))}; "
                             "python tests/spec/spec_status.py --write")
            session.exitstatus = session.exitstatus or pytest.ExitCode.TESTS_FAILED

    def _files(self) -> set[str]:
        return {"tests/" + line.partition("::")[0] for line in self.said}

    def pytest_terminal_summary(self, terminalreporter):
        if self.said:
            terminalreporter.section("outcomes" if self.recording else "outcomes differ from tests/spec/outcomes.json")
            for line in self.said:
                terminalreporter.line(line)


def record(file: pathlib.Path, stored: Outcomes, found: dict[tuple[str, str], str], failed: set[str],
           on_gpu: bool) -> list[str]:
    """Write what was found over what is stored, without tests that are gone or name no row; returns what there is to say."""
    import spec_status

    named = {t.id for t in spec_status.collect() if t.rows}
    tests = {test: cases for test, cases in stored.tests.items() if test in named and test not in failed}
    ran: dict[str, dict[str, str]] = {}
    for (test, case), done in found.items():
        if test not in failed and not (done == SKIPPED and test in tests):
            ran.setdefault(test, {})[case] = done
    tests.update(ran)
    about = {"device": _device(), "date": datetime.date.today().isoformat()} if on_gpu else {}
    file.write_text(text_of(Outcomes(tests, about)), encoding="utf-8")
    said = [f"{len(ran)} tests recorded in {file.name}; then: python tests/spec/spec_status.py --write"]
    return said + [f"failed, not recorded: {t}" for t in sorted(failed)]


def _device() -> str:
    from tilelang.runtime.cuda_driver import driver

    return driver().properties(0).name


def add_options(parser: Any) -> None:
    parser.addoption("--record-outcomes", action="store_true",
                     help="run the tests that name rows of the specification and renew tests/spec/outcomes.json")
    parser.addoption("--device", choices=("gpu", "text"), default="",
                     help="tests on the device simulator: a GPU in its place (gpu), or assemble the text too (text)")


def configure(config: Any) -> None:
    """Register what this process does: run tests, see their reports, or both."""
    os.environ["TILELANG_TEST_DEVICE"] = config.getoption("--device")
    worker = hasattr(config, "workerinput")
    controller = not worker and bool(getattr(config.option, "numprocesses", None))
    if not controller and not config.option.collectonly:
        completed.install()
        config.pluginmanager.register(Watch(), "outcomes-watch")
    if not worker:
        config.pluginmanager.register(Book(config), "outcomes-book")


def keep_marked(config: Any, items: list[Any]) -> None:
    """With --record-outcomes: leave out the tests that name no row; of a GPU, those that would not use it."""
    if not config.getoption("--record-outcomes"):
        return
    recorded = read(FILES["cpu"]) if config.getoption("--device") == "gpu" else None

    def wanted(item: Any) -> bool:
        if item.get_closest_marker("spec") is None:
            return False
        return recorded is None or item.get_closest_marker("gpu") is not None or \
            "simulator" in recorded.of(split(item.nodeid)[0])

    config.hook.pytest_deselected(items=[i for i in items if not wanted(i)])
    items[:] = [i for i in items if wanted(i)]
