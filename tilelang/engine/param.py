"""KernelParam and CompiledArtifact under their public names."""

from tilelang.jit.artifact import CompiledArtifact
from tilelang.runtime.params import KernelParam

__all__ = ["CompiledArtifact", "KernelParam"]
