"""Disassembles cubins with nvdisasm, if it is installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile

from tilelang.errors import error, register

from .nvrtc import _system_roots, _wheel_roots

register("nvdisasm-missing", RuntimeError, "SASS was asked for and nvdisasm is not installed", expected="a working nvdisasm")


def find_nvdisasm() -> str | None:
    """Path of nvdisasm: nvidia wheels, CUDA toolkits, PATH."""
    for root, _ in _wheel_roots() + _system_roots():
        path = os.path.join(root, "bin", "nvdisasm")
        if os.access(path, os.X_OK):
            return path
    return shutil.which("nvdisasm")


def disassemble(cubin: bytes, encodings: bool = False) -> str:
    """SASS text of a cubin.  encodings: adds the encoding of each instruction as a comment.

    Raises RuntimeError when nvdisasm is missing or rejects the cubin.
    """
    exe = find_nvdisasm()
    if exe is None:
        raise error("nvdisasm-missing", "nvdisasm was not found", found="none", hint="pip install nvidia-cuda-nvdisasm")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as f:
        f.write(cubin)
        f.flush()
        done = subprocess.run([exe, "-c", *["-hex"] * encodings, f.name], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise error("nvdisasm-missing", f"nvdisasm failed: {done.stderr.strip().replace(f.name, 'the cubin')}",
                    found=f"one that ends with {done.returncode}",
                    hint="use an nvdisasm at least as new as the NVRTC that made the cubin")
    return done.stdout
