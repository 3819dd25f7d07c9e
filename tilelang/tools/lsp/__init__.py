"""A language server for editors: errors as one types, hover, completion, inlay hints, definitions, pages of generated code.

    tilelang-lsp                     # speaks the protocol on standard input and output; pip install 'tilelang-py[lsp]'

server.py answers the editor and runs nothing of the user's.  worker.py analyses a text in a process that has a limit of time
and no files or network; analysis.py is what runs there.
"""
