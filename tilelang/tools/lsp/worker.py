"""Runs analyses for the language server: one line of JSON for each request, lines of JSON as answers.

The process imports the compiler once, compiles a small kernel to load what it needs, and forks for each request.  The child
has a limit of time, may not write files, open connections or start programs, and its output goes nowhere.  A newer request
ends an older one.  Where Python cannot fork, requests run here, and the server ends this process when one takes too long.
"""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

FORBIDDEN = ("socket.", "subprocess.", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "os.remove",
             "os.rename", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.truncate", "os.chmod", "os.chown", "os.utime",
             "os.kill", "os.startfile", "shutil.", "ftplib.", "smtplib.", "urllib.", "http.", "webbrowser.")
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_TRUNC
def guard(event: str, args: tuple[Any, ...]) -> None:
    """Audit hook: a program that is analysed has no effects outside of its process."""
    if event == "open":
        path, mode, flags = args[0], str(args[1] or ""), int(args[2] or 0)
        if (flags & _WRITES or set(mode) & set("wax+")) and path != os.devnull:
            raise PermissionError(f"tilelang-lsp analyses a file without writing files: {path!r}")
    elif event.startswith(FORBIDDEN):
        raise PermissionError(f"tilelang-lsp analyses a file without effects outside of it: {event}")


def limit_process(seconds: float) -> None:
    """No writes to files, no bytes of core, a bound of processor time, and a signal shortly before the end."""
    import resource  # 1 ms; not on Windows, which cannot fork either

    from tilelang.tools.lsp.analysis import Late  # 700 ms with all that it imports

    def late(number: int, frame: Any) -> None:
        raise Late

    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    cpu = int(seconds) + 2
    resource.setrlimit(resource.RLIMIT_CPU, (cpu, cpu))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, 0.75 * seconds)
    sys.addaudithook(guard)


def answer(message: dict[str, Any], out: int) -> None:
    """Do one request and write its answers to a file descriptor."""
    from tilelang.tools.lsp.analysis import Late, Request, check, page  # 0 ms: loaded by now

    def tell(found: dict[str, Any]) -> None:
        os.write(out, (json.dumps({"id": message["id"], **found}) + "\n").encode())

    request = Request(message["path"], message["text"])
    try:
        if message["what"] == "check":
            check(request, tell)
        else:
            tell({"page": page(request, message["function"], message["what"])})
    except Late as e:
        own = [f.lineno for f in traceback.extract_tb(e.__traceback__) if f.filename == request.path]
        tell({"late": True, "line": own[-1] if own else 1})
    except Exception as e:  # a page of a program with an error shows the error
        tell({"page": str(e)} if message["what"] != "check" else {"failed": f"{type(e).__name__}: {e}"})


def child(message: dict[str, Any], out: int) -> None:
    """The forked process.  It never returns."""
    code = 1
    try:
        null = os.open(os.devnull, os.O_RDWR)
        for fd in (0, 1, 2):
            os.dup2(null, fd)
        gc.disable()
        limit_process(message["seconds"])
        answer(message, out)
        code = 0
    finally:
        os._exit(code)


def warm() -> None:
    """Load what an analysis needs, by one of a small kernel and a small whole-tensor program."""
    from tilelang.tools.lsp.analysis import Request, check  # 700 ms with all that it imports

    text = (Path(__file__).parents[1] / "puzzles" / "solutions" / "10-attention.md").read_text(encoding="utf-8")
    code = "import tilelang\nimport tilelang.language as T\n\n\n" + text.partition("```python\n")[2].partition("```")[0]
    code += '\n\n@tilelang.program\ndef whole(x: T.Tensor((8, 8), "float32")):\n    return T.softmax(x)\n'
    check(Request("<warm>", code), lambda found: None)
    gc.collect()
    gc.freeze()


def end(pid: int) -> None:
    """Stop a child and forget it."""
    os.kill(pid, signal.SIGKILL)  # it is a child that nobody has waited for, so it exists
    os.waitpid(pid, 0)


def serve(read: int, out: int) -> None:
    """Answer requests until the input ends."""
    pending, running, until, current = b"", 0, 0.0, 0
    while True:
        ready, _, _ = select.select([read], [], [], 0.01 if running else None)
        if running:
            done, _ = os.waitpid(running, os.WNOHANG)
            late = not done and time.monotonic() > until
            if late:
                end(running)
            if done or late:
                os.write(out, ("\n" + json.dumps({"id": current, "end": True, "late": late, "line": 1}) + "\n").encode())
                running = 0
        if not ready:
            continue
        data = os.read(read, 1 << 16)
        if not data:
            break
        *lines, pending = (pending + data).split(b"\n")
        if lines:
            if running:  # its text is old
                end(running)
                os.write(out, ("\n" + json.dumps({"id": current, "end": True, "stopped": True}) + "\n").encode())
            message = json.loads(lines[-1])
            current, until = message["id"], time.monotonic() + message["seconds"]
            running = os.fork()
            if not running:
                child(message, out)
    if running:
        end(running)


def main() -> None:
    """The process: ready when it has said so, then one answer after the other."""
    out = os.dup(1)
    os.dup2(2, 1)  # what imports print is no answer
    warm()
    os.write(out, b'{"ready": true}\n')
    if hasattr(os, "fork"):
        serve(0, out)
    else:
        for line in sys.stdin:
            message = json.loads(line)
            answer(message, out)
            os.write(out, (json.dumps({"id": message["id"], "end": True}) + "\n").encode())


if __name__ == "__main__":
    main()
