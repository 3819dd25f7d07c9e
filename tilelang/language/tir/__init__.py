"""Raw expressions and statements of the language: `ir` statements, `op` functions."""

from . import ir, op

__all__ = ["ir", "op"]
