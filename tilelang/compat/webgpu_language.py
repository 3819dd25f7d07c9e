"""The dialect of WebGPU: the common language."""

from tilelang.language.dialect import dialect

globals().update(dialect("webgpu"))
