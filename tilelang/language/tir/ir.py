"""Statements and scopes as the language has them, by their raw names."""

from tilelang.language.loops import grid, parallel, serial, unroll, vectorized
from tilelang.language.raw import Assert, Let, attr, bind, decl_buffer, launch_thread, let, meta_var
from tilelang.language.thread import Else, If_, Then, While_, buffer_store, evaluate

If, While = If_, While_

__all__ = ["Assert", "Else", "If", "Let", "Then", "While", "attr", "bind", "buffer_store", "decl_buffer", "evaluate", "grid",
           "launch_thread", "let", "meta_var", "parallel", "serial", "unroll", "vectorized"]
