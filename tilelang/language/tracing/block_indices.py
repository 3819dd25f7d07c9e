"""The indices of a block in a grid of several dimensions, as `with T.Kernel(...) as ...` gives them."""

from __future__ import annotations

from typing import Any, NoReturn

from .state import error


class BlockIndices(list[Any]):
    """A list of indices, to be unpacked.  Arithmetic on it is an error that says so."""

    def __tilelang_expr__(self) -> NoReturn:
        names = ", ".join(("bx", "by", "bz")[:len(self)])
        raise error("type", f"a block of this grid has {len(self)} indices, one is needed here", expected="one block index",
                    found=f"a list of {len(self)}", hint=f"name each of them: with T.Kernel(...) as ({names})")


def _one_is_needed(self: BlockIndices, *_: Any) -> NoReturn:
    self.__tilelang_expr__()


for _name in """add and floordiv ge gt le lshift lt mod mul or radd rfloordiv rmod rmul rshift rsub rtruediv sub truediv
        xor""".split():
    setattr(BlockIndices, f"__{_name}__", _one_is_needed)
