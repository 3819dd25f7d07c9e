"""Runs each candidate in a separate process: a new one ("subproc"), or a fork of one that has loaded the packages
("runner")."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
import runpy
import traceback

BACKENDS = ("runner", "subproc")
_SERVE = "from tilelang.autodd.running import serve; serve()"


class Runs:
    """Runs texts as scripts and returns their output.

    backend: "runner" (POSIX) or "subproc".  timeout: seconds per run; the output up to then is returned.  folder: the
    directory that scripts import from.  jobs: parallel runs.  Close it when done.
    """

    def __init__(self, backend: str, timeout: float, folder: str, jobs: int = 1) -> None:
        if backend not in BACKENDS:
            raise ValueError(f"backend is one of {', '.join(BACKENDS)}, found {backend!r}")
        self.backend = backend if hasattr(os, "fork") else "subproc"
        self.timeout, self.folder = timeout, os.path.abspath(folder)
        self.temporary = tempfile.TemporaryDirectory(prefix="tilelang-autodd-")
        self.count = 0
        self.environment = {"TILELANG_CACHE_DIR": os.path.join(self.temporary.name, "cache"), **os.environ,
                            "PYTHONPATH": os.pathsep.join([self.folder, *filter(None, sys.path)])}
        self.servers: queue.SimpleQueue[subprocess.Popen[str] | None] = queue.SimpleQueue()
        self.started: list[subprocess.Popen[str]] = []
        for _ in range(jobs):
            self.servers.put(None)

    def output(self, text: str) -> str:
        """The output of a script, errors included."""
        self.count += 1
        path = Path(self.temporary.name) / f"candidate_{self.count}_{time.monotonic_ns()}.py"
        path.write_text(text, encoding="utf-8")
        try:
            return self._forked(path) if self.backend == "runner" else self._spawned(path)
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

    def _forked(self, path: Path) -> str:
        server = self.servers.get()
        try:
            if server is None or server.poll() is not None:
                server = subprocess.Popen([sys.executable, "-c", _SERVE], stdin=subprocess.PIPE,
                                          stdout=subprocess.PIPE, text=True, env=self.environment)
                self.started.append(server)
            assert server.stdin is not None and server.stdout is not None
            log = path.with_suffix(".out")
            server.stdin.write(json.dumps({"path": str(path), "log": str(log), "timeout": self.timeout}) + "\n")
            server.stdin.flush()
            if not server.stdout.readline():
                return "(the runner ended)"
            text = log.read_text(encoding="utf-8", errors="replace")
            log.unlink()
            return text
        finally:
            self.servers.put(server)

    def close(self) -> None:
        """End the runners and remove the files."""
        for server in self.started:
            if server.stdin is not None:
                server.stdin.close()
            try:
                server.wait(timeout=5)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()
            if server.stdout is not None:
                server.stdout.close()
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


def serve() -> None:
    """The runner process: for each line of JSON on stdin, run a script in a forked child and report its end on stdout.

    This process only loads the packages and runs nothing else, so that no thread exists when it forks.
    """
    import tilelang.language  # 136 ms

    for name in ("compile", "jit", "lower"):
        getattr(tilelang, name)
    for line in sys.stdin:
        request = json.loads(line)
        child = os.fork()
        if child == 0:
            _run(request["path"], request["log"])
        end = time.monotonic() + request["timeout"]
        pause = 0.001
        while os.waitpid(child, os.WNOHANG) == (0, 0):
            if time.monotonic() > end:
                _kill_group(child)
                os.waitpid(child, 0)
                break
            time.sleep(pause)
            pause = min(2 * pause, 0.05)
        print("done", flush=True)


def _run(path: str, log: str) -> None:
    """In the child: run the script as the main program, with its output in a file."""
    os.setsid()
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(out, stream)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
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
