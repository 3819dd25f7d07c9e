"""The functions of tilelang.distributed as programs call them: each rank is a process, and rank 0 interprets their kernels."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_exchanges_experts_attention_and_blocks(ranks):
    pytest.importorskip("torch")
    run = subprocess.run([sys.executable, str(ROOT / "benchmarks" / "ranks_check.py"), "--simulate", "--ranks", str(ranks)],
                         capture_output=True, text=True, timeout=1200, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert run.returncode == 0 and run.stdout.count("error") == 8 * ranks and "WRONG" not in run.stdout, run.stdout + run.stderr
