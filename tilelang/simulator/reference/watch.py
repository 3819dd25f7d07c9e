"""What roles touch in a statement that they do one after another, and whether that shows.

    for r in range(tx // 64):        warp group 0 goes all its rounds, then warp group 1: threads of one must not find
        S[tx] = r                    what threads of the other store
        x += S[255 - tx]

Blocks on a device would need a barrier there that not all threads reach.  A place whose value stays the same shows nothing.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..faults import fault
from ..memory import Storage


class Watch:
    """Elements of memory by the roles that have read and changed them.  Roles are numbered from 0 to 62."""

    def __init__(self) -> None:
        self.readers: dict[int, np.ndarray] = {}  # by id of the storage: a bit for each role
        self.writer: dict[int, np.ndarray] = {}  # 1 + the role that changed a place last
        self.kept: list[Storage] = []

    def _of(self, store: Storage) -> tuple[np.ndarray, np.ndarray]:
        if id(store) not in self.readers:
            n = store.nbytes // store.granule
            self.readers[id(store)], self.writer[id(store)] = np.zeros(n, np.uint64), np.zeros(n, np.uint8)
            self.kept.append(store)
        return self.readers[id(store)], self.writer[id(store)]

    def load(self, role: int, store: Storage, at: np.ndarray, span: Any) -> None:
        """A role reads the granules `at`.  Raises sim-unsupported where another role has changed one."""
        readers, writer = self._of(store)
        readers[at] |= np.uint64(1 << role)
        if ((writer[at] != 0) & (writer[at] != role + 1)).any():
            raise _shows(store, span)

    def store(self, role: int, store: Storage, at: np.ndarray, changed: np.ndarray, span: Any) -> None:
        """A role stores in the granules `at`, one row an element, other values where changed.  Raises sim-unsupported where
        another role has read."""
        readers, writer = self._of(store)
        changed = np.broadcast_to(changed.reshape(*changed.shape, *(1,) * (at.ndim - changed.ndim)), at.shape)
        if (readers[at[changed]] & ~np.uint64(1 << role)).any():
            raise _shows(store, span)
        mine = at[changed | (writer[at] != 0)]
        writer[mine] = role + 1


def changes(old: np.ndarray, new: np.ndarray) -> np.ndarray:
    """Where a value is stored that was not there."""
    return (old != new) & ((old == old) | (new == new))


def _shows(store: Storage, span: Any) -> Exception:
    return fault("sim-unsupported", f"threads of several warp roles exchange values through `{store.name}` in a branch or loop "
                 "that not all threads run alike",
                 expected="a branch or loop that all threads run, or threads of one warp role",
                 found="threads of several warp groups that would need a barrier there", span=span,
                 hint="let all threads run the loop or branch and put the condition inside it")


__all__ = ["Watch", "changes"]
