"""Makes the garbage collector run rarely during compilation, which creates hundreds of thousands of nodes and few cycles."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

NEW_OBJECTS = 200_000  # between two collections.  Collecting so many takes some ms; a compilation makes a few times as many

_lock = threading.Lock()
_inside = 0
_before = (0, 0, 0)


@contextmanager
def rarely_collected() -> Iterator[None]:
    """A context in which the garbage collector runs rarely.

    The objects of a compilation live until its end, so that a collection finds nothing.  Each collection of the oldest
    generation visits every object of the process: 20 ms, and 80 ms where torch is loaded.

    Several threads may be inside: the first one sets the collector's threshold, and the last one restores it, unless other code
    has changed it meanwhile.  A collector that is switched off, or already runs more rarely, is not changed.
    """
    global _inside, _before
    with _lock:
        _inside += 1
        if _inside == 1:
            _before = gc.get_threshold()
            if 0 < _before[0] < NEW_OBJECTS:
                gc.set_threshold(NEW_OBJECTS, *_before[1:])
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if _inside == 0 and gc.get_threshold()[0] == NEW_OBJECTS:
                gc.set_threshold(*_before)


def collect_meanwhile() -> None:
    """Run the garbage collector now, while this thread waits for something else.

    Otherwise the collection of a compilation's objects (1 to 5 ms) runs when the threshold is restored.  A collector that is
    switched off does not run, nor one that would keep other compilations waiting."""
    if _inside == 1 and gc.isenabled() and gc.get_count()[0] > _before[0]:
        gc.collect(0)
