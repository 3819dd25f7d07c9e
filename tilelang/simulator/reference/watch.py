"""Detects statements whose result depends on the order in which warp roles execute them.

    for r in range(tx // 64):        warp group 0 runs all its iterations, then warp group 1.  Threads of one warp group
        S[tx] = r                    must not read what threads of the other store.
        x += S[255 - tx]

A device would need a barrier here that not all threads reach.  A store that does not change the value has no effect on
others and is ignored.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..faults import fault
from ..memory import Storage


class Watch:
    """Accesses to memory elements by warp role: who has read and who has changed them.  Warp roles have numbers 0 to 62."""

    def __init__(self) -> None:
        self.readers: dict[int, np.ndarray] = {}  # by id of the storage: one bit for each warp role
        self.writer: dict[int, np.ndarray] = {}  # 1 + the warp role that changed the element last
        self.kept: list[Storage] = []

    def _of(self, store: Storage) -> tuple[np.ndarray, np.ndarray]:
        if id(store) not in self.readers:
            n = store.nbytes // store.granule
            self.readers[id(store)], self.writer[id(store)] = np.zeros(n, np.uint64), np.zeros(n, np.uint8)
            self.kept.append(store)
        return self.readers[id(store)], self.writer[id(store)]

    def load(self, warp_role: int, store: Storage, at: np.ndarray, span: Any) -> None:
        """A warp role reads the granules `at`.  Raises sim-unsupported where another warp role has changed one."""
        readers, writer = self._of(store)
        readers[at] |= np.uint64(1 << warp_role)
        if ((writer[at] != 0) & (writer[at] != warp_role + 1)).any():
            raise _shows(store, span)

    def store(self, warp_role: int, store: Storage, at: np.ndarray, changed: np.ndarray, span: Any) -> None:
        """A warp role stores to the granules `at`, one row for each element; `changed` marks those whose value changes.

        Raises sim-unsupported where another warp role has read a changed one.
        """
        readers, writer = self._of(store)
        changed = np.broadcast_to(changed.reshape(*changed.shape, *(1,) * (at.ndim - changed.ndim)), at.shape)
        if (readers[at[changed]] & ~np.uint64(1 << warp_role)).any():
            raise _shows(store, span)
        mine = at[changed | (writer[at] != 0)]
        writer[mine] = warp_role + 1


def changes(old: np.ndarray, new: np.ndarray) -> np.ndarray:
    """Where a store changes the value."""
    return (old != new) & ((old == old) | (new == new))


def _shows(store: Storage, span: Any) -> Exception:
    return fault("sim-unsupported", f"threads of several warp roles exchange values through `{store.name}` in a branch or loop "
                 "that not all threads run alike", expected="a branch or loop that all threads run, or threads of one warp "
                 "role", found="threads of several warp groups that would need a barrier there", span=span,
                 hint="let all threads run the loop or branch and put the condition inside it")
