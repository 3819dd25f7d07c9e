"""What is written to files does not depend on the locale."""

import os
import subprocess
import sys

PROGRAM = '''
import pathlib

import numpy as np
import tilelang
import tilelang.language as T


def larger(n):
    @T.prim_func
    def larger(A: T.Tensor((n,), "float32"), B: T.Tensor((n,), "float32")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(n):
                B[i] = A[i] + 1.0
            if T.get_thread_binding() == 0:
                T.print(A[0], msg="größe")

    return larger


made = tilelang.jit(out_idx=[-1], target="cpu", debug_root_path="debug")(larger)(32)
assert made(np.ones(32, np.float32)).sum() == 64
made.export_sources("kernel.ll", "host.ll")
made.print_source_code(file="printed.ll")
best = tilelang.autotune(configs=[{"n": 32}], warmup=1, rep=1)(tilelang.jit(out_idx=[-1], target="cpu")(larger))()
assert best(np.ones(32, np.float32)).sum() == 64
names = [p for p in pathlib.Path(".").rglob("*") if p.is_file() and p.suffix in (".ll", ".py", ".c")]
assert any("größe" in p.read_text(encoding="utf-8") for p in names), names
'''


def test_programs_with_other_letters_are_written_under_a_locale_of_ascii(tmp_path):
    path = tmp_path / "program.py"
    path.write_text(PROGRAM, encoding="utf-8")
    plain = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0",
             "TILELANG_CACHE_DIR": str(tmp_path / "cache")}
    done = subprocess.run([sys.executable, str(path)], cwd=tmp_path, env=plain, capture_output=True)
    assert done.returncode == 0, done.stderr.decode(errors="replace")
