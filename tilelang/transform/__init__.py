"""Passes: programs in, programs out.  `pipeline.py` is the one list of them, read top to bottom."""

from .framework.config import PassConfigKey
from .framework.scope import PassContext, get_pass_context, simplify_prim_func

__all__ = ["PassConfigKey", "PassContext", "get_pass_context", "simplify_prim_func"]
