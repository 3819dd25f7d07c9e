"""The command: python -m tilelang.autodd SOURCE --err-msg MSG -o OUT."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

from .reduce import reduce_source


def build_parser() -> argparse.ArgumentParser:
    """The argument parser."""
    p = argparse.ArgumentParser(
        prog="python -m tilelang.autodd", formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Cut a failing script down while its output still contains a message.",
        epilog="Kept as they are: statements with '# autodd: freeze' at their end, those between '# autodd: freeze-start' and\n"
               "'# autodd: end-freeze', and 'with __freeze__:' and '__freeze__(x)' of tilelang.autodd.\n"
               "Exit status: 0 reduced, 1 the script does not print the message, 2 it cannot be read.")
    p.add_argument("source", metavar="SOURCE", help="the failing script")
    p.add_argument("--err-msg", required=True, metavar="MSG", help="text that the output (errors included) must contain")
    p.add_argument("-o", "--output", required=True, metavar="OUT", help="file of the smallest script found so far")
    p.add_argument("--backend", choices=BACKENDS, default="runner",
                   help="runner: forked from a process that has the packages loaded (default); subproc: a new process")
    p.add_argument("--timeout", type=float, default=60, metavar="S", help="seconds a run may take (default 60)")
    p.add_argument("-j", "--jobs", type=int, default=1, metavar="N", help="runs at once (default 1)")
    return p


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    args = build_parser().parse_args(argv)
    path, out = Path(args.source), Path(args.output)
    try:
        source = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        print(f"{path} cannot be read: {e}", file=sys.stderr)
        return 2
    jobs = max(1, args.jobs)

    def improved(text: str) -> None:
        temporary = out.with_name(out.name + ".part")
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, out)
        print(f"{len(text.splitlines())} lines, {len(text)} characters", flush=True)

    with Runs(args.backend, args.timeout, str(path.parent), jobs) as runs:
        first = runs.output(source)
        if args.err_msg not in first:
            tail = "\n".join(first.splitlines()[-5:])
            print(f"the output of {path} does not contain {args.err_msg!r}; it ends:\n{tail}", file=sys.stderr)
            return 1
        out.parent.mkdir(parents=True, exist_ok=True)
        try:
            improved(source)
            small = reduce_source(source, lambda text: args.err_msg in runs.output(text), jobs, improved)
        except (SyntaxError, ValueError) as e:
            print(f"{path}: {e}", file=sys.stderr)
            return 2
        except KeyboardInterrupt:
            print(f"stopped: the smallest so far is in {out}", file=sys.stderr)
            return 0
        print(f"{out}: {len(small.splitlines())} of {len(source.splitlines())} lines, {runs.count} runs")
    return 0


# ---- runs of candidates, each in a process of its own -----------------------------------------------------------------

BACKENDS = ("runner", "subproc")
_PRELOADED = ["tilelang.language", "tilelang.jit", "tilelang.jit.lowering", __name__]


class Runs:
    """Runs texts as scripts and returns their output.

    backend: "runner" (POSIX) or "subproc".  timeout: seconds per run; the output up to then is returned.  folder: the
    directory that scripts import from.  jobs: parallel runs, by threads of the caller.  Close it when done.
    """

    def __init__(self, backend: str, timeout: float, folder: str, jobs: int = 1) -> None:
        if backend not in BACKENDS:
            raise ValueError(f"backend is one of {', '.join(BACKENDS)}, found {backend!r}")
        self.timeout, self.folder = timeout, os.path.abspath(folder)
        self.temporary = tempfile.TemporaryDirectory(prefix="tilelang-autodd-")
        self.count = 0
        self.environment = {"TILELANG_CACHE_DIR": os.path.join(self.temporary.name, "cache"), **os.environ,
                            "PYTHONPATH": os.pathsep.join([self.folder, *filter(None, sys.path)])}
        self.forks: Any = None
        if backend == "runner" and hasattr(os, "fork"):
            self.forks = multiprocessing.get_context("forkserver")
            self.forks.set_forkserver_preload(_PRELOADED)

    def output(self, text: str) -> str:
        """The output of a script, errors included."""
        self.count += 1
        path = Path(self.temporary.name) / f"candidate_{self.count}_{time.monotonic_ns()}.py"
        path.write_text(text, encoding="utf-8")
        try:
            return self._spawned(path) if self.forks is None else self._forked(path, path.with_suffix(".out"))
        finally:
            path.unlink(missing_ok=True)

    def _spawned(self, path: Path) -> str:
        process = subprocess.Popen([sys.executable, str(path)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                   env=self.environment, start_new_session=True)
        try:
            out, _ = process.communicate(timeout=self.timeout)
        except subprocess.TimeoutExpired:
            _kill_group(process.pid)
            out, _ = process.communicate()
        return out.decode("utf-8", "replace")

    def _forked(self, path: Path, log: Path) -> str:
        child = self.forks.Process(target=_run, args=(str(path), str(log), self.folder, self.environment))
        child.start()
        child.join(self.timeout)
        if child.is_alive():
            _kill_group(child.pid)
            child.kill()
            child.join()
        if not log.exists():
            return "(the runner ended)"
        text = log.read_text(encoding="utf-8", errors="replace")
        log.unlink()
        return text

    def close(self) -> None:
        """Remove the files."""
        self.temporary.cleanup()

    def __enter__(self) -> Runs:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _kill_group(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def _run(path: str, log: str, folder: str, environment: dict[str, str]) -> None:
    """In the child: run the script as the main program, with its output in a file."""
    os.setsid()
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(out, stream)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.update(environment)
    sys.path.insert(0, folder)
    sys.argv = [path]
    code = 0
    try:
        runpy.run_path(path, run_name="__main__")
    except SystemExit as e:
        code = e.code if isinstance(e.code, int) else 1
        if e.code is not None and not isinstance(e.code, int):
            print(e.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        code = 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
