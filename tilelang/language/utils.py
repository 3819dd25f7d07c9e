"""Regions of buffers, as tile operations take them."""

from .regions import BufferSlice, whole_region

__all__ = ["BufferSlice", "whole_region"]
