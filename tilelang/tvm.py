"""`import tilelang.tvm`: the names of compat.tvm under the name that older programs import them by."""

import sys
from importlib import import_module

sys.modules[__name__] = import_module("tilelang.compat.tvm")  # by name, as the package does: nothing of ours needs it
