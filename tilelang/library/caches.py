"""Caches of limited size for the results of pure functions: plans of calls and compiled kernels."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import TypeVar

V = TypeVar("V")


class Cache(dict[Hashable, V]):
    """A cache of at most `size` entries, which removes the oldest entry when it is full.

    It is a dict, so that `get` for a known call costs no more than a dict's.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size
        self._lock = threading.Lock()

    def keep(self, key: Hashable, value: V) -> V:
        """Enter a value as the youngest entry."""
        with self._lock:
            self.pop(key, None)
            while len(self) >= self.size:
                del self[next(iter(self))]
            self[key] = value
        return value

    def made(self, key: Hashable, make: Callable[[], V]) -> V:
        """The value of a key. Calls `make` if there is none, and enters the result as the youngest entry."""
        value = self.get(key)
        return self.keep(key, make() if value is None else value)
