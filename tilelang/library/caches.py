"""Caches of limited size for the results of pure functions: prepared answers to calls, and compiled kernels."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, TypeVar

from .arrays import facts

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
        return self.keep(key, make()) if value is None else value


@dataclass
class Prepared:
    """The prepared answer to calls with arrays of one form.

    run: computes, with arguments that the function decides. result, logs: allocate the outputs. scale: what the call may leave
    out. disjoint: the test of `out` against the other tensors, where `out` is given. passing: not kept for the next call, which
    may be tuned.
    """

    run: Callable[..., Any]
    result: Callable[[], Any] = lambda: None
    logs: Callable[[], Any] = lambda: None
    scale: float = 1.0
    disjoint: Any = None
    passing: bool = False


def known(answers: Cache[Prepared], arrays: tuple[Any, ...], options: tuple[Any, ...]) -> Prepared | None:
    """The answer for calls with such arrays (None where left out) and options, where there is one."""
    try:
        return answers.get((*map(facts, arrays), *options))
    except (AttributeError, TypeError, RuntimeError):  # no tensors: the checks say so; tensors of torch.func have no memory
        return None


def enter(answers: Cache[Prepared], arrays: tuple[Any, ...], options: tuple[Any, ...], answer: Prepared) -> Prepared:
    """Keep the answer for later calls with such arrays and options, if it is for them."""
    try:
        return answer if answer.passing else answers.keep((*map(facts, arrays), *options), answer)
    except (TypeError, RuntimeError):  # arguments without a key, as in `known`: such calls are prepared each time
        return answer
