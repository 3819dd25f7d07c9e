"""Values of few bits taken out of a storage element that holds several, as older dequantising scripts do it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tilelang import language as T

Unpack = Callable[[int, Any, Any, Any], Any]


def _field(bits: int, value: Any, place: Any) -> Any:
    """Bits [place * bits, (place + 1) * bits) of a storage element as an int32 >= 0."""
    return (T.cast(value, "int32") >> (place * bits)) & ((1 << bits) - 1)


def _tir_packed_to_unsigned_convert(storage_type: str = "uint", storage_nbit: int = 8) -> Unpack:
    """f(bits, value, place, dtype): field `place` of a storage element as an unsigned number of dtype."""

    def convert(nbit: int, val: Any, pos: Any, dtype: Any) -> Any:
        return T.cast(_field(nbit, val, pos), dtype)

    return convert


def _tir_packed_to_signed_convert(storage_type: str = "uint", storage_nbit: int = 8) -> Unpack:
    """f(bits, value, place, dtype): the field less 2 ** (bits - 1): offset binary."""

    def convert(nbit: int, val: Any, pos: Any, dtype: Any) -> Any:
        return T.cast(_field(nbit, val, pos) - (1 << (nbit - 1)), dtype)

    return convert


def _tir_packed_int_to_int_convert(storage_type: str = "uint", storage_nbit: int = 8) -> Unpack:
    """f(bits, value, place, dtype): the field as a number in two's complement."""

    def convert(nbit: int, val: Any, pos: Any, dtype: Any) -> Any:
        sign = 1 << (nbit - 1)
        return T.cast((_field(nbit, val, pos) ^ sign) - sign, dtype)

    return convert


__all__ = ["_tir_packed_int_to_int_convert", "_tir_packed_to_signed_convert", "_tir_packed_to_unsigned_convert"]
