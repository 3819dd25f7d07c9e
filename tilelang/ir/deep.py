"""Python's recursion limit while programs are traced, compiled and interpreted: walks recurse over their expressions."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

# Frames.  Expressions of some hundred lazy operands inside each other, and source lines of some thousand operators, need them.
# Before 3.11 each frame takes half a KiB of the thread's stack, 8 MiB in all.
LIMIT = 16_000 if sys.version_info >= (3, 11) else 8_000
_lock, _inside = threading.Lock(), {"threads": 0, "limit": 0}


@contextmanager
def deep() -> Iterator[None]:
    """Raises the recursion limit; the last thread to leave restores it."""
    with _lock:
        if not _inside["threads"]:
            _inside["limit"] = sys.getrecursionlimit()
            sys.setrecursionlimit(max(_inside["limit"], LIMIT))
        _inside["threads"] += 1
    try:
        yield
    finally:
        with _lock:
            _inside["threads"] -= 1
            if not _inside["threads"]:
                sys.setrecursionlimit(_inside["limit"])
