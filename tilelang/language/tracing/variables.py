"""Variables (T.alloc_var) in attributes and containers: `obj.v[0]` reads the variable, where a plain name reads as `v`."""

from __future__ import annotations

from typing import Any

from tilelang.errors import facts
from tilelang.ir import Const, Load
from tilelang.ir.buffer import element_of_load

from .state import current, error


def is_held(value: Any) -> bool:
    """Whether value is a variable of the program being traced that is not bound to a name of the function."""
    b = current()
    return b is not None and isinstance(value, Load) and id(value) in b.handles and id(value) not in b.named


@element_of_load.provide  # also in Python code that is not rewritten: properties, plain helpers
def element(value: Load, key: Any) -> Load:
    """`value[key]` of a held variable, whose only index is 0.  Raises TypeError, index-count."""
    if not is_held(value):
        raise facts(TypeError("'Load' object is not subscriptable"), "a buffer, or a variable in an attribute or container",
                    f"`{value!r}`")
    for k in key if isinstance(key, tuple) and len(key) == 1 else (key,):
        k = k.value if isinstance(k, Const) else k
        if not isinstance(k, int) or isinstance(k, bool) or k not in (0, -1):
            raise error("index-count", f"`{value.buffer.name}` is a variable: its only element is 0",
                        expected="the index 0", found=repr(key), hint="T.alloc_local makes an array")
    return value
