"""The dialect of the CPU: the common language."""

from tilelang.language.dialect import dialect

globals().update(dialect("cpu"))
