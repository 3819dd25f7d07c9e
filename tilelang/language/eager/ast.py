"""The rewriting of a function's source before it is traced."""

from tilelang.language.ast_rewrite import rewrite_function

mutate = rewrite_function

__all__ = ["mutate", "rewrite_function"]
