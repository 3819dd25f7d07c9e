"""Shared fixtures: golden texts, a private cache, skipping of GPU tests where there is no GPU."""

import gc
import logging
import os
import pathlib

import outcomes
import pytest
import selection


def pytest_addoption(parser):
    outcomes.add_options(parser)
    selection.add_options(parser)
    parser.addoption("--update-golden", action="store_true", help="rewrite the expected texts")


@pytest.fixture
def golden(request):
    """golden(path, text): compare with tests/<path>, or write it with --update-golden."""

    def check(path: str, text: str) -> None:
        file = pathlib.Path(__file__).parent / path
        if request.config.getoption("--update-golden"):
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
            return
        assert file.exists(), f"{path} is missing: run with --update-golden and read what it wrote"
        assert text == file.read_text(encoding="utf-8")

    return check


@pytest.fixture(autouse=True, scope="session")
def _private_cache(tmp_path_factory):
    os.environ["TILELANG_CACHE_DIR"] = str(tmp_path_factory.mktemp("cache"))
    os.environ.setdefault("TILELANG_PRINT_ON_COMPILATION", "0")
    yield


class _GivenUp(logging.Handler):
    """Keeps what the log says of schedules that were given up for plainer ones."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.said = []

    def emit(self, record):
        text = record.getMessage()
        if "is compiled without" in text:
            self.said.append(text)


_GIVEN_UP = _GivenUp()
logging.getLogger("tilelang.transform").addHandler(_GIVEN_UP)


@pytest.fixture
def as_planned():
    """Fails the test where a schedule gave way to a plainer one.  A schedule that the verifier does not clear does so, and the
    result is right all the same: other tests do not see what a pass forgot."""
    _GIVEN_UP.said.clear()
    yield
    assert not _GIVEN_UP.said, "\n".join(_GIVEN_UP.said)


def _has_gpu() -> bool:
    try:
        from tilelang.runtime import cuda_driver

        return cuda_driver.is_available() and cuda_driver.driver().device_count() > 0
    except Exception:
        return False


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makemodule(module_path, parent):
    """Nothing but the packages of [test] is needed to pass the tests: what compares with torch is skipped without it."""
    return selection.module_without_torch(module_path, parent)


GPU_SECONDS = 120


def pytest_collection_modifyitems(config, items):
    outcomes.keep_marked(config, items)
    selection.keep_part(config, items)
    selection.skip_without_torch(items)
    everything = config.getoption("--device") == "gpu"
    gpu = [i for i in items if everything or i.get_closest_marker("gpu")]
    if not gpu:
        return
    if not _has_gpu():
        for item in gpu:
            item.add_marker(pytest.mark.skip(reason="no NVIDIA GPU on this machine"))
        return
    for item in gpu:
        # A kernel that never ends holds its caller inside the driver, where no signal is handled: only a thread can end
        # the process, and under xdist the other tests go on.
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(GPU_SECONDS, method="thread"))


def pytest_collection_finish(session):
    """Thousands of collected tests are there to stay: the garbage collector need not look at them again and again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(5000, *gc.get_threshold()[1:])


def pytest_configure(config):
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "0"))
    if workers:  # references in NumPy share the cores: threads of all workers on all cores would wait for each other
        share = str(max(1, (os.cpu_count() or 1) // workers))
        for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
            os.environ.setdefault(name, share)
    os.environ.setdefault("TILELANG_VERIFY", "1")  # programs are verified between all passes
    outcomes.configure(config)
    selection.configure(config)
