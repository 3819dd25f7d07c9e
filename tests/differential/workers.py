"""Worker processes that run programs, so that a crash or a hang costs one program and is counted."""

from __future__ import annotations

import json
import os
import pathlib
import queue
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[2]
TIMEOUT = 120.0  # seconds of processor time for one program: the slowest take 35, twice that where others share the cores


def processor_seconds(pid: int) -> float:
    """What a process has used so far; 0 where the system does not say."""
    try:
        fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1].split()
    except (OSError, IndexError):
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Worker:
    """One process that runs programs, started again after a crash or a hang."""

    def __init__(self, environment: dict[str, str] | None = None, timeout: float = TIMEOUT) -> None:
        self.environment, self.timeout = environment or {}, timeout
        self.process: subprocess.Popen[bytes] | None = None

    def run(self, path: pathlib.Path, executions: Sequence[str]) -> dict[str, Any]:
        """Outcomes by execution, as plain data."""
        if self.process is None or self.process.poll() is not None:
            self._start()
        assert self.process is not None and self.process.stdin is not None and self.process.stdout is not None
        try:
            self.process.stdin.write((json.dumps([str(path), list(executions)]) + "\n").encode())
            self.process.stdin.flush()
        except BrokenPipeError:
            return self._lost("crash")
        line = b""
        began, used = time.monotonic(), processor_seconds(self.process.pid)
        while not line.endswith(b"\n"):
            ready, _, _ = select.select([self.process.stdout], [], [], 2.0)
            if not ready:
                # A busy machine is no hang: what counts is the time the process itself was given.
                spent = processor_seconds(self.process.pid) - used
                if spent > self.timeout or time.monotonic() - began > 10 * self.timeout:
                    return self._lost("hang")
                continue
            part = os.read(self.process.stdout.fileno(), 1 << 20)
            if not part:
                return self._lost("crash")
            line += part
        outcomes: dict[str, Any] = json.loads(line)
        if outcomes.get("cuda", {}).get("status") == "failed" and outcomes["cuda"]["kind"] != "mismatch":
            self.close()  # after a fault on the device every later call of the process fails too
        return outcomes

    def _lost(self, kind: str) -> dict[str, Any]:
        code = self.close()
        return {"process": {"status": "failed", "kind": kind, "text": f"the process ended with {code}", "seconds": 0.0}}

    def _start(self) -> None:
        here = pathlib.Path(__file__).resolve().parent
        environment = {**os.environ, "TILELANG_PRINT_ON_COMPILATION": "0", "TILELANG_NUM_THREADS": "2", "OMP_NUM_THREADS": "1",
                       "OPENBLAS_NUM_THREADS": "1", **self.environment}
        environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(here), environment.get("PYTHONPATH", "")])
        self.process = subprocess.Popen([sys.executable, str(here / "workers.py")], stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment, cwd=ROOT)

    def close(self) -> int | None:
        """End the process; its exit code when it ended by itself."""
        p, self.process = self.process, None
        if p is None:
            return None
        code = p.poll()
        if code is None:
            p.kill()
            p.wait()
        return code


def run_all(paths: Iterable[tuple[Any, Callable[[], pathlib.Path], Sequence[str]]], jobs: int,
            done: Callable[[Any, pathlib.Path, dict[str, Any]], None], environment: dict[str, str] | None = None,
            timeout: float = TIMEOUT) -> None:
    """Run programs in `jobs` processes.

    paths: (key, function that writes the file, executions).  done(key, path, outcomes) is called in this thread.
    """
    todo: queue.Queue[Any] = queue.Queue()
    ended: queue.Queue[Any] = queue.Queue()
    count = 0
    for item in paths:
        todo.put(item)
        count += 1

    def serve() -> None:
        worker = Worker(environment, timeout)
        try:
            while True:
                try:
                    key, write, executions = todo.get_nowait()
                except queue.Empty:
                    return
                path = write()
                ended.put((key, path, worker.run(path, executions)))
        finally:
            worker.close()

    threads = [threading.Thread(target=serve, daemon=True) for _ in range(max(1, min(jobs, count)))]
    for t in threads:
        t.start()
    for _ in range(count):
        done(*ended.get())
    for t in threads:
        t.join()


def serve_forever() -> None:
    """The worker's side: a line with a file and executions in, a line of outcomes out."""
    import logging

    out = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # what programs print is not an answer
    logging.disable(logging.WARNING)
    from backends import run

    for line in sys.stdin:
        path, executions = json.loads(line)
        result = run(pathlib.Path(path), executions)
        out.write((json.dumps(result.plain()) + "\n").encode())


if __name__ == "__main__":
    serve_forever()
