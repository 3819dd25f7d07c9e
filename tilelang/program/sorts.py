"""Text of sorts along an axis of a tile: the best elements one after another, or a bitonic network in shared memory.

Elements are ordered by integer keys, the greatest first, and by their index where keys are equal.
"""

from __future__ import annotations

from typing import Protocol

from .expr import Axis, Tensor
from .tiles import Tile


class Writer(Protocol):
    """What emit.KernelWriter offers."""

    dummy: bool
    row: str

    def say(self, line: str, outside: bool = False) -> None: ...
    def new_buffer(self, name: str, shape: tuple[int, ...], axes: tuple[Axis, ...], dtype: str, scope: str) -> Tile: ...
    def size(self, a: Axis) -> int: ...
    def unused(self, name: str) -> str: ...


def _rows(w: Writer, kept: tuple[Axis, ...]) -> tuple[list[str], list[int]]:
    """Loop variables and extents of the axes that are not sorted."""
    names, sizes = [a.name for a in kept], [w.size(a) for a in kept]
    return ([w.row, *names], [1, *sizes]) if w.dummy or not names else (names, sizes)


def selected(w: Writer, t: Tensor, keys: Tile, kept: tuple[Axis, ...], along: Axis, place: Axis) -> Tile:
    """Each step finds the best element behind the one before: its key first, then the least index that has the key."""
    names, sizes = _rows(w, kept)
    n, at = w.size(along), ", ".join(names)
    order = w.new_buffer("order", (*sizes, w.size(place)), (*kept, place), "int32", "shared")
    best, found = (w.new_buffer(x, tuple(sizes), kept, "int32", "fragment") for x in ("best", "found"))
    left, index = (w.new_buffer(x, (*sizes, n), (*kept, along), "int32", "fragment") for x in ("left", "index"))
    shape, j = ", ".join(map(str, (*sizes, n))), along.name
    w.say(f"T.fill({best.name}, {2**31 - 1})")
    w.say(f"T.fill({found.name}, -1)")
    w.say(f"for {place.name} in T.serial({w.size(place)}):")
    w.say(f"    for {at}, {j} in T.Parallel({shape}):")
    behind = (f"{keys.name}[{at}, {j}] < {best.name}[{at}] or {keys.name}[{at}, {j}] == {best.name}[{at}] and "
              f"{j} > {found.name}[{at}]")
    w.say(f"        {left.name}[{at}, {j}] = T.if_then_else({behind}, {keys.name}[{at}, {j}], {-2**31})")
    w.say(f"        {index.name}[{at}, {j}] = T.if_then_else({behind}, {j}, {n - 1})")
    w.say(f"    T.reduce_max({left.name}, {best.name}, dim={len(sizes)})")
    w.say(f"    for {at}, {j} in T.Parallel({shape}):")
    w.say(f"        {index.name}[{at}, {j}] = T.if_then_else({left.name}[{at}, {j}] == {best.name}[{at}], "
          f"{index.name}[{at}, {j}], {n - 1})")
    w.say(f"    T.reduce_min({index.name}, {found.name}, dim={len(sizes)})")
    w.say(f"    for {at} in T.Parallel({', '.join(map(str, sizes))}):")
    w.say(f"        {order.name}[{at}, {place.name}] = {found.name}[{at}]")
    return order


def sorted_by_network(w: Writer, t: Tensor, keys: Tile, kept: tuple[Axis, ...], along: Axis, place: Axis) -> Tile:
    """A bitonic network over the next power of two; what is added has the least key and the last indices."""
    names, sizes = _rows(w, kept)
    n, at = w.size(along), ", ".join(names)
    steps = max(1, (n - 1).bit_length())
    full = 1 << steps
    key = w.new_buffer("sorted", (*sizes, full), (*kept, place), "int32", "shared")
    order = w.new_buffer("order", (*sizes, full), (*kept, place), "int32", "shared")
    j = along.name
    high, low, first, last, wrong = (w.unused(x) for x in ("size", "stride", "first", "last", "wrong"))
    a, b, x, y = (w.unused(v) for v in ("key_a", "key_b", "at_a", "at_b"))
    w.say(f"for {at}, {j} in T.Parallel({', '.join(map(str, (*sizes, full)))}):")
    w.say(f"    {key.name}[{at}, {j}] = {-2**31}")
    w.say(f"    {order.name}[{at}, {j}] = {j}")
    w.say(f"for {at}, {j} in T.Parallel({', '.join(map(str, (*sizes, n)))}):")
    w.say(f"    {key.name}[{at}, {j}] = {keys.name}[{at}, {j}]")
    w.say(f"for {high} in T.serial({steps}):")
    w.say(f"    for {low} in T.serial({high} + 1):")
    w.say(f"        for {at}, {j} in T.Parallel({', '.join(map(str, (*sizes, full // 2)))}):")
    stride = f"(1 << ({high} - {low}))"
    pad = " " * 12
    w.say(f"{pad}{first} = {j} // {stride} * 2 * {stride} + {j} % {stride}")
    w.say(f"{pad}{last} = {first} + {stride}")
    for name, buffer, where in ((a, key, first), (b, key, last), (x, order, first), (y, order, last)):
        w.say(f"{pad}{name} = {buffer.name}[{at}, {where}]")
    w.say(f"{pad}{wrong} = T.if_then_else({a} < {b} or {a} == {b} and {x} > {y}, 1, 0) != ({first} >> ({high} + 1)) % 2")
    for buffer, p, q in ((key, a, b), (order, x, y)):
        w.say(f"{pad}{buffer.name}[{at}, {first}] = T.if_then_else({wrong}, {q}, {p})")
        w.say(f"{pad}{buffer.name}[{at}, {last}] = T.if_then_else({wrong}, {p}, {q})")
    return order
