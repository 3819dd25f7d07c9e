"""Caches with a size, for what pure functions give: plans of calls and compiled kernels."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import TypeVar

V = TypeVar("V")


class Cache(dict[Hashable, V]):
    """At most `size` entries; where there is no room the oldest one goes.

    A dict, so that `get` of a call that was seen before takes no more than a dict's.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size
        self._lock = threading.Lock()

    def keep(self, key: Hashable, value: V) -> V:
        """Enter a value, which becomes the youngest."""
        with self._lock:
            self.pop(key, None)
            while len(self) >= self.size:
                del self[next(iter(self))]
            self[key] = value
        return value

    def made(self, key: Hashable, make: Callable[[], V]) -> V:
        """The value of a key, made where there is none; it becomes the youngest."""
        value = self.get(key)
        return self.keep(key, make() if value is None else value)


__all__ = ["Cache"]
