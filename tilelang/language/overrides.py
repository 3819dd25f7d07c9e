"""Subscripts and operators of buffers and expressions are the language's own from its import on: nothing to install."""

__all__: list[str] = []
