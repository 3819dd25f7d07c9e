"""A swizzle needs rows and columns."""

from tilelang.layout import swizzled_layout

swizzled_layout((64,), 16)
