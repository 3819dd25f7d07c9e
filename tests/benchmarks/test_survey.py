"""benchmarks/survey.py: records the requests of modules, scripts and tests, and says what stops them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
ROOT = Path(__file__).resolve().parents[2]
KERNEL = '''
import torch
import tilelang
import tilelang.language as T


@tilelang.jit(out_idx=[-1])
def scaled(n, threads, kept=64):
    @T.prim_func
    def main(X: T.Tensor((n,), "float32"), Y: T.Tensor((n * 2,), "float32")):
        with T.Kernel(T.ceildiv(n, 64), threads=threads) as bx:
            s = T.alloc_shared((kept,), "float32")
            for i in T.Parallel(64):
                s[i] = X[bx * 64 + i] * 2
            for i in T.Parallel(64):
                Y[bx * 64 + i] = s[i]
    return main
'''
SCRIPT = KERNEL + '''
if __name__ == "__main__":
    x = torch.randn(128, device="cuda")
    y = scaled(128, 64)(x)
    assert y.shape == (256,) and y.is_cuda
    scaled(128, 64, 1 << 20)(x)  # no block has 4 MiB of shared memory: recorded, and the script goes on
    torch.testing.assert_close(y[:128], x * 2)
    print(scaled(256, 64).get_profiler().do_bench())
'''
TEST = KERNEL + '''
def test_scaled():
    x = torch.randn(128, device="cuda")
    assert scaled(128, 64)(x).shape == (256,)

def test_more():
    raise KeyError("lost")
'''


def test_the_survey_counts_kernels_that_compile_and_names_what_stops_the_others(tmp_path):
    folder = tmp_path / "bodies"
    folder.mkdir()
    (folder / "script.py").write_text(SCRIPT)
    (folder / "test_kernels.py").write_text(TEST)
    (folder / "stops.py").write_text("import tilelang\nimport no_such_module\n")
    (folder / "other.py").write_text("raise SystemExit(3)  # names nothing of ours\n")
    out = tmp_path / "survey.json"
    done = subprocess.run([sys.executable, str(ROOT / "benchmarks" / "survey.py"), str(folder), "--json", str(out)],
                          capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    row = json.loads(out.read_text())["packages"][0]
    assert (row["files"], row["whole"], row["kernels"], row["compiled"]) == (3, 1, 4, 3)
    causes = " ".join(row["causes"])
    assert "no_such_module" in causes and "lost" in causes and "shared" in causes
