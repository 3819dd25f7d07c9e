"""The builder that a traced function writes its program into."""

from tilelang.language.builder import Builder, Emitted
from tilelang.language.state import current

BaseBuilder = Builder

__all__ = ["BaseBuilder", "Builder", "Emitted", "current"]
