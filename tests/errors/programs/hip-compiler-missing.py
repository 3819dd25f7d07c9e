from unittest import mock

from tilelang.runtime import hip_compiler

with mock.patch.object(hip_compiler, "find_zig", lambda: None), mock.patch.object(hip_compiler, "load_rocm", lambda name: None):
    hip_compiler.compile_hsaco("", "gfx942")
