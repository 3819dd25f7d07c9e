"""Addresses as numbers: pointers made of integers, and addresses of buffer elements.

Programs may keep addresses in tensors (T.Tensor(shape, T.ptr)) and make tensors of them inside the kernel.  The numbers
are addresses of the caller's process.  An address inside an array that was passed refers to the simulator's copy of it.
Storage whose address the program takes keeps its real address.  Any other address must be memory of this process, which
is read and written in place.  Accesses through addresses are checked for existence and alignment of every element, but
not for races and reads of unwritten memory.
"""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import numpy as np

from tilelang.ir import Buffer, Var, numpy_dtype
from tilelang.ir.evaluate import Value

from .faults import fault
from .memory import Storage

LINE = 16  # alignment of vector accesses, in bytes


class Followed(NamedTuple):
    """A tensor made of an address: whether it is written, and where."""

    buffer: Buffer
    write: bool
    span: Any


class Window(Storage):
    """Memory that contains the accessed elements, starting at a multiple of LINE.  Only those elements may be accessed."""

    __slots__ = ()

    def __init__(self, name: str, start: int, nbytes: int) -> None:
        self.name, self.granule, self.lanes, self.nbytes = name, LINE, 1, -(-nbytes // LINE) * LINE
        raw = (ctypes.c_uint8 * self.nbytes).from_address(start)
        self.raw = np.frombuffer(raw, np.uint8).reshape(1, -1)  # type: ignore[call-overload]
        self.known, self.guard, self._views = None, None, {}


class _Range:
    """Addresses from start to end and the storage bytes they refer to.  gaps: some of them belong to no array."""

    __slots__ = ("start", "end", "storage", "shift", "gaps", "first")

    def __init__(self, start: int, nbytes: int, storage: Storage, at: int = 0, gaps: bool = False) -> None:
        self.start, self.end, self.storage, self.gaps = start, start + nbytes, storage, gaps
        self.shift = _home(storage) + at - start
        self.first = start - at  # address of the storage's first byte


def _home(s: Storage) -> int:
    return int(s.raw.ctypes.data)


def room(nbytes: int, like: int) -> np.ndarray:
    """Zeroed bytes, shape (1, nbytes), with the same offset from a multiple of LINE as the address `like`."""
    raw = np.zeros((1, nbytes + 2 * LINE), np.uint8)
    skip = (like - int(raw.ctypes.data)) % LINE
    return raw[:, skip:skip + nbytes]


class Addresses:
    """The addresses of one run."""

    def __init__(self) -> None:
        self.given: list[_Range] = []  # arrays of the caller
        self.taken: dict[int, _Range] = {}  # storage whose address the program has taken, by its id
        self._process: dict[bool, list[np.ndarray]] = {}  # this process's memory (starts, ends), by need to write it

    def add(self, start: int, nbytes: int, storage: Storage, at: int, gaps: bool) -> None:
        """Add an array of the caller that starts at `start`; its copy starts at byte `at` of `storage`."""
        self.given.append(_Range(start, nbytes, storage, at, gaps))

    def of(self, storage: Storage) -> int:
        """The address of a storage's first byte, as the program sees it.  From then on all of it counts as written."""
        for r in self.given:
            if r.storage is storage:
                return r.first
        own = self.taken.get(id(storage))
        if own is None or own.start != _home(storage):
            own = self.taken[id(storage)] = _Range(_home(storage), storage.nbytes * storage.lanes, storage)
        storage.known = None
        return own.start

    def start_of(self, v: Var, held: Any) -> Value:
        """The address of the storage that the slot of v holds; of a per-thread array, one for each lane."""
        if isinstance(held, Storage):
            start = self.of(held)
            return start + np.arange(held.lanes) * held.nbytes if held.lanes > 1 else start
        raise fault("sim-unsupported", f"the address of {v.name} as a value", expected="the address of memory",
                    found=f"`{v.name}`", span=v.span)

    def follow(self, pointer: Value, linear: np.ndarray, need: Any, vector: bool, count: int,
               tensor: Followed) -> tuple[Storage, np.ndarray]:
        """The storage that a tensor made from the address `pointer` lies in, and the numbers of its elements there.

        pointer: one address, or one for each lane.  linear: for each access, the number of its first element, counted from
        the address; the access covers `count` elements.  need: which accesses are executed.
        Both have shape () or (lanes,), or one that broadcasts to it, with one more axis for vectors.
        """
        start = np.asarray(pointer).astype(np.int64)
        b, write, span = tensor
        item = numpy_dtype(b.dtype).itemsize
        at = (start[:, None] if vector and start.ndim else start) + linear * item
        at = np.broadcast_to(at, np.broadcast_shapes(at.shape, need.shape))
        return self.window(at, need, item * count, item, write, b.name, span)

    def window(self, at: np.ndarray, need: np.ndarray, width: int, item: int, write: bool, what: str,
               span: Any) -> tuple[Storage, np.ndarray]:
        """(memory, element numbers in it) of elements of `item` bytes at the addresses `at`.

        need: which of them are accessed, `width` bytes each; the others get number 0.  Raises sim-address, sim-misaligned.
        """
        need = np.broadcast_to(need, at.shape)
        out = np.zeros(at.shape, np.int64)
        wanted = at[need]
        if not wanted.size:
            return Storage(what, LINE, LINE, known=True), out
        off = wanted % item
        if off.any():
            raise fault("sim-misaligned", f"{what}: an element of {item} bytes at {_hex(wanted[off != 0][0])}",
                        expected=f"a multiple of {item}", found=_hex(wanted[off != 0][0]), span=span,
                        hint="an address made of an integer is a multiple of the element's size")
        real = self._real(wanted, width, write, what, span)
        low = int(real.min()) // LINE * LINE
        out[need] = (real - low) // item
        return Window(what, low, int(real.max()) + width - low), out

    def _real(self, at: np.ndarray, width: int, write: bool, what: str, span: Any) -> np.ndarray:
        real, left = np.zeros_like(at), np.ones(at.shape, bool)
        for r in (*self.given, *self.taken.values()):
            inside = left & (at + width > r.start) & (at < r.end)
            if not inside.any():
                continue
            if r.gaps:
                raise fault("sim-address", f"{what}: {_hex(at[inside][0])} lies inside {r.storage.name}, which has gaps "
                            "between its rows", expected="an address of an array without gaps", found=_hex(at[inside][0]),
                            span=span, hint="pass that tensor contiguous, or leave it out of the arguments")
            cut = inside & ((at < r.start) | (at + width > r.end))
            if cut.any():
                raise fault("sim-address", f"{what}: {width} bytes at {_hex(at[cut][0])} cross an end of {r.storage.name}",
                            expected=f"{_hex(r.start)} to {hex(r.end)}", found=_hex(at[cut][0]), span=span)
            real[inside] = at[inside] + r.shift
            left &= ~inside
        if left.any():
            self._require(at[left], width, write, what, span)
            real[left] = at[left]
        return real

    def _require(self, at: np.ndarray, width: int, write: bool, what: str, span: Any) -> None:
        """Reject addresses that are no memory of this process."""
        for again in (False, True):  # memory may have been mapped since the list was read
            if again or write not in self._process:
                self._process[write] = _mapped(write)
            starts, ends = self._process[write]
            if not starts.size:
                return  # this system has no list of mapped memory
            k = np.searchsorted(starts, at, "right") - 1
            bad = (k < 0) | (at + width > ends[k])
            if not bad.any():
                return
        worst = int(at[bad][0])
        about = "the null pointer is followed" if worst < 4096 else \
            f"{_hex(worst)} is no memory that this process may {'write' if write else 'read'}"
        raise fault("sim-address", f"{what}: {about}", expected="memory of this process", found=_hex(worst), span=span)


def _hex(x: Any) -> str:
    return f"address {hex(int(x))}"


def _mapped(write: bool) -> list[np.ndarray]:
    """First bytes and ends of this process's memory, adjacent ranges merged; empty where the system has no such list."""
    spans: list[list[int]] = []
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as lines:
            for line in lines:
                where, mode = line.split(maxsplit=2)[:2]
                if mode[0] != "r" or write and mode[1] != "w":
                    continue
                start, end = (int(x, 16) for x in where.split("-"))
                if end >= 1 << 63:
                    continue
                if spans and spans[-1][1] == start:
                    spans[-1][1] = end
                else:
                    spans.append([start, end])
    except OSError:
        spans = []
    table = np.array(spans, np.int64).reshape(-1, 2)
    return [table[:, 0], table[:, 1]]
