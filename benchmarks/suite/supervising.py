"""The measuring process and who watches it: a kernel that hangs or breaks the device costs its own figures only."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from .record import Record

POISONED = 75  # exit status of a worker whose device context is lost
MAX_RESTARTS = 8


def supervise(command: Sequence[str], path: Path, hang_seconds: float, deadline: float) -> int:
    """Run a worker that measures into the record at `path`; start it again when it crashes or stands still.

    What it was doing then is marked and left out of the next start.  A worker stands still when its record has not
    changed for hang_seconds.  Ends at the deadline (time.time()) too.  Returns how often it was started again.
    """
    restarts = 0
    while True:
        child = subprocess.Popen(command)
        why = _watch(child, path, hang_seconds, deadline)
        if not why:
            return restarts
        record = Record.load(path)
        print(record.blame(why), file=sys.stderr, flush=True)
        if restarts == MAX_RESTARTS or time.time() > deadline:
            record.event("no further start of the measuring process")
            return restarts
        restarts += 1


def _watch(child: subprocess.Popen[bytes], path: Path, hang_seconds: float, deadline: float) -> str:
    """"" when the child ends well, else why it did not."""
    while True:
        try:
            status = child.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            still = time.time() - os.stat(path).st_mtime
            if still > hang_seconds or time.time() > deadline + hang_seconds:
                child.kill()
                child.wait()
                return f"stood still for {still:.0f} s"
            continue
        if status == 0:
            return ""
        return "the device context was lost" if status == POISONED else f"the process ended with status {status}"
