import sys
from unittest import mock

from tilelang.runtime import host_engine

with mock.patch.dict(sys.modules, {"llvmlite.binding": None}):
    host_engine._Llvm()
