from unittest import mock

from tilelang.runtime import hip_compiler

with mock.patch.object(hip_compiler, "find_zig", lambda: None):
    hip_compiler.compile_hsaco("", "gfx942")
