"""Names that a graph of torch.compile keeps in place of kernels, decorated functions and other objects of Python."""

from __future__ import annotations

import itertools
from typing import Any
from weakref import WeakValueDictionary

PLAIN = (int, float, str, type(None), tuple, list)  # arguments that a graph keeps as they are, besides tensors
HELD = "object of Python"  # (HELD, address) stands for any other

owners: WeakValueDictionary[str, Any] = WeakValueDictionary()  # kernels and decorated functions by name
_serial = itertools.count()


def named(owner: Any) -> str:
    """A name for a kernel or a decorated function."""
    name = f"tilelang.{next(_serial)}"
    owners[name] = owner
    return name
