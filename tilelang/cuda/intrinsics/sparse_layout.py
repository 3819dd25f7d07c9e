"""Sizes of 2:4 sparse metadata."""

from tilelang.language.sparse import e_factor as get_e_factor

__all__ = ["get_e_factor"]
