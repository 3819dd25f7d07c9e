"""CUDA text of addresses in shared memory that bytes of a thread's vector select, as those of a histogram's counts."""

from __future__ import annotations

from tilelang.ir import AddressOf, Cast, Load, const, LOCAL

from ..device.memory import SHARED_SCOPES
from ..device.page import Expressions
from ..device.text import PREFIX, Text
from ..device.types import type_name


class SharedAddresses:
    """Takes each byte out of its word by itself, in one instruction.

    The compiler would shift and mask the word for the address: with the sum and the base these are four instructions at half
    rate for two.
    """

    def __init__(self, x: Expressions) -> None:
        self._x, self._inside = x, False
        self._address, self._cast = x.forms[AddressOf], x.forms[Cast]
        x.forms.update({AddressOf: self.address, Cast: self.cast})

    def address(self, e: AddressOf) -> Text:
        """Pointer to an element."""
        before, self._inside = self._inside, e.buffer.scope_name in SHARED_SCOPES
        try:
            return self._address(e)
        finally:
            self._inside = before

    def cast(self, e: Cast) -> Text:
        """A converted value."""
        v = e.value
        if not self._inside or not isinstance(v, Load) or v.dtype != "uint8" or v.buffer.scope_name != LOCAL or \
                len(v.indices) != 1 or v.buffer.size % 4 or not e.dtype.is_int or e.dtype.bits < 32:
            return self._cast(e)
        of = self._address(AddressOf(v.buffer, (const(0),)))[0]
        return f"({type_name(e.dtype)})tl::byte_of({of}, {self._x.top(v.indices[0])})", PREFIX
