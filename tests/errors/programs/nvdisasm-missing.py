from unittest import mock

from tilelang.runtime import sass

with mock.patch.object(sass, "find_nvdisasm", lambda: None):
    sass.disassemble(b"")
