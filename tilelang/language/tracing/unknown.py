"""The value of a statement that the first trace of an eager function cannot execute.

In that trace a T.const is a symbol: only the dimensions in which it stands are wanted.  Ordinary Python before the first
T.Kernel (`D ** -0.5`, `range(D)`) needs its number.  Such a statement is left out; what it assigns is UNKNOWN, and statements
that use it are left out too.  The second trace has the numbers and executes them all.
"""

from __future__ import annotations

from typing import Any, NoReturn


class NotKnown(Exception):
    """A statement uses what the first trace does not know."""


class Unknown:
    """Every use raises NotKnown."""

    def __getattr__(self, name: str) -> NoReturn:
        raise NotKnown(f"the attribute {name} of a value that depends on the number of a T.const")


def _raise(self: Any, *args: Any, **kwargs: Any) -> NoReturn:
    raise NotKnown("a value that depends on the number of a T.const")


for _name in """abs add and bool call contains divmod eq float floordiv format ge getitem gt hash index int invert iter le len
        lshift lt matmul mod mul ne neg next or pos pow radd rand rfloordiv rlshift rmatmul rmod rmul ror round rpow rrshift
        rshift rsub rtruediv rxor setitem str sub truediv xor""".split():
    setattr(Unknown, f"__{_name}__", _raise)

UNKNOWN = Unknown()
