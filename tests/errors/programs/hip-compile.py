from subprocess import CompletedProcess
from unittest import mock

from tilelang.runtime import hip_compiler

# A compiler that refuses every source: the text must not depend on the installed version.
refused = CompletedProcess([], 1, "", "kernel.hip:2:10: error: use of undeclared identifier 'scale'")
with mock.patch.object(hip_compiler, "find_zig", lambda: "zig"), mock.patch("subprocess.run", lambda *args, **options: refused):
    hip_compiler.compile_hsaco('extern "C" __attribute__((global)) void k(float* a) {\n  a[0] = scale(a[0]);\n}', "gfx942")
