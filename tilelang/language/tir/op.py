"""Functions of scalars, by their names in the language."""

from tilelang.language import math as _math
from tilelang.language.raw import call_intrin
from tilelang.language.thread import call_extern, call_pure_extern

globals().update({n: getattr(_math, n) for n in _math.__all__})

__all__ = [*_math.__all__, "call_extern", "call_intrin", "call_pure_extern"]
